//! Compares the predictions of the advice for memory, major cycles and time with the measurements.

use std::fmt;

use anyhow::{Context as _, Result};
use gctrace_tests::{report::Report, script::Report as ScriptReport};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Spread;

/// Maximum factor by which a figure that is predicted as one number may be off.
const OFF: f64 = 1.5;

/// The price of a plan, as `gctrace tune --format json` writes it; unknown figures are absent.
#[derive(Debug, Deserialize)]
pub(super) struct Predicted {
    /// Range of the peak of resident memory under the advice, bytes.
    peak_rss: Option<[f64; 2]>,
    likely_peak_rss: Option<f64>,
    /// Range of the factor on the number of major cycles.
    majors: Option<[f64; 2]>,
    /// Range of the factor on the time in GC.
    gc_time: Option<[f64; 2]>,
    likely_gc_time: Option<f64>,
}

/// The results of a run of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// Seconds in the pauses of the cycles of its work, according to gctrace.
    pauses: f64,
    /// Seconds in GC according to `GC.stat(:time)`; Ruby measures them from 3.1 on.
    counted: Option<f64>,
    majors: u64,
    /// Peak of resident memory, bytes.
    peak_rss: f64,
}

impl Turn {
    pub(super) fn of(report: &Report, script: &ScriptReport) -> Result<Self> {
        let counts = script.counts()?;
        let pauses: u64 = report
            .gcs_of(script.pid)
            .filter(|line| counts.contains(&line.count))
            .map(|line| line.pause_ns)
            .sum();
        Ok(Self {
            pauses: pauses as f64 / 1e9,
            counted: script.growth("time").ok().map(|ms| ms as f64 / 1e3),
            majors: script.growth("major_gc_count")?,
            peak_rss: script.extra_u64("peak_rss_kib").context("its peak of memory")? as f64 * 1024.0,
        })
    }
}

impl fmt::Display for Turn {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{:.3} s in GC pauses, {} majors, peak of {:.0} MiB",
            self.pauses,
            self.majors,
            mib(self.peak_rss)
        )
    }
}

fn mib(bytes: f64) -> f64 {
    bytes / 1_048_576.0
}

/// How a measured figure compares with the prediction. A figure outside the range is never near, however close to the likely figure it is: a factor
/// of 1.3 is within 1.5 of a likely 0.9, but is a loss where a gain was predicted.
fn verdict(measured: f64, likely: Option<f64>, range: Option<[f64; 2]>) -> &'static str {
    let near = likely.is_some_and(|likely| measured <= likely * OFF && likely <= measured * OFF);
    let inside = range.is_some_and(|[least, most]| (least..=most).contains(&measured));
    match (likely.is_some(), range.is_some()) {
        (false, false) => "not predicted",
        (_, true) if !inside => "OFF",
        _ if near => "near",
        _ if inside => "in the range",
        _ => "OFF",
    }
}

/// The spread of the ratios by turn, and the ratio of the minima of both sides: other load makes a run longer, never shorter.
fn ratio(turns: &[(Turn, Turn)], of: impl Fn(&Turn) -> Option<f64>) -> Option<(Spread, f64)> {
    let pairs: Option<Vec<(f64, f64)>> =
        turns.iter().map(|(before, after)| Some((of(before)?, of(after)?))).collect();
    let pairs = pairs.filter(|pairs| pairs.iter().all(|(before, _)| *before > 0.0))?;
    let least = |values: Vec<f64>| values.into_iter().fold(f64::INFINITY, f64::min);
    let (before, after) = pairs.iter().copied().unzip();
    Some((Spread::of(pairs.iter().map(|(before, after)| after / before)), least(after) / least(before)))
}

