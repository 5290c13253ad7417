//! Everything in an entry that a copy of a recording may have to change: names, times, thread and request ids.
//!
//! Each type is destructured completely, so a new field does not compile until it is decided what a copy does with it.

use std::sync::Arc;

use crate::model::{
    GcCycle, GcState, GcWork, Memory, Pause, Shares,
    gvl::{GvlBlocked, GvlBlocker, GvlProcessSummary, GvlSpan, GvlThreadSummary, GvlWait, GvlWho},
    request::{Job, Request, UnitStates},
    seen::ProcessEnd,
    stack::{Stack, StackSample},
    trace::{Span, Trace},
};

/// A visitor that changes what it needs to.
pub(super) trait Visit {
    /// Name of a thread.
    fn thread_name(&mut self, _name: &mut Arc<str>) {}
    /// A stack.
    fn stack(&mut self, _stack: &mut Stack) {}
    /// Path of a request.
    fn path(&mut self, _path: &mut String) {}
    /// Name of a program, in place of the path of its run.
    fn program(&mut self, _name: &mut String) {}
    /// The trace of a request.
    fn trace(&mut self, _trace: &mut Option<Trace>) {}
    /// The fields that only jobs have.
    fn job(&mut self, _job: &mut Job) {}
    /// A point in time, `CLOCK_MONOTONIC` nanoseconds.
    fn time(&mut self, _ns: &mut u64) {}
    /// A thread id.
    fn tid(&mut self, _tid: &mut u32) {}
    /// The span that was active on a thread.
    fn span(&mut self, _span: &mut Option<Span>) {}
    /// A request id.
    fn request(&mut self, _id: &mut u64) {}
}

pub(super) fn process(state: Option<&mut GcState>, times: [&mut u64; 2], with: &mut impl Visit) {
    if let Some(state) = state {
        self::state(state, with);
    }
    for time in times {
        with.time(time);
    }
}

pub(super) fn work(work: &mut GcWork, with: &mut impl Visit) {
    let GcWork { phase: _, tid, comm, begin_ns, ns: _ } = work;
    with.tid(tid);
    with.time(begin_ns);
    name(comm, with);
}

pub(super) fn sample(sample: &mut StackSample, with: &mut impl Visit) {
    let StackSample { ts_ns, tid, comm, state: _, cpu_ns: _, wall_ns: _, gc: _, request, span, stack } =
        sample;
    with.span(span);
    with.time(ts_ns);
    with.tid(tid);
    with.thread_name(comm);
    number(request, with);
    with.stack(stack);
}

pub(super) fn gvl_thread(summary: &mut GvlThreadSummary, with: &mut impl Visit) {
    let GvlThreadSummary { coverage: _, who, id: _, last, thread: _, begin_ns, end_ns, ended: _, sums: _ } =
        summary;
    self::who(who, with);
    if let Some((_, since_ns)) = last {
        with.time(since_ns);
    }
    with.time(begin_ns);
    with.time(end_ns);
}

pub(super) fn gvl_process(summary: &mut GvlProcessSummary, with: &mut impl Visit) {
    let GvlProcessSummary { coverage: _, threads: _, span_ns: _, end_ns, sums: _, gc: _, blocked } = summary;
    with.time(end_ns);
    for GvlBlocked { waiter, holder, times: _ } in blocked {
        waiter.iter_mut().chain(holder).for_each(|who| self::who(who, with));
    }
}

pub(super) fn ended(end: &mut ProcessEnd, with: &mut impl Visit) {
    let ProcessEnd {
        reason: _,
        ts_ns,
        since_ns,
        outside_ns: _,
        beyond_ns: _,
        shutdown,
        cycles: _,
        before: _,
        lost: _,
    } = end;
    with.time(ts_ns);
    with.time(since_ns);
    if let Some(state) = shutdown {
        self::state(state, with);
    }
}

