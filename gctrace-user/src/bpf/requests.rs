//! Attaching the probes of requests, and reading what they emit.

use std::{
    collections::BTreeMap,
    fs::File,
    num::NonZeroU32,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{HashMap, MapData, RingBuf},
    programs::{CgroupAttachMode, CgroupSkbAttachType, Program, cgroup_skb::CgroupSkbLink},
};
use gctrace_common::{
    config::ProcessEntry,
    gvl::MAX_OWN_TIMES,
    job::MAX_FETCHERS,
    request::{
        MAX_ARRIVALS, MAX_CONNECTIONS, MAX_EXECS, MAX_SERVERS, MAX_SERVING, Parsed, REQUEST_RING_BYTES,
        Serving, SocketLayout, UNIT_RING_BYTES,
    },
};

use super::{
    AttachError, Probes, Scope, brief,
    gvl::shared,
    kernel_types,
    load::{LoadError, load_late},
    rings::{drain, take},
    uprobes::{Link, Uprobe},
};
use crate::{
    address::FileOffset,
    ruby::{blocking::BlockingSite, jobs::JobSite, requests::RequestSite},
};

/// The program at the calls of a server.
pub(super) const PROGRAM: &str = "request_hit";
/// The program at the calls of a process that runs jobs.
pub(super) const JOBS_PROGRAM: &str = "job_hit";
/// The program at the calls of a server whose threads block.
pub(super) const BLOCKING_PROGRAM: &str = "blocking_hit";
/// The one for packets that servers get.
pub(super) const ARRIVALS_PROGRAM: &str = "request_data";
/// Maps and how many entries they have.
const MAPS: [(&str, u32); 8] = [
    ("ARRIVALS", MAX_ARRIVALS),
    ("EXECS", MAX_EXECS),
    ("FETCHERS", MAX_FETCHERS),
    ("SERVERS", MAX_SERVERS),
    ("OWN_TIMES", MAX_OWN_TIMES),
    ("SERVING", MAX_SERVING),
    ("CONNECTIONS", MAX_CONNECTIONS),
    ("PARSERS", MAX_CONNECTIONS),
];
/// The smallest ring that there is.
const NO_RING_BYTES: u32 = 4096;

/// How requests are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestOptions {
    /// Bytes of their ring.
    pub ring_bytes: u32,
    /// Copy the state of the VM where a request or a job begins and ends.
    pub states: bool,
}

impl RequestOptions {
    /// With this ring, or with one of the usual size.
    pub fn new(ring_bytes: Option<u32>, states: bool) -> Self {
        let usual = if states { UNIT_RING_BYTES } else { REQUEST_RING_BYTES };
        Self { ring_bytes: ring_bytes.unwrap_or(usual), states }
    }
}

/// Makes the maps small where they are not needed.
pub(super) fn size_maps(loader: &mut EbpfLoader<'_>, requests: Option<RequestOptions>) {
    let watched = requests.is_some();
    for (map, entries) in MAPS {
        loader.map_max_entries(map, if watched { entries } else { 1 });
    }
    loader.map_max_entries("REQUEST_RING", requests.map_or(NO_RING_BYTES, |requests| requests.ring_bytes));
}

/// Where the kernel keeps when data came on a connection; zeros if no requests are watched or the kernel does not describe it.
pub(super) fn socket_layout(watched: bool) -> SocketLayout {
    if !watched {
        return SocketLayout::default();
    }
    kernel_types::socket().unwrap_or_else(|error| {
        log::info!("{error}; queue times of requests are not known");
        SocketLayout::default()
    })
}

impl Probes {
    /// Whether requests can be seen: the kernel says at which site a hit is (attach cookies, Linux 5.15).
    pub fn sees_requests(&self) -> bool {
        self.servers.is_some()
    }

    /// Whether one link attaches all sites of a file, so that a process can have them for itself at little cost (Linux 6.11). Otherwise each is a
    /// perf event, whose end takes the kernel up to 0.4 s.
    pub fn attaches_files(&self) -> bool {
        self.multi.is_some()
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
        let probes = sites.iter().map(|site| (PROGRAM, "request", site.file_offset, site.point as u64));
        self.attach_calls(probes, path, scope)
    }

