//! `RUBY_GC_*` variables that do not have the effect their author expected.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    InForce,
    ruby::{Kind, Series, VARIABLES, variable},
};

/// A variable that this Ruby does not follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unheeded {
    /// Its name.
    pub variable: String,
    /// Its value.
    pub value: String,
    /// Why it has no effect, and what would have one.
    pub reason: String,
}

/// Whether a variable has a name that Ruby or a user could mean: `A` to `Z`, `0` to `9` and `_`, at most 64 characters. Other
/// names are refused, because names are shown and come from outside.
pub fn is_name(name: &str) -> bool {
    name.len() <= 64 && name.bytes().all(|byte| matches!(byte, b'A'..=b'Z' | b'0'..=b'9' | b'_'))
}

/// Whether a variable belongs to the TuneMyGC agent and not to Ruby.
pub fn is_agents(name: &str) -> bool {
    matches!(name, "RUBY_GC_TOKEN" | "RUBY_GC_TUNE" | "RUBY_GC_SPY" | "RUBY_GC_MAX_SAMPLES")
        || name.starts_with("RUBY_GC_TUNE_")
        || name.starts_with("RUBY_GC_SYNC_")
}

/// The variables of an environment that a Ruby of this series does not follow.
pub fn unheeded(environment: &BTreeMap<String, String>, series: Series) -> Vec<Unheeded> {
    let ours = environment
        .iter()
        .filter(|(name, _)| name.starts_with("RUBY_GC_") && is_name(name) && !is_agents(name));
    let in_force = InForce::of(environment, series);
    ours.filter_map(|(name, value)| {
        let reason = reason(name, value, series).or_else(|| beside_others(name, value, series, &in_force))?;
        Some(Unheeded { variable: name.clone(), value: value.clone(), reason })
    })
    .collect()
}

fn reason(name: &str, value: &str, series: Series) -> Option<String> {
    let Some(known) = variable(name) else {
        let nearest = VARIABLES
            .iter()
            .filter(|other| other.is_read_by(series))
            .map(|other| (distance(name, other.name), other.name))
            .min()
            .filter(|(distance, _)| *distance <= 6);
        let hint = nearest.map_or_else(String::new, |(_, nearest)| format!("; is {nearest} meant?"));
        return Some(format!("no Ruby knows it{hint}"));
    };
    if !known.is_read_by(series) {
        let by = match (known.from, known.until) {
            (from, until) if from == until => format!("{from} does"),
            (from, until) => format!("{from} to {until} do"),
        };
        return Some(format!("Ruby {series} does not read it, only {by}{}", instead(name, series)));
    }
    let needs = match known.kind {
        Kind::Text => return None,
        Kind::Size => "an integer above 0, optionally followed by k, m or g (no fraction, no `_`)",
        Kind::Growth => "a number above 1.0",
        Kind::Factor => "a number not below 0",
        Kind::Ratio => "a number from 0 to 1",
    };
    known
        .parse(value, series)
        .is_none()
        .then(|| format!("Ruby silently ignores this value: it takes {needs}"))
}

/// Why Ruby ignores a value that is valid by itself.
fn beside_others(name: &str, value: &str, series: Series, in_force: &InForce) -> Option<String> {
    let known = variable(name)?;
    let (value, limits) = (known.parse(value, series)?, in_force.limits(known));
    (!limits.take(value)).then(|| {
        let zero = if limits.zero { ", or 0" } else { "" };
        format!(
            "Ruby silently ignores this value: beside the other ratios it takes a number above {:.2}, up to {:.2}{zero}",
            limits.above, limits.most
        )
    })
}

fn instead(name: &str, series: Series) -> &'static str {
    match (name, series) {
        ("RUBY_GC_HEAP_INIT_SLOTS", Series(3, _) | Series(4, 0)) => {
            "; it has RUBY_GC_HEAP_0_INIT_SLOTS to RUBY_GC_HEAP_4_INIT_SLOTS, one for each size of slots"
        }
        (name, Series(4, 1)) if name.ends_with("_INIT_SLOTS") => "; it has RUBY_GC_HEAP_INIT_BYTES",
        ("RUBY_GC_HEAP_GROWTH_MAX_SLOTS", Series(4, 1)) => "; it has RUBY_GC_HEAP_GROWTH_MAX_BYTES",
        _ => "",
    }
}

/// The Levenshtein distance of two names. Names are short.
fn distance(from: &str, to: &str) -> usize {
    let (from, to) = (&from.as_bytes()[..from.len().min(80)], to.as_bytes());
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, a) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = line + 1;
        for (at, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[at + 1];
            row[at + 1] = replaced.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason_of(name: &str, value: &str, series: Series) -> Option<String> {
        let environment = BTreeMap::from([(name.to_owned(), value.to_owned())]);
        unheeded(&environment, series).pop().map(|unheeded| unheeded.reason)
    }

    /// Misspelt, outdated and unreadable variables are reported with what would work; valid ones and the agent's are not.
    #[test]
    fn reasons() {
        let now = Series(3, 4);
        let reason = reason_of("RUBY_GC_HEAP_SLOTS_GROWTH_FACTOR", "1.1", now).unwrap();
        assert!(reason.contains("is RUBY_GC_HEAP_GROWTH_FACTOR meant"), "{reason}");
        let reason = reason_of("RUBY_GC_HEAP_INIT_SLOTS", "100000", now).unwrap();
        assert!(reason.contains("HEAP_0_INIT_SLOTS"), "{reason}");
        // One series, and several.
        let reason = reason_of("RUBY_GC_HEAP_INIT_BYTES", "100000", Series(3, 1)).unwrap();
        assert_eq!(reason, "Ruby 3.1 does not read it, only 4.1 does");
        let reason = reason_of("RUBY_GC_HEAP_0_INIT_SLOTS", "100000", Series(3, 1)).unwrap();
        assert!(
            reason.contains("does not read it, only 3.")
                && reason.contains(" to ")
                && reason.ends_with(" do"),
            "{reason}"
        );
        assert!(reason_of("RUBY_GC_MALLOC_LIMIT", "49174003.5", now).unwrap().contains("no fraction"));
        assert!(reason_of("RUBY_GC_ENTIRELY_DIFFERENT_THING", "1", now).unwrap().ends_with("knows it"));
        for (name, value) in [
            ("RUBY_GC_MALLOC_LIMIT", "16m"),
            ("RUBY_GC_LIBRARY", "default"),
            ("RUBY_GC_TUNE_HOST", "localhost"),
            ("RUBY_GC_TOKEN", "x"),
            ("MY_RUBY_GC_THING", "x"),
        ] {
            assert_eq!(reason_of(name, value, now), None, "{name}");
        }
        assert_eq!(reason_of("RUBY_GC_HEAP_INIT_SLOTS", "100000", Series(3, 1)), None);
        for name in [
            "RUBY_GC_X\n  For speed:",
            "RUBY_GC_x",
            "RUBY_GC_\u{202e}",
            &format!("RUBY_GC_{}", "X".repeat(99)),
        ] {
            assert_eq!(reason_of(name, "1", now), None, "{name:?}");
        }
    }
}
