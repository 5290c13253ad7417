//! What a change of settings brought: one environment compared with another.

use std::fmt;

use serde::Serialize;

use super::{
    Evidence, InForce, Strategy,
    distribution::Distribution,
    in_force::{brief, short},
    ruby::Variable,
};

/// What is known of a program under one environment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episode {
    /// The settings that Ruby followed.
    pub in_force: InForce,
    /// The evidence of its sets.
    pub evidence: Evidence,
    /// When it was in force, on any clock that is the same for all environments.
    pub times: Times,
}

/// When an environment was in force, by the times in its sets: the latest stretch of them without a gap of more than [`GAP`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// When its first set begins.
    pub since: f64,
    /// When its last set ends.
    pub until: f64,
    /// Sets in it.
    pub sets: u64,
}

/// An environment that is seen again within so many seconds was in force all the time: programs that are started again one after the
/// other, or hosts with different settings, send in turns.
pub const GAP: f64 = 3600.0;
/// Of environments at the same time, one with fewer sets than the others by this factor is that of a console or of a process that was
/// forgotten.
const FEWER: u64 = 4;

impl Times {
    /// A single moment.
    pub fn at(moment: f64) -> Self {
        Self { since: moment, until: moment, sets: 1 }
    }

    fn add(&mut self, [first, last]: [f64; 2]) {
        let none = self.sets == 0;
        self.since = if none { first } else { self.since.min(first) };
        self.until = if none { last } else { self.until.max(last) };
        self.sets += 1;
    }

    /// The latest stretch of sets of these times.
    pub fn latest_of(mut sets: Vec<[f64; 2]>) -> Self {
        sets.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let mut times = Self::default();
        for set in sets {
            if times.sets > 0 && set[0] > times.until + GAP {
                times = Self::default();
            }
            times.add(set);
        }
        times
    }

    /// Whether both are in force at the same time, if `latest` is the end of the last set of all.
    fn is_beside(&self, other: &Self, latest: f64) -> bool {
        let since = latest - GAP;
        self.since <= other.until && other.since <= self.until && self.until >= since && other.until >= since
    }
}

/// The end of the last set of all.
fn latest(all: impl Iterator<Item = Times>) -> f64 {
    all.fold(f64::NEG_INFINITY, |latest, times| latest.max(times.until))
}

/// Which of some environments is in force: the one that was seen last, unless others are in force at the same time. Of those it is the one
/// that is in force for the longest time: a second one is not its successor as long as the first one goes on. Of equals, the first one.
pub fn in_force(all: &[Times]) -> Option<usize> {
    let latest = latest(all.iter().copied());
    let others =
        |at: usize| all.iter().enumerate().filter(move |(other, _)| *other != at).map(|(_, times)| times);
    let current: Vec<usize> = (0..all.len())
        .filter(|at| all[*at].until >= latest - GAP && !others(*at).any(|other| other.since > all[*at].until))
        .collect();
    let most = current.iter().map(|at| all[*at].sets).max()?;
    let many = current.into_iter().filter(|at| all[*at].sets.saturating_mul(FEWER) >= most);
    many.min_by(|a, b| all[*a].since.total_cmp(&all[*b].since).then(a.cmp(b)))
}

/// The environments that are in force at the same time as this one.
pub(super) fn beside<'a>(now: &Episode, others: &'a [Episode]) -> impl Iterator<Item = &'a Episode> {
    let latest = latest(others.iter().map(|other| other.times).chain([now.times]));
    let now = now.times;
    others.iter().filter(move |other| other.times.is_beside(&now, latest))
}

/// The environment that was in force before; of the others, the one seen last is at the end. One of which too little is known for
/// any comparison, such as that of a console, does not count, nor one that is in force at the same time, or began later and has ended.
pub(super) fn before<'a>(now: &Episode, others: &'a [Episode]) -> Option<&'a Episode> {
    let latest = latest(others.iter().map(|other| other.times).chain([now.times]));
    others.iter().rev().find(|other| {
        let (other, now, known) = (other.times, now.times, other.evidence.is_sufficient());
        known && other.until <= now.until && other.since <= now.since && !other.is_beside(&now, latest)
    })
}

/// Environments that are not in force are forgotten when their last set is older than this, seconds.
pub const FORGOTTEN: f64 = 30.0 * 86_400.0;
/// Fewest sets on each side for a meaningful spread.
const FEW: u64 = 3;
/// A cost that differs by less is the same.
const CLEAR: f64 = 0.10;
/// The same threshold where there are too few sets for a spread.
const CLEAR_OF_FEW: f64 = 0.25;

/// How one environment compares with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It costs clearly less.
    Better,
    /// It costs clearly more.
    Worse,
    /// No clear difference.
    Same,
    /// Too little was seen on one side, or this Ruby does not count what it costs.
    Unknown,
}

