//! What pages show of a set: a few figures, summed over ten minutes of a process.

use std::fmt::Write as _;

pub(crate) use gctrace_tunemygc::offline::EPOCH;

use crate::{
    tune::{
        environment,
        evidence::{STILL, is_time_in_gc},
    },
    wire::{EventName, Header, Sample},
};

/// Length of a slot, seconds.
pub const SLOT: i64 = 600;
/// Upper bounds of the classes of time in GC per cycle, milliseconds; the last class is unbounded.
pub const BOUNDS: [u64; 9] = [1, 2, 5, 10, 20, 50, 100, 200, 500];
/// Number of classes of time in GC per cycle.
pub const CLASSES: usize = BOUNDS.len() + 1;
/// Maximum bytes kept of an environment.
const MAX_ENVIRONMENT: usize = 1000;
/// Maximum bytes kept of a host name: Linux allows 64, DNS 253.
const MAX_HOST: usize = 255;
/// A set's own times are used if they differ from its arrival by less than this, seconds; agents may send times of another clock.
const NEAR: f64 = 86_400.0;
/// They are also used if they are at most this old, seconds, and are not relative to boot: a set may have waited for the collector.
const OLDEST: f64 = 30.0 * 86_400.0;
/// Age, and width of the slots into which figures of that age are summed, both in seconds. A slot is at most one column of the chart of a
/// week, or of a month. A set may arrive a day after it was made, and its ten-minute slot must still exist.
pub const WIDTHS: [(i64, i64); 2] = [(25 * 3600, 2 * 3600), (8 * 86_400, 6 * 3600)];

/// Figures that can be summed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// GC cycles.
    pub cycles: u64,
    /// Major ones among them.
    pub majors: u64,
    /// Time in GC during `gc_seconds`, as `GC.stat(:time)` counts it, milliseconds.
    pub gc_ms: u64,
    /// Seconds between neighbouring cycles; 0 if this Ruby does not measure its time in GC (before 3.1).
    pub gc_seconds: f64,
    /// Cycles by time in GC, see [`BOUNDS`].
    pub classes: [u64; CLASSES],
    /// Maximum resident memory of a process, bytes.
    pub rss: u64,
    /// Maximum number of slots of a heap.
    pub slots: u64,
}

impl Figures {
    /// Adds other figures to these.
    pub fn merge(&mut self, other: &Self) {
        self.cycles += other.cycles;
        self.majors += other.majors;
        self.gc_ms += other.gc_ms;
        self.gc_seconds += other.gc_seconds;
        for (sum, more) in self.classes.iter_mut().zip(other.classes) {
            *sum += more;
        }
        self.rss = self.rss.max(other.rss);
        self.slots = self.slots.max(other.slots);
    }

    /// Whether the time in GC is measured. It does not advance in a program with `GC.measure_total_time = false`.
    fn is_counted(&self) -> bool {
        self.gc_seconds > 0.0 && (self.gc_ms > 0 || self.classes.iter().sum::<u64>() < STILL)
    }

    /// Share of the time in GC, 0 to 1; `None` if that time is not measured.
    pub fn share(&self) -> Option<f64> {
        self.is_counted().then(|| self.gc_ms as f64 / 1000.0 / self.gc_seconds)
    }

    /// Index of the class that contains the 99th percentile of the cycles; `None` without cycles, or if the time in GC is not measured.
    pub fn p99(&self) -> Option<usize> {
        let all: u64 = self.classes.iter().sum();
        let mut left = (all * 99).div_ceil(100);
        self.classes.iter().position(|count| {
            left = left.saturating_sub(*count);
            all > 0 && left == 0 && self.is_counted()
        })
    }
}

/// The figures of a set, and the process to which they belong.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Digest {
    /// Host name, according to the set.
    pub host: String,
    /// Pid, according to the set.
    pub pid: i64,
    /// `RUBY_GC_*` as `NAME=VALUE NAME=VALUE`.
    pub environment: String,
    /// Its figures.
    pub figures: Figures,
    first_ts: Option<f64>,
    last_ts: f64,
    columns: [Option<usize>; 3],
    /// At the latest start of a cycle: time, number of cycles, milliseconds in GC.
    last: Option<(f64, u64, u64)>,
}

impl Digest {
    /// Starts a digest with a set's header.
    pub fn new(header: &Header) -> Self {
        let column = |wanted: &str| header.stat_keys.iter().position(|key| key == wanted);
        let mut text = String::new();
        for (name, value) in &header.gc_env {
            if name.starts_with("RUBY_GC_") && environment::is_name(name) && !environment::is_agents(name) {
                let value = value.as_str().unwrap_or_default();
                let blank = if text.is_empty() { "" } else { " " };
                // Writing to a string cannot fail.
                let _infallible = write!(text, "{blank}{name}={value}");
            }
        }
        Self {
            host: cut(&header.hostname, MAX_HOST),
            pid: i64::try_from(header.pid).unwrap_or(i64::MAX),
            environment: cut(&text, MAX_ENVIRONMENT),
            columns: [column("count"), column("time"), column("heap_available_slots")],
            ..Self::default()
        }
    }

