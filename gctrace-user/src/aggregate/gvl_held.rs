//! Where threads were when they gave up the GVL, until the waits that ended with that have come. Pure.

use std::collections::VecDeque;

use crate::model::stack::Stack;

/// How many are remembered of a process: a wait comes right behind, unless other threads held the GVL in between.
const MOST: usize = 64;

/// Those of a process, the last one first.
#[derive(Debug, Default)]
pub struct Held(VecDeque<One>);

#[derive(Debug)]
struct One {
    tid: u32,
    end_ns: u64,
    stack: Stack,
    named: bool,
}

/// One that has been found.
#[derive(Debug)]
pub struct Found {
    /// The stack, leaf first.
    pub stack: Stack,
    /// Whether it was not found before.
    pub first: bool,
}

impl Held {
    /// Remembers a stack. Returns how many were forgotten for it that nobody has asked for.
    pub fn keep(&mut self, tid: u32, end_ns: u64, stack: Stack) -> u64 {
        self.0.push_front(One { tid, end_ns, stack, named: false });
        let beyond = if self.0.len() > MOST { self.0.pop_back() } else { None };
        u64::from(beyond.is_some_and(|one| !one.named))
    }

    /// The stack with which the thread gave up the GVL at that time.
    pub fn find(&mut self, tid: u32, end_ns: u64) -> Option<Found> {
        let one = self.0.iter_mut().find(|one| one.tid == tid && one.end_ns == end_ns)?;
        let first = !std::mem::replace(&mut one.named, true);
        Some(Found { stack: one.stack.clone(), first })
    }

    /// Those that nobody has asked for.
    pub fn unclaimed(&self) -> u64 {
        self.0.iter().filter(|one| !one.named).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each is found by its thread and time as often as one asks, is counted once, and makes room when it is old.
    #[test]
    fn held() {
        let mut held = Held::default();
        for at in 0..MOST as u64 {
            assert_eq!(held.keep(7, at, Stack::from([])), 0);
        }
        assert!(held.find(8, 3).is_none() && held.find(7, 1000).is_none());
        assert!(held.find(7, 0).unwrap().first && held.find(7, 3).unwrap().first);
        assert!(!held.find(7, 3).unwrap().first);
        // The oldest has been asked for, the next one has not.
        assert_eq!((held.keep(7, 100, Stack::from([])), held.keep(7, 101, Stack::from([]))), (0, 1));
        assert!(held.find(7, 1).is_none());
        assert_eq!(held.unclaimed(), MOST as u64 - 1);
    }
}
