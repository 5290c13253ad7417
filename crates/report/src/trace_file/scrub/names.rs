//! Names of methods and functions. What shows that a block is meant is kept, and so is the division into class and method.

use super::{Kind, files, pseudonym::Pseudonyms};
use crate::model::stack::{Frame, FrameKind};

/// What Ruby prepends to the name of a method.
const WITHIN: [&str; 4] = ["block in ", "rescue in ", "ensure in ", "eval in "];
/// Names assigned by Ruby itself.
pub(super) const RUBYS_OWN: [&str; 5] = ["<main>", "<top (required)>", "<compiled>", "<cfunc>", "(unknown)"];

/// The name of a frame.
pub(super) fn of(frame: &Frame, with: &mut Pseudonyms) -> String {
    let name = &*frame.name;
    match frame.kind {
        FrameKind::Ruby | FrameKind::CFunction => ruby(name, with),
        FrameKind::Native if frame.file.as_deref().is_some_and(files::is_public) => name.to_owned(),
        FrameKind::Native => format!("function-{}", with.short(Kind::Names, name)),
        // These are the same everywhere: names of the kernel's functions and gctrace's own words.
        FrameKind::Kernel | FrameKind::Vm | FrameKind::Missing => name.to_owned(),
    }
}

fn ruby(name: &str, with: &mut Pseudonyms) -> String {
    let mut kept = String::new();
    let mut rest = name;
    while let Some(length) = prefix(rest) {
        kept.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    if RUBYS_OWN.contains(&rest) {
        return kept + rest;
    }
    for body in ["<class:", "<module:"] {
        if let Some(class) = rest.strip_prefix(body).and_then(|rest| rest.strip_suffix('>')) {
            return format!("{kept}{body}Class_{}>", with.short(Kind::Names, class));
        }
    }
    let Some(at) = rest.rfind(['#', '.']).filter(|at| *at > 0) else {
        return format!("{kept}method_{}", with.short(Kind::Names, rest));
    };
    let (class, method) = (&rest[..at], &rest[at + 1..]);
    let (class, method) = (with.short(Kind::Names, class), with.short(Kind::Names, method));
    format!("{kept}Class_{class}{}method_{method}", &rest[at..=at])
}

/// Length of what Ruby prepended to the name.
fn prefix(name: &str) -> Option<usize> {
    if let Some(within) = WITHIN.iter().find(|within| name.starts_with(**within)) {
        return Some(within.len());
    }
    // `block (2 levels) in `
    let (levels, _) = name.strip_prefix("block (")?.split_once(" levels) in ")?;
    let is_number = !levels.is_empty() && levels.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| "block (".len() + levels.len() + " levels) in ".len())
}
