//! The single table of the representation of each [`Seen`] in a recording: its message, its number, its bounds and what a copy
//! may change. The details are in [`wire`], [`encode`], [`decode`] and `visit`, or all in one file ([`alloc`], [`load`]).

pub(super) mod alloc;
pub(super) mod decode;
pub(super) mod encode;
pub(super) mod load;
pub(super) mod wire;

use gctrace_common::gvl::BUCKETS;

use self::{
    decode::{Bounds, Tables, Value},
    encode::{Filling, so_far},
};
use super::{
    Invalid,
    visit::{self, Visit},
};
use crate::model::{
    GcCycle, GcState, GcWork, Process,
    gvl::{GvlProcessSummary, GvlSpan, GvlThreadSummary, GvlWait},
    gvl_so_far::GvlSoFar,
    load::ServerLoad,
    request::Request,
    seen::{AllocStack, AllocSum, ProcessEnd, Seen},
    stack::StackSample,
};

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Entry {
    /// Index of the process, for a [`Seen`] of a process.
    #[prost(uint32, optional, tag = "1")]
    pub process: Option<u32>,
    #[prost(
        oneof = "What",
        tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27"
    )]
    pub what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    #[prost(message, boxed, tag = "2")]
    Process(Box<wire::ProcessSeen>),
    #[prost(message, boxed, tag = "3")]
    Cycle(Box<wire::Cycle>),
    #[prost(message, boxed, tag = "4")]
    Work(Box<wire::Work>),
    #[prost(message, boxed, tag = "5")]
    Request(Box<wire::Request>),
    #[prost(message, boxed, tag = "6")]
    Sample(Box<wire::Sample>),
    #[prost(message, boxed, tag = "7")]
    GvlWait(Box<wire::GvlWait>),
    #[prost(message, boxed, tag = "8")]
    GvlSpan(Box<wire::GvlSpan>),
    #[prost(message, boxed, tag = "9")]
    GvlThread(Box<wire::GvlThread>),
    #[prost(message, boxed, tag = "10")]
    GvlSoFar(Box<wire::GvlSoFar>),
    #[prost(message, boxed, tag = "11")]
    GvlProcess(Box<wire::GvlProcess>),
    #[prost(message, boxed, tag = "12")]
    Alloc(Box<alloc::SumMessage>),
    #[prost(message, boxed, tag = "13")]
    Ended(Box<wire::Ended>),
    #[prost(message, boxed, tag = "14")]
    AllocStack(Box<alloc::StackMessage>),
    #[prost(message, boxed, tag = "15")]
    Load(Box<load::LoadMessage>),
    #[prost(message, boxed, tag = "20")]
    Refused(Box<wire::Refused>),
    /// Everything is traced from this time on.
    #[prost(uint64, tag = "21")]
    Began(u64),
    /// Nothing is traced after this time.
    #[prost(uint64, tag = "22")]
    Closed(u64),
    #[prost(message, boxed, tag = "23")]
    GvlGap(Box<wire::GvlGap>),
    #[prost(message, boxed, tag = "24")]
    Account(Box<wire::Account>),
    /// Outputs were flushed at this time.
    #[prost(uint64, tag = "25")]
    Flushed(u64),
    /// The last account apart from uploads.
    #[prost(message, boxed, tag = "26")]
    Finished(Box<wire::Account>),
    /// The last account.
    #[prost(message, boxed, tag = "27")]
    Settled(Box<wire::Account>),
}

/// Something seen in a process, like [`Seen`].
pub(super) enum Owned {
    Process { state: Box<Option<GcState>>, now_ns: u64, since_ns: u64 },
    Cycle(Box<GcCycle>),
    Work(GcWork),
    Request(Box<Request>),
    Stack(StackSample),
    GvlWait(GvlWait),
    GvlSpan(GvlSpan),
    GvlThread(Box<GvlThreadSummary>),
    GvlSoFar(GvlSoFar),
    GvlProcess(Box<GvlProcessSummary>),
    Alloc(AllocSum),
    AllocStack(AllocStack),
    Load(ServerLoad),
    Ended(Box<ProcessEnd>),
}

impl Owned {
    /// A copy of what was seen.
    pub(super) fn of(seen: Seen<'_>) -> Self {
        match seen {
            Seen::Process { state, now_ns, since_ns } => {
                Self::Process { state: Box::new(state.cloned()), now_ns, since_ns }
            }
            Seen::Cycle(cycle) => Self::Cycle(Box::new(cycle.clone())),
            Seen::Work(work) => Self::Work(work.clone()),
            Seen::Request(request) => Self::Request(Box::new(request.clone())),
            Seen::Stack(sample) => Self::Stack(sample.clone()),
            Seen::GvlWait(wait) => Self::GvlWait(wait.clone()),
            Seen::GvlSpan(span) => Self::GvlSpan(span.clone()),
            Seen::GvlThread(summary) => Self::GvlThread(Box::new(summary.clone())),
            Seen::GvlSoFar(so_far) => Self::GvlSoFar(so_far.clone()),
            Seen::GvlProcess(summary) => Self::GvlProcess(Box::new(summary.clone())),
            Seen::Alloc(sum) => Self::Alloc(sum.clone()),
            Seen::AllocStack(alloc) => Self::AllocStack(alloc.clone()),
            Seen::Load(load) => Self::Load(load.clone()),
            Seen::Ended(end) => Self::Ended(Box::new(end.clone())),
        }
    }

