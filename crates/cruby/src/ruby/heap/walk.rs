//! Walks from the objspace over its pages to each slot. One page is in memory at a time.

use super::{HeapError, HeapLayout, ObjectType};
use crate::ruby::frames::Memory;

/// Maximum number of pages: 4 million of 64 KiB.
const MAX_PAGES: u64 = 1 << 22;
/// Size of the largest page, bytes (`HEAP_PAGE_SIZE`, 3.2 and later; 16 KiB before).
pub(super) const PAGE: u64 = 64 << 10;
/// `RVALUE_OLD_AGE` (gc.c, gc/default/default.c).
const OLD: u8 = 3;
/// `RVALUE_AGE_SHIFT` (gc.c, up to 3.2): the age is in two bits of the flags.
const AGE_SHIFT: u32 = 5;
/// `FL_USER1`: `RSTRING_NOEMBED`, and `RARRAY_EMBED_FLAG`.
pub(super) const USER1: u64 = 1 << 13;
/// `STR_NOFREE` (string.c): `FL_USER18`.
const STR_NOFREE: u64 = 1 << 30;
/// `ENCODING_SHIFT` (include/ruby/internal/encoding/encoding.h): seven bits of the flags.
const ENCODING_SHIFT: u32 = 22;

/// A page that was read; its slots are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHead {
    pub(super) start: u64,
    pub(super) slot_size: u16,
    pub(super) slots: u16,
    /// Whether unmarked objects on it are dead and await the sweep.
    pub(super) before_sweep: bool,
}

/// The collector's data about an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Number of collections that it survived, at most 3; at 3 it is old.
    pub age: u8,
    /// It has no write barrier (shady): every minor collection that reaches it traverses it again.
    pub unprotected: bool,
    /// The last compaction found a reference to it that cannot be updated. Set by compacting collections only.
    pub pinned: bool,
    /// It is unmarked on a page that is yet to be swept: it is dead.
    pub dead: bool,
}

impl Marks {
    /// Whether only a major collection frees it.
    pub fn is_old(self) -> bool {
        self.age == OLD
    }
}

/// A slot in use.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'a> {
    /// Its address.
    pub address: u64,
    /// Its contents.
    pub bytes: &'a [u8],
    /// The collector's data about it, if the page layout of the release is known in that detail.
    pub marks: Option<Marks>,
}

impl Slot<'_> {
    /// `RBasic.flags`.
    pub fn flags(&self) -> u64 {
        self.word(0)
    }

    /// `RBasic.klass`; meaningful only for types that are not internal.
    pub fn class(&self) -> u64 {
        self.word(8)
    }

    /// Its type.
    pub fn kind(&self) -> ObjectType {
        ObjectType::of_flags(self.flags())
    }

    /// The word at a byte offset; 0 beyond the end of the slot.
    pub fn word(&self, at: usize) -> u64 {
        word(self.bytes, at)
    }

    /// Whether it is not an object, class or module, and has instance variables, which are then stored elsewhere
    /// (`rb_obj_gen_fields_p`, variable.c, in 4.0).
    pub fn has_other_variables(&self, layout: &HeapLayout) -> bool {
        let own = [ObjectType::OBJECT, ObjectType::CLASS, ObjectType::MODULE];
        !own.contains(&self.kind()) && !self.kind().is_internal() && self.flags() & layout.variables != 0
    }

    /// Bytes that a string or an array owns outside its slot, by the rules of `ObjectSpace.memsize_of`
    /// (`rb_str_memsize`, string.c; `rb_ary_memsize`, array.c). `None` for an object of another type, or if implausible.
    pub fn owned(&self, layout: &HeapLayout) -> Option<u64> {
        let flags = self.flags();
        let owned = match self.kind() {
            ObjectType::STRING => {
                if flags & (USER1 | layout.owned.shared | STR_NOFREE) != USER1 {
                    return Some(0);
                }
                // TERM_LEN: rb_enc_mbminlen of the encoding (builtin indices of encindex.h: UTF-16 and UTF-32).
                let terminator = match flags >> ENCODING_SHIFT & 0x7f {
                    3 | 4 | 7 => 2,
                    5 | 6 | 8 => 4,
                    _ => 1,
                };
                self.word(layout.owned.string_capacity as usize).checked_add(terminator)?
            }
            ObjectType::ARRAY => {
                if flags & (USER1 | layout.owned.shared) != 0 {
                    return Some(0);
                }
                // ARY_CAPA (array.c): the root of shared arrays has a reference count in place of the capacity, and is full.
                let root = flags & layout.owned.array_root != 0;
                let capacity = if root { layout.owned.array_length } else { layout.owned.array_capacity };
                self.word(capacity as usize).checked_mul(8)?
            }
            _ => return None,
        };
        (owned < 1 << 46).then_some(owned)
    }
}

/// Reads the list of pages, and one page at a time.
pub(super) struct Walk<'m, M> {
    memory: &'m M,
    layout: HeapLayout,
    head: Vec<u8>,
    bytes: Vec<u8>,
}

impl<'m, M: Memory> Walk<'m, M> {
    pub(super) fn new(memory: &'m M, layout: &HeapLayout) -> Self {
        Self { memory, layout: *layout, head: vec![0; layout.head as usize], bytes: vec![0; PAGE as usize] }
    }

