//! Simulated programs: a model of CRuby's GC that is good enough for advice, and that follows the advice.
//!
//! It runs one cycle after the other: what starts it, whether it is major, its cost, and by how much the heap grows. Each figure has only
//! the right order of magnitude: the tests check that following advice ends, and ends well.
//!
//! Compiled for tests only (`#[cfg(test)]` in `tune`): a variable that does not exist fails the test, so it is unwrapped.

use serde_json::{Value, json, value::RawValue};

use super::{
    Episode, Evidence, Fold, InForce, Report, Series, Strategy, Times, recommend_after, ruby::variable,
};
use crate::wire::{EventName, Header, Sample, SampleSet};

/// Nanoseconds to mark an object (`MARK`) and to sweep a slot (`SWEEP`).
const MARK: f64 = 25.0;
const SWEEP: f64 = 4.0;
/// Minimum number of cycles of a set.
const CYCLES: u64 = 120;

/// The properties of a simulated program.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// Objects allocated per second outside the GC.
    pub(super) rate: f64,
    /// Number of objects that live forever.
    pub(super) live: f64,
    /// Bytes allocated by malloc per object.
    pub(super) bytes: f64,
    /// Share of the objects that become old, and (`old_dead`) share of those that are dead when a major cycle examines them.
    pub(super) promoted: f64,
    pub(super) old_dead: f64,
    /// Share of the allocated objects that are leaked.
    pub(super) leaked: f64,
    /// Objects per unit of work; 0 if there are no units.
    pub(super) unit: f64,
    /// Every n-th cycle is major because of objects without write barriers, or (`explicit`) requested by the program; 0: none.
    pub(super) shady: u64,
    pub(super) explicit: u64,
    /// Share of its objects in heap 0; all others are in heap 1 (from 3.2 on).
    pub(super) small: f64,
    /// Resident memory of everything else, bytes: libraries, code, stacks.
    pub(super) other: f64,
    /// A variable, and the factor on the cost if it is not at its default.
    pub(super) harmed_by: Option<(&'static str, f64)>,
    /// Relative noise of all times, 0 to 1.
    pub(super) noise: f64,
}

impl Default for Program {
    fn default() -> Self {
        Self {
            rate: 2e6,
            live: 150_000.0,
            bytes: 20.0,
            promoted: 0.001,
            old_dead: 0.3,
            leaked: 0.0,
            unit: 0.0,
            shady: 0,
            explicit: 0,
            small: 0.8,
            other: 20e6,
            harmed_by: None,
            noise: 0.05,
        }
    }
}

struct Random(u64);

impl Random {
    /// A number from 0 to 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A process with its history.
pub(super) struct Process<'a> {
    program: &'a Program,
    series: Series,
    in_force: InForce,
    random: Random,
    live: f64,
    old: f64,
    old_limit: f64,
    size: f64,
    malloc_limit: f64,
    oldmalloc: f64,
    oldmalloc_limit: f64,
    need: Option<&'static str>,
    count: u64,
    ts: f64,
    allocated: f64,
    gc_ms: f64,
    samples: Vec<Sample>,
}

impl<'a> Process<'a> {
    pub(super) fn new(program: &'a Program, series: Series, in_force: &InForce, seed: u64) -> Self {
        let mut process = Self {
            program,
            series,
            in_force: in_force.clone(),
            random: Random(seed),
            live: program.live,
            old: program.live * 0.8,
            old_limit: program.live * 1.6,
            size: 0.0,
            malloc_limit: 0.0,
            oldmalloc: 0.0,
            oldmalloc_limit: 0.0,
            need: None,
            count: 0,
            ts: 1e9,
            allocated: 0.0,
            gc_ms: 0.0,
            samples: Vec::new(),
        };
        process.size = program.live * 1.1;
        process.size = process.size.max(process.initial());
        process.malloc_limit = process.value("RUBY_GC_MALLOC_LIMIT");
        process.oldmalloc_limit = process.value("RUBY_GC_OLDMALLOC_LIMIT");
        process
    }

    fn value(&self, name: &str) -> f64 {
        let variable = variable(name).unwrap();
        if variable.is_read_by(self.series) { self.in_force.value(variable) } else { variable.default }
    }

    /// Minimum number of slots of the heap.
    fn initial(&self) -> f64 {
        if self.series == Series(3, 2) {
            0.0
        } else if self.series >= Series(3, 3) && self.series < Series(4, 1) {
            let [small, large] = [0, 1].map(|heap| self.value(&format!("RUBY_GC_HEAP_{heap}_INIT_SLOTS")));
            // The heap that is short of slots starts the cycle.
            (small / self.program.small).min(large / (1.0 - self.program.small).max(0.01))
        } else {
            self.value("RUBY_GC_HEAP_INIT_SLOTS")
        }
    }

    /// Old objects beyond the program's own ones; whether or not they are dead, they occupy slots.
    fn old_garbage(&self) -> f64 {
        (self.old - self.program.live * 0.8).max(0.0)
    }

