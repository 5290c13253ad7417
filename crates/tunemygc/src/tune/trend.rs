//! Detects whether the live heap grows without bound: a leak, or an unlimited cache.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Maximum number of points per set.
const PER_SET: usize = 8;
/// Maximum number of points per process; above it, the points of each stretch of time are merged.
const MOST_POINTS: usize = 64;
/// Minimum length of such a stretch, seconds: a power of two.
const SHORTEST: f64 = 1.0 / 1024.0;
/// Maximum number of processes that are followed.
const MOST_PROCESSES: usize = 64;
/// Maximum number of runs under one pid; the latest ones are kept.
const MOST_RUNS: usize = 4;
/// Minimum number of points for a conclusion.
const FEWEST: usize = 8;

/// The end of a major cycle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct End {
    /// The time, seconds on the clock of the process's sets.
    pub ts: f64,
    /// `GC.count`.
    pub count: u64,
    /// Number of live slots.
    pub live: u64,
}

/// The minimum number of live slots in a stretch of time: what none of its major cycles could free.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    /// The time, seconds on the clock of the process's sets.
    pub ts: f64,
    /// Number of live slots.
    pub live: u64,
    /// The length of the stretch of time whose points were merged into this one, seconds; 0 if none were.
    #[serde(default, skip_serializing_if = "is_zero")]
    length: f64,
    /// `GC.count` at the first and the last of its cycles; 0: unknown.
    #[serde(default)]
    counts: (u64, u64),
}

impl Floor {
    /// Whether the next point is of another process, which has counted from the start: in containers, the pid of one that is restarted is the same.
    fn ends_before(&self, next: &Self) -> bool {
        // A merged point stands for all of its stretch of time: one that arrives late lies within it.
        let stretch = |ts: f64| (ts / next.length).floor() as i64;
        let within = next.length > 0.0 && stretch(self.ts) == stretch(next.ts);
        let count = if within { next.counts.1 } else { next.counts.0 };
        next.counts.0 > 0 && count <= self.counts.1
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(length: &f64) -> bool {
    *length == 0.0
}

/// The floors of several processes, by `PID on HOST`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trends(BTreeMap<String, Vec<Floor>>);

/// A process whose live heap grows steadily.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leak {
    /// `PID on HOST`; escaped when it is shown.
    pub process: String,
    /// Live slots at the start.
    pub from: u64,
    /// Live slots at the end.
    pub to: u64,
    /// Seconds between start and end.
    pub seconds: f64,
}

impl Trends {
    /// The floors of one process's set, from the ends of its major cycles.
    pub fn of(process: String, ends: &[End]) -> Self {
        if ends.is_empty() {
            return Self::default();
        }
        let stretches = ends.chunks(ends.len().div_ceil(PER_SET));
        let floors = stretches.filter_map(|stretch| {
            let (first, last) = (stretch.first()?, stretch.last()?);
            let live = stretch.iter().map(|end| end.live).min()?;
            Some(Floor { ts: last.ts, live, length: 0.0, counts: (first.count, last.count) })
        });
        Self(BTreeMap::from([(process, floors.collect())]))
    }

    /// Adds the floors of other sets. What is known of a process does not depend on the order in which its sets are added: files are read in any
    /// order, and a set that was not accepted at first arrives late. Of more than [`MOST_PROCESSES`] the first ones are followed. Where the clock of a process restarts with its host, its runs lie over one another.
    pub fn merge(&mut self, others: &Self) {
        for (process, floors) in &others.0 {
            if self.0.len() >= MOST_PROCESSES && !self.0.contains_key(process) {
                continue;
            }
            let known = self.0.entry(process.clone()).or_default();
            known.extend_from_slice(floors);
            known.sort_by(|a, b| a.ts.total_cmp(&b.ts).then(a.live.cmp(&b.live)));
            known.dedup();
            let runs: Vec<&[Floor]> = runs(known).collect();
            let latest = runs.len().saturating_sub(MOST_RUNS);
            *known = runs.into_iter().skip(latest).flat_map(thinned_out).collect();
        }
    }

