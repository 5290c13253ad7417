//! What figures are of: processes, threads, pauses, pairs of threads.

use gctrace_report::{
    aggregate::gc_summary::GcSummary,
    model::gvl::{GvlProcessSummary, GvlThreadSummary, GvlTimes, GvlWho},
};

use crate::columns::{Fold, Over};

/// A process.
#[derive(Clone, Debug)]
pub(crate) struct OneProcess {
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) ruby: String,
    pub(crate) cmdline: String,
    pub(crate) gc: GcSummary,
    pub(crate) cpu_ns: u64,
    /// For how long it was traced, when that has ended.
    pub(crate) span_ns: Option<u64>,
    /// Pauses of cycles that had begun before, nanoseconds.
    pub(crate) outside_ns: u64,
    /// The part of the pauses of its cycles that lies after the chosen time, nanoseconds.
    pub(crate) beyond_ns: u64,
    /// Waits of its threads for the GVL, over whole lives.
    pub(crate) gvl: Option<GvlProcessSummary>,
}

impl OneProcess {
    /// All of its time in the GC that was seen, in the chosen time.
    pub(crate) fn gc_ns(&self) -> u64 {
        let work = self.gc.work.values().map(|(_, ns)| *ns).fold(0, u64::saturating_add);
        let all_ns = self.gc.stopped_ns.saturating_add(self.outside_ns).saturating_add(work);
        all_ns.saturating_sub(self.beyond_ns)
    }
}

/// A thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct OneThread {
    pub(crate) name: String,
    pub(crate) samples: u64,
    pub(crate) cpu_ns: u64,
    /// Time off the CPU in samples.
    pub(crate) off_ns: u64,
    /// Pauses that it was in.
    pub(crate) pauses: u64,
    pub(crate) pause_ns: u64,
    /// Long waits for the GVL.
    pub(crate) waits: GvlTimes,
    /// What it did with the GVL over its whole life.
    pub(crate) gvl: Option<GvlThreadSummary>,
    /// What it did when, if it is one of those of which that is kept.
    pub(crate) did: Option<Box<Over<Did>>>,
}

impl OneThread {
    /// It did something for so long.
    pub(crate) fn spent(&mut self, begin_ns: u64, ns: u64, of: impl Fn(&mut Did) -> &mut u64) {
        if let Some(did) = &mut self.did {
            did.cover(begin_ns, ns, of);
        }
    }
}

/// What a thread did in a column, nanoseconds of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Did {
    /// It served a request, or ran a job.
    pub(crate) request: u64,
    /// It ran on a CPU, according to samples.
    pub(crate) cpu: u64,
    /// It was in a GC pause of its own.
    pub(crate) gc: u64,
    /// It waited long for the GVL.
    pub(crate) wait: u64,
    /// It held the GVL for long.
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

/// Who held up whom, and where.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Pair {
    pub(crate) pid: u32,
    pub(crate) waiter: GvlWho,
    pub(crate) holder: Option<GvlWho>,
    pub(crate) place: Option<String>,
}
