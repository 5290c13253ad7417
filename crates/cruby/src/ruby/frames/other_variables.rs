//! Instance variables of objects of C code, such as threads: a table of the VM, keyed by the addresses of the objects,
//! holds them (`generic_iv_tbl_`, variable.c, up to 3.4).
//!
//! It is not known in advance which pointer in the image's data points to the table. A table is accepted only if it contains the object,
//! and if all keys that are checked are objects with variables in such a table.

use super::{
    Memory, globals,
    read::{Failure, Reader, Result, is_object, u32_at, u64_at},
};
use crate::ruby::derive::DataRange;

/// `struct st_table` (include/ruby/st.h, 2.7 to 3.4): byte offsets of `num_entries`, `entries_start`, `entries_bound` and `entries`.
const COUNT: u32 = 16;
const START: u32 = 32;
const BOUND: u32 = 40;
const ENTRIES: u32 = 48;
const TABLE: usize = 56;
/// `struct st_table_entry` (st.c): hash, key, record.
const ENTRY: usize = 24;
/// `RESERVED_HASH_VAL` (st.c): the entry was deleted.
const DELETED: u64 = u64::MAX;
/// Maximum number of entries of a table; a larger one is not searched.
const MOST: u64 = 1 << 24;
/// Number of entries read at once.
const CHUNK: u64 = 4096;
/// Number of keys that are checked, spread over the table.
const KEYS: u64 = 64;
/// `FL_EXIVAR` (`include/ruby/internal/fl_type.h`, up to 3.4).
const HAS_VARIABLES: u64 = 1 << 10;
/// `struct gen_ivtbl` (variable.h, 2.7 to 3.4): `numiv`, and byte offset of `ivptr`.
const VALUES: u64 = 8;
/// Maximum plausible number of variables of one object.
const MOST_VALUES: u32 = 1024;

/// The values of the instance variables of an object of C code. `None`: no table contains it.
pub(super) fn values<M: Memory>(
    reader: &Reader<M>,
    data: DataRange,
    bias: u64,
    object: u64,
) -> Result<Option<Vec<u64>>> {
    for (_, table) in globals::pointers(reader, data, bias)? {
        match record(reader, table, object) {
            Ok(Some(record)) => {
                let count = reader.half(record)?;
                if count > MOST_VALUES {
                    return Err(Failure::Stale);
                }
                let values = reader.vec(record.wrapping_add(VALUES), count as usize * 8)?;
                return Ok(Some(values.chunks_exact(8).map(|value| u64_at(value, 0)).collect()));
            }
            Ok(None) | Err(Failure::Stale) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(None)
}

/// The record of an object in a table, if it is the table of variables.
fn record<M: Memory>(reader: &Reader<M>, table: u64, object: u64) -> Result<Option<u64>> {
    let table = reader.bytes::<TABLE>(table)?;
    let (start, bound) = (u64_at(&table, START), u64_at(&table, BOUND));
    let entries = u64_at(&table, ENTRIES);
    let count = bound.checked_sub(start).ok_or(Failure::Stale)?;
    if bound > MOST || u64_at(&table, COUNT) > count || !is_object(entries) {
        return Err(Failure::Stale);
    }
    let mut found = None;
    let every = (count / KEYS).max(1);
    for at in (start..bound).step_by(CHUNK as usize) {
        let len = CHUNK.min(bound - at);
        let bytes = reader.vec(entries.wrapping_add(at * ENTRY as u64), len as usize * ENTRY)?;
        for (index, entry) in (at..).zip(bytes.chunks_exact(ENTRY)) {
            let key = u64_at(entry, 8);
            if u64_at(entry, 0) == DELETED {
                continue;
            }
            if key == object {
                found = Some(u64_at(entry, 16));
            }
            if key == object || (index - start).is_multiple_of(every) {
                let has =
                    is_object(key) && u64::from(u32_at(&reader.bytes::<8>(key)?, 0)) & HAS_VARIABLES != 0;
                if !has {
                    return Err(Failure::Stale);
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{address::Svma, ruby::frames::words::Words};

    const BASE: u64 = 0x10000;
    const DATA: DataRange = DataRange { from: Svma(0), to: Svma(24) };

    fn at(word: u64) -> u64 {
        BASE + word * 8
    }

    /// Data with another table and the one with two objects; the objects are at word 40, their records at word 50.
    fn memory() -> Vec<u64> {
        let mut words = vec![0; 60];
        (words[0], words[1], words[2]) = (12, at(4), at(12));
        (words[6], words[8], words[9], words[10]) = (1, 0, 1, at(20));
        (words[14], words[16], words[17], words[18]) = (2, 0, 3, at(24));
        words[20..23].copy_from_slice(&[1, at(41), at(52)]);
        words[24..33].copy_from_slice(&[1, at(40), at(50), DELETED, 3, 4, 9, at(42), at(55)]);
        (words[40], words[41], words[42]) = (HAS_VARIABLES | 0xc, 0xc, HAS_VARIABLES | 5);
        words[50..54].copy_from_slice(&[2, 0x5000, 0x34, 7]);
        words
    }

    fn find(words: &[u64], object: u64) -> Result<Option<Vec<u64>>> {
        values(&Reader { memory: Words(words.to_vec()), alive: BASE }, DATA, BASE, object)
    }

    /// The table is the one whose keys all have variables.
    #[test]
    fn tables() {
        assert_eq!(find(&memory(), at(40)).ok(), Some(Some(vec![0x5000, 0x34])));
        assert_eq!(find(&memory(), at(42)).ok(), Some(Some(Vec::new())));
        assert_eq!(find(&memory(), at(41)).ok(), Some(None), "in a table of something else");
        for (word, value, why) in [
            (42, 5, "a key that has no variables"),
            (31, 0x30, "a key that is no object"),
            (16, 4, "ends before it begins"),
            (14, 9, "more than there are"),
            (2, 0, "no pointer"),
        ] {
            let mut words = memory();
            words[word] = value;
            assert_eq!(find(&words, at(40)).ok(), Some(None), "{why}");
        }
        let mut words = memory();
        words[50] = 5000;
        assert!(find(&words, at(40)).is_err(), "too many");
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(
            words in prop::collection::vec(prop_oneof![any::<u64>(), (0_u64..40).prop_map(at), 0_u64..9], 3..60),
            object in 0_u64..60,
        ) {
            let _found = find(&words, at(object));
        }
    }
}
