//! The data path from events to exporters. One instance, one thread.

use std::{
    collections::{HashMap, VecDeque},
    path::Path,
    sync::Arc,
};

use gctrace_common::event::{Kind, LifeEvent};

use crate::{
    aggregate::{
        gc_cycle::{CycleFold, Folded},
        units::Units,
    },
    bpf::{AwayMap, ExecReader, GvlReader, RequestReader, Rings},
    clock::{WallClock, monotonic_ns},
    decode::{self, OwnedEvent},
    export::{ExportError, Exporter, Outputs, program},
    host::{
        names::Names,
        proc::{self, MemoryReader},
    },
    images::{GcOf, Images, KnownImage},
    ledger::{Ledger, PipelineCounts, RequestCounts, UserCounts},
    model::{
        EndReason, Image, Process,
        request::GcTime,
        seen::{CyclesBefore, ProcessEnd, Seen},
        stack::Stack,
        trace::Span,
    },
    native::NativeNamer,
    stacks::{Finished, Reader, ReadySample, Record, StackOf, Stacks},
};

mod alloc;
mod asleep;
mod before;
mod early;
mod gc;
mod gvl;
mod gvl_ended;
mod gvl_seen;
mod lives;
mod notices;
mod refusals;
mod requests;
mod server_load;
mod traced;
mod unit_states;

pub use self::gvl::{Gvl, GvlOrder};
use self::{
    alloc::{AllocOf, Allocs},
    asleep::Asleep,
    before::Beginnings,
    early::Early,
    gc::decode_state,
    refusals::{Counted, Refusal},
    requests::Numbered,
    server_load::Loads,
    traced::{Described, TracedProcess, Waiting},
};

/// Maximum number of GC records handled at a time, so that a signal is handled promptly under any load.
const BATCH: usize = 4096;

/// State of the data path.
pub struct Pipeline {
    outputs: Outputs,
    images: Images,
    traced: HashMap<u32, TracedProcess>,
    /// Processes about which nothing is reported.
    refused: HashMap<u32, Refusal>,
    /// Images whose probes were detached while a process ran them: records of its program from before name these images.
    left: HashMap<u32, Vec<u32>>,
    /// Processes that are counted as refused.
    counted: Counted,
    /// Processes that have so far only had pauses of unseen cycles.
    waiting: HashMap<u32, Waiting>,
    /// The parent of a process, and when it forked, in monotonic nanoseconds.
    parents: HashMap<u32, (u32, u64)>,
    /// When a process last replaced its program, in monotonic nanoseconds.
    execs: HashMap<u32, u64>,
    /// When processes ended whose records may still arrive, in monotonic nanoseconds.
    ended: HashMap<u32, u64>,
    /// Since when events of an image can be seen, in monotonic nanoseconds: since its first process was seen, or since tracing
    /// started with the image probed. Indices are reused.
    probed_since: HashMap<u32, (Arc<Image>, u64)>,
    beginnings: Beginnings,
    lives: VecDeque<(Kind, LifeEvent)>,
    /// Records of programs whose exec is still in `lives`.
    early: Vec<Early>,
    stacks: Stacks,
    asleep: Option<Asleep>,
    gvl: Gvl,
    requests: Option<RequestReader>,
    /// When processes started their programs, as the kernel saw it.
    programs: Option<ExecReader>,
    units: Units,
    /// Processes with ended requests, and their number of GC records at that time.
    numbered: HashMap<u32, Numbered>,
    unit_states: unit_states::Pending,
    allocs: Allocs,
    loads: Loads,
    names: Names,
    clock: WallClock,
    shares: bool,
    counts: PipelineCounts,
    request_counts: RequestCounts,
}

impl Pipeline {
    /// Creates a data path into these exporters.
    pub fn new(
        exporters: Vec<Box<dyn Exporter>>,
        images: Images,
        stacks: Option<Reader>,
        native: Option<NativeNamer>,
        gvl: Option<GvlReader>,
    ) -> Self {
        Self {
            outputs: Outputs::new(exporters),
            images,
            traced: HashMap::new(),
            refused: HashMap::new(),
            left: HashMap::new(),
            counted: Counted::default(),
            waiting: HashMap::new(),
            parents: HashMap::new(),
            execs: HashMap::new(),
            ended: HashMap::new(),
            probed_since: HashMap::new(),
            beginnings: Beginnings::new(),
            lives: VecDeque::new(),
            early: Vec::new(),
            stacks: Stacks::new(stacks, native),
            asleep: None,
            gvl: Gvl::new(gvl),
            requests: None,
            programs: None,
            units: Units::default(),
            numbered: HashMap::new(),
            unit_states: unit_states::Pending::default(),
            allocs: Allocs::default(),
            loads: Loads::default(),
            names: Names::below(Path::new("/"), None),
            clock: WallClock::measure(),
            shares: false,
            counts: PipelineCounts::default(),
            request_counts: RequestCounts::default(),
        }
    }

