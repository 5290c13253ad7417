//! The machine for A64 code. Values, memory and conditions are those of x86-64. Instructions that are not modelled make
//! their results unknown; an access to memory that is not modelled ends the run.

use iced_x86::ConditionCode;
use yaxpeax_arm::armv8::a64::{Opcode, Operand, ShiftStyle, SizeCode};

use super::condition::Flags;
use super::machine::{Machine, Next};
use super::{Operator, Value};
use crate::address::Svma;
use crate::ruby::aarch64::{Flow, Instruction, SP};
use crate::ruby::code::Callee;

const X: u8 = 8;
const W: u8 = 4;

/// A memory operand: its address, and the new value of its base register.
struct MemoryOperand {
    address: Value,
    base: Option<(u16, Value)>,
}

/// How a narrow load fills its register.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    Zero,
    Sign,
}

fn bytes(size: SizeCode) -> u8 {
    match size {
        SizeCode::X => X,
        SizeCode::W => W,
    }
}

/// The condition of a `b.cond` or similar instruction; after a comparison it has the same meaning on both processors.
fn condition(number: u8) -> Option<ConditionCode> {
    use ConditionCode::{a, ae, b, be, e, g, ge, l, le, ne, ns, s};
    Some(match number {
        0 => e,
        1 => ne,
        2 => ae,
        3 => b,
        4 => s,
        5 => ns,
        8 => a,
        9 => be,
        10 => ge,
        11 => l,
        12 => g,
        13 => le,
        // Overflow; always.
        _ => return None,
    })
}

const ALWAYS: [u8; 2] = [14, 15];

fn constant(number: u64) -> Value {
    Value::Constant(number.cast_signed())
}

