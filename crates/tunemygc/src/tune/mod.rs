//! Recommendations: a pure function from the evidence of sample sets to `RUBY_GC_*` settings.
//!
//! [`evidence`] summarizes sets, [`rules`] turn the evidence into advice or a reason why there is none, [`ruby`] defines which
//! release reads which variable, [`report`] formats the result. The rules and their sources are in `docs/collector.md`.

use std::fmt;

use serde::{Serialize, Serializer};

pub mod distribution;
pub mod environment;
pub mod evidence;
mod fold;
pub mod heaps;
pub mod history;
#[cfg(test)]
mod history_tests;
pub mod in_force;
#[cfg(test)]
mod possible_tests;
#[cfg(test)]
mod rare_tests;
pub mod report;
pub mod ruby;
pub mod rules;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod simulation_tests;
#[cfg(test)]
mod state_tests;
#[cfg(test)]
mod tests;
pub mod trend;

pub use evidence::{Evidence, Unsupported};
pub use fold::Fold;
pub use history::{Comparison, Episode, Outcome, Times};
pub use in_force::InForce;
pub use report::Report;
pub use ruby::Series;

/// The goal of tuning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Less time in the GC, at the price of memory.
    Speed,
    /// Less memory, at the price of time in the GC.
    Memory,
}

impl Strategy {
    /// Both strategies.
    pub const ALL: [Self; 2] = [Self::Speed, Self::Memory];

    /// Parses the protocol's name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == name)
    }

    /// The protocol's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Speed => "Speed",
            Self::Memory => "Memory",
        }
    }
}

/// A value of a variable, in a form that Ruby reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Setting {
    /// An integer.
    Size(u64),
    /// A number with at most two decimals.
    Hundredths(u64),
}

impl Setting {
    /// The value as a number.
    pub fn number(self) -> f64 {
        match self {
            Self::Size(size) => size as f64,
            Self::Hundredths(hundredths) => hundredths as f64 / 100.0,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Size(size) => write!(f, "{size}"),
            Self::Hundredths(hundredths) => write!(f, "{}.{:02}", hundredths / 100, hundredths % 100),
        }
    }
}

impl Serialize for Setting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Size(size) => serializer.serialize_u64(size),
            Self::Hundredths(_) => serializer.serialize_f64(self.number()),
        }
    }
}

/// How well founded a piece of advice is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Confidence {
    /// Little was seen: try it and measure again.
    Low,
    /// At least ten minutes, 200 cycles and 30 cases of the kind.
    Medium,
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Low => "low",
            Self::Medium => "medium",
        })
    }
}

/// A measured figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measure {
    /// What was measured.
    pub metric: &'static str,
    /// Its value.
    pub value: f64,
    /// Number of cases that it is based on.
    pub n: u64,
}

/// The expected effect; an estimate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effect {
    /// A description.
    pub text: String,
    /// The figure that changes.
    pub metric: &'static str,
    /// The factor by which it changes; `None` if the sets do not show it.
    pub factor: Option<f64>,
    /// Other changes, as ranges.
    #[serde(flatten)]
    pub price: Price,
}

/// The other costs and savings of a piece of advice, as ranges from the lowest to the highest; `None` if unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Price {
    /// Peak of resident memory, bytes.
    pub peak_rss: Option<[f64; 2]>,
    /// Peak of resident memory now, bytes.
    pub peak_rss_now: Option<f64>,
    /// Factor on the number of major cycles.
    pub majors: Option<[f64; 2]>,
    /// Factor on the total time in the GC.
    pub gc_time: Option<[f64; 2]>,
    /// The likely peak of resident memory, bytes.
    pub likely_peak_rss: Option<f64>,
    /// The likely factor on the total time in the GC.
    pub likely_gc_time: Option<f64>,
    /// The likely savings and costs, if both are known.
    pub trade_off: Option<TradeOff>,
}

/// Time against memory, as shares of the present values; negative if time is spent or memory saved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TradeOff {
    /// Time saved, as a share of the program's total time.
    pub time_saved: f64,
    /// Memory added, as a share of the peak of resident memory.
    pub memory_added: f64,
}

