//! Structure layouts out of DWARF debug information: sizes, member offsets, bit-fields and arrays.
//!
//! Only the units that can define a wanted structure are read, one at a time. Versions 2 to 5, compressed sections
//! (`SHF_COMPRESSED`: zlib, zstd), partial units and references between units (dwz), and a supplementary file
//! (`.gnu_debugaltlink`) are understood; split DWARF, type units and relocatable objects are refused by name.

mod die;
mod file;
mod sections;
mod structs;
#[cfg(test)]
mod tests;

use super::ElfError;

pub use file::AltLink;
pub use structs::{Member, MemberKind, StructLayout, Structs};

use super::ReadAt;
use file::DwarfFile;

/// Why debug information could not be used. Every variant names what was being read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DwarfError {
    /// The ELF file around it could not be read.
    #[error("{0}")]
    Elf(#[from] ElfError),
    /// The contents contradict the format.
    #[error("malformed {what}: {source}")]
    Malformed {
        /// What was being read.
        what: &'static str,
        /// What is wrong with it.
        source: gimli::Error,
    },
    /// The file has no `.debug_info`.
    #[error("the file has no DWARF (.debug_info)")]
    Missing,
    /// A form of DWARF that gctrace does not read.
    #[error("unsupported debug information: {0}")]
    Unsupported(&'static str),
    /// The types are in a supplementary file that was not given.
    #[error("the types are in the supplementary file {path} (dwz), build id {build_id}, which was not found")]
    NeedsAlt {
        /// The path that `.gnu_debugaltlink` names.
        path: String,
        /// The build id that it names.
        build_id: super::BuildId,
    },
    /// Two units define the same structure differently.
    #[error("`struct {0}` is defined in two ways")]
    Ambiguous(String),
    /// The work that the file asks for exceeds a limit.
    #[error("{0} exceed what gctrace is willing to read")]
    TooMuch(&'static str),
}

impl DwarfError {
    pub(crate) fn malformed(what: &'static str) -> impl Fn(gimli::Error) -> Self {
        move |source| Self::Malformed { what, source }
    }
}

/// Which file a library with dwz-compressed debug information names as its supplementary file, if any.
pub fn alt_link(source: &dyn ReadAt) -> Result<Option<AltLink>, DwarfError> {
    file::alt_link(source)
}

/// Reads the structures with these tags out of the debug information in `source`, with the supplementary file `alt`
/// where there is one.
///
/// `units` are the base names of the C files that define them (`gc.c`); other units are only looked at when none of
/// those is there. Structures that are nowhere defined are missing in the answer.
pub fn read_structs(
    source: &dyn ReadAt,
    alt: Option<&dyn ReadAt>,
    tags: &[&str],
    units: &[&str],
) -> Result<Structs, DwarfError> {
    let main = DwarfFile::open(source)?;
    let alt = alt.map(DwarfFile::open).transpose()?;
    structs::read(&die::Dies::new(main, alt), tags, units)
}
