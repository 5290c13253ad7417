//! What became of memory that a process shared with others since a fork: copy-on-write damage, by part.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{
    account, count,
    diff::{Reader, flushed},
    failure::HeapFailure,
    jsonl,
    memory::{PARTS, Places},
    retried,
    target::Target,
    text::share,
};
use crate::{
    cli::{By, Format, HeapSettings},
    console::say,
    host::sharing::{Now, SharedPages, SharingError},
    words::{data_size, plural},
};

/// What became of shared memory; bytes. `before` is the sum of the other four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fate {
    before: u64,
    private: u64,
    shared: u64,
    swapped: u64,
    gone: u64,
}

/// What became of it between two times, in total and by part.
pub(super) struct Since {
    all: Fate,
    /// Bytes that are private and shared now, by the part that contains them now.
    parts: [(u64, u64); PARTS.len()],
    apart: Duration,
}

impl Since {
    /// Reads the state of the pages again.
    pub(super) fn look(pages: &mut SharedPages, places: &Places) -> Result<Self, SharingError> {
        let (size, before) = (pages.page(), pages.bytes());
        let mut since = Self {
            all: Fate { before, ..Fate::default() },
            parts: [(0, 0); PARTS.len()],
            apart: pages.at.elapsed(),
        };
        pages.again(|address, now| {
            let Self { all, parts, .. } = &mut since;
            let mut other = (0, 0);
            let part = places.part(address).map_or(&mut other, |part| &mut parts[part]);
            let sums = match now {
                Now::Private => [&mut all.private, &mut part.0],
                Now::Shared => [&mut all.shared, &mut part.1],
                Now::Swapped => [&mut all.swapped, &mut other.0],
                Now::Gone => [&mut all.gone, &mut other.0],
            };
            for sum in sums {
                *sum += size;
            }
        })?;
        Ok(since)
    }

    fn rows(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        let rows = PARTS.iter().zip(self.parts).map(|(name, (private, shared))| (*name, private, shared));
        rows.filter(|(_, private, shared)| private + shared > 0)
    }

    /// Writes a sentence and a table; `when` says when the memory was shared.
    pub(super) fn text(&self, out: &mut impl Write, when: &str) -> io::Result<()> {
        let Fate { before, private, shared, swapped, gone } = self.all;
        if before == 0 {
            return writeln!(out, "no memory was shared with other processes {when}");
        }
        write!(
            out,
            "of {} shared with other processes {when}, {} became private ({}), {} still shared",
            data_size(before),
            data_size(private),
            share(private, before),
            data_size(shared)
        )?;
        for (bytes, what) in [(swapped, "in swap"), (gone, "gone")] {
            if bytes > 0 {
                write!(out, ", {} {what}", data_size(bytes))?;
            }
        }
        writeln!(out, "\n{:>14}{:>14}  PART", "PRIVATE NOW", "SHARED STILL")?;
        for (name, private, shared) in self.rows() {
            writeln!(out, "{private:>14}{shared:>14}  {name}")?;
        }
        Ok(())
    }

    /// How long ago that was, and which collections ran meanwhile.
    fn when(&self, before: u64, after: u64) -> String {
        let apart = self.apart.as_secs_f64();
        match count::collections(before, after) {
            Some(collections) => format!("{apart:.1} s before ({collections} since)"),
            None => format!("{apart:.1} s before (no GC since)"),
        }
    }

    /// Number of bytes that were shared.
    pub(super) fn before(&self) -> u64 {
        self.all.before
    }

    /// How long ago that was.
    pub(super) fn ago(&self) -> Duration {
        self.apart
    }

