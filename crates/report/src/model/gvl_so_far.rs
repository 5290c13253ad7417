//! What threads have done with the GVL while the run goes on: sums that only grow, of what is over.

use gctrace_common::gvl::{BUCKETS, GvlThread, bucket_most};

/// Waits and holds that are over, of a thread or of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlSoFar {
    waits: Box<[u64; BUCKETS]>,
    /// Time of the waits, nanoseconds.
    pub wait_ns: u64,
    /// Time for which the GVL was held, nanoseconds; 0 where that is not seen.
    pub hold_ns: u64,
}

impl Default for GvlSoFar {
    fn default() -> Self {
        Self { waits: Box::new([0; BUCKETS]), wait_ns: 0, hold_ns: 0 }
    }
}

impl GvlSoFar {
    /// With these counts of waits.
    pub(crate) fn of_counts(waits: Box<[u64; BUCKETS]>, wait_ns: u64, hold_ns: u64) -> Self {
        Self { waits, wait_ns, hold_ns }
    }

    /// Waits by bucket.
    pub(crate) fn counts(&self) -> impl Iterator<Item = u64> {
        self.waits.iter().copied()
    }

    /// Adds a thread.
    pub fn thread(&mut self, thread: &GvlThread) {
        for (sum, count) in self.waits.iter_mut().zip(thread.buckets) {
            *sum += u64::from(count);
        }
        self.wait_ns += thread.wait_ns;
        self.hold_ns += thread.hold_ns;
    }

    /// The growth since what was reported (`reported`), which is raised to this. Reported sums are never reduced: a thread that has just
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

    /// The waits: the longest time that belongs together, nanoseconds (`None`: any), and how many took up to it.
    pub fn waits(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        self.waits
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(at, count)| (bucket_most(at), *count))
    }
}
