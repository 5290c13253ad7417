//! Parts of pages about garbage collection: a frame, tables, and charts as SVG ([`chart`], [`timeline`], [`strips`]).
//!
//! These depend on neither a server nor a store: the caller provides the figures. Everything is rendered here, so pages work without
//! scripts and under the strictest policy ([`POLICY`]); everything from outside is text, which maud escapes at compile-checked places.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use maud::{DOCTYPE, Markup, html};

pub mod chart;
pub mod strips;
pub mod timeline;
pub mod words;

/// The style sheet of all pages.
pub const STYLE: &str = include_str!("style.css");
/// The path at which pages expect [`STYLE`].
pub const STYLE_PATH: &str = "/style.css";
/// The `Content-Security-Policy` under which pages work: it permits only the style sheet, and forms to their own origin.
pub const POLICY: &str =
    "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// A link: target and text.
pub type Link<'a> = (String, &'a str);

/// The properties of a page besides its content.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Address of [`STYLE`].
    pub style: &'a str,
    /// Addresses of its scripts; the page works without them.
    pub scripts: &'a [&'a str],
    /// Whether it reloads itself after a second.
    pub again: bool,
    /// Whether it reloads itself after some seconds if scripts do not run.
    pub again_without_scripts: bool,
    /// Target of the form that signs the visitor out; it has no fields.
    pub sign_out: Option<&'a str>,
}

impl Default for Head<'_> {
    fn default() -> Self {
        Self { style: STYLE_PATH, scripts: &[], again: false, again_without_scripts: false, sign_out: None }
    }
}

/// A whole page. `above` are links to the pages above it, topmost first.
pub fn page(title: &str, above: &[Link<'_>], content: &Markup) -> String {
    page_with(Head::default(), title, above, content)
}

/// A whole page with a style sheet at another address, or with scripts.
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
    /// Names, left-aligned.
    Text(&'static str),
    /// Figures, right-aligned.
    Number(&'static str),
}

impl Column {
    fn name(self) -> &'static str {
        match self {
            Self::Text(name) | Self::Number(name) => name,
        }
    }
}

/// A table that scrolls by itself if it is too wide. Each of `rows` has as many cells as there are columns.
pub fn table(caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    table_of("", caption, columns, rows)
}

/// A table of long texts, whose rows become paragraphs if it would be too wide: from the fourth column on, each cell has its own
/// line.
pub fn stacked_table(caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    table_of("stacked", caption, columns, rows)
}

fn table_of(class: &str, caption: &str, columns: &[Column], rows: &[Vec<Markup>]) -> Markup {
    let stacked = !class.is_empty();
    // The roles keep cells that are no longer laid out as a table a table for screen readers.
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

/// Figures to read at a glance, each with its name.
pub fn facts(facts: &[(&str, Markup)]) -> Markup {
    html! {
        dl.facts {
            @for (name, value) in facts { div { dt { (name) } dd { (value) } } }
        }
    }
}

/// Lines to copy.
pub fn lines(text: &str) -> Markup {
    html! { pre tabindex="0" { (text) } }
}

/// Lines to copy, with names of variables formatted as by [`settings`].
pub fn setting_lines(text: &str) -> Markup {
    html! { pre tabindex="0" { @for line in text.lines() { (settings(line)) "\n" } } }
}

/// Text with names of variables, which are long: a line breaks within a name only if the name is longer than a line, and then after a
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

/// Percent-encodes a value of a query: everything but letters, digits and `-._~` (RFC 3986, 2.3).
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

    /// Names from outside are escaped wherever they are put.
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
