//! Bounds that a change must not exceed: `gc.share > +20%`.

use super::{
    compare::{Comparison, LEVEL},
    figures::{CPUS, Figure, Unit, Verdict, WAITED, WAITS},
    statistics,
};

/// The figures that conditions can test: name, unit and description.
pub const METRICS: [(&str, Unit, &str); 14] = [
    ("gc.share", Unit::Share, "share of the processes' time in GC pauses"),
    ("gc.minor.rate", Unit::PerSecond, "minor cycles per second and process"),
    ("gc.major.rate", Unit::PerSecond, "major cycles per second and process"),
    ("gc.pause.p50", Unit::Time, "median of the GC pauses"),
    ("gc.pause.p99", Unit::Time, "99th percentile of the GC pauses"),
    ("gvl.wait.share", Unit::Share, "share of the threads' time spent waiting for the GVL (--gvl)"),
    ("gvl.wait.rate", Unit::PerSecond, "waits for the GVL per second and process (--gvl)"),
    ("cpu", Unit::Number, "CPUs in use, per process"),
    ("alloc.objects.rate", Unit::PerSecond, "objects allocated per second and process (--alloc)"),
    ("alloc.bytes.rate", Unit::BytesPerSecond, "bytes of the slots of these objects (--alloc)"),
    ("request.rate", Unit::PerSecond, "requests per second and process (--requests)"),
    ("request.p50", Unit::Time, "median of the durations of requests (--requests)"),
    ("request.p95", Unit::Time, "95th percentile of the durations of requests (--requests)"),
    ("request.gc.share", Unit::Share, "share of the requests' time in GC pauses (--requests)"),
];

/// Why a condition is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConditionError {
    /// It does not have the form of a condition.
    #[error(
        "`{0}` is not a condition; write METRIC > BOUND, e.g. 'gc.share > +20%' or 'gc.pause.p99 > 50ms'"
    )]
    Form(String),
    /// It does not name a metric.
    #[error("`{0}` is not a metric; there are {names}", names = METRICS.map(|(name, ..)| name).join(", "))]
    Metric(String),
    /// Its bound does not suit the metric.
    #[error("`{bound}` is not a bound for {metric}; write {examples}")]
    Bound {
        /// The bound.
        bound: String,
        /// The metric.
        metric: &'static str,
        /// Examples of valid bounds.
        examples: &'static str,
    },
    /// Its bound is a change in the opposite direction.
    #[error(
        "`{text}` cannot be tested: {sign} needs a change in its direction, e.g. '{metric} {sign} {fits}'"
    )]
    Direction {
        /// The condition.
        text: String,
        /// Its sign.
        sign: char,
        /// A valid bound.
        fits: &'static str,
        /// The metric.
        metric: &'static str,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    /// On the change relative to A.
    Relative(f64),
    /// On the change, in the metric's unit.
    Change(f64),
    /// On the value of B, in the metric's unit.
    Level(f64),
}

/// A condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// The condition as it was written.
    pub text: String,
    metric: &'static str,
    above: bool,
    bound: Bound,
}

/// The outcome of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The bound is not exceeded, or by no more than noise.
    Held,
    /// The bound is exceeded by more than noise.
    Failed,
    /// The figure is absent, or was not tested.
    Unknown,
}

/// A condition with its outcome.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The condition as it was written.
    pub text: String,
    /// The outcome.
    pub outcome: Outcome,
    /// The figure, if there is one.
    pub figure: Option<Figure>,
    /// Why the outcome is unknown; empty if it is known.
    pub why: String,
    /// Whether the bound applies to B alone, regardless of A.
    pub of_b: bool,
    /// Whether the figure exceeds the bound, but by no more than noise.
    pub within_noise: bool,
}

impl std::str::FromStr for Condition {
    type Err = ConditionError;

