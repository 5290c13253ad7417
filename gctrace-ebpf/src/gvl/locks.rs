//! Who holds a GVL and who waits for it.

use gctrace_common::{
    gvl::{
        GvlEdge, GvlEdgeKey, GvlGate, GvlHold, GvlHolder, GvlKey, GvlLock, GvlState, GvlThread, HOLDS, Step,
    },
    stack::OffCpuEvent,
    stats::Counter,
};

use crate::{
    hit::Hit,
    maps::{
        GVL_BLANK_LOCK, GVL_EDGES, GVL_LOCKS, GVL_TASKS, GVL_THREADS, NO_EXIST, add, add_one, config, count,
        gvl_closed, gvl_gate, take_one,
    },
    usermem, walk,
};

/// A thread requests its GVL. Does nothing if its GVL is not known yet. Only the queue is written here.
#[inline(always)]
pub fn requested(hit: &Hit, thread: &mut GvlThread, now: u64) {
    if thread.queued != 0 || (thread.lock == 0 && hit.thread == 0) {
        return;
    }
    let Some(lock) = find(hit, thread) else { return };
    thread.queued = 1;
    // SAFETY: a map value pointer, valid while the program runs. Several threads can do this at once from 3.3 on; the time is only
    // compared with the threshold.
    unsafe {
        let waiting = &raw mut (*lock).waiting;
        if waiting.read_volatile() == 0 {
            (*lock).waiting_ns = now;
        }
        add_one(waiting);
    }
}

/// A thread has acquired its GVL. Returns the longest hold by another thread during the wait.
#[inline(always)]
pub fn acquired(hit: &Hit, thread: &mut GvlThread, step: Step, begin_ns: u64, now: u64) -> GvlHold {
    let mut hold = GvlHold::default();
    if let Some(lock) = find(hit, thread) {
        // SAFETY: a map value pointer, valid while the program runs; only the holder of the GVL writes there, except to the queue.
        let lock = unsafe { &mut *lock };
        if let Step::Paired(_) = step {
            hold = holders(hit, thread, lock, begin_ns, now);
        }
        begun(hit, thread, lock, now, 0);
        // SAFETY: as above.
        unsafe { add(&raw mut lock.waiting, thread.queued.wrapping_neg()) };
        thread.queued = 0;
        // The time at which the other threads began to wait is unknown: it is now at the latest.
        lock.waiting_ns = now;
    }
    hold
}

/// A thread releases its GVL. Returns whether another thread has been waiting for it for about the threshold.
#[inline(always)]
pub fn released(hit: &Hit, thread: &mut GvlThread, step: Step, begin_ns: u64, now: u64) -> bool {
    let Some(lock) = find(hit, thread) else { return false };
    // SAFETY: as above.
    let lock = unsafe { &mut *lock };
    let at = lock.count.wrapping_sub(1) as usize & (HOLDS - 1);
    let holds: *mut GvlHold = (&raw mut lock.holds).cast();
    // SAFETY: the index is masked to the array.
    let hold = unsafe { &mut *holds.add(at) };
    if hold.holder.id == thread.id {
        hold.end_ns = now;
        // Its name may have changed meanwhile.
        hold.holder.comm = thread.comm;
    } else if let Step::Paired(_) = step {
        // When the thread acquired the GVL, its GVL was not known: a thread of 3.2 has no context when it starts.
        begun(hit, thread, lock, begin_ns, now);
    } else {
        return false;
    }
    // SAFETY: as above.
    let waiting = unsafe { (&raw const lock.waiting).read_volatile() };
    // The other thread waits a little longer, until it runs.
    let threshold_ns = config().gvl_threshold_ns;
    waiting != 0 && now.wrapping_sub(lock.waiting_ns) >= threshold_ns - threshold_ns / 8
}

/// Whether a running thread holds a GVL for which another thread waits.
#[inline(always)]
pub fn blocks(tid: u32) -> bool {
    let gate = gvl_gate();
    if config().gvl == 0 || gate.level != GvlGate::EVENTS {
        return false;
    }
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return false };
    // SAFETY: map value pointers, valid while the program runs. The thread cannot continue meanwhile.
    unsafe {
        let key = (*task).key;
        let Some(thread) = GVL_THREADS.get_ptr_mut(&key) else { return false };
        let holds = (*thread).state == GvlState::Running as u32 && (*thread).header.tid == tid;
        if !holds || (*thread).id != (*task).owner || (*thread).epoch != gate.epoch {
            return false;
        }
        let key = GvlKey { at: (*thread).lock, tgid: key.tgid, execs: key.execs };
        let Some(lock) = GVL_LOCKS.get_ptr_mut(&key) else { return false };
        (*lock).epoch == u64::from(gate.epoch) && (&raw const (*lock).waiting).read_volatile() != 0
    }
}

