//! Whether threads of watched programs have a CPU: the states of their native threads in the scheduler, and how these divide
//! the times of their GVL states.
//!
//! These are raw tracepoints. Programs on ordinary ones are skipped when a CPU switches from a thread that was preempted in a bpf(2)
//! call on a map (`bpf_prog_active`, kernel/trace/bpf_trace.c), as gctrace's own threads can be. Still, some kernels do not report every
//! switch (seen on a sandbox's, where those from its own agent are missing in the kernel's own trace, too); a thread then seems to wait for
//! its CPU while it has it. When that is noticed, the CPU time that the kernel has charged replaces the switches not seen (`gvl_switch_unseen`).

use aya_ebpf::{
    helpers::{bpf_get_current_task, bpf_ktime_get_ns, bpf_probe_read_kernel},
    programs::RawTracePointContext,
};
use gctrace_common::{
    gvl::{Clocks, GvlGate, GvlPath, GvlState, GvlTask, GvlThread, OwnTimes, clocks_at, elapsed},
    stats::Counter,
};

use crate::{
    filter::tgid_tid,
    hit::{Hit, charge},
    maps::{
        BLANK_TIMES, GVL_TASKS, GVL_THREADS, OWN_TIMES, any_image, closed, config, count, gvl_closed,
        gvl_gate,
    },
    rubies,
};

/// A CPU switches from one thread to another: `sched_switch(bool preempt, task *prev, task *next, …)` (include/trace/events/sched.h,
/// the same from Linux 4.4 on).
#[inline(always)]
pub fn switched(ctx: &RawTracePointContext) {
    if gvl_gate().level == GvlGate::CLOSED {
        return;
    }
    let (preempt, previous, next) = (ctx.arg::<u64>(0), ctx.arg::<u64>(1), ctx.arg::<u64>(2));
    let (_, tid) = tgid_tid();
    // Most threads of a host are not watched.
    if let Some(task) = GVL_TASKS.get_ptr_mut(&tid) {
        // A thread that is about to sleep and is preempted first could have continued, and so could one that yields.
        let runs_on = preempt & 0xff != 0 || member(previous, config().task_state) == Some(0);
        enter(task, if runs_on { GvlTask::RUNNABLE } else { GvlTask::BLOCKED }, previous);
    }
    if let Some(tid) = member(next, config().task_pid)
        && let Some(task) = GVL_TASKS.get_ptr_mut(&tid)
    {
        enter(task, GvlTask::CPU, next);
    }
}

/// CPU time that the kernel has charged a task, nanoseconds: exact when it is switched to or from, at most a tick old while it runs.
#[inline(always)]
fn charged(task: u64) -> Option<u64> {
    let at = task.wrapping_add(u64::from(config().task_charged)) as *const u64;
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(at) }.ok()
}

/// A word of a `task_struct`.
#[inline(always)]
pub fn member(task: u64, offset: u32) -> Option<u32> {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(task.wrapping_add(u64::from(offset)) as *const u32) }.ok()
}

/// A thread becomes runnable: `sched_wakeup(task *)`.
#[inline(always)]
pub fn woken(ctx: &RawTracePointContext) {
    if gvl_gate().level == GvlGate::CLOSED {
        return;
    }
    let Some(tid) = member(ctx.arg::<u64>(0), config().task_pid) else { return };
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs. A thread that is woken before it has left its CPU continues.
    if unsafe { (*task).state } == GvlTask::BLOCKED {
        enter(task, GvlTask::RUNNABLE, 0);
    }
}

#[inline(always)]
fn enter(task: *mut GvlTask, state: u32, switched: u64) {
    // An entry of a past epoch stays as it was then, until its thread is seen again.
    // SAFETY: a map value pointer, valid while the program runs.
    if closed() || unsafe { (*task).epoch } != gvl_gate().epoch {
        return;
    }
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    let charged = if switched == 0 { None } else { charged(switched) };
    // SAFETY: a map value pointer, valid while the program runs.
    unsafe {
        change(task, |task| {
            if let Some(charged) = charged {
                if state != GvlTask::CPU && task.state != GvlTask::CPU {
                    count(Counter::GvlSwitchUnseen);
                    task.unseen(charged, now);
                }
                task.charged_ns = charged;
            }
            if state == GvlTask::CPU && task.state == GvlTask::BLOCKED {
                count(Counter::GvlSwitchUnseen);
            }
            task.enter(state, now);
        });
        charge(now, rubies::known((*task).key.tgid), 0);
    }
}

