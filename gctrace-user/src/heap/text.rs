//! A census as text.

use std::io::{self, Write};

use gctrace_tunemygc::printable::printable;

use super::{
    count::collections,
    places::advice,
    report::{COMPACTED, Report, Row},
};
use crate::cli::By;
use crate::words::{data_size, percent, plural};

/// Maximum number of rows about what keeps pages.
const KEEPERS: usize = 10;

/// A part of a whole in percent. Small parts are not rounded to 0, and large ones are not rounded to all.
pub(super) fn share(part: u64, whole: u64) -> String {
    match percent(part, whole) {
        all if all == "100.0 %" && part < whole => "above 99.9 %".to_owned(),
        share => share,
    }
}

/// Writes the first `top` rows, and the sum of the rest.
pub(super) fn write(out: &mut impl Write, report: &Report, top: usize) -> io::Result<()> {
    head(out, report)?;
    writeln!(out)?;
    match report.who.by {
        // The account has its own format.
        By::Memory => {}
        By::Line if let Some(Err(reason)) = report.places => writeln!(out, "{}", advice(reason))?,
        By::Type | By::Class | By::Line => objects(out, report, top)?,
        By::Size | By::Page => slots(out, report, top)?,
        By::Age if !report.known.bits => {
            writeln!(out, "it is not known where Ruby {} stores the age of objects", report.who.ruby)?;
        }
        By::Age => {
            writeln!(out, "{:>12}{:>14}  COLLECTIONS SURVIVED", "COUNT", "SHARE")?;
            for row in &report.rows {
                let share = share(row.count, report.live.count);
                writeln!(out, "{:>12}{share:>14}  {}", row.count, row.name)?;
            }
        }
    }
    if report.who.by == By::Page {
        keepers(out, report)?;
    }
    Ok(())
}

/// The process, the size of its heap, and whether the sums belong to one moment.
pub(super) fn head(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let who = &report.who;
    let command = who.command.as_deref().unwrap_or("ruby");
    writeln!(out, "{} (pid {}), Ruby {}, GC #{}", printable(command), who.pid, who.ruby, report.gc_count[0])?;
    writeln!(
        out,
        "{} in {} of slots; {} ({}) of {} slots on {} are free",
        plural(report.live.count, "object"),
        data_size(report.live.bytes),
        report.free.count,
        share(report.free.count, report.total),
        report.total,
        plural(report.pages, "page"),
    )?;
    if report.known.bits {
        let live = &report.live;
        let mut parts = vec![
            format!("{} old", share(live.old(), live.count)),
            format!("{} without write barrier", share(live.unprotected, live.count)),
        ];
        if report.known.pins {
            parts.push(format!("{} pinned", share(live.pinned, live.count)));
        }
        writeln!(out, "of the objects {}", parts.join(", "))?;
    }
    let collections = collections(report.gc_count[0], report.gc_count[1]);
    if let Some(collections) = &collections {
        writeln!(out, "not of one moment: {collections} ran while the heap was read")?;
    }
    if report.sweeping {
        let dead = if report.known.bits { format!(" ({} so far)", report.live.dead) } else { String::new() };
        writeln!(out, "a cycle is being swept: objects that are dead and not swept yet are counted{dead}")?;
    }
    if let Some(Ok(known)) = report.places {
        for line in known.words() {
            writeln!(out, "{line}")?;
        }
    }
    match report.allocated {
        Some(0) => {}
        Some(n) => writeln!(out, "the program allocated {} while the heap was read", plural(n, "object"))?,
        None => writeln!(out, "unknown: how many objects were allocated while the heap was read")?,
    }
    // Allocated objects alone do not say that a collection went on: a step of one runs when the program allocates.
    let said = collections.is_some() || report.sweeping || (report.still && report.allocated != Some(0));
    if !report.consistent && (!said || report.inconsistent == COMPACTED) {
        writeln!(out, "{}", report.inconsistent)?;
    }
    Ok(())
}

/// The heading of the names of rows; `by` is what these represent, as in JSON output.
pub(super) fn rows(by: &str) -> &'static str {
    if by == By::Type.name() {
        "TYPE"
    } else if by == By::Line.name() {
        "FILE:LINE CLASS"
    } else {
        "CLASS"
    }
}

fn objects(out: &mut impl Write, report: &Report, top: usize) -> io::Result<()> {
    let head = rows(report.who.by.name());
    let old = |text: &str| if report.known.bits { format!("{text:>11}") } else { String::new() };
    writeln!(out, "{:>11}{}{:>13}{:>13}  {head}", "COUNT", old("OLD"), "SLOT BYTES", "OWNED BYTES")?;
    let mut line = |count: u64, aged: u64, bytes: u64, owned: u64, name: &str| {
        writeln!(out, "{count:>11}{}{bytes:>13}{owned:>13}  {name}", old(&aged.to_string()))
    };
    for row in report.rows.iter().take(top) {
        let tally = row.objects.unwrap_or_default();
        let mut name = printable(&row.name);
        if let Some(classes) = row.classes {
            name = format!("{name} ({classes} classes of this name)").into();
        }
        line(row.count, tally.old(), row.bytes, tally.owned, &name)?;
    }
    let rest = report.rows.get(top..).unwrap_or_default();
    if !rest.is_empty() {
        let mut sum = crate::ruby::heap::Tally::default();
        rest.iter().filter_map(|row| row.objects.as_ref()).for_each(|tally| sum.absorb(tally));
        let name = format!("({} more; --top N shows more)", rest.len());
        line(sum.count, sum.old(), sum.bytes, sum.owned, &name)?;
    }
    writeln!(out, "\nOWNED BYTES: memory of strings and arrays outside of their slots")
}

