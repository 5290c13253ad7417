//! The heap of a process, slot by slot: what `ObjectSpace.count_objects` counts, read from memory without stopping it.
//!
//! Sources: `struct heap_page` and `objspace_each_objects` (gc.c up to 3.3, gc/default/default.c from 3.4 on),
//! `count_objects` (gc.c). A slot whose flags are 0 is free, whoever has it in its free list.

mod classes;
mod layout;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub use classes::ClassNames;
pub use layout::HeapLayout;

use super::frames::Memory;

/// Pages beyond this many are not a heap: 4 million of 64 KiB.
const MAX_PAGES: u64 = 1 << 22;
/// Bytes of the largest page (`HEAP_PAGE_SIZE`, 3.2 and later; before 16 KiB).
const PAGE: u64 = 64 << 10;
/// `RUBY_T_MASK` (`include/ruby/internal/value_type.h`).
const T_MASK: u64 = 0x1f;

/// Type of an object (`enum ruby_value_type`, `include/ruby/internal/value_type.h`), by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectType(u8);

impl ObjectType {
    /// The type in the flags of a slot that is not free.
    pub fn of_flags(flags: u64) -> Self {
        Self((flags & T_MASK) as u8)
    }

    /// Its name, as `ObjectSpace.count_objects` has it.
    pub fn name(self) -> &'static str {
        match self.0 {
            0x00 => "T_NONE",
            0x01 => "T_OBJECT",
            0x02 => "T_CLASS",
            0x03 => "T_MODULE",
            0x04 => "T_FLOAT",
            0x05 => "T_STRING",
            0x06 => "T_REGEXP",
            0x07 => "T_ARRAY",
            0x08 => "T_HASH",
            0x09 => "T_STRUCT",
            0x0a => "T_BIGNUM",
            0x0b => "T_FILE",
            0x0c => "T_DATA",
            0x0d => "T_MATCH",
            0x0e => "T_COMPLEX",
            0x0f => "T_RATIONAL",
            0x14 => "T_SYMBOL",
            0x1a => "T_IMEMO",
            0x1b => "T_NODE",
            0x1c => "T_ICLASS",
            0x1d => "T_ZOMBIE",
            0x1e => "T_MOVED",
            _ => "unknown type",
        }
    }

    /// Whether Ruby code never sees objects of this type (`internal_object_p`, gc.c).
    pub fn is_internal(self) -> bool {
        matches!(self.0, 0x00 | 0x1a..=0x1e)
    }
}

/// Objects, and the bytes of their slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// Bytes of their slots; what they have on the malloc heap is not in it.
    pub bytes: u64,
}

impl Tally {
    fn add(&mut self, slot_size: u16) {
        self.count += 1;
        self.bytes += u64::from(slot_size);
    }
}

/// A page of the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Address of its first slot.
    pub start: u64,
    /// Bytes of each slot.
    pub slot_size: u16,
    /// Slots.
    pub slots: u16,
    /// Slots in use.
    pub live: u16,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// By type.
    pub by_type: HashMap<ObjectType, Tally>,
    /// By type and address of the class; 0 for hidden objects.
    pub by_class: HashMap<(ObjectType, u64), Tally>,
    /// Free slots.
    pub free: Tally,
    /// Pages with slots.
    pub pages: Vec<Page>,
}

impl Census {
    /// All slots: `TOTAL` of `ObjectSpace.count_objects`.
    pub fn total(&self) -> u64 {
        self.pages.iter().map(|page| u64::from(page.slots)).sum()
    }

    /// Objects in them.
    pub fn live(&self) -> Tally {
        self.by_type.values().fold(Tally::default(), |sum, tally| Tally {
            count: sum.count + tally.count,
            bytes: sum.bytes + tally.bytes,
        })
    }
}

/// Why the heap could not be counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeapError {
    /// No table has the layout of pages of this release.
    #[error("the layout of heap pages of this Ruby is not known")]
    Layout,
    /// The process is gone, or its memory cannot be read.
    #[error("{what} at {address:#x} cannot be read")]
    Unreadable {
        /// What was to be read.
        what: &'static str,
        /// Where.
        address: u64,
    },
    /// What was read cannot be a heap. While a process runs, this happens when pages come and go; try again.
    #[error("{0}")]
    Implausible(String),
}

