//! Stacks, GC pauses and other observations of a run: sums for profiles and, on request, the times of events for timelines.
//! Memory is bounded: what exceeds a limit goes into sums labelled as such, and into counters.

mod endpoints;
mod filter;
mod malloc;
mod memory;
mod pattern;
mod requests;
mod sums;
mod traces;

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU64,
    sync::Arc,
};

use foldhash::fast::RandomState as FastHash;

pub use self::endpoints::EndpointIndex;
use self::endpoints::Endpoints;
pub use self::filter::{Amount, Filter, FilterAccount, Shares};
use self::filter::{FilterState, ThreadName};
pub use self::malloc::{MallocCall, MallocKey, MallocSum};
pub use self::memory::MemoryMoment;
pub use self::pattern::Pattern;
pub use self::requests::RequestMoment;
use self::sums::Kept;
pub use self::sums::alloc::{AllocCount, AllocInterval, AllocKey, AllocMoment};
pub use self::sums::gvl::{GvlFacts, GvlMoment, HoldKey, HolderAt, WaitKey, longest_holds};
pub use self::traces::TraceIndex;
use self::traces::Traces;
use super::call_tree::{CallTree, NodeId};
use crate::model::{
    Container, GcState, GcWork, Image, Origin, Pause, Phase, Process,
    gvl::{GvlGap, GvlTimes},
    seen::{Observer, Seen},
    stack::{Frame, FrameKind, GcActivity, Stack, ThreadState},
    trace::Link,
};

/// Limits on how much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Distinct call paths.
    pub nodes: usize,
    /// Distinct sums.
    pub sums: usize,
    /// Distinct threads.
    pub threads: usize,
    /// Samples of a timeline, and separately other events of it.
    pub timeline: usize,
}

impl Default for Limits {
    /// Allows a few hundred megabytes if fully used.
    fn default() -> Self {
        Self { nodes: 1 << 20, sums: 1 << 20, threads: 1 << 16, timeline: 1_000_000 }
    }
}

/// A process of the recording.
#[derive(Clone, Debug)]
pub struct ProcessFacts {
    /// Pid, host namespace; 0 for the sum of the processes beyond the limit.
    pub pid: u32,
    /// Name of its main thread when it was first seen.
    pub comm: String,
    /// Its arguments.
    pub cmdline: Vec<String>,
    /// Its Ruby.
    pub image: Option<Arc<Image>>,
    /// What it belongs to.
    pub origin: Arc<Origin>,
    /// Its host name.
    pub hostname: Option<String>,
    /// Its container, pod and unit.
    pub container: Container,
    /// When it was first seen, `CLOCK_MONOTONIC` nanoseconds.
    pub first_ns: u64,
    /// When it was last seen.
    pub last_ns: u64,
}

/// Index of a process in a recording.
pub type ProcessIndex = usize;
/// Index of a thread in a recording.
pub type ThreadIndex = u32;

/// A thread under one of its names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Thread {
    /// Its process.
    pub process: ProcessIndex,
    /// Its id, host namespace; 0 for the sum of the threads beyond the limit.
    pub tid: u32,
    /// Its name.
    pub name: Arc<str>,
}

/// The key by which samples are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampleKey {
    /// The thread.
    pub thread: ThreadIndex,
    /// The stack.
    pub node: NodeId,
    /// What the thread was doing.
    pub state: ThreadState,
    /// What the GC was doing on it.
    pub gc: GcActivity,
    /// The endpoint of the request that the thread served; `None`: it served none, or that is unknown.
    pub endpoint: Option<EndpointIndex>,
    /// The span that was active or, without one, the span of the request's caller, if known and distinguished.
    pub trace: Option<TraceIndex>,
}

/// A sum of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleSum {
    /// Number of samples.
    pub samples: u64,
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Wall time, nanoseconds.
    pub wall_ns: u64,
}

