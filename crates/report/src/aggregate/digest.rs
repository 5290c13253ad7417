//! Summary of a recording that fits on one screen: what its processes did with their time, and what stands out. Pure, with bounded memory.

pub mod steps;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use gctrace_common::event::WorkPhase;

use super::{
    gc_summary::{Distribution, Rss},
    request_summary::{By, RequestSummary},
    services::CycleKey,
};
use crate::model::{
    GcCycle, GcState, GcWork, Process,
    gvl::{GvlProcessSummary, GvlWho},
    seen::{Observer, ProcessEnd, Seen},
    source::{app_frame, ruby_frame},
    stack::Frame,
};

/// Number of longest pauses that are kept.
pub const PAUSES: usize = 3;
/// Maximum number of processes that are kept individually; the rest are only added up.
const PROCESSES: usize = 4096;
/// Number of thread pairs that are kept per process.
const PAIRS: usize = 2;

/// The whole digest.
#[derive(Debug, Default)]
pub struct Digest {
    running: HashMap<u32, ProcessDigest>,
    /// Processes whose tracing has ended, in the order in which it ended.
    pub processes: Vec<ProcessDigest>,
    /// Sums of the processes beyond the limit.
    pub more: More,
    /// Services by name, with the number of their processes.
    pub services: BTreeMap<String, u64>,
    /// Lengths of single pauses.
    pub stops: Distribution,
    /// The longest pauses, longest first.
    pub worst: Vec<LongPause>,
    /// Requests by service and endpoint.
    pub requests: RequestSummary,
    /// Number of allocated objects.
    pub objects: u64,
    /// When the recording began, `CLOCK_MONOTONIC` nanoseconds.
    pub began_ns: Option<u64>,
    /// When tracing ended, `CLOCK_MONOTONIC` nanoseconds; `None` if unknown.
    pub closed_ns: Option<u64>,
}

/// Processes of which only sums are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct More {
    /// Number of processes.
    pub processes: u64,
    /// Number of their GC cycles.
    pub cycles: u64,
    /// Whether the cycles of some of them are unknown.
    pub unknown: bool,
}

impl More {
    /// Adds a process.
    pub fn add(&mut self, digest: &ProcessDigest) {
        self.processes += 1;
        self.cycles += digest.cycles;
        self.unknown |= !digest.has_cycles();
    }
}

/// Figures of a process.
#[derive(Clone, Debug)]
pub struct ProcessDigest {
    /// The process.
    pub process: Process,
    /// For how long it was traced, nanoseconds.
    pub span_ns: u64,
    /// Part of this time in which it could be sampled, nanoseconds.
    pub sampled_ns: u64,
    /// Number of GC cycles.
    pub cycles: u64,
    /// Number of GC pauses, of a Ruby whose cycles are unknown.
    pub pauses: u64,
    /// Number of major cycles among them.
    pub majors: u64,
    /// Total time of GC pauses and GC work, nanoseconds.
    pub stopped_ns: u64,
    /// Longest pause, nanoseconds.
    pub longest_ns: u64,
    /// Memory, if it was read.
    pub rss: Option<Rss>,
    /// Memory when the process was found.
    found: Option<Rss>,
    /// CPU time of its samples, nanoseconds, and their number.
    pub cpu: (u64, u64),
    /// Waits for the GVL, if their sums are known.
    pub gvl: Option<GvlDigest>,
    /// Long waits for the GVL that were seen: number, and total time in nanoseconds.
    pub long_waits: (u64, u64),
    /// Number of lost GC records.
    pub lost: u64,
    /// Whether the process ended before tracing did.
    pub over: bool,
}

/// What the threads of a process did with the GVL.
#[derive(Clone, Debug)]
pub struct GvlDigest {
    /// Total time that its threads waited, nanoseconds.
    pub wait_ns: u64,
    /// Total time in which its threads were watched, nanoseconds.
    pub watched_ns: u64,
    /// Total lifetime of its threads, nanoseconds.
    pub wall_ns: u64,
    /// Average number of threads waiting at a time.
    pub waiting: f64,
    /// Pairs of a waiting and a holding thread with the most time, if both are known: time in nanoseconds, and number of waits.
    pub blocked: Vec<(GvlWho, GvlWho, u64, u64)>,
}

/// A GC pause that stands out.
#[derive(Clone, Debug)]
pub struct LongPause {
    /// Its length, nanoseconds.
    pub ns: u64,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Its process.
    pub pid: u32,
    /// Kind and reason of its cycle; `None` for a Ruby whose cycles are unknown.
    pub key: Option<CycleKey>,
    /// The line that started the cycle: in the application's own code or, if there is none, in any Ruby code.
    pub by: Option<Arc<Frame>>,
}

impl ProcessDigest {
    fn new(process: &Process) -> Self {
        Self {
            process: process.clone(),
            span_ns: 0,
            sampled_ns: 0,
            cycles: 0,
            pauses: 0,
            majors: 0,
            stopped_ns: 0,
            longest_ns: 0,
            rss: None,
            found: None,
            cpu: (0, 0),
            gvl: None,
            long_waits: (0, 0),
            lost: 0,
            over: false,
        }
    }

    fn state(&mut self, state: &GcState) {
        Rss::add(&mut self.rss, state);
    }

