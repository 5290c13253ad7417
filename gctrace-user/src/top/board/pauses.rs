//! GC pauses of the last minute. The longest is exact. The 99th percentile is exact if there are few pauses, otherwise at most 1 % too high.

use std::collections::{BTreeMap, VecDeque};

use super::{SECOND, WINDOW, bounded};

/// Maximum number of pauses of one process that are kept individually.
const MOST: usize = 4096;

/// The pauses that became known in one second.
#[derive(Clone, Debug)]
struct OneSecond {
    /// Second since boot.
    at: u64,
    longest_ns: u64,
    /// Number of pauses, by class of length.
    counts: BTreeMap<u16, u32>,
}

/// The pauses of a process.
#[derive(Clone, Debug, Default)]
pub(super) struct Pauses {
    /// Time at which each became known, and its length, nanoseconds.
    last: VecDeque<(u64, u64)>,
    /// When the newest evicted pause became known, nanoseconds.
    dropped_ns: Option<u64>,
    seconds: VecDeque<OneSecond>,
}

impl Pauses {
    /// Adds a pause that becomes known at this time.
    pub(super) fn add(&mut self, now_ns: u64, ns: u64) {
        if self.last.len() >= MOST {
            self.dropped_ns = self.last.front().map(|(at_ns, _)| *at_ns);
        }
        bounded(&mut self.last, (now_ns, ns), MOST);
        let at = now_ns / SECOND;
        if self.seconds.back().is_none_or(|second| second.at < at) {
            bounded(&mut self.seconds, OneSecond { at, longest_ns: 0, counts: BTreeMap::new() }, WINDOW);
        }
        if let Some(second) = self.seconds.back_mut() {
            second.longest_ns = second.longest_ns.max(ns);
            let count = second.counts.entry(class(ns)).or_default();
            *count = count.saturating_add(1);
        }
    }
}

/// The 99th percentile of all these pauses of the last minute, and the longest, nanoseconds.
pub(super) fn longest<'a>(
    all: impl Iterator<Item = &'a Pauses> + Clone,
    now_ns: u64,
) -> (Option<u64>, Option<u64>) {
    let from_ns = now_ns.saturating_sub(WINDOW as u64 * SECOND);
    if all.clone().any(|of| of.dropped_ns.is_some_and(|dropped_ns| dropped_ns >= from_ns)) {
        return by_class(all, from_ns / SECOND);
    }
    let recent = all.flat_map(|of| &of.last).filter(|(at_ns, _)| *at_ns >= from_ns);
    let mut lengths: Vec<u64> = recent.map(|(_, ns)| *ns).collect();
    lengths.sort_unstable();
    (rank(lengths.len()).and_then(|at| lengths.get(at).copied()), lengths.last().copied())
}

/// The same from classes of length, for the seconds after `after`.
fn by_class<'a>(all: impl Iterator<Item = &'a Pauses>, after: u64) -> (Option<u64>, Option<u64>) {
    let mut counts = BTreeMap::<u16, usize>::new();
    let mut longest_ns = 0;
    for second in all.flat_map(|of| &of.seconds).filter(|second| second.at > after) {
        longest_ns = longest_ns.max(second.longest_ns);
        for (class, count) in &second.counts {
            *counts.entry(*class).or_default() += *count as usize;
        }
    }
    let Some(rank) = rank(counts.values().sum()) else { return (None, None) };
    let mut passed = 0;
    let class = counts.into_iter().find_map(|(class, count)| {
        passed += count;
        (passed > rank).then_some(class)
    });
    (class.map(|class| end(class).min(longest_ns)), Some(longest_ns))
}

/// Index of the 99th percentile among this many values in ascending order.
fn rank(count: usize) -> Option<usize> {
    (count * 99).div_ceil(100).checked_sub(1)
}

/// The class of a length: its first eight binary digits, and how many follow.
fn class(ns: u64) -> u16 {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(8);
    (shift * 128) as u16 + (ns >> shift) as u16
}

/// The largest length of a class, nanoseconds.
fn end(class: u16) -> u64 {
    let shift = (class / 128).saturating_sub(1);
    let digits = u64::from(class - shift * 128);
    ((digits + 1) << shift).wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each length is in a class whose end is at least the length, and larger by less than 1 %.
    #[test]
    fn classes() {
        let mut last = None;
        for ns in (0..1000).chain((10..64).flat_map(|bit| {
            let power = 1_u64 << bit;
            [power - 1, power, power + power / 3, power + (power - 1)]
        })) {
            let (class, end) = (class(ns), end(class(ns)));
            assert!(end >= ns && end - ns <= ns / 128, "{ns}: {class}, {end}");
            assert!(last.is_none_or(|(before, at)| before > ns || at <= class), "{ns}");
            last = Some((ns, class));
        }
        assert_eq!(end(class(u64::MAX)), u64::MAX);
    }

    /// With few pauses all is exact. With many the longest is, as long as it is in the last minute, and the percentile nearly is.
    #[test]
    fn many() {
        let begun_ns = 1000 * SECOND;
        let mut pauses = Pauses::default();
        for n in 1..=200 {
            pauses.add(begun_ns, n * 1000);
        }
        let of = |pauses: &Pauses, now_ns| longest(std::iter::once(pauses), now_ns);
        assert_eq!(of(&pauses, begun_ns + SECOND), (Some(198_000), Some(200_000)));
        let mut busy = Pauses::default();
        busy.add(begun_ns, 31_000_000);
        for n in 0..30_000 {
            busy.add(begun_ns + n * SECOND / 1000, 50_000 + n % 100 * 1000);
        }
        let (p99, max) = of(&busy, begun_ns + 31 * SECOND);
        assert_eq!(max, Some(31_000_000));
        assert!((149_000..=149_000 + 149_000 / 128).contains(&p99.unwrap()), "{p99:?}");
        let both = longest([&pauses, &busy].into_iter(), begun_ns + 31 * SECOND);
        assert_eq!(both.1, Some(31_000_000));
        let (p99, max) = of(&busy, begun_ns + 62 * SECOND);
        assert!(p99.is_some() && max == Some(149_000), "{p99:?} {max:?}");
        assert_eq!(of(&busy, begun_ns + 100 * SECOND), (None, None));
        assert!(busy.last.len() == MOST && busy.seconds.len() <= WINDOW);
    }
}
