//! The memory counters of a process, as the kernel keeps them in `struct mm_struct`: where they are (from the kernel's BTF)
//! and their values at an event.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Entries of `mm_struct.rss_stat`, in the order of the kernel's enumeration (`include/linux/mm_types_task.h`).
pub const MEMORY_COUNTERS: usize = 4;
/// Index of `MM_FILEPAGES`: mapped pages of files.
pub const MM_FILE: usize = 0;
/// Index of `MM_ANONPAGES`: anonymous pages.
pub const MM_ANON: usize = 1;
/// Index of `MM_SWAPENTS`: anonymous pages in swap.
pub const MM_SWAP: usize = 2;
/// Index of `MM_SHMEMPAGES`: shared memory and tmpfs.
pub const MM_SHMEM: usize = 3;

/// Maximum number of possible CPUs for which the parts of a counter are summed up at an event; each costs two helper calls.
pub const MAX_SUMMED_CPUS: u32 = 256;
/// Largest supported `sizeof(struct percpu_counter)`.
pub const MAX_COUNTER_BYTES: u32 = 64;

/// Where the counters are. Offsets are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MemoryLayout {
    /// How a counter is kept: one of the constants below.
    pub shape: u32,
    /// Offset of `mm` in `task_struct`.
    pub task_mm: u32,
    /// Offset of `rss_stat` in `mm_struct`.
    pub counters: u32,
    /// Offset of `hiwater_rss` in `mm_struct`.
    pub peak: u32,
    /// [`MemoryLayout::WORDS`]: offset, in `task_struct`, of the counts that the thread has not added yet (`rss_stat.count`), or 0
    /// if the kernel keeps none.
    pub pending: u32,
    /// Distance between two counters (`sizeof(struct percpu_counter)`), at most [`MAX_COUNTER_BYTES`]; not used for
    /// [`MemoryLayout::WORDS`].
    pub stride: u32,
    /// Offset of `count` in `struct percpu_counter`.
    pub count: u32,
    /// [`MemoryLayout::PER_CPU`]: offset of `counters` in `struct percpu_counter`, the per-CPU pointer to the parts.
    pub parts: u32,
    /// [`MemoryLayout::PER_CPU`]: offset of `pptrs` in `struct bpf_array`.
    pub array_parts: u32,
    /// [`MemoryLayout::PER_CPU`]: the possible CPUs are those below this number, at most [`MAX_SUMMED_CPUS`].
    pub cpus: u32,
}

impl MemoryLayout {
    /// [`MemoryLayout::shape`]: the counters are not read.
    pub const NONE: u32 = 0;
    /// Four words (before Linux 6.2, and on kernels for one CPU).
    pub const WORDS: u32 = 1;
    /// Four `struct percpu_counter` (from Linux 6.2 on); the parts of all CPUs are added.
    pub const PER_CPU: u32 = 2;
    /// The same, but the parts cannot be read: amounts that CPUs have not added to the counts yet are missing.
    pub const COUNTS: u32 = 3;
}

/// The counters read at an event, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MemoryPages {
    /// The counters, indexed by the constants of this module. They can be negative for a moment; the kernel then reports 0.
    pub counters: [i64; MEMORY_COUNTERS],
    /// `hiwater_rss`: the highest resident size that the kernel has recorded, which it does only when the process is about to release memory.
    pub peak: u64,
    /// Whether the counters were read, and how exactly: one of the constants below.
    pub source: u64,
}

impl MemoryPages {
    /// [`MemoryPages::source`]: nothing was read.
    pub const NONE: u64 = 0;
    /// All parts of all counters.
    pub const WHOLE: u64 = 1;
    /// Without the amounts that CPUs have not added yet.
    pub const APPROXIMATE: u64 = 2;

    /// Resident pages: anonymous ones, those of files, and shared memory.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.count(MM_FILE) + self.count(MM_ANON) + self.count(MM_SHMEM)
    }

    /// A counter as the kernel reports it: never below 0.
    #[must_use]
    pub fn count(&self, counter: usize) -> u64 {
        self.counters.get(counter).map_or(0, |count| (*count).max(0).cast_unsigned())
    }
}

const _: () = assert!(size_of::<MemoryLayout>() == 40);
const _: () = assert!(size_of::<MemoryPages>() == 48);

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter below 0 counts as 0, and swapped pages are not resident.
    #[test]
    fn resident_as_the_kernel_tells_it() {
        let pages = MemoryPages { counters: [10, 200, 4000, -3], peak: 0, source: MemoryPages::WHOLE };
        assert_eq!((pages.resident(), pages.count(MM_SWAP), pages.count(MM_SHMEM)), (210, 4000, 0));
        assert_eq!(pages.count(MEMORY_COUNTERS), 0);
    }
}