/// When a thread that is off its CPU began to wait for its GVL: `gvl_ns` of an [`OffCpuEvent`].
#[inline(always)]
pub fn waits_since(tid: u32) -> u64 {
    let gate = gvl_gate();
    if config().gvl == 0 || gate.level != GvlGate::EVENTS {
        return OffCpuEvent::GVL_UNKNOWN;
    }
    let Some(task) = GVL_TASKS.get_ptr_mut(&tid) else { return OffCpuEvent::GVL_UNKNOWN };
    // SAFETY: map value pointers, valid while the program runs. The thread itself cannot continue meanwhile; another one can make it ready.
    unsafe {
        let key = (*task).key;
        let Some(thread) = GVL_THREADS.get_ptr_mut(&key) else { return OffCpuEvent::GVL_UNKNOWN };
        if (*thread).id != (*task).owner || (*thread).epoch != gate.epoch {
            return OffCpuEvent::GVL_UNKNOWN;
        }
        match (&raw const (*thread).state).read_volatile() {
            state if state == GvlState::Ready as u32 => (&raw const (*thread).since_ns).read_volatile(),
            state if state == GvlState::Unknown as u32 => OffCpuEvent::GVL_UNKNOWN,
            _ => OffCpuEvent::GVL_OTHER,
        }
    }
}

/// A thread that may be waiting for its GVL ends.
#[inline(always)]
pub fn left(key: &GvlKey, thread: &GvlThread) {
    if thread.queued == 0 {
        return;
    }
    let key = GvlKey { at: thread.lock, tgid: key.tgid, execs: key.execs };
    if let Some(lock) = GVL_LOCKS.get_ptr_mut(&key) {
        // SAFETY: as above.
        unsafe {
            if (*lock).epoch == u64::from(thread.epoch) {
                take_one(&raw mut (*lock).waiting);
            }
        }
    }
}

/// Records who holds the GVL, and until when.
#[inline(always)]
fn begun(hit: &Hit, thread: &GvlThread, lock: &mut GvlLock, begin_ns: u64, end_ns: u64) {
    let at = lock.count as usize & (HOLDS - 1);
    let holds: *mut GvlHold = (&raw mut lock.holds).cast();
    let holder = GvlHolder { id: thread.id, tid: hit.tid, reserved: 0, comm: thread.comm };
    // SAFETY: the index is masked to the array.
    unsafe { *holds.add(at) = GvlHold { begin_ns, end_ns, holder } };
    lock.count += 1;
}

/// The thread's GVL. A thread keeps its GVL as long as it lives.
#[inline(always)]
fn find(hit: &Hit, thread: &mut GvlThread) -> Option<*mut GvlLock> {
    if thread.lock == 0 {
        thread.lock = ractor(hit).unwrap_or(0);
        if thread.lock == 0 {
            count(Counter::GvlNoLock);
            return None;
        }
    }
    let key = GvlKey { at: thread.lock, tgid: hit.tgid, execs: hit.execs };
    if let Some(lock) = GVL_LOCKS.get_ptr_mut(&key) {
        // SAFETY: a map value pointer, valid while the program runs.
        unsafe { forget_open(&mut *lock, hit.gate.epoch) };
        return Some(lock);
    }
    let blank = GVL_BLANK_LOCK.get(0)?;
    if GVL_LOCKS.insert(&key, blank, NO_EXIST).is_err() {
        count(Counter::GvlLocksFull);
        return None;
    }
    let lock = GVL_LOCKS.get_ptr_mut(&key)?;
    // SAFETY: as above.
    unsafe { (*lock).epoch = u64::from(hit.gate.epoch) };
    Some(lock)
}

