//! Messages of a recording (protocol buffers; docs/recording.md has them as a schema). Field numbers are never reused. A number whose
//! name ends in `_text`, or that is documented as a text, a stack, a process or an image, is an index into the tables of its chunk.

mod gc;
mod gvl;

pub(in crate::trace_file) use gc::*;
pub(in crate::trace_file) use gvl::*;

pub(in crate::trace_file) use super::{Entry, What};

use crate::trace_file;

/// Properties of the whole recording.
#[derive(Clone, PartialEq, prost::Message)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate fact")]
pub(in crate::trace_file) struct Header {
    /// Version of the gctrace that wrote it.
    #[prost(string, tag = "1")]
    pub gctrace: String,
    /// Realtime minus monotonic, nanoseconds.
    #[prost(sint64, tag = "2")]
    pub realtime_offset_ns: i64,
    /// Boot time minus monotonic, nanoseconds.
    #[prost(sint64, tag = "3")]
    pub boottime_offset_ns: i64,
    /// When recording began, `CLOCK_MONOTONIC` nanoseconds.
    #[prost(uint64, tag = "4")]
    pub begun_ns: u64,
    /// Whether the sampling clock ran.
    #[prost(bool, tag = "5")]
    pub samples: bool,
    /// Whether threads off their CPU were recorded.
    #[prost(bool, tag = "6")]
    pub wall: bool,
    /// Whether the GVL was traced.
    #[prost(bool, tag = "7")]
    pub gvl: bool,
    /// Whether requests were traced.
    #[prost(bool, tag = "8")]
    pub requests: bool,
    /// Whether allocation was counted.
    #[prost(bool, tag = "9")]
    pub alloc: bool,
    /// Name of the host.
    #[prost(string, optional, tag = "10")]
    pub host: Option<String>,
    /// Release of its kernel.
    #[prost(string, optional, tag = "11")]
    pub kernel: Option<String>,
    /// Its processor architecture, as the kernel names it.
    #[prost(string, optional, tag = "12")]
    pub machine: Option<String>,
    /// Number of CPUs that gctrace could use.
    #[prost(uint32, optional, tag = "13")]
    pub cpus: Option<u32>,
    /// Why it was written, if it is a part of a run.
    #[prost(message, optional, tag = "14")]
    pub dump: Option<Dump>,
    /// Boot id of the host.
    #[prost(string, optional, tag = "15")]
    pub boot: Option<String>,
}

/// Properties of the dump of a flight recorder.
#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Dump {
    /// Why it was written.
    #[prost(string, tag = "1")]
    pub why: String,
    /// When it was requested, `CLOCK_MONOTONIC` nanoseconds.
    #[prost(uint64, tag = "2")]
    pub at_ns: u64,
    /// Start of the time that it covers, `CLOCK_MONOTONIC` nanoseconds.
    #[prost(uint64, tag = "3")]
    pub from_ns: u64,
    /// The number of entries at its start that describe the state at that time.
    #[prost(uint64, tag = "4")]
    pub carried: u64,
    /// The number of entries at its end with times that had not ended.
    #[prost(uint64, tag = "5")]
    pub open: u64,
}

impl Header {
    /// The message of a header.
    pub(in crate::trace_file) fn of(header: &trace_file::Header) -> Self {
        let trace_file::Header { gctrace, clock, begun_ns, subjects, host, dump } = header;
        let (realtime_offset_ns, boottime_offset_ns) = clock.offsets();
        let trace_file::Subjects { samples, wall, gvl, requests, alloc } = *subjects;
        let dump = dump.clone().map(|trace_file::Dump { why, at_ns, from_ns, carried, open }| Dump {
            why,
            at_ns,
            from_ns,
            carried,
            open,
        });
        Self {
            gctrace: gctrace.clone(),
            realtime_offset_ns,
            boottime_offset_ns,
            begun_ns: *begun_ns,
            samples,
            wall,
            gvl,
            requests,
            alloc,
            host: host.name.clone(),
            kernel: host.kernel.clone(),
            machine: host.machine.clone(),
            cpus: host.cpus,
            dump,
            boot: host.boot.clone(),
        }
    }
}

