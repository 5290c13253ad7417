//! The unfinished set of a process that is being traced.

use gctrace_tunemygc::{printable::printable_json, wire::set_to_json};
use serde_json::{Map, Value, json, value::RawValue};

use super::{EventName, Header, Sample, journal::Draft};
use crate::{
    clock::WallClock,
    export::jsonl::gc::StatHeap,
    model::{GcState, Process, request::Request},
    ruby::stat::GcInfo,
};

/// A [`Sample`] in a form that takes less memory: there may be many.
#[derive(Clone)]
pub(super) struct Held {
    ts: f64,
    peak_rss: Option<u64>,
    current_rss: Option<u64>,
    event: EventName,
    stat: Box<[u64]>,
    info: GcInfo,
    meta: Option<Box<RawValue>>,
    thread_id: Option<u32>,
}

impl Held {
    /// The sample on the wire.
    pub(super) fn to_json(&self) -> String {
        let sample = Sample {
            ts: self.ts,
            peak_rss: self.peak_rss,
            current_rss: self.current_rss,
            event: self.event,
            stat: self.stat.to_vec(),
            latest_gc_info: info_map(&self.info),
            meta: self.meta.clone(),
            thread_id: self.thread_id.map(Into::into),
        };
        sample.to_json()
    }
}

/// An unfinished set.
pub(super) struct Open {
    pub(super) header: Header,
    pub(super) samples: Vec<Held>,
    /// How many of the samples the total of all sets includes.
    pub(super) counted: usize,
    /// Time of the first sample, nanoseconds.
    first_ns: u64,
    /// Time of the latest sample, nanoseconds.
    last_ns: u64,
    name: String,
    heap_keys: Vec<&'static str>,
    /// `GC.stat_heap` at the last sample that has it, and the index of that sample.
    heaps: Vec<Vec<u64>>,
    with_heaps: Option<usize>,
    part: u32,
    /// Id of the container of the process.
    pub(super) container: Option<String>,
    /// Number of cycles in this part.
    pub(super) cycles: u32,
    /// Number of units of work in this part.
    pub(super) units: u32,
    booted: bool,
    pub(super) draft: Option<Draft>,
    /// The clock when this part began.
    clock: Option<WallClock>,
}

/// The source of the samples of a set.
#[derive(Clone, Copy)]
pub(super) struct Origin<'a> {
    pub(super) process: &'a Process,
    /// The clock as it is now. Each part has that of its start: a run may last for weeks.
    pub(super) clock: &'a dyn Fn() -> WallClock,
    /// The clock of the run, on which the start of the process is known.
    pub(super) run: WallClock,
}

impl Open {
    /// An empty set.
    pub(super) fn new(header: Header, Origin { process, .. }: Origin<'_>) -> Self {
        let start = process.start_ts.map_or_else(|| "unknown".to_owned(), |ts| format!("{ts:.2}"));
        Self {
            header,
            samples: Vec::new(),
            counted: 0,
            first_ns: 0,
            last_ns: 0,
            name: format!("tunemygc-{}-{start}", process.pid),
            heap_keys: process.image.heap_keys.clone(),
            heaps: Vec::new(),
            with_heaps: None,
            part: 0,
            container: process.container.id.clone(),
            cycles: 0,
            units: 0,
            booted: false,
            draft: None,
            clock: None,
        }
    }

    /// Starts the set with this state, unless it has started already.
    pub(super) fn boot(&mut self, origin: Origin<'_>, state: &GcState) {
        if self.booted {
            return;
        }
        self.booted = true;
        self.push(origin, EventName::Booted, state, None);
        // The age of the process at that time: no sample covers what came before.
        let age =
            origin.process.start_ts.map(|start| (origin.run.epoch_seconds(state.ts_ns) - start).max(0.0));
        if let (Some(age), Some(sample)) = (age, self.samples.last_mut()) {
            let age = (age * 100.0).round() / 100.0;
            sample.meta = with_entry(sample.meta.as_deref(), "process_age", json!(age));
        }
    }

    /// Adds a unit of work, if the states at its start and at its end are known.
    pub(super) fn unit(&mut self, origin: Origin<'_>, request: &Request) {
        let Some(states) = request.gc_states.as_deref() else { return };
        self.boot(origin, &states.begin);
        let path = request.path.is_some().then(|| request.endpoint());
        let meta = path.and_then(|path| with_entry(None, "path", json!(path)));
        self.push(origin, EventName::ProcessingStarted, &states.begin, meta.clone());
        self.push(origin, EventName::ProcessingEnded, &states.end, meta);
        self.units += 1;
    }

