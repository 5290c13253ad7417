//! What one screen shows, and what it leaves out because it is unknown.

use std::sync::Arc;

use gctrace_common::event::WorkPhase;

use super::*;
use crate::{
    aggregate::{service_requests::tests::request, services::tests::process},
    model::{
        EndReason, GcWork,
        gvl::{GvlCoverage, GvlProcessSummary, GvlSums, GvlWait, GvlWho},
        seen::{CyclesBefore, ProcessEnd},
    },
    ruby::fallback::Method,
};

const END: ProcessEnd = ProcessEnd {
    reason: EndReason::Exited,
    ts_ns: 1_000_000,
    since_ns: 0,
    outside_ns: 0,
    beyond_ns: 0,
    shutdown: None,
    cycles: 0,
    before: CyclesBefore::Unknown,
    lost: 0,
};

/// The screen of a process that lives for a millisecond and whose sampling began at `began_ns`.
fn screen(process: &Process, began_ns: u64, seen: &[Seen<'_>]) -> String {
    screen_of(process, began_ns, seen, Extent::Run)
}

fn screen_of(process: &Process, began_ns: u64, seen: &[Seen<'_>], extent: Extent) -> String {
    screen_of_all(&[(process, seen)], began_ns, extent)
}

fn screen_of_all(all: &[(&Process, &[Seen<'_>])], began_ns: u64, extent: Extent) -> String {
    let of = Recorded {
        path: "x".into(),
        host: None,
        clock: WallClock::with_offsets(0, 0),
        begun_ns: 0,
        samples: true,
        gvl: true,
        cuts_time: false,
        pids: BTreeSet::new(),
        part: String::new(),
        dump: Some(("gvl.wait > 50ms: 2.30s".into(), 1_000_000_000)),
        lacking: vec![],
    };
    let mut out = Vec::new();
    let mut screen = OneScreen::new(&mut out, Screen::none(), of);
    for (process, _) in all {
        screen.see(process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
    }
    screen.began(began_ns);
    for (process, seen) in all {
        for seen in *seen {
            screen.see(process, *seen).unwrap();
        }
        screen.see(process, Seen::Ended(&END)).unwrap();
    }
    screen.finish(&Ledger { extent, ..Ledger::default() }).unwrap();
    drop(screen);
    String::from_utf8(out).unwrap()
}

/// The columns of the only process, up to its peak memory.
fn columns(text: &str) -> Vec<&str> {
    let row = text.lines().find(|line| line.contains("(pid 1")).unwrap_or_else(|| panic!("{text}"));
    row.split_whitespace().take(6).collect()
}

/// The suggested commands can be pasted into a shell.
#[test]
fn words() {
    for (path, expected) in [
        ("puma.gctrace", "puma.gctrace"),
        ("it's.gctrace", r"'it'\''s.gctrace'"),
        ("/dev/stdin", "FILE"),
        ("/dev/fd/63", "FILE"),
    ] {
        assert_eq!(word(path), expected);
    }
}

/// Samples within requests count towards the methods, whether or not the end of the request was seen.
#[test]
fn methods_in_requests() {
    let (process, sample) = profile::a_sample(5);
    let text = |requests: bool| {
        let samples: Vec<StackSample> = (0..100)
            .map(|n| {
                let request = (requests && n % 10 != 0).then_some(7);
                StackSample { ts_ns: 10 + n, request, cpu_ns: 1000, ..sample.clone() }
            })
            .collect();
        screen(&process, 0, &samples.iter().map(Seen::Stack).collect::<Vec<_>>())
    };
    let without = text(false);
    assert!(without.contains("100.0 %"), "{without}");
    assert_eq!(text(true), without);
}

/// The CPU usage is relative to the time in which samples were taken.
#[test]
fn cpus_since_sampling_began() {
    let (process, sample) = profile::a_sample(5);
    let sample = StackSample { ts_ns: 3_900_000_000, cpu_ns: 1_000_000_000, ..sample };
    let end = ProcessEnd { ts_ns: 4_000_000_000, ..END };
    let of = |began_ns| screen(&process, began_ns, &[Seen::Stack(&sample), Seen::Ended(&end)]);
    assert_eq!(columns(&of(0))[4], "0.25");
    assert_eq!(columns(&of(2_000_000_000))[4], "0.50");
    assert_eq!(columns(&of(3_000_000_001))[4], "-", "too short for a share");
}

/// For a Ruby without event sites, nothing unknown is shown: parts of pauses may be nested.
#[test]
fn without_event_sites() {
    let (mut process, _) = profile::a_sample(5);
    let work = |phase, begin_ns, ns| GcWork { phase, tid: 1, comm: "ruby".into(), begin_ns, ns };
    let mut of = |method, work: &GcWork| {
        Arc::make_mut(&mut process.image).method = method;
        screen(&process, 0, &[Seen::Work(work)])
    };
    let text = of(Method::Functions, &work(WorkPhase::Rest, 10, 100_000));
    assert_eq!(columns(&text)[..3], ["-", "-", "-"], "{text}");
    let text = of(Method::UsdtPauses, &work(WorkPhase::Pause, 10, 100_000));
    assert_eq!(columns(&text)[..5], ["10.0", "%", "-", "100µs", "-"], "{text}");
    let text = of(Method::UsdtPauses, &work(WorkPhase::Pause, 10, 500_000_000));
    assert!(
        text.contains("1 GC pause, p50 500.0ms") && text.contains("500.0ms  00:00:00.000Z pid 1\n"),
        "{text}"
    );
    assert!(text.contains("A GC pause of 500.0ms (pid 1). What was around it:"), "{text}");
    // Much time in the GC stands out, without commands that would show nothing: neither graph nor sample sets have such pauses.
    let work = work(WorkPhase::Pause, 10, 100_000);
    let text = screen(&process, 0, &[Seen::Work(&work); 10]);
    assert!(
        text.contains("of the time of ") && text.contains("What starts it is not seen of this Ruby."),
        "{text}"
    );
    assert!(!text.contains("--flamegraph-of gc") && !text.contains("--tunemygc"), "{text}");
}

/// A long name is cut visibly, but the pid behind it is not: without its last digits it would be another pid.
#[test]
fn long_names() {
    let (mut process, sample) = profile::a_sample(5);
    Arc::make_mut(&mut process.origin).service =
        "very_long_name_of_a_nightly_import_job_of_the_shop.rb".into();
    let text = screen(&process, 0, &[Seen::Stack(&sample)]);
    let row = text.lines().find(|line| line.contains("(pid ")).unwrap();
    assert!(row.contains("very_long_n") && row.ends_with("… (pid 1, ended)"), "{text}");
    let [title, dump] = [0, 1].map(|at| text.lines().nth(at).unwrap());
    assert_eq!(dump, "Written by a flight recorder at 00:00:01.000Z: gvl.wait > 50ms: 2.30s");
    assert!(title.contains("very_long_name") && title.contains("…, Ruby 3."), "{title}");
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
}

/// Without GVL sums, as in a part of a recording or after a cut, the observed waits are shown, and the rule about
/// waits is not applied. The suggested commands apply to the part that is shown.
#[test]
fn gvl_without_sums() {
    let (mut process, _) = profile::a_sample(5);
    let coverage = GvlCoverage { holds: true, ends: true, woken: true, only_blocked: false };
    Arc::make_mut(&mut process.image).gvl = Some(coverage);
    let wait = GvlWait {
        who: GvlWho { tid: 1, comm: Arc::from("worker") },
        id: 1,
        thread: None,
        request: None,
        begin_ns: 10,
        ns: 300_000,
        blocker: None,
        stack: None,
    };
    let waits = [Seen::GvlWait(&wait), Seen::GvlWait(&wait)];
    let text = screen_of(&process, 0, &waits, Extent::CutOff);
    assert!(text.contains("GVL       2 long waits, 600µs in all; the rest is not known"), "{text}");
    assert!(text.contains("Not recorded: GVL sums of 1 process: known only when a process ends\n"), "{text}");
    assert!(text.contains("Nothing stands out") && !text.contains("threads waiting for the GVL."), "{text}");
    let summary = GvlProcessSummary {
        sums: GvlSums { watched_ns: 10, wall_ns: 10, ..GvlSums::default() },
        ..GvlProcessSummary::default()
    };
    let text = screen(&process, 0, &[Seen::GvlWait(&wait), Seen::GvlProcess(&summary)]);
    assert!(!text.contains("Not recorded") && text.contains(", 0.5 threads waiting for the GVL."), "{text}");
    // A complete recording without sums: no thread was seen to wait.
    let text = screen(&process, 0, &[]);
    assert!(!text.contains("Not recorded") && text.contains(", 0.5 threads waiting for the GVL."), "{text}");
}

/// Equal endpoints of different services are different ones, and named with their service.
#[test]
fn endpoints_of_services() {
    let (web, api) = (process(1, "web"), process(2, "api"));
    let (fast, slow) =
        (request(Some("/up"), Some(1000), Some(200)), request(Some("/up"), Some(9000), Some(500)));
    let (fast, slow) = ([Seen::Request(&fast); 7], [Seen::Request(&slow); 6]);
    let text = screen_of_all(&[(&web, &fast), (&api, &slow)], 0, Extent::Run);
    for row in ["6  api: GET /up: p50", "7  web: GET /up: p50", "6 of 6 requests to api: GET /up failed"] {
        assert!(text.contains(row), "{row}: {text}");
    }
    let text = screen_of_all(&[(&web, &fast)], 0, Extent::Run);
    assert!(text.contains("7  GET /up: p50") && !text.contains("web: GET"), "{text}");
}
