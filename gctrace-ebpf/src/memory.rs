//! The memory counters of the current process, read in the kernel (`mm_struct.rss_stat`), while its thread
//! is stopped at the event: `/proc` would report their values milliseconds later.

use core::mem::MaybeUninit;

use aya_ebpf::helpers::{
    bpf_get_current_task, bpf_probe_read_kernel,
    generated::{bpf_map_lookup_percpu_elem, bpf_probe_read_kernel as probe_read_kernel},
};
use gctrace_common::{
    memory::{
        COUNTERS_BYTES, MAX_COUNTER_BYTES, MAX_SUMMED_CPUS, MEMORY_COUNTERS, MemoryLayout, MemoryPages,
    },
    stats::Counter,
};

use crate::maps::{CPU_PROBE, count, memory_layout};

/// Reads the counters.
///
/// # Safety
/// `pages` must be valid for writing, and `scratch` for [`COUNTERS_BYTES`] and 8 more bytes; both are 8-byte aligned.
#[inline(always)]
pub unsafe fn read(pages: *mut MemoryPages, scratch: *mut u8) {
    let layout = memory_layout();
    // SAFETY: the caller's promise.
    unsafe {
        (*pages).source = MemoryPages::NONE;
        if layout.shape == MemoryLayout::NONE {
            return;
        }
        match counters(&layout, pages, scratch) {
            Some(source) => (*pages).source = source,
            None => count(Counter::MemoryReadFailed),
        }
    }
}

/// # Safety
/// As [`read`].
#[inline(always)]
unsafe fn counters(layout: &MemoryLayout, pages: *mut MemoryPages, scratch: *mut u8) -> Option<u64> {
    // SAFETY: a plain helper call.
    let task = unsafe { bpf_get_current_task() };
    let mm: u64 = kernel(task.wrapping_add(u64::from(layout.task_mm)))?;
    let block = mm.wrapping_add(u64::from(layout.counters));
    // SAFETY: the caller's promise.
    unsafe {
        let mut source = MemoryPages::WHOLE;
        (*pages).counters = if layout.shape == MemoryLayout::WORDS {
            words(layout, task, block)?
        } else {
            copy(layout, block, scratch)?;
            let mut counters = counts(layout, scratch);
            if layout.shape != MemoryLayout::PER_CPU || !in_one_place(layout, scratch) {
                source = MemoryPages::APPROXIMATE;
            } else {
                add_parts(layout, scratch, &mut counters)?;
            }
            counters
        };
        (*pages).peak = kernel(mm.wrapping_add(u64::from(layout.peak)))?;
        Some(source)
    }
}

/// Before Linux 6.2: one word each, plus what the thread has not added to them yet (it does so once in 64 page faults).
#[inline(always)]
fn words(layout: &MemoryLayout, task: u64, block: u64) -> Option<[i64; MEMORY_COUNTERS]> {
    let mut counters: [i64; MEMORY_COUNTERS] = kernel(block)?;
    if layout.pending != 0 {
        let pending: [i32; MEMORY_COUNTERS] = kernel(task.wrapping_add(u64::from(layout.pending)))?;
        for counter in 0..MEMORY_COUNTERS {
            counters[counter] += i64::from(pending[counter]);
        }
    }
    Some(counters)
}

/// Copies the `struct percpu_counter`s.
///
/// # Safety
/// As [`read`].
#[inline(always)]
unsafe fn copy(layout: &MemoryLayout, block: u64, scratch: *mut u8) -> Option<()> {
    if layout.stride > MAX_COUNTER_BYTES {
        return None;
    }
    let len = MEMORY_COUNTERS as u32 * layout.stride;
    // SAFETY: the caller's promise; the helper checks the source.
    match unsafe { probe_read_kernel(scratch.cast(), len, block as *const _) } {
        0 => Some(()),
        _ => None,
    }
}

