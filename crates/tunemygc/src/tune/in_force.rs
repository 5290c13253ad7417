//! The settings that a Ruby actually follows: for advice, two environments with the same settings are one.

use std::{collections::BTreeMap, fmt};

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::ruby::{Kind, Series, Variable, variable};

/// The `RUBY_GC_*` settings that a Ruby follows: known to its series, accepted by it, and different from its defaults.
///
/// Values are bytes, slots, factors or ratios, in the unit of the variable.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InForce(BTreeMap<&'static str, f64>);

const MIN: &str = "RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO";
const GOAL: &str = "RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO";
const MAX: &str = "RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO";

/// Values that a variable accepts, given the others that are set: above `above` and at most `most`; also 0 if `zero`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limits {
    pub(super) above: f64,
    pub(super) most: f64,
    pub(super) zero: bool,
}

impl Limits {
    pub(super) fn take(self, value: f64) -> bool {
        (self.zero && value == 0.0) || (value > self.above && value <= self.most)
    }
}

impl InForce {
    /// The settings of an environment.
    pub fn of(environment: &BTreeMap<String, String>, series: Series) -> Self {
        let mut in_force = Self::default();
        // Ruby reads the three ratios of free slots in this order, and each limits the next (`rb_gc_impl_set_params`).
        let place = |name: &str| match name {
            MIN => 1,
            MAX => 2,
            GOAL => 3,
            _ => 0,
        };
        let mut ordered: Vec<_> = environment.iter().collect();
        ordered.sort_by_key(|(name, _)| place(name));
        for (name, text) in ordered {
            let Some(variable) = variable(name).filter(|variable| variable.is_read_by(series)) else {
                continue;
            };
            let value = variable.parse(text, series).filter(|value| in_force.limits(variable).take(*value));
            if let Some(value) = value {
                in_force.set(variable, value);
            }
        }
        in_force
    }

    /// The values of a variable that the settings read before it permit.
    pub(super) fn limits(&self, variable: &Variable) -> Limits {
        let value = |name: &str| super::ruby::variable(name).map_or(0.0, |variable| self.value(variable));
        match variable.name {
            MIN => Limits { above: 0.0, most: 1.0, zero: false },
            MAX => Limits { above: value(MIN), most: 1.0, zero: false },
            GOAL => Limits { above: value(MIN), most: value(MAX), zero: true },
            _ => Limits { above: f64::NEG_INFINITY, most: f64::INFINITY, zero: true },
        }
    }

    /// Sets a variable, replacing its value.
    pub fn set(&mut self, variable: &'static Variable, value: f64) {
        if is_same(value, variable.default) {
            self.0.remove(variable.name);
        } else {
            self.0.insert(variable.name, value);
        }
    }

    /// The value of a variable that is in force; its default if it is not set.
    pub fn value(&self, variable: &Variable) -> f64 {
        self.0.get(variable.name).copied().unwrap_or(variable.default)
    }

    /// The settings, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().map(|(name, value)| (*name, *value))
    }

    /// Whether Ruby's defaults are in force.
    pub fn is_default(&self) -> bool {
        self.0.is_empty()
    }

    /// The variables in which the two differ.
    pub fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'static Variable> + 'a {
        super::ruby::VARIABLES.iter().filter(|variable| !is_same(self.value(variable), other.value(variable)))
    }

    /// The settings as text, the same for the same settings: `NAME=VALUE` sorted by name and separated by blanks; empty for Ruby's defaults.
    pub fn key(&self) -> String {
        let settings: Vec<String> =
            self.iter().map(|(name, value)| format!("{name}={}", shown(name, value))).collect();
        settings.join(" ")
    }

    /// Parses the output of [`InForce::key`]; anything else is ignored.
    pub fn parse(key: &str, series: Series) -> Self {
        let pairs = key.split(' ').filter_map(|pair| pair.split_once('='));
        Self::of(&pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(), series)
    }
}

