//! `--slower-than`: slow requests instead of cycles, each with what stopped its thread (GC pauses and long waits for the GVL), and where it was
//! by samples.

use std::{collections::VecDeque, io::Write};

mod samples;

use samples::Sampled;

use super::{
    ExportError, Exporter,
    place::{clip, place, program, started_by},
    text::{duration, time_of_day, why},
};
use crate::{
    clock::WallClock,
    ledger::Ledger,
    model::{
        GcCycle, Process,
        gvl::{GvlSplit, GvlTaskTimes, GvlWait},
        request::{GcTime, PageFaults, Request, RequestMemory, States},
        seen::Seen,
        source::ruby_frame,
        trace::Caller,
    },
    words::{data_size, percent, plural},
};

/// Maximum number of cycles, and of waits, kept for requests that have not ended.
const KEPT: usize = 4096;
/// Maximum number of samples kept, of all requests of all processes: hundreds arrive each second and CPU. Their stacks are shared.
const SAMPLES: usize = 1 << 16;
/// Maximum number of requests that wait for later reports about them.
const PENDING: usize = 64;
/// How long they wait, nanoseconds: a cycle is reported when its lazy sweep has ended.
const PATIENCE_NS: u64 = 1_000_000_000;
/// Maximum number of cycles and waits shown per request.
const SHOWN: usize = 12;
/// From this growth or loss of the process's resident memory on, a request has a line about memory, bytes.
const NOTABLE_GROWTH: u64 = 1 << 20;
/// The same for page faults without I/O, each of which takes about a microsecond or less. One with I/O is always worth a line.
const NOTABLE_FAULTS: u64 = 1000;
/// Maximum width of a line.
const WIDTH: usize = 80;

/// Writes slow requests as text.
pub struct SlowRequests<W: Write> {
    out: W,
    clock: WallClock,
    least_ns: u64,
    cycles: Recent<Cycle>,
    waits: Recent<Wait>,
    samples: Recent<Sampled>,
    pending: VecDeque<Pending>,
    /// Number of slow ones, and of all: requests and jobs here, runs of programs below.
    requests: (u64, u64),
    runs: (u64, u64),
    /// Time of the last flush, `CLOCK_MONOTONIC` nanoseconds.
    now_ns: u64,
}

/// The most recent items, and the latest start time of those that were dropped.
struct Recent<T> {
    most: usize,
    /// Each with its pid, and the latest start time of those up to it.
    last: VecDeque<(u32, u64, T)>,
    dropped_ns: u64,
}

impl<T> Recent<T> {
    fn new(most: usize) -> Self {
        Self { most, last: VecDeque::new(), dropped_ns: 0 }
    }

    fn push(&mut self, pid: u32, one: T, begin_ns: impl Fn(&T) -> u64) {
        if self.last.len() >= self.most
            && let Some((_, _, oldest)) = self.last.pop_front()
        {
            self.dropped_ns = self.dropped_ns.max(begin_ns(&oldest));
        }
        let latest_ns = self.last.back().map_or(0, |(_, latest_ns, _)| *latest_ns);
        self.last.push_back((pid, latest_ns.max(begin_ns(&one)), one));
    }

    fn of(&self, pid: u32) -> impl Iterator<Item = &T> {
        self.since(pid, 0)
    }

    /// Those of a process, without the first ones that all began earlier than this.
    fn since(&self, pid: u32, begin_ns: u64) -> impl Iterator<Item = &T> {
        let from = self.last.partition_point(|(_, latest_ns, _)| *latest_ns < begin_ns);
        self.last.range(from..).filter(move |(of, ..)| *of == pid).map(|(.., one)| one)
    }
}

struct Cycle {
    request: Option<u64>,
    begin_ns: u64,
    title: String,
    by: Option<String>,
    /// Thread, start, length (nanoseconds).
    pauses: Box<[(u32, u64, u64)]>,
}

struct Wait {
    tid: u32,
    begin_ns: u64,
    ns: u64,
    holder: Option<String>,
    /// Location of the innermost Ruby frame in the holder's most frequent stack.
    ran: Option<String>,
}

/// Something that happened in a request: when, for how long, and what.
struct Line {
    at_ns: u64,
    ns: u64,
    text: String,
}

struct Pending {
    due_ns: u64,
    pid: u32,
    program: String,
    gvl: bool,
    request: Request,
    ns: u64,
}

