//! Names of an image's functions, from any available source.

use std::path::{Path, PathBuf};

use object::elf;

use super::{Search, symbols_beside};
use crate::address::Svma;
use crate::elf::{ElfError, FunctionRange, Headers, ReadAt, Section, SymbolTable, build_id, function_ranges};

const MAX_SECTION: u64 = 64 << 20;

/// The sources of an image's function names.
#[derive(Debug)]
pub struct FunctionNames {
    symbols: SymbolTable,
    exports: SymbolTable,
    ranges: Vec<FunctionRange>,
}

impl FunctionNames {
    /// Reads the symbols of an image: `.symtab`, otherwise `.gnu_debugdata` or a separate debug file below the roots; `.dynsym`;
    /// and the extents of functions without a symbol. Missing or damaged sources are skipped; it is only an error if
    /// nothing could be read at all. `owner`: the user who owns the image, if known.
    pub fn read(
        source: &dyn ReadAt,
        path: &Path,
        owner: Option<u32>,
        roots: &[PathBuf],
    ) -> Result<Self, ElfError> {
        let headers = Headers::read(&source)?;
        let table = |kind| {
            let read =
                headers.section_of_kind(kind).map(|section| SymbolTable::read(&source, &headers, section));
            read.and_then(Result::ok).unwrap_or_default()
        };
        let exports = table(elf::SHT_DYNSYM);
        let mut symbols = table(elf::SHT_SYMTAB);
        if symbols.is_empty() {
            let build_id = build_id(&source, &headers).ok().flatten();
            let search = Search { build_id: build_id.as_ref(), path, owner, roots, servers: None };
            let located = symbols_beside(&exports, source, &search);
            symbols = located.found.map(|(table, _)| table).unwrap_or_default();
        }
        let ranges = ranges(source, &headers).unwrap_or_default();
        Ok(Self { symbols, exports, ranges })
    }

    /// Name of the function that covers the address.
    pub fn name(&self, address: Svma) -> Option<&str> {
        let symbol = self.symbols.function_covering(address);
        Some(symbol.or_else(|| self.exports.function_covering(address))?.name)
    }

    /// The start of the function that covers the address, whether it has a name or not.
    pub fn start(&self, address: Svma) -> Option<Svma> {
        let index = self.ranges.partition_point(|range| range.start <= address).checked_sub(1)?;
        self.ranges[index].contains(address).then_some(self.ranges[index].start)
    }
}

fn ranges(source: &dyn ReadAt, headers: &Headers) -> Result<Vec<FunctionRange>, ElfError> {
    let missing = |name| move || ElfError::MissingSection(name);
    let text = headers.section(".text").ok_or_else(missing(".text"))?;
    let unwind: &Section = headers.section(".eh_frame").ok_or_else(missing(".eh_frame"))?;
    let bytes = unwind.read(&source, ".eh_frame", MAX_SECTION)?;
    function_ranges(
        &bytes,
        unwind.address,
        text.address..text.address.saturating_add(text.size),
        headers.machine,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::{libruby, libruby_file};

    /// Exports are named; functions without a name are identified by their start address.
    #[test]
    fn stripped_library() {
        let file = libruby_file();
        let names = FunctionNames::read(&file, libruby(), None, &[]).unwrap();
        let exported = names.exports.find("rb_funcallv").unwrap();
        assert_eq!(names.name(exported.address), Some("rb_funcallv"));
        assert_eq!(names.start(Svma(exported.address.0 + 1)), Some(exported.address));
        let nameless = names.ranges.iter().find(|range| names.name(range.start).is_none()).unwrap();
        assert_eq!(names.start(Svma(nameless.end.0 - 1)), Some(nameless.start));
        assert_eq!(names.name(Svma(0)), None);
        assert_eq!(names.start(Svma(u64::MAX)), None);
    }
}
