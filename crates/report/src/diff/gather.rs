//! Gathers what is needed from one recording.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{
    blocks::{Grid, Series, Times},
    methods::ByMethod,
};
use crate::{
    aggregate::endpoint,
    ledger::Ledger,
    model::{
        GcCycle, GcState, Process,
        gvl::{GvlGap, GvlThreadSummary, GvlWait},
        gvl_so_far::GvlSoFar,
        request::Request,
        seen::{AllocSum, Observer, ProcessEnd, Seen},
        source::{app_frame, ruby_frame},
        stack::{Frame, StackSample, ThreadState},
    },
    ruby::fallback::Method as Tracing,
    words::UNNAMED,
};

/// Maximum number of distinguished endpoints.
const ENDPOINTS: usize = 500;

/// What a recording observed; it explains what the recording lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Looked {
    /// CPU samples.
    pub samples: bool,
    /// Threads off the CPU.
    pub wall: bool,
    /// The GVL.
    pub gvl: bool,
    /// Requests.
    pub requests: bool,
    /// Allocation.
    pub alloc: bool,
}

/// Selects the processes that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// Only this pid.
    pub pid: Option<u32>,
    /// Only programs of this name.
    pub program: Option<String>,
}

impl Chosen {
    /// Whether a process is selected.
    pub fn has(&self, process: &Process) -> bool {
        self.pid.is_none_or(|pid| pid == process.pid)
            && self.program.as_deref().is_none_or(|name| name == program(process))
    }
}

/// The name by which a process is matched with those of another recording: its service, or the name of its main thread.
pub fn program(process: &Process) -> &str {
    let names = [process.origin.service.as_str(), &process.comm];
    names.into_iter().find(|name| !name.is_empty()).unwrap_or(UNNAMED)
}

/// Processes of one program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Number of processes.
    pub processes: u64,
    /// Their Rubies.
    pub rubies: BTreeSet<String>,
}

/// Requests of one endpoint or of all.
#[derive(Debug, Default)]
pub(super) struct Requests {
    pub(super) count: Series,
    pub(super) times: Times,
    /// Total duration of the requests whose GC is known, and the GC pauses during them, nanoseconds.
    pub(super) known_ns: Series,
    pub(super) gc_ns: Series,
}

impl Requests {
    fn add(&mut self, grid: &mut Grid, request: &Request) {
        let Some(bin) = grid.bin(request.begin_ns) else { return };
        self.count.add(bin, 1.0);
        let Some(ns) = request.duration_ns() else { return };
        self.times.add(bin, ns, 1);
        if let Some(gc_ns) = request.gc_ns {
            self.known_ns.add(bin, ns as f64);
            self.gc_ns.add(bin, gc_ns as f64);
        }
    }
}

/// A running process.
#[derive(Clone, Debug, Default)]
struct Running {
    /// Time up to which its GVL sums were reported, nanoseconds.
    gvl_ns: u64,
    /// These sums, which only grow.
    reported: GvlSoFar,
    /// The peak of its memory when that was first read, bytes: it may be of a time before the recording, or before the part.
    peak_before: Option<u64>,
}

/// One recording.
#[derive(Debug)]
pub struct Side {
    /// Its name in messages: `A` or `B`.
    pub name: &'static str,
    pub(super) chosen: Chosen,
    pub(super) looked: Looked,
    pub(super) grid: Grid,
    pub(super) closed_ns: u64,
    pub(super) ledger: Ledger,
    pub(super) programs: BTreeMap<String, Program>,
    running: HashMap<u32, Running>,
    now_ns: u64,
    /// Lifetimes of processes, nanoseconds.
    pub(super) time: Series,
    pub(super) pause_ns: Series,
    pub(super) minor: Series,
    pub(super) major: Series,
    pub(super) pauses: Times,
    /// Time of GC pauses by the method that started the cycle, nanoseconds.
    pub(super) triggers: ByMethod,
    /// Programs whose GC is not traced by its events, so that cycles are unknown.
    pub(super) without_cycles: BTreeSet<String>,
    /// CPU time, nanoseconds.
    pub(super) cpu: ByMethod,
    /// Off-CPU time of threads, nanoseconds.
    pub(super) off_cpu: ByMethod,
    pub(super) gvl: Gvl,
    pub(super) requests: Requests,
    pub(super) endpoints: BTreeMap<String, Requests>,
    pub(super) objects: Series,
    pub(super) bytes: Series,
    /// Number of refills missing from the sums.
    pub(super) refills_lost: u64,
    /// Allocated bytes by method.
    pub(super) allocating: ByMethod,
    pub(super) peak_rss: Option<u64>,
}

