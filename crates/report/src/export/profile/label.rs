//! Texts for frames and threads, safe in every format.

use gctrace_tunemygc::printable::printable;

use crate::{
    aggregate::{
        call_tree::NodeId,
        recording::{ProcessFacts, Recording},
    },
    export::place::program_of,
    model::stack::{Frame, FrameKind, ThreadState},
    words::UNNAMED,
};

/// What a label represents; it determines the colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A process or thread.
    Group,
    /// A frame.
    Frame(FrameKind),
    /// Not running.
    Off(ThreadState),
    /// Waiting for the GVL.
    GvlWait,
}

/// The name of a frame if methods are distinguished, but not the lines within a method: `Foo#bar (app.rb:12)` with its
/// first line; kernel functions have the customary suffix `_[k]`.
pub(super) fn method(frame: &Frame) -> String {
    let name = text(&frame.name);
    match (frame.kind, &frame.file) {
        (FrameKind::Ruby, Some(file)) if frame.first_line > 0 => {
            format!("{name} ({}:{})", text(base_name(file)), frame.first_line)
        }
        (FrameKind::Ruby, Some(file)) => format!("{name} ({})", text(base_name(file))),
        (FrameKind::Kernel, _) => format!("{name}_[k]"),
        _ => name,
    }
}

/// Like [`method`], with the line being executed, `Foo#bar (app.rb:14)`; without one if that is unknown.
pub(super) fn at_line(frame: &Frame) -> String {
    match (frame.kind, &frame.file) {
        (FrameKind::Ruby, Some(file)) if frame.line > 0 => {
            format!("{} ({}:{})", text(&frame.name), text(base_name(file)), frame.line)
        }
        _ => without_line(frame),
    }
}

/// Like [`method`], without the line: `Foo#bar (app.rb)`.
pub(super) fn without_line(frame: &Frame) -> String {
    match (frame.kind, &frame.file) {
        (FrameKind::Ruby, Some(file)) => format!("{} ({})", text(&frame.name), text(base_name(file))),
        _ => method(frame),
    }
}

/// A name as a single line of characters that are valid in every format; an empty name becomes `(unnamed)`.
pub(in crate::export) fn text(name: &str) -> String {
    if name.is_empty() {
        return UNNAMED.to_owned();
    }
    printable(name).into_owned()
}

/// The innermost Ruby frame of a stack with its line: `Foo#bar (app.rb:14)`; if there is none, the innermost frame.
pub(super) fn leaf(recording: &Recording, node: NodeId) -> Option<String> {
    let frames = || recording.tree.path(node).map(|(_, frame)| recording.tree.frame(frame));
    let frame = frames().find(|frame| frame.kind == FrameKind::Ruby).or_else(|| frames().next())?;
    let name = text(&frame.name);
    Some(match &frame.file {
        Some(file) if frame.line > 0 => format!("{name} ({}:{})", text(base_name(file)), frame.line),
        _ => name,
    })
}

/// The last component of a path, also of a file in Ruby's load path that is built in: `<internal:/usr/lib/…/kernel_require.rb>`.
pub(super) fn base_name(path: &str) -> &str {
    let name = path.rsplit('/').find(|part| !part.is_empty()).unwrap_or(path);
    if name.len() < path.len() && path.starts_with("<internal:") { name.trim_end_matches('>') } else { name }
}

/// The name of a process as in other outputs: `puma (pid 4242)`.
pub(super) fn process(facts: &ProcessFacts) -> String {
    match facts.pid {
        0 => text(&facts.comm),
        pid => {
            format!("{} (pid {pid})", text(&program_of(&facts.origin.service, &facts.comm, &facts.cmdline)))
        }
    }
}
