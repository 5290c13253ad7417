//! `gctrace malloc`: memory that CRuby allocates for its objects (`ruby_xmalloc` and its relatives, gc.c), counted in the kernel, and
//! the stacks it is allocated under: the stack of a call of `size` bytes is taken with the probability `size / period` (at most 1),
//! independently of earlier calls. Such a call stands for `1 / probability` calls (Horvitz and Thompson's estimator), so that the expectation
//! of every sum is the sum.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What happens at a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum MallocPlace {
    /// `malloc` has returned: its result is in rax, the size in the register that the cookie names.
    Malloc = 0,
    /// The same for `calloc(1, size)`.
    Calloc = 1,
    /// `realloc` is about to be called: pointer in rdi, size in rsi.
    ReallocBegin = 2,
    /// `realloc` has returned: its result is in rax.
    ReallocEnd = 3,
    /// `free` is about to be called: pointer in rdi.
    Free = 4,
}

/// The attach cookie of a probe: bits 3..0 the place, 11..8 the hardware number of the register that holds the size (x86-64 encoding order).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MallocCookie {
    /// A [`MallocPlace`].
    pub place: u8,
    /// Hardware number of the register that holds the size.
    pub size: u8,
}

impl MallocCookie {
    /// Packs the cookie.
    pub const fn pack(self) -> u64 {
        self.place as u64 & 0xf | (self.size as u64 & 0xf) << 8
    }

    /// The inverse of [`MallocCookie::pack`].
    #[inline]
    pub const fn unpack(raw: u64) -> Self {
        Self { place: raw as u8 & 0xf, size: (raw >> 8) as u8 & 0xf }
    }
}

/// Number of size classes: class n holds sizes above 2^(n-1), up to 2^n bytes.
pub const MALLOC_CLASSES: u32 = 64;
/// Number of ages: collections between allocation and free; the last age stands for all higher ones, too.
pub const MALLOC_AGES: u32 = 34;
/// Number of functions whose calls are added up by size: `malloc`, `calloc`, `realloc`.
pub const MALLOC_FUNCTIONS: u32 = 3;
/// Maximum number of allocations that are followed at a time.
pub const MAX_MALLOC_LIVE: u32 = 1 << 18;
/// Maximum number of threads in `realloc` at a time.
pub const MAX_MALLOC_PENDING: u32 = 1024;

/// The size class of a size in bytes.
#[inline]
pub const fn malloc_class(size: u64) -> u32 {
    if size <= 1 {
        return 0;
    }
    let class = 64 - (size - 1).leading_zeros();
    if class < MALLOC_CLASSES { class } else { MALLOC_CLASSES - 1 }
}

/// The largest size of a class, bytes.
pub const fn malloc_class_limit(class: u32) -> u64 {
    1 << class
}

/// The age of memory that was allocated when `GC.count` was `born` and is freed when it is `now`.
#[inline]
pub const fn malloc_age(born: u64, now: u64) -> u32 {
    let age = now.wrapping_sub(born);
    if age < MALLOC_AGES as u64 { age as u32 } else { MALLOC_AGES - 1 }
}

/// Counters in addition to sizes and ages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum MallocCount {
    /// Hits of the process.
    Hits = 0,
    /// Hits of other processes that run the same file.
    OtherHits,
    /// Calls that returned no memory.
    Failed,
    /// Allocations that are followed.
    Followed,
    /// Allocations not followed because the map of followed memory was full.
    Overflow,
    /// Allocations not followed because `GC.count` could not be read.
    Unread,
    /// Calls of `free`.
    Frees,
    /// Calls of `free` with memory that is not followed: it was allocated before, by other means, or is one of the above.
    FreesUnknown,
    /// Followed memory whose free was not seen: its address was handed out again.
    Replaced,
    /// Calls of `realloc` with memory that is not followed.
    ReallocsUnknown,
    /// Returns of `realloc` whose call was not seen.
    ReallocsUnpaired,
    /// Followed memory that is no longer followed for that reason, or because `GC.count` could not be read.
    Lost,
    /// Calls whose stack was to be taken; the bytes are those that they stand for ([`malloc_stands_for`]).
    Sampled,
}

