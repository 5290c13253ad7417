//! One readable line per GC cycle.

use std::{io::Write, sync::Arc};

use gctrace_tunemygc::printable::printable;

use super::{ExportError, Exporter, ProcessEnd, text_gvl::GvlTable};
use crate::{
    enrich::clock::WallClock,
    ledger::Ledger,
    model::{
        GcCycle, GcState, GcWork, Process,
        gvl::{GvlProcessSummary, GvlThreadSummary, GvlWait},
        stack::{Frame, FrameKind, Stack},
    },
};

/// Writes lines for people.
pub struct Text<W: Write> {
    out: W,
    clock: WallClock,
    lines: u64,
    gvl: GvlTable,
}

/// The heading is repeated after this many lines, as in `vmstat`.
const HEADING_EVERY: u64 = 50;

impl<W: Write> Text<W> {
    /// Lines go to `out`.
    pub fn new(out: W, clock: WallClock) -> Self {
        Self { out, clock, lines: 0, gvl: GvlTable::default() }
    }

    fn heading(&mut self) -> std::io::Result<()> {
        writeln!(
            self.out,
            "{:<12} {:>7} {:<12} {:>6} {:<5} {:<18} {:>9} {:>9} {:>9} {:>5} {:>9} {:>9} {:>8}",
            "TIME",
            "PID",
            "COMM",
            "GC",
            "KIND",
            "WHY",
            "PAUSE",
            "MARK",
            "SWEEP",
            "STEPS",
            "LIVE",
            "FREE",
            "RSS"
        )
    }

    /// Work of an unknown cycle: the columns that are known.
    fn work_line(&mut self, process: &Process, work: &GcWork) -> std::io::Result<()> {
        if self.lines.is_multiple_of(HEADING_EVERY) {
            self.heading()?;
        }
        self.lines += 1;
        writeln!(
            self.out,
            "{:<12} {:>7} {:<12} {:>6} {:<5} {:<18} {:>9}",
            time_of_day(self.clock.epoch_seconds(work.begin_ns)),
            process.pid,
            clip(&work.comm, 12),
            "-",
            "-",
            work.phase.name(),
            duration(work.ns),
        )
    }

    /// A long wait for the GVL: the columns that are known.
    fn wait_line(&mut self, process: &Process, wait: &GvlWait) -> std::io::Result<()> {
        if self.lines.is_multiple_of(HEADING_EVERY) {
            self.heading()?;
        }
        self.lines += 1;
        write!(
            self.out,
            "{:<12} {:>7} {:<12} {:>6} {:<5} {:<18} {:>9}",
            time_of_day(self.clock.epoch_seconds(wait.begin_ns)),
            process.pid,
            clip(&wait.who.comm, 12),
            "-",
            "wait",
            "GVL",
            duration(wait.ns),
        )?;
        if let Some(blocker) = &wait.blocker {
            let who = &blocker.hold.who;
            write!(self.out, "  for {} {}", who.tid, clip(&who.comm, 16))?;
            let at = |stack: &Stack| ruby_frame(stack).map(place);
            // What it did says more than where it stopped.
            if let Some(place) = blocker.ran.first().and_then(|(_, stack)| at(stack)) {
                write!(self.out, " running {place}")?;
            } else if let Some(place) = blocker.until.as_ref().and_then(at) {
                write!(self.out, " until {place}")?;
            }
        }
        if let Some(frame) = wait.stack.as_deref().and_then(ruby_frame) {
            write!(self.out, "  in {}", place(frame))?;
        }
        writeln!(self.out)
    }

    fn line(&mut self, process: &Process, cycle: &GcCycle) -> std::io::Result<()> {
        if self.lines.is_multiple_of(HEADING_EVERY) {
            self.heading()?;
        }
        self.lines += 1;
        let (mut mark, mut sweep) = (0, 0);
        for pause in &cycle.pauses {
            mark += pause.mark_ns;
            sweep += pause.sweep_ns;
        }
        let info = &cycle.start.info;
        let why = match (info.gc_by, info.major_by) {
            (Some(by), Some(major)) => format!("{by}, {major}"),
            (Some(by), None) => by.to_owned(),
            (None, major) => major.unwrap_or("?").to_owned(),
        };
        let state = cycle.end.as_ref().unwrap_or(&cycle.start);
        let slots = |name| stat(process, state, name).map_or_else(|| "-".to_owned(), count);
        let memory = state.memory.or(cycle.start.memory);
        let rss = memory.map_or_else(|| "-".to_owned(), |memory| bytes(memory.rss));
        write!(
            self.out,
            "{:<12} {:>7} {:<12} {:>6} {:<5} {:<18} {:>9} {:>9} {:>9} {:>5} {:>9} {:>9} {:>8}",
            time_of_day(self.clock.epoch_seconds(cycle.start.ts_ns)),
            process.pid,
            clip(&cycle.comm, 12),
            format!("#{}", cycle.count),
            cycle.kind(),
            why,
            duration(cycle.pause_ns()),
            duration(mark),
            duration(sweep),
            cycle.pauses.len(),
            slots("heap_live_slots"),
            slots("heap_free_slots"),
            rss,
        )?;
        if cycle.compacted(process) == Some(true) {
            write!(self.out, "  sweep includes compaction")?;
        }
        if let Some(frame) = cycle.trigger.as_deref().and_then(ruby_frame) {
            write!(self.out, "  by {}", place(frame))?;
        }
        if cycle.end.is_none() {
            write!(self.out, "  unfinished")?;
        }
        if cycle.lost > 0 {
            write!(self.out, "  {} events lost before this", cycle.lost)?;
        }
        writeln!(self.out)
    }
}

