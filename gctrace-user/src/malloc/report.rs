//! The report of a window.

use std::time::Duration;

use gctrace_common::malloc::{
    MALLOC_AGES, MALLOC_CLASSES, MALLOC_FUNCTIONS, MallocCount, MallocTally, malloc_age_index, malloc_class,
    malloc_class_limit, malloc_count_index, malloc_size_index,
};

use super::sampling::Sampled;
use crate::bpf::MallocRead;

/// The allocation functions, in the order of their tallies.
pub(super) const FUNCTIONS: [&str; MALLOC_FUNCTIONS as usize] = ["malloc", "calloc", "realloc"];

/// The process.
pub(super) struct Who {
    pub(super) pid: u32,
    pub(super) command: Option<String>,
    pub(super) ruby: String,
}

/// What ended the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The requested time has passed.
    Time,
    /// A signal to gctrace.
    Signal,
    /// The process has ended.
    Process,
    /// Its cost exceeded the budget.
    Budget {
        /// The budget, in millionths of the time of one CPU.
        ppm: u64,
    },
}

impl Ended {
    /// The name in JSON output.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Signal => "signal",
            Self::Process => "process",
            Self::Budget { .. } => "budget",
        }
    }
}

/// Calls of one size class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SizeRow {
    /// Upper limit of the size, bytes.
    pub(super) up_to: u64,
    /// Calls by function.
    pub(super) calls: [MallocTally; FUNCTIONS.len()],
    /// Memory that was allocated and freed in the window, by the number of collections between allocation and free; the last entry includes
    /// all higher numbers.
    pub(super) freed: Vec<MallocTally>,
    /// Memory that was allocated in the window and not freed before its end.
    pub(super) live: MallocTally,
}

impl SizeRow {
    /// The sum over all functions.
    pub(super) fn all(&self) -> MallocTally {
        self.calls.iter().fold(MallocTally::default(), |sum, one| plus(sum, *one))
    }

    /// Adds the calls of another process.
    fn absorb(&mut self, other: &Self) {
        let both = |mine: &mut [MallocTally], theirs: &[MallocTally]| {
            for (mine, theirs) in mine.iter_mut().zip(theirs) {
                *mine = plus(*mine, *theirs);
            }
        };
        both(&mut self.calls, &other.calls);
        both(&mut self.freed, &other.freed);
        self.live = plus(self.live, other.live);
    }

    fn is_empty(&self) -> bool {
        let none = MallocTally::default();
        self.all() == none && self.live == none && self.freed.iter().all(|tally| *tally == none)
    }
}

/// Sums over calls, of one process or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    /// Non-empty size classes, smallest first.
    pub(super) sizes: Vec<SizeRow>,
    counts: [u64; MallocCount::ALL.len()],
}

/// The data to print.
pub(super) struct Report {
    pub(super) who: Who,
    pub(super) lasted: Duration,
    pub(super) ended: Ended,
    /// `GC.count` before and after, if it could be read.
    pub(super) gc_count: [Option<u64>; 2],
    pub(super) sums: Sums,
    /// Allocation sites, if stacks were taken.
    pub(super) sampled: Option<Sampled>,
    /// Bytes that are represented by all calls whose stack was to be taken.
    stood_for: u64,
}

impl Report {
    /// Builds the report from the data that was read.
    pub(super) fn of(
        who: Who,
        read: &MallocRead,
        lasted: Duration,
        ended: Ended,
        gc_count: [Option<u64>; 2],
    ) -> Self {
        let tally = |index: u32| read.tallies.get(index as usize).copied().unwrap_or_default();
        let mut sizes: Vec<SizeRow> = (0..MALLOC_CLASSES)
            .map(|class| SizeRow {
                up_to: malloc_class_limit(class),
                calls: std::array::from_fn(|function| tally(malloc_size_index(function as u32, class))),
                freed: (0..MALLOC_AGES).map(|age| tally(malloc_age_index(class, age))).collect(),
                live: MallocTally::default(),
            })
            .collect();
        for block in &read.live {
            let row = &mut sizes[malloc_class(block.size) as usize];
            row.live = plus(row.live, MallocTally { calls: 1, bytes: block.size });
        }
        sizes.retain(|row| !row.is_empty());
        let stood_for = tally(malloc_count_index(MallocCount::Sampled)).bytes;
        let counts = MallocCount::ALL.map(|count| tally(malloc_count_index(count)).calls);
        Self { who, lasted, ended, gc_count, sums: Sums { sizes, counts }, sampled: None, stood_for }
    }

    /// Number of lost stacks, and the bytes that they represent, which the allocation sites lack.
    pub(super) fn stacks_lost(&self) -> MallocTally {
        let Some(sampled) = &self.sampled else { return MallocTally::default() };
        MallocTally {
            calls: self.sums.count(MallocCount::Sampled).saturating_sub(sampled.stacks),
            bytes: self.stood_for.saturating_sub(sampled.stood_for),
        }
    }
}

