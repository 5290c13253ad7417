//! Where pages, their slots and the bits of each slot are.

use super::HeapError;
use crate::ruby::{
    RubyVersion,
    tables::{self, BitField, Struct, Table},
};

/// How the heap of one release is read; byte offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// `heap_pages.sorted` in the objspace.
    pub(super) sorted: u32,
    /// `heap_pages.allocated_pages` in the objspace; from 3.4 on the list itself contains its length (`rb_darray`).
    pub(super) allocated_pages: Option<u32>,
    /// `slot_size` in a page, from 3.1 on.
    pub(super) slot_size: Option<u32>,
    /// `total_slots` in a page.
    pub(super) total_slots: u32,
    /// `start` in a page: the first slot.
    pub(super) start: u32,
    /// `body` in a page, from 3.4 on: a page without slots is kept for reuse, with its memory (`gc_sweep_step`, gc/default/default.c).
    pub(super) body: Option<u32>,
    /// Size of a page structure, bytes.
    pub(super) head: u32,
    /// `HEAP_PAGE_ALIGN`: size of a page, bytes.
    pub(super) page: u64,
    /// `flags.before_sweep` in a page.
    pub(super) before_sweep: Option<BitField>,
    /// The bitmaps of a page for its slots.
    pub(super) bits: Option<SlotBits>,
    /// Where strings and arrays record the memory that they own.
    pub(super) owned: OwnedLayout,
    /// Mask of the flags that are set if instance variables are not in the slot: `FL_EXIVAR` (`include/ruby/internal/fl_type.h`), from 4.0 on
    /// the bits of the shape's id, in the upper half, that `rb_shape_has_fields` tests (shape.h): an object id is a field, too.
    pub(super) variables: u64,
    /// Whether the layout is that of exactly this release. Otherwise it is that of the newest known release of its series, and the
    /// data must prove it: the slots of all pages add up to `heap_available_slots` of `GC.stat`.
    pub exact: bool,
}

/// Bitmaps of a page; byte offsets of the first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotBits {
    pub(super) unprotected: u32,
    pub(super) marked: u32,
    pub(super) pinned: u32,
    /// Two bits for each slot, from 3.3 on. In earlier releases the age is in the flags of the object.
    pub(super) age: Option<u32>,
    /// Number of words of a bitmap with one bit for each slot.
    pub(super) words: u32,
}

/// Members of strings and arrays that own memory outside their slots; byte offsets from the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnedLayout {
    pub(super) string_capacity: u32,
    pub(super) array_capacity: u32,
    pub(super) array_length: u32,
    /// `RARRAY_SHARED_ROOT_FLAG` (internal/array.h): `FL_USER5`, from 3.2 on `FL_USER12`.
    pub(super) array_root: u64,
    /// `RUBY_ELTS_SHARED`, which is `STR_SHARED` (`include/ruby/internal/fl_type.h`): `FL_USER2`, from 3.4 on `FL_USER0`.
    pub(super) shared: u64,
}

impl HeapLayout {
    /// `sizeof(RVALUE)`: the unit of bitmaps, and the size of slots in releases where all have the same size.
    pub(super) const BASE_SLOT: u16 = 40;
    /// Maximum plausible size of a page structure, bytes.
    const MAX_HEAD: u32 = 4096;

