//! Access to the code of an image: functions with the parts that the compiler moved away from them, and the targets of
//! their calls. Functions are decoded on demand and not kept.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

use iced_x86::{FlowControl, Instruction};

use super::aarch64;
use super::reference::{Flow, Kind, Reference};
use super::references::{Displacements, decode, find_references};
use super::x86::has_frame_pointer;
use crate::address::Svma;
use crate::elf::{ElfImage, Machine};

/// Maximum number of instructions in a basic block, and of jumps to one, that are examined: bounds the work on hostile code.
const MAX_BLOCK: usize = 4096;
const MAX_PREDECESSORS: usize = 64;

/// Functions that do not return, called by the GC and the thread code; the code after such a call belongs to something else.
const NO_RETURN: [&str; 6] =
    ["__stack_chk_fail", "abort", "rb_bug", "rb_bug_errno", "rb_memerror", "ruby_malloc_size_overflow"];

/// The code of one image. A function is identified by the index of its extent in [`ElfImage::functions`].
pub(super) struct Code<'a> {
    pub(super) image: &'a ElfImage,
    explored: Explored,
}

/// Results gathered so far about the code of an image.
#[derive(Default)]
pub(super) struct Explored {
    /// Cold part → function from which it was split.
    parents: BTreeMap<usize, usize>,
    /// Extents whose role has been decided.
    examined: BTreeSet<usize>,
    /// Slots of tables that are filled at run time, and their assumed contents.
    dispatch: BTreeMap<Svma, Svma>,
    /// Possible references, computed on first use.
    displacements: OnceCell<Displacements>,
}

/// The target of a call or jump.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Callee<'a> {
    /// Its address, if it is in this image (also behind a PLT stub).
    pub(super) address: Option<Svma>,
    /// Its name, if it is a dynamic symbol.
    pub(super) name: Option<&'a str>,
}

impl<'a> Code<'a> {
    pub(super) fn new(image: &'a ElfImage) -> Self {
        Self::with(image, Explored::default())
    }

    /// Continues with earlier results about the same image.
    pub(super) fn with(image: &'a ElfImage, explored: Explored) -> Self {
        Self { image, explored }
    }

    /// The results gathered so far.
    pub(super) fn explored(self) -> Explored {
        self.explored
    }

    /// Sets the assumed contents of table slots that are filled at run time.
    pub(super) fn set_dispatch(&mut self, table: BTreeMap<Svma, Svma>) {
        self.explored.dispatch = table;
    }

    /// The instructions that refer into one of the ranges, which lie in the image.
    pub(super) fn references(&self, wanted: &[Range<u64>], kind: Kind) -> Vec<Reference> {
        match self.image.machine() {
            Machine::Aarch64 => aarch64::find_references(self.image, wanted, kind),
            Machine::X86_64 => find_references(self.image, self.displacements(), wanted, kind),
        }
    }

    /// The places in x86-64 code that may refer to something.
    pub(super) fn displacements(&self) -> &Displacements {
        self.explored.displacements.get_or_init(|| Displacements::of(self.image))
    }

    /// The function that an extent belongs to: itself, or the one from which it was split.
    pub(super) fn owner(&self, function: usize) -> usize {
        *self.explored.parents.get(&function).unwrap_or(&function)
    }

    /// The function that owns the code at an address.
    pub(super) fn owner_of(&self, address: Svma) -> Option<usize> {
        Some(self.owner(self.image.function_index(address)?))
    }

    /// The extents of a function, in order of address.
    pub(super) fn parts(&self, owner: usize) -> Vec<usize> {
        let cold =
            self.explored.parents.iter().filter(|&(_, &parent)| parent == owner).map(|(&part, _)| part);
        let mut parts: Vec<usize> = cold.chain([owner]).collect();
        parts.sort_unstable();
        parts
    }

    /// First address of a function.
    pub(super) fn start(&self, function: usize) -> Svma {
        self.image.functions()[function].start
    }

    /// Decodes one extent.
    pub(super) fn decode(&self, function: usize) -> Vec<Instruction> {
        decode(self.image, function)
    }

