//! The active span of a thread, if its tracing library publishes it (OTEP 4947). The thread is interrupted or waits meanwhile, so
//! what it has published does not change.

use gctrace_common::{config::ThreadContextRecord, stack::StackEvent, stats::Counter};

use crate::{
    maps::{THREAD_CONTEXTS, count},
    thread, usermem,
};

/// Stores the active span of the running thread in the head of its stack record, if there is one.
///
/// # Safety
/// The head must be this program's.
#[inline(always)]
pub unsafe fn note(head: *mut StackEvent, tgid: u32) {
    // SAFETY: the value is copied at once.
    let Some(place) = (unsafe { THREAD_CONTEXTS.get(&tgid).copied() }) else { return };
    count(Counter::StackSpansSought);
    let Some(block) = thread::module_block(place.module, place.dtv_entry) else {
        return count(Counter::StackSpansUnread);
    };
    // A thread that has not used the variable has published nothing.
    if block == 0 {
        return;
    }
    let Some(at) = usermem::read::<u64>(block.wrapping_add_signed(place.offset)) else {
        return count(Counter::StackSpansUnread);
    };
    if at == 0 {
        return;
    }
    let Some(record) = usermem::read::<ThreadContextRecord>(at) else {
        return count(Counter::StackSpansUnread);
    };
    if let Some((trace_id, span_id)) = record.span() {
        count(Counter::StackSpans);
        // SAFETY: the caller's promise.
        unsafe {
            (*head).trace_id = trace_id;
            (*head).span_id = span_id;
            (*head).flags |= StackEvent::SPAN;
        }
    }
}
