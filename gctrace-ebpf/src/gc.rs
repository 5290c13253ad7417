//! The GC points: what is read and recorded at each.

use aya_ebpf::{helpers::bpf_ktime_get_ns, programs::ProbeContext};
use gctrace_common::{
    config::StackPath,
    event::Point,
    scope::{Leave, Reenter, Scope},
    stack::epoch_step,
    stats::Counter,
};

use crate::{
    emit,
    filter::{Admitted, admit},
    line::debug_line,
    maps::{SCOPES, closed, count},
    names, rubies, sample, usermem,
};

/// One hit at a GC point.
#[inline(always)]
pub fn hit(ctx: &ProbeContext, point: Point) -> u32 {
    // SAFETY: a plain helper call. Taken first, so that our own work is not inside the measured pause's start.
    let now = unsafe { bpf_ktime_get_ns() };
    if closed() {
        return 0;
    }
    let admitted = admit(ctx);
    if let (Err(Counter::Filtered), Point::GcStart) = (&admitted, point) {
        names::filtered();
    }
    if let Ok(admitted) = admitted {
        debug_line!(
            ctx,
            "point {} tgid {} tid {} image {} site {:x} register {:x}",
            point as u32,
            admitted.tgid,
            admitted.tid,
            admitted.image_index,
            admitted.site,
            admitted.register
        );
        match point {
            Point::GcStart => {
                start(&admitted, now);
                sample::trigger(ctx, &admitted, now);
            }
            Point::GcEndMark => end_mark(&admitted, now),
            Point::GcEndSweep => end_sweep(&admitted, now),
            Point::GcEnter => enter(ctx, &admitted, now),
            Point::GcExit => exit(&admitted, now),
        }
    }
    0
}

#[inline(always)]
fn start(admitted: &Admitted, now: u64) {
    count(Counter::Starts);
    let depth = note(admitted, |scope| scope.start_ns = now);
    emit::snapshot(admitted, Point::GcStart, now, admitted.objspace(), depth);
}

#[inline(always)]
fn end_mark(admitted: &Admitted, now: u64) {
    count(Counter::EndMarks);
    note(admitted, |scope| scope.end_mark_ns = now);
    collected(admitted, admitted.objspace());
}

#[inline(always)]
fn end_sweep(admitted: &Admitted, now: u64) {
    count(Counter::EndSweeps);
    let depth = note(admitted, |scope| scope.end_sweep_ns = now);
    let objspace = admitted.objspace();
    emit::snapshot(admitted, Point::GcEndSweep, now, objspace, depth);
    collected(admitted, objspace);
}

/// The VM may have freed or moved objects.
#[inline(always)]
fn collected(admitted: &Admitted, objspace: Option<u64>) {
    let step = verified_once_2_epoch_step(objspace.unwrap_or(0), u64::from(admitted.image.stack.gc_info));
    rubies::collected(admitted.tgid, step);
}

/// The amount by which the epoch grows: that of a major cycle, unless the current cycle is known to be minor. `gc_start` sets the reasons of its
/// cycle before it marks (gc.c). A global function, which the verifier walks once and not once per path to it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_epoch_step(objspace: u64, info_at: u64) -> u64 {
    if objspace == 0 || info_at == 0 {
        return epoch_step(true);
    }
    let info = usermem::read::<u32>(objspace.wrapping_add(info_at));
    epoch_step(info.is_none_or(|info| info & StackPath::MAJOR_MASK != 0))
}

