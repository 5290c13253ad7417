//! Allocation in recordings: messages, both directions, bounds and what a copy may change.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    super::{
        Invalid,
        visit::{Visit, number},
    },
    decode::{Bounds, Tables, caller},
    encode::{Filling, span_of},
    wire::Span,
};
use crate::model::seen::{AllocStack, AllocSum};

/// [`AllocSum`] as a message.
#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct SumMessage {
    #[prost(uint64, tag = "1")]
    pub begin_ns: u64,
    #[prost(uint64, tag = "2")]
    pub end_ns: u64,
    #[prost(btree_map = "uint32, uint64", tag = "3")]
    pub slots: BTreeMap<u32, u64>,
    #[prost(uint64, tag = "4")]
    pub refills: u64,
    #[prost(uint64, tag = "5")]
    pub lost: u64,
}

/// [`AllocStack`] as a message.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct StackMessage {
    #[prost(uint64, tag = "1")]
    pub ts_ns: u64,
    #[prost(uint32, tag = "2")]
    pub tid: u32,
    #[prost(uint32, tag = "3")]
    pub comm_text: u32,
    #[prost(uint32, tag = "4")]
    pub slot_size: u32,
    #[prost(uint64, tag = "5")]
    pub slots: u64,
    #[prost(uint32, tag = "6")]
    pub stack: u32,
    #[prost(uint64, optional, tag = "7")]
    pub request: Option<u64>,
    #[prost(message, optional, tag = "8")]
    pub span: Option<Span>,
}

pub(in crate::trace_file) fn encode_sum(sum: &AllocSum) -> SumMessage {
    let AllocSum { begin_ns, end_ns, slots, refills, lost } = sum;
    SumMessage { begin_ns: *begin_ns, end_ns: *end_ns, slots: slots.clone(), refills: *refills, lost: *lost }
}

pub(in crate::trace_file) fn encode_stack(alloc: &AllocStack, filling: &mut Filling) -> StackMessage {
    let AllocStack { ts_ns, tid, comm, slot_size, slots, request, span, stack } = alloc;
    StackMessage {
        ts_ns: *ts_ns,
        tid: *tid,
        comm_text: filling.text(comm),
        slot_size: *slot_size,
        slots: *slots,
        stack: filling.stack(stack),
        request: *request,
        span: span.map(span_of),
    }
}

pub(in crate::trace_file) fn decode_sum(message: SumMessage) -> AllocSum {
    let SumMessage { begin_ns, end_ns, slots, refills, lost } = message;
    AllocSum { begin_ns, end_ns, slots, refills, lost }
}

pub(in crate::trace_file) fn decode_stack(
    message: StackMessage,
    tables: &mut Tables,
) -> Result<AllocStack, Invalid> {
    let StackMessage { ts_ns, tid, comm_text, slot_size, slots, stack, request, span } = message;
    let comm = Arc::clone(tables.text(comm_text)?);
    let span = span.map(caller).transpose()?;
    Ok(AllocStack { ts_ns, tid, comm, slot_size, slots, request, span, stack: tables.stack(stack)? })
}

impl Bounds {
    pub(in crate::trace_file) fn alloc_sum(&mut self, sum: &AllocSum) {
        self.at([sum.begin_ns, sum.end_ns]);
        self.check("start of an interval", [sum.begin_ns], sum.end_ns.saturating_add(1));
        self.counts([sum.refills, sum.lost]);
        self.counts(sum.slots.values().copied());
    }

    pub(in crate::trace_file) fn alloc_stack(&mut self, alloc: &AllocStack) {
        self.at([alloc.ts_ns]);
        self.counts([alloc.slots]);
    }
}

pub(in crate::trace_file) fn visit_sum(sum: &mut AllocSum, with: &mut impl Visit) {
    let AllocSum { begin_ns, end_ns, slots: _, refills: _, lost: _ } = sum;
    with.time(begin_ns);
    with.time(end_ns);
}

pub(in crate::trace_file) fn visit_stack(alloc: &mut AllocStack, with: &mut impl Visit) {
    let AllocStack { ts_ns, tid, comm, slot_size: _, slots: _, request, span, stack } = alloc;
    with.span(span);
    with.time(ts_ns);
    with.tid(tid);
    with.thread_name(comm);
    number(request, with);
    with.stack(stack);
}
