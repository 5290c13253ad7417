//! Reports of individual waits and times, and of threads that end.

use core::ops::Range;

use aya_ebpf::{EbpfContext, helpers::generated::bpf_ringbuf_output, programs::ProbeContext};
use gctrace_common::{
    config::StackPath,
    event::{Header, Kind},
    gvl::{
        GvlGate, GvlHold, GvlKey, GvlPath, GvlSpanEvent, GvlState, GvlThread, GvlWaitEvent, STACK_NS, TRAP_NS,
    },
    stack::Cause,
    stats::Counter,
};

use super::locks;
use crate::{
    family::{Family, Probe},
    hit::{Hit, charge},
    maps::{GVL_THREADS, STACK_RING, config, count, count_many},
    request,
    ring::NO_WAKEUP,
    stack::{Occasion, capture},
};

/// Reports what a thread has been doing if it took long: holding the GVL, or being without it.
#[inline(always)]
pub fn span(hit: &Hit, thread: &GvlThread, state: GvlState, now: u64) {
    // In 3.2 a thread can release the GVL without an event.
    let unseen = hit.image.gvl.by == GvlPath::BY_TID && hit.image.gvl.thread_ractor != 0;
    if now.wrapping_sub(thread.since_ns) < config().gvl_span_ns || unseen {
        return;
    }
    count(Counter::GvlLongSpans);
    if hit.gate.level != GvlGate::EVENTS {
        return count(Counter::GvlSpanShed);
    }
    let Some(mut entry) = STACK_RING.reserve::<GvlSpanEvent>(0) else {
        return count(Counter::GvlSpanRingFull);
    };
    entry.write(GvlSpanEvent {
        header: Header {
            kind: Kind::GvlSpan as u32,
            point: 0,
            tgid: hit.tgid,
            // A thread can be made ready by another thread.
            tid: if let GvlState::Running = state { hit.tid } else { thread.header.tid },
            ts_ns: now,
            seq: 0,
            image: hit.index,
            execs: hit.execs,
        },
        begin_ns: thread.since_ns,
        id: thread.id,
        thread: thread.thread,
        comm: thread.comm,
        state: state as u32,
        reserved: 0,
    });
    entry.submit(NO_WAKEUP);
    count(Counter::GvlSpanSubmitted);
}

/// Reports a wait, with the stack of the thread if it has run no Ruby code since it began to wait (`stack`).
#[inline(always)]
pub fn long_wait<F: Family, C: EbpfContext>(
    ctx: &C,
    hit: &Hit,
    thread: &GvlThread,
    hold: &GvlHold,
    ns: Range<u64>,
    stack: bool,
) {
    let (begin_ns, now) = (ns.start, ns.end);
    if hit.gate.level != GvlGate::EVENTS {
        return count(Counter::GvlWaitShed);
    }
    let stack = stack && hit.image.stack.place != StackPath::NONE;
    let Some(mut entry) = STACK_RING.reserve::<GvlWaitEvent>(0) else {
        return count(Counter::GvlWaitRingFull);
    };
    entry.write(GvlWaitEvent {
        header: Header {
            kind: Kind::GvlWait as u32,
            point: 0,
            tgid: hit.tgid,
            tid: hit.tid,
            ts_ns: now,
            seq: 0,
            image: hit.index,
            execs: hit.execs,
        },
        begin_ns,
        id: thread.id,
        thread: thread.thread,
        request_ns: request::current_once(hit.tgid, hit.tid),
        hold: *hold,
        comm: thread.comm,
        stack: u32::from(stack),
        reserved: 0,
    });
    entry.submit(NO_WAKEUP);
    count(Counter::GvlWaitSubmitted);
    if !stack {
        return;
    }
    count(Counter::GvlStacks);
    walk_from::<F, _>(ctx, Cause::GvlWait, hit, thread, now);
}

/// Reports the stack of a thread that releases the GVL.
#[inline(always)]
pub fn holder(ctx: &ProbeContext, hit: &Hit, thread: &GvlThread, now: u64) {
    if hit.gate.level != GvlGate::EVENTS || hit.image.stack.place == StackPath::NONE {
        return;
    }
    count(Counter::GvlHolderStacks);
    walk_from::<Probe, _>(ctx, Cause::GvlHold, hit, thread, now);
}

/// Takes the stack of the running thread. Does not return if it can be walked.
#[inline(always)]
fn walk_from<F: Family, C: EbpfContext>(ctx: &C, cause: Cause, hit: &Hit, thread: &GvlThread, now: u64) {
    // The walk does not return here.
    charge(now, Some(hit.ruby), TRAP_NS + STACK_NS);
    let (tgid, tid, ruby) = (hit.tgid, hit.tid, hit.ruby);
    let (weight_ns, in_kernel, blocks, thread) = (0, false, false, thread.thread);
    capture::<F, _>(
        ctx,
        &Occasion { cause, ts_ns: now, tgid, tid, ruby, weight_ns, in_kernel, blocks, thread },
    );
}

/// Reports the sums of a thread that ends, and removes its entry.
#[inline(always)]
pub fn end(key: &GvlKey, now: u64) {
    let Some(entry) = GVL_THREADS.get_ptr_mut(key) else { return };
    // SAFETY: a map value pointer, valid while the program runs.
    locks::left(key, unsafe { &*entry });
    // SAFETY: a map value pointer, valid while the program runs. The whole value is copied to the record.
    let sent = unsafe {
        (*entry).header.ts_ns = now;
        bpf_ringbuf_output(
            (&raw const STACK_RING).cast_mut().cast(),
            entry.cast(),
            size_of::<GvlThread>() as u64,
            NO_WAKEUP,
        )
    };
    if sent == 0 {
        count(Counter::GvlThreadSubmitted);
    } else {
        count(Counter::GvlThreadRingFull);
        // SAFETY: as above.
        count_many(Counter::GvlWaitsLost, unsafe { (*entry).waits });
    }
    let _was_there = GVL_THREADS.remove(key);
}
