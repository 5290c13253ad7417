//! Stops and waits of the last seconds, by whole seconds of `CLOCK_MONOTONIC`. Memory is bounded. Pure.

use std::collections::{BTreeMap, VecDeque};

use gctrace_common::gvl::{BUCKETS, bucket, bucket_most};

use super::trigger::WINDOW_S;
use crate::model::gvl_so_far::GvlSoFar;

const SECOND_NS: u64 = 1_000_000_000;
/// Histogram of durations.
type Counts = [u64; BUCKETS];

/// One second.
#[derive(Clone, Debug)]
struct Second {
    /// Time of stops within this second, nanoseconds.
    stopped_ns: u64,
    /// Stops that became known in this second, by length.
    ended: Box<Counts>,
}

impl Default for Second {
    fn default() -> Self {
        Self { stopped_ns: 0, ended: Box::new([0; BUCKETS]) }
    }
}

/// The stops of a process.
#[derive(Clone, Debug, Default)]
pub(super) struct Stops {
    seconds: BTreeMap<u64, Second>,
}

/// The values of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    /// Share of stops, in millionths.
    pub(super) share: u64,
    /// Lower bound of the 99th percentile of the stops, nanoseconds.
    pub(super) p99_ns: u64,
}

impl Stops {
    /// Adds a stop that is known since `now_ns`. Those of a cycle are known when it has been swept, which may be long after they ended: they count in
    /// the quantile where they become known, and in the share where they were, if that is still in the window.
    pub(super) fn add(&mut self, begin_ns: u64, ns: u64, now_ns: u64) {
        let end_ns = begin_ns.saturating_add(ns);
        let last = end_ns / SECOND_NS;
        // Older seconds are no longer in any window.
        let begin_ns = begin_ns.max(last.saturating_sub(WINDOW_S) * SECOND_NS);
        for at in begin_ns / SECOND_NS..=last {
            let (from, to) = ((at * SECOND_NS).max(begin_ns), (at + 1).saturating_mul(SECOND_NS).min(end_ns));
            self.seconds.entry(at).or_default().stopped_ns += to.saturating_sub(from);
        }
        self.seconds.entry(last.max(now_ns / SECOND_NS)).or_default().ended[bucket(ns)] += 1;
    }

    /// The most recent window of whole seconds, with the stops known so far.
    pub(super) fn look(&mut self, now_ns: u64) -> Shown {
        let end = now_ns / SECOND_NS;
        let begin = end.saturating_sub(WINDOW_S);
        self.seconds = self.seconds.split_off(&begin);
        let window = || self.seconds.range(begin..end).map(|(_, second)| second);
        let stopped_ns: u64 = window().map(|second| second.stopped_ns).sum();
        let share = stopped_ns / (WINDOW_S * SECOND_NS / 1_000_000);
        Shown { share, p99_ns: p99_at_least(window().map(|second| &*second.ended)) }
    }
}

/// Waits of a process for the GVL, from sums that are updated about once a second.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    reported: GvlSoFar,
    /// For each report: its time, and the number of waits since the previous report.
    grown: VecDeque<(u64, Box<Counts>)>,
}

impl Waits {
    /// Adds a report of the sums. Returns a lower bound of the 99th percentile of the waits in the window, nanoseconds.
    pub(super) fn add(&mut self, so_far: &GvlSoFar, now_ns: u64) -> u64 {
        let growth = so_far.growth(&mut self.reported);
        let mut counts = Box::new([0; BUCKETS]);
        counts.iter_mut().zip(growth.counts()).for_each(|(count, grown)| *count = grown);
        self.grown.push_back((now_ns, counts));
        let oldest = now_ns.saturating_sub(WINDOW_S * SECOND_NS);
        // The first one kept covers the time since the report before it.
        while self.grown.front().is_some_and(|(at, _)| *at <= oldest)
            || self.grown.len() as u64 > 2 * WINDOW_S
        {
            self.grown.pop_front();
        }
        p99_at_least(self.grown.iter().map(|(_, counts)| &**counts))
    }
}