    /// Addresses of the page structures.
    pub(super) fn pages(&self, objspace: u64) -> Result<Vec<u64>, HeapError> {
        let number = |address: u64, what| {
            let mut bytes = [0; 8];
            if self.memory.read(address, &mut bytes) {
                Ok(u64::from_le_bytes(bytes))
            } else {
                Err(HeapError::Unreadable { what, address })
            }
        };
        let list = number(objspace.wrapping_add(self.layout.sorted.into()), "the list of heap pages")?;
        let (count, first) = match self.layout.allocated_pages {
            Some(at) => (number(objspace.wrapping_add(at.into()), "the number of heap pages")?, list),
            // `rb_darray` (darray.h): size and capacity, then the elements.
            None => (number(list, "the number of heap pages")?, list.wrapping_add(16)),
        };
        if count > MAX_PAGES {
            return Err(HeapError::Implausible(format!("a heap of {count} pages is not plausible")));
        }
        let mut bytes = vec![0; count as usize * 8];
        if !bytes.is_empty() && !self.memory.read(first, &mut bytes) {
            return Err(HeapError::Unreadable { what: "the list of heap pages", address: first });
        }
        Ok(bytes.chunks_exact(8).map(|address| word(address, 0)).collect())
    }

    /// Reads the page described at an address; `None` if it has no slots now (a page in the pool of empty pages, from 3.4
    /// on).
    pub(super) fn read(&mut self, address: u64) -> Result<Option<PageHead>, HeapError> {
        if !self.memory.read(address, &mut self.head) {
            return Err(HeapError::Unreadable { what: "the head of a heap page", address });
        }
        let head = &self.head;
        let half = |at: u32| u16::from_le_bytes([head[at as usize], head[at as usize + 1]]);
        let slot_size = self.layout.slot_size.map_or(HeapLayout::BASE_SLOT, half);
        let (slots, start) = (half(self.layout.total_slots), word(head, self.layout.start as usize));
        if slots == 0 || slot_size == 0 {
            return Ok(None);
        }
        let bytes = u64::from(slots) * u64::from(slot_size);
        let page = self.layout.page;
        let within = start.checked_add(bytes).is_some_and(|end| (end - 1) / page == start / page);
        if !slot_size.is_multiple_of(8) || !start.is_multiple_of(8) || start == 0 || !within {
            return Err(HeapError::Implausible(format!(
                "a heap page with {slots} slots of {slot_size} bytes at {start:#x} is not plausible"
            )));
        }
        let before_sweep = self.layout.before_sweep.is_some_and(|bit| {
            let at = bit.offset as usize;
            let flags = u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            flags >> bit.first & 1 == 1
        });
        if !self.memory.read(start, &mut self.bytes[..bytes as usize]) {
            return Err(HeapError::Unreadable { what: "a heap page", address: start });
        }
        Ok(Some(PageHead { start, slot_size, slots, before_sweep }))
    }

    /// The first address of the page that was read last, if it has no slots and is kept for reuse.
    pub(super) fn kept(&self) -> Option<u64> {
        let body = word(&self.head, self.layout.body? as usize);
        (body != 0 && body.is_multiple_of(self.layout.page)).then_some(body)
    }

    /// The slots of the page that was read last; `None` for a free one.
    pub(super) fn slots(&self, page: PageHead) -> impl Iterator<Item = Option<Slot<'_>>> {
        let size = usize::from(page.slot_size);
        let bytes = &self.bytes[..usize::from(page.slots) * size];
        bytes.chunks_exact(size).enumerate().map(move |(index, bytes)| {
            let flags = word(bytes, 0);
            if flags == 0 {
                return None;
            }
            let address = page.start + (index * size) as u64;
            Some(Slot { address, bytes, marks: self.marks(page, address, flags) })
        })
    }

    fn marks(&self, page: PageHead, address: u64, flags: u64) -> Option<Marks> {
        let bits = self.layout.bits?;
        // NUM_IN_PAGE and MARKED_IN_BITMAP (gc.c).
        let index = (address % self.layout.page / u64::from(HeapLayout::BASE_SLOT)) as usize;
        let pair = |map: u32, index: usize| word(&self.head, map as usize + index / 64 * 8) >> (index % 64);
        if index >= bits.words as usize * 64 {
            return None;
        }
        let age = match bits.age {
            Some(age) => pair(age, index * 2),
            None => flags >> AGE_SHIFT,
        };
        Some(Marks {
            age: (age & 3) as u8,
            unprotected: pair(bits.unprotected, index) & 1 == 1,
            pinned: pair(bits.pinned, index) & 1 == 1,
            dead: page.before_sweep && pair(bits.marked, index) & 1 == 0,
        })
    }
}

pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Passes each object of the heap behind `objspace` to `visit`, page by page. Bounded: each page is at most 64 KiB and is
/// read once. A running process continues meanwhile.
pub fn each_object<M: Memory>(
    memory: &M,
    objspace: u64,
    layout: &HeapLayout,
    mut visit: impl FnMut(&Slot<'_>),
) -> Result<(), HeapError> {
    let mut walk = Walk::new(memory, layout);
    for address in walk.pages(objspace)? {
        if let Some(page) = walk.read(address)? {
            walk.slots(page).flatten().for_each(|slot| visit(&slot));
        }
    }
    Ok(())
}

/// Checks that a word of a slot is unchanged. While the memory it points to is read, a running program may move that memory and reuse
/// it for another object.
pub(super) fn unchanged<M: Memory>(memory: &M, slot: &Slot<'_>, at: u64) -> Option<()> {
    is_still(memory, slot.address.checked_add(at)?, slot.word(usize::try_from(at).ok()?))
}

/// Checks that this word is at an address.
pub(super) fn is_still<M: Memory>(memory: &M, address: u64, expected: u64) -> Option<()> {
    let mut bytes = [0; 8];
    (memory.read(address, &mut bytes) && u64::from_le_bytes(bytes) == expected).then_some(())
}
