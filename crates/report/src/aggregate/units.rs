//! Units of work. Events name a unit by its thread and begin; everything else is known when it ends.
//!
//! A unit is entered when the first event names it, or when its end is seen. Its end seals it: its facts are final,
//! and it is handed out once every event of it has been counted. A unit whose end was lost is detected by the next unit of its
//! thread, and its events never go to that one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use super::{
    endpoint::Templates,
    gaps::Gaps,
    gc_pauses::{GcPauses, OwnAndOther, PauseAt},
};
use crate::model::{
    gvl::GvlSplit,
    request::{Allocated, GcTime, Job, Request, States, UnitStates},
    stack::Frame,
    trace::{Span, Trace},
};

/// Units that are open at one time, over all processes.
const MAX_OPEN: usize = 1 << 16;
/// Units that are remembered when they are not open any more.
const MAX_CLOSED: usize = 1 << 14;
/// How long a unit that has ended waits for the record of a pause that had not ended then, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;

/// Events name a unit by process, thread, and the time since when the thread serves it, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitKey {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// Since when.
    pub begin_ns: u64,
}

/// What is known of a unit that has not ended.
#[derive(Clone, Debug, Default)]
struct Open {
    id: u64,
    gcs: u32,
    gc: GcTime,
    handler: Option<Arc<Frame>>,
    published: Published,
    /// Its end has been seen.
    sealed: bool,
}

/// The traces of the spans that a unit's stacks show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Published {
    #[default]
    None,
    One(u128),
    Several,
}

impl Published {
    fn add(&mut self, trace_id: u128) {
        *self = match *self {
            Self::None => Self::One(trace_id),
            Self::One(before) if before == trace_id => Self::One(before),
            Self::One(_) | Self::Several => Self::Several,
        };
    }
}

/// What the end of a unit reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// See [`Request::end_ns`].
    pub end_ns: Option<u64>,
    /// See [`Request::method`].
    pub method: Option<&'static str>,
    /// The path's template.
    pub path: Option<String>,
    /// See [`Request::status`].
    pub status: Option<u16>,
    /// See [`Request::queue_ns`].
    pub queue_ns: Option<u64>,
    /// See [`Request::first_byte_ns`].
    pub first_byte_ns: Option<u64>,
    /// See [`Request::last_byte_ns`].
    pub last_byte_ns: Option<u64>,
    /// Begin of the GC pause in which a thread of its process was when it ended, nanoseconds; `None`: in none.
    pub pause_ns: Option<u64>,
    /// See [`Request::gvl_wait_ns`].
    pub gvl_wait_ns: Option<u64>,
    /// See [`Request::states`].
    pub states: Option<States>,
    /// See [`Request::split`].
    pub split: Option<GvlSplit>,
    /// See [`Request::alloc`].
    pub alloc: Option<Allocated>,
    /// See [`Request::trace`].
    pub trace: Option<Trace>,
    /// See [`Request::job`].
    pub job: Option<Job>,
    /// See [`Request::gc_states`].
    pub gc_states: Option<Box<UnitStates>>,
}

/// Counters of what could not be known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitCounts {
    /// Units that events name and whose end was not seen.
    pub unknown: u64,
    /// Events dropped, because there was no room for their unit.
    pub no_room: u64,
}

/// The units of all processes.
#[derive(Debug, Default)]
pub struct Units {
    last_id: u64,
    open: BTreeMap<UnitKey, Open>,
    /// Those that were handed out last, or whose end was not seen: their stacks may come later.
    closed: HashMap<UnitKey, u64>,
    closed_order: VecDeque<UnitKey>,
    /// Ended, with what may still be counted in them.
    sealed: Vec<(UnitKey, Facts)>,
    templates: HashMap<u32, Templates>,
    /// By process: when events of its units were lost.
    gaps: HashMap<u32, Gaps>,
    pauses: HashMap<u32, GcPauses>,
    counts: UnitCounts,
}

impl Units {
    /// What could not be known so far.
    pub fn counts(&self) -> UnitCounts {
        self.counts
    }

    /// How many are open.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// A cycle was started in a unit. Returns the unit's id, if there is room for it.
    pub fn cycle(&mut self, key: UnitKey) -> Option<u64> {
        let open = self.enter(key)?;
        open.gcs = open.gcs.saturating_add(1);
        Some(open.id)
    }

