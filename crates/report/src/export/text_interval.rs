//! `--interval`: a line per process and interval in place of one per cycle.

use std::{collections::BTreeMap, io::Write};

use gctrace_common::event::Phase as WorkPhase;

use super::{
    place::{place_within, program},
    text::{bytes, clip, duration, time_of_day},
};
use crate::{
    aggregate::gc_summary::GcSummary,
    clock::WallClock,
    model::{Process, seen::Seen},
    ruby::fallback::Method,
    terminal::{Colour, Screen},
};

/// The heading is repeated after this many lines.
const HEADING_EVERY: u64 = 50;

/// What happened in each process since the last lines.
pub(super) struct Intervals {
    every_ns: u64,
    /// When the interval began; `None`: no process has been seen yet.
    began_ns: Option<u64>,
    processes: BTreeMap<u32, Interval>,
    lines: u64,
}

struct Interval {
    name: String,
    /// What is known of its GC.
    method: Method,
    rss: Option<u64>,
    gc: GcSummary,
    ended: bool,
}

impl Intervals {
    /// Intervals of this length.
    pub(super) fn new(every_ns: u64) -> Self {
        Self { every_ns, began_ns: None, processes: BTreeMap::new(), lines: 0 }
    }

    /// Something was seen of a process.
    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        if let Seen::Process { state, now_ns } = seen {
            let rss = state.and_then(|state| state.memory).map(|memory| memory.rss);
            let (name, method, gc) = (program(process), process.image.method, GcSummary::default());
            let interval = Interval { name, method, rss, gc, ended: false };
            self.processes.insert(process.pid, interval);
            self.began_ns.get_or_insert(now_ns);
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
        let mut quiet = 0_u64;
        for (pid, interval) in &mut self.processes {
            let gc = std::mem::take(&mut interval.gc);
            // A single process always has a line, as in `vmstat`; in a fleet only processes that collected have one.
            if gc.is_empty() && self.lines > 0 {
                quiet += 1;
                continue;
            }
            line(out, screen, &mut self.lines, &at, *pid, interval, &gc, now - began)?;
        }
        let alone = quiet == self.processes.len() as u64;
        if alone && quiet > 0 {
            writeln!(out, "{at:<9} no cycles")?;
        }
        self.processes.retain(|_, interval| !interval.ended);
        // Late lines do not shift those that follow, unless a whole interval was missed.
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
    let share = format!("{:.1}%", gc.stopped_ns as f64 * 100.0 / span_ns.max(1) as f64);
    let columns = format!(
        "{at:<9} {pid:>7} {:<10} {:>6} {:>5} {:>6} {:>8} {:>8} {:>8}",
        clip(&interval.name, 10),
        known(has_cycles, gc.count(None).to_string()),
        known(has_cycles, gc.count(Some("major")).to_string()),
        known(has_pauses, share),
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
