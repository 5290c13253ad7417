//! Ruby images that are installed but may not be running yet. Probing them beforehand makes the very first GC of a short
//! script visible.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use super::places;
use crate::{
    elf::{RubyPresence, probe_ruby},
    host::root_file,
};

/// Default search folders of the dynamic linker.
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

/// Maximum time of the search: a home may be on a file server that does not respond.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of images to find.
const IMAGES: usize = 64;

/// Paths of files that contain a Ruby interpreter, without duplicates, the most likely ones first. With `layers`, including those in
/// containers' roots.
pub(super) fn images(layers: bool) -> Vec<PathBuf> {
    let (sender, receiver) = mpsc::channel();
    let look = move || {
        let bins = places::bin_dirs().into_iter().flat_map(|dir| executables(&dir, is_ruby_name));
        let images = bins.flat_map(|path| images_of(&path));
        let inside = layers.then(places::layer_files).into_iter().flatten().filter(|path| holds_ruby(path));
        for path in images.chain(inside) {
            // The search has ended; its results are no longer needed.
            if sender.send(path).is_err() {
                return;
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("gctrace-places".to_owned()).spawn(look) {
        log::warn!("looking for installed Rubies: {error}");
    }
    let deadline = Instant::now() + PATIENCE;
    let mut found: Vec<PathBuf> = Vec::new();
    while found.len() < IMAGES {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(path) if found.contains(&path) => {}
            Ok(path) => found.push(path),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                log::info!("looking for installed Rubies takes too long; others are found when they run");
                break;
            }
        }
    }
    found
}

/// The images of Rubies in known places that have a program of this name beside them: a shim starts one of these.
pub(super) fn images_named(name: &str, libraries: &OsStr) -> BTreeSet<PathBuf> {
    let dirs = places::bin_dirs().into_iter().filter(|dir| dir.join(name).is_file());
    let rubies = dirs.map(|dir| dir.join("ruby")).take(IMAGES);
    rubies.flat_map(|ruby| images_of_with(&ruby, libraries)).collect()
}

/// The files of a folder whose names are wanted.
fn executables(dir: &Path, wanted: impl Fn(&OsStr) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|entry| wanted(&entry.file_name())).map(|entry| entry.path()).collect()
}

fn holds_ruby(path: &Path) -> bool {
    root_file::open(path).is_ok_and(|file| matches!(probe_ruby(&file), Ok(Some(RubyPresence::Defines))))
}

/// The files with the interpreter that this executable would run: itself, or the libraries it loads.
pub(super) fn images_of(executable: &Path) -> Vec<PathBuf> {
    images_of_with(executable, OsStr::new(""))
}

/// Like [`images_of`], with this `LD_LIBRARY_PATH`.
pub(super) fn images_of_with(executable: &Path, libraries: &OsStr) -> Vec<PathBuf> {
    let Ok(executable) = fs::canonicalize(executable) else { return Vec::new() };
    let Ok(file) = root_file::open(&executable) else { return Vec::new() };
    match probe_ruby(&file) {
        Ok(Some(RubyPresence::Defines)) => vec![executable],
        Ok(Some(RubyPresence::Needs { sonames, run_path })) => {
            let of = |soname: &String| find_library(soname, run_path.as_deref(), libraries, &executable);
            sonames.iter().flat_map(of).collect()
        }
        Ok(Some(RubyPresence::GcLibrary) | None) => Vec::new(),
        Err(error) => {
            log::debug!("{}: {error}", executable.display());
            Vec::new()
        }
    }
}

/// Paths of the GC libraries of a Ruby built `--with-modular-gc`, in the file system below `root`. `directory`: as stored in the
/// Ruby's file.
pub(super) fn gc_libraries(root: &Path, directory: &str) -> BTreeSet<PathBuf> {
    let directory = root.join(directory.trim_start_matches('/'));
    let Ok(entries) = fs::read_dir(directory) else { return BTreeSet::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| names_gc_library(path)).collect()
}

/// Whether a file name is that of a GC library: `librubygc.default.so`.
pub(super) fn names_gc_library(path: &Path) -> bool {
    let name = path.file_stem().and_then(OsStr::to_str).and_then(|name| name.strip_prefix("librubygc."));
    name.is_some() && path.extension() == Some(OsStr::new("so"))
}

/// Whether a file name is that of a Ruby or a Ruby library.
pub(super) fn names_ruby(path: &Path) -> bool {
    path.file_name().is_some_and(|name| is_ruby_name(name) || name.as_encoded_bytes().starts_with(b"libruby"))
}

/// `ruby`, `ruby3.1`, `ruby2.7` …, not `ruby-lsp`.
fn is_ruby_name(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|name| name.strip_prefix("ruby"))
        .is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// The possible locations of a library. Whether the file's own path or `LD_LIBRARY_PATH` takes precedence depends on the tag of
/// the former, so both are returned.
fn find_library(
    soname: &str,
    run_path: Option<&str>,
    libraries: &OsStr,
    executable: &Path,
) -> BTreeSet<PathBuf> {
    let origin = executable.parent().unwrap_or(Path::new("/")).to_string_lossy();
    let in_dir = |dir: PathBuf| fs::canonicalize(dir.join(soname)).ok().filter(|path| path.is_file());
    let own = run_path.unwrap_or_default().split(':').filter(|dir| !dir.is_empty());
    let own = own.map(|dir| dir.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin));
    let own = own.map(PathBuf::from).find_map(in_dir);
    let given = std::env::split_paths(libraries).find_map(in_dir);
    // A Ruby that was moved is started by a shim that sets the variable to this folder.
    let beside = executable.parent().and_then(Path::parent).and_then(|root| in_dir(root.join("lib")));
    if own.is_some() || given.is_some() || beside.is_some() {
        return [own, given, beside].into_iter().flatten().collect();
    }
    LIB_DIRS.iter().map(PathBuf::from).chain(configured()).find_map(in_dir).into_iter().collect()
}

/// The message for an executable that loads these libraries, if [`images_of`] finds none of them.
pub(super) fn not_found(sonames: &[String]) -> String {
    format!(
        "it loads {}, which was not found beside it or where this host's dynamic linker looks ({}, …): name the file of that library, \
         which may be in the root of a container",
        sonames.join(", "),
        LIB_DIRS[..2].join(", ")
    )
}

/// Folders that the administrator has configured for the dynamic linker.
fn configured() -> Vec<PathBuf> {
    let files = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten();
    let files = files.map(|entry| entry.path()).filter(|path| path.extension() == Some(OsStr::new("conf")));
    let texts = files.filter_map(|path| fs::read_to_string(path).ok());
    texts
        .flat_map(|text| text.lines().map(|line| PathBuf::from(line.trim())).collect::<Vec<_>>())
        .filter(|dir| dir.is_absolute())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::libruby;

    /// Names with a version suffix are Ruby; those of other programs are not.
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
