//! The machine that runs code on symbolic values: functions, calls and jumps.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use iced_x86::{ConditionCode, FlowControl, Instruction};

use super::condition::{Assumptions, Flags};
use super::memory::{Memory, Store};
use super::{Operator, Value};
use crate::address::Svma;
use crate::elf::{self, ElfImage};
use crate::ruby::aarch64;
use crate::ruby::code::{Callee, Code};

/// The calling convention for general registers, by number.
#[derive(Debug)]
pub(super) struct Convention {
    /// Registers that a call preserves.
    preserved: &'static [usize],
    /// Registers of integer arguments.
    arguments: &'static [usize],
    /// The stack pointer.
    stack: usize,
    /// Whether a call pushes the return address.
    pushes: bool,
}

/// System V for x86-64. Preserved: rbx, rsp, rbp, r12–r15. Arguments: rdi, rsi, rdx, rcx, r8, r9.
const X86_64: Convention = Convention {
    preserved: &[3, 4, 5, 12, 13, 14, 15],
    arguments: &[7, 6, 2, 1, 8, 9],
    stack: RSP,
    pushes: true,
};
/// AAPCS64. The first six arguments suffice.
const AARCH64: Convention = Convention {
    preserved: &aarch64::PRESERVED,
    arguments: &[0, 1, 2, 3, 4, 5],
    stack: aarch64::SP as usize,
    pushes: false,
};
/// Number of general registers of the processor that has the most.
const REGISTERS: usize = 32;
/// The register of the return value: rax and x0 have the same number.
pub(super) const RAX: usize = 0;
pub(super) const RSP: usize = 4;
pub(super) const RBP: usize = 5;

/// Maximum number of unknown conditions in a run with assumptions: such a run may loop.
const MAX_UNKNOWN: u32 = 64;

/// How far a run may go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of instructions, over all functions it enters.
    pub(crate) steps: u32,
    /// Maximum depth of nested calls that are followed.
    pub(crate) depth: u32,
    /// Bytes of the largest function that is run.
    pub(crate) function: u64,
    /// Bytes of the largest function into which a call is followed.
    pub(crate) callee: u64,
    /// Whether a call is followed into the exported function with this name.
    pub(crate) exported: fn(&str) -> bool,
}

impl Limits {
    /// For functions that return one field.
    pub(crate) const ACCESSOR: Self =
        Self { steps: 600, depth: 5, function: 0x8000, callee: 0x400, exported: |_| true };
}

/// A decoded function.
#[derive(Clone)]
enum Decoded {
    X86(Rc<[Instruction]>),
    Aarch64(Rc<[aarch64::Instruction]>),
}

/// The code of an image with the functions decoded so far, shared by the machines that run it.
pub(crate) struct Program<'a> {
    pub(super) code: &'a Code<'a>,
    decoded: RefCell<HashMap<usize, Decoded>>,
    steps_left: Cell<u32>,
    pub(super) tls_module: Cell<Option<Svma>>,
}

impl<'a> Program<'a> {
    /// A program whose runs may take this many steps in total.
    pub(crate) fn new(code: &'a Code<'a>, steps: u32) -> Self {
        Self {
            code,
            decoded: RefCell::new(HashMap::new()),
            steps_left: Cell::new(steps),
            tls_module: Cell::default(),
        }
    }

    /// The image it belongs to.
    pub(crate) fn image(&self) -> &'a ElfImage {
        self.code.image
    }

    /// Number of steps that its runs may still take.
    pub(crate) fn steps_left(&self) -> u32 {
        self.steps_left.get()
    }

    /// The slot with the image's TLS module id, if the code has used it.
    pub(crate) fn tls_module(&self) -> Option<Svma> {
        self.tls_module.get()
    }

    fn decode(&self, function: usize) -> Decoded {
        let mut decoded = self.decoded.borrow_mut();
        let decode = || match self.image().machine() {
            elf::Machine::X86_64 => Decoded::X86(self.code.decode(function).into()),
            elf::Machine::Aarch64 => Decoded::Aarch64(aarch64::decode(self.image(), function).into()),
        };
        decoded.entry(function).or_insert_with(decode).clone()
    }

    fn convention(&self) -> &'static Convention {
        match self.image().machine() {
            elf::Machine::X86_64 => &X86_64,
            elf::Machine::Aarch64 => &AARCH64,
        }
    }
}

