//! A line of Ruby code that allocates memory or an object.

use std::sync::Arc;

use gctrace_tunemygc::printable::printable;

use crate::model::{
    source::{Source, last_two},
    stack::{FrameKind, Stack},
};

/// A place in Ruby code.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Line {
    pub(crate) method: Arc<str>,
    pub(crate) file: Arc<str>,
    pub(crate) number: u32,
}

impl Line {
    /// The innermost line of Ruby code. Code that is built into the VM (`Integer#times`) counts only if there is no other. `None`: there is
    /// no such line, or it is unknown; a caller's line is not used instead.
    pub(crate) fn of(stack: &Stack) -> Option<Self> {
        let mut internal = None;
        for frame in stack.iter() {
            let file = match (&frame.file, frame.kind) {
                (Some(file), FrameKind::Ruby) if frame.line > 0 => file,
                // The line or the frame itself is unknown. C functions are skipped: they have no line.
                (_, FrameKind::Ruby) => return internal,
                (_, FrameKind::Missing) if &*frame.name != "(C function)" => return internal,
                _ => continue,
            };
            let line = Self { method: frame.name.clone(), file: file.clone(), number: frame.line };
            if Source::of(file) != Source::Internal {
                return Some(line);
            }
            internal.get_or_insert(line);
        }
        internal
    }

    /// Method and place as text: `Shop#all (models/shop.rb:12)`.
    pub(crate) fn text(&self) -> String {
        format!("{} ({})", printable(&self.method), self.place())
    }

    /// File and line: `models/shop.rb:12`.
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", printable(last_two(&self.file)), self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stack::Frame;

    /// Code of the VM is skipped if other code called it.
    #[test]
    fn of_a_stack() {
        let frame = |name: &str, file: &str, line| {
            let (name, file) = (name.into(), Some(file.into()));
            Arc::new(Frame { kind: FrameKind::Ruby, name, file, line, first_line: 1, address: 0 })
        };
        let times = || frame("Integer#times", "<internal:numeric>", 238);
        let of = |frames: Vec<Arc<Frame>>| Line::of(&frames.into()).map(|line| line.text());
        let run = || frame("run", "/srv/app/run.rb", 7);
        assert_eq!(of(vec![times(), run()]).as_deref(), Some("run (app/run.rb:7)"));
        assert_eq!(of(vec![times()]).as_deref(), Some("Integer#times (<internal:numeric>:238)"));
        assert_eq!(of(Vec::new()), None);
        // For code without lines, and for a frame that could not be named, the caller's line is not used.
        assert_eq!(of(vec![frame("Shop#all", "/srv/app/shop.rb", 0), run()]), None);
        let missing = |name: &str| {
            let (name, kind) = (name.into(), FrameKind::Missing);
            Arc::new(Frame { kind, name, file: None, line: 0, first_line: 0, address: 0 })
        };
        assert_eq!(of(vec![missing("(unnamed)"), run()]), None);
        assert_eq!(of(vec![missing("(C function)"), run()]).as_deref(), Some("run (app/run.rb:7)"));
    }
}
