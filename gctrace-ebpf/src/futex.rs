//! Waits for the GVL without any probe in the program: each thread waits for it on its own condition variable, so a wait that
//! blocks is a futex call at an address that is found from the thread itself. Holds are not seen, nor are waits that do not block.

use aya_ebpf::{
    EbpfContext,
    helpers::{bpf_get_current_comm, bpf_ktime_get_ns},
    programs::TracePointContext,
};
use gctrace_common::{
    config::ImageConfig,
    gvl::{FutexPath, GOES_ON_NS, GvlGate, GvlHold, GvlKey, GvlPath, GvlState, GvlThread, Step, TRAP_NS},
    stats::Counter,
};

use crate::{
    family::Switch,
    filter::{still_selected, tgid_tid},
    gvl,
    hit::{Hit, charge},
    maps::{self, GVL_THREADS, closed, config, count, gvl_closed, gvl_gate},
    rubies, thread, usermem, walk,
};

/// Offsets of the words in a glibc condition variable on which its waiters wait: `__g_signals` since 2.25 (two words lower since 2.41, which
/// has no `__g_refs`; sysdeps/nptl/bits/thread-shared-types.h), `__futex` before.
const WAITED_ON: [u64; 5] = [40, 44, 32, 36, 4];
/// `sizeof(pthread_cond_t)` of glibc.
const COND_BYTES: u64 = 48;

/// A thread enters a futex call.
#[inline(always)]
pub fn entered(ctx: &TracePointContext) {
    /// The flags of an operation, which `FUTEX_CMD_MASK` removes (include/uapi/linux/futex.h).
    const FLAGS: u64 = 128 | 256;
    const FUTEX_WAIT: u64 = 0;
    const FUTEX_WAIT_BITSET: u64 = 9;
    let config = config();
    // SAFETY: the offsets come from the tracepoint's own format file.
    let (Ok(operation), Ok(address)) = (unsafe {
        (ctx.read_at::<u64>(config.futex_op as usize), ctx.read_at::<u64>(config.futex_address as usize))
    }) else {
        return;
    };
    let operation = operation & 0xffff_ffff & !FLAGS;
    if operation != FUTEX_WAIT && operation != FUTEX_WAIT_BITSET {
        return;
    }
    let Some((mut hit, now)) = hit() else { return };
    let path = &hit.image.gvl.futex;
    let Some(thread) = waiter(hit.image, hit.bias, address) else { return };
    if asleep(path, thread) {
        return count(Counter::GvlSleeps);
    }
    // Read after that check: another thread may have put a thread that goes to sleep into the queue while this program ran, and the thread
    // did not wait before (`thread_sched_to_ready_common`, thread_pthread.c, which reports `READY` first).
    // SAFETY: a plain helper call.
    let begin_ns = unsafe { bpf_ktime_get_ns() };
    hit.thread = thread;
    count(Counter::GvlHits);
    if hit.gate.level == GvlGate::CLOSED {
        return count(Counter::GvlShed);
    }
    let Some(entry) = gvl::entry(&hit, begin_ns) else { return count(Counter::GvlThreadMapFull) };
    // SAFETY: a map value pointer, valid while the program runs; only the thread itself writes there.
    begins(ctx, &hit, unsafe { &mut *entry }, begin_ns);
    charge(now, Some(hit.ruby), TRAP_NS);
}

#[inline(always)]
fn begins(ctx: &TracePointContext, hit: &Hit, thread: &mut GvlThread, now: u64) {
    interrupted(hit, thread, now);
    count(Counter::GvlReady);
    if thread.state == GvlState::Ready as u32 {
        if thread.left_ns == 0 || now.wrapping_sub(thread.left_ns) < GOES_ON_NS {
            thread.left_ns = 0;
            return count(Counter::GvlYields);
        }
        // It had acquired the GVL after all. The stack that it had then is no longer known.
        let until_ns = thread.left_ns;
        ends(ctx, hit, thread, until_ns, false);
    }
    count(match thread.ready(now) {
        Step::Orphan => Counter::GvlOrphanReady,
        _ => Counter::GvlAways,
    });
    thread.thread = hit.thread;
}

/// A thread leaves a futex call.
#[inline(always)]
pub fn left(ctx: &TracePointContext) {
    let Some((mut hit, now)) = hit() else { return };
    let Some(entry) = GVL_THREADS.get_ptr_mut(&hit.key) else { return };
    // SAFETY: as above.
    let thread = unsafe { &mut *entry };
    if hit.gate.level == GvlGate::CLOSED || thread.epoch != hit.gate.epoch {
        return;
    }
    if thread.state != GvlState::Ready as u32 || thread.left_ns != 0 {
        return;
    }
    hit.thread = thread.thread;
    if waits_on(&hit.image.gvl.futex, thread.thread) {
        thread.left_ns = now;
        return charge(now, Some(hit.ruby), TRAP_NS);
    }
    ends(ctx, &hit, thread, now, true);
    charge(now, Some(hit.ruby), TRAP_NS);
}

