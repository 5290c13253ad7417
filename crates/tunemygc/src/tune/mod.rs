//! Recommendations: a pure function from what sample sets say to `RUBY_GC_*` settings.
//!
//! [`evidence`] boils sets down, [`rules`] turn that into advice or a reason why there is none, [`ruby`] knows which
//! release reads which variable, [`report`] words it. The rules and their sources are in `docs/collector.md`.

use std::{collections::BTreeMap, fmt};

use serde::{Serialize, Serializer};

pub mod distribution;
pub mod environment;
pub mod evidence;
pub mod report;
pub mod ruby;
pub mod rules;
#[cfg(test)]
mod tests;

pub use evidence::{Evidence, Fold, Unsupported};
pub use report::Report;
pub use ruby::Series;

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Less time in the GC, at the price of memory.
    Speed,
    /// Less memory, at the price of time in the GC.
    Memory,
}

impl Strategy {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Speed, Self::Memory];

    /// The protocol's word.
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
    pub(crate) fn number(self) -> f64 {
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

/// How much is behind an advice.
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
    /// How much it is.
    pub value: f64,
    /// Out of how many cases.
    pub n: u64,
}

/// What to expect; an estimate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effect {
    /// In words.
    pub text: String,
    /// The figure that changes.
    pub metric: &'static str,
    /// By which factor; `None`: the sets do not tell.
    pub factor: Option<f64>,
}

/// Settings that belong together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Name of the rule.
    pub rule: &'static str,
    /// Variables and their values.
    pub set: Vec<Change>,
    /// Why.
    pub why: String,
    /// What that is founded on.
    pub evidence: Vec<Measure>,
    /// What to expect.
    pub effect: Effect,
    /// How sure that is.
    pub confidence: Confidence,
}

/// A variable and its value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The variable.
    pub variable: &'static str,
    /// Its new value.
    pub value: Setting,
    /// The value it has.
    pub current: f64,
    /// Whether that is Ruby's default (and not set).
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

/// What is advised for one strategy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The strategy.
    pub strategy: Strategy,
    /// What to set.
    pub advice: Vec<Advice>,
    /// What not, and why.
    pub refusals: Vec<Refusal>,
}

impl Plan {
    /// All variables and values.
    pub fn settings(&self) -> impl Iterator<Item = &Change> {
        self.advice.iter().flat_map(|advice| &advice.set)
    }

    /// The variables that the environment already sets and that the plan would change by more than a factor of 2.
    pub fn clobbers(&self, environment: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        self.settings()
            .filter_map(|change| {
                let text = environment.get(change.variable)?;
                let set = ruby::variable(change.variable)?.parse(text)?;
                let (low, high) = (set.min(change.value.number()), set.max(change.value.number()));
                (high > low * 2.0).then(|| (change.variable.to_owned(), text.clone()))
            })
            .collect()
    }
}

/// Recommends from what is known of a program on this Ruby.
pub fn recommend(series: Series, evidence: &Evidence) -> Report {
    rules::recommend(series, evidence)
}
