//! What is recommended, in words, as JSON, as `export` lines, and as the protocol's answer.

use std::fmt::{self, Write as _};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::printable::printable_part;

use super::{Advice, Evidence, Plan, environment::Unheeded, ruby::Series};

/// Characters of a variable's value that are shown.
const MAX_VALUE: usize = 80;

/// What is recommended, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Which Rubies it is for.
    #[serde(rename = "ruby")]
    pub series: Series,
    /// Why nothing can be recommended yet; empty if the data suffice.
    pub insufficient: Vec<String>,
    /// One for each strategy.
    pub plans: [Plan; 2],
    /// Variables of the environment that have no effect.
    pub unheeded: Vec<Unheeded>,
    /// What it is founded on.
    pub evidence: Evidence,
}

impl Report {
    /// The plan for speed.
    pub fn speed(&self) -> &Plan {
        &self.plans[0]
    }

    /// Everything as JSON.
    pub fn to_json(&self) -> Value {
        let mut value = json!(self);
        if let Some(evidence) = value.get_mut("evidence") {
            *evidence = self.facts();
        }
        value
    }

    /// The evidence as figures to look at.
    fn facts(&self) -> Value {
        let evidence = &self.evidence;
        let median = |of: &super::distribution::Distribution| json!(of.median());
        json!({
            "sets": evidence.sets,
            "samples": evidence.samples,
            "seconds": evidence.seconds,
            "cycles": evidence.cycles,
            "missing": evidence.missing,
            "minors": evidence.minors,
            "majors": evidence.majors,
            "gc_time_share": evidence.time.map(|time| time.share()),
            "objects_between_cycles": median(&evidence.intervals),
            "heap_slots": median(&evidence.available),
            "live_slots": median(&evidence.live),
            "settled": evidence.settled,
            "units": evidence.units,
            "rss": median(&evidence.rss),
            "environment": evidence.environment,
            "environment_refused": evidence.environment_refused,
        })
    }

    /// The body of `/configs/ID.json`: variables and numbers by strategy, and in words why there are no more.
    pub fn to_config(&self) -> Value {
        let mut config = Map::new();
        for plan in self.plans.iter().rev() {
            let settings =
                plan.settings().map(|change| (change.variable.to_owned(), json!(change.value))).collect();
            config.insert(plan.strategy.name().to_owned(), Value::Object(settings));
        }
        config.insert("explanation".to_owned(), json!(self.explanation()));
        Value::Object(config)
    }

    fn explanation(&self) -> Vec<String> {
        if !self.insufficient.is_empty() {
            return self.insufficient.iter().map(|missing| format!("insufficient data: {missing}")).collect();
        }
        let of = |plan: &Plan| {
            let name = plan.strategy.name();
            let advice =
                plan.advice.iter().map(move |advice| format!("{name}: {}: {}", advice.rule, advice.why));
            let none = plan
                .refusals
                .iter()
                .map(move |refusal| format!("{name}: {}: nothing: {}", refusal.rule, refusal.reason));
            advice.chain(none).collect::<Vec<_>>()
        };
        self.plans.iter().flat_map(of).collect()
    }

    /// The body of `/apps/TOKEN`: lines for a shell; empty if there is nothing to set.
    pub fn to_exports(&self) -> String {
        self.speed().settings().fold(String::new(), |mut text, change| {
            // Writing to a string cannot fail.
            let _infallible = writeln!(text, "export {}={}", change.variable, change.value);
            text
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let evidence = &self.evidence;
        let (minors, majors) = (evidence.all_minors(), evidence.all_majors());
        writeln!(
            f,
            "Ruby {}: {} cycles ({minors} minor, {majors} major) in {:.1} s, {} sample sets, {} cycles missing",
            self.series, evidence.cycles, evidence.seconds, evidence.sets, evidence.missing
        )?;
        if let Some(time) = evidence.time.filter(|time| time.seconds > 0.0) {
            writeln!(f, "  time in the GC: {:.1} %", time.share() * 100.0)?;
        }
        for (kind, reasons) in [("minor", &evidence.minors), ("major", &evidence.majors)] {
            if !reasons.is_empty() {
                let list: Vec<String> = reasons.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
                writeln!(f, "  {kind} by {}", list.join(", "))?;
            }
        }
        for unheeded in &self.unheeded {
            let value = printable_part(&unheeded.value, MAX_VALUE);
            writeln!(f, "\n  {}={value} has no effect: {}", unheeded.variable, unheeded.reason)?;
        }
        match evidence.environment_refused {
            0 => {}
            n => writeln!(f, "\n  ignored {n} environment variables with names that Ruby never reads")?,
        }
        if !self.insufficient.is_empty() {
            writeln!(f, "\n  Nothing is recommended yet:")?;
            return self.insufficient.iter().try_for_each(|missing| writeln!(f, "    {missing}"));
        }
        for plan in &self.plans {
            writeln!(f, "\n  For {}:", plan.strategy.name().to_lowercase())?;
            if plan.advice.is_empty() {
                writeln!(f, "    nothing to set")?;
            }
            for advice in &plan.advice {
                write_advice(f, advice)?;
            }
            for refusal in &plan.refusals {
                writeln!(f, "    {}: nothing: {}", refusal.rule, refusal.reason)?;
            }
        }
        Ok(())
    }
}

fn write_advice(f: &mut fmt::Formatter<'_>, advice: &Advice) -> fmt::Result {
    for change in &advice.set {
        let now = if change.default { "Ruby's default" } else { "now" };
        writeln!(f, "    export {}={}    # {now}: {}", change.variable, change.value, change.current)?;
    }
    writeln!(f, "      why: {}", advice.why)?;
    for measure in &advice.evidence {
        writeln!(f, "      measured: {} = {} (n = {})", measure.metric, round(measure.value), measure.n)?;
    }
    writeln!(f, "      expected: {}", advice.effect.text)?;
    writeln!(f, "      confidence: {}", advice.confidence)
}

fn round(value: f64) -> f64 {
    if value.abs() >= 100.0 { value.round() } else { (value * 1000.0).round() / 1000.0 }
}
