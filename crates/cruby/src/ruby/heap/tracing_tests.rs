//! Synthetic programs that trace their allocations, and hostile ones.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::{table::Table, tracing::Tracing, walk::PageHead, *};
use crate::ruby::{RubyVersion, frames::Memory, frames::words::Words};

const OLD: RubyVersion = RubyVersion { major: 2, minor: 7, teeny: 4 };
const MIDDLE: RubyVersion = RubyVersion { major: 3, minor: 1, teeny: 2 };
const NEW: RubyVersion = RubyVersion { major: 3, minor: 4, teeny: 9 };
const NEWEST: RubyVersion = RubyVersion { major: 4, minor: 0, teeny: 0 };
const RELEASES: [RubyVersion; 4] = [OLD, MIDDLE, NEW, NEWEST];
const T_DATA: u64 = 0xc;
const T_STRING: u64 = 0x5;
const CLASS: u64 = 0x8000;
/// Word indices of the parts of the synthetic program.
const NEW_DATA: usize = 10;
const FREE_DATA: usize = 20;
const ARGUMENT: usize = 30;
const TABLE: usize = 40;
const HASH_TYPE: usize = 50;
const ENTRIES: usize = 60;
const INFO: [usize; 2] = [80, 90];
const PATH: usize = 100;
const NEW_SLOT: usize = 110;
const FREE_SLOT: usize = 125;
const OBJECTS: [usize; 2] = [140, 145];
const WORDS: usize = 150;

fn at(word: usize) -> u64 {
    0x10000 + word as u64 * 8
}

fn text(bytes: [u8; 8]) -> u64 {
    u64::from_le_bytes(bytes)
}

/// A program that traces, with two objects in its table between deleted entries.
fn program(version: RubyVersion) -> Vec<u64> {
    let mut words = vec![0; WORDS];
    let mut put = |first: usize, values: &[u64]| words[first..first + values.len()].copy_from_slice(values);
    put(0, &[at(1), text(*b"tracepoi"), text(*b"nt\0.....")]);
    for (data, slot, events) in [(NEW_DATA, NEW_SLOT, 0x10_0000), (FREE_DATA, FREE_SLOT, 0x20_0000)] {
        let own_self = at(slot);
        let head = [events | 1 << 32, 0, 0, 0x7700, at(ARGUMENT), 0];
        let tail = if version.at_least(3, 0) { vec![0x6600, own_self] } else { vec![own_self] };
        let data_words = [&head[..], &tail].concat();
        put(data, &data_words);
        let embedded = version.at_least(3, 3);
        let typed = match () {
            () if version.at_least(4, 0) => [0, at(0) | 1],
            () if embedded => [at(0), 3],
            () => [at(0), 1],
        };
        let flags = if version.at_least(4, 0) { T_DATA | 1 << 6 } else { T_DATA };
        put(slot, &[flags, 0x9000, typed[0], typed[1]]);
        if embedded { put(slot + 4, &data_words) } else { put(slot + 4, &[at(data)]) }
    }
    put(ARGUMENT, &[1, at(NEW_SLOT), at(FREE_SLOT), at(TABLE), 0, 0]);
    put(TABLE, &[2 | 3 << 8 | 5 << 32, at(HASH_TYPE), 2, 0, 0, 4, at(ENTRIES)]);
    put(HASH_TYPE, &[0x4000, 0x4100]);
    put(ENTRIES, &[u64::MAX, at(OBJECTS[0]), at(INFO[1]), 7, at(OBJECTS[0]), at(INFO[0])]);
    put(ENTRIES + 6, &[9, at(OBJECTS[1]), at(INFO[1]), u64::MAX, 0, 0]);
    put(INFO[0], &[1, T_STRING | 1 << 13, CLASS, at(PATH), 12, 0, 0xbb0c, 3]);
    put(INFO[1], &[1, T_STRING, CLASS, 0, 0, 0, 8, 4]);
    put(PATH, &[text(*b"/app/a.r"), text(*b"b\0......")]);
    for object in OBJECTS {
        put(object, &[T_STRING, CLASS, 0, 0, 0]);
    }
    words
}

/// File, line, method and generation.
type Found = (Option<String>, u32, u64, u64);

