//! The changes from one part to another.

use gctrace_pages::{Column, table};
use gctrace_report::{
    diff::{Comparison, Figure, Kind, Row, Table, Verdict},
    export::diff::{change, method_name, value},
    words::{date_time, plural},
};
use maud::{Markup, html};

use super::{TALLEST, name, query};
use crate::{
    compare::{Compared, OneSide},
    wanted::Wanted,
};

/// Maximum number of changes listed at the top.
const NAMED: usize = 8;
/// Number of rows of a table by name, if fewer have changed.
const ROWS: usize = 15;
/// The table whose sums are over whole thread lifetimes.
const OF_LIVES: &str = "gvl";

/// The whole section of a comparison.
pub(super) fn section(compared: &Compared, wanted: &Wanted) -> Markup {
    let Compared { comparison, sides, graph, cuts_time } = compared;
    let address = format!("diff.svg{}", query(&wanted.asked, None));
    let tables: Vec<&Table> =
        comparison.tables.iter().filter(|table| !(*cuts_time && table.key == OF_LIVES)).collect();
    html! {
        section #diff aria-labelledby="changed" {
            h2 #changed { "What has changed from A to B" }
            @for (at, side) in sides.iter().enumerate() { (head(["A", "B"][at], side, &comparison.only[at])) }
            @if !comparison.nothing.is_empty() {
                p.note role="alert" { "Nothing is compared: " (name(&comparison.nothing.join("; "))) "." }
            } @else {
                (changes(comparison))
                iframe.graph src=(address) title="Flame graph: the change of CPU time" height=(graph.height.min(TALLEST)) loading="lazy" tabindex="-1" {}
                p.links { a href=(address) { "The flame graph on its own" } }
                @for table in &tables { @if !table.rows.is_empty() { (of(table)) } }
                (lacks(&tables, *cuts_time))
                (method(comparison))
            }
        }
    }
}

fn head(which: &str, side: &OneSide, only: &[String]) -> Markup {
    let about = &side.about;
    html! {
        p {
            strong { (which) } ": " (name(&about.file)) ", "
            @if let Some(began) = about.began { (date_time(began)) ", " }
            (format!("{:.1} s", about.seconds)) @if about.cut_off { ", cut off" } "; "
            @for (at, (program, of)) in side.programs.iter().take(ROWS).enumerate() {
                @if at > 0 { ", " }
                (name(program)) " (" (plural(of.processes, "process"))
                @if only.contains(program) { "; missing from the other one" } ")"
            }
            @if side.programs.len() > ROWS { ", " (plural((side.programs.len() - ROWS) as u64, "more program")) }
        }
    }
}

fn subject(row: &Row) -> Option<String> {
    match &row.kind {
        Kind::All => None,
        Kind::Endpoint(endpoint) => Some(endpoint.clone()),
        Kind::Method(method) => Some(method_name(method)),
    }
}

/// The significant changes, one per line.
fn changes(comparison: &Comparison) -> Markup {
    let tested = comparison.figures().filter(|(_, _, figure)| figure.p.is_some()).count();
    let real = diff_order(comparison);
    if tested == 0 {
        return html! { p.note { "Nothing was tested: each part must last at least " (Comparison::least_seconds()) " s, and have something to compare." } };
    }
    if real.is_empty() {
        return html! { p.note { "No change is more than noise (" (plural(tested as u64, "figure")) " tested)." } };
    }
    html! {
        p.note { "More than noise: " (real.len()) " of " (plural(tested as u64, "figure")) "." }
        ul {
            @for (table, row, figure) in real.iter().take(NAMED) {
                li {
                    (title(table)) ": " @if let Some(subject) = subject(row) { (name(&subject)) ", " } (figure.what) " "
                    @if figure.verdict == Verdict::Grew { "grew" } @else { "shrank" } ": "
                    (value(figure.a, figure.unit)) " → " (value(figure.b, figure.unit)) " (" (change(figure)) ")"
                }
            }
            @if real.len() > NAMED { li { "and " (real.len() - NAMED) " more, marked * below" } }
        }
    }
}

