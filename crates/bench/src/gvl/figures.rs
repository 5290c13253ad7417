//! The figures of turns, and their summaries.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Threshold, nanoseconds: acquiring an uncontended GVL takes less, including the traps of both probes. A thread that waited longer found
/// the GVL held.
const FREE_NS: u64 = 10_000;

/// gctrace's own report of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ledger {
    /// Probe hits.
    pub(super) hits: u64,
    /// Hits among them while the GVL is not traced: those of probes that are being detached.
    pub(super) shed: u64,
    /// Number of times that a thread acquired the GVL.
    pub(super) resumed: u64,
    /// Time in the BPF programs, nanoseconds.
    pub(super) program_ns: u64,
    /// Number of waits that were reported individually.
    pub(super) reported: u64,
    /// How long the GVL was traced, and how long it was not, nanoseconds.
    pub(super) watched_ns: u64,
    pub(super) unwatched_ns: u64,
    /// Number of waits of all threads, and of those longer than [`FREE_NS`].
    pub(super) waits: u64,
    pub(super) held: u64,
}

impl Ledger {
    /// Reads the JSON lines of a run.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::of(&text)
    }

    fn of(text: &str) -> Result<Self> {
        // There may be several hundred thousand lines about individual waits.
        let line = |part: &str| text.lines().rev().find(|line| line.contains(part));
        let ledger = line(r#""type":"ledger""#).context("gctrace wrote no ledger")?;
        let ledger: Value = serde_json::from_str(ledger).context("the ledger")?;
        let counter = |side: &str, name: &str| {
            ledger[side][name].as_u64().with_context(|| format!("the ledger has no {name}"))
        };
        let process: Option<Value> =
            line(r#""what":"process""#).map(serde_json::from_str).transpose().context("a gvl line")?;
        let (mut waits, mut held) = (0, 0);
        if let Some(process) = process {
            let pairs = process["wait_histogram"].as_array().context("no wait_histogram")?;
            for pair in pairs {
                let (up_to, number) = pair[0].as_u64().zip(pair[1].as_u64()).context("not a pair")?;
                waits += number;
                held += if up_to > FREE_NS { number } else { 0 };
            }
        }
        Ok(Self {
            hits: counter("kernel", "gvl_hits")?,
            shed: counter("kernel", "gvl_shed")?,
            resumed: counter("kernel", "gvl_resumed")?,
            program_ns: counter("kernel", "gvl_ns")?,
            reported: counter("kernel", "gvl_wait_submitted")?,
            watched_ns: counter("user", "gvl_watched_ns")?,
            unwatched_ns: counter("user", "gvl_unwatched_ns")?,
            waits,
            held,
        })
    }

    /// The sum of several runs.
    pub(super) fn sum(runs: impl IntoIterator<Item = Self>) -> Self {
        runs.into_iter().fold(Self::default(), |sum, run| Self {
            hits: sum.hits + run.hits,
            shed: sum.shed + run.shed,
            resumed: sum.resumed + run.resumed,
            program_ns: sum.program_ns + run.program_ns,
            reported: sum.reported + run.reported,
            watched_ns: sum.watched_ns + run.watched_ns,
            unwatched_ns: sum.unwatched_ns + run.unwatched_ns,
            waits: sum.waits + run.waits,
            held: sum.held + run.held,
        })
    }

    /// Share of the time during which the GVL was traced, percent.
    pub(super) fn watched_percent(&self) -> Option<f64> {
        share(self.watched_ns, self.watched_ns + self.unwatched_ns).map(|share| share * 100.0)
    }

    /// Used hits per second of traced time.
    pub(super) fn hits_per_second(&self) -> Option<f64> {
        share(self.hits.saturating_sub(self.shed), self.watched_ns).map(|share| share * 1e9)
    }

    /// Share of the hits that were not used, percent.
    pub(super) fn shed_percent(&self) -> Option<f64> {
        share(self.shed, self.hits).map(|share| share * 100.0)
    }

    /// Time in the BPF programs per hit, nanoseconds.
    pub(super) fn ns_per_hit(&self) -> Option<f64> {
        share(self.program_ns, self.hits)
    }

    /// Time in the BPF programs per acquisition of the GVL, microseconds.
    pub(super) fn us_per_hand_over(&self) -> Option<f64> {
        share(self.program_ns, self.resumed).map(|ns| ns / 1e3)
    }

    /// Share of the waits that were longer than acquiring an uncontended GVL takes, percent: at most the share of threads that found it
    /// held, since those may wait for less time.
    pub(super) fn held_percent(&self) -> Option<f64> {
        share(self.held, self.waits).map(|share| share * 100.0)
    }
}

/// `part / of`; `None` if `of` is 0.
pub(super) fn share(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

/// Median and quartiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Quartiles {
    pub(super) lower: f64,
    pub(super) median: f64,
    pub(super) upper: f64,
}

impl Quartiles {
    /// Interpolates linearly between two values (type 7 of Hyndman and Fan, as in R and `NumPy`). `None` without values.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |share: f64| {
            let place = share * last as f64;
            let below = place.floor() as usize;
            let above = (below + 1).min(last);
            (values[above] - values[below]).mul_add(place - below as f64, values[below])
        };
        Some(Self { lower: at(0.25), median: at(0.5), upper: at(0.75) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Agrees with `NumPy`'s `quantile`; the order does not matter.
    #[test]
    fn quartiles() {
        let is = |lower, median, upper| Some(Quartiles { lower, median, upper });
        assert_eq!(Quartiles::of(&[4.0, 1.0, 3.0, 2.0]), is(1.75, 2.5, 3.25));
        assert_eq!(Quartiles::of(&[5.0, 1.0, 3.0, 2.0, 4.0]), is(2.0, 3.0, 4.0));
        assert_eq!(Quartiles::of(&[7.0]), is(7.0, 7.0, 7.0));
        assert_eq!(Quartiles::of(&[1.0, 2.0]), is(1.25, 1.5, 1.75));
        assert_eq!(Quartiles::of(&[]), None);
    }

    /// The last line of each kind counts; what a run does not contain is absent, not zero.
    #[test]
    fn ledger_of_a_run() {
        let kernel = r#"{"gvl_hits":30,"gvl_shed":3,"gvl_resumed":10,"gvl_ns":12000,"gvl_wait_submitted":2}"#;
        let ledger = format!(
            r#"{{"type":"ledger","kernel":{kernel},"user":{{"gvl_watched_ns":500000000,"gvl_unwatched_ns":1500000000}}}}"#
        );
        let process =
            r#"{"type":"gvl","what":"process","wait_histogram":[[900,2],[10000,1],[12288,3],[5000000,4]]}"#;
        let wait = r#"{"type":"gvl","what":"wait","wait_ns":5}"#;
        let run = Ledger::of(&format!("{wait}\n{wait}\n{process}\n{ledger}\n")).unwrap();
        assert_eq!((run.hits, run.shed, run.resumed, run.program_ns, run.reported), (30, 3, 10, 12_000, 2));
        assert_eq!((run.waits, run.held), (10, 7));
        let sum = Ledger::sum([run, run]);
        for run in [run, sum] {
            let near = |value: Option<f64>, wanted: f64| assert!((value.unwrap() - wanted).abs() < 1e-9);
            near(run.watched_percent(), 25.0);
            near(run.hits_per_second(), 54.0);
            near(run.shed_percent(), 10.0);
            near(run.ns_per_hit(), 400.0);
            near(run.us_per_hand_over(), 1.2);
            near(run.held_percent(), 70.0);
        }
        assert_eq!((sum.hits, sum.held, sum.unwatched_ns), (60, 14, 3_000_000_000));
        let none = Ledger::default();
        assert_eq!((none.ns_per_hit(), none.watched_percent(), none.held_percent()), (None, None, None));
        assert!(Ledger::of(process).is_err() && Ledger::of(&ledger.replace("gvl_ns", "x")).is_err());
    }
}
