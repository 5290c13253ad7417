//! One figure of both recordings, and whether the difference is more than noise.

use super::{
    blocks::Tail,
    statistics::{self, Estimate},
};

/// How a figure is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A part of a whole, 0 to 1.
    Share,
    /// A number per second.
    PerSecond,
    /// Nanoseconds.
    Time,
    /// CPUs or threads, on average.
    Number,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
}

/// The verdict on a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// B is larger, by more than noise.
    Grew,
    /// B is smaller, by more than noise.
    Shrank,
    /// The change is explained by noise, or too small to matter.
    Noise,
    /// The change was not tested, for this reason.
    Untested(&'static str),
}

impl Verdict {
    /// Whether the change is more than noise.
    pub fn is_real(self) -> bool {
        matches!(self, Self::Grew | Self::Shrank)
    }

    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grew => "grew",
            Self::Shrank => "shrank",
            Self::Noise => "noise",
            Self::Untested(_) => "untested",
        }
    }
}

/// Reasons for which a change is not tested.
pub(super) const SHORT: &str = "too short";
/// The same.
pub(super) const FEW: &str = "too few";
/// The same.
pub(super) const SINGLE: &str = "a single event";
/// The same.
pub(super) const NO_TIMES: &str = "only its total is known";

/// The same.
pub(super) const STEP: &str = "differs from run to run";

/// What the reasons for lacking a figure begin with if its table has others: of `cpu`.
pub(super) const CPUS: &str = "CPUs in use";
/// The same of `gvl.wait.share`.
pub(super) const WAITED: &str = "share of threads' time";
/// The same of `gvl.wait.rate`.
pub(super) const WAITS: &str = "waits a second";

/// A figure of one recording.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    pub(super) value: Option<f64>,
    pub(super) estimate: Option<Estimate>,
}

impl Measured {
    /// A value that cannot be tested.
    pub(super) fn bare(value: Option<f64>) -> Self {
        Self { value, estimate: None }
    }

    /// A value that can be tested.
    pub(super) fn of(estimate: Estimate) -> Self {
        Self { value: Some(estimate.value), estimate: Some(estimate) }
    }
}

/// The smallest change that is reported as such: runs of the same program differ by that much although nothing in it has changed. In the
/// figure's own unit, and relative to the mean of both recordings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Least {
    pub(super) absolute: f64,
    pub(super) relative: f64,
}

impl Least {
    fn of(self, a: f64, b: f64) -> f64 {
        self.absolute.max(self.relative * f64::midpoint(a.abs(), b.abs()))
    }
}

/// A figure of both recordings.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Its name in `--fail-if`; empty: it has none.
    pub metric: &'static str,
    /// Description.
    pub what: &'static str,
    /// How it is shown.
    pub unit: Unit,
    /// Value in A; `None` if absent.
    pub a: Option<f64>,
    /// Value in B; `None` if absent.
    pub b: Option<f64>,
    /// Half of the width of the 95 % confidence interval of the change, in the figure's unit.
    pub margin: Option<f64>,
    /// Probability of such a change if nothing has changed by more than the smallest change that matters; `None` if it was not tested.
    pub p: Option<f64>,
    /// The verdict on the change.
    pub verdict: Verdict,
    pub(super) of_b: Option<Estimate>,
    /// Why B alone cannot be compared with a bound if `of_b` is `None`.
    pub(super) why_b: &'static str,
    /// Of a quantile that `--fail-if` knows: B's times.
    pub(super) tail_of_b: Option<Tail>,
}

impl Figure {
    /// Compares two values. `why` is the reason for not testing if both are known and either has no estimate.
    pub(super) fn new(
        metric: &'static str,
        what: &'static str,
        unit: Unit,
        (a, b): (Measured, Measured),
        least: Least,
        why: &'static str,
    ) -> Self {
        // An absent value is not tested for another reason than one without an estimate.
        let why_b = if b.value.is_some() { why } else { "no value in B" };
        let why = match (a.value, b.value) {
            (Some(_), Some(_)) => why,
            (None, Some(_)) => "no value in A",
            (Some(_), None) => "no value in B",
            (None, None) => "no value in A and B",
        };
        let mut figure = Self {
            metric,
            what,
            unit,
            a: a.value,
            b: b.value,
            margin: None,
            p: None,
            verdict: Verdict::Untested(why),
            of_b: b.estimate,
            why_b,
            tail_of_b: None,
        };
        if let (Some(a), Some(b)) = (a.estimate, b.estimate) {
            figure.margin = Some(statistics::margin(&a, &b));
            figure.p = Some(statistics::p_value(&a, &b, least.of(a.value, b.value)));
            figure.verdict = Verdict::Noise;
        }
        figure
    }

    /// Marks the change as not tested, for this reason.
    pub(super) fn untested(&mut self, why: &'static str) {
        (self.p, self.margin, self.verdict) = (None, None, Verdict::Untested(why));
    }

    /// B minus A.
    pub fn change(&self) -> Option<f64> {
        Some(self.b? - self.a?)
    }

    /// The change relative to A; `None` if A is 0.
    pub fn relative(&self) -> Option<f64> {
        let a = self.a.filter(|a| *a != 0.0)?;
        Some(self.change()? / a)
    }
}

/// Judges figures together: if nothing has changed, the probability of calling any of them changed is at most `level`.
pub(super) fn judge<'a>(figures: impl Iterator<Item = &'a mut Figure>, level: f64) {
    let mut tested: Vec<&mut Figure> = figures.filter(|figure| figure.p.is_some()).collect();
    let p: Vec<f64> = tested.iter().filter_map(|figure| figure.p).collect();
    for (figure, real) in tested.iter_mut().zip(statistics::stand_out(&p, level)) {
        if real {
            let grew = figure.change().is_some_and(|change| change > 0.0);
            figure.verdict = if grew { Verdict::Grew } else { Verdict::Shrank };
        }
    }
}
