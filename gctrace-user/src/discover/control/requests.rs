//! Servers: processes that have mapped a web server's parser, and the probes by which their requests are seen.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    fs::File,
    num::NonZeroU32,
    os::unix::fs::MetadataExt as _,
    sync::Arc,
};

use gctrace_common::{blocking::MAY_BE_WEBRICK, request::SERVES_HTTP};

use super::{
    super::{
        cgroups,
        identity::ImageKey,
        mappings::{self, ExecutableMapping},
    },
    Control,
    blocking::{Blocking, is_unicorn},
    images::reopened,
    site_cache::SiteCache,
    unused::Probed,
};
use crate::{
    bpf::{ArrivalsLink, Lease, RequestLinks, Scope, brief},
    console::say,
    host::{called, listens, proc::is_running, proc_root},
    ruby::{
        jobs::JobSite,
        requests::{RequestFile, RequestSite, local_sites, request_sites},
    },
};

/// Bounds the memory for not telling a refusal twice.
const REFUSALS_REMEMBERED: usize = 1024;

/// Servers whose requests are not seen, by the library that they alone have.
const UNSEEN: [(&str, &str); 4] = [
    ("thin_parser.so", "requests to Thin"),
    ("passenger_native_support.so", "requests to Passenger"),
    ("iodine.so", "requests to Iodine"),
    ("agoo.so", "requests to Agoo"),
];

/// What is known of servers.
#[derive(Default)]
pub(super) struct Servers {
    /// Sites by file.
    sites: SiteCache<RequestSite>,
    /// Files probed for all processes that have them, where a link attaches one site: with many servers that would be many.
    probed: HashMap<ImageKey, (Arc<Lease>, RequestLinks)>,
    /// What each server has of its own.
    pub(super) processes: HashMap<u32, OwnProbes>,
    /// Sites in interpreters, by file.
    local_sites: SiteCache<RequestSite>,
    /// Servers whose threads block.
    pub(super) blocking: Blocking,
    /// Sites of jobs by file.
    pub(super) job_sites: SiteCache<JobSite>,
    /// The probes in processes that run jobs.
    pub(super) job_runners: HashMap<u32, Vec<RequestLinks>>,
    /// By the id of a cgroup.
    arrivals: HashMap<u64, ArrivalsLink>,
    said: HashSet<String>,
}

/// What is probed for one server only.
pub(super) struct OwnProbes {
    /// In its libc, and more.
    links: Vec<RequestLinks>,
    /// The cgroup whose packets are looked at for it.
    cgroup: Option<u64>,
    /// Calls of its application are probed, or cannot be: by them requests on Unix sockets are seen.
    sees_calls: bool,
}

impl Servers {
    /// What is probed for all processes that map it.
    pub(super) fn libraries(&self) -> impl Iterator<Item = (ImageKey, &Arc<Lease>)> {
        self.probed.iter().chain(&self.blocking.listen).map(|(key, (lease, _))| (*key, lease))
    }
}

/// Which of the files a mapping is of.
fn file_of(mapping: &ExecutableMapping) -> Option<RequestFile> {
    RequestFile::of_name(mapping.path.file_name()?.to_str()?)
}

/// What is not seen of a server that has this mapping.
fn unseen(mapping: &ExecutableMapping) -> Option<&'static str> {
    let name = mapping.path.file_name()?.to_str()?;
    UNSEEN.into_iter().find(|(library, _)| *library == name).map(|(_, what)| what)
}

impl Control {
    /// Looks whether a process is a server, if it maps what one has.
    pub(super) fn look_for_server(&mut self, pid: u32, seen: &[ExecutableMapping]) {
        let may_be = |mapping| {
            matches!(file_of(mapping), Some(RequestFile::Puma | RequestFile::Socket))
                || is_unicorn(mapping)
                || unseen(mapping).is_some()
        };
        if self.probes.sees_requests() && seen.iter().any(may_be) {
            self.servers.blocking.forget(pid);
            self.add_server(pid);
        }
    }

    /// Looks at the children of servers: they have all that their parents have mapped.
    pub(super) fn forked_servers(&mut self, forks: &[(u32, u32)]) {
        for (parent, child) in forks {
            if self.servers.processes.contains_key(parent) || self.servers.job_runners.contains_key(parent) {
                self.add_server(*child);
            }
        }
    }

