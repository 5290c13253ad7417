//! Turns what a recorder receives into chunks, and keeps them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ring::{Refusal, Ring};
use crate::{
    ledger::{Ledger, RecordingCounts},
    model::{Process, seen::Seen},
    trace_file::{
        chunk::{self, Kind},
        kinds::{encode::Filling, wire::What},
    },
};

/// Fills chunks, and keeps those of the last minutes where other threads can read them.
#[derive(Debug)]
pub(super) struct Store {
    filling: Filling,
    ring: Arc<Mutex<Ring>>,
    counts: RecordingCounts,
}

pub(super) fn lock(ring: &Mutex<Ring>) -> MutexGuard<'_, Ring> {
    ring.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Keeps entries that are not older than `keep_ns`, and at most `keep_bytes` compressed bytes.
    pub(super) fn new(keep_ns: u64, keep_bytes: u64, begun_ns: u64) -> Self {
        Self {
            filling: Filling::default(),
            ring: Arc::new(Mutex::new(Ring::new(keep_ns, keep_bytes, begun_ns))),
            counts: RecordingCounts::default(),
        }
    }

    /// What is kept.
    pub(super) fn ring(&self) -> MutexGuard<'_, Ring> {
        lock(&self.ring)
    }

    /// A handle for another thread.
    pub(super) fn shared(&self) -> Arc<Mutex<Ring>> {
        Arc::clone(&self.ring)
    }

    /// Whether everything received can be read from [`Store::ring`].
    pub(super) fn is_all_readable(&self) -> bool {
        self.filling.is_empty()
    }

    /// Closes the chunk if it is not empty.
    fn close(&mut self) {
        if self.filling.is_empty() {
            return;
        }
        let entries = self.filling.entries();
        match chunk::stored(Kind::Entries, &self.filling.take()) {
            Ok(chunk) => self.ring().push(Arc::from(chunk), entries),
            Err(error) => {
                self.counts.recorded_dropped += entries;
                log::warn!("a chunk that was to be kept: {error}");
            }
        }
    }

    fn pushed(&mut self) {
        if self.filling.is_full() {
            self.close();
        }
    }

    /// Adds something seen in a process.
    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        self.counts.recorded += 1;
        match seen {
            Seen::Process { .. } => self.ring().came(process),
            Seen::Ended(_) => self.ring().went(process.pid),
            _ => {}
        }
        self.filling.see(process, seen);
        self.pushed();
    }

    /// Adds a process or image that is not traced.
    pub(super) fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) {
        self.counts.recorded += 1;
        self.ring().refused(Refusal { pid, path: Arc::from(path), reason: Arc::from(reason) });
        self.filling.refused(pid, path, reason);
        self.pushed();
    }

    /// Everything is traced from this time on.
    pub(super) fn began(&mut self, ts_ns: u64) {
        self.ring().began();
        self.push(What::Began(ts_ns));
    }

    /// Adds an entry that belongs to no process.
    pub(super) fn push(&mut self, what: What) {
        self.counts.recorded += 1;
        self.filling.push(None, what);
        self.pushed();
    }

    /// Adds an account, the last one of the run if `last`: everything before it can be read from now on, and what is too old is dropped.
    pub(super) fn account(&mut self, ledger: &Ledger, now_ns: u64, last: bool) {
        let account = Box::new(self.filling.account(ledger));
        self.push(if last { What::Finished(account) } else { What::Account(account) });
        self.close();
        self.ring().account(now_ns);
    }

    /// Adds the counters of what was handed over.
    pub(super) fn add_counts(&self, of: &mut RecordingCounts) {
        let ring = self.ring();
        let dropped = ring.dropped();
        of.add(&self.counts);
        of.recorded_waiting += self.filling.entries();
        of.recorded_kept += ring.entries();
        of.recorded_expired += dropped.expired;
        of.recorded_displaced += dropped.displaced;
    }
}