/// The key by which pauses are summed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PauseKey {
    /// The thread that started the cycle.
    pub thread: ThreadIndex,
    /// Its stack at that moment; [`NodeId::ROOT`] if it was not captured.
    pub node: NodeId,
    /// `minor` or `major`.
    pub kind: &'static str,
    /// Reasons of the cycle: `gc_by` and `major_by`.
    pub reason: (Option<&'static str>, Option<&'static str>),
    /// The part of the pause.
    pub phase: Phase,
    /// The endpoint of the request that started the cycle, as in [`SampleKey`].
    pub endpoint: Option<EndpointIndex>,
    /// The trace, as in [`SampleKey`].
    pub trace: Option<TraceIndex>,
}

/// A sum of pauses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PauseSum {
    /// Number of pauses that began their work in this phase.
    pub pauses: u64,
    /// Time in this phase, nanoseconds.
    pub ns: u64,
}

/// A sample with its time.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Thread, stack, state and other attributes.
    pub key: SampleKey,
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Wall time, nanoseconds.
    pub wall_ns: u64,
}

/// A GC cycle with its time.
#[derive(Clone, Debug)]
pub struct CycleMoment {
    /// The thread that started it.
    pub thread: ThreadIndex,
    /// Its stack at that moment.
    pub node: NodeId,
    /// `GC.count`.
    pub count: u64,
    /// `minor` or `major`.
    pub kind: &'static str,
    /// Reasons: `gc_by` and `major_by`.
    pub reason: (Option<&'static str>, Option<&'static str>),
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// End of its sweep, if it was seen.
    pub end_ns: Option<u64>,
    /// Number of the request that started it, if known.
    pub request: Option<NonZeroU64>,
    /// Its pauses.
    pub pauses: Box<[Pause]>,
}

/// An interval of GC work in an image without event sites.
#[derive(Clone, Copy, Debug)]
pub struct WorkMoment {
    /// The thread.
    pub thread: ThreadIndex,
    /// What was timed.
    pub name: &'static str,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length, nanoseconds.
    pub ns: u64,
}

/// Events with their times, up to a limit.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Samples, in the order of arrival.
    pub samples: Vec<Moment>,
    /// Cycles, likewise.
    pub cycles: Vec<CycleMoment>,
    /// GC work in images without event sites.
    pub work: Vec<WorkMoment>,
    /// Memory, at GC events.
    pub memory: Vec<MemoryMoment>,
    /// Allocation stacks, in the order of arrival.
    pub allocs: Vec<AllocMoment>,
    /// Amounts allocated in each interval, likewise.
    pub allocated: Vec<AllocInterval>,
    /// Long waits for the GVL, long holds, and long times without it, in the order of arrival; a hold may occur twice.
    pub gvl: Vec<GvlMoment>,
    /// Requests, in the order in which they ended.
    pub requests: Vec<RequestMoment>,
    /// Number of samples beyond the limit, which are only in the sums.
    pub samples_left_out: u64,
    /// The same for allocation stacks.
    pub allocs_left_out: u64,
    /// Number of cycles, pauses, requests, intervals of work or allocation, and memory points beyond the limit.
    pub events_left_out: u64,
    events: usize,
    endpoints: HashSet<Arc<str>>,
}

