//! Objects of a heap with the places at which they were allocated.
//!
//! The table was read earlier, and the running program frees objects and creates others in their slots. So after each page is read, the
//! entries of its objects are looked up again: if they are unchanged, they were valid when the page was read, and belong to its objects.

use std::collections::HashMap;

use super::{
    HeapError, HeapLayout, Places, Slot,
    places::{Entry, Origin},
    table::{ENTRY, Table},
    walk::{PageHead, Walk},
    window::Window,
};
use crate::ruby::frames::Memory;

/// Maximum number of cached pairs of classes.
const MOST_PAIRS: usize = 1 << 16;

/// Assigns their places to objects of a heap.
pub struct Placed<'a> {
    places: &'a Places,
    /// `GC.count` after the table and before the heap were read.
    count: u64,
    /// Whether two class pointers stand for the same class.
    is_same_class: Box<dyn FnMut(u64, u64) -> bool + 'a>,
    classes: HashMap<(u64, u64), bool>,
    window: Window,
    /// Entries of the page that was read last.
    page: Vec<Entry>,
    /// Index of the first of these that may belong to the next slot.
    next: usize,
    /// Whether the table was rebuilt or emptied.
    pub changed: bool,
    /// Number of objects whose entry belongs to an earlier object: it was not deleted when that object was freed.
    pub others: u64,
}

impl<'a> Placed<'a> {
    /// `count` is `GC.count` after the table and before the heap is read; `real_class` gives the class for an object's class pointer.
    pub fn new(places: &'a Places, count: u64, mut real_class: impl FnMut(u64) -> Option<u64> + 'a) -> Self {
        let is_same = move |one, other| real_class(one).is_some_and(|one| real_class(other) == Some(one));
        Self {
            places,
            count,
            is_same_class: Box::new(is_same),
            classes: HashMap::new(),
            window: Window::new(),
            page: Vec::new(),
            next: 0,
            changed: false,
            others: 0,
        }
    }

    /// Looks up the entries of objects on the page that was just read.
    pub(super) fn begin<M: Memory>(&mut self, memory: &M, head: PageHead) {
        self.next = 0;
        self.page.clear();
        if self.changed {
            return;
        }
        let end = head.start.saturating_add(u64::from(head.slots) * u64::from(head.slot_size));
        self.page.extend_from_slice(self.places.between(head.start, end));
        if self.page.is_empty() {
            return;
        }
        let table = self.places.table;
        self.window.forget();
        let window = &mut self.window;
        self.page.sort_unstable_by_key(|entry| entry.index);
        self.page.retain(|entry| {
            let mut bytes = [0; ENTRY];
            let index = u64::from(entry.index);
            let read = table.entry(index).is_some_and(|at| window.read(memory, at, &mut bytes));
            read && Table::pair(index, &bytes).is_some_and(|pair| pair.key == entry.address)
        });
        self.page.sort_unstable_by_key(|entry| entry.address);
        if !table.is_same(memory) {
            self.changed = true;
            self.page.clear();
        }
    }

    /// The place at which an object of this page was allocated. Slots must be passed in order of address.
    pub(super) fn origin(&mut self, slot: &Slot<'_>) -> Option<Origin> {
        while self.page.get(self.next).is_some_and(|entry| entry.address < slot.address) {
            self.next += 1;
        }
        let entry = self.page.get(self.next).filter(|entry| entry.address == slot.address)?;
        let Self { classes, is_same_class, .. } = self;
        let found = self.places.origin(entry, slot, self.count, |one, other| {
            if classes.len() >= MOST_PAIRS {
                classes.clear();
            }
            *classes.entry((one, other)).or_insert_with(|| is_same_class(one, other))
        });
        self.others += u64::from(found.is_none());
        found
    }
}

/// Passes each object of the heap behind `objspace` to `visit` with its place, page by page, like [`super::each_object`].
///
/// # Errors
///
/// The heap cannot be read.
pub fn each_placed<M: Memory>(
    memory: &M,
    objspace: u64,
    layout: &HeapLayout,
    mut placed: Option<&mut Placed<'_>>,
    mut visit: impl FnMut(&Slot<'_>, Option<Origin>),
) -> Result<(), HeapError> {
    let mut walk = Walk::new(memory, layout);
    for address in walk.pages(objspace)? {
        let Some(page) = walk.read(address)? else { continue };
        if let Some(placed) = &mut placed {
            placed.begin(memory, page);
        }
        for slot in walk.slots(page).flatten() {
            let origin = placed.as_mut().and_then(|placed| placed.origin(&slot));
            visit(&slot, origin);
        }
    }
    Ok(())
}
