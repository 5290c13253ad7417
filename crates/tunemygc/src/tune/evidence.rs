//! What sample sets say, boiled down: counts, times and distributions that can be added up over sets, and kept.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::{distribution::Distribution, environment, ruby::Series};
use crate::wire::{EventName, Header, Sample};

/// Threads of one process that may be in a unit of work at the same time; more are not followed.
const MAX_OPEN_UNITS: usize = 4096;
/// Most variables kept of an environment.
const MAX_VARIABLES: usize = 64;

/// What is known of a program from its sample sets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Sets.
    pub sets: u64,
    /// Samples in them.
    pub samples: u64,
    /// Seconds between the first and the last sample of each set, added up.
    pub seconds: f64,
    /// GC cycles of which the start is in the sets.
    pub cycles: u64,
    /// Cycles between these that are not in the sets, by Ruby's own count.
    pub missing: u64,
    /// Minor cycles by what started them (`gc_by`).
    pub minors: BTreeMap<String, u64>,
    /// Major cycles by why they are major (`major_by`).
    pub majors: BTreeMap<String, u64>,
    /// Time in the GC; `None` where this Ruby does not count it (before 3.1).
    pub time: Option<GcTime>,
    /// Objects allocated between the starts of two cycles of which the second began because no free slot was left.
    pub intervals: Distribution,
    /// Slots of the heap (`heap_available_slots`) at starts, where the heap did not grow any more.
    pub available: Distribution,
    /// By how many slots the heap grew from one start to the next, where it did.
    pub growth: Distribution,
    /// Live slots at the end of major cycles.
    pub live: Distribution,
    /// Free slots of all slots at the end of major cycles, in thousandths.
    pub free_share: Distribution,
    /// Old objects after a major cycle that `oldgen` caused, in thousandths of those before it.
    pub old_kept: Distribution,
    /// Sets in which the heap stopped growing.
    pub settled: u64,
    /// Cycles from the start of a process until its heap had its final size, where that was seen.
    pub warmup: Distribution,
    /// Units of work (`PROCESSING_*`).
    pub units: u64,
    /// Objects allocated in a unit of work, of those that no other one overlapped.
    pub unit_objects: Distribution,
    /// Units in progress whenever one began, itself included.
    pub concurrency: Distribution,
    /// Resident memory, bytes.
    pub rss: Distribution,
    /// `RUBY_GC_*` of the latest set.
    pub environment: BTreeMap<String, String>,
    /// Variables of the latest set that were refused: no Ruby reads such a name (see [`environment::is_name`]).
    #[serde(default)]
    pub environment_refused: u64,
}

/// Time in the GC, milliseconds, as `GC.stat(:time)` counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GcTime {
    /// Of minor cycles.
    pub minor_ms: u64,
    /// Of major cycles.
    pub major_ms: u64,
    /// Seconds in which that was.
    pub seconds: f64,
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

/// Names of `gc_by` and `major_by` that are kept; anything else is `other`.
const REASONS: [&str; 10] =
    ["newobj", "malloc", "method", "capi", "stress", "nofree", "oldgen", "shady", "force", "oldmalloc"];

impl Evidence {
    /// Adds what another one says. The environment is that of the later one.
    pub fn merge(&mut self, later: &Self) {
        self.sets += later.sets;
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
        ] {
            sum.merge(more);
        }
        self.settled += later.settled;
        self.units += later.units;
        self.environment.clone_from(&later.environment);
        self.environment_refused = later.environment_refused;
    }

    /// All minor cycles.
    pub fn all_minors(&self) -> u64 {
        self.minors.values().sum()
    }

    /// All major cycles.
    pub fn all_majors(&self) -> u64 {
        self.majors.values().sum()
    }

    /// Minor cycles that began for this reason.
    pub fn minors_by(&self, reason: &str) -> u64 {
        self.minors.get(reason).copied().unwrap_or(0)
    }

    /// Major cycles that are major for this reason.
    pub fn majors_by(&self, reason: &str) -> u64 {
        self.majors.get(reason).copied().unwrap_or(0)
    }
}

/// Why nothing can be made of a set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The version is of no known series.
    #[error("Ruby version {0} is not supported: known are {first} to {last}", first = Series::FIRST, last = Series::LAST)]
    Version(String),
    /// The keys are not those of CRuby's own GC.
    #[error("GC.stat of Ruby {0} has no {1}: this is not CRuby with its default GC")]
    Keys(String, &'static str),
}