    /// Sets the names of containers and pods.
    #[must_use]
    pub fn naming(self, names: Names) -> Self {
        Self { names, ..self }
    }

    /// Sets whether to read how memory is shared.
    #[must_use]
    pub fn reading_shares(self, shares: bool) -> Self {
        Self { shares, ..self }
    }

    /// Sets the map of off-CPU threads, if these are traced.
    #[must_use]
    pub fn with_away(self, away: Option<AwayMap>) -> Self {
        Self { asleep: away.map(Asleep::new), ..self }
    }

    /// User-space counters so far.
    pub fn counts(&self) -> UserCounts {
        let mut counts = UserCounts {
            pipeline: self.counts,
            requests: self.request_counts,
            alloc: self.allocs.counts,
            ..UserCounts::default()
        };
        self.stacks.add_counts(&mut counts);
        self.gvl.add_counts(&mut counts);
        self.outputs.add_counts(&mut counts);
        counts
    }

    /// Whether the run can end: the reader of its only output is gone, or an output has reached its limit.
    pub fn is_enough(&self) -> bool {
        self.outputs.is_over() || self.outputs.is_any_full()
    }

    /// The outputs that could not be written.
    pub fn failures(&self) -> &[String] {
        self.outputs.failures()
    }

    /// Everything present at start has been inspected: programs that start from now on with a probed image are traced from their
    /// beginning.
    pub fn begun(&mut self) {
        let now = monotonic_ns();
        for image in self.images.all() {
            self.probed_since.entry(image.index).or_insert((image, now));
        }
    }

    /// Everything requested is being traced from this time on.
    pub fn recording_began(&mut self, ts_ns: u64) {
        self.outputs.tell(|exporter| exporter.began(ts_ns));
    }

    /// Nothing is traced from this time on.
    pub fn recording_closed(&mut self, ts_ns: u64) {
        self.outputs.tell(|exporter| exporter.closed(ts_ns));
    }

    /// Adds a process that runs a probed image.
    pub fn add_process(&mut self, pid: u32, image: u32, state: Option<(u64, Vec<u8>)>) {
        let Some(known) = self.images.get(image) else { return };
        if let Some(traced) = self.traced.get_mut(&pid)
            && traced.process.image.index == image
        {
            // A sample arrived before this finding.
            traced.beginning.count =
                traced.beginning.count.or_else(|| count_of(&known, state.as_ref().map(|(_, data)| data)));
            return;
        }
        // The finding may be older than an exit that has already been handled.
        if let Some(Refusal::Image(left)) = self.refused.get(&pid)
            && *left != image
        {
            self.refused.remove(&pid);
        }
        if self.refused.contains_key(&pid) || !proc::is_running(pid) {
            return;
        }
        let seen_ns = state.as_ref().map_or_else(monotonic_ns, |(ts_ns, _)| *ts_ns);
        self.trace(pid, "", &known, state, seen_ns);
    }

    /// Describes the traced process for messages, if it is the only one so far.
    pub fn only_process(&self) -> Option<String> {
        let mut all = self.traced.values();
        let (process, None) = (&all.next()?.process, all.next()) else { return None };
        Some(format!("pid {}, {}, Ruby {}", process.pid, program(process), process.image.version))
    }