impl Sums {
    /// The sums of several processes.
    pub(super) fn of_all<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        for one in all {
            for (count, more) in sum.counts.iter_mut().zip(one.counts) {
                *count += more;
            }
            for row in &one.sizes {
                match sum.sizes.binary_search_by_key(&row.up_to, |known| known.up_to) {
                    Ok(at) => sum.sizes[at].absorb(row),
                    Err(at) => sum.sizes.insert(at, row.clone()),
                }
            }
        }
        sum
    }

    /// A count.
    pub(super) fn count(&self, count: MallocCount) -> u64 {
        self.counts[count as usize]
    }

    /// Calls and bytes by function.
    pub(super) fn totals(&self) -> [MallocTally; FUNCTIONS.len()] {
        std::array::from_fn(|function| self.sizes.iter().map(|row| row.calls[function]).fold_sum())
    }

    /// Memory freed in the window, by age.
    pub(super) fn ages(&self) -> Vec<MallocTally> {
        (0..MALLOC_AGES as usize).map(|age| self.sizes.iter().map(|row| row.freed[age]).fold_sum()).collect()
    }

    /// Memory allocated in the window that is still there at its end.
    pub(super) fn live(&self) -> MallocTally {
        self.sizes.iter().map(|row| row.live).fold_sum()
    }

    /// Whether all followed allocations are accounted for: they were freed, still exist, or are known to have been lost track of.
    pub(super) fn adds_up(&self) -> bool {
        let freed: u64 = self.ages().iter().map(|tally| tally.calls).sum();
        let lost = self.count(MallocCount::Replaced) + self.count(MallocCount::Lost);
        freed + self.live().calls + lost == self.count(MallocCount::Followed)
    }
}

fn plus(one: MallocTally, two: MallocTally) -> MallocTally {
    MallocTally { calls: one.calls + two.calls, bytes: one.bytes + two.bytes }
}

trait FoldSum: Iterator<Item = MallocTally> + Sized {
    fn fold_sum(self) -> MallocTally {
        self.fold(MallocTally::default(), plus)
    }
}

impl<I: Iterator<Item = MallocTally>> FoldSum for I {}

#[cfg(test)]
pub(super) mod tests {
    use gctrace_common::malloc::{MALLOC_TALLIES, MallocBlock};

    use super::*;

    /// Three calls of malloc (two of them in one class), one of realloc; one block was freed after two collections, and two are left.
    pub(crate) fn sample(ended: Ended) -> Report {
        let mut tallies = vec![MallocTally::default(); MALLOC_TALLIES as usize];
        let mut set = |index: u32, calls, bytes| tallies[index as usize] = MallocTally { calls, bytes };
        set(malloc_size_index(0, malloc_class(100)), 2, 220);
        set(malloc_size_index(0, malloc_class(5000)), 1, 5000);
        set(malloc_size_index(2, malloc_class(9000)), 1, 9000);
        set(malloc_age_index(malloc_class(100), 2), 1, 100);
        for (count, calls) in [
            (MallocCount::Hits, 7),
            (MallocCount::Followed, 3),
            (MallocCount::Frees, 2),
            (MallocCount::FreesUnknown, 1),
        ] {
            set(malloc_count_index(count), calls, 0);
        }
        let live = [120, 9000].map(|size| MallocBlock { size, born: 4, ..MallocBlock::default() }).to_vec();
        let command = Some("ruby \u{1b}[31mapp.rb".to_owned());
        let who = Who { pid: 42, command, ruby: "3.4.1".to_owned() };
        let read = MallocRead { tallies, live };
        Report::of(who, &read, Duration::from_millis(2500), ended, [Some(4), Some(6)])
    }

    #[test]
    fn sums() {
        let report = sample(Ended::Time);
        let limits: Vec<u64> = report.sums.sizes.iter().map(|row| row.up_to).collect();
        assert_eq!(limits, [128, 8192, 16_384]);
        assert_eq!(report.sums.totals().map(|tally| tally.calls), [3, 0, 1]);
        assert_eq!((report.sums.live().calls, report.sums.live().bytes), (2, 9120));
        assert_eq!((report.sums.ages()[2].calls, report.sums.ages()[2].bytes), (1, 100));
        assert!(report.sums.adds_up());
        let mut two = sample(Ended::Time);
        two.sums.sizes.remove(0);
        let both = Sums::of_all([&two.sums, &report.sums]);
        let calls: Vec<u64> = both.sizes.iter().map(|row| row.all().calls).collect();
        assert_eq!((calls, both.count(MallocCount::Hits)), (vec![2, 2, 2], 14));
        assert_eq!((both.ages()[2].calls, both.live().bytes), (1, 9120 + 9000));
        let mut other = report;
        other.sums.counts[MallocCount::Followed as usize] += 1;
        assert!(!other.sums.adds_up());
    }
}
