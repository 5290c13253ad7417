//! Folds threads and edges of the GVL into sums of a process. Pure; memory is bounded whatever a program does.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use gctrace_common::gvl::{GvlEdge, GvlEdgeKey, GvlState, GvlThread, bucket};

use super::gvl_budget::OpenTimes;
use crate::model;
use crate::model::gvl::{
    GvlBlocked, GvlCoverage, GvlDoing, GvlGc, GvlProcessSummary, GvlSplit, GvlSums, GvlTaskTimes,
    GvlThreadSummary, GvlTimes, GvlWho, Histogram,
};

/// Number of remembered thread names per process from which the names of ended threads that are in no pair are forgotten.
const MANY_NAMES: usize = 16_384;
/// If more names than this remain, because many threads ended recently, only the names of threads in pairs are kept.
const MOST_NAMES: usize = 8 * MANY_NAMES;
/// Time for which the pairs of an ended thread may not have been read yet, nanoseconds.
const NAMED_NS: u64 = 10_000_000_000;

/// Maximum number of pauses, and of waits, remembered per process.
const MAX_MOMENTS: usize = 1 << 16;

/// GC pauses of a process, and its individually reported waits: start and end, nanoseconds.
#[derive(Debug, Default)]
pub struct GcAndWaits {
    pauses: Vec<(u64, u64)>,
    waits: Vec<(u64, u64)>,
    overflown: bool,
}

impl GcAndWaits {
    /// Adds a pause.
    pub fn pause(&mut self, begin_ns: u64, ns: u64) {
        self.push(|all| &mut all.pauses, begin_ns, ns);
    }

    /// Notes that not all pauses or waits are known. Those that are known are no longer needed.
    pub fn incomplete(&mut self) {
        *self = Self { overflown: true, ..Self::default() };
    }

    /// Adds a wait.
    pub fn wait(&mut self, begin_ns: u64, ns: u64) {
        self.push(|all| &mut all.waits, begin_ns, ns);
    }

    fn push(&mut self, list: fn(&mut Self) -> &mut Vec<(u64, u64)>, begin_ns: u64, ns: u64) {
        if self.overflown {
            return;
        }
        let list = list(self);
        if list.len() < MAX_MOMENTS {
            list.push((begin_ns, begin_ns + ns));
        } else {
            self.incomplete();
        }
    }

    /// Sums of pauses from `first_ns` on; `None`: not all pauses and waits are known.
    fn sum(&self, first_ns: u64, times: &OpenTimes) -> Option<GvlGc> {
        if self.overflown {
            return None;
        }
        let mut pauses = self.pauses.clone();
        pauses.retain(|(begin, _)| *begin >= first_ns);
        pauses.sort_unstable();
        let pause_ns = pauses.iter().map(|&(from, to)| to - from - times.closed_within(from, to)).sum();
        let overlap = |&(from, to): &(u64, u64)| {
            // Pauses of a process do not overlap, so they are also sorted by their ends.
            let first = pauses.partition_point(|pause| pause.1 <= from);
            let inside = pauses[first..].iter().take_while(|pause| pause.0 < to);
            inside.map(|pause| pause.1.min(to) - pause.0.max(from)).sum::<u64>()
        };
        Some(GvlGc { pause_ns, wait_ns: Some(self.waits.iter().map(overlap).sum()) })
    }
}

/// Sums of a process so far.
#[derive(Debug)]
pub struct GvlFold {
    coverage: GvlCoverage,
    first_ns: Option<u64>,
    threads: u64,
    sums: GvlSums,
    /// Names of threads, and when they ended or were read.
    names: HashMap<u64, (GvlWho, u64)>,
    /// Number of names from which some are forgotten.
    most_names: usize,
}

impl GvlFold {
    /// A fold without threads.
    pub fn new(coverage: GvlCoverage) -> Self {
        Self {
            coverage,
            first_ns: None,
            threads: 0,
            sums: GvlSums::default(),
            names: HashMap::new(),
            most_names: MANY_NAMES,
        }
    }

    /// Adds a thread that has ended, or is read for the last time.
    /// `times`: when the probes were watching.
    pub fn thread(
        &mut self,
        thread: &GvlThread,
        end_ns: u64,
        ended: bool,
        times: &OpenTimes,
    ) -> GvlThreadSummary {
        let summary = summary(thread, self.coverage, end_ns, ended, times);
        self.first_ns = Some(self.first_ns.map_or(summary.begin_ns, |first| first.min(summary.begin_ns)));
        self.threads += 1;
        self.sums.add(&summary.sums);
        self.names.insert(thread.id, (summary.who.clone(), summary.end_ns));
        summary
    }

