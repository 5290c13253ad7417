//! Garbage collection, requests, stacks, allocation, ends.

use std::sync::Arc;

use super::{Invalid, Tables, fields::Fields, required, wire};
use crate::{
    model::{
        GcCycle, GcState, GcWork, Memory, Pause, Shares,
        request::{Allocated, GcTime, Job, PageFaults, Request, RequestMemory, States, UnitStates},
        seen::{CyclesBefore, ProcessEnd},
        stack::StackSample,
        trace::{Caller, Span, Trace, TraceOrigin},
    },
    ruby::stat::GcInfo,
    trace_file::{codes::Code, kinds::Owned},
};

impl Tables {
    /// The number of values of `GC.stat` must equal the number of the Ruby's keys.
    pub(super) fn check_states(&self, process: usize, seen: &Owned) -> Result<(), Invalid> {
        let Some(process) = self.processes.get(process) else { return Ok(()) };
        let (keys, heap_keys) = (process.image.stat_keys.len(), process.image.heap_keys.len());
        let states = match seen {
            Owned::Process { state, .. } => [(**state).as_ref(), None],
            Owned::Cycle(cycle) => [Some(&cycle.start), cycle.end.as_ref()],
            Owned::Request(request) => {
                let states = request.gc_states.as_deref();
                [states.map(|states| &states.begin), states.map(|states| &states.end)]
            }
            Owned::Ended(end) => [end.shutdown.as_ref(), None],
            _ => [None, None],
        };
        for state in states.into_iter().flatten() {
            if state.stat.len() != keys || state.heaps.iter().any(|heap| heap.len() != heap_keys) {
                return Err(Invalid::new("a state has other values than its Ruby has keys".to_owned()));
            }
        }
        Ok(())
    }

    pub(in crate::trace_file) fn state(&self, state: wire::GcState) -> Result<GcState, Invalid> {
        let wire::GcState { ts_ns, tid, stat, heaps, info, memory } = state;
        Ok(GcState {
            ts_ns,
            tid,
            stat,
            heaps: heaps.into_iter().map(|heap| heap.values).collect(),
            info: self.info(&required(info, "the GC info of a state")?)?,
            memory: memory.map(memory_of).transpose()?,
        })
    }

    fn info(&self, info: &wire::GcInfo) -> Result<GcInfo, Invalid> {
        let need_major_by = self.optional_word(info.need_major_by_text)?;
        Ok(GcInfo {
            major_by: self.optional_word(info.major_by_text)?,
            need_major_by: info.has_need_major_by.then_some(need_major_by),
            gc_by: self.optional_word(info.gc_by_text)?,
            have_finalizer: info.have_finalizer,
            immediate_sweep: info.immediate_sweep,
            state: self.word(info.state_text)?,
            weak_references: info.weak_references.map(|all| (all, info.retained_weak_references)),
        })
    }

    /// Field numbers are those of [`wire::Cycle`].
    pub(in crate::trace_file) fn cycle(&mut self, cycle: &[u8]) -> Result<GcCycle, Invalid> {
        let (mut comm_text, mut count, mut lost) = (0, 0, 0);
        let (mut start, mut end, mut trigger_stack, mut request, mut span) = (None, None, None, None, None);
        let mut pauses = Vec::new();
        for field in Fields::of(cycle) {
            match field? {
                (1, value) => comm_text = value.number()? as u32,
                (2, value) => count = value.number()?,
                (3, value) => start = Some(gc_state(value.bytes()?)?),
                (4, value) => end = Some(gc_state(value.bytes()?)?),
                (5, value) => pauses.push(pause_of(&value.message()?)?),
                (6, value) => trigger_stack = Some(value.number()? as u32),
                (7, value) => request = Some(value.number()?),
                (8, value) => lost = value.number()?,
                (9, value) => span = Some(value.message()?),
                _ => {}
            }
        }
        Ok(GcCycle {
            comm: self.owned(comm_text)?,
            count,
            start: self.state(required(start, "the start of a cycle")?)?,
            end: end.map(|end| self.state(end)).transpose()?,
            pauses,
            trigger: self.optional_stack(trigger_stack)?,
            request,
            span: span.map(span_of).transpose()?,
            lost,
        })
    }

