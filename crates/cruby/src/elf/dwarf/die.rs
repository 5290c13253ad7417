//! Debugging information entries: the parts that structure layouts need, across units and files.

use std::cell::Cell;

use gimli::{AttributeValue, DebuggingInformationEntry, DwAt, DwTag, Operation, UnitHeader, UnitOffset};

use super::DwarfError;
use super::file::{DwarfFile, Slice};
use crate::elf::ElfError;

const WHAT: &str = "an entry in .debug_info";
/// Maximum number of entries read for one query: a whole libruby has about three million.
const MAX_ENTRIES: u64 = 24_000_000;
/// Maximum number of children kept of one entry: the largest unit of a libruby has about ten thousand.
const MAX_CHILDREN: usize = 1 << 19;

/// Position of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Position {
    /// Whether it is in the supplementary file.
    pub(super) alt: bool,
    pub(super) unit: usize,
    pub(super) offset: UnitOffset,
}

/// An entry.
#[derive(Clone, Debug)]
pub(super) struct Die {
    pub(super) position: Position,
    pub(super) tag: DwTag,
    name: Option<Name>,
    /// `DW_AT_byte_size`.
    pub(super) size: Option<u64>,
    /// `DW_AT_type`.
    pub(super) ty: Option<Position>,
    pub(super) declaration: bool,
    /// `DW_AT_data_member_location`, bytes.
    pub(super) location: Option<u64>,
    pub(super) bit_size: Option<u64>,
    /// `DW_AT_data_bit_offset` (DWARF 4 and later).
    pub(super) data_bit_offset: Option<u64>,
    /// `DW_AT_bit_offset` (DWARF 2 and 3): from the most significant bit of the storage unit.
    pub(super) bit_offset: Option<u64>,
    /// Number of elements of an array dimension, if known.
    pub(super) count: Option<u64>,
    str_offsets_base: Option<u64>,
}

/// Where the name of an entry is stored.
#[derive(Clone, Debug)]
enum Name {
    Inline(String),
    Str(u64),
    LineStr(u64),
    Alt(u64),
    Index(u64),
}

/// The entries of a file and of its supplementary file.
pub(super) struct Dies<'a> {
    main: DwarfFile<'a>,
    alt: Option<DwarfFile<'a>>,
    budget: Cell<u64>,
}

impl<'a> Dies<'a> {
    pub(super) fn new(main: DwarfFile<'a>, alt: Option<DwarfFile<'a>>) -> Self {
        Self { main, alt, budget: Cell::new(MAX_ENTRIES) }
    }

    /// All units, each given by whether it is in the supplementary file and by its index.
    pub(super) fn units(&self) -> Vec<(bool, usize)> {
        let alt = self.alt.as_ref().map_or(0, DwarfFile::units);
        (0..self.main.units()).map(|unit| (false, unit)).chain((0..alt).map(|unit| (true, unit))).collect()
    }

    /// The root entry of a unit.
    pub(super) fn root(&self, alt: bool, unit: usize) -> Result<Die, DwarfError> {
        let loaded = self.file(alt)?.unit(unit)?;
        let offset = loaded.header()?.root_offset();
        self.die(Position { alt, unit, offset })
    }

    /// The entry at a position.
    pub(super) fn die(&self, position: Position) -> Result<Die, DwarfError> {
        self.spend()?;
        let unit = self.file(position.alt)?.unit(position.unit)?;
        let header = unit.header()?;
        let entry =
            header.entry(&unit.abbreviations, position.offset).map_err(DwarfError::malformed(WHAT))?;
        self.extract(position, &header, &entry)
    }

    /// The children of the entry at a position.
    pub(super) fn children(&self, position: Position) -> Result<Vec<Die>, DwarfError> {
        let unit = self.file(position.alt)?.unit(position.unit)?;
        let header = unit.header()?;
        let malformed = DwarfError::malformed(WHAT);
        let entries_from = |offset| header.entries_raw(&unit.abbreviations, Some(offset));
        let mut cursor = entries_from(position.offset).map_err(&malformed)?;
        let mut entry = DebuggingInformationEntry::null();
        let mut children = Vec::new();
        let mut depth = 0_usize;
        while !cursor.is_empty() {
            self.spend()?;
            if cursor.read_entry(&mut entry).map_err(&malformed)? {
                if depth == 1 {
                    if children.len() >= MAX_CHILDREN {
                        return Err(DwarfError::TooMuch("the children of an entry"));
                    }
                    let position = Position { offset: entry.offset(), ..position };
                    children.push(self.extract(position, &header, &entry)?);
                }
                let sibling = entry.attr_value(gimli::DW_AT_sibling).filter(|_| depth > 0);
                match sibling {
                    // Forward only, so that the loop ends.
                    Some(AttributeValue::UnitRef(next)) if next > entry.offset() => {
                        cursor = entries_from(next).map_err(&malformed)?;
                    }
                    _ if entry.has_children() => depth += 1,
                    _ => {}
                }
            } else {
                depth = depth.saturating_sub(1);
            }
            if depth == 0 {
                break;
            }
        }
        Ok(children)
    }

    /// The name of an entry; `None` if it has none.
    pub(super) fn name(&self, die: &Die) -> Result<Option<String>, DwarfError> {
        let file = self.file(die.position.alt)?;
        let (section, offset) = match &die.name {
            None => return Ok(None),
            Some(Name::Inline(name)) => return Ok(Some(name.clone())),
            Some(Name::Str(offset)) => (&file.str, *offset),
            Some(Name::LineStr(offset)) => (&file.line_str, *offset),
            Some(Name::Alt(offset)) => (&self.file(true)?.str, *offset),
            Some(Name::Index(index)) => (&file.str, self.indexed(file, die, *index)?),
        };
        let name = section.string(offset);
        Ok(Some(name.ok_or_else(|| ElfError::malformed(WHAT, "a name lies outside the strings"))?))
    }

