//! Writing what is kept to a new file.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use prost::Message as _;

use super::{Why, ring::Kept};
use crate::{
    console::say,
    export::{ExportError, write_new},
    model::{Process, seen::Seen, stack::StackSample},
    trace_file::{
        Dump, Header, Invalid,
        chunk::{self, Kind},
        kinds::{
            Owned,
            decode::{self, Known, Recorded},
            encode::Filling,
            wire::{self, What},
        },
    },
    words::{data_size, span, utc},
};

/// The usual extension of recordings.
const EXTENSION: &str = "gctrace";
/// A recording is readable only by its owner: it contains command lines.
const MODE: u32 = 0o600;

/// Where files are written, and what they start with.
#[derive(Clone, Debug)]
pub(super) struct Target {
    path: PathBuf,
    header: Header,
}

/// Chunks of a file in addition to the kept ones: the state at their start, and the times that have not ended at their end.
#[derive(Default)]
struct Carried {
    filling: Filling,
    chunks: Vec<Vec<u8>>,
    entries: u64,
}

impl Carried {
    /// Counts an added entry.
    fn pushed(&mut self) -> io::Result<()> {
        self.entries += 1;
        if self.filling.is_full() { self.close() } else { Ok(()) }
    }

    fn close(&mut self) -> io::Result<()> {
        if !self.filling.is_empty() {
            self.chunks.push(chunk::stored(Kind::Entries, &self.filling.take())?);
        }
        Ok(())
    }

    fn of(kept: &Kept) -> io::Result<Self> {
        let mut carried = Self::default();
        if kept.had_begun {
            carried.filling.push(None, What::Began(kept.from_ns));
            carried.pushed()?;
        }
        for process in &kept.processes {
            carried
                .filling
                .see(process, Seen::Process { state: None, now_ns: kept.from_ns, since_ns: kept.from_ns });
            carried.pushed()?;
        }
        for refusal in &kept.refusals {
            carried.filling.refused(refusal.pid, &refusal.path, &refusal.reason);
            carried.pushed()?;
        }
        if let Some(before) = &kept.before {
            carried.sums(kept, before)?;
        }
        carried.close()?;
        Ok(carried)
    }

    /// Times that have not ended, if a part of each lies in what is kept. They have their real start, as finished times
    /// do: readers take the part that lies in the recording.
    fn open(kept: &Kept, open: &[(Process, StackSample)]) -> io::Result<Self> {
        let mut carried = Self::default();
        for (process, sample) in open {
            let end_ns = sample.ts_ns.saturating_add(sample.wall_ns);
            if kept.from_ns < end_ns {
                carried.filling.see(process, Seen::Stack(sample));
                carried.pushed()?;
            }
        }
        carried.close()?;
        Ok(carried)
    }

    /// The counters at the start.
    fn sums(&mut self, kept: &Kept, before: &[u8]) -> io::Result<()> {
        let unreadable =
            |Invalid { why, .. }| io::Error::other(format!("a chunk that was kept cannot be read: {why}"));
        let content =
            chunk::entries_of(before).ok_or_else(|| unreadable(Invalid::new("it is damaged".to_owned())))?;
        let (tables, entries) = decode::chunk(&content, &mut Known::default()).map_err(unreadable)?;
        let there: HashSet<u32> = kept.processes.iter().map(|process| process.pid).collect();
        for entry in &entries {
            if let Recorded::Seen(index, Owned::GvlSoFar(so_far)) = entry
                && let Some(process) = tables.process(*index)
                && there.contains(&process.pid)
            {
                self.filling.see(process, Seen::GvlSoFar(so_far));
                self.pushed()?;
            }
        }
        if let Some(Recorded::Account(ledger)) = entries.last() {
            let account = self.filling.account(ledger);
            self.filling.push(None, What::Account(Box::new(account)));
            self.pushed()?;
        }
        Ok(())
    }
}

/// A recording of what is kept, as consecutive parts, with the off-CPU times that have not ended.
pub(super) fn recording(
    kept: &Kept,
    open: &[(Process, StackSample)],
    header: Header,
    why: String,
    at_ns: u64,
) -> io::Result<Vec<Arc<[u8]>>> {
    let carried = Carried::of(kept)?;
    let open = Carried::open(kept, open)?;
    let dump = Dump { why, at_ns, from_ns: kept.from_ns, carried: carried.entries, open: open.entries };
    let header = Header { dump: Some(dump), ..header };
    let head = chunk::stored(Kind::Header, &wire::Header::of(&header).encode_to_vec())?;
    let beginning = [chunk::beginning(), head].into_iter().chain(carried.chunks).map(Arc::from);
    let end = Arc::from(chunk::stored(Kind::End, &[])?);
    let open = open.chunks.into_iter().map(Arc::from);
    Ok(beginning.chain(kept.chunks.iter().cloned()).chain(open).chain([end]).collect())
}

impl Target {
    pub(super) fn new(path: &Path, header: &Header) -> Self {
        Self { path: path.to_owned(), header: header.clone() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what is kept to a new file, completely or not at all, and reports it.
    pub(super) fn write(
        &self,
        kept: &Kept,
        open: &[(Process, StackSample)],
        why: Why,
        (at_ns, until_ns): (u64, u64),
    ) -> Result<(), ExportError> {
        let (dir, stem) = self.named(&why, at_ns);
        let Why { text: why, .. } = why;
        let said = why.clone();
        let mut bytes = 0;
        // Times in the file are relative to its start.
        let header = Header { begun_ns: kept.from_ns, ..self.header.clone() };
        let written = recording(kept, open, header, why, at_ns).and_then(|parts| {
            write_new(&dir, &stem, &format!(".{EXTENSION}"), MODE, |out| {
                for part in &parts {
                    bytes += part.len() as u64;
                    out.write_all(part)?;
                }
                Ok(())
            })
        });
        let path = written.map_err(|source| {
            let path = dir.join(format!("{stem}.{EXTENSION}"));
            ExportError::File { path, source }
        })?;
        let short = if kept.is_short { ", less than --keep because of --keep-size" } else { "" };
        say(&format!(
            "gctrace: wrote {} ({}, the last {}{short}): {said}",
            path.display(),
            data_size(bytes),
            span(until_ns.saturating_sub(kept.from_ns)),
        ));
        Ok(())
    }

    /// The directory of a file, and its name without extension.
    fn named(&self, why: &Why, at_ns: u64) -> (PathBuf, String) {
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        let stem =
            file.strip_suffix(&format!(".{EXTENSION}")).filter(|stem| !stem.is_empty()).unwrap_or(&file);
        let dir = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let at = utc(self.header.clock.epoch_nanos(at_ns).div_euclid(1_000_000_000)).replace(['-', ':'], "");
        (dir.to_owned(), format!("{stem}-{at}-{}", why.name))
    }
}