/// A word of a copied counter.
///
/// # Safety
/// As [`read`], after [`copy`].
#[inline(always)]
unsafe fn field(layout: &MemoryLayout, scratch: *const u8, counter: usize, offset: u32) -> u64 {
    let at = counter * layout.stride as usize + offset as usize;
    // SAFETY: stride and offset are constants for the verifier, which proves the bounds.
    unsafe { scratch.add(at).cast::<u64>().read_volatile() }
}

/// # Safety
/// As [`field`].
#[inline(always)]
unsafe fn counts(layout: &MemoryLayout, scratch: *const u8) -> [i64; MEMORY_COUNTERS] {
    let mut counters = [0; MEMORY_COUNTERS];
    for (counter, value) in counters.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *value = unsafe { field(layout, scratch, counter, layout.count) }.cast_signed();
    }
    counters
}

/// Whether the parts of all counters are adjacent, as they are since Linux 6.6 (`percpu_counter_init_many`): then one read per
/// CPU covers all of them. In 6.2 to 6.5 each counter was allocated separately.
///
/// # Safety
/// As [`field`].
#[inline(always)]
unsafe fn in_one_place(layout: &MemoryLayout, scratch: *const u8) -> bool {
    // SAFETY: the caller's promise.
    let part = |counter| unsafe { field(layout, scratch, counter, layout.parts) };
    let mut expected = part(0);
    let mut together = true;
    for counter in 1..MEMORY_COUNTERS {
        expected = expected.wrapping_add(size_of::<i32>() as u64);
        together &= part(counter) == expected;
    }
    together
}

/// From Linux 6.2 on: adds what each CPU has not added to the counts yet (`__percpu_counter_sum`, lib/percpu_counter.c).
///
/// # Safety
/// As [`read`], after [`copy`].
#[inline(always)]
unsafe fn add_parts(
    layout: &MemoryLayout,
    scratch: *mut u8,
    counters: &mut [i64; MEMORY_COUNTERS],
) -> Option<()> {
    // SAFETY: the caller's promise; `word` is after the copied counters.
    unsafe {
        let word: *mut u64 = scratch.add(COUNTERS_BYTES).cast();
        // A per-CPU pointer plus the CPU's own offset is an address. No symbol that every kernel exports has the offsets, but the
        // elements of a per-CPU map are at such addresses, and its head has the pointer from which they are computed.
        let probe = forget(word, (&raw const CPU_PROBE).cast::<u8>() as u64);
        let base: u64 = kernel(probe.wrapping_add(u64::from(layout.array_parts)))?;
        let parts = field(layout, scratch, 0, layout.parts).wrapping_sub(base);
        // Without a branch on failure: the verifier would walk the rest of the program once for each CPU.
        let mut failed = 0;
        let mut own = MaybeUninit::<[i32; MEMORY_COUNTERS]>::uninit();
        for cpu in 0..MAX_SUMMED_CPUS {
            if cpu >= layout.cpus {
                break;
            }
            let key = 0_u32;
            let map = (&raw const CPU_PROBE).cast_mut().cast();
            let element = bpf_map_lookup_percpu_elem(map, (&raw const key).cast(), cpu);
            let at = forget(word, element as u64).wrapping_add(parts);
            failed |= probe_read_kernel((&raw mut own).cast(), size_of_val(&own) as u32, at as *const _);
            // The helper fills it with zeros on failure.
            let filled = own.assume_init();
            for counter in 0..MEMORY_COUNTERS {
                counters[counter] += i64::from(filled[counter]);
            }
        }
        if failed == 0 { Some(()) } else { None }
    }
}

/// The same number, which the verifier no longer treats as a pointer: it refuses arithmetic that leaves the object that a
/// pointer points to.
///
/// # Safety
/// `word` must be valid for writing and reading.
#[inline(always)]
unsafe fn forget(word: *mut u64, number: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        word.write_volatile(number);
        word.read_volatile()
    }
}

#[inline(always)]
fn kernel<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address; T is made of integers everywhere this is used.
    unsafe { bpf_probe_read_kernel(address as *const T) }.ok()
}
