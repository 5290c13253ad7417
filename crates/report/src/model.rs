//! The domain types that aggregation produces and exporters consume. They are deliberately not serialisable: every wire format
//! has its own types next to its exporter.

pub mod gvl;
pub mod gvl_so_far;
pub mod load;
pub mod request;
pub mod seen;
pub mod server;
pub mod source;
pub mod stack;
pub mod trace;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use gctrace_common::event::WorkPhase;

use crate::ruby::{PauseKind, RubyVersion, fallback::Method, stat::GcInfo};

/// What is known about a traced process. Facts that could not be read (the process had already exited) are `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Process {
    /// Pid in the host's pid namespace.
    pub pid: u32,
    /// Pid in the process's own namespace.
    pub ns_pid: Option<u32>,
    /// Parent's pid, host namespace.
    pub ppid: Option<u32>,
    /// Name of the main thread.
    pub comm: String,
    /// Arguments.
    pub cmdline: Option<Vec<String>>,
    /// Start time, epoch seconds.
    pub start_ts: Option<f64>,
    /// Real user id, as numbered on the host.
    pub uid: Option<u32>,
    /// Host name of the process's UTS namespace.
    pub hostname: Option<String>,
    /// Its container, pod and unit.
    pub container: Container,
    /// `RUBY_GC_*` variables of its initial environment; the value of `RUBY_GC_TOKEN` is redacted. `None`: that environment is unknown.
    pub gc_env: Option<BTreeMap<String, String>>,
    /// Names of variables that begin with `RUBY_GC_` but that Ruby never reads; they are refused.
    pub gc_env_refused: Vec<String>,
    /// What it belongs to.
    pub origin: Arc<Origin>,
    /// The Ruby it runs.
    pub image: Arc<Image>,
}

/// What a process belongs to, for outputs that add up many processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// Service: the first of these that is present: `service.name` of the process context that it publishes (OTEP 4719),
    /// `OTEL_SERVICE_NAME`, `service.name` of `OTEL_RESOURCE_ATTRIBUTES`, `DD_SERVICE`, its systemd unit, its script.
    pub service: String,
    /// Id of its container, 64 hexadecimal digits.
    pub container: Option<String>,
    /// Id of its Kubernetes pod.
    pub pod: Option<String>,
    /// Its Kubernetes namespace.
    pub namespace: Option<String>,
    /// Other attributes: those of its process context, then those of `OTEL_RESOURCE_ATTRIBUTES` in its initial environment.
    pub attributes: Vec<(String, String)>,
}

/// A container runtime, as far as the cgroup's name reveals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// Docker.
    Docker,
    /// containerd, under Kubernetes or nerdctl.
    Containerd,
    /// CRI-O.
    CriO,
    /// Podman.
    Podman,
}

impl Runtime {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Containerd => "containerd",
            Self::CriO => "cri-o",
            Self::Podman => "podman",
        }
    }
}

/// Where a process runs. Unknown fields are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    /// Id of the innermost container.
    pub id: Option<String>,
    /// Its runtime.
    pub runtime: Option<Runtime>,
    /// Its name.
    pub name: Option<String>,
    /// Uid of the Kubernetes pod.
    pub pod_uid: Option<String>,
    /// Name of the pod.
    pub pod: Option<String>,
    /// Namespace of the pod.
    pub namespace: Option<String>,
    /// systemd unit (inside the container, if there is one).
    pub unit: Option<String>,
    /// Path of the cgroup, as seen from gctrace's cgroup namespace.
    pub cgroup: Option<String>,
}

/// A Ruby image as exporters see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Index in the kernel's image table.
    pub index: u32,
    /// Path as seen by the first process that mapped it.
    pub path: PathBuf,
    /// Version.
    pub version: RubyVersion,
    /// Build id, hexadecimal, if the file has one.
    pub build_id: Option<String>,
    /// Names of the keys of this Ruby's `GC.stat`, in its order.
    pub stat_keys: Vec<&'static str>,
    /// Names of the keys of each heap in its `GC.stat_heap`, in its order; empty before 3.2.
    pub heap_keys: Vec<&'static str>,
    /// How its GC work is traced.
    pub method: Method,
    /// Number of probes attached.
    pub probes: usize,
    /// How much of its GVL is watched; `None` if the GVL is not watched.
    pub gvl: Option<gvl::GvlCoverage>,
    /// Whether the file has symbols that the sites were cross-checked against.
    pub has_symbols: bool,
}

