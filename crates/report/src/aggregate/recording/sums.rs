//! Turns samples, cycles, allocation stacks and waits for the GVL into sums, and into moments of a timeline, once their endpoint is known.

use std::{collections::hash_map::Entry, num::NonZeroU64, sync::Arc};

use super::{
    AllocKey, AllocMoment, CycleMoment, Moment, NodeId, PauseKey, Recording, SampleKey, SampleSum,
    TraceIndex,
    endpoints::{At, EndpointIndex, GivenUp, LEFT_OUT, Of, UNKNOWN},
    filter::DropReason,
    named,
};
use crate::model::{
    GcCycle, Pause, Process,
    request::Request,
    stack::{StackSample, ThreadState},
    trace::{Link, Span, TraceOrigin},
};

pub(super) mod alloc;
pub(super) mod gvl;

use gvl::WaitMoment;

/// What the other filters have let through, while its endpoint is unknown.
#[derive(Clone, Debug)]
pub(super) enum Kept {
    /// A sample.
    Sample(Moment, Option<Span>),
    /// A cycle, with the time of its pauses.
    Cycle(Box<(CycleMoment, u64, Option<Span>)>),
    /// Slots with their stack.
    Alloc(AllocMoment, Option<Span>),
    /// A long wait for the GVL.
    Wait(Box<WaitMoment>),
}

impl Kept {
    /// The span that was active on its thread.
    fn span(&self) -> Option<Span> {
        match self {
            Self::Sample(_, span) | Self::Alloc(_, span) => *span,
            Self::Cycle(cycle) => cycle.2,
            // Its record has no span.
            Self::Wait(_) => None,
        }
    }
}

impl Recording {
    /// Adds a sample.
    pub(super) fn sample(&mut self, process: &Process, sample: &StackSample) {
        let Some((ts_ns, wall_ns)) = self.began_ns.and_then(|began_ns| sample.since(began_ns)) else {
            self.early_samples += 1;
            return;
        };
        if self.period_ns.is_none() && sample.cpu_ns > 0 {
            self.period_ns = Some(sample.cpu_ns);
        }
        let stack = if sample.stack.is_empty() { &self.no_stack } else { &sample.stack };
        let stack = Arc::clone(stack);
        let time_ns = time_ns(sample.state, sample.cpu_ns, wall_ns);
        self.filter.account.samples_seen.add(time_ns);
        let dropped = self.filter.drops(named(process, sample.tid, &sample.comm), Some(&stack));
        if dropped.is_some() {
            self.filter.account.samples.keeps(dropped, time_ns);
            return;
        }
        let node = self.tree.insert(&self.filter.shown(&stack));
        let thread = self.thread(process, sample.tid, &sample.comm, ts_ns);
        let key = SampleKey { thread, node, state: sample.state, gc: sample.gc, endpoint: None, trace: None };
        let moment = Moment { ts_ns, key, cpu_ns: sample.cpu_ns, wall_ns };
        self.place(process, sample.request, ts_ns, Kept::Sample(moment, sample.span));
    }

    /// Adds a cycle with its pauses.
    pub(super) fn cycle(&mut self, process: &Process, cycle: &GcCycle) {
        let start = &cycle.start;
        // A cycle is admitted as a whole or not at all, so that sums and timelines agree.
        if !self.admits(cycle.pauses.iter().map(|pause| pause.begin_ns).fold(start.ts_ns, u64::min)) {
            return;
        }
        for state in std::iter::once(start).chain(&cycle.end) {
            self.memory(process, state);
        }
        let ns = cycle.pauses.iter().flat_map(Pause::phases).map(|(_, ns)| ns).sum();
        let dropped = self.filter.drops(named(process, start.tid, &cycle.comm), cycle.trigger.as_deref());
        if dropped.is_some() {
            self.filter.account.cycles.keeps(dropped, ns);
            return;
        }
        let thread = self.thread(process, start.tid, &Arc::from(cycle.comm.as_str()), start.ts_ns);
        let node = self.node(cycle.trigger.as_ref());
        let end_ns = cycle.end.as_ref().map(|end| end.ts_ns);
        self.heard(process, end_ns.unwrap_or(start.ts_ns));
        let moment = CycleMoment {
            thread,
            node,
            count: cycle.count,
            kind: cycle.kind(),
            reason: (start.info.gc_by, start.info.major_by),
            begin_ns: start.ts_ns,
            end_ns,
            request: cycle.request.and_then(NonZeroU64::new),
            pauses: cycle.pauses.as_slice().into(),
        };
        self.place(process, cycle.request, start.ts_ns, Kept::Cycle(Box::new((moment, ns, cycle.span))));
    }

