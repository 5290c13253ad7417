//! Figures by columns of time. While the end of the time is unknown, columns are merged as it grows.

use crate::held::Held;

/// Maximum number of columns.
pub(crate) const COLUMNS: usize = 200;
/// Initial width of columns if the end is unknown, nanoseconds.
const FIRST_NS: u64 = 1_000_000;
/// Number of classes of durations.
pub(crate) const CLASSES: usize = 10;
/// Exclusive upper bounds of the classes, nanoseconds; the last class is unbounded.
const BOUNDS: [u64; CLASSES - 1] =
    [100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 300_000_000, 1_000_000_000];
/// Names of the classes.
pub(crate) const CLASS_NAMES: [&str; CLASSES] = [
    "< 0.1 ms",
    "0.1–0.3 ms",
    "0.3–1 ms",
    "1–3 ms",
    "3–10 ms",
    "10–30 ms",
    "30–100 ms",
    "0.1–0.3 s",
    "0.3–1 s",
    "≥ 1 s",
];

/// The class of a duration.
pub(crate) fn class(ns: u64) -> usize {
    BOUNDS.partition_point(|bound| *bound <= ns)
}

/// The content of a column.
pub(crate) trait Fold: Clone + Default {
    /// Adds the content of another column, which becomes part of this one.
    fn add(&mut self, other: &Self);
}

/// What happened during a column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Cycles that began during it.
    pub(crate) cycles: u64,
    /// Major cycles among them.
    pub(crate) majors: u64,
    /// The longest pause that began during it.
    pub(crate) longest_ns: u64,
    /// Time in pauses.
    pub(crate) pause_ns: u64,
    /// CPU time of samples.
    pub(crate) cpu_ns: u64,
    /// Maximum amounts that all processes together held, in the order of the constants of [`Held`]; `None` if unknown.
    pub(crate) held: [Option<u64>; Held::KINDS],
    /// Bytes of allocated slots.
    pub(crate) allocated: u64,
    /// Requests that began.
    pub(crate) requests: u64,
    /// Requests that ended.
    pub(crate) served: u64,
    /// Pauses by class.
    pub(crate) pauses: [u64; CLASSES],
    /// Long waits for the GVL by class.
    pub(crate) waits: [u64; CLASSES],
}

impl Fold for Cell {
    fn add(&mut self, other: &Self) {
        self.cycles += other.cycles;
        self.majors += other.majors;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
        self.pause_ns = self.pause_ns.saturating_add(other.pause_ns);
        self.cpu_ns = self.cpu_ns.saturating_add(other.cpu_ns);
        self.held.iter_mut().zip(other.held).for_each(|(mine, more)| *mine = (*mine).max(more));
        self.allocated = self.allocated.saturating_add(other.allocated);
        self.requests += other.requests;
        self.served += other.served;
        for (mine, more) in [(&mut self.pauses, &other.pauses), (&mut self.waits, &other.waits)] {
            mine.iter_mut().zip(more).for_each(|(mine, more)| *mine += more);
        }
    }
}

/// Columns of cells.
pub(crate) type Columns = Over<Cell>;

/// Columns of the same width, earliest first.
#[derive(Clone, Debug)]
pub(crate) struct Over<C> {
    pub(crate) from_ns: u64,
    pub(crate) width_ns: u64,
    pub(crate) cells: Vec<C>,
    /// End of the covered time, exclusive.
    end_ns: u64,
    /// Maximum number of columns; above it, pairs of columns are merged.
    most: usize,
    /// Whether times before the first column are ignored instead of belonging to it.
    forgets: bool,
    /// The time since which everything was traced. Earlier durations are in no sum.
    traced_ns: u64,
}

impl<C: Fold> Over<C> {
    /// Columns from a time on, up to another if that is known.
    pub(crate) fn new(from_ns: u64, to_ns: Option<u64>) -> Self {
        let width_ns = to_ns.map_or(FIRST_NS, |to_ns| to_ns.saturating_sub(from_ns).div_ceil(COLUMNS as u64));
        Self {
            from_ns,
            width_ns: width_ns.max(1),
            cells: Vec::new(),
            end_ns: to_ns.unwrap_or(u64::MAX),
            most: COLUMNS,
            forgets: false,
            traced_ns: 0,
        }
    }