/// Counts all slots of the heap behind `objspace`. Bounded: each page is at most 64 KiB, and each is read once. A process
/// that runs goes on meanwhile, so the sums belong to one moment only if it neither allocated nor collected: compare
/// `GC.count` and the number of allocated objects before and after.
pub fn census<M: Memory>(memory: &M, objspace: u64, layout: &HeapLayout) -> Result<Census, HeapError> {
    let mut census = Census::default();
    let mut slots = vec![0; PAGE as usize];
    for address in page_list(memory, objspace, layout)? {
        let page = read_page(memory, address, layout)?;
        let Some(page) = page else { continue };
        let bytes = &mut slots[..usize::from(page.slots) * usize::from(page.slot_size)];
        if !memory.read(page.start, bytes) {
            return Err(HeapError::Unreadable { what: "a heap page", address: page.start });
        }
        let mut live = 0;
        for slot in bytes.chunks_exact(usize::from(page.slot_size)) {
            let flags = word(slot, 0);
            if flags == 0 {
                census.free.add(page.slot_size);
                continue;
            }
            live += 1;
            let kind = ObjectType::of_flags(flags);
            census.by_type.entry(kind).or_default().add(page.slot_size);
            let class = if kind.is_internal() { 0 } else { word(slot, 8) };
            census.by_class.entry((kind, class)).or_default().add(page.slot_size);
        }
        census.pages.push(Page { live, ..page });
    }
    Ok(census)
}

/// Addresses of the page structures.
fn page_list<M: Memory>(memory: &M, objspace: u64, layout: &HeapLayout) -> Result<Vec<u64>, HeapError> {
    let number = |address: u64, what| {
        let mut bytes = [0; 8];
        if memory.read(address, &mut bytes) {
            Ok(u64::from_le_bytes(bytes))
        } else {
            Err(HeapError::Unreadable { what, address })
        }
    };
    let list = number(objspace.wrapping_add(layout.sorted.into()), "the list of heap pages")?;
    let (count, first) = match layout.allocated_pages {
        Some(at) => (number(objspace.wrapping_add(at.into()), "the number of heap pages")?, list),
        // `rb_darray` (darray.h): size and capacity, then the elements.
        None => (number(list, "the number of heap pages")?, list.wrapping_add(16)),
    };
    if count > MAX_PAGES {
        return Err(HeapError::Implausible(format!("a heap of {count} pages is not plausible")));
    }
    let mut bytes = vec![0; count as usize * 8];
    if !bytes.is_empty() && !memory.read(first, &mut bytes) {
        return Err(HeapError::Unreadable { what: "the list of heap pages", address: first });
    }
    Ok(bytes.chunks_exact(8).map(|address| word(address, 0)).collect())
}

/// The page described at an address; `None` if it has no slots now (a page of the pool of empty ones, from 3.4 on).
fn read_page<M: Memory>(memory: &M, address: u64, layout: &HeapLayout) -> Result<Option<Page>, HeapError> {
    let mut head = [0; HeapLayout::HEAD];
    if !memory.read(address, &mut head) {
        return Err(HeapError::Unreadable { what: "the head of a heap page", address });
    }
    let half = |at: u32| u16::from_le_bytes([head[at as usize], head[at as usize + 1]]);
    let slot_size = layout.slot_size.map_or(HeapLayout::FIXED_SLOT, half);
    let (slots, start) = (half(layout.total_slots), word(&head, layout.start as usize));
    if slots == 0 || slot_size == 0 {
        return Ok(None);
    }
    let bytes = u64::from(slots) * u64::from(slot_size);
    let within = start.checked_add(bytes).is_some_and(|end| (end - 1) / PAGE == start / PAGE);
    if !slot_size.is_multiple_of(8) || !start.is_multiple_of(8) || start == 0 || !within {
        return Err(HeapError::Implausible(format!(
            "a heap page with {slots} slots of {slot_size} bytes at {start:#x} is not plausible"
        )));
    }
    Ok(Some(Page { start, slot_size, slots, live: 0 }))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}
