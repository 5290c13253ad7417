//! What the garbage collector did in a process while it was traced: sums, distributions, the worst cycle, and the lines that
//! started most of it. Memory is bounded, however long tracing lasts.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use hdrhistogram::Histogram;

use super::services::CycleKey;
use crate::model::{
    GcCycle, GcState, GcWork,
    source::{app_frame, ruby_frame},
    stack::Frame,
};

/// Maximum number of distinguished lines of code per process; all others are one entry.
const MAX_LINES: usize = 1000;
/// Significant decimal digits of quantiles, which are therefore at most 1 % too high.
const DIGITS: u8 = 2;

/// Distribution of times: the maximum is exact, quantiles have an error of at most 1 %.
#[derive(Clone, Debug)]
pub struct Distribution {
    /// `None` if it has rejected a value, which cannot happen.
    histogram: Option<Histogram<u64>>,
    max_ns: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self { histogram: Histogram::new(DIGITS).ok(), max_ns: 0 }
    }
}

impl Distribution {
    /// Adds a time.
    pub fn add(&mut self, ns: u64) {
        self.max_ns = self.max_ns.max(ns);
        if let Some(histogram) = &mut self.histogram {
            // The histogram grows as needed, up to all of u64, so it accepts every value.
            if histogram.record(ns).is_err() {
                self.histogram = None;
            }
        }
    }

    /// Number of times.
    pub fn count(&self) -> u64 {
        self.histogram.as_ref().map_or(0, Histogram::len)
    }

    /// The longest time, nanoseconds.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The time that this share of all times (0 to 1) does not exceed, nanoseconds; at most 1 % too high.
    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        self.histogram.as_ref().map_or(0, |histogram| histogram.value_at_quantile(quantile)).min(self.max_ns)
    }
}

/// A line of code that starts cycles.
#[derive(Clone, Debug)]
pub struct Line {
    /// The innermost frame in the application's own code or, without one, in any Ruby code; `None`: the stack was
    /// not captured, or there were too many lines.
    pub frame: Option<Arc<Frame>>,
    /// Number of cycles.
    pub cycles: u64,
    /// Total time of their pauses, nanoseconds.
    pub stopped_ns: u64,
}

/// A cycle that stands out.
#[derive(Clone, Debug)]
pub struct Notable {
    /// `GC.count`.
    pub count: u64,
    /// Its kind and reason.
    pub key: CycleKey,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Total time of its pauses, nanoseconds.
    pub stopped_ns: u64,
    /// The longest pause, nanoseconds.
    pub max_ns: u64,
    /// The line that started it, as in [`Line`].
    pub by: Option<Arc<Frame>>,
}

/// Resident memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rss {
    /// At the first GC event; if there was none, when the process was found.
    pub first: u64,
    /// At the last GC event.
    pub last: u64,
    /// The peak recorded by the kernel; it includes the time before tracing.
    pub peak: u64,
}

impl Rss {
    /// The resident memory in a state, if it was read.
    pub fn of(state: &GcState) -> Option<Self> {
        state.memory.map(|memory| Self { first: memory.rss, last: memory.rss, peak: memory.peak_rss })
    }

    /// Adds the resident memory in a later state.
    pub fn add(to: &mut Option<Self>, state: &GcState) {
        let Some(new) = Self::of(state) else { return };
        let rss = to.get_or_insert(new);
        rss.last = new.last;
        rss.peak = rss.peak.max(new.peak);
    }
}

/// What the garbage collector did.
#[derive(Clone, Debug, Default)]
pub struct GcSummary {
    /// Number of cycles by key, including those whose end was not seen.
    pub cycles: BTreeMap<CycleKey, u64>,
    /// Total time of all pauses, nanoseconds, without those in `work`.
    pub stopped_ns: u64,
    /// Lengths of single pauses, including those of a Ruby whose cycles are unknown.
    pub stops: Distribution,
    /// Total pause times of single cycles.
    pub totals: Distribution,
    /// The cycle with the longest total pause time.
    pub worst: Option<Notable>,
    /// Memory, if it was read.
    pub rss: Option<Rss>,
    /// GC work of a Ruby without event sites, by what was timed: number of intervals, and nanoseconds.
    pub work: BTreeMap<&'static str, (u64, u64)>,
    /// Number of GC records that the kernel lost.
    pub lost: u64,
    lines: HashMap<Option<Arc<Frame>>, (u64, u64)>,
}

