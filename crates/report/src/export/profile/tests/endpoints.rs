//! In each format, what belongs to a request has its endpoint.

use std::collections::BTreeMap;

use prost::Message as _;

use super::*;
use crate::{
    aggregate::{
        recording::{Pattern, Shares},
        service_requests::tests::request,
    },
    export::profile::{Graph, Measure, pprof::proto},
    model::{
        request::Request,
        seen::{AllocStack, ProcessEnd},
    },
};

fn end_of(reason: crate::model::EndReason) -> ProcessEnd {
    ProcessEnd {
        reason,
        ts_ns: 9,
        since_ns: 1,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: 0,
        before: crate::model::seen::CyclesBefore::Unknown,
        lost: 0,
    }
}

fn sample(recorder: &mut Recorder, cpu_ns: u64, request: Option<u64>) {
    let (process, sample) = a_sample(5_000);
    let sample = StackSample { cpu_ns, wall_ns: cpu_ns, request, ..sample };
    recorder.see(&process, Seen::Stack(&sample)).unwrap();
}

fn served(recorder: &mut Recorder, id: u64, path: &str) {
    let request = Request { id, begin_ns: 4_000, ..request(Some(path), Some(5_000), Some(200)) };
    recorder.see(&process(1), Seen::Request(&request)).unwrap();
}

/// Requests 1 and 2 end, 3 does not; 4 has no number; each kind of event comes before the end, and samples also after it.
fn some(endpoints: &[&str]) -> Recorder {
    let endpoints = endpoints.iter().map(|text| text.parse::<Pattern>().unwrap()).collect();
    let filter = Filter { endpoints, ..Filter::default() };
    let recording = Recording::new(true, Limits::default(), filter);
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(recording)) };
    recorder.began(0);
    sample(&mut recorder, 1, None);
    sample(&mut recorder, 10, Some(1));
    sample(&mut recorder, 100, Some(2));
    sample(&mut recorder, 1_000, Some(3));
    sample(&mut recorder, 10_000, Some(0));
    for (id, ns) in [(1, 3), (2, 30), (3, 300)] {
        let pause = Pause { tid: 1, begin_ns: 6_000, ns, kind: None, mark_ns: ns, sweep_ns: 0, other_ns: 0 };
        let cycle = GcCycle {
            span: None,
            comm: "ruby".to_owned(),
            count: id,
            start: state(6_000, 1, 1 << 20),
            end: None,
            pauses: vec![pause],
            trigger: Some(Arc::new([frame(0, 1)])),
            request: Some(id),
            lost: 0,
        };
        recorder.see(&process(1), Seen::Cycle(&cycle)).unwrap();
        let alloc = AllocStack {
            span: None,
            ts_ns: 6_000,
            tid: 1,
            comm: Arc::from("ruby"),
            slot_size: 40,
            slots: ns,
            request: Some(id),
            stack: Arc::new([frame(0, 1)]),
        };
        recorder.see(&process(1), Seen::AllocStack(&alloc)).unwrap();
    }
    served(&mut recorder, 1, "/a");
    served(&mut recorder, 2, "/b/:id");
    sample(&mut recorder, 5, Some(1));
    let reason = crate::model::EndReason::Exited;
    // The end of another process changes nothing.
    recorder.see(&process(2), Seen::Ended(&end_of(reason))).unwrap();
    assert_eq!(recorder.recording.borrow().unresolved, 1);
    recorder.see(&process(1), Seen::Ended(&end_of(reason))).unwrap();
    recorder
}