/// What threads did with the GVL.
#[derive(Debug, Default)]
pub(super) struct Gvl {
    /// Sum over whole threads, nanoseconds.
    pub(super) wait_ns: u64,
    pub(super) watched_ns: u64,
    /// Includes the time for which the CPU budget prevented watching.
    pub(super) wall_ns: u64,
    /// Watched time of threads, nanoseconds.
    pub(super) time: Series,
    /// Time of completed waits, nanoseconds.
    pub(super) waited: Series,
    pub(super) waits: Series,
    /// Time of long waits by the method that held the GVL, nanoseconds.
    pub(super) holders: ByMethod,
    /// Time for which individual waits were not reported, nanoseconds.
    pub(super) gap_ns: u64,
    /// Time for which waits were not observed at all, nanoseconds.
    pub(super) unwatched_ns: u64,
    /// The values of `only_blocked` in the coverages of its threads.
    pub(super) only_blocked: BTreeSet<bool>,
    reported: bool,
}

impl Gvl {
    /// Whether the times of waits are known, so that they can be split into blocks.
    pub(super) fn has_blocks(&self) -> bool {
        self.reported
    }
}

impl Side {
    /// An empty side, for a recording that observed this.
    pub fn new(name: &'static str, looked: Looked, chosen: Chosen) -> Self {
        Self {
            name,
            chosen,
            looked,
            grid: Grid::default(),
            closed_ns: 0,
            ledger: Ledger::default(),
            programs: BTreeMap::new(),
            running: HashMap::new(),
            now_ns: 0,
            time: Series::default(),
            pause_ns: Series::default(),
            minor: Series::default(),
            major: Series::default(),
            pauses: Times::default(),
            triggers: ByMethod::default(),
            without_cycles: BTreeSet::new(),
            cpu: ByMethod::default(),
            off_cpu: ByMethod::default(),
            gvl: Gvl::default(),
            requests: Requests::default(),
            endpoints: BTreeMap::new(),
            objects: Series::default(),
            bytes: Series::default(),
            refills_lost: 0,
            allocating: ByMethod::default(),
            peak_rss: None,
        }
    }

    /// Everything is traced from this time on, `CLOCK_MONOTONIC` nanoseconds; earlier events do not count.
    pub fn began(&mut self, ts_ns: u64) {
        self.grid.begin(ts_ns);
    }

    /// Tracing ended at this time.
    pub fn closed(&mut self, ts_ns: u64) {
        self.closed_ns = ts_ns;
    }

