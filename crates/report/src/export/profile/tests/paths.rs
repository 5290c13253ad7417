//! Call paths: folded stacks and flame graphs.

use std::collections::HashSet;

use super::*;
use crate::ruby::fallback::METHODS;

pub(super) fn check_folded(recorder: &Recorder, inputs: &[Input]) {
    for grouping in [Grouping::Process, Grouping::Thread, Grouping::Endpoint, Grouping::None] {
        let graph = Graph { grouping, of: Measure::Wall, ..Graph::default() };
        let (bytes, _) = written(recorder, Format::Folded(graph), "x");
        let text = String::from_utf8(bytes).unwrap();
        let lines: Vec<(&str, u64)> = text
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(path, count)| (path, count.parse().unwrap()))
            .collect();
        assert_eq!(
            lines.iter().map(|line| line.1).sum::<u64>(),
            sum(inputs, Input::time_ns),
            "{grouping:?}\n{text}"
        );
        assert_eq!(lines.iter().map(|line| line.0).collect::<HashSet<_>>().len(), lines.len());
        assert!(lines.iter().all(|line| !line.0.is_empty()));
        // Process, thread and state are names, too, and so is the placeholder for a missing stack.
        let frames = inputs.iter().map(|input| (input.stack.len() * input.times).max(1));
        let depths = frames.max().unwrap() + 3;
        assert!(lines.iter().all(|line| line.0.split(';').count() <= depths));
    }
}

