//! Wait edges of threads that have ended. The kernel side's map has room for the threads of all processes at one time: programs
//! with a thread for each request would fill it.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use gctrace_common::gvl::{GvlEdge, GvlEdgeKey, GvlThread};

use crate::{aggregate::gvl_pairs::GvlPairs, bpf::GvlReader};

/// Minimum number of ended threads whose edges are in the map before these are taken out.
const MANY: usize = 64;
/// After taking them out, the map is not read for this many times as long as that took.
const SELDOM: u32 = 4;
/// Nor for at least this time.
const LEAST: Duration = Duration::from_millis(250);

/// Maximum number of ended threads for which others may still be waiting. All are forgotten above it: what others waited for them then stays in
/// the map until their process ends.
const MOST_HOLDERS: usize = 1 << 18;

/// A thread: process, number of execs, thread.
type Id = (u32, u32, u64);

/// Ended threads of all processes.
#[derive(Default)]
pub(super) struct Ended {
    /// Threads whose edges, as the waiter, are still in the map. Only the thread itself adds to these.
    threads: HashSet<Id>,
    /// Threads for which others may have waited: edges of these are added to when such a wait is over.
    holders: Holders,
    /// Edges taken out of the map, by process and number of execs.
    pairs: HashMap<(u32, u32), GvlPairs>,
    next: Option<Instant>,
}

/// Ended threads that held the GVL.
#[derive(Debug, Default)]
struct Holders {
    /// When they ended, in monotonic nanoseconds.
    ended: HashMap<Id, u64>,
    /// Those of them for which no thread was waiting any more at the last look.
    over: HashSet<Id>,
}

impl Holders {
    fn add(&mut self, id: Id, end_ns: u64) {
        if self.ended.len() >= MOST_HOLDERS {
            *self = Self::default();
        }
        self.ended.insert(id, end_ns);
    }

    /// Removes and returns those whose edges are final. `since`: of each program, since when the first waiting thread has been waiting.
    ///
    /// A wait that began after the end of a thread is not for that thread. A thread that is no longer waiting may not have added its wait yet,
    /// because the programs do that after they have changed the state: so two looks must agree.
    fn take_over(&mut self, since: &HashMap<(u32, u32), u64>) -> HashSet<Id> {
        let is_over =
            |id: &Id, end_ns: u64| since.get(&(id.0, id.1)).is_none_or(|since_ns| *since_ns > end_ns);
        let now = self.ended.iter().filter(|(id, end_ns)| is_over(id, **end_ns)).map(|(id, _)| *id);
        let (taken, over): (HashSet<_>, _) = now.partition(|id| self.over.contains(id));
        self.over = over;
        self.ended.retain(|id, _| !taken.contains(id));
        taken
    }

    fn retain(&mut self, stays: impl Fn(&Id) -> bool) {
        self.ended.retain(|id, _| stays(id));
        self.over.retain(stays);
    }
}

impl Ended {
    /// Records that a thread has ended.
    pub(super) fn thread(&mut self, thread: &GvlThread) {
        let id = (thread.header.tgid, thread.header.execs, thread.id);
        self.threads.insert(id);
        self.holders.add(id, thread.header.ts_ns);
    }

    /// Takes the edges of ended threads out of the map, if there are many threads.
    pub(super) fn take(&mut self, reader: &mut GvlReader) {
        let begun = Instant::now();
        let holders = self.holders.ended.len();
        if self.threads.len().max(holders) < MANY || self.next.is_some_and(|next| begun < next) {
            return;
        }
        let taken = reader.waiting_since().and_then(|since| {
            let over = self.holders.take_over(&since);
            reader.take_ended(&self.threads, &over)
        });
        match taken {
            Ok(edges) => self.keep(&edges),
            // The ledger will not balance.
            Err(error) => log::error!("reading who waited for whom: {error}"),
        }
        self.threads.clear();
        self.next = Some(begun + begun.elapsed().saturating_mul(SELDOM).max(LEAST));
    }

    fn keep(&mut self, edges: &[(GvlEdgeKey, GvlEdge)]) {
        for (key, edge) in edges {
            self.pairs.entry((key.tgid, key.execs)).or_default().add(key.waiter, key.holder, edge);
        }
    }

    /// The threads of a process whose names will still be needed.
    pub(super) fn threads(&self, pid: u32) -> HashSet<u64> {
        let ended = self.threads.iter().chain(self.holders.ended.keys());
        let ended = ended.filter(|(of, ..)| *of == pid).map(|(.., id)| *id);
        let pairs = self.pairs.iter().filter(|((of, _), _)| *of == pid);
        ended.chain(pairs.flat_map(|(_, pairs)| pairs.threads())).collect()
    }

    /// Adds the edges `rest` from the map to those taken out before; returns and removes those of a process, given with its number of execs,
    /// or of all.
    pub(super) fn with(
        &mut self,
        rest: &[(GvlEdgeKey, GvlEdge)],
        of: Option<(u32, u32)>,
    ) -> Vec<(GvlEdgeKey, GvlEdge)> {
        let wanted = |program: (u32, u32)| of.is_none_or(|of| of == program);
        self.threads.retain(|&(tgid, execs, _)| !wanted((tgid, execs)));
        self.holders.retain(|&(tgid, execs, _)| !wanted((tgid, execs)));
        self.keep(rest);
        let pairs = self.pairs.extract_if(|program, _| wanted(*program));
        pairs.flat_map(|((tgid, execs), pairs)| pairs.into_edges(tgid, execs)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Edges to an ended thread are taken once two looks in succession show that no thread is waiting since before its end.
    #[test]
    fn over() {
        let mut holders = Holders::default();
        let (first, second, other) = ((1, 0, 7), (1, 0, 8), (2, 0, 7));
        for (id, end_ns) in [(first, 100), (second, 200), (other, 100)] {
            holders.add(id, end_ns);
        }
        let waiting = |since_ns: u64| HashMap::from([((1, 0), since_ns)]);
        assert!(holders.take_over(&waiting(100)).is_empty());
        assert_eq!(holders.take_over(&waiting(150)), [other].into());
        assert!(holders.take_over(&waiting(50)).is_empty(), "a wait that had only just begun is seen late");
        assert!(holders.take_over(&waiting(150)).is_empty());
        assert_eq!(holders.take_over(&waiting(201)), [first].into());
        assert_eq!(holders.take_over(&HashMap::new()), [second].into());
        assert!(holders.ended.is_empty() && holders.over.is_empty());
    }

    /// Nothing is kept about threads of programs that have ended, and about no more than the maximum.
    #[test]
    fn bounded() {
        let mut holders = Holders::default();
        for id in 0..MOST_HOLDERS as u64 {
            holders.add((1, 0, id), 1);
        }
        assert!(holders.take_over(&HashMap::new()).is_empty());
        holders.add((2, 0, 1), 1);
        assert_eq!((holders.ended.len(), holders.over.len()), (1, 0));
        holders.take_over(&HashMap::new());
        holders.retain(|(tgid, ..)| *tgid != 2);
        assert_eq!((holders.ended.len(), holders.over.len()), (0, 0));
    }
}
