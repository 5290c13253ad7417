//! Where the bytes of an ELF file come from.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::ElfError;

/// Positioned reads without a cache: a caller keeps what it needs, and the rest of the file never enters memory.
pub trait ReadAt {
    /// Size of the whole source, bytes.
    fn size(&self) -> io::Result<u64>;
    /// Fills `buffer` with the bytes at `offset`, or fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

impl ReadAt for [u8] {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start.checked_add(buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(self.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn size(&self) -> io::Result<u64> {
        (**self).size()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buffer, offset)
    }
}

/// Reads the `size` bytes at `offset`. The size is checked against `limit` and against the size of the file before
/// anything is allocated, because both numbers come from the file itself.
pub(crate) fn read_bytes(
    source: &(impl ReadAt + ?Sized),
    what: &'static str,
    offset: u64,
    size: u64,
    limit: u64,
) -> Result<Vec<u8>, ElfError> {
    if size > limit {
        return Err(ElfError::TooLarge { what, size, limit });
    }
    let file_size = source.size().map_err(|source| ElfError::Io { what, source })?;
    if offset.checked_add(size).is_none_or(|end| end > file_size) {
        return Err(ElfError::OutOfFile { what });
    }
    let mut bytes = vec![0; size as usize];
    source.read_exact_at(&mut bytes, offset).map_err(|source| ElfError::Io { what, source })?;
    Ok(bytes)
}
