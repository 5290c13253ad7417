//! Combines native and Ruby frames of one moment into one stack in true order.
//!
//! Each invocation of the interpreter loop is one native frame of `vm_exec_core`, and runs the control frames down to and
//! including the first with `VM_FRAME_FLAG_FINISH`: a group. Frames above such a native frame, up to the next one, were
//! called by the C function on top of its group (or by the instruction that the group's top frame executes). So
//! stacks are zipped from the leaf: native frames above the innermost loop, the innermost group, native frames above the
//! next loop, and so on. This is done only if the numbers of loops and groups are equal.
//!
//! Only frames that are useful in a profile are kept:
//! - between the loops, native frames outside the Ruby image (a C extension, and libraries that call back); frames of the
//!   Ruby image between the loops are the plumbing between a C function and the block it yields to, and the C function is
//!   present under its own name;
//! - above the innermost loop, everything, except the plumbing next to the loop: functions of the VM without a name, and
//!   functions that only dispatch calls ([`is_plumbing`]);
//! - below the outermost loop, nothing: it is the same in every stack of a thread.
//!
//! During a collection, GC frames replace the Ruby image's own frames (the names of the many functions of the collector
//! say no more than "marking" does); what the collector calls outside the image (an extension's mark or free function, the
//! allocator) is above them, and what called into the VM when the collection began is below.
//!
//! If the native leaf belongs to no file, the innermost Ruby frame has no line: just-in-time code does not store its program counter at each
//! instruction, only before calls.
//!
//! If that is not possible, the native frames above the first frame of the Ruby image are put on top of the Ruby stack;
//! native frames that belong to no file (just-in-time code of the Ruby method below) are left out.

use std::{collections::HashSet, sync::Arc};

use gctrace_common::stack::NativeEnd;

use crate::model::stack::{Frame, FrameKind};

/// A native frame with the facts needed for mixing.
#[derive(Clone, Debug)]
pub struct NativeFrame {
    /// The frame.
    pub frame: Arc<Frame>,
    /// Whether it is code of the Ruby image.
    pub ruby: bool,
    /// Whether its name is a symbol's.
    pub named: bool,
    /// Whether it is the interpreter loop.
    pub interpreter: bool,
}

/// How a stack was combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixed {
    /// In true order.
    InOrder,
    /// The native leaf is on top of the Ruby stack: the walk did not reach the outermost frame.
    Incomplete,
    /// The same, because the numbers of loops and groups differ (the stack was captured between the push of a frame and the start of
    /// the loop, or there is just-in-time code) or the loop is unknown.
    Unequal,
    /// There are no Ruby frames.
    NativeOnly,
}

/// Maximum number of frames without a line that are shared; all are forgotten above it.
const SHARED: usize = 4096;

/// Frames whose line is unknown, shared by the stacks of a run.
#[derive(Debug, Default)]
pub struct WithoutLine(HashSet<Arc<Frame>>);

impl WithoutLine {
    fn of(&mut self, frame: &Frame) -> Arc<Frame> {
        let wanted = Frame { line: 0, ..frame.clone() };
        if let Some(known) = self.0.get(&wanted) {
            return Arc::clone(known);
        }
        if self.0.len() >= SHARED {
            self.0.clear();
        }
        let frame = Arc::new(wanted);
        self.0.insert(Arc::clone(&frame));
        frame
    }
}

