//! Attaching the probes of requests and registering the processes whose requests are traced.

use std::{
    fs::File,
    num::NonZeroU32,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use aya::{
    Ebpf,
    maps::{HashMap, MapData, RingBuf},
    programs::{CgroupAttachMode, CgroupSkbAttachType, Program, cgroup_skb::CgroupSkbLink},
};
use gctrace_common::request::{MAX_ARRIVALS, MAX_CONNECTIONS, Parsed};

use super::{
    Probes,
    uprobes::{Scope, Uprobe},
};
use crate::{
    address::FileOffset,
    bpf::{
        errors::{AttachError, LoadError, brief},
        links::{self, Link},
        lru,
        programs::load_late,
        requests::{ARRIVALS_PROGRAM, BLOCKING_PROGRAM, JOBS_PROGRAM, PROGRAM, map},
        rings::{drain, take},
        sample::cpus,
    },
    ruby::{blocking::BlockingSite, jobs::JobSite, requests::RequestSite},
};

impl Probes {
    /// Whether requests can be traced: the kernel must identify the site of a hit (attach cookies, Linux 5.15).
    pub fn sees_requests(&self) -> bool {
        self.servers.is_some()
    }

    /// Whether one link attaches all sites of a file, so that attaching per process is cheap (Linux 6.11). Otherwise each probe is a
    /// perf event, and closing one takes the kernel up to 0.4 s.
    pub fn attaches_files(&self) -> bool {
        self.multi.is_some()
    }

    /// Attaches the request probes of a file.
    ///
    /// # Errors
    ///
    /// The kernel refuses a probe; those already attached are detached.
    pub fn attach_requests(
        &mut self,
        sites: &[RequestSite],
        path: &Path,
        scope: Scope,
    ) -> Result<RequestLinks, AttachError> {
        let probes = sites.iter().map(|site| (PROGRAM, "request", site.file_offset, site.point as u64));
        self.attach_calls(probes, path, scope)
    }

    /// Attaches the probes of a file that trace one process's jobs.
    ///
    /// # Errors
    ///
    /// As for [`Probes::attach_requests`].
    pub fn attach_jobs(
        &mut self,
        sites: &[JobSite],
        path: &Path,
        pid: NonZeroU32,
    ) -> Result<RequestLinks, AttachError> {
        let probes = sites.iter().map(|site| (JOBS_PROGRAM, "job", site.file_offset, site.point as u64));
        self.attach_calls(probes, path, Scope::One(pid))
    }

    /// Attaches the probes of a file that trace requests of servers whose threads block.
    ///
    /// # Errors
    ///
    /// As for [`Probes::attach_requests`].
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

    /// Detaches the probes of files; returns when they are detached.
    pub fn detach_requests(&mut self, all: impl IntoIterator<Item = RequestLinks>) {
        links::detach(self.take_requests(all));
    }

    /// Detaches the probes of processes that have ended, in the background: the kernel takes up to 0.1 s for each, and when a
    /// cluster with hundreds of workers restarts, new workers must not wait for that.
    pub fn detach_unused_requests(&mut self, all: impl IntoIterator<Item = RequestLinks>) {
        let links = self.take_requests(all);
        if links.is_empty() {
            return;
        }
        // If no thread can be spawned, the closure is dropped here and with it the links.
        let spawned =
            std::thread::Builder::new().name("gctrace-detach".to_owned()).spawn(|| links::detach(links));
        if let Err(error) = spawned {
            log::debug!("starting a thread that detaches probes: {error}");
        }
    }

    /// Keeps the probes of files until everything is detached at once, when this is dropped.
    pub fn detach_requests_last(&mut self, all: impl IntoIterator<Item = RequestLinks>) {
        let links = self.take_requests(all);
        self.lasting.extend(links);
    }

    fn take_requests(&mut self, all: impl IntoIterator<Item = RequestLinks>) -> Vec<Link> {
        let mut links = Vec::new();
        for file in all {
            self.attached -= file.sites;
            links.extend(file.links);
        }
        links
    }

    /// Starts recording when packets with data arrive for sockets of a cgroup (v2). Times recorded earlier are discarded: packets may
    /// have arrived unseen since then.
    ///
    /// # Errors
    ///
    /// The kernel cannot do it, or another program is attached to the cgroup exclusively.
    pub fn attach_arrivals(&mut self, cgroup: &File) -> Result<ArrivalsLink, String> {
        let program = self.ebpf.program_mut(ARRIVALS_PROGRAM).ok_or("the object lacks the program")?;
        let failed = |error: &(dyn std::error::Error + 'static)| brief(error);
        load_late(program).map_err(|error| failed(&error))?;
        let Program::CgroupSkb(program) = program else {
            return Err("the program is of another type".to_owned());
        };
        if let Some(servers) = &mut self.servers {
            servers.forget_arrivals();
        }
        // Programs that others have attached, or will attach, are unaffected: links share a cgroup.
        let link = program.attach(cgroup, CgroupSkbAttachType::Ingress, CgroupAttachMode::Single);
        let link = link.and_then(|link| program.take_link(link)).map_err(|error| failed(&error))?;
        Ok(ArrivalsLink { _detaches_when_dropped: link })
    }

    /// Starts tracing the requests or the jobs of a process (`SERVES_HTTP`, `RUNS_JOBS` of `gctrace_common`). Removes stale state first: that of
    /// an earlier process with this pid, or of the program that it replaced. The kernel closes connections at exec and exit, which is not seen.
    ///
    /// # Errors
    ///
    /// The map rejects the entry.
    pub fn add_server(&mut self, pid: u32, kind: u32) -> Result<(), AttachError> {
        let Some(servers) = &mut self.servers else { return Ok(()) };
        let error = |source| AttachError::Map { map: "SERVERS", source: Box::new(source) };
        servers.forget(pid);
        servers.pids.insert(pid, kind, 0).map_err(error)
    }

    /// Whether its requests or jobs are traced. The BPF programs remove a process that exits or execs.
    pub fn is_server(&self, pid: u32) -> bool {
        self.server_kinds(pid).is_some()
    }

    /// The kinds of server and other flags of a process ([`gctrace_common::blocking`]); `None` if it is not traced.
    pub fn server_kinds(&self, pid: u32) -> Option<u32> {
        self.servers.as_ref()?.pids.get(&pid, 0).ok()
    }

    /// Stops tracing the requests of a process.
    pub fn remove_server(&mut self, pid: u32) {
        if let Some(servers) = &mut self.servers {
            let _may_have_ended = servers.pids.remove(&pid);
            servers.forget(pid);
        }
    }

    /// A descriptor that is readable when processes that are not servers have started to listen.
    pub fn listening_fd(&self) -> Option<BorrowedFd<'_>> {
        self.servers.as_ref().map(|servers| servers.listening.as_fd())
    }

    /// The processes that have started to listen since the last call.
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

/// The link of a cgroup's packet program; detaches when dropped.
pub struct ArrivalsLink {
    _detaches_when_dropped: CgroupSkbLink,
}

/// The links of a file's probes.
#[derive(Default)]
pub struct RequestLinks {
    links: Vec<Link>,
    sites: usize,
}

/// A `ParserKey`: the parser, and the process in the low half.
type RawParserKey = [u64; 2];

/// The processes whose requests are traced, and the state of their connections.
pub(super) struct Servers {
    pids: HashMap<MapData, u32, u32>,
    /// Keyed by `tgid << 32 | fd`.
    connections: HashMap<MapData, u64, u64>,
    parsers: HashMap<MapData, RawParserKey, [u8; size_of::<Parsed>()]>,
    /// Keyed by the socket number.
    arrivals: HashMap<MapData, u64, u64>,
    listening: RingBuf<MapData>,
    /// Number of CPUs that the host may have, on which the sizes of maps depend.
    cpus: u32,
}

impl Servers {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        Ok(Self {
            pids: map(ebpf, "SERVERS")?,
            connections: map(ebpf, "CONNECTIONS")?,
            parsers: map(ebpf, "PARSERS")?,
            arrivals: map(ebpf, "ARRIVALS")?,
            listening: take(ebpf, "LISTEN_RING")?,
            cpus: cpus()?,
        })
    }

    /// Removes the state of the connections of a process that is no longer a server.
    fn forget(&mut self, pid: u32) {
        // Without a limit, iterating over a map that changes meanwhile might not end.
        let most = 2 * lru::entries(MAX_CONNECTIONS, self.cpus) as usize;
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
        let most = 2 * lru::entries(MAX_ARRIVALS, self.cpus) as usize;
        let sockets: Vec<u64> = self.arrivals.keys().take(most).flatten().collect();
        for socket in sockets {
            let _may_be_evicted = self.arrivals.remove(&socket);
        }
    }
}
