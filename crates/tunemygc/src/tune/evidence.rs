//! A summary of sample sets: counts, times and distributions that can be summed over sets, and stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{distribution::Distribution, heaps::Heap, ruby::Series, trend::Trends};

/// Minimum number of cycles in the sets for any advice.
pub const MIN_CYCLES: u64 = 30;
/// Minimum number of seconds in the sets for any advice.
pub const MIN_SECONDS: f64 = 5.0;
/// Maximum share of cycles that may be missing in the sets.
pub const MAX_MISSING: f64 = 0.10;

/// The facts known about a program from its sample sets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Number of sets.
    pub sets: u64,
    /// Number of sets that cannot be true, see [`is_possible`]. Only their samples and environment are included here.
    #[serde(default)]
    pub impossible: u64,
    /// Number of samples in the sets.
    pub samples: u64,
    /// Seconds between the first and the last sample of each set, summed.
    pub seconds: f64,
    /// GC cycles whose start is in the sets.
    pub cycles: u64,
    /// Cycles between these that are not in the sets, according to Ruby's own count.
    pub missing: u64,
    /// Minor cycles by their cause (`gc_by`).
    pub minors: BTreeMap<String, u64>,
    /// Major cycles by the reason why they are major (`major_by`).
    pub majors: BTreeMap<String, u64>,
    /// Time in the GC; `None` if this Ruby does not measure it (before 3.1).
    pub time: Option<GcTime>,
    /// Objects allocated between the starts of two neighbouring cycles, if the second began because no free slot was left.
    pub intervals: Distribution,
    /// Slots of the heap (`heap_available_slots`) at starts of cycles, once the heap no longer grew.
    pub available: Distribution,
    /// Number of slots by which the heap grew from one start to the next, if it grew.
    pub growth: Distribution,
    /// Live slots at the end of major cycles.
    pub live: Distribution,
    /// Share of free slots among all slots at the end of major cycles, in thousandths.
    pub free_share: Distribution,
    /// Old objects after a major cycle that `oldgen` caused, in thousandths of those before it.
    pub old_kept: Distribution,
    /// Number of sets in which the heap stopped growing.
    pub settled: u64,
    /// Number of sets that are long enough to tell, but in which the heap did not stop growing.
    #[serde(default)]
    pub growing: u64,
    /// Cycles from the start of a process until its heap had its final size, if that was seen.
    pub warmup: Distribution,
    /// Number of units of work (`PROCESSING_*`).
    pub units: u64,
    /// Objects allocated per unit of work, only for units that no other unit overlapped.
    pub unit_objects: Distribution,
    /// Number of units in progress at the start of each unit, itself included.
    pub concurrency: Distribution,
    /// Resident memory, bytes.
    pub rss: Distribution,
    /// Objects allocated between the starts of neighbouring cycles, summed.
    #[serde(default)]
    pub objects: u64,
    /// Figures of each single set, for the spread.
    #[serde(default)]
    pub each: Each,
    /// How the live heap develops over time.
    #[serde(default)]
    pub trends: Trends,
    /// The heaps of the Ruby, from 3.2 on, if the sets include them.
    #[serde(default)]
    pub heaps: Vec<Heap>,
    /// The version of the latest set's Ruby; empty if it is not known.
    #[serde(default)]
    pub ruby_version: String,
    /// The `RUBY_GC_*` variables of the latest set.
    pub environment: BTreeMap<String, String>,
    /// Number of variables of the latest set that were refused: no Ruby reads such a name (see [`is_name`](super::environment::is_name)).
    #[serde(default)]
    pub environment_refused: u64,
}

/// Time in the GC, milliseconds, as `GC.stat(:time)` measures it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GcTime {
    /// Of minor cycles.
    pub minor_ms: u64,
    /// Of major cycles.
    pub major_ms: u64,
    /// Length of the observed intervals in which this time was spent, seconds.
    pub seconds: f64,
}

/// Whether `ms` milliseconds in GC are possible within `seconds` of one process. There is a tolerance, because `GC.stat(:time)` has whole
/// milliseconds and the interval is measured by another clock.
pub fn is_time_in_gc(ms: u64, seconds: f64) -> bool {
    const APART_MS: f64 = 10.0;
    ms as f64 <= seconds.max(0.0) * 1000.0 + APART_MS
}

/// Minimum bytes of a slot: those of every Ruby's smallest heap (`BASE_SLOT_SIZE`, and `sizeof(RVALUE)` before 3.2).
pub const SLOT: u64 = 40;
/// Maximum plausible number of slots if the resident memory is unknown: 160 GiB.
const MOST_SLOTS: u64 = 1 << 32;

/// Whether a process with this resident memory can have this many slots. Much of a heap may be swapped out, and rounding matters for a small one.
pub fn is_possible(slots: u64, rss: Option<u64>) -> bool {
    const TIMES: u64 = 4;
    const BASE: u64 = 16 << 20;
    match rss {
        Some(rss) => slots.saturating_mul(SLOT) <= rss.saturating_mul(TIMES).saturating_add(BASE),
        None => slots <= MOST_SLOTS,
    }
}

impl GcTime {
    /// Share of the time that the program spent in its GC, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.seconds > 0.0 {
            (self.minor_ms as f64 + self.major_ms as f64) / 1000.0 / self.seconds
        } else {
            0.0
        }
    }
}

