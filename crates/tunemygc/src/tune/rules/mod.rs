//! The rules: each examines one trait of a program and gives advice, or the reason why it gives none.

use super::{
    Advice, Change, Comparison, Confidence, Episode, Evidence, InForce, Plan, Refusal, Report, Setting,
    Strategy, Withdrawal,
    distribution::Distribution,
    environment,
    evidence::SLOT,
    heaps::Heap,
    history::{Outcome, Tried, before, beside, gain, judge, span},
    in_force,
    ruby::{Series, variable},
    trend::Leak,
};

mod heap;
mod price;
mod room;
mod trade_off;
mod triggers;

/// Minimum number of cases of a kind, as in Shopify's autotuner.
const MIN_CASES: u64 = 10;
/// If the time in the GC is not measured, at least one in this many cycles must be of the kind.
const MOST_PER_CASE: u64 = 100;
/// Minimum number of units of work without overlap for their size to count.
const MIN_UNITS: u64 = 30;
/// A program whose share of time in the GC is at most this gains nothing from reducing it.
const GC_SHARE: f64 = 0.05;
/// The share of time in the GC that advice aims at.
const GC_GOAL: f64 = 0.025;

/// The variable of each heap, from 3.3 to 4.0 (`RUBY_GC_HEAP_%d_INIT_SLOTS` in `gc_set_initial_pages`, gc.c of `v3_3_0` and
/// gc/default/default.c of `v3_4_1`).
const HEAPS: [&str; 5] = [
    "RUBY_GC_HEAP_0_INIT_SLOTS",
    "RUBY_GC_HEAP_1_INIT_SLOTS",
    "RUBY_GC_HEAP_2_INIT_SLOTS",
    "RUBY_GC_HEAP_3_INIT_SLOTS",
    "RUBY_GC_HEAP_4_INIT_SLOTS",
];

/// After this many other environments of a program with sufficient evidence, nothing more is advised: rounds of advice must end.
/// (The collector forgets environments that were not seen for long.)
pub const MOST_TRIED: usize = 4;
/// Cycles per second below which cycles do not matter, if the time in the GC is not measured.
const RARE: f64 = 0.5;

/// A rule's result.
type Verdict = Result<Advice, String>;

/// A rule.
struct Rule {
    name: &'static str,
    decide: fn(&Case<'_>) -> Verdict,
    /// All variables that it may set.
    sets: &'static [Settable],
}

/// Variables that a rule may set on some series.
struct Settable {
    names: &'static [&'static str],
    from: Series,
    until: Series,
}

const fn on(names: &'static [&'static str], from: Series, until: Series) -> Settable {
    Settable { names, from, until }
}

/// The share of free slots after a cycle (`RUBY_GC_HEAP_FREE_SLOTS_…`).
const RATIOS: [&str; 3] = [
    "RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO",
    "RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO",
    "RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO",
];

/// If several rules may set the same variable, the first one that gives advice wins. The series are those that read the variable, or
/// fewer if the rule does not need it on the others.
const RULES: [Rule; 10] = [
    Rule {
        name: "free-slots",
        decide: room::free_slots,
        sets: &[
            on(&["RUBY_GC_HEAP_INIT_SLOTS"], Series::FIRST, Series(3, 2)),
            on(&HEAPS, Series(3, 3), Series(4, 0)),
            on(&RATIOS, Series(3, 3), Series::LAST),
        ],
    },
    Rule {
        name: "initial-heap",
        decide: heap::initial_heap,
        sets: &[
            on(&["RUBY_GC_HEAP_INIT_SLOTS"], Series::FIRST, Series(3, 1)),
            on(&HEAPS, Series(3, 3), Series(4, 0)),
        ],
    },
    Rule {
        name: "growth-step",
        decide: heap::growth_step,
        sets: &[on(&["RUBY_GC_HEAP_GROWTH_MAX_SLOTS"], Series::FIRST, Series(4, 0))],
    },
    Rule {
        name: "no-free-majors",
        decide: heap::no_free_majors,
        sets: &[on(&["RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO"], Series(2, 4), Series::LAST)],
    },
    Rule {
        name: "return-memory",
        decide: heap::return_memory,
        sets: &[on(&RATIOS, Series(2, 4), Series::LAST)],
    },
    Rule {
        name: "old-objects",
        decide: triggers::old_objects,
        sets: &[on(&["RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR"], Series::FIRST, Series::LAST)],
    },
    Rule {
        name: "malloc",
        decide: triggers::malloc,
        sets: &[on(&["RUBY_GC_MALLOC_LIMIT", "RUBY_GC_MALLOC_LIMIT_MAX"], Series::FIRST, Series::LAST)],
    },
    Rule {
        name: "oldmalloc",
        decide: triggers::oldmalloc,
        sets: &[on(&["RUBY_GC_OLDMALLOC_LIMIT", "RUBY_GC_OLDMALLOC_LIMIT_MAX"], Series::FIRST, Series::LAST)],
    },
    Rule {
        name: "unprotected-objects",
        decide: triggers::unprotected,
        sets: &[on(
            &["RUBY_GC_HEAP_REMEMBERED_WB_UNPROTECTED_OBJECTS_LIMIT_RATIO"],
            Series(3, 3),
            Series::LAST,
        )],
    },
    Rule { name: "explicit-gc", decide: triggers::explicit, sets: &[] },
];

