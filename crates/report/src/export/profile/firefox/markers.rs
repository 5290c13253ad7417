//! Markers of one thread: the requests that it served, the GC cycles that it started, the pauses in which it was
//! stopped, GC work without event sites, and what it did with the GVL (under the names that Vernier uses).

use std::num::NonZeroU64;

use serde::Serialize;
use serde_json::{Value, json};

use super::{super::label, Category, ThreadParts, View, flows, tables::Tables};
use crate::{aggregate::recording::reason_text, model::gvl::GvlDoing, ruby::PauseKind};

/// Phase of a marker at a point in time.
const INSTANT: u8 = 0;
/// Phase of a marker with a start and an end.
const INTERVAL: u8 = 1;
/// Phase of a marker whose end was not seen.
const INTERVAL_START: u8 = 2;

/// The markers of a thread.
#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Markers {
    length: usize,
    category: Vec<Category>,
    data: Vec<Value>,
    name: Vec<u32>,
    phase: Vec<u8>,
    start_time: Vec<f64>,
    end_time: Vec<Option<f64>>,
}

impl Markers {
    fn push_gvl(&mut self, name: u32, begin: f64, end: Option<f64>, data: Value) {
        self.push_as(Category::Gvl, name, begin, end, data);
    }

    fn push(&mut self, name: u32, begin: f64, end: Option<f64>, data: Value) {
        self.push_as(Category::Gc, name, begin, end, data);
    }

    pub(super) fn push_at(&mut self, category: Category, name: u32, at: f64, data: Value) {
        self.push_phase((category, INSTANT), name, at, None, data);
    }

    pub(super) fn push_as(
        &mut self,
        category: Category,
        name: u32,
        begin: f64,
        end: Option<f64>,
        data: Value,
    ) {
        let phase = if end.is_some() { INTERVAL } else { INTERVAL_START };
        self.push_phase((category, phase), name, begin, end, data);
    }

    fn push_phase(
        &mut self,
        (category, phase): (Category, u8),
        name: u32,
        begin: f64,
        end: Option<f64>,
        data: Value,
    ) {
        self.length += 1;
        self.category.push(category);
        self.data.push(data);
        self.name.push(name);
        self.phase.push(phase);
        self.start_time.push(begin);
        self.end_time.push(end);
    }
}

/// The colour of a GC: major ones stand out.
fn kind_color(kind: &str) -> &'static str {
    if kind == "major" { "magenta" } else { "purple" }
}