    /// Decodes a function with its cold parts.
    pub(super) fn body(&self, owner: usize) -> Body {
        let mut body = Body::new(self.parts(owner).into_iter().map(|part| self.decode(part)));
        body.entry = body.index_of(self.start(owner)).unwrap_or(0);
        let ends = |instruction: &Instruction| {
            matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall)
                && self.callee(instruction).name.is_some_and(|name| NO_RETURN.contains(&name))
        };
        let calls = body.instructions.iter().enumerate().filter(|(_, instruction)| ends(instruction));
        body.no_return = calls.map(|(index, _)| index).collect();
        body
    }

    /// The target of a call or jump; empty if it is known only at run time.
    pub(super) fn callee(&self, instruction: &Instruction) -> Callee<'a> {
        if instruction.is_call_near_indirect() || instruction.is_jmp_near_indirect() {
            if !instruction.is_ip_rel_memory_operand() {
                return Callee::default();
            }
            return self.through_slot(Svma(instruction.ip_rel_memory_address()));
        }
        let target = Svma(instruction.near_branch_target());
        if target.0 == 0 {
            return Callee::default();
        }
        self.callee_at(target)
    }

    /// The target of a call or jump to an address.
    pub(super) fn callee_at(&self, target: Svma) -> Callee<'a> {
        if let Some(slot) = self.image.stub_slot(target) {
            return self.through_slot(slot);
        }
        let name = self.image.dynamic_symbols().at(target).next().map(|symbol| symbol.name);
        Callee { address: Some(target), name }
    }

    /// The address that represents a function of another image in this one: its first PLT stub or slot.
    pub(super) fn import(&self, name: &str) -> Option<Svma> {
        self.image.imports(name).min()
    }

    fn through_slot(&self, slot: Svma) -> Callee<'a> {
        Callee { address: self.pointer(slot), name: self.image.slot_symbol(slot) }
    }

    /// The stated address that a pointer slot holds at run time, if it points into this image.
    pub(super) fn pointer(&self, slot: Svma) -> Option<Svma> {
        self.image.pointer(slot).or_else(|| self.explored.dispatch.get(&slot).copied())
    }

    /// Decides which of the extents are cold parts, and of which function. Extent C is the cold part of F when it is
    /// not exported, never called, and entered by jumps from F alone, and either one of those jumps is conditional
    /// (compilers emit tail calls as unconditional jumps) or its first unwind row shows a frame already set up.
    pub(super) fn resolve_cold_parts(&mut self, candidates: impl IntoIterator<Item = usize>) {
        let exported = |function: usize| {
            self.image.dynamic_symbols().at(self.image.functions()[function].start).next().is_some()
        };
        let fresh: Vec<usize> = candidates
            .into_iter()
            .filter(|function| !self.explored.examined.contains(function) && !exported(*function))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        if fresh.is_empty() {
            return;
        }
        let extents: Vec<Range<u64>> = fresh.iter().map(|&f| extent(self.image, f)).collect();
        let mut into: HashMap<usize, Vec<Reference>> = HashMap::new();
        for reference in self.references(&extents, Kind::Branch) {
            let Some(function) = self.image.function_index(reference.target) else { continue };
            if function != reference.function {
                into.entry(function).or_default().push(reference);
            }
        }
        // A part may be entered from another part of the same function, so results of the first round can settle cases
        // that it left open.
        for _ in 0..2 {
            for &function in &fresh {
                let references = into.get(&function).map_or(&[][..], Vec::as_slice);
                if let Some(parent) = self.cold_parent(function, references) {
                    self.explored.parents.insert(function, parent);
                }
            }
        }
        self.explored.examined.extend(fresh);
    }

    fn cold_parent(&self, function: usize, references: &[Reference]) -> Option<usize> {
        let mut conditional = false;
        let mut owners = HashSet::new();
        for reference in references {
            match reference.flow {
                Flow::Conditional => conditional = true,
                Flow::Jump => {}
                Flow::Call => return None,
                Flow::Other => continue,
            }
            owners.insert(self.owner(reference.function));
        }
        owners.remove(&function);
        let mut owners = owners.into_iter();
        let (Some(parent), None) = (owners.next(), owners.next()) else { return None };
        let entry = self.image.functions()[function].entry;
        // The parent must be a root, or owner() would have to follow chains.
        (!self.explored.parents.contains_key(&parent) && (conditional || !entry)).then_some(parent)
    }
}

