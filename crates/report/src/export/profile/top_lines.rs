//! A table of lines: the self and total share of each line of Ruby code in a graph.
//!
//! Anything without a line of its own is attributed to the calling line: methods in C, native code, the kernel, and the rows below a
//! stack (a wait, the parts of a GC pause). Garbage collection in a sample is a row of its own, as in the table of the hottest methods.

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, Write},
    sync::Arc,
};

use super::{Measure, label};
use crate::{
    aggregate::recording::Recording,
    model::stack::{Frame, FrameKind},
};

/// A line, or a category outside all lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Row {
    Line { file: Arc<str>, line: u32, method: Arc<str> },
    Gc,
    Outside,
}

impl Row {
    fn of(frame: &Frame) -> Option<Self> {
        match (frame.kind, &frame.file) {
            (FrameKind::Ruby, Some(file)) => {
                Some(Self::Line { file: file.clone(), line: frame.line, method: frame.name.clone() })
            }
            (FrameKind::Vm, _) => Some(Self::Gc),
            _ => None,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Gc => "(garbage collection)".to_owned(),
            Self::Outside => "(outside of Ruby code)".to_owned(),
            Self::Line { file, line: 0, method } => format!("{}  {}", label::text(file), label::text(method)),
            Self::Line { file, line, method } => {
                format!("{}:{line}  {}", label::text(file), label::text(method))
            }
        }
    }
}

/// The costs of a row, in the unit of the measure.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    own: u64,
    total: u64,
}

/// Writes the table, sorted by self cost in descending order. The self costs of all rows add up to the total.
pub(super) fn write(recording: &Recording, of: Measure, out: &mut dyn Write) -> io::Result<()> {
    let rows = rows(recording, of);
    let all: u64 = rows.iter().map(|(_, spent)| spent.own).sum();
    let (unit, factor) = of.unit();
    // As many digits as the measure has: the figures are exact.
    let digits = if factor < 1e-4 { 6 } else { 3 };
    writeln!(out, "By line: {}, {:.digits$} {unit}", of.title(), all as f64 * factor)?;
    let heading = |word: &str| format!("{word} {unit}");
    writeln!(out, "  SELF  TOTAL {:>18} {:>18}  LINE AND METHOD", heading("SELF"), heading("TOTAL"))?;
    for (row, Spent { own, total }) in rows {
        let part = |part: u64| 100.0 * part as f64 / all as f64;
        writeln!(
            out,
            "{:>5.1}% {:>5.1}% {:>18.digits$} {:>18.digits$}  {}",
            part(own),
            part(total),
            own as f64 * factor,
            total as f64 * factor,
            row.text()
        )?;
    }
    Ok(())
}

/// Rows with their costs. A row that is on a stack several times counts once.
fn rows(recording: &Recording, of: Measure) -> Vec<(Row, Spent)> {
    let mut numbers: HashMap<Row, usize> = HashMap::from([(Row::Outside, 0)]);
    let of_frame: Vec<Option<usize>> = recording
        .tree
        .frames()
        .map(|frame| {
            let next = numbers.len();
            Some(*numbers.entry(Row::of(frame)?).or_insert(next))
        })
        .collect();
    let mut spent = vec![Spent::default(); numbers.len()];
    // The last entry whose stack contained the row.
    let mut seen = vec![0; numbers.len()];
    for (at, entry) in of.entries(recording).iter().enumerate() {
        let mut top = None;
        for row in recording.tree.path(entry.node).filter_map(|(_, frame)| of_frame[frame.index()]) {
            top.get_or_insert(row);
            if std::mem::replace(&mut seen[row], at + 1) != at + 1 {
                spent[row].total += entry.weight;
            }
        }
        if top.is_none() {
            spent[0].total += entry.weight;
        }
        spent[top.unwrap_or(0)].own += entry.weight;
    }
    let numbered = numbers.into_iter().map(|(row, number)| (row, spent[number]));
    let mut rows: Vec<(Row, Spent)> = numbered.filter(|(_, spent)| spent.total > 0).collect();
    rows.sort_unstable_by(|(a, x), (b, y)| {
        (Reverse(x.own), Reverse(x.total)).cmp(&(Reverse(y.own), Reverse(y.total))).then_with(|| a.cmp(b))
    });
    rows
}