/// Memory of a process, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Resident set size: `anon + file + shmem`.
    pub rss: u64,
    /// Highest `rss` so far; never below `rss`.
    pub peak_rss: u64,
    /// Resident anonymous memory.
    pub anon: u64,
    /// Resident file-backed pages.
    pub file: u64,
    /// Resident shared memory.
    pub shmem: u64,
    /// Anonymous memory in swap, not part of `rss`.
    pub swap: u64,
    /// Where and when this was read.
    pub source: MemorySource,
    /// How much of it is shared, if that was read.
    pub shares: Option<Shares>,
}

/// Where memory figures were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemorySource {
    /// In the kernel, at the event.
    Kernel,
    /// In the kernel, at the event, without the per-CPU counts that have not yet been added to the kernel's counters.
    KernelApproximate,
    /// In `/proc`, when the event was processed.
    #[default]
    Proc,
}

impl MemorySource {
    /// The word used on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::KernelApproximate => "kernel-approximate",
            Self::Proc => "proc",
        }
    }
}

/// How memory is shared with other processes, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Proportional set size: each page divided by the number of processes that map it.
    pub pss: u64,
    /// Pages that only this process maps and that it has written to: the cost of copy on write, and its own garbage.
    pub private_dirty: u64,
    /// When it was read, `CLOCK_MONOTONIC` nanoseconds: later than the event. `None` in recordings without this field.
    pub read_ns: Option<u64>,
}

/// The VM's state at one GC event, or at the start or end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcState {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Thread.
    pub tid: u32,
    /// `GC.stat`, in the order of [`Image::stat_keys`].
    pub stat: Vec<u64>,
    /// `GC.stat_heap`: the values of each heap, in the order of [`Image::heap_keys`]; empty before 3.2.
    pub heaps: Vec<Vec<u64>>,
    /// `GC.latest_gc_info`.
    pub info: GcInfo,
    /// Memory, if it was read at the event or the process could still be read.
    pub memory: Option<Memory>,
}

impl GcState {
    /// Returns a value of `GC.stat`. When Ractors allocate at the same time, CRuby loses counts: its numbers of live or free slots can exceed the
    /// number of slots (or be negative, which looks like a huge number). For such a value this returns `None`.
    pub fn value(&self, image: &Image, name: &str) -> Option<u64> {
        let get = |name: &str| {
            let at = image.stat_keys.iter().position(|key| *key == name)?;
            self.stat.get(at).copied()
        };
        let value = get(name)?;
        let of_slots = matches!(name, "heap_live_slots" | "heap_free_slots");
        (!of_slots || get("heap_available_slots").is_none_or(|slots| value <= slots)).then_some(value)
    }
}

/// One GC pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The thread that was stopped: any thread can perform a step of a cycle.
    pub tid: u32,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length, nanoseconds; equals `mark_ns + sweep_ns + other_ns`.
    pub ns: u64,
    /// Why the VM entered the GC, if that is certain.
    pub kind: Option<PauseKind>,
    /// Time spent marking, nanoseconds.
    pub mark_ns: u64,
    /// Time spent sweeping and, in a cycle that compacts, compacting, nanoseconds: CRuby has no event between the two.
    pub sweep_ns: u64,
    /// Time spent in neither: set-up and tear-down, nanoseconds.
    pub other_ns: u64,
}

impl Pause {
    /// The phase in which the pause starts its work.
    pub fn first_phase(&self) -> Phase {
        if self.mark_ns > 0 {
            Phase::Mark
        } else if self.sweep_ns > 0 {
            Phase::Sweep
        } else {
            Phase::Other
        }
    }

