//! Filters: everything is either kept or dropped, and every format has what is kept.

use super::*;
use crate::{aggregate::recording::Amount, ledger::UserCounts};

fn named(kind: FrameKind, name: &str, file: &str) -> Arc<Frame> {
    let file = Some(Arc::from(file));
    Arc::new(Frame { kind, name: Arc::from(name), file, line: 2, first_line: 1, address: 0 })
}

fn pattern(text: &str) -> Vec<crate::aggregate::recording::Pattern> {
    vec![text.parse().unwrap()]
}

/// Three stacks of an application with a gem, leaf first: in `Order#total`, in a gem, and outside of the application.
fn stacks() -> [Vec<Arc<Frame>>; 3] {
    let main = named(FrameKind::Ruby, "<main>", "/srv/shop/app.rb");
    let call =
        named(FrameKind::Ruby, "Rack::Builder#call", "/var/lib/gems/3.1.0/gems/rack-2.2.7/lib/rack.rb");
    let total = named(FrameKind::Ruby, "Order#total", "/srv/shop/app/models/order.rb");
    let each = named(FrameKind::CFunction, "Array#each", "/srv/shop/app/models/order.rb");
    let set = named(FrameKind::Ruby, "Set#add", "/usr/lib/ruby/3.1.0/set.rb");
    let gc = named(FrameKind::Vm, "(garbage collection)", "");
    let write = named(FrameKind::Kernel, "ksys_write", "");
    [
        vec![gc, each, total, Arc::clone(&call), Arc::clone(&main)],
        vec![write, set.clone(), call.clone(), main],
        vec![set, call],
    ]
}

fn filtered(filter: Filter) -> Recorder {
    let recording = Recording::new(true, Limits::default(), filter);
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(recording)) };
    recorder.began(0);
    let (process, sample) = a_sample(5_000);
    recorder.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
    for (at, stack) in stacks().into_iter().enumerate() {
        let ns = 10_u64.pow(at as u32 + 2);
        let comm = Arc::from(if at == 2 { "worker 1" } else { "puma srv 1" });
        let stack: Arc<[_]> = stack.into();
        let sample = StackSample {
            tid: at as u32 / 2 + 7,
            comm,
            cpu_ns: ns,
            wall_ns: ns,
            stack: stack.clone(),
            ..sample.clone()
        };
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
        let pause = Pause { tid: 7, begin_ns: 6_000, ns, kind: None, mark_ns: ns, sweep_ns: 0, other_ns: 0 };
        let cycle = GcCycle {
            span: None,
            comm: sample.comm.to_string(),
            count: 1,
            start: state(6_000, sample.tid, 1 << 20),
            end: None,
            pauses: vec![pause],
            // The trigger of the last one is unknown.
            trigger: (at < 2).then_some(stack),
            request: None,
            lost: 0,
        };
        recorder.see(&process, Seen::Cycle(&cycle)).unwrap();
    }
    recorder
}

