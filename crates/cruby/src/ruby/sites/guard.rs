//! Recognises tests of a single bit of memory.

use std::collections::BTreeSet;

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, Register};

use super::{FIRST_EVENT_BIT, Field, point_of_bit};
use crate::address::Svma;
use crate::elf::ElfImage;
use crate::ruby::code::Body;
use crate::ruby::x86::{first_register, immediate, is_high_byte, is_memory, is_register, written_registers};
use gctrace_common::event::Point;

/// Maximum number of instructions between a load and the test of the loaded value, or between two loads of a pointer chain.
const MAX_LOAD_DISTANCE: usize = 10;

/// A test of one event bit.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventTest {
    /// Index of the instruction that reads the flags.
    pub(super) load: usize,
    /// Index of the instruction that tests the bit; equal to `load` if it tests memory directly.
    pub(super) test: usize,
    /// Base register of the flags' address, `None` for a global variable.
    pub(super) base: Option<Register>,
    /// The word whose bit is tested.
    pub(super) field: Field,
    /// The event with that bit.
    pub(super) point: Point,
}

/// The event test, if the instruction tests exactly one bit of memory, or of a register just loaded from memory, and the
/// bit is an event's bit of some 32-bit word.
/// `frame_pointer` says whether rbp addresses the stack frame in this code.
pub(super) fn event_test(
    image: &ElfImage,
    instructions: &[Instruction],
    frame_pointer: bool,
    index: usize,
) -> Option<EventTest> {
    let instruction = &instructions[index];
    let bit = tested_bit(instruction)?;
    let load = if is_memory(instruction, 0) { index } else { load_of_tested(instructions, index)? };
    let memory = &instructions[load];
    if memory.memory_index() != Register::None {
        return None;
    }
    // Compilers narrow the test to the byte that holds the bit, so only the bit position counts.
    let within_word = |byte: i64| {
        let position = byte.checked_mul(8)?.checked_add(bit.into())?;
        let bit_of_word = position.rem_euclid(32) as u32;
        Some((point_of_bit(bit_of_word)?, (position - i64::from(bit_of_word)) / 8))
    };
    if memory.is_ip_rel_memory_operand() {
        let (point, word) = within_word(memory.ip_rel_memory_address() as i64)?;
        return Some(EventTest { load, test: index, base: None, field: Field::Global(word as u64), point });
    }
    let base = memory.memory_base();
    if !base.is_gpr64() || base == Register::RSP || (frame_pointer && base == Register::RBP) {
        return None;
    }
    let displacement = memory.memory_displacement64() as i64;
    let (point, word) = within_word(displacement)?;
    let pointer = match definition(instructions, load, base) {
        Some(at) => global_pointer(image, &instructions[at]),
        None if word == 0 => only_global_pointer(image, instructions, base),
        None => None,
    };
    if let Some(pointer) = pointer {
        let (point, word) = within_word((pointer.0 as i64).checked_add(displacement)?)?;
        return Some(EventTest { load, test: index, base: None, field: Field::Global(word as u64), point });
    }
    (word >= 0).then_some(EventTest {
        load,
        test: index,
        base: Some(base),
        field: Field::Objspace(word),
        point,
    })
}

/// Number of the only bit that `test x, imm`, `and r, imm` or `bt x, imm` tests.
fn tested_bit(instruction: &Instruction) -> Option<u32> {
    if instruction.op_count() != 2 {
        return None;
    }
    let value = immediate(instruction, 1)?;
    match instruction.mnemonic() {
        Mnemonic::Bt => Some((value & 63) as u32),
        Mnemonic::And if is_memory(instruction, 0) => None,
        Mnemonic::Test | Mnemonic::And => value.is_power_of_two().then_some(value.trailing_zeros()),
        _ => None,
    }
}

/// Index of the load into the register that the instruction tests.
fn load_of_tested(instructions: &[Instruction], index: usize) -> Option<usize> {
    if is_high_byte(instructions[index].op0_register()) {
        return None;
    }
    let register = first_register(&instructions[index])?;
    let load = definition(instructions, index, register)?;
    let instruction = &instructions[load];
    let loads =
        matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::Movzx) && is_memory(instruction, 1);
    loads.then_some(load)
}

