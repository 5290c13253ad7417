//! Messages about garbage collection, requests and stacks. Their fields are those of the types of the same names in `model`.

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GcState {
    #[prost(uint64, tag = "1")]
    pub ts_ns: u64,
    #[prost(uint32, tag = "2")]
    pub tid: u32,
    #[prost(uint64, repeated, tag = "3")]
    pub stat: Vec<u64>,
    #[prost(message, repeated, tag = "4")]
    pub heaps: Vec<Values>,
    #[prost(message, optional, tag = "5")]
    pub info: Option<GcInfo>,
    #[prost(message, optional, tag = "6")]
    pub memory: Option<Memory>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Values {
    #[prost(uint64, repeated, tag = "1")]
    pub values: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GcInfo {
    #[prost(uint32, optional, tag = "1")]
    pub major_by_text: Option<u32>,
    #[prost(bool, tag = "2")]
    pub has_need_major_by: bool,
    #[prost(uint32, optional, tag = "3")]
    pub need_major_by_text: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub gc_by_text: Option<u32>,
    #[prost(bool, tag = "5")]
    pub have_finalizer: bool,
    #[prost(bool, tag = "6")]
    pub immediate_sweep: bool,
    #[prost(uint32, tag = "7")]
    pub state_text: u32,
    #[prost(uint64, optional, tag = "8")]
    pub weak_references: Option<u64>,
    #[prost(uint64, optional, tag = "9")]
    pub retained_weak_references: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Memory {
    #[prost(uint64, tag = "1")]
    pub rss: u64,
    #[prost(uint64, tag = "2")]
    pub peak_rss: u64,
    #[prost(uint64, tag = "3")]
    pub anon: u64,
    #[prost(uint64, tag = "4")]
    pub file: u64,
    #[prost(uint64, tag = "5")]
    pub shmem: u64,
    #[prost(uint64, tag = "6")]
    pub swap: u64,
    #[prost(uint32, tag = "7")]
    pub source: u32,
    #[prost(message, optional, tag = "8")]
    pub shares: Option<Shares>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Shares {
    #[prost(uint64, tag = "1")]
    pub pss: u64,
    #[prost(uint64, tag = "2")]
    pub private_dirty: u64,
    #[prost(uint64, optional, tag = "3")]
    pub read_ns: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct ProcessSeen {
    #[prost(message, optional, tag = "1")]
    pub state: Option<GcState>,
    #[prost(uint64, tag = "2")]
    pub now_ns: u64,
    /// The value of `now_ns` if it is missing.
    #[prost(uint64, optional, tag = "3")]
    pub since_ns: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Pause {
    #[prost(uint32, tag = "1")]
    pub tid: u32,
    #[prost(uint64, tag = "2")]
    pub begin_ns: u64,
    #[prost(uint64, tag = "3")]
    pub ns: u64,
    #[prost(uint32, optional, tag = "4")]
    pub kind: Option<u32>,
    #[prost(uint64, tag = "5")]
    pub mark_ns: u64,
    #[prost(uint64, tag = "6")]
    pub sweep_ns: u64,
    #[prost(uint64, tag = "7")]
    pub other_ns: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Cycle {
    #[prost(uint32, tag = "1")]
    pub comm_text: u32,
    #[prost(uint64, tag = "2")]
    pub count: u64,
    #[prost(message, optional, tag = "3")]
    pub start: Option<GcState>,
    #[prost(message, optional, tag = "4")]
    pub end: Option<GcState>,
    #[prost(message, repeated, tag = "5")]
    pub pauses: Vec<Pause>,
    #[prost(uint32, optional, tag = "6")]
    pub trigger_stack: Option<u32>,
    #[prost(uint64, optional, tag = "7")]
    pub request: Option<u64>,
    #[prost(uint64, tag = "8")]
    pub lost: u64,
    #[prost(message, optional, tag = "9")]
    pub span: Option<Span>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Work {
    #[prost(uint32, tag = "1")]
    pub phase: u32,
    #[prost(uint32, tag = "2")]
    pub tid: u32,
    #[prost(uint32, tag = "3")]
    pub comm_text: u32,
    #[prost(uint64, tag = "4")]
    pub begin_ns: u64,
    #[prost(uint64, tag = "5")]
    pub ns: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Request {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(uint32, tag = "2")]
    pub tid: u32,
    #[prost(uint64, tag = "3")]
    pub begin_ns: u64,
    #[prost(uint64, optional, tag = "4")]
    pub end_ns: Option<u64>,
    #[prost(uint32, optional, tag = "5")]
    pub method_text: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub path_text: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub status: Option<u32>,
    #[prost(uint64, optional, tag = "8")]
    pub first_byte_ns: Option<u64>,
    #[prost(uint64, optional, tag = "9")]
    pub last_byte_ns: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    pub gcs: Option<u32>,
    #[prost(uint64, optional, tag = "11")]
    pub gc_ns: Option<u64>,
    #[prost(uint32, optional, tag = "12")]
    pub gc_pauses: Option<u32>,
    #[prost(uint32, optional, tag = "13")]
    pub gc_other_pauses: Option<u32>,
    #[prost(uint64, optional, tag = "14")]
    pub gc_other_ns: Option<u64>,
    #[prost(uint64, optional, tag = "15")]
    pub gvl_wait_ns: Option<u64>,
    #[prost(uint64, optional, tag = "20")]
    pub queue_ns: Option<u64>,
    #[prost(message, optional, tag = "21")]
    pub states: Option<States>,
    /// 1: a job. 2: the run of a program.
    #[prost(uint32, tag = "22")]
    pub job: u32,
    #[prost(uint32, optional, tag = "23")]
    pub job_queue_text: Option<u32>,
    #[prost(string, optional, tag = "24")]
    pub jid: Option<String>,
    #[prost(uint64, optional, tag = "25")]
    pub enqueued_us: Option<u64>,
    /// The state of the VM when the thread took the request, and when it was done with it: both or neither.
    #[prost(message, optional, tag = "26")]
    pub gc_begin: Option<GcState>,
    #[prost(message, optional, tag = "27")]
    pub gc_end: Option<GcState>,
    /// One frame.
    #[prost(uint32, optional, tag = "29")]
    pub handler_stack: Option<u32>,
    #[prost(message, optional, tag = "28")]
    pub trace: Option<Trace>,
    /// Slots that its thread took from the heap, and their bytes: both or neither.
    #[prost(uint64, optional, tag = "30")]
    pub alloc_slots: Option<u64>,
    #[prost(uint64, optional, tag = "31")]
    pub alloc_bytes: Option<u64>,
    #[prost(message, optional, tag = "32")]
    pub split: Option<super::Split>,
    #[prost(uint64, optional, tag = "33")]
    pub response_bytes: Option<u64>,
    /// Page faults of its thread: both or neither.
    #[prost(uint64, optional, tag = "34")]
    pub minor_faults: Option<u64>,
    #[prost(uint64, optional, tag = "35")]
    pub major_faults: Option<u64>,
    #[prost(sint64, optional, tag = "36")]
    pub rss_growth: Option<i64>,
    #[prost(uint64, optional, tag = "37")]
    pub latency_ns: Option<u64>,
}

/// The trace of a request.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Trace {
    /// The upper half of the trace id.
    #[prost(fixed64, tag = "1")]
    pub id_high: u64,
    /// The lower half of the trace id.
    #[prost(fixed64, tag = "2")]
    pub id_low: u64,
    /// 0 if the caller is unknown.
    #[prost(fixed64, tag = "3")]
    pub parent_span_id: u64,
    #[prost(bool, tag = "4")]
    pub sampled: bool,
    /// 0: stated by the request or the job. 1: published by its threads.
    #[prost(uint32, tag = "5")]
    pub origin: u32,
}

/// The span that was active on a thread.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Span {
    /// The upper half of the trace id.
    #[prost(fixed64, tag = "1")]
    pub trace_high: u64,
    /// The lower half of the trace id.
    #[prost(fixed64, tag = "2")]
    pub trace_low: u64,
    #[prost(fixed64, tag = "3")]
    pub id: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
#[allow(clippy::struct_field_names, reason = "each is in nanoseconds")]
pub(in crate::trace_file) struct States {
    #[prost(uint64, tag = "1")]
    pub cpu_ns: u64,
    #[prost(uint64, tag = "2")]
    pub runnable_ns: u64,
    #[prost(uint64, tag = "3")]
    pub blocked_ns: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Sample {
    #[prost(uint64, tag = "1")]
    pub ts_ns: u64,
    #[prost(uint32, tag = "2")]
    pub tid: u32,
    #[prost(uint32, tag = "3")]
    pub comm_text: u32,
    #[prost(uint32, tag = "4")]
    pub state: u32,
    #[prost(uint64, tag = "5")]
    pub cpu_ns: u64,
    #[prost(uint64, tag = "6")]
    pub wall_ns: u64,
    #[prost(uint32, tag = "7")]
    pub gc: u32,
    #[prost(uint32, tag = "8")]
    pub stack: u32,
    #[prost(uint64, optional, tag = "9")]
    pub request: Option<u64>,
    #[prost(message, optional, tag = "10")]
    pub span: Option<Span>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Ended {
    #[prost(uint32, tag = "1")]
    pub reason: u32,
    #[prost(uint64, tag = "2")]
    pub ts_ns: u64,
    #[prost(uint64, tag = "3")]
    pub since_ns: u64,
    #[prost(uint64, tag = "4")]
    pub outside_ns: u64,
    #[prost(message, optional, tag = "5")]
    pub shutdown: Option<GcState>,
    #[prost(uint64, tag = "6")]
    pub cycles: u64,
    #[prost(uint32, tag = "7")]
    pub cycles_before_kind: u32,
    #[prost(uint64, tag = "8")]
    pub cycles_before: u64,
    #[prost(uint64, tag = "9")]
    pub lost: u64,
}
