//! One readable line per GC cycle.

use std::io::Write;

use super::{
    ExportError, Exporter,
    place::{clip, place, program, started_by, started_by_within},
};
use crate::{
    clock::WallClock,
    ledger::Ledger,
    model::{GcCycle, GcState, GcWork, Process, gvl::GvlWait, seen::Seen, source::ruby_frame, stack::Stack},
    terminal::{Colour, Screen},
    words::plural,
};

mod gvl;
mod interval;

use gvl::GvlTable;
use interval::Intervals;

/// Which cycles have lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Only cycles with a stop of at least this length have lines, nanoseconds.
    pub min_pause_ns: u64,
    /// If set: one line per process at this interval, nanoseconds, instead of lines for cycles.
    pub interval_ns: Option<u64>,
    /// No lines at all.
    pub none: bool,
}

/// Writes lines as text.
pub struct Text<W: Write> {
    out: W,
    clock: WallClock,
    screen: Screen,
    lines: Lines,
    written: u64,
    layout: Option<Layout>,
    gvl: GvlTable,
    intervals: Option<Intervals>,
    closed_ns: Option<u64>,
}

/// The heading is repeated after this many lines, as in `vmstat`.
const HEADING_EVERY: u64 = 50;
/// Length of a stop that a user may notice, nanoseconds.
const LONG_NS: u64 = 20_000_000;
/// Length of a stop that a user notices, nanoseconds.
const VERY_LONG_NS: u64 = 100_000_000;

/// Which columns fit the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// A pipe, a file or a wide terminal: all columns.
    Full,
    Medium,
    /// 80 columns.
    Narrow,
}

impl Layout {
    fn of(width: Option<usize>) -> Self {
        match width {
            None | Some(160..) => Self::Full,
            Some(120..) => Self::Medium,
            Some(_) => Self::Narrow,
        }
    }

    fn columns(self) -> &'static [Column] {
        match self {
            Self::Full => &FULL,
            Self::Medium => &MEDIUM,
            Self::Narrow => &NARROW,
        }
    }
}

/// A column: its heading, width, and whether it is right-aligned because it holds numbers.
struct Column {
    id: Id,
    name: &'static str,
    width: usize,
    right: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Id {
    Time,
    Pid,
    Program,
    Gc,
    Kind,
    Why,
    Total,
    Max,
    Mark,
    Sweep,
    Steps,
    Live,
    Free,
    Rss,
}

const fn left(id: Id, name: &'static str, width: usize) -> Column {
    Column { id, name, width, right: false }
}

const fn right(id: Id, name: &'static str, width: usize) -> Column {
    Column { id, name, width, right: true }
}

static FULL: [Column; 14] = [
    left(Id::Time, "TIME", 13),
    right(Id::Pid, "PID", 7),
    left(Id::Program, "PROGRAM", 16),
    right(Id::Gc, "GC", 7),
    left(Id::Kind, "KIND", 5),
    left(Id::Why, "WHY", 18),
    right(Id::Total, "TOTAL", 9),
    right(Id::Max, "MAX", 9),
    right(Id::Mark, "MARK", 9),
    right(Id::Sweep, "SWEEP", 9),
    right(Id::Steps, "STEPS", 5),
    right(Id::Live, "LIVE", 9),
    right(Id::Free, "FREE", 9),
    right(Id::Rss, "RSS", 8),
];

static MEDIUM: [Column; 9] = [
    left(Id::Time, "TIME", 13),
    right(Id::Pid, "PID", 7),
    left(Id::Program, "PROGRAM", 12),
    right(Id::Gc, "GC", 6),
    left(Id::Kind, "KIND", 5),
    left(Id::Why, "WHY", 15),
    right(Id::Total, "TOTAL", 8),
    right(Id::Max, "MAX", 8),
    right(Id::Rss, "RSS", 7),
];

static NARROW: [Column; 7] = [
    left(Id::Time, "TIME", 9),
    right(Id::Pid, "PID", 6),
    left(Id::Program, "PROGRAM", 9),
    left(Id::Kind, "KIND", 5),
    left(Id::Why, "WHY", 10),
    right(Id::Total, "TOTAL", 7),
    right(Id::Max, "MAX", 7),
];

impl<W: Write> Text<W> {
    /// Writes lines to `out`, which is displayed on `screen`.
    pub fn new(out: W, clock: WallClock, screen: Screen, lines: Lines) -> Self {
        let intervals = lines.interval_ns.filter(|_| !lines.none).map(Intervals::new);
        Self {
            out,
            clock,
            screen,
            lines,
            written: 0,
            layout: None,
            gvl: GvlTable::default(),
            intervals,
            closed_ns: None,
        }
    }

