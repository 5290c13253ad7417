//! A recording on one screen, for people: what its processes did with their time, what stands out, and the next command.

use std::{fmt::Write as _, io::Write};

use super::{
    ExportError, Exporter,
    place::{clip, place_within, program},
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
    ledger::Ledger,
    model::{
        Process,
        seen::{Observer as _, Seen},
        stack::StackSample,
    },
    terminal::{Colour, Screen},
    words::{date_time, percent, plural, span},
};

/// Processes that are shown.
const PROCESSES: usize = 5;
/// Endpoints that are shown.
const ENDPOINTS: usize = 3;
/// Methods that are shown.
const METHODS: usize = 4;
/// Pairs of threads that are shown.
const PAIRS: usize = 2;
/// For how long a process must have been sampled for its use of CPUs to be shown: one sample of a process that lives for a few
/// milliseconds would be several CPUs.
const SAMPLED_NS: u64 = 1_000_000_000;
/// Columns where it is not a terminal.
const WIDTH: usize = 100;
/// Columns of the labels.
const LABEL: usize = 10;
/// A method with this share of the CPU time, and at least this number of samples, stands out.
const HOT: (f64, u64) = (0.2, 100);

/// What holds for the whole recording.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Where it is.
    pub path: String,
    /// The name of its host.
    pub host: Option<String>,
    /// Its clock.
    pub clock: WallClock,
    /// When it begins, `CLOCK_MONOTONIC` nanoseconds.
    pub begun_ns: u64,
    /// Whether the sampling clock ran.
    pub samples: bool,
    /// Whether the GVL was watched.
    pub gvl: bool,
    /// The flags of a run that would have recorded more.
    pub lacking: Vec<&'static str>,
}

/// Writes it when everything has been seen.
pub struct OneScreen<W: Write> {
    out: W,
    screen: Screen,
    of: Recorded,
    digest: Digest,
    recording: Recording,
}

impl<W: Write> OneScreen<W> {
    /// Of this recording.
    pub fn new(out: W, screen: Screen, of: Recorded) -> Self {
        let recording = Recording::new(false, Limits::default(), Filter::default());
        Self {
            out,
            screen,
            of: Recorded { path: word(&of.path), ..of },
            digest: Digest::default(),
            recording,
        }
    }
}

impl<W: Write> Exporter for OneScreen<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.digest.see(process, seen);
        // Of the rest there are sums above. Endpoints are not shown: a sample does not wait for the end of its request.
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

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        let text = self.text();
        self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).map_err(ExportError::Stdout)
    }
}

/// How long a recording is: like [`span`], but of seconds also the first part.
fn length(ns: u64) -> String {
    match ns {
        1_000_000_000..60_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
        _ => span(ns),
    }
}

