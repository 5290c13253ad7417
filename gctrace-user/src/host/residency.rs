//! Resident memory of a process: by mapping (`/proc/PID/smaps`), and page by page (`/proc/PID/pagemap`).

use std::{fs::File, io, os::unix::fs::FileExt as _};

use procfs::ProcError;

use super::{
    maps::{self, Mapping},
    proc_root,
};

/// The kind of a mapping, from its name in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Region {
    /// The heap at the program break, used for small allocations of the main arena.
    Break,
    /// Memory without a file: large allocations, other arenas, stacks of threads and fibers, code of just-in-time compilers.
    Anonymous,
    /// Files: programs, libraries, data.
    File,
    /// The stack of the main thread.
    Stack,
    /// Mappings of the kernel, such as the vDSO.
    Kernel,
}

/// A mapping and its resident memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The kind of the mapping.
    pub region: Region,
    /// First address, and one past the last.
    pub range: (u64, u64),
    /// Whether the process may read it; stack guards and reserved memory are not readable.
    pub readable: bool,
    /// `Rss`.
    pub rss: u64,
    /// `Swap`.
    pub swap: u64,
    /// Whether writes stay private to the process (`MAP_PRIVATE`).
    pub private: bool,
    /// `Anonymous`: memory not of a file, without the zero page.
    pub anonymous: u64,
    /// `Shared_Clean` and `Shared_Dirty`: the part of `rss` that other processes map as well.
    pub shared: u64,
}

impl Resident {
    /// Whether it may contain memory that is shared since a fork.
    pub fn is_forked(&self) -> bool {
        self.private && self.anonymous > 0
    }
}

/// All mappings of a process. The kernel walks its page tables for that.
///
/// # Errors
///
/// The process is gone, or access is denied.
pub fn mappings(pid: u32) -> io::Result<Vec<Resident>> {
    let mut all = Vec::new();
    maps::lines(pid, "smaps", |line| {
        if let Some((key, bytes)) = value(line) {
            let Some(last) = all.last_mut() else { return };
            let Resident { rss, swap, anonymous, shared, .. } = last;
            match key {
                b"Rss" => *rss = bytes,
                b"Swap" => *swap = bytes,
                b"Anonymous" => *anonymous = bytes,
                b"Shared_Clean" | b"Shared_Dirty" => *shared += bytes,
                _ => {}
            }
        } else {
            all.extend(Mapping::of_line(line).map(|mapping| of(&mapping)));
        }
    })
    .map_err(unwrapped)?;
    Ok(all)
}

/// A mapping, before what is resident of it is known.
fn of(mapping: &Mapping<'_>) -> Resident {
    let region = match mapping.name {
        b"[heap]" => Region::Break,
        name if name.starts_with(b"[stack") => Region::Stack,
        b"[vdso]" | b"[vvar]" | b"[vsyscall]" => Region::Kernel,
        _ if mapping.is_of_file() => Region::File,
        _ => Region::Anonymous,
    };
    Resident {
        region,
        range: mapping.range,
        readable: mapping.is_readable(),
        rss: 0,
        swap: 0,
        private: mapping.is_private(),
        anonymous: 0,
        shared: 0,
    }
}

/// A line with a size, such as `Rss:  4 kB`, in bytes. Lines of mappings begin with a lower-case hexadecimal number.
fn value(line: &[u8]) -> Option<(&[u8], u64)> {
    if !line.first()?.is_ascii_uppercase() {
        return None;
    }
    let colon = line.iter().position(|&byte| byte == b':')?;
    let size = str::from_utf8(&line[colon + 1..]).ok()?.trim().strip_suffix("kB")?;
    Some((&line[..colon], size.trim().parse::<u64>().ok()?.checked_mul(1024)?))
}

/// An error with the kernel's own reason, if it has one.
fn unwrapped(error: ProcError) -> io::Error {
    match error {
        ProcError::PermissionDenied(_) => io::ErrorKind::PermissionDenied.into(),
        ProcError::NotFound(_) => io::ErrorKind::NotFound.into(),
        ProcError::Io(error, _) => error,
        other => io::Error::other(other),
    }
}

/// Resident memory of a range, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Resident.
    pub resident: u64,
    /// The resident part that only this process maps: written since it was forked, or never shared.
    pub exclusive: u64,
    /// The resident part that is neither of a file nor mapped by this process alone.
    pub shared_anonymous: u64,
}

/// Reads the page map of a process.
#[derive(Debug)]
pub struct PageMap {
    file: File,
    page: u64,
}

/// Bits of an entry (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// The page is of a file, or of anonymous memory that is shared by `MAP_SHARED`.
const FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;
/// The page frame number of a resident page; 0 without `CAP_SYS_ADMIN`.
const FRAME: u64 = (1 << 55) - 1;
/// Number of entries per read.
const ENTRIES: u64 = 1 << 14;

