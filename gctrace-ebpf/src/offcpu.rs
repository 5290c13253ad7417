//! Threads off their CPU: when they leave it, what they were doing, when they became runnable, and when they run again. A thread
//! of a process that is not followed costs one lookup at each of these.
//!
//! If the kernel reports the end of a switch of threads (`sched_exit_tp`, Linux 6.15), the stack is taken then, in the context of the
//! thread that is back: its stack has not changed, and only times that are long enough cost one. `sched_switch` is too early for that: only
//! the memory of the thread that leaves is readable there. Before Linux 6.15 a stack may be taken of each thread that leaves.
//!
//! These are raw tracepoints, which are not skipped when a thread is preempted in a bpf(2) call (`tasks`).

use aya_ebpf::{
    helpers::{bpf_get_current_comm, bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::RawTracePointContext,
};
use gctrace_common::{
    config::{AwayEntry, Returning, RubyEntry, StackPath},
    event::{Header, Kind},
    stack::{Cause, OffCpuEvent},
    stats::Counter,
};

use crate::{
    family::Return,
    filter::{still_selected, tgid_tid},
    gvl,
    maps::{AWAY, RETURNING, SHARES, STACK_RING, any_image, closed, config, count},
    request,
    ring::NO_WAKEUP,
    rubies,
    stack::{Occasion, capture},
    tasks::member,
    walk,
};

/// `TASK_DEAD` in `task_struct.__state` (include/linux/sched.h): it never comes back.
const DEAD: u32 = 0x80;

/// A CPU switches from one thread to another: `sched_switch(bool preempt, task *prev, task *next, …)` (include/trace/events/sched.h).
#[inline(always)]
pub fn switched(ctx: &RawTracePointContext) {
    let config = config();
    if config.task_pid == 0 {
        return;
    }
    let (preempt, previous, next) = (ctx.arg::<u64>(0), ctx.arg::<u64>(1), ctx.arg::<u64>(2));
    let Some(next) = member(next, config.task_pid) else { return };
    // Taking a stack does not return, so it comes last.
    on_cpu_again(next);
    let (tgid, tid) = tgid_tid();
    // Most threads of a host are not watched: nothing more is read for them.
    let Some(ruby) = rubies::known(tgid) else { return };
    let Some(state) = member(previous, config.task_state) else { return };
    if closed() || state & DEAD != 0 || !still_selected(tgid) {
        return;
    }
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    count(Counter::SwitchOuts);
    // A thread that is about to sleep and is preempted first could have continued, and so could one that yields.
    let preempted = preempt & 0xff != 0 || state == 0;
    // SAFETY: a map value pointer, valid while the program runs.
    let (image, execs) = unsafe { ((*ruby).image, (*ruby).execs) };
    let away = AwayEntry {
        begin_ns: now,
        wakeup_ns: if preempted { now } else { 0 },
        tgid,
        image,
        execs,
        why: if preempted { OffCpuEvent::PREEMPTED } else { OffCpuEvent::BLOCKED },
        thread: if config.at_return == 0 { 0 } else { holder(ruby) },
        comm: bpf_get_current_comm().unwrap_or_default(),
    };
    if AWAY.get_ptr(&tid).is_some() {
        count(Counter::OffCpuUnseen);
    }
    if AWAY.insert(&tid, &away, 0).is_err() {
        count(Counter::AwayMapFull);
    }
    if config.at_return != 0 || !is_taken(now) {
        return;
    }
    capture::<Return, _>(
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

/// The `rb_thread_t *` of the thread that leaves its CPU, if it can be found only while the thread holds the GVL, otherwise 0.
#[inline(always)]
fn holder(ruby: *mut RubyEntry) -> u64 {
    // SAFETY: a map value pointer, valid while the program runs.
    let (index, bias) = unsafe { ((*ruby).image, (*ruby).bias) };
    match any_image(index) {
        Some(image) if image.stack.place == StackPath::GLOBAL => {
            walk::context(&image.stack, bias).map_or(0, |(_, thread)| thread)
        }
        _ => 0,
    }
}

/// Whether one more stack may be taken on this CPU.
#[inline(always)]
fn is_taken(now: u64) -> bool {
    count(Counter::OffCpuWanted);
    // SAFETY: a plain helper call.
    let random = unsafe { bpf_get_prandom_u32() };
    // SAFETY: a map value pointer of this CPU; nothing else writes it while interrupts are off.
    let taken = SHARES
        .get_ptr_mut(0)
        .is_some_and(|share| unsafe { (*share).takes(now, u64::from(config().off_cpu_stacks), random) });
    count(if taken { Counter::OffCpuStacks } else { Counter::OffCpuShed });
    taken
}

/// A thread has been switched to on this CPU, and its memory is accessible. Does not return if its stack is taken.
#[inline(always)]
pub fn returned(ctx: &RawTracePointContext) {
    let Some(slot) = RETURNING.get_ptr_mut(0) else { return };
    // SAFETY: a map value pointer of this CPU; only the programs of a switch write it, and this one runs before the next.
    let returning = unsafe {
        if (*slot).tid == 0 {
            return;
        }
        let returning = *slot;
        (*slot).tid = 0;
        returning
    };
    let (tgid, tid) = tgid_tid();
    let ruby = rubies::known(tgid).filter(|_| (tid, tgid) == (returning.tid, returning.tgid));
    let Some(ruby) = ruby else { return count(Counter::StackNotWalked) };
    capture::<Return, _>(
        ctx,
        &Occasion {
            cause: Cause::OffCpu,
            ts_ns: returning.begin_ns,
            tgid,
            tid,
            ruby,
            weight_ns: 0,
            in_kernel: true,
            blocks: false,
            thread: returning.thread,
        },
    );
}

/// Requests the stack of a thread that is about to be switched to on this CPU; returns whether it will be taken.
#[inline(always)]
fn take_at_return(tid: u32, away: &AwayEntry, now: u64) -> bool {
    if config().at_return == 0 || !is_taken(now) {
        return false;
    }
    let Some(slot) = RETURNING.get_ptr_mut(0) else {
        count(Counter::StackNotWalked);
        return false;
    };
    // SAFETY: as above.
    unsafe {
        if (*slot).tid != 0 {
            // The kernel has not reported the return of the previous thread.
            count(Counter::StackNotWalked);
        }
        *slot = Returning { tid, tgid: away.tgid, begin_ns: away.begin_ns, thread: away.thread };
    }
    true
}

/// A thread runs again.
#[inline(always)]
fn on_cpu_again(tid: u32) {
    // SAFETY: the value is copied out at once.
    let Some(away) = (unsafe { AWAY.get(&tid).copied() }) else { return };
    // At the end of the run user space reads the threads that are still off their CPU.
    if closed() {
        return;
    }
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    let _was_there = AWAY.remove(&tid);
    count(Counter::SwitchIns);
    // A thread that ends after its process's leader, or whose program an exec has replaced.
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
    let follows = if take_at_return(tid, &away, now) { OffCpuEvent::STACK_FOLLOWS } else { 0 };
    entry.write(OffCpuEvent {
        header: Header {
            kind: Kind::OffCpu as u32,
            point: away.why | follows,
            tgid: away.tgid,
            tid,
            ts_ns: now,
            seq: 0,
            image: away.image,
            execs: away.execs,
        },
        begin_ns: away.begin_ns,
        wakeup_ns: away.wakeup_ns,
        request_ns: request::current(away.tgid, tid),
        gvl_ns: gvl::waits_since(tid),
        comm: away.comm,
    });
    entry.submit(NO_WAKEUP);
    count(Counter::OffCpuSubmitted);
}

/// A thread ticks, so it is on its CPU; the kernel may not have reported its switch.
#[inline(always)]
pub fn is_here(tid: u32) {
    if config().off_cpu_stacks != 0 && AWAY.remove(&tid).is_ok() {
        count(Counter::OffCpuUnseen);
    }
}

/// A thread becomes runnable: `sched_wakeup(task *)`.
#[inline(always)]
pub fn woken(ctx: &RawTracePointContext) {
    if config().task_pid == 0 {
        return;
    }
    let Some(tid) = member(ctx.arg::<u64>(0), config().task_pid) else { return };
    let Some(away) = AWAY.get_ptr_mut(&tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs; the thread itself cannot run meanwhile.
    unsafe {
        if (*away).wakeup_ns == 0 {
            (*away).wakeup_ns = bpf_ktime_get_ns();
        }
    }
}
