//! Reads of a process's memory: numbers, strings, arrays. Every read is bounded, and reports why it failed.

use std::sync::Arc;

use super::{Memory, layout::FrameLayout};

/// Why a read from the process failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The expected data is not at the address.
    Stale,
    /// The process's memory could not be read at all.
    Unreadable,
}

pub(super) type Result<T> = std::result::Result<T, Failure>;

/// Bytes of the smallest slot of an object (`RVALUE`); reading more could leave its page.
pub(super) const SLOT: usize = 40;
/// Maximum bytes of a string; a longer one is truncated.
const LONGEST: usize = 4096;

/// `RUBY_T_MASK` and the types of objects (`include/ruby/internal/value_type.h`).
const T_MASK: u64 = 0x1f;
pub(super) const T_CLASS: u64 = 0x02;
pub(super) const T_MODULE: u64 = 0x03;
const T_STRING: u64 = 0x05;
const T_ARRAY: u64 = 0x07;
pub(super) const T_SYMBOL: u64 = 0x14;
const T_IMEMO: u64 = 0x1a;
/// `FL_USHIFT`: the first bit of the flags whose meaning depends on the type.
const USER: u32 = 12;
/// `RSTRING_NOEMBED`, which is `RARRAY_EMBED_FLAG` in arrays: `FL_USER1`.
const USER1: u64 = 1 << (USER + 1);
/// `RSTRING_EMBED_LEN_SHIFT` and mask, up to 3.1.
const STRING_LENGTH: (u32, u64) = (USER + 2, 0x1f);
/// `RARRAY_EMBED_LEN_SHIFT`.
const ARRAY_LENGTH: u32 = USER + 3;

/// `imemo_cref`.
pub(super) const IMEMO_CREF: u64 = 1;
/// `imemo_svar`, `imemo_ment` and `imemo_iseq` (internal/imemo.h).
pub(super) const IMEMO_SVAR: u64 = 2;
pub(super) const IMEMO_MENT: u64 = 6;
pub(super) const IMEMO_ISEQ: u64 = 7;
/// `imemo_fields` (internal/imemo.h, v4.0.0).
pub(super) const IMEMO_FIELDS: u64 = 13;

/// The type in an object's flags.
pub(super) fn object_type(flags: u64) -> u64 {
    flags & T_MASK
}

/// Whether the flags are those of an internal object of this kind.
pub(super) fn is_imemo(flags: u64, kind: u64) -> bool {
    object_type(flags) == T_IMEMO && flags >> USER & 0xf == kind
}

/// Whether a `VALUE` is the address of an object.
pub(super) fn is_object(value: u64) -> bool {
    value.is_multiple_of(8) && value > 0x1000
}

/// The 64-bit word at an offset in bytes that were read.
pub(super) fn u64_at(bytes: &[u8], offset: u32) -> u64 {
    let at = offset as usize;
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The 32-bit word at an offset in bytes that were read.
pub(super) fn u32_at(bytes: &[u8], offset: u32) -> u32 {
    let at = offset as usize;
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// Memory of one process and how to read it.
pub(super) struct Reader<M> {
    pub(super) memory: M,
    /// An address that can be read as long as the process exists.
    pub(super) alive: u64,
}

impl<M: Memory> Reader<M> {
    /// Fills the buffer.
    pub(super) fn fill(&self, address: u64, buffer: &mut [u8]) -> Result<()> {
        let end = address.checked_add(buffer.len() as u64);
        if end.is_some() && self.memory.read(address, buffer) {
            return Ok(());
        }
        let there = self.memory.read(self.alive, &mut [0; 8]);
        Err(if there { Failure::Stale } else { Failure::Unreadable })
    }

    /// Reads `N` bytes.
    pub(super) fn bytes<const N: usize>(&self, address: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads this many bytes.
    pub(super) fn vec(&self, address: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.fill(address, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn word(&self, address: u64) -> Result<u64> {
        self.bytes(address).map(u64::from_le_bytes)
    }

    pub(super) fn half(&self, address: u64) -> Result<u32> {
        self.bytes(address).map(u32::from_le_bytes)
    }

    /// The smallest part of an object that always exists.
    pub(super) fn slot(&self, value: u64) -> Result<[u8; SLOT]> {
        if !is_object(value) {
            return Err(Failure::Stale);
        }
        self.bytes(value)
    }

    /// A string; truncated if it is very long, with invalid UTF-8 replaced.
    pub(super) fn string(&self, value: u64, layout: &FrameLayout) -> Result<Arc<str>> {
        let slot = self.slot(value)?;
        self.string_of(value, &slot, layout)
    }

    fn string_of(&self, value: u64, slot: &[u8; SLOT], layout: &FrameLayout) -> Result<Arc<str>> {
        let layout = &layout.string;
        let flags = u64_at(slot, 0);
        if object_type(flags) != T_STRING {
            return Err(Failure::Stale);
        }
        let (address, len) = if flags & USER1 == 0 {
            let len = match layout.embedded_length {
                Some(offset) => u64_at(slot, offset),
                None => flags >> STRING_LENGTH.0 & STRING_LENGTH.1,
            };
            (value + u64::from(layout.embedded), len)
        } else {
            (u64_at(slot, layout.pointer), u64_at(slot, layout.length))
        };
        if len >= 1 << 40 {
            return Err(Failure::Stale);
        }
        let len = (len as usize).min(LONGEST);
        let inside = address.checked_sub(value).and_then(|at| slot.get(at as usize..)?.get(..len));
        let bytes = match inside {
            Some(bytes) => bytes.to_vec(),
            None => self.vec(address, len)?,
        };
        Ok(String::from_utf8_lossy(&bytes).into())
    }

    /// The address and number of the elements of an array.
    pub(super) fn array(&self, value: u64, layout: &FrameLayout) -> Result<(u64, u64)> {
        let slot = self.slot(value)?;
        Self::array_of(value, &slot, layout)
    }

    fn array_of(value: u64, slot: &[u8; SLOT], layout: &FrameLayout) -> Result<(u64, u64)> {
        let layout = &layout.array;
        let flags = u64_at(slot, 0);
        if object_type(flags) != T_ARRAY {
            return Err(Failure::Stale);
        }
        if flags & USER1 != 0 {
            let len = flags >> ARRAY_LENGTH & layout.embedded_mask;
            return Ok((value + u64::from(layout.embedded), len));
        }
        Ok((u64_at(slot, layout.pointer), u64_at(slot, layout.length)))
    }

    /// The path of a file: a string, or the first of two in an array (`pathobj_path`, iseq.h).
    pub(super) fn path(&self, value: u64, layout: &FrameLayout) -> Result<Arc<str>> {
        let slot = self.slot(value)?;
        if object_type(u64_at(&slot, 0)) == T_STRING {
            return self.string_of(value, &slot, layout);
        }
        let (elements, len) = Self::array_of(value, &slot, layout)?;
        if len == 0 {
            return Err(Failure::Stale);
        }
        let first = match elements.checked_sub(value) {
            Some(at @ 0..SLOT_WORDS) => u64_at(&slot, at as u32),
            _ => self.word(elements)?,
        };
        self.string(first, layout)
    }
}

/// One more than the offset of the last whole word of a slot.
const SLOT_WORDS: u64 = SLOT as u64 - 7;
