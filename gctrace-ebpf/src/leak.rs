//! `gctrace heap --leaks`: refills, some of whose objects are followed ([`gctrace_common::leak`]).

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_attach_cookie, bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::ProbeContext,
};
use gctrace_common::{
    cookie::Cookie,
    leak::{LEAK_SLOTS, LeakCount, LeakPage, LeakSlot},
    malloc::malloc_epoch,
    stack::Cause,
};

use crate::{
    family::Probe,
    filter::tgid_tid,
    maps::{LEAK_PAGES, LEAK_TALLIES, LEAK_TARGET, NO_EXIST, add_one, closed, config},
    rubies,
    stack::{Occasion, capture},
    usermem,
};

/// One refill. As in [`alloc`](crate::alloc), the page still has its list of free slots.
#[inline(always)]
pub fn refill(ctx: &ProbeContext) {
    // Without cookies the kernel does not say which register holds the page: then nothing is attached.
    if config().has_cookie == 0 || closed() {
        return;
    }
    let Some(&target) = LEAK_TARGET.get(0) else { return };
    let (tgid, tid) = tgid_tid();
    if tgid != target.tgid {
        return count(LeakCount::OtherHits);
    }
    count(LeakCount::Hits);
    // SAFETY: a plain helper call with the program's own context.
    let cookie = Cookie::unpack(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    let page = usermem::register(ctx, cookie.register);
    if page == 0 {
        return count(LeakCount::NoPage);
    }
    let Some(first) = usermem::read::<u64>(page.wrapping_add(u64::from(target.freelist))) else {
        return count(LeakCount::Unread);
    };
    let Some(ruby) = rubies::known(tgid) else { return count(LeakCount::Unread) };
    // No slot is handed out.
    if first == 0 {
        return;
    }
    let body = first & !u64::from(target.page.wrapping_sub(1));
    let entry = LEAK_PAGES.get_ptr_mut(&body);
    let empty = match entry {
        Some(entry) => !look(entry),
        None => false,
    };
    // SAFETY: a plain helper call.
    if unsafe { bpf_get_prandom_u32() } & target.mask != 0 {
        if empty {
            let _gone = LEAK_PAGES.remove(&body);
        }
        return;
    }
    count(LeakCount::Drawn);
    if usermem::read::<u64>(first) != Some(0) {
        return count(LeakCount::NotFree);
    }
    // SAFETY: as above.
    let ts_ns = unsafe { bpf_ktime_get_ns() };
    if !follow(entry, body, LeakSlot { address: first, ts_ns }) {
        return;
    }
    count(LeakCount::Followed);
    // User space caches the names of frames for an epoch; no GC probe counts the epochs here.
    let epoch = match (usermem::read::<u64>(target.gc_count), usermem::read::<u32>(target.flags)) {
        (Some(gc_count), Some(flags)) => {
            malloc_epoch(gc_count, (flags & target.mode_mask) >> (target.mode_shift & 31))
        }
        _ => ts_ns,
    };
    // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned.
    unsafe { (&raw mut (*ruby).epoch).write_volatile(epoch) };
    capture::<Probe, _>(
        ctx,
        &Occasion {
            cause: Cause::Refill,
            ts_ns,
            tgid,
            tid,
            ruby,
            weight_ns: first,
            in_kernel: false,
            blocks: false,
            thread: 0,
        },
    );
}

/// Removes followed objects that were freed since the page was last taken. Returns whether any are left. One thread at a time takes a page.
#[inline(always)]
fn look(entry: *mut LeakPage) -> bool {
    let mut left = false;
    for index in 0..LEAK_SLOTS {
        // SAFETY: a map value pointer, valid while the program runs; the index is within its bounds.
        let slot = unsafe { &raw mut (*entry).slots[index] };
        // SAFETY: as above.
        let address = unsafe { (*slot).address };
        if address == 0 {
            continue;
        }
        match usermem::read::<u64>(address) {
            Some(0) => count(LeakCount::Freed),
            None => count(LeakCount::Gone),
            Some(_) => {
                left = true;
                continue;
            }
        }
        // SAFETY: as above.
        unsafe { (*slot).address = 0 };
    }
    left
}

/// Starts to follow an object if there is room. Returns whether there was.
#[inline(always)]
fn follow(entry: Option<*mut LeakPage>, body: u64, object: LeakSlot) -> bool {
    let Some(entry) = entry else {
        let mut page = LeakPage { slots: [LeakSlot { address: 0, ts_ns: 0 }; LEAK_SLOTS] };
        page.slots[0] = object;
        let added = LEAK_PAGES.insert(&body, &page, NO_EXIST).is_ok();
        if !added {
            count(LeakCount::MapFull);
        }
        return added;
    };
    for index in 0..LEAK_SLOTS {
        // SAFETY: as above.
        let slot = unsafe { &raw mut (*entry).slots[index] };
        // SAFETY: as above.
        if unsafe { (*slot).address } == 0 {
            // The address is written last: it marks the entry as valid.
            // SAFETY: as above.
            unsafe {
                (&raw mut (*slot).ts_ns).write_volatile(object.ts_ns);
                (&raw mut (*slot).address).write_volatile(object.address);
            }
            return true;
        }
    }
    count(LeakCount::PageFull);
    false
}

#[inline(always)]
fn count(what: LeakCount) {
    if let Some(cell) = LEAK_TALLIES.get_ptr_mut(what as u32) {
        // SAFETY: a map value pointer, 8-byte aligned. Atomic, because a uprobe program can be preempted on its CPU by another one.
        unsafe { add_one(cell) };
    }
}
