//! The GC's part of the data path: records are proven, and turned into states, cycles, pauses and work.

use gctrace_common::event::{Header, PauseEvent, PhaseEvent, Point, SnapshotEvent, WorkPhase};

use super::Pipeline;
use crate::{
    console::say,
    decode::Event,
    host::proc,
    images::{KnownImage, Reading},
    model::{self, GcState, GcWork, Memory, seen::Seen},
    ruby::{
        layout::{BoundKey, ObjspaceLayout},
        live_check::{self, FailedProof},
        stat::{GcInfo, Mode},
    },
    stacks::Trigger,
};

/// A cycle starts inside a pause. If the pause was entered before the probes were attached, or its entry was evicted from
/// the kernel's map, the cycle seems to start outside one and is not reported. More than this number in a row has another cause.
const MAX_STARTS_OUTSIDE: u32 = 2;

impl Pipeline {
    pub(super) fn gc_event(&mut self, event: &Event<'_>) {
        match event {
            Event::Snapshot(point, snapshot) => {
                self.counts.decoded_snapshots += 1;
                self.snapshot(*point, snapshot);
            }
            Event::Pause(pause) => {
                self.counts.decoded_pauses += 1;
                self.pause(pause);
            }
            Event::Phase(phase, event) => {
                self.counts.decoded_phases += 1;
                self.work(*phase, event);
            }
            // Other events have rings of their own.
            _ => self.counts.undecodable += 1,
        }
    }

    fn work(&mut self, phase: WorkPhase, event: &PhaseEvent) {
        let header = &event.header;
        let pid = header.tgid;
        if self.is_refused(header) {
            return;
        }
        let Some(known) = self.images.get(header.image) else {
            self.counts.refused_records += 1;
            return;
        };
        let comm = model::comm(&event.comm);
        if self.traced.get(&pid).is_none_or(|traced| traced.process.image.index != header.image) {
            if self.has_ended(pid, header.ts_ns) {
                self.counts.refused_records += 1;
                return;
            }
            self.trace(pid, &comm, &known, None, header.ts_ns);
        }
        self.sequence(header);
        let Some(traced) = self.traced.get_mut(&pid) else {
            self.counts.refused_records += 1;
            return;
        };
        self.counts.phases += 1;
        let ns = header.ts_ns.saturating_sub(event.begin_ns);
        let work = GcWork { phase, tid: header.tid, comm, begin_ns: event.begin_ns, ns };
        let process = traced.process.clone();
        self.see(&process, Seen::Work(&work));
    }

    /// A record shows that the process's GC state is not where its version has it: nothing more is reported about the process.
    fn disproven(&mut self, known: &KnownImage, failed: &FailedProof, header: &Header) {
        self.counts.refused_records += 1;
        let (pid, path) = (header.tgid, known.image.path.display());
        say(&format!("gctrace: pid {pid}: {path} is not traced any more: {failed}"));
        self.refuse_process(pid, &path.to_string(), &failed.to_string(), header.ts_ns);
    }

    pub(super) fn snapshot(&mut self, point: Point, event: &SnapshotEvent) {
        let header = &event.header;
        let pid = header.tgid;
        if self.is_refused(header) {
            return;
        }
        let current = self.traced.get(&pid).map(|traced| traced.image.clone());
        let current = current.filter(|known| known.image.index == header.image);
        let known = current.or_else(|| self.images.get(header.image));
        let Some((known, reading)) = known.as_ref().and_then(|known| Some((known, known.reading.as_ref()?)))
        else {
            self.counts.refused_records += 1;
            return;
        };
        // The VM forbids GC until its heap exists, and enters one meanwhile for its first page (heap_prepare, gc.c 3.3).
        // This is not a shutdown, and an objspace full of zeros proves and disproves nothing.
        let unborn = point == Point::GcEnter && !live_check::is_set_up(&reading.layout, &event.data);
        if !unborn && let Err(failed) = reading.accept(prove_event(reading, point, event)) {
            return self.disproven(known, &failed, header);
        }
        if self.traced.get(&pid).is_none_or(|traced| traced.process.image.index != header.image) {
            if self.has_ended(pid, header.ts_ns) {
                self.counts.refused_records += 1;
                return;
            }
            self.trace(pid, &model::comm(&event.comm), known, None, header.ts_ns);
        }
        self.sequence(header);
        let Some(traced) = self.traced.get_mut(&pid) else { return };
        // An earlier record without a name was of a process that could not be read any more.
        if traced.process.comm.is_empty() {
            traced.process.comm = model::comm(&event.comm);
        }
        // Its first events may be older than the moment at which its image became known.
        traced.since_ns = traced.since_ns.min(header.ts_ns);
        if point == Point::GcStart {
            traced.starts_outside = if event.depth == 0 { traced.starts_outside + 1 } else { 0 };
            if traced.starts_outside > MAX_STARTS_OUTSIDE {
                let failed = live_check::starts_outside_pauses(traced.starts_outside);
                return self.disproven(known, &failed, header);
            }
            if event.depth == 0 {
                // The pause that the cycle starts in is unknown, so its pauses would be incomplete.
                self.counts.starts_outside += 1;
                traced.has_unreported = true;
                // The cycle is not counted in the request that started it, either.
                self.units.lost(pid, header.ts_ns, header.ts_ns);
                let before = traced.fold.counts().cut_short;
                let folded = traced.fold.cut();
                self.counts.cycles_cut_short += traced.fold.counts().cut_short - before;
                return self.report(pid, folded);
            }
        }
        let mut memory = proc::at_event(&event.memory);
        if memory.is_none() {
            memory = traced.read_memory();
            self.counts.memory_late += u64::from(memory.is_some());
        }
        if let Some(memory) = memory.as_mut().filter(|_| self.shares && point == Point::GcEndSweep) {
            memory.shares = traced.read_shares();
        }
        self.counts.memory_unread += u64::from(memory.is_none());
        let state = decode_state(&reading.layout, header.ts_ns, header.tid, &event.data, memory);
        let count = reading.layout.count.read(&event.data).unwrap_or_default();
        // The VM counts a cycle before it reports the start.
        traced.beginning.count = Some(count);
        let request = match point {
            Point::GcStart => self.request_of_cycle(pid, header.tid, event.request_ns),
            _ => None,
        };
        let Some(traced) = self.traced.get_mut(&pid) else { return };
        match point {
            Point::GcStart => {
                self.counts.cycles_started += 1;
                let missed = traced.beginning.reported(count, traced.lost > 0);
                let before = traced.fold.counts().cut_short;
                let folded = traced.fold.start(model::comm(&event.comm), count, state);
                traced.fold.of_request(request);
                if let Some(Trigger { stack, span, .. }) = self.stacks.take_trigger(pid, header.ts_ns)
                    && traced.fold.trigger(header.ts_ns, &stack, span)
                {
                    self.counts.triggers += 1;
                }
                self.counts.cycles_cut_short += traced.fold.counts().cut_short - before;
                if let Some(before) = missed {
                    self.count_before(before);
                }
                self.report(pid, folded);
            }
            Point::GcEndSweep => {
                let before = traced.fold.counts().end_without_start;
                traced.fold.end_sweep(count, state);
                let orphan = traced.fold.counts().end_without_start - before;
                self.counts.ends_without_start += orphan;
                if orphan > 0 {
                    // The state is not of a reported cycle; a forked child's life starts with such an end.
                    traced.shares_read = None;
                }
                self.counts.cycle_ends += 1 - orphan;
            }
            Point::GcEnter | Point::GcExit | Point::GcEndMark => {
                self.counts.shutdown_states += 1;
                if !unborn {
                    traced.fold.maybe_shutdown(state);
                }
            }
        }
    }

