//! What threads do with the GVL, as exporters see it.

use std::sync::Arc;

use gctrace_common::gvl::{BUCKETS, bucket_most};

use super::stack::Stack;
pub use crate::ruby::gvl_plan::GvlCoverage;

/// An interval in which individual waits for the GVL were not reported, because that would have exceeded the CPU budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlGap {
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// End; `u64::MAX` while it lasts.
    pub to_ns: u64,
    /// Whether waits were still added up; otherwise the GVL was not watched at all.
    pub summed: bool,
}

impl GvlGap {
    /// Adds it to others in their order. Gaps are reported in parts while they last: a part that continues the last one extends it.
    pub fn add_to(self, gaps: &mut Vec<Self>) {
        match gaps.last_mut() {
            Some(last) if last.to_ns == self.from_ns && last.summed == self.summed => last.to_ns = self.to_ns,
            _ => gaps.push(self),
        }
    }

    /// Its label on a timeline.
    pub fn name(self) -> &'static str {
        if self.summed {
            "individual GVL waits not recorded (CPU budget)"
        } else {
            "GVL not watched (CPU budget)"
        }
    }
}

/// Identity of a thread, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GvlWho {
    /// Native thread that it last ran on, host pid namespace; 0 if it never ran.
    pub tid: u32,
    /// Name of that thread.
    pub comm: Arc<str>,
}

/// State of a thread with regard to the GVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GvlDoing {
    /// Waiting for it.
    Waiting,
    /// Holding it.
    Holding,
    /// Without it: sleeping, blocked, or running code that needs no GVL.
    Away,
}

/// A long time for which a thread held the GVL, or was without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlSpan {
    /// The thread.
    pub who: GvlWho,
    /// Unique in its process.
    pub id: u64,
    /// What the thread did.
    pub doing: GvlDoing,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length, nanoseconds.
    pub ns: u64,
}

/// What a thread waited for: another thread's hold of the GVL.
#[derive(Clone, Debug)]
pub struct GvlBlocker {
    /// The longest uninterrupted hold during the wait.
    pub hold: GvlSpan,
    /// Stack of the holder when it released the GVL, leaf first; `None` if it was not captured.
    pub until: Option<Stack>,
    /// What the sampling clock saw the holder do during the wait: number of samples, and the stack, leaf first; most frequent first.
    /// Empty: the clock did not tick during the wait.
    pub ran: Vec<(u64, Stack)>,
    /// Whether no earlier wait named this hold. (Several threads can wait for one hold.)
    pub first: bool,
}

/// A long wait for the GVL.
#[derive(Clone, Debug)]
pub struct GvlWait {
    /// The thread that waited.
    pub who: GvlWho,
    /// Unique in its process.
    pub id: u64,
    /// Its `rb_thread_t *`, if known: a thread can move from one native thread to another (3.3 and later).
    pub thread: Option<u64>,
    /// When it began to wait, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length of the wait, nanoseconds.
    pub ns: u64,
    /// [`Request::id`](super::request::Request::id) of the request that the thread was serving when it acquired the GVL; 0: unknown which one;
    /// `None`: it served none, or requests are not watched.
    pub request: Option<u64>,
    /// The thread with the longest uninterrupted hold of the GVL during the wait; `None`: no thread was seen to acquire it.
    pub blocker: Option<GvlBlocker>,
    /// Stack of the thread when it began to wait, leaf first; `None` if it was not captured.
    pub stack: Option<Stack>,
}

/// Number and time of waits, holds or absences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlTimes {
    /// Number of those that ended.
    pub count: u64,
    /// Total time, nanoseconds, up to the end of the reported time; one that has not ended counts, too.
    pub ns: u64,
    /// The longest of those that ended, nanoseconds.
    pub max_ns: u64,
}

