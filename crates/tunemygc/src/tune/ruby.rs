//! The `RUBY_GC_*` variables of each Ruby: which release reads which, with which default, and which values it accepts.
//!
//! Source: `ruby_gc_set_params` and `get_envparam_size`/`get_envparam_double` of `gc.c` (up to 3.3) and
//! `gc/default/default.c` (from 3.4), tags `v2_2_10` to `v4.0.5`, and master for 4.1.

use std::fmt;

use serde::{Serialize, Serializer};

/// A series of releases that read the same variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Series(pub u32, pub u32);

impl Series {
    /// The first series whose sample sets are understood: before it `GC.stat` had other keys.
    pub const FIRST: Self = Self(2, 2);
    /// The last series whose variables are known.
    pub const LAST: Self = Self(4, 1);

    /// The series of a version such as `3.4.7`; `None` if it is not a known series.
    pub fn parse(version: &str) -> Option<Self> {
        let mut parts = version.split('.');
        let mut next = || parts.next()?.parse().ok();
        let series = Self(next()?, next()?);
        let known = match series.0 {
            2 => (2..=7).contains(&series.1),
            3 => series.1 <= 4,
            4 => series.1 <= 1,
            _ => false,
        };
        known.then_some(series)
    }

    /// Maximum number of objects in one page of the heap (40-byte slots): pages grew from 16 to 64 KiB in 3.2.
    pub fn page_slots(self) -> u64 {
        if self >= Self(3, 2) { 1638 } else { 409 }
    }

