//! Processes that run Sidekiq jobs, and the probes that trace these.

use std::num::NonZeroU32;

use gctrace_common::request::RUNS_JOBS;

use super::{super::mappings::ExecutableMapping, Control, images::reopened};
use crate::{
    bpf::brief,
    elf::ElfImage,
    host::{called, proc_root},
    ruby::{
        jobs::{JobSite, socket_sites, thread_sites},
        requests::RequestRefusal,
    },
};

type Find = fn(&ElfImage) -> Result<Vec<JobSite>, RequestRefusal>;

impl Control {
    /// Probes a Sidekiq process, if it has mapped all files that jobs need. A missing file is handled when it is mapped later.
    pub(super) fn add_job_runner(&mut self, pid: u32, mappings: &[ExecutableMapping]) {
        let named = |wanted: fn(&str) -> bool| {
            mappings
                .iter()
                .find(|mapping| mapping.path.file_name().and_then(|name| name.to_str()).is_some_and(wanted))
        };
        let Some(socket) = named(|name| name == "socket.so") else { return };
        let library = named(|name| name.starts_with("libruby") && name.contains(".so"));
        let Some(ruby) = library.or_else(|| named(|name| name.starts_with("ruby"))) else { return };
        if let Err(why) = self.probe_job_runner(pid, socket, ruby) {
            // A child forked by a job has the title of its Sidekiq, and may be gone by now.
            let path = socket.path.display();
            self.say_of(pid, &format!("gctrace: pid {pid}: {path}: jobs of Sidekiq are not seen: {why}"));
        }
    }

    fn probe_job_runner(
        &mut self,
        pid: u32,
        socket: &ExecutableMapping,
        ruby: &ExecutableMapping,
    ) -> Result<(), String> {
        // perf_event_open takes pids of gctrace's own namespace.
        let own = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids());
        let own = own.ok_or("gctrace must see the pids of the host: use --pid=host (hostPID: true)")?;
        if called::has_mn_threads(pid, [ruby.path.as_path()].into_iter()) {
            return Err("with RUBY_MN_THREADS a job may change its native thread".to_owned());
        }
        // Find all sites first: a process that lacks some is not probed at all.
        let files: [(&ExecutableMapping, Find); 2] = [(socket, socket_sites), (ruby, thread_sites)];
        let mut found = Vec::new();
        for (mapping, find) in files {
            found.push((mapping, self.servers.job_sites.of(pid, mapping, find)?));
        }
        self.forget_ended_servers();
        let mut links = Vec::new();
        for (mapping, (_, file, sites)) in found {
            if sites.is_empty() {
                continue;
            }
            match self.probes.attach_jobs(&sites, &reopened(&file), own) {
                Ok(attached) => links.push(attached),
                Err(error) => {
                    self.probes.detach_requests(links);
                    return Err(format!(
                        "{}: {}",
                        mapping.path.display(),
                        brief(&error.of_file(&mapping.path))
                    ));
                }
            }
        }
        let before = self.servers.job_runners.insert(pid, links);
        self.probes.detach_requests(before.into_iter().flatten());
        self.add_if_running(pid, RUNS_JOBS)
    }
}
