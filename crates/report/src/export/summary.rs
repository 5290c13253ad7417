//! The summary at the end of a run: what the garbage collector did in each process.

use std::{
    collections::{HashMap, HashSet},
    io::Write,
};

use super::{
    ExportError, Exporter,
    place::{clip, place, place_within, program},
    text::{bytes, duration, time_of_day},
};
use crate::{
    aggregate::{
        gc_summary::{GcSummary, Rss},
        request_summary::{By, RequestSummary},
        server_load::LoadSummary,
        services::CycleKey,
    },
    clock::WallClock,
    ledger::Ledger,
    model::{
        EndReason, Process,
        gvl::GvlSums,
        seen::{ProcessEnd, Seen},
    },
    ruby::fallback::Method,
    terminal::Screen,
    words::{percent, plural},
};

mod requests;

/// Maximum number of processes shown: those with the most time in the GC.
const SHOWN: usize = 5;
/// Maximum number of lines that started cycles shown per process.
const LINES: usize = 3;
/// Width if the output is not a terminal.
const WIDTH: usize = 100;
/// Columns before the text of a row.
const INDENT: usize = 12;
/// A blank at which a row is not wrapped.
const TIE: char = '\u{a0}';

/// What is known about a process while it runs.
#[derive(Debug, Default)]
struct Running {
    gc: GcSummary,
    gvl: Option<GvlSums>,
    requests: RequestSummary,
    load: LoadSummary,
    /// Its memory when it was found.
    found: Option<Rss>,
}

/// A process whose tracing has ended.
pub(super) struct Done {
    pub(super) process: Process,
    pub(super) gc: GcSummary,
    pub(super) gvl: Option<GvlSums>,
    pub(super) requests: RequestSummary,
    pub(super) load: LoadSummary,
    /// Whether it is a Puma with a thread pool, judging by its command line and its children.
    pub(super) has_pool: bool,
    pub(super) end: ProcessEnd,
}

/// The processes being traced.
#[derive(Debug, Default)]
pub(super) struct Summaries {
    running: HashMap<u32, Running>,
    /// Parents of Pumas: cluster masters, if they are Pumas themselves.
    parents: HashSet<u32>,
}

impl Summaries {
    /// Records something seen in a process. Its end is reported by [`Self::ended`].
    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        let of = self.running.entry(process.pid);
        match seen {
            Seen::Process { state, .. } => {
                self.parents.extend(process.ppid.filter(|_| process.is_puma()));
                // When this memory was read depends on when the process was found: it is used only if no event has memory.
                let found = state.and_then(Rss::of);
                of.insert_entry(Running { found, ..Running::default() });
            }
            Seen::Cycle(cycle) => of.or_default().gc.cycle(cycle),
            Seen::Work(work) => of.or_default().gc.work(work),
            Seen::Request(request) => of.or_default().requests.add(request),
            Seen::Load(load) => of.or_default().load.add(load),
            Seen::GvlProcess(summary) => of.or_default().gvl = Some(summary.sums.clone()),
            _ => {}
        }
    }

    /// Tracing of a process has ended.
    pub(super) fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Done {
        let Running { mut gc, gvl, requests, load, found } =
            self.running.remove(&process.pid).unwrap_or_default();
        // A cluster master has no thread pool; it serves no requests.
        let is_master = self.parents.remove(&process.pid) && requests.count() == 0;
        let has_pool = process.is_puma() && !is_master;
        if let Some(state) = &end.shutdown {
            gc.state(state);
        }
        gc.rss = gc.rss.or(found);
        gc.ended(end.lost);
        Done { process: process.clone(), gc, gvl, requests, load, has_pool, end: end.clone() }
    }
}

impl Done {
    /// Observed time in the GC.
    fn stopped_ns(&self) -> u64 {
        (self.gc.stopped_ns + self.end.outside_ns + self.gc.work_ns()).saturating_sub(self.end.beyond_ns)
    }
}

/// Sums of the processes that are not shown.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
    processes: u64,
    cycles: u64,
    stopped_ns: u64,
    /// Whether the cycles of some of them are unknown.
    unknown: bool,
}

/// Writes the summary.
pub struct Summary<W: Write> {
    out: W,
    clock: WallClock,
    screen: Screen,
    min_pause_ns: u64,
    hidden: u64,
    /// Requests of all processes, if they are grouped by something.
    all: Option<(By, RequestSummary)>,
    /// If requests are not traced: the server programs seen, in order of appearance.
    without_requests: Option<Vec<&'static str>>,
    running: Summaries,
    done: Vec<Done>,
    rest: Rest,
}

