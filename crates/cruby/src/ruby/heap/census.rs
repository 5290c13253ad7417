//! Counts objects by type, class and page.

use std::collections::HashMap;

use super::{HeapError, HeapLayout, ObjectType, Placed, Slot, walk::Walk};
use crate::ruby::frames::Memory;

/// Objects, and the bytes of their slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of objects.
    pub count: u64,
    /// Bytes of their slots.
    pub bytes: u64,
    /// Bytes that strings and arrays among them own outside their slots, as `ObjectSpace.memsize_of` counts them. Memory owned by
    /// objects of other types is not known.
    pub owned: u64,
    /// Of these, by age, that is, collections survived; objects of age 3 are old. All 0 if the page layout of the release is not known.
    pub ages: [u64; 4],
    /// Of these, without write barrier.
    pub unprotected: u64,
    /// Of these, pinned by the last compacting collection.
    pub pinned: u64,
    /// Of these, dead but not yet swept.
    pub dead: u64,
}

impl Tally {
    /// Adds the counts of another tally.
    pub fn absorb(&mut self, other: &Self) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.owned = self.owned.saturating_add(other.owned);
        for (age, more) in self.ages.iter_mut().zip(other.ages) {
            *age += more;
        }
        self.unprotected += other.unprotected;
        self.pinned += other.pinned;
        self.dead += other.dead;
    }

    /// Of these, old: only a major collection frees them.
    pub fn old(&self) -> u64 {
        self.ages[3]
    }

    fn add(&mut self, slot: &Slot<'_>, layout: &HeapLayout) {
        self.count += 1;
        self.bytes += slot.bytes.len() as u64;
        self.owned = self.owned.saturating_add(slot.owned(layout).unwrap_or(0));
        let Some(marks) = slot.marks else { return };
        self.ages[usize::from(marks.age & 3)] += 1;
        self.unprotected += u64::from(marks.unprotected);
        self.pinned += u64::from(marks.pinned);
        self.dead += u64::from(marks.dead);
    }
}

/// A page of the heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Address of its first slot.
    pub start: u64,
    /// Bytes of each slot.
    pub slot_size: u16,
    /// Number of slots.
    pub slots: u16,
    /// Number of slots in use.
    pub live: u16,
    /// Of these, with old objects.
    pub old: u16,
    /// Of these, with objects that the last compaction found pinned.
    pub pinned: u16,
}

impl Page {
    /// Whether at least one and at most a quarter of its slots are in use: its objects keep it from being released.
    pub fn nearly_empty(&self) -> bool {
        self.live > 0 && u32::from(self.live) * 4 <= u32::from(self.slots)
    }
}

/// Objects of a class on pages that are nearly empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keeper {
    /// The objects.
    pub tally: Tally,
    /// Number of pages with at least one of them.
    pub pages: u64,
    /// Number of pages with no other objects.
    pub alone: u64,
}

/// By type and address of the class; the class is 0 for internal objects.
pub type ByClass<T> = HashMap<(ObjectType, u64), T>;

/// The result of counting a heap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// By type.
    pub by_type: HashMap<ObjectType, Tally>,
    /// By class.
    pub by_class: ByClass<Tally>,
    /// By place, type and class; `None` for an unknown place. Empty unless places were requested.
    pub by_place: HashMap<(Option<u32>, ObjectType, u64), Tally>,
    /// The objects that keep nearly empty pages from being released, by the class that `Object#class` returns for them, as far as it is known.
    /// Classes are one row: each has its own metaclass.
    pub keepers: ByClass<Keeper>,
    /// Free slots.
    pub free: Tally,
    /// Pages with slots.
    pub pages: Vec<Page>,
    /// First addresses of pages that have no slots now and are kept for reuse, from 3.4 on: `heap_empty_pages` of `GC.stat`.
    pub empty: Vec<u64>,
}

impl Census {
    /// All slots: `TOTAL` of `ObjectSpace.count_objects`.
    pub fn total(&self) -> u64 {
        self.pages.iter().map(|page| u64::from(page.slots)).sum()
    }

    /// Objects in these slots.
    pub fn live(&self) -> Tally {
        self.by_type.values().fold(Tally::default(), |mut sum, tally| {
            sum.absorb(tally);
            sum
        })
    }
}

/// The class that `Object#class` returns for objects with a class pointer; `None` if it cannot be read.
pub type RealClass<'a> = &'a mut dyn FnMut(u64) -> Option<u64>;

