//! Sets with units of work.

use super::*;
use crate::{
    export::tunemygc::SampleSet,
    model::request::{Job, UnitStates},
    trace_file::samples,
};

/// The clock of the run: monotonic time is epoch time.
const RUN: fn() -> WallClock = || WallClock::with_offsets(0, 0);

/// A process that started at epoch second 1000, and a clock that starts at the epoch.
fn open() -> (Open, Process, impl Fn() -> WallClock) {
    let process = Process { pid: 7, start_ts: Some(1000.0), ..samples::process() };
    let header = Header {
        token: None,
        ruby_version: "3.4.1".to_owned(),
        rails_version: "0.0".to_owned(),
        gc_env: Map::new(),
        agent_version: "1".to_owned(),
        gc_opts: Vec::new(),
        gc_constants: Map::new(),
        stat_keys: process.image.stat_keys.iter().map(|key| (*key).to_owned()).collect(),
        spy_ids: None,
        hostname: "host".to_owned(),
        ppid: 1,
        pid: 7,
    };
    let clock = || WallClock::with_offsets(0, 0);
    (Open::new(header, Origin { process: &process, clock: &clock, run: RUN() }), process, clock)
}

/// A state at this millisecond after epoch second 1010.
fn state(tid: u32, ms: u64) -> GcState {
    GcState { tid, ..samples::state(1_010_000_000_000 + ms * 1_000_000) }
}

fn unit(tid: u32, from: u64, until: u64, method: Option<&'static str>, path: Option<&str>) -> Request {
    let gc_states = UnitStates {
        begin: GcState { heaps: vec![], ..state(tid, from) },
        end: GcState { heaps: vec![], ..state(tid, until) },
    };
    let job = method.is_none().then(Job::default);
    Request {
        gc_states: Some(Box::new(gc_states)),
        trace: None,
        method,
        path: path.map(ToOwned::to_owned),
        job,
        ..samples::request(from)
    }
}

fn events(set: &SampleSet) -> Vec<(&'static str, u64)> {
    let at = |sample: &Sample| ((sample.ts - 1010.0) * 1000.0).round() as u64;
    set.samples.iter().map(|sample| (sample.event.as_str(), at(sample))).collect()
}

