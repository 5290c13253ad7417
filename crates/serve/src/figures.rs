//! The figures of a part of a recording that the page shows, besides profiles. Pure; memory is bounded, however long the recording is.

mod filler;
mod kinds;

use std::{
    cmp::Reverse,
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use gctrace_report::{
    aggregate::{
        gc_summary::{Distribution, GcSummary},
        request_summary::{By, RequestSummary},
    },
    export::{place, program, started_by},
    model::{
        GcCycle, Process,
        gvl::{GvlDoing, GvlTimes, GvlWait},
        seen::Seen,
        source::{app_frame, ruby_frame},
        stack::{StackSample, ThreadState},
    },
};

pub(crate) use filler::Filler;
pub(crate) use kinds::{Did, OneProcess, OneThread, Pair, Pause};

use crate::{
    columns::{CLASSES, Columns, class},
    lanes::Lanes,
};

/// Maximum number of pauses listed: the longest ones.
const WORST: usize = 15;
/// Maximum number of processes that are distinguished.
const PROCESSES: usize = 5000;
/// Maximum number of threads that are distinguished.
const THREADS: usize = 20_000;
/// Maximum number of threads whose activity over time is kept: those seen first.
const DRAWN: usize = 256;
/// Maximum number of pairs of threads, each with the place at which one blocked the other.
const PAIRS: usize = 20_000;

/// All figures of a part.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) lanes: Lanes,
    pub(crate) processes: Vec<OneProcess>,
    pub(crate) more_processes: u64,
    current: HashMap<u32, usize>,
    pub(crate) threads: HashMap<(u32, u32), OneThread>,
    pub(crate) more_threads: u64,
    drawn: usize,
    /// Times in which the GVL was not traced, or individual waits were not reported: start and end.
    pub(crate) gvl_gaps: Vec<(u64, u64)>,
    /// The length of those that there was no room for.
    pub(crate) gvl_more_gaps_ns: u64,
    pub(crate) pauses: [u64; CLASSES],
    pub(crate) stops: Distribution,
    pub(crate) cycles: u64,
    pub(crate) majors: u64,
    pub(crate) work_ns: u64,
    pub(crate) samples: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) worst: Vec<Pause>,
    pub(crate) waits: GvlTimes,
    pub(crate) pairs: HashMap<Pair, GvlTimes>,
    pub(crate) more_pairs: u64,
    pub(crate) requests: RequestSummary,
    /// Bytes allocated; `None` if no whole second was summed.
    pub(crate) allocated: Option<u64>,
    pub(crate) began_ns: Option<u64>,
    pub(crate) closed_ns: u64,
}

impl Figures {
    /// Nanoseconds, up to `end_ns`, during which individual waits for the GVL were not reported.
    pub(crate) fn gvl_unreported_ns(&self, end_ns: u64) -> u64 {
        let from_ns = self.lanes.columns.from_ns;
        let part =
            |(begin_ns, to_ns): &(u64, u64)| to_ns.min(&end_ns).saturating_sub(*begin_ns.max(&from_ns));
        self.gvl_gaps.iter().map(part).fold(self.gvl_more_gaps_ns, u64::saturating_add)
    }

    pub(crate) fn new(columns: Columns) -> Self {
        Self {
            lanes: Lanes::new(columns),
            processes: Vec::new(),
            more_processes: 0,
            current: HashMap::new(),
            threads: HashMap::new(),
            more_threads: 0,
            drawn: 0,
            gvl_gaps: Vec::new(),
            gvl_more_gaps_ns: 0,
            pauses: [0; CLASSES],
            stops: Distribution::default(),
            cycles: 0,
            majors: 0,
            work_ns: 0,
            samples: 0,
            cpu_ns: 0,
            worst: Vec::new(),
            waits: GvlTimes::default(),
            pairs: HashMap::new(),
            more_pairs: 0,
            requests: RequestSummary::default(),
            allocated: None,
            began_ns: None,
            closed_ns: 0,
        }
    }

    /// Whether the cycles of any process are seen.
    pub(crate) fn sees_cycles(&self) -> bool {
        self.processes.iter().any(|of| of.sees_cycles)
    }

    /// Whether the pauses of any process are seen, or there is no process.
    pub(crate) fn times_pauses(&self) -> bool {
        self.processes.is_empty() || self.processes.iter().any(|of| of.times_pauses)
    }

    /// Whether nothing was seen.
    pub(crate) fn is_empty(&self) -> bool {
        self.cycles == 0
            && self.work_ns == 0
            && self.samples == 0
            && self.waits.count == 0
            && self.requests.count() == 0
            && self.allocated.is_none()
            && self.threads.is_empty()
    }