    /// Adds something if the endpoint of its request is known; otherwise keeps it until it is.
    pub(super) fn place(&mut self, process: &Process, request: Option<u64>, ts_ns: u64, kept: Kept) {
        match self.endpoints.of(request) {
            At::None => self.add(kept, None),
            At::Known(of) => {
                self.unresolved += u64::from(request == Some(0));
                self.add(kept, Some(if request == Some(0) { self.unknown(None) } else { of }));
            }
            At::Waits(id) => {
                let overdue = self.endpoints.wait(id, process.pid, ts_ns, kept);
                self.give_up(overdue);
            }
        }
    }

    /// A request has ended: adds what has waited for it.
    pub(super) fn request_ended(&mut self, request: &Request) -> EndpointIndex {
        let endpoint = request.endpoint();
        let dropped = self.filter.drops_endpoint(Some(&endpoint));
        let dropped = dropped.or_else(|| self.filter.drops_duration(request.duration_ns()));
        let wanted = dropped.is_none().then_some(endpoint);
        let (of, kept) = self.endpoints.ended(request.id, wanted, request.trace);
        for kept in kept {
            self.add(kept, Some(of));
        }
        of.endpoint
    }

    /// Adds what waits for requests of one process, or of all (`None`), under the unknown endpoint: these requests will not end.
    pub(super) fn settle(&mut self, of: Option<u32>) {
        let kept = self.endpoints.give_up(of);
        self.give_up(kept);
    }

    fn give_up(&mut self, given_up: Vec<GivenUp<Kept>>) {
        for GivenUp { lasted_ns, kept } in given_up {
            self.unresolved += kept.len() as u64;
            let of = self.unknown(Some(lasted_ns));
            for kept in kept {
                self.add(kept, Some(of));
            }
        }
    }

    /// What is known about a request whose end was not seen, but that took at least this long; without that, nobody knows that it was slow.
    fn unknown(&self, at_least_ns: Option<u64>) -> Of {
        let left_out = self.filter.drops_duration(at_least_ns).is_some();
        Of { endpoint: if left_out { LEFT_OUT } else { UNKNOWN }, trace: None }
    }

    /// Whether what belongs to a request of this endpoint is dropped; `None`: it belongs to no request.
    pub(super) fn drops_request(&self, endpoint: Option<EndpointIndex>) -> Option<DropReason> {
        match endpoint {
            Some(LEFT_OUT) => Some(DropReason::Endpoint),
            endpoint => self.filter.drops_endpoint(endpoint.map(|index| self.endpoints.name(index))),
        }
    }

