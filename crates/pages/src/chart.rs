//! Charts over time, as SVG that a style sheet colours.
//!
//! Written by hand: a line and a heat map are a hundred lines of code, take their colours from the page (light, dark, contrast), scale with it
//! and need neither scripts nor inline styles, which plotting libraries put into their SVG and a strict policy forbids.

use std::fmt::Write as _;

use maud::{Markup, html};

use crate::words;

/// Size of a chart, in user units of the SVG.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 200.0;
/// Space for labels to the left of and below the data, and space above it.
const LEFT: f64 = 76.0;
const BELOW: f64 = 22.0;
const ABOVE: f64 = 8.0;

/// A stretch of time, divided into columns of the same width, earliest first.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Number of columns.
    pub columns: usize,
    /// Labels below the first and the last column.
    pub ends: [String; 2],
}

impl Axis {
    fn x(&self, at: f64) -> f64 {
        LEFT + at / self.columns.max(1) as f64 * (WIDTH - LEFT - 4.0)
    }

    fn labels(&self) -> Markup {
        let y = HEIGHT - 6.0;
        html! {
            text x=(LEFT) y=(y) { (self.ends[0]) }
            text x=(WIDTH - 4.0) y=(y) text-anchor="end" { (self.ends[1]) }
        }
    }
}

/// A line over time. Columns without a value (`None`) interrupt it. `shown` formats a value.
pub fn line(title: &str, axis: &Axis, values: &[Option<f64>], shown: impl Fn(f64) -> String) -> Markup {
    let Some(most) = values.iter().flatten().copied().reduce(f64::max) else { return empty(title) };
    let top = if most > 0.0 { most * 1.1 } else { 1.0 };
    let y = |value: f64| ABOVE + (1.0 - value / top) * (HEIGHT - ABOVE - BELOW);
    let last = values.iter().flatten().last().copied().unwrap_or(most);
    let says = format!("at most {}, last {}", shown(most), shown(last));
    figure(
        title,
        &says,
        &html! {
            @for step in 0..=2 {
                @let value = top * f64::from(step) / 2.0;
                line.grid x1=(LEFT) x2=(WIDTH - 4.0) y1=(y(value)) y2=(y(value)) {}
                text x=(LEFT - 6.0) y=(y(value) + 4.0) text-anchor="end" { (shown(value)) }
            }
            @for part in parts(values) {
                @if let [(at, value)] = part.as_slice() {
                    circle.dot cx=(axis.x(*at as f64 + 0.5)) cy=(y(*value)) r="3" {}
                } @else {
                    polyline.line points=(points(axis, &part, y)) {}
                }
            }
            (axis.labels())
        },
    )
}

/// The points of a line, as the attribute of a `polyline`.
fn points(axis: &Axis, part: &[(usize, f64)], y: impl Fn(f64) -> f64) -> String {
    let mut text = String::new();
    for (at, value) in part {
        // Writing to a string cannot fail.
        let _infallible = write!(text, "{:.1},{:.1} ", axis.x(*at as f64 + 0.5), y(*value));
    }
    text
}