impl Machine<'_> {
    pub(super) fn step_aarch64(&mut self, instruction: &Instruction, depth: u32) -> Next {
        match instruction.flow() {
            Flow::Return => return Next::Return,
            Flow::Stop => return Next::Stop,
            Flow::Jump(target) => return self.jump_to(self.program.code.callee_at(target)),
            Flow::Call(target) => return self.call_to(self.program.code.callee_at(target), depth),
            Flow::IndirectJump => return self.jump_to(self.pointed(instruction)),
            Flow::IndirectCall => return self.call_to(self.pointed(instruction), depth),
            Flow::Conditional(target) => {
                return match self.jumps(instruction) {
                    Some(true) => Next::Address(target),
                    Some(false) => Next::Following,
                    None => Next::Stop,
                };
            }
            Flow::Next => {}
        }
        if self.compute_aarch64(instruction) { Next::Following } else { Next::Stop }
    }

    /// The target of a call or jump through a register.
    fn pointed(&self, instruction: &Instruction) -> Callee<'static> {
        match instruction.register(0).map(|register| self.general(register, SizeCode::X)) {
            Some(Value::Image(address)) => Callee { address: Some(Svma(address)), name: None },
            _ => Callee::default(),
        }
    }

    /// Whether a conditional jump is taken; `None` if this kind of condition is not modelled.
    fn jumps(&mut self, instruction: &Instruction) -> Option<bool> {
        let address = instruction.address.0;
        let (value, size, code) = match (instruction.opcode, instruction.operands) {
            (Opcode::Bcc(number) | Opcode::BCcc(number), _) if ALWAYS.contains(&number) => return Some(true),
            (Opcode::Bcc(number) | Opcode::BCcc(number), _) => {
                return Some(self.branch(condition(number)?, address));
            }
            (Opcode::CBZ | Opcode::CBNZ, [Operand::Register(size, register), ..]) => {
                let code =
                    if instruction.opcode == Opcode::CBZ { ConditionCode::e } else { ConditionCode::ne };
                (self.general(register, size), bytes(size), code)
            }
            (Opcode::TBZ | Opcode::TBNZ, [Operand::Register(size, register), Operand::Imm16(bit), ..]) => {
                let code =
                    if instruction.opcode == Opcode::TBZ { ConditionCode::e } else { ConditionCode::ne };
                let mask = constant(1_u64.checked_shl(bit.into())?);
                (Value::binary(Operator::And, self.general(register, size), mask), X, code)
            }
            _ => return None,
        };
        // These jumps neither read nor write the flags.
        let asked = Flags::Compare { left: value, right: Value::Constant(0), size };
        let kept = std::mem::replace(&mut self.flags, asked);
        let taken = self.branch(code, address);
        self.flags = kept;
        Some(taken)
    }

    /// Runs an instruction that neither jumps nor calls; `false` if its effect on memory is not known.
    fn compute_aarch64(&mut self, instruction: &Instruction) -> bool {
        if let Some(done) = self.memory_access(instruction) {
            return done;
        }
        let operands = &instruction.operands;
        let size = match operands[0] {
            Operand::Register(size, _) | Operand::RegisterOrSP(size, _) => size,
            _ => SizeCode::X,
        };
        let value = match instruction.opcode {
            Opcode::HINT | Opcode::PRFM | Opcode::PRFUM | Opcode::DMB(_) | Opcode::DSB(_) | Opcode::ISB => {
                return true;
            }
            Opcode::PACIASP | Opcode::PACIBSP | Opcode::AUTIASP | Opcode::AUTIBSP => return true,
            Opcode::MOVZ | Opcode::MOVN => {
                instruction.constant().map_or(Value::Unknown, |(_, number)| constant(number))
            }
            Opcode::MOVK => match operands[1] {
                Operand::ImmShift(number, shift @ 0..=48) => {
                    let kept = constant(!(0xffff << shift));
                    let rest = Value::binary(Operator::And, self.operand_of(instruction, 0), kept);
                    Value::binary(Operator::Or, rest, constant(u64::from(number) << shift))
                }
                _ => Value::Unknown,
            },
            Opcode::ADR | Opcode::ADRP => {
                instruction.target().map_or(Value::Unknown, |target| Value::Image(target.0))
            }
            Opcode::ADD | Opcode::ADDS | Opcode::SUB | Opcode::SUBS => self.sum(instruction, size),
            Opcode::AND
            | Opcode::ANDS
            | Opcode::ORR
            | Opcode::ORN
            | Opcode::EOR
            | Opcode::EON
            | Opcode::BIC
            | Opcode::BICS => self.bitwise(instruction, size),
            Opcode::LSLV | Opcode::LSRV | Opcode::UDIV | Opcode::UMULH => {
                let (left, right) = (self.operand_of(instruction, 1), self.operand_of(instruction, 2));
                match (instruction.opcode, &right) {
                    (Opcode::UDIV, _) => Value::binary(Operator::Divide, left, right),
                    (Opcode::UMULH, _) => Value::binary(Operator::MultiplyHigh, left, right),
                    (shift, Value::Constant(count)) if (0..i64::from(bytes(size)) * 8).contains(count) => {
                        let operator =
                            if shift == Opcode::LSLV { Operator::ShiftLeft } else { Operator::ShiftRight };
                        Value::binary(operator, left, right)
                    }
                    _ => Value::Unknown,
                }
            }
            Opcode::MADD | Opcode::MSUB | Opcode::UMADDL => {
                let product = Value::binary(
                    Operator::Multiply,
                    self.operand_of(instruction, 1),
                    self.operand_of(instruction, 2),
                );
                let subtracts = instruction.opcode == Opcode::MSUB;
                let operator = if subtracts { Operator::Subtract } else { Operator::Add };
                Value::binary(operator, self.operand_of(instruction, 3), product)
            }
            Opcode::UBFM | Opcode::SBFM => self.bit_field(instruction, size),
            Opcode::CSEL | Opcode::CSINC | Opcode::CSINV | Opcode::CSNEG => self.selected(instruction),
            Opcode::CCMP => {
                self.compare_if(instruction, size);
                return true;
            }
            _ => return self.forget_written(instruction),
        };
        self.set_operand(instruction, 0, value);
        true
    }

    /// An instruction that is not modelled and has no memory operand.
    fn forget_written(&mut self, instruction: &Instruction) -> bool {
        let reaches_memory = |operand: &Operand| {
            matches!(
                operand,
                Operand::RegRegOffset(..)
                    | Operand::RegPreIndex(..)
                    | Operand::RegPostIndex(..)
                    | Operand::RegPostIndexReg(..)
            )
        };
        if instruction.operands.iter().any(reaches_memory) {
            return false;
        }
        self.flags = Flags::Unknown;
        for register in instruction.written().filter(|&register| register != SP) {
            self.registers[usize::from(register)] = Value::Unknown;
        }
        true
    }

    fn sum(&mut self, instruction: &Instruction, size: SizeCode) -> Value {
        let (left, right) = (self.operand_of(instruction, 1), self.operand_of(instruction, 2));
        let subtracts = matches!(instruction.opcode, Opcode::SUB | Opcode::SUBS);
        let operator = if subtracts { Operator::Subtract } else { Operator::Add };
        let value = Value::binary(operator, left.clone(), right.clone());
        match instruction.opcode {
            Opcode::SUBS => self.flags = Flags::Compare { left, right, size: bytes(size) },
            Opcode::ADDS => self.flags = Flags::Result { value: value.clone(), size: bytes(size) },
            _ => {}
        }
        value
    }

    fn bitwise(&mut self, instruction: &Instruction, size: SizeCode) -> Value {
        let (left, mut right) = (self.operand_of(instruction, 1), self.operand_of(instruction, 2));
        if matches!(instruction.opcode, Opcode::ORN | Opcode::EON | Opcode::BIC | Opcode::BICS) {
            right = Value::binary(Operator::Xor, right, Value::Constant(-1));
        }
        let operator = match instruction.opcode {
            Opcode::ORR | Opcode::ORN => Operator::Or,
            Opcode::EOR | Opcode::EON => Operator::Xor,
            _ => Operator::And,
        };
        // `mov` is an `orr` with the zero register.
        let value = if operator == Operator::Or && left == Value::Constant(0) {
            right
        } else if operator == Operator::And && left == right {
            left
        } else {
            Value::binary(operator, left, right)
        };
        if matches!(instruction.opcode, Opcode::ANDS | Opcode::BICS) {
            // The carry flag is 0, which means the opposite of what it means after a comparison.
            self.flags = Flags::Result { value: value.clone(), size: bytes(size) };
        }
        value
    }

    /// Bits `from` to `to` of a register moved down to bit 0, or its lowest bits moved up: `lsr`, `lsl`, `ubfx`, `sxtw`
    /// and similar instructions.
    fn bit_field(&self, instruction: &Instruction, size: SizeCode) -> Value {
        let (Operand::Immediate(from), Operand::Immediate(to)) =
            (instruction.operands[2], instruction.operands[3])
        else {
            return Value::Unknown;
        };
        let bits = u32::from(bytes(size)) * 8;
        if from >= bits || to >= bits {
            return Value::Unknown;
        }
        let value = self.operand_of(instruction, 1);
        let ones = |count: u32| constant(u64::MAX >> (64 - count.clamp(1, 64)));
        if instruction.opcode == Opcode::SBFM {
            let whole = matches!(to, 7 | 15 | 31 | 63);
            let extended = |value: Value| {
                let narrow = ((to + 1) / 8) as u8;
                Value::binary(Operator::SignExtend, value.truncated(narrow), Value::Constant(narrow.into()))
            };
            return match (whole, from) {
                (true, 0) => extended(value),
                (true, _) if to >= from => {
                    Value::binary(Operator::ShiftRight, extended(value), Value::Constant(from.into()))
                }
                (true, _) => {
                    Value::binary(Operator::ShiftLeft, extended(value), Value::Constant((bits - from).into()))
                }
                (false, _) => Value::Unknown,
            };
        }
        if to < from {
            let low = Value::binary(Operator::And, value.clone(), ones(to + 1));
            // Bits that are shifted out at the top need no mask.
            let low = if to + 1 == from { value } else { low };
            return Value::binary(Operator::ShiftLeft, low, Value::Constant((bits - from).into()));
        }
        let shifted = Value::binary(Operator::ShiftRight, value, Value::Constant(from.into()));
        if to == bits - 1 {
            return shifted;
        }
        Value::binary(Operator::And, shifted, ones(to - from + 1))
    }

    /// `csel`, `cset` and similar instructions.
    fn selected(&mut self, instruction: &Instruction) -> Value {
        let Operand::ConditionCode(number) = instruction.operands[3] else { return Value::Unknown };
        let (first, second) = (self.operand_of(instruction, 1), self.operand_of(instruction, 2));
        let size = match instruction.operands[0] {
            Operand::Register(size, _) => bytes(size),
            _ => X,
        };
        let second = match instruction.opcode {
            Opcode::CSINC => Value::binary(Operator::Add, second, Value::Constant(1)),
            Opcode::CSINV => Value::binary(Operator::Xor, second, Value::Constant(-1)).truncated(size),
            Opcode::CSNEG => Value::binary(Operator::Subtract, Value::Constant(0), second).truncated(size),
            _ => second,
        };
        if first == second {
            return first;
        }
        let Some(code) = condition(number) else { return Value::Unknown };
        // `cset` of a bit is that bit; its condition is the opposite of the encoded one.
        let is_set = (&first, &second) == (&Value::Constant(0), &Value::Constant(1));
        let symbolic =
            (is_set && code == ConditionCode::e).then(|| self.flags.as_bit(ConditionCode::ne)).flatten();
        match self.decide(code, instruction.address.0) {
            Some(true) => first,
            Some(false) => second,
            None => symbolic.unwrap_or(Value::Unknown),
        }
    }

    /// `ccmp`: a comparison if the condition holds, else the flags given as an immediate.
    fn compare_if(&mut self, instruction: &Instruction, size: SizeCode) {
        let (Operand::Immediate(named), Operand::ConditionCode(number)) =
            (instruction.operands[2], instruction.operands[3])
        else {
            self.flags = Flags::Unknown;
            return;
        };
        let (left, right) = (self.operand_of(instruction, 0), self.operand_of(instruction, 1));
        let holds = condition(number).and_then(|code| self.decide(code, instruction.address.0));
        let compare = |left: i64, right: i64| Flags::Compare {
            left: Value::Constant(left),
            right: Value::Constant(right),
            size: X,
        };
        self.flags = match (holds, named) {
            (Some(true), _) => Flags::Compare { left, right, size: bytes(size) },
            // Negative, zero, carry, overflow: numbers whose comparison sets the same flags.
            (Some(false), 0b0000) => compare(0, i64::MIN + 1),
            (Some(false), 0b0010) => compare(1, 0),
            (Some(false), 0b1000) => compare(0, 1),
            // No comparison gives zero without carry; the carry is unknown.
            (Some(false), 0b0100) => Flags::Result { value: Value::Constant(0), size: X },
            _ => Flags::Unknown,
        };
    }

    /// A load or store of general or vector registers; `None` if it is not modelled.
    fn memory_access(&mut self, instruction: &Instruction) -> Option<bool> {
        use Fill::{Sign, Zero};
        let (width, fill, stores) = match instruction.opcode {
            Opcode::LDR
            | Opcode::LDUR
            | Opcode::LDP
            | Opcode::LDNP
            | Opcode::LDAR
            | Opcode::LDXR
            | Opcode::LDAXR
            | Opcode::LDAPR => (None, Zero, false),
            Opcode::LDRB | Opcode::LDURB | Opcode::LDARB => (Some(1), Zero, false),
            Opcode::LDRH | Opcode::LDURH | Opcode::LDARH => (Some(2), Zero, false),
            Opcode::LDRSB | Opcode::LDURSB => (Some(1), Sign, false),
            Opcode::LDRSH | Opcode::LDURSH => (Some(2), Sign, false),
            Opcode::LDRSW | Opcode::LDURSW | Opcode::LDPSW => (Some(4), Sign, false),
            Opcode::STR | Opcode::STUR | Opcode::STP | Opcode::STNP | Opcode::STLR => (None, Zero, true),
            Opcode::STRB | Opcode::STURB | Opcode::STLRB => (Some(1), Zero, true),
            Opcode::STRH | Opcode::STURH | Opcode::STLRH => (Some(2), Zero, true),
            _ => return None,
        };
        let operands = &instruction.operands;
        let registers = operands
            .iter()
            .take_while(|operand| matches!(operand, Operand::Register(..) | Operand::SIMDRegister(..)))
            .count();
        let Some(place) = operands.get(registers).and_then(|operand| self.place(instruction, operand)) else {
            return Some(false);
        };
        if let Some((base, value)) = place.base {
            self.registers[usize::from(base)] = value;
        }
        let mut offset = 0;
        for operand in &operands[..registers] {
            let address = Value::binary(Operator::Add, place.address.clone(), Value::Constant(offset));
            match *operand {
                Operand::Register(size, register) => {
                    let width = width.unwrap_or(bytes(size));
                    if stores {
                        let value = self.general(register, size).truncated(width);
                        self.store_at(address, width, value);
                    } else {
                        let value = self.load_at(address, width);
                        let value = match fill {
                            Zero => value,
                            Sign => Value::binary(Operator::SignExtend, value, Value::Constant(width.into())),
                        };
                        self.set_general(register, size, value);
                    }
                    offset += i64::from(width);
                }
                // The contents of vector registers are not followed. At most 16 bytes.
                Operand::SIMDRegister(size, _) => {
                    use yaxpeax_arm::armv8::a64::SIMDSizeCode::{B, D, H, Q, S};
                    let width: i64 = match size {
                        B => 1,
                        H => 2,
                        S => 4,
                        D => 8,
                        Q => 16,
                    };
                    if stores {
                        for at in (0..width).step_by(8) {
                            let part = Value::binary(Operator::Add, address.clone(), Value::Constant(at));
                            self.store_at(part, width.min(8) as u8, Value::Unknown);
                        }
                    }
                    offset += width;
                }
                _ => return Some(false),
            }
        }
        Some(registers > 0)
    }

    fn place(&self, instruction: &Instruction, operand: &Operand) -> Option<MemoryOperand> {
        let plus = |base: u16, offset: i32| {
            Value::binary(Operator::Add, self.pointer_register(base), Value::Constant(offset.into()))
        };
        Some(match *operand {
            Operand::RegPreIndex(base, offset, back) => {
                let address = plus(base, offset);
                MemoryOperand { base: back.then(|| (base, address.clone())), address }
            }
            Operand::RegPostIndex(base, offset) => {
                MemoryOperand { address: plus(base, 0), base: Some((base, plus(base, offset))) }
            }
            Operand::RegRegOffset(base, index, size, style, amount) => {
                let index = shifted(self.general(index, size), style, amount, bytes(size))?;
                let address = Value::binary(Operator::Add, self.pointer_register(base), index);
                MemoryOperand { address, base: None }
            }
            Operand::PCOffset(_) => {
                MemoryOperand { address: Value::Image(instruction.target()?.0), base: None }
            }
            _ => return None,
        })
    }

    /// A register as a base address; number 31 is the stack pointer.
    fn pointer_register(&self, number: u16) -> Value {
        self.registers[usize::from(number & SP)].clone()
    }

    /// A general register; number 31 is always 0.
    fn general(&self, number: u16, size: SizeCode) -> Value {
        if number == SP {
            return Value::Constant(0);
        }
        let value = self.pointer_register(number);
        if size == SizeCode::W { value.truncated(W) } else { value }
    }

    fn set_general(&mut self, number: u16, size: SizeCode, value: Value) {
        if number != SP {
            let value = if size == SizeCode::W { value.truncated(W) } else { value };
            self.registers[usize::from(number & SP)] = value;
        }
    }

    fn set_operand(&mut self, instruction: &Instruction, operand: usize, value: Value) {
        match instruction.operands[operand] {
            Operand::RegisterOrSP(SizeCode::X, SP) => self.registers[usize::from(SP)] = value,
            Operand::Register(size, number) | Operand::RegisterOrSP(size, number) => {
                self.set_general(number, size, value);
            }
            _ => {}
        }
    }

    fn operand_of(&self, instruction: &Instruction, operand: usize) -> Value {
        match instruction.operands[operand] {
            Operand::Register(size, number) => self.general(number, size),
            Operand::RegisterOrSP(SizeCode::X, number) => self.pointer_register(number),
            Operand::RegisterOrSP(SizeCode::W, number) => self.pointer_register(number).truncated(W),
            Operand::Immediate(number) => Value::Constant(number.into()),
            Operand::Imm64(number) => constant(number),
            Operand::ImmShift(number, count @ 0..=48) => constant(u64::from(number) << count),
            Operand::RegShift(style, amount, size, number) => {
                shifted(self.general(number, size), style, amount, bytes(size)).unwrap_or(Value::Unknown)
            }
            _ => Value::Unknown,
        }
    }
}

