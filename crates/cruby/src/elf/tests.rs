//! Tests on real ELF files, and on damaged copies of one.

use std::fs::File;

use super::{
    ElfError, ElfImage, Headers, Machine, ReadAt, RubyPresence, SymbolTable, probe_ruby, read_symbol_u64,
};
use crate::address::{FileOffset, Svma};
use crate::damaged::Damaged;
use crate::debian::{libruby, libruby_bytes, libruby_file, libruby_image, libruby_section};
use crate::ruby::RubyVersion;

/// Installed by the project's setup task.
const DEBIAN_RUBY: &str = "/usr/bin/ruby3.1";

/// A table of functions: name, address, size.
pub(crate) fn symbol_table(functions: &[(&str, u64, u64)]) -> SymbolTable {
    let mut strings = vec![0];
    let mut records = vec![0; 24];
    for (name, address, size) in functions {
        records.extend((strings.len() as u32).to_le_bytes());
        // STB_LOCAL, STT_FUNC; some section.
        records.extend([2, 0, 1, 0]);
        records.extend(address.to_le_bytes());
        records.extend(size.to_le_bytes());
        strings.extend(name.bytes().chain([0]));
    }
    SymbolTable::parse(&records, strings)
}

/// Deterministic noise.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A few byte changes inside the range, biased towards values that break length fields.
    pub(crate) fn patches(&mut self, range: std::ops::Range<usize>) -> Vec<(usize, u8)> {
        let count = 1 + self.next() % 6;
        let mut patch = || {
            let at = range.start + self.next() as usize % range.len();
            let value = match self.next() % 4 {
                0 => 0,
                1 => 0xff,
                2 => 0x7f,
                _ => self.next() as u8,
            };
            (at, value)
        };
        (0..count).map(|_| patch()).collect()
    }
}

/// The library is recognised as an interpreter, the program as a user of one, and other programs as neither.
#[test]
fn probing_for_ruby() {
    let probe = |path: &str| probe_ruby(&File::open(path).unwrap()).unwrap();
    assert_eq!(probe(libruby().to_str().unwrap()), Some(RubyPresence::Defines));
    let Some(RubyPresence::Needs { sonames, run_path }) = probe(DEBIAN_RUBY) else {
        panic!("{DEBIAN_RUBY} does not need libruby")
    };
    assert_eq!(sonames, ["libruby-3.1.so.3.1"]);
    assert_eq!(run_path, None);
    assert_eq!(probe("/bin/ls"), None);
    assert_eq!(probe("/proc/self/exe"), None);
    assert_eq!(probe("/etc/passwd"), None);
}

/// The parts of an image agree with each other and with readelf's output for this file.
#[test]
fn image_of_libruby() {
    let image = libruby_image();
    assert_eq!(image.machine(), Machine::X86_64);
    assert!(!image.has_interpreter() && !image.is_fixed_position());
    assert!(image.symbols().is_empty());
    assert!(image.needed().iter().any(|soname| soname == "libc.so.6"));
    assert_eq!(image.build_id().unwrap().to_string().len(), 40);
    assert!(image.functions().len() > 5_000);
    assert!(image.functions().windows(2).all(|pair| pair[0].end <= pair[1].start));

    let count = image.symbol("rb_gc_count").unwrap();
    let index = image.function_index(count.address).unwrap();
    assert_eq!(image.functions()[index].start, count.address);
    assert_eq!(image.functions()[index].size(), count.size);
    assert!(image.functions()[index].entry);
    let stub = image.stubs_to(count.address).next().unwrap();
    assert_eq!(image.slot_symbol(image.stub_slot(stub).unwrap()), Some("rb_gc_count"));
    let version = image.c_string(image.symbol("ruby_version").unwrap().address).unwrap();
    assert_eq!(RubyVersion::of_image(&image), Some(version.parse().unwrap()));
    assert!(version.starts_with("3.1."), "{version}");
    // The description contains the version, too.
    let description = image.c_string(image.symbol("ruby_description").unwrap().address).unwrap();
    assert!(description.starts_with(&format!("ruby {version}p")), "{description}");
}

/// File offsets exist for executable addresses only, and lead to the same bytes.
#[test]
fn file_offsets() {
    let image = libruby_image();
    let file = libruby_file();
    let address = image.symbol("rb_gc_count").unwrap().address;
    let FileOffset(offset) = image.svma_to_file_offset(address).unwrap();
    let mut bytes = [0; 16];
    ReadAt::read_exact_at(&file, &mut bytes, offset).unwrap();
    assert_eq!(image.read_bytes(address, 16).unwrap(), bytes);

    let constant = image.symbol("ruby_version").unwrap().address;
    assert_eq!(image.svma_to_file_offset(constant), None);
    assert_eq!(image.svma_to_file_offset(image.bss().start), None);
    assert_eq!(image.svma_to_file_offset(Svma(u64::MAX)), None);
    assert_eq!(image.read_bytes(Svma(u64::MAX - 3), 8), None);
}

