//! What threads do with the GVL, as exporters see it.

use std::sync::Arc;

use gctrace_common::gvl::{BUCKETS, bucket_most};

use super::stack::Stack;
pub use crate::ruby::gvl_plan::GvlCoverage;

/// A time in which single waits for the GVL were not reported, because that would have cost more than allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlGap {
    /// From when, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// To when; `u64::MAX` while it goes on.
    pub to_ns: u64,
    /// Whether waits were added up all the same; else the GVL was not watched at all.
    pub summed: bool,
}

impl GvlGap {
    /// What it is called on a timeline.
    pub fn name(self) -> &'static str {
        if self.summed {
            "single GVL waits not recorded (CPU budget)"
        } else {
            "GVL not watched (CPU budget)"
        }
    }
}

/// A thread, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GvlWho {
    /// Native thread that it ran on last, host pid namespace; 0 if it never ran.
    pub tid: u32,
    /// Name of that thread.
    pub comm: Arc<str>,
}

/// What a thread does with regard to the GVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GvlDoing {
    /// It waits for it.
    Waiting,
    /// It holds it.
    Holding,
    /// It does without it: it sleeps, blocks, or runs what needs no GVL.
    Away,
}

/// A long time for which a thread held the GVL, or did without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlSpan {
    /// The thread.
    pub who: GvlWho,
    /// Unique in its process.
    pub id: u64,
    /// What it did.
    pub doing: GvlDoing,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// For how long, nanoseconds.
    pub ns: u64,
}

/// What a thread waited for: the time that another one held the GVL.
#[derive(Clone, Debug)]
pub struct GvlBlocker {
    /// That time, the longest at a stretch during the wait.
    pub hold: GvlSpan,
    /// Where the thread was when it released the GVL, leaf first; `None` where that was not seen.
    pub until: Option<Stack>,
    /// What the sampling clock saw the thread do while the other one waited, leaf first: how often, and the stack; the most frequent first.
    /// Empty: the clock did not tick then.
    pub ran: Vec<(u64, Stack)>,
    /// Whether no wait before named this time. (Several threads can wait for one.)
    pub first: bool,
}

/// A long wait for the GVL.
#[derive(Clone, Debug)]
pub struct GvlWait {
    /// The thread that waited.
    pub who: GvlWho,
    /// Unique in its process.
    pub id: u64,
    /// Its `rb_thread_t *`, where that is known: a thread can move from one native thread to another (3.3 and later).
    pub thread: Option<u64>,
    /// When it began to wait, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// For how long, nanoseconds.
    pub ns: u64,
    /// [`Request::id`](super::request::Request::id) of the request that the thread served when it got the GVL; 0: which one is not known; `None`: it
    /// served none, or requests are not watched.
    pub request: Option<u64>,
    /// The thread that held the GVL longest at a stretch meanwhile; `None`: no thread was seen to acquire it.
    pub blocker: Option<GvlBlocker>,
    /// What the thread was doing when it began to wait, leaf first; `None` where that was not seen.
    pub stack: Option<Stack>,
}

/// How often and how long something was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlTimes {
    /// How often it was done and ended.
    pub count: u64,
    /// For how long altogether, nanoseconds, up to the end of the reported time; what has not ended counts.
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

/// Waits by their length.
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

    /// The buckets that are not empty: the longest time that belongs there, nanoseconds (`None`: any), and how many.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(at, &count)| (bucket_most(at), count))
    }

    /// A time that at least `percent` of all did not exceed, and that is at most an eighth above the exact quantile;
    /// `longest` is the longest of all. 0 if there are none.
    pub fn quantile(&self, percent: u64, longest: u64) -> u64 {
        let all: u64 = self.0.iter().sum();
        let wanted = (all * percent).div_ceil(100);
        let mut passed = 0;
        for (most, count) in self.buckets() {
            passed += count;
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
    /// Time from when the threads were first seen to their ends, nanoseconds.
    pub wall_ns: u64,
    /// For how much of it the GVL was watched, nanoseconds: less where that cost too much. Everything below is of that time.
    pub watched_ns: u64,
    /// Waiting for the GVL.
    pub wait: GvlTimes,
    /// Holding it; `None` where that is not seen.
    pub hold: Option<GvlTimes>,
    /// Neither: sleeping, or running what needs no GVL; `None` where that is not seen.
    pub away: Option<GvlTimes>,
    /// What the scheduler did meanwhile; `None` where that is not seen.
    pub split: Option<GvlSplit>,
    /// The waits by their length.
    pub waits: Histogram,
}

/// For how long native threads ran on a CPU, could have run but had none, and could not run, nanoseconds.
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

/// What the scheduler did with threads, by what they did with the GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlSplit {
    /// While they waited for it.
    pub waiting: GvlTaskTimes,
    /// While they held it.
    pub holding: GvlTaskTimes,
    /// While they did without it.
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
    pub(crate) fn add(&mut self, other: &Self) {
        let merge = |mine: &mut Option<GvlTimes>, more: &Option<GvlTimes>| {
            if let Some(more) = more {
                mine.get_or_insert_default().add(more);
            }
        };
        self.wall_ns += other.wall_ns;
        self.watched_ns += other.watched_ns;
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
    /// What is seen of it.
    pub coverage: GvlCoverage,
    /// The thread.
    pub who: GvlWho,
    /// Unique in its process.
    pub id: u64,
    /// What it was doing when it ended or was read for the last time, and since when, `CLOCK_MONOTONIC` nanoseconds;
    /// `None` where that is not known.
    pub last: Option<(GvlDoing, u64)>,
    /// Its `rb_thread_t *`, where that is known.
    pub thread: Option<u64>,
    /// When it was first seen, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When it ended, or tracing did.
    pub end_ns: u64,
    /// Whether the thread ended, and not only its process or tracing.
    pub ended: bool,
    /// What it did.
    pub sums: GvlSums,
}

/// How one thread waited while another held the GVL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlBlocked {
    /// Who waited; `None`: a thread whose end was lost.
    pub waiter: Option<GvlWho>,
    /// Who held the GVL.
    pub holder: Option<GvlWho>,
    /// How often the other had it meanwhile, and how long that was.
    pub times: GvlTimes,
}

/// GC pauses of a process whose GVL is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlGc {
    /// How long they took together, nanoseconds.
    pub pause_ns: u64,
    /// For how long threads waited for the GVL during a pause, all threads together, nanoseconds; only
    /// waits that were reported one by one. `None`: not all of them were reported.
    pub wait_ns: Option<u64>,
}

/// What the threads of a process did with the GVL.
#[derive(Clone, Debug, Default)]
pub struct GvlProcessSummary {
    /// What is seen of them.
    pub coverage: GvlCoverage,
    /// How many.
    pub threads: u64,
    /// From when the first was seen to the end of the process or of tracing, nanoseconds.
    pub span_ns: u64,
    /// That end, `CLOCK_MONOTONIC` nanoseconds.
    pub end_ns: u64,
    /// All of them together.
    pub sums: GvlSums,
    /// GC pauses meanwhile, in which a thread held the GVL and could not run.
    pub gc: Option<GvlGc>,
    /// Who waited for whom, the longest first.
    pub blocked: Vec<GvlBlocked>,
}

impl GvlProcessSummary {
    /// Share of GC pauses in the time for which the GVL was held, 0 to 1; `None` where one of them is not known.
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
        /// A quantile is never below the exact one, never above the longest, and at most an eighth (or the first bucket)
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
