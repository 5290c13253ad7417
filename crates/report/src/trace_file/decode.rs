//! From the messages of a chunk to what was seen. Every index and number is checked.

mod bounds;
mod gc;
mod gvl;

use std::{
    collections::HashSet,
    ffi::OsString,
    os::unix::ffi::OsStringExt as _,
    sync::{Arc, LazyLock},
};

use gctrace_common::stats::Counter;
use prost::Message as _;

use super::{Invalid, STACK_FRAMES, codes::Code, wire};
use crate::{
    aggregate::endpoint::METHODS,
    ledger::{Ledger, UserCounts},
    model::{
        Container, Image, Origin, Process,
        gvl::GvlGap,
        stack::{Frame, Stack},
    },
    ruby::{RubyVersion, stat},
};

pub(super) use gc::Owned;

/// Words that the model has as constants.
static WORDS: LazyLock<HashSet<&'static str>> = LazyLock::new(|| stat::words().chain(METHODS).collect());

/// An entry.
pub(super) enum Recorded {
    /// Something was seen of the process with this index.
    Seen(usize, Owned),
    /// A process or image is not traced.
    Refused(Option<u32>, Arc<str>, Arc<str>),
    Began(u64),
    Closed(u64),
    GvlGap(GvlGap),
    Account(Ledger),
    Flushed(u64),
    Finished(Ledger),
    Settled(Ledger),
}

/// A chunk whose tables have been read.
pub(super) struct Tables {
    texts: Vec<Arc<str>>,
    frames: Vec<Arc<Frame>>,
    leaves: Vec<u32>,
    callers: Vec<u32>,
    /// Frames of each stack.
    depths: Vec<usize>,
    images: Vec<Arc<Image>>,
    processes: Vec<Process>,
    /// How many frames its entries may still have.
    frames_left: usize,
}

/// Reads a chunk: its tables and its entries.
pub(super) fn chunk(bytes: &[u8]) -> Result<(Tables, Vec<Recorded>), Invalid> {
    let chunk = wire::Chunk::decode(bytes).map_err(|error| Invalid::new(error.to_string()))?;
    let wire::Chunk { texts, frames, leaves, callers, images, processes, entries } = chunk;
    let mut tables = Tables {
        texts: texts.into_iter().map(Arc::from).collect(),
        frames: Vec::with_capacity(frames.len()),
        depths: Vec::with_capacity(leaves.len()),
        leaves,
        callers,
        images: Vec::with_capacity(images.len()),
        processes: Vec::with_capacity(processes.len()),
        frames_left: STACK_FRAMES,
    };
    for frame in frames {
        let frame = Arc::new(tables.frame(&frame)?);
        tables.frames.push(frame);
    }
    tables.check_stacks()?;
    for image in images {
        let image = Arc::new(tables.image(image)?);
        tables.images.push(image);
    }
    for process in &processes {
        let process = tables.process_of(process)?;
        tables.processes.push(process);
    }
    let entries = entries.into_iter().map(|entry| tables.entry(entry)).collect::<Result<_, _>>()?;
    Ok((tables, entries))
}

/// What the table does not have.
fn beyond(what: &str, index: u32) -> Invalid {
    Invalid::new(format!("there is no {what} {index} in its chunk"))
}

/// A message that must be there.
fn required<T>(message: Option<T>, what: &str) -> Result<T, Invalid> {
    message.ok_or_else(|| Invalid::new(format!("{what} is missing")))
}

impl Tables {
    /// The process with this index.
    pub(super) fn process(&self, index: usize) -> Option<&Process> {
        self.processes.get(index)
    }

    fn text(&self, index: u32) -> Result<&Arc<str>, Invalid> {
        self.texts.get(index as usize).ok_or_else(|| beyond("text", index))
    }

    fn owned(&self, index: u32) -> Result<String, Invalid> {
        Ok(self.text(index)?.to_string())
    }

    fn optional(&self, index: Option<u32>) -> Result<Option<String>, Invalid> {
        index.map(|index| self.owned(index)).transpose()
    }

