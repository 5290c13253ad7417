//! Servers: processes that have mapped a web server's parser, and the probes that trace their requests.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    fs::File,
    num::NonZeroU32,
    os::unix::fs::MetadataExt as _,
    sync::Arc,
    time::{Duration, Instant},
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
    inspect::has_probes,
    later::{Forks, Untitled},
    select::due,
    site_cache::SiteCache,
    unused::Probed,
};
use crate::{
    address::FileOffset,
    bpf::{ArrivalsLink, Lease, RequestLinks, Scope, brief},
    cache,
    console::say,
    host::{called, listens, proc::is_running, proc_root},
    ruby::{
        jobs::JobSite,
        requests::{RequestFile, RequestSite, local_sites, request_sites},
    },
};

/// Maximum number of messages remembered to avoid repeating them; all are forgotten above it.
const REFUSALS_REMEMBERED: usize = 1024;

/// Interval at which ended servers are looked for.
const LOOK: Duration = Duration::from_secs(5);

/// Servers whose requests are not traced, by a library that only they have.
const UNSEEN: [(&str, &str); 4] = [
    ("thin_parser.so", "requests to Thin"),
    ("passenger_native_support.so", "requests to Passenger"),
    ("iodine.so", "requests to Iodine"),
    ("agoo.so", "requests to Agoo"),
];

/// State of servers.
#[derive(Default)]
pub(super) struct Servers {
    /// Sites by file.
    sites: SiteCache<RequestSite>,
    /// Files probed for all processes that map them, used where a link attaches only one site: per-process probes would be too many.
    probed: HashMap<ImageKey, (Arc<Lease>, RequestLinks)>,
    /// The probes specific to each server.
    pub(super) processes: HashMap<u32, OwnProbes>,
    /// Sites in interpreters, by file.
    local_sites: SiteCache<RequestSite>,
    /// Servers whose threads block.
    pub(super) blocking: Blocking,
    /// Job sites, by file.
    pub(super) job_sites: SiteCache<JobSite>,
    /// The probes in processes that run jobs.
    pub(super) job_runners: HashMap<u32, Vec<RequestLinks>>,
    /// Links of packet programs, by cgroup id.
    arrivals: HashMap<u64, ArrivalsLink>,
    forks: Forks,
    /// Servers found since the forks were last looked through.
    new: Vec<u32>,
    untitled: Untitled,
    /// When ended servers were last looked for.
    looked: Option<Instant>,
    /// The servers that had ended by then.
    gone: HashSet<u32>,
    said: HashSet<String>,
}

/// The probes of one server.
pub(super) struct OwnProbes {
    /// Links in its libc and other files.
    links: Vec<RequestLinks>,
    /// The cgroup whose packets are traced for it.
    cgroup: Option<u64>,
    /// Whether the calls of its application are probed (or cannot be): these show requests on Unix sockets.
    sees_calls: bool,
}

impl Servers {
    /// Takes the links of all probes. The leases of libraries remain: a writer has to wait until their probes are detached.
    pub(super) fn take_links(&mut self) -> Vec<RequestLinks> {
        let own = self.processes.drain().flat_map(|(_, own)| own.links);
        let jobs = self.job_runners.drain().flat_map(|(_, links)| links);
        let libraries = self.probed.values_mut().chain(self.blocking.listen.values_mut());
        own.chain(jobs).chain(libraries.map(|(_, links)| std::mem::take(links))).collect()
    }

    /// The files that are probed for all processes that map them.
    pub(super) fn libraries(&self) -> impl Iterator<Item = (ImageKey, &Arc<Lease>)> {
        self.probed.iter().chain(&self.blocking.listen).map(|(key, (lease, _))| (*key, lease))
    }
}

/// Which request file a mapping is of.
fn file_of(mapping: &ExecutableMapping) -> Option<RequestFile> {
    RequestFile::of_name(mapping.path.file_name()?.to_str()?)
}

/// The requests that are not traced of a server with this mapping.
fn unseen(mapping: &ExecutableMapping) -> Option<&'static str> {
    let name = mapping.path.file_name()?.to_str()?;
    UNSEEN.into_iter().find(|(library, _)| *library == name).map(|(_, what)| what)
}

impl Control {
    /// Checks whether a process is a server, if it maps a file that identifies one.
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

    /// Inspects the children of servers: they inherit their parents' mappings. Called after new mappings have been handled: those of a server
    /// may come together with its forks, or be handled later than these.
    pub(super) fn forked_servers(&mut self, forks: &[(u32, u32)]) {
        if !self.probes.sees_requests() {
            return;
        }
        self.servers.forks.add(forks);
        for (parent, child) in forks {
            if self.servers.processes.contains_key(parent) || self.servers.job_runners.contains_key(parent) {
                self.add_server(*child);
            } else if self.servers.untitled.has(*parent) {
                self.servers.untitled.add(*child, Instant::now());
            }
        }
        while let Some(parent) = self.servers.new.pop() {
            for child in self.servers.forks.children(parent) {
                if self.probes.server_kinds(child).is_none() {
                    self.add_server(child);
                }
            }
        }
    }

