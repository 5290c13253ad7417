//! The number of cycles that a program had completed before its first one was seen. `GC.count` shows it: it counts from the start of the
//! VM, and continues in forked children.

use std::collections::{HashMap, HashSet};

use crate::{
    host::proc::{boot_ns, program_start},
    model::seen::CyclesBefore,
};

/// Maximum number of processes whose beginning is remembered; all are forgotten above it.
const REMEMBERED: usize = 1 << 16;

/// How processes started, as far as it was seen.
#[derive(Debug)]
pub(super) struct Beginnings {
    /// When the run started, in nanoseconds since boot.
    run_ns: Option<u64>,
    /// `GC.count` of the parent at the fork, if known.
    forked: HashMap<u32, Option<u64>>,
    /// Processes that have since replaced their program.
    execed: HashSet<u32>,
}

/// The initial value of a program's `GC.count`.
#[derive(Clone, Copy, Debug)]
enum Base {
    /// This number of cycles: those of its parent, or 0.
    Count(u64),
    /// The program is older than the run.
    BeforeRun,
    /// Some cycles may be those of an unseen parent.
    Unknown,
}

/// The beginning of one program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beginning {
    base: Base,
    /// The latest `GC.count` seen.
    pub(super) count: Option<u64>,
    before: Option<CyclesBefore>,
}

impl Beginnings {
    pub(super) fn new() -> Self {
        Self { run_ns: boot_ns(), forked: HashMap::new(), execed: HashSet::new() }
    }

    /// Records that a process with this `GC.count` forked a child.
    pub(super) fn forked(&mut self, child: u32, count: Option<u64>) {
        // Without lost exits, the map does not grow this large.
        if self.forked.len() > REMEMBERED {
            self.forked.clear();
        }
        self.forked.insert(child, count);
    }

    /// The `GC.count` with which a process was forked, if known.
    pub(super) fn count_at_fork(&self, pid: u32) -> Option<u64> {
        self.forked.get(&pid).copied().flatten()
    }

    /// Records that a process has replaced its program: the new one starts counting at 0.
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

    /// The beginning of a program that is traced from now on; `count`: its `GC.count`, if it could be read.
    pub(super) fn of(&self, pid: u32, count: Option<u64>) -> Beginning {
        let base = match self.forked.get(&pid) {
            Some(Some(count)) => Base::Count(*count),
            Some(None) => Base::Unknown,
            None if self.execed.contains(&pid) => Base::Count(0),
            None => self.unseen(pid),
        };
        Beginning { base, count, before: None }
    }

    /// The base for a process whose fork and exec were not seen: the kernel reports these for followed processes only.
    fn unseen(&self, pid: u32) -> Base {
        match program_start(pid).zip(self.run_ns) {
            Some((start, run_ns)) if start.process_ns <= run_ns => Base::BeforeRun,
            Some((start, _)) if start.by_exec => Base::Count(0),
            // A forked child, or a process that is gone.
            _ => Base::Unknown,
        }
    }
}

impl Beginning {
    /// It was forked with this `GC.count`, if that is known.
    pub(super) fn forked(&mut self, count: Option<u64>) {
        self.base = count.map_or(Base::Unknown, Base::Count);
    }

    /// Records that the next reported cycle has the number `count`. `lost`: records of the process were lost before, so that
    /// cycles may be missing for another reason. Returns the result for the first cycle only.
    pub(super) fn reported(&mut self, count: u64, lost: bool) -> Option<CyclesBefore> {
        if self.before.is_some() {
            return None;
        }
        self.before = Some(if lost { CyclesBefore::Unknown } else { self.judge(count.saturating_sub(1)) });
        self.before
    }

    /// The result at the end of the program or of tracing, and whether it is new because no cycle had reported it.
    pub(super) fn ended(&self, lost: bool) -> (CyclesBefore, bool) {
        match (self.before, self.count) {
            (Some(before), _) => (before, false),
            (None, Some(count)) if !lost => (self.judge(count), true),
            _ => (CyclesBefore::Unknown, true),
        }
    }

    fn judge(&self, behind: u64) -> CyclesBefore {
        match self.base {
            Base::Count(base) => CyclesBefore::Missed(behind.saturating_sub(base)),
            Base::BeforeRun => CyclesBefore::Earlier(behind),
            Base::Unknown => CyclesBefore::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beginnings() -> Beginnings {
        Beginnings { run_ns: boot_ns(), ..Beginnings::new() }
    }

    /// Programs that started during the run have missed cycles, others had earlier ones; a child's count starts with its parent's.
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
    }

    /// A child's count starts with its parent's. If that is unknown, nothing is concluded for the child.
    #[test]
    fn children_of_unseen_parents() {
        let mut beginnings = Beginnings { run_ns: Some(0), ..Beginnings::new() };
        beginnings.forked(7, None);
        assert_eq!(beginnings.of(7, Some(70)).reported(71, false), Some(CyclesBefore::Unknown));
        beginnings.execed(7);
        assert_eq!(beginnings.of(7, None).reported(71, false), Some(CyclesBefore::Missed(70)));
        // Without any record: this process has started by an exec, and a process that is gone is unknown.
        assert_eq!(beginnings.of(std::process::id(), None).reported(2, false), Some(CyclesBefore::Missed(1)));
        assert_eq!(beginnings.of(1 << 23, None).reported(2, false), Some(CyclesBefore::Unknown));
    }

    /// A process that has not collected passes on the count with which it was forked; one that runs another program has none.
    #[test]
    fn count_of_a_process_between() {
        let mut beginnings = beginnings();
        assert_eq!(beginnings.count_at_fork(5), None);
        beginnings.forked(5, Some(12));
        beginnings.forked(6, beginnings.count_at_fork(5));
        beginnings.exited(5);
        assert_eq!(beginnings.of(6, None).reported(14, false), Some(CyclesBefore::Missed(1)));
        beginnings.execed(6);
        assert_eq!(beginnings.count_at_fork(6), None);
    }

    /// Without a cycle, the count that was read decides; with lost records the result is unknown.
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
