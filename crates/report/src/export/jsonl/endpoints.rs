//! Requests of a process by endpoint, in its `summary` line.

use serde::Serialize;

use super::frames::frame_text;
use crate::aggregate::request_summary::{GroupSummary, Part, RequestSummary};

/// Maximum number of endpoints per process: those with the most time.
const ENDPOINTS: usize = 100;

/// Quantiles are at most 1 % too high; the maxima are exact. What is not known of any request is `None`.
#[derive(Serialize)]
pub(super) struct Figures {
    endpoint: String,
    /// The code that handled them, if it was seen and is the same for all.
    handler: Option<String>,
    count: u64,
    /// Number of those with status 500 or above.
    failed: Option<u64>,
    /// Total of the durations that are known.
    duration_ns: u64,
    p50_ns: Option<u64>,
    p95_ns: Option<u64>,
    p99_ns: Option<u64>,
    max_ns: Option<u64>,
    queue_p95_ns: Option<u64>,
    queue_max_ns: Option<u64>,
    gc_own: Option<Known>,
    gc_other: Option<Known>,
    gvl_wait: Option<Known>,
    cpu: Option<Known>,
    runnable: Option<Known>,
    blocked: Option<Known>,
    /// Number of GC cycles that they started, and of requests of which that is known.
    gcs: Option<u64>,
    gcs_of: u64,
    /// The same of bytes of heap slots.
    alloc_bytes: Option<u64>,
    alloc_of: u64,
}

/// A part of the time of requests, and the duration of those whose part is known.
#[derive(Serialize)]
struct Known {
    ns: u64,
    of_ns: u64,
}

impl Known {
    fn of(part: Part) -> Option<Self> {
        (part.of_ns > 0).then_some(Self { ns: part.ns, of_ns: part.of_ns })
    }
}

/// The endpoints with the most time, and the number of others.
pub(super) fn of(requests: &RequestSummary) -> (Vec<Figures>, usize) {
    let all = requests.by_time();
    let more = all.len().saturating_sub(ENDPOINTS);
    (all.into_iter().take(ENDPOINTS).map(|(group, of)| Figures::of(group.title(false), of)).collect(), more)
}

impl Figures {
    fn of(endpoint: String, of: &GroupSummary) -> Self {
        let time = |quantile: f64| (of.times.count() > 0).then(|| of.times.quantile_ns(quantile));
        let queue = |ns: u64| (of.queues.count() > 0).then_some(ns);
        Self {
            endpoint,
            handler: of.handlers.one().map(frame_text),
            count: of.count,
            failed: (of.status_known > 0).then_some(of.failed),
            duration_ns: of.ns,
            p50_ns: time(0.5),
            p95_ns: time(0.95),
            p99_ns: time(0.99),
            max_ns: (of.times.count() > 0).then(|| of.times.max_ns()),
            queue_p95_ns: queue(of.queues.quantile_ns(0.95)),
            queue_max_ns: queue(of.queues.max_ns()),
            gc_own: Known::of(of.own),
            gc_other: Known::of(of.other),
            gvl_wait: Known::of(of.gvl),
            cpu: Known::of(of.cpu),
            runnable: Known::of(of.runnable),
            blocked: Known::of(of.blocked),
            gcs: (of.gcs_known > 0).then_some(of.gcs),
            gcs_of: of.gcs_known,
            alloc_bytes: (of.alloc_known > 0).then_some(of.alloc.bytes),
            alloc_of: of.alloc_known,
        }
    }
}