    /// Attaches the probes of a file by which one process's jobs are seen.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn attach_jobs(
        &mut self,
        sites: &[JobSite],
        path: &Path,
        pid: NonZeroU32,
    ) -> Result<RequestLinks, AttachError> {
        let probes = sites.iter().map(|site| (JOBS_PROGRAM, "job", site.file_offset, site.point as u64));
        self.attach_calls(probes, path, Scope::One(pid))
    }

    /// Attaches the probes of a file by which requests of servers are seen whose threads block.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn attach_blocking(
        &mut self,
        sites: &[BlockingSite],
        path: &Path,
        scope: Scope,
    ) -> Result<RequestLinks, AttachError> {
        let probes =
            sites.iter().map(|site| (BLOCKING_PROGRAM, "blocking", site.file_offset, site.point as u64));
        self.attach_calls(probes, path, scope)
    }

    fn attach_calls(
        &mut self,
        calls: impl Iterator<Item = (&'static str, &'static str, FileOffset, u64)>,
        path: &Path,
        scope: Scope,
    ) -> Result<RequestLinks, AttachError> {
        let probes: Vec<Uprobe> = calls
            .map(|(program, point, offset, cookie)| Uprobe {
                program,
                point,
                offset: offset.0,
                cookie: Some(cookie),
                at_return: false,
            })
            .collect();
        let links = self.attach_uprobes(&probes, path, scope)?;
        self.attached += probes.len();
        Ok(RequestLinks { links, sites: probes.len() })
    }

    /// Detaches them.
    pub fn detach_requests(&mut self, links: RequestLinks) {
        self.attached -= links.sites;
        self.detach_uprobes(links.links);
    }

    /// Has the time noted at which packets with data come for sockets of a cgroup (v2). What was noted before is forgotten: packets may
    /// have come since that nobody saw.
    ///
    /// # Errors
    ///
    /// The kernel cannot do it, or somebody else has the cgroup for himself.
    pub fn attach_arrivals(&mut self, cgroup: &File) -> Result<ArrivalsLink, String> {
        let program = self.ebpf.program_mut(ARRIVALS_PROGRAM).ok_or("the object lacks the program")?;
        let failed = |error: &dyn std::error::Error| brief(error);
        load_late(program).map_err(|error| failed(&error))?;
        let Program::CgroupSkb(program) = program else {
            return Err("the program is of another type".to_owned());
        };
        if let Some(servers) = &mut self.servers {
            servers.forget_arrivals();
        }
        // Programs that others have there, or will have, stay: links share a cgroup.
        let link = program.attach(cgroup, CgroupSkbAttachType::Ingress, CgroupAttachMode::Single);
        let link = link.and_then(|link| program.take_link(link)).map_err(|error| failed(&error))?;
        Ok(ArrivalsLink { _detaches_when_dropped: link })
    }

    /// From now on the requests, or the jobs, of a process are seen ([`SERVES_HTTP`], [`RUNS_JOBS`]). What is left of another one of this pid, or of the program that it
    /// replaced, is removed before: connections that the kernel closed at an exec or an end were not seen to close.
    ///
    /// # Errors
    ///
    /// The map does not take it.
    pub fn add_server(&mut self, pid: u32, kind: u32) -> Result<(), AttachError> {
        let Some(servers) = &mut self.servers else { return Ok(()) };
        let error = |source| AttachError::Map { map: "SERVERS", source: Box::new(source) };
        servers.forget(pid);
        servers.pids.insert(pid, kind, 0).map_err(error)
    }

    /// Whether they are. The kernel forgets a process that ends or becomes another program.
    pub fn is_server(&self, pid: u32) -> bool {
        self.server_kinds(pid).is_some()
    }

    /// What kinds of a server it is, and more ([`gctrace_common::blocking`]).
    pub fn server_kinds(&self, pid: u32) -> Option<u32> {
        self.servers.as_ref()?.pids.get(&pid, 0).ok()
    }

    /// The requests of a process are not seen any more.
    pub fn remove_server(&mut self, pid: u32) {
        if let Some(servers) = &mut self.servers {
            let _may_have_ended = servers.pids.remove(&pid);
            servers.forget(pid);
        }
    }

    /// Readable when processes that are no servers have begun to listen.
    pub fn listening_fd(&self) -> Option<BorrowedFd<'_>> {
        self.servers.as_ref().map(|servers| servers.listening.as_fd())
    }

    /// Those that have, since this was asked last.
    pub fn listening(&mut self) -> Vec<u32> {
        let mut pids = Vec::new();
        if let Some(servers) = &mut self.servers {
            drain(&mut servers.listening, usize::MAX, |bytes| {
                pids.extend(<[u8; 8]>::try_from(bytes).map(|bytes| u64::from_ne_bytes(bytes) as u32));
            });
        }
        pids
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
    /// Keyed by the number of the socket.
    arrivals: HashMap<MapData, u64, u64>,
    listening: RingBuf<MapData>,
}