impl GcSummary {
    /// Adds the VM's state at some time.
    pub fn state(&mut self, state: &GcState) {
        Rss::add(&mut self.rss, state);
    }

    /// Adds a cycle.
    pub fn cycle(&mut self, cycle: &GcCycle) {
        self.state(&cycle.start);
        if let Some(end) = &cycle.end {
            self.state(end);
        }
        let key = CycleKey::of(cycle);
        *self.cycles.entry(key).or_default() += 1;
        self.lost += cycle.lost;
        for pause in &cycle.pauses {
            self.stops.add(pause.ns);
        }
        let stopped_ns = cycle.pause_ns();
        self.stopped_ns += stopped_ns;
        // The time of a cycle that was cut off in its first pause is unknown.
        if !cycle.pauses.is_empty() {
            self.totals.add(stopped_ns);
        }
        let by = started_by(cycle);
        if !cycle.pauses.is_empty() && self.worst.as_ref().is_none_or(|worst| worst.stopped_ns < stopped_ns) {
            let (count, max_ns, ts_ns) = (cycle.count, cycle.max_pause_ns(), cycle.start.ts_ns);
            self.worst = Some(Notable { count, key, ts_ns, stopped_ns, max_ns, by: by.cloned() });
        }
        let by = by.cloned();
        let known = self.lines.contains_key(&by) || self.lines.len() < MAX_LINES;
        let (cycles, ns) = self.lines.entry(if known { by } else { None }).or_default();
        *cycles += 1;
        *ns += stopped_ns;
    }

    /// Adds GC work of a Ruby without event sites.
    pub fn work(&mut self, work: &GcWork) {
        let (count, ns) = self.work.entry(work.phase.name()).or_default();
        *count += 1;
        *ns += work.ns;
        if work.is_pause() {
            self.stops.add(work.ns);
        }
    }

    /// Observed time in the GC of a Ruby without event sites, nanoseconds. Parts of pauses may be nested, so the largest sum of a phase is a lower
    /// bound for the total.
    pub fn work_ns(&self) -> u64 {
        self.work.values().map(|(_, ns)| *ns).max().unwrap_or_default()
    }

    /// Tracing of the process ended. `lost` is the total number of lost records, including those after its last cycle.
    pub fn ended(&mut self, lost: u64) {
        self.lost = self.lost.max(lost);
    }

    /// Adds a pause of a Ruby whose cycles are unknown.
    pub fn pause(&mut self, ns: u64) {
        self.stops.add(ns);
        self.stopped_ns += ns;
    }

    /// Whether nothing was seen of the GC.
    pub fn is_empty(&self) -> bool {
        self.cycles.is_empty() && self.stops.count() == 0 && self.work.is_empty()
    }

    /// Number of cycles of this kind, or of all kinds (`None`).
    pub fn count(&self, kind: Option<&str>) -> u64 {
        let of_kind = self.cycles.iter().filter(|(key, _)| kind.is_none_or(|kind| key.kind == kind));
        of_kind.map(|(_, count)| count).sum()
    }

    /// The lines that started cycles, those with the most time first; cycles without a known line come last.
    pub fn lines(&self) -> Vec<Line> {
        let line = |(frame, (cycles, ns)): (&Option<Arc<Frame>>, &(u64, u64))| Line {
            frame: frame.clone(),
            cycles: *cycles,
            stopped_ns: *ns,
        };
        let mut lines: Vec<Line> = self.lines.iter().map(line).collect();
        lines.sort_unstable_by(|a, b| {
            (a.frame.is_none(), b.stopped_ns)
                .cmp(&(b.frame.is_none(), a.stopped_ns))
                .then_with(|| a.frame.cmp(&b.frame))
        });
        lines
    }
}

