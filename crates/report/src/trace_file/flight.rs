//! The flight recorder: keeps the recording of the last minutes in memory, and writes it to a file when a trigger
//! fires or the user asks for it.
//!
//! Chunks are kept as in a file, encoded and compressed. They are in memory and not on disk: if nothing happens, nothing is written, nothing
//! has to be cleaned up after a kill, and the limit is one number. (A Ruby that crashes loses nothing: its recorder is another process.)

mod dump;
mod live;
mod ring;
mod store;
mod trigger;
mod watch;
mod window;

pub use live::{LiveRecorder, LiveRecording, LiveState, Snapshot};
pub use trigger::{Metric, Trigger};

use std::{io, path::Path, thread::JoinHandle};

use self::{dump::Target, store::Store, watch::Watch};
use super::{
    Header,
    kinds::{encode, wire::What},
};
use crate::{
    console::say,
    export::{ExportError, Exporter, check_path},
    ledger::{Ledger, RecordingCounts, UserCounts},
    model::{Process, gvl::GvlGap, seen::Seen, stack::StackSample},
    words::{plural, span},
};

/// What is kept, and when it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// How much time is kept, nanoseconds.
    pub ns: u64,
    /// How much data is kept, compressed bytes.
    pub bytes: u64,
    /// The conditions for writing a file.
    pub triggers: Vec<Trigger>,
    /// How long triggers write nothing after a trigger has fired, nanoseconds.
    pub cooldown_ns: u64,
    /// Maximum number of files written by triggers.
    pub most: u64,
}

/// A thread that is writing a file.
#[derive(Debug)]
struct Writing {
    thread: JoinHandle<Result<(), ExportError>>,
    by_trigger: bool,
}

/// The reason for writing a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Why {
    /// The word in the name of the file.
    name: &'static str,
    text: String,
    /// Whether a metric above its trigger's value is the reason; `false` for the user and for the end of the run.
    by_trigger: bool,
}

impl Why {
    /// A metric of a process exceeds the value of a trigger.
    fn above(trigger: Trigger, metric: Metric, value: u64, pid: u32, program: &str) -> Self {
        // Quantiles are known only to the resolution of a bucket.
        let least = if matches!(metric, Metric::GcPauseP99 | Metric::GvlWaitP99) { "at least " } else { "" };
        let text = format!("{trigger}: {least}{}, pid {pid} ({program})", metric.shown(value));
        Self { name: trigger.name(), text, by_trigger: true }
    }

    /// The user asked for it.
    fn asked() -> Self {
        Self { name: "SIGUSR2", text: "SIGUSR2".to_owned(), by_trigger: false }
    }

    /// The run has ended.
    fn end() -> Self {
        Self { name: Trigger::End.name(), text: "the run ended".to_owned(), by_trigger: false }
    }
}

/// What the first file is waiting for, in words.
pub(super) fn waits_for(triggers: &[Trigger]) -> String {
    let names: Vec<String> = triggers
        .iter()
        .map(|trigger| match trigger {
            Trigger::End => "the run ends".to_owned(),
            above @ Trigger::Above(..) => above.to_string(),
        })
        .collect();
    match names.as_slice() {
        [] => "no --dump-on: nothing is written by itself".to_owned(),
        names => format!("waits until {}", names.join(" or ")),
    }
}

/// Keeps everything that exporters receive for some time, and writes it to a file on request.
#[derive(Debug)]
pub struct FlightRecorder {
    keep: Keep,
    target: Target,
    store: Store,
    watch: Watch,
    /// Time of the last flush, `CLOCK_MONOTONIC` nanoseconds.
    now_ns: u64,
    /// Times off the CPU that have not ended.
    open: Vec<(Process, StackSample)>,
    /// The reason for a file to be written with the next account, and when it was requested.
    asked: Option<(Why, u64)>,
    /// When a trigger last caused a file to be written.
    triggered_ns: Option<u64>,
    /// Number of files caused by triggers.
    triggered: u64,
    /// Whether it was reported that triggers currently write nothing.
    has_said: bool,
    writing: Option<Writing>,
    /// An error that occurred where it cannot be returned.
    failed: Option<ExportError>,
    counts: RecordingCounts,
}

impl FlightRecorder {
    /// Keeps a recording with this header. The names of files are derived from `path`: nothing is written there before a trigger fires.
    ///
    /// # Errors
    ///
    /// No file can be created there.
    pub fn create(path: &Path, header: &Header, keep: Keep) -> Result<Self, ExportError> {
        check_path(path)?;
        Ok(Self {
            target: Target::new(path, header),
            store: Store::new(keep.ns, keep.bytes, header.begun_ns),
            watch: Watch::new(keep.triggers.clone()),
            keep,
            now_ns: header.begun_ns,
            open: Vec::new(),
            asked: None,
            triggered_ns: None,
            triggered: 0,
            has_said: false,
            writing: None,
            failed: None,
            counts: RecordingCounts::default(),
        })
    }

    /// The path from which names of files are derived.
    pub fn path(&self) -> &Path {
        self.target.path()
    }

