//! `--slower-than`: slow requests in place of cycles, each with what its thread stood in: GC pauses and long waits for the GVL.

use std::{collections::VecDeque, io::Write};

use super::{
    ExportError, Exporter,
    place::{place, program, started_by},
    text::{clip, duration, time_of_day, why},
};
use crate::{
    clock::{WallClock, monotonic_ns},
    ledger::Ledger,
    model::{GcCycle, Process, gvl::GvlWait, request::Request, seen::Seen, source::ruby_frame},
    words::{percent, plural},
};

/// Cycles, and as many waits, that are kept for requests that have not ended.
const KEPT: usize = 4096;
/// Requests that wait for what is reported of them later.
const PENDING: usize = 64;
/// For how long they wait: a cycle is reported when its lazy sweep is over, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;
/// Cycles and waits that are shown of a request.
const SHOWN: usize = 12;
/// Columns of a line.
const WIDTH: usize = 80;

/// Writes slow requests for people.
pub struct SlowRequests<W: Write> {
    out: W,
    clock: WallClock,
    least_ns: u64,
    cycles: Kept<Cycle>,
    waits: Kept<Wait>,
    pending: VecDeque<Pending>,
    slow: u64,
    all: u64,
}

/// The last of something, and until when there were others.
struct Kept<T> {
    last: VecDeque<(u32, T)>,
    dropped_ns: u64,
}

impl<T> Kept<T> {
    fn push(&mut self, pid: u32, one: T, begin_ns: impl Fn(&T) -> u64) {
        if self.last.len() >= KEPT
            && let Some((_, oldest)) = self.last.pop_front()
        {
            self.dropped_ns = self.dropped_ns.max(begin_ns(&oldest));
        }
        self.last.push_back((pid, one));
    }

    fn of(&self, pid: u32) -> impl Iterator<Item = &T> {
        self.last.iter().filter(move |(of, _)| *of == pid).map(|(_, one)| one)
    }
}

struct Cycle {
    request: Option<u64>,
    begin_ns: u64,
    title: String,
    by: Option<String>,
    /// Thread, begin, length.
    pauses: Box<[(u32, u64, u64)]>,
}

struct Wait {
    tid: u32,
    begin_ns: u64,
    ns: u64,
    holder: Option<String>,
    /// What the sampling clock saw the holder do most often.
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
    /// Requests of at least `least_ns` nanoseconds go to `out`.
    pub fn new(out: W, clock: WallClock, least_ns: u64) -> Self {
        Self {
            out,
            clock,
            least_ns,
            cycles: Kept { last: VecDeque::new(), dropped_ns: 0 },
            waits: Kept { last: VecDeque::new(), dropped_ns: 0 },
            pending: VecDeque::new(),
            slow: 0,
            all: 0,
        }
    }

    fn request(&mut self, process: &Process, request: &Request, now_ns: u64) -> std::io::Result<()> {
        self.all += 1;
        let Some(ns) = request.duration_ns().filter(|ns| *ns >= self.least_ns) else { return Ok(()) };
        self.slow += 1;
        self.pending.push_back(Pending {
            due_ns: now_ns.saturating_add(PATIENCE_NS),
            pid: process.pid,
            program: program(process),
            gvl: process.image.gvl.is_some(),
            request: request.clone(),
            ns,
        });
        if self.pending.len() > PENDING { self.write_next() } else { Ok(()) }
    }

    /// Writes those that have waited long enough.
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
        let first = request.first_byte_ns;
        let first = first.map_or_else(String::new, |ns| format!("; first byte after {}", duration(ns)));
        writeln!(out, "  {} (pid {pid}, thread {}){first}", clip(&next.program, 24), request.tid)?;
        self.write_gc(&next)?;
        if next.gvl { self.write_waits(&next) } else { Ok(()) }
    }

    fn write_gc(&mut self, next: &Pending) -> std::io::Result<()> {
        let Pending { pid, request, ns, .. } = next;
        let out = &mut self.out;
        if request.gcs == 0 && request.gc_ns == 0 {
            return writeln!(out, "  GC: none in this thread");
        }
        let share = percent(request.gc_ns, *ns);
        let (sum, started) = (duration(request.gc_ns), plural(request.gcs.into(), "cycle"));
        writeln!(out, "  GC: {sum} ({share}) in pauses of this thread; it started {started}")?;
        let within = request.begin_ns..request.begin_ns.saturating_add(*ns);
        let (mut known, mut known_ns) = (0, 0);
        let mut lines = Vec::new();
        for cycle in self.cycles.of(*pid) {
            let own = cycle.request == Some(request.id);
            let of_it =
                |(tid, begin_ns, _): &&(u32, u64, u64)| *tid == request.tid && within.contains(begin_ns);
            let pauses: Vec<_> = cycle.pauses.iter().filter(of_it).collect();
            if !own && pauses.is_empty() {
                continue;
            }
            known += u32::from(own);
            let ns: u64 = pauses.iter().map(|(_, _, ns)| ns).sum();
            known_ns += ns;
            let begin_ns = if own { cycle.begin_ns } else { pauses.first().map_or(0, |pause| pause.1) };
            let times = match pauses.iter().map(|(_, _, ns)| *ns).max() {
                None => "no pause here".to_owned(),
                Some(_) if pauses.len() == 1 => duration(ns),
                Some(max) => format!("{} in {}, longest {}", duration(ns), pauses.len(), duration(max)),
            };
            let by = match &cycle.by {
                Some(by) if own => format!("\n{:14}by {}", "", clip(by, WIDTH - 17)),
                None if own => String::new(),
                _ => format!("\n{:14}not started by this request", ""),
            };
            lines.push(Line { at_ns: begin_ns, ns, text: format!("{}: {times}{by}", cycle.title) });
        }
        write_lines(out, request.begin_ns, lines)?;
        let (left, left_ns) = (request.gcs.saturating_sub(known), request.gc_ns.saturating_sub(known_ns));
        if left > 0 || left_ns > 0 {
            let left = [
                (left > 0).then(|| plural(left.into(), "cycle")),
                (left_ns > 0).then(|| format!("{} in pauses", duration(left_ns))),
            ];
            let left = left.into_iter().flatten().collect::<Vec<_>>().join(", ");
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
        writeln!(out, "  GVL: {count} seen, {} ({share})", duration(sum))?;
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
            writeln!(out, "    earlier waits were too many to keep")?;
        }
        Ok(())
    }
}

/// What took longest in a request, in the order of time.
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

impl<W: Write> Exporter for SlowRequests<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let pid = process.pid;
        match seen {
            Seen::Cycle(cycle) => self.cycles.push(pid, cycle_of(cycle), |cycle| cycle.begin_ns),
            Seen::GvlWait(wait) => self.waits.push(pid, wait_of(wait), |wait| wait.begin_ns),
            Seen::Request(request) => {
                self.request(process, request, monotonic_ns()).map_err(ExportError::Stdout)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        self.write_due(monotonic_ns()).and_then(|()| self.out.flush()).map_err(ExportError::Stdout)
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        let written = self.write_due(u64::MAX).and_then(|()| {
            let (slow, all, least) = (self.slow, plural(self.all, "request"), duration(self.least_ns));
            writeln!(self.out, "{slow} of {all} took {least} or longer")?;
            self.out.flush()
        });
        written.map_err(ExportError::Stdout)
    }
}

#[cfg(test)]
mod tests;
