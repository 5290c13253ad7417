//! The GVL's part of the data path: long waits meet their stacks, threads and edges become sums.

use std::collections::HashMap;

use gctrace_common::gvl::{GvlThread, GvlWaitEvent};

use super::Pipeline;
use crate::{
    aggregate::gvl::{GvlFold, who},
    bpf::{GvlRead, GvlReader},
    model::{gvl::GvlWait, stack::Stack},
};

/// How long a wait whose stack has been announced waits for it. It comes within microseconds; if it does not, it was lost.
const PATIENCE_NS: u64 = 1_000_000_000;

/// What is under way.
pub(super) struct Gvl {
    reader: Option<GvlReader>,
    folds: HashMap<u32, GvlFold>,
    /// Waits whose stack has not come yet, by process and thread.
    pending: HashMap<(u32, u32), Pending>,
}

struct Pending {
    /// When the thread got the GVL, which is the time of the stack.
    ts_ns: u64,
    image: u32,
    wait: GvlWait,
}

impl Gvl {
    pub(super) fn new(reader: Option<GvlReader>) -> Self {
        Self { reader, folds: HashMap::new(), pending: HashMap::new() }
    }
}

impl Pipeline {
    /// A thread had to wait long.
    pub(super) fn gvl_wait(&mut self, event: &GvlWaitEvent) {
        let header = &event.header;
        let key = (header.tgid, header.tid);
        let wait = GvlWait {
            who: who(header.tid, &event.comm),
            thread: (event.thread != 0).then_some(event.thread),
            begin_ns: event.begin_ns,
            ns: header.ts_ns.saturating_sub(event.begin_ns),
            holder: (event.holder.id != 0).then(|| who(event.holder.tid, &event.holder.comm)),
            stack: None,
        };
        let pending = Pending { ts_ns: header.ts_ns, image: header.image, wait };
        if event.stack == 0 {
            return self.report_wait(key.0, pending);
        }
        // The native thread has gone on, so the stack before was lost.
        if let Some(before) = self.gvl.pending.insert(key, pending) {
            self.report_wait(key.0, before);
        }
    }

    /// The stack of a wait.
    pub(super) fn gvl_stack(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        match self.gvl.pending.remove(&(pid, tid)) {
            Some(mut pending) if pending.ts_ns == ts_ns => {
                self.counts.gvl_stacks += 1;
                pending.wait.stack = Some(stack);
                self.report_wait(pid, pending);
            }
            other => {
                self.counts.gvl_stacks_unclaimed += 1;
                if let Some(pending) = other {
                    self.gvl.pending.insert((pid, tid), pending);
                }
            }
        }
    }

    /// Reports waits whose stack does not come: those that are old enough, and all of a process that has ended.
    pub(super) fn gvl_without_stacks(&mut self, now_ns: u64, ended: Option<u32>) {
        let due = |pid: u32, ts_ns: u64| ended == Some(pid) || ts_ns.saturating_add(PATIENCE_NS) < now_ns;
        let keys: Vec<_> =
            self.gvl.pending.iter().filter(|(key, p)| due(key.0, p.ts_ns)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(pending) = self.gvl.pending.remove(&key) {
                self.report_wait(key.0, pending);
            }
        }
    }

    fn report_wait(&mut self, pid: u32, pending: Pending) {
        let Pending { image, wait, .. } = pending;
        self.counts.gvl_waits_without_stack += u64::from(wait.stack.is_none());
        self.trace_known(pid, image, &wait.who.comm);
        let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else {
            self.counts.gvl_refused += 1;
            return;
        };
        self.counts.gvl_waits += 1;
        self.export(|exporter| exporter.gvl_wait(&process, &wait));
    }

    /// A thread has ended.
    pub(super) fn gvl_thread(&mut self, thread: &GvlThread) {
        self.gvl_summary(thread, thread.header.ts_ns, true);
    }

    fn gvl_summary(&mut self, thread: &GvlThread, end_ns: u64, ended: bool) {
        let pid = thread.header.tgid;
        self.counts.gvl_thread_waits += thread.waits;
        self.trace_known(pid, thread.header.image, "");
        let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else {
            self.counts.gvl_refused += 1;
            return;
        };
        // Hits are of images that are watched.
        let coverage = process.image.gvl.unwrap_or_default();
        let fold = self.gvl.folds.entry(pid).or_insert_with(|| GvlFold::new(coverage));
        let summary = fold.thread(thread, end_ns, ended);
        self.counts.gvl_threads += 1;
        self.export(|exporter| exporter.gvl_thread(&process, &summary));
    }

    /// A process is gone or has become another program, before which it had been `execs` others.
    pub(super) fn gvl_process(&mut self, pid: u32, execs: u32, end_ns: u64) {
        self.gvl_without_stacks(0, Some(pid));
        if self.gvl.reader.is_none() {
            return;
        }
        let read = self.gvl_take_out(Some((pid, execs)));
        self.gvl_finish(pid, &read, end_ns);
    }

    /// Tracing ends.
    pub(super) fn gvl_detach(&mut self, now_ns: u64) {
        self.gvl_without_stacks(u64::MAX, None);
        if self.gvl.reader.is_none() {
            return;
        }
        let read = self.gvl_take_out(None);
        let mut pids: Vec<u32> = read.threads.iter().map(|thread| thread.header.tgid).collect();
        pids.extend(self.gvl.folds.keys());
        pids.sort_unstable();
        pids.dedup();
        for pid in pids {
            let of = GvlRead {
                threads: read.threads.iter().filter(|thread| thread.header.tgid == pid).copied().collect(),
                edges: read.edges.iter().filter(|(key, _)| key.tgid == pid).copied().collect(),
            };
            self.gvl_finish(pid, &of, now_ns);
        }
    }

    fn gvl_take_out(&mut self, of: Option<(u32, u32)>) -> GvlRead {
        let Some(reader) = &mut self.gvl.reader else { return GvlRead::default() };
        reader.take_out(of).unwrap_or_else(|error| {
            // The ledger does not balance then.
            log::error!("reading what threads did with the GVL: {error}");
            GvlRead::default()
        })
    }

    fn gvl_finish(&mut self, pid: u32, read: &GvlRead, end_ns: u64) {
        for thread in &read.threads {
            self.counts.gvl_threads_read += 1;
            self.gvl_summary(thread, end_ns, false);
        }
        let Some(fold) = self.gvl.folds.remove(&pid) else { return };
        let summary = fold.finish(&read.edges, end_ns);
        if let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) {
            self.export(|exporter| exporter.gvl_process(&process, &summary));
        }
    }
}