    pub(in crate::trace_file) fn work(&self, work: &wire::Work) -> Result<GcWork, Invalid> {
        let comm = self.owned(work.comm_text)?;
        let &wire::Work { phase, tid, begin_ns, ns, .. } = work;
        Ok(GcWork { phase: Code::of(phase)?, tid, comm, begin_ns, ns })
    }

    pub(in crate::trace_file) fn request(&mut self, request: wire::Request) -> Result<Request, Invalid> {
        let wire::Request {
            id,
            tid,
            begin_ns,
            end_ns,
            method_text,
            path_text,
            status,
            first_byte_ns,
            last_byte_ns,
            gcs,
            gc_ns,
            gc_pauses,
            gc_other_pauses,
            gc_other_ns,
            gvl_wait_ns,
            queue_ns,
            states,
            job,
            job_queue_text,
            jid,
            enqueued_us,
            latency_ns,
            gc_begin,
            gc_end,
            handler_stack,
            trace,
            alloc_slots,
            alloc_bytes,
            split,
            response_bytes,
            minor_faults,
            major_faults,
            rss_growth,
        } = request;
        let handler = match self.optional_stack(handler_stack)?.as_deref() {
            None => None,
            Some([frame]) => Some(Arc::clone(frame)),
            Some(stack) => return Err(Invalid::new(format!("a request has {} handlers", stack.len()))),
        };
        let gc_states = match (gc_begin, gc_end) {
            (Some(begin), Some(end)) => {
                Some(Box::new(UnitStates { begin: self.state(begin)?, end: self.state(end)? }))
            }
            (None, None) => None,
            _ => return Err(Invalid::new("a request has one state of its VM".to_owned())),
        };
        let status = status.map(|status| {
            u16::try_from(status).map_err(|_| Invalid::new(format!("a request has the status {status}")))
        });
        Ok(Request {
            id,
            tid,
            begin_ns,
            end_ns,
            method: self.optional_word(method_text)?,
            path: self.optional(path_text)?,
            status: status.transpose()?,
            queue_ns,
            first_byte_ns,
            last_byte_ns,
            response_bytes,
            gcs,
            gc_ns,
            gc_pauses,
            gc_other: gc_other_pauses.zip(gc_other_ns).map(|(pauses, ns)| GcTime { pauses, ns }),
            gvl_wait_ns,
            states: states.map(|wire::States { cpu_ns, runnable_ns, blocked_ns }| States {
                cpu_ns,
                runnable_ns,
                blocked_ns,
            }),
            split: split.map(super::gvl::split).transpose()?,
            alloc: alloc_slots.zip(alloc_bytes).map(|(slots, bytes)| Allocated { slots, bytes }),
            memory: RequestMemory {
                faults: minor_faults.zip(major_faults).map(|(minor, major)| PageFaults { minor, major }),
                rss_growth,
            },
            handler,
            job: match job {
                1 => Some(Job { queue: self.optional(job_queue_text)?, jid, enqueued_us, latency_ns }),
                _ => None,
            },
            is_run: match job {
                0 | 1 => false,
                2 => true,
                _ => return Err(Invalid::unknown(&format!("kind {job} of a request"))),
            },
            gc_states,
            trace: trace.map(|trace| trace_of(trace, job == 1)).transpose()?,
        })
    }

    pub(in crate::trace_file) fn sample(&mut self, sample: &wire::Sample) -> Result<StackSample, Invalid> {
        let &wire::Sample { ts_ns, tid, comm_text, state, cpu_ns, wall_ns, gc, stack, request, span } =
            sample;
        Ok(StackSample {
            ts_ns,
            tid,
            comm: Arc::clone(self.text(comm_text)?),
            state: Code::of(state)?,
            cpu_ns,
            wall_ns,
            gc: Code::of(gc)?,
            request,
            span: span.map(span_of).transpose()?,
            stack: self.stack(stack)?,
        })
    }

