//! Charts of the page.

use gctrace_pages::{
    Column, chart, table,
    timeline::{Kind, Lane, Span, after, timeline},
    words::{bytes, count, percent},
};
use gctrace_report::trace_file::Subjects;
use maud::{Markup, html};

use super::{round, time};
use crate::{
    columns::{CLASS_NAMES, CLASSES, Cell},
    figures::Figures,
};

/// Rows of the table beside the time line.
const ROWS: usize = 24;

/// The time line, and the same as a table.
pub(super) fn over_time(figures: &Figures, subjects: Subjects, (from, to): (f64, f64)) -> Markup {
    let columns = &figures.columns;
    let width_ns = columns.width_ns as f64;
    let values = |of: &dyn Fn(&Cell) -> Option<f64>| columns.cells.iter().map(of).collect::<Vec<_>>();
    let mut lanes = vec![
        Lane {
            name: "GC: longest pause",
            kind: Kind::Bars,
            values: values(&|cell| Some(cell.longest_ns as f64)),
            shown: |ns| time(ns as u64),
        },
        Lane {
            name: "GC: share of the time, all processes together",
            kind: Kind::Bars,
            values: values(&|cell| Some(cell.pause_ns as f64 / width_ns)),
            shown: percent,
        },
    ];
    if subjects.samples {
        lanes.push(Lane {
            name: "CPUs in use",
            kind: Kind::Bars,
            values: values(&|cell| Some(cell.cpu_ns as f64 / width_ns)),
            shown: |cpus| format!("{cpus:.2}"),
        });
    }
    lanes.push(Lane {
        name: "Resident memory at GC events, all processes together",
        kind: Kind::Line,
        values: values(&|cell| cell.rss.map(|rss| rss as f64)),
        shown: |rss| bytes(rss as u64),
    });
    if subjects.alloc {
        lanes.push(Lane {
            name: "Allocated per second",
            kind: Kind::Bars,
            values: values(&|cell| Some(cell.allocated as f64 * 1e9 / width_ns)),
            shown: |rate| bytes(rate as u64),
        });
    }
    if subjects.requests {
        lanes.push(Lane {
            name: "Requests per second",
            kind: Kind::Bars,
            values: values(&|cell| Some(cell.requests as f64 * 1e9 / width_ns)),
            shown: |rate| format!("{rate:.1}"),
        });
    }
    // Columns end where the time ends, or after it.
    let last = from + width_ns * columns.cells.len() as f64 / 1e9;
    html! {
        (timeline("Time line", Span { from, to: last.max(to) }, &lanes))
        details {
            summary { "The time line as a table" }
            (as_table(figures, subjects, from))
        }
    }
}

fn as_table(figures: &Figures, subjects: Subjects, from: f64) -> Markup {
    let columns = &figures.columns;
    let each = columns.cells.len().div_ceil(ROWS).max(1);
    let width_ns = columns.width_ns as f64 * each as f64;
    let rows: Vec<Vec<Markup>> = columns
        .cells
        .chunks(each)
        .enumerate()
        .map(|(at, cells)| {
            let most = |of: fn(&Cell) -> Option<u64>| cells.iter().filter_map(of).max();
            let sum = |of: fn(&Cell) -> u64| cells.iter().map(of).sum::<u64>();
            let mut row = vec![
                html! { (after(round(from + width_ns * at as f64 / 1e9))) },
                html! { (time(most(|cell| Some(cell.longest_ns)).unwrap_or(0))) },
                html! { (percent(sum(|cell| cell.pause_ns) as f64 / width_ns)) },
                html! { (most(|cell| cell.rss).map_or_else(|| "–".to_owned(), bytes)) },
            ];
            if subjects.samples {
                row.push(html! { (format!("{:.2}", sum(|cell| cell.cpu_ns) as f64 / width_ns)) });
            }
            row
        })
        .collect();
    let mut heads = vec![
        Column::Text("From"),
        Column::Number("Longest pause"),
        Column::Number("GC"),
        Column::Number("Memory"),
    ];
    if subjects.samples {
        heads.push(Column::Number("CPUs"));
    }
    table("Figures by time", &heads, &rows)
}

/// How long pauses and waits took, and when.
pub(super) fn latencies(figures: &Figures, subjects: Subjects, (from, to): (f64, f64)) -> Markup {
    let columns = &figures.columns;
    let axis = chart::Axis { columns: columns.cells.len(), ends: [after(round(from)), after(round(to))] };
    let counts = |of: fn(&Cell) -> &[u64; CLASSES]| -> Vec<Vec<u64>> {
        columns.cells.iter().map(|cell| of(cell).to_vec()).collect()
    };
    let waits = columns.sum().waits;
    let row = |at: usize| {
        let mut row = vec![html! { (CLASS_NAMES[at]) }, html! { (count(figures.pauses[at])) }];
        if subjects.gvl {
            row.push(html! { (count(waits[at])) });
        }
        row
    };
    let mut heads = vec![Column::Text("Length"), Column::Number("GC pauses")];
    if subjects.gvl {
        heads.push(Column::Number("Long waits for the GVL"));
    }
    html! {
        section aria-labelledby="length" {
            h2 #length { "How long" }
            div.charts {
                (chart::heat("GC pauses by time and length", &axis, &CLASS_NAMES, &counts(|cell| &cell.pauses)))
                @if subjects.gvl {
                    (chart::heat("Long waits for the GVL by time and length", &axis, &CLASS_NAMES, &counts(|cell| &cell.waits)))
                }
                (chart::bars("GC pauses by length", &CLASS_NAMES, &figures.pauses))
                @if subjects.gvl { (chart::bars("Long waits for the GVL by length", &CLASS_NAMES, &waits)) }
            }
            details {
                summary { "The lengths as a table" }
                (table("Pauses and waits by length", &heads, &(0..CLASSES).map(row).collect::<Vec<_>>()))
            }
        }
    }
}
