//! Instruction sequences (`rb_iseq_t`): their kind, their source, and the line of a program counter.

use super::{
    Memory,
    layout::FrameLayout,
    read::{Failure, IMEMO_ISEQ, Reader, Result, is_imemo, is_object, u32_at, u64_at},
};

/// `enum rb_iseq_type` (`vm_core.h`), the same in 2.6–4.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Top,
    Method,
    Block,
    Class,
    Rescue,
    Ensure,
    Eval,
    Main,
    Plain,
}

impl Kind {
    fn from_raw(raw: u32) -> Option<Self> {
        const ALL: [Kind; 9] = [
            Kind::Top,
            Kind::Method,
            Kind::Block,
            Kind::Class,
            Kind::Rescue,
            Kind::Ensure,
            Kind::Eval,
            Kind::Main,
            Kind::Plain,
        ];
        ALL.get(raw as usize).copied()
    }
}

/// `BUILTIN_ATTR_C_TRACE` (`vm_core.h`, 3.4).
const C_TRACE: u32 = 8;
/// Maximum plausible number of instructions and operands of code.
const MAX_SIZE: u32 = 1 << 28;

/// The fields of an instruction sequence. Two reads with equal results are of the same sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Body {
    /// Address of the body.
    pub(super) address: u64,
    pub(super) kind: Kind,
    size: u32,
    encoded: u64,
    pub(super) pathobj: u64,
    pub(super) base_label: u64,
    pub(super) label: u64,
    pub(super) first_line: u32,
    infos: u64,
    infos_size: u32,
    index: u64,
    pub(super) parent: u64,
    pub(super) local: u64,
    /// Whether backtraces show it as a C function (3.4).
    pub(super) c_trace: bool,
}

impl Body {
    /// Reads the instruction sequence at an address.
    pub(super) fn read<M: Memory>(reader: &Reader<M>, iseq: u64, layout: &FrameLayout) -> Result<Self> {
        Self::read_object(reader, iseq, layout).map(|(_, body)| body)
    }

    /// The same, with the flags of the object.
    pub(super) fn read_object<M: Memory>(
        reader: &Reader<M>,
        iseq: u64,
        layout: &FrameLayout,
    ) -> Result<(u64, Self)> {
        let at = &layout.iseq;
        let slot = reader.slot(iseq)?;
        let (flags, body) = (u64_at(&slot, 0), u64_at(&slot, at.body));
        if !is_imemo(flags, IMEMO_ISEQ) || !is_object(body) {
            return Err(Failure::Stale);
        }
        Ok((flags, Self::read_at(reader, body, layout)?))
    }

    /// Reads the body at an address.
    pub(super) fn read_at<M: Memory>(reader: &Reader<M>, address: u64, layout: &FrameLayout) -> Result<Self> {
        let at = &layout.iseq;
        let bytes = reader.vec(address, at.span)?;
        let first_line = if at.first_line_is_fixnum {
            u64_at(&bytes, at.first_line) >> 1
        } else {
            u32_at(&bytes, at.first_line).into()
        };
        let found = Self {
            address,
            kind: Kind::from_raw(u32_at(&bytes, at.kind)).ok_or(Failure::Stale)?,
            size: u32_at(&bytes, at.size),
            encoded: u64_at(&bytes, at.encoded),
            pathobj: u64_at(&bytes, at.pathobj),
            base_label: u64_at(&bytes, at.base_label),
            label: u64_at(&bytes, at.label),
            first_line: line(first_line as u32),
            infos: u64_at(&bytes, at.infos),
            infos_size: u32_at(&bytes, at.infos_size),
            index: u64_at(&bytes, at.index),
            parent: u64_at(&bytes, at.parent),
            local: u64_at(&bytes, at.local),
            c_trace: at.attributes.is_some_and(|offset| u32_at(&bytes, offset) & C_TRACE != 0),
        };
        let sound = is_object(found.encoded)
            && (1..MAX_SIZE).contains(&found.size)
            && [found.pathobj, found.base_label, found.label, found.local].into_iter().all(is_object);
        if sound { Ok(found) } else { Err(Failure::Stale) }
    }

    /// The index that `calc_lineno` (`vm_backtrace.c`) looks up for a program counter: the counter points behind the
    /// running instruction. `None` if it does not point into this code.
    pub(super) fn position(&self, pc: u64) -> Option<u32> {
        let bytes = pc.checked_sub(self.encoded)?;
        let words = u32::try_from(bytes / 8).ok().filter(|&words| bytes % 8 == 0 && words <= self.size)?;
        Some(words.saturating_sub(1))
    }

    /// Whether the instruction at a program counter equals the last one: code ends with a `leave`; in code that does not, no other instruction
    /// equals the last one.
    pub(super) fn leaves_at<M: Memory>(&self, reader: &Reader<M>, pc: u64) -> Result<bool> {
        let last = self.encoded + u64::from(self.size - 1) * 8;
        Ok(pc <= last && (pc == last || reader.word(pc)? == reader.word(last)?))
    }

    /// The line at a position (`get_insn_info_succinct_bitvector`, iseq.c); 0 if the code has no lines.
    pub(super) fn line<M: Memory>(
        &self,
        reader: &Reader<M>,
        position: u32,
        layout: &FrameLayout,
    ) -> Result<u32> {
        let entry = match self.infos_size {
            0 => return Ok(0),
            1 => 0,
            size => {
                let rank = self.rank(reader, position, layout)?;
                rank.checked_sub(1).filter(|&entry| entry < size).ok_or(Failure::Stale)?
            }
        };
        let at = &layout.iseq;
        let place = u64::from(entry) * u64::from(at.info_size) + u64::from(at.info_line);
        reader.half(self.infos.wrapping_add(place)).map(line)
    }

    /// Number of entries that start at or before a position (`succ_index_lookup`, iseq.c).
    fn rank<M: Memory>(&self, reader: &Reader<M>, position: u32, layout: &FrameLayout) -> Result<u32> {
        /// Number of positions stored without a block (`IMMEDIATE_TABLE_SIZE`): seven bits each, nine in a word.
        const IMMEDIATE: u32 = 54;
        let at = &layout.iseq;
        if !is_object(self.index) {
            return Err(Failure::Stale);
        }
        let Some(position) = position.checked_sub(IMMEDIATE) else {
            let word = reader.word(self.index.wrapping_add(u64::from(position / 9 * 8)))?;
            return Ok((word >> (position % 9 * 7) & 0x7f) as u32);
        };
        // Blocks of 512 positions, in eight words of bits.
        let start = u64::from(at.blocks) + u64::from(position / 512) * u64::from(at.block_size);
        let block = reader.vec(self.index.wrapping_add(start), at.block_size as usize)?;
        let small = position % 512 / 64;
        let ranks = u64_at(&block, at.block_small_ranks);
        let before = if small == 0 { 0 } else { (ranks >> ((small - 1) * 9) & 0x1ff) as u32 };
        let bits = u64_at(&block, at.block_bits + small * 8) << (63 - position % 64);
        u32_at(&block, at.block_rank).checked_add(before + bits.count_ones()).ok_or(Failure::Stale)
    }
}

/// Lines are `int`s; a negative one (`eval(code, binding, file, -5)`) is meaningless in a profile and becomes 0.
fn line(raw: u32) -> u32 {
    i32::try_from(raw).map_or(0, |_| raw)
}
