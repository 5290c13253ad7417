//! Requests: configuration and maps of their programs, and reading their records.

use std::collections::BTreeMap;

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{HashMap, MapData, RingBuf},
};
use gctrace_common::{
    config::ProcessEntry,
    gvl::MAX_OWN_TIMES,
    job::MAX_FETCHERS,
    request::{
        MAX_ARRIVALS, MAX_CONNECTIONS, MAX_SERVERS, MAX_SERVING, REQUEST_RING_BYTES, Serving, SocketLayout,
        UNIT_RING_BYTES,
    },
};

use super::{
    errors::LoadError,
    kernel_types, lru,
    rings::{drain, shared, take},
    sample::cpus,
};

/// The program at the calls of a server.
pub(super) const PROGRAM: &str = "request_hit";
/// The program at the calls of a process that runs jobs.
pub(super) const JOBS_PROGRAM: &str = "job_hit";
/// The program at the calls of a server whose threads block.
pub(super) const BLOCKING_PROGRAM: &str = "blocking_hit";
/// The program at packets that servers receive.
pub(super) const ARRIVALS_PROGRAM: &str = "request_data";
/// Maps and their number of entries.
const MAPS: [(&str, u32); 3] =
    [("FETCHERS", MAX_FETCHERS), ("SERVERS", MAX_SERVERS), ("SERVING", MAX_SERVING)];
/// LRU maps, which have more entries on hosts with many CPUs.
const LRU_MAPS: [(&str, u32); 4] = [
    ("ARRIVALS", MAX_ARRIVALS),
    ("OWN_TIMES", MAX_OWN_TIMES),
    ("CONNECTIONS", MAX_CONNECTIONS),
    ("PARSERS", MAX_CONNECTIONS),
];
/// An LRU map that only growth and copied states need.
const MEMORY_MAP: &str = "MEMORY_SCRATCH";
/// The smallest possible ring size (one page), for rings that are not used.
const NO_RING_BYTES: u32 = 4096;

/// How requests are traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestOptions {
    /// Size of their ring in bytes.
    pub ring_bytes: u32,
    /// Whether to copy the state of the VM when a request or a job begins and ends.
    pub states: bool,
}

impl RequestOptions {
    /// Options with a ring of this size; `None`: the default size.
    pub fn new(ring_bytes: Option<u32>, states: bool) -> Self {
        let usual = if states { UNIT_RING_BYTES } else { REQUEST_RING_BYTES };
        Self { ring_bytes: ring_bytes.unwrap_or(usual), states }
    }
}

/// Shrinks the maps if requests are not traced. `alloc`: whether allocation is watched.
pub(super) fn size_maps(
    loader: &mut EbpfLoader<'_>,
    requests: Option<RequestOptions>,
    alloc: bool,
) -> Result<(), LoadError> {
    let (watched, cpus) = (requests.is_some(), cpus()?);
    let lru = LRU_MAPS.map(|(map, least)| (map, lru::entries(least, cpus)));
    for (map, entries) in MAPS.into_iter().chain(lru) {
        loader.map_max_entries(map, if watched { entries } else { 1 });
    }
    let memory = requests.is_some_and(|requests| requests.states || alloc);
    loader.map_max_entries(MEMORY_MAP, if memory { lru::entries(MAX_OWN_TIMES, cpus) } else { 1 });
    loader.map_max_entries("REQUEST_RING", requests.map_or(NO_RING_BYTES, |requests| requests.ring_bytes));
    Ok(())
}

/// Where the kernel stores the time of a connection's last data; zeros if requests are not traced or BTF does not describe it.
pub(super) fn socket_layout(watched: bool) -> SocketLayout {
    if !watched {
        return SocketLayout::default();
    }
    kernel_types::socket().unwrap_or_else(|error| {
        log::info!("{error}; queue times of requests are not known");
        SocketLayout::default()
    })
}

/// Where the kernel counts the page faults of a thread; 0 if requests are not traced or BTF does not describe it.
pub(super) fn faults_offset(watched: bool) -> u32 {
    if !watched {
        return 0;
    }
    kernel_types::task_faults().unwrap_or_else(|error| {
        log::info!("{error}; page faults of requests are not known");
        0
    })
}

/// Takes a map out of the object.
pub(super) fn map<K: Pod, V: Pod>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<HashMap<MapData, K, V>, LoadError> {
    let map = ebpf.take_map(name).ok_or(LoadError::Missing(name))?;
    HashMap::try_from(map).map_err(|source| LoadError::Map { map: name, source })
}

/// Reads requests.
pub struct RequestReader {
    ring: RingBuf<MapData>,
    serving: HashMap<MapData, u32, Serving>,
    /// A second handle; the programs and [`super::Probes`] write to this map.
    processes: HashMap<MapData, u32, ProcessEntry>,
}

impl RequestReader {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        let processes = HashMap::try_from(shared(ebpf, "PROCESSES")?)
            .map_err(|source| LoadError::Map { map: "PROCESSES", source })?;
        Ok(Self { ring: take(ebpf, "REQUEST_RING")?, serving: map(ebpf, "SERVING")?, processes })
    }

    /// Number of GC records of a process so far, including lost ones. `None` if the programs do not follow the process.
    pub fn numbered(&self, pid: u32) -> Option<u64> {
        self.processes.get(&pid, 0).ok().map(|entry| entry.seq)
    }

    /// Passes up to `limit` records to `sink`; returns their number.
    pub fn drain(&mut self, limit: usize, sink: impl FnMut(&[u8])) -> usize {
        drain(&mut self.ring, limit, sink)
    }

    /// The threads that have been seen to take a request or a job, by process, and whether each is serving one now. `None`: the thread has queried
    /// the state of a connection whose parser is unknown, which may also have been the application.
    pub fn serving(&self) -> BTreeMap<u32, BTreeMap<u32, Option<bool>>> {
        let mut processes: BTreeMap<u32, BTreeMap<u32, Option<bool>>> = BTreeMap::new();
        // If the current entry is removed meanwhile, the kernel restarts the iteration, hence the limit.
        for (tid, serving) in self.serving.iter().take(2 * MAX_SERVING as usize).flatten() {
            let serves = match (serving.begin_ns, serving.parser) {
                (0, _) => Some(false),
                (_, 0) => None,
                _ => Some(true),
            };
            processes.entry(serving.tgid).or_default().insert(tid, serves);
        }
        processes
    }

    /// Number of requests that are being served, whether their parser is known or not.
    pub fn open(&self) -> u64 {
        let entries = self.serving.iter().take(2 * MAX_SERVING as usize);
        entries.filter(|entry| entry.as_ref().is_ok_and(|(_, serving)| serving.begin_ns != 0)).count() as u64
    }
}