/// Whether two values are the same setting.
pub fn is_same(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

/// A size as an integer. The largest that Ruby reads (`LONG_MAX`) is no `f64`: the nearest one is above it, and saturates here.
fn whole(value: f64) -> i64 {
    value.round_ties_even() as i64
}

/// Formats a value as Ruby reads it.
pub fn shown(name: &str, value: f64) -> String {
    let size = variable(name).is_some_and(|variable| variable.kind == Kind::Size);
    if size {
        whole(value).to_string()
    } else if is_same((value * 100.0).round() / 100.0, value) {
        format!("{value:.2}")
    } else {
        value.to_string()
    }
}

/// The name of a variable without the common prefix.
pub fn short(name: &str) -> &str {
    name.strip_prefix("RUBY_GC_").unwrap_or(name)
}

/// Formats a value for people: sizes in bytes get a unit.
pub fn brief(name: &str, value: f64) -> String {
    const MIB: f64 = 1_048_576.0;
    let bytes = name.contains("MALLOC_LIMIT") && !name.ends_with("FACTOR");
    if bytes && value >= MIB && is_same(value % MIB, 0.0) {
        format!("{:.0}M", value / MIB)
    } else {
        shown(name, value)
    }
}

impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_default() {
            return f.write_str("Ruby's defaults");
        }
        let settings: Vec<String> =
            self.iter().map(|(name, value)| format!("{}={}", short(name), brief(name, value))).collect();
        f.write_str(&settings.join(" "))
    }
}

impl Serialize for InForce {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in self.iter() {
            // In the form that Ruby reads: a size has no fraction.
            let size = variable(name).is_some_and(|variable| variable.kind == Kind::Size);
            if size {
                map.serialize_entry(name, &whole(value))?;
            } else {
                map.serialize_entry(name, &value)?;
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(pairs: &[(&str, &str)], series: Series) -> InForce {
        InForce::of(
            &pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            series,
        )
    }

    /// Only settings that the Ruby follows count, however they are written; its defaults and the agent's variables do not.
    #[test]
    fn same_settings() {
        let series = Series(3, 1);
        let plain = of(&[("RUBY_GC_MALLOC_LIMIT", "67108864")], series);
        assert_eq!(plain.key(), "RUBY_GC_MALLOC_LIMIT=67108864");
        let other = [
            ("RUBY_GC_MALLOC_LIMIT", "64m"),
            ("RUBY_GC_HEAP_INIT_SLOTS", "10000"),
            ("RUBY_GC_HEAP_GROWTH_FACTOR", "1.8"),
            ("RUBY_GC_HEAP_0_INIT_SLOTS", "500000"),
            ("RUBY_GC_OLDMALLOC_LIMIT", "1_000"),
            ("RUBY_GC_TUNE", "200"),
            ("RUBY_GC_NO_SUCH", "1"),
        ];
        assert_eq!(of(&other, series), plain);
        assert_eq!(plain.to_string(), "MALLOC_LIMIT=64M");
        let both = of(&[("RUBY_GC_MALLOC_LIMIT", "64m"), ("RUBY_GC_HEAP_GROWTH_FACTOR", "2")], series);
        let json = r#"{"RUBY_GC_HEAP_GROWTH_FACTOR":2.0,"RUBY_GC_MALLOC_LIMIT":67108864}"#;
        assert_eq!(
            serde_json::to_string(&both).unwrap(),
            json,
            "Ruby takes 2.0, but no size with a fraction"
        );
        assert_eq!(of(&[], series).to_string(), "Ruby's defaults");
        let most = of(&[("RUBY_GC_HEAP_INIT_SLOTS", "9223372036854775807")], series);
        assert_eq!(most.key(), "RUBY_GC_HEAP_INIT_SLOTS=9223372036854775807");
        assert_eq!(
            serde_json::to_string(&most).unwrap(),
            r#"{"RUBY_GC_HEAP_INIT_SLOTS":9223372036854775807}"#
        );
    }

    proptest! {
        /// A key identifies its settings, whatever they are.
        #[test]
        fn keys(values in prop::collection::vec((0..super::super::ruby::VARIABLES.len(), "[0-9]{1,12}(\\.[0-9]{1,6})?[km]?"), 0..8)) {
            for series in [Series(2, 7), Series(3, 2), Series(4, 0)] {
                let environment = values.iter()
                    .map(|(at, text)| (super::super::ruby::VARIABLES[*at].name.to_owned(), text.clone())).collect();
                let in_force = InForce::of(&environment, series);
                prop_assert_eq!(InForce::parse(&in_force.key(), series), in_force);
            }
        }

        /// Any text can be parsed.
        #[test]
        fn strange_keys(key in ".*") {
            let in_force = InForce::parse(&key, Series(3, 4));
            prop_assert_eq!(InForce::parse(&in_force.key(), Series(3, 4)), in_force);
        }
    }
}