/// How to decide conditional jumps that the code leaves open.
#[derive(Clone, Debug)]
enum Branching {
    /// Bit n says whether the n-th jump is taken.
    Choices(u32),
    /// By these numbers, except for the condition that is tried the other way.
    Assumed(Rc<Assumptions>, Option<Guard>),
}

/// A condition that a run reached and could not decide from the code alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    /// The state of the flags.
    pub(crate) flags: Flags,
    /// The condition that was tested: one of b, e, be, s, l, le.
    pub(crate) code: ConditionCode,
    /// The outcome with which the run continued.
    pub(crate) outcome: bool,
    /// Address of the test, if the flags are not known well enough to be recognised.
    address: Option<u64>,
}

impl Guard {
    fn is_same_condition(&self, other: &Self) -> bool {
        self.flags == other.flags && self.code == other.code && self.address == other.address
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The function returned this value.
    Returned(Value),
    /// It called something that raises, aborts or makes a Bignum.
    Left,
    /// The code could not be followed, at least not within the limits.
    Lost,
}

/// A processor with symbolic registers.
pub(crate) struct Machine<'a> {
    pub(super) program: Rc<Program<'a>>,
    convention: &'static Convention,
    pub(super) registers: [Value; REGISTERS],
    /// Low and high 64 bits of xmm0–xmm15.
    pub(super) vectors: [[Value; 2]; 16],
    pub(super) flags: Flags,
    pub(super) memory: Memory,
    pub(super) stores: Vec<Store>,
    branching: Branching,
    guards: Vec<Guard>,
    limits: Limits,
    steps: u32,
    /// Number of conditions reached about which nothing was known.
    unknown_conditions: u32,
    /// Functions that have been entered and not left; a call to one of them is not followed.
    active: Vec<usize>,
}

/// Where a step leads.
pub(super) enum Next {
    Following,
    Address(Svma),
    Return,
    Leave,
    Stop,
}

impl<'a> Machine<'a> {
    /// A machine at the entry of an accessor. `choices`: bit n says whether the n-th conditional jump that the code leaves
    /// open is taken.
    pub(crate) fn new(code: &'a Code<'a>, choices: u32) -> Self {
        let program = Program::new(code, Limits::ACCESSOR.steps);
        Self::with(Rc::new(program), Branching::Choices(choices), Limits::ACCESSOR)
    }

    /// The slot with the image's TLS module id, if its code has used it.
    pub(crate) fn tls_module(&self) -> Option<Svma> {
        self.program.tls_module()
    }

    /// A machine that decides open conditions by `assumptions`, except `other_way`, which goes the other way.
    pub(crate) fn assuming(
        program: &Rc<Program<'a>>,
        assumptions: &Rc<Assumptions>,
        other_way: Option<Guard>,
        limits: Limits,
    ) -> Self {
        Self::with(program.clone(), Branching::Assumed(assumptions.clone(), other_way), limits)
    }

    fn with(program: Rc<Program<'a>>, branching: Branching, limits: Limits) -> Self {
        let convention = program.convention();
        let mut registers = [const { Value::Unknown }; REGISTERS];
        registers[convention.stack] = Value::Stack(0);
        for (index, &register) in convention.arguments.iter().enumerate() {
            registers[register] = Value::Argument(index as u8);
        }
        Self {
            program,
            convention,
            registers,
            vectors: [const { [Value::Unknown, Value::Unknown] }; 16],
            flags: Flags::Unknown,
            memory: Memory::default(),
            stores: Vec::new(),
            branching,
            guards: Vec::new(),
            limits,
            steps: 0,
            unknown_conditions: 0,
            active: Vec::new(),
        }
    }

