//! The committed layouts are well-formed, and a table equals its parts.

use super::schema::SCHEMA;
use super::*;
use crate::elf::dwarf::{Member, MemberKind, StructLayout, Structs};

fn committed() -> Vec<Variant> {
    text::parse(include_str!("layouts.txt")).unwrap()
}

/// The committed text equals the generator's output, and every wanted member exists in some release: a misspelt one
/// would be missing in all of them.
#[test]
fn committed_layouts_are_whole() {
    let variants = committed();
    assert_eq!(print(&variants), include_str!("layouts.txt"));
    for wanted in SCHEMA {
        let of_tag: Vec<&Struct> =
            variants.iter().map(|v| &v.layout).filter(|layout| layout.name == wanted.tag).collect();
        for path in wanted.members {
            let found = of_tag.iter().any(|layout| match path.split_once("[].") {
                Some((array, name)) => {
                    layout.array(array).is_some_and(|array| array.fields.iter().any(|f| f.name == name))
                }
                None => {
                    layout.field(path).is_some()
                        || layout.bit_field(path).is_some()
                        || layout.array(path).is_some()
                }
            });
            assert!(found, "{}.{path}", wanted.tag);
        }
    }
}

/// Ranges of one structure do not overlap, every entry names its source, and every member lies inside the structure.
#[test]
fn committed_layouts_are_consistent() {
    let variants = committed();
    for (index, one) in variants.iter().enumerate() {
        let Variant { from, to, source, layout } = one;
        let rest = variants[index + 1..].iter().filter(|two| two.layout.name == layout.name);
        for two in rest {
            assert!(two.from > *to || two.to < *from, "{} {from:?} {:?}", layout.name, two.from);
        }
        assert!(source.contains("build id "), "{} {from:?}: {source}", layout.name);
        let inside =
            |offset: u32, size: u32| assert!(offset + size <= layout.size, "{} {from:?}", layout.name);
        layout.fields.iter().for_each(|f| inside(f.offset, f.size.into()));
        layout.bits.iter().for_each(|b| inside(b.offset, b.size.into()));
        for array in &layout.arrays {
            inside(array.offset, array.stride * array.count);
            assert!(array.fields.iter().all(|f| f.offset + u32::from(f.size) <= array.stride));
        }
    }
}

/// Lines that are truncated, have an extra word, or belong to nothing are refused with their number.
#[test]
fn broken_text_is_refused() {
    assert!(text::parse("struct a 1.2.3 1.2.4 8\nfield x 0 8\n").is_ok());
    for broken in [
        "field x 0 8",
        "struct a 1.2.3 1.3.4 8",
        "struct a 1.2 1.2.4 8",
        "struct a 1.2.3 1.2.4 8 9",
        "struct a 1.2.3 1.2.4 8\nfield x 0",
        "struct a 1.2.3 1.2.4 8\nfield x 0 8 8",
        "struct a 1.2.3 1.2.4 8\nelement x 0 8",
        "struct a 1.2.3 1.2.4 8\nfield x 0 256",
        "struct a 1.2.3 1.2.4 8\nthing x 0 1",
    ] {
        let error = text::parse(broken).unwrap_err();
        assert!(error.starts_with("line "), "{error}");
    }
}

/// The objspace's range is split where another structure changes, and a structure that is known for only part of it is
/// missing in the rest.
#[test]
fn tables_are_cut_where_a_structure_changes() {
    let text = "struct rb_objspace 3.1.0 3.1.7 32\nsource s\nbits flags.mode 16 4 0 2\n\
                struct rb_vm_struct 3.1.0 3.1.4 16\nfield objspace 0 8\n\
                struct rb_vm_struct 3.1.5 3.1.6 24\nfield objspace 8 8\n";
    let tables = compose(&text::parse(text).unwrap());
    let ranges: Vec<_> = tables.iter().map(|table| (table.from.2, table.to.2)).collect();
    assert_eq!(ranges, [(0, 4), (5, 6), (7, 7)]);
    let objspace = |table: &Table| Some(table.structure("rb_vm_struct")?.field("objspace")?.offset);
    assert_eq!(tables.iter().map(objspace).collect::<Vec<_>>(), [Some(0), Some(8), None]);
    assert!(tables.iter().all(|table| (table.flags, table.mode_bits) == (16, (0, 2))));
}

