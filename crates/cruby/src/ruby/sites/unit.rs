//! The functions that come from gc.c.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::address::Svma;
use crate::elf::SymbolTable;
use crate::ruby::code::Code;
use crate::ruby::reference::Kind;

/// Exported functions of the GC lie within this distance of their median; others with the same prefix do not count.
const CLUSTER_RADIUS: u64 = 0x8_0000;
/// Bytes of code around the outermost exported function that may still be gc.c.
const SLACK: u64 = 0x4000;
/// A function this large is an interpreter loop or a generated table, not one that refers to a GC string.
const MAX_STRING_OWNER: u64 = 0x4000;

/// String constants referred to only by gc.c, from functions that are not exported. The first is in `gc_enter` (gc.c
/// from 3.0 on, gc/default/default.c from 3.4 on), the others in `newobj_slowpath` and `gc_stat`.
const STRINGS: [&str; 3] =
    ["during_gc != 0", "object allocation during garbage collection phase", "heap_live_slots"];

/// The functions of gc.c, as far as exports and strings identify them.
#[derive(Debug, Default)]
pub(super) struct GcUnit {
    /// Address range that spans the outermost functions.
    pub(super) range: Range<u64>,
    /// Extents that refer to `"during_gc != 0"`; `None` if the image does not contain the string.
    pub(super) enter_string: Option<BTreeSet<usize>>,
}

impl GcUnit {
    /// Finds the unit: the cluster of exported GC functions, widened to the owners of the strings (compilers order
    /// functions differently). Also decides which of the extents that refer to the strings are cold parts.
    pub(super) fn find(code: &mut Code<'_>) -> Option<Self> {
        let cluster = exported_cluster(code)?;
        let [enter, allocation, live_slots] = string_references(code, STRINGS);
        let referring: BTreeSet<usize> =
            [&enter, &allocation, &live_slots].into_iter().flatten().flatten().copied().collect();
        code.resolve_cold_parts(referring.iter().copied());

        let mut range = cluster.clone();
        for function in referring {
            let owner = code.image.functions()[code.owner(function)];
            let distance = owner.start.0.abs_diff(cluster.start).min(owner.start.0.abs_diff(cluster.end));
            if distance < CLUSTER_RADIUS && owner.size() < MAX_STRING_OWNER {
                range.start = range.start.min(owner.start.0);
                range.end = range.end.max(owner.start.0);
            }
        }
        Some(Self { range, enter_string: enter })
    }

    /// The extents inside the range and the exported function outside of it that holds a copy of `gc_exit`.
    pub(super) fn functions(&self, code: &Code<'_>) -> BTreeSet<usize> {
        let functions = code.image.functions();
        let first = functions.partition_point(|f| f.start.0 < self.range.start.saturating_sub(SLACK));
        let last = functions.partition_point(|f| f.start.0 <= self.range.end.saturating_add(SLACK));
        let memory_error = code.image.symbol("rb_memerror");
        let memory_error = memory_error.and_then(|symbol| code.image.function_index(symbol.address));
        (first..last.max(first)).chain(memory_error).collect()
    }
}

fn exported_cluster(code: &Code<'_>) -> Option<Range<u64>> {
    let image = code.image;
    let is_gc_function = |name: &str| {
        let prefixed = name.starts_with("rb_gc_") || name.starts_with("rb_objspace_");
        // rb_gc_for_fd and similar functions (io.c) are not part of the GC.
        (prefixed && !name.ends_with("_fd")) || name == "rb_newobj_of" || name == "rb_during_gc"
    };
    let addresses_in = |table: &SymbolTable| -> Vec<u64> {
        let functions = table
            .iter()
            .filter(|symbol| is_gc_function(symbol.name) && image.function_index(symbol.address).is_some());
        functions.map(|symbol| symbol.address.0).collect()
    };
    let mut addresses = addresses_in(image.dynamic_symbols());
    if addresses.is_empty() {
        addresses = addresses_in(image.symbols());
    }
    let median = *addresses.get(addresses.len() / 2)?;
    let near = || addresses.iter().copied().filter(|address| address.abs_diff(median) < CLUSTER_RADIUS);
    Some(near().min()?..near().max()?)
}

/// For each string constant, the extents that refer to it; `None` if the image does not contain it.
fn string_references<const N: usize>(code: &Code<'_>, texts: [&str; N]) -> [Option<BTreeSet<usize>>; N] {
    let strings = texts.map(|text| code.image.find_c_string(text));
    let wanted: Vec<Range<u64>> = strings.iter().flatten().map(|&Svma(at)| at..at + 1).collect();
    let references = code.references(&wanted, Kind::Any);
    strings.map(|copies| {
        let to_it = references.iter().filter(|reference| copies.contains(&reference.target));
        (!copies.is_empty()).then(|| to_it.map(|reference| reference.function).collect())
    })
}
