//! Writing files so that a reader sees all of one or none of it, whenever we are killed.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::{
        fd::{AsFd as _, AsRawFd, BorrowedFd},
        unix::fs::FileTypeExt as _,
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags},
    io::Errno,
    process::{Gid, Uid},
};

use super::ExportError;

/// The files that have got their names.
static PUBLISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// Most of them that are remembered: sample sets may be written for days.
const REMEMBERED: usize = 64;

/// Whose the files are: user and group.
static OWNER: OnceLock<(u32, u32)> = OnceLock::new();

/// Has all files that are written from now on belong to this user and group. Only the first call counts.
pub fn belong_to(uid: u32, gid: u32) {
    // Where it is set already, files have been written.
    let _already = OWNER.set((uid, gid));
}

/// Gives a new file or directory to the user it is to belong to.
pub(super) fn give_to_owner(file: BorrowedFd<'_>) {
    let Some(&(uid, gid)) = OWNER.get() else { return };
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    // A complete file of root's is better than none.
    if let Err(error) = rustix::fs::fchown(file, Some(uid), Some(gid)) {
        log::warn!("a file stays root's: {error}");
    }
}

/// The files written so far (of very many, the first). No other appears under its name while this is held.
pub fn published() -> MutexGuard<'static, Vec<PathBuf>> {
    PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note_published(published: &mut Vec<PathBuf>, path: &Path) {
    if published.len() < REMEMBERED {
        published.push(path.to_owned());
    }
}

/// Writes `content` to `path`, replacing what was there. The bytes are on disk under no name at all (`O_TMPFILE`) until
/// they are complete.
///
/// # Errors
///
/// The directory cannot be written, or `content` fails; then nothing appears at `path`.
pub fn write_atomically(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = Unpublished::create(dir_of(path))?;
    file.fill(content)?;
    let mut published = published();
    file.replace(path)?;
    note_published(&mut published, path);
    Ok(())
}