/// Units and cycles are added when they are complete, and are sorted by time in the set; a set is valid when it is read back.
#[test]
fn in_time_order() {
    let (mut open, process, clock) = open();
    let origin = Origin { process: &process, clock: &clock, run: RUN() };
    open.boot(origin, &state(7, 0));
    open.unit(origin, &unit(9, 20, 30, Some("GET"), Some("/orders/:id")));
    open.unit(origin, &unit(7, 25, 2040, None, Some("Shop::MailJob")));
    open.push(origin, EventName::GcCycleStarted, &state(9, 22), None);
    open.push(origin, EventName::GcCycleEnded, &state(9, 5000), None);
    open.unit(origin, &unit(9, 50, 51, Some("GET"), None));
    // The states of this unit are unknown.
    open.unit(origin, &Request { gc_states: None, ..unit(9, 52, 53, Some("GET"), Some("/")) });
    assert_eq!((open.units, open.span_ns()), (3, 5_000_000_000));
    let (text, stem) = open.take(true);
    assert_eq!(stem, "tunemygc-7-1000.00");
    let set = SampleSet::from_json(&text.unwrap()).unwrap();
    assert_eq!(
        events(&set),
        [
            ("BOOTED", 0),
            ("PROCESSING_STARTED", 20),
            ("GC_CYCLE_STARTED", 22),
            ("PROCESSING_STARTED", 25),
            ("PROCESSING_ENDED", 30),
            ("PROCESSING_STARTED", 50),
            ("PROCESSING_ENDED", 51),
            ("PROCESSING_ENDED", 2040),
            ("GC_CYCLE_ENDED", 5000),
        ]
    );
    let meta = |at: usize| set.samples[at].meta.as_deref().map_or("", RawValue::get);
    assert_eq!((meta(1), meta(4)), (r#"{"path":"GET /orders/:id"}"#, r#"{"path":"GET /orders/:id"}"#));
    assert_eq!((meta(3), meta(5)), (r#"{"path":"Shop::MailJob"}"#, ""));
    // The heaps are in the first and the last sample that have them.
    assert!(meta(0).contains(r#""process_age":10.0"#) && meta(0).contains(r#""stat_heap""#), "{}", meta(0));
    assert!(meta(8).starts_with(r#"{"stat_heap""#) && meta(2).is_empty());
    // No thread is the main thread.
    let threads: Vec<_> = set
        .samples
        .iter()
        .map(|sample| sample.thread_id.as_ref().and_then(serde_json::Number::as_u64))
        .collect();
    assert_eq!(threads[..4], [None, Some(9), Some(9), None]);
}

/// The first sample is BOOTED, whatever is reported first, and each part has its own units.
#[test]
fn parts() {
    let (mut open, process, clock) = open();
    let origin = Origin { process: &process, clock: &clock, run: RUN() };
    open.unit(origin, &unit(9, 3000, 3001, Some("GET"), Some("/")));
    // The cycle had begun before the unit, seconds ago.
    open.boot(origin, &state(7, 10));
    open.push(origin, EventName::GcCycleStarted, &state(7, 10), None);
    let (text, stem) = open.take(false);
    assert_eq!(stem, "tunemygc-7-1000.00-part1");
    let set = SampleSet::from_json(&text.unwrap()).unwrap();
    let expected =
        [("BOOTED", 10), ("GC_CYCLE_STARTED", 10), ("PROCESSING_STARTED", 3000), ("PROCESSING_ENDED", 3001)];
    assert_eq!(events(&set), expected);
    assert_eq!((open.units, open.cycles), (0, 0));
    open.unit(origin, &unit(9, 4000, 4001, Some("GET"), Some("/")));
    let (text, _) = open.take(true);
    let set = SampleSet::from_json(&text.unwrap()).unwrap();
    assert_eq!(events(&set), [("PROCESSING_STARTED", 4000), ("PROCESSING_ENDED", 4001)]);
    assert_eq!(open.take(true).0, None);
}

/// A part has the clock of its start throughout, also if the host's clock is set meanwhile; the next one has the new clock. The age of a process
/// does not change with it.
#[test]
fn clock_is_set() {
    let (mut open, process, _) = open();
    let ahead = std::cell::Cell::new(0);
    let clock = || WallClock::with_offsets(ahead.get() * 1_000_000_000, 0);
    let origin = Origin { process: &process, clock: &clock, run: RUN() };
    let mut part = |from: u64, step: i64| {
        open.boot(origin, &state(7, from));
        open.push(origin, EventName::GcCycleStarted, &state(7, from + 1), None);
        ahead.set(ahead.get() + step);
        open.push(origin, EventName::GcCycleEnded, &state(7, from + 2), None);
        SampleSet::from_json(&open.take(false).0.unwrap()).unwrap()
    };
    // Between the time at which the process was found and its first state.
    ahead.set(500);
    let (first, second, third) = (part(0, 3600), part(10, -1800), part(20, 0));
    let times = |set: &SampleSet| -> Vec<f64> {
        set.samples.iter().map(|sample| ((sample.ts - 1010.0) * 1000.0).round() / 1000.0).collect()
    };
    assert_eq!(times(&first), [500.0, 500.001, 500.002]);
    assert_eq!(times(&second), [4100.011, 4100.012]);
    assert_eq!(times(&third), [2300.021, 2300.022]);
    let meta = first.samples[0].meta.as_deref().map_or("", RawValue::get);
    assert!(meta.contains(r#""process_age":10.0"#), "{meta}");
}

/// The age of a process is right even if the host's clock was set between the start of the run and the time at which the process was found.
#[test]
fn age_on_a_clock_that_was_set() {
    let (_, process, _) = open();
    let set = || WallClock::with_offsets(3_600_000_000_000, 0);
    let origin = Origin { process: &process, clock: &set, run: RUN() };
    let mut open = Open::new(open().0.header, origin);
    open.boot(origin, &state(7, 0));
    let set = SampleSet::from_json(&open.take(false).0.unwrap()).unwrap();
    let meta = set.samples[0].meta.as_deref().map_or("", RawValue::get);
    assert!(meta.contains(r#""process_age":10.0"#), "{meta}");
    assert!((set.samples[0].ts - 4610.0).abs() < 0.001, "{}", set.samples[0].ts);
}