/// Changes a task in such a way that a concurrent reader notices.
///
/// # Safety
///
/// `task` is a map value. The scheduler changes a thread's state in one place at a time, and the only other writer is the thread itself
/// while it runs.
#[inline(always)]
unsafe fn change(task: *mut GvlTask, by: impl FnOnce(&mut GvlTask)) {
    // SAFETY: as promised.
    unsafe {
        let seq = &raw mut (*task).seq;
        seq.write_volatile(seq.read_volatile().wrapping_add(1));
        by(&mut *task);
        seq.write_volatile(seq.read_volatile().wrapping_add(1));
    }
}

/// Adds a thread's times up to now to the state that it has been in, and registers its native thread. `own`: it is the running thread.
#[inline(always)]
pub fn sync_task(hit: &Hit, thread: &mut GvlThread, own: bool, now: u64) {
    if config().task_charged == 0 {
        return;
    }
    let tid = if own { hit.tid } else { thread.header.tid };
    if own {
        verified_once_3_has_cpu(u64::from(tid), u64::from(hit.gate.epoch), now);
    }
    let task = GVL_TASKS.get_ptr_mut(&tid);
    if let Some(task) = task {
        // SAFETY: a map value pointer, valid while the program runs; only the thread that runs on it writes these two.
        let held = unsafe { (*task).owner == thread.id && (*task).epoch == hit.gate.epoch };
        // A thread that returns to a native thread after it ran on another one has the clocks of the other one.
        let known = held && thread.header.tid == tid;
        if known {
            let clocks = clocks(task, now);
            thread.report(Some(clocks), now);
            thread.clocks = clocks;
            return;
        }
    }
    // It had no native thread since it was last seen, or has another one now.
    thread.report(None, now);
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
        // SAFETY: a plain helper call.
        charged_ns: charged(unsafe { bpf_get_current_task() }).unwrap_or(0),
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

/// A thread is seen again after the gate was closed at `closed_ns`. Adds what its native thread did until then to the state that it was in.
#[inline(always)]
pub fn interrupted(thread: &mut GvlThread, closed_ns: u64) {
    if config().task_charged == 0 || closed_ns < thread.reported_ns {
        return;
    }
    let Some(task) = GVL_TASKS.get_ptr_mut(&thread.header.tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs. Nothing changes a task of a past epoch.
    let (owner, epoch, clocks) = unsafe { ((*task).owner, (*task).epoch, (*task).clocks_at(closed_ns)) };
    if owner == thread.id && epoch == thread.epoch {
        thread.report(Some(clocks), closed_ns);
    }
}

/// Marks the running thread as being on a CPU, if it has a task of this epoch: a global function, which the verifier walks once and not once
/// per path to it. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_has_cpu(tid: u64, epoch: u64, now: u64) -> u64 {
    if let Some(task) = GVL_TASKS.get_ptr_mut(&(tid as u32))
        // SAFETY: a map value pointer, valid while the program runs.
        && unsafe { (*task).epoch } == epoch as u32
    {
        has_cpu(task, now);
    }
    0
}

/// Marks the task of the running thread as being on a CPU, whether its switch to it was seen or not.
#[inline(always)]
fn has_cpu(task: *mut GvlTask, now: u64) {
    // SAFETY: a map value pointer, valid while the program runs.
    if unsafe { (&raw const (*task).state).read_volatile() } == GvlTask::CPU {
        return;
    }
    // SAFETY: a plain helper call.
    let current = unsafe { bpf_get_current_task() };
    if let Some(charged) = charged(current) {
        count(Counter::GvlSwitchUnseen);
        // SAFETY: a map value pointer, valid while the program runs.
        unsafe { change(task, |task| task.unseen(charged, now)) };
    }
}

/// Copies the times of the running thread, if the states of threads are watched, and returns the epoch in which they began, plus 1.
/// Otherwise returns 0, and the copy is undefined.
///
/// # Safety
/// `to` must be valid for writing and 8-byte aligned.
#[inline(always)]
pub unsafe fn own_times(tid: u32, now: u64, to: *mut OwnTimes) -> u32 {
    let epoch = verified_once_2_own_times(u64::from(tid), now) as u32;
    if epoch == 0 {
        return 0;
    }
    let Some(own) = OWN_TIMES.get_ptr(&tid) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs, and the caller's promise.
    unsafe {
        let from: *const u64 = own.cast();
        let to: *mut u64 = to.cast();
        for word in 0..size_of::<OwnTimes>() / 8 {
            // Volatile, or LLVM turns it into a call of memcpy, which BPF lacks.
            to.add(word).write_volatile(from.add(word).read_volatile());
        }
    }
    epoch
}

/// The same into [`OWN_TIMES`]: a global function, which the verifier walks once and not once per path to it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_own_times(tid: u64, now: u64) -> u64 {
    let gate = gvl_gate();
    if gate.level == GvlGate::CLOSED {
        return 0;
    }
    let Some(task) = GVL_TASKS.get_ptr_mut(&(tid as u32)) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs.
    if unsafe { (*task).epoch } != gate.epoch {
        return 0;
    }
    if OWN_TIMES.get_ptr(&(tid as u32)).is_none() {
        let Some(blank) = BLANK_TIMES.get(0) else { return 0 };
        let _may_be_full = OWN_TIMES.insert(&(tid as u32), blank, 0);
    }
    let Some(own) = OWN_TIMES.get_ptr_mut(&(tid as u32)) else { return 0 };
    has_cpu(task, now);
    let clocks = clocks(task, now);
    // SAFETY: as above; only this thread uses this key.
    let own = unsafe { &mut *own };
    *own = OwnTimes { clocks, ..OwnTimes::UNKNOWN };
    // SAFETY: as above; only the thread that runs on it writes these two.
    let (owner, key) = unsafe { ((*task).owner, (*task).key) };
    if let Some(thread) = GVL_THREADS.get_ptr(&key) {
        // SAFETY: as above.
        let thread = unsafe { &*thread };
        let state = thread.state;
        if thread.id == owner
            && thread.epoch == gate.epoch
            && thread.header.tid == tid as u32
            && state != GvlState::Unknown as u32
        {
            let part = elapsed(&thread.clocks, &clocks);
            for at in 0..3 {
                let (ready, away) = (state == GvlState::Ready as u32, state == GvlState::Away as u32);
                own.waiting[at] =
                    thread.split[GvlState::Ready as usize][at] + if ready { part[at] } else { 0 };
                own.away[at] = thread.split[GvlState::Away as usize][at] + if away { part[at] } else { 0 };
            }
        }
    }
    u64::from(gate.epoch.wrapping_add(1))
}

