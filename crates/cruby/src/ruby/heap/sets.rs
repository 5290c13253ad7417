//! Sets of 4.0, which are data of the VM (`struct set_object`, set.c). Before, a set is an object with a hash.

use super::{
    Slot,
    data_types::{DataTypes, address, fill},
    walk::{is_still, word},
};
use crate::ruby::{RubyVersion, frames::Memory};

/// `wrap_struct_name` of `set_data_type` (set.c).
const NAMES: &[(&[u8], ())] = &[(b"set\0", ())];
/// `struct set_table` (`internal/set_table.h`, 4.0): byte offsets of `entry_power`, `type`, `num_entries`, `entries_start`,
/// `entries_bound`, `entries`.
const POWER: usize = 0;
const TYPE: usize = 8;
const COUNT: usize = 16;
const START: usize = 24;
const BOUND: usize = 32;
const ENTRIES: usize = 40;
const SIZE: usize = 48;
/// `struct set_table_entry` (st.c): hash, key.
pub(super) const ENTRY: usize = 16;
/// `MAX_POWER2` (st.c).
const MOST_POWER: u64 = 62;

/// The elements of a set, as its table was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elements {
    /// Address of the first entry that may be in use, and the number of entries from there on.
    pub(super) first: u64,
    pub(super) count: u64,
    /// The object with the instance variables of the set, 0 if it has none.
    pub(super) fields: u64,
    /// Where the address of the entries is, and its value.
    entries: (u64, u64),
}

impl Elements {
    /// Checks that the entries are still where they were.
    pub(super) fn are_there<M: Memory>(&self, memory: &M) -> Option<()> {
        is_still(memory, self.entries.0, self.entries.1)
    }
}

/// Finds the sets of one process.
#[derive(Debug)]
pub(super) struct Sets(DataTypes<()>);

impl Sets {
    /// For a release; `None` if its sets are not data, or their layout is not known.
    pub(super) fn of(version: RubyVersion) -> Option<Self> {
        let known = version.at_least(4, 0) && !version.at_least(4, 1);
        known.then(|| Self(DataTypes::new(version, NAMES)))
    }

