//! A run that is recorded in memory and read while it is in progress: only its last minutes, as a flight recorder
//! keeps them. Nothing is written to disk.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    dump,
    ring::Ring,
    store::{Store, lock},
};
use crate::{
    export::{ExportError, Exporter},
    ledger::{Ledger, UserCounts},
    model::{
        Process,
        gvl::GvlGap,
        seen::Seen,
        stack::{StackSample, ThreadState},
    },
    trace_file::{
        Header,
        kinds::{encode, wire::What},
    },
};

/// The reason for such a recording, in its header.
const WHY: &str = "live view of a run in progress";

/// The exporter that keeps the recording.
#[derive(Debug)]
pub struct LiveRecorder {
    store: Store,
    /// Time of the last flush, `CLOCK_MONOTONIC` nanoseconds.
    now_ns: u64,
    open: Arc<Mutex<Open>>,
    /// The value of `open` from the next account on.
    next_open: Option<Open>,
    /// Threads whose times have ended and been handed over, but are in a chunk that cannot be read yet.
    over: Vec<(u32, u32)>,
    ended: Arc<AtomicBool>,
}

/// Times off the CPU that have not ended, by process and thread: one for each state of the thread in this time.
type Open = BTreeMap<(u32, u32), Vec<(Process, StackSample)>>;

/// Access to the recording from other threads.
#[derive(Clone, Debug)]
pub struct LiveRecording {
    ring: Arc<Mutex<Ring>>,
    open: Arc<Mutex<Open>>,
    header: Header,
    ended: Arc<AtomicBool>,
}

/// The progress of a run, and how much of it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveState {
    /// Changes whenever there is more to read: about once a second.
    pub number: u64,
    /// Start of the kept time, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// End of the kept time, `CLOCK_MONOTONIC` nanoseconds.
    pub until_ns: u64,
    /// Number of entries dropped because they were too old.
    pub expired: u64,
    /// Number of entries dropped because the size limit was exceeded.
    pub displaced: u64,
    /// Whether less than the configured time is kept because of the size limit.
    pub is_short: bool,
    /// Whether tracing has ended: nothing more will follow.
    pub ended: bool,
}

/// A recording of what is kept now, as consecutive parts.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The state at that time.
    pub state: LiveState,
    /// The bytes of the recording. Its chunks are shared with the recorder, not copied.
    pub parts: Vec<Arc<[u8]>>,
}

impl LiveRecorder {
    /// Keeps the last `keep_ns` nanoseconds of a run with this header, and at most `keep_bytes` compressed bytes.
    pub fn new(header: Header, keep_ns: u64, keep_bytes: u64) -> (Self, LiveRecording) {
        let store = Store::new(keep_ns, keep_bytes, header.begun_ns);
        let ended = Arc::<AtomicBool>::default();
        let open = Arc::<Mutex<Open>>::default();
        let now_ns = header.begun_ns;
        let recording = LiveRecording {
            ring: store.shared(),
            open: Arc::clone(&open),
            ended: Arc::clone(&ended),
            header,
        };
        (Self { store, now_ns, open, next_open: None, over: Vec::new(), ended }, recording)
    }

    /// Keeps something. A finished time becomes readable at the same moment at which its unfinished part is removed.
    fn keep(&mut self, keep: impl FnOnce(&mut Store)) {
        let mut open = lock_open(&self.open);
        keep(&mut self.store);
        if self.store.is_all_readable() {
            for thread in self.over.drain(..) {
                open.remove(&thread);
            }
        }
    }
}

impl LiveRecording {
    /// The header of the run.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The current state of the run.
    pub fn state(&self) -> LiveState {
        self.state_of(&lock(&self.ring))
    }

    fn state_of(&self, ring: &Ring) -> LiveState {
        let dropped = ring.dropped();
        let (from_ns, until_ns) = ring.times();
        LiveState {
            number: ring.now(),
            from_ns,
            until_ns,
            expired: dropped.expired,
            displaced: dropped.displaced,
            is_short: ring.is_short(),
            ended: self.ended.load(Ordering::Acquire),
        }
    }

    /// What is kept, as a recording whose times are those of the whole run.
    ///
    /// # Errors
    ///
    /// What is kept cannot be compressed, or what was compressed cannot be read.
    pub fn snapshot(&self) -> io::Result<Snapshot> {
        let (state, kept, open) = {
            // Held until both are taken: a finished time is in at most one of them.
            let open = lock_open(&self.open);
            let ring = lock(&self.ring);
            (self.state_of(&ring), ring.kept(), open.values().flatten().cloned().collect::<Vec<_>>())
        };
        let parts = dump::recording(&kept, &open, self.header.clone(), WHY.to_owned(), state.until_ns)?;
        Ok(Snapshot { state, parts })
    }
}

fn lock_open(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exporter for LiveRecorder {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if let Seen::Stack(sample) = seen
            && sample.state != ThreadState::Running
        {
            self.over.push((process.pid, sample.tid));
        }
        self.keep(|store| store.see(process, seen));
        Ok(())
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        self.store.add_counts(&mut counts.recording);
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        self.keep(|store| store.refused(pid, path, reason));
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.keep(|store| store.began(ts_ns));
    }

    fn closed(&mut self, ts_ns: u64) {
        self.keep(|store| store.push(What::Closed(ts_ns)));
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        self.keep(|store| store.push(What::GvlGap(Box::new(encode::gap(gap)))));
    }

    /// The recording may be read at any moment. The stack of a thread is read once per sleep.
    fn account_follows(&mut self) -> bool {
        true
    }

    fn off_cpu_so_far(&mut self, open: &[(Process, StackSample)]) {
        let mut by_thread = Open::new();
        for (process, sample) in open {
            let of = by_thread.entry((process.pid, sample.tid)).or_default();
            of.push((process.clone(), sample.clone()));
        }
        self.next_open = Some(by_thread);
    }

    fn account(&mut self, ledger: &Ledger) {
        let mut open = lock_open(&self.open);
        self.store.account(ledger, self.now_ns, false);
        *open = self.next_open.take().unwrap_or_default();
        self.over.clear();
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.now_ns = self.now_ns.max(now_ns);
        self.keep(|store| store.push(What::Flushed(now_ns)));
        Ok(())
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        let mut open = lock_open(&self.open);
        self.store.account(ledger, self.now_ns, true);
        // Unfinished times have been handed over up to the end.
        open.clear();
        drop(open);
        self.ended.store(true, Ordering::Release);
        Ok(())
    }
}
