//! Compares layouts of small C programs with the C compiler's own, in every form of debug information.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::damaged::Damaged;

const TYPES: &str = r"
#include <stddef.h>
typedef unsigned long VALUE;
enum mode { none, marking };
struct list { struct list *next, *prev; };
typedef struct heap { short slot_size; size_t total_slots; struct { size_t pages; } eden; } heap_t;
struct objspace {
    struct { size_t limit, increase; } params;
    struct {
        unsigned int mode : 2;
        unsigned int immediate : 1;
        unsigned int : 3;
        unsigned int wide : 20;
        unsigned int next_word : 9;
    } flags;
    enum mode mode;
    union { size_t count; void *pointer; };
    const volatile VALUE stress;
    heap_t heaps[5];
    int matrix[3][4];
    struct list node;
    unsigned char small : 3, top : 5;
    struct objspace *self;
    void (*callback)(void);
    int flexible[];
};
struct unused_elsewhere { char text[7]; };
";

/// Prints the compiler's layout of the structure; bit-fields by setting them and reading the bytes.
const WITNESS: &str = r#"
#include <stdio.h>
#include <string.h>
#include "types.h"
#define FIELD(path) printf(#path " %zu %zu\n", offsetof(struct objspace, path), sizeof(((struct objspace *)0)->path))
#define BITS(path) do { struct objspace o; unsigned char *b = (unsigned char *)&o; int first = -1, n = 0; \
    memset(&o, 0, sizeof o); o.path = -1; \
    for (size_t i = 0; i < sizeof o * 8; i++) if (b[i / 8] >> (i % 8) & 1) { if (first < 0) first = i; n++; } \
    printf(#path " bits %d %d\n", first, n); } while (0)
int main(void) {
    printf("sizeof %zu\n", sizeof(struct objspace));
    FIELD(params); FIELD(params.limit); FIELD(params.increase); FIELD(mode); FIELD(count); FIELD(pointer); FIELD(stress);
    FIELD(heaps); FIELD(matrix); FIELD(node); FIELD(node.prev); FIELD(self); FIELD(callback);
    FIELD(heaps[0].slot_size); FIELD(heaps[0].total_slots); FIELD(heaps[0].eden.pages);
    BITS(flags.mode); BITS(flags.immediate); BITS(flags.wide); BITS(flags.next_word); BITS(small); BITS(top);
    printf("stride %zu\n", sizeof(heap_t));
}
"#;

const UNIT: &str = r#"#include "types.h"
struct objspace *NAME(struct objspace *o) { o->params.limit++; return o; }
struct list *NAME2(struct list *l, heap_t *h) { h->total_slots++; return l->next; }
"#;

/// A folder with the sources of a library of two units, `gc.c` and `other.c`.
struct Fixture {
    dir: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("types.h", TYPES);
        write("witness.c", WITNESS);
        write("gc.c", &UNIT.replace("NAME2", "gc_list").replace("NAME", "gc_objspace"));
        write("other.c", &UNIT.replace("NAME2", "other_list").replace("NAME", "other_objspace"));
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, program: &str, args: &[&str]) -> String {
        let output = Command::new(program).args(args).current_dir(self.dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {args:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Builds the library with these compiler options.
    fn library(&self, name: &str, options: &[&str]) -> PathBuf {
        let mut args = vec!["-shared", "-fPIC", "-Wl,--build-id", "gc.c", "other.c", "-o", name];
        args.extend(options);
        self.run("gcc", &args);
        self.path(name)
    }

    /// The compiler's layout: path and place of each member.
    fn truth(&self) -> Vec<(String, Vec<String>)> {
        self.run("gcc", &["witness.c", "-o", "witness"]);
        let said = self.run("./witness", &[]);
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        said.lines().map(words).map(|mut words| (words.remove(0), words)).collect()
    }
}

fn read(path: &Path, alt: Option<&Path>) -> Result<Structs, DwarfError> {
    let file = File::open(path).unwrap();
    let alt = alt.map(|path| File::open(path).unwrap());
    read_structs(&file, alt.as_ref().map(|file| file as &dyn ReadAt), &["objspace", "list"], &["gc.c"])
}

/// Compares a layout with the compiler's, fact by fact.
fn check(found: &Structs, truth: &[(String, Vec<String>)], what: &str) {
    let objspace = &found.by_tag["objspace"];
    let number = |text: &String| text.parse::<u64>().unwrap();
    for (path, words) in truth {
        let path = path.replace("[0]", "[]");
        if path == "sizeof" {
            assert_eq!(objspace.size, number(&words[0]), "{what}");
            continue;
        }
        if path == "stride" {
            let kind = MemberKind::Array { stride: number(&words[0]), count: 5 };
            assert_eq!(objspace.member("heaps").unwrap().kind, kind, "{what}");
            continue;
        }
        let member = objspace.member(&path).unwrap_or_else(|| panic!("{what}: {path} in {objspace:?}"));
        if words[0] == "bits" {
            let MemberKind::Bits { first, bits } = member.kind else { panic!("{what}: {member:?}") };
            let place = (member.offset * 8 + u64::from(first), u64::from(bits));
            assert_eq!(place, (number(&words[1]), number(&words[2])), "{what}: {path}");
            assert!(first + bits <= member.size as u32 * 8, "{what}: {path}");
        } else {
            assert_eq!(
                (member.offset, member.size),
                (number(&words[0]), number(&words[1])),
                "{what}: {path}"
            );
        }
    }
    let kind = |path: &str| objspace.member(path).unwrap().kind;
    assert_eq!(kind("matrix"), MemberKind::Array { stride: 4, count: 12 }, "{what}");
    assert_eq!(kind("flexible"), MemberKind::Array { stride: 4, count: 0 }, "{what}");
    assert_eq!((kind("self"), kind("mode")), (MemberKind::Scalar, MemberKind::Scalar), "{what}");
    assert_eq!(found.by_tag["list"].size, 16, "{what}");
    assert!(found.producer.as_deref().is_some_and(|producer| producer.starts_with("GNU C")), "{what}");
}

/// Every version of DWARF, optimised or not, 64-bit DWARF, and sections compressed in both ways give the compiler's
/// layout.
#[test]
fn every_form_agrees_with_the_compiler() {
    let fixture = Fixture::new();
    let truth = fixture.truth();
    for options in [
        &["-g"][..],
        &["-gdwarf-2", "-gstrict-dwarf"],
        &["-gdwarf-3", "-gstrict-dwarf"],
        &["-gdwarf-4"],
        &["-gdwarf-5", "-O2"],
        &["-g", "-gdwarf64"],
        &["-g3", "-O2", "-flto", "-ffat-lto-objects"],
        &["-g", "-gz=zlib"],
    ] {
        let library = fixture.library("lib.so", options);
        check(&read(&library, None).unwrap(), &truth, &format!("{options:?}"));
    }
    fixture.library("lib.so", &["-g"]);
    fixture.run("objcopy", &["--compress-debug-sections=zstd", "lib.so", "zstd.so"]);
    check(&read(&fixture.path("zstd.so"), None).unwrap(), &truth, "zstd");
    fixture.run("objcopy", &["--only-keep-debug", "lib.so", "lib.debug"]);
    check(&read(&fixture.path("lib.debug"), None).unwrap(), &truth, "a separate debug file");
}

/// dwz moves types to partial units, or to a file that several libraries share: both are followed; the error for a
/// missing supplementary file names it.
#[test]
fn dwz_is_followed() {
    let fixture = Fixture::new();
    let truth = fixture.truth();
    fixture.library("one.so", &["-g"]);
    fixture.run("dwz", &["one.so", "-o", "single.so"]);
    let units = fixture.run("readelf", &["--debug-dump=info", "single.so"]);
    assert!(units.contains("DW_TAG_partial_unit"), "dwz made no partial unit");
    check(&read(&fixture.path("single.so"), None).unwrap(), &truth, "dwz");

    fixture.library("two.so", &["-g", "-O1"]);
    fixture.run("dwz", &["-m", "common.debug", "one.so", "two.so"]);
    let link = alt_link(&File::open(fixture.path("two.so")).unwrap()).unwrap().unwrap();
    assert_eq!(link.path, "common.debug");
    let with = read(&fixture.path("two.so"), Some(&fixture.path("common.debug"))).unwrap();
    check(&with, &truth, "dwz with a common file");
    let without = read(&fixture.path("two.so"), None).unwrap_err().to_string();
    assert!(without.contains("common.debug") && without.contains(&link.build_id.to_string()), "{without}");
}

/// Unsupported forms are refused with an error that names them.
#[test]
fn unsupported_forms_are_refused() {
    let fixture = Fixture::new();
    let refusal = |options: &[&str]| read(&fixture.library("lib.so", options), None).unwrap_err().to_string();
    assert_eq!(refusal(&[]), "the file has no DWARF (.debug_info)");
    assert!(refusal(&["-g", "-gdwarf-5", "-fdebug-types-section"]).contains("type units"));
    assert!(refusal(&["-g", "-gdwarf-5", "-gsplit-dwarf"]).contains("split DWARF"));
    fixture.run("gcc", &["-g", "-c", "gc.c", "-o", "gc.o"]);
    let object = read(&fixture.path("gc.o"), None).unwrap_err().to_string();
    assert!(object.contains("relocatable object"), "{object}");
}

/// Two different definitions of one structure in the same library are an error.
#[test]
fn ambiguity_is_refused() {
    let fixture = Fixture::new();
    let other = "struct objspace { int other; };\nint third(struct objspace *o) { return o->other; }\n";
    fs::write(fixture.path("other.c"), other).unwrap();
    let library = fixture.library("lib.so", &["-g"]);
    assert!(read(&library, None).is_ok(), "only gc.c is asked");
    let file = File::open(&library).unwrap();
    let both = read_structs(&file, None, &["objspace"], &["gc.c", "other.c"]).unwrap_err();
    assert!(matches!(both, DwarfError::Ambiguous(tag) if tag == "objspace"));
}

/// A few libraries with debug sections, whose bytes are then damaged.
fn fuzz_inputs() -> Vec<Vec<u8>> {
    let fixture = Fixture::new();
    let mut inputs = Vec::new();
    for options in [&["-g"][..], &["-gdwarf-4"], &["-gdwarf-2"], &["-g", "-gz=zlib"]] {
        inputs.push(fs::read(fixture.library("lib.so", options)).unwrap());
    }
    fixture.library("one.so", &["-g"]);
    fixture.run("objcopy", &["--compress-debug-sections=zstd", "one.so", "zstd.so"]);
    fixture.run("dwz", &["one.so", "-o", "single.so"]);
    inputs.push(fs::read(fixture.path("zstd.so")).unwrap());
    inputs.push(fs::read(fixture.path("single.so")).unwrap());
    inputs
}

/// Damaged files give an error or layouts, quickly, without a panic and within the memory limits.
#[test]
fn damage_never_panics() {
    let inputs = fuzz_inputs();
    let sections: Vec<_> = inputs
        .iter()
        .map(|bytes| {
            let headers = crate::elf::headers::Headers::read(bytes.as_slice()).unwrap();
            let debug = headers.sections.iter().filter(|section| section.name.starts_with(".debug"));
            let mut ranges: Vec<_> = debug.map(|s| s.offset as usize..(s.offset + s.size) as usize).collect();
            // The section headers, which locate everything else.
            ranges.push(bytes.len().saturating_sub(64 * headers.sections.len())..bytes.len());
            ranges
        })
        .collect();
    let damage = (0..inputs.len()).prop_flat_map(move |index| {
        let byte = prop_oneof![Just(0_u8), Just(0xff), Just(0x7f), any::<u8>()];
        let place = prop::sample::select(sections[index].clone()).prop_flat_map(|range| range);
        (Just(index), prop::collection::vec((place, byte), 1..24))
    });
    proptest!(ProptestConfig::with_cases(1_500), |((index, patches) in damage)| {
        let begun = std::time::Instant::now();
        let damaged = Damaged { bytes: &inputs[index], patches };
        if let Ok(found) = read_structs(&damaged, None, &["objspace", "list"], &["gc.c"]) {
            prop_assert!(found.by_tag.values().all(|layout| layout.members.len() <= 100_000));
        }
        let _ = alt_link(&damaged);
        prop_assert!(begun.elapsed().as_secs() < 5);
    });
}