    fn add(&mut self, kept: Kept, of: Option<Of>) {
        let endpoint = of.map(|of| of.endpoint);
        let dropped = self.drops_request(endpoint);
        let own = kept.span().map(|span| Link { span, origin: TraceOrigin::Thread });
        let link = own.or_else(|| of.and_then(|of| of.trace)?.link()).filter(|_| dropped.is_none());
        let trace = link.and_then(|link| self.trace_index(link));
        let account = &mut self.filter.account;
        match kept {
            Kept::Sample(moment, _) => {
                if account.samples.keeps(dropped, moment.time_ns()) {
                    let key = SampleKey { endpoint, trace, ..moment.key };
                    self.add_sample(Moment { key, ..moment });
                }
            }
            Kept::Cycle(cycle) => {
                let (moment, ns, _) = *cycle;
                if account.cycles.keeps(dropped, ns) {
                    self.add_cycle(moment, endpoint, trace);
                }
            }
            Kept::Alloc(moment, _) => {
                if account.allocs.keeps(dropped, moment.bytes()) {
                    let key = AllocKey { endpoint, trace, ..moment.key };
                    self.add_alloc(AllocMoment { key, ..moment });
                }
            }
            Kept::Wait(wait) => {
                if account.gvl_waits.keeps(dropped, wait.ns()) {
                    self.add_wait(*wait, endpoint, trace);
                }
            }
        }
    }

    /// The index of a span. Sums are distinguished by span only while at most half of the room for sums is used, so that spans do not cause other
    /// sums to be merged.
    fn trace_index(&mut self, trace: Link) -> Option<TraceIndex> {
        let sums = [self.samples.len(), self.pauses.len(), self.allocs.len(), self.gvl_waits.len()];
        let sums = sums.into_iter().max().unwrap_or_default();
        self.traces.index(trace, sums < self.limits.sums / 2)
    }

    fn add_sample(&mut self, moment: Moment) {
        let key = moment.key;
        let mut merged = key.node == NodeId::BEYOND || Some(key.thread) == self.beyond;
        let full = self.samples.len() >= self.limits.sums;
        let sum = match self.samples.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) if !full => entry.insert(SampleSum::default()),
            Entry::Vacant(_) => {
                merged = true;
                let thread = self.thread_beyond();
                self.samples.entry(SampleKey { thread, node: NodeId::BEYOND, ..key }).or_default()
            }
        };
        sum.samples += 1;
        sum.cpu_ns += moment.cpu_ns;
        sum.wall_ns += moment.wall_ns;
        self.merged += u64::from(merged);
        let Some(timeline) = &mut self.timeline else { return };
        if timeline.samples.len() >= self.limits.timeline {
            timeline.samples_left_out += 1;
            return;
        }
        timeline.samples.push(moment);
    }

    fn add_cycle(&mut self, moment: CycleMoment, endpoint: Option<EndpointIndex>, trace: Option<TraceIndex>) {
        let CycleMoment { thread, node, kind, reason, .. } = moment;
        for pause in &moment.pauses {
            for (phase, ns) in pause.phases() {
                let pauses = u64::from(phase == pause.first_phase());
                if ns == 0 && pauses == 0 {
                    continue;
                }
                let mut key = PauseKey { thread, node, kind, reason, phase, endpoint, trace };
                if self.pauses.len() >= self.limits.sums && !self.pauses.contains_key(&key) {
                    (key.thread, key.node) = (self.thread_beyond(), NodeId::BEYOND);
                }
                let sum = self.pauses.entry(key).or_default();
                sum.pauses += pauses;
                sum.ns += ns;
            }
        }
        if let Some(timeline) = &mut self.timeline
            && timeline.admit(1 + moment.pauses.len(), &self.limits)
        {
            timeline.cycles.push(moment);
        }
    }
}

impl SampleSum {
    /// The time that a stack in this state represents, nanoseconds: CPU time on a CPU, otherwise wall time.
    pub fn time_ns(&self, state: ThreadState) -> u64 {
        time_ns(state, self.cpu_ns, self.wall_ns)
    }
}

impl Moment {
    /// As [`SampleSum::time_ns`].
    pub fn time_ns(&self) -> u64 {
        time_ns(self.key.state, self.cpu_ns, self.wall_ns)
    }
}

fn time_ns(state: ThreadState, cpu_ns: u64, wall_ns: u64) -> u64 {
    if state == ThreadState::Running { cpu_ns } else { wall_ns }
}
