//! Requests on timelines.

use super::*;
use crate::model::request::{PageFaults, Request, RequestMemory};
use crate::{
    aggregate::service_requests::tests::request,
    export::profile::perfetto,
    model::gvl::{GvlBlocker, GvlDoing, GvlSpan, GvlWait, GvlWho},
};

fn seen(recorder: &mut Recorder, tid: u32, begin_ns: u64, path: &str, ns: Option<u64>, status: Option<u16>) {
    let end_ns = ns.map(|ns| begin_ns + ns);
    let request = Request { tid, begin_ns, end_ns, ..request(Some(path), None, status) };
    recorder.see(&process(2), Seen::Request(&request)).unwrap();
}

fn some(limits: Limits) -> Recorder {
    let mut recorder = recorded(&[], limits);
    let named = StackSample { tid: 9, comm: Arc::from("puma 001"), ..a_sample(5).1 };
    recorder.see(&process(2), Seen::Stack(&named)).unwrap();
    seen(&mut recorder, 9, 2_000, "/orders/:id", Some(500), Some(200));
    seen(&mut recorder, 9, 3_000, "/orders/:id", Some(500), Some(503));
    seen(&mut recorder, 9, 4_000, "/cable", None, Some(101));
    seen(&mut recorder, 8, 2_000, "/a", Some(100), None);
    recorder
}

/// Page faults and growth of a request, where they are known.
#[test]
fn memory_of_requests() {
    for known in [true, false] {
        let memory =
            RequestMemory { faults: Some(PageFaults { minor: 21, major: 22 }), rss_growth: Some(-4096) };
        let memory = if known { memory } else { RequestMemory::default() };
        let mut recorder = recorded(&[], Limits::default());
        let request = Request { tid: 9, memory, ..request(Some("/a"), None, None) };
        recorder.see(&process(2), Seen::Request(&request)).unwrap();
        let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
        let file: Value = serde_json::from_slice(&bytes).unwrap();
        let threads = file["threads"].as_array().unwrap().iter();
        let mut data = threads.flat_map(|thread| thread["markers"]["data"].as_array().unwrap());
        let data = data.find(|data| data["type"] == "Request").unwrap();
        let expected = [("minorFaults", 21), ("majorFaults", 22), ("rssGrowth", -4096)];
        for (name, number) in expected {
            assert_eq!(data.get(name), known.then(|| Value::from(number)).as_ref(), "{name}");
        }
    }
}

/// Each request is on its thread, with its name; a thread about which nothing else is known is present, too. Both formats agree.
#[test]
fn requests_on_their_threads() {
    let recorder = some(Limits::default());
    let (bytes, left) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let mut found = Vec::new();
    for thread in file["threads"].as_array().unwrap() {
        for (at, data) in thread["markers"]["data"].as_array().unwrap().iter().enumerate() {
            let column = |name: &str| &thread["markers"][name][at];
            assert_eq!(
                column("name"),
                thread["stringArray"].as_array().unwrap().iter().position(|s| s == "Request").unwrap()
            );
            assert_eq!((&data["gcs"], &data["gc"]), (&Value::from(2), &Value::from(1e-5)));
            assert_eq!(data["gcOther"], Value::from(5e-5));
            let category = &file["meta"]["categories"][column("category").as_u64().unwrap() as usize]["name"];
            assert_eq!(category, "Request");
            let failed = data["request"].as_str().unwrap().ends_with(" 503");
            assert_eq!(data["color"], if failed { "red" } else { "green" }, "{data}");
            let ns = |name| column(name).as_f64().map(|ms| (ms * 1e6).round() as u64 + 1_000);
            found.push((
                thread["name"].as_str().unwrap().to_owned(),
                data["request"].as_str().unwrap().to_owned(),
                ns("startTime"),
                ns("endTime"),
            ));
        }
    }
    let expected =
        |thread: &str, name: &str, begin, end| (thread.to_owned(), name.to_owned(), Some(begin), end);
    let expected = [
        expected("thread 8", "GET /a", 2_000, Some(2_100)),
        expected("puma 001", "GET /orders/:id 200", 2_000, Some(2_500)),
        expected("puma 001", "GET /orders/:id 503", 3_000, Some(3_500)),
        expected("puma 001", "GET /cable 101", 4_000, None),
    ];
    assert_eq!((found, left), (expected.to_vec(), 0));

    let (bytes, left) = written(&recorder, Format::Perfetto, "x");
    let (_, threads) = perfetto::tests::described(&bytes);
    let thread = |tid, name: &str, begins: &[u64]| (2, tid, name.to_owned(), begins.to_vec());
    assert_eq!(threads, [thread(9, "puma 001", &[2_000, 3_000, 4_000]), thread(8, "thread 8", &[2_000])]);
    assert_eq!(left, 0);
}

