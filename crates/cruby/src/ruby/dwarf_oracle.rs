//! Ground truth for tests from an image with DWARF: where the compiler put the bodies of the functions whose events the
//! finder looks for, inlined copies included.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use gimli::{EndianSlice, LittleEndian, UnitOffset};
use object::{LittleEndian as LE, Object, ObjectSection};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Source files whose functions matter; link-time optimisation gives its units another name.
const UNITS: [&str; 5] = ["gc.c", "default.c", "thread.c", "thread_pthread.c", "<artificial>"];

/// A copy of a function: out of line, or inlined into another.
#[derive(Clone, Debug)]
pub(super) struct Instance {
    /// Name in the source.
    pub(super) name: String,
    /// Name of the function whose source calls it; `None` for an out-of-line copy.
    pub(super) caller: Option<String>,
    pub(super) ranges: Vec<Range<u64>>,
}

impl Instance {
    pub(super) fn contains(&self, address: u64) -> bool {
        self.ranges.iter().any(|range| range.contains(&address))
    }
}

/// A row of the line table: where the code of a source line starts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) address: u64,
    pub(super) end: u64,
    pub(super) file: String,
    pub(super) number: u64,
}

/// The functions and lines in the DWARF of a file.
pub(super) struct Truth {
    instances: Vec<Instance>,
    lines: Vec<Line>,
}

impl Truth {
    /// Reads the DWARF of the file; `None` if it has no DWARF or only compressed sections.
    pub(super) fn read(file: &[u8], names: &[&str]) -> Option<Self> {
        let object = object::read::elf::ElfFile64::<LE>::parse(file).ok()?;
        let section = |id: gimli::SectionId| -> Result<Slice<'_>, gimli::Error> {
            let section = object.section_by_name(id.name());
            let compressed = |s: &object::read::elf::ElfSection64<'_, '_, LE>| {
                s.compressed_file_range().is_ok_and(|r| r.format != object::CompressionFormat::None)
            };
            let data = section.filter(|s| !compressed(s)).and_then(|s| s.data().ok());
            Ok(EndianSlice::new(data.unwrap_or_default(), LittleEndian))
        };
        let dwarf = gimli::Dwarf::load(section).ok()?;
        let mut truth = Self { instances: Vec::new(), lines: Vec::new() };
        let mut names_of = Names::default();
        let mut units = dwarf.units();
        let mut any = false;
        // With link-time optimisation units refer to each other, so all names are read first.
        let mut wanted = Vec::new();
        while let Some(header) = units.next().ok()? {
            any = true;
            let unit = dwarf.unit(header).ok()?;
            let name = unit.name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if UNITS.iter().any(|wanted| name == *wanted || name.ends_with(&format!("/{wanted}"))) {
                names_of.read_unit(&dwarf, &unit).ok()?;
                wanted.push(unit);
            }
        }
        for unit in &wanted {
            truth.read_unit(&dwarf, unit, &names_of, names).ok()?;
            truth.read_lines(&dwarf, unit).ok()?;
        }
        truth.lines.sort();
        any.then_some(truth)
    }

    pub(super) fn instances(&self, name: &str) -> Vec<&Instance> {
        self.instances.iter().filter(|instance| instance.name == name).collect()
    }

    /// File and line of the code at an address.
    pub(super) fn line(&self, address: u64) -> Option<&Line> {
        self.lines.iter().rev().find(|line| (line.address..line.end).contains(&address))
    }

    pub(super) fn lines(&self) -> &[Line] {
        &self.lines
    }

    fn read_unit(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        unit: &gimli::Unit<Slice<'_>>,
        names: &Names,
        wanted: &[&str],
    ) -> Result<(), gimli::Error> {
        // The function that encloses each depth of the walk.
        let mut enclosing: BTreeMap<isize, Option<String>> = BTreeMap::new();
        let mut entries = unit.entries();
        while let Some(entry) = entries.next_dfs()? {
            let depth = entry.depth();
            enclosing.split_off(&depth);
            if entry.tag() != gimli::DW_TAG_subprogram && entry.tag() != gimli::DW_TAG_inlined_subroutine {
                continue;
            }
            let name = global(unit, entry.offset()).and_then(|offset| names.of(offset));
            let caller = enclosing.values().next_back().cloned().flatten();
            enclosing.insert(depth, name.clone());
            let Some(name) = name.filter(|name| wanted.contains(&name.as_str())) else { continue };
            let mut ranges = Vec::new();
            let mut found = dwarf.die_ranges(unit, entry)?;
            while let Some(range) = found.next()? {
                if range.begin < range.end && range.begin != 0 {
                    ranges.push(range.begin..range.end);
                }
            }
            if !ranges.is_empty() {
                self.instances.push(Instance { name, caller, ranges });
            }
        }
        Ok(())
    }

    fn read_lines(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        unit: &gimli::Unit<Slice<'_>>,
    ) -> Result<(), gimli::Error> {
        let Some(program) = unit.line_program.clone() else { return Ok(()) };
        let mut rows = program.rows();
        let mut last: Option<Line> = None;
        while let Some((header, row)) = rows.next_row()? {
            if let Some(mut line) = last.take()
                && line.address < row.address()
            {
                line.end = row.address();
                self.lines.push(line);
            }
            let Some(file) = row.file(header).filter(|_| !row.end_sequence()) else { continue };
            let mut path = dwarf.attr_string(unit, file.path_name())?.to_string_lossy().into_owned();
            if !path.starts_with('/')
                && let Some(directory) = file.directory(header)
            {
                path = format!("{}/{path}", dwarf.attr_string(unit, directory)?.to_string_lossy());
            }
            let number = row.line().map_or(0, std::num::NonZero::get);
            last = Some(Line { address: row.address(), end: 0, file: path, number });
        }
        Ok(())
    }
}

