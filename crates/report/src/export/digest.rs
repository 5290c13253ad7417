//! A recording on one screen: what its processes spent their time on, what stands out, and the next command to run.

use std::{collections::BTreeSet, fmt::Write as _, io::Write};

use super::{
    ExportError, Exporter,
    place::{clip, place_within, program, shorten},
    profile,
    text::{bytes, duration, time_of_day},
};
use crate::{
    aggregate::{
        digest::{
            Digest, LongPause, ProcessDigest,
            steps::{GC_SHARE, GROWTH_BYTES, PAUSE_NS, Step, WAITING},
        },
        recording::{Filter, Limits, Recording},
        services::CycleKey,
    },
    clock::WallClock,
    ledger::{Extent, Ledger},
    model::{
        Process,
        seen::{Observer as _, Seen},
        stack::StackSample,
    },
    terminal::{Colour, Screen},
    words::{date_time, percent, plural, span},
};

/// Maximum number of processes shown.
const PROCESSES: usize = 5;
/// Maximum number of endpoints shown.
const ENDPOINTS: usize = 3;
/// Maximum number of methods shown.
const METHODS: usize = 4;
/// Maximum number of pairs of threads shown.
const PAIRS: usize = 2;
/// Minimum time for which a process must have been sampled for its CPU usage to be shown: a single sample of a process
/// that lives for a few milliseconds would count as several CPUs.
const SAMPLED_NS: u64 = 1_000_000_000;
/// Width if the output is not a terminal.
const WIDTH: usize = 100;
/// Minimum width of a name.
const NAME: usize = 8;
/// Width of the labels.
const LABEL: usize = 10;
/// A method with this share of the CPU time, and at least this number of samples, stands out.
const HOT: (f64, u64) = (0.2, 100);

/// Properties of the whole recording.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Its path.
    pub path: String,
    /// Whether a part of its time is left out.
    pub cuts_time: bool,
    /// The selected processes; empty if all are shown.
    pub pids: BTreeSet<u32>,
    /// The options of `gctrace report` that select the part shown, quoted for a shell, each preceded by a space; empty if
    /// everything is shown.
    pub part: String,
    /// If a flight recorder wrote it: why and when (`CLOCK_MONOTONIC` nanoseconds).
    pub dump: Option<(String, u64)>,
    /// The name of its host.
    pub host: Option<String>,
    /// Its clock.
    pub clock: WallClock,
    /// When it begins, `CLOCK_MONOTONIC` nanoseconds.
    pub begun_ns: u64,
    /// Whether the sampling clock ran.
    pub samples: bool,
    /// Whether the GVL was traced.
    pub gvl: bool,
    /// The flags with which a run would have recorded more.
    pub lacking: Vec<&'static str>,
}

/// Writes the screen when everything has been seen.
pub struct OneScreen<W: Write> {
    out: W,
    screen: Screen,
    of: Recorded,
    digest: Digest,
    recording: Recording,
    /// Whether the recording contains everything that a run reports at the end of a process.
    whole: bool,
}

impl<W: Write> OneScreen<W> {
    /// The screen of this recording.
    pub fn new(out: W, screen: Screen, of: Recorded) -> Self {
        let recording = Recording::new(false, Limits::default(), Filter::default());
        Self {
            out,
            screen,
            of: Recorded { path: word(&of.path), ..of },
            digest: Digest::default(),
            recording,
            whole: true,
        }
    }
}

impl<W: Write> Exporter for OneScreen<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.digest.see(process, seen);
        // The digest above has sums of everything else. Endpoints are not shown, so a sample need not wait for the end of its request.
        if let Seen::Stack(sample) = seen {
            let sample = StackSample { request: None, ..sample.clone() };
            self.recording.see(process, Seen::Stack(&sample));
        }
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.digest.began_ns = Some(ts_ns);
        self.recording.began_ns = Some(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.digest.closed_ns = Some(ts_ns);
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.whole = ledger.extent == Extent::Run && !self.of.cuts_time;
        let text = self.text();
        self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).map_err(ExportError::Stdout)
    }
}

/// The length of a recording: like [`span`], but seconds have a decimal place.
fn length(ns: u64) -> String {
    match ns {
        1_000_000_000..60_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
        _ => span(ns),
    }
}

/// Quotes a condition for a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", clip(text, usize::MAX).replace('\'', r"'\''"))
}

