//! Sums of what threads did with the GVL, for both ended and running threads. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use gctrace_common::gvl::{GvlKey, GvlThread};

use crate::model::gvl_so_far::GvlSoFar;

/// Sums of ended threads by process, and the ended threads that must not be counted again as running ones.
#[derive(Debug, Default)]
pub struct GvlLook {
    over: HashMap<u32, GvlSoFar>,
    /// Threads whose end was reported but which may still be in the kernel's map.
    just_ended: HashSet<(u32, u64)>,
    /// Whether the sums are read, from the start of a run on; if not, `just_ended` is not filled, because it would never be emptied.
    is_used: bool,
}

impl GvlLook {
    /// Adds a thread that has ended.
    pub fn over(&mut self, thread: &GvlThread) {
        let pid = thread.header.tgid;
        self.over.entry(pid).or_default().thread(thread);
        if self.is_used {
            self.just_ended.insert((pid, thread.id));
        }
    }

    /// Sums of the threads of each process, including running ones. If a process has replaced its program, these are the
    /// sums of the earlier program.
    pub fn with(&mut self, running: &[(GvlKey, GvlThread)]) -> BTreeMap<u32, GvlSoFar> {
        self.is_used = true;
        let mut programs: BTreeMap<u32, u32> = BTreeMap::new();
        for (key, _) in running {
            let execs = programs.entry(key.tgid).or_insert(key.execs);
            *execs = key.execs.min(*execs);
        }
        let mut sums: BTreeMap<u32, GvlSoFar> =
            self.over.iter().map(|(pid, over)| (*pid, over.clone())).collect();
        let mut still = HashSet::new();
        for (key, thread) in running.iter().filter(|(key, _)| programs.get(&key.tgid) == Some(&key.execs)) {
            let id = (key.tgid, thread.id);
            if self.just_ended.contains(&id) {
                still.insert(id);
            } else {
                sums.entry(key.tgid).or_default().thread(thread);
            }
        }
        self.just_ended = still;
        sums
    }

    /// A process has ended. Returns the sums of all its threads.
    pub fn ended(&mut self, pid: u32) -> Option<GvlSoFar> {
        self.just_ended.retain(|(of, _)| *of != pid);
        self.over.remove(&pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tgid: u32, id: u64, waits: &[u64]) -> (GvlKey, GvlThread) {
        let mut thread = GvlThread::blank();
        (thread.header.tgid, thread.id) = (tgid, id);
        for &ns in waits {
            thread.buckets[gctrace_common::gvl::bucket(ns)] += 1;
            thread.wait_ns += ns;
        }
        (GvlKey { at: id, tgid, execs: 0 }, thread)
    }

    fn count(sums: &BTreeMap<u32, GvlSoFar>, pid: u32) -> (u64, u64) {
        sums.get(&pid).map_or((0, 0), |sums| (sums.waits().map(|(_, count)| count).sum(), sums.wait_ns))
    }

    /// Every thread counts once, whether it runs, has ended, or is in between; sums of different programs are not mixed.
    #[test]
    fn once() {
        let mut look = GvlLook::default();
        let (one, two) = (thread(1, 1, &[1000, 3000]), thread(1, 2, &[5000]));
        let mut next = thread(1, 3, &[7]);
        next.0.execs = 1;
        assert_eq!(count(&look.with(&[one, two, next]), 1), (3, 9000));
        // Its end arrived through the ring; it is still in the map.
        look.over(&one.1);
        assert_eq!(count(&look.with(&[one, two]), 1), (3, 9000));
        assert_eq!(count(&look.with(&[one, two]), 1), (3, 9000));
        assert_eq!(count(&look.with(&[two]), 1), (3, 9000));
        look.over(&two.1);
        assert_eq!(look.ended(1).unwrap().wait_ns, 9000);
        assert_eq!(look.ended(1), None);
        assert_eq!(count(&look.with(&[next]), 1), (1, 7));
    }

    /// Reported sums never decrease, and nothing is reported twice.
    #[test]
    fn grows() {
        let sums = |waits: &[u64]| {
            let mut sums = GvlSoFar::default();
            sums.thread(&thread(1, 1, waits).1);
            sums
        };
        let mut reported = GvlSoFar::default();
        assert_eq!(sums(&[1000, 2000]).growth(&mut reported), sums(&[1000, 2000]));
        assert_eq!(sums(&[1000]).growth(&mut reported), GvlSoFar::default());
        assert_eq!(sums(&[1000, 2000, 2000]).growth(&mut reported), sums(&[2000]));
        assert_eq!(reported, sums(&[1000, 2000, 2000]));
    }
}