    /// The number of processes with enough points to be judged, and those of them that grow steadily, fastest first. Of several that had the same pid,
    /// the latest with enough points is judged. If several with the same pid ran at the same time, none has.
    pub fn leaks(&self) -> (usize, Vec<Leak>) {
        let latest = |floors| runs(floors).filter(|run| run.len() >= FEWEST).last();
        let judged: Vec<(&String, &[Floor])> =
            self.0.iter().filter_map(|(process, floors)| Some((process, latest(floors)?))).collect();
        let mut leaks: Vec<Leak> = judged.iter().filter_map(|(process, run)| leak(process, run)).collect();
        leaks.sort_by(|a, b| b.share().total_cmp(&a.share()));
        (judged.len(), leaks)
    }
}

impl Leak {
    /// The factor by which the live heap grew.
    fn share(&self) -> f64 {
        self.to as f64 / self.from.max(1) as f64
    }

    /// Live slots gained per hour.
    pub fn per_hour(&self) -> f64 {
        if self.seconds > 0.0 { (self.to - self.from) as f64 / self.seconds * 3600.0 } else { 0.0 }
    }
}

/// Points in time order, by process.
fn runs(floors: &[Floor]) -> impl Iterator<Item = &[Floor]> {
    floors.chunk_by(|floor, next| !floor.ends_before(next))
}

/// Merges the points of each stretch of time if there are more than [`MOST_POINTS`]. The stretches have the shortest length for which these
/// suffice: a power of two, so that longer ones consist of whole shorter ones.
fn thinned_out(run: &[Floor]) -> Vec<Floor> {
    let mut floors = run.to_vec();
    let at = |floor: &Floor, length: f64| (floor.ts / length).floor() as i64;
    let merged = floors.iter().map(|floor| floor.length).fold(0.0, f64::max);
    if merged == 0.0 && floors.len() <= MOST_POINTS {
        return floors;
    }
    let mut length = merged.max(SHORTEST);
    while floors.chunk_by(|a, b| at(a, length) == at(b, length)).count() > MOST_POINTS {
        length *= 2.0;
    }
    floors.dedup_by(|later, floor| {
        let same = at(floor, length) == at(later, length);
        if same {
            (floor.ts, floor.live) = (later.ts, floor.live.min(later.live));
            floor.counts = (floor.counts.0.min(later.counts.0), later.counts.1);
        }
        floor.length = length;
        same
    });
    if let Some(last) = floors.last_mut() {
        last.length = length;
    }
    floors
}

/// The lowest floor of each of `n` equal stretches of time; `None` for stretches without a floor.
fn stretches(floors: &[Floor], n: usize) -> Vec<Option<u64>> {
    let mut lowest = vec![None; n];
    let (Some(first), Some(last)) = (floors.first(), floors.last()) else { return lowest };
    let length = (last.ts - first.ts).max(f64::MIN_POSITIVE);
    for floor in floors {
        let at = ((floor.ts - first.ts) / length * n as f64) as usize;
        let Some(stretch) = lowest.get_mut(at.min(n - 1)) else { continue };
        *stretch = Some(stretch.map_or(floor.live, |known: u64| known.min(floor.live)));
    }
    lowest
}

/// A process that grows in every quarter, by 15 % in all, and does not level off: in the last quarter by at least half of the average.
fn leak(process: &str, floors: &[Floor]) -> Option<Leak> {
    let quarters = stretches(floors, 4);
    let lowest = |at: usize| quarters.get(at).copied()?;
    let (a, b, c, d) = (lowest(0)?, lowest(1)?, lowest(2)?, lowest(3)?);
    let grows = |from: u64, to: u64| to as f64 > from as f64 * 1.01;
    let all = d.saturating_sub(a) as f64;
    let steady = grows(a, b) && grows(b, c) && grows(c, d) && (d - c) as f64 >= all / 6.0;
    if !steady || (d as f64) < a as f64 * 1.15 {
        return None;
    }
    let (first, last) = (floors.first()?, floors.last()?);
    Some(Leak {
        process: process.to_owned(),
        from: a,
        to: last.live.max(d),
        seconds: (last.ts - first.ts).max(0.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaks(live: &dyn Fn(u64) -> u64, parts: u64, ends: u64) -> Vec<Leak> {
        let mut all = Trends::default();
        for part in 0..parts {
            let ends = part * ends..(part + 1) * ends;
            let ends: Vec<End> =
                ends.map(|at| End { ts: at as f64, count: at + 1, live: live(at) }).collect();
            all.merge(&Trends::of("1 on host".to_owned(), &ends));
        }
        all.leaks().1
    }

    /// What is known of ends under one pid, in sets of 20, in any order of the sets.
    fn in_sets(of: &[End], reversed: bool) -> (usize, Vec<Leak>) {
        let mut sets: Vec<&[End]> = of.chunks(20).collect();
        if reversed {
            sets.reverse();
        }
        let mut all = Trends::default();
        for set in sets {
            all.merge(&Trends::of("1 on pod".to_owned(), set));
            all = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
        }
        all.leaks()
    }

    /// A process that leaks until it is killed, and its successor has its pid again: each is judged by itself.
    #[test]
    fn restarted() {
        let restarted = |length: u64, live: &dyn Fn(u64) -> u64| -> Vec<End> {
            let end = |at: u64| End { ts: at as f64 * 7.7, count: at % length + 3, live: live(at % length) };
            (0..1000).map(end).collect()
        };
        for reversed in [false, true] {
            let leaking = in_sets(&restarted(100, &|at| 100_000 + at * 5000), reversed);
            assert_eq!((leaking.0, leaking.1.len()), (1, 1), "{leaking:?}");
            let rate = leaking.1[0].per_hour() / (5000.0 / 7.7 * 3600.0);
            assert!((0.8..1.2).contains(&rate), "of one of them: {leaking:?}");
            let grown = in_sets(&restarted(100, &|at| 100_000 + at.min(30) * 5000), reversed);
            assert_eq!((grown.0, grown.1.len()), (1, 0), "fills up, then stays: {grown:?}");
        }
        // Ten of them, each of which would be too short if all had to share the points of one.
        assert_eq!(in_sets(&restarted(40, &|at| 100_000 + at * 5000), false).1.len(), 1);
    }

    /// Processes with the same pid in several containers of a host are not one process that grows.
    #[test]
    fn at_the_same_time() {
        for (count, later) in [(1000, 0.0), (0, 0.0), (0, 0.4)] {
            let mut all = Trends::default();
            for part in 0..40 {
                for (of, (count, ts, live)) in [(1, (0, 0.0, 100_000)), (2, (count, later, 500_000))] {
                    let end = |at: u64| End {
                        ts: at as f64 + ts,
                        count: at + 1 + count,
                        // Both grow, but it is not known which of them has a point.
                        live: live + at * 1000 * of,
                    };
                    let ends: Vec<End> = (part * 20..(part + 1) * 20).map(end).collect();
                    all.merge(&Trends::of("1 on host".to_owned(), &ends));
                }
            }
            assert_eq!(all.leaks(), (0, Vec::new()), "{count}, {later}");
            let points = all.0.values().map(Vec::len).sum::<usize>();
            assert!(points <= MOST_POINTS * MOST_RUNS, "{points}");
        }
    }

    /// Unbounded growth is a leak, in one set and in many that hardly grow each; filling up, fluctuation and noise are not.
    #[test]
    fn shapes() {
        let noise = |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        assert_eq!(leaks(&|at| 100_000 + at * 1000 + noise(at) * 4, 1, 100).len(), 1, "one set");
        let found = leaks(&|at| 100_000 + at * 36 + noise(at), 60, 40);
        assert_eq!(found.len(), 1, "60 parts that grow by 0.9 % each");
        assert!((found[0].per_hour() - 36.0 * 3600.0).abs() < 8000.0, "{found:?}");
        assert!(leaks(&|at| 100_000 + noise(at) * 100, 10, 40).is_empty(), "noise");
        assert!(leaks(&|at| 100_000 + at.min(120) * 1000, 10, 40).is_empty(), "fills up, then stays");
        assert!(leaks(&|at| 100_000 + (at % 30) * 3000, 10, 40).is_empty(), "breathes");
        assert!(leaks(&|at| 500_000_u64.saturating_sub(at * 100), 10, 40).is_empty(), "shrinks");
        assert!(leaks(&|at| 100_000 + at * 5000, 1, 5).is_empty(), "too little");
        assert!(leaks(&|_| 0, 3, 40).is_empty());
        assert!(leaks(&|at| u64::MAX - 500 + at, 3, 40).is_empty());
        assert_eq!(Trends::default().leaks(), (0, Vec::new()));
    }
    /// The verdict does not depend on the order of the sets: that of time, that of names of files (part10 before part2), or with one late.
    #[test]
    fn orders() {
        type Shape = fn(u64) -> u64;
        let shapes: [(&str, Shape, usize); 4] = [
            ("grows, then stays", |at| 100_000 + at.min(400) * 1000, 0),
            ("stays, then grows", |at| 100_000 + at.saturating_sub(400) * 1000, 0),
            ("grows", |at| 100_000 + at * 1000, 1),
            ("shrinks", |at| 1_000_000 - at * 1000, 0),
        ];
        for (name, live, expected) in shapes {
            let verdict = |order: &[u64]| {
                let mut all = Trends::default();
                for part in order {
                    // Times that are not on the borders of stretches.
                    let end =
                        |at| End { ts: 1_790_000_000.3 + at as f64 * 7.7, count: at * 3 + 1, live: live(at) };
                    let ends: Vec<End> = (part * 40..(part + 1) * 40).map(end).collect();
                    all.merge(&Trends::of("1 on host".to_owned(), &ends));
                    // As a store keeps the sum.
                    all = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
                }
                all.leaks()
            };
            let in_time: Vec<u64> = (0..20).collect();
            let found = verdict(&in_time);
            assert_eq!((found.0, found.1.len()), (1, expected), "{name}: {found:?}");
            let mut by_name = in_time.clone();
            by_name.sort_by_key(|part| format!("part{part}"));
            assert_eq!(verdict(&by_name), found, "{name}: by name");
            for late in in_time.clone() {
                let mut order = in_time.clone();
                order.retain(|part| *part != late);
                order.push(late);
                assert_eq!(verdict(&order), found, "{name}: {late} is late");
            }
            let mut reversed = in_time.clone();
            reversed.reverse();
            assert_eq!(verdict(&reversed), found, "{name}: latest first");
        }
    }

    /// The same for more sets than points: the points of several are merged before a late one arrives.
    #[test]
    fn late_sets() {
        let slow_leak = |order: &[u64]| {
            let mut all = Trends::default();
            for set in order {
                let end = |at: u64| End {
                    ts: 1_790_000_000.3 + at as f64 * 15.0,
                    count: at * 3 + 1,
                    live: 100_000 + at * 10,
                };
                let ends: Vec<End> = (set * 40..(set + 1) * 40).map(end).collect();
                all.merge(&Trends::of("1 on host".to_owned(), &ends));
            }
            all.leaks()
        };
        let mut order: Vec<u64> = (0..300).collect();
        let found = slow_leak(&order);
        assert_eq!((found.0, found.1.len()), (1, 1), "{found:?}");
        order.chunks_exact_mut(2).skip(100).step_by(3).for_each(|pair| pair.swap(0, 1));
        assert_eq!(slow_leak(&order), found, "neighbours swapped");
        order.sort_unstable();
        order.rotate_left(20);
        assert_eq!(slow_leak(&order), found, "the first twenty late");
        order.sort_unstable();
        let late: Vec<u64> = order.extract_if(.., |set| *set % 10 == 7).collect();
        order.extend(late);
        assert_eq!(slow_leak(&order), found, "each tenth at the end");
    }
}
