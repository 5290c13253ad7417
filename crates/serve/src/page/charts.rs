//! The charts of the page.

use gctrace_pages::{
    Column, chart, table,
    timeline::{Kind, Lane, Mark, Span, after, timeline, timeline_with},
    words::{bytes, count, percent},
};
use gctrace_report::trace_file::Subjects;
use maud::{Markup, html};

use super::{round, time};
use crate::{
    columns::{CLASS_NAMES, CLASSES, Cell, Columns},
    figures::Figures,
    held::Held,
};

/// Maximum number of rows of the table beside the time line.
const ROWS: usize = 24;

/// Which requests count in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// Requests that began in it: all of these are known for a time in the past.
    Begun,
    /// Requests that ended in it: in a run in progress, requests that have not ended are unknown.
    Ended,
}

/// The lanes of a time line that ends at `end_ns`; `bars` is how bars are drawn. `times_pauses`: pauses are seen of any process.
pub(super) fn lanes(
    columns: &Columns,
    subjects: Subjects,
    times_pauses: bool,
    bars: Kind,
    end_ns: u64,
    counted: Counted,
) -> Vec<Lane<'static>> {
    let values = |of: &dyn Fn(&Cell) -> Option<f64>| columns.cells.iter().map(of).collect::<Vec<_>>();
    // A sum divided by the nanoseconds in which everything was traced.
    let shares = |of: &dyn Fn(&Cell) -> u64| -> Vec<Option<f64>> {
        columns
            .cells
            .iter()
            .zip(columns.lengths(end_ns))
            .map(|(cell, ns)| (ns > 0).then(|| of(cell) as f64 / ns as f64))
            .collect()
    };
    let per_second =
        |of: &dyn Fn(&Cell) -> u64| shares(of).into_iter().map(|rate| Some(rate? * 1e9)).collect::<Vec<_>>();
    let mut lanes = Vec::new();
    if times_pauses {
        lanes.push(Lane {
            name: "GC: longest pause",
            kind: bars,
            values: values(&|cell| Some(cell.longest_ns as f64)),
            shown: |ns| time(ns as u64),
        });
    }
    lanes.push(Lane {
        name: "GC: share of the time, all processes together",
        kind: bars,
        values: shares(&|cell| cell.pause_ns),
        shown: percent,
    });
    if subjects.samples {
        lanes.push(Lane {
            name: "CPUs in use",
            kind: bars,
            values: shares(&|cell| cell.cpu_ns),
            shown: |cpus| format!("{cpus:.2}"),
        });
    }
    let resident = values(&|cell| cell.held[Held::RSS].map(|rss| rss as f64));
    lanes.push(Lane {
        name: if resident.iter().any(Option::is_some) {
            "Resident memory at GC events, all processes together"
        } else {
            "Resident memory of all processes together (it was not read of each)"
        },
        kind: Kind::Line,
        values: resident,
        shown: |rss| bytes(rss as u64),
    });
    if subjects.alloc {
        lanes.push(Lane {
            name: "Allocated per second",
            kind: bars,
            values: per_second(&|cell| cell.allocated),
            shown: |rate| bytes(rate as u64),
        });
    }
    if subjects.requests {
        lanes.push(Lane {
            name: "Requests per second",
            kind: bars,
            values: match counted {
                Counted::Begun => per_second(&|cell| cell.requests),
                Counted::Ended => per_second(&|cell| cell.served),
            },
            shown: |rate| format!("{rate:.1}"),
        });
    }
    lanes
}

