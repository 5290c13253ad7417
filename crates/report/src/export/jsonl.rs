//! JSON lines: `process`, `gc`, `gvl`, `request`, `alloc`, `load`, `work`, `exit`, `summary`, `refused` and `ledger`.

use std::{collections::BTreeMap, io::Write};

use gctrace_tunemygc::printable::printable_json;
use serde::{Serialize, Serializer};

use super::{
    ExportError, Exporter,
    fields::{Fields, Shape},
    summary::Summaries,
    text::Lines,
};
use crate::{
    clock::WallClock,
    console::say,
    ledger::Ledger,
    model::{
        GcCycle, GcState, GcWork, MemorySource, Pause, Process, Runtime,
        gvl::{
            GvlBlocked, GvlBlocker, GvlCoverage, GvlProcessSummary, GvlSplit, GvlSums, GvlTaskTimes,
            GvlThreadSummary, GvlWait, GvlWho,
        },
        request::Request,
        seen::{CyclesBefore, ProcessEnd, Seen},
    },
};

mod endpoints;
mod frames;
pub(super) mod gc;
mod request;
mod summary;

use gc::{Details, Gc, Info, Parts, PauseSpan, Phases, Stat, StatHeap};
use request::{LoadLine, RequestLine};
use summary::SummaryLine;