/// Combines the frames into `out`, leaf first. `gc` are the frames that show what the collector was doing, if it was active. `groups` are the
/// named Ruby frames of each invocation of the loop, innermost first; the frame at the root of a stack, in which no code runs, is in none.
pub fn mix(
    native: &[NativeFrame],
    end: NativeEnd,
    gc: &[Arc<Frame>],
    groups: &[Vec<Arc<Frame>>],
    without_line: &mut WithoutLine,
    out: &mut Vec<Arc<Frame>>,
) -> Mixed {
    if groups.iter().all(Vec::is_empty) {
        leaf(native, gc, out);
        return Mixed::NativeOnly;
    }
    let loops: Vec<usize> = (0..native.len()).filter(|&at| native[at].interpreter).collect();
    let mixed = match end {
        NativeEnd::Complete if loops.len() == groups.len() => Mixed::InOrder,
        NativeEnd::Complete => Mixed::Unequal,
        _ => Mixed::Incomplete,
    };
    if mixed != Mixed::InOrder {
        let known = |frame: &Arc<Frame>| frame.kind != FrameKind::Missing;
        out.extend(frames(&native[..above_ruby(native)]).filter(known));
        out.extend(gc.iter().cloned());
        add(native, groups.iter().flatten(), without_line, out);
        return mixed;
    }
    let mut from = 0;
    for (&at, group) in loops.iter().zip(groups) {
        let above = &native[from..at];
        if from == 0 {
            let kept = above.iter().rposition(|native| !is_plumbing(native)).map_or(0, |last| last + 1);
            leaf(&above[..kept], gc, out);
            add(native, group.iter(), without_line, out);
        } else {
            out.extend(above.iter().filter(|native| !native.ruby).map(|native| native.frame.clone()));
            out.extend(group.iter().cloned());
        }
        from = at + 1;
    }
    mixed
}

/// Adds the innermost Ruby frames.
fn add<'a>(
    native: &[NativeFrame],
    mut ruby: impl Iterator<Item = &'a Arc<Frame>>,
    without_line: &mut WithoutLine,
    out: &mut Vec<Arc<Frame>>,
) {
    let in_no_file = native.first().is_some_and(|leaf| leaf.frame.kind == FrameKind::Missing);
    out.extend(ruby.next().map(|first| match first.kind {
        FrameKind::Ruby if in_no_file && first.line != 0 => without_line.of(first),
        _ => Arc::clone(first),
    }));
    out.extend(ruby.cloned());
}

/// Adds the frames above the innermost loop.
fn leaf(native: &[NativeFrame], gc: &[Arc<Frame>], out: &mut Vec<Arc<Frame>>) {
    if gc.is_empty() {
        return out.extend(frames(native));
    }
    let (above, below) = native.split_at(above_ruby(native));
    out.extend(frames(above));
    out.extend(gc.iter().cloned());
    out.extend(below.iter().filter(|native| !native.ruby).map(|native| native.frame.clone()));
}

/// Number of frames above the first frame of the Ruby image.
fn above_ruby(native: &[NativeFrame]) -> usize {
    native.iter().position(|native| native.ruby).unwrap_or(native.len())
}

fn frames(native: &[NativeFrame]) -> impl Iterator<Item = Arc<Frame>> {
    native.iter().map(|native| native.frame.clone())
}

