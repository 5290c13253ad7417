//! Conditions under which a flight recorder writes a file: `METRIC > VALUE`, or `end`.

use std::{fmt, str::FromStr};

/// The metric of a trigger. Each is per process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// The longest single stop of a GC cycle, nanoseconds.
    GcPause,
    /// 99th percentile of the GC stops that ended in 10 s, nanoseconds.
    GcPauseP99,
    /// Share of GC stops in 10 s, in millionths.
    GcShare,
    /// A single wait for the GVL, nanoseconds.
    GvlWait,
    /// 99th percentile of the waits for the GVL in 10 s, nanoseconds.
    GvlWaitP99,
    /// Resident memory at a GC event, bytes.
    Rss,
    /// The duration of a request, from taking it to being done with it, nanoseconds.
    Request,
}

/// Length of the window for shares and quantiles, seconds.
pub(super) const WINDOW_S: u64 = 10;

/// The unit of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Time,
    Share,
    Bytes,
}

/// The name of the trigger for the end of the run.
const END: &str = "end";
/// Maximum number of decimal places accepted.
const DIGITS: usize = 9;

impl Metric {
    /// All metrics.
    pub const ALL: [Self; 7] = [
        Self::GcPause,
        Self::GcPauseP99,
        Self::GcShare,
        Self::GvlWait,
        Self::GvlWaitP99,
        Self::Rss,
        Self::Request,
    ];

    /// Its name in triggers and in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::GcPause => "gc.pause",
            Self::GcPauseP99 => "gc.pause.p99",
            Self::GcShare => "gc.share",
            Self::GvlWait => "gvl.wait",
            Self::GvlWaitP99 => "gvl.wait.p99",
            Self::Rss => "rss",
            Self::Request => "request",
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::GcShare => Unit::Share,
            Self::Rss => Unit::Bytes,
            Self::GcPause | Self::GcPauseP99 | Self::GvlWait | Self::GvlWaitP99 | Self::Request => Unit::Time,
        }
    }

    /// Formats a value.
    pub(super) fn shown(self, value: u64) -> String {
        match self.unit() {
            Unit::Time => crate::export::text::duration(value),
            Unit::Share => format!("{:.1} %", value as f64 / 1e4),
            Unit::Bytes => format!("{:.1} MiB", value as f64 / f64::from(1 << 20)),
        }
    }
}

impl Unit {
    /// The names of a unit's multiples, with the number of nanoseconds, millionths or bytes of each.
    fn names(self) -> &'static [(&'static str, u64)] {
        match self {
            Self::Time => &[
                ("ns", 1),
                ("us", 1_000),
                ("µs", 1_000),
                ("ms", 1_000_000),
                ("s", 1_000_000_000),
                ("m", 60_000_000_000),
            ],
            Self::Share => &[("%", 10_000)],
            Self::Bytes => &[
                ("B", 1),
                ("KiB", 1 << 10),
                ("MiB", 1 << 20),
                ("GiB", 1 << 30),
                ("TiB", 1 << 40),
                ("kB", 1_000),
                ("MB", 1_000_000),
                ("GB", 1_000_000_000),
                ("TB", 1_000_000_000_000),
            ],
        }
    }

    /// How values of this unit are written, for messages.
    fn usage(self) -> &'static str {
        match self {
            Self::Time => "a time in ns, us, ms, s or m, such as 200ms",
            Self::Share => "a share below 100%, such as 30%",
            Self::Bytes => "a size in KiB, MiB, GiB, kB, MB or GB, such as 1GiB",
        }
    }
}

/// The condition that a flight recorder waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// The metric exceeds the value: nanoseconds, millionths or bytes.
    Above(Metric, u64),
    /// The run ends.
    End,
}

impl Trigger {
    /// The name of the metric, or `end`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Above(metric, _) => metric.name(),
            Self::End => END,
        }
    }
}

/// `gc.pause > 200ms`, in the largest unit that needs no fraction.
impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Above(metric, value) = *self else { return f.write_str(END) };
        let names = metric.unit().names();
        // Zero is not shown as `0m`, but in the smallest unit.
        let names = if value == 0 { &names[..1] } else { names };
        let fits = names.iter().filter(|(_, size)| value.is_multiple_of(*size));
        if let Some((name, size)) = fits.max_by_key(|(_, size)| *size) {
            return write!(f, "{} > {}{name}", metric.name(), value / size);
        }
        // Millionths that are not a whole percentage.
        let digits = format!("{}.{:04}", value / 10_000, value % 10_000);
        write!(f, "{} > {}%", metric.name(), digits.trim_end_matches('0'))
    }
}

/// The metrics with the values that they are compared with, for errors.
fn usage() -> String {
    let of = |unit: Unit| {
        let names = Metric::ALL.iter().filter(|metric| metric.unit() == unit).map(|metric| metric.name());
        names.collect::<Vec<_>>().join(", ")
    };
    format!(
        "give `METRIC > VALUE`: {} (times, such as 200ms), {} (such as 30%), {} (such as 1GiB); or `{END}`, the end of the run",
        of(Unit::Time),
        of(Unit::Share),
        of(Unit::Bytes),
    )
}

