//! An ELF image: everything in the file that finding probe sites needs; nothing else is kept in memory.

use std::ops::Range;

use object::LittleEndian as LE;
use object::elf;

use super::frames::{self, FunctionRange};
use super::headers::{Headers, Machine};
use super::notes::{self, BuildId};
use super::plt::{self, Relocation};
use super::raw::{LoadSegment, Section, code_offset, records, string_at};
use super::source::read_bytes;
use super::symbols::{Symbol, SymbolTable};
use super::usdt::{self, UsdtProbe};
use super::{ElfError, ReadAt};
use crate::address::{FileOffset, Svma};

/// Maximum bytes of the text; no Ruby has more.
const MAX_TEXT: u64 = 256 << 20;
const MAX_DATA: u64 = 64 << 20;
const MAX_SMALL: u64 = 1 << 20;

/// Bytes of one section that are kept in memory.
#[derive(Debug)]
struct Region {
    address: u64,
    bytes: Vec<u8>,
}

impl Region {
    fn get(&self, address: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(address.checked_sub(self.address)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }

    fn contains(&self, address: u64) -> bool {
        address >= self.address && address - self.address < self.bytes.len() as u64
    }
}

/// The parts of an ELF file that gctrace keeps.
#[derive(Debug)]
pub struct ElfImage {
    machine: Machine,
    fixed_position: bool,
    segments: Vec<LoadSegment>,
    build_id: Option<BuildId>,
    text: Region,
    constants: Vec<Region>,
    got: Vec<Region>,
    bss: Range<Svma>,
    functions: Vec<FunctionRange>,
    dynamic_symbols: SymbolTable,
    symbols: SymbolTable,
    relocations: Vec<(Svma, Relocation)>,
    stubs: Vec<(Svma, Svma)>,
    dynamic: DynamicSection,
    has_interpreter: bool,
    usdt: Vec<UsdtProbe>,
    shadow_stacks: bool,
}

impl ElfImage {
    /// Reads an image. Only its code, constants, unwind and symbol tables are loaded. Without section headers the program
    /// headers are used instead.
    pub fn read(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let headers = Headers::read(source)?;
        let text_section = headers.section(".text").ok_or(ElfError::MissingSection(".text"))?;
        let text_range = section_range(text_section)?;

        // The unwind table is read first: its bytes are dropped before the text is loaded, which keeps peak memory low.
        let eh_frame = headers.section(".eh_frame").ok_or(ElfError::MissingSection(".eh_frame"))?;
        let functions = frames::function_ranges(
            &eh_frame.read(source, ".eh_frame", MAX_DATA)?,
            eh_frame.address,
            text_range,
            headers.machine,
        )?;

        let symbol_table = |kind| match headers.section_of_kind(kind) {
            Some(section) => SymbolTable::read(source, &headers, section),
            None => Ok(SymbolTable::default()),
        };
        let bss = headers.section(".bss").map(section_range).transpose()?.unwrap_or(0..0);
        let relocations = plt::relocations(source, &headers)?;
        let mut stubs = plt::stubs(source, &headers)?;
        if headers.sectionless {
            // All code was searched, so an apparent stub may be the middle of something else.
            stubs.retain(|(_, slot)| relocations.binary_search_by_key(slot, |&(slot, _)| slot).is_ok());
        }
        Ok(Self {
            shadow_stacks: allows_shadow_stacks(source, &headers)?,
            machine: headers.machine,
            fixed_position: headers.fixed_position,
            build_id: build_id(source, &headers)?,
            constants: regions(source, &headers, |s| s.name == ".rodata" || s.name.starts_with(".rodata."))?,
            got: regions(source, &headers, |s| s.name == ".got" || s.name == ".got.plt")?,
            bss: Svma(bss.start)..Svma(bss.end),
            functions,
            dynamic_symbols: symbol_table(elf::SHT_DYNSYM)?,
            symbols: symbol_table(elf::SHT_SYMTAB)?,
            relocations,
            stubs,
            dynamic: DynamicSection::read(source, &headers)?,
            has_interpreter: headers.has_interpreter,
            usdt: usdt::probes(source, &headers)?,
            text: region(source, text_section, ".text", MAX_TEXT)?,
            segments: headers.segments,
        })
    }

    /// Its USDT probes.
    pub fn usdt(&self) -> &[UsdtProbe] {
        &self.usdt
    }

