//! Parts of pages about garbage collection: a frame, tables, and charts as SVG ([`chart`], [`timeline`], [`strips`]).
//!
//! These know neither a server nor a store: the caller has the figures. Everything is rendered here, so pages work without
//! scripts and under the strictest policy ([`POLICY`]); all that comes from outside is text, escaped by maud at compile-checked places.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use maud::{DOCTYPE, Markup, html};

pub mod chart;
pub mod strips;
pub mod timeline;
pub mod words;

/// The style sheet of all pages.
pub const STYLE: &str = include_str!("style.css");
/// Where pages expect [`STYLE`].
pub const STYLE_PATH: &str = "/style.css";
/// The `Content-Security-Policy` that pages work under: only the style sheet, and forms to their own origin.
pub const POLICY: &str =
    "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// A link: target and text.
pub type Link<'a> = (String, &'a str);

/// What a page needs besides its content.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Where [`STYLE`] is.
    pub style: &'a str,
    /// Where its scripts are; the page works without them.
    pub scripts: &'a [&'a str],
    /// Whether it loads itself again after a second.
    pub again: bool,
    /// Whether it loads itself again after some seconds where scripts do not run.
    pub again_without_scripts: bool,
    /// Where a form is sent that signs its visitor out; it has no fields.
    pub sign_out: Option<&'a str>,
}

impl Default for Head<'_> {
    fn default() -> Self {
        Self { style: STYLE_PATH, scripts: &[], again: false, again_without_scripts: false, sign_out: None }
    }
}

/// A whole page. `above`: links to the pages above it, the topmost first.
pub fn page(title: &str, above: &[Link<'_>], content: &Markup) -> String {
    page_with(Head::default(), title, above, content)
}

/// A whole page with a style sheet at another place, or with scripts.
pub fn page_with(head: Head<'_>, title: &str, above: &[Link<'_>], content: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                @if head.again { meta http-equiv="refresh" content="1"; }
                @if head.again_without_scripts { noscript { meta http-equiv="refresh" content="5"; } }
                title { (title) " · gctrace" }
                link rel="stylesheet" href=(head.style);
                @for script in head.scripts { script src=(script) defer {} }
            }
            body {
                @if !above.is_empty() || head.sign_out.is_some() {
                    nav aria-label=(if above.is_empty() { "Account" } else { "Pages above" }) {
                        @for (to, says) in above { a href=(to) { (says) } }
                        @if let Some(to) = head.sign_out {
                            form method="post" action=(to) { button { "Sign out" } }
                        }
                    }
                }
                main { h1 { (title) } (content) }
            }
        }
    }
    .into_string()
}

/// A column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Names, to the left.
    Text(&'static str),
    /// Figures, to the right.
    Number(&'static str),
}

impl Column {
    fn name(self) -> &'static str {
        match self {
            Self::Text(name) | Self::Number(name) => name,
        }
    }
}

/// A table that scrolls by itself where it is too wide. `rows`: as many cells as there are columns.
pub fn table(caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    table_of("", caption, columns, rows)
}

/// A table of long texts, whose rows become paragraphs where it would be too wide: from the fourth column on, each cell has a line to
/// itself.
pub fn stacked_table(caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    table_of("stacked", caption, columns, rows)
}

fn table_of(class: &str, caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    let stacked = !class.is_empty();
    // Cells that are no longer laid out as a table are still one for those who have it read to them.
    let role = |role: &'static str| stacked.then_some(role);
    html! {
        div.wide tabindex="0" role="region" aria-label=(caption) {
            table class=[stacked.then_some(class)] role=[role("table")] {
                caption { (caption) }
                thead role=[role("rowgroup")] { tr role=[role("row")] {
                    @for column in columns {
                        @match column {
                            Column::Text(name) => th scope="col" role=[role("columnheader")] { (name) },
                            Column::Number(name) => th.n scope="col" role=[role("columnheader")] { (name) },
                        }
                    }
                } }
                tbody role=[role("rowgroup")] {
                    @for row in rows { tr role=[role("row")] {
                        @for (column, cell) in columns.iter().zip(row) {
                            @let of = stacked.then_some(column.name());
                            @match column {
                                Column::Text(_) => td.name role=[role("cell")] data-of=[of] { (cell) },
                                Column::Number(_) => td.n role=[role("cell")] data-of=[of] { (cell) },
                            }
                        }
                    } }
                }
            }
        }
    }
}

/// Figures that are read at a glance, each with its name.
pub fn facts(facts: &[(&str, Markup)]) -> Markup {
    html! {
        dl.facts {
            @for (name, value) in facts { div { dt { (name) } dd { (value) } } }
        }
    }
}

/// Lines to be copied.
pub fn lines(text: &str) -> Markup {
    html! { pre tabindex="0" { (text) } }
}

/// Lines to be copied, with names of variables as [`settings`] has them.
pub fn setting_lines(text: &str) -> Markup {
    html! { pre tabindex="0" { @for line in text.lines() { (settings(line)) "\n" } } }
}

/// Text with names of variables, which are long: a line ends within one only where that is longer than a line, and then behind a
/// `_` or `=`.
pub fn settings(text: &str) -> Markup {
    html! {
        @for (at, word) in text.split(' ').enumerate() {
            @if at > 0 { " " }
            @if word.contains(['_', '=']) {
                span.whole { @for part in word.split_inclusive(['_', '=']) { (part) wbr; } }
            } @else { (word) }
        }
    }
}

/// A value of a query, with everything but letters, digits and `-._~` percent-encoded (RFC 3986, 2.3).
pub fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut all, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            all.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _infallible = write!(all, "%{byte:02X}");
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names from outside are text wherever they are put.
    #[test]
    fn hostile() {
        let name = "</title><script>alert(1)</script>\"'onload=x &amp; \u{202e}";
        let rows = [vec![html! { (name) }, html! { (7) }]];
        let content = html! { (table(name, &[Column::Text("a"), Column::Number("b")], &rows)) (lines(name)) };
        let text = page(name, &[(format!("/app?x={}", encoded(name)), name)], &content);
        assert!(
            !text.contains("<script") && !text.contains("\"'onload") && text.contains("&lt;script&gt;"),
            "{text}"
        );
        assert_eq!(encoded("a b/ü&\""), "a%20b%2F%C3%BC%26%22");
    }
}
