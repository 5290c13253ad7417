//! Private directories: no other user may write there, and nothing in them is followed or trusted. All operations are
//! relative to the open directory, so a path that is changed meanwhile has no effect.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::DirBuilderExt as _},
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, renameat, statat, unlinkat},
    io::Errno,
};

/// Prefix of the name of a file that is being written.
const TEMPORARY: &str = ".writing-";
/// Age above which a file is removed that a gctrace killed while writing has left behind.
const STALE: Duration = Duration::from_hours(1);
/// Opens the directory itself, not the target of a link.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const OWNER_ONLY: Mode = Mode::RUSR.union(Mode::WUSR);

/// Why a directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// It could not be created or opened.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is a symbolic link, whose target another user may control.
    #[error("it is not a directory, or it is a symbolic link; name the directory itself")]
    Link,
    /// Another user owns it.
    #[error("it belongs to uid {0} and gctrace runs as uid {1}: `chown` it, or name another one")]
    Owner(u32, u32),
    /// Other users may write there.
    #[error("other users may write there (mode {0:o}): run `chmod go-w` on it, or name another one")]
    Writable(u32),
}

impl From<DirError> for io::Error {
    fn from(error: DirError) -> Self {
        match error {
            DirError::Io(error) => error,
            refused => Self::other(refused),
        }
    }
}

impl From<Errno> for DirError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::LOOP | Errno::NOTDIR => Self::Link,
            error => Self::Io(error.into()),
        }
    }
}

/// An open directory that has been checked.
#[derive(Debug)]
pub struct PrivateDir {
    path: PathBuf,
    fd: OwnedFd,
}

impl PrivateDir {
    /// Opens a directory; `None` if it does not exist.
    pub fn open(path: &Path) -> Result<Option<Self>, DirError> {
        match rustix::fs::open(unslashed(path), DIRECTORY, Mode::empty()) {
            Err(Errno::NOENT) => Ok(None),
            fd => Self::checked(path.to_owned(), fd?).map(Some),
        }
    }

    /// Creates the directory, with its parents, if it does not exist, and opens it.
    pub fn create(path: &Path) -> Result<Self, DirError> {
        match fs::DirBuilder::new().recursive(true).mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
            _ => {}
        }
        Self::open(path)?.ok_or_else(|| DirError::Io(io::ErrorKind::NotFound.into()))
    }

    /// Creates a subdirectory if it does not exist, opens it, and restricts it to its owner.
    pub fn child(&self, name: &str) -> Result<Self, DirError> {
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let fd = openat(&self.fd, name, DIRECTORY, Mode::empty())?;
        let child = Self::checked(self.path.join(name), fd)?;
        rustix::fs::fchmod(&child.fd, Mode::RWXU)?;
        Ok(child)
    }

    fn checked(path: PathBuf, fd: OwnedFd) -> Result<Self, DirError> {
        let stat = fstat(&fd)?;
        let own = rustix::process::geteuid().as_raw();
        if stat.st_uid != own {
            return Err(DirError::Owner(stat.st_uid, own));
        }
        if writable_by_others(&stat) {
            return Err(DirError::Writable(stat.st_mode & 0o7777));
        }
        Ok(Self { path, fd })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file to be locked; creates it if it does not exist.
    pub fn lock_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.fd, name, flags, OWNER_ONLY)?))
    }

    /// Opens the directory itself, to be locked.
    pub fn folder(&self) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.fd, ".", flags, Mode::empty())?))
    }

    /// Reads a file; `None` if it does not exist. Reads at most `limit + 1` bytes: a longer result shows that the file exceeds the limit.
    pub fn read(&self, name: impl AsRef<OsStr>, limit: usize) -> io::Result<Option<Vec<u8>>> {
        // If another user put a pipe there, opening it does not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.fd, name.as_ref(), flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            file => File::from(file?),
        };
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("not a regular file"));
        }
        if !is_ours(&stat) {
            return Err(io::Error::other("other users may write to it"));
        }
        let mut bytes = Vec::new();
        file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Writes a file under a temporary name, then renames it, replacing any file of that name.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{TEMPORARY}{}-{name}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || openat(&self.fd, temporary.as_str(), flags, OWNER_ONLY);
        let file = match create() {
            // Left by an earlier process with our pid.
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
        if written.is_err() {
            self.remove(temporary.as_ref());
        }
        written
    }

    /// Our complete regular files in the directory, with their metadata. Unfinished files are removed when they are old.
    pub fn files(&self) -> io::Result<Vec<(OsString, Stat)>> {
        let mut files = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            // Another gctrace may be removing files, too.
            let Ok(stat) = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if name.as_bytes().starts_with(TEMPORARY.as_bytes()) {
                if is_stale(&stat) {
                    self.remove(name);
                }
            } else if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && is_ours(&stat) {
                files.push((name.to_owned(), stat));
            }
        }
        Ok(files)
    }

    /// Removes a file. A failure is only logged at debug level.
    pub fn remove(&self, name: &OsStr) {
        if let Err(error) = unlinkat(&self.fd, name, AtFlags::empty()) {
            log::debug!("removing {}: {error}", self.path.join(name).display());
        }
    }
}

