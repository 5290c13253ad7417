//! What is seen of the GVL.

use super::{Filling, wire};
use crate::{
    model::{
        gvl::{
            GvlBlocked, GvlBlocker, GvlCoverage, GvlGap, GvlGc, GvlProcessSummary, GvlSpan, GvlSplit,
            GvlSums, GvlTaskTimes, GvlThreadSummary, GvlTimes, GvlWait, GvlWho,
        },
        gvl_so_far::GvlSoFar,
    },
    trace_file::codes::Code as _,
};

pub(super) fn coverage(coverage: GvlCoverage) -> wire::Coverage {
    let GvlCoverage { holds, ends, only_blocked, woken } = coverage;
    wire::Coverage { holds, ends, only_blocked, woken }
}

pub(in crate::trace_file) fn gap(gap: GvlGap) -> wire::GvlGap {
    let GvlGap { from_ns, to_ns, summed } = gap;
    wire::GvlGap { from_ns, to_ns, summed }
}

pub(in crate::trace_file) fn so_far(so_far: &GvlSoFar) -> wire::GvlSoFar {
    wire::GvlSoFar { waits: counts(so_far.counts()), wait_ns: so_far.wait_ns, hold_ns: so_far.hold_ns }
}

/// Counts without trailing zeros.
fn counts(counts: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut counts: Vec<u64> = counts.collect();
    counts.truncate(counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
    counts
}

fn times(times: GvlTimes) -> wire::Times {
    let GvlTimes { count, ns, max_ns } = times;
    wire::Times { count, ns, max_ns }
}

fn task_times(times: GvlTaskTimes) -> wire::TaskTimes {
    let GvlTaskTimes { cpu_ns, runnable_ns, blocked_ns } = times;
    wire::TaskTimes { cpu_ns, runnable_ns, blocked_ns }
}

pub(super) fn split(split: &GvlSplit) -> wire::Split {
    let GvlSplit { waiting, holding, away } = *split;
    wire::Split {
        waiting: Some(task_times(waiting)),
        holding: Some(task_times(holding)),
        away: Some(task_times(away)),
    }
}

fn sums(sums: &GvlSums) -> wire::Sums {
    let GvlSums { wall_ns, watched_ns, wait, hold, away, split, waits } = sums;
    wire::Sums {
        wall_ns: *wall_ns,
        watched_ns: *watched_ns,
        wait: Some(times(*wait)),
        hold: hold.map(times),
        away: away.map(times),
        split: split.as_ref().map(self::split),
        waits: counts(waits.counts()),
    }
}

impl Filling {
    fn who(&mut self, who: &GvlWho) -> wire::Who {
        let GvlWho { tid, comm } = who;
        wire::Who { tid: *tid, comm_text: self.text(comm) }
    }

    pub(in crate::trace_file) fn gvl_span(&mut self, span: &GvlSpan) -> wire::GvlSpan {
        let GvlSpan { who, id, doing, begin_ns, ns } = span;
        wire::GvlSpan { who: Some(self.who(who)), id: *id, doing: doing.code(), begin_ns: *begin_ns, ns: *ns }
    }

    fn blocker(&mut self, blocker: &GvlBlocker) -> wire::Blocker {
        let GvlBlocker { hold, until, ran, first } = blocker;
        let hold = self.gvl_span(hold);
        let until_stack = until.as_ref().map(|stack| self.stack(stack));
        let ran = ran.iter().map(|(count, stack)| wire::Ran { count: *count, stack: self.stack(stack) });
        wire::Blocker { hold: Some(hold), until_stack, ran: ran.collect(), first: *first }
    }

    pub(in crate::trace_file) fn gvl_wait(&mut self, wait: &GvlWait) -> wire::GvlWait {
        let GvlWait { who, id, thread, begin_ns, ns, request, blocker, stack } = wait;
        wire::GvlWait {
            who: Some(self.who(who)),
            id: *id,
            thread: *thread,
            begin_ns: *begin_ns,
            ns: *ns,
            blocker: blocker.as_ref().map(|blocker| self.blocker(blocker)),
            stack: stack.as_ref().map(|stack| self.stack(stack)),
            request: *request,
        }
    }

    pub(in crate::trace_file) fn gvl_thread(&mut self, summary: &GvlThreadSummary) -> wire::GvlThread {
        let GvlThreadSummary { coverage: seen, who, id, last, thread, begin_ns, end_ns, ended, sums: of } =
            summary;
        wire::GvlThread {
            coverage: Some(coverage(*seen)),
            who: Some(self.who(who)),
            id: *id,
            last_doing: last.map(|(doing, _)| doing.code()),
            last_since_ns: last.map_or(0, |(_, since_ns)| since_ns),
            thread: *thread,
            begin_ns: *begin_ns,
            end_ns: *end_ns,
            ended: *ended,
            sums: Some(sums(of)),
        }
    }

    pub(in crate::trace_file) fn gvl_process(&mut self, summary: &GvlProcessSummary) -> wire::GvlProcess {
        let GvlProcessSummary { coverage: seen, threads, span_ns, end_ns, sums: of, gc, blocked } = summary;
        let blocked = blocked.iter().map(|GvlBlocked { waiter, holder, times: of }| wire::Blocked {
            waiter: waiter.as_ref().map(|who| self.who(who)),
            holder: holder.as_ref().map(|who| self.who(who)),
            times: Some(times(*of)),
        });
        wire::GvlProcess {
            blocked: blocked.collect(),
            coverage: Some(coverage(*seen)),
            threads: *threads,
            span_ns: *span_ns,
            end_ns: *end_ns,
            sums: Some(sums(of)),
            gc: gc.map(|GvlGc { pause_ns, wait_ns }| wire::GcOfGvl { pause_ns, wait_ns }),
        }
    }
}
