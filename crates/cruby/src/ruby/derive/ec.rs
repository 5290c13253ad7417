//! The path to the running thread's execution context, and those of its fields that exported accessors reveal.

use serde::{Deserialize, Serialize};

use super::NotDerived;
use crate::address::Svma;
use crate::elf::ElfImage;
use crate::ruby::code::Code;
use crate::ruby::eval::{Machine, Value};

/// Number of conditional jumps in an accessor for which both directions are tried.
const BRANCHES: u32 = 3;
/// Upper bound of plausible offsets in the structures read here.
const MAX_OFFSET: i64 = 1 << 16;

/// Where the pointer to the running `rb_execution_context_t` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CurrentEc {
    /// A thread-local variable of the image, by its offset in the image's TLS block (`ruby_current_ec`, from 3.0 on).
    Tls(i64),
    /// A thread-local variable by its offset from the thread pointer (a static executable).
    ThreadPointer(i64),
    /// A global variable (`ruby_current_execution_context_ptr`, up to 2.7).
    Global(Svma),
}

impl CurrentEc {
    /// The place of a variable, from its address.
    pub(super) fn at(base: &Value, offset: i64) -> Option<Self> {
        match *base {
            Value::TlsAddress(at) => Some(Self::Tls(at.wrapping_add(offset))),
            Value::ThreadPointer => Some(Self::ThreadPointer(offset)),
            Value::Image(address) if offset == 0 => Some(Self::Global(Svma(address))),
            _ => None,
        }
    }
}

/// What is needed to walk from an event to the Ruby stack; byte offsets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EcLayout {
    /// The pointer to the running context.
    pub current_ec: Result<CurrentEc, NotDerived>,
    /// For [`CurrentEc::Tls`]: the slot with the image's TLS module id.
    pub module: Option<Svma>,
    /// Size in bytes of an entry of the dynamic thread vector of the C library that the image needs; 0 if the library is unknown.
    pub dtv_entry: u32,
    /// `ec.thread_ptr`.
    pub thread_ptr: Result<u32, NotDerived>,
    /// `th.self`.
    pub thread_self: Result<u32, NotDerived>,
    /// `ec.errinfo`.
    pub errinfo: Result<u32, NotDerived>,
    /// `ec.cfp`.
    pub cfp: Result<u32, NotDerived>,
}

pub(super) fn derive(code: &Code<'_>) -> EcLayout {
    let thread = chain(code, "rb_thread_current", 2);
    let ec = thread.as_ref().map_err(Clone::clone).and_then(|(ec, ..)| Ok((current(ec)?, ec.clone())));
    // A field of the same context, from an accessor that returns it or something it points to.
    let field = |function, deref| {
        let (_, ec) = ec.as_ref().map_err(Clone::clone)?;
        let (its, offsets, _) = chain(code, function, deref)?;
        if its != *ec {
            return Err(NotDerived::Contradiction(format!("{function} reaches another context: {its}")));
        }
        Ok(offsets[0])
    };
    let offset = |index: usize| thread.as_ref().map(|(_, offsets, _)| offsets[index]).map_err(Clone::clone);
    EcLayout {
        current_ec: ec.as_ref().map(|(current, _)| *current).map_err(Clone::clone),
        module: thread.as_ref().ok().and_then(|(.., module)| *module),
        dtv_entry: dtv_entry(code.image),
        thread_ptr: offset(0),
        thread_self: offset(1),
        errinfo: field("rb_errinfo", 1),
        cfp: field("rb_current_receiver", 2),
    }
}

fn current(ec: &Value) -> Result<CurrentEc, NotDerived> {
    let place = match ec {
        Value::Load { base, offset, size: 8 } => CurrentEc::at(base, *offset),
        _ => None,
    };
    place.ok_or_else(|| NotDerived::Shape(ec.to_string()))
}

/// The base of an accessor, the offsets that it follows, and the TLS module slot that it used.
type Chained = (Value, Vec<u32>, Option<Svma>);

/// Evaluates an accessor that returns `[[base + a] + b]…` with this many offsets: the base and the offsets.
fn chain(code: &Code<'_>, function: &'static str, levels: usize) -> Result<Chained, NotDerived> {
    let address = code.image.symbol(function).ok_or(NotDerived::Missing(function.into()))?.address;
    let mut last = Value::Unknown;
    for choices in 0..1 << BRANCHES {
        let mut machine = Machine::new(code, choices);
        let value = machine.run(address);
        if let Some((base, offsets)) = unwound(&value, levels)
            && current(&base).is_ok()
        {
            return Ok((base, offsets, machine.tls_module()));
        }
        last = value;
    }
    if last == Value::Unknown {
        Err(NotDerived::Lost(function.into()))
    } else {
        Err(NotDerived::Shape(last.to_string()))
    }
}

/// Size in bytes of an entry of the dynamic thread vector of the C library that an image needs; 0 if that is neither glibc nor musl
/// (which Alpine calls `libc.musl-x86_64.so.1` and its authors `libc.so`).
pub(super) fn dtv_entry(image: &ElfImage) -> u32 {
    dtv_entry_of(image.needed())
}

fn dtv_entry_of(needed: &[String]) -> u32 {
    const GLIBC: u32 = 16;
    const MUSL: u32 = 8;
    let needs = |wanted: fn(&str) -> bool| needed.iter().any(|name| wanted(name));
    if needs(|name| name == "libc.so.6") {
        GLIBC
    } else if needs(|name| name == "libc.so" || name.starts_with("libc.musl")) {
        MUSL
    } else {
        0
    }
}

fn unwound(value: &Value, levels: usize) -> Option<(Value, Vec<u32>)> {
    let mut offsets = Vec::new();
    let mut value = value;
    for _ in 0..levels {
        let Value::Load { base, offset: offset @ 0..MAX_OFFSET, size: 8 } = value else { return None };
        offsets.push(*offset as u32);
        value = base;
    }
    offsets.reverse();
    Some((value.clone(), offsets))
}

#[cfg(test)]
mod tests {
    use super::dtv_entry_of;

    #[test]
    fn c_libraries() {
        let entry =
            |needed: &[&str]| dtv_entry_of(&needed.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(entry(&["libz.so.1", "libc.so.6"]), 16);
        assert_eq!(entry(&["libc.musl-x86_64.so.1"]), 8);
        assert_eq!(entry(&["libc.so"]), 8);
        assert_eq!(entry(&["libz.so.1"]), 0);
    }
}
