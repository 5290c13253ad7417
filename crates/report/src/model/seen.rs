//! Everything that can be observed about a process, in the one form in which aggregates and exporters receive it.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    EndReason, GcCycle, GcState, GcWork, Process,
    gvl::{GvlProcessSummary, GvlSpan, GvlThreadSummary, GvlWait},
    gvl_so_far::GvlSoFar,
    load::ServerLoad,
    request::Request,
    stack::{Stack, StackSample},
    trace::Span,
};

/// An observation about a process.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// The process is traced from now on.
    Process {
        /// The VM's state at that time, if it could be read.
        state: Option<&'a GcState>,
        /// Current time, `CLOCK_MONOTONIC` nanoseconds: its events are reported after this, although some may be older.
        now_ns: u64,
        /// Earliest time at which its events can have been seen, on the same clock.
        since_ns: u64,
    },
    /// A cycle is complete, or was cut short.
    Cycle(&'a GcCycle),
    /// An interval of GC work, in an image whose event sites are unknown.
    Work(&'a GcWork),
    /// A request has been served.
    Request(&'a Request),
    /// A stack of one of its threads.
    Stack(&'a StackSample),
    /// A thread waited long for the GVL.
    GvlWait(&'a GvlWait),
    /// A thread held the GVL for long, or was without it for long.
    GvlSpan(&'a GvlSpan),
    /// What a thread did with the GVL; reported when the thread, its process or tracing has ended.
    GvlThread(&'a GvlThreadSummary),
    /// What its threads have done with the GVL so far; reported periodically and at the end.
    GvlSoFar(&'a GvlSoFar),
    /// What its threads did with the GVL; reported when the process or tracing has ended.
    GvlProcess(&'a GvlProcessSummary),
    /// Heap slots that its threads took to allocate objects; reported about once a second and at the end.
    Alloc(&'a AllocSum),
    /// A part of these slots, with a stack.
    AllocStack(&'a AllocStack),
    /// Its load as a server; reported about once a second.
    Load(&'a ServerLoad),
    /// Tracing of the process ended.
    Ended(&'a ProcessEnd),
}

impl<'a> Seen<'a> {
    /// Plural name of this kind of observation.
    pub fn plural(&self) -> &'static str {
        match self {
            Self::Process { .. } => "processes",
            Self::Cycle(_) => "GC cycles",
            Self::Work(_) => "intervals of GC work",
            Self::Request(_) => "requests",
            Self::Stack(_) => "stack samples",
            Self::GvlWait(_) => "long GVL waits",
            Self::GvlSpan(_) => "long GVL holds and absences",
            Self::GvlThread(_) => "GVL sums of threads",
            Self::GvlSoFar(_) => "GVL sums so far",
            Self::GvlProcess(_) => "GVL sums of processes",
            Self::Alloc(_) => "allocation sums",
            Self::AllocStack(_) => "allocation stacks",
            Self::Load(_) => "server loads",
            Self::Ended(_) => "process ends",
        }
    }

    /// When it happened or began, `CLOCK_MONOTONIC` nanoseconds; `None` if it covers a whole lifetime.
    pub fn begin_ns(&self) -> Option<u64> {
        match self {
            Self::Process { now_ns, .. } => Some(*now_ns),
            Self::Cycle(cycle) => {
                let pauses = cycle.pauses.iter().map(|pause| pause.begin_ns);
                Some(pauses.fold(cycle.start.ts_ns, u64::min))
            }
            Self::Work(work) => Some(work.begin_ns),
            Self::Request(request) => Some(request.begin_ns),
            Self::Stack(sample) => Some(sample.ts_ns),
            Self::GvlWait(wait) => Some(wait.begin_ns),
            Self::GvlSpan(span) => Some(span.begin_ns),
            Self::Alloc(sum) => Some(sum.begin_ns),
            Self::AllocStack(alloc) => Some(alloc.ts_ns),
            Self::Load(load) => Some(load.ts_ns),
            Self::Ended(end) => Some(end.ts_ns),
            Self::GvlThread(_) | Self::GvlSoFar(_) | Self::GvlProcess(_) => None,
        }
    }

    /// Thread id in the host's pid namespace, and the thread's name if the observation has it; `None` if it is not about a single thread.
    pub fn thread(self) -> Option<(u32, Option<&'a str>)> {
        Some(match self {
            Self::Cycle(cycle) => (cycle.start.tid, Some(&cycle.comm)),
            Self::Work(work) => (work.tid, Some(&work.comm)),
            Self::Request(request) => (request.tid, None),
            Self::Stack(sample) => (sample.tid, Some(&sample.comm)),
            Self::GvlWait(wait) => (wait.who.tid, Some(&wait.who.comm)),
            Self::GvlSpan(span) => (span.who.tid, Some(&span.who.comm)),
            Self::GvlThread(summary) => (summary.who.tid, Some(&summary.who.comm)),
            Self::AllocStack(alloc) => (alloc.tid, Some(&alloc.comm)),
            Self::Process { .. }
            | Self::GvlSoFar(_)
            | Self::GvlProcess(_)
            | Self::Alloc(_)
            | Self::Load(_)
            | Self::Ended(_) => return None,
        })
    }
}

/// Heap slots that threads of a process took to allocate objects in them. Slots that a garbage collection takes back before they contain
/// an object are not subtracted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocSum {
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// End, likewise.
    pub end_ns: u64,
    /// Number of slots, by their size in bytes.
    pub slots: BTreeMap<u32, u64>,
    /// Number of refills: a refill takes the free slots of a page.
    pub refills: u64,
    /// Refills missing from the sums: their records were lost or refused.
    pub lost: u64,
}

impl AllocSum {
    /// Number of slots of all sizes.
    pub fn objects(&self) -> u64 {
        self.slots.values().sum()
    }

    /// Their bytes.
    pub fn bytes(&self) -> u64 {
        self.slots
            .iter()
            .map(|(size, slots)| u64::from(*size).saturating_mul(*slots))
            .fold(0, u64::saturating_add)
    }
}

/// Slots of one size taken since the last stack of that size. The stack represents all of them: it is captured when slots run out, at
/// random intervals of bytes. All `AllocStack`s of a process add up to its [`AllocSum`]s, without what is lost.
#[derive(Clone, Debug)]
pub struct AllocStack {
    /// When the stack was taken, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Thread id, host pid namespace; 0 if unknown.
    pub tid: u32,
    /// The thread's name.
    pub comm: Arc<str>,
    /// Size of a slot, bytes.
    pub slot_size: u32,
    /// Number of slots.
    pub slots: u64,
    /// The request that the thread was serving, as in [`StackSample`].
    pub request: Option<u64>,
    /// The span that was active on the thread, as in [`StackSample`].
    pub span: Option<Span>,
    /// The stack, leaf first; empty for slots taken after the last stack.
    pub stack: Stack,
}

impl AllocStack {
    /// Bytes of the slots.
    pub fn bytes(&self) -> u64 {
        self.slots.saturating_mul(u64::from(self.slot_size))
    }
}

/// Something that aggregates observations.
pub trait Observer {
    /// Receives an observation about a process.
    fn see(&mut self, process: &Process, seen: Seen<'_>);
}

/// Cycles that a program ran before its first reported cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CyclesBefore {
    /// The program was running before gctrace: this many cycles were over, or under way.
    Earlier(u64),
    /// The program started during the run: this many cycles were missed, because its Ruby had no probes yet.
    Missed(u64),
    /// Unknown.
    Unknown,
}

impl CyclesBefore {
    /// Number of missed cycles.
    pub fn missed(self) -> u64 {
        match self {
            Self::Missed(cycles) => cycles,
            Self::Earlier(_) | Self::Unknown => 0,
        }
    }
}

/// How tracing of one process ended.
#[derive(Clone, Debug)]
pub struct ProcessEnd {
    /// Why.
    pub reason: EndReason,
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Since when it was traced: its start or exec, or the start of tracing, whichever was later.
    pub since_ns: u64,
    /// GC pauses outside reported cycles, nanoseconds: in a cycle that began before tracing, or in none, as for finalizers at program exit.
    pub outside_ns: u64,
    /// The part of the pauses of reported cycles that lies after `ts_ns`, nanoseconds, when this covers a part of a recording.
    pub beyond_ns: u64,
    /// The VM's state when it began to shut down, if it did.
    pub shutdown: Option<GcState>,
    /// Number of cycles reported.
    pub cycles: u64,
    /// Cycles before the reported ones.
    pub before: CyclesBefore,
    /// GC records the kernel lost.
    pub lost: u64,
}