/// Writes JSON lines.
pub struct Jsonl<W: Write> {
    out: W,
    clock: WallClock,
    /// The line that is being written.
    line: Vec<u8>,
    lines: Lines,
    shape: Shape,
    summaries: Summaries,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Process {
        pid: u32,
        ns_pid: Option<u32>,
        ppid: Option<u32>,
        comm: &'a str,
        cmdline: Option<&'a [String]>,
        ruby: String,
        image: String,
        build_id: Option<&'a str>,
        method: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        misses: Option<&'static str>,
        probes: usize,
        start_ts: Option<f64>,
        hostname: Option<&'a str>,
        env: Option<&'a BTreeMap<String, String>>,
        #[serde(skip_serializing_if = "<[String]>::is_empty")]
        env_refused: &'a [String],
        container: Option<&'a str>,
        container_runtime: Option<&'static str>,
        container_name: Option<&'a str>,
        pod_uid: Option<&'a str>,
        pod: Option<&'a str>,
        pod_namespace: Option<&'a str>,
        unit: Option<&'a str>,
        cgroup: Option<&'a str>,
        stat: Option<Stat<'a>>,
    },
    Gc(Box<Gc<'a>>),
    Gvl(Gvl<'a>),
    Request(Box<RequestLine<'a>>),
    Work {
        ts: f64,
        pid: u32,
        tid: u32,
        comm: &'a str,
        phase: &'static str,
        begin_ns: u64,
        ns: u64,
    },
    /// Slots that threads took to allocate objects.
    Alloc {
        ts: f64,
        pid: u32,
        ns: u64,
        objects: u64,
        bytes: u64,
        slots: &'a BTreeMap<u32, u64>,
        refills: u64,
        lost: u64,
    },
    Load(LoadLine),
    Exit {
        ts: f64,
        pid: u32,
        reason: &'static str,
        cycles: Option<u64>,
        cycles_before: Option<u64>,
        cycles_missed: Option<u64>,
        lost: u64,
        stat: Option<Stat<'a>>,
    },
    Refused {
        pid: Option<u32>,
        image: &'a str,
        reason: &'a str,
    },
    Summary(Box<SummaryLine>),
    Ledger {
        balanced: bool,
        kernel: Counters<'a>,
        user: Counters<'a>,
    },
}

#[derive(Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
enum Gvl<'a> {
    Wait {
        ts: f64,
        pid: u32,
        tid: u32,
        comm: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        thread: Option<String>,
        begin_ns: u64,
        wait_ns: u64,
        request: Option<u64>,
        blocked_by: Option<Blocker<'a>>,
        stack: Option<Vec<String>>,
    },
    Thread {
        ts: f64,
        pid: u32,
        tid: u32,
        comm: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        thread: Option<String>,
        ended: bool,
        mode: &'static str,
        #[serde(flatten)]
        sums: Sums,
    },
    Process {
        ts: f64,
        pid: u32,
        comm: &'a str,
        threads: u64,
        mode: &'static str,
        span_ns: u64,
        gc_pause_ns: Option<u64>,
        gc_wait_ns: Option<u64>,
        gc_of_hold: Option<f64>,
        #[serde(flatten)]
        sums: Sums,
        blocked: Vec<Blocked<'a>>,
    },
}

#[derive(Serialize)]
struct Who<'a> {
    tid: u32,
    comm: &'a str,
}

impl<'a> Who<'a> {
    fn of(who: &'a GvlWho) -> Self {
        Self { tid: who.tid, comm: &who.comm }
    }
}

/// What threads did with the GVL.
#[derive(Serialize)]
struct Sums {
    wall_ns: u64,
    watched_ns: u64,
    waits: u64,
    wait_ns: u64,
    wait_max_ns: u64,
    wait_p50_ns: u64,
    wait_p99_ns: u64,
    holds: Option<u64>,
    hold_ns: Option<u64>,
    hold_max_ns: Option<u64>,
    away_ns: Option<u64>,
    /// What the scheduler did in these times.
    split: Option<Split>,
    /// Histogram of waits: upper bound of the bucket in nanoseconds (`null`: unbounded), and number of waits.
    wait_histogram: Vec<(Option<u64>, u64)>,
}

impl Sums {
    fn of(sums: &GvlSums) -> Self {
        let quantile = |percent| sums.waits.quantile(percent, sums.wait.max_ns);
        Self {
            wall_ns: sums.wall_ns,
            watched_ns: sums.watched_ns,
            waits: sums.wait.count,
            wait_ns: sums.wait.ns,
            wait_max_ns: sums.wait.max_ns,
            wait_p50_ns: quantile(50),
            wait_p99_ns: quantile(99),
            holds: sums.hold.map(|hold| hold.count),
            hold_ns: sums.hold.map(|hold| hold.ns),
            hold_max_ns: sums.hold.map(|hold| hold.max_ns),
            away_ns: sums.away.map(|away| away.ns),
            split: sums.split.map(Split::of),
            wait_histogram: sums.waits.buckets().collect(),
        }
    }
}

/// What native threads did, by what Ruby threads did with the GVL.
#[derive(Serialize)]
pub(super) struct Split {
    wait: Task,
    hold: Task,
    away: Task,
}

impl Split {
    pub(super) fn of(split: GvlSplit) -> Self {
        Self { wait: Task::of(split.waiting), hold: Task::of(split.holding), away: Task::of(split.away) }
    }
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the wire format")]
struct Task {
    cpu_ns: u64,
    runnable_ns: u64,
    blocked_ns: u64,
}

impl Task {
    fn of(times: GvlTaskTimes) -> Self {
        let GvlTaskTimes { cpu_ns, runnable_ns, blocked_ns } = times;
        Self { cpu_ns, runnable_ns, blocked_ns }
    }
}

/// The thread that held the GVL longest during a wait.
#[derive(Serialize)]
struct Blocker<'a> {
    #[serde(flatten)]
    who: Who<'a>,
    begin_ns: u64,
    hold_ns: u64,
    ran: Vec<Ran>,
    until: Option<Vec<String>>,
}

/// What it ran meanwhile.
#[derive(Serialize)]
struct Ran {
    samples: u64,
    stack: Vec<String>,
}

impl<'a> Blocker<'a> {
    fn of(blocker: &'a GvlBlocker) -> Self {
        Self {
            who: Who::of(&blocker.hold.who),
            begin_ns: blocker.hold.begin_ns,
            hold_ns: blocker.hold.ns,
            ran: blocker
                .ran
                .iter()
                .map(|(samples, stack)| Ran { samples: *samples, stack: frames::frame_texts(stack) })
                .collect(),
            until: blocker.until.as_deref().map(frames::frame_texts),
        }
    }
}

#[derive(Serialize)]
struct Blocked<'a> {
    waiter: Option<Who<'a>>,
    holder: Option<Who<'a>>,
    holds: u64,
    wait_ns: u64,
    wait_max_ns: u64,
}

