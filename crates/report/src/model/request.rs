//! A request that a server has served, a job that a thread has run, or the whole run of a program.

use std::sync::Arc;

use super::{GcState, gvl::GvlSplit, stack::Frame, trace::Trace};

/// One HTTP request, one job, or the run of a program that is no server. What is not known is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number in this run.
    pub id: u64,
    /// The thread that served it.
    pub tid: u32,
    /// When that thread took it, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When the thread was done with it; not seen where the connection was handed over (hijack, WebSocket).
    pub end_ns: Option<u64>,
    /// Its method, one of those of RFC 9110 and 5789; other methods are not known.
    pub method: Option<&'static str>,
    /// Its path without what differs from request to request, or the class of a job: visible ASCII. `(other)`: the process has too many.
    pub path: Option<String>,
    /// Status of the response, 200 to 599 (or 101).
    pub status: Option<u16>,
    /// From when the kernel had received the last bytes that had come on its connection to when its thread took it, nanoseconds.
    pub queue_ns: Option<u64>,
    /// From taking it to the begin of the first call that wrote to its connection, nanoseconds (of `sendfile`: to its end).
    pub first_byte_ns: Option<u64>,
    /// From taking it to the begin of the last such call, nanoseconds: a call that waits for a slow client takes longer.
    pub last_byte_ns: Option<u64>,
    /// Bytes that were written on its connection while it was served: of a TLS connection, as they were encrypted. Not known where its end
    /// was not seen, its connection is no TCP, or its socket was not known when it was taken.
    pub response_bytes: Option<u64>,
    /// GC cycles that it started; not known where GC records of its process were lost meanwhile.
    pub gcs: Option<u32>,
    /// GC pauses of its thread meanwhile, nanoseconds; known when `gcs` is.
    pub gc_ns: Option<u64>,
    /// How many these were; known when `gcs` is.
    pub gc_pauses: Option<u32>,
    /// GC pauses of other threads of its process meanwhile, in which its thread could not run Ruby. Not known where GC records of
    /// the process were lost, its end was not seen, or it took so long that its first pauses are forgotten.
    pub gc_other: Option<GcTime>,
    /// For how long its thread waited for the GVL meanwhile, nanoseconds; not known where not all of it was watched.
    pub gvl_wait_ns: Option<u64>,
    /// How its time divides by the states of its native thread; not known where these were not watched all the time.
    pub states: Option<States>,
    /// How that divides by what its thread did with the GVL, in which case the sum is that of `states`; not known where it was not watched all the
    /// time, or where it is not seen when threads release the GVL.
    pub split: Option<GvlSplit>,
    /// What its thread took of the heap to allocate objects; not known where that was not watched all the time.
    pub alloc: Option<Allocated>,
    /// The method or block of the application that handled it, with the line at which it begins. Not known where no stack was taken while
    /// its thread was in it.
    pub handler: Option<Arc<Frame>>,
    /// The trace that it belongs to. Not known where its program did not publish it while a stack was taken, and it has no header `traceparent`
    /// (a job: no such member), one that is not valid, or more than one, or where that was not looked at.
    pub trace: Option<Trace>,
    /// If it is a job: what only jobs have.
    pub job: Option<Job>,
    /// Whether it is the run of a program, from its exec to its exit: `path` is the name of the program, `tid` its first thread, and GC is that of
    /// all its threads.
    pub is_run: bool,
    /// The state of its VM when its thread took it and when it was done with it, for TuneMyGC sample sets. Not known where that was not
    /// looked at, its end was not seen, or somebody else changed the state while one of the two was being read.
    pub gc_states: Option<Box<UnitStates>>,
}

/// The state of the VM at the begin and at the end of a request or a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitStates {
    /// When its thread took it.
    pub begin: GcState,
    /// When its thread was done with it.
    pub end: GcState,
}

/// How a time divides by the states of a thread in the scheduler, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct States {
    /// It ran on a CPU.
    pub cpu_ns: u64,
    /// It could run, and had no CPU.
    pub runnable_ns: u64,
    /// It waited for something: a socket, a lock, the GVL, a timer.
    pub blocked_ns: u64,
}

/// What a thread took of the heap: the free slots of a page at once. The threads of a Ractor allocate in the same page, so another one may use
/// slots that this one took: it is what was allocated, give or take a page each time that another thread gets the GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// Slots, each for an object.
    pub slots: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Allocated {
    /// Adds that of another request.
    pub fn add(&mut self, other: Self) {
        self.slots = self.slots.saturating_add(other.slots);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// What only jobs have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// The queue it was in.
    pub queue: Option<String>,
    /// The number that Sidekiq gave it.
    pub jid: Option<String>,
    /// When it was put into its queue, by the clock of the process that did: microseconds since the epoch.
    pub enqueued_us: Option<u64>,
}

/// GC pauses and their time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcTime {
    /// How many.
    pub pauses: u32,
    /// The part of their time that counts, nanoseconds.
    pub ns: u64,
}

impl Request {
    /// From taking it to being done with it, nanoseconds.
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

    /// Where its trace is known from, if it is: a `thread`'s tracing library, the header `traceparent`, or the `job`.
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
