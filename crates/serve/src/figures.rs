//! What the page shows of a part of a recording, besides profiles. Pure; of bounded memory, however long the recording is.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    rc::Rc,
    sync::Arc,
};

use gctrace_report::{
    aggregate::{
        gc_summary::{Distribution, GcSummary},
        request_summary::{By, RequestSummary},
    },
    export::{ExportError, Exporter, place, program, started_by},
    model::{
        GcCycle, GcState, Process,
        gvl::{GvlProcessSummary, GvlThreadSummary, GvlTimes, GvlWait, GvlWho},
        seen::Seen,
        source::{app_frame, ruby_frame},
        stack::{StackSample, ThreadState},
    },
};

use crate::columns::{CLASSES, Columns, class};

/// Pauses that are listed, the longest.
const WORST: usize = 15;
/// Processes that are told apart.
const PROCESSES: usize = 5000;
/// Threads.
const THREADS: usize = 20_000;
/// Pairs of threads, with the place at which one held up the other.
const PAIRS: usize = 20_000;

/// A process.
#[derive(Clone, Debug)]
pub(crate) struct OneProcess {
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) ruby: String,
    pub(crate) cmdline: String,
    pub(crate) gc: GcSummary,
    pub(crate) cpu_ns: u64,
    /// For how long it was traced, when that has ended.
    pub(crate) span_ns: Option<u64>,
    /// Pauses of cycles that had begun before, nanoseconds.
    pub(crate) outside_ns: u64,
    /// Waits of its threads for the GVL, over whole lives.
    pub(crate) gvl: Option<GvlProcessSummary>,
}

impl OneProcess {
    /// All of its time in the GC that was seen.
    pub(crate) fn gc_ns(&self) -> u64 {
        self.gc.stopped_ns + self.outside_ns + self.gc.work.values().map(|(_, ns)| ns).sum::<u64>()
    }
}

/// A thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct OneThread {
    pub(crate) name: String,
    pub(crate) samples: u64,
    pub(crate) cpu_ns: u64,
    /// Time off the CPU in samples.
    pub(crate) off_ns: u64,
    /// Pauses that it was in.
    pub(crate) pauses: u64,
    pub(crate) pause_ns: u64,
    /// Long waits for the GVL.
    pub(crate) waits: GvlTimes,
    /// What it did with the GVL over its whole life.
    pub(crate) gvl: Option<GvlThreadSummary>,
}

/// A long pause.
#[derive(Clone, Debug)]
pub(crate) struct Pause {
    pub(crate) ns: u64,
    pub(crate) begin_ns: u64,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    pub(crate) count: u64,
    pub(crate) kind: &'static str,
    pub(crate) reason: String,
    /// The line that started its cycle.
    pub(crate) by: Option<String>,
}

/// Who held up whom, and where.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Pair {
    pub(crate) pid: u32,
    pub(crate) waiter: GvlWho,
    pub(crate) holder: Option<GvlWho>,
    pub(crate) place: Option<String>,
}

/// All of it.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) columns: Columns,
    pub(crate) processes: Vec<OneProcess>,
    pub(crate) more_processes: u64,
    current: HashMap<u32, usize>,
    pub(crate) threads: HashMap<(u32, u32), OneThread>,
    pub(crate) more_threads: u64,
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
    pub(crate) allocated: u64,
    rss: BTreeMap<u32, u64>,
    pub(crate) began_ns: Option<u64>,
    pub(crate) closed_ns: u64,
}

impl Figures {
    pub(crate) fn new(columns: Columns) -> Self {
        Self {
            columns,
            processes: Vec::new(),
            more_processes: 0,
            current: HashMap::new(),
            threads: HashMap::new(),
            more_threads: 0,
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
            allocated: 0,
            rss: BTreeMap::new(),
            began_ns: None,
            closed_ns: 0,
        }
    }