/// Everything recorded.
#[derive(Debug)]
pub struct Recording {
    limits: Limits,
    filter: FilterState,
    /// The stacks.
    pub tree: CallTree,
    /// The Rubies of traced processes.
    pub images: Vec<Arc<Image>>,
    /// The processes.
    pub processes: Vec<ProcessFacts>,
    /// The threads.
    pub threads: Vec<Thread>,
    /// Sums of samples.
    pub samples: HashMap<SampleKey, SampleSum>,
    /// Sums of pauses.
    pub pauses: HashMap<PauseKey, PauseSum>,
    /// Sums of allocation.
    pub allocs: HashMap<AllocKey, AllocCount>,
    /// Memory allocated with malloc (`gctrace malloc`).
    pub mallocs: HashMap<MallocKey, MallocSum>,
    /// Sums of long waits for the GVL.
    pub gvl_waits: HashMap<WaitKey, GvlTimes>,
    /// Sums of times for which the GVL was held while another thread waited long for it.
    pub gvl_holds: HashMap<HoldKey, GvlTimes>,
    /// What threads did with the GVL, by process and number of the thread.
    pub gvl_threads: HashMap<(ProcessIndex, u64), GvlFacts>,
    /// Waits that are not in the recording although the sums of their threads may be, by pid and number of the thread.
    gvl_outside: HashMap<(u32, u64), GvlTimes>,
    /// Times for which individual waits for the GVL were not reported.
    pub gvl_gaps: Vec<GvlGap>,
    /// The timeline, if one was asked for.
    pub timeline: Option<Timeline>,
    /// When tracing of everything requested had begun, `CLOCK_MONOTONIC` nanoseconds. Nothing is recorded
    /// before.
    pub began_ns: Option<u64>,
    /// When tracing ended, `CLOCK_MONOTONIC` nanoseconds.
    pub closed_ns: Option<u64>,
    /// Number of samples from before the recording began, which are not in it.
    pub early_samples: u64,
    /// Number of cycles and intervals from before that.
    pub early_events: u64,
    /// CPU time of the first sample on a CPU, that is, the period of the sampling clock, nanoseconds.
    pub period_ns: Option<u64>,
    /// Number of samples whose stack or thread is beyond the limits; their time is in the sums.
    pub merged: u64,
    /// Number of samples, cycles and allocation stacks of requests whose end was not seen or came too late: their endpoint is unknown.
    pub unresolved: u64,
    endpoints: Endpoints<Kept>,
    traces: Traces,
    /// Replaces an empty stack: readers drop samples without frames, or show them as idle time.
    no_stack: Stack,
    current: HashMap<u32, ProcessIndex, FastHash>,
    thread_of: HashMap<Thread, ThreadIndex>,
    /// The thread of the last lookup: usually the next one is the same.
    last_thread: Option<(Thread, ThreadIndex)>,
    beyond: Option<ThreadIndex>,
}

impl Observer for Recording {
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { state, .. } => self.process(process, state),
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) => self.work(process, work),
            Seen::Request(request) => self.request(process, request),
            Seen::Stack(sample) => self.sample(process, sample),
            Seen::Alloc(sum) => self.allocated(process, sum),
            Seen::AllocStack(alloc) => self.alloc(process, alloc),
            Seen::GvlWait(wait) => self.gvl_wait(process, wait),
            Seen::GvlSpan(span) => self.gvl_span(process, span),
            Seen::GvlThread(thread) => self.gvl_thread(process, thread),
            Seen::Ended(end) => self.ended(process, end.shutdown.as_ref()),
            _ => {}
        }
    }
}

impl Recording {
    /// Records sums of what the filter lets through, and a timeline if `timeline`.
    pub fn new(timeline: bool, limits: Limits, filter: Filter) -> Self {
        Self {
            limits,
            filter: FilterState::new(filter),
            tree: CallTree::new(limits.nodes),
            images: Vec::new(),
            processes: Vec::new(),
            threads: Vec::new(),
            samples: HashMap::new(),
            pauses: HashMap::new(),
            allocs: HashMap::new(),
            mallocs: HashMap::new(),
            gvl_waits: HashMap::new(),
            gvl_holds: HashMap::new(),
            gvl_threads: HashMap::new(),
            gvl_outside: HashMap::new(),
            gvl_gaps: Vec::new(),
            timeline: timeline.then(Timeline::default),
            began_ns: None,
            closed_ns: None,
            early_samples: 0,
            early_events: 0,
            period_ns: None,
            merged: 0,
            unresolved: 0,
            endpoints: Endpoints::default(),
            traces: Traces::default(),
            no_stack: Arc::new([Arc::new(Frame {
                kind: FrameKind::Missing,
                name: Arc::from("(no stack)"),
                file: None,
                line: 0,
                first_line: 0,
                address: 0,
            })]),
            current: HashMap::default(),
            thread_of: HashMap::new(),
            last_thread: None,
            beyond: None,
        }
    }

    /// The same recording, with sums distinguished by trace if an output shows traces. Otherwise there would be more sums for no benefit.
    #[must_use]
    pub fn with_traces(mut self, wanted: bool) -> Self {
        self.traces.wanted = wanted;
        self
    }

