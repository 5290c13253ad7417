//! TuneMyGC sample sets: one set per process, as the protocol's agent would have sent them. The wire format is in
//! [`gctrace_tunemygc::wire`].

use std::{
    collections::HashMap,
    io,
    num::{NonZeroU32, NonZeroU64},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use serde_json::{Map, json};

mod client;
mod journal;
mod kept;
mod open;
mod spool;
#[cfg(test)]
mod tests;
mod tokens;

pub use client::{Target, default_spool};
pub use gctrace_tunemygc::wire::{EventName, Header, ProtocolError, Sample, SampleSet};
pub use tokens::Tokens;

use client::Client;
use journal::Journal;
use kept::Kept;
use open::{Held, Open, Origin};

use super::{ExportError, Exporter, VERSION, file};
use crate::{
    clock::{WallClock, monotonic_ns},
    ledger::{Ledger, UserCounts},
    model::{
        EndReason, GcCycle, GcState, Process,
        request::Request,
        seen::{ProcessEnd, Seen},
    },
    private_dir,
};

/// A set is written and a new one started at this number of samples (about 3 MB).
const MAX_SAMPLES: usize = 10_000;
/// Maximum number of samples of all unfinished sets together, which bounds memory to about 50 MB: above it the longest set is written, and
/// a new one started.
const MAX_HELD: usize = 100_000;
/// A set for a collector is sent and a new one started when it spans this time, so that long-lived processes are reported, too.
const MAX_SPAN_NS: u64 = 600_000_000_000;

/// Interval at which new samples of unfinished sets are written to disk.
const DRAFT_NS: u64 = 30_000_000_000;

/// Collects sets. Writes each to a file, or sends it, when its process ends.
pub struct TuneMyGc {
    to: To,
    /// The clock as it is now.
    clock: Box<dyn Fn() -> WallClock>,
    /// The clock of the run.
    run: WallClock,
    dialect: Dialect,
    open: HashMap<u32, Open>,
    /// Number of samples in `open`, and its maximum.
    held: usize,
    most_held: usize,
    /// Number of processes whose service has no token.
    without_token: u64,
    /// Number of other processes whose environment is unknown: their sets would say that they run with Ruby's defaults.
    environment_unknown: u64,
}

/// The form of a set's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// 11 elements, as the protocol's specification has it.
    #[default]
    Spec,
    /// 12 elements, as the protocol's agent sends them: with the source of the units of work.
    Agent,
}

impl Dialect {
    fn spy_ids(self) -> Option<String> {
        // The agent's word for a program that only its operator traces.
        (self == Self::Agent).then(|| "manual".to_owned())
    }
}

/// The destination of sets.
enum To {
    Dir {
        path: PathBuf,
        /// Files go to the directory that the path named at the start, even if the path is renamed or replaced.
        open: OwnedFd,
        /// The existing sets, if their size is limited.
        kept: Option<Kept>,
    },
    Collector {
        client: Box<Client>,
        tokens: Tokens,
        cycles: Option<NonZeroU32>,
        units: Option<NonZeroU32>,
        /// Dropped when it fails: the disk is full then, and the sets themselves may be lost.
        journal: Option<Journal>,
        /// When drafts were last written, `CLOCK_MONOTONIC` nanoseconds.
        drafted_ns: u64,
    },
}

