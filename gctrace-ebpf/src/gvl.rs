//! The GVL: what each thread does with it, added up per thread, and who waits for whom. All events of a thread come in
//! order: the VM makes them under the lock of its scheduler, or on the thread itself.

use core::ops::Range;

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_attach_cookie, bpf_get_current_comm, bpf_get_smp_processor_id, bpf_ktime_get_ns,
        generated::bpf_ringbuf_output,
    },
    programs::ProbeContext,
};
use gctrace_common::{
    config::{ImageConfig, RubyEntry},
    event::{Header, Kind},
    gvl::{
        BUCKETS, GvlCookie, GvlEdge, GvlEdgeKey, GvlGate, GvlHold, GvlHolder, GvlKey, GvlLock, GvlPath,
        GvlPoint, GvlSpanEvent, GvlState, GvlThread, GvlWaitEvent, HOLDS, STACK_NS, Step, TRAP_NS, bucket,
    },
    stack::Cause,
    stats::Counter,
};

use crate::{
    filter::{meet, selected, tgid_tid},
    maps::{
        self, GVL_BLANK, GVL_BLANK_LOCK, GVL_EDGES, GVL_LOCKS, GVL_THREADS, STACK_RING, add, closed, config,
        count, count_many, gvl_closed, gvl_gate,
    },
    rubies,
    sample::{Occasion, take},
    tasks, usermem,
    walk::{self, Family, Probe},
};

/// `BPF_NOEXIST`.
const NO_EXIST: u64 = 1;
/// `BPF_RB_NO_WAKEUP`.
const NO_WAKEUP: u64 = 1;

/// A hit of a process that is watched.
pub struct Hit {
    pub tgid: u32,
    /// Of the thread that runs, which need not be the one that the event is about.
    pub tid: u32,
    pub execs: u32,
    pub index: u32,
    pub image: &'static ImageConfig,
    pub bias: u64,
    pub ruby: *mut RubyEntry,
    /// What the event is about.
    pub key: GvlKey,
    /// Its `rb_thread_t *`, or 0.
    pub thread: u64,
    /// [`GvlKey::at`] of its GVL, or 0.
    pub lock: u64,
    pub gate: GvlGate,
}

/// One hit at a GVL point.
#[inline(always)]
pub fn hit(ctx: &ProbeContext, point: GvlPoint) {
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    if closed() {
        return;
    }
    count(Counter::GvlHits);
    let gate = gvl_gate();
    if gate.level == GvlGate::CLOSED {
        count(Counter::GvlShed);
        return took(now, None, 0);
    }
    let ruby = match find(ctx, point, gate) {
        Ok(hit) => {
            event(ctx, point, &hit, now);
            Some(hit.ruby)
        }
        Err(counter) => {
            count(counter);
            None
        }
    };
    took(now, ruby, TRAP_NS);
}

/// Adds up what the programs cost, from the beginning of a hit until now; for the process that is watched, `more_ns` come to that.
#[inline(always)]
pub fn took(since_ns: u64, ruby: Option<*mut RubyEntry>, more_ns: u64) {
    // SAFETY: a plain helper call.
    let ns = unsafe { bpf_ktime_get_ns() }.wrapping_sub(since_ns);
    count_many(Counter::GvlNs, ns);
    if let Some(ruby) = ruby {
        // SAFETY: a map value pointer, valid while the program runs.
        unsafe { add(&raw mut (*ruby).gvl_ns, ns + more_ns) };
    }
}

#[inline(always)]
fn event(ctx: &ProbeContext, point: GvlPoint, hit: &Hit, now: u64) {
    let gate = hit.gate;
    if let GvlPoint::Exited = point {
        count(Counter::GvlExited);
        if let Some(entry) = GVL_THREADS.get_ptr_mut(&hit.key) {
            // SAFETY: a map value pointer, valid while the program runs.
            let thread = unsafe { &mut *entry };
            if thread.epoch == gate.epoch {
                tasks::met(hit, thread, true, now);
            }
        }
        return end(&hit.key, now);
    }
    if let GvlPoint::Started = point {
        // What has the same key is a thread whose end was not seen.
        end(&hit.key, now);
    }
    let Some(entry) = entry(hit, now) else { return count(Counter::GvlThreadMapFull) };
    // SAFETY: a map value pointer, valid while the program runs; the events of a thread come one after the other.
    let thread = unsafe { &mut *entry };
    if thread.epoch != gate.epoch {
        count(Counter::GvlInterrupted);
        thread.interrupted(gvl_closed(thread.epoch), now, gate.epoch);
        thread.told_ns = now;
    }
    // Who makes a thread ready or starts it need not be that thread.
    let own = match point {
        GvlPoint::Resumed | GvlPoint::Suspended | GvlPoint::Exited => true,
        GvlPoint::Ready | GvlPoint::Started => {
            hit.image.gvl.by == GvlPath::BY_TID || thread.header.tid == hit.tid
        }
    };
    tasks::met(hit, thread, own, now);
    match point {
        GvlPoint::Started | GvlPoint::Exited => count(Counter::GvlStarted),
        GvlPoint::Ready => ready(hit, thread, now),
        GvlPoint::Resumed => resumed(ctx, hit, thread, now),
        GvlPoint::Suspended => suspended(hit, thread, now),
    }
}

