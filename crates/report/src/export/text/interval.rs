//! `--interval`: one line per process and interval instead of one per cycle.

use std::{collections::BTreeMap, io::Write};

use gctrace_common::event::WorkPhase;

use super::{bytes, duration, time_of_day};
use crate::{
    aggregate::gc_summary::GcSummary,
    clock::WallClock,
    export::place::{clip, place_within, program},
    model::{Process, seen::Seen},
    ruby::fallback::Method,
    terminal::{Colour, Screen},
};

/// The heading is repeated after this many lines.
const HEADING_EVERY: u64 = 50;

/// What happened in each process since the last lines.
pub(super) struct Intervals {
    every_ns: u64,
    /// Scheduled start of the interval; `None` if no process has been seen yet.
    began_ns: Option<u64>,
    /// The time up to which lines have been written. Later events go into the next lines, which may be late.
    written_ns: u64,
    processes: BTreeMap<u32, Interval>,
    /// Programs that were replaced by another one (exec) since then.
    replaced: Vec<(u32, Interval)>,
    /// Whether the cycles of all processes that have ended since then without anything to show are seen; `None`: there are none.
    quiet_ends: Option<bool>,
    lines: u64,
}

struct Interval {
    name: String,
    /// How its GC is traced.
    method: Method,
    rss: Option<u64>,
    gc: GcSummary,
    ended: bool,
}

impl Interval {
    /// Whether its cycles and those of `others`, if there are any, are all seen.
    fn and_sees_cycles(&self, others: Option<bool>) -> bool {
        self.method.sees_cycles() && others.unwrap_or(true)
    }
}

impl Intervals {
    /// Intervals of `every_ns` nanoseconds.
    pub(super) fn new(every_ns: u64) -> Self {
        Self {
            every_ns,
            began_ns: None,
            written_ns: 0,
            processes: BTreeMap::new(),
            replaced: Vec::new(),
            quiet_ends: None,
            lines: 0,
        }
    }

