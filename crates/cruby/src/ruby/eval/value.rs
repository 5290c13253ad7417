//! Symbolic values.

use std::fmt;
use std::rc::Rc;

/// Expressions with more nodes than this become [`Value::Unknown`]. The limit keeps comparisons cheap: code that combines
/// values repeatedly would otherwise double the expression with each instruction. The longest legitimate expression, the
/// free slots of five size pools, has about a hundred nodes.
const MAX_WEIGHT: u32 = 320;

/// The known contents of a register or memory word.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// The address of a thread-local variable: thread block of the image plus this many bytes.
    TlsAddress(i64),
    /// The thread pointer (base of the fs segment).
    ThreadPointer,
    /// The offset of that thread-local address from the thread pointer.
    TlsDistance(i64),
    /// The memory at `base + offset`, zero-extended from `size` bytes. The base has no constant part of its own.
    Load {
        /// The address.
        base: Rc<Value>,
        /// Bytes added to it.
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
    /// A sum, modulo 2⁶⁴.
    Sum(Rc<Sum>),
    /// The result of an operation.
    Binary(Operator, Rc<Value>, Rc<Value>),
    /// Known in its lowest `size` bytes only.
    Low {
        /// The contents of the low bytes.
        value: Rc<Value>,
        /// Number of known bytes.
        size: u8,
    },
}

/// `constant + Σ factor · value`: at least one term, no duplicate value, no factor 0, sorted by value. Equal sums are
/// therefore equal values, in whatever order the code adds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sum {
    /// The constant part.
    pub(crate) constant: i64,
    /// Factors and values.
    pub(crate) terms: Vec<(i64, Value)>,
    weight: u32,
}

/// An operation on two values, modulo 2⁶⁴.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operator {
    /// Sum.
    Add,
    /// Difference.
    Subtract,
    /// Product.
    Multiply,
    /// The upper 64 bits of the unsigned 128-bit product.
    MultiplyHigh,
    /// Unsigned quotient.
    Divide,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Left shift.
    ShiftLeft,
    /// Right shift. An arithmetic shift counts as well: the derived values are sizes, below 2⁶³.
    ShiftRight,
    /// Sign extension from the number of bytes in the right operand.
    SignExtend,
}

impl Operator {
    /// The operation on numbers; `None` for a division by zero.
    pub(super) fn apply(self, left: u64, right: u64) -> Option<u64> {
        Some(match self {
            Self::Add => left.wrapping_add(right),
            Self::Subtract => left.wrapping_sub(right),
            Self::Multiply => left.wrapping_mul(right),
            Self::MultiplyHigh => ((u128::from(left) * u128::from(right)) >> 64) as u64,
            Self::Divide => left.checked_div(right)?,
            Self::And => left & right,
            Self::Or => left | right,
            Self::Xor => left ^ right,
            Self::ShiftLeft => left << (right & 63),
            Self::ShiftRight => left >> (right & 63),
            Self::SignExtend => sign_extend(left, right as u8),
        })
    }
}

fn sign_extend(value: u64, size: u8) -> u64 {
    let unused = 64 - u32::from(size.clamp(1, 8)) * 8;
    ((value << unused).cast_signed() >> unused).cast_unsigned()
}

/// All ones in this many bytes.
pub(super) fn mask(size: u8) -> u64 {
    u64::MAX >> (64 - u32::from(size.clamp(1, 8)) * 8)
}

impl Value {
    /// The memory of `size` bytes at an address.
    pub(crate) fn memory(address: Self, size: u8) -> Self {
        let (base, offset) = address.split();
        Self::load(base, offset, size)
    }

    /// The memory at `base + offset`.
    pub(crate) fn load(base: Self, offset: i64, size: u8) -> Self {
        if base.is_opaque() || base.weight() >= MAX_WEIGHT {
            return Self::Unknown;
        }
        Self::Load { base: Rc::new(base), offset, size }
    }

    /// Bit `bit` of `word`.
    pub(crate) fn bit(word: Self, bit: u32) -> Self {
        if word.is_opaque() || word.weight() >= MAX_WEIGHT {
            return Self::Unknown;
        }
        if let Self::Constant(number) = word {
            return Self::Constant(number >> bit.min(63) & 1);
        }
        Self::Bit { word: Rc::new(word), bit }
    }

