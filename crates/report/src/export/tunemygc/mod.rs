//! TuneMyGC sample sets: one set per process, as the protocol's agent would have sent them.
//! The wire format is in [`gctrace_tunemygc::wire`].

use std::{
    collections::HashMap,
    io,
    num::NonZeroU32,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use gctrace_tunemygc::printable::printable_json;
use serde_json::{Map, Value, json, value::RawValue};

mod client;
mod journal;
mod spool;
#[cfg(test)]
mod tests;
mod tokens;

pub use client::{Target, default_spool};
pub use gctrace_tunemygc::wire::{EventName, Header, ProtocolError, Sample, SampleSet};
pub use tokens::Tokens;

use client::Client;
use journal::{Draft, Journal};

use super::{ExportError, Exporter, VERSION, file, jsonl_gc::StatHeap};
use crate::{
    clock::{WallClock, monotonic_ns},
    ledger::{Ledger, UserCounts},
    model::{
        EndReason, GcCycle, GcState, Process,
        seen::{ProcessEnd, Seen},
    },
    private_dir::{self, DirError},
    ruby::stat::GcInfo,
};

/// A set is written out and begun anew at this many samples (about 3 MB), which bounds memory.
const MAX_SAMPLES: usize = 10_000;
/// A set for a collector is sent and begun anew when it spans this time, so that it comes from long-lived processes, too.
const MAX_SPAN_NS: u64 = 600_000_000_000;

/// What is new in sets that wait to be complete is put on disk this often.
const DRAFT_NS: u64 = 30_000_000_000;

/// Collects sets and writes each to its file, or sends it, when its process ends.
pub struct TuneMyGc {
    to: To,
    clock: WallClock,
    dialect: Dialect,
    open: HashMap<u32, Open>,
    /// Processes whose service has no token.
    without_token: u64,
}

/// How the header of a set is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// 11 elements, as the protocol's text has it.
    #[default]
    Spec,
    /// 12 elements, as the protocol's agent sends them: with what watched the units of work.
    Agent,
}

impl Dialect {
    fn spy_ids(self) -> Option<String> {
        // The agent's word for a program that only its operator watches.
        (self == Self::Agent).then(|| "manual".to_owned())
    }
}

/// Where sets go.
enum To {
    Dir {
        path: PathBuf,
        /// Files go to the directory that the path named at the start, even if the path changes.
        open: OwnedFd,
    },
    Collector {
        client: Box<Client>,
        tokens: Tokens,
        cycles: Option<NonZeroU32>,
        /// Dropped when it fails: the disk is then full, and the sets themselves may be lost.
        journal: Option<Journal>,
        /// When it was written to, `CLOCK_MONOTONIC`.
        drafted_ns: u64,
    },
}

/// The set of a process that is being traced.
struct Open {
    set: SampleSet,
    /// Time of the first sample.
    first_ns: u64,
    name: String,
    /// `GC.stat_heap`, at the last sample: its keys and the values of each heap.
    heap_keys: Vec<&'static str>,
    heaps: Vec<Vec<u64>>,
    part: u32,
    /// Cycles in this part.
    cycles: u32,
    booted: bool,
    draft: Option<Draft>,
}