    /// Handles what is in the rings. Returns whether there may be more.
    pub fn drain(&mut self, rings: &mut Rings) -> bool {
        let mut lives_until = monotonic_ns();
        self.take_lives(rings.life());
        // Everything a process emitted before it forked, execed or exited is in the other rings by now: these are merged by
        // time.
        let mut stacks_until = monotonic_ns();
        self.take_stacks();
        self.take_requests();
        self.bound_early();
        let taken = rings.drain_gc(BATCH, |bytes, life| match decode::decode(bytes) {
            Ok(event) => {
                // A child forked meanwhile may already have run a GC and ended: only the record of its fork names its parent.
                // Its records from before its end must be handled before that end, or it would appear as a new process.
                if event.ts_ns() >= lives_until {
                    lives_until = monotonic_ns();
                    self.take_lives(life);
                    stacks_until = monotonic_ns();
                    self.take_stacks();
                    self.take_requests();
                }
                // Every stack taken before a GC record must be handled first.
                if event.ts_ns() >= stacks_until {
                    stacks_until = monotonic_ns();
                    self.take_stacks();
                }
                self.lives_until(event.ts_ns());
                self.gc_event(&event);
            }
            Err(error) => {
                self.counts.undecodable += 1;
                log::warn!("a GC record could not be decoded: {error}");
            }
        });
        let more = taken == BATCH;
        if !more {
            self.report_requests();
            self.lives_that_are_complete();
        }
        self.report_stacks(None);
        let reports = self.gvl.without_stacks(monotonic_ns(), None);
        self.gvl_report(reports);
        self.report_allocs(monotonic_ns());
        self.report_loads();
        self.flush();
        more
    }

    /// Flushes all exporters with the same time: a recording stores it, and its replay then does what the other exporters did.
    fn flush(&mut self) {
        let now_ns = monotonic_ns();
        self.export(|exporter| exporter.flush(now_ns));
    }

    /// Ends tracing: reports what is still running.
    pub fn detach(&mut self, now_ns: u64) {
        self.lives_until(u64::MAX);
        self.report_stacks(None);
        self.stacks.close();
        self.gvl_detach(now_ns);
        let mut pids: Vec<u32> = self.traced.keys().copied().collect();
        pids.sort_unstable();
        for pid in pids {
            self.end(pid, EndReason::Detached, now_ns);
        }
    }

    /// Sets the number of tracepoint hits that the kernel skipped.
    pub fn tracepoints_skipped(&mut self, hits: u64) {
        self.counts.tracepoints_skipped = hits;
    }

    /// The user requests a file of the kept data.
    pub fn dump(&mut self) {
        self.outputs.tell(|exporter| exporter.dump_requested());
    }

    /// Announces an account. Returns whether an exporter wants the off-CPU times still in progress.
    pub fn account_follows(&mut self) -> bool {
        let mut wanted = false;
        self.outputs.tell(|exporter| wanted |= exporter.account_follows());
        wanted && self.asleep.is_some()
    }

    /// Reports the current counts to the exporters.
    pub fn account(&mut self, kernel: Option<Vec<u64>>) {
        // What can be read from here on says for which of its time waits are missing.
        self.gvl_gaps(monotonic_ns());
        let ledger = Ledger { kernel, user: self.counts(), ..Ledger::default() };
        self.outputs.tell(|exporter| exporter.account(&ledger));
    }

    /// Writes the end of every output.
    pub fn finish(&mut self, ledger: &Ledger) {
        self.export(|exporter| exporter.finish(ledger));
    }

    /// Reports the final account, including the results of the last uploads.
    pub fn settle(&mut self, ledger: &Ledger) {
        self.export(|exporter| exporter.settled(ledger));
    }

    fn take_stacks(&mut self) {
        for record in self.stacks.take() {
            if self.is_early(record.header()) {
                self.wait_for_exec(Early::Stack(record));
            } else {
                self.stack_record(record);
            }
        }
    }

    fn stack_record(&mut self, record: Record) {
        if let Record::Stack(stack) = &record {
            self.handler_of(stack);
        }
        let finished = match record {
            Record::Stack(stack) => self.stacks.finish(*stack),
            Record::Event(OwnedEvent::OffCpu(event)) => return self.stacks.returned(event),
            Record::Event(OwnedEvent::Gvl(record)) => return self.gvl_record(record),
            Record::Event(OwnedEvent::Refill(event)) => return self.refill(&event),
        };
        let Some(Finished { of, pid, tid, comm, ts_ns, request_ns, span, stack, .. }) = finished else {
            return;
        };
        match of {
            StackOf::Trigger => self.trigger(pid, ts_ns, stack, span),
            StackOf::Waiter => {
                let report = self.gvl.stack(pid, tid, ts_ns, stack);
                self.gvl_report(report);
            }
            StackOf::Holder => self.gvl.holder_stack(pid, tid, ts_ns, stack),
            StackOf::Blocker => self.gvl.ran(pid, tid, ts_ns, stack),
            StackOf::Refill => {
                // The record of the refill comes first, and starts tracing its process unless that is refused.
                let is_traced = self.traced.contains_key(&pid);
                let request = is_traced.then(|| self.request_of_stack(pid, tid, request_ns)).flatten();
                self.refill_stack(pid, tid, AllocOf { comm, ts_ns, request, span }, stack);
            }
            // Runs do not load the program that takes these.
            StackOf::Malloc => {}
        }
    }