    /// `DW_AT_producer` of a root entry.
    pub(super) fn producer(&self, root: &Die) -> Result<Option<String>, DwarfError> {
        let unit = self.file(root.position.alt)?.unit(root.position.unit)?;
        let header = unit.header()?;
        let entry = header.entry(&unit.abbreviations, root.position.offset);
        let entry = entry.map_err(DwarfError::malformed(WHAT))?;
        let producer = entry.attr_value(gimli::DW_AT_producer).and_then(|value| name(&value));
        self.name(&Die { name: producer, ..root.clone() })
    }

    /// `DW_FORM_strx`: offset of a string by its index in the unit's part of `.debug_str_offsets`.
    fn indexed(&self, file: &DwarfFile<'a>, die: &Die, index: u64) -> Result<u64, DwarfError> {
        let Position { alt, unit, .. } = die.position;
        let loaded = file.unit(unit)?;
        let size = u64::from(loaded.header()?.format().word_size());
        let base = if let Some(base) = loaded.str_offsets_base.get() {
            base
        } else {
            let own = die.str_offsets_base;
            // After the header of the first contribution, if the unit has no base of its own.
            let base = own.or(self.root(alt, unit)?.str_offsets_base).unwrap_or(size * 2);
            loaded.str_offsets_base.set(Some(base));
            base
        };
        let at = index.checked_mul(size).and_then(|at| at.checked_add(base));
        let at = at.ok_or_else(|| ElfError::malformed(WHAT, "a string index overflows"))?;
        let bytes = file.str_offsets.read(at, size)?;
        Ok(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn file(&self, alt: bool) -> Result<&DwarfFile<'a>, DwarfError> {
        if !alt {
            return Ok(&self.main);
        }
        self.alt.as_ref().ok_or_else(|| match &self.main.alt_link {
            Some(link) => DwarfError::NeedsAlt { path: link.path.clone(), build_id: link.build_id.clone() },
            None => DwarfError::Unsupported("references to a supplementary file that is not named"),
        })
    }

    fn spend(&self) -> Result<(), DwarfError> {
        let left = self.budget.get().checked_sub(1);
        self.budget.set(left.ok_or(DwarfError::TooMuch("the entries"))?);
        Ok(())
    }

    fn extract(
        &self,
        position: Position,
        header: &UnitHeader<Slice<'_>>,
        entry: &DebuggingInformationEntry<Slice<'_>>,
    ) -> Result<Die, DwarfError> {
        let value = |name: DwAt| entry.attr_value(name);
        let number = |name: DwAt| value(name).and_then(|value| value.udata_value());
        let location = match value(gimli::DW_AT_data_member_location) {
            Some(AttributeValue::Exprloc(expression)) => {
                // DWARF 2: `DW_OP_plus_uconst n`.
                match expression.operations(header.encoding()).next() {
                    Ok(Some(Operation::PlusConstant { value })) => Some(value),
                    _ => return Err(DwarfError::Unsupported("a member whose place is computed")),
                }
            }
            value => value.and_then(|value| value.udata_value()),
        };
        let count = number(gimli::DW_AT_count)
            .or_else(|| number(gimli::DW_AT_upper_bound).and_then(|last| last.checked_add(1)));
        Ok(Die {
            position,
            tag: entry.tag(),
            name: value(gimli::DW_AT_name).and_then(|value| name(&value)),
            size: number(gimli::DW_AT_byte_size),
            ty: value(gimli::DW_AT_type).map(|value| self.refer(position, &value)).transpose()?,
            declaration: matches!(value(gimli::DW_AT_declaration), Some(AttributeValue::Flag(true))),
            location,
            bit_size: number(gimli::DW_AT_bit_size),
            data_bit_offset: number(gimli::DW_AT_data_bit_offset),
            bit_offset: number(gimli::DW_AT_bit_offset),
            count,
            str_offsets_base: match value(gimli::DW_AT_str_offsets_base) {
                Some(AttributeValue::DebugStrOffsetsBase(base)) => Some(base.0 as u64),
                _ => None,
            },
        })
    }

    fn refer(&self, from: Position, value: &AttributeValue<Slice<'_>>) -> Result<Position, DwarfError> {
        let (alt, offset) = match *value {
            AttributeValue::UnitRef(offset) => return Ok(Position { offset, ..from }),
            AttributeValue::DebugInfoRef(offset) => (from.alt, offset.0 as u64),
            AttributeValue::DebugInfoRefSup(offset) => (true, offset.0 as u64),
            AttributeValue::DebugTypesRef(_) => {
                return Err(DwarfError::Unsupported("type units (-fdebug-types-section)"));
            }
            _ => return Err(ElfError::malformed(WHAT, "a type that is not a reference").into()),
        };
        let found = self.file(alt)?.locate(offset);
        let (unit, offset) = found.ok_or_else(|| ElfError::malformed(WHAT, "a type outside all units"))?;
        Ok(Position { alt, unit, offset })
    }
}

fn name(value: &AttributeValue<Slice<'_>>) -> Option<Name> {
    Some(match *value {
        AttributeValue::String(text) => Name::Inline(std::str::from_utf8(text.slice()).ok()?.to_owned()),
        AttributeValue::DebugStrRef(offset) => Name::Str(offset.0 as u64),
        AttributeValue::DebugLineStrRef(offset) => Name::LineStr(offset.0 as u64),
        AttributeValue::DebugStrRefSup(offset) => Name::Alt(offset.0 as u64),
        AttributeValue::DebugStrOffsetsIndex(index) => Name::Index(index.0 as u64),
        _ => return None,
    })
}
