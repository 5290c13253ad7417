//! Which instructions the kernel emulates under a uprobe. It single-steps a copy of all others, which costs a second trap
//! per hit (about 20 µs on a virtual machine instead of 0.6).
//!
//! The rules here hold from Linux 5.8 on (arch/x86/kernel/uprobes.c, `branch_setup_xol_ops` and
//! `push_setup_xol_ops`). Later kernels emulate more, for example longer nops; this code does not rely on that.

use iced_x86::{
    Code as Opcode, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpKind, Register,
};

use super::code::Body;
use super::x86::written_registers;
use crate::address::Svma;
use crate::elf::ElfImage;

/// Length of the longest instruction.
const LONGEST: usize = 15;
/// Maximum number of instructions examined from the start of a function.
const MAX_PROLOGUE: usize = 8;
/// The same if only arguments are read. Functions of glibc 2.41 set up seven arguments for the function that they all call.
const MAX_ARGUMENTS: usize = 12;
/// Registers that a probe at the start of a function may read: the stack pointer and the first arguments.
const KEPT: [Register; 5] = [Register::RSP, Register::RDI, Register::RSI, Register::RDX, Register::RCX];

/// Whether the kernel emulates the instruction.
pub(super) fn is_emulated(instruction: &Instruction) -> bool {
    if instruction.flow_control() == FlowControl::ConditionalBranch {
        // The kernel refuses a 16-bit operand size; loop and jrcxz are not Jcc instructions.
        return instruction.is_jcc_short_or_near() && instruction.op0_kind() == OpKind::NearBranch64;
    }
    match instruction.code() {
        Opcode::Call_rel32_64 | Opcode::Jmp_rel8_64 | Opcode::Jmp_rel32_64 => true,
        // With prefixes some kernels refuse it, or it is a different instruction.
        Opcode::Nopd => instruction.len() == 1,
        // With no prefix except the required one.
        Opcode::Push_r64 => {
            let extended = instruction.op0_register() >= Register::R8;
            instruction.len() == 1 + usize::from(extended)
        }
        _ => false,
    }
}

/// Whether the kernel emulates the instruction at an address; `false` if the file has no code there.
pub(super) fn is_emulated_at(image: &ElfImage, address: Svma) -> bool {
    // Fewer bytes follow the last instruction of a segment.
    let bytes = (1..=LONGEST).rev().find_map(|length| image.read_bytes(address, length));
    bytes.is_some_and(|bytes| {
        let mut decoder = Decoder::with_ip(64, bytes, address.0, DecoderOptions::NONE);
        is_emulated(&decoder.decode())
    })
}

/// The instruction at which calls of a function are probed, and whether the kernel emulates it: the first emulated one,
/// provided that every call reaches it once, with stack and arguments as the caller left them; else the function's first.
/// (`endbr64`, with which functions start in builds for indirect branch tracking, is not emulated.)
pub(super) fn entry(body: &Body, start: Svma) -> (Svma, bool) {
    entry_with(body, start, &KEPT, MAX_PROLOGUE)
}

/// The same if only arguments in these registers are read. The stack may have changed, and a 32-bit number may have been extended to
/// 64 bits.
pub(super) fn entry_with_arguments(body: &Body, start: Svma, arguments: &[Register]) -> (Svma, bool) {
    entry_with(body, start, arguments, MAX_ARGUMENTS)
}

fn entry_with(body: &Body, start: Svma, kept: &[Register], most: usize) -> (Svma, bool) {
    let mut factory = InstructionInfoFactory::new();
    let Some(first) = body.instructions.iter().position(|instruction| instruction.ip() == start.0) else {
        return (start, false);
    };
    for (index, instruction) in body.instructions.iter().enumerate().skip(first).take(most) {
        // A jump to this instruction bypasses the start of the function.
        if index > first && body.is_jump_target(index) {
            break;
        }
        if is_emulated(instruction) {
            return (Svma(instruction.ip()), true);
        }
        let written = written_registers(&mut factory, instruction);
        let changes = !is_extension(instruction) && kept.iter().any(|kept| written.contains(kept));
        if instruction.flow_control() != FlowControl::Next || changes {
            break;
        }
    }
    (start, false)
}

/// Whether an instruction extends a 32-bit number to 64 bits in place.
fn is_extension(instruction: &Instruction) -> bool {
    instruction.code() == Opcode::Movsxd_r64_rm32
        && instruction.op1_kind() == OpKind::Register
        && instruction.op0_register() == instruction.op1_register().full_register()
}

