//! Several figures over the same time in one picture, one below the other, so that simultaneous events are aligned.

use std::fmt::Write as _;

use maud::{Markup, html};

/// Width of the picture, in user units of the SVG; its height depends on the lanes.
pub(crate) const WIDTH: f64 = 1120.0;
/// Space to the left of the data, and to the right.
pub(crate) const LEFT: f64 = 76.0;
pub(crate) const RIGHT: f64 = 8.0;
/// Height of a lane (`LANE`), including the space for its name above (`NAME`).
const LANE: f64 = 96.0;
pub(crate) const NAME: f64 = 18.0;
/// Space for the labels of the time axis.
pub(crate) const BELOW: f64 = 24.0;
/// Approximate number of ticks on the time axis.
const TICKS: f64 = 8.0;

/// How a lane is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bar for each column: what happened during it.
    Bars,
    /// All bars as one shape, in a fifth of the bytes: single bars have no titles.
    Shape,
    /// A line through the columns with values: something that was measured from time to time.
    Line,
}

/// A figure over time.
pub struct Lane<'a> {
    /// Its name.
    pub name: &'a str,
    /// How it is drawn.
    pub kind: Kind,
    /// A value for each column; columns without one are skipped.
    pub values: Vec<Option<f64>>,
    /// Formats a value.
    pub shown: fn(f64) -> String,
}

/// A highlighted part of the time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark<'a> {
    /// The part.
    pub span: Span,
    /// Its label; none if empty.
    pub name: &'a str,
    /// Its CSS class in the style sheet.
    pub class: &'a str,
}

/// The time that the columns cover, seconds after the start of the recording or run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The start of the first column.
    pub from: f64,
    /// The end of the last column.
    pub to: f64,
}

impl Span {
    fn length(self) -> f64 {
        (self.to - self.from).max(1e-9)
    }

    pub(crate) fn x(self, at: f64) -> f64 {
        LEFT + (at - self.from) / self.length() * (WIDTH - LEFT - RIGHT)
    }

    /// Round times within it, for the axis.
    pub(crate) fn ticks(self) -> Vec<f64> {
        const STEPS: [f64; 11] =
            [60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 21_600.0, 43_200.0, 86_400.0];
        let least = self.length() / TICKS;
        let power = 10_f64.powf(least.log10().floor());
        let decimal =
            [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= least);
        let step = if least < 30.0 { decimal } else { STEPS.into_iter().find(|step| *step >= least) };
        let step = step.unwrap_or_else(|| (least / 86_400.0).ceil() * 86_400.0);
        let first = (self.from / step).ceil();
        (0..100).map(|n| (first + f64::from(n)) * step).take_while(|at| *at <= self.to + 1e-9).collect()
    }
}