impl GvlTimes {
    pub(crate) fn add(&mut self, other: &Self) {
        self.count = self.count.saturating_add(other.count);
        self.ns = self.ns.saturating_add(other.ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }
}

/// Waits by length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(Box<[u64; BUCKETS]>);

impl Default for Histogram {
    fn default() -> Self {
        Self(Box::new([0; BUCKETS]))
    }
}

impl Histogram {
    /// A histogram with these counts.
    pub(crate) fn of_counts(counts: Box<[u64; BUCKETS]>) -> Self {
        Self(counts)
    }

    pub(crate) fn add(&mut self, counts: impl IntoIterator<Item = u64>) {
        for (mine, more) in self.0.iter_mut().zip(counts) {
            *mine = mine.saturating_add(more);
        }
    }

    pub(crate) fn counts(&self) -> impl Iterator<Item = u64> {
        self.0.iter().copied()
    }

    /// The non-empty buckets: longest wait of the bucket in nanoseconds (`None`: no limit), and number of waits.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(at, &count)| (bucket_most(at), count))
    }

    /// A time that at least `percent` % of the waits did not exceed, and that is at most an eighth above the exact quantile.
    /// `longest` is the longest of all waits. 0 if there are none.
    pub fn quantile(&self, percent: u64, longest: u64) -> u64 {
        let all: u128 = self.0.iter().copied().map(u128::from).sum();
        let wanted = (all * u128::from(percent)).div_ceil(100);
        let mut passed = 0;
        for (most, count) in self.buckets() {
            passed += u128::from(count);
            if passed >= wanted {
                return most.map_or(longest, |most| most.min(longest));
            }
        }
        0
    }
}

/// What one or more threads did with the GVL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GvlSums {
    /// Time from when the threads were first seen to their end, nanoseconds.
    pub wall_ns: u64,
    /// Part of it in which the GVL was watched, nanoseconds: less where watching cost too much. All fields below cover this part.
    pub watched_ns: u64,
    /// Waiting for the GVL.
    pub wait: GvlTimes,
    /// Holding it; `None` if that is not observed.
    pub hold: Option<GvlTimes>,
    /// Neither: sleeping, or running code that needs no GVL; `None` if that is not observed.
    pub away: Option<GvlTimes>,
    /// The same time by scheduler state; `None` if that is not observed.
    pub split: Option<GvlSplit>,
    /// The waits by length.
    pub waits: Histogram,
}

/// Time that native threads spent on a CPU, runnable without a CPU, and blocked, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlTaskTimes {
    /// On a CPU.
    pub cpu_ns: u64,
    /// Runnable, without a CPU.
    pub runnable_ns: u64,
    /// Sleeping, or waiting for something.
    pub blocked_ns: u64,
}

impl GvlTaskTimes {
    fn add(&mut self, other: &Self) {
        self.cpu_ns = self.cpu_ns.saturating_add(other.cpu_ns);
        self.runnable_ns = self.runnable_ns.saturating_add(other.runnable_ns);
        self.blocked_ns = self.blocked_ns.saturating_add(other.blocked_ns);
    }
}

/// Time by scheduler state, split by what the threads did with the GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlSplit {
    /// While waiting for it.
    pub waiting: GvlTaskTimes,
    /// While holding it.
    pub holding: GvlTaskTimes,
    /// While without it.
    pub away: GvlTaskTimes,
}

impl GvlSplit {
    fn add(&mut self, other: &Self) {
        self.waiting.add(&other.waiting);
        self.holding.add(&other.holding);
        self.away.add(&other.away);
    }
}

impl GvlSums {
    /// Adds the sums of other threads.
    pub fn add(&mut self, other: &Self) {
        let merge = |mine: &mut Option<GvlTimes>, more: &Option<GvlTimes>| {
            if let Some(more) = more {
                mine.get_or_insert_default().add(more);
            }
        };
        self.wall_ns = self.wall_ns.saturating_add(other.wall_ns);
        self.watched_ns = self.watched_ns.saturating_add(other.watched_ns);
        self.wait.add(&other.wait);
        merge(&mut self.hold, &other.hold);
        merge(&mut self.away, &other.away);
        if let Some(more) = &other.split {
            self.split.get_or_insert_default().add(more);
        }
        self.waits.add(other.waits.counts());
    }
}

