//! The effects of instructions on registers, flags and memory.

use iced_x86::{ConditionCode, Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register};

use super::condition::Flags;
use super::machine::{Machine, RAX, RBP, RSP};
use super::memory::{Content, Store};
use super::{Operator, Value};
use crate::address::Svma;
use crate::elf::Relocation;
use crate::ruby::x86::{immediate, is_high_byte, is_memory, register_number, written_registers};

const RCX: usize = 1;
const RDX: usize = 2;
const RSI: usize = 6;
const RDI: usize = 7;
/// Maximum bytes of a string that is followed.
const MAX_STRING: i64 = 4096;

fn moved(base: &Value, distance: i64) -> Value {
    Value::binary(Operator::Add, base.clone(), Value::Constant(distance))
}

impl Machine<'_> {
    /// Runs an instruction that neither jumps nor calls.
    pub(super) fn compute(&mut self, instruction: &Instruction) {
        if self.compute_vector(instruction) {
            return;
        }
        let size = operand_size(instruction, 0);
        match instruction.mnemonic() {
            Mnemonic::Endbr64 | Mnemonic::Nop | Mnemonic::Pause => {}
            Mnemonic::Mov | Mnemonic::Movzx => {
                let value = self.operand(instruction, 1);
                self.assign(instruction, 0, value);
            }
            Mnemonic::Movsx | Mnemonic::Movsxd => {
                let narrow = Value::Constant(operand_size(instruction, 1).into());
                let value = Value::binary(Operator::SignExtend, self.operand(instruction, 1), narrow);
                self.assign(instruction, 0, value);
            }
            Mnemonic::Cdqe => {
                let value = self.registers[RAX].clone().truncated(4);
                self.registers[RAX] = Value::binary(Operator::SignExtend, value, Value::Constant(4));
            }
            Mnemonic::Lea => {
                let value = self.address(instruction);
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
            Mnemonic::Movsq | Mnemonic::Movsd if instruction.has_rep_prefix() => {
                self.copy_string(instruction);
            }
            Mnemonic::Stosq | Mnemonic::Stosd if instruction.has_rep_prefix() => {
                self.fill_string(instruction);
            }
            Mnemonic::Xchg | Mnemonic::Xadd => self.exchange(instruction),
            Mnemonic::Cmpxchg => self.compare_exchange(instruction),
            Mnemonic::Inc => self.operate(instruction, Operator::Add, Value::Constant(1)),
            Mnemonic::Dec => self.operate(instruction, Operator::Subtract, Value::Constant(1)),
            Mnemonic::Neg => {
                let value = self.operand(instruction, 0);
                let negated = Value::binary(Operator::Subtract, Value::Constant(0), value.clone());
                self.assign(instruction, 0, negated);
                self.flags = Flags::Negated { value, size };
            }
            Mnemonic::Not => {
                let value = self.operand(instruction, 0);
                let inverted = Value::binary(Operator::Xor, value, Value::Constant(-1));
                self.assign(instruction, 0, inverted);
            }
            Mnemonic::Sbb if is_same_register(instruction) => {
                let carry = self.decide(ConditionCode::b, instruction.ip());
                let value = carry.map_or(Value::Unknown, |carry| Value::Constant(-i64::from(carry)));
                self.flags = Flags::Unknown;
                self.assign(instruction, 0, value);
            }
            Mnemonic::Test => {
                let (left, right) = (self.operand(instruction, 0), self.operand(instruction, 1));
                let both = Value::binary(Operator::And, left.clone(), right.clone());
                let left = if left == right { left } else { both };
                self.flags = Flags::Compare { left, right: Value::Constant(0), size };
            }
            Mnemonic::Cmp => {
                let (left, right) = (self.operand(instruction, 0), self.operand(instruction, 1));
                self.flags = Flags::Compare { left, right, size };
            }
            Mnemonic::Bt => self.flags = self.bit_tested(instruction),
            Mnemonic::Mul if instruction.op_count() == 1 && size == 8 => {
                let (left, right) = (self.registers[RAX].clone(), self.operand(instruction, 0));
                self.registers[RAX] = Value::binary(Operator::Multiply, left.clone(), right.clone());
                self.registers[RDX] = Value::binary(Operator::MultiplyHigh, left, right);
                self.flags = Flags::Unknown;
            }
            Mnemonic::Div if size == 8 && self.registers[RDX] == Value::Constant(0) => {
                let divisor = self.operand(instruction, 0);
                self.registers[RAX] = Value::binary(Operator::Divide, self.registers[RAX].clone(), divisor);
                self.registers[RDX] = Value::Unknown;
                self.flags = Flags::Unknown;
            }
            Mnemonic::Imul if instruction.op_count() == 3 => {
                let (left, right) = (self.operand(instruction, 1), self.operand(instruction, 2));
                self.flags = Flags::Unknown;
                self.assign(instruction, 0, Value::binary(Operator::Multiply, left, right));
            }
            Mnemonic::Xor | Mnemonic::Sub if is_same_register(instruction) => {
                self.assign(instruction, 0, Value::Constant(0));
                self.flags = Flags::Compare { left: Value::Constant(0), right: Value::Constant(0), size };
            }
            mnemonic => match operator(mnemonic) {
                Some(operator) if instruction.op_count() == 2 => {
                    let right = self.operand(instruction, 1);
                    self.operate(instruction, operator, right);
                }
                _ if instruction.condition_code() != ConditionCode::None => self.conditional(instruction),
                _ => self.forget_results(instruction),
            },
        }
    }

    fn operate(&mut self, instruction: &Instruction, operator: Operator, right: Value) {
        let size = operand_size(instruction, 0);
        let mut left = self.operand(instruction, 0);
        if instruction.mnemonic() == Mnemonic::Sar {
            left = Value::binary(Operator::SignExtend, left, Value::Constant(size.into()));
        }
        let value = Value::binary(operator, left.clone(), right.clone());
        self.flags = match instruction.mnemonic() {
            Mnemonic::Sub => Flags::Compare { left, right, size },
            Mnemonic::And | Mnemonic::Or | Mnemonic::Xor => {
                Flags::Compare { left: value.clone(), right: Value::Constant(0), size }
            }
            Mnemonic::Imul => Flags::Unknown,
            _ => Flags::Result { value: value.clone(), size },
        };
        self.assign(instruction, 0, value);
    }

    /// `setcc` and `cmovcc`.
    fn conditional(&mut self, instruction: &Instruction) {
        let code = instruction.condition_code();
        let symbolic = self.flags.as_bit(code);
        let holds = self.decide(code, instruction.ip());
        if instruction.op_count() == 1 {
            let decided = holds.map(|holds| Value::Constant(holds.into()));
            let value = decided.or(symbolic).unwrap_or(Value::Unknown);
            self.assign(instruction, 0, value);
            return;
        }
        let (old, new) = (self.operand(instruction, 0), self.operand(instruction, 1));
        let value = match holds {
            Some(true) => new,
            Some(false) => old,
            None if old == new => old,
            None => Value::Unknown,
        };
        self.assign(instruction, 0, value);
    }

    /// `rep movs`, upwards, as the direction flag always is in compiled code.
    fn copy_string(&mut self, instruction: &Instruction) {
        let bytes = self.string_bytes(instruction);
        let (target, source) = (self.registers[RDI].clone(), self.registers[RSI].clone());
        self.copy(&target, &source, bytes);
        self.forget_results(instruction);
    }

    /// `rep stos`
    fn fill_string(&mut self, instruction: &Instruction) {
        let bytes = self.string_bytes(instruction);
        let zero = self.registers[RAX] == Value::Constant(0);
        let value = if zero { Value::Constant(0) } else { Value::Unknown };
        let target = self.registers[RDI].clone();
        self.store_string(&target, bytes, |_, _| value.clone());
        self.forget_results(instruction);
    }

    fn string_bytes(&self, instruction: &Instruction) -> Option<i64> {
        let Value::Constant(count @ 0..) = self.registers[RCX] else { return None };
        count.checked_mul(instruction.memory_size().size() as i64)
    }

    /// Copies whole words from one place to another.
    pub(super) fn copy(&mut self, target: &Value, source: &Value, bytes: Option<i64>) {
        self.store_string(target, bytes, |machine, at| machine.load_at(moved(source, at), 8));
    }

    fn store_string(&mut self, target: &Value, bytes: Option<i64>, value: impl Fn(&Self, i64) -> Value) {
        let Some(bytes) = bytes.filter(|&bytes| bytes <= MAX_STRING && bytes % 8 == 0) else {
            if let Value::Stack(first) = *target {
                self.memory.retain(|place, at| !matches!(place, Value::Stack(_)) || at < first);
            }
            return self.store_at(Value::Unknown, 8, Value::Unknown);
        };
        let values: Vec<(i64, Value)> = (0..bytes).step_by(8).map(|at| (at, value(self, at))).collect();
        for (at, value) in values {
            self.store_at(moved(target, at), 8, value);
        }
    }

    /// `xchg` and `xadd`
    fn exchange(&mut self, instruction: &Instruction) {
        let (first, second) = (self.operand(instruction, 0), self.operand(instruction, 1));
        let new = if instruction.mnemonic() == Mnemonic::Xadd {
            self.flags = Flags::Unknown;
            Value::binary(Operator::Add, first.clone(), second)
        } else {
            second
        };
        // The order matters if an operand is used twice: the destination is written last.
        self.assign(instruction, 1, first);
        self.assign(instruction, 0, new);
    }

    /// `cmpxchg`, which succeeds if only this code has changed the operand since it was read.
    fn compare_exchange(&mut self, instruction: &Instruction) {
        let size = operand_size(instruction, 0);
        let expected = self.registers[RAX].clone().truncated(size);
        let (old, new) = (self.operand(instruction, 0), self.operand(instruction, 1));
        let unchanged = old == expected && old != Value::Unknown;
        self.assign(instruction, 0, if unchanged { new } else { Value::Unknown });
        self.flags = Flags::Compare { left: expected, right: old, size };
        if !unchanged {
            self.registers[RAX] = Value::Unknown;
        }
    }

    /// For `bt x, n`: the carry flag is bit n of x.
    fn bit_tested(&self, instruction: &Instruction) -> Flags {
        let Some(number) = immediate(instruction, 1) else { return Flags::Unknown };
        let bits = u64::from(operand_size(instruction, 0)) * 8;
        let bit = Value::bit(self.operand(instruction, 0), (number % bits.max(1)) as u32);
        if bit == Value::Unknown { Flags::Unknown } else { Flags::Carry(bit) }
    }

    /// An instruction that is not modelled: everything it writes becomes unknown.
    fn forget_results(&mut self, instruction: &Instruction) {
        self.flags = Flags::Unknown;
        for register in written_registers(&mut InstructionInfoFactory::new(), instruction) {
            if let Some(number) = register_number(register) {
                self.registers[number] = Value::Unknown;
            }
        }
        self.forget_vectors(instruction);
        if is_memory(instruction, 0) {
            self.assign(instruction, 0, Value::Unknown);
        }
    }

    fn register(&self, register: Register) -> Value {
        let Some(number) = register_number(register) else { return Value::Unknown };
        let value = self.registers[number].clone();
        if is_high_byte(register) {
            return Value::binary(Operator::ShiftRight, value.truncated(2), Value::Constant(8));
        }
        match register.size() {
            8 => value,
            size => value.truncated(size as u8),
        }
    }

    /// The effective address of a memory operand.
    pub(super) fn address(&self, instruction: &Instruction) -> Value {
        if instruction.is_ip_rel_memory_operand() {
            return Value::Image(instruction.ip_rel_memory_address());
        }
        let offset = instruction.memory_displacement64().cast_signed();
        let thread = matches!(instruction.memory_segment(), Register::FS);
        let (base, index) = (instruction.memory_base(), instruction.memory_index());
        if base == Register::None && index == Register::None && !thread && offset > 0 {
            return Value::Image(offset.cast_unsigned());
        }
        let mut address = Value::Constant(offset);
        if base != Register::None {
            address = Value::binary(Operator::Add, address, self.register(base));
        }
        if index != Register::None {
            let scale = Value::Constant(instruction.memory_index_scale().into());
            let scaled = Value::binary(Operator::Multiply, self.register(index), scale);
            address = Value::binary(Operator::Add, address, scaled);
        }
        match instruction.memory_segment() {
            Register::FS => Value::binary(Operator::Add, address, Value::ThreadPointer),
            Register::GS => Value::Unknown,
            _ => address,
        }
    }

    pub(super) fn operand(&self, instruction: &Instruction, operand: u32) -> Value {
        if operand >= instruction.op_count() {
            return Value::Unknown;
        }
        match instruction.op_kind(operand) {
            OpKind::Register => self.register(instruction.op_register(operand)),
            OpKind::Memory => self.load_at(self.address(instruction), operand_size(instruction, operand)),
            _ => {
                let size = operand_size(instruction, 0);
                let number = immediate(instruction, operand).map(u64::cast_signed);
                number.map_or(Value::Unknown, |number| Value::Constant(number).truncated(size))
            }
        }
    }

    pub(super) fn load_at(&self, address: Value, size: u8) -> Value {
        if !matches!(size, 1 | 2 | 4 | 8) {
            return Value::Unknown;
        }
        let (base, offset) = place(&address);
        match (self.memory.read(&base, offset, size), &address) {
            (Content::Known(value), _) => value,
            (Content::Mixed, _) | (Content::Untouched, Value::Stack(_)) => Value::Unknown,
            // The thread control block starts with its own address.
            (Content::Untouched, Value::ThreadPointer) if size == 8 => Value::ThreadPointer,
            (Content::Untouched, Value::Image(at)) => self.load_image(*at, size),
            (Content::Untouched, _) => Value::memory(address, size),
        }
    }

    fn load_image(&self, address: u64, size: u8) -> Value {
        let base = Value::Image(address);
        let image = self.program.code.image;
        match image.relocation(Svma(address)) {
            Some(Relocation::TlsOffset { index, addend }) => {
                Value::TlsDistance(image.tls_offset(index, addend))
            }
            _ if size == 8 => match self.program.code.pointer(Svma(address)) {
                Some(target) => Value::Image(target.0),
                None => Value::load(base, 0, size),
            },
            _ => Value::load(base, 0, size),
        }
    }

    pub(super) fn assign(&mut self, instruction: &Instruction, operand: u32, value: Value) {
        if operand >= instruction.op_count() {
            return;
        }
        match instruction.op_kind(operand) {
            OpKind::Register => self.assign_register(instruction.op_register(operand), value),
            OpKind::Memory => {
                let size = operand_size(instruction, operand);
                self.store_at(self.address(instruction), size, value.truncated(size));
            }
            _ => {}
        }
    }

    fn assign_register(&mut self, register: Register, value: Value) {
        let Some(number) = register_number(register) else { return };
        let old = &self.registers[number];
        self.registers[number] = match register.size() {
            8 => value,
            4 => value.truncated(4),
            _ if is_high_byte(register) => Value::Unknown,
            size => old.with_low(value, size as u8),
        };
    }

    pub(super) fn store_at(&mut self, address: Value, size: u8, value: Value) {
        let (base, offset) = place(&address);
        if base == Value::Unknown {
            // The store may have gone anywhere except to locals and to variables that are set once.
            self.memory.retain(|place, _| matches!(place, Value::Stack(_) | Value::Image(_)));
            self.stores.push(Store { base, offset, size, value });
            return;
        }
        if !matches!(base, Value::Stack(_)) {
            let (base, offset) = address.split();
            self.stores.push(Store { base, offset, size, value: value.clone() });
        }
        self.memory.write(base, offset, size, value);
    }
}

