//! The directory that holds the entries.

use std::{ffi::OsString, io, ops::Deref, path::Path};

use crate::private_dir::{DirError, PrivateDir};

/// Suffix of every entry's name.
const SUFFIX: &str = ".analysis";
/// Maximum number of entries; the oldest are removed above it.
pub(super) const MAX_ENTRIES: usize = 256;

/// An open, checked directory.
#[derive(Debug)]
pub(super) struct Dir(PrivateDir);

impl Deref for Dir {
    type Target = PrivateDir;

    fn deref(&self) -> &PrivateDir {
        &self.0
    }
}

impl Dir {
    /// Opens a directory; `None` if it does not exist.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, DirError> {
        Ok(PrivateDir::open(path)?.map(Self))
    }

    /// Creates the directory with its parents, unless it exists, and opens it.
    pub(super) fn create(path: &Path) -> Result<Self, DirError> {
        PrivateDir::create(path).map(Self)
    }

    /// The file name of an entry.
    pub(super) fn entry_name(key: &str) -> String {
        format!("{key}{SUFFIX}")
    }

    /// Removes the oldest entries beyond [`MAX_ENTRIES`], and unfinished files.
    pub(super) fn prune(&self) -> io::Result<()> {
        let mut entries: Vec<(i64, i64, OsString)> = Vec::new();
        for (name, stat) in self.files()? {
            if name.to_string_lossy().ends_with(SUFFIX) {
                entries.push((stat.st_mtime, stat.st_mtime_nsec as i64, name));
            }
        }
        entries.sort_unstable();
        let surplus = entries.len().saturating_sub(MAX_ENTRIES);
        entries[..surplus].iter().for_each(|(_, _, name)| self.remove(name));
        Ok(())
    }
}
