//! Names by which processes are selected.

use aya::{
    EbpfLoader,
    maps::{HashMap, MapData},
};
use gctrace_common::config::{MAX_NAMES, NAME_READ};

use super::{AttachError, Probes};

/// Size of a thread's name in the kernel, with the terminating zero (`TASK_COMM_LEN`, include/linux/sched.h).
const COMM: usize = 16;

/// Makes the maps as large as this run needs them.
pub(in crate::bpf) fn size_maps(loader: &mut EbpfLoader<'_>, names: bool) {
    if !names {
        loader.map_max_entries("ASKED", 1);
    }
}

/// The maps of names.
pub(super) struct Names {
    pub(super) names: HashMap<MapData, [u8; COMM], u32>,
    pub(super) asked: HashMap<MapData, u32, u32>,
}

/// A name as the kernel keeps it: truncated, NUL padded.
fn comm(name: &str) -> [u8; COMM] {
    let mut comm = [0; COMM];
    let length = name.len().min(COMM - 1);
    comm[..length].copy_from_slice(&name.as_bytes()[..length]);
    comm
}

impl Probes {
    /// Selects Ruby programs whose main thread has one of these names when they start. Returns how many of the names there is no room for.
    pub fn select_names(&mut self, names: &[String]) -> Result<usize, AttachError> {
        let (now, later) = names.split_at(names.len().min(MAX_NAMES as usize));
        for name in now {
            let inserted = self.names.names.insert(comm(name), 0, 0);
            inserted.map_err(|source| AttachError::Map { map: "NAMES", source: Box::new(source) })?;
        }
        Ok(later.len())
    }

    /// Records that the name of a process was read: if the process is not selected, that is because of its name.
    pub fn name_was_read(&mut self, pid: u32) {
        if let Err(error) = self.names.asked.insert(pid, NAME_READ, 0) {
            log::debug!("pid {pid}: {error}");
        }
    }

    /// Forgets that the name of a process was read.
    pub fn name_was_not_read(&mut self, pid: u32) {
        if let Err(error) = self.names.asked.remove(&pid) {
            log::trace!("pid {pid}: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are cut as the kernel cuts them.
    #[test]
    fn as_in_the_kernel() {
        assert_eq!(&comm("ruby")[..6], b"ruby\0\0");
        assert_eq!(&comm("a-very-long-program"), b"a-very-long-pro\0");
        assert_eq!(comm("a-very-long-pro"), comm("a-very-long-program"));
    }
}