    /// The id of the unit that a stack names; `None`: it cannot be kept.
    pub fn name(&mut self, key: UnitKey) -> Option<u64> {
        if let Some(open) = self.open.get(&key) {
            return Some(open.id);
        }
        let closed = self.closed.get(&key).copied();
        closed.or_else(|| self.has_room(key).then(|| self.enter(key).map(|open| open.id)).flatten())
    }

    /// A stack was taken in a unit, which shows this handler, or none, and this active span, if any. The handler of the first stack that shows
    /// one is kept, and the trace of the spans if they have the same.
    pub fn stack(&mut self, key: UnitKey, span: Option<Span>, handler: impl FnOnce() -> Option<Arc<Frame>>) {
        if self.closed.contains_key(&key) || !self.has_room(key) {
            return;
        }
        let Some(open) = self.enter(key) else { return };
        if open.handler.is_none() {
            open.handler = handler();
        }
        if let Some(Span { trace_id, .. }) = span {
            open.published.add(trace_id);
        }
    }

    /// A thread was stopped in a GC pause, since `begin_ns` until `end_ns`, nanoseconds. `unit_ns`: since when it serves a unit, if it does.
    pub fn pause(&mut self, pid: u32, tid: u32, unit_ns: Option<u64>, (begin_ns, end_ns): (u64, u64)) {
        self.pauses.entry(pid).or_default().add(PauseAt { tid, begin_ns, end_ns });
        if let Some(unit_ns) = unit_ns
            && let Some(open) = self.enter(UnitKey { pid, tid, begin_ns: unit_ns })
        {
            open.gc.pauses = open.gc.pauses.saturating_add(1);
            open.gc.ns = open.gc.ns.saturating_add(end_ns.saturating_sub(begin_ns));
        }
    }

    /// Events of a process were lost between these times, `CLOCK_MONOTONIC` nanoseconds, both included: what is counted in units
    /// that were open meanwhile is too low.
    pub fn lost(&mut self, pid: u32, from_ns: u64, until_ns: u64) {
        self.gaps.entry(pid).or_default().add(from_ns, until_ns);
        self.pauses.entry(pid).or_default().lost(from_ns, until_ns);
    }

    /// A unit has ended. Earlier units of its thread that are still open have ended unseen.
    pub fn seal(&mut self, key: UnitKey, mut facts: Facts) {
        let older = self.open.range(UnitKey { begin_ns: 0, ..key }..key);
        let lost: Vec<UnitKey> = older.filter(|(_, open)| !open.sealed).map(|(key, _)| *key).collect();
        for key in &lost {
            self.close(*key);
        }
        self.counts.unknown += lost.len() as u64;
        facts.path = facts.path.map(|path| self.templates.entry(key.pid).or_default().admit(path));
        if let Some(open) = self.enter(key) {
            open.sealed = true;
            self.sealed.push((key, facts));
        }
    }

    /// Hands out the units that have ended: all their events have been counted. Those that ended in a GC pause wait for its record,
    /// until some time before `now_ns`, nanoseconds.
    pub fn take(&mut self, now_ns: u64) -> Vec<(u32, Request)> {
        let sealed = std::mem::take(&mut self.sealed);
        let (due, waiting) = sealed.into_iter().partition(|(key, facts)| self.is_due(*key, facts, now_ns));
        self.sealed = waiting;
        self.requests(due)
    }

    fn is_due(&self, key: UnitKey, facts: &Facts, now_ns: u64) -> bool {
        let due_ns = facts.end_ns.unwrap_or_default().saturating_add(PATIENCE_NS);
        now_ns >= due_ns || self.pause_is_known(key, facts)
    }

    /// Whether the record has come of the pause in which a unit has ended, if it did in one.
    fn pause_is_known(&self, key: UnitKey, facts: &Facts) -> bool {
        let Some((pause_ns, end_ns)) = facts.pause_ns.zip(facts.end_ns) else { return true };
        pause_ns >= end_ns || self.pauses.get(&key.pid).is_some_and(|pauses| pauses.has(pause_ns))
    }