/// Runs of neighbouring values, each value with the number of its column.
fn parts(values: &[Option<f64>]) -> Vec<Vec<(usize, f64)>> {
    let mut parts = vec![Vec::new()];
    for (at, value) in values.iter().enumerate() {
        match (value, parts.last_mut()) {
            (Some(value), Some(part)) => part.push((at, *value)),
            _ => parts.push(Vec::new()),
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// A heat map of counts by time and class; darker means more. `classes` are the names of the rows, lowest first; `counts[column][row]`.
pub fn heat(title: &str, axis: &Axis, classes: &[&str], counts: &[Vec<u64>]) -> Markup {
    let most = counts.iter().flatten().copied().max().unwrap_or(0);
    if most == 0 {
        return empty(title);
    }
    let row = (HEIGHT - ABOVE - BELOW) / classes.len() as f64;
    let y = |class: usize| HEIGHT - BELOW - row * (class + 1) as f64;
    let sum: u64 = counts.iter().flatten().sum();
    let highest =
        counts.iter().filter_map(|column| column.iter().rposition(|count| *count > 0)).max().unwrap_or(0);
    let says = format!("{sum} in all, the longest {}", classes[highest]);
    // A logarithmic scale: one among thousands is still visible.
    let shade = |count: u64| 0.15 + 0.85 * ((count as f64).ln_1p() / (most as f64).ln_1p());
    figure(
        title,
        &says,
        &html! {
            @for (class, name) in classes.iter().enumerate() {
                text x=(LEFT - 6.0) y=(y(class) + row / 2.0 + 4.0) text-anchor="end" { (name) }
            }
            @for (at, column) in counts.iter().enumerate() {
                @for (class, count) in column.iter().enumerate().filter(|(_, count)| **count > 0) {
                    rect.heat x=(format!("{:.1}", axis.x(at as f64))) y=(format!("{:.1}", y(class)))
                        width=(format!("{:.1}", axis.x(1.0) - axis.x(0.0) - 0.5)) height=(format!("{:.1}", row - 0.5))
                        fill-opacity=(format!("{:.2}", shade(*count))) {
                        title { (count) " of " (classes[class]) }
                    }
                }
            }
            (axis.labels())
        },
    )
}

/// Counts by class as horizontal bars. `classes` are the names of the rows, uppermost first.
pub fn bars(title: &str, classes: &[&str], counts: &[u64]) -> Markup {
    let most = counts.iter().copied().max().unwrap_or(0);
    if most == 0 {
        return empty(title);
    }
    let row = (HEIGHT - 2.0 * ABOVE) / classes.len().max(1) as f64;
    // Leaves space for the largest count after its bar.
    let widest = WIDTH - LEFT - 64.0;
    let sum: u64 = counts.iter().sum();
    let says = format!("{sum} in all");
    figure(
        title,
        &says,
        &html! {
            @for (at, (name, count)) in classes.iter().zip(counts).enumerate() {
                @let y = ABOVE + row * at as f64;
                @let width = (*count as f64 / most as f64 * widest).max(if *count > 0 { 1.0 } else { 0.0 });
                text x=(LEFT - 6.0) y=(format!("{:.1}", y + row / 2.0 + 4.0)) text-anchor="end" { (name) }
                rect.bar x=(LEFT) y=(format!("{:.1}", y + 1.0)) width=(format!("{width:.1}")) height=(format!("{:.1}", row - 2.0)) {}
                text x=(format!("{:.1}", LEFT + width + 6.0)) y=(format!("{:.1}", y + row / 2.0 + 4.0)) { (words::count(*count)) }
            }
        },
    )
}

/// A drawing with its main numbers in a caption: on a phone only a part of it is visible at a time, without its axes.
fn figure(title: &str, says: &str, drawing: &Markup) -> Markup {
    let all = format!("{title}: {says}");
    html! {
        figure {
            figcaption { (all) }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(all) { desc { (all) } (drawing) }
        }
    }
}

fn empty(title: &str) -> Markup {
    html! { figure { figcaption { (title) } p.soft { "No figures in this time." } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gaps remain gaps, a single value is a dot, the absence of values is stated; names are escaped.
    #[test]
    fn charts() {
        let axis = Axis { columns: 6, ends: ["<b>".to_owned(), "now".to_owned()] };
        let values = [Some(1.0), Some(2.0), None, Some(0.0), None, None];
        let text = line("a<b", &axis, &values, |value| format!("{value:.1}")).into_string();
        assert_eq!((text.matches("<polyline").count(), text.matches("<circle").count()), (1, 1), "{text}");
        assert!(!text.contains("<b>") && !text.contains("NaN"), "{text}");
        // The numbers are in the caption, too, for when the axes are out of sight.
        let caption = text.split("</figcaption>").next().unwrap();
        assert!(caption.contains("a&lt;b: at most 2.0, last 0.0"), "{text}");
        assert!(line("x", &axis, &[None; 6], |_| String::new()).into_string().contains("No figures"));
        assert!(!line("x", &axis, &[Some(0.0)], |value| value.to_string()).into_string().contains("NaN"));
        let counts = [vec![0, 3], vec![1, 0], vec![0, 0]];
        let text = heat("stops", &axis, &["< 1 ms", "1 ms"], &counts).into_string();
        assert_eq!(text.matches("<rect").count(), 2, "{text}");
        assert!(text.contains("4 in all, the longest 1 ms") && text.contains("1 of &lt; 1 ms"), "{text}");
        assert!(heat("x", &axis, &["a"], &[]).into_string().contains("No figures"));
        let text = bars("pauses", &["<b>", "1 ms"], &[0, 7]).into_string();
        assert!(text.contains("&lt;b&gt;") && text.contains("7 in all"), "{text}");
        assert_eq!(text.matches("<rect").count(), 2, "{text}");
        assert!(bars("x", &["a"], &[0]).into_string().contains("No figures"));
    }
}