    /// The processor it is built for.
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// Whether it is linked to a fixed address (`ET_EXEC`), so that its code may hold absolute addresses.
    pub fn is_fixed_position(&self) -> bool {
        self.fixed_position
    }

    /// Its build id, if it has one.
    pub fn build_id(&self) -> Option<&BuildId> {
        self.build_id.as_ref()
    }

    /// The loadable segments, in file order.
    pub fn segments(&self) -> &[LoadSegment] {
        &self.segments
    }

    /// Whether it names a program interpreter, that is, whether it can be executed.
    pub fn has_interpreter(&self) -> bool {
        self.has_interpreter
    }

    /// Whether it declares support for shadow stacks, so that a process may run it with them.
    pub fn allows_shadow_stacks(&self) -> bool {
        self.shadow_stacks
    }

    /// Shared libraries it needs, by soname.
    pub fn needed(&self) -> &[String] {
        &self.dynamic.needed
    }

    /// `DT_RUNPATH`, or else `DT_RPATH`, unexpanded.
    pub fn run_path(&self) -> Option<&str> {
        self.dynamic.run_path.as_deref()
    }

    /// Address range of zero-initialised data.
    pub fn bss(&self) -> Range<Svma> {
        self.bss.clone()
    }

    /// First address and bytes of `.text`.
    pub fn text(&self) -> (Svma, &[u8]) {
        (Svma(self.text.address), &self.text.bytes)
    }

    /// The function extents inside `.text`, sorted, disjoint.
    pub fn functions(&self) -> &[FunctionRange] {
        &self.functions
    }

    /// Index in [`ElfImage::functions`] of the extent that covers the address.
    pub fn function_index(&self, address: Svma) -> Option<usize> {
        let index = self.functions.partition_point(|f| f.start <= address).checked_sub(1)?;
        self.functions[index].contains(address).then_some(index)
    }

    /// The dynamic symbols.
    pub fn dynamic_symbols(&self) -> &SymbolTable {
        &self.dynamic_symbols
    }

    /// `.symtab`; empty in a stripped file.
    pub fn symbols(&self) -> &SymbolTable {
        &self.symbols
    }

    /// Turns it into the image of the stripped file.
    #[cfg(test)]
    pub(crate) fn forget_symbols(&mut self) {
        self.symbols = SymbolTable::default();
    }

    /// The defined symbol with this name, exported or not.
    pub fn symbol(&self, name: &str) -> Option<Symbol<'_>> {
        self.dynamic_symbols.find(name).or_else(|| self.symbols.find(name))
    }

    /// Name of the function that covers the address: from `.symtab`, or else from the exports.
    pub fn function_name(&self, address: Svma) -> Option<&str> {
        let symbol = self.symbols.function_covering(address);
        Some(symbol.or_else(|| self.dynamic_symbols.function_covering(address))?.name)
    }

    /// The value that the dynamic linker stores in a slot.
    pub fn relocation(&self, slot: Svma) -> Option<Relocation> {
        let first = self.relocations.partition_point(|&(s, _)| s < slot);
        let &(found, relocation) = self.relocations.get(first)?;
        (found == slot).then_some(relocation)
    }

    /// The stated address that a pointer slot holds at run time, if it points into this image: a symbol that the image
    /// itself defines (the common case; interposition would change it), a relative relocation, or a link-time constant
    /// in the global offset table.
    pub fn pointer(&self, slot: Svma) -> Option<Svma> {
        match self.relocation(slot) {
            Some(Relocation::Symbol { index, addend }) => {
                let address = self.dynamic_symbols.by_index(index)?.1?;
                Some(Svma(address.0.wrapping_add_signed(addend)))
            }
            Some(Relocation::Image(address)) => Some(address),
            Some(_) => None,
            None => self.link_time_pointer(slot),
        }
    }

    /// The address in a slot without a relocation record: slots of fixed-position images, and slots whose relative
    /// relocations are packed (`DT_RELR`), hold the address itself.
    fn link_time_pointer(&self, slot: Svma) -> Option<Svma> {
        /// The first page of an image holds its headers, which no program points to. This keeps small numbers such as `Qnil`
        /// from becoming addresses where data cannot be distinguished from the offset table (no section headers).
        const HEADERS: u64 = 4096;
        let bytes = self.got.iter().find_map(|region| region.get(slot.0, 8))?;
        let address = Svma(u64::from_le_bytes(bytes.try_into().ok()?));
        let mapped =
            |s: &LoadSegment| address.0.checked_sub(s.address.0).is_some_and(|at| at < s.memory_size);
        (address.0 >= HEADERS && self.segments.iter().any(mapped)).then_some(address)
    }