/// Requests count towards the event limit of a timeline, and those before its start are not in it.
#[test]
fn requests_are_bounded() {
    let mut recorder = some(Limits { timeline: 3, ..Limits::default() });
    assert_eq!(written(&recorder, Format::Perfetto, "x").1, 1);
    recorder.began(10_000);
    seen(&mut recorder, 9, 9_999, "/early", Some(5), Some(200));
    let mut counts = UserCounts::default();
    recorder.add_counts(&mut counts);
    assert_eq!(counts.profiles.profile_events_early, 1);
}

/// Markers of this kind with their flow fields, as strings.
fn flows(file: &Value, kind: &str, keys: [&str; 2]) -> Vec<[Option<String>; 2]> {
    let schemas = file["meta"]["markerSchema"].as_array().unwrap();
    let fields = schemas.iter().find(|schema| schema["name"] == kind).unwrap()["fields"].as_array().unwrap();
    let is_flow = |key: &str| fields.iter().any(|field| field["key"] == key && field["format"] == "flow-id");
    let mut found = Vec::new();
    for thread in file["threads"].as_array().unwrap() {
        let text = |place: &Value| {
            let place = place.as_u64()? as usize;
            Some(thread["stringArray"][place].as_str().unwrap().to_owned())
        };
        let all = thread["markers"]["data"].as_array().unwrap().iter();
        for data in all.filter(|data| data["type"] == kind) {
            found.push(keys.map(|key| {
                let flow = text(&data[key]);
                assert!(flow.is_none() || is_flow(key), "{key} is no flow: {fields:?}");
                flow
            }));
        }
    }
    found
}

/// A request shares a flow with its cycles, their pauses and its waits for the GVL, on whichever thread they are; a hold shares one with
/// the waits that refer to it. A request or hold that nothing else belongs to, and anything that belongs to a missing request, has no flow.
#[test]
fn flows_in_firefox() {
    let mut recorder = recorded(&[], Limits::default());
    let cycle = |tid, begin_ns, request| GcCycle {
        span: None,
        comm: "a".to_owned(),
        count: 7,
        start: state(begin_ns, tid, 1),
        end: Some(state(begin_ns + 50, tid, 1)),
        pauses: vec![Pause { tid, begin_ns, ns: 10, kind: None, mark_ns: 10, sweep_ns: 0, other_ns: 0 }],
        trigger: None,
        request,
        lost: 0,
    };
    let who = |tid| GvlWho { tid, comm: Arc::from("a") };
    let hold = GvlSpan { who: who(8), id: 80, doing: GvlDoing::Holding, begin_ns: 2_100, ns: 300 };
    let wait = |tid, begin_ns, request, blocker| GvlWait {
        who: who(tid),
        id: u64::from(tid) * 10,
        thread: None,
        request,
        begin_ns,
        ns: 2_400 - begin_ns,
        blocker,
        stack: None,
    };
    let blocker = Some(GvlBlocker { hold, until: None, ran: Vec::new(), first: true });
    let process = process(2);
    for seen in [
        Seen::Cycle(&cycle(9, 2_050, Some(3))),
        Seen::Cycle(&cycle(8, 5_000, Some(4))),
        Seen::Cycle(&cycle(8, 6_000, Some(0))),
        Seen::Cycle(&cycle(8, 7_000, None)),
        Seen::GvlWait(&wait(9, 2_200, Some(3), blocker.clone())),
        Seen::GvlWait(&wait(7, 2_300, None, blocker)),
        Seen::GvlWait(&wait(7, 2_390, Some(5), None)),
    ] {
        recorder.see(&process, seen).unwrap();
    }
    for (id, tid) in [(3, 9), (6, 8)] {
        let request =
            Request { id, tid, begin_ns: 2_000, end_ns: Some(2_900), ..request(Some("/a"), None, None) };
        recorder.see(&process, Seen::Request(&request)).unwrap();
    }
    for id in [4, 5] {
        recorder.outside(&process, Seen::Request(&Request { id, ..request(Some("/b"), None, None) }));
    }
    let (bytes, left) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let own = Some("8000000000000003".to_owned());
    let of_hold = Some("0000000000000001".to_owned());
    let none = [None, None];
    let one = [own.clone(), None];
    let sorted = |kind| {
        let mut found = flows(&file, kind, ["flow", "holdFlow"]);
        found.sort();
        found
    };
    assert_eq!(sorted("Request"), [none.clone(), one.clone()]);
    for kind in ["GcCycle", "GcPause"] {
        assert_eq!(sorted(kind), [none.clone(), none.clone(), none.clone(), one.clone()], "{kind}");
    }
    assert_eq!(sorted("THREAD_STALLED"), [none, [None, of_hold.clone()], [own, of_hold.clone()]]);
    assert_eq!((sorted("THREAD_RUNNING"), left), (vec![[None, of_hold]], 0));
}
