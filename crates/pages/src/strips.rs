//! The activities of several rows over the same time, one below the other: one strip per kind of activity, darker where it took more of a
//! column's time. The times are at the same positions as those of [`crate::timeline`].

use std::fmt::Write as _;

use maud::{Markup, html};

use crate::timeline::{BELOW, LEFT, NAME, RIGHT, Span, WIDTH, after};

/// Height of a strip (`STRIP`), and including the space below it (`EACH`).
const STRIP: f64 = 10.0;
const EACH: f64 = 12.0;
/// Space below the strips of a row.
const AFTER: f64 = 8.0;
/// Number of shades. All columns of one shade are one path, so that a picture has few elements.
const SHADES: usize = 8;

/// A kind of activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doing<'a> {
    /// Its name in the legend.
    pub name: &'a str,
    /// Its name in a word or two, beside its strip.
    pub short: &'a str,
    /// CSS class of its strip and of its mark in the legend; the style sheet colours it.
    pub class: &'static str,
}

/// One row: whatever is active, such as a thread.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// For each kind of activity: its share of each column's time, 0 to 1, and the total as text.
    pub strips: Vec<(Vec<f64>, String)>,
}

/// The picture with its legend. `columns` is the number of columns of the span.
pub fn strips(title: &str, span: Span, columns: usize, doings: &[Doing<'_>], rows: &[Row]) -> Markup {
    let row_height = NAME + EACH * doings.len() as f64 + AFTER;
    let bottom = row_height * rows.len() as f64;
    let height = bottom + BELOW;
    let names: Vec<&str> = doings.iter().map(|doing| doing.name).collect();
    let says = format!(
        "{title} from {} to {}, {} one below the other, each with strips for: {}. The darker a strip, the more of that time.",
        after(span.from),
        after(span.to),
        rows.len(),
        names.join(", ")
    );
    html! {
        figure.strips {
            figcaption { (title) }
            ul.legend aria-label="Legend" {
                @for doing in doings { li class=(doing.class) { (doing.name) } }
            }
            div.wide tabindex="0" role="region" aria-label=(title) {
                svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(says) {
                    desc { (says) }
                    @for tick in span.ticks() {
                        @let x = format!("{:.1}", span.x(tick));
                        line.grid x1=(x) x2=(x) y1="0" y2=(bottom) {}
                        text x=(x) y=(height - 6.0) text-anchor="middle" { (after(tick)) }
                    }
                    @for (at, row) in rows.iter().enumerate() { (drawn(row, doings, columns, row_height * at as f64)) }
                }
            }
        }
    }
}

fn drawn(row: &Row, doings: &[Doing<'_>], columns: usize, above: f64) -> Markup {
    html! {
        text.name x=(LEFT) y=(format!("{:.1}", above + 13.0)) { (row.name) }
        @for (at, (doing, (shares, sum))) in doings.iter().zip(&row.strips).enumerate() {
            @let y = above + NAME + EACH * at as f64;
            g class=(doing.class) {
                title { (row.name) ": " (doing.name) ": " (sum) }
                text x=(LEFT - 6.0) y=(format!("{:.1}", y + STRIP - 1.0)) text-anchor="end" { (doing.short) }
                rect.track x=(LEFT) y=(format!("{y:.1}")) width=(WIDTH - LEFT - RIGHT) height=(STRIP) {}
                @for shade in 1..=SHADES {
                    @let path = path(shares, shade, columns, y);
                    @if !path.is_empty() {
                        path d=(path) fill-opacity=(format!("{:.2}", 0.25 + 0.75 * shade as f64 / SHADES as f64)) {}
                    }
                }
            }
        }
    }
}

/// The shade of a share; 0 means no shade.
fn shade(share: f64) -> usize {
    if share > 0.0 { ((share * SHADES as f64).ceil() as usize).clamp(1, SHADES) } else { 0 }
}

/// The path of all columns of one shade; neighbours are joined.
fn path(shares: &[f64], of: usize, columns: usize, y: f64) -> String {
    let width = (WIDTH - LEFT - RIGHT) / columns.max(1) as f64;
    let mut text = String::new();
    let mut at = 0;
    for part in shares.chunk_by(|one, next| shade(*one) == shade(*next)) {
        if part.first().is_some_and(|share| shade(*share) == of) {
            let (x, length) = (LEFT + width * at as f64, width * part.len() as f64);
            // Writing to a string cannot fail.
            let _infallible = write!(text, "M{x:.1} {y:.1}h{length:.1}v{STRIP}h-{length:.1}z");
        }
        at += part.len();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are escaped; neighbours of one shade are joined, and a small share is visible; strips without any activity are present but empty.
    #[test]
    fn rows() {
        let doing = |name, class| Doing { name, short: name, class };
        let strip = |shares: &[f64], sum: &str| (shares.to_vec(), sum.to_owned());
        let row = Row {
            name: "7 <b>\"'".to_owned(),
            strips: vec![strip(&[0.0, 1.0, 1.0, 1e-9], "<i>"), strip(&[0.0; 4], "0")],
        };
        let text =
            strips("<u>", Span { from: 0.0, to: 4.0 }, 4, &[doing("<p>", "cpu"), doing("GC", "gc")], &[row])
                .into_string();
        for raw in ["<b>", "<i>", "<u>", "<p>", "NaN"] {
            assert!(!text.contains(raw), "{raw}: {text}");
        }
        assert_eq!(
            (text.matches("<path").count(), text.matches("class=\"track\"").count()),
            (2, 2),
            "{text}"
        );
        let width = (WIDTH - LEFT - RIGHT) / 4.0;
        assert!(text.contains(&format!("M{:.1} 18.0h{:.1}v10h-", LEFT + width, 2.0 * width)), "{text}");
        assert!(text.contains("<li class=\"gc\">GC</li>") && text.contains("&lt;i&gt;"), "{text}");
        let none = strips("x", Span { from: 0.0, to: 0.0 }, 0, &[], &[]).into_string();
        assert!(!none.contains("NaN") && !none.contains("inf"), "{none}");
    }

    /// However much activity there is, a picture has few elements.
    #[test]
    fn bounded() {
        let shares: Vec<f64> = (0..200).map(|at| f64::from(at % 9) / 8.0).collect();
        let doings = [Doing { name: "x", short: "x", class: "cpu" }; 5];
        let row = Row { name: "x".to_owned(), strips: vec![(shares, "x".to_owned()); 5] };
        let text = strips("x", Span { from: 0.0, to: 1.0 }, 200, &doings, &vec![row; 16]).into_string();
        assert!(text.matches("<path").count() == 16 * 5 * SHADES && text.len() < 500_000, "{}", text.len());
    }
}
