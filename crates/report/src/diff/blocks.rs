//! Sums over time. A recording is split into blocks of equal length, whose number is known only at its end. Memory is bounded, however
//! long the recording is.

use std::collections::BTreeMap;

use super::statistics;

/// Initial length of a bin, nanoseconds.
const WIDTH_NS: u64 = 50_000_000;
/// Maximum number of bins: above it, pairs of bins are merged.
const BINS: u64 = 120;
/// Minimum and maximum number of blocks.
pub(super) const LEAST_BLOCKS: usize = 8;
const MOST_BLOCKS: u64 = 30;
/// Minimum length of a block, nanoseconds.
const LEAST_NS: u64 = 250_000_000;
/// Minimum length of a recording that has such blocks, seconds.
pub(super) const LEAST_SECONDS: f64 = LEAST_BLOCKS as f64 * (LEAST_NS as f64 / 1e9);

/// The bins of a recording.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Grid {
    began_ns: Option<u64>,
    /// Bins have their initial length times 2 to the power of this.
    shift: u32,
}

impl Grid {
    /// Everything is traced from this time on.
    pub(super) fn begin(&mut self, ts_ns: u64) {
        self.began_ns.get_or_insert(ts_ns);
    }

    /// Since when events count, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) fn began_ns(&self) -> Option<u64> {
        self.began_ns
    }

    fn width_ns(&self) -> u64 {
        WIDTH_NS << self.shift
    }

    /// The bin of a time; `None`: it is before the start.
    pub(super) fn bin(&mut self, ts_ns: u64) -> Option<Bin> {
        let after_ns = ts_ns.checked_sub(self.began_ns?)?;
        // A time beyond any real recording falls into the last bin.
        while after_ns / self.width_ns() >= BINS && self.shift < 30 {
            self.shift += 1;
        }
        Some(Bin { at: (after_ns / self.width_ns()).min(BINS - 1) as u32, shift: self.shift })
    }

    /// Calls `of` for each bin of an interval, with the nanoseconds of the interval that lie in the bin.
    pub(super) fn spread(&mut self, from_ns: u64, to_ns: u64, mut of: impl FnMut(Bin, f64)) {
        let Some(began_ns) = self.began_ns else { return };
        let from_ns = from_ns.max(began_ns);
        let Some(last) = to_ns.checked_sub(1).filter(|last| *last >= from_ns).and_then(|last| self.bin(last))
        else {
            return;
        };
        let Some(first) = self.bin(from_ns) else { return };
        let width_ns = self.width_ns();
        for at in first.at..=last.at {
            let bin_ns = began_ns + u64::from(at) * width_ns;
            let end_ns = if at == last.at { to_ns } else { (bin_ns + width_ns).min(to_ns) };
            of(Bin { at, shift: self.shift }, end_ns.saturating_sub(bin_ns.max(from_ns)) as f64);
        }
    }

    /// The blocks of a recording that ended at this time; `None`: it is too short for blocks.
    pub(super) fn cut(&mut self, ended_ns: u64) -> Option<Cut> {
        let span_ns = ended_ns.checked_sub(self.began_ns?)?;
        self.bin(ended_ns.saturating_sub(1))?;
        let width_ns = self.width_ns();
        let bins = span_ns / width_ns;
        let group = bins.div_ceil(MOST_BLOCKS).max(LEAST_NS.div_ceil(width_ns));
        // The remainder at the end belongs to the last block.
        let blocks = (bins / group) as usize;
        (blocks >= LEAST_BLOCKS).then_some(Cut {
            shift: self.shift,
            group: group as u32,
            blocks,
            block_ns: group * width_ns,
        })
    }
}

/// The index of a bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin {
    at: u32,
    shift: u32,
}

/// How bins are grouped into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    shift: u32,
    group: u32,
    pub(super) blocks: usize,
    /// Length of a block, nanoseconds.
    pub(super) block_ns: u64,
}

/// Sums by bin; bins that are zero are not stored.
#[derive(Clone, Debug, Default)]
pub(super) struct Series {
    shift: u32,
    bins: Vec<(u32, f64)>,
}

