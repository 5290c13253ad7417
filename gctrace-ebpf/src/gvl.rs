//! The GVL: the state of each thread, with times added up per thread, and who waits for whom. All events of a thread come in
//! order: the VM emits them under the lock of its scheduler, or on the thread itself.

use aya_ebpf::{
    EbpfContext,
    helpers::{bpf_get_attach_cookie, bpf_get_current_comm, bpf_get_smp_processor_id, bpf_ktime_get_ns},
    programs::ProbeContext,
};
use gctrace_common::{
    event::{Header, Kind},
    gvl::{
        BUCKETS, GvlCookie, GvlGate, GvlKey, GvlPath, GvlPoint, GvlState, GvlThread, Step, TRAP_NS, bucket,
    },
    stats::Counter,
};

use crate::{
    family::Probe,
    filter::{note_image, selected, tgid_tid},
    hit::{Hit, charge},
    maps::{self, GVL_BLANK, GVL_THREADS, NO_EXIST, closed, config, count, gvl_closed, gvl_gate},
    request, rubies, tasks, usermem,
};

mod locks;
mod reports;

pub use locks::{blocks, waits_since};
pub use reports::long_wait;
use reports::{end, span};

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
        // Until the probes are detached, they cost the process as much as before.
        return charge(now, rubies::known(tgid_tid().0), TRAP_NS);
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
    charge(now, ruby, TRAP_NS);
}

#[inline(always)]
fn event(ctx: &ProbeContext, point: GvlPoint, hit: &Hit, now: u64) {
    let gate = hit.gate;
    if let GvlPoint::Exited = point {
        count(Counter::GvlExited);
        if let Some(entry) = GVL_THREADS.get_ptr_mut(&hit.key) {
            // SAFETY: a map value pointer, valid while the program runs.
            let epoch = unsafe { (*entry).epoch };
            if epoch == gate.epoch {
                // SAFETY: as above.
                tasks::sync_task(hit, unsafe { &mut *entry }, true, now);
            } else {
                add_until(&hit.key, gvl_closed(epoch));
            }
        }
        return end(&hit.key, now);
    }
    if let GvlPoint::Started = point {
        // An entry with the same key is a thread whose end was not seen.
        end(&hit.key, now);
    }
    let Some(entry) = entry(hit, now) else {
        if let GvlPoint::Resumed = point {
            request::gvl_acquired(hit.tgid, hit.tid, Step::Orphan, gate.epoch);
        }
        return count(Counter::GvlThreadMapFull);
    };
    // SAFETY: a map value pointer, valid while the program runs; the events of a thread come one after the other.
    let epoch = unsafe { (*entry).epoch };
    let closed = if epoch == gate.epoch { 0 } else { gvl_closed(epoch) };
    if epoch != gate.epoch {
        // This changes the entry, too, so it comes before any part of the entry is borrowed.
        add_until(&hit.key, closed);
    }
    // SAFETY: as above.
    let thread = unsafe { &mut *entry };
    if epoch != gate.epoch {
        count(Counter::GvlInterrupted);
        thread.interrupted(closed, now, gate.epoch);
        thread.reported_ns = now;
    }
    // A thread can be made ready or started by another thread.
    let own = match point {
        GvlPoint::Resumed | GvlPoint::Suspended | GvlPoint::Exited => true,
        GvlPoint::Ready | GvlPoint::Started => {
            hit.image.gvl.by == GvlPath::BY_TID || thread.header.tid == hit.tid
        }
    };
    tasks::sync_task(hit, thread, own, now);
    match point {
        GvlPoint::Started | GvlPoint::Exited => count(Counter::GvlStarted),
        GvlPoint::Ready => ready(hit, thread, now),
        GvlPoint::Resumed => resumed(ctx, hit, thread, now),
        GvlPoint::Suspended => suspended(ctx, hit, thread, now),
    }
}

/// Adds what a thread's native thread did until the gate was closed, at `closed`, after the thread was last seen.
#[inline(always)]
fn add_until(key: &GvlKey, closed: u64) {
    let process = u64::from(key.tgid) << 32 | u64::from(key.execs);
    verified_once_3_gvl_interrupted(key.at, process, closed);
}

/// The same as a global function, which the verifier walks once and not once per path to it. It can take only numbers, so it looks up the
/// thread's entry. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_gvl_interrupted(at: u64, process: u64, closed: u64) -> u64 {
    let key = GvlKey { at, tgid: (process >> 32) as u32, execs: process as u32 };
    if let Some(entry) = GVL_THREADS.get_ptr_mut(&key) {
        // SAFETY: a map value pointer, valid while the program runs; the events of a thread come one after the other.
        tasks::interrupted(unsafe { &mut *entry }, closed);
    }
    0
}

/// Checks the selection, and finds the thread that the event is about. The error is the counter of a hit that is not used.
#[inline(always)]
fn find(ctx: &ProbeContext, point: GvlPoint, gate: GvlGate) -> Result<Hit, Counter> {
    let (tgid, tid) = tgid_tid();
    let (process, flags) = selected(tgid).map_err(|_| Counter::GvlFiltered)?;
    // SAFETY: a plain helper call with the program's own context.
    let cookie = GvlCookie::unpack(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    let index = u32::from(cookie.image);
    let image = maps::image(index).ok_or(Counter::GvlFiltered)?;
    // At a return probe the instruction is the caller's, but the process was recorded at the entry.
    let bias = usermem::instruction_pointer(ctx).wrapping_sub(cookie.address);
    if cookie.address != 0 {
        note_image(tgid, process, flags, index, bias);
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
            // Read in any case, and volatile: if it were one more arm of the match in `register`, LLVM would merge all of them into one load at
            // an offset that depends on the number, which the verifier refuses.
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

/// The entry of the thread, created if missing; `None` if the map is full.
#[inline(always)]
pub fn entry(hit: &Hit, now: u64) -> Option<*mut GvlThread> {
    if let Some(entry) = GVL_THREADS.get_ptr_mut(&hit.key) {
        // SAFETY: a map value pointer, valid while the program runs.
        let known = unsafe { (*entry).thread };
        if hit.thread == 0 || known == 0 || known == hit.thread {
            return Some(entry);
        }
        // Up to 3.1: a native thread that is reused for another thread.
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
        // Times on two CPUs can be the same; the CPU distinguishes them.
        (*entry).id = now ^ u64::from(bpf_get_smp_processor_id()) << 56;
        (*entry).born_ns = now;
        (*entry).since_ns = now;
        (*entry).reported_ns = now;
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
    locks::requested(hit, thread, now);
}

#[inline(always)]
fn resumed(ctx: &ProbeContext, hit: &Hit, thread: &mut GvlThread, now: u64) {
    count(Counter::GvlResumed);
    let begin_ns = thread.since_ns;
    let step = thread.resumed(now);
    request::gvl_acquired(hit.tgid, hit.tid, step, hit.gate.epoch);
    thread.comm = bpf_get_current_comm().unwrap_or_default();
    thread.header.tid = hit.tid;
    if hit.thread != 0 {
        thread.thread = hit.thread;
    }
    let hold = locks::acquired(hit, thread, step, begin_ns, now);
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

#[inline(always)]
fn suspended(ctx: &ProbeContext, hit: &Hit, thread: &mut GvlThread, now: u64) {
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
    if locks::released(hit, thread, step, begin_ns, now) {
        reports::holder(ctx, hit, thread, now);
    }
}

/// A native thread ended. Up to 3.1, threads that are identified by their native thread have no other end event. (The end of the first
/// native thread is that of the process, which removes the rest.)
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
