//! The outcome of a run, and the exit statuses of success and failure.

use std::io;

use crate::{
    bpf::{self, LoadError},
    cli::UsageError,
    export::ExportError,
    preflight::Missing,
    trace_file::{MergeError, ReadError, ScrubError},
};

/// A run that did its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At least one process was traced.
    Done,
    /// No Ruby process matched the selection.
    NothingMatched,
    /// Every selected Ruby process was refused, or could not be read (reported when it happened).
    Refused,
    /// Something could not be written (reported when it happened).
    OutputFailed,
    /// The command has ended with this status, and there is nothing worse to report.
    Command(u8),
}

impl Outcome {
    /// The outcome of a run in which nothing failed, with the last message about it. `seen`: something was seen of a process; `refused`: a
    /// selected process was refused; `matched`: a selected process was found.
    pub(super) fn of(seen: bool, refused: bool, matched: bool) -> (Self, Option<&'static str>) {
        match (seen, refused, matched) {
            (true, ..) | (false, false, true) => (Self::Done, None),
            (false, true, _) => {
                let why = "gctrace: nothing was traced: each selected Ruby process was refused or could not be read; the reasons are above";
                (Self::Refused, Some(why))
            }
            (false, false, false) => {
                let why =
                    "gctrace: nothing matched: no selected CRuby process was running or started in that time";
                (Self::NothingMatched, Some(why))
            }
        }
    }

    /// The process's exit status.
    pub fn exit_status(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::NothingMatched => 1,
            Self::Refused | Self::OutputFailed => 2,
            Self::Command(status) => status,
        }
    }
}

/// Why a run or a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Wrong flags.
    #[error("{0}")]
    Usage(#[from] UsageError),
    /// Missing privilege or kernel feature.
    #[error("{0}")]
    Missing(#[from] Missing),
    /// The BPF object could not be loaded.
    #[error("{}", bpf::brief(.0))]
    Load(#[from] LoadError),
    /// A recording cannot be read.
    #[error("{0}")]
    Recording(#[from] ReadError),
    /// A recording cannot be copied.
    #[error("{0}")]
    Scrub(#[from] ScrubError),
    /// Recordings cannot be merged.
    #[error("{0}")]
    Merge(#[from] MergeError),
    /// A page cannot be served.
    #[error("{0}")]
    Serve(#[from] gctrace_serve::ServeError),
    /// An output cannot be written.
    #[error("{0}")]
    Export(#[from] ExportError),
    /// A debug file that the user named cannot be used.
    #[error("{0}")]
    DebugFile(String),
    /// The control thread failed.
    #[error("{0}")]
    Control(String),
    /// The operating system refused a basic operation.
    #[error("{what}: {}", bpf::brief(.source))]
    System {
        /// The operation.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

impl Failure {
    /// The process's exit status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Missing(_) | Self::Load(_) => 3,
            Self::Usage(_)
            | Self::DebugFile(_)
            | Self::Export(_)
            | Self::Recording(_)
            | Self::Scrub(_)
            | Self::Merge(_)
            | Self::Serve(_)
            | Self::Control(_)
            | Self::System { .. } => 2,
        }
    }
}

/// Turns an operating system error into a failure.
pub(super) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Failure {
    move |source| Failure::System { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that could trace nothing does not claim that nothing was there.
    #[test]
    fn outcomes() {
        for (seen, refused, matched, status, word) in [
            (true, true, true, 0, None),
            (true, false, true, 0, None),
            (false, false, true, 0, None),
            (false, true, false, 2, Some("was refused")),
            (false, true, true, 2, Some("was refused")),
            (false, false, false, 1, Some("nothing matched")),
        ] {
            let (outcome, said) = Outcome::of(seen, refused, matched);
            assert_eq!(outcome.exit_status(), status, "{seen} {refused} {matched}");
            assert_eq!(said.is_some(), word.is_some());
            assert!(said.unwrap_or_default().contains(word.unwrap_or_default()), "{said:?}");
        }
    }

    /// A limit that a system call has reached is named.
    #[test]
    fn limits() {
        let failure =
            system("installing signal handlers")(io::Error::from_raw_os_error(libc::EMFILE)).to_string();
        let said = "installing signal handlers: Too many open files (os error 24); the limit of open files of gctrace is too low: \
                    `ulimit -n 4096`";
        assert!(failure.starts_with(said), "{failure}");
    }
}