/// Describes the fields of each kind of marker.
pub(super) fn schema() -> Vec<Value> {
    let field = |key: &str, label: &str, format: &str| json!({"key": key, "label": label, "format": format});
    let flow = |key: &str, label: &str| field(key, label, flows::FORMAT);
    let everywhere = ["marker-chart", "marker-table", "timeline-overview"];
    vec![
        json!({
            "name": "GcPause",
            "tooltipLabel": "GC pause ({marker.data.kind})",
            "tableLabel": "#{marker.data.count} {marker.data.kind}, {marker.data.why}",
            "chartLabel": "{marker.data.kind}",
            "colorField": "color",
            "display": everywhere,
            "description": "The program was stopped by the garbage collector.",
            "fields": [
                field("kind", "Kind", "string"),
                field("count", "GC.count", "string"),
                field("why", "Why", "string"),
                field("step", "Step", "string"),
                field("mark", "Marking", "duration"),
                field("sweep", "Sweeping", "duration"),
                field("other", "Neither", "duration"),
                flow("flow", "Flow of the request"),
            ],
        }),
        json!({
            "name": "GcCycle",
            "tooltipLabel": "GC cycle #{marker.data.count} ({marker.data.kind})",
            "tableLabel": "#{marker.data.count} {marker.data.kind}, {marker.data.why}, by {marker.data.trigger}",
            "chartLabel": "#{marker.data.count} {marker.data.kind}, {marker.data.why}",
            "colorField": "color",
            "display": ["marker-chart", "marker-table"],
            "description": "From the start of a GC to the end of its sweep; the program runs between its pauses.",
            "fields": [
                field("kind", "Kind", "string"),
                field("count", "GC.count", "string"),
                field("why", "Why", "string"),
                field("pauses", "Pauses", "integer"),
                field("paused", "Pauses together", "duration"),
                field("trigger", "Triggered by", "string"),
                flow("flow", "Flow of the request"),
            ],
        }),
        json!({
            "name": "GcWork",
            "tooltipLabel": "{marker.name}",
            "colorField": "color",
            "display": everywhere,
            "description": "GC work of a Ruby whose event sites are not known.",
            "fields": [],
        }),
        json!({
            "name": "Request",
            "tooltipLabel": "{marker.data.request}",
            "tableLabel": "{marker.data.request}",
            "chartLabel": "{marker.data.request}",
            "colorField": "color",
            "display": everywhere,
            "description": "The thread served an HTTP request: from when it took it until it was free for the next one.",
            "fields": [
                field("request", "Request", "string"),
                field("id", "Its number (jsonl: id)", "string"),
                field("queue", "Waited for a thread", "duration"),
                field("firstByte", "Until the first bytes of the response", "duration"),
                field("gcs", "GC cycles started", "integer"),
                field("gc", "GC pauses of the thread", "duration"),
                field("gcOther", "GC pauses of other threads", "duration"),
                field("allocObjects", "Objects allocated", "integer"),
                field("allocBytes", "Bytes of their slots", "bytes"),
                field("minorFaults", "Page faults of the thread without I/O", "integer"),
                field("majorFaults", "Page faults of the thread with I/O", "integer"),
                field("rssGrowth", "Growth of the process's RSS meanwhile", "bytes"),
                field("trace", "Trace", "string"),
                field("parentSpan", "Span of the caller", "string"),
                flow("flow", "Flow"),
            ],
        }),
        json!({
            "name": "GVL_GAP",
            "tooltipLabel": "{marker.name}",
            "chartLabel": "{marker.name}",
            "display": everywhere,
            "description": "Recording each wait for the GVL would have cost more than --gvl-budget: waits of this time have no marker.",
            "fields": [],
        }),
        json!({
            "name": "THREAD_STALLED",
            "tooltipLabel": "Waiting for the GVL",
            "tableLabel": "for {marker.data.blockedBy}",
            "chartLabel": "GVL wait for {marker.data.blockedBy}",
            "colorField": "color",
            "display": everywhere,
            "description": "The thread waited to acquire the GVL. Waits below --gvl-threshold have no marker.",
            "fields": [
                field("blockedBy", "Held longest by", "string"),
                field("ran", "Running", "string"),
                field("until", "Released in", "string"),
                flow("flow", "Flow of the request"),
                flow("holdFlow", "Flow of the hold"),
            ],
        }),
        json!({
            "name": "THREAD_RUNNING",
            "tooltipLabel": "Holding the GVL",
            "chartLabel": "GVL",
            "colorField": "color",
            "display": ["marker-chart", "marker-table"],
            "description": "The thread held the GVL. Times below --gvl-threshold have no marker.",
            "fields": [flow("holdFlow", "Flow")],
        }),
        json!({
            "name": "THREAD_SUSPENDED",
            "tooltipLabel": "Without the GVL",
            "chartLabel": "suspended",
            "colorField": "color",
            "display": ["marker-chart", "marker-table"],
            "description": "The thread was without the GVL: it slept, blocked, or ran code that does not need it. Times below \
                            --gvl-threshold have no marker.",
            "fields": [],
        }),
    ]
}

