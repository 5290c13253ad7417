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
    /// How its GC work is traced.
    pub method: String,
    /// What that method does not show.
    pub misses: Option<String>,
    /// The file that holds the interpreter.
    pub image: String,
    /// Start time, epoch seconds.
    pub start_ts: Option<f64>,
    /// Hostname in the process's own namespace.
    pub hostname: Option<String>,
    /// Id of its container.
    pub container: Option<String>,
    /// The runtime of that container.
    pub container_runtime: Option<String>,
    /// Its name.
    pub container_name: Option<String>,
    /// `RUBY_GC_*` of its environment.
    pub env: Map<String, Value>,
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
    /// What the VM entered the GC for, where that is certain.
    pub kind: Option<PauseKind>,
}

/// What the VM enters the GC for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseKind {
    /// A new cycle.
    Start,
    /// A step of it.
    Continue,
    /// The rest of it.
    Rest,
    /// Finalizers at exit.
    Finalizer,
}

/// What is `null` where nothing was seen, as the value that sums have there.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// Where the pauses of a cycle went.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Phases {
    /// Marking, nanoseconds.
    pub mark_ns: u64,
    /// Sweeping, nanoseconds.
    pub sweep_ns: u64,
    /// Neither, nanoseconds.
    pub other_ns: u64,
}

/// What the resident memory of a process is made of, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Parts {
    /// Anonymous.
    pub anon: u64,
    /// Of files.
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
    /// Threads that serve.
    pub busy_threads: Option<u64>,
    /// Connections that nobody has accepted.
    pub accept_queue: Option<u64>,
}