    /// The value with only its lowest `size` bytes known.
    pub(super) fn low(self, size: u8) -> Self {
        if self == Self::Unknown { Self::Unknown } else { Self::Low { value: Rc::new(self), size } }
    }

    /// The lowest `size` bytes, zero-extended.
    pub(super) fn truncated(self, size: u8) -> Self {
        match self {
            Self::Low { value, size: known } if size <= known => (*value).clone().truncated(size),
            Self::Low { .. } => self,
            value if size >= 8 => value,
            Self::Load { base, offset, size: all } if size < all => Self::Load { base, offset, size },
            value => Self::binary(Operator::And, value, Self::Constant(mask(size).cast_signed())),
        }
    }

    /// The value with its lowest `size` bytes replaced.
    pub(super) fn with_low(&self, low: Self, size: u8) -> Self {
        let low = low.truncated(size);
        if self.is_opaque() || low.is_opaque() {
            return low.low(size);
        }
        let rest = Self::binary(Operator::And, self.clone(), Self::Constant(!mask(size).cast_signed()));
        match rest {
            Self::Constant(_) => Self::binary(Operator::Or, low, rest),
            _ => low.low(size),
        }
    }

    /// The integer that the value represents as a Fixnum (2 n + 1), if it certainly is one.
    pub(crate) fn fixnum(self) -> Option<Self> {
        let marked = Self::binary(Operator::And, self.clone(), Self::Constant(1)) == Self::Constant(1);
        marked.then(|| Self::binary(Operator::ShiftRight, self, Self::Constant(1)))
    }