/// Index of the instruction before `index` that writes the register as its first operand, in straight-line code.
fn definition(instructions: &[Instruction], index: usize, register: Register) -> Option<usize> {
    for at in (index.saturating_sub(MAX_LOAD_DISTANCE)..index).rev() {
        let instruction = &instructions[at];
        let only_reads =
            matches!(instruction.mnemonic(), Mnemonic::Test | Mnemonic::Cmp | Mnemonic::Bt | Mnemonic::Push);
        if first_register(instruction) == Some(register) && !only_reads {
            return Some(at);
        }
        let ends = FlowControl::Next != instruction.flow_control()
            && FlowControl::ConditionalBranch != instruction.flow_control();
        if ends {
            return None;
        }
    }
    None
}

/// The address that the instruction loads from a slot of the global offset table, or computes itself.
fn global_pointer(image: &ElfImage, instruction: &Instruction) -> Option<Svma> {
    if !instruction.is_ip_rel_memory_operand() {
        return None;
    }
    let address = Svma(instruction.ip_rel_memory_address());
    match instruction.mnemonic() {
        Mnemonic::Mov => image.pointer(address),
        Mnemonic::Lea => Some(address),
        _ => None,
    }
}

/// The global address that a register holds throughout a function: every instruction that writes it, except to
/// restore the caller's value at the end, writes that address. Compilers keep the address of the event flags in a
/// register from one test to the next.
fn only_global_pointer(image: &ElfImage, instructions: &[Instruction], base: Register) -> Option<Svma> {
    /// Bounds the work on hostile code.
    const MAX_FUNCTION: usize = 20_000;
    if instructions.len() > MAX_FUNCTION {
        return None;
    }
    let mut factory = InstructionInfoFactory::new();
    let mut found = None;
    for instruction in instructions {
        let restores = instruction.mnemonic() == Mnemonic::Pop;
        if restores || !written_registers(&mut factory, instruction).contains(&base) {
            continue;
        }
        let pointer = global_pointer(image, instruction)?;
        if *found.get_or_insert(pointer) != pointer {
            return None;
        }
    }
    found
}

/// The global address that a register holds on every path to the instruction at `index`: all definitions of it that reach
/// the instruction give the same address.
pub(super) fn reaching_pointer(image: &ElfImage, body: &Body, index: usize, base: Register) -> Option<Svma> {
    let mut factory = InstructionInfoFactory::new();
    let mut found = None;
    let mut seen = BTreeSet::new();
    let before = |index, register| Some(body.predecessors(index)?.into_iter().map(move |at| (at, register)));
    let mut pending: Vec<(usize, Register)> = before(index, base)?.collect();
    while let Some((at, register)) = pending.pop() {
        if !seen.insert((at, register)) {
            continue;
        }
        let instruction = &body.instructions[at];
        if !written_registers(&mut factory, instruction).contains(&register) {
            pending.extend(before(at, register)?);
        } else if let Some(copied) = copied_register(instruction) {
            pending.extend(before(at, copied)?);
        } else {
            let pointer = global_pointer(image, instruction)?;
            if *found.get_or_insert(pointer) != pointer {
                return None;
            }
        }
    }
    found
}

/// The register copied by a move between 64-bit registers.
fn copied_register(instruction: &Instruction) -> Option<Register> {
    let copies = instruction.mnemonic() == Mnemonic::Mov
        && is_register(instruction, 0)
        && is_register(instruction, 1)
        && instruction.op1_register().is_gpr64();
    copies.then(|| instruction.op1_register())
}

/// Index of the instruction on whose result the conditional jump at `jump` depends.
pub(super) fn flag_setter(instructions: &[Instruction], jump: usize) -> Option<usize> {
    /// Maximum number of instructions in between that do not touch the flags.
    const MAX_DISTANCE: usize = 8;
    for at in (jump.saturating_sub(MAX_DISTANCE)..jump).rev() {
        let instruction = &instructions[at];
        match instruction.mnemonic() {
            // `and r, imm; test r, r`, as compilers emit it without optimisation.
            Mnemonic::Test if is_register(instruction, 0) && is_register(instruction, 1) => {
                return definition(instructions, at, first_register(instruction)?);
            }
            Mnemonic::Test | Mnemonic::Bt | Mnemonic::And => return Some(at),
            Mnemonic::Cmp | Mnemonic::Or | Mnemonic::Xor | Mnemonic::Sub | Mnemonic::Add => return None,
            _ => {}
        }
        if instruction.flow_control() != FlowControl::Next {
            return None;
        }
    }
    None
}

