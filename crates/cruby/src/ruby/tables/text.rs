//! The committed form of layouts: one line per fact.
//!
//! ```text
//! struct <tag> <first release> <last release> <sizeof>
//! source <release and build it was read from>
//! field <path> <offset> <bytes>
//! bits <path> <offset of the storage unit> <its bytes> <first bit> <bits>
//! array <path> <offset> <stride> <elements>
//! element <path inside the element> <offset inside the element> <bytes>     (of the array above)
//! ```

use std::fmt::Write as _;
use std::str::{FromStr, SplitAsciiWhitespace};

use super::{Array, BitField, Field, Release, Struct};

/// The layout of one structure over a range of releases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// First release.
    pub from: Release,
    /// Last release.
    pub to: Release,
    /// Where it was read from.
    pub source: String,
    /// The layout.
    pub layout: Struct,
}

/// Reads layouts; an error names the line.
pub(super) fn parse(text: &'static str) -> Result<Vec<Variant>, String> {
    let mut variants = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if !line.is_empty() && !line.starts_with('#') {
            parse_line(line, &mut variants).ok_or_else(|| format!("line {}: {line}", index + 1))?;
        }
    }
    Ok(variants)
}

fn parse_line(line: &'static str, variants: &mut Vec<Variant>) -> Option<()> {
    let mut words = line.split_ascii_whitespace();
    let kind = words.next()?;
    if kind == "struct" {
        let name = words.next()?;
        let (from, to) = (release(words.next()?)?, release(words.next()?)?);
        let same_series = (from.0, from.1) == (to.0, to.1) && from <= to;
        let layout = Struct {
            name,
            size: number(&mut words)?,
            fields: Vec::new(),
            bits: Vec::new(),
            arrays: Vec::new(),
        };
        variants.push(Variant { from, to, source: String::new(), layout });
        return (same_series && words.next().is_none()).then_some(());
    }
    let variant = variants.last_mut()?;
    if kind == "source" {
        line.split_once(' ')?.1.clone_into(&mut variant.source);
        return Some(());
    }
    let layout = &mut variant.layout;
    let name = words.next()?;
    let words = &mut words;
    match kind {
        "field" => layout.fields.push(Field { name, offset: number(words)?, size: number(words)? }),
        "bits" => layout.bits.push(BitField {
            name,
            offset: number(words)?,
            size: number(words)?,
            first: number(words)?,
            bits: number(words)?,
        }),
        "array" => layout.arrays.push(Array {
            name,
            offset: number(words)?,
            stride: number(words)?,
            count: number(words)?,
            fields: Vec::new(),
        }),
        "element" => {
            let field = Field { name, offset: number(words)?, size: number(words)? };
            layout.arrays.last_mut()?.fields.push(field);
        }
        _ => return None,
    }
    words.next().is_none().then_some(())
}

fn number<T: FromStr>(words: &mut SplitAsciiWhitespace<'_>) -> Option<T> {
    words.next()?.parse().ok()
}

fn release(text: &str) -> Option<Release> {
    let mut parts = text.split('.').map(|part| part.parse().ok());
    let release = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then_some(release)
}

/// Writes layouts in their committed form.
pub fn print(variants: &[Variant]) -> String {
    let mut text = String::from(
        "# Layouts of CRuby's structures (x86-64). Written by `cargo xtask layouts`; do not edit.\n\
         # Which releases share a layout is stated in crates/cruby/examples/layouts.rs.\n",
    );
    let show = |r: Release| format!("{}.{}.{}", r.0, r.1, r.2);
    for Variant { from, to, source, layout } in variants {
        let (from, to) = (show(*from), show(*to));
        // Writing to a string does not fail.
        let _ = writeln!(text, "\nstruct {} {from} {to} {}\nsource {source}", layout.name, layout.size);
        for line in lines(layout) {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

fn lines(layout: &Struct) -> Vec<String> {
    let field = |kind: &str, f: &Field| format!("{kind} {} {} {}", f.name, f.offset, f.size);
    let mut lines: Vec<String> = layout.fields.iter().map(|f| field("field", f)).collect();
    lines.extend(layout.bits.iter().map(|b| {
        let BitField { name, offset, size, first, bits } = b;
        format!("bits {name} {offset} {size} {first} {bits}")
    }));
    for array in &layout.arrays {
        let Array { name, offset, stride, count, fields } = array;
        lines.push(format!("array {name} {offset} {stride} {count}"));
        lines.extend(fields.iter().map(|f| field("element", f)));
    }
    lines
}

/// A member's path and its place as text.
type Member = (&'static str, String);

/// The members of two layouts, paired by path.
pub(super) fn members(one: &Struct, two: &Struct) -> Vec<(Option<Member>, Option<Member>)> {
    let (one, two) = (places(one), places(two));
    let mut pairs: Vec<_> = one
        .iter()
        .map(|mine| {
            let theirs = two.iter().find(|theirs| theirs.0 == mine.0);
            (Some(mine.clone()), theirs.cloned())
        })
        .collect();
    let missing = two.iter().filter(|theirs| one.iter().all(|mine| mine.0 != theirs.0));
    pairs.extend(missing.map(|theirs| (None, Some(theirs.clone()))));
    pairs
}

fn places(layout: &Struct) -> Vec<Member> {
    let field = |f: &Field| (f.name, format!("{} bytes at {}", f.size, f.offset));
    let mut places: Vec<Member> = layout.fields.iter().map(field).collect();
    places.extend(layout.bits.iter().map(|b| {
        let BitField { name, offset, size, first, bits } = *b;
        (name, format!("{bits} bits at bit {first} of the {size} bytes at {offset}"))
    }));
    for a in &layout.arrays {
        let elements = a.fields.iter().map(|f| format!("{} {}+{}", f.name, f.offset, f.size));
        let elements = elements.collect::<Vec<_>>().join(", ");
        places.push((a.name, format!("{} times {} bytes at {} ({elements})", a.count, a.stride, a.offset)));
    }
    places
}
