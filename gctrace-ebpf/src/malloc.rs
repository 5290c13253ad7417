//! `gctrace malloc`: memory that CRuby allocates, added up without a record per call.

use aya_ebpf::{EbpfContext as _, helpers::bpf_get_attach_cookie, programs::ProbeContext};
use gctrace_common::malloc::{
    MallocBlock, MallocCookie, MallocCount, MallocPending, MallocPlace, MallocTarget, malloc_age,
    malloc_age_index, malloc_class, malloc_count_index, malloc_size_index,
};

use crate::{
    filter::tgid_tid,
    maps::{MALLOC_LIVE, MALLOC_PENDING, MALLOC_TALLIES, MALLOC_TARGET, add, add_one, closed, config},
    usermem,
};

/// `BPF_NOEXIST` (include/uapi/linux/bpf.h).
const BPF_NOEXIST: u64 = 1;

const MALLOC: u8 = MallocPlace::Malloc as u8;
const CALLOC: u8 = MallocPlace::Calloc as u8;
const REALLOC_BEGIN: u8 = MallocPlace::ReallocBegin as u8;
const REALLOC_END: u8 = MallocPlace::ReallocEnd as u8;
const FREE: u8 = MallocPlace::Free as u8;
/// The number of `realloc` among the functions.
const REALLOC_FUNCTION: u32 = 2;

/// One hit.
#[inline(always)]
pub fn hit(ctx: &ProbeContext) {
    // Without cookies the kernel does not say which place it is: then nothing is attached.
    if config().has_cookie == 0 || closed() {
        return;
    }
    let Some(&target) = MALLOC_TARGET.get(0) else { return };
    let (tgid, tid) = tgid_tid();
    if tgid != target.tgid {
        return count(MallocCount::OtherHits);
    }
    count(MallocCount::Hits);
    let registers = usermem::call_registers(ctx);
    // SAFETY: a plain helper call with the program's own context.
    let cookie = MallocCookie::unpack(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    match cookie.place {
        MALLOC | CALLOC => {
            let size = registers.preserved(cookie.size);
            allocated(&target, u32::from(cookie.place), registers.result, size);
        }
        REALLOC_BEGIN => realloc_begins(tid, registers.first, registers.second),
        REALLOC_END => realloc_ends(tid, registers.result),
        FREE => freed(&target, registers.first),
        _ => {}
    }
}

#[inline(always)]
fn allocated(target: &MallocTarget, function: u32, pointer: u64, size: u64) {
    if pointer == 0 {
        return count(MallocCount::Failed);
    }
    tally(malloc_size_index(function, malloc_class(size)), size);
    let Some(born) = usermem::read::<u64>(target.gc_count) else { return count(MallocCount::Unread) };
    if follow(pointer, &MallocBlock { size, born }) {
        count(MallocCount::Followed);
    } else {
        count(MallocCount::Overflow);
    }
}

/// Follows memory that has just been handed out, or moved.
#[inline(always)]
fn follow(pointer: u64, block: &MallocBlock) -> bool {
    if MALLOC_LIVE.insert(&pointer, block, BPF_NOEXIST).is_ok() {
        return true;
    }
    if MALLOC_LIVE.get_ptr(&pointer).is_none() {
        return false;
    }
    // What was there before has been freed in a way that is not looked at.
    count(MallocCount::Replaced);
    MALLOC_LIVE.insert(&pointer, block, 0).is_ok()
}

/// Takes memory that is about to be freed or moved: once it is, another thread may get the address.
#[inline(always)]
fn take(pointer: u64) -> Option<MallocBlock> {
    // SAFETY: a map value pointer, valid while the program runs; who frees memory is alone with it.
    let block = MALLOC_LIVE.get_ptr(&pointer).map(|block| unsafe { *block })?;
    let _gone = MALLOC_LIVE.remove(&pointer);
    Some(block)
}

#[inline(always)]
fn freed(target: &MallocTarget, pointer: u64) {
    count(MallocCount::Frees);
    let Some(block) = take(pointer) else { return count(MallocCount::FreesUnknown) };
    let Some(now) = usermem::read::<u64>(target.gc_count) else { return count(MallocCount::Lost) };
    tally(malloc_age_index(malloc_class(block.size), malloc_age(block.born, now)), block.size);
}

#[inline(always)]
fn realloc_begins(tid: u32, pointer: u64, size: u64) {
    let block = match take(pointer) {
        Some(block) => block,
        None => MallocBlock { size: 0, born: MallocPending::UNKNOWN },
    };
    let pending = MallocPending { pointer, size, block };
    if MALLOC_PENDING.insert(&tid, &pending, 0).is_err() && block.born != MallocPending::UNKNOWN {
        count(MallocCount::Lost);
    }
}

#[inline(always)]
fn realloc_ends(tid: u32, pointer: u64) {
    // SAFETY: a map value pointer, valid while the program runs; only this thread uses its entry.
    let Some(pending) = MALLOC_PENDING.get_ptr(&tid).map(|pending| unsafe { *pending }) else {
        return count(MallocCount::ReallocsUnpaired);
    };
    let _gone = MALLOC_PENDING.remove(&tid);
    let known = pending.block.born != MallocPending::UNKNOWN;
    if pointer != 0 {
        tally(malloc_size_index(REALLOC_FUNCTION, malloc_class(pending.size)), pending.size);
        if !known {
            count(MallocCount::ReallocsUnknown);
        }
    } else {
        count(MallocCount::Failed);
    }
    if !known {
        return;
    }
    // Memory keeps its birth when it is moved, as with `USE_GC_MALLOC_OBJ_INFO_DETAILS` (gc.c); where it is not moved it stays as it was.
    let (place, size) =
        if pointer == 0 { (pending.pointer, pending.block.size) } else { (pointer, pending.size) };
    if !follow(place, &MallocBlock { size, born: pending.block.born }) {
        count(MallocCount::Lost);
    }
}

/// Adds a call and its bytes.
#[inline(always)]
fn tally(index: u32, bytes: u64) {
    if let Some(cell) = MALLOC_TALLIES.get_ptr_mut(index) {
        // SAFETY: a map value pointer, 8-byte aligned. Atomic, because a uprobe program can be preempted on its CPU by another one.
        unsafe {
            add_one(&raw mut (*cell).calls);
            add(&raw mut (*cell).bytes, bytes);
        }
    }
}

#[inline(always)]
fn count(what: MallocCount) {
    if let Some(cell) = MALLOC_TALLIES.get_ptr_mut(malloc_count_index(what)) {
        // SAFETY: as above.
        unsafe { add_one(&raw mut (*cell).calls) };
    }
}
