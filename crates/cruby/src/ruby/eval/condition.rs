//! What the flags determine, and the numbers that decide conditions which the code leaves open.

use std::collections::BTreeMap;

use iced_x86::ConditionCode;

use super::value::{Value, mask};

/// The state of the flags after the last instruction that set them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Flags {
    /// Nothing is known.
    Unknown,
    /// `left - right`, both of `size` bytes. A test or logical operation compares its result with 0.
    Compare { left: Value, right: Value, size: u8 },
    /// The carry flag equals this bit.
    Carry(Value),
    /// Zero and sign flag describe a result of `size` bytes; carry and overflow flag are unknown.
    Result { value: Value, size: u8 },
    /// As `Result`; in addition, the carry flag is set if the value is not 0 (`neg`).
    Negated { value: Value, size: u8 },
}

impl Flags {
    /// The outcome of a condition on the flags (b, e, be, s, l or le; the other conditions are their opposites), with the
    /// values that `number` gives; `None` if the flags do not determine it.
    pub(super) fn holds(&self, code: ConditionCode, number: impl Fn(&Value) -> Option<u64>) -> Option<bool> {
        use ConditionCode::{b, be, e, l, le, s};
        let sign = |value: u64, size: u8| value >> (u32::from(size.clamp(1, 8)) * 8 - 1) & 1 == 1;
        let result = |value: u64, size: u8| {
            let value = value & mask(size);
            match code {
                e => Some(value == 0),
                s => Some(sign(value, size)),
                _ => None,
            }
        };
        match self {
            Self::Unknown => None,
            Self::Compare { left, right, size } => {
                let (left, right) = (number(left)? & mask(*size), number(right)? & mask(*size));
                // Moves the sign up to bit 63, so that 64-bit comparisons work for every size.
                let unused = 64 - u32::from((*size).clamp(1, 8)) * 8;
                let signed = |value: u64| (value << unused).cast_signed();
                match code {
                    b => Some(left < right),
                    be => Some(left <= right),
                    l => Some(signed(left) < signed(right)),
                    le => Some(signed(left) <= signed(right)),
                    _ => result(left.wrapping_sub(right), *size),
                }
            }
            Self::Carry(bit) => match code {
                b => Some(number(bit)? & 1 == 1),
                _ => None,
            },
            Self::Result { value, size } => result(number(value)?, *size),
            Self::Negated { value, size } => match code {
                b => Some(number(value)? & mask(*size) != 0),
                _ => result(number(value)?.wrapping_neg(), *size),
            },
        }
    }

    /// If the condition holds exactly when one bit is set: that bit.
    pub(super) fn as_bit(&self, code: ConditionCode) -> Option<Value> {
        match (self, code) {
            (Self::Carry(bit), ConditionCode::b) => Some(bit.clone()),
            (
                Self::Compare { left: value, right: Value::Constant(0), .. } | Self::Result { value, .. },
                ConditionCode::ne,
            ) => value.single_bit(),
            _ => None,
        }
    }

    /// The values that the flags depend on.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        let (first, second) = match self {
            Self::Unknown => (None, None),
            Self::Compare { left, right, .. } => (Some(left), Some(right)),
            Self::Carry(value) | Self::Result { value, .. } | Self::Negated { value, .. } => {
                (Some(value), None)
            }
        };
        first.into_iter().chain(second)
    }

    /// Whether the outcome depends on the contents of memory, or is unknown.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Unknown => true,
            // Two addresses in the same object compare by their offsets.
            Self::Compare { left, right, .. } => {
                let difference = Value::binary(super::Operator::Subtract, left.clone(), right.clone());
                difference.is_open() && (left.is_open() || right.is_open())
            }
            _ => self.values().any(Value::is_open),
        }
    }
}

/// Assumed contents of memory. They make the code take one definite path; the conditions that depend on them are
/// recorded, and the caller decides whether the path was the right one.
#[derive(Clone, Debug)]
pub(crate) struct Assumptions {
    /// Address of the object whose fields are distinguished.
    pub(crate) object: Value,
    /// Its 32-bit words, by offset.
    pub(crate) words: BTreeMap<i64, u32>,
    /// Every other 64-bit word of it.
    pub(crate) field: u64,
    /// Every global variable.
    pub(crate) global: u64,
    /// Every other 64-bit word. As an object pointer it must be aligned and not an immediate value.
    pub(crate) other: u64,
    /// Every narrower field of other objects.
    pub(crate) narrow: u64,
}

