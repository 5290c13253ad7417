//! Two occasions at which a stack is taken: a tick of the sampling clock, and the start of a GC cycle.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    programs::{PerfEventContext, ProbeContext},
};
use gctrace_common::{config::StackPath, gvl::STACK_NS, stack::Cause, stats::Counter};

use crate::{
    family::{Probe, Tick},
    filter::{Admitted, still_selected, tgid_tid},
    gvl,
    hit::charge,
    maps::{STACK_RING, closed, config, count},
    offcpu,
    ring::FORCE_WAKEUP,
    rubies,
    stack::{Occasion, capture},
    usermem,
};

/// The sampling clock ticked. Anything but a followed Ruby (including idle and kernel threads) costs one lookup.
#[inline(always)]
pub fn tick(ctx: &PerfEventContext) {
    let (tgid, tid) = tgid_tid();
    let Some(ruby) = rubies::known(tgid) else { return };
    if closed() || !still_selected(tgid) {
        return;
    }
    let weight_ns = config().tick_ns;
    let blocks = gvl::blocks(tid);
    if weight_ns == 0 && !blocks {
        return count(Counter::TicksUnwanted);
    }
    count(Counter::Ticks);
    offcpu::is_here(tid);
    // SAFETY: a plain helper call.
    let ts_ns = unsafe { bpf_ktime_get_ns() };
    if weight_ns == 0 {
        count(Counter::GvlBlockers);
        charge(ts_ns, Some(ruby), STACK_NS);
    }
    let in_kernel = usermem::tick_in_kernel(ctx);
    let (cause, thread) = (Cause::CpuClock, 0);
    capture::<Tick, _>(
        ctx,
        &Occasion { cause, ts_ns, tgid, tid, ruby, weight_ns, in_kernel, blocks, thread },
    );
}

/// A cycle starts because of what the thread was doing: takes its stack. Does not return if the stack can be walked.
#[inline(always)]
pub fn trigger(ctx: &ProbeContext, admitted: &Admitted, ts_ns: u64) {
    if admitted.image.stack.place == 0 {
        return;
    }
    let Some(ruby) = rubies::known(admitted.tgid) else { return };
    count(Counter::TriggerStacks);
    let (tgid, tid) = (admitted.tgid, admitted.tid);
    capture::<Probe, _>(
        ctx,
        &Occasion {
            cause: Cause::GcStart,
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

/// The process is about to end: user space must read the names for its stacks now. Only the wakeup needs the record, which is discarded.
#[inline(always)]
pub fn last_chance(admitted: &Admitted) {
    if admitted.image.stack.place == StackPath::NONE || rubies::known(admitted.tgid).is_none() {
        return;
    }
    if let Some(entry) = STACK_RING.reserve::<u64>(0) {
        entry.discard(FORCE_WAKEUP);
    }
}
