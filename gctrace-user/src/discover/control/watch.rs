//! Watching: new mappings, server responses, cgroups and orders about the GVL, until the run ends.

use std::{
    collections::HashSet,
    io::Read as _,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    super::{
        cgroups::Groups,
        mappings::ExecutableMapping,
        unattributed::{AttributedMapping, UnattributedMappings},
    },
    Control, ControlEvent, GVL_ATTACH, GVL_DETACH, Verdict,
    select::END_INTERVAL,
};
use crate::{
    bpf::{MappingWatch, Watched, brief},
    host::proc::is_running,
    native::Tables,
};

/// Idle time before an image is finished or an installed one is prepared.
const PREPARING: Duration = Duration::from_millis(20);

/// When watching ends, besides the end of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Not before the end of the run.
    Stopped,
    /// When no image waits for a server.
    Answered,
}

/// Forks and exits of processes. Each CPU has its own records, which are read one CPU after the other: the exit of a process may be
/// read before its fork, but at most one round earlier.
#[derive(Default)]
struct Lives {
    /// Processes whose exit was read in the previous round.
    before: Vec<u32>,
}

impl Lives {
    /// The processes that have ended, to be called after all forks of a round were handled.
    fn ended(&mut self, forks: &[(u32, u32)], exits: Vec<u32>, runs: impl Fn(u32) -> bool) -> Vec<u32> {
        let forked: HashSet<u32> = forks.iter().map(|&(_, child)| child).collect();
        // If a pid was both forked and ended, either event can be the later one, because pids are reused.
        let of_before = self.before.iter().filter(|pid| forked.contains(pid));
        let ended = exits.iter().chain(of_before).copied();
        let ended = ended.filter(|pid| !forked.contains(pid) || !runs(*pid)).collect();
        self.before = exits;
        ended
    }
}

