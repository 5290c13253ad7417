//! The debug information of one file: the positions of its units, and units loaded on demand.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use gimli::{DebugAbbrev, DebugAbbrevOffset, EndianSlice, LittleEndian, UnitHeader, UnitOffset};

use super::DwarfError;
use super::sections::Data;
use crate::elf::headers::Headers;
use crate::elf::raw::string_at;
use crate::elf::{BuildId, ElfError, ReadAt};

/// The reader type for gimli: borrowed little-endian bytes.
pub(super) type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Maximum number of units; no Ruby has more.
const MAX_UNITS: usize = 1 << 20;
const MAX_ABBREV: u64 = 64 << 20;
const MAX_UNIT: u64 = 64 << 20;
/// Maximum bytes of an abbreviation table; compilers emit shorter ones. Each byte takes ten or more in memory.
const MAX_TABLE: u64 = 4 << 20;
/// Capacity of the cache of loaded units, bytes.
const CACHE: usize = 16 << 20;
/// Capacity of the cache of abbreviation tables, bytes.
const TABLES: u64 = 4 << 20;

/// `.gnu_debugaltlink`: the supplementary file to which dwz moved common parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AltLink {
    /// Its path, absolute or relative to the folder of the debug file.
    pub path: String,
    /// Its build id.
    pub build_id: BuildId,
}

/// Reads `.gnu_debugaltlink`.
pub(super) fn alt_link(source: &dyn ReadAt) -> Result<Option<AltLink>, DwarfError> {
    alt_link_of(source, &Headers::read(source)?)
}

fn alt_link_of(source: &dyn ReadAt, headers: &Headers) -> Result<Option<AltLink>, DwarfError> {
    const WHAT: &str = ".gnu_debugaltlink";
    let Some(section) = headers.section(WHAT).filter(|section| section.has_bytes()) else { return Ok(None) };
    let bytes = section.read(source, WHAT, 1 << 16)?;
    let path = string_at(&bytes, 0).ok_or_else(|| ElfError::malformed(WHAT, "no path"))?;
    let build_id = bytes.get(path.len() + 1..).filter(|id| !id.is_empty() && id.len() <= 64);
    let build_id = BuildId::new(build_id.ok_or_else(|| ElfError::malformed(WHAT, "no build id"))?);
    Ok(Some(AltLink { path: path.to_owned(), build_id }))
}

/// Position of a unit in `.debug_info`, and of its abbreviations in `.debug_abbrev`.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    len: u64,
    abbrev: u64,
    abbrev_end: u64,
}

/// A unit in memory.
pub(super) struct Unit {
    bytes: Vec<u8>,
    pub(super) abbreviations: Rc<gimli::Abbreviations>,
    /// `DW_AT_str_offsets_base`.
    pub(super) str_offsets_base: Cell<Option<u64>>,
}

impl Unit {
    /// Its header; offsets are relative to the unit.
    pub(super) fn header(&self) -> Result<UnitHeader<Slice<'_>>, DwarfError> {
        let what = "a unit header in .debug_info";
        let next = gimli::DebugInfo::new(&self.bytes, LittleEndian).units().next();
        next.map_err(DwarfError::malformed(what))?.ok_or_else(|| ElfError::malformed(what, "no unit").into())
    }
}

/// The debug information of one file.
pub(super) struct DwarfFile<'a> {
    info: Data<'a>,
    abbrev: Vec<u8>,
    pub(super) str: Data<'a>,
    pub(super) line_str: Data<'a>,
    pub(super) str_offsets: Data<'a>,
    pub(super) alt_link: Option<AltLink>,
    units: Vec<Span>,
    loaded: RefCell<HashMap<usize, Rc<Unit>>>,
    cached: Cell<usize>,
    /// Abbreviation tables by offset: several units may share one.
    tables: RefCell<HashMap<u64, Rc<gimli::Abbreviations>>>,
    tables_len: Cell<u64>,
    /// Bytes that may still be loaded: bounds the work on files whose references jump back and forth.
    budget: Cell<u64>,
}

impl<'a> DwarfFile<'a> {
    /// Finds the units of a file.
    pub(super) fn open(source: &'a dyn ReadAt) -> Result<Self, DwarfError> {
        let headers = Headers::read(source)?;
        // dwz's supplementary files are marked relocatable, but have no relocations.
        if headers.relocatable && headers.section(".rela.debug_info").is_some() {
            return Err(DwarfError::Unsupported("a relocatable object; link it first (gcc -shared)"));
        }
        if headers.section(".debug_info").is_none_or(|section| !section.has_bytes()) {
            return Err(match headers.section(".zdebug_info") {
                Some(_) => DwarfError::Unsupported("sections compressed in the old GNU way (.zdebug_info)"),
                None => DwarfError::Missing,
            });
        }
        let open = |name| Data::open(source, &headers, name);
        let (info, abbrev) = (open(".debug_info")?, open(".debug_abbrev")?);
        if abbrev.len() > MAX_ABBREV {
            return Err(DwarfError::TooMuch("the abbreviations"));
        }
        let abbrev = abbrev.read(0, abbrev.len())?;
        let units = find_units(&info, abbrev.len() as u64)?;
        let budget = Cell::new(info.len().saturating_mul(4).saturating_add(64 << 20));
        Ok(Self {
            info,
            abbrev,
            str: open(".debug_str")?,
            line_str: open(".debug_line_str")?,
            str_offsets: open(".debug_str_offsets")?,
            alt_link: alt_link_of(source, &headers)?,
            units,
            loaded: RefCell::default(),
            cached: Cell::new(0),
            tables: RefCell::default(),
            tables_len: Cell::new(0),
            budget,
        })
    }

