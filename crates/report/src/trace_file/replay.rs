//! Passing the contents of a recording to exporters.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    ops::DerefMut,
};

use super::{
    Header, ReadError, Recording,
    ahead::{self, Chunk},
    chunk::Ending,
    kinds::{
        Owned,
        decode::{Recorded, Tables},
    },
};
use crate::{
    export::Outputs,
    ledger::{
        EnvironmentCounts, Extent, Ledger, PipelineCounts, ProfileCounts, SetCounts, UploadCounts, UserCounts,
    },
    model::{
        EndReason, Process,
        gvl::GvlGap,
        gvl_so_far::GvlSoFar,
        seen::{CyclesBefore, ProcessEnd, Seen},
    },
};

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// How the recording ends.
    pub ending: Ending,
    /// The time of the last entry that has one, `CLOCK_MONOTONIC` nanoseconds.
    pub last_ns: u64,
    /// Number of processes that were traced.
    pub processes: u64,
    /// The last account.
    pub ledger: Ledger,
}

/// The readable part of a recording, and why the rest is not readable.
#[derive(Debug)]
pub struct Readable {
    /// The result of the replay. If the recording is damaged, `ending` is [`Ending::CutOff`] with 0 bytes.
    pub replayed: Replayed,
    /// Why the rest was not read.
    pub damage: Option<ReadError>,
}

impl Readable {
    /// The result if everything was read, otherwise the damage.
    fn whole(self) -> Result<Replayed, ReadError> {
        match self.damage {
            None => Ok(self.replayed),
            Some(error) => Err(error),
        }
    }
}

/// Passes a recording to outputs. They are finished in any case, with what could be read.
///
/// # Errors
///
/// The recording is damaged from some position on.
pub fn replay<R: Read + Send>(
    recording: &mut Recording<R>,
    outputs: &mut Outputs,
) -> Result<Replayed, ReadError> {
    replay_by(recording, outputs, |_| Ok(()), |_, _, _, _| {}).whole()
}

/// [`replay`] of as much as can be read, with a call before each chunk, and a call with start and end after each chunk
/// with entries. Other threads read ahead: chunks are expanded and decoded while earlier ones are passed on.
pub(super) fn replay_by<R: Read + Send>(
    recording: &mut Recording<R>,
    outputs: &mut Outputs,
    before: impl FnMut(&mut Recording<R>) -> Result<(), ReadError> + Send,
    mut read: impl FnMut(u64, u64, &Tables, &[Recorded]),
) -> Readable {
    let mut replay = Replay::new(recording.header(), outputs);
    let end = ahead::each(recording, before, |chunk| {
        let Chunk { begin, end, tables, entries } = chunk;
        read(*begin, *end, tables, entries);
        replay.hand_on(tables, entries);
    });
    let (ending, damage) = match end {
        Ok(ending) => (ending, None),
        Err(error) => (Ending::CutOff(0), Some(error)),
    };
    replay.finish();
    let Replay { last_ns, processes, ledger, .. } = replay;
    Readable { replayed: Replayed { ending, last_ns, processes, ledger }, damage }
}

/// The state of a process whose end has not been seen.
struct Running {
    process: Process,
    since_ns: u64,
    cycles: u64,
    lost: u64,
}

impl Running {
    /// Its end, with the values known from the recording.
    fn end(&self, reason: EndReason, ts_ns: u64) -> ProcessEnd {
        ProcessEnd {
            reason,
            ts_ns,
            since_ns: self.since_ns,
            outside_ns: 0,
            beyond_ns: 0,
            shutdown: None,
            cycles: self.cycles,
            before: CyclesBefore::Unknown,
            lost: self.lost,
        }
    }
}

/// The state before a dump, according to the dump.
#[derive(Default)]
struct Before {
    /// Start of the dump.
    from_ns: u64,
    /// Number of entries of the initial state still to come.
    left: u64,
    /// Processes that were traced at the start and still are: totals since their own start do not belong to the dump.
    processes: BTreeSet<u32>,
    /// Number of processes that were traced at the start.
    count: u64,
    gvl: BTreeMap<u32, GvlSoFar>,
    account: Option<Ledger>,
}

