//! Mapping records without usable pids: the kernel reports them in the pid namespace of the process that opened the event, and in
//! a container with a separate one that is 0 for every process outside.
//!
//! Such a record still has the address and the file, so the process is looked for in the host's `/proc`: the one that has
//! that file mapped there. All records that have come meanwhile are looked for at once, and files that are known to hold
//! no Ruby are not looked for at all.

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

/// More records than this are given up for a look at everything.
const MOST: usize = 4096;
/// A file is taken to hold no Ruby this long: what was found for it may have been another one at the same address.
const KNOWN: Duration = Duration::from_mins(1);
/// Looking takes at most one part in this many of the time.
const SHARE: u32 = 10;

/// A mapping of a process that was looked for.
pub(super) struct AttributedMapping {
    pub(super) pid: u32,
    pub(super) mapping: ExecutableMapping,
    /// The file, as the record named it.
    pub(super) file: Option<FileId>,
}

/// The records that wait.
pub(super) struct UnattributedMappings {
    wanted: Vec<ExecMapping>,
    no_ruby: HashSet<FileId>,
    known_since: Instant,
    /// When it may be looked next.
    due: Instant,
}

impl UnattributedMappings {
    /// `None` where records have pids that mean something.
    pub(super) fn expected() -> Option<Self> {
        let now = Instant::now();
        let new = Self { wanted: Vec::new(), no_ruby: HashSet::new(), known_since: now, due: now };
        (!proc_root::shares_pids()).then_some(new)
    }

    /// A record; the processes of files are looked for.
    pub(super) fn add(&mut self, record: ExecMapping) {
        let is_file = record.file.first() == Some(&b'/') && record.file.get(1) != Some(&b'/');
        if is_file && !record.file_id.is_some_and(|file| self.no_ruby.contains(&file)) {
            self.wanted.push(record);
        }
    }

    /// How long until [`UnattributedMappings::find`] looks; `None` if nothing waits.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.wanted.is_empty()).then(|| self.due.saturating_duration_since(Instant::now()))
    }

    /// Whether too many records wait, so that everything must be looked at. They are dropped then.
    pub(super) fn overflowed(&mut self) -> bool {
        let overflowed = self.wanted.len() > MOST;
        if overflowed {
            self.wanted.clear();
        }
        overflowed
    }

    /// A file holds no Ruby.
    pub(super) fn no_ruby(&mut self, file: FileId) {
        self.no_ruby.insert(file);
    }

    /// The processes that have the recorded mappings, if it is time. Mappings that no process has are gone again.
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
                    // A process that is gone, or a thread of the kernel, has none.
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

/// Whether a record can be about this mapping. Inode numbers cannot be compared: on overlayfs a record has that of the
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

    /// Where a record is looked for: the same place of a file of that name, however the process's namespace calls its
    /// folder, and however much of it is one mapping.
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

    /// This test's own program is found by where it lies; what is no file, or known to hold no Ruby, is not looked for.
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