/// Ends a hold of an earlier epoch: a thread may have held the GVL when the gate was closed, and the hold is known up to then.
#[inline(always)]
fn forget_open(lock: &mut GvlLock, epoch: u32) {
    if lock.epoch == u64::from(epoch) {
        return;
    }
    let at = lock.count.wrapping_sub(1) as usize & (HOLDS - 1);
    let holds: *mut GvlHold = (&raw mut lock.holds).cast();
    // SAFETY: the index is masked to the array.
    let hold = unsafe { &mut *holds.add(at) };
    if hold.end_ns == 0 {
        hold.end_ns = gvl_closed(lock.epoch as u32);
    }
    // Threads that waited then are registered again.
    lock.waiting = 0;
    lock.epoch = u64::from(epoch);
}

/// The Ractor that the thread belongs to.
#[inline(always)]
fn ractor(hit: &Hit) -> Option<u64> {
    let offset = hit.image.gvl.thread_ractor;
    if offset == 0 {
        return None;
    }
    let thread = match hit.thread {
        0 => walk::context(&hit.image.stack, hit.bias)?.1,
        thread => thread,
    };
    usermem::read(thread.wrapping_add(u64::from(offset)))
}

/// Adds to the time that a thread waited for another thread. Only the waiting thread writes here.
#[inline(always)]
fn edge(hit: &Hit, thread: &GvlThread, holder: u64, ns: u64) {
    let key = GvlEdgeKey { waiter: thread.id, holder, tgid: hit.tgid, execs: hit.execs };
    if let Some(edge) = GVL_EDGES.get_ptr_mut(&key) {
        // SAFETY: a map value pointer, valid while the program runs.
        unsafe {
            (*edge).holds += 1;
            (*edge).wait_ns += ns;
            if ns > (*edge).wait_max_ns {
                (*edge).wait_max_ns = ns;
            }
        }
    } else if GVL_EDGES.insert(&key, &GvlEdge { holds: 1, wait_ns: ns, wait_max_ns: ns }, NO_EXIST).is_err() {
        count(Counter::GvlEdgesFull);
    }
}

/// The same number, if `zero` is zero, which the verifier does not know.
#[inline(always)]
fn unbounded(mut number: u64, zero: u64) -> u64 {
    // SAFETY: an addition. Not `pure`, or LLVM merges the additions of all rounds into one.
    unsafe { core::arch::asm!("{0} += {1}", inout(reg) number, in(reg) zero, options(nomem, nostack)) };
    number
}

/// Adds a wait to the threads that held the GVL meanwhile, and returns the longest of these holds.
#[inline(always)]
fn holders(hit: &Hit, thread: &GvlThread, lock: &GvlLock, begin_ns: u64, now: u64) -> GvlHold {
    let holds: *const GvlHold = (&raw const lock.holds).cast();
    // Zero, but not for the verifier. It learns from each comparison, and a value that was compared more often has different bounds: it followed
    // each history of the loop separately, 450 thousand instructions on Linux 7.2. So values that are carried from round to round are never
    // compared themselves: only their sums with this zero are.
    let zero = now.wrapping_sub(usermem::opaque(now));
    let mut longest_ns = zero;
    let mut longest = zero;
    let mut covered_ns = zero;
    for back in 1..=HOLDS as u64 {
        let at = lock.count.wrapping_sub(back) & (HOLDS as u64 - 1);
        // SAFETY: the index is masked to the array.
        let hold = unsafe { &*holds.add(at as usize) };
        if hold.holder.id == 0 {
            break;
        }
        let (begin_ns, now) = (unbounded(begin_ns, zero), unbounded(now, zero));
        if hold.end_ns != 0 && hold.end_ns <= begin_ns {
            break;
        }
        let ns = hold.overlap(begin_ns, now);
        if hold.holder.id != unbounded(thread.id, zero) && ns > 0 {
            edge(hit, thread, hold.holder.id, ns);
            covered_ns = unbounded(covered_ns.wrapping_add(ns), zero);
            if ns > unbounded(longest_ns, zero) {
                longest_ns = unbounded(ns, zero);
                longest = unbounded(at, zero);
            }
        }
        if hold.begin_ns <= begin_ns {
            break;
        }
    }
    if longest_ns == 0 {
        return GvlHold::default();
    }
    if longest_ns.wrapping_add(covered_ns) < now.wrapping_sub(begin_ns) {
        // The holder is unknown for so long that another thread may have held the GVL for longer.
        count(Counter::GvlHoldersLost);
        return GvlHold::default();
    }
    // SAFETY: as above.
    unsafe { *holds.add(longest as usize & (HOLDS - 1)) }
}