    pub(in crate::trace_file) fn ended(&self, end: wire::Ended) -> Result<ProcessEnd, Invalid> {
        Ok(ProcessEnd {
            reason: Code::of(end.reason)?,
            ts_ns: end.ts_ns,
            since_ns: end.since_ns,
            outside_ns: end.outside_ns,
            beyond_ns: 0,
            shutdown: end.shutdown.map(|state| self.state(state)).transpose()?,
            cycles: end.cycles,
            before: match end.cycles_before_kind {
                0 => CyclesBefore::Unknown,
                1 => CyclesBefore::Earlier(end.cycles_before),
                2 => CyclesBefore::Missed(end.cycles_before),
                kind => return Err(Invalid::unknown(&format!("kind {kind} of earlier cycles"))),
            },
            lost: end.lost,
        })
    }
}

/// The message of a state, the most frequent one in a recording. Field numbers are those of [`wire::GcState`] and [`wire::Values`].
pub(super) fn gc_state(state: &[u8]) -> Result<wire::GcState, Invalid> {
    let mut read = wire::GcState::default();
    for field in Fields::of(state) {
        match field? {
            (1, value) => read.ts_ns = value.number()?,
            (2, value) => read.tid = value.number()? as u32,
            (3, value) => value.numbers(&mut read.stat)?,
            (4, value) => {
                let mut values = Vec::new();
                for field in Fields::of(value.bytes()?) {
                    if let (1, value) = field? {
                        value.numbers(&mut values)?;
                    }
                }
                read.heaps.push(wire::Values { values });
            }
            (5, value) => read.info = Some(value.message()?),
            (6, value) => read.memory = Some(value.message()?),
            _ => {}
        }
    }
    Ok(read)
}

fn memory_of(memory: wire::Memory) -> Result<Memory, Invalid> {
    let wire::Memory { rss, peak_rss, anon, file, shmem, swap, source, shares } = memory;
    let shares =
        shares.map(|wire::Shares { pss, private_dirty, read_ns }| Shares { pss, private_dirty, read_ns });
    Ok(Memory { rss, peak_rss, anon, file, shmem, swap, source: Code::of(source)?, shares })
}

fn pause_of(pause: &wire::Pause) -> Result<Pause, Invalid> {
    let &wire::Pause { tid, begin_ns, ns, kind, mark_ns, sweep_ns, other_ns } = pause;
    if mark_ns.checked_add(sweep_ns).and_then(|sum| sum.checked_add(other_ns)) != Some(ns) {
        return Err(Invalid::new(format!("a pause of {ns} ns has phases of another sum")));
    }
    Ok(Pause { tid, begin_ns, ns, kind: kind.map(Code::of).transpose()?, mark_ns, sweep_ns, other_ns })
}

fn trace_of(trace: wire::Trace, of_job: bool) -> Result<Trace, Invalid> {
    let wire::Trace { id_high, id_low, parent_span_id, sampled, origin } = trace;
    let origin = match (origin, of_job) {
        (0, false) => TraceOrigin::Traceparent,
        (0, true) => TraceOrigin::Job,
        (1, _) => TraceOrigin::Thread,
        _ => return Err(Invalid::unknown(&format!("origin {origin} of a trace"))),
    };
    let caller = (parent_span_id != 0).then_some(Caller { span_id: parent_span_id, sampled });
    Ok(Trace { trace_id: u128::from(id_high) << 64 | u128::from(id_low), caller, origin })
}

pub(in crate::trace_file) fn span_of(span: wire::Span) -> Result<Span, Invalid> {
    let wire::Span { trace_high, trace_low, id } = span;
    let span = Span { trace_id: u128::from(trace_high) << 64 | u128::from(trace_low), span_id: id };
    let whole = span.trace_id != 0 && span.span_id != 0;
    whole.then_some(span).ok_or_else(|| Invalid::new("a span without an id".to_owned()))
}
