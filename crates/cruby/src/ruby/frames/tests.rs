//! Layouts of all releases, lines compared with a plain search, and memory without valid data.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use gctrace_common::stack::RubyFrame;
use proptest::prelude::*;

use super::{
    iseq::Body,
    layout::{ClassPath, FrameLayout},
    read::Reader,
    *,
};
use crate::{
    address::Svma,
    ruby::{RubyVersion, derive::SymbolTable, tables},
};

const VM_PTR: Svma = Svma(0x1000);
const SYMBOLS: SymbolTable = SymbolTable { address: Svma(0x2000), ids: 16 };

fn layout(major: u16, minor: u16, teeny: u16) -> Result<FrameLayout, String> {
    let release = (major, minor, teeny);
    let table = tables::tables().iter().find(|table| table.from <= release && release <= table.to).unwrap();
    FrameLayout::with(RubyVersion::new(major, minor, teeny), table, Ok(SYMBOLS), VM_PTR)
}

/// One release of each series.
fn all() -> Vec<FrameLayout> {
    let releases = [(2, 6, 0), (2, 7, 4), (3, 0, 7), (3, 1, 2), (3, 2, 0), (3, 3, 13), (3, 4, 11), (4, 0, 5)];
    releases.into_iter().map(|(major, minor, teeny)| layout(major, minor, teeny).unwrap()).collect()
}

/// Every release that a table covers has a layout, with a path to the names of classes.
#[test]
fn every_release_has_a_layout() {
    for table in tables::tables() {
        for (major, minor, teeny) in [table.from, table.to] {
            let layout = layout(major, minor, teeny).unwrap_or_else(|why| panic!("{:?}: {why}", table.from));
            assert!(!matches!(layout.class.path, ClassPath::Unknown), "{:?}", table.from);
        }
    }
}

/// A table that lacks a structure is refused, and the error names the structure.
#[test]
fn missing_structures_are_named() {
    for tag in ["rb_iseq_constant_body", "rb_method_definition_struct", "RString", "succ_dict_block"] {
        let mut table = tables::tables().last().unwrap().clone();
        table.extra.retain(|structure| structure.name != tag);
        let (major, minor, teeny) = table.to;
        let version = RubyVersion::new(major, minor, teeny);
        let why = FrameLayout::with(version, &table, Ok(SYMBOLS), VM_PTR).unwrap_err();
        assert!(why.contains(tag), "{why}");
    }
}

/// Bytes at addresses.
#[derive(Default)]
struct Image(RefCell<BTreeMap<u64, u8>>);

impl Image {
    fn put(&self, address: u64, bytes: &[u8]) {
        self.0.borrow_mut().extend((address..).zip(bytes.iter().copied()));
    }

    fn put_u64(&self, address: u64, value: u64) {
        self.put(address, &value.to_le_bytes());
    }

    fn put_u32(&self, address: u64, value: u32) {
        self.put(address, &value.to_le_bytes());
    }
}

impl Memory for &Image {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let bytes = self.0.borrow();
        let found = |(at, byte): (u64, &mut u8)| bytes.get(&at).map(|known| *byte = *known).is_some();
        (address..).zip(buffer).all(found)
    }
}

const ISEQ: u64 = 0x10_0000;
const BODY: u64 = 0x20_0000;
const CODE: u64 = 0x30_0000;
const INFOS: u64 = 0x40_0000;
const INDEX: u64 = 0x50_0000;

