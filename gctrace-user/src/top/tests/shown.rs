//! What screens show: columns, long names, scales and samples.

use super::*;

/// A wider screen has all columns of a narrower one, and the sort column: numbers come first, then texts, and the name always has room.
#[test]
fn widths() {
    for (requests, gvl) in [(false, false), (false, true), (true, false), (true, true)] {
        let traced = Traced { requests, gvl };
        for group in [Group::Process, Group::Service, Group::Container, Group::Endpoint] {
            let any = View { group, traced, ..View::default() };
            for sort in any.sortable() {
                let view = View { sort, ..any.clone() };
                let mut last = place::columns(40, &view);
                for width in 40..=250 {
                    let columns = place::columns(width, &view);
                    let shown = &columns.sortable;
                    assert!(
                        shown.contains(&sort) && shown.contains(&Column::Name),
                        "{width} {sort:?} {shown:?}"
                    );
                    assert!(last.sortable.iter().all(|column| shown.contains(column)), "{width} {shown:?}");
                    assert!(columns.texts >= last.texts, "{width}");
                    assert!(columns.texts == 0 || shown.len() == view.sortable().len(), "{width} {shown:?}");
                    // All columns have room, the name at least that of its heading with the mark.
                    let numbers = shown.iter().filter(|column| **column != Column::Name);
                    let texts = place::TEXTS[..columns.texts].iter().map(|(_, text)| text + 1);
                    let taken = numbers.map(|column| column.width()).sum::<u16>() + texts.sum::<u16>();
                    assert!(taken + columns.name == width && columns.name >= 9, "{width} {}", columns.name);
                    last = columns;
                }
                assert_eq!(last.texts, place::TEXTS.len(), "250 columns have room for everything");
            }
        }
    }
    let board = board();
    let by_memory = View { sort: Column::Rss, ..View::default() };
    let shown = screen(&board, &by_memory, (120, 24));
    for part in ["PID", "ALLOC/s", "RSS▾", "FREE", "PROGRAM", "SERVICE", "processes by RSS "] {
        assert!(shown.contains(part), "{part}:\n{shown}");
    }
    let reversed = screen(&board, &View { reversed: true, ..by_memory }, (120, 24));
    assert!(reversed.contains("RSS▴") && reversed.contains("processes by RSS, reversed"), "{reversed}");
}