    /// Columns from a time on, without an end. The caller must remove old ones before their number reaches the limit `most`.
    pub(crate) fn rolling(from_ns: u64, width_ns: u64, most: usize) -> Self {
        Self { width_ns: width_ns.max(1), most, forgets: true, ..Self::new(from_ns, None) }
    }

    /// Drops columns that ended before a time.
    pub(crate) fn forget(&mut self, before_ns: u64) {
        let old = before_ns.saturating_sub(self.from_ns) / self.width_ns;
        self.from_ns += old * self.width_ns;
        self.cells.drain(..self.cells.len().min(old as usize));
    }

    /// The columns that had ended by `until_ns`, merged so that there are few. Each begins a multiple of its width after `origin_ns`, so that they
    /// do not change as time passes once `full` of them exist; columns that would fill only a part of a merged one are left out.
    pub(crate) fn together(&self, origin_ns: u64, until_ns: u64, full: usize) -> Self {
        let ended = (until_ns.saturating_sub(self.from_ns) / self.width_ns) as usize;
        let ended = ended.min(self.cells.len());
        let number = if self.from_ns > origin_ns { ended.max(full) } else { ended };
        let each = number.div_ceil(COLUMNS).max(1);
        let passed = (self.from_ns.saturating_sub(origin_ns) / self.width_ns) as usize % each;
        let skipped = if passed == 0 { 0 } else { (each - passed).min(ended) };
        let sum = |cells: &[C]| {
            cells.iter().fold(C::default(), |mut sum, cell| {
                sum.add(cell);
                sum
            })
        };
        let cells = self.cells[skipped..ended].chunks_exact(each).map(sum).collect();
        let from_ns = self.from_ns.saturating_add(skipped as u64 * self.width_ns);
        Self { from_ns, width_ns: self.width_ns.saturating_mul(each as u64), cells, ..self.clone() }
    }

    /// Everything is traced from this time on; `clear` removes the sums of earlier durations from a column.
    pub(crate) fn traced(&mut self, since_ns: u64, clear: impl Fn(&mut C)) {
        self.traced_ns = since_ns;
        self.cells.iter_mut().for_each(clear);
    }

    /// Whether everything was traced at a time.
    pub(crate) fn is_traced(&self, ns: u64) -> bool {
        ns >= self.traced_ns
    }

    /// The sum of the last `most` columns that had ended by a time, and for how much of their time everything was traced, nanoseconds.
    pub(crate) fn latest(&self, until_ns: u64, most: usize) -> (C, u64) {
        let ended = ((until_ns.saturating_sub(self.from_ns) / self.width_ns) as usize).min(self.cells.len());
        let first = ended.saturating_sub(most);
        let mut sum = C::default();
        for cell in &self.cells[first..ended] {
            sum.add(cell);
        }
        let length = (first..ended).map(|at| self.length(at, u64::MAX)).sum();
        (sum, length)
    }

    /// For how much of a column's time up to `end_ns` everything was traced, nanoseconds.
    fn length(&self, at: usize, end_ns: u64) -> u64 {
        let begin_ns = self.from_ns.saturating_add((at as u64).saturating_mul(self.width_ns));
        let next_ns = begin_ns.saturating_add(self.width_ns);
        next_ns.min(end_ns).saturating_sub(begin_ns.max(self.traced_ns))
    }

    /// For how much of each column's time up to `end_ns` everything was traced, nanoseconds. A column that begins after `end_ns` counts in full.
    pub(crate) fn lengths(&self, end_ns: u64) -> impl Iterator<Item = u64> {
        let begins = move |at: usize| self.from_ns.saturating_add((at as u64).saturating_mul(self.width_ns));
        let length = move |at: usize| self.length(at, if begins(at) < end_ns { end_ns } else { u64::MAX });
        (0..self.cells.len()).map(length)
    }

