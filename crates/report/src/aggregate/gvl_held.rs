//! What holders of the GVL did while other threads waited, kept until the records of those waits arrive. Pure.

use std::collections::{HashMap, VecDeque};

use crate::model::stack::Stack;

/// Maximum number of stacks remembered per process: the wait follows at once, unless other threads held the GVL in between.
const MOST: usize = 64;

/// Maximum number of samples remembered per process: the last 10 s of a thread that runs all the time, at 99 per second.
const MOST_SAMPLES: usize = 1024;
/// Maximum number of distinct stacks reported per wait.
const MOST_TOLD: usize = 8;

/// The stacks and samples of a process.
#[derive(Debug, Default)]
pub struct Held {
    /// Stacks of threads when they released the GVL, latest first.
    ends: VecDeque<End>,
    /// Samples of threads that held it: thread, time in nanoseconds and stack, ordered by time.
    samples: VecDeque<(u32, u64, Stack)>,
}

#[derive(Debug)]
struct End {
    tid: u32,
    ts_ns: u64,
    stack: Stack,
    named: bool,
}

/// A stack that was found.
#[derive(Debug)]
pub struct HolderStack {
    /// The stack, leaf first.
    pub stack: Stack,
    /// Whether this is the first time that it was found.
    pub first: bool,
}

impl Held {
    /// Remembers a stack. Returns the number of stacks evicted for it that were never looked up.
    pub fn keep(&mut self, tid: u32, ts_ns: u64, stack: Stack) -> u64 {
        self.ends.push_front(End { tid, ts_ns, stack, named: false });
        let beyond = if self.ends.len() > MOST { self.ends.pop_back() } else { None };
        u64::from(beyond.is_some_and(|end| !end.named))
    }

    /// Looks up the stack with which a thread released the GVL at that time.
    pub fn find(&mut self, tid: u32, ts_ns: u64) -> Option<HolderStack> {
        let end = self.ends.iter_mut().find(|end| end.tid == tid && end.ts_ns == ts_ns)?;
        let first = !std::mem::replace(&mut end.named, true);
        Some(HolderStack { stack: end.stack.clone(), first })
    }

    /// Remembers a sample of a thread.
    pub fn sample(&mut self, tid: u32, ts_ns: u64, stack: Stack) {
        if self.samples.len() >= MOST_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back((tid, ts_ns, stack));
    }

    /// What a thread was doing in an interval: number of samples, and stack; most frequent first.
    pub fn ran(&self, tid: u32, begin_ns: u64, end_ns: u64) -> Vec<(u64, Stack)> {
        let mut counts: HashMap<&Stack, u64> = HashMap::new();
        let later = self.samples.iter().rev().take_while(|(_, ts_ns, _)| *ts_ns >= begin_ns);
        for (_, _, stack) in later.filter(|(its, ts_ns, _)| *its == tid && *ts_ns <= end_ns) {
            *counts.entry(stack).or_default() += 1;
        }
        let mut ran: Vec<(u64, Stack)> =
            counts.into_iter().map(|(stack, count)| (count, stack.clone())).collect();
        ran.sort_unstable_by(|a, b| b.cmp(a));
        ran.truncate(MOST_TOLD);
        ran
    }

    /// Number of remembered stacks that were never looked up.
    pub fn unclaimed(&self) -> u64 {
        self.ends.iter().filter(|end| !end.named).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::stack::{Frame, FrameKind};

    /// A stack is found by thread and time any number of times, counts once, and is evicted when it is old.
    #[test]
    fn held() {
        let mut held = Held::default();
        for at in 0..MOST as u64 {
            assert_eq!(held.keep(7, at, Stack::from([])), 0);
        }
        assert!(held.find(8, 3).is_none() && held.find(7, 1000).is_none());
        assert!(held.find(7, 0).unwrap().first && held.find(7, 3).unwrap().first);
        assert!(!held.find(7, 3).unwrap().first);
        // The oldest has been looked up, the next one has not.
        assert_eq!((held.keep(7, 100, Stack::from([])), held.keep(7, 101, Stack::from([]))), (0, 1));
        assert!(held.find(7, 1).is_none());
        assert_eq!(held.unclaimed(), MOST as u64 - 1);
    }

    /// Only samples of the thread in that interval are reported, most frequent first, and old samples are evicted.
    #[test]
    fn ran() {
        let stack = |name: &str| {
            let (name, kind) = (Arc::from(name), FrameKind::Ruby);
            Stack::from([Arc::new(Frame { kind, name, file: None, line: 1, first_line: 1, address: 0 })])
        };
        let mut held = Held::default();
        let seen = [(7, 10, "a"), (7, 20, "b"), (8, 25, "x"), (7, 30, "c"), (7, 40, "b"), (7, 50, "d")];
        for (tid, ts_ns, name) in seen {
            held.sample(tid, ts_ns, stack(name));
        }
        assert_eq!(held.ran(7, 20, 40), [(2, stack("b")), (1, stack("c"))]);
        assert!(held.ran(7, 51, 90).is_empty() && held.ran(9, 0, 90).is_empty());
        for at in 0..MOST_SAMPLES as u64 {
            held.sample(7, 100 + at, stack("e"));
        }
        assert_eq!(held.ran(7, 0, u64::MAX), [(MOST_SAMPLES as u64, stack("e"))]);
    }
}
