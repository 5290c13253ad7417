//! Detects whether the live heap grows without bound: a leak, or an unlimited cache.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Maximum number of points per set.
const PER_SET: usize = 8;
/// Maximum number of points per process; above it, the points of each stretch of time are merged.
const MOST_POINTS: usize = 64;
/// Maximum number of processes that are followed.
const MOST_PROCESSES: usize = 64;
/// Minimum number of points for a conclusion.
const FEWEST: usize = 8;

/// The minimum number of live slots in a stretch of time: what none of its major cycles could free.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    /// The time, seconds on the clock of the process's sets.
    pub ts: f64,
    /// Number of live slots.
    pub live: u64,
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
    /// The floors of one process's set, from the ends of its major cycles: pairs of seconds and live slots.
    pub fn of(process: String, ends: &[(f64, u64)]) -> Self {
        if ends.is_empty() {
            return Self::default();
        }
        let stretches = ends.chunks(ends.len().div_ceil(PER_SET));
        let floors = stretches.filter_map(|stretch| {
            let (ts, _) = *stretch.last()?;
            Some(Floor { ts, live: stretch.iter().map(|(_, live)| *live).min()? })
        });
        Self(BTreeMap::from([(process, floors.collect())]))
    }

    /// Adds later floors.
    pub fn merge(&mut self, later: &Self) {
        for (process, floors) in &later.0 {
            if self.0.len() >= MOST_PROCESSES && !self.0.contains_key(process) {
                continue;
            }
            let known = self.0.entry(process.clone()).or_default();
            known.extend_from_slice(floors);
            if known.len() > MOST_POINTS {
                *known = stretches(known, MOST_POINTS / 2).into_iter().flatten().collect();
            }
        }
    }

    /// The number of processes with enough points to be judged, and those of them that grow steadily, fastest first.
    pub fn leaks(&self) -> (usize, Vec<Leak>) {
        let judged = self.0.iter().filter(|(_, floors)| floors.len() >= FEWEST);
        let mut leaks: Vec<Leak> =
            judged.clone().filter_map(|(process, floors)| leak(process, floors)).collect();
        leaks.sort_by(|a, b| b.share().total_cmp(&a.share()));
        (judged.count(), leaks)
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

/// The lowest floor of each of `n` equal stretches of time; `None` for stretches without a floor. The clock of a process that was
/// restarted with the same pid may restart: times out of order belong to the nearest stretch.
fn stretches(floors: &[Floor], n: usize) -> Vec<Option<Floor>> {
    let mut lowest = vec![None; n];
    let (Some(first), Some(last)) = (floors.first(), floors.last()) else { return lowest };
    let length = (last.ts - first.ts).max(f64::MIN_POSITIVE);
    for floor in floors {
        let at = ((floor.ts - first.ts) / length * n as f64).max(0.0) as usize;
        let Some(stretch) = lowest.get_mut(at.min(n - 1)) else { continue };
        let live = stretch.map_or(floor.live, |known: Floor| known.live.min(floor.live));
        *stretch = Some(Floor { ts: floor.ts, live });
    }
    lowest
}

/// A process that grows in every quarter, by 15 % in all, and does not level off: in the last quarter by at least half of the average.
fn leak(process: &str, floors: &[Floor]) -> Option<Leak> {
    let quarters = stretches(floors, 4);
    let lowest = |at: usize| Some(quarters.get(at).copied()??.live);
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
            let points: Vec<(f64, u64)> =
                (part * ends..(part + 1) * ends).map(|at| (at as f64, live(at))).collect();
            all.merge(&Trends::of("1 on host".to_owned(), &points));
        }
        all.leaks().1
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
}
