//! Synthetic heaps, and hostile ones.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::{
    address::Svma,
    ruby::{RubyVersion, derive::ShapeList, frames::Memory, tables},
};

/// Memory made of separate pieces.
#[derive(Default)]
struct Pieces(BTreeMap<u64, Vec<u8>>);

impl Pieces {
    fn put(&mut self, address: u64, bytes: impl Into<Vec<u8>>) {
        self.0.insert(address, bytes.into());
    }
}

impl Memory for Pieces {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let Some((start, bytes)) = self.0.range(..=address).next_back() else { return false };
        let from = (address - start) as usize;
        bytes.get(from..from + buffer.len()).map(|found| buffer.copy_from_slice(found)).is_some()
    }
}

const OBJSPACE: u64 = 0x10_0000;
const LIST: u64 = 0x20_0000;
const HEADS: u64 = 0x30_0000;
const SLOTS: u64 = 0x7f00_0000_0000;
const CLASS: u64 = 0x5555_0000;

/// A heap with pages of these slots, each given by its flags, 0 for a free one.
fn heap(layout: &HeapLayout, pages: &[(u16, Vec<u64>)]) -> Pieces {
    let mut memory = Pieces::default();
    let mut objspace = vec![0; 4096];
    let mut list = Vec::new();
    if layout.allocated_pages.is_none() {
        list.extend((pages.len() as u64).to_le_bytes());
        list.extend((pages.len() as u64).to_le_bytes());
    }
    for (index, (slot_size, flags)) in pages.iter().enumerate() {
        let (head_at, start) = (HEADS + index as u64 * 4096, SLOTS + index as u64 * walk::PAGE);
        let mut head = vec![0; layout.head as usize];
        head[layout.total_slots as usize..][..2].copy_from_slice(&(flags.len() as u16).to_le_bytes());
        head[layout.start as usize..][..8].copy_from_slice(&start.to_le_bytes());
        if let Some(at) = layout.slot_size {
            head[at as usize..][..2].copy_from_slice(&slot_size.to_le_bytes());
        }
        memory.put(head_at, head);
        let mut slots = vec![0; flags.len() * usize::from(*slot_size)];
        for (slot, flags) in slots.chunks_exact_mut(usize::from(*slot_size)).zip(flags) {
            slot[..8].copy_from_slice(&flags.to_le_bytes());
            slot[8..16].copy_from_slice(&CLASS.to_le_bytes());
        }
        memory.put(start, slots);
        list.extend(head_at.to_le_bytes());
    }
    objspace[layout.sorted as usize..][..8].copy_from_slice(&LIST.to_le_bytes());
    if let Some(at) = layout.allocated_pages {
        objspace[at as usize..][..8].copy_from_slice(&(pages.len() as u64).to_le_bytes());
    }
    memory.put(OBJSPACE, objspace);
    memory.put(LIST, list);
    memory
}

fn layouts() -> Vec<(RubyVersion, HeapLayout)> {
    let newest = |table: &tables::Table| RubyVersion::new(table.to.0, table.to.1, table.to.2);
    tables::tables().iter().map(newest).map(|version| (version, HeapLayout::of(version).unwrap())).collect()
}

/// Each slot is counted once, under its own type, in every release.
#[test]
fn slots_are_counted() {
    assert!(layouts().len() >= 8);
    for (version, layout) in layouts() {
        let (string, imemo) = (0x5 | 1 << 12, 0x1a | 3 << 12);
        let large = if layout.slot_size.is_some() { 160 } else { 40 };
        let pages = [(40, vec![string, 0, imemo]), (large, vec![string, string, 0, 0]), (40, Vec::new())];
        let counted = census(&heap(&layout, &pages), OBJSPACE, &layout, &mut |_| None).unwrap();
        assert_eq!(counted.total(), 7, "{version}");
        assert_eq!(counted.pages.len(), 2, "{version}: a page without slots is not one of the heap");
        assert!(counted.empty.is_empty(), "{version}: it has no memory");
        let tally = |name: &str| {
            let of_type = counted.by_type.iter().find(|(kind, _)| kind.name() == name);
            of_type.map(|(_, tally)| (tally.count, tally.bytes))
        };
        assert_eq!(tally("T_STRING"), Some((3, 40 + 2 * u64::from(large))), "{version}");
        assert_eq!(tally("T_IMEMO"), Some((1, 40)), "{version}");
        assert_eq!((counted.free.count, counted.live().count), (3, 4), "{version}");
        assert_eq!(counted.by_class.values().map(|tally| tally.count).sum::<u64>(), 4);
        // The class field of internal objects does not hold a class.
        assert!(counted.by_class.keys().all(|(kind, class)| kind.is_internal() == (*class == 0)));
        assert_eq!(counted.pages[1].live, 2);
    }
}

