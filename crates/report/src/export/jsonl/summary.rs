//! The `summary` line of a process in JSON lines.

use std::sync::Arc;

use gctrace_common::event::WorkPhase;
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
    /// What belongs to cycles is known only of a Ruby with event sites; pauses are also known of one with the USDT probes of pauses.
    cycles: Option<u64>,
    minor: Option<u64>,
    major: Option<u64>,
    /// Cycles by trigger, and by the reason for which they are major ones.
    causes: Option<Vec<Cause>>,
    /// Total of all pauses of the reported cycles.
    pause_ns: Option<u64>,
    /// Total of pauses of cycles that had begun before tracing.
    outside_pause_ns: Option<u64>,
    /// Both totals as a share of the traced time.
    gc_share: Option<f64>,
    pauses: Option<Times>,
    cycle_pauses: Option<Times>,
    worst: Option<Worst>,
    lines: Option<Vec<Started>>,
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
        let (has_cycles, has_pauses) =
            (process.image.method.sees_cycles(), process.image.method.times_pauses());
        let count = |kind| has_cycles.then(|| gc.count(kind));
        let pause_ns = gc.stopped_ns + gc.work.get(WorkPhase::Pause.name()).map_or(0, |(_, ns)| *ns);
        let all_ns = (pause_ns + end.outside_ns).saturating_sub(end.beyond_ns);
        let rss = |of: fn(Rss) -> u64| gc.rss.map(of);
        Self {
            ts: clock.epoch_seconds(end.ts_ns),
            pid: process.pid,
            service: process.origin.service.clone(),
            reason: end.reason.name(),
            since_ts: clock.epoch_seconds(end.since_ns),
            traced_ns,
            cycles: count(None),
            minor: count(Some("minor")),
            major: count(Some("major")),
            causes: has_cycles.then(|| causes.collect()),
            pause_ns: has_pauses.then_some(pause_ns),
            outside_pause_ns: has_pauses.then_some(end.outside_ns),
            gc_share: share(all_ns, traced_ns).filter(|_| has_pauses),
            pauses: has_pauses.then(|| Times::of(&gc.stops)),
            cycle_pauses: has_cycles.then(|| Times::of(&gc.totals)),
            worst: gc.worst.as_ref().map(|worst| Worst::of(worst, clock)),
            lines: has_cycles.then(|| lines.collect()),
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        aggregate::services::tests::{END, process},
        export::summary::Summaries,
        model::{
            GcWork,
            seen::{ProcessEnd, Seen},
        },
        ruby::fallback::{METHODS, Method},
    };

    /// The line of a process that is traced for 100 ns by this method and has these parts of its GC.
    fn of(method: Method, work: &[(WorkPhase, u64)]) -> Value {
        let mut process = process(1, "shop");
        Arc::make_mut(&mut process.image).method = method;
        let mut summaries = Summaries::default();
        for &(phase, ns) in work {
            let work = GcWork { phase, tid: 1, comm: "ruby".into(), begin_ns: 10, ns };
            summaries.see(&process, Seen::Work(&work));
        }
        let done = summaries.ended(&process, &ProcessEnd { since_ns: 100, ts_ns: 200, ..END });
        serde_json::to_value(SummaryLine::of(&done, WallClock::with_offsets(0, 0))).unwrap()
    }

    /// What a method does not see is `null`, not 0.
    #[test]
    fn unknown_is_null() {
        let of_cycles = ["cycles", "minor", "major", "causes", "cycle_pauses", "worst", "lines"];
        let of_pauses = ["pause_ns", "outside_pause_ns", "gc_share", "pauses"];
        for method in METHODS {
            let line = of(method, &[]);
            let are_null = |names: &[&str]| names.iter().filter(|&&name| line[name].is_null()).count();
            // Without a cycle there is no worst one.
            let expected = if method == Method::Sites { 1 } else { of_cycles.len() };
            assert_eq!(are_null(&of_cycles), expected, "{method:?}: {line}");
            assert_eq!(are_null(&of_pauses) == 0, method.times_pauses(), "{method:?}: {line}");
        }
        let line = of(Method::UsdtPauses, &[(WorkPhase::Pause, 10), (WorkPhase::Pause, 20)]);
        assert_eq!((&line["pause_ns"], &line["gc_share"]), (&json!(30), &json!(0.3)));
        assert_eq!(line["pauses"], json!({ "count": 2, "p50_ns": 10, "p99_ns": 20, "max_ns": 20 }));
        let line = of(Method::Functions, &[(WorkPhase::Start, 10)]);
        assert_eq!((&line["pause_ns"], &line["pauses"]), (&json!(null), &json!(null)));
    }
}
