//! What the control thread reports.

use std::{path::PathBuf, process::Child, sync::mpsc::SyncSender};

/// Messages from the control thread to the data thread.
#[derive(Debug)]
pub enum ControlEvent {
    /// A process runs a probed image.
    Process {
        /// The process.
        pid: u32,
        /// Its image.
        image: u32,
        /// Its VM's state, read from its memory outside a GC: time and snapshot data.
        state: Option<(u64, Vec<u8>)>,
    },
    /// A process or an image is not traced.
    Refused {
        /// The process, if it is about one.
        pid: Option<u32>,
        /// The image file.
        path: PathBuf,
        /// The reason and the remedy.
        reason: String,
    },
    /// The VM of a process did not pass the live proof, although its image did: nothing of it may be reported.
    Unproven {
        /// The process.
        pid: u32,
        /// The image file.
        path: PathBuf,
        /// The check that failed.
        reason: String,
    },
    /// The probes of the image that a process runs were detached.
    Left {
        /// The process.
        pid: u32,
        /// The image.
        image: u32,
        /// The image file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A selected pid is not there or is no Ruby.
    NotRuby {
        /// The pid.
        pid: u32,
        /// What was found instead.
        reason: String,
    },
    /// Everything present at start has been looked at.
    Ready {
        /// Processes that are traced now.
        processes: usize,
        /// Probes attached.
        probes: usize,
        /// Images probed.
        images: usize,
        /// Is notified when recordings have begun: the command is started then, so that nothing of it is older.
        begun: SyncSender<()>,
    },
    /// The command was started.
    Spawned(Child),
    /// All selected processes have ended, and no other can be selected.
    Ended {
        /// Those that the user named.
        pids: Vec<u32>,
    },
    /// Tracing cannot go on.
    Fatal(String),
    /// The GVL probes of all images have been attached, or detached.
    GvlProbes {
        /// Which.
        attached: bool,
    },
    /// No further record will be made. The probes are being detached, which takes about 0.1 s each.
    Closed {
        /// Since when, nanoseconds of `CLOCK_MONOTONIC`.
        at_ns: u64,
    },
}
