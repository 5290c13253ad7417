//! Symbolic values.

use std::fmt;
use std::rc::Rc;

/// Expressions with more nodes than this become [`Value::Unknown`]. The bound keeps comparing cheap: code such as a
/// row of `add rax, rax` would otherwise double the expression with each instruction.
const MAX_WEIGHT: u32 = 64;

/// What is known of a register or memory word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// Nothing.
    Unknown,
    /// A number.
    Constant(i64),
    /// A stated address in the image.
    Image(u64),
    /// The stack pointer at entry plus this many bytes.
    Stack(i64),
    /// An integer argument of the function, from 0.
    Argument(u8),
    /// The address of a thread-local variable: thread block plus this many bytes.
    TlsAddress(i64),
    /// The memory at `base + offset`, zero-extended from `size` bytes.
    Load {
        /// The address.
        base: Rc<Value>,
        /// Added to it, bytes.
        offset: i64,
        /// Bytes read.
        size: u8,
    },
    /// Bit `bit` of `word`, as 0 or 1.
    Bit {
        /// The word.
        word: Rc<Value>,
        /// The bit, from 0.
        bit: u32,
    },
    /// The result of an operation.
    Binary(Operator, Rc<Value>, Rc<Value>),
}

/// An operation on two values, modulo 2⁶⁴.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    /// Sum.
    Add,
    /// Difference.
    Subtract,
    /// Product.
    Multiply,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Left shift.
    ShiftLeft,
    /// Right shift, logical or arithmetic.
    ShiftRight,
}

impl Value {
    /// The memory at `base + offset`.
    pub(crate) fn load(base: Self, offset: i64, size: u8) -> Self {
        if base == Self::Unknown || base.weight() >= MAX_WEIGHT {
            return Self::Unknown;
        }
        Self::Load { base: Rc::new(base), offset, size }
    }

    /// Bit `bit` of `word`.
    pub(crate) fn bit(word: Self, bit: u32) -> Self {
        if word == Self::Unknown || word.weight() >= MAX_WEIGHT {
            return Self::Unknown;
        }
        Self::Bit { word: Rc::new(word), bit }
    }

    /// The operation on two values, simplified where that keeps addresses recognisable.
    pub(crate) fn binary(operator: Operator, left: Self, right: Self) -> Self {
        use Operator::{Add, And, Subtract};
        match (operator, &left, &right) {
            (_, Self::Unknown, _) | (_, _, Self::Unknown) => Self::Unknown,
            (Add, Self::Constant(a), Self::Constant(b)) => Self::Constant(a.wrapping_add(*b)),
            (Subtract, Self::Constant(a), Self::Constant(b)) => Self::Constant(a.wrapping_sub(*b)),
            (Add, Self::Stack(a), Self::Constant(b)) => Self::Stack(a.wrapping_add(*b)),
            (Subtract, Self::Stack(a), Self::Constant(b)) => Self::Stack(a.wrapping_sub(*b)),
            // Aligning the stack pointer: slots stay distinct, which is all that matters.
            (And, Self::Stack(a), Self::Constant(_)) => Self::Stack(*a),
            (Add, Self::Image(a), Self::Constant(b)) | (Add, Self::Constant(b), Self::Image(a)) => {
                Self::Image(a.wrapping_add_signed(*b))
            }
            (Add, Self::TlsAddress(a), Self::Constant(b)) => Self::TlsAddress(a.wrapping_add(*b)),
            (Add | Subtract, _, Self::Constant(0)) => left,
            _ if left.weight().saturating_add(right.weight()) >= MAX_WEIGHT => Self::Unknown,
            _ => Self::Binary(operator, Rc::new(left), Rc::new(right)),
        }
    }

    fn weight(&self) -> u32 {
        match self {
            Self::Load { base, .. } => base.weight() + 1,
            Self::Bit { word, .. } => word.weight() + 1,
            Self::Binary(_, left, right) => left.weight() + right.weight() + 1,
            _ => 1,
        }
    }

    /// If the value is a single bit of memory: base, byte offset and bit counted from that byte's lowest.
    pub(crate) fn as_memory_bit(&self) -> Option<(&Value, i64, u32)> {
        let (word, bit) = self.as_bit()?;
        let Self::Load { base, offset, size } = word else { return None };
        (bit < u32::from(*size) * 8).then_some((base, *offset, bit))
    }

    fn as_bit(&self) -> Option<(&Value, u32)> {
        match self {
            Self::Bit { word, bit } => Some((word, *bit)),
            Self::Binary(Operator::And, left, mask) if **mask == Self::Constant(1) => match &**left {
                Self::Binary(Operator::ShiftRight, word, count) => Some((word, count.as_bit_number()?)),
                Self::Load { .. } => Some((left, 0)),
                other => other.as_bit(),
            },
            Self::Binary(Operator::ShiftRight, left, count) => {
                let bit = count.as_bit_number()?;
                match &**left {
                    Self::Binary(Operator::And, word, mask) if **mask == Self::Constant(1 << bit) => {
                        Some((word, bit))
                    }
                    Self::Load { size, .. } if bit + 1 == u32::from(*size) * 8 => Some((left, bit)),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn as_bit_number(&self) -> Option<u32> {
        match self {
            Self::Constant(bit @ 0..=62) => Some(*bit as u32),
            _ => None,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("?"),
            Self::Constant(value) => write!(f, "{value:#x}"),
            Self::Image(address) => write!(f, "@{address:#x}"),
            Self::Stack(offset) => write!(f, "sp{offset:+}"),
            Self::Argument(index) => write!(f, "arg{index}"),
            Self::TlsAddress(offset) => write!(f, "&tls{offset:+}"),
            Self::Load { base, offset, size } => write!(f, "[{base}+{offset:#x}]:{size}"),
            Self::Bit { word, bit } => write!(f, "({word} bit {bit})"),
            Self::Binary(operator, left, right) => write!(f, "({left} {operator:?} {right})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ways in which compilers isolate one bit of a bit field are all recognised.
    #[test]
    fn bit_shapes() {
        let byte = || Value::load(Value::Argument(0), 0x10, 1);
        let constant = Value::Constant;
        let shift_then_mask = Value::binary(
            Operator::And,
            Value::binary(Operator::ShiftRight, byte(), constant(5)),
            constant(1),
        );
        let mask_then_shift = Value::binary(
            Operator::ShiftRight,
            Value::binary(Operator::And, byte(), constant(32)),
            constant(5),
        );
        for value in [shift_then_mask, mask_then_shift, Value::bit(byte(), 5)] {
            assert_eq!(value.as_memory_bit(), Some((&Value::Argument(0), 0x10, 5)), "{value}");
        }
        let top = Value::binary(Operator::ShiftRight, byte(), constant(7));
        assert_eq!(top.as_memory_bit().unwrap().2, 7);
        assert_eq!(Value::binary(Operator::And, byte(), constant(1)).as_memory_bit().unwrap().2, 0);
        assert_eq!(Value::binary(Operator::And, byte(), constant(3)).as_memory_bit(), None);
    }

    /// Doubling an expression over and over ends in `Unknown` instead of growing without bound.
    #[test]
    fn growth_is_bounded() {
        let mut value = Value::Argument(0);
        for _ in 0..1000 {
            value = Value::binary(Operator::Add, value.clone(), value);
        }
        assert_eq!(value, Value::Unknown);
        let mut value = Value::Argument(0);
        for _ in 0..1000 {
            value = Value::load(value, 8, 8);
        }
        assert_eq!(value, Value::Unknown);
    }
}
