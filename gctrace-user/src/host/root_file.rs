//! Files made by others: only regular files are opened. Opening alone can do harm: it may start a watchdog, wait for the other end of a
//! pipe, or take a terminal. Below the root folder of a process, links never lead out of that folder.

use std::{
    fs::File,
    io::{self, Read as _},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

use gctrace_tunemygc::printable::printable;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, openat2};

use super::proc_root;

/// Maximum number of bytes read of a name.
const LONGEST: u64 = 4096;

/// Opens a regular file. Links are followed.
///
/// # Errors
///
/// The file does not exist, may not be read, or is not a regular file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    regular(&rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Opens a regular file below a root folder.
pub(crate) fn open_below(root: &Path, path: &Path) -> io::Result<File> {
    let folder =
        rustix::fs::openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    regular(&openat2(&folder, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)?)
}

/// Opens what was found, if it is a regular file: the same file, whatever its path leads to by now.
fn regular(found: &OwnedFd) -> io::Result<File> {
    if !FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode).is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let link = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(rustix::fs::openat(CWD, link, flags, Mode::empty())?.into())
}

/// The first line of a file in the root of a process, trimmed and with visible characters only; `None` if there is none.
pub(super) fn line(pid: u32, path: &str) -> Option<String> {
    line_below(&proc_root::path(pid, "root"), path)
}

fn line_below(root: &Path, path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    open_below(root, Path::new(path)).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let line = text.trim().lines().next()?.trim();
    (!line.is_empty()).then(|| printable(line).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A hostile root that tries to make gctrace read other files, wait, or read for ever.
    #[test]
    fn hostile_roots() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("secret"));
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::write(&outside, "secret").unwrap();
        let name = root.join("etc/hostname");
        for target in [outside.as_path(), Path::new("../../secret"), Path::new("/dev/zero")] {
            symlink(target, &name).unwrap();
            assert_eq!(line_below(&root, "etc/hostname"), None, "{target:?}");
            std::fs::remove_file(&name).unwrap();
        }
        rustix::fs::mknodat(CWD, &name, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(line_below(&root, "etc/hostname"), None);
        // Nobody has the other end of the pipe: it is not opened.
        assert_eq!(open(&name).unwrap_err().to_string(), "not a regular file");
        std::fs::remove_file(&name).unwrap();
        std::fs::write(&name, [b"\n web-1\x1b[2J \nmore\n".to_vec(), vec![b'x'; 1 << 16]].concat()).unwrap();
        assert_eq!(line_below(&root, "etc/hostname").as_deref(), Some("web-1\\u{1b}[2J"));
        assert!(open(&name).is_ok() && open(Path::new("/dev/zero")).is_err() && open(&root).is_err());
        assert_eq!(open(&root.join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        // Links within the root are followed, including absolute ones.
        std::fs::create_dir_all(root.join("run/secrets")).unwrap();
        std::fs::create_dir_all(root.join("var")).unwrap();
        symlink("/run", root.join("var/run")).unwrap();
        std::fs::write(root.join("run/secrets/namespace"), "shop").unwrap();
        assert_eq!(line_below(&root, "var/run/secrets/namespace").as_deref(), Some("shop"));
    }
}