    /// Number of units.
    pub(super) fn units(&self) -> usize {
        self.units.len()
    }

    /// The unit that holds an offset of `.debug_info`, and the offset inside it.
    pub(super) fn locate(&self, offset: u64) -> Option<(usize, UnitOffset)> {
        let index = self.units.partition_point(|unit| unit.start <= offset).checked_sub(1)?;
        let unit = self.units[index];
        let inside = offset - unit.start;
        (inside < unit.len).then_some((index, UnitOffset(inside as usize)))
    }

    /// Reads a unit, or takes it from the cache.
    pub(super) fn unit(&self, index: usize) -> Result<Rc<Unit>, DwarfError> {
        if let Some(unit) = self.loaded.borrow().get(&index) {
            return Ok(Rc::clone(unit));
        }
        let span = self.units.get(index).ok_or(DwarfError::TooMuch("references between units"))?;
        self.spend(span.len.max(64))?;
        let bytes = self.info.read(span.start, span.len)?;
        let abbreviations = self.table(*span)?;
        let unit = Rc::new(Unit { bytes, abbreviations, str_offsets_base: Cell::new(None) });
        self.keep(index, &unit, span.len as usize);
        Ok(unit)
    }

    /// Deducts loaded bytes from the budget.
    fn spend(&self, bytes: u64) -> Result<(), DwarfError> {
        let budget = self.budget.get().checked_sub(bytes);
        self.budget.set(budget.ok_or(DwarfError::TooMuch("references between units"))?);
        Ok(())
    }

    /// The abbreviations of a unit.
    fn table(&self, span: Span) -> Result<Rc<gimli::Abbreviations>, DwarfError> {
        if let Some(table) = self.tables.borrow().get(&span.abbrev) {
            return Ok(Rc::clone(table));
        }
        let len = span.abbrev_end - span.abbrev;
        if len > MAX_TABLE {
            return Err(DwarfError::TooMuch("the abbreviations of a unit"));
        }
        self.spend(len)?;
        let bytes = &self.abbrev[span.abbrev as usize..span.abbrev_end as usize];
        let table = DebugAbbrev::new(bytes, LittleEndian)
            .abbreviations(DebugAbbrevOffset(0))
            .map_err(DwarfError::malformed(".debug_abbrev"))?;
        let (table, mut tables) = (Rc::new(table), self.tables.borrow_mut());
        if self.tables_len.get() + len > TABLES {
            tables.clear();
            self.tables_len.set(0);
        }
        self.tables_len.set(self.tables_len.get() + len);
        tables.insert(span.abbrev, Rc::clone(&table));
        Ok(table)
    }

    fn keep(&self, index: usize, unit: &Rc<Unit>, len: usize) {
        let mut loaded = self.loaded.borrow_mut();
        if self.cached.get() + len > CACHE {
            loaded.clear();
            self.cached.set(0);
        }
        self.cached.set(self.cached.get() + len);
        loaded.insert(index, Rc::clone(unit));
    }
}

/// Walks the unit headers. Abbreviation tables are adjacent, so each ends where the next one starts: a table is
/// parsed over its own bytes only, whatever its contents.
fn find_units(info: &Data<'_>, abbrev_len: u64) -> Result<Vec<Span>, DwarfError> {
    /// `unit_length` (12 in the 64-bit format), `version`, `unit_type`, `address_size`, `debug_abbrev_offset`.
    const MAX_HEADER: u64 = 24;
    let what = "a unit header in .debug_info";
    let broken = |reason: &str| DwarfError::Elf(ElfError::malformed(what, reason));
    let mut units = Vec::new();
    let mut at = 0;
    while at < info.len() {
        if units.len() == MAX_UNITS {
            return Err(DwarfError::TooMuch("the units"));
        }
        let head = info.read(at, MAX_HEADER.min(info.len() - at))?;
        let word = |at: usize, len: usize| {
            let bytes = head.get(at..at + len).ok_or_else(|| broken("cut off"))?;
            Ok::<u64, DwarfError>(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
        };
        let (length_size, offset_size) = if word(0, 4)? == 0xffff_ffff { (12, 8) } else { (4, 4) };
        let length = if length_size == 12 { word(4, 8)? } else { word(0, 4)? };
        let len = length.checked_add(length_size as u64).filter(|&len| len <= info.len() - at);
        let len = len.ok_or_else(|| broken("a unit is longer than the section"))?;
        if len > MAX_UNIT {
            return Err(DwarfError::TooMuch("the bytes of a unit"));
        }
        let abbrev = match word(length_size, 2)? {
            2..=4 => word(length_size + 2, offset_size)?,
            5 => {
                let kind = word(length_size + 2, 1)? as u8;
                if !matches!(kind, 1 | 3) {
                    return Err(DwarfError::Unsupported(match kind {
                        4 | 5 => "split DWARF (-gsplit-dwarf)",
                        _ => "type units (-fdebug-types-section)",
                    }));
                }
                word(length_size + 4, offset_size)?
            }
            _ => return Err(DwarfError::Unsupported("a DWARF version outside 2 to 5")),
        };
        if abbrev > abbrev_len {
            return Err(broken("its abbreviations lie outside .debug_abbrev"));
        }
        units.push(Span { start: at, len, abbrev, abbrev_end: abbrev_len });
        at += len;
    }
    let mut tables: Vec<u64> = units.iter().map(|unit| unit.abbrev).collect();
    tables.sort_unstable();
    tables.dedup();
    for unit in &mut units {
        let next = tables.partition_point(|&start| start <= unit.abbrev);
        unit.abbrev_end = tables.get(next).copied().unwrap_or(abbrev_len);
    }
    Ok(units)
}