/// The time line, and the same figures as a table.
pub(crate) fn over_time(
    figures: &Figures,
    subjects: Subjects,
    (from, to): (f64, f64),
    marks: &[Mark<'_>],
) -> Markup {
    let columns = &figures.lanes.columns;
    let width_ns = columns.width_ns as f64;
    let end_ns = end_ns(columns, (from, to));
    let lanes = lanes(columns, subjects, figures.times_pauses(), Kind::Bars, end_ns, Counted::Begun);
    // The last column ends at the end of the time, or after it.
    let last = from + width_ns * columns.cells.len() as f64 / 1e9;
    html! {
        (timeline_with("Time line", Span { from, to: last.max(to) }, &lanes, marks))
        details {
            summary { "The time line as a table" }
            (as_table(figures, subjects, from, end_ns))
        }
    }
}

/// The end of the time that the columns cover, for a part between these seconds.
fn end_ns(columns: &Columns, (from, to): (f64, f64)) -> u64 {
    columns.from_ns.saturating_add(((to - from).max(0.0) * 1e9).round() as u64)
}

fn as_table(figures: &Figures, subjects: Subjects, from: f64, end_ns: u64) -> Markup {
    let columns = &figures.lanes.columns;
    let each = columns.cells.len().div_ceil(ROWS).max(1);
    let width_ns = columns.width_ns as f64 * each as f64;
    let lengths: Vec<u64> = columns.lengths(end_ns).collect();
    let rows: Vec<Vec<Markup>> = columns
        .cells
        .chunks(each)
        .zip(lengths.chunks(each))
        .enumerate()
        .map(|(at, (cells, lengths))| {
            let length_ns = lengths.iter().sum::<u64>();
            let most = |of: fn(&Cell) -> Option<u64>| cells.iter().filter_map(of).max();
            let share = |of: fn(&Cell) -> u64, shown: fn(f64) -> String| {
                let sum = cells.iter().map(of).sum::<u64>() as f64;
                if length_ns == 0 { "–".to_owned() } else { shown(sum / length_ns as f64) }
            };
            let mut row = vec![
                html! { (after(round(from + width_ns * at as f64 / 1e9))) },
                if figures.times_pauses() {
                    html! { (time(most(|cell| Some(cell.longest_ns)).unwrap_or(0))) }
                } else {
                    html! { "–" }
                },
                html! { (share(|cell| cell.pause_ns, percent)) },
                html! { (most(|cell| cell.held[Held::RSS]).map_or_else(|| "–".to_owned(), bytes)) },
            ];
            if subjects.samples {
                row.push(html! { (share(|cell| cell.cpu_ns, |cpus| format!("{cpus:.2}"))) });
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

/// An amount that is drawn of heaps: its kind, its name, and how to format a value.
type Amount = (usize, &'static str, fn(f64) -> String);
const AMOUNTS: [Amount; 3] = [
    (Held::LIVE, "Live slots", |slots| count(slots as u64)),
    (Held::FREE, "Free slots", |slots| count(slots as u64)),
    (Held::MALLOC, "malloc since the last major cycle (oldmalloc_increase_bytes)", |size| bytes(size as u64)),
];

/// The heaps over time, as far as known, and the same figures as a table.
pub(super) fn memory(figures: &Figures, (from, to): (f64, f64)) -> Markup {
    let columns = &figures.lanes.columns;
    let width_ns = columns.width_ns as f64;
    let known: Vec<Amount> = AMOUNTS
        .into_iter()
        .filter(|(kind, ..)| columns.cells.iter().any(|cell| cell.held[*kind].is_some()))
        .collect();
    if known.is_empty() {
        return html! {};
    }
    let lane = |&(kind, name, shown): &Amount| Lane {
        name,
        kind: Kind::Line,
        values: columns.cells.iter().map(|cell| cell.held[kind].map(|value| value as f64)).collect(),
        shown,
    };
    let lanes: Vec<Lane<'_>> = known.iter().map(lane).collect();
    let last = from + width_ns * columns.cells.len() as f64 / 1e9;
    let each = columns.cells.len().div_ceil(ROWS).max(1);
    let rows: Vec<Vec<Markup>> = columns
        .cells
        .chunks(each)
        .enumerate()
        .map(|(at, cells)| {
            let mut row = vec![html! { (after(round(from + width_ns * each as f64 * at as f64 / 1e9))) }];
            row.extend(known.iter().map(|&(kind, _, shown)| {
                let most = cells.iter().filter_map(|cell| cell.held[kind]).max();
                html! { (most.map_or_else(|| "–".to_owned(), |most| shown(most as f64))) }
            }));
            row
        })
        .collect();
    let mut heads = vec![Column::Text("From")];
    heads.extend(known.iter().map(|&(_, name, _)| Column::Number(name)));
    html! {
        section aria-labelledby="heap" {
            h2 #heap { "Heap over time" }
            (timeline("Heaps at GC events, all processes together", Span { from, to: last.max(to) }, &lanes))
            p.soft { "What the VMs counted when cycles began and ended: the most of each moment. Between GC events nothing is known." }
            details {
                summary { "Heaps as a table" }
                (table("Heaps by time", &heads, &rows))
            }
        }
    }
}

/// Durations of pauses and waits over time.
pub(super) fn latencies(figures: &Figures, subjects: Subjects, (from, to): (f64, f64)) -> Markup {
    let columns = &figures.lanes.columns;
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
            div.charts.recorded {
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