    fn process(&mut self, process: &Process) -> Option<&mut OneProcess> {
        if let Some(&at) = self.current.get(&process.pid) {
            return self.processes.get_mut(at);
        }
        if self.processes.len() >= PROCESSES {
            return None;
        }
        self.current.insert(process.pid, self.processes.len());
        self.processes.push(OneProcess {
            pid: process.pid,
            program: program(process),
            ruby: process.image.version.to_string(),
            sees_cycles: process.image.method.sees_cycles(),
            times_pauses: process.image.method.times_pauses(),
            cmdline: process.cmdline.as_ref().map_or_else(String::new, |words| words.join(" ")),
            gc: GcSummary::default(),
            cpu_ns: 0,
            span_ns: None,
            outside_ns: 0,
            beyond_ns: 0,
            gvl: None,
        });
        self.processes.last_mut()
    }

    fn thread(&mut self, process: &Process, tid: u32) -> Option<&mut OneThread> {
        let full = self.threads.len() >= THREADS;
        match self.threads.entry((process.pid, tid)) {
            Entry::Occupied(of) => Some(of.into_mut()),
            Entry::Vacant(_) if full => {
                self.more_threads += 1;
                None
            }
            Entry::Vacant(of) => {
                let times_pauses = process.image.method.times_pauses();
                let of = of.insert(OneThread { times_pauses, ..OneThread::default() });
                if self.drawn < DRAWN {
                    self.drawn += 1;
                    of.did = Some(Box::new(self.lanes.columns.like()));
                }
                Some(of)
            }
        }
    }

    /// Extends all columns to the end of the time and gives them the same width.
    pub(crate) fn settle(&mut self, end_ns: u64) {
        let mut dids: Vec<_> = self.threads.values_mut().filter_map(|of| of.did.as_mut()).collect();
        let columns = &mut self.lanes.columns;
        columns.reach(end_ns);
        let mut width_ns = columns.width_ns;
        for did in &mut dids {
            did.reach(end_ns);
            width_ns = width_ns.max(did.width_ns);
        }
        columns.widen(width_ns);
        for did in dids {
            did.widen(width_ns);
        }
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) {
        if let Some(of) = self.process(process) {
            of.gc.cycle(cycle);
        }
        self.cycles += 1;
        self.majors += u64::from(cycle.is_major());
        for pause in &cycle.pauses {
            self.stops.add(pause.ns);
            self.pauses[class(pause.ns)] += 1;
            if let Some(thread) = self.thread(process, pause.tid) {
                thread.pauses += 1;
                thread.pause_ns = thread.pause_ns.saturating_add(pause.ns);
                thread.spent(pause.begin_ns, pause.ns, |did| &mut did.gc);
            }
            if self.worst.len() < WORST || self.worst.last().is_some_and(|last| last.ns < pause.ns) {
                let info = &cycle.start.info;
                let why: Vec<&str> = [info.gc_by, info.major_by].into_iter().flatten().collect();
                self.worst.push(Pause {
                    ns: pause.ns,
                    begin_ns: pause.begin_ns,
                    pid: process.pid,
                    tid: pause.tid,
                    count: cycle.count,
                    kind: cycle.kind(),
                    reason: why.join(", "),
                    by: cycle.trigger.as_deref().and_then(started_by),
                });
                self.worst.sort_by_key(|pause| (Reverse(pause.ns), pause.begin_ns));
                self.worst.truncate(WORST);
            }
        }
        if let Some(thread) = self.thread(process, cycle.start.tid)
            && thread.name.is_empty()
        {
            thread.name.clone_from(&cycle.comm);
        }
    }

    /// Everything is traced from this time on.
    fn began(&mut self, ts_ns: u64) {
        if self.began_ns.is_none() {
            self.began_ns = Some(ts_ns);
            self.lanes.began(ts_ns);
        }
    }

    fn sample(&mut self, process: &Process, sample: &StackSample) {
        // The same rule as in profiles.
        let Some((ts_ns, wall_ns)) = self.began_ns.and_then(|began_ns| sample.since(began_ns)) else {
            return;
        };
        let running = sample.state == ThreadState::Running;
        if running {
            self.samples += 1;
            self.cpu_ns = self.cpu_ns.saturating_add(sample.cpu_ns);
            if let Some(of) = self.process(process) {
                of.cpu_ns = of.cpu_ns.saturating_add(sample.cpu_ns);
            }
        }
        let Some(thread) = self.thread(process, sample.tid) else { return };
        if thread.name != *sample.comm {
            thread.name = sample.comm.to_string();
        }
        if running {
            thread.samples += 1;
            thread.cpu_ns = thread.cpu_ns.saturating_add(sample.cpu_ns);
            thread.spent(ts_ns.saturating_sub(sample.cpu_ns), sample.cpu_ns, |did| &mut did.cpu);
        } else {
            thread.off_ns = thread.off_ns.saturating_add(wall_ns);
        }
    }