/// Everything that may be advised on a series: pairs of a rule's and a variable's name.
pub fn settable(series: Series) -> impl Iterator<Item = (&'static str, &'static str)> {
    RULES.iter().flat_map(move |rule| {
        let sets = rule.sets.iter().filter(move |sets| (sets.from..=sets.until).contains(&series));
        sets.flat_map(|sets| sets.names).map(|name| (rule.name, *name))
    })
}

/// The input of the rules.
struct Case<'a> {
    series: Series,
    evidence: &'a Evidence,
    in_force: &'a InForce,
    strategy: Strategy,
    /// Processes whose live heap grows steadily, if they are at least half of those judged.
    leaks: &'a [Leak],
    /// The maximum step of growth that the plan sets, slots.
    growth_step: Option<f64>,
}

pub(super) fn recommend(series: Series, now: &Episode, others: &[Episode]) -> Report {
    let evidence = &now.evidence;
    let insufficient = evidence.lacks();
    let (judged, leaks) = evidence.trends.leaks();
    let many = leaks.len() * 2 >= judged;
    let tried = Tried { now, others };
    let attempts = others.iter().filter(|other| other.evidence.is_sufficient()).count();
    let plans = Strategy::ALL.map(|strategy| {
        let mut plan =
            Plan { strategy, advice: Vec::new(), refusals: Vec::new(), withdrawal: None, price: None };
        if !insufficient.is_empty() {
            return plan;
        }
        plan.withdrawal = withdrawal(now, others, strategy);
        let mut case = Case {
            series,
            evidence,
            in_force: &now.in_force,
            strategy,
            leaks: if many { &leaks } else { &[] },
            growth_step: None,
        };
        for Rule { name: rule, decide, .. } in RULES {
            let verdict = match plan.withdrawal {
                Some(_) => Err("the last change is reverted first".to_owned()),
                None if attempts >= MOST_TRIED => {
                    Err(format!("{attempts} other settings were tried already; the remaining gain is small"))
                }
                None => decide(&case)
                    .and_then(|advice| for_all(&case, advice))
                    .and_then(|advice| trade_off::worth(&case, advice))
                    .and_then(|advice| compatible(advice, &plan))
                    .and_then(|advice| untried(advice, &tried, strategy))
                    .and_then(changing),
            };
            match verdict {
                Ok(advice) => {
                    let mut set = advice.set.iter();
                    let step = set.find(|change| change.variable == "RUBY_GC_HEAP_GROWTH_MAX_SLOTS");
                    case.growth_step = case.growth_step.or(step.map(|change| change.value.number()));
                    plan.advice.push(Advice { rule, ..advice });
                }
                Err(reason) => plan.refusals.push(Refusal { rule, reason }),
            }
        }
        plan.price = price::together(&plan.advice, case.share_of_time());
        if price::depends_on_caches(&case) {
            let all = plan.advice.iter_mut().map(|advice| &mut advice.effect.price);
            all.chain(&mut plan.price).for_each(price::without_likely_time);
        }
        plan
    });
    Report {
        series,
        in_force: now.in_force.clone(),
        at_the_same_time: beside(now, others).map(|other| other.in_force.clone()).collect(),
        change: before(now, others).map(|before| Comparison::of(before, now)),
        leaks,
        evidence: evidence.clone(),
        insufficient,
        plans,
        unheeded: environment::unheeded(&evidence.environment, series),
    }
}

