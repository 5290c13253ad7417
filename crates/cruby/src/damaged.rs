//! Damaged files for tests.

use std::io;

use crate::elf::ReadAt;

/// A damaged file, without a copy of its bytes: some bytes are patched, and it may end early.
pub(crate) struct Damaged<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) patches: Vec<(usize, u8)>,
}

impl ReadAt for Damaged<'_> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.bytes.read_exact_at(buffer, offset)?;
        for &(at, value) in &self.patches {
            let inside = at.checked_sub(offset as usize).and_then(|index| buffer.get_mut(index));
            if let Some(byte) = inside {
                *byte = value;
            }
        }
        Ok(())
    }
}
