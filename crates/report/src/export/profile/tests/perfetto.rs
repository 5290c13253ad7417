//! A Perfetto trace: its processes and threads.

use super::*;
use crate::export::profile::perfetto;

/// A Perfetto trace describes processes with their arguments and threads, the main one first. A pause is on the thread
/// that was stopped, which need not be the one that started the cycle.
#[test]
fn perfetto_has_threads() {
    let mut recorder = recorded(&[], Limits::default());
    let mut process = process(2);
    process.cmdline = Some(vec!["ruby".to_owned(), "app.rb".to_owned()]);
    for (tid, name) in [(9, "b"), (2, "main"), (8, "a")] {
        let sample = StackSample { tid, comm: Arc::from(name), ..a_sample(5).1 };
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
    }
    let pause =
        |tid, begin_ns| Pause { tid, begin_ns, ns: 10, kind: None, mark_ns: 10, sweep_ns: 0, other_ns: 0 };
    let cycle = GcCycle {
        span: None,
        comm: "b".to_owned(),
        count: 7,
        start: state(100, 9, 1),
        end: Some(state(300, 9, 1)),
        pauses: vec![pause(9, 100), pause(2, 200), pause(8, 250)],
        trigger: None,
        request: None,
        lost: 0,
    };
    recorder.see(&process, Seen::Cycle(&cycle)).unwrap();
    let (bytes, _) = written(&recorder, Format::Perfetto, "x");
    let (process, threads) = perfetto::tests::described(&bytes);
    assert_eq!(process, [(2, vec!["ruby".to_owned(), "app.rb".to_owned()])]);
    let thread = |tid, name: &str, begins: u64| (2, tid, name.to_owned(), vec![begins]);
    assert_eq!(threads, [thread(2, "main", 200), thread(8, "a", 250), thread(9, "b", 100)]);
}
