//! Writing files so that a reader sees either the whole file or none, even if gctrace is killed.

use std::{
    fs::{self, File, TryLockError},
    io::{self, BufWriter, Write},
    os::{
        fd::{AsFd as _, AsRawFd, BorrowedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags},
    io::Errno,
    process::{Gid, Uid},
};

use super::{ExportError, made};
use crate::console::say;

/// An output file that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its path.
    pub path: PathBuf,
    /// Whether it is complete; otherwise the run is still adding to it.
    pub is_whole: bool,
}

/// The files published so far.
static PUBLISHED: Mutex<Vec<Published>> = Mutex::new(Vec::new());
/// Maximum number of files remembered: sample sets may be written for days.
const REMEMBERED: usize = 64;

/// Mode of a file that anybody may read.
pub(super) const PUBLIC: u32 = 0o644;
/// Mode of a file that only its owner may read.
const PRIVATE: u32 = 0o600;

/// Owner of the files: user and group.
static OWNER: OnceLock<(u32, u32)> = OnceLock::new();

/// Sets the user and group that own all files written from now on. Only the first call has an effect.
pub fn belong_to(uid: u32, gid: u32) {
    // If the owner is set already, files have been written with it.
    let _already = OWNER.set((uid, gid));
}

/// Changes the owner of a new file or directory to the configured user.
pub(crate) fn give_to_owner(file: BorrowedFd<'_>) {
    let Some(&(uid, gid)) = OWNER.get() else { return };
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    // A complete file owned by root is better than no file.
    if let Err(error) = rustix::fs::fchown(file, Some(uid), Some(gid)) {
        log::warn!("a file stays owned by root: {error}");
    }
}

/// How a symbolic link with the name of an output is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// The target of the link is written.
    Follow,
    /// A file replaces the link: whoever can create links in a directory must not choose what is overwritten.
    Replace,
}

/// Whether a file had a name. If it has no name any more, everything written to it is lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named(bool);

impl Named {
    /// The current state. A file that never had a name (`/dev/fd/3` of such a file, and the files of some file systems) cannot lose it.
    pub(crate) fn now(file: &File) -> Self {
        Self(file.metadata().is_ok_and(|data| data.is_file() && data.nlink() > 0))
    }

    pub(crate) fn is_lost(self, now: &fs::Metadata) -> bool {
        self.0 && now.nlink() == 0
    }
}

/// Opens a file for appending, or creates it with `mode`; existing content is kept. A regular file is locked (`flock`)
/// until it is closed, because two runs would interleave their output; `taken` is the error message if another process
/// holds the lock. A symbolic link is followed, or replaced as by everything that replaces files.
pub(crate) fn open_alone(
    path: &Path,
    mode: u32,
    links: Links,
    taken: &'static str,
) -> Result<File, ExportError> {
    open_or_make_alone(path, mode, links, taken).map(|(file, _)| file)
}

/// [`open_alone`], and whether the file is a new one. One that was there may belong to anybody, and may be open to anybody.
pub(crate) fn open_or_make_alone(
    path: &Path,
    mode: u32,
    links: Links,
    taken: &'static str,
) -> Result<(File, bool), ExportError> {
    let unwritable = |source| ExportError::Unwritable { path: path.to_owned(), source };
    let flags = match links {
        Links::Follow => OFlags::empty(),
        Links::Replace => {
            if path.is_symlink() {
                fs::remove_file(path).map_err(unwritable)?;
            }
            // Another link may have been created in the meantime.
            OFlags::NOFOLLOW
        }
    };
    let was_there = path.exists();
    if fs::metadata(path).is_ok_and(|data| data.file_type().is_fifo()) {
        return open_pipe(path).map(|pipe| (pipe, false)).map_err(unwritable);
    }
    let mut options = File::options();
    // Writes go to the current end of the file. If it is truncated during the run (`copytruncate` of logrotate), no hole
    // precedes the new data.
    options.append(true).mode(mode).custom_flags(flags.bits().cast_signed());
    // An existing file may be a device whose opening blocks.
    let mut making = (!was_there).then(made::begin);
    let (opened, is_made) = match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            (options.create(true).open(path).map_err(unwritable)?, false)
        }
        opened => (opened.map_err(unwritable)?, true),
    };
    // Some network file systems do not support locks.
    if opened.metadata().is_ok_and(|data| data.is_file())
        && let Err(TryLockError::WouldBlock) = opened.try_lock()
    {
        return Err(unwritable(io::Error::other(taken)));
    }
    // Not a file that somebody else has created in the meantime, nor the target of a link: these may be in a directory of another user.
    if is_made {
        give_to_owner(opened.as_fd());
        if let Some(making) = &mut making {
            making.note(path, &opened);
        }
    }
    Ok((opened, is_made))
}

