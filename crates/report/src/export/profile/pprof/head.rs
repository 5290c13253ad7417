//! What a profile contains: its span, sample types and labels.

use super::{OF_ALLOC, OF_GVL};
use crate::clock::WallClock;

/// What a profile contains in addition to its samples.
pub(in crate::export) struct Head {
    /// What was counted and lost, in one line.
    pub(in crate::export) comment: String,
    /// The clock of the run.
    pub(in crate::export) clock: WallClock,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub(in crate::export) began_ns: u64,
    /// End, `CLOCK_MONOTONIC` nanoseconds.
    pub(in crate::export) ended_ns: u64,
    /// Whether to write the sample types of the GVL: always in files; a server would make a series of each.
    pub(in crate::export) gvl: bool,
    /// Which sample types of allocation to write.
    pub(in crate::export) alloc: Allocation,
    /// Whether wall time was measured.
    pub(in crate::export) wall: bool,
    /// Which labels samples have.
    pub(in crate::export) labels: Labels,
}

/// The labels of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::export) enum Labels {
    /// All that is known.
    All,
    /// For a server that makes a series of each combination of labels: only those with few values, in names of `[a-z_]`, which all such
    /// servers accept. Threads, processes, traces and slot sizes have none; the rows `(minor GC)`, `(marking)` and so on of a pause's stack say
    /// what its labels would.
    OfSeries,
}

/// Whether a profile has the sample types of allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::export) enum Allocation {
    /// It does not.
    None,
    /// It has them in addition to the others.
    Too,
    /// It has only these, with the period of Go's heap profiles, where servers look for allocation.
    Only,
}

impl Head {
    /// Whether the profile has a sample type.
    pub(super) fn shows(&self, index: usize) -> bool {
        match self.alloc {
            Allocation::None => !OF_ALLOC.contains(&index) && (self.gvl || !OF_GVL.contains(&index)),
            Allocation::Too => self.gvl || !OF_GVL.contains(&index),
            Allocation::Only => OF_ALLOC.contains(&index),
        }
    }
}
