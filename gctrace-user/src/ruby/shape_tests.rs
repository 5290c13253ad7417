//! Tests of the shapes of the GVL and of page refill on real images.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use super::truth::{Instance, Truth};
use super::{Outcome, PageFields, RubyAnalysis, analyse};
use crate::elf::ElfImage;
use crate::elf::tests::DEBIAN_LIBRUBY;

/// Functions that take a page, each an inner part of the ones behind it; the first that a version has counts.
const REFILL: [&str; 4] = [
    "ractor_cache_set_page",
    "ractor_set_cache",
    "ractor_cache_slots",
    "heap_get_freeobj_from_next_freepage",
];

fn image(path: impl AsRef<Path>) -> ElfImage {
    ElfImage::read(&File::open(path).unwrap()).unwrap()
}

/// Debian's stripped 3.1.2: the numbers that its source, built again with debug information, confirms.
#[test]
fn debian_libruby() {
    let analysis = analyse(&image(DEBIAN_LIBRUBY)).unwrap();
    let refill = &analysis.refill;
    assert_eq!(refill.outcome, Outcome::Passed);
    assert_eq!((refill.sites.len(), refill.dropped.len()), (2, 1));
    assert_eq!(refill.page, Some(PageFields { free_slots: 4, freelist: 40, slot_size: Some(0) }));
}

/// Every image that the environment names (`GCTRACE_RUBY_IMAGES`, separated by colons): sites are the same without
/// symbols, and lie in the copies of the functions that DWARF tells.
#[test]
fn images_of_the_environment() {
    let Ok(paths) = std::env::var("GCTRACE_RUBY_IMAGES") else { return };
    let mut wrong = Vec::new();
    for path in paths.split(':').filter(|path| !path.is_empty()) {
        let name = Path::new(path).file_name().unwrap().to_string_lossy();
        let mut image = image(path);
        let with_symbols = analyse(&image);
        image.forget_symbols();
        let Ok(analysis) = analyse(&image).or_else(|_| with_symbols.clone()) else {
            wrong.push(format!("{path}: refused"));
            continue;
        };
        let truth = Truth::read(&std::fs::read(path).unwrap(), &REFILL);
        let refill = &analysis.refill;
        let errors = truth.as_ref().map(|truth| refill_differences(&analysis, truth));
        println!(
            "{name:28} refill {}(+{}) {:?} {}; {:?}",
            refill.sites.len(),
            refill.dropped.len(),
            refill.page,
            refill.outcome,
            errors.as_ref().map(Vec::len)
        );
        wrong.extend(errors.unwrap_or_default().into_iter().map(|error| format!("{path}: {error}")));
        if with_symbols.is_ok_and(|other| other.refill != analysis.refill) {
            wrong.push(format!("{path}: other refill sites with symbols"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Sites outside of every copy of the function, and, where the finder claims to have all, copies without a site.
fn refill_differences(analysis: &RubyAnalysis, truth: &Truth) -> Vec<String> {
    let copies: Vec<&Instance> =
        REFILL.iter().map(|name| truth.instances(name)).find(|copies| !copies.is_empty()).unwrap_or_default();
    let mut wrong = Vec::new();
    if copies.is_empty() {
        wrong.push("no copy of a refilling function in the DWARF".to_owned());
    }
    let sites: BTreeSet<u64> = analysis.refill.sites.iter().map(|site| site.address.0).collect();
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