    /// Gives the function's n-th argument a value.
    pub(crate) fn set_argument(&mut self, index: usize, value: Value) {
        if let Some(&register) = self.convention.arguments.get(index) {
            self.registers[register] = value;
        }
    }

    /// The n-th argument of a call.
    pub(super) fn argument(&self, index: usize) -> &Value {
        &self.registers[self.convention.arguments[index]]
    }

    /// Sets the value of a 64-bit global variable.
    pub(crate) fn set_global(&mut self, address: Svma, value: Value) {
        self.memory.write(Value::Image(0), address.0.cast_signed(), 8, value);
    }

    /// The 64-bit global variables that the run has set, in order of address.
    pub(crate) fn globals(&self) -> impl Iterator<Item = (Svma, &Value)> {
        let globals = self.memory.words(&Value::Image(0)).filter(|(_, (size, _))| *size == 8);
        globals.map(|(offset, (_, value))| (Svma(offset.cast_unsigned()), value))
    }

    /// Runs the function at `address` until it returns, and gives its return value.
    pub(crate) fn run(&mut self, address: Svma) -> Value {
        match self.run_to_end(address) {
            Ending::Returned(value) => value,
            Ending::Left | Ending::Lost => Value::Unknown,
        }
    }

    /// Runs the function at `address` and reports how the run ended.
    pub(crate) fn run_to_end(&mut self, address: Svma) -> Ending {
        self.run_function(address, self.limits.depth)
    }

    /// The stores outside the stack so far, in order.
    pub(crate) fn stores(&self) -> &[Store] {
        &self.stores
    }

    /// The open conditions reached so far, in order, each once.
    pub(crate) fn guards(&self) -> &[Guard] {
        &self.guards
    }

    fn run_function(&mut self, mut address: Svma, depth: u32) -> Ending {
        // Each iteration is one part of a function: jumps to its cold part and tail calls continue in the next iteration.
        loop {
            let image = self.program.code.image;
            let Some(function) = image.function_index(address) else { return Ending::Lost };
            if image.functions()[function].size() > self.limits.function {
                return Ending::Lost;
            }
            let next = match self.program.decode(function) {
                Decoded::X86(instructions) => {
                    self.run_instructions(&instructions, address, Instruction::ip, |machine, instruction| {
                        machine.step(instruction, depth)
                    })
                }
                Decoded::Aarch64(instructions) => self.run_instructions(
                    &instructions,
                    address,
                    |instruction| instruction.address.0,
                    |machine, instruction| machine.step_aarch64(instruction, depth),
                ),
            };
            match next {
                Next::Return => return Ending::Returned(self.registers[RAX].clone()),
                Next::Address(elsewhere) => address = elsewhere,
                Next::Leave => return Ending::Left,
                Next::Following | Next::Stop => return Ending::Lost,
            }
        }
    }

    /// Runs inside one function; `Next::Address` is a jump out of it.
    fn run_instructions<I>(
        &mut self,
        instructions: &[I],
        start: Svma,
        address: impl Fn(&I) -> u64,
        step: impl Fn(&mut Self, &I) -> Next,
    ) -> Next {
        let index_of = |at: Svma| instructions.binary_search_by_key(&at.0, &address).ok();
        let Some(mut index) = index_of(start) else { return Next::Stop };
        while let Some(instruction) = instructions.get(index) {
            let left = self.program.steps_left.get();
            if self.steps >= self.limits.steps
                || self.unknown_conditions > MAX_UNKNOWN
                || left == 0
                || self.memory.is_full()
            {
                return Next::Stop;
            }
            self.steps += 1;
            self.program.steps_left.set(left - 1);
            match step(self, instruction) {
                Next::Following => index += 1,
                Next::Address(target) => match index_of(target) {
                    Some(inside) => index = inside,
                    None => return Next::Address(target),
                },
                end => return end,
            }
        }
        Next::Stop
    }

