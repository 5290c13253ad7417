//! Comparison of two censuses, and watching a heap.

use std::{
    io::{self, Write},
    thread,
    time::{Duration, Instant},
};

use gctrace_tunemygc::printable::printable;
use serde::Serialize;

use super::{
    count::{self, NOT_SWEPT, collections},
    failure::HeapFailure,
    jsonl, places,
    report::Report,
    saved::{Change, Saved, changes},
    target::Target,
    text,
};
use crate::{
    cli::{By, Format, HeapSettings},
    console::say,
    words::plural,
};

#[derive(Serialize)]
struct Line<'a> {
    r#type: &'static str,
    pid: u32,
    /// If the earlier census is of another program: what shows that.
    #[serde(skip_serializing_if = "Option::is_none")]
    other_program: Option<&'a str>,
    by: &'a str,
    name: &'a str,
    count: u64,
    count_before: u64,
    bytes: u64,
    bytes_before: u64,
    gc_count: u64,
    gc_count_before: u64,
    consistent: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
}

/// The two censuses to compare.
struct Pair<'a> {
    before: &'a Saved,
    after: &'a Saved,
    /// Time between them, if one process was watched.
    apart: Option<Duration>,
}

impl Pair<'_> {
    fn consistent(&self) -> bool {
        self.before.consistent && self.after.consistent
    }

    fn jsonl(&self, out: &mut impl Write, changes: &[Change]) -> io::Result<()> {
        let other = self.before.other_program(self.after);
        for change in changes {
            let line = Line {
                r#type: if self.apart.is_some() { "growth" } else { "diff" },
                pid: self.after.pid,
                other_program: other.as_deref(),
                by: &self.after.by,
                name: &change.name,
                count: change.after.count,
                count_before: change.before.count,
                bytes: change.after.bytes,
                bytes_before: change.before.bytes,
                gc_count: self.after.gc_count,
                gc_count_before: self.before.gc_count,
                consistent: self.consistent(),
                seconds: self.apart.map(|apart| (apart.as_secs_f64() * 1e3).round() / 1e3),
            };
            jsonl::line(out, &line)?;
        }
        Ok(())
    }

    fn text(&self, out: &mut impl Write, changes: &[Change], top: usize) -> io::Result<()> {
        let (before, after) = (self.before, self.after);
        if let Some(other) = before.other_program(after) {
            writeln!(out, "{}", printable(&other))?;
        }
        let apart = self.apart.map_or(String::new(), |apart| format!(", {:.1} s", apart.as_secs_f64()));
        let (first, last) = (before.gc_count, after.gc_count);
        match collections(first, last) {
            Some(collections) => writeln!(out, "{collections} ran between{apart}")?,
            None if first == last => writeln!(out, "no GC since GC #{last}{apart}")?,
            None => writeln!(out, "GC #{first} before, GC #{last} after{apart}")?,
        }
        if [before, after].iter().any(|census| census.not_swept) {
            writeln!(out, "{NOT_SWEPT}: objects that are dead are counted")?;
        }
        if [before, after].iter().any(|census| !census.consistent && !census.not_swept) {
            writeln!(
                out,
                "the program continued while its heap was read, or may have: the counts may be off by its changes"
            )?;
        }
        if changes.is_empty() {
            return writeln!(out, "nothing has {}", if self.apart.is_some() { "grown" } else { "changed" });
        }
        let what = text::rows(&after.by);
        writeln!(out, "{:>12}{:>12}{:>15}  {what}", "COUNT", "CHANGE", "BYTES CHANGE")?;
        for change in changes.iter().take(top) {
            let name = printable(&change.name);
            writeln!(
                out,
                "{:>12}{:>+12}{:>+15}  {name}",
                change.after.count,
                change.count(),
                change.bytes()
            )?;
        }
        if changes.len() > top {
            writeln!(out, "{:>12}  ({} more; --top N shows more)", "", changes.len() - top)?;
        }
        Ok(())
    }

    fn write(&self, changes: &[Change], settings: &HeapSettings) -> Result<Reader, HeapFailure> {
        let mut out = io::stdout().lock();
        let written = match settings.format {
            Format::Jsonl => self.jsonl(&mut out, changes),
            Format::Text => self.text(&mut out, changes, settings.top),
        };
        flushed(written, &mut out)
    }
}

/// Flushes the output; returns whether it is still read.
pub(super) fn flushed(written: io::Result<()>, out: &mut impl Write) -> Result<Reader, HeapFailure> {
    match written.and_then(|()| out.flush()) {
        Ok(()) => Ok(Reader::There),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Reader::Gone),
        Err(error) => Err(HeapFailure::Output(error)),
    }
}

/// Whether the output is still read.
#[derive(PartialEq, Eq)]
pub(super) enum Reader {
    There,
    Gone,
}

/// Compares two files, or a file with a process.
pub(super) fn compare(settings: &HeapSettings) -> Result<(), HeapFailure> {
    let mut read = settings
        .diff
        .iter()
        .map(|path| Saved::read(path).map_err(|source| HeapFailure::Saved { path: path.clone(), source }));
    let missing = || HeapFailure::Usage("--diff takes two files, or one and --pid".to_owned());
    let before = read.next().ok_or_else(missing)??;
    let after = match (read.next(), settings.pid) {
        (Some(after), None) => after?,
        (None, Some(pid)) => {
            let target = Target::find(pid, settings.cache_dir.as_deref())?;
            let by = match before.by.as_str() {
                "class" => By::Class,
                "line" => By::Line,
                _ => By::Type,
            };
            Saved::of(&look(&target, by)?)
        }
        _ => return Err(missing()),
    };
    if before.by != after.by {
        let why = format!("one file counts by {}, the other by {}", before.by, after.by);
        return Err(HeapFailure::Usage(why));
    }
    let pair = Pair { before: &before, after: &after, apart: None };
    pair.write(&changes(&before, &after), settings).map(|_| ())
}