impl<W: Write> Exporter for Text<W> {
    fn process(&mut self, _: &Process, _: Option<&GcState>) -> Result<(), ExportError> {
        Ok(())
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        self.line(process, cycle).map_err(ExportError::Stdout)
    }

    fn work(&mut self, process: &Process, work: &GcWork) -> Result<(), ExportError> {
        self.work_line(process, work).map_err(ExportError::Stdout)
    }

    fn gvl_wait(&mut self, process: &Process, wait: &GvlWait) -> Result<(), ExportError> {
        self.wait_line(process, wait).map_err(ExportError::Stdout)
    }

    fn gvl_thread(&mut self, process: &Process, thread: &GvlThreadSummary) -> Result<(), ExportError> {
        self.gvl.thread(process.pid, thread);
        Ok(())
    }

    fn gvl_process(&mut self, process: &Process, summary: &GvlProcessSummary) -> Result<(), ExportError> {
        self.gvl.process(&mut self.out, process, summary).map_err(ExportError::Stdout)
    }

    fn ended(&mut self, _: &Process, _: &ProcessEnd) -> Result<(), ExportError> {
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        self.flush()
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        self.out.flush().map_err(ExportError::Stdout)
    }
}

fn stat(process: &Process, state: &GcState, name: &str) -> Option<u64> {
    let at = process.image.stat_keys.iter().position(|key| *key == name)?;
    state.stat.get(at).copied()
}

/// The innermost frame that is Ruby code: the line that allocated (or called `GC.start`).
fn ruby_frame(stack: &[Arc<Frame>]) -> Option<&Frame> {
    stack.iter().find(|frame| frame.kind == FrameKind::Ruby).map(AsRef::as_ref)
}

/// `Foo#bar app.rb:12`.
fn place(frame: &Frame) -> String {
    let name = clip(&frame.name, 60);
    match frame.file.as_deref() {
        Some(file) => format!("{name} {}:{}", clip(file.rsplit('/').next().unwrap_or(file), 40), frame.line),
        None => name,
    }
}

/// `HH:MM:SS.mmm`, UTC.
fn time_of_day(epoch: f64) -> String {
    let millis = (epoch * 1e3) as u64;
    let (seconds, millis) = (millis / 1000 % 86_400, millis % 1000);
    format!("{:02}:{:02}:{:02}.{millis:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Nanoseconds with a fitting unit.
pub(crate) fn duration(ns: u64) -> String {
    match ns {
        0 => "0".to_owned(),
        1..1_000_000 => format!("{:.0}µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}ms", ns as f64 / 1e6),
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

fn bytes(n: u64) -> String {
    format!("{:.1}M", n as f64 / f64::from(1 << 20))
}

pub(super) fn clip(text: &str, width: usize) -> String {
    printable(text).chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The trigger is the innermost Ruby frame: below it, the C function that allocated; its line is the one that runs.
    #[test]
    fn trigger() {
        let frame = |kind, name: &str, file: Option<&str>| {
            let (name, file) = (Arc::from(name), file.map(Arc::from));
            Arc::new(Frame { kind, name, file, line: 12, first_line: 10, address: 0 })
        };
        let stack = [
            frame(FrameKind::Native, "newobj_slowpath", Some("/lib/libruby.so.3.3")),
            frame(FrameKind::CFunction, "String#*", None),
            frame(FrameKind::Ruby, "Foo#bar\n", Some("/srv/app/lib/app.rb")),
            frame(FrameKind::Ruby, "<main>", Some("/srv/app/main.rb")),
        ];
        assert_eq!(ruby_frame(&stack).map(place).as_deref(), Some("Foo#bar\\u{a} app.rb:12"));
        assert!(ruby_frame(&stack[..2]).is_none());
    }

    /// Units change where the numbers get long.
    #[test]
    fn units() {
        assert_eq!(duration(0), "0");
        assert_eq!(duration(1_500), "2µs");
        assert_eq!(duration(1_234_567), "1.23ms");
        assert_eq!(duration(2_500_000_000), "2.50s");
        assert_eq!(count(99_999), "99999");
        assert_eq!(count(551_887), "551.9k");
        assert_eq!(bytes(132_255_744), "126.1M");
        assert_eq!(time_of_day(1_422_023_921.481), "14:38:41.481");
    }
}
