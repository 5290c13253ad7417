//! The GVL in the formats.

use prost::Message as _;

use super::*;
use crate::{
    export::profile::{perfetto, pprof},
    model::gvl::{
        GvlBlocker, GvlCoverage, GvlDoing, GvlSpan, GvlSums, GvlThreadSummary, GvlTimes, GvlWait, GvlWho,
    },
};

fn gvl_who(tid: u32) -> GvlWho {
    GvlWho { tid, comm: Arc::from(NAMES[tid as usize % NAMES.len()]) }
}

/// Two threads: one holds the GVL in [1000, 3000) and is waiting again when tracing ends; the other one waits for it
/// in [2000, 3000), and has waited for another 40 ns in waits that were not reported individually.
fn gvl_recorded() -> Recorder {
    let mut recorder = recorded(&[], Limits::default());
    let process = process(2);
    let hold = GvlSpan { who: gvl_who(3), id: 30, doing: GvlDoing::Holding, begin_ns: 1000, ns: 2000 };
    let wait = GvlWait {
        who: gvl_who(4),
        id: 40,
        thread: None,
        request: None,
        begin_ns: 2000,
        ns: 1000,
        blocker: Some(GvlBlocker {
            hold: hold.clone(),
            until: Some(Arc::new([frame(2, 9)])),
            ran: vec![(3, Arc::new([frame(1, 3)]))],
            first: true,
        }),
        stack: Some(Arc::new([frame(0, 7), frame(1, 8)])),
    };
    recorder.see(&process, Seen::GvlWait(&wait)).unwrap();
    recorder.see(&process, Seen::GvlSpan(&hold)).unwrap();
    let away = GvlSpan { who: gvl_who(4), id: 40, doing: GvlDoing::Away, begin_ns: 500, ns: 1500 };
    recorder.see(&process, Seen::GvlSpan(&away)).unwrap();
    let times = |count, ns| GvlTimes { count, ns, max_ns: ns };
    let thread = |tid, last, wait, hold| GvlThreadSummary {
        coverage: GvlCoverage { holds: true, ends: true, woken: true, only_blocked: false },
        who: gvl_who(tid),
        id: u64::from(tid) * 10,
        last,
        thread: None,
        begin_ns: 500,
        end_ns: 4000,
        ended: false,
        sums: GvlSums { wall_ns: 3500, wait, hold: Some(hold), ..GvlSums::default() },
    };
    let first = thread(3, Some((GvlDoing::Waiting, 3000)), times(0, 1000), times(1, 2000));
    let second = thread(4, Some((GvlDoing::Holding, 3000)), times(3, 1040), times(0, 1000));
    recorder.see(&process, Seen::GvlThread(&first)).unwrap();
    recorder.see(&process, Seen::GvlThread(&second)).unwrap();
    recorder
}

/// The GVL's sample types add up to what all threads did, reported individually or not, and name the holder.
#[test]
fn gvl_in_pprof() {
    let recorder = gvl_recorded();
    let profile =
        pprof::proto::Profile::decode(&*gunzip(&written(&recorder, Format::Pprof, "x.pb.gz").0)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let total = |at: usize| profile.sample.iter().map(|sample| sample.value[at]).sum::<i64>();
    assert_eq!([total(5), total(6), total(7)], [3, 2040, 3000]);
    assert_eq!((0..5).map(total).sum::<i64>(), 0);
    let of = |sample: &pprof::proto::Sample, key: &str| {
        let label = sample.label.iter().find(|label| text(label.key) == key);
        label.map(|label| text(label.str).to_owned())
    };
    let told: Vec<_> = profile.sample.iter().filter(|sample| sample.value[6] == 1000).collect();
    let told: Vec<_> = told.into_iter().filter(|sample| sample.location_id.len() == 3).collect();
    let [told] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((of(told, "thread id"), of(told, "blocked by id")), (Some("4".into()), Some("3".into())));
    let unreported: Vec<i64> =
        profile.sample.iter().filter(|s| s.location_id.len() == 1).map(|sample| sample.value[6]).collect();
    assert_eq!(unreported.iter().sum::<i64>(), 1040);

    // A run without --gvl has the same types: `go tool pprof -diff_base` refuses profiles with different ones. Without
    // --wall no wall time was measured, and CPU time is not used in its place.
    let (ledger, clock) = (Ledger::default(), WallClock::measure());
    let context = Context {
        ledger: &ledger,
        clock,
        began_ns: 0,
        ended_ns: 1,
        gvl: false,
        wall: false,
        filtered: None,
        said: None,
    };
    let mut bytes = Vec::new();
    write(Format::Pprof, false, &recorder.recording.borrow(), &context, &mut bytes).unwrap();
    let profile = pprof::proto::Profile::decode(&*gunzip(&bytes)).unwrap();
    assert_eq!(profile.sample_type.len(), 10);
    assert!(profile.sample.iter().all(|sample| sample.value.len() == 10 && sample.value[2] == 0));
}

/// A thread that waits until tracing ends and never ran has no known native thread: its wait is on a track of its own.
#[test]
fn never_ran() {
    let mut recorder = recorded(&[], Limits::default());
    let summary = GvlThreadSummary {
        coverage: GvlCoverage { holds: true, ends: true, woken: true, only_blocked: false },
        who: GvlWho { tid: 0, comm: Arc::from("starved") },
        id: 50,
        last: Some((GvlDoing::Waiting, 700)),
        thread: None,
        begin_ns: 700,
        end_ns: 4000,
        ended: false,
        sums: GvlSums { wall_ns: 3300, ..GvlSums::default() },
    };
    recorder.see(&process(2), Seen::GvlThread(&summary)).unwrap();
    let (bytes, left) = written(&recorder, Format::Perfetto, "x");
    assert_eq!(left, 0);
    let (names, begins) = perfetto::tests::slices(&bytes, "waiting for the GVL");
    assert!(names.iter().any(|name| name == "starved"), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("allocation")), "{names:?}");
    assert_eq!(begins, [700]);
}