/// Names of any length and kind stay in their column, and a cut name is marked; the page of a process keeps pid and version.
#[test]
fn long_names() {
    let mut board = Board::default();
    for (pid, name) in
        [(7, "evil\u{1b}[31m\nx-and-much-more"), (8, "日本語日本語日本語日本語日本語"), (9, "ok")]
    {
        let mut process = process(pid, name);
        process.container.name = Some(name.repeat(2));
        process.comm = name.to_owned();
        board.see(&process, Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    }
    for width in [80, 103, 120, 126, 160, 200] {
        let shown = screen(&board, &View::default(), (width, 24));
        let lines: Vec<&str> = shown.lines().map(|line| line.trim_matches('"')).collect();
        // A wide character takes two cells, of which the backend prints the first.
        let at = |line: &str, part: &str| {
            line.find(part).map(|at| ratatui::text::Line::from(line[..at].to_owned()).width())
        };
        assert!(lines[2..4].iter().all(|line| line.contains('…')), "{width}:\n{shown}");
        let places: Vec<_> = lines[2..5].iter().filter_map(|line| at(line, "3.1.2")).collect();
        let heading = at(lines[1], "RUBY");
        assert!(
            places.iter().all(|place| Some(*place) == heading),
            "{width}: {places:?} {heading:?}\n{shown}"
        );
    }
    let mut long = process(7, "shop");
    long.comm = "script-with-a-very-long-name".repeat(4);
    board.see(&long, Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    let detail = screen(&board, &View { detail: Some(7), ..View::default() }, (80, 24));
    let head =
        detail.lines().next().unwrap_or_default().to_owned() + detail.lines().nth(1).unwrap_or_default();
    assert!(head.contains("…  pid 7  Ruby 3.1.2  service shop"), "{detail}");
}

/// The last minute is drawn in parts of a percent and of a millisecond, with the value of the highest bar.
#[test]
fn scales() {
    let mut board = board();
    let shop = process(7, "shop");
    board.tick(106 * S, true, |_| Sample { cpu_ns: Some(S / 2 + 9_900_000), rss: None });
    assert_eq!(board.detail(7, 106 * S).unwrap().cpu_history, [5000, 99]);
    board.see(&shop, Seen::Cycle(&cycle(106 * S, MS / 2, 7000)));
    assert_eq!(board.detail(7, 106 * S).unwrap().row.spark.last(), Some(&500));
    let shown = screen(&board, &View { detail: Some(7), ..View::default() }, (80, 24));
    // Pauses of 30 ms, 20 ms and 50 ms; CPU time of half a second per second.
    for part in ["GC pauses, last 40 s (█ 50.0ms/s)", "CPU, last 39 s (█ 50.0%)", "█▁"] {
        assert!(shown.contains(part), "{part}:\n{shown}");
    }
    let wide = screen(&board, &View { detail: Some(9), ..View::default() }, (200, 24));
    assert!(wide.contains("GC pauses, last minute  ") && wide.contains("no CPU time was sampled"), "{wide}");
}

/// The heading of methods says how many samples and how much time their shares cover.
#[test]
fn samples() {
    let mut board = board();
    let head = |board: &Board, now_ns| {
        let (samples, ns) = board.detail(7, now_ns).unwrap().sampled;
        (samples, ns / S)
    };
    assert_eq!(head(&board, 106 * S), (1, 6), "since the process is traced");
    let shown = screen(&board, &View { detail: Some(7), ..View::default() }, (80, 24));
    assert!(shown.contains("  % OF 1 CPU SAMPLES, 5 s") && shown.contains(" 100 Shop#index"), "{shown}");
    // At most two generations: the current one, and the previous one.
    board.tick(115 * S, true, |_| Sample::default());
    assert_eq!(head(&board, 117 * S), (1, 13));
    board.tick(125 * S, true, |_| Sample::default());
    assert_eq!(head(&board, 127 * S), (0, 12));
}

/// What is not seen of a Ruby is unknown, not 0: its cycles without event sites, and its pauses unless a method times all of them.
#[test]
fn unseen() {
    let with = |method| {
        let mut board = board();
        let mut process = process(5, "shop");
        Arc::make_mut(&mut process.image).method = method;
        board.see(&process, Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
        let (row, shop) = (board.detail(5, 105 * S).unwrap().row, board.rows(105 * S, Group::Service));
        let shop = shop.into_iter().find(|row| row.name == "shop").unwrap();
        let shown = screen(&board, &View { detail: Some(5), ..View::default() }, (80, 24));
        (row.gc, row.cycles, shop.gc.is_some(), shop.cycles.is_some(), shown)
    };
    let (gc, cycles, .., shown) = with(Method::Sites);
    assert_eq!((gc, cycles), (Some(0.0), Some(0)));
    assert!(shown.contains("none since gctrace top started") && shown.contains("0 GCs seen"), "{shown}");
    let (gc, cycles, pauses_of_all, cycles_of_all, shown) = with(Method::UsdtPauses);
    assert_eq!((gc, cycles, pauses_of_all, cycles_of_all), (Some(0.0), None, true, false));
    assert!(shown.contains("- not seen of this Ruby") && shown.contains("- GCs seen"), "{shown}");
    for method in [Method::Functions, Method::Usdt] {
        let (gc, cycles, pauses_of_all, cycles_of_all, shown) = with(method);
        assert_eq!((gc, cycles, pauses_of_all, cycles_of_all), (None, None, false, false));
        assert!(shown.contains("GC% -") && shown.contains("      -      -      -"), "{shown}");
    }
}
