//! Slow requests as text.

use std::sync::Arc;

use super::*;
use crate::{
    aggregate::services::tests::{process, state},
    model::{
        GcState, Pause,
        gvl::{GvlBlocker, GvlCoverage, GvlDoing, GvlSpan, GvlSplit, GvlTaskTimes, GvlWho},
        request::{Allocated, Job, PageFaults, RequestMemory},
        stack::{Frame, FrameKind, GcActivity, Stack, StackSample, ThreadState},
    },
};

const MS: u64 = 1_000_000;

fn web(gvl: bool) -> Process {
    let mut process = process(4242, "web");
    let mut image = (*process.image).clone();
    image.gvl = gvl.then(GvlCoverage::default);
    process.image = Arc::new(image);
    process
}

fn request(id: u64, begin_ms: u64, ms: u64, (gcs, gc_ms): (u32, u64)) -> Request {
    Request {
        id,
        tid: 7,
        begin_ns: begin_ms * MS,
        end_ns: Some((begin_ms + ms) * MS),
        method: Some("GET"),
        path: Some("/reports/:id".to_owned()),
        status: Some(200),
        queue_ns: Some(2 * MS),
        first_byte_ns: Some((ms - 1) * MS),
        last_byte_ns: None,
        response_bytes: None,
        gcs: Some(gcs),
        gc_ns: Some(gc_ms * MS),
        gc_pauses: Some(gcs),
        gc_other: Some(GcTime::default()),
        gvl_wait_ns: None,
        states: None,
        split: None,
        alloc: None,
        memory: RequestMemory::default(),
        job: None,
        is_run: false,
        handler: None,
        gc_states: None,
        trace: None,
    }
}

fn stack(name: &str) -> Stack {
    Arc::new([Arc::new(Frame {
        kind: FrameKind::Ruby,
        name: Arc::from(name),
        file: Some(Arc::from("/srv/app/models/report.rb")),
        line: 12,
        first_line: 10,
        address: 0,
    })])
}

fn cycle(count: u64, request: Option<u64>, begin_ms: u64, pauses: &[(u32, u64, u64)]) -> GcCycle {
    let pause = |&(tid, begin_ms, ms): &(u32, u64, u64)| Pause {
        tid,
        begin_ns: begin_ms * MS,
        ns: ms * MS,
        kind: None,
        mark_ns: ms * MS,
        sweep_ns: 0,
        other_ns: 0,
    };
    GcCycle {
        span: None,
        comm: "puma".into(),
        count,
        start: GcState { ts_ns: begin_ms * MS, ..state(1, 1) },
        end: None,
        pauses: pauses.iter().map(pause).collect(),
        trigger: Some(stack("Report#rows")),
        request,
        lost: 0,
    }
}

pub(in crate::export) fn wait(tid: u32, begin_ms: u64, ms: u64, is_held: bool) -> GvlWait {
    let who = |tid| GvlWho { tid, comm: Arc::from("puma srv tp 002") };
    let hold = GvlSpan { who: who(9), id: 2, doing: GvlDoing::Holding, begin_ns: 1, ns: 1 };
    let blocker = GvlBlocker { hold, until: None, ran: vec![(3, stack("Csv\u{1b}[31m#parse"))], first: true };
    GvlWait {
        who: who(tid),
        id: 1,
        thread: None,
        request: None,
        begin_ns: begin_ms * MS,
        ns: ms * MS,
        blocker: is_held.then_some(blocker),
        stack: None,
    }
}

