//! The machine that runs code on symbolic values.

use std::collections::HashMap;

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register};

use super::{Operator, Value};
use crate::address::Svma;
use crate::elf::Relocation;
use crate::ruby::code::Code;
use crate::ruby::x86::{immediate, is_high_byte, is_memory, register_number, written_registers};

/// Instructions in one run, over all functions it enters.
const MAX_STEPS: u32 = 600;
/// Calls that are followed into each other.
const MAX_DEPTH: u32 = 5;
/// Functions beyond this size are no accessors; calls to them are not followed.
const MAX_CALLEE: u64 = 0x400;

/// Functions beyond this size are not decoded at all.
const MAX_FUNCTION: u64 = 0x8000;

/// Registers that a call preserves under the System V ABI: rbx, rsp, rbp, r12–r15.
const PRESERVED: [usize; 7] = [3, 4, 5, 12, 13, 14, 15];
/// Registers of integer arguments: rdi, rsi, rdx, rcx, r8, r9.
const ARGUMENTS: [usize; 6] = [7, 6, 2, 1, 8, 9];
const RAX: usize = 0;
const RSP: usize = 4;
const RBP: usize = 5;
const RDI: usize = 7;

/// A store to memory outside the stack.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// Address it goes to, less `offset`.
    pub(crate) base: Value,
    /// Added to `base`, bytes.
    pub(crate) offset: i64,
    /// Bytes written.
    pub(crate) size: u8,
    /// What is stored.
    pub(crate) value: Value,
}

/// A processor with symbolic registers.
pub(crate) struct Machine<'a> {
    code: &'a Code<'a>,
    registers: [Value; 16],
    stack: HashMap<i64, Value>,
    memory: Vec<(Value, i64, Value)>,
    /// The bit that the zero or carry flag tells, after a test of one.
    tested_bit: Value,
    stores: Vec<Store>,
    /// Bit n tells whether the n-th conditional jump is taken.
    choices: u32,
    steps: u32,
}

/// Where a step leads.
enum Next {
    Following,
    Address(Svma),
    Return,
    Stop,
}

impl<'a> Machine<'a> {
    /// A machine at the entry of a function. `choices`: bit n tells whether the n-th conditional jump is taken.
    pub(crate) fn new(code: &'a Code<'a>, choices: u32) -> Self {
        let mut registers = [const { Value::Unknown }; 16];
        registers[RSP] = Value::Stack(0);
        for (index, register) in ARGUMENTS.into_iter().enumerate() {
            registers[register] = Value::Argument(index as u8);
        }
        Self {
            code,
            registers,
            stack: HashMap::new(),
            memory: Vec::new(),
            tested_bit: Value::Unknown,
            stores: Vec::new(),
            choices,
            steps: 0,
        }
    }

    /// Runs the function at `address` to its return and gives the value it returns.
    pub(crate) fn run(&mut self, address: Svma) -> Value {
        self.run_function(address, MAX_DEPTH)
    }

    /// The stores outside the stack so far, in order.
    pub(crate) fn stores(&self) -> &[Store] {
        &self.stores
    }

    fn run_function(&mut self, address: Svma, depth: u32) -> Value {
        let mut address = address;
        // Each round is one function: tail calls continue in the next.
        for _ in 0..=MAX_DEPTH {
            let Some(function) = self.code.image.function_index(address) else { return Value::Unknown };
            if self.code.image.functions()[function].size() > MAX_FUNCTION {
                return Value::Unknown;
            }
            let instructions = self.code.decode(function);
            match self.run_instructions(&instructions, address, depth) {
                Next::Return => return self.registers[RAX].clone(),
                Next::Address(tail_call) => address = tail_call,
                Next::Following | Next::Stop => return Value::Unknown,
            }
        }
        Value::Unknown
    }

