//! The lines below the title, and the layout of the title and of the texts beside it on narrow screens. The drawing
//! library has a single line, which is cut off at both ends if it is wider than the window.

use std::fmt::Write as _;

/// Maximum number of characters of a line. The font size is 12 pixels, and 9 on narrow screens; a character is 0.6
/// times as wide: 62 fit 400 pixels.
const WIDTH: usize = 62;
/// Height of a line, pixels.
const LINE: usize = 14;
/// Baseline of the first line, pixels from the top.
const FIRST: usize = 48;
/// Height of the row for the texts beside the title on narrow screens.
const WORDS: usize = 18;
/// Baseline of these texts on wide screens, pixels from the top.
const TITLE: usize = 24;
/// Width of the title on a narrow screen, pixels.
const NARROW: f64 = 380.0;

/// A graph with all its title lines.
pub(super) struct Titled {
    /// The graph.
    pub(super) svg: String,
    /// By how many pixels everything below the first line moves down.
    pub(super) lower: usize,
    /// Rules for narrow screens.
    pub(super) rules: String,
}

/// The text in lines, broken between words; a word longer than a line is cut.
pub(super) fn lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut length = WIDTH;
    for word in text.split(' ') {
        let word: Vec<char> = word.chars().collect();
        for (at, part) in word.chunks(WIDTH).enumerate() {
            if let Some(line) = lines.last_mut().filter(|_| at == 0 && length + 1 + part.len() <= WIDTH) {
                line.push(' ');
                line.extend(part);
                length += 1 + part.len();
            } else {
                lines.push(part.iter().collect());
                length = part.len();
            }
        }
    }
    lines
}

/// Adds all lines to the graph, which already has the first one. An unexpected SVG is returned unchanged.
pub(super) fn added(svg: &str, title: &str, lines: &[String]) -> Titled {
    let lower = lines.len().saturating_sub(1) * LINE + WORDS;
    // The font size decreases with the length of the title; it is never larger than that of rows.
    let size = (NARROW / 0.6 / title.chars().count().max(1) as f64).min(12.0);
    // A row is the space between two lines; the baseline of its text is four pixels above the lower one.
    let words = FIRST + lower - 4 - TITLE;
    let rules = format!(
        "  #title {{ font-size: {size:.1}px }}\n  #search, #unzoom {{ transform: translateY({words}px) }}\n"
    );
    match with_lines(svg, lines) {
        Some(svg) => Titled { svg, lower, rules },
        None => Titled { svg: svg.to_owned(), lower: 0, rules: String::new() },
    }
}

fn with_lines(svg: &str, lines: &[String]) -> Option<String> {
    let begin = svg.find("<text id=\"subtitle\"")?;
    let text = svg.get(begin..)?.find('>')? + begin + 1;
    let end = svg.get(text..)?.find("</text>")? + text;
    let mut out = svg.get(..text)?.to_owned();
    // The existing text is the first line, escaped.
    out.push_str(svg.get(text..end)?);
    // The spaces separate the lines when the text is copied.
    for line in lines.get(1..)? {
        let line = line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let _infallible = write!(out, " <tspan x=\"50%\" dy=\"{LINE}\">{line}</tspan>");
    }
    out.push_str(svg.get(end..)?);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All words are present, in lines that fit.
    #[test]
    fn broken_lines() {
        let words = "12.0 s of recording · dropped by --focus Größe: 0.10 s of 3.00 s of samples ".repeat(3);
        let long = format!("{words}{}", "x".repeat(150));
        let broken = lines(&long);
        assert!(broken.iter().all(|line| (1..=WIDTH).contains(&line.chars().count())), "{broken:?}");
        assert_eq!(broken.concat().replace(' ', ""), long.replace(' ', ""));
        assert_eq!(lines("one line"), ["one line"]);
    }

    /// Names are text in each line; other images are left unchanged.
    #[test]
    fn texts() {
        let svg = "<svg><text id=\"subtitle\" x=\"50.0000%\" y=\"48.00\">one</text><text id=\"details\"> </text></svg>";
        let titled = added(svg, "CPU time", &["one".to_owned(), "<two>&".to_owned()]);
        assert_eq!(
            titled.svg,
            "<svg><text id=\"subtitle\" x=\"50.0000%\" y=\"48.00\">one <tspan x=\"50%\" dy=\"14\">&lt;two&gt;&amp;</tspan></text>\
             <text id=\"details\"> </text></svg>"
        );
        assert_eq!(titled.lower, LINE + WORDS);
        let other = added("<svg/>", "CPU time", &["one".to_owned()]);
        assert_eq!((other.svg.as_str(), other.lower), ("<svg/>", 0));
    }
}
