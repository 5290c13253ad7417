//! gctrace's jsonl.

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// A `process` line.
#[derive(Clone, Debug, Deserialize)]
pub struct ProcessLine {
    /// Process id on the host.
    pub pid: u32,
    /// Process id in the process's own namespace.
    pub ns_pid: Option<u32>,
    /// Its parent's pid.
    pub ppid: Option<u32>,
    /// Name of the main thread.
    pub comm: String,
    /// Its arguments.
    pub cmdline: Option<Vec<String>>,
    /// The Ruby version, e.g. `3.1.2`.
    pub ruby: String,
    /// The method by which its GC work is traced.
    pub method: String,
    /// What that method cannot show.
    pub misses: Option<String>,
    /// The file that holds the interpreter.
    pub image: String,
    /// Start time, epoch seconds.
    pub start_ts: Option<f64>,
    /// Hostname in the process's own namespace.
    pub hostname: Option<String>,
    /// Id of its container.
    pub container: Option<String>,
    /// The container runtime.
    pub container_runtime: Option<String>,
    /// Name of the container.
    pub container_name: Option<String>,
    /// `RUBY_GC_*` of its environment, if that is known.
    pub env: Option<Map<String, Value>>,
    /// `GC.stat` when it was found, if its VM could be read by then.
    pub stat: Option<Map<String, Value>>,
}

/// One pause of a `gc` line.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct PauseEntry {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub begin_ns: u64,
    /// Length in nanoseconds.
    pub ns: u64,
    /// Why the VM entered the GC, if certain.
    pub kind: Option<PauseKind>,
}

/// Why the VM enters the GC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseKind {
    /// A new cycle.
    Start,
    /// A step of the cycle.
    Continue,
    /// The rest of the cycle.
    Rest,
    /// Finalizers at exit.
    Finalizer,
}

/// Reads a value that is `null` if nothing was seen; it becomes the default value.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// How the time of the pauses of a cycle divides.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Phases {
    /// Marking, nanoseconds.
    pub mark_ns: u64,
    /// Sweeping, nanoseconds.
    pub sweep_ns: u64,
    /// Neither, nanoseconds.
    pub other_ns: u64,
}

/// The parts of the resident memory of a process, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Parts {
    /// Anonymous memory.
    pub anon: u64,
    /// File mappings.
    pub file: u64,
    /// Shared memory.
    pub shmem: u64,
    /// In swap, not resident.
    pub swap: u64,
}

impl Parts {
    /// The resident set size.
    pub fn resident(&self) -> u64 {
        self.anon + self.file + self.shmem
    }
}

/// A `load` line.
#[derive(Clone, Debug, Deserialize)]
pub struct LoadLine {
    /// When it was read, epoch seconds.
    pub ts: f64,
    /// The process.
    pub pid: u32,
    /// Threads that are serving a request.
    pub busy_threads: Option<u64>,
    /// Connections that have not been accepted.
    pub accept_queue: Option<u64>,
}

/// An `alloc` line.
#[derive(Clone, Debug, Deserialize)]
pub struct AllocLine {
    /// Beginning of the interval, epoch seconds.
    pub ts: f64,
    /// The process.
    pub pid: u32,
    /// Length of the interval, nanoseconds.
    pub ns: u64,
    /// Slots taken.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Number of slots by slot size in bytes.
    pub slots: Map<String, Value>,
    /// Number of pages whose free slots were taken.
    pub refills: u64,
    /// Number of refills that are missing.
    pub lost: u64,
}

