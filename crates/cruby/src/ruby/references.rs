//! Who refers to an address? A linear scan for 4-byte displacements that hit it, each verified by decoding the
//! function around it. It costs a few milliseconds where decoding all of a large `.text` costs a hundred.

use std::collections::BTreeMap;
use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};

use super::aarch64;
use super::reference::{Flow, Kind, Reference};
use super::x86::immediate;
use crate::address::Svma;
use crate::elf::{ElfImage, Machine};

/// Finds the instructions that refer into one of the ranges. Short jumps (8-bit displacement) are not found: they only
/// reach the neighbourhood, which the callers decode anyway.
pub(super) fn find_references(image: &ElfImage, wanted: &[Range<u64>], kind: Kind) -> Vec<Reference> {
    if image.machine() == Machine::Aarch64 {
        return aarch64::find_references(image, wanted, kind);
    }
    let mut found = Vec::new();
    for (function, ends) in candidates(image, wanted, kind) {
        let mut ends = ends.into_iter().peekable();
        for instruction in decode(image, function) {
            while ends.next_if(|&(end, _)| end < instruction.next_ip()).is_some() {}
            while let Some((_, target)) = ends.next_if(|&(end, _)| end == instruction.next_ip()) {
                if refers_to(&instruction, target) {
                    let flow = match instruction.flow_control() {
                        FlowControl::ConditionalBranch => Flow::Conditional,
                        FlowControl::UnconditionalBranch => Flow::Jump,
                        FlowControl::Call => Flow::Call,
                        _ => Flow::Other,
                    };
                    let address = Svma(instruction.ip());
                    found.push(Reference { function, address, flow, target: Svma(target) });
                }
            }
        }
    }
    found
}

/// Decodes the function extent with that index.
pub(super) fn decode(image: &ElfImage, function: usize) -> Vec<Instruction> {
    let Some(range) = image.functions().get(function) else { return Vec::new() };
    let Some(bytes) = image.read_bytes(range.start, range.size() as usize) else { return Vec::new() };
    Decoder::with_ip(64, bytes, range.start.0, DecoderOptions::NONE).into_iter().collect()
}

/// Bytes before a displacement that tell a branch; no instruction with a displacement is shorter than one opcode byte,
/// and code does not begin with a branch.
const OPCODE: usize = 2;

/// `call rel32`, `jmp rel32` or a conditional jump with a 32-bit displacement.
fn is_branch(prefix: u8, opcode: u8) -> bool {
    matches!(opcode, 0xe8 | 0xe9) || (prefix == 0x0f && opcode & 0xf0 == 0x80)
}

/// By function: addresses behind a displacement that hits a wanted address, with that address.
fn candidates(image: &ElfImage, wanted: &[Range<u64>], kind: Kind) -> BTreeMap<usize, Vec<(u64, u64)>> {
    let mut found: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
    let mut wanted: Vec<Range<u64>> = wanted.iter().filter(|range| !range.is_empty()).cloned().collect();
    wanted.sort_by_key(|range| range.start);
    let (Some(first), Some(last)) = (wanted.first(), wanted.iter().map(|range| range.end).max()) else {
        return found;
    };
    let bounds = first.start..last;
    let hits = |target: u64| {
        bounds.contains(&target) && {
            let behind = wanted.partition_point(|range| range.start <= target);
            wanted[..behind].iter().rev().take(2).any(|range| range.contains(&target))
        }
    };

    let (Svma(text), bytes) = image.text();
    for (at, window) in bytes.windows(OPCODE + 4).enumerate() {
        let [prefix, opcode, displacement @ ..] = window else { break };
        if kind == Kind::Branch && !is_branch(*prefix, *opcode) {
            continue;
        }
        let displacement = displacement.try_into().map_or(0, i32::from_le_bytes);
        let end = text + (at + OPCODE + 4) as u64;
        let relative = end.wrapping_add_signed(displacement.into());
        let absolute = u64::from(displacement.cast_unsigned());
        let target = if hits(relative) {
            relative
        } else if image.is_fixed_position() && hits(absolute) {
            absolute
        } else {
            continue;
        };
        if let Some(function) = image.function_index(Svma(end - 1)) {
            found.entry(function).or_default().push((end, target));
        }
    }
    found
}

fn refers_to(instruction: &Instruction, target: u64) -> bool {
    if instruction.is_ip_rel_memory_operand() {
        return instruction.ip_rel_memory_address() == target;
    }
    if instruction.near_branch_target() == target {
        return true;
    }
    (0..instruction.op_count()).any(|operand| immediate(instruction, operand) == Some(target))
}