impl Series {
    /// Adds to a bin. Bins arrive nearly in order.
    pub(super) fn add(&mut self, bin: Bin, value: f64) {
        self.fold(bin.shift);
        let at = bin.at >> (self.shift - bin.shift);
        match self.bins.iter_mut().rev().take(4).find(|(known, _)| *known == at) {
            Some((_, sum)) => *sum += value,
            None => self.insert(at, value),
        }
    }

    fn insert(&mut self, at: u32, value: f64) {
        match self.bins.binary_search_by_key(&at, |(known, _)| *known) {
            Ok(known) => self.bins[known].1 += value,
            Err(place) => self.bins.insert(place, (at, value)),
        }
    }

    /// Merges bins to this length.
    fn fold(&mut self, shift: u32) {
        if shift <= self.shift {
            return;
        }
        let by = shift - self.shift;
        self.shift = shift;
        for (at, value) in std::mem::take(&mut self.bins) {
            match self.bins.last_mut().filter(|(known, _)| *known == at >> by) {
                Some((_, sum)) => *sum += value,
                None => self.bins.push((at >> by, value)),
            }
        }
    }

    /// Sum of all bins.
    pub(super) fn total(&self) -> f64 {
        // An empty sum is -0.
        self.bins.iter().map(|(_, value)| value).sum::<f64>() + 0.0
    }

    /// The non-zero bins, as pairs of block index and sum; a block may occur several times.
    pub(super) fn some(&self, cut: &Cut) -> impl Iterator<Item = (usize, f64)> {
        let by = cut.shift - self.shift;
        let (group, last) = (cut.group, cut.blocks - 1);
        self.bins.iter().map(move |(at, value)| ((((at >> by) / group) as usize).min(last), *value))
    }

    /// The sums of all blocks.
    pub(super) fn blocks(&self, cut: &Cut) -> Vec<f64> {
        let mut blocks = vec![0.0; cut.blocks];
        for (block, value) in self.some(cut) {
            blocks[block] += value;
        }
        blocks
    }
}

/// Number of fractional bits of a time's logarithm: a bucket is less than 1 % wide.
const BITS: u32 = 7;

/// Times by length, within 1 %, and by when they occurred.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    buckets: BTreeMap<u32, Series>,
    pub(super) count: u64,
    /// The longest time, exact.
    pub(super) max_ns: u64,
}

impl Times {
    /// Counts `count` times of this length.
    pub(super) fn add(&mut self, bin: Bin, ns: u64, count: u64) {
        self.count += count;
        self.max_ns = self.max_ns.max(ns);
        self.buckets.entry(bucket(ns)).or_default().add(bin, count as f64);
    }

    /// The time that this share of all times does not exceed, with each block taken `taken` times.
    fn quantile_of(&self, quantile: f64, weights: &[Vec<(usize, f64)>], taken: &[u32]) -> Option<f64> {
        let weight = |blocks: &Vec<(usize, f64)>| -> f64 {
            blocks.iter().map(|(block, count)| count * f64::from(taken[*block])).sum()
        };
        let wanted = weights.iter().map(weight).sum::<f64>() * quantile;
        let mut passed = 0.0;
        for (bucket, blocks) in self.buckets.keys().zip(weights) {
            let weight = weight(blocks);
            passed += weight;
            if weight > 0.0 && passed >= wanted {
                return Some(most(*bucket).min(self.max_ns) as f64);
            }
        }
        None
    }

    /// A quantile, at most 1 % too high, and its variance by a bootstrap over blocks; nanoseconds.
    pub(super) fn quantile(&self, quantile: f64, cut: Option<&Cut>) -> Option<(f64, Option<f64>)> {
        let Some(cut) = cut else {
            let whole: Vec<_> = self.buckets.values().map(|series| vec![(0, series.total())]).collect();
            return Some((self.quantile_of(quantile, &whole, &[1])?, None));
        };
        let weights: Vec<Vec<_>> = self.buckets.values().map(|series| series.some(cut).collect()).collect();
        let value = self.quantile_of(quantile, &weights, &vec![1; cut.blocks])?;
        let variance = statistics::bootstrap(cut.blocks, |taken| self.quantile_of(quantile, &weights, taken));
        Some((value, variance))
    }

