//! A64 code: decoding, the registers that instructions write, and references to an address.

use std::ops::Range;

use yaxpeax_arch::{Decoder as _, U8Reader};
use yaxpeax_arm::armv8::a64::{InstDecoder, Opcode, Operand, SizeCode};

use super::reference::{self, Kind, Reference};
use crate::address::Svma;
use crate::elf::ElfImage;

/// Bytes of an instruction.
pub(super) const WORD: u64 = 4;
/// Number of the stack pointer or the zero register; the operand says which of the two.
pub(super) const SP: u16 = 31;
/// Registers that a call preserves (AAPCS64): x19 to x28, the frame pointer, the stack pointer.
pub(super) const PRESERVED: [usize; 12] = [19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 31];

/// A decoded instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instruction {
    pub(super) address: Svma,
    pub(super) opcode: Opcode,
    pub(super) operands: [Operand; 4],
}

/// Where execution continues after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// At the next instruction.
    Next,
    /// At this address or at the next instruction.
    Conditional(Svma),
    /// At this address.
    Jump(Svma),
    /// At the address in a register.
    IndirectJump,
    /// At this address, and then at the next instruction.
    Call(Svma),
    /// At the address in a register, and then at the next instruction.
    IndirectCall,
    /// In the caller.
    Return,
    /// Unknown: a trap, a system call, or not an instruction.
    Stop,
}

impl Instruction {
    /// Bytes that are not an instruction give the operand `Nothing` and the opcode `Invalid`.
    fn decode(address: Svma, bytes: [u8; 4]) -> Self {
        let decoded = InstDecoder::default().decode(&mut U8Reader::new(&bytes));
        match decoded {
            Ok(decoded) => Self { address, opcode: decoded.opcode, operands: decoded.operands },
            Err(_) => Self { address, opcode: Opcode::Invalid, operands: [Operand::Nothing; 4] },
        }
    }

    /// Where execution continues.
    pub(super) fn flow(&self) -> Flow {
        match self.opcode {
            Opcode::B => self.target().map_or(Flow::Stop, Flow::Jump),
            Opcode::BL => self.target().map_or(Flow::Stop, Flow::Call),
            Opcode::Bcc(_) | Opcode::BCcc(_) | Opcode::CBZ | Opcode::CBNZ | Opcode::TBZ | Opcode::TBNZ => {
                self.target().map_or(Flow::Stop, Flow::Conditional)
            }
            Opcode::BR | Opcode::BRAA | Opcode::BRAAZ | Opcode::BRAB | Opcode::BRABZ => Flow::IndirectJump,
            Opcode::BLR | Opcode::BLRAA | Opcode::BLRAAZ | Opcode::BLRAB | Opcode::BLRABZ => {
                Flow::IndirectCall
            }
            Opcode::RET | Opcode::RETAA | Opcode::RETAB => Flow::Return,
            Opcode::Invalid
            | Opcode::UDF
            | Opcode::BRK
            | Opcode::HLT
            | Opcode::SVC
            | Opcode::HVC
            | Opcode::SMC
            | Opcode::ERET => Flow::Stop,
            _ => Flow::Next,
        }
    }

    /// The target address of a jump, `adr`, `adrp` or a load relative to the program counter.
    pub(super) fn target(&self) -> Option<Svma> {
        let offset = self.operands.iter().find_map(|operand| match operand {
            Operand::PCOffset(offset) => Some(*offset),
            _ => None,
        })?;
        let base = if self.opcode == Opcode::ADRP { self.address.0 & !0xfff } else { self.address.0 };
        Some(Svma(base.wrapping_add_signed(offset)))
    }

    /// Whether the kernel emulates the instruction under a uprobe (arch/arm64/kernel/probes/decode-insn.c: all of these
    /// have a handler since uprobes came to arm64 with 4.10) instead of single-stepping a copy of it.
    pub(super) fn is_emulated(&self) -> bool {
        matches!(self.flow(), Flow::Conditional(_) | Flow::Jump(_) | Flow::Call(_))
            && !matches!(self.opcode, Opcode::BCcc(_))
    }

    /// The number of an operand that is a general register, 31 for the stack pointer or the zero register.
    pub(super) fn register(&self, operand: usize) -> Option<u16> {
        match self.operands[operand] {
            Operand::Register(_, number) | Operand::RegisterOrSP(_, number) => Some(number),
            _ => None,
        }
    }

    /// Base register and offset of a memory operand without index or side effect.
    pub(super) fn plain_memory(&self, operand: usize) -> Option<(u16, i64)> {
        match self.operands[operand] {
            Operand::RegPreIndex(base, offset, false) => Some((base, offset.into())),
            _ => None,
        }
    }

