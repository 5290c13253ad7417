//! `.gnu_debugdata`: a small ELF file with the names of internal functions, packed with xz, inside the image (Fedora,
//! RHEL and their relatives).

use std::io::Read as _;

use lzma_rust2::XzReader;

use super::Reject;
use crate::elf::{ElfError, Headers, ReadAt};

const WHAT: &str = ".gnu_debugdata";
const MAX_PACKED: u64 = 16 << 20;
const MAX_UNPACKED: u64 = 64 << 20;
/// Maximum dictionary size that a stream may request.
const MAX_DICTIONARY_KIB: u32 = 64 << 10;

/// Whether the image has the section.
pub(super) fn is_there(source: &dyn ReadAt) -> bool {
    Headers::read(source).is_ok_and(|headers| headers.section(WHAT).is_some())
}

/// Unpacks the ELF file in the section.
pub(super) fn unpack(source: &dyn ReadAt) -> Result<Vec<u8>, Reject> {
    let headers = Headers::read(source)?;
    let section = headers.section(WHAT).ok_or(Reject::Absent)?;
    let packed = section.read(source, WHAT, MAX_PACKED)?;
    let mut unpacked = Vec::new();
    XzReader::new_mem_limit(packed.as_slice(), false, MAX_DICTIONARY_KIB)
        .take(MAX_UNPACKED + 1)
        .read_to_end(&mut unpacked)
        .map_err(|error| ElfError::malformed(WHAT, format!("xz: {error}")))?;
    let size = unpacked.len() as u64;
    if size > MAX_UNPACKED {
        return Err(ElfError::TooLarge { what: WHAT, size, limit: MAX_UNPACKED }.into());
    }
    Ok(unpacked)
}