    /// Notes the sequence number of a GC record. A gap means that records were lost since the previous one.
    fn sequence(&mut self, header: &Header) {
        let Some(traced) = self.traced.get_mut(&header.tgid) else { return };
        let gap = traced.fold.sequence(header.seq);
        traced.lost += gap;
        self.counts.lost_records += gap;
        if gap > 0 {
            self.units.lost(header.tgid, traced.last_ns, header.ts_ns);
        }
        traced.last_ns = traced.last_ns.max(header.ts_ns);
    }

    fn pause(&mut self, event: &PauseEvent) {
        let pid = event.header.tgid;
        // A process is traced from its first snapshot on; a pause before it belongs to a cycle that started earlier.
        if !self.traced.contains_key(&pid) {
            if self.is_refused(&event.header) {
                return;
            }
            if self.has_ended(pid, event.header.ts_ns) {
                self.counts.refused_records += 1;
            } else {
                let waiting = self.waiting.entry(pid).or_default();
                let lost = waiting.lost;
                waiting.pause(event);
                // Lost records may be of any time before.
                let from_ns = if waiting.lost > lost { 0 } else { event.begin_ns };
                self.counts.pauses_outside += 1;
                self.units.lost(pid, from_ns, event.header.ts_ns);
            }
            return;
        }
        self.request_pause(event);
        self.sequence(&event.header);
        let Some(traced) = self.traced.get_mut(&pid) else { return };
        let Some(reading) = traced.image.reading.as_ref() else {
            self.counts.refused_records += 1;
            return;
        };
        let mode = live_check::mode(&reading.layout, event.flags);
        let kind = reading.pause_kinds.get(&event.enter_site).copied();
        let gvl = traced.image.image.gvl.is_some();
        let (_, inside, folded) = traced.fold.pause(event, mode, kind);
        if gvl {
            self.gvl.pause(pid, event.begin_ns, event.header.ts_ns.saturating_sub(event.begin_ns));
        }
        if inside {
            self.counts.pauses_in_cycles += 1;
        } else {
            self.counts.pauses_outside += 1;
            if let Some(traced) = self.traced.get_mut(&pid) {
                traced.outside_ns += event.header.ts_ns.saturating_sub(event.begin_ns);
            }
        }
        self.report(pid, folded);
    }
}

fn prove_event(known: &Reading, point: Point, event: &SnapshotEvent) -> Result<(), FailedProof> {
    if event.register != 0 && event.register != event.objspace {
        return Err(FailedProof {
            check: "the site's register holds the objspace",
            detail: format!("register {:#x}, VM pointer leads to {:#x}", event.register, event.objspace),
        });
    }
    live_check::at_event(&known.layout, point, &event.data, known.during_gc)
}

pub(super) fn decode_state(
    layout: &ObjspaceLayout,
    ts_ns: u64,
    tid: u32,
    data: &[u8],
    memory: Option<Memory>,
) -> GcState {
    let read = |place: crate::ruby::layout::SnapshotField| place.read(data).unwrap_or_default();
    let mode: Mode = live_check::mode(layout, read(layout.flags) as u32);
    let info = GcInfo::decode(
        read(layout.latest_gc_info) as u32,
        layout.need_major_gc.map(|place| read(place) as u32),
        mode,
        layout.weak_references.map(|(weak, retained)| (read(weak), retained.map(read))),
    );
    // The offsets of a layout are inside a snapshot by construction.
    let values = |keys: &[BoundKey]| keys.iter().map(|key| key.value(data).unwrap_or_default()).collect();
    let heaps = layout.heaps.iter().map(|keys| values(keys)).collect();
    GcState { ts_ns, tid, stat: values(&layout.keys), heaps, info, memory }
}
