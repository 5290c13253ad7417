//! What can go wrong while an ELF file is read.

use std::io;

/// Why an ELF file, or a part of it, could not be used. Every variant names what was being read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// The operating system refused the read.
    #[error("reading {what}: {source}")]
    Io {
        /// What was being read.
        what: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The file does not begin with an ELF header.
    #[error("not an ELF file")]
    NotElf,
    /// A kind of ELF file that gctrace does not read.
    #[error("unsupported ELF file: {0}")]
    Unsupported(&'static str),
    /// A header points past the end of the file.
    #[error("{what} lies outside the file")]
    OutOfFile {
        /// What was being read.
        what: &'static str,
    },
    /// A size in the file exceeds what gctrace is willing to load.
    #[error("{what} has {size} bytes, more than the limit of {limit}")]
    TooLarge {
        /// What was being read.
        what: &'static str,
        /// Its size, bytes.
        size: u64,
        /// The limit, bytes.
        limit: u64,
    },
    /// The contents contradict the format.
    #[error("malformed {what}: {reason}")]
    Malformed {
        /// What was being read.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A section that is needed does not exist.
    #[error("no {0} section")]
    MissingSection(&'static str),
}

impl ElfError {
    /// A part of the file that violates the format.
    pub fn malformed(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Malformed { what, reason: reason.into() }
    }
}