#[inline(always)]
fn enter(ctx: &ProbeContext, admitted: &Admitted, now: u64) {
    count(Counter::Enters);
    let key = key(admitted);
    let sp = usermem::stack_pointer(ctx);
    let existing = SCOPES.get_ptr_mut(&key);
    if let Some(scope) = existing {
        // SAFETY: a map value pointer; only this thread uses this key.
        let scope = unsafe { &mut *scope };
        discard_of_other(admitted, scope);
        match scope.reenter(sp) {
            Reenter::Fresh => {}
            Reenter::Nested => return count(Counter::ScopeNested),
            Reenter::Stale => {
                // The open pause was abandoned. If this enter cannot be read, its exit must not end the old pause.
                scope.depth = 0;
                count(Counter::ScopeStale);
            }
        }
    }
    let image = admitted.image;
    // Every snapshot checks the register against the VM pointer; using the register here saves two reads.
    let known = if admitted.register == 0 { admitted.objspace() } else { Some(admitted.register) };
    let state = known.and_then(|objspace| {
        let flags: u32 = usermem::read(objspace.wrapping_add(u64::from(image.flags)))?;
        let gc_count: u64 = usermem::read(objspace.wrapping_add(u64::from(image.count)))?;
        Some((objspace, flags, gc_count))
    });
    let Some((objspace, flags, gc_count)) = state else { return count(Counter::EnterReadFailed) };
    let opened = Scope {
        sp,
        begin_ns: now,
        count: gc_count,
        enter_site: admitted.site,
        flags,
        depth: 1,
        image: admitted.image_index,
        ..Scope::default()
    };
    match existing {
        // SAFETY: as above.
        Some(scope) => unsafe { *scope = opened },
        None if SCOPES.insert(&key, &opened, 0).is_err() => return count(Counter::ScopeMapFull),
        None => {}
    }
    in_pause(admitted, now);
    count(Counter::ScopeOpened);
    // rb_objspace_call_finalizer forbids GC, then enters (gc.c, every version): the last moment at which the heap
    // is complete. GC.start under GC.disable looks the same here; user space drops that one at its GC_START.
    if flags & image.mode_mask == 0 && flags & image.dont_gc_mask != 0 {
        count(Counter::Shutdowns);
        emit::snapshot(admitted, Point::GcEnter, now, Some(objspace), 1);
        sample::last_chance(admitted);
    }
}

#[inline(always)]
fn exit(admitted: &Admitted, now: u64) {
    count(Counter::Exits);
    let key = key(admitted);
    let Some(open) = SCOPES.get_ptr_mut(&key) else { return count(Counter::OrphanExit) };
    // SAFETY: a map value pointer; only this thread uses this key.
    let scope = unsafe { &mut *open };
    discard_of_other(admitted, scope);
    match scope.leave() {
        Leave::Orphan => count(Counter::OrphanExit),
        Leave::Inner => count(Counter::ExitNested),
        Leave::Outermost => {
            in_pause(admitted, 0);
            emit::pause(admitted, scope, now);
        }
    }
}

/// Records a time in the thread's open pause. Returns the depth of its enters, 0 if no pause is open.
#[inline(always)]
fn note(admitted: &Admitted, set: impl FnOnce(&mut Scope)) -> u32 {
    let Some(open) = SCOPES.get_ptr_mut(&key(admitted)) else {
        count(Counter::OrphanMark);
        return 0;
    };
    // SAFETY: a map value pointer; only this thread uses this key.
    let scope = unsafe { &mut *open };
    discard_of_other(admitted, scope);
    if !scope.is_open() {
        count(Counter::OrphanMark);
        return 0;
    }
    set(scope);
    count(Counter::MarkNoted);
    scope.depth
}

/// Discards the thread's open pause if it began under the probes of another image: its exit was not seen.
#[inline(always)]
fn discard_of_other(admitted: &Admitted, scope: &mut Scope) {
    if scope.discard_of_other(admitted.image_index) {
        in_pause(admitted, 0);
        count(Counter::ScopeStale);
    }
}

/// Records the start of the pause that a thread of the process is in; 0: no thread is in a pause any more.
#[inline(always)]
fn in_pause(admitted: &Admitted, begin_ns: u64) {
    // SAFETY: a map value pointer, valid while the program runs; two threads of a process are never in the GC at once.
    unsafe { (*admitted.process).pause_ns = begin_ns };
}

#[inline(always)]
fn key(admitted: &Admitted) -> u64 {
    thread_key(admitted.tgid, admitted.tid)
}

#[inline(always)]
pub fn thread_key(tgid: u32, tid: u32) -> u64 {
    u64::from(tgid) << 32 | u64::from(tid)
}
