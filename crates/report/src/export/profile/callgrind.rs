//! Callgrind's format, for `KCachegrind` and `callgrind_annotate`: functions with the lines that ran, and their
//! callers with the calling lines.
//!
//! <https://valgrind.org/docs/manual/cl-format.html>. The costs are those of the pprof file: CPU time, time on and off
//! the CPU, samples, and GC pauses under the stack that started their cycle.
//!
//! `callgrind_annotate` opens the files named by `fl=` and prints the lines that have costs. A library is therefore an object
//! (`ob=`), not a source file, and a line with a call has self costs, even if they are zero, as in the files of Callgrind itself.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{self, Write},
};

use super::{Context, label};
use crate::{
    aggregate::recording::{Recording, ThreadIndex},
    model::stack::{Frame, FrameKind},
};

/// Names of the costs. `callgrind_annotate` would warn about long names in the file.
const EVENTS: [&str; 5] = ["cpu_ns", "wall_ns", "samples", "gc_ns", "gc_pauses"];

type Costs = [u64; EVENTS.len()];

/// Callgrind's name for an unknown object or source file.
const UNKNOWN: &str = "???";
/// The objects of code that is not in a mapped file.
const RUBY: &str = "ruby";
const KERNEL: &str = "kernel";

/// A function.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Function {
    /// The library or program, or a placeholder.
    object: String,
    /// The source file.
    file: String,
    name: String,
}

#[derive(Default)]
struct Caller {
    /// Self costs by line.
    own: BTreeMap<u32, Costs>,
    /// By line, callee and first line of the callee: number of times seen, and the inclusive costs.
    calls: BTreeMap<(u32, u32, u32), (u64, Costs)>,
}

#[derive(Default)]
struct Graph {
    functions: Vec<Function>,
    index: HashMap<Function, u32>,
    callers: BTreeMap<u32, Caller>,
    total: Costs,
}

/// A function at a line, and its first line.
#[derive(Clone, Copy)]
struct CallLine {
    function: u32,
    line: u32,
    first_line: u32,
}

fn add(sum: &mut Costs, costs: &Costs) {
    sum.iter_mut().zip(costs).for_each(|(sum, cost)| *sum = sum.saturating_add(*cost));
}

/// Makes a name of a single line.
fn name(text: &str) -> String {
    label::text(text).replace(['\n', '\r'], " ")
}

impl Graph {
    fn function(&mut self, object: &str, file: &str, text: &str) -> u32 {
        let function = Function { object: name(object), file: name(file), name: name(text) };
        if let Some(index) = self.index.get(&function) {
            return *index;
        }
        self.functions.push(function.clone());
        let index = self.functions.len() as u32;
        self.index.insert(function, index);
        index
    }

    fn place(&mut self, frame: &Frame) -> CallLine {
        let file = frame.file.as_deref().unwrap_or(UNKNOWN);
        let (object, file) = match frame.kind {
            FrameKind::Ruby | FrameKind::CFunction | FrameKind::Vm => (RUBY, file),
            FrameKind::Native => (file, UNKNOWN),
            FrameKind::Kernel => (KERNEL, UNKNOWN),
            FrameKind::Missing => (UNKNOWN, UNKNOWN),
        };
        let function = self.function(object, file, &frame.name);
        CallLine { function, line: frame.line, first_line: frame.first_line }
    }

    /// Adds the costs of a path, root first. Recursive calls are not counted twice.
    fn add(&mut self, path: &[CallLine], seen: u64, costs: &Costs) {
        add(&mut self.total, costs);
        let Some(leaf) = path.last() else { return };
        add(self.callers.entry(leaf.function).or_default().own.entry(leaf.line).or_default(), costs);
        let mut counted = BTreeSet::new();
        for pair in path.windows(2) {
            let call = (pair[0].line, pair[1].function, pair[1].first_line);
            if counted.insert((pair[0].function, call)) {
                let caller = self.callers.entry(pair[0].function).or_default();
                caller.own.entry(pair[0].line).or_default();
                let (count, sum) = caller.calls.entry(call).or_default();
                *count = count.saturating_add(seen);
                add(sum, costs);
            }
        }
    }