/// Both timelines have each interval once, on its thread.
#[test]
fn gvl_in_timelines() {
    let recorder = gvl_recorded();
    let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let mut found = Vec::new();
    for thread in file["threads"].as_array().unwrap() {
        let markers = &thread["markers"];
        for at in 0..markers["length"].as_u64().unwrap() as usize {
            let name =
                thread["stringArray"][markers["name"][at].as_u64().unwrap() as usize].as_str().unwrap();
            let ns = |key: &str| ((markers[key][at].as_f64().unwrap() * 1e6).round() as i64 + 1000) as u64;
            assert_eq!(markers["category"][at], 9, "the number of GVL");
            let tid = thread["tid"].as_str().unwrap().to_owned();
            found.push((tid, ns("startTime"), ns("endTime"), name.to_owned()));
        }
    }
    found.sort();
    let expected = [
        ("3", 1000, 3000, "Thread Running"),
        ("3", 3000, 4000, "Thread Stalled"),
        ("4", 2000, 3000, "Thread Stalled"),
        ("4", 3000, 4000, "Thread Running"),
        ("4", 500, 2000, "Thread Suspended"),
    ];
    let mut expected = expected.map(|(tid, from, to, name)| (tid.to_owned(), from, to, name.to_owned()));
    expected.sort();
    assert_eq!(found, expected);

    let (bytes, left) = written(&recorder, Format::Perfetto, "x.pftrace");
    let (tracks, arrows) = perfetto::tests::read(&bytes);
    assert_eq!((left, arrows), (0, 1));
    let slices: Vec<_> =
        tracks.values().filter(|(_, slices)| slices.iter().any(|s| s.2.contains("GVL"))).collect();
    let slices: Vec<_> =
        slices.iter().flat_map(|(_, slices)| slices.iter().map(|s| (s.0, s.1, s.2.as_str()))).collect();
    let expected = [
        (1000, 3000, "holding the GVL"),
        (3000, 4000, "waiting for the GVL"),
        (500, 2000, "without the GVL"),
        (2000, 3000, "waiting for the GVL"),
        (3000, 4000, "holding the GVL"),
    ];
    assert_eq!(slices, expected);
}

/// A graph of waits has all of them, with the holder of the GVL if it is known.
#[test]
fn gvl_in_flame_graphs() {
    let recorder = gvl_recorded();
    let graph = Graph { grouping: Grouping::None, of: Measure::GvlWait, ..Graph::default() };
    let lines = String::from_utf8(written(&recorder, Format::Folded(graph), "x").0).unwrap();
    let ns = |line: &str| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap();
    assert_eq!(lines.lines().map(ns).sum::<u64>(), 2_040, "{lines}");
    let single: Vec<&str> = lines.lines().filter(|line| line.contains("(GVL wait)")).collect();
    let [single] = single.as_slice() else { panic!("{lines}") };
    let held = format!(";(GVL wait);(held by {} until ", NAMES[3]);
    assert!(single.contains(&held) && ns(single) == 1_000, "{single}");
    assert!(lines.contains("(GVL waits, only totals known) 1040"), "{lines}");
    let svg = written(&recorder, Format::FlameGraph(graph), "x").0;
    let svg = String::from_utf8(svg).unwrap();
    assert!(svg.contains("total_samples=\"2040\"") && svg.contains("Waits for the GVL of"), "{svg}");
    assert!(svg.contains("3 waits, measured"));
}

/// A wait that was reported individually but is not in the profile, although its thread is, does not count towards the waits
/// of which only the total is known. It may have been dropped by a condition, or because the thread had another name then.
#[test]
fn waits_left_out() {
    let wait = |name: &str, ns| GvlWait {
        who: GvlWho { tid: 5, comm: Arc::from(name) },
        id: 50,
        thread: None,
        request: None,
        begin_ns: 2000,
        ns,
        blocker: None,
        stack: None,
    };
    let summary = GvlThreadSummary {
        coverage: GvlCoverage { holds: true, ends: true, woken: true, only_blocked: false },
        who: GvlWho { tid: 5, comm: Arc::from("later") },
        id: 50,
        last: None,
        thread: None,
        begin_ns: 500,
        end_ns: 4000,
        ended: false,
        sums: GvlSums { wait: GvlTimes { count: 9, ns: 1340, max_ns: 700 }, ..GvlSums::default() },
    };
    let graph = Graph { grouping: Grouping::None, of: Measure::GvlWait, ..Graph::default() };
    let filter = Filter { threads: vec!["later".parse().unwrap()], ..Filter::default() };
    let recording = Recording::new(false, Limits::default(), filter);
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(recording)) };
    recorder.began(0);
    let process = process(2);
    recorder.outside(&process, Seen::GvlWait(&wait("later", 500)));
    recorder.see(&process, Seen::GvlWait(&wait("before", 700))).unwrap();
    recorder.see(&process, Seen::GvlWait(&wait("later", 100))).unwrap();
    recorder.see(&process, Seen::GvlThread(&summary)).unwrap();
    // This wait was delayed until its stack arrived.
    recorder.outside(&process, Seen::GvlWait(&wait("later", 15)));
    let lines = String::from_utf8(written(&recorder, Format::Folded(graph), "x").0).unwrap();
    let mut ns: Vec<&str> = lines.lines().map(|line| line.rsplit_once(' ').unwrap().1).collect();
    ns.sort_unstable();
    assert_eq!(ns, ["100", "25"], "{lines}");
}
