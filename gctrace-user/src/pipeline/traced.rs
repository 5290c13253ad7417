//! The pipeline's state of a traced process.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::event::PauseEvent;

use super::before::Beginning;
use crate::{
    aggregate::gc_cycle::CycleFold,
    clock::WallClock,
    host::{
        environ::Environment,
        proc::{self, MemoryReader},
    },
    images::KnownImage,
    model::{Container, Image, Memory, Process, Shares, request::GcTime, seen::CyclesBefore},
};

/// Minimum interval between reads of how a process's memory is shared.
const SHARES_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of pauses kept individually for a process before it is traced; they are needed for its GVL data.
const MAX_WAITING: usize = 1 << 14;

/// A process with only pauses so far: a forked child that continues the sweep of its parent.
#[derive(Default)]
pub(super) struct Waiting {
    /// Sequence number of its last record.
    pub(super) seq: u64,
    /// Number of records that the kernel lost between the received ones.
    pub(super) lost: u64,
    /// Total length of its pauses, in nanoseconds.
    pub(super) ns: u64,
    /// Start and length of the first pauses, in nanoseconds.
    pub(super) pauses: Vec<(u64, u64)>,
    /// Whether `pauses` is incomplete.
    pub(super) cut: bool,
}

impl Waiting {
    /// A process whose last record had this sequence number.
    pub(super) fn after(seq: u64) -> Self {
        Self { seq, ..Self::default() }
    }

    /// Adds a pause that has ended.
    pub(super) fn pause(&mut self, event: &PauseEvent) {
        let ns = event.header.ts_ns.saturating_sub(event.begin_ns);
        self.lost += event.header.seq.saturating_sub(self.seq + 1);
        self.seq = event.header.seq;
        self.ns += ns;
        if self.pauses.len() < MAX_WAITING {
            self.pauses.push((event.begin_ns, ns));
        } else {
            self.cut = true;
        }
    }
}

/// What is read of a process that is about to be traced.
pub(super) struct Described {
    pub(super) process: Process,
    /// See [`proc::arguments_at`]; `None` if unknown.
    pub(super) arguments_at: Option<u64>,
    /// Its initial environment; `None` if unknown.
    pub(super) environment: Option<Arc<Environment>>,
}

impl Described {
    /// Reads it. `comm`: the name of its thread, if known.
    pub(super) fn read(pid: u32, comm: &str, image: &Arc<Image>, place: Container, clock: WallClock) -> Self {
        let environment = Environment::of(pid).map(Arc::new);
        let process = proc::describe(pid, comm, Arc::clone(image), place, environment.as_deref(), clock);
        // Read last: if the process executes another program meanwhile, this is that program's.
        Self { process, arguments_at: proc::arguments_at(pid), environment }
    }

    /// Corrects it for a process that still ran the program of its parent when it was seen. `comm`: as above.
    pub(super) fn forked_by(self, parent: &TracedProcess, comm: &str) -> Self {
        let Self { process, arguments_at, environment } = self;
        match (arguments_at, parent.arguments_at) {
            (Some(at), Some(of_parent)) if at == of_parent => {
                if environment.is_some() {
                    return Self { process, arguments_at, environment };
                }
                // A title has overwritten the environment that it has from its parent, either its own or, before the fork, the parent's.
                let environment = parent.environment.clone();
                let process = proc::with_environment(process, environment.as_deref());
                Self { process, arguments_at, environment }
            }
            (Some(_), None) => Self { process, arguments_at, environment },
            // What was read is of the program that the child runs by now, or the child is gone.
            _ => Self {
                process: parent.forked(process, comm),
                arguments_at: parent.arguments_at,
                environment: parent.environment.clone(),
            },
        }
    }
}

/// A traced process.
pub(super) struct TracedProcess {
    pub(super) process: Process,
    pub(super) image: Arc<KnownImage>,
    pub(super) fold: CycleFold,
    pub(super) memory: Option<MemoryReader>,
    /// See [`proc::arguments_at`]; `None` if unknown.
    pub(super) arguments_at: Option<u64>,
    /// Its initial environment; `None` if unknown.
    pub(super) environment: Option<Arc<Environment>>,
    /// When it was last read how its memory is shared.
    pub(super) shares_read: Option<Instant>,
    /// Number of consecutive cycle starts outside any pause.
    pub(super) starts_outside: u32,
    /// Whether a cycle was not reported because it started outside any pause.
    pub(super) has_unreported: bool,
    pub(super) cycles: u64,
    pub(super) lost: u64,
    /// Time of its last GC record, in monotonic nanoseconds; 0: none so far.
    pub(super) last_ns: u64,
    /// Number of its GC records up to which missing ones are lost, as far as its requests have waited for them.
    pub(super) given_up: u64,
    /// Since when it is traced, in monotonic nanoseconds.
    pub(super) since_ns: u64,
    /// Time of the record, or of the read of its memory, by which it was first seen.
    pub(super) seen_ns: u64,
    /// When its program started by an exec, in nanoseconds: known at its end, if the exec was seen.
    pub(super) begun_ns: Option<u64>,
    /// Its GC pauses since it is traced, if requests are traced.
    pub(super) pauses: GcTime,
    /// Whether it has served a request or run a job.
    pub(super) has_units: bool,
    /// Whether it has more endpoints than are distinguished.
    pub(super) has_other_endpoints: bool,
    /// Total length of its pauses outside any reported cycle, in nanoseconds.
    pub(super) outside_ns: u64,
    pub(super) beginning: Beginning,
}

impl TracedProcess {
    /// Describes a forked child of it until the child calls exec. `comm`: the name of the child's thread at that time, if known.
    fn forked(&self, child: Process, comm: &str) -> Process {
        let parent = self.process.clone();
        Process {
            comm: if comm.is_empty() { parent.comm } else { comm.to_owned() },
            cmdline: parent.cmdline,
            gc_env: parent.gc_env,
            gc_env_refused: parent.gc_env_refused,
            uid: parent.uid,
            hostname: parent.hostname,
            container: parent.container,
            origin: parent.origin,
            ..child
        }
    }

    /// Whether all of its cycles and pauses were reported; `before`: those before the first one. Unknown if cycles were missed, if records
    /// were lost, or if the probes do not show cycles.
    pub(super) fn has_all_cycles(&self, before: CyclesBefore) -> bool {
        before == CyclesBefore::Missed(0)
            && self.lost == 0
            && !self.has_unreported
            && self.image.reading.is_some()
    }

    /// Its current memory.
    pub(super) fn read_memory(&self) -> Option<Memory> {
        self.memory.as_ref().and_then(MemoryReader::read)
    }

    /// How its memory is shared; `None` if that was read less than [`SHARES_INTERVAL`] ago.
    pub(super) fn read_shares(&mut self) -> Option<Shares> {
        if self.shares_read.is_some_and(|read| read.elapsed() < SHARES_INTERVAL) {
            return None;
        }
        self.shares_read = Some(Instant::now());
        proc::shares(self.process.pid)
    }
}
