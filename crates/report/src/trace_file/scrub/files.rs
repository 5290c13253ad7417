//! Paths of files. The scrubbed path still shows whose code it is ([`Source`]).

use super::{Kind, pseudonym::Pseudonyms};
use crate::model::source::Source;

/// Prefixes of common libraries and executables: their names, and those of the functions in them, identify nobody.
const PUBLIC: [&str; 9] =
    ["libruby", "libc.", "libc-", "libm.", "libm-", "libpthread", "ld-linux", "libjemalloc", "ruby"];
/// Maximum length of a path on Linux.
const LONGEST: usize = 4096;
/// Maximum length of the name of a file of the VM.
const INTERNAL: usize = 64;

/// Whether a library or executable is a common one.
pub(super) fn is_public(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let tail =
        |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit() || b".-so_xgnuacrh".contains(&byte));
    PUBLIC.iter().any(|public| name.strip_prefix(public).is_some_and(tail))
}

/// The path of a Ruby file with a pseudonym for its directories, and if `names` are replaced, also for its name.
pub(super) fn ruby(path: &str, names: bool, with: &mut Pseudonyms) -> String {
    if path.len() > LONGEST {
        return renamed(path, with);
    }
    match Source::of(path) {
        Source::Internal if is_internal(path) => path.to_owned(),
        Source::Gem(gem) => {
            let gem_folder = format!("/gems/{gem}/");
            let Some(at) = path.rfind(&gem_folder) else { return renamed(path, with) };
            let (before, rest) = (&path[..at], &path[at + gem_folder.len()..]);
            let (before, bundled) = match before.strip_suffix("/bundler") {
                Some(before) => (before, "/bundler"),
                None => (before, ""),
            };
            let folder = folder(before, with);
            if !names {
                return format!("{folder}{bundled}{gem_folder}{rest}");
            }
            let gem = with.short(Kind::Files, gem);
            format!("{folder}/gems/gem-{gem}-0/{}", renamed(rest, with))
        }
        Source::Library => {
            let at = library(path).unwrap_or(0);
            let folder = folder(&path[..at], with);
            if !names {
                return format!("{folder}{}", &path[at..]);
            }
            let kept: Vec<&str> = path[at..].splitn(4, '/').take(3).collect();
            let rest = path[at..].splitn(4, '/').nth(3).unwrap_or_default();
            format!("{folder}{}/{}", kept.join("/"), renamed(rest, with))
        }
        Source::App | Source::Internal if names => renamed(path, with),
        Source::App | Source::Internal => shortened(path, with),
    }
}

/// The path of a library or executable.
pub(super) fn native(path: &str, names: bool, with: &mut Pseudonyms) -> String {
    // `[vdso]`, `[kernel]` and the like are not files.
    if path.starts_with('[') && !path.contains('/') && path.len() < INTERNAL {
        return path.to_owned();
    }
    if names && !is_public(path) {
        format!("file-{}", with.short(Kind::Files, path))
    } else {
        shortened(path, with)
    }
}

/// Whether this is `<internal:gc>` or the like, and not another text that starts the same way.
fn is_internal(path: &str) -> bool {
    let name = path.strip_prefix("<internal:").and_then(|name| name.strip_suffix('>'));
    name.is_some_and(|name| {
        name.len() < INTERNAL && name.bytes().all(|byte| byte.is_ascii_lowercase() || b"_/-".contains(&byte))
    })
}

/// The last component of a path, in a directory with a pseudonym.
fn shortened(path: &str, with: &mut Pseudonyms) -> String {
    match path.rsplit_once('/') {
        None => path.to_owned(),
        Some((before, name)) => format!("{}/{name}", folder(before, with)),
    }
}

/// A pseudonym for a directory; empty for the root.
fn folder(path: &str, with: &mut Pseudonyms) -> String {
    if path.is_empty() { String::new() } else { format!("/dir-{}", with.short(Kind::Files, path)) }
}

/// A pseudonym for a whole path.
fn renamed(path: &str, with: &mut Pseudonyms) -> String {
    let pseudonym = with.short(Kind::Files, path);
    if path.strip_suffix(".rb").is_some() {
        format!("file-{pseudonym}.rb")
    } else {
        format!("file-{pseudonym}")
    }
}

/// Start of the part of a path that shows that it belongs to a library: `/ruby/3.1.0/set.rb`.
fn library(path: &str) -> Option<usize> {
    // The shortest suffix of the path that still belongs to a library.
    path.rmatch_indices('/').map(|(at, _)| at).find(|at| Source::of(&path[*at..]) == Source::Library)
}
