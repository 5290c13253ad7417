//! How many cycles a program had behind it when its first one was seen. `GC.count` shows it: it counts from the start of the
//! VM, and goes on in forked children.

use std::collections::{HashMap, HashSet};

use crate::{
    host::proc::{boot_ns, start_ns},
    model::seen::CyclesBefore,
};

/// Most processes that are remembered by how they began.
const REMEMBERED: usize = 1 << 16;

/// How processes have begun, as far as it was seen.
#[derive(Debug)]
pub(super) struct Beginnings {
    /// When the run began, nanoseconds since boot.
    run_ns: Option<u64>,
    /// `GC.count` of the parent at the fork.
    forked: HashMap<u32, u64>,
    /// Processes that have replaced their program since.
    execed: HashSet<u32>,
}

/// What is known of one program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beginning {
    /// Cycles that are its parent's; `None`: any number of unseen cycles may have preceded.
    base: Option<u64>,
    /// `GC.count` as seen last.
    pub(super) count: Option<u64>,
    before: Option<CyclesBefore>,
}

impl Beginnings {
    pub(super) fn new() -> Self {
        Self { run_ns: boot_ns(), forked: HashMap::new(), execed: HashSet::new() }
    }

    /// A process was forked by one with this `GC.count`.
    pub(super) fn forked(&mut self, child: u32, count: Option<u64>) {
        // Only those whose exits were lost stay.
        if self.forked.len() > REMEMBERED {
            self.forked.clear();
        }
        if let Some(count) = count {
            self.forked.insert(child, count);
        }
    }

    /// A process has replaced its program: the next one begins from nothing.
    pub(super) fn execed(&mut self, pid: u32) {
        if self.execed.len() > REMEMBERED {
            self.execed.clear();
        }
        self.forked.remove(&pid);
        self.execed.insert(pid);
    }

    pub(super) fn exited(&mut self, pid: u32) {
        self.forked.remove(&pid);
        self.execed.remove(&pid);
    }

    /// A program is traced from now on; its `GC.count` if it could be read.
    pub(super) fn of(&self, pid: u32, count: Option<u64>) -> Beginning {
        let began_later = || start_ns(pid).zip(self.run_ns).is_some_and(|(start, run)| start > run);
        let base = match self.forked.get(&pid) {
            Some(&base) => Some(base),
            None => (self.execed.contains(&pid) || began_later()).then_some(0),
        };
        Beginning { base, count, before: None }
    }
}

impl Beginning {
    /// A cycle with this number is the next that is reported. `lost`: records of the process were lost before it, so that
    /// cycles may be missing for another reason. Returns what the first one reported.
    pub(super) fn reported(&mut self, count: u64, lost: bool) -> Option<CyclesBefore> {
        if self.before.is_some() {
            return None;
        }
        self.before = Some(if lost { CyclesBefore::Unknown } else { self.judge(count.saturating_sub(1)) });
        self.before
    }

    /// The program has ended, or tracing has. Also returns it if no cycle had reported it.
    pub(super) fn ended(&self, lost: bool) -> (CyclesBefore, bool) {
        match (self.before, self.count) {
            (Some(before), _) => (before, false),
            (None, Some(count)) if !lost => (self.judge(count), true),
            _ => (CyclesBefore::Unknown, true),
        }
    }

    fn judge(&self, behind: u64) -> CyclesBefore {
        match self.base {
            Some(base) => CyclesBefore::Missed(behind.saturating_sub(base)),
            None => CyclesBefore::Earlier(behind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beginnings() -> Beginnings {
        Beginnings { run_ns: boot_ns(), ..Beginnings::new() }
    }

    /// Programs that started during the run have missed cycles, others had earlier ones; a child's begin with its parent's.
    #[test]
    fn judged() {
        let mut beginnings = beginnings();
        // This process is older than the run.
        let own = std::process::id();
        assert_eq!(beginnings.of(own, None).reported(70, false), Some(CyclesBefore::Earlier(69)));
        beginnings.execed(own);
        let mut fresh = beginnings.of(own, None);
        assert_eq!(fresh.reported(70, false), Some(CyclesBefore::Missed(69)));
        assert_eq!(fresh.reported(71, false), None, "only the first one reports");
        assert_eq!(fresh.ended(false), (CyclesBefore::Missed(69), false));
        beginnings.forked(5, Some(12));
        assert_eq!(beginnings.of(5, None).reported(13, false), Some(CyclesBefore::Missed(0)));
        assert_eq!(beginnings.of(5, None).reported(15, false), Some(CyclesBefore::Missed(2)));
        beginnings.exited(5);
        assert_eq!(beginnings.of(5, None).reported(15, false), Some(CyclesBefore::Earlier(14)));
    }

    /// Without a cycle the count that was read shows it; where records were lost nothing does.
    #[test]
    fn absent() {
        let mut beginnings = beginnings();
        beginnings.execed(7);
        assert_eq!(beginnings.of(7, Some(4)).ended(false), (CyclesBefore::Missed(4), true));
        assert_eq!(beginnings.of(7, None).ended(false), (CyclesBefore::Unknown, true));
        assert_eq!(beginnings.of(7, Some(4)).ended(true), (CyclesBefore::Unknown, true));
        assert_eq!(beginnings.of(7, None).reported(9, true), Some(CyclesBefore::Unknown));
    }
}