impl<W: Write> Summary<W> {
    /// Writes to `out`, which is displayed on `screen`. Cycles without a stop of at least `min_pause_ns` had no lines.
    pub fn new(out: W, clock: WallClock, screen: Screen, min_pause_ns: u64) -> Self {
        let (running, done, rest) = (Summaries::default(), Vec::new(), Rest::default());
        let (all, without_requests) = (None, None);
        Self { out, clock, screen, min_pause_ns, hidden: 0, all, without_requests, running, done, rest }
    }

    /// Sets whether requests are traced. If not, the summary says for which programs `--requests` would show some.
    #[must_use]
    pub fn requests(self, watched: bool) -> Self {
        Self { without_requests: (!watched).then(Vec::new), ..self }
    }

    /// Groups the requests of all processes instead of showing those of each process by endpoint.
    #[must_use]
    pub fn by(self, by: Option<By>) -> Self {
        Self { all: by.map(|by| (by, RequestSummary::default())), ..self }
    }

    /// The summary keeps the processes that were stopped longest.
    fn ended(&mut self, process: &Process, end: &ProcessEnd) {
        self.done.push(self.running.ended(process, end));
        self.done.sort_by_key(|done| std::cmp::Reverse(done.stopped_ns()));
        if self.done.len() > SHOWN
            && let Some(last) = self.done.pop()
        {
            self.rest.processes += 1;
            self.rest.cycles += last.gc.count(None);
            self.rest.stopped_ns += last.stopped_ns();
            self.rest.unknown |= last.process.image.method != Method::Sites;
        }
    }

    /// Notes the kind of server that a process is, if requests are not traced.
    fn server(&mut self, process: &Process) {
        if let Some(servers) = &mut self.without_requests
            && let Some(server) = process.server()
            && !servers.contains(&server)
        {
            servers.push(server);
        }
    }

    fn write(&mut self) -> std::io::Result<()> {
        let width = self.screen.width().unwrap_or(WIDTH).max(40);
        for done in &self.done {
            write_process(&mut self.out, self.clock, width, done, self.all.is_none())?;
        }
        let Rest { processes, cycles, stopped_ns, unknown } = self.rest;
        if processes > 0 {
            let least = if unknown { "at least " } else { "" };
            writeln!(
                self.out,
                "\n{} more with less GC time: {least}{}, {least}{} in GC",
                plural(processes, "process"),
                plural(cycles, "cycle"),
                duration(stopped_ns)
            )?;
        }
        if let Some((by, requests)) = &self.all {
            requests::write_all(&mut self.out, width, requests, *by)?;
        }
        if self.hidden > 0 {
            let least = duration(self.min_pause_ns);
            writeln!(
                self.out,
                "\n{} without a stop of {least} had no line above",
                plural(self.hidden, "cycle")
            )?;
        }
        if let Some(servers @ [_, ..]) = self.without_requests.as_deref() {
            let servers = servers.join(", ");
            writeln!(
                self.out,
                "\nnot watched: requests and jobs of {servers}; --requests shows them (docs/requests.md)"
            )?;
        }
        self.out.flush()
    }
}

impl<W: Write> Exporter for Summary<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        match seen {
            Seen::Ended(end) => self.ended(process, end),
            Seen::Cycle(cycle) if cycle.is_shorter_than(self.min_pause_ns) => self.hidden += 1,
            Seen::Request(request) => {
                if let Some((by, all)) = &mut self.all {
                    all.add_by(*by, process, request);
                }
            }
            Seen::Cycle(_) | Seen::Process { .. } => self.server(process),
            _ => {}
        }
        self.running.see(process, seen);
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        self.write().map_err(ExportError::Stdout)
    }
}

/// `12 minor newobj, 3 major newobj/nofree`, the most frequent first.
fn causes(gc: &GcSummary, kind: &str) -> String {
    let mut causes: Vec<(&CycleKey, u64)> =
        gc.cycles.iter().filter(|(key, _)| key.kind == kind).map(|(key, count)| (key, *count)).collect();
    causes.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let text = |(key, count): &(&CycleKey, u64)| {
        let why = match (key.gc_by, key.major_by) {
            (Some(by), Some(major)) => format!("{by}/{major}"),
            (by, major) => by.or(major).unwrap_or("?").to_owned(),
        };
        format!("{why} {count}")
    };
    causes.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// A row of the summary: its label, and as much of the text as fits.
pub(super) fn row(out: &mut impl Write, width: usize, label: &str, text: &str) -> std::io::Result<()> {
    writeln!(out, "{}", clip(&format!("  {label:<9} {text}"), width).trim_end())
}

/// A row of words, wrapped into more rows if necessary. A word is cut only if it is longer than a row. [`TIE`] keeps words together.
fn words(out: &mut impl Write, width: usize, label: &str, text: &str) -> std::io::Result<()> {
    let room = width.saturating_sub(INDENT);
    let (mut label, mut line) = (label, String::new());
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > room {
            row(out, width, label, line.trim_end())?;
            (label, line) = ("", String::new());
        } else if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&word.replace(TIE, " "));
    }
    row(out, width, label, &line)
}