/// Whether it is a function between the loop and the C function that the loop calls (`vm_insnhelper.c`, `vm_eval.c`).
fn is_plumbing(native: &NativeFrame) -> bool {
    const PREFIXES: [&str; 5] = ["vm_call", "vm_sendish", "vm_invoke", "vm_cfp_", "call_cfunc"];
    native.ruby && (!native.named || PREFIXES.iter().any(|prefix| native.frame.name.starts_with(prefix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &str) -> Arc<Frame> {
        let kind = FrameKind::Native;
        Arc::new(Frame { kind, name: name.into(), file: None, line: 0, first_line: 0, address: 0 })
    }

    /// `!` marks the loop, `.` code of the Ruby image, `?` such code without a name; others are in a library.
    fn native(text: &str) -> Vec<NativeFrame> {
        let one = |word: &str| {
            let name = word.trim_start_matches(['!', '.', '?']);
            let ruby = name != word;
            let (interpreter, named) = (word.starts_with('!'), !word.starts_with('?'));
            NativeFrame { frame: frame(name), ruby, named, interpreter }
        };
        text.split_whitespace().map(one).collect()
    }

    fn groups(text: &str) -> Vec<Vec<Arc<Frame>>> {
        text.split('|').map(|group| group.split_whitespace().map(frame).collect()).collect()
    }

    fn mixed(native_frames: &str, end: NativeEnd, ruby: &str) -> (Mixed, String) {
        mixed_gc(native_frames, end, "", ruby)
    }

    fn mixed_gc(native_frames: &str, end: NativeEnd, gc: &str, ruby: &str) -> (Mixed, String) {
        let mut out = Vec::new();
        let mixed = mix(
            &native(native_frames),
            end,
            &groups(gc).concat(),
            &groups(ruby),
            &mut WithoutLine::default(),
            &mut out,
        );
        (mixed, out.iter().map(|frame| &*frame.name).collect::<Vec<_>>().join(" "))
    }

    const NATIVE: &str = "memcpy .str_gsub .vm_call_cfunc ?x !loop .rb_vm_exec .rb_yield cb.so .rb_ensure .vm_call_cfunc \
                          !loop .rb_vm_exec .ruby_run_node main _start";

    /// Frames called by a C function are above it, frames that yield are in between; dispatch and start-up frames are left out.
    #[test]
    fn in_order() {
        let ruby = "String#gsub block|Ext#each m <main>";
        let expected = "memcpy str_gsub String#gsub block cb.so Ext#each m <main>";
        assert_eq!(mixed(NATIVE, NativeEnd::Complete, ruby), (Mixed::InOrder, expected.to_owned()));
    }

    /// In case of doubt, only the leaf is native.
    #[test]
    fn doubt() {
        for (end, ruby, how) in [
            (NativeEnd::Complete, "a|b|c", Mixed::Unequal),
            (NativeEnd::Complete, "a", Mixed::Unequal),
            (NativeEnd::NoTable, "a|b", Mixed::Incomplete),
        ] {
            let expected = format!("memcpy {}", ruby.replace('|', " "));
            assert_eq!(mixed(NATIVE, end, ruby), (how, expected));
        }
    }

    /// A thread without Ruby frames keeps its native stack, whatever it is.
    #[test]
    fn no_ruby() {
        let (how, text) = mixed("read .x start_thread", NativeEnd::NoRow, "");
        assert_eq!((how, text.as_str()), (Mixed::NativeOnly, "read x start_thread"));
    }

    /// The collector's own functions are replaced by GC frames.
    #[test]
    fn collection() {
        let native = "free ext_free .sweep ?step .newobj z.so .vm_call_cfunc !loop .rb_vm_exec main";
        let (how, text) = mixed_gc(native, NativeEnd::Complete, "(sweeping) (gc)", "Z#inflate <main>");
        assert_eq!(
            (how, text.as_str()),
            (Mixed::InOrder, "free ext_free (sweeping) (gc) z.so Z#inflate <main>")
        );
        let (how, text) = mixed_gc(native, NativeEnd::NoRow, "(sweeping) (gc)", "Z#inflate <main>");
        assert_eq!(
            (how, text.as_str()),
            (Mixed::Incomplete, "free ext_free (sweeping) (gc) Z#inflate <main>")
        );
    }

    /// Where code that belongs to no file runs, the line of the innermost Ruby frame is unknown; those of its callers are known.
    #[test]
    fn just_in_time() {
        let line = |name: &str| Arc::new(Frame { kind: FrameKind::Ruby, line: 7, ..(*frame(name)).clone() });
        let ruby = [vec![line("m"), line("n")], vec![line("<main>")]];
        let nowhere = Arc::new(Frame { kind: FrameKind::Missing, ..(*frame("[unknown]")).clone() });
        for (leaf, expected) in [(nowhere, [0, 7, 7]), (frame("memcpy"), [7, 7, 7])] {
            let leaf = NativeFrame { frame: leaf, ruby: false, named: false, interpreter: false };
            for (rest, end) in [("!loop .x !loop main", NativeEnd::Complete), ("", NativeEnd::NoTable)] {
                let native = [vec![leaf.clone()], native(rest)].concat();
                let mut out = Vec::new();
                let mut shared = WithoutLine::default();
                mix(&native, end, &[], &ruby, &mut shared, &mut out);
                let lines: Vec<u32> = out
                    .iter()
                    .filter(|frame| frame.kind == FrameKind::Ruby)
                    .map(|frame| frame.line)
                    .collect();
                assert_eq!(lines, expected);
                // A recording and a call tree know frames by their address.
                let mut again = Vec::new();
                mix(&native, end, &[], &ruby, &mut shared, &mut again);
                assert!(out.iter().zip(&again).all(|(one, other)| Arc::ptr_eq(one, other)));
            }
        }
    }

    /// A leaf inside the loop itself leaves nothing above it.
    #[test]
    fn in_the_loop() {
        let (how, text) = mixed("!loop .rb_vm_exec main", NativeEnd::Complete, "m <main>");
        assert_eq!((how, text.as_str()), (Mixed::InOrder, "m <main>"));
    }
}
