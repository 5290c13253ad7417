//! Debug files on disk, below the root folder of a container or of the host.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use object::LittleEndian as LE;
use object::U32;
use object::pod;

use super::{Origin, Reject, Search, same_build};
use crate::elf::{BuildId, ElfError, Headers, ReadAt, dwarf, string_at};
use crate::host::root_file;

/// Where distributions install separate debug files.
const DEBUG: &str = "/usr/lib/debug";
/// Maximum size in bytes of a file whose checksum must be computed.
const MAX_FILE: u64 = 1 << 30;

/// The files that may contain an image's debug information, best first: origin, root and path below it.
pub(super) fn candidates<'a>(source: &dyn ReadAt, search: &Search<'a>) -> Vec<(Origin, &'a Path, PathBuf)> {
    let mut found = Vec::new();
    if let Some(path) = search.build_id.and_then(build_id_path) {
        for root in search.roots {
            found.push((Origin::BuildId(below(root, &path)), root.as_path(), path.clone()));
        }
    }
    if let Some((name, _)) = debug_link(source) {
        let folder = search.path.parent().unwrap_or(Path::new("/"));
        let beneath_debug = below(Path::new(DEBUG), folder);
        for root in search.roots {
            for path in [folder.join(&name), folder.join(".debug").join(&name), beneath_debug.join(&name)] {
                // A debug link may lead back to the file itself.
                if path != search.path {
                    found.push((Origin::DebugLink(below(root, &path)), root.as_path(), path));
                }
            }
        }
    }
    found
}

/// `/usr/lib/debug/.build-id/ab/cdef….debug`.
fn build_id_path(id: &BuildId) -> Option<PathBuf> {
    let hex = id.to_string();
    let (first, rest) = hex.split_at_checked(2)?;
    (!rest.is_empty()).then(|| PathBuf::from(format!("{DEBUG}/.build-id/{first}/{rest}.debug")))
}

/// `.gnu_debuglink`: a file name and the CRC of that file. Names with a folder in them are rejected.
fn debug_link(source: &dyn ReadAt) -> Option<(String, u32)> {
    const WHAT: &str = ".gnu_debuglink";
    let headers = Headers::read(source).ok()?;
    let bytes = headers.section(WHAT)?.read(source, WHAT, 1 << 16).ok()?;
    let name = string_at(&bytes, 0).filter(|name| !name.is_empty() && !name.contains('/'))?;
    let (crc, _) = pod::from_bytes::<U32<LE>>(bytes.get((name.len() + 1).next_multiple_of(4)..)?).ok()?;
    (name != "." && name != "..").then(|| (name.to_owned(), crc.get(LE)))
}

/// Whether a candidate exists, whether or not it is usable.
pub(super) fn is_there(root: &Path, path: &Path) -> bool {
    !matches!(open_below(root, path), Err(Reject::Absent))
}

/// Opens a candidate and proves that it belongs to the image.
pub(super) fn open_belonging(
    search: &Search<'_>,
    source: &dyn ReadAt,
    origin: &Origin,
    root: &Path,
    path: &Path,
) -> Result<File, Reject> {
    let file = open_below(root, path)?;
    may_be_used(&file, search)?;
    let same = same_build(search.build_id, &file)?;
    if matches!(origin, Origin::DebugLink(_)) {
        let wanted = debug_link(source).map(|(_, crc)| crc).ok_or(Reject::Absent)?;
        let found = checksum(&file)?;
        if found != wanted {
            return Err(Reject::OtherChecksum { found, wanted });
        }
    } else if !same {
        // Found by its name only: without its own build id, its origin is not proven.
        return Err(ElfError::malformed("a debug file", "it has no build id").into());
    }
    Ok(file)
}

/// Whether a separate file is of a user who can change the image itself.
pub(super) fn may_be_used(file: &File, search: &Search<'_>) -> Result<(), Reject> {
    let owner = file.metadata()?.uid();
    if owner == 0 || Some(owner) == search.owner { Ok(()) } else { Err(Reject::OtherOwner(owner)) }
}

/// Opens the supplementary file that a debug file names, if any and if `check` accepts it.
pub(super) fn alt_of(
    file: &File,
    root: &Path,
    path: &Path,
    check: impl Fn(&File) -> Result<(), Reject>,
) -> Result<Option<File>, Reject> {
    let Some(link) = dwarf::alt_link(file)? else { return Ok(None) };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let by_id = build_id_path(&link.build_id);
    let mut refused = None;
    for path in [Some(folder.join(&link.path)), by_id].into_iter().flatten() {
        match open_below(root, &path) {
            Ok(alt) if super::build_id_of(&alt)?.as_ref() == Some(&link.build_id) => {
                match check(&alt) {
                    Ok(()) => return Ok(Some(alt)),
                    // The next one may be root's.
                    Err(reject @ Reject::OtherOwner(_)) => refused = refused.or(Some(reject)),
                    Err(reject) => return Err(reject),
                }
            }
            Ok(_) | Err(Reject::Absent) => {}
            Err(reject) => return Err(reject),
        }
    }
    let missing = || dwarf::DwarfError::NeedsAlt { path: link.path, build_id: link.build_id }.into();
    Err(refused.unwrap_or_else(missing))
}

/// Opens a regular file below a root folder; links never lead out of it, and nothing that blocks is opened.
fn open_below(root: &Path, path: &Path) -> Result<File, Reject> {
    root_file::open_below(root, path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Reject::Absent,
        _ => Reject::Io(error),
    })
}

/// The CRC-32 of a whole file, as in `.gnu_debuglink`.
fn checksum(file: &File) -> Result<u32, Reject> {
    const PIECE: u64 = 1 << 16;
    let size = ReadAt::size(file)?;
    if size > MAX_FILE {
        return Err(Reject::TooLarge(size, MAX_FILE));
    }
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; PIECE as usize];
    let mut at = 0;
    while at < size {
        let piece = &mut buffer[..PIECE.min(size - at) as usize];
        ReadAt::read_exact_at(file, piece, at)?;
        hasher.update(piece);
        at += piece.len() as u64;
    }
    Ok(hasher.finalize())
}

/// An absolute path, placed below a root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}
