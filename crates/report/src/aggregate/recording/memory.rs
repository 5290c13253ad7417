//! Memory of processes over time, as read at each GC event.

use super::{ProcessIndex, Recording};
use crate::{
    aggregate::heap_figures::HeapFigures,
    model::{GcState, Process, Shares},
};

/// Memory of a process at a GC event.
#[derive(Clone, Debug)]
pub struct MemoryMoment {
    /// The process.
    pub process: ProcessIndex,
    /// When it was read, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Resident set size, bytes, if known.
    pub rss: Option<u64>,
    /// When shares were read, and the shares, if they were read.
    pub shares: Option<(u64, Shares)>,
    /// What its VM counts for its heap.
    pub heap: HeapFigures,
}

impl Recording {
    /// Adds the memory at a GC event, or when tracing began.
    pub(super) fn memory(&mut self, process: &Process, state: &GcState) {
        if self.timeline.is_none() || !self.has_begun(state.ts_ns) {
            return;
        }
        let shares = state.memory.and_then(|memory| memory.shares);
        let shares = shares.and_then(|shares| Some((shares.read_ns?, shares)));
        let (rss, heap) = (state.memory.map(|memory| memory.rss), HeapFigures::of(&process.image, state));
        if rss.is_none() && !heap.is_any() {
            return;
        }
        let index = self.process_index(process, state.ts_ns);
        if let Some(timeline) = &mut self.timeline
            && timeline.admit(1 + heap.pools.len(), &self.limits)
        {
            timeline.memory.push(MemoryMoment { process: index, ts_ns: state.ts_ns, rss, shares, heap });
        }
    }
}
