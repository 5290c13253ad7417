//! What a recording keeps about memory requested outside the Ruby heap: estimates by thread and stack.

use std::{collections::hash_map::Entry, sync::Arc};

use super::{NodeId, Recording, ThreadIndex};
use crate::{
    aggregate::estimate::CallsAndBytes,
    model::{Process, stack::Stack},
};

/// The key by which such memory is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MallocKey {
    /// The thread.
    pub thread: ThreadIndex,
    /// Its stack.
    pub node: NodeId,
}

/// A sum of such memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MallocSum {
    /// Requested memory.
    pub asked: CallsAndBytes,
    /// The part of it that was still allocated at the end.
    pub left: CallsAndBytes,
}

/// A call whose stack was captured.
#[derive(Clone, Debug)]
pub struct MallocCall<'a> {
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// The thread, host pid namespace.
    pub tid: u32,
    /// Its name.
    pub comm: &'a Arc<str>,
    /// Its stack.
    pub stack: &'a Stack,
    /// Requested bytes.
    pub bytes: u64,
    /// Probability with which the stack was captured.
    pub probability: f64,
}

impl Recording {
    /// Adds a call under its stack. Returns the key of its sum.
    pub fn malloc(&mut self, process: &Process, call: &MallocCall<'_>) -> MallocKey {
        let key = self.malloc_key(process, call.ts_ns, call.tid, call.comm, call.stack);
        if let Some(sum) = self.mallocs.get_mut(&key) {
            sum.asked.add(call.bytes, call.probability);
        }
        key
    }

    /// Adds memory that is still allocated at the end, to the sum with this key; `None`: the stack of its call is unknown.
    pub fn malloc_left(
        &mut self,
        process: &Process,
        key: Option<MallocKey>,
        ts_ns: u64,
        (bytes, probability): (u64, f64),
    ) {
        let key = key.unwrap_or_else(|| {
            let stack = Stack::default();
            self.malloc_key(process, ts_ns, 0, &Arc::from("(any thread)"), &stack)
        });
        if let Some(sum) = self.mallocs.get_mut(&key) {
            sum.left.add(bytes, probability);
        }
    }

    fn malloc_key(
        &mut self,
        process: &Process,
        ts_ns: u64,
        tid: u32,
        comm: &Arc<str>,
        stack: &Stack,
    ) -> MallocKey {
        let stack = if stack.is_empty() { Arc::clone(&self.no_stack) } else { Arc::clone(stack) };
        let node = self.tree.insert(&stack);
        let thread = self.thread(process, tid, comm, ts_ns);
        let key = MallocKey { thread, node };
        let full = self.mallocs.len() >= self.limits.sums;
        match self.mallocs.entry(key) {
            Entry::Occupied(_) => key,
            Entry::Vacant(entry) if !full => {
                entry.insert(MallocSum::default());
                key
            }
            Entry::Vacant(_) => {
                self.merged += 1;
                let key = MallocKey { thread: self.thread_beyond(), node: NodeId::BEYOND };
                self.mallocs.entry(key).or_default();
                key
            }
        }
    }
}