/// Writes a process; with its requests only if those are not grouped with the requests of other processes.
fn write_process(
    out: &mut impl Write,
    clock: WallClock,
    width: usize,
    done: &Done,
    shows_requests: bool,
) -> std::io::Result<()> {
    let Done { process, gc, gvl, requests, load, has_pool, end } = done;
    let span_ns = end.ts_ns.saturating_sub(end.since_ns);
    let ended = match end.reason {
        EndReason::Exited => ", ended",
        EndReason::Execed => ", replaced by exec",
        EndReason::Detached => "",
    };
    let title = format!(
        "{} (pid {}), Ruby {}: traced for {}{ended}",
        program(process),
        process.pid,
        process.image.version,
        duration(span_ns)
    );
    writeln!(out, "\n{}", clip(&title, width))?;
    let cycles = gc.count(None);
    if cycles == 0 && gc.work.is_empty() {
        let (share, time) = (percent(end.outside_ns, span_ns), duration(end.outside_ns));
        let text = match (process.image.method.sees_cycles(), end.outside_ns) {
            (true, 0) => "no cycles".to_owned(),
            (true, _) => format!("no cycles; {time} ({share} of the time) in pauses outside of cycles"),
            // There may have been cycles.
            (false, 0) => "nothing of its GC was seen (no event sites)".to_owned(),
            (false, _) => format!("{time} ({share} of the time) in pauses"),
        };
        words(out, width, "GC", &text)?;
    }
    for (phase, (count, ns)) in &gc.work {
        let share = percent(*ns, span_ns);
        words(
            out,
            width,
            phase,
            &format!("{} in {} ({share} of the time)", duration(*ns), plural(*count, "interval")),
        )?;
    }
    if cycles > 0 {
        write_cycles(out, clock, width, done, span_ns)?;
    }
    if let Some(rss) = gc.rss {
        let text = format!("{} to {}, peak {}", bytes(rss.first), bytes(rss.last), bytes(rss.peak));
        words(out, width, "RSS", &text)?;
    }
    if let Some(sums) = gvl {
        let share = percent(sums.wait.ns, sums.watched_ns);
        let text = format!(
            "threads waited {} of their time, {} in all, longest {}",
            share,
            duration(sums.wait.ns),
            duration(sums.wait.max_ns)
        );
        words(out, width, "GVL", &text)?;
    }
    if shows_requests {
        requests::write(out, width, requests)?;
    }
    for (at, text) in requests::load(load, *has_pool).iter().enumerate() {
        words(out, width, if at == 0 { "load" } else { "" }, text)?;
    }
    if gc.lost > 0 {
        let lost = plural(gc.lost, "GC event");
        words(out, width, "lost", &format!("{lost}: not included in the figures above"))?;
    }
    Ok(())
}

