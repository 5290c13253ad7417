//! Executable mappings of a process.

use std::{
    ffi::OsStr,
    io,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::PathBuf,
};

use procfs::ProcError;

use super::{
    maps::{self, Mapping},
    proc_root,
};
use crate::elf::LoadSegment;

/// One executable file mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExecutableMapping {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
    /// File offset of the first address.
    pub offset: u64,
    /// Inode of the file according to the process's maps; 0 if unknown.
    pub inode: u64,
    /// Path as the process sees it, without the suffix of a deleted file.
    pub path: PathBuf,
}

impl ExecutableMapping {
    /// A path to the mapped file itself, even if its own path has changed: works across mount namespaces and for deleted files.
    pub(crate) fn file(&self, pid: u32) -> PathBuf {
        proc_root::path(pid, &format!("map_files/{:x}-{:x}", self.start, self.end))
    }

    /// A path that opens the mapped file with the available privileges: [`ExecutableMapping::file`] if it may be
    /// used, otherwise the file's own path, if it is still the same file.
    pub(crate) fn open_path(&self, pid: u32) -> io::Result<PathBuf> {
        let file = self.file(pid);
        let Err(error) = std::fs::metadata(&file) else { return Ok(file) };
        let inside = self.path.strip_prefix("/").unwrap_or(&self.path);
        let path = proc_root::path(pid, "root").join(inside);
        match std::fs::metadata(&path) {
            Ok(metadata) if self.inode != 0 && metadata.ino() == self.inode => Ok(path),
            _ => Err(error),
        }
    }
}

/// Actual minus stated addresses of a mapping.
pub(crate) fn load_bias(mapping: &ExecutableMapping, segments: &[LoadSegment]) -> Option<u64> {
    let page = rustix::param::page_size() as u64;
    segments
        .iter()
        .filter(|segment| segment.executable)
        .find(|segment| {
            let first = segment.offset.0 / page * page;
            (first..segment.offset.0 + segment.file_size).contains(&mapping.offset)
        })
        .map(|segment| {
            let stated = mapping.offset.wrapping_sub(segment.offset.0).wrapping_add(segment.address.0);
            mapping.start.wrapping_sub(stated)
        })
}

/// A mapping with code of a process.
pub(crate) enum CodeMapping {
    /// Code of a file.
    File(ExecutableMapping),
    /// The vDSO: first address, one past the last.
    Vdso(u64, u64),
}

/// All code of a process that belongs to an image, in address order; excludes code of just-in-time compilers.
pub(crate) fn code_of(pid: u32) -> Result<Vec<CodeMapping>, ProcError> {
    maps::each(pid, |map| match map.name {
        b"[vdso]" => Some(CodeMapping::Vdso(map.range.0, map.range.1)),
        _ => executable(map).map(CodeMapping::File),
    })
}

/// The executable file mappings of a process, in address order.
pub(crate) fn of_process(pid: u32) -> Result<Vec<ExecutableMapping>, ProcError> {
    maps::each(pid, executable)
}

/// Whether an error says that gctrace itself lacks descriptors or memory, and nothing about the process.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// The mapping, if it is an executable one of a file.
fn executable(map: &Mapping<'_>) -> Option<ExecutableMapping> {
    let path = map.name.strip_suffix(b" (deleted)").unwrap_or(map.name);
    (map.is_executable() && map.is_of_file()).then(|| ExecutableMapping {
        start: map.range.0,
        end: map.range.1,
        offset: map.offset,
        inode: map.inode,
        path: PathBuf::from(OsStr::from_bytes(path)),
    })
}

/// File offset in `/proc/self/exe` of a function of this program that is never called.
pub fn own_code() -> Option<u64> {
    fn never_called() {}
    let address = never_called as *const () as u64;
    let exe = std::fs::read_link("/proc/self/exe").ok()?;
    let mappings = of_process(proc_root::own_pid()).ok()?;
    let mapping = mappings.iter().find(|m| m.path == exe && (m.start..m.end).contains(&address))?;
    Some(address - mapping.start + mapping.offset)
}

#[cfg(test)]
pub(crate) use maps::tests::child_with_odd_name;

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

    /// A mapping whose path is not UTF-8 hides neither itself nor the others of its process.
    #[test]
    fn odd_names() {
        let mut child = child_with_odd_name();
        let (mappings, code) = (of_process(child.id()), code_of(child.id()));
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        let mappings = mappings.unwrap();
        let odd = mappings.iter().find(|mapping| mapping.path.as_os_str().as_bytes() == b"/memfd:\xff");
        assert!(odd.is_some_and(|odd| odd.end - odd.start == 4096 && odd.inode != 0), "{mappings:?}");
        assert!(mappings.iter().any(|mapping| mapping.path.to_string_lossy().contains("python3")));
        assert!(code.unwrap().len() >= mappings.len());
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
