//! Checksums of file contents: they show whether a file is the one that was analysed when its times cannot.

use std::{fs::File, os::unix::fs::FileExt as _};

/// Maximum size in bytes of a file that is read: a file of this size takes some milliseconds, and larger ones would delay the start.
const LIMIT: u64 = 64 << 20;

/// Size and CRC-32 of a file; `None` if it cannot be read or is very large.
pub fn content(file: &File) -> Option<(u64, u32)> {
    let size = file.metadata().ok().map(|data| data.len()).filter(|&size| size <= LIMIT)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 256 << 10];
    let mut done = 0;
    while done < size {
        let length = (size - done).min(buffer.len() as u64) as usize;
        file.read_exact_at(&mut buffer[..length], done).ok()?;
        hasher.update(&buffer[..length]);
        done += length as u64;
    }
    Some((size, hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte affects the checksum, and the times of the file do not.
    #[test]
    fn each_byte() {
        let file = tempfile::tempfile().unwrap();
        let mut bytes = vec![7; 600_000];
        file.write_all_at(&bytes, 0).unwrap();
        let before = content(&file);
        assert_eq!(before, Some((600_000, crc32fast::hash(&bytes))));
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(content(&file), before);
        bytes[599_999] = 8;
        file.write_all_at(&bytes, 0).unwrap();
        assert_eq!(content(&file), Some((600_000, crc32fast::hash(&bytes))));
        assert_ne!(content(&file), before);
        file.set_len(LIMIT + 1).unwrap();
        assert_eq!(content(&file), None);
    }
}
