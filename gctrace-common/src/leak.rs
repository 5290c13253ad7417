//! `gctrace heap --leaks`: which objects were allocated where, and whether they are still there.
//!
//! At a refill a thread takes the list of free slots of a heap page because it needs one: its object gets the first slot of the list. The
//! stack at some refills is taken, and the slot is followed. A slot is handed out again only by another refill of the same page, and only
//! if it was freed before, which sets its flags to zero (`heap_page_add_freeobj`, gc.c up to 3.3, gc/default/default.c from 3.4 on). So
//! its flags are looked at in each refill of its page: as long as they were never zero, the object in it is the one that was allocated
//! there, unless the heap was compacted.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Slots of one page that are followed at a time, at most.
pub const LEAK_SLOTS: usize = 8;
/// Pages with followed slots, at most.
pub const MAX_LEAK_PAGES: u32 = 1 << 16;

/// The process that is looked at.
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
    /// How far the mode is shifted.
    pub mode_shift: u32,
    /// Bytes of a heap page, a power of two, to which it is aligned.
    pub page: u32,
    /// A refill is drawn if a random number has none of these bits; 0: each is.
    pub mask: u32,
    /// Byte offset of `freelist` in `struct heap_page`.
    pub freelist: u32,
}

/// An object that is followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct LeakSlot {
    /// Its address; 0: none.
    pub address: u64,
    /// When it was allocated, nanoseconds.
    pub ts_ns: u64,
}

/// Entry of the `LEAK_PAGES` map, keyed by the address that the page is aligned to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct LeakPage {
    /// What is followed of it.
    pub slots: [LeakSlot; LEAK_SLOTS],
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum LeakCount {
    /// Hits of the process.
    Hits = 0,
    /// Hits of other processes that run the same file.
    OtherHits,
    /// Hits on another path, where there is no page.
    NoPage,
    /// Refills whose page could not be read: what is followed of that page is not known any more.
    Unread,
    /// Refills of which the object was drawn.
    Drawn,
    /// Of those, followed.
    Followed,
    /// Not followed, because enough of the page are.
    PageFull,
    /// Not followed, because enough pages are.
    MapFull,
    /// Not followed, because what is first in the list of free slots is not free.
    NotFree,
    /// Followed objects that were freed.
    Freed,
    /// Followed objects that could not be read any more.
    Gone,
}

impl LeakCount {
    /// All, in the order of their number.
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
