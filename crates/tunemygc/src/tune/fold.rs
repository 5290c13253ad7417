//! Reduces a sample set to its [`Evidence`], sample by sample.

use std::collections::HashMap;

use super::{
    distribution::Distribution,
    environment,
    evidence::{Evidence, GcTime, REASONS, Unsupported, is_possible, is_time_in_gc},
    heaps::{self, Heap},
    ruby::Series,
    trend::{End, Trends},
};
use crate::wire::{EventName, Header, Sample};

/// Maximum number of threads of one process in a unit of work at the same time; further units are ignored.
const MAX_OPEN_UNITS: usize = 4096;
/// Maximum number of variables kept of an environment.
const MAX_VARIABLES: usize = 64;
/// Maximum number of ends of cycles kept for the trend of a set.
const MAX_ENDS: usize = 20_000;
/// Minimum number of pairs of neighbouring cycles in a set for its own figures to count.
const FEWEST_PAIRS: u64 = 4;

/// Positions of the relevant values in a sample.
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
    /// `None` for a minor cycle; for a major one, whether `oldgen` is the reason.
    major: Option<bool>,
}

/// Reduces one set, sample by sample.
#[derive(Debug)]
pub struct Fold {
    series: Series,
    columns: Columns,
    evidence: Evidence,
    first_ts: Option<f64>,
    last_ts: f64,
    first: Option<Start>,
    last: Option<Start>,
    /// The first and the last sample: time, number of cycles, milliseconds in the GC.
    edges: [Option<(f64, u64, u64)>; 2],
    /// Minor and major cycles whose predecessor is in the set, too: those of [`Evidence::objects`].
    pairs: [u64; 2],
    /// The cycle whose end is awaited.
    open: Option<Start>,
    /// Number of the cycle and slots of the heap at each start.
    sizes: Vec<(u64, u64)>,
    units: HashMap<String, Unit>,
    /// Number of units that have begun. A unit was alone if no other was open when it began and this is unchanged when it ends.
    units_begun: u64,
    /// The ends of major cycles.
    ends: Vec<End>,
    /// `PID on HOST`.
    process: String,
    /// Number of cycles and the state of the heaps, in the first and the last sample that has them.
    heaps: Option<[(u64, Vec<heaps::State>); 2]>,
    peak_rss: Option<u64>,
    /// Whether a sample cannot be true.
    impossible: bool,
}

#[derive(Debug)]
struct Unit {
    allocated: u64,
    /// The value of [`Fold::units_begun`] at its start, if no other unit was open.
    alone: Option<u64>,
}