/// A native thread ends: completes the times of its thread, if the thread still exists, and removes the task.
#[inline(always)]
pub fn ended(tid: u32, now: u64) {
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return };
    // SAFETY: a map value pointer, valid while the program runs.
    let (key, owner, epoch) = unsafe { ((*task).key, (*task).owner, (*task).epoch) };
    let gate = gvl_gate();
    // Time after the gate was closed does not count for the thread.
    let over = gate.level == GvlGate::CLOSED || gate.epoch != epoch;
    let until = if over { gvl_closed(epoch) } else { now };
    if let Some(thread) = GVL_THREADS.get_ptr_mut(&key) {
        // SAFETY: as above.
        let thread = unsafe { &mut *thread };
        // Up to 3.1 a native thread is kept for a while after its thread has ended, and that end is not seen.
        let kept = thread.state == GvlState::Away as u32
            && any_image(thread.header.image)
                .is_some_and(|image| image.gvl.by == GvlPath::BY_TID && image.gvl.thread_ractor == 0);
        let its = thread.id == owner && thread.epoch == epoch && thread.header.tid == tid;
        if its && !kept && thread.reported_ns <= until {
            thread.report(Some(clocks(task, until)), until);
            thread.reported_ns = 0;
        }
    }
    let _was_there = GVL_TASKS.remove(&tid);
}

/// A task's clocks. They may change meanwhile: the reading thread may lose its CPU at any moment, and the scheduler updates those of
/// other threads on other CPUs.
#[inline(always)]
fn clocks(task: *const GvlTask, now: u64) -> Clocks {
    let mut clocks = [0; 3];
    for _ in 0..4 {
        // SAFETY: a map value pointer, valid while the program runs.
        let (before, after) = unsafe {
            let seq = &raw const (*task).seq;
            let before = seq.read_volatile();
            let copy = (&raw const (*task).clocks).read_volatile();
            let state = (&raw const (*task).state).read_volatile();
            clocks = clocks_at(&copy, state, (&raw const (*task).since_ns).read_volatile(), now);
            (before, seq.read_volatile())
        };
        if before == after && before & 1 == 0 {
            break;
        }
    }
    clocks
}