    /// The times by block, for [`Tail`].
    pub(super) fn tail(&self, quantile: f64, cut: &Cut) -> Tail {
        let buckets = self.buckets.iter().map(|(bucket, series)| {
            (most(*bucket).min(self.max_ns) as f64, series.some(cut).collect::<Vec<_>>())
        });
        Tail { quantile, blocks: cut.blocks, buckets: buckets.collect() }
    }
}

/// The times of a recording, block by block, to test a quantile of them against a bound.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tail {
    quantile: f64,
    blocks: usize,
    /// Longest time of each bucket in nanoseconds, and how many times each block has of it.
    buckets: Vec<(f64, Vec<(usize, f64)>)>,
}

impl Tail {
    /// How probable it is that the quantile is seen as far beyond `bound` (nanoseconds) as here if it is not beyond it.
    ///
    /// The quantile q is above a bound if more than 1 - q of the times are. A share has an error of its own on each side, which a quantile
    /// lacks: with a few very long times, an interval around a 99th percentile that is as wide below as above reaches far below all times.
    pub(super) fn p_beyond(&self, bound: f64, above: bool) -> f64 {
        let (mut all, mut over) = (vec![0.0; self.blocks], vec![0.0; self.blocks]);
        for (longest, blocks) in &self.buckets {
            let is_over = if above { *longest > bound } else { *longest >= bound };
            for (block, count) in blocks {
                all[*block] += count;
                if is_over {
                    over[*block] += count;
                }
            }
        }
        let total: f64 = all.iter().sum();
        let Some(share) = statistics::ratio(over.into_iter().zip(all)) else { return 1.0 };
        // Equal blocks can be so by chance: a share of that many times has at least this variance.
        let by_chance = share.value * (1.0 - share.value) / total;
        statistics::p_beyond(&share.at_least(by_chance), 1.0 - self.quantile, above)
    }
}

fn bucket(ns: u64) -> u32 {
    let bits = u64::BITS - ns.leading_zeros();
    let drop = bits.saturating_sub(BITS + 1);
    // Buckets of one power of two are numbered 2^7 to 2^8 - 1, so they follow those of the power below.
    (drop << BITS) + (ns >> drop) as u32
}