    fn from_str(text: &str) -> Result<Self, ConditionError> {
        let form = || ConditionError::Form(text.to_owned());
        let at = text.find(['<', '>']).ok_or_else(form)?;
        let (name, rest) = (text[..at].trim(), &text[at + 1..]);
        let bound = rest.strip_prefix('=').unwrap_or(rest).trim();
        if name.is_empty() || bound.is_empty() {
            return Err(form());
        }
        let known = METRICS.iter().find(|(metric, ..)| *metric == name);
        let &(metric, unit, _) = known.ok_or_else(|| ConditionError::Metric(name.to_owned()))?;
        let examples = match unit {
            Unit::Share => "+20% (change), +2pp (points) or 10% (of B)",
            Unit::Time => "+20% or +5ms (change), or 50ms (of B)",
            _ => "+20% or +1.5 (change), or 12 (of B)",
        };
        let wrong = || ConditionError::Bound { bound: bound.to_owned(), metric, examples };
        let parsed = parse(bound, unit).ok_or_else(wrong)?;
        let above = &text[at..=at] == ">";
        // A decrease by more than 5 % is `< -5%`. `> -5%` would have to fail if nothing changed, which is never more than noise.
        if let Bound::Relative(change) | Bound::Change(change) = parsed
            && (if above { change < 0.0 } else { change > 0.0 })
        {
            let (sign, fits) = if above { ('>', "+5%") } else { ('<', "-5%") };
            return Err(ConditionError::Direction { text: text.trim().to_owned(), sign, fits, metric });
        }
        Ok(Self { text: text.trim().to_owned(), metric, above, bound: parsed })
    }
}

/// Parses `+20%`, `+2pp`, `-5ms`, `50ms`, `12`.
fn parse(text: &str, unit: Unit) -> Option<Bound> {
    let signed = text.starts_with(['+', '-']);
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = (text[..end].parse::<f64>().ok()?, text[end..].trim());
    let scaled = match (suffix, unit) {
        ("%", _) if signed => return Some(Bound::Relative(number / 100.0)),
        ("pp", Unit::Share) if signed => number / 100.0,
        // A share cannot exceed the whole.
        ("%", Unit::Share) if number <= 100.0 => number / 100.0,
        ("us" | "µs", Unit::Time) => number * 1e3,
        ("ms", Unit::Time) => number * 1e6,
        ("s", Unit::Time) => number * 1e9,
        ("", Unit::PerSecond | Unit::Number | Unit::BytesPerSecond) => number,
        _ => return None,
    };
    Some(if signed { Bound::Change(scaled) } else { Bound::Level(scaled) })
}

impl Condition {
    /// Evaluates whether the bound is exceeded by more than noise.
    pub fn judge(&self, comparison: &Comparison) -> Judged {
        let found = comparison.figures().find(|(_, _, figure)| figure.metric == self.metric);
        let figure = found.map(|(_, _, figure)| figure.clone());
        let (outcome, why) = match &figure {
            None => (Outcome::Unknown, self.absent(comparison)),
            Some(figure) => match self.exceeded(figure) {
                Ok(exceeded) => (if exceeded { Outcome::Failed } else { Outcome::Held }, String::new()),
                Err(why) => (Outcome::Unknown, format!("not tested: {why}")),
            },
        };
        let of_b = matches!(self.bound, Bound::Level(_));
        let within_noise =
            outcome == Outcome::Held && figure.as_ref().is_some_and(|figure| self.seems_exceeded(figure));
        Judged { text: self.text.clone(), outcome, figure, why, of_b, within_noise }
    }

