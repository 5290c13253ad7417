//! The list of shapes (`rb_shape_t`, shape.h), which gives the number of instance variables of an object, from 3.2 on.
//!
//! Up to 3.4 `rb_shape_get_shape_by_id` is exported, which returns the address of a shape; 4.0 exports the variable
//! `rb_shape_tree`, whose first member is the list.

use serde::{Deserialize, Serialize};

use super::NotDerived;
use crate::{
    address::Svma,
    ruby::{
        code::Code,
        eval::{Machine, Value},
    },
};

const FUNCTION: &str = "rb_shape_get_shape_by_id";
const VARIABLE: &str = "rb_shape_tree";
/// `sizeof(rb_shape_t)` in 4.0 (shape.h).
const SIZE: u32 = 40;
/// Upper bound of plausible offsets and sizes.
const MAX: i64 = 1 << 16;

/// Where the list of shapes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShapeList {
    /// The variable with the pointer to the list, or to the structure that contains that pointer.
    pub variable: Svma,
    /// Byte offset of the pointer to the list in that structure; `None` if the variable itself is that pointer.
    pub field: Option<u32>,
    /// Size of a shape, bytes.
    pub size: u32,
}

pub(super) fn derive(code: &Code<'_>) -> Result<ShapeList, NotDerived> {
    if let Some(symbol) = code.image.symbol(VARIABLE) {
        return Ok(ShapeList { variable: symbol.address, field: None, size: SIZE });
    }
    let function = code.image.symbol(FUNCTION).ok_or(NotDerived::Missing(FUNCTION.into()))?.address;
    let address_of = |id: i64| {
        let mut machine = Machine::new(code, 0);
        machine.set_argument(0, Value::Constant(id));
        machine.run(function)
    };
    let list = address_of(0);
    let shape = |value: &Value| NotDerived::Shape(value.to_string());
    let (variable, field) = pointer(&list).ok_or_else(|| shape(&list))?;
    let behind = |id: i64| match address_of(id).split() {
        (base, offset) if base == list => Ok(offset),
        (base, _) => Err(shape(&base)),
    };
    let size = behind(1)?;
    if !(1..MAX).contains(&size) || behind(7)? != 7 * size {
        return Err(NotDerived::Contradiction(format!("{FUNCTION} has shapes of {size} bytes")));
    }
    Ok(ShapeList { variable, field, size: size as u32 })
}

/// `[@variable]` or `[[@variable] + field]`.
fn pointer(value: &Value) -> Option<(Svma, Option<u32>)> {
    let Value::Load { base, offset: field @ 0..MAX, size: 8 } = value else { return None };
    match &**base {
        Value::Image(address) => Some((Svma(address.wrapping_add_signed(*field)), None)),
        Value::Load { base, offset, size: 8 } => match **base {
            Value::Image(address) => Some((Svma(address.wrapping_add_signed(*offset)), Some(*field as u32))),
            _ => None,
        },
        _ => None,
    }
}