    /// Columns of the same time with another content.
    pub(crate) fn like<D: Fold>(&self) -> Over<D> {
        Over::new(self.from_ns, (self.end_ns != u64::MAX).then_some(self.end_ns))
    }

    /// The column of a time; `None` if the time is after the end. Times before the first column belong to it, or to none if it `forgets`.
    pub(crate) fn at(&mut self, ns: u64) -> Option<&mut C> {
        if ns >= self.end_ns || (self.forgets && ns < self.from_ns) {
            return None;
        }
        while self.number(ns) >= self.most as u64 {
            self.fold();
        }
        let at = self.number(ns) as usize;
        if at >= self.cells.len() {
            self.cells.resize_with(at + 1, C::default);
        }
        self.cells.get_mut(at)
    }

    /// Adds a duration to all columns that it covers, to each its part.
    pub(crate) fn cover(&mut self, begin_ns: u64, ns: u64, of: impl Fn(&mut C) -> &mut u64) {
        let end_ns = begin_ns.saturating_add(ns).min(self.end_ns);
        let begin_ns = begin_ns.max(self.from_ns).max(self.traced_ns);
        if begin_ns >= end_ns {
            return;
        }
        // Extend the columns first: then they do not change below, and their number is bounded.
        self.reach(end_ns);
        for at in self.number(begin_ns)..=self.number(end_ns - 1) {
            let first_ns = self.from_ns.saturating_add(at.saturating_mul(self.width_ns));
            let next_ns = first_ns.saturating_add(self.width_ns);
            if let Some(cell) = self.cells.get_mut(at as usize) {
                let sum = of(cell);
                *sum = sum.saturating_add(next_ns.min(end_ns).saturating_sub(first_ns.max(begin_ns)));
            }
        }
    }

    /// Spreads bytes evenly over the columns from `begin_ns` to `end_ns`, because the exact times are unknown.
    pub(crate) fn spread(&mut self, begin_ns: u64, end_ns: u64, bytes: u64, of: impl Fn(&mut C) -> &mut u64) {
        let end_ns = end_ns.max(begin_ns.saturating_add(1));
        let first_ns = begin_ns.max(self.from_ns).max(self.traced_ns);
        let last_ns = end_ns.min(self.end_ns);
        if first_ns >= last_ns {
            return;
        }
        self.reach(last_ns);
        // The bytes up to a time, so that no byte is in two columns or in none.
        let until = |ns: u64| {
            let part = u128::from(bytes) * u128::from(ns - begin_ns) / u128::from(end_ns - begin_ns);
            u64::try_from(part).unwrap_or(bytes)
        };
        for at in self.number(first_ns)..=self.number(last_ns - 1) {
            let column_ns = self.from_ns.saturating_add(at.saturating_mul(self.width_ns));
            let next_ns = column_ns.saturating_add(self.width_ns).min(last_ns);
            if let Some(cell) = self.cells.get_mut(at as usize) {
                let sum = of(cell);
                *sum = sum.saturating_add(until(next_ns) - until(column_ns.max(first_ns)));
            }
        }
    }

    fn number(&self, ns: u64) -> u64 {
        ns.saturating_sub(self.from_ns) / self.width_ns
    }

    /// Extends the columns up to a time.
    pub(crate) fn reach(&mut self, to_ns: u64) {
        if to_ns > self.from_ns {
            self.at(to_ns - 1);
        }
    }

    /// Merges columns until they are at least this wide.
    pub(crate) fn widen(&mut self, width_ns: u64) {
        while self.width_ns < width_ns {
            self.fold();
        }
    }

    fn fold(&mut self) {
        let pairs = self.cells.chunks(2).map(|pair| {
            let mut sum = pair[0].clone();
            if let Some(other) = pair.get(1) {
                sum.add(other);
            }
            sum
        });
        self.cells = pairs.collect();
        self.width_ns = self.width_ns.saturating_mul(2);
    }