impl Fold {
    /// Starts with a set's header.
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
        // A known series, of which the release is a few characters.
        let ruby_version = header.ruby_version.chars().take(16).collect();
        Ok(Self {
            series,
            columns,
            evidence: Evidence {
                sets: 1,
                ruby_version,
                environment,
                environment_refused,
                time,
                ..Evidence::default()
            },
            first_ts: None,
            last_ts: 0.0,
            first: None,
            last: None,
            edges: [None; 2],
            pairs: [0; 2],
            open: None,
            sizes: Vec::new(),
            units: HashMap::new(),
            units_begun: 0,
            ends: Vec::new(),
            process: format!("{} on {}", header.pid, header.hostname.chars().take(64).collect::<String>()),
            heaps: None,
            peak_rss: None,
            impossible: false,
        })
    }

    /// The series of the set's Ruby.
    pub fn series(&self) -> Series {
        self.series
    }

    /// Adds the next sample, which has as many values as the header has keys.
    pub fn add(&mut self, sample: &Sample) {
        self.evidence.samples += 1;
        self.first_ts.get_or_insert(sample.ts);
        self.last_ts = self.last_ts.max(sample.ts);
        if let Some(rss) = sample.current_rss {
            self.evidence.rss.add(rss);
        }
        self.peak_rss = self.peak_rss.max(sample.peak_rss).max(sample.current_rss);
        if let Some(heaps) = sample.meta.as_deref().and_then(heaps::read) {
            let count = sample.stat.get(self.columns.count).copied().unwrap_or_default();
            let known = self.heaps.get_or_insert_with(|| [(count, heaps.clone()), (0, Vec::new())]);
            known[1] = (count, heaps);
        }
        let at = |column: usize| sample.stat.get(column).copied().unwrap_or_default();
        let memory = sample.peak_rss.max(sample.current_rss);
        self.impossible |= !is_possible(at(self.columns.available), memory);
        let edge = (sample.ts, at(self.columns.count), self.columns.time.map_or(0, at));
        self.edges[0].get_or_insert(edge);
        self.edges[1] = Some(edge);
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
            // What happened between two starts belongs to one cycle only if the cycles are consecutive.
            if step == 1 {
                self.pairs[usize::from(start.major.is_some())] += 1;
                if info("gc_by") == Some("newobj")
                    && let Some(objects) = start.allocated.checked_sub(last.allocated)
                {
                    evidence.intervals.add(objects);
                }
                evidence.objects =
                    evidence.objects.saturating_add(start.allocated.saturating_sub(last.allocated));
                if let Some(growth) = start.available.checked_sub(last.available).filter(|n| *n > 0) {
                    evidence.growth.add(growth);
                }
                if let Some(time) = &mut evidence.time
                    && let Some(ms) = start.time_ms.checked_sub(last.time_ms)
                    && is_time_in_gc(ms, start.ts - last.ts)
                {
                    let sum = if last.major.is_some() { &mut time.major_ms } else { &mut time.minor_ms };
                    *sum = sum.saturating_add(ms);
                    time.seconds += (start.ts - last.ts).max(0.0);
                }
            }
        }
        self.first.get_or_insert(start);
        self.sizes.push((start.count, start.available));
        self.last = Some(start);
        self.open = Some(start);
    }

    fn ended(&mut self, sample: &Sample) {
        let at = |column: usize| sample.stat.get(column).copied().unwrap_or_default();
        let Some(start) = self.open.take().filter(|start| start.count == at(self.columns.count)) else {
            return;
        };
        let (live, available) = (at(self.columns.live), at(self.columns.available));
        // The counters of freed and of allocated objects are read one after the other: a difference that wrapped is invalid.
        if live > available || available == 0 {
            return;
        }
        // Minor cycles do not free old objects: the live slots after them are not meaningful here.
        let Some(oldgen) = start.major else { return };
        if self.ends.len() < MAX_ENDS {
            self.ends.push(End { ts: sample.ts, count: start.count, live });
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
        self.units_begun += 1;
        let alone = self.units.is_empty().then_some(self.units_begun);
        self.units.insert(thread(sample), Unit { allocated, alone });
        self.evidence.concurrency.add(self.units.len() as u64);
    }

    fn unit_ended(&mut self, sample: &Sample) {
        let Some(unit) = self.units.remove(&thread(sample)) else { return };
        self.evidence.units += 1;
        let allocated = sample.stat.get(self.columns.allocated).copied().unwrap_or_default();
        if unit.alone == Some(self.units_begun)
            && let Some(objects) = allocated.checked_sub(unit.allocated)
        {
            self.evidence.unit_objects.add(objects);
        }
    }

    /// Finishes the set and returns its evidence.
    pub fn finish(mut self) -> Evidence {
        if self.impossible {
            let Evidence { samples, ruby_version, environment, environment_refused, .. } = self.evidence;
            return Evidence {
                impossible: 1,
                samples,
                ruby_version,
                environment,
                environment_refused,
                ..Evidence::default()
            };
        }
        self.settle();
        self.compare_heaps();
        let evidence = &mut self.evidence;
        evidence.seconds = self.first_ts.map_or(0.0, |first| self.last_ts - first);
        evidence.trends = Trends::of(std::mem::take(&mut self.process), &self.ends);
        // Rates per object use only whole intervals between cycles.
        let between = evidence.time.map_or(0, |time| time.minor_ms.saturating_add(time.major_ms));
        self.time_at_the_edges();
        let evidence = &mut self.evidence;
        let time = evidence.counted_time();
        let each = &mut evidence.each;
        if let Some(rss) = evidence.rss.median() {
            each.rss.add(rss);
        }
        if let Some(peak) = self.peak_rss {
            each.peak.add(peak);
        }
        let [minors, majors] = self.pairs;
        if minors + majors >= FEWEST_PAIRS && evidence.objects > 0 {
            let rate = |count: u64| (count as f64 * 1e9 / evidence.objects as f64) as u64;
            each.minors.add(rate(minors));
            each.majors.add(rate(majors));
            if let Some(time) = time {
                each.share.add((time.share() * 10_000.0) as u64);
                each.cost.add(rate(between));
            }
        }
        self.evidence
    }

    /// Adds the time before the first cycle and after the last one, in which a program may have done much else: the GC's share refers to all of it.
    fn time_at_the_edges(&mut self) {
        let (Some(time), Some(first), Some(last)) = (&mut self.evidence.time, self.first, self.last) else {
            return;
        };
        if let Some((ts, count, ms)) = self.edges[0]
            && count.checked_add(1) == Some(first.count)
            // Time in the GC before that belongs to an unknown cycle.
            && ms == first.time_ms
        {
            time.seconds += (first.ts - ts).max(0.0);
        }
        if let Some((ts, count, ms)) = self.edges[1]
            && count == last.count
            && let Some(ms) = ms.checked_sub(last.time_ms)
            && is_time_in_gc(ms, ts - last.ts)
        {
            let sum = if last.major.is_some() { &mut time.major_ms } else { &mut time.minor_ms };
            *sum = sum.saturating_add(ms);
            time.seconds += (ts - last.ts).max(0.0);
        }
    }

    /// Computes what each heap allocated and its final size.
    fn compare_heaps(&mut self) {
        let Some([(began, first), (ended, last)]) = &self.heaps else { return };
        let cycles = ended.saturating_sub(*began);
        if cycles == 0 {
            return;
        }
        let heaps = last.iter().zip(first).map(|(last, first)| {
            let mut slots = Distribution::default();
            slots.add(last.heap_eden_slots);
            let allocated = last.total_allocated_objects.saturating_sub(first.total_allocated_objects);
            Heap { slot: last.slot_size, slots, allocated, cycles }
        });
        self.evidence.heaps = heaps.collect();
    }

    /// Determines whether and when the heap stopped growing. It counts as settled if its maximum size in the second half of the cycles is at most
    /// 1 % above that in the first half. Heap sizes fluctuate: pages are released, and allocated again before the next major cycle.
    fn settle(&mut self) {
        const FEWEST: usize = 16;
        let sizes = &self.sizes;
        let (before, after) = sizes.split_at(sizes.len() / 2);
        let largest = |sizes: &[(u64, u64)]| sizes.iter().map(|(_, slots)| *slots).max();
        let (Some(first), Some(second)) = (largest(before), largest(after)) else { return };
        if sizes.len() < FEWEST {
            return;
        }
        if second as f64 > first as f64 * 1.01 {
            self.evidence.growing = 1;
            return;
        }
        self.evidence.settled = 1;
        self.evidence.each.slots.add(second);
        for (_, slots) in after {
            self.evidence.available.add(*slots);
        }
        let reached = sizes.iter().position(|(_, slots)| *slots as f64 >= second as f64 * 0.99);
        // A process that already had about this size when the set begins may have had it for long: its size only fluctuates.
        if let Some(reached) = reached.filter(|_| sizes[0].1 <= second / 2) {
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::wire::SampleSet;

    /// Time to process units of work on one thread while `open` others are open.
    fn units_beside(open: u64) -> Duration {
        let header = r#"["t","3.4.1","0.0",{},"2",[],{},["count","heap_available_slots","heap_live_slots","total_allocated_objects","old_objects"],"h",1,2]"#;
        let sample =
            |event: &str, thread: u64| format!(r#"[1,1,1,"{event}",[1,2,1,1,1],{{}},null,{thread}]"#);
        let set = format!("[{header},{},{}]", sample("PROCESSING_STARTED", 1), sample("PROCESSING_ENDED", 1));
        let SampleSet { header, samples } = SampleSet::from_json(&set).unwrap();
        let mut fold = Fold::new(&header).unwrap();
        for thread in 2..2 + open {
            fold.add(&Sample { thread_id: Some(thread.into()), ..samples[0].clone() });
        }
        let begin = Instant::now();
        for _ in 0..20_000 {
            for sample in &samples {
                fold.add(sample);
            }
        }
        let took = begin.elapsed();
        assert_eq!(fold.finish().units, 20_000);
        took
    }

    /// The cost of a unit of work does not depend on the number of other open units: a small set cannot cause much work.
    #[test]
    fn many_open_units() {
        let least = |open| (0..5).map(|_| units_beside(open)).min().unwrap_or_default();
        let (few, many) = (least(1), least(MAX_OPEN_UNITS as u64 - 1));
        // Iterating over all of them would take hundreds of times as long.
        assert!(many < few * 10, "{few:?}, {many:?}");
    }

    /// A program that idles after its last cycle, or works before its first one, spends less of its time in the GC. The time between a
    /// missing cycle and its neighbours is unknown.
    #[test]
    fn time_at_the_edges() {
        let set =
            SampleSet::from_json(include_str!("../../../../tests/fixtures/tunemygc_seed.json")).unwrap();
        let mut header = set.header.clone();
        header.stat_keys.push("time".to_owned());
        let at = header.stat_keys.iter().position(|known| known == "count").unwrap();
        let start = set.samples.iter().find(|sample| sample.event == EventName::GcCycleStarted).unwrap();
        let sample = |event: &EventName, ts: f64, count: u64, ms: u64| {
            let mut sample = Sample { ts, event: *event, ..start.clone() };
            sample.stat[at] = count;
            sample.stat.push(ms);
            sample
        };
        let time = |samples: &[(&EventName, f64, u64, u64)]| {
            let mut fold = Fold::new(&header).unwrap();
            for (event, ts, count, ms) in samples {
                fold.add(&sample(event, *ts, *count, *ms));
            }
            let time = fold.finish().time.unwrap();
            (time.minor_ms + time.major_ms, time.seconds)
        };
        let (booted, cycle, ended, over) = (
            &EventName::Booted,
            &EventName::GcCycleStarted,
            &EventName::GcCycleEnded,
            &EventName::Terminated,
        );
        let cycles = [(cycle, 4.0, 1, 0), (cycle, 5.0, 2, 100), (cycle, 6.0, 3, 300)];
        let with = |before: &[_], after: &[_]| time(&[before, &cycles, after].concat());
        assert_eq!(with(&[], &[]), (300, 2.0));
        assert_eq!(with(&[], &[(ended, 6.5, 3, 400), (over, 26.0, 3, 410)]), (410, 22.0));
        assert_eq!(with(&[(booted, 1.0, 0, 0)], &[(over, 26.0, 3, 400)]), (400, 25.0));
        assert_eq!(with(&[(booted, 1.0, 0, 0)], &[(over, 26.0, 4, 500)]), (300, 5.0), "a cycle is missing");
        assert_eq!(with(&[(booted, 1.0, 7, 0)], &[]), (300, 2.0), "of another count");
    }
}
