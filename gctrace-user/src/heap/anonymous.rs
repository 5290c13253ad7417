//! The use of a mapping without a file, if its own bytes prove it: the stack of a thread, an arena of glibc's malloc, or
//! large blocks of malloc. Other uses are not distinguished.

use std::{collections::HashSet, io};

use crate::{
    host::residency::{PageMap, Resident},
    ruby::frames::Memory,
};

/// The use of an anonymous mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The stack of this thread (tid in the process's own pid namespace).
    Stack(u32),
    /// An arena other than the main one.
    Arena,
    /// Blocks that malloc mapped individually, possibly with pages of objects between them.
    Blocks,
}

/// Alignment and maximum size of a heap of an arena (`HEAP_MAX_SIZE` on 64 bits).
const ARENA: u64 = 64 << 20;
/// Known sizes of `struct heap_info`: in the first heap of an arena the arena follows it.
const HEAP_INFO: [u64; 2] = [0x20, 0x30];
/// Flags of an individually mapped block: `IS_MMAPPED` alone.
const MAPPED_BLOCK: u64 = 2;
/// Maximum offset of the thread's id in its control block.
const TCB: usize = 0x400;
/// Maximum number of blocks read of a mapping.
const BLOCKS: usize = 100_000;

/// Reads mappings of one process.
pub(super) struct Anonymous<'a, M> {
    pub(super) memory: &'a M,
    pub(super) pages: &'a PageMap,
    /// Ids of its threads in its own pid namespace.
    pub(super) threads: &'a HashSet<u32>,
    /// Size of a page of memory.
    pub(super) page: u64,
    /// First addresses of the pages of objects, sorted, and their size.
    pub(super) objects: (&'a [u64], u64),
}

