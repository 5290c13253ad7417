//! Threads off their CPU: when they leave it, what they were doing, when they could run again, and when they do. A thread
//! of no followed process costs one look-up at each of these.

use aya_ebpf::{
    helpers::{bpf_get_current_comm, bpf_ktime_get_ns},
    programs::TracePointContext,
};
use gctrace_common::{
    config::{AwayEntry, OFF_CPU_WINDOW_NS},
    event::{Header, Kind},
    stack::{Cause, OffCpuEvent},
    stats::Counter,
};

use crate::{
    filter::{still_selected, tgid_tid},
    maps::{AWAY, SHARES, STACK_RING, closed, config, count},
    rubies,
    sample::{Occasion, take},
    walk::Switch,
};

/// `EXIT_DEAD` and `EXIT_ZOMBIE` in `prev_state` (include/linux/sched.h): it never comes back.
const GONE: i64 = 0x30;
/// `TASK_REPORT_MAX` there (Linux 4.14): it could have run on.
const PREEMPTED: i64 = 0x100;
/// `BPF_RB_NO_WAKEUP`.
const NO_WAKEUP: u64 = 1;

/// A CPU goes from one thread to another.
#[inline(always)]
pub fn switched(ctx: &TracePointContext) {
    let config = config();
    // SAFETY: the offsets come from the tracepoint's own format file.
    let (Ok(state), Ok(next)) = (unsafe {
        (
            ctx.read_at::<i64>(config.switch_prev_state as usize),
            ctx.read_at::<u32>(config.switch_next_pid as usize),
        )
    }) else {
        return;
    };
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    // Taking a stack does not return, so it comes last.
    came(next, now);
    let (tgid, tid) = tgid_tid();
    let Some(ruby) = rubies::known(tgid) else { return };
    if closed() || state & GONE != 0 || !still_selected(tgid) {
        return;
    }
    count(Counter::SwitchOuts);
    let preempted = state == 0 || state & PREEMPTED != 0;
    // SAFETY: a map value pointer, valid while the program runs.
    let (image, execs) = unsafe { ((*ruby).image, (*ruby).execs) };
    let away = AwayEntry {
        begin_ns: now,
        wakeup_ns: if preempted { now } else { 0 },
        tgid,
        image,
        execs,
        why: if preempted { OffCpuEvent::PREEMPTED } else { OffCpuEvent::BLOCKED },
        comm: bpf_get_current_comm().unwrap_or_default(),
    };
    if AWAY.insert(&tid, &away, 0).is_err() {
        count(Counter::AwayMapFull);
    }
    if !has_share(now) {
        return count(Counter::OffCpuShed);
    }
    count(Counter::OffCpuStacks);
    take::<Switch, _>(
        ctx,
        &Occasion {
            cause: Cause::OffCpu,
            ts_ns: now,
            tgid,
            tid,
            ruby,
            weight_ns: 0,
            in_kernel: true,
            blocks: false,
            thread: 0,
        },
    );
}

/// Whether this CPU may take one more stack in the window that runs.
#[inline(always)]
fn has_share(now: u64) -> bool {
    let Some(share) = SHARES.get_ptr_mut(0) else { return false };
    // SAFETY: a map value pointer of this CPU; nothing else writes it while interrupts are off.
    unsafe {
        let [begin, taken] = &mut *share;
        if now.wrapping_sub(*begin) >= OFF_CPU_WINDOW_NS {
            *begin = now;
            *taken = 0;
        }
        *taken += 1;
        *taken <= u64::from(config().off_cpu_stacks)
    }
}

/// A thread runs again.
#[inline(always)]
fn came(tid: u32, now: u64) {
    // SAFETY: the value is copied out at once.
    let Some(away) = (unsafe { AWAY.get(&tid).copied() }) else { return };
    // At the end of the run user space reads who is still away.
    if closed() {
        return;
    }
    let _was_there = AWAY.remove(&tid);
    count(Counter::SwitchIns);
    // A thread that ends after its process's leader, or that an exec has cut off.
    // SAFETY: a map value pointer, valid while the program runs.
    let same = rubies::known(away.tgid).is_some_and(|ruby| unsafe { (*ruby).execs } == away.execs);
    if !same {
        return count(Counter::OffCpuOrphan);
    }
    if now.wrapping_sub(away.begin_ns) < config().off_cpu_min_ns {
        return count(Counter::OffCpuShort);
    }
    let Some(mut entry) = STACK_RING.reserve::<OffCpuEvent>(0) else {
        return count(Counter::OffCpuRingFull);
    };
    entry.write(OffCpuEvent {
        header: Header {
            kind: Kind::OffCpu as u32,
            point: away.why,
            tgid: away.tgid,
            tid,
            ts_ns: now,
            seq: 0,
            image: away.image,
            execs: away.execs,
        },
        begin_ns: away.begin_ns,
        wakeup_ns: away.wakeup_ns,
        comm: away.comm,
    });
    entry.submit(NO_WAKEUP);
    count(Counter::OffCpuSubmitted);
}

/// A thread ticks, so it is on its CPU; the kernel may have kept to itself how it got there (`tracepoints_skipped` in the ledger).
#[inline(always)]
pub fn is_here(tid: u32) {
    if config().off_cpu_stacks != 0 && AWAY.remove(&tid).is_ok() {
        count(Counter::OffCpuUnseen);
    }
}

/// A thread becomes runnable.
#[inline(always)]
pub fn woken(ctx: &TracePointContext) {
    // SAFETY: as above.
    let Ok(tid) = (unsafe { ctx.read_at::<u32>(config().wakeup_pid as usize) }) else { return };
    let Some(away) = AWAY.get_ptr_mut(&tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs; the thread itself cannot run meanwhile.
    unsafe {
        if (*away).wakeup_ns == 0 {
            (*away).wakeup_ns = bpf_ktime_get_ns();
        }
    }
}
