//! Decides whether what survives major collections grows, or only varies.

/// Minimum number of steps for growth to be reported; one more major collection is needed.
pub(super) const FEWEST_STEPS: usize = 3;
/// Maximum number of groups of neighbouring censuses.
const GROUPS: usize = 8;
/// Minimum growth in standard deviations of such counts.
const SIGMAS: f64 = 5.0;
/// Minimum size of the last step as a fraction of the mean one: a cache that is full has stopped growing.
const STILL: f64 = 0.25;

/// Growth of the number of objects of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    /// The lowest count of the first group of censuses; `last` is that of the last group.
    pub(super) first: u64,
    pub(super) last: u64,
    /// The indices of these censuses.
    pub(super) at: (usize, usize),
}

impl Growth {
    pub(super) fn more(self) -> u64 {
        self.last - self.first
    }

    /// Whether counts, each taken after a major collection, grow. Each group is represented by its lowest count, because garbage
    /// that minor collections have promoted meanwhile only adds to a count. Four conditions: there are at least four groups;
    /// each is larger than the one before; the total growth is larger than five standard deviations of the difference of two
    /// counts of objects that come and go independently (Poisson: the variance of a count is the count); and
    /// the last step is not much smaller than the mean one.
    pub(super) fn of(counts: &[u64]) -> Option<Self> {
        let size = counts.len().div_ceil(GROUPS).max(1);
        let low = |(group, counts): (usize, &[u64])| {
            let lowest = counts.iter().enumerate().min_by_key(|(_, count)| **count);
            lowest.map(|(index, count)| (*count, group * size + index))
        };
        let lows: Vec<(u64, usize)> = counts.chunks_exact(size).enumerate().filter_map(low).collect();
        let (&(first, begin), &(last, end)) = lows.first().zip(lows.last())?;
        let steps = lows.len() - 1;
        if steps < FEWEST_STEPS || !lows.is_sorted_by(|one, two| one.0 < two.0) {
            return None;
        }
        let growth = Self { first, last, at: (begin, end) };
        let more = growth.more() as f64;
        let latest = (last - lows[steps - 1].0) as f64;
        let varies = (first as f64 + last as f64).sqrt();
        (more > SIGMAS * varies && latest >= STILL * more / steps as f64).then_some(growth)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn series(of: impl Fn(u64) -> u64) -> Vec<u64> {
        (0..20).map(of).collect()
    }

    /// Steady growth is detected with the minimum number of steps, and also under garbage that comes and goes.
    #[test]
    fn grows() {
        assert_eq!(Growth::of(&[0, 100, 200, 300]), Some(Growth { first: 0, last: 300, at: (0, 3) }));
        assert!(Growth::of(&series(|n| 50_000 + n * 400)).is_some());
        let under_garbage = Growth::of(&series(|n| 1_000 + n * 100 + (n % 3) * 7_919));
        assert!(under_garbage.is_some_and(|growth| growth.first == 1_000), "{under_garbage:?}");
    }

    /// Counts that are stable, too few, shrinking or varying, that grow only once, or by less than the variation, are not growth.
    #[test]
    fn stable() {
        assert_eq!(Growth::of(&[]), None);
        assert_eq!(Growth::of(&[0, 1_000, 2_000]), None);
        assert_eq!(Growth::of(&series(|_| 52_000)), None);
        assert_eq!(Growth::of(&series(|n| 52_000 - n)), None);
        assert_eq!(Growth::of(&series(|n| 1_000 + n)), None);
        assert_eq!(Growth::of(&series(|n| if n < 10 { n * 1_000 } else { 10_000 })), None);
        assert_eq!(Growth::of(&series(|n| 10_000 - 10_000 / (n + 1).pow(3))), None);
        assert_eq!(Growth::of(&series(|n| 1_000 + (n * 7_919) % 997)), None);
    }

    proptest! {
        /// Any counts are judged, and reported growth is growth.
        #[test]
        fn anything(counts in proptest::collection::vec(any::<u64>(), 0..60)) {
            if let Some(growth) = Growth::of(&counts) {
                prop_assert!(growth.last > growth.first && counts.len() > FEWEST_STEPS);
            }
        }

        /// A number that varies around a mean without growing is not reported, whatever the mean and the variation.
        #[test]
        fn no_alarm(mean in 0_u64..100_000, noise in proptest::collection::vec(0.0_f64..1.0, 4..41)) {
            let width = 2.0 * (mean as f64).sqrt();
            let counts: Vec<u64> = noise.iter().map(|part| mean + (part * width) as u64).collect();
            prop_assert_eq!(Growth::of(&counts), None);
        }
    }
}
