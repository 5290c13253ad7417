//! Refills: a thread takes the free slots of a heap page, in which it allocates until its next refill.

use aya_ebpf::{
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::ProbeContext,
};
use gctrace_common::{
    config::{ImageConfig, RubyEntry, StackPath, alloc_interval},
    event::{Header, Kind, RefillEvent},
    stack::Cause,
    stats::Counter,
};

use crate::{
    family::Probe,
    filter::{Admitted, admit},
    maps::{STACK_RING, add_one, closed, count, takes_alloc_stacks},
    request,
    ring::NO_WAKEUP,
    rubies,
    stack::{Occasion, capture},
    usermem,
};

/// One refill. The page's counter of free slots is about to be set to zero. The site may be a jump that is also reached on another
/// path, on which there is no page.
#[inline(always)]
pub fn refill(ctx: &ProbeContext) {
    if closed() {
        return;
    }
    let Ok(admitted) = admit(ctx) else { return };
    if admitted.register == 0 {
        return count(Counter::RefillNoPage);
    }
    count(Counter::Refills);
    let Some(ruby) = rubies::known(admitted.tgid) else {
        request::took_slots(admitted.tgid, admitted.tid, None);
        return count(Counter::RefillUnread);
    };
    // Add, then read: a thread holds the GVL of its Ractor here. If two Ractors refill at the same time, the number of one record is
    // too high by one, and the last one is right.
    // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned.
    let (seq, execs) = unsafe {
        let cell = &raw mut (*ruby).refills;
        add_one(cell);
        (cell.read_volatile(), (*ruby).execs)
    };
    let taken = taken(&admitted);
    request::took_slots(admitted.tgid, admitted.tid, taken);
    let Some((slots, slot_size)) = taken else { return count(Counter::RefillUnread) };
    let Some(mut entry) = STACK_RING.reserve::<RefillEvent>(0) else {
        return count(Counter::RefillRingFull);
    };
    // SAFETY: a plain helper call.
    let ts_ns = unsafe { bpf_ktime_get_ns() };
    entry.write(RefillEvent {
        header: Header {
            kind: Kind::Refill as u32,
            point: 0,
            tgid: admitted.tgid,
            tid: admitted.tid,
            ts_ns,
            seq,
            image: admitted.image_index,
            execs,
        },
        slots,
        slot_size,
    });
    entry.submit(NO_WAKEUP);
    count(Counter::RefillSubmitted);
    if takes_alloc_stacks() && admitted.image.stack.place != StackPath::NONE && is_due(ruby, slots, slot_size)
    {
        stack(ctx, &admitted, ruby, ts_ns);
    }
}

/// Whether the bytes since the last stack have reached their random number: each byte is equally likely to have its stack taken.
#[inline(always)]
fn is_due(ruby: *mut RubyEntry, slots: u32, slot_size: u32) -> bool {
    let bytes = u64::from(slots) * u64::from(slot_size);
    // SAFETY: as above; a race of two Ractors drops a stack or adds one. The helper is a plain call.
    unsafe {
        let left = &raw mut (*ruby).alloc_left;
        let before = left.read_volatile();
        if before > bytes {
            left.write_volatile(before - bytes);
            return false;
        }
        left.write_volatile(alloc_interval(bpf_get_prandom_u32()));
    }
    true
}

/// Takes the stack of the thread that needs a slot. Does not return if it can be walked.
#[inline(always)]
fn stack(ctx: &ProbeContext, admitted: &Admitted, ruby: *mut RubyEntry, ts_ns: u64) {
    count(Counter::RefillStacks);
    let (tgid, tid) = (admitted.tgid, admitted.tid);
    capture::<Probe, _>(
        ctx,
        &Occasion {
            cause: Cause::Refill,
            ts_ns,
            tgid,
            tid,
            ruby,
            weight_ns: 0,
            in_kernel: false,
            blocks: false,
            thread: 0,
        },
    );
}

/// Number of slots taken, and the size of each in bytes; `None` if they cannot be read.
#[inline(always)]
fn taken(admitted: &Admitted) -> Option<(u32, u32)> {
    let image = admitted.image;
    let page = admitted.register;
    if image.page_free_slots == 0 {
        return None;
    }
    let slots: u16 = usermem::read(page.wrapping_add(u64::from(image.page_free_slots)))?;
    let size = match image.page_slot_size {
        ImageConfig::RVALUE_SLOTS => ImageConfig::RVALUE_BYTES,
        offset => u32::from(usermem::read::<u16>(page.wrapping_add(u64::from(offset)))?),
    };
    Some((u32::from(slots), size))
}
