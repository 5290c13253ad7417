//! The traces and spans that the sums of a recording belong to.

use std::collections::HashMap;

use crate::model::trace::Link;

/// Index of a span with its trace in a recording.
pub type TraceIndex = u32;

/// Maximum number of distinguished traces; the rest are not reported.
const MAX_TRACES: usize = 1 << 16;

/// The traces of a recording.
#[derive(Debug, Default)]
pub(super) struct Traces {
    /// Whether traces are distinguished at all.
    pub(super) wanted: bool,
    all: Vec<Link>,
    numbers: HashMap<Link, TraceIndex>,
    /// Number of times that a trace had no room.
    pub(super) left_out: u64,
}

impl Traces {
    /// A trace by its index.
    pub(super) fn get(&self, index: TraceIndex) -> Option<&Link> {
        self.all.get(index as usize)
    }

    /// The index of a trace; `None`, and counted, without `room` or if there are too many.
    pub(super) fn index(&mut self, trace: Link, room: bool) -> Option<TraceIndex> {
        if !self.wanted {
            return None;
        }
        let known = self.numbers.get(&trace).copied().filter(|_| room);
        let index = known.or_else(|| (room && self.all.len() < MAX_TRACES).then(|| self.enter(trace)));
        self.left_out += u64::from(index.is_none());
        index
    }

    fn enter(&mut self, trace: Link) -> TraceIndex {
        let index = self.all.len() as TraceIndex;
        self.all.push(trace);
        self.numbers.insert(trace, index);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::trace::{Span, TraceOrigin};

    /// Memory is bounded, however many traces there are, and what has no room is counted.
    #[test]
    fn bounded() {
        let trace = |id: usize| {
            let span = Span { trace_id: id as u128 + 1, span_id: 1 };
            Link { span, origin: TraceOrigin::Traceparent }
        };
        let mut traces = Traces { wanted: true, ..Traces::default() };
        for id in 0..MAX_TRACES {
            assert_eq!(traces.index(trace(id), true), Some(id as u32));
        }
        assert_eq!((traces.index(trace(MAX_TRACES), true), traces.index(trace(7), true)), (None, Some(7)));
        assert_eq!((traces.index(trace(7), false), traces.left_out), (None, 2));
        assert_eq!((traces.get(7), traces.get(MAX_TRACES as u32)), (Some(&trace(7)), None));
        let mut unwanted = Traces::default();
        assert_eq!((unwanted.index(trace(7), true), unwanted.left_out), (None, 0));
    }
}