/// Truncated files are errors, never panics, and never an image with only some of its functions.
#[test]
fn truncation() {
    let bytes = libruby_bytes();
    for step in 0..64 {
        let end = bytes.len() / 64 * step;
        let short = Damaged { bytes: &bytes[..end], patches: Vec::new() };
        assert!(ElfImage::read(&short).is_err());
        let _ = probe_ruby(&short);
        let _ = read_symbol_u64(&bytes[..end], "ruby_version");
    }
    assert!(matches!(ElfImage::read(&bytes[..10]), Err(ElfError::NotElf)));
}

/// Damage to the headers and tables is an error or an odd image, never a panic or a huge allocation.
#[test]
fn damaged_tables() {
    let bytes = libruby_bytes();
    // The section headers are at the end of the file, 64 bytes each.
    let count = Headers::read(bytes).unwrap().sections.len();
    let sections = bytes.len() - count * 64..bytes.len();
    let names = [".gnu.hash", ".dynsym", ".dynstr", ".rela.dyn", ".rela.plt", ".eh_frame", ".dynamic"];
    let headers = [0..64, 64..libruby_section(".note.gnu.build-id").start];
    let inside = Svma(libruby_image().symbol("rb_gc_count").unwrap().address.0 + 1);
    let mut noise = Noise(0x9e37_79b9);
    let regions = headers.into_iter().chain(names.map(libruby_section));
    for region in regions.chain([sections.clone(), sections.clone(), sections]) {
        for _ in 0..24 {
            let damaged = Damaged { bytes, patches: noise.patches(region.clone()) };
            let _ = probe_ruby(&damaged);
            if let Ok(image) = ElfImage::read(&damaged) {
                let _ = image.svma_to_file_offset(Svma(noise.next()));
                let _ = image.function_name(inside);
            }
        }
    }
}

/// A data symbol of a relocatable object is found relative to its section; absent or undefined symbols are not found.
#[test]
fn symbol_of_a_relocatable_object() {
    let object = relocatable_object(0x1122_3344_5566_7788);
    assert_eq!(read_symbol_u64(&object, "ABI"), Some(0x1122_3344_5566_7788));
    assert_eq!(read_symbol_u64(&object, "OUT"), None);
    assert_eq!(read_symbol_u64(&object, "nothing"), None);
    for end in 0..object.len() {
        assert_eq!(read_symbol_u64(&object[..end], "ABI"), None);
    }
}

/// A BPF object with `ABI` at offset 8 of its data section and `OUT` past its end.
fn relocatable_object(value: u64) -> Vec<u8> {
    const EM_BPF: u16 = 247;
    let data = [0_u64.to_le_bytes(), value.to_le_bytes()].concat();
    let strings = b"\0ABI\0OUT\0".to_vec();
    let symbol = |name: u32, value: u64| {
        let mut bytes = name.to_le_bytes().to_vec();
        bytes.extend([0x11, 0, 1, 0]);
        bytes.extend(value.to_le_bytes());
        bytes.extend(8_u64.to_le_bytes());
        bytes
    };
    let symbols = [symbol(1, 8), symbol(5, 16)].concat();
    let section = |kind: u32, offset: usize, size: usize, link: u32| {
        let mut bytes = 0_u32.to_le_bytes().to_vec();
        bytes.extend(kind.to_le_bytes());
        bytes.extend([0; 16]);
        bytes.extend((offset as u64).to_le_bytes());
        bytes.extend((size as u64).to_le_bytes());
        bytes.extend(link.to_le_bytes());
        bytes.resize(64, 0);
        bytes
    };
    let at = 64;
    let sections = [
        section(0, 0, 0, 0),
        section(1, at, data.len(), 0),
        section(2, at + data.len(), symbols.len(), 3),
        section(3, at + data.len() + symbols.len(), strings.len(), 0),
    ];
    let body = [data, symbols, strings].concat();

    let mut object = b"\x7fELF\x02\x01\x01".to_vec();
    object.resize(16, 0);
    object.extend(1_u16.to_le_bytes());
    object.extend(EM_BPF.to_le_bytes());
    object.extend(1_u32.to_le_bytes());
    object.extend([0; 16]);
    object.extend((at as u64 + body.len() as u64).to_le_bytes());
    object.extend([0; 4]);
    for half in [64_u16, 0, 0, 64, sections.len() as u16, 0] {
        object.extend(half.to_le_bytes());
    }
    object.extend(body);
    object.extend(sections.concat());
    object
}
