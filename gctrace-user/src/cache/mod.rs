//! Caches analyses of images on disk by build id, so that a second start, or a short-lived Ruby in an unusual place, does
//! not wait for one. Nothing here can fail a run: what cannot be read is analysed again, what cannot be written is not stored.

mod content;
mod dir;
mod entry;
#[cfg(test)]
mod sources;
#[cfg(test)]
mod tests;

use std::{
    env,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

pub use self::content::content;
use self::{
    dir::Dir,
    entry::{Entry, MAX_BYTES},
};
use crate::{
    elf::{ElfImage, ImageHead, ReadAt},
    private_dir::DirError,
    ruby::RubyAnalysis,
};

/// The cached data of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedAnalysis {
    /// Its analysis.
    pub analysis: RubyAnalysis,
    /// Whether symbols that belong to the image have confirmed the sites.
    pub witnessed: bool,
}

/// The cache directory of root.
const SYSTEM_DIR: &str = "/var/cache/gctrace";

/// The cache of this run.
#[derive(Debug)]
pub struct Cache {
    path: Option<PathBuf>,
    dir: Option<Dir>,
}

/// Hash of the sources that produce analyses, from the build script.
const SOURCES: u64 = match u64::from_str_radix(env!("GCTRACE_SOURCES"), 10) {
    Ok(hash) => hash,
    Err(_) => panic!("the build script gives a number"),
};

/// The default directory: root's own, otherwise `gctrace` in the user's cache directory.
pub fn default_dir() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from(SYSTEM_DIR));
    }
    let absolute = |name, below: &str| {
        let dir = PathBuf::from(env::var_os(name)?).join(below);
        dir.is_absolute().then_some(dir)
    };
    Some(absolute("XDG_CACHE_HOME", "").or_else(|| absolute("HOME", ".cache"))?.join("gctrace"))
}

impl Cache {
    /// A disabled cache.
    pub fn none() -> Self {
        Self { path: None, dir: None }
    }

    /// The cache in this directory, which is created when something is stored. A directory that is not safe to use
    /// is reported and not used.
    pub fn at(path: &Path) -> Self {
        match Dir::open(path) {
            Ok(dir) => Self { path: Some(path.to_owned()), dir },
            Err(error) => {
                not_used(path, &error);
                Self::none()
            }
        }
    }

    /// Its directory; `None` if the cache is disabled.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The stored analysis of an image, if it exists and the file is still the one that was analysed.
    pub fn get(&self, source: &(impl ReadAt + ?Sized), head: &ImageHead) -> Option<CachedAnalysis> {
        let dir = self.dir.as_ref()?;
        let name = Dir::entry_name(&key(head)?);
        let path = dir.path().join(&name);
        let ignored = |why: &dyn std::fmt::Display| {
            log::warn!(
                "the cached analysis {} is ignored: {why}; the image is analysed again and the entry replaced \
                 (if this comes back, remove the file)",
                path.display()
            );
        };
        let bytes = match dir.read(&name, MAX_BYTES) {
            Ok(bytes) => bytes?,
            Err(error) => {
                ignored(&error);
                return None;
            }
        };
        match Entry::decode(&bytes).and_then(|entry| entry.verified(source, head)) {
            Ok(kept) => {
                log::info!("the analysis {} is used", path.display());
                Some(kept)
            }
            Err(error) => {
                ignored(&error);
                None
            }
        }
    }

    /// Stores an analysis. A failure is reported once and disables storing; the run continues.
    pub fn put(
        &mut self,
        source: &(impl ReadAt + ?Sized),
        head: &ImageHead,
        image: &ElfImage,
        kept: &CachedAnalysis,
    ) {
        let Some(path) = self.path.clone() else { return };
        let Some(key) = key(head) else {
            return log::info!("an image without build id is not cached");
        };
        if self.dir.is_none() {
            match Dir::create(&path) {
                Ok(dir) => self.dir = Some(dir),
                Err(error) => {
                    not_used(&path, &error);
                    self.path = None;
                }
            }
        }
        let Some(dir) = &self.dir else { return };
        let Some(bytes) = Entry::new(source, head, image, kept).and_then(|entry| entry.encode()) else {
            return log::info!("the analysis of {key} cannot be cached");
        };
        match dir.write(&Dir::entry_name(&key), &bytes).and_then(|()| dir.prune()) {
            Ok(()) => log::info!("the analysis of {key} is stored in {}", path.display()),
            Err(error) => {
                log::warn!(
                    "the analysis of an image cannot be stored in {}: {error}; the next start analyses it again",
                    path.display()
                );
                self.path = None;
            }
        }
    }
}

fn not_used(path: &Path, error: &DirError) {
    log::warn!("the cache directory {} is not used: {error} (--cache-dir)", path.display());
}

/// The key of an image; `None` without a build id: nothing else cheaply shows that two files are the same.
fn key(head: &ImageHead) -> Option<String> {
    Some(format!("{}-{}", head.build_id.as_ref()?, head.file_size))
}
