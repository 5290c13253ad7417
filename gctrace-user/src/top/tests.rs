//! Events become rows and screens; no terminal is needed.

use std::{collections::BTreeMap, sync::Arc};

use gctrace_common::event::WorkPhase;
use ratatui::{Terminal, backend::TestBackend, layout::Rect};

use super::{
    board::{Board, Sample},
    draw::{Shown, draw},
    once, place,
    rows::{Column, Group, Row, Traced},
    view::{Panel, Spot, View},
};
use crate::{
    model::{
        Container, EndReason, GcCycle, GcState, GcWork, Image, Origin, Pause, Process,
        gvl_so_far::GvlSoFar,
        request::{GcTime, Request, RequestMemory},
        seen::{CyclesBefore, Observer as _, ProcessEnd, Seen},
        stack::{Frame, FrameKind, GcActivity, StackSample, ThreadState},
    },
    ruby::{RubyVersion, fallback::Method, stat::GcInfo},
};

mod room;
mod shown;

const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn process(pid: u32, service: &str) -> Process {
    let image = Image {
        index: 0,
        path: "/usr/lib/libruby.so".into(),
        version: RubyVersion::new(3, 1, 2),
        build_id: None,
        stat_keys: vec!["total_allocated_objects", "heap_live_slots", "heap_free_slots"],
        heap_keys: Vec::new(),
        method: Method::Sites,
        probes: 0,
        gvl: None,
        has_symbols: false,
    };
    let origin = Origin { service: service.to_owned(), ..Origin::default() };
    Process {
        pid,
        uid: None,
        ns_pid: None,
        ppid: None,
        comm: format!("app\u{1b}[2J{pid}"),
        cmdline: None,
        start_ts: None,
        hostname: None,
        container: Container::default(),
        gc_env: Some(BTreeMap::new()),
        gc_env_refused: Vec::new(),
        origin: Arc::new(origin),
        image: Arc::new(image),
    }
}

fn frame(name: &str) -> Arc<Frame> {
    let file = Some(Arc::from("/srv/app.rb"));
    Frame { kind: FrameKind::Ruby, name: name.into(), file, line: 7, first_line: 5, address: 0 }.into()
}

/// A cycle with one pause of this length at this time.
fn cycle(ts_ns: u64, pause_ns: u64, allocated: u64) -> GcCycle {
    let info = GcInfo {
        major_by: None,
        need_major_by: None,
        gc_by: Some("newobj"),
        have_finalizer: false,
        immediate_sweep: false,
        state: "none",
        weak_references: None,
    };
    let state =
        GcState { ts_ns, tid: 1, stat: vec![allocated, 600, 400], heaps: Vec::new(), info, memory: None };
    let pause = Pause {
        tid: 1,
        begin_ns: ts_ns,
        ns: pause_ns,
        kind: None,
        mark_ns: 0,
        sweep_ns: 0,
        other_ns: pause_ns,
    };
    let trigger = Some(Arc::from([frame("Shop#render")]));
    GcCycle {
        span: None,
        comm: "ruby".to_owned(),
        request: None,
        count: 3,
        end: Some(state.clone()),
        start: state,
        pauses: vec![pause],
        trigger,
        lost: 0,
    }
}

