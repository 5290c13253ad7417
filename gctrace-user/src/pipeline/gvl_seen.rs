//! Exports the GVL reports.

use gctrace_common::{
    event::{Header, LifeEvent},
    gvl::{GvlKey, GvlThread, GvlWaitEvent},
};

use super::{
    Pipeline,
    gvl::{Gvl, Report},
};
use crate::{
    bpf::GvlRead,
    decode::GvlRecord,
    model::{self, Process, seen::Seen},
};

impl Pipeline {
    /// The GVL data in progress.
    pub fn gvl(&mut self) -> &mut Gvl {
        &mut self.gvl
    }

    pub(super) fn gvl_record(&mut self, record: GvlRecord) {
        let report = match record {
            GvlRecord::Wait(event) => {
                let request = self.request_of_wait(&event);
                self.gvl.wait(&event, request)
            }
            GvlRecord::Thread(thread) => Some(self.gvl.thread(thread)),
            GvlRecord::Span(state, event) => self.gvl.span(state, &event),
        };
        self.gvl_report(report);
    }

    /// The request that the waiting thread was serving. Its process must be traced first: only such a process has requests.
    fn request_of_wait(&mut self, event: &GvlWaitEvent) -> Option<u64> {
        let GvlWaitEvent { header: Header { tgid: pid, tid, image, ts_ns, .. }, request_ns, .. } = *event;
        if request_ns == 0 {
            return None;
        }
        let is_traced = self.is_traced(pid, image, &model::comm(&event.comm), ts_ns);
        if is_traced { self.request_of_stack(pid, tid, request_ns) } else { Some(0) }
    }

    pub(super) fn gvl_report(&mut self, reports: impl IntoIterator<Item = Report>) {
        for report in reports {
            let process = self.process_of(report.pid, report.image, &report.comm, report.ts_ns);
            if let Some((shown, process)) = self.gvl.shown(report, process.as_ref()).zip(process) {
                self.see(&process, shown.seen());
            }
        }
    }

    /// Reports the current GVL sums of threads.
    pub fn gvl_so_far(&mut self) {
        if let Some(running) = self.gvl.running() {
            self.gvl_so_far_with(running);
        }
    }

    pub(super) fn gvl_so_far_with(&mut self, mut running: Vec<(GvlKey, GvlThread)>) {
        running.retain(|(_, thread)| !self.is_left_behind(&thread.header));
        for (pid, so_far) in self.gvl.so_far(&running) {
            if let Some(process) = self.process(pid) {
                self.see(&process, Seen::GvlSoFar(&so_far));
            }
        }
    }

    /// Reports the times in which individual waits were not reported, up to now.
    pub(super) fn gvl_gaps(&mut self, now_ns: u64) {
        for gap in self.gvl.gaps(now_ns) {
            self.outputs.tell(|exporter| exporter.gvl_gap(gap));
        }
    }

    /// Handles a process that is gone or has become another program.
    pub(super) fn gvl_process(&mut self, end: &LifeEvent) {
        let Header { tgid: pid, execs, ts_ns, .. } = end.header;
        let reports = self.gvl.gone(pid);
        self.gvl_report(reports);
        // The kernel side's maps hold entries of all processes: searching for those of one takes a while, so skip it without entries.
        let read =
            if end.gvl == 0 { Some(GvlRead::default()) } else { self.gvl.take_out(Some((pid, execs))) };
        if let Some(read) = read {
            self.gvl_finish(pid, &read, ts_ns);
        }
    }

    /// Records of another program have arrived before that of the exec, if that arrives at all, or the image is no longer probed. The sums and
    /// edges of the threads are then incomplete and dropped: the kernel side's part is taken and refused with the record of the exec, or the
    /// end of the process.
    pub(super) fn gvl_replaced(&mut self, pid: u32) {
        let reports = self.gvl.gone(pid);
        self.gvl_report(reports);
        self.gvl.abandon(pid);
    }

    /// Ends tracing.
    pub(super) fn gvl_detach(&mut self, now_ns: u64) {
        let reports = self.gvl.close();
        self.gvl_report(reports);
        self.gvl_gaps(now_ns);
        let Some(read) = self.gvl.take_out(None) else { return };
        for pid in self.gvl.processes(&read) {
            let of = GvlRead {
                threads: read.threads.iter().filter(|thread| thread.header.tgid == pid).copied().collect(),
                edges: read.edges.iter().filter(|(key, _)| key.tgid == pid).copied().collect(),
                tasks: read.tasks.clone(),
            };
            self.gvl_finish(pid, &of, now_ns);
        }
    }

    fn gvl_finish(&mut self, pid: u32, read: &GvlRead, end_ns: u64) {
        for thread in &read.threads {
            let coverage =
                self.traced.get(&pid).and_then(|traced| traced.process.image.gvl).unwrap_or_default();
            let report = self.gvl.last_of(thread, read, coverage, end_ns);
            self.gvl_report([report]);
        }
        let (so_far, summary) = self.gvl.finish(pid, read, end_ns);
        let Some(process) = self.process(pid) else { return };
        if let Some(mut so_far) = so_far {
            // The last holder has held the GVL until the end.
            let held = summary.as_ref().and_then(|summary| summary.sums.hold);
            so_far.hold_ns = so_far.hold_ns.max(held.map_or(0, |held| held.ns));
            self.see(&process, Seen::GvlSoFar(&so_far));
        }
        if let Some(summary) = summary {
            self.see(&process, Seen::GvlProcess(&summary));
        }
    }

    fn process(&self, pid: u32) -> Option<Process> {
        self.traced.get(&pid).map(|traced| traced.process.clone())
    }
}