/// A thread ends. If it last woke while the GVL had a holder, it acquired the GVL without another futex call: its wait ended when it woke.
#[inline(always)]
pub fn thread_ended<C: EbpfContext>(ctx: &C) {
    let Some((mut hit, now)) = hit() else { return };
    let Some(entry) = GVL_THREADS.get_ptr_mut(&hit.key) else { return };
    // SAFETY: as above.
    let thread = unsafe { &mut *entry };
    if hit.gate.level == GvlGate::CLOSED || thread.epoch != hit.gate.epoch {
        return;
    }
    if thread.state != GvlState::Ready as u32 || thread.left_ns == 0 {
        return;
    }
    hit.thread = thread.thread;
    let until_ns = thread.left_ns;
    ends(ctx, &hit, thread, until_ns, false);
    charge(now, Some(hit.ruby), TRAP_NS);
}

/// A wait is over. Does not return if a stack is taken.
#[inline(always)]
fn ends<C: EbpfContext>(ctx: &C, hit: &Hit, thread: &mut GvlThread, until_ns: u64, stack: bool) {
    let begin_ns = thread.since_ns;
    let Step::Paired(ns) = thread.waited(until_ns) else { return };
    count(Counter::GvlHits);
    count(Counter::GvlResumed);
    thread.header.tid = hit.tid;
    thread.comm = bpf_get_current_comm().unwrap_or_default();
    if gvl::waited(thread, ns) {
        gvl::long_wait::<Switch, _>(ctx, hit, thread, &GvlHold::default(), begin_ns..until_ns, stack);
    }
}

/// The hit of the running thread and the time, if the thread belongs to a Ruby whose GVL is watched this way.
#[inline(always)]
fn hit() -> Option<(Hit, u64)> {
    let (tgid, tid) = tgid_tid();
    let ruby = rubies::known(tgid)?;
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a map value pointer, valid while the program runs.
    let (execs, index, bias) = unsafe { ((*ruby).execs, (*ruby).image, (*ruby).bias) };
    let image = maps::image(index)?;
    if image.gvl.by != GvlPath::BY_FUTEX || closed() || !still_selected(tgid) {
        return None;
    }
    let key = GvlKey { at: u64::from(tid), tgid, execs };
    let gate = gvl_gate();
    Some((Hit { tgid, tid, execs, index, image, bias, ruby, key, thread: 0, lock: 0, gate }, now))
}

/// The gate was closed in between.
#[inline(always)]
fn interrupted(hit: &Hit, thread: &mut GvlThread, now: u64) {
    if thread.epoch == hit.gate.epoch {
        return;
    }
    count(Counter::GvlInterrupted);
    let closed_ns = gvl_closed(thread.epoch);
    let left_ns = thread.left_ns;
    let until_ns = if left_ns != 0 && left_ns < closed_ns { left_ns } else { closed_ns };
    thread.interrupted(until_ns, now, hit.gate.epoch);
    thread.left_ns = 0;
}

/// The running thread's `rb_thread_t *`, if the futex is that of the condition variable on which it waits for the GVL.
#[inline(always)]
fn waiter(image: &ImageConfig, bias: u64, address: u64) -> Option<u64> {
    let path = &image.gvl.futex;
    if path.native != 0 {
        let (_, thread) = walk::context(&image.stack, bias)?;
        let cond = word(thread, path.native)?.wrapping_add(u64::from(path.cond));
        return if address.wrapping_sub(cond) < COND_BYTES { Some(thread) } else { None };
    }
    // The context of the running thread cannot be found if the VM has only that of the GVL's holder (up to 2.7). But the
    // thread identifies itself: around its own condition variable are its own `pthread_t` (glibc's is the thread pointer) and a
    // context that points back.
    let pointer = thread::pointer()?;
    for at in WAITED_ON {
        let thread = address.wrapping_sub(at).wrapping_sub(u64::from(path.cond));
        if word(thread, path.thread_id) == Some(pointer) {
            let context = word(thread, image.stack.thread_ec)?;
            let back = word(context, image.stack.ec_thread)?;
            return if back == thread { Some(thread) } else { None };
        }
    }
    None
}

/// Whether a thread that blocks on its condition variable does so for another reason than the GVL.
#[inline(always)]
fn asleep(path: &FutexPath, thread: u64) -> bool {
    if path.ready != 0 {
        return !queued(path, thread);
    }
    // "we must not be in ubf_list and GVL waitq at the same time" (thread_pthread.c).
    word(thread, path.unblock) != Some(0)
}

/// Whether a thread is in the list of those that wait for the GVL (3.3 and later). The thread that hands over the GVL removes it.
#[inline(always)]
fn queued(path: &FutexPath, thread: u64) -> bool {
    // A node that is in no list points at itself, or nowhere if it never was.
    let node = thread.wrapping_add(u64::from(path.ready));
    word(node, 0).is_some_and(|next| next != 0 && next != node)
}

/// Whether a thread that woke continues to wait: it is still queued, or the GVL has a holder.
#[inline(always)]
fn waits_on(path: &FutexPath, thread: u64) -> bool {
    if path.ready != 0 {
        return queued(path, thread);
    }
    // Up to 3.2 the first thread to come acquires the GVL, and one of the waiting threads wakes at intervals for the time slices.
    word(thread, path.owner_in).and_then(|at| word(at, path.owner)).is_some_and(|owner| owner != 0)
}

#[inline(always)]
fn word(at: u64, offset: u32) -> Option<u64> {
    usermem::read(at.wrapping_add(u64::from(offset)))
}