/// Replaces an existing file by a new one that begins with `content`. Returns the new file, opened for appending and locked like that
/// of [`open_alone`].
pub(crate) fn replace_alone(path: &Path, mode: u32, content: &[u8]) -> io::Result<File> {
    let new = Unpublished::create(dir_of(path), mode)?;
    new.fill(|out| out.write_all(content))?;
    let file = new.file().try_clone()?;
    rustix::fs::fcntl_setfl(&file, OFlags::APPEND)?;
    if let Err(TryLockError::Error(error)) = file.try_lock() {
        log::debug!("{} is not locked: {error}", path.display());
    }
    new.replace(path)?;
    Ok(file)
}

/// Opens a named pipe. Opening blocks until there is a reader (`fifo(7)`).
fn open_pipe(path: &Path) -> io::Result<File> {
    match rustix::fs::open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
        // If the pipe were closed and reopened, its reader would see an end of file in between.
        Ok(pipe) => {
            rustix::fs::fcntl_setfl(&pipe, OFlags::empty())?;
            Ok(File::from(pipe))
        }
        Err(Errno::NXIO) => {
            say(&format!("gctrace: waiting for a reader of the named pipe {}", path.display()));
            File::options().write(true).open(path)
        }
        Err(error) => Err(error.into()),
    }
}

/// The files written so far (only the first ones if there are very many). No other file is published while the guard is held.
pub fn published() -> MutexGuard<'static, Vec<Published>> {
    PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note(published: &mut Vec<Published>, path: &Path, is_whole: bool) {
    if let Some(known) = published.iter_mut().find(|known| known.path == path) {
        known.is_whole = is_whole;
    } else if published.len() < REMEMBERED {
        published.push(Published { path: path.to_owned(), is_whole });
    }
}

/// A file that the run adds to has content.
pub(crate) fn note_begun(path: &Path) {
    note(&mut published(), path, false);
}

/// Nothing more is added to a file.
pub(crate) fn note_whole(path: &Path) {
    note(&mut published(), path, true);
}

/// Writes `content` to `path`, replacing an existing file. The file has no name (`O_TMPFILE`) until it is complete.
///
/// # Errors
///
/// The directory is not writable, or `content` fails; then nothing appears at `path`.
pub fn write_atomically(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    write_with_mode(path, PUBLIC, content)
}

/// Like [`write_atomically`], but only the owner can read the file.
///
/// # Errors
///
/// Those of [`write_atomically`].
pub fn write_private(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    write_with_mode(path, PRIVATE, content)
}

fn write_with_mode(
    path: &Path,
    mode: u32,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let file = Unpublished::create(dir_of(path), mode)?;
    file.fill(content)?;
    let mut published = published();
    file.replace(path)?;
    note(&mut published, path, true);
    Ok(())
}

