//! Converts the messages of a chunk to what was seen. Every index and number is checked.

mod bounds;
mod fields;
mod gc;
mod gvl;
mod known;

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    ffi::OsString,
    os::unix::ffi::OsStringExt as _,
    sync::{Arc, LazyLock},
};

use gctrace_common::stats::Counter;

use self::{fields::Fields, known::Text};
use super::{Owned, wire};
use crate::{
    aggregate::endpoint::METHODS,
    ledger::{Ledger, UserCounts},
    model::{
        Container, Image, Origin, Process,
        gvl::GvlGap,
        stack::{Frame, Stack},
    },
    ruby::{RubyVersion, stat},
    trace_file::{CHUNK_WORDS, Invalid, codes::Code, text_words},
};

pub(in crate::trace_file) use self::{bounds::Bounds, fields::Value, gc::span_of as caller, known::Known};

/// Words that are constants in the model.
static WORDS: LazyLock<HashSet<&'static str>> = LazyLock::new(|| stat::words().chain(METHODS).collect());

/// The counters of the kernel by name.
static COUNTERS: LazyLock<HashMap<&'static str, usize>> =
    LazyLock::new(|| Counter::ALL.iter().map(|counter| (counter.name(), *counter as usize)).collect());

/// An entry.
pub(in crate::trace_file) enum Recorded {
    /// Something was seen in the process with this index.
    Seen(usize, Owned),
    /// A process or image is not traced.
    Refused(Option<u32>, Arc<str>, Arc<str>),
    Began(u64),
    Closed(u64),
    GvlGap(GvlGap),
    Account(Box<Ledger>),
    Flushed(u64),
    Finished(Box<Ledger>),
    Settled(Box<Ledger>),
}

/// The tables of a chunk.
#[derive(Default)]
pub(in crate::trace_file) struct Tables {
    texts: Vec<Text>,
    frames: Vec<Arc<Frame>>,
    leaves: Vec<u32>,
    callers: Vec<u32>,
    /// Number of frames of each stack.
    depths: Vec<usize>,
    /// Stacks that were already used by an entry, to be shared by others.
    stacks: Vec<Option<Stack>>,
    images: Vec<Arc<Image>>,
    processes: Vec<Process>,
    /// How many words its tables and entries may still expand to.
    words_left: Cell<usize>,
}

/// Reads a chunk: its tables and its entries. Field numbers are those of [`wire::Chunk`].
pub(in crate::trace_file) fn chunk(
    bytes: &[u8],
    known: &mut Known,
) -> Result<(Tables, Vec<Recorded>), Invalid> {
    let mut tables = Tables { words_left: Cell::new(CHUNK_WORDS), ..Tables::default() };
    let (mut frames, mut images, mut processes) = (Vec::new(), Vec::new(), Vec::new());
    let mut entries = 0;
    for field in Fields::of(bytes) {
        match field? {
            (1, value) => {
                let text = known.text(tables.texts.len(), value.bytes()?)?;
                tables.texts.push(text);
            }
            (2, value) => frames.push(value.message::<wire::Frame>()?),
            (3, value) => value.small_numbers(&mut tables.leaves)?,
            (4, value) => value.small_numbers(&mut tables.callers)?,
            (5, value) => images.push(value.message::<wire::Image>()?),
            (6, value) => processes.push(value.message::<wire::Process>()?),
            (7, value) => {
                value.bytes()?;
                entries += 1;
            }
            _ => {}
        }
    }
    for frame in &frames {
        let frame = tables.frame(frame)?;
        tables.frames.push(known.frame(tables.frames.len(), frame));
    }
    tables.check_stacks()?;
    for image in images {
        let image = tables.image(image)?;
        tables.images.push(known.image(image));
    }
    for process in &processes {
        let process = tables.process_of(process)?;
        tables.processes.push(process);
    }
    // Entries refer to tables that may come after them.
    let mut recorded = Vec::with_capacity(entries);
    for field in Fields::of(bytes) {
        if let (7, Value::Bytes(entry)) = field? {
            recorded.push(tables.entry(entry)?);
        }
    }
    Ok((tables, recorded))
}

/// An index that is not in its table.
fn beyond(what: &str, index: u32) -> Invalid {
    Invalid::new(format!("there is no {what} {index} in its chunk"))
}

/// Checks that a required message is present.
fn required<T>(message: Option<T>, what: &str) -> Result<T, Invalid> {
    message.ok_or_else(|| Invalid::new(format!("{what} is missing")))
}

impl Tables {
    /// The process with this index.
    pub(in crate::trace_file) fn process(&self, index: usize) -> Option<&Process> {
        self.processes.get(index)
    }

    fn indexed(&self, index: u32) -> Result<&Text, Invalid> {
        self.texts.get(index as usize).ok_or_else(|| beyond("text", index))
    }

