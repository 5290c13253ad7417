//! Global variables, from the VM's table of them (`rb_global_tbl`, variable.c).
//!
//! It is not known in advance which pointer in the image's data points to the table. A table is accepted only if all of its contents
//! fit: each key is the number of the id of its entry, and each variable has one of the three markers of CRuby.

use super::{
    Memory, id_table,
    layout::GlobalsLayout,
    read::{Failure, Reader, Result, is_object, u64_at},
};
use crate::ruby::derive::DataRange;

/// `struct rb_global_entry` (internal.h in 2.7, then variable.c, up to 4.0): byte offsets of `var` and `id`.
const ENTRY_VARIABLE: u32 = 0;
const ENTRY_ID: u32 = 8;
const ENTRY: usize = 16;
/// `struct rb_global_variable` (variable.c, 2.7 to 4.0): byte offsets of `data`, `getter` and `marker`.
const DATA: u32 = 8;
const GETTER: u32 = 16;
const MARKER: u32 = 32;
const VARIABLE: usize = 40;
/// `struct trace_var` (variable.c): byte offsets of `data` and `next`.
const TRACE_DATA: u32 = 16;
const TRACE_NEXT: u32 = 24;
const TRACE: usize = 32;
/// Maximum number of blocks that trace one variable.
const MOST_TRACES: u32 = 1024;
/// `ID_SCOPE_SHIFT`.
const SCOPE_SHIFT: u32 = 4;

/// A value that the collector marks through a global variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Global {
    pub(super) id: u64,
    pub(super) value: u64,
    /// Whether Ruby code reads the value from the variable. A getter in C may return something else, and a block that traces the variable
    /// (`trace_var`) is marked, too.
    pub(super) is_read: bool,
}

