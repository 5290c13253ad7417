//! Finds references to an address: a linear scan for 4-byte displacements that match it, each verified by decoding the
//! function that contains it. It takes a few milliseconds; decoding all of a large `.text` takes a hundred. The result of
//! the scan is kept, because an image is searched about a dozen times.

use std::collections::BTreeMap;
use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};

use super::reference::{Flow, Kind, Reference};
use super::x86::immediate;
use crate::address::Svma;
use crate::elf::ElfImage;

/// The places in `.text` whose four bytes, read as a displacement or (at a fixed position) as an address, give an address
/// in the image. Most are coincidences: decoding shows which of them are real references.
pub(super) struct Displacements {
    /// First address of `.text`.
    text: u64,
    /// Offset in `.text` and value, ordered by offset.
    places: Vec<(u32, i32)>,
    /// Those of them that may belong to a branch, judged by the preceding bytes: a fifth.
    branches: Vec<(u32, i32)>,
    fixed_position: bool,
}

impl Displacements {
    /// Scans the text of an image. A text of 4 GiB or more is not a Ruby's, and has no places.
    pub(super) fn of(image: &ElfImage) -> Self {
        let (Svma(text), bytes) = image.text();
        let segments = image.segments();
        let low = segments.iter().map(|segment| segment.address.0).min().unwrap_or(text).min(text);
        let ends = segments.iter().map(|segment| segment.address.0.saturating_add(segment.memory_size));
        let high = ends.max().unwrap_or(text).max(text.saturating_add(bytes.len() as u64));
        let bounds = low..high;
        let fixed_position = image.is_fixed_position();
        let (mut places, mut branches) = (Vec::new(), Vec::new());
        if u32::try_from(bytes.len()).is_ok() {
            for (at, window) in bytes.array_windows::<4>().enumerate() {
                let value = i32::from_le_bytes(*window);
                let [relative, absolute] = targets(text.wrapping_add(at as u64 + 4), value);
                if bounds.contains(&relative) || (fixed_position && bounds.contains(&absolute)) {
                    places.push((at as u32, value));
                    let before = at.checked_sub(OPCODE).and_then(|from| bytes.get(from..at));
                    if matches!(before, Some(&[prefix, opcode]) if is_branch(prefix, opcode)) {
                        branches.push((at as u32, value));
                    }
                }
            }
        }
        Self { text, places, branches, fixed_position }
    }

    /// For each place the address after it, the address that it gives as a displacement from there and, at a fixed position,
    /// the address that it gives as an absolute address.
    pub(super) fn iter(&self, kind: Kind) -> impl Iterator<Item = (u64, u64, Option<u64>)> {
        let places = match kind {
            Kind::Branch => &self.branches,
            Kind::Any => &self.places,
        };
        places.iter().map(|&(at, value)| {
            let end = self.text.wrapping_add(u64::from(at) + 4);
            let [relative, absolute] = targets(end, value);
            (end, relative, self.fixed_position.then_some(absolute))
        })
    }
}

fn targets(end: u64, value: i32) -> [u64; 2] {
    [end.wrapping_add_signed(value.into()), u64::from(value.cast_unsigned())]
}

/// Finds the instructions that refer into one of the ranges. Short jumps (8-bit displacement) are not found: they only
/// reach the neighbourhood, which the callers decode anyway.
pub(super) fn find_references(
    image: &ElfImage,
    displacements: &Displacements,
    wanted: &[Range<u64>],
    kind: Kind,
) -> Vec<Reference> {
    let mut found = Vec::new();
    for (function, ends) in candidates(image, displacements, wanted, kind) {
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

/// Decodes the function extent with this index.
pub(super) fn decode(image: &ElfImage, function: usize) -> Vec<Instruction> {
    let Some(range) = image.functions().get(function) else { return Vec::new() };
    let Some(bytes) = image.read_bytes(range.start, range.size() as usize) else { return Vec::new() };
    Decoder::with_ip(64, bytes, range.start.0, DecoderOptions::NONE).into_iter().collect()
}

/// Number of bytes before a displacement that identify a branch; every instruction with a displacement has at least one
/// opcode byte, and code does not start with a branch.
const OPCODE: usize = 2;

/// `call rel32`, `jmp rel32` or a conditional jump with a 32-bit displacement.
fn is_branch(prefix: u8, opcode: u8) -> bool {
    matches!(opcode, 0xe8 | 0xe9) || (prefix == 0x0f && opcode & 0xf0 == 0x80)
}

/// By function: addresses after a displacement that matches a wanted address, with that address.
fn candidates(
    image: &ElfImage,
    displacements: &Displacements,
    wanted: &[Range<u64>],
    kind: Kind,
) -> BTreeMap<usize, Vec<(u64, u64)>> {
    let mut found: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
    let mut wanted: Vec<Range<u64>> = wanted.iter().filter(|range| !range.is_empty()).cloned().collect();
    wanted.sort_by_key(|range| range.start);
    let (Some(first), Some(last)) = (wanted.first(), wanted.iter().map(|range| range.end).max()) else {
        return found;
    };
    let bounds = first.start..last;
    let hits = |target: &u64| {
        bounds.contains(target) && {
            let behind = wanted.partition_point(|range| range.start <= *target);
            wanted[..behind].iter().rev().take(2).any(|range| range.contains(target))
        }
    };
    for (end, relative, absolute) in displacements.iter(kind) {
        let Some(target) = Some(relative).filter(hits).or_else(|| absolute.filter(hits)) else { continue };
        if let Some(function) = image.function_index(Svma(end.wrapping_sub(1))) {
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
