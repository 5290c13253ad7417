//! A census for people.

use std::io::{self, Write};

use gctrace_tunemygc::printable::printable;

use super::report::Report;
use crate::cli::By;
use crate::words::{file_size, percent, plural};

/// Writes the first `top` rows, and the sum of the others.
pub(super) fn write(out: &mut impl Write, report: &Report, top: usize) -> io::Result<()> {
    let who = &report.who;
    let command = who.command.as_deref().unwrap_or("ruby");
    writeln!(out, "{} ({}), Ruby {}, GC #{}", printable(command), who.pid, who.ruby, report.gc_count[0])?;
    writeln!(
        out,
        "{} in {} of slots; {} ({}) of {} slots on {} are free",
        plural(report.live.count, "object"),
        file_size(report.live.bytes),
        report.free.count,
        percent(report.free.count, report.total),
        report.total,
        plural(report.pages, "page"),
    )?;
    if report.gc_count[0] != report.gc_count[1] {
        writeln!(
            out,
            "not of one moment: GC #{} to #{} ran while the heap was read",
            report.gc_count[0] + 1,
            report.gc_count[1]
        )?;
    }
    if report.sweeping {
        writeln!(out, "a cycle is being swept: objects that are dead but not swept yet are counted")?;
    }
    match report.allocated {
        Some(0) => {}
        Some(n) => writeln!(out, "the program allocated {} while the heap was read", plural(n, "object"))?,
        None => writeln!(out, "not known: how many objects were allocated while the heap was read")?,
    }
    writeln!(out)?;
    let (head, unit) = match who.by {
        By::Type => ("TYPE", "COUNT"),
        By::Class => ("CLASS", "COUNT"),
        By::Size => ("SLOT SIZE", "LIVE"),
        By::Page => ("SLOTS IN USE", "PAGES"),
    };
    let with_free = matches!(who.by, By::Size | By::Page);
    let free = |text: &str| if with_free { format!("{text:>12}") } else { String::new() };
    writeln!(out, "{unit:>12}{}{:>14}  {head}", free("FREE"), "BYTES")?;
    for row in report.rows.iter().take(top) {
        let free = free(&row.free.unwrap_or_default().to_string());
        writeln!(out, "{:>12}{free}{:>14}  {}", row.count, row.bytes, printable(&row.name))?;
    }
    let rest = report.rows.get(top..).unwrap_or_default();
    if !rest.is_empty() {
        let (count, bytes) = rest.iter().fold((0, 0), |(c, b), row| (c + row.count, b + row.bytes));
        writeln!(out, "{count:>12}{}{bytes:>14}  ({} more; --top N shows more)", free(""), rest.len())?;
    }
    Ok(())
}