/// Two processes of one service, one of them busy, and an idle process of another service.
fn board() -> Board {
    let mut board = Board::default();
    let read =
        |cpu: u64| move |pid: u32| Sample { cpu_ns: Some(cpu * u64::from(pid == 7)), rss: Some(1 << 20) };
    for (pid, service) in [(7, "shop"), (8, "shop"), (9, "idle")] {
        board.see(&process(pid, service), Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    }
    board.tick(104 * S, true, read(0));
    let shop = process(7, "shop");
    // 30 ms, 20 ms and 50 ms of pauses, and 6000 objects in three seconds.
    for (at, pause, allocated) in [(101, 30, 0), (103, 20, 1000), (104, 50, 6000)] {
        board.see(&shop, Seen::Cycle(&cycle(at * S, pause * MS, allocated)));
    }
    let sample = StackSample {
        span: None,
        ts_ns: 104 * S,
        tid: 1,
        comm: Arc::from("ruby"),
        state: ThreadState::Running,
        cpu_ns: 10 * MS,
        wall_ns: 0,
        gc: GcActivity::None,
        request: None,
        stack: Arc::from([frame("Shop#index"), frame("<main>")]),
    };
    board.see(&shop, Seen::Stack(&sample));
    board.tick(105 * S, true, read(S / 2));
    board
}

/// The allocation rate covers the last five seconds, however close two cycles are; when the count falls, it starts anew.
#[test]
fn allocation_rate() {
    let shop = process(7, "shop");
    let mut board = Board::default();
    board.see(&shop, Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    let mut rate = |ts_ns: u64, allocated: u64| {
        board.see(&shop, Seen::Cycle(&cycle(ts_ns, MS, allocated)));
        let rows = board.rows(ts_ns, Group::Process);
        rows.iter().find(|row| row.pid == Some(7)).unwrap().alloc
    };
    assert_eq!(rate(100 * S, 1_000), None);
    assert_eq!(rate(101 * S, 3_000), Some(2_000.0));
    // Nothing was allocated in the millisecond since.
    assert_eq!(rate(101 * S + MS, 3_000), Some(2_000_000.0 / 1_001.0));
    for n in 0..10_000 {
        rate(102 * S + n * MS, 4_000 + n);
    }
    assert_eq!(rate(112 * S, 14_000), Some(1_000.0));
    assert_eq!(rate(130 * S, 14_000 + 18_000), Some(1_000.0));
    assert_eq!(rate(131 * S, 10), None);
    assert_eq!(rate(132 * S, 20), Some(10.0));
    // There is no cycle that would show that it no longer allocates.
    let at = |now_ns: u64| board.rows(now_ns, Group::Process)[0].alloc;
    assert_eq!((at(137 * S), at(137 * S + 1)), (Some(10.0), None));
}

/// Shares, rates and quantiles match the events; nothing is known of a process without events.
#[test]
fn values() {
    let board = board();
    let rows = board.rows(105 * S, Group::Process);
    let of = |pid| rows.iter().find(|row| row.pid == Some(pid)).unwrap();
    let busy = of(7);
    // 100 ms of the 5 s for which it has been traced.
    assert_eq!((busy.cpu, busy.gc), (Some(50.0), Some(2.0)));
    assert_eq!((busy.p99_ns, busy.max_ns), (Some(50 * MS), Some(50 * MS)));
    assert_eq!((busy.alloc, busy.live, busy.free), (Some(2000.0), Some(600), Some(400)));
    assert_eq!((busy.gvl, busy.cycles, busy.rss), (None, Some(3), Some(1 << 20)));
    assert_eq!(busy.spark.iter().sum::<u64>(), 100_000);
    let idle = of(9);
    assert_eq!(
        (idle.cpu, idle.gc, idle.max_ns, idle.alloc, idle.live),
        (Some(0.0), Some(0.0), None, None, None)
    );
    // Half a second after it was found, no share over ten seconds is known.
    let mut fresh = Board::default();
    fresh.see(&process(1, "x"), Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    assert_eq!(fresh.rows(100 * S + S / 2, Group::Process)[0].gc, None);
    // Neither is one over a second that was traced only partly.
    let mut late = Board::default();
    late.see(
        &process(1, "x"),
        Seen::Process { state: None, now_ns: 100 * S + 900 * MS, since_ns: 100 * S + 900 * MS },
    );
    for second in [100, 101] {
        late.see(&process(1, "x"), Seen::Cycle(&cycle(second * S + 400 * MS, 500 * MS, 0)));
    }
    let gc = |now_ns| late.rows(now_ns, Group::Process)[0].gc;
    assert_eq!([101 * S + 950 * MS, 102 * S + MS].map(gc), [None, Some(50.0)]);
    // A minute later its pauses have expired.
    let later = board.rows(170 * S, Group::Process);
    assert_eq!((later[0].max_ns, later[0].gc, later[0].spark.iter().sum::<u64>()), (None, Some(0.0), 0));
    // A group has the pauses of all its processes, and a value that is unknown for one of them is unknown.
    let groups = board.rows(105 * S, Group::Service);
    let shop = groups.iter().find(|row| row.name == "shop").unwrap();
    assert_eq!((shop.processes, shop.cpu, shop.gc), (2, Some(50.0), Some(1.0)));
    assert_eq!((shop.max_ns, shop.alloc, shop.rss), (Some(50 * MS), None, Some(2 << 20)));
}

/// Slots are those at the end of the last finished cycle, not those at the beginning of the cycle that runs when tracing ends.
#[test]
fn slots_at_the_end() {
    let shop = process(7, "shop");
    let mut board = Board::default();
    board.see(&shop, Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    let slots = |board: &Board| {
        let rows = board.rows(102 * S, Group::Process);
        let row = rows.iter().find(|row| row.pid == Some(7)).unwrap();
        (row.live, row.free)
    };
    let mut unfinished = cycle(101 * S, MS, 2_000);
    unfinished.end = None;
    unfinished.start.stat = vec![2_000, 1_000, 0];
    board.see(&shop, Seen::Cycle(&unfinished));
    assert_eq!(slots(&board), (None, None));
    board.see(&shop, Seen::Cycle(&cycle(101 * S, MS, 1_000)));
    board.see(&shop, Seen::Cycle(&unfinished));
    assert_eq!(slots(&board), (Some(600), Some(400)));
}

/// Pauses of a cycle that was swept for minutes count in the minute in which they become known, and do not overwrite newer times. GC work of a
/// Ruby whose cycles are not known counts, too.
#[test]
fn late_pauses() {
    let mut board = board();
    let shop = process(7, "shop");
    let mut late = GvlSoFar::default();
    late.wait_ns = S / 4;
    board.now(220 * S);
    board.see(&shop, Seen::GvlSoFar(&late));
    // It has the same entry as second 220.
    board.see(&shop, Seen::Cycle(&cycle(160 * S - 300 * MS, 300 * MS, 9000)));
    board.see(&shop, Seen::Cycle(&cycle(100 * S + 1, 200 * MS, 9000)));
    let row = board.rows(222 * S, Group::Process).into_iter().find(|row| row.pid == Some(7)).unwrap();
    assert_eq!((row.max_ns, row.gc, row.gvl), (Some(300 * MS), Some(0.0), Some(2.5)));
    assert_eq!(board.detail(7, 222 * S).unwrap().bars.unwrap().iter().sum::<u64>(), 2);
    let work = |phase, begin_ns| GcWork { phase, tid: 1, comm: "ruby".to_owned(), begin_ns, ns: 100 * MS };
    for phase in [WorkPhase::Pause, WorkPhase::Continue] {
        board.see(&shop, Seen::Work(&work(phase, 220 * S)));
    }
    let row = board.rows(222 * S, Group::Process).into_iter().find(|row| row.pid == Some(7)).unwrap();
    assert_eq!(row.gc, Some(1.0));
}

/// A long pause counts in part in each second that it lasts, and no second has more than a second of pauses.
#[test]
fn long_pauses() {
    let mut board = board();
    let shop = process(7, "shop");
    board.now(220 * S);
    board.see(&shop, Seen::Cycle(&cycle(207 * S + 500 * MS, 5 * S, 9000)));
    let gc = |board: &Board, now| {
        board.rows(now, Group::Process).into_iter().find(|row| row.pid == Some(7)).unwrap().gc
    };
    assert_eq!(gc(&board, 220 * S), Some(25.0), "2.5 of the 10 s before");
    board.see(&shop, Seen::Cycle(&cycle(213 * S, 7 * S, 9000)));
    assert_eq!(gc(&board, 220 * S), Some(95.0));
    assert_eq!(gc(&board, 221 * S), Some(85.0), "the second 210 is not in it any more");
}

/// Waits for the GVL arrive as a sum since the beginning; a share covers the increase, and is unknown if some waits were not seen.
#[test]
fn gvl() {
    let mut board = board();
    let shop = process(7, "shop");
    let mut so_far = GvlSoFar::default();
    for at in 101..105 {
        board.now(at * S);
        so_far.wait_ns += S / 4;
        board.see(&shop, Seen::GvlSoFar(&so_far));
    }
    let share = |board: &Board| board.rows(105 * S, Group::Process)[0].gvl;
    // One second of the five.
    assert_eq!(share(&board), Some(20.0));
    board.tick(105 * S, false, |_| Sample::default());
    assert_eq!(share(&board), None);
}

/// What is kept of a process is bounded, however many events it has; so is the number of processes, and one that has ended makes room.
#[test]
fn bounds() {
    let mut board = board();
    let shop = process(7, "shop");
    for at in 0..20_000 {
        board.see(&shop, Seen::Cycle(&cycle(105 * S + at * 1000, 1000, at)));
    }
    let detail = board.detail(7, 106 * S).unwrap();
    assert_eq!(detail.cycles.len(), 50);
    // Each of them is counted, in addition to the three before, however few are kept.
    assert_eq!(detail.bars.unwrap().iter().sum::<u64>(), 20_003);
    let mut sample = StackSample {
        span: None,
        ts_ns: 105 * S,
        tid: 1,
        comm: Arc::from("ruby"),
        state: ThreadState::Running,
        cpu_ns: MS,
        wall_ns: 0,
        gc: GcActivity::None,
        request: None,
        stack: Arc::from([]),
    };
    for second in 0..200 {
        // Each is a method of its own.
        for n in 0..200 {
            sample.stack = Arc::from([frame(&format!("Shop#m{second}_{n}"))]);
            board.see(&shop, Seen::Stack(&sample));
        }
        board.tick((106 + second) * S, true, |_| Sample { cpu_ns: Some(second * S), rss: None });
        let detail = board.detail(7, (106 + second) * S).unwrap();
        assert!((200..=2048).contains(&detail.methods.len()), "{} methods", detail.methods.len());
        assert!(detail.cpu_history.len() <= 60, "{} shares of CPU time", detail.cpu_history.len());
    }
    for pid in 0..10_000 {
        board.see(&process(pid, "many"), Seen::Process { state: None, now_ns: 306 * S, since_ns: 306 * S });
    }
    assert_eq!((board.len(), board.not_shown()), (4096, 10_000 - 4096));
    assert!(board.detail(99_999, 0).is_none());

    let end = room::exited(306 * S);
    let rows = |board: &Board| {
        let processes: Vec<_> =
            board.rows(306 * S, Group::Process).iter().filter_map(|row| row.pid).collect();
        let of_service: Vec<_> =
            board.rows(306 * S, Group::Service).iter().map(|row| row.processes).collect();
        (processes.contains(&7), of_service)
    };
    assert!(board.detail(7, 306 * S).is_some());
    assert_eq!(rows(&board), (true, vec![4096]));
    board.see(&shop, Seen::Ended(&end));
    assert!(board.detail(7, 306 * S).is_none());
    assert_eq!((board.len(), rows(&board)), (4095, (false, vec![4095])));
    let newest = process(10_000, "many");
    board.see(&newest, Seen::Process { state: None, now_ns: 306 * S, since_ns: 306 * S });
    assert_eq!((board.len(), board.not_shown()), (4096, 10_000 - 4096));
    assert!(board.detail(10_000, 306 * S).is_some());
    // Processes that are not shown: one ends, and one has a cycle when there is room.
    let mut waiting: Vec<u32> =
        (0..10_000).filter(|pid| *pid != 7 && board.detail(*pid, 0).is_none()).collect();
    let (first, second) = (waiting.remove(0), waiting.remove(0));
    board.see(&process(first, "many"), Seen::Ended(&end));
    board.see(&process(second, "many"), Seen::Cycle(&cycle(306 * S, MS, 5)));
    assert_eq!((board.len(), board.not_shown()), (4096, 10_000 - 4097), "there is no room yet");
    board.see(&newest, Seen::Ended(&end));
    board.see(&process(second, "many"), Seen::Cycle(&cycle(306 * S, MS, 6)));
    assert_eq!((board.len(), board.not_shown()), (4096, 10_000 - 4098));
    assert_eq!(board.detail(second, 306 * S).map(|detail| detail.cycles.len()), Some(1));
    board.see(&process(first, "many"), Seen::Cycle(&cycle(306 * S, MS, 7)));
    assert!(board.detail(first, 306 * S).is_none());
    // Events of a process that is gone, which may come late, do not bring it back.
    board.see(&shop, Seen::Cycle(&cycle(306 * S, MS, 1)));
    assert!(board.detail(7, 306 * S).is_none());
}

fn screen(board: &Board, view: &View, size: (u16, u16)) -> String {
    let rows = view.arranged(board.rows(105 * S, view.group));
    let detail = view.detail.and_then(|pid| board.detail(pid, 105 * S));
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    let shown = Shown {
        rows: &rows,
        view,
        processes: board.len(),
        dropped: board.not_shown(),
        message: None,
        now_ns: 105 * S,
        detail: detail.as_ref(),
        threads: None,
        colour: false,
    };
    terminal.draw(|frame| draw(frame, &shown)).unwrap();
    terminal.backend().to_string()
}

/// Tables, a process, help and an empty host fit every size, down to a few cells, and text from outside reaches the terminal only escaped.
#[test]
fn screens() {
    let board = board();
    let table = screen(&board, &View::default(), (80, 24));
    for part in ["3 Ruby processes", "processes by CPU%", "ALLOC/s", "50.0", "2.0", "2.00k", "q quit"] {
        assert!(table.contains(part), "{part}:\n{table}");
    }
    assert!(!table.contains('\u{1b}'));
    let wide = screen(&board, &View::default(), (200, 50));
    assert!(wide.contains("PAUSES, LAST 30 s") && wide.contains("shop"), "{wide}");
    let detail = screen(&board, &View { detail: Some(7), ..View::default() }, (80, 24));
    for part in ["pid 7", "Shop#index", "100 Shop", "newobj", "app.rb:7", "<100ms", "   more", "reading"] {
        assert!(detail.contains(part), "{part}:\n{detail}");
    }
    let gone = screen(&board, &View { detail: Some(77), ..View::default() }, (80, 24));
    assert!(gone.contains("has ended"), "{gone}");
    let help = screen(&board, &View { help: true, ..View::default() }, (80, 24));
    assert!(help.contains("reverse the order") && help.contains("GCs of the last 5 s"), "{help}");
    let nothing = screen(&Board::default(), &View::default(), (80, 24));
    assert!(nothing.contains("No selected Ruby process runs"), "{nothing}");
    let filtered = screen(&board, &View { filter: "zzz".into(), ..View::default() }, (80, 24));
    assert!(filtered.contains("No row matches") && filtered.contains("filter: zzz"), "{filtered}");
    // The sort order is shown if there is room for it.
    let narrow = screen(&board, &View { filter: "app".into(), ..View::default() }, (45, 24));
    let title = narrow.lines().next().unwrap().trim_end();
    assert!(
        title.ends_with("3 Ruby processes  filter: app   \"")
            && narrow.contains("CPU%▾")
            && narrow.contains("PROGRAM"),
        "{narrow}"
    );
    for size in [(1, 1), (3, 2), (20, 5), (80, 3), (400, 100)] {
        for view in [
            View::default(),
            View { detail: Some(7), ..View::default() },
            View { help: true, ..View::default() },
        ] {
            let _any = screen(&board, &view, size);
        }
    }
}

/// `--once`: a column never runs into the next one, and JSON has `null` for unknown values.
#[test]
fn tables() {
    let rows = View::default().arranged(board().rows(105 * S, Group::Process));
    let mut text = Vec::new();
    once::text(&mut text, &rows).unwrap();
    let text = String::from_utf8(text).unwrap();
    let words: Vec<usize> = text.lines().map(|line| line.split_whitespace().count()).collect();
    assert_eq!(words, [13; 4], "{text}");
    let mut json = Vec::new();
    once::jsonl(&mut json, &rows, Traced::default()).unwrap();
    let json = String::from_utf8(json).unwrap();
    let first = json.lines().next().unwrap();
    assert!(first.contains("\"gc_percent\":2.0") && first.contains("\"gvl_wait_percent\":null"), "{first}");
}

/// A request of this length that ended at this time, with a tenth of it GC and half of it waiting for the GVL.
fn request(path: &str, end_ns: u64, ns: u64) -> Request {
    Request {
        trace: None,
        id: 1,
        tid: 1,
        begin_ns: end_ns - ns,
        end_ns: Some(end_ns),
        method: Some("GET"),
        path: Some(path.to_owned()),
        status: Some(200),
        queue_ns: None,
        first_byte_ns: None,
        last_byte_ns: None,
        response_bytes: None,
        gcs: Some(0),
        gc_ns: Some(ns / 10),
        gc_pauses: Some(1),
        gc_other: Some(GcTime::default()),
        gvl_wait_ns: Some(ns / 2),
        states: None,
        split: None,
        alloc: None,
        memory: RequestMemory::default(),
        job: None,
        is_run: false,
        handler: None,
        gc_states: None,
    }
}

/// Two processes serve one endpoint; one of them also serves another one.
fn serving() -> Board {
    let mut board = board();
    for (pid, path, count, ms) in [(7, "/orders", 40, 20), (7, "/slow", 4, 900), (8, "/orders", 20, 40)] {
        let process = process(pid, "shop");
        for n in 0..count {
            board.see(&process, Seen::Request(&request(path, 100 * S + n * S / 10, ms * MS)));
        }
    }
    board
}

/// Requests per second and their times, for a process, a service and an endpoint; if some were lost, none are given.
#[test]
fn requests() {
    let mut board = serving();
    let rows = board.rows(105 * S, Group::Process);
    let figures = |rows: &[Row], at: &str| {
        let row = rows.iter().find(|row| row.pid.is_some_and(|pid| pid.to_string() == at) || row.name == at);
        row.map(|row| (row.requests, row.request_p99_ns, row.requests_seen)).unwrap()
    };
    // In the four seconds that are over and complete: 40 and 4, 20, none at all.
    assert_eq!(figures(&rows, "7"), (Some(11.0), Some(900 * MS), 44));
    assert_eq!(figures(&rows, "8"), (Some(5.0), Some(40 * MS), 20));
    assert_eq!(figures(&rows, "9"), (None, None, 0));
    let services = board.rows(105 * S, Group::Service);
    assert_eq!(figures(&services, "shop"), (Some(16.0), Some(900 * MS), 64));
    assert_eq!(figures(&services, "idle"), (None, None, 0));
    let endpoints = board.rows(105 * S, Group::Endpoint);
    assert_eq!(figures(&endpoints, "GET /orders"), (Some(15.0), Some(40 * MS), 60));
    let orders = endpoints.iter().find(|row| row.name == "GET /orders").unwrap();
    assert_eq!((orders.processes, &*orders.service, orders.cpu), (2, "shop", None));
    assert_eq!((orders.gc, orders.gvl), (Some(10.0), Some(50.0)));
    // A minute later there are no endpoints left.
    assert!(board.rows(170 * S, Group::Endpoint).is_empty());
    board.requests_lost(3, 106 * S);
    board.requests_lost(3, 130 * S);
    let of = |board: &Board, now_ns| figures(&board.rows(now_ns, Group::Process), "7");
    assert_eq!(of(&board, 107 * S), (None, None, 44));
    assert_eq!(of(&board, 125 * S), (Some(0.0), None, 44));
    // Seconds before tracing was complete do not count.
    let mut late = serving();
    late.began(103 * S);
    assert_eq!(of(&late, 106 * S), (Some(5.0), Some(900 * MS), 44));
}

/// Columns, the page by endpoint and the panels of a process depend on what is traced, in 80 columns, too.
#[test]
fn panels() {
    let board = serving();
    let traced = Traced { requests: true, gvl: true };
    let view = |panel, group| View { detail: Some(7), panel, group, traced, ..View::default() };
    let table = screen(&board, &View { traced, ..View::default() }, (80, 24));
    for part in ["REQ/s", "REQ99", "GVL%", "11.0", "900ms", "app"] {
        assert!(table.contains(part), "{part}:\n{table}");
    }
    let plain = screen(&board, &View::default(), (200, 50));
    assert!(!plain.contains("REQ/s"), "{plain}");
    let endpoints = View { detail: None, ..view(Panel::Threads, Group::Endpoint) };
    let endpoints = screen(&board, &endpoints, (80, 24));
    assert!(endpoints.contains("GET /orders") && endpoints.contains("15.0") && endpoints.contains("×2"));
    let small = screen(&board, &view(Panel::Requests, Group::Process), (80, 24));
    for part in
        ["REQUESTS, LAST MINUTE   (Tab: 2 more)", "GET /orders", "10.0", "50.0", "20.0ms", "REQ/s 11.0"]
    {
        assert!(small.contains(part), "{part}:\n{small}");
    }
    assert!(!small.contains("THREADS"), "{small}");
    let blocked = screen(&board, &view(Panel::Blocked, Group::Process), (80, 24));
    assert!(blocked.contains("FOR WHOM") && blocked.contains("nobody"), "{blocked}");
    let large = screen(&board, &view(Panel::Blocked, Group::Process), (200, 50));
    for part in ["THREADS", "GET /slow", "FOR WHOM"] {
        assert!(large.contains(part), "{part}:\n{large}");
    }
    assert!(!large.contains("Tab:"), "{large}");
    for size in [(1, 1), (3, 2), (20, 5), (80, 3), (80, 24), (400, 100)] {
        for panel in [Panel::Threads, Panel::Requests, Panel::Blocked] {
            let _any = screen(&board, &view(panel, Group::Process), size);
        }
    }
}

/// A click refers to what is drawn there: each heading, the visible rows, and the titles of panels.
#[test]
fn spots() {
    let mut board = serving();
    for pid in 100..160 {
        board.see(&process(pid, "many"), Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    }
    let traced = Traced { requests: true, gvl: true };
    for (width, cursor) in [(80, 0), (80, 40), (200, 62), (200, 9999)] {
        let view = View { cursor, traced, ..View::default() };
        let rows = view.arranged(board.rows(105 * S, view.group));
        let drawn = screen(&board, &view, (width, 24));
        let lines: Vec<Vec<char>> =
            drawn.lines().map(|line| line.trim_matches('"').chars().collect()).collect();
        let at = |x: usize, y: usize| {
            place::spot(Rect::new(0, 0, width, 24), &view, rows.len(), (x as u16, y as u16))
        };
        for column in Column::shown(80, view.group, traced, view.sort) {
            let heading: Vec<char> = column.heading().chars().collect();
            let is_word = |window: &[char]| window == heading.as_slice();
            let x = lines[1].windows(heading.len()).position(is_word).unwrap();
            for x in [x, x + heading.len() - 1] {
                assert_eq!(at(x, 1), Spot::Heading(column), "{drawn}");
            }
        }
        for (y, line) in lines.iter().enumerate().take(23).skip(2) {
            let Spot::Row(row) = at(20, y) else { panic!("{y} {drawn}") };
            let pid = rows[row].pid.unwrap().to_string();
            let line: String = line.iter().collect();
            assert!(line.split_whitespace().next() == Some(pid.as_str()), "{pid}: {line}");
        }
        assert_eq!((at(20, 0), at(20, 23)), (Spot::Other, Spot::Other));
    }
    let few = View { traced, ..View::default() };
    assert_eq!(place::spot(Rect::new(0, 0, 80, 24), &few, 3, (5, 10)), Spot::Other);
    let detail = View { detail: Some(7), ..few };
    let drawn = screen(&board, &detail, (80, 24));
    let title = drawn.lines().position(|line| line.contains("Tab:")).unwrap() as u16;
    let spot = |y| place::spot(Rect::new(0, 0, 80, 24), &detail, 3, (5, y));
    assert_eq!((spot(title), spot(title + 1)), (Spot::Panels, Spot::Other));
}