/// Entries in the order in which they were recorded, and the tables that they refer to.
#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Chunk {
    #[prost(string, repeated, tag = "1")]
    pub texts: Vec<String>,
    #[prost(message, repeated, tag = "2")]
    pub frames: Vec<Frame>,
    /// Stack N (from 1 on; 0 is the stack without frames) is this frame, called by the stack with the number in `callers`.
    #[prost(uint32, repeated, tag = "3")]
    pub leaves: Vec<u32>,
    /// Less than the number of the stack itself.
    #[prost(uint32, repeated, tag = "4")]
    pub callers: Vec<u32>,
    #[prost(message, repeated, tag = "5")]
    pub images: Vec<Image>,
    #[prost(message, repeated, tag = "6")]
    pub processes: Vec<Process>,
    #[prost(message, repeated, tag = "7")]
    pub entries: Vec<Entry>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Frame {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    #[prost(uint32, tag = "2")]
    pub name_text: u32,
    #[prost(uint32, optional, tag = "3")]
    pub file_text: Option<u32>,
    #[prost(uint32, tag = "4")]
    pub line: u32,
    #[prost(uint32, tag = "5")]
    pub first_line: u32,
    #[prost(uint64, tag = "6")]
    pub address: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Image {
    #[prost(uint32, tag = "1")]
    pub index: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub path: Vec<u8>,
    #[prost(uint32, tag = "3")]
    pub major: u32,
    #[prost(uint32, tag = "4")]
    pub minor: u32,
    #[prost(uint32, tag = "5")]
    pub teeny: u32,
    #[prost(uint32, optional, tag = "6")]
    pub build_id_text: Option<u32>,
    #[prost(uint32, repeated, tag = "7")]
    pub stat_key_texts: Vec<u32>,
    #[prost(uint32, repeated, tag = "8")]
    pub heap_key_texts: Vec<u32>,
    #[prost(uint32, tag = "9")]
    pub method: u32,
    #[prost(uint64, tag = "10")]
    pub probes: u64,
    #[prost(message, optional, tag = "11")]
    pub gvl: Option<Coverage>,
    #[prost(bool, tag = "12")]
    pub has_symbols: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Process {
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    #[prost(uint32, optional, tag = "2")]
    pub ns_pid: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub ppid: Option<u32>,
    #[prost(uint32, tag = "4")]
    pub comm_text: u32,
    #[prost(message, optional, tag = "5")]
    pub cmdline: Option<Texts>,
    #[prost(double, optional, tag = "6")]
    pub start_ts: Option<f64>,
    #[prost(uint32, optional, tag = "7")]
    pub uid: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub hostname_text: Option<u32>,
    #[prost(message, optional, tag = "9")]
    pub container: Option<Container>,
    #[prost(message, repeated, tag = "10")]
    pub gc_env: Vec<Pair>,
    #[prost(uint32, repeated, tag = "11")]
    pub gc_env_refused_texts: Vec<u32>,
    #[prost(message, optional, tag = "12")]
    pub origin: Option<Origin>,
    /// Index of its image.
    #[prost(uint32, tag = "13")]
    pub image: u32,
    /// Then `gc_env` is empty, as in recordings of earlier releases.
    #[prost(bool, tag = "14")]
    pub has_unknown_environment: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Texts {
    #[prost(uint32, repeated, tag = "1")]
    pub texts: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Pair {
    #[prost(uint32, tag = "1")]
    pub name_text: u32,
    #[prost(uint32, tag = "2")]
    pub value_text: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Container {
    #[prost(uint32, optional, tag = "1")]
    pub id_text: Option<u32>,
    #[prost(uint32, optional, tag = "2")]
    pub runtime: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub name_text: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub pod_uid_text: Option<u32>,
    #[prost(uint32, optional, tag = "5")]
    pub pod_text: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub namespace_text: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub unit_text: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub cgroup_text: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Origin {
    #[prost(uint32, tag = "1")]
    pub service_text: u32,
    #[prost(uint32, optional, tag = "2")]
    pub container_text: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub pod_text: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub namespace_text: Option<u32>,
    #[prost(message, repeated, tag = "5")]
    pub attributes: Vec<Pair>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Refused {
    #[prost(uint32, optional, tag = "1")]
    pub pid: Option<u32>,
    #[prost(uint32, tag = "2")]
    pub path_text: u32,
    #[prost(uint32, tag = "3")]
    pub reason_text: u32,
}

/// Counters that are not 0.
#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Account {
    /// Whether the counters of the kernel could be read.
    #[prost(bool, tag = "1")]
    pub has_kernel: bool,
    #[prost(message, repeated, tag = "2")]
    pub kernel: Vec<Count>,
    #[prost(message, repeated, tag = "3")]
    pub user: Vec<Count>,
    /// What it covers: 0 a whole run, 1 a run that was cut off, 2 a part of a run.
    #[prost(uint32, tag = "4")]
    pub extent: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct Count {
    #[prost(uint32, tag = "1")]
    pub name_text: u32,
    #[prost(uint64, tag = "2")]
    pub count: u64,
}
