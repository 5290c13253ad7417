//! Units of work, built from the events that name them.

use super::*;
use crate::model::{request::PageFaults, trace::TraceOrigin};

fn key(tid: u32, begin_ns: u64) -> UnitKey {
    UnitKey { pid: 1, tid, begin_ns }
}

fn facts(path: &str) -> Facts {
    Facts { path: Some(path.to_owned()), end_ns: Some(1000), ..Facts::default() }
}

/// Adds a pause of a unit's thread at this time.
fn pause(units: &mut Units, key: UnitKey, begin_ns: u64, ns: u64) {
    units.pause(key.pid, key.tid, Some(key.begin_ns), (begin_ns, begin_ns + ns));
}

fn take(units: &mut Units) -> Vec<Request> {
    units.take(0, |_| false).into_iter().map(|(_, request)| request).collect()
}

/// The trace that a unit's stacks show takes precedence over its caller's, unless they show several.
#[test]
fn published_traces() {
    let said = Trace { trace_id: 7, caller: None, origin: TraceOrigin::Traceparent };
    let published = |trace_ids: &[u128], said: Option<Trace>| {
        let mut units = Units::default();
        for trace_id in trace_ids {
            units.stack(key(1, 10), Some(Span { trace_id: *trace_id, span_id: 1 }), || None);
            units.stack(key(1, 10), None, || None);
        }
        units.seal(key(1, 10), Facts { trace: said, ..facts("/a") });
        take(&mut units)[0].trace
    };
    let own = Trace { trace_id: 8, caller: None, origin: TraceOrigin::Thread };
    assert_eq!((published(&[], None), published(&[], Some(said))), (None, Some(said)));
    assert_eq!((published(&[8, 8], None), published(&[8], Some(said))), (Some(own), Some(own)));
    assert_eq!(published(&[7], Some(said)), Some(said));
    assert_eq!((published(&[8, 9, 8], Some(said)), published(&[8, 9], None)), (Some(said), None));
}

/// Without an end that was seen on the thread, what was used of memory is unknown.
#[test]
fn memory_until_the_end() {
    let memory = RequestMemory { faults: Some(PageFaults { minor: 3, major: 1 }), rss_growth: Some(-4096) };
    for (end_ns, expected) in [(Some(1000), memory), (None, RequestMemory::default())] {
        let mut units = Units::default();
        units.seal(key(7, 100), Facts { end_ns, memory, ..facts("/a") });
        assert_eq!(take(&mut units)[0].memory, expected);
    }
}

/// Events that arrive before and after the end, which travels in another ring, all count in the unit.
#[test]
fn late_events() {
    let mut units = Units::default();
    let id = units.cycle(key(7, 100)).unwrap();
    pause(&mut units, key(7, 100), 200, 5);
    units.seal(key(7, 100), facts("/a"));
    pause(&mut units, key(7, 100), 300, 6);
    let taken = take(&mut units);
    assert_eq!(taken.len(), 1);
    let request = &taken[0];
    assert_eq!((request.id, request.gcs, request.gc_ns), (id, Some(1), Some(11)));
    assert_eq!((request.gc_pauses, request.gc_other), (Some(2), Some(GcTime::default())));
    assert_eq!(request.duration_ns(), Some(900));
    assert!(take(&mut units).is_empty());
    assert_eq!((units.open(), units.counts()), (0, UnitCounts::default()));
}

/// An event that arrives after its unit was handed out names that unit, and no new one.
#[test]
fn events_that_are_too_late() {
    let mut units = Units::default();
    let id = units.cycle(key(7, 100)).unwrap();
    units.seal(key(7, 100), facts("/a"));
    assert_eq!((take(&mut units)[0].id, units.open()), (id, 0));
    assert_eq!((units.cycle(key(7, 100)), units.name(key(7, 100))), (Some(id), Some(id)));
    pause(&mut units, key(7, 100), 900, 5);
    assert_eq!(units.open(), 0);
    units.seal(key(7, 2000), Facts { end_ns: Some(3000), ..facts("/a") });
    assert_eq!((take(&mut units)[0].id, units.counts()), (id + 1, UnitCounts::default()));
}

/// Units of a process whose events may still come stay, and those of others do not.
#[test]
fn one_process_waits() {
    let mut units = Units::default();
    units.seal(key(7, 100), facts("/a"));
    units.seal(UnitKey { pid: 2, ..key(7, 100) }, facts("/b"));
    let pids = |taken: Vec<(u32, Request)>| taken.iter().map(|(pid, _)| *pid).collect::<Vec<_>>();
    assert_eq!(pids(units.take(5000, |pid| pid == 1)), [2]);
    assert_eq!(pids(units.take(5000, |_| false)), [1]);
}