/// Quotes a path or name for a shell. A recording that was read from a pipe cannot be read again, so the user has to insert the file's name.
fn word(text: &str) -> String {
    if ["/dev/", "/proc/"].iter().any(|folder| text.starts_with(folder)) {
        return "FILE".to_owned();
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    quoted(text)
}

/// `minor newobj`, `major newobj/nofree`.
fn cause(key: &CycleKey) -> String {
    let why = [key.gc_by, key.major_by].iter().flatten().copied().collect::<Vec<_>>().join("/");
    format!("{} {why}", key.kind)
}

impl<W: Write> OneScreen<W> {
    fn clock(&self) -> WallClock {
        self.of.clock
    }

    fn text(&self) -> String {
        if self.digest.processes.is_empty() {
            return String::new();
        }
        let width = self.screen.width().unwrap_or(WIDTH).max(60);
        let mut rows = vec![self.title(width)];
        rows.extend(self.of.dump.as_ref().map(|(why, at_ns)| {
            let at = time_of_day(self.clock().epoch_seconds(*at_ns));
            format!("Written by a flight recorder at {at}Z: {}", shorten(why, width.saturating_sub(50)))
        }));
        rows.extend(self.processes(width));
        rows.extend(self.pauses(width));
        rows.extend(self.gvl(width));
        rows.extend(self.requests());
        rows.extend(self.methods());
        rows.extend(self.not_recorded());
        let mut text = String::new();
        for row in rows {
            text += clip(&row, width).trim_end();
            text.push('\n');
        }
        text.push('\n');
        for (found, command) in self.next() {
            let lines = found.lines().map(|line| clip(line, usize::MAX)).collect::<Vec<_>>().join("\n");
            text += &self.screen.paint(lines, Some(Colour::Yellow));
            text.push('\n');
            if let Some(command) = command {
                let _infallible = writeln!(text, "  {command}");
            }
        }
        text
    }

    fn title(&self, width: usize) -> String {
        let digest = &self.digest;
        let began = digest.began_ns.unwrap_or(self.of.begun_ns);
        let longest = digest.processes.iter().map(|of| of.span_ns).max().unwrap_or_default();
        let services: Vec<&str> = digest.services.keys().map(String::as_str).collect();
        let mut versions: Vec<String> =
            digest.processes.iter().map(|of| of.process.image.version.to_string()).collect();
        versions.sort();
        versions.dedup();
        let host = self.of.host.as_deref().map(|name| format!(" on {name}")).unwrap_or_default();
        let head = format!(
            "{}{host}, {}: {} of ",
            date_time(self.clock().epoch_seconds(began)),
            length(digest.closed_ns.map_or(longest, |closed| closed.saturating_sub(began))),
            plural(digest.processes.len() as u64 + digest.more.processes, "process"),
        );
        let rubies = format!(", Ruby {}", versions.join(", "));
        let room = width.saturating_sub(head.chars().count() + rubies.len()).max(NAME);
        head + &shorten(&services.join(", "), room) + &rubies
    }

    /// What each process spent its time on; the processes with the most GC and CPU time come first.
    fn processes(&self, width: usize) -> Vec<String> {
        let mut all: Vec<&ProcessDigest> = self.digest.processes.iter().collect();
        all.sort_by_key(|of| std::cmp::Reverse((of.stopped_ns.saturating_add(of.cpu.0), of.process.pid)));
        let mut rows = vec![
            String::new(),
            format!(
                "{:>7} {:>8} {:>8} {:>6} {:>9}  {:<22} PROCESS",
                "GC TIME", "CYCLES", "LONGEST", "CPUS", "GVL WAIT", "RSS (PEAK)"
            ),
        ];
        let known = |is_known: bool, text: String| if is_known { text } else { "-".to_owned() };
        for of in all.iter().take(PROCESSES) {
            let cpus = known(
                self.of.samples && of.sampled_ns >= SAMPLED_NS,
                format!("{:.2}", of.cpu.0 as f64 / of.sampled_ns as f64),
            );
            let has_pauses = of.process.image.method.times_pauses();
            let gvl = of.gvl.as_ref().filter(|gvl| gvl.watched_ns > 0);
            let gvl = gvl.map_or_else(|| "-".to_owned(), |gvl| share(gvl.wait_ns, gvl.watched_ns));
            let rss = of.rss.map_or_else(
                || "-".to_owned(),
                |rss| format!("{} to {} ({})", bytes(rss.first), bytes(rss.last), bytes(rss.peak)),
            );
            let lost = if of.lost > 0 { ", GC events lost" } else { "" };
            let row = format!(
                "{:>7} {:>8} {:>8} {cpus:>6} {gvl:>9}  {rss:<22} ",
                known(has_pauses, share(of.stopped_ns, of.span_ns)),
                known(of.has_cycles(), of.cycles.to_string()),
                known(of.longest_ns > 0, duration(of.longest_ns)),
            );
            let over = if of.over { ", ended" } else { "" };
            let which = format!(" (pid {}{over}{lost})", of.process.pid);
            // The pid is cut last: without its last digits it would be another pid.
            let room = width.saturating_sub(row.chars().count() + which.len()).max(NAME);
            rows.push(row + &shorten(&program(&of.process), room) + &which);
        }
        let mut rest = self.digest.more;
        all.iter().skip(PROCESSES).for_each(|of| rest.add(of));
        if rest.processes > 0 {
            let cycles = plural(rest.cycles, "cycle");
            let least = if rest.unknown { "at least " } else { "" };
            rows.push(format!(
                "{:LABEL$}and {} more: {least}{cycles}",
                "",
                plural(rest.processes, "process")
            ));
        }
        rows
    }

    fn pauses(&self, width: usize) -> Vec<String> {
        let stops = &self.digest.stops;
        if stops.count() == 0 {
            return Vec::new();
        }
        let mut rows = vec![
            String::new(),
            format!(
                "{:<LABEL$}{}, p50 {}, p99 {}; the longest:",
                "PAUSES",
                plural(stops.count(), "GC pause"),
                duration(stops.quantile_ns(0.5)),
                duration(stops.quantile_ns(0.99)),
            ),
        ];
        for pause in &self.digest.worst {
            let at = time_of_day(self.clock().epoch_seconds(pause.begin_ns));
            let cause = pause.key.as_ref().map_or_else(String::new, |key| format!(", {}", cause(key)));
            let head = format!("{:>9}  {at}Z pid {}{cause}", duration(pause.ns), pause.pid);
            let room = width.saturating_sub(head.len() + 4).max(20);
            let by = pause.by.as_deref().map(|frame| format!(" by {}", place_within(frame, room)));
            rows.push(head + by.as_deref().unwrap_or_default());
        }
        rows
    }

    fn gvl(&self, width: usize) -> Vec<String> {
        let all = self.digest.processes.iter();
        let pairs = all.filter_map(|of| Some((of.process.pid, of.gvl.as_ref()?)));
        let mut pairs: Vec<_> =
            pairs.flat_map(|(pid, gvl)| gvl.blocked.iter().map(move |pair| (pid, pair))).collect();
        pairs.sort_by_key(|(_, (_, _, ns, _))| std::cmp::Reverse(*ns));
        let shown = pairs.iter().take(PAIRS).map(|(pid, (waiter, holder, ns, count))| {
            let times = if *count == 1 { "once".to_owned() } else { format!("{count} times") };
            let (head, holds) = (format!("{:>9}  ", duration(*ns)), format!(" held (pid {pid})"));
            let waits = format!(" waited {times} for the GVL that ");
            let room = width.saturating_sub(head.len() + waits.len() + holds.len()) / 2;
            let [waiter, holder] = [waiter, holder].map(|who| shorten(&who.comm, room.max(NAME)));
            head + &waiter + &waits + &holder + &holds
        });
        let shown: Vec<String> = shown.collect();
        let sums = self.digest.processes.iter().filter_map(|of| of.gvl.as_ref());
        let (watched_ns, wall_ns) = sums.fold((0_u64, 0_u64), |(watched, wall), gvl| {
            (watched.saturating_add(gvl.watched_ns), wall.saturating_add(gvl.wall_ns))
        });
        let head = match watched_ns < wall_ns {
            _ if wall_ns == 0 => {
                return self.long_waits().into_iter().flat_map(|row| [String::new(), row]).collect();
            }
            true => format!(
                "{:<LABEL$}watched for {} of its threads' time (CPU budget)",
                "GVL",
                percent(watched_ns, wall_ns)
            ),
            false if shown.is_empty() && self.long_waits().is_none() => return shown,
            false => "GVL".to_owned(),
        };
        let long = self.long_waits().into_iter().collect();
        [vec![String::new(), head], shown, long].concat()
    }

    /// The observed waits of processes without sums.
    fn long_waits(&self) -> Option<String> {
        let without = self.digest.processes.iter().filter(|of| of.gvl.is_none());
        let (count, ns) = without.fold((0, 0_u64), |(count, ns), of| {
            (count + of.long_waits.0, ns.saturating_add(of.long_waits.1))
        });
        let is_all = self.digest.processes.iter().all(|of| of.gvl.is_none());
        let (label, waits) = (if is_all { "GVL" } else { "" }, plural(count, "long wait"));
        let row = format!("{label:<LABEL$}{waits}, {} in all; the rest is not known", duration(ns));
        (count > 0).then_some(row)
    }

    fn requests(&self) -> Vec<String> {
        let requests = &self.digest.requests;
        if requests.count() == 0 {
            return Vec::new();
        }
        let mut rows =
            vec![String::new(), format!("{:<LABEL$}{}; those with most time:", "REQUESTS", requests.count())];
        let services = requests.has_services();
        for (group, of) in requests.by_time().into_iter().take(ENDPOINTS) {
            let times = match of.times.count() {
                0 => "times not known".to_owned(),
                _ => format!(
                    "p50 {}, p95 {}",
                    duration(of.times.quantile_ns(0.5)),
                    duration(of.times.quantile_ns(0.95))
                ),
            };
            let gc = match of.own.of_ns {
                0 => String::new(),
                of_ns => format!(", {} in its own GC", percent(of.own.ns, of_ns)),
            };
            let failed = if of.failed > 0 { format!(", {} failed", of.failed) } else { String::new() };
            let by = of
                .handlers
                .one()
                .map_or_else(String::new, |handler| format!(", {}", clip(&handler.name, WIDTH)));
            rows.push(format!("{:>9}  {}: {times}{gc}{failed}{by}", of.count, group.title(services)));
        }
        rows
    }

    fn methods(&self) -> Vec<String> {
        let (methods, _) = profile::hottest(&self.recording, METHODS);
        let (all_ns, samples) = self.cpu();
        if methods.is_empty() {
            return Vec::new();
        }
        let head =
            format!("{:<LABEL$}CPU time by method on top, of {}:", "METHODS", plural(samples, "sample"));
        let on_top = methods.iter().filter(|method| method.self_ns > 0);
        let rows = on_top.map(|method| format!("{:>9}  {}", share(method.self_ns, all_ns), method.text));
        [vec![String::new(), head], rows.collect()].concat()
    }

    /// CPU time of all samples, and the number of samples.
    fn cpu(&self) -> (u64, u64) {
        self.digest.processes.iter().fold((0, 0), |(ns, count), of| (ns + of.cpu.0, count + of.cpu.1))
    }

    fn not_recorded(&self) -> Vec<String> {
        let mut rows = Vec::new();
        if !self.of.lacking.is_empty() {
            rows.push(format!("what {} would show", self.of.lacking.join(", ")));
        }
        let lacking = self.digest.processes.iter().filter(|of| self.lacks_sums(of)).count() as u64;
        if lacking > 0 {
            rows.push(format!("GVL sums of {}: known only when a process ends", plural(lacking, "process")));
        }
        let rows = rows.into_iter().map(|row| format!("Not recorded: {row}"));
        rows.enumerate().flat_map(|(at, row)| (at == 0).then(String::new).into_iter().chain([row])).collect()
    }

    /// Whether the GVL wait times of the threads of a process are unknown although they were requested, because the end of
    /// the recording is missing. A process without sums in a complete recording had no thread that was seen to wait.
    fn lacks_sums(&self, of: &ProcessDigest) -> bool {
        self.of.gvl && !self.whole && of.process.image.gvl.is_some() && of.gvl.is_none()
    }

    /// What stands out, each with the command that shows more about it.
    fn next(&self) -> Vec<(String, Option<String>)> {
        let steps = self.digest.steps();
        let mut next: Vec<_> = steps.iter().map(|step| self.step(step)).collect();
        next.extend(self.hot_method());
        if next.is_empty() {
            next.push((self.nothing(), None));
        }
        next
    }

    fn step(&self, step: &Step<'_>) -> (String, Option<String>) {
        let path = format!("{}{}", self.of.path, self.of.part);
        match *step {
            Step::Gc(of) => {
                let (taken, name, pid) =
                    (share(of.stopped_ns, of.span_ns), program(&of.process), of.process.pid);
                let next = if of.has_cycles() {
                    "What starts it, and settings against it:"
                } else {
                    "What starts it is not seen of this Ruby."
                };
                let commands = || {
                    format!(
                        "gctrace report {path}{} -q --flamegraph gc.svg --flamegraph-of gc\n  \
                         sudo gctrace {} -q --duration 10m --tunemygc sets/ && gctrace tune sets/",
                        self.only(&of.process),
                        if of.over { "--all-ruby".to_owned() } else { format!("--pid {pid}") }
                    )
                };
                let found = format!("GC takes {taken} of the time of {name} (pid {pid}). {next}");
                (found, of.has_cycles().then(commands))
            }
            Step::Pause(pause) => (
                format!("A GC pause of {} (pid {}). What was around it:", duration(pause.ns), pause.pid),
                Some(self.around(pause)),
            ),
            Step::Gvl(of) => (
                format!(
                    "In {} (pid {}) {:.1} threads waited for the GVL on average. Where:",
                    program(&of.process),
                    of.process.pid,
                    of.gvl.as_ref().map_or(0.0, |gvl| gvl.waiting)
                ),
                Some(format!(
                    "gctrace report {path}{} -q --flamegraph gvl.svg --flamegraph-of gvl-wait",
                    self.only(&of.process)
                )),
            ),
            Step::Growth(of) => {
                let (first, last) = of.rss.map_or((0, 0), |rss| (rss.first, rss.last));
                (
                    format!(
                        "Memory of {} (pid {}) grew from {} to {} in {}. What it holds:",
                        program(&of.process),
                        of.process.pid,
                        bytes(first),
                        bytes(last),
                        span(of.span_ns)
                    ),
                    Some(format!("sudo gctrace heap --pid {} --leaks 10m", of.process.pid)),
                )
            }
            Step::Failing(endpoint, of) => {
                let endpoint = endpoint.title(self.digest.requests.has_services());
                let all = plural(of.count, "request");
                (format!("{} of {all} to {endpoint} failed (5xx).", of.failed), None)
            }
        }
    }

    /// The option that selects this process, if the recording has more than one.
    fn only(&self, process: &Process) -> String {
        let alone = self.digest.processes.len() as u64 + self.digest.more.processes == 1;
        if alone || !self.of.pids.is_empty() { String::new() } else { format!(" --pid {}", process.pid) }
    }

    /// The command that shows the time from one second before a pause until one second after it.
    fn around(&self, pause: &LongPause) -> String {
        let second = 1_000_000_000;
        let after = |ns: u64| ns.saturating_sub(self.of.begun_ns) as f64 / 1e9;
        let from = after(pause.begin_ns.saturating_sub(second));
        let to = after(pause.begin_ns + pause.ns + second);
        let path = &self.of.path;
        format!("gctrace report {path} --lines --pid {} --from {from:.1}s --to {to:.1}s", pause.pid)
    }

    fn hot_method(&self) -> Option<(String, Option<String>)> {
        let (methods, _) = profile::hottest(&self.recording, 1);
        let (all_ns, samples) = self.cpu();
        let top = methods.first()?;
        let stands_out = samples >= HOT.1 && top.self_ns as f64 >= HOT.0 * all_ns as f64;
        let found = || {
            format!(
                "{} takes {} of the CPU time. By whom it is called:",
                top.text,
                share(top.self_ns, all_ns)
            )
        };
        stands_out.then(|| {
            let Recorded { path, part, .. } = &self.of;
            (found(), Some(format!("gctrace report {path}{part} -q --flamegraph cpu.svg")))
        })
    }

    /// The text for a recording in which nothing stands out.
    fn nothing(&self) -> String {
        let applies = self.of.gvl && !self.digest.processes.iter().all(|of| self.lacks_sums(of));
        let gvl = if applies { format!(", {WAITING} threads waiting for the GVL") } else { String::new() };
        format!(
            "Nothing stands out by these limits: GC {:.0} % of a process's time in 10 cycles, a pause of {} ms,\n\
             memory +{} and +10 % in 30 s{gvl}.",
            GC_SHARE * 100.0,
            PAUSE_NS / 1_000_000,
            bytes(GROWTH_BYTES)
        )
    }
}

/// A share in a narrow form.
fn share(part: u64, whole: u64) -> String {
    percent(part, whole).replace("below ", "<")
}

#[cfg(test)]
mod tests;
