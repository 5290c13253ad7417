//! When processes started their programs.

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, MapData},
};
use gctrace_common::config::MAX_EXECS;

use super::{errors::LoadError, lru, requests::map};

const MAP: &str = "EXECS";

/// The times of execs that were seen, for all processes of the host.
pub struct ExecReader(HashMap<MapData, u32, u64>);

impl ExecReader {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        Ok(Self(map(ebpf, MAP)?))
    }

    /// When a process started its present program by an exec, `CLOCK_MONOTONIC` nanoseconds; `None` if that was not seen, or it has ended.
    pub fn begun_ns(&self, pid: u32) -> Option<u64> {
        self.0.get(&pid, 0).ok()
    }
}

pub(super) fn size_map(loader: &mut EbpfLoader<'_>, cpus: u32) {
    loader.map_max_entries(MAP, lru::entries(MAX_EXECS, cpus));
}