impl<'a> Blocked<'a> {
    fn of(blocked: &'a GvlBlocked) -> Self {
        let GvlBlocked { waiter, holder, times } = blocked;
        Self {
            waiter: waiter.as_ref().map(Who::of),
            holder: holder.as_ref().map(Who::of),
            holds: times.count,
            wait_ns: times.ns,
            wait_max_ns: times.max_ns,
        }
    }
}

/// How the GVL was traced.
fn mode(coverage: GvlCoverage) -> &'static str {
    if coverage.only_blocked { "futex" } else { "exact" }
}

fn thread_text(thread: Option<u64>) -> Option<String> {
    thread.map(|thread| format!("{thread:#x}"))
}

struct Counters<'a>(&'a [(&'static str, u64)]);

impl Serialize for Counters<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

impl<W: Write> Jsonl<W> {
    /// An exporter that writes its lines to `out`.
    pub fn new(out: W, clock: WallClock, lines: Lines, shape: Shape) -> Self {
        Self { out, clock, line: Vec::new(), lines, shape, summaries: Summaries::default() }
    }

    fn write(&mut self, line: &Line<'_>) -> Result<(), ExportError> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, line).map_err(|error| ExportError::Stdout(error.into()))?;
        if let Some(fields) = &mut self.shape.fields {
            fields.keep(&mut self.line).map_err(|error| ExportError::Stdout(error.into()))?;
        }
        // Names come from outside, and lines are displayed on terminals.
        let text = String::from_utf8_lossy(&self.line);
        self.out.write_all(printable_json(&text).as_bytes()).map_err(ExportError::Stdout)?;
        self.out.write_all(b"\n").map_err(ExportError::Stdout)
    }
}

fn stat_of<'a>(process: &'a Process, state: &'a GcState) -> Stat<'a> {
    Stat { keys: &process.image.stat_keys, values: &state.stat }
}

fn stat_heap_of<'a>(process: &'a Process, state: &'a GcState) -> Option<StatHeap<'a>> {
    let keys = process.image.heap_keys.as_slice();
    (!keys.is_empty()).then_some(StatHeap { keys, heaps: &state.heaps })
}

impl<W: Write> Exporter for Jsonl<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.summaries.see(process, seen);
        match seen {
            Seen::Process { state, .. } => self.process(process, state),
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) => self.work(process, work),
            Seen::Request(request) => self.request(process, request),
            Seen::GvlWait(wait) => self.gvl_wait(process, wait),
            Seen::GvlThread(thread) => self.gvl_thread(process, thread),
            Seen::GvlProcess(summary) => self.gvl_process(process, summary),
            Seen::Alloc(sum) => self.write(&Line::Alloc {
                ts: self.clock.epoch_seconds(sum.begin_ns),
                pid: process.pid,
                ns: sum.end_ns - sum.begin_ns,
                objects: sum.objects(),
                bytes: sum.bytes(),
                slots: &sum.slots,
                refills: sum.refills,
                lost: sum.lost,
            }),
            Seen::Load(load) => {
                let ts = self.clock.epoch_seconds(load.ts_ns);
                self.write(&Line::Load(LoadLine::of(ts, process, load)))
            }
            Seen::Ended(end) => self.ended(process, end),
            _ => Ok(()),
        }
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        self.write(&Line::Refused { pid, image: path, reason })
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        self.out.flush().map_err(ExportError::Stdout)
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.write(&Line::Ledger {
            balanced: ledger.imbalances().is_empty(),
            kernel: Counters(&ledger.kernel_counters()),
            user: Counters(&ledger.user_counters()),
        })?;
        for name in self.shape.fields.iter().flat_map(Fields::unseen) {
            say(&format!("gctrace: --fields: no line has {name}"));
        }
        self.out.flush().map_err(ExportError::Stdout)
    }

    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        self.out.flush().map_err(ExportError::Stdout)
    }
}