    /// Size in bytes, base and offset of a plain zero-extending load into a general register, and that register.
    pub(super) fn plain_load(&self) -> Option<(u16, u16, i64, u8)> {
        let size = match (self.opcode, self.operands[0]) {
            (Opcode::LDR | Opcode::LDUR, Operand::Register(SizeCode::X, _)) => 8,
            (Opcode::LDR | Opcode::LDUR, Operand::Register(SizeCode::W, _)) => 4,
            (Opcode::LDRH | Opcode::LDURH, _) => 2,
            (Opcode::LDRB | Opcode::LDURB, _) => 1,
            _ => return None,
        };
        let (base, offset) = self.plain_memory(1)?;
        Some((self.register(0)?, base, offset, size))
    }

    /// The register and the constant that the instruction alone puts into it.
    pub(super) fn constant(&self) -> Option<(u16, u64)> {
        let register = self.register(0)?;
        let wide = matches!(
            self.operands[0],
            Operand::Register(SizeCode::X, _) | Operand::RegisterOrSP(SizeCode::X, _)
        );
        let value = match (self.opcode, self.operands[1], self.operands[2]) {
            (Opcode::MOVZ, Operand::ImmShift(value, shift), _) => {
                u64::from(value).checked_shl(shift.into())?
            }
            (Opcode::MOVN, Operand::ImmShift(value, shift), _) => {
                !u64::from(value).checked_shl(shift.into())?
            }
            (Opcode::ORR, Operand::Register(_, SP), Operand::Immediate(value)) => value.into(),
            (Opcode::ORR, Operand::Register(_, SP), Operand::Imm64(value)) => value,
            _ => return None,
        };
        Some((register, if wide { value } else { value & 0xffff_ffff }))
    }

    /// The general registers that it may write (an overestimate); those clobbered by a callee are not included.
    pub(super) fn written(&self) -> impl Iterator<Item = u16> {
        let only_reads = matches!(
            self.opcode,
            Opcode::STR
                | Opcode::STRB
                | Opcode::STRH
                | Opcode::STUR
                | Opcode::STURB
                | Opcode::STURH
                | Opcode::STP
                | Opcode::STNP
                | Opcode::STLR
                | Opcode::STLRB
                | Opcode::STLRH
                | Opcode::CBZ
                | Opcode::CBNZ
                | Opcode::TBZ
                | Opcode::TBNZ
                | Opcode::CCMP
                | Opcode::CCMN
                | Opcode::BR
                | Opcode::BLR
                | Opcode::RET
        );
        let has_pair = matches!(
            self.operands[2],
            Operand::RegPreIndex(..) | Operand::RegPostIndex(..) | Operand::RegPostIndexReg(..)
        );
        let first = self.register(0).filter(|_| !only_reads);
        let second = self.register(1).filter(|_| !only_reads && has_pair);
        let base = self.operands.iter().find_map(|operand| match *operand {
            Operand::RegPreIndex(base, _, true)
            | Operand::RegPostIndex(base, _)
            | Operand::RegPostIndexReg(base, _) => Some(base),
            _ => None,
        });
        // Compare-and-swap of register pairs.
        let pair = self.operands.iter().find_map(|operand| match *operand {
            Operand::RegisterPair(_, number) => Some(number),
            _ => None,
        });
        first.into_iter().chain(second).chain(base).chain(pair).chain(pair.map(|number| number + 1))
    }
}

/// Decodes the function extent with this index.
pub(super) fn decode(image: &ElfImage, function: usize) -> Vec<Instruction> {
    let Some(range) = image.functions().get(function) else { return Vec::new() };
    let Some(bytes) = image.read_bytes(range.start, range.size() as usize) else { return Vec::new() };
    let words = bytes.as_chunks::<4>().0.iter().zip((range.start.0..).step_by(WORD as usize));
    words.map(|(word, address)| Instruction::decode(Svma(address), *word)).collect()
}

/// The instruction at the start of these bytes.
pub(super) fn decode_one(bytes: &[u8], address: Svma) -> Option<Instruction> {
    Some(Instruction::decode(address, *bytes.first_chunk()?))
}

/// Computes the address that an instruction forms, loads from or jumps to, by following `adrp` through a register.
#[derive(Default)]
pub(super) struct Addresses {
    /// Contents of the general registers, as far as `adrp` and `add` determine them.
    registers: [Option<u64>; 32],
}

