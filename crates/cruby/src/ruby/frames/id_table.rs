//! CRuby's tables whose keys are the numbers of ids (`id_table.c`).

use super::{
    Memory,
    read::{Failure, Reader, Result, u32_at, u64_at},
};

/// `struct rb_id_table` (2.7 to 4.0): byte offsets of `capa`, `num` and `items`.
const CAPACITY: u32 = 0;
const USED: u32 = 4;
const ITEMS: u32 = 16;
const TABLE: usize = 24;
/// `item_t`: the key, and `val` at offset 8. A slot without a key is empty.
const ITEM: usize = 16;
const ITEM_VALUE: u32 = 8;
/// Maximum plausible number of slots of a table.
pub(super) const MOST: u32 = 1 << 16;

/// Keys and values of the table at an address. `rb_id_to_serial` (symbol.h), which makes the keys, drops the kind of name.
pub(super) fn entries<M: Memory>(reader: &Reader<M>, table: u64) -> Result<Vec<(u32, u64)>> {
    let table = reader.bytes::<TABLE>(table)?;
    let (capacity, used) = (u32_at(&table, CAPACITY), u32_at(&table, USED));
    if capacity > MOST || used > capacity {
        return Err(Failure::Stale);
    }
    let items = reader.vec(u64_at(&table, ITEMS), capacity as usize * ITEM)?;
    let entries = items.chunks_exact(ITEM).map(|item| (u32_at(item, 0), u64_at(item, ITEM_VALUE)));
    Ok(entries.filter(|(key, _)| *key != 0).collect())
}
