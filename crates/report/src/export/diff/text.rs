//! A comparison as text: the changes first, then the tables.

use std::io::{self, Write};

use super::{About, Compared};
use crate::{
    diff::{Comparison, Figure, Judged, Kind, Method, Outcome, Side, Table, Unit, Verdict},
    export::{place::clip, text::duration},
    words::{data_size, date_time, plural},
};

/// Maximum number of changes named at the top.
const NAMED: usize = 8;
/// Maximum number of rows of a table by method.
const ROWS: usize = 8;
/// Width of a name in the first column.
const NAME: usize = 28;
/// Width of a figure in a table by name.
const CELL: usize = 40;

/// Writes the comparison.
///
/// # Errors
///
/// Writing fails.
pub fn write(out: &mut dyn Write, compared: &Compared<'_>) -> io::Result<()> {
    let Compared { about, sides, comparison, judged } = compared;
    for (at, (about, side)) in about.iter().zip(sides).enumerate() {
        head(out, about, side, &comparison.only[at])?;
    }
    if !comparison.nothing.is_empty() {
        return writeln!(out, "\nNothing is compared: {}", comparison.nothing.join("; "));
    }
    writeln!(out)?;
    changes(out, comparison)?;
    for table in comparison.tables.iter().filter(|table| !table.rows.is_empty()) {
        writeln!(out)?;
        if table.rows.iter().all(|row| row.kind == Kind::All) {
            overall(out, table)?;
        } else {
            by_name(out, table)?;
        }
    }
    writeln!(out)?;
    for table in &comparison.tables {
        if !table.absent.is_empty() {
            writeln!(out, "not compared: {}: {}", table.title, joined(&table.absent))?;
        }
        for lack in &table.lacks {
            writeln!(out, "not compared: {lack}")?;
        }
        for note in &table.notes {
            writeln!(out, "{note}")?;
        }
    }
    method(out, comparison)?;
    if !judged.is_empty() {
        writeln!(out)?;
    }
    judged.iter().try_for_each(|judged| condition(out, judged))
}

fn head(out: &mut dyn Write, about: &About, side: &Side, only: &[String]) -> io::Result<()> {
    let began = about.began.map_or_else(String::new, |began| format!("{}, ", date_time(began)));
    let cut_off = if about.cut_off { ", cut off" } else { "" };
    writeln!(out, "{}  {}: {began}{:.1} s{cut_off}", side.name, clip(&about.file, 100), about.seconds)?;
    for (name, program) in side.programs().iter().take(ROWS) {
        let rubies: Vec<&str> = program.rubies.iter().map(String::as_str).collect();
        let alone = if only.contains(name) { "; missing from the other recording" } else { "" };
        writeln!(
            out,
            "   {}: {}, Ruby {}{alone}",
            clip(name, 60),
            plural(program.processes, "process"),
            rubies.join(", ")
        )?;
    }
    match side.programs().len().saturating_sub(ROWS) {
        0 => Ok(()),
        more => writeln!(out, "   {} more", plural(more as u64, "program")),
    }
}

/// The real changes, one per line.
fn changes(out: &mut dyn Write, comparison: &Comparison) -> io::Result<()> {
    let tested = comparison.figures().filter(|(_, _, figure)| figure.p.is_some()).count();
    let real: Vec<_> = comparison.figures().filter(|(_, _, figure)| figure.verdict.is_real()).collect();
    if tested == 0 {
        return writeln!(
            out,
            "Nothing was tested: each recording must last at least {} s, and have something to compare.",
            Comparison::least_seconds()
        );
    }
    if real.is_empty() {
        return writeln!(out, "No change is more than noise ({} tested).", plural(tested as u64, "figure"));
    }
    writeln!(out, "More than noise: {} of {tested} figures", real.len())?;
    // The self time of a method says more than the time that its callers spend in it.
    let (own, callers): (Vec<_>, Vec<_>) = real
        .into_iter()
        .partition(|(_, row, figure)| row.figures.first().is_some_and(|first| first.what == figure.what));
    for (table, row, figure) in own.iter().chain(&callers).take(NAMED) {
        let what = match &row.kind {
            Kind::All => format!("{}: {}", table.title, figure.what),
            _ => format!("{}: {}, {}", table.title, name(&row.kind), figure.what),
        };
        let grew = if figure.verdict == Verdict::Grew { "grew" } else { "shrank" };
        writeln!(
            out,
            "  {what} {grew}: {} -> {} ({})",
            value(figure.a, figure.unit),
            value(figure.b, figure.unit),
            change(figure)
        )?;
    }
    match (own.len() + callers.len()).saturating_sub(NAMED) {
        0 => Ok(()),
        more => writeln!(out, "  and {more} more, marked * below"),
    }
}

fn overall(out: &mut dyn Write, table: &Table) -> io::Result<()> {
    writeln!(out, "{:<NAME$}{:>12}{:>12}{:>22}   MORE THAN NOISE?", table.title, "A", "B", "CHANGE")?;
    for figure in table.rows.iter().flat_map(|row| &row.figures) {
        let verdict = match figure.verdict {
            Verdict::Grew | Verdict::Shrank => "* yes".to_owned(),
            Verdict::Noise => "no".to_owned(),
            Verdict::Untested(why) => format!("not tested: {why}"),
        };
        let (a, b) = (value(figure.a, figure.unit), value(figure.b, figure.unit));
        writeln!(
            out,
            "  {:<width$}{a:>12}{b:>12}{:>22}   {verdict}",
            figure.what,
            change(figure),
            width = NAME - 2
        )?;
    }
    Ok(())
}

