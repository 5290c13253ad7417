//! Attaching the probes of requests, and reading what they emit.

use std::path::Path;

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{HashMap, MapData, RingBuf},
};
use gctrace_common::request::{MAX_CONNECTIONS, MAX_SERVERS, MAX_SERVING, Parsed, Serving};

use super::{
    AttachError, Probes, Scope,
    load::LoadError,
    rings::{drain, take},
    uprobes::{Link, Uprobe},
};
use crate::ruby::requests::RequestSite;

/// The program.
pub(super) const PROGRAM: &str = "request_hit";
/// Maps and how many entries they have.
const MAPS: [(&str, u32); 4] = [
    ("SERVERS", MAX_SERVERS),
    ("SERVING", MAX_SERVING),
    ("CONNECTIONS", MAX_CONNECTIONS),
    ("PARSERS", MAX_CONNECTIONS),
];
/// The smallest ring that there is.
const NO_RING_BYTES: u32 = 4096;

/// Makes the maps small where they are not needed.
pub(super) fn size_maps(loader: &mut EbpfLoader<'_>, ring_bytes: Option<u32>) {
    let watched = ring_bytes.is_some();
    for (map, entries) in MAPS {
        loader.map_max_entries(map, if watched { entries } else { 1 });
    }
    loader.map_max_entries("REQUEST_RING", ring_bytes.unwrap_or(NO_RING_BYTES));
}

impl Probes {
    /// Whether requests can be seen: the kernel says at which site a hit is (attach cookies, Linux 5.15).
    pub fn sees_requests(&self) -> bool {
        self.servers.is_some()
    }

    /// Attaches the probes of a file.
    ///
    /// # Errors
    ///
    /// The kernel refuses one; those attached already are detached then.
    pub fn attach_requests(
        &mut self,
        sites: &[RequestSite],
        path: &Path,
        scope: Scope,
    ) -> Result<RequestLinks, AttachError> {
        let probes: Vec<Uprobe> = sites
            .iter()
            .map(|site| Uprobe {
                program: PROGRAM,
                point: "request",
                offset: site.file_offset.0,
                cookie: Some(site.point as u64),
                at_return: false,
            })
            .collect();
        let links = self.attach_uprobes(&probes, path, scope)?;
        self.attached += sites.len();
        Ok(RequestLinks { links, sites: sites.len() })
    }

    /// Detaches them.
    pub fn detach_requests(&mut self, links: RequestLinks) {
        self.attached -= links.sites;
        self.detach_uprobes(links.links);
    }

    /// From now on the requests of a process are seen. What is left of another one of this pid, or of the program that it
    /// replaced, is removed before: connections that the kernel closed at an exec or an end were not seen to close.
    ///
    /// # Errors
    ///
    /// The map does not take it.
    pub fn add_server(&mut self, pid: u32) -> Result<(), AttachError> {
        let Some(servers) = &mut self.servers else { return Ok(()) };
        let error = |source| AttachError::Map { map: "SERVERS", source: Box::new(source) };
        servers.forget(pid);
        servers.pids.insert(pid, 1, 0).map_err(error)
    }

    /// Whether they are. The kernel forgets a process that ends or becomes another program.
    pub fn is_server(&self, pid: u32) -> bool {
        self.servers.as_ref().is_some_and(|servers| servers.pids.get(&pid, 0).is_ok())
    }
}

/// A `ParserKey`: the parser, and the process in the low half.
type RawParserKey = [u64; 2];

/// The processes whose requests are seen, and what is known of their connections.
pub(super) struct Servers {
    pids: HashMap<MapData, u32, u32>,
    /// Keyed by `tgid << 32 | fd`.
    connections: HashMap<MapData, u64, u64>,
    parsers: HashMap<MapData, RawParserKey, [u8; size_of::<Parsed>()]>,
}

impl Servers {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        Ok(Self {
            pids: map(ebpf, "SERVERS")?,
            connections: map(ebpf, "CONNECTIONS")?,
            parsers: map(ebpf, "PARSERS")?,
        })
    }

    /// Removes what is known of connections of a process that is not a server now.
    fn forget(&mut self, pid: u32) {
        // A map that changes meanwhile could be walked without end.
        let most = 2 * MAX_CONNECTIONS as usize;
        let of_it = |key: &u64| (key >> 32) as u32 == pid;
        let connections: Vec<u64> = self.connections.keys().take(most).flatten().filter(of_it).collect();
        for key in connections {
            let _may_be_evicted = self.connections.remove(&key);
        }
        let of_it = |key: &RawParserKey| key[1] as u32 == pid;
        let parsers: Vec<RawParserKey> = self.parsers.keys().take(most).flatten().filter(of_it).collect();
        for key in parsers {
            let _may_be_evicted = self.parsers.remove(&key);
        }
    }
}

fn map<K: Pod, V: Pod>(ebpf: &mut Ebpf, name: &'static str) -> Result<HashMap<MapData, K, V>, LoadError> {
    let map = ebpf.take_map(name).ok_or(LoadError::Missing(name))?;
    HashMap::try_from(map).map_err(|source| LoadError::Map { map: name, source })
}

/// What keeps the probes of a file attached.
pub struct RequestLinks {
    links: Vec<Link>,
    sites: usize,
}

/// Reads requests.
pub struct RequestReader {
    ring: RingBuf<MapData>,
    serving: HashMap<MapData, u32, Serving>,
}

impl RequestReader {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        Ok(Self { ring: take(ebpf, "REQUEST_RING")?, serving: map(ebpf, "SERVING")? })
    }

    /// Hands up to `limit` records to `sink`; returns how many there were.
    pub fn drain(&mut self, limit: usize, sink: impl FnMut(&[u8])) -> usize {
        drain(&mut self.ring, limit, sink)
    }

    /// How many requests are being served, known or not.
    pub fn open(&self) -> u64 {
        let entries = self.serving.iter().take(2 * MAX_SERVING as usize);
        entries.filter(|entry| entry.as_ref().is_ok_and(|(_, serving)| serving.begin_ns != 0)).count() as u64
    }
}