/// A path or name as a word for a shell. What came through a pipe cannot be read once more: the reader names the file.
fn word(text: &str) -> String {
    if ["/dev/", "/proc/"].iter().any(|folder| text.starts_with(folder)) {
        return "FILE".to_owned();
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", clip(text, usize::MAX).replace('\'', r"'\''"))
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
        let mut rows = vec![self.title()];
        rows.extend(self.processes());
        rows.extend(self.pauses(width));
        rows.extend(self.gvl());
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

    fn title(&self) -> String {
        let digest = &self.digest;
        let began = digest.began_ns.unwrap_or(self.of.begun_ns);
        let longest = digest.processes.iter().map(|of| of.span_ns).max().unwrap_or_default();
        let services: Vec<&str> = digest.services.keys().map(String::as_str).collect();
        let mut versions: Vec<String> =
            digest.processes.iter().map(|of| of.process.image.version.to_string()).collect();
        versions.sort();
        versions.dedup();
        let host = self.of.host.as_deref().map(|name| format!(" on {name}")).unwrap_or_default();
        format!(
            "{}{host}, {}: {} of {}, Ruby {}",
            date_time(self.clock().epoch_seconds(began)),
            length(digest.closed_ns.map_or(longest, |closed| closed.saturating_sub(began))),
            plural(digest.processes.len() as u64 + digest.more.processes, "process"),
            services.join(", "),
            versions.join(", "),
        )
    }

    /// What each process did with its time, those with most GC and CPU time first.
    fn processes(&self) -> Vec<String> {
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
            rows.push(format!(
                "{:>7} {:>8} {:>8} {cpus:>6} {gvl:>9}  {rss:<22} {} (pid {}{}{lost})",
                known(has_pauses, share(of.stopped_ns, of.span_ns)),
                known(of.has_cycles(), of.cycles.to_string()),
                known(of.longest_ns > 0, duration(of.longest_ns)),
                program(&of.process),
                of.process.pid,
                if of.over { ", ended" } else { "" },
            ));
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
                "{:<LABEL$}{} GC pauses, p50 {}, p99 {}; the longest:",
                "PAUSES",
                stops.count(),
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

    fn gvl(&self) -> Vec<String> {
        let all = self.digest.processes.iter();
        let pairs = all.filter_map(|of| Some((of.process.pid, of.gvl.as_ref()?)));
        let mut pairs: Vec<_> =
            pairs.flat_map(|(pid, gvl)| gvl.blocked.iter().map(move |pair| (pid, pair))).collect();
        pairs.sort_by_key(|(_, (_, _, ns, _))| std::cmp::Reverse(*ns));
        let shown = pairs.iter().take(PAIRS).map(|(pid, (waiter, holder, ns, count))| {
            format!(
                "{:>9}  {} waited {} for the GVL that {} held (pid {pid})",
                duration(*ns),
                waiter.comm,
                if *count == 1 { "once".to_owned() } else { format!("{count} times") },
                holder.comm
            )
        });
        let shown: Vec<String> = shown.collect();
        let sums = self.digest.processes.iter().filter_map(|of| of.gvl.as_ref());
        let (watched_ns, wall_ns) =
            sums.fold((0, 0), |(watched, wall), gvl| (watched + gvl.watched_ns, wall + gvl.wall_ns));
        let head = match watched_ns < wall_ns {
            true => format!(
                "{:<LABEL$}watched for {} of the time (CPU budget)",
                "GVL",
                percent(watched_ns, wall_ns)
            ),
            false if shown.is_empty() => return shown,
            false => "GVL".to_owned(),
        };
        [vec![String::new(), head], shown].concat()
    }

    fn requests(&self) -> Vec<String> {
        let requests = &self.digest.requests;
        if requests.count() == 0 {
            return Vec::new();
        }
        let mut rows =
            vec![String::new(), format!("{:<LABEL$}{}; those with most time:", "REQUESTS", requests.count())];
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
            rows.push(format!("{:>9}  {}: {times}{gc}{failed}{by}", of.count, group.name));
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

    /// CPU time of all samples, and their number.
    fn cpu(&self) -> (u64, u64) {
        self.digest.processes.iter().fold((0, 0), |(ns, count), of| (ns + of.cpu.0, count + of.cpu.1))
    }

    fn not_recorded(&self) -> Vec<String> {
        let lacking = &self.of.lacking;
        if lacking.is_empty() {
            return Vec::new();
        }
        vec![String::new(), format!("Not recorded: what {} show", lacking.join(", "))]
    }

    /// What stands out, and the command that shows more of it.
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
        let path = &self.of.path;
        match *step {
            Step::Gc(of) => (
                format!(
                    "GC takes {} of the time of {} (pid {}). What starts it, and settings against it:",
                    share(of.stopped_ns, of.span_ns),
                    program(&of.process),
                    of.process.pid
                ),
                Some(format!(
                    "gctrace report {path} -q --flamegraph gc.svg --flamegraph-of gc\n  \
                     sudo gctrace {} -q --duration 10m --tunemygc sets/ && gctrace tune sets/",
                    if of.over { "--all-ruby".to_owned() } else { format!("--pid {}", of.process.pid) }
                )),
            ),
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
                Some(format!("gctrace report {path} -q --flamegraph gvl.svg --flamegraph-of gvl-wait")),
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
            Step::Failing(endpoint, of) => (
                format!("{} of {} to {endpoint} failed (5xx).", of.failed, plural(of.count, "request")),
                None,
            ),
        }
    }

    /// The command for a second before a pause until a second after it.
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
        stands_out
            .then(|| (found(), Some(format!("gctrace report {} -q --flamegraph cpu.svg", self.of.path))))
    }

    /// Nothing stands out, of what was recorded.
    fn nothing(&self) -> String {
        let gvl =
            if self.of.gvl { format!(", {WAITING} threads waiting for the GVL") } else { String::new() };
        format!(
            "Nothing stands out by these limits: GC {:.0} % of a process's time in 10 cycles, a pause of {} ms,\n\
             memory +{} and +10 % in 30 s{gvl}.",
            GC_SHARE * 100.0,
            PAUSE_NS / 1_000_000,
            bytes(GROWTH_BYTES)
        )
    }
}

/// A share in few columns.
fn share(part: u64, whole: u64) -> String {
    percent(part, whole).replace("below ", "<")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gctrace_common::event::WorkPhase;

    use super::*;
    use crate::{
        model::{
            EndReason, GcWork,
            seen::{CyclesBefore, ProcessEnd},
        },
        ruby::fallback::Method,
    };

    const END: ProcessEnd = ProcessEnd {
        reason: EndReason::Exited,
        ts_ns: 1_000_000,
        since_ns: 0,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: 0,
        before: CyclesBefore::Unknown,
        lost: 0,
    };

    /// The screen of a process that lives for a millisecond, in which sampling began at this time.
    fn screen(process: &Process, began_ns: u64, seen: &[Seen<'_>]) -> String {
        let of = Recorded {
            path: "x".into(),
            host: None,
            clock: WallClock::with_offsets(0, 0),
            begun_ns: 0,
            samples: true,
            gvl: false,
            lacking: vec![],
        };
        let mut out = Vec::new();
        let mut screen = OneScreen::new(&mut out, Screen::none(), of);
        screen.see(process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
        screen.began(began_ns);
        for seen in seen {
            screen.see(process, *seen).unwrap();
        }
        screen.see(process, Seen::Ended(&END)).unwrap();
        screen.finish(&Ledger::default()).unwrap();
        drop(screen);
        String::from_utf8(out).unwrap()
    }

    /// The columns of the only process, up to the peak of its memory.
    fn columns(text: &str) -> Vec<&str> {
        let row = text.lines().find(|line| line.contains("(pid 1")).unwrap_or_else(|| panic!("{text}"));
        row.split_whitespace().take(6).collect()
    }

    /// Commands can be repeated in a shell.
    #[test]
    fn words() {
        for (path, expected) in [
            ("puma.gctrace", "puma.gctrace"),
            ("it's.gctrace", r"'it'\''s.gctrace'"),
            ("/dev/stdin", "FILE"),
            ("/dev/fd/63", "FILE"),
        ] {
            assert_eq!(word(path), expected);
        }
    }

    /// Samples within requests are among the methods, whether the end of the request was seen or not.
    #[test]
    fn methods_in_requests() {
        let (process, sample) = profile::a_sample(5);
        let text = |requests: bool| {
            let samples: Vec<StackSample> = (0..100)
                .map(|n| {
                    let request = (requests && n % 10 != 0).then_some(7);
                    StackSample { ts_ns: 10 + n, request, cpu_ns: 1000, ..sample.clone() }
                })
                .collect();
            screen(&process, 0, &samples.iter().map(Seen::Stack).collect::<Vec<_>>())
        };
        let without = text(false);
        assert!(without.contains("100.0 %"), "{without}");
        assert_eq!(text(true), without);
    }

    /// CPUs are of the time in which there were samples.
    #[test]
    fn cpus_since_sampling_began() {
        let (process, sample) = profile::a_sample(5);
        let sample = StackSample { ts_ns: 3_900_000_000, cpu_ns: 1_000_000_000, ..sample };
        let end = ProcessEnd { ts_ns: 4_000_000_000, ..END };
        let of = |began_ns| screen(&process, began_ns, &[Seen::Stack(&sample), Seen::Ended(&end)]);
        assert_eq!(columns(&of(0))[4], "0.25");
        assert_eq!(columns(&of(2_000_000_000))[4], "0.50");
        assert_eq!(columns(&of(3_000_000_001))[4], "-", "too short for a share");
    }

    /// Of a Ruby without event sites nothing is shown that is not known: parts of pauses may lie within each other.
    #[test]
    fn without_event_sites() {
        let (mut process, _) = profile::a_sample(5);
        let work = |phase, begin_ns, ns| GcWork { phase, tid: 1, comm: "ruby".into(), begin_ns, ns };
        let mut of = |method, work: &GcWork| {
            Arc::make_mut(&mut process.image).method = method;
            screen(&process, 0, &[Seen::Work(work)])
        };
        let text = of(Method::Functions, &work(WorkPhase::Rest, 10, 100_000));
        assert_eq!(columns(&text)[..3], ["-", "-", "-"], "{text}");
        let text = of(Method::UsdtPauses, &work(WorkPhase::Pause, 10, 100_000));
        assert_eq!(columns(&text)[..5], ["10.0", "%", "-", "100µs", "-"], "{text}");
        let text = of(Method::UsdtPauses, &work(WorkPhase::Pause, 10, 500_000_000));
        assert!(
            text.contains("1 GC pauses, p50 500.0ms") && text.contains("500.0ms  00:00:00.000Z pid 1\n"),
            "{text}"
        );
        assert!(text.contains("A GC pause of 500.0ms (pid 1). What was around it:"), "{text}");
    }
}
