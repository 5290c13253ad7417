//! Ruby images that are installed but may not be running yet. Probing them beforehand is what makes the very first
//! GC of a short script visible.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
};

use crate::elf::{RubyPresence, probe_ruby};

/// Where version managers and packages put `ruby`, beside `$PATH`.
const BIN_DIRS: [&str; 4] = ["/usr/bin", "/usr/local/bin", "/bin", "/opt/ruby/bin"];
/// Directories with one Ruby in each subdirectory (`*/bin/ruby`).
const MANY: [&str; 3] = ["/opt/rubies", "/opt/rbenv/versions", "/usr/local/rbenv/versions"];
/// Where the dynamic linker looks when the file says nothing.
const LIB_DIRS: [&str; 8] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
];

/// Paths of files that hold a Ruby interpreter, each once.
pub(super) fn images() -> BTreeSet<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    dirs.extend(BIN_DIRS.iter().map(PathBuf::from));
    for parent in MANY {
        let Ok(entries) = fs::read_dir(parent) else { continue };
        dirs.extend(entries.flatten().map(|entry| entry.path().join("bin")));
    }
    let mut found = BTreeSet::new();
    for dir in dirs {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries.flatten() {
            if is_ruby_name(&entry.file_name()) {
                found.extend(images_of(&entry.path()));
            }
        }
    }
    found
}

/// The files that hold the interpreter which this executable would run: itself, or the libraries it loads.
pub(super) fn images_of(executable: &Path) -> Vec<PathBuf> {
    let Ok(executable) = fs::canonicalize(executable) else { return Vec::new() };
    let Ok(file) = File::open(&executable) else { return Vec::new() };
    match probe_ruby(&file) {
        Ok(Some(RubyPresence::Defines)) => vec![executable],
        Ok(Some(RubyPresence::Needs { sonames, run_path })) => sonames
            .iter()
            .filter_map(|soname| find_library(soname, run_path.as_deref(), &executable))
            .collect(),
        Ok(Some(RubyPresence::GcLibrary) | None) => Vec::new(),
        Err(error) => {
            log::debug!("{}: {error}", executable.display());
            Vec::new()
        }
    }
}

/// Paths of the GC libraries of a Ruby built `--with-modular-gc`, in the file system below `root`. `directory`: as the
/// Ruby's file tells it.
pub(super) fn gc_libraries(root: &Path, directory: &str) -> BTreeSet<PathBuf> {
    let directory = root.join(directory.trim_start_matches('/'));
    let Ok(entries) = fs::read_dir(directory) else { return BTreeSet::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| names_gc_library(path)).collect()
}

/// Whether a path says by its name that the file is a GC library: `librubygc.default.so`.
pub(super) fn names_gc_library(path: &Path) -> bool {
    let name = path.file_stem().and_then(OsStr::to_str).and_then(|name| name.strip_prefix("librubygc."));
    name.is_some() && path.extension() == Some(OsStr::new("so"))
}

/// Whether a path says by its name that the file is a Ruby or a Ruby library.
pub(super) fn names_ruby(path: &Path) -> bool {
    path.file_name().is_some_and(|name| is_ruby_name(name) || name.as_encoded_bytes().starts_with(b"libruby"))
}

/// `ruby`, `ruby3.1`, `ruby2.7` …, not `ruby-lsp`.
fn is_ruby_name(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|name| name.strip_prefix("ruby"))
        .is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

fn find_library(soname: &str, run_path: Option<&str>, executable: &Path) -> Option<PathBuf> {
    let origin = executable.parent()?.to_string_lossy();
    let own = run_path.unwrap_or_default().split(':').filter(|dir| !dir.is_empty());
    let own = own.map(|dir| dir.replace("$ORIGIN", &origin).replace("${ORIGIN}", &origin));
    own.map(PathBuf::from)
        .chain(LIB_DIRS.iter().map(PathBuf::from))
        .find_map(|dir| fs::canonicalize(dir.join(soname)).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::libruby;

    /// Version suffixes belong to Ruby, other programs' names do not.
    #[test]
    fn names() {
        for (name, expected) in [("ruby", true), ("ruby3.1", true), ("ruby-lsp", false), ("rubygems", false)]
        {
            assert_eq!(is_ruby_name(OsStr::new(name)), expected, "{name}");
        }
        for (name, expected) in
            [("librubygc.default.so", true), ("librubygc.so", false), ("libruby.so.3.4", false)]
        {
            assert_eq!(names_gc_library(&Path::new("/opt/gc").join(name)), expected, "{name}");
        }
        // The file itself has the patch release at the end of its name.
        assert!(names_ruby(libruby()) && names_ruby(Path::new("/opt/lib/libruby-3.1.so.3.1")));
        assert!(!names_ruby(Path::new("/lib/libc.so")));
    }

    /// Debian's ruby is found through its shared library.
    #[test]
    fn debian() {
        let images = images_of(Path::new("/usr/bin/ruby3.1"));
        assert!(images.iter().any(|p| p.to_string_lossy().contains("libruby-3.1.so")), "{images:?}");
    }
}