    /// Name of the symbol whose address a slot receives.
    pub fn slot_symbol(&self, slot: Svma) -> Option<&str> {
        let Relocation::Symbol { index, .. } = self.relocation(slot)? else { return None };
        Some(self.dynamic_symbols.by_index(index)?.0)
    }

    /// Offset of the thread-local variable that a TLS relocation refers to, as that relocation counts it.
    pub fn tls_offset(&self, index: u32, addend: i64) -> i64 {
        let symbol = self.dynamic_symbols.by_index(index).and_then(|(_, offset)| offset);
        addend.wrapping_add(symbol.map_or(0, |offset| offset.0 as i64))
    }

    /// The slot through which the PLT stub at this address jumps.
    pub fn stub_slot(&self, stub: Svma) -> Option<Svma> {
        let index = self.stubs.binary_search_by_key(&stub, |&(s, _)| s).ok()?;
        Some(self.stubs[index].1)
    }

    /// Addresses of the PLT stubs that lead to `target`, a symbol of this image.
    pub fn stubs_to(&self, target: Svma) -> impl Iterator<Item = Svma> {
        self.stubs.iter().filter(move |&&(_, slot)| self.pointer(slot) == Some(target)).map(|&(stub, _)| stub)
    }

    /// PLT stubs and slots that lead to the symbol with this name, wherever it is defined.
    pub fn imports(&self, name: &str) -> impl Iterator<Item = Svma> {
        let leads = move |slot| self.slot_symbol(slot) == Some(name);
        let stubs = self.stubs.iter().filter(move |&&(_, slot)| leads(slot)).map(|&(stub, _)| stub);
        stubs.chain(self.relocations.iter().map(|&(slot, _)| slot).filter(move |&slot| leads(slot)))
    }

    /// Slots that receive the address of `target`, a symbol of this image.
    pub fn slots_of(&self, target: Svma) -> impl Iterator<Item = Svma> {
        let slots = self.relocations.iter().map(|&(slot, _)| slot);
        slots.filter(move |&slot| self.pointer(slot) == Some(target))
    }

    /// `len` bytes at a stated address of the text, the constants or the global offset table.
    pub fn read_bytes(&self, address: Svma, len: usize) -> Option<&[u8]> {
        let regions = std::iter::once(&self.text).chain(&self.constants).chain(&self.got);
        regions.into_iter().find_map(|region| region.get(address.0, len))
    }

    /// A little-endian 64-bit word at a stated address.
    pub fn read_u64(&self, address: Svma) -> Option<u64> {
        Some(u64::from_le_bytes(self.read_bytes(address, 8)?.try_into().ok()?))
    }

    /// The NUL-terminated string constant at a stated address; `None` if there is none or if it is not UTF-8.
    pub fn c_string(&self, address: Svma) -> Option<&str> {
        let region = self.constants.iter().find(|region| region.contains(address.0))?;
        string_at(&region.bytes, (address.0 - region.address) as usize)
    }

    /// Addresses of exactly this string constant (as a constant of its own, not as the end of another).
    pub fn find_c_string(&self, text: &str) -> Vec<Svma> {
        let pattern = [text.as_bytes(), &[0]].concat();
        let mut found = Vec::new();
        for region in &self.constants {
            let whole_constant = |&at: &usize| at == 0 || region.bytes[at - 1] == 0;
            let addresses = find_all(&region.bytes, &pattern).filter(whole_constant);
            found.extend(addresses.map(|at| Svma(region.address + at as u64)));
        }
        found
    }

    /// The string constants that end with this suffix and are longer than it.
    pub fn find_c_strings_ending(&self, suffix: &str) -> Vec<&str> {
        let pattern = [suffix.as_bytes(), &[0]].concat();
        let mut found = Vec::new();
        for region in &self.constants {
            for at in find_all(&region.bytes, &pattern) {
                let start = region.bytes[..at].iter().rposition(|&byte| byte == 0).map_or(0, |end| end + 1);
                found.extend((start < at).then(|| string_at(&region.bytes, start)).flatten());
            }
        }
        found
    }

