//! Separate debug information: where it may be, and whether it belongs to an image.
//!
//! After the image's own `.symtab`, in this order: `.gnu_debugdata` inside the image; the file for its build id and the
//! one that `.gnu_debuglink` names, below each root folder; the debuginfod servers, if any were named. A candidate is
//! only used if it is proven to belong to the image: by build id, by checksum, and by the addresses of symbols in both.

mod embedded;
mod local;
mod names;
mod server;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

pub use server::{InvalidServer, Servers};

pub use names::FunctionNames;

use crate::elf::{BuildId, ElfError, ElfImage, Headers, ReadAt, Section, SymbolTable, build_id, dwarf};
use object::elf;

/// Where to search.
#[derive(Clone, Copy, Debug)]
pub struct Search<'a> {
    /// The image's build id, if it has one.
    pub build_id: Option<&'a BuildId>,
    /// The image's path, as its process sees it.
    pub path: &'a Path,
    /// The user who owns the image, as gctrace sees it; `None`: unknown. What a process sees as its root may be made by its user, who could
    /// mislead gctrace about other users' processes of the image.
    pub owner: Option<u32>,
    /// Root folders in search order: that of the process (`/proc/PID/root`), then the host's.
    /// Symbolic links are only followed inside the root.
    pub roots: &'a [PathBuf],
    /// Servers to query when nothing was found on disk.
    pub servers: Option<&'a Servers>,
}

/// Where debug information came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `.gnu_debugdata` of the image.
    Embedded,
    /// The file that belongs to the build id.
    BuildId(PathBuf),
    /// The file that `.gnu_debuglink` names.
    DebugLink(PathBuf),
    /// A debuginfod server.
    Server(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str(".gnu_debugdata inside the image"),
            Self::BuildId(path) => write!(f, "{} (by build id)", path.display()),
            Self::DebugLink(path) => write!(f, "{} (by .gnu_debuglink)", path.display()),
            Self::Server(url) => f.write_str(url),
        }
    }
}

/// A place that was searched without success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The place.
    pub place: String,
    /// Why it yielded nothing usable.
    pub reason: String,
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

/// The result of a search, and the places searched before.
#[derive(Debug)]
pub struct Located<T> {
    /// The first match that belongs to the image.
    pub found: Option<(T, Origin)>,
    /// The unsuccessful places before it, in order.
    pub misses: Vec<Miss>,
}

/// A file with debug information, and the supplementary file to which dwz moved its common parts.
#[derive(Debug)]
pub struct DebugFile {
    /// The debug file.
    pub file: File,
    /// Its supplementary file, if it has one and it was found.
    pub alt: Option<File>,
}

/// Why a candidate is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Reject {
    #[error("not there")]
    Absent,
    #[error("user {0} owns it, not root or the owner of the image")]
    OtherOwner(u32),
    #[error("{0}")]
    Elf(#[from] ElfError),
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("its build id is {found}, the image's is {wanted}")]
    OtherBuild { found: BuildId, wanted: BuildId },
    #[error("its CRC is {found:#010x}, the image requires {wanted:#010x}")]
    OtherChecksum { found: u32, wanted: u32 },
    #[error("it has no symbol table")]
    NoSymbols,
    #[error("{0}")]
    Dwarf(#[from] dwarf::DwarfError),
    #[error("it says that `{name}` is at another address than in the image")]
    Elsewhere { name: String },
    #[error("it names none of the functions that the image exports")]
    Stranger,
    #[error("{0}")]
    Server(String),
    #[error("{0} bytes, more than the limit of {1}")]
    TooLarge(u64, u64),
}

/// Collects misses while places are tried in order.
struct Trail<T> {
    located: Located<T>,
}

impl<T> Trail<T> {
    fn new() -> Self {
        Self { located: Located { found: None, misses: Vec::new() } }
    }

    /// Tries a place unless something has already been found.
    fn look(&mut self, place: Origin, read: impl FnOnce() -> Result<T, Reject>) {
        if self.located.found.is_some() {
            return;
        }
        match read() {
            Ok(value) => self.located.found = Some((value, place)),
            Err(reject) => {
                self.located.misses.push(Miss { place: place.to_string(), reason: reject.to_string() });
            }
        }
    }
}

/// Searches for the symbol table of an image that has none of its own.
pub fn symbols(image: &ElfImage, source: &dyn ReadAt, search: &Search<'_>) -> Located<SymbolTable> {
    symbols_beside(image.dynamic_symbols(), source, search)
}