    /// Whether [`Self::keep_names`] is due.
    pub fn has_many_names(&self) -> bool {
        self.names.len() >= self.most_names
    }

    /// Forgets the names of threads that are in none of these pairs and ended some time before the latest one.
    pub fn keep_names(&mut self, of: &HashSet<u64>) {
        let last_ns = self.names.values().map(|(_, end_ns)| *end_ns).max().unwrap_or_default();
        self.names.retain(|id, (_, end_ns)| of.contains(id) || last_ns - *end_ns < NAMED_NS);
        if self.names.len() > MOST_NAMES {
            self.names.retain(|id, _| of.contains(id));
        }
        self.most_names = MANY_NAMES.max(2 * self.names.len());
    }

    /// The process is gone, or tracing ends: returns its sums.
    pub fn finish(
        self,
        edges: &[(GvlEdgeKey, GvlEdge)],
        end_ns: u64,
        gc: &GcAndWaits,
        times: &OpenTimes,
    ) -> GvlProcessSummary {
        let who = |id: &u64| self.names.get(id).map(|(who, _)| who.clone());
        let blocked = edges.iter().map(|(key, edge)| GvlBlocked {
            waiter: who(&key.waiter),
            holder: who(&key.holder),
            times: GvlTimes { count: edge.holds, ns: edge.wait_ns, max_ns: edge.wait_max_ns },
        });
        let (others, mut blocked): (Vec<_>, Vec<_>) =
            blocked.partition(|pair: &GvlBlocked| pair.waiter.is_none() && pair.holder.is_none());
        blocked.extend(others.into_iter().reduce(|mut sum, pair| {
            sum.times.add(&pair.times);
            sum
        }));
        blocked.sort_by(|a, b| b.times.ns.cmp(&a.times.ns).then_with(|| a.waiter.cmp(&b.waiter)));
        GvlProcessSummary {
            coverage: self.coverage,
            threads: self.threads,
            span_ns: self.first_ns.map_or(0, |first| end_ns.saturating_sub(first)),
            end_ns,
            sums: self.sums,
            gc: self.first_ns.and_then(|first| gc.sum(first, times)),
            blocked,
        }
    }
}

/// A thread's identity, from the kernel side's record of it.
pub fn who(tid: u32, comm: &[u8; 16]) -> GvlWho {
    GvlWho { tid, comm: Arc::from(model::comm(comm)) }
}

/// A state as exporters show it; `None` if unknown.
pub fn doing(state: GvlState) -> Option<GvlDoing> {
    match state {
        GvlState::Unknown => None,
        GvlState::Ready => Some(GvlDoing::Waiting),
        GvlState::Running => Some(GvlDoing::Holding),
        GvlState::Away => Some(GvlDoing::Away),
    }
}

/// A thread's time by GVL state and scheduler state. Time before the thread was first seen is not counted.
fn split(thread: &GvlThread) -> GvlSplit {
    let row = |state: GvlState| {
        let [cpu_ns, runnable_ns, blocked_ns] = thread.split[state as usize];
        GvlTaskTimes { cpu_ns, runnable_ns, blocked_ns }
    };
    GvlSplit { waiting: row(GvlState::Ready), holding: row(GvlState::Running), away: row(GvlState::Away) }
}

