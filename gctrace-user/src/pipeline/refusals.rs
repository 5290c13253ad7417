//! Processes and images that are not traced, or not any more.

use super::{Pipeline, Waiting};
use crate::model::EndReason;

/// Processes that are remembered.
const REMEMBERED: usize = 4096;

/// Until when nothing of a process is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It failed a proof: as long as it runs this program.
    Program,
    /// The probes of this image were detached: until it is found with another one.
    Image(u32),
}

impl Pipeline {
    /// A process that is left, and is refused when its image is looked at again, or is left again, is one.
    fn count_refusal(&mut self, pid: Option<u32>) {
        if self.refused_pids.len() >= REMEMBERED {
            self.refused_pids.clear();
        }
        if pid.is_none_or(|pid| self.refused_pids.insert(pid)) {
            self.counts.refused += 1;
        }
    }

    /// A process or image is not traced.
    pub fn refuse(&mut self, pid: Option<u32>, path: &str, reason: &str) {
        self.count_refusal(pid);
        self.export(|exporter| exporter.refused(pid, path, reason));
    }

    /// The VM of a followed process did not pass a proof: what is traced of it ends, and nothing is reported any more.
    pub fn refuse_process(&mut self, pid: u32, path: &str, reason: &str, ts_ns: u64) {
        self.refused.insert(pid, Refusal::Program);
        self.end(pid, EndReason::Detached, ts_ns);
        self.refuse(Some(pid), path, reason);
    }

    /// The probes of the image that a process runs were detached. It is traced again once it is found with another one.
    pub fn leave_process(&mut self, pid: u32, image: u32, path: &str, reason: &str, ts_ns: u64) {
        if let Some(traced) = self.traced.get(&pid) {
            // Its records go on with these numbers.
            self.waiting.insert(pid, Waiting::after(traced.fold.last_seq()));
            self.beginnings.forked(pid, traced.beginning.count);
        }
        self.refused.insert(pid, Refusal::Image(image));
        self.left.entry(pid).or_default().push(image);
        self.end(pid, EndReason::Detached, ts_ns);
        self.refuse(Some(pid), path, reason);
    }

    /// Counts a record of a process of which nothing is reported; `false`: it is reported.
    pub(super) fn is_refused(&mut self, header: &gctrace_common::event::Header) -> bool {
        let Some(refusal) = self.refused.get(&header.tgid) else { return false };
        if matches!(refusal, Refusal::Image(_)) {
            self.waiting.insert(header.tgid, Waiting::after(header.seq));
        }
        self.counts.refused_records += 1;
        true
    }

    /// Whether this program of a process was traced with this image before. What its threads did with the GVL since then has a gap: it is refused, and
    /// is no other program.
    pub(super) fn has_left(&self, pid: u32, image: u32) -> bool {
        self.left.get(&pid).is_some_and(|left| left.contains(&image))
    }
}
