//! Constants of classes and modules, from their tables (`constant.h`).

use super::{
    Memory, id_table,
    layout::ConstantsAt,
    read::{Reader, Result, is_object},
};

/// `value` of `rb_const_entry_t` (constant.h).
const ENTRY_VALUE: u64 = 8;
/// `ID_SCOPE_SHIFT`, and the lowest bits of the id of a constant (`RUBY_ID_CONST`), of a static and of a dynamic symbol.
const SCOPE_SHIFT: u32 = 4;
const CONSTANT: [u64; 2] = [0xb, 0xa];

/// Passes the key and the value of each constant of a class or module to `visit`. `None`: the place of the constants is not known.
pub(super) fn each<M: Memory>(
    reader: &Reader<M>,
    class: u64,
    constants: Option<ConstantsAt>,
    visit: &mut dyn FnMut(u32, u64),
) -> Result<Option<()>> {
    let table = match constants {
        None => return Ok(None),
        Some(ConstantsAt::Class(at)) => reader.word(class.wrapping_add(at.into()))?,
        Some(ConstantsAt::Extension(at, constants)) => {
            let extension = reader.word(class.wrapping_add(at.into()))?;
            reader.word(extension.wrapping_add(constants.into()))?
        }
    };
    if table == 0 {
        return Ok(Some(()));
    }
    for (key, entry) in id_table::entries(reader, table)? {
        if is_object(entry) {
            visit(key, reader.word(entry.wrapping_add(ENTRY_VALUE))?);
        }
    }
    Ok(Some(()))
}

/// The ids to which a key of the table may belong: `rb_id_to_serial` (symbol.h) drops the kind of name.
pub(super) fn ids(key: u32) -> [u64; 2] {
    CONSTANT.map(|kind| u64::from(key) << SCOPE_SHIFT | kind)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes at address 0x10000.
    struct Bytes(Vec<u8>);

    impl Memory for Bytes {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let at = address.checked_sub(0x10000).and_then(|at| usize::try_from(at).ok());
            let Some(bytes) = at.and_then(|at| self.0.get(at..at.checked_add(buffer.len())?)) else {
                return false;
            };
            buffer.copy_from_slice(bytes);
            true
        }
    }

    fn read(words: &[u64], at: ConstantsAt) -> Result<Vec<(u32, u64)>> {
        let memory = Bytes(words.iter().flat_map(|word| word.to_le_bytes()).collect());
        let mut found = Vec::new();
        let reader = Reader { memory, alive: 0x10000 };
        each(&reader, 0x10000, Some(at), &mut |key, value| found.push((key, value))).map(|_| found)
    }

    /// Slots without a key or an entry are skipped; a class without constants has no table.
    #[test]
    fn tables() {
        // Class: the pointer to its extension; extension: the table; table; items; entries.
        let mut words = [0; 20];
        (words[1], words[3]) = (0x10010, 0x10020);
        (words[4], words[5], words[6]) = (4 | 2 << 32, 2, 0x10040);
        (words[8], words[9]) = (77, 0x10080);
        (words[12], words[13]) = (5 | 3 << 32, 0x10090);
        (words[14], words[15]) = (0, 0x10080);
        (words[17], words[19]) = (0xabc0, 0xdef0);
        let extension = ConstantsAt::Extension(8, 8);
        assert_eq!(read(&words, extension).ok(), Some(vec![(77, 0xabc0), (5, 0xdef0)]));
        assert_eq!(read(&words, ConstantsAt::Class(24)).ok(), Some(vec![(77, 0xabc0), (5, 0xdef0)]));
        assert_eq!(read(&words, ConstantsAt::Class(0)).ok(), Some(Vec::new()));
        words[4] = u64::from(id_table::MOST + 1) | 2 << 32;
        assert!(read(&words, extension).is_err(), "too large");
        words[4] = 1 | 2 << 32;
        assert!(read(&words, extension).is_err(), "more than there is room for");
        words[4] = 4 | 2 << 32;
        words[6] = u64::MAX - 8;
        assert!(read(&words, extension).is_err(), "around the address space");
    }

    proptest! {
        /// Whatever the memory contains, reading ends, with no more constants than fit.
        #[test]
        fn anything(
            words in prop::collection::vec(
                prop_oneof![any::<u64>(), (0_u64..40).prop_map(|at| 0x10000 + at * 8), 0_u64..9], 1..40),
            at in 0_u32..300,
            and in 0_u32..300,
        ) {
            for place in [ConstantsAt::Class(at), ConstantsAt::Extension(at, and)] {
                // An item has two words.
                prop_assert!(read(&words, place).unwrap_or_default().len() <= words.len() / 2);
            }
        }
    }
}
