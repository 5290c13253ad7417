//! The exporter that writes a recording.

use std::{
    fs::File,
    io::{self, IsTerminal as _},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use prost::Message as _;

use super::{
    CHUNK_NS, Header,
    chunk::{self, Kind},
    destination::{Blocking, Destination, Disturbed, Stream},
    kinds::{
        encode::{self, Filling},
        wire::{self, What},
    },
};
use crate::{
    console::say,
    export::{ExportError, Exporter},
    ledger::{Ledger, RecordingCounts, UserCounts},
    model::{Process, gvl::GvlGap, seen::Seen},
};

/// Writes everything that exporters receive, chunk by chunk. If writing fails, the recording keeps its whole chunks,
/// and nothing more is written to it.
#[derive(Debug)]
pub struct Recorder {
    /// The file; `-` for standard output.
    path: PathBuf,
    to: Destination,
    filling: Filling,
    /// When the chunk was started, `CLOCK_MONOTONIC` nanoseconds.
    begun_ns: Option<u64>,
    failed: bool,
    /// Whether there is something to record: counters and times alone do not count.
    heard: bool,
    /// Size at which the run is to end, bytes.
    most: Option<u64>,
    /// Number of all entries, and of those dropped after a failure. The number written is known by `to`.
    counts: RecordingCounts,
}

impl Recorder {
    /// Starts a recording in a file. Its previous content is replaced when there is something to record, or at the end.
    ///
    /// # Errors
    ///
    /// The file cannot be created or written, or another recording is being written to it.
    pub fn create(path: &Path, header: &Header) -> Result<Self, ExportError> {
        Self::begin(path, Destination::file(path)?, header)
    }

    /// Starts a recording on standard output.
    ///
    /// # Errors
    ///
    /// It is a terminal, or cannot be written.
    pub fn to_stdout(header: &Header) -> Result<Self, ExportError> {
        let path = Path::new("-");
        let unwritable = |source| ExportError::Unwritable { path: path.to_owned(), source };
        let out = io::stdout();
        if out.is_terminal() {
            let why = "it is a terminal, and a recording is not text";
            return Err(unwritable(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        // Rust's own standard output is line-buffered.
        let out = out.as_fd().try_clone_to_owned().map_err(unwritable)?;
        let stream = Stream::to(Blocking(File::from(out))).map_err(ExportError::Thread)?;
        Self::begin(path, Destination::Stream(stream), header)
    }

    /// Asks for the end of the run when the recording reaches this size in bytes.
    #[must_use]
    pub fn until(self, most: Option<u64>) -> Self {
        Self { most, ..self }
    }

    pub(super) fn begin(path: &Path, to: Destination, header: &Header) -> Result<Self, ExportError> {
        let (path, filling, counts) = (path.to_owned(), Filling::default(), RecordingCounts::default());
        let mut recorder =
            Self { path, to, filling, begun_ns: None, failed: false, heard: false, most: None, counts };
        let begun = chunk::stored(Kind::Header, &wire::Header::of(header).encode_to_vec())
            .and_then(|head| recorder.to.begin([chunk::beginning(), head].concat()));
        begun.map_err(|source| ExportError::Unwritable { path: recorder.path.clone(), source })?;
        Ok(recorder)
    }

    /// Closes the chunk.
    fn close(&mut self) -> Result<(), ExportError> {
        if self.failed || self.filling.is_empty() {
            return Ok(());
        }
        self.begun_ns = None;
        let entries = self.filling.entries();
        let content = self.filling.take();
        self.store(Kind::Entries, &content, entries).inspect_err(|_| self.counts.recorded_dropped += entries)
    }

    fn store(&mut self, kind: Kind, content: &[u8], entries: u64) -> Result<(), ExportError> {
        let stored = chunk::stored(kind, content).and_then(|bytes| self.to.append(bytes, entries));
        stored.map_err(|source| self.fails(source))
    }

    /// Handles an error: nothing more is written.
    fn fails(&mut self, source: io::Error) -> ExportError {
        self.failed = true;
        if let Some(what) = source.get_ref().and_then(|inner| inner.downcast_ref::<Disturbed>()) {
            return ExportError::Disturbed { path: self.path.clone(), what: what.to_string() };
        }
        if let Err(error) = self.to.undo() {
            log::warn!("{}: removing a part of a chunk: {error}", self.path.display());
        }
        match (&self.to, source.kind()) {
            (Destination::Stream(_), io::ErrorKind::BrokenPipe) => {
                say("gctrace: the reader of the recording has closed it: nothing more is recorded");
                ExportError::Stdout(source)
            }
            _ => ExportError::Recording { path: self.path.clone(), source },
        }
    }

    /// Counts an entry. Returns whether it is dropped because nothing more is written.
    fn drops(&mut self) -> bool {
        self.counts.recorded += 1;
        self.counts.recorded_dropped += u64::from(self.failed);
        self.failed
    }

    fn push(&mut self, what: What) -> Result<(), ExportError> {
        self.filling.push(None, what);
        self.pushed()
    }

    /// Closes the chunk if it is full.
    fn pushed(&mut self) -> Result<(), ExportError> {
        if self.filling.is_full() { self.close() } else { Ok(()) }
    }

    /// Adds an entry in a call that cannot fail. An error is reported when the next chunk is closed.
    fn push_quietly(&mut self, what: What) {
        if !self.drops() {
            self.filling.push(None, what);
        }
    }
}

impl Exporter for Recorder {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if self.drops() {
            return Ok(());
        }
        self.heard = true;
        self.filling.see(process, seen);
        self.pushed()
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        let written = self.to.written_entries();
        let unread = self.to.added().entries - written;
        // After a failure, entries in flight are not read by anybody.
        let (waiting, dropped) = if self.failed { (0, unread) } else { (unread, 0) };
        counts.recording.add(&self.counts);
        counts.recording.recorded_written += written;
        counts.recording.recorded_waiting += self.filling.entries() + waiting;
        counts.recording.recorded_dropped += dropped;
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        if self.drops() {
            return Ok(());
        }
        self.heard = true;
        self.filling.refused(pid, path, reason);
        self.pushed()
    }

    fn began(&mut self, ts_ns: u64) {
        self.heard = true;
        self.push_quietly(What::Began(ts_ns));
    }

    fn closed(&mut self, ts_ns: u64) {
        self.push_quietly(What::Closed(ts_ns));
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        self.push_quietly(What::GvlGap(Box::new(encode::gap(gap))));
    }

    fn account(&mut self, ledger: &Ledger) {
        let account = self.filling.account(ledger);
        self.push_quietly(What::Account(Box::new(account)));
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        if self.drops() {
            return Ok(());
        }
        self.push(What::Flushed(now_ns))?;
        let begun_ns = *self.begun_ns.get_or_insert(now_ns);
        // A slow startup must not replace an older recording.
        let waits = !self.heard && self.to.keeps_older();
        if !waits && now_ns.saturating_sub(begun_ns) >= CHUNK_NS { self.close() } else { Ok(()) }
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        if self.drops() {
            return Ok(());
        }
        let account = self.filling.account(ledger);
        self.push(What::Finished(Box::new(account)))?;
        self.close()
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        if self.drops() {
            return Ok(());
        }
        let account = self.filling.account(ledger);
        self.push(What::Settled(Box::new(account)))?;
        self.close()?;
        self.store(Kind::End, &[], 0)?;
        self.to.finish().map_err(|source| self.fails(source))?;
        let size = crate::words::data_size(self.to.added().bytes);
        let size = if self.is_full() { format!("{size}, ended by --max-size") } else { size };
        let path = self.path.display();
        say(&match self.to {
            Destination::File(..) => format!("gctrace: recorded {path} ({size}): gctrace report {path}"),
            Destination::Stream(_) => format!("gctrace: recorded to standard output ({size})"),
        });
        Ok(())
    }

    fn is_full(&self) -> bool {
        // A stream without a reader is useless; a file keeps what was written before.
        let lost = self.failed && matches!(self.to, Destination::Stream(_));
        lost || self.most.is_some_and(|most| self.to.added().bytes >= most)
    }
}