impl Before {
    /// Takes an entry if it is only part of the initial state. Returns `false` if outputs receive it, too.
    fn takes(&mut self, tables: &Tables, entry: &Recorded) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        match entry {
            Recorded::Account(ledger) => self.account = Some((**ledger).clone()),
            Recorded::Seen(index, owned) => {
                let Some(process) = tables.process(*index) else { return true };
                let Owned::GvlSoFar(so_far) = owned else {
                    self.count += u64::from(self.processes.insert(process.pid));
                    return false;
                };
                self.gvl.insert(process.pid, so_far.clone());
            }
            _ => return false,
        }
        true
    }

    /// The sums of a process's threads since the start of the dump; `None` if unknown.
    fn gvl_since(&mut self, pid: u32, so_far: &GvlSoFar) -> Option<GvlSoFar> {
        if let Some(before) = self.gvl.get(&pid) {
            return Some(so_far.growth(&mut before.clone()));
        }
        self.gvl.insert(pid, so_far.clone());
        None
    }
}

/// Passes the contents of a recording to outputs, chunk by chunk.
pub(super) struct Replay<O> {
    outputs: O,
    /// Set if the recording is a dump.
    before: Option<Before>,
    pub(super) last_ns: u64,
    processes: u64,
    running: BTreeMap<u32, Running>,
    /// The last account.
    ledger: Ledger,
    closed: bool,
    finished: bool,
    settled: bool,
}

impl<O: DerefMut<Target = Outputs>> Replay<O> {
    pub(super) fn new(header: &Header, outputs: O) -> Self {
        let dump = header.dump.as_ref();
        Self {
            outputs,
            before: dump.map(|dump| Before {
                from_ns: dump.from_ns,
                left: dump.carried,
                ..Before::default()
            }),
            last_ns: dump.map_or(header.begun_ns, |dump| dump.from_ns),
            processes: 0,
            running: BTreeMap::new(),
            ledger: Ledger::default(),
            closed: false,
            finished: false,
            settled: false,
        }
    }

    /// Passes on the next chunk, or returns how the recording ends.
    pub(super) fn step<R: Read>(
        &mut self,
        recording: &mut Recording<R>,
    ) -> Result<Option<Ending>, ReadError> {
        match recording.next()? {
            Ok((tables, entries)) => {
                self.hand_on(&tables, &entries);
                Ok(None)
            }
            Err(ending) => Ok(Some(ending)),
        }
    }

    fn hand_on(&mut self, tables: &Tables, entries: &[Recorded]) {
        for entry in entries {
            self.hand(tables, entry);
        }
    }

    fn hand(&mut self, tables: &Tables, entry: &Recorded) {
        if self.before.as_mut().is_some_and(|before| before.takes(tables, entry)) {
            return;
        }
        match entry {
            Recorded::Seen(index, owned) => {
                // The index has been checked.
                if let Some(process) = tables.process(*index) {
                    self.see(process, owned);
                }
            }
            Recorded::Refused(pid, path, reason) => {
                self.outputs.hand(|exporter| exporter.refused(*pid, path, reason));
            }
            Recorded::Began(ts_ns) => self.outputs.tell(|exporter| exporter.began(*ts_ns)),
            Recorded::Closed(ts_ns) => self.close(*ts_ns),
            Recorded::GvlGap(gap) => {
                // A gap that ended before a dump begins does not belong to it.
                let from_ns = gap.from_ns.max(self.before.as_ref().map_or(0, |before| before.from_ns));
                if from_ns < gap.to_ns {
                    self.outputs.tell(|exporter| exporter.gvl_gap(GvlGap { from_ns, ..*gap }));
                }
            }
            Recorded::Account(ledger) => {
                let ledger = self.account(ledger);
                self.outputs.tell(|exporter| exporter.account(&ledger));
            }
            Recorded::Flushed(now_ns) => {
                self.last_ns = self.last_ns.max(*now_ns);
                self.outputs.hand(|exporter| exporter.flush(*now_ns));
            }
            Recorded::Finished(ledger) => {
                self.finished = true;
                let ledger = self.account(ledger);
                self.outputs.hand(|exporter| exporter.finish(&ledger));
            }
            Recorded::Settled(ledger) => {
                self.settled = true;
                let ledger = self.account(ledger);
                self.outputs.hand(|exporter| exporter.settled(&ledger));
            }
        }
    }

