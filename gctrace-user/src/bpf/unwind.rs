//! The maps that belong to native code: unwind tables, and where libraries publish spans.

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, MapError},
};
use gctrace_common::{config::ThreadContext, unwind::Chunk};

use super::{errors::LoadError, gone};

/// All of them.
pub struct NativeMaps {
    /// Where the programs look for unwind tables.
    pub unwind: UnwindMaps,
    /// Where they look for the variables by which spans are published.
    pub contexts: ThreadContexts,
}

/// Where the programs look for unwind tables.
pub struct UnwindMaps {
    chunks: Array<MapData, Chunk>,
    processes: HashMap<MapData, u32, u32>,
}

/// Where the programs look for the variables by which spans are published.
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
    /// Says where the threads of a process publish spans.
    pub fn set(&mut self, pid: u32, place: ThreadContext) -> Result<(), MapError> {
        self.0.insert(pid, place, 0)
    }

    /// Forgets a process. The programs do so, too, when it ends or replaces its program.
    pub fn forget(&mut self, pid: u32) -> Result<(), MapError> {
        gone(self.0.remove(&pid))
    }
}

impl UnwindMaps {
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
