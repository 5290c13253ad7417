//! Converts a symbolic value to a sum over the objspace.

use gctrace_common::config::Span;

use super::thread::{Chain, Shortcut};
use super::{NotDerived, Session};
use crate::ruby::eval::{OBJECT_CACHE, Operator, Sum, Value};
use crate::ruby::formula::{Formula, Piece};
use crate::ruby::stat::Sign;

/// Upper bound of plausible offsets in an objspace.
const MAX_OFFSET: i64 = 1 << 16;

impl Formula {
    /// Reads a value as a formula.
    pub(super) fn of(value: &Value, session: &Session<'_>) -> Result<Self, NotDerived> {
        let shape = || NotDerived::Shape(shortened(value));
        let (sum, divisor) = divided(value);
        let mut outside = 0;
        let mut terms = Vec::new();
        for (factor, term) in as_sum(sum).ok_or_else(shape)? {
            match (factor, field(term, session)) {
                (1, Some(piece)) => terms.push((Sign::Plus, piece)),
                (-1, Some(piece)) => terms.push((Sign::Minus, piece)),
                (_, None) if !term.reads_from(&session.objspace) => outside += 1,
                _ => return Err(shape()),
            }
        }
        if terms.is_empty() {
            return Err(shape());
        }
        terms.sort_unstable();
        Ok(Self { terms, divisor, outside })
    }
}

fn as_sum(value: &Value) -> Option<Vec<(i64, &Value)>> {
    match value {
        Value::Load { .. } => Some(vec![(1, value)]),
        Value::Sum(sum) => {
            let Sum { constant: 0, terms, .. } = &**sum else { return None };
            Some(terms.iter().map(|(factor, value)| (*factor, value)).collect())
        }
        _ => None,
    }
}

/// A field of the objspace, a field behind a pointer in it, or a field of the Ractor's object cache.
pub(super) fn field(value: &Value, session: &Session<'_>) -> Option<Piece> {
    let objspace = &session.objspace;
    let &Value::Load { ref base, offset, size } = value else { return None };
    let inside = |offset: i64| u32::try_from(offset).ok().filter(|_| offset < MAX_OFFSET);
    if **base == *objspace {
        return Some(Piece::direct(inside(offset)?, size));
    }
    if **base == OBJECT_CACHE {
        return Some(Piece { via: Span::CACHE, offset: inside(offset)?, size });
    }
    match &**base {
        Value::Load { base, offset: pointer, size: 8 } if **base == *objspace => {
            Some(Piece { via: u16::try_from(*pointer).ok()?, offset: inside(offset)?, size })
        }
        base => {
            let mut seen = session.thread.borrow_mut();
            let same_way = match (Chain::of(base), Shortcut::of(base, session)) {
                (Some(chain), _) => seen.meets(chain),
                (None, Some(shortcut)) => seen.meets_shortcut(shortcut),
                (None, None) => false,
            };
            same_way.then_some(Piece { via: Span::CACHE, offset: inside(offset)?, size })
        }
    }
}

/// Strips a division by a constant: a `div`, or the multiplication by the reciprocal that compilers emit for it.
fn divided(value: &Value) -> (&Value, u64) {
    let found = match value {
        Value::Binary(Operator::Divide, dividend, divisor) => match **divisor {
            Value::Constant(divisor @ 2..) => Some((&**dividend, divisor.cast_unsigned())),
            _ => None,
        },
        Value::Binary(Operator::ShiftRight, product, count) => match (&**product, &**count) {
            (Value::Binary(Operator::MultiplyHigh, a, b), Value::Constant(shift @ 0..=62)) => {
                reciprocal(a, b, *shift as u32)
            }
            _ => None,
        },
        Value::Binary(Operator::MultiplyHigh, a, b) => reciprocal(a, b, 0),
        _ => None,
    };
    let Some((dividend, divisor)) = found else { return (value, 1) };
    // A shift before the multiplication divides as well: ⌊⌊x / 2ⁿ⌋ / d⌋ = ⌊x / (2ⁿ d)⌋.
    if let Value::Binary(Operator::ShiftRight, shifted, count) = dividend
        && let Value::Constant(count @ 0..=31) = **count
        && let Some(whole) = divisor.checked_mul(1 << count)
    {
        return (shifted, whole);
    }
    (dividend, divisor)
}

