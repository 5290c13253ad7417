//! Garbage collection, requests, stacks, allocation, ends.

use std::sync::Arc;

use super::{Filling, wire};
use crate::{
    model::{
        GcCycle, GcState, GcWork, Memory, Pause, Shares,
        request::{Request, RequestMemory, States},
        seen::{CyclesBefore, ProcessEnd},
        stack::StackSample,
        trace::{Span, Trace, TraceOrigin},
    },
    ruby::stat::GcInfo,
    trace_file::codes::Code,
};

impl Filling {
    pub(in crate::trace_file) fn state(&mut self, state: &GcState) -> wire::GcState {
        let GcState { ts_ns, tid, stat, heaps, info, memory } = state;
        wire::GcState {
            ts_ns: *ts_ns,
            tid: *tid,
            stat: stat.clone(),
            heaps: heaps.iter().map(|values| wire::Values { values: values.clone() }).collect(),
            info: Some(self.info(info)),
            memory: memory.as_ref().map(memory_of),
        }
    }

    fn info(&mut self, info: &GcInfo) -> wire::GcInfo {
        let &GcInfo {
            major_by,
            need_major_by,
            gc_by,
            have_finalizer,
            immediate_sweep,
            state,
            weak_references,
        } = info;
        wire::GcInfo {
            major_by_text: self.optional(major_by),
            has_need_major_by: need_major_by.is_some(),
            need_major_by_text: self.optional(need_major_by.flatten()),
            gc_by_text: self.optional(gc_by),
            have_finalizer,
            immediate_sweep,
            state_text: self.text(state),
            weak_references: weak_references.map(|(all, _)| all),
            retained_weak_references: weak_references.and_then(|(_, retained)| retained),
        }
    }

    pub(in crate::trace_file) fn cycle(&mut self, cycle: &GcCycle) -> wire::Cycle {
        let GcCycle { comm, count, start, end, pauses, trigger, request, span, lost } = cycle;
        wire::Cycle {
            comm_text: self.text(comm),
            count: *count,
            start: Some(self.state(start)),
            end: end.as_ref().map(|end| self.state(end)),
            pauses: pauses.iter().map(pause_of).collect(),
            trigger_stack: trigger.as_ref().map(|stack| self.stack(stack)),
            request: *request,
            lost: *lost,
            span: span.map(span_of),
        }
    }

    pub(in crate::trace_file) fn work(&mut self, work: &GcWork) -> wire::Work {
        let GcWork { phase, tid, comm, begin_ns, ns } = work;
        wire::Work {
            phase: phase.code(),
            tid: *tid,
            comm_text: self.text(comm),
            begin_ns: *begin_ns,
            ns: *ns,
        }
    }

    pub(in crate::trace_file) fn request(&mut self, request: &Request) -> wire::Request {
        let Request {
            id,
            tid,
            begin_ns,
            end_ns,
            method,
            path,
            status,
            queue_ns,
            first_byte_ns,
            last_byte_ns,
            response_bytes,
            gcs,
            gc_ns,
            gc_pauses,
            gc_other,
            gvl_wait_ns,
            states,
            split,
            alloc,
            memory: RequestMemory { faults, rss_growth },
            handler,
            trace,
            job,
            is_run,
            gc_states,
        } = request;
        let (of_job, gc_states) = (job.as_ref(), gc_states.as_deref());
        wire::Request {
            id: *id,
            tid: *tid,
            begin_ns: *begin_ns,
            end_ns: *end_ns,
            method_text: self.optional(*method),
            path_text: self.optional(path.as_deref()),
            status: status.map(u32::from),
            first_byte_ns: *first_byte_ns,
            last_byte_ns: *last_byte_ns,
            response_bytes: *response_bytes,
            gcs: *gcs,
            gc_ns: *gc_ns,
            gc_pauses: *gc_pauses,
            gc_other_pauses: gc_other.map(|other| other.pauses),
            gc_other_ns: gc_other.map(|other| other.ns),
            gvl_wait_ns: *gvl_wait_ns,
            queue_ns: *queue_ns,
            states: states.map(|States { cpu_ns, runnable_ns, blocked_ns }| wire::States {
                cpu_ns,
                runnable_ns,
                blocked_ns,
            }),
            job: if *is_run { 2 } else { u32::from(job.is_some()) },
            job_queue_text: self.optional(of_job.and_then(|job| job.queue.as_deref())),
            jid: of_job.and_then(|job| job.jid.clone()),
            enqueued_us: of_job.and_then(|job| job.enqueued_us),
            latency_ns: of_job.and_then(|job| job.latency_ns),
            gc_begin: gc_states.map(|states| self.state(&states.begin)),
            gc_end: gc_states.map(|states| self.state(&states.end)),
            handler_stack: handler.as_ref().map(|frame| self.stack(&[Arc::clone(frame)].into())),
            trace: trace.map(trace_of),
            alloc_slots: alloc.map(|alloc| alloc.slots),
            alloc_bytes: alloc.map(|alloc| alloc.bytes),
            split: split.as_ref().map(super::gvl::split),
            minor_faults: faults.map(|faults| faults.minor),
            major_faults: faults.map(|faults| faults.major),
            rss_growth: *rss_growth,
        }
    }

