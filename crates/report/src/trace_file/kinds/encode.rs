//! Converts what is seen to the messages of a chunk, with the tables that they refer to.

mod gc;
mod gvl;

pub(in crate::trace_file) use gc::span_of;
pub(in crate::trace_file) use gvl::{gap, so_far};

use std::{collections::HashMap, os::unix::ffi::OsStrExt as _, sync::Arc};

use prost::Message as _;

use super::wire;
use crate::{
    ledger::Ledger,
    model::{
        Container, Image, Origin, Process,
        stack::{Frame, Stack},
    },
    trace_file::{CHUNK_BYTES, CHUNK_WORDS, codes::Code, text_words},
};

/// A chunk that is being filled.
#[derive(Debug, Default)]
pub(in crate::trace_file) struct Filling {
    chunk: wire::Chunk,
    texts: HashMap<Arc<str>, u32>,
    /// By address, which is not reused while the frame is kept here.
    frames: HashMap<*const Frame, (Arc<Frame>, u32)>,
    /// By leaf and caller.
    stacks: HashMap<(u32, u32), u32>,
    images: Vec<Arc<Image>>,
    /// The latest version of each process, and its index.
    processes: HashMap<u32, (Process, u32)>,
    /// Approximate size of the chunk, bytes.
    bytes: usize,
    /// Words to which its tables and entries expand when they are read.
    words: usize,
}

/// Size of a message in a list, in bytes: the message, its tag and its length.
fn listed(message: &impl prost::Message) -> usize {
    message.encoded_len() + 4
}

impl Filling {
    /// Whether the chunk has reached its target size. Only half of the maximum number of words is used, because one entry
    /// can have many stacks.
    pub(in crate::trace_file) fn is_full(&self) -> bool {
        self.bytes >= CHUNK_BYTES || self.words >= CHUNK_WORDS / 2
    }

    /// Number of its entries.
    pub(in crate::trace_file) fn entries(&self) -> u64 {
        self.chunk.entries.len() as u64
    }

    /// Whether it has no entries.
    pub(in crate::trace_file) fn is_empty(&self) -> bool {
        self.chunk.entries.is_empty()
    }

    /// Takes the chunk, and starts an empty one.
    pub(in crate::trace_file) fn take(&mut self) -> Vec<u8> {
        std::mem::take(self).chunk.encode_to_vec()
    }

    /// Adds an entry.
    pub(in crate::trace_file) fn push(&mut self, process: Option<u32>, what: wire::What) {
        let entry = wire::Entry { process, what: Some(what) };
        self.bytes += listed(&entry);
        self.chunk.entries.push(entry);
    }

    /// Accounts for the additional words that an entry expands to when it is read.
    pub(in crate::trace_file) fn expands_by(&mut self, words: usize) {
        self.words += words;
    }

