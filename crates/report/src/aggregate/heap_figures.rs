//! What a VM counts for its heap and for `malloc` at one GC event, by the names of `GC.stat` and `GC.stat_heap`.

use crate::model::{GcState, Image};

/// Slots of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Size of a slot, bytes.
    pub slot_size: u64,
    /// Number of slots with objects, including objects that wait for a finalizer: most Rubies do not count the latter by size.
    pub used: u64,
    /// Number of the remaining slots.
    pub free: u64,
}

impl Pool {
    /// Bytes of used slots, and of free slots.
    pub fn bytes(&self) -> (u64, u64) {
        (self.used.saturating_mul(self.slot_size), self.free.saturating_mul(self.slot_size))
    }
}

/// What a VM counts for its heap; what its Ruby does not count is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeapFigures {
    /// `heap_live_slots`.
    pub live_slots: Option<u64>,
    /// `heap_free_slots`.
    pub free_slots: Option<u64>,
    /// `malloc_increase_bytes`: bytes allocated by `malloc` since the last cycle started.
    pub malloc_increase: Option<u64>,
    /// `oldmalloc_increase_bytes`: the same since the last major cycle started.
    pub oldmalloc_increase: Option<u64>,
    /// Slots by size, in the order of `GC.stat_heap`; empty before 3.3, which does not count objects by size.
    pub pools: Box<[Pool]>,
}

impl HeapFigures {
    /// The figures in a state.
    pub fn of(image: &Image, state: &GcState) -> Self {
        let value = |keys: &[&str], values: &[u64], name: &str| {
            let at = keys.iter().position(|key| *key == name)?;
            values.get(at).copied()
        };
        let stat = |name| state.value(image, name);
        let pool = |values: &Vec<u64>| {
            let of = |name| value(&image.heap_keys, values, name);
            let counted = (of("heap_live_slots"), of("heap_free_slots"), of("heap_final_slots"));
            // 4.0 counts all three; 3.3 and 3.4 count allocated and freed objects.
            let (used, free) = if let (Some(live), Some(free), Some(last)) = counted {
                (live.checked_add(last)?, free)
            } else {
                let used = of("total_allocated_objects")?.checked_sub(of("total_freed_objects")?)?;
                let slots = of("heap_eden_slots")?.checked_add(of("heap_tomb_slots").unwrap_or(0))?;
                (used, slots.checked_sub(used)?)
            };
            Some(Pool { slot_size: of("slot_size")?, used, free })
        };
        Self {
            live_slots: stat("heap_live_slots"),
            free_slots: stat("heap_free_slots"),
            malloc_increase: stat("malloc_increase_bytes"),
            oldmalloc_increase: stat("oldmalloc_increase_bytes"),
            // All pools or none: a sum of some would look like the sum of all.
            pools: state.heaps.iter().map(pool).collect::<Option<_>>().unwrap_or_default(),
        }
    }

    /// Whether any figure is known.
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// The values that every Ruby counts, by their names in `GC.stat`.
    pub fn named(&self) -> [(&'static str, Option<u64>); 4] {
        [
            ("heap_live_slots", self.live_slots),
            ("heap_free_slots", self.free_slots),
            ("malloc_increase_bytes", self.malloc_increase),
            ("oldmalloc_increase_bytes", self.oldmalloc_increase),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::services::tests::{process, state};

    fn figures(heap_keys: &[&'static str], heaps: Vec<Vec<u64>>) -> HeapFigures {
        let mut image = (*process(1, "web").image).clone();
        image.heap_keys = heap_keys.to_vec();
        HeapFigures::of(&image, &GcState { heaps, ..state(7, 10) })
    }

    /// Each form of `GC.stat_heap` yields used and free slots, for all sizes or for none.
    #[test]
    fn pools() {
        let pool = |slot_size, used, free| Pool { slot_size, used, free };
        let counted = ["slot_size", "heap_eden_slots", "total_allocated_objects", "total_freed_objects"];
        let of = figures(&counted, vec![vec![40, 100, 70, 10], vec![80, 9, 9, 0]]);
        assert_eq!(*of.pools, [pool(40, 60, 40), pool(80, 9, 0)]);
        assert_eq!((of.live_slots, of.free_slots, of.malloc_increase), (Some(7), None, None));
        let with_tomb = [&counted[..], &["heap_tomb_slots"]].concat();
        assert_eq!(*figures(&with_tomb, vec![vec![40, 100, 70, 10, 5]]).pools, [pool(40, 60, 45)]);
        let keys = ["slot_size", "heap_live_slots", "heap_free_slots", "heap_final_slots", "heap_eden_slots"];
        assert_eq!(*figures(&keys, vec![vec![40, 5, 3, 2, 10]]).pools, [pool(40, 7, 3)]);
        // 3.2 does not count objects by size, and a pool cannot have more objects than slots.
        assert!(figures(&counted[..2], vec![vec![40, 100]]).pools.is_empty());
        assert!(figures(&counted, vec![vec![40, 100, 70, 10], vec![80, 8, 9, 0]]).pools.is_empty());
    }
}
