//! Mapping records without usable pids: the kernel reports pids in the pid namespace of the process that opened the event; in
//! a container with its own pid namespace, that is 0 for every process outside.
//!
//! Such a record still has the address and the file, so the host's `/proc` is searched for the process that has
//! that file mapped there. All pending records are searched for at once, and files that are known to contain
//! no Ruby are skipped.

use std::{
    collections::HashSet,
    ffi::OsString,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::PathBuf,
    time::{Duration, Instant},
};

use super::mappings::{self, ExecutableMapping};
use crate::{
    bpf::{ExecMapping, FileId},
    host::proc_root,
};

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

/// Maximum number of pending records; above it they are dropped in favour of a full scan.
const MOST: usize = 4096;
/// How long a file is assumed to contain no Ruby: the mapping found for it may have been of another file at the same address.
const KNOWN: Duration = Duration::from_mins(1);
/// Searching takes at most one part in this many of the time.
const SHARE: u32 = 10;

/// A recorded mapping and its process.
pub(super) struct AttributedMapping {
    pub(super) pid: u32,
    pub(super) mapping: ExecutableMapping,
    /// The file, as in the record.
    pub(super) file: Option<FileId>,
}

/// The pending records.
pub(super) struct UnattributedMappings {
    wanted: Vec<ExecMapping>,
    no_ruby: HashSet<FileId>,
    known_since: Instant,
    /// Earliest time of the next search.
    due: Instant,
}

impl UnattributedMappings {
    /// `None` if records have usable pids.
    pub(super) fn expected() -> Option<Self> {
        let now = Instant::now();
        let new = Self { wanted: Vec::new(), no_ruby: HashSet::new(), known_since: now, due: now };
        (!proc_root::shares_pids()).then_some(new)
    }

    /// Adds a record; only records of files are searched for.
    pub(super) fn add(&mut self, record: ExecMapping) {
        let is_file = record.file.first() == Some(&b'/') && record.file.get(1) != Some(&b'/');
        if is_file && !record.file_id.is_some_and(|file| self.no_ruby.contains(&file)) {
            self.wanted.push(record);
        }
    }

    /// Time until [`UnattributedMappings::find`] will search; `None` if nothing is pending.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.wanted.is_empty()).then(|| self.due.saturating_duration_since(Instant::now()))
    }

    /// Whether too many records are pending, so that a full scan is needed. They are dropped then.
    pub(super) fn overflowed(&mut self) -> bool {
        let overflowed = self.wanted.len() > MOST;
        if overflowed {
            self.wanted.clear();
        }
        overflowed
    }

    /// Records that a file contains no Ruby.
    pub(super) fn no_ruby(&mut self, file: FileId) {
        self.no_ruby.insert(file);
    }

    /// The processes that have the recorded mappings, if a search is due. Mappings that no process has were removed meanwhile.
    pub(super) fn find(&mut self) -> Vec<AttributedMapping> {
        let started = Instant::now();
        if self.wanted.is_empty() || started < self.due {
            return Vec::new();
        }
        if started.duration_since(self.known_since) > KNOWN {
            self.no_ruby.clear();
            self.known_since = started;
        }
        let wanted = std::mem::take(&mut self.wanted);
        let mut found = Vec::new();
        match proc_root::pids() {
            Err(error) => log::warn!("listing {}: {error}", proc_root::root().display()),
            Ok(pids) => {
                for pid in pids {
                    // A process that is gone and a kernel thread have no mappings.
                    for mapping in mappings::of_process(pid).unwrap_or_default() {
                        if let Some(record) = wanted.iter().find(|record| is_of(record, &mapping)) {
                            found.push(AttributedMapping { pid, mapping, file: record.file_id });
                        }
                    }
                }
            }
        }
        self.due = started + started.elapsed() * SHARE;
        found
    }
}

/// Whether a record may be about this mapping. Inode numbers cannot be compared: on overlayfs a record has that of the
/// layer.
fn is_of(record: &ExecMapping, mapping: &ExecutableMapping) -> bool {
    let name = record.file.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let inside = (mapping.start..mapping.end).contains(&record.address);
    let named = mapping.path.file_name().is_some_and(|own| own.as_bytes() == name);
    inside && named && record.address - mapping.start + mapping.offset == record.offset
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(address: u64, offset: u64, file: &str) -> ExecMapping {
        ExecMapping { pid: 0, address, len: 0x1000, offset, file: file.into(), file_id: None }
    }

    /// A record matches a mapping of a file of that name at the same place, whatever path of its folder the process's namespace shows, and
    /// however much of it is one mapping.
    #[test]
    fn same_mapping() {
        let mapping = ExecutableMapping {
            start: 0x7000,
            end: 0x9000,
            offset: 0x2000,
            inode: 7,
            path: "/layer/usr/lib/libruby.so".into(),
        };
        assert!(is_of(&record(0x7000, 0x2000, "/usr/lib/libruby.so"), &mapping));
        assert!(is_of(&record(0x8000, 0x3000, "/usr/lib/libruby.so"), &mapping));
        for (address, offset, file) in [
            (0x7000, 0x3000, "/usr/lib/libruby.so"),
            (0x9000, 0x4000, "/usr/lib/libruby.so"),
            (0x7000, 0x2000, "/usr/lib/libc.so"),
        ] {
            assert!(!is_of(&record(address, offset, file), &mapping), "{address:#x} {offset:#x} {file}");
        }
    }

    /// This test's own program is found by its address; records that are not of a file, or of a file known to contain no Ruby, are skipped.
    #[test]
    fn finds_itself() {
        let now = Instant::now();
        let mut unattributed =
            UnattributedMappings { wanted: Vec::new(), no_ruby: HashSet::new(), known_since: now, due: now };
        let own = mappings::of_process(std::process::id()).unwrap().remove(0);
        let known = FileId { device: (8, 1), inode: 7, generation: 0 };
        let file = own.path.to_string_lossy().into_owned();
        unattributed.no_ruby(known);
        unattributed.add(record(own.start, own.offset, "//anon"));
        unattributed.add(ExecMapping { file_id: Some(known), ..record(own.start, own.offset, &file) });
        assert_eq!(unattributed.wait(), None);
        unattributed.add(record(own.start, own.offset, &file));
        assert!(unattributed.wait().is_some());
        let found = unattributed.find();
        assert!(found.iter().any(|found| found.pid == std::process::id() && found.mapping == own));
        assert_eq!(unattributed.wait(), None);
    }
}
