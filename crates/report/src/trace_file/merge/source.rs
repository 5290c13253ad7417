//! One of the recordings being merged: its contents in batches, as outputs would receive them.

use std::{cell::RefCell, collections::VecDeque, path::Path, rc::Rc};

use super::pieces::{Piece, Reader};
use crate::{
    export::{ExportError, Exporter, Outputs},
    ledger::Ledger,
    model::{Process, gvl::GvlGap, seen::Seen},
    trace_file::{ReadError, Recording, kinds::Owned, replay::Replay},
};

/// A call that outputs receive.
pub(super) enum Event {
    Seen(Box<Process>, Owned),
    Refused(Option<u32>, String, String),
    Began(u64),
    Closed(u64),
    GvlGap(GvlGap),
    Account(Box<Ledger>),
    Flushed(u64),
}

/// Keeps the events that it receives.
#[derive(Clone, Default)]
struct Queue(Rc<RefCell<VecDeque<Event>>>);

impl Queue {
    fn push(&self, event: Event) {
        self.0.borrow_mut().push_back(event);
    }
}

impl Exporter for Queue {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.push(Event::Seen(Box::new(process.clone()), Owned::of(seen)));
        Ok(())
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        self.push(Event::Refused(pid, path.to_owned(), reason.to_owned()));
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.push(Event::Began(ts_ns));
    }

    fn closed(&mut self, ts_ns: u64) {
        self.push(Event::Closed(ts_ns));
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        self.push(Event::GvlGap(gap));
    }

    fn account(&mut self, ledger: &Ledger) {
        self.push(Event::Account(Box::new(ledger.clone())));
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.push(Event::Flushed(now_ns));
        Ok(())
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.push(Event::Account(Box::new(ledger.clone())));
        Ok(())
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.push(Event::Account(Box::new(ledger.clone())));
        Ok(())
    }
}

/// The events up to a flush of the outputs.
pub(super) struct Batch {
    /// The time of the flush, `CLOCK_MONOTONIC` nanoseconds of the recording.
    pub(super) at_ns: u64,
    pub(super) events: Vec<Event>,
}

/// Maximum number of events of a batch. Runs flush several times a second, but a file may contain anything.
const MOST: usize = 1 << 18;

/// A recording that is being read.
pub(super) struct Source {
    recording: Recording<Reader>,
    replay: Option<Replay<Box<Outputs>>>,
    queue: Queue,
    /// Number of events at the front of the queue that are known not to be flushes.
    scanned: usize,
    last_ns: u64,
}

impl Source {
    /// Opens a recording that consists of these pieces of files.
    pub(super) fn open(path: &Path, pieces: &[Piece]) -> Result<Self, ReadError> {
        let reader = Reader::open(pieces)?;
        let recording = Recording::read(reader, path)?;
        let queue = Queue::default();
        let outputs = Box::new(Outputs::new(vec![Box::new(queue.clone())]));
        let replay = Some(Replay::new(recording.header(), outputs));
        Ok(Self { recording, replay, queue, scanned: 0, last_ns: 0 })
    }

    /// The next batch; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Batch>, ReadError> {
        loop {
            let mut queue = self.queue.0.borrow_mut();
            let flushed =
                queue.iter().skip(self.scanned).position(|event| matches!(event, Event::Flushed(_)));
            let whole = flushed.map(|at| self.scanned + at);
            self.scanned = if whole.is_some() { 0 } else { queue.len() };
            if let Some(at) = whole.or_else(|| queue.len().checked_sub(1).filter(|_| queue.len() >= MOST)) {
                self.scanned = 0;
                let events: Vec<Event> = queue.drain(..=at).collect();
                if let Some(Event::Flushed(now_ns)) = events.last() {
                    self.last_ns = self.last_ns.max(*now_ns);
                }
                return Ok(Some(Batch { at_ns: self.last_ns, events }));
            }
            let Some(mut replay) = self.replay.take() else {
                self.scanned = 0;
                let events: Vec<Event> = queue.drain(..).collect();
                return Ok((!events.is_empty()).then_some(Batch { at_ns: self.last_ns, events }));
            };
            drop(queue);
            if replay.step(&mut self.recording)?.is_none() {
                self.replay = Some(replay);
                continue;
            }
            replay.finish();
            self.last_ns = self.last_ns.max(replay.last_ns);
        }
    }
}
