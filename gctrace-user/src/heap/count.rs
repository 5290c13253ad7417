//! A census that belongs to one moment, or says that it does not.

use super::target::Target;
use crate::ruby::{
    heap::{Census, HeapError, census},
    live_check,
    plan::AttachPlan,
    stat::Mode,
};

/// A heap is counted again when a GC ran meanwhile, so often.
const TRIES: u32 = 5;

/// A census with what was true before and after it.
pub(super) struct Counted {
    pub(super) census: Census,
    /// What happened meanwhile.
    pub(super) moment: Moment,
    /// Whether age, write barriers and death of objects are known.
    pub(super) knows_bits: bool,
    /// Whether it is known which objects the last compacting collection found pinned: a later major one has not forgotten it.
    pub(super) knows_pins: bool,
    /// How often the heap had been compacted.
    pub(super) compactions: Option<u64>,
}

/// What happened between two states of an objspace.
pub(super) struct Moment {
    /// `GC.count` before and after.
    pub(super) gc_count: [u64; 2],
    /// Objects that the program allocated meanwhile, if that is known.
    pub(super) allocated: Option<u64>,
    /// Whether a cycle was being swept after it.
    pub(super) sweeping: bool,
    /// Whether no collection began, went on or ended, and no slot was freed by a finalizer.
    pub(super) still: bool,
}

impl Moment {
    /// Whether what was read between them belongs to one moment.
    pub(super) fn consistent(&self) -> bool {
        self.gc_count[0] == self.gc_count[1] && self.allocated == Some(0) && !self.sweeping && self.still
    }

    /// What is said of what does not belong to one moment, as far as that is known.
    pub(super) fn words(&self) -> &'static str {
        if self.gc_count[0] == self.gc_count[1] && self.allocated.is_none() && self.still && !self.sweeping {
            return "perhaps not of one moment: how many objects this Ruby has allocated is not known";
        }
        if self.sweeping && self.allocated == Some(0) {
            return "not of one moment: a collection has not swept all pages yet";
        }
        "not of one moment: the program continued while its heap was read"
    }
}

/// Compares the states before and after something was read.
pub(super) fn same_moment(plan: &AttachPlan, before: &[u8], after: &[u8]) -> Moment {
    let allocated = [before, after].map(|data| key(plan, "total_allocated_objects", data));
    let flags = plan.layout.flags.read(after).unwrap_or_default() as u32;
    let freed = [before, after].map(|data| key(plan, "total_freed_objects", data));
    Moment {
        still: live_check::no_gc_between(&plan.layout, before, after)
            && (freed[0] == freed[1] || plan.layout.per_thread),
        gc_count: [before, after].map(|data| plan.layout.count.read(data).unwrap_or_default()),
        allocated: allocated[0]
            .zip(allocated[1])
            .filter(|_| !plan.layout.per_thread)
            .map(|(first, second)| second.saturating_sub(first)),
        sweeping: live_check::mode(&plan.layout, flags) == Mode::Sweeping,
    }
}

/// A number of `GC.stat`.
pub(super) fn key(plan: &AttachPlan, name: &str, data: &[u8]) -> Option<u64> {
    plan.layout.keys.iter().find(|key| key.name == name).and_then(|key| key.value(data))
}

/// Counts until no GC has run meanwhile, or often enough. Pages that hold another number of slots than `GC.stat` says
/// are refused.
pub(super) fn count(target: &Target) -> Result<Counted, HeapError> {
    let plan = &target.plan;
    let layout = target.layout()?;
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
        match [&before, &after].map(|data| key(plan, "heap_available_slots", data)) {
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
        let moment = same_moment(plan, &before, &after);
        let compactions = key(plan, "compact_count", &after);
        // Each major collection begins with no pins, and one that compacts finds some: those of stacks. A slot that was freed keeps its pin.
        let pinned = census.live().pinned > 0;
        let counted = Counted {
            census,
            moment,
            knows_bits: layout.knows_bits(),
            knows_pins: pinned && compactions.is_some_and(|count| count > 0),
            compactions,
        };
        if same {
            return Ok(counted);
        }
        last = Some(Ok(counted));
    }
    last.unwrap_or(Err(HeapError::Layout))
}
