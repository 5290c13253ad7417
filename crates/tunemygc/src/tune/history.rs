//! The effect of a change of settings: compares one environment with another.

use std::fmt;

use serde::Serialize;

use super::{
    Evidence, InForce, Strategy,
    distribution::Distribution,
    in_force::{brief, short},
    ruby::Variable,
};

/// The facts known about a program under one environment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episode {
    /// The settings that Ruby followed.
    pub in_force: InForce,
    /// The evidence of its sets.
    pub evidence: Evidence,
    /// When it was in force, on any clock that is common to all environments.
    pub times: Times,
}

/// When an environment was in force, by the times in its sets: their latest stretch without a gap of more than [`GAP`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// When its first set begins.
    pub since: f64,
    /// When its last set ends.
    pub until: f64,
    /// Number of sets in the stretch.
    pub sets: u64,
}

/// An environment that is seen again within this time, seconds, was in force throughout: programs that are restarted one after the
/// other, or hosts with different settings, send sets alternately.
pub const GAP: f64 = 3600.0;
/// Among environments in force at the same time, one with fewer sets than the most frequent one by more than this factor belongs to a console
/// or a forgotten process.
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

    /// The latest stretch of sets with these start and end times.
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

    /// Whether both are in force at the same time; `latest` is the end of the latest set of all environments.
    fn is_beside(&self, other: &Self, latest: f64) -> bool {
        let since = latest - GAP;
        self.since <= other.until && other.since <= self.until && self.until >= since && other.until >= since
    }
}

/// The end of the latest set of all environments.
fn latest(all: impl Iterator<Item = Times>) -> f64 {
    all.fold(f64::NEG_INFINITY, |latest, times| latest.max(times.until))
}

/// Index of the environment that is in force: the one seen last, unless others are in force at the same time. Among those it is the one
/// in force for the longest time: a second one does not succeed the first one while that continues. If several are equal, the first one.
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

/// The environment that was in force before `now`. In `others`, the one seen last is at the end. An environment with too little evidence for
/// a comparison, such as that of a console, does not count, nor does one in force at the same time, or one that began later and has ended.
pub(super) fn before<'a>(now: &Episode, others: &'a [Episode]) -> Option<&'a Episode> {
    let latest = latest(others.iter().map(|other| other.times).chain([now.times]));
    others.iter().rev().find(|other| {
        let (other, now, known) = (other.times, now.times, other.evidence.is_sufficient());
        known && other.until <= now.until && other.since <= now.since && !other.is_beside(&now, latest)
    })
}

/// Environments that are not in force are ignored if their last set is older than this, seconds.
pub const FORGOTTEN: f64 = 30.0 * 86_400.0;
/// Minimum number of sets on each side for a meaningful spread.
const FEW: u64 = 3;
/// Costs whose relative difference is smaller count as the same.
const CLEAR: f64 = 0.10;
/// The same threshold if there are too few sets for a spread.
const CLEAR_OF_FEW: f64 = 0.25;

/// The result of comparing one environment with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It costs clearly less.
    Better,
    /// It costs clearly more.
    Worse,
    /// No clear difference.
    Same,
    /// Too little was seen on one side, or this Ruby does not measure the cost.
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
    /// The name and unit of the figure.
    pub metric: &'static str,
    /// The median before.
    pub before: f64,
    /// From P10 to P90 of the sets before.
    pub before_spread: [f64; 2],
    /// The median now.
    pub after: f64,
    /// From P10 to P90 of the sets since.
    pub after_spread: [f64; 2],
}

/// The environment in force, compared with the one before it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The variables that were changed.
    pub changed: Vec<Changed>,
    /// Seconds traced since the change.
    pub seconds: f64,
    /// Number of sets before the change.
    pub sets_before: u64,
    /// Number of sets since the change.
    pub sets_after: u64,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Whether the time in the GC per allocated object decreased.
    pub speed: Outcome,
    /// Whether the memory decreased.
    pub memory: Outcome,
}

const SHARE: &str = "time in GC, %";
const COST: &str = "GC time per million objects, ms";
const MINORS: &str = "minors per million objects";
const MAJORS: &str = "majors per million objects";
const RSS: &str = "RSS, MiB";
const PEAK: &str = "peak RSS, MiB";

type Pick = fn(&Evidence) -> &Distribution;

/// The figures, each with the divisor that converts it from the evidence's unit.
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

/// Compares `after` with `before`.
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
        // Before 3.1 only cycles are counted. The effect of fewer minors at the price of more majors is unknown then.
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
    /// The other environments, the latest last.
    pub(super) others: &'a [Episode],
}

impl Tried<'_> {
    /// Why a variable should not be changed to this value: a change in that direction was tried and was worse, or a change at least half as
    /// large had no effect. A smaller step without effect, such as an initial size below the size that the heap has anyway, does not rule out
    /// a larger one.
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
            // A value that was tried and abandoned is worth another try only if it was clearly better.
            let outcome = if beyond { judge(self.now, other, strategy) } else { Outcome::Unknown };
            let as_far = (theirs - now).abs() * 2.0 >= (value - now).abs();
            if outcome == Outcome::Worse || (outcome == Outcome::Same && as_far) {
                let word = if outcome == Outcome::Worse { "worse" } else { "no better" };
                let what = gain(self.now, other, strategy);
                return Some(format!("with {} it was {word}: {what}", other.in_force));
            }
            // If other variables were changed as well, it is unknown which change had no effect.
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

/// Formats the cost of both sides.
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

/// Rounds to three significant digits.
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

/// Formats seconds for people.
pub(super) fn span(seconds: f64) -> String {
    match seconds {
        s if s >= 2.0 * 86_400.0 => format!("{:.1} d", s / 86_400.0),
        s if s >= 2.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 120.0 => format!("{:.0} min", s / 60.0),
        s => format!("{s:.0} s"),
    }
}
