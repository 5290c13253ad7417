//! Makes text from outside safe to show.
//!
//! The users of the traced program choose the names of methods, files, threads, hosts and environment variables. Printed
//! unchanged, they could move the cursor, hide what follows, reverse the order of characters, or forge further lines.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
    path::Path,
};

/// Whether a character is invisible, or changes how the text around it is shown: controls (C0, C1, DEL), line and paragraph
/// separators, bidirectional controls, zero-width characters, tags and noncharacters.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{fdd0}'..='\u{fdef}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}'
            | '\u{e0000}'..='\u{e0fff}')
}

/// Whether the text certainly has nothing to escape, checked without decoding it.
fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, 0x20..=0x7e))
}

/// One line of visible characters: a hidden character becomes `\u{1b}`, with its code point in hexadecimal.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden)
}

/// [`printable`] for our own text of several lines: newlines stay.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && is_hidden(c))
}

/// A path on one line, escaped like [`printable`].
pub fn printable_path(path: &Path) -> String {
    printable(&path.to_string_lossy()).into_owned()
}

/// The first `most` characters of a text, escaped like [`printable`]; a truncated text ends in `…`.
pub fn printable_part(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", printable(text.get(..end).unwrap_or(text))),
        None => printable(text).into_owned(),
    }
}

fn escaped(text: &str, hidden: impl Fn(char) -> bool) -> Cow<'_, str> {
    if is_plain(text) || !text.chars().any(&hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if hidden(c) { out.extend(c.escape_unicode()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// JSON in which the hidden characters of strings are written as `\u001b`: the same data, safe to display. (JSON itself
/// requires that only for C0 controls, and outside of strings no other hidden character can occur.)
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let hidden = |c: char| !matches!(c, '\n' | '\r' | '\t') && is_hidden(c);
    if is_plain(json) || !json.chars().any(hidden) {
        return Cow::Borrowed(json);
    }
    let mut out = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if !hidden(c) {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _infallible = write!(out, "\\u{unit:04x}");
        }
    }
    Cow::Owned(out)
}

/// Shows a value on one line of visible characters.
#[derive(Clone, Copy, Debug)]
pub struct Printable<T>(pub T);

impl<T: fmt::Display> fmt::Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.0.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that could move, hide or reorder text is escaped; all other text is left alone.
    #[test]
    fn escapes() {
        for (text, shown) in [
            ("plain", "plain"),
            ("été 日本 🙂", "été 日本 🙂"),
            ("a\x1b[2J\nb\r\t\0", "a\\u{1b}[2J\\u{a}b\\u{d}\\u{9}\\u{0}"),
            ("\u{9b}8m\u{7f}", "\\u{9b}8m\\u{7f}"),
            ("a\u{202e}b\u{2066}c\u{2069}\u{200f}", "a\\u{202e}b\\u{2066}c\\u{2069}\\u{200f}"),
            ("\u{2028}\u{feff}\u{fffe}\u{e0041}", "\\u{2028}\\u{feff}\\u{fffe}\\u{e0041}"),
        ] {
            assert_eq!(printable(text), shown);
            assert_eq!(printable(&printable(text)), shown, "once is enough");
            assert_eq!(Printable(text).to_string(), shown);
        }
        assert_eq!(printable_lines("a\nb\x1b"), "a\nb\\u{1b}");
        assert_eq!(printable_part("abc\x1b", 3), "abc…");
        assert_eq!(printable_part("abc\x1b", 4), "abc\\u{1b}");
    }

    /// Escaped JSON has the same meaning.
    #[test]
    fn json() {
        let value = serde_json::json!({ "a\u{202e}": ["\x1b\n\u{9b}", "\u{e0041}\u{7f}\"\\", "é"] });
        for text in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
            let safe = printable_json(&text);
            assert!(!safe.chars().any(|c| c != '\n' && is_hidden(c)), "{safe}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
        }
    }
}