/// Reverts the last change if it made things worse.
fn withdrawal(now: &Episode, others: &[Episode], strategy: Strategy) -> Option<Withdrawal> {
    let before = before(now, others)?;
    let worse = judge(before, now, strategy) == Outcome::Worse;
    worse.then(|| Withdrawal {
        to: before.in_force.clone(),
        why: format!("the change to {} made it worse: {}", now.in_force, gain(before, now, strategy)),
    })
}

/// Refuses advice that is a size of the heap with which some of the processes should not begin: they differ too much, or it is more than
/// they ever had.
fn for_all(case: &Case<'_>, advice: Advice) -> Verdict {
    const TIMES: u64 = 2;
    // Bytes allowed in addition to the multiple, for small processes; and bytes allowed if the memory is unknown.
    const BASE: u64 = 64 << 20;
    const UNKNOWN: u64 = 512 << 20;
    let evidence = case.evidence;
    let slot = |change: &Change| {
        let heap = HEAPS.iter().position(|name| *name == change.variable);
        let heap = heap.and_then(|at| evidence.heaps.get(at)).map(|heap| heap.slot);
        change.variable.ends_with("_INIT_SLOTS").then(|| heap.unwrap_or(SLOT))
    };
    let sizes = advice.set.iter().filter_map(|change| Some((change, slot(change)?)));
    let bytes = sizes.map(|(change, slot)| change.value.number() * slot as f64).sum::<f64>();
    if bytes == 0.0 {
        return Ok(advice);
    }
    let each = &evidence.each.slots;
    let (least, most) = (each.quantile(0.1), each.quantile(0.9).max(evidence.available.quantile(0.9)));
    if let (Some(least), Some(most)) = (least, most)
        && most > least.saturating_mul(TIMES)
    {
        return Err(format!(
            "processes of different sizes ({least} … {most} slots), which would all start with the same size: give each kind its own token or role"
        ));
    }
    let known = price::peak_rss(evidence).map(|peak| peak.saturating_mul(TIMES).saturating_add(BASE));
    let memory = known.unwrap_or(UNKNOWN);
    if bytes > memory as f64 {
        return Err(format!(
            "the heap would begin with {:.0} MiB, which is much more than the processes have shown ({:.0} MiB are allowed)",
            bytes / 1_048_576.0,
            memory as f64 / 1_048_576.0
        ));
    }
    Ok(advice)
}

/// Refuses advice whose direction was already tried without success.
fn untried(advice: Advice, tried: &Tried<'_>, strategy: Strategy) -> Verdict {
    let objection =
        |change: &Change| tried.objection(variable(change.variable)?, change.value.number(), strategy);
    match advice.set.iter().find_map(objection) {
        Some(objection) => Err(objection),
        None => Ok(advice),
    }
}

/// Removes from advice the settings that are already in force; refuses it if none remain.
fn changing(mut advice: Advice) -> Verdict {
    let sets = !advice.set.is_empty();
    advice.set.retain(|change| !in_force::is_same(change.value.number(), change.current));
    if sets && advice.set.is_empty() {
        return Err("all its settings are already in force".to_owned());
    }
    Ok(advice)
}

/// Refuses advice if another rule already sets one of its variables.
fn compatible(advice: Advice, plan: &Plan) -> Verdict {
    let taken = |change: &&Change| plan.settings().any(|other| other.variable == change.variable);
    match advice.set.iter().find(taken) {
        Some(change) => Err(format!("another rule sets {} already", change.variable)),
        None => Ok(advice),
    }
}

impl<'a> Case<'a> {
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

    /// The value of a variable, and whether that is its default: the value in the environment if Ruby accepts it, else the default.
    fn current(&self, name: &str) -> (f64, bool) {
        let Some(variable) = variable(name) else { return (0.0, true) };
        let value = self.in_force.value(variable);
        (value, in_force::is_same(value, variable.default))
    }

    fn value(&self, name: &str) -> f64 {
        self.current(name).0
    }

    /// A change of a variable; an error if this Ruby does not read it.
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

