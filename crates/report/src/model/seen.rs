//! The vocabulary of what is seen of a process: aggregates and exporters receive all of it in one form.

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

/// Something that was seen of a process.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// It is traced from now on.
    Process {
        /// Its VM's state at that time, if it could be read.
        state: Option<&'a GcState>,
        /// Now, `CLOCK_MONOTONIC` nanoseconds: its events come after this, though some may be older.
        now_ns: u64,
        /// Since when its events can have been seen, on the same clock.
        since_ns: u64,
    },
    /// A cycle is complete, or was cut short.
    Cycle(&'a GcCycle),
    /// An interval of GC work, of an image whose event sites are not known.
    Work(&'a GcWork),
    /// A request has been served.
    Request(&'a Request),
    /// A stack of one of its threads.
    Stack(&'a StackSample),
    /// A thread had to wait long for the GVL.
    GvlWait(&'a GvlWait),
    /// A thread held the GVL for long, or did without it.
    GvlSpan(&'a GvlSpan),
    /// What a thread did with the GVL, when it has ended, or its process or tracing has.
    GvlThread(&'a GvlThreadSummary),
    /// What its threads have done with the GVL so far, from time to time and at the end.
    GvlSoFar(&'a GvlSoFar),
    /// What its threads did with the GVL, when it or tracing has ended.
    GvlProcess(&'a GvlProcessSummary),
    /// What its threads took of the heap to allocate objects, about once a second and at the end.
    Alloc(&'a AllocSum),
    /// A part of what it took, under a stack.
    AllocStack(&'a AllocStack),
    /// Its load as a server, about once a second.
    Load(&'a ServerLoad),
    /// Tracing of it ended.
    Ended(&'a ProcessEnd),
}

impl<'a> Seen<'a> {
    /// The word for many of its kind.
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
            Self::Load(_) => "loads of servers",
            Self::Ended(_) => "ends of processes",
        }
    }

    /// When it was or began, `CLOCK_MONOTONIC` nanoseconds; `None`: it is of a whole life.
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

    /// Its thread in the host's namespace, with the name of it where what was seen has one; `None`: it is of no single thread.
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

/// Slots that threads of a process took to allocate objects in them. What a garbage collection takes back before there is an object
/// in it is not subtracted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocSum {
    /// From when, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Until when.
    pub end_ns: u64,
    /// Slots, by their size in bytes.
    pub slots: BTreeMap<u32, u64>,
    /// How often the free slots of a page were taken.
    pub refills: u64,
    /// Refills that are not in the sums: their records were lost or refused.
    pub lost: u64,
}

impl AllocSum {
    /// Slots of all sizes.
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

/// Slots of one size that were taken since the last stack of that size, under a stack that represents all of them: it is taken
/// where slots run out, at bytes that are random. All of a process add up to its [`AllocSum`]s, without what is lost.
#[derive(Clone, Debug)]
pub struct AllocStack {
    /// When the stack was taken, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Its thread, host namespace; 0 where none is known.
    pub tid: u32,
    /// The thread's name.
    pub comm: Arc<str>,
    /// Bytes of a slot.
    pub slot_size: u32,
    /// Slots.
    pub slots: u64,
    /// The request that the thread was serving, as in [`StackSample`].
    pub request: Option<u64>,
    /// The span that was active on the thread, as in [`StackSample`].
    pub span: Option<Span>,
    /// The stack, leaf first; empty for what came after the last one.
    pub stack: Stack,
}

impl AllocStack {
    /// Bytes of the slots.
    pub fn bytes(&self) -> u64 {
        self.slots.saturating_mul(u64::from(self.slot_size))
    }
}

/// Something that adds up what is seen.
pub trait Observer {
    /// Something was seen of a process.
    fn see(&mut self, process: &Process, seen: Seen<'_>);
}

/// Cycles that a program ran before the first reported one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CyclesBefore {
    /// It ran before gctrace did: this many were over, or under way.
    Earlier(u64),
    /// It started during the run: this many were missed, because its Ruby had no probes yet.
    Missed(u64),
    /// Not known.
    Unknown,
}

impl CyclesBefore {
    /// How many were missed.
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
    /// Since when it was traced: its start or exec, or that of tracing, whichever was later.
    pub since_ns: u64,
    /// GC pauses of no reported cycle, nanoseconds: of one that had begun before tracing, or of none, as for finalizers at the end of a program.
    pub outside_ns: u64,
    /// The part of the pauses of reported cycles that lies after `ts_ns`, nanoseconds: of a part of a recording.
    pub beyond_ns: u64,
    /// The VM's state when it began to shut down, if it did.
    pub shutdown: Option<GcState>,
    /// Cycles reported.
    pub cycles: u64,
    /// Cycles before those.
    pub before: CyclesBefore,
    /// GC records the kernel lost.
    pub lost: u64,
}