/// Times of collapsed stacks, with this measure.
fn lines(recorder: &Recorder, of: Measure) -> Vec<String> {
    let graph = Graph { grouping: Grouping::None, of, ..Graph::default() };
    let text = String::from_utf8(written(recorder, Format::Folded(graph), "x").0).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn total(lines: &[String]) -> u64 {
    lines.iter().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

/// The table of lines.
fn table(recorder: &Recorder, of: Measure) -> String {
    String::from_utf8(written(recorder, Format::TopLines(of), "x").0).unwrap()
}

/// The sum of the self times in a table, nanoseconds, which is also in its heading.
fn own_sum(table: &str) -> u64 {
    let ns = |ms: &str| ms.replace('.', "").parse::<u64>().unwrap();
    let (head, rows) = table.split_once('\n').unwrap();
    let sum = rows.lines().skip(1).map(|row| ns(row.split_whitespace().nth(2).unwrap())).sum();
    assert_eq!(ns(head.split(' ').nth_back(1).unwrap()), sum, "{table}");
    sum
}

/// The total of a line includes the C functions that it calls, the kernel below it, and the lines that it calls; filters apply.
#[test]
fn lines_of_code() {
    let rows = |filter, of| -> Vec<Vec<String>> {
        let table = table(&filtered(filter), of);
        let words = |row: &str| row.split_whitespace().map(str::to_owned).collect();
        table.lines().skip(2).map(words).collect()
    };
    let all = rows(Filter::default(), Measure::Cpu);
    let expected = [
        "99.1% 99.1% 0.011000 0.011000 /usr/lib/ruby/3.1.0/set.rb:2 Set#add",
        "0.9% 0.9% 0.000100 0.000100 (garbage collection)",
        "0.0% 100.0% 0.000000 0.011100 /var/lib/gems/3.1.0/gems/rack-2.2.7/lib/rack.rb:2 Rack::Builder#call",
        "0.0% 9.9% 0.000000 0.001100 /srv/shop/app.rb:2 <main>",
        "0.0% 0.9% 0.000000 0.000100 /srv/shop/app/models/order.rb:2 Order#total",
    ];
    assert_eq!(all.iter().map(|row| row.join(" ")).collect::<Vec<_>>(), expected);
    let app = rows(Filter { app_only: true, ..Filter::default() }, Measure::Cpu);
    assert_eq!(app[0].join(" "), "90.1% 90.1% 0.010000 0.010000 (outside of Ruby code)");
    let focus = rows(Filter { focus: pattern("Order#"), ..Filter::default() }, Measure::Gc);
    assert!(focus[0].join(" ").starts_with("100.0% 100.0% 0.000100 0.000100 "), "{focus:?}");
    let nothing = table(&filtered(Filter { focus: pattern("nowhere"), ..Filter::default() }), Measure::Cpu);
    assert!(
        nothing.starts_with("By line: CPU time, 0.000000 ms\n") && nothing.lines().count() == 2,
        "{nothing}"
    );
}

/// Everything is kept or dropped, for exactly one reason, and each format shows what is kept.
#[test]
fn kept_and_dropped() {
    let focus = |text| Filter { focus: pattern(text), ..Filter::default() };
    let thread = |text| Filter { threads: pattern(text), ..Filter::default() };
    for (filter, samples, pauses) in [
        (Filter::default(), [11_100, 0, 0], [11_100, 0, 0]),
        (focus("Order#"), [100, 0, 11_000], [100, 0, 11_000]),
        (focus("app/models/"), [100, 0, 11_000], [100, 0, 11_000]),
        (focus("/^Set#/"), [11_000, 0, 100], [1_000, 0, 10_100]),
        (focus("nowhere"), [0, 0, 11_100], [0, 0, 11_100]),
        (thread("puma"), [1_100, 10_000, 0], [1_100, 10_000, 0]),
        (thread("8"), [10_000, 1_100, 0], [10_000, 1_100, 0]),
        (Filter { threads: pattern("puma"), ..focus("Set#") }, [1_000, 10_000, 100], [1_000, 10_000, 100]),
        (
            Filter { app_only: true, hide: pattern("Order"), ..Filter::default() },
            [11_100, 0, 0],
            [11_100, 0, 0],
        ),
    ] {
        let recorder = filtered(filter.clone());
        let ns = |of: crate::aggregate::recording::Shares| [of.kept, of.thread, of.focus].map(|part| part.ns);
        let recording = recorder.recording.borrow();
        let account = recording.filtered();
        assert_eq!((ns(account.samples), ns(account.cycles)), (samples, pauses), "{filter:?}");
        assert_eq!(account.samples_seen, Amount { count: 3, ns: 11_100 });
        assert_eq!(recording.samples.values().map(|sum| sum.cpu_ns).sum::<u64>(), samples[0]);
        assert_eq!(recording.pauses.values().map(|sum| sum.ns).sum::<u64>(), pauses[0]);
        let timeline = recording.timeline.as_ref().unwrap();
        assert_eq!(timeline.samples.iter().map(|sample| sample.cpu_ns).sum::<u64>(), samples[0]);
        let ns = timeline.cycles.iter().flat_map(|cycle| &cycle.pauses).map(|pause| pause.ns).sum::<u64>();
        assert_eq!((ns, timeline.memory.len()), (pauses[0], 3));
        assert_eq!(total(&lines(&recorder, Measure::Cpu)), samples[0]);
        assert_eq!(total(&lines(&recorder, Measure::Gc)), pauses[0]);
        assert_eq!(
            [Measure::Cpu, Measure::Gc].map(|of| own_sum(&table(&recorder, of))),
            [samples[0], pauses[0]]
        );
        let mut counts = UserCounts::default();
        recorder.add_counts(&mut counts);
        let ledger = Ledger {
            kernel: Some(vec![0; gctrace_common::stats::Counter::ALL.len()]),
            user: counts,
            ..Ledger::default()
        };
        assert_eq!(ledger.imbalances(), Vec::<String>::new());
        assert_eq!(counts.profiles.profile_ns_recorded, samples[0]);
    }
}

/// The time of hidden frames goes to their caller; a stack with no frames left says so.
#[test]
fn hidden_frames() {
    let hidden = |filter| {
        let mut lines = lines(&filtered(filter), Measure::Cpu);
        lines.sort();
        lines
    };
    let app = hidden(Filter { app_only: true, ..Filter::default() });
    assert_eq!(
        app,
        [
            "(all frames hidden) 10000",
            "<main> (app.rb:1) 1000",
            "<main> (app.rb:1);Order#total (order.rb:1);(garbage collection) 100",
        ]
    );
    let rack = hidden(Filter { hide: pattern("gems/rack-"), ..Filter::default() });
    assert!(rack.contains(&"Set#add (set.rb:1) 10000".to_owned()), "{rack:?}");
    // The focus is matched before frames are hidden.
    let both = hidden(Filter { hide: pattern("Order"), focus: pattern("Order"), ..Filter::default() });
    assert_eq!(
        both,
        ["<main> (app.rb:1);Rack::Builder#call (rack.rb:1);Array#each;(garbage collection) 100"]
    );
}

/// Dropped data is reported in files and on the terminal, with the pattern escaped.
#[test]
fn said() {
    let filter =
        Filter { focus: pattern("Order\u{1b}[2J"), hide: pattern("x"), app_only: true, ..Filter::default() };
    let recorder = filtered(filter);
    let recording = recorder.recording.borrow();
    let text = recording.filtered().text(recording.filter()).unwrap();
    assert!(text.starts_with("dropped by --focus Order"), "{text}");
    assert!(text.contains(": 0.00 s of 0.00 s of samples, 0.00 s of 0.00 s of GC pauses; hidden by --hide x and --app-only: 0 frames"), "{text}");
    assert!(!text.contains('\u{1b}'));
    assert_eq!(recording.filtered().text(&Filter::default()), None);
    drop(recording);
    let svg = String::from_utf8(written(&recorder, Format::FlameGraph(Graph::default()), "x").0).unwrap();
    assert!(svg.contains("Filters may have dropped samples or events"), "{svg}");
    let recorder = filtered(Filter { focus: pattern("Set#"), ..Filter::default() });
    let svg = String::from_utf8(written(&recorder, Format::FlameGraph(Graph::default()), "x").0).unwrap();
    // In an XML comment, which must not contain two consecutive hyphens.
    let notes = svg.split_once("<!--NOTES: ").and_then(|(_, rest)| rest.split_once("-->")).unwrap().0;
    assert!(notes.contains("dropped by -\u{2011}focus Set#") && !notes.contains("--"), "{notes}");
}
