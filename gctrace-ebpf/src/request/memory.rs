//! What a request or a job does with memory: the page faults of its thread, and by how much its process grew meanwhile.

use core::mem::MaybeUninit;

use aya_ebpf::helpers::{bpf_get_current_task, generated::bpf_probe_read_kernel};
use gctrace_common::{
    memory::{MemoryPages, MemoryUse},
    request::{RequestEnd, Serving},
    stats::Counter,
};

use super::serving;
use crate::{
    maps::{BLANK_MEMORY, MEMORY_SCRATCH, copies_states, count, faults_offset, watches_alloc},
    memory,
};

/// Notes what the running thread and its process have used of memory, where it takes a unit of work or `ends` it.
#[inline(always)]
pub fn note(tgid: u32, tid: u32, ends: bool) {
    let thread = u64::from(tgid) << 32 | u64::from(tid);
    if faults_offset() != 0 {
        let _zero = verified_once_2_faults(thread, u64::from(ends));
    }
    if watches_alloc() || copies_states() {
        let _zero = verified_once_2_pages(thread, u64::from(ends));
    }
}

/// The same at the end of a thread, which no longer has the memory of its process.
#[inline(always)]
pub fn thread_ended(tgid: u32, tid: u32) {
    if faults_offset() != 0 {
        let _zero = verified_once_2_faults(u64::from(tgid) << 32 | u64::from(tid), 1);
    }
}

/// What was used while a unit was served that has ended like this.
#[inline(always)]
pub fn of(serving: &Serving, how: RequestEnd) -> MemoryUse {
    match how {
        RequestEnd::Left => MemoryUse::UNKNOWN,
        RequestEnd::Gone => MemoryUse { resident: MemoryUse::PAGES_UNKNOWN, ..serving.memory },
        RequestEnd::Kept | RequestEnd::Closed | RequestEnd::Returned => serving.memory,
    }
}

/// Notes the page faults of the running thread: a global function, which the verifier walks once and not once per path to it. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_faults(thread: u64, ends: u64) -> u64 {
    let Some(serving) = serving((thread >> 32) as u32, thread as u32) else { return 0 };
    let mut faults = MaybeUninit::<[u64; 2]>::uninit();
    // SAFETY: the helper checks the source, and fills the destination with zeros on failure.
    let (failed, mut faults) = unsafe {
        let at = bpf_get_current_task().wrapping_add(u64::from(faults_offset()));
        let failed =
            bpf_probe_read_kernel(faults.as_mut_ptr().cast(), size_of_val(&faults) as u32, at as *const _);
        (failed, faults.assume_init())
    };
    if failed != 0 {
        count(Counter::RequestFaultsUnread);
        faults[0] = MemoryUse::FAULTS_UNKNOWN;
    }
    serving.memory.faults(faults, ends != 0);
    0
}

/// Reads the memory counters of the process of the running thread, and notes its resident pages: a global function for the same reason. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_pages(thread: u64, ends: u64) -> u64 {
    let tid = thread as u32;
    let Some(serving) = serving((thread >> 32) as u32, tid) else { return 0 };
    if MEMORY_SCRATCH.get_ptr(&tid).is_none()
        && let Some(blank) = BLANK_MEMORY.get(0)
    {
        let _may_be_full = MEMORY_SCRATCH.insert(&tid, blank, 0);
    }
    let Some(scratch) = MEMORY_SCRATCH.get_ptr_mut(&tid) else {
        count(Counter::MemoryReadFailed);
        serving.memory.resident = MemoryUse::PAGES_UNKNOWN;
        return 0;
    };
    // SAFETY: a map value pointer, valid while the program runs; only this thread uses this key.
    unsafe {
        memory::read(&raw mut (*scratch).pages, (&raw mut (*scratch).block).cast());
        if watches_alloc() {
            serving.memory.pages(&(*scratch).pages, ends != 0);
        }
    }
    0
}

/// Copies the counters that the running thread has just read.
///
/// # Safety
/// `to` must be valid for writing.
#[inline(always)]
pub unsafe fn copy(tid: u32, to: *mut MemoryPages) {
    // SAFETY: the caller's promise; a map value pointer, valid while the program runs.
    unsafe {
        (*to).source = MemoryPages::NONE;
        let Some(scratch) = MEMORY_SCRATCH.get_ptr(&tid) else { return };
        let from: *const u64 = (&raw const (*scratch).pages).cast();
        let to: *mut u64 = to.cast();
        for word in 0..size_of::<MemoryPages>() / 8 {
            // Volatile, or LLVM turns it into a call of memcpy, which BPF lacks.
            to.add(word).write_volatile(from.add(word).read_volatile());
        }
    }
}
