//! Callgrind's format: sums, names, and what `callgrind_annotate` mishandles.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// A line of costs, or of a call.
struct Row {
    /// Object, file and name of the function.
    function: [String; 3],
    /// Object, file and name of the callee.
    callee: Option<[String; 3]>,
    line: u32,
    costs: Vec<u64>,
}

/// Reads a file according to the specification: a name may be written as `(number) name` once, and as `(number)` afterwards.
fn rows(text: &str) -> (Vec<u64>, Vec<Row>) {
    let mut known: BTreeMap<(&str, u32), String> = BTreeMap::new();
    let (mut function, mut callee, mut is_call) = <([String; 3], [String; 3], bool)>::default();
    let (mut summary, mut rows) = (Vec::new(), Vec::new());
    let numbers = |text: &str| text.split(' ').map(|number| number.parse().unwrap()).collect::<Vec<u64>>();
    for line in text.lines().skip(6) {
        if let Some(sums) = line.strip_prefix("summary: ") {
            summary = numbers(sums);
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if let Some((key, value)) = line.split_once('=') {
            let (number, name) = value.strip_prefix('(').unwrap().split_once(')').unwrap();
            let (own, at) = (key.trim_start_matches('c'), ["ob", "fl", "fn"]);
            let at = at.iter().position(|kind| *kind == own).unwrap();
            let entry = (["ob", "fl", "fn"][at], number.parse().unwrap());
            if let Some(name) = name.strip_prefix(' ') {
                assert!(known.insert(entry, name.to_owned()).is_none(), "twice: {line}");
            }
            (if key == own { &mut function } else { &mut callee })[at].clone_from(&known[&entry]);
        } else if !line.is_empty() {
            let (line, costs) = line.split_once(' ').unwrap();
            let callee = std::mem::take(&mut is_call).then(|| callee.clone());
            let line = line.parse().unwrap();
            rows.push(Row { function: function.clone(), callee, line, costs: numbers(costs) });
        }
    }
    (summary, rows)
}

pub(super) fn check_callgrind(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, _) = written(recorder, Format::Callgrind, "callgrind.out.x");
    let (summary, rows) = rows(std::str::from_utf8(&bytes).unwrap());
    let mut own = vec![0; 5];
    let mut lines = BTreeSet::new();
    for row in rows.iter().filter(|row| row.callee.is_none()) {
        assert!(lines.insert((&row.function, row.line)));
        own.iter_mut().zip(&row.costs).for_each(|(sum, cost)| *sum += cost);
    }
    assert_eq!(own, summary);
    assert_eq!(
        (summary[1], summary[0]),
        (sum(inputs, |input| input.wall_ns), sum(inputs, |input| input.cpu_ns))
    );
    // `callgrind_annotate` warns if a file has calls, but no line with self costs.
    for row in rows.iter().filter(|row| row.callee.is_some()) {
        assert!(lines.contains(&(&row.function, row.line)));
    }
}

/// Libraries are objects: whatever is named as a source file would be opened as one. Functions with the same name in
/// two libraries are distinct.
#[test]
fn libraries_are_no_source_files() {
    let frame = |kind, name: &str, file: Option<&str>, line| {
        let (name, file) = (Arc::from(name), file.map(Arc::from));
        Arc::new(Frame { kind, name, file, line, first_line: 0, address: 0 })
    };
    let (process, mut sample) = a_sample(10_000);
    sample.stack = Arc::new([
        frame(FrameKind::Kernel, "do_syscall_64", None, 0),
        frame(FrameKind::Native, "main", Some("/usr/lib/libb.so"), 0),
        frame(FrameKind::Native, "main", Some("/usr/lib/liba.so"), 0),
        frame(FrameKind::Ruby, "Foo#bar", Some("/srv/foo.rb"), 7),
    ]);
    let mut recorder = recorded(&[], Limits::default());
    recorder.see(&process, Seen::Stack(&sample)).unwrap();
    let (bytes, _) = written(&recorder, Format::Callgrind, "callgrind.out.x");
    let (_, rows) = rows(std::str::from_utf8(&bytes).unwrap());
    let functions: BTreeSet<[&str; 3]> =
        rows.iter().map(|row| row.function.each_ref().map(String::as_str)).collect();
    let expected = [
        ["???", "???", "block in <main>"],
        ["/usr/lib/liba.so", "???", "main"],
        ["/usr/lib/libb.so", "???", "main"],
        ["kernel", "???", "do_syscall_64"],
        ["ruby", "/srv/foo.rb", "Foo#bar"],
    ];
    let shown = functions.iter().map(|[object, file, name]| {
        // A process is shown with its pid.
        [*object, *file, name.trim_end_matches(" (pid 1)")]
    });
    assert_eq!(shown.collect::<BTreeSet<_>>(), BTreeSet::from(expected));
    let called: Vec<_> = rows.iter().filter_map(|row| row.callee.as_ref()).map(|callee| &callee[0]).collect();
    assert_eq!(called.len(), 4);
    assert!(called.iter().any(|object| *object == "/usr/lib/libb.so"));
}