impl Addresses {
    /// Returns the address that the instruction computes in full or loads from, and updates the registers.
    pub(super) fn step(&mut self, instruction: &Instruction) -> Option<Svma> {
        let of = |register: u16| *self.registers.get(usize::from(register))?;
        let found = match (instruction.opcode, instruction.operands) {
            (Opcode::ADR, _) => instruction.target().map(|Svma(at)| at),
            (Opcode::ADRP, _) => None,
            (Opcode::ADD, [_, Operand::RegisterOrSP(_, base), Operand::Immediate(offset), _]) => {
                of(base).map(|page| page.wrapping_add(offset.into()))
            }
            _ => instruction.operands.iter().find_map(|operand| match *operand {
                Operand::RegPreIndex(base, offset, _) => Some(of(base)?.wrapping_add_signed(offset.into())),
                _ => None,
            }),
        };
        let computed = match instruction.opcode {
            Opcode::ADRP => instruction.target().map(|Svma(at)| at),
            Opcode::ADR | Opcode::ADD => found,
            _ => None,
        };
        for register in instruction.written() {
            self.set(register, None);
        }
        match instruction.flow() {
            Flow::Call(_) | Flow::IndirectCall => {
                for register in (0..SP).filter(|&register| !PRESERVED.contains(&register.into())) {
                    self.set(register, None);
                }
            }
            _ => {
                if let (Some(register), Some(address)) = (instruction.register(0), computed) {
                    self.set(register, Some(address));
                }
            }
        }
        found.map(Svma)
    }

    fn set(&mut self, register: u16, value: Option<u64>) {
        if let Some(slot) = self.registers.get_mut(usize::from(register)) {
            *slot = value;
        }
    }
}

/// Finds the instructions that refer into one of the ranges: jumps and calls, and for [`Kind::Any`] also the addresses
/// that `adrp` and a following instruction form together.
pub(super) fn find_references(image: &ElfImage, wanted: &[Range<u64>], kind: Kind) -> Vec<Reference> {
    let mut wanted: Vec<Range<u64>> = wanted.iter().filter(|range| !range.is_empty()).cloned().collect();
    wanted.sort_by_key(|range| range.start);
    let mut found = Vec::new();
    if wanted.is_empty() {
        return found;
    }
    let hits = |Svma(target): Svma| {
        let behind = wanted.partition_point(|range| range.start <= target);
        wanted[..behind].iter().rev().take(2).any(|range| range.contains(&target))
    };
    for function in 0..image.functions().len() {
        let mut addresses = Addresses::default();
        for instruction in decode(image, function) {
            let address = instruction.address;
            let (target, flow) = match instruction.flow() {
                Flow::Conditional(target) => (Some(target), reference::Flow::Conditional),
                Flow::Jump(target) => (Some(target), reference::Flow::Jump),
                Flow::Call(target) => (Some(target), reference::Flow::Call),
                _ => (None, reference::Flow::Other),
            };
            let computed = if kind == Kind::Any { addresses.step(&instruction) } else { None };
            if let Some(target) = target.or(computed).filter(|&target| hits(target)) {
                found.push(Reference { function, address, flow, target });
            }
        }
    }
    found
}

#[cfg(test)]
pub(super) fn assemble(address: u64, words: &[u32]) -> Vec<Instruction> {
    let at = (address..).step_by(WORD as usize);
    words.iter().zip(at).map(|(word, at)| Instruction::decode(Svma(at), word.to_le_bytes())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `adrp` and the instruction that completes it give an address; a call or another write in between loses it.
    #[test]
    fn addresses() {
        let last = |words: &[u32]| {
            let mut addresses = Addresses::default();
            assemble(0xc_9520, words).iter().map(|i| addresses.step(i)).last().flatten()
        };
        // adrp x0, 37f000; ldr x0, [x0, #3072]
        assert_eq!(last(&[0xd000_15a0, 0xf946_0000]), Some(Svma(0x37_fc00)));
        // adrp x0; add x0, x0, #1; ldr x0, [x0, #3072]
        assert_eq!(last(&[0xd000_15a0, 0x9100_0400, 0xf946_0000]), Some(Svma(0x37_fc01)));
        // adrp x0; bl; ldr; and adrp x0; mov x0, x1; ldr
        assert_eq!(last(&[0xd000_15a0, 0x97fd_a92a, 0xf946_0000]), None);
        assert_eq!(last(&[0xd000_15a0, 0xaa01_03e0, 0xf946_0000]), None);
    }

    /// Instructions that the kernel simulates: tbz, tbnz, b.hi, cbz, bl, b; those that it single-steps in a copy: ldr, nop, add.
    #[test]
    fn emulated() {
        let simulated = [0x36d0_00a0, 0x37c8_36a0, 0x5400_00a8, 0xb400_0600, 0x97fd_a92a, 0x17fd_b09d];
        assert!(assemble(0, &simulated).iter().all(Instruction::is_emulated));
        let stepped = [0xb940_1680, 0xd503_201f, 0x9100_0400, 0xd400_0001];
        assert!(!assemble(0, &stepped).iter().any(Instruction::is_emulated));
    }

    /// Constants from every encoding: movz, movn, movz of 32 bits, orr with the zero register.
    #[test]
    fn constants() {
        let made: Vec<_> = assemble(0, &[0x52a0_8001, 0x92f8_0002, 0xd280_0280, 0xb240_03e0])
            .iter()
            .map(Instruction::constant)
            .collect();
        assert_eq!(made, [Some((1, 1 << 26)), Some((2, 0x3fff_ffff_ffff_ffff)), Some((0, 20)), Some((0, 1))]);
    }
}