    /// File offset of a stated address in an executable segment: the offset at which a uprobe is attached.
    pub fn svma_to_file_offset(&self, address: Svma) -> Option<FileOffset> {
        code_offset(&self.segments, address)
    }
}

/// Offsets of all occurrences of `pattern`.
fn find_all<'a>(bytes: &'a [u8], pattern: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let first = pattern[0];
    let candidates = bytes.iter().enumerate().filter(move |&(_, &byte)| byte == first).map(|(at, _)| at);
    candidates.filter(move |&at| bytes[at..].starts_with(pattern))
}

fn section_range(section: &Section) -> Result<Range<u64>, ElfError> {
    let end = section.address.checked_add(section.size);
    Ok(section.address..end.ok_or_else(|| ElfError::malformed("section headers", "address overflow"))?)
}

fn region(
    source: &(impl ReadAt + ?Sized),
    section: &Section,
    what: &'static str,
    limit: u64,
) -> Result<Region, ElfError> {
    section_range(section)?;
    Ok(Region { address: section.address, bytes: section.read(source, what, limit)? })
}

fn regions(
    source: &(impl ReadAt + ?Sized),
    headers: &Headers,
    wanted: impl Fn(&Section) -> bool,
) -> Result<Vec<Region>, ElfError> {
    let sections = headers.sections.iter().filter(|s| s.is_allocated() && s.has_bytes() && wanted(s));
    sections.take(16).map(|s| region(source, s, "a data section", MAX_DATA)).collect()
}

/// Reads the build id from the note sections.
pub fn build_id(source: &(impl ReadAt + ?Sized), headers: &Headers) -> Result<Option<BuildId>, ElfError> {
    let named = |s: &&Section| s.name == ".note.gnu.build-id" || headers.sectionless;
    for section in headers.sections.iter().filter(|s| s.kind == elf::SHT_NOTE).filter(named) {
        let notes = section.read(source, "the build id", MAX_SMALL)?;
        if let Some(found) = notes::build_id_in(&notes) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Whether the note sections declare that the code supports shadow stacks.
fn allows_shadow_stacks(source: &(impl ReadAt + ?Sized), headers: &Headers) -> Result<bool, ElfError> {
    let named = |s: &&Section| s.name == ".note.gnu.property" || headers.sectionless;
    for section in headers.sections.iter().filter(|s| s.kind == elf::SHT_NOTE).filter(named) {
        if notes::allows_shadow_stacks(&section.read(source, "a property note", MAX_SMALL)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The entries of `.dynamic` that gctrace uses.
#[derive(Debug, Default)]
pub(crate) struct DynamicSection {
    pub(crate) needed: Vec<String>,
    pub(crate) run_path: Option<String>,
}

impl DynamicSection {
    pub(crate) fn read(source: &(impl ReadAt + ?Sized), headers: &Headers) -> Result<Self, ElfError> {
        let Some(section) = headers.section_of_kind(elf::SHT_DYNAMIC) else { return Ok(Self::default()) };
        let Some(strings) = headers.linked(section) else { return Ok(Self::default()) };
        let bytes = section.read(source, "the dynamic section", MAX_SMALL)?;
        let string = |offset: u64| read_string(source, strings, offset);

        let mut dynamic = Self::default();
        let mut rpath = None;
        for entry in records::<elf::Dyn64<LE>>(&bytes) {
            let value = entry.d_val.get(LE);
            match entry.d_tag.get(LE) {
                elf::DT_NULL => break,
                elf::DT_NEEDED if dynamic.needed.len() < 256 => dynamic.needed.extend(string(value)),
                elf::DT_RUNPATH => dynamic.run_path = string(value),
                elf::DT_RPATH => rpath = string(value),
                _ => {}
            }
        }
        dynamic.run_path = dynamic.run_path.or(rpath);
        Ok(dynamic)
    }
}

/// Reads one string of a string table without loading the whole table.
fn read_string(source: &(impl ReadAt + ?Sized), table: &Section, offset: u64) -> Option<String> {
    const MAX_STRING: u64 = 4096;
    let size = table.size.checked_sub(offset)?.min(MAX_STRING);
    let bytes = read_bytes(source, "a string", table.offset.checked_add(offset)?, size, MAX_STRING).ok()?;
    string_at(&bytes, 0).map(str::to_owned)
}
