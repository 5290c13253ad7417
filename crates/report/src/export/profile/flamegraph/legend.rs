//! What the colours mean: a row of squares with words, between the titles and the graph.

use std::fmt::Write as _;

use inferno::flamegraph::color::Color;

use super::super::label_tree::Class;
use crate::model::stack::{FrameKind, ThreadState};

/// Height of the row.
const HEIGHT: usize = 24;
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

/// The graph with a row for these classes. A graph that does not look as expected is left as it is.
pub(super) fn added(svg: &str, classes: &[Class]) -> String {
    let mut sorted = classes.to_vec();
    sorted.sort_by_key(|class| rank(*class));
    let entry = |class: &Class| Some((super::base_color(*class), words(*class)?));
    with(svg, &sorted.iter().filter_map(entry).collect::<Vec<_>>())
}

/// The graph with a row for these colours, likewise.
pub(super) fn with(svg: &str, entries: &[(Color, &str)]) -> String {
    with_row(svg, entries).unwrap_or_else(|| svg.to_owned())
}

fn with_row(svg: &str, entries: &[(Color, &str)]) -> Option<String> {
    let height = |text: &str| -> Option<usize> {
        let (_, rest) = text.split_once(" height=\"")?;
        rest.split_once('"')?.0.parse().ok()
    };
    let old = height(svg)?;
    let (head, body) = svg.split_once("<svg id=\"frames\"")?;
    // The page, its background, and the texts below the graph move; so does the graph.
    let new = old + HEIGHT;
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
        out.replace_range(y..end, &format!("{:.2}", below + HEIGHT as f64));
    }
    out.push_str(&row(entries));
    // A graph begins below its titles: 5 lines of 12.
    let _infallible = write!(out, "<svg id=\"frames\" y=\"{HEIGHT}\"{body}");
    Some(out)
}

fn row(entries: &[(Color, &str)]) -> String {
    let mut out = "<g id=\"legend\">".to_owned();
    let (mut x, y) = (10, 62);
    for (color, words) in entries {
        // Writing to a string cannot fail.
        let _infallible = write!(
            out,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{SQUARE}\" height=\"{SQUARE}\" fill=\"rgb({},{},{})\"/>\
             <text x=\"{}\" y=\"{}\">{words}</text>",
            color.r,
            color.g,
            color.b,
            x + SQUARE + 5,
            y + SQUARE - 2
        );
        x += SQUARE + 5 + words.len() * 7 + 22;
    }
    out.push_str("</g>");
    out
}