    fn wait(&mut self, process: &Process, wait: &GvlWait) {
        let one = GvlTimes { count: 1, ns: wait.ns, max_ns: wait.ns };
        add(&mut self.waits, one);
        if let Some(thread) = self.thread(process, wait.who.tid) {
            thread.name = wait.who.comm.to_string();
            add(&mut thread.waits, one);
            thread.spent(wait.begin_ns, wait.ns, |did| &mut did.wait);
        }
        let line =
            |stack: &Arc<[Arc<_>]>| app_frame(stack).or_else(|| ruby_frame(stack)).map(|frame| place(frame));
        let pair = Pair {
            pid: process.pid,
            waiter: wait.who.clone(),
            holder: wait.blocker.as_ref().map(|blocker| blocker.hold.who.clone()),
            place: wait.blocker.as_ref().and_then(|blocker| {
                // What the holder was seen running, or else its place when it released the GVL.
                blocker.ran.first().map(|(_, stack)| stack).or(blocker.until.as_ref()).and_then(line)
            }),
        };
        if self.pairs.len() >= PAIRS && !self.pairs.contains_key(&pair) {
            self.more_pairs += 1;
            return;
        }
        add(self.pairs.entry(pair).or_default(), one);
    }

    pub(crate) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        self.lanes.see(process, seen);
        match seen {
            Seen::Process { .. } => {
                // An earlier process with this pid is a different one.
                self.current.remove(&process.pid);
                if self.process(process).is_none() {
                    self.more_processes += 1;
                }
            }
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) => {
                self.work_ns = self.work_ns.saturating_add(work.ns);
                let is_pause = work.is_pause();
                if is_pause {
                    self.stops.add(work.ns);
                    self.pauses[class(work.ns)] += 1;
                }
                if let Some(of) = self.process(process) {
                    of.gc.work(work);
                }
                if let Some(thread) = self.thread(process, work.tid) {
                    if is_pause {
                        thread.pauses += 1;
                    }
                    if !work.may_be_nested(&process.image) {
                        thread.pause_ns = thread.pause_ns.saturating_add(work.ns);
                        thread.spent(work.begin_ns, work.ns, |did| &mut did.gc);
                    }
                    if thread.name.is_empty() {
                        thread.name.clone_from(&work.comm);
                    }
                }
            }
            Seen::Stack(sample) => self.sample(process, sample),
            Seen::GvlWait(wait) => self.wait(process, wait),
            Seen::GvlThread(summary) => {
                if let Some(thread) = self.thread(process, summary.who.tid) {
                    if thread.name.is_empty() {
                        thread.name = summary.who.comm.to_string();
                    }
                    thread.gvl.get_or_insert_default().add(&summary.sums);
                }
            }
            Seen::GvlProcess(summary) => {
                if let Some(of) = self.process(process) {
                    of.gvl = Some(summary.clone());
                }
            }
            Seen::Request(request) => {
                self.requests.add_by(By::Endpoint, process, request);
                if let (Some(ns), Some(thread)) = (request.duration_ns(), self.thread(process, request.tid)) {
                    thread.spent(request.begin_ns, ns, |did| &mut did.request);
                }
            }
            Seen::GvlSpan(span) => {
                if span.doing == GvlDoing::Holding
                    && let Some(thread) = self.thread(process, span.who.tid)
                {
                    thread.spent(span.begin_ns, span.ns, |did| &mut did.hold);
                    if thread.name.is_empty() {
                        thread.name = span.who.comm.to_string();
                    }
                }
            }
            Seen::Alloc(sum) => {
                self.allocated = Some(self.allocated.unwrap_or(0).saturating_add(sum.bytes()));
            }
            Seen::Ended(end) => {
                if let Some(of) = self.process(process) {
                    of.span_ns = Some(end.ts_ns.saturating_sub(end.since_ns));
                    (of.outside_ns, of.beyond_ns) = (end.outside_ns, end.beyond_ns);
                }
            }
            _ => {}
        }
    }
}

fn add(sum: &mut GvlTimes, more: GvlTimes) {
    sum.count += more.count;
    sum.ns = sum.ns.saturating_add(more.ns);
    sum.max_ns = sum.max_ns.max(more.max_ns);
}
