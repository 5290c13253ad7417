//! Messages of the control thread.

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
        /// The state of its VM, read from its memory outside a GC: time and snapshot data.
        state: Option<(u64, Vec<u8>)>,
    },
    /// A process or an image is not traced.
    Refused {
        /// The process, if the message is about one.
        pid: Option<u32>,
        /// The image file.
        path: PathBuf,
        /// The reason and the remedy.
        reason: String,
    },
    /// The VM of a process failed the live proof, although its image passed: nothing about it may be reported.
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
        /// The reason.
        reason: String,
    },
    /// A selected pid does not exist, is not a Ruby or cannot be read.
    NotRuby {
        /// The pid.
        pid: u32,
        /// What was found instead.
        reason: String,
        /// Whether it may be a Ruby that cannot be read.
        denied: bool,
    },
    /// Everything present at start has been inspected.
    Ready {
        /// Number of processes that are traced now.
        processes: usize,
        /// Number of attached probes.
        probes: usize,
        /// Number of probed images.
        images: usize,
        /// Whether processes that the user named by pid may start a Ruby later.
        waits: bool,
        /// Must be notified when recording has started: the command is started then, so that none of its events is missed.
        begun: SyncSender<()>,
    },
    /// The command was started.
    Spawned(Child),
    /// All selected processes have ended, and no other can be selected.
    Ended {
        /// The pids that the user named.
        pids: Vec<u32>,
    },
    /// Tracing cannot continue.
    Fatal(String),
    /// The GVL probes of all images have been attached or detached.
    GvlProbes {
        /// Whether they are attached.
        attached: bool,
    },
    /// No further records are made. The probes are being detached, which takes about 0.1 s each.
    Closed {
        /// When recording ended, in nanoseconds of `CLOCK_MONOTONIC`.
        at_ns: u64,
    },
}