    /// A process is traced from now on. An earlier process with the same pid is a different one.
    fn process(&mut self, process: &Process, state: Option<&GcState>) {
        self.current.remove(&process.pid);
        // An image that is probed again gets another index, and indices are reused for other images.
        let image = &process.image;
        let is_it = |known: &Arc<Image>| Image { index: image.index, ..(**known).clone() } == **image;
        if !self.images.iter().any(is_it) {
            self.images.push(process.image.clone());
        }
        if let Some(state) = state {
            self.memory(process, state);
        }
    }

    /// Tracing of a process ended, with this state if the VM shut down: none of its open requests will end.
    fn ended(&mut self, process: &Process, state: Option<&GcState>) {
        if let Some(state) = state {
            self.memory(process, state);
        }
        self.settle(Some(process.pid));
        self.current.remove(&process.pid);
        // This includes threads whose sums are not in the recording.
        self.gvl_outside.retain(|(pid, _), _| *pid != process.pid);
    }

    /// The name of an endpoint.
    pub fn endpoint(&self, index: EndpointIndex) -> &str {
        self.endpoints.name(index)
    }

    /// A trace.
    pub fn trace(&self, index: TraceIndex) -> Option<&Link> {
        self.traces.get(index)
    }

    /// Number of samples, cycles and allocation stacks whose trace is known but not shown, because there were too many distinct sums or traces.
    pub fn traces_left_out(&self) -> u64 {
        self.traces.left_out
    }

    /// Returns an empty recording that continues where this one ends: it knows the same requests.
    #[must_use]
    pub fn go_on(&mut self) -> Self {
        self.settle(None);
        let mut next = Self::new(self.timeline.is_some(), self.limits, self.filter().clone());
        // Processes are reported only once, with their Rubies.
        next.images.clone_from(&self.images);
        next.endpoints = self.endpoints.go_on();
        next.traces.wanted = self.traces.wanted;
        (next.began_ns, next.period_ns) = (self.began_ns, self.period_ns);
        next
    }

    /// The recorded time span. `now_ns` replaces an unknown end.
    pub fn span(&self, now_ns: u64) -> (u64, u64) {
        let ended = self.closed_ns.unwrap_or(now_ns);
        (self.began_ns.unwrap_or(ended).min(ended), ended)
    }

    /// Whether an event at this time belongs to the recording. Events seen while other Rubies or other probes were still being
    /// attached do not: shares would refer to different times.
    fn has_begun(&self, ts_ns: u64) -> bool {
        self.began_ns.is_some_and(|began_ns| ts_ns >= began_ns)
    }

    /// [`Self::has_begun`] for a cycle or an interval; counts it if it came before.
    fn admits(&mut self, ts_ns: u64) -> bool {
        let admitted = self.has_begun(ts_ns);
        self.early_events += u64::from(!admitted);
        admitted
    }

    /// The node of a stack without its hidden frames; [`NodeId::ROOT`] if there is no stack.
    fn node(&mut self, stack: Option<&Stack>) -> NodeId {
        stack.map_or(NodeId::ROOT, |stack| self.tree.insert(&self.filter.shown(stack)))
    }

    /// Counts of what the filters let through and what they dropped.
    pub fn filtered(&self) -> &FilterAccount {
        &self.filter.account
    }

    /// The filter: what is recorded.
    pub fn filter(&self) -> &Filter {
        self.filter.filter()
    }

    /// Whether a thread's event without a stack is recorded.
    fn keeps_thread(&mut self, thread: ThreadName<'_>, ns: u64) -> bool {
        let dropped = self.filter.drops_thread(thread);
        self.filter.account.others.keeps(dropped, ns)
    }

    /// Adds GC work of an image without event sites.
    fn work(&mut self, process: &Process, work: &GcWork) {
        if self.timeline.is_none()
            || !self.admits(work.begin_ns)
            || !self.keeps_thread(named(process, work.tid, &work.comm), work.ns)
        {
            return;
        }
        let thread = self.thread(process, work.tid, &Arc::from(work.comm.as_str()), work.begin_ns);
        if let Some(timeline) = &mut self.timeline
            && timeline.admit(1, &self.limits)
        {
            let GcWork { phase, begin_ns, ns, .. } = *work;
            timeline.work.push(WorkMoment { thread, name: phase.name(), begin_ns, ns });
        }
    }

