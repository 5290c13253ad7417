//! Why there is no report, and the exit status for it.

use std::{io, path::PathBuf};

use crate::{export::ExportError, host::sharing::SharingError, preflight::Missing, ruby::heap::HeapError};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeapFailure {
    /// It is not a Ruby process, or cannot be read.
    #[error("pid {pid}: {reason}")]
    NotRuby {
        /// Its pid.
        pid: u32,
        /// Why.
        reason: String,
        /// Whether privilege is missing.
        denied: bool,
    },
    /// Something of the host is missing.
    #[error("{0}")]
    Missing(#[from] Missing),
    /// The heap could not be counted.
    #[error("pid {pid}: its heap could not be counted: {source}")]
    Heap {
        /// Its pid.
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
        /// Its pid.
        pid: u32,
        /// Its version.
        ruby: String,
        /// Why.
        reason: String,
    },
    /// The allocation sites of its objects are unknown.
    #[error("pid {pid}: {advice}")]
    NoPlaces {
        /// Its pid.
        pid: u32,
        /// Why, and what to do.
        advice: String,
    },
    /// It is unknown what it shares with other processes.
    #[error("pid {pid}: unknown what it shares with other processes: {source}")]
    Sharing {
        /// Its pid.
        pid: u32,
        /// Why.
        #[source]
        source: SharingError,
    },
    /// Flags that do not fit together.
    #[error("{0}")]
    Usage(String),
    /// A saved census could not be read.
    #[error("reading the census in {}: {source}", path.display())]
    Saved {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file could not be written.
    #[error("writing {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No file can be written at a path; detected before anything was read.
    #[error("{0}")]
    Path(#[from] ExportError),
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What gctrace was doing.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Output could not be written.
    #[error("writing to standard output: {0}")]
    Output(#[source] io::Error),
}

impl HeapFailure {
    /// Whether another attempt may succeed.
    pub(super) fn passes(&self) -> bool {
        matches!(self, Self::Heap { .. })
    }

    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::Missing(_)
            | Self::NotRuby { denied: true, .. }
            | Self::Sharing { source: SharingError::Hidden | SharingError::Flags(_), .. } => 3,
            Self::NotRuby { .. } => 1,
            Self::Usage(_)
            | Self::Saved { .. }
            | Self::Heap { .. }
            | Self::Sharing { .. }
            | Self::NoNames { .. }
            | Self::File { .. }
            | Self::Path(_)
            | Self::System { .. }
            | Self::NoPlaces { .. }
            | Self::Output(_) => 2,
        }
    }
}