impl TuneMyGc {
    /// Sets go to files in `dir`, which is made if it is not there.
    pub fn new(dir: &Path, dialect: Dialect, clock: WallClock) -> Result<Self, ExportError> {
        let error = |source| ExportError::Unwritable { path: dir.to_owned(), source };
        let is_new = !dir.exists();
        // A link at the end must not be replaced by a directory, nor followed if another user owns it.
        if let Err(failed) = std::fs::create_dir_all(dir)
            && failed.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error(failed));
        }
        let open = private_dir::open_for_output(dir).map_err(|refused| match refused {
            DirError::Io(failed) => error(failed),
            refused => error(io::Error::other(refused.to_string())),
        })?;
        if is_new {
            file::give_to_owner(open.as_fd());
        }
        file::check_writable(&opened(&open)).map_err(error)?;
        let to = To::Dir { path: dir.to_owned(), open };
        Ok(Self { to, clock, dialect, open: HashMap::new(), without_token: 0 })
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
            journal: Some(journal),
            drafted_ns: monotonic_ns(),
        };
        Ok(Self { to, clock, dialect, open: HashMap::new(), without_token: 0 })
    }

    fn push(&mut self, process: &Process, event: EventName, state: &GcState) -> Result<(), ExportError> {
        let clock = self.clock;
        let Some(open) = self.open.get_mut(&process.pid) else { return Ok(()) };
        let first = open.set.samples.is_empty();
        // Into the same memory each time.
        open.heaps.clone_from(&state.heaps);
        open.set.samples.push(Sample {
            ts: clock.epoch_seconds(state.ts_ns),
            peak_rss: state.memory.map(|memory| memory.peak_rss),
            current_rss: state.memory.map(|memory| memory.rss),
            event,
            stat: state.stat.clone(),
            latest_gc_info: info_map(&state.info),
            meta: first.then(|| heaps_meta(&process.image.heap_keys, &state.heaps)).flatten(),
            thread_id: (state.tid != process.pid).then(|| state.tid.into()),
        });
        if first {
            open.first_ns = state.ts_ns;
        }
        let long = matches!(self.to, To::Collector { .. })
            && state.ts_ns.saturating_sub(open.first_ns) >= MAX_SPAN_NS;
        if long || open.set.samples.len() >= MAX_SAMPLES {
            self.write(process.pid, false)?;
        }
        Ok(())
    }

    /// Writes what there is of the set of a process; `last` ends it, else its next part begins.
    fn write(&mut self, pid: u32, last: bool) -> Result<(), ExportError> {
        let Some(open) = self.open.get_mut(&pid) else { return Ok(()) };
        if let Some(last) = open.set.samples.last_mut() {
            last.meta = heaps_meta(&open.heap_keys, &open.heaps);
        }
        let text = (!open.set.samples.is_empty()).then(|| printable_json(&open.set.to_json()).into_owned());
        open.set.samples.clear();
        open.cycles = 0;
        open.part += u32::from(!last || open.part > 0);
        let draft = open.draft.take();
        let part = if open.part > 0 { format!("-part{}", open.part) } else { String::new() };
        let stem = format!("{}{part}", open.name);
        if last {
            self.open.remove(&pid);
        }
        let Some(text) = text else { return Ok(()) };
        match &self.to {
            To::Dir { path, open } => {
                let dir = opened(open);
                file::write_new(&dir, &stem, ".json", file::PUBLIC, |out| out.write_all(text.as_bytes()))
                    .map(drop)
                    .map_err(|source| ExportError::File { path: path.join(format!("{stem}.json")), source })
            }
            To::Collector { client, journal, .. } => {
                client.send(text);
                if let (Some(journal), Some(draft)) = (journal, draft) {
                    journal.discard(draft);
                }
                Ok(())
            }
        }
    }

    /// Puts what is new in the sets on disk, if it is time.
    fn draft(&mut self) {
        let To::Collector { journal: journal @ Some(_), drafted_ns, .. } = &mut self.to else { return };
        let now = monotonic_ns();
        if now.saturating_sub(*drafted_ns) < DRAFT_NS {
            return;
        }
        *drafted_ns = now;
        let Some(writes) = journal else { return };
        for open in self.open.values_mut() {
            if let Err(error) = writes.append(&open.set, &mut open.draft) {
                log::warn!("sample sets that are not complete are in memory only from now on: {error}");
                *journal = None;
                return;
            }
        }
    }
}

