//! The legend of the colours: squares with labels in columns, between the titles and the graph.

use std::fmt::Write as _;

use inferno::flamegraph::color::Color;

use super::super::label::Class;
use crate::model::stack::{FrameKind, ThreadState};

/// Height of a row.
const ROW: usize = 18;
/// Number of entries per row, which also fit on a narrow screen.
const COLUMNS: usize = 3;
/// Size of the squares.
const SQUARE: usize = 12;

/// The label of a class; `None` if it is self-explanatory.
fn words(class: Class) -> Option<&'static str> {
    match class {
        Class::Group => None,
        Class::Frame(FrameKind::Ruby) => Some("Ruby method"),
        Class::Frame(FrameKind::CFunction) => Some("method in C"),
        Class::Frame(FrameKind::Native) => Some("native code"),
        Class::Frame(FrameKind::Kernel) => Some("kernel"),
        Class::Frame(FrameKind::Vm) => Some("garbage collector"),
        Class::Frame(FrameKind::Missing) => Some("not known"),
        Class::Off(ThreadState::Runnable) => Some("waiting for a CPU"),
        Class::Off(_) => Some("blocked"),
        Class::GvlWait => Some("waiting for the GVL"),
    }
}

/// The order of the entries.
fn rank(class: Class) -> u8 {
    match class {
        Class::Frame(FrameKind::Ruby) => 0,
        Class::Frame(FrameKind::CFunction) => 1,
        Class::Frame(FrameKind::Native) => 2,
        Class::Frame(FrameKind::Kernel) => 3,
        Class::Frame(FrameKind::Vm) => 4,
        Class::Off(ThreadState::Runnable) => 6,
        Class::Off(_) => 5,
        Class::GvlWait => 7,
        Class::Frame(FrameKind::Missing) | Class::Group => 8,
    }
}

/// Adds a legend for these classes to the graph, which moves down; `lower`: how many pixels lower than below a single
/// title line. An unexpected SVG is returned unchanged.
pub(super) fn added(svg: &str, classes: &[Class], lower: usize) -> String {
    let mut sorted = classes.to_vec();
    sorted.sort_by_key(|class| rank(*class));
    let entry = |class: &Class| Some((super::base_color(*class), words(*class)?));
    with(svg, &sorted.iter().filter_map(entry).collect::<Vec<_>>(), lower)
}

/// Adds a legend with these colours, likewise.
pub(super) fn with(svg: &str, entries: &[(Color, &str)], lower: usize) -> String {
    with_rows(svg, entries, lower).unwrap_or_else(|| svg.to_owned())
}

fn with_rows(svg: &str, entries: &[(Color, &str)], lower: usize) -> Option<String> {
    let height = |text: &str| -> Option<usize> {
        let (_, rest) = text.split_once(" height=\"")?;
        rest.split_once('"')?.0.parse().ok()
    };
    let old = height(svg)?;
    let (head, body) = svg.split_once("<svg id=\"frames\"")?;
    // The page, its background, the texts below the graph, and the graph itself move.
    let height = lower + entries.len().div_ceil(COLUMNS) * ROW + ROW / 2;
    let new = old + height;
    let mut out = head.replacen(&format!(" height=\"{old}\""), &format!(" height=\"{new}\""), 2).replacen(
        &format!(" {old}\""),
        &format!(" {new}\""),
        1,
    );
    for id in ["details", "matched"] {
        let at = out.find(&format!("<text id=\"{id}\""))?;
        let y = out.get(at..)?.find(" y=\"")? + at + 4;
        let end = out.get(y..)?.find('"')? + y;
        let below: f64 = out.get(y..end)?.parse().ok()?;
        out.replace_range(y..end, &format!("{:.2}", below + height as f64));
    }
    out.push_str(&rows(entries, lower));
    // The graph starts below its titles: 5 lines of 12 pixels.
    let _infallible = write!(out, "<svg id=\"frames\" y=\"{height}\"{body}");
    Some(out)
}

fn rows(entries: &[(Color, &str)], lower: usize) -> String {
    let mut out = "<g id=\"legend\">".to_owned();
    // From left to right, then the next row.
    for (at, (color, words)) in entries.iter().enumerate() {
        let (column, y) = (at % COLUMNS, 60 + lower + at / COLUMNS * ROW);
        // A nested `svg` element has its own origin, here at a fraction of the width.
        let _infallible = write!(
            out,
            "<svg x=\"{:.2}%\" y=\"{y}\"><rect x=\"10\" width=\"{SQUARE}\" height=\"{SQUARE}\" fill=\"rgb({},{},{})\"/>\
             <text x=\"{}\" y=\"{}\">{words}</text></svg>",
            column as f64 * 100.0 / COLUMNS as f64,
            color.r,
            color.g,
            color.b,
            10 + SQUARE + 5,
            SQUARE - 2
        );
    }
    out.push_str("</g>");
    out
}
