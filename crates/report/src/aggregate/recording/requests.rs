//! Requests with their times.

use std::sync::Arc;

use super::{ProcessIndex, Recording};
use crate::model::{
    Process,
    request::{Allocated, GcTime, Request, RequestMemory},
    seen::Seen,
    trace::Trace,
};

/// A request with its times.
#[derive(Clone, Debug)]
pub struct RequestMoment {
    /// The process.
    pub process: ProcessIndex,
    /// The thread that served it.
    pub tid: u32,
    /// Its number in this run.
    pub id: u64,
    /// Method and path template; requests of one endpoint share the string.
    pub endpoint: Arc<str>,
    /// Status of the response.
    pub status: Option<u16>,
    /// When the thread took it, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When the thread finished it, if that was seen.
    pub end_ns: Option<u64>,
    /// How long its last bytes had waited for the thread, nanoseconds, if known.
    pub queue_ns: Option<u64>,
    /// From taking it to the first bytes of the response, nanoseconds.
    pub first_byte_ns: Option<u64>,
    /// Bytes written on its connection, if known.
    pub response_bytes: Option<u64>,
    /// Number of GC cycles that it started, if known.
    pub gcs: Option<u32>,
    /// Time of the GC pauses of its thread meanwhile, nanoseconds, if known.
    pub gc_ns: Option<u64>,
    /// GC pauses of other threads of its process meanwhile, if known.
    pub gc_other: Option<GcTime>,
    /// Heap slots that its thread took, if known.
    pub alloc: Option<Allocated>,
    /// What its thread and its process needed of memory.
    pub memory: RequestMemory,
    /// The trace that it belongs to, if known.
    pub trace: Option<Trace>,
}

impl RequestMoment {
    /// Endpoint and status: `GET /orders/:id 200`.
    pub fn name(&self) -> String {
        match self.status {
            Some(status) => format!("{} {status}", self.endpoint),
            None => self.endpoint.to_string(),
        }
    }
}

impl Recording {
    /// Takes note of an event that is not in the recording: recorded events may belong to this request, and a thread's sums include this wait.
    pub fn outside(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Request(request) => {
                self.request_ended(request);
            }
            Seen::GvlWait(wait) => self.gvl_wait_outside(process, wait),
            _ => {}
        }
    }

    /// A request has been served.
    pub(super) fn request(&mut self, process: &Process, request: &Request) {
        let endpoint = self.request_ended(request);
        if self.timeline.is_none() || !self.admits(request.begin_ns) {
            return;
        }
        let end_ns = request.end_ns.unwrap_or(request.begin_ns);
        let dropped = self.filter.drops_tid(process.pid, request.tid);
        let dropped = dropped.or_else(|| self.drops_request(Some(endpoint)));
        if !self.filter.account.others.keeps(dropped, end_ns.saturating_sub(request.begin_ns)) {
            return;
        }
        self.heard(process, request.begin_ns);
        self.heard(process, end_ns);
        let index = self.process_index(process, request.begin_ns);
        let Some(timeline) = &mut self.timeline else { return };
        if !timeline.admit(1, &self.limits) {
            return;
        }
        let endpoint = request.endpoint();
        let endpoint = timeline.endpoints.get(endpoint.as_str()).cloned().unwrap_or_else(|| {
            let endpoint: Arc<str> = Arc::from(endpoint);
            timeline.endpoints.insert(Arc::clone(&endpoint));
            endpoint
        });
        timeline.requests.push(RequestMoment {
            process: index,
            tid: request.tid,
            id: request.id,
            endpoint,
            status: request.status,
            begin_ns: request.begin_ns,
            end_ns: request.end_ns,
            queue_ns: request.queue_ns,
            first_byte_ns: request.first_byte_ns,
            response_bytes: request.response_bytes,
            gcs: request.gcs,
            gc_ns: request.gc_ns,
            gc_other: request.gc_other,
            alloc: request.alloc,
            memory: request.memory,
            trace: request.trace,
        });
    }
}
