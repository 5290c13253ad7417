//! Constants of classes and modules, from their tables (`constant.h`, `id_table.c`).

use super::{
    Memory,
    layout::ConstantsAt,
    read::{Failure, Reader, Result, is_object, u32_at, u64_at},
};

/// `struct rb_id_table` (`id_table.c`, 2.7 to 4.0): byte offsets of `capa`, `num` and `items`.
const CAPACITY: u32 = 0;
const USED: u32 = 4;
const ITEMS: u32 = 16;
const TABLE: usize = 24;
/// `item_t`: the key, and `val` 8 bytes on. A slot without a value has 0 there.
const ITEM: usize = 16;
const ITEM_VALUE: u32 = 8;
/// `value` of `rb_const_entry_t` (constant.h).
const ENTRY_VALUE: u64 = 8;
/// Slots of a table beyond this many are not plausible.
const MOST: u32 = 1 << 16;
/// `ID_SCOPE_SHIFT`, and the lowest bits of the id of a constant (`RUBY_ID_CONST`), of a static and of a dynamic symbol.
const SCOPE_SHIFT: u32 = 4;
const CONSTANT: [u64; 2] = [0xb, 0xa];

/// Hands the key and the value of each constant of a class or module to `visit`. `None`: where they are is not known.
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
    let table = reader.bytes::<TABLE>(table)?;
    let (capacity, used) = (u32_at(&table, CAPACITY), u32_at(&table, USED));
    if capacity > MOST || used > capacity {
        return Err(Failure::Stale);
    }
    let items = reader.vec(u64_at(&table, ITEMS), capacity as usize * ITEM)?;
    for item in items.chunks_exact(ITEM) {
        let (key, entry) = (u32_at(item, 0), u64_at(item, ITEM_VALUE));
        if key == 0 || !is_object(entry) {
            continue;
        }
        visit(key, reader.word(entry.wrapping_add(ENTRY_VALUE))?);
    }
    Ok(Some(()))
}

/// The ids that a key of the table can be of: `rb_id_to_serial` (symbol.h) leaves out what kind of name it is.
pub(super) fn ids(key: u32) -> [u64; 2] {
    CONSTANT.map(|kind| u64::from(key) << SCOPE_SHIFT | kind)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes from address 0x10000 on.
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

    /// Slots without a key or an entry are passed over; a class without constants has no table.
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
        words[4] = u64::from(MOST + 1) | 2 << 32;
        assert!(read(&words, extension).is_err(), "too large");
        words[4] = 1 | 2 << 32;
        assert!(read(&words, extension).is_err(), "more than there is room for");
        words[4] = 4 | 2 << 32;
        words[6] = u64::MAX - 8;
        assert!(read(&words, extension).is_err(), "around the address space");
    }

    proptest! {
        /// Whatever lies there, reading ends, with no more constants than there is room for.
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
