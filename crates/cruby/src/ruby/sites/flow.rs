//! The contents of registers and stack slots of one function, relative to its arguments and to the results of calls and
//! loads, on every path to an instruction.

use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, Register};

use crate::ruby::code::Body;
use crate::ruby::x86::{first_register, immediate, is_memory, is_register, written_registers};

/// Maximum number of instructions of a function that is followed, and of steps in it: bounds the work on hostile code.
const MAX_INSTRUCTIONS: usize = 20_000;
const MAX_STEPS: usize = 50_000;

/// The origin of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// None: it is a number, or the address of a global.
    Constant,
    /// The stack pointer at the entry.
    Stack,
    /// The contents of the register at the entry.
    Entry(Register),
    /// Whatever the instruction with this index put into the register.
    Result(usize, Register),
}

/// An origin and the offset added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) origin: Origin,
    pub(super) offset: i64,
}

impl Value {
    /// The value plus `offset`.
    pub(super) fn plus(self, offset: i64) -> Self {
        Self { offset: self.offset.wrapping_add(offset), ..self }
    }
}

/// A place whose value is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Storage {
    Register(Register),
    /// Eight bytes of the frame, by offset from the stack pointer at the entry.
    Slot(i64),
}

/// The known values before an instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State(BTreeMap<Storage, Value>);

impl State {
    fn entry() -> Self {
        const REGISTERS: [Register; 15] = [
            Register::RAX,
            Register::RCX,
            Register::RDX,
            Register::RBX,
            Register::RBP,
            Register::RSI,
            Register::RDI,
            Register::R8,
            Register::R9,
            Register::R10,
            Register::R11,
            Register::R12,
            Register::R13,
            Register::R14,
            Register::R15,
        ];
        let value = |register| Value { origin: Origin::Entry(register), offset: 0 };
        let mut state: BTreeMap<_, _> =
            REGISTERS.into_iter().map(|register| (Storage::Register(register), value(register))).collect();
        state.insert(Storage::Register(Register::RSP), Value { origin: Origin::Stack, offset: 0 });
        Self(state)
    }

    /// The value of a 64-bit register.
    pub(super) fn register(&self, register: Register) -> Option<Value> {
        self.0.get(&Storage::Register(register)).copied()
    }

    /// The address of the instruction's memory operand.
    pub(super) fn address(&self, instruction: &Instruction) -> Option<Value> {
        let constant = |at: u64| Some(Value { origin: Origin::Constant, offset: at as i64 });
        if instruction.is_ip_rel_memory_operand() {
            return constant(instruction.ip_rel_memory_address());
        }
        if instruction.memory_index() != Register::None || instruction.segment_prefix() != Register::None {
            return None;
        }
        let displacement = instruction.memory_displacement64();
        match instruction.memory_base() {
            Register::None => constant(displacement),
            base => Some(self.register(base)?.plus(displacement as i64)),
        }
    }

    /// The value of the register or constant in an operand.
    pub(super) fn operand(&self, instruction: &Instruction, operand: u32) -> Option<Value> {
        if let Some(value) = immediate(instruction, operand) {
            return Some(Value { origin: Origin::Constant, offset: value as i64 });
        }
        if !is_register(instruction, operand) {
            return None;
        }
        let register = instruction.op_register(operand);
        let value = self.register(register.full_register())?;
        (register.is_gpr64() || value.origin == Origin::Constant).then_some(value)
    }

    fn set(&mut self, place: Storage, value: Option<Value>) {
        match value {
            Some(value) => self.0.insert(place, value),
            None => self.0.remove(&place),
        };
    }

    fn forget_slots(&mut self, offset: i64, size: i64) {
        let near = offset.saturating_sub(7)..offset.saturating_add(size);
        self.0.retain(|place, _| !matches!(place, Storage::Slot(at) if near.contains(at)));
    }

