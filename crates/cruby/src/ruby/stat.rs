//! `GC.stat` and `GC.latest_gc_info` of each series: names, order and formulas.
//!
//! Source: `gc_stat_internal` and `gc_info_decode` in gc.c (≤ 3.3) and `rb_gc_impl_stat` in gc/default/default.c
//! (3.4 and later), read at the last tag of each series.

use super::RubyVersion;

/// A term of a key's sum.
#[derive(Clone, Copy, Debug)]
pub enum Term {
    /// A member of the objspace, added.
    Plus(&'static str),
    /// A member of the objspace, subtracted.
    Minus(&'static str),
    /// A member of every size pool or heap, added.
    PlusEach(&'static str),
    /// A member of every size pool or heap, subtracted.
    MinusEach(&'static str),
    /// The first word behind a pointer member (`rb_darray_size`), 0 if it is null; added.
    FirstWordBehind(&'static str),
    /// A member of every heap's part of the object cache of the thread's Ractor (4.0), added.
    PlusCached(&'static str),
    /// The same, subtracted.
    MinusCached(&'static str),
    /// The thread's own `malloc_increase_local` (4.0), a signed number; the sum is clamped at 0, as in
    /// `atomic_sub_nounderflow` (gc/default/default.c).
    PlusLocal,
}

impl Term {
    /// The member's name.
    pub fn name(&self) -> &'static str {
        match *self {
            Self::Plus(n)
            | Self::Minus(n)
            | Self::PlusEach(n)
            | Self::MinusEach(n)
            | Self::FirstWordBehind(n)
            | Self::PlusCached(n)
            | Self::MinusCached(n) => n,
            Self::PlusLocal => "malloc_increase_local",
        }
    }

    /// The sign of the term in the sum.
    pub fn sign(&self) -> Sign {
        match self {
            Self::Minus(_) | Self::MinusEach(_) | Self::MinusCached(_) => Sign::Minus,
            Self::PlusLocal => Sign::Signed,
            _ => Sign::Plus,
        }
    }

    /// Whether it is stored per thread or per Ractor, outside the objspace.
    pub fn is_per_thread(&self) -> bool {
        matches!(self, Self::PlusCached(_) | Self::MinusCached(_) | Self::PlusLocal)
    }
}

/// The sign of a term in a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Sign {
    /// Added.
    Plus,
    /// Subtracted.
    Minus,
    /// A signed number is added, and the sum is clamped at 0.
    Signed,
}

/// A `GC.stat` key and its formula.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The key's name.
    pub name: &'static str,
    /// The terms of the sum, in `size_t` arithmetic.
    pub terms: &'static [Term],
    /// Divisor of the sum (1 000 000 converts nanoseconds to milliseconds).
    pub divisor: u64,
}

use Term::{FirstWordBehind, Minus, MinusCached, MinusEach, Plus, PlusCached, PlusEach, PlusLocal};

const NS_PER_MS: u64 = 1_000_000;

const fn key(name: &'static str, terms: &'static [Term]) -> Key {
    Key { name, terms, divisor: 1 }
}

const fn millis(name: &'static str, terms: &'static [Term]) -> Key {
    Key { name, terms, divisor: NS_PER_MS }
}

/// The keys of a release, in the order in which its `GC.stat` returns them.
pub fn keys(version: RubyVersion) -> Vec<Key> {
    let mut keys = vec![key("count", &[Plus("profile.count")])];
    if version.at_least(3, 3) {
        keys.push(millis("time", &[Plus("profile.marking_time_ns"), Plus("profile.sweeping_time_ns")]));
        keys.push(millis("marking_time", &[Plus("profile.marking_time_ns")]));
        keys.push(millis("sweeping_time", &[Plus("profile.sweeping_time_ns")]));
    } else if version.at_least(3, 1) {
        keys.push(millis("time", &[Plus("profile.total_time_ns")]));
    }
    keys.extend_from_slice(match (version.major, version.minor) {
        (..=2, _) | (3, 0) => HEAP_2_7, // 2.6 has the same heap
        (3, 1) => HEAP_3_1,
        (3, 2) => HEAP_3_2,
        (3, 3) => HEAP_3_3,
        (3, 4) => HEAP_3_4,
        _ => HEAP_4_0,
    });
    keys.extend_from_slice(if version.at_least(4, 0) { MALLOC_4_0 } else { MALLOC });
    keys.extend_from_slice(&GC_COUNTS[..if version.at_least(2, 7) { 3 } else { 2 }]);
    if version.at_least(3, 0) {
        keys.push(key("read_barrier_faults", &[Plus("profile.read_barrier_faults")]));
        keys.push(key("total_moved_objects", &[Plus("rcompactor.total_moved")]));
    }
    keys.extend_from_slice(GENERATIONS);
    keys.push(key(
        "oldmalloc_increase_bytes",
        if version.at_least(4, 0) {
            &[Plus("malloc_counters.oldmalloc_increase"), PlusLocal]
        } else {
            &[Plus("rgengc.oldmalloc_increase")]
        },
    ));
    keys.push(key("oldmalloc_increase_bytes_limit", &[Plus("rgengc.oldmalloc_increase_limit")]));
    keys
}

/// The keys of each heap of a release, in the order in which its `GC.stat_heap` returns them; empty before 3.2. Terms
/// are members of the size pool or heap.
pub fn heap_keys(version: RubyVersion) -> Vec<Key> {
    let mut keys = match (version.major, version.minor) {
        (..=2, _) | (3, ..=1) => return Vec::new(),
        (3, 2 | 3) => POOL_3_2.to_vec(),
        (3, _) => POOL_3_4.to_vec(),
        _ => POOL_4_0.to_vec(),
    };
    keys.push(key("force_major_gc_count", &[Plus("force_major_gc_count")]));
    if version.at_least(3, 3) {
        keys.push(key(
            "force_incremental_marking_finish_count",
            &[Plus("force_incremental_marking_finish_count")],
        ));
        keys.push(key(
            "total_allocated_objects",
            if version.at_least(4, 0) {
                &[Plus("total_allocated_objects"), PlusCached("allocated_objects_count")]
            } else {
                &[Plus("total_allocated_objects")]
            },
        ));
        keys.push(key("total_freed_objects", &[Plus("total_freed_objects")]));
    }
    keys
}

/// Size pools with an eden and a tomb (`gc_stat_heap_internal`, gc.c).
const POOL_3_2: &[Key] = &[
    key("slot_size", &[Plus("slot_size")]),
    key("heap_allocatable_pages", &[Plus("allocatable_pages")]),
    key("heap_eden_pages", &[Plus("eden_heap.total_pages")]),
    key("heap_eden_slots", &[Plus("eden_heap.total_slots")]),
    key("heap_tomb_pages", &[Plus("tomb_heap.total_pages")]),
    key("heap_tomb_slots", &[Plus("tomb_heap.total_slots")]),
    key("total_allocated_pages", &[Plus("total_allocated_pages")]),
    key("total_freed_pages", &[Plus("total_freed_pages")]),
];

/// Heaps (`stat_one_heap`, gc/default/default.c).
const POOL_3_4: &[Key] = &[
    key("slot_size", &[Plus("slot_size")]),
    key("heap_eden_pages", &[Plus("total_pages")]),
    key("heap_eden_slots", &[Plus("total_slots")]),
    key("total_allocated_pages", &[Plus("total_allocated_pages")]),
];

/// As 3.4, with live, free and final slots.
const POOL_4_0: &[Key] = &[
    key("slot_size", &[Plus("slot_size")]),
    key(
        "heap_live_slots",
        &[
            Plus("total_allocated_objects"),
            PlusCached("allocated_objects_count"),
            Minus("total_freed_objects"),
            Minus("final_slots_count"),
        ],
    ),
    key(
        "heap_free_slots",
        &[
            Plus("total_slots"),
            Minus("total_allocated_objects"),
            MinusCached("allocated_objects_count"),
            Plus("total_freed_objects"),
        ],
    ),
    key("heap_final_slots", &[Plus("final_slots_count")]),
    key("heap_eden_pages", &[Plus("total_pages")]),
    key("heap_eden_slots", &[Plus("total_slots")]),
    key("total_allocated_pages", &[Plus("total_allocated_pages")]),
];

/// One heap, no pools.
const HEAP_2_7: &[Key] = &[
    key("heap_allocated_pages", &[Plus("heap_pages.allocated_pages")]),
    key("heap_sorted_length", &[Plus("heap_pages.sorted_length")]),
    key("heap_allocatable_pages", &[Plus("heap_pages.allocatable_pages")]),
    key("heap_available_slots", &[Plus("eden_heap.total_slots"), Plus("tomb_heap.total_slots")]),
    key("heap_live_slots", LIVE_GLOBAL),
    key(
        "heap_free_slots",
        &[
            Plus("eden_heap.total_slots"),
            Plus("tomb_heap.total_slots"),
            Minus("total_allocated_objects"),
            Plus("profile.total_freed_objects"),
        ],
    ),
    key("heap_final_slots", &[Plus("heap_pages.final_slots")]),
    key("heap_marked_slots", &[Plus("marked_slots")]),
    key("heap_eden_pages", &[Plus("eden_heap.total_pages")]),
    key("heap_tomb_pages", &[Plus("tomb_heap.total_pages")]),
    key("total_allocated_pages", &[Plus("profile.total_allocated_pages")]),
    key("total_freed_pages", &[Plus("profile.total_freed_pages")]),
    key("total_allocated_objects", &[Plus("total_allocated_objects")]),
    key("total_freed_objects", &[Plus("profile.total_freed_objects")]),
];

const LIVE_GLOBAL: &[Term] =
    &[Plus("total_allocated_objects"), Minus("profile.total_freed_objects"), Minus("heap_pages.final_slots")];

const FREE_POOLS_GLOBAL: &[Term] = &[
    PlusEach("eden_heap.total_slots"),
    PlusEach("tomb_heap.total_slots"),
    Minus("total_allocated_objects"),
    Plus("profile.total_freed_objects"),
];

/// Size pools; pages and objects counted for the whole objspace.
const HEAP_3_1: &[Key] = &[
    key("heap_allocated_pages", &[Plus("heap_pages.allocated_pages")]),
    key("heap_sorted_length", &[Plus("heap_pages.sorted_length")]),
    key("heap_allocatable_pages", &[PlusEach("allocatable_pages")]),
    key("heap_available_slots", &[PlusEach("eden_heap.total_slots"), PlusEach("tomb_heap.total_slots")]),
    key("heap_live_slots", LIVE_GLOBAL),
    key("heap_free_slots", FREE_POOLS_GLOBAL),
    key("heap_final_slots", &[Plus("heap_pages.final_slots")]),
    key("heap_marked_slots", &[Plus("marked_slots")]),
    key("heap_eden_pages", &[PlusEach("eden_heap.total_pages")]),
    key("heap_tomb_pages", &[PlusEach("tomb_heap.total_pages")]),
    key("total_allocated_pages", &[Plus("profile.total_allocated_pages")]),
    key("total_freed_pages", &[Plus("profile.total_freed_pages")]),
    key("total_allocated_objects", &[Plus("total_allocated_objects")]),
    key("total_freed_objects", &[Plus("profile.total_freed_objects")]),
];

/// As 3.1, with pages counted per pool.
const HEAP_3_2: &[Key] = &[
    key("heap_allocated_pages", &[Plus("heap_pages.allocated_pages")]),
    key("heap_sorted_length", &[Plus("heap_pages.sorted_length")]),
    key("heap_allocatable_pages", &[PlusEach("allocatable_pages")]),
    key("heap_available_slots", &[PlusEach("eden_heap.total_slots"), PlusEach("tomb_heap.total_slots")]),
    key("heap_live_slots", LIVE_GLOBAL),
    key("heap_free_slots", FREE_POOLS_GLOBAL),
    key("heap_final_slots", &[Plus("heap_pages.final_slots")]),
    key("heap_marked_slots", &[Plus("marked_slots")]),
    key("heap_eden_pages", &[PlusEach("eden_heap.total_pages")]),
    key("heap_tomb_pages", &[PlusEach("tomb_heap.total_pages")]),
    key("total_allocated_pages", &[PlusEach("total_allocated_pages")]),
    key("total_freed_pages", &[PlusEach("total_freed_pages")]),
    key("total_allocated_objects", &[Plus("total_allocated_objects")]),
    key("total_freed_objects", &[Plus("profile.total_freed_objects")]),
];

/// As 3.2, with objects counted per pool.
const HEAP_3_3: &[Key] = &[
    key("heap_allocated_pages", &[Plus("heap_pages.allocated_pages")]),
    key("heap_sorted_length", &[Plus("heap_pages.sorted_length")]),
    key("heap_allocatable_pages", &[PlusEach("allocatable_pages")]),
    key("heap_available_slots", &[PlusEach("eden_heap.total_slots"), PlusEach("tomb_heap.total_slots")]),
    key(
        "heap_live_slots",
        &[
            PlusEach("total_allocated_objects"),
            MinusEach("total_freed_objects"),
            Minus("heap_pages.final_slots"),
        ],
    ),
    key(
        "heap_free_slots",
        &[
            PlusEach("eden_heap.total_slots"),
            PlusEach("tomb_heap.total_slots"),
            MinusEach("total_allocated_objects"),
            PlusEach("total_freed_objects"),
        ],
    ),
    key("heap_final_slots", &[Plus("heap_pages.final_slots")]),
    key("heap_marked_slots", &[Plus("marked_slots")]),
    key("heap_eden_pages", &[PlusEach("eden_heap.total_pages")]),
    key("heap_tomb_pages", &[PlusEach("tomb_heap.total_pages")]),
    key("total_allocated_pages", &[PlusEach("total_allocated_pages")]),
    key("total_freed_pages", &[PlusEach("total_freed_pages")]),
    key("total_allocated_objects", &[PlusEach("total_allocated_objects")]),
    key("total_freed_objects", &[PlusEach("total_freed_objects")]),
];

/// Heaps instead of pools, no tomb, final slots counted per heap.
const HEAP_3_4: &[Key] = &[
    key("heap_allocated_pages", &[FirstWordBehind("heap_pages.sorted")]),
    key("heap_empty_pages", &[Plus("empty_pages_count")]),
    key("heap_allocatable_slots", &[Plus("heap_pages.allocatable_slots")]),
    key("heap_available_slots", &[PlusEach("total_slots")]),
    key(
        "heap_live_slots",
        &[
            PlusEach("total_allocated_objects"),
            MinusEach("total_freed_objects"),
            MinusEach("final_slots_count"),
        ],
    ),
    key(
        "heap_free_slots",
        &[PlusEach("total_slots"), MinusEach("total_allocated_objects"), PlusEach("total_freed_objects")],
    ),
    key("heap_final_slots", &[PlusEach("final_slots_count")]),
    key("heap_marked_slots", &[Plus("marked_slots")]),
    key("heap_eden_pages", &[PlusEach("total_pages")]),
    key("total_allocated_pages", &[Plus("heap_pages.allocated_pages")]),
    key("total_freed_pages", &[Plus("heap_pages.freed_pages")]),
    key("total_allocated_objects", &[PlusEach("total_allocated_objects")]),
    key("total_freed_objects", &[PlusEach("total_freed_objects")]),
];

/// As 3.4, but each Ractor counts its newest objects separately.
const HEAP_4_0: &[Key] = &[
    key("heap_allocated_pages", &[FirstWordBehind("heap_pages.sorted")]),
    key("heap_empty_pages", &[Plus("empty_pages_count")]),
    key("heap_allocatable_slots", &[Plus("heap_pages.allocatable_slots")]),
    key("heap_available_slots", &[PlusEach("total_slots")]),
    key(
        "heap_live_slots",
        &[
            PlusEach("total_allocated_objects"),
            PlusCached("allocated_objects_count"),
            MinusEach("total_freed_objects"),
            MinusEach("final_slots_count"),
        ],
    ),
    key(
        "heap_free_slots",
        &[
            PlusEach("total_slots"),
            MinusEach("total_allocated_objects"),
            MinusCached("allocated_objects_count"),
            PlusEach("total_freed_objects"),
        ],
    ),
    key("heap_final_slots", &[PlusEach("final_slots_count")]),
    key("heap_marked_slots", &[Plus("marked_slots")]),
    key("heap_eden_pages", &[PlusEach("total_pages")]),
    key("total_allocated_pages", &[Plus("heap_pages.allocated_pages")]),
    key("total_freed_pages", &[Plus("heap_pages.freed_pages")]),
    key(
        "total_allocated_objects",
        &[PlusEach("total_allocated_objects"), PlusCached("allocated_objects_count")],
    ),
    key("total_freed_objects", &[PlusEach("total_freed_objects")]),
];

const MALLOC: &[Key] = &[
    key("malloc_increase_bytes", &[Plus("malloc_params.increase")]),
    key("malloc_increase_bytes_limit", &[Plus("malloc_params.limit")]),
];

/// Each native thread counts its newest bytes separately.
const MALLOC_4_0: &[Key] = &[
    key("malloc_increase_bytes", &[Plus("malloc_counters.increase"), PlusLocal]),
    key("malloc_increase_bytes_limit", &[Plus("malloc_params.limit")]),
];

/// After the heap and malloc keys; the last one from 2.7 on.
const GC_COUNTS: &[Key] = &[
    key("minor_gc_count", &[Plus("profile.minor_gc_count")]),
    key("major_gc_count", &[Plus("profile.major_gc_count")]),
    key("compact_count", &[Plus("profile.compact_count")]),
];

/// The last keys of every series.
const GENERATIONS: &[Key] = &[
    key("remembered_wb_unprotected_objects", &[Plus("rgengc.uncollectible_wb_unprotected_objects")]),
    key(
        "remembered_wb_unprotected_objects_limit",
        &[Plus("rgengc.uncollectible_wb_unprotected_objects_limit")],
    ),
    key("old_objects", &[Plus("rgengc.old_objects")]),
    key("old_objects_limit", &[Plus("rgengc.old_objects_limit")]),
];

/// `enum gpr_flag` (gc.c; equal from 2.5 to 4.0).
pub(super) mod gpr {
    pub(in crate::ruby) const MAJOR_BY: [(u32, &str); 5] =
        [(0x01, "nofree"), (0x02, "oldgen"), (0x04, "shady"), (0x08, "force"), (0x20, "oldmalloc")];
    pub(in crate::ruby) const BY: [(u32, &str); 5] =
        [(0x100, "newobj"), (0x200, "malloc"), (0x400, "method"), (0x800, "capi"), (0x1000, "stress")];
    pub(in crate::ruby) const IMMEDIATE_SWEEP: u32 = 0x2000;
    pub(in crate::ruby) const HAVE_FINALIZE: u32 = 0x4000;
}

/// `flags.mode` (`enum gc_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No cycle is running.
    None,
    /// Marking, possibly between incremental steps.
    Marking,
    /// Sweeping, possibly between lazy steps.
    Sweeping,
    /// Compacting (3.0 and later).
    Compacting,
}

impl Mode {
    /// Reads the mode from the (shifted) bits.
    pub fn from_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Self::None,
            1 => Self::Marking,
            2 => Self::Sweeping,
            _ => Self::Compacting,
        }
    }

    /// The value of `GC.latest_gc_info(:state)`; compacting is reported as sweeping (`gc_info_decode`).
    pub fn state(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Marking => "marking",
            Self::Sweeping | Self::Compacting => "sweeping",
        }
    }
}