    /// Inspects processes that have taken the title of a Sidekiq since their mappings were seen.
    fn titled_servers(&mut self) {
        for pid in self.servers.untitled.titled(Instant::now(), is_running, called::is_sidekiq) {
            self.add_server(pid);
        }
    }

    pub(super) fn add_server(&mut self, pid: u32) {
        // A process assumed to be WEBrick is another server if it turns out to have more mapped.
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
            if find(RequestFile::Socket).is_some() {
                self.servers.untitled.add(pid, Instant::now());
            }
            if known.is_none() {
                self.look_for_webrick(pid, &mappings);
            }
            return;
        }
        // A child that has not called exec yet has its parent's memory.
        if !is_running(pid) {
            return;
        }
        // A missing file is handled when it is mapped later.
        let (Some(puma), Some(socket)) = (find(RequestFile::Puma), find(RequestFile::Socket)) else { return };
        let added = match find(RequestFile::Libc) {
            Some(libc) => self.probe_server(pid, &mappings, [puma, socket, libc]),
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

    /// Checks whether a traced Puma listens on a Unix socket; if so, the calls of its application are probed as well.
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
            if found.is_ok() {
                log::info!("pid {pid} is traced on its Unix sockets from now on");
            }
            own.links.extend(found);
            own.sees_calls = true;
        }
    }

    fn probe_calls(&mut self, pid: u32, ruby: &ExecutableMapping) -> Result<RequestLinks, String> {
        let own = NonZeroU32::new(pid).ok_or("it has no pid")?;
        let (_, file, sites) = self.servers.local_sites.of(pid, ruby, local_sites)?;
        self.probes
            .attach_requests(&sites, &reopened(&file), Scope::One(own))
            .map_err(|error| format!("{}: {}", ruby.path.display(), brief(&error.of_file(&ruby.path))))
    }

    /// Reports why requests of a process are not traced, unless the process has ended meanwhile: a child forked by a request, for example.
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

    /// Whether this message has not been reported yet; remembers it.
    fn is_new(&mut self, text: &str) -> bool {
        if self.servers.said.len() > REFUSALS_REMEMBERED {
            self.servers.said.clear();
        }
        self.servers.said.insert(text.to_owned())
    }

    fn probe_server(
        &mut self,
        pid: u32,
        mappings: &[ExecutableMapping],
        [puma, socket, libc]: [&ExecutableMapping; 3],
    ) -> Result<(), String> {
        // perf_event_open takes pids of gctrace's own namespace.
        let own = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids());
        let own = own.ok_or("gctrace must see the pids of the host: use --pid=host (hostPID: true)")?;
        if called::has_mn_threads(pid, mappings.iter().map(|mapping| mapping.path.as_path())) {
            return Err("with RUBY_MN_THREADS a request may change its native thread".to_owned());
        }
        // Find all sites first: a server that lacks some is not probed at all.
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
        // It may start to listen on a Unix socket later.
        if let Err(why) = self.probe_listen(pid, socket) {
            self.say_once(&format!(
                "gctrace: {}: requests to a Puma on a Unix socket are seen only if it listens there already: {why}",
                socket.path.display()
            ));
        }
        // If one link can attach a whole file, attach per server: servers that are not selected then have none of these probes.
        let in_it = libraries.into_iter().filter(|_| self.probes.attaches_files());
        let mut attached: Vec<RequestLinks> = Vec::new();
        for (mapping, (_, file, sites)) in in_it.chain([(libc, libc_sites)]).collect::<Vec<_>>() {
            match self.probes.attach_requests(&sites, &reopened(&file), Scope::One(own)) {
                Ok(links) => attached.push(links),
                Err(error) => {
                    self.probes.detach_requests(attached);
                    return Err(format!(
                        "{}: {}",
                        mapping.path.display(),
                        brief(&error.of_file(&mapping.path))
                    ));
                }
            }
        }
        self.has_probes(pid, attached, SERVES_HTTP)
    }

    /// Probes a library for all processes that map it.
    fn probe_library(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
        (key, file, sites): (&ImageKey, &File, &[RequestSite]),
    ) -> Result<(), String> {
        let offsets: Vec<FileOffset> = sites.iter().map(|site| site.file_offset).collect();
        let known = self.probed_library(pid, mapping, key, &offsets, |servers| &servers.probed)?;
        if known.is_none() {
            let lease = self.lease_library(key, file, &mapping.path)?;
            let links = self.probes.attach_requests(sites, &reopened(file), Scope::All);
            let links = links.map_err(|error| {
                format!("{}: {}", mapping.path.display(), brief(&error.of_file(&mapping.path)))
            })?;
            self.servers.probed.insert(*key, (lease, links));
        }
        self.unused.has_user(Probed::Library(known.unwrap_or(*key)), pid);
        Ok(())
    }

    /// The identity under which a library is already probed: its times may have changed since (see [`Control::verdict`]).
    pub(super) fn probed_library(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
        key: &ImageKey,
        sites: &[FileOffset],
        probed: impl Fn(&Servers) -> &HashMap<ImageKey, (Arc<Lease>, RequestLinks)>,
    ) -> Result<Option<ImageKey>, String> {
        let all = probed(&self.servers);
        if all.contains_key(key) {
            return Ok(Some(*key));
        }
        if let Some((known, (lease, _))) = all.iter().find(|(known, _)| key.is_same_file(known)) {
            let known = *known;
            if lease.is_written(cache::content) {
                self.leave_written();
                return Ok(None);
            }
            return Ok(Some(known));
        }
        for known in all.keys().filter(|known| key.may_have_been(known)) {
            match has_probes(pid, mapping, sites) {
                Some(true) => return Ok(Some(*known)),
                Some(false) => {}
                None => return Err(format!("{}: it is gone", mapping.path.display())),
            }
        }
        Ok(None)
    }

    /// Registers a server whose probes are all attached: its requests are traced from now on.
    pub(super) fn has_probes(&mut self, pid: u32, links: Vec<RequestLinks>, kind: u32) -> Result<(), String> {
        self.forget_ended_servers();
        let cgroup = self.look_at_packets(pid);
        let cgroup = cgroup.map_err(|why| {
            // It may have ended meanwhile, as the child of a `system` does. All workers of a cluster have the same reason.
            if is_running(pid) && self.is_new(&why) {
                say(&format!(
                    "gctrace: pid {pid}: how long its requests wait for a thread is not known: {why}"
                ));
            }
        });
        let own = OwnProbes { links, cgroup: cgroup.ok(), sees_calls: false };
        let before = self.servers.processes.insert(pid, own);
        self.probes.detach_requests(before.into_iter().flat_map(|own| own.links));
        self.add_if_running(pid, kind)
    }

    /// Registers a server with attached probes for the programs. The programs remove it when it ends; if it has ended before, its entry and
    /// probes would remain, and the next process with its pid would be mistaken for it.
    pub(super) fn add_if_running(&mut self, pid: u32, kind: u32) -> Result<(), String> {
        self.probes.add_server(pid, kind).map_err(|error| brief(&error))?;
        if is_running(pid) {
            log::info!("pid {pid} is traced as a server from now on");
            self.servers.new.push(pid);
        } else {
            self.probes.remove_server(pid);
            self.forget_ended_servers();
        }
        Ok(())
    }

    /// Starts tracing the packets of a server's cgroup; returns the cgroup's id.
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
        let (leases, links): (Vec<_>, Vec<_>) = probed.into_iter().flatten().unzip();
        self.probes.detach_requests(links);
        leases
    }

    /// Detaches the probes of a process.
    pub(super) fn detach_server(&mut self, pid: u32) {
        let own = self.servers.processes.remove(&pid);
        self.probes.detach_requests(own.into_iter().flat_map(|own| own.links));
    }

    /// Detaches what ended servers leave behind: their probes keep the files and their file systems in use, and packet programs cost whatever
    /// else is in the cgroup.
    pub(super) fn look_for_ended_servers(&mut self) {
        if !due(&mut self.servers.looked, LOOK) {
            return;
        }
        self.titled_servers();
        let probes = &self.probes;
        let all = self.servers.processes.keys().chain(self.servers.job_runners.keys());
        let gone: HashSet<u32> = all.copied().filter(|&pid| !probes.is_server(pid)).collect();
        // Not at once: the record of a fork shortly before the end may be read after this, and its child is known by its parent.
        let before = std::mem::replace(&mut self.servers.gone, gone);
        if !before.is_disjoint(&self.servers.gone) {
            self.forget_ended(|pid| before.contains(pid));
        }
    }

    /// Detaches the probes of servers and of processes that ran jobs which are gone, and the packet programs of cgroups without a server.
    pub(super) fn forget_ended_servers(&mut self) {
        self.forget_ended(|_| true);
    }

    fn forget_ended(&mut self, of: impl Fn(&u32) -> bool) {
        let probes = &self.probes;
        let gone = |pid: &u32| of(pid) && !probes.is_server(*pid);
        let servers = self.servers.processes.extract_if(|pid, _| gone(pid));
        let servers = servers.map(|(pid, own)| (pid, own.links));
        let jobs = self.servers.job_runners.extract_if(|pid, _| gone(pid));
        let ended: Vec<(u32, Vec<RequestLinks>)> = servers.chain(jobs).collect();
        // A process that replaced its program may be a server again: two probes at one place would count everything twice.
        let (again, ended): (Vec<_>, Vec<_>) = ended.into_iter().partition(|(pid, _)| is_running(*pid));
        self.probes.detach_requests(again.into_iter().flat_map(|(_, links)| links));
        self.probes.detach_unused_requests(ended.into_iter().flat_map(|(_, links)| links));
        let used: HashSet<u64> = self.servers.processes.values().filter_map(|own| own.cgroup).collect();
        self.servers.arrivals.retain(|cgroup, _| used.contains(cgroup));
    }
}