impl<W: Write> SlowRequests<W> {
    /// Writes requests of at least `least_ns` nanoseconds to `out`.
    pub fn new(out: W, clock: WallClock, least_ns: u64) -> Self {
        Self {
            out,
            clock,
            least_ns,
            cycles: Recent::new(KEPT),
            waits: Recent::new(KEPT),
            samples: Recent::new(SAMPLES),
            pending: VecDeque::new(),
            requests: (0, 0),
            runs: (0, 0),
            now_ns: 0,
        }
    }

    fn request(&mut self, process: &Process, request: &Request) -> std::io::Result<()> {
        let (slow, all) = if request.is_run { &mut self.runs } else { &mut self.requests };
        *all += 1;
        let Some(ns) = request.duration_ns().filter(|ns| *ns >= self.least_ns) else { return Ok(()) };
        *slow += 1;
        self.pending.push_back(Pending {
            due_ns: self.now_ns.max(request.begin_ns.saturating_add(ns)).saturating_add(PATIENCE_NS),
            pid: process.pid,
            program: program(process),
            gvl: process.image.gvl.is_some(),
            request: request.clone(),
            ns,
        });
        if self.pending.len() > PENDING { self.write_next() } else { Ok(()) }
    }

    /// Writes the requests that have waited long enough.
    fn write_due(&mut self, now_ns: u64) -> std::io::Result<()> {
        while self.pending.front().is_some_and(|next| next.due_ns <= now_ns) {
            self.write_next()?;
        }
        Ok(())
    }

    fn write_next(&mut self) -> std::io::Result<()> {
        let Some(next) = self.pending.pop_front() else { return Ok(()) };
        let Pending { pid, request, ns, .. } = &next;
        let at = time_of_day(self.clock.epoch_seconds(request.begin_ns));
        let status = request.status.map_or_else(String::new, |status| format!(" {status}"));
        let out = &mut self.out;
        writeln!(out, "{at}Z  {}  {}{status}", duration(*ns), clip(&request.endpoint(), 300))?;
        if request.is_run {
            return self.write_run(&next);
        }
        let queue = request.queue_ns;
        let queue = queue.map_or_else(String::new, |ns| format!("; waited {} for a thread", duration(ns)));
        let first = request.first_byte_ns;
        let first = first.map_or_else(String::new, |ns| format!("; first byte after {}", duration(ns)));
        writeln!(out, "  {} (pid {pid}, thread {}){queue}{first}", clip(&next.program, 24), request.tid)?;
        if let Some(job) = &request.job {
            let queue = job.queue.as_ref().map(|queue| format!("queue {}", clip(queue, 30)));
            let jid = job.jid.as_ref().map(|jid| format!("job {}", clip(jid, 24)));
            let latency = job.latency_ns.map(|ns| format!("enqueued {} before", duration(ns)));
            let parts: Vec<String> = queue.into_iter().chain(jid).chain(latency).collect();
            if !parts.is_empty() {
                writeln!(out, "  {}", parts.join(", "))?;
            }
        }
        if let Some(handler) = &request.handler {
            writeln!(out, "  handled by {}", place(handler))?;
        }
        if let Some(trace) = &request.trace {
            let caller = trace.caller.map_or_else(String::new, |Caller { span_id, sampled }| {
                let sampled = if sampled { "" } else { " (not sampled)" };
                format!(", parent span {span_id:016x}{sampled}")
            });
            writeln!(out, "  trace {}{caller}", trace.trace_id_text())?;
        }
        if let Some(States { cpu_ns, runnable_ns, blocked_ns }) = request.states {
            let share = |ns: u64| format!("{} ({})", duration(ns), percent(ns, next.ns));
            let (cpu, runnable, blocked) = (share(cpu_ns), share(runnable_ns), share(blocked_ns));
            writeln!(self.out, "  CPU: {cpu}, ready {runnable}, waiting {blocked}")?;
        }
        if let Some(split) = &request.split {
            self.write_split(split, request.gc_ns, next.ns)?;
        }
        if let Some(bytes) = request.response_bytes {
            writeln!(self.out, "  response: {}", data_size(bytes))?;
        }
        if let Some(alloc) = request.alloc {
            let objects = plural(alloc.slots, "object");
            writeln!(self.out, "  allocated: {objects}, {}", data_size(alloc.bytes))?;
        }
        if let Some(memory) = memory(&request.memory) {
            writeln!(self.out, "  memory: {memory}")?;
        }
        samples::write(&mut self.out, &self.samples, &next)?;
        self.write_gc(&next)?;
        if next.gvl { self.write_waits(&next) } else { Ok(()) }
    }

