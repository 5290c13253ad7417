//! The state of the VM where threads take requests and jobs, and where they are done with them: checked, and kept until the unit is
//! reported.

use std::collections::HashMap;

use gctrace_common::request::{UnitEvent, UnitPoint};

use super::{Pipeline, gc::decode_state};
use crate::{
    aggregate::units::UnitKey,
    host::proc,
    images::Reading,
    model::{GcState, request::UnitStates},
    ruby::live_check,
};

/// Threads whose states are kept; the kernel side follows fewer.
const MOST: usize = 1 << 15;

/// The states of units that have not been reported.
#[derive(Default)]
pub(super) struct Pending {
    /// States are copied at all.
    copied: bool,
    /// By process and thread, which has one unit at a time: since when it has it, and the state then.
    begun: HashMap<(u32, u32), (u64, GcState)>,
    /// The same, with the state at the end. The record of the unit itself comes next.
    ended: HashMap<(u32, u32), (u64, GcState)>,
}

/// Why a state is not used.
enum Unusable {
    /// The two copies differ.
    Moving,
    /// It is none that a VM has outside a GC pause, or its process is not traced.
    Refused,
}

impl Pending {
    /// With states, or without any.
    pub(super) fn new(copied: bool) -> Self {
        Self { copied, ..Self::default() }
    }

    /// Whether they are copied.
    pub(super) fn are_copied(&self) -> bool {
        self.copied
    }

    /// Keeps a state; `false`: there is no room.
    fn keep(&mut self, point: UnitPoint, key: UnitKey, state: GcState) -> bool {
        let of = match point {
            UnitPoint::Begin => &mut self.begun,
            UnitPoint::End => &mut self.ended,
        };
        let thread = (key.pid, key.tid);
        if of.len() >= MOST && !of.contains_key(&thread) {
            return false;
        }
        of.insert(thread, (key.begin_ns, state));
        true
    }

    /// The states of a unit that has ended, if both are known. What is kept of earlier units of its thread is forgotten.
    pub(super) fn take(&mut self, key: UnitKey) -> Option<Box<UnitStates>> {
        let thread = (key.pid, key.tid);
        let of_it = |(begin_ns, state)| (begin_ns == key.begin_ns).then_some(state);
        let begin = self.begun.remove(&thread).and_then(of_it);
        let end = self.ended.remove(&thread).and_then(of_it);
        Some(Box::new(UnitStates { begin: begin?, end: end? }))
    }

    /// A process has ended, or tracing of it has.
    pub(super) fn forget(&mut self, pid: u32) {
        self.begun.retain(|(of, _), _| *of != pid);
        self.ended.retain(|(of, _), _| *of != pid);
    }
}

impl Pipeline {
    /// A state at the begin or the end of a unit.
    pub(super) fn unit_state(&mut self, point: UnitPoint, event: &UnitEvent) {
        let header = &event.header;
        let (pid, tid) = (header.tgid, header.tid);
        self.is_traced(pid, header.image, "", event.begin_ns);
        let traced = self.traced.get(&pid).filter(|traced| traced.process.image.index == header.image);
        let reading = traced.and_then(|traced| traced.image.reading.as_ref());
        let state = reading.ok_or(Unusable::Refused).and_then(|reading| proven(reading, event));
        let key = UnitKey { pid, tid, begin_ns: event.begin_ns };
        let kept = state.and_then(|state| {
            if self.unit_states.keep(point, key, state) { Ok(()) } else { Err(Unusable::Refused) }
        });
        match kept {
            Ok(()) => self.request_counts.unit_states_exact += 1,
            Err(Unusable::Moving) => self.request_counts.unit_states_moving += 1,
            Err(Unusable::Refused) => self.request_counts.unit_states_refused += 1,
        }
    }
}

/// The state in a record. No thread is in a GC pause, and two copies in a row are the same: nobody changed anything meanwhile.
fn proven(reading: &Reading, event: &UnitEvent) -> Result<GcState, Unusable> {
    let (layout, header) = (&reading.layout, &event.header);
    let memory = proc::at_event(&event.memory);
    let decoded = |data: &[u8]| decode_state(layout, header.ts_ns, header.tid, data, memory);
    let state = decoded(&event.data);
    if state != decoded(&event.again) {
        return Err(Unusable::Moving);
    }
    let outside = live_check::is_outside_gc(layout, &event.data, reading.during_gc);
    if !outside || reading.accept(live_check::outside_gc(layout, &event.data)).is_err() {
        return Err(Unusable::Refused);
    }
    // Only cycles report the sizes of heaps.
    Ok(GcState { heaps: Vec::new(), ..state })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::stat::{GcInfo, Mode};

    fn state(tid: u32, ts_ns: u64) -> GcState {
        let info = GcInfo::decode(0, None, Mode::None, None);
        GcState { ts_ns, tid, stat: vec![ts_ns], heaps: Vec::new(), info, memory: None }
    }

    fn key(tid: u32, begin_ns: u64) -> UnitKey {
        UnitKey { pid: 1, tid, begin_ns }
    }

    /// A unit has the states of its own begin and end, or none: one that was lost does not leave its state to the next one.
    #[test]
    fn pairs() {
        let mut pending = Pending::new(true);
        pending.keep(UnitPoint::Begin, key(7, 100), state(7, 100));
        pending.keep(UnitPoint::Begin, key(8, 150), state(8, 150));
        pending.keep(UnitPoint::End, key(7, 100), state(7, 200));
        let states = pending.take(key(7, 100)).unwrap();
        assert_eq!((states.begin.ts_ns, states.end.ts_ns), (100, 200));
        assert_eq!(pending.take(key(7, 100)), None);
        // The record of the first was lost, then the begin of the next one, then an end.
        pending.keep(UnitPoint::End, key(8, 150), state(8, 190));
        pending.keep(UnitPoint::End, key(8, 300), state(8, 400));
        assert_eq!(pending.take(key(8, 300)), None);
        pending.keep(UnitPoint::Begin, key(8, 500), state(8, 500));
        assert_eq!(pending.take(key(8, 500)), None);
        pending.keep(UnitPoint::Begin, key(9, 600), state(9, 600));
        pending.forget(1);
        assert!(pending.begun.is_empty() && pending.ended.is_empty());
    }
}
