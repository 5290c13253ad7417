//! The heaps of a Ruby from 3.2 on, which sample sets include in `meta` as `stat_heap`: one entry per slot size.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::distribution::Distribution;

/// Maximum number of heaps of any Ruby (4.1: 12).
pub const MOST: usize = 16;
/// Maximum size of a `meta` that is parsed, bytes.
const LARGEST: usize = 64 << 10;

/// One heap, summed over sets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Heap {
    /// Bytes of a slot.
    pub slot: u64,
    /// Number of its slots at the end of each set.
    pub slots: Distribution,
    /// Objects allocated in it, over [`Heap::cycles`]; 0 if the Ruby does not count them (3.2).
    pub allocated: u64,
    /// Number of cycles during which these were allocated.
    pub cycles: u64,
}

impl Heap {
    /// Adds the figures of a later set.
    pub fn merge(&mut self, later: &Self) {
        self.slot = self.slot.max(later.slot);
        self.slots.merge(&later.slots);
        self.allocated = self.allocated.saturating_add(later.allocated);
        self.cycles = self.cycles.saturating_add(later.cycles);
    }

    /// Average number of objects allocated between two cycles.
    pub fn interval(&self) -> u64 {
        self.allocated.checked_div(self.cycles).unwrap_or(0)
    }
}

/// The state of one heap at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct State {
    /// Bytes of a slot.
    pub slot_size: u64,
    /// Number of slots.
    pub heap_eden_slots: u64,
    /// Objects ever allocated in it; 3.2 does not count them.
    #[serde(default)]
    pub total_allocated_objects: u64,
}

#[derive(Deserialize)]
struct Meta {
    stat_heap: std::collections::BTreeMap<u8, State>,
}

/// The heaps in a sample's `meta`, in order; `None` if it contains none, or is anything else.
pub fn read(meta: &RawValue) -> Option<Vec<State>> {
    let text = meta.get();
    if text.len() > LARGEST || !text.contains("stat_heap") {
        return None;
    }
    let meta: Meta = serde_json::from_str(text).ok()?;
    let whole = !meta.stat_heap.is_empty()
        && meta.stat_heap.len() <= MOST
        && meta.stat_heap.keys().enumerate().all(|(at, number)| at == usize::from(*number));
    whole.then(|| meta.stat_heap.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Option<Vec<State>> {
        read(&RawValue::from_string(text.to_owned()).ok()?)
    }

    /// Heaps are read with or without counts; anything else is ignored.
    #[test]
    fn metas() {
        let heaps = of(
            r#"{"stat_heap":{"0":{"slot_size":40,"heap_eden_slots":7,"x":1},"1":{"slot_size":80,"heap_eden_slots":9,"total_allocated_objects":5}}}"#,
        );
        let heaps = heaps.unwrap();
        assert_eq!((heaps[0].heap_eden_slots, heaps[1].total_allocated_objects), (7, 5));
        for other in [
            "null",
            "7",
            r#""stat_heap""#,
            r#"{"T_STRING":7}"#,
            r#"{"stat_heap":{}}"#,
            r#"{"stat_heap":{"1":{"slot_size":40,"heap_eden_slots":7}}}"#,
            r#"{"stat_heap":{"0":{"slot_size":-1,"heap_eden_slots":7}}}"#,
            r#"{"stat_heap":{"0":{"heap_eden_slots":7}}}"#,
            r#"{"stat_heap":{"0":7}}"#,
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    proptest! {
        /// Any text as `meta`.
        #[test]
        fn any_meta(text in r#"(\{"stat_heap":)?[\[{}\]0-9a-z":,.-]{0,80}"#) {
            let _ = of(&text);
        }
    }
}
