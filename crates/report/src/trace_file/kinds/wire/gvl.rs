//! Messages about the GVL. Their fields are those of the types of the same names in `model`.

#[derive(Clone, Copy, PartialEq, prost::Message)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate fact")]
pub(in crate::trace_file) struct Coverage {
    #[prost(bool, tag = "1")]
    pub holds: bool,
    #[prost(bool, tag = "2")]
    pub ends: bool,
    #[prost(bool, tag = "3")]
    pub only_blocked: bool,
    #[prost(bool, tag = "4")]
    pub woken: bool,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GvlGap {
    #[prost(uint64, tag = "1")]
    pub from_ns: u64,
    #[prost(uint64, tag = "2")]
    pub to_ns: u64,
    #[prost(bool, tag = "3")]
    pub summed: bool,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Who {
    #[prost(uint32, tag = "1")]
    pub tid: u32,
    #[prost(uint32, tag = "2")]
    pub comm_text: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GvlSpan {
    #[prost(message, optional, tag = "1")]
    pub who: Option<Who>,
    #[prost(uint64, tag = "2")]
    pub id: u64,
    #[prost(uint32, tag = "3")]
    pub doing: u32,
    #[prost(uint64, tag = "4")]
    pub begin_ns: u64,
    #[prost(uint64, tag = "5")]
    pub ns: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Blocker {
    #[prost(message, optional, tag = "1")]
    pub hold: Option<GvlSpan>,
    #[prost(uint32, optional, tag = "2")]
    pub until_stack: Option<u32>,
    #[prost(message, repeated, tag = "3")]
    pub ran: Vec<Ran>,
    #[prost(bool, tag = "4")]
    pub first: bool,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Ran {
    #[prost(uint64, tag = "1")]
    pub count: u64,
    #[prost(uint32, tag = "2")]
    pub stack: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GvlWait {
    #[prost(message, optional, tag = "1")]
    pub who: Option<Who>,
    #[prost(uint64, tag = "2")]
    pub id: u64,
    #[prost(uint64, optional, tag = "3")]
    pub thread: Option<u64>,
    #[prost(uint64, tag = "4")]
    pub begin_ns: u64,
    #[prost(uint64, tag = "5")]
    pub ns: u64,
    #[prost(message, optional, tag = "6")]
    pub blocker: Option<Blocker>,
    #[prost(uint32, optional, tag = "7")]
    pub stack: Option<u32>,
    #[prost(uint64, optional, tag = "8")]
    pub request: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Times {
    #[prost(uint64, tag = "1")]
    pub count: u64,
    #[prost(uint64, tag = "2")]
    pub ns: u64,
    #[prost(uint64, tag = "3")]
    pub max_ns: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
#[expect(clippy::struct_field_names, reason = "the unit")]
pub(in crate::trace_file) struct TaskTimes {
    #[prost(uint64, tag = "1")]
    pub cpu_ns: u64,
    #[prost(uint64, tag = "2")]
    pub runnable_ns: u64,
    #[prost(uint64, tag = "3")]
    pub blocked_ns: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Split {
    #[prost(message, optional, tag = "1")]
    pub waiting: Option<TaskTimes>,
    #[prost(message, optional, tag = "2")]
    pub holding: Option<TaskTimes>,
    #[prost(message, optional, tag = "3")]
    pub away: Option<TaskTimes>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Sums {
    #[prost(uint64, tag = "1")]
    pub wall_ns: u64,
    #[prost(uint64, tag = "2")]
    pub watched_ns: u64,
    #[prost(message, optional, tag = "3")]
    pub wait: Option<Times>,
    #[prost(message, optional, tag = "4")]
    pub hold: Option<Times>,
    #[prost(message, optional, tag = "5")]
    pub away: Option<Times>,
    #[prost(message, optional, tag = "6")]
    pub split: Option<Split>,
    #[prost(uint64, repeated, tag = "7")]
    pub waits: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GvlThread {
    #[prost(message, optional, tag = "1")]
    pub coverage: Option<Coverage>,
    #[prost(message, optional, tag = "2")]
    pub who: Option<Who>,
    #[prost(uint64, tag = "3")]
    pub id: u64,
    #[prost(uint32, optional, tag = "4")]
    pub last_doing: Option<u32>,
    #[prost(uint64, tag = "5")]
    pub last_since_ns: u64,
    #[prost(uint64, optional, tag = "6")]
    pub thread: Option<u64>,
    #[prost(uint64, tag = "7")]
    pub begin_ns: u64,
    #[prost(uint64, tag = "8")]
    pub end_ns: u64,
    #[prost(bool, tag = "9")]
    pub ended: bool,
    #[prost(message, optional, tag = "10")]
    pub sums: Option<Sums>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Blocked {
    #[prost(message, optional, tag = "1")]
    pub waiter: Option<Who>,
    #[prost(message, optional, tag = "2")]
    pub holder: Option<Who>,
    #[prost(message, optional, tag = "3")]
    pub times: Option<Times>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GcOfGvl {
    #[prost(uint64, tag = "1")]
    pub pause_ns: u64,
    #[prost(uint64, optional, tag = "2")]
    pub wait_ns: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GvlProcess {
    #[prost(message, optional, tag = "1")]
    pub coverage: Option<Coverage>,
    #[prost(uint64, tag = "2")]
    pub threads: u64,
    #[prost(uint64, tag = "3")]
    pub span_ns: u64,
    #[prost(uint64, tag = "4")]
    pub end_ns: u64,
    #[prost(message, optional, tag = "5")]
    pub sums: Option<Sums>,
    #[prost(message, optional, tag = "6")]
    pub gc: Option<GcOfGvl>,
    #[prost(message, repeated, tag = "7")]
    pub blocked: Vec<Blocked>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct GvlSoFar {
    #[prost(uint64, repeated, tag = "1")]
    pub waits: Vec<u64>,
    #[prost(uint64, tag = "2")]
    pub wait_ns: u64,
    #[prost(uint64, tag = "3")]
    pub hold_ns: u64,
}
