//! Units of work. Events identify a unit by its thread and start; everything else is known when the unit ends.
//!
//! A unit is created when an event first names it, or when its end is seen. Its end seals it: its facts are final,
//! and it is handed out once all of its events have been counted. A unit whose end was lost is detected by the next unit of its
//! thread, and its events are never attributed to that one.

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
    request::{Allocated, GcTime, Job, Request, RequestMemory, States, UnitStates},
    stack::Frame,
    trace::{Span, Trace},
};

/// Maximum number of open units, over all processes.
const MAX_OPEN: usize = 1 << 16;
/// Maximum number of closed units that are remembered.
const MAX_CLOSED: usize = 1 << 14;
/// Maximum time that an ended unit waits for the record of a pause that had not ended by then, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;

/// How events identify a unit: by process, thread, and the time since when the thread has been serving it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitKey {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// Since when, nanoseconds.
    pub begin_ns: u64,
}

/// What is known about a unit that has not been handed out.
#[derive(Clone, Debug, Default)]
struct Open {
    id: u64,
    gcs: u32,
    gc: GcTime,
    handler: Option<Arc<Frame>>,
    published: Published,
    /// Whether its end has been seen.
    sealed: bool,
}

/// The traces of the spans seen in a unit's stacks.
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
    /// See [`Request::response_bytes`].
    pub response_bytes: Option<u64>,
    /// Start of the GC pause that a thread of its process was in when it ended, nanoseconds; `None`: no thread was in one.
    pub pause_ns: Option<u64>,
    /// See [`Request::gvl_wait_ns`].
    pub gvl_wait_ns: Option<u64>,
    /// See [`Request::states`].
    pub states: Option<States>,
    /// See [`Request::split`].
    pub split: Option<GvlSplit>,
    /// See [`Request::alloc`].
    pub alloc: Option<Allocated>,
    /// See [`Request::memory`].
    pub memory: RequestMemory,
    /// See [`Request::trace`].
    pub trace: Option<Trace>,
    /// See [`Request::job`].
    pub job: Option<Job>,
    /// See [`Request::gc_states`].
    pub gc_states: Option<Box<UnitStates>>,
}

/// Result of sealing a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sealed {
    /// The unit is handed out once all of its events have been counted.
    Taken,
    /// There was no room for the unit.
    NoRoom,
    /// The unit had already ended.
    Repeated,
}

/// Counters of what could not be known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitCounts {
    /// Units named by events whose end was not seen.
    pub unknown: u64,
    /// Events dropped because there was no room for their unit.
    pub no_room: u64,
}

/// The units of all processes.
#[derive(Debug, Default)]
pub struct Units {
    last_id: u64,
    open: BTreeMap<UnitKey, Open>,
    /// Units that were handed out last, or whose end was not seen: their stacks may arrive later.
    closed: HashMap<UnitKey, u64>,
    closed_order: VecDeque<UnitKey>,
    /// Ended units of which events may still be counted.
    sealed: Vec<(UnitKey, Facts)>,
    templates: HashMap<u32, Templates>,
    /// Times for which events of units were lost, by pid.
    gaps: HashMap<u32, Gaps>,
    pauses: HashMap<u32, GcPauses>,
    counts: UnitCounts,
}

impl Units {
    /// Counters of what could not be known so far.
    pub fn counts(&self) -> UnitCounts {
        self.counts
    }

    /// Number of open units.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Counts a cycle started in a unit, unless the unit has been handed out. Returns the unit's id, or `None` if there is no room for the unit.
    pub fn cycle(&mut self, key: UnitKey) -> Option<u64> {
        if let Some(id) = self.over(key) {
            return Some(id);
        }
        let open = self.enter(key)?;
        open.gcs = open.gcs.saturating_add(1);
        Some(open.id)
    }

    /// The id of the unit that a stack names; `None`: there is no room for the unit.
    pub fn name(&mut self, key: UnitKey) -> Option<u64> {
        if let Some(open) = self.open.get(&key) {
            return Some(open.id);
        }
        self.over(key).or_else(|| self.has_room(key).then(|| self.enter(key).map(|open| open.id)).flatten())
    }

    /// Adds a stack captured in a unit, with the handler and the active span that it shows, if any. The handler of the first stack that shows
    /// one is kept, and the trace of the spans if it is the same for all.
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

    /// Adds a GC pause of a thread from `begin_ns` to `end_ns`, nanoseconds. `unit_ns`: since when the thread serves a unit, if it does.
    pub fn pause(&mut self, pid: u32, tid: u32, unit_ns: Option<u64>, (begin_ns, end_ns): (u64, u64)) {
        self.pauses.entry(pid).or_default().add(PauseAt { tid, begin_ns, end_ns });
        let key = unit_ns.map(|begin_ns| UnitKey { pid, tid, begin_ns });
        if let Some(key) = key.filter(|key| self.over(*key).is_none())
            && let Some(open) = self.enter(key)
        {
            open.gc.pauses = open.gc.pauses.saturating_add(1);
            open.gc.ns = open.gc.ns.saturating_add(end_ns.saturating_sub(begin_ns));
        }
    }

