//! `gctrace malloc`: memory that CRuby allocates, added up without a record per call. The stack is taken for some calls, which are
//! sampled by their size.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_attach_cookie, bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::ProbeContext,
};
use gctrace_common::{
    malloc::{
        MallocBlock, MallocCookie, MallocCount, MallocPending, MallocPlace, MallocTarget, malloc_age,
        malloc_age_index, malloc_class, malloc_count_index, malloc_epoch, malloc_is_sampled,
        malloc_size_index, malloc_stands_for,
    },
    stack::Cause,
};

use crate::{
    family::Probe,
    filter::tgid_tid,
    maps::{
        MALLOC_LIVE, MALLOC_PENDING, MALLOC_TALLIES, MALLOC_TARGET, NO_EXIST, add, add_one, closed, config,
    },
    rubies,
    stack::{Occasion, capture},
    usermem,
};

const MALLOC: u8 = MallocPlace::Malloc as u8;
const CALLOC: u8 = MallocPlace::Calloc as u8;
const REALLOC_BEGIN: u8 = MallocPlace::ReallocBegin as u8;
const REALLOC_END: u8 = MallocPlace::ReallocEnd as u8;
const FREE: u8 = MallocPlace::Free as u8;
/// Number of `realloc` among the functions ([`malloc_size_index`]).
const REALLOC_FUNCTION: u32 = 2;

/// A call, and when its stack is to be taken (`ts_ns`, 0: it is not).
#[derive(Clone, Copy)]
struct Drawn {
    ts_ns: u64,
    tid: u32,
    size: u64,
}

impl Drawn {
    /// The entry of the memory that the call has handed out.
    #[inline(always)]
    fn block(self, born: u64) -> MallocBlock {
        MallocBlock { size: self.size, born, sampled_ns: self.ts_ns, tid: self.tid, reserved: 0 }
    }
}

/// One hit.
#[inline(always)]
pub fn hit(ctx: &ProbeContext) {
    // Without cookies the kernel does not say which place was hit: then nothing is attached.
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
    let drawn = match cookie.place {
        MALLOC | CALLOC => {
            let size = registers.preserved(cookie.size);
            allocated(&target, u32::from(cookie.place), registers.result, draw(&target, tid, size))
        }
        REALLOC_BEGIN => {
            realloc_begins(tid, registers.first, registers.second);
            return;
        }
        REALLOC_END => realloc_ends(&target, tid, registers.result),
        FREE => return freed(&target, registers.first),
        _ => return,
    };
    if drawn.ts_ns != 0 {
        stack(ctx, &target, drawn);
    }
}

/// Decides whether the stack of a call of that size is taken.
#[inline(always)]
fn draw(target: &MallocTarget, tid: u32, size: u64) -> Drawn {
    // SAFETY: a plain helper call.
    let wanted =
        target.period != 0 && malloc_is_sampled(unsafe { bpf_get_prandom_u32() }, size, target.period);
    // SAFETY: as above.
    let ts_ns = if wanted { unsafe { bpf_ktime_get_ns() } } else { 0 };
    Drawn { ts_ns, tid, size }
}

/// A failed call: no stack is taken.
const FAILED: Drawn = Drawn { ts_ns: 0, tid: 0, size: 0 };

/// Takes the stack of the call. Does not return if it can be walked.
#[inline(always)]
fn stack(ctx: &ProbeContext, target: &MallocTarget, drawn: Drawn) {
    tally(malloc_count_index(MallocCount::Sampled), malloc_stands_for(drawn.size, target.period));
    let Some(ruby) = rubies::known(target.tgid) else { return };
    // User space caches the names of frames for an epoch; no GC probe counts the epochs here.
    let epoch = match (usermem::read::<u64>(target.gc_count), usermem::read::<u32>(target.flags)) {
        (Some(gc_count), Some(flags)) => {
            malloc_epoch(gc_count, (flags & target.mode_mask) >> (target.mode_shift & 31))
        }
        _ => drawn.ts_ns,
    };
    // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned.
    unsafe { (&raw mut (*ruby).epoch).write_volatile(epoch) };
    capture::<Probe, _>(
        ctx,
        &Occasion {
            cause: Cause::Malloc,
            ts_ns: drawn.ts_ns,
            tgid: target.tgid,
            tid: drawn.tid,
            ruby,
            weight_ns: drawn.size,
            in_kernel: false,
            blocks: false,
            thread: 0,
        },
    );
}

#[inline(always)]
fn allocated(target: &MallocTarget, function: u32, pointer: u64, drawn: Drawn) -> Drawn {
    if pointer == 0 {
        count(MallocCount::Failed);
        return FAILED;
    }
    tally(malloc_size_index(function, malloc_class(drawn.size)), drawn.size);
    match usermem::read::<u64>(target.gc_count) {
        None => count(MallocCount::Unread),
        Some(born) if follow(pointer, &drawn.block(born)) => count(MallocCount::Followed),
        Some(_) => count(MallocCount::Overflow),
    }
    drawn
}

/// Starts to follow memory that has just been handed out or moved. Returns `false` if the map is full.
#[inline(always)]
fn follow(pointer: u64, block: &MallocBlock) -> bool {
    if MALLOC_LIVE.insert(&pointer, block, NO_EXIST).is_ok() {
        return true;
    }
    if MALLOC_LIVE.get_ptr(&pointer).is_none() {
        return false;
    }
    // The memory that was there before has been freed in a way that is not watched.
    count(MallocCount::Replaced);
    MALLOC_LIVE.insert(&pointer, block, 0).is_ok()
}

/// Removes the entry of memory that is about to be freed or moved: afterwards another thread may get the address.
#[inline(always)]
fn take(pointer: u64) -> Option<MallocBlock> {
    // SAFETY: a map value pointer, valid while the program runs; only the thread that frees memory uses it.
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
        None => MallocBlock { size: 0, born: MallocPending::UNKNOWN, sampled_ns: 0, tid: 0, reserved: 0 },
    };
    let pending = MallocPending { pointer, size, block };
    if MALLOC_PENDING.insert(&tid, &pending, 0).is_err() && block.born != MallocPending::UNKNOWN {
        count(MallocCount::Lost);
    }
}

#[inline(always)]
fn realloc_ends(target: &MallocTarget, tid: u32, pointer: u64) -> Drawn {
    // SAFETY: a map value pointer, valid while the program runs; only this thread uses its entry.
    let Some(pending) = MALLOC_PENDING.get_ptr(&tid).map(|pending| unsafe { *pending }) else {
        count(MallocCount::ReallocsUnpaired);
        return FAILED;
    };
    let _gone = MALLOC_PENDING.remove(&tid);
    let known = pending.block.born != MallocPending::UNKNOWN;
    let drawn = if pointer != 0 {
        tally(malloc_size_index(REALLOC_FUNCTION, malloc_class(pending.size)), pending.size);
        if !known {
            count(MallocCount::ReallocsUnknown);
        }
        draw(target, tid, pending.size)
    } else {
        count(MallocCount::Failed);
        FAILED
    };
    if known {
        // Memory keeps its birth when it is moved, as with `USE_GC_MALLOC_OBJ_INFO_DETAILS` (gc.c), and belongs to the call that gave
        // it its size; if the call fails, the memory stays as it was.
        let (place, block) = if pointer == 0 {
            (pending.pointer, pending.block)
        } else {
            (pointer, drawn.block(pending.block.born))
        };
        if !follow(place, &block) {
            count(MallocCount::Lost);
        }
    }
    drawn
}

/// Adds one call and its bytes to a tally.
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
