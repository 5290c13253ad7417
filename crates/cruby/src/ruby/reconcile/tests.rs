//! Compares table and code, on Debian's library.

use gctrace_common::event::{SLOT_BYTES, SLOTS};

use super::*;
use crate::damaged::Damaged;
use crate::debian::{libruby_analysis, libruby_bytes, libruby_image, libruby_offset};
use crate::elf::ElfImage;
use crate::ruby::plan::{AttachPlan, plan};
use crate::ruby::stat::Term;
use crate::ruby::tables::Array;
use crate::ruby::tests::{analysed, table_of_libruby};
use crate::ruby::{PauseKind, analyse};

/// A release of the series that never existed, so that no table has it.
const UNKNOWN: RubyVersion = RubyVersion::new(3, 1, 9);

/// Debian's library with another version number in it.
fn renumbered(to: RubyVersion) -> AttachPlan {
    let (image, from) = (libruby_image(), libruby_analysis().version.to_string());
    let texts = ["ruby_version", "ruby_description"].map(|name| image.symbol(name).unwrap().address);
    let patches = texts.into_iter().flat_map(|address| {
        let at = libruby_offset(address);
        let at = at + image.c_string(address).unwrap().find(&from).unwrap();
        let text = to.to_string().into_bytes();
        assert_eq!(text.len(), from.len(), "the text cannot change its length");
        text.into_iter().enumerate().map(move |(index, byte)| (at + index, byte))
    });
    let patches = patches.collect();
    let image = ElfImage::read(&Damaged { bytes: libruby_bytes(), patches }).unwrap();
    let analysis = analyse(&image).unwrap();
    assert_eq!(analysis.version, to);
    assert_eq!(analysis.description, libruby_analysis().description.replace(&from, &to.to_string()));
    plan(image.segments(), analysis, false).unwrap()
}

fn evidence(derived: &Derivation) -> Evidence<'_> {
    Evidence {
        machine: libruby_analysis().machine,
        version: UNKNOWN,
        vm: &libruby_analysis().vm,
        derived,
        per_thread: false,
    }
}

fn table() -> &'static Table {
    table_of_libruby()
}

/// The newest release to which the table of the library applies.
fn known_version() -> RubyVersion {
    let (major, minor, teeny) = table().to;
    RubyVersion::new(major, minor, teeny)
}

/// Every key and every field of the table agrees with the code.
#[test]
fn known_release() {
    let plan = renumbered(known_version());
    let known = plan.knowledge.to_string();
    assert!(
        known.starts_with("table 3.1.") && known.ends_with(", 29 of 29 keys confirmed by the code"),
        "{known}"
    );
    let confirmed = plan.knowledge.fields.iter().filter(|(_, source)| *source == Source::Confirmed);
    let fields: Vec<&str> = confirmed.map(|(name, _)| *name).collect();
    let [in_objspace @ .., vm, thread_ptr, cfp, errinfo, own] = &fields[..] else { panic!("{fields:?}") };
    assert_eq!(in_objspace, ["profile.count", "flags", "flags.mode", "profile.latest_gc_info"]);
    assert_eq!((*vm, *thread_ptr, *cfp), ("vm.objspace", "ec.thread_ptr", "ec.cfp"));
    assert_eq!((*errinfo, *own), ("ec.errinfo", "thread.self"));
    // The sites do not depend on any of this.
    assert!(plan.analysis.sites.iter().any(|site| site.pause == Some(PauseKind::Start)));
}

/// A release without a table is read at the same places, by its code alone.
#[test]
fn unknown_release() {
    let (known, unknown) = (renumbered(known_version()), renumbered(UNKNOWN));
    assert_eq!(unknown.knowledge.table, None);
    assert_eq!(unknown.knowledge.keys_by(Source::Code), 29);
    assert_eq!(unknown.knowledge.absent, []);
    assert_eq!(unknown.knowledge.to_string(), "no table for this release, 29 keys derived from the code");
    assert_eq!(unknown.layout.spans, known.layout.spans);
    assert_eq!(unknown.layout.mode_mask(), known.layout.mode_mask());
    // Every byte of a snapshot differs from its neighbours.
    let data: Vec<u8> = (0..SLOTS * SLOT_BYTES).map(|at| (at * 37 + at / 256) as u8).collect();
    let values = |plan: &AttachPlan| -> Vec<(&str, Option<u64>)> {
        plan.layout.keys.iter().map(|key| (key.name, key.value(&data))).collect()
    };
    assert_eq!(values(&unknown), values(&known));
    let fields = |layout: &ObjspaceLayout| {
        [layout.count, layout.minor_gc_count, layout.major_gc_count, layout.latest_gc_info, layout.flags]
    };
    assert_eq!(fields(&unknown.layout), fields(&known.layout));
}

