//! Flows: markers that belong together have a field with the same number. A request, the cycles that it started with their
//! pauses, and its waits for the GVL are one flow; a hold of the GVL and the waits whose longest hold it was are another.
//!
//! The format has had such fields since version 51 (`docs-developer/CHANGELOG-formats.md` of firefox-devtools/profiler):
//! 64-bit numbers that are unique in the file, as hexadecimal strings, referred to by their index in the string table.
//! The other kind, `terminating-flow-id`, ends a flow so that its number can be reused; here no number is reused.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU64,
};

use serde_json::Value;

use super::tables::Tables;
use crate::{
    aggregate::recording::{GvlMoment, ProcessIndex, Recording, Timeline, longest_holds},
    model::gvl::GvlDoing,
};

/// The format of such fields.
pub(super) const FORMAT: &str = "flow-id";

/// Set in the numbers of requests, and clear in those of holds.
const REQUEST: u64 = 1 << 63;

/// The flows of a file that have at least two markers in it.
pub(super) struct Flows {
    /// Requests, by id.
    requests: HashSet<NonZeroU64>,
    /// Numbers of the holds that waits refer to, by process, thread and start.
    holds: HashMap<(ProcessIndex, u64, u64), u64>,
}

impl Flows {
    /// The flows of this timeline, and of its GVL intervals as returned by [`Timeline::gvl_once`].
    pub(super) fn of(recording: &Recording, timeline: &Timeline, gvl: &[&GvlMoment]) -> Self {
        let cycles = timeline.cycles.iter().filter_map(|cycle| cycle.request);
        let of_request: HashSet<NonZeroU64> =
            cycles.chain(gvl.iter().filter_map(|moment| moment.request)).collect();
        let requests = timeline.requests.iter().filter_map(|request| NonZeroU64::new(request.id));
        let mut holds = HashMap::new();
        for hold in longest_holds(recording, gvl).into_values() {
            let hold = gvl[hold];
            let (thread, _) = recording.thread_facts(hold.thread);
            let number = holds.len() as u64 + 1;
            holds.entry((thread.process, hold.id, hold.begin_ns)).or_insert(number);
        }
        Self { requests: requests.filter(|id| of_request.contains(id)).collect(), holds }
    }

    /// The flow of a request, as an index of its string.
    pub(super) fn request(&self, tables: &mut Tables<'_>, id: NonZeroU64) -> Option<u32> {
        self.requests.contains(&id).then(|| text(tables, id.get() | REQUEST))
    }

    /// The flow of a hold, or of the hold that a wait refers to.
    pub(super) fn hold(
        &self,
        tables: &mut Tables<'_>,
        process: ProcessIndex,
        moment: &GvlMoment,
    ) -> Option<u32> {
        let (id, begin_ns) = match moment.doing {
            GvlDoing::Holding => (moment.id, moment.begin_ns),
            GvlDoing::Waiting => moment.holder.map(|(_, id, begin_ns)| (id, begin_ns))?,
            GvlDoing::Away => return None,
        };
        self.holds.get(&(process, id, begin_ns)).map(|number| text(tables, *number))
    }
}

/// All strings have the same length: a search in a viewer must not match other numbers that contain the one searched for.
fn text(tables: &mut Tables<'_>, number: u64) -> u32 {
    tables.string(&format!("{number:016x}"))
}

/// Adds a flow to the data of a marker.
pub(super) fn put(data: &mut Value, key: &str, flow: Option<u32>) {
    if let Some(flow) = flow {
        data[key] = flow.into();
    }
}
