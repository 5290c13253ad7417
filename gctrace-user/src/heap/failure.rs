//! Why there is no report, and the exit status of that.

use std::{io, path::PathBuf};

use crate::{host::sharing::SharingError, ruby::heap::HeapError};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeapFailure {
    /// It is no Ruby process, or none that can be read.
    #[error("pid {pid}: {reason}")]
    NotRuby {
        /// Which.
        pid: u32,
        /// Why.
        reason: String,
        /// Whether privilege is missing.
        denied: bool,
    },
    /// The heap could not be counted.
    #[error("pid {pid}: its heap could not be counted: {source}")]
    Heap {
        /// Which.
        pid: u32,
        /// Why.
        #[source]
        source: HeapError,
    },
    /// The names of classes cannot be read.
    #[error(
        "pid {pid}: the classes of this Ruby {ruby} cannot be named ({reason}); --by type, size and page work"
    )]
    NoNames {
        /// Which.
        pid: u32,
        /// Its version.
        ruby: String,
        /// Why.
        reason: String,
    },
    /// The places of its objects are not known.
    #[error("pid {pid}: {advice}")]
    NoPlaces {
        /// Which.
        pid: u32,
        /// Why, and what to do.
        advice: String,
    },
    /// It is not known what it shares with other processes.
    #[error("pid {pid}: unknown what it shares with other processes: {source}")]
    Sharing {
        /// Which.
        pid: u32,
        /// Why.
        #[source]
        source: SharingError,
    },
    /// Flags that do not go together.
    #[error("{0}")]
    Usage(String),
    /// A saved census could not be read.
    #[error("reading the census in {}: {source}", path.display())]
    Saved {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file could not be written.
    #[error("writing {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What gctrace was doing.
        what: &'static str,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The reader of the output is gone.
    #[error("writing to standard output: {0}")]
    Output(#[source] io::Error),
}

impl HeapFailure {
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::NotRuby { denied: true, .. }
            | Self::Sharing { source: SharingError::Hidden | SharingError::Flags(_), .. } => 3,
            Self::NotRuby { .. } => 1,
            Self::Usage(_)
            | Self::Saved { .. }
            | Self::Heap { .. }
            | Self::Sharing { .. }
            | Self::NoNames { .. }
            | Self::File { .. }
            | Self::System { .. }
            | Self::NoPlaces { .. }
            | Self::Output(_) => 2,
        }
    }
}