/// Whether the run has ended. An error says nothing about that.
fn is_over(stop: &OwnedFd) -> bool {
    let mut stop = [PollFd::new(stop, PollFlags::IN | PollFlags::HUP)];
    poll(&mut stop, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

impl Control {
    /// Executes the latest order to attach or detach the GVL probes.
    fn take_gvl_orders(&mut self) {
        let mut orders = [0; 16];
        // An empty socket is reported as an error, too.
        let taken = self.gvl_orders.read(&mut orders).unwrap_or(0);
        let attached = match orders[..taken].last() {
            Some(&GVL_ATTACH) => match self.probes.resume_gvl() {
                Ok(()) => true,
                Err(error) => {
                    let error = brief(&error);
                    log::warn!("the GVL is not watched until the next attempt: {error}");
                    false
                }
            },
            Some(&GVL_DETACH) => {
                self.probes.pause_gvl();
                false
            }
            _ => return,
        };
        self.tell(ControlEvent::GvlProbes { attached });
    }

    /// Handles new mappings and responses until told to stop (returns `false`) or until nothing waits for a response (returns `true`).
    pub(super) fn watch(&mut self, watch: &mut MappingWatch, stop: &OwnedFd, until: Until) -> bool {
        let mut lost = watch.lost();
        let mut lives = Lives::default();
        loop {
            if until == Until::Answered && self.waiting.is_empty() {
                // A command must not be started after the end of the run.
                return !is_over(stop);
            }
            let mut idle = false;
            {
                let fds = watch.fds();
                let mut polled: Vec<PollFd<'_>> =
                    fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
                if let Some(lookup) = &self.lookup {
                    polled.push(PollFd::from_borrowed_fd(lookup.fd(), PollFlags::IN));
                }
                if let Some(groups) = &self.groups {
                    polled.push(PollFd::from_borrowed_fd(groups.fd(), PollFlags::IN));
                }
                let listening = self.probes.listening_fd();
                polled.extend(listening.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
                polled.extend(self.writers.fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
                polled.push(PollFd::new(&self.gvl_orders, PollFlags::IN));
                polled.push(PollFd::new(stop, PollFlags::IN | PollFlags::HUP));
                let listing = self.groups.as_ref().and_then(Groups::interval);
                let looking = self.unattributed.as_ref().and_then(UnattributedMappings::wait);
                let ending = (!self.watches_others()).then_some(END_INTERVAL);
                let more = !(self.put_off.is_empty() && self.installed.is_empty());
                let preparing = more.then_some(PREPARING);
                let trying = self.retries.wait(Instant::now());
                let spans = self.native.as_ref().and_then(Tables::wait);
                let timeout =
                    [listing, looking, ending, preparing, trying, spans].into_iter().flatten().min();
                let timeout = timeout.unwrap_or(Duration::from_secs(1));
                let timeout =
                    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
                match poll(&mut polled, Some(&timeout)) {
                    Ok(events) => idle = events == 0,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => {
                        self.tell(ControlEvent::Fatal(format!("waiting for new mappings: {error}")));
                        return false;
                    }
                }
                if polled.last().is_some_and(|fd| !fd.revents().is_empty()) {
                    return false;
                }
            }
            // First: a writer may be blocked.
            self.make_way();
            self.take_gvl_orders();
            self.take_responses();
            self.try_again();
            if idle && !self.finish_one() {
                self.prepare_one();
            }
            self.ask_names();
            if until == Until::Stopped {
                self.tell_end();
            }
            if let Err(reason) = self.take_groups() {
                self.tell(ControlEvent::Fatal(reason));
                return false;
            }
            self.look_at_cpus(watch);
            let mut new = Vec::new();
            let mut forks = Vec::new();
            let mut exits = Vec::new();
            watch.drain(|watched| match watched {
                Watched::Mapping(mapping) => new.push(mapping),
                Watched::Fork { parent, child } => forks.push((parent, child)),
                Watched::Exit { pid } => exits.push(pid),
            });
            if let Some(native) = &mut self.native {
                for &(parent, child) in &forks {
                    native.forked(parent, child);
                }
                for pid in lives.ended(&forks, exits, is_running) {
                    native.forget(pid);
                }
            }
            if watch.lost() != lost {
                lost = watch.lost();
                log::info!("{lost} mapping records lost so far; scanning /proc");
                self.read_all_again();
            }
            if let Some(native) = &mut self.native {
                native.mapped(new.iter());
            }
            match &mut self.unattributed {
                Some(unattributed) => {
                    for record in new {
                        unattributed.add(record);
                    }
                    self.attribute_mappings();
                }
                None => {
                    for record in new {
                        self.mapped_code(record.pid, record.into());
                    }
                }
            }
            self.forked_servers(&forks);
            self.listening_processes();
            self.look_for_ended_servers();
            self.give_back_unused();
        }
    }

    /// Starts watching and sampling CPUs that have come online.
    fn look_at_cpus(&mut self, watch: &mut MappingWatch) {
        match watch.look_at_cpus() {
            Ok(false) => {}
            Ok(true) => {
                log::info!("a CPU has come online; scanning /proc");
                self.read_all_again();
            }
            Err(error) => log::debug!("CPUs that have come online: {error}"),
        }
        if let Err(error) = self.probes.look_at_cpus() {
            log::debug!("CPUs that have come online: {}", brief(&error));
        }
    }

    /// Some mappings have no records: reads those of all processes again.
    fn read_all_again(&mut self) {
        self.look_again();
        if let Some(native) = &mut self.native {
            native.refresh_all();
        }
    }

    /// Handles a new executable mapping of a process.
    fn mapped_code(&mut self, pid: u32, mapping: ExecutableMapping) {
        let selectable = self.watches_others() || self.probes.is_selected(pid);
        if let Some(groups) = &mut self.groups
            && let Err(error) = groups.has_mapped(pid, &mut self.probes)
        {
            log::warn!("pid {pid}: {error}");
        }
        if pid != self.own_pid
            && selectable
            && let Err(Some(unopened)) = self.inspect_mappings(pid, &[mapping])
        {
            log::debug!("pid {pid}: {unopened}");
        }
    }

    /// Finds the processes of mappings that were recorded without a pid.
    fn attribute_mappings(&mut self) {
        let Some(unattributed) = &mut self.unattributed else { return };
        if unattributed.overflowed() {
            return self.look_again();
        }
        for AttributedMapping { pid, mapping, file } in unattributed.find() {
            let verdict = self.verdict(pid, &mapping);
            // If a file could not be opened, its verdict is not stored and says nothing about the image.
            let holds_none = verdict.ok().flatten().is_some_and(|(key, verdict)| {
                matches!(verdict, Verdict::NotRuby) && self.verdicts.contains_key(&key)
            });
            if let (true, Some(file), Some(unattributed)) = (holds_none, file, &mut self.unattributed) {
                unattributed.no_ruby(file);
            }
            self.mapped_code(pid, mapping);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child whose exit is read before its fork is forgotten all the same; a reused pid is not.
    #[test]
    fn ends_before_forks() {
        let mut lives = Lives::default();
        let dead = |_| false;
        assert_eq!(lives.ended(&[], vec![5, 6], |_| true), [5, 6]);
        assert_eq!(lives.ended(&[(1, 5)], vec![], dead), [5]);
        assert!(lives.ended(&[(1, 5)], vec![], dead).is_empty());
        assert_eq!(lives.ended(&[(1, 7), (1, 8)], vec![8, 7, 9], |pid| pid == 7), [8, 9]);
        assert!(lives.ended(&[(1, 9)], vec![], |_| true).is_empty());
    }

    /// The run is over once the other end of the socket is closed.
    #[test]
    fn stopped() {
        let (stop, stopped) = std::os::unix::net::UnixStream::pair().unwrap();
        let stopped = OwnedFd::from(stopped);
        assert!(!is_over(&stopped));
        drop(stop);
        assert!(is_over(&stopped));
    }
}