    /// The same as exporters receive it.
    pub(super) fn seen(&self) -> Seen<'_> {
        match self {
            Self::Process { state, now_ns, since_ns } => {
                Seen::Process { state: (**state).as_ref(), now_ns: *now_ns, since_ns: *since_ns }
            }
            Self::Cycle(cycle) => Seen::Cycle(cycle),
            Self::Work(work) => Seen::Work(work),
            Self::Request(request) => Seen::Request(request),
            Self::Stack(sample) => Seen::Stack(sample),
            Self::GvlWait(wait) => Seen::GvlWait(wait),
            Self::GvlSpan(span) => Seen::GvlSpan(span),
            Self::GvlThread(summary) => Seen::GvlThread(summary),
            Self::GvlSoFar(so_far) => Seen::GvlSoFar(so_far),
            Self::GvlProcess(summary) => Seen::GvlProcess(summary),
            Self::Alloc(sum) => Seen::Alloc(sum),
            Self::AllocStack(alloc) => Seen::AllocStack(alloc),
            Self::Load(load) => Seen::Load(load),
            Self::Ended(end) => Seen::Ended(end),
        }
    }
}

impl Filling {
    /// Adds something seen in a process.
    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        let index = self.process(process);
        let what = match seen {
            Seen::Process { state, now_ns, since_ns } => {
                let state = state.map(|state| self.state(state));
                What::Process(Box::new(wire::ProcessSeen { state, now_ns, since_ns: Some(since_ns) }))
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
            Seen::Alloc(sum) => What::Alloc(Box::new(alloc::encode_sum(sum))),
            Seen::AllocStack(stack) => What::AllocStack(Box::new(alloc::encode_stack(stack, self))),
            Seen::Load(load) => What::Load(Box::new(load::encode(load))),
            Seen::Ended(end) => What::Ended(Box::new(self.ended(end))),
        };
        if matches!(what, What::GvlThread(_) | What::GvlSoFar(_) | What::GvlProcess(_)) {
            self.expands_by(BUCKETS);
        }
        self.push(Some(index), what);
    }
}

impl Tables {
    /// Something seen in a process: the field with this number of [`wire::Entry`].
    pub(super) fn seen(&mut self, kind: u32, seen: Value<'_>) -> Result<Owned, Invalid> {
        Ok(match kind {
            2 => {
                let wire::ProcessSeen { state, now_ns, since_ns } = seen.message()?;
                let state = Box::new(state.map(|state| self.state(state)).transpose()?);
                Owned::Process { state, now_ns, since_ns: since_ns.unwrap_or(now_ns) }
            }
            3 => Owned::Cycle(Box::new(self.cycle(seen.bytes()?)?)),
            4 => Owned::Work(self.work(&seen.message()?)?),
            5 => Owned::Request(Box::new(self.request(seen.message()?)?)),
            6 => Owned::Stack(self.sample(&seen.message()?)?),
            7 => Owned::GvlWait(self.gvl_wait(&seen.message()?)?),
            8 => Owned::GvlSpan(self.gvl_span(&seen.message()?)?),
            9 => Owned::GvlThread(Box::new(self.gvl_thread(&seen.message()?)?)),
            10 => Owned::GvlSoFar(self.so_far(&seen.message()?)?),
            11 => Owned::GvlProcess(Box::new(self.gvl_process(&seen.message()?)?)),
            12 => Owned::Alloc(alloc::decode_sum(seen.message()?)),
            13 => Owned::Ended(Box::new(self.ended(seen.message()?)?)),
            14 => Owned::AllocStack(alloc::decode_stack(seen.message()?, self)?),
            15 => Owned::Load(load::decode(seen.message()?)),
            _ => return Err(Invalid::unknown(&format!("entries of kind {kind}"))),
        })
    }
}

impl Bounds {
    /// Checks for numbers that no run has.
    pub(super) fn seen(&mut self, owned: &Owned) {
        match owned {
            Owned::Process { state, now_ns, since_ns } => {
                self.process((**state).as_ref(), [*now_ns, *since_ns]);
            }
            Owned::Cycle(cycle) => self.cycle(cycle),
            Owned::Work(work) => self.work(work),
            Owned::Request(request) => self.request(request),
            Owned::Stack(sample) => self.sample(sample),
            Owned::GvlWait(wait) => self.gvl_wait(wait),
            Owned::GvlSpan(span) => self.gvl_span(span),
            Owned::GvlThread(thread) => self.gvl_thread(thread),
            Owned::GvlSoFar(so_far) => self.gvl_so_far(so_far),
            Owned::GvlProcess(process) => self.gvl_process(process),
            Owned::Alloc(sum) => self.alloc_sum(sum),
            Owned::AllocStack(alloc) => self.alloc_stack(alloc),
            Owned::Load(load) => self.server_load(load),
            Owned::Ended(end) => self.ended(end),
        }
    }
}

/// Visits everything that was seen in a process.
pub(super) fn visit(owned: &mut Owned, with: &mut impl Visit) {
    match owned {
        Owned::Process { state, now_ns, since_ns } => {
            visit::process((**state).as_mut(), [now_ns, since_ns], with);
        }
        Owned::Cycle(cycle) => visit::cycle(cycle, with),
        Owned::Work(work) => visit::work(work, with),
        Owned::Request(request) => visit::request(request, with),
        Owned::Stack(sample) => visit::sample(sample, with),
        Owned::GvlWait(wait) => visit::gvl_wait(wait, with),
        Owned::GvlSpan(span) => visit::gvl_span(span, with),
        Owned::GvlThread(thread) => visit::gvl_thread(thread, with),
        // Sums of counts and times.
        Owned::GvlSoFar(_) => {}
        Owned::GvlProcess(process) => visit::gvl_process(process, with),
        Owned::Alloc(sum) => alloc::visit_sum(sum, with),
        Owned::AllocStack(stack) => alloc::visit_stack(stack, with),
        Owned::Load(load) => load::visit(load, with),
        Owned::Ended(end) => visit::ended(end, with),
    }
}
