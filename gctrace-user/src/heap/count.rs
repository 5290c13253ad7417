//! A census that belongs to one moment, or says that it does not.

use super::target::Target;
use crate::ruby::{
    heap::{Census, HeapError, census},
    live_check,
    stat::Mode,
};

/// A heap is counted again when a GC ran meanwhile, so often.
const TRIES: u32 = 5;

/// A census with what was true before and after it.
pub(super) struct Counted {
    pub(super) census: Census,
    /// `GC.count` before and after.
    pub(super) gc_count: [u64; 2],
    /// Objects that the program allocated meanwhile, if that is known.
    pub(super) allocated: Option<u64>,
    /// Whether a cycle was being swept, so that dead objects are among those that were counted.
    pub(super) sweeping: bool,
    /// Whether age, write barriers and death of objects are known.
    pub(super) knows_bits: bool,
    /// Whether a collection has compacted, so that it is known which objects it found pinned.
    pub(super) compacted: bool,
}

impl Counted {
    /// Whether the sums belong to one moment: no GC ran and nothing was allocated while the heap was read.
    pub(super) fn consistent(&self) -> bool {
        self.gc_count[0] == self.gc_count[1] && self.allocated == Some(0) && !self.sweeping
    }
}

/// Counts until no GC has run meanwhile, or often enough. Pages that hold another number of slots than `GC.stat` says
/// are refused.
pub(super) fn count(target: &Target) -> Result<Counted, HeapError> {
    let plan = &target.plan;
    let layout = target.layout()?;
    let key = |name: &str, data: &[u8]| {
        plan.layout.keys.iter().find(|key| key.name == name).and_then(|key| key.value(data))
    };
    let mut last = None;
    for _ in 0..TRIES {
        let (objspace, before) = target.state()?;
        let census = match census(&target.memory, objspace, &layout) {
            Ok(census) => census,
            Err(error) => {
                last = Some(Err(error));
                continue;
            }
        };
        let (_, after) = target.state()?;
        let same = live_check::no_gc_between(&plan.layout, &before, &after);
        match [&before, &after].map(|data| key("heap_available_slots", data)) {
            [Some(first), Some(second)] if same && first == second && first != census.total() => {
                return Err(HeapError::Implausible(format!(
                    "the pages hold {} slots, but GC.stat says {first}",
                    census.total()
                )));
            }
            [Some(first), _] if first == census.total() => {}
            _ if layout.exact => {}
            _ => {
                last = Some(Err(HeapError::Implausible(
                    "the layout of this release is not known, and the heap changes too fast to prove that of its series"
                        .to_owned(),
                )));
                continue;
            }
        }
        let allocated = key("total_allocated_objects", &before)
            .zip(key("total_allocated_objects", &after))
            .filter(|_| !plan.layout.per_thread)
            .map(|(first, second)| second.saturating_sub(first));
        let flags = plan.layout.flags.read(&after).unwrap_or_default() as u32;
        let compactions = key("compact_count", &after);
        let counted = Counted {
            census,
            gc_count: [&before, &after].map(|data| plan.layout.count.read(data).unwrap_or_default()),
            allocated,
            sweeping: live_check::mode(&plan.layout, flags) == Mode::Sweeping,
            knows_bits: layout.knows_bits(),
            compacted: compactions.is_some_and(|count| count > 0),
        };
        if same {
            return Ok(counted);
        }
        last = Some(Ok(counted));
    }
    last.unwrap_or(Err(HeapError::Layout))
}