fn extent(image: &ElfImage, function: usize) -> Range<u64> {
    let range = image.functions()[function];
    range.start.0..range.end.0
}

/// A decoded function with its cold parts, in order of address.
pub(super) struct Body {
    pub(super) instructions: Vec<Instruction>,
    /// Indices at which a part starts.
    part_starts: BTreeSet<usize>,
    /// Whether rbp addresses the stack frame.
    pub(super) frame_pointer: bool,
    /// Target address → indices of the jumps of this function that lead there.
    jumps: HashMap<u64, Vec<usize>>,
    /// Index of the instruction at which the function is entered.
    entry: usize,
    /// Indices of calls that do not return.
    no_return: BTreeSet<usize>,
}

impl Body {
    pub(super) fn new(parts: impl IntoIterator<Item = Vec<Instruction>>) -> Self {
        let mut body = Self {
            instructions: Vec::new(),
            part_starts: BTreeSet::new(),
            frame_pointer: false,
            jumps: HashMap::new(),
            entry: 0,
            no_return: BTreeSet::new(),
        };
        for part in parts {
            body.part_starts.insert(body.instructions.len());
            body.instructions.extend(part);
        }
        body.frame_pointer = has_frame_pointer(&body.instructions);
        for (index, instruction) in body.instructions.iter().enumerate() {
            if is_jump(instruction) {
                body.jumps.entry(instruction.near_branch_target()).or_default().push(index);
            }
        }
        body
    }

    /// Index of the instruction that starts at the address.
    pub(super) fn index_of(&self, address: Svma) -> Option<usize> {
        self.instructions.binary_search_by_key(&address.0, Instruction::ip).ok()
    }

    /// Whether a jump of this function leads to the instruction.
    pub(super) fn is_jump_target(&self, index: usize) -> bool {
        self.jumps.contains_key(&self.instructions[index].ip())
    }

    /// Index of the first instruction of the basic block (calls do not end a block).
    pub(super) fn block_start(&self, index: usize) -> usize {
        let mut start = index;
        while index - start < MAX_BLOCK && !self.is_jump_target(start) && self.falls_into(start) {
            start -= 1;
        }
        start
    }

    /// Whether the instruction before `index` is in the same part and always continues at `index`.
    fn falls_into(&self, index: usize) -> bool {
        if index == 0 || self.part_starts.contains(&index) {
            return false;
        }
        matches!(
            self.instructions[index - 1].flow_control(),
            FlowControl::Next | FlowControl::Call | FlowControl::IndirectCall
        )
    }

    /// Indices of the instructions that may run next inside this function.
    pub(super) fn successors(&self, index: usize) -> impl Iterator<Item = usize> {
        let instruction = &self.instructions[index];
        let jump =
            is_jump(instruction).then(|| self.index_of(Svma(instruction.near_branch_target()))).flatten();
        let continues = matches!(
            instruction.flow_control(),
            FlowControl::Next
                | FlowControl::ConditionalBranch
                | FlowControl::Call
                | FlowControl::IndirectCall
        );
        let next = index + 1;
        let following = continues
            && !self.no_return.contains(&index)
            && next < self.instructions.len()
            && !self.part_starts.contains(&next);
        jump.into_iter().chain(following.then_some(next))
    }

    /// Indices of the instructions that may have run just before; `None` at the entry and if there are too many. Empty
    /// for unreachable padding.
    pub(super) fn predecessors(&self, index: usize) -> Option<Vec<usize>> {
        let jumps = self.jumps.get(&self.instructions[index].ip()).map_or(&[][..], Vec::as_slice);
        if jumps.len() > MAX_PREDECESSORS {
            return None;
        }
        let mut found = jumps.to_vec();
        if index == self.entry {
            return None;
        }
        if self.part_starts.contains(&index) {
            // A cold part is entered only by jumps of its function.
            return Some(found);
        }
        let before = index.checked_sub(1)?;
        if self.successors(before).any(|next| next == index) && !found.contains(&before) {
            found.push(before);
        }
        Some(found)
    }