impl AsFd for PrivateDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A path without trailing slashes, which would make the kernel follow a link at its end.
fn unslashed(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Opens a directory for output files, whichever user owns it. Another user's symbolic link is not followed: it could lead
/// anywhere.
pub fn open_for_output(path: &Path) -> Result<OwnedFd, DirError> {
    let path = unslashed(path);
    match rustix::fs::open(&path, DIRECTORY, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(Errno::LOOP | Errno::NOTDIR) => {
            let link = rustix::fs::lstat(&path)?;
            let own = rustix::process::geteuid().as_raw();
            if FileType::from_raw_mode(link.st_mode) == FileType::Symlink && link.st_uid == own {
                return Ok(rustix::fs::open(&path, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())?);
            }
            Err(DirError::Link)
        }
        Err(error) => Err(error.into()),
    }
}

fn is_ours(stat: &Stat) -> bool {
    stat.st_uid == rustix::process::geteuid().as_raw() && !writable_by_others(stat)
}

fn writable_by_others(stat: &Stat) -> bool {
    stat.st_mode & 0o022 != 0
}

fn is_stale(stat: &Stat) -> bool {
    let modified = UNIX_EPOCH + Duration::from_secs(stat.st_mtime.max(0) as u64);
    SystemTime::now().duration_since(modified).is_ok_and(|age| age > STALE)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// No link to or in the directory is followed, however its path is written; what is created is accessible to its owner only.
    #[test]
    fn links() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        let private = PrivateDir::create(&real).unwrap();
        let link = dir.path().join("link");
        symlink(&real, &link).unwrap();
        for path in [link.clone(), link.join(""), link.join(".")] {
            assert!(matches!(PrivateDir::open(&path), Err(DirError::Link)), "{path:?}");
            assert!(matches!(PrivateDir::create(&path), Err(DirError::Link)), "{path:?}");
            assert!(open_for_output(&path).is_ok(), "a link of our own");
        }
        symlink("/etc", real.join("child")).unwrap();
        assert!(matches!(private.child("child"), Err(DirError::Link)));
        symlink(dir.path().join("elsewhere"), real.join("lock")).unwrap();
        assert!(private.lock_file("lock").is_err() && !dir.path().join("elsewhere").exists());
        symlink("/etc/hostname", real.join("set.json")).unwrap();
        assert!(private.read("set.json", 100).is_err());
        assert!(private.files().unwrap().is_empty());
        private.write("set.json", b"x").unwrap();
        assert_eq!(private.files().unwrap().len(), 1);
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&real.join("set.json")), 0o600);
        fs::create_dir(real.join("wide")).unwrap();
        fs::set_permissions(real.join("wide"), fs::Permissions::from_mode(0o755)).unwrap();
        private.child("wide").unwrap();
        assert_eq!(mode(&real.join("wide")), 0o700);
    }

    /// Other users' directories are not used. The test needs root to create them.
    #[test]
    fn foreign() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let chown = |path: &Path| std::os::unix::fs::lchown(path, Some(65534), Some(65534)).unwrap();
        let theirs = dir.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        chown(&theirs);
        assert!(matches!(PrivateDir::create(&theirs), Err(DirError::Owner(65534, 0))));
        assert!(open_for_output(&theirs).is_ok(), "output may go to a directory of its reader");
        let link = dir.path().join("link");
        symlink("/etc", &link).unwrap();
        chown(&link);
        assert!(matches!(open_for_output(&link.join("")), Err(DirError::Link)));
    }
}
