//! What a recording keeps about allocation: sums by thread and stack and, for timelines, each stack and the amount of each interval.

use std::{collections::hash_map::Entry, sync::Arc};

use super::{
    super::{EndpointIndex, NodeId, ProcessIndex, Recording, ThreadIndex, TraceIndex, named},
    Kept,
};
use crate::model::{
    Process,
    seen::{AllocStack, AllocSum},
};

/// The key by which allocation is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocKey {
    /// The thread.
    pub thread: ThreadIndex,
    /// Its stack; if none was captured, a stack of one frame that says so.
    pub node: NodeId,
    /// Size of a slot, bytes.
    pub slot_size: u32,
    /// The endpoint of the request that the thread served, as in [`SampleKey`](super::SampleKey).
    pub endpoint: Option<EndpointIndex>,
    /// The trace, likewise.
    pub trace: Option<TraceIndex>,
}

/// A sum of allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocCount {
    /// Number of slots handed out.
    pub slots: u64,
    /// Number of stacks that represent them.
    pub stacks: u64,
}

/// An allocation stack with its time.
#[derive(Clone, Copy, Debug)]
pub struct AllocMoment {
    /// When the stack was taken, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// The key of its sum.
    pub key: AllocKey,
    /// Number of slots that it represents.
    pub slots: u64,
}

impl AllocMoment {
    /// Bytes of its slots.
    pub fn bytes(&self) -> u64 {
        self.key.bytes(self.slots)
    }
}

/// The amount that a process allocated in an interval.
#[derive(Clone, Copy, Debug)]
pub struct AllocInterval {
    /// The process.
    pub process: ProcessIndex,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// End, likewise.
    pub end_ns: u64,
    /// Number of slots handed out.
    pub slots: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl AllocKey {
    /// Size of this number of slots, bytes.
    pub fn bytes(&self, slots: u64) -> u64 {
        slots.saturating_mul(u64::from(self.slot_size))
    }
}

impl Recording {
    /// Adds slots with their stack.
    pub(in crate::aggregate::recording) fn alloc(&mut self, process: &Process, alloc: &AllocStack) {
        if !self.admits(alloc.ts_ns) {
            return;
        }
        let stack = if alloc.stack.is_empty() { &self.no_stack } else { &alloc.stack };
        let stack = Arc::clone(stack);
        let dropped = self.filter.drops(named(process, alloc.tid, &alloc.comm), Some(&stack));
        if dropped.is_some() {
            self.filter.account.allocs.keeps(dropped, alloc.bytes());
            return;
        }
        let node = self.tree.insert(&self.filter.shown(&stack));
        let thread = self.thread(process, alloc.tid, &alloc.comm, alloc.ts_ns);
        let key = AllocKey { thread, node, slot_size: alloc.slot_size, endpoint: None, trace: None };
        let moment = AllocMoment { ts_ns: alloc.ts_ns, key, slots: alloc.slots };
        self.place(process, alloc.request, alloc.ts_ns, Kept::Alloc(moment, alloc.span));
    }

    pub(super) fn add_alloc(&mut self, moment: AllocMoment) {
        let AllocMoment { key, slots, .. } = moment;
        let full = self.allocs.len() >= self.limits.sums;
        let sum = match self.allocs.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) if !full => entry.insert(AllocCount::default()),
            Entry::Vacant(_) => {
                self.merged += 1;
                let thread = self.thread_beyond();
                self.allocs.entry(AllocKey { thread, node: NodeId::BEYOND, ..key }).or_default()
            }
        };
        sum.slots += slots;
        sum.stacks += 1;
        let Some(timeline) = &mut self.timeline else { return };
        if timeline.allocs.len() >= self.limits.timeline {
            timeline.allocs_left_out += 1;
            return;
        }
        timeline.allocs.push(moment);
    }

    /// Adds what a process allocated in an interval. For an interval that spans the beginning of the recording it is unknown how much came before;
    /// all of it is shown, because the next stack represents all of it, too.
    pub(in crate::aggregate::recording) fn allocated(&mut self, process: &Process, sum: &AllocSum) {
        if self.timeline.is_none() || !self.admits(sum.end_ns) {
            return;
        }
        let index = self.process_index(process, sum.begin_ns);
        let began_ns = self.began_ns.unwrap_or_default();
        if let Some(timeline) = &mut self.timeline
            && timeline.admit(1, &self.limits)
        {
            timeline.allocated.push(AllocInterval {
                process: index,
                begin_ns: sum.begin_ns.max(began_ns),
                end_ns: sum.end_ns,
                slots: sum.objects(),
                bytes: sum.bytes(),
            });
        }
    }
}