impl FromStr for Trigger {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == END {
            return Ok(Self::End);
        }
        let Some((name, value)) = text.split_once('>') else {
            return Err(format!("there is no `>` in it; {}", usage()));
        };
        let name = name.trim();
        let Some(metric) = Metric::ALL.into_iter().find(|metric| metric.name() == name) else {
            return Err(format!("`{name}` is not a metric; {}", usage()));
        };
        let unit = metric.unit();
        let value = value.trim();
        let wrong = || format!("`{value}` is not a value of {name}; give {}; {}", unit.usage(), usage());
        let split = value.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(value.len());
        let (number, named) = (&value[..split], value[split..].trim_start());
        let size = unit.names().iter().find(|(name, _)| *name == named).map(|(_, size)| *size);
        let value = size.and_then(|size| times(number, size)).ok_or_else(wrong)?;
        if unit == Unit::Share && value >= 1_000_000 {
            return Err(wrong());
        }
        Ok(Self::Above(metric, value))
    }
}

/// A decimal number times a unit. Only fractions below one are rounded.
fn times(number: &str, size: u64) -> Option<u64> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if part.len() > DIGITS || (number.contains('.') && part.is_empty()) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let scale = 10_u64.pow(part.len() as u32);
    let part: u64 = if part.is_empty() { 0 } else { part.parse().ok()? };
    let product = (u128::from(whole) * u128::from(scale) + u128::from(part)) * u128::from(size);
    u64::try_from(product / u128::from(scale)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Units, fractions and spaces.
    #[test]
    fn values() {
        use Metric as M;
        for (text, metric, value) in [
            ("gc.pause > 200ms", M::GcPause, 200_000_000),
            ("gc.pause>0.2s", M::GcPause, 200_000_000),
            ("  gc.pause.p99   >  1 us ", M::GcPauseP99, 1_000),
            ("gvl.wait > 1.5 m", M::GvlWait, 90_000_000_000),
            ("gvl.wait.p99 > 100ms", M::GvlWaitP99, 100_000_000),
            ("gc.share > 30%", M::GcShare, 300_000),
            ("gc.share > 0.05 %", M::GcShare, 500),
            ("rss > 1GiB", M::Rss, 1 << 30),
            ("rss > 1.5GB", M::Rss, 1_500_000_000),
            ("request > 0s", M::Request, 0),
        ] {
            assert_eq!(text.parse(), Ok(Trigger::Above(metric, value)), "{text}");
        }
        assert_eq!(" end ".parse(), Ok(Trigger::End));
        let shown = |text: &str| text.parse::<Trigger>().unwrap().to_string();
        assert_eq!(shown("gc.pause>0.2s"), "gc.pause > 200ms");
        assert_eq!(shown("rss>1024MiB"), "rss > 1GiB");
        assert_eq!(shown("gc.share>12.5%"), "gc.share > 12.5%");
        assert_eq!(shown("gc.share>30.0%"), "gc.share > 30%");
        assert_eq!(["gc.pause>0ms", "gc.share>0%"].map(shown), ["gc.pause > 0ns", "gc.share > 0%"]);
    }

    /// Errors name the mistake, and list all possibilities.
    #[test]
    fn mistakes() {
        for (text, part) in [
            ("", "there is no `>`"),
            ("gc.pause", "there is no `>`"),
            ("gc.pause < 3ms", "there is no `>`"),
            ("gc.pauses > 200ms", "`gc.pauses` is not a metric"),
            ("end > 2s", "`end` is not a metric"),
            ("> 200ms", "`` is not a metric"),
            ("gc.pause > 200", "`200` is not a value of gc.pause"),
            ("gc.pause >= 200ms", "`= 200ms` is not a value"),
            ("gc.pause > 200MiB", "`200MiB` is not a value of gc.pause; give a time"),
            ("gc.pause > -1ms", "`-1ms` is not a value"),
            ("gc.pause > 1.ms", "`1.ms` is not a value"),
            ("gc.pause > .5s", "`.5s` is not a value"),
            ("gc.pause > 1.2.3s", "`1.2.3s` is not a value"),
            ("gc.pause > 99999999999999999999s", "is not a value"),
            ("rss > 1G", "`1G` is not a value of rss; give a size"),
            ("gc.share > 0.3", "`0.3` is not a value of gc.share; give a share"),
            ("gc.share > 100%", "give a share below 100%"),
        ] {
            let error = text.parse::<Trigger>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
            for metric in Metric::ALL {
                assert!(error.contains(metric.name()), "{text}: {error}");
            }
            assert!(error.lines().count() == 1 && error.contains("`end`"), "{error}");
        }
    }

    proptest! {
        /// The displayed form is parsed to the same trigger.
        #[test]
        fn shown_and_read(which in 0..Metric::ALL.len(), value: u64) {
            let metric = Metric::ALL[which];
            let value = if metric == Metric::GcShare { value % 1_000_000 } else { value };
            let trigger = Trigger::Above(metric, value);
            prop_assert_eq!(trigger.to_string().parse(), Ok(trigger));
        }

        /// Any text is parsed, or refused in one line that lists the metrics.
        #[test]
        fn anything(text in "([a-z.0-9]{0,14} ?> ?[0-9.]{0,22} ?[a-zA-Z%µ]{0,4})|\\PC{0,40}") {
            if let Err(error) = text.parse::<Trigger>() {
                prop_assert!(error.contains("gvl.wait.p99"), "{}", error);
            }
        }

        /// Decimal fractions are exact.
        #[test]
        fn fractions(whole in 0_u64..1_000_000, part in 0_u64..1_000_000_000) {
            let trigger = format!("gc.pause > {whole}.{part:09}s").parse();
            prop_assert_eq!(trigger, Ok(Trigger::Above(Metric::GcPause, whole * 1_000_000_000 + part)));
        }
    }
}