/// The longest time of a bucket.
fn most(bucket: u32) -> u64 {
    let drop = (bucket >> BITS).saturating_sub(1);
    let top = u128::from(bucket - (drop << BITS)) + 1;
    ((top << drop) - 1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums of whole numbers are exact")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    proptest! {
        /// Buckets are in order, contain their times, and are narrow.
        #[test]
        fn buckets(ns in any::<u64>(), other in any::<u64>()) {
            let most = most(bucket(ns));
            prop_assert!(most >= ns && most - ns <= ns / 128, "{ns} {most}");
            prop_assert!(bucket(ns.min(other)) <= bucket(ns.max(other)));
        }

        /// Nothing is lost and memory is bounded, however long a recording is and in whatever order events arrive.
        #[test]
        fn sums(mut times in proptest::collection::vec(0_u64..500 * SECOND, 1..300)) {
            let (mut grid, mut series) = (Grid::default(), Series::default());
            grid.begin(7);
            for &ts in &times {
                series.add(grid.bin(ts + 7).unwrap(), 1.0);
            }
            prop_assert_eq!(series.total(), times.len() as f64);
            prop_assert!(series.bins.len() <= BINS as usize);
            prop_assert!(series.bins.windows(2).all(|pair| pair[0].0 < pair[1].0));
            times.sort_unstable();
            let ended_ns = times[times.len() - 1] + 8;
            let Some(cut) = grid.cut(ended_ns) else {
                prop_assert!(ended_ns - 7 < 3 * SECOND);
                return Ok(());
            };
            prop_assert!((LEAST_BLOCKS..=MOST_BLOCKS as usize).contains(&cut.blocks), "{:?}", cut);
            prop_assert!(cut.block_ns >= LEAST_NS && cut.block_ns * cut.blocks as u64 <= ended_ns - 7);
            let blocks = series.blocks(&cut);
            let first = times.iter().filter(|ts| **ts < cut.block_ns).count();
            prop_assert_eq!((blocks.iter().sum::<f64>(), blocks[0]), (times.len() as f64, first as f64));
        }
    }

    /// Events before the start do not count, and an interval counts where it was.
    #[test]
    fn intervals() {
        let mut grid = Grid::default();
        assert_eq!(grid.bin(5), None);
        grid.begin(SECOND);
        assert_eq!(grid.bin(SECOND - 1), None);
        let mut series = Series::default();
        grid.spread(0, 11 * SECOND, |bin, ns| series.add(bin, ns));
        grid.spread(3 * SECOND, 3 * SECOND, |bin, ns| series.add(bin, ns));
        assert_eq!(series.total(), 10e9);
        let cut = grid.cut(11 * SECOND).unwrap();
        let blocks = series.blocks(&cut);
        assert!(blocks.iter().all(|ns| *ns == cut.block_ns as f64), "{blocks:?}");
        assert_eq!(grid.cut(2 * SECOND), None);
    }

    /// Quantiles are those of sorted times, and vary if blocks differ.
    #[test]
    fn quantiles() {
        let mut grid = Grid::default();
        grid.begin(0);
        let (mut even, mut bursts) = (Times::default(), Times::default());
        for at in 0..10_000_u64 {
            let bin = grid.bin(at * 1_000_000).unwrap();
            even.add(bin, 1000 + at * 37 % 1000, 1);
            bursts.add(bin, if (at / 1000).is_multiple_of(2) { 1000 } else { 2000 }, 1);
        }
        let cut = grid.cut(10 * SECOND).unwrap();
        let (p50, variance) = even.quantile(0.5, Some(&cut)).unwrap();
        assert!((1499.0..=1513.0).contains(&p50) && variance.unwrap() < 1000.0, "{p50} {variance:?}");
        let (_, variance) = bursts.quantile(0.5, Some(&cut)).unwrap();
        assert!(variance.unwrap() > 10_000.0, "{variance:?}");
        assert_eq!(even.quantile(1.0, None).unwrap(), (1999.0, None));
        assert_eq!(Times::default().quantile(0.5, Some(&cut)), None);
    }
    /// A few long times make a 99th percentile uncertain upwards, but all times stay above a bound below them all.
    #[test]
    fn skewed_quantiles() {
        let (mut grid, mut times) = (Grid::default(), Times::default());
        grid.begin(0);
        for block in 0..20 {
            let bin = grid.bin(block * SECOND).unwrap();
            (0..50_u64).for_each(|at| times.add(bin, 1_000_000 + at * 10_000, 1));
            times.add(bin, 500_000_000, if block == 7 { 12 } else { 0 });
        }
        let cut = grid.cut(20 * SECOND).unwrap();
        let (value, variance) = times.quantile(0.99, Some(&cut)).unwrap();
        let symmetric = statistics::Estimate { value, variance: variance.unwrap(), freedom: 19.0 };
        assert!(statistics::p_beyond(&symmetric, 1_000.0, true) > 0.005, "not skewed: {symmetric:?}");
        let tail = times.tail(0.99, &cut);
        assert!(tail.p_beyond(1_000.0, true) < 1e-9 && tail.p_beyond(900_000.0, true) < 1e-9);
        // That one block had 12 of 1012 in it can be chance.
        assert!(tail.p_beyond(400_000_000.0, true) > 0.1);
        assert_eq!(tail.p_beyond(600_000_000.0, true), 1.0);
        assert_eq!(tail.p_beyond(1_000.0, false), 1.0);
        assert!(tail.p_beyond(600_000_000.0, false) < 1e-9);
    }
}