impl Servers {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        Ok(Self {
            pids: map(ebpf, "SERVERS")?,
            connections: map(ebpf, "CONNECTIONS")?,
            parsers: map(ebpf, "PARSERS")?,
            arrivals: map(ebpf, "ARRIVALS")?,
            listening: take(ebpf, "LISTEN_RING")?,
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

    fn forget_arrivals(&mut self) {
        let most = 2 * MAX_ARRIVALS as usize;
        let sockets: Vec<u64> = self.arrivals.keys().take(most).flatten().collect();
        for socket in sockets {
            let _may_be_evicted = self.arrivals.remove(&socket);
        }
    }
}

fn map<K: Pod, V: Pod>(ebpf: &mut Ebpf, name: &'static str) -> Result<HashMap<MapData, K, V>, LoadError> {
    let map = ebpf.take_map(name).ok_or(LoadError::Missing(name))?;
    HashMap::try_from(map).map_err(|source| LoadError::Map { map: name, source })
}

/// What keeps the packets of a cgroup looked at.
pub struct ArrivalsLink {
    _detaches_when_dropped: CgroupSkbLink,
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
    /// A second handle; the programs and who attaches them write there.
    processes: HashMap<MapData, u32, ProcessEntry>,
}

impl RequestReader {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        let processes = HashMap::try_from(shared(ebpf, "PROCESSES")?)
            .map_err(|source| LoadError::Map { map: "PROCESSES", source })?;
        Ok(Self { ring: take(ebpf, "REQUEST_RING")?, serving: map(ebpf, "SERVING")?, processes })
    }

    /// How many GC records of a process have been numbered so far, lost ones included. `None`: the kernel does not follow it.
    pub fn numbered(&self, pid: u32) -> Option<u64> {
        self.processes.get(&pid, 0).ok().map(|entry| entry.seq)
    }

    /// Hands up to `limit` records to `sink`; returns how many there were.
    pub fn drain(&mut self, limit: usize, sink: impl FnMut(&[u8])) -> usize {
        drain(&mut self.ring, limit, sink)
    }

    /// The threads that have been seen to take a request or a job, by process, and whether each serves one now. `None`: it has asked for the
    /// state of a connection whose parser is not known, which the application may have done, too.
    pub fn serving(&self) -> BTreeMap<u32, BTreeMap<u32, Option<bool>>> {
        let mut processes: BTreeMap<u32, BTreeMap<u32, Option<bool>>> = BTreeMap::new();
        // One that is removed meanwhile has the kernel begin again.
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

    /// How many requests are being served, known or not.
    pub fn open(&self) -> u64 {
        let entries = self.serving.iter().take(2 * MAX_SERVING as usize);
        entries.filter(|entry| entry.as_ref().is_ok_and(|(_, serving)| serving.begin_ns != 0)).count() as u64
    }
}