fn slots(out: &mut impl Write, report: &Report, top: usize) -> io::Result<()> {
    let (head, unit) =
        if report.who.by == By::Size { ("SLOT SIZE", "LIVE") } else { ("SLOTS IN USE", "PAGES") };
    writeln!(out, "{unit:>12}{:>12}{:>14}  {head}", "FREE", "BYTES")?;
    for row in report.rows.iter().take(top) {
        writeln!(
            out,
            "{:>12}{:>12}{:>14}  {}",
            row.count,
            row.free.unwrap_or_default(),
            row.bytes,
            row.name
        )?;
    }
    let rest = report.rows.get(top..).unwrap_or_default();
    if !rest.is_empty() {
        let sum = |of: fn(&Row) -> u64| rest.iter().map(of).sum::<u64>();
        let (count, free, bytes) =
            (sum(|row| row.count), sum(|row| row.free.unwrap_or_default()), sum(|row| row.bytes));
        writeln!(out, "{count:>12}{free:>12}{bytes:>14}  ({} more; --top N shows more)", rest.len())?;
    }
    Ok(())
}

/// What keeps nearly empty pages from being given back.
fn keepers(out: &mut impl Write, report: &Report) -> io::Result<()> {
    if report.nearly_empty == 0 {
        return writeln!(out, "\nNo page is nearly empty (25 % in use or less).");
    }
    let pages = plural(report.nearly_empty, "page");
    writeln!(out, "\nOn the {pages} of which 25 % or less is in use, and which these objects keep:\n")?;
    let bits = |text: &str| if report.known.bits { format!("{text:>9}") } else { String::new() };
    let pins = |text: &str| if report.known.pins { format!("{text:>9}") } else { String::new() };
    writeln!(
        out,
        "{:>9}{:>9}{:>9}{}{}  CLASS (TYPE)",
        "PAGES",
        "ALONE",
        "OBJECTS",
        bits("OLD"),
        pins("PINNED")
    )?;
    for row in report.keepers.iter().take(KEEPERS) {
        let (keeper, tally) = (&row.keeper, &row.keeper.tally);
        let (old, pinned) = (bits(&tally.old().to_string()), pins(&tally.pinned.to_string()));
        let name = printable(&row.name);
        writeln!(out, "{:>9}{:>9}{:>9}{old}{pinned}  {name}", keeper.pages, keeper.alone, tally.count)?;
    }
    let rest = report.keepers.len().saturating_sub(KEEPERS);
    if rest > 0 {
        writeln!(out, "{:>9}  and {rest} more (--format jsonl has all)", "")?;
    }
    writeln!(out, "\nPAGES: with one of them or more; ALONE: with nothing else on them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        heap::{
            count::CONTINUED,
            report::{ObjectBits, Who},
        },
        ruby::heap::Tally,
    };

    /// Why a census is not of one moment is said, once, whatever the reason is.
    #[test]
    fn not_of_one_moment() {
        let said = |change: &dyn Fn(&mut Report)| {
            let who = Who { pid: 7, command: None, ruby: "3.4.9".to_owned(), by: By::Class };
            let mut report = Report {
                who,
                rows: Vec::new(),
                keepers: Vec::new(),
                nearly_empty: 0,
                live: Tally::default(),
                free: Tally::default(),
                total: 0,
                pages: 0,
                gc_count: [9, 9],
                allocated: Some(0),
                sweeping: false,
                still: true,
                consistent: false,
                inconsistent: CONTINUED,
                known: ObjectBits { bits: false, pins: false },
                places: None,
            };
            change(&mut report);
            let mut out = Vec::new();
            head(&mut out, &report).unwrap();
            let text = String::from_utf8(out).unwrap();
            text.lines().skip(2).map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(said(&|report| report.consistent = true).is_empty());
        // A step of a collection, or a finalizer that freed a slot, whatever was allocated.
        assert_eq!(said(&|report| report.still = false), [CONTINUED]);
        for allocated in [Some(3), None] {
            let lines = said(&|report| (report.still, report.allocated) = (false, allocated));
            assert!(lines.len() == 2 && lines[0].contains("allocated") && lines[1] == CONTINUED, "{lines:?}");
        }
        assert_eq!(said(&|report| report.inconsistent = COMPACTED), [COMPACTED]);
        let lines = said(&|report| (report.inconsistent, report.allocated) = (COMPACTED, Some(3)));
        assert_eq!(lines, ["the program allocated 3 objects while the heap was read", COMPACTED]);
        for lines in [
            said(&|report| report.allocated = Some(3)),
            said(&|report| report.allocated = None),
            said(&|report| report.gc_count = [9, 10]),
            said(&|report| report.sweeping = true),
            said(&|report| (report.still, report.gc_count) = (false, [9, 10])),
            said(&|report| (report.still, report.sweeping) = (false, true)),
        ] {
            assert!(lines.len() == 1 && lines[0] != CONTINUED, "{lines:?}");
        }
    }

    /// 100 % is printed only for all.
    #[test]
    fn shares() {
        let shares = [(0, 9), (1, 1_000_000), (1, 2), (9989, 10_000), (999_999, 1_000_000), (7, 7)];
        let words = shares.map(|(part, whole)| share(part, whole));
        assert_eq!(words, ["0 %", "below 0.1 %", "50.0 %", "99.9 %", "above 99.9 %", "100.0 %"]);
    }
}