    fn requests(&mut self, sealed: Vec<(UnitKey, Facts)>) -> Vec<(u32, Request)> {
        sealed.into_iter().filter_map(|(key, facts)| Some((key.pid, self.request(key, facts)?))).collect()
    }

    /// Processes with units that have ended and are not handed out yet.
    pub fn ended(&self) -> BTreeSet<u32> {
        self.sealed.iter().map(|(key, _)| key.pid).collect()
    }

    /// A process has ended, or tracing of it has. Hands out its units that have ended; the others never will.
    pub fn end(&mut self, pid: u32) -> Vec<(u32, Request)> {
        let (of_it, others) =
            std::mem::take(&mut self.sealed).into_iter().partition(|(key, _)| key.pid == pid);
        self.sealed = others;
        let taken = self.requests(of_it);
        let before = self.open.len();
        self.open.retain(|key, _| key.pid != pid);
        self.counts.unknown += (before - self.open.len()) as u64;
        self.templates.remove(&pid);
        self.gaps.remove(&pid);
        self.pauses.remove(&pid);
        taken
    }

    fn request(&mut self, key: UnitKey, facts: Facts) -> Option<Request> {
        let Open { id, gcs, gc, handler, published, sealed: _ } = self.close(key)?;
        let UnitKey { pid, tid, begin_ns } = key;
        let lost =
            self.gaps.get(&pid).is_some_and(|gaps| gaps.meet(begin_ns, facts.end_ns.unwrap_or(u64::MAX)));
        let pauses = self.pauses.get(&pid);
        let none = OwnAndOther { own: GcTime::default(), other: Some(GcTime::default()) };
        let within = |end_ns| pauses.map_or(Some(none), |of| of.within(tid, begin_ns, end_ns));
        let times = facts.end_ns.and_then(within);
        // Without an end, what its thread did later may be counted, too.
        let ended = facts.end_ns.is_some();
        let known = ended
            && !lost
            && match times {
                // One that was found out only when it ended is not named by its events.
                Some(times) => times.own == gc,
                None => gc.pauses > 0,
            };
        let other = times.filter(|_| self.pause_is_known(key, &facts)).and_then(|times| times.other);
        let Facts {
            end_ns,
            method,
            path,
            status,
            queue_ns,
            first_byte_ns,
            last_byte_ns,
            gvl_wait_ns,
            states,
            split,
            alloc,
            trace,
            job,
            gc_states,
            pause_ns: _,
        } = facts;
        Some(Request {
            id,
            tid,
            begin_ns,
            end_ns,
            method,
            path,
            status,
            queue_ns,
            first_byte_ns,
            last_byte_ns,
            gcs: known.then_some(gcs),
            gc_ns: known.then_some(gc.ns),
            gc_pauses: known.then_some(gc.pauses),
            gc_other: other,
            gvl_wait_ns: gvl_wait_ns.filter(|_| ended),
            states: states.filter(|_| ended),
            split: split.filter(|_| ended),
            alloc: alloc.filter(|_| ended),
            handler,
            trace: match published {
                Published::One(trace_id) => Some(Trace::published(trace_id, trace)),
                Published::None | Published::Several => trace,
            },
            job,
            is_run: false,
            gc_states,
        })
    }

    /// The id of a unit that no event names.
    pub fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Nothing is counted in a unit any more.
    fn close(&mut self, key: UnitKey) -> Option<Open> {
        let open = self.open.remove(&key)?;
        if self.closed_order.len() >= MAX_CLOSED
            && let Some(oldest) = self.closed_order.pop_front()
        {
            self.closed.remove(&oldest);
        }
        if self.closed.insert(key, open.id).is_none() {
            self.closed_order.push_back(key);
        }
        Some(open)
    }

    fn has_room(&self, key: UnitKey) -> bool {
        self.open.len() < MAX_OPEN || self.open.contains_key(&key)
    }