    /// Handles the stack that started a cycle, whether or not its snapshot has arrived.
    fn trigger(&mut self, pid: u32, ts_ns: u64, stack: Stack, span: Option<Span>) {
        if self.traced.get_mut(&pid).is_some_and(|traced| traced.fold.trigger(ts_ns, &stack, span)) {
            self.counts.triggers += 1;
        } else {
            self.stacks.keep_trigger(pid, ts_ns, stack, span);
        }
    }

    /// Exports waiting samples: those of a process up to a time, or all.
    fn report_stacks(&mut self, of: Option<(u32, u64)>) {
        for ReadySample { pid, image, request_ns, mut sample } in self.stacks.take_ready(of) {
            let Some(process) = self.process_of(pid, image, &sample.comm, sample.ts_ns) else {
                self.counts.refused_stacks += 1;
                continue;
            };
            self.counts.stacks += 1;
            sample.request = self.request_of_stack(pid, sample.tid, request_ns);
            self.see(&process, Seen::Stack(&sample));
        }
    }

    /// The process of a record that does not prove the process's VM, if it is traced.
    fn process_of(&mut self, pid: u32, image: u32, comm: &str, seen_ns: u64) -> Option<Process> {
        if !self.is_traced(pid, image, comm, seen_ns) {
            return None;
        }
        self.traced.get(&pid).map(|traced| traced.process.clone())
    }

    /// Whether the process of a record that does not prove its VM is traced; starts tracing it if possible.
    fn is_traced(&mut self, pid: u32, image: u32, comm: &str, seen_ns: u64) -> bool {
        if let Some(traced) = self.traced.get(&pid)
            && (traced.process.image.index == image || traced.image.gc == GcOf::LibraryOf(image))
        {
            return true;
        }
        let Some(known) = self.images.get(image) else { return false };
        // Which GC the process runs only shows in its state or in a GC record.
        if self.refused.contains_key(&pid)
            || self.has_left(pid, image)
            || self.has_ended(pid, seen_ns)
            || known.gc == GcOf::Chosen
        {
            return false;
        }
        self.trace(pid, comm, &known, None, seen_ns);
        true
    }

    /// Whether a record is from before the end of its process, and that end has already been handled.
    fn has_ended(&self, pid: u32, ts_ns: u64) -> bool {
        self.ended.get(&pid).is_some_and(|end_ns| ts_ns <= *end_ns)
    }

    fn trace(
        &mut self,
        pid: u32,
        comm: &str,
        known: &Arc<KnownImage>,
        state: Option<(u64, Vec<u8>)>,
        seen_ns: u64,
    ) {
        if self.traced.contains_key(&pid) {
            // The same pid with another image: an exec whose record has not been seen (lost, or yet to arrive).
            self.gvl_replaced(pid);
            self.end(pid, EndReason::Execed, seen_ns);
        }
        let mut described = Described::read(pid, comm, &known.image, self.names.place(pid), self.clock);
        let parent = self.forking_parent(pid, &known.image, seen_ns);
        let forked = parent.is_some();
        if let Some(parent) = parent {
            described = described.forked_by(parent, comm);
        }
        let Described { mut process, arguments_at, environment } = described;
        process.ppid = self.forked_by(pid, seen_ns).or(process.ppid);
        let memory = MemoryReader::open(pid).ok();
        let waiting = self.waiting.remove(&pid).unwrap_or_default();
        let first_ns = waiting.pauses.first().map_or(u64::MAX, |(begin_ns, _)| *begin_ns);
        let since_ns = self.traced_since(pid, &known.image, seen_ns).min(first_ns);
        let count = count_of(known, state.as_ref().map(|(_, data)| data));
        let traced = TracedProcess {
            process: process.clone(),
            image: known.clone(),
            fold: CycleFold::after(waiting.seq),
            memory,
            arguments_at,
            environment,
            shares_read: None,
            starts_outside: 0,
            has_unreported: false,
            cycles: 0,
            lost: waiting.lost,
            last_ns: 0,
            given_up: 0,
            since_ns,
            seen_ns,
            begun_ns: None,
            pauses: GcTime::default(),
            has_units: false,
            has_other_endpoints: false,
            outside_ns: waiting.ns,
            beginning: self.beginnings.of(pid, count),
        };
        let state = state.zip(known.reading.as_ref()).map(|((ts_ns, data), reading)| {
            reading.prove();
            decode_state(&reading.layout, ts_ns, pid, &data, traced.read_memory())
        });
        self.traced.insert(pid, traced);
        // What applies to a server also applies to its workers, so it is not repeated for forked children.
        if !forked {
            self.say_of_threads(&process);
        }
        self.counts.processes += 1;
        self.counts.lost_records += waiting.lost;
        if known.image.gvl.is_some() {
            self.gvl.pauses(pid, &waiting.pauses, !waiting.cut);
        }
        self.see(&process, Seen::Process { state: state.as_ref(), now_ns: monotonic_ns(), since_ns });
    }