    /// If the value is non-zero exactly when one bit of a word is set: that bit.
    pub(super) fn single_bit(&self) -> Option<Self> {
        match self {
            Self::Bit { .. } => Some(self.clone()),
            Self::Binary(Operator::And, word, mask) => match **mask {
                Self::Constant(mask) if mask.count_ones() == 1 => {
                    Some(Self::bit((**word).clone(), mask.trailing_zeros()))
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// The operation on two values, simplified where this keeps addresses and sums recognisable.
    pub(crate) fn binary(operator: Operator, left: Self, right: Self) -> Self {
        use Operator::{Add, And, Divide, Multiply, Or, ShiftLeft, ShiftRight, SignExtend, Subtract, Xor};
        if let (And, Self::Low { value, size }, Self::Constant(bits @ 0..)) = (operator, &left, &right)
            && bits.cast_unsigned() <= mask(*size)
        {
            return Self::binary(And, (**value).clone().truncated(*size), right);
        }
        if left.is_opaque() || right.is_opaque() {
            return Self::Unknown;
        }
        if let (Self::Constant(a), Self::Constant(b)) = (&left, &right) {
            let number = operator.apply(a.cast_unsigned(), b.cast_unsigned());
            return number.map_or(Self::Unknown, |number| Self::Constant(number.cast_signed()));
        }
        match (operator, &left, &right) {
            (Add, ..) => return Self::combine(left, &right, 1),
            (Subtract, ..) => return Self::combine(left, &right, -1),
            (Multiply, value, Self::Constant(factor)) | (Multiply, Self::Constant(factor), value) => {
                return Self::combine(Self::Constant(0), value, *factor);
            }
            (ShiftLeft, value, Self::Constant(count @ 0..=63)) => {
                return Self::combine(Self::Constant(0), value, 1 << count);
            }
            (And, Self::Constant(_), _) => return Self::binary(And, right, left),
            (And, _, Self::Constant(mask)) => {
                if let Some(simple) = left.masked(*mask) {
                    return simple;
                }
            }
            (Or | Xor | ShiftRight, _, Self::Constant(0)) | (Divide, _, Self::Constant(1)) => return left,
            (Or, Self::Sum(sum), Self::Constant(1)) if sum.is_multiple_of(2) && sum.constant % 2 == 0 => {
                return Self::combine(left, &right, 1);
            }
            (Xor, ..) if left == right => return Self::Constant(0),
            (SignExtend, _, Self::Constant(size)) if *size >= 8 || i64::from(left.bits()) < size * 8 => {
                return left;
            }
            // Sizes are below 2⁶², so that doubling one (to make a Fixnum of it) loses nothing.
            (ShiftRight, Self::Sum(sum), Self::Constant(count @ 1..=8)) if sum.is_multiple_of(1 << count) => {
                let terms = sum.terms.iter().map(|(factor, value)| (factor >> count, value.clone()));
                return Self::sum(sum.constant >> count, terms.collect());
            }
            _ => {}
        }
        if left.weight().saturating_add(right.weight()) >= MAX_WEIGHT {
            return Self::Unknown;
        }
        Self::Binary(operator, Rc::new(left), Rc::new(right))
    }

    /// `self & mask`, if that can be simplified.
    fn masked(&self, mask: i64) -> Option<Self> {
        if mask == 0 {
            return Some(Self::Constant(0));
        }
        match self {
            // Aligns the stack pointer: slots stay distinct, which is all that matters.
            Self::Stack(_) if mask < 0 => Some(self.clone()),
            Self::Binary(Operator::And, value, inner) => {
                let Self::Constant(inner) = **inner else { return None };
                Some(Self::binary(Operator::And, (**value).clone(), Self::Constant(inner & mask)))
            }
            Self::Sum(sum) if mask > 0 && mask.count_ones() == mask.trailing_ones() && mask < 0x100 => {
                sum.is_multiple_of(mask + 1).then_some(Self::Constant(sum.constant & mask))
            }
            _ => {
                let covered = u64::MAX.checked_shr(64 - self.bits()).unwrap_or(0);
                if covered & mask.cast_unsigned() == 0 {
                    return Some(Self::Constant(0));
                }
                (covered & !mask.cast_unsigned() == 0).then(|| self.clone())
            }
        }
    }

    /// `left + factor · right`
    fn combine(left: Self, right: &Self, factor: i64) -> Self {
        let (constant, mut terms) = left.into_parts();
        let (added, more) = right.clone().into_parts();
        for (its, value) in more {
            terms.push((its.wrapping_mul(factor), value));
        }
        Self::sum(constant.wrapping_add(added.wrapping_mul(factor)), terms)
    }

    /// The value as constant and terms; an address is relative to the start of the object that it lies in.
    fn into_parts(self) -> (i64, Vec<(i64, Self)>) {
        match self {
            Self::Constant(constant) => (constant, Vec::new()),
            Self::Image(address) => (address.cast_signed(), vec![(1, Self::Image(0))]),
            Self::Stack(offset) => (offset, vec![(1, Self::Stack(0))]),
            Self::TlsAddress(offset) => (offset, vec![(1, Self::TlsAddress(0))]),
            Self::TlsDistance(offset) => (offset, vec![(1, Self::TlsDistance(0))]),
            Self::Sum(sum) => (sum.constant, sum.terms.clone()),
            other => (0, vec![(1, other)]),
        }
    }

    fn sum(constant: i64, mut terms: Vec<(i64, Self)>) -> Self {
        terms.sort_by(|a, b| a.1.cmp(&b.1));
        terms.dedup_by(|next, kept| {
            let same = next.1 == kept.1;
            if same {
                kept.0 = kept.0.wrapping_add(next.0);
            }
            same
        });
        terms.retain(|(factor, _)| *factor != 0);
        match &terms[..] {
            [] => return Self::Constant(constant),
            [(1, Self::Image(_))] => return Self::Image(constant.cast_unsigned()),
            [(1, Self::Stack(_))] => return Self::Stack(constant),
            [(1, Self::TlsDistance(_))] => return Self::TlsDistance(constant),
            [(1, Self::TlsAddress(_))] | [(1, Self::ThreadPointer), (1, Self::TlsDistance(_))] => {
                return Self::TlsAddress(constant);
            }
            [(1, value)] if constant == 0 => return value.clone(),
            _ => {}
        }
        let weight = terms.iter().fold(1_u32, |sum, (_, value)| sum.saturating_add(value.weight()));
        if weight >= MAX_WEIGHT {
            return Self::Unknown;
        }
        Self::Sum(Rc::new(Sum { constant, terms, weight }))
    }

    /// An address as base and offset.
    pub(crate) fn split(self) -> (Self, i64) {
        match self {
            Self::Sum(sum) => (Self::sum(0, sum.terms.clone()), sum.constant),
            other => (other, 0),
        }
    }

    /// Whether nothing can be computed from it.
    fn is_opaque(&self) -> bool {
        matches!(self, Self::Unknown | Self::Low { .. })
    }

    /// Whether the value depends on the contents of memory, or is unknown.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Unknown | Self::Low { .. } | Self::Load { .. } => true,
            Self::Bit { word, .. } => word.is_open(),
            Self::Sum(sum) => sum.terms.iter().any(|(_, value)| value.is_open()),
            Self::Binary(_, left, right) => left.is_open() || right.is_open(),
            _ => false,
        }
    }

    fn weight(&self) -> u32 {
        match self {
            Self::Load { base, .. } => base.weight() + 1,
            Self::Bit { word, .. } | Self::Low { value: word, .. } => word.weight() + 1,
            Self::Sum(sum) => sum.weight,
            Self::Binary(_, left, right) => left.weight() + right.weight() + 1,
            _ => 1,
        }
    }

    /// No bit from this number on is set.
    fn bits(&self) -> u32 {
        match self {
            Self::Constant(number) => 64 - number.leading_zeros(),
            Self::Load { size, .. } => u32::from(*size) * 8,
            Self::Bit { .. } => 1,
            Self::Binary(Operator::And, left, right) => left.bits().min(right.bits()),
            Self::Binary(Operator::Or | Operator::Xor, left, right) => left.bits().max(right.bits()),
            Self::Binary(Operator::ShiftRight, left, right) => match **right {
                Self::Constant(count @ 0..=63) => left.bits().saturating_sub(count as u32),
                _ => left.bits(),
            },
            Self::Binary(Operator::Divide, left, _) => left.bits(),
            _ => 64,
        }
    }

    /// Whether the value contains memory that lies directly behind this base.
    pub(crate) fn reads_from(&self, object: &Self) -> bool {
        let mut found = false;
        self.for_each_load(&mut |base, _, _| {
            found |= base == object || base.reads_from(object);
        });
        found
    }

    /// The loads in the value, outermost only.
    pub(crate) fn for_each_load(&self, visit: &mut impl FnMut(&Self, i64, u8)) {
        match self {
            Self::Load { base, offset, size } => visit(base, *offset, *size),
            Self::Bit { word, .. } | Self::Low { value: word, .. } => word.for_each_load(visit),
            Self::Sum(sum) => sum.terms.iter().for_each(|(_, value)| value.for_each_load(visit)),
            Self::Binary(_, left, right) => {
                left.for_each_load(visit);
                right.for_each_load(visit);
            }
            _ => {}
        }
    }

    /// If the value is a single bit of memory: base, byte offset and bit number in that byte, from the lowest.
    pub(crate) fn as_memory_bit(&self) -> Option<(&Value, i64, u32)> {
        let (word, bit) = self.as_bit()?;
        let Self::Load { base, offset, size } = word else { return None };
        (bit < u32::from(*size) * 8).then_some((base, *offset, bit))
    }

    fn as_bit(&self) -> Option<(&Value, u32)> {
        match self {
            Self::Low { value, .. } => value.as_bit(),
            Self::Bit { word, bit } => match &**word {
                // The word was shifted before it was tested.
                Self::Binary(Operator::ShiftRight, word, count) => Some((word, bit + count.as_bit_number()?)),
                _ => Some((word, *bit)),
            },
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

impl Sum {
    fn is_multiple_of(&self, number: i64) -> bool {
        self.terms.iter().all(|(factor, _)| factor % number == 0)
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
            Self::ThreadPointer => f.write_str("fs"),
            Self::TlsDistance(offset) => write!(f, "(&tls{offset:+} - fs)"),
            Self::Load { base, offset, size } => write!(f, "[{base}+{offset:#x}]:{size}"),
            Self::Bit { word, bit } => write!(f, "({word} bit {bit})"),
            Self::Sum(sum) => {
                write!(f, "({:#x}", sum.constant)?;
                sum.terms.iter().try_for_each(|(factor, value)| match factor {
                    1 => write!(f, " + {value}"),
                    -1 => write!(f, " - {value}"),
                    factor => write!(f, " + {factor}·{value}"),
                })?;
                f.write_str(")")
            }
            Self::Binary(operator, left, right) => write!(f, "({left} {operator:?} {right})"),
            Self::Low { value, size } => write!(f, "{value} in the low {size} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(offset: i64, size: u8) -> Value {
        Value::load(Value::Argument(0), offset, size)
    }

    fn binary(operator: Operator, left: Value, right: i64) -> Value {
        Value::binary(operator, left, Value::Constant(right))
    }

    /// All ways in which compilers isolate one bit of a bit field are recognised.
    #[test]
    fn bit_shapes() {
        let byte = || field(0x10, 1);
        let shift_then_mask = binary(Operator::And, binary(Operator::ShiftRight, byte(), 5), 1);
        let mask_then_shift = binary(Operator::ShiftRight, binary(Operator::And, byte(), 32), 5);
        for value in [shift_then_mask, mask_then_shift, Value::bit(byte(), 5)] {
            assert_eq!(value.as_memory_bit(), Some((&Value::Argument(0), 0x10, 5)), "{value}");
        }
        let top = binary(Operator::ShiftRight, byte(), 7);
        assert_eq!(top.as_memory_bit().unwrap().2, 7);
        assert_eq!(binary(Operator::And, byte(), 1).as_memory_bit().unwrap().2, 0);
        assert_eq!(binary(Operator::And, byte(), 3).as_memory_bit(), None);
    }

    /// Combining an expression repeatedly ends in `Unknown` instead of unbounded growth.
    #[test]
    fn growth_is_bounded() {
        for operator in [Operator::Or, Operator::MultiplyHigh, Operator::Divide] {
            let mut value = Value::Argument(0);
            for _ in 0..1000 {
                value = Value::binary(operator, value.clone(), value);
            }
            assert_eq!(value, Value::Unknown);
        }
        let mut value = Value::Argument(0);
        for _ in 0..1000 {
            value = Value::load(value, 8, 8);
        }
        assert_eq!(value, Value::Unknown);
        let sum =
            (0..1000).fold(Value::Constant(0), |sum, at| Value::binary(Operator::Add, sum, field(at, 8)));
        assert_eq!(sum, Value::Unknown);
    }

    /// Sums are equal whatever the order of their terms; a term that is subtracted again disappears.
    #[test]
    fn sums_are_canonical() {
        let (a, b) = (field(8, 8), field(16, 8));
        let add = |x: &Value, y: &Value| Value::binary(Operator::Add, x.clone(), y.clone());
        assert_eq!(add(&a, &b), add(&b, &a));
        assert_eq!(Value::binary(Operator::Subtract, add(&a, &b), a.clone()), b);
        let address = binary(Operator::Add, binary(Operator::Add, add(&a, &b), 24), -8);
        assert_eq!(Value::memory(address, 4), Value::load(add(&a, &b), 16, 4));
        let distance = Value::binary(Operator::Subtract, Value::Image(0x100), Value::Image(0x40));
        assert_eq!(distance, Value::Constant(0xc0));
        let tls = Value::binary(Operator::Add, Value::TlsDistance(8), Value::ThreadPointer);
        assert_eq!(tls, Value::TlsAddress(8));
    }

    /// A size converted to a Fixnum (2 x + 1) and back is the same size, and is recognised as a Fixnum.
    #[test]
    fn fixnums() {
        let size = field(8, 8);
        let fixnum = binary(Operator::Add, binary(Operator::ShiftLeft, size.clone(), 1), 1);
        assert_eq!(binary(Operator::And, fixnum.clone(), 1), Value::Constant(1));
        assert_eq!(
            binary(Operator::And, fixnum.clone(), 3),
            Value::Binary(Operator::And, Rc::new(fixnum.clone()), Rc::new(Value::Constant(3)),)
        );
        assert_eq!(fixnum.fixnum(), Some(size.clone()));
        assert_eq!(size.fixnum(), None);
    }

    /// Narrow reads of a word are reads of its low bytes; masks that change nothing disappear.
    #[test]
    fn truncation() {
        assert_eq!(field(16, 4).truncated(1), field(16, 1));
        assert_eq!(field(16, 4).truncated(8), field(16, 4));
        assert_eq!(binary(Operator::And, field(16, 1), 0xffff), field(16, 1));
        assert_eq!(Value::Constant(-1).truncated(4), Value::Constant(0xffff_ffff));
        assert_eq!(field(16, 4).low(2).truncated(1), field(16, 1));
        assert_eq!(field(16, 4).low(2).truncated(4), field(16, 4).low(2));
        // `mov al, [x]; and eax, 1`
        assert_eq!(binary(Operator::And, field(16, 1).low(1), 1), binary(Operator::And, field(16, 1), 1));
        assert_eq!(binary(Operator::And, field(16, 1).low(1), 0x100), Value::Unknown);
    }
}