/// Checks that a file can be created at `path`, without leaving one behind.
///
/// # Errors
///
/// The path does not name a regular file, or the directory is not writable.
pub fn check_path(path: &Path) -> Result<(), ExportError> {
    let unwritable = |source| ExportError::Unwritable { path: path.to_owned(), source };
    // `-` usually means standard output, where a profile would be mixed with the lines. A file of that name is not intended either.
    if path == Path::new("-") {
        let why = "`-` would mean standard output, which is not supported here";
        return Err(unwritable(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    // The complete file takes over the name: a device or a pipe with that name would be lost for everyone.
    if path.is_dir() {
        return Err(unwritable(io::Error::other("it is a directory")));
    }
    if let Some(why) = special(path) {
        return Err(unwritable(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    check_writable(dir_of(path)).map_err(unwritable)
}

/// Why no profile is written to `path`: it is, or would be, something other than a regular file.
fn special(path: &Path) -> Option<String> {
    if let Some(dir) = ["/dev", "/proc"].into_iter().find(|dir| path.starts_with(dir)) {
        return Some(format!("it is in {dir}, which cannot hold files"));
    }
    let found = fs::metadata(path).ok()?.file_type();
    let what = match found {
        _ if found.is_file() => return None,
        _ if found.is_fifo() => "a named pipe",
        _ if found.is_socket() => "a socket",
        _ => "a device",
    };
    Some(format!("it is {what}, and outputs are regular files"))
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes `content` to a new file in `dir`: `STEM.json`, or with a number after the stem if that name is taken (the
/// same process traced before, or after an exec). Existing files are never overwritten. Returns the path.
///
/// # Errors
///
/// Those of [`write_atomically`].
pub(crate) fn write_new(
    dir: &Path,
    stem: &str,
    extension: &str,
    mode: u32,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<PathBuf> {
    let file = Unpublished::create(dir, mode)?;
    file.fill(content)?;
    let mut published = published();
    for number in 1..=10_000 {
        let name =
            if number == 1 { format!("{stem}{extension}") } else { format!("{stem}-{number}{extension}") };
        let path = dir.join(name);
        match file.publish(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(()) => {
                note(&mut published, &path, true);
                return Ok(path);
            }
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

/// A complete file that does not have its name yet.
enum Unpublished {
    Unnamed(File),
    /// Fallback for file systems without unnamed files: a named file that is removed when dropped.
    Named(tempfile::NamedTempFile),
}

impl Unpublished {
    fn create(dir: &Path, mode: u32) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::open(dir, flags, Mode::from_raw_mode(mode)) {
            Ok(file) => Ok(Self::Unnamed(File::from(file))),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
                Ok(Self::Named(tempfile::Builder::new().permissions(permissions).tempfile_in(dir)?))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn file(&self) -> &File {
        match self {
            Self::Unnamed(file) => file,
            Self::Named(file) => file.as_file(),
        }
    }

    fn fill(&self, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let file = self.file();
        let mut out = BufWriter::with_capacity(256 << 10, file);
        content(&mut out)?;
        out.flush()?;
        drop(out);
        give_to_owner(file.as_fd());
        file.sync_data()
    }

    /// Links the file under a name that is not in use.
    fn publish(&self, path: &Path) -> io::Result<()> {
        let from = match self {
            Self::Unnamed(file) => PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())),
            Self::Named(file) => file.path().to_owned(),
        };
        Ok(rustix::fs::linkat(CWD, &from, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }

    /// Links the file under a name, replacing an existing file. Linking cannot replace, so the complete file is first
    /// linked under another name and then renamed.
    fn replace(&self, path: &Path) -> io::Result<()> {
        match self.publish(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => return result,
        }
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let other = path.with_file_name(name);
        if let Err(error) = self.publish(&other) {
            if error.kind() != io::ErrorKind::AlreadyExists {
                return Err(error);
            }
            // Left by a gctrace with our pid that was killed at this point: in a container all have the same.
            fs::remove_file(&other)?;
            self.publish(&other)?;
        }
        fs::rename(&other, path).inspect_err(|_| {
            if let Err(error) = fs::remove_file(&other) {
                log::warn!("removing {}: {error}", other.display());
            }
        })
    }
}

/// Checks that files can be created in a directory, without leaving one behind.
pub(super) fn check_writable(dir: &Path) -> io::Result<()> {
    Unpublished::create(dir, PUBLIC).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// New files and replacements have the whole content, and nothing else remains in the directory.
    #[test]
    fn writes_and_replaces() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        for content in ["first", "second, longer"] {
            write_atomically(&path, |out| out.write_all(content.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // What a run with our pid, which was killed in the middle of a replacement, has left.
        fs::write(dir.path().join(format!("out.{}.tmp", std::process::id())), "left").unwrap();
        write_atomically(&path, |out| out.write_all(b"third")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "third");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A file is named once, however often it is noted, and as complete once it is.
    #[test]
    fn noted() {
        let mut published = Vec::new();
        for (path, is_whole) in [("a", false), ("b", true), ("a", true)] {
            note(&mut published, Path::new(path), is_whole);
        }
        let whole = |path: &str| Published { path: path.into(), is_whole: true };
        assert_eq!(published, [whole("a"), whole("b")]);
        (0..1000).for_each(|n| note(&mut published, Path::new(&n.to_string()), true));
        assert_eq!(published.len(), REMEMBERED);
    }

    /// A named pipe is opened once, whether its reader or its writer comes first, and writes wait for a slow reader.
    #[test]
    fn named_pipes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let content = vec![7; 1 << 20];
        let pause = || std::thread::sleep(std::time::Duration::from_millis(50));
        for reader_first in [true, false] {
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    if !reader_first {
                        pause();
                    }
                    let mut pipe = File::open(&path).unwrap();
                    pause();
                    let mut read = Vec::new();
                    io::Read::read_to_end(&mut pipe, &mut read).unwrap();
                    read
                });
                if reader_first {
                    pause();
                }
                let mut pipe = open_alone(&path, PUBLIC, Links::Follow, "taken").unwrap();
                pipe.write_all(&content).unwrap();
                drop(pipe);
                assert_eq!(reader.join().unwrap().len(), content.len());
            });
        }
    }

    /// Where links are replaced, the target of a link is left unchanged, and is not created if it does not exist.
    #[test]
    fn links() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        for content in [Some("precious"), None] {
            for links in [Links::Replace, Links::Follow] {
                let _was_not_there = (fs::remove_file(&link), fs::remove_file(&target));
                if let Some(content) = content {
                    fs::write(&target, content).unwrap();
                }
                std::os::unix::fs::symlink(&target, &link).unwrap();
                let mut opened = open_alone(&link, 0o600, links, "taken").unwrap();
                opened.set_len(0).unwrap();
                opened.write_all(b"new data").unwrap();
                assert_eq!(fs::read_to_string(&link).unwrap(), "new data");
                let follows = links == Links::Follow;
                assert_eq!(link.is_symlink(), follows);
                let of_target = fs::read_to_string(&target).ok();
                assert_eq!(of_target.as_deref(), if follows { Some("new data") } else { content });
            }
        }
    }

    /// A file that replaces another one is a new file: who has the older one open keeps it, and a second writer is refused.
    #[test]
    fn replaced_while_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        fs::write(&path, "older").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let older = open_alone(&path, PRIVATE, Links::Replace, "taken").unwrap();
        let mut newer = replace_alone(&path, PRIVATE, b"new").unwrap();
        newer.write_all(b"er").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "newer");
        let (now, before) = (fs::metadata(&path).unwrap(), older.metadata().unwrap());
        assert_eq!((now.ino(), now.permissions().mode() & 0o777), (newer.metadata().unwrap().ino(), PRIVATE));
        assert_eq!((before.nlink(), before.len()), (0, 5));
        let second = open_alone(&path, PRIVATE, Links::Replace, "taken").unwrap_err().to_string();
        assert!(second.contains("taken"), "{second}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A new file never takes the name of an existing file.
    #[test]
    fn new_files_get_new_names() {
        let dir = tempfile::tempdir().unwrap();
        for content in ["a", "b", "c"] {
            let mode = if content == "b" { 0o600 } else { PUBLIC };
            let path =
                write_new(dir.path(), "set", ".json", mode, |out| out.write_all(content.as_bytes())).unwrap();
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, mode);
        }
        for (name, content) in [("set.json", "a"), ("set-2.json", "b"), ("set-3.json", "c")] {
            assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), content);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    /// A refused path is named with a remedy, and nothing is left behind.
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
            (&left, "No such file or directory", "create its directory"),
        ] {
            let error = check_path(path).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
            assert!(error.contains(found) && error.contains(remedy), "{error}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
        assert!(check_path(&dir.path().join("new")).is_ok());
    }

    /// A missing directory is an error, and nothing is left behind.
    #[test]
    fn missing_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_atomically(&dir.path().join("no/out"), |out| out.write_all(b"x")).is_err());
        assert!(check_writable(&dir.path().join("no")).is_err());
        assert!(check_writable(dir.path()).is_ok());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
