//! A request that a server has served, a job that a thread has run, or the whole run of a program.

use std::sync::Arc;

use super::{GcState, gvl::GvlSplit, stack::Frame, trace::Trace};

/// One HTTP request, one job, or the run of a program that is not a server. Unknown fields are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number in this run.
    pub id: u64,
    /// The thread that served it.
    pub tid: u32,
    /// When that thread took the request, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When the thread finished the request; not seen if the connection was handed over (hijack, WebSocket).
    pub end_ns: Option<u64>,
    /// HTTP method, one of those of RFC 9110 and 5789; other methods are unknown.
    pub method: Option<&'static str>,
    /// Path without the parts that differ between requests, or the class of a job: visible ASCII. `(other)`: the process has too many paths.
    pub path: Option<String>,
    /// Status of the response, 200 to 599 (or 101).
    pub status: Option<u16>,
    /// From when the kernel had received the latest bytes on its connection to when its thread took the request, nanoseconds.
    pub queue_ns: Option<u64>,
    /// From taking it to the start of the first call that wrote to its connection, nanoseconds (for `sendfile`: to its end).
    pub first_byte_ns: Option<u64>,
    /// From taking it to the start of the last such call, nanoseconds. A call that waits for a slow client itself takes longer.
    pub last_byte_ns: Option<u64>,
    /// Bytes written to its connection while it was served: for a TLS connection, encrypted bytes. Unknown if its end was not seen, its
    /// connection is not TCP, or its socket was unknown when it was taken.
    pub response_bytes: Option<u64>,
    /// Number of GC cycles that it started; unknown if GC records of its process were lost meanwhile.
    pub gcs: Option<u32>,
    /// Time of the GC pauses of its thread while it was served, nanoseconds; known if `gcs` is.
    pub gc_ns: Option<u64>,
    /// Number of these pauses; known if `gcs` is.
    pub gc_pauses: Option<u32>,
    /// GC pauses of other threads of its process while it was served, during which its thread could not run Ruby. Unknown if GC records of
    /// the process were lost, its end was not seen, or it took so long that its first pauses have been forgotten.
    pub gc_other: Option<GcTime>,
    /// Time that its thread waited for the GVL while serving it, nanoseconds; unknown if waits were not watched throughout.
    pub gvl_wait_ns: Option<u64>,
    /// Its time by state of its native thread; unknown if the states were not watched throughout.
    pub states: Option<States>,
    /// The same time, also split by what its thread did with the GVL; the sums equal those of `states`. Unknown if the GVL was not watched
    /// throughout, or if releases of the GVL are not observed.
    pub split: Option<GvlSplit>,
    /// Heap slots that its thread took to allocate objects; unknown if that was not watched throughout.
    pub alloc: Option<Allocated>,
    /// What its thread and its process needed of memory.
    pub memory: RequestMemory,
    /// The application's method or block that handled it, with the line at which it begins. Unknown if no stack was captured while its
    /// thread was in it.
    pub handler: Option<Arc<Frame>>,
    /// The trace that it belongs to. Unknown if its program did not publish one while a stack was captured, and its `traceparent` (a header; for
    /// a job, a member) is absent, invalid, present more than once, or was not read.
    pub trace: Option<Trace>,
    /// What only jobs have; `None` if it is not a job.
    pub job: Option<Job>,
    /// Whether it is the run of a program, from its exec to its exit. Then `path` is the name of the program, `tid` its first thread, and the GC
    /// fields cover all its threads.
    pub is_run: bool,
    /// The VM's state when its thread took it and when its thread finished it, for TuneMyGC sample sets. Unknown if the states were not
    /// read, its end was not seen, or something else changed a state while it was being read.
    pub gc_states: Option<Box<UnitStates>>,
}

/// The VM's state at the start and at the end of a request or a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitStates {
    /// When the thread took it.
    pub begin: GcState,
    /// When the thread finished it.
    pub end: GcState,
}

/// A time by scheduler state of a thread, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct States {
    /// Running on a CPU.
    pub cpu_ns: u64,
    /// Runnable, without a CPU.
    pub runnable_ns: u64,
    /// Blocked: waiting for a socket, a lock, the GVL or a timer.
    pub blocked_ns: u64,
}

/// Heap slots that a thread took; it takes all free slots of a page at once. The threads of a Ractor allocate from the same page, so another
/// thread may use slots that this one took: the figure is what was allocated, give or take a page per acquisition of the GVL by another thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// Number of slots, each for one object.
    pub slots: u64,
    /// Their size, bytes.
    pub bytes: u64,
}

impl Allocated {
    /// Adds the slots of another request.
    pub fn add(&mut self, other: Self) {
        self.slots = self.slots.saturating_add(other.slots);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// What the thread and the process of a request needed of memory while it was served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestMemory {
    /// Page faults of its thread; unknown if they could not be read, or its end was not seen.
    pub faults: Option<PageFaults>,
    /// By how many bytes the resident memory of the whole process grew: also what other threads did meanwhile. Negative: it shrank. Unknown if
    /// that was not watched, the kernel's counters are approximate or could not be read, or its end was not seen.
    pub rss_growth: Option<i64>,
}

/// Page faults of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageFaults {
    /// Without I/O.
    pub minor: u64,
    /// With I/O: pages that were read from a file or from swap.
    pub major: u64,
}

/// What only jobs have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// The queue it was in.
    pub queue: Option<String>,
    /// The job id that Sidekiq gave it.
    pub jid: Option<String>,
    /// When it was enqueued, by the clock of the process that enqueued it: microseconds since the epoch.
    pub enqueued_us: Option<u64>,
    /// From then until a thread took it, nanoseconds, by two clocks: that of the process that enqueued it, and that of this host when it was taken.
    /// `None`: unknown, or the clocks disagree by more than the latency.
    pub latency_ns: Option<u64>,
}

impl Job {
    /// Sets the latency of a job that was taken at this time, epoch nanoseconds.
    pub fn taken_at(&mut self, epoch_ns: i64) {
        let enqueued_ns = self.enqueued_us.and_then(|us| i64::try_from(us).ok()?.checked_mul(1000));
        self.latency_ns =
            enqueued_ns.and_then(|enqueued_ns| u64::try_from(epoch_ns.checked_sub(enqueued_ns)?).ok());
    }
}

/// GC pauses and their time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcTime {
    /// Number of pauses.
    pub pauses: u32,
    /// The part of their time that counts, nanoseconds.
    pub ns: u64,
}

impl Request {
    /// Time from taking the request to finishing it, nanoseconds; `None` if its end was not seen.
    pub fn duration_ns(&self) -> Option<u64> {
        self.end_ns.map(|end_ns| end_ns.saturating_sub(self.begin_ns))
    }

    /// `http`, `job` or `run`.
    pub fn kind(&self) -> &'static str {
        match (self.is_run, &self.job) {
            (true, _) => "run",
            (false, Some(_)) => "job",
            (false, None) => "http",
        }
    }

    /// Where its trace was found, if it is known: `thread` (its tracing library), `traceparent` (the header) or `job`.
    pub fn trace_origin(&self) -> Option<&'static str> {
        self.trace.map(|trace| trace.origin.name())
    }

    /// Method and path as one text, such as `GET /orders/:id`; the class of a job, the name of a program.
    pub fn endpoint(&self) -> String {
        match (self.method, &self.path) {
            (Some(method), Some(path)) => format!("{method} {path}"),
            (None, Some(path)) => path.clone(),
            _ => "(unknown)".to_owned(),
        }
    }
}
