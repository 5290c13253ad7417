//! Wait edges of threads that have ended. The kernel side's map has room for the threads of all processes at one time: programs
//! with a thread for each request would fill it.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use gctrace_common::gvl::{GvlEdge, GvlEdgeKey, GvlThread};

use crate::{aggregate::gvl_pairs::GvlPairs, bpf::GvlReader};

/// Minimum number of ended threads before their edges are taken out of the map.
const MANY: usize = 64;
/// After taking them out, the map is not read for this many times as long as that took.
const SELDOM: u32 = 4;
/// Nor for at least this time.
const LEAST: Duration = Duration::from_millis(250);

/// Ended threads of all processes.
#[derive(Default)]
pub(super) struct Ended {
    /// Threads whose edges are still in the map: process, number of execs, thread.
    threads: HashSet<(u32, u32, u64)>,
    /// Edges taken out of the map, by process and number of execs.
    pairs: HashMap<(u32, u32), GvlPairs>,
    next: Option<Instant>,
}

impl Ended {
    /// Records that a thread has ended.
    pub(super) fn thread(&mut self, thread: &GvlThread) {
        self.threads.insert((thread.header.tgid, thread.header.execs, thread.id));
    }

    /// Takes the edges of ended threads out of the map, if there are many threads.
    pub(super) fn take(&mut self, reader: &mut GvlReader) {
        let begun = Instant::now();
        if self.threads.len() < MANY || self.next.is_some_and(|next| begun < next) {
            return;
        }
        match reader.take_ended(&self.threads) {
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
        let ended = self.threads.iter().filter(|(of, ..)| *of == pid).map(|(.., id)| *id);
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
        self.keep(rest);
        let pairs = self.pairs.extract_if(|program, _| wanted(*program));
        pairs.flat_map(|((tgid, execs), pairs)| pairs.into_edges(tgid, execs)).collect()
    }
}