    /// The process and the frames of a stack, root first.
    fn path(
        &mut self,
        recording: &Recording,
        thread: ThreadIndex,
        node: crate::aggregate::call_tree::NodeId,
    ) -> Vec<CallLine> {
        let frames: Vec<_> = recording.tree.path(node).map(|(_, frame)| frame).collect();
        let (_, process) = recording.thread_facts(thread);
        let root = self.function(UNKNOWN, UNKNOWN, &label::process(process));
        let mut path = vec![CallLine { function: root, line: 0, first_line: 0 }];
        path.extend(frames.into_iter().rev().map(|frame| self.place(recording.tree.frame(frame))));
        path
    }
}

/// Writes a recording.
pub(super) fn write(recording: &Recording, context: &Context<'_>, out: &mut dyn Write) -> io::Result<()> {
    let mut graph = Graph::default();
    let mut samples: Vec<_> = recording.samples.iter().collect();
    samples.sort_unstable_by_key(|(key, _)| **key);
    for (key, sum) in samples {
        let path = graph.path(recording, key.thread, key.node);
        // As in pprof: the CPU time of a thread is not wall time.
        let wall_ns = if context.wall { sum.wall_ns } else { 0 };
        graph.add(&path, sum.samples, &[sum.cpu_ns, wall_ns, sum.samples, 0, 0]);
    }
    let mut pauses: Vec<_> = recording.pauses.iter().collect();
    pauses.sort_unstable_by_key(|(key, _)| *key);
    for (key, sum) in pauses {
        let mut path = graph.path(recording, key.thread, key.node);
        for row in [
            "(garbage collection)".to_owned(),
            format!("({} GC)", key.kind),
            format!("({})", key.phase.name()),
        ] {
            let function = graph.function(RUBY, UNKNOWN, &row);
            path.push(CallLine { function, line: 0, first_line: 0 });
        }
        graph.add(&path, sum.pauses, &[0, 0, 0, sum.ns, sum.pauses]);
    }
    graph.write(context, out)
}

impl Graph {
    fn write(&self, context: &Context<'_>, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "# callgrind format\nversion: 1\ncreator: gctrace {}", super::super::VERSION)?;
        writeln!(out, "desc: Account: {}", name(&context.account()))?;
        writeln!(out, "positions: line\nevents: {}", EVENTS.join(" "))?;
        writeln!(out, "summary: {}", shown(&self.total))?;
        let (mut objects, mut files) = (Texts::default(), Texts::default());
        let mut named: BTreeSet<u32> = BTreeSet::new();
        let mut place = |index: u32, of: &str, out: &mut dyn Write| {
            let Function { object, file, name } = &self.functions[index as usize - 1];
            let known = if named.insert(index) { format!(" {name}") } else { String::new() };
            let (object, file) = (objects.text(object), files.text(file));
            writeln!(out, "{of}ob={object}\n{of}fl={file}\n{of}fn=({index}){known}")
        };
        for (index, Caller { own, calls }) in &self.callers {
            writeln!(out)?;
            place(*index, "", out)?;
            for (line, costs) in own {
                writeln!(out, "{line} {}", shown(costs))?;
            }
            for ((line, callee, first_line), (count, costs)) in calls {
                place(*callee, "c", out)?;
                writeln!(out, "calls={count} {first_line}\n{line} {}", shown(costs))?;
            }
        }
        Ok(())
    }
}

/// Each text is written once, with a number, and then referred to by the number.
#[derive(Default)]
struct Texts<'a>(HashMap<&'a str, usize>);

impl<'a> Texts<'a> {
    fn text(&mut self, text: &'a str) -> String {
        let next = self.0.len() + 1;
        if let Some(number) = self.0.get(text) {
            return format!("({number})");
        }
        self.0.insert(text, next);
        format!("({next}) {text}")
    }
}

fn shown(costs: &Costs) -> String {
    costs.map(|cost| cost.to_string()).join(" ")
}
