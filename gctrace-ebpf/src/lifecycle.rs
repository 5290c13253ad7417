//! Fork, exec and exit of followed processes. Other processes cost one map lookup and one map update.
//!
//! Exec and exit are raw tracepoints: to detach from an ordinary one the kernel waits 80 ms and more for each, one after the other
//! (`perf_trace_event_unreg`, kernel/trace/trace_event_perf.c). Fork needs the record of the ordinary tracepoint, which has the child's
//! pid also on kernels without BTF.

use aya_ebpf::{
    helpers::{bpf_get_current_task, bpf_probe_read_kernel},
    programs::{RawTracePointContext, TracePointContext},
};
use gctrace_common::{config::ProcessEntry, event::Kind, stats::Counter};

use crate::{
    emit,
    filter::tgid_tid,
    futex, gc, gvl,
    maps::{PHASES, PROCESSES, SCOPES, config, count, signal_offsets, watches_requests},
    names, request, rubies,
};

/// `CLONE_THREAD` (include/uapi/linux/sched.h): the new task is a thread of the same process.
const CLONE_THREAD: u64 = 0x0001_0000;

/// A child inherits the selection of its parent before it can run.
#[inline(always)]
pub fn forked(ctx: &TracePointContext) -> u32 {
    let (tgid, tid) = tgid_tid();
    // SAFETY: the value is copied out at once.
    let parent = unsafe { PROCESSES.get(&tgid).copied() };
    if parent.is_none() && !names::select()
        || parent.is_some_and(|parent| parent.flags & ProcessEntry::ALONE != 0)
    {
        return 0;
    }
    let config = config();
    // SAFETY: the offsets come from the tracepoint's own format file.
    let (Ok(child), Ok(flags)) = (unsafe {
        (
            ctx.read_at::<i32>(config.newtask_pid as usize),
            ctx.read_at::<u64>(config.newtask_clone_flags as usize),
        )
    }) else {
        return 0;
    };
    if flags & CLONE_THREAD != 0 {
        return 0;
    }
    let child = child as u32;
    let Some(mut parent) = parent else {
        names::forked(tgid, child);
        return 0;
    };
    if !is_only_named(tgid, &parent) {
        // A descendant of a selected Ruby is selected, whatever it becomes.
        parent.flags &= !ProcessEntry::NAMED;
    }
    if PROCESSES.insert(&child, &ProcessEntry { seq: 0, pause_ns: 0, ..parent }, 0).is_err() {
        count(Counter::ProcessMapFull);
    }
    rubies::forked(tgid, child);
    emit::life(Kind::Fork, tgid, tid, parent, rubies::Program::default(), child);
    0
}

/// The program is replaced: the selection stays, the data about the image are removed. `sched_process_exec(task *, pid_t old_pid, …)`
/// (include/trace/events/sched.h, the same from Linux 3.4 on).
#[inline(always)]
pub fn execed(ctx: &RawTracePointContext) {
    let (tgid, tid) = tgid_tid();
    // SAFETY: the value is copied out at once.
    let entry = unsafe { PROCESSES.get(&tgid).copied() };
    names::ended(tgid, entry.is_some_and(|entry| entry.flags & ProcessEntry::SELECTED != 0));
    let named = if names::has_one() { ProcessEntry::SELECTED | ProcessEntry::NAMED } else { 0 };
    let Some(entry) = entry else {
        let entry = ProcessEntry { flags: named, ..ProcessEntry::default() };
        if named != 0 && PROCESSES.insert(&tgid, &entry, 0).is_err() {
            count(Counter::ProcessMapFull);
        }
        return rubies::begun(tgid);
    };
    let mut flags = entry.flags & (ProcessEntry::SELECTED | ProcessEntry::ALONE);
    if flags & ProcessEntry::SELECTED == 0 || is_only_named(tgid, &entry) {
        flags = flags & ProcessEntry::ALONE | named;
    }
    let kept = ProcessEntry { flags, ..ProcessEntry::default() };
    let _cannot_fail_for_an_existing_key = PROCESSES.insert(&tgid, &kept, 0);
    if watches_requests() {
        // A thread that was not the leader has taken over the leader's tid (`de_thread`, fs/exec.c).
        request::execed(tgid, ctx.arg::<u32>(1));
    }
    let program = rubies::program(tgid);
    rubies::begun(tgid);
    rubies::execed(tgid);
    emit::life(Kind::Exec, tgid, tid, entry, program, 0);
}

/// A thread ended. The process has ended, too, if no other thread of it lives. The last thread need not be the leader: the leader ends first
/// if another thread calls exec, which takes over the leader's pid (`de_thread`, fs/exec.c).
#[inline(always)]
pub fn exited(ctx: &RawTracePointContext) {
    let (tgid, tid) = tgid_tid();
    if config().gvl != 0 {
        futex::thread_ended(ctx);
        gvl::thread_ended(tgid, tid);
    }
    if watches_requests() {
        request::thread_ended(tgid, tid);
    }
    // SAFETY: the value is copied out at once.
    let Some(entry) = (unsafe { PROCESSES.get(&tgid).copied() }) else {
        if tgid == tid {
            rubies::gone(tgid);
        }
        if names::select() && is_last(tgid == tid) {
            names::ended(tgid, false);
        }
        return;
    };
    // A thread that is killed in the middle of a collection leaves it open, and its tid may be reused.
    let key = gc::thread_key(tgid, tid);
    let _was_not_there = (SCOPES.remove(&key), PHASES.remove(&key));
    if !is_last(tgid == tid) {
        return;
    }
    // Threads that end at the same time on two CPUs both see that no thread lives.
    if PROCESSES.remove(&tgid).is_err() {
        return;
    }
    names::ended(tgid, entry.flags & ProcessEntry::SELECTED != 0);
    let program = rubies::program(tgid);
    rubies::exited(tgid);
    rubies::gone(tgid);
    emit::life(Kind::Exit, tgid, tid, entry, program, 0);
}

/// Whether a process is selected only because its program has one of the names, and has not proved to be a Ruby. The next program is then
/// selected by its own name, if at all.
#[inline(always)]
fn is_only_named(tgid: u32, entry: &ProcessEntry) -> bool {
    entry.flags & ProcessEntry::NAMED != 0 && rubies::known(tgid).is_none()
}

/// Whether no thread of the process lives any more: `signal->live`, which `do_exit` (kernel/exit.c) decrements before the tracepoint.
/// If it cannot be read, the leader's end counts as that of the process.
#[inline(always)]
fn is_last(leader: bool) -> bool {
    let [signal, live] = signal_offsets();
    if signal == 0 {
        return leader;
    }
    // SAFETY: the helpers check the addresses.
    let threads = unsafe {
        let task = bpf_get_current_task();
        bpf_probe_read_kernel(task.wrapping_add(u64::from(signal)) as *const u64)
            .and_then(|signal| bpf_probe_read_kernel(signal.wrapping_add(u64::from(live)) as *const i32))
    };
    threads.map_or(leader, |threads| threads == 0)
}
