//! Writing files so that a reader sees all of one or none of it, whenever we are killed.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::fd::AsRawFd,
    path::Path,
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

/// Writes `bytes` to `path`, replacing what was there. The bytes are on disk under no name at all (`O_TMPFILE`) until
/// they are complete.
pub(super) fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    match open_unnamed(dir) {
        Ok(mut file) => {
            fill(&mut file, bytes)?;
            publish(&file, path)
        }
        // Some file systems have no unnamed files; a named one, removed on any error, is the next best.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) =>
        {
            let mut file = tempfile::Builder::new().permissions(permissions()).tempfile_in(dir)?;
            fill(file.as_file_mut(), bytes)?;
            file.persist(path).map_err(|error| error.error)?;
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Checks that files can be made in a directory, without leaving one there.
pub(super) fn check_writable(dir: &Path) -> io::Result<()> {
    match open_unnamed(dir) {
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) =>
        {
            tempfile::tempfile_in(dir).map(drop)
        }
        result => result.map(drop),
    }
}

fn open_unnamed(dir: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    Ok(File::from(rustix::fs::open(dir, flags, mode)?))
}

fn permissions() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o644)
}

fn fill(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.sync_data()
}

fn publish(file: &File, path: &Path) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |target: &Path| rustix::fs::linkat(CWD, &unnamed, CWD, target, AtFlags::SYMLINK_FOLLOW);
    match link(path) {
        Ok(()) => Ok(()),
        // Linking cannot replace: give the complete file another name and rename it over.
        Err(rustix::io::Errno::EXIST) => {
            let mut name = path.file_name().unwrap_or_default().to_owned();
            name.push(format!(".{}.tmp", std::process::id()));
            let other = path.with_file_name(name);
            link(&other)?;
            fs::rename(&other, path).inspect_err(|_| {
                if let Err(error) = fs::remove_file(&other) {
                    log::warn!("removing {}: {error}", other.display());
                }
            })
        }
        Err(error) => Err(error.into()),
    }
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
            write_atomically(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A directory that is not there is an error with nothing left behind.
    #[test]
    fn missing_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_atomically(&dir.path().join("no/out"), b"x").is_err());
        assert!(check_writable(&dir.path().join("no")).is_err());
        assert!(check_writable(dir.path()).is_ok());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
