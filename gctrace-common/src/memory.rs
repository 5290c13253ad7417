//! The memory counters of a process, as the kernel keeps them in `struct mm_struct`: where they are (from the kernel's BTF)
//! and their values at an event. Also the page faults of a thread.

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
    #[inline]
    pub const fn resident(&self) -> u64 {
        self.count(MM_FILE) + self.count(MM_ANON) + self.count(MM_SHMEM)
    }

    /// A counter as the kernel reports it: never below 0.
    #[must_use]
    #[inline]
    pub const fn count(&self, counter: usize) -> u64 {
        if counter < MEMORY_COUNTERS && self.counters[counter] > 0 {
            self.counters[counter].cast_unsigned()
        } else {
            0
        }
    }
}

/// What a thread and its process have used of memory up to a moment, or between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MemoryUse {
    /// Page faults of the thread that needed no I/O (`task_struct.min_flt`); [`MemoryUse::FAULTS_UNKNOWN`]: neither number is known.
    pub minor_faults: u64,
    /// Page faults of the thread that needed I/O (`task_struct.maj_flt`).
    pub major_faults: u64,
    /// Resident pages of the process, or by how many they grew; [`MemoryUse::PAGES_UNKNOWN`]: unknown.
    pub resident: i64,
}

impl MemoryUse {
    /// See [`MemoryUse::minor_faults`].
    pub const FAULTS_UNKNOWN: u64 = u64::MAX;
    /// See [`MemoryUse::resident`].
    pub const PAGES_UNKNOWN: i64 = i64::MIN;
    /// Nothing is known.
    pub const UNKNOWN: Self =
        Self { minor_faults: Self::FAULTS_UNKNOWN, major_faults: 0, resident: Self::PAGES_UNKNOWN };

    /// Stores the page faults of the thread up to now, minor and major ones; at the end of the time, their number since they were stored.
    #[inline]
    pub const fn faults(&mut self, [minor, major]: [u64; 2], ends: bool) {
        if minor == Self::FAULTS_UNKNOWN || (ends && self.minor_faults == Self::FAULTS_UNKNOWN) {
            (self.minor_faults, self.major_faults) = (Self::FAULTS_UNKNOWN, 0);
        } else if ends {
            self.minor_faults = minor.wrapping_sub(self.minor_faults);
            self.major_faults = major.wrapping_sub(self.major_faults);
        } else {
            (self.minor_faults, self.major_faults) = (minor, major);
        }
    }

    /// Stores the resident pages of the process; at the end of the time, by how many they grew. Approximate counters tell nothing: each CPU
    /// may keep more than a request needs.
    #[inline]
    pub const fn pages(&mut self, now: &MemoryPages, ends: bool) {
        if now.source != MemoryPages::WHOLE || (ends && self.resident == Self::PAGES_UNKNOWN) {
            self.resident = Self::PAGES_UNKNOWN;
        } else {
            let before = if ends { self.resident } else { 0 };
            self.resident = now.resident().cast_signed().wrapping_sub(before);
        }
    }
}

const _: () = assert!(size_of::<MemoryUse>() == 24);
const _: () = assert!(size_of::<MemoryLayout>() == 40);
const _: () = assert!(size_of::<MemoryPages>() == 48);

/// Maximum size of all memory counters of a process in the kernel, bytes.
pub const COUNTERS_BYTES: usize = MEMORY_COUNTERS * MAX_COUNTER_BYTES as usize;

/// Room for the counters and for reading them.
#[repr(C)]
pub struct MemoryScratch {
    /// The counters.
    pub pages: MemoryPages,
    /// Room for the counters as the kernel has them, and a word more.
    pub block: [u64; COUNTERS_BYTES / 8 + 1],
}

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

    /// Page faults and resident pages between two moments. What is unknown at either one stays unknown, and the other figure does not change.
    #[test]
    fn between_two_moments() {
        const FAULTS: u64 = MemoryUse::FAULTS_UNKNOWN;
        const PAGES: i64 = MemoryUse::PAGES_UNKNOWN;
        let at = |file, source| MemoryPages { counters: [file, 200, 7, 4], peak: 0, source };
        let (whole, approximate) = (MemoryPages::WHOLE, MemoryPages::APPROXIMATE);
        let between = |faults: [[u64; 2]; 2], pages: [MemoryPages; 2]| {
            let mut found = MemoryUse::UNKNOWN;
            found.faults(faults[0], false);
            found.pages(&pages[0], false);
            found.faults(faults[1], true);
            found.pages(&pages[1], true);
            (found.minor_faults, found.major_faults, found.resident)
        };
        let known = [at(100, whole), at(90, whole)];
        assert_eq!(between([[5, 1], [8, 1]], known), (3, 0, -10));
        assert_eq!(between([[5, 1], [5, 3]], [at(90, whole), at(100, whole)]), (0, 2, 10));
        assert_eq!(between([[FAULTS, 0], [8, 1]], known), (FAULTS, 0, -10));
        assert_eq!(between([[5, 1], [FAULTS, 0]], known), (FAULTS, 0, -10));
        for pages in [[at(1, approximate), at(2, whole)], [at(1, whole), at(2, approximate)]] {
            assert_eq!(between([[5, 1], [8, 1]], pages), (3, 0, PAGES));
        }
        // An end without a beginning.
        let mut found = MemoryUse::UNKNOWN;
        found.faults([8, 1], true);
        found.pages(&at(1, whole), true);
        assert_eq!(found, MemoryUse::UNKNOWN);
    }
}
