//! Long waits for the GVL in one process in the last minute: who waited, and for whom. It reads no clock, and its size is bounded.

use std::collections::{HashMap, VecDeque};

use super::{SECOND, WINDOW, bounded, last_cycle::place};
use crate::model::gvl::{GvlWait, GvlWho};

/// Maximum number of waits; the oldest are evicted.
const MOST: usize = 2048;

/// Who waited for whom.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::top) struct Pair {
    /// The thread that waited.
    pub waiter: GvlWho,
    /// The thread that held the GVL longest meanwhile, if that was seen.
    pub holder: Option<GvlWho>,
    /// Where the holder was: `app.rb:12 Foo#bar`.
    pub place: Option<String>,
}

/// Number and length of waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::top) struct Waited {
    /// Number of waits.
    pub count: u64,
    /// Total length, nanoseconds.
    pub ns: u64,
    /// The longest wait, nanoseconds.
    pub max_ns: u64,
}

/// The long waits of a process.
#[derive(Debug, Default)]
pub(in crate::top) struct Blocked {
    waits: VecDeque<(u64, u64, Pair)>,
    /// When the latest of the evicted waits ended.
    dropped_ns: u64,
}

impl Blocked {
    /// A thread waited long for the GVL.
    pub(in crate::top) fn see(&mut self, wait: &GvlWait) {
        let blocker = wait.blocker.as_ref();
        let pair = Pair {
            waiter: wait.who.clone(),
            holder: blocker.map(|blocker| blocker.hold.who.clone()),
            // What the holder was seen running, otherwise where it was when it released the GVL.
            place: blocker.and_then(|blocker| {
                blocker.ran.first().map(|(_, stack)| stack).or(blocker.until.as_ref()).and_then(place)
            }),
        };
        if self.waits.len() >= MOST
            && let Some((end_ns, ..)) = self.waits.front()
        {
            self.dropped_ns = self.dropped_ns.max(*end_ns);
        }
        bounded(&mut self.waits, (wait.begin_ns + wait.ns, wait.ns, pair), MOST);
    }

    /// The maximum number of waits, if there were more in the last minute.
    pub(in crate::top) fn most(&self, now_ns: u64) -> Option<usize> {
        let from = now_ns.saturating_sub(WINDOW as u64 * SECOND);
        (self.dropped_ns > 0 && self.dropped_ns >= from).then_some(MOST)
    }

    /// Who waited for whom in the last minute, longest total first.
    pub(in crate::top) fn pairs(&self, now_ns: u64) -> Vec<(Pair, Waited)> {
        let from = now_ns.saturating_sub(WINDOW as u64 * SECOND);
        let mut pairs: HashMap<&Pair, Waited> = HashMap::new();
        for (_, ns, pair) in self.waits.iter().filter(|(end_ns, ..)| *end_ns >= from) {
            let waited = pairs.entry(pair).or_default();
            waited.count += 1;
            waited.ns += ns;
            waited.max_ns = waited.max_ns.max(*ns);
        }
        let mut pairs: Vec<_> = pairs.into_iter().map(|(pair, waited)| (pair.clone(), waited)).collect();
        pairs.sort_by(|one, two| two.1.ns.cmp(&one.1.ns).then_with(|| one.0.cmp(&two.0)));
        pairs
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::gvl::{GvlBlocker, GvlDoing, GvlSpan};

    /// Pairs are summed up, longest first; waits older than a minute, and those above the limit, are gone.
    #[test]
    fn pairs() {
        let who = |tid: u32, comm: &str| GvlWho { tid, comm: Arc::from(comm) };
        let wait = |tid, end_ns, ns, holder: Option<u32>| {
            let hold =
                |tid| GvlSpan { who: who(tid, "holder"), id: 1, doing: GvlDoing::Holding, begin_ns: 0, ns };
            let blocker = |tid| GvlBlocker { hold: hold(tid), until: None, ran: Vec::new(), first: true };
            GvlWait {
                who: who(tid, "waiter"),
                id: 2,
                thread: None,
                request: None,
                begin_ns: end_ns - ns,
                ns,
                blocker: holder.map(blocker),
                stack: None,
            }
        };
        let mut blocked = Blocked::default();
        for (tid, ns, holder) in [(1, 5, Some(9)), (1, 7, Some(9)), (2, 40, None)] {
            blocked.see(&wait(tid, 100 * SECOND, ns, holder));
        }
        let pairs = blocked.pairs(101 * SECOND);
        let found: Vec<_> = pairs.iter().map(|(pair, waited)| (pair.waiter.tid, *waited)).collect();
        let waited = |count, ns, max_ns| Waited { count, ns, max_ns };
        assert_eq!(found, [(2, waited(1, 40, 40)), (1, waited(2, 12, 7))]);
        assert_eq!(pairs[1].0.holder, Some(who(9, "holder")));
        assert!(blocked.pairs(170 * SECOND).is_empty());
        assert_eq!(blocked.most(101 * SECOND), None);
        for _ in 0..MOST * 2 {
            blocked.see(&wait(3, 101 * SECOND, 1, None));
        }
        assert_eq!((blocked.most(101 * SECOND), blocked.most(170 * SECOND)), (Some(MOST), None));
        assert_eq!(
            blocked.pairs(101 * SECOND),
            [(
                Pair { waiter: who(3, "waiter"), holder: None, place: None },
                waited(MOST as u64, MOST as u64, 1)
            )]
        );
    }
}