    fn see(&mut self, process: &Process, owned: &Owned) {
        let before =
            self.before.as_mut().filter(|before| before.left == 0 && before.processes.contains(&process.pid));
        let Some(before) = before else {
            self.note(process, owned);
            return self.outputs.hand(|exporter| exporter.see(process, owned.seen()));
        };
        match owned {
            // These sums cover more time than the dump, and cannot be separated.
            Owned::GvlProcess(_) => {}
            Owned::GvlThread(thread) if thread.begin_ns < before.from_ns => {}
            Owned::GvlSoFar(so_far) => {
                if let Some(since) = before.gvl_since(process.pid, so_far) {
                    self.outputs.hand(|exporter| exporter.see(process, Seen::GvlSoFar(&since)));
                }
            }
            Owned::Ended(end) => {
                before.processes.remove(&process.pid);
                before.gvl.remove(&process.pid);
                if let Some(running) = self.running.remove(&process.pid) {
                    let end =
                        ProcessEnd { shutdown: end.shutdown.clone(), ..running.end(end.reason, end.ts_ns) };
                    self.outputs.hand(|exporter| exporter.see(process, Seen::Ended(&end)));
                }
            }
            _ => {
                self.note(process, owned);
                self.outputs.hand(|exporter| exporter.see(process, owned.seen()));
            }
        }
    }

    fn note(&mut self, process: &Process, owned: &Owned) {
        match owned {
            Owned::Process { since_ns, .. } => {
                self.processes += 1;
                let running = Running { process: process.clone(), since_ns: *since_ns, cycles: 0, lost: 0 };
                self.running.insert(process.pid, running);
            }
            Owned::Cycle(cycle) => {
                if let Some(running) = self.running.get_mut(&process.pid) {
                    // The GC share of the process is relative to the time in which its cycles lie.
                    running.since_ns = running.since_ns.min(owned.seen().begin_ns().unwrap_or(u64::MAX));
                    running.cycles += 1;
                    running.lost = running.lost.saturating_add(cycle.lost);
                }
            }
            Owned::Ended(_) => drop(self.running.remove(&process.pid)),
            _ => {}
        }
    }

    /// The recorded counters; for a dump, those since its start.
    fn account(&mut self, recorded: &Ledger) -> Ledger {
        let part = self.before.as_ref().and_then(|before| Some((before.account.as_ref()?, before.count)));
        let recorded = match part {
            None => recorded.clone(),
            Some((before, processes)) => {
                let mut since = recorded.since(before);
                let of = &mut since.user.pipeline;
                of.processes = of.processes.saturating_add(processes);
                Ledger { extent: Extent::Part, ..since }
            }
        };
        self.with_outputs(&recorded)
    }

    /// The recorded counters, with those of the current outputs instead of those of the recorded run.
    fn with_outputs(&mut self, recorded: &Ledger) -> Ledger {
        let pipeline = PipelineCounts { export_failures: 0, ..recorded.user.pipeline };
        let mut user = UserCounts {
            pipeline,
            profiles: ProfileCounts::default(),
            uploads: UploadCounts::default(),
            sets: SetCounts::default(),
            environment: EnvironmentCounts::default(),
            ..recorded.user
        };
        self.outputs.add_counts(&mut user);
        self.ledger = Ledger { user, ..recorded.clone() };
        self.ledger.clone()
    }

    fn close(&mut self, ts_ns: u64) {
        self.closed = true;
        self.last_ns = self.last_ns.max(ts_ns);
        self.outputs.tell(|exporter| exporter.closed(ts_ns));
    }

    /// Adds what a recording that was cut off lacks: the end of everything, at the time of its last entry.
    pub(super) fn finish(&mut self) {
        for (_, running) in std::mem::take(&mut self.running) {
            let end = running.end(EndReason::Detached, self.last_ns);
            self.outputs.hand(|exporter| exporter.see(&running.process, Seen::Ended(&end)));
        }
        if !self.closed {
            self.close(self.last_ns);
        }
        let extent = match (self.finished, &self.before) {
            (true, _) => self.ledger.extent,
            (false, Some(_)) => Extent::Part,
            (false, None) => Extent::CutOff,
        };
        let recorded = Ledger { extent, ..self.ledger.clone() };
        if !self.finished {
            let ledger = self.with_outputs(&recorded);
            self.outputs.hand(|exporter| exporter.finish(&ledger));
        }
        if !self.settled {
            let ledger = self.with_outputs(&recorded);
            self.outputs.hand(|exporter| exporter.settled(&ledger));
        }
    }
}