/// A variable that was changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changed {
    /// The variable.
    pub variable: &'static str,
    /// Its value before.
    pub before: f64,
    /// Its value now.
    pub after: f64,
}

/// A figure of both sides: medians over sets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// What it is.
    pub metric: &'static str,
    /// Before.
    pub before: f64,
    /// From P10 to P90 of the sets before.
    pub before_spread: [f64; 2],
    /// Now.
    pub after: f64,
    /// From P10 to P90 of the sets since.
    pub after_spread: [f64; 2],
}

/// The environment in force, compared with the one before it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What was changed.
    pub changed: Vec<Changed>,
    /// Seconds that were traced since.
    pub seconds: f64,
    /// Sets before.
    pub sets_before: u64,
    /// Sets since.
    pub sets_after: u64,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Whether it costs less time in the GC for the objects that are allocated.
    pub speed: Outcome,
    /// Whether it takes less memory.
    pub memory: Outcome,
}

const SHARE: &str = "time in GC, %";
const COST: &str = "GC time per million objects, ms";
const MINORS: &str = "minors per million objects";
const MAJORS: &str = "majors per million objects";
const RSS: &str = "RSS, MiB";
const PEAK: &str = "peak RSS, MiB";

type Pick = fn(&Evidence) -> &Distribution;

/// Each with the factor from the evidence's unit.
const FIGURES: [(&str, f64, Pick); 6] = [
    (MINORS, 1e3, |evidence| &evidence.each.minors),
    (MAJORS, 1e3, |evidence| &evidence.each.majors),
    (COST, 1e3, |evidence| &evidence.each.cost),
    (SHARE, 1e2, |evidence| &evidence.each.share),
    (RSS, 1_048_576.0, |evidence| &evidence.each.rss),
    (PEAK, 1_048_576.0, |evidence| &evidence.each.peak),
];

impl Comparison {
    /// Compares two environments.
    pub fn of(before: &Episode, after: &Episode) -> Self {
        let changed = before.in_force.differences(&after.in_force).map(|variable| Changed {
            variable: variable.name,
            before: before.in_force.value(variable),
            after: after.in_force.value(variable),
        });
        let counted = before.evidence.counted_time().is_some() && after.evidence.counted_time().is_some();
        let figure = |(metric, unit, pick): &(&'static str, f64, Pick)| {
            if !counted && [SHARE, COST].contains(metric) {
                return None;
            }
            let at = |evidence: &Evidence, share: f64| Some(pick(evidence).quantile(share)? as f64 / unit);
            let spread = |evidence: &Evidence| Some([at(evidence, 0.1)?, at(evidence, 0.9)?]);
            Some(Figure {
                metric,
                before: at(&before.evidence, 0.5)?,
                before_spread: spread(&before.evidence)?,
                after: at(&after.evidence, 0.5)?,
                after_spread: spread(&after.evidence)?,
            })
        };
        Self {
            changed: changed.collect(),
            seconds: after.evidence.seconds,
            sets_before: before.evidence.sets,
            sets_after: after.evidence.sets,
            figures: FIGURES.iter().filter_map(figure).collect(),
            speed: judge(before, after, Strategy::Speed),
            memory: judge(before, after, Strategy::Memory),
        }
    }

    /// The outcome for this strategy.
    pub fn outcome(&self, strategy: Strategy) -> Outcome {
        match strategy {
            Strategy::Speed => self.speed,
            Strategy::Memory => self.memory,
        }
    }
}

/// How `after` compares with `before`.
pub(super) fn judge(before: &Episode, after: &Episode, strategy: Strategy) -> Outcome {
    let (before, after) = (&before.evidence, &after.evidence);
    if !before.is_sufficient() || !after.is_sufficient() {
        return Outcome::Unknown;
    }
    let by = |pick: Pick| judge_by(pick(before), pick(after));
    let counted = before.counted_time().is_some() && after.counted_time().is_some();
    match strategy {
        Strategy::Memory => by(|evidence| &evidence.each.rss),
        Strategy::Speed if counted => by(|evidence| &evidence.each.cost),
        // Before 3.1 only cycles are counted. The effect of fewer minors for more majors is not known then.
        Strategy::Speed => match (by(|evidence| &evidence.each.minors), by(|evidence| &evidence.each.majors))
        {
            (one, other) if one == other => one,
            (Outcome::Same, other) | (other, Outcome::Same) => other,
            _ => Outcome::Unknown,
        },
    }
}

fn judge_by(before: &Distribution, after: &Distribution) -> Outcome {
    let at = |of: &Distribution, share| of.quantile(share).map(|value| value as f64);
    let quartiles = |of| Some((at(of, 0.25)?, at(of, 0.5)?, at(of, 0.75)?));
    let (Some(was), Some(is)) = (quartiles(before), quartiles(after)) else { return Outcome::Unknown };
    let few = before.n().min(after.n()) < FEW;
    let clear = 1.0 + if few { CLEAR_OF_FEW } else { CLEAR };
    if is.1 > was.1 * clear && is.0 >= was.2 {
        Outcome::Worse
    } else if was.1 > is.1 * clear && was.0 >= is.2 {
        Outcome::Better
    } else {
        Outcome::Same
    }
}