    fn cycle(&mut self, cycle: &GcCycle) {
        self.state(&cycle.start);
        if let Some(end) = &cycle.end {
            self.state(end);
        }
        self.cycles += 1;
        self.majors += u64::from(CycleKey::of(cycle).kind == "major");
        self.stopped_ns += cycle.pause_ns();
        self.longest_ns = self.longest_ns.max(cycle.max_pause_ns());
        self.lost += cycle.lost;
    }

    /// Adds a pause of a Ruby whose cycles are unknown.
    fn pause(&mut self, ns: u64) {
        self.pauses += 1;
        self.stopped_ns += ns;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// Whether its GC cycles are known. Those of a Ruby without event sites are not.
    pub fn has_cycles(&self) -> bool {
        self.process.image.method.sees_cycles()
    }

    /// Share of its time spent in the GC, 0 to 1.
    pub fn gc_share(&self) -> f64 {
        self.stopped_ns as f64 / self.span_ns.max(1) as f64
    }
}

impl GvlDigest {
    fn of(summary: &GvlProcessSummary) -> Self {
        let sums = &summary.sums;
        let share = sums.wait.ns as f64 / sums.watched_ns.max(1) as f64;
        let blocked = summary.blocked.iter().filter_map(|pair| {
            Some((pair.waiter.clone()?, pair.holder.clone()?, pair.times.ns, pair.times.count))
        });
        Self {
            wait_ns: sums.wait.ns,
            watched_ns: sums.watched_ns,
            wall_ns: sums.wall_ns,
            waiting: share * sums.wall_ns as f64 / summary.span_ns.max(1) as f64,
            blocked: blocked.take(PAIRS).collect(),
        }
    }
}

impl Digest {
    fn process(&mut self, process: &Process) -> &mut ProcessDigest {
        self.running.entry(process.pid).or_insert_with(|| ProcessDigest::new(process))
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) {
        self.process(process).cycle(cycle);
        let stack = cycle.trigger.as_deref();
        let by = stack.and_then(|stack| app_frame(stack).or_else(|| ruby_frame(stack)));
        for pause in &cycle.pauses {
            let (ns, begin_ns) = (pause.ns, pause.begin_ns);
            let (pid, key) = (process.pid, Some(CycleKey::of(cycle)));
            self.stop(LongPause { ns, begin_ns, pid, key, by: by.cloned() });
        }
    }

    fn stop(&mut self, pause: LongPause) {
        self.stops.add(pause.ns);
        if self.worst.len() == PAUSES && self.worst.last().is_some_and(|last| last.ns >= pause.ns) {
            return;
        }
        self.worst.push(pause);
        self.worst.sort_by_key(|pause| Reverse(pause.ns));
        self.worst.truncate(PAUSES);
    }

    /// Adds a pause of a Ruby whose cycles are unknown.
    fn other_pause(&mut self, process: &Process, work: &GcWork) {
        self.process(process).pause(work.ns);
        let &GcWork { begin_ns, ns, .. } = work;
        self.stop(LongPause { ns, begin_ns, pid: process.pid, key: None, by: None });
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) {
        self.process(process);
        let Some(mut digest) = self.running.remove(&process.pid) else { return };
        if let Some(state) = &end.shutdown {
            digest.state(state);
        }
        digest.rss = digest.rss.or(digest.found);
        digest.process = process.clone();
        digest.span_ns = end.ts_ns.saturating_sub(end.since_ns);
        let sampled_since = self.began_ns.map(|began_ns| began_ns.max(end.since_ns));
        digest.sampled_ns = sampled_since.map_or(0, |since_ns| end.ts_ns.saturating_sub(since_ns));
        digest.stopped_ns = digest.stopped_ns.saturating_add(end.outside_ns).saturating_sub(end.beyond_ns);
        // This includes records lost after its last cycle.
        digest.lost = digest.lost.max(end.lost);
        digest.over = end.reason != crate::model::EndReason::Detached;
        if self.processes.len() < PROCESSES {
            *self.services.entry(process.origin.service.clone()).or_default() += 1;
            self.processes.push(digest);
        } else {
            self.more.add(&digest);
        }
    }
}

impl Observer for Digest {
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { state, .. } => {
                let mut digest = ProcessDigest::new(process);
                // When this was read depends on when the process was found, so it is used only if no event has memory figures.
                digest.found = state.and_then(Rss::of);
                self.running.insert(process.pid, digest);
            }
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) if work.phase == WorkPhase::Pause => self.other_pause(process, work),
            Seen::Request(request) => self.requests.add_by(By::Endpoint, process, request),
            Seen::Stack(sample) => {
                let begun = self.began_ns.is_some_and(|began_ns| sample.ts_ns >= began_ns);
                if sample.cpu_ns > 0 && begun {
                    let (ns, count) = &mut self.process(process).cpu;
                    *ns += sample.cpu_ns;
                    *count += 1;
                }
            }
            Seen::GvlWait(wait) => {
                let (count, ns) = &mut self.process(process).long_waits;
                *count += 1;
                *ns = ns.saturating_add(wait.ns);
            }
            Seen::GvlProcess(summary) => self.process(process).gvl = Some(GvlDigest::of(summary)),
            Seen::Alloc(sum) => self.objects += sum.objects(),
            Seen::Ended(end) => self.ended(process, end),
            _ => {}
        }
    }
}
