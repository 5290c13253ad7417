//! Exporters: one file per format. They see domain types only. Wire types are private to their file.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    aggregate::gvl_so_far::GvlSoFar,
    ledger::{Ledger, UserCounts},
    model::{
        EndReason, GcCycle, GcState, GcWork, Process,
        gvl::{GvlGap, GvlProcessSummary, GvlSpan, GvlThreadSummary, GvlWait},
        stack::StackSample,
    },
};

pub mod environment;
mod figures;
mod file;
pub mod jsonl;
mod jsonl_gc;
mod jsonl_summary;
mod otlp;
mod place;
pub mod profile;
pub mod prometheus;
pub mod push;
mod pyroscope;
pub mod sink;
pub mod stack_log;
pub mod summary;
pub mod text;
mod text_gvl;
mod text_interval;
pub mod tunemygc;
pub(crate) mod upload;
mod windows;

pub use file::{belong_to, published};
pub(crate) use place::program;

/// Version that outputs name as their producer.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Cycles that a program had behind it before the first one that was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CyclesBefore {
    /// It ran before gctrace did: so many were over, or under way.
    Earlier(u64),
    /// It started during the run: so many were missed, because its Ruby had no probes yet.
    Missed(u64),
    /// It cannot be told.
    Unknown,
}

impl CyclesBefore {
    /// How many were missed.
    pub fn missed(self) -> u64 {
        match self {
            Self::Missed(cycles) => cycles,
            Self::Earlier(_) | Self::Unknown => 0,
        }
    }
}

/// How tracing of one process ended.
#[derive(Clone, Debug)]
pub struct ProcessEnd {
    /// Why.
    pub reason: EndReason,
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Since when it was traced: its start or exec, or that of tracing, whichever was later.
    pub since_ns: u64,
    /// GC pauses of cycles that are not reported, because they had begun before tracing, nanoseconds.
    pub outside_ns: u64,
    /// The VM's state when it began to shut down, if it did.
    pub shutdown: Option<GcState>,
    /// Cycles reported.
    pub cycles: u64,
    /// Cycles before those.
    pub before: CyclesBefore,
    /// GC records the kernel lost.
    pub lost: u64,
}

/// Why something could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Writing to standard output failed.
    #[error("writing to standard output: {0}")]
    Stdout(#[source] io::Error),
    /// An output cannot be written, found out before tracing began.
    #[error("{path} cannot be written: {source}; {}", remedy(path, source))]
    Unwritable {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// An address cannot be listened on.
    #[error(
        "listening on {address}: {source}; is another gctrace running? (--prometheus names another address)"
    )]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Headers for a server cannot be understood.
    #[error("{variable}: {why}; it wants Name=value,Name=value")]
    Headers {
        /// The environment variable that has them.
        variable: &'static str,
        /// The reason.
        why: String,
    },
    /// A thread cannot be started.
    #[error("starting a thread that sends: {0}")]
    Thread(#[source] io::Error),
    /// Writing a file failed.
    #[error("writing {path}: {source}; this file was not written")]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// What to do about an output that cannot be written.
fn remedy(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "make its directory, or name another place",
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => "name a directory",
        _ if path.is_dir() => "name a file in it",
        _ => "name another place",
    }
}

impl ExportError {
    /// Whether the reader of standard output has gone away, which is how pipelines end.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Stdout(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// A destination of what was seen.
pub trait Exporter {
    /// A process is traced from now on; `state` is its VM's state at that time, if it could be read.
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError>;
    /// A process (or an image) is not traced.
    fn refused(&mut self, _pid: Option<u32>, _path: &str, _reason: &str) -> Result<(), ExportError> {
        Ok(())
    }
    /// Everything that was asked for is being traced from this time on (`CLOCK_MONOTONIC` nanoseconds). Some of it may have been
    /// before.
    fn began(&mut self, _ts_ns: u64) {}
    /// Nothing is traced any more since this time.
    fn closed(&mut self, _ts_ns: u64) {}
    /// A cycle is complete, or was cut short.
    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError>;
    /// An interval of GC work, of an image whose event sites are not known.
    fn work(&mut self, _process: &Process, _work: &GcWork) -> Result<(), ExportError> {
        Ok(())
    }
    /// A stack of one of its threads.
    fn stack(&mut self, _process: &Process, _sample: &StackSample) -> Result<(), ExportError> {
        Ok(())
    }
    /// A thread had to wait long for the GVL.
    fn gvl_wait(&mut self, _process: &Process, _wait: &GvlWait) -> Result<(), ExportError> {
        Ok(())
    }
    /// Single waits for the GVL were not reported for some time. Comes when tracing ends.
    fn gvl_gap(&mut self, _gap: GvlGap) -> Result<(), ExportError> {
        Ok(())
    }

    /// A thread held the GVL for long, or did without it.
    fn gvl_span(&mut self, _process: &Process, _span: &GvlSpan) -> Result<(), ExportError> {
        Ok(())
    }
    /// What a thread did with the GVL, when it has ended, or its process or tracing has.
    fn gvl_thread(&mut self, _process: &Process, _thread: &GvlThreadSummary) -> Result<(), ExportError> {
        Ok(())
    }
    /// What the threads of a process have done with the GVL so far, from time to time and at the end. Only told where
    /// accounts are.
    fn gvl_so_far(&mut self, _process: &Process, _so_far: &GvlSoFar) -> Result<(), ExportError> {
        Ok(())
    }
    /// What the threads of a process did with the GVL, when the process or tracing has ended.
    fn gvl_process(&mut self, _process: &Process, _summary: &GvlProcessSummary) -> Result<(), ExportError> {
        Ok(())
    }
    /// Tracing of a process ended.
    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError>;
    /// What has been counted so far, about once a second.
    fn account(&mut self, _ledger: &Ledger) {}
    /// Adds what it counts itself.
    fn add_counts(&self, _counts: &mut UserCounts) {}
    /// The run ended.
    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError>;
    /// Every output is finished and nothing is being sent any more: the last account, in which no upload waits.
    fn settled(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
    /// Hand out what is buffered.
    fn flush(&mut self) -> Result<(), ExportError> {
        Ok(())
    }
}
