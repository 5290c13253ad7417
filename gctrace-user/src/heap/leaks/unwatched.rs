//! What old objects do not show: objects without write barrier, which never become old, and memory that strings and arrays own.
//!
//! Which objects without write barrier survived a major collection, no bit says in all releases: the uncollectible bit is set for those that
//! an old object refers to up to 3.2 (`rgengc_check_relation`, gc.c), and from 3.3 on only for those that lost their barrier while they were
//! old (`rb_gc_writebarrier_unprotect`). So they are not judged: how many there are, garbage included, is all that is said.

use std::collections::BTreeMap;

use gctrace_tunemygc::printable::printable;
use serde::Serialize;

use crate::words::{data_size, plural};

/// Classes that are told.
const TOLD: usize = 3;
/// The growth must be this many times what such counts vary by (Poisson), as that of old objects must.
const SIGMAS: f64 = 5.0;
/// Owned memory must grow by so much to be told, bytes, and by a tenth.
const OWNED: u64 = 1 << 20;

/// A class of which there is more at the last census than at the first.
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

    /// Classes with more objects without write barrier.
    pub(super) fn unprotected(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<Self> {
        Self::all(before, after, |before, after| {
            (after - before) as f64 > SIGMAS * (before as f64 + after as f64).sqrt()
        })
    }

    /// Classes that own more memory outside of their slots.
    pub(super) fn owned(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<Self> {
        Self::all(before, after, |before, after| after - before >= (before / 10).max(OWNED))
    }
}

/// What is said of objects without write barrier.
pub(super) fn unprotected_words(more: &[More]) -> Option<[String; 2]> {
    let sum = plural(more.iter().map(More::more).sum(), "more object");
    let names = told(more, |one| format!("{} {} to {}", printable(&one.name), one.before, one.after))?;
    Some([
        format!("not watched: {sum} without write barrier than at the first census ({names})"),
        "  such objects never become old; garbage that no GC has found yet is counted, too".to_owned(),
    ])
}

/// What is said of memory that strings and arrays own.
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

    /// Objects without write barrier that grew are told by class, the most first; those that vary are not.
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

    /// Memory of strings that grow is told by class.
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