    pub(super) fn add_server(&mut self, pid: u32) {
        // What may be WEBrick is another server if it turns out to have more.
        let known = self.probes.server_kinds(pid);
        let is_puma = known.is_some_and(|kinds| kinds & SERVES_HTTP != 0);
        if !is_puma && known.is_some_and(|kinds| kinds & MAY_BE_WEBRICK == 0) || !self.wants(pid) {
            return;
        }
        let Ok(mappings) = mappings::of_process(pid) else { return };
        if is_puma {
            return self.look_for_unix_sockets(pid, &mappings);
        }
        if called::is_sidekiq(pid) {
            return self.add_job_runner(pid, &mappings);
        }
        if mappings.iter().any(is_unicorn) {
            return self.add_unicorn(pid, &mappings);
        }
        let find = |wanted| mappings.iter().find(|mapping| file_of(mapping) == Some(wanted));
        if find(RequestFile::Puma).is_none() {
            if let Some(what) = mappings.iter().find_map(unseen).or_else(|| called::unseen_work(pid)) {
                self.say_once(&format!("gctrace: {what} are not seen (docs/requests.md lists what is)"));
            }
            if known.is_none() {
                self.look_for_webrick(pid, &mappings);
            }
            return;
        }
        // A child that has not called exec yet has the memory of its parent.
        if !is_running(pid) {
            return;
        }
        // What is missing is mapped later, and then looked at.
        let (Some(puma), Some(socket)) = (find(RequestFile::Puma), find(RequestFile::Socket)) else { return };
        let added = match find(RequestFile::Libc) {
            Some(libc) => self.probe_server(pid, puma, socket, libc),
            None => Err("its C library is not glibc".to_owned()),
        };
        match added {
            Ok(()) => self.look_for_unix_sockets(pid, &mappings),
            Err(why) => {
                let why = format!("gctrace: {}: its requests are not seen: {why}", puma.path.display());
                self.say_of(pid, &why);
            }
        }
    }

    /// Looks whether a Puma whose requests are seen listens on a Unix socket: then the calls of its application are probed, too.
    pub(super) fn look_for_unix_sockets(&mut self, pid: u32, mappings: &[ExecutableMapping]) {
        let new = self.servers.processes.get(&pid).is_some_and(|own| !own.sees_calls);
        if !new || !listens::on_unix(pid) {
            return;
        }
        let named = |wanted: fn(&str) -> bool| {
            mappings
                .iter()
                .find(|mapping| mapping.path.file_name().and_then(|name| name.to_str()).is_some_and(wanted))
        };
        let library = named(|name| name.starts_with("libruby") && name.contains(".so"));
        let Some(ruby) = library.or_else(|| named(|name| name.starts_with("ruby"))) else { return };
        let found = self.probe_calls(pid, ruby).map_err(|why| {
            let path = ruby.path.display();
            self.say_of(
                pid,
                &format!("gctrace: {path}: requests to Puma on Unix sockets are not seen: {why}"),
            );
        });
        if let Some(own) = self.servers.processes.get_mut(&pid) {
            own.links.extend(found);
            own.sees_calls = true;
        }
    }

    fn probe_calls(&mut self, pid: u32, ruby: &ExecutableMapping) -> Result<RequestLinks, String> {
        let own = NonZeroU32::new(pid).ok_or("it has no pid")?;
        let (_, file, sites) = self.servers.local_sites.of(pid, ruby, local_sites)?;
        self.probes
            .attach_requests(&sites, &reopened(&file), Scope::One(own))
            .map_err(|error| format!("{}: {}", ruby.path.display(), brief(&error)))
    }

    /// Says why requests of a process are not seen, unless it has ended meanwhile: a child that a request forks, for example.
    pub(super) fn say_of(&mut self, pid: u32, text: &str) {
        if is_running(pid) {
            self.say_once(text);
        }
    }

    pub(super) fn say_once(&mut self, text: &str) {
        if self.is_new(text) {
            say(text);
        }
    }

    /// Whether this has not been said yet.
    fn is_new(&mut self, text: &str) -> bool {
        if self.servers.said.len() > REFUSALS_REMEMBERED {
            self.servers.said.clear();
        }
        self.servers.said.insert(text.to_owned())
    }