    /// Events of a process were lost between these times, `CLOCK_MONOTONIC` nanoseconds, both inclusive: the counts of units
    /// that were open meanwhile are too low.
    pub fn lost(&mut self, pid: u32, from_ns: u64, until_ns: u64) {
        self.gaps.entry(pid).or_default().add(from_ns, until_ns);
        self.pauses.entry(pid).or_default().lost(from_ns, until_ns);
    }

    /// Seals a unit that has ended. Earlier units of its thread that are still open have ended unseen.
    pub fn seal(&mut self, key: UnitKey, mut facts: Facts) -> Sealed {
        if self.open.get(&key).is_some_and(|open| open.sealed) {
            return Sealed::Repeated;
        }
        let older = self.open.range(UnitKey { begin_ns: 0, ..key }..key);
        let lost: Vec<UnitKey> = older.filter(|(_, open)| !open.sealed).map(|(key, _)| *key).collect();
        for key in &lost {
            self.close(*key);
        }
        self.counts.unknown += lost.len() as u64;
        facts.path =
            facts.path.map(|path| self.templates.entry(key.pid).or_default().admit(path, facts.status));
        let Some(open) = self.enter(key) else { return Sealed::NoRoom };
        open.sealed = true;
        self.sealed.push((key, facts));
        Sealed::Taken
    }

    /// Hands out the units that have ended: all their events have been counted. A unit that ended in a GC pause waits for the pause's record,
    /// at most a second after its end. `waits`: the processes whose units are to stay.
    pub fn take(&mut self, now_ns: u64, waits: impl Fn(u32) -> bool) -> Vec<(u32, Request)> {
        let sealed = std::mem::take(&mut self.sealed);
        let is_due = |(key, facts): &(UnitKey, Facts)| !waits(key.pid) && self.is_due(*key, facts, now_ns);
        let (due, waiting) = sealed.into_iter().partition(is_due);
        self.sealed = waiting;
        self.requests(due)
    }

    fn is_due(&self, key: UnitKey, facts: &Facts, now_ns: u64) -> bool {
        let due_ns = facts.end_ns.unwrap_or_default().saturating_add(PATIENCE_NS);
        now_ns >= due_ns || self.pause_is_known(key, facts)
    }

    /// Whether the record of the pause in which a unit ended has arrived; true if it ended in none.
    fn pause_is_known(&self, key: UnitKey, facts: &Facts) -> bool {
        let Some((pause_ns, end_ns)) = facts.pause_ns.zip(facts.end_ns) else { return true };
        pause_ns >= end_ns || self.pauses.get(&key.pid).is_some_and(|pauses| pauses.has(pause_ns))
    }

    fn requests(&mut self, sealed: Vec<(UnitKey, Facts)>) -> Vec<(u32, Request)> {
        sealed.into_iter().filter_map(|(key, facts)| Some((key.pid, self.request(key, facts)?))).collect()
    }

    /// Processes with units that have ended and have not been handed out yet.
    pub fn ended(&self) -> BTreeSet<u32> {
        self.sealed.iter().map(|(key, _)| key.pid).collect()
    }

    /// A process, or tracing of it, has ended. Hands out its units that have ended; the others never will.
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
        // Without an end, counts may include what its thread did later.
        let ended = facts.end_ns.is_some();
        let known = ended
            && !lost
            && match times {
                // A unit that was detected only at its end is not named by its events.
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
            response_bytes,
            gvl_wait_ns,
            states,
            split,
            alloc,
            memory,
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
            response_bytes,
            gcs: known.then_some(gcs),
            gc_ns: known.then_some(gc.ns),
            gc_pauses: known.then_some(gc.pauses),
            gc_other: other,
            gvl_wait_ns: gvl_wait_ns.filter(|_| ended),
            states: states.filter(|_| ended),
            split: split.filter(|_| ended),
            alloc: alloc.filter(|_| ended),
            memory: if ended { memory } else { RequestMemory::default() },
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

    /// A new id, for a unit that no event names.
    pub fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Closes a unit: nothing is counted in it any more.
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

    /// The id of a unit that has been handed out, or whose end was not seen.
    fn over(&self, key: UnitKey) -> Option<u64> {
        self.closed.get(&key).copied().filter(|_| !self.open.contains_key(&key))
    }

    fn has_room(&self, key: UnitKey) -> bool {
        self.open.len() < MAX_OPEN || self.open.contains_key(&key)
    }

    fn enter(&mut self, key: UnitKey) -> Option<&mut Open> {
        if !self.has_room(key) {
            self.counts.no_room += 1;
            // There may be room when the unit ends.
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
mod tests;