/// Facts about the objspace that were measured on real builds by other means (gdb, and the machine code of exported
/// accessors).
#[test]
fn known_facts() {
    let table = |major, minor, teeny| Table::of(RubyVersion::new(major, minor, teeny)).unwrap();
    let objspace = |table: &Table, name: &str| table.structure("rb_vm_struct")?.field(name).map(|f| f.offset);
    assert_eq!(objspace(table(3, 1, 7), "objspace"), Some(0x458));
    assert_eq!(objspace(table(3, 2, 11), "objspace"), Some(0x478));
    assert_eq!(objspace(table(3, 3, 11), "objspace"), Some(0x518));
    assert_eq!(objspace(table(3, 4, 9), "gc.objspace"), Some(0x510));
    assert_eq!(objspace(table(4, 0, 5), "gc.objspace"), Some(0x4e0));
    assert_eq!((table(4, 0, 5).flags, table(4, 0, 5).offset("profile.count")), (0x1c, Some(0x418)));
    let frame = |table: &Table| table.structure("rb_control_frame_struct").map(|s| s.size);
    assert_eq!(frame(table(2, 7, 8)), Some(0x38));
    assert_eq!(frame(table(3, 2, 11)), Some(0x40));
    assert_eq!(frame(table(3, 4, 9)), Some(0x38));
    let gc_stressful = table(3, 0, 7).bit_field("flags.gc_stressful").unwrap();
    assert_eq!(gc_stressful.offset * 8 + u32::from(gc_stressful.first), 135);
    let pools = table(3, 3, 11).pools.as_ref().unwrap();
    assert_eq!((pools.name, pools.offset, pools.stride, pools.count), ("size_pools", 32, 224, 5));
}

fn member(path: &str, offset: u64, size: u64, kind: MemberKind) -> Member {
    Member { path: path.to_owned(), offset, size, kind }
}

fn described(members: Vec<Member>) -> Structs {
    let mut structs = Structs::default();
    structs.by_tag.insert("rb_objspace".to_owned(), StructLayout { size: 64, members });
    structs
}

/// A table from debug information has the existing members, relative to their array inside it; impossible places are
/// refused with an error that names them.
#[test]
fn tables_from_dwarf() {
    let mode = member("flags.mode", 16, 4, MemberKind::Bits { first: 0, bits: 2 });
    let heaps = member("heaps", 24, 32, MemberKind::Array { stride: 16, count: 2 });
    let slot_size = member("heaps[].slot_size", 32, 2, MemberKind::Scalar);
    let version = RubyVersion::new(9, 8, 7);
    let of = |members| Table::from_dwarf(version, "here".to_owned(), &described(members));
    let table = of(vec![mode.clone(), heaps.clone(), slot_size.clone()]).unwrap();
    assert_eq!((table.from, table.to, table.size, table.flags), ((9, 8, 7), (9, 8, 7), 64, 16));
    let pools = table.pools.unwrap();
    assert_eq!((pools.offset, pools.stride, pools.count), (24, 16, 2));
    assert_eq!(pools.fields, [Field { name: "slot_size", offset: 8, size: 2 }]);

    let lacks_mode = of(vec![heaps.clone()]).unwrap_err();
    assert_eq!(lacks_mode, FromDwarfError::MissingMember("flags.mode"));
    let empty = Table::from_dwarf(version, String::new(), &Structs::default()).unwrap_err();
    assert_eq!(empty, FromDwarfError::MissingStruct("rb_objspace"));
    let impossible = [
        member("profile.count", 60, 8, MemberKind::Scalar),
        member("profile.count", u64::MAX, 8, MemberKind::Scalar),
        member("flags.dont_gc", 16, 4, MemberKind::Bits { first: 31, bits: 2 }),
        member("heaps[].total_slots", 39, 2, MemberKind::Scalar),
        member("heaps[].total_slots", 8, 2, MemberKind::Scalar),
        // Outside the 32-bit word that is read.
        member("flags.dont_gc", 16, 8, MemberKind::Bits { first: 32, bits: 1 }),
    ];
    for wrong in impossible {
        let error = of(vec![mode.clone(), heaps.clone(), wrong]).unwrap_err();
        assert!(matches!(error, FromDwarfError::Impossible { .. }), "{error}");
    }
    // More elements than fit.
    for (stride, count) in [(16, 3), (12, 0xffff_ffff)] {
        let error = of(vec![mode.clone(), member("heaps", 24, 32, MemberKind::Array { stride, count })]);
        assert!(matches!(error, Err(FromDwarfError::Impossible { .. })), "{error:?}");
    }
}

/// Differences name the member and both of its places.
#[test]
fn differences_are_named() {
    let one = Table::of(RubyVersion::new(3, 4, 9)).unwrap();
    assert_eq!(one.differences(one), Vec::<String>::new());
    let mut two = one.clone();
    two.fields.iter_mut().find(|f| f.name == "profile.count").unwrap().offset += 8;
    two.bits.retain(|b| b.name != "flags.dont_gc");
    let found = one.differences(&two);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[0], "rb_objspace.profile.count: 8 bytes at 1008 or 8 bytes at 1016");
    assert!(found[1].starts_with("rb_objspace.flags.dont_gc: 1 bits"), "{found:?}");
    assert!(found[1].ends_with("or absent"), "{found:?}");
}