/// Only the part of other threads' pauses within the unit counts, whether or not those threads serve a unit; the unit's own pauses do not
/// count as others, nor do those of another process.
#[test]
fn pauses_of_others() {
    let mut units = Units::default();
    let other = |pauses, ns| Some(GcTime { pauses, ns });
    units.pause(1, 9, None, (80, 110));
    pause(&mut units, key(7, 100), 200, 5);
    pause(&mut units, key(8, 50), 300, 40);
    units.pause(2, 9, None, (400, 500));
    units.pause(1, 9, None, (990, 1010));
    units.seal(key(7, 100), facts("/a"));
    units.seal(key(8, 50), facts("/b"));
    let taken = take(&mut units);
    let (first, second) = (&taken[0], &taken[1]);
    assert_eq!((first.gc_pauses, first.gc_ns, first.gc_other), (Some(1), Some(5), other(3, 60)));
    assert_eq!((second.gc_pauses, second.gc_ns, second.gc_other), (Some(1), Some(40), other(3, 45)));
    // Without an end it is unknown which pauses belong to the unit.
    units.seal(key(7, 2000), Facts { end_ns: None, ..facts("/a") });
    let request = &take(&mut units)[0];
    assert_eq!((request.gcs, request.gc_ns, request.gc_other), (None, None, None));
}

/// The record of a pause that was under way when the unit ended is waited for, but not forever: after that, its time is unknown.
#[test]
fn ended_in_a_pause() {
    let mut units = Units::default();
    let seal = |units: &mut Units, pause_ns| {
        units.seal(key(7, 100), Facts { pause_ns: Some(pause_ns), ..facts("/a") });
    };
    seal(&mut units, 950);
    assert!(units.take(5000, |_| false).is_empty());
    assert_eq!(units.ended(), BTreeSet::from([1]));
    units.pause(1, 9, None, (950, 1200));
    let gc_other = units.take(5000, |_| false)[0].1.gc_other;
    assert_eq!(gc_other, Some(GcTime { pauses: 1, ns: 50 }));
    // The pause's record is lost.
    seal(&mut units, 970);
    assert!(units.take(5000, |_| false).is_empty());
    let request = &units.take(1000 + PATIENCE_NS, |_| false)[0].1;
    assert_eq!((request.gc_ns, request.gc_other), (Some(0), None));
    // The pause began after the unit had ended.
    seal(&mut units, 1001);
    assert_eq!(units.take(5000, |_| false).len(), 1);
    // No more records arrive.
    seal(&mut units, 990);
    assert_eq!(units.end(1)[0].1.gc_other, None);
}

/// A pause that named no unit may still belong to one, if the request was detected only when it ended: then the
/// figures of the unit itself are unknown, and those of other threads are known.
#[test]
fn found_out_late() {
    let mut units = Units::default();
    units.pause(1, 7, None, (200, 300));
    units.pause(1, 8, None, (400, 450));
    units.seal(key(7, 100), facts("/a"));
    let request = &take(&mut units)[0];
    assert_eq!((request.gcs, request.gc_ns, request.gc_pauses), (None, None, None));
    assert_eq!(request.gc_other, Some(GcTime { pauses: 1, ns: 50 }));
}

/// A request whose end was lost is unknown, and none of its events go to the next request of its thread.
#[test]
fn lost_end() {
    let mut units = Units::default();
    let lost = units.cycle(key(7, 100)).unwrap();
    let next = units.cycle(key(7, 200)).unwrap();
    assert_ne!(lost, next);
    let other = units.cycle(key(8, 50)).unwrap();
    units.seal(key(7, 200), facts("/b"));
    let taken = take(&mut units);
    assert_eq!((taken[0].id, taken[0].gcs), (next, Some(1)));
    units.seal(key(8, 50), facts("/c"));
    assert_eq!(take(&mut units)[0].id, other);
    assert_eq!(units.counts().unknown, 1);
    assert_eq!(units.end(1).len(), 0);
    assert_eq!(units.open(), 0);
}

/// Two requests of one thread that end between two reads of the rings are both reported.
#[test]
fn two_at_once() {
    let mut units = Units::default();
    units.cycle(key(7, 100));
    units.seal(key(7, 100), facts("/a"));
    units.seal(key(7, 200), facts("/b"));
    pause(&mut units, key(7, 200), 300, 3);
    let paths: Vec<_> = take(&mut units).iter().map(Request::endpoint).collect();
    assert_eq!(paths, ["/a", "/b"]);
    assert_eq!(units.counts().unknown, 0);
}

