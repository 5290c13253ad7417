//! Recommendations as text, as JSON, as `export` lines, and as the protocol's answer.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::printable::printable_part;

use super::{
    Advice, Comparison, Evidence, InForce, Plan, Price, State, Strategy, TradeOff, environment::Unheeded,
    in_force::shown, ruby::Series, trend::Leak,
};

/// Maximum number of characters shown of a variable's value.
const MAX_VALUE: usize = 80;
/// Maximum number of leaks shown.
const MAX_LEAKS: usize = 5;

/// The recommendations, and their reasons.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The series of Ruby to which they apply.
    #[serde(rename = "ruby")]
    pub series: Series,
    /// The settings that Ruby follows.
    pub in_force: InForce,
    /// Other settings that are in force at the same time, in other processes.
    pub at_the_same_time: Vec<InForce>,
    /// The effect of the settings in force, compared with the settings before them.
    pub change: Option<Comparison>,
    /// Processes whose live heap grows steadily, the fastest first.
    pub leaks: Vec<Leak>,
    /// Why nothing can be recommended yet; empty if the data suffices.
    pub insufficient: Vec<String>,
    /// One plan per strategy.
    pub plans: [Plan; 2],
    /// Variables of the environment that have no effect.
    pub unheeded: Vec<Unheeded>,
    /// The evidence behind it.
    pub evidence: Evidence,
}

impl Report {
    /// The plan for speed.
    pub fn speed(&self) -> &Plan {
        &self.plans[0]
    }

    /// The plan for a strategy.
    pub fn plan(&self, strategy: Strategy) -> &Plan {
        match strategy {
            Strategy::Speed => &self.plans[0],
            Strategy::Memory => &self.plans[1],
        }
    }

    /// The whole report as JSON.
    pub fn to_json(&self) -> Value {
        let mut value = json!(self);
        if let Some(evidence) = value.get_mut("evidence") {
            *evidence = self.facts();
        }
        value
    }

