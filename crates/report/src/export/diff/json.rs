//! A comparison as one JSON document (docs/diff.md).

use std::io::{self, Write};

use gctrace_tunemygc::printable::printable_json;
use serde::Serialize;

use super::{Compared, text::method_name};
use crate::diff::{Figure, Kind, LEVEL, Method, Outcome, Side, Table, Unit, Verdict};

#[derive(Serialize)]
struct Document<'a> {
    a: Recording<'a>,
    b: Recording<'a>,
    /// Probability that any figure of a table is reported as changed although nothing changed.
    level: f64,
    nothing: &'a [String],
    tables: Vec<OneTable<'a>>,
    conditions: Vec<OneCondition<'a>>,
}

#[derive(Serialize)]
struct Recording<'a> {
    file: &'a str,
    began_ts: Option<f64>,
    seconds: f64,
    cut_off: bool,
    programs: Vec<OneProgram<'a>>,
    blocks: Option<usize>,
    block_seconds: Option<f64>,
}

#[derive(Serialize)]
struct OneProgram<'a> {
    name: &'a str,
    processes: u64,
    rubies: Vec<&'a str>,
    only_here: bool,
}

#[derive(Serialize)]
struct OneTable<'a> {
    table: &'static str,
    absent: &'a [String],
    notes: Vec<&'a str>,
    rows: Vec<OneRow<'a>>,
}

#[derive(Serialize)]
struct OneRow<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
    figures: Vec<OneFigure>,
}

#[derive(Serialize)]
struct OneFigure {
    #[serde(skip_serializing_if = "str::is_empty")]
    metric: &'static str,
    what: &'static str,
    unit: &'static str,
    a: Option<f64>,
    b: Option<f64>,
    change: Option<f64>,
    relative: Option<f64>,
    margin: Option<f64>,
    p: Option<f64>,
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
}

#[derive(Serialize)]
struct OneCondition<'a> {
    condition: &'a str,
    outcome: &'static str,
    figure: Option<OneFigure>,
    #[serde(skip_serializing_if = "str::is_empty")]
    why: &'a str,
}

fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Share => "share",
        Unit::PerSecond => "per_second",
        Unit::Time => "ns",
        Unit::Number => "number",
        Unit::Bytes => "bytes",
        Unit::BytesPerSecond => "bytes_per_second",
    }
}

impl OneFigure {
    fn of(figure: &Figure) -> Self {
        Self {
            metric: figure.metric,
            what: figure.what,
            unit: unit(figure.unit),
            a: figure.a,
            b: figure.b,
            change: figure.change(),
            relative: figure.relative(),
            margin: figure.margin,
            p: figure.p,
            verdict: figure.verdict.name(),
            why: match figure.verdict {
                Verdict::Untested(why) => Some(why),
                _ => None,
            },
        }
    }
}

impl<'a> OneTable<'a> {
    fn of(table: &'a Table) -> Self {
        let rows = table.rows.iter().map(|row| {
            let (method, file) = match &row.kind {
                Kind::Method(Method::Of { name, file }) => (Some(&**name), file.as_deref()),
                _ => (None, None),
            };
            let name = match &row.kind {
                Kind::All => None,
                Kind::Endpoint(name) => Some(name.clone()),
                Kind::Method(method) => Some(method_name(method)),
            };
            OneRow { name, method, file, figures: row.figures.iter().map(OneFigure::of).collect() }
        });
        let notes = table.lacks.iter().chain(&table.notes).map(String::as_str).collect();
        Self { table: table.key, absent: &table.absent, notes, rows: rows.collect() }
    }
}

/// Writes the comparison.
///
/// # Errors
///
/// Writing fails.
pub fn write(out: &mut dyn Write, compared: &Compared<'_>) -> io::Result<()> {
    let Compared { about, sides, comparison, judged } = compared;
    let recording = |at: usize| {
        let (about, side): (_, &Side) = (&about[at], sides[at]);
        let programs = side.programs().iter().map(|(name, program)| OneProgram {
            name,
            processes: program.processes,
            rubies: program.rubies.iter().map(String::as_str).collect(),
            only_here: comparison.only[at].contains(name),
        });
        Recording {
            file: &about.file,
            began_ts: about.began,
            seconds: about.seconds,
            cut_off: about.cut_off,
            programs: programs.collect(),
            blocks: comparison.blocks[at].map(|(blocks, _)| blocks),
            block_seconds: comparison.blocks[at].map(|(_, ns)| ns as f64 / 1e9),
        }
    };
    let conditions = judged.iter().map(|judged| OneCondition {
        condition: &judged.text,
        outcome: match judged.outcome {
            Outcome::Held => "ok",
            Outcome::Failed => "failed",
            Outcome::Unknown => "unknown",
        },
        figure: judged.figure.as_ref().map(OneFigure::of),
        why: &judged.why,
    });
    let document = Document {
        a: recording(0),
        b: recording(1),
        level: LEVEL,
        nothing: &comparison.nothing,
        tables: comparison.tables.iter().map(OneTable::of).collect(),
        conditions: conditions.collect(),
    };
    let text = serde_json::to_string_pretty(&document).map_err(io::Error::from)?;
    writeln!(out, "{}", printable_json(&text))
}
