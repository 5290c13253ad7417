//! Reading a recording, and handing what is in it to exporters.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{BufReader, Read, Seek},
    ops::DerefMut,
    path::{Path, PathBuf},
};

use prost::Message as _;

use super::{
    Dump, Header, Host, Invalid, ReadError, Subjects, Volume,
    chunk::{ChunkError, Chunks, Ending, Next},
    decode::{self, Owned, Recorded, Tables},
    wire,
};
use crate::{
    clock::WallClock,
    export::Outputs,
    ledger::{
        EnvironmentCounts, Extent, Ledger, PipelineCounts, ProfileCounts, SetCounts, UploadCounts, UserCounts,
    },
    model::{
        EndReason, Process,
        gvl_so_far::GvlSoFar,
        seen::{CyclesBefore, ProcessEnd, Seen},
    },
};

/// A recording that is being read: one chunk is in memory at a time.
#[derive(Debug)]
pub struct Recording<R = BufReader<File>> {
    path: PathBuf,
    chunks: Chunks<R>,
    header: Header,
}

/// What was replayed.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// How the recording ends.
    pub ending: Ending,
    /// The time of the last entry that has one, `CLOCK_MONOTONIC` nanoseconds.
    pub last_ns: u64,
    /// Processes that were traced.
    pub processes: u64,
    /// The last account.
    pub ledger: Ledger,
}

impl Recording {
    /// Opens a recording and reads its header.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is not a recording.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let file = File::open(path).map_err(|source| ReadError::Io { path: path.to_owned(), source })?;
        Self::read(BufReader::new(file), path)
    }
}

impl<R: Read> Recording<R> {
    /// Reads the header of a recording, which is called `path` in errors.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is not a recording.
    pub fn read(from: R, path: &Path) -> Result<Self, ReadError> {
        let unreadable = |why| ReadError::Unreadable { path: path.to_owned(), why };
        let failed = |error| match error {
            ChunkError::Io(source) => ReadError::Io { path: path.to_owned(), source },
            ChunkError::Damaged(why) => unreadable(why),
        };
        let mut chunks = Chunks::open(from).map_err(failed)?;
        let head = match chunks.next().map_err(failed)? {
            Next::Header(head) => head,
            Next::Entries(_) | Next::Ended(_) => {
                return Err(unreadable("the recording has no header".to_owned()));
            }
        };
        let head = wire::Header::decode(&head[..]).map_err(|error| unreadable(error.to_string()))?;
        let wire::Header { samples, wall, gvl, requests, alloc, host, kernel, machine, cpus, boot, .. } =
            head;
        let header = Header {
            gctrace: head.gctrace,
            clock: WallClock::with_offsets(head.realtime_offset_ns, head.boottime_offset_ns),
            begun_ns: head.begun_ns,
            subjects: Subjects { samples, wall, gvl, requests, alloc },
            host: Host { name: host, kernel, machine, cpus, boot },
            dump: head.dump.map(|wire::Dump { why, at_ns, from_ns, carried }| Dump {
                why,
                at_ns,
                from_ns,
                carried,
            }),
        };
        Ok(Self { path: path.to_owned(), chunks, header })
    }

    /// What holds for the whole recording.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How much of it was read so far.
    pub fn volume(&self) -> Volume {
        self.chunks.volume()
    }

    /// Where the next chunk begins.
    pub(super) fn offset(&self) -> u64 {
        self.chunks.offset()
    }

    /// Goes over a whole chunk of so many bytes, which has been read before.
    pub(super) fn skip(&mut self, bytes: u64) -> Result<(), ReadError>
    where
        R: Seek,
    {
        self.chunks.skip(bytes).map_err(|source| ReadError::Io { path: self.path.clone(), source })
    }

    /// The next chunk with entries, or how the recording ends.
    pub(super) fn next(&mut self) -> Result<Result<(Tables, Vec<Recorded>), Ending>, ReadError> {
        let offset = self.chunks.offset();
        let next = self.chunks.next().map_err(|error| match error {
            ChunkError::Io(source) => ReadError::Io { path: self.path.clone(), source },
            ChunkError::Damaged(why) => self.damaged(offset, Invalid(why)),
        })?;
        match next {
            Next::Entries(bytes) => {
                decode::chunk(&bytes).map(Ok).map_err(|invalid| self.damaged(offset, invalid))
            }
            Next::Header(_) => Err(self.damaged(offset, Invalid("it is a second header".to_owned()))),
            Next::Ended(ending) => Ok(Err(ending)),
        }
    }

    fn damaged(&self, offset: u64, Invalid(why): Invalid) -> ReadError {
        ReadError::Damaged { path: self.path.clone(), offset, why }
    }
}

/// Hands a recording to outputs. They are finished in any case, with what could be read.
///
/// # Errors
///
/// The recording is damaged from some place on.
pub fn replay<R: Read>(recording: &mut Recording<R>, outputs: &mut Outputs) -> Result<Replayed, ReadError> {
    replay_by(recording, outputs, |_| Ok(()), |_, _, _, _| {})
}

