//! The latest GC pauses of a process, to find those within a time interval; in bounded memory.

use std::collections::VecDeque;

use super::gaps::Gaps;
use crate::model::request::GcTime;

/// Maximum number of pauses remembered for a server.
const MAX: usize = 1 << 14;
/// The same for a process that has served nothing so far.
const MAX_IDLE: usize = 1 << 8;

/// A pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PauseAt {
    /// The thread that was in the GC.
    pub(super) tid: u32,
    /// Start, nanoseconds.
    pub(super) begin_ns: u64,
    /// End, nanoseconds.
    pub(super) end_ns: u64,
}

/// Pauses of one thread, and those of the other threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnAndOther {
    /// Pauses of the thread whose records arrived.
    pub(super) own: GcTime,
    /// Pauses of the other threads; `None`: some may be missing.
    pub(super) other: Option<GcTime>,
}

/// The pauses of one process, in the order of their ends. Two threads of a process are never in the GC at the same time, so this is also
/// the order of their starts.
#[derive(Clone, Debug, Default)]
pub(super) struct GcPauses {
    last: VecDeque<PauseAt>,
    /// End of the last pause that was forgotten.
    forgotten_ns: u64,
    gaps: Gaps,
    serves: bool,
}

impl GcPauses {
    /// Notes that the process serves requests or jobs.
    pub(super) fn serves(&mut self) {
        self.serves = true;
    }

    pub(super) fn add(&mut self, pause: PauseAt) {
        let room = if self.serves { MAX } else { MAX_IDLE };
        if self.last.len() >= room
            && let Some(oldest) = self.last.pop_front()
        {
            self.forgotten_ns = oldest.end_ns;
        }
        self.last.push_back(pause);
    }

    /// GC records were lost between these times. A pause is recorded when it ends, so a missing one can have started as early as the end
    /// of the last known pause.
    pub(super) fn lost(&mut self, from_ns: u64, until_ns: u64) {
        let last_ns = self.last.back().map_or(0, |last| last.end_ns);
        self.gaps.add(from_ns.min(last_ns), until_ns);
    }

    /// Whether the pause that started at this time has ended, or is too old to be known.
    pub(super) fn has(&self, begin_ns: u64) -> bool {
        begin_ns < self.forgotten_ns || self.last.iter().rev().any(|pause| pause.begin_ns == begin_ns)
    }

    /// Pauses of a thread and of other threads, clipped to a time interval. `None`: its first pauses have been forgotten.
    pub(super) fn within(&self, tid: u32, begin_ns: u64, end_ns: u64) -> Option<OwnAndOther> {
        if begin_ns < self.forgotten_ns {
            return None;
        }
        let (mut own, mut other) = (GcTime::default(), GcTime::default());
        for pause in self.last.iter().rev().take_while(|pause| pause.end_ns > begin_ns) {
            if pause.begin_ns >= end_ns {
                continue;
            }
            let sum = if pause.tid == tid { &mut own } else { &mut other };
            sum.pauses = sum.pauses.saturating_add(1);
            sum.ns += pause.end_ns.min(end_ns).saturating_sub(pause.begin_ns.max(begin_ns));
        }
        let complete = !self.gaps.meet(begin_ns, end_ns);
        Some(OwnAndOther { own, other: complete.then_some(other) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(tid: u32, begin_ns: u64, end_ns: u64) -> PauseAt {
        PauseAt { tid, begin_ns, end_ns }
    }

    fn times(pauses: &GcPauses, tid: u32, begin_ns: u64, end_ns: u64) -> Option<[(u32, u64); 2]> {
        let sums = pauses.within(tid, begin_ns, end_ns)?;
        Some([sums.own, sums.other?].map(|time| (time.pauses, time.ns)))
    }

    /// Only the part of a pause within the interval counts, and it counts for the thread that was in the GC.
    #[test]
    fn parts() {
        let mut pauses = GcPauses::default();
        for pause in [at(1, 10, 20), at(2, 30, 50), at(1, 60, 61), at(3, 70, 90)] {
            pauses.add(pause);
        }
        assert_eq!(times(&pauses, 1, 0, 100), Some([(2, 11), (2, 40)]));
        assert_eq!(times(&pauses, 2, 40, 80), Some([(1, 10), (2, 11)]));
        assert_eq!(times(&pauses, 1, 20, 30), Some([(0, 0), (0, 0)]));
        assert_eq!(times(&pauses, 9, 89, 200), Some([(0, 0), (1, 1)]));
        assert!(pauses.has(70) && !pauses.has(71));
    }

    /// A lost pause may have started before the last record that arrived, but not before the last pause ended.
    #[test]
    fn lost() {
        let mut pauses = GcPauses::default();
        pauses.add(at(1, 10, 20));
        pauses.lost(45, 50);
        pauses.add(at(1, 60, 61));
        assert_eq!(times(&pauses, 1, 5, 19), Some([(1, 9), (0, 0)]));
        assert_eq!(times(&pauses, 1, 5, 20), None);
        assert_eq!(times(&pauses, 1, 25, 30), None);
        assert_eq!(times(&pauses, 1, 50, 70), None);
        assert_eq!(times(&pauses, 1, 51, 70), Some([(1, 1), (0, 0)]));
        assert_eq!(pauses.within(1, 5, 20).unwrap().own.ns, 10, "that of the thread itself is there");
        let mut unseen = GcPauses::default();
        unseen.lost(45, 50);
        assert_eq!(times(&unseen, 1, 0, 1), None, "its first pause may have begun at any time");
    }

    /// Memory is bounded, and figures that depend on forgotten pauses are unknown.
    #[test]
    fn bounded() {
        let mut pauses = GcPauses::default();
        let all = MAX as u64 + 10;
        for n in 0..all {
            pauses.add(at(1, n * 10, n * 10 + 1));
            if n == 19 {
                assert_eq!(pauses.last.len(), 20);
                pauses.serves();
            }
        }
        assert_eq!(pauses.last.len(), MAX);
        assert_eq!(times(&pauses, 1, 90, all * 10), None);
        assert_eq!(times(&pauses, 1, 91, all * 10), Some([(MAX as u32, MAX as u64), (0, 0)]));
        assert!(pauses.has(0) && pauses.has(100));
        let mut idle = GcPauses::default();
        (0..all).for_each(|n| idle.add(at(1, n * 10, n * 10 + 1)));
        assert_eq!(idle.last.len(), MAX_IDLE);
    }
}