    /// Whether the instruction at `to` can run some time after the one at `from`.
    pub(super) fn leads_to(&self, from: usize, to: usize) -> bool {
        let mut seen = BTreeSet::new();
        let mut pending = vec![from];
        while let Some(index) = pending.pop() {
            if index == to {
                return true;
            }
            if seen.insert(index) {
                pending.extend(self.successors(index));
            }
        }
        false
    }

    /// Indices of the conditional jumps that lead to the block starting at `start`: directly, by falling through,
    /// or over `hops` blocks that do nothing but continue there.
    pub(super) fn conditional_predecessors(&self, start: usize, hops: u32) -> Vec<usize> {
        let mut found = Vec::new();
        let jumps = self.jumps.get(&self.instructions[start].ip()).map_or(&[][..], Vec::as_slice);
        for &jump in jumps.iter().take(MAX_PREDECESSORS) {
            if self.instructions[jump].flow_control() == FlowControl::ConditionalBranch {
                found.push(jump);
            } else if hops > 0 {
                found.extend(self.conditional_predecessors(self.block_start(jump), hops - 1));
            }
        }
        if start == 0 || self.part_starts.contains(&start) {
            return found;
        }
        let before = start - 1;
        if self.instructions[before].flow_control() == FlowControl::ConditionalBranch {
            found.push(before);
        } else if hops > 0 && self.falls_into(start) {
            found.extend(self.conditional_predecessors(self.block_start(before), hops - 1));
        }
        found
    }
}

/// Whether it is a direct jump, conditional or not.
pub(super) fn is_jump(instruction: &Instruction) -> bool {
    matches!(instruction.flow_control(), FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch)
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;

    fn decode(address: u64, code: &[u8]) -> Vec<Instruction> {
        Decoder::with_ip(64, code, address, DecoderOptions::NONE).into_iter().collect()
    }

    /// A slow path in a cold part is traced back to the conditional jumps that lead there, also over one plain jump.
    #[test]
    fn predecessors() {
        // 0x100: nop; 0x101: jne 0x200; 0x107: je 0x10a; 0x109: nop; 0x10a: jmp 0x202; 0x10f: ret
        let hot = [0x90, 0x0f, 0x85, 0xf9, 0, 0, 0, 0x74, 0x01, 0x90, 0xe9, 0xf3, 0, 0, 0, 0xc3];
        // 0x200: nop; 0x201: nop; 0x202: call; 0x207: nop; 0x208: ret
        let cold = [0x90, 0x90, 0xe8, 0, 0, 0, 0, 0x90, 0xc3];
        let body = Body::new([decode(0x100, &hot), decode(0x200, &cold)]);
        let index = |address| body.index_of(Svma(address)).unwrap();

        let start = body.block_start(index(0x207));
        assert_eq!(start, index(0x202));
        // From 0x202 back over the fall-through from 0x200, and over the jump at 0x10a to the block it ends.
        let mut jumps = body.conditional_predecessors(start, 1);
        jumps.sort_unstable();
        assert_eq!(jumps, [index(0x101), index(0x107)]);
        assert!(body.conditional_predecessors(start, 0).is_empty());
        assert!(body.is_jump_target(index(0x10a)) && !body.is_jump_target(index(0x109)));
        assert_eq!(body.index_of(Svma(0x102)), None);
    }

    /// The first instruction of a part has no predecessor, whatever lies at lower addresses.
    #[test]
    fn parts_are_separate() {
        let body = Body::new([decode(0x100, &[0x90, 0x90]), decode(0x200, &[0x90, 0x90])]);
        let second = body.index_of(Svma(0x201)).unwrap();
        assert_eq!(body.block_start(second), body.index_of(Svma(0x200)).unwrap());
        assert!(body.conditional_predecessors(body.block_start(second), 3).is_empty());
    }
}