    fn step(&mut self, instruction: &Instruction, depth: u32) -> Next {
        match instruction.flow_control() {
            FlowControl::Return => return Next::Return,
            FlowControl::ConditionalBranch => {
                let taken = match instruction.condition_code() {
                    // jrcxz, loop
                    ConditionCode::None => return Next::Stop,
                    code => self.branch(code, instruction.ip()),
                };
                let target = Svma(instruction.near_branch_target());
                return if taken { Next::Address(target) } else { Next::Following };
            }
            FlowControl::UnconditionalBranch | FlowControl::IndirectBranch => {
                return self.jump_to(self.target(instruction));
            }
            FlowControl::Call | FlowControl::IndirectCall => return self.call(instruction, depth),
            FlowControl::Next => {}
            _ => return Next::Stop,
        }
        self.compute(instruction);
        Next::Following
    }

    /// Whether a conditional jump is taken.
    pub(super) fn branch(&mut self, code: ConditionCode, address: u64) -> bool {
        if let Some(outcome) = self.decide(code, address) {
            return outcome;
        }
        match &mut self.branching {
            Branching::Choices(choices) => {
                let taken = *choices & 1 == 1;
                *choices >>= 1;
                taken
            }
            Branching::Assumed(..) => false,
        }
    }

    /// Whether a condition on the flags holds; `None` if only a choice can decide.
    pub(super) fn decide(&mut self, code: ConditionCode, address: u64) -> Option<bool> {
        let (code, negated) = canonical(code)?;
        if !self.flags.is_open() {
            return Some(self.flags.holds(code, number_of_address)? != negated);
        }
        let Branching::Assumed(assumptions, other_way) = &self.branching else { return None };
        let assumed = self.flags.holds(code, |value| assumptions.number(value));
        self.unknown_conditions += u32::from(assumed.is_none());
        let guard = Guard {
            flags: self.flags.clone(),
            code,
            outcome: assumed.unwrap_or(false),
            address: assumed.is_none().then_some(address),
        };
        if let Some(met) = self.guards.iter().find(|met| met.is_same_condition(&guard)) {
            return Some(met.outcome != negated);
        }
        let other = other_way.as_ref().is_some_and(|other| other.is_same_condition(&guard));
        let outcome = guard.outcome != other;
        self.guards.push(Guard { outcome, ..guard });
        Some(outcome != negated)
    }

