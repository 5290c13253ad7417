//! Quick checks of an ELF file that load next to nothing of it.

use object::LittleEndian as LE;
use object::elf;

use super::headers::Headers;
use super::image::DynamicSection;
use super::raw::{Section, records, string_at};
use super::source::read_bytes;
use super::{ElfError, ReadAt};

/// The relation of an ELF file to CRuby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RubyPresence {
    /// The interpreter is in this file: `libruby.so`, or a statically linked `ruby`.
    Defines,
    /// It is a GC for a Ruby built `--with-modular-gc` (`librubygc.*.so`).
    GcLibrary,
    /// It loads the interpreter from shared libraries.
    Needs {
        /// Sonames that start with `libruby`, in the order of `DT_NEEDED`.
        sonames: Vec<String>,
        /// `DT_RUNPATH`, or else `DT_RPATH`, unexpanded.
        run_path: Option<String>,
    },
}

/// Objects that `version.c` of every CRuby since 1.9 defines.
const RUBY_OBJECTS: [&[u8]; 2] = [b"ruby_version\0", b"ruby_description\0"];
/// Functions that every GC library exports (`gc/gc_impl.h`).
const GC_FUNCTIONS: [&[u8]; 2] = [b"rb_gc_impl_objspace_alloc\0", b"rb_gc_impl_start\0"];
/// Larger symbol tables are not searched: the file is not a Ruby, and the check has to be quick.
const MAX_TABLE: u64 = 16 << 20;
/// Symbols are read in chunks of this many bytes (a multiple of the size of a symbol).
const CHUNK: u64 = 2048 * size_of::<elf::Sym64<LE>>() as u64;

/// Decides whether a file is, or loads, a CRuby interpreter. Returns `None` for files that are not ELF and for ELF files of
/// other machines. Takes well under a millisecond for ordinary files.
pub fn probe_ruby(source: &(impl ReadAt + ?Sized)) -> Result<Option<RubyPresence>, ElfError> {
    let headers = match Headers::read(source) {
        Ok(headers) => headers,
        Err(ElfError::NotElf | ElfError::Unsupported(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    if defines(source, &headers, elf::SHT_DYNSYM, RUBY_OBJECTS)? {
        return Ok(Some(RubyPresence::Defines));
    }
    if defines(source, &headers, elf::SHT_DYNSYM, GC_FUNCTIONS)? {
        return Ok(Some(RubyPresence::GcLibrary));
    }
    let dynamic = DynamicSection::read(source, &headers)?;
    let sonames: Vec<String> = dynamic.needed.into_iter().filter(|name| is_libruby(name)).collect();
    if !sonames.is_empty() {
        return Ok(Some(RubyPresence::Needs { sonames, run_path: dynamic.run_path }));
    }
    let defined = defines(source, &headers, elf::SHT_SYMTAB, RUBY_OBJECTS)?;
    Ok(defined.then_some(RubyPresence::Defines))
}

/// `libruby.so.3.1`, `libruby-3.1.so.3.1`, `libruby2.7.so`.
fn is_libruby(soname: &str) -> bool {
    soname.starts_with("libruby") && soname.contains(".so")
}

fn defines(
    source: &(impl ReadAt + ?Sized),
    headers: &Headers,
    kind: elf::SectionType,
    wanted: [&[u8]; 2],
) -> Result<bool, ElfError> {
    let Some(table) = headers.section_of_kind(kind) else { return Ok(false) };
    let Some(strings) = headers.linked(table) else { return Ok(false) };
    if table.size > MAX_TABLE || strings.size > MAX_TABLE {
        return Ok(false);
    }
    // Searching for the two names first costs one pass over the string table; most files are rejected here.
    let names = strings.read(source, "symbol names", MAX_TABLE)?;
    let offsets = wanted.map(|object| name_offsets(&names, object));
    if offsets.iter().any(Vec::is_empty) {
        return Ok(false);
    }
    defines_all(source, table, &offsets)
}

/// Offsets in a string table at which a name occurs, including as the end of a longer name: linkers merge a name with
/// the tail of another one.
fn name_offsets(names: &[u8], name: &[u8]) -> Vec<u32> {
    const MAX_OFFSETS: usize = 16;
    let first = name[0];
    let candidates = names.iter().enumerate().filter(|&(_, &byte)| byte == first);
    let matches = candidates.filter(|&(at, _)| names[at..].starts_with(name));
    matches.map(|(at, _)| at as u32).take(MAX_OFFSETS).collect()
}

fn defines_all(
    source: &(impl ReadAt + ?Sized),
    table: &Section,
    offsets: &[Vec<u32>; 2],
) -> Result<bool, ElfError> {
    let mut defined = [false; 2];
    let mut position = 0;
    while position < table.size {
        let size = CHUNK.min(table.size - position);
        let offset = table.offset.checked_add(position).ok_or(ElfError::OutOfFile { what: "symbols" })?;
        let bytes = read_bytes(source, "symbols", offset, size, CHUNK)?;
        for symbol in records::<elf::Sym64<LE>>(&bytes) {
            let name = symbol.st_name.get(LE);
            let Some(which) = offsets.iter().position(|offsets| offsets.contains(&name)) else { continue };
            defined[which] |= symbol.st_shndx.get(LE) != elf::SHN_UNDEF;
        }
        if defined == [true; 2] {
            return Ok(true);
        }
        position += size;
    }
    Ok(false)
}

/// Reads an 8-byte data symbol (little-endian) from an ELF file of any machine. In a relocatable object, such as a
/// BPF object, the symbol's value is relative to the start of its section.
pub fn read_symbol_u64(object_bytes: &[u8], name: &str) -> Option<u64> {
    let headers = Headers::read_any_machine(object_bytes).ok()?;
    let table = headers.section_of_kind(elf::SHT_SYMTAB)?;
    let strings = headers.linked(table)?.read(object_bytes, "symbol names", MAX_TABLE).ok()?;
    let symbols = table.read(object_bytes, "symbols", MAX_TABLE).ok()?;
    let symbol = records::<elf::Sym64<LE>>(&symbols).iter().find(|symbol| {
        symbol.st_shndx.get(LE) != elf::SHN_UNDEF
            && string_at(&strings, symbol.st_name.get(LE) as usize) == Some(name)
    })?;
    let section = headers.sections.get(usize::from(symbol.st_shndx.get(LE).0))?;
    if !section.has_bytes() {
        return None;
    }
    let base = if headers.relocatable { 0 } else { section.address };
    let start = symbol.st_value.get(LE).checked_sub(base)?;
    let end = start.checked_add(8)?;
    if end > section.size {
        return None;
    }
    let start = usize::try_from(section.offset.checked_add(start)?).ok()?;
    let bytes = object_bytes.get(start..start.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}
