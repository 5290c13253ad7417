//! What threads have done with the GVL so far in a run: cumulative sums of completed waits and holds.

use gctrace_common::gvl::{BUCKETS, GvlThread, bucket_most};

/// Completed waits and holds of one or more threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlSoFar {
    waits: Box<[u64; BUCKETS]>,
    /// Total time of the waits, nanoseconds.
    pub wait_ns: u64,
    /// Time for which the GVL was held, nanoseconds; 0 if that is not observed.
    pub hold_ns: u64,
}

impl Default for GvlSoFar {
    fn default() -> Self {
        Self { waits: Box::new([0; BUCKETS]), wait_ns: 0, hold_ns: 0 }
    }
}

impl GvlSoFar {
    /// Sums with these counts of waits by bucket.
    pub(crate) fn of_counts(waits: Box<[u64; BUCKETS]>, wait_ns: u64, hold_ns: u64) -> Self {
        Self { waits, wait_ns, hold_ns }
    }

    /// Number of waits in each bucket.
    pub(crate) fn counts(&self) -> impl Iterator<Item = u64> {
        self.waits.iter().copied()
    }

    /// Adds the sums of a thread.
    pub fn thread(&mut self, thread: &GvlThread) {
        for (sum, count) in self.waits.iter_mut().zip(thread.buckets) {
            *sum += u64::from(count);
        }
        self.wait_ns += thread.wait_ns;
        self.hold_ns += thread.hold_ns;
    }

    /// Returns the growth since `reported`, and raises `reported` to the current sums. Reported sums never decrease: a thread that has just
    /// ended may be missing in both places for a moment.
    #[must_use]
    pub fn growth(&self, reported: &mut Self) -> Self {
        let mut grown = Self::default();
        let grow = |now: u64, reported: &mut u64, grown: &mut u64| {
            *grown = now.saturating_sub(*reported);
            *reported += *grown;
        };
        for (at, count) in grown.waits.iter_mut().enumerate() {
            grow(self.waits[at], &mut reported.waits[at], count);
        }
        grow(self.wait_ns, &mut reported.wait_ns, &mut grown.wait_ns);
        grow(self.hold_ns, &mut reported.hold_ns, &mut grown.hold_ns);
        grown
    }

    /// The non-empty buckets: longest wait of the bucket in nanoseconds (`None`: no limit), and number of waits.
    pub fn waits(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        self.waits
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(at, count)| (bucket_most(at), *count))
    }
}