/// The significant changes: first what has changed itself, then its callers.
fn diff_order(comparison: &Comparison) -> Vec<(&Table, &Row, &Figure)> {
    let real = comparison.figures().filter(|(_, _, figure)| figure.verdict.is_real());
    let (mut own, callers): (Vec<_>, Vec<_>) =
        real.partition(|(_, row, figure)| row.figures.first().is_some_and(|first| first.what == figure.what));
    own.extend(callers);
    own
}

fn verdict(figure: &Figure) -> String {
    match figure.verdict {
        Verdict::Grew | Verdict::Shrank => "* yes".to_owned(),
        Verdict::Noise => "no".to_owned(),
        Verdict::Untested(why) => format!("not tested: {why}"),
    }
}

/// The title of a table, by its key.
fn title(table: &Table) -> &'static str {
    match table.key {
        "process" => "Processes",
        "gc" => "GC",
        "gvl" => "Waiting for the GVL",
        "alloc" => "Allocation",
        "requests" => "Requests",
        "endpoints" => "Endpoints",
        "methods" => "Methods, CPU time",
        "triggers" => "What starts GC, time of pauses",
        "holders" => "Who held the GVL in long waits, threads on average",
        "off_cpu" => "Methods, off-CPU time, threads on average",
        "allocating" => "Methods, allocation",
        _ => table.title,
    }
}

fn of(of: &Table) -> Markup {
    let changed =
        of.rows.iter().filter(|row| row.figures.iter().any(|figure| figure.verdict.is_real())).count();
    let shown =
        if of.rows.iter().all(|row| row.kind == Kind::All) { of.rows.len() } else { ROWS.max(changed) };
    // A row per figure: its subject comes first, unless the row is about everything.
    let by_name = of.rows.iter().any(|row| row.kind != Kind::All);
    let rows: Vec<Vec<Markup>> = of
        .rows
        .iter()
        .take(shown)
        .flat_map(|row| row.figures.iter().map(move |figure| (row, figure)))
        .map(|(row, figure)| {
            let subject = by_name.then(|| html! { (name(&subject(row).unwrap_or_default())) });
            let cells = [
                html! { (figure.what) },
                html! { (value(figure.a, figure.unit)) },
                html! { (value(figure.b, figure.unit)) },
                html! { (change(figure)) },
                html! { (verdict(figure)) },
            ];
            subject.into_iter().chain(cells).collect()
        })
        .collect();
    let mut heads = vec![
        Column::Text("Figure"),
        Column::Number("A"),
        Column::Number("B"),
        Column::Number("Change"),
        Column::Text("More than noise?"),
    ];
    if by_name {
        heads.insert(0, Column::Text("Of"));
    }
    html! {
        details open {
            summary { (title(of)) }
            (table(if by_name { "Those that changed most come first" } else { "All chosen processes together" }, &heads, &rows))
            @if of.rows.len() > shown { p.soft { (plural((of.rows.len() - shown) as u64, "more row")) "." } }
        }
    }
}

/// What cannot be compared, and why.
fn lacks(tables: &[&Table], cuts_time: bool) -> Markup {
    html! {
        @for table in tables {
            @if !table.absent.is_empty() {
                p.soft { "Not compared: " (title(table)) ": " (name(&table.absent.join("; "))) "." }
            }
            @for lack in &table.lacks { p.soft { "Not compared: " (name(lack)) "." } }
            @for note in &table.notes { p.soft { (name(note)) "." } }
        }
        @if cuts_time {
            p.soft { "Not compared: the sums of waiting for the GVL: they cover whole lives of threads, and a part of the recording has none." }
        }
    }
}

fn method(comparison: &Comparison) -> Markup {
    let of = |at: usize| match comparison.blocks[at] {
        Some((blocks, ns)) => format!("{blocks} blocks of {:.2} s", ns as f64 / 1e9),
        None => format!("none: it is shorter than {} s", Comparison::least_seconds()),
    };
    html! {
        p.soft {
            "Rates are per second and process. ± is the 95 % interval. Tested over time blocks (A: " (of(0)) "; B: " (of(1))
            "), as by " code { "gctrace diff" } " (docs/diff.md)."
        }
    }
}