/// Keys that the code does not prove are absent, listed by name and with the reason.
#[test]
fn unproven_keys_are_absent() {
    let mut derived = libruby_analysis().derived.clone();
    let stat = derived.stat.as_mut().unwrap();
    let lost = || NotDerived::Lost("rb_gc_stat".into());
    let find = |name: &str| stat.keys.iter().position(|key| key.name == name).unwrap();
    let (old, marked, books) = (find("old_objects"), find("heap_marked_slots"), find("total_freed_pages"));
    stat.keys[old].formula = Err(lost());
    stat.keys[marked].formula.as_mut().unwrap().outside = 1;
    stat.keys[books].name = "total_freed_books".to_owned();
    let unknown = Table::of(UNKNOWN).unwrap_err();
    let (wanted, knowledge) = evidence(&derived).derive(Some(table()), &unknown).unwrap();
    assert_eq!(wanted.keys.len(), 26);
    let absent: Vec<&str> = knowledge.absent.iter().map(|absent| absent.name.as_str()).collect();
    assert_eq!(absent, ["heap_marked_slots", "total_freed_books", "old_objects", "total_freed_pages"]);
    assert!(knowledge.absent.iter().all(|absent| !absent.reason.is_empty()));
    assert!(knowledge.to_string().ends_with("26 keys derived from the code, 4 keys absent"), "{knowledge}");
    // With a table the same gaps are filled from it: two keys not derived, one derived in part, one under another name.
    let (wanted, knowledge) = evidence(&derived).confirm(table()).unwrap();
    assert_eq!((wanted.keys.len(), knowledge.keys_by(Source::Table)), (29, 3));
    assert_eq!(knowledge.keys_by(Source::Confirmed), 26);
    // As long as the parts that were understood agree.
    let keys = &mut derived.stat.as_mut().unwrap().keys;
    keys[marked].formula.as_mut().unwrap().terms.pop();
    assert!(evidence(&derived).confirm(table()).is_err());
}

/// Without the counters that every cycle needs, an unknown release is refused, and the message says which counter is
/// missing and why.
#[test]
fn too_little_is_refused() {
    let refused = |spoil: &dyn Fn(&mut Derivation), field: &str| {
        let mut derived = libruby_analysis().derived.clone();
        spoil(&mut derived);
        let unknown = Table::of(UNKNOWN).unwrap_err();
        let error = evidence(&derived).derive(Some(table()), &unknown).unwrap_err().to_string();
        assert!(
            error.contains(&UNKNOWN.to_string()) && error.contains(field) && error.contains("could not be"),
            "{error}"
        );
    };
    let lost = || NotDerived::Lost("this".into());
    refused(&|derived| derived.stat = Err(lost()), "GC.stat");
    refused(&|derived| derived.info.latest_gc_info = Err(lost()), "latest_gc_info");
    refused(&|derived| derived.info.mode_bit = Err(lost()), "flags.mode");
    let counters = ["count", "minor_gc_count", "major_gc_count"];
    for name in counters.into_iter().chain(PROVING) {
        let spoil = |derived: &mut Derivation| {
            let keys = &mut derived.stat.as_mut().unwrap().keys;
            keys.iter_mut().find(|key| key.name == name).unwrap().formula = Err(lost());
        };
        refused(&spoil, name);
    }
}

