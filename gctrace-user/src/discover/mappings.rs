//! Executable mappings of a process.

use std::{
    ffi::OsString,
    io,
    os::unix::{ffi::OsStringExt as _, fs::MetadataExt as _},
    path::PathBuf,
};

use procfs::{
    ProcError,
    process::{MMPermissions, MMapPath, Process},
};

use crate::bpf::ExecMapping;

/// One executable file mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExecutableMapping {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
    /// File offset of the first address.
    pub offset: u64,
    /// Inode of the file, as the process's maps say; 0 if that is not known.
    pub inode: u64,
    /// Path as the process sees it, without the mark of a deleted file.
    pub path: PathBuf,
}

impl ExecutableMapping {
    /// The mapped file itself, whatever has become of its path: works across mount namespaces and for deleted files.
    pub(super) fn file(&self, pid: u32) -> PathBuf {
        PathBuf::from(format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end))
    }

    /// A path that opens the mapped file with what privileges there are: [`ExecutableMapping::file`] where it may be
    /// used, else the file's own path, if it is still the same file.
    pub(super) fn open_path(&self, pid: u32) -> io::Result<PathBuf> {
        let file = self.file(pid);
        let Err(error) = std::fs::metadata(&file) else { return Ok(file) };
        let inside = self.path.strip_prefix("/").unwrap_or(&self.path);
        let path = PathBuf::from(format!("/proc/{pid}/root")).join(inside);
        match std::fs::metadata(&path) {
            Ok(metadata) if self.inode != 0 && metadata.ino() == self.inode => Ok(path),
            _ => Err(error),
        }
    }
}

impl From<ExecMapping> for ExecutableMapping {
    fn from(new: ExecMapping) -> Self {
        Self {
            start: new.address,
            end: new.address.saturating_add(new.len),
            offset: new.offset,
            inode: 0,
            path: PathBuf::from(OsString::from_vec(new.file)),
        }
    }
}

/// The executable file mappings of a process, in address order.
pub(super) fn of_process(pid: u32) -> Result<Vec<ExecutableMapping>, ProcError> {
    let maps = Process::new(pid as i32)?.maps()?;
    Ok(maps
        .into_iter()
        .filter(|map| map.perms.contains(MMPermissions::EXECUTE))
        .filter_map(|map| {
            let MMapPath::Path(path) = map.pathname else { return None };
            let text = path.to_string_lossy();
            let path = text.strip_suffix(" (deleted)").map_or_else(|| path.clone(), PathBuf::from);
            Some(ExecutableMapping {
                start: map.address.0,
                end: map.address.1,
                offset: map.offset,
                inode: map.inode,
                path,
            })
        })
        .collect())
}

/// File offset in `/proc/self/exe` of a function of this program that is never called.
pub fn own_code() -> Option<u64> {
    fn never_called() {}
    let address = never_called as *const () as u64;
    let exe = std::fs::read_link("/proc/self/exe").ok()?;
    let mappings = of_process(std::process::id()).ok()?;
    let mapping = mappings.iter().find(|m| m.path == exe && (m.start..m.end).contains(&address))?;
    Some(address - mapping.start + mapping.offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test's own program is among its executable mappings, and the `map_files` path leads to it.
    #[test]
    fn own_program() {
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let mappings = of_process(std::process::id()).unwrap();
        assert!(mappings.iter().any(|m| m.path == exe), "{mappings:?}");
    }

    /// A process that is gone is an error, not an empty list.
    #[test]
    fn vanished() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(of_process(pid).is_err());
    }
}
