//! The values that `Thread#[]` reads: each fiber has a table of them, keyed by the ids of names.

use super::{
    Memory, class, id_table,
    read::{Reader, Result},
};

/// A table of these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalTable {
    /// Up to 2.7, a hash table at this address.
    Hash(u64),
    /// A table of ids.
    Ids(u64),
}

/// `ID_SCOPE_SHIFT`: number of bits in an id for the kind of its name.
const SCOPE_SHIFT: u32 = 4;
/// Numbers below this may be ids of operators, which equal their numbers.
const MAX_OPERATOR: u32 = 512;

/// For each wanted value, the ids that its name can have, in the order in which to try them.
pub(super) fn find<M: Memory>(
    reader: &Reader<M>,
    table: LocalTable,
    is_wanted: &mut dyn FnMut(u64) -> bool,
) -> Result<Vec<Vec<u64>>> {
    match table {
        LocalTable::Hash(0) | LocalTable::Ids(0) => Ok(Vec::new()),
        LocalTable::Hash(at) => {
            let entries = class::table_entries(reader, at)?.into_iter();
            Ok(entries.filter(|(_, value)| is_wanted(*value)).map(|(id, _)| vec![id]).collect())
        }
        LocalTable::Ids(at) => {
            let entries = id_table::entries(reader, at)?.into_iter();
            Ok(entries.filter(|(_, value)| is_wanted(*value)).map(|(key, _)| ids(key)).collect())
        }
    }
}

/// The ids to which a key of a table may belong: the key lacks the kind of name.
fn ids(key: u32) -> Vec<u64> {
    let operator = (key < MAX_OPERATOR).then_some(u64::from(key));
    operator
        .into_iter()
        .chain((0..1 << SCOPE_SHIFT).map(|kind| u64::from(key) << SCOPE_SHIFT | kind))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ruby::frames::words::Words;

    fn at(word: u64) -> u64 {
        0x10000 + word * 8
    }

    fn read(words: &[u64], table: LocalTable) -> Result<Vec<Vec<u64>>> {
        find(&Reader { memory: Words(words.to_vec()), alive: at(0) }, table, &mut |value| value == 0x5000)
    }

    /// Both kinds of table: two entries, one of them wanted, and no table.
    #[test]
    fn tables() {
        let mut words = vec![0; 24];
        (words[0], words[2]) = (4 | 2 << 32, at(4));
        words[4..12].copy_from_slice(&[0, 0, 900, 0x5000, 0, 0x5000, 901, 0x6000]);
        let found = read(&words, LocalTable::Ids(at(0))).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0], (0..16).map(|kind| 900 << 4 | kind).collect::<Vec<u64>>());
        words[6] = 43;
        assert_eq!(read(&words, LocalTable::Ids(at(0))).unwrap()[0][..2], [43, 43 << 4]);

        (words[16], words[17], words[18]) = (0, 2, at(4));
        words[4..10].copy_from_slice(&[1, 77, 0x5000, 1, 78, 0x6000]);
        assert_eq!(read(&words, LocalTable::Hash(at(12))).ok(), Some(vec![vec![77]]));
        for none in [LocalTable::Hash(0), LocalTable::Ids(0)] {
            assert_eq!(read(&words, none).ok(), Some(Vec::new()));
        }
        assert!(read(&words, LocalTable::Ids(at(100))).is_err());
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(
            words in prop::collection::vec(
                prop_oneof![any::<u64>(), (0_u64..40).prop_map(at), 0_u64..9, Just(0x5000)], 1..40),
        ) {
            for table in [LocalTable::Hash(at(0)), LocalTable::Ids(at(0))] {
                prop_assert!(read(&words, table).unwrap_or_default().len() <= words.len());
            }
        }
    }
}
