//! `gctrace heap --leaks`: which objects were allocated where, and whether they still exist.
//!
//! At a refill a thread takes the list of free slots of a heap page because it needs a slot: its object gets the first slot of the list.
//! At some refills the stack is taken and the slot is followed. A slot is handed out again only by another refill of the same page, and only
//! if it was freed before, which sets its flags to zero (`heap_page_add_freeobj`, gc.c up to 3.3, gc/default/default.c from 3.4 on). So
//! its flags are checked at each refill of its page: as long as they were never zero, the slot still holds the object that was allocated
//! there, unless the heap was compacted.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of followed slots per page.
pub const LEAK_SLOTS: usize = 8;
/// Maximum number of pages with followed slots.
pub const MAX_LEAK_PAGES: u32 = 1 << 16;

/// The process that is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct LeakTarget {
    /// Address of `profile.count` of its objspace.
    pub gc_count: u64,
    /// Address of the `flags` word of its objspace.
    pub flags: u64,
    /// Its thread group id.
    pub tgid: u32,
    /// Mask of the GC mode inside `flags`.
    pub mode_mask: u32,
    /// First bit of the GC mode inside `flags`.
    pub mode_shift: u32,
    /// Size of a heap page, bytes: a power of two, which is also its alignment.
    pub page: u32,
    /// A refill is sampled if a random number has none of these bits set; 0: every refill is sampled.
    pub mask: u32,
    /// Byte offset of `freelist` in `struct heap_page`.
    pub freelist: u32,
}

/// An object that is followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct LeakSlot {
    /// Its address; 0: the slot is unused.
    pub address: u64,
    /// When it was allocated, nanoseconds.
    pub ts_ns: u64,
}

/// Entry of the `LEAK_PAGES` map, keyed by the page's aligned address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct LeakPage {
    /// The followed objects of the page.
    pub slots: [LeakSlot; LEAK_SLOTS],
}

/// Counters of `gctrace heap --leaks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum LeakCount {
    /// Hits of the process.
    Hits = 0,
    /// Hits of other processes that run the same file.
    OtherHits,
    /// Hits on another path, which has no page.
    NoPage,
    /// Refills whose page could not be read: the state of the followed objects of that page is no longer known.
    Unread,
    /// Refills whose object was sampled.
    Drawn,
    /// Sampled objects that are followed.
    Followed,
    /// Sampled objects not followed because the page already has [`LEAK_SLOTS`].
    PageFull,
    /// Sampled objects not followed because the map of pages was full.
    MapFull,
    /// Sampled objects not followed because the first slot of the list of free slots is not free.
    NotFree,
    /// Followed objects that were freed.
    Freed,
    /// Followed objects that could no longer be read.
    Gone,
}

impl LeakCount {
    /// All counters, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::Hits,
        Self::OtherHits,
        Self::NoPage,
        Self::Unread,
        Self::Drawn,
        Self::Followed,
        Self::PageFull,
        Self::MapFull,
        Self::NotFree,
        Self::Freed,
        Self::Gone,
    ];
}

/// Entries of the `LEAK_TALLIES` map.
pub const LEAK_COUNTS: u32 = LeakCount::ALL.len() as u32;

const _: () = assert!(size_of::<LeakTarget>() == 40 && size_of::<LeakPage>() == 16 * LEAK_SLOTS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert!(LeakCount::ALL.iter().enumerate().all(|(index, count)| *count as usize == index));
    }
}
