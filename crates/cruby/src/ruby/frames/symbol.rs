//! Names of methods: from an `ID` to its string, through the VM's table of symbols (symbol.c).

use std::{collections::HashMap, sync::Arc};

use super::{
    Memory,
    layout::FrameLayout,
    read::{Failure, Reader, Result, T_SYMBOL, is_object, object_type, u64_at},
};

/// `ID_ENTRY_UNIT`: number of symbols in one array of the table.
const UNIT: u64 = 512;
/// Maximum number of arrays whose addresses are cached.
const MAX_UNITS: usize = 4096;
/// `ID_SCOPE_SHIFT`: number of bits in an id for the kind of its name. Ids of operators have none.
const SCOPE_SHIFT: u32 = 4;
/// Ids below this may be those of operators (`tLAST_OP_ID` is below 200 in 2.6–4.0).
const MAX_OPERATOR: u64 = 512;
/// `RUBY_SPECIAL_SHIFT` and `RUBY_SYMBOL_FLAG`: a static symbol is its id, shifted and tagged.
const SYMBOL_SHIFT: u32 = 8;
const STATIC_SYMBOL: u64 = 0xc;
/// Byte offset of `id` in `struct RSymbol` (symbol.h, 2.6–4.0).
const SYMBOL_ID: u32 = 32;
/// Byte offset of `fstr`.
const SYMBOL_STRING: u32 = 24;

/// Addresses of the elements of the table's arrays, by array number.
pub(super) type Units = HashMap<u64, u64>;

/// The name of an id.
///
/// Beside each string the table holds the symbol, which contains its id. A name is only returned if that id is the
/// requested one, which proves the path to it and the whole layout of the table.
pub(super) fn name<M: Memory>(
    reader: &Reader<M>,
    id: u64,
    bias: u64,
    layout: &FrameLayout,
    units: &mut Units,
) -> Result<Option<Arc<str>>> {
    let Ok(table) = &layout.symbols else { return Ok(None) };
    let ids = bias.wrapping_add(table.address.0).wrapping_add(table.ids.into());
    let whole = (id < MAX_OPERATOR).then_some(id);
    for serial in whole.into_iter().chain([id >> SCOPE_SHIFT]) {
        let (unit, index) = (serial / UNIT, serial % UNIT * 2);
        // The arrays never grow, so their elements do not move; but nothing relies on that.
        if let Some(elements) = units.get(&unit)
            && let Some(found) = entry(reader, elements + index * 8, id, layout)?
        {
            return Ok(Some(found));
        }
        let Some(elements) = unit_at(reader, ids, unit, layout)? else { continue };
        if let Some(found) = entry(reader, elements.wrapping_add(index * 8), id, layout)? {
            if units.len() >= MAX_UNITS {
                units.clear();
            }
            units.insert(unit, elements);
            return Ok(Some(found));
        }
    }
    Err(Failure::Stale)
}

/// The elements of one of the table's arrays.
fn unit_at<M: Memory>(reader: &Reader<M>, ids: u64, unit: u64, layout: &FrameLayout) -> Result<Option<u64>> {
    let (arrays, count) = reader.array(reader.word(ids)?, layout)?;
    if unit >= count {
        return Ok(None);
    }
    let array = reader.word(arrays.wrapping_add(unit * 8))?;
    if !is_object(array) {
        return Ok(None);
    }
    let (elements, count) = reader.array(array, layout)?;
    Ok((count <= 2 * UNIT).then_some(elements))
}

/// The string at an entry of the table, if the symbol beside it has this id.
fn entry<M: Memory>(
    reader: &Reader<M>,
    address: u64,
    id: u64,
    layout: &FrameLayout,
) -> Result<Option<Arc<str>>> {
    let entry = reader.bytes::<16>(address)?;
    let (string, symbol) = (u64_at(&entry, 0), u64_at(&entry, 8));
    if id_of(reader, symbol)? == Some(id) { reader.string(string, layout).map(Some) } else { Ok(None) }
}

/// The name of a `Symbol`.
pub(super) fn of_value<M: Memory>(
    reader: &Reader<M>,
    symbol: u64,
    layout: &FrameLayout,
    id_name: &mut impl FnMut(u64) -> Result<Option<Arc<str>>>,
) -> Result<Option<Arc<str>>> {
    if !is_object(symbol) {
        return id_of(reader, symbol)?.map_or(Ok(None), id_name);
    }
    let slot = reader.slot(symbol)?;
    // A symbol that can be garbage collected has no id in the table.
    let is_symbol = object_type(u64_at(&slot, 0)) == T_SYMBOL;
    is_symbol.then(|| reader.string(u64_at(&slot, SYMBOL_STRING), layout)).transpose()
}

/// The id of a symbol.
fn id_of<M: Memory>(reader: &Reader<M>, symbol: u64) -> Result<Option<u64>> {
    if symbol & ((1 << SYMBOL_SHIFT) - 1) == STATIC_SYMBOL {
        return Ok(Some(symbol >> SYMBOL_SHIFT));
    }
    if !is_object(symbol) {
        return Ok(None);
    }
    let slot = reader.slot(symbol)?;
    Ok((object_type(u64_at(&slot, 0)) == T_SYMBOL).then(|| u64_at(&slot, SYMBOL_ID)))
}
