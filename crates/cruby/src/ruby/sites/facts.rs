//! One pass over one function extent that collects the facts the finder needs.

use std::collections::BTreeSet;

use gctrace_common::event::Point;
use iced_x86::{FlowControl, Instruction, Mnemonic, Register};

use super::Field;
use super::guard::{event_test, point_of_constant};
use crate::address::Svma;
use crate::ruby::code::{Code, is_jump};
use crate::ruby::x86::{first_register, has_frame_pointer, immediate};

/// The function that runs the hooks (gc.c from 3.4 on), by the name under which GC libraries import it.
pub(super) const HOOK: &str = "rb_gc_event_hook";
/// Maximum number of instructions before a call in which its constant arguments are set up.
const MAX_SETUP: usize = 14;

/// A call, or tail call, with the constant of an event among its first four arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventCall {
    /// The instruction.
    pub(super) address: Svma,
    /// The function that it calls.
    pub(super) callee: Svma,
    /// The event.
    pub(super) point: Point,
}

/// The facts about one extent.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Extents that its jumps lead into, excluding itself.
    pub(super) jumps_into: BTreeSet<usize>,
    pub(super) event_calls: Vec<EventCall>,
    /// Tests of event bits: the flags word, the event and the address of the testing instruction.
    pub(super) event_tests: Vec<(Field, Point, Svma)>,
}

/// Collects the facts about one extent.
pub(super) fn collect(code: &Code<'_>, function: usize) -> Facts {
    let instructions = code.decode(function);
    let extent = code.image.functions()[function];
    let frame_pointer = has_frame_pointer(&instructions);
    let mut facts = Facts::default();
    for (index, instruction) in instructions.iter().enumerate() {
        let target = Svma(instruction.near_branch_target());
        let leaves = is_jump(instruction) && !extent.contains(target);
        if leaves {
            facts.jumps_into.extend(code.image.function_index(target));
        }
        let tail_call = leaves && instruction.flow_control() == FlowControl::UnconditionalBranch;
        let indirect = instruction.is_jmp_near_indirect() && instruction.is_ip_rel_memory_operand();
        if tail_call
            || indirect
            || matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall)
        {
            facts.event_calls.extend(event_call(code, &instructions, index));
        }
        if let Some(test) = event_test(code.image, &instructions, frame_pointer, index) {
            facts.event_tests.push((test.field, test.point, Svma(instruction.ip())));
        }
    }
    facts
}

fn event_call(code: &Code<'_>, instructions: &[Instruction], index: usize) -> Option<EventCall> {
    let point = constant_argument(instructions, index)?;
    let callee = code.callee(&instructions[index]);
    // A GC library calls the hook of the Ruby that has loaded it.
    let imported = || callee.name.filter(|&name| name == HOOK).and_then(|name| code.import(name));
    let callee = callee.address.or_else(imported)?;
    Some(EventCall { address: Svma(instructions[index].ip()), callee, point })
}

/// The event constant that the code before a call loads into an argument register.
fn constant_argument(instructions: &[Instruction], call: usize) -> Option<Point> {
    const ARGUMENTS: [Register; 4] = [Register::RDI, Register::RSI, Register::RDX, Register::RCX];
    let mut written = Vec::new();
    for instruction in instructions[call.saturating_sub(MAX_SETUP)..call].iter().rev() {
        if !matches!(instruction.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch) {
            return None;
        }
        let Some(register) = first_register(instruction) else { continue };
        if !ARGUMENTS.contains(&register) || written.contains(&register) {
            continue;
        }
        if instruction.mnemonic() == Mnemonic::Mov
            && let Some(point) = immediate(instruction, 1).and_then(point_of_constant)
        {
            return Some(point);
        }
        written.push(register);
    }
    None
}