/// A register operand of `size` bytes with its shift or extension applied.
fn shifted(value: Value, style: ShiftStyle, amount: u8, size: u8) -> Option<Value> {
    let signed = |value: Value, size: u8| {
        Value::binary(Operator::SignExtend, value.truncated(size), Value::Constant(size.into()))
    };
    let (value, operator) = match style {
        ShiftStyle::LSL | ShiftStyle::UXTX | ShiftStyle::SXTX => (value, Operator::ShiftLeft),
        ShiftStyle::LSR => (value, Operator::ShiftRight),
        ShiftStyle::ASR => (signed(value, size), Operator::ShiftRight),
        ShiftStyle::UXTB => (value.truncated(1), Operator::ShiftLeft),
        ShiftStyle::UXTH => (value.truncated(2), Operator::ShiftLeft),
        ShiftStyle::UXTW => (value.truncated(4), Operator::ShiftLeft),
        ShiftStyle::SXTB => (signed(value, 1), Operator::ShiftLeft),
        ShiftStyle::SXTH => (signed(value, 2), Operator::ShiftLeft),
        ShiftStyle::SXTW => (signed(value, 4), Operator::ShiftLeft),
        ShiftStyle::ROR => return (amount == 0).then_some(value),
    };
    Some(if amount == 0 { value } else { Value::binary(operator, value, Value::Constant(amount.into())) })
}
