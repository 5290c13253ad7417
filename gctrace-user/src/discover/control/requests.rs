//! Servers: processes that have mapped a web server's parser, and the probes by which their requests are seen.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    num::NonZeroU32,
};

use super::{
    super::{
        identity::ImageKey,
        mappings::{self, ExecutableMapping},
    },
    Control,
    images::reopened,
};
use crate::{
    bpf::{RequestLinks, Scope, brief},
    console::say,
    elf::ElfImage,
    host::proc_root,
    ruby::requests::{RequestFile, RequestSite, request_sites},
};

/// Bounds the memory for not telling a refusal twice.
const REFUSALS_REMEMBERED: usize = 1024;

/// What is known of servers.
#[derive(Default)]
pub(super) struct Servers {
    /// Sites by file.
    sites: HashMap<ImageKey, Result<Vec<RequestSite>, String>>,
    /// Files probed for all processes that have them.
    probed: HashMap<ImageKey, RequestLinks>,
    /// The probes in the libc of each server.
    processes: HashMap<u32, RequestLinks>,
    told: HashSet<String>,
}

/// Which of the files a mapping is of.
fn file_of(mapping: &ExecutableMapping) -> Option<RequestFile> {
    RequestFile::of_name(mapping.path.file_name()?.to_str()?)
}

impl Control {
    /// Looks whether a process is a server, if it maps what one has.
    pub(super) fn look_for_server(&mut self, pid: u32, seen: &[ExecutableMapping]) {
        let may_be = |mapping| matches!(file_of(mapping), Some(RequestFile::Puma | RequestFile::Socket));
        if self.probes.sees_requests() && seen.iter().any(may_be) {
            self.add_server(pid);
        }
    }

    /// Looks at the children of servers: they have all that their parents have mapped.
    pub(super) fn forked_servers(&mut self, forks: &[(u32, u32)]) {
        for (parent, child) in forks {
            if self.servers.processes.contains_key(parent) {
                self.add_server(*child);
            }
        }
    }

    fn add_server(&mut self, pid: u32) {
        if self.probes.is_server(pid) || !self.wants(pid) {
            return;
        }
        let Ok(mappings) = mappings::of_process(pid) else { return };
        let find = |wanted| mappings.iter().find(|mapping| file_of(mapping) == Some(wanted));
        // What is missing is mapped later, and then looked at.
        let (Some(puma), Some(socket)) = (find(RequestFile::Puma), find(RequestFile::Socket)) else { return };
        let added = match find(RequestFile::Libc) {
            Some(libc) => self.probe_server(pid, puma, socket, libc),
            None => Err("its C library is not glibc".to_owned()),
        };
        if let Err(why) = added {
            if self.servers.told.len() > REFUSALS_REMEMBERED {
                self.servers.told.clear();
            }
            let text = format!("gctrace: {}: its requests are not seen: {why}", puma.path.display());
            if self.servers.told.insert(text.clone()) {
                say(&text);
            }
        }
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
        // First all sites: a server that lacks some is not probed at all.
        let puma_sites = self.sites_in(pid, puma, RequestFile::Puma)?;
        let socket_sites = self.sites_in(pid, socket, RequestFile::Socket)?;
        let libc_sites = self.sites_in(pid, libc, RequestFile::Libc)?;
        for (mapping, (key, file, sites)) in [(puma, puma_sites), (socket, socket_sites)] {
            if !self.servers.probed.contains_key(&key) {
                let links = self.probes.attach_requests(&sites, &reopened(&file), Scope::All);
                let links =
                    links.map_err(|error| format!("{}: {}", mapping.path.display(), brief(&error)))?;
                self.servers.probed.insert(key, links);
            }
        }
        let (_, file, sites) = libc_sites;
        let links = self.probes.attach_requests(&sites, &reopened(&file), Scope::One(own));
        let links = links.map_err(|error| format!("{}: {}", libc.path.display(), brief(&error)))?;
        self.forget_ended_servers();
        if let Some(before) = self.servers.processes.insert(pid, links) {
            self.probes.detach_requests(before);
        }
        self.probes.add_server(pid).map_err(|error| brief(&error))
    }

    /// The sites of a mapped file, found once.
    fn sites_in(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
        which: RequestFile,
    ) -> Result<(ImageKey, File, Vec<RequestSite>), String> {
        let shown = mapping.path.display();
        let gone = |error: std::io::Error| format!("{shown}: {error}");
        let path = mapping.open_path(pid).map_err(gone)?;
        let key = ImageKey::of(&path).map_err(gone)?;
        let file = File::open(&path).map_err(gone)?;
        let find = || {
            let image = ElfImage::read(&file).map_err(|error| format!("{shown}: {error}"))?;
            request_sites(&image, which).map_err(|error| format!("{shown}: {error}"))
        };
        let sites = self.servers.sites.entry(key).or_insert_with(find).clone()?;
        Ok((key, file, sites))
    }

    /// Detaches what was in the libc of servers that are gone.
    fn forget_ended_servers(&mut self) {
        let probes = &self.probes;
        let ended: Vec<u32> =
            self.servers.processes.keys().copied().filter(|&pid| !probes.is_server(pid)).collect();
        for pid in ended {
            if let Some(links) = self.servers.processes.remove(&pid) {
                self.probes.detach_requests(links);
            }
        }
    }
}