/// Size of an operand in bytes; 8 for an immediate.
fn operand_size(instruction: &Instruction, operand: u32) -> u8 {
    if operand >= instruction.op_count() {
        return 8;
    }
    match instruction.op_kind(operand) {
        OpKind::Register => instruction.op_register(operand).size() as u8,
        OpKind::Memory => instruction.memory_size().size() as u8,
        _ => 8,
    }
}

/// An address as the object that it lies in and the offset in it.
fn place(address: &Value) -> (Value, i64) {
    match *address {
        Value::Stack(offset) => (Value::Stack(0), offset),
        Value::Image(address) => (Value::Image(0), address.cast_signed()),
        Value::TlsAddress(offset) => (Value::TlsAddress(0), offset),
        ref other => other.clone().split(),
    }
}

fn operator(mnemonic: Mnemonic) -> Option<Operator> {
    Some(match mnemonic {
        Mnemonic::Add => Operator::Add,
        Mnemonic::Sub => Operator::Subtract,
        Mnemonic::And => Operator::And,
        Mnemonic::Or => Operator::Or,
        Mnemonic::Xor => Operator::Xor,
        Mnemonic::Shl | Mnemonic::Sal => Operator::ShiftLeft,
        Mnemonic::Shr | Mnemonic::Sar => Operator::ShiftRight,
        Mnemonic::Imul => Operator::Multiply,
        _ => return None,
    })
}

fn is_same_register(instruction: &Instruction) -> bool {
    instruction.op_count() == 2
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Register
        && instruction.op0_register() == instruction.op1_register()
}