/// The line that started a cycle.
fn started_by(cycle: &GcCycle) -> Option<&Arc<Frame>> {
    let stack = cycle.trigger.as_deref()?;
    app_frame(stack).or_else(|| ruby_frame(stack))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{Memory, Pause, stack::FrameKind},
        ruby::stat::{GcInfo, Mode},
    };

    fn cycle(count: u64, pauses: &[u64], file: Option<&str>, rss: u64) -> GcCycle {
        let info = GcInfo::decode(0x100, None, Mode::None, None);
        let memory = Some(Memory { rss, peak_rss: rss * 2, ..Memory::default() });
        let start = GcState { ts_ns: count, tid: 1, stat: vec![], heaps: vec![], info, memory };
        let pause =
            |&ns| Pause { tid: 1, begin_ns: 1, ns, kind: None, mark_ns: ns, sweep_ns: 0, other_ns: 0 };
        let frame = |file: &str| {
            let (name, file) = (Arc::from("m"), Some(Arc::from(file)));
            Arc::new(Frame { kind: FrameKind::Ruby, name, file, line: 3, first_line: 1, address: 0 })
        };
        let library = frame("/usr/lib/ruby/3.1.0/set.rb");
        let trigger = file.map(|file| Arc::from([library, frame(file)].as_slice()));
        let pauses = pauses.iter().map(pause).collect();
        GcCycle {
            span: None,
            comm: "ruby".into(),
            count,
            start,
            end: None,
            pauses,
            trigger,
            request: None,
            lost: 0,
        }
    }

    /// A cycle of which no pause was seen is only counted: it is not the worst one.
    #[test]
    fn without_pauses() {
        let mut summary = GcSummary::default();
        summary.cycle(&cycle(1, &[], None, 1));
        assert_eq!((summary.count(None), summary.stops.count(), summary.totals.count()), (1, 0, 0));
        assert!(summary.worst.is_none(), "{:?}", summary.worst);
    }

    /// Sums are exact, quantiles within one percent, and lines are those of the application.
    #[test]
    fn adds_up() {
        let mut summary = GcSummary::default();
        for n in 1..=1000 {
            summary.cycle(&cycle(n, &[n * 1000, 500], Some("/srv/app.rb"), 5000 + n));
        }
        summary.cycle(&cycle(1001, &[7], None, 4000));
        assert_eq!((summary.count(None), summary.count(Some("minor"))), (1001, 1001));
        assert_eq!(summary.stopped_ns, 500_500_000 + 500_000 + 7);
        assert_eq!((summary.stops.count(), summary.stops.max_ns()), (2001, 1_000_000));
        for (quantile, exact) in [(0.5, 500_500_f64), (0.99, 990_500.0), (1.0, 1_000_500.0)] {
            let off = summary.totals.quantile_ns(quantile) as f64 / exact - 1.0;
            assert!((-0.002..=0.01).contains(&off), "{quantile}: {off}");
        }
        assert_eq!(summary.rss, Some(Rss { first: 5001, last: 4000, peak: 12_000 }));
        let worst = summary.worst.as_ref().unwrap();
        assert_eq!((worst.count, worst.stopped_ns, worst.max_ns), (1000, 1_000_500, 1_000_000));
        let lines = summary.lines();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].frame.as_ref().unwrap().file.as_deref(), Some("/srv/app.rb"));
        assert_eq!((lines[0].cycles, lines[1].cycles, lines[1].frame.is_none()), (1000, 1, true));
    }

    /// The number of lines is bounded.
    #[test]
    fn bounded() {
        let mut summary = GcSummary::default();
        for n in 0..2 * MAX_LINES as u64 {
            summary.cycle(&cycle(n, &[1], Some(&format!("/srv/{n}.rb")), 1));
        }
        let lines = summary.lines();
        assert!(lines.len() <= MAX_LINES + 1);
        assert_eq!(lines.iter().map(|line| line.cycles).sum::<u64>(), 2 * MAX_LINES as u64);
    }
}
