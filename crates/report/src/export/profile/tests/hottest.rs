//! The table of the hottest methods.

use super::*;
use crate::export::profile::hottest;

/// Self time is attributed to the innermost method, including native code below it; recursion counts once; waiting is not CPU time.
#[test]
fn hottest_methods() {
    let frame = |kind, name: &str| {
        let file = (kind == FrameKind::Ruby).then(|| Arc::from("/srv/app/models/order.rb"));
        Arc::new(Frame { kind, name: Arc::from(name), file, line: 5, first_line: 3, address: 0 })
    };
    let (fib, each) = (frame(FrameKind::Ruby, "Order.fib"), frame(FrameKind::CFunction, "Array#each"));
    let (native, gc) = (frame(FrameKind::Native, "memcpy"), frame(FrameKind::Vm, "(marking)"));
    let mut recorder = recorded(&[], Limits::default());
    for (stack, state, ms) in [
        (vec![fib.clone(), fib.clone(), each.clone()], ThreadState::Running, 60_u64),
        (vec![native.clone(), each.clone()], ThreadState::Running, 20),
        (vec![gc, fib.clone()], ThreadState::Running, 15),
        (vec![native], ThreadState::Running, 5),
        (vec![each], ThreadState::Blocked, 1_000),
    ] {
        let cpu_ns = if state == ThreadState::Running { ms * 1_000_000 } else { 0 };
        let sample = StackSample {
            span: None,
            ts_ns: ms,
            tid: 14,
            comm: Arc::from("worker"),
            state,
            cpu_ns,
            wall_ns: ms * 1_000_000,
            gc: GcActivity::None,
            request: None,
            stack: stack.into(),
        };
        recorder.see(&process(14), Seen::Stack(&sample)).unwrap();
    }
    let mut hottest = hottest::Hottest { recording: recorder.recording, out: Vec::new() };
    hottest.finish(&Ledger::default()).unwrap();
    let text = String::from_utf8(hottest.out).unwrap();
    let expected = "
Foo#bar (pid 14), Ruby 3.0.0: 0.10 s of CPU time in 4 samples
  SELF  TOTAL  METHOD
 60.0%  75.0%  Order.fib  models/order.rb:3
 20.0%  80.0%  Array#each
 15.0%  15.0%  (garbage collection)
  5.0%   5.0%  (outside of Ruby methods)
";
    assert_eq!(text, expected);
}

/// One of something is not several: in the table, and in the subtitle of a graph.
#[test]
fn one_of_something() {
    let mut recorder = recorded(&[], Limits::default());
    let (process, sample) = a_sample(5_000);
    recorder.see(&process, Seen::Stack(&sample)).unwrap();
    let waited = StackSample { state: ThreadState::Blocked, cpu_ns: 0, ..sample };
    recorder.see(&process, Seen::Stack(&waited)).unwrap();
    recorder.recording.borrow_mut().merged = 1;
    let graph = Graph { of: Measure::Wall, ..Graph::default() };
    let svg = String::from_utf8(written(&recorder, Format::FlameGraph(graph), "x.svg").0).unwrap();
    // Its texts without elements and line breaks.
    let words =
        svg.split('<').filter_map(|part| part.split_once('>')).flat_map(|(_, text)| text.split_whitespace());
    let svg = words.collect::<Vec<_>>().join(" ");
    let mut hottest = hottest::Hottest { recording: recorder.recording, out: Vec::new() };
    hottest.finish(&Ledger::default()).unwrap();
    let text = String::from_utf8(hottest.out).unwrap();
    assert!(text.contains("in 1 sample\n") && svg.contains("1 CPU sample"), "{text} {svg}");
    assert!(svg.contains("1 off-CPU interval") && svg.contains("1 sample without"), "{svg}");
    for wrong in ["1 samples", "1 CPU samples", "1 off-CPU intervals"] {
        assert!(!text.contains(wrong) && !svg.contains(wrong), "{wrong}: {text} {svg}");
    }
}