    /// Runs inside one function; `Next::Address` is a jump out of it.
    fn run_instructions(&mut self, instructions: &[Instruction], start: Svma, depth: u32) -> Next {
        let index_of = |address: Svma| instructions.binary_search_by_key(&address.0, Instruction::ip).ok();
        let Some(mut index) = index_of(start) else { return Next::Stop };
        while let Some(instruction) = instructions.get(index) {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Next::Stop;
            }
            match self.step(instruction, depth) {
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
                let taken = self.choices & 1 == 1;
                self.choices >>= 1;
                return if taken {
                    Next::Address(Svma(instruction.near_branch_target()))
                } else {
                    Next::Following
                };
            }
            FlowControl::UnconditionalBranch | FlowControl::IndirectBranch => {
                return self.code.callee(instruction).address.map_or(Next::Stop, Next::Address);
            }
            FlowControl::Call | FlowControl::IndirectCall => return self.call(instruction, depth),
            FlowControl::Next => {}
            _ => return Next::Stop,
        }
        self.compute(instruction);
        Next::Following
    }

    fn compute(&mut self, instruction: &Instruction) {
        match instruction.mnemonic() {
            Mnemonic::Endbr64 | Mnemonic::Nop | Mnemonic::Pause => {}
            Mnemonic::Mov | Mnemonic::Movzx => {
                let value = self.operand(instruction, 1);
                self.assign(instruction, 0, value);
            }
            Mnemonic::Lea => {
                let (base, offset) = self.address(instruction);
                let value = Value::binary(Operator::Add, base, Value::Constant(offset));
                self.assign(instruction, 0, value);
            }
            Mnemonic::Push => {
                let value = self.operand(instruction, 0);
                self.push(value);
            }
            Mnemonic::Pop => {
                let value = self.pop();
                self.assign(instruction, 0, value);
            }
            Mnemonic::Leave => {
                self.registers[RSP] = self.registers[RBP].clone();
                self.registers[RBP] = self.pop();
            }
            Mnemonic::Inc => self.operate(instruction, Operator::Add, Value::Constant(1)),
            Mnemonic::Dec => self.operate(instruction, Operator::Subtract, Value::Constant(1)),
            Mnemonic::Test | Mnemonic::Bt => self.tested_bit = self.single_bit_tested(instruction),
            Mnemonic::Setne | Mnemonic::Setb => {
                let bit = self.tested_bit.clone();
                self.assign(instruction, 0, bit);
            }
            Mnemonic::Cmp => self.tested_bit = Value::Unknown,
            Mnemonic::Xor if is_same_register(instruction) => self.assign(instruction, 0, Value::Constant(0)),
            mnemonic => match operator(mnemonic) {
                Some(operator) if instruction.op_count() == 2 => {
                    let right = self.operand(instruction, 1);
                    self.operate(instruction, operator, right);
                }
                _ => self.forget_results(instruction),
            },
        }
    }

    fn operate(&mut self, instruction: &Instruction, operator: Operator, right: Value) {
        let left = self.operand(instruction, 0);
        self.tested_bit = Value::Unknown;
        self.assign(instruction, 0, Value::binary(operator, left, right));
    }

    /// For `test x, 1 << n` and `bt x, n`: bit n of x. `setne` and `setb` then mean that bit.
    fn single_bit_tested(&mut self, instruction: &Instruction) -> Value {
        let Some(number) = immediate(instruction, 1) else {
            // `test r, r; setne r` of a bit already isolated, as compilers write it without optimisation.
            let value = self.operand(instruction, 0);
            let isolated = instruction.mnemonic() == Mnemonic::Test && is_same_register(instruction);
            return if isolated && value.as_memory_bit().is_some() { value } else { Value::Unknown };
        };
        let bit = match instruction.mnemonic() {
            Mnemonic::Bt => (number & 63) as u32,
            _ if number.is_power_of_two() => number.trailing_zeros(),
            _ => return Value::Unknown,
        };
        Value::bit(self.operand(instruction, 0), bit)
    }

    /// An instruction that is not modelled: everything it writes becomes unknown.
    fn forget_results(&mut self, instruction: &Instruction) {
        self.tested_bit = Value::Unknown;
        for register in written_registers(&mut InstructionInfoFactory::new(), instruction) {
            if let Some(number) = register_number(register) {
                self.registers[number] = Value::Unknown;
            }
        }
        if is_memory(instruction, 0) {
            self.assign(instruction, 0, Value::Unknown);
        }
    }

    fn call(&mut self, instruction: &Instruction, depth: u32) -> Next {
        let callee = self.code.callee(instruction);
        let result = match callee.name {
            Some("__stack_chk_fail") => return Next::Stop,
            Some("__tls_get_addr") => self.tls_get_addr(),
            _ => callee.address.map_or(Value::Unknown, |address| self.follow_call(address, depth)),
        };
        for number in (0..16).filter(|number| !PRESERVED.contains(number)) {
            self.registers[number] = Value::Unknown;
        }
        self.registers[RAX] = result;
        self.tested_bit = Value::Unknown;
        Next::Following
    }

    fn follow_call(&mut self, address: Svma, depth: u32) -> Value {
        let Some(function) = self.code.image.function_index(address) else { return Value::Unknown };
        if depth == 0 || self.code.image.functions()[function].size() > MAX_CALLEE {
            return Value::Unknown;
        }
        let preserved = PRESERVED.map(|number| self.registers[number].clone());
        self.push(Value::Unknown);
        let result = self.run_function(address, depth - 1);
        for (number, value) in PRESERVED.into_iter().zip(preserved) {
            self.registers[number] = value;
        }
        result
    }

    /// The general dynamic TLS model: rdi points at a pair of slots, module number and offset. The offset has a
    /// relocation where the variable is a dynamic symbol, and stands in the file where it is local.
    fn tls_get_addr(&self) -> Value {
        let Value::Image(slot) = self.registers[RDI] else { return Value::Unknown };
        let image = self.code.image;
        if image.relocation(Svma(slot)) != Some(Relocation::TlsModule) {
            return Value::Unknown;
        }
        let offset_slot = Svma(slot.wrapping_add(8));
        match image.relocation(offset_slot) {
            Some(Relocation::TlsModuleOffset { index, addend }) => {
                Value::TlsAddress(image.tls_offset(index, addend))
            }
            Some(_) => Value::Unknown,
            None => {
                image.read_u64(offset_slot).map_or(Value::Unknown, |offset| Value::TlsAddress(offset as i64))
            }
        }
    }

    fn push(&mut self, value: Value) {
        let Value::Stack(top) = self.registers[RSP] else { return };
        let top = top.wrapping_sub(8);
        self.registers[RSP] = Value::Stack(top);
        self.stack.insert(top, value);
    }

    fn pop(&mut self) -> Value {
        let Value::Stack(top) = self.registers[RSP] else { return Value::Unknown };
        self.registers[RSP] = Value::Stack(top.wrapping_add(8));
        self.stack.get(&top).cloned().unwrap_or(Value::Unknown)
    }

    fn register(&self, register: Register) -> Value {
        let Some(number) = register_number(register) else { return Value::Unknown };
        let value = self.registers[number].clone();
        if is_high_byte(register) {
            return Value::binary(Operator::ShiftRight, value, Value::Constant(8));
        }
        value
    }

    /// The effective address of a memory operand as base and offset.
    fn address(&self, instruction: &Instruction) -> (Value, i64) {
        if instruction.is_ip_rel_memory_operand() {
            return (Value::Image(instruction.ip_rel_memory_address()), 0);
        }
        let offset = instruction.memory_displacement64() as i64;
        let base = match instruction.memory_base() {
            Register::None => Value::Constant(0),
            register => self.register(register),
        };
        if instruction.memory_index() == Register::None {
            return match base {
                Value::Constant(address) if address == 0 && offset > 0 => (Value::Image(offset as u64), 0),
                base => (base, offset),
            };
        }
        let scale = Value::Constant(instruction.memory_index_scale().into());
        let index = Value::binary(Operator::Multiply, self.register(instruction.memory_index()), scale);
        (Value::binary(Operator::Add, base, index), offset)
    }

    fn operand(&self, instruction: &Instruction, operand: u32) -> Value {
        if operand >= instruction.op_count() {
            return Value::Unknown;
        }
        match instruction.op_kind(operand) {
            OpKind::Register => self.register(instruction.op_register(operand)),
            OpKind::Memory => self.load(instruction),
            _ => {
                immediate(instruction, operand).map_or(Value::Unknown, |value| Value::Constant(value as i64))
            }
        }
    }

    fn load(&self, instruction: &Instruction) -> Value {
        let size = instruction.memory_size().size() as u8;
        let (base, offset) = self.address(instruction);
        if matches!(instruction.memory_segment(), Register::FS | Register::GS) {
            return Value::Unknown;
        }
        match base {
            Value::Unknown => Value::Unknown,
            Value::Stack(at) => self.stack.get(&at.wrapping_add(offset)).cloned().unwrap_or(Value::Unknown),
            Value::Image(at) => self.load_image(at.wrapping_add_signed(offset), size),
            base => self.stored(&base, offset).unwrap_or_else(|| Value::load(base, offset, size)),
        }
    }

    fn load_image(&self, address: u64, size: u8) -> Value {
        let base = Value::Image(address);
        if let Some(value) = self.stored(&base, 0) {
            return value;
        }
        match self.code.image.relocation(Svma(address)) {
            Some(Relocation::TlsOffset { index, addend }) => {
                Value::TlsAddress(self.code.image.tls_offset(index, addend))
            }
            _ if size == 8 => match self.code.image.pointer(Svma(address)) {
                Some(target) => Value::Image(target.0),
                None => Value::load(base, 0, size),
            },
            _ => Value::load(base, 0, size),
        }
    }

    fn stored(&self, base: &Value, offset: i64) -> Option<Value> {
        let entry = self.memory.iter().rev().find(|(b, o, _)| b == base && *o == offset)?;
        Some(entry.2.clone())
    }

    fn assign(&mut self, instruction: &Instruction, operand: u32, value: Value) {
        match instruction.op_kind(operand) {
            OpKind::Register => {
                let register = instruction.op_register(operand);
                let Some(number) = register_number(register) else { return };
                self.registers[number] = if is_high_byte(register) { Value::Unknown } else { value };
            }
            OpKind::Memory => self.store(instruction, value),
            _ => {}
        }
    }

    fn store(&mut self, instruction: &Instruction, value: Value) {
        let size = instruction.memory_size().size() as u8;
        let (base, offset) = self.address(instruction);
        match base {
            Value::Stack(at) => {
                self.stack.insert(at.wrapping_add(offset), value);
            }
            Value::Unknown => self.stores.push(Store { base, offset, size, value }),
            base => {
                self.stores.push(Store { base: base.clone(), offset, size, value: value.clone() });
                self.memory.push((base, offset, value));
            }
        }
    }
}