    /// Keeps only what both states agree on; returns whether anything was lost.
    fn join(&mut self, other: &Self) -> bool {
        let before = self.0.len();
        self.0.retain(|place, value| other.0.get(place) == Some(value));
        self.0.len() != before
    }
}

/// Follows the values through a function and calls `see` for every instruction that can run, with the state before it: at
/// least once, and the last time with what holds on all paths. Stops early in very large functions and then returns `false`.
pub(super) fn follow(body: &Body, entry: usize, mut see: impl FnMut(usize, &State)) -> bool {
    if body.instructions.len() > MAX_INSTRUCTIONS {
        return false;
    }
    let mut factory = InstructionInfoFactory::new();
    let mut known: BTreeMap<usize, State> = BTreeMap::from([(entry, State::entry())]);
    let mut pending = BTreeSet::from([entry]);
    let mut steps = 0;
    while let Some(block) = pending.pop_first() {
        let Some(mut state) = known.get(&block).cloned() else { continue };
        let mut index = block;
        loop {
            steps += 1;
            if steps > MAX_STEPS {
                return false;
            }
            see(index, &state);
            run(&mut factory, &mut state, index, &body.instructions[index]);
            let next: Vec<usize> = body.successors(index).collect();
            // Inside a block the state need not be kept.
            if let [only] = next[..]
                && only == index + 1
                && !body.is_jump_target(only)
                && !known.contains_key(&only)
            {
                index = only;
                continue;
            }
            for successor in next {
                let changed = match known.get_mut(&successor) {
                    Some(kept) => kept.join(&state),
                    None => known.insert(successor, state.clone()).is_none(),
                };
                if changed {
                    pending.insert(successor);
                }
            }
            break;
        }
    }
    true
}

/// Registers that a call may change (System V ABI).
const CHANGED: [Register; 9] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
];

fn run(factory: &mut InstructionInfoFactory, state: &mut State, index: usize, instruction: &Instruction) {
    let result = |register| Value { origin: Origin::Result(index, register), offset: 0 };
    if matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
        for register in CHANGED {
            state.set(Storage::Register(register), Some(result(register)));
        }
        return;
    }
    let written = written_registers(factory, instruction);
    let computed = computed(state, instruction);
    match instruction.mnemonic() {
        Mnemonic::Push => {
            let stack = state.register(Register::RSP).map(|value| value.plus(-8));
            state.set(Storage::Register(Register::RSP), stack);
            let value = state.operand(instruction, 0);
            store(state, stack, 8, value);
        }
        Mnemonic::Pop => {
            let stack = state.register(Register::RSP);
            state.set(Storage::Register(Register::RSP), stack.map(|value| value.plus(8)));
            let value = stack.and_then(|stack| slot(state, stack));
            if let Some(register) = first_register(instruction) {
                state.set(Storage::Register(register), value.or(Some(result(register))));
            }
        }
        _ => {
            let only_reads = matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Bt);
            if is_memory(instruction, 0) && !only_reads {
                let stored = (instruction.mnemonic() == Mnemonic::Mov)
                    .then(|| state.operand(instruction, 1))
                    .flatten();
                let size = instruction.memory_size().size();
                let address = state.address(instruction);
                store(state, address, size, stored);
            }
            for register in written {
                let known = computed.filter(|_| first_register(instruction) == Some(register));
                state.set(Storage::Register(register), known.or(Some(result(register))));
            }
        }
    }
}