/// Where the values that matter stand in a sample.
#[derive(Clone, Copy, Debug)]
struct Columns {
    count: usize,
    available: usize,
    live: usize,
    allocated: usize,
    old: usize,
    time: Option<usize>,
}

impl Columns {
    fn of(header: &Header) -> Result<Self, Unsupported> {
        let find = |wanted: &str| header.stat_keys.iter().position(|key| key == wanted);
        let need =
            |key: &'static str| find(key).ok_or_else(|| Unsupported::Keys(header.ruby_version.clone(), key));
        Ok(Self {
            count: need("count")?,
            available: need("heap_available_slots")?,
            live: need("heap_live_slots")?,
            allocated: need("total_allocated_objects")?,
            old: need("old_objects")?,
            time: find("time"),
        })
    }
}

/// The start of a cycle.
#[derive(Clone, Copy, Debug)]
struct Start {
    ts: f64,
    count: u64,
    allocated: u64,
    available: u64,
    old: u64,
    time_ms: u64,
    /// Whether it is major; and if, whether by `oldgen`.
    major: Option<bool>,
}

/// Boils down one set, sample by sample.
#[derive(Debug)]
pub struct Fold {
    series: Series,
    columns: Columns,
    evidence: Evidence,
    first_ts: Option<f64>,
    last_ts: f64,
    last: Option<Start>,
    /// The cycle whose end is awaited.
    open: Option<Start>,
    /// Count and slots of the heap at each start.
    sizes: Vec<(u64, u64)>,
    units: HashMap<String, Unit>,
}

#[derive(Debug)]
struct Unit {
    allocated: u64,
    alone: bool,
}

impl Fold {
    /// Begins with a header.
    pub fn new(header: &Header) -> Result<Self, Unsupported> {
        let series = Series::parse(&header.ruby_version)
            .ok_or_else(|| Unsupported::Version(header.ruby_version.clone()))?;
        let columns = Columns::of(header)?;
        let variables = || header.gc_env.iter().filter(|(name, _)| name.starts_with("RUBY_GC_"));
        let environment_refused = variables().filter(|(name, _)| !environment::is_name(name)).count() as u64;
        let environment = variables()
            .filter(|(name, _)| environment::is_name(name) && !environment::is_agents(name))
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
            .take(MAX_VARIABLES)
            .collect();
        let time = columns.time.map(|_| GcTime::default());
        Ok(Self {
            series,
            columns,
            evidence: Evidence { sets: 1, environment, environment_refused, time, ..Evidence::default() },
            first_ts: None,
            last_ts: 0.0,
            last: None,
            open: None,
            sizes: Vec::new(),
            units: HashMap::new(),
        })
    }

    /// The series of the set's Ruby.
    pub fn series(&self) -> Series {
        self.series
    }

    /// Takes the next sample, whose values are as many as the header's keys.
    pub fn add(&mut self, sample: &Sample) {
        self.evidence.samples += 1;
        self.first_ts.get_or_insert(sample.ts);
        self.last_ts = self.last_ts.max(sample.ts);
        if let Some(rss) = sample.current_rss {
            self.evidence.rss.add(rss);
        }
        match sample.event {
            EventName::GcCycleStarted => self.started(sample),
            EventName::GcCycleEnded => self.ended(sample),
            EventName::ProcessingStarted => self.unit_started(sample),
            EventName::ProcessingEnded => self.unit_ended(sample),
            EventName::Booted | EventName::Terminated | EventName::Other(_) => {}
        }
    }