fn slot_bytes(words: &[u64], first: usize, len: usize) -> Vec<u8> {
    words[first..(first + len).min(words.len())].iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn tracing(version: RubyVersion, words: &[u64]) -> Result<Tracing, NoPlaces> {
    let memory = Words(words.to_vec());
    let mut tracepoints = Tracepoints::of(version).ok_or(NoPlaces::Release)?;
    for first in [NEW_SLOT, FREE_SLOT, OBJECTS[0], OBJECTS[1]] {
        let bytes = slot_bytes(words, first, if first < OBJECTS[0] { 15 } else { 5 });
        tracepoints.look(&memory, &Slot { address: at(first), bytes: &bytes, marks: None });
    }
    tracepoints.tracing(&memory)
}

fn places(version: RubyVersion, words: &[u64]) -> Result<Places, NoPlaces> {
    Places::read(&Words(words.to_vec()), &tracing(version, words)?)
}

/// File, line, method and generation of both objects; `later` is the memory when the heap is read.
fn origins(version: RubyVersion, words: &[u64], later: &[u64], marks: Marks) -> Vec<Option<Found>> {
    let places = places(version, words).unwrap();
    let mut reader = Placed::new(&places, 4, |class| (class == CLASS + 8).then_some(CLASS).or(Some(class)));
    let memory = Words(later.to_vec());
    reader.begin(&memory, PageHead { start: at(OBJECTS[0]), slot_size: 40, slots: 2, before_sweep: false });
    let of = |object: usize| {
        let bytes = slot_bytes(later, object, 5);
        let slot = Slot { address: at(object), bytes: &bytes, marks: Some(marks) };
        let origin = reader.origin(&slot)?;
        let place = places.place(origin.place)?;
        let file = places.file(place).map(ToString::to_string);
        Some((file, place.line, place.method, origin.generation))
    };
    OBJECTS.into_iter().map(of).collect()
}

/// Each release's program is found, and each of its objects gets the data of its entry.
#[test]
fn objects_have_their_places() {
    for version in RELEASES {
        let words = program(version);
        assert!(tracing(version, &words).unwrap().running, "{version}");
        let found = origins(version, &words, &words, Marks::default());
        let expected = [Some((Some("/app/a.rb".to_owned()), 12, 0xbb0c, 3)), Some((None, 0, 8, 4))];
        assert_eq!(found, expected, "{version}");
        // One of the two is disabled.
        let mut words = words;
        let data = if version.at_least(3, 3) { FREE_SLOT + 4 } else { FREE_DATA };
        words[data] &= 0xffff_ffff;
        assert!(!tracing(version, &words).unwrap().running, "{version}");
    }
    assert!(Tracepoints::of(RubyVersion::new(2, 6, 0)).is_none());
    assert!(Tracepoints::of(RubyVersion::new(4, 1, 0)).is_none());
}

/// Data that differs in one respect is not accepted as the table.
#[test]
fn nothing_is_guessed() {
    let version = MIDDLE;
    for (word, value, why) in [
        (NEW_SLOT, 7, "an array"),
        (NEW_SLOT + 2, 0x30, "of a type that is not there"),
        (NEW_SLOT + 3, 0, "without a type"),
        (2, text(*b"nts\0...."), "of another type"),
        (NEW_DATA, 0x8, "of other events"),
        (NEW_DATA, 0x30_0000, "of both events"),
        (NEW_DATA + 7, at(FREE_SLOT), "data of another object"),
        (FREE_DATA + 4, at(TABLE), "other data than the other one"),
        (ARGUMENT + 1, at(FREE_SLOT), "that does not refer to both"),
        (ARGUMENT + 2, 0, "that does not refer to both"),
        (ARGUMENT + 3, 0, "without a table"),
    ] {
        let mut words = program(version);
        words[word] = value;
        assert_eq!(tracing(version, &words), Err(NoPlaces::NotTraced), "{why}");
    }
    for (word, value, why) in [
        (TABLE, 1, "more entries than there is room for"),
        (TABLE, 63, "too large a power"),
        (TABLE + 1, 0x31, "a type that is not there"),
        (TABLE + 2, 5, "more entries than between start and bound"),
        (TABLE + 4, 5, "a start behind the bound"),
        (TABLE + 6, 0, "without entries"),
        (HASH_TYPE + 1, 0, "a type without functions"),
    ] {
        let mut words = program(version);
        words[word] = value;
        assert_eq!(places(version, &words).unwrap_err(), NoPlaces::Implausible, "{why}");
    }
    let mut words = program(version);
    words[TABLE] = 60;
    (words[TABLE + 2], words[TABLE + 5]) = (1 << 59, 1 << 59);
    assert_eq!(places(version, &words).unwrap_err(), NoPlaces::TooLarge);
    // Entries in unmapped memory.
    let mut words = program(version);
    words[TABLE + 6] = 0x7000_0000;
    assert_eq!(places(version, &words).unwrap_err(), NoPlaces::Changed);
}

/// An implausible entry gives no place; the other entries do.
#[test]
fn entries_prove_themselves() {
    let version = MIDDLE;
    for (word, value, why) in [
        (ENTRIES + 3, u64::MAX, "deleted"),
        (ENTRIES + 4, at(OBJECTS[0]) + 1, "of no object"),
        (ENTRIES + 4, at(OBJECTS[1]), "two of one object"),
        (ENTRIES + 5, 0x40, "without data"),
        (INFO[0], 0, "freed"),
        (INFO[0] + 1, 7, "of another type"),
        (INFO[0] + 2, CLASS + 16, "of another class"),
        (INFO[0] + 3, 0x40, "a path that is not there"),
        (INFO[0] + 3, at(WORDS) - 8, "a path without an end"),
        (INFO[0] + 4, 1 << 31, "a line that is none"),
        (INFO[0] + 4, 1 << 40, "a line that is none"),
        (INFO[0] + 7, 5, "of the future"),
        (INFO[0] + 7, 1 << 40, "of no generation"),
    ] {
        let mut words = program(version);
        words[WORDS - 1] = u64::MAX;
        words[word] = value;
        let found = origins(version, &words, &words, Marks::default());
        assert_eq!(found[0], None, "{why}");
        assert_eq!(found[1].is_some(), why != "two of one object", "{why}");
    }
    // A singleton class, and an object that is or was hidden.
    for class in [CLASS + 8, 0] {
        let mut words = program(version);
        words[OBJECTS[0] + 1] = class;
        assert!(origins(version, &words, &words, Marks::default())[0].is_some(), "{class:#x}");
    }
}

/// An object that is younger than its entry is a different object.
#[test]
fn ages() {
    let mut words = program(MIDDLE);
    words[INFO[0] + 7] = 1;
    let of =
        |age, unprotected| origins(MIDDLE, &words, &words, Marks { age, unprotected, ..Marks::default() });
    // It has survived two collections, and perhaps a third.
    assert_eq!([0, 1, 2, 3].map(|age| of(age, false)[0].is_some()), [false, false, true, true]);
    assert!(of(0, true)[0].is_some(), "those without write barrier do not age");
    assert!(of(0, false)[1].is_some());
}

/// Changes between reading the table and the heap: deleted entries, and a table that is rebuilt or emptied.
#[test]
fn changes() {
    let words = program(NEW);
    let changed = |changes: &[(usize, u64)]| {
        let mut later = words.clone();
        for &(word, value) in changes {
            later[word] = value;
        }
        let found = origins(NEW, &words, &later, Marks::default());
        [found[0].is_some(), found[1].is_some()]
    };
    assert_eq!(changed(&[]), [true, true]);
    assert_eq!(changed(&[(ENTRIES + 3, u64::MAX)]), [false, true], "freed");
    assert_eq!(changed(&[(ENTRIES + 4, at(20))]), [false, true], "of another object");
    assert_eq!(changed(&[(OBJECTS[1], 7)]), [true, false], "a slot with another type");
    assert_eq!(changed(&[(TABLE, 2 | 3 << 8 | 6 << 32)]), [false, false], "made anew");
    assert_eq!(changed(&[(TABLE + 6, at(ENTRIES) + 24)]), [false, false], "elsewhere");
    assert_eq!(changed(&[(TABLE + 2, 0), (TABLE + 5, 0)]), [false, false], "emptied");
    assert_eq!(changed(&[(TABLE + 4, 1)]), [true, true], "deleted at the start");
}

/// Memory that changes at the n-th read of an address.
struct Changing {
    words: RefCell<Vec<u64>>,
    at: u64,
    reads: Cell<u32>,
    change: (usize, u64),
}

impl Memory for Changing {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        if address == self.at {
            self.reads.set(self.reads.get() + 1);
            let (word, value) = self.change;
            self.words.borrow_mut()[word] = value.wrapping_add(u64::from(self.reads.get()) << 32);
        }
        Words(self.words.borrow().clone()).read(address, buffer)
    }
}

