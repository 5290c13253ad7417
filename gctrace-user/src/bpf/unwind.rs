//! The maps for native code: unwind tables, and where libraries publish spans.

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, MapError},
};
use gctrace_common::{config::ThreadContext, unwind::Chunk};

use super::{errors::LoadError, gone};

/// All maps for native code.
pub struct NativeMaps {
    /// The unwind tables.
    pub unwind: UnwindMaps,
    /// The locations of the variables through which spans are published.
    pub contexts: ThreadContexts,
}

/// The maps in which the programs look up unwind tables.
pub struct UnwindMaps {
    chunks: Array<MapData, Chunk>,
    processes: HashMap<MapData, u32, u32>,
}

/// The map in which the programs look up the variables through which spans are published, by process.
pub struct ThreadContexts(HashMap<MapData, u32, ThreadContext>);

impl NativeMaps {
    /// Names of the maps: chunks, processes, thread contexts.
    pub(super) const NAMES: [&str; 3] = ["CHUNKS", "UNWOUND", "THREAD_CONTEXTS"];

    /// Takes the maps out of a loaded object.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        let [chunks, processes, contexts] = Self::NAMES;
        let mut map = |name| ebpf.take_map(name).ok_or(LoadError::Missing(name));
        let error = |map| move |source| LoadError::Map { map, source };
        Ok(Self {
            unwind: UnwindMaps {
                chunks: Array::try_from(map(chunks)?).map_err(error(chunks))?,
                processes: HashMap::try_from(map(processes)?).map_err(error(processes))?,
            },
            contexts: ThreadContexts(HashMap::try_from(map(contexts)?).map_err(error(contexts))?),
        })
    }
}

impl ThreadContexts {
    /// Sets where the threads of a process publish spans.
    pub fn set(&mut self, pid: u32, place: ThreadContext) -> Result<(), MapError> {
        self.0.insert(pid, place, 0)
    }

    /// Removes a process. The programs also do so when it exits or execs.
    pub fn forget(&mut self, pid: u32) -> Result<(), MapError> {
        gone(self.0.remove(&pid))
    }
}

impl UnwindMaps {
    /// Number of chunks.
    pub fn chunks(&self) -> u32 {
        self.chunks.len()
    }

    /// Writes a chunk. No process may refer to it.
    pub fn write(&mut self, number: u32, chunk: &Chunk) -> Result<(), MapError> {
        self.chunks.set(number, chunk, 0)
    }

    /// Sets the chunk with the mappings of a process.
    pub fn set(&mut self, pid: u32, chunk: u32) -> Result<(), MapError> {
        self.processes.insert(pid, chunk, 0)
    }

    /// Whether the stacks of a process are unwound. The programs remove the process when it exits or execs.
    pub fn has(&self, pid: u32) -> bool {
        self.processes.get(&pid, 0).is_ok()
    }

    /// Removes a process.
    pub fn forget(&mut self, pid: u32) -> Result<(), MapError> {
        gone(self.processes.remove(&pid))
    }
}
