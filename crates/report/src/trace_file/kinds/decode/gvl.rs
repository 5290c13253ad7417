//! What was seen of the GVL.

use std::sync::Arc;

use gctrace_common::gvl::BUCKETS;

use super::{Invalid, Tables, required, wire};
use crate::{
    model::{
        gvl::{
            GvlBlocked, GvlBlocker, GvlCoverage, GvlGap, GvlGc, GvlProcessSummary, GvlSpan, GvlSplit,
            GvlSums, GvlTaskTimes, GvlThreadSummary, GvlTimes, GvlWait, GvlWho, Histogram,
        },
        gvl_so_far::GvlSoFar,
    },
    trace_file::codes::Code,
};

pub(in crate::trace_file) fn coverage(coverage: wire::Coverage) -> GvlCoverage {
    let wire::Coverage { holds, ends, only_blocked, woken } = coverage;
    GvlCoverage { holds, ends, only_blocked, woken }
}

pub(in crate::trace_file) fn gap(gap: wire::GvlGap) -> GvlGap {
    let wire::GvlGap { from_ns, to_ns, summed } = gap;
    GvlGap { from_ns, to_ns, summed }
}

/// One count per bucket; trailing zeros are omitted in the message.
fn buckets(counts: &[u64]) -> Result<Box<[u64; BUCKETS]>, Invalid> {
    let mut buckets = Box::new([0; BUCKETS]);
    let filled = buckets.get_mut(..counts.len());
    let filled = filled
        .ok_or_else(|| Invalid::new(format!("a histogram has {} buckets, not {BUCKETS}", counts.len())))?;
    filled.copy_from_slice(counts);
    Ok(buckets)
}

fn times(times: wire::Times) -> GvlTimes {
    let wire::Times { count, ns, max_ns } = times;
    GvlTimes { count, ns, max_ns }
}

pub(super) fn split(split: wire::Split) -> Result<GvlSplit, Invalid> {
    let times = |times: Option<wire::TaskTimes>| {
        let wire::TaskTimes { cpu_ns, runnable_ns, blocked_ns } = required(times, "times of threads")?;
        Ok(GvlTaskTimes { cpu_ns, runnable_ns, blocked_ns })
    };
    Ok(GvlSplit { waiting: times(split.waiting)?, holding: times(split.holding)?, away: times(split.away)? })
}

impl Tables {
    pub(in crate::trace_file) fn so_far(&self, so_far: &wire::GvlSoFar) -> Result<GvlSoFar, Invalid> {
        self.takes(BUCKETS)?;
        Ok(GvlSoFar::of_counts(buckets(&so_far.waits)?, so_far.wait_ns, so_far.hold_ns))
    }

    fn sums(&self, sums: Option<&wire::Sums>) -> Result<GvlSums, Invalid> {
        let sums = required(sums, "sums of the GVL")?;
        self.takes(BUCKETS)?;
        Ok(GvlSums {
            wall_ns: sums.wall_ns,
            watched_ns: sums.watched_ns,
            wait: times(required(sums.wait, "times of waits")?),
            hold: sums.hold.map(times),
            away: sums.away.map(times),
            split: sums.split.map(split).transpose()?,
            waits: Histogram::of_counts(buckets(&sums.waits)?),
        })
    }

    fn who(&self, who: Option<wire::Who>) -> Result<GvlWho, Invalid> {
        let wire::Who { tid, comm_text } = required(who, "a thread")?;
        Ok(GvlWho { tid, comm: Arc::clone(self.text(comm_text)?) })
    }

    pub(in crate::trace_file) fn gvl_span(&self, span: &wire::GvlSpan) -> Result<GvlSpan, Invalid> {
        let &wire::GvlSpan { who, id, doing, begin_ns, ns } = span;
        Ok(GvlSpan { who: self.who(who)?, id, doing: Code::of(doing)?, begin_ns, ns })
    }

    fn blocker(&mut self, blocker: &wire::Blocker) -> Result<GvlBlocker, Invalid> {
        let ran = blocker.ran.iter().map(|ran| Ok((ran.count, self.stack(ran.stack)?)));
        let ran = ran.collect::<Result<_, Invalid>>()?;
        Ok(GvlBlocker {
            hold: self.gvl_span(required(blocker.hold.as_ref(), "who held the GVL")?)?,
            until: self.optional_stack(blocker.until_stack)?,
            ran,
            first: blocker.first,
        })
    }

    pub(in crate::trace_file) fn gvl_wait(&mut self, wait: &wire::GvlWait) -> Result<GvlWait, Invalid> {
        Ok(GvlWait {
            who: self.who(wait.who)?,
            id: wait.id,
            thread: wait.thread,
            begin_ns: wait.begin_ns,
            ns: wait.ns,
            blocker: wait.blocker.as_ref().map(|blocker| self.blocker(blocker)).transpose()?,
            stack: self.optional_stack(wait.stack)?,
            request: wait.request,
        })
    }

    pub(in crate::trace_file) fn gvl_thread(
        &self,
        thread: &wire::GvlThread,
    ) -> Result<GvlThreadSummary, Invalid> {
        let last = thread.last_doing.map(|doing| Ok((Code::of(doing)?, thread.last_since_ns)));
        Ok(GvlThreadSummary {
            coverage: coverage(required(thread.coverage, "what is seen of the GVL")?),
            who: self.who(thread.who)?,
            id: thread.id,
            last: last.transpose()?,
            thread: thread.thread,
            begin_ns: thread.begin_ns,
            end_ns: thread.end_ns,
            ended: thread.ended,
            sums: self.sums(thread.sums.as_ref())?,
        })
    }

    pub(in crate::trace_file) fn gvl_process(
        &self,
        process: &wire::GvlProcess,
    ) -> Result<GvlProcessSummary, Invalid> {
        let who = |who: Option<wire::Who>| who.map(|who| self.who(Some(who))).transpose();
        let blocked = process.blocked.iter().map(|blocked| {
            Ok(GvlBlocked {
                waiter: who(blocked.waiter)?,
                holder: who(blocked.holder)?,
                times: times(required(blocked.times, "times of waits")?),
            })
        });
        Ok(GvlProcessSummary {
            coverage: coverage(required(process.coverage, "what is seen of the GVL")?),
            threads: process.threads,
            span_ns: process.span_ns,
            end_ns: process.end_ns,
            sums: self.sums(process.sums.as_ref())?,
            gc: process.gc.map(|wire::GcOfGvl { pause_ns, wait_ns }| GvlGc { pause_ns, wait_ns }),
            blocked: blocked.collect::<Result<_, Invalid>>()?,
        })
    }
}