/// An `alloc` line.
#[derive(Clone, Debug, Deserialize)]
pub struct AllocLine {
    /// Begin of the interval, epoch seconds.
    pub ts: f64,
    /// The process.
    pub pid: u32,
    /// Length of the interval, nanoseconds.
    pub ns: u64,
    /// Slots taken.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Slots by their size in bytes.
    pub slots: Map<String, Value>,
    /// Pages whose free slots were taken.
    pub refills: u64,
    /// Refills that are missing.
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
    /// Its name.
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
    /// Why it is a major one.
    pub major_by: Option<String>,
    /// Whether it compacts the heap, where that is known.
    pub compacting: Option<bool>,
    /// Sum of its pauses, nanoseconds; here 0 if none was seen.
    #[serde(deserialize_with = "or_default")]
    pub pause_ns: u64,
    /// Its pauses in order.
    pub pauses: Vec<PauseEntry>,
    /// Where the pauses went.
    #[serde(deserialize_with = "or_default")]
    pub phases: Phases,
    /// Number of pauses.
    pub steps: u64,
    /// `GC.stat` at `GC_START`, in the order of that Ruby.
    pub stat: Map<String, Value>,
    /// `GC.stat` at `GC_END_SWEEP`.
    pub stat_end: Option<Map<String, Value>>,
    /// `GC.stat_heap` at `GC_START`, where this Ruby has it.
    pub stat_heap: Option<Map<String, Value>>,
    /// `GC.stat_heap` at `GC_END_SWEEP`, where this Ruby has it.
    pub stat_heap_end: Option<Map<String, Value>>,
    /// `GC.latest_gc_info` at `GC_START`.
    pub latest_gc_info: Map<String, Value>,
    /// `GC.latest_gc_info` at `GC_END_SWEEP`.
    pub latest_gc_info_end: Option<Map<String, Value>>,
    /// The stack that triggered it, leaf first, as `name file:line`; where it was seen.
    #[serde(default)]
    pub stack: Option<Vec<String>>,
    /// The request that started it.
    pub request: Option<u64>,
    /// Resident memory, bytes.
    pub rss: Option<u64>,
    /// Peak of it, bytes.
    pub peak_rss: Option<u64>,
    /// Resident memory at `GC_END_SWEEP`, bytes.
    pub rss_end: Option<u64>,
    /// The peak there.
    pub peak_rss_end: Option<u64>,
    /// Where memory was read.
    pub rss_source: Option<String>,
    /// What resident memory is made of.
    pub memory: Option<Parts>,
    /// The same at `GC_END_SWEEP`.
    pub memory_end: Option<Parts>,
    /// Events lost before this one in the process.
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
    /// Its number in the run.
    pub id: u64,
    /// `http`, `job` or `run`.
    pub kind: String,
    /// Its method.
    pub method: Option<String>,
    /// The template of its path, or the class of a job.
    pub path: Option<String>,
    /// Method and path, or the class.
    pub endpoint: String,
    /// The method or block that handled it, if a stack showed it.
    pub handler: Option<String>,
    /// The file with it.
    pub handler_file: Option<String>,
    /// The line at which it begins.
    pub handler_line: Option<u64>,
    /// The queue of a job.
    pub queue: Option<String>,
    /// The number of a job.
    pub jid: Option<String>,
    /// When a job was put into its queue, epoch seconds.
    pub enqueued_at: Option<f64>,
    /// When it was taken, epoch seconds.
    pub ts: f64,
    /// Status of the response.
    pub status: Option<u16>,
    /// Its trace, 32 hexadecimal digits.
    pub trace_id: Option<String>,
    /// The span of its caller, 16 hexadecimal digits.
    pub parent_span_id: Option<String>,
    /// Whether its caller may have recorded the trace.
    pub trace_sampled: Option<bool>,
    /// Where these are known from.
    pub trace_origin: Option<String>,
    /// When it was taken, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// How long the thread was busy with it, nanoseconds.
    pub duration_ns: Option<u64>,
    /// How long its last bytes had waited for the thread, nanoseconds, if known.
    pub queue_ns: Option<u64>,
    /// From the begin to the first bytes of the response, nanoseconds.
    pub first_byte_ns: Option<u64>,
    /// From the begin to the last bytes of the response, nanoseconds.
    pub last_byte_ns: Option<u64>,
    /// Bytes that were written on its connection while it was served.
    pub response_bytes: Option<u64>,
    /// Cycles that it started, if known.
    pub gcs: Option<u32>,
    /// GC pauses of its thread, nanoseconds, if known.
    pub gc_ns: Option<u64>,
    /// The same.
    pub gc_own_ns: Option<u64>,
    /// How many these were.
    pub gc_own_pauses: Option<u32>,
    /// GC pauses of other threads of its process meanwhile, nanoseconds, if known.
    pub gc_other_ns: Option<u64>,
    /// How many these were.
    pub gc_other_pauses: Option<u32>,
    /// For how long its thread waited for the GVL, nanoseconds, if known.
    pub gvl_wait_ns: Option<u64>,
    /// For how long its thread had a CPU, nanoseconds, if known.
    pub cpu_ns: Option<u64>,
    /// For how long it could run and had none.
    pub runnable_ns: Option<u64>,
    /// For how long it waited for something.
    pub blocked_ns: Option<u64>,
    /// The same by what its thread did with the GVL.
    pub split: Option<GvlSplitLine>,
    /// Slots of the heap that its thread took, if known.
    pub alloc_objects: Option<u64>,
    /// Their bytes.
    pub alloc_bytes: Option<u64>,
}

impl RequestLine {
    /// Method and template of the path.
    pub fn endpoint(&self) -> Option<String> {
        Some(format!("{} {}", self.method.as_ref()?, self.path.as_ref()?))
    }
}

/// A `work` line: GC work of an image whose event sites are not known.
#[derive(Clone, Debug, Deserialize)]
pub struct WorkLine {
    /// The process.
    pub pid: u32,
    /// What was timed.
    pub phase: String,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub begin_ns: u64,
    /// Length in nanoseconds.
    pub ns: u64,
}

/// A thread in a `gvl` line.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct GvlWho {
    /// Native thread.
    pub tid: u32,
    /// Its name.
    pub comm: String,
}

/// Who held the GVL longest during a wait.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlBlockerLine {
    /// Native thread.
    pub tid: u32,
    /// Its name.
    pub comm: String,
    /// When it acquired the GVL, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// For how long it held it, nanoseconds.
    pub hold_ns: u64,
    /// What it was seen to do while the other waited.
    pub ran: Vec<GvlRanLine>,
    /// Where it released the GVL, leaf first.
    pub until: Option<Vec<String>>,
}

/// What a thread was seen to do.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlRanLine {
    /// How often.
    pub samples: u64,
    /// The stack, leaf first.
    pub stack: Vec<String>,
}

