//! Small reads that lie near each other, served from whole pages.

use crate::ruby::frames::Memory;

/// Number of bytes read at once: a page of the kernel, which is mapped as a whole or not at all.
const PAGE: u64 = 4096;

/// Holds the page that was read last. Its data is as old as that read; [`Self::forget`] forces a new read.
#[derive(Debug)]
pub(super) struct Window {
    start: Option<u64>,
    bytes: Vec<u8>,
}

impl Window {
    pub(super) fn new() -> Self {
        Self { start: None, bytes: vec![0; PAGE as usize] }
    }

    /// Drops the page; the next read fetches it again.
    pub(super) fn forget(&mut self) {
        self.start = None;
    }

    /// Fills `buffer` from `address`; `false` if any byte of it could not be read.
    pub(super) fn read<M: Memory>(&mut self, memory: &M, address: u64, buffer: &mut [u8]) -> bool {
        let (page, at) = (address / PAGE * PAGE, (address % PAGE) as usize);
        let Some(end) = at.checked_add(buffer.len()).filter(|end| *end <= self.bytes.len()) else {
            return memory.read(address, buffer);
        };
        if self.start != Some(page) {
            self.start = memory.read(page, &mut self.bytes).then_some(page);
        }
        if self.start.is_none() {
            return memory.read(address, buffer);
        }
        buffer.copy_from_slice(&self.bytes[at..end]);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Memory that starts at a page; its reads are counted.
    struct Counted(Vec<u8>, Cell<u32>);

    impl Memory for Counted {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            self.1.set(self.1.get() + 1);
            let at = address.checked_sub(0x1_0000).and_then(|at| usize::try_from(at).ok());
            let bytes = at.and_then(|at| self.0.get(at..at.checked_add(buffer.len())?));
            bytes.map(|bytes| buffer.copy_from_slice(bytes)).is_some()
        }
    }

    /// Neighbours cost one read; data that crosses a page, or is on a page that cannot be read as a whole, is read separately.
    #[test]
    fn neighbours() {
        let memory = Counted((0..6000_u32).map(|at| at as u8).collect(), Cell::new(0));
        let mut window = Window::new();
        let read = |window: &mut Window, address| {
            let mut bytes = [0; 4];
            window.read(&memory, address, &mut bytes).then(|| (bytes[0], memory.1.take()))
        };
        assert_eq!(read(&mut window, 0x1_0010), Some((0x10, 1)));
        assert_eq!(read(&mut window, 0x1_0018), Some((0x18, 0)));
        window.forget();
        assert_eq!(read(&mut window, 0x1_0018), Some((0x18, 1)));
        assert_eq!(read(&mut window, 0x1_0ffe), Some((0xfe, 1)));
        assert_eq!(read(&mut window, 0x1_1010), Some((0x10, 2)));
        for hole in [0, 0x1_0000 + 5998, u64::MAX - 2, u64::MAX] {
            assert_eq!(read(&mut window, hole), None, "{hole:#x}");
        }
    }
}
