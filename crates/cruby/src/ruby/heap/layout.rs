//! Where pages and their slots are.

use super::HeapError;
use crate::ruby::{
    RubyVersion,
    tables::{self, Struct, Table},
};

/// How the heap of one release is read; byte offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// `heap_pages.sorted` in the objspace.
    pub(super) sorted: u32,
    /// `heap_pages.allocated_pages` in the objspace; from 3.4 on the list has its length itself (`rb_darray`).
    pub(super) allocated_pages: Option<u32>,
    /// `slot_size` in a page, from 3.1 on.
    pub(super) slot_size: Option<u32>,
    /// `total_slots` in a page.
    pub(super) total_slots: u32,
    /// `start` in a page: the first slot.
    pub(super) start: u32,
    /// Whether the layout is that of this very release. Else it is that of the newest known one of its series, and what is
    /// read by it must prove itself: the slots of all pages add up to `heap_available_slots` of `GC.stat`.
    pub exact: bool,
}

impl HeapLayout {
    /// Bytes of a page structure that are read.
    pub(super) const HEAD: usize = 64;
    /// `sizeof(RVALUE)` where all slots are of one size.
    pub(super) const FIXED_SLOT: u16 = 40;

    /// The layout of a release (x86-64). `Err`: no table has one of its series.
    pub fn of(version: RubyVersion) -> Result<Self, HeapError> {
        let own = Table::of(version).ok();
        let table = own.or_else(|| Table::newest_of_series(version)).ok_or(HeapError::Layout)?;
        let page = table
            .structure("heap_page")
            .or_else(|| tables::newest_structure(version, "heap_page"))
            .ok_or(HeapError::Layout)?;
        let at = |name: &str| table.offset(name).ok_or(HeapError::Layout);
        let layout = Self {
            sorted: at("heap_pages.sorted")?,
            allocated_pages: (!version.at_least(3, 4))
                .then(|| at("heap_pages.allocated_pages"))
                .transpose()?,
            slot_size: offset(page, "slot_size"),
            total_slots: offset(page, "total_slots").ok_or(HeapError::Layout)?,
            start: offset(page, "start").ok_or(HeapError::Layout)?,
            exact: own.is_some(),
        };
        let last = [Some(layout.start + 8), layout.slot_size.map(|at| at + 2), Some(layout.total_slots + 2)];
        let fits = last.into_iter().flatten().all(|end| end as usize <= Self::HEAD);
        fits.then_some(layout).ok_or(HeapError::Layout)
    }
}

fn offset(structure: &Struct, name: &str) -> Option<u32> {
    structure.field(name).map(|field| field.offset)
}
