//! What is seen becomes rows and screens; no terminal is needed.

use std::{collections::BTreeMap, sync::Arc};

use ratatui::{Terminal, backend::TestBackend};

use super::{
    board::{Board, Sample},
    draw::{Shown, draw},
    once,
    rows::Group,
    view::View,
};
use crate::{
    model::{
        Container, GcCycle, GcState, Image, Origin, Pause, Process,
        gvl_so_far::GvlSoFar,
        seen::{Observer as _, Seen},
        stack::{Frame, FrameKind, GcActivity, StackSample, ThreadState},
    },
    ruby::{RubyVersion, fallback::Method, stat::GcInfo},
};

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
        gc_env: BTreeMap::new(),
        gc_env_refused: Vec::new(),
        origin: Arc::new(origin),
        image: Arc::new(image),
    }
}

fn frame(name: &str) -> Arc<Frame> {
    let file = Some(Arc::from("/srv/app.rb"));
    Frame { kind: FrameKind::Ruby, name: name.into(), file, line: 7, first_line: 5, address: 0 }.into()
}

/// A cycle with one pause of that length at that time.
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

/// Two processes of one service, one of them busy, and an idle one of another.
fn board() -> Board {
    let mut board = Board::default();
    let read =
        |cpu: u64| move |pid: u32| Sample { cpu_ns: Some(cpu * u64::from(pid == 7)), rss: Some(1 << 20) };
    for (pid, service) in [(7, "shop"), (8, "shop"), (9, "idle")] {
        board.see(&process(pid, service), Seen::Process { state: None, now_ns: 100 * S });
    }
    board.tick(104 * S, true, read(0));
    let shop = process(7, "shop");
    // 30 ms, 20 ms and 50 ms of stops, and 6000 objects in three seconds.
    for (at, pause, allocated) in [(101, 30, 0), (103, 20, 1000), (104, 50, 6000)] {
        board.see(&shop, Seen::Cycle(&cycle(at * S, pause * MS, allocated)));
    }
    let sample = StackSample {
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

/// The rate of allocation is that of the last five seconds, however close two cycles are; a count that falls begins anew.
#[test]
fn allocation_rate() {
    let shop = process(7, "shop");
    let mut board = Board::default();
    board.see(&shop, Seen::Process { state: None, now_ns: 100 * S });
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
}

/// Shares, rates and quantiles are what was put in; nothing is known of a process of which nothing was seen.
#[test]
fn values() {
    let board = board();
    let rows = board.rows(105 * S, Group::Process);
    let of = |pid| rows.iter().find(|row| row.pid == Some(pid)).unwrap();
    let busy = of(7);
    // 100 ms of the 5 s since it is traced.
    assert_eq!((busy.cpu, busy.gc), (Some(50.0), Some(2.0)));
    assert_eq!((busy.p99_ns, busy.max_ns), (Some(50 * MS), Some(50 * MS)));
    assert_eq!((busy.alloc, busy.live, busy.free), (Some(2000.0), Some(600), Some(400)));
    assert_eq!((busy.gvl, busy.cycles, busy.rss), (None, 3, Some(1 << 20)));
    assert_eq!(busy.spark.iter().sum::<u64>(), 100);
    let idle = of(9);
    assert_eq!(
        (idle.cpu, idle.gc, idle.max_ns, idle.alloc, idle.live),
        (Some(0.0), Some(0.0), None, None, None)
    );
    // Half a second after it was found nothing can be said of ten seconds.
    let mut fresh = Board::default();
    fresh.see(&process(1, "x"), Seen::Process { state: None, now_ns: 100 * S });
    assert_eq!(fresh.rows(100 * S + S / 2, Group::Process)[0].gc, None);
    // A minute later its pauses are forgotten.
    let later = board.rows(170 * S, Group::Process);
    assert_eq!((later[0].max_ns, later[0].gc, later[0].spark.iter().sum::<u64>()), (None, Some(0.0), 0));
    // A group has the pauses of all, and nothing where it is not known of one.
    let groups = board.rows(105 * S, Group::Service);
    let shop = groups.iter().find(|row| row.name == "shop").unwrap();
    assert_eq!((shop.processes, shop.cpu, shop.gc), (2, Some(50.0), Some(1.0)));
    assert_eq!((shop.max_ns, shop.alloc, shop.rss), (Some(50 * MS), None, Some(2 << 20)));
}

/// Waits for the GVL come as a sum since the beginning; a share is of what was added, and none where not all were seen.
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

/// What is kept does not grow with what is seen, and a process that has ended is gone.
#[test]
fn bounds() {
    let mut board = board();
    let shop = process(7, "shop");
    for at in 0..20_000 {
        board.see(&shop, Seen::Cycle(&cycle(105 * S + at * 1000, 1000, at)));
    }
    let detail = board.detail(7, 106 * S).unwrap();
    assert_eq!(detail.cycles.len(), 50);
    assert_eq!(detail.bars.iter().sum::<u64>(), 4096);
    for pid in 0..10_000 {
        board.see(&process(pid, "many"), Seen::Process { state: None, now_ns: 106 * S });
    }
    assert_eq!((board.len(), board.dropped), (4096, 10_000 - 4096));
    assert!(board.detail(99_999, 0).is_none());
}

fn screen(board: &Board, view: &View, size: (u16, u16)) -> String {
    let rows = view.arranged(board.rows(105 * S, view.group));
    let detail = view.detail.and_then(|pid| board.detail(pid, 105 * S));
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    let shown = Shown {
        rows: &rows,
        view,
        processes: board.len(),
        dropped: board.dropped,
        message: None,
        now_ns: 105 * S,
        detail: detail.as_ref(),
        threads: None,
        colour: false,
    };
    terminal.draw(|frame| draw(frame, &shown)).unwrap();
    terminal.backend().to_string()
}

/// Tables, a process, help and an empty host fit every size, down to a few cells, and nothing from outside reaches the terminal raw.
#[test]
fn screens() {
    let board = board();
    let table = screen(&board, &View::default(), (80, 24));
    for part in ["3 Ruby processes", "processes by CPU%", "ALLOC/s", "50.0", "2.0", "2.00k", "q quit"] {
        assert!(table.contains(part), "{part}:\n{table}");
    }
    assert!(!table.contains('\u{1b}'));
    let wide = screen(&board, &View::default(), (200, 50));
    assert!(wide.contains("PAUSES, LAST MINUTE") && wide.contains("shop"), "{wide}");
    let detail = screen(&board, &View { detail: Some(7), ..View::default() }, (80, 24));
    for part in ["pid 7", "Shop#index", "100 Shop", "newobj", "app.rb:7", "<100ms", "reading"] {
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

/// `--once`: a column never runs into the next one, and JSON has `null` for what is not known.
#[test]
fn tables() {
    let rows = View::default().arranged(board().rows(105 * S, Group::Process));
    let mut text = Vec::new();
    once::text(&mut text, &rows).unwrap();
    let text = String::from_utf8(text).unwrap();
    let words: Vec<usize> = text.lines().map(|line| line.split_whitespace().count()).collect();
    assert_eq!(words, [11; 4], "{text}");
    let mut json = Vec::new();
    once::jsonl(&mut json, &rows).unwrap();
    let json = String::from_utf8(json).unwrap();
    let first = json.lines().next().unwrap();
    assert!(first.contains("\"gc_percent\":2.0") && first.contains("\"gvl_wait_percent\":null"), "{first}");
}
