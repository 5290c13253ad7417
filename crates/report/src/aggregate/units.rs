//! Units of work: what events name by thread and begin, and what it turns out to be when it ends.
//!
//! A unit is entered when the first event names it, or when its end is seen. Its end seals it: from then on it does not change,
//! and it is handed out once every event of it has been counted. A unit whose end is lost is known by the next one of its
//! thread, and never becomes another's.

use std::collections::{BTreeMap, HashMap};

use super::endpoint::Templates;
use crate::model::request::Request;

/// Units that are open at one time, over all processes.
const MAX_OPEN: usize = 1 << 16;

/// What events name a unit by: process, thread, and since when that serves it, nanoseconds.
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
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    id: u64,
    gcs: u32,
    gc_ns: u64,
    /// Its end has been seen.
    sealed: bool,
}

/// What the end of a unit tells.
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
    /// See [`Request::first_byte_ns`].
    pub first_byte_ns: Option<u64>,
    /// See [`Request::last_byte_ns`].
    pub last_byte_ns: Option<u64>,
}

/// Counters of what could not be known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitCounts {
    /// Units that events name and whose end was not seen.
    pub unknown: u64,
    /// Events whose unit had no room.
    pub no_room: u64,
}

/// The units of all processes.
#[derive(Debug, Default)]
pub struct Units {
    last_id: u64,
    open: BTreeMap<UnitKey, Open>,
    /// Ended, with what may still be counted in them.
    sealed: Vec<(UnitKey, Facts)>,
    templates: HashMap<u32, Templates>,
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

    /// A cycle was started in a unit; its id, if it can be kept.
    pub fn cycle(&mut self, key: UnitKey) -> Option<u64> {
        let open = self.enter(key)?;
        open.gcs = open.gcs.saturating_add(1);
        Some(open.id)
    }

    /// The thread of a unit stood in a GC pause.
    pub fn pause(&mut self, key: UnitKey, ns: u64) {
        if let Some(open) = self.enter(key) {
            open.gc_ns = open.gc_ns.saturating_add(ns);
        }
    }

    /// A unit has ended. What was named of its thread and began before has ended unseen.
    pub fn seal(&mut self, key: UnitKey, mut facts: Facts) {
        let older = self.open.range(UnitKey { begin_ns: 0, ..key }..key);
        let lost: Vec<UnitKey> = older.filter(|(_, open)| !open.sealed).map(|(key, _)| *key).collect();
        for key in &lost {
            self.open.remove(key);
        }
        self.counts.unknown += lost.len() as u64;
        facts.path = facts.path.map(|path| self.templates.entry(key.pid).or_default().admit(path));
        if let Some(open) = self.enter(key) {
            open.sealed = true;
            self.sealed.push((key, facts));
        }
    }

    /// Hands out the units that have ended: all their events have been counted.
    pub fn take(&mut self) -> Vec<(u32, Request)> {
        let sealed = std::mem::take(&mut self.sealed);
        sealed.into_iter().filter_map(|(key, facts)| Some((key.pid, self.request(key, facts)?))).collect()
    }

    /// A process has ended, or tracing of it has. Hands out its units that have ended; the others never will.
    pub fn end(&mut self, pid: u32) -> Vec<(u32, Request)> {
        let (of_it, others) =
            std::mem::take(&mut self.sealed).into_iter().partition(|(key, _)| key.pid == pid);
        self.sealed = of_it;
        let taken = self.take();
        self.sealed = others;
        let before = self.open.len();
        self.open.retain(|key, _| key.pid != pid);
        self.counts.unknown += (before - self.open.len()) as u64;
        self.templates.remove(&pid);
        taken
    }

    fn request(&mut self, key: UnitKey, facts: Facts) -> Option<Request> {
        let Open { id, gcs, gc_ns, .. } = self.open.remove(&key)?;
        let Facts { end_ns, method, path, status, first_byte_ns, last_byte_ns } = facts;
        let UnitKey { tid, begin_ns, .. } = key;
        Some(Request {
            id,
            tid,
            begin_ns,
            end_ns,
            method,
            path,
            status,
            first_byte_ns,
            last_byte_ns,
            gcs,
            gc_ns,
        })
    }

    fn enter(&mut self, key: UnitKey) -> Option<&mut Open> {
        if self.open.len() >= MAX_OPEN && !self.open.contains_key(&key) {
            self.counts.no_room += 1;
            return None;
        }
        let last_id = &mut self.last_id;
        Some(self.open.entry(key).or_insert_with(|| {
            *last_id += 1;
            Open { id: *last_id, ..Open::default() }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tid: u32, begin_ns: u64) -> UnitKey {
        UnitKey { pid: 1, tid, begin_ns }
    }

    fn facts(path: &str) -> Facts {
        Facts { path: Some(path.to_owned()), end_ns: Some(1000), ..Facts::default() }
    }

    /// Events that come before and after the end, which travels in another ring, are all in it.
    #[test]
    fn late_events() {
        let mut units = Units::default();
        let id = units.cycle(key(7, 100)).unwrap();
        units.pause(key(7, 100), 5);
        units.seal(key(7, 100), facts("/a"));
        units.pause(key(7, 100), 6);
        let taken = units.take();
        assert_eq!(taken.len(), 1);
        let request = &taken[0].1;
        assert_eq!((request.id, request.gcs, request.gc_ns), (id, 1, 11));
        assert_eq!(request.duration_ns(), Some(900));
        assert!(units.take().is_empty());
        assert_eq!((units.open(), units.counts()), (0, UnitCounts::default()));
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
        let taken = units.take();
        assert_eq!((taken[0].1.id, taken[0].1.gcs), (next, 1));
        units.seal(key(8, 50), facts("/c"));
        assert_eq!(units.take()[0].1.id, other);
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
        units.pause(key(7, 200), 3);
        let paths: Vec<_> = units.take().into_iter().map(|(_, request)| request.endpoint()).collect();
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
        assert_eq!(units.take().len(), 1);
    }

    /// Memory is bounded: what has no room is counted.
    #[test]
    fn bounded() {
        let mut units = Units::default();
        for tid in 0..(MAX_OPEN as u32 + 10) {
            units.pause(key(tid, 1), 1);
        }
        assert_eq!((units.open(), units.counts().no_room), (MAX_OPEN, 10));
        assert_eq!(units.cycle(key(3, 1)), Some(4));
    }
}