    /// The run of a program has no thread of its own: its GC is that of all its threads, and its cycles do not name the run.
    fn write_run(&mut self, next: &Pending) -> std::io::Result<()> {
        let Pending { pid, program, request, ns, .. } = next;
        writeln!(self.out, "  {} (pid {pid}), the run of a program", clip(program, 24))?;
        match request.gcs.zip(request.gc_ns) {
            Some((0, 0)) => writeln!(self.out, "  GC: none"),
            Some((gcs, gc_ns)) => {
                let (sum, share) = (duration(gc_ns), percent(gc_ns, *ns));
                writeln!(self.out, "  GC: {sum} ({share}) in pauses; {}", plural(gcs.into(), "cycle"))
            }
            None => writeln!(self.out, "  GC: unknown"),
        }
    }

    /// How its time was spent, in parts that do not overlap. A GC pause in its own thread is time with the GVL.
    fn write_split(&mut self, split: &GvlSplit, gc_ns: Option<u64>, ns: u64) -> std::io::Result<()> {
        let share = |part: u64| format!("{} ({})", duration(part), percent(part, ns));
        let of = |times: GvlTaskTimes| times.cpu_ns + times.runnable_ns + times.blocked_ns;
        let held = of(split.holding);
        let with = match gc_ns.filter(|gc| *gc <= held) {
            Some(gc_ns) => format!("{} in Ruby, {} in own GC", share(held - gc_ns), share(gc_ns)),
            None => format!("{} in Ruby and own GC", share(held)),
        };
        let GvlTaskTimes { cpu_ns, runnable_ns, blocked_ns } = split.away;
        writeln!(self.out, "  time: {with},")?;
        writeln!(self.out, "        {} waiting for the GVL; without it", share(of(split.waiting)))?;
        let (cpu, ready, blocked) = (share(cpu_ns), share(runnable_ns), share(blocked_ns));
        writeln!(self.out, "        {cpu} on a CPU, {ready} ready, {blocked} blocked")
    }

    fn write_gc(&mut self, next: &Pending) -> std::io::Result<()> {
        let Pending { pid, request, ns, .. } = next;
        let out = &mut self.out;
        let figures = request.gcs.zip(request.gc_ns);
        match figures {
            Some((0, 0)) => write!(out, "  GC: none in this thread")?,
            Some((gcs, gc_ns)) => {
                let (sum, share) = (duration(gc_ns), percent(gc_ns, *ns));
                let started = plural(gcs.into(), "cycle");
                write!(out, "  GC: {sum} ({share}) in pauses of this thread; it started {started}")?;
            }
            None => write!(out, "  GC: unknown for this thread")?,
        }
        match request.gc_other {
            Some(GcTime { pauses: 0, .. }) => writeln!(out, "; none in others")?,
            Some(GcTime { pauses, ns: other_ns }) => {
                let (sum, share) = (duration(other_ns), percent(other_ns, *ns));
                let pauses = plural(pauses.into(), "pause");
                writeln!(out, "\n      {sum} ({share}) in {pauses} of other threads meanwhile")?;
            }
            None => writeln!(out, "; unknown for others")?,
        }
        if matches!(figures, Some((0, 0))) && matches!(request.gc_other, Some(GcTime { pauses: 0, .. })) {
            return Ok(());
        }
        let mut known = Share::default();
        let mut lines = Vec::new();
        for cycle in self.cycles.of(*pid) {
            if let Some((line, share)) = share_of(cycle, request, *ns) {
                known.cycles += share.cycles;
                known.own_ns += share.own_ns;
                known.other_ns += share.other_ns;
                lines.push(line);
            }
        }
        write_lines(out, request.begin_ns, lines)?;
        let other_ns = request.gc_other.map_or(0, |other| other.ns).saturating_sub(known.other_ns);
        let (gcs, gc_ns) = figures.unwrap_or_default();
        let (left, left_ns) = (gcs.saturating_sub(known.cycles), gc_ns.saturating_sub(known.own_ns));
        let left = [
            (left > 0).then(|| plural(left.into(), "cycle")),
            (left_ns > 0).then(|| format!("{} in pauses", duration(left_ns))),
            (other_ns > 0).then(|| format!("{} in pauses of others", duration(other_ns))),
        ];
        let left: Vec<String> = left.into_iter().flatten().collect();
        if !left.is_empty() {
            let left = left.join(", ");
            writeln!(out, "    not listed: {left} (not over yet, lost, or too many to keep)")?;
        }
        Ok(())
    }

