//! The Firefox Profiler: consistent tables, and processes that can be distinguished.

use super::*;
use crate::model::seen::{CyclesBefore, ProcessEnd};

pub(super) fn check_firefox(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, left) = written(recorder, Format::Firefox, "x.json.gz");
    let file: Value = serde_json::from_slice(&gunzip(&bytes)).unwrap();
    let (mut time, mut cpu, mut markers) = (0, 0, 0);
    for thread in file["threads"].as_array().unwrap() {
        for table in ["samples", "markers", "stackTable", "frameTable", "funcTable"] {
            let table = thread[table].as_object().unwrap();
            let length = table["length"].as_u64().unwrap() as usize;
            for (name, column) in table.iter().filter_map(|(name, column)| Some((name, column.as_array()?))) {
                assert_eq!(column.len(), length, "{name}");
            }
        }
        let column = |table: &str, name: &str| thread[table][name].as_array().unwrap().clone();
        let below = |table: &str, name: &str, of: &str| {
            let limit = thread[of]["length"].as_u64().unwrap();
            assert!(column(table, name).iter().filter_map(Value::as_u64).all(|at| at < limit));
        };
        below("samples", "stack", "stackTable");
        below("stackTable", "frame", "frameTable");
        below("frameTable", "func", "funcTable");
        for (at, prefix) in column("stackTable", "prefix").iter().enumerate() {
            assert!(prefix.as_u64().is_none_or(|prefix| prefix < at as u64));
        }
        let times: Vec<f64> = column("samples", "time").iter().map(|time| time.as_f64().unwrap()).collect();
        assert!(times.is_sorted(), "{times:?}");
        let weights = column("samples", "weight");
        time += weights.iter().map(|weight| (weight.as_f64().unwrap() * 1e6).round() as u64).sum::<u64>();
        cpu += column("samples", "threadCPUDelta").iter().map(|delta| delta.as_u64().unwrap()).sum::<u64>();
        markers += thread["markers"]["length"].as_u64().unwrap();
        // Major and minor collections have different colours.
        for data in column("markers", "data") {
            if let Some(kind) = data["kind"].as_str() {
                assert_eq!(data["color"], if kind == "major" { "magenta" } else { "purple" }, "{data}");
            }
        }
        let strings = thread["stringArray"].as_array().unwrap().len() as u64;
        let names = [column("funcTable", "name"), column("markers", "name")].concat();
        assert!(names.iter().all(|name| name.as_u64().unwrap() < strings));
    }
    assert_eq!((time, cpu, left), (sum(inputs, Input::time_ns), sum(inputs, |input| input.cpu_ns), 0));
    let cycles = inputs.iter().filter(|input| !input.pauses.is_empty());
    assert_eq!(markers, cycles.map(|input| 1 + input.pauses.len() as u64).sum::<u64>());
    let colored = |name: &str| {
        let mut schemas = file["meta"]["markerSchema"].as_array().unwrap().iter();
        schemas.any(|schema| schema["name"] == name && schema["colorField"] == "color")
    };
    assert!(["GcPause", "GcCycle", "GcWork", "Request"].into_iter().all(colored));
    // All categories have different colours.
    let categories = file["meta"]["categories"].as_array().unwrap();
    let colours: collections::BTreeSet<&str> =
        categories.iter().map(|category| category["color"].as_str().unwrap()).collect();
    assert_eq!(colours.len(), categories.len(), "{categories:?}");
    let threads = file["threads"].as_array().unwrap();
    for counter in file["counters"].as_array().unwrap() {
        let main = &threads[counter["mainThreadIndex"].as_u64().unwrap() as usize];
        assert_eq!((&main["pid"], &main["isMainThread"]), (&counter["pid"], &Value::Bool(true)));
        let changes = counter["samples"]["count"].as_array().unwrap();
        let last: i64 = changes.iter().map(|change| change.as_i64().unwrap()).sum();
        assert!([1 << 20, 1 << 21].contains(&last));
    }
}

/// A pause is on the thread that it stopped; another one may have begun the cycle.
#[test]
fn pauses_by_other_threads() {
    let mut recorder = recorded(&[], Limits::default());
    recorder.see(&process(4), Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
    let pause =
        |tid, begin_ns| Pause { tid, begin_ns, ns: 10, kind: None, mark_ns: 10, sweep_ns: 0, other_ns: 0 };
    let cycle = GcCycle {
        span: None,
        comm: "ruby".to_owned(),
        count: 7,
        start: state(100, 4, 1 << 20),
        end: None,
        pauses: vec![pause(4, 100), pause(9, 200), pause(9, 300)],
        trigger: None,
        request: None,
        lost: 0,
    };
    recorder.see(&process(4), Seen::Cycle(&cycle)).unwrap();
    let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let markers = |thread: &Value| {
        let data = thread["markers"]["data"].as_array().unwrap().clone();
        let of = |kind| data.iter().filter(|data| data["type"] == kind).count();
        (thread["tid"].as_str().unwrap().to_owned(), of("GcCycle"), of("GcPause"))
    };
    let threads: Vec<_> = file["threads"].as_array().unwrap().iter().map(markers).collect();
    assert_eq!(threads, [("4".to_owned(), 1, 1), ("9".to_owned(), 0, 2)]);
}

/// A program that replaces itself is two processes, which a viewer must not merge.
#[test]
fn after_exec() {
    let mut recorder = recorded(&[], Limits::default());
    for rss in [1_u64 << 20, 2 << 20] {
        let end = ProcessEnd {
            reason: crate::model::EndReason::Execed,
            ts_ns: rss,
            since_ns: 0,
            outside_ns: 0,
            beyond_ns: 0,
            shutdown: None,
            cycles: 0,
            before: CyclesBefore::Unknown,
            lost: 0,
        };
        let state = state(rss, 4, rss);
        recorder.see(&process(4), Seen::Process { state: Some(&state), now_ns: 0, since_ns: 0 }).unwrap();
        recorder.see(&process(4), Seen::Ended(&end)).unwrap();
    }
    let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    for list in ["threads", "counters"] {
        let pids: Vec<_> = file[list].as_array().unwrap().iter().map(|one| &one["pid"]).collect();
        assert_eq!(pids, ["4", "4.1"], "{list}");
    }
    assert_eq!(file["threads"][1]["tid"], "4.1");
}
