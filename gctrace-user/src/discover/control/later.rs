//! What makes a process a server after its mappings were seen: its parent turns out to be one, or it takes the title of one.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

/// Maximum number of forks that are remembered.
const FORKS: usize = 4096;
/// Maximum number of processes whose title is awaited.
const WAITING: usize = 1024;
/// For how long it is awaited: an application that boots slowly takes minutes.
const BOOT: Duration = Duration::from_mins(10);

/// The latest forks. A child has the mappings of its parent, and no record of them: if the parent is only then found to be a server, so is the
/// child.
#[derive(Default)]
pub(super) struct Forks(VecDeque<(u32, u32)>);

impl Forks {
    pub(super) fn add(&mut self, forks: &[(u32, u32)]) {
        self.0.extend(forks);
        self.0.drain(..self.0.len().saturating_sub(FORKS));
    }

    /// The children of a process among them.
    pub(super) fn children(&self, parent: u32) -> Vec<u32> {
        self.0.iter().filter(|(of, _)| *of == parent).map(|(_, child)| *child).collect()
    }
}

/// Processes that may take the title of a Sidekiq: its launcher can have any name.
#[derive(Default)]
pub(super) struct Untitled(HashMap<u32, Instant>);

impl Untitled {
    pub(super) fn add(&mut self, pid: u32, now: Instant) {
        if self.0.len() < WAITING {
            self.0.entry(pid).or_insert(now);
        }
    }

    pub(super) fn has(&self, pid: u32) -> bool {
        self.0.contains_key(&pid)
    }

    /// Takes the processes that have the title by now, and drops those that are gone or have waited for too long.
    pub(super) fn titled(
        &mut self,
        now: Instant,
        is_running: impl Fn(u32) -> bool,
        has_title: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        let mut found = Vec::new();
        self.0.retain(|&pid, since| {
            let has = has_title(pid);
            found.extend(has.then_some(pid));
            !has && now.saturating_duration_since(*since) < BOOT && is_running(pid)
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Children of one parent, old ones first; the oldest forks are forgotten.
    #[test]
    fn forks() {
        let mut forks = Forks::default();
        forks.add(&[(1, 2), (1, 3), (2, 4)]);
        forks.add(&[(1, 5)]);
        assert_eq!(
            (forks.children(1), forks.children(2), forks.children(3)),
            (vec![2, 3, 5], vec![4], vec![])
        );
        forks.add(&vec![(9, 10); FORKS - 1]);
        assert_eq!((forks.children(1), forks.children(9).len()), (vec![5], FORKS - 1));
    }

    /// A title counts once, however late within the time; processes that are gone are forgotten.
    #[test]
    fn titles() {
        let mut untitled = Untitled::default();
        let begin = Instant::now();
        for pid in [1, 2, 3] {
            untitled.add(pid, begin);
        }
        let later = begin + BOOT / 2;
        untitled.add(1, later);
        assert_eq!(untitled.titled(later, |pid| pid != 3, |pid| pid == 2), [2]);
        assert_eq!(untitled.0.keys().copied().collect::<Vec<_>>(), [1]);
        assert!(untitled.titled(begin + BOOT, |_| true, |_| false).is_empty() && untitled.0.is_empty());
        for pid in 0..2 * WAITING as u32 {
            untitled.add(pid, begin);
        }
        assert_eq!(untitled.0.len(), WAITING);
    }
}