    /// The elements of the set in a slot; `None`: the slot holds something else, or it has changed meanwhile. Two facts identify a set:
    /// the name of its type, and that its data is a table: its type is a pair of functions, and its numbers fit each other.
    pub(super) fn elements<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) -> Option<Elements> {
        let ((), typed) = self.0.look(memory, slot)?;
        let mut table = [0; SIZE];
        fill(memory, slot, typed, &mut table)?;
        let of = |at| word(&table, at);
        let (start, bound, entries) = (of(START), of(BOUND), of(ENTRIES));
        let mut functions = [0; 16];
        let typed_table = of(TYPE).is_multiple_of(8) && memory.read(of(TYPE), &mut functions);
        let power = of(POWER) & 0xff;
        let plausible = typed_table
            && [0, 8].iter().all(|at| word(&functions, *at) != 0)
            && power <= MOST_POWER
            && bound <= 1 << power
            && start <= bound
            && of(COUNT) <= bound - start
            && entries.is_multiple_of(8)
            && (entries != 0 || start == bound);
        if !plausible {
            return None;
        }
        Some(Elements {
            first: entries.checked_add(start.checked_mul(ENTRY as u64)?)?,
            count: bound - start,
            fields: typed.fields,
            entries: (address(slot, typed)?.checked_add(ENTRIES as u64)?, entries),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ruby::{
        frames::words::Words,
        heap::{HeapLayout, References, Referred},
    };

    const OLD: RubyVersion = RubyVersion { major: 3, minor: 4, teeny: 9 };
    const NEWEST: RubyVersion = RubyVersion { major: 4, minor: 0, teeny: 5 };
    const CLASS: u64 = 0x9000;
    const T_DATA: u64 = 0xc | 1 << 6;
    const ELEMENTS: [u64; 3] = [0x7008, 0x7010, 0x7018];

    fn at(word: u64) -> u64 {
        0x10000 + word * 8
    }

    /// Type, name, functions of the table, entries: one before the first, three elements with a deleted one between, a number.
    fn memory() -> Vec<u64> {
        let [one, two, three] = ELEMENTS;
        let before = [at(1), u64::from_le_bytes(*b"set\0abcd"), 0x5000, 0x5008];
        let entries = [1, 0x6000, 7, one, 8, two, u64::MAX, 0x6008, 9, 5, 10, three];
        [&before[..], &entries].concat()
    }

    /// A table with two bins for each of eight entries.
    fn table() -> [u64; 6] {
        [3, at(2), 4, 1, 6, at(4)]
    }

    fn of(version: RubyVersion, memory: Vec<u64>, slot: &[u64], now: &[u64]) -> (Referred, Vec<u64>) {
        let layout = HeapLayout::of(version).unwrap();
        let bytes: Vec<u8> = slot.iter().flat_map(|word| word.to_le_bytes()).collect();
        let address = at(memory.len() as u64);
        let memory = Words([memory, now.to_vec()].concat());
        let slot = Slot { address, bytes: &bytes, marks: None };
        let mut found = Vec::new();
        let mut references = References::of(version, &layout, None).unwrap();
        let read = references.each(&memory, &slot, &mut |value| found.push(value));
        (read, found)
    }

    /// The elements of a set are found, whether its table is in its slot or elsewhere, and the object with its instance variables. Whatever
    /// is not a set in every respect is unknown.
    #[test]
    fn elements() {
        let embedded = [&[T_DATA, CLASS, 0, at(0) | 1][..], &table()].concat();
        let find = |memory, slot: &[u64]| of(NEWEST, memory, slot, slot);
        assert_eq!(find(memory(), &embedded), (Referred::Exactly, ELEMENTS.to_vec()));
        let with_variables = T_DATA | HeapLayout::of(NEWEST).unwrap().variables;
        let elsewhere = [with_variables, CLASS, 0x8000, at(0), at(16)];
        let both = [memory(), table().to_vec()].concat();
        let expected = [&[0x8000][..], &ELEMENTS].concat();
        assert_eq!(find(both, &elsewhere), (Referred::Exactly, expected));
        let mut empty = embedded.clone();
        empty[4..].copy_from_slice(&[0, at(2), 0, 0, 0, 0]);
        assert_eq!(find(memory(), &empty), (Referred::Exactly, Vec::new()));

        let mut moved = embedded.clone();
        moved[9] = at(6);
        assert_eq!(of(NEWEST, memory(), &embedded, &moved).0, Referred::Changed);
        assert_eq!(
            of(OLD, memory(), &embedded, &embedded),
            (Referred::Unknown, Vec::new()),
            "an extension's"
        );
        assert_eq!(find(memory(), &embedded[..9]).0, Referred::Unknown, "a slot that is too small");
        for (word, value, why) in [
            (0, 0xc, "without a type"),
            (3, at(2) | 1, "of another type"),
            (4, 63, "too large"),
            (4, 2, "more entries than room"),
            (5, at(3), "a table without functions"),
            (5, 0x3000, "a table of a type that is not there"),
            (6, 6, "more elements than entries"),
            (7, 7, "ends before it begins"),
            (9, 0, "without entries"),
        ] {
            let mut slot = embedded.clone();
            slot[word] = value;
            let mut memory = memory();
            memory[4] = 0;
            assert_eq!(find(memory, &slot), (Referred::Unknown, Vec::new()), "{why}");
        }
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(words in prop::collection::vec(prop_oneof![any::<u64>(), (0_u64..40).prop_map(at), 0_u64..9], 10..40)) {
            for set in [false, true] {
                let mut slot = words.clone();
                slot[0] = T_DATA;
                if set {
                    slot[3] = at(0) | 1;
                }
                let _found = of(NEWEST, [memory(), words.clone()].concat(), &slot, &slot);
            }
        }
    }
}
