//! Thread-local variables that an image exports, and how programs locate them.

use object::elf;

use super::headers::Headers;
use super::plt::{Relocation, relocations};
use super::{ElfError, ReadAt, SymbolTable};
use crate::address::Svma;

/// Maximum bytes of a string table; those of libraries have a few hundred kilobytes at most.
const MAX_STRINGS: u64 = 32 << 20;

/// A thread-local variable that an image defines and exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadLocal {
    /// Its byte offset in the TLS block of the image.
    pub offset: u64,
    /// What the dynamic linker stores about it, and where; `None` if it stores nothing, as for a program's own variable.
    pub slot: Option<(TlsSlot, Svma)>,
}

/// What the dynamic linker stores about a thread-local variable (Drepper, "ELF Handling For Thread-Local Storage", 3 and 4; Oliva,
/// "Thread-Local Storage Descriptors").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TlsSlot {
    /// A descriptor: address of a function and its argument, 8 bytes each.
    Descriptor,
    /// Its offset from the thread pointer, 8 bytes.
    ThreadPointer,
    /// The number of the TLS module and the variable's offset in its block, 8 bytes each.
    Module,
}

impl ThreadLocal {
    /// Finds a variable by name. If the image does not export it, only the names of its dynamic symbols are read.
    pub fn find(source: &(impl ReadAt + ?Sized), name: &str) -> Result<Option<Self>, ElfError> {
        let headers = Headers::read(source)?;
        let Some(section) = headers.sections.iter().find(|s| s.kind == elf::SHT_DYNSYM) else {
            return Ok(None);
        };
        let Some(strings) = headers.linked(section) else { return Ok(None) };
        let strings = strings.read(source, "a symbol string table", MAX_STRINGS)?;
        // A name may be the end of a longer one.
        if !strings.split(|byte| *byte == 0).any(|text| text.ends_with(name.as_bytes())) {
            return Ok(None);
        }
        let symbols = SymbolTable::read(source, &headers, section)?;
        let Some(offset) = symbols.thread_local(name).map(|symbol| symbol.address.0) else { return Ok(None) };
        // A reference by name, or only by offset if the linker has bound it to this image.
        let its = |index: u32, addend: i64| match symbols.by_index(index).filter(|_| index != 0) {
            Some((other, _)) => other == name && addend == 0,
            None => index == 0 && addend == offset.cast_signed(),
        };
        let slot = |&(slot, relocation): &(Svma, Relocation)| match relocation {
            Relocation::TlsDescriptor { index, addend } if its(index, addend) => {
                Some((TlsSlot::Descriptor, slot))
            }
            Relocation::TlsOffset { index, addend } if its(index, addend) => {
                Some((TlsSlot::ThreadPointer, slot))
            }
            // The offset of a module and offset pair; the module number precedes it.
            Relocation::TlsModuleOffset { index, addend } if its(index, addend) => {
                Some((TlsSlot::Module, Svma(slot.0.checked_sub(8)?)))
            }
            _ => None,
        };
        let slot = relocations(source, &headers)?.iter().filter_map(slot).min();
        Ok(Some(Self { offset, slot }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::damaged::Damaged;
    use crate::debian::{libruby_bytes, libruby_file, libruby_section};
    use proptest::prelude::*;

    const EC: &str = "ruby_current_ec";

    /// Ruby's own variable, which Debian's libruby exports and accesses through a module and offset pair (readelf -Wrs).
    #[test]
    fn of_libruby() {
        let found = ThreadLocal::find(&libruby_file(), EC).unwrap().unwrap();
        assert!(matches!(found.slot, Some((TlsSlot::Module, _))), "{found:?}");
        // A function, part of a name, an unknown name.
        for name in ["ruby_init", "ruby_current_e", "otel_thread_ctx_v1"] {
            assert_eq!(ThreadLocal::find(&libruby_file(), name).unwrap(), None, "{name}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the tables contain, the outcome is an answer or an error.
        #[test]
        fn hostile(table in 0..3_usize, at in 0..4096_usize, byte: u8) {
            let range = libruby_section([".dynsym", ".dynstr", ".rela.dyn"][table]);
            let damaged = Damaged { bytes: libruby_bytes(), patches: vec![(range.start + at % range.len(), byte)] };
            let _ = ThreadLocal::find(&damaged, EC);
        }
    }
}
