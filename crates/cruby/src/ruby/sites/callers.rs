//! Code that the finders of both processors share: callers of a function, functions that end pauses, names of owners.

use std::collections::BTreeSet;

use gctrace_common::event::Point;

use super::facts::HOOK;
use super::{Field, Findings, Site};
use crate::address::Svma;
use crate::ruby::code::Code;
use crate::ruby::reference::Kind;

/// Maximum number of sites examined. Optimised builds have 10 to 40; acceptance refuses a larger set.
pub(in crate::ruby) const MAX_SITES: usize = 256;

/// Functions in which a pause begins but has no end: neither in the function itself nor, if `gc_enter` or `gc_exit` is out
/// of line, by a call of `gc_exit` in it or in each of its callers.
pub(super) fn endless(code: &mut Code<'_>, findings: &Findings) -> BTreeSet<Svma> {
    let exits = findings.owners(Point::GcExit);
    let enters = findings.owners(Point::GcEnter);
    let without: Vec<Svma> = enters.difference(&exits).copied().collect();
    if without.is_empty() || without.len() > MAX_SITES || exits.len() > MAX_SITES {
        return without.into_iter().collect();
    }
    // A function that ends pauses for others begins none itself; rb_memerror is excluded because it does not return.
    let memory_error = code.image.symbol("rb_memerror").map(|symbol| symbol.address);
    let mut ending = exits.clone();
    for &exit in exits.iter().filter(|&&exit| !enters.contains(&exit) && Some(exit) != memory_error) {
        ending.extend(calling_functions(code, exit));
    }
    let mut endless = BTreeSet::new();
    for function in without {
        let callers = calling_functions(code, function);
        let ends = ending.contains(&function) || (!callers.is_empty() && callers.is_subset(&ending));
        if !ends {
            endless.insert(function);
        }
    }
    endless
}

/// First addresses of the functions that call a function.
pub(super) fn calling_functions(code: &mut Code<'_>, function: Svma) -> BTreeSet<Svma> {
    let callers = callers_of(code, function);
    code.resolve_cold_parts(callers.iter().copied());
    let callers = callers.into_iter().map(|extent| code.start(code.owner(extent)));
    callers.filter(|&caller| caller != function).collect()
}

/// The extents that call a function of this image, directly or through a PLT stub or slot.
pub(super) fn callers_of(code: &Code<'_>, function: Svma) -> BTreeSet<usize> {
    let image = code.image;
    let imports = (code.import(HOOK) == Some(function)).then(|| image.imports(HOOK));
    let addresses = [function].into_iter().chain(image.stubs_to(function)).chain(image.slots_of(function));
    let wanted: Vec<_> =
        addresses.chain(imports.into_iter().flatten()).map(|Svma(at)| at..at.saturating_add(1)).collect();
    code.references(&wanted, Kind::Any).into_iter().map(|reference| reference.function).collect()
}

/// `hook_events` follows the 32-bit `flags` (`struct rb_objspace`, gc.c of 2.6 to 3.3).
pub(in crate::ruby) fn hook_events(flags: u32) -> Field {
    Field::Objspace(i64::from(flags) + 4)
}

pub(super) fn name_owners(code: &Code<'_>, sites: &mut [Site]) {
    for site in sites {
        site.owner_name = code.image.function_name(site.owner).map(str::to_owned);
    }
}

/// The source name of a function that the compiler cloned or split: without `.part.0`, `.isra.0` and similar suffixes.
pub(in crate::ruby) fn base_name(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}
