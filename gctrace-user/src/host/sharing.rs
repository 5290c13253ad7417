//! Memory that a fork has left to several processes, page by page: which pages are shared at one time, and their state later.

use std::{fs::File, io, os::unix::fs::FileExt as _, time::Instant};

use super::{
    proc_root,
    residency::{Entry, PageMap, Resident},
};

/// Maximum total size of the mappings in bytes; larger ones are not read. While a mapping is read, each of its shared pages of 4 KiB
/// takes 16 bytes.
const MOST: u64 = 64 << 30;
/// Maximum number of page runs that are kept: 16 bytes each.
const RUNS: usize = 1 << 22;
/// The zero page, and pages that the kernel has merged because they are equal (`KPF_ZERO_PAGE`, `KPF_KSM`,
/// include/uapi/linux/kernel-page-flags.h).
const NOT_OF_A_FORK: u64 = 1 << 24 | 1 << 21;

/// Why it is unknown what is shared.
#[derive(Debug, thiserror::Error)]
pub enum SharingError {
    /// The process is gone, has replaced its program, or access is denied.
    #[error("its page map cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// The page frame numbers are hidden.
    #[error("the kernel hides which page frames are shared: that needs CAP_SYS_ADMIN")]
    Hidden,
    /// `/proc/kpageflags` cannot be read.
    #[error("/proc/kpageflags: {0}")]
    Flags(#[source] io::Error),
    /// The mappings are too large.
    #[error("its mappings are too large to be looked at page by page")]
    TooLarge,
}

/// The current state of a page that was shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// Other processes still map it.
    Shared,
    /// Only this process maps it.
    Private,
    /// It is in swap; whether it is shared is unknown.
    Swapped,
    /// No longer memory left by a fork: it was unmapped or given back.
    Gone,
}

/// The anonymous pages of a process that other processes map as well, at one time.
#[derive(Debug)]
pub struct SharedPages {
    map: PageMap,
    flags: Option<File>,
    /// Start and end address of each run of pages, in order.
    runs: Vec<(u64, u64)>,
    /// When they were read.
    pub at: Instant,
}

impl SharedPages {
    /// Reads all pages of these mappings, one after another while the process runs. Excludes zero pages and pages that the kernel has
    /// merged: these are not shared because of a fork.
    ///
    /// # Errors
    ///
    /// The pages cannot be read, or the kernel does not show which are zero pages.
    pub fn read(pid: u32, maps: &[Resident]) -> Result<Self, SharingError> {
        let maps = maps.iter().filter(|map| map.is_forked());
        let room = maps.clone().fold(0_u64, |sum, map| sum.saturating_add(map.range.1 - map.range.0));
        if room > MOST {
            return Err(SharingError::TooLarge);
        }
        let mut pages = Self { map: PageMap::open(pid)?, flags: None, runs: Vec::new(), at: Instant::now() };
        let size = pages.map.page();
        for map in maps {
            let mut shared = Vec::new();
            pages.map.each(map.range.0, map.range.1 - map.range.0, |address, entry| {
                if entry.is_shared_anonymous() {
                    shared.push((address, entry));
                }
            })?;
            for (address, entry) in shared {
                if !pages.is_of_a_fork(entry)? {
                    continue;
                }
                match pages.runs.last_mut() {
                    Some(last) if last.1 == address => last.1 += size,
                    _ => pages.runs.push((address, address + size)),
                }
                if pages.runs.len() > RUNS {
                    return Err(SharingError::TooLarge);
                }
            }
        }
        pages.runs.shrink_to_fit();
        Ok(pages)
    }

    /// Total size of the pages in bytes.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.1 - run.0).sum()
    }

    /// Page size in bytes.
    pub fn page(&self) -> u64 {
        self.map.page()
    }

    /// Reads each of these pages again, and passes its address and current state to `seen`.
    ///
    /// # Errors
    ///
    /// The pages cannot be read: the process is gone, or has replaced its program.
    pub fn again(&mut self, mut seen: impl FnMut(u64, Now)) -> Result<(), SharingError> {
        for run in 0..self.runs.len() {
            let (start, end) = self.runs[run];
            let mut entries = Vec::new();
            self.map.each(start, end - start, |address, entry| entries.push((address, entry)))?;
            for (address, entry) in entries {
                let now = if entry.is_swapped() {
                    Now::Swapped
                } else if entry.is_anonymous_of_one() {
                    Now::Private
                } else if entry.is_shared_anonymous() && self.is_of_a_fork(entry)? {
                    Now::Shared
                } else {
                    Now::Gone
                };
                seen(address, now);
            }
        }
        Ok(())
    }

    fn is_of_a_fork(&mut self, entry: Entry) -> Result<bool, SharingError> {
        let frame = entry.frame().ok_or(SharingError::Hidden)?;
        let file = match &mut self.flags {
            Some(file) => file,
            none => {
                none.insert(File::open(proc_root::root().join("kpageflags")).map_err(SharingError::Flags)?)
            }
        };
        let mut flags = [0; 8];
        file.read_exact_at(&mut flags, frame * 8).map_err(SharingError::Flags)?;
        Ok(u64::from_le_bytes(flags) & NOT_OF_A_FORK == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::residency::mappings;

    /// Untouched memory that was only read does not count as shared, though the kernel says that others map it. Without privilege
    /// nothing is reported.
    #[test]
    fn zeros_are_not_shared() {
        let pid = std::process::id();
        let zeros = std::hint::black_box(vec![0_u8; 64 << 20]);
        assert_eq!(zeros.iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>(), 0);
        let own = zeros.as_ptr().addr() as u64..zeros.as_ptr().addr() as u64 + (64 << 20);
        // Mappings without any other memory are not read.
        let mut maps = mappings(pid).unwrap();
        maps.retain(|map| (map.range.0..map.range.1).contains(&(own.start + (1 << 20))));
        for map in &mut maps {
            map.anonymous = 1;
        }
        match SharedPages::read(pid, &maps) {
            // Another test may be forking.
            Ok(mut pages) => pages
                .again(|address, _| assert!(!own.contains(&address) || address == own.start / 4096 * 4096))
                .unwrap(),
            Err(SharingError::Hidden | SharingError::Flags(_)) => {
                assert!(!rustix::process::geteuid().is_root());
            }
            Err(error) => panic!("{error}"),
        }
        let seen = PageMap::open(pid).unwrap().look(own.start.next_multiple_of(1 << 20), 1 << 20).unwrap();
        assert_eq!((seen.resident, seen.shared_anonymous), (1 << 20, 1 << 20));
        drop(zeros);
    }
}