/// Like [`symbols`], for an image of which only the exports were read.
pub(super) fn symbols_beside(
    exports: &SymbolTable,
    source: &dyn ReadAt,
    search: &Search<'_>,
) -> Located<SymbolTable> {
    let mut trail = Trail::new();
    trail.look(Origin::Embedded, || {
        let inner = embedded::unpack(source)?;
        same_build(search.build_id, inner.as_slice())?;
        proven(exports, symtab(inner.as_slice())?, false)
    });
    for (origin, root, path) in local::candidates(source, search) {
        trail.look(origin.clone(), || {
            let file = local::open_belonging(search, source, &origin, root, &path)?;
            proven(exports, symtab(&file)?, true)
        });
    }
    if let (Some(servers), Some(id)) = (search.servers, search.build_id) {
        for url in servers.urls() {
            trail.look(Origin::Server(url.clone()), || {
                proven(exports, server::symbols(servers, url, id)?, true)
            });
        }
    }
    trail.located
}

/// Whether anything on this host may contain the symbols of an image: costs only some attempts to open a file, and does not require
/// that the image has been read.
pub fn may_be_at_hand(source: &dyn ReadAt, search: &Search<'_>) -> bool {
    embedded::is_there(source)
        || local::candidates(source, search).iter().any(|(_, root, path)| local::is_there(root, path))
}

/// Searches for the debug information (DWARF) of an image. The image itself is not searched.
pub fn types(source: &dyn ReadAt, search: &Search<'_>) -> Located<DebugFile> {
    let mut trail = Trail::new();
    for (origin, root, path) in local::candidates(source, search) {
        trail.look(origin.clone(), || {
            let file = local::open_belonging(search, source, &origin, root, &path)?;
            has_dwarf(&file)?;
            let alt = local::alt_of(&file, root, &path, |alt| local::may_be_used(alt, search))?;
            Ok(DebugFile { file, alt })
        });
    }
    if let (Some(servers), Some(id)) = (search.servers, search.build_id) {
        for url in servers.urls() {
            trail.look(Origin::Server(url.clone()), || {
                let file = server::debug_file(servers, url, id)?;
                same_build(Some(id), &file)?;
                has_dwarf(&file)?;
                let alt = match dwarf::alt_link(&file)? {
                    Some(link) => {
                        let alt = server::debug_file(servers, url, &link.build_id)?;
                        same_build(Some(&link.build_id), &alt)?;
                        Some(alt)
                    }
                    None => None,
                };
                Ok(DebugFile { file, alt })
            });
        }
    }
    trail.located
}

/// Opens a debug file that the user named, with its supplementary file; `Err`: why it is not used.
pub fn open_given(path: &Path) -> Result<(DebugFile, Option<BuildId>), String> {
    let open = || -> Result<_, Reject> {
        let file = File::open(path)?;
        let id = build_id_of(&file)?;
        has_dwarf(&file)?;
        let real = path.canonicalize()?;
        let alt = local::alt_of(&file, Path::new("/"), &real, |_| Ok(()))?;
        Ok((DebugFile { file, alt }, id))
    };
    open().map_err(|reject| format!("{}: {reject}", path.display()))
}

fn has_dwarf(file: &File) -> Result<(), Reject> {
    let headers = Headers::read(file)?;
    let present = headers.section(".debug_info").is_some_and(Section::has_bytes);
    if present { Ok(()) } else { Err(dwarf::DwarfError::Missing.into()) }
}

/// Reads the build id of an ELF file.
fn build_id_of(source: &(impl ReadAt + ?Sized)) -> Result<Option<BuildId>, ElfError> {
    build_id(source, &Headers::read(source)?)
}

/// Whether the build ids are equal: different build ids mean different builds.
fn same_build(wanted: Option<&BuildId>, source: &(impl ReadAt + ?Sized)) -> Result<bool, Reject> {
    match (wanted, build_id_of(source)?) {
        (Some(wanted), Some(found)) if *wanted != found => {
            Err(Reject::OtherBuild { found, wanted: wanted.clone() })
        }
        (Some(_), Some(_)) => Ok(true),
        _ => Ok(false),
    }
}

fn symtab(source: &(impl ReadAt + ?Sized)) -> Result<SymbolTable, Reject> {
    let headers = Headers::read(source)?;
    let section = headers.section_of_kind(elf::SHT_SYMTAB).ok_or(Reject::NoSymbols)?;
    let table = SymbolTable::read(source, &headers, section)?;
    if table.is_empty() { Err(Reject::NoSymbols) } else { Ok(table) }
}

/// Accepts a table that belongs to the image: symbols in both have equal addresses. A whole table also contains at
/// least one function that the image exports; an embedded one leaves those out.
fn proven(exports: &SymbolTable, table: SymbolTable, whole: bool) -> Result<SymbolTable, Reject> {
    let mut agreeing = 0;
    for exported in exports.iter() {
        if table.at(exported.address).any(|symbol| symbol.name == exported.name) {
            agreeing += 1;
        } else if table.find(exported.name).is_some() {
            return Err(Reject::Elsewhere { name: exported.name.to_owned() });
        }
    }
    if whole && agreeing == 0 { Err(Reject::Stranger) } else { Ok(table) }
}