    /// The evidence as figures for people.
    fn facts(&self) -> Value {
        let evidence = &self.evidence;
        let median = |of: &super::distribution::Distribution| json!(of.median());
        json!({
            "sets": evidence.sets,
            "left_out": evidence.impossible,
            "samples": evidence.samples,
            "seconds": evidence.seconds,
            "cycles": evidence.cycles,
            "missing": evidence.missing,
            "minors": evidence.minors,
            "majors": evidence.majors,
            "gc_time_share": evidence.counted_time().map(|time| time.share()),
            "objects_between_cycles": median(&evidence.intervals),
            "heap_slots": median(&evidence.available),
            "live_slots": median(&evidence.live),
            "settled": evidence.settled,
            "units": evidence.units,
            "objects_in_a_unit": median(&evidence.unit_objects),
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
                .map(move |refusal| format!("{name}: {}: no change: {}", refusal.rule, refusal.reason));
            let back = plan.withdrawal.iter().map(move |back| format!("{name}: withdrawn: {}", back.why));
            back.chain(advice).chain(none).collect::<Vec<_>>()
        };
        let findings = self.findings();
        findings.into_iter().chain(self.plans.iter().flat_map(of)).collect()
    }

    /// A message if several settings are in force at the same time.
    pub fn concurrent(&self) -> Option<String> {
        if self.at_the_same_time.is_empty() {
            return None;
        }
        let others: Vec<String> = self.at_the_same_time.iter().map(ToString::to_string).collect();
        Some(format!(
            "{} environments are in force at the same time: this is for {}; there are processes with {}, too",
            match others.len() {
                1 => "two".to_owned(),
                n => (n + 1).to_string(),
            },
            self.in_force,
            others.join("; and with ")
        ))
    }

    /// A message if some sets are not used.
    fn left_out(&self) -> Option<String> {
        let n = self.evidence.impossible;
        (n > 0).then(|| {
            format!(
                "{} left out: a heap of so many slots does not fit into the memory of its process",
                match n {
                    1 => "1 sample set is".to_owned(),
                    n => format!("{n} sample sets are"),
                }
            )
        })
    }

    /// Other findings: several environments, the effect of the last change, and leaks. Host names are escaped.
    fn findings(&self) -> Vec<String> {
        let change = self.change.iter().map(|change| change.to_string().trim_end().to_owned());
        self.concurrent()
            .into_iter()
            .chain(self.left_out())
            .chain(change)
            .chain(self.leaks.iter().take(MAX_LEAKS).map(leak_text))
            .collect()
    }

    /// All variables that this strategy sets or unsets, as lines for a shell; empty if there are none. Values for which `own` is true
    /// were advised before.
    pub fn to_exports(&self, strategy: Strategy, own: &dyn Fn(&str, f64) -> bool) -> String {
        let State { set, unset, .. } = self.plan(strategy).state(&self.in_force, own);
        let set = set.iter().map(|(name, value)| format!("export {name}={}\n", shown(name, value)));
        set.chain(unset.iter().map(|name| format!("unset {name}\n"))).collect()
    }

    /// [`Self::to_exports`] as JSON, with the effect of the last change and other findings.
    pub fn to_state(&self, strategy: Strategy, own: &dyn Fn(&str, f64) -> bool) -> Value {
        let plan = self.plan(strategy);
        let State { set, unset, left } = plan.state(&self.in_force, own);
        json!({
            "ruby": self.series,
            "strategy": strategy,
            "set": set,
            "unset": unset,
            "left_as_set": left,
            "in_force": self.in_force,
            "at_the_same_time": self.at_the_same_time,
            "changes": plan.settings().collect::<Vec<_>>(),
            "withdrawal": plan.withdrawal,
            "last_change": self.change,
            "leaks": self.leaks,
            "insufficient": self.insufficient,
            "left_out": self.evidence.impossible,
        })
    }
}

fn leak_text(leak: &Leak) -> String {
    format!(
        "leak: the live heap of {} grows steadily: {} to {} slots in {} ({:+.0} slots an hour); objects are being leaked, or a cache has no limit",
        printable_part(&leak.process, MAX_VALUE),
        leak.from,
        leak.to,
        super::history::span(leak.seconds),
        leak.per_hour()
    )
}

/// `1 cycle`, `2 cycles`.
fn plural(n: u64, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let evidence = &self.evidence;
        let (minors, majors) = (evidence.all_minors(), evidence.all_majors());
        writeln!(
            f,
            "Ruby {}: {} ({minors} minor, {majors} major) in {:.1} s, {}, {} missing",
            self.series,
            plural(evidence.cycles, "cycle"),
            evidence.seconds,
            plural(evidence.sets, "sample set"),
            plural(evidence.missing, "cycle")
        )?;
        if let Some(time) = evidence.counted_time() {
            writeln!(
                f,
                "  time in the GC: {:.1} % of {:.1} s between samples (CPU time, GC.stat(:time))",
                time.share() * 100.0,
                time.seconds
            )?;
        } else if evidence.time.is_some_and(|time| time.seconds > 0.0) {
            writeln!(
                f,
                "  time in the GC: not known: GC.stat(:time) does not grow; does the program set GC.measure_total_time = false?"
            )?;
        }
        for (kind, reasons) in [("minor", &evidence.minors), ("major", &evidence.majors)] {
            if !reasons.is_empty() {
                let list: Vec<String> = reasons.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
                writeln!(f, "  {kind} by {}", list.join(", "))?;
            }
        }
        if !self.in_force.is_default() {
            writeln!(f, "  in force: {}", self.in_force)?;
        }
        for finding in self.findings() {
            writeln!(f, "\n  {finding}")?;
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
            if let Some(back) = &plan.withdrawal {
                writeln!(f, "    go back to {}\n      why: {}", back.to, back.why)?;
            } else if plan.advice.is_empty() {
                writeln!(f, "    no changes")?;
            }
            for advice in &plan.advice {
                write_advice(f, advice)?;
            }
            if let Some(price) = plan.price.as_ref().filter(|_| plan.advice.len() > 1) {
                writeln!(f, "    all of this together:")?;
                write_price(f, price)?;
            }
            for refusal in &plan.refusals {
                writeln!(f, "    {}: no change: {}", refusal.rule, refusal.reason)?;
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
    write_price(f, &advice.effect.price)?;
    writeln!(f, "      confidence: {}", advice.confidence)
}

fn write_price(f: &mut fmt::Formatter<'_>, price: &Price) -> fmt::Result {
    const MIB: f64 = 1_048_576.0;
    if let Some([low, high]) = price.peak_rss {
        let likely =
            price.likely_peak_rss.map_or_else(String::new, |rss| format!("likely {:.0}, ", rss / MIB));
        let now =
            price.peak_rss_now.map_or_else(String::new, |now| format!(" ({likely}now {:.0})", now / MIB));
        writeln!(f, "      peak RSS: {:.0} to {:.0} MiB{now}", low / MIB, high / MIB)?;
    } else if let Some(now) = price.peak_rss_now {
        writeln!(f, "      peak RSS: not known (now {:.0})", now / MIB)?;
    }
    if let Some([low, high]) = price.gc_time {
        let likely = price.likely_gc_time.map_or_else(String::new, |factor| format!(" (likely {factor:.2})"));
        writeln!(f, "      GC time: × {low:.2} to {high:.2}{likely}")?;
    }
    if let Some([low, high]) = price.majors {
        writeln!(f, "      majors: × {low:.2} to {high:.2}")?;
    }
    if let Some(TradeOff { time_saved, memory_added }) = price.trade_off {
        writeln!(
            f,
            "      trade-off: {:+.1} % of the program's time, {:+.0} % of its memory",
            -time_saved * 100.0,
            memory_added * 100.0
        )?;
    }
    Ok(())
}

fn round(value: f64) -> f64 {
    if value.abs() >= 100.0 { value.round() } else { (value * 1000.0).round() / 1000.0 }
}