/// Distributions of figures of single sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Each {
    /// Share of time in the GC, in parts of 10 000.
    pub share: Distribution,
    /// Time in the GC per object allocated, picoseconds.
    pub cost: Distribution,
    /// Minor cycles per 10⁹ objects allocated.
    pub minors: Distribution,
    /// Major cycles per 10⁹ objects allocated.
    pub majors: Distribution,
    /// Median of resident memory, bytes.
    pub rss: Distribution,
    /// Peak of resident memory, bytes.
    pub peak: Distribution,
    /// Slots of the heap once it stopped growing.
    #[serde(default)]
    pub slots: Distribution,
}

/// Names of `gc_by` and `major_by` that are kept; all others count as `other`.
pub(super) const REASONS: [&str; 10] =
    ["newobj", "malloc", "method", "capi", "stress", "nofree", "oldgen", "shady", "force", "oldmalloc"];

/// Number of cycles over which `GC.stat(:time)` certainly grows, unless the program has `GC.measure_total_time = false`.
pub const STILL: u64 = 30;

impl Evidence {
    /// Time in the GC, if it was measured.
    pub fn counted_time(&self) -> Option<GcTime> {
        let time = self.time.filter(|time| time.seconds > 0.0)?;
        (time.minor_ms > 0 || time.major_ms > 0 || self.cycles < STILL).then_some(time)
    }

    /// Whether the evidence suffices for any advice.
    pub(super) fn is_sufficient(&self) -> bool {
        self.lacks().is_empty()
    }

    /// What is missing for any advice; empty if nothing is.
    pub(super) fn lacks(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if self.cycles < MIN_CYCLES {
            let seen = if self.cycles == 1 { "cycle was" } else { "cycles were" };
            missing.push(format!("{} GC {seen} seen, at least {MIN_CYCLES} are needed", self.cycles));
        }
        if self.seconds < MIN_SECONDS {
            missing.push(format!("the sets span {:.1} s, at least {MIN_SECONDS} s are needed", self.seconds));
        }
        let all = self.cycles as f64 + self.missing as f64;
        if self.missing as f64 > all * MAX_MISSING {
            missing.push(format!(
                "{} of {all} cycles are not in the sets, at most {:.0} % may be missing",
                self.missing,
                MAX_MISSING * 100.0
            ));
        }
        missing
    }

    /// Adds other evidence. The environment becomes that of the later one.
    pub fn merge(&mut self, later: &Self) {
        self.sets += later.sets;
        self.impossible += later.impossible;
        self.samples += later.samples;
        self.seconds += later.seconds;
        self.cycles += later.cycles;
        self.missing = self.missing.saturating_add(later.missing);
        for (sums, more) in [(&mut self.minors, &later.minors), (&mut self.majors, &later.majors)] {
            for (reason, count) in more {
                *sums.entry(reason.clone()).or_default() += count;
            }
        }
        if let Some(more) = later.time {
            let time = self.time.get_or_insert_default();
            time.minor_ms = time.minor_ms.saturating_add(more.minor_ms);
            time.major_ms = time.major_ms.saturating_add(more.major_ms);
            time.seconds += more.seconds;
        }
        for (sum, more) in [
            (&mut self.intervals, &later.intervals),
            (&mut self.available, &later.available),
            (&mut self.growth, &later.growth),
            (&mut self.live, &later.live),
            (&mut self.free_share, &later.free_share),
            (&mut self.old_kept, &later.old_kept),
            (&mut self.warmup, &later.warmup),
            (&mut self.unit_objects, &later.unit_objects),
            (&mut self.concurrency, &later.concurrency),
            (&mut self.rss, &later.rss),
            (&mut self.each.share, &later.each.share),
            (&mut self.each.cost, &later.each.cost),
            (&mut self.each.minors, &later.each.minors),
            (&mut self.each.majors, &later.each.majors),
            (&mut self.each.rss, &later.each.rss),
            (&mut self.each.peak, &later.each.peak),
            (&mut self.each.slots, &later.each.slots),
        ] {
            sum.merge(more);
        }
        self.settled += later.settled;
        self.growing += later.growing;
        self.units += later.units;
        self.objects = self.objects.saturating_add(later.objects);
        self.trends.merge(&later.trends);
        if self.heaps.len() < later.heaps.len() {
            self.heaps.resize_with(later.heaps.len(), Heap::default);
        }
        for (sum, more) in self.heaps.iter_mut().zip(&later.heaps) {
            sum.merge(more);
        }
        self.ruby_version.clone_from(&later.ruby_version);
        self.environment.clone_from(&later.environment);
        self.environment_refused = later.environment_refused;
    }

    /// Number of all minor cycles.
    pub fn all_minors(&self) -> u64 {
        self.minors.values().sum()
    }

    /// Number of all major cycles.
    pub fn all_majors(&self) -> u64 {
        self.majors.values().sum()
    }

    /// Number of minor cycles that began for this reason.
    pub fn minors_by(&self, reason: &str) -> u64 {
        self.minors.get(reason).copied().unwrap_or(0)
    }

    /// Number of major cycles that are major for this reason.
    pub fn majors_by(&self, reason: &str) -> u64 {
        self.majors.get(reason).copied().unwrap_or(0)
    }
}

/// Why a set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The version belongs to no known series.
    #[error("Ruby version {0} is not supported: known are {first} to {last}", first = Series::FIRST, last = Series::LAST)]
    Version(String),
    /// The keys are not those of CRuby's own GC.
    #[error("GC.stat of Ruby {0} has no {1}: this is not CRuby with its default GC")]
    Keys(String, &'static str),
}