/// `GC.latest_gc_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcInfo {
    /// Why it is a major GC; `None` for a minor GC.
    pub major_by: Option<&'static str>,
    /// Why the next one will be major (outer `None`: the series has no such key).
    pub need_major_by: Option<Option<&'static str>>,
    /// What triggered it.
    pub gc_by: Option<&'static str>,
    /// Whether it ran finalizers.
    pub have_finalizer: bool,
    /// Whether it sweeps immediately.
    pub immediate_sweep: bool,
    /// The state when it was read.
    pub state: &'static str,
    /// Weak references and retained weak references (3.3 and later).
    pub weak_references: Option<(u64, Option<u64>)>,
}

impl GcInfo {
    /// Decodes `profile.latest_gc_info`.
    pub fn decode(
        info: u32,
        need_major: Option<u32>,
        mode: Mode,
        weak_references: Option<(u64, Option<u64>)>,
    ) -> Self {
        Self {
            major_by: first(&gpr::MAJOR_BY, info),
            need_major_by: need_major.map(|flags| first(&gpr::MAJOR_BY, flags)),
            gc_by: first(&gpr::BY, info),
            have_finalizer: info & gpr::HAVE_FINALIZE != 0,
            immediate_sweep: info & gpr::IMMEDIATE_SWEEP != 0,
            state: mode.state(),
            weak_references,
        }
    }
}