    pub(in crate::trace_file) fn text(&self, index: u32) -> Result<&Arc<str>, Invalid> {
        self.indexed(index).map(|text| &text.text)
    }

    fn owned(&self, index: u32) -> Result<String, Invalid> {
        let text = self.text(index)?;
        self.takes(text_words(text))?;
        Ok(text.to_string())
    }

    /// Charges this number of words to the limit.
    fn takes(&self, words: usize) -> Result<(), Invalid> {
        let left = self.words_left.get().checked_sub(words);
        self.words_left.set(left.ok_or_else(|| {
            Invalid::new(format!("its stacks, texts and histograms expand to more than {CHUNK_WORDS} words"))
        })?);
        Ok(())
    }

    fn optional(&self, index: Option<u32>) -> Result<Option<String>, Invalid> {
        index.map(|index| self.owned(index)).transpose()
    }

    fn list(&self, indices: &[u32]) -> Result<Vec<String>, Invalid> {
        indices.iter().map(|&index| self.owned(index)).collect()
    }

    fn word(&self, index: u32) -> Result<&'static str, Invalid> {
        let Text { text, word } = self.indexed(index)?;
        word.ok_or_else(|| Invalid::unknown(&format!("the word {text:?}")))
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

    /// Callers have smaller numbers than the stacks that they call, so stacks are finite.
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
        self.stacks.resize(self.leaves.len(), None);
        Ok(())
    }

    pub(in crate::trace_file) fn stack(&mut self, number: u32) -> Result<Stack, Invalid> {
        let Some(mut at) = (number as usize).checked_sub(1) else { return Ok(Arc::from([])) };
        let depth = *self.depths.get(at).ok_or_else(|| beyond("stack", number))?;
        self.takes(depth)?;
        let index = at;
        if let Some(stack) = &self.stacks[index] {
            return Ok(Arc::clone(stack));
        }
        let mut frames = Vec::with_capacity(depth);
        loop {
            frames.push(Arc::clone(&self.frames[self.leaves[at] as usize]));
            match (self.callers[at] as usize).checked_sub(1) {
                Some(caller) => at = caller,
                None => break,
            }
        }
        let stack = Stack::from(frames);
        self.stacks[index] = Some(Arc::clone(&stack));
        Ok(stack)
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
            gc_env: (!process.has_unknown_environment)
                .then(|| process.gc_env.iter().map(pair).collect::<Result<_, Invalid>>())
                .transpose()?,
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

    fn account(&self, account: Value<'_>) -> Result<Box<Ledger>, Invalid> {
        let account = account.message::<wire::Account>()?;
        let unknown = |name: &str| Invalid::unknown(&format!("the counter {name:?}"));
        let mut kernel = vec![0; Counter::ALL.len()];
        for count in &account.kernel {
            let name = self.text(count.name_text)?;
            kernel[*COUNTERS.get(&**name).ok_or_else(|| unknown(name))?] = count.count;
        }
        let mut user = UserCounts::default();
        for count in &account.user {
            let name = self.text(count.name_text)?;
            if !user.set(name, count.count) {
                return Err(unknown(name));
            }
        }
        let extent = Code::of(account.extent)?;
        Ok(Box::new(Ledger { kernel: account.has_kernel.then_some(kernel), user, extent }))
    }

    /// Decodes an entry. Field numbers are those of [`wire::Entry`].
    fn entry(&mut self, entry: &[u8]) -> Result<Recorded, Invalid> {
        let (mut process, mut what) = (None, None);
        for field in Fields::of(entry) {
            match field? {
                (1, value) => process = Some(value.number()? as u32),
                said => what = Some(said),
            }
        }
        let recorded = match required(what, "what an entry says")? {
            (20, value) => {
                let refused = value.message::<wire::Refused>()?;
                Recorded::Refused(
                    refused.pid,
                    Arc::clone(self.text(refused.path_text)?),
                    Arc::clone(self.text(refused.reason_text)?),
                )
            }
            (21, ts_ns) => Recorded::Began(ts_ns.number()?),
            (22, ts_ns) => Recorded::Closed(ts_ns.number()?),
            (23, gap) => Recorded::GvlGap(gvl::gap(gap.message()?)),
            (24, account) => Recorded::Account(self.account(account)?),
            (25, now_ns) => Recorded::Flushed(now_ns.number()?),
            (26, account) => Recorded::Finished(self.account(account)?),
            (27, account) => Recorded::Settled(self.account(account)?),
            (kind, seen) => {
                let index = required(process, "the process of an entry")?;
                if index as usize >= self.processes.len() {
                    return Err(beyond("process", index));
                }
                let seen = self.seen(kind, seen)?;
                self.check_states(index as usize, &seen)?;
                Recorded::Seen(index as usize, seen)
            }
        };
        bounds::check(&recorded)?;
        Ok(recorded)
    }
}
