//! The `summary` line of a process in JSON lines.

use std::sync::Arc;

use serde::Serialize;

use super::{
    super::summary::Done,
    endpoints::{self, Figures},
    frames::frame_text,
};
use crate::{
    aggregate::gc_summary::{Distribution, Notable, Rss},
    clock::WallClock,
    model::stack::Frame,
};

/// Maximum number of lines that started cycles, per process.
const LINES: usize = 10;

#[derive(Serialize)]
pub(super) struct SummaryLine {
    ts: f64,
    pid: u32,
    service: String,
    reason: &'static str,
    since_ts: f64,
    traced_ns: u64,
    cycles: u64,
    minor: u64,
    major: u64,
    /// Cycles by trigger, and by the reason for which they are major ones.
    causes: Vec<Cause>,
    /// Total of all pauses of the reported cycles.
    pause_ns: u64,
    /// Total of pauses of cycles that had begun before tracing.
    outside_pause_ns: u64,
    /// Both totals as a share of the traced time.
    gc_share: Option<f64>,
    pauses: Times,
    cycle_pauses: Times,
    worst: Option<Worst>,
    lines: Vec<Started>,
    rss_first: Option<u64>,
    rss_last: Option<u64>,
    rss_peak: Option<u64>,
    gvl_wait_ns: Option<u64>,
    gvl_wait_share: Option<f64>,
    lost: u64,
    /// Requests and jobs by endpoint, most time first, and the number of endpoints that are not listed.
    endpoints: Vec<Figures>,
    endpoints_more: usize,
}

#[derive(Serialize)]
struct Cause {
    kind: &'static str,
    gc_by: Option<&'static str>,
    major_by: Option<&'static str>,
    cycles: u64,
}

/// Quantiles are at most 1 % too high; the maximum is exact. `None` if there are no values.
#[derive(Serialize)]
struct Times {
    count: u64,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    max_ns: Option<u64>,
}

impl Times {
    fn of(times: &Distribution) -> Self {
        let known = |ns: u64| (times.count() > 0).then_some(ns);
        let (p50_ns, p99_ns) = (known(times.quantile_ns(0.5)), known(times.quantile_ns(0.99)));
        Self { count: times.count(), p50_ns, p99_ns, max_ns: known(times.max_ns()) }
    }
}

#[derive(Serialize)]
struct Worst {
    ts: f64,
    count: u64,
    kind: &'static str,
    gc_by: Option<&'static str>,
    major_by: Option<&'static str>,
    pause_ns: u64,
    max_pause_ns: u64,
    line: Option<String>,
}

impl Worst {
    fn of(worst: &Notable, clock: WallClock) -> Self {
        let &Notable { count, key, ts_ns, stopped_ns, max_ns, ref by } = worst;
        Self {
            ts: clock.epoch_seconds(ts_ns),
            count,
            kind: key.kind,
            gc_by: key.gc_by,
            major_by: key.major_by,
            pause_ns: stopped_ns,
            max_pause_ns: max_ns,
            line: by.as_deref().map(frame_text),
        }
    }
}

#[derive(Serialize)]
struct Started {
    line: Option<String>,
    cycles: u64,
    pause_ns: u64,
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl SummaryLine {
    /// Makes the line of a process.
    pub(super) fn of(done: &Done, clock: WallClock) -> Self {
        let Done { process, gc, gvl, requests, end, .. } = done;
        let (endpoints, endpoints_more) = endpoints::of(requests);
        let traced_ns = end.ts_ns.saturating_sub(end.since_ns);
        let causes = gc.cycles.iter().map(|(key, cycles)| Cause {
            kind: key.kind,
            gc_by: key.gc_by,
            major_by: key.major_by,
            cycles: *cycles,
        });
        let lines = gc.lines().into_iter().take(LINES).map(|line| Started {
            line: line.frame.as_ref().map(|frame: &Arc<Frame>| frame_text(frame)),
            cycles: line.cycles,
            pause_ns: line.stopped_ns,
        });
        let rss = |of: fn(Rss) -> u64| gc.rss.map(of);
        Self {
            ts: clock.epoch_seconds(end.ts_ns),
            pid: process.pid,
            service: process.origin.service.clone(),
            reason: end.reason.name(),
            since_ts: clock.epoch_seconds(end.since_ns),
            traced_ns,
            cycles: gc.count(None),
            minor: gc.count(Some("minor")),
            major: gc.count(Some("major")),
            causes: causes.collect(),
            pause_ns: gc.stopped_ns,
            outside_pause_ns: end.outside_ns,
            gc_share: share((gc.stopped_ns + end.outside_ns).saturating_sub(end.beyond_ns), traced_ns),
            pauses: Times::of(&gc.stops),
            cycle_pauses: Times::of(&gc.totals),
            worst: gc.worst.as_ref().map(|worst| Worst::of(worst, clock)),
            lines: lines.collect(),
            rss_first: rss(|rss| rss.first),
            rss_last: rss(|rss| rss.last),
            rss_peak: rss(|rss| rss.peak),
            gvl_wait_ns: gvl.as_ref().map(|sums| sums.wait.ns),
            gvl_wait_share: gvl.as_ref().and_then(|sums| share(sums.wait.ns, sums.watched_ns)),
            lost: gc.lost,
            endpoints,
            endpoints_more,
        }
    }
}
