//! Texts of frames and threads, safe for every format.

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

/// What a label represents, for its colour.
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

/// The name of a frame where methods are distinguished, but not the lines inside of one: `Foo#bar (app.rb:12)` with
/// the line at which it begins; kernel functions carry the customary `_[k]`.
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

/// The same with the line that runs: `Foo#bar (app.rb:14)`.
pub(super) fn at_line(frame: &Frame) -> String {
    match (frame.kind, &frame.file) {
        (FrameKind::Ruby, Some(file)) if frame.line > 0 => {
            format!("{} ({}:{})", text(&frame.name), text(base_name(file)), frame.line)
        }
        _ => method(frame),
    }
}

/// The same without the line: `Foo#bar (app.rb)`.
pub(super) fn without_line(frame: &Frame) -> String {
    match (frame.kind, &frame.file) {
        (FrameKind::Ruby, Some(file)) => format!("{} ({})", text(&frame.name), text(base_name(file))),
        _ => method(frame),
    }
}

/// A name as one line of characters that every format can carry; an empty one is `(unnamed)`.
pub(in crate::export) fn text(name: &str) -> String {
    if name.is_empty() {
        return UNNAMED.to_owned();
    }
    printable(name).into_owned()
}

/// The innermost frame of Ruby code of a stack with its line: `Foo#bar (app.rb:14)`; the innermost of all where there is none.
pub(super) fn leaf(recording: &Recording, node: NodeId) -> Option<String> {
    let frames = || recording.tree.path(node).map(|(_, frame)| recording.tree.frame(frame));
    let frame = frames().find(|frame| frame.kind == FrameKind::Ruby).or_else(|| frames().next())?;
    let name = text(&frame.name);
    Some(match &frame.file {
        Some(file) if frame.line > 0 => format!("{name} ({}:{})", text(base_name(file)), frame.line),
        _ => name,
    })
}

/// The last part of a path.
pub(super) fn base_name(path: &str) -> &str {
    path.rsplit('/').find(|part| !part.is_empty()).unwrap_or(path)
}

/// A process as the other outputs name it: `puma (pid 4242)`.
pub(super) fn process(facts: &ProcessFacts) -> String {
    match facts.pid {
        0 => text(&facts.comm),
        pid => {
            format!("{} (pid {pid})", text(&program_of(&facts.origin.service, &facts.comm, &facts.cmdline)))
        }
    }
}
