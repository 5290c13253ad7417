//! 128-bit registers as pairs of 64-bit words: compilers use them to sum counters and to copy pairs of words.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register};

use super::machine::Machine;
use super::{Operator, Value};
use crate::ruby::x86::{immediate, written_registers};

type Pair = [Value; 2];

const UNKNOWN: Pair = [Value::Unknown, Value::Unknown];

impl Machine<'_> {
    /// Runs the instruction if it operates on 128-bit registers in a way that is modelled.
    pub(super) fn compute_vector(&mut self, instruction: &Instruction) -> bool {
        let destination = || number(instruction.op0_register());
        match instruction.mnemonic() {
            Mnemonic::Movdqu | Mnemonic::Movdqa | Mnemonic::Movups | Mnemonic::Movaps => {
                let value = self.pair(instruction, 1);
                self.assign_pair(instruction, value);
            }
            Mnemonic::Movq => match (destination(), number(instruction.op1_register())) {
                (Some(to), Some(from)) => {
                    self.vectors[to] = [self.vectors[from][0].clone(), Value::Constant(0)];
                }
                (Some(to), None) => self.vectors[to] = [self.operand(instruction, 1), Value::Constant(0)],
                (None, Some(from)) => {
                    let value = self.vectors[from][0].clone();
                    self.assign(instruction, 0, value);
                }
                (None, None) => return false,
            },
            Mnemonic::Movhps | Mnemonic::Movhpd => self.half(instruction, 1),
            Mnemonic::Movlps | Mnemonic::Movlpd => self.half(instruction, 0),
            Mnemonic::Paddq | Mnemonic::Psubq | Mnemonic::Pxor | Mnemonic::Xorps => {
                let Some(to) = destination() else { return false };
                let operator = match instruction.mnemonic() {
                    Mnemonic::Paddq => Operator::Add,
                    Mnemonic::Psubq => Operator::Subtract,
                    _ => Operator::Xor,
                };
                let same = number(instruction.op1_register()) == Some(to);
                let [low, high] = self.pair(instruction, 1);
                let old = self.vectors[to].clone();
                self.vectors[to] = match operator {
                    Operator::Xor if same => [Value::Constant(0), Value::Constant(0)],
                    _ => {
                        let [a, b] = old;
                        [Value::binary(operator, a, low), Value::binary(operator, b, high)]
                    }
                };
            }
            Mnemonic::Punpcklqdq | Mnemonic::Movlhps => {
                let (Some(to), [low, _]) = (destination(), self.pair(instruction, 1)) else { return false };
                self.vectors[to][1] = low;
            }
            Mnemonic::Punpckhqdq => {
                let (Some(to), [_, high]) = (destination(), self.pair(instruction, 1)) else { return false };
                self.vectors[to] = [self.vectors[to][1].clone(), high];
            }
            Mnemonic::Movhlps => {
                let (Some(to), [_, high]) = (destination(), self.pair(instruction, 1)) else { return false };
                self.vectors[to][0] = high;
            }
            Mnemonic::Psrldq => {
                let (Some(to), Some(8)) = (destination(), immediate(instruction, 1)) else { return false };
                self.vectors[to] = [self.vectors[to][1].clone(), Value::Constant(0)];
            }
            Mnemonic::Pshufd => {
                let (Some(to), Some(order)) = (destination(), immediate(instruction, 2)) else {
                    return false;
                };
                let source = self.pair(instruction, 1);
                let pick = |order: u64| match order & 0xf {
                    0x4 => source[0].clone(),
                    0xe => source[1].clone(),
                    _ => Value::Unknown,
                };
                self.vectors[to] = [pick(order), pick(order >> 4)];
            }
            _ => return false,
        }
        true
    }

    /// Loads or stores one half of a 128-bit register.
    fn half(&mut self, instruction: &Instruction, half: usize) {
        match (number(instruction.op0_register()), number(instruction.op1_register())) {
            (Some(to), None) => self.vectors[to][half] = self.operand(instruction, 1),
            (None, Some(from)) => {
                let value = self.vectors[from][half].clone();
                self.assign(instruction, 0, value);
            }
            _ => self.forget_vectors(instruction),
        }
    }

    fn pair(&self, instruction: &Instruction, operand: u32) -> Pair {
        match instruction.op_kind(operand) {
            OpKind::Register => number(instruction.op_register(operand))
                .map_or(UNKNOWN, |register| self.vectors[register].clone()),
            OpKind::Memory => {
                let address = self.address(instruction);
                let second = Value::binary(Operator::Add, address.clone(), Value::Constant(8));
                [self.load_at(address, 8), self.load_at(second, 8)]
            }
            _ => UNKNOWN,
        }
    }

    fn assign_pair(&mut self, instruction: &Instruction, [low, high]: Pair) {
        if let Some(to) = number(instruction.op0_register()) {
            self.vectors[to] = [low, high];
            return;
        }
        let address = self.address(instruction);
        let second = Value::binary(Operator::Add, address.clone(), Value::Constant(8));
        self.store_at(address, 8, low);
        self.store_at(second, 8, high);
    }

    /// Forgets the 128-bit registers that an instruction writes.
    pub(super) fn forget_vectors(&mut self, instruction: &Instruction) {
        for register in written_registers(&mut InstructionInfoFactory::new(), instruction) {
            if register.is_vector_register() {
                let number = register.number();
                if let Some(vector) = self.vectors.get_mut(number) {
                    *vector = UNKNOWN;
                }
            }
        }
    }
}

/// Number of an xmm register.
fn number(register: Register) -> Option<usize> {
    (register.is_xmm() && register.number() < 16).then(|| register.number())
}