    /// Whether lines of single events are written.
    fn single(&self) -> bool {
        !self.lines.none && self.intervals.is_none()
    }

    /// Writes a line: its columns, then as much of the remaining text as fits.
    fn write(
        &mut self,
        cell: impl Fn(Id, usize) -> (String, Option<Colour>),
        tail: impl FnOnce(Option<usize>) -> String,
    ) -> std::io::Result<()> {
        let width = self.screen.width();
        let layout = Layout::of(width);
        let changed = self.layout.replace(layout) != Some(layout);
        if changed || self.written.is_multiple_of(HEADING_EVERY) {
            let names: Vec<String> = layout
                .columns()
                .iter()
                .map(|column| aligned(column.name, column.width, column.right))
                .collect();
            let heading = names.join(" ");
            writeln!(self.out, "{}", self.screen.paint(heading.trim_end().to_owned(), Some(Colour::Dim)))?;
        }
        self.written += 1;
        let mut used = 0;
        let mut line = String::new();
        for column in layout.columns() {
            let (text, colour) = cell(column.id, column.width);
            // Text is cut only if the line has a limited width; numbers are never cut.
            let text = if layout == Layout::Full || column.right { text } else { clip(&text, column.width) };
            let text = aligned(&text, column.width, column.right);
            used += text.chars().count() + 1;
            line.push_str(&self.screen.paint(text, colour));
            line.push(' ');
        }
        let room = width.map(|width| width.saturating_sub(used + 1));
        let tail = tail(room);
        let tail = room.map_or_else(|| tail.clone(), |room| clip(&tail, room));
        if !tail.is_empty() {
            line.push(' ');
            line.push_str(&tail);
        }
        writeln!(self.out, "{}", line.trim_end())
    }

    /// Work of an unknown cycle, with the columns that are known.
    fn work_line(&mut self, process: &Process, work: &GcWork) -> std::io::Result<()> {
        let at = self.clock.epoch_seconds(work.begin_ns);
        let cell = |id, width| {
            let text = match id {
                Id::Kind => "-".to_owned(),
                Id::Why => work.phase.name().to_owned(),
                Id::Total => duration(work.ns),
                other => who(other, width, at, process),
            };
            (text, None)
        };
        self.write(cell, |_| String::new())
    }

    /// A long wait for the GVL, with the columns that are known.
    fn wait_line(&mut self, process: &Process, wait: &GvlWait) -> std::io::Result<()> {
        let at = self.clock.epoch_seconds(wait.begin_ns);
        let cell = |id, width| {
            let text = match id {
                Id::Kind => "wait".to_owned(),
                Id::Why => "GVL".to_owned(),
                Id::Total => duration(wait.ns),
                other => who(other, width, at, process),
            };
            (text, None)
        };
        let at = |stack: &Stack| ruby_frame(stack).map(|frame| place(frame));
        let mut tail = format!("{} {}", wait.who.tid, clip(&wait.who.comm, 16));
        if let Some(place) = wait.stack.as_ref().and_then(at) {
            tail = format!("{tail} in {place}");
        }
        if let Some(blocker) = &wait.blocker {
            let who = &blocker.hold.who;
            tail = format!("{tail}  ← held by {} {}", who.tid, clip(&who.comm, 16));
            // What the holder was running says more than where it released the GVL.
            if let Some(place) = blocker.ran.first().and_then(|(_, stack)| at(stack)) {
                tail = format!("{tail} running {place}");
            } else if let Some(place) = blocker.until.as_ref().and_then(at) {
                tail = format!("{tail}, released in {place}");
            }
        }
        self.write(cell, |_| tail)
    }