    /// The target of a call or jump, including one in a register or slot that the code has computed.
    fn target(&self, instruction: &Instruction) -> Callee<'a> {
        let callee = self.program.code.callee(instruction);
        if callee.address.is_some() || callee.name.is_some() || instruction.op_count() == 0 {
            return callee;
        }
        match self.operand(instruction, 0) {
            Value::Image(address) => Callee { address: Some(Svma(address)), name: None },
            _ => callee,
        }
    }

    fn call(&mut self, instruction: &Instruction, depth: u32) -> Next {
        if let Some(distance) = self.tls_descriptor(instruction) {
            self.registers[RAX] = distance;
            return Next::Following;
        }
        self.call_to(self.target(instruction), depth)
    }

    /// A jump, possibly out of the function (a tail call).
    pub(super) fn jump_to(&mut self, target: Callee<'_>) -> Next {
        match self.known_function(target) {
            Some(Ending::Returned(value)) => {
                self.registers[RAX] = value;
                Next::Return
            }
            Some(_) => Next::Leave,
            None => target.address.map_or(Next::Stop, Next::Address),
        }
    }

    pub(super) fn call_to(&mut self, callee: Callee<'_>, depth: u32) -> Next {
        let known = self.copied(callee).or_else(|| self.known_function(callee));
        let result = match known {
            Some(Ending::Returned(value)) => value,
            Some(_) => return Next::Leave,
            None => match callee.address.map(|address| self.follow_call(callee, address, depth)) {
                // Compilers know which registers a local function does not change, and so does this machine.
                Some(Ending::Returned(_)) => return Next::Following,
                Some(Ending::Left) => return Next::Leave,
                Some(Ending::Lost) | None => {
                    self.forget_memory();
                    Value::Unknown
                }
            },
        };
        for number in (0..REGISTERS).filter(|number| !self.convention.preserved.contains(number)) {
            self.registers[number] = Value::Unknown;
        }
        self.vectors = [const { [Value::Unknown, Value::Unknown] }; 16];
        self.registers[RAX] = result;
        self.flags = Flags::Unknown;
        Next::Following
    }

    /// `memcpy` of a known number of bytes.
    fn copied(&mut self, callee: Callee<'_>) -> Option<Ending> {
        let Value::Constant(bytes @ 0..) = *self.argument(2) else { return None };
        if !matches!(callee.name, Some("memcpy" | "__memcpy_chk")) {
            return None;
        }
        let target = self.argument(0).clone();
        let source = self.argument(1).clone();
        self.copy(&target, &source, Some(bytes));
        Some(Ending::Returned(target))
    }

    fn follow_call(&mut self, callee: Callee<'_>, address: Svma, depth: u32) -> Ending {
        let image = self.program.code.image;
        let Some(function) = image.function_index(address) else { return Ending::Lost };
        let followed = callee.name.is_none_or(self.limits.exported);
        let small = image.functions()[function].size() <= self.limits.callee;
        if depth == 0 || !followed || !small || self.active.contains(&function) {
            return Ending::Lost;
        }
        self.active.push(function);
        let numbers = self.convention.preserved;
        let preserved: Vec<Value> = numbers.iter().map(|&number| self.registers[number].clone()).collect();
        if self.convention.pushes {
            self.push(Value::Unknown);
        }
        let ending = self.run_function(address, depth - 1);
        self.active.pop();
        for (&number, value) in numbers.iter().zip(preserved) {
            self.registers[number] = value;
        }
        ending
    }

    /// A function that was not followed may have changed everything except global variables that are set once, and locals
    /// whose address it did not receive.
    fn forget_memory(&mut self) {
        let escaped =
            self.convention.arguments.iter().filter_map(|&register| match self.registers[register] {
                Value::Stack(offset) => Some(offset),
                _ => None,
            });
        let escaped = escaped.min().unwrap_or(i64::MAX);
        self.memory.retain(|place, offset| match place {
            Value::Image(_) => true,
            Value::Stack(_) => offset < escaped,
            _ => false,
        });
    }

    pub(super) fn push(&mut self, value: Value) {
        let top = Value::binary(Operator::Subtract, self.registers[RSP].clone(), Value::Constant(8));
        self.registers[RSP] = top.clone();
        self.store_at(top, 8, value);
    }

    pub(super) fn pop(&mut self) -> Value {
        let top = self.registers[RSP].clone();
        let value = self.load_at(top.clone(), 8);
        self.registers[RSP] = Value::binary(Operator::Add, top, Value::Constant(8));
        value
    }
}

/// A condition as one of b, e, be, s, l, le, and whether it is the negation of that.
fn canonical(code: ConditionCode) -> Option<(ConditionCode, bool)> {
    use ConditionCode::{a, ae, b, be, e, g, ge, l, le, ne, ns, s};
    Some(match code {
        b | e | be | s | l | le => (code, false),
        ae => (b, true),
        ne => (e, true),
        a => (be, true),
        ns => (s, true),
        ge => (l, true),
        g => (le, true),
        _ => return None,
    })
}

/// The number of a value that does not depend on memory.
fn number_of_address(value: &Value) -> Option<u64> {
    let nothing = Assumptions {
        object: Value::Unknown,
        words: std::collections::BTreeMap::new(),
        field: 0,
        global: 0,
        other: 0,
        narrow: 0,
    };
    nothing.number(value)
}