/// The output without the time of day.
fn text(process: &Process, least_ms: u64, seen: &[Seen<'_>]) -> String {
    let mut out = Vec::new();
    let mut slow = SlowRequests::new(&mut out, WallClock::measure(), least_ms * MS);
    for seen in seen {
        slow.see(process, *seen).unwrap();
    }
    slow.finish(&Ledger::default()).unwrap();
    drop(slow);
    let text = String::from_utf8(out).unwrap();
    let text: Vec<_> =
        text.lines().map(|line| line.split_once("Z  ").map_or(line, |(_, rest)| rest)).collect();
    text.join("\n")
}

/// Only what belongs to the request is listed, in chronological order, whenever it was reported.
#[test]
fn what_made_it_slow() {
    let gc_other = Some(GcTime { pauses: 2, ns: 75 * MS });
    let slow = Request { gc_other, ..request(5, 1000, 600, (2, 150)) };
    let quick = request(6, 1700, 20, (1, 1));
    let cycles = [
        cycle(810, Some(4), 900, &[(7, 900, 5), (8, 990, 15), (7, 1010, 20)]),
        cycle(811, Some(5), 1100, &[(7, 1100, 40), (8, 1200, 70), (7, 1300, 90)]),
        cycle(812, Some(6), 1705, &[(7, 1705, 1)]),
    ];
    let waits = [
        wait(7, 1400, 30, true),
        wait(8, 1400, 30, false),
        wait(7, 1590, 30, false),
        wait(7, 1050, 9, false),
    ];
    let seen = [
        Seen::Cycle(&cycles[0]),
        Seen::GvlWait(&waits[0]),
        Seen::Request(&slow),
        Seen::Cycle(&cycles[1]),
        Seen::GvlWait(&waits[1]),
        Seen::GvlWait(&waits[2]),
        Seen::GvlWait(&waits[3]),
        Seen::Cycle(&cycles[2]),
        Seen::Request(&quick),
    ];
    let expected = "\
600.0ms  GET /reports/:id 200
  web (pid 4242, thread 7); waited 2.00ms for a thread; first byte after 599.0ms
  GC: 150.0ms (25.0 %) in pauses of this thread; it started 2 cycles
      75.00ms (12.5 %) in 2 pauses of other threads meanwhile
    +0        minor GC #810 (newobj): 20.00ms
              and 5.00ms in other threads
              not started by this request
    +100.0ms  minor GC #811 (newobj): 130.0ms in 2, longest 90.00ms
              and 70.00ms in other threads
              by Report#rows models/report.rb:12
    not listed: 1 cycle (not over yet, lost, or too many to keep)
  GVL: 2 long waits seen, 39.00ms (6.5 %)
    +50.00ms  waited 9.00ms
    +400.0ms  waited 30.00ms
              held by 9 puma srv tp 002
              running Csv\\u{1b}[31m#parse models/report.rb:12
1 of 2 requests took 500.0ms or longer";
    assert_eq!(text(&web(true), 500, &seen), expected);
    assert!(expected.lines().all(|line| line.chars().count() <= WIDTH));
    // The total of all waits, if known, and how the time is divided.
    let states = Some(States { cpu_ns: 200 * MS, runnable_ns: 6 * MS, blocked_ns: 394 * MS });
    let alloc = Some(Allocated { slots: 12_000, bytes: 480_000 });
    let times = |cpu, runnable, blocked| GvlTaskTimes {
        cpu_ns: cpu * MS,
        runnable_ns: runnable * MS,
        blocked_ns: blocked * MS,
    };
    let split = GvlSplit { waiting: times(0, 6, 54), holding: times(190, 0, 10), away: times(10, 0, 330) };
    let slow = Request { gvl_wait_ns: Some(60 * MS), states, split: Some(split), alloc, ..slow };
    let text = text(&web(true), 500, &[Seen::GvlWait(&waits[0]), Seen::Request(&slow)]);
    let both = "\n  GVL: waited 60.00ms (10.0 %) for it in all\n       1 long wait seen, 30.00ms (5.0 %)\n";
    assert!(text.contains(both), "{text}");
    let time = "
  CPU: 200.0ms (33.3 %), ready 6.00ms (1.0 %), waiting 394.0ms (65.7 %)
  time: 50.00ms (8.3 %) in Ruby, 150.0ms (25.0 %) in own GC,
        60.00ms (10.0 %) waiting for the GVL; without it
        10.00ms (1.7 %) on a CPU, 0 (0 %) ready, 330.0ms (55.0 %) blocked
  allocated: 12000 objects, 469 KiB
";
    assert!(text.contains(time), "{text}");
    assert!(time.lines().all(|line| line.len() <= WIDTH), "{time}");
}

/// Memory is mentioned if the process changed much, or the thread had many page faults or waited for one; what is unknown is left out.
#[test]
fn memory_of_requests() {
    let faults = |minor, major| Some(PageFaults { minor, major });
    for (faults, rss_growth, expected) in [
        (
            faults(3008, 4),
            Some(12_897_485),
            Some("RSS of the process +12.3 MiB, 3012 page faults (4 with I/O)"),
        ),
        (faults(1, 0), Some(-(40 << 20)), Some("RSS of the process -40.0 MiB, 1 page fault")),
        (faults(0, 1), Some(0), Some("RSS of the process +0 bytes, 1 page fault (1 with I/O)")),
        (faults(1000, 0), None, Some("1000 page faults")),
        (None, Some(1 << 20), Some("RSS of the process +1.0 MiB")),
        (faults(999, 0), Some((1 << 20) - 1), None),
        (faults(999, 0), Some(1 - (1 << 20)), None),
        (None, None, None),
    ] {
        let memory = RequestMemory { faults, rss_growth };
        let slow = Request { memory, ..request(5, 1000, 600, (0, 0)) };
        let text = text(&web(false), 500, &[Seen::Request(&slow)]);
        let line = text.lines().find_map(|line| line.strip_prefix("  memory: "));
        assert_eq!(line, expected, "{text}");
    }
}

/// Unknown GC time is not shown as a number; GC of other threads alone is listed, too.
#[test]
fn only_others() {
    let gc_other = Some(GcTime { pauses: 1, ns: 70 * MS });
    let waits = Request { gc_other, ..request(5, 1000, 600, (0, 0)) };
    let unknown = Request { gcs: None, gc_ns: None, gc_other: None, ..request(6, 2000, 600, (0, 0)) };
    let cycle = cycle(811, Some(4), 1100, &[(8, 1200, 70)]);
    let expected = "\
600.0ms  GET /reports/:id 200
  web (pid 4242, thread 7); waited 2.00ms for a thread; first byte after 599.0ms
  GC: none in this thread
      70.00ms (11.7 %) in 1 pause of other threads meanwhile
    +200.0ms  minor GC #811 (newobj): 70.00ms in other threads
              not started by this request
600.0ms  GET /reports/:id 200
  web (pid 4242, thread 7); waited 2.00ms for a thread; first byte after 599.0ms
  GC: unknown for this thread; unknown for others
2 of 2 requests took 500.0ms or longer";
    let seen = [Seen::Cycle(&cycle), Seen::Request(&waits), Seen::Request(&unknown)];
    assert_eq!(text(&web(false), 500, &seen), expected);
}

/// No requests; and a request of unknown length is not called slow.
#[test]
fn empty() {
    assert_eq!(text(&web(false), 500, &[]), "0 of 0 requests took 500.0ms or longer");
    let endless = Request { end_ns: None, ..request(1, 5, 5, (0, 0)) };
    let plain = request(2, 5, 700, (0, 0));
    let seen = [Seen::Request(&endless), Seen::Request(&plain)];
    let expected = "\
700.0ms  GET /reports/:id 200
  web (pid 4242, thread 7); waited 2.00ms for a thread; first byte after 699.0ms
  GC: none in this thread; none in others
1 of 2 requests took 500.0ms or longer";
    assert_eq!(text(&web(false), 500, &seen), expected);
}

/// A job has its queue, its id, and how long it had waited.
#[test]
fn jobs() {
    let job = Job {
        queue: Some("low".into()),
        jid: Some("9d\n2f".into()),
        enqueued_us: Some(1),
        latency_ns: Some(3200 * MS),
    };
    let slow =
        Request { job: Some(job), queue_ns: None, first_byte_ns: None, ..request(5, 1000, 600, (0, 0)) };
    let text = text(&web(false), 500, &[Seen::Request(&slow)]);
    assert!(text.contains("\n  queue low, job 9d\\u{a}2f, enqueued 3.20s before\n"), "{text}");
}

/// Samples of the request's thread show where it was, on a CPU and off it; those of other requests and of none do not count.
#[test]
fn samples() {
    let at = |request, state, ms: u64, stack: Stack| StackSample {
        ts_ns: 1_100 * MS,
        tid: 7,
        comm: Arc::from("puma srv tp 002"),
        state,
        cpu_ns: if state == ThreadState::Running { ms * MS } else { 0 },
        wall_ns: ms * MS,
        gc: GcActivity::None,
        request,
        span: None,
        stack,
    };
    let (running, away) = (ThreadState::Running, ThreadState::Blocked);
    let samples = [
        at(Some(5), running, 10, stack("Report#rows")),
        at(Some(5), running, 10, stack("Csv\u{1b}#parse")),
        at(Some(5), running, 20, stack("Report#rows")),
        at(Some(5), running, 1, stack("Report#a")),
        at(Some(5), running, 2, stack("Report#b")),
        at(Some(5), away, 400, stack("Report#query")),
        at(Some(5), running, 1, Arc::new([])),
        at(Some(6), running, 70, stack("Other#work")),
        at(Some(0), running, 70, stack("Other#work")),
        at(None, running, 70, stack("Other#work")),
    ];
    let slow = request(5, 1000, 600, (0, 0));
    let seen: Vec<Seen<'_>> = samples.iter().map(Seen::Stack).chain([Seen::Request(&slow)]).collect();
    let expected = "\
600.0ms  GET /reports/:id 200
  web (pid 4242, thread 7); waited 2.00ms for a thread; first byte after 599.0ms
  on a CPU: 6 samples of 44.00ms
    30.00ms (5.0 %) in
              Report#rows models/report.rb:12
    10.00ms (1.7 %) in
              Csv\\u{1b}#parse models/report.rb:12
    2.00ms (0.3 %) in
              Report#b models/report.rb:12
    and 2 other lines
  off the CPU: 1 sample of 400.0ms
    400.0ms (66.7 %) in
              Report#query models/report.rb:12
  GC: none in this thread; none in others
1 of 1 request took 500.0ms or longer";
    assert_eq!(text(&web(false), 500, &seen), expected);
}

/// A part of a request's samples is not shown as its time.
#[test]
fn too_many_samples() {
    let one = |request| StackSample {
        ts_ns: 1_100 * MS,
        tid: 7,
        comm: Arc::from("puma srv tp 002"),
        state: ThreadState::Running,
        cpu_ns: MS,
        wall_ns: MS,
        gc: GcActivity::None,
        request: Some(request),
        span: None,
        stack: stack("Report#rows"),
    };
    let (own, other) = (one(5), one(6));
    let slow = request(5, 1000, 600, (0, 0));
    let mut seen = vec![Seen::Stack(&own)];
    seen.extend(std::iter::repeat_n(Seen::Stack(&other), SAMPLES - 1));
    let shown = |seen: &[Seen<'_>]| text(&web(false), 500, &[seen, &[Seen::Request(&slow)]].concat());
    assert!(shown(&seen).contains("on a CPU: 1 sample of 1.00ms"));
    seen.push(Seen::Stack(&own));
    let text = shown(&seen);
    assert!(text.contains("samples: not shown: there were too many") && !text.contains("on a CPU"), "{text}");
}

/// Memory is bounded, and every slow request is reported once, with as much as fits a screen.
#[test]
fn bounded() {
    let mut out = Vec::new();
    let mut slow = SlowRequests::new(&mut out, WallClock::measure(), 1);
    let web = web(true);
    for id in 0..PENDING as u64 + 9 {
        slow.see(&web, Seen::Request(&request(id, 1, 9_000, (0, 0)))).unwrap();
    }
    assert_eq!(slow.pending.len(), PENDING);
    for at in 0..KEPT as u64 + 9 {
        slow.see(&web, Seen::Cycle(&cycle(at, None, at, &[]))).unwrap();
        slow.see(&web, Seen::GvlWait(&wait(7, at, 1, false))).unwrap();
    }
    assert_eq!((slow.cycles.last.len(), slow.waits.last.len()), (KEPT, KEPT));
    slow.finish(&Ledger::default()).unwrap();
    drop(slow);
    let text = String::from_utf8(out).unwrap();
    assert_eq!(text.matches("GET /reports/:id").count(), PENDING + 9);
    assert_eq!(text.matches("older waits were dropped: too many").count(), PENDING);
    assert!(text.contains(&format!("    and {} shorter\n", KEPT - SHOWN)));
}

/// Runs of programs are listed like requests, with the GC of all their threads, and are counted separately from requests.
#[test]
fn runs() {
    let of_program = process(4711, "import.rb");
    let run = |id, ms, gc| Request {
        method: None,
        path: Some("import.rb".to_owned()),
        status: None,
        queue_ns: None,
        first_byte_ns: None,
        gc_other: None,
        is_run: true,
        ..request(id, 1000, ms, gc)
    };
    let slow = run(1, 1200, (5, 60));
    let unknown = Request { gcs: None, gc_ns: None, gc_pauses: None, ..run(2, 600, (0, 0)) };
    let (idle, quick) = (run(3, 700, (0, 0)), run(4, 100, (1, 1)));
    // Its cycles and waits belong to no request.
    let (cycle, wait) = (cycle(810, None, 1100, &[(7, 1100, 40)]), wait(7, 1400, 30, true));
    let seen = [
        Seen::Cycle(&cycle),
        Seen::GvlWait(&wait),
        Seen::Request(&slow),
        Seen::Request(&unknown),
        Seen::Request(&idle),
        Seen::Request(&quick),
    ];
    let expected = "\
1.20s  import.rb
  import.rb (pid 4711), the run of a program
  GC: 60.00ms (5.0 %) in pauses; 5 cycles
600.0ms  import.rb
  import.rb (pid 4711), the run of a program
  GC: unknown
700.0ms  import.rb
  import.rb (pid 4711), the run of a program
  GC: none
0 of 0 requests, and 3 of 4 programs that ran and ended, took 500.0ms or longer";
    assert_eq!(text(&of_program, 500, &seen), expected);
    let of_server = request(5, 1000, 600, (0, 0));
    let both = text(&of_program, 500, &[Seen::Request(&of_server), Seen::Request(&quick)]);
    let last = both.lines().last();
    assert_eq!(last, Some("1 of 1 request, and 0 of 1 program that ran and ended, took 500.0ms or longer"));
}
