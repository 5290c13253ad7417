//! The `request` and `load` lines of JSON lines.

use serde::Serialize;

use super::Split;
use crate::model::{
    Process,
    load::ServerLoad,
    request::{Job, Request},
    trace::Trace,
};

#[derive(Serialize)]
pub(super) struct RequestLine<'a> {
    ts: f64,
    pid: u32,
    tid: u32,
    id: u64,
    kind: &'static str,
    method: Option<&'static str>,
    path: Option<&'a str>,
    endpoint: String,
    handler: Option<&'a str>,
    handler_file: Option<&'a str>,
    handler_line: Option<u32>,
    #[serde(flatten)]
    job: Option<JobPart<'a>>,
    status: Option<u16>,
    trace_id: Option<String>,
    parent_span_id: Option<String>,
    trace_sampled: Option<bool>,
    trace_origin: Option<&'static str>,
    begin_ns: u64,
    duration_ns: Option<u64>,
    queue_ns: Option<u64>,
    first_byte_ns: Option<u64>,
    last_byte_ns: Option<u64>,
    response_bytes: Option<u64>,
    gcs: Option<u32>,
    gc_ns: Option<u64>,
    gc_own_pauses: Option<u32>,
    gc_own_ns: Option<u64>,
    gc_other_pauses: Option<u32>,
    gc_other_ns: Option<u64>,
    gvl_wait_ns: Option<u64>,
    cpu_ns: Option<u64>,
    runnable_ns: Option<u64>,
    blocked_ns: Option<u64>,
    /// The same times, split by what the thread did with the GVL.
    split: Option<Split>,
    alloc_objects: Option<u64>,
    alloc_bytes: Option<u64>,
    minor_faults: Option<u64>,
    major_faults: Option<u64>,
    /// Of the whole process.
    rss_growth_bytes: Option<i64>,
}

impl<'a> RequestLine<'a> {
    /// `ts`: when the request began, epoch seconds.
    pub(super) fn of(ts: f64, process: &Process, request: &'a Request) -> Self {
        let handler = request.handler.as_deref();
        let trace = request.trace.as_ref();
        Self {
            ts,
            pid: process.pid,
            tid: request.tid,
            id: request.id,
            kind: request.kind(),
            method: request.method,
            path: request.path.as_deref(),
            endpoint: request.endpoint(),
            handler: handler.map(|frame| &*frame.name),
            handler_file: handler.and_then(|frame| frame.file.as_deref()),
            handler_line: handler.map(|frame| frame.line).filter(|line| *line != 0),
            job: request.job.as_ref().map(JobPart::of),
            status: request.status,
            trace_id: trace.map(Trace::trace_id_text),
            parent_span_id: trace.and_then(Trace::parent_span_id_text),
            trace_sampled: trace.and_then(|trace| trace.caller).map(|caller| caller.sampled),
            trace_origin: request.trace_origin(),
            begin_ns: request.begin_ns,
            duration_ns: request.duration_ns(),
            queue_ns: request.queue_ns,
            first_byte_ns: request.first_byte_ns,
            last_byte_ns: request.last_byte_ns,
            response_bytes: request.response_bytes,
            gcs: request.gcs,
            gc_ns: request.gc_ns,
            gc_own_pauses: request.gc_pauses,
            gc_own_ns: request.gc_ns,
            gc_other_pauses: request.gc_other.map(|other| other.pauses),
            gc_other_ns: request.gc_other.map(|other| other.ns),
            gvl_wait_ns: request.gvl_wait_ns,
            cpu_ns: request.states.map(|states| states.cpu_ns),
            runnable_ns: request.states.map(|states| states.runnable_ns),
            blocked_ns: request.states.map(|states| states.blocked_ns),
            split: request.split.map(Split::of),
            alloc_objects: request.alloc.map(|alloc| alloc.slots),
            alloc_bytes: request.alloc.map(|alloc| alloc.bytes),
            minor_faults: request.memory.faults.map(|faults| faults.minor),
            major_faults: request.memory.faults.map(|faults| faults.major),
            rss_growth_bytes: request.memory.rss_growth,
        }
    }
}

/// The load of a server at one time.
#[derive(Serialize)]
pub(super) struct LoadLine {
    ts: f64,
    pid: u32,
    busy_threads: Option<u32>,
    accept_queue: Option<u64>,
}

impl LoadLine {
    /// `ts`: when the load was read, epoch seconds.
    pub(super) fn of(ts: f64, process: &Process, load: &ServerLoad) -> Self {
        Self { ts, pid: process.pid, busy_threads: load.busy, accept_queue: load.waiting() }
    }
}

/// Members that only lines of jobs have.
#[derive(Serialize)]
struct JobPart<'a> {
    queue: Option<&'a str>,
    jid: Option<&'a str>,
    /// Epoch seconds.
    enqueued_at: Option<f64>,
    latency_ns: Option<u64>,
}

impl<'a> JobPart<'a> {
    fn of(job: &'a Job) -> Self {
        let Job { queue, jid, enqueued_us, latency_ns } = job;
        Self {
            queue: queue.as_deref(),
            jid: jid.as_deref(),
            enqueued_at: enqueued_us.map(|us| us as f64 / 1e6),
            latency_ns: *latency_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{model::request::RequestMemory, trace_file::samples};

    /// Page faults and growth are numbers, of which the growth may be negative, or `null`.
    #[test]
    fn memory() {
        let of = |request: &Request| {
            let line = serde_json::to_value(RequestLine::of(1.0, &samples::process(), request)).unwrap();
            ["minor_faults", "major_faults", "rss_growth_bytes"].map(|name| line.get(name).cloned())
        };
        let known = samples::request(7);
        assert_eq!(of(&known), [json!(21), json!(22), json!(-23 * 4096)].map(Some));
        let unknown = Request { memory: RequestMemory::default(), ..known };
        assert_eq!(of(&unknown), [(); 3].map(|()| Some(Value::Null)));
    }
}