impl TuneMyGc {
    /// Sets go to files in `dir`, which is created if it does not exist. The oldest are deleted above `most` bytes.
    pub fn new(
        dir: &Path,
        most: Option<NonZeroU64>,
        dialect: Dialect,
        clock: WallClock,
    ) -> Result<Self, ExportError> {
        let error = |source| ExportError::Unwritable { path: dir.to_owned(), source };
        let is_new = !dir.exists();
        // A link as the last component must not be replaced by a directory, nor followed if another user owns it.
        if let Err(failed) = std::fs::create_dir_all(dir)
            && failed.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error(failed));
        }
        let open = private_dir::open_for_output(dir).map_err(|refused| error(refused.into()))?;
        if is_new {
            file::give_to_owner(open.as_fd());
        }
        file::check_writable(&opened(&open)).map_err(error)?;
        let kept = most.map(|most| Kept::new(&opened(&open), most)).transpose().map_err(error)?;
        let to = To::Dir { path: dir.to_owned(), open, kept };
        Ok(Self::with(to, dialect, clock))
    }

    /// Sets are sent to a collector; `say` reports its answers.
    pub fn sending(
        target: &Target,
        dialect: Dialect,
        clock: WallClock,
        say: fn(&str),
    ) -> Result<Self, ExportError> {
        let client =
            Client::start(target, say).map_err(|(path, source)| ExportError::Unwritable { path, source })?;
        let client = Box::new(client);
        let journal = target
            .journal()
            .map_err(|source| ExportError::Unwritable { path: target.spool.clone(), source })?;
        let to = To::Collector {
            client,
            tokens: target.tokens.clone(),
            cycles: target.cycles,
            units: target.units,
            journal: Some(journal),
            drafted_ns: monotonic_ns(),
        };
        Ok(Self::with(to, dialect, clock))
    }

    fn with(to: To, dialect: Dialect, clock: WallClock) -> Self {
        Self {
            to,
            clock: Box::new(move || clock.again()),
            run: clock,
            dialect,
            open: HashMap::new(),
            held: 0,
            most_held: MAX_HELD,
            without_token: 0,
            environment_unknown: 0,
        }
    }

    /// Writes the samples collected for a process and starts its next part, if the part is long enough.
    fn cut(&mut self, pid: u32) -> Result<(), ExportError> {
        let Some(open) = self.open.get_mut(&pid) else { return Ok(()) };
        self.held += open.samples.len() - open.counted;
        open.counted = open.samples.len();
        let reached = |most: Option<NonZeroU32>, now: u32| most.is_some_and(|most| now >= most.get());
        let due = match &self.to {
            To::Dir { .. } => false,
            &To::Collector { cycles, units, .. } => {
                open.span_ns() >= MAX_SPAN_NS || reached(cycles, open.cycles) || reached(units, open.units)
            }
        };
        if due || open.samples.len() >= MAX_SAMPLES {
            self.write(pid, false)?;
        }
        while self.held > self.most_held {
            let longest = self.open.iter().max_by_key(|(_, open)| open.samples.len());
            let Some((&pid, _)) = longest else { break };
            self.write(pid, false)?;
        }
        Ok(())
    }

    /// Sends the sets of processes that were active, but have had no event since: nothing else would end their parts.
    fn cut_idle(&mut self, now_ns: u64) -> Result<(), ExportError> {
        let To::Collector { .. } = self.to else { return Ok(()) };
        let is_due = |open: &Open| open.cycles + open.units > 0 && open.age_ns(now_ns) >= MAX_SPAN_NS;
        let due: Vec<u32> = self.open.iter().filter(|(_, open)| is_due(open)).map(|(pid, _)| *pid).collect();
        due.into_iter().try_for_each(|pid| self.write(pid, false))
    }

    /// Writes the samples collected for a process; `last` ends the set, otherwise the next part starts.
    fn write(&mut self, pid: u32, last: bool) -> Result<(), ExportError> {
        self.draft_of(pid);
        let Some(open) = self.open.get_mut(&pid) else { return Ok(()) };
        self.held -= std::mem::take(&mut open.counted);
        let (text, stem) = open.take(last);
        let draft = open.draft.take();
        if last {
            self.open.remove(&pid);
        }
        let Some(text) = text else { return Ok(()) };
        match &mut self.to {
            To::Dir { path, open, kept } => {
                let dir = opened(open);
                let written =
                    file::write_new(&dir, &stem, ".json", file::PUBLIC, |out| out.write_all(text.as_bytes()))
                        .map_err(|source| ExportError::File {
                            path: path.join(format!("{stem}.json")),
                            source,
                        })?;
                let Some(kept) = kept else { return Ok(()) };
                kept.add(written).map_err(|source| ExportError::File { path: path.clone(), source })
            }
            To::Collector { client, .. } => {
                client.send(text, draft);
                Ok(())
            }
        }
    }

    /// Writes new samples of the sets to disk, if it is time.
    fn draft(&mut self) {
        let To::Collector { journal, drafted_ns, .. } = &mut self.to else { return };
        let now = monotonic_ns();
        if now.saturating_sub(*drafted_ns) < DRAFT_NS {
            return;
        }
        *drafted_ns = now;
        for open in self.open.values_mut() {
            append(journal, open);
        }
    }

    /// Writes new samples of the set of a process to disk: the set is being handed over, and the sending thread may be
    /// busy with a collector that does not respond.
    fn draft_of(&mut self, pid: u32) {
        let To::Collector { journal, .. } = &mut self.to else { return };
        if let Some(open) = self.open.get_mut(&pid) {
            append(journal, open);
        }
    }
}