    fn started(&mut self, sample: &Sample) {
        let at = |column: usize| sample.stat.get(column).copied().unwrap_or_default();
        let info = |key: &str| sample.latest_gc_info.get(key).and_then(|value| value.as_str());
        let major_by = info("major_by");
        let start = Start {
            ts: sample.ts,
            count: at(self.columns.count),
            allocated: at(self.columns.allocated),
            available: at(self.columns.available),
            old: at(self.columns.old),
            time_ms: self.columns.time.map_or(0, at),
            major: major_by.map(|reason| reason == "oldgen"),
        };
        let evidence = &mut self.evidence;
        evidence.cycles += 1;
        let (reasons, reason) = match major_by {
            Some(reason) => (&mut evidence.majors, reason),
            None => (&mut evidence.minors, info("gc_by").unwrap_or("other")),
        };
        let reason = REASONS.into_iter().find(|known| *known == reason).unwrap_or("other");
        *reasons.entry(reason.to_owned()).or_default() += 1;
        if let Some(last) = self.last {
            let step = start.count.saturating_sub(last.count);
            evidence.missing = evidence.missing.saturating_add(step.saturating_sub(1));
            // What happened between two starts belongs to one cycle only if these are neighbours.
            if step == 1 {
                if info("gc_by") == Some("newobj")
                    && let Some(objects) = start.allocated.checked_sub(last.allocated)
                {
                    evidence.intervals.add(objects);
                }
                if let Some(growth) = start.available.checked_sub(last.available).filter(|n| *n > 0) {
                    evidence.growth.add(growth);
                }
                if let Some(time) = &mut evidence.time
                    && let Some(ms) = start.time_ms.checked_sub(last.time_ms)
                {
                    let sum = if last.major.is_some() { &mut time.major_ms } else { &mut time.minor_ms };
                    *sum = sum.saturating_add(ms);
                    time.seconds += (start.ts - last.ts).max(0.0);
                }
            }
        }
        self.sizes.push((start.count, start.available));
        self.last = Some(start);
        self.open = Some(start);
    }

    fn ended(&mut self, sample: &Sample) {
        let at = |column: usize| sample.stat.get(column).copied().unwrap_or_default();
        let Some(start) = self.open.take().filter(|start| start.count == at(self.columns.count)) else {
            return;
        };
        let Some(oldgen) = start.major else { return };
        let (live, available) = (at(self.columns.live), at(self.columns.available));
        // Counters of freed and allocated objects are read one after the other: a wrapped difference is none.
        if live > available || available == 0 {
            return;
        }
        self.evidence.live.add(live);
        self.evidence.free_share.add(permille(available - live, available));
        if oldgen && start.old > 0 {
            self.evidence.old_kept.add(permille(at(self.columns.old), start.old));
        }
    }

    fn unit_started(&mut self, sample: &Sample) {
        if self.units.len() >= MAX_OPEN_UNITS {
            return;
        }
        let allocated = sample.stat.get(self.columns.allocated).copied().unwrap_or_default();
        let alone = self.units.is_empty();
        for unit in self.units.values_mut() {
            unit.alone = false;
        }
        self.units.insert(thread(sample), Unit { allocated, alone });
        self.evidence.concurrency.add(self.units.len() as u64);
    }

    fn unit_ended(&mut self, sample: &Sample) {
        let Some(unit) = self.units.remove(&thread(sample)) else { return };
        self.evidence.units += 1;
        let allocated = sample.stat.get(self.columns.allocated).copied().unwrap_or_default();
        if unit.alone
            && let Some(objects) = allocated.checked_sub(unit.allocated)
        {
            self.evidence.unit_objects.add(objects);
        }
    }

    /// What the set says.
    pub fn finish(mut self) -> Evidence {
        self.settle();
        let evidence = &mut self.evidence;
        evidence.seconds = self.first_ts.map_or(0.0, |first| self.last_ts - first);
        self.evidence
    }

    /// Whether and when the heap stopped growing: it counts as settled if it was larger by no more than 1 % at any time in the
    /// second half of the cycles than in the first. Heaps breathe: pages are given back, and taken again before the next major cycle.
    fn settle(&mut self) {
        const FEWEST: usize = 16;
        let sizes = &self.sizes;
        let (before, after) = sizes.split_at(sizes.len() / 2);
        let largest = |sizes: &[(u64, u64)]| sizes.iter().map(|(_, slots)| *slots).max();
        let (Some(first), Some(second)) = (largest(before), largest(after)) else { return };
        if sizes.len() < FEWEST || second as f64 > first as f64 * 1.01 {
            return;
        }
        self.evidence.settled = 1;
        for (_, slots) in after {
            self.evidence.available.add(*slots);
        }
        let reached = sizes.iter().position(|(_, slots)| *slots as f64 >= second as f64 * 0.99);
        // A process that had its size when the set begins may have had it for long.
        if let Some(reached) = reached.filter(|reached| *reached > 0) {
            self.evidence.warmup.add(sizes[reached].0);
        }
    }
}

fn permille(part: u64, whole: u64) -> u64 {
    (u128::from(part) * 1000 / u128::from(whole.max(1))).min(u128::from(u64::MAX)) as u64
}

fn thread(sample: &Sample) -> String {
    sample.thread_id.as_ref().map_or_else(String::new, ToString::to_string)
}