impl MallocCount {
    /// All counters, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::Hits,
        Self::OtherHits,
        Self::Failed,
        Self::Followed,
        Self::Overflow,
        Self::Unread,
        Self::Frees,
        Self::FreesUnknown,
        Self::Replaced,
        Self::ReallocsUnknown,
        Self::ReallocsUnpaired,
        Self::Lost,
        Self::Sampled,
    ];
}

/// Index of the tally of a function (a [`MallocPlace`]: `Malloc` 0, `Calloc` 1; `realloc` 2) and a size class.
#[inline]
pub const fn malloc_size_index(function: u32, class: u32) -> u32 {
    function * MALLOC_CLASSES + class
}

/// Index of the tally of freed memory of a size class and an age.
#[inline]
pub const fn malloc_age_index(class: u32, age: u32) -> u32 {
    MALLOC_FUNCTIONS * MALLOC_CLASSES + class * MALLOC_AGES + age
}

/// Index of the tally of a counter; only `calls` is used, except for [`MallocCount::Sampled`].
#[inline]
pub const fn malloc_count_index(count: MallocCount) -> u32 {
    MALLOC_FUNCTIONS * MALLOC_CLASSES + MALLOC_CLASSES * MALLOC_AGES + count as u32
}

/// Entries of the `MALLOC_TALLIES` map.
pub const MALLOC_TALLIES: u32 =
    MALLOC_FUNCTIONS * MALLOC_CLASSES + MALLOC_CLASSES * MALLOC_AGES + MallocCount::ALL.len() as u32;

/// A number of calls and the bytes that they requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MallocTally {
    /// Number of calls.
    pub calls: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The process that is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MallocTarget {
    /// Address of `profile.count` of its objspace.
    pub gc_count: u64,
    /// Address of the `flags` word of its objspace.
    pub flags: u64,
    /// Average number of bytes per stack ([`malloc_is_sampled`]); 0: no stacks are taken.
    pub period: u64,
    /// Its thread group id.
    pub tgid: u32,
    /// Mask of the GC mode inside `flags`.
    pub mode_mask: u32,
    /// First bit of the GC mode inside `flags`.
    pub mode_shift: u32,
    /// Zero.
    pub reserved: u32,
}

/// The longest period: products of such a period and a smaller size fit in 64 bits.
pub const MAX_MALLOC_PERIOD: u64 = 1 << 30;

/// Whether the stack of a call is taken. `random` is uniform, `period` at most [`MAX_MALLOC_PERIOD`] and not 0.
#[inline]
pub const fn malloc_is_sampled(random: u32, size: u64, period: u64) -> bool {
    size >= period || random as u64 * period < at_least_one(size) << 32
}

/// For how many of all 2³² random numbers the stack of a call of that size is taken.
#[inline]
pub const fn malloc_threshold(size: u64, period: u64) -> u64 {
    if size >= period { 1 << 32 } else { (at_least_one(size) << 32).div_ceil(period) }
}

/// The number of bytes that a call whose stack is taken stands for: its own size divided by its probability.
#[inline]
pub const fn malloc_stands_for(size: u64, period: u64) -> u64 {
    if size >= period { size } else { period }
}

/// CRuby requests at least one byte; a size of 0 would never be sampled.
const fn at_least_one(size: u64) -> u64 {
    if size == 0 { 1 } else { size }
}

/// A number that changes whenever the VM may have freed or moved objects, as
/// [`StackEvent::epoch`](crate::stack::StackEvent::epoch) does: `GC.count` grows when a collection begins, before it marks, and objects
/// are freed between the end of marking and the end of the sweep. Each cycle counts as a major one, because its kind is not checked.
#[inline]
pub const fn malloc_epoch(gc_count: u64, mode: u32) -> u64 {
    let twice = gc_count.wrapping_mul(2);
    let events = match mode {
        // `gc_mode_marking`, `gc_mode_sweeping` (gc.c)
        1 => twice,
        2 => twice.wrapping_add(1),
        _ => twice.wrapping_add(2),
    };
    events.wrapping_mul(crate::stack::MAJOR_EPOCH + 1)
}