    fn line(&mut self, process: &Process, cycle: &GcCycle) -> std::io::Result<()> {
        let (mut mark, mut sweep) = (0, 0);
        for pause in &cycle.pauses {
            mark += pause.mark_ns;
            sweep += pause.sweep_ns;
        }
        let state = cycle.end.as_ref().unwrap_or(&cycle.start);
        let slots = |name| stat(process, state, name).map_or_else(|| "-".to_owned(), count);
        let at = self.clock.epoch_seconds(cycle.start.ts_ns);
        let max_ns = cycle.max_pause_ns();
        let cell = |id, width| {
            let text = match id {
                Id::Gc => format!("#{}", cycle.count),
                Id::Kind => cycle.kind().to_owned(),
                Id::Why => why(cycle),
                // No pause of this cycle has ended yet, so their times are unknown.
                Id::Total | Id::Max | Id::Mark | Id::Sweep if cycle.pauses.is_empty() => "-".to_owned(),
                Id::Total => duration(cycle.pause_ns()),
                Id::Max => duration(max_ns),
                Id::Mark => duration(mark),
                Id::Sweep => duration(sweep),
                Id::Steps => cycle.pauses.len().to_string(),
                Id::Live => slots("heap_live_slots"),
                Id::Free => slots("heap_free_slots"),
                Id::Rss => {
                    let memory = state.memory.or(cycle.start.memory);
                    memory.map_or_else(|| "-".to_owned(), |memory| bytes(memory.rss))
                }
                other => who(other, width, at, process),
            };
            let colour = match id {
                Id::Kind if cycle.is_major() => Some(Colour::Yellow),
                Id::Max => match max_ns {
                    VERY_LONG_NS.. => Some(Colour::Red),
                    LONG_NS.. => Some(Colour::Yellow),
                    _ => None,
                },
                _ => None,
            };
            (text, colour)
        };
        let mut notes = String::new();
        if cycle.compacted(process) == Some(true) {
            notes.push_str("  sweep includes compaction");
        }
        if cycle.end.is_none() {
            notes.push_str("  unfinished");
        }
        if cycle.lost > 0 {
            notes = format!("{notes}  {} events lost before this", cycle.lost);
        }
        let tail = |room: Option<usize>| {
            let stack = cycle.trigger.as_deref().unwrap_or_default();
            let by = match room {
                None => started_by(stack).map(|by| format!("by {by}")),
                Some(room) => started_by(stack)
                    .filter(|by| by.chars().count() + notes.len() <= room)
                    .or_else(|| started_by_within(stack, room.saturating_sub(notes.len()))),
            };
            (by.unwrap_or_default() + &notes).trim_start().to_owned()
        };
        self.write(cell, tail)
    }
}

/// The columns that all lines have in common.
fn who(id: Id, width: usize, epoch: f64, process: &Process) -> String {
    match id {
        Id::Time if width < 13 => format!("{}Z", &time_of_day(epoch)[..8]),
        Id::Time => format!("{}Z", time_of_day(epoch)),
        Id::Pid => process.pid.to_string(),
        Id::Program => clip(&program(process), width),
        Id::Gc | Id::Max => "-".to_owned(),
        _ => String::new(),
    }
}

/// What started a cycle, and why it had to be a major one.
pub(super) fn why(cycle: &GcCycle) -> String {
    let info = &cycle.start.info;
    match (info.gc_by, info.major_by) {
        (Some(by), Some(major)) => format!("{by}, {major}"),
        (Some(by), None) => by.to_owned(),
        (None, major) => major.unwrap_or("?").to_owned(),
    }
}

fn aligned(text: &str, width: usize, right: bool) -> String {
    if right { format!("{text:>width$}") } else { format!("{text:<width$}") }
}

impl<W: Write> Exporter for Text<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if let Some(intervals) = &mut self.intervals {
            intervals.see(process, seen);
        }
        let long = |ns| ns >= self.lines.min_pause_ns;
        let written = match seen {
            Seen::Cycle(cycle) if self.single() && !cycle.is_shorter_than(self.lines.min_pause_ns) => {
                self.line(process, cycle)
            }
            Seen::Work(work) if self.single() && long(work.ns) => self.work_line(process, work),
            Seen::GvlWait(wait) if self.single() => self.wait_line(process, wait),
            Seen::GvlThread(thread) => {
                self.gvl.thread(process.pid, thread);
                Ok(())
            }
            Seen::GvlProcess(summary) => {
                self.gvl.process(&mut self.out, self.screen.width(), process, summary)
            }
            Seen::Ended(end) if end.before.missed() > 0 => {
                let cycles = plural(end.before.missed(), "cycle");
                writeln!(
                    self.out,
                    "{} (pid {}): {cycles} before tracing began",
                    program(process),
                    process.pid
                )
            }
            _ => Ok(()),
        };
        written.map_err(ExportError::Stdout)
    }

    fn closed(&mut self, ts_ns: u64) {
        self.closed_ns = Some(ts_ns);
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        if let (Some(intervals), Some(closed_ns)) = (&mut self.intervals, self.closed_ns) {
            intervals
                .write_rest(&mut self.out, self.clock, self.screen, closed_ns)
                .map_err(ExportError::Stdout)?;
        }
        self.out.flush().map_err(ExportError::Stdout)
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        if let Some(intervals) = &mut self.intervals {
            intervals
                .write_due(&mut self.out, self.clock, self.screen, now_ns)
                .map_err(ExportError::Stdout)?;
        }
        self.out.flush().map_err(ExportError::Stdout)
    }
}