    /// Checks that there are enough cycles of one kind for a rule. If the time in the GC is not measured, they must also be a relevant share of all
    /// cycles: any program accumulates ten of them if it is observed for long enough, and removing their cause has no visible benefit.
    fn often(&self, n: u64, what: &str) -> Result<(), String> {
        enough(n, what)?;
        let all = self.evidence.cycles;
        if self.share_of_time().is_none() && n.saturating_mul(MOST_PER_CASE) < all {
            return Err(format!("{what}: {n} of {all} cycles, which is too few to matter"));
        }
        Ok(())
    }

    /// Size of the heap and live slots after major cycles, both once the heap has settled.
    fn heap(&self) -> Result<(u64, u64), String> {
        if let Some(leak) = self.leaks.first() {
            return Err(format!(
                "the live heap grows steadily ({} → {} slots in {}): more slots would only delay that",
                leak.from,
                leak.to,
                span(leak.seconds)
            ));
        }
        if self.evidence.settled == 0 {
            return Err("the heap was still growing: trace for longer".to_owned());
        }
        let (growing, settled) = (self.evidence.growing, self.evidence.settled);
        // If only a few of many sets look settled, that is by chance.
        if growing > settled {
            return Err(format!(
                "the heap was still growing in {growing} sets, and had its size only in {settled}"
            ));
        }
        let size = quantile(&self.evidence.available, 0.9, "sizes of the heap")?;
        let live = quantile(&self.evidence.live, 0.5, "ends of major cycles")?;
        Ok((size, live.min(size)))
    }

    /// An error if malloc starts more minor cycles than a lack of free slots: its limits must be raised first. `because` is the reason.
    fn malloc_follows(&self, because: &str) -> Result<(), String> {
        let (slots, malloc) = (self.evidence.minors_by("newobj"), self.evidence.minors_by("malloc"));
        if malloc > slots {
            return Err(format!(
                "malloc begins {malloc} minor cycles and a lack of free slots only {slots}, so {because}; raise the limits of malloc \
                 first, then trace again"
            ));
        }
        Ok(())
    }

    /// The heaps of a Ruby that has a variable for each of them, if the sets include their sizes and what they allocate.
    fn heaps(&self) -> Option<&'a [Heap]> {
        let single = (Series(3, 3)..=Series(4, 0)).contains(&self.series);
        let heaps: &'a [Heap] = &self.evidence.heaps;
        let known = heaps.len() == HEAPS.len()
            && heaps.iter().all(|heap| heap.slots.n() > 0 && heap.slot > 0)
            && heaps.iter().any(|heap| heap.interval() > 0);
        (single && known).then_some(heaps)
    }

    /// Why [`Case::heaps`] is `None`.
    fn no_heaps(&self) -> String {
        let series = self.series;
        if series > Series(4, 0) {
            return format!("Ruby {series} has sizes in bytes for its heaps, which no rule gives yet");
        }
        format!("Ruby {series} wants a size for each of its heaps, which these sample sets do not carry")
    }

    /// Whether fewer cycles would gain anything: judged by their time, or by their number if the time is not measured.
    fn is_busy(&self) -> Result<(), String> {
        if let Some(time) = self.share_of_time() {
            let little = time <= GC_SHARE;
            return if little {
                Err(format!("the GC takes only {} of the time", percent(time)))
            } else {
                Ok(())
            };
        }
        let rate = self.evidence.cycles as f64 / self.evidence.seconds.max(1.0);
        if rate < RARE {
            return Err(format!("there are only {:.1} cycles a minute", rate * 60.0));
        }
        Ok(())
    }

    fn share_of_time(&self) -> Option<f64> {
        self.evidence.counted_time().map(|time| time.share())
    }

    /// Why [`Case::share_of_time`] is `None`.
    fn no_time(&self) -> String {
        match self.series {
            series if series < Series(3, 1) => {
                format!("Ruby {series} does not count its time in the GC (3.1 and later do)")
            }
            _ => "the time in the GC was not counted".to_owned(),
        }
    }
}

/// Checks that there are enough cases of one kind for a rule.
fn enough(n: u64, what: &str) -> Result<(), String> {
    if n < MIN_CASES { Err(format!("{what}: {n}; at least {MIN_CASES} are needed")) } else { Ok(()) }
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
