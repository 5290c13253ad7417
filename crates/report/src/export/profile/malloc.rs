//! The profile of a window of `gctrace malloc`: memory requested outside of the Ruby heap, and the part still
//! allocated at the end, by stack.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use super::{Context, Format, flamegraph, folded, pprof, top_lines};
use crate::{
    aggregate::{
        estimate::CallsAndBytes,
        recording::{Filter, Limits, MallocCall, MallocKey, Recording},
    },
    clock::WallClock,
    console::say,
    export::{ExportError, VERSION, file},
    ledger::Ledger,
    model::{
        Process,
        seen::{Observer as _, Seen},
    },
    words::data_size,
};

/// Estimates by stack, and how to write them.
#[derive(Debug)]
pub struct MallocProfile {
    recording: Recording,
    clock: WallClock,
    period: u64,
}

impl MallocProfile {
    /// A profile that starts at `began_ns` (`CLOCK_MONOTONIC`), with one stack per `period` bytes on average.
    pub fn new(clock: WallClock, began_ns: u64, period: u64) -> Self {
        let mut recording = Recording::new(false, Limits::default(), Filter::default());
        recording.began_ns = Some(began_ns);
        Self { recording, clock, period }
    }

    /// Adds a process whose calls are counted from `now_ns` (`CLOCK_MONOTONIC`) on.
    pub fn add(&mut self, process: &Process, now_ns: u64) {
        self.recording.see(process, Seen::Process { state: None, now_ns, since_ns: now_ns });
    }

    /// Drops what was added for a process.
    pub fn forget(&mut self, pid: u32) {
        let mut mallocs = std::mem::take(&mut self.recording.mallocs);
        mallocs.retain(|key, _| self.recording.thread_facts(key.thread).1.pid != pid);
        self.recording.mallocs = mallocs;
    }

    /// Adds a call whose stack was taken. Returns the key under which it is kept.
    pub fn asked(&mut self, process: &Process, call: &MallocCall<'_>) -> MallocKey {
        self.recording.malloc(process, call)
    }

    /// Adds memory of such a call that is still allocated at the end. `key` is `None` if its stack is unknown; `memory` is
    /// `(bytes, probability)`.
    pub fn left(&mut self, process: &Process, key: Option<MallocKey>, ts_ns: u64, memory: (u64, f64)) {
        self.recording.malloc_left(process, key, ts_ns, memory);
    }

    /// Ends the window. Nothing can be added after this.
    pub fn close(&mut self, ts_ns: u64) {
        self.recording.closed_ns = Some(ts_ns);
    }

    /// The memory requested, and the memory still allocated, over all stacks.
    pub fn totals(&self) -> [CallsAndBytes; 2] {
        let mut totals = [CallsAndBytes::default(); 2];
        for sum in self.recording.mallocs.values() {
            for (total, part) in totals.iter_mut().zip([sum.asked, sum.left]) {
                total.taken += part.taken;
                for (to, from) in [(&mut total.calls, part.calls), (&mut total.bytes, part.bytes)] {
                    to.sum += from.sum;
                    to.variance += from.variance;
                }
            }
        }
        totals
    }

    /// Writes files: [`Format::Pprof`], and [`Format::Folded`] and [`Format::FlameGraph`] of
    /// [`Measure::Malloc`](super::Measure::Malloc) or [`Measure::MallocLive`](super::Measure::MallocLive).
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    pub fn write_files(&self, files: &[(PathBuf, Format)]) -> Result<(), ExportError> {
        for (path, format) in files {
            file::write_atomically(path, |out| self.write(*format, out))
                .map_err(|source| ExportError::File { path: path.clone(), source })?;
            let shown = path.display();
            let size = std::fs::metadata(path)
                .map_or_else(|_| String::new(), |file| format!(" ({})", data_size(file.len())));
            say(&format!("gctrace: wrote {shown}{size}: {}", format.opened_with(&shown)));
        }
        Ok(())
    }

    pub(super) fn write(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        let Self { recording, clock, period, .. } = self;
        let (began_ns, ended_ns) = recording.span(0);
        let said = format!(
            "gctrace {VERSION}: memory asked of malloc, estimated from {}",
            crate::words::plural(self.totals()[0].taken, "stack")
        );
        match format {
            Format::Pprof => {
                let span = (began_ns, ended_ns);
                pprof::malloc::write(recording, &said, (*clock, span), *period, out)
            }
            Format::Folded(graph) => folded::write(recording, graph, out),
            Format::TopLines(of) => top_lines::write(recording, of, out),
            Format::FlameGraph(graph) => {
                let ledger = &Ledger::default();
                let context = Context {
                    ledger,
                    clock: *clock,
                    began_ns,
                    ended_ns,
                    gvl: false,
                    wall: false,
                    filtered: None,
                    said: Some(said),
                };
                flamegraph::write(recording, graph, &context, out)
            }
            Format::Callgrind | Format::Speedscope | Format::Firefox | Format::Perfetto => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "this format cannot show malloc memory"))
            }
        }
    }
}
