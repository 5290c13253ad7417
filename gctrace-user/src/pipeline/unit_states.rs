//! The state of the VM when threads take requests and jobs, and when they finish them: checked, and kept until the unit is
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

/// Maximum number of threads whose states are kept; the kernel side follows fewer.
const MOST: usize = 1 << 15;

/// The states of units that have not been reported yet.
#[derive(Default)]
pub(super) struct Pending {
    /// Whether states are copied at all.
    copied: bool,
    /// By process and thread, which has one unit at a time: when the unit began, and the state at that time.
    begun: HashMap<(u32, u32), (u64, GcState)>,
    /// The same with the state at the end of the unit. The record of the unit itself follows.
    ended: HashMap<(u32, u32), (u64, GcState)>,
}

/// Why a state cannot be used.
enum Unusable {
    /// The two copies differ.
    Moving,
    /// A VM never has this state outside a GC pause, or the process is not traced.
    Refused,
}

impl Pending {
    /// Creates it with or without states.
    pub(super) fn new(copied: bool) -> Self {
        Self { copied, ..Self::default() }
    }

    /// Whether states are copied.
    pub(super) fn are_copied(&self) -> bool {
        self.copied
    }

    /// Keeps a state; `false`: no room.
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

    /// Takes the states of an ended unit, if both are known. States of earlier units of its thread are forgotten.
    pub(super) fn take(&mut self, key: UnitKey) -> Option<Box<UnitStates>> {
        let thread = (key.pid, key.tid);
        let of_it = |(begin_ns, state)| (begin_ns == key.begin_ns).then_some(state);
        let begin = self.begun.remove(&thread).and_then(of_it);
        let end = self.ended.remove(&thread).and_then(of_it);
        Some(Box::new(UnitStates { begin: begin?, end: end? }))
    }

    /// Forgets a process that has ended or is no longer traced.
    pub(super) fn forget(&mut self, pid: u32) {
        self.begun.retain(|(of, _), _| *of != pid);
        self.ended.retain(|(of, _), _| *of != pid);
    }
}

impl Pipeline {
    /// Handles a state at the beginning or the end of a unit.
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

/// The state in a record. Requires that no thread is in a GC pause and that two consecutive copies are equal: nothing changed in between.
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

    /// A unit has the states of its own beginning and end, or none: a lost unit does not leave its state to the next one.
    #[test]
    fn pairs() {
        let mut pending = Pending::new(true);
        pending.keep(UnitPoint::Begin, key(7, 100), state(7, 100));
        pending.keep(UnitPoint::Begin, key(8, 150), state(8, 150));
        pending.keep(UnitPoint::End, key(7, 100), state(7, 200));
        let states = pending.take(key(7, 100)).unwrap();
        assert_eq!((states.begin.ts_ns, states.end.ts_ns), (100, 200));
        assert_eq!(pending.take(key(7, 100)), None);
        // The record of the first unit was lost, then the beginning of the next one, then an end.
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