    fn write_waits(&mut self, next: &Pending) -> std::io::Result<()> {
        let Pending { pid, request, ns, .. } = next;
        let end_ns = request.begin_ns.saturating_add(*ns);
        let of_it = |wait: &&Wait| {
            wait.tid == request.tid
                && wait.begin_ns >= request.begin_ns
                && wait.begin_ns.saturating_add(wait.ns) <= end_ns
        };
        let waits: Vec<_> = self.waits.of(*pid).filter(of_it).collect();
        let out = &mut self.out;
        let sum: u64 = waits.iter().map(|wait| wait.ns).sum();
        let (count, share) = (plural(waits.len() as u64, "long wait"), percent(sum, *ns));
        if let Some(all_ns) = request.gvl_wait_ns {
            writeln!(out, "  GVL: waited {} ({}) for it in all", duration(all_ns), percent(all_ns, *ns))?;
            writeln!(out, "       {count} seen, {} ({share})", duration(sum))?;
        } else {
            writeln!(out, "  GVL: {count} seen, {} ({share})", duration(sum))?;
        }
        let line = |wait: &&Wait| {
            let mut line = format!("waited {}", duration(wait.ns));
            for (what, who) in [("held by", &wait.holder), ("running", &wait.ran)] {
                if let Some(who) = who {
                    line = format!("{line}\n{:14}{what} {}", "", clip(who, WIDTH - 22));
                }
            }
            Line { at_ns: wait.begin_ns, ns: wait.ns, text: line }
        };
        write_lines(out, request.begin_ns, waits.iter().map(line).collect())?;
        if self.waits.dropped_ns >= request.begin_ns {
            writeln!(out, "    older waits were dropped: too many to keep")?;
        }
        Ok(())
    }
}

/// The contribution of a cycle to a request.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// 1 if the request started the cycle, otherwise 0.
    cycles: u32,
    /// Pauses of the cycle in the request's thread, nanoseconds.
    own_ns: u64,
    /// Pauses of the cycle in other threads during the request, nanoseconds.
    other_ns: u64,
}

/// The line and the contribution of a cycle to a request of `ns` nanoseconds; `None` if the cycle did not affect the request.
fn share_of(cycle: &Cycle, request: &Request, ns: u64) -> Option<(Line, Share)> {
    let within = request.begin_ns..request.begin_ns.saturating_add(ns);
    let started = cycle.request == Some(request.id);
    let (mut own, mut others) = (Vec::new(), Vec::new());
    let mut first_ns = u64::MAX;
    for &(tid, begin_ns, ns) in &cycle.pauses {
        // A pause of another thread may begin before the request, or end after it.
        let from_ns = begin_ns.max(within.start);
        let until_ns = begin_ns.saturating_add(ns).min(within.end);
        if tid == request.tid && within.contains(&begin_ns) {
            own.push(ns);
        } else if tid != request.tid && from_ns < until_ns {
            others.push(until_ns - from_ns);
        } else {
            continue;
        }
        first_ns = first_ns.min(from_ns);
    }
    if !started && own.is_empty() && others.is_empty() {
        return None;
    }
    let (own_ns, other_ns) = (own.iter().sum(), others.iter().sum());
    let in_own = own.iter().max().map(|max| match own.len() {
        1 => duration(own_ns),
        pauses => format!("{} in {pauses}, longest {}", duration(own_ns), duration(*max)),
    });
    let in_others = (!others.is_empty()).then(|| format!("{} in other threads", duration(other_ns)));
    let times = match (in_own, in_others) {
        (None, None) => "no pause here".to_owned(),
        (Some(times), None) | (None, Some(times)) => times,
        (Some(own), Some(others)) => format!("{own}\n{:14}and {others}", ""),
    };
    let by = match &cycle.by {
        Some(by) if started => format!("\n{:14}by {}", "", clip(by, WIDTH - 17)),
        None if started => String::new(),
        _ => format!("\n{:14}not started by this request", ""),
    };
    let text = format!("{}: {times}{by}", cycle.title);
    let at_ns = if started { cycle.begin_ns } else { first_ns };
    Some((Line { at_ns, ns: own_ns + other_ns, text }, Share { cycles: started.into(), own_ns, other_ns }))
}

