//! Finds emulated instructions that can be probed in place of one that the kernel does not emulate: each time that one runs,
//! exactly one of them has run just before, with the same pointer in the same register.
//!
//! CRuby takes a heap page only if it has one: `while ((page = heap->free_pages) == NULL) heap_prepare(…)` becomes `test
//! page, page` and a conditional jump before each of the paths to the code that uses the page. A hit whose register is zero
//! took the other path.

use std::collections::BTreeSet;

use iced_x86::{FlowControl, InstructionInfoFactory, Mnemonic, OpKind, Register};

use crate::address::Svma;
use crate::ruby::code::Body;
use crate::ruby::emulation::is_emulated;
use crate::ruby::x86::{is_memory, is_register, written_registers};

/// Maximum number of instructions examined on all paths backwards: bounds the work on hostile code. Builds have up to 40.
const MAX_BACK: usize = 128;
/// Maximum number of instructions between a test and the jump that depends on it.
const MAX_TEST: usize = 4;

/// The emulated instructions on the paths to the store at `store`, at which its base register already has the value that it
/// has there and the memory that it writes is still unchanged. `None` unless every path has one.
pub(super) fn before(body: &Body, store: usize) -> Option<Vec<Svma>> {
    let instructions = &body.instructions;
    // The targets of a jump through a table are not known here.
    if instructions.iter().any(|one| one.flow_control() == FlowControl::IndirectBranch) {
        return None;
    }
    let base = instructions[store].memory_base();
    let field = instructions[store].memory_displacement64();
    let mut factory = InstructionInfoFactory::new();
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    let mut pending = vec![store];
    while let Some(at) = pending.pop() {
        if !seen.insert(at) {
            continue;
        }
        if seen.len() > MAX_BACK {
            return None;
        }
        for index in body.predecessors(at)? {
            let instruction = &instructions[index];
            let emulated = is_emulated(instruction);
            match instruction.flow_control() {
                FlowControl::UnconditionalBranch | FlowControl::Next if emulated => {}
                FlowControl::ConditionalBranch if emulated && leads_if_set(body, index, at, base) => {}
                FlowControl::Next => {
                    let writes_field = is_memory(instruction, 0)
                        && !matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test)
                        && instruction.memory_base() == base
                        && instruction.memory_displacement64() == field;
                    if writes_field || written_registers(&mut factory, instruction).contains(&base) {
                        return None;
                    }
                    pending.push(index);
                    continue;
                }
                _ => return None,
            }
            found.insert(instruction.ip());
        }
    }
    (!found.is_empty()).then(|| found.into_iter().map(Svma).collect())
}

/// Whether the conditional jump continues at `to` exactly if the register is non-zero.
fn leads_if_set(body: &Body, jump: usize, to: usize, register: Register) -> bool {
    let instructions = &body.instructions;
    let target = body.index_of(Svma(instructions[jump].near_branch_target()));
    let following = jump + 1;
    if target == Some(following) {
        return false;
    }
    let set = match instructions[jump].mnemonic() {
        Mnemonic::Jne => target,
        Mnemonic::Je => Some(following),
        _ => None,
    };
    set == Some(to) && tests(body, jump, register)
}

/// Whether the flags at the jump are those of `test register, register`.
fn tests(body: &Body, jump: usize, register: Register) -> bool {
    let mut factory = InstructionInfoFactory::new();
    for index in (jump.saturating_sub(MAX_TEST)..jump).rev() {
        // No jump leads in between.
        if body.predecessors(index + 1) != Some(vec![index]) {
            return false;
        }
        let instruction = &body.instructions[index];
        if instruction.mnemonic() == Mnemonic::Test {
            return is_register(instruction, 0)
                && instruction.op1_kind() == OpKind::Register
                && (instruction.op0_register(), instruction.op1_register()) == (register, register);
        }
        let keeps_flags = matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Lea);
        if !keeps_flags || written_registers(&mut factory, instruction).contains(&register) {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;

    fn body(code: &[u8]) -> Body {
        Body::new([Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE).into_iter().collect()])
    }

    /// Addresses of the instructions that represent the store at the offset.
    fn of(code: &[u8], store: u64) -> Option<Vec<u64>> {
        let body = body(code);
        let store = body.index_of(Svma(0x1000 + store)).unwrap();
        before(&body, store).map(|found| found.into_iter().map(|address| address.0 - 0x1000).collect())
    }

    /// `nop; test rax, rax; je end; xor edx, edx; mov [rax + 4], dx; end: ret`: the code of Debian's 3.1.
    const PLAIN: [u8; 15] =
        [0x90, 0x48, 0x85, 0xc0, 0x74, 0x06, 0x31, 0xd2, 0x66, 0x89, 0x50, 0x04, 0xc3, 0x90, 0x90];

    #[test]
    fn tested_pointer() {
        assert_eq!(of(&PLAIN, 8), Some(vec![4]));
        // jne: continues at the store if the register is zero.
        let mut other = PLAIN;
        other[4] = 0x75;
        assert_eq!(of(&other, 8), None);
        // test rcx, rcx
        let mut other = PLAIN;
        other[3] = 0xc9;
        assert_eq!(of(&other, 8), None);
        // xor eax, eax between the jump and the store.
        let mut other = PLAIN;
        other[7] = 0xc0;
        assert_eq!(of(&other, 8), None);
    }

    #[test]
    fn all_ways() {
        // nop; test rax, rax; je 11; xor edx, edx; mov [rax + 4], dx; ret;  11: mov rax, rcx; jmp 6
        let code = [
            0x90, 0x48, 0x85, 0xc0, 0x74, 0x07, 0x31, 0xd2, 0x66, 0x89, 0x50, 0x04, 0xc3, 0x48, 0x89, 0xc8,
            0xeb, 0xf4,
        ];
        assert_eq!(of(&code, 8), Some(vec![4, 16]));
        // A jump between the test and the jump: the register is not tested on that path.
        let mut other = code;
        other[17] = 0xf2;
        assert_eq!(of(&other, 8), None);
        // jmp rcx: its target is unknown.
        let mut other = code;
        other[16..].copy_from_slice(&[0xff, 0xe1]);
        assert_eq!(of(&other, 8), None);
    }

    /// The first instruction of a function can be reached from anywhere.
    #[test]
    fn entry() {
        assert_eq!(of(&[0x31, 0xd2, 0x66, 0x89, 0x50, 0x04, 0xc3], 2), None);
    }
}
