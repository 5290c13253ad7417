//! The rules: each looks at one trait of a program and advises, or says why not.

use super::{
    Advice, Change, Confidence, Evidence, Plan, Refusal, Report, Setting, Strategy,
    distribution::Distribution,
    environment,
    ruby::{Series, variable},
};

mod heap;
mod triggers;

/// Fewest cycles, and seconds, and the share of cycles that the sets must have, for anything to be advised.
pub const MIN_CYCLES: u64 = 30;
/// Fewest seconds.
pub const MIN_SECONDS: f64 = 5.0;
/// Largest share of cycles that may be missing in the sets.
pub const MAX_MISSING: f64 = 0.10;
/// Fewest cases of a kind, as Shopify's autotuner has it.
const MIN_CASES: u64 = 10;
/// Fewest units of work that no other overlaps, for their size to be believed.
const MIN_UNITS: u64 = 30;
/// A program that spends less of its time in the GC gains nothing by changing that.
const GC_SHARE: f64 = 0.05;
/// What it should come down to.
const GC_GOAL: f64 = 0.025;

/// What a rule says.
type Verdict = Result<Advice, String>;
type Rule = fn(&Case<'_>) -> Verdict;

/// By name. Of those that may set the same variable the first one that advises wins.
const RULES: [(&str, Rule); 10] = [
    ("free-slots", heap::free_slots),
    ("initial-heap", heap::initial_heap),
    ("no-free-majors", heap::no_free_majors),
    ("return-memory", heap::return_memory),
    ("growth-step", heap::growth_step),
    ("old-objects", triggers::old_objects),
    ("malloc", triggers::malloc),
    ("oldmalloc", triggers::oldmalloc),
    ("unprotected-objects", triggers::unprotected),
    ("explicit-gc", triggers::explicit),
];

/// What the rules look at.
struct Case<'a> {
    series: Series,
    evidence: &'a Evidence,
    strategy: Strategy,
}

pub(super) fn recommend(series: Series, evidence: &Evidence) -> Report {
    let insufficient = insufficient(evidence);
    let plans = Strategy::ALL.map(|strategy| {
        let mut plan = Plan { strategy, advice: Vec::new(), refusals: Vec::new() };
        if insufficient.is_empty() {
            let case = Case { series, evidence, strategy };
            for (rule, decide) in RULES {
                let verdict = decide(&case).and_then(|advice| compatible(advice, &plan));
                match verdict {
                    Ok(advice) => plan.advice.push(Advice { rule, ..advice }),
                    Err(reason) => plan.refusals.push(Refusal { rule, reason }),
                }
            }
        }
        plan
    });
    let unheeded = environment::unheeded(&evidence.environment, series);
    Report { series, evidence: evidence.clone(), insufficient, plans, unheeded }
}

/// What is missing for any advice.
fn insufficient(evidence: &Evidence) -> Vec<String> {
    let mut missing = Vec::new();
    if evidence.cycles < MIN_CYCLES {
        missing.push(format!("{} GC cycles were seen, at least {MIN_CYCLES} are needed", evidence.cycles));
    }
    if evidence.seconds < MIN_SECONDS {
        missing.push(format!("the sets span {:.1} s, at least {MIN_SECONDS} s are needed", evidence.seconds));
    }
    let all = evidence.cycles as f64 + evidence.missing as f64;
    if evidence.missing as f64 > all * MAX_MISSING {
        missing.push(format!(
            "{} of {all} cycles are not in the sets, at most {:.0} % may be missing",
            evidence.missing,
            MAX_MISSING * 100.0
        ));
    }
    missing
}

/// An advice, unless another rule has set one of its variables already.
fn compatible(advice: Advice, plan: &Plan) -> Verdict {
    let taken = |change: &&Change| plan.settings().any(|other| other.variable == change.variable);
    match advice.set.iter().find(taken) {
        Some(change) => Err(format!("another rule sets {} already", change.variable)),
        None => Ok(advice),
    }
}

impl Case<'_> {
    fn speed(&self) -> Result<(), String> {
        match self.strategy {
            Strategy::Speed => Ok(()),
            Strategy::Memory => Err("would use more memory".to_owned()),
        }
    }

    fn memory(&self) -> Result<(), String> {
        match self.strategy {
            Strategy::Memory => Ok(()),
            Strategy::Speed => Err("it would cost time".to_owned()),
        }
    }

    /// The value that a variable has: that of the environment, if Ruby takes it, else its default.
    fn current(&self, name: &str) -> (f64, bool) {
        let Some(variable) = variable(name) else { return (0.0, true) };
        let set = self.evidence.environment.get(name).and_then(|text| variable.parse(text));
        set.map_or((variable.default, true), |value| (value, false))
    }

    fn value(&self, name: &str) -> f64 {
        self.current(name).0
    }

    /// A change of a variable that this Ruby reads.
    fn change(&self, name: &'static str, value: Setting) -> Result<Change, String> {
        match variable(name) {
            Some(variable) if variable.is_read_by(self.series) => {
                let (current, default) = self.current(name);
                Ok(Change { variable: name, value, current, default })
            }
            _ => Err(format!("Ruby {} has no {name}", self.series)),
        }
    }

    fn confidence(&self, n: u64) -> Confidence {
        let evidence = self.evidence;
        let much = evidence.seconds >= 600.0 && evidence.cycles >= 200 && n >= 30;
        if much { Confidence::Medium } else { Confidence::Low }
    }

    /// Size of the heap and live slots after major cycles, both once the heap has its size.
    fn heap(&self) -> Result<(u64, u64), String> {
        if self.evidence.settled == 0 {
            return Err(
                "the heap was still growing: trace for longer; if it never stops, objects are being leaked"
                    .to_owned(),
            );
        }
        let size = quantile(&self.evidence.available, 0.9, "sizes of the heap")?;
        let live = quantile(&self.evidence.live, 0.5, "ends of major cycles")?;
        Ok((size, live.min(size)))
    }

    fn share_of_time(&self) -> Option<f64> {
        self.evidence.time.filter(|time| time.seconds > 0.0).map(|time| time.share())
    }
}

/// Enough cases of one kind for a rule.
fn enough(n: u64, what: &str) -> Result<(), String> {
    if n < MIN_CASES { Err(format!("{n} {what}, at least {MIN_CASES} are needed")) } else { Ok(()) }
}

fn quantile(of: &Distribution, share: f64, what: &str) -> Result<u64, String> {
    of.quantile(share).ok_or_else(|| format!("no {what} were seen"))
}

fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn hundredths(value: f64) -> Setting {
    Setting::Hundredths((value * 100.0).round().max(0.0) as u64)
}