    fn probe_server(
        &mut self,
        pid: u32,
        puma: &ExecutableMapping,
        socket: &ExecutableMapping,
        libc: &ExecutableMapping,
    ) -> Result<(), String> {
        // perf_event_open takes pids of gctrace's own namespace.
        let own = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids());
        let own = own.ok_or("gctrace must see the pids of the host: use --pid=host (hostPID: true)")?;
        if called::has_mn_threads(pid) {
            return Err("with RUBY_MN_THREADS a request may change its native thread".to_owned());
        }
        // First all sites: a server that lacks some is not probed at all.
        let puma_sites = self.servers.sites.of(pid, puma, |image| request_sites(image, RequestFile::Puma))?;
        let socket_sites =
            self.servers.sites.of(pid, socket, |image| request_sites(image, RequestFile::Socket))?;
        let libc_sites = self.servers.sites.of(pid, libc, |image| request_sites(image, RequestFile::Libc))?;
        let libraries = [(puma, puma_sites), (socket, socket_sites)];
        if !self.probes.attaches_files() {
            for (mapping, (key, file, sites)) in &libraries {
                self.probe_library(pid, mapping, (key, file, sites))?;
            }
        }
        // It may listen on a Unix socket later.
        if let Err(why) = self.probe_listen(pid, socket) {
            self.say_once(&format!(
                "gctrace: {}: requests to a Puma on a Unix socket are seen only if it listens there already: {why}",
                socket.path.display()
            ));
        }
        // Where one link attaches a whole file, servers that are not selected have none of these probes.
        let in_it = libraries.into_iter().filter(|_| self.probes.attaches_files());
        let mut attached: Vec<RequestLinks> = Vec::new();
        for (mapping, (_, file, sites)) in in_it.chain([(libc, libc_sites)]).collect::<Vec<_>>() {
            match self.probes.attach_requests(&sites, &reopened(&file), Scope::One(own)) {
                Ok(links) => attached.push(links),
                Err(error) => {
                    for links in attached {
                        self.probes.detach_requests(links);
                    }
                    return Err(format!("{}: {}", mapping.path.display(), brief(&error)));
                }
            }
        }
        self.has_probes(pid, attached, SERVES_HTTP)
    }

    /// Has a library probed in all processes that map it.
    fn probe_library(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
        (key, file, sites): (&ImageKey, &File, &[RequestSite]),
    ) -> Result<(), String> {
        if !self.servers.probed.contains_key(key) {
            let lease = self.lease_library(key, file, &mapping.path)?;
            let links = self.probes.attach_requests(sites, &reopened(file), Scope::All);
            let links = links.map_err(|error| format!("{}: {}", mapping.path.display(), brief(&error)))?;
            self.servers.probed.insert(*key, (lease, links));
        }
        self.unused.has_user(Probed::Library(*key), pid);
        Ok(())
    }

    /// All probes of a server are set: its requests are seen from now on.
    pub(super) fn has_probes(&mut self, pid: u32, links: Vec<RequestLinks>, kind: u32) -> Result<(), String> {
        self.forget_ended_servers();
        let cgroup = self.look_at_packets(pid);
        let cgroup = cgroup.map_err(|why| {
            // It may have ended meanwhile, as the child of a `system` does. The workers of a cluster have one reason.
            if is_running(pid) && self.is_new(&why) {
                say(&format!(
                    "gctrace: pid {pid}: how long its requests wait for a thread is not known: {why}"
                ));
            }
        });
        let own = OwnProbes { links, cgroup: cgroup.ok(), sees_calls: false };
        for links in self.servers.processes.insert(pid, own).map(|own| own.links).unwrap_or_default() {
            self.probes.detach_requests(links);
        }
        self.add_if_running(pid, kind)
    }

    /// Enters a server for the programs, whose probes are set. The kernel removes those that end; one that has ended before would stay, with
    /// its probes, and the next process with its number would be taken for it.
    pub(super) fn add_if_running(&mut self, pid: u32, kind: u32) -> Result<(), String> {
        self.probes.add_server(pid, kind).map_err(|error| brief(&error))?;
        if !is_running(pid) {
            self.probes.remove_server(pid);
            self.forget_ended_servers();
        }
        Ok(())
    }

    /// Has the packets of a server's cgroup looked at; returns the cgroup's id.
    fn look_at_packets(&mut self, pid: u32) -> Result<u64, String> {
        let folder = cgroups::folder_of(pid)?;
        let shown = folder.display();
        let cgroup = File::open(&folder).map_err(|error| format!("{shown}: {error}"))?;
        let id = cgroup.metadata().map_err(|error| format!("{shown}: {error}"))?.ino();
        if let Entry::Vacant(entry) = self.servers.arrivals.entry(id) {
            let link = self.probes.attach_arrivals(&cgroup).map_err(|error| format!("{shown}: {error}"))?;
            entry.insert(link);
        }
        Ok(id)
    }

    /// Detaches the probes of a library; returns its leases.
    pub(super) fn retire_library(&mut self, key: &ImageKey) -> Vec<Arc<Lease>> {
        let probed = [self.servers.probed.remove(key), self.servers.blocking.listen.remove(key)];
        let mut leases = Vec::new();
        for (lease, links) in probed.into_iter().flatten() {
            self.probes.detach_requests(links);
            leases.push(lease);
        }
        leases
    }

    /// Detaches the probes in a process.
    pub(super) fn detach_server(&mut self, pid: u32) {
        for links in self.servers.processes.remove(&pid).map(|own| own.links).unwrap_or_default() {
            self.probes.detach_requests(links);
        }
    }

    /// Detaches what was in the libc of servers that are gone, and in processes that ran jobs.
    pub(super) fn forget_ended_servers(&mut self) {
        let probes = &self.probes;
        let ended: Vec<u32> =
            self.servers.processes.keys().copied().filter(|&pid| !probes.is_server(pid)).collect();
        for pid in ended {
            self.detach_server(pid);
        }
        let probes = &self.probes;
        let ended: Vec<u32> =
            self.servers.job_runners.keys().copied().filter(|&pid| !probes.is_server(pid)).collect();
        for pid in ended {
            for links in self.servers.job_runners.remove(&pid).unwrap_or_default() {
                self.probes.detach_requests(links);
            }
        }
        let used: HashSet<u64> = self.servers.processes.values().filter_map(|own| own.cgroup).collect();
        self.servers.arrivals.retain(|cgroup, _| used.contains(cgroup));
    }
}