/// Writes code whose lines start at these positions (`succ_index_table_create`, iseq.c).
fn write_code(image: &Image, layout: &FrameLayout, size: u32, lines: &BTreeMap<u32, u32>) {
    let at = &layout.iseq;
    image.put(ISEQ, &[0; 40]);
    image.put_u64(ISEQ, 0x1a | 7 << 12);
    image.put_u64(ISEQ + u64::from(at.body), BODY);
    image.put(BODY, &vec![0; at.span]);
    let half = |offset: u32, value| image.put_u32(BODY + u64::from(offset), value);
    let word = |offset: u32, value| image.put_u64(BODY + u64::from(offset), value);
    half(at.size, size);
    half(at.infos_size, lines.len() as u32);
    word(at.encoded, CODE);
    word(at.infos, INFOS);
    word(at.index, INDEX);
    for object in [at.pathobj, at.base_label, at.label, at.local] {
        word(object, ISEQ);
    }
    for (entry, line) in (0..).zip(lines.values()) {
        image.put(INFOS + entry * u64::from(at.info_size), &vec![0; at.info_size as usize]);
        image.put_u32(INFOS + entry * u64::from(at.info_size) + u64::from(at.info_line), *line);
    }
    let rank = |position: u32| lines.range(..=position).count() as u64;
    for index in 0..6_u32 {
        let ranks = (0..9).map(|part| rank(index * 9 + part) << (part * 7));
        image.put_u64(INDEX + u64::from(index * 8), ranks.fold(0, |all, one| all | one));
    }
    for block in 0..=size.saturating_sub(54) / 512 {
        let first = 54 + block * 512;
        let start = INDEX + u64::from(at.blocks + block * at.block_size);
        image.put(start, &vec![0; at.block_size as usize]);
        let before = rank(first - 1);
        image.put_u32(start + u64::from(at.block_rank), before as u32);
        let small = (1..8).map(|part| (rank(first + part * 64 - 1) - before) << ((part - 1) * 9));
        image.put_u64(start + u64::from(at.block_small_ranks), small.fold(0, |all, one| all | one));
        for part in 0..8 {
            let bits = (0..64).filter(|bit| lines.contains_key(&(first + part * 64 + bit)));
            let bits = bits.fold(0_u64, |all, bit| all | 1 << bit);
            image.put_u64(start + u64::from(at.block_bits + part * 8), bits);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The succinct index gives the same line as a plain search through the positions, in all its blocks.
    #[test]
    fn lines(
        positions in prop::collection::btree_map(1_u32..1800, 1_u32..100_000, 0..120),
        release in 0_usize..8,
    ) {
        let layout = &all()[release];
        let mut lines = positions;
        lines.insert(0, 7);
        let size = 1900;
        let image = Image::default();
        write_code(&image, layout, size, &lines);
        let reader = Reader { memory: &image, alive: ISEQ };
        let body = Body::read(&reader, ISEQ, layout).unwrap();
        for pc in 0..=size {
            let position = body.position(CODE + u64::from(pc) * 8).unwrap();
            prop_assert_eq!(position, pc.saturating_sub(1));
            let expected = *lines.range(..=position).next_back().unwrap().1;
            prop_assert_eq!(body.line(&reader, position, layout).unwrap(), expected, "position {}", position);
        }
        for outside in [CODE - 8, CODE + 4, CODE + u64::from(size + 1) * 8, 0, u64::MAX] {
            prop_assert_eq!(body.position(outside), None);
        }
    }
}

/// If the next instruction is the one that ends all code, the running one is before it.
#[test]
fn leaves() {
    let layout = &all()[0];
    let image = Image::default();
    write_code(&image, layout, 9, &BTreeMap::from([(0, 7)]));
    for (position, word) in [(3, 55), (4, 90), (8, 55)] {
        image.put_u64(CODE + position * 8, word);
    }
    let reader = Reader { memory: &image, alive: ISEQ };
    let body = Body::read(&reader, ISEQ, layout).unwrap();
    let leaves = |position: u64| body.leaves_at(&reader, CODE + position * 8).unwrap();
    assert_eq!([3, 4, 8, 9].map(leaves), [true, false, true, false]);
}

/// Memory without valid data: every word is computed from its address, so that readers keep following it.
struct Noise {
    seed: u64,
    /// Number of reads out of 16 that fail.
    failing: u64,
    reads: Cell<u64>,
    bytes: Cell<u64>,
}

impl Noise {
    fn word(&self, address: u64) -> u64 {
        let mut hash = (address ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^= hash >> 29;
        hash = hash.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^= hash >> 32;
        let near = 0x10_0000 + (hash >> 8) % 0x400 * 8;
        match hash & 0xf {
            0..=5 => near,
            6 => 0x1a | 7 << 12,
            7 => 0x1a | 6 << 12,
            8 => 0x05 | (hash >> 9 & 1) << 13 | 3 << 14,
            9 => 0x07 | (hash >> 9 & 1) << 13 | 2 << 15,
            10 => 0x02 | (hash >> 9 & 3) << 12,
            11 => (hash >> 8) % 5,
            12 => 0,
            13 => hash,
            14 => (near >> 4) << 8 | 0xc,
            _ => hash >> 40,
        }
    }
}

impl Memory for &Noise {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + buffer.len() as u64);
        if self.word(!address) >> 8 & 0xf < self.failing {
            return false;
        }
        for (at, byte) in (address..).zip(buffer) {
            *byte = self.word(at & !7).to_le_bytes()[(at & 7) as usize];
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever the memory contains, naming ends after a bounded number of reads, and every frame is accounted for.
    #[test]
    fn noise(
        seed: u64,
        failing in 0_u64..4,
        release in 0_usize..8,
        raw in prop::collection::vec((0_u64..0x400, 0_u64..0x400, 0_u64..0x400, 0_u64..16), 1..20),
    ) {
        let memory = Noise { seed, failing, reads: Cell::new(0), bytes: Cell::new(0) };
        let address = |word: u64| 0x10_0000 + word * 8;
        let frames: Vec<RubyFrame> = raw
            .iter()
            .map(|&(iseq, pc, method, flags)| RubyFrame {
                iseq: address(iseq) | flags & 7,
                pc: address(pc),
                method: if flags & 8 == 0 { address(method) } else { 0 },
            })
            .collect();
        let layout = Arc::new(all().swap_remove(release));
        let mut namer = Namer::new(&memory, layout, seed);
        let mut out = Vec::new();
        for epoch in 0..3 {
            namer.name(&frames, epoch, Leaf::Allocates, &mut out);
        }
        let counts = namer.counts();
        prop_assert_eq!(counts.asked, out.len() as u64);
        prop_assert_eq!(counts.asked, counts.named + counts.stale + counts.unreadable + counts.no_symbols);
        let missing = out.iter().filter(|frame| frame.kind == FrameKind::Missing).count() as u64;
        prop_assert_eq!(counts.asked - counts.named, missing);
        let asked = 3 * frames.len() as u64;
        prop_assert!(memory.reads.get() < 60_000 * asked, "{} reads", memory.reads.get());
        prop_assert!(memory.bytes.get() < (4 << 20) * asked, "{} bytes", memory.bytes.get());
    }
}

/// A symbol is named by its id or, if it can be garbage collected, by its own string.
#[test]
fn symbols() {
    let layout = layout(3, 3, 8).unwrap();
    let (image, symbol, string) = (Image::default(), 0x9000, 0x9100);
    let string_layout = layout.string;
    for (at, flags) in [(symbol, 0x14), (string, 5)] {
        (0..5).for_each(|word| image.put_u64(at + word * 8, 0));
        image.put_u64(at, flags);
    }
    image.put_u64(symbol + 24, string);
    image.put_u64(string + u64::from(string_layout.embedded_length.unwrap()), 6);
    image.put(string + u64::from(string_layout.embedded), b"orders");
    image.put_u64(VM_PTR.0, 1);
    let reader = Reader { memory: &image, alive: VM_PTR.0 };
    let name = |value| {
        symbol::of_value(&reader, value, &layout, &mut |id| Ok(Some(format!("id {id}").into())))
            .map(|name| name.map(|name| name.to_string()))
    };
    assert_eq!(name(77 << 8 | 0xc), Ok(Some("id 77".to_owned())));
    assert_eq!(name(symbol), Ok(Some("orders".to_owned())));
    assert_eq!(name(string), Ok(None), "a string");
    assert_eq!(name(3), Ok(None), "a number");
}

/// Without the table of symbols, names of classes are unknown up to 3.2, where they are in a variable that is found by its name.
#[test]
fn class_names_need_symbols() {
    for (minor, teeny, named) in [(1, 2, false), (2, 0, false), (3, 13, true), (4, 11, true)] {
        let mut layout = layout(3, minor, teeny).unwrap();
        assert_eq!(layout.names_classes(), Ok(()), "3.{minor}");
        layout.symbols = Err("no table".to_owned());
        assert_eq!(layout.names_classes().is_ok(), named, "3.{minor}");
    }
}

/// Memory whose reads are counted.
struct Counted<'a>(&'a Image, Cell<u64>);

impl Memory for &Counted<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.1.set(self.1.get() + 1);
        self.0.read(address, buffer)
    }
}

