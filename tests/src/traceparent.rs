//! The header `traceparent` of a test's requests, and what `tests/rubies/web/traces.ru` saw of it.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, Result};

/// A distinct name for each request. It has no digits, so that no template replaces it.
pub fn name(number: usize) -> String {
    let letter = |at: usize| char::from(b'g' + (at % 20) as u8);
    [number / 400, number / 20, number].into_iter().map(letter).collect()
}

/// A distinct valid value for each request.
pub fn value(number: usize) -> String {
    let flags = if number.is_multiple_of(3) { "00" } else { "01" };
    format!("00-{:032x}-{:016x}-{flags}", 0xa1b2_c3d4_0000_0000_0000_u128 << 24 | number as u128, number + 1)
}

/// The trace and the parent that the specification assigns to a header that an application sees; `None` for an invalid one.
pub fn specified(seen: &str) -> Option<(String, String)> {
    let parts: Vec<&str> = seen.split('-').collect();
    let [version, trace, parent, flags, rest @ ..] = &parts[..] else { return None };
    let hex = |text: &str, len: usize| {
        text.len() == len && text.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
    };
    let good = hex(version, 2) && hex(trace, 32) && hex(parent, 16) && hex(flags, 2);
    let not_zero = |text: &str| text.chars().any(|c| c != '0');
    let known = *version != "ff" && (*version != "00" || rest.is_empty());
    (good && known && not_zero(trace) && not_zero(parent))
        .then(|| ((*trace).to_owned(), (*parent).to_owned()))
}

/// What the application saw of the header, by name of the request.
pub fn truths(file: &Path) -> Result<HashMap<String, Option<String>>> {
    let text = std::fs::read_to_string(file)?;
    let of_line = |line: &str| {
        let (name, seen) = line.split_once(' ').context("a line")?;
        let seen = (seen != "nil").then(|| seen.trim_matches('"').to_owned());
        Ok((name.to_owned(), seen))
    };
    text.lines().map(of_line).collect()
}
