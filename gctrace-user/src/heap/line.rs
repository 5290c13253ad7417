//! A line of Ruby code that asks for memory or for an object.

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
    /// The innermost line of Ruby code, of what is built into the VM (`Integer#times`) only where there is no other; `None`: there is
    /// none, or it is not known.
    pub(crate) fn of(stack: &Stack) -> Option<Self> {
        let mut lines = stack.iter().filter_map(|frame| match (&frame.file, frame.kind) {
            (Some(file), FrameKind::Ruby) if frame.line > 0 => {
                Some(Self { method: frame.name.clone(), file: file.clone(), number: frame.line })
            }
            _ => None,
        });
        let first = lines.next()?;
        let is_internal = |line: &Self| Source::of(&line.file) == Source::Internal;
        if !is_internal(&first) {
            return Some(first);
        }
        Some(lines.find(|line| !is_internal(line)).unwrap_or(first))
    }

    /// As people read it: `Shop#all (models/shop.rb:12)`.
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

    /// Code of the VM is passed over where something has called it.
    #[test]
    fn of_a_stack() {
        let frame = |name: &str, file: &str, line| {
            let (name, file) = (name.into(), Some(file.into()));
            Arc::new(Frame { kind: FrameKind::Ruby, name, file, line, first_line: 1, address: 0 })
        };
        let times = || frame("Integer#times", "<internal:numeric>", 238);
        let of = |frames: Vec<Arc<Frame>>| Line::of(&frames.into()).map(|line| line.text());
        let called =
            vec![times(), frame("Shop#all", "/srv/app/shop.rb", 0), frame("run", "/srv/app/run.rb", 7)];
        assert_eq!(of(called).as_deref(), Some("run (app/run.rb:7)"));
        assert_eq!(of(vec![times()]).as_deref(), Some("Integer#times (<internal:numeric>:238)"));
        assert_eq!(of(Vec::new()), None);
    }
}
