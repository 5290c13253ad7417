//! Recognises tests of a single bit of memory.

use iced_x86::{FlowControl, Instruction, Mnemonic, Register};

use super::{FIRST_EVENT_BIT, Field, point_of_bit};
use crate::address::Svma;
use crate::elf::ElfImage;
use crate::ruby::x86::{first_register, immediate, is_memory, is_register};
use gctrace_common::event::Point;

/// Instructions between a load and the test of what it loaded, or between two loads of a pointer chain.
const MAX_LOAD_DISTANCE: usize = 10;

/// A test of one event bit.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventTest {
    /// Index of the instruction that reads the flags.
    pub(super) load: usize,
    /// Index of the instruction that tests the bit; equal to `load` if it tests memory directly.
    pub(super) test: usize,
    /// Register that the flags are addressed by, `None` for a global variable.
    pub(super) base: Option<Register>,
    /// The word whose bit is tested.
    pub(super) field: Field,
    /// The event with that bit.
    pub(super) point: Point,
}

/// If the instruction tests exactly one bit of memory, or of a register just loaded from memory, and the bit is an
/// event's bit of some 32-bit word.
pub(super) fn event_test(image: &ElfImage, instructions: &[Instruction], index: usize) -> Option<EventTest> {
    let instruction = &instructions[index];
    let bit = tested_bit(instruction)?;
    let load = if is_memory(instruction, 0) { index } else { load_of_tested(instructions, index)? };
    let memory = &instructions[load];
    if memory.memory_index() != Register::None {
        return None;
    }
    // Compilers narrow the test to the byte that holds the bit, so only the position in bits counts.
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
    let frame_pointer = base == Register::RBP && has_frame_pointer(instructions);
    if !base.is_gpr64() || base == Register::RSP || frame_pointer {
        return None;
    }
    let displacement = memory.memory_displacement64() as i64;
    if let Some(pointer) = pointer_from_slot(image, instructions, load, base) {
        let (point, word) = within_word((pointer.0 as i64).checked_add(displacement)?)?;
        return Some(EventTest { load, test: index, base: None, field: Field::Global(word as u64), point });
    }
    let (point, word) = within_word(displacement)?;
    (word >= 0).then_some(EventTest {
        load,
        test: index,
        base: Some(base),
        field: Field::Objspace(word),
        point,
    })
}

/// Number of the only bit that `test x, imm`, `and r, imm` or `bt x, imm` looks at.
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
    if crate::ruby::x86::is_high_byte(instructions[index].op0_register()) {
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

/// The address in `base` if it comes straight from a slot of the global offset table.
fn pointer_from_slot(
    image: &ElfImage,
    instructions: &[Instruction],
    index: usize,
    base: Register,
) -> Option<Svma> {
    let instruction = &instructions[definition(instructions, index, base)?];
    let from_slot = instruction.mnemonic() == Mnemonic::Mov && instruction.is_ip_rel_memory_operand();
    let address = instruction.mnemonic() == Mnemonic::Lea && instruction.is_ip_rel_memory_operand();
    if address {
        return Some(Svma(instruction.ip_rel_memory_address()));
    }
    from_slot.then(|| image.pointer(Svma(instruction.ip_rel_memory_address())))?
}

/// Whether the code sets up rbp as a frame pointer, so that it addresses locals.
fn has_frame_pointer(instructions: &[Instruction]) -> bool {
    instructions.iter().any(|instruction| {
        instruction.mnemonic() == Mnemonic::Mov
            && is_register(instruction, 0)
            && is_register(instruction, 1)
            && instruction.op0_register() == Register::RBP
            && instruction.op1_register() == Register::RSP
    })
}

/// Index of the instruction whose result the conditional jump at `jump` depends on.
pub(super) fn flag_setter(instructions: &[Instruction], jump: usize) -> Option<usize> {
    /// Instructions between the two that do not touch the flags.
    const MAX_DISTANCE: usize = 8;
    for at in (jump.saturating_sub(MAX_DISTANCE)..jump).rev() {
        let instruction = &instructions[at];
        match instruction.mnemonic() {
            // `and r, imm; test r, r`, as compilers write it without optimisation.
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

/// Index of the first conditional jump behind a test, in straight-line code.
pub(super) fn jump_behind(instructions: &[Instruction], test: usize) -> Option<usize> {
    /// Instructions between the two that do not touch the flags.
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

/// The constant of an event.
pub(super) fn point_of_constant(value: u64) -> Option<Point> {
    (value.is_power_of_two() && value >= 1 << FIRST_EVENT_BIT)
        .then(|| point_of_bit(value.trailing_zeros()))?
}