/// The heading of the figures of a table.
fn heading(table: &Table, figure: &Figure) -> String {
    let unit = match (table.key, figure.unit) {
        ("off_cpu" | "holders", _) => ", threads",
        _ => "",
    };
    format!("{}{unit}: A -> B", figure.what.to_uppercase())
}

fn by_name(out: &mut dyn Write, table: &Table) -> io::Result<()> {
    let Some(first) = table.rows.first() else { return Ok(()) };
    let headings: Vec<String> =
        first.figures.iter().map(|figure| format!("{:<CELL$}", heading(table, figure))).collect();
    writeln!(out, "{}  (* more than noise)", table.title)?;
    writeln!(out, "  {}", headings.concat().trim_end())?;
    let changed =
        table.rows.iter().filter(|row| row.figures.iter().any(|figure| figure.verdict.is_real())).count();
    let shown = table.rows.len().min(ROWS.max(changed.min(2 * ROWS)));
    for row in &table.rows[..shown] {
        let cells: Vec<String> =
            row.figures.iter().map(|figure| format!("{:<CELL$}", cell(figure))).collect();
        writeln!(out, "  {}{}", cells.concat(), name(&row.kind))?;
    }
    match table.rows.len() - shown {
        0 => Ok(()),
        more => writeln!(out, "  {}: --format json", plural(more as u64, "more row")),
    }
}

/// `24.1 % -> 29.8 %  +5.7 pp *`.
fn cell(figure: &Figure) -> String {
    let star = if figure.verdict.is_real() { " *" } else { "" };
    format!("{} -> {}  {}{star}", value(figure.a, figure.unit), value(figure.b, figure.unit), change(figure))
}

fn name(kind: &Kind) -> String {
    match kind {
        Kind::All => String::new(),
        Kind::Endpoint(name) => clip(name, 60),
        Kind::Method(method) => method_name(method),
    }
}

/// The display name of a method.
pub fn method_name(method: &Method) -> String {
    match method {
        Method::Of { name, file: Some(file) } => format!("{} {}", clip(name, 60), clip(file, 40)),
        Method::Of { name, file: None } => clip(name, 60),
        Method::Gc => "(garbage collection)".to_owned(),
        Method::Outside => "(outside of Ruby methods)".to_owned(),
        Method::Beyond => "(methods beyond the limit)".to_owned(),
    }
}

/// A figure in its unit.
pub fn value(value: Option<f64>, unit: Unit) -> String {
    let Some(value) = value else { return "none".to_owned() };
    match unit {
        Unit::Share => format!("{:.2} %", value * 100.0),
        Unit::Time => duration(value as u64),
        Unit::Bytes => data_size(value as u64),
        Unit::BytesPerSecond => format!("{}/s", data_size(value as u64)),
        Unit::PerSecond | Unit::Number => match value.abs() {
            100_000.0.. => format!("{:.1}k", value / 1e3),
            100.0.. => format!("{value:.0}"),
            10.0.. => format!("{value:.1}"),
            _ => format!("{value:.2}"),
        },
    }
}

/// A change with its interval: in percentage points for a share, otherwise relative to A.
pub fn change(figure: &Figure) -> String {
    let Some(change) = figure.change() else { return "-".to_owned() };
    if figure.unit == Unit::Share {
        let margin = figure.margin.map_or_else(String::new, |margin| format!(" ±{:.1}", margin * 100.0));
        return format!("{:+.1}{margin} pp", change * 100.0);
    }
    match (figure.relative(), figure.a) {
        (Some(relative), Some(a)) => {
            let margin =
                figure.margin.map_or_else(String::new, |margin| format!(" ±{:.0}", margin / a.abs() * 100.0));
            format!("{:+.0}{margin} %", relative * 100.0)
        }
        _ if change == 0.0 => "0".to_owned(),
        _ => "new".to_owned(),
    }
}

/// The reasons of both sides, merged if they are the same.
fn joined(reasons: &[String]) -> String {
    match reasons {
        [a, b] => match (a.strip_prefix("A "), b.strip_prefix("B ")) {
            (Some(one), Some(other)) if one == other => format!("each {one}"),
            _ => reasons.join("; "),
        },
        _ => reasons.join("; "),
    }
}

fn method(out: &mut dyn Write, comparison: &Comparison) -> io::Result<()> {
    let of = |at: usize| match comparison.blocks[at] {
        Some((blocks, ns)) => format!("{blocks} blocks of {:.2} s", ns as f64 / 1e9),
        None => format!("none: it is shorter than {} s", Comparison::least_seconds()),
    };
    writeln!(
        out,
        "Rates are per second and process. ± is the 95 % interval. Tested over time blocks (A: {}; B: {}); docs/diff.md.",
        of(0),
        of(1)
    )
}

fn condition(out: &mut dyn Write, judged: &Judged) -> io::Result<()> {
    let Judged { text, outcome, figure, why, of_b, within_noise } = judged;
    let found = figure.as_ref().map_or_else(String::new, |figure| {
        if *of_b {
            let noise = if *within_noise { ", not by more than noise" } else { "" };
            return format!("{} in B{noise}", value(figure.b, figure.unit));
        }
        let noise =
            if *within_noise || figure.verdict == Verdict::Noise { ", not more than noise" } else { "" };
        format!(
            "{} -> {}, {}{noise}",
            value(figure.a, figure.unit),
            value(figure.b, figure.unit),
            change(figure)
        )
    });
    let parts: Vec<&str> =
        [found.as_str(), why.as_str()].into_iter().filter(|part| !part.is_empty()).collect();
    let word = match outcome {
        Outcome::Held => "ok",
        Outcome::Failed => "FAILED",
        Outcome::Unknown => "UNKNOWN",
    };
    writeln!(out, "{word}: {}: {}", clip(text, 80), parts.join("; "))
}