/// Names of functions by their offset in `.debug_info`.
#[derive(Default)]
struct Names {
    names: HashMap<usize, String>,
    origins: HashMap<usize, usize>,
}

impl Names {
    fn read_unit(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'_>>,
        unit: &gimli::Unit<Slice<'_>>,
    ) -> Result<(), gimli::Error> {
        let mut entries = unit.entries();
        while let Some(entry) = entries.next_dfs()? {
            if entry.tag() != gimli::DW_TAG_subprogram && entry.tag() != gimli::DW_TAG_inlined_subroutine {
                continue;
            }
            let Some(offset) = global(unit, entry.offset()) else { continue };
            if let Some(value) = entry.attr_value(gimli::DW_AT_name) {
                let name = dwarf.attr_string(unit, value)?.to_string_lossy().into_owned();
                self.names.insert(offset, name);
            }
            for attribute in [gimli::DW_AT_specification, gimli::DW_AT_abstract_origin] {
                let origin = match entry.attr_value(attribute) {
                    Some(gimli::AttributeValue::UnitRef(origin)) => global(unit, origin),
                    Some(gimli::AttributeValue::DebugInfoRef(origin)) => Some(origin.0),
                    _ => None,
                };
                self.origins.extend(origin.map(|origin| (offset, origin)));
            }
        }
        Ok(())
    }

    fn of(&self, mut offset: usize) -> Option<String> {
        /// Out-of-line copy → abstract instance → declaration, and one more step with link-time optimisation.
        const MAX_CHAIN: usize = 6;
        for _ in 0..MAX_CHAIN {
            if let Some(name) = self.names.get(&offset) {
                return Some(name.clone());
            }
            offset = *self.origins.get(&offset)?;
        }
        None
    }
}

fn global(unit: &gimli::Unit<Slice<'_>>, offset: UnitOffset) -> Option<usize> {
    Some(offset.to_debug_info_offset(&unit.header)?.0)
}
