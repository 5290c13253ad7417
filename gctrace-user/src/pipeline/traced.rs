//! What the pipeline keeps of a process that is traced.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::event::PauseEvent;

use super::before::Beginning;
use crate::{
    aggregate::gc_cycle::CycleFold,
    host::proc::{self, MemoryReader},
    images::KnownImage,
    model::{Memory, Process, Shares, request::GcTime},
};

/// How memory is shared is read at most this often of a process.
const SHARES_INTERVAL: Duration = Duration::from_secs(1);

/// Pauses that are kept one by one of a process before it is traced, for what is known of its GVL.
const MAX_WAITING: usize = 1 << 14;

/// A process of which only pauses came so far: a forked child that goes on with the sweep of its parent.
#[derive(Default)]
pub(super) struct Waiting {
    /// Number of its last record.
    pub(super) seq: u64,
    /// Records that the kernel lost between those.
    pub(super) lost: u64,
    /// The length of its pauses, nanoseconds.
    pub(super) ns: u64,
    /// Begin and length of the first ones, nanoseconds.
    pub(super) pauses: Vec<(u64, u64)>,
    /// Whether these are not all.
    pub(super) cut: bool,
}

impl Waiting {
    /// One whose last record had this number.
    pub(super) fn after(seq: u64) -> Self {
        Self { seq, ..Self::default() }
    }

    /// A pause has ended.
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

/// A process that is traced.
pub(super) struct TracedProcess {
    pub(super) process: Process,
    pub(super) image: Arc<KnownImage>,
    pub(super) fold: CycleFold,
    pub(super) memory: Option<MemoryReader>,
    /// See [`proc::arguments_at`]; `None` where that is not known.
    pub(super) arguments_at: Option<u64>,
    /// When it was last read how its memory is shared.
    pub(super) shares_read: Option<Instant>,
    /// Starts in a row outside any pause.
    pub(super) starts_outside: u32,
    pub(super) cycles: u64,
    pub(super) lost: u64,
    /// Time of its last GC record, monotonic nanoseconds; 0: none so far.
    pub(super) last_ns: u64,
    /// Since when it is traced, monotonic nanoseconds.
    pub(super) since_ns: u64,
    /// Time of the record, or of the look at its memory, by which it was first seen.
    pub(super) seen_ns: u64,
    /// When its program began by an exec, nanoseconds: known at its end, where requests are watched and the exec was seen.
    pub(super) begun_ns: Option<u64>,
    /// Its GC pauses since it is traced, if requests are watched.
    pub(super) pauses: GcTime,
    /// Whether it has served a request or run a job.
    pub(super) has_units: bool,
    /// Whether it has more endpoints than are kept apart.
    pub(super) has_other_endpoints: bool,
    /// Its pauses outside any reported cycle.
    pub(super) outside_ns: u64,
    pub(super) beginning: Beginning,
}

impl TracedProcess {
    /// What a forked child of it is until it becomes another program. `comm`: its thread's name at that time, where it is known.
    pub(super) fn forked(&self, child: Process, comm: &str) -> Process {
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

    /// Its memory at this moment.
    pub(super) fn read_memory(&self) -> Option<Memory> {
        self.memory.as_ref().and_then(MemoryReader::read)
    }

    /// How its memory is shared, if that was not read just before.
    pub(super) fn read_shares(&mut self) -> Option<Shares> {
        if self.shares_read.is_some_and(|read| read.elapsed() < SHARES_INTERVAL) {
            return None;
        }
        self.shares_read = Some(Instant::now());
        proc::shares(self.process.pid)
    }
}
