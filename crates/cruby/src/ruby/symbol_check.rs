//! Symbols as a witness for the finder: do the functions in which it found an event have the names in the sources, and
//! does every function with an event in the sources contain a site?

use gctrace_common::event::Point;

use super::accept::plausible_owner;
use super::sites::{Site, base_name};
use crate::address::Svma;
use crate::elf::SymbolTable;

/// The result of comparing symbols and sites.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witness {
    /// The function that holds each site, in the order of the sites.
    pub owners: Vec<String>,
    /// The functions named in the sources that exist as such and were found to hold their event.
    pub confirmed: Vec<String>,
}

/// Symbols and sites contradict each other: one of them is wrong, and nothing is probed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Disagreement {
    /// The owner of a site has no name, although there are symbols.
    #[error("the symbols name no function at {owner}, where {event} was found at {address}")]
    Nameless {
        /// The event.
        event: &'static str,
        /// The site.
        address: Svma,
        /// Start of the function that contains it.
        owner: Svma,
    },
    /// A site is in a function that cannot contain it.
    #[error("{event} was found at {address} in `{name}`, where the sources have no such event")]
    WrongFunction {
        /// The event.
        event: &'static str,
        /// The site.
        address: Svma,
        /// The function.
        name: String,
    },
    /// A function that holds an event in the sources exists, but no site was found in it.
    #[error("`{name}` at {address} holds {event} in the sources, but none was found there")]
    Missed {
        /// The event.
        event: &'static str,
        /// The function.
        name: String,
        /// Its address.
        address: Svma,
    },
}

/// The function whose source text tests for the event: gc.c (2.6 to 3.3), gc/default/default.c (3.4 and later).
const fn home(point: Point) -> &'static str {
    match point {
        Point::GcStart => "gc_start",
        Point::GcEndMark => "gc_marks_finish",
        Point::GcEndSweep => "gc_sweep_finish",
        Point::GcEnter => "gc_enter",
        Point::GcExit => "gc_exit",
    }
}

/// Compares the sites with a symbol table of the same image.
pub fn witness(sites: &[Site], symbols: &SymbolTable) -> Result<Witness, Disagreement> {
    let mut owners = Vec::with_capacity(sites.len());
    for site in sites {
        let (event, address, owner) = (site.point.name(), site.address, site.owner);
        let name =
            symbols.function_covering(owner).ok_or(Disagreement::Nameless { event, address, owner })?.name;
        if !plausible_owner(site.point, base_name(name)) {
            return Err(Disagreement::WrongFunction { event, address, name: name.to_owned() });
        }
        owners.push(name.to_owned());
    }
    let mut confirmed = Vec::new();
    for symbol in symbols.iter().filter(|symbol| symbol.size > 0 && is_whole(symbol.name)) {
        for point in Point::ALL.into_iter().filter(|&point| base_name(symbol.name) == home(point)) {
            let end = symbol.address.0.saturating_add(symbol.size);
            let inside =
                |site: &&Site| site.point == point && (symbol.address.0..end).contains(&site.owner.0);
            if !sites.iter().any(|site| inside(&site)) {
                let (event, name) = (point.name(), symbol.name.to_owned());
                return Err(Disagreement::Missed { event, name, address: symbol.address });
            }
            confirmed.push(symbol.name.to_owned());
        }
    }
    Ok(Witness { owners, confirmed })
}

/// Whether a symbol is a whole function, not a part that a compiler split off (`.cold`, `.part.0`).
fn is_whole(name: &str) -> bool {
    !name.contains(".cold") && !name.contains(".part.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::tests::symbol_table;
    use crate::ruby::sites::SiteForm;

    fn site(point: Point, address: u64, owner: u64) -> Site {
        Site {
            point,
            address: Svma(address),
            emulated: true,
            guard: Svma(address),
            register: None,
            owner: Svma(owner),
            owner_name: None,
            form: SiteForm::Guard,
            pause: None,
        }
    }

    /// Sites in their own functions, in clones of them and in functions into which they were inlined.
    #[test]
    fn agreement() {
        let symbols = symbol_table(&[
            ("gc_start.constprop.0", 0x100, 0x80),
            ("gc_start.constprop.0.cold", 0x900, 0x10),
            ("gc_marks", 0x200, 0x80),
            ("newobj_slowpath", 0x300, 0x80),
        ]);
        let sites = [
            site(Point::GcStart, 0x905, 0x100),
            site(Point::GcEndMark, 0x210, 0x200),
            site(Point::GcEnter, 0x310, 0x300),
        ];
        let found = witness(&sites, &symbols).unwrap();
        assert_eq!(found.owners, ["gc_start.constprop.0", "gc_marks", "newobj_slowpath"]);
        assert_eq!(found.confirmed, ["gc_start.constprop.0"]);
    }

    /// A site outside the GC, a site in no function at all, and an event that was missed in its own function.
    #[test]
    fn disagreements() {
        let symbols =
            symbol_table(&[("gc_start", 0x100, 0x80), ("gc_exit", 0x200, 0x20), ("vm_exec", 0x300, 0x80)]);
        let start = site(Point::GcStart, 0x110, 0x100);
        let exit = site(Point::GcExit, 0x210, 0x200);
        assert!(witness(&[start.clone(), exit.clone()], &symbols).is_ok());

        let elsewhere = witness(&[start.clone(), exit.clone(), site(Point::GcEnter, 0x310, 0x300)], &symbols);
        assert!(matches!(elsewhere, Err(Disagreement::WrongFunction { name, .. }) if name == "vm_exec"));
        let nowhere = witness(&[start.clone(), exit, site(Point::GcEnter, 0x810, 0x800)], &symbols);
        assert!(matches!(nowhere, Err(Disagreement::Nameless { .. })));
        let missed = witness(&[start], &symbols).unwrap_err();
        assert_eq!(
            missed.to_string(),
            "`gc_exit` at 0x200 holds GC_EXIT in the sources, but none was found there"
        );
    }
}