pub(super) fn stat(process: &Process, state: &GcState, name: &str) -> Option<u64> {
    state.value(&process.image, name)
}

/// `HH:MM:SS.mmm`, UTC.
pub(super) fn time_of_day(epoch: f64) -> String {
    let millis = (epoch * 1e3) as u64;
    let (seconds, millis) = (millis / 1000 % 86_400, millis % 1000);
    format!("{:02}:{:02}:{:02}.{millis:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Nanoseconds with a suitable unit.
pub fn duration(ns: u64) -> String {
    match ns {
        0 => "0".to_owned(),
        1..=500 => "<1µs".to_owned(),
        501..999_500 => format!("{:.0}µs", ns as f64 / 1e3),
        999_500..100_000_000 => format!("{:.2}ms", ns as f64 / 1e6),
        100_000_000..1_000_000_000 => format!("{:.1}ms", ns as f64 / 1e6),
        _ => format!("{:.2}s", ns as f64 / 1e9),
    }
}

fn count(n: u64) -> String {
    match n {
        ..100_000 => n.to_string(),
        100_000..100_000_000 => format!("{:.1}k", n as f64 / 1e3),
        _ => format!("{:.1}M", n as f64 / 1e6),
    }
}

pub(super) fn bytes(n: u64) -> String {
    format!("{:.1}M", n as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        export::profile,
        model::{
            EndReason,
            seen::{CyclesBefore, ProcessEnd},
        },
    };

    /// Names come from outside: they can neither move the cursor nor start a new line.
    #[test]
    fn names_are_escaped() {
        let mut out = Vec::new();
        let mut text = Text::new(&mut out, WallClock::with_offsets(0, 0), Screen::none(), Lines::default());
        let (mut process, _) = profile::a_sample(5);
        process.comm = "\u{1b}[2J\nforged".into();
        let end = ProcessEnd {
            reason: EndReason::Detached,
            ts_ns: 1,
            since_ns: 0,
            outside_ns: 0,
            beyond_ns: 0,
            shutdown: None,
            cycles: 0,
            before: CyclesBefore::Missed(3),
            lost: 0,
        };
        text.see(&process, Seen::Ended(&end)).unwrap();
        drop(text);
        let out = String::from_utf8(out).unwrap();
        assert!(out.contains("3 cycles before tracing began"), "{out:?}");
        assert!(out.lines().count() == 1 && !out.contains('\u{1b}'), "{out:?}");
    }

    /// The unit changes when the numbers get long.
    #[test]
    fn units() {
        assert_eq!(duration(0), "0");
        assert_eq!([1, 500, 501, 999_499].map(duration), ["<1µs", "<1µs", "1µs", "999µs"]);
        assert_eq!(duration(1_500), "2µs");
        assert_eq!(duration(999_600), "1.00ms");
        assert_eq!(duration(1_234_567), "1.23ms");
        assert_eq!(duration(123_456_789), "123.5ms");
        assert_eq!(duration(2_500_000_000), "2.50s");
        assert_eq!(count(99_999), "99999");
        assert_eq!(count(551_887), "551.9k");
        assert_eq!(bytes(132_255_744), "126.1M");
        assert_eq!(time_of_day(1_422_023_921.481), "14:38:41.481");
    }
}