fn operator(mnemonic: Mnemonic) -> Option<Operator> {
    Some(match mnemonic {
        Mnemonic::Add => Operator::Add,
        Mnemonic::Sub => Operator::Subtract,
        Mnemonic::And => Operator::And,
        Mnemonic::Or => Operator::Or,
        Mnemonic::Shl | Mnemonic::Sal => Operator::ShiftLeft,
        Mnemonic::Shr | Mnemonic::Sar => Operator::ShiftRight,
        Mnemonic::Imul => Operator::Multiply,
        _ => return None,
    })
}

/// Both operands are the same register, as in `xor r, r`.
fn is_same_register(instruction: &Instruction) -> bool {
    instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Register
        && instruction.op0_register() == instruction.op1_register()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::elf::ElfImage;
    use crate::elf::tests::DEBIAN_LIBRUBY;

    fn evaluate(image: &ElfImage, function: &str) -> Value {
        let address = image.symbol(function).unwrap().address;
        Machine::new(&Code::new(image), 0).run(address)
    }

    /// Accessors become the expressions that their source says, through slots of the global offset table.
    #[test]
    fn accessors() {
        let image = ElfImage::read(&File::open(DEBIAN_LIBRUBY).unwrap()).unwrap();
        let vm_ptr = image.symbol("ruby_current_vm_ptr").unwrap().address;
        let count = evaluate(&image, "rb_gc_count");
        assert_eq!(count.to_string(), format!("[[[@{vm_ptr}+0x0]:8+0x450]:8+0x1b8]:8"));
    }

    /// `rb_thread_current` starts from the thread-local `ruby_current_ec`, over `__tls_get_addr`.
    #[test]
    fn thread_local() {
        let image = ElfImage::read(&File::open(DEBIAN_LIBRUBY).unwrap()).unwrap();
        let offset = image.symbol("ruby_current_ec").unwrap().address;
        let mut value = evaluate(&image, "rb_thread_current");
        while let Value::Load { base, .. } = value {
            value = (*base).clone();
        }
        assert_eq!(value, Value::TlsAddress(offset.0 as i64));
    }
}
