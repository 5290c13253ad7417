//! Servers whose threads block: Unicorn, which has its own parser, and processes that listen, any of which may be WEBrick.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    num::NonZeroU32,
    path::Path,
    sync::Arc,
};

use gctrace_common::blocking::{ACCEPTED, IS_WEBRICK, MAY_BE_WEBRICK, SERVES_UNICORN, TRIED};

use super::{
    super::{identity::ImageKey, mappings::ExecutableMapping},
    Control,
    images::reopened,
    site_cache::SiteCache,
    unused::Probed,
};
use crate::{
    address::FileOffset,
    bpf::{Lease, RequestLinks, Scope, brief},
    host::{called, listens, proc_root},
    ruby::blocking::{BlockingFile, BlockingSite, blocking_sites, listen_sites, needed},
};

/// State of such servers.
#[derive(Default)]
pub(super) struct Blocking {
    /// Sites by file.
    sites: SiteCache<BlockingSite>,
    /// Files whose calls of `listen` are probed, for all processes that map them.
    pub(super) listen: HashMap<ImageKey, (Arc<Lease>, RequestLinks)>,
    /// Processes that listen and are assumed to be WEBrick until they have shown otherwise.
    candidates: HashSet<u32>,
    /// Processes that have shown not to be WEBrick.
    others: HashSet<u32>,
}

impl Blocking {
    /// Forgets a process that may run another program now.
    pub(super) fn forget(&mut self, pid: u32) {
        self.others.remove(&pid);
    }
}

fn file_of(mapping: &ExecutableMapping) -> Option<BlockingFile> {
    BlockingFile::of_name(mapping.path.file_name()?.to_str()?)
}

/// Whether a file identifies a process as Unicorn.
pub(super) fn is_unicorn(mapping: &ExecutableMapping) -> bool {
    file_of(mapping) == Some(BlockingFile::Unicorn)
}

impl Control {
    pub(super) fn add_unicorn(&mut self, pid: u32, mappings: &[ExecutableMapping]) {
        self.add_blocking(pid, mappings, SERVES_UNICORN);
    }

    /// Checks whether a process with `socket.so` and no known parser listens, and arranges for it to be noticed if it does later.
    pub(super) fn look_for_webrick(&mut self, pid: u32, mappings: &[ExecutableMapping]) {
        let Some(socket) = mappings.iter().find(|mapping| file_of(mapping) == Some(BlockingFile::Socket))
        else {
            return;
        };
        if self.servers.blocking.others.contains(&pid) {
            return;
        }
        match self.probe_listen(pid, socket) {
            // Checked after its calls are probed: it may have started to listen before.
            Ok(()) if listens::on_tcp(pid) => self.add_blocking(pid, mappings, MAY_BE_WEBRICK),
            Ok(()) => {}
            Err(why) => {
                let path = socket.path.display();
                self.say_of(pid, &format!("gctrace: {path}: requests of WEBrick are not seen: {why}"));
            }
        }
    }

    /// Arranges for processes that have mapped this `socket.so` to be noticed when they start to listen.
    pub(super) fn probe_listen(&mut self, pid: u32, socket: &ExecutableMapping) -> Result<(), String> {
        let (key, file, sites) = self
            .servers
            .blocking
            .sites
            .of(pid, socket, |image| blocking_sites(image, BlockingFile::Socket))?;
        let sites = listen_sites(&sites).map_err(|refusal| refusal.to_string())?;
        let offsets: Vec<FileOffset> = sites.iter().map(|site| site.file_offset).collect();
        let known = self.probed_library(pid, socket, &key, &offsets, |servers| &servers.blocking.listen)?;
        if known.is_none() {
            let lease = self.lease_library(&key, &file, &socket.path)?;
            let links = self.probes.attach_blocking(&sites, &reopened(&file), Scope::All);
            self.servers
                .blocking
                .listen
                .insert(key, (lease, links.map_err(|error| brief(&error.of_file(&socket.path)))?));
        }
        self.unused.has_user(Probed::Library(known.unwrap_or(key)), pid);
        Ok(())
    }

    /// Inspects the processes that have started to listen, and stops tracing those that are not WEBrick.
    pub(super) fn listening_processes(&mut self) {
        for pid in self.probes.listening() {
            self.add_server(pid);
        }
        let probes = &self.probes;
        let tried = |pid: &u32| match probes.server_kinds(*pid) {
            Some(kinds) => kinds & IS_WEBRICK == 0 && kinds >= ACCEPTED * TRIED,
            None => true,
        };
        let tried: Vec<u32> = self.servers.blocking.candidates.iter().copied().filter(tried).collect();
        for pid in tried {
            self.servers.blocking.candidates.remove(&pid);
            if self.probes.server_kinds(pid).is_some_and(|kinds| kinds & MAY_BE_WEBRICK != 0) {
                log::debug!("pid {pid} has accepted {TRIED} connections and is no WEBrick");
                self.probes.remove_server(pid);
                self.detach_server(pid);
                self.servers.blocking.others.insert(pid);
            }
        }
    }

    fn add_blocking(&mut self, pid: u32, mappings: &[ExecutableMapping], kind: u32) {
        let webrick = kind == MAY_BE_WEBRICK;
        match self.probe_blocking(pid, mappings, kind) {
            Ok(()) if webrick => {
                self.servers.blocking.candidates.insert(pid);
            }
            Ok(()) => {}
            Err(why) => {
                let what = if webrick { "requests of WEBrick" } else { "requests of Unicorn" };
                self.say_of(pid, &format!("gctrace: pid {pid}: {what} are not seen: {why}"));
            }
        }
    }

    fn probe_blocking(&mut self, pid: u32, mappings: &[ExecutableMapping], kind: u32) -> Result<(), String> {
        // perf_event_open takes pids of gctrace's own namespace.
        let own = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids());
        let own = own.ok_or("gctrace must see the pids of the host: use --pid=host (hostPID: true)")?;
        if called::has_mn_threads(pid, mappings.iter().map(|mapping| mapping.path.as_path())) {
            return Err("with RUBY_MN_THREADS a request may change its native thread".to_owned());
        }
        // Find all sites first: a server that lacks some is not probed at all.
        let mut files: Vec<(ImageKey, File, &Path)> = Vec::new();
        let mut sites = Vec::new();
        for mapping in mappings {
            let Some(which) = file_of(mapping) else { continue };
            let (key, file, found) =
                self.servers.blocking.sites.of(pid, mapping, |image| blocking_sites(image, which))?;
            if !files.iter().any(|(known, ..)| *known == key) {
                files.push((key, file, &mapping.path));
                sites.push(found);
            }
        }
        let sites = needed(sites, kind == MAY_BE_WEBRICK).map_err(|refusal| refusal.to_string())?;
        let mut links = Vec::new();
        for ((_, file, path), sites) in files.iter().zip(&sites).filter(|(_, sites)| !sites.is_empty()) {
            match self.probes.attach_blocking(sites, &reopened(file), Scope::One(own)) {
                Ok(attached) => links.push(attached),
                Err(error) => {
                    self.probes.detach_requests(links);
                    return Err(brief(&error.of_file(path)));
                }
            }
        }
        self.has_probes(pid, links, kind)
    }
}
