//! The `request` line, in JSON lines.

use serde::Serialize;

use crate::model::{Process, request::Request};

#[derive(Serialize)]
pub(super) struct RequestLine<'a> {
    ts: f64,
    pid: u32,
    tid: u32,
    id: u64,
    kind: &'static str,
    method: Option<&'static str>,
    path: Option<&'a str>,
    status: Option<u16>,
    begin_ns: u64,
    duration_ns: Option<u64>,
    first_byte_ns: Option<u64>,
    last_byte_ns: Option<u64>,
    gcs: u32,
    gc_ns: u64,
}

impl<'a> RequestLine<'a> {
    /// `ts`: when it began, epoch seconds.
    pub(super) fn of(ts: f64, process: &Process, request: &'a Request) -> Self {
        Self {
            ts,
            pid: process.pid,
            tid: request.tid,
            id: request.id,
            kind: "http",
            method: request.method,
            path: request.path.as_deref(),
            status: request.status,
            begin_ns: request.begin_ns,
            duration_ns: request.duration_ns(),
            first_byte_ns: request.first_byte_ns,
            last_byte_ns: request.last_byte_ns,
            gcs: request.gcs,
            gc_ns: request.gc_ns,
        }
    }
}