/// A `gc` line.
#[derive(Clone, Debug, Deserialize)]
pub struct GcLine {
    /// Time of `GC_START`, epoch seconds.
    pub ts: f64,
    /// The process.
    pub pid: u32,
    /// The thread that started the cycle.
    pub tid: u32,
    /// The thread's name.
    pub comm: String,
    /// Id of its container.
    pub container: Option<String>,
    /// The Ruby version.
    pub ruby: String,
    /// `GC.stat[:count]` of the cycle.
    pub count: u64,
    /// "minor" or "major".
    pub kind: String,
    /// What triggered it.
    pub gc_by: Option<String>,
    /// The reason for a major cycle.
    pub major_by: Option<String>,
    /// Whether it compacts the heap, if known.
    pub compacting: Option<bool>,
    /// Sum of its pauses, nanoseconds; here 0 if none was seen.
    #[serde(deserialize_with = "or_default")]
    pub pause_ns: u64,
    /// Its pauses in order.
    pub pauses: Vec<PauseEntry>,
    /// How the time of the pauses divides.
    #[serde(deserialize_with = "or_default")]
    pub phases: Phases,
    /// Number of pauses.
    pub steps: u64,
    /// `GC.stat` at `GC_START`, in that Ruby's order of keys.
    pub stat: Map<String, Value>,
    /// `GC.stat` at `GC_END_SWEEP`.
    pub stat_end: Option<Map<String, Value>>,
    /// `GC.stat_heap` at `GC_START`, if this Ruby has it.
    pub stat_heap: Option<Map<String, Value>>,
    /// `GC.stat_heap` at `GC_END_SWEEP`, if this Ruby has it.
    pub stat_heap_end: Option<Map<String, Value>>,
    /// `GC.latest_gc_info` at `GC_START`.
    pub latest_gc_info: Map<String, Value>,
    /// `GC.latest_gc_info` at `GC_END_SWEEP`.
    pub latest_gc_info_end: Option<Map<String, Value>>,
    /// The stack that triggered it, leaf first, as `name file:line`; if it was seen.
    #[serde(default)]
    pub stack: Option<Vec<String>>,
    /// The request that started it.
    pub request: Option<u64>,
    /// Resident memory, bytes.
    pub rss: Option<u64>,
    /// Peak resident memory, bytes.
    pub peak_rss: Option<u64>,
    /// Resident memory at `GC_END_SWEEP`, bytes.
    pub rss_end: Option<u64>,
    /// Peak resident memory at `GC_END_SWEEP`, bytes.
    pub peak_rss_end: Option<u64>,
    /// The source of the memory figures.
    pub rss_source: Option<String>,
    /// The parts of resident memory.
    pub memory: Option<Parts>,
    /// The parts at `GC_END_SWEEP`.
    pub memory_end: Option<Parts>,
    /// Events of the process lost before this one.
    pub lost: u64,
    /// Whether the end of sweeping was seen.
    pub complete: bool,
}