/// Settings that belong together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Name of the rule.
    pub rule: &'static str,
    /// Variables and their values.
    pub set: Vec<Change>,
    /// The reason.
    pub why: String,
    /// Measurements behind the reason.
    pub evidence: Vec<Measure>,
    /// The expected effect.
    pub effect: Effect,
    /// How well founded it is.
    pub confidence: Confidence,
}

/// A variable and its value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The variable.
    pub variable: &'static str,
    /// Its new value.
    pub value: Setting,
    /// Its current value.
    pub current: f64,
    /// Whether the current value is Ruby's default.
    pub default: bool,
}

/// Why a rule advises nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Name of the rule.
    pub rule: &'static str,
    /// The reason.
    pub reason: String,
}

/// The advice for one strategy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The strategy.
    pub strategy: Strategy,
    /// What to set.
    pub advice: Vec<Advice>,
    /// Rules that advise nothing, and why.
    pub refusals: Vec<Refusal>,
    /// If the last change made things worse: the settings to return to.
    pub withdrawal: Option<Withdrawal>,
    /// The costs and savings of all advice together; `None` without advice.
    pub price: Option<Price>,
}

/// A change that should be reverted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Withdrawal {
    /// The settings before the change.
    pub to: InForce,
    /// The effect of the change.
    pub why: String,
}

/// All variables that should be set: those in force that stay, and those advised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct State {
    /// Variables and values.
    pub set: InForce,
    /// Variables that are set now and should be unset.
    pub unset: Vec<&'static str>,
    /// Variables that keep the user's value although the advice differs: it would change them by more than a factor of 2. The variables that
    /// the same advice would set are not set either.
    pub left: Vec<&'static str>,
}

impl Plan {
    /// All advised variables and their values.
    pub fn settings(&self) -> impl Iterator<Item = &Change> {
        self.advice.iter().flat_map(|advice| &advice.set)
    }

    /// The variables set by the user that the plan would change by more than a factor of 2. Ruby's defaults, and values for
    /// which `own` is true (those that were advised), are not the user's.
    pub fn clobbers(&self, in_force: &InForce, own: &dyn Fn(&str, f64) -> bool) -> Vec<&'static str> {
        let clobbered = |change: &&Change| {
            let Some(variable) = ruby::variable(change.variable) else { return false };
            let (set, value) = (in_force.value(variable), change.value.number());
            let (low, high) = (set.min(value), set.max(value));
            !in_force::is_same(set, variable.default) && high > low * 2.0 && !own(variable.name, set)
        };
        self.settings().filter(clobbered).map(|change| change.variable).collect()
    }

    /// All variables that should be set or unset. Settings that belong together are set together: of advice that would change a value of the
    /// user's too much nothing is set, as Ruby could ignore the rest of it, or it could do harm alone.
    pub fn state(&self, in_force: &InForce, own: &dyn Fn(&str, f64) -> bool) -> State {
        let left = self.clobbers(in_force, own);
        let mut set = in_force.clone();
        let is_left = |advice: &&Advice| advice.set.iter().any(|change| left.contains(&change.variable));
        for change in self.advice.iter().filter(|advice| !is_left(advice)).flat_map(|advice| &advice.set) {
            if let Some(variable) = ruby::variable(change.variable) {
                set.set(variable, change.value.number());
            }
        }
        if let Some(withdrawal) = &self.withdrawal {
            set = withdrawal.to.clone();
        }
        let gone = in_force.iter().filter(|(name, _)| set.iter().all(|(other, _)| other != *name));
        let unset = gone.map(|(name, _)| name).collect();
        State { set, unset, left }
    }
}

/// Makes recommendations from the evidence of a program on this Ruby.
pub fn recommend(series: Series, evidence: &Evidence) -> Report {
    let in_force = InForce::of(&evidence.environment, series);
    rules::recommend(series, &Episode { in_force, evidence: evidence.clone(), times: Times::default() }, &[])
}

/// Makes recommendations from the environments under which a program ran on this Ruby: `now` is the one in force; in `others`, the one
/// seen last is at the end.
pub fn recommend_after(series: Series, now: &Episode, others: &[Episode]) -> Report {
    rules::recommend(series, now, others)
}