    /// Since when events of a process with this image could be seen.
    fn traced_since(&mut self, pid: u32, image: &Arc<Image>, seen_ns: u64) -> u64 {
        let now = monotonic_ns();
        let opened = self.images.opened_ns(image.index).unwrap_or(now);
        let since = self.probed_since.entry(image.index).or_insert_with(|| (image.clone(), opened));
        if !Arc::ptr_eq(&since.0, image) {
            *since = (image.clone(), opened);
        }
        let probed = since.1;
        // The start of a process that is already gone is unknown, unless its fork was seen.
        let forked = self.fork_of(pid, seen_ns).map(|(_, forked_ns)| forked_ns);
        let Some(started) = forked.or_else(|| proc::started_ns(pid)) else { return now };
        let execed = self.execs.get(&pid).copied().unwrap_or_default();
        // Records of the exec come only from processes that were followed then. A later one belongs to another program.
        let begun = self.programs.as_ref().and_then(|programs| programs.begun_ns(pid));
        let execed = execed.max(begun.filter(|ns| *ns <= seen_ns).unwrap_or_default());
        started.max(execed).max(probed).min(now)
    }

    fn end(&mut self, pid: u32, reason: EndReason, ts_ns: u64) {
        self.end_requests(pid);
        self.report_alloc(pid, ts_ns);
        self.report_allocs_without_stack(pid, ts_ns);
        self.allocs.forget(pid);
        self.loads.forget(pid);
        let Some(mut traced) = self.traced.remove(&pid) else { return };
        let (open, shutdown) = traced.fold.finish();
        if let Some(cycle) = open {
            self.counts.cycles_unfinished += 1;
            self.counts.cycles += 1;
            traced.cycles += 1;
            self.see(&traced.process, Seen::Cycle(&cycle));
        }
        let (before, is_new) = traced.beginning.ended(traced.lost > 0);
        if is_new {
            self.count_before(before);
        }
        if reason == EndReason::Exited {
            self.run_ended(&traced, before, ts_ns);
        }
        let TracedProcess { cycles, lost, since_ns, outside_ns, .. } = traced;
        let end =
            ProcessEnd { reason, ts_ns, since_ns, outside_ns, beyond_ns: 0, shutdown, cycles, before, lost };
        self.see(&traced.process, Seen::Ended(&end));
    }

    fn count_before(&mut self, before: CyclesBefore) {
        match before {
            CyclesBefore::Earlier(cycles) => self.counts.cycles_before_run += cycles,
            CyclesBefore::Missed(cycles) => self.counts.cycles_missed += cycles,
            CyclesBefore::Unknown => {}
        }
    }

    fn report(&mut self, pid: u32, folded: Folded) {
        for cycle in folded.cycles {
            self.counts.cycles += 1;
            let Some(traced) = self.traced.get_mut(&pid) else { continue };
            traced.cycles += 1;
            let process = traced.process.clone();
            self.see(&process, Seen::Cycle(&cycle));
        }
    }

    /// Passes an observation of a process to every exporter.
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        self.export(|exporter| exporter.see(process, seen));
    }

    /// Calls `hand` for every exporter; one that fails does not stop the others.
    fn export(&mut self, hand: impl FnMut(&mut dyn Exporter) -> Result<(), ExportError>) {
        self.outputs.hand(hand);
    }
}

/// `GC.count` in the state of a process, as read when it was found.
fn count_of(known: &KnownImage, state: Option<&Vec<u8>>) -> Option<u64> {
    known.reading.as_ref()?.layout.count.read(state?)
}

#[cfg(test)]
mod tests;