    /// Adds a process or image that is not traced.
    pub(in crate::trace_file) fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) {
        let (path_text, reason_text) = (self.text(path), self.text(reason));
        self.push(None, wire::What::Refused(Box::new(wire::Refused { pid, path_text, reason_text })));
    }

    pub(in crate::trace_file) fn text(&mut self, text: &str) -> u32 {
        self.words += text_words(text);
        if let Some(&index) = self.texts.get(text) {
            return index;
        }
        let index = self.chunk.texts.len() as u32;
        self.bytes += text.len() + 4;
        self.chunk.texts.push(text.to_owned());
        self.texts.insert(Arc::from(text), index);
        index
    }

    fn optional(&mut self, text: Option<&str>) -> Option<u32> {
        text.map(|text| self.text(text))
    }

    fn list<T: AsRef<str>>(&mut self, texts: &[T]) -> Vec<u32> {
        texts.iter().map(|text| self.text(text.as_ref())).collect()
    }

    fn pair(&mut self, name: &str, value: &str) -> wire::Pair {
        wire::Pair { name_text: self.text(name), value_text: self.text(value) }
    }

    fn frame(&mut self, frame: &Arc<Frame>) -> u32 {
        if let Some((_, index)) = self.frames.get(&Arc::as_ptr(frame)) {
            return *index;
        }
        let Frame { kind, name, file, line, first_line, address } = &**frame;
        let made = wire::Frame {
            kind: kind.code(),
            name_text: self.text(name),
            file_text: self.optional(file.as_deref()),
            line: *line,
            first_line: *first_line,
            address: *address,
        };
        let index = self.chunk.frames.len() as u32;
        self.bytes += listed(&made);
        self.chunk.frames.push(made);
        self.frames.insert(Arc::as_ptr(frame), (Arc::clone(frame), index));
        index
    }

    /// Number of a stack.
    pub(in crate::trace_file) fn stack(&mut self, stack: &Stack) -> u32 {
        self.words += stack.len();
        let mut caller = 0;
        for frame in stack.iter().rev() {
            let leaf = self.frame(frame);
            let next = self.chunk.leaves.len() as u32 + 1;
            caller = *self.stacks.entry((leaf, caller)).or_insert_with(|| {
                self.chunk.leaves.push(leaf);
                self.chunk.callers.push(caller);
                self.bytes += 6;
                next
            });
        }
        caller
    }

    fn image(&mut self, image: &Arc<Image>) -> u32 {
        let known = self.images.iter().position(|known| Arc::ptr_eq(known, image) || known == image);
        if let Some(at) = known {
            return at as u32;
        }
        let Image { index, path, version, build_id, stat_keys, heap_keys, method, probes, gvl, has_symbols } =
            &**image;
        let made = wire::Image {
            index: *index,
            path: path.as_os_str().as_bytes().to_vec(),
            major: version.major.into(),
            minor: version.minor.into(),
            teeny: version.teeny.into(),
            build_id_text: self.optional(build_id.as_deref()),
            stat_key_texts: self.list(stat_keys),
            heap_key_texts: self.list(heap_keys),
            method: method.code(),
            probes: *probes as u64,
            gvl: gvl.map(gvl::coverage),
            has_symbols: *has_symbols,
        };
        self.bytes += listed(&made);
        self.chunk.images.push(made);
        self.images.push(Arc::clone(image));
        self.images.len() as u32 - 1
    }

    /// Index of a process.
    pub(in crate::trace_file) fn process(&mut self, process: &Process) -> u32 {
        if let Some((known, index)) = self.processes.get(&process.pid)
            && known == process
        {
            return *index;
        }
        let Process {
            pid,
            ns_pid,
            ppid,
            comm,
            cmdline,
            start_ts,
            uid,
            hostname,
            container,
            gc_env,
            gc_env_refused,
            origin,
            image,
        } = process;
        let made = wire::Process {
            pid: *pid,
            ns_pid: *ns_pid,
            ppid: *ppid,
            comm_text: self.text(comm),
            cmdline: cmdline.as_ref().map(|words| wire::Texts { texts: self.list(words) }),
            start_ts: *start_ts,
            uid: *uid,
            hostname_text: self.optional(hostname.as_deref()),
            container: Some(self.container(container)),
            gc_env: gc_env.iter().flatten().map(|(name, value)| self.pair(name, value)).collect(),
            gc_env_refused_texts: self.list(gc_env_refused),
            origin: Some(self.origin(origin)),
            image: self.image(image),
            has_unknown_environment: gc_env.is_none(),
        };
        let index = self.chunk.processes.len() as u32;
        self.bytes += listed(&made);
        self.chunk.processes.push(made);
        self.processes.insert(process.pid, (process.clone(), index));
        index
    }

    fn container(&mut self, container: &Container) -> wire::Container {
        let Container { id, runtime, name, pod_uid, pod, namespace, unit, cgroup } = container;
        wire::Container {
            id_text: self.optional(id.as_deref()),
            runtime: runtime.map(Code::code),
            name_text: self.optional(name.as_deref()),
            pod_uid_text: self.optional(pod_uid.as_deref()),
            pod_text: self.optional(pod.as_deref()),
            namespace_text: self.optional(namespace.as_deref()),
            unit_text: self.optional(unit.as_deref()),
            cgroup_text: self.optional(cgroup.as_deref()),
        }
    }

    fn origin(&mut self, origin: &Origin) -> wire::Origin {
        let Origin { service, container, pod, namespace, attributes } = origin;
        wire::Origin {
            service_text: self.text(service),
            container_text: self.optional(container.as_deref()),
            pod_text: self.optional(pod.as_deref()),
            namespace_text: self.optional(namespace.as_deref()),
            attributes: attributes.iter().map(|(name, value)| self.pair(name, value)).collect(),
        }
    }

    pub(in crate::trace_file) fn account(&mut self, ledger: &Ledger) -> wire::Account {
        let mut counts = |counts: Vec<(&'static str, u64)>| {
            let counted = counts.into_iter().filter(|(_, count)| *count > 0);
            counted.map(|(name, count)| wire::Count { name_text: self.text(name), count }).collect()
        };
        wire::Account {
            has_kernel: ledger.kernel.is_some(),
            kernel: counts(ledger.kernel_counters()),
            user: counts(ledger.user_counters()),
            extent: ledger.extent.code(),
        }
    }
}
