//! Exporters, one file per format. They see domain types only; wire types are private to their file.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    ledger::{Ledger, UserCounts},
    model::{Process, gvl::GvlGap, seen::Seen, stack::StackSample},
    private_dir::DirError,
};

pub mod contents;
pub mod csv;
pub mod diff;
pub mod digest;
pub mod environment;
pub mod fields;
mod figures;
mod file;
pub mod jsonl;
mod made;
mod otlp;
mod outputs;
mod place;
pub mod profile;
pub mod prometheus;
pub mod push;
mod pyroscope;
pub mod sink;
pub mod slow_requests;
pub mod stack_log;
pub mod summary;
pub mod text;
pub mod tunemygc;
pub mod upload;
pub mod window;
mod windows;

pub(crate) use file::{Links, Named, note_begun, note_whole, open_or_make_alone, replace_alone, write_new};
pub use file::{Published, belong_to, check_path, published, write_atomically, write_private};
pub use made::{keep_made, remove_made};
pub use otlp::process_context;
pub use outputs::Outputs;
pub use place::{place, program, started_by};

/// Version that the outputs name as that of their producer.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Why something could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Writing lines to standard output or to the file of `--output` failed.
    #[error("{}", sink::failed(.0))]
    Stdout(#[source] io::Error),
    /// An output is not writable; detected before tracing began.
    #[error("{path} cannot be written: {source}{}", remedy(path, source))]
    Unwritable {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Listening on an address failed.
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
    /// The headers for a server are invalid.
    #[error("{variable}: {why}; expected Name=value,Name=value")]
    Headers {
        /// The environment variable that contains them.
        variable: &'static str,
        /// The reason.
        why: String,
    },
    /// A thread cannot be started.
    #[error("starting a thread: {0}")]
    Thread(#[source] io::Error),
    /// Adding to a recording failed.
    #[error("writing {path}: {source}; the recording ends before this")]
    Recording {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// An output was modified from outside while it was being written.
    #[error("{path}: {what}")]
    Disturbed {
        /// The file.
        path: PathBuf,
        /// What happened, and the consequence for the output.
        what: String,
    },
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

/// The remedy for an output that is not writable, unless the error itself says it.
fn remedy(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() {
        _ if error.get_ref().is_some_and(|source| source.downcast_ref::<DirError>().is_some()) => "",
        io::ErrorKind::NotFound => "; create its directory, or name another path",
        io::ErrorKind::InvalidInput => "; name a regular file or a new one",
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => "; name a directory",
        _ if path.is_dir() => "; name a file in it",
        _ => "; name another path",
    }
}

impl ExportError {
    /// The destination of lines whose reader has closed it, if that is what happened: it is how pipelines end.
    pub(crate) fn closed(&self) -> Option<sink::Closed> {
        match self {
            Self::Stdout(error) => sink::Closed::by(error),
            _ => None,
        }
    }
}

/// A destination for what is seen, which arrives through [`see`](Self::see). The other methods are the life cycle of
/// an output; each output implements those that it needs.
pub trait Exporter {
    /// Something was seen in a process. An output that does not show it ignores it.
    fn see(&mut self, _process: &Process, _seen: Seen<'_>) -> Result<(), ExportError> {
        Ok(())
    }
    /// A traced process, or a descendant of one, has forked this process (its pid), which is traced from its first event on.
    fn forked(&mut self, _pid: u32) {}
    /// A forked process has exited or executed another program, whether it was traced or not.
    fn left(&mut self, _pid: u32) {}
    /// Something that is not shown but is needed to interpret what is shown: the endpoint of a request, a wait that is
    /// part of a thread's sums.
    fn outside(&mut self, _process: &Process, _seen: Seen<'_>) {}
    /// An account follows: what has been seen so far is about to be read. Returns whether this output needs the times that
    /// have not ended yet.
    fn account_follows(&mut self) -> bool {
        false
    }
    /// Unfinished off-CPU times, up to now. They replace those of the previous call. Each is reported in full when it ends.
    fn off_cpu_so_far(&mut self, _open: &[(Process, StackSample)]) {}
    /// A process (or an image) is not traced.
    fn refused(&mut self, _pid: Option<u32>, _path: &str, _reason: &str) -> Result<(), ExportError> {
        Ok(())
    }
    /// Everything that was requested is being traced from this time on (`CLOCK_MONOTONIC` nanoseconds). Some of it may
    /// have been traced before.
    fn began(&mut self, _ts_ns: u64) {}
    /// Nothing is traced after this time (`CLOCK_MONOTONIC` nanoseconds).
    fn closed(&mut self, _ts_ns: u64) {}
    /// Individual GVL waits were not reported for some time. Called before each account and when tracing ends; a gap that lasts longer is
    /// reported in parts, each of which begins where the one before it ended.
    fn gvl_gap(&mut self, _gap: GvlGap) {}
    /// What has been counted so far, about once a second.
    fn account(&mut self, _ledger: &Ledger) {}
    /// The user requests a dump of a recording that is kept in memory.
    fn dump_requested(&mut self) {}
    /// Adds the output's own counters.
    fn add_counts(&self, _counts: &mut UserCounts) {}
    /// The run ended.
    fn finish(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
    /// All outputs are finished and nothing is being sent any more: the final account, in which no upload is pending.
    fn settled(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
    /// Whether this output has reached its limit and the run is to end.
    fn is_full(&self) -> bool {
        false
    }
    /// Writes out what is buffered. `now_ns`: the current time, `CLOCK_MONOTONIC` nanoseconds.
    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        Ok(())
    }
}