/// Prints the predictions and the measurements.
pub(super) fn report(name: &str, advised: &str, predicted: &Predicted, turns: &[(Turn, Turn)], json: bool) {
    let median = |of: &dyn Fn(&(Turn, Turn)) -> f64| Spread::of(turns.iter().map(of)).median;
    let peak = [median(&|(before, _)| before.peak_rss), median(&|(_, after)| after.peak_rss)];
    let majors = [median(&|(before, _)| before.majors as f64), median(&|(_, after)| after.majors as f64)];
    let pauses = ratio(turns, |turn| Some(turn.pauses));
    let counted = ratio(turns, |turn| turn.counted);
    // The advice is about Ruby's own figure.
    let time = counted.as_ref().or(pauses.as_ref());
    let of_majors = (majors[0] > 0.0).then(|| majors[1] / majors[0]);
    let verdicts = [
        verdict(peak[1], predicted.likely_peak_rss, predicted.peak_rss),
        of_majors.map_or("no majors before", |factor| verdict(factor, None, predicted.majors)),
        time.map_or("no time in GC", |(spread, _)| {
            verdict(spread.median, predicted.likely_gc_time, predicted.gc_time)
        }),
    ];
    if json {
        let spread = |found: &Option<(Spread, f64)>| -> Value {
            found.as_ref().map_or(Value::Null, |(spread, least)| {
                json!({ "median": spread.median, "min": spread.min, "max": spread.max, "least": least })
            })
        };
        let line = json!({
            "program": name,
            "advised": advised,
            "peak_rss": { "before": peak[0], "after": peak[1], "likely": predicted.likely_peak_rss, "range": predicted.peak_rss,
                "verdict": verdicts[0] },
            "majors": { "before": majors[0], "after": majors[1], "range": predicted.majors, "verdict": verdicts[1] },
            "gc_time": { "counted": spread(&counted), "pauses": spread(&pauses), "likely": predicted.likely_gc_time,
                "range": predicted.gc_time, "verdict": verdicts[2] },
        });
        println!("{line}");
        return;
    }
    println!("{name}: {advised}");
    println!(
        "  peak RSS, MiB   {:.0} -> {:.0}, likely {} ({}): {}",
        mib(peak[0]),
        mib(peak[1]),
        predicted
            .likely_peak_rss
            .map_or_else(|| "unknown".to_owned(), |likely| format!("{:.0}", mib(likely))),
        predicted.peak_rss.map_or_else(
            || "no range".to_owned(),
            |[least, most]| format!("{:.0} to {:.0}", mib(least), mib(most))
        ),
        verdicts[0]
    );
    println!(
        "  majors          {:.0} -> {:.0}, {}: {}",
        majors[0],
        majors[1],
        range(predicted.majors),
        verdicts[1]
    );
    let shown = |found: &Option<(Spread, f64)>| {
        found.as_ref().map_or_else(
            || "not counted".to_owned(),
            |(spread, least)| {
                format!(
                    "x {:.2} ({:.2} to {:.2}; of the least {least:.2})",
                    spread.median, spread.min, spread.max
                )
            },
        )
    };
    println!(
        "  time in GC      {}, in pauses {}, likely {} ({}): {}",
        shown(&counted),
        shown(&pauses),
        predicted.likely_gc_time.map_or_else(|| "unknown".to_owned(), |likely| format!("x {likely:.2}")),
        range(predicted.gc_time),
        verdicts[2]
    );
}

fn range(range: Option<[f64; 2]>) -> String {
    range.map_or_else(|| "no range".to_owned(), |[least, most]| format!("x {least:.2} to {most:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A figure is near if it is off by at most 1.5, either way, and within its range if there is one; otherwise only its range counts.
    #[test]
    fn verdicts() {
        assert_eq!(verdict(149.0, Some(100.0), None), "near");
        assert_eq!(verdict(67.0, Some(100.0), None), "near");
        assert_eq!(verdict(151.0, Some(100.0), None), "OFF");
        assert_eq!(verdict(151.0, Some(100.0), Some([50.0, 200.0])), "in the range");
        // As measured on 3.1: more time in GC than before, not less.
        assert_eq!(verdict(1.31, Some(0.88), Some([0.73, 1.07])), "OFF");
        assert_eq!(verdict(66.0, Some(100.0), Some([90.0, 200.0])), "OFF");
        assert_eq!(verdict(0.5, None, Some([0.0, 2.5])), "in the range");
        assert_eq!(verdict(0.5, None, None), "not predicted");
    }

    /// Medians over the turns, and the minimum of each side.
    #[test]
    fn ratios() {
        let turn = |pauses| Turn { pauses, counted: None, majors: 1, peak_rss: 1.0 };
        let turns = [(turn(2.0), turn(1.0)), (turn(4.0), turn(1.0)), (turn(1.0), turn(1.0))];
        let (spread, least) = ratio(&turns, |turn| Some(turn.pauses)).unwrap();
        assert_eq!((spread.median, spread.min, spread.max, least), (0.5, 0.25, 1.0, 1.0));
        assert!(ratio(&turns, |turn| turn.counted).is_none());
    }
}