/// Checks that a file can be made at `path`, without leaving one there.
///
/// # Errors
///
/// It names no regular file, or the directory cannot be written.
pub fn check_path(path: &Path) -> Result<(), ExportError> {
    let unwritable = |source| ExportError::Unwritable { path: path.to_owned(), source };
    // Elsewhere it means standard output, where a profile would be among the lines; nobody wants a file of that name.
    if path == Path::new("-") {
        let why = "a profile is not written to standard output";
        return Err(unwritable(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    // A complete file takes the name: doing that to a device or a pipe would take it away from everybody.
    if path.is_dir() {
        return Err(unwritable(io::Error::other("it is a directory")));
    }
    if let Some(why) = special(path) {
        return Err(unwritable(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    check_writable(dir_of(path)).map_err(unwritable)
}

/// Why no profile is written to `path`, if what is there, or would be, is no regular file.
fn special(path: &Path) -> Option<String> {
    if let Some(dir) = ["/dev", "/proc"].into_iter().find(|dir| path.starts_with(dir)) {
        return Some(format!("it is in {dir}, which keeps no files"));
    }
    let found = fs::metadata(path).ok()?.file_type();
    let what = match found {
        _ if found.is_file() => return None,
        _ if found.is_fifo() => "a named pipe",
        _ if found.is_socket() => "a socket",
        _ => "a device",
    };
    Some(format!("it is {what}, which a profile would replace with a regular file"))
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes `bytes` to a new file in `dir`: `STEM.json`, or with a number behind the stem if that is taken (the same
/// process traced before, or after an exec). What is there is never overwritten.
pub(super) fn write_new(dir: &Path, stem: &str, extension: &str, bytes: &[u8]) -> io::Result<()> {
    let mut file = Unpublished::create(dir)?;
    file.fill(|out| out.write_all(bytes))?;
    let mut published = published();
    for number in 1..=10_000 {
        let name =
            if number == 1 { format!("{stem}{extension}") } else { format!("{stem}-{number}{extension}") };
        let path = dir.join(name);
        match file.publish(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(()) => {
                note_published(&mut published, &path);
                return Ok(());
            }
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

/// A complete file that has no name yet.
enum Unpublished {
    Unnamed(File),
    /// Some file systems have no unnamed files; a named one, removed when it is dropped, is the next best.
    Named(tempfile::NamedTempFile),
}

impl Unpublished {
    fn create(dir: &Path) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        match rustix::fs::open(dir, flags, mode) {
            Ok(file) => Ok(Self::Unnamed(File::from(file))),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
                Ok(Self::Named(tempfile::Builder::new().permissions(permissions).tempfile_in(dir)?))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn fill(&mut self, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let file = match self {
            Self::Unnamed(file) => file,
            Self::Named(file) => file.as_file_mut(),
        };
        let mut out = BufWriter::with_capacity(256 << 10, &mut *file);
        content(&mut out)?;
        out.flush()?;
        drop(out);
        give_to_owner(file.as_fd());
        file.sync_data()
    }

    /// Gives the file a name that is not taken.
    fn publish(&self, path: &Path) -> io::Result<()> {
        let from = match self {
            Self::Unnamed(file) => PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())),
            Self::Named(file) => file.path().to_owned(),
        };
        Ok(rustix::fs::linkat(CWD, &from, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }

    /// Gives the file a name, replacing what has it. Linking cannot replace, so the complete file gets another name
    /// first and is renamed over.
    fn replace(&self, path: &Path) -> io::Result<()> {
        match self.publish(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => return result,
        }
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let other = path.with_file_name(name);
        self.publish(&other)?;
        fs::rename(&other, path).inspect_err(|_| {
            if let Err(error) = fs::remove_file(&other) {
                log::warn!("removing {}: {error}", other.display());
            }
        })
    }
}

/// Checks that files can be made in a directory, without leaving one there.
pub(super) fn check_writable(dir: &Path) -> io::Result<()> {
    Unpublished::create(dir).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// New files and replacements carry the whole content, and nothing else is left in the directory.
    #[test]
    fn writes_and_replaces() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        for content in ["first", "second, longer"] {
            write_atomically(&path, |out| out.write_all(content.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A new file never takes another one's name.
    #[test]
    fn new_files_get_new_names() {
        let dir = tempfile::tempdir().unwrap();
        for content in ["a", "b", "c"] {
            write_new(dir.path(), "set", ".json", content.as_bytes()).unwrap();
        }
        for (name, content) in [("set.json", "a"), ("set-2.json", "b"), ("set-3.json", "c")] {
            assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), content);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    /// What is refused is named, with what to do, and nothing is left behind.
    #[test]
    fn refused_paths() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, socket) = (dir.path().join("pipe"), dir.path().join("socket"));
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let left = dir.path().join("no/out");
        for (path, found, remedy) in [
            (Path::new("-"), "standard output", "name a regular file"),
            (Path::new("/dev/stdout"), "it is in /dev", "name a regular file"),
            (Path::new("/proc/new"), "it is in /proc", "name a regular file"),
            (&pipe, "it is a named pipe", "name a regular file"),
            (&socket, "it is a socket", "name a regular file"),
            (&link, "it is a device", "name a regular file"),
            (dir.path(), "it is a directory", "name a file in it"),
            (&left, "No such file or directory", "make its directory"),
        ] {
            let error = check_path(path).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
            assert!(error.contains(found) && error.contains(remedy), "{error}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
        assert!(check_path(&dir.path().join("new")).is_ok());
    }

    /// A directory that is not there is an error with nothing left behind.
    #[test]
    fn missing_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_atomically(&dir.path().join("no/out"), |out| out.write_all(b"x")).is_err());
        assert!(check_writable(&dir.path().join("no")).is_err());
        assert!(check_writable(dir.path()).is_ok());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