/// CPU time, time of pauses, and slots by endpoint.
fn by_endpoint(recorder: &Recorder) -> BTreeMap<String, [i64; 3]> {
    let (bytes, _) = written(recorder, Format::Pprof, "x");
    let profile = proto::Profile::decode(&*gunzip(&bytes)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let types: Vec<&str> = profile.sample_type.iter().map(|of| text(of.r#type)).collect();
    let mut found: BTreeMap<String, [i64; 3]> = BTreeMap::new();
    for sample in &profile.sample {
        let label = sample.label.iter().find(|label| text(label.key) == "endpoint");
        let sums =
            found.entry(label.map_or_else(String::new, |label| text(label.str).to_owned())).or_default();
        for (sum, name) in sums.iter_mut().zip(["cpu", "gc", "alloc_objects"]) {
            *sum += sample.value[types.iter().position(|of| *of == name).unwrap()];
        }
    }
    found
}

fn expected(parts: &[(&str, [i64; 3])]) -> BTreeMap<String, [i64; 3]> {
    parts.iter().map(|(name, sums)| ((*name).to_owned(), *sums)).collect()
}

/// Each event has the endpoint of its request, whenever that ended; for a request that did not end it is unknown,
/// which is counted; what belongs to no request has none.
#[test]
fn labels() {
    let recorder = some(&[]);
    let all = [
        ("", [1, 0, 0]),
        ("GET /a", [15, 3, 3]),
        ("GET /b/:id", [100, 30, 30]),
        ("(unknown)", [11_000, 300, 300]),
    ];
    assert_eq!(by_endpoint(&recorder), expected(&all));
    let mut counts = UserCounts::default();
    recorder.add_counts(&mut counts);
    assert_eq!(counts.profiles.profile_endpoints_unknown, 4);
    assert_eq!(counts.profiles.profile_samples_recorded, 6);
}

/// Flame graphs can have the endpoint at the root.
#[test]
fn roots() {
    let lines = |of| {
        let graph = Graph { grouping: Grouping::Endpoint, of, ..Graph::default() };
        let text = String::from_utf8(written(&some(&[]), Format::Folded(graph), "x").0).unwrap();
        text.lines()
            .map(|line| format!("{} {}", line.split(';').next().unwrap(), line.rsplit_once(' ').unwrap().1))
            .collect::<Vec<_>>()
    };
    assert_eq!(lines(Measure::Cpu), ["(no request) 1", "(unknown) 11000", "GET /a 15", "GET /b/:id 100"]);
    assert_eq!(lines(Measure::Alloc), ["(unknown) 12000", "GET /a 120", "GET /b/:id 1200"]);
}

/// A filter keeps what belongs to an endpoint, drops the rest, and reports how much; the timeline agrees.
#[test]
fn filtered() {
    for (patterns, kept) in [
        (&["GET /b"][..], &[("GET /b/:id", [100, 30, 30])][..]),
        (&["/^GET .a$/", "(unknown)"], &[("GET /a", [15, 3, 3]), ("(unknown)", [11_000, 300, 300])]),
        (&["nowhere"], &[]),
    ] {
        let recorder = some(patterns);
        assert_eq!(by_endpoint(&recorder), expected(kept), "{patterns:?}");
        let recording = recorder.recording.borrow();
        let sum = |at: usize| kept.iter().map(|(_, sums)| sums[at] as u64).sum::<u64>();
        let account = recording.filtered();
        let parts = |of: Shares| (of.kept.ns, of.endpoint.ns);
        assert_eq!(parts(account.samples), (sum(0), 11_116 - sum(0)));
        assert_eq!(parts(account.cycles), (sum(1), 333 - sum(1)));
        assert_eq!(parts(account.allocs), (40 * sum(2), 40 * (333 - sum(2))));
        let timeline = recording.timeline.as_ref().unwrap();
        assert_eq!(timeline.samples.iter().map(|sample| sample.cpu_ns).sum::<u64>(), sum(0));
        assert_eq!(timeline.cycles.iter().flat_map(|cycle| &cycle.pauses).map(|p| p.ns).sum::<u64>(), sum(1));
        let names: Vec<&str> = timeline.requests.iter().map(|request| &*request.endpoint).collect();
        let known: Vec<&str> =
            kept.iter().map(|(name, _)| *name).filter(|name| *name != "(unknown)").collect();
        assert_eq!(names, known);
        let text = account.text(recording.filter()).unwrap();
        assert!(text.starts_with(&format!("dropped by --endpoint {}", patterns.join(", "))), "{text}");
        let mut counts = UserCounts::default();
        recorder.add_counts(&mut counts);
        let kernel = Some(vec![0; gctrace_common::stats::Counter::ALL.len()]);
        let ledger = Ledger { kernel, user: counts, ..Ledger::default() };
        assert_eq!(ledger.imbalances(), Vec::<String>::new());
    }
}

/// Only what belongs to slow requests is kept, whenever its samples come; of a request whose end was not seen nobody knows that it was slow.
#[test]
fn slow_only() {
    let with = |endpoints: &[&str]| {
        let endpoints = endpoints.iter().map(|text| text.parse::<Pattern>().unwrap()).collect();
        let filter = Filter { endpoints, slower_than_ns: Some(500), ..Filter::default() };
        let recording = Recording::new(true, Limits::default(), filter);
        let mut recorder = Recorder { recording: Rc::new(RefCell::new(recording)) };
        recorder.began(0);
        for (at, request) in [None, Some(0), Some(1), Some(2), Some(3), Some(4)].into_iter().enumerate() {
            sample(&mut recorder, 10_u64.pow(at as u32), request);
        }
        let mut end = |id, path: Option<&str>, ns: Option<u64>| {
            let end_ns = ns.map(|ns| 4_000 + ns);
            let request = Request { id, begin_ns: 4_000, end_ns, ..request(path, Some(5_000), Some(200)) };
            recorder.see(&process(1), Seen::Request(&request)).unwrap();
        };
        end(1, Some("/a"), Some(499));
        end(2, Some("/a"), Some(500));
        end(3, Some("/b"), None);
        end(4, None, Some(501));
        sample(&mut recorder, 200, Some(2));
        sample(&mut recorder, 3, Some(1));
        let gone = end_of(crate::model::EndReason::Exited);
        recorder.see(&process(1), Seen::Ended(&gone)).unwrap();
        recorder
    };
    let recorder = with(&[]);
    let unnamed = request(None, None, None).endpoint();
    assert_eq!(by_endpoint(&recorder), expected(&[("GET /a", [1_200, 0, 0]), (&unnamed, [100_000, 0, 0])]));
    let recording = recorder.recording.borrow();
    let (account, text) = (recording.filtered(), recording.filtered().text(recording.filter()).unwrap());
    assert_eq!((account.samples.kept.ns, account.samples.endpoint.ns), (101_200, 10_114));
    assert!(text.starts_with("dropped by --slower-than 500ns: "), "{text}");
    assert_eq!(recording.timeline.as_ref().unwrap().requests.len(), 2);
    let both = with(&["GET /a"]);
    assert_eq!(by_endpoint(&both), expected(&[("GET /a", [1_200, 0, 0])]));
    let text = both.recording.borrow().filtered().text(both.recording.borrow().filter()).unwrap();
    assert!(text.starts_with("dropped by --endpoint GET /a and --slower-than 500ns: "), "{text}");
}

/// All of a slow request is kept, also what is older than the time for which anything waits for its end, and what a recording had before it went on.
#[test]
fn slower_than_patience() {
    const SECOND: u64 = 1_000_000_000;
    let filter = Filter { slower_than_ns: Some(30 * SECOND), ..Filter::default() };
    let recording = Recording::new(false, Limits::default(), filter);
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(recording)) };
    recorder.began(0);
    let (process, one) = a_sample(0);
    let sample = |recorder: &mut Recorder, at_s: u64| {
        let sample =
            StackSample { ts_ns: at_s * SECOND, cpu_ns: 1, wall_ns: 1, request: Some(5), ..one.clone() };
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
    };
    (0..=130).for_each(|at_s| sample(&mut recorder, at_s));
    let end =
        Request { id: 5, begin_ns: 0, end_ns: Some(131 * SECOND), ..request(Some("/a"), None, Some(200)) };
    recorder.see(&process, Seen::Request(&end)).unwrap();
    assert_eq!(by_endpoint(&recorder).values().map(|sums| sums[0]).sum::<i64>(), 131);
    let account = |recorder: &Recorder| {
        let samples = recorder.recording.borrow().filtered().samples;
        (samples.kept.ns, samples.endpoint.ns)
    };
    assert_eq!(account(&recorder), (131, 0));
    // Of another one, 40 s are in the recording that ends.
    let late = StackSample { cpu_ns: 1, wall_ns: 1, request: Some(6), ..one.clone() };
    for at_s in [200, 240] {
        recorder.see(&process, Seen::Stack(&StackSample { ts_ns: at_s * SECOND, ..late.clone() })).unwrap();
    }
    drop(recorder.recording.borrow_mut().go_on());
    assert_eq!(account(&recorder), (133, 0));
}

/// What belongs to the wanted endpoint is kept, however many others were requested before.
#[test]
fn wanted_after_many() {
    let filter = Filter { endpoints: vec!["GET /wanted".parse::<Pattern>().unwrap()], ..Filter::default() };
    let recording = Recording::new(false, Limits::default(), filter);
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(recording)) };
    recorder.began(0);
    for id in 1..=1100 {
        served(&mut recorder, id, &format!("/{id}"));
    }
    sample(&mut recorder, 7, Some(2000));
    served(&mut recorder, 2000, "/wanted");
    sample(&mut recorder, 70, Some(2000));
    sample(&mut recorder, 700, Some(1100));
    assert_eq!(by_endpoint(&recorder), expected(&[("GET /wanted", [77, 0, 0])]));
    let account = recorder.recording.borrow().filtered().samples;
    assert_eq!((account.kept.ns, account.endpoint.ns), (77, 700));
}

/// A recording that continues another one knows the requests that have ended, and nothing waits for other requests.
#[test]
fn goes_on() {
    let recorder = some(&[]);
    let mut recording = recorder.recording.borrow_mut().go_on();
    let (process, late) = a_sample(5_000);
    let late = |request| StackSample { request: Some(request), ..late.clone() };
    crate::model::seen::Observer::see(&mut recording, &process, Seen::Stack(&late(2)));
    crate::model::seen::Observer::see(&mut recording, &process, Seen::Stack(&late(9)));
    assert_eq!((recording.samples.len(), recording.unresolved), (1, 0));
    let name = recording.samples.keys().next().and_then(|key| key.endpoint);
    assert_eq!(name.map(|index| recording.endpoint(index).to_owned()).as_deref(), Some("GET /b/:id"));
    drop(recording.go_on());
    assert_eq!((recording.samples.len(), recording.unresolved), (2, 1));
}