/// The lower bound of the bucket with the 99th percentile; 0 if there are no values.
fn p99_at_least<'a>(all: impl Iterator<Item = &'a Counts>) -> u64 {
    let mut sums = [0_u64; BUCKETS];
    for counts in all {
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let count: u64 = sums.iter().sum();
    let wanted = (count * 99).div_ceil(100);
    let mut passed = 0;
    let found = sums.iter().position(|count| {
        passed += count;
        wanted > 0 && passed >= wanted
    });
    match found {
        None | Some(0) => 0,
        Some(at) => bucket_most(at - 1).map_or(0, |most| most + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: u64 = SECOND_NS;

    /// A share is relative to ten whole seconds, and a stop that crosses a second counts in both.
    #[test]
    fn shares() {
        let mut stops = Stops::default();
        assert_eq!(stops.look(100 * S), Shown::default());
        stops.add(105 * S + S / 2, S, 106 * S + S / 2);
        assert_eq!(stops.look(106 * S).share, 50_000, "the second half is in the current second");
        assert_eq!(stops.look(107 * S - 1).share, 50_000);
        assert_eq!(stops.look(107 * S).share, 100_000);
        assert_eq!(stops.look(115 * S).share, 100_000);
        // Reported late, because its cycle has just ended.
        stops.add(109 * S, 2 * S, 115 * S);
        assert_eq!(stops.look(116 * S).share, 250_000);
        assert_eq!(stops.look(117 * S).share, 200_000);
        stops.add(20 * S, S, 117 * S);
        assert_eq!(stops.look(118 * S).share, 200_000, "much too late");
        assert_eq!(stops.look(122 * S).share, 0);
        assert_eq!((stops.look(128 * S), stops.seconds.len()), (Shown::default(), 0));
    }

    /// A cycle whose sweep takes longer than the window has its pauses in the quantile when it ends.
    #[test]
    fn known_late() {
        let mut stops = Stops::default();
        (101..=120).for_each(|second| assert_eq!(stops.look(second * S), Shown::default()));
        stops.add(100 * S, 300_000_000, 120 * S + 1);
        let shown = stops.look(121 * S);
        assert!((262_000_000..=300_000_000).contains(&shown.p99_ns), "{shown:?}");
        assert_eq!(shown.share, 0, "the stop itself is in no window any more");
        assert!(stops.look(130 * S).p99_ns > 0);
        assert_eq!((stops.look(131 * S), stops.seconds.len()), (Shown::default(), 0));
    }

    /// Impossible times do no harm.
    #[test]
    fn absurd() {
        let mut stops = Stops::default();
        stops.add(5, u64::MAX, 7);
        stops.add(u64::MAX - 5, 4, u64::MAX);
        assert!(stops.seconds.len() as u64 <= WINDOW_S + 1);
        assert_eq!(stops.look(30 * S).share, 0);
    }

    proptest! {
        /// The quantile is in the right bucket: never above the exact one, and less than an eighth (or the first bucket) below it.
        #[test]
        fn quantiles(mut times in proptest::collection::vec(0_u64..100_000_000_000, 1..300)) {
            let mut counts = [0; BUCKETS];
            for &ns in &times {
                counts[bucket(ns)] += 1;
            }
            let found = p99_at_least(std::iter::once(&counts));
            times.sort_unstable();
            let exact = times[(times.len() * 99).div_ceil(100) - 1];
            prop_assert!(found <= exact && exact <= found + found / 8 + 1024, "{} {}", found, exact);
        }

        /// The share equals that computed from the stops themselves.
        #[test]
        fn exact(stops in proptest::collection::vec((0_u64..700, 1_u64..900), 0..40), later in 0_u64..12) {
            let mut window = Stops::default();
            let (mut all, mut at) = (Vec::new(), 100_000);
            for (gap, ms) in stops {
                let begin = at + gap;
                at = begin + ms;
                all.push((begin, at));
                window.add(begin * 1_000_000, ms * 1_000_000, at * 1_000_000);
            }
            let end = at / 1000 + later;
            let (from, to) = ((end - WINDOW_S) * 1000, end * 1000);
            let parts = all.iter().map(|&(begin, end)| end.min(to).saturating_sub(begin.max(from)));
            prop_assert_eq!(window.look(end * S).share, parts.sum::<u64>() * 100);
        }
    }
}