    /// Adds the next sample.
    pub fn add(&mut self, sample: &Sample) {
        let at = |column: Option<usize>| column.and_then(|column| sample.stat.get(column)).copied();
        let [count, time, slots] = self.columns.map(at);
        let figures = &mut self.figures;
        self.first_ts = Some(self.first_ts.map_or(sample.ts, |first| first.min(sample.ts)));
        self.last_ts = self.last_ts.max(sample.ts);
        // Values that the store cannot hold are invalid anyway.
        let held = |value: u64| value.min(i64::MAX as u64 >> 8);
        figures.rss = figures.rss.max(held(sample.current_rss.unwrap_or(0)));
        figures.slots = figures.slots.max(held(slots.unwrap_or(0)));
        if sample.event != EventName::GcCycleStarted {
            return;
        }
        figures.cycles += 1;
        let major = sample.latest_gc_info.get("major_by").is_some_and(|reason| !reason.is_null());
        figures.majors += u64::from(major);
        let (Some(count), Some(time)) = (count, time) else { return };
        if let Some((ts, before, ms)) = self.last.replace((sample.ts, count, time))
            && count.checked_sub(before) == Some(1)
            && let Some(ms) = time.checked_sub(ms)
            && is_time_in_gc(ms, sample.ts - ts)
        {
            // A million such sets, summed in the store, stay below its limit.
            figures.gc_ms = figures.gc_ms.saturating_add(ms).min(i64::MAX as u64 >> 20);
            figures.gc_seconds += (sample.ts - ts).max(0.0);
            let class = BOUNDS.iter().position(|bound| ms < *bound).unwrap_or(BOUNDS.len());
            figures.classes[class] += 1;
        }
    }

    /// When a set that arrived at `received` ends: its own time if that is plausible. Both are epoch seconds.
    fn at(&self, received: f64) -> Option<f64> {
        let age = received - self.last_ts;
        let own = age.abs() < NEAR || (self.last_ts > EPOCH && (0.0..OLDEST).contains(&age));
        own.then_some(self.last_ts.min(received))
    }

    /// First and last time of a set that arrived at `received`, all in epoch seconds.
    pub fn span(&self, received: f64) -> [f64; 2] {
        match (self.at(received), self.first_ts) {
            (Some(at), Some(first)) => [first.max(at - NEAR).min(at), at],
            _ => [received; 2],
        }
    }

    /// Start of the slot of a set that arrived at `received`, both in epoch seconds.
    pub fn slot(&self, received: f64) -> i64 {
        let at = self.at(received).unwrap_or(received);
        let age = (received - at) as i64;
        let width = WIDTHS.iter().rev().find(|(old, _)| age >= *old).map_or(SLOT, |(_, width)| *width);
        (at as i64).div_euclid(width) * width
    }
}

/// At most the first `most` bytes of a text, without NUL, which PostgreSQL's texts cannot hold.
fn cut(text: &str, most: usize) -> String {
    text[..text.floor_char_boundary(most)].replace('\0', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::SampleSet;

    /// Without data there are no shares and no quantiles.
    #[test]
    fn figures() {
        let mut figures = Figures::default();
        assert_eq!((figures.share(), figures.p99()), (None, None));
        figures.classes[2] = 98;
        figures.classes[9] = 2;
        figures.gc_ms = 500;
        figures.gc_seconds = 10.0;
        assert_eq!((figures.share(), figures.p99()), (Some(0.05), Some(9)));
        figures.classes[9] = 0;
        let mut sum = figures;
        sum.merge(&figures);
        assert_eq!((sum.share(), sum.p99(), sum.gc_ms), (Some(0.05), Some(2), 1000));
        // A program that does not measure its time in GC.
        let mut still = Figures { gc_seconds: 10.0, ..Figures::default() };
        still.classes[0] = STILL;
        assert_eq!((still.share(), still.p99()), (None, None));
        still.classes[0] -= 1;
        assert_eq!((still.share(), still.p99()), (Some(0.0), Some(0)));
        // A set that claims more time in GC than passed between its cycles, and one that claims centuries of it.
        let header = r#"["t","3.4.1","0.0",{},"2",[],{},["count","time"],"h",1,2]"#;
        let sample = |ts: f64, count: u64, ms: u64| {
            format!(r#"[{ts},1,1,"GC_CYCLE_STARTED",[{count},{ms}],{{}},null,1]"#)
        };
        let figures = |samples: [String; 4]| {
            let set = SampleSet::from_json(&format!("[{header},{}]", samples.join(","))).unwrap();
            let mut digest = Digest::new(&set.header);
            set.samples.iter().for_each(|sample| digest.add(sample));
            digest.figures
        };
        let jumps =
            figures([sample(1.0, 1, 0), sample(2.0, 2, 1 << 63), sample(3.0, 3, 0), sample(4.0, 4, 500)]);
        assert_eq!((jumps.gc_ms, jumps.gc_seconds, jumps.cycles), (500, 1.0, 4));
        let hundreds_of_years = 9_000_000_000.0;
        let years = [sample(1.0, 1, 0), sample(hundreds_of_years, 2, 8_900_000_000_000)];
        let [first, second] = years;
        let years = figures([
            first,
            second,
            sample(hundreds_of_years, 3, 8_900_000_000_000),
            sample(hundreds_of_years, 4, 8_900_000_000_000),
        ]);
        assert_eq!(years.gc_ms, i64::MAX as u64 >> 20);
        let digest = Digest { last_ts: 5.0, ..Digest::default() };
        assert_eq!((digest.slot(1_000_000_000.0), digest.slot(700.0)), (999_999_600, 0));
        // Sets that have waited count at their own time, in slots as wide as those of that age.
        let received = 1_700_000_000.0;
        let slot = |age: f64| Digest { last_ts: received - age, ..Digest::default() }.slot(received);
        assert_eq!(slot(3.0 * 86_400.0), (1_700_000_000 - 3 * 86_400) / 7200 * 7200);
        assert_eq!(slot(9.0 * 86_400.0), (1_700_000_000 - 9 * 86_400) / 21_600 * 21_600);
        for arrival in [0.0, -86_401.0, 31.0 * 86_400.0] {
            assert_eq!(slot(arrival), 1_699_999_800, "{arrival}");
        }
        assert_eq!(cut(&"é".repeat(600), MAX_HOST).len(), 254);
    }
}