/// [`replay`], with something done before each chunk, and after each with entries was read: where it begins, where it ends.
pub(super) fn replay_by<R: Read>(
    recording: &mut Recording<R>,
    outputs: &mut Outputs,
    mut before: impl FnMut(&mut Recording<R>) -> Result<(), ReadError>,
    mut read: impl FnMut(u64, u64, &Tables, &[Recorded]),
) -> Result<Replayed, ReadError> {
    let mut replay = Replay::new(recording.header(), outputs);
    let ending = loop {
        match before(recording).and_then(|()| replay.step_by(recording, &mut read)) {
            Ok(None) => {}
            Ok(Some(ending)) => break Ok(ending),
            Err(error) => break Err(error),
        }
    };
    replay.finish();
    let Replay { last_ns, processes, ledger, .. } = replay;
    Ok(Replayed { ending: ending?, last_ns, processes, ledger })
}

/// What is known of a process whose end has not come.
struct Running {
    process: Process,
    since_ns: u64,
    cycles: u64,
    lost: u64,
}

impl Running {
    /// Its end, as far as the recording has told.
    fn end(&self, reason: EndReason, ts_ns: u64) -> ProcessEnd {
        ProcessEnd {
            reason,
            ts_ns,
            since_ns: self.since_ns,
            outside_ns: 0,
            shutdown: None,
            cycles: self.cycles,
            before: CyclesBefore::Unknown,
            lost: self.lost,
        }
    }
}

/// What a dump says of the time before it.
#[derive(Default)]
struct Before {
    /// Entries that are still to come of what it says.
    left: u64,
    /// Processes that were traced then, and are still: what is counted of them from their beginning on is not of the dump.
    processes: BTreeSet<u32>,
    /// How many that were.
    count: u64,
    gvl: BTreeMap<u32, GvlSoFar>,
    account: Option<Ledger>,
}

impl Before {
    /// Takes an entry if it says how things stood. `false`: outputs get it, too.
    fn takes(&mut self, tables: &Tables, entry: &Recorded) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        match entry {
            Recorded::Account(ledger) => self.account = Some(ledger.clone()),
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

    /// The sums of a process's threads since then; `None`: they are not known.
    fn gvl_since(&mut self, pid: u32, so_far: &GvlSoFar) -> Option<GvlSoFar> {
        if let Some(before) = self.gvl.get(&pid) {
            return Some(so_far.growth(&mut before.clone()));
        }
        self.gvl.insert(pid, so_far.clone());
        None
    }
}

/// Hands what is in a recording to outputs, chunk by chunk.
pub(super) struct Replay<O> {
    outputs: O,
    /// The recording is a dump.
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
            before: dump.map(|dump| Before { left: dump.carried, ..Before::default() }),
            last_ns: dump.map_or(header.begun_ns, |dump| dump.from_ns),
            processes: 0,
            running: BTreeMap::new(),
            ledger: Ledger::default(),
            closed: false,
            finished: false,
            settled: false,
        }
    }

    /// Hands on the next chunk, or says how the recording ends.
    pub(super) fn step<R: Read>(
        &mut self,
        recording: &mut Recording<R>,
    ) -> Result<Option<Ending>, ReadError> {
        self.step_by(recording, |_, _, _, _| {})
    }

    /// The same, with something done before entries are handed on: where their chunk begins, where it ends.
    fn step_by<R: Read>(
        &mut self,
        recording: &mut Recording<R>,
        read: impl FnOnce(u64, u64, &Tables, &[Recorded]),
    ) -> Result<Option<Ending>, ReadError> {
        let begin = recording.offset();
        let (tables, entries) = match recording.next()? {
            Ok(chunk) => chunk,
            Err(ending) => return Ok(Some(ending)),
        };
        read(begin, recording.offset(), &tables, &entries);
        for entry in &entries {
            self.hand(&tables, entry);
        }
        Ok(None)
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
            Recorded::GvlGap(gap) => self.outputs.tell(|exporter| exporter.gvl_gap(*gap)),
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
            // Its sums are of more than the dump, and cannot be told apart.
            Owned::GvlProcess(_) => {}
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
            Owned::Process(_, now_ns) => {
                self.processes += 1;
                let running = Running { process: process.clone(), since_ns: *now_ns, cycles: 0, lost: 0 };
                self.running.insert(process.pid, running);
            }
            Owned::Cycle(cycle) => {
                if let Some(running) = self.running.get_mut(&process.pid) {
                    running.cycles += 1;
                    running.lost = running.lost.saturating_add(cycle.lost);
                }
            }
            Owned::Ended(_) => drop(self.running.remove(&process.pid)),
            _ => {}
        }
    }

    /// The recorded counters, of a dump since its beginning.
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

    /// Counters with those of these outputs in place of those that the recorded run had.
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

    /// What a recording that was cut off lacks: the end of everything, at the time of its last entry.
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
