//! Where the VM stores the pointer to its object space: derived by evaluating exported accessors.

use super::code::Code;
use super::eval::{Machine, Operator, Store, Value};
use crate::address::Svma;

/// The path from the image to `rb_objspace_t`, and to the fields in it that the probes read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VmPath {
    /// The global VM pointer (`ruby_current_vm_ptr`, vm.c). For a GC library: its distance from the address in `anchor`,
    /// modulo 2⁶⁴.
    pub vm_ptr: Svma,
    /// Byte offset of the objspace pointer in `rb_vm_t`.
    pub vm_objspace: u32,
    /// Byte offset of `profile.count` in `rb_objspace_t`.
    pub count: u32,
    /// Byte offset of the 32-bit `flags` bit field in `rb_objspace_t`.
    pub flags: u32,
    /// Bit of `during_gc` in `flags`, from the lowest.
    pub during_gc_bit: u32,
    /// Bit of `dont_gc` in `flags`; `None` if `rb_gc_enable` could not be evaluated.
    pub dont_gc_bit: Option<u32>,
    /// For a GC library: the word in it that holds the address of `rb_mGC` of the Ruby that has loaded it.
    pub anchor: Option<Svma>,
}

/// The functions that lead to the objspace.
#[derive(Clone, Copy, Debug)]
pub(super) enum Accessors {
    /// The functions of gc.c, which find the objspace through the VM.
    Vm,
    /// The functions of a GC implementation (`gc/gc_impl.h`), which receive it as their first argument.
    Implementation,
}