    fn sample(&mut self, event: EventName, major: Option<&str>, by: &str) {
        let stat = [
            self.count as f64,
            self.size,
            (self.live + self.old_garbage()).min(self.size),
            self.allocated,
            self.old,
            self.gc_ms,
        ];
        let info = json!({ "major_by": major, "gc_by": by, "state": "none" });
        let Value::Object(latest_gc_info) = info else { unreachable!("an object") };
        let heaps = matches!(event, EventName::Booted | EventName::Terminated) && self.series >= Series(3, 2);
        let heap = |slot: u64, share: f64| {
            json!({ "slot_size": slot, "heap_eden_slots": (self.size * share) as u64,
                "total_allocated_objects": (self.allocated * share) as u64 })
        };
        let small = self.program.small;
        let meta = heaps.then(|| {
            json!({ "stat_heap": { "0": heap(40, small), "1": heap(80, 1.0 - small), "2": heap(160, 0.0),
                "3": heap(320, 0.0), "4": heap(640, 0.0) } })
        });
        let rss = self.program.other + self.size * 48.0 + self.malloc_limit * 2.0;
        self.samples.push(Sample {
            ts: self.ts,
            peak_rss: Some(rss as u64),
            current_rss: Some(rss as u64),
            event,
            stat: stat.iter().map(|value| *value as u64).collect(),
            latest_gc_info,
            meta: meta.map(|meta| RawValue::from_string(meta.to_string()).unwrap()),
            thread_id: None,
        });
    }

    fn cycle(&mut self) {
        let program = self.program;
        let noise = |random: &mut Random| 1.0 + program.noise * (random.next() - 0.5) * 2.0;
        let by_slots = (self.size - self.live - self.old_garbage()).max(200.0) * noise(&mut self.random);
        let by_malloc = self.malloc_limit / program.bytes.max(0.001) * noise(&mut self.random);
        let objects = by_slots.min(by_malloc);
        let mut by = if by_malloc < by_slots { "malloc" } else { "newobj" };
        self.malloc_limit = if by == "malloc" {
            (self.malloc_limit * 1.4).min(self.value("RUBY_GC_MALLOC_LIMIT_MAX"))
        } else {
            (self.malloc_limit * 0.98).max(self.value("RUBY_GC_MALLOC_LIMIT"))
        };
        self.count += 1;
        let asked = |n: u64| n > 0 && self.count.is_multiple_of(n);
        let major = if asked(program.explicit) {
            by = "method";
            Some("force")
        } else if asked(program.shady) {
            Some("shady")
        } else {
            self.need.take()
        };
        self.allocated += objects;
        self.ts += objects / program.rate * noise(&mut self.random);
        self.sample(EventName::GcCycleStarted, major, by);
        self.live += objects * program.leaked;
        self.old += objects * program.promoted;
        self.oldmalloc += objects * program.bytes * program.promoted.max(0.01);
        let base = self.live - program.live;
        let mut marked = program.live * 0.3;
        if major.is_some() {
            marked = self.live + self.old_garbage();
            let mature = program.live * 0.8 + base;
            self.old = mature + (self.old - mature).max(0.0) * (1.0 - program.old_dead);
            self.old_limit = self.old * self.value("RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR");
            self.oldmalloc = 0.0;
        }
        self.live = program.live + base.max(0.0);
        let free = self.size - self.live - self.old_garbage();
        let least = self.value("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO") * self.size;
        if free < least && major.is_some() {
            let goal = (self.live + self.old_garbage())
                / (1.0 - self.value("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO").min(0.9));
            self.size = goal.clamp(self.size * 1.02, self.size * 1.8);
        } else if free < least {
            self.need = Some("nofree");
        } else if self.oldmalloc > self.oldmalloc_limit {
            self.need = Some("oldmalloc");
            self.oldmalloc_limit =
                (self.oldmalloc_limit * 1.2).min(self.value("RUBY_GC_OLDMALLOC_LIMIT_MAX"));
        } else if self.old > self.old_limit {
            self.need = Some("oldgen");
        }
        if self.series == Series(3, 2) {
            // This many slots are free after each cycle.
            self.size = self.size.max(self.live + self.value("RUBY_GC_HEAP_INIT_SLOTS"));
        }
        self.size = self.size.max(self.initial());
        let harm = program.harmed_by.filter(|(name, _)| {
            self.in_force.differences(&InForce::default()).any(|variable| variable.name == *name)
        });
        let cost = (marked * MARK + self.size * SWEEP) * harm.map_or(1.0, |(_, times)| times);
        let ms = cost / 1e6 * noise(&mut self.random);
        self.gc_ms += ms;
        self.ts += ms / 1e3;
        self.sample(EventName::GcCycleEnded, major, by);
    }

