//! Tests of the code shapes of the GVL and of page refill on real images.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use iced_x86::{Decoder, DecoderOptions, FlowControl};

use super::dwarf_oracle::{Instance, Truth};
use super::tests::table_of_libruby;
use super::{GvlEvent, GvlFields, GvlSite, Outcome, PageFields, RubyAnalysis, analyse};
use crate::address::Svma;
use crate::debian::{known_libruby, libruby_analysis, libruby_image};
use crate::elf::{ElfImage, Machine};

/// Functions that take a page, each an inner part of those after it; the first one that a version has counts.
const REFILL: [&str; 4] = [
    "ractor_cache_set_page",
    "ractor_set_cache",
    "ractor_cache_slots",
    "heap_get_freeobj_from_next_freepage",
];

/// Functions that acquire and release the GVL.
const ACQUIRE: &str = "gvl_acquire_common";
const RELEASE: &str = "gvl_release_common";

fn image(path: impl AsRef<Path>) -> ElfImage {
    ElfImage::read(&File::open(path).unwrap()).unwrap()
}

/// Debian's stripped library has one function that waits for the GVL, and the finder has all of its ends; it has releases,
/// and two places that take a page.
#[test]
fn debian_libruby() {
    let (image, analysis) = (libruby_image(), libruby_analysis());
    assert_eq!(analysis.gvl.outcome, Outcome::Passed);
    assert_eq!(analysis.gvl.fields, Some(GvlFields { owner: 0, lock: 8 }));
    let [waits, acquisitions, releases] = GvlEvent::ALL.map(|event| gvl_sites(analysis, event));
    let [wait] = waits[..] else { panic!("{waits:?}") };
    let function = &image.functions()[image.function_index(wait.address).unwrap()];
    assert_eq!((function.start, function.entry), (wait.address, true));
    let addresses = |sites: &[&GvlSite]| sites.iter().map(|site| site.address.0).collect::<BTreeSet<_>>();
    let body = image.read_bytes(function.start, function.size() as usize).unwrap();
    // The function ends with returns, and with jumps to functions that return in its place.
    let ends = Decoder::with_ip(64, body, function.start.0, DecoderOptions::NONE).into_iter();
    let ends = ends.filter(|instruction| match instruction.flow_control() {
        FlowControl::Return => true,
        FlowControl::UnconditionalBranch => !function.contains(Svma(instruction.near_branch_target())),
        _ => false,
    });
    assert_eq!(addresses(&acquisitions), ends.map(|instruction| instruction.ip()).collect());
    assert!(!releases.is_empty() && releases.iter().all(|site| site.cleared.is_some()), "{releases:?}");

    let refill = &analysis.refill;
    assert_eq!(refill.outcome, Outcome::Passed);
    // In optimised code, they test for a page before they take it.
    assert!(!refill.sites.is_empty() && refill.sites.iter().all(|site| site.emulated), "{:?}", refill.sites);
    let page = table_of_libruby().structure("heap_page").unwrap();
    let offset = |name: &str| page.field(name).unwrap().offset.try_into().unwrap();
    let slot_size = Some(offset("slot_size"));
    let fields = PageFields { free_slots: offset("free_slots"), freelist: offset("freelist"), slot_size };
    assert_eq!(refill.page, Some(fields));

    if let Some(known) = known_libruby() {
        assert_eq!([waits.len(), acquisitions.len(), releases.len()], known.gvl);
        let stores: BTreeSet<Svma> = refill.sites.iter().map(|site| site.store).collect();
        assert_eq!((stores.len(), refill.dropped.len()), known.refill);
    }
}