    /// Time of the pause by phase, nanoseconds.
    pub fn phases(&self) -> [(Phase, u64); 3] {
        [(Phase::Mark, self.mark_ns), (Phase::Sweep, self.sweep_ns), (Phase::Other, self.other_ns)]
    }
}

/// A phase of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Marking.
    Mark,
    /// Sweeping and compacting.
    Sweep,
    /// Neither.
    Other,
}

impl Phase {
    /// The word used in labels and frames.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mark => "marking",
            Self::Sweep => "sweeping",
            Self::Other => "other",
        }
    }
}

/// An interval of GC work in an image whose event sites are unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcWork {
    /// What was timed.
    pub phase: WorkPhase,
    /// Thread.
    pub tid: u32,
    /// Its name.
    pub comm: String,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length, nanoseconds.
    pub ns: u64,
}

impl GcWork {
    /// Whether it is a whole pause.
    pub fn is_pause(&self) -> bool {
        self.phase == WorkPhase::Pause
    }

    /// Whether it may lie inside another one, so that its time would count twice: before Ruby 3.2 it is `gc_sweep_step`, which the other
    /// functions call, too.
    pub fn may_be_nested(&self, image: &Image) -> bool {
        self.phase == WorkPhase::Continue && (image.version.major, image.version.minor) < (3, 2)
    }
}

/// One GC cycle: from `GC_START` to the end of its (lazy) sweep.
#[derive(Clone, Debug)]
pub struct GcCycle {
    /// Name of the thread that started it.
    pub comm: String,
    /// `GC.count` of the cycle.
    pub count: u64,
    /// At `GC_START`.
    pub start: GcState,
    /// At `GC_END_SWEEP`; `None` if tracing or the process ended first.
    pub end: Option<GcState>,
    /// Its pauses, in order.
    pub pauses: Vec<Pause>,
    /// Stack of the thread that started it, leaf first; `None` if it was not captured.
    pub trigger: Option<stack::Stack>,
    /// Number of the request that its thread was serving; `None` if it served none or that is unknown.
    pub request: Option<u64>,
    /// The span that was active on its thread, if its program publishes spans and its stack was captured.
    pub span: Option<trace::Span>,
    /// GC records of this process that the kernel lost since the last report, before this cycle was reported.
    pub lost: u64,
}

impl GcCycle {
    /// Whether it marks everything.
    pub fn is_major(&self) -> bool {
        self.start.info.major_by.is_some()
    }

    /// `minor` or `major`.
    pub fn kind(&self) -> &'static str {
        if self.is_major() { "major" } else { "minor" }
    }

    /// Whether the cycle compacted the heap, which Ruby counts from 2.7 on; `None` if unknown. The `GC.compact` of 2.7 runs outside any
    /// cycle.
    pub fn compacted(&self, process: &Process) -> Option<bool> {
        let at = process.image.stat_keys.iter().position(|key| *key == "compact_count")?;
        Some(self.end.as_ref()?.stat.get(at)? > self.start.stat.get(at)?)
    }

    /// Sum of its pauses, nanoseconds.
    pub fn pause_ns(&self) -> u64 {
        self.pauses.iter().map(|pause| pause.ns).sum()
    }

    /// Whether its pauses are known to be shorter than this. A cycle without pauses is that of a program that was killed in the first one, or
    /// their records were lost: how long they were is unknown.
    pub fn is_shorter_than(&self, ns: u64) -> bool {
        !self.pauses.is_empty() && self.max_pause_ns() < ns
    }

    /// Its longest pause, nanoseconds.
    pub fn max_pause_ns(&self) -> u64 {
        self.pauses.iter().map(|pause| pause.ns).max().unwrap_or_default()
    }
}

/// How tracing of a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// It exited (or was killed).
    Exited,
    /// It replaced its program.
    Execed,
    /// gctrace stopped.
    Detached,
}

impl EndReason {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exited => "exited",
            Self::Execed => "execed",
            Self::Detached => "detached",
        }
    }
}

/// Converts a NUL-padded `comm` to text.
pub fn comm(bytes: &[u8; 16]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