/// The value that the instruction puts into its first operand, a register.
fn computed(state: &State, instruction: &Instruction) -> Option<Value> {
    let wide = instruction.op_count() >= 1
        && is_register(instruction, 0)
        && (instruction.op0_register().is_gpr64() || instruction.op0_register().is_gpr32());
    if !wide {
        return None;
    }
    let full = instruction.op0_register().is_gpr64();
    let target = first_register(instruction)?;
    match instruction.mnemonic() {
        Mnemonic::Mov if is_memory(instruction, 1) => {
            let loads = full && instruction.memory_size().size() == 8;
            slot(state, state.address(instruction).filter(|_| loads)?)
        }
        Mnemonic::Mov => {
            let value = state.operand(instruction, 1)?;
            (full || value.origin == Origin::Constant).then_some(value)
        }
        Mnemonic::Lea if full => state.address(instruction),
        Mnemonic::Xor | Mnemonic::Sub
            if is_register(instruction, 1) && instruction.op1_register().full_register() == target =>
        {
            Some(Value { origin: Origin::Constant, offset: 0 })
        }
        Mnemonic::Add if full => Some(state.register(target)?.plus(immediate(instruction, 1)? as i64)),
        Mnemonic::Sub if full => {
            Some(state.register(target)?.plus((immediate(instruction, 1)? as i64).wrapping_neg()))
        }
        _ => None,
    }
}

fn slot(state: &State, address: Value) -> Option<Value> {
    (address.origin == Origin::Stack).then(|| state.0.get(&Storage::Slot(address.offset)).copied()).flatten()
}

fn store(state: &mut State, address: Option<Value>, size: usize, value: Option<Value>) {
    let Some(address) = address.filter(|address| address.origin == Origin::Stack) else { return };
    state.forget_slots(address.offset, size as i64);
    if size == 8 {
        state.set(Storage::Slot(address.offset), value);
    }
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;

    /// The value of a register before the last instruction.
    fn last(code: &[u8], register: Register) -> Option<Value> {
        let instructions: Vec<Instruction> =
            Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE).into_iter().collect();
        let end = instructions.len() - 1;
        let mut found = None;
        let body = Body::new([instructions]);
        let complete = follow(&body, 0, |index, state| {
            if index == end {
                found = state.register(register);
            }
        });
        found.filter(|_| complete)
    }

    fn argument(offset: i64) -> Value {
        Value { origin: Origin::Entry(Register::RDI), offset }
    }

    /// A pointer is followed through copies, sums, the frame and calls.
    #[test]
    fn ways_of_a_pointer() {
        // sub rsp, 24; lea rbx, [rdi+8]; mov [rsp+8], rbx; call; mov rsi, [rsp+8]; add rsi, 4; ret
        let spilled = [
            &[0x48, 0x83, 0xec, 24, 0x48, 0x8d, 0x5f, 8, 0x48, 0x89, 0x5c, 0x24, 8][..],
            &[0xe8, 0, 1, 0, 0],
            &[0x48, 0x8b, 0x74, 0x24, 8, 0x48, 0x83, 0xc6, 4, 0xc3],
        ]
        .concat();
        assert_eq!(last(&spilled, Register::RSI), Some(argument(12)));
        assert_eq!(last(&spilled, Register::RBX), Some(argument(8)));
        // The previous value of rdi is lost.
        assert_ne!(last(&spilled, Register::RDI), Some(argument(0)));
        // The same with four bytes of the slot overwritten: mov dword [rsp+12], 0 instead of the call
        let damaged = [&spilled[..13], &[0xc7, 0x44, 0x24, 12, 0, 0, 0, 0], &spilled[18..]].concat();
        assert_ne!(last(&damaged, Register::RSI), Some(argument(12)));
    }

    /// Where two paths meet, only what both agree on is known.
    #[test]
    fn ways_that_meet() {
        // mov rbx, rdi; test esi, esi; je +3; mov rbx, rdx; ret
        let differing = [0x48, 0x89, 0xfb, 0x85, 0xf6, 0x74, 3, 0x48, 0x89, 0xd3, 0xc3];
        assert_eq!(last(&differing, Register::RBX), None);
        // mov rbx, rdi in both
        let agreeing = [0x48, 0x89, 0xfb, 0x85, 0xf6, 0x74, 3, 0x48, 0x89, 0xfb, 0xc3];
        assert_eq!(last(&agreeing, Register::RBX), Some(argument(0)));
    }
}