    /// Adds a sample.
    pub(super) fn push(
        &mut self,
        origin: Origin<'_>,
        event: EventName,
        state: &GcState,
        meta: Option<Box<RawValue>>,
    ) {
        let first = self.samples.is_empty();
        let clock = *self.clock.get_or_insert_with(origin.clock);
        if !state.heaps.is_empty() {
            // This reuses the allocated memory.
            self.heaps.clone_from(&state.heaps);
            self.with_heaps = Some(self.samples.len());
        }
        let heaps = || if first { heaps_meta(&self.heap_keys, &state.heaps) } else { None };
        self.samples.push(Held {
            ts: clock.epoch_seconds(state.ts_ns),
            peak_rss: state.memory.map(|memory| memory.peak_rss),
            current_rss: state.memory.map(|memory| memory.rss),
            event,
            stat: state.stat.as_slice().into(),
            info: state.info,
            meta: meta.or_else(heaps),
            thread_id: (state.tid != origin.process.pid).then_some(state.tid),
        });
        if first {
            self.first_ns = state.ts_ns;
        }
        self.last_ns = self.last_ns.max(state.ts_ns);
    }

    /// Time from the first sample to `now_ns`, nanoseconds.
    pub(super) fn age_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.first_ns)
    }

    /// Time from the first to the latest sample, nanoseconds.
    pub(super) fn span_ns(&self) -> u64 {
        self.last_ns.saturating_sub(self.first_ns)
    }

    /// Takes the samples collected so far, as text if there are any, and the name of the file without extension. `last`
    /// ends the set, otherwise its next part starts.
    pub(super) fn take(&mut self, last: bool) -> (Option<String>, String) {
        if let Some(sample) = self.with_heaps.take().and_then(|at| self.samples.get_mut(at))
            && sample.event != EventName::Booted
        {
            sample.meta = heaps_meta(&self.heap_keys, &self.heaps);
        }
        // Its memory is released: other sets may need it.
        let mut samples = std::mem::take(&mut self.samples);
        in_order(&mut samples);
        let text = || set_to_json(&self.header, samples.iter().map(Held::to_json));
        let text = (!samples.is_empty()).then(|| printable_json(&text()).into_owned());
        self.clock = None;
        (self.cycles, self.units) = (0, 0);
        self.part += u32::from(!last || self.part > 0);
        let part = if self.part > 0 { format!("-part{}", self.part) } else { String::new() };
        (text, format!("{}{part}", self.name))
    }
}

/// Sorts samples by time: cycles and units are handed over when they are complete. The first sample is BOOTED, and the last is TERMINATED.
fn in_order(samples: &mut [Held]) {
    let rank = |sample: &Held| match sample.event {
        EventName::Booted => 0,
        EventName::Terminated => 2,
        _ => 1,
    };
    samples.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| a.ts.total_cmp(&b.ts)));
    if let [booted, earliest, ..] = samples
        && booted.event == EventName::Booted
        && earliest.ts < booted.ts
    {
        // A cycle that had begun earlier was completed later: BOOTED then takes the state of that sample.
        let meta = booted.meta.take();
        *booted = Held { event: EventName::Booted, meta, ..earliest.clone() };
    }
}

/// `GC.stat_heap` as the `meta` of the first and the last sample of a set that have it, which are BOOTED and TERMINATED
/// in a set of a whole process: `{"stat_heap": {"0": {KEY: value, …}, …}}`; `None` before 3.2, which has a single heap.
fn heaps_meta(keys: &[&'static str], heaps: &[Vec<u64>]) -> Option<Box<RawValue>> {
    if keys.is_empty() || heaps.is_empty() {
        return None;
    }
    serde_json::value::to_raw_value(&json!({ "stat_heap": StatHeap { keys, heaps } })).ok()
}

/// The same object with an additional entry.
fn with_entry(meta: Option<&RawValue>, key: &str, value: Value) -> Option<Box<RawValue>> {
    let object = meta.and_then(|meta| serde_json::from_str::<Map<String, Value>>(meta.get()).ok());
    let mut object = object.unwrap_or_default();
    object.insert(key.to_owned(), value);
    serde_json::value::to_raw_value(&object).ok()
}

fn info_map(info: &GcInfo) -> Map<String, Value> {
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    put("major_by", json!(info.major_by));
    if let Some(need) = info.need_major_by {
        put("need_major_by", json!(need));
    }
    put("gc_by", json!(info.gc_by));
    put("have_finalizer", json!(info.have_finalizer));
    put("immediate_sweep", json!(info.immediate_sweep));
    put("state", json!(info.state));
    if let Some((weak, retained)) = info.weak_references {
        put("weak_references_count", json!(weak));
        if let Some(retained) = retained {
            put("retained_weak_references_count", json!(retained));
        }
    }
    map
}

#[cfg(test)]
mod tests;