    /// The layout of a release (x86-64). `Err`: no table has a layout for its series.
    pub fn of(version: RubyVersion) -> Result<Self, HeapError> {
        let own = Table::of(version).ok();
        let table = own.or_else(|| Table::newest_of_series(version)).ok_or(HeapError::Layout)?;
        let structure = |tag| table.structure(tag).or_else(|| tables::newest_structure(version, tag));
        let page = structure("heap_page").ok_or(HeapError::Layout)?;
        let at = |name: &str| table.offset(name).ok_or(HeapError::Layout);
        let start = offset(page, "start").ok_or(HeapError::Layout)?;
        // The tables lack `body`, which is between these two.
        let body = offset(page, "free_next")
            .map(|at| at + 8)
            .filter(|body| version.at_least(3, 4) && body + 8 == start);
        let layout = Self {
            sorted: at("heap_pages.sorted")?,
            allocated_pages: (!version.at_least(3, 4))
                .then(|| at("heap_pages.allocated_pages"))
                .transpose()?,
            slot_size: offset(page, "slot_size"),
            total_slots: offset(page, "total_slots").ok_or(HeapError::Layout)?,
            start,
            body,
            head: page.size,
            // HEAP_PAGE_ALIGN_LOG (gc.c): 14, from 3.2 on 16.
            page: if version.at_least(3, 2) { 64 << 10 } else { 16 << 10 },
            before_sweep: page.bit_field("flags.before_sweep").filter(|bit| bit.size <= 4),
            bits: SlotBits::of(version, page),
            owned: OwnedLayout {
                string_capacity: member(structure("RString"), "as.heap.aux.capa")?,
                array_capacity: member(structure("RArray"), "as.heap.aux.capa")?,
                array_length: member(structure("RArray"), "as.heap.len")?,
                array_root: if version.at_least(3, 2) { 1 << 24 } else { 1 << 17 },
                shared: if version.at_least(3, 4) { 1 << 12 } else { 1 << 14 },
            },
            variables: if version.at_least(4, 0) { 0x0807_ffff << 32 } else { 1 << 10 },
            // Tables of structures cover fewer releases than those of the objspace.
            exact: own.is_some_and(|own| own.structure("heap_page").is_some()),
        };
        let last = [
            Some(layout.start + 8),
            layout.slot_size.map(|at| at + 2),
            Some(layout.total_slots + 2),
            layout.before_sweep.map(|bit| bit.offset + 4),
        ];
        let fits = last.into_iter().flatten().all(|end| end <= layout.head) && layout.head <= Self::MAX_HEAD;
        fits.then_some(layout).ok_or(HeapError::Layout)
    }

    /// Size of a page, bytes; pages are aligned to their size.
    pub fn page_bytes(&self) -> u64 {
        self.page
    }

    /// Whether pages have bits for age, write barriers and pinning of their objects.
    pub fn knows_bits(&self) -> bool {
        self.bits.is_some()
    }
}

impl SlotBits {
    /// The bitmaps are the last members of the structure, in this order in every release that has them (`struct heap_page`,
    /// gc.c; gc/default/default.c from 3.4 on): `wb_unprotected`, `mark`, `uncollectible`, `marking`, from 3.3 on
    /// `remembered`, `pinned` (2.7 and later), from 3.3 on `age` with two bits for each slot. Their number of words follows
    /// from the size of the structure, and must match what the slots of a page need.
    fn of(version: RubyVersion, page: &Struct) -> Option<Self> {
        if !version.at_least(2, 7) {
            return None;
        }
        let first = page.field("page_node").map(|node| node.offset + u32::from(node.size))?;
        let with_age = version.at_least(3, 3);
        let maps = if with_age { 8 } else { 5 };
        let bytes = page.size.checked_sub(first)?;
        let map = bytes / maps;
        let needed = if version.at_least(3, 2) { 26 } else { 7 };
        if map * maps != bytes || map != needed * 8 {
            return None;
        }
        let nth = |index: u32| first + index * map;
        Some(Self {
            unprotected: nth(0),
            marked: nth(1),
            pinned: nth(if with_age { 5 } else { 4 }),
            age: with_age.then(|| nth(6)),
            words: needed,
        })
    }
}

fn offset(structure: &Struct, name: &str) -> Option<u32> {
    structure.field(name).map(|field| field.offset)
}

fn member(structure: Option<&Struct>, name: &str) -> Result<u32, HeapError> {
    structure.and_then(|structure| offset(structure, name)).ok_or(HeapError::Layout)
}