/// A page without slots has its memory, from 3.4 on.
#[test]
fn empty_pages() {
    for (version, layout) in layouts() {
        let mut memory = heap(&layout, &[(40, vec![5]), (40, Vec::new()), (40, Vec::new())]);
        assert_eq!(layout.body.is_some(), version.at_least(3, 4), "{version}");
        let Some(at) = layout.body else { continue };
        for (page, body) in [(0, 0x7000_0000), (1, 0x7001_0000), (2, 0x7002_0008_u64)] {
            let head = memory.0.get_mut(&(HEADS + page * 4096)).unwrap();
            head[at as usize..][..8].copy_from_slice(&body.to_le_bytes());
        }
        let counted = census(&memory, OBJSPACE, &layout, &mut |_| None).unwrap();
        assert_eq!((counted.pages.len(), counted.empty), (1, vec![0x7001_0000]), "{version}");
    }
}

/// Age, write barrier, pin and death of an object are read from the bits of its own slot, in every release that has them.
#[test]
fn bits_of_slots() {
    let mut known = 0;
    for (version, layout) in layouts() {
        let Some(bits) = layout.bits else { continue };
        known += 1;
        let string = 0x5;
        let mut memory = heap(&layout, &[(40, vec![string; 100]), (40, vec![string; 10])]);
        let head = memory.0.get_mut(&HEADS).unwrap();
        let mut set = |map: u32, bit: usize| head[map as usize + bit / 8] |= 1 << (bit % 8);
        set(bits.unprotected, 70);
        set(bits.pinned, 71);
        (0..100).filter(|slot| *slot != 72).for_each(|slot| set(bits.marked, slot));
        if let Some(age) = bits.age {
            set(age, 73 * 2);
            set(age, 73 * 2 + 1);
            set(age, 99 * 2 + 1);
        }
        let sweep = layout.before_sweep.unwrap();
        head[sweep.offset as usize] |= 1 << sweep.first;
        if bits.age.is_none() {
            let slots = memory.0.get_mut(&SLOTS).unwrap();
            slots[73 * 40] |= 3 << 5;
            slots[99 * 40] |= 2 << 5;
        }
        let mut seen = Vec::new();
        let first = SLOTS;
        each_object(&memory, OBJSPACE, &layout, |slot| {
            let marks = slot.marks.unwrap();
            if marks != Marks::default() {
                seen.push(((slot.address - first) / 40, marks));
            }
        })
        .unwrap();
        let plain = Marks::default();
        let expected = [
            (70, Marks { unprotected: true, ..plain }),
            (71, Marks { pinned: true, ..plain }),
            (72, Marks { dead: true, ..plain }),
            (73, Marks { age: 3, ..plain }),
            (99, Marks { age: 2, ..plain }),
        ];
        assert_eq!(seen, expected, "{version}");
        let counted = census(&memory, OBJSPACE, &layout, &mut |_| None).unwrap().live();
        assert_eq!((counted.ages, counted.unprotected), ([108, 0, 1, 1], 1), "{version}");
        assert_eq!((counted.pinned, counted.dead), (1, 1), "{version}");
    }
    assert!(known >= 7, "{known}");
}