    fn enter(&mut self, key: UnitKey) -> Option<&mut Open> {
        if !self.has_room(key) {
            self.counts.no_room += 1;
            // There may be room when it ends.
            self.lost(key.pid, key.begin_ns, key.begin_ns);
            return None;
        }
        let (last_id, pauses) = (&mut self.last_id, &mut self.pauses);
        Some(self.open.entry(key).or_insert_with(|| {
            *last_id += 1;
            pauses.entry(key.pid).or_default().serves();
            Open { id: *last_id, ..Open::default() }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::trace::TraceOrigin;

    fn key(tid: u32, begin_ns: u64) -> UnitKey {
        UnitKey { pid: 1, tid, begin_ns }
    }

    fn facts(path: &str) -> Facts {
        Facts { path: Some(path.to_owned()), end_ns: Some(1000), ..Facts::default() }
    }

    /// A pause of the thread of a unit at this time.
    fn pause(units: &mut Units, key: UnitKey, begin_ns: u64, ns: u64) {
        units.pause(key.pid, key.tid, Some(key.begin_ns), (begin_ns, begin_ns + ns));
    }

    fn take(units: &mut Units) -> Vec<Request> {
        units.take(0).into_iter().map(|(_, request)| request).collect()
    }

    /// The trace that a unit's stacks show comes before what its caller said, unless they show several.
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

    /// Events that come before and after the end, which travels in another ring, are all in it.
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

    /// Pauses of other threads count with their part in the time of the unit, whether those threads serve one or not; its own do not,
    /// nor do those of another process.
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
        // Without an end it is not known which there are.
        units.seal(key(7, 2000), Facts { end_ns: None, ..facts("/a") });
        let request = &take(&mut units)[0];
        assert_eq!((request.gcs, request.gc_ns, request.gc_other), (None, None, None));
    }

    /// A pause that was under way when the unit ended is waited for, but not for ever: then what it took is not known.
    #[test]
    fn ended_in_a_pause() {
        let mut units = Units::default();
        let seal = |units: &mut Units, pause_ns| {
            units.seal(key(7, 100), Facts { pause_ns: Some(pause_ns), ..facts("/a") });
        };
        seal(&mut units, 950);
        assert!(units.take(5000).is_empty());
        assert_eq!(units.ended(), BTreeSet::from([1]));
        units.pause(1, 9, None, (950, 1200));
        let gc_other = units.take(5000)[0].1.gc_other;
        assert_eq!(gc_other, Some(GcTime { pauses: 1, ns: 50 }));
        // Its record is lost.
        seal(&mut units, 970);
        assert!(units.take(5000).is_empty());
        let request = &units.take(1000 + PATIENCE_NS)[0].1;
        assert_eq!((request.gc_ns, request.gc_other), (Some(0), None));
        // It began when the unit had ended.
        seal(&mut units, 1001);
        assert_eq!(units.take(5000).len(), 1);
        // Nothing comes any more.
        seal(&mut units, 990);
        assert_eq!(units.end(1)[0].1.gc_other, None);
    }

    /// What names no unit was a pause of one all the same, if the connection of a request was found out when it ended: then the
    /// figures of the unit itself are not known, those of other threads are.
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

    /// A request whose end was lost is unknown, and nothing of it goes to the next one of its thread.
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

    /// Two requests of one thread that end between two looks at the rings are both there.
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

    /// The end of a process hands out what has ended and drops the rest; nothing of it is kept.
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
    /// after, that lay inside, and those whose end was not seen. The others keep theirs.
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

    /// A unit of which an event had no room has no figures, even if there is room when it ends.
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

    /// A stack names the unit that it was taken in, also when that has ended before the stack comes; none of the next one of the thread.
    #[test]
    fn stacks() {
        let mut units = Units::default();
        let id = units.name(key(7, 100)).unwrap();
        assert_eq!(units.cycle(key(7, 100)), Some(id));
        units.seal(key(7, 100), facts("/a"));
        assert_eq!(units.name(key(7, 100)), Some(id));
        assert_eq!(take(&mut units)[0].id, id);
        assert_eq!((units.name(key(7, 100)), units.open()), (Some(id), 0));
        // Of one whose end is lost, too.
        let lost = units.name(key(7, 1100)).unwrap();
        units.seal(key(7, 1200), facts("/b"));
        assert_eq!((units.name(key(7, 1100)), units.counts().unknown), (Some(lost), 1));
        assert!(take(&mut units)[0].id > lost);
        for begin_ns in 2000..2000 + 2 * MAX_CLOSED as u64 {
            units.seal(key(7, begin_ns), facts("/c"));
            units.take(0);
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
}
