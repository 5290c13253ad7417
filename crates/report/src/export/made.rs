//! Files that outputs created before tracing began. They are empty: a run that ends before tracing begins removes them.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The files created by this process.
static MADE: Made = Made(Mutex::new(Vec::new()));

/// Path, device and inode of each file.
#[derive(Debug, Default)]
struct Made(Mutex<Vec<(PathBuf, u64, u64)>>);

/// While this guard is held, no file is created, and none is forgotten.
#[derive(Debug)]
pub struct Making(MutexGuard<'static, Vec<(PathBuf, u64, u64)>>);

impl Made {
    fn lock(&self) -> MutexGuard<'_, Vec<(PathBuf, u64, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Call before a file is created.
pub(super) fn begin() -> Making {
    Making(MADE.lock())
}

impl Making {
    /// Records a created file.
    pub(super) fn note(&mut self, path: &Path, file: &File) {
        note(&mut self.0, path, file);
    }
}

fn note(made: &mut Vec<(PathBuf, u64, u64)>, path: &Path, file: &File) {
    if let (Ok(path), Ok(data)) = (std::path::absolute(path), file.metadata()) {
        made.push((path, data.dev(), data.ino()));
    }
}

/// Removes each path that is still the created file. Another file that has taken its name stays.
fn remove(made: &mut Vec<(PathBuf, u64, u64)>) {
    for (path, device, inode) in made.drain(..) {
        let is_it = fs::symlink_metadata(&path).is_ok_and(|data| (data.dev(), data.ino()) == (device, inode));
        if is_it && let Err(error) = fs::remove_file(&path) {
            log::warn!("removing {}: {error}", path.display());
        }
    }
}

/// From now on the files have content: they stay, however the run ends.
pub fn keep_made() {
    MADE.lock().clear();
}

/// Called if the run ends before tracing began: removes the created files. No more files are created while the guard is held.
#[must_use]
pub fn remove_made() -> Making {
    let mut making = begin();
    remove(&mut making.0);
    making
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::file::{Links, open_alone};

    /// Only the created files are removed, unless they are kept.
    #[test]
    fn removed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["made", "replaced", "gone"].map(|name| dir.path().join(name));
        let made = Made::default();
        for path in &paths {
            note(&mut made.lock(), path, &File::create(path).unwrap());
        }
        fs::write(dir.path().join("other"), "other").unwrap();
        fs::rename(dir.path().join("other"), &paths[1]).unwrap();
        fs::remove_file(&paths[2]).unwrap();
        remove(&mut made.lock());
        assert!(!paths[0].exists() && made.lock().is_empty());
        assert_eq!(fs::read_to_string(&paths[1]).unwrap(), "other");
    }

    /// A new file is recorded, an existing one is not.
    #[test]
    fn noted() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new, target, link) = (
            dir.path().join("old"),
            dir.path().join("new"),
            dir.path().join("target"),
            dir.path().join("link"),
        );
        fs::write(&old, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        for (path, is_noted) in [(&old, false), (&new, true), (&link, false)] {
            open_alone(path, 0o600, Links::Follow, "taken").unwrap();
            assert_eq!(MADE.lock().iter().any(|(made, ..)| made == path), is_noted, "{}", path.display());
        }
        assert!(target.exists());
    }
}