/// A `request` line.
#[derive(Clone, Debug, Deserialize)]
pub struct RequestLine {
    /// The process.
    pub pid: u32,
    /// The thread that served it.
    pub tid: u32,
    /// Its number, unique in the run.
    pub id: u64,
    /// `http`, `job` or `run`.
    pub kind: String,
    /// Its HTTP method.
    pub method: Option<String>,
    /// The template of its path, or the class of a job.
    pub path: Option<String>,
    /// Method and path, or the class.
    pub endpoint: String,
    /// The method or block that handled it, if it was on a stack.
    pub handler: Option<String>,
    /// The file of the handler.
    pub handler_file: Option<String>,
    /// The line at which the handler begins.
    pub handler_line: Option<u64>,
    /// The queue of a job.
    pub queue: Option<String>,
    /// The id of a job.
    pub jid: Option<String>,
    /// When a job was enqueued, epoch seconds.
    pub enqueued_at: Option<f64>,
    /// Time since it was enqueued, nanoseconds.
    pub latency_ns: Option<u64>,
    /// When a thread took it, epoch seconds.
    pub ts: f64,
    /// Status of the response.
    pub status: Option<u16>,
    /// Its trace id, 32 hexadecimal digits.
    pub trace_id: Option<String>,
    /// The span id of its caller, 16 hexadecimal digits.
    pub parent_span_id: Option<String>,
    /// Whether its caller may have recorded the trace.
    pub trace_sampled: Option<bool>,
    /// The source of these three.
    pub trace_origin: Option<String>,
    /// When a thread took it, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// How long the thread was busy with it, nanoseconds; if its end was seen.
    pub duration_ns: Option<u64>,
    /// How long its last bytes waited for the thread, nanoseconds, if known.
    pub queue_ns: Option<u64>,
    /// From the beginning to the first bytes of the response, nanoseconds.
    pub first_byte_ns: Option<u64>,
    /// From the beginning to the last bytes of the response, nanoseconds.
    pub last_byte_ns: Option<u64>,
    /// Bytes written on its connection while it was served.
    pub response_bytes: Option<u64>,
    /// Number of cycles that it started, if known.
    pub gcs: Option<u32>,
    /// GC pauses of its thread, nanoseconds, if known.
    pub gc_ns: Option<u64>,
    /// The same value as `gc_ns`.
    pub gc_own_ns: Option<u64>,
    /// Number of these pauses.
    pub gc_own_pauses: Option<u32>,
    /// GC pauses of other threads of its process meanwhile, nanoseconds, if known.
    pub gc_other_ns: Option<u64>,
    /// Number of these pauses.
    pub gc_other_pauses: Option<u32>,
    /// Time that its thread waited for the GVL, nanoseconds, if known.
    pub gvl_wait_ns: Option<u64>,
    /// Time that its thread was on a CPU, nanoseconds, if known.
    pub cpu_ns: Option<u64>,
    /// Time that its thread was runnable without a CPU, nanoseconds, if known.
    pub runnable_ns: Option<u64>,
    /// Time that its thread was blocked, nanoseconds, if known.
    pub blocked_ns: Option<u64>,
    /// These times by what its thread did with the GVL.
    pub split: Option<GvlSplitLine>,
    /// Heap slots that its thread took, if known.
    pub alloc_objects: Option<u64>,
    /// Their bytes.
    pub alloc_bytes: Option<u64>,
    /// Page faults of its thread without I/O, if known.
    pub minor_faults: Option<u64>,
    /// Page faults of its thread with I/O, if known.
    pub major_faults: Option<u64>,
    /// Growth of the resident memory of its process, bytes, if known.
    pub rss_growth_bytes: Option<i64>,
}

impl RequestLine {
    /// Method and template of the path.
    pub fn endpoint(&self) -> Option<String> {
        Some(format!("{} {}", self.method.as_ref()?, self.path.as_ref()?))
    }
}

/// A `work` line: GC work of an image whose event sites are unknown.
#[derive(Clone, Debug, Deserialize)]
pub struct WorkLine {
    /// The process.
    pub pid: u32,
    /// The timed phase.
    pub phase: String,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub begin_ns: u64,
    /// Length in nanoseconds.
    pub ns: u64,
}

/// A thread in a `gvl` line.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct GvlWho {
    /// Native thread id.
    pub tid: u32,
    /// Its name.
    pub comm: String,
}

/// The thread that held the GVL longest during a wait.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlBlockerLine {
    /// Native thread id.
    pub tid: u32,
    /// Its name.
    pub comm: String,
    /// When it acquired the GVL, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// How long it held it, nanoseconds.
    pub hold_ns: u64,
    /// What it was seen running while the other thread waited.
    pub ran: Vec<GvlRanLine>,
    /// The stack at which it released the GVL, leaf first.
    pub until: Option<Vec<String>>,
}

/// A stack that a thread was seen running.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlRanLine {
    /// Number of samples.
    pub samples: u64,
    /// The stack, leaf first.
    pub stack: Vec<String>,
}

/// A long wait for the GVL.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlWaitLine {
    /// The process.
    pub pid: u32,
    /// Id of the native thread that waited.
    pub tid: u32,
    /// When it began to wait, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length of the wait, nanoseconds.
    pub wait_ns: u64,
    /// The request that the thread was serving when it acquired the GVL.
    pub request: Option<u64>,
    /// The thread that held the GVL longest at a stretch during the wait.
    pub blocked_by: Option<GvlBlockerLine>,
    /// The stack of the waiting thread, leaf first.
    pub stack: Option<Vec<String>>,
}

