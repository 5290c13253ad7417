//! Whether threads of watched programs have a CPU: what the scheduler does with their native threads, and how that divides
//! what they do with the GVL.

use aya_ebpf::{helpers::bpf_ktime_get_ns, programs::TracePointContext};
use gctrace_common::{
    gvl::{Clocks, GvlPath, GvlState, GvlTask, GvlThread},
    stats::Counter,
};

use crate::{
    filter::tgid_tid,
    gvl::Hit,
    maps::{GVL_TASKS, GVL_THREADS, any_image, closed, config, count, gvl_gate},
};

/// `TASK_REPORT_MAX` in `prev_state` (Linux 4.14): it could have run on.
const PREEMPTED: i64 = 0x100;

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
    let (_, previous) = tgid_tid();
    let preempted = state == 0 || state & PREEMPTED != 0;
    enter(previous, if preempted { GvlTask::RUNNABLE } else { GvlTask::BLOCKED });
    enter(next, GvlTask::CPU);
}

/// A thread becomes runnable.
#[inline(always)]
pub fn woken(ctx: &TracePointContext) {
    // SAFETY: as above.
    let Ok(tid) = (unsafe { ctx.read_at::<u32>(config().wakeup_pid as usize) }) else { return };
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs. A thread that is woken before it has left its CPU goes on.
    if unsafe { (*task).state } == GvlTask::BLOCKED {
        enter(tid, GvlTask::RUNNABLE);
    }
}

#[inline(always)]
fn enter(tid: u32, state: u32) {
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return };
    if closed() {
        return;
    }
    // SAFETY: a map value pointer, valid while the program runs; the scheduler changes a thread's state in one place at a time.
    unsafe {
        let seq = &raw mut (*task).seq;
        seq.write_volatile(seq.read_volatile().wrapping_add(1));
        (*task).enter(state, bpf_ktime_get_ns());
        seq.write_volatile(seq.read_volatile().wrapping_add(1));
    }
}

/// A thread is met, in the state that it has been in so far. `own`: it is the one that runs.
#[inline(always)]
pub fn met(hit: &Hit, thread: &mut GvlThread, own: bool, now: u64) {
    let tid = if own { hit.tid } else { thread.header.tid };
    let task = GVL_TASKS.get_ptr_mut(&tid);
    if let Some(task) = task {
        // SAFETY: a map value pointer, valid while the program runs; only the thread that runs there writes these two.
        let known = unsafe { (*task).owner == thread.id && (*task).epoch == hit.gate.epoch };
        if known {
            let clocks = clocks(task, now);
            thread.told(Some(clocks), now);
            thread.clocks = clocks;
            return;
        }
    }
    // It had no native thread of its own since it was met last, or has got another one.
    thread.told(None, now);
    if !own {
        return;
    }
    if let Some(task) = task
        // SAFETY: as above.
        && unsafe { (*task).epoch } == hit.gate.epoch
    {
        // SAFETY: as above.
        unsafe {
            (*task).owner = thread.id;
            (*task).key = hit.key;
        }
        thread.clocks = clocks(task, now);
        return;
    }
    let task = GvlTask {
        seq: 0,
        since_ns: now,
        clocks: [0; 3],
        owner: thread.id,
        key: hit.key,
        state: GvlTask::CPU,
        epoch: hit.gate.epoch,
    };
    if GVL_TASKS.insert(&tid, &task, 0).is_err() {
        count(Counter::GvlTasksFull);
    }
    thread.clocks = [0; 3];
}

/// A native thread ends: its thread's account is closed, if it is still there.
#[inline(always)]
pub fn ended(tid: u32, now: u64) {
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs.
    let (key, owner, epoch) = unsafe { ((*task).key, (*task).owner, (*task).epoch) };
    if epoch == gvl_gate().epoch
        && let Some(thread) = GVL_THREADS.get_ptr_mut(&key)
    {
        // SAFETY: as above.
        let thread = unsafe { &mut *thread };
        // Up to 3.1 a native thread is kept for a while when its thread has ended, which is not seen.
        let kept = thread.state == GvlState::Away as u32
            && any_image(thread.header.image)
                .is_some_and(|image| image.gvl.by == GvlPath::BY_TID && image.gvl.thread_ractor == 0);
        if thread.id == owner && thread.header.tid == tid && !kept {
            thread.told(Some(clocks(task, now)), now);
            thread.told_ns = 0;
        }
    }
    let _was_there = GVL_TASKS.remove(&tid);
}

/// A task's clocks. It may be changed meanwhile: the thread that asks may lose its CPU at any moment, and another thread's is
/// given on another CPU.
#[inline(always)]
fn clocks(task: *const GvlTask, now: u64) -> Clocks {
    let mut clocks = [0; 3];
    for _ in 0..4 {
        // SAFETY: a map value pointer, valid while the program runs.
        let (before, copy, after) = unsafe {
            let seq = &raw const (*task).seq;
            let before = seq.read_volatile();
            let copy = task.read_volatile();
            (before, copy, seq.read_volatile())
        };
        clocks = copy.clocks_at(now);
        if before == after && before & 1 == 0 {
            break;
        }
    }
    clocks
}