    /// Handles triggers that have fired.
    fn fire(&mut self, fired: Vec<Why>) {
        for why in fired {
            self.counts.dump_requests += 1;
            let left_ns = self
                .triggered_ns
                .map_or(0, |before| (before + self.keep.cooldown_ns).saturating_sub(self.now_ns));
            if self.asked.is_none() && left_ns == 0 && self.triggered < self.keep.most {
                self.triggered_ns = Some(self.now_ns);
                self.triggered += 1;
                self.has_said = false;
                self.asked = Some((why, self.now_ns));
                continue;
            }
            self.counts.dumps_suppressed += 1;
            if self.asked.is_none() && !std::mem::replace(&mut self.has_said, true) {
                let reason = if self.triggered < self.keep.most {
                    format!("less than {} since the last one (--dump-cooldown)", span(self.keep.cooldown_ns))
                } else {
                    format!(
                        "triggers have written {}, the maximum (--max-dumps)",
                        plural(self.triggered, "file")
                    )
                };
                say(&format!("gctrace: {}: no dump, {reason}; SIGUSR2 writes one", why.text));
            }
        }
    }

    /// Starts a thread that writes what is kept now, if requested and no other one is writing: records that arrive
    /// meanwhile must not wait for a slow disk.
    fn write(&mut self) -> Result<(), ExportError> {
        if self.writing.is_some() {
            return Ok(());
        }
        let Some((why, at_ns)) = self.asked.take() else { return Ok(()) };
        let (kept, target, until_ns, by_trigger) =
            (self.store.ring().kept(), self.target.clone(), self.now_ns, why.by_trigger);
        let open = std::mem::take(&mut self.open);
        let write = move || target.write(&kept, &open, why, (at_ns, until_ns));
        match std::thread::Builder::new().name("gctrace-write".to_owned()).spawn(write) {
            Ok(thread) => {
                self.writing = Some(Writing { thread, by_trigger });
                Ok(())
            }
            Err(error) => {
                self.wrote(by_trigger, false);
                Err(ExportError::Thread(error))
            }
        }
    }

    fn wrote(&mut self, by_trigger: bool, is_there: bool) {
        if is_there {
            self.counts.dumps_written += 1;
        } else {
            self.counts.dumps_failed += 1;
            self.triggered -= u64::from(by_trigger);
        }
    }

    /// Takes the result of the file being written, if it is done; `wait`: waits for it.
    fn take_written(&mut self, wait: bool) -> Result<(), ExportError> {
        let done = self.writing.take_if(|writing| wait || writing.thread.is_finished());
        let Some(Writing { thread, by_trigger }) = done else { return Ok(()) };
        let path = self.target.path().to_owned();
        let panicked = |_| {
            let source = io::Error::other("the thread that writes panicked; please report this");
            Err(ExportError::File { path, source })
        };
        let written = thread.join().unwrap_or_else(panicked);
        self.wrote(by_trigger, written.is_ok());
        written
    }
}

impl Exporter for FlightRecorder {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.store.see(process, seen);
        let fired = self.watch.see(process, seen, self.now_ns);
        self.fire(fired);
        Ok(())
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        let of = &mut counts.recording;
        of.add(&self.counts);
        self.store.add_counts(of);
        of.dumps_waiting += u64::from(self.asked.is_some()) + u64::from(self.writing.is_some());
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        self.store.refused(pid, path, reason);
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.store.began(ts_ns);
        say(&format!(
            "gctrace: keeps the last {} in memory, at most {} MiB; {}; `kill -USR2 {}` writes them beside {}",
            span(self.keep.ns),
            self.keep.bytes >> 20,
            waits_for(&self.keep.triggers),
            std::process::id(),
            self.path().display()
        ));
    }

    fn closed(&mut self, ts_ns: u64) {
        self.store.push(What::Closed(ts_ns));
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        self.store.push(What::GvlGap(Box::new(encode::gap(gap))));
    }

    fn dump_requested(&mut self) {
        self.counts.dump_requests += 1;
        match self.asked {
            None => self.asked = Some((Why::asked(), self.now_ns)),
            // The file that was already requested will contain the same.
            Some(_) => self.counts.dumps_suppressed += 1,
        }
    }

    fn account_follows(&mut self) -> bool {
        let fired = self.watch.look(self.now_ns);
        self.fire(fired);
        self.asked.is_some() && self.writing.is_none()
    }

    fn off_cpu_so_far(&mut self, open: &[(Process, StackSample)]) {
        self.open = open.to_vec();
    }

    fn account(&mut self, ledger: &Ledger) {
        self.store.account(ledger, self.now_ns, false);
        self.failed = self.write().err();
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.now_ns = self.now_ns.max(now_ns);
        self.store.push(What::Flushed(now_ns));
        self.failed.take().map_or_else(|| self.take_written(false), Err)
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.store.account(ledger, self.now_ns, true);
        if self.watch.at_end() && self.store.ring().has_processes() {
            self.counts.dump_requests += 1;
            match self.asked {
                None => self.asked = Some((Why::end(), self.now_ns)),
                Some(_) => self.counts.dumps_suppressed += 1,
            }
        }
        let before = self.take_written(true);
        let last = self.write().and_then(|()| self.take_written(true));
        if let (Err(error), Err(_)) = (&last, &before) {
            say(&format!("gctrace: {error}"));
        }
        before.and(last)
    }

    fn settled(&mut self, _: &Ledger) -> Result<(), ExportError> {
        if self.counts.dump_requests == 0 {
            say("gctrace: no recording was written: no trigger fired");
        }
        Ok(())
    }
}