/// Strings and arrays own what `memsize_of` reports; shared and embedded ones own nothing, and no size overflows.
#[test]
fn owned_memory() {
    for (version, layout) in layouts() {
        let owned = |flags: u64, capacity: u64| {
            let mut bytes = vec![0; 40];
            bytes[..8].copy_from_slice(&flags.to_le_bytes());
            let at = match ObjectType::of_flags(flags) {
                ObjectType::ARRAY => layout.owned.array_capacity,
                _ => layout.owned.string_capacity,
            } as usize;
            bytes[at..at + 8].copy_from_slice(&capacity.to_le_bytes());
            Slot { address: SLOTS, bytes: &bytes, marks: None }.owned(&layout)
        };
        let (string, array, apart) = (0x5, 0x7, 1 << 13);
        assert_eq!(owned(string | apart, 100), Some(101), "{version}");
        assert_eq!(owned(string | apart | 4 << 22, 100), Some(102), "{version}: UTF-16");
        assert_eq!(owned(string, 100), Some(0), "{version}");
        assert_eq!(owned(string | apart | layout.owned.shared, 100), Some(0), "{version}");
        assert_eq!(owned(array, 10), Some(80), "{version}");
        assert_eq!(owned(array | apart, 10), Some(0), "{version}");
        assert_eq!(owned(0x8, 10), None);
        assert_eq!(owned(string | apart, u64::MAX), None);
        assert_eq!(owned(array, u64::MAX / 8), None);
    }
}

/// Objects that are alone on a page, and objects that share it with others, keep it.
#[test]
fn keepers() {
    let (_, layout) = layouts().pop().unwrap();
    let few = |kinds: &[u64]| {
        let mut slots = vec![0; 40];
        slots[..kinds.len()].copy_from_slice(kinds);
        (40, slots)
    };
    let pages = [few(&[5, 5]), few(&[5, 8]), few(&[]), few(&[5; 11])];
    let counted = census(&heap(&layout, &pages), OBJSPACE, &layout, &mut |_| None).unwrap();
    let of = |kind: u64| counted.keepers[&(ObjectType::of_flags(kind), CLASS)];
    assert_eq!((of(5).tally.count, of(5).pages, of(5).alone), (3, 2, 1));
    assert_eq!((of(8).tally.count, of(8).pages, of(8).alone), (1, 1, 0));
}

/// Classes, which have a metaclass each, are one row, as are objects of which some have a singleton class. A page counts once, and as one
/// without other objects.
#[test]
fn keepers_of_one_class() {
    let (_, layout) = layouts().pop().unwrap();
    let few = |kinds: &[u64]| {
        let mut slots = vec![0; 40];
        slots[..kinds.len()].copy_from_slice(kinds);
        (40, slots)
    };
    let (class, object, string) = (2, 1, 5);
    let pages = [few(&[class]), few(&[class, class]), few(&[class, object, object, string, string])];
    let mut memory = heap(&layout, &pages);
    for (page, slot, pointer) in
        [(0, 0, 0x10), (1, 1, 0x11), (2, 0, 0x20), (2, 1, 0x30), (2, 2, 0x31), (2, 3, 0x40), (2, 4, 0x41)]
    {
        let slots = memory.0.get_mut(&(SLOTS + page * walk::PAGE)).unwrap();
        slots[slot * 40 + 8..][..8].copy_from_slice(&u64::to_le_bytes(pointer));
    }
    let mut asked = Vec::new();
    let real = &mut |pointer| {
        asked.push(pointer);
        match pointer {
            0x30 | 0x31 => Some(0x30),
            // These cannot be read.
            0x10 | 0x40 | 0x41 => None,
            _ => Some(0x99),
        }
    };
    let counted = census(&memory, OBJSPACE, &layout, real).unwrap();
    let of = |kind: u64, class: u64| {
        let keeper = counted.keepers.get(&(ObjectType::of_flags(kind), class))?;
        Some((keeper.tally.count, keeper.pages, keeper.alone))
    };
    assert_eq!(of(class, 0x99), Some((3, 2, 1)));
    assert_eq!(of(class, 0x10), Some((1, 1, 1)), "it does not stand for the others");
    assert_eq!(of(object, 0x30), Some((2, 1, 0)));
    assert_eq!([of(string, 0x40), of(string, 0x41)], [Some((1, 1, 0)); 2]);
    assert_eq!(counted.keepers.len(), 5);
    assert_eq!(asked.len(), 6, "each once, and only one class of a class that can be read: {asked:?}");
    // Rows of the whole heap have the pointers themselves.
    assert!(counted.by_class.contains_key(&(ObjectType::OBJECT, 0x31)));
}

