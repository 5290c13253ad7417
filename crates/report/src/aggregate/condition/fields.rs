//! The fields that a condition can test, and the kinds of records that have them.

use std::borrow::Cow;

use crate::{
    aggregate::recording::reason_text,
    model::{GcCycle, Process, seen::Seen},
};

/// A kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// GC cycles.
    Cycle,
    /// Intervals of GC work.
    Work,
    /// Requests.
    Request,
    /// Stack samples.
    Sample,
    /// Long waits for the GVL.
    GvlWait,
    /// Long holds of the GVL and absences.
    GvlSpan,
    /// GVL sums of a thread.
    GvlThread,
    /// Allocation stacks.
    AllocStack,
    /// Records about a whole process: its start, its end, and its sums.
    Process,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Cycle,
        Self::Work,
        Self::Request,
        Self::Sample,
        Self::GvlWait,
        Self::GvlSpan,
        Self::GvlThread,
        Self::AllocStack,
        Self::Process,
    ];

    /// Plural name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cycle => "GC cycles",
            Self::Work => "intervals of GC work",
            Self::Request => "requests",
            Self::Sample => "stack samples",
            Self::GvlWait => "long GVL waits",
            Self::GvlSpan => "long GVL holds and absences",
            Self::GvlThread => "GVL sums of threads",
            Self::AllocStack => "allocation stacks",
            Self::Process => "records of whole processes",
        }
    }

    /// The kind of an observation.
    pub fn of(seen: &Seen<'_>) -> Self {
        match seen {
            Seen::Cycle(_) => Self::Cycle,
            Seen::Work(_) => Self::Work,
            Seen::Request(_) => Self::Request,
            Seen::Stack(_) => Self::Sample,
            Seen::GvlWait(_) => Self::GvlWait,
            Seen::GvlSpan(_) => Self::GvlSpan,
            Seen::GvlThread(_) => Self::GvlThread,
            Seen::AllocStack(_) => Self::AllocStack,
            _ => Self::Process,
        }
    }
}

/// A field that a condition compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Pid.
    Pid,
    /// Service.
    Service,
    /// Name or number of a thread: the one that ran, waited, or started the cycle.
    Thread,
    /// Method and path of a request.
    Endpoint,
    /// The method or block that handled a request.
    Handler,
    /// `minor` or `major`.
    GcKind,
    /// Reason of a cycle: `newobj`, `method, force`.
    GcReason,
    /// Longest pause of a cycle.
    GcPause,
    /// Sum of its pauses.
    GcTotal,
    /// Duration of a request: from taking it to finishing it.
    RequestDuration,
    /// Status of its response.
    RequestStatus,
    /// For how long its data had waited to be taken.
    RequestQueue,
    /// Bytes of the heap slots that its thread took.
    RequestAlloc,
    /// Page faults of its thread without I/O.
    RequestMinorFaults,
    /// Page faults of its thread with I/O.
    RequestMajorFaults,
    /// Bytes by which the resident memory of its process grew.
    RequestRssGrowth,
    /// Length of a wait for the GVL.
    GvlWait,
}

/// Types of the values of fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Number,
    /// A number that may be negative.
    Signed,
    Time,
    Text,
    Thread,
}

