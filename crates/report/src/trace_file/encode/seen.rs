//! What is seen of a process, as an entry: the one table of what a recording has of each [`Seen`].

use gctrace_common::gvl::BUCKETS;

use super::{Filling, alloc, so_far, wire};
use crate::{
    model::{Process, seen::Seen},
    trace_file::wire::What,
};

impl Filling {
    /// Adds what was seen of a process.
    pub(in crate::trace_file) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        let index = self.process(process);
        let what = match seen {
            Seen::Process { state, now_ns } => {
                let state = state.map(|state| self.state(state));
                What::Process(Box::new(wire::ProcessSeen { state, now_ns }))
            }
            Seen::Cycle(cycle) => What::Cycle(Box::new(self.cycle(cycle))),
            Seen::Work(work) => What::Work(Box::new(self.work(work))),
            Seen::Request(request) => What::Request(Box::new(self.request(request))),
            Seen::Stack(sample) => What::Sample(Box::new(self.sample(sample))),
            Seen::GvlWait(wait) => What::GvlWait(Box::new(self.gvl_wait(wait))),
            Seen::GvlSpan(span) => What::GvlSpan(Box::new(self.gvl_span(span))),
            Seen::GvlThread(summary) => What::GvlThread(Box::new(self.gvl_thread(summary))),
            Seen::GvlSoFar(sums) => What::GvlSoFar(Box::new(so_far(sums))),
            Seen::GvlProcess(summary) => What::GvlProcess(Box::new(self.gvl_process(summary))),
            Seen::Alloc(sum) => What::Alloc(Box::new(alloc(sum))),
            Seen::AllocStack(stack) => What::AllocStack(Box::new(self.alloc_stack(stack))),
            Seen::Ended(end) => What::Ended(Box::new(self.ended(end))),
        };
        if matches!(what, What::GvlThread(_) | What::GvlSoFar(_) | What::GvlProcess(_)) {
            self.words += BUCKETS;
        }
        self.push(Some(index), what);
    }

    /// Adds that a process or image is not traced.
    pub(in crate::trace_file) fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) {
        let (path_text, reason_text) = (self.text(path), self.text(reason));
        self.push(None, What::Refused(Box::new(wire::Refused { pid, path_text, reason_text })));
    }
}
