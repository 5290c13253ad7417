//! Files below the root folder of a process, which whoever runs it has made: links never lead out of that folder, and nothing that blocks
//! or has no end is read.

use std::{fs::File, io, io::Read as _, path::Path};

use gctrace_tunemygc::printable::printable;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};

use super::proc_root;

/// More than this of a name is not read.
const LONGEST: u64 = 4096;

/// Opens a regular file below a root folder.
pub(crate) fn open_below(root: &Path, path: &Path) -> io::Result<File> {
    let folder =
        rustix::fs::openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file: File = openat2(&folder, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)?.into();
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    Ok(file)
}

/// The first line of a file in the root of a process, without blanks around it and with visible characters only; `None` if there is none.
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

    /// A root that somebody made who wants gctrace to read other files, to wait or to read for ever.
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
        rustix::fs::mknodat(CWD, &name, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(line_below(&root, "etc/hostname"), None);
        std::fs::remove_file(&name).unwrap();
        std::fs::write(&name, [b"\n web-1\x1b[2J \nmore\n".to_vec(), vec![b'x'; 1 << 16]].concat()).unwrap();
        assert_eq!(line_below(&root, "etc/hostname").as_deref(), Some("web-1\\u{1b}[2J"));
        // Links within it are followed, absolute ones, too.
        std::fs::create_dir_all(root.join("run/secrets")).unwrap();
        std::fs::create_dir_all(root.join("var")).unwrap();
        symlink("/run", root.join("var/run")).unwrap();
        std::fs::write(root.join("run/secrets/namespace"), "shop").unwrap();
        assert_eq!(line_below(&root, "var/run/secrets/namespace").as_deref(), Some("shop"));
    }
}