/// The entry of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    /// Whether the page is resident.
    pub fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// Whether the page is in swap.
    pub fn is_swapped(self) -> bool {
        self.0 & SWAPPED != 0
    }

    /// Whether the page is resident and only this process maps it.
    pub fn is_exclusive(self) -> bool {
        self.is_present() && self.0 & EXCLUSIVE != 0
    }

    /// Whether the page is resident, not of a file, and not exclusive: other processes map it, or it is the zero page.
    pub fn is_shared_anonymous(self) -> bool {
        self.is_present() && self.0 & (FILE | EXCLUSIVE) == 0
    }

    /// Whether the page is resident, not of a file, and only this process maps it.
    pub fn is_anonymous_of_one(self) -> bool {
        self.is_exclusive() && self.0 & FILE == 0
    }

    /// Its page frame number, if the kernel shows it.
    pub fn frame(self) -> Option<u64> {
        Some(self.0 & FRAME).filter(|frame| self.is_present() && *frame != 0)
    }
}

impl PageMap {
    /// Opens the page map of a process.
    ///
    /// # Errors
    ///
    /// The process is gone, or access is denied.
    pub fn open(pid: u32) -> io::Result<Self> {
        let file = File::open(proc_root::path(pid, "pagemap"))?;
        Ok(Self { file, page: rustix::param::page_size() as u64 })
    }

    /// The resident memory of `len` bytes at `start`; whole pages, at most 1 MiB.
    ///
    /// # Errors
    ///
    /// The page map cannot be read.
    pub fn look(&self, start: u64, len: u64) -> io::Result<Pages> {
        let mut pages = Pages::default();
        let size = |is: bool| if is { self.page } else { 0 };
        self.each(start, len.min(1 << 20), |_, entry| {
            pages.resident += size(entry.is_present());
            pages.exclusive += size(entry.is_exclusive());
            pages.shared_anonymous += size(entry.is_shared_anonymous());
        })?;
        Ok(pages)
    }

    /// Calls `seen` for each page of `len` bytes from `start`, with its address. The file stays bound to the memory that it was opened for:
    /// once the process has exited or called exec, reading is an error.
    ///
    /// # Errors
    ///
    /// The page map cannot be read.
    pub fn each(&self, start: u64, len: u64, mut seen: impl FnMut(u64, Entry)) -> io::Result<()> {
        let first = start / self.page;
        let end = start.saturating_add(len).div_ceil(self.page);
        let mut bytes = vec![0; end.saturating_sub(first).min(ENTRIES) as usize * 8];
        let mut at = first;
        while at < end {
            let chunk = &mut bytes[..(end - at).min(ENTRIES) as usize * 8];
            self.file.read_exact_at(chunk, at * 8)?;
            for entry in chunk.chunks_exact(8) {
                seen(at * self.page, Entry(entry.try_into().map_or(0, u64::from_le_bytes)));
                at += 1;
            }
        }
        Ok(())
    }

    /// Page size in bytes.
    pub fn page(&self) -> u64 {
        self.page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mapping whose path is not UTF-8 is one of a file, and hides no others.
    #[test]
    fn odd_names() {
        let mut child = maps::tests::child_with_odd_name();
        let (all, code) = (mappings(child.id()), super::super::mappings::of_process(child.id()));
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        let odd = code.unwrap().into_iter().find(|mapping| mapping.path.to_string_lossy().contains("memfd"));
        let start = odd.unwrap().start;
        let all = all.unwrap();
        let odd = all.iter().find(|map| map.range.0 == start).unwrap();
        assert!(odd.region == Region::File && odd.readable && !odd.private, "{odd:?}");
        assert!(all.iter().any(|map| map.region == Region::Break && map.rss > 0 && map.anonymous > 0));
    }

    /// This test's own pages: written ones are resident, and its mappings add up to about its resident size.
    #[test]
    fn own_pages() {
        let pid = std::process::id();
        let bytes = vec![1_u8; 1 << 20];
        let start = (bytes.as_ptr().addr() as u64).next_multiple_of(4096);
        let pages = PageMap::open(pid).unwrap().look(start, 512 << 10).unwrap();
        assert_eq!(pages.resident, 512 << 10);
        let all = mappings(pid).unwrap();
        let at = all.iter().find(|map| (map.range.0..map.range.1).contains(&start)).unwrap();
        assert!(at.rss >= 1 << 19 && matches!(at.region, Region::Anonymous | Region::Break), "{at:?}");
        assert!(all.iter().any(|map| map.region == Region::Stack && map.rss > 0));
        assert!(all.iter().any(|map| map.region == Region::File && map.rss > 0));
        drop(bytes);
        assert!(mappings(u32::MAX >> 2).is_err() && PageMap::open(u32::MAX >> 2).is_err());
    }
}