/// The lines of what is seen.
impl<W: Write> Jsonl<W> {
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError> {
        self.write(&Line::Process {
            pid: process.pid,
            ns_pid: process.ns_pid,
            ppid: process.ppid,
            comm: &process.comm,
            cmdline: process.cmdline.as_deref(),
            ruby: process.image.version.to_string(),
            image: process.image.path.to_string_lossy().into_owned(),
            build_id: process.image.build_id.as_deref(),
            method: process.image.method.name(),
            misses: process.image.method.misses(),
            probes: process.image.probes,
            start_ts: process.start_ts,
            hostname: process.hostname.as_deref(),
            env: process.gc_env.as_ref(),
            env_refused: &process.gc_env_refused,
            container: process.container.id.as_deref(),
            container_runtime: process.container.runtime.map(Runtime::name),
            container_name: process.container.name.as_deref(),
            pod_uid: process.container.pod_uid.as_deref(),
            pod: process.container.pod.as_deref(),
            pod_namespace: process.container.namespace.as_deref(),
            unit: process.container.unit.as_deref(),
            cgroup: process.container.cgroup.as_deref(),
            stat: state.map(|state| stat_of(process, state)),
        })
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        if self.lines.none || cycle.is_shorter_than(self.lines.min_pause_ns) {
            return Ok(());
        }
        let mut phases = Phases { mark_ns: 0, sweep_ns: 0, other_ns: 0 };
        for Pause { mark_ns, sweep_ns, other_ns, .. } in &cycle.pauses {
            phases.mark_ns += mark_ns;
            phases.sweep_ns += sweep_ns;
            phases.other_ns += other_ns;
        }
        // The time is unknown for a program killed in its first pause, and if the records of all pauses were lost.
        let seen = !cycle.pauses.is_empty();
        let start = &cycle.start;
        let end = cycle.end.as_ref();
        let memory_end = end.and_then(|state| state.memory);
        let shares = memory_end.and_then(|memory| memory.shares);
        self.write(&Line::Gc(Box::new(Gc {
            ts: self.clock.epoch_seconds(start.ts_ns),
            pid: process.pid,
            tid: start.tid,
            comm: &cycle.comm,
            ruby: process.image.version.to_string(),
            container: process.container.id.as_deref(),
            count: cycle.count,
            kind: cycle.kind(),
            gc_by: start.info.gc_by,
            major_by: start.info.major_by,
            compacting: cycle.compacted(process),
            pause_ns: seen.then(|| cycle.pause_ns()),
            max_pause_ns: seen.then(|| cycle.max_pause_ns()),
            phases: seen.then_some(phases),
            steps: cycle.pauses.len(),
            mark_steps: cycle.pauses.iter().filter(|pause| pause.mark_ns > 0).count(),
            sweep_steps: cycle.pauses.iter().filter(|pause| pause.sweep_ns > 0).count(),
            complete: end.is_some(),
            end_ts: end.map(|state| self.clock.epoch_seconds(state.ts_ns)),
            details: (!self.shape.brief).then(|| Details {
                pauses: cycle.pauses.iter().map(PauseSpan::of).collect(),
                stat: stat_of(process, start),
                stat_end: end.map(|state| stat_of(process, state)),
                stat_heap: stat_heap_of(process, start),
                stat_heap_end: end.and_then(|state| stat_heap_of(process, state)),
                latest_gc_info: Info(start.info),
                latest_gc_info_end: end.map(|state| Info(state.info)),
            }),
            rss: start.memory.map(|memory| memory.rss),
            peak_rss: start.memory.map(|memory| memory.peak_rss),
            rss_end: memory_end.map(|memory| memory.rss),
            peak_rss_end: memory_end.map(|memory| memory.peak_rss),
            // The less exact of the two sources.
            rss_source: start
                .memory
                .into_iter()
                .chain(memory_end)
                .map(|m| m.source)
                .max()
                .map(MemorySource::name),
            memory: start.memory.map(Parts::of),
            memory_end: memory_end.map(Parts::of),
            pss_end: shares.map(|shares| shares.pss),
            private_dirty_end: shares.map(|shares| shares.private_dirty),
            shares_ts: shares.and_then(|shares| shares.read_ns).map(|ns| self.clock.epoch_seconds(ns)),
            request: cycle.request,
            stack: cycle.trigger.as_deref().map(frames::frame_texts),
            lost: cycle.lost,
        })))
    }

