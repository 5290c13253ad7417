//! The maps with unwind tables.

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, MapError},
};
use gctrace_common::unwind::Chunk;

use super::{gone, load::LoadError};

/// Where the programs look for unwind tables.
pub struct UnwindMaps {
    chunks: Array<MapData, Chunk>,
    processes: HashMap<MapData, u32, u32>,
}

impl UnwindMaps {
    /// Names of the maps: chunks, processes.
    pub(super) const NAMES: [&str; 2] = ["CHUNKS", "UNWOUND"];

    /// Takes the maps out of a loaded object.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        let [chunks, processes] = Self::NAMES;
        let mut map = |name| ebpf.take_map(name).ok_or(LoadError::Missing(name));
        Ok(Self {
            chunks: Array::try_from(map(chunks)?).map_err(|source| LoadError::Map { map: chunks, source })?,
            processes: HashMap::try_from(map(processes)?)
                .map_err(|source| LoadError::Map { map: processes, source })?,
        })
    }

    /// Chunks that there are.
    pub fn chunks(&self) -> u32 {
        self.chunks.len()
    }

    /// Fills a chunk. No process may refer to it.
    pub fn write(&mut self, number: u32, chunk: &Chunk) -> Result<(), MapError> {
        self.chunks.set(number, chunk, 0)
    }

    /// Says where the mappings of a process are.
    pub fn set(&mut self, pid: u32, chunk: u32) -> Result<(), MapError> {
        self.processes.insert(pid, chunk, 0)
    }

    /// Whether the stacks of a process are unwound. The programs forget it when it ends or replaces its program.
    pub fn has(&self, pid: u32) -> bool {
        self.processes.get(&pid, 0).is_ok()
    }

    /// Forgets a process.
    pub fn forget(&mut self, pid: u32) -> Result<(), MapError> {
        gone(self.processes.remove(&pid))
    }
}