/// The value of a field in a record.
#[derive(Debug)]
pub(super) enum Value<'a> {
    /// Records of this kind do not have the field.
    Absent,
    /// The value is unknown.
    Unknown,
    /// A number, or a time in nanoseconds.
    Number(u64),
    Signed(i64),
    Text(Cow<'a, str>),
    Thread(u64, Option<&'a str>),
}

impl Field {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Pid,
        Self::Service,
        Self::Thread,
        Self::Endpoint,
        Self::Handler,
        Self::GcKind,
        Self::GcReason,
        Self::GcPause,
        Self::GcTotal,
        Self::RequestDuration,
        Self::RequestStatus,
        Self::RequestQueue,
        Self::RequestAlloc,
        Self::RequestMinorFaults,
        Self::RequestMajorFaults,
        Self::RequestRssGrowth,
        Self::GvlWait,
    ];

    /// Its name in conditions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pid => "pid",
            Self::Service => "service",
            Self::Thread => "thread",
            Self::Endpoint => "endpoint",
            Self::Handler => "handler",
            Self::GcKind => "gc.kind",
            Self::GcReason => "gc.reason",
            Self::GcPause => "gc.pause",
            Self::GcTotal => "gc.total",
            Self::RequestDuration => "request.duration",
            Self::RequestStatus => "request.status",
            Self::RequestQueue => "request.queue",
            Self::RequestAlloc => "request.alloc",
            Self::RequestMinorFaults => "request.minor_faults",
            Self::RequestMajorFaults => "request.major_faults",
            Self::RequestRssGrowth => "request.rss_growth",
            Self::GvlWait => "gvl.wait",
        }
    }

    pub(super) fn of_type(self) -> Type {
        match self {
            Self::Pid
            | Self::RequestStatus
            | Self::RequestAlloc
            | Self::RequestMinorFaults
            | Self::RequestMajorFaults => Type::Number,
            Self::RequestRssGrowth => Type::Signed,
            Self::Service | Self::Endpoint | Self::Handler | Self::GcKind | Self::GcReason => Type::Text,
            Self::Thread => Type::Thread,
            Self::GcPause | Self::GcTotal | Self::RequestDuration | Self::RequestQueue | Self::GvlWait => {
                Type::Time
            }
        }
    }

    /// Kinds of records that have the field.
    pub fn kinds(self) -> &'static [Kind] {
        match self {
            Self::Pid | Self::Service => &Kind::ALL,
            Self::Thread => &[
                Kind::Cycle,
                Kind::Work,
                Kind::Request,
                Kind::Sample,
                Kind::GvlWait,
                Kind::GvlSpan,
                Kind::GvlThread,
                Kind::AllocStack,
            ],
            Self::Endpoint
            | Self::Handler
            | Self::RequestDuration
            | Self::RequestStatus
            | Self::RequestQueue
            | Self::RequestAlloc
            | Self::RequestMinorFaults
            | Self::RequestMajorFaults
            | Self::RequestRssGrowth => &[Kind::Request],
            Self::GcKind | Self::GcReason | Self::GcPause | Self::GcTotal => &[Kind::Cycle],
            Self::GvlWait => &[Kind::GvlWait],
        }
    }

    /// The value of the field in a record.
    pub(super) fn of<'a>(self, process: &'a Process, seen: &Seen<'a>) -> Value<'a> {
        match (self, *seen) {
            (Self::Pid, _) => Value::Number(process.pid.into()),
            (Self::Service, _) => Value::Text(Cow::Borrowed(&process.origin.service)),
            (Self::Thread, _) => thread(seen),
            (Self::GcKind, Seen::Cycle(cycle)) => Value::Text(Cow::Borrowed(cycle.kind())),
            (Self::GcReason, Seen::Cycle(cycle)) => {
                let info = &cycle.start.info;
                Value::Text(Cow::Owned(reason_text((info.gc_by, info.major_by))))
            }
            (Self::GcPause, Seen::Cycle(cycle)) => number(stops(cycle).then(|| cycle.max_pause_ns())),
            (Self::GcTotal, Seen::Cycle(cycle)) => number(stops(cycle).then(|| cycle.pause_ns())),
            (Self::Endpoint, Seen::Request(request)) => match &request.path {
                Some(_) => Value::Text(Cow::Owned(request.endpoint())),
                None => Value::Unknown,
            },
            (Self::Handler, Seen::Request(request)) => match &request.handler {
                Some(frame) => Value::Text(Cow::Borrowed(&frame.name)),
                None => Value::Unknown,
            },
            (Self::RequestDuration, Seen::Request(request)) => number(request.duration_ns()),
            (Self::RequestStatus, Seen::Request(request)) => number(request.status.map(u64::from)),
            (Self::RequestQueue, Seen::Request(request)) => number(request.queue_ns),
            (Self::RequestAlloc, Seen::Request(request)) => number(request.alloc.map(|alloc| alloc.bytes)),
            (Self::RequestMinorFaults, Seen::Request(request)) => {
                number(request.memory.faults.map(|faults| faults.minor))
            }
            (Self::RequestMajorFaults, Seen::Request(request)) => {
                number(request.memory.faults.map(|faults| faults.major))
            }
            (Self::RequestRssGrowth, Seen::Request(request)) => {
                request.memory.rss_growth.map_or(Value::Unknown, Value::Signed)
            }
            (Self::GvlWait, Seen::GvlWait(wait)) => Value::Number(wait.ns),
            _ => Value::Absent,
        }
    }
}

/// Whether its pauses are known: not if the program was killed in the first one, or if all their records were lost.
fn stops(cycle: &GcCycle) -> bool {
    !cycle.pauses.is_empty()
}

fn number<'a>(number: Option<u64>) -> Value<'a> {
    number.map_or(Value::Unknown, Value::Number)
}

fn thread<'a>(seen: &Seen<'a>) -> Value<'a> {
    seen.thread().map_or(Value::Absent, |(tid, comm)| Value::Thread(tid.into(), comm))
}
