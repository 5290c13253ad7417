//! Functions whose meaning is known from their name: those that make symbols and Fixnums, those that raise, and those that
//! access thread-local variables.

use iced_x86::Instruction;

use super::machine::{Ending, Machine};
use super::{Operator, Value};
use crate::address::Svma;
use crate::elf::Relocation;
use crate::ruby::code::Callee;

/// Functions that do not return to the path that is followed: they raise, abort, or make a Bignum of a size that is
/// too large for a Fixnum.
const LEAVING: [&str; 7] =
    ["__stack_chk_fail", "abort", "rb_bug", "rb_int2big", "rb_memerror", "rb_raise", "rb_uint2big"];

/// `RUBY_SPECIAL_SHIFT` and `RUBY_SYMBOL_FLAG` (`special_consts.h`, with flonums, as on every 64-bit platform): a static
/// symbol is its id, shifted and tagged.
pub(crate) const SYMBOL_SHIFT: u32 = 8;
/// Represents the object cache of the running Ractor if the path to it is in another image; no function has this many
/// arguments.
pub(crate) const OBJECT_CACHE: Value = Value::Argument(u8::MAX);
/// See [`SYMBOL_SHIFT`].
pub(crate) const STATIC_SYMBOL: i64 = 0xc;

impl Machine<'_> {
    /// Functions whose meaning is known from their name.
    pub(super) fn known_function(&self, callee: Callee<'_>) -> Option<Ending> {
        let value = match callee.name? {
            "__tls_get_addr" => self.tls_get_addr(),
            "rb_intern" | "rb_intern2" | "rb_intern3" => self.interned(),
            "rb_id2sym" => match self.argument(0) {
                Value::Constant(id) => Value::Constant(id << SYMBOL_SHIFT | STATIC_SYMBOL),
                _ => Value::Unknown,
            },
            // Sizes are below 2⁶², so they always convert to Fixnums and back.
            "rb_uint2inum" | "rb_ull2inum" => {
                let doubled =
                    Value::binary(Operator::ShiftLeft, self.argument(0).clone(), Value::Constant(1));
                Value::binary(Operator::Add, doubled, Value::Constant(1))
            }
            // A GC library calls the Ruby that has loaded it (gc.c from 4.0 on).
            "rb_gc_get_ractor_newobj_cache" if callee.address.is_none() => OBJECT_CACHE,
            // As in a process in which the variable is not set.
            "getenv" => Value::Constant(0),
            "rb_num2ulong" => self.argument(0).clone().fixnum().unwrap_or(Value::Unknown),
            name => return LEAVING.contains(&name).then_some(Ending::Left),
        };
        Some(Ending::Returned(value))
    }

    /// The id of a name: the address of the string represents it.
    fn interned(&self) -> Value {
        let Value::Image(address) = *self.argument(0) else { return Value::Unknown };
        let Some(name) = self.program.code.image.c_string(Svma(address)) else { return Value::Unknown };
        match *self.argument(1) {
            Value::Constant(length) if length != name.len() as i64 => Value::Unknown,
            _ => Value::Constant(address.cast_signed()),
        }
    }

    /// The general dynamic TLS model: the argument points to a pair of slots, module number and offset. The offset has a
    /// relocation if the variable is a dynamic symbol, and is in the file if it is local. In the local
    /// dynamic model the offset is 0 and the code adds it.
    fn tls_get_addr(&self) -> Value {
        let Value::Image(slot) = *self.argument(0) else { return Value::Unknown };
        let image = self.program.code.image;
        if image.relocation(Svma(slot)) != Some(Relocation::TlsModule) {
            return Value::Unknown;
        }
        self.program.tls_module.set(Some(Svma(slot)));
        let offset_slot = Svma(slot.wrapping_add(8));
        match image.relocation(offset_slot) {
            Some(Relocation::TlsModuleOffset { index, addend }) => {
                Value::TlsAddress(image.tls_offset(index, addend))
            }
            Some(_) => Value::Unknown,
            None => {
                image.read_u64(offset_slot).map_or(Value::Unknown, |offset| Value::TlsAddress(offset as i64))
            }
        }
    }

    /// `call [rax]` with the address of a TLS descriptor in rax: returns the variable's offset from the thread
    /// pointer, and preserves all other registers.
    pub(super) fn tls_descriptor(&self, instruction: &Instruction) -> Option<Value> {
        if !instruction.is_call_near_indirect() {
            return None;
        }
        let Value::Image(slot) = self.address(instruction) else { return None };
        let image = self.program.code.image;
        match image.relocation(Svma(slot))? {
            Relocation::TlsDescriptor { index, addend } => {
                Some(Value::TlsDistance(image.tls_offset(index, addend)))
            }
            _ => None,
        }
    }
}