/// Every word that `GC.stat`, `GC.stat_heap` or `GC.latest_gc_info` of a known release can return (keys, reasons and states); some
/// occur several times.
pub fn words() -> impl Iterator<Item = &'static str> {
    let releases = [(2, 6..=7), (3, 0..=4), (4, 0..=1)];
    let releases = releases
        .into_iter()
        .flat_map(|(major, minors)| minors.map(move |minor| RubyVersion { major, minor, teeny: 0 }));
    let keys = releases.flat_map(|version| [keys(version), heap_keys(version)]).flatten().map(|key| key.name);
    let reasons = gpr::MAJOR_BY.into_iter().chain(gpr::BY).map(|(_, name)| name);
    keys.chain(reasons).chain([Mode::None, Mode::Marking, Mode::Sweeping].map(Mode::state))
}

fn first(names: &[(u32, &'static str)], flags: u32) -> Option<&'static str> {
    names.iter().find(|(flag, _)| flags & flag != 0).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flag words seen in real cycles decode to what `GC.latest_gc_info` returned for those cycles.
    #[test]
    fn info_words() {
        let explicit = GcInfo::decode(0x1_a408 | 0x2000, None, Mode::None, None);
        assert_eq!((explicit.major_by, explicit.gc_by), (Some("force"), Some("method")));
        assert!(explicit.immediate_sweep);
        let minor = GcInfo::decode(0x100, None, Mode::Sweeping, None);
        assert_eq!((minor.major_by, minor.gc_by, minor.state), (None, Some("newobj"), "sweeping"));
        let old = GcInfo::decode(0x101, Some(0x2), Mode::Marking, None);
        assert_eq!((old.major_by, old.need_major_by), (Some("nofree"), Some(Some("oldgen"))));
    }
}