/// Earlier attempts: other environments of the same program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tried<'a> {
    /// The one in force.
    pub(super) now: &'a Episode,
    /// The others, the latest last.
    pub(super) others: &'a [Episode],
}

impl Tried<'_> {
    /// Why a variable should not be moved to this value: moving it that way was tried and was worse, or moving it at least half as far
    /// has brought nothing. What a smaller step has not changed, such as an initial size below that which the heap has anyway, says nothing
    /// of a larger one.
    pub(super) fn objection(
        &self,
        variable: &'static Variable,
        value: f64,
        strategy: Strategy,
    ) -> Option<String> {
        let now = self.now.in_force.value(variable);
        let up = value > now;
        let name = short(variable.name);
        self.others.iter().rev().find_map(|other| {
            let theirs = other.in_force.value(variable);
            let beyond = if up { theirs > now } else { theirs < now };
            let behind = if up { theirs < now } else { theirs > now };
            // A value that was tried and abandoned is only worth another try if it was clearly better.
            let outcome = if beyond { judge(self.now, other, strategy) } else { Outcome::Unknown };
            let as_far = (theirs - now).abs() * 2.0 >= (value - now).abs();
            if outcome == Outcome::Worse || (outcome == Outcome::Same && as_far) {
                let word = if outcome == Outcome::Worse { "worse" } else { "no better" };
                let what = gain(self.now, other, strategy);
                return Some(format!("with {} it was {word}: {what}", other.in_force));
            }
            // If other variables were changed as well, it is not known which change brought nothing.
            let alone = other.in_force.differences(&self.now.in_force).count() <= 2;
            if behind && alone && judge(other, self.now, strategy) == Outcome::Same {
                let from = brief(variable.name, theirs);
                return Some(format!(
                    "to change {name} from {from} to {} brought no clear gain; no reason to go further",
                    brief(variable.name, now)
                ));
            }
            None
        })
    }
}

/// The cost of both sides, in words.
pub(super) fn gain(before: &Episode, after: &Episode, strategy: Strategy) -> String {
    let comparison = Comparison::of(before, after);
    let wanted: &[&str] = match strategy {
        Strategy::Speed
            if !(before.evidence.counted_time().is_some() && after.evidence.counted_time().is_some()) =>
        {
            &[MINORS, MAJORS]
        }
        Strategy::Speed => &[COST, SHARE],
        Strategy::Memory => &[RSS],
    };
    let figures = comparison.figures.iter().filter(|figure| wanted.contains(&figure.metric));
    figures.map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { metric, before, after, after_spread: [low, high], .. } = self;
        let (name, unit) = metric.rsplit_once(", ").unwrap_or((metric, ""));
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        write!(f, "{name} {} → {}{unit}", round(*before), round(*after))?;
        if *before > 0.0 && unit != " %" {
            write!(f, " ({:+.0} %)", (after / before - 1.0) * 100.0)?;
        }
        if round(high - low) > 0.0 {
            write!(f, ", per set {} to {}", round(*low), round(*high))?;
        }
        Ok(())
    }
}

/// To three digits.
fn round(value: f64) -> f64 {
    if value.abs() >= 100.0 {
        value.round()
    } else if value.abs() >= 10.0 {
        (value * 10.0).round() / 10.0
    } else {
        (value * 100.0).round() / 100.0
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changes: Vec<String> = self
            .changed
            .iter()
            .map(|change| format!("{}={}", short(change.variable), brief(change.variable, change.after)))
            .collect();
        let was: Vec<String> =
            self.changed.iter().map(|change| brief(change.variable, change.before)).collect();
        writeln!(
            f,
            "since {} (before: {}), {} in {} sets:",
            changes.join(" "),
            was.join(" "),
            span(self.seconds),
            self.sets_after
        )?;
        for figure in &self.figures {
            writeln!(f, "    {figure}")?;
        }
        for (what, outcome) in [("GC time", self.speed), ("memory", self.memory)] {
            let words = match outcome {
                Outcome::Better => "clearly less than before",
                Outcome::Worse => "clearly more than before",
                Outcome::Same => "no clear difference",
                Outcome::Unknown => continue,
            };
            writeln!(f, "    {what}: {words}")?;
        }
        Ok(())
    }
}

/// Seconds for people.
pub(super) fn span(seconds: f64) -> String {
    match seconds {
        s if s >= 2.0 * 86_400.0 => format!("{:.1} d", s / 86_400.0),
        s if s >= 2.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 120.0 => format!("{:.0} min", s / 60.0),
        s => format!("{s:.0} s"),
    }
}