/// Writes new samples of a set to disk. After an error, no more drafts are written.
fn append(journal: &mut Option<Journal>, open: &mut Open) {
    let Some(writes) = journal else { return };
    if let Err(error) = writes.append(&open.header, &open.samples, Held::to_json, &mut open.draft) {
        log::warn!("sample sets that are not complete are in memory only from now on: {error}");
        *journal = None;
    }
}

/// The path of an open directory, whatever its current name.
fn opened(dir: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

impl Exporter for TuneMyGc {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        match seen {
            Seen::Process { state, .. } => {
                self.process(process, state);
                Ok(())
            }
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Request(request) => self.unit(process, request),
            Seen::Ended(end) => self.ended(process, end),
            _ => Ok(()),
        }
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        counts.sets.sets_without_token += self.without_token;
        counts.sets.sets_environment_unknown += self.environment_unknown;
        match &self.to {
            To::Collector { client, .. } => client.add_counts(counts),
            To::Dir { kept, .. } => counts.sets.sets_deleted += kept.as_ref().map_or(0, |kept| kept.deleted),
        }
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.draft();
        self.cut_idle(now_ns)
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        let mut pids: Vec<u32> = self.open.keys().copied().collect();
        pids.sort_unstable();
        for pid in pids {
            self.write(pid, true)?;
        }
        if let To::Collector { client, .. } = &self.to {
            client.finish();
        }
        Ok(())
    }
}

impl TuneMyGc {
    fn process(&mut self, process: &Process, state: Option<&GcState>) {
        let token = match &self.to {
            To::Dir { .. } => None,
            To::Collector { tokens, .. } => {
                let Some(token) = tokens.of(process) else {
                    self.without_token += 1;
                    return;
                };
                Some(token.to_owned())
            }
        };
        let Some(variables) = &process.gc_env else {
            self.environment_unknown += 1;
            return;
        };
        let pid = process.ns_pid.unwrap_or(process.pid);
        let container = &process.container.id;
        let is_beside = |parent: &&Open| container.is_some() && parent.container == *container;
        let parent = match process.ppid {
            // The parent in the pid namespace of the process, like its own pid there.
            Some(parent) if pid != process.pid => {
                self.open.get(&parent).filter(is_beside).map_or(0, |parent| parent.header.pid)
            }
            parent => u64::from(parent.unwrap_or_default()),
        };
        let header = Header {
            token,
            ruby_version: process.image.version.to_string(),
            rails_version: "0.0".to_owned(),
            gc_env: variables.iter().map(|(key, value)| (key.clone(), json!(value))).collect(),
            agent_version: VERSION.to_owned(),
            gc_opts: Vec::new(),
            gc_constants: Map::new(),
            stat_keys: process.image.stat_keys.iter().map(|key| (*key).to_owned()).collect(),
            spy_ids: self.dialect.spy_ids(),
            hostname: process.hostname.clone().unwrap_or_default(),
            ppid: parent,
            pid: u64::from(pid),
        };
        let origin = Origin { process, clock: &*self.clock, run: self.run };
        let mut open = Open::new(header, origin);
        if let Some(state) = state {
            open.boot(origin, state);
        }
        if let Some(before) = self.open.insert(process.pid, open) {
            self.held -= before.counted;
        }
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        let origin = Origin { process, clock: &*self.clock, run: self.run };
        let Some(open) = self.open.get_mut(&process.pid) else { return Ok(()) };
        // If nothing could be read before the VM's first GC, the set starts there.
        open.boot(origin, &cycle.start);
        open.push(origin, EventName::GcCycleStarted, &cycle.start, None);
        if let Some(end) = &cycle.end {
            open.push(origin, EventName::GcCycleEnded, end, None);
        }
        open.cycles += 1;
        self.cut(process.pid)
    }

    fn unit(&mut self, process: &Process, request: &Request) -> Result<(), ExportError> {
        let Some(open) = self.open.get_mut(&process.pid) else { return Ok(()) };
        open.unit(Origin { process, clock: &*self.clock, run: self.run }, request);
        self.cut(process.pid)
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        if end.reason == EndReason::Exited
            && let Some(state) = &end.shutdown
            && let Some(open) = self.open.get_mut(&process.pid)
        {
            let origin = Origin { process, clock: &*self.clock, run: self.run };
            // Of a process without a cycle, its end is the first state that is known.
            open.boot(origin, state);
            open.push(origin, EventName::Terminated, state, None);
        }
        self.write(process.pid, true)
    }
}
