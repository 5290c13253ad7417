//! The last cycles of a process.

use crate::model::{
    GcCycle,
    stack::{FrameKind, Stack},
};

/// A cycle in the list of recent ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::top) struct LastCycle {
    /// `GC.count`.
    pub count: u64,
    /// `minor` or `major`.
    pub kind: &'static str,
    /// What started it.
    pub reason: Option<&'static str>,
    /// Its start, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Sum of its pauses, nanoseconds.
    pub pause_ns: u64,
    /// Its longest pause, nanoseconds.
    pub max_ns: u64,
    /// The line of Ruby code that triggered it.
    pub line: Option<String>,
}

impl LastCycle {
    pub(super) fn of(cycle: &GcCycle) -> Self {
        Self {
            count: cycle.count,
            kind: cycle.kind(),
            reason: cycle.start.info.major_by.or(cycle.start.info.gc_by),
            ts_ns: cycle.start.ts_ns,
            pause_ns: cycle.pause_ns(),
            max_ns: cycle.max_pause_ns(),
            line: cycle.trigger.as_ref().and_then(place),
        }
    }
}

/// The innermost line of Ruby code: `app.rb:12 Foo#bar`.
pub(super) fn place(stack: &Stack) -> Option<String> {
    let frame = stack.iter().find(|frame| frame.kind == FrameKind::Ruby)?;
    let file = frame.file.as_deref().unwrap_or("?");
    let file = file.rsplit('/').next().unwrap_or(file);
    Some(format!("{file}{} {}", frame.colon_line(), frame.name))
}