impl Assumptions {
    /// The number that a value stands for.
    pub(crate) fn number(&self, value: &Value) -> Option<u64> {
        // The regions are far apart, and none of them contains address 0.
        const IMAGE: u64 = 0x5600_0000_0000;
        const STACK: u64 = 0x7ffc_0000_0000;
        const THREAD: u64 = 0x7e00_0000_0000;
        Some(match value {
            Value::Unknown | Value::Low { .. } => return None,
            Value::Constant(number) => number.cast_unsigned(),
            Value::Image(address) => IMAGE.wrapping_add(*address),
            Value::Stack(offset) => STACK.wrapping_add_signed(*offset),
            Value::TlsAddress(offset) => THREAD.wrapping_sub(0x1000).wrapping_add_signed(*offset),
            Value::ThreadPointer => THREAD,
            Value::TlsDistance(offset) => 0x1000_u64.wrapping_neg().wrapping_add_signed(*offset),
            Value::Argument(index) => 0x7d00_0000_0000 + (u64::from(*index) << 32),
            Value::Load { base, offset, size } => self.load(base, *offset, *size) & mask(*size),
            Value::Bit { word, bit } => self.number(word)?.checked_shr(*bit)? & 1,
            Value::Sum(sum) => {
                let mut total = sum.constant.cast_unsigned();
                for (factor, value) in &sum.terms {
                    total = total.wrapping_add(self.number(value)?.wrapping_mul(factor.cast_unsigned()));
                }
                total
            }
            Value::Binary(operator, left, right) => {
                operator.apply(self.number(left)?, self.number(right)?)?
            }
        })
    }

    fn load(&self, base: &Value, offset: i64, size: u8) -> u64 {
        match base {
            Value::Image(_) => self.global,
            base if *base != self.object => {
                if size == 8 {
                    self.other
                } else {
                    self.narrow
                }
            }
            _ => {
                let aligned = offset & !3;
                let word = |at| self.words.get(&at).copied().map(u64::from);
                match (word(aligned), word(aligned.saturating_add(4))) {
                    (None, None) => self.field,
                    (low, high) => {
                        let both = low.unwrap_or(0) | high.unwrap_or(0) << 32;
                        both >> ((offset - aligned) * 8)
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: &Value) -> Option<u64> {
        match value {
            Value::Constant(number) => Some(number.cast_unsigned()),
            _ => None,
        }
    }

    /// Signed and unsigned conditions at every size.
    #[test]
    fn comparisons() {
        let compare = |left: i64, right: i64, size| Flags::Compare {
            left: Value::Constant(left),
            right: Value::Constant(right),
            size,
        };
        for size in [1, 2, 4, 8] {
            let flags = compare(-1, 1, size);
            assert_eq!(flags.holds(ConditionCode::l, number), Some(true), "{size}");
            assert_eq!(flags.holds(ConditionCode::b, number), Some(false), "{size}");
            assert_eq!(flags.holds(ConditionCode::s, number), Some(true), "{size}");
        }
        assert_eq!(compare(0x100, 0, 1).holds(ConditionCode::e, number), Some(true));
        assert_eq!(compare(3, 3, 8).holds(ConditionCode::le, number), Some(true));
        assert_eq!(compare(3, 3, 8).holds(ConditionCode::p, number), None);
    }

    /// `neg` carries unless the value was 0, a bit test carries the bit, and other results do not determine the carry.
    #[test]
    fn carries() {
        let five = || Value::Constant(5);
        assert_eq!(Flags::Negated { value: five(), size: 4 }.holds(ConditionCode::b, number), Some(true));
        assert_eq!(Flags::Carry(Value::Constant(0)).holds(ConditionCode::b, number), Some(false));
        assert_eq!(Flags::Result { value: five(), size: 4 }.holds(ConditionCode::b, number), None);
        assert_eq!(Flags::Unknown.holds(ConditionCode::e, number), None);
    }

    /// Words of the object are distinguished, down to their bytes.
    #[test]
    fn words() {
        let object = Value::Argument(0);
        let words = BTreeMap::from([(16, 0x1122_3344)]);
        let assumed = Assumptions { object: object.clone(), words, field: 7, global: 1, other: 2, narrow: 3 };
        let load = |base: &Value, offset, size| assumed.number(&Value::load(base.clone(), offset, size));
        assert_eq!(load(&object, 16, 4), Some(0x1122_3344));
        assert_eq!(load(&object, 17, 1), Some(0x33));
        assert_eq!(load(&object, 16, 8), Some(0x1122_3344));
        assert_eq!(load(&object, 24, 8), Some(7));
        assert_eq!(load(&Value::Image(0x1000), 0, 8), Some(1));
        assert_eq!(load(&Value::Argument(1), 16, 8), Some(2));
        assert_eq!(load(&Value::Argument(1), 16, 4), Some(3));
    }
}