/// What a thread did with the GVL.
#[derive(Clone, Debug)]
pub struct GvlThreadSummary {
    /// Which parts of its GVL use are observed.
    pub coverage: GvlCoverage,
    /// The thread.
    pub who: GvlWho,
    /// Unique in its process.
    pub id: u64,
    /// Its state when it ended or was last read, and since when, `CLOCK_MONOTONIC` nanoseconds;
    /// `None` if unknown.
    pub last: Option<(GvlDoing, u64)>,
    /// Its `rb_thread_t *`, if known.
    pub thread: Option<u64>,
    /// When it was first seen, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When the thread or tracing ended.
    pub end_ns: u64,
    /// Whether the thread itself ended, not only its process or tracing.
    pub ended: bool,
    /// What it did.
    pub sums: GvlSums,
}

/// Waits of one thread while another held the GVL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlBlocked {
    /// The thread that waited; `None`: a thread whose end was lost.
    pub waiter: Option<GvlWho>,
    /// The thread that held the GVL; `None` likewise.
    pub holder: Option<GvlWho>,
    /// Number of the holder's holds during these waits, and the time of these holds within the waits.
    pub times: GvlTimes,
}

/// GC pauses of a process whose GVL is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlGc {
    /// Total time of the pauses, nanoseconds.
    pub pause_ns: u64,
    /// Time for which threads waited for the GVL during a pause, summed over all threads, nanoseconds; only
    /// waits that were reported individually. `None`: not all of them were reported.
    pub wait_ns: Option<u64>,
}

/// What the threads of a process did with the GVL.
#[derive(Clone, Debug, Default)]
pub struct GvlProcessSummary {
    /// Which parts of their GVL use are observed.
    pub coverage: GvlCoverage,
    /// Number of threads.
    pub threads: u64,
    /// From when the first thread was seen to the end of the process or of tracing, nanoseconds.
    pub span_ns: u64,
    /// That end, `CLOCK_MONOTONIC` nanoseconds.
    pub end_ns: u64,
    /// Sums of all threads.
    pub sums: GvlSums,
    /// GC pauses meanwhile; during a pause a thread holds the GVL and cannot run.
    pub gc: Option<GvlGc>,
    /// Which thread waited for which, longest first.
    pub blocked: Vec<GvlBlocked>,
}

impl GvlProcessSummary {
    /// GC pauses as a share of the time for which the GVL was held, 0 to 1; `None` if either is unknown or nothing was held.
    pub fn gc_of_hold(&self) -> Option<f64> {
        let (pause_ns, hold_ns) = (self.gc?.pause_ns, self.sums.hold?.ns);
        (hold_ns > 0).then(|| pause_ns as f64 / hold_ns as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gctrace_common::gvl::bucket;
    use proptest::prelude::*;

    proptest! {
        /// A reported quantile is never below the exact one, never above the longest wait, and at most an eighth (or the first bucket)
        /// too large.
        #[test]
        fn quantiles(mut times in proptest::collection::vec(0_u64..10_000_000_000, 1..200), percent in 1_u64..=100) {
            let mut histogram = Histogram::default();
            for &ns in &times {
                histogram.0[bucket(ns)] += 1;
            }
            times.sort_unstable();
            let longest = *times.last().unwrap();
            let exact = times[(times.len() as u64 * percent).div_ceil(100) as usize - 1];
            let reported = histogram.quantile(percent, longest);
            prop_assert!(reported >= exact && reported <= longest, "{exact} {reported} {longest}");
            prop_assert!(reported <= exact + exact / 8 + 1024, "{exact} {reported}");
        }
    }
}