/// Selects, and finds out which thread it is about.
#[inline(always)]
fn find(ctx: &ProbeContext, point: GvlPoint, gate: GvlGate) -> Result<Hit, Counter> {
    let (tgid, tid) = tgid_tid();
    let (process, flags) = selected(tgid).map_err(|_| Counter::GvlFiltered)?;
    // SAFETY: a plain helper call with the program's own context.
    let cookie = GvlCookie::unpack(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    let index = u32::from(cookie.image);
    let image = maps::image(index).ok_or(Counter::GvlFiltered)?;
    // At a return the instruction is the caller's, but the process has been met at the entry.
    let bias = usermem::instruction_pointer(ctx).wrapping_sub(cookie.address);
    if cookie.address != 0 {
        meet(tgid, process, flags, index, bias);
    }
    let ruby = rubies::known(tgid).ok_or(Counter::GvlFiltered)?;
    // SAFETY: a map value pointer, valid while the program runs.
    let (execs, bias) = unsafe { ((*ruby).execs, (*ruby).bias) };
    let mut hit = Hit {
        tgid,
        tid,
        execs,
        index,
        image,
        bias,
        ruby,
        key: GvlKey { at: u64::from(tid), tgid, execs },
        thread: 0,
        lock: 0,
        gate,
    };
    match image.gvl.by {
        GvlPath::BY_THREAD => {
            // Read in any case, and volatile: as one more arm of what `register` chooses from, LLVM would make one load of all
            // of them at an offset that depends on the number, which the verifier refuses.
            let mut value = usermem::volatile_stack_pointer(ctx);
            if cookie.register != 4 {
                value = usermem::register(ctx, cookie.register);
            }
            hit.thread = if cookie.in_memory {
                usermem::read(value.wrapping_add_signed(cookie.displacement.into())).unwrap_or(0)
            } else {
                value
            };
            if hit.thread == 0 {
                return Err(Counter::GvlNoThread);
            }
            hit.key.at = hit.thread;
        }
        GvlPath::BY_TID => {
            if image.gvl.thread_ractor == 0
                && let GvlPoint::Ready = point
            {
                // `gvl_acquire_common(vm, th)`, `gvl_acquire_common(gvl, th)` from 3.0 on.
                hit.lock = usermem::register(ctx, 7);
                hit.thread = usermem::register(ctx, 6);
            }
        }
        _ => return Err(Counter::GvlFiltered),
    }
    Ok(hit)
}

/// The entry of the thread, which is made if there is none.
#[inline(always)]
pub fn entry(hit: &Hit, now: u64) -> Option<*mut GvlThread> {
    if let Some(entry) = GVL_THREADS.get_ptr_mut(&hit.key) {
        // SAFETY: a map value pointer, valid while the program runs.
        let known = unsafe { (*entry).thread };
        if hit.thread == 0 || known == 0 || known == hit.thread {
            return Some(entry);
        }
        // Up to 3.1: a native thread that has been used again for another thread.
        end(&hit.key, now);
    }
    let blank = GVL_BLANK.get(0)?;
    if GVL_THREADS.insert(&hit.key, blank, NO_EXIST).is_err() {
        return None;
    }
    let entry = GVL_THREADS.get_ptr_mut(&hit.key)?;
    count(Counter::GvlThreads);
    // SAFETY: as above. A plain helper call.
    unsafe {
        // Times on two CPUs can be the same; the CPU tells them apart.
        (*entry).id = now ^ u64::from(bpf_get_smp_processor_id()) << 56;
        (*entry).born_ns = now;
        (*entry).since_ns = now;
        (*entry).told_ns = now;
        (*entry).epoch = hit.gate.epoch;
        (*entry).header = Header {
            kind: Kind::GvlThread as u32,
            point: 0,
            tgid: hit.tgid,
            tid: 0,
            ts_ns: 0,
            seq: 0,
            image: hit.index,
            execs: hit.execs,
        };
    }
    Some(entry)
}

#[inline(always)]
fn ready(hit: &Hit, thread: &mut GvlThread, now: u64) {
    count(Counter::GvlReady);
    if thread.state == GvlState::Away as u32 {
        span(hit, thread, GvlState::Away, now);
    }
    count(match thread.ready(now) {
        Step::Paired(_) => Counter::GvlAways,
        Step::Continued => Counter::GvlYields,
        Step::Orphan => Counter::GvlOrphanReady,
    });
    if hit.thread != 0 {
        thread.thread = hit.thread;
    }
    if hit.lock != 0 {
        thread.lock = hit.lock;
    }
}

#[inline(always)]
fn resumed(ctx: &ProbeContext, hit: &Hit, thread: &mut GvlThread, now: u64) {
    count(Counter::GvlResumed);
    let begin_ns = thread.since_ns;
    let step = thread.resumed(now);
    thread.comm = bpf_get_current_comm().unwrap_or_default();
    thread.header.tid = hit.tid;
    if hit.thread != 0 {
        thread.thread = hit.thread;
    }
    let mut hold = GvlHold::default();
    if let Some(lock) = lock(hit, thread) {
        // SAFETY: a map value pointer, valid while the program runs; only who holds the GVL writes there.
        let lock = unsafe { &mut *lock };
        if let Step::Paired(_) = step {
            hold = holders(hit, thread, lock, begin_ns, now);
        }
        let at = lock.count as usize & (HOLDS - 1);
        let holds: *mut GvlHold = (&raw mut lock.holds).cast();
        let me = GvlHolder { id: thread.id, tid: hit.tid, reserved: 0, comm: thread.comm };
        // SAFETY: the index is masked to the array.
        unsafe { *holds.add(at) = GvlHold { begin_ns: now, end_ns: 0, holder: me } };
        lock.count += 1;
    }
    let Step::Paired(ns) = step else { return count(Counter::GvlOrphanResumed) };
    if waited(thread, ns) {
        long_wait::<Probe, _>(ctx, hit, thread, &hold, begin_ns..now, true);
    }
}

/// Counts a wait. Returns whether it was long.
#[inline(always)]
pub fn waited(thread: &mut GvlThread, ns: u64) -> bool {
    count(Counter::GvlWaits);
    let at = bucket(ns) & (BUCKETS - 1);
    let buckets: *mut u32 = (&raw mut thread.buckets).cast();
    // SAFETY: the index is masked to the array.
    unsafe { *buckets.add(at) += 1 };
    let long = ns >= config().gvl_threshold_ns;
    if long {
        count(Counter::GvlLongWaits);
    }
    long
}

/// Adds a wait to those who held the GVL meanwhile, and returns the longest of these holds.
#[inline(always)]
fn holders(hit: &Hit, thread: &GvlThread, lock: &GvlLock, begin_ns: u64, now: u64) -> GvlHold {
    let holds: *const GvlHold = (&raw const lock.holds).cast();
    // Zero, but not for the verifier. It learns from each comparison, and what has been compared more often has other bounds:
    // it followed each history of the loop by itself, 900 000 instructions of the million that it walks at most.
    let zero = now.wrapping_sub(usermem::opaque(now));
    let mut longest_ns = zero;
    let mut longest = zero as usize;
    let mut covered_ns = zero;
    for back in 1..=HOLDS as u64 {
        let at = lock.count.wrapping_sub(back) as usize & (HOLDS - 1);
        // SAFETY: the index is masked to the array.
        let hold = unsafe { &*holds.add(at) };
        if hold.holder.id == 0 {
            break;
        }
        if hold.end_ns != 0 && hold.end_ns <= begin_ns {
            break;
        }
        let ns = hold.overlap(begin_ns, now);
        if hold.holder.id != thread.id && ns > 0 {
            edge(hit, thread, hold.holder.id, ns);
            covered_ns += ns;
            if ns > longest_ns {
                longest_ns = ns.wrapping_add(zero);
                longest = at;
            }
        }
        if hold.begin_ns <= begin_ns {
            break;
        }
    }
    if longest_ns == 0 {
        return GvlHold::default();
    }
    if longest_ns + covered_ns < now.wrapping_sub(begin_ns) {
        // Of so much it is not known who held it that it may have been another for longer.
        count(Counter::GvlHoldersLost);
        return GvlHold::default();
    }
    // SAFETY: as above.
    unsafe { *holds.add(longest & (HOLDS - 1)) }
}

#[inline(always)]
fn suspended(hit: &Hit, thread: &mut GvlThread, now: u64) {
    count(Counter::GvlSuspended);
    let begin_ns = thread.since_ns;
    if thread.state == GvlState::Running as u32 || thread.state == GvlState::Away as u32 {
        span(hit, thread, GvlState::Running, now);
    }
    thread.header.tid = hit.tid;
    let step = thread.suspended(now);
    count(match step {
        Step::Paired(_) => Counter::GvlHolds,
        Step::Continued => Counter::GvlCalledOff,
        Step::Orphan => Counter::GvlOrphanSuspended,
    });
    thread.comm = bpf_get_current_comm().unwrap_or_default();
    let Some(lock) = lock(hit, thread) else { return };
    // SAFETY: as above.
    let lock = unsafe { &mut *lock };
    let at = lock.count.wrapping_sub(1) as usize & (HOLDS - 1);
    let holds: *mut GvlHold = (&raw mut lock.holds).cast();
    // SAFETY: the index is masked to the array.
    let hold = unsafe { &mut *holds.add(at) };
    if hold.holder.id == thread.id {
        hold.end_ns = now;
        // It may have got another name meanwhile.
        hold.holder.comm = thread.comm;
    } else if let Step::Paired(_) = step {
        // When it got it, its GVL could not be told: a thread of 3.2 has no context when it begins.
        let at = lock.count as usize & (HOLDS - 1);
        let me = GvlHolder { id: thread.id, tid: hit.tid, reserved: 0, comm: thread.comm };
        // SAFETY: the index is masked to the array.
        unsafe { *holds.add(at) = GvlHold { begin_ns, end_ns: now, holder: me } };
        lock.count += 1;
    }
}

/// The thread's GVL. A thread keeps its GVL as long as it lives.
#[inline(always)]
fn lock(hit: &Hit, thread: &mut GvlThread) -> Option<*mut GvlLock> {
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

/// When the gate was closed, somebody may have held the GVL; how long is known up to then.
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

/// Adds to what a thread waited for another. Only the thread itself writes here.
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

/// Reports what a thread has been doing if it took long: holding the GVL, or doing without it.
#[inline(always)]
fn span(hit: &Hit, thread: &GvlThread, state: GvlState, now: u64) {
    // In 3.2 a thread can give the GVL up without an event.
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
            // Who makes a thread ready need not be that thread.
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

/// Reports a wait with the stack of the thread, which has run no Ruby code since it began to wait; without it if it has.
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
    let stack = stack && hit.image.stack.place != 0;
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
    // The walk does not come back here.
    took(now, Some(hit.ruby), TRAP_NS + STACK_NS);
    take::<F, _>(
        ctx,
        &Occasion {
            cause: Cause::GvlWait,
            ts_ns: now,
            tgid: hit.tgid,
            tid: hit.tid,
            ruby: hit.ruby,
            weight_ns: 0,
            in_kernel: false,
            thread: thread.thread,
        },
    );
}

/// Hands over what is known of a thread that ends, and forgets it.
#[inline(always)]
fn end(key: &GvlKey, now: u64) {
    let Some(entry) = GVL_THREADS.get_ptr_mut(key) else { return };
    // SAFETY: a map value pointer, valid while the program runs. The whole value is handed over.
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

/// A native thread ended. Threads that are told apart by it have no other end up to 3.1. (The end of the first is that of the
/// process, which takes out what is left.)
#[inline(always)]
pub fn thread_ended(tgid: u32, tid: u32) {
    let Some(ruby) = rubies::known(tgid) else { return };
    if closed() {
        return;
    }
    // SAFETY: a map value pointer, valid while the program runs.
    let execs = unsafe { (*ruby).execs };
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    tasks::ended(tid, now);
    if tid != tgid {
        end(&GvlKey { at: u64::from(tid), tgid, execs }, now);
    }
}
