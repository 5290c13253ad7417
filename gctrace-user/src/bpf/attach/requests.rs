//! Attaching the probes of requests, and saying whose are seen.

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
        programs::load_late,
        requests::{ARRIVALS_PROGRAM, BLOCKING_PROGRAM, JOBS_PROGRAM, PROGRAM, map},
        rings::{drain, take},
    },
    ruby::{blocking::BlockingSite, jobs::JobSite, requests::RequestSite},
};

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
        links::detach(links.links);
    }

    /// Has the time noted at which packets with data come for sockets of a cgroup (v2). What was noted before is forgotten: packets may
    /// have come since that nobody saw.
    ///
    /// # Errors
    ///
    /// The kernel cannot do it, or somebody else has the cgroup for himself.
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

/// What keeps the packets of a cgroup looked at.
pub struct ArrivalsLink {
    _detaches_when_dropped: CgroupSkbLink,
}

/// What keeps the probes of a file attached.
pub struct RequestLinks {
    links: Vec<Link>,
    sites: usize,
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
