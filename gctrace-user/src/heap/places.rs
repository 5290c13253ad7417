//! Allocation sites of the objects of a process that traces its allocations itself.

use super::target::{Target, key};
use crate::ruby::{
    heap::{HeapError, HeapLayout, NoPlaces, Placed, Places, Tracepoints, Tracing, each_object},
    plan::AttachPlan,
};

/// Allocation sites, and notes on them after the heap was read.
pub(super) struct Traced {
    pub(super) places: Places,
    pub(super) known: Known,
}

/// Notes on the table of allocation sites.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// Whether the program was still tracing allocations; otherwise it had stopped.
    pub(super) running: bool,
    /// Number of objects in the table.
    pub(super) entries: u64,
    /// Number of objects whose entry is that of another object.
    pub(super) others: u64,
    /// Whether the table was replaced while the heap was read.
    pub(super) changed: bool,
}

impl Known {
    pub(super) fn of(places: &Places, reader: &Placed<'_>) -> Self {
        Self {
            running: places.running(),
            entries: places.len() as u64,
            others: reader.others,
            changed: reader.changed,
        }
    }

    /// The name in JSON output.
    pub(super) fn tracing(self) -> &'static str {
        if self.running { "running" } else { "stopped" }
    }

    /// Notes in text output.
    pub(super) fn words(self) -> Vec<String> {
        let mut words = Vec::new();
        if !self.running {
            words.push(
                "tracing of allocations has stopped: an object in the slot of one that was freed since may have its place, if both \
                 are of one class"
                    .to_owned(),
            );
        }
        if self.changed {
            words.push(format!("{}: some objects have no place here", NoPlaces::Changed));
        }
        words
    }
}

/// The text if there are no allocation sites.
pub(super) fn advice(reason: NoPlaces) -> String {
    match reason {
        NoPlaces::NotTraced => {
            "the program does not trace its allocations: call ObjectSpace.trace_object_allocations_start in it (require \"objspace\"), or \
             use --leaks, which needs nothing"
                .to_owned()
        }
        NoPlaces::Changed => format!("allocation sites are unknown: {reason}; try again"),
        other => {
            format!("allocation sites are unknown: {other}; --leaks finds lines without that")
        }
    }
}

/// Finds the table of the process, in one pass over its heap.
pub(super) fn find(
    target: &Target,
    objspace: u64,
    layout: &HeapLayout,
) -> Result<Result<Tracing, NoPlaces>, HeapError> {
    let Some(mut tracepoints) = Tracepoints::of(target.plan.analysis.version) else {
        return Ok(Err(NoPlaces::Release));
    };
    each_object(&target.memory, objspace, layout, |slot| tracepoints.look(&target.memory, slot))?;
    Ok(tracepoints.tracing(&target.memory))
}

/// Reads the table. `state` is that of the objspace before it is read.
pub(super) fn read(
    target: &Target,
    tracing: Result<Tracing, NoPlaces>,
    state: &[u8],
) -> Result<Places, NoPlaces> {
    let tracing = tracing?;
    if is_left_behind(&target.plan, state) {
        return Err(NoPlaces::Compacted);
    }
    Places::read(&target.memory, &tracing)
}

/// Assigns allocation sites to objects. `state` is that of the objspace after the table and before the heap is read.
pub(super) fn placed<'a>(target: &'a Target, places: &'a Places, state: &[u8]) -> Placed<'a> {
    let names = target.names();
    let count = target.plan.layout.count.read(state).unwrap_or_default();
    Placed::new(places, count, move |class| names.as_ref()?.real_class(class))
}

/// Whether objects were moved, but the table was not updated: up to 3.3, `allocation_info_tracer_compact` compares the data of an entry instead of
/// the object (`ext/objspace/object_tracing.c`, `v3_3_8`; it does not exist in 2.7).
pub(super) fn is_left_behind(plan: &AttachPlan, state: &[u8]) -> bool {
    !plan.analysis.version.at_least(3, 4) && key(plan, "compact_count", state).is_none_or(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only notes that restrict the results are printed.
    #[test]
    fn words() {
        let known = Known { running: true, entries: 9, others: 1, changed: false };
        assert!(known.words().is_empty() && known.tracing() == "running");
        let stopped = Known { running: false, changed: true, ..known };
        assert_eq!((stopped.words().len(), stopped.tracing()), (2, "stopped"));
        assert!(stopped.words()[1].starts_with("the table was changed while it was read"));
        assert!(advice(NoPlaces::NotTraced).contains("trace_object_allocations_start"));
        assert!(advice(NoPlaces::Compacted).contains("compacted"));
    }
}
