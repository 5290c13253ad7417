//! Which thread waited for which, including ended threads: the pairs with the most time individually, the rest as a sum. Pure.

use std::collections::HashMap;

use gctrace_common::gvl::{GvlEdge, GvlEdgeKey};

/// Maximum number of pairs of a process that are kept individually.
const MAX_PAIRS: usize = 16_384;

/// Pairs of a program. Each thread can add to them until it ends.
#[derive(Debug, Default)]
pub struct GvlPairs {
    pairs: HashMap<(u64, u64), GvlEdge>,
    others: GvlEdge,
}

impl GvlPairs {
    /// Adds waits of one thread for another.
    pub fn add(&mut self, waiter: u64, holder: u64, edge: &GvlEdge) {
        if (waiter, holder) == Self::OTHERS {
            return add(&mut self.others, edge);
        }
        add(self.pairs.entry((waiter, holder)).or_default(), edge);
        if self.pairs.len() > MAX_PAIRS {
            self.fold();
        }
    }

    /// The threads of all pairs.
    pub fn threads(&self) -> impl Iterator<Item = u64> {
        self.pairs.keys().flat_map(|&(waiter, holder)| [waiter, holder])
    }

    /// All pairs of this program; those not kept individually are one pair of thread 0 with itself.
    pub fn into_edges(self, tgid: u32, execs: u32) -> Vec<(GvlEdgeKey, GvlEdge)> {
        let others = (self.others.holds > 0).then_some((Self::OTHERS, self.others));
        let key = |(waiter, holder)| GvlEdgeKey { waiter, holder, tgid, execs };
        self.pairs.into_iter().chain(others).map(|(pair, edge)| (key(pair), edge)).collect()
    }

    /// No thread has this id.
    const OTHERS: (u64, u64) = (0, 0);

    /// Adds the half of the pairs with the least time to the sum of the others.
    fn fold(&mut self) {
        let mut times: Vec<u64> = self.pairs.values().map(|edge| edge.wait_ns).collect();
        let middle = times.len() / 2;
        let (_, &mut middle_ns, _) = times.select_nth_unstable(middle);
        // Number of pairs with exactly the median time that must be removed, too.
        let mut equal =
            self.pairs.len() / 2 - self.pairs.values().filter(|edge| edge.wait_ns < middle_ns).count();
        let others = &mut self.others;
        self.pairs.retain(|_, edge| {
            let stays = match edge.wait_ns.cmp(&middle_ns) {
                std::cmp::Ordering::Less => false,
                std::cmp::Ordering::Equal if equal > 0 => {
                    equal -= 1;
                    false
                }
                _ => true,
            };
            if !stays {
                add(others, edge);
            }
            stays
        });
    }
}

fn add(sum: &mut GvlEdge, edge: &GvlEdge) {
    sum.holds += edge.holds;
    sum.wait_ns += edge.wait_ns;
    sum.wait_max_ns = sum.wait_max_ns.max(edge.wait_max_ns);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(wait_ns: u64) -> GvlEdge {
        GvlEdge { holds: 1, wait_ns, wait_max_ns: wait_ns }
    }

    fn sum(edges: &[(GvlEdgeKey, GvlEdge)]) -> (u64, u64) {
        edges.iter().fold((0, 0), |sum, (_, edge)| (sum.0 + edge.holds, sum.1 + edge.wait_ns))
    }

    /// However many threads come and go, the pairs with the longest waits are kept, and the total covers all pairs.
    #[test]
    fn many() {
        for ns in [|_| 7, |n: u64| n % 1000, |n: u64| n] as [fn(u64) -> u64; 3] {
            let mut pairs = GvlPairs::default();
            pairs.add(1, 2, &edge(1_000_000));
            let mut all = (1, 1_000_000);
            for n in 0..100_000 {
                pairs.add(1000 + n, 3, &edge(ns(n)));
                all = (all.0 + 1, all.1 + ns(n));
            }
            pairs.add(1, 2, &edge(5));
            assert!(pairs.pairs.len() <= MAX_PAIRS && pairs.pairs.len() >= MAX_PAIRS / 2);
            assert_eq!(pairs.threads().count(), 2 * pairs.pairs.len());
            let edges = pairs.into_edges(9, 1);
            assert_eq!(sum(&edges), (all.0 + 1, all.1 + 5));
            let key = GvlEdgeKey { waiter: 1, holder: 2, tgid: 9, execs: 1 };
            let kept = edges.iter().find(|(of, _)| *of == key).unwrap().1;
            assert_eq!(kept, GvlEdge { holds: 2, wait_ns: 1_000_005, wait_max_ns: 1_000_000 });
            // The result can be added to other pairs.
            let mut again = GvlPairs::default();
            for (key, edge) in &edges {
                again.add(key.waiter, key.holder, edge);
            }
            assert_eq!(sum(&again.into_edges(9, 1)), sum(&edges));
        }
    }

    /// Without pairs there is no sum of others.
    #[test]
    fn none() {
        assert_eq!(GvlPairs::default().into_edges(9, 1), []);
    }
}