    /// Whether nothing was seen.
    pub(crate) fn is_empty(&self) -> bool {
        self.cycles == 0
            && self.work_ns == 0
            && self.samples == 0
            && self.waits.count == 0
            && self.requests.count() == 0
            && self.allocated == 0
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
            cmdline: process.cmdline.as_ref().map_or_else(String::new, |words| words.join(" ")),
            gc: GcSummary::default(),
            cpu_ns: 0,
            span_ns: None,
            outside_ns: 0,
            gvl: None,
        });
        self.processes.last_mut()
    }

    fn thread(&mut self, process: &Process, tid: u32) -> Option<&mut OneThread> {
        let key = (process.pid, tid);
        if self.threads.len() >= THREADS && !self.threads.contains_key(&key) {
            self.more_threads += 1;
            return None;
        }
        Some(self.threads.entry(key).or_default())
    }

    fn state(&mut self, process: &Process, state: &GcState) {
        let Some(memory) = state.memory else { return };
        self.rss.insert(process.pid, memory.rss);
        let sum = self.rss.values().copied().fold(0, u64::saturating_add);
        if let Some(cell) = self.columns.at(state.ts_ns) {
            cell.rss = cell.rss.max(Some(sum));
        }
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) {
        self.state(process, &cycle.start);
        if let Some(end) = &cycle.end {
            self.state(process, end);
        }
        if let Some(of) = self.process(process) {
            of.gc.cycle(cycle);
        }
        self.cycles += 1;
        self.majors += u64::from(cycle.is_major());
        for pause in &cycle.pauses {
            self.stops.add(pause.ns);
            self.pauses[class(pause.ns)] += 1;
            self.columns.cover(pause.begin_ns, pause.ns, |cell| &mut cell.pause_ns);
            if let Some(cell) = self.columns.at(pause.begin_ns) {
                cell.longest_ns = cell.longest_ns.max(pause.ns);
                cell.pauses[class(pause.ns)] += 1;
            }
            if let Some(thread) = self.thread(process, pause.tid) {
                thread.pauses += 1;
                thread.pause_ns += pause.ns;
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

    fn sample(&mut self, process: &Process, sample: &StackSample) {
        let running = sample.state == ThreadState::Running;
        if running {
            self.samples += 1;
            self.cpu_ns = self.cpu_ns.saturating_add(sample.cpu_ns);
            // It stands for the time before it.
            let begin_ns = sample.ts_ns.saturating_sub(sample.cpu_ns);
            self.columns.cover(begin_ns, sample.cpu_ns, |cell| &mut cell.cpu_ns);
            if let Some(of) = self.process(process) {
                of.cpu_ns += sample.cpu_ns;
            }
        }
        let Some(thread) = self.thread(process, sample.tid) else { return };
        if thread.name != *sample.comm {
            thread.name = sample.comm.to_string();
        }
        if running {
            thread.samples += 1;
            thread.cpu_ns += sample.cpu_ns;
        } else {
            thread.off_ns += sample.wall_ns;
        }
    }

    fn wait(&mut self, process: &Process, wait: &GvlWait) {
        let one = GvlTimes { count: 1, ns: wait.ns, max_ns: wait.ns };
        add(&mut self.waits, one);
        if let Some(cell) = self.columns.at(wait.begin_ns) {
            cell.waits[class(wait.ns)] += 1;
        }
        if let Some(thread) = self.thread(process, wait.who.tid) {
            thread.name = wait.who.comm.to_string();
            add(&mut thread.waits, one);
        }
        let line =
            |stack: &Arc<[Arc<_>]>| app_frame(stack).or_else(|| ruby_frame(stack)).map(|frame| place(frame));
        let pair = Pair {
            pid: process.pid,
            waiter: wait.who.clone(),
            holder: wait.blocker.as_ref().map(|blocker| blocker.hold.who.clone()),
            place: wait.blocker.as_ref().and_then(|blocker| {
                // What the holder was seen to run, or else where it was when it let go.
                blocker.ran.first().map(|(_, stack)| stack).or(blocker.until.as_ref()).and_then(line)
            }),
        };
        if self.pairs.len() >= PAIRS && !self.pairs.contains_key(&pair) {
            self.more_pairs += 1;
            return;
        }
        add(self.pairs.entry(pair).or_default(), one);
    }

    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { state, .. } => {
                // An earlier process with this pid is another one.
                self.current.remove(&process.pid);
                if self.process(process).is_none() {
                    self.more_processes += 1;
                }
                if let Some(state) = state {
                    self.state(process, state);
                }
            }
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) => {
                self.work_ns += work.ns;
                self.columns.cover(work.begin_ns, work.ns, |cell| &mut cell.pause_ns);
                if let Some(of) = self.process(process) {
                    of.gc.work(work);
                }
            }
            Seen::Stack(sample) => self.sample(process, sample),
            Seen::GvlWait(wait) => self.wait(process, wait),
            Seen::GvlThread(summary) => {
                if let Some(thread) = self.thread(process, summary.who.tid) {
                    if thread.name.is_empty() {
                        thread.name = summary.who.comm.to_string();
                    }
                    thread.gvl = Some(summary.clone());
                }
            }
            Seen::GvlProcess(summary) => {
                if let Some(of) = self.process(process) {
                    of.gvl = Some(summary.clone());
                }
            }
            Seen::Request(request) => {
                self.requests.add_by(By::Endpoint, process, request);
                if let Some(cell) = self.columns.at(request.begin_ns) {
                    cell.requests += 1;
                }
            }
            Seen::Alloc(sum) => {
                self.allocated = self.allocated.saturating_add(sum.bytes());
                self.columns.spread(sum.begin_ns, sum.end_ns, sum.bytes());
            }
            Seen::Ended(end) => {
                if let Some(state) = &end.shutdown {
                    self.state(process, state);
                }
                self.rss.remove(&process.pid);
                if let Some(of) = self.process(process) {
                    of.span_ns = Some(end.ts_ns.saturating_sub(end.since_ns));
                    of.outside_ns = end.outside_ns;
                }
            }
            Seen::GvlSpan(_) | Seen::GvlSoFar(_) | Seen::AllocStack(_) => {}
        }
    }
}

fn add(sum: &mut GvlTimes, more: GvlTimes) {
    sum.count += more.count;
    sum.ns = sum.ns.saturating_add(more.ns);
    sum.max_ns = sum.max_ns.max(more.max_ns);
}

/// Fills figures.
pub(crate) struct Filler(pub(crate) Rc<RefCell<Figures>>);

impl Exporter for Filler {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.0.borrow_mut().see(process, seen);
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.0.borrow_mut().began_ns.get_or_insert(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.0.borrow_mut().closed_ns = ts_ns;
    }
}
