//! Structure layouts from DWARF debug information: sizes, member offsets, bit-fields and arrays.
//!
//! Only the units that can define a wanted structure are read, one at a time. Supported: versions 2 to 5, compressed
//! sections (`SHF_COMPRESSED`: zlib, zstd), partial units and references between units (dwz), and a supplementary file
//! (`.gnu_debugaltlink`). Split DWARF, type units and relocatable objects are refused with an error that names them.

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
    /// A kind of DWARF that gctrace does not read.
    #[error("unsupported debug information: {0}")]
    Unsupported(&'static str),
    /// The types are in a supplementary file that was not given.
    #[error("the types are in the supplementary file {path} (dwz), build id {build_id}, which was not found")]
    NeedsAlt {
        /// The path in `.gnu_debugaltlink`.
        path: String,
        /// The build id in it.
        build_id: super::BuildId,
    },
    /// Two units define the same structure differently.
    #[error("`struct {0}` is defined in two ways")]
    Ambiguous(String),
    /// The file requires more work than a limit allows.
    #[error("{0} exceed a limit of gctrace")]
    TooMuch(&'static str),
}

impl DwarfError {
    pub(crate) fn malformed(what: &'static str) -> impl Fn(gimli::Error) -> Self {
        move |source| Self::Malformed { what, source }
    }
}

/// The supplementary file that the debug information of a library refers to, if it was compressed with dwz.
pub fn alt_link(source: &dyn ReadAt) -> Result<Option<AltLink>, DwarfError> {
    file::alt_link(source)
}

/// Reads the structures with these tags from the debug information in `source` and in its supplementary file `alt`,
/// if any.
///
/// `units` are the base names of the C files that define them (`gc.c`). Partial units, artificial units (link-time
/// optimisation) and all units of `alt` are read, too. A structure without a definition is missing in the result.
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
