//! What the count of old objects misses: objects without a write barrier, which never become old, and memory owned by strings and arrays.
//!
//! No bit says in all releases which objects without a write barrier survived a major collection: up to 3.2 the uncollectible bit is set for
//! those that an old object refers to (`rgengc_check_relation`, gc.c), and from 3.3 on only for those that lost their barrier while they were
//! old (`rb_gc_writebarrier_unprotect`). So they are not judged: only their number, including garbage, is reported.

use std::collections::BTreeMap;

use gctrace_tunemygc::printable::printable;
use serde::Serialize;

use crate::words::{data_size, plural};

/// Maximum number of classes that are named.
const TOLD: usize = 3;
/// Minimum growth in standard deviations of such counts (Poisson), the same as for old objects.
const SIGMAS: f64 = 5.0;
/// Minimum growth of owned memory to be reported, bytes; it must also grow by a tenth.
const OWNED: u64 = 1 << 20;

/// A class that has more at the last census than at the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct More {
    pub(super) name: String,
    pub(super) before: u64,
    pub(super) after: u64,
}

impl More {
    fn more(&self) -> u64 {
        self.after - self.before
    }

    fn all<'a>(
        before: &'a BTreeMap<String, u64>,
        after: &'a BTreeMap<String, u64>,
        is_growth: impl Fn(u64, u64) -> bool,
    ) -> Vec<Self> {
        let of = |(name, after): (&String, &u64)| {
            let before = before.get(name).copied().unwrap_or(0);
            let more = Self { name: name.clone(), before, after: *after };
            (before < *after && is_growth(before, *after)).then_some(more)
        };
        let mut all: Vec<Self> = after.iter().filter_map(of).collect();
        all.sort_by_key(|more| std::cmp::Reverse(more.more()));
        all
    }

    /// Classes whose number of objects without a write barrier grew.
    pub(super) fn unprotected(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<Self> {
        Self::all(before, after, |before, after| {
            (after - before) as f64 > SIGMAS * (before as f64 + after as f64).sqrt()
        })
    }

    /// Classes whose memory outside their slots grew.
    pub(super) fn owned(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<Self> {
        Self::all(before, after, |before, after| after - before >= (before / 10).max(OWNED))
    }
}

/// The text about objects without a write barrier; `None` if none grew.
pub(super) fn unprotected_words(more: &[More]) -> Option<[String; 2]> {
    let sum = plural(more.iter().map(More::more).sum(), "more object");
    let names = told(more, |one| format!("{} {} to {}", printable(&one.name), one.before, one.after))?;
    Some([
        format!("not watched: {sum} without write barrier than at the first census ({names})"),
        "  such objects never become old; garbage that no GC has found yet is counted, too".to_owned(),
    ])
}

/// The text about memory that strings and arrays own; `None` if none grew.
pub(super) fn owned_words(more: &[More]) -> Option<String> {
    let bytes = |one: &More| {
        format!("{} {} to {}", printable(&one.name), data_size(one.before), data_size(one.after))
    };
    told(more, bytes).map(|names| format!("  memory of strings and arrays outside of their slots: {names}"))
}

fn told(more: &[More], words: impl Fn(&More) -> String) -> Option<String> {
    let names: Vec<String> = more.iter().take(TOLD).map(words).collect();
    let names = names.join(", ");
    match more.len().saturating_sub(TOLD) as u64 {
        _ if more.is_empty() => None,
        0 => Some(names),
        others => Some(format!("{names}, {}", plural(others, "other class"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<const N: usize>(rows: [(&str, u64); N]) -> BTreeMap<String, u64> {
        rows.map(|(name, count)| (name.to_owned(), count)).into()
    }

    /// Growing numbers of objects without a write barrier are reported by class, largest growth first; variation is not.
    #[test]
    fn unprotected() {
        let before = of([("File", 10), ("Time", 1000), ("Method", 5)]);
        let after = of([("File", 220), ("Time", 1100), ("Method", 5), ("Random", 90), ("A", 80), ("B", 70)]);
        let more = More::unprotected(&before, &after);
        assert_eq!(
            unprotected_words(&more).unwrap(),
            [
                "not watched: 450 more objects without write barrier than at the first census (File 10 to 220, \
                 Random 0 to 90, A 0 to 80, 1 other class)",
                "  such objects never become old; garbage that no GC has found yet is counted, too",
            ]
        );
        assert_eq!(unprotected_words(&More::unprotected(&after, &before)), None);
    }

    /// Growing memory of strings is reported by class.
    #[test]
    fn owned() {
        let before = of([("String", 18_000_000), ("Array", 5_000_000)]);
        let after = of([("String", 95_000_000), ("Array", 5_400_000)]);
        assert_eq!(
            owned_words(&More::owned(&before, &after)).unwrap(),
            "  memory of strings and arrays outside of their slots: String 17.2 MiB to 90.6 MiB"
        );
        assert_eq!(owned_words(&[]), None);
    }
}
