//! The amounts that processes hold, as each of them reported last: memory and the slots of their heaps.

use std::collections::HashMap;

/// Amounts by process, and their sums.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    of: HashMap<u32, [Option<u64>; Self::KINDS]>,
    /// Sums of the known amounts. Wide enough for any values of any number of processes.
    sums: [u128; Self::KINDS],
    /// Number of processes in each sum.
    known: [u32; Self::KINDS],
}

impl Held {
    /// Number of kinds of amounts.
    pub(crate) const KINDS: usize = 4;
    /// Resident memory, bytes.
    pub(crate) const RSS: usize = 0;
    /// `GC.stat[:heap_live_slots]`.
    pub(crate) const LIVE: usize = 1;
    /// `GC.stat[:heap_free_slots]`.
    pub(crate) const FREE: usize = 2;
    /// `GC.stat[:oldmalloc_increase_bytes]`.
    pub(crate) const MALLOC: usize = 3;

    /// Records what a process reported; values that it did not report stay. Returns the sums, each only if it includes exactly `processes`
    /// processes.
    pub(crate) fn of_all(
        &mut self,
        pid: u32,
        values: [Option<u64>; Self::KINDS],
        processes: usize,
    ) -> [Option<u64>; Self::KINDS] {
        let mine = self.of.entry(pid).or_default();
        for (kind, value) in values.into_iter().enumerate() {
            let Some(value) = value else { continue };
            if let Some(before) = mine[kind].replace(value) {
                self.sums[kind] -= u128::from(before);
            } else {
                self.known[kind] += 1;
            }
            self.sums[kind] += u128::from(value);
        }
        let sums = self.sums();
        std::array::from_fn(|kind| sums[kind].filter(|_| self.known[kind] as usize == processes))
    }

    /// Removes the amounts of a process that has ended.
    pub(crate) fn gone(&mut self, pid: u32) {
        for (kind, value) in self.of.remove(&pid).unwrap_or_default().into_iter().enumerate() {
            let Some(value) = value else { continue };
            self.sums[kind] -= u128::from(value);
            self.known[kind] -= 1;
        }
    }

    fn sums(&self) -> [Option<u64>; Self::KINDS] {
        let sum = |kind: usize| u64::try_from(self.sums[kind]).unwrap_or(u64::MAX);
        std::array::from_fn(|kind| (self.known[kind] > 0).then(|| sum(kind)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums use the last values of the present processes, whatever these are; an amount that was not reported is not zero.
    #[test]
    fn sums() {
        let mut held = Held::default();
        let reported = |held: &mut Held, pid, values| {
            held.of_all(pid, values, 2);
            held.sums()
        };
        assert_eq!(reported(&mut held, 1, [Some(5), None, None, None]), [Some(5), None, None, None]);
        assert_eq!(reported(&mut held, 2, [Some(7), Some(1), None, None]), [Some(12), Some(1), None, None]);
        assert_eq!(
            reported(&mut held, 1, [None, Some(0), None, Some(u64::MAX)]),
            [Some(12), Some(1), None, Some(u64::MAX)]
        );
        assert_eq!(
            reported(&mut held, 2, [Some(u64::MAX), None, None, Some(3)]),
            [Some(u64::MAX), Some(1), None, Some(u64::MAX)]
        );
        held.gone(1);
        held.gone(9);
        assert_eq!(held.sums(), [Some(u64::MAX), Some(1), None, Some(3)]);
        held.gone(2);
        assert_eq!(held.sums(), [None; 4]);
    }

    /// A sum over only some of the processes is not shown as one over all.
    #[test]
    fn of_all() {
        let mut held = Held::default();
        assert_eq!(held.of_all(1, [Some(5), Some(1), None, None], 2), [None; 4]);
        assert_eq!(held.of_all(2, [Some(7), None, None, None], 2), [Some(12), None, None, None]);
        held.gone(1);
        assert_eq!(held.of_all(2, [None, Some(3), None, None], 1), [Some(7), Some(3), None, None]);
    }
}
