//! Why there is no report, and the exit status for it.

use std::{borrow::Cow, io};

use crate::{
    bpf::{self, AttachError, LoadError},
    export::ExportError,
    heap::HeapFailure,
    preflight::Missing,
    ruby::malloc::NoMalloc,
};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(super) enum MallocFailure {
    /// It is not a Ruby process, or cannot be read.
    #[error("{0}")]
    Process(#[from] HeapFailure),
    /// Flags that do not fit together.
    #[error("{0}")]
    Usage(Cow<'static, str>),
    /// No process matches the selection.
    #[error("no running Ruby process is selected ({0})")]
    Nobody(String),
    /// The selection could not be resolved.
    #[error("{0}")]
    Selection(String),
    /// More processes are selected than can be counted at a time.
    #[error("{found} Ruby processes are selected: gctrace malloc counts at most {most} at a time")]
    TooMany {
        /// Number of selected processes.
        found: usize,
        /// The limit.
        most: usize,
    },
    /// Missing privilege or kernel feature.
    #[error("{0}")]
    Missing(#[from] Missing),
    /// The file of its Ruby cannot be read.
    #[error("pid {pid}: the file of its Ruby cannot be read: {reason}")]
    File {
        /// Its pid.
        pid: u32,
        /// Why.
        reason: String,
    },
    /// Its calls cannot be counted.
    #[error("pid {pid}: {source}")]
    Calls {
        /// Its pid.
        pid: u32,
        /// Why.
        #[source]
        source: NoMalloc,
    },
    /// It has a shadow stack: a call instruction that the kernel emulates could crash it.
    #[error("pid {0}: it runs with a shadow stack, where probing a call can crash it")]
    ShadowStack(u32),
    /// The BPF program could not be loaded.
    #[error("{} (gctrace malloc needs Linux 5.15 or later)", bpf::brief(.0))]
    Load(#[from] LoadError),
    /// A probe could not be attached, or a map could not be read.
    #[error("{}", bpf::brief(.0))]
    Attach(#[from] AttachError),
    /// It has replaced its program.
    #[error("pid {0}: it replaced its program while its calls were counted")]
    Replaced(u32),
    /// The operating system refused something basic.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A profile cannot be written.
    #[error("{0}")]
    Export(#[from] ExportError),
    /// Output could not be written.
    #[error("writing to standard output: {0}")]
    Output(#[source] io::Error),
}

impl MallocFailure {
    pub(super) fn exit_status(&self) -> u8 {
        match self {
            Self::Process(failure) => failure.exit_status(),
            Self::Missing(_) | Self::Load(_) => 3,
            Self::Nobody(_) => 1,
            Self::Usage(_)
            | Self::Selection(_)
            | Self::TooMany { .. }
            | Self::File { .. }
            | Self::Calls { .. }
            | Self::ShadowStack(_)
            | Self::Attach(_)
            | Self::Replaced(_)
            | Self::System { .. }
            | Self::Export(_)
            | Self::Output(_) => 2,
        }
    }
}
