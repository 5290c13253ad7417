//! Helper functions for x86-64 instructions.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

/// Hardware number of the general-purpose register that `register` is a part of (0 rax … 15 r15).
pub(super) fn register_number(register: Register) -> Option<usize> {
    register.is_gpr().then(|| register.full_register() as usize - Register::RAX as usize)
}

/// Whether it is `ah`, `bh`, `ch` or `dh`.
pub(super) fn is_high_byte(register: Register) -> bool {
    matches!(register, Register::AH | Register::BH | Register::CH | Register::DH)
}

/// The immediate value of an operand.
pub(super) fn immediate(instruction: &Instruction, operand: u32) -> Option<u64> {
    if operand >= instruction.op_count() {
        return None;
    }
    instruction.try_immediate(operand).ok()
}

/// Whether the operand exists and is a register.
pub(super) fn is_register(instruction: &Instruction, operand: u32) -> bool {
    operand < instruction.op_count() && instruction.op_kind(operand) == OpKind::Register
}

/// Whether the operand exists and is in memory.
pub(super) fn is_memory(instruction: &Instruction, operand: u32) -> bool {
    operand < instruction.op_count() && instruction.op_kind(operand) == OpKind::Memory
}

/// The general-purpose register in operand 0, widened to 64 bits.
pub(super) fn first_register(instruction: &Instruction) -> Option<Register> {
    is_register(instruction, 0).then(|| instruction.op0_register().full_register())
}

/// The registers that an instruction writes, wholly, partly or conditionally, widened to 64 bits.
pub(super) fn written_registers(
    factory: &mut InstructionInfoFactory,
    instruction: &Instruction,
) -> Vec<Register> {
    let used = factory.info(instruction).used_registers();
    used.iter().filter(|used| is_write(used.access())).map(|used| used.register().full_register()).collect()
}

/// Whether an access changes, or may change, its operand.
fn is_write(access: OpAccess) -> bool {
    matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
}

/// Whether the code sets up rbp as a frame pointer, so that it addresses locals.
pub(super) fn has_frame_pointer(instructions: &[Instruction]) -> bool {
    instructions.iter().any(|instruction| {
        instruction.mnemonic() == Mnemonic::Mov
            && is_register(instruction, 0)
            && is_register(instruction, 1)
            && instruction.op0_register() == Register::RBP
            && instruction.op1_register() == Register::RSP
    })
}
