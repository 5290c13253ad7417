//! What the colours mean: squares with words in columns, between the titles and the graph.

use std::fmt::Write as _;

use inferno::flamegraph::color::Color;

use super::super::label::Class;
use crate::model::stack::{FrameKind, ThreadState};

/// Height of a row.
const ROW: usize = 18;
/// Entries that fit beside each other on a narrow screen, too.
const COLUMNS: usize = 3;
/// Of the squares.
const SQUARE: usize = 12;

/// The words for a class; `None` for what explains itself.
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

/// The order in which they are shown.
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

/// The graph with rows for these classes, this many pixels lower than below a single line. A graph that does not look as expected is left as it is.
pub(super) fn added(svg: &str, classes: &[Class], lower: usize) -> String {
    let mut sorted = classes.to_vec();
    sorted.sort_by_key(|class| rank(*class));
    let entry = |class: &Class| Some((super::base_color(*class), words(*class)?));
    with(svg, &sorted.iter().filter_map(entry).collect::<Vec<_>>(), lower)
}

/// The graph with rows for these colours, likewise.
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
    // The page, its background, and the texts below the graph move; so does the graph.
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
    // A graph begins below its titles: 5 lines of 12.
    let _infallible = write!(out, "<svg id=\"frames\" y=\"{height}\"{body}");
    Some(out)
}

fn rows(entries: &[(Color, &str)], lower: usize) -> String {
    let mut out = "<g id=\"legend\">".to_owned();
    // From the left one to the right one, then below it.
    for (at, (color, words)) in entries.iter().enumerate() {
        let (column, y) = (at % COLUMNS, 60 + lower + at / COLUMNS * ROW);
        // A nested picture has its own origin, here at a part of the width.
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