    fn exceeded(&self, figure: &Figure) -> Result<bool, &'static str> {
        let beyond = |value: f64, bound: f64| if self.above { value > bound } else { value < bound };
        let change = match (self.bound, figure.verdict) {
            (Bound::Level(bound), _) => {
                return match figure.of_b {
                    Some(_) if let Some(tail) = &figure.tail_of_b => {
                        Ok(tail.p_beyond(bound, self.above) <= LEVEL)
                    }
                    Some(of_b) => Ok(statistics::p_beyond(&of_b, bound, self.above) <= LEVEL),
                    // What A lacks does not matter to a bound of B.
                    None => Err(figure.why_b),
                };
            }
            (_, Verdict::Untested(why)) => return Err(why),
            (_, Verdict::Noise) => return Ok(false),
            (Bound::Change(bound), _) => figure.change().is_some_and(|change| beyond(change, bound)),
            // A change from zero to something exceeds any relative bound.
            (Bound::Relative(bound), _) => beyond(figure.relative().unwrap_or(f64::INFINITY), bound),
        };
        Ok(change)
    }

    /// Whether the figure itself exceeds the bound, regardless of its uncertainty.
    fn seems_exceeded(&self, figure: &Figure) -> bool {
        let (value, bound) = match self.bound {
            Bound::Level(bound) => (figure.b, bound),
            Bound::Change(bound) => (figure.change(), bound),
            Bound::Relative(bound) => (figure.relative(), bound),
        };
        value.is_some_and(|value| if self.above { value > bound } else { value < bound })
    }

    fn absent(&self, comparison: &Comparison) -> String {
        let family = self.metric.split('.').next().unwrap_or_default();
        let key = match family {
            "request" => "requests",
            "cpu" => "process",
            family => family,
        };
        let table = comparison.tables.iter().find(|table| table.key == key);
        let why = table.map_or(&comparison.nothing, |table| {
            if table.absent.is_empty() { &table.lacks } else { &table.absent }
        });
        // Other figures of the table may be lacking for other reasons.
        let label = match self.metric {
            "cpu" => CPUS,
            "gvl.wait.share" => WAITED,
            "gvl.wait.rate" => WAITS,
            _ => "",
        };
        let is_own = |why: &&String| why.strip_prefix(label).is_some_and(|rest| rest.starts_with(": "));
        let own: Vec<String> = why.iter().filter(is_own).cloned().collect();
        let why = if own.is_empty() { why } else { &own };
        if why.is_empty() { "there is no such figure".to_owned() } else { why.join("; ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Conditions are parsed as intended; an invalid one is refused with a valid example.
    #[test]
    fn written() {
        let of = |text: &str| text.parse::<Condition>().map(|condition| (condition.above, condition.bound));
        assert_eq!(of("gc.share > +20%"), Ok((true, Bound::Relative(0.2))));
        assert_eq!(of("gc.share>=+2pp"), Ok((true, Bound::Change(0.02))));
        assert_eq!(of("gc.share > 10 %"), Ok((true, Bound::Level(0.1))));
        assert_eq!(of(" request.rate < -10% "), Ok((false, Bound::Relative(-0.1))));
        assert_eq!(of("gc.pause.p99 > +5ms"), Ok((true, Bound::Change(5e6))));
        assert_eq!(of("request.p95 > 1.5s"), Ok((true, Bound::Level(1.5e9))));
        assert_eq!(of("alloc.objects.rate > 100000"), Ok((true, Bound::Level(1e5))));
        for text in ["", "gc.share", "> 3", "gc.share >"] {
            assert!(matches!(of(text), Err(ConditionError::Form(_))), "{text}");
        }
        assert_eq!(of("gc.share > 100%"), Ok((true, Bound::Level(1.0))));
        for text in [
            "gc.share > x",
            "gc.share > 5ms",
            "gc.share > 1000%",
            "gc.minor.rate > 5%",
            "gc.share > +-2%",
            "cpu > 2pp",
        ] {
            assert!(matches!(of(text), Err(ConditionError::Bound { .. })), "{text}");
        }
        for text in ["gc.share > -99%", "gc.share < +20%", "gc.pause.p99 > -5ms", "request.rate < +1"] {
            assert!(matches!(of(text), Err(ConditionError::Direction { .. })), "{text}");
        }
        assert_eq!(of("gc.share > +0%"), Ok((true, Bound::Relative(0.0))));
        let error = of("gc.share > -99%").unwrap_err().to_string();
        assert!(error.contains("'gc.share > +5%'"), "{error}");
        let error = of("gc.shares > +20%").unwrap_err().to_string();
        assert!(
            error.starts_with("`gc.shares` is not a metric; there are gc.share, gc.minor.rate, "),
            "{error}"
        );
        assert!(METRICS.iter().all(|(name, ..)| error.contains(name)));
    }
}
