//! Requests on timelines.

use super::*;
use crate::{aggregate::service_requests::tests::request, export::profile::perfetto};

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

/// Each is on its thread, with its name; a thread of which nothing else was seen is there too. The same in both formats.
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

/// They count among the events of a timeline, and those before its beginning are not in it.
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