/// The end of a process hands out its ended units and drops the rest; nothing about the process is kept.
#[test]
fn process_end() {
    let mut units = Units::default();
    units.seal(key(7, 100), facts("/a"));
    units.cycle(key(8, 100));
    units.seal(UnitKey { pid: 2, tid: 9, begin_ns: 1 }, facts("/z"));
    assert_eq!(units.end(1).len(), 1);
    assert_eq!((units.counts().unknown, units.open()), (1, 1));
    assert_eq!(take(&mut units).len(), 1);
}

/// Units that were open while events of their process were lost have no figures: those that had begun before, that ended
/// after, that lay inside, and those whose end was not seen. Other units keep theirs.
#[test]
fn lost_events() {
    let mut units = Units::default();
    let mut one = |pid, tid, begin_ns, end_ns| {
        let key = UnitKey { pid, tid, begin_ns };
        units.cycle(key);
        pause(&mut units, key, begin_ns + 1, 7);
        units.lost(1, 500, 600);
        units.seal(key, Facts { end_ns, ..Facts::default() });
        let request = take(&mut units).remove(0);
        assert_eq!(request.gcs.is_some(), request.gc_ns.is_some());
        assert_eq!(request.gcs.is_some(), request.gc_pauses.is_some());
        request.gcs.zip(request.gc_ns)
    };
    let known = Some((1, 7));
    assert_eq!(one(1, 1, 100, Some(499)), known);
    assert_eq!(one(1, 1, 499, Some(500)), None);
    assert_eq!(one(1, 1, 520, Some(530)), None);
    assert_eq!(one(1, 2, 100, Some(9000)), None);
    assert_eq!(one(1, 3, 100, None), None);
    assert_eq!(one(1, 1, 600, Some(700)), None);
    assert_eq!(one(1, 5, 601, Some(700)), known);
    assert_eq!(one(1, 4, 601, None), None, "its thread may have done something else since");
    assert_eq!(one(2, 1, 100, Some(9000)), known);
    units.end(1);
    units.cycle(key(1, 500));
    units.seal(key(1, 500), facts("/a"));
    assert_eq!(take(&mut units)[0].gcs, Some(1), "another process with the same pid");
}

/// A unit that lost an event for lack of room has no figures, even if there is room when it ends.
#[test]
fn no_room_is_not_none() {
    let mut units = Units::default();
    for tid in 0..MAX_OPEN as u32 {
        pause(&mut units, UnitKey { pid: 2, tid, begin_ns: 1 }, 2, 1);
    }
    assert_eq!(units.cycle(key(7, 100)), None);
    units.end(2);
    units.seal(key(7, 100), facts("/a"));
    assert_eq!(take(&mut units)[0].gcs, None);
    units.cycle(key(7, 2000));
    units.seal(key(7, 2000), Facts { end_ns: Some(3000), ..facts("/a") });
    assert_eq!(take(&mut units)[0].gcs, Some(1));
}

/// A stack names the unit that it was captured in, even if that unit has ended before the stack arrives, and never the thread's next unit.
#[test]
fn stacks() {
    let mut units = Units::default();
    let id = units.name(key(7, 100)).unwrap();
    assert_eq!(units.cycle(key(7, 100)), Some(id));
    units.seal(key(7, 100), facts("/a"));
    assert_eq!(units.name(key(7, 100)), Some(id));
    assert_eq!(take(&mut units)[0].id, id);
    assert_eq!((units.name(key(7, 100)), units.open()), (Some(id), 0));
    // This also holds for a unit whose end is lost.
    let lost = units.name(key(7, 1100)).unwrap();
    units.seal(key(7, 1200), facts("/b"));
    assert_eq!((units.name(key(7, 1100)), units.counts().unknown), (Some(lost), 1));
    assert!(take(&mut units)[0].id > lost);
    for begin_ns in 2000..2000 + 2 * MAX_CLOSED as u64 {
        units.seal(key(7, begin_ns), facts("/c"));
        units.take(0, |_| false);
    }
    assert_eq!((units.closed.len(), units.closed_order.len(), units.open()), (MAX_CLOSED, MAX_CLOSED, 0));
}

/// Memory is bounded: what has no room is counted.
#[test]
fn bounded() {
    let mut units = Units::default();
    for tid in 0..(MAX_OPEN as u32 + 10) {
        pause(&mut units, key(tid, 1), 2, 1);
    }
    assert_eq!((units.open(), units.counts().no_room), (MAX_OPEN, 10));
    assert_eq!(units.cycle(key(3, 1)), Some(4));
}