/// `⌊x · factor / 2⁶⁴⁺ˢʰⁱᶠᵗ⌋` is `⌊x / d⌋` for every 64-bit x if `0 < factor · d - 2⁶⁴⁺ˢʰⁱᶠᵗ ≤ 2ˢʰⁱᶠᵗ` (Granlund and
/// Montgomery, "Division by invariant integers using multiplication", theorem 4.2).
fn reciprocal<'a>(a: &'a Value, b: &'a Value, shift: u32) -> Option<(&'a Value, u64)> {
    let (dividend, factor) = match (a, b) {
        (value, Value::Constant(factor)) | (Value::Constant(factor), value) => {
            (value, factor.cast_unsigned())
        }
        _ => return None,
    };
    let power = 1_u128 << (64 + shift);
    let divisor = power.checked_div(factor.into())? + 1;
    let excess = u128::from(factor).checked_mul(divisor)?.checked_sub(power)?;
    (excess <= 1 << shift).then_some((dividend, u64::try_from(divisor).ok()?))
}

fn shortened(value: &Value) -> String {
    const LONGEST: usize = 160;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::derive::tests::session;

    fn field(offset: i64) -> Value {
        Value::load(session(|session| session.objspace.clone()), offset, 8)
    }

    fn formula(value: &Value) -> Result<Formula, NotDerived> {
        session(|session| Formula::of(value, session))
    }

    fn binary(operator: Operator, left: Value, right: Value) -> Value {
        Value::binary(operator, left, right)
    }

    /// Nanoseconds are converted to milliseconds by `div`, or by the reciprocal as gcc and clang emit it.
    #[test]
    fn divisions() {
        let product = binary(Operator::MultiplyHigh, field(8), Value::Constant(0x431b_de82_d7b6_34db));
        let reciprocal = binary(Operator::ShiftRight, product, Value::Constant(18));
        let plain = binary(Operator::Divide, field(8), Value::Constant(1_000_000));
        for value in [reciprocal, plain] {
            let formula = formula(&value).unwrap();
            assert_eq!(formula.divisor, 1_000_000);
            assert_eq!(formula.terms, [(Sign::Plus, Piece::direct(8, 8))]);
        }
        let product = binary(Operator::MultiplyHigh, field(8), Value::Constant(0x431b_de82_d7b6_35db));
        let off = binary(Operator::ShiftRight, product, Value::Constant(18));
        assert!(formula(&off).is_err());
    }

    /// Only sums of whole fields are accepted; terms that lie elsewhere are counted, constants and multiples are refused.
    #[test]
    fn shapes() {
        let behind = Value::load(field(0x40), 0, 8);
        let elsewhere = Value::load(Value::Argument(1), 8, 8);
        let sum = binary(Operator::Subtract, binary(Operator::Add, behind, elsewhere.clone()), field(16));
        let found = formula(&sum).unwrap();
        let through = Piece { via: 0x40, offset: 0, size: 8 };
        assert_eq!(found.terms, [(Sign::Plus, through), (Sign::Minus, Piece::direct(16, 8))]);
        assert_eq!(found.outside, 1);
        let double = binary(Operator::Add, field(8), field(8));
        let more = binary(Operator::Add, field(8), Value::Constant(1));
        let far = Value::load(session(|session| session.objspace.clone()), 1 << 20, 8);
        for value in [double, more, far, elsewhere, Value::Unknown, Value::Constant(0)] {
            assert!(formula(&value).is_err(), "{value}");
        }
    }
}