    fn work(&mut self, process: &Process, work: &GcWork) -> Result<(), ExportError> {
        if self.lines.none || work.ns < self.lines.min_pause_ns {
            return Ok(());
        }
        self.write(&Line::Work {
            ts: self.clock.epoch_seconds(work.begin_ns),
            pid: process.pid,
            tid: work.tid,
            comm: &work.comm,
            phase: work.phase.name(),
            begin_ns: work.begin_ns,
            ns: work.ns,
        })
    }

    fn request(&mut self, process: &Process, request: &Request) -> Result<(), ExportError> {
        if self.lines.none {
            return Ok(());
        }
        let ts = self.clock.epoch_seconds(request.begin_ns);
        self.write(&Line::Request(Box::new(RequestLine::of(ts, process, request))))
    }

    fn gvl_wait(&mut self, process: &Process, wait: &GvlWait) -> Result<(), ExportError> {
        if self.lines.none {
            return Ok(());
        }
        self.write(&Line::Gvl(Gvl::Wait {
            ts: self.clock.epoch_seconds(wait.begin_ns),
            pid: process.pid,
            tid: wait.who.tid,
            comm: &wait.who.comm,
            thread: thread_text(wait.thread),
            begin_ns: wait.begin_ns,
            wait_ns: wait.ns,
            request: wait.request.filter(|id| *id != 0),
            blocked_by: wait.blocker.as_ref().map(Blocker::of),
            stack: wait.stack.as_deref().map(frames::frame_texts),
        }))
    }

    fn gvl_thread(&mut self, process: &Process, thread: &GvlThreadSummary) -> Result<(), ExportError> {
        self.write(&Line::Gvl(Gvl::Thread {
            ts: self.clock.epoch_seconds(thread.end_ns),
            pid: process.pid,
            tid: thread.who.tid,
            comm: &thread.who.comm,
            thread: thread_text(thread.thread),
            ended: thread.ended,
            mode: mode(thread.coverage),
            sums: Sums::of(&thread.sums),
        }))
    }

    fn gvl_process(&mut self, process: &Process, summary: &GvlProcessSummary) -> Result<(), ExportError> {
        self.write(&Line::Gvl(Gvl::Process {
            ts: self.clock.epoch_seconds(summary.end_ns),
            pid: process.pid,
            comm: &process.comm,
            threads: summary.threads,
            mode: mode(summary.coverage),
            span_ns: summary.span_ns,
            gc_pause_ns: summary.gc.map(|gc| gc.pause_ns),
            gc_wait_ns: summary.gc.and_then(|gc| gc.wait_ns),
            gc_of_hold: summary.gc_of_hold(),
            sums: Sums::of(&summary.sums),
            blocked: summary.blocked.iter().map(Blocked::of).collect(),
        }))
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        self.write(&Line::Exit {
            ts: self.clock.epoch_seconds(end.ts_ns),
            pid: process.pid,
            reason: end.reason.name(),
            cycles: process.image.method.sees_cycles().then_some(end.cycles),
            cycles_before: match end.before {
                CyclesBefore::Earlier(cycles) | CyclesBefore::Missed(cycles) => Some(cycles),
                CyclesBefore::Unknown => None,
            },
            cycles_missed: match end.before {
                CyclesBefore::Missed(cycles) => Some(cycles),
                CyclesBefore::Earlier(_) => Some(0),
                CyclesBefore::Unknown => None,
            },
            lost: end.lost,
            stat: end.shutdown.as_ref().map(|state| stat_of(process, state)),
        })?;
        let done = self.summaries.ended(process, end);
        self.write(&Line::Summary(Box::new(SummaryLine::of(&done, self.clock))))
    }
}