fn summary(
    known: &GvlThread,
    coverage: GvlCoverage,
    end_ns: u64,
    ended: bool,
    times: &OpenTimes,
) -> GvlThreadSummary {
    let mut thread = *known;
    if thread.state == GvlState::Ready as u32 && thread.left_ns != 0 {
        // It left its futex and did not return to it: it has acquired the GVL.
        let ns = thread.left_ns.saturating_sub(thread.since_ns);
        let _paired = thread.waited(thread.left_ns);
        thread.buckets[bucket(ns)] += 1;
    }
    let state = GvlState::from_raw(thread.state);
    // When the probes stopped, if the thread has not been seen since: what it did afterwards, and whether it ended, is unknown.
    let stopped_ns = times.end_of(thread.epoch).filter(|&stopped| stopped < end_ns);
    let maybe_ended = !coverage.ends && state == Some(GvlState::Away) && stopped_ns.is_none();
    let end_ns = if maybe_ended { thread.since_ns } else { end_ns.max(thread.since_ns) };
    let open_ns = stopped_ns.unwrap_or(end_ns).saturating_sub(thread.since_ns);
    let so_far = |count, ns, max_ns, within| GvlTimes {
        count,
        ns: if state == Some(within) { ns + open_ns } else { ns },
        max_ns,
    };
    let hold = so_far(thread.holds, thread.hold_ns, thread.hold_max_ns, GvlState::Running);
    // The longest time away is not kept: it is irrelevant to the GVL.
    let away = so_far(thread.aways, thread.away_ns, 0, GvlState::Away);
    let mut waits = Histogram::default();
    waits.add(thread.buckets.iter().map(|&count| count.into()));
    GvlThreadSummary {
        coverage,
        who: who(thread.header.tid, &thread.comm),
        id: thread.id,
        last: state
            .filter(|_| stopped_ns.is_none())
            .and_then(doing)
            .map(|doing| (doing, thread.since_ns))
            .filter(|(doing, _)| coverage.holds || *doing == GvlDoing::Waiting),
        thread: (thread.thread != 0).then_some(thread.thread),
        begin_ns: thread.born_ns,
        end_ns,
        ended,
        sums: GvlSums {
            wall_ns: end_ns.saturating_sub(thread.born_ns),
            watched_ns: end_ns.saturating_sub(thread.born_ns) - times.closed_within(thread.born_ns, end_ns),
            wait: so_far(thread.waits, thread.wait_ns, thread.wait_max_ns, GvlState::Ready),
            split: Some(split(&thread)).filter(|split| coverage.holds && *split != GvlSplit::default()),
            hold: coverage.holds.then_some(hold),
            away: coverage.holds.then_some(away),
            waits,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(id: u64, comm: &[u8]) -> GvlThread {
        let mut thread = GvlThread::blank();
        thread.id = id;
        thread.header.tid = id as u32;
        thread.comm[..comm.len()].copy_from_slice(comm);
        (thread.born_ns, thread.since_ns) = (1000, 1000);
        thread
    }

    /// What a thread did adds up to its lifetime, including its state when it is read, and threads add up to the
    /// process.
    #[test]
    fn sums() {
        let mut one = thread(1, b"one");
        one.ready(1000);
        one.resumed(1300);
        one.suspended(1900);
        one.ready(2000);
        let mut two = thread(2, b"two");
        two.ready(1100);
        two.resumed(1200);
        let mut fold = GvlFold::new(GvlCoverage { holds: true, ends: true, ..GvlCoverage::default() });
        let first = fold.thread(&one, 2500, false, &OpenTimes::default());
        assert_eq!(first.sums.wait, GvlTimes { count: 1, ns: 800, max_ns: 300 });
        assert_eq!(first.sums.hold, Some(GvlTimes { count: 1, ns: 600, max_ns: 600 }));
        assert_eq!(first.sums.away.unwrap().ns, 100);
        assert_eq!(first.sums.wall_ns, 1500);
        let second = fold.thread(&two, 2500, true, &OpenTimes::default());
        assert_eq!((second.sums.hold.unwrap().ns, second.sums.hold.unwrap().count), (1300, 0));
        let key = |waiter, holder| GvlEdgeKey { waiter, holder, tgid: 9, execs: 0 };
        let edge = |wait_ns| GvlEdge { holds: 1, wait_ns, wait_max_ns: wait_ns };
        // One pause before anything was seen, one that partly overlaps two waits, and one without a waiter.
        let mut gc = GcAndWaits::default();
        gc.pause(500, 100);
        gc.pause(1200, 100);
        gc.pause(2000, 50);
        gc.wait(1100, 150);
        gc.wait(1280, 20);
        let all =
            fold.finish(&[(key(2, 7), edge(5)), (key(1, 2), edge(300))], 2500, &gc, &OpenTimes::default());
        assert_eq!(all.gc, Some(GvlGc { pause_ns: 150, wait_ns: Some(70) }));
        assert_eq!((all.threads, all.span_ns, all.sums.wait.ns), (2, 1500, 900));
        let names: Vec<_> = all
            .blocked
            .iter()
            .map(|b| (b.waiter.as_ref().map(|w| &*w.comm), b.holder.as_ref().map(|h| &*h.comm)))
            .collect();
        assert_eq!(names, [(Some("one"), Some("two")), (Some("two"), None)]);
    }

    /// Once there are too many pauses or waits, or some are missing, none are kept, because their sums are unknown.
    #[test]
    fn moments() {
        let fill = |add: fn(&mut GcAndWaits, u64, u64)| {
            let mut all = GcAndWaits::default();
            all.pause(1, 1);
            all.wait(2, 1);
            (0..=MAX_MOMENTS as u64).for_each(|at| add(&mut all, 10 * at, 1));
            all
        };
        let mut missing = GcAndWaits::default();
        missing.pause(1, 1);
        missing.incomplete();
        for mut all in [fill(GcAndWaits::pause), fill(GcAndWaits::wait), missing] {
            all.pause(1, 1);
            all.wait(1, 1);
            assert_eq!((all.pauses.capacity(), all.waits.capacity()), (0, 0));
            assert_eq!(all.sum(0, &OpenTimes::default()), None);
        }
    }

    /// What a thread did after the probes were stopped is not reported, and counts as unwatched time.
    #[test]
    fn stopped() {
        let mut times = OpenTimes::default();
        let mut one = thread(1, b"one");
        one.ready(1000);
        one.resumed(1300);
        times.close(1500);
        let coverage = GvlCoverage { holds: true, ends: true, ..GvlCoverage::default() };
        let summary = GvlFold::new(coverage).thread(&one, 2000, false, &times);
        assert_eq!((summary.sums.wall_ns, summary.sums.watched_ns, summary.last), (1000, 500, None));
        assert_eq!((summary.sums.wait.ns, summary.sums.hold.unwrap().ns), (300, 200));
        times.open(1800);
        one.interrupted(1500, 1900, times.epoch());
        let summary = GvlFold::new(coverage).thread(&one, 2000, false, &times);
        assert_eq!((summary.sums.wall_ns, summary.sums.watched_ns), (1000, 700));
        assert_eq!(
            (summary.sums.wait.ns, summary.sums.hold.unwrap().ns, summary.sums.away.unwrap().ns),
            (300, 200, 0)
        );
        // It releases a GVL that it was not seen to acquire.
        one.suspended(1950);
        let summary = GvlFold::new(coverage).thread(&one, 2000, false, &times);
        assert_eq!((summary.sums.hold.unwrap().ns, summary.sums.away.unwrap().ns), (200, 50));
    }

    /// Names of threads that are in a pair or ended recently are kept, however many there were; if too many ended recently, only those in pairs are.
    #[test]
    fn names_of_many() {
        for (each_ns, most) in [(1_000_000, 40_000), (1_000, 2 * MOST_NAMES)] {
            let mut fold = GvlFold::new(GvlCoverage { holds: true, ends: true, ..GvlCoverage::default() });
            let kept = HashSet::from([3]);
            for id in 1..300_000 {
                let mut ended = thread(id, b"one");
                ended.ready(1000);
                fold.thread(&ended, id * each_ns, true, &OpenTimes::default());
                if fold.has_many_names() {
                    fold.keep_names(&kept);
                }
                assert!(fold.names.len() <= most, "{}", fold.names.len());
            }
            for (id, known) in [(3, true), (4, false), (299_999, true)] {
                assert_eq!(fold.names.contains_key(&id), known, "{id}");
            }
        }
    }

    /// If ends of threads are not observed, a thread without the GVL may already have ended.
    #[test]
    fn without_ends() {
        let coverage = GvlCoverage { holds: true, ..GvlCoverage::default() };
        let mut one = thread(1, b"one");
        one.ready(1000);
        one.resumed(1300);
        let summary = GvlFold::new(coverage).thread(&one, 2000, false, &OpenTimes::default());
        assert_eq!((summary.end_ns, summary.sums.wall_ns, summary.sums.hold.unwrap().ns), (2000, 1000, 700));
        one.suspended(1400);
        let summary = GvlFold::new(coverage).thread(&one, 2000, false, &OpenTimes::default());
        assert_eq!((summary.end_ns, summary.sums.wall_ns, summary.sums.away.unwrap().ns), (1400, 400, 0));
    }

    /// If yields are not observed, holds are not reported.
    #[test]
    fn waits_only() {
        let mut one = thread(1, b"one");
        one.ready(1000);
        one.resumed(1300);
        let mut fold = GvlFold::new(GvlCoverage { ends: true, ..GvlCoverage::default() });
        let summary = fold.thread(&one, 2000, true, &OpenTimes::default());
        assert_eq!((summary.sums.wait.ns, summary.sums.hold, summary.sums.away), (300, None, None));
        let all = fold.finish(&[], 2000, &GcAndWaits::default(), &OpenTimes::default());
        assert_eq!(all.sums.hold, None);
    }
}