    /// The sum of all columns.
    pub(crate) fn sum(&self) -> C {
        self.cells.iter().fold(C::default(), |mut sum, cell| {
            sum.add(cell);
            sum
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However long the time becomes, the columns stay few and nothing is lost.
    #[test]
    fn grows() {
        let mut columns = Columns::new(1000, None);
        for n in 0..100_000_u64 {
            let cell = columns.at(1000 + n * 7_000_000).unwrap();
            cell.pauses[class(n * 1000)] += 1;
            cell.held[0] = Some(n);
        }
        assert!(
            columns.cells.len() <= COLUMNS && columns.cells.len() > COLUMNS / 2,
            "{}",
            columns.cells.len()
        );
        let sum = columns.sum();
        assert_eq!((sum.pauses.iter().sum::<u64>(), sum.held[0]), (100_000, Some(99_999)));
        assert_eq!(sum.pauses[0], 100, "those below 0.1 ms");
    }

    /// A pause counts in all columns that it covers, and no column has more of it than its width.
    #[test]
    fn covers() {
        let mut columns = Columns::new(0, Some(COLUMNS as u64 * 10));
        columns.cover(15, 30, |cell| &mut cell.pause_ns);
        columns.cover(3, 4, |cell| &mut cell.pause_ns);
        let times: Vec<u64> = columns.cells.iter().map(|cell| cell.pause_ns).collect();
        assert_eq!(times, [4, 5, 10, 10, 5]);
        columns.reach(COLUMNS as u64 * 10);
        assert_eq!((columns.cells.len(), columns.width_ns), (COLUMNS, 10));
        // A duration that ends after the last column.
        columns.cover(COLUMNS as u64 * 10 - 5, 1000, |cell| &mut cell.pause_ns);
        assert_eq!((columns.sum().pause_ns, columns.cells.len()), (34 + 5, COLUMNS));
        assert!(columns.at(COLUMNS as u64 * 10).is_none());
        // A duration that begins before the first column.
        let mut later = Columns::new(100, Some(100 + COLUMNS as u64 * 10));
        later.cover(95, 12, |cell| &mut cell.pause_ns);
        later.cover(10, 20, |cell| &mut cell.pause_ns);
        assert_eq!(later.sum().pause_ns, 7);
        let mut open = Columns::new(0, None);
        open.cover(0, 3_600_000_000_000, |cell| &mut cell.pause_ns);
        assert_eq!(open.sum().pause_ns, 3_600_000_000_000);
    }

    /// Amounts of a time are spread over all of its columns.
    #[test]
    fn spreads() {
        fn allocated(cell: &mut Cell) -> &mut u64 {
            &mut cell.allocated
        }
        let mut columns = Columns::new(0, Some(COLUMNS as u64 * 10));
        columns.spread(5, 35, 103, allocated);
        let bytes = |columns: &Columns| columns.cells.iter().map(|cell| cell.allocated).collect::<Vec<_>>();
        assert_eq!(bytes(&columns), [17, 34, 34, 18]);
        // The same rate in consecutive times is the same rate in all columns.
        columns.spread(35, 65, 103, allocated);
        assert_eq!(bytes(&columns), [17, 34, 34, 35, 34, 34, 18]);
        // The part beyond the end is in no column.
        columns.spread(COLUMNS as u64 * 10 - 5, COLUMNS as u64 * 10 + 5, 8, allocated);
        columns.spread(50, 50, 1, allocated);
        assert_eq!((columns.sum().allocated, columns.cells.len()), (211, COLUMNS));
    }

    /// Durations before everything was traced are in no sum, and the length of a column is the time during which everything was traced.
    #[test]
    fn since_it_is_traced() {
        let mut columns = Columns::new(0, Some(COLUMNS as u64 * 10));
        columns.cover(2, 9, |cell| &mut cell.pause_ns);
        columns.traced(14, |cell| cell.pause_ns = 0);
        columns.cover(12, 9, |cell| &mut cell.pause_ns);
        columns.spread(4, 24, 100, |cell| &mut cell.allocated);
        let cells: Vec<_> = columns.cells.iter().map(|cell| (cell.pause_ns, cell.allocated)).collect();
        assert_eq!(cells, [(0, 0), (6, 30), (1, 20)]);
        assert_eq!(columns.lengths(23).collect::<Vec<_>>(), [0, 6, 3]);
        assert_eq!(columns.latest(30, 3).1, 16);
        assert!(!columns.is_traced(13) && columns.is_traced(14));
    }

    /// Times that no clock has, but that a hostile file can contain, neither crash nor block anything.
    #[test]
    fn extremes() {
        let times = [0, 1, 999, u64::MAX / 2, u64::MAX - 1, u64::MAX];
        for from_ns in times {
            for to_ns in times.map(Some).into_iter().chain([None]) {
                let mut columns = Columns::new(from_ns, to_ns);
                for begin_ns in times {
                    for ns in times {
                        columns.cover(begin_ns, ns, |cell| &mut cell.pause_ns);
                        columns.spread(begin_ns, ns, u64::MAX, |cell| &mut cell.allocated);
                        if let Some(cell) = columns.at(ns) {
                            cell.held[0] = Some(ns);
                        }
                        columns.reach(ns);
                    }
                }
                assert!(columns.cells.len() <= COLUMNS, "{from_ns} {to_ns:?}");
                columns.sum();
            }
        }
    }

    /// Old columns are dropped, late events belong to none, and merged columns keep their sums and positions.
    #[test]
    fn rolls() {
        const S: u64 = 1_000_000_000;
        let mut columns = Columns::rolling(7, S, 2400);
        for second in 0..3000_u64 {
            columns.at(7 + second * S).unwrap().cycles += 1;
            columns.cover(7 + second * S, S / 2, |cell| &mut cell.pause_ns);
            columns.forget((7 + second * S).saturating_sub(600 * S));
        }
        assert_eq!((columns.cells.len(), columns.width_ns, columns.from_ns), (601, S, 7 + 2399 * S));
        assert!(columns.at(7 + 2398 * S).is_none(), "it is forgotten");
        columns.spread(0, 7 + 2399 * S, 5, |cell| &mut cell.allocated);
        assert_eq!((columns.sum().cycles, columns.sum().allocated), (601, 0));
        let until_ns = 7 + 3000 * S - 1;
        let some = columns.together(7, until_ns, 602);
        assert_eq!((some.width_ns, (some.from_ns - 7) % some.width_ns), (4 * S, 0));
        assert!(some.cells.len() <= COLUMNS && some.cells.iter().all(|cell| cell.cycles == 4), "{some:?}");
        assert!(some.from_ns - columns.from_ns < 4 * S && some.cells.len() == 149, "{}", some.cells.len());
        let (last, length_ns) = columns.latest(until_ns, 10);
        assert_eq!((last.cycles, last.pause_ns, length_ns), (10, 5 * S, 10 * S));
        // The same merged columns a second later.
        let later = columns.together(7, until_ns + S, 602);
        assert_eq!((later.from_ns, &later.cells[0]), (some.from_ns, &some.cells[0]));
        // Nothing was read for a long time.
        columns.forget(u64::MAX);
        assert!(columns.cells.is_empty() && columns.together(7, u64::MAX, 602).cells.is_empty());
        assert_eq!(Columns::rolling(5, S, 10).latest(3, 4), (Cell::default(), 0));
    }

    /// The last column counts only up to the end of the time.
    #[test]
    fn lengths() {
        let mut columns = Columns::new(100, Some(100 + COLUMNS as u64 * 10));
        columns.reach(135);
        let lengths = |end_ns| columns.lengths(end_ns).collect::<Vec<_>>();
        assert_eq!(lengths(133), [10, 10, 10, 3]);
        assert_eq!(lengths(140), [10; 4]);
        assert_eq!(lengths(500), [10; 4]);
        assert_eq!(lengths(0), [10; 4]);
    }

    /// A bound belongs to the class above it.
    #[test]
    fn classes() {
        assert_eq!([0, 99_999, 100_000, 999_999_999, 1_000_000_000, u64::MAX].map(class), [0, 0, 1, 8, 9, 9]);
    }
}