/// Old code is not read again before a major GC, other code after each GC. Code that does not match what was seen at its address is read
/// again at once.
#[test]
fn old_code() {
    const STRING: u64 = 0x60_0000;
    const OTHER: u64 = 0x70_0000;
    let layout = Arc::new(layout(3, 3, 8).unwrap());
    let image = Image::default();
    let code = |promoted: u64, code: u64, name: &[u8]| {
        write_code(&image, &layout, 20, &BTreeMap::from([(0, 7)]));
        image.put_u64(ISEQ, 0x1a | 7 << 12 | promoted);
        let at = &layout.iseq;
        image.put_u64(BODY + u64::from(at.encoded), code);
        for object in [at.pathobj, at.base_label, at.label] {
            image.put_u64(BODY + u64::from(object), STRING);
        }
        image.put(STRING, &[0; 40]);
        image.put_u64(STRING, 5);
        image.put_u64(STRING + u64::from(layout.string.embedded_length.unwrap()), name.len() as u64);
        image.put(STRING + u64::from(layout.string.embedded), name);
    };
    for old in [true, false] {
        let promoted = if old { 1 << 5 } else { 0 };
        code(promoted, CODE, b"save");
        let memory = Counted(&image, Cell::new(0));
        let mut namer = Namer::new(&memory, Arc::clone(&layout), 0);
        let mut first_name = |epoch, code: u64| {
            let mut out = Vec::new();
            namer.name(
                &[RubyFrame { iseq: ISEQ, pc: code + 8, method: 0 }],
                epoch,
                Leaf::Allocates,
                &mut out,
            );
            (out[0].name.to_string(), memory.1.replace(0))
        };
        let (save, first) = first_name(0, CODE);
        assert!(save == "save" && first > 0, "{save}");
        assert_eq!(first_name(0, CODE).1, 0);
        assert_eq!(first_name(1, CODE).1 == 0, old);
        assert!(first_name(gctrace_common::stack::MAJOR_EPOCH + 2, CODE).1 > 0);
        // Another one replaced it without a GC that was seen.
        code(promoted, OTHER, b"load");
        assert_eq!(first_name(gctrace_common::stack::MAJOR_EPOCH + 3, OTHER).0, "load");
        assert_eq!(first_name(gctrace_common::stack::MAJOR_EPOCH + 3, CODE).0, "(unnamed)");
    }
}

