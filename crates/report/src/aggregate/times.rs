//! Histograms of times.

/// Upper bounds of the buckets of pauses, nanoseconds.
const PAUSE_BOUNDS: [u64; 15] = [
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
];

/// A histogram of times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    /// Upper bounds of the buckets, nanoseconds; one further bucket is unbounded.
    pub bounds: &'static [u64],
    /// Number of times in each bucket; not cumulative.
    pub buckets: Vec<u64>,
    /// Sum of the times, nanoseconds.
    pub ns: u64,
}

impl Default for Times {
    fn default() -> Self {
        Self::within(&PAUSE_BOUNDS)
    }
}

impl Times {
    /// An empty histogram with these bounds.
    pub(super) fn within(bounds: &'static [u64]) -> Self {
        Self { bounds, buckets: vec![0; bounds.len() + 1], ns: 0 }
    }

    pub(super) fn add(&mut self, ns: u64) {
        self.count_in(Some(ns), 1);
        self.ns = self.ns.saturating_add(ns);
    }

    /// Counts times of at most `most` nanoseconds (`None`: any length), all of which belong in one bucket.
    pub(super) fn count_in(&mut self, most: Option<u64>, count: u64) {
        let bucket = most.and_then(|most| self.bounds.iter().position(|bound| most <= *bound));
        let sum = &mut self.buckets[bucket.unwrap_or(self.bounds.len())];
        *sum = sum.saturating_add(count);
    }

    /// Number of times.
    pub fn count(&self) -> u64 {
        self.buckets.iter().copied().fold(0, u64::saturating_add)
    }
}
