//! How threads waited for others that have ended. The kernel side's map has room for the threads of all processes at one time: programs
//! with a thread for each request would fill it.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use gctrace_common::gvl::{GvlEdge, GvlEdgeKey, GvlThread};

use crate::{aggregate::gvl_pairs::GvlPairs, bpf::GvlReader};

/// So many threads end before how they waited is taken out of the map.
const MANY: usize = 64;
/// After it was taken out, it is not for this many times as long.
const SELDOM: u32 = 4;
/// Nor for this time.
const LEAST: Duration = Duration::from_millis(250);

/// Threads that have ended, of all processes.
#[derive(Default)]
pub(super) struct Ended {
    /// Process, its execs, thread: how they waited is in the map.
    threads: HashSet<(u32, u32, u64)>,
    /// How the others waited, by process and its execs.
    pairs: HashMap<(u32, u32), GvlPairs>,
    next: Option<Instant>,
}

impl Ended {
    /// A thread has ended.
    pub(super) fn thread(&mut self, thread: &GvlThread) {
        self.threads.insert((thread.header.tgid, thread.header.execs, thread.id));
    }

    /// Takes out of the map how they waited, if they are many.
    pub(super) fn take(&mut self, reader: &mut GvlReader) {
        let begun = Instant::now();
        if self.threads.len() < MANY || self.next.is_some_and(|next| begun < next) {
            return;
        }
        match reader.take_ended(&self.threads) {
            Ok(edges) => self.keep(&edges),
            // The ledger does not balance then.
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

    /// The threads of a process whose names will be asked for.
    pub(super) fn threads(&self, pid: u32) -> HashSet<u64> {
        let ended = self.threads.iter().filter(|(of, ..)| *of == pid).map(|(.., id)| *id);
        let pairs = self.pairs.iter().filter(|((of, _), _)| *of == pid);
        ended.chain(pairs.flat_map(|(_, pairs)| pairs.threads())).collect()
    }

    /// What was in the map of a process that had been so many other programs, or of all, with what was taken out before; forgets that.
    pub(super) fn with(
        &mut self,
        rest: &[(GvlEdgeKey, GvlEdge)],
        of: Option<(u32, u32)>,
    ) -> Vec<(GvlEdgeKey, GvlEdge)> {
        let wanted = |program: (u32, u32)| of.is_none_or(|of| of == program);
        self.threads.retain(|&(tgid, execs, _)| !wanted((tgid, execs)));
        self.keep(rest);
        let pairs = self.pairs.extract_if(|program, _| wanted(*program));
        pairs.flat_map(|((tgid, execs), pairs)| pairs.into_edges(tgid, execs)).collect()
    }
}