    fn list(&self, indices: &[u32]) -> Result<Vec<String>, Invalid> {
        indices.iter().map(|&index| self.owned(index)).collect()
    }

    fn word(&self, index: u32) -> Result<&'static str, Invalid> {
        let text = self.text(index)?;
        WORDS.get(&**text).copied().ok_or_else(|| Invalid::new(format!("the word {text:?} is not known")))
    }

    fn optional_word(&self, index: Option<u32>) -> Result<Option<&'static str>, Invalid> {
        index.map(|index| self.word(index)).transpose()
    }

    fn words(&self, indices: &[u32]) -> Result<Vec<&'static str>, Invalid> {
        indices.iter().map(|&index| self.word(index)).collect()
    }

    fn frame(&self, frame: &wire::Frame) -> Result<Frame, Invalid> {
        let &wire::Frame { kind, name_text, file_text, line, first_line, address } = frame;
        Ok(Frame {
            kind: Code::of(kind)?,
            name: Arc::clone(self.text(name_text)?),
            file: file_text.map(|index| self.text(index).cloned()).transpose()?,
            line,
            first_line,
            address,
        })
    }

    /// Callers come before what they call, so stacks have ends.
    fn check_stacks(&mut self) -> Result<(), Invalid> {
        if self.leaves.len() != self.callers.len() {
            return Err(Invalid::new("stacks and callers differ in number".to_owned()));
        }
        for (at, (&leaf, &caller)) in self.leaves.iter().zip(&self.callers).enumerate() {
            if leaf as usize >= self.frames.len() {
                return Err(beyond("frame", leaf));
            }
            let above = match (caller as usize).checked_sub(1) {
                None => 0,
                Some(above) if above < at => self.depths[above],
                Some(_) => return Err(Invalid::new(format!("stack {} has a later caller", at + 1))),
            };
            self.depths.push(above + 1);
        }
        Ok(())
    }

    fn stack(&mut self, number: u32) -> Result<Stack, Invalid> {
        let Some(mut at) = (number as usize).checked_sub(1) else { return Ok(Arc::from([])) };
        let depth = *self.depths.get(at).ok_or_else(|| beyond("stack", number))?;
        self.frames_left = self
            .frames_left
            .checked_sub(depth)
            .ok_or_else(|| Invalid::new(format!("stacks have more than {STACK_FRAMES} frames together")))?;
        let mut frames = Vec::with_capacity(depth);
        loop {
            frames.push(Arc::clone(&self.frames[self.leaves[at] as usize]));
            match (self.callers[at] as usize).checked_sub(1) {
                Some(caller) => at = caller,
                None => return Ok(frames.into()),
            }
        }
    }

    fn optional_stack(&mut self, number: Option<u32>) -> Result<Option<Stack>, Invalid> {
        number.map(|number| self.stack(number)).transpose()
    }

    fn image(&self, image: wire::Image) -> Result<Image, Invalid> {
        let wire::Image {
            index,
            path,
            major,
            minor,
            teeny,
            build_id_text,
            stat_key_texts,
            heap_key_texts,
            method,
            probes,
            gvl,
            has_symbols,
        } = image;
        let part = |number: u32| {
            u16::try_from(number).map_err(|_| Invalid::new(format!("{number} in a version of Ruby")))
        };
        Ok(Image {
            index,
            path: OsString::from_vec(path).into(),
            version: RubyVersion { major: part(major)?, minor: part(minor)?, teeny: part(teeny)? },
            build_id: self.optional(build_id_text)?,
            stat_keys: self.words(&stat_key_texts)?,
            heap_keys: self.words(&heap_key_texts)?,
            method: Code::of(method)?,
            probes: probes as usize,
            gvl: gvl.map(gvl::coverage),
            has_symbols,
        })
    }

    fn process_of(&self, process: &wire::Process) -> Result<Process, Invalid> {
        let image = self.images.get(process.image as usize).ok_or_else(|| beyond("image", process.image))?;
        let pair = |pair: &wire::Pair| Ok((self.owned(pair.name_text)?, self.owned(pair.value_text)?));
        Ok(Process {
            pid: process.pid,
            ns_pid: process.ns_pid,
            ppid: process.ppid,
            comm: self.owned(process.comm_text)?,
            cmdline: process.cmdline.as_ref().map(|words| self.list(&words.texts)).transpose()?,
            start_ts: process.start_ts,
            uid: process.uid,
            hostname: self.optional(process.hostname_text)?,
            container: self.container(required(process.container, "the container of a process")?)?,
            gc_env: process.gc_env.iter().map(pair).collect::<Result<_, Invalid>>()?,
            gc_env_refused: self.list(&process.gc_env_refused_texts)?,
            origin: Arc::new(
                self.origin(required(process.origin.as_ref(), "the origin of a process")?, &pair)?,
            ),
            image: Arc::clone(image),
        })
    }

    fn container(&self, container: wire::Container) -> Result<Container, Invalid> {
        Ok(Container {
            id: self.optional(container.id_text)?,
            runtime: container.runtime.map(Code::of).transpose()?,
            name: self.optional(container.name_text)?,
            pod_uid: self.optional(container.pod_uid_text)?,
            pod: self.optional(container.pod_text)?,
            namespace: self.optional(container.namespace_text)?,
            unit: self.optional(container.unit_text)?,
            cgroup: self.optional(container.cgroup_text)?,
        })
    }

    fn origin(
        &self,
        origin: &wire::Origin,
        pair: &impl Fn(&wire::Pair) -> Result<(String, String), Invalid>,
    ) -> Result<Origin, Invalid> {
        Ok(Origin {
            service: self.owned(origin.service_text)?,
            container: self.optional(origin.container_text)?,
            pod: self.optional(origin.pod_text)?,
            namespace: self.optional(origin.namespace_text)?,
            attributes: origin.attributes.iter().map(pair).collect::<Result<_, _>>()?,
        })
    }

    fn account(&self, account: &wire::Account) -> Result<Ledger, Invalid> {
        let unknown = |name: &str| Invalid::new(format!("the counter {name:?} is not known"));
        let mut kernel = vec![0; Counter::ALL.len()];
        for count in &account.kernel {
            let name = self.text(count.name_text)?;
            let counter = Counter::ALL.iter().find(|counter| counter.name() == &**name);
            kernel[*counter.ok_or_else(|| unknown(name))? as usize] = count.count;
        }
        let mut user = UserCounts::default();
        for count in &account.user {
            let name = self.text(count.name_text)?;
            if !user.set(name, count.count) {
                return Err(unknown(name));
            }
        }
        let extent = Code::of(account.extent)?;
        Ok(Ledger { kernel: account.has_kernel.then_some(kernel), user, extent })
    }

    /// What an entry says.
    fn entry(&mut self, entry: wire::Entry) -> Result<Recorded, Invalid> {
        use wire::What;
        let what = required(entry.what, "what an entry says")?;
        let recorded = match what {
            What::Refused(refused) => Recorded::Refused(
                refused.pid,
                Arc::clone(self.text(refused.path_text)?),
                Arc::clone(self.text(refused.reason_text)?),
            ),
            What::Began(ts_ns) => Recorded::Began(ts_ns),
            What::Closed(ts_ns) => Recorded::Closed(ts_ns),
            What::GvlGap(gap) => Recorded::GvlGap(gvl::gap(*gap)),
            What::Account(account) => Recorded::Account(self.account(&account)?),
            What::Flushed(now_ns) => Recorded::Flushed(now_ns),
            What::Finished(account) => Recorded::Finished(self.account(&account)?),
            What::Settled(account) => Recorded::Settled(self.account(&account)?),
            of_process => {
                let index = required(entry.process, "the process of an entry")?;
                if index as usize >= self.processes.len() {
                    return Err(beyond("process", index));
                }
                let seen = self.seen(of_process)?;
                self.check_states(index as usize, &seen)?;
                Recorded::Seen(index as usize, seen)
            }
        };
        bounds::check(&recorded)?;
        Ok(recorded)
    }
}