/// Formats a time after the start: `1.25 s`, `12:30 min`, `26:03:00 h`.
pub fn after(seconds: f64) -> String {
    if seconds < 120.0 {
        let text = format!("{seconds:.6}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        return format!("{text} s");
    }
    let whole = seconds.round() as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours == 0 {
        format!("{minutes}:{seconds:02} min")
    } else {
        format!("{hours}:{minutes:02}:{seconds:02} h")
    }
}

/// The picture. It has its times as data attributes, so that a script can let the reader choose a part.
pub fn timeline(title: &str, span: Span, lanes: &[Lane<'_>]) -> Markup {
    timeline_with(title, span, lanes, &[])
}

/// The picture with highlighted parts, as far as they lie within it.
pub fn timeline_with(title: &str, span: Span, lanes: &[Lane<'_>], marks: &[Mark<'_>]) -> Markup {
    let bottom = LANE * lanes.len() as f64;
    let height = bottom + BELOW;
    let says: Vec<String> = lanes.iter().map(says).collect();
    let says = format!("{title} from {} to {}. {}", after(span.from), after(span.to), says.join(" "));
    html! {
        figure.timeline {
            figcaption { (title) }
            div.wide tabindex="0" role="region" aria-label=(title) {
                svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(says)
                    data-from=(span.from) data-to=(span.to) data-left=(LEFT / WIDTH) data-right=((WIDTH - RIGHT) / WIDTH) {
                    desc { (says) }
                    @for tick in span.ticks() {
                        @let x = format!("{:.1}", span.x(tick));
                        line.grid x1=(x) x2=(x) y1="0" y2=(bottom + 4.0) {}
                        text x=(x) y=(height - 6.0) text-anchor="middle" { (after(tick)) }
                    }
                    @for (at, lane) in lanes.iter().enumerate() { (drawn(lane, LANE * at as f64)) }
                    @for Mark { span: part, name, class } in marks {
                        @let (from, to) = (part.from.clamp(span.from, span.to), part.to.clamp(span.from, span.to));
                        @if from < to {
                            // A part is visible, however short it is.
                            @let (x, width) = (span.x(from), (span.x(to) - span.x(from)).max(1.0));
                            rect.(class) x=(format!("{x:.1}")) y="0" width=(format!("{width:.1}")) height=(bottom) {}
                            @if !name.is_empty() { text.name x=(format!("{:.1}", x + 4.0)) y="13" { (name) } }
                        }
                    }
                    rect.brush x=(LEFT) y="0" width="0" height=(bottom) {}
                }
            }
        }
    }
}

fn most(lane: &Lane<'_>) -> Option<f64> {
    lane.values.iter().flatten().copied().reduce(f64::max)
}

fn says(lane: &Lane<'_>) -> String {
    match most(lane) {
        None => format!("{}: none.", lane.name),
        Some(most) => format!("{}: at most {}.", lane.name, (lane.shown)(most)),
    }
}

fn drawn(lane: &Lane<'_>, above: f64) -> Markup {
    let most = most(lane);
    let top = most.filter(|most| *most > 0.0).unwrap_or(1.0);
    let (begin, end) = (above + NAME, above + LANE - 4.0);
    let y = |value: f64| end - value / top * (end - begin);
    let columns = lane.values.len().max(1) as f64;
    let width = (WIDTH - LEFT - RIGHT) / columns;
    let x = |at: usize| LEFT + width * at as f64;
    let some = || lane.values.iter().enumerate().filter_map(|(at, value)| Some((at, (*value)?)));
    html! {
        text.name x=(LEFT) y=(above + 13.0) { (lane.name) @if most.is_none() { ": none" } }
        line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(end) y2=(end) {}
        @if let Some(most) = most {
            text x=(LEFT - 6.0) y=(begin + 8.0) text-anchor="end" { ((lane.shown)(most)) }
            text x=(LEFT - 6.0) y=(end) text-anchor="end" { "0" }
            @match lane.kind {
                Kind::Bars => @for (at, value) in some().filter(|(_, value)| *value > 0.0) {
                    // A value above 0 is visible, however small it is.
                    @let y = y(value).min(end - 1.0);
                    rect.bar x=(format!("{:.1}", x(at))) y=(format!("{y:.1}")) width=(format!("{:.1}", (width - 0.3).max(0.7)))
                        height=(format!("{:.1}", end - y)) {
                        title { ((lane.shown)(value)) }
                    }
                },
                Kind::Shape => {
                    @let shape = some().filter(|(_, value)| *value > 0.0).fold(String::new(), |mut text, (at, value)| {
                        let (x, y, width) = (x(at), y(value).min(end - 1.0), (width - 0.3).max(0.7));
                        // Writing to a string cannot fail.
                        let _infallible = write!(text, "M{x:.1} {end}V{y:.1}h{width:.1}V{end}z");
                        text
                    });
                    path.bar d=(shape) {}
                },
                Kind::Line => {
                    @let points = some().fold(String::new(), |mut text, (at, value)| {
                        // Writing to a string cannot fail.
                        let _infallible = write!(text, "{:.1},{:.1} ", x(at) + width / 2.0, y(value));
                        text
                    });
                    polyline.line points=(points) {}
                    @if some().count() <= 60 {
                        @for (at, value) in some() {
                            circle.dot cx=(format!("{:.1}", x(at) + width / 2.0)) cy=(format!("{:.1}", y(value))) r="2.5" {
                                title { ((lane.shown)(value)) }
                            }
                        }
                    }
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lanes without values say so, names are escaped, small bars are visible.
    #[test]
    fn lanes() {
        let lane = |name, kind, values: &[Option<f64>]| Lane {
            name,
            kind,
            values: values.to_vec(),
            shown: |value| format!("{value:.0} ms"),
        };
        let text = timeline(
            "<b>",
            Span { from: 0.0, to: 10.0 },
            &[
                lane("pauses", Kind::Bars, &[Some(1e-9), Some(30.0), Some(0.0), None]),
                lane("<i>", Kind::Line, &[Some(1.0), None, None, Some(4.0)]),
                lane("nothing", Kind::Line, &[None; 4]),
            ],
        )
        .into_string();
        assert_eq!(text.matches("<rect class=\"bar\"").count(), 2, "{text}");
        assert_eq!((text.matches("<polyline").count(), text.matches("<circle").count()), (1, 2), "{text}");
        assert!(text.contains("pauses: at most 30 ms. &lt;i&gt;: at most 4 ms. nothing: none."), "{text}");
        assert!(!text.contains("<b>") && !text.contains("<i>") && !text.contains("NaN"), "{text}");
        assert!(text.contains("data-from=\"0\"") && text.contains("data-to=\"10\""), "{text}");
    }

    /// A shape contains all bars, highlighted parts lie within the picture, and their names are escaped.
    #[test]
    fn shapes_and_marks() {
        let lanes = [Lane {
            name: "x",
            kind: Kind::Shape,
            values: vec![Some(1.0), None, Some(0.0), Some(2.0)],
            shown: |value| value.to_string(),
        }];
        let mark = |from, to, name| Mark { span: Span { from, to }, name, class: "chosen" };
        let marks =
            [mark(-5.0, 2.0, "<A>"), mark(3.0, 99.0, ""), mark(20.0, 30.0, "no"), mark(9.0, 1.0, "no")];
        let text = timeline_with("t", Span { from: 0.0, to: 10.0 }, &lanes, &marks).into_string();
        assert_eq!(
            (text.matches("<path class=\"bar\"").count(), text.matches('M').count()),
            (1, 2),
            "{text}"
        );
        assert_eq!(text.matches("class=\"chosen\"").count(), 2, "{text}");
        assert!(text.contains("&lt;A&gt;") && !text.contains(">no<"), "{text}");
        assert!(text.contains(&format!("x=\"{LEFT:.1}\" y=\"0\"")), "{text}");
    }

    /// Ticks are round, few, and within the span.
    #[test]
    fn ticks() {
        for (from, to) in
            [(0.0, 0.162), (3.3, 4.1), (0.0, 60.0), (7.0, 7200.0), (0.0, 86_400.0), (0.0, 9e6), (5.0, 5.0)]
        {
            let ticks = Span { from, to }.ticks();
            assert!(ticks.len() <= 11, "{from} {to}: {ticks:?}");
            assert!(to <= from || ticks.len() >= 3, "{from} {to}: {ticks:?}");
            assert!(ticks.iter().all(|at| (from..=to + 1e-9).contains(at)), "{from} {to}: {ticks:?}");
        }
        assert_eq!(Span { from: 0.0, to: 40.0 }.ticks().len(), 9);
        let texts = [0.0, 0.02, 1.25, 119.0, 750.0, 93_780.0].map(after);
        assert_eq!(texts, ["0 s", "0.02 s", "1.25 s", "119 s", "12:30 min", "26:03:00 h"]);
    }
}
