//! Time intervals in which events were lost, in bounded memory.

use std::collections::VecDeque;

/// Maximum number of gaps; above it, the oldest are merged into one that includes the time between them.
const MAX: usize = 64;

/// Gaps in the events of one process, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Gaps(VecDeque<(u64, u64)>);

impl Gaps {
    /// Adds a gap: events were lost between these times, nanoseconds, both inclusive. Gaps arrive in the order of their start, or nearly: one
    /// that starts before the last one ends is merged into it.
    pub(super) fn add(&mut self, from_ns: u64, until_ns: u64) {
        if let Some((last_from, last_until)) = self.0.back_mut()
            && from_ns <= *last_until
        {
            *last_from = from_ns.min(*last_from);
            *last_until = until_ns.max(*last_until);
            return;
        }
        self.0.push_back((from_ns, until_ns.max(from_ns)));
        if self.0.len() > MAX
            && let Some((from_ns, _)) = self.0.pop_front()
            && let Some(oldest) = self.0.front_mut()
        {
            oldest.0 = from_ns;
        }
    }

    /// Whether events may be missing between these times, both inclusive.
    pub(super) fn meet(&self, begin_ns: u64, end_ns: u64) -> bool {
        self.0.iter().any(|(from_ns, until_ns)| *from_ns <= end_ns && begin_ns <= *until_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gaps that touch are merged, whichever starts first.
    #[test]
    fn joined() {
        let mut gaps = Gaps::default();
        assert!(!gaps.meet(0, u64::MAX));
        gaps.add(10, 20);
        gaps.add(20, 30);
        gaps.add(5, 25);
        assert_eq!(gaps.0, [(5, 30)]);
        gaps.add(40, u64::MAX);
        assert!(gaps.meet(30, 30) && !gaps.meet(31, 39) && gaps.meet(u64::MAX, u64::MAX));
    }

    /// Memory is bounded, however many gaps there are, and no gap is forgotten.
    #[test]
    fn bounded() {
        let mut gaps = Gaps::default();
        let times = || (0..1000).map(|at| at * 10);
        for at in times() {
            gaps.add(at, at + 3);
        }
        assert_eq!(gaps.0.len(), MAX);
        assert!(times().all(|at| gaps.meet(at + 3, at + 3)));
        assert!(!gaps.meet(9984, 9989) && gaps.meet(4, 5));
    }
}
