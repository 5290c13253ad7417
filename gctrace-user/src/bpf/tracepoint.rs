//! Formats of tracepoints, as the running kernel declares them.

use std::path::{Path, PathBuf};

use super::errors::{LoadError, brief};

/// The format file of a tracepoint of the running kernel.
pub(super) struct TracepointFormat {
    tracepoint: String,
    path: PathBuf,
    text: String,
}

impl TracepointFormat {
    /// Reads the format file.
    pub(super) fn read(tracefs: &Path, category: &str, name: &str) -> Result<Self, LoadError> {
        let path = tracefs.join(format!("events/{category}/{name}/format"));
        let tracepoint = format!("{category}:{name}");
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Self { tracepoint, path, text }),
            Err(error) => Err(LoadError::TracepointFormat { tracepoint, path, reason: brief(&error) }),
        }
    }

    /// Byte offset of a field in the tracepoint's record.
    pub(super) fn offset(&self, field: &str) -> Result<u32, LoadError> {
        format_offset(&self.text, field).ok_or_else(|| LoadError::TracepointFormat {
            tracepoint: self.tracepoint.clone(),
            path: self.path.clone(),
            reason: format!("it has no field `{field}`"),
        })
    }
}

/// Byte offsets in the records of forks.
#[derive(Clone, Copy, Debug)]
pub(super) struct LifeOffsets {
    /// Offset of `pid` in the record of `task:task_newtask`.
    pub(super) newtask_pid: u32,
    /// Offset of `clone_flags` in that record.
    pub(super) newtask_clone_flags: u32,
}

impl LifeOffsets {
    /// Offsets that the verifier accepts, for loading without attaching.
    pub(super) const TRIED: Self = Self { newtask_pid: 8, newtask_clone_flags: 32 };

    /// Reads the offsets of the running kernel.
    pub(super) fn read(tracefs: &Path) -> Result<Self, LoadError> {
        let newtask = TracepointFormat::read(tracefs, "task", "task_newtask")?;
        Ok(Self { newtask_pid: newtask.offset("pid")?, newtask_clone_flags: newtask.offset("clone_flags")? })
    }
}

/// Finds the offset of a `field:` line in a tracepoint's format file.
fn format_offset(text: &str, field: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut parts = line.trim().split(';').map(str::trim);
        let declared = parts.next()?.strip_prefix("field:")?;
        if declared.rsplit(' ').next()? != field {
            return None;
        }
        parts.next()?.strip_prefix("offset:")?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field offsets are read from the format text, whatever the type of the field is called.
    #[test]
    fn tracepoint_format() {
        let text = "format:\n\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
                    \tfield:pid_t pid;\toffset:8;\tsize:4;\tsigned:1;\n\
                    \tfield:unsigned long clone_flags;\toffset:32;\tsize:8;\tsigned:0;\n";
        assert_eq!(format_offset(text, "pid"), Some(8));
        assert_eq!(format_offset(text, "clone_flags"), Some(32));
        assert_eq!(format_offset(text, "comm"), None);
    }
}
