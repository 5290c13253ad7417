//! The sections of debug information: read piecewise from the file, or inflated into memory if compressed.

use std::io::Read as _;

use object::LittleEndian as LE;
use object::elf;
use object::pod;

use super::DwarfError;
use crate::elf::headers::Headers;
use crate::elf::raw::Section;
use crate::elf::source::read_bytes;
use crate::elf::{ElfError, ReadAt};

/// Maximum bytes of an inflated section; a larger one is refused.
pub(super) const MAX_INFLATED: u64 = 256 << 20;

/// The bytes of one section.
pub(super) enum Data<'a> {
    /// In the file: only the requested bytes are read.
    File { source: &'a dyn ReadAt, what: &'static str, offset: u64, size: u64 },
    /// In memory.
    Memory { what: &'static str, bytes: Vec<u8> },
}

impl<'a> Data<'a> {
    /// The section of that name; empty if the file has none.
    pub(super) fn open(
        source: &'a dyn ReadAt,
        headers: &Headers,
        what: &'static str,
    ) -> Result<Self, DwarfError> {
        let Some(section) = headers.section(what).filter(|section| section.has_bytes()) else {
            return Ok(Self::Memory { what, bytes: Vec::new() });
        };
        if section.flags.0 & elf::SHF_COMPRESSED.0 != 0 {
            return Ok(Self::Memory { what, bytes: inflate(source, section, what, MAX_INFLATED)? });
        }
        Ok(Self::File { source, what, offset: section.offset, size: section.size })
    }

    pub(super) fn len(&self) -> u64 {
        match self {
            Self::File { size, .. } => *size,
            Self::Memory { bytes, .. } => bytes.len() as u64,
        }
    }

    /// A copy of the `len` bytes at `at`.
    pub(super) fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, DwarfError> {
        let end = at.checked_add(len).filter(|&end| end <= self.len());
        match self {
            Self::File { source, what, offset, .. } => {
                let start = offset.checked_add(at).filter(|_| end.is_some());
                let start = start.ok_or(ElfError::OutOfFile { what })?;
                Ok(read_bytes(*source, what, start, len, u64::MAX)?)
            }
            Self::Memory { what, bytes } => {
                let end = end.ok_or(ElfError::OutOfFile { what })?;
                Ok(bytes[at as usize..end as usize].to_vec())
            }
        }
    }

    /// The NUL-terminated string at `at`; `None` if there is none, or if it is not UTF-8 or absurdly long.
    pub(super) fn string(&self, at: u64) -> Option<String> {
        const STEP: u64 = 64;
        const MAX_STRING: usize = 4096;
        let mut found = Vec::new();
        let mut at = at;
        while found.len() < MAX_STRING {
            let len = STEP.min(self.len().checked_sub(at)?);
            let piece = self.read(at, len).ok().filter(|piece| !piece.is_empty())?;
            if let Some(end) = piece.iter().position(|&byte| byte == 0) {
                found.extend_from_slice(&piece[..end]);
                return String::from_utf8(found).ok();
            }
            found.extend_from_slice(&piece);
            at += len;
        }
        None
    }
}

/// Inflates an `SHF_COMPRESSED` section. The size in its header is an upper bound: it is checked against `limit` first
/// and then against the actual output.
pub(crate) fn inflate(
    source: &dyn ReadAt,
    section: &Section,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, DwarfError> {
    let stored = read_bytes(source, what, section.offset, section.size, limit)?;
    let Ok((header, packed)) = pod::from_bytes::<elf::CompressionHeader64<LE>>(&stored) else {
        return Err(ElfError::malformed(what, "no compression header").into());
    };
    let size = header.ch_size.get(LE);
    if size > limit {
        return Err(ElfError::TooLarge { what, size, limit }.into());
    }
    let broken = |reason: String| DwarfError::Elf(ElfError::malformed(what, reason));
    // Memory grows with the output, not with the size in the header; one byte more than that size is an error.
    let mut bytes = Vec::new();
    let read = match header.ch_type.get(LE) {
        elf::ELFCOMPRESS_ZLIB => {
            flate2::read::ZlibDecoder::new(packed).take(size + 1).read_to_end(&mut bytes)
        }
        elf::ELFCOMPRESS_ZSTD => {
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed)
                .map_err(|error| broken(format!("zstd: {error}")))?;
            (&mut decoder).take(size + 1).read_to_end(&mut bytes)
        }
        _ => return Err(DwarfError::Unsupported("a section compression other than zlib and zstd")),
    };
    read.map_err(|error| broken(format!("inflating: {error}")))?;
    if bytes.len() as u64 != size {
        return Err(broken(format!("inflates to {} bytes instead of {size}", bytes.len())));
    }
    Ok(bytes)
}