pub(super) fn check_flamegraph(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, _) =
        written(recorder, Format::FlameGraph(Graph { of: Measure::Wall, ..Graph::default() }), "x.svg");
    let text = String::from_utf8(bytes).unwrap();
    let mut reader = quick_xml::Reader::from_str(&text);
    let (mut total, mut scripts, mut depth) = (None, 0, 0_i32);
    loop {
        match reader.read_event().unwrap() {
            quick_xml::events::Event::Start(tag) => {
                depth += 1;
                scripts += i32::from(tag.name().as_ref() == b"script");
                for attribute in tag.attributes() {
                    let attribute = attribute.unwrap();
                    if attribute.key.as_ref() == b"total_samples" {
                        total = Some(String::from_utf8(attribute.value.to_vec()).unwrap());
                    }
                }
            }
            quick_xml::events::Event::End(_) => depth -= 1,
            quick_xml::events::Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!(depth, 0);
    let expected = sum(inputs, Input::time_ns);
    assert_eq!(scripts, i32::from(expected > 0), "a name became a script");
    assert_eq!(text.contains("<g id=\"legend\">"), expected > 0, "what the colours mean");
    assert_eq!(total, (expected > 0).then(|| expected.to_string()));
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\r' && c != '\t'));
}

/// Characters that hide, move or reverse text are escaped wherever the program chose the name: methods, files, threads
/// and processes. The rest of the name is unchanged.
#[test]
fn hidden_characters_are_escaped() {
    let hidden =
        ['\u{202a}', '\u{202e}', '\u{2066}', '\u{2069}', '\u{200f}', '\u{61c}', '\u{feff}', '\u{9b}', '\x1b'];
    let mut recorder = recorded(&[], Limits::default());
    for c in hidden {
        let (mut process, sample) = a_sample(5);
        process.comm = format!("puma{c}");
        let kinds = [FrameKind::Ruby, FrameKind::CFunction, FrameKind::Native, FrameKind::Kernel];
        let frames = kinds.map(|kind| {
            let (name, file) = (Arc::from(format!("Größe#{c}bar")), Some(Arc::from(format!("/srv/a{c}.rb"))));
            Arc::new(Frame { kind, name, file, line: 2, first_line: 1, address: 0 })
        });
        // Wide enough to be drawn with its name.
        let sample = StackSample {
            comm: Arc::from(format!("worker{c}")),
            cpu_ns: 1_000_000,
            stack: Arc::new(frames),
            ..sample
        };
        recorder.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
    }
    let graph = Graph { grouping: Grouping::Thread, of: Measure::Cpu, ..Graph::default() };
    for format in [Format::Folded(graph), Format::FlameGraph(graph)] {
        let text = String::from_utf8(written(&recorder, format, "x").0).unwrap();
        let raw = text.chars().find(|c| hidden.contains(c));
        assert_eq!(raw, None, "{format:?}");
        for c in hidden {
            let escaped = c.escape_unicode();
            for name in ["puma", "worker", "Größe#", "a"].map(|name| format!("{name}{escaped}")) {
                assert!(text.contains(&name), "{format:?}: no {name}");
            }
        }
    }
}

/// A method that runs in two of its lines is one row, or one row per line; comparisons have no lines at all.
#[test]
fn rows_of_lines() {
    let mut recorder = recorded(&[], Limits::default());
    let (process, sample) = a_sample(5);
    recorder.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
    for line in [14, 15] {
        let frame = |kind, name: &str| {
            let file = Some(Arc::from("/srv/app/order.rb"));
            Arc::new(Frame { kind, name: Arc::from(name), file, line, first_line: 12, address: 0 })
        };
        let stack: Arc<[_]> =
            Arc::new([frame(FrameKind::CFunction, "Array#map"), frame(FrameKind::Ruby, "Order#total")]);
        recorder.see(&process, Seen::Stack(&StackSample { cpu_ns: 1_000, stack, ..sample.clone() })).unwrap();
    }
    let text = |format| String::from_utf8(written(&recorder, format, "x").0).unwrap();
    let graph = |lines| Graph { grouping: Grouping::None, of: Measure::Cpu, lines, ..Graph::default() };
    assert_eq!(text(Format::Folded(graph(false))), "Order#total (order.rb:12);Array#map 2000\n");
    assert_eq!(
        text(Format::Folded(graph(true))),
        "Order#total (order.rb:14);Array#map 1000\nOrder#total (order.rb:15);Array#map 1000\n"
    );
    let picture = text(Format::FlameGraph(graph(true)));
    assert!(picture.contains("Order#total (order.rb:14)") && picture.contains("Order#total (order.rb:15)"));
    assert!(!picture.contains("order.rb:12"));
}

/// The totals of graphs of CPU time or GC pauses, and the rows below the stacks.
#[test]
fn measures() {
    let inputs: Vec<Input> = [
        (ThreadState::Running, vec![(5_000, 300, 20)]),
        (ThreadState::Blocked, vec![(1, 2, 3), (4, 0, 0)]),
        (ThreadState::Runnable, Vec::new()),
    ]
    .into_iter()
    .map(|(state, pauses)| Input {
        pid: 2,
        tid: 2,
        ts_ns: 9_000,
        state,
        cpu_ns: if state == ThreadState::Running { 700 } else { 0 },
        wall_ns: 1_100,
        stack: vec![(7, 1), (0, 2)],
        times: 1,
        pauses,
    })
    .collect();
    let recorder = recorded(&inputs, Limits::default());
    let lines = |of| {
        let graph = Graph { grouping: Grouping::None, of, ..Graph::default() };
        let (bytes, _) = written(&recorder, Format::Folded(graph), "x");
        String::from_utf8(bytes).unwrap()
    };
    let total = |of| -> u64 {
        lines(of).lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    };
    assert_eq!([Measure::Cpu, Measure::Wall, Measure::Gc].map(total), [700, 2_900, 5_330]);
    assert_eq!(lines(Measure::GvlWait), "");
    assert_eq!(lines(Measure::Cpu).lines().count(), 1);
    let marked = lines(Measure::Gc);
    assert!(marked.contains(";(garbage collection);(minor GC);(marking) 5005\n"), "{marked}");
    let empty =
        written(&recorder, Format::FlameGraph(Graph { of: Measure::GvlWait, ..Graph::default() }), "x").0;
    assert!(String::from_utf8(empty).unwrap().contains("No wait for the GVL"));
}

/// An empty graph of pauses says if a Ruby is recorded whose pauses would not be in it.
#[test]
fn pauses_of_rubies_without_event_sites() {
    for method in METHODS {
        let mut process = process(1);
        Arc::make_mut(&mut process.image).method = method;
        let mut recorder = recorded(&[], Limits::default());
        recorder.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
        for (of, unseen) in [(Measure::Gc, method != Method::Sites), (Measure::Cpu, false)] {
            let format = Format::FlameGraph(Graph { of, ..Graph::default() });
            let text = String::from_utf8(written(&recorder, format, "x.svg").0).unwrap();
            assert!(text.contains(of.nothing()), "{text}");
            assert_eq!(text.contains("without event sites"), unseen, "{method:?} {of:?}: {text}");
        }
    }
}