/// A table that is rebuilt during every attempt is not read, and the attempts end.
#[test]
fn a_table_that_never_rests() {
    let words = program(MIDDLE);
    let tracing = tracing(MIDDLE, &words).unwrap();
    let memory = Changing {
        words: RefCell::new(words),
        at: at(TABLE),
        reads: Cell::new(0),
        change: (TABLE, 2 | 3 << 8),
    };
    assert_eq!(Places::read(&memory, &tracing).unwrap_err(), NoPlaces::Changed);
    assert!(memory.reads.get() < 20, "{} reads", memory.reads.get());
    assert!(Table::at(&memory, at(TABLE)).is_some());
}

/// A cleared table is a valid table without objects.
#[test]
fn cleared() {
    let mut words = program(OLD);
    (words[TABLE + 2], words[TABLE + 5]) = (0, 0);
    let places = places(OLD, &words).unwrap();
    assert!(places.is_empty() && places.running());
}

proptest! {
    /// Whatever the memory contains, reading ends.
    #[test]
    fn anything(changes in prop::collection::vec((0..WORDS, prop_oneof![any::<u64>(), (0..WORDS).prop_map(at), 0_u64..9]), 1..12)) {
        for version in RELEASES {
            let mut words = program(version);
            for &(word, value) in &changes {
                words[word] = value;
            }
            if let Ok(places) = places(version, &words) {
                prop_assert!(places.len() <= 4);
                let _found = origins(version, &words, &words, Marks::default());
            }
        }
    }
}
