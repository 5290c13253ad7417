//! The directory that holds the entries: nobody else may write there, and nothing in it is followed or trusted.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt as _, fs::DirBuilderExt as _},
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, renameat, statat, unlinkat},
    io::Errno,
};

/// Ends every entry's name.
const SUFFIX: &str = ".analysis";
/// Begins the name of an entry that is being written.
const TEMPORARY: &str = ".writing-";
/// Entries kept; the oldest go first.
pub(super) const MAX_ENTRIES: usize = 256;
/// What a gctrace left behind that was killed while writing is removed after this time.
const STALE: Duration = Duration::from_hours(1);

/// Why the directory is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum DirError {
    /// It could not be made or opened.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Somebody else owns it.
    #[error(
        "it belongs to uid {0} and gctrace runs as uid {1}: `chown` it, or name another one with --cache-dir"
    )]
    Owner(u32, u32),
    /// Somebody else may write there.
    #[error(
        "others may write there (mode {0:o}): run `chmod go-w` on it, or name another one with --cache-dir"
    )]
    Writable(u32),
}

/// An open, checked directory.
#[derive(Debug)]
pub(super) struct Dir {
    path: PathBuf,
    fd: OwnedFd,
}

impl Dir {
    /// Opens a directory; `None` if it does not exist.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, DirError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            fd => fd.map_err(io::Error::from)?,
        };
        let stat = fstat(&fd).map_err(io::Error::from)?;
        let own = rustix::process::geteuid().as_raw();
        if stat.st_uid != own {
            return Err(DirError::Owner(stat.st_uid, own));
        }
        if writable_by_others(&stat) {
            return Err(DirError::Writable(stat.st_mode & 0o7777));
        }
        Ok(Some(Self { path: path.to_owned(), fd }))
    }

    /// Makes it, with its parents, if it is not there, and opens it.
    pub(super) fn create(path: &Path) -> Result<Self, DirError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Self::open(path)?.ok_or_else(|| DirError::Io(io::ErrorKind::NotFound.into()))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file name of an entry.
    pub(super) fn entry_name(key: &str) -> String {
        format!("{key}{SUFFIX}")
    }

    /// Reads an entry; `None` if it is not there. More than `limit` bytes are cut off.
    pub(super) fn read(&self, name: &str, limit: usize) -> io::Result<Option<Vec<u8>>> {
        // Should somebody have put a pipe there, opening it does not wait.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.fd, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            file => File::from(file?),
        };
        let stat = fstat(&file)?;
        let own = rustix::process::geteuid().as_raw();
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("not a regular file"));
        }
        if stat.st_uid != own || writable_by_others(&stat) {
            return Err(io::Error::other("somebody else may write it"));
        }
        let mut bytes = Vec::new();
        file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Writes an entry under a temporary name, then gives it its own, replacing what had it.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{TEMPORARY}{}-{name}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || openat(&self.fd, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR);
        let file = match create() {
            // Of an earlier process with our pid.
            Err(Errno::EXIST) => {
                unlinkat(&self.fd, temporary.as_str(), AtFlags::empty())?;
                create()?
            }
            file => file?,
        };
        let mut file = File::from(file);
        let written = file
            .write_all(bytes)
            .and_then(|()| file.sync_data())
            .and_then(|()| Ok(renameat(&self.fd, temporary.as_str(), &self.fd, name)?));
        if written.is_err()
            && let Err(error) = unlinkat(&self.fd, temporary.as_str(), AtFlags::empty())
        {
            log::debug!("removing {}: {error}", self.path.join(&temporary).display());
        }
        written
    }

    /// Removes the oldest entries beyond [`MAX_ENTRIES`], and what was never finished.
    pub(super) fn prune(&self) -> io::Result<()> {
        let mut entries: Vec<(i64, i64, OsString)> = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            let text = name.to_string_lossy();
            let temporary = text.starts_with(TEMPORARY);
            if !temporary && !text.ends_with(SUFFIX) {
                continue;
            }
            // Another gctrace may be pruning, too.
            let Ok(stat) = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if !temporary {
                entries.push((stat.st_mtime, stat.st_mtime_nsec as i64, name.to_owned()));
            } else if is_stale(&stat) {
                self.remove(name);
            }
        }
        entries.sort_unstable();
        let surplus = entries.len().saturating_sub(MAX_ENTRIES);
        entries[..surplus].iter().for_each(|(_, _, name)| self.remove(name));
        Ok(())
    }

    fn remove(&self, name: &OsStr) {
        if let Err(error) = unlinkat(&self.fd, name, AtFlags::empty()) {
            log::debug!("removing {}: {error}", self.path.join(name).display());
        }
    }
}

fn writable_by_others(stat: &Stat) -> bool {
    stat.st_mode & 0o022 != 0
}

fn is_stale(stat: &Stat) -> bool {
    let modified = UNIX_EPOCH + Duration::from_secs(stat.st_mtime.max(0) as u64);
    SystemTime::now().duration_since(modified).is_ok_and(|age| age > STALE)
}