/// Followed memory, keyed by its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MallocBlock {
    /// Number of bytes last requested.
    pub size: u64,
    /// `GC.count` when it was first allocated.
    pub born: u64,
    /// When the stack of the call that gave it its size was taken, nanoseconds; 0: it was not.
    pub sampled_ns: u64,
    /// The thread that made that call.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
}

/// A call of `realloc` under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct MallocPending {
    /// The pointer passed to it.
    pub pointer: u64,
    /// The size requested.
    pub size: u64,
    /// What was known about the memory.
    pub block: MallocBlock,
}

impl MallocPending {
    /// [`MallocBlock::born`] of memory that was not followed.
    pub const UNKNOWN: u64 = u64::MAX;
}

const _: () = assert!(size_of::<MallocTally>() == 16);
const _: () = assert!(size_of::<MallocTarget>() == 40);
const _: () = assert!(size_of::<MallocBlock>() == 32);
const _: () = assert!(size_of::<MallocPending>() == 48);

#[cfg(test)]
mod tests {
    use super::*;

    /// Each size is in the class whose limit is the next power of two.
    #[test]
    fn classes() {
        for (size, limit) in [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024), (1025, 2048)] {
            assert_eq!(malloc_class_limit(malloc_class(size)), limit, "{size}");
        }
        assert_eq!(malloc_class(u64::MAX), MALLOC_CLASSES - 1);
    }

    #[test]
    fn ages() {
        assert_eq!((malloc_age(7, 7), malloc_age(7, 9)), (0, 2));
        assert_eq!((malloc_age(0, 1 << 40), malloc_age(9, 7)), (MALLOC_AGES - 1, MALLOC_AGES - 1));
    }

    /// No two tallies share an index, and all indices are in range.
    #[test]
    fn indices() {
        assert_eq!(malloc_size_index(2, 63) + 1, malloc_age_index(0, 0));
        assert_eq!(malloc_age_index(63, MALLOC_AGES - 1) + 1, malloc_count_index(MallocCount::Hits));
        assert_eq!(malloc_count_index(MallocCount::Sampled) + 1, MALLOC_TALLIES);
        for (at, count) in MallocCount::ALL.into_iter().enumerate() {
            assert_eq!(count as usize, at);
        }
    }

    /// The probability is proportional to the size, exactly if the period is a power of two; and sizes above the period are always sampled.
    #[test]
    fn probability() {
        for size in [1, 40, 4095, 65_535] {
            assert_eq!(malloc_threshold(size, 1 << 16), size << 16);
        }
        assert_eq!(malloc_threshold(0, 1 << 16), 1 << 16);
        assert_eq!(malloc_threshold(1, MAX_MALLOC_PERIOD), 4);
        for size in [1 << 16, u64::MAX] {
            assert!(malloc_is_sampled(u32::MAX, size, 1 << 16));
        }
        for (size, period) in [(1, 1 << 30), (3, 1000), (999, 1000), (40, 65_536), (0, 7)] {
            let last = malloc_threshold(size, period) - 1;
            let after = u32::try_from(last + 1).unwrap();
            assert!(malloc_is_sampled(last as u32, size, period) && !malloc_is_sampled(after, size, period));
        }
    }

    /// Nothing is freed within one epoch: a new one begins at the end of marking, and another at the end of the sweep.
    #[test]
    fn epochs() {
        let [marking, sweeping, none] = [1, 2, 0].map(|mode| malloc_epoch(7, mode));
        assert!(malloc_epoch(6, 0) == marking && marking < sweeping && sweeping < none);
        assert_eq!(none, malloc_epoch(8, 1));
        assert!(!crate::stack::same_majors(marking, sweeping) && !crate::stack::same_majors(sweeping, none));
    }

    #[test]
    fn cookies() {
        let cookie = MallocCookie { place: MallocPlace::Free as u8, size: 15 };
        assert_eq!(MallocCookie::unpack(cookie.pack()), cookie);
    }
}