/// A long wait for the GVL.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlWaitLine {
    /// The process.
    pub pid: u32,
    /// Native thread that waited.
    pub tid: u32,
    /// When it began to wait, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// For how long, nanoseconds.
    pub wait_ns: u64,
    /// The request that its thread served when it got the GVL.
    pub request: Option<u64>,
    /// Who held the GVL longest at a stretch meanwhile.
    pub blocked_by: Option<GvlBlockerLine>,
    /// What it was doing then, leaf first.
    pub stack: Option<Vec<String>>,
}

/// What a thread, or all threads of a process, did with the GVL.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlSumsLine {
    /// The process.
    pub pid: u32,
    /// The last native thread; none for a process.
    pub tid: Option<u32>,
    /// Whether the thread ended.
    pub ended: Option<bool>,
    /// Of a process, how many threads.
    pub threads: Option<u64>,
    /// Time that the threads were seen, nanoseconds.
    pub wall_ns: u64,
    /// For how much of it the GVL was watched, nanoseconds.
    pub watched_ns: u64,
    /// Of a process, how long GC pauses took meanwhile, nanoseconds.
    pub gc_pause_ns: Option<u64>,
    /// Of a process, for how long threads waited for the GVL in GC pauses, nanoseconds.
    pub gc_wait_ns: Option<u64>,
    /// Of a process, share of GC pauses in the time for which the GVL was held.
    pub gc_of_hold: Option<f64>,
    /// Name of the last native thread, or of the process.
    pub comm: String,
    /// How it was watched.
    pub mode: String,
    /// What the scheduler did meanwhile.
    pub split: Option<GvlSplitLine>,
    /// Waits.
    pub waits: u64,
    /// Their time, nanoseconds.
    pub wait_ns: u64,
    /// The longest.
    pub wait_max_ns: u64,
    /// At least half of them did not take longer.
    pub wait_p50_ns: u64,
    /// At least 99 of 100 did not take longer.
    pub wait_p99_ns: u64,
    /// How long the GVL was held, nanoseconds.
    pub hold_ns: Option<u64>,
    /// How long the threads were without the GVL, nanoseconds.
    pub away_ns: Option<u64>,
    /// Waits by length.
    pub wait_histogram: Vec<(Option<u64>, u64)>,
    /// Of a process, who waited for whom.
    #[serde(default)]
    pub blocked: Vec<GvlBlockedLine>,
}

/// What native threads did, by what threads did with the GVL.
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
    /// All of it, in any state of the GVL.
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

/// For how long native threads ran, could have run and could not, nanoseconds.
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
    /// All three, nanoseconds.
    pub fn sum(&self) -> u64 {
        self.cpu_ns + self.runnable_ns + self.blocked_ns
    }
}

/// Waits of one thread while another held the GVL.
#[derive(Clone, Debug, Deserialize)]
pub struct GvlBlockedLine {
    /// Who waited.
    pub waiter: Option<GvlWho>,
    /// Who held the GVL.
    pub holder: Option<GvlWho>,
    /// How often the other had it meanwhile.
    pub holds: u64,
    /// For how long, nanoseconds.
    pub wait_ns: u64,
}

/// An `exit` line.
#[derive(Clone, Debug, Deserialize)]
pub struct ExitLine {
    /// The process that is gone.
    pub pid: u32,
    /// `exited`, `execed` or `detached`.
    pub reason: String,
    /// Cycles before the first one that was reported.
    pub cycles_before: Option<u64>,
    /// Of those, the ones of a program that started during the run.
    pub cycles_missed: Option<u64>,
    /// GC records of it that the kernel lost.
    pub lost: u64,
}

/// A `refused` line.
#[derive(Clone, Debug, Deserialize)]
pub struct RefusedLine {
    /// The process, where it is about one.
    pub pid: Option<u32>,
    /// Why.
    pub reason: String,
}

/// The `ledger` line.
#[derive(Clone, Debug, Deserialize)]
pub struct LedgerLine {
    /// Whether gctrace itself says that all sums hold.
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
    /// `gvl` lines about waits.
    pub gvl_waits: Vec<GvlWaitLine>,
    /// `gvl` lines about threads.
    pub gvl_threads: Vec<GvlSumsLine>,
    /// `gvl` lines about processes.
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
    /// Reads jsonl. A line that is not JSON, has no known type, lacks a field or follows the ledger is an error.
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