    fn heard(&mut self, process: &Process, ts_ns: u64) -> ProcessIndex {
        let index = self.process_index(process, ts_ns);
        self.seen_at(index, ts_ns);
        index
    }

    /// Notes that something was seen of a process at that time.
    fn seen_at(&mut self, process: ProcessIndex, ts_ns: u64) {
        if let Some(facts) = self.processes.get_mut(process) {
            facts.first_ns = facts.first_ns.min(ts_ns);
            facts.last_ns = facts.last_ns.max(ts_ns);
        }
    }

    fn process_index(&mut self, process: &Process, ts_ns: u64) -> ProcessIndex {
        if let Some(&index) = self.current.get(&process.pid) {
            return index;
        }
        if self.processes.len() >= self.limits.threads {
            let beyond = self.thread_beyond();
            return self.threads.get(beyond as usize).map_or(0, |thread| thread.process);
        }
        let index = self.processes.len();
        self.processes.push(ProcessFacts {
            pid: process.pid,
            comm: process.comm.clone(),
            cmdline: process.cmdline.clone().unwrap_or_default(),
            image: Some(process.image.clone()),
            origin: process.origin.clone(),
            hostname: process.hostname.clone(),
            container: process.container.clone(),
            first_ns: ts_ns,
            last_ns: ts_ns,
        });
        self.current.insert(process.pid, index);
        index
    }

    fn thread(&mut self, process: &Process, tid: u32, name: &Arc<str>, ts_ns: u64) -> ThreadIndex {
        let process = self.heard(process, ts_ns);
        if let Some((last, index)) = &self.last_thread
            && (last.process, last.tid, &last.name) == (process, tid, name)
        {
            return *index;
        }
        let thread = Thread { process, tid, name: name.clone() };
        if let Some(&index) = self.thread_of.get(&thread) {
            self.last_thread = Some((thread, index));
            return index;
        }
        if self.threads.len() >= self.limits.threads {
            return self.thread_beyond();
        }
        let index = self.threads.len() as ThreadIndex;
        self.threads.push(thread.clone());
        self.thread_of.insert(thread, index);
        index
    }

    /// The thread that represents all threads beyond the limit.
    fn thread_beyond(&mut self) -> ThreadIndex {
        if let Some(index) = self.beyond {
            return index;
        }
        let comm = "(beyond gctrace's limit of threads)";
        let origin = Arc::new(Origin { service: comm.to_owned(), ..Origin::default() });
        let facts = ProcessFacts {
            pid: 0,
            comm: comm.to_owned(),
            cmdline: Vec::new(),
            image: None,
            origin,
            hostname: None,
            container: Container::default(),
            first_ns: 0,
            last_ns: 0,
        };
        self.processes.push(facts);
        let index = self.threads.len() as ThreadIndex;
        self.threads.push(Thread { process: self.processes.len() - 1, tid: 0, name: Arc::from(comm) });
        self.beyond = Some(index);
        index
    }

    /// A thread by its index, with its process.
    pub fn thread_facts(&self, index: ThreadIndex) -> (&Thread, &ProcessFacts) {
        let thread = &self.threads[index as usize];
        (thread, &self.processes[thread.process])
    }

    /// Whether off-CPU samples were taken.
    pub fn has_wall(&self) -> bool {
        self.samples.keys().any(|key| key.state != ThreadState::Running)
    }
}

/// A thread of a process, for filters.
fn named<'a>(process: &Process, tid: u32, name: &'a str) -> ThreadName<'a> {
    ThreadName { pid: process.pid, tid, name }
}

impl Timeline {
    fn admit(&mut self, events: usize, limits: &Limits) -> bool {
        let fits = self.events + events <= limits.timeline;
        if fits {
            self.events += events;
        } else {
            self.events_left_out += events as u64;
        }
        fits
    }
}

/// The reason of a cycle as one text, such as `newobj, nofree`.
pub fn reason_text((gc_by, major_by): (Option<&'static str>, Option<&'static str>)) -> String {
    match (gc_by, major_by) {
        (Some(by), Some(major)) => format!("{by}, {major}"),
        (by, major) => by.or(major).unwrap_or("unknown").to_owned(),
    }
}