/// Index of the first conditional jump after a test, in straight-line code.
pub(super) fn jump_behind(instructions: &[Instruction], test: usize) -> Option<usize> {
    /// Maximum number of instructions in between that do not touch the flags.
    const MAX_DISTANCE: usize = 12;
    let end = instructions.len().min(test + 1 + MAX_DISTANCE);
    for (index, instruction) in instructions.iter().enumerate().take(end).skip(test + 1) {
        match instruction.flow_control() {
            FlowControl::ConditionalBranch => return Some(index),
            FlowControl::Next => {}
            _ => return None,
        }
    }
    None
}

/// The event with this constant.
pub(super) fn point_of_constant(value: u64) -> Option<Point> {
    (value.is_power_of_two() && value >= 1 << FIRST_EVENT_BIT)
        .then(|| point_of_bit(value.trailing_zeros()))?
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;
    use crate::debian::libruby_image;
    use crate::ruby::x86::has_frame_pointer;

    fn decode(address: u64, code: &[u8]) -> Vec<Instruction> {
        Decoder::with_ip(64, code, address, DecoderOptions::NONE).into_iter().collect()
    }

    /// The event tests in a piece of code: load, field and event.
    fn tests_in(address: u64, code: &[u8]) -> Vec<(usize, Field, Point)> {
        let image = libruby_image();
        let instructions = decode(address, code);
        let tests = (0..instructions.len())
            .filter_map(|index| event_test(&image, &instructions, has_frame_pointer(&instructions), index));
        tests.map(|test| (test.load, test.field, test.point)).collect()
    }

    /// The same test narrowed to a byte, on a whole loaded word, and by bit number gives the same event of the same word.
    #[test]
    fn test_shapes() {
        let word = Field::Objspace(0x14);
        // test byte [r14+0x16], 0x40
        assert_eq!(tests_in(0, &[0x41, 0xf6, 0x46, 0x16, 0x40]), [(0, word, Point::GcStart)]);
        // test dword [rbx+0x14], 0x2000000
        assert_eq!(tests_in(0, &[0xf7, 0x43, 0x14, 0, 0, 0, 2]), [(0, word, Point::GcEnter)]);
        // mov eax, [rbx+0x14]; cmp eax, ecx; test eax, 0x4000000
        let loaded = [0x8b, 0x43, 0x14, 0x39, 0xc8, 0xa9, 0, 0, 0, 4];
        assert_eq!(tests_in(0, &loaded), [(0, word, Point::GcExit)]);
        // bt dword [rbx+0x14], 23
        assert_eq!(tests_in(0, &[0x0f, 0xba, 0x63, 0x14, 23]), [(0, word, Point::GcEndMark)]);
        // mov rax, [rbp+8]; mov eax, [rax+0x14]; and eax, 0x1000000
        let unoptimised = [0x48, 0x8b, 0x45, 8, 0x8b, 0x40, 0x14, 0x25, 0, 0, 0, 1];
        assert_eq!(tests_in(0, &unoptimised), [(1, word, Point::GcEndSweep)]);
    }

    /// Tests of locals, of other bits and of several bits are not event tests.
    #[test]
    fn other_tests() {
        // test byte [rsp+0x17], 4
        assert_eq!(tests_in(0, &[0xf6, 0x44, 0x24, 0x17, 4]), []);
        // mov rbp, rsp; test byte [rbp+0x17], 4
        assert_eq!(tests_in(0, &[0x48, 0x89, 0xe5, 0xf6, 0x45, 0x17, 4]), []);
        // test byte [rbp+0x17], 4 where rbp is an ordinary register
        assert_eq!(tests_in(0, &[0xf6, 0x45, 0x17, 4]).len(), 1);
        // test byte [rbx+0x16], 0x20
        assert_eq!(tests_in(0, &[0xf6, 0x43, 0x16, 0x20]), []);
        // test byte [rbx+0x16], 0xc0
        assert_eq!(tests_in(0, &[0xf6, 0x43, 0x16, 0xc0]), []);
        // mov eax, [rbx+0x14]; call; test eax, 0x4000000
        assert_eq!(tests_in(0, &[0x8b, 0x43, 0x14, 0xe8, 0, 0, 0, 0, 0xa9, 0, 0, 0, 4]), []);
    }

    /// A global word is recognised directly and through its slot in the global offset table (the form of 4.0).
    #[test]
    fn global_flags() {
        let image = libruby_image();
        let global = image.symbol("ruby_current_vm_ptr").unwrap().address;
        let slot = image.slots_of(global).next().unwrap();
        // mov rax, [rip+slot]; test byte [rax+3], 4
        let displacement = (slot.0 - 7) as u32;
        let through_slot =
            [&[0x48, 0x8b, 0x05][..], &displacement.to_le_bytes(), &[0xf6, 0x40, 3, 4]].concat();
        assert_eq!(tests_in(0, &through_slot), [(1, Field::Global(global.0), Point::GcExit)]);
        // mov r14, [rip+slot]; call; test byte [r14+3], 4; pop r14
        let kept = [
            &[0x4c, 0x8b, 0x35][..],
            &displacement.to_le_bytes(),
            &[0xe8, 0, 0, 0, 0],
            &[0x41, 0xf6, 0x46, 3, 4],
            &[0x41, 0x5e],
        ]
        .concat();
        assert_eq!(tests_in(0, &kept), [(2, Field::Global(global.0), Point::GcExit)]);
        // The same with another value for r14 somewhere: mov r14, rax
        let changed = [&kept[..], &[0x49, 0x89, 0xc6]].concat();
        assert_eq!(tests_in(0, &changed), [(2, Field::Objspace(0), Point::GcExit)]);
        // test byte [rip+0x1008], 2 at 0x1000: the last byte of the word at 0x200c
        let direct = [0xf6, 0x05, 0x08, 0x10, 0, 0, 2];
        assert_eq!(tests_in(0x1000, &direct), [(0, Field::Global(0x200c), Point::GcEnter)]);
    }

    /// The address of the flags is followed through a copy in another register and past unreachable padding; a path on which
    /// the register holds something else invalidates it.
    #[test]
    fn pointers_that_reach() {
        let image = libruby_image();
        // lea r15, [rip+0xff9]; mov rbp, r15; mov r15, rax
        let head = [0x4c, 0x8d, 0x3d, 0xf9, 0x0f, 0, 0, 0x4c, 0x89, 0xfd, 0x49, 0x89, 0xc7];
        // nop; mov r15, rbp; test byte [r15+3], 4
        let tail = [0x90, 0x49, 0x89, 0xef, 0x41, 0xf6, 0x47, 3, 4];
        let pointer = |jump: [u8; 2]| {
            let body = Body::new([decode(0x1000, &[&head[..], &jump, &tail].concat())]);
            reaching_pointer(&image, &body, 6, Register::R15)
        };
        // jmp to the mov; jne to the test
        assert_eq!(pointer([0xeb, 1]), Some(Svma(0x2000)));
        assert_eq!(pointer([0x75, 4]), None);
    }

    /// The jump after a test and the test before a jump are found across moves, but not across calls.
    #[test]
    fn test_and_jump() {
        // test byte [r14+0x16], 0x40; mov rax, rbx; jne
        let near = decode(0, &[0x41, 0xf6, 0x46, 0x16, 0x40, 0x48, 0x89, 0xd8, 0x75, 0]);
        assert_eq!((jump_behind(&near, 0), flag_setter(&near, 2)), (Some(2), Some(0)));
        // test; call; jne
        let call = decode(0, &[0x41, 0xf6, 0x46, 0x16, 0x40, 0xe8, 0, 0, 0, 0, 0x75, 0]);
        assert_eq!((jump_behind(&call, 0), flag_setter(&call, 2)), (None, None));
        // and eax, 0x40; test eax, eax; jne
        let masked = decode(0, &[0x83, 0xe0, 0x40, 0x85, 0xc0, 0x75, 0]);
        assert_eq!(flag_setter(&masked, 2), Some(0));
    }
}