/// The path of an open directory, whatever its name is by now.
fn opened(dir: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

/// `GC.stat_heap` as the `meta` of the first and the last sample of a set, which are BOOTED and TERMINATED in a set of a whole
/// process: `{"stat_heap": {"0": {KEY: value, …}, …}}`; nothing before 3.2, which has one heap.
fn heaps_meta(keys: &[&'static str], heaps: &[Vec<u64>]) -> Option<Box<RawValue>> {
    if keys.is_empty() || heaps.is_empty() {
        return None;
    }
    serde_json::value::to_raw_value(&json!({ "stat_heap": StatHeap { keys, heaps } })).ok()
}

fn info_map(info: &GcInfo) -> Map<String, Value> {
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    put("major_by", json!(info.major_by));
    if let Some(need) = info.need_major_by {
        put("need_major_by", json!(need));
    }
    put("gc_by", json!(info.gc_by));
    put("have_finalizer", json!(info.have_finalizer));
    put("immediate_sweep", json!(info.immediate_sweep));
    put("state", json!(info.state));
    if let Some((weak, retained)) = info.weak_references {
        put("weak_references_count", json!(weak));
        if let Some(retained) = retained {
            put("retained_weak_references_count", json!(retained));
        }
    }
    map
}

impl Exporter for TuneMyGc {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        match seen {
            Seen::Process { state, .. } => self.process(process, state),
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Ended(end) => self.ended(process, end),
            _ => Ok(()),
        }
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        counts.sets.sets_without_token += self.without_token;
        if let To::Collector { client, .. } = &self.to {
            client.add_counts(counts);
        }
    }

    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        self.draft();
        Ok(())
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
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError> {
        let token = match &self.to {
            To::Dir { .. } => None,
            To::Collector { tokens, .. } => {
                let Some(token) = tokens.of(process) else {
                    self.without_token += 1;
                    return Ok(());
                };
                Some(token.to_owned())
            }
        };
        let header = Header {
            token,
            ruby_version: process.image.version.to_string(),
            rails_version: "0.0".to_owned(),
            gc_env: process.gc_env.iter().map(|(key, value)| (key.clone(), json!(value))).collect(),
            agent_version: VERSION.to_owned(),
            gc_opts: Vec::new(),
            gc_constants: Map::new(),
            stat_keys: process.image.stat_keys.iter().map(|key| (*key).to_owned()).collect(),
            spy_ids: self.dialect.spy_ids(),
            hostname: process.hostname.clone().unwrap_or_default(),
            ppid: u64::from(process.ppid.unwrap_or_default()),
            pid: u64::from(process.ns_pid.unwrap_or(process.pid)),
        };
        let start = process.start_ts.map_or_else(|| "unknown".to_owned(), |ts| format!("{ts:.2}"));
        let name = format!("tunemygc-{}-{start}", process.pid);
        let set = SampleSet { header, samples: Vec::new() };
        let heap_keys = process.image.heap_keys.clone();
        let open = Open {
            set,
            first_ns: 0,
            name,
            heap_keys,
            heaps: Vec::new(),
            part: 0,
            cycles: 0,
            booted: false,
            draft: None,
        };
        self.open.insert(process.pid, open);
        if let Some(state) = state {
            self.push(process, EventName::Booted, state)?;
            self.booted(process.pid);
        }
        Ok(())
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        if self.open.get(&process.pid).is_some_and(|open| !open.booted) {
            // Nothing could be read before the VM's first GC: that is where our knowledge begins.
            self.push(process, EventName::Booted, &cycle.start)?;
            self.booted(process.pid);
        }
        self.push(process, EventName::GcCycleStarted, &cycle.start)?;
        if let Some(end) = &cycle.end {
            self.push(process, EventName::GcCycleEnded, end)?;
        }
        let Some(open) = self.open.get_mut(&process.pid) else { return Ok(()) };
        open.cycles += 1;
        match &self.to {
            To::Collector { cycles: Some(cycles), .. } if open.cycles >= cycles.get() => {
                self.write(process.pid, false)
            }
            _ => Ok(()),
        }
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        if end.reason == EndReason::Exited
            && let Some(state) = &end.shutdown
        {
            self.push(process, EventName::Terminated, state)?;
        }
        self.write(process.pid, true)
    }

    fn booted(&mut self, pid: u32) {
        if let Some(open) = self.open.get_mut(&pid) {
            open.booted = true;
        }
    }
}
