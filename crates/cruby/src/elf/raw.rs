//! The parts of which headers consist: segments, sections, tables of records, strings.

use object::elf;
use object::pod::{self, Pod};

use super::source::read_bytes;
use super::{ElfError, ReadAt};
use crate::address::{FileOffset, Svma};

/// A `PT_LOAD` program header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadSegment {
    /// First stated address.
    pub address: Svma,
    /// File offset of that address.
    pub offset: FileOffset,
    /// Bytes backed by the file.
    pub file_size: u64,
    /// Bytes in memory.
    pub memory_size: u64,
    /// Whether it is mapped executable.
    pub executable: bool,
    /// Whether it is mapped writable.
    pub writable: bool,
}

/// File offset of a stated address in an executable segment: the offset at which a uprobe is attached.
pub fn code_offset(segments: &[LoadSegment], address: Svma) -> Option<FileOffset> {
    let segment = segments
        .iter()
        .find(|s| s.executable && address.0.checked_sub(s.address.0).is_some_and(|at| at < s.file_size))?;
    Some(FileOffset(segment.offset.0.checked_add(address.0 - segment.address.0)?))
}

/// A section header.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its name.
    pub name: String,
    /// `sh_type`.
    pub kind: elf::SectionType,
    /// `sh_flags`.
    pub flags: elf::SectionFlags,
    /// Stated address, 0 if it is not mapped.
    pub address: u64,
    /// File offset of its contents.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
    /// `sh_link`: index of an associated section.
    pub link: u32,
}

impl Section {
    /// Whether the section is mapped at run time.
    pub fn is_allocated(&self) -> bool {
        self.flags.0 & elf::SHF_ALLOC.0 != 0
    }

    /// Whether the section has contents in the file.
    pub fn has_bytes(&self) -> bool {
        self.kind != elf::SHT_NOBITS && self.kind != elf::SHT_NULL
    }

    /// Reads the contents, at most `limit` bytes.
    pub fn read(
        &self,
        source: &(impl ReadAt + ?Sized),
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, ElfError> {
        if !self.has_bytes() {
            return Ok(Vec::new());
        }
        if self.flags.0 & elf::SHF_COMPRESSED.0 != 0 {
            return Err(ElfError::malformed(what, "the section is compressed"));
        }
        read_bytes(source, what, self.offset, self.size, limit)
    }
}

/// Reads `count` records of type `T`.
pub(crate) fn read_table<T: Pod>(
    source: &(impl ReadAt + ?Sized),
    what: &'static str,
    offset: u64,
    count: u64,
    limit: u64,
) -> Result<Vec<T>, ElfError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if count > limit {
        return Err(ElfError::malformed(what, format!("{count} entries, more than {limit}")));
    }
    let size = count * size_of::<T>() as u64;
    let bytes = read_bytes(source, what, offset, size, size)?;
    Ok(records::<T>(&bytes).to_vec())
}

/// The bytes as records; an incomplete last one is dropped.
pub(crate) fn records<T: Pod>(bytes: &[u8]) -> &[T] {
    pod::slice_from_bytes(bytes, bytes.len() / size_of::<T>()).map_or(&[], |(records, _)| records)
}

/// The NUL-terminated string at `offset` of a string table; `None` if it is absent, not UTF-8 or absurdly long.
pub fn string_at(table: &[u8], offset: usize) -> Option<&str> {
    /// Bounds the work on a hostile table in which every name is the rest of the table.
    const MAX_NAME: usize = 4096;
    let tail = table.get(offset..)?;
    let tail = &tail[..tail.len().min(MAX_NAME)];
    let end = tail.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&tail[..end]).ok()
}