/// Number of consecutive failed censuses that are tolerated in a watch.
const MOST_FAILURES: u32 = 3;

/// Takes censuses periodically and reports what grew, until the process ends or the output is no longer read.
pub(super) fn watch(target: &Target, every: Duration, settings: &HeapSettings) -> Result<(), HeapFailure> {
    let by = if matches!(settings.by, By::Class | By::Line) { settings.by } else { By::Type };
    let mut at = Instant::now();
    let mut before = Saved::of(&look(target, by)?);
    let (mut rounds, mut failures) = (0_u64, 0);
    loop {
        thread::sleep(every.saturating_sub(at.elapsed()));
        let now = Instant::now();
        let after = match look(target, by) {
            Ok(report) => Saved::of(&report),
            // The regular end of a watch.
            Err(HeapFailure::NotRuby { .. }) if rounds > 0 => {
                let times = plural(rounds + 1, "time");
                say(&format!("gctrace: pid {} has ended; it was counted {times}", target.pid));
                return Ok(());
            }
            Err(HeapFailure::Heap { .. }) if target.is_replaced() => {
                let times = plural(rounds + 1, "time");
                say(&format!("gctrace: pid {} has replaced its program; it was counted {times}", target.pid));
                return Ok(());
            }
            // Pages come and go while they are read. The next attempt may find a heap that is stable for long enough.
            Err(failure @ (HeapFailure::Heap { .. } | HeapFailure::NoPlaces { .. }))
                if rounds > 0 && failures < MOST_FAILURES =>
            {
                say(&format!("gctrace: {failure}; trying again in {} s", every.as_secs_f64()));
                failures += 1;
                continue;
            }
            Err(failure) => return Err(failure),
        };
        failures = 0;
        rounds += 1;
        let mut grown = changes(&before, &after);
        grown.retain(Change::has_grown);
        let pair = Pair { before: &before, after: &after, apart: Some(now - at) };
        if pair.write(&grown, settings)? == Reader::Gone {
            return Ok(());
        }
        (at, before) = (now, after);
    }
}

fn look(target: &Target, by: By) -> Result<Report, HeapFailure> {
    if matches!(by, By::Class | By::Line) {
        target.needs_names()?;
    }
    let counted = count::count(target, by).map_err(|source| target.failure(source))?;
    if let Some(Err(reason)) = &counted.places {
        return Err(HeapFailure::NoPlaces { pid: target.pid, advice: places::advice(*reason) });
    }
    Report::of(target, by, &counted).map_err(|source| target.failure(source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::saved::Amount;

    fn text(before: &Saved, after: &Saved) -> String {
        let mut out = Vec::new();
        let pair = Pair { before, after, apart: Some(Duration::from_secs(5)) };
        pair.text(&mut out, &changes(before, after), 40).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Names have the same heading as in a census.
    #[test]
    fn headings() {
        for (by, heading) in [(By::Type, "  TYPE"), (By::Class, "  CLASS"), (By::Line, "  FILE:LINE CLASS")] {
            let saved = |count| Saved {
                by: by.name().to_owned(),
                rows: [("A".to_owned(), Amount { count, bytes: 40 })].into(),
                ..Saved::default()
            };
            let text = text(&saved(1), &saved(2));
            let line = text.lines().find(|line| line.contains("COUNT")).unwrap();
            assert!(line.ends_with(heading) && line.contains("BYTES CHANGE"), "{line}");
        }
    }

    /// The collections between two censuses are those after the first one.
    #[test]
    fn collections_between() {
        let head = |first, last| {
            let saved = |gc_count| Saved { gc_count, consistent: true, ..Saved::default() };
            let text = text(&saved(first), &saved(last));
            text.lines().find(|line| line.contains("GC #") && line.ends_with("5.0 s")).unwrap().to_owned()
        };
        assert_eq!(head(9, 9), "no GC since GC #9, 5.0 s");
        assert_eq!(head(9, 10), "GC #10 ran between, 5.0 s");
        assert_eq!(head(9, 12), "GC #10 to #12 ran between, 5.0 s");
        assert_eq!(head(9, 3), "GC #9 before, GC #3 after, 5.0 s");
    }

    /// Only a heap that changed is reported as changed.
    #[test]
    fn not_of_one_moment() {
        let whole = Saved { consistent: true, ..Saved::default() };
        let not_swept = Saved { not_swept: true, ..Saved::default() };
        let says = |before: &Saved, after: &Saved| {
            let text = text(before, after);
            [text.contains("has not swept all pages"), text.contains("the program continued")]
        };
        assert_eq!(says(&whole, &whole), [false, false]);
        assert_eq!(says(&not_swept, &whole), [true, false]);
        assert_eq!(says(&whole, &not_swept), [true, false]);
        assert_eq!(says(&Saved::default(), &not_swept), [true, true]);
    }
}
