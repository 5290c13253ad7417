//! Allocation of chunk numbers: which are free, and which must rest before they are written again.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// A chunk that was recently in use may still be read by a running program; no program runs for this long.
const REST: Duration = Duration::from_secs(2);

/// A run of consecutive chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub first: u32,
    pub count: u32,
}

/// Allocates runs of chunks. Number 0 is never allocated.
#[derive(Debug)]
pub(super) struct Arena {
    /// First number and length of each free run; no two are adjacent.
    free: BTreeMap<u32, u32>,
    resting: VecDeque<(Instant, Run)>,
}

impl Arena {
    pub(super) fn new(size: u32) -> Self {
        let free = (size > 1).then(|| (1, size - 1));
        Self { free: free.into_iter().collect(), resting: VecDeque::new() }
    }

    /// Allocates a run of `count` chunks.
    pub(super) fn take(&mut self, count: u32, now: Instant) -> Option<Run> {
        let (first, len) = self.find(count, now)?;
        self.free.remove(&first);
        self.add(Run { first: first + count, count: len - count });
        Some(Run { first, count })
    }

    /// Whether a run of `count` chunks is free.
    pub(super) fn has(&mut self, count: u32, now: Instant) -> bool {
        self.find(count, now).is_some()
    }

    /// First number and length of a sufficiently long free run.
    fn find(&mut self, count: u32, now: Instant) -> Option<(u32, u32)> {
        while let Some(&(since, run)) = self.resting.front()
            && now.duration_since(since) >= REST
        {
            self.resting.pop_front();
            self.add(run);
        }
        self.free.iter().find(|(_, len)| **len >= count).map(|(&first, &len)| (first, len))
    }

    /// Releases a run that nothing refers to any more.
    pub(super) fn give_back(&mut self, run: Run, now: Instant) {
        self.resting.push_back((now, run));
    }

    fn add(&mut self, mut run: Run) {
        if run.count == 0 {
            return;
        }
        if let Some(behind) = self.free.remove(&(run.first + run.count)) {
            run.count += behind;
        }
        if let Some((&first, before)) = self.free.range_mut(..run.first).next_back()
            && first + *before == run.first
        {
            *before += run.count;
            return;
        }
        self.free.insert(run.first, run.count);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Runs in use never overlap and never contain number 0; a released run is not allocated before its rest; at the end
        /// everything is one run again.
        #[test]
        fn runs(steps in prop::collection::vec((1_u32..9, any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
            let mut now = Instant::now();
            let mut arena = Arena::new(64);
            let mut used: Vec<Run> = Vec::new();
            let mut resting: Vec<(Instant, Run)> = Vec::new();
            for (count, index, take) in steps {
                now += Duration::from_millis(500);
                resting.retain(|(since, _)| now.duration_since(*since) < REST);
                if take {
                    if let Some(run) = arena.take(count, now) {
                        prop_assert!(run.first > 0 && run.count == count && run.first + count <= 64);
                        let apart = |other: &Run| run.first + run.count <= other.first || other.first + other.count <= run.first;
                        prop_assert!(used.iter().chain(resting.iter().map(|(_, run)| run)).all(apart));
                        used.push(run);
                    }
                } else if !used.is_empty() {
                    let run = used.swap_remove(index.index(used.len()));
                    arena.give_back(run, now);
                    resting.push((now, run));
                }
                let longest = arena.has(0, now).then(|| arena.free.values().copied().max()).flatten().unwrap_or(0);
                prop_assert!((1..9).all(|count| arena.has(count, now) == (count <= longest)));
                let taken = used.iter().chain(resting.iter().map(|(_, run)| run)).map(|run| run.count).sum::<u32>();
                prop_assert_eq!(63 - arena.free.values().sum::<u32>(), taken);
            }
            used.drain(..).for_each(|run| arena.give_back(run, now));
            prop_assert_eq!(arena.take(63, now + REST), Some(Run { first: 1, count: 63 }));
        }
    }

    /// Without room, nothing can be allocated.
    #[test]
    fn empty() {
        for size in [0, 1] {
            assert_eq!(Arena::new(size).take(1, Instant::now()), None);
        }
    }
}
