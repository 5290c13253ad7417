//! The exporter that writes a recording.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io,
    os::{
        fd::AsFd as _,
        unix::fs::{FileExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use prost::Message as _;

use super::{
    CHUNK_NS, Header,
    chunk::{self, Kind},
    encode::{self, Filling},
    wire::{self, What},
};
use crate::{
    export::{ExportError, Exporter, check_path, give_to_owner},
    ledger::{Ledger, RecordingCounts, UserCounts},
    model::{Process, gvl::GvlGap, seen::Seen},
};

/// Writes everything that exporters are handed to a file, chunk by chunk. When it fails, the file keeps its whole chunks, and nothing
/// more is written to it.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    file: File,
    /// Bytes of whole chunks in the file.
    written: u64,
    filling: Filling,
    /// When the chunk was begun, `CLOCK_MONOTONIC` nanoseconds.
    begun_ns: Option<u64>,
    failed: bool,
    counts: RecordingCounts,
}

impl Recorder {
    /// Begins a recording. An existing file is emptied, and locked (`flock`) until the recording ends; only its owner can read a new one, because command lines are in it.
    ///
    /// # Errors
    ///
    /// The file cannot be made or written, or another recording is written to it.
    pub fn create(path: &Path, header: &Header) -> Result<Self, ExportError> {
        check_path(path)?;
        let unwritable = |source| ExportError::Unwritable { path: path.to_owned(), source };
        let is_new = !path.exists();
        // Emptied once it is certain that nobody else records to it.
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(unwritable)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(unwritable(io::Error::other("another gctrace records to it; name another file")));
            }
            // Some network file systems have no locks.
            Ok(()) | Err(TryLockError::Error(_)) => file.set_len(0).map_err(unwritable)?,
        }
        if is_new {
            give_to_owner(file.as_fd());
        }
        let (path, filling) = (path.to_owned(), Filling::default());
        let mut recorder = Self {
            path,
            file,
            written: 0,
            filling,
            begun_ns: None,
            failed: false,
            counts: RecordingCounts::default(),
        };
        let begun = chunk::stored(Kind::Header, &wire::Header::of(header).encode_to_vec())
            .and_then(|head| recorder.append(&[chunk::beginning(), head].concat()));
        begun.map_err(|source| ExportError::Unwritable { path: recorder.path.clone(), source })?;
        Ok(recorder)
    }

    /// Adds whole chunks to the file.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.written)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Closes the chunk.
    fn close(&mut self) -> Result<(), ExportError> {
        if self.failed || self.filling.is_empty() {
            return Ok(());
        }
        self.begun_ns = None;
        let entries = self.filling.entries();
        let content = self.filling.take();
        let stored = self.store(Kind::Entries, &content);
        let counts = &mut self.counts;
        let to = if stored.is_ok() { &mut counts.recorded_written } else { &mut counts.recorded_dropped };
        *to += entries;
        stored
    }

    fn store(&mut self, kind: Kind, content: &[u8]) -> Result<(), ExportError> {
        let Err(source) = chunk::stored(kind, content).and_then(|bytes| self.append(&bytes)) else {
            return Ok(());
        };
        self.failed = true;
        // Readers stop at a part of a chunk anyway.
        if let Err(error) = self.file.set_len(self.written) {
            log::warn!("{}: removing a part of a chunk: {error}", self.path.display());
        }
        Err(ExportError::Recording { path: self.path.clone(), source })
    }

    /// Whether nothing more is written, which is counted.
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

    /// Adds an entry of a call that cannot fail. An error is reported when the next chunk is closed.
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
        self.filling.see(process, seen);
        self.pushed()
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        counts.recording.add(&self.counts);
        counts.recording.recorded_waiting += self.filling.entries();
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        if self.drops() {
            return Ok(());
        }
        self.filling.refused(pid, path, reason);
        self.pushed()
    }

    fn began(&mut self, ts_ns: u64) {
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
        if now_ns.saturating_sub(begun_ns) >= CHUNK_NS { self.close() } else { Ok(()) }
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
        self.store(Kind::End, &[])?;
        let size = crate::words::file_size(self.written);
        crate::console::say(&format!(
            "gctrace: recorded {path} ({size}): gctrace report {path}",
            path = self.path.display()
        ));
        Ok(())
    }
}