fn name(comm: &mut String, with: &mut impl Visit) {
    let mut name = Arc::from(std::mem::take(comm));
    with.thread_name(&mut name);
    *comm = name.to_string();
}

/// A request id. 0 means that the id is unknown.
pub(super) fn number(request: &mut Option<u64>, with: &mut impl Visit) {
    if let Some(id) = request.as_mut().filter(|id| **id != 0) {
        with.request(id);
    }
}

fn state(state: &mut GcState, with: &mut impl Visit) {
    let GcState { ts_ns, tid, stat: _, heaps: _, info: _, memory } = state;
    with.time(ts_ns);
    with.tid(tid);
    if let Some(memory) = memory {
        let Memory { rss: _, peak_rss: _, anon: _, file: _, shmem: _, swap: _, source: _, shares } = memory;
        if let Some(Shares { pss: _, private_dirty: _, read_ns: Some(read_ns) }) = shares {
            with.time(read_ns);
        }
    }
}

pub(super) fn cycle(cycle: &mut GcCycle, with: &mut impl Visit) {
    let GcCycle { comm, count: _, start, end, pauses, trigger, request, span, lost: _ } = cycle;
    with.span(span);
    name(comm, with);
    state(start, with);
    if let Some(end) = end {
        state(end, with);
    }
    for pause in pauses {
        let Pause { tid, begin_ns, ns: _, kind: _, mark_ns: _, sweep_ns: _, other_ns: _ } = pause;
        with.tid(tid);
        with.time(begin_ns);
    }
    if let Some(stack) = trigger {
        with.stack(stack);
    }
    number(request, with);
}

pub(super) fn request(request: &mut Request, with: &mut impl Visit) {
    let Request {
        id,
        tid,
        begin_ns,
        end_ns,
        method: _,
        path,
        status: _,
        queue_ns: _,
        first_byte_ns: _,
        last_byte_ns: _,
        response_bytes: _,
        gcs: _,
        gc_ns: _,
        gc_pauses: _,
        gc_other: _,
        gvl_wait_ns: _,
        states: _,
        split: _,
        alloc: _,
        memory: _,
        handler,
        trace,
        job,
        is_run,
        gc_states,
    } = request;
    with.request(id);
    with.tid(tid);
    with.time(begin_ns);
    if let Some(end_ns) = end_ns {
        with.time(end_ns);
    }
    match path {
        Some(name) if *is_run => with.program(name),
        Some(path) => with.path(path),
        None => {}
    }
    if let Some(frame) = handler {
        let mut stack = [Arc::clone(frame)].into();
        with.stack(&mut stack);
        if let [shown] = &*stack {
            *frame = Arc::clone(shown);
        }
    }
    with.trace(trace);
    if let Some(job) = job {
        with.job(job);
    }
    if let Some(UnitStates { begin, end }) = gc_states.as_deref_mut() {
        state(begin, with);
        state(end, with);
    }
}

fn who(who: &mut GvlWho, with: &mut impl Visit) {
    let GvlWho { tid, comm } = who;
    with.tid(tid);
    with.thread_name(comm);
}

pub(super) fn gvl_span(span: &mut GvlSpan, with: &mut impl Visit) {
    let GvlSpan { who, id: _, doing: _, begin_ns, ns: _ } = span;
    self::who(who, with);
    with.time(begin_ns);
}

pub(super) fn gvl_wait(wait: &mut GvlWait, with: &mut impl Visit) {
    let GvlWait { who, id: _, thread: _, begin_ns, ns: _, request, blocker, stack } = wait;
    self::who(who, with);
    with.time(begin_ns);
    number(request, with);
    if let Some(GvlBlocker { hold, until, ran, first: _ }) = blocker {
        gvl_span(hold, with);
        if let Some(stack) = until {
            with.stack(stack);
        }
        for (_, stack) in ran {
            with.stack(stack);
        }
    }
    if let Some(stack) = stack {
        with.stack(stack);
    }
}
