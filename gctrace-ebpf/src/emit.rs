//! The only place that reserves and submits GC and lifecycle records and counts the lost ones.

use aya_ebpf::{helpers::bpf_ktime_get_ns, maps::ring_buf::RingBufEntry};
use gctrace_common::{
    config::ProcessEntry,
    event::{Header, Kind, LifeEvent, PauseEvent, PhaseEvent, Point, SnapshotEvent},
    scope::Scope,
    stats::Counter,
};

use crate::{
    filter::Admitted,
    maps::{GC_RING, LIFE_RING, add_one, closed, count},
    memory, request,
    ring::NO_WAKEUP,
    rubies::Program,
    spans,
};

/// Numbers the next GC record of the process. Lost records take a number, too, so that user space sees the gap.
#[inline(always)]
fn next_seq(process: *mut ProcessEntry) -> u64 {
    // Add, then read: two threads of one process are never inside the GC at once (the GVL or the VM barrier), so
    // no other addition comes between.
    // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned.
    unsafe {
        let cell = &raw mut (*process).seq;
        add_one(cell);
        cell.read_volatile()
    }
}

#[inline(always)]
fn header(admitted: &Admitted, kind: Kind, point: Point, ts_ns: u64) -> Header {
    Header {
        kind: kind as u32,
        point: point as u32,
        tgid: admitted.tgid,
        tid: admitted.tid,
        ts_ns,
        seq: next_seq(admitted.process),
        image: admitted.image_index,
        execs: 0,
    }
}

/// Copies the objspace's spans into a record. `objspace` is the address read through the VM pointer.
#[inline(always)]
pub fn snapshot(admitted: &Admitted, point: Point, ts_ns: u64, objspace: Option<u64>, depth: u32) {
    let header = header(admitted, Kind::Snapshot, point, ts_ns);
    let Some(objspace) = objspace else {
        count(Counter::SnapshotReadFailed);
        return;
    };
    let Some(mut entry) = GC_RING.reserve::<SnapshotEvent>(0) else {
        count(Counter::SnapshotRingFull);
        return;
    };
    let record: *mut SnapshotEvent = entry.as_mut_ptr();
    // SAFETY: the ring reserved a whole record, 8-byte aligned; fields are written in place because the record is
    // larger than the BPF stack.
    let filled = unsafe {
        (*record).header = header;
        (*record).bias = admitted.bias;
        (*record).objspace = objspace;
        (*record).register = admitted.register;
        (*record).comm = aya_ebpf::helpers::bpf_get_current_comm().unwrap_or_default();
        (*record).slots = admitted.image.spans;
        (*record).depth = depth;
        (*record).request_ns = request::current(admitted.tgid, admitted.tid);
        // Before the spans, whose space is free until then.
        memory::read(&raw mut (*record).memory, (&raw mut (*record).data).cast());
        spans::fill(admitted, objspace, (&raw mut (*record).data).cast())
    };
    if filled.is_err() {
        entry.discard(NO_WAKEUP);
        count(Counter::SnapshotReadFailed);
        return;
    }
    if admitted.register != 0 && admitted.register != objspace {
        count(Counter::RegisterMismatch);
    }
    entry.submit(0);
    count(Counter::SnapshotSubmitted);
}

/// Emits a finished pause.
#[inline(always)]
pub fn pause(admitted: &Admitted, scope: &Scope, ts_ns: u64) {
    let header = header(admitted, Kind::Pause, Point::GcExit, ts_ns);
    let Some(mut entry) = GC_RING.reserve::<PauseEvent>(0) else {
        count(Counter::PauseRingFull);
        return;
    };
    entry.write(PauseEvent {
        header,
        begin_ns: scope.begin_ns,
        start_ns: scope.start_ns,
        end_mark_ns: scope.end_mark_ns,
        end_sweep_ns: scope.end_sweep_ns,
        count: scope.count,
        enter_site: scope.enter_site,
        flags: scope.flags,
        nested: scope.nested,
        request_ns: request::current(admitted.tgid, admitted.tid),
    });
    entry.submit(NO_WAKEUP);
    count(Counter::PauseSubmitted);
}

/// Emits a finished phase.
#[inline(always)]
pub fn phase(admitted: &Admitted, phase: u32, begin_ns: u64, ts_ns: u64) {
    let mut header = header(admitted, Kind::Phase, Point::GcStart, ts_ns);
    header.point = phase;
    let Some(mut entry) = GC_RING.reserve::<PhaseEvent>(0) else {
        count(Counter::PhaseRingFull);
        return;
    };
    let comm = aya_ebpf::helpers::bpf_get_current_comm().unwrap_or_default();
    entry.write(PhaseEvent { header, begin_ns, comm });
    entry.submit(0);
    count(Counter::PhaseSubmitted);
}

/// Emits a lifecycle record of a followed process and wakes the reader.
#[inline(always)]
pub fn life(kind: Kind, tgid: u32, tid: u32, entry: ProcessEntry, program: Program, other: u32) {
    if closed() {
        return;
    }
    count(Counter::Lives);
    let Some(mut slot): Option<RingBufEntry<LifeEvent>> = LIFE_RING.reserve::<LifeEvent>(0) else {
        count(Counter::LifeRingFull);
        return;
    };
    slot.write(LifeEvent {
        header: Header {
            kind: kind as u32,
            point: 0,
            tgid,
            tid,
            // SAFETY: a plain helper call.
            ts_ns: unsafe { bpf_ktime_get_ns() },
            seq: entry.seq,
            image: entry.image,
            execs: program.execs,
        },
        other,
        gvl: u32::from(program.gvl),
        begun_ns: program.begun_ns,
        comm: aya_ebpf::helpers::bpf_get_current_comm().unwrap_or_default(),
    });
    slot.submit(0);
    count(Counter::LifeSubmitted);
}