/// GVL statistics of one thread, or of all threads of a process.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlSumsLine {
    /// The process.
    pub pid: u32,
    /// The last native thread; `None` for a process.
    pub tid: Option<u32>,
    /// Whether the thread ended.
    pub ended: Option<bool>,
    /// For a process: number of threads.
    pub threads: Option<u64>,
    /// Time for which the threads were seen, nanoseconds.
    pub wall_ns: u64,
    /// The part of it for which the GVL was watched, nanoseconds.
    pub watched_ns: u64,
    /// For a process: duration of its GC pauses meanwhile, nanoseconds.
    pub gc_pause_ns: Option<u64>,
    /// For a process: time that threads waited for the GVL during GC pauses, nanoseconds.
    pub gc_wait_ns: Option<u64>,
    /// For a process: share of GC pauses in the time for which the GVL was held.
    pub gc_of_hold: Option<f64>,
    /// Name of the last native thread, or of the process.
    pub comm: String,
    /// The method by which it was watched.
    pub mode: String,
    /// The times by what the scheduler did.
    pub split: Option<GvlSplitLine>,
    /// Number of waits.
    pub waits: u64,
    /// Total time of the waits, nanoseconds.
    pub wait_ns: u64,
    /// The longest wait, nanoseconds.
    pub wait_max_ns: u64,
    /// At least half of the waits did not take longer, nanoseconds.
    pub wait_p50_ns: u64,
    /// At least 99 % of the waits did not take longer, nanoseconds.
    pub wait_p99_ns: u64,
    /// How long the GVL was held, nanoseconds.
    pub hold_ns: Option<u64>,
    /// How long the threads neither held the GVL nor waited for it, nanoseconds.
    pub away_ns: Option<u64>,
    /// Waits by length.
    pub wait_histogram: Vec<(Option<u64>, u64)>,
    /// For a process: which threads waited for which.
    #[serde(default)]
    pub blocked: Vec<GvlBlockedLine>,
}

/// Scheduler states of native threads, by what the threads did with the GVL.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct GvlSplitLine {
    /// Waiting for it.
    pub wait: TaskTimes,
    /// Holding it.
    pub hold: TaskTimes,
    /// Without it.
    pub away: TaskTimes,
}

impl GvlSplitLine {
    /// The sum over all states of the GVL.
    pub fn all(&self) -> TaskTimes {
        let rows = [self.wait, self.hold, self.away];
        let sum = |of: fn(&TaskTimes) -> u64| rows.iter().map(of).sum();
        TaskTimes {
            cpu_ns: sum(|row| row.cpu_ns),
            runnable_ns: sum(|row| row.runnable_ns),
            blocked_ns: sum(|row| row.blocked_ns),
        }
    }
}

/// How long native threads ran, were runnable and were blocked, nanoseconds.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct TaskTimes {
    /// On a CPU.
    pub cpu_ns: u64,
    /// Runnable without a CPU.
    pub runnable_ns: u64,
    /// Neither.
    pub blocked_ns: u64,
}

impl TaskTimes {
    /// The sum of all three, nanoseconds.
    pub fn sum(&self) -> u64 {
        self.cpu_ns + self.runnable_ns + self.blocked_ns
    }
}

/// Waits of one thread while another thread held the GVL.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlBlockedLine {
    /// The thread that waited.
    pub waiter: Option<GvlWho>,
    /// The thread that held the GVL.
    pub holder: Option<GvlWho>,
    /// How often the holder had the GVL meanwhile.
    pub holds: u64,
    /// Time waited, nanoseconds.
    pub wait_ns: u64,
}

/// An `exit` line.
#[derive(Clone, Debug, Deserialize)]
pub struct ExitLine {
    /// The process that has ended, or is no longer traced.
    pub pid: u32,
    /// `exited`, `execed` or `detached`.
    pub reason: String,
    /// Cycles before the first one that was reported.
    pub cycles_before: Option<u64>,
    /// The part of `cycles_before` that a program that started during the run has run.
    pub cycles_missed: Option<u64>,
    /// GC records of the process that the kernel lost.
    pub lost: u64,
}

