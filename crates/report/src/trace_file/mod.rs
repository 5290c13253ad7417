//! Recordings (`.gctrace`): everything that the exporters of a run received, in a file, from which every output can be produced again.
//!
//! [`Recorder`] is the exporter that writes a recording, [`Recording`] reads one, [`replay`] passes its contents to
//! exporters. The format is described in docs/recording.md: [`chunk`] frames compressed chunks, `kinds::wire` has
//! their messages, `kinds::encode` and `kinds::decode` translate between these and the model.

mod ahead;
mod chunk;
mod codes;
mod destination;
mod flight;
mod index;
mod kinds;
mod merge;
mod recorder;
mod recording;
mod replay;
mod scrub;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::samples;
mod visit;

use std::{
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::clock::WallClock;

pub use chunk::Ending;
pub use flight::{FlightRecorder, Keep, LiveRecorder, LiveRecording, LiveState, Metric, Snapshot, Trigger};
pub use index::{Index, replay_part, replay_whole};
pub use merge::{MergeError, Merged, merge};
pub use recorder::Recorder;
pub use recording::{Recording, open_regular};
pub use replay::{Readable, Replayed, replay};
pub use scrub::{Kind as ScrubKind, ScrubError, Scrubbed, scrub};

/// First bytes of a recording.
const MAGIC: [u8; 8] = *b"GCTRACE\n";
/// Version of the format. Other versions are refused.
pub const FORMAT: u32 = 1;
/// Size at which a chunk is closed, bytes before compression.
const CHUNK_BYTES: usize = 256 << 10;
/// Maximum size of a chunk, bytes before and after compression. A single entry may be larger than [`CHUNK_BYTES`].
const MAX_CHUNK_BYTES: usize = 4 << 20;
/// Maximum number of 8-byte words that the tables and entries of a chunk expand to, in addition to their own size:
/// frames of stacks, texts that are copied, histograms. Without a limit, a small file could expand to any amount of
/// memory, as entries can refer to the same stack or text.
const CHUNK_WORDS: usize = 8 << 20;

/// Words of a text that is copied.
fn text_words(text: &str) -> usize {
    text.len() / 8 + 3
}
/// Age at which a chunk is closed, nanoseconds: at most this much is lost if gctrace is killed.
const CHUNK_NS: u64 = 1_000_000_000;

/// What was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate fact")]
pub struct Subjects {
    /// Whether the sampling clock ran.
    pub samples: bool,
    /// Whether threads off their CPU were recorded.
    pub wall: bool,
    /// Whether the GVL was traced.
    pub gvl: bool,
    /// Whether requests were traced.
    pub requests: bool,
    /// Whether allocation was counted.
    pub alloc: bool,
}

/// The header of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version of the gctrace that wrote it.
    pub gctrace: String,
    /// Its clock.
    pub clock: WallClock,
    /// When recording began, `CLOCK_MONOTONIC` nanoseconds.
    pub begun_ns: u64,
    /// What was recorded.
    pub subjects: Subjects,
    /// The host; recordings of older versions do not have it.
    pub host: Host,
    /// Why it was written, if it is a dump of a flight recorder.
    pub dump: Option<Dump>,
}

/// Why a flight recorder wrote what it had kept, and the time that this covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// The reason: the trigger and what fired it, in words.
    pub why: String,
    /// When it was requested, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// Start of the time that it covers, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// The number of entries at its start that describe the state at that time; 0 if it covers the whole run.
    pub carried: u64,
    /// The number of entries at its end with times that had not ended: a later file of the run has them in full.
    pub open: u64,
}

/// The host of a recording, as far as known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub name: Option<String>,
    /// Release of its kernel: `6.1.0-18-amd64`.
    pub kernel: Option<String>,
    /// Its processor architecture, as the kernel names it: `x86_64`.
    pub machine: Option<String>,
    /// Number of CPUs that gctrace could use.
    pub cpus: Option<u32>,
    /// Its boot id: `/proc/sys/kernel/random/boot_id`.
    pub boot: Option<String>,
}

/// How much of a file was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Number of whole chunks, including the header and the end.
    pub chunks: u64,
    /// Stored bytes of these chunks and of the beginning of the file.
    pub stored: u64,
    /// Expanded bytes of these chunks.
    pub expanded: u64,
}

/// Why a recording cannot be read, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be opened or read.
    #[error("the recording {} cannot be read: {source}{}", path.display(), advice(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is not a recording, or one of another version.
    #[error("{}: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// It is damaged.
    #[error("{}: the chunk at byte {offset} is damaged: {why}; the part before it was read", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Offset of the damaged chunk.
        offset: u64,
        /// The reason.
        why: String,
    },
    /// It has something that a later gctrace records.
    #[error(
        "{}: the chunk at byte {offset} has {what}, which this gctrace ({own}) does not know; {} recorded it: read it with that one; the \
         part before it was read",
        path.display(),
        if by == crate::export::VERSION { "another build of the same version".to_owned() } else { format!("gctrace {by}") },
        own = crate::export::VERSION
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Offset of the chunk.
        offset: u64,
        /// What is not known.
        what: String,
        /// The version of the gctrace that recorded it.
        by: String,
    },
}

/// The remedy for a recording that cannot be read.
fn advice(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::NotFound => "; name a file that `gctrace record` or --record wrote",
        std::io::ErrorKind::IsADirectory => "; name a file in it",
        std::io::ErrorKind::PermissionDenied => {
            "; only its owner reads it: run this as the user who recorded"
        }
        _ => "",
    }
}

/// What is wrong with the content of a chunk.
#[derive(Debug, PartialEq, Eq)]
struct Invalid {
    why: String,
    /// Whether it may be something that a later gctrace records.
    is_unknown: bool,
}

impl Invalid {
    fn new(why: String) -> Self {
        Self { why, is_unknown: false }
    }

    /// Something that this gctrace does not know.
    fn unknown(what: &str) -> Self {
        Self { why: what.to_owned(), is_unknown: true }
    }
}

/// Whether both paths name the same existing file.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    id(one).is_some_and(|found| id(other) == Some(found))
}