/// Jumps after system calls that test for errors: `syscall; cmp rax, -4096; ja`. The kernel preserves the argument registers.
pub(super) fn behind_system_calls(instructions: &[Instruction]) -> Vec<Svma> {
    let is_test = |instruction: &Instruction| {
        instruction.mnemonic() == Mnemonic::Cmp
            && instruction.op0_kind() == OpKind::Register
            && instruction.op0_register() == Register::RAX
    };
    let found = instructions.windows(3).filter(|code| {
        code[0].code() == Opcode::Syscall
            && is_test(&code[1])
            && code[2].is_jcc_short_or_near()
            && is_emulated(&code[2])
    });
    found.map(|code| Svma(code[2].ip())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Svma = Svma(0x1000);

    fn decode(bytes: &[u8]) -> Vec<Instruction> {
        Decoder::with_ip(64, bytes, START.0, DecoderOptions::NONE).into_iter().collect()
    }

    #[test]
    fn what_the_kernel_emulates() {
        let emulated: [&[u8]; 9] = [
            &[0x90],
            &[0x55],
            &[0x41, 0x57],
            &[0x75, 0x10],
            &[0x0f, 0x84, 0, 1, 0, 0],
            &[0xeb, 0x10],
            &[0xe9, 0, 1, 0, 0],
            &[0xe8, 0, 1, 0, 0],
            &[0x54],
        ];
        // endbr64, pause, xchg r8, rax, nop of two and of four bytes, push with a redundant prefix, push of a constant,
        // sub rsp, mov, loop, jrcxz, call [rip], ret.
        let stepped: [&[u8]; 13] = [
            &[0xf3, 0x0f, 0x1e, 0xfa],
            &[0xf3, 0x90],
            &[0x49, 0x90],
            &[0x66, 0x90],
            &[0x0f, 0x1f, 0x40, 0],
            &[0x40, 0x55],
            &[0x6a, 1],
            &[0x48, 0x83, 0xec, 8],
            &[0x89, 0xf2],
            &[0xe2, 0x10],
            &[0xe3, 0x10],
            &[0xff, 0x15, 0, 1, 0, 0],
            &[0xc3],
        ];
        for (list, expected) in [(&emulated[..], true), (&stepped[..], false)] {
            for bytes in list {
                assert_eq!(is_emulated(&decode(bytes)[0]), expected, "{bytes:x?}");
            }
        }
    }

    #[test]
    fn beginnings_of_functions() {
        let entry_of = |bytes: &[u8]| {
            let (address, emulated) = entry(&Body::new([decode(bytes)]), START);
            (address.0 - START.0, emulated)
        };
        // push; endbr64, mov eax, [rdi], push.
        assert_eq!(entry_of(&[0x55, 0xc3]), (0, true));
        assert_eq!(entry_of(&[0xf3, 0x0f, 0x1e, 0xfa, 0x8b, 0x07, 0x41, 0x57, 0xc3]), (6, true));
        // The stack, or an argument, changes first: sub rsp, 8; mov edi, esi; ret.
        assert_eq!(entry_of(&[0x48, 0x83, 0xec, 8, 0x55, 0xc3]), (0, false));
        assert_eq!(entry_of(&[0xf3, 0x0f, 0x1e, 0xfa, 0x89, 0xf7, 0x55, 0xc3]), (0, false));
        assert_eq!(entry_of(&[0xf3, 0x0f, 0x1e, 0xfa, 0xc3, 0x55]), (0, false));
        // jmp -4 back to the push, after endbr64.
        assert_eq!(entry_of(&[0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x89, 0xc0, 0xeb, 0xfb]), (0, false));
        // write of glibc 2.41: sub rsp, 16; movsxd rdi, edi; push 1; xor ecx, ecx; call.
        let write = [0x48, 0x83, 0xec, 0x10, 0x48, 0x63, 0xff, 0x6a, 1, 0x31, 0xc9, 0xe8, 0, 0, 0, 0, 0xc3];
        let with = |arguments: &[Register]| {
            let (address, emulated) = entry_with_arguments(&Body::new([decode(&write)]), START, arguments);
            (address.0 - START.0, emulated)
        };
        assert_eq!(with(&[Register::RDI, Register::RSI, Register::RDX]), (11, true));
        assert_eq!(with(&[Register::RDI, Register::RCX]), (0, false));
        assert_eq!(entry_of(&write), (0, false));
        // None within the limit.
        assert_eq!(entry_of(&[[0x89, 0xc0].repeat(9), vec![0x55]].concat()), (0, false));
    }

    /// Only a jump that directly tests the kernel's return value counts.
    #[test]
    fn system_calls() {
        let jumps = |bytes: &[u8]| {
            let code: Vec<Instruction> =
                Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).into_iter().collect();
            behind_system_calls(&code)
        };
        // syscall; cmp rax, -4096; ja.
        let code = [0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x10];
        assert_eq!(jumps(&code), [Svma(0x1008)]);
        // cmp rbx; mov edi, r8d between; no jump.
        for code in [
            &[0x0f, 0x05, 0x48, 0x81, 0xfb, 0, 0xf0, 0xff, 0xff, 0x77, 0x10][..],
            &[0x0f, 0x05, 0x44, 0x89, 0xc7, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x10],
            &[0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0xc3],
        ] {
            assert!(jumps(code).is_empty(), "{code:x?}");
        }
    }
}