    pub(in crate::trace_file) fn sample(&mut self, sample: &StackSample) -> wire::Sample {
        let StackSample { ts_ns, tid, comm, state, cpu_ns, wall_ns, gc, request, span, stack } = sample;
        wire::Sample {
            ts_ns: *ts_ns,
            tid: *tid,
            comm_text: self.text(comm),
            state: state.code(),
            cpu_ns: *cpu_ns,
            wall_ns: *wall_ns,
            gc: gc.code(),
            stack: self.stack(stack),
            request: *request,
            span: span.map(span_of),
        }
    }

    pub(in crate::trace_file) fn ended(&mut self, end: &ProcessEnd) -> wire::Ended {
        // Recordings contain pauses in full, so nothing is beyond their end.
        let ProcessEnd { reason, ts_ns, since_ns, outside_ns, beyond_ns: _, shutdown, cycles, before, lost } =
            end;
        let (cycles_before_kind, cycles_before) = match *before {
            CyclesBefore::Unknown => (0, 0),
            CyclesBefore::Earlier(cycles) => (1, cycles),
            CyclesBefore::Missed(cycles) => (2, cycles),
        };
        wire::Ended {
            reason: reason.code(),
            ts_ns: *ts_ns,
            since_ns: *since_ns,
            outside_ns: *outside_ns,
            shutdown: shutdown.as_ref().map(|state| self.state(state)),
            cycles: *cycles,
            cycles_before_kind,
            cycles_before,
            lost: *lost,
        }
    }
}

fn memory_of(memory: &Memory) -> wire::Memory {
    let &Memory { rss, peak_rss, anon, file, shmem, swap, source, shares } = memory;
    let shares =
        shares.map(|Shares { pss, private_dirty, read_ns }| wire::Shares { pss, private_dirty, read_ns });
    wire::Memory { rss, peak_rss, anon, file, shmem, swap, source: source.code(), shares }
}

fn trace_of(trace: Trace) -> wire::Trace {
    let Trace { trace_id, caller, origin } = trace;
    wire::Trace {
        id_high: (trace_id >> 64) as u64,
        id_low: trace_id as u64,
        parent_span_id: caller.map_or(0, |caller| caller.span_id),
        sampled: caller.is_some_and(|caller| caller.sampled),
        // The request itself says whether it is a job.
        origin: u32::from(origin == TraceOrigin::Thread),
    }
}

pub(in crate::trace_file) fn span_of(span: Span) -> wire::Span {
    let Span { trace_id, span_id } = span;
    wire::Span { trace_high: (trace_id >> 64) as u64, trace_low: trace_id as u64, id: span_id }
}

fn pause_of(pause: &Pause) -> wire::Pause {
    let &Pause { tid, begin_ns, ns, kind, mark_ns, sweep_ns, other_ns } = pause;
    wire::Pause { tid, begin_ns, ns, kind: kind.map(Code::code), mark_ns, sweep_ns, other_ns }
}
