//! What the width of a row in a flame graph and the number in a line of collapsed stacks represent.

use super::{
    label::{self, Class},
    waits,
};
use crate::{
    aggregate::{
        call_tree::NodeId,
        estimate::CallsAndBytes,
        recording::{
            AllocKey, EndpointIndex, GvlFacts, MallocKey, PauseKey, Recording, ThreadIndex, WaitKey,
        },
    },
    model::stack::{FrameKind, ThreadState},
};

/// The quantity that a graph shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// CPU time of samples.
    #[default]
    Cpu,
    /// Time of samples, on and off the CPU.
    Wall,
    /// Measured time of GC pauses, under the stack that started the cycle.
    Gc,
    /// Measured time for which threads waited for the GVL, under the stack that waited.
    GvlWait,
    /// Bytes of the slots in which objects are allocated.
    Alloc,
    /// Estimated bytes requested from malloc (`gctrace malloc`).
    Malloc,
    /// The part of them still allocated at the end.
    MallocLive,
}

/// A stack with its weight.
pub(super) struct Entry {
    pub(super) thread: ThreadIndex,
    /// The stack; [`NodeId::ROOT`] if none was taken.
    pub(super) node: NodeId,
    /// The endpoint of the request that the thread served, if known.
    pub(super) endpoint: Option<EndpointIndex>,
    pub(super) state: ThreadState,
    /// Rows below the leaf of the stack, outermost first.
    pub(super) rows: Vec<(String, Class)>,
    /// The weight, in the unit of the measure.
    pub(super) weight: u64,
}

impl Measure {
    /// The unit shown, and the factor from the unit of the weights (nanoseconds, bytes) to it.
    pub(super) fn unit(self) -> (&'static str, f64) {
        match self {
            Self::Cpu | Self::Wall | Self::Gc | Self::GvlWait => ("ms", 1e-6),
            Self::Alloc | Self::Malloc | Self::MallocLive => ("kB", 1e-3),
        }
    }

    /// Whether it is based on samples.
    pub fn is_sampled(self) -> bool {
        matches!(self, Self::Cpu | Self::Wall)
    }

    /// Its name in a title.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Cpu => "CPU time",
            Self::Wall => "Wall time",
            Self::Gc => "GC pauses",
            Self::GvlWait => "Waits for the GVL",
            Self::Alloc => "Allocation",
            Self::Malloc => "Memory requested from malloc",
            Self::MallocLive => "Memory from malloc still allocated",
        }
    }

    /// The message if there is nothing to show.
    pub(super) fn nothing(self) -> &'static str {
        match self {
            Self::Cpu | Self::Wall => "gctrace took no samples in this run.",
            Self::Gc => "No GC pause was seen in this run.",
            Self::GvlWait => "No wait for the GVL was seen in this run.",
            Self::Alloc => "No allocation was seen in this run.",
            Self::Malloc => "No call of malloc was sampled.",
            Self::MallocLive => "No memory of the sampled malloc calls was still allocated at the end.",
        }
    }

    /// The stacks of a recording with their weight; a stack may occur several times.
    pub(super) fn entries(self, recording: &Recording) -> Vec<Entry> {
        match self {
            Self::Cpu | Self::Wall => samples(recording, self == Self::Cpu),
            Self::Gc => recording.pauses.iter().map(|(key, sum)| pause(key, sum.ns)).collect(),
            Self::Alloc => recording.allocs.iter().map(|(key, sum)| alloc(key, sum.slots)).collect(),
            Self::Malloc => recording.mallocs.iter().map(|(key, sum)| malloc(*key, &sum.asked)).collect(),
            Self::MallocLive => recording.mallocs.iter().map(|(key, sum)| malloc(*key, &sum.left)).collect(),
            Self::GvlWait => {
                let waits = recording.gvl_waits.iter().map(|(key, times)| wait(recording, key, times.ns));
                waits.chain(recording.gvl_threads.values().filter_map(unreported)).collect()
            }
        }
    }
}

fn samples(recording: &Recording, only_cpu: bool) -> Vec<Entry> {
    let wanted = recording.samples.iter().filter(|(key, _)| !only_cpu || key.state == ThreadState::Running);
    wanted
        .map(|(key, sum)| {
            let row = waits::row(&recording.tree, key.node, key.state);
            let class = match key.state {
                ThreadState::GvlWait => Class::GvlWait,
                ThreadState::OtherWait => Class::Off(ThreadState::Blocked),
                state => Class::Off(state),
            };
            let rows = row.map(|name| (name.to_owned(), class)).into_iter().collect();
            Entry {
                thread: key.thread,
                node: key.node,
                endpoint: key.endpoint,
                state: key.state,
                rows,
                weight: sum.time_ns(key.state),
            }
        })
        .collect()
}

/// The rows are the same as in the pprof file.
fn pause(key: &PauseKey, ns: u64) -> Entry {
    let names =
        ["(garbage collection)".to_owned(), format!("({} GC)", key.kind), format!("({})", key.phase.name())];
    let rows = names.map(|name| (name, Class::Frame(FrameKind::Vm))).into();
    let PauseKey { thread, node, endpoint, .. } = *key;
    Entry { thread, node, endpoint, state: ThreadState::Running, rows, weight: ns }
}

fn alloc(key: &AllocKey, slots: u64) -> Entry {
    let weight = key.bytes(slots);
    let AllocKey { thread, node, endpoint, .. } = *key;
    Entry { thread, node, endpoint, state: ThreadState::Running, rows: Vec::new(), weight }
}

fn malloc(key: MallocKey, sum: &CallsAndBytes) -> Entry {
    let (thread, node, weight) = (key.thread, key.node, sum.bytes.rounded());
    Entry { thread, node, endpoint: None, state: ThreadState::Running, rows: Vec::new(), weight }
}

/// The thread that held the GVL has a row of its own, if it is known.
fn wait(recording: &Recording, key: &WaitKey, ns: u64) -> Entry {
    let mut rows = vec![("(GVL wait)".to_owned(), Class::GvlWait)];
    if let Some(holder) = key.holder {
        let (thread, _) = recording.thread_facts(holder);
        let name = label::text(&thread.name);
        let place = label::leaf(recording, key.holder_at.until);
        let place = place.map_or_else(String::new, |place| format!(" until {place}"));
        rows.push((format!("(held by {name}{place})"), Class::GvlWait));
    }
    let WaitKey { thread, node, endpoint, .. } = *key;
    Entry { thread, node, endpoint, state: ThreadState::Running, rows, weight: ns }
}

/// The waits of a thread that were not reported individually.
fn unreported(facts: &GvlFacts) -> Option<Entry> {
    let (_, ns) = facts.unreported();
    let rows = vec![("(GVL waits, only totals known)".to_owned(), Class::GvlWait)];
    let (thread, node, state) = (facts.thread, NodeId::ROOT, ThreadState::Running);
    (ns > 0).then_some(Entry { thread, node, endpoint: None, state, rows, weight: ns })
}