/// Counts all slots of the heap behind `objspace`. Bounded: each page is at most 64 KiB, and each is read once. A running
/// process continues meanwhile, so the sums are a snapshot only if it neither allocated nor collected: compare
/// `GC.count` and the number of allocated objects before and after. `real_class` is called once for each class pointer on pages
/// that are nearly empty.
pub fn census<M: Memory>(
    memory: &M,
    objspace: u64,
    layout: &HeapLayout,
    real_class: RealClass<'_>,
) -> Result<Census, HeapError> {
    counted(memory, objspace, layout, real_class, None)
}

/// As [`census`], but counts by places, too.
///
/// # Errors
///
/// As for [`census`].
pub fn census_with_places<M: Memory>(
    memory: &M,
    objspace: u64,
    layout: &HeapLayout,
    real_class: RealClass<'_>,
    placed: &mut Placed<'_>,
) -> Result<Census, HeapError> {
    counted(memory, objspace, layout, real_class, Some(placed))
}

/// The classes of the objects on nearly empty pages.
struct RealClasses<'a> {
    real: RealClass<'a>,
    /// What was read; `None`: it cannot be read.
    known: HashMap<u64, Option<u64>>,
    /// The class of classes, which is `Class` for all of them. Reading it for each would take as many reads as it has ancestors.
    of_classes: Option<u64>,
}

impl RealClasses<'_> {
    fn of(&mut self, kind: ObjectType, class: u64) -> (ObjectType, u64) {
        let Self { real, known, of_classes } = self;
        if class == 0 {
            return (kind, 0);
        }
        let mut read = || *known.entry(class).or_insert_with(|| real(class));
        let found = if kind == ObjectType::CLASS {
            // A metaclass that cannot be read does not stand for those of other classes.
            *of_classes = of_classes.or_else(read);
            *of_classes
        } else {
            read()
        };
        (kind, found.unwrap_or(class))
    }
}

fn counted<M: Memory>(
    memory: &M,
    objspace: u64,
    layout: &HeapLayout,
    real_class: RealClass<'_>,
    mut placed: Option<&mut Placed<'_>>,
) -> Result<Census, HeapError> {
    let mut real = RealClasses { real: real_class, known: HashMap::new(), of_classes: None };
    let mut census = Census::default();
    let mut walk = Walk::new(memory, layout);
    let mut on_page: ByClass<Tally> = HashMap::new();
    for address in walk.pages(objspace)? {
        let Some(head) = walk.read(address)? else {
            census.empty.extend(walk.kept());
            continue;
        };
        on_page.clear();
        let mut free = 0;
        if let Some(placed) = &mut placed {
            placed.begin(memory, head);
        }
        for slot in walk.slots(head) {
            let Some(slot) = slot else {
                free += 1;
                continue;
            };
            let kind = slot.kind();
            let class = if kind.is_internal() { 0 } else { slot.class() };
            on_page.entry((kind, class)).or_default().add(&slot, layout);
            if let Some(placed) = &mut placed {
                let place = placed.origin(&slot).map(|origin| origin.place);
                census.by_place.entry((place, kind, class)).or_default().add(&slot, layout);
            }
        }
        let sum = |of: fn(&Tally) -> u64| on_page.values().map(of).sum::<u64>() as u16;
        let page = Page {
            start: head.start,
            slot_size: head.slot_size,
            slots: head.slots,
            live: head.slots - free,
            old: sum(Tally::old),
            pinned: sum(|tally| tally.pinned),
        };
        for (&(kind, class), tally) in &on_page {
            census.by_type.entry(kind).or_default().absorb(tally);
            census.by_class.entry((kind, class)).or_default().absorb(tally);
        }
        if page.nearly_empty() {
            let mut keepers: ByClass<Tally> = HashMap::new();
            for (&(kind, class), tally) in &on_page {
                keepers.entry(real.of(kind, class)).or_default().absorb(tally);
            }
            for (key, tally) in &keepers {
                let keeper = census.keepers.entry(*key).or_default();
                keeper.tally.absorb(tally);
                keeper.pages += 1;
                keeper.alone += u64::from(keepers.len() == 1);
            }
        }
        census.free.count += u64::from(free);
        census.free.bytes += u64::from(free) * u64::from(head.slot_size);
        census.pages.push(page);
    }
    Ok(census)
}
