//! Memory for unit tests.

use super::Memory;

/// Words at address 0x10000.
pub(crate) struct Words(pub(crate) Vec<u64>);

impl Memory for Words {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = address.checked_sub(0x10000).and_then(|at| usize::try_from(at).ok());
        let Some(bytes) = at.and_then(|at| bytes.get(at..at.checked_add(buffer.len())?)) else {
            return false;
        };
        buffer.copy_from_slice(bytes);
        true
    }
}