/// A table with any one offset wrong is refused, and the error gives both values.
#[test]
fn wrong_tables_are_refused() {
    let evidence = evidence(&libruby_analysis().derived);
    let refused = |table: &Table, what: &str| match evidence.confirm(table) {
        Err(Unproven::Disagrees { field, derived, table, .. }) => {
            assert_ne!(derived, table, "{what}: {field}");
            true
        }
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => false,
    };
    // The members in a snapshot of 3.1. All of them are covered; members that are not read do not matter.
    let fixed = ["profile.count", "profile.latest_gc_info"];
    let keys = stat::keys(known_version());
    let used: Vec<&str> = keys.iter().flat_map(|key| key.terms).map(Term::name).chain(fixed).collect();
    for index in 0..table().fields.len() {
        let mut table = table().clone();
        table.fields[index].offset += 8;
        let name = table.fields[index].name;
        assert_eq!(refused(&table, name), used.contains(&name), "{name}");
    }
    let pools = table().pools.as_ref().unwrap();
    let with = |pools: Array| Table { pools: Some(pools), ..table().clone() };
    for index in 0..pools.fields.len() {
        let mut pools = pools.clone();
        pools.fields[index].offset += 8;
        let name = pools.fields[index].name;
        assert_eq!(refused(&with(pools), name), used.contains(&name), "{name}");
    }
    assert!(refused(&with(Array { offset: pools.offset + 8, ..pools.clone() }), "pools"));
    assert!(refused(&with(Array { count: 2, ..pools.clone() }), "number of pools"));
    assert!(refused(&Table { flags: 20, ..table().clone() }, "flags"));
    assert!(refused(&Table { mode_bits: (1, 2), ..table().clone() }, "mode"));
    assert!(refused(&Table { mode_bits: (0, 3), ..table().clone() }, "width of mode"));
}

/// Code that contradicts itself refuses the image, with a table and without.
#[test]
fn contradictions_are_refused() {
    let mut derived = libruby_analysis().derived.clone();
    derived.stat = Err(NotDerived::Contradiction("its first key is [0x8]:8".to_owned()));
    let error = evidence(&derived).confirm(table()).unwrap_err().to_string();
    assert!(error.contains("its first key is [0x8]:8"), "{error}");
}

/// For every image that the environment names (`GCTRACE_RUBY_IMAGES`, separated by colons): if there is a table, the
/// code confirms all of it, and the code alone gives the same result.
#[test]
#[ignore = "needs GCTRACE_RUBY_IMAGES"]
fn images_of_the_environment() {
    let paths = std::env::var("GCTRACE_RUBY_IMAGES").expect("GCTRACE_RUBY_IMAGES names images");
    for path in paths.split(':').filter(|path| !path.is_empty()) {
        let (_, analysis) = analysed(path, |_| {});
        let RubyAnalysis { machine, version, vm, derived, .. } =
            analysis.unwrap_or_else(|why| panic!("{path}: {why}"));
        let per_thread = derived.thread.is_ok();
        let evidence = Evidence { machine, version, vm: &vm, derived: &derived, per_thread };
        let unknown = LayoutError::UnknownVersion(version, String::new());
        let alone = evidence.derive(Table::newest_of_series(version), &unknown);
        let (alone, knowledge) = alone.unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(knowledge.absent, [], "{path}");
        let Ok(table) = Table::of(version) else {
            println!("{path}: CRuby {version}: {knowledge}");
            ObjspaceLayout::bind(version, alone).unwrap();
            continue;
        };
        let (wanted, knowledge) = evidence.confirm(table).unwrap_or_else(|error| panic!("{path}: {error}"));
        println!("{path}: CRuby {version}: {knowledge}");
        // Libraries of gc.c alone have no functions that use threads; the last three were added in 4.0.
        let of_threads = |name: &str| ["ec.", "thread.", "ractor."].iter().any(|of| name.starts_with(of));
        let sources = knowledge.fields.iter().filter(|(name, _)| !of_threads(name)).chain(&knowledge.keys);
        assert!(sources.into_iter().all(|(_, source)| *source == Source::Confirmed), "{path}: {knowledge:?}");
        assert_eq!(alone.keys, wanted.keys, "{path}");
        let fields = |wanted: &Wanted| {
            let pauses = [wanted.count, wanted.minor_gc_count, wanted.major_gc_count, wanted.latest_gc_info];
            (wanted.flags, wanted.mode_bits, pauses, wanted.need_major_gc, wanted.weak_references)
        };
        assert_eq!(fields(&alone), fields(&wanted), "{path}");
    }
}
