//! Processes and images that are not traced, or no longer traced.

use std::collections::HashSet;

use gctrace_common::event::Header;

use super::{Pipeline, TracedProcess, Waiting};
use crate::model::EndReason;

/// Maximum number of processes remembered as counted; all are forgotten above it.
const REMEMBERED: usize = 4096;

/// How long nothing is reported about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// As long as it runs this program: the program failed a proof.
    Program,
    /// Until it is found with another image: the probes of this one were detached.
    Image(u32),
}

/// What was counted of refused processes.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// Those that are counted.
    pub(super) pids: HashSet<u32>,
    /// Number of processes that were traced until a proof failed.
    disproven: u64,
}

impl Pipeline {
    /// Counts a refusal. A process is counted once, even if it is left several times, or refused when its image is inspected again.
    fn count_refusal(&mut self, pid: Option<u32>) {
        if self.counted.pids.len() >= REMEMBERED {
            self.counted.pids.clear();
        }
        if pid.is_none_or(|pid| self.counted.pids.insert(pid)) {
            self.counts.refused += 1;
        }
    }

    /// Reports that a process or image is not traced.
    pub fn refuse(&mut self, pid: Option<u32>, path: &str, reason: &str) {
        self.count_refusal(pid);
        self.export(|exporter| exporter.refused(pid, path, reason));
    }

    /// The VM of a followed process failed a proof: ends its tracing, and reports nothing more about it.
    pub fn refuse_process(&mut self, pid: u32, path: &str, reason: &str, ts_ns: u64) {
        if self.traced.contains_key(&pid) {
            self.counted.disproven += 1;
        }
        self.refused.insert(pid, Refusal::Program);
        self.end(pid, EndReason::Detached, ts_ns);
        self.refuse(Some(pid), path, reason);
    }

    /// Whether something was reported of a process: a cycle, or that it is traced and no later proof has failed.
    pub fn has_reported(&self) -> bool {
        self.counts.cycles > 0 || self.counts.processes > self.counted.disproven
    }

    /// The probes of the image that a process runs were detached: ends its tracing until it is found with another image.
    pub fn leave_process(&mut self, pid: u32, image: u32, path: &str, reason: &str, ts_ns: u64) {
        if let Some(traced) = self.traced.get(&pid) {
            // The sequence numbers of its records will continue.
            self.waiting.insert(pid, Waiting::after(traced.fold.last_seq()));
            self.beginnings.forked(pid, traced.beginning.count);
            // Its threads go on, and are new ones for the next image.
            self.gvl_replaced(pid);
        }
        self.refused.insert(pid, Refusal::Image(image));
        self.left.entry(pid).or_default().push(image);
        self.end(pid, EndReason::Detached, ts_ns);
        self.refuse(Some(pid), path, reason);
    }

    /// Counts a record of a process about which nothing is reported; `false`: the process is reported.
    pub(super) fn is_refused(&mut self, header: &Header) -> bool {
        let Some(refusal) = self.refused.get(&header.tgid) else { return false };
        if matches!(refusal, Refusal::Image(_)) {
            self.waiting.insert(header.tgid, Waiting::after(header.seq));
        }
        self.counts.refused_records += 1;
        true
    }

    /// Whether GVL data is of an image with which the process was traced before, and no longer is.
    pub(super) fn is_left_behind(&self, header: &Header) -> bool {
        let its = |traced: &TracedProcess| traced.process.image.index == header.image;
        self.has_left(header.tgid, header.image) && !self.traced.get(&header.tgid).is_some_and(its)
    }

    /// Whether this program of a process was traced with this image before. The GVL data of its threads has a gap since then, so it is refused;
    /// it does not belong to another program.
    pub(super) fn has_left(&self, pid: u32, image: u32) -> bool {
        self.left.get(&pid).is_some_and(|left| left.contains(&image))
    }
}