    /// Advances the current time.
    pub fn now(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Adds an interval in which individual waits for the GVL were not reported.
    pub fn gvl_gap(&mut self, gap: GvlGap) {
        let to_ns = if gap.to_ns == u64::MAX { self.now_ns } else { gap.to_ns };
        let ns = to_ns.saturating_sub(gap.from_ns);
        self.gvl.gap_ns += ns;
        self.gvl.unwatched_ns += if gap.summed { 0 } else { ns };
    }

    /// Sets the last account.
    pub fn account(&mut self, ledger: &Ledger) {
        self.ledger = ledger.clone();
    }

    /// Time for which everything was traced, seconds.
    pub fn seconds(&self) -> f64 {
        self.grid.began_ns().map_or(0.0, |began_ns| self.closed_ns.saturating_sub(began_ns) as f64 / 1e9)
    }

    /// Since when everything was traced, `CLOCK_MONOTONIC` nanoseconds.
    pub fn began_ns(&self) -> Option<u64> {
        self.grid.began_ns()
    }

    /// The programs in the recording.
    pub fn programs(&self) -> &BTreeMap<String, Program> {
        &self.programs
    }

    fn process(&mut self, process: &Process, state: Option<&GcState>, now_ns: u64) {
        let program = program(process);
        let entry = self.programs.entry(program.to_owned()).or_default();
        entry.processes += 1;
        entry.rubies.insert(process.image.version.to_string());
        if process.image.method != Tracing::Sites {
            self.without_cycles.insert(program.to_owned());
        }
        self.running.insert(process.pid, Running { gvl_ns: now_ns, ..Running::default() });
        state.inspect(|state| self.state(process.pid, state));
    }

    /// The kernel's peak is of the whole life of the process. It counts once it has grown, otherwise the memory at GC events does.
    fn state(&mut self, pid: u32, state: &GcState) {
        let Some(memory) = state.memory else { return };
        let Some(running) = self.running.get_mut(&pid) else { return };
        let before = *running.peak_before.get_or_insert(memory.peak_rss);
        let peak = if memory.peak_rss > before { memory.peak_rss } else { memory.rss };
        self.peak_rss = self.peak_rss.max(Some(peak));
    }

    fn cycle(&mut self, pid: u32, cycle: &GcCycle) {
        let begin_ns = cycle.pauses.iter().map(|pause| pause.begin_ns).fold(cycle.start.ts_ns, u64::min);
        let Some(bin) = self.grid.bin(begin_ns) else { return };
        for state in std::iter::once(&cycle.start).chain(&cycle.end) {
            self.state(pid, state);
        }
        let kind = if cycle.is_major() { &mut self.major } else { &mut self.minor };
        kind.add(bin, 1.0);
        for pause in &cycle.pauses {
            if let Some(bin) = self.grid.bin(pause.begin_ns) {
                self.pause_ns.add(bin, pause.ns as f64);
                self.pauses.add(bin, pause.ns, 1);
            }
        }
        self.triggers.charge(bin, cycle.trigger.as_deref().and_then(innermost), cycle.pause_ns() as f64);
    }

    fn sample(&mut self, sample: &StackSample) {
        if sample.state == ThreadState::Running {
            if let Some(bin) = self.grid.bin(sample.ts_ns) {
                self.cpu.add(bin, &sample.stack, sample.cpu_ns as f64);
            }
            return;
        }
        // A long sleep counts in all bins that it spans, not only where it began.
        let sums = &mut self.off_cpu;
        sums.meet(&sample.stack);
        self.grid
            .spread(sample.ts_ns, sample.ts_ns.saturating_add(sample.wall_ns), |bin, ns| sums.put(bin, ns));
    }

    fn request(&mut self, request: &Request) {
        self.requests.add(&mut self.grid, request);
        let endpoint = request.endpoint();
        let known = self.endpoints.contains_key(&endpoint) || self.endpoints.len() < ENDPOINTS;
        let endpoint = if known { endpoint } else { endpoint::OTHER.to_owned() };
        self.endpoints.entry(endpoint).or_default().add(&mut self.grid, request);
    }

    fn gvl_so_far(&mut self, process: &Process, so_far: &GvlSoFar) {
        let now_ns = self.now_ns;
        let Some(running) = self.running.get_mut(&process.pid) else { return };
        let from_ns = std::mem::replace(&mut running.gvl_ns, now_ns);
        // The growth is spread over the time since the last report.
        let so_far = so_far.growth(&mut running.reported);
        let length = now_ns.saturating_sub(from_ns) as f64;
        let waits: u64 = so_far.waits().map(|(_, count)| count).sum();
        let gvl = &mut self.gvl;
        gvl.reported = true;
        if length <= 0.0 {
            if let Some(bin) = self.grid.bin(now_ns) {
                gvl.waited.add(bin, so_far.wait_ns as f64);
                gvl.waits.add(bin, waits as f64);
            }
            return;
        }
        self.grid.spread(from_ns, now_ns, |bin, ns| {
            gvl.waited.add(bin, so_far.wait_ns as f64 * ns / length);
            gvl.waits.add(bin, waits as f64 * ns / length);
        });
    }

    fn gvl_thread(&mut self, thread: &GvlThreadSummary) {
        let sums = &thread.sums;
        let gvl = &mut self.gvl;
        gvl.only_blocked.insert(thread.coverage.only_blocked);
        gvl.wait_ns = gvl.wait_ns.saturating_add(sums.wait.ns);
        gvl.watched_ns = gvl.watched_ns.saturating_add(sums.watched_ns);
        gvl.wall_ns = gvl.wall_ns.saturating_add(sums.wall_ns);
        let length = thread.end_ns.saturating_sub(thread.begin_ns).max(1) as f64;
        self.grid.spread(thread.begin_ns, thread.end_ns, |bin, ns| {
            gvl.time.add(bin, sums.watched_ns as f64 * ns / length);
        });
    }

    fn gvl_wait(&mut self, wait: &GvlWait) {
        let Some(bin) = self.grid.bin(wait.begin_ns) else { return };
        let ran = wait.blocker.as_ref().and_then(|blocker| {
            let ran = blocker.ran.first().map(|(_, stack)| stack);
            ran.or(blocker.until.as_ref()).and_then(|stack| innermost(stack))
        });
        self.gvl.holders.charge(bin, ran, wait.ns as f64);
    }

    fn alloc(&mut self, sum: &AllocSum) {
        self.refills_lost += sum.lost;
        let length = sum.end_ns.saturating_sub(sum.begin_ns).max(1) as f64;
        let (objects, bytes) = (sum.objects() as f64, sum.bytes() as f64);
        let (of_objects, of_bytes) = (&mut self.objects, &mut self.bytes);
        self.grid.spread(sum.begin_ns, sum.end_ns, |bin, ns| {
            of_objects.add(bin, objects * ns / length);
            of_bytes.add(bin, bytes * ns / length);
        });
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) {
        if let Some(state) = &end.shutdown {
            self.state(process.pid, state);
        }
        self.running.remove(&process.pid);
        let time = &mut self.time;
        self.grid.spread(end.since_ns, end.ts_ns, |bin, ns| time.add(bin, ns));
    }
}

impl Observer for Side {
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        if !self.chosen.has(process) {
            return;
        }
        match seen {
            Seen::Process { state, now_ns, .. } => {
                self.now(now_ns);
                self.process(process, state, now_ns);
            }
            Seen::Cycle(cycle) => self.cycle(process.pid, cycle),
            Seen::Stack(sample) => self.sample(sample),
            Seen::Request(request) => self.request(request),
            Seen::GvlWait(wait) => self.gvl_wait(wait),
            Seen::GvlThread(thread) => self.gvl_thread(thread),
            Seen::GvlSoFar(so_far) => self.gvl_so_far(process, so_far),
            Seen::Alloc(sum) => self.alloc(sum),
            Seen::AllocStack(alloc) => {
                if let Some(bin) = self.grid.bin(alloc.ts_ns) {
                    self.allocating.add(bin, &alloc.stack, alloc.bytes() as f64);
                }
            }
            Seen::Ended(end) => self.ended(process, end),
            _ => {}
        }
    }
}

/// The innermost method of the application's own code or, if there is none, of any Ruby code.
fn innermost(stack: &[std::sync::Arc<Frame>]) -> Option<&Frame> {
    app_frame(stack).or_else(|| ruby_frame(stack)).map(AsRef::as_ref)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::services::tests::{process, state},
        model::Memory,
    };

    /// The peak of a part is not that of the process's life before it.
    #[test]
    fn peak() {
        let mut side = Side::new("A", Looked::default(), Chosen::default());
        let process = process(1, "web");
        let mut see = |rss, peak_rss| {
            let memory = Some(Memory { rss, peak_rss, ..Memory::default() });
            side.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
            for peak_rss in [1000, peak_rss] {
                side.state(1, &GcState { memory: memory.map(|of| Memory { peak_rss, ..of }), ..state(1, 1) });
            }
            side.peak_rss
        };
        assert_eq!((see(300, 1000), see(400, 1000)), (Some(300), Some(400)));
        // It was reached between two GC events.
        assert_eq!(see(500, 1200), Some(1200));
    }
}
