//! The subjects of figures: processes, threads, pauses, pairs of threads.

use gctrace_report::{
    aggregate::gc_summary::GcSummary,
    model::gvl::{GvlProcessSummary, GvlSums, GvlTimes, GvlWho},
};

use crate::columns::{Fold, Over};

/// A process.
#[derive(Clone, Debug)]
pub(crate) struct OneProcess {
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) ruby: String,
    /// Whether its cycles are seen, and whether all of its pauses are.
    pub(crate) sees_cycles: bool,
    pub(crate) times_pauses: bool,
    pub(crate) cmdline: String,
    pub(crate) gc: GcSummary,
    pub(crate) cpu_ns: u64,
    /// How long it was traced, nanoseconds; `None` until tracing it has ended.
    pub(crate) span_ns: Option<u64>,
    /// Pauses of cycles that had begun before the chosen time, nanoseconds.
    pub(crate) outside_ns: u64,
    /// The part of the pauses of its cycles that lies after the chosen time, nanoseconds.
    pub(crate) beyond_ns: u64,
    /// Waits of its threads for the GVL, over their whole lifetimes.
    pub(crate) gvl: Option<GvlProcessSummary>,
}

impl OneProcess {
    /// Its total observed time in the GC within the chosen time, nanoseconds.
    pub(crate) fn gc_ns(&self) -> u64 {
        let all_ns = self.gc.stopped_ns.saturating_add(self.outside_ns).saturating_add(self.gc.work_ns());
        all_ns.saturating_sub(self.beyond_ns)
    }
}

/// A thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct OneThread {
    pub(crate) name: String,
    pub(crate) samples: u64,
    pub(crate) cpu_ns: u64,
    /// Time off the CPU according to samples.
    pub(crate) off_ns: u64,
    /// Whether all of its GC pauses are seen.
    pub(crate) times_pauses: bool,
    /// Number of GC pauses that ran on it.
    pub(crate) pauses: u64,
    /// Its time in them, nanoseconds. If they are not seen: in the parts of them that are, without those that may lie inside another one.
    pub(crate) pause_ns: u64,
    /// Long waits for the GVL.
    pub(crate) waits: GvlTimes,
    /// What all Ruby threads that ran on it last did with the GVL in their lives: up to Ruby 3.1, one native thread runs many of them.
    pub(crate) gvl: Option<GvlSums>,
    /// Its activity over time, if it is one of the threads for which that is kept.
    pub(crate) did: Option<Box<Over<Did>>>,
}

impl OneThread {
    /// Adds `ns` nanoseconds of an activity from `begin_ns` on.
    pub(crate) fn spent(&mut self, begin_ns: u64, ns: u64, of: impl Fn(&mut Did) -> &mut u64) {
        if let Some(did) = &mut self.did {
            did.cover(begin_ns, ns, of);
        }
    }
}

/// The activity of a thread during a column, nanoseconds of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Did {
    /// Serving a request, or running a job.
    pub(crate) request: u64,
    /// Running on a CPU, according to samples.
    pub(crate) cpu: u64,
    /// In a GC pause of its own.
    pub(crate) gc: u64,
    /// Long waits for the GVL.
    pub(crate) wait: u64,
    /// Long holds of the GVL.
    pub(crate) hold: u64,
}

impl Fold for Did {
    fn add(&mut self, other: &Self) {
        let Self { request, cpu, gc, wait, hold } = other;
        let more = [request, cpu, gc, wait, hold];
        let mine = [&mut self.request, &mut self.cpu, &mut self.gc, &mut self.wait, &mut self.hold];
        mine.into_iter().zip(more).for_each(|(mine, more)| *mine = mine.saturating_add(*more));
    }
}

/// A long pause.
#[derive(Clone, Debug)]
pub(crate) struct Pause {
    pub(crate) ns: u64,
    pub(crate) begin_ns: u64,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    pub(crate) count: u64,
    pub(crate) kind: &'static str,
    pub(crate) reason: String,
    /// The line that started its cycle.
    pub(crate) by: Option<String>,
}

/// Which thread blocked which, and where.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Pair {
    pub(crate) pid: u32,
    pub(crate) waiter: GvlWho,
    pub(crate) holder: Option<GvlWho>,
    pub(crate) place: Option<String>,
}