    /// Rounds a number of slots up to whole pages.
    pub fn whole_pages(self, slots: u64) -> u64 {
        slots.div_ceil(self.page_slots()).saturating_mul(self.page_slots())
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Values that a variable accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An integer above 0, optionally followed by k, m or g.
    Size,
    /// A number above 1.
    Growth,
    /// A number not below 0.
    Factor,
    /// A number from 0 to 1.
    Ratio,
    /// Something that is not a number.
    Text,
}

/// A variable.
#[derive(Debug)]
pub struct Variable {
    /// Its name in the environment.
    pub name: &'static str,
    /// The first series that reads it.
    pub from: Series,
    /// The last series that reads it.
    pub until: Series,
    /// Values that it accepts.
    pub kind: Kind,
    /// Its value if it is not set.
    pub default: f64,
}

const MIB: f64 = 1_048_576.0;

const fn since(name: &'static str, from: Series, kind: Kind, default: f64) -> Variable {
    Variable { name, from, until: Series::LAST, kind, default }
}

const fn only(name: &'static str, from: Series, until: Series, kind: Kind, default: f64) -> Variable {
    Variable { name, from, until, kind, default }
}

/// Every variable of every known series.
pub const VARIABLES: [Variable; 23] = [
    only("RUBY_GC_HEAP_INIT_SLOTS", Series::FIRST, Series(3, 2), Kind::Size, 10_000.0),
    only("RUBY_GC_HEAP_0_INIT_SLOTS", Series(3, 3), Series(4, 0), Kind::Size, 10_000.0),
    only("RUBY_GC_HEAP_1_INIT_SLOTS", Series(3, 3), Series(4, 0), Kind::Size, 10_000.0),
    only("RUBY_GC_HEAP_2_INIT_SLOTS", Series(3, 3), Series(4, 0), Kind::Size, 10_000.0),
    only("RUBY_GC_HEAP_3_INIT_SLOTS", Series(3, 3), Series(4, 0), Kind::Size, 10_000.0),
    only("RUBY_GC_HEAP_4_INIT_SLOTS", Series(3, 3), Series(4, 0), Kind::Size, 10_000.0),
    since("RUBY_GC_HEAP_INIT_BYTES", Series(4, 1), Kind::Size, 2560.0 * 1024.0),
    since("RUBY_GC_HEAP_FREE_SLOTS", Series::FIRST, Kind::Size, 4096.0),
    since("RUBY_GC_HEAP_GROWTH_FACTOR", Series::FIRST, Kind::Growth, 1.8),
    only("RUBY_GC_HEAP_GROWTH_MAX_SLOTS", Series::FIRST, Series(4, 0), Kind::Size, 0.0),
    since("RUBY_GC_HEAP_GROWTH_MAX_BYTES", Series(4, 1), Kind::Size, 0.0),
    since("RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR", Series::FIRST, Kind::Factor, 2.0),
    since("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO", Series(2, 4), Kind::Ratio, 0.20),
    since("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO", Series(2, 4), Kind::Ratio, 0.40),
    since("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO", Series(2, 4), Kind::Ratio, 0.65),
    since("RUBY_GC_HEAP_REMEMBERED_WB_UNPROTECTED_OBJECTS_LIMIT_RATIO", Series(3, 3), Kind::Factor, 0.01),
    since("RUBY_GC_MALLOC_LIMIT", Series::FIRST, Kind::Size, 16.0 * MIB),
    since("RUBY_GC_MALLOC_LIMIT_MAX", Series::FIRST, Kind::Size, 32.0 * MIB),
    since("RUBY_GC_MALLOC_LIMIT_GROWTH_FACTOR", Series::FIRST, Kind::Growth, 1.4),
    since("RUBY_GC_OLDMALLOC_LIMIT", Series::FIRST, Kind::Size, 16.0 * MIB),
    since("RUBY_GC_OLDMALLOC_LIMIT_MAX", Series::FIRST, Kind::Size, 128.0 * MIB),
    since("RUBY_GC_OLDMALLOC_LIMIT_GROWTH_FACTOR", Series::FIRST, Kind::Growth, 1.2),
    since("RUBY_GC_LIBRARY", Series(3, 4), Kind::Text, 0.0),
];

/// The variable with this name.
pub fn variable(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

impl Variable {
    /// Whether this series reads it.
    pub fn is_read_by(&self, series: Series) -> bool {
        (self.from..=self.until).contains(&series)
    }

    /// Parses a text as Ruby does; `None` if Ruby ignores the text, keeps its default, and reports that only with `-W2`.
    pub fn parse(&self, text: &str, series: Series) -> Option<f64> {
        let real = || real(text, series).filter(|value| value.is_finite());
        match self.kind {
            Kind::Size => size(text).filter(|size| *size > 0).map(|size| size as f64),
            Kind::Growth => real().filter(|value| *value > 1.0),
            Kind::Factor => real().filter(|value| *value >= 0.0),
            Kind::Ratio => real().filter(|value| (0.0..=1.0).contains(value)),
            Kind::Text => None,
        }
    }
}

/// `ruby_strtod` (`util.c`): accepts blanks before a number but not after it, and hexadecimal integers; up to 3.3 it rejects a point without
/// a digit after it.
fn real(text: &str, series: Series) -> Option<f64> {
    let text = text.trim_ascii_start();
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok().map(|value| value as f64);
    }
    let whole = |point: usize| text[point + 1..].starts_with(|next: char| next.is_ascii_digit());
    let takes_points = series >= Series(3, 4);
    text.find('.').is_none_or(|point| takes_points || whole(point)).then(|| text.parse().ok()).flatten()
}

/// `strtoll` with base 0, one of k, m and g, and blanks (`get_envparam_size`).
fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_prefix('+').unwrap_or(text);
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let (digits, radix) = if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        (hex, 16)
    } else if digits.len() > 1 && digits.starts_with('0') {
        (digits, 8)
    } else {
        (digits, 10)
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    // A number that is too large becomes the largest one (`LLONG_MAX`).
    let most = i64::MAX.unsigned_abs();
    let number = u64::from_str_radix(digits, radix).unwrap_or(most).min(most);
    number.checked_mul(1 << shift).filter(|size| *size <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Invalid versions, and versions of no known series, have no series.
    #[test]
    fn series() {
        assert_eq!(Series::parse("3.4.7"), Some(Series(3, 4)));
        assert_eq!(Series::parse("4.1.0dev"), Some(Series(4, 1)));
        for unknown in ["2.1.10", "2.8.0", "3.5.0", "4.2.0", "1.9.3", "", "x", "3", "3.", "-3.1"] {
            assert_eq!(Series::parse(unknown), None, "{unknown}");
        }
    }

    /// Texts are read as Ruby reads them.
    #[test]
    fn texts() {
        let series = Series(3, 3);
        let limit = variable("RUBY_GC_MALLOC_LIMIT").unwrap();
        for (text, value) in [("16000000", 16e6), ("16m", 16.0 * MIB), ("0x10", 16.0), ("010k ", 8192.0)] {
            assert_eq!(limit.parse(text, series), Some(value), "{text}");
        }
        for text in [
            "",
            "0",
            "-1",
            "1_000",
            "49174003.5",
            "1mm",
            "m",
            "0x",
            "09",
            "ten",
            "99999999999999999999m",
            "8g g",
        ] {
            assert_eq!(limit.parse(text, series), None, "{text}");
        }
        assert_eq!(limit.parse("99999999999999999999", series), Some(i64::MAX as f64));
        let growth = variable("RUBY_GC_HEAP_GROWTH_FACTOR").unwrap();
        for (text, value) in [(" 1.5", 1.5), ("0x10", 16.0), ("1e3", 1000.0)] {
            assert_eq!(growth.parse(text, series), Some(value), "{text}");
        }
        for text in ["1.5 ", "5.", "5.e1", "1_0", "nan", "0x", "0x1_0"] {
            assert_eq!(growth.parse(text, series), None, "{text}");
        }
        assert_eq!(
            ["1.2", "1.0", "inf", "5."].map(|text| growth.parse(text, Series(3, 4))),
            [Some(1.2), None, None, Some(5.0)]
        );
    }
}