    /// Something was seen of a process.
    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        if let Seen::Process { state, now_ns, .. } = seen {
            let rss = state.and_then(|state| state.memory).map(|memory| memory.rss);
            let (name, method, gc) = (program(process), process.image.method, GcSummary::default());
            let interval = Interval { name, method, rss, gc, ended: false };
            if let Some(before) = self.processes.insert(process.pid, interval)
                && !before.gc.is_empty()
            {
                self.replaced.push((process.pid, before));
            }
            if self.began_ns.is_none() {
                self.began_ns = Some(now_ns);
                self.written_ns = now_ns;
            }
        }
        let Some(interval) = self.processes.get_mut(&process.pid) else { return };
        match seen {
            Seen::Cycle(cycle) => {
                interval.gc.cycle(cycle);
                interval.rss = interval.gc.rss.map_or(interval.rss, |rss| Some(rss.last));
            }
            Seen::Work(work) if work.phase == WorkPhase::Pause => interval.gc.pause(work.ns),
            Seen::Work(work) => interval.gc.work(work),
            Seen::Ended(_) => interval.ended = true,
            _ => {}
        }
        // Programs that start many short processes may do so for hours until the interval is over.
        let has_no_line = interval.ended && interval.gc.is_empty();
        let quiet_ends = interval.and_sees_cycles(self.quiet_ends);
        if has_no_line && (self.lines > 0 || self.processes.len() > 1) {
            self.processes.remove(&process.pid);
            self.quiet_ends = Some(quiet_ends);
        }
    }

    /// Writes what happened after the last lines when tracing has ended: the processes that collected in this time, which
    /// is shorter than an interval.
    pub(super) fn write_rest(
        &mut self,
        out: &mut impl Write,
        clock: WallClock,
        screen: Screen,
        now: u64,
    ) -> std::io::Result<()> {
        let at = format!("{}Z", &time_of_day(clock.epoch_seconds(now))[..8]);
        // No share is shown for a very short time: a cycle counts where it ends.
        let span_ns = now.saturating_sub(self.written_ns);
        let span_ns = if span_ns < self.every_ns / 10 { 0 } else { span_ns };
        self.write_replaced(out, &at, screen, span_ns)?;
        for (pid, interval) in std::mem::take(&mut self.processes) {
            if !interval.gc.is_empty() {
                line(out, screen, &mut self.lines, &at, pid, &interval, &interval.gc, span_ns)?;
            }
        }
        Ok(())
    }

    /// Writes the lines of programs that no longer exist; returns whether there were any.
    fn write_replaced(
        &mut self,
        out: &mut impl Write,
        at: &str,
        screen: Screen,
        span_ns: u64,
    ) -> std::io::Result<bool> {
        let replaced = std::mem::take(&mut self.replaced);
        for (pid, interval) in &replaced {
            line(out, screen, &mut self.lines, at, *pid, interval, &interval.gc, span_ns)?;
        }
        Ok(!replaced.is_empty())
    }

    /// Writes the lines of the interval if it is over. A cycle counts where it ends.
    pub(super) fn write_due(
        &mut self,
        out: &mut impl Write,
        clock: WallClock,
        screen: Screen,
        now: u64,
    ) -> std::io::Result<()> {
        let Some(began) = self.began_ns.filter(|began| now.saturating_sub(*began) >= self.every_ns) else {
            return Ok(());
        };
        let at = format!("{}Z", &time_of_day(clock.epoch_seconds(now))[..8]);
        let span_ns = now.saturating_sub(self.written_ns);
        let has_lines = self.write_replaced(out, &at, screen, span_ns)?;
        let (mut quiet, mut sees_cycles) = (0_u64, self.quiet_ends.take());
        for (pid, interval) in &mut self.processes {
            let gc = std::mem::take(&mut interval.gc);
            // A single process always has a line, as in `vmstat`; in a fleet only processes that collected have one.
            if gc.is_empty() && self.lines > 0 {
                quiet += 1;
                sees_cycles = Some(interval.and_sees_cycles(sees_cycles));
                continue;
            }
            line(out, screen, &mut self.lines, &at, *pid, interval, &gc, span_ns)?;
        }
        let alone = quiet == self.processes.len() as u64 && !has_lines;
        if let Some(sees_cycles) = sees_cycles.filter(|_| alone) {
            let nothing = if sees_cycles { "no cycles" } else { "nothing seen" };
            writeln!(out, "{at:<9} {nothing}")?;
        }
        self.processes.retain(|_, interval| !interval.ended);
        self.written_ns = now;
        // Late lines do not shift the following ones, unless a whole interval was missed.
        let next = began + self.every_ns;
        self.began_ns = Some(if now - next < self.every_ns { next } else { now });
        Ok(())
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the columns")]
fn line(
    out: &mut impl Write,
    screen: Screen,
    lines: &mut u64,
    at: &str,
    pid: u32,
    interval: &Interval,
    gc: &GcSummary,
    span_ns: u64,
) -> std::io::Result<()> {
    if lines.is_multiple_of(HEADING_EVERY) {
        let heading = format!(
            "{:<9} {:>7} {:<10} {:>6} {:>5} {:>6} {:>8} {:>8} {:>8} TOP LINE",
            "TIME", "PID", "PROGRAM", "CYCLES", "MAJOR", "GC%", "TOTAL", "MAX", "RSS"
        );
        writeln!(out, "{}", screen.paint(heading, Some(Colour::Dim)))?;
    }
    *lines += 1;
    let known = |is_known: bool, text: String| if is_known { text } else { "-".to_owned() };
    let (has_cycles, has_pauses) = (interval.method == Method::Sites, interval.method.times_pauses());
    // A cycle that began before the span may have been stopped for longer than the span.
    let has_share = has_pauses && span_ns > 0 && gc.stopped_ns <= span_ns;
    let share = format!("{:.1}%", gc.stopped_ns as f64 * 100.0 / span_ns.max(1) as f64);
    let columns = format!(
        "{at:<9} {pid:>7} {:<10} {:>6} {:>5} {:>6} {:>8} {:>8} {:>8}",
        clip(&interval.name, 10),
        known(has_cycles, gc.count(None).to_string()),
        known(has_cycles, gc.count(Some("major")).to_string()),
        known(has_share, share),
        known(has_pauses, duration(gc.stopped_ns)),
        known(has_pauses, duration(gc.stops.max_ns())),
        interval.rss.map_or_else(|| "-".to_owned(), bytes),
    );
    let room = screen.width().map_or(usize::MAX, |width| width.saturating_sub(columns.chars().count() + 1));
    let lines = gc.lines();
    let top = lines.first().and_then(|line| line.frame.as_ref()).filter(|_| room > 3);
    let top = top.map_or_else(String::new, |frame| place_within(frame, room));
    writeln!(out, "{}", format!("{columns} {top}").trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::services::tests::END,
        export::profile,
        model::{EndReason, GcWork, seen::ProcessEnd},
    };

    const S: u64 = 1_000_000_000;

    struct Lines {
        intervals: Intervals,
        out: Vec<u8>,
    }

    impl Lines {
        /// Intervals of a process first seen at second 1.
        fn new(process: &Process) -> Self {
            let mut intervals = Intervals::new(S);
            intervals.see(process, Seen::Process { state: None, now_ns: S, since_ns: S });
            Self { intervals, out: Vec::new() }
        }

        fn pause(&mut self, process: &Process, ns: u64) {
            let work = GcWork { phase: WorkPhase::Pause, tid: 1, comm: "ruby".into(), begin_ns: 1, ns };
            self.intervals.see(process, Seen::Work(&work));
        }

        /// The lines written at this time: the share and the sum of GC time.
        fn at(&mut self, now: u64, last: bool) -> Vec<String> {
            let (clock, screen) = (WallClock::with_offsets(0, 0), Screen::none());
            if last {
                self.intervals.write_rest(&mut self.out, clock, screen, now).unwrap();
            } else {
                self.intervals.write_due(&mut self.out, clock, screen, now).unwrap();
            }
            let text = String::from_utf8(std::mem::take(&mut self.out)).unwrap();
            let of = |line: &str| line.split_whitespace().skip(5).take(2).collect::<Vec<_>>().join(" ");
            text.lines().filter(|line| !line.starts_with("TIME")).map(of).collect()
        }
    }

    fn process() -> Process {
        let (mut process, _) = profile::a_sample(5);
        process.comm = "app".into();
        std::sync::Arc::make_mut(&mut process.image).method = Method::UsdtPauses;
        process
    }

    fn end(reason: EndReason) -> ProcessEnd {
        ProcessEnd { reason, ts_ns: S, ..END }
    }

    /// A share is relative to the time since the last lines, which may have been late; the rest has its own length.
    #[test]
    fn late_lines() {
        let process = process();
        let mut lines = Lines::new(&process);
        lines.pause(&process, S / 5);
        assert!(lines.at(S + S / 2, false).is_empty());
        // Half a second late.
        assert_eq!(lines.at(2 * S + S / 2, false), ["13.3% 200.0ms"]);
        lines.pause(&process, S / 4);
        assert_eq!(lines.at(3 * S, false), ["50.0% 250.0ms"]);
        lines.pause(&process, S / 8);
        assert_eq!(lines.at(3 * S + S / 4, true), ["50.0% 125.0ms"]);
        assert!(lines.at(4 * S, true).is_empty());
    }

    /// A cycle counts where it ends: no share is shown if the time is shorter than its stops, or for an instant at the end.
    #[test]
    fn stops_before_the_span() {
        let process = process();
        let mut lines = Lines::new(&process);
        lines.pause(&process, S + S / 5);
        assert_eq!(lines.at(2 * S, false), ["- 1.20s"]);
        lines.pause(&process, S / 1000);
        assert_eq!(lines.at(2 * S + S / 20, true), ["- 1.00ms"]);
    }

    /// What a program did before it was replaced by another one has a line of its own.
    #[test]
    fn replaced() {
        let process = process();
        let mut lines = Lines::new(&process);
        lines.pause(&process, S / 10);
        let end = end(EndReason::Execed);
        lines.intervals.see(&process, Seen::Ended(&end));
        lines.intervals.see(&process, Seen::Process { state: None, now_ns: S + 1, since_ns: S + 1 });
        lines.pause(&process, S / 2);
        assert_eq!(lines.at(2 * S, false), ["10.0% 100.0ms", "50.0% 500.0ms"]);
        // Nothing more is reported about an ended process.
        lines.intervals.see(&process, Seen::Ended(&end));
        assert_eq!(lines.at(3 * S, false).len(), 1);
        assert!(lines.at(4 * S, false).is_empty());
    }

    /// Without a line of any process, it is said that there were no cycles only if these are seen of each.
    #[test]
    fn nothing() {
        let quiet = |methods: [Method; 2], ends: bool| {
            let mut lines = Lines::new(&process());
            lines.at(2 * S, false);
            lines.intervals.processes.clear();
            for (pid, method) in (1..).zip(methods) {
                let mut process = Process { pid, ..process() };
                std::sync::Arc::make_mut(&mut process.image).method = method;
                lines.intervals.see(&process, Seen::Process { state: None, now_ns: S, since_ns: S });
                if ends {
                    lines.intervals.see(&process, Seen::Ended(&end(EndReason::Exited)));
                }
            }
            assert_eq!(lines.intervals.processes.is_empty(), ends);
            let clock = WallClock::with_offsets(0, 0);
            lines.intervals.write_due(&mut lines.out, clock, Screen::none(), 3 * S).unwrap();
            String::from_utf8(lines.out).unwrap()
        };
        for ends in [false, true] {
            assert_eq!(quiet([Method::Sites; 2], ends), "00:00:03Z no cycles\n");
            assert_eq!(quiet([Method::Functions, Method::Sites], ends), "00:00:03Z nothing seen\n");
            assert_eq!(quiet([Method::Sites, Method::UsdtPauses], ends), "00:00:03Z nothing seen\n");
        }
    }

    /// Processes that have ended without a collection are not kept until the interval is over.
    #[test]
    fn many() {
        let mut lines = Lines::new(&process());
        for pid in 100..200 {
            let process = Process { pid, ..process() };
            lines.intervals.see(&process, Seen::Process { state: None, now_ns: S, since_ns: S });
            if pid == 150 {
                lines.pause(&process, S / 10);
            }
            lines.intervals.see(&process, Seen::Ended(&end(EndReason::Exited)));
        }
        assert_eq!(lines.intervals.processes.len(), 2);
        assert_eq!(lines.at(2 * S, false), ["0.0% 0", "10.0% 100.0ms"]);
        assert_eq!(lines.at(3 * S, false).len(), 1, "no cycles");
    }
}