/// The global variables, and the address of the pointer to their table. `known`: the address at which it was found before. `None`: no
/// pointer in the data leads to the table.
pub(super) fn read<M: Memory>(
    reader: &Reader<M>,
    at: &GlobalsLayout,
    bias: u64,
    known: Option<u64>,
) -> Result<Option<(u64, Vec<Global>)>> {
    if let Some(pointer) = known {
        return in_table(reader, at, bias, reader.word(pointer)?).map(|found| Some((pointer, found)));
    }
    for (pointer, table) in pointers(reader, at.table.data, bias)? {
        match in_table(reader, at, bias, table) {
            // Other tables of ids are sometimes empty.
            Ok(found) if !found.is_empty() => return Ok(Some((pointer, found))),
            Ok(_) | Err(Failure::Stale) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(None)
}

/// The pointers in a range of the image's data, each with its address.
pub(super) fn pointers<M: Memory>(reader: &Reader<M>, data: DataRange, bias: u64) -> Result<Vec<(u64, u64)>> {
    let first = data.from.0.wrapping_add(bias);
    let words = reader.vec(first, data.to.0.saturating_sub(data.from.0) as usize)?;
    let words = words.chunks_exact(8).map(|word| u64_at(word, 0)).enumerate();
    let pointers = words.filter(|(_, word)| is_object(*word));
    Ok(pointers.map(|(index, word)| (first.wrapping_add(index as u64 * 8), word)).collect())
}

/// The variables of the table at this address; an error if it is not the table of global variables.
fn in_table<M: Memory>(reader: &Reader<M>, at: &GlobalsLayout, bias: u64, table: u64) -> Result<Vec<Global>> {
    let mut found = Vec::new();
    for (key, entry) in id_table::entries(reader, table)? {
        if !is_object(entry) {
            return Err(Failure::Stale);
        }
        let entry = reader.bytes::<ENTRY>(entry)?;
        let (variable, id) = (u64_at(&entry, ENTRY_VARIABLE), u64_at(&entry, ENTRY_ID));
        // The ids of operators equal their numbers.
        if ![id, id >> SCOPE_SHIFT].contains(&key.into()) || !is_object(variable) {
            return Err(Failure::Stale);
        }
        traces(reader, reader.word(variable.wrapping_add(at.trace.into()))?, |value| {
            found.push(Global { id, value, is_read: false });
        })?;
        let variable = reader.bytes::<VARIABLE>(variable)?;
        let at = at.table;
        let function = |offset| u64_at(&variable, offset).wrapping_sub(bias);
        let (getter, marker, data) = (function(GETTER), function(MARKER), u64_at(&variable, DATA));
        let (value, functions) = match marker {
            _ if marker == at.unset.0 => continue,
            _ if marker == at.own.marker.0 => (data, at.own),
            _ if marker == at.pointed.marker.0 && data == 0 => continue,
            _ if marker == at.pointed.marker.0 => (reader.word(data)?, at.pointed),
            _ => return Err(Failure::Stale),
        };
        found.push(Global { id, value, is_read: getter == functions.getter.0 });
    }
    Ok(found)
}

/// The blocks that trace a variable.
fn traces<M: Memory>(reader: &Reader<M>, mut trace: u64, mut found: impl FnMut(u64)) -> Result<()> {
    for _ in 0..MOST_TRACES {
        if trace == 0 {
            return Ok(());
        }
        let bytes = reader.bytes::<TRACE>(trace)?;
        found(u64_at(&bytes, TRACE_DATA));
        trace = u64_at(&bytes, TRACE_NEXT);
    }
    Err(Failure::Stale)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        address::Svma,
        ruby::{
            derive::{Functions, GlobalTable},
            frames::words::Words,
        },
    };

    const BASE: u64 = 0x10000;

    /// The data range is the first three words.
    const TABLE: GlobalTable = GlobalTable {
        data: DataRange { from: Svma(0), to: Svma(24) },
        unset: Svma(0x71),
        own: Functions { getter: Svma(0x72), marker: Svma(0x73) },
        pointed: Functions { getter: Svma(0x74), marker: Svma(0x75) },
    };

    const AT: GlobalsLayout = GlobalsLayout { table: TABLE, trace: 40 };

    fn at(word: u64) -> u64 {
        BASE + word * 8
    }

    /// An empty table of ids, and the table with four variables in eight slots: one with a value, one with the address of a value, one with
    /// another getter, one unset. The last one is traced by two blocks.
    fn memory() -> Vec<u64> {
        let mut words = vec![0; 72];
        (words[0], words[1], words[2]) = (12, at(70), at(4));
        (words[4], words[5], words[6]) = (8 | 4 << 32, 4, at(8));
        for (slot, entry) in [(0, 24), (2, 26), (3, 28), (7, 30)] {
            let (serial, variable) = (slot + 400, 32 + (entry - 24) / 2 * 6);
            (words[8 + slot as usize * 2], words[9 + slot as usize * 2]) = (serial, at(entry));
            (words[entry as usize], words[entry as usize + 1]) = (at(variable), serial << 4 | 7);
        }
        let functions = |getter: u64, marker: u64| [1, 0, BASE + getter, 0, BASE + marker];
        for (variable, data, functions) in [
            (32, 0x5000, functions(0x72, 0x73)),
            (38, at(56), functions(0x74, 0x75)),
            (44, at(57), functions(0x90, 0x75)),
            (50, 0, functions(0x91, 0x71)),
        ] {
            words[variable..variable + 5].copy_from_slice(&functions);
            words[variable + 1] = data;
        }
        (words[55], words[56], words[57]) = (at(60), 0x6000, 0x7000);
        words[60..68].copy_from_slice(&[0, 0, 0x8000, at(64), 0, 0, 0x9000, 0]);
        words
    }

    fn find(words: &[u64], known: Option<u64>) -> Result<Option<(u64, Vec<Global>)>> {
        let reader = Reader { memory: Words(words.to_vec()), alive: BASE };
        read(&reader, &AT, BASE, known)
    }

    /// The table is the one whose contents all fit; it is found by its contents.
    #[test]
    fn tables() {
        let id = |slot: u64| (slot + 400) << 4 | 7;
        let expected = vec![
            Global { id: id(0), value: 0x5000, is_read: true },
            Global { id: id(2), value: 0x6000, is_read: true },
            Global { id: id(3), value: 0x7000, is_read: false },
            Global { id: id(7), value: 0x8000, is_read: false },
            Global { id: id(7), value: 0x9000, is_read: false },
        ];
        let found = Some((at(2), expected));
        assert_eq!(find(&memory(), None).ok(), Some(found.clone()));
        assert_eq!(find(&memory(), Some(at(2))).ok(), Some(found));
        for (word, value, why) in [
            (8, 77, "a key of another id"),
            (9, 0, "no entry"),
            (24, 12, "no variable"),
            (36, BASE + 0x76, "a marker of something else"),
            (4, 8 | 9 << 32, "no table of ids"),
            (39, 0x3000, "a value that is not there"),
            (67, at(60), "blocks without end"),
            (2, 0, "no pointer"),
        ] {
            let mut words = memory();
            words[word] = value;
            assert_eq!(find(&words, None).ok(), Some(None), "{why}");
            assert!(find(&words, Some(at(2))).is_err(), "{why}");
        }
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(
            words in prop::collection::vec(
                prop_oneof![any::<u64>(), (0_u64..40).prop_map(at), 0_u64..9, Just(BASE + 0x73)], 3..60),
        ) {
            let _found = find(&words, None);
            let _found = find(&words, Some(BASE));
        }
    }
}
