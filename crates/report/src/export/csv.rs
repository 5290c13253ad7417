//! GC cycles as a table for spreadsheets: comma-separated values (RFC 4180), a row for each cycle.
//!
//! Text from outside that a spreadsheet would take for a formula is prefixed with an apostrophe, which spreadsheets hide.

use std::{
    fs::File,
    io::{self, BufWriter, Seek as _, Write as _},
    path::{Path, PathBuf},
};

use super::{
    ExportError, Exporter, file,
    place::{program, started_by},
    text::{stat, why},
};
use crate::{
    clock::WallClock,
    console::say,
    ledger::Ledger,
    model::{GcCycle, Process, seen::Seen},
    words::{data_size, utc},
};

/// The columns, with their units.
const COLUMNS: [&str; 18] = [
    "time_utc",
    "pid",
    "program",
    "ruby",
    "gc_count",
    "kind",
    "reason",
    "total_ns",
    "max_ns",
    "mark_ns",
    "sweep_ns",
    "other_ns",
    "stops",
    "live_slots",
    "free_slots",
    "rss_bytes",
    "complete",
    "started_by",
];

/// Writes the table when the run ends. Until then the rows are in an unnamed file.
pub struct Csv {
    path: PathBuf,
    rows: BufWriter<File>,
    clock: WallClock,
    failed: bool,
}

impl Csv {
    /// Creates the table for `path`.
    ///
    /// # Errors
    ///
    /// The path cannot be written to.
    pub fn new(path: &Path, clock: WallClock) -> Result<Self, ExportError> {
        file::check_path(path)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let rows = tempfile::tempfile_in(dir)
            .map_err(|source| ExportError::Unwritable { path: path.to_owned(), source })?;
        let mut csv = Self { path: path.to_owned(), rows: BufWriter::new(rows), clock, failed: false };
        let header = COLUMNS.join(",");
        write!(csv.rows, "{header}\r\n").map_err(|source| csv.error(source))?;
        Ok(csv)
    }

    fn error(&self, source: io::Error) -> ExportError {
        ExportError::File { path: self.path.clone(), source }
    }
}

/// Formats a text as a cell. `outside`: the text does not come from gctrace itself.
fn cell(text: &str, outside: bool) -> String {
    let is_formula = outside && text.starts_with(['=', '+', '-', '@', '\t', '\r', '\n']);
    let text = if is_formula { format!("'{text}") } else { text.to_owned() };
    if text.contains([',', '"', '\r', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

fn row(process: &Process, cycle: &GcCycle, clock: WallClock) -> String {
    let epoch_ns = clock.epoch_nanos(cycle.start.ts_ns);
    let second = utc(epoch_ns.div_euclid(1_000_000_000));
    let state = cycle.end.as_ref().unwrap_or(&cycle.start);
    let known = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
    // No pause of this cycle has ended yet, so their times are unknown.
    let stops = !cycle.pauses.is_empty();
    let sum =
        |part: fn(&crate::model::Pause) -> u64| known(stops.then(|| cycle.pauses.iter().map(part).sum()));
    let cells = [
        format!("{}.{:09}Z", second.trim_end_matches('Z'), epoch_ns.rem_euclid(1_000_000_000)),
        process.pid.to_string(),
        cell(&program(process), true),
        process.image.version.to_string(),
        cycle.count.to_string(),
        cycle.kind().to_owned(),
        cell(&why(cycle), false),
        sum(|pause| pause.ns),
        known(stops.then(|| cycle.max_pause_ns())),
        sum(|pause| pause.mark_ns),
        sum(|pause| pause.sweep_ns),
        sum(|pause| pause.other_ns),
        cycle.pauses.len().to_string(),
        known(stat(process, state, "heap_live_slots")),
        known(stat(process, state, "heap_free_slots")),
        known(state.memory.or(cycle.start.memory).map(|memory| memory.rss)),
        (if cycle.end.is_some() { "yes" } else { "no" }).to_owned(),
        cell(&started_by(cycle.trigger.as_deref().unwrap_or_default()).unwrap_or_default(), true),
    ];
    cells.join(",")
}

impl Exporter for Csv {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let Seen::Cycle(cycle) = seen else { return Ok(()) };
        if self.failed {
            return Ok(());
        }
        let row = row(process, cycle, self.clock);
        write!(self.rows, "{row}\r\n").map_err(|source| {
            self.failed = true;
            self.error(source)
        })
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        // The error was reported already, and half a table is of no use.
        if self.failed {
            return Ok(());
        }
        let mut copy = || {
            self.rows.flush()?;
            let rows = self.rows.get_mut();
            rows.rewind()?;
            file::write_atomically(&self.path, |out| io::copy(rows, out).map(drop))
        };
        copy().map_err(|source| self.error(source))?;
        let size = std::fs::metadata(&self.path).map_or(0, |file| file.len());
        say(&format!("gctrace: wrote {} ({}): GC cycles, one per row", self.path.display(), data_size(size)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parses a line according to RFC 4180.
    fn cells(text: &str) -> Vec<String> {
        let mut found = vec![String::new()];
        let mut quoted = false;
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '"' if quoted && chars.peek() == Some(&'"') => {
                    found.last_mut().unwrap().push(chars.next().unwrap());
                }
                '"' => quoted = !quoted,
                ',' if !quoted => found.push(String::new()),
                c => found.last_mut().unwrap().push(c),
            }
        }
        assert!(!quoted, "{text}");
        found
    }

    proptest! {
        /// Cells read back as written; text from outside is never a formula, and gctrace's own figures are not changed.
        #[test]
        fn any_text(texts in proptest::collection::vec("[=+@,\"'\r\n\t -]{0,3}.{0,8}", 1..5)) {
            let line: Vec<String> = texts.iter().map(|text| cell(text, true)).collect();
            let read = cells(&line.join(","));
            prop_assert_eq!(read.len(), texts.len());
            for (read, text) in read.iter().zip(&texts) {
                prop_assert!(!read.starts_with(['=', '+', '-', '@', '\t', '\r', '\n']), "{read:?}");
                prop_assert_eq!(read.strip_prefix('\'').filter(|rest| rest == text).unwrap_or(read), text);
            }
            prop_assert_eq!(cells(&cell(&texts[0], false)), vec![texts[0].clone()]);
        }
    }

    /// A row has a cell for each column.
    #[test]
    fn rows() {
        let process = Process { cmdline: None, ..crate::trace_file::samples::process() };
        crate::trace_file::samples::all(1_500_000_000, &mut |_, seen| {
            let Seen::Cycle(cycle) = seen else { return };
            let cells = cells(&row(&process, cycle, WallClock::with_offsets(0, 0)));
            assert_eq!(cells.len(), COLUMNS.len(), "{cells:?}");
            assert_eq!(&cells[..3], ["1970-01-01T00:00:01.500000000Z", "4242", "shop"]);
            assert_eq!(&cells[5..13], ["major", "nofree", "120", "60", "20", "40", "60", "2"]);
            assert_eq!(cells[16], if cycle.end.is_some() { "yes" } else { "no" });
        });
    }
}