impl Accessors {
    /// The function that corresponds to `name` of gc.c.
    pub(super) fn function(self, name: &'static str) -> &'static str {
        match (self, name) {
            (Self::Implementation, "rb_gc_count") => "rb_gc_impl_gc_count",
            (Self::Implementation, "rb_during_gc") => "rb_gc_impl_during_gc_p",
            (Self::Implementation, "rb_gc_enable") => "rb_gc_impl_gc_enable",
            (Self::Implementation, "rb_gc_disable") => "rb_gc_impl_gc_disable",
            (Self::Implementation, "rb_gc_stat") => "rb_gc_impl_stat",
            (Self::Implementation, "rb_gc_latest_gc_info") => "rb_gc_impl_latest_gc_info",
            (_, name) => name,
        }
    }

    fn is_objspace(self, value: &Value) -> bool {
        match self {
            Self::Vm => as_objspace(value).is_some(),
            Self::Implementation => *value == Value::Argument(0),
        }
    }
}

/// An accessor that does not have the expected meaning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VmPathError {
    /// The accessor is not in the image.
    #[error("no symbol {0}")]
    Missing(&'static str),
    /// The accessor computes something else.
    #[error("{function} returns {value}, which is not {expected}")]
    Unexpected {
        /// The accessor.
        function: &'static str,
        /// Its return value.
        value: String,
        /// The expected return value.
        expected: &'static str,
    },
    /// Two accessors find the object space in different places.
    #[error("{0} reaches the objspace on another path than rb_gc_count")]
    Disagreement(&'static str),
}

/// Number of conditional jumps in an accessor for which both directions are tried: from 3.4 on `rb_during_gc` tests for a VM first.
const BRANCHES: u32 = 3;
/// Upper bound of plausible offsets in the structures read here.
const MAX_OFFSET: i64 = 1 << 20;

impl VmPath {
    /// Evaluates `rb_gc_count`, `rb_during_gc` and `rb_gc_enable`.
    pub(super) fn derive(code: &Code<'_>) -> Result<Self, VmPathError> {
        let (objspace, count) = count_path(code, Accessors::Vm)?;
        let unexpected = |value: &Value| VmPathError::Unexpected {
            function: "rb_gc_count",
            value: value.to_string(),
            expected: "a field of the objspace of the current VM",
        };
        let Some((vm_ptr, vm_objspace)) = as_objspace(&objspace) else { return Err(unexpected(&objspace)) };
        if code.image.symbol("ruby_current_vm_ptr").is_some_and(|symbol| symbol.address != vm_ptr) {
            return Err(unexpected(&objspace));
        }
        let (flags, during_gc_bit) = during_gc(code, &objspace, Accessors::Vm)?;
        let dont_gc_bit = dont_gc(code, &objspace, flags, Accessors::Vm)?;
        Ok(Self { vm_ptr, vm_objspace, count, flags, during_gc_bit, dont_gc_bit, anchor: None })
    }

    /// For a GC library: evaluates its implementations of those functions. The path to the objspace is that of the Ruby
    /// that it belongs to, through `rb_mGC`, which is at `landmark` there and whose address is at `anchor` in the library.
    pub(super) fn derive_library(
        code: &Code<'_>,
        ruby: &Self,
        landmark: Svma,
        anchor: Svma,
    ) -> Result<Self, VmPathError> {
        let accessors = Accessors::Implementation;
        let (objspace, count) = count_path(code, accessors)?;
        let (flags, during_gc_bit) = during_gc(code, &objspace, accessors)?;
        let dont_gc_bit = dont_gc(code, &objspace, flags, accessors)?;
        let vm_ptr = Svma(ruby.vm_ptr.0.wrapping_sub(landmark.0));
        let vm_objspace = ruby.vm_objspace;
        Ok(Self { vm_ptr, vm_objspace, count, flags, during_gc_bit, dont_gc_bit, anchor: Some(anchor) })
    }

    /// The functions that lead to the objspace in this image.
    pub(super) fn accessors(&self) -> Accessors {
        if self.anchor.is_some() { Accessors::Implementation } else { Accessors::Vm }
    }
}

/// `rb_gc_count` returns `objspace->profile.count` (gc.c): the objspace as an expression, and the field's offset.
fn count_path(code: &Code<'_>, accessors: Accessors) -> Result<(Value, u32), VmPathError> {
    let function = accessors.function("rb_gc_count");
    let address = accessor(code, function)?;
    let mut last = Value::Unknown;
    for choices in 0..1 << BRANCHES {
        let value = Machine::new(code, choices).run(address);
        if let Value::Load { base, offset: offset @ 0..MAX_OFFSET, size: 8 } = &value
            && accessors.is_objspace(base)
        {
            return Ok(((**base).clone(), *offset as u32));
        }
        last = value;
    }
    let expected = match accessors {
        Accessors::Vm => "[[[@vm_ptr]+a]+b]",
        Accessors::Implementation => "[objspace+b]",
    };
    Err(VmPathError::Unexpected { function, value: last.to_string(), expected })
}

/// `[[@vm_ptr] + offset]`
fn as_objspace(value: &Value) -> Option<(Svma, u32)> {
    let Value::Load { base: vm, offset: offset @ 0..MAX_OFFSET, size: 8 } = value else { return None };
    let Value::Load { base: vm_ptr, offset: 0, size: 8 } = &**vm else { return None };
    let Value::Image(address) = **vm_ptr else { return None };
    Some((Svma(address), *offset as u32))
}

/// `rb_during_gc` returns the bit `objspace->flags.during_gc` (gc.c): offset of the flags word, and the bit.
fn during_gc(code: &Code<'_>, objspace: &Value, accessors: Accessors) -> Result<(u32, u32), VmPathError> {
    let function = accessors.function("rb_during_gc");
    let address = accessor(code, function)?;
    let mut last = Value::Unknown;
    for choices in 0..1 << BRANCHES {
        let value = Machine::new(code, choices).run(address);
        if let Some((base, offset, bit)) = value.as_memory_bit()
            && let Some(found) = word_bit(offset, bit)
        {
            return if base == objspace { Ok(found) } else { Err(VmPathError::Disagreement(function)) };
        }
        if value != Value::Constant(0) {
            last = value;
        }
    }
    Err(VmPathError::Unexpected { function, value: last.to_string(), expected: "one bit of the objspace" })
}

/// `rb_gc_enable` clears `objspace->flags.dont_gc` (gc.c).
fn dont_gc(
    code: &Code<'_>,
    objspace: &Value,
    flags: u32,
    accessors: Accessors,
) -> Result<Option<u32>, VmPathError> {
    let function = accessors.function("rb_gc_enable");
    let Ok(address) = accessor(code, function) else { return Ok(None) };
    let mut elsewhere = false;
    for choices in 0..1 << BRANCHES {
        let mut machine = Machine::new(code, choices);
        machine.run(address);
        for store in machine.stores() {
            let Some((word, bit)) = cleared_bit(store) else { continue };
            if store.base == *objspace && word == flags {
                return Ok(Some(bit));
            }
            elsewhere = true;
        }
    }
    if elsewhere { Err(VmPathError::Disagreement(function)) } else { Ok(None) }
}

/// For a store of `[x] & !(1 << bit)` to `x`: offset of the 32-bit word that holds the bit, and the bit in it.
fn cleared_bit(store: &Store) -> Option<(u32, u32)> {
    let Value::Binary(Operator::And, old, mask) = &store.value else { return None };
    let Value::Load { base, offset, .. } = &**old else { return None };
    let Value::Constant(mask) = **mask else { return None };
    if **base != store.base || *offset != store.offset || !matches!(store.size, 1 | 2 | 4 | 8) {
        return None;
    }
    let width = u32::from(store.size) * 8;
    let cleared = !(mask as u64) & (u64::MAX >> (64 - width));
    cleared.is_power_of_two().then(|| word_bit(store.offset, cleared.trailing_zeros()))?
}

/// Compilers narrow an access to a bit field to the byte that holds the bit; this converts it back to the source's 32-bit word.
fn word_bit(offset: i64, bit: u32) -> Option<(u32, u32)> {
    if !(0..MAX_OFFSET).contains(&offset) {
        return None;
    }
    let bits = offset as u32 * 8 + bit;
    Some((bits / 32 * 4, bits % 32))
}

fn accessor(code: &Code<'_>, name: &'static str) -> Result<Svma, VmPathError> {
    Ok(code.image.symbol(name).ok_or(VmPathError::Missing(name))?.address)
}