fn write_cycles(
    out: &mut impl Write,
    clock: WallClock,
    width: usize,
    done: &Done,
    span_ns: u64,
) -> std::io::Result<()> {
    let gc = &done.gc;
    let own_ns = gc.stopped_ns.saturating_sub(done.end.beyond_ns);
    let total_ns = (gc.stopped_ns + done.end.outside_ns).saturating_sub(done.end.beyond_ns);
    let share = percent(total_ns, span_ns);
    let rate = gc.count(None) as f64 * 1e9 / span_ns.max(1) as f64;
    let (minor, major) = (gc.count(Some("minor")), gc.count(Some("major")));
    let cycles = plural(gc.count(None), "cycle");
    let has_times = gc.stops.count() > 0;
    let text = if has_times || gc.is_empty() || done.end.outside_ns > 0 {
        // `outside_ns`: pauses of a cycle that had begun before tracing, or of no cycle, such as finalizers at the end.
        let them = if gc.count(None) == 1 { "it" } else { "them" };
        let (own, outside) = match done.end.outside_ns {
            0 => (String::new(), String::new()),
            ns => (
                format!(", of which {}", duration(own_ns)),
                format!(" and{TIE}{}{TIE}outside{TIE}of{TIE}{them}", duration(ns)),
            ),
        };
        format!("{share} of the time: {}{own} in {cycles} ({rate:.1} a second){outside}", duration(total_ns))
    } else {
        format!("{cycles} ({rate:.1} a second), whose pauses were not seen")
    };
    words(out, width, "GC", &text)?;
    for (kind, count) in [("minor", minor), ("major", major)] {
        if count > 0 {
            words(out, width, kind, &format!("{count}: {}", causes(gc, kind)))?;
        }
    }
    for (label, times) in [("stops", &gc.stops), ("per cycle", &gc.totals)] {
        if times.count() == 0 {
            continue;
        }
        let text = format!(
            "longest {}, p99 {}, p50 {}  ({}, within 1 %)",
            duration(times.max_ns()),
            duration(times.quantile_ns(0.99)),
            duration(times.quantile_ns(0.5)),
            plural(times.count(), if label == "stops" { "stop" } else { "cycle" })
        );
        words(out, width, label, &text)?;
    }
    if let Some(worst) = &gc.worst {
        let CycleKey { kind, gc_by, major_by } = worst.key;
        let why = [gc_by, major_by].iter().flatten().copied().collect::<Vec<_>>().join("/");
        let at = time_of_day(clock.epoch_seconds(worst.ts_ns));
        let text = format!("#{} {kind} {why} at {at}Z: {}", worst.count, duration(worst.stopped_ns));
        words(out, width, "worst", &text)?;
        if let Some(frame) = &worst.by {
            row(out, width, "", &format!("by {}", place_within(frame, width.saturating_sub(15))))?;
        }
    }
    let lines = gc.lines();
    let named = lines.iter().filter_map(|line| Some((line.frame.as_ref()?, line)));
    for (n, (frame, line)) in named.take(LINES).enumerate() {
        let share = percent(line.stopped_ns, gc.stopped_ns);
        let label = if n == 0 { "lines" } else { "" };
        let head = format!("{share:>7} of it by ");
        let room = width.saturating_sub(12 + head.len());
        let text = if place(frame).len() <= room { place(frame) } else { place_within(frame, room) };
        row(out, width, label, &format!("{head}{text}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::services::tests::END,
        export::profile,
        ruby::fallback::{METHODS, Method},
    };

    /// A Ruby whose cycles are not seen may have had some.
    #[test]
    fn no_cycles() {
        for method in METHODS {
            let (mut process, _) = profile::a_sample(5);
            std::sync::Arc::make_mut(&mut process.image).method = method;
            let mut summary = Summary::new(Vec::new(), WallClock::with_offsets(0, 0), Screen::none(), 0);
            summary.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
            summary.see(&process, Seen::Ended(&END)).unwrap();
            summary.finish(&Ledger::default()).unwrap();
            let text = String::from_utf8(summary.out).unwrap();
            let expected = match method {
                Method::Sites => "  GC        no cycles\n",
                _ => "  GC        nothing of its GC was seen (no event sites)\n",
            };
            assert!(text.contains(expected), "{method:?}: {text}");
        }
    }

    /// Text that exceeds a row is wrapped at words.
    #[test]
    fn rows_of_words() {
        let text = "below 0.1 % of the time: 4.96ms, of which 4.88ms in 1 cycle (0.1 a second) and 73µs outside of it";
        let tied = text.replace("and 73µs outside of it", "and\u{a0}73µs\u{a0}outside\u{a0}of\u{a0}it");
        let rows = |width: usize, text: &str| {
            let mut out = Vec::new();
            words(&mut out, width, "GC", text).unwrap();
            String::from_utf8(out).unwrap()
        };
        let expected =
            "  GC        below 0.1 % of the time: 4.96ms, of which 4.88ms in 1 cycle (0.1 a second) and 73µs
            outside of it
";
        assert_eq!(rows(100, text), expected);
        let expected =
            expected.replace(" and 73µs\n            outside of it", "\n            and 73µs outside of it");
        assert_eq!(rows(100, &tied), expected);
        assert_eq!(rows(200, text), format!("  GC        {text}\n"));
        for width in 40..110 {
            let rows = rows(width, text);
            assert!(rows.lines().all(|row| row.chars().count() <= width), "{width}: {rows}");
            let words: Vec<&str> = rows.split_whitespace().skip(1).collect();
            assert_eq!(words.join(" "), text, "{width}");
        }
        // Columns within a row keep their positions, and a word longer than a row is cut.
        assert_eq!(rows(40, "p50 161µs  (2 stops)"), "  GC        p50 161µs  (2 stops)\n");
        assert_eq!(rows(40, &"x".repeat(60)), format!("  GC        {}\n", "x".repeat(28)));
    }
}
