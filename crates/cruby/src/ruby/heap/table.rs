//! A `struct st_table` with numbers as keys, read in chunks while the program continues.

use super::walk::word;
use crate::ruby::frames::Memory;

/// `struct st_table` (include/ruby/st.h, 2.7 to 4.0): `entry_power`, `rebuilds_num`, `type`, `num_entries`, `entries_start`,
/// `entries_bound`, `entries`; bytes.
const POWER: usize = 0;
const REBUILDS: usize = 4;
const TYPE: usize = 8;
const COUNT: usize = 16;
pub(super) const START: usize = 32;
pub(super) const BOUND: usize = 40;
pub(super) const ENTRIES: usize = 48;
pub(super) const SIZE: usize = 56;
/// `struct st_table_entry` (st.c): hash, key, record.
pub(super) const ENTRY: usize = 24;
/// `RESERVED_HASH_VAL` (st.c): the entry was deleted.
pub(super) const DELETED: u64 = u64::MAX;
/// `MAX_POWER2` (st.c).
const MOST_POWER: u64 = 62;

/// A table as its header was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Table {
    address: u64,
    rebuilds: u64,
    kind: u64,
    entries: u64,
    /// Index of the first entry that may be in use, and the index after the last.
    pub(super) start: u64,
    pub(super) bound: u64,
}

/// An entry that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) index: u64,
    pub(super) key: u64,
    pub(super) record: u64,
}

impl Table {
    /// The table at an address; `None` if it is not plausible.
    pub(super) fn at<M: Memory>(memory: &M, address: u64) -> Option<Self> {
        let mut head = [0; SIZE];
        if !memory.read(address, &mut head) {
            return None;
        }
        let of = |at| word(&head, at);
        let table = Self {
            address,
            rebuilds: of(REBUILDS) & 0xffff_ffff,
            kind: of(TYPE),
            entries: of(ENTRIES),
            start: of(START),
            bound: of(BOUND),
        };
        // `struct st_hash_type` is two functions.
        let mut functions = [0; 16];
        let typed = table.kind.is_multiple_of(8) && memory.read(table.kind, &mut functions);
        let power = of(POWER) & 0xff;
        let plausible = typed
            && [0, 8].iter().all(|at| word(&functions, *at) != 0)
            && power <= MOST_POWER
            && table.bound <= 1 << power
            && table.start <= table.bound
            && of(COUNT) <= table.bound - table.start
            && table.entries.is_multiple_of(8)
            && table.entries != 0;
        plausible.then_some(table)
    }

    /// Whether each entry is still where it was, unless it was deleted: the table has been neither rebuilt nor emptied since.
    pub(super) fn is_same<M: Memory>(&self, memory: &M) -> bool {
        Self::at(memory, self.address).is_some_and(|now| {
            (now.rebuilds, now.kind, now.entries) == (self.rebuilds, self.kind, self.entries)
                && now.start >= self.start
                && now.bound >= self.bound
        })
    }

    /// Address of an entry; `None` if it overflows.
    pub(super) fn entry(&self, index: u64) -> Option<u64> {
        self.entries.checked_add(index.checked_mul(ENTRY as u64)?)
    }

    /// These bytes as an entry; `None` if it was deleted.
    pub(super) fn pair(index: u64, entry: &[u8]) -> Option<Pair> {
        (word(entry, 0) != DELETED).then(|| Pair { index, key: word(entry, 8), record: word(entry, 16) })
    }
}
