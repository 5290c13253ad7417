//! The stack walk of the BPF programs, compiled for this host: the same source file, on other memory.

use std::{cell::RefCell, collections::BTreeMap, mem::zeroed, rc::Rc};

use gctrace_common::{
    config::StackPath,
    stack::{RubyFrame, StackEvent},
    stats::Counter,
};
use gctrace_cruby::ruby::frames::Memory;

#[path = "../../../gctrace-ebpf/src/scratch.rs"]
#[expect(unreachable_pub, reason = "the file is the kernel side's")]
mod scratch;
#[path = "../../../gctrace-ebpf/src/walk/steps.rs"]
#[expect(unreachable_pub, clippy::pedantic, reason = "the file is the kernel side's")]
mod steps;

use scratch::Scratch;
use steps::Next;

/// Number of steps after which the kernel's 33 tail calls of 192 steps are used up.
const STEPS: usize = 33 * 192;

thread_local! {
    static MEMORY: RefCell<Option<Rc<dyn Memory>>> = const { RefCell::new(None) };
    static COUNTS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn count(counter: Counter) {
    COUNTS.with_borrow_mut(|counts| *counts.entry(counter.name()).or_default() += 1);
}

/// The kernel's copy helpers: they copy, or fail.
mod usermem {
    use zerocopy::{FromBytes, IntoBytes};

    use super::MEMORY;

    fn fill(address: u64, bytes: &mut [u8]) -> bool {
        MEMORY.with_borrow(|memory| memory.as_ref().is_some_and(|memory| memory.read(address, bytes)))
    }

    pub(super) fn read<T: FromBytes + IntoBytes>(address: u64) -> Option<T> {
        let mut value = T::new_zeroed();
        fill(address, value.as_mut_bytes()).then_some(value)
    }

    /// # Safety
    /// `target` must be valid for writes of `MAX` bytes.
    pub(super) unsafe fn copy<const MAX: u32>(address: u64, len: u32, target: *mut u8) -> Result<(), ()> {
        if len == 0 || len > MAX {
            return Err(());
        }
        // SAFETY: the caller guarantees it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(target, len as usize) };
        if fill(address, bytes) { Ok(()) } else { Err(()) }
    }
}

/// The records of a stack that the kernel side sends, and its counters.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) frames: Vec<RubyFrame>,
    pub(crate) flags: u32,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

/// Walks from the control frame `next` to `end`, in a VM stack that starts at `stack`.
pub(crate) fn walk(memory: Rc<dyn Memory>, path: &StackPath, stack: u64, (next, end): (u64, u64)) -> Sent {
    MEMORY.set(Some(memory));
    COUNTS.set(BTreeMap::new());
    // SAFETY: plain data, for which all zeros are valid.
    let mut scratch: Box<Scratch> = Box::new(unsafe { zeroed() });
    (scratch.stack, scratch.next, scratch.end) = (stack, next, end);
    // SAFETY: this function owns the scratch.
    let done = (0..STEPS).any(|_| matches!(unsafe { steps::step(&raw mut *scratch, path) }, Next::Done));
    if !done {
        // SAFETY: as above.
        unsafe { steps::cut(&raw mut *scratch, StackEvent::TRUNCATED) };
    }
    MEMORY.set(None);
    let frames = scratch.frames[..scratch.head.ruby as usize].to_vec();
    Sent { frames, flags: scratch.head.flags, counts: COUNTS.take() }
}