/// The frame of compiled code that runs has no place of its own. It has its name, if its method proves it, and no line. Frames that call something
/// or allocate have stored their place: another one there means that the code was replaced.
#[test]
fn compiled_code() {
    const STRING: u64 = 0x60_0000;
    const ENTRY: u64 = 0x80_0000;
    const DEFINITION: u64 = 0x90_0000;
    let mut layout = layout(3, 3, 8).unwrap();
    layout.class.path = ClassPath::Unknown;
    let layout = Arc::new(layout);
    let image = Image::default();
    write_code(&image, &layout, 20, &BTreeMap::from([(0, 7)]));
    let at = &layout.iseq;
    for object in [at.pathobj, at.base_label, at.label] {
        image.put_u64(BODY + u64::from(object), STRING);
    }
    image.put(STRING, &[0; 40]);
    image.put_u64(STRING, 5);
    image.put_u64(STRING + u64::from(layout.string.embedded_length.unwrap()), 4);
    image.put(STRING + u64::from(layout.string.embedded), b"save");
    let at = &layout.method;
    image.put(ENTRY, &[0; 40]);
    image.put_u64(ENTRY, 0x1a | 6 << 12);
    image.put_u64(ENTRY + u64::from(at.definition), DEFINITION);
    image.put(DEFINITION, &vec![0; at.definition_span]);
    image.put_u64(DEFINITION + u64::from(at.iseq), ISEQ);
    let named = |pc, method, leaf| -> Vec<String> {
        let mut out = Vec::new();
        let mut namer = Namer::new(&image, Arc::clone(&layout), 0);
        namer.name(&[RubyFrame { iseq: ISEQ, pc, method }], 0, leaf, &mut out);
        out.iter().map(|frame| format!("{}:{}", frame.name, frame.line)).collect()
    };
    let method = ENTRY | RubyFrame::METHOD_RAW;
    for leaf in [Leaf::Runs, Leaf::Allocates, Leaf::Calls] {
        assert_eq!(named(CODE + 8, method, leaf), ["save:7"], "{leaf:?}");
    }
    for (pc, without) in [(0, vec![]), (0x99_9000, vec!["(unnamed):0"])] {
        assert_eq!(named(pc, method, Leaf::Runs), ["save:0"]);
        for (method, leaf) in [(0, Leaf::Runs), (method, Leaf::Allocates), (method, Leaf::Calls)] {
            assert_eq!(named(pc, method, leaf), without, "{pc:#x} {leaf:?}");
        }
    }
}