/// The markers of a thread.
pub(super) fn of(view: View<'_>, tables: &mut Tables<'_>, parts: &ThreadParts<'_>) -> Markers {
    let mut markers = Markers::default();
    let ms = |ns: u64| ns as f64 / 1e6;
    for cycle in &parts.cycles {
        let why = reason_text(cycle.reason);
        let name = tables.string("GC cycle");
        let paused: u64 = cycle.pauses.iter().map(|pause| pause.ns).sum();
        let mut data = json!({
            "type": "GcCycle",
            "color": kind_color(cycle.kind),
            "kind": cycle.kind,
            // As a string: a number would be shown with separators.
            "count": cycle.count.to_string(),
            "why": why,
            "pauses": cycle.pauses.len(),
            "paused": ms(paused),
            "trigger": tables.ruby_frame(cycle.node).unwrap_or_else(|| "unknown".to_owned()),
        });
        let flow = cycle.request.and_then(|id| view.flows.request(tables, id));
        flows::put(&mut data, "flow", flow);
        if let Some(stack) = tables.stack(cycle.node) {
            data["cause"] = json!({"time": view.ms(cycle.begin_ns), "stack": stack});
        }
        markers.push(name, view.ms(cycle.begin_ns), cycle.end_ns.map(|end| view.ms(end)), data);
    }
    for (cycle, pause) in &parts.pauses {
        let name = tables.string("GC pause");
        let mut data = json!({
            "type": "GcPause",
            "color": kind_color(cycle.kind),
            "kind": cycle.kind,
            "count": cycle.count.to_string(),
            "why": reason_text(cycle.reason),
            "step": pause.kind.map_or("", PauseKind::name),
            "mark": ms(pause.mark_ns),
            "sweep": ms(pause.sweep_ns),
            "other": ms(pause.other_ns),
        });
        let flow = cycle.request.and_then(|id| view.flows.request(tables, id));
        flows::put(&mut data, "flow", flow);
        let (begin, end) = (view.ms(pause.begin_ns), view.ms(pause.begin_ns + pause.ns));
        markers.push(name, begin, Some(end), data);
    }
    for request in &parts.requests {
        let name = tables.string("Request");
        let mut data = json!({
            "type": "Request",
            "color": if request.status.is_some_and(|status| status >= 500) { "red" } else { "green" },
            "request": label::text(&request.name()),
            "id": request.id.to_string(),
        });
        if let Some((gcs, gc_ns)) = request.gcs.zip(request.gc_ns) {
            data["gcs"] = json!(gcs);
            data["gc"] = json!(ms(gc_ns));
        }
        if let Some(other) = request.gc_other {
            data["gcOther"] = json!(ms(other.ns));
        }
        if let Some(ns) = request.queue_ns {
            data["queue"] = json!(ms(ns));
        }
        if let Some(ns) = request.first_byte_ns {
            data["firstByte"] = json!(ms(ns));
        }
        if let Some(alloc) = request.alloc {
            data["allocObjects"] = json!(alloc.slots);
            data["allocBytes"] = json!(alloc.bytes);
        }
        if let Some(faults) = request.memory.faults {
            data["minorFaults"] = json!(faults.minor);
            data["majorFaults"] = json!(faults.major);
        }
        if let Some(bytes) = request.memory.rss_growth {
            data["rssGrowth"] = json!(bytes);
        }
        if let Some(trace) = &request.trace {
            data["trace"] = json!(trace.trace_id_text());
            if let Some(span) = trace.parent_span_id_text() {
                data["parentSpan"] = json!(span);
            }
        }
        let flow = NonZeroU64::new(request.id).and_then(|id| view.flows.request(tables, id));
        flows::put(&mut data, "flow", flow);
        let end = request.end_ns.map(|end_ns| view.ms(end_ns));
        markers.push_as(Category::Request, name, view.ms(request.begin_ns), end, data);
    }
    for work in &parts.work {
        let name = tables.string(work.name);
        let (begin, end) = (view.ms(work.begin_ns), view.ms(work.begin_ns + work.ns));
        markers.push(name, begin, Some(end), json!({"type": "GcWork", "color": "purple"}));
    }
    if parts.tid == view.recording.processes[parts.process].pid {
        for gap in &view.recording.gvl_gaps {
            let name = tables.string(gap.name());
            let data = json!({"type": "GVL_GAP"});
            markers.push_gvl(name, view.ms(gap.from_ns), Some(view.ms(gap.to_ns)), data);
        }
    }
    for gvl in &parts.gvl {
        let (name, mut data) = match gvl.doing {
            GvlDoing::Waiting => {
                let holder = gvl.holder.map(|(holder, ..)| view.recording.thread_facts(holder).0);
                let by = holder.map_or_else(
                    || "unknown".to_owned(),
                    |who| format!("{} {}", who.tid, label::text(&who.name)),
                );
                let leaf = |node| label::leaf(view.recording, node).unwrap_or_else(|| "unknown".to_owned());
                let (ran, until) = (leaf(gvl.holder_at.ran), leaf(gvl.holder_at.until));
                let data = json!({"type": "THREAD_STALLED", "color": "red", "blockedBy": by, "ran": ran, "until": until});
                ("Thread Stalled", data)
            }
            GvlDoing::Holding => ("Thread Running", json!({"type": "THREAD_RUNNING", "color": "green"})),
            GvlDoing::Away => ("Thread Suspended", json!({"type": "THREAD_SUSPENDED", "color": "grey"})),
        };
        flows::put(&mut data, "flow", gvl.request.and_then(|id| view.flows.request(tables, id)));
        flows::put(&mut data, "holdFlow", view.flows.hold(tables, parts.process, gvl));
        if let Some(stack) = tables.stack(gvl.node) {
            data["cause"] = json!({"time": view.ms(gvl.begin_ns), "stack": stack});
        }
        let name = tables.string(name);
        let (begin, end) = (view.ms(gvl.begin_ns), view.ms(gvl.begin_ns + gvl.ns));
        markers.push_gvl(name, begin, Some(end), data);
    }
    markers
}
