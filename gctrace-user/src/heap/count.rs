//! A census that belongs to one moment, or reports that it does not.

use super::{
    places::{self, Known, Traced},
    target::{Target, key},
};
use crate::cli::By;
use crate::ruby::{
    heap::{Census, HeapError, HeapLayout, NoPlaces, Tracing, census, census_with_places},
    live_check,
    plan::AttachPlan,
    stat::Mode,
};

/// Maximum number of censuses; another one is taken if a GC ran meanwhile.
const TRIES: u32 = 5;

/// A census, with the state of the objspace before and after it.
pub(super) struct Counted {
    pub(super) census: Census,
    /// What happened meanwhile.
    pub(super) moment: Moment,
    /// Whether age, write barriers and death of objects are known.
    pub(super) knows_bits: bool,
    /// Whether it is known which objects the last compacting collection found pinned: no later major collection has cleared the pins.
    pub(super) knows_pins: bool,
    /// Number of compactions so far.
    pub(super) compactions: Option<u64>,
    /// Allocation sites of objects, or why there are none, if requested.
    pub(super) places: Option<Result<Traced, NoPlaces>>,
}

/// The text for a heap that did not change, but contains dead objects that a collection has yet to sweep.
pub(super) const NOT_SWEPT: &str = "not of one moment: a collection has not swept all pages yet";

/// The text for a heap that changed.
pub(super) const CONTINUED: &str = "not of one moment: the program continued while its heap was read";

/// What happened between two states of an objspace.
pub(super) struct Moment {
    /// `GC.count` before and after.
    pub(super) gc_count: [u64; 2],
    /// Number of objects that the program allocated meanwhile, if known.
    pub(super) allocated: Option<u64>,
    /// Whether a cycle was being swept at the end.
    pub(super) sweeping: bool,
    /// Whether no collection began, continued or ended, and no slot was freed by a finalizer.
    pub(super) still: bool,
}

impl Moment {
    /// Whether data read between the two states belongs to one moment.
    pub(super) fn consistent(&self) -> bool {
        self.gc_count[0] == self.gc_count[1] && self.allocated == Some(0) && !self.sweeping && self.still
    }

    /// Why the data does not belong to one moment, as far as that is known.
    pub(super) fn words(&self) -> &'static str {
        if self.gc_count[0] == self.gc_count[1] && self.allocated.is_none() && self.still && !self.sweeping {
            return "perhaps not of one moment: the number of objects that this Ruby has allocated is unknown";
        }
        if self.sweeping && self.allocated == Some(0) {
            return NOT_SWEPT;
        }
        CONTINUED
    }
}

/// The collections between two values of `GC.count`: `GC #10`, `GC #10 to #12`; `None` if there were none.
pub(super) fn collections(before: u64, after: u64) -> Option<String> {
    match after.checked_sub(before)? {
        0 => None,
        1 => Some(format!("GC #{after}")),
        _ => Some(format!("GC #{} to #{after}", before + 1)),
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

/// Takes a census until no GC ran meanwhile, or the maximum number of attempts is reached. Refuses pages whose number of slots differs
/// from `GC.stat`.
///
/// Contains what rows of this kind need: allocation sites of objects for lines, the classes of keepers for pages.
pub(super) fn count(target: &Target, by: By) -> Result<Counted, HeapError> {
    counted(target, by, TRIES)
}

/// Takes a single census, by class.
pub(super) fn once(target: &Target) -> Result<Counted, HeapError> {
    counted(target, By::Class, 1)
}

fn counted(target: &Target, by: By, tries: u32) -> Result<Counted, HeapError> {
    let plan = &target.plan;
    let layout = target.layout()?;
    let mut last = None;
    let mut tracing = None;
    let names = if by == By::Page { target.names() } else { None };
    let mut real_class = |class| names.as_ref()?.real_class(class);
    for _ in 0..tries {
        let (objspace, before) = target.state()?;
        let read = if by == By::Line {
            placed_census(target, &layout, &mut tracing, objspace, &before)
        } else {
            census(&target.memory, objspace, &layout, &mut real_class).map(|census| (census, None))
        };
        let (census, mut places) = match read {
            Ok(read) => read,
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
        // Each major collection clears the pins, and one that compacts sets some, e.g. of objects on stacks. A freed slot keeps its pin.
        if places.as_ref().is_some_and(Result::is_ok) && places::is_left_behind(plan, &after) {
            // The places may be those of objects that were in these slots before.
            places = Some(Err(NoPlaces::Compacted));
        }
        let whole = places
            .as_ref()
            .and_then(|places| places.as_ref().ok())
            .is_none_or(|places| !places.known.changed);
        let pinned = census.live().pinned > 0;
        let counted = Counted {
            census,
            moment,
            knows_bits: layout.knows_bits(),
            knows_pins: pinned && compactions.is_some_and(|count| count > 0),
            compactions,
            places,
        };
        if same && whole {
            return Ok(counted);
        }
        last = Some(Ok(counted));
    }
    last.unwrap_or(Err(HeapError::Layout))
}

/// A census with allocation sites, as far as they are known.
fn placed_census(
    target: &Target,
    layout: &HeapLayout,
    tracing: &mut Option<Result<Tracing, NoPlaces>>,
    objspace: u64,
    before: &[u8],
) -> Result<(Census, Option<Result<Traced, NoPlaces>>), HeapError> {
    let tracing = match tracing {
        Some(tracing) => *tracing,
        None => *tracing.insert(places::find(target, objspace, layout)?),
    };
    let places = match places::read(target, tracing, before) {
        Ok(places) => places,
        Err(reason) => {
            return Ok((census(&target.memory, objspace, layout, &mut |_| None)?, Some(Err(reason))));
        }
    };
    let (_, state) = target.state()?;
    let mut reader = places::placed(target, &places, &state);
    let census = census_with_places(&target.memory, objspace, layout, &mut |_| None, &mut reader)?;
    let known = Known::of(&places, &reader);
    drop(reader);
    Ok((census, Some(Ok(Traced { places, known }))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One collection has one number; without a collection there is no text.
    #[test]
    fn numbers_of_collections() {
        let words = |before, after| collections(before, after);
        assert_eq!(words(9, 9), None);
        assert_eq!(words(9, 10).as_deref(), Some("GC #10"));
        assert_eq!(words(9, 12).as_deref(), Some("GC #10 to #12"));
        assert_eq!(words(9, 3), None);
    }
}