/// A `refused` line.
#[derive(Clone, Debug, Deserialize)]
pub struct RefusedLine {
    /// The process, if the line is about one.
    pub pid: Option<u32>,
    /// The reason.
    pub reason: String,
}

/// The `ledger` line.
#[derive(Clone, Debug, Deserialize)]
pub struct LedgerLine {
    /// Whether gctrace itself reports that all sums hold.
    pub balanced: bool,
    /// Counters of the BPF programs.
    pub kernel: Map<String, Value>,
    /// Counters of user space.
    pub user: Map<String, Value>,
}

/// Everything that gctrace reported in one run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// `process` lines.
    pub processes: Vec<ProcessLine>,
    /// `gc` lines, in the order of the output.
    pub gcs: Vec<GcLine>,
    /// `request` lines, in the order of the output.
    pub requests: Vec<RequestLine>,
    /// `work` lines, in the order of the output.
    pub works: Vec<WorkLine>,
    /// `alloc` lines.
    pub allocs: Vec<AllocLine>,
    /// `load` lines.
    pub loads: Vec<LoadLine>,
    /// `gvl` lines of waits.
    pub gvl_waits: Vec<GvlWaitLine>,
    /// `gvl` lines of threads.
    pub gvl_threads: Vec<GvlSumsLine>,
    /// `gvl` lines of processes.
    pub gvl_processes: Vec<GvlSumsLine>,
    /// `exit` lines.
    pub exits: Vec<ExitLine>,
    /// `refused` lines.
    pub refused: Vec<RefusedLine>,
    /// `summary` lines.
    pub summaries: Vec<Value>,
    /// The `ledger` line, which is the last one.
    pub ledger: Option<LedgerLine>,
}

impl Report {
    /// Parses jsonl. A line that is not JSON, is of an unknown type, lacks a field or follows the ledger is an error.
    pub fn parse(lines: &[String]) -> Result<Self> {
        let mut report = Self::default();
        for line in lines {
            report.add(line).with_context(|| format!("jsonl line {line}"))?;
        }
        Ok(report)
    }

    fn add(&mut self, line: &str) -> Result<()> {
        ensure!(self.ledger.is_none(), "a line after the ledger");
        let value: Value = serde_json::from_str(line)?;
        match value.get("type").and_then(Value::as_str) {
            Some("process") => self.processes.push(serde_json::from_value(value)?),
            Some("gc") => {
                ensure!(value.get("container").is_some(), "no field container");
                self.gcs.push(serde_json::from_value(value)?);
            }
            Some("request") => self.requests.push(serde_json::from_value(value)?),
            Some("alloc") => self.allocs.push(serde_json::from_value(value)?),
            Some("load") => self.loads.push(serde_json::from_value(value)?),
            Some("work") => self.works.push(serde_json::from_value(value)?),
            Some("gvl") => match value.get("what").and_then(Value::as_str) {
                Some("wait") => self.gvl_waits.push(serde_json::from_value(value)?),
                Some("thread") => self.gvl_threads.push(serde_json::from_value(value)?),
                Some("process") => self.gvl_processes.push(serde_json::from_value(value)?),
                other => bail!("a gvl line about {other:?}"),
            },
            Some("exit") => self.exits.push(serde_json::from_value(value)?),
            Some("refused") => self.refused.push(serde_json::from_value(value)?),
            Some("summary") => self.summaries.push(value),
            Some("ledger") => self.ledger = Some(serde_json::from_value(value)?),
            other => bail!("unknown type {other:?}"),
        }
        Ok(())
    }

    /// The cycles of one process, in the order of the output.
    pub fn gcs_of(&self, pid: u32) -> impl Iterator<Item = &GcLine> {
        self.gcs.iter().filter(move |gc| gc.pid == pid)
    }

    /// The `process` lines of one pid: more than one after an exec.
    pub fn processes_of(&self, pid: u32) -> impl Iterator<Item = &ProcessLine> {
        self.processes.iter().filter(move |process| process.pid == pid)
    }
}