/// Writes the longest events of a request, in chronological order.
fn write_lines(out: &mut impl Write, begin_ns: u64, mut lines: Vec<Line>) -> std::io::Result<()> {
    let shorter = lines.len().saturating_sub(SHOWN);
    lines.sort_by_key(|line| std::cmp::Reverse(line.ns));
    lines.truncate(SHOWN);
    lines.sort_by_key(|line| line.at_ns);
    for Line { at_ns, text, .. } in &lines {
        writeln!(out, "    +{:<8} {text}", duration(at_ns.saturating_sub(begin_ns)))?;
    }
    if shorter > 0 {
        writeln!(out, "    and {shorter} shorter")?;
    }
    Ok(())
}

fn cycle_of(cycle: &GcCycle) -> Cycle {
    let pauses = cycle.pauses.iter().map(|pause| (pause.tid, pause.begin_ns, pause.ns));
    Cycle {
        request: cycle.request,
        begin_ns: cycle.start.ts_ns,
        title: format!("{} GC #{} ({})", cycle.kind(), cycle.count, why(cycle)),
        by: cycle.trigger.as_deref().filter(|_| cycle.request.is_some()).and_then(started_by),
        pauses: pauses.collect(),
    }
}

fn wait_of(wait: &GvlWait) -> Wait {
    let blocker = wait.blocker.as_ref();
    let ran = blocker.and_then(|blocker| blocker.ran.first()).and_then(|(_, stack)| ruby_frame(stack));
    Wait {
        tid: wait.who.tid,
        begin_ns: wait.begin_ns,
        ns: wait.ns,
        holder: blocker
            .map(|blocker| format!("{} {}", blocker.hold.who.tid, clip(&blocker.hold.who.comm, 16))),
        ran: ran.map(|frame| place(frame)),
    }
}

/// How much the process grew and the page faults of the thread, as far as they are known, if any of them is worth a line.
fn memory(memory: &RequestMemory) -> Option<String> {
    let RequestMemory { faults, rss_growth } = *memory;
    let grew = rss_growth.is_some_and(|bytes| bytes.unsigned_abs() >= NOTABLE_GROWTH);
    let faulted = faults.is_some_and(|faults| faults.major > 0 || faults.minor >= NOTABLE_FAULTS);
    let growth = rss_growth.map(|bytes| {
        let sign = if bytes < 0 { '-' } else { '+' };
        format!("RSS of the process {sign}{}", data_size(bytes.unsigned_abs()))
    });
    let faults = faults.map(|PageFaults { minor, major }| {
        let all = plural(minor.saturating_add(major), "page fault");
        if major == 0 { all } else { format!("{all} ({major} with I/O)") }
    });
    (grew || faulted).then(|| growth.into_iter().chain(faults).collect::<Vec<_>>().join(", "))
}

impl<W: Write> Exporter for SlowRequests<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let pid = process.pid;
        match seen {
            Seen::Cycle(cycle) => self.cycles.push(pid, cycle_of(cycle), |cycle| cycle.begin_ns),
            Seen::GvlWait(wait) => self.waits.push(pid, wait_of(wait), |wait| wait.begin_ns),
            Seen::Stack(sample) => {
                if let Some(sample) = Sampled::of(sample) {
                    self.samples.push(pid, sample, Sampled::begin_ns);
                }
            }
            Seen::Request(request) => self.request(process, request).map_err(ExportError::Stdout)?,
            _ => {}
        }
        Ok(())
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.now_ns = now_ns;
        self.write_due(now_ns).and_then(|()| self.out.flush()).map_err(ExportError::Stdout)
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        let written = self.write_due(u64::MAX).and_then(|()| {
            let part = |(slow, all): (u64, u64), what| format!("{slow} of {}", plural(all, what));
            let least = duration(self.least_ns);
            let requests = part(self.requests, "request");
            match self.runs {
                (_, 0) => writeln!(self.out, "{requests} took {least} or longer")?,
                runs => {
                    let runs = part(runs, "program");
                    writeln!(self.out, "{requests}, and {runs} that ran and ended, took {least} or longer")?;
                }
            }
            self.out.flush()
        });
        written.map_err(ExportError::Stdout)
    }
}

#[cfg(test)]
pub(super) mod tests;