impl<M: Memory> Anonymous<'_, M> {
    /// The use of a mapping; `None` if it is not proven. `below` is the mapping before it.
    pub(super) fn look(&self, map: &Resident, below: Option<&Resident>) -> io::Result<Option<Use>> {
        if let Some(tid) = self.thread(map, below)? {
            return Ok(Some(Use::Stack(tid)));
        }
        if self.is_arena(map)? {
            return Ok(Some(Use::Arena));
        }
        Ok(self.is_blocks(map)?.then_some(Use::Blocks))
    }

    /// The thread whose stack this is: a guard lies below it, and its last page contains the thread's control block, which begins
    /// with its own address (x86-64) and contains the thread's id. Hence nothing else was merged into the mapping at either end.
    fn thread(&self, map: &Resident, below: Option<&Resident>) -> io::Result<Option<u32>> {
        let guarded = below.is_some_and(|below| !below.readable && below.range.1 == map.range.0);
        let Some(last) = map.range.1.checked_sub(self.page).filter(|last| guarded && *last >= map.range.0)
        else {
            return Ok(None);
        };
        let Some(bytes) = self.read(last, self.page as usize)? else { return Ok(None) };
        let blocks = bytes
            .chunks_exact(16)
            .enumerate()
            .filter(|(index, chunk)| word(chunk, 0) == last + *index as u64 * 16);
        for (index, _) in blocks {
            let block = &bytes[index * 16..];
            let ids =
                block.chunks_exact(4).take(TCB / 4).map(|id| id.try_into().map_or(0, u32::from_le_bytes));
            if let Some(tid) = ids.into_iter().find(|id| self.threads.contains(id)) {
                return Ok(Some(tid));
            }
        }
        Ok(None)
    }

    /// Whether it is a heap of an arena: aligned, with the address of its arena at the beginning, and with its mapped size.
    fn is_arena(&self, map: &Resident) -> io::Result<bool> {
        let (start, end) = map.range;
        if !start.is_multiple_of(ARENA) || end - start > ARENA {
            return Ok(false);
        }
        let Some(bytes) = self.read(start, 32)? else { return Ok(false) };
        let [arena, previous, size, mapped] = [0, 8, 16, 24].map(|at| word(&bytes, at));
        let head = |address: u64| HEAP_INFO.contains(&(address % ARENA));
        let first = previous == 0 && arena.wrapping_sub(start) < ARENA && head(arena);
        let further = previous != 0 && previous.is_multiple_of(ARENA) && head(arena);
        Ok((first || further) && mapped == end - start && size <= mapped)
    }

    /// Whether it consists of large blocks, each preceded by its size, from the first byte of the mapping to the last; pages of
    /// objects may lie between them.
    fn is_blocks(&self, map: &Resident) -> io::Result<bool> {
        let (mut at, end) = map.range;
        let (objects, size) = self.objects;
        let mut blocks = 0;
        for _ in 0..BLOCKS {
            if at == end {
                return Ok(blocks > 0);
            }
            if objects.binary_search(&at).is_ok() {
                at += size;
                continue;
            }
            let Some(bytes) = self.read(at, 16)? else { return Ok(false) };
            let (before, len) = (word(&bytes, 0), word(&bytes, 8));
            let whole = before == 0 && len % self.page == MAPPED_BLOCK && len > self.page;
            match at.checked_add(len - len % self.page) {
                Some(next) if whole && next <= end => at = next,
                _ => return Ok(false),
            }
            blocks += 1;
        }
        Ok(false)
    }

    /// Bytes of one page; `None` if it is not resident: reading it would make the kernel map it.
    fn read(&self, address: u64, len: usize) -> io::Result<Option<Vec<u8>>> {
        if self.pages.look(address / self.page * self.page, self.page)?.resident == 0 {
            return Ok(None);
        }
        let mut bytes = vec![0; len];
        Ok(self.memory.read(address, &mut bytes).then_some(bytes))
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{
        mem::ProcessMemory,
        residency::{Region, mappings},
    };

    /// In the test's own memory the stack of its thread is found, a large block is recognised, and nothing else is taken for either.
    #[test]
    fn own_mappings() {
        let pid = std::process::id();
        // Larger than anything that malloc takes from its arenas.
        let mut block = vec![0_u8; 48 << 20];
        block.fill(3);
        let address = block.as_ptr().addr() as u64;
        let (memory, pages) = (ProcessMemory::open(pid).unwrap(), PageMap::open(pid).unwrap());
        let threads = HashSet::from([rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()]);
        let page = rustix::param::page_size() as u64;
        let at = Anonymous { memory: &memory, pages: &pages, threads: &threads, page, objects: (&[], 0) };
        let maps = mappings(pid).unwrap();
        let found = |address: u64| {
            let index = maps.partition_point(|map| map.range.1 <= address);
            at.look(&maps[index], index.checked_sub(1).map(|below| &maps[below])).unwrap()
        };
        let local = 7_u8;
        let stack = found(std::ptr::from_ref(&local).addr() as u64);
        if cfg!(target_arch = "x86_64") {
            assert_eq!(stack, threads.iter().next().map(|tid| Use::Stack(*tid)));
        }
        let blocks = found(address);
        // A neighbouring mapping may have been merged with it.
        assert!(matches!(blocks, Some(Use::Blocks) | None), "{blocks:?}");
        let uses: Vec<Use> = maps
            .iter()
            .enumerate()
            .filter(|(_, map)| map.region == Region::Anonymous)
            .filter_map(|(index, map)| at.look(map, index.checked_sub(1).map(|below| &maps[below])).unwrap())
            .collect();
        assert!(uses.iter().filter(|use_| matches!(use_, Use::Stack(_))).count() <= 1, "{uses:?}");
    }

    struct Image(u64, Vec<u8>);

    impl Memory for Image {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let Some(at) = address.checked_sub(self.0).map(|at| at as usize) else { return false };
            let Some(bytes) = self.1.get(at..at + buffer.len()) else { return false };
            buffer.copy_from_slice(bytes);
            true
        }
    }

    /// Blocks with invalid flags, or sizes that are too small, lead beyond the end or around the address space, are refused.
    #[test]
    fn hostile_blocks() {
        let page = rustix::param::page_size() as u64;
        let own = vec![1_u8; 4 * page as usize];
        // Resident memory of this process at addresses for which the test's memory image answers.
        let start = (own.as_ptr().addr() as u64).next_multiple_of(page);
        let pages = PageMap::open(std::process::id()).unwrap();
        let threads = HashSet::new();
        let (range, region) = ((start, start + 2 * page), Region::Anonymous);
        let (rss, swap, anonymous, shared) = (0, 0, 0, 0);
        let map = Resident { region, range, readable: true, rss, swap, private: true, anonymous, shared };
        for (size, expected) in [
            (2 * page + 2, Some(Use::Blocks)),
            (page + 2, None),
            (2, None),
            (0, None),
            (3 * page + 2, None),
            (2 * page + 3, None),
            (u64::MAX - page + 3, None),
            (u64::MAX, None),
        ] {
            let mut bytes = vec![0; 2 * page as usize];
            bytes[8..16].copy_from_slice(&size.to_le_bytes());
            let memory = Image(start, bytes);
            let at = Anonymous { memory: &memory, pages: &pages, threads: &threads, page, objects: (&[], 0) };
            assert_eq!(at.look(&map, None).unwrap(), expected, "{size:#x}");
        }
        drop(own);
    }
}