/// For every image that the environment names (`GCTRACE_RUBY_IMAGES`, separated by colons): sites are the same without
/// symbols, and lie in the copies of the functions that DWARF names.
#[test]
#[ignore = "needs GCTRACE_RUBY_IMAGES"]
fn images_of_the_environment() {
    let paths = std::env::var("GCTRACE_RUBY_IMAGES").expect("GCTRACE_RUBY_IMAGES names images");
    let mut wrong = Vec::new();
    for path in paths.split(':').filter(|path| !path.is_empty() && !path.contains('@')) {
        let name = Path::new(path).file_name().unwrap().to_string_lossy();
        let mut image = image(path);
        // The sites are searched for on x86-64 only.
        if image.machine() != Machine::HOST {
            continue;
        }
        let with_symbols = analyse(&image);
        image.forget_symbols();
        let Ok(analysis) = analyse(&image).or_else(|_| with_symbols.clone()) else {
            wrong.push(format!("{path}: refused"));
            continue;
        };
        let names: Vec<&str> = REFILL.into_iter().chain([ACQUIRE, RELEASE]).collect();
        let truth = Truth::read(&std::fs::read(path).unwrap(), &names);
        let counts = GvlEvent::ALL.map(|event| gvl_sites(&analysis, event).len());
        let errors = truth.as_ref().map(|truth| gvl_differences(&analysis, truth));
        let (outcome, fields) = (&analysis.gvl.outcome, analysis.gvl.fields);
        println!("{name:28} gvl {counts:?} {fields:?} {outcome}; {:?}", errors.as_ref().map(Vec::len));
        wrong.extend(errors.unwrap_or_default().into_iter().map(|error| format!("{path}: {error}")));
        let refill = &analysis.refill;
        let errors = truth.as_ref().map(|truth| refill_differences(&analysis, truth));
        println!(
            "{name:28} refill {} of {} emulated(+{}) {:?} {}; {:?}",
            refill.sites.iter().filter(|site| site.emulated).count(),
            refill.sites.len(),
            refill.dropped.len(),
            refill.page,
            refill.outcome,
            errors.as_ref().map(Vec::len)
        );
        wrong.extend(errors.unwrap_or_default().into_iter().map(|error| format!("{path}: {error}")));
        if with_symbols.is_ok_and(|other| other.refill != analysis.refill || other.gvl != analysis.gvl) {
            wrong.push(format!("{path}: other sites with symbols"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Sites outside every copy of the function, and, if the finder claims to have all, copies without a site.
fn refill_differences(analysis: &RubyAnalysis, truth: &Truth) -> Vec<String> {
    let copies: Vec<&Instance> =
        REFILL.iter().map(|name| truth.instances(name)).find(|copies| !copies.is_empty()).unwrap_or_default();
    let mut wrong = Vec::new();
    if copies.is_empty() {
        wrong.push("no copy of a refilling function in the DWARF".to_owned());
    }
    let sites: BTreeSet<u64> = analysis.refill.sites.iter().map(|site| site.store.0).collect();
    for site in &sites {
        if !copies.iter().any(|copy| copy.contains(*site)) {
            wrong.push(format!("the refill site at {site:#x} is in no copy"));
        }
    }
    for dropped in &analysis.refill.dropped {
        if copies.iter().any(|copy| copy.contains(dropped.0)) {
            wrong.push(format!("the dropped store at {dropped} is in a copy"));
        }
    }
    for copy in copies.iter().filter(|_| analysis.refill.outcome == Outcome::Passed) {
        let part = copies.iter().any(|other| copy.caller.as_ref() == Some(&other.name));
        if !part && !sites.iter().any(|site| copy.contains(*site)) {
            wrong.push(format!("no refill site in {copy:x?}"));
        }
    }
    wrong
}

fn gvl_sites(analysis: &RubyAnalysis, event: GvlEvent) -> Vec<&GvlSite> {
    analysis.gvl.sites.iter().filter(|site| site.event == event).collect()
}

/// Sites outside every copy of their function, and copies without a site.
fn gvl_differences(analysis: &RubyAnalysis, truth: &Truth) -> Vec<String> {
    let mut wrong = Vec::new();
    let acquiring = truth.instances(ACQUIRE);
    let releasing = truth.instances(RELEASE);
    let complete = analysis.gvl.outcome == Outcome::Passed;
    if complete && !matches!(acquiring[..], [Instance { caller: None, .. }]) {
        wrong.push(format!("{ACQUIRE} is not one function: {acquiring:x?}"));
    }
    for site in gvl_sites(analysis, GvlEvent::Wait) {
        if !acquiring.iter().any(|copy| copy.ranges.iter().any(|range| range.start == site.address.0)) {
            wrong.push(format!("no {ACQUIRE} begins at {}", site.address));
        }
    }
    for site in gvl_sites(analysis, GvlEvent::Acquired) {
        if !acquiring.iter().any(|copy| copy.contains(site.address.0)) {
            wrong.push(format!("the end at {} is in no copy of {ACQUIRE}", site.address));
        }
    }
    let cleared: BTreeSet<u64> =
        gvl_sites(analysis, GvlEvent::Release).iter().filter_map(|site| Some(site.cleared?.0)).collect();
    for address in &cleared {
        if !releasing.iter().any(|copy| copy.contains(*address)) {
            wrong.push(format!("the owner is cleared at {address:#x} in no copy of {RELEASE}"));
        }
    }
    for copy in releasing.iter().filter(|_| complete) {
        if !cleared.iter().any(|address| copy.contains(*address)) {
            wrong.push(format!("no release in {copy:x?}"));
        }
    }
    wrong
}