    fn jsonl(&self, out: &mut impl Write, since: &'static str, pid: u32, gc: [u64; 2]) -> io::Result<()> {
        let Fate { before, private, shared, swapped, gone } = self.all;
        let line = Line::Sharing {
            pid,
            since,
            seconds: (self.apart.as_secs_f64() * 1e3).round() / 1e3,
            gc_count_before: gc[0],
            gc_count: gc[1],
            shared_before: before,
            became_private: private,
            shared,
            swapped,
            gone,
        };
        jsonl::line(out, &line)?;
        for (name, became_private, shared) in self.rows() {
            jsonl::line(out, &Line::SharingPart { pid, since, name, became_private, shared })?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line {
    Sharing {
        pid: u32,
        since: &'static str,
        seconds: f64,
        gc_count_before: u64,
        gc_count: u64,
        shared_before: u64,
        became_private: u64,
        shared: u64,
        swapped: u64,
        gone: u64,
    },
    SharingPart {
        pid: u32,
        since: &'static str,
        name: &'static str,
        became_private: u64,
        shared: u64,
    },
}

/// What is shared at one time, its location, and `GC.count` just before.
struct Look {
    pages: SharedPages,
    places: Places,
    gc_count: u64,
}

fn look(target: &Target) -> Result<Look, HeapFailure> {
    retried(HeapFailure::passes, || look_once(target))
}

fn gc_count(target: &Target) -> Result<u64, HeapFailure> {
    let state = target.state().map_err(|source| target.failure(source))?;
    Ok(target.plan.layout.count.read(&state.1).unwrap_or_default())
}

fn look_once(target: &Target) -> Result<Look, HeapFailure> {
    let counted = count::count(target, By::Memory).map_err(|source| target.failure(source))?;
    let places = account(target, &counted)?.places;
    let pages = SharedPages::read(target.pid, &places.mappings).map_err(|error| unknown(target, error))?;
    Ok(Look { pages, places, gc_count: counted.moment.gc_count[1] })
}

fn unknown(target: &Target, error: SharingError) -> HeapFailure {
    match error {
        _ if !target.is_there() => target.ended(),
        SharingError::Unreadable(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            HeapFailure::NotRuby {
                pid: target.pid,
                reason: "it has replaced its program".to_owned(),
                denied: false,
            }
        }
        SharingError::Unreadable(source) => {
            let denied = source.kind() == io::ErrorKind::PermissionDenied;
            HeapFailure::NotRuby {
                pid: target.pid,
                reason: format!("its page map cannot be read: {source}"),
                denied,
            }
        }
        error => HeapFailure::Sharing { pid: target.pid, source: error },
    }
}

/// Reads periodically, and reports how much of the shared memory became private, since the last time and since the first. Ends with
/// the process, or when the output is no longer read.
pub(super) fn watch(target: &Target, every: Duration, settings: &HeapSettings) -> Result<(), HeapFailure> {
    let mut began = Instant::now();
    let Look { pages: mut first, gc_count: first_gc, .. } = look(target)?;
    let shared = data_size(first.bytes());
    say(&format!(
        "gctrace: ready: pid {} shares {shared} with other processes, checked every {:.1} s",
        target.pid,
        every.as_secs_f64()
    ));
    let mut last: Option<(SharedPages, u64)> = None;
    let mut rounds = 1_u64;
    loop {
        std::thread::sleep(every.saturating_sub(began.elapsed()));
        began = Instant::now();
        let round = look(target).and_then(|now| {
            let failed = |error| unknown(target, error);
            let whole = Since::look(&mut first, &now.places).map_err(failed)?;
            let recent = last
                .as_mut()
                .map(|(pages, gc)| Since::look(pages, &now.places).map(|since| (since, *gc)).map_err(failed));
            Ok((now, whole, recent.transpose()?, gc_count(target)?))
        });
        let (now, whole, recent, gc) = match round {
            Ok(round) => round,
            // The regular end of a watch.
            Err(HeapFailure::NotRuby { .. }) if !target.is_there() && rounds > 1 => {
                say(&format!("gctrace: pid {} has ended; it was checked {rounds} times", target.pid));
                return Ok(());
            }
            Err(_) if target.is_replaced() => {
                let times = plural(rounds, "time");
                say(&format!("gctrace: pid {} has replaced its program; it was checked {times}", target.pid));
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        rounds += 1;
        let pid = target.pid;
        let mut out = io::stdout().lock();
        let written = match settings.format {
            Format::Jsonl => recent
                .map_or(Ok(()), |(since, before)| since.jsonl(&mut out, "last", pid, [before, gc]))
                .and_then(|()| whole.jsonl(&mut out, "first", pid, [first_gc, gc])),
            Format::Text => recent
                .map_or(Ok(()), |(since, before)| since.text(&mut out, &since.when(before, gc)))
                .and_then(|()| whole.text(&mut out, &whole.when(first_gc, gc)))
                .and_then(|()| writeln!(out)),
        };
        if flushed(written, &mut out)? == Reader::Gone {
            return Ok(());
        }
        last = Some((now.pages, now.gc_count));
    }
}