/// A release without a table, or whose table lacks pages, is read like the newest one of its series, and must prove itself; a release
/// of a series without any table is refused.
#[test]
fn unknown_releases() {
    let unknown = HeapLayout::of(RubyVersion::new(3, 4, 99)).unwrap();
    assert!(!unknown.exact);
    for (version, layout) in layouts() {
        let own = tables::Table::of(version).unwrap().structure("heap_page");
        assert_eq!(layout.exact, own.is_some(), "{version}");
    }
    // The table has its objspace, but not its pages.
    let exact = |patch| HeapLayout::of(RubyVersion::new(3, 4, patch)).unwrap().exact;
    assert_eq!([exact(9), exact(11)], [true, false]);
    assert_eq!(HeapLayout::of(RubyVersion::new(9, 9, 0)), Err(HeapError::Layout));
}

/// Data that cannot be a heap is an error that gives the reason.
#[test]
fn implausible_heaps() {
    let (_, layout) = layouts().pop().unwrap();
    let refused = |change: &dyn Fn(&mut Pieces)| {
        let mut memory = heap(&layout, &[(40, vec![5, 5])]);
        change(&mut memory);
        census(&memory, OBJSPACE, &layout, &mut |_| None).unwrap_err().to_string()
    };
    let missing = refused(&|memory| drop(memory.0.remove(&LIST)));
    assert!(missing.contains("cannot be read"), "{missing}");
    let many = refused(&|memory| memory.put(LIST, [u64::MAX.to_le_bytes(); 3].concat()));
    assert!(many.contains("pages is not plausible"), "{many}");
    let head = |at: u32, value: u64, bytes: usize| {
        move |memory: &mut Pieces| {
            let head = memory.0.get_mut(&HEADS).unwrap();
            head[at as usize..][..bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
    };
    for change in [
        head(layout.total_slots, u64::from(u16::MAX), 2),
        head(layout.slot_size.unwrap(), 41, 2),
        head(layout.start, u64::MAX - 7, 8),
        head(layout.start, 0, 8),
    ] {
        let refused = refused(&change);
        assert!(refused.contains("is not plausible"), "{refused}");
    }
}

/// References are those in the words of an object, without its class, numbers and deleted entries.
#[test]
fn references() {
    let mut known = 0;
    for (version, layout) in layouts() {
        let Some(mut references) = References::of(version, &layout, None) else { continue };
        known += 1;
        let (one, two, three) = (0x7000_0008_u64, 0x7000_0010_u64, 0x7000_0018_u64);
        let mut memory = Pieces::default();
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        memory.put(0x6000_0000, words(&[one, 7, CLASS, two, 0]));
        memory.put(0x6100_0000, words(&[1, one, two, u64::MAX, three, three, 1, 3, 5]));
        let mut of_changed = |slot: &[u64], now: &[u64]| {
            let (bytes, mut found) = (words(slot), Vec::new());
            memory.put(SLOTS, words(now));
            let slot = Slot { address: SLOTS, bytes: &bytes, marks: None };
            let fate = references.each(&memory, &slot, &mut |value| found.push(value));
            (fate, found)
        };
        // Data of an array that was moved meanwhile may belong to another one; an array that grew in place has its elements.
        let array = [0x7, CLASS, 5, 5, 0x6000_0000];
        assert_eq!(of_changed(&array, &[0x7, CLASS, 5, 5, 0x6300_0000]).0, Referred::Changed, "{version}");
        assert_eq!(of_changed(&array, &[0x7, CLASS, 6, 9, 0x6000_0000]).0, Referred::Exactly, "{version}");
        let mut of = |slot: &[u64]| of_changed(slot, slot);
        let exactly = |found: &[u64]| (Referred::Exactly, found.to_vec());
        assert_eq!(of(&[0x7, CLASS, 5, 5, 0x6000_0000]), exactly(&[one, two]), "{version}");
        assert_eq!(of(&[0x7 | 1 << 13 | 2 << 15, CLASS, one, 9, two]), exactly(&[one]), "{version}");
        assert_eq!(of(&[0x7, CLASS, 5, 5, 0x1234_0000]).0, Referred::Changed, "{version}");
        assert_eq!(of(&[0x7, CLASS, u64::MAX, 5, 0x6000_0000]).0, Referred::Changed, "{version}");
        // Instance variables are elsewhere, and the elements are known; in 4.0 an object id is stored like one.
        let id = if version.at_least(4, 0) { 1 << 32 } else { 1 << 10 };
        for variables in [layout.variables, id] {
            let own = of(&[0x7 | variables, CLASS, 5, 5, 0x6000_0000]);
            assert_eq!(own, (Referred::Partly, vec![one, two]), "{version}");
            let moved = of(&[0x7 | variables, CLASS, 5, 5, 0x1234_0000]);
            assert_eq!(moved.0, Referred::Changed, "{version}");
            assert_eq!(of(&[0xc | variables, CLASS, one, two, three]).0, Referred::Unknown, "{version}");
        }
        assert_eq!(of(&[0xc, CLASS, one, two, three]), (Referred::Unknown, Vec::new()), "{version}");
        let table = [0, 0, 0, 0, 0, 3, 0x6100_0000];
        let hash = 0x8 | 1 << 15;
        let found = if version.at_least(3, 3) {
            of(&[&[hash, CLASS, three][..], &[0, 0, 0, 0, 0, 3, 0x6100_0000]].concat())
        } else {
            let mut memory_of_table = Pieces::default();
            memory_of_table.put(0x6200_0000, words(&table));
            memory_of_table.put(0x6100_0000, words(&[1, one, two, u64::MAX, three, three, 1, 3, 5]));
            let (bytes, mut found) = (words(&[hash, CLASS, 0x6200_0000, three, 0]), Vec::new());
            memory_of_table.put(SLOTS, bytes.clone());
            let slot = Slot { address: SLOTS, bytes: &bytes, marks: None };
            let mut references = References::of(version, &layout, None).unwrap();
            let fate = references.each(&memory_of_table, &slot, &mut |value| found.push(value));
            (fate, found)
        };
        assert_eq!(found, exactly(&[three, one, two]), "{version}");

        // Two pairs in the hash itself, or in an array of pairs in which one was deleted.
        let small = [one, two, if version.at_least(3, 2) { 0x24 } else { 0x34 }, three];
        let flags = 0x8 | 2 << 20;
        let slot = if version.at_least(3, 3) {
            [&[flags, CLASS, 0, 0][..], &small].concat()
        } else {
            memory.put(0x6400_0000, words(&small));
            vec![flags, CLASS, 0x6400_0000, 0, 0]
        };
        let (bytes, mut pairs) = (words(&slot), Vec::new());
        memory.put(SLOTS, bytes.clone());
        let slot = Slot { address: SLOTS, bytes: &bytes, marks: None };
        let fate = references.pairs(&memory, &slot, &mut |key, value| pairs.push((key, value)));
        assert_eq!((fate, pairs), (Referred::Exactly, vec![(one, two)]), "{version}");
        let array = Slot { bytes: &words(&[0x7, CLASS, 5, 5, 0x6000_0000]), ..slot };
        assert_eq!(references.pairs(&memory, &array, &mut |_, _| {}), Referred::Unknown, "{version}");
    }
    assert!(known >= 7, "{known}");
}

/// Objects have the number of variables in their shape, in their slot, elsewhere, or in a table.
#[test]
fn variables_of_objects() {
    const SHAPES: u64 = 0x7100_0000;
    const TREE: u64 = 0x7200_0000;
    const VARIABLE: u64 = 0x7300_0000;
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let mut seen = 0;
    for (version, layout) in layouts().into_iter().filter(|(version, _)| version.at_least(3, 2)) {
        let new = version.at_least(4, 0);
        let (field, complex) = match (version.major, version.minor) {
            (4, _) => (None, 1 << 27),
            (3, 4) => (Some(0), 2),
            _ => (Some(8), 11),
        };
        let (one, two, three) = (0x7000_0008_u64, 0x7000_0010_u64, 0x7000_0018_u64);
        let mut memory = Pieces::default();
        memory.put(0x6000_0000, words(&[one, 7, CLASS, two]));
        memory.put(0x6100_0000, words(&[1, 77, two, u64::MAX, 78, three, 1, 79, 5]));
        memory.put(0x6200_0000, words(&[0, 0, 0, 0, 0, 3, 0x6100_0000]));
        let mut list = vec![0; 40 * 20];
        for (id, count) in [(3_usize, 2_u8), (5, 4)] {
            list[id * 40 + if new { 28 } else { 16 }] = count;
        }
        memory.put(SHAPES, list);
        memory.put(TREE, words(&[SHAPES, SHAPES, 5]));
        memory.put(VARIABLE, words(&[if new { SHAPES } else { TREE }]));
        let list = ShapeList { variable: Svma(VARIABLE - 0x1000), field, size: 40 };
        let mut references = References::of(version, &layout, Some(Shapes::new(list, 0x1000))).unwrap();
        let mut of = |id: u64, elsewhere: bool, slot: &[u64]| {
            let flag = if new { u64::from(elsewhere) << 16 } else { u64::from(!elsewhere) << 13 };
            let bytes = words(&[&[id << 32 | flag | 1, CLASS][..], slot].concat());
            let mut found = Vec::new();
            memory.put(SLOTS, bytes.clone());
            let slot = Slot { address: SLOTS, bytes: &bytes, marks: None };
            let fate = references.each(&memory, &slot, &mut |value| found.push(value));
            (fate, found)
        };
        let exactly = |found: &[u64]| (Referred::Exactly, found.to_vec());
        assert_eq!(of(3, false, &[one, two, three]), exactly(&[one, two]), "{version}");
        assert_eq!(of(4, false, &[one, two, three]), exactly(&[]), "{version}");
        assert_eq!(of(5, true, &[0x6000_0000, 0, 0]), exactly(&[one, two]), "{version}");
        // More than the slot has room for, and a pointer to unmapped memory.
        assert_eq!(of(5, false, &[one, two, three]).0, Referred::Changed, "{version}");
        assert_eq!(of(5, true, &[0x1234_0000, 0, 0]).0, Referred::Changed, "{version}");
        // No such shape.
        assert_eq!(of(21, false, &[one, two, three]).0, Referred::Changed, "{version}");
        let table = of(complex, true, &[0x6200_0000, 0, 0]);
        let expected = if version.at_least(3, 3) { exactly(&[two]) } else { (Referred::Unknown, Vec::new()) };
        assert_eq!(table, expected, "{version}");
        seen += 1;
    }
    assert!(seen >= 4, "{seen}");
}

proptest! {
    /// Whatever a slot contains, references are bounded and there is never a panic.
    #[test]
    fn garbage_references(
        version in 0..8_usize,
        kind in 0..32_u64,
        words in prop::collection::vec(any::<u64>(), 5..20),
        small in prop::collection::vec(0..64_u64, 5..20),
    ) {
        let (version, layout) = layouts().swap_remove(version);
        let list = ShapeList { variable: Svma(SLOTS), field: None, size: 40 };
        let Some(mut references) = References::of(version, &layout, Some(Shapes::new(list, 0))) else { return Ok(()) };
        for words in [words, small] {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes[0] = bytes[0] & 0xe0 | kind as u8;
            let slot = Slot { address: SLOTS, bytes: &bytes, marks: None };
            let mut count = 0;
            references.each(&Pieces::default(), &slot, &mut |_| count += 1);
            prop_assert!(count <= 200);
            let _owned = slot.owned(&layout);
        }
    }

    /// Garbage is counted or refused, in bounded time and memory, never with a panic.
    #[test]
    fn garbage(
        version in 0..8_usize,
        patches in prop::collection::vec((0..4_usize, 0..4096_usize, any::<u64>()), 0..40),
    ) {
        let (_, layout) = layouts().swap_remove(version);
        let mut memory = heap(&layout, &[(40, vec![5; 30]), (80, vec![0x1a; 20])]);
        for (piece, at, value) in patches {
            let piece = memory.0.values_mut().nth(piece).unwrap();
            let at = at % (piece.len() - 7);
            piece[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        if let Ok(counted) = census(&memory, OBJSPACE, &layout, &mut |_| None) {
            prop_assert_eq!(counted.total(), counted.live().count + counted.free.count);
        }
    }
}
