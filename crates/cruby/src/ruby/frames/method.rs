//! Method entries (`rb_callable_method_entry_t`, method.h).

use super::{
    Memory,
    layout::FrameLayout,
    read::{
        Failure, IMEMO_CREF, IMEMO_MENT, IMEMO_SVAR, Reader, Result, is_imemo, is_object, u32_at, u64_at,
    },
};
use crate::ruby::typed_data::{DATA, EMBEDDED_AT};

/// `VM_METHOD_TYPE_ISEQ`, `VM_METHOD_TYPE_CFUNC` and `VM_METHOD_TYPE_BMETHOD` (method.h, 2.6–4.0).
const ISEQ: u32 = 0;
const CFUNC: u32 = 1;
const BMETHOD: u32 = 4;

/// Byte offset of `block.as.captured.code` in `rb_proc_t` (`vm_core.h`, 2.6–4.0).
const PROC_CODE: u64 = 16;

/// What implements a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Ruby code: the instruction sequence.
    Ruby(u64),
    /// A block (`define_method`): its instruction sequence.
    Block(u64),
    /// A C function: the id of the name by which it was defined.
    C(u64),
    /// A kind without a frame of its own.
    Other,
}

/// The method entry that the object at `address`, which an environment holds in place of one, leads to (`check_method_entry`,
/// `vm_insnhelper.c`): through a `struct vm_svar` (`cref_or_me`, internal/imemo.h, 2.6–4.0). `None` for a `cref`, whose frame has no method.
pub(super) fn behind<M: Memory>(reader: &Reader<M>, address: u64) -> Result<Option<u64>> {
    let flags = |slot: &[u8]| u64_at(slot, 0);
    let slot = reader.slot(address)?;
    if is_imemo(flags(&slot), IMEMO_CREF) {
        return Ok(None);
    }
    if !is_imemo(flags(&slot), IMEMO_SVAR) {
        return Err(Failure::Stale);
    }
    let behind = u64_at(&slot, 8);
    if behind == 0 || is_imemo(flags(&reader.slot(behind)?), IMEMO_CREF) {
        return Ok(None);
    }
    Ok(Some(behind))
}

/// The fields of a method entry and its definition. Two reads with equal results are of the same method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MethodEntry {
    /// Address of its definition.
    pub(super) definition: u64,
    /// The class or module in which it was defined.
    pub(super) owner: u64,
    /// What implements it.
    pub(super) kind: Kind,
}

impl MethodEntry {
    /// Reads the method entry at an address, and the flags of the object.
    pub(super) fn read<M: Memory>(
        reader: &Reader<M>,
        entry: u64,
        layout: &FrameLayout,
    ) -> Result<(u64, Self)> {
        let at = &layout.method;
        let slot = reader.slot(entry)?;
        let (flags, definition) = (u64_at(&slot, 0), u64_at(&slot, at.definition));
        if !is_imemo(flags, IMEMO_MENT) || !is_object(definition) {
            return Err(Failure::Stale);
        }
        let bytes = reader.vec(definition, at.definition_span)?;
        let (first, bits) = at.kind_bits;
        let kind = match u32_at(&bytes, at.kind) >> first & ((1 << bits) - 1) {
            ISEQ => Kind::Ruby(u64_at(&bytes, at.iseq)),
            CFUNC => Kind::C(u64_at(&bytes, at.original_id)),
            BMETHOD => Kind::Block(block(reader, u64_at(&bytes, at.block), at.embedded)?),
            _ => Kind::Other,
        };
        Ok((flags, Self { definition, owner: u64_at(&slot, at.owner), kind }))
    }
}

/// The instruction sequence of a `Proc`. The caller compares it with a known one, so a `Proc` of another kind or layout
/// is detected. `embedded` is the bit for data that is in the slot.
fn block<M: Memory>(reader: &Reader<M>, proc: u64, embedded: u64) -> Result<u64> {
    let slot = reader.slot(proc)?;
    let embedded = u64_at(&slot, EMBEDDED_AT) & embedded != 0;
    let data = if embedded { proc + u64::from(DATA) } else { u64_at(&slot, DATA) };
    reader.word(data.wrapping_add(PROC_CODE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::{RubyVersion, frames::words::Words, typed_data::TypedDataLayout};

    /// The code of a Proc is found whether its data is in its slot or elsewhere. The bit that says so is another one in 4.0.
    #[test]
    fn embedded_procs() {
        const CODE: u64 = 0x5000;
        let block = |release: (u16, u16), words: Vec<u64>| {
            let layout = TypedDataLayout::of(RubyVersion::new(release.0, release.1, 0));
            block(&Reader { memory: Words(words), alive: 0x10000 }, 0x10000, layout.embedded)
        };
        // The slot, with the captured `self`, the variables and the code of the block from the fifth word on.
        let inside = |first, second| vec![0xc, 0x9000, first, second, 0x7000, 0x8000, CODE, 0];
        let outside = |first, second| vec![0xc, 0x9000, first, second, 0x10028, 0x7000, 0x8000, CODE];
        for (release, words) in [
            ((2, 7), outside(0x6000, 1)),
            ((3, 2), outside(0x6000, 1)),
            ((3, 3), outside(0x6000, 1)),
            ((3, 3), inside(0x6000, 3)),
            ((3, 4), inside(0x6000, 3)),
            ((4, 0), outside(0, 0x6000)),
            ((4, 0), inside(0, 0x6001)),
        ] {
            assert_eq!(block(release, words.clone()), Ok(CODE), "{release:?} {words:x?}");
        }
    }
}