    fn units(&mut self) {
        if self.program.unit <= 0.0 {
            return;
        }
        for _ in 0..40 {
            self.sample(EventName::ProcessingStarted, None, "newobj");
            self.allocated += self.program.unit;
            self.ts += self.program.unit / self.program.rate;
            self.sample(EventName::ProcessingEnded, None, "newobj");
        }
    }

    /// Runs the program for the next set.
    pub(super) fn set(&mut self) -> SampleSet {
        self.samples.clear();
        self.units();
        self.sample(EventName::Booted, None, "newobj");
        // A set lasts long enough for advice.
        let (first, began) = (self.count, self.ts);
        while self.count - first < CYCLES || (self.ts - began < 2.0 && self.count - first < 12 * CYCLES) {
            self.cycle();
        }
        self.sample(EventName::Terminated, None, "newobj");
        let mut keys = vec![
            "count",
            "heap_available_slots",
            "heap_live_slots",
            "total_allocated_objects",
            "old_objects",
        ];
        if self.series >= Series(3, 1) {
            keys.push("time");
        } else {
            self.samples.iter_mut().for_each(|sample| sample.stat.truncate(5));
        }
        let env: serde_json::Map<String, Value> = self
            .in_force
            .iter()
            .map(|(name, value)| (name.to_owned(), json!(super::in_force::shown(name, value))))
            .collect();
        let version = format!("{}.0", self.series);
        let header = json!([[null, version, "0.0", env, "1.0.71", [], {}, keys, "host", 1, 4242]]);
        let header = SampleSet::from_json(&header.to_string()).unwrap().header;
        SampleSet { header, samples: self.samples.clone() }
    }

    /// The merged evidence of its next `sets` sets.
    pub(super) fn evidence(&mut self, sets: u32) -> Evidence {
        let mut sum = Evidence::default();
        for _ in 0..sets {
            let set = self.set();
            sum.merge(&fold(&set.header, &set.samples));
        }
        sum
    }
}

fn fold(header: &Header, samples: &[Sample]) -> Evidence {
    let mut fold = Fold::new(header).unwrap();
    for sample in samples {
        fold.add(sample);
    }
    fold.finish()
}

/// The course of a user who always followed the advice.
#[derive(Debug)]
pub(super) struct Story {
    /// The settings of each round.
    pub(super) rounds: Vec<InForce>,
    /// The last report.
    pub(super) report: Report,
    /// Whether a change was withdrawn.
    pub(super) withdrawn: bool,
    /// Milliseconds in the GC per million objects in the first and in the last round.
    pub(super) cost: [f64; 2],
    /// Peak of resident memory in the first and in the last round, bytes.
    pub(super) peak: [f64; 2],
}

impl Story {
    /// Number of times that abandoned settings came back.
    pub(super) fn returns(&self) -> usize {
        let changes = self.rounds.windows(2).enumerate().filter(|(_, pair)| pair[0] != pair[1]);
        changes.filter(|(at, pair)| self.rounds[..*at].contains(&pair[1])).count()
    }

    /// Whether the settings of the last three rounds are the same, so that the advice has ended.
    pub(super) fn is_done(&self) -> bool {
        self.rounds.iter().rev().take(3).all(|settings| Some(settings) == self.rounds.last())
    }

    /// Number of changes of settings.
    pub(super) fn steps(&self) -> usize {
        self.rounds.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }
}

/// Follows advice for this number of rounds.
pub(super) fn follow(program: &Program, series: Series, strategy: Strategy, rounds: u64) -> Story {
    let mut in_force = InForce::default();
    let mut history: Vec<Episode> = Vec::new();
    let mut story: Option<Story> = None;
    for round in 0..rounds {
        let evidence = Process::new(program, series, &in_force, round + 1).evidence(3);
        let cost = evidence.time.map_or(0.0, |time| {
            (time.minor_ms + time.major_ms) as f64 * 1e6 / evidence.objects.max(1) as f64
        });
        let peak = evidence.each.peak.median().unwrap_or(0) as f64;
        let at = history.iter().position(|episode| episode.in_force == in_force);
        let mut now = at.map_or_else(
            || Episode { in_force: in_force.clone(), evidence: Evidence::default(), times: Times::default() },
            |at| history.remove(at),
        );
        now.evidence.merge(&evidence);
        now.times = Times::at(round as f64);
        let report = recommend_after(series, &now, &history);
        let state = report.plan(strategy).state(&in_force, &|_, _| true);
        let withdrawn = report.plan(strategy).withdrawal.is_some();
        let _ = report.to_string();
        history.push(now);
        let entry = story.get_or_insert_with(|| Story {
            rounds: vec![in_force.clone()],
            report: report.clone(),
            withdrawn: false,
            cost: [cost, cost],
            peak: [peak, peak],
        });
        entry.rounds.push(state.set.clone());
        entry.withdrawn |= withdrawn;
        entry.cost[1] = cost;
        entry.peak[1] = peak;
        entry.report = report;
        in_force = state.set;
    }
    story.unwrap()
}
