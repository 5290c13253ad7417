//! One readable line per GC cycle.

use std::io::Write;

use super::{ExportError, Exporter, ProcessEnd};
use crate::{
    enrich::clock::WallClock,
    ledger::Ledger,
    model::{GcCycle, GcState, GcWork, Process},
};

/// Writes lines for people.
pub struct Text<W: Write> {
    out: W,
    clock: WallClock,
    lines: u64,
}

/// The heading is repeated after this many lines, as in `vmstat`.
const HEADING_EVERY: u64 = 50;

impl<W: Write> Text<W> {
    /// Lines go to `out`.
    pub fn new(out: W, clock: WallClock) -> Self {
        Self { out, clock, lines: 0 }
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

fn clip(text: &str, width: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
