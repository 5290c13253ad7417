//! Stacks as exporters see them.

use std::sync::Arc;

pub use gctrace_common::stack::GcActivity;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrameKind {
    /// Ruby code.
    Ruby,
    /// A method implemented in C, by its Ruby name.
    CFunction,
    /// Machine code of the process: the VM itself, C extensions, libraries, JIT code.
    Native,
    /// The kernel.
    Kernel,
    /// A frame that gctrace puts in: `(garbage collection)`, `(marking)`, …
    Vm,
    /// A frame that could not be named, or the mark of missing frames: `(unnamed)`, `(truncated)`, …
    Missing,
}

/// One frame with its name. Frames are interned: the same frame of the same process is the same `Arc`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame {
    /// What it is.
    pub kind: FrameKind,
    /// `Class#method`, `Class.method`, `block in Class#method`, `<main>`; a native symbol, or `file+0x1234` where there
    /// is none.
    pub name: Arc<str>,
    /// Source file as the VM knows it; for native frames the mapped file.
    pub file: Option<Arc<str>>,
    /// Line that runs, 0 where there is none.
    pub line: u32,
    /// Line at which the method begins, 0 where there is none.
    pub first_line: u32,
    /// Native and kernel frames: the address; else 0.
    pub address: u64,
}

/// A stack, leaf first.
pub type Stack = Arc<[Arc<Frame>]>;

/// What a thread was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadState {
    /// On a CPU.
    Running,
    /// Ready to run, without a CPU.
    Runnable,
    /// Sleeping or waiting.
    Blocked,
}

impl ThreadState {
    /// The word used in labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Runnable => "runnable",
            Self::Blocked => "blocked",
        }
    }
}

/// A stack and the time it stands for.
#[derive(Clone, Debug)]
pub struct StackSample {
    /// `CLOCK_MONOTONIC` nanoseconds: the tick of the clock; off the CPU, the time at which the thread left it.
    pub ts_ns: u64,
    /// Thread, host pid namespace.
    pub tid: u32,
    /// Name of the thread.
    pub comm: Arc<str>,
    /// What the thread was doing.
    pub state: ThreadState,
    /// CPU time it stands for, nanoseconds; 0 off the CPU.
    pub cpu_ns: u64,
    /// Wall time it stands for, nanoseconds.
    pub wall_ns: u64,
    /// What the garbage collector was doing on the thread. The stack then begins with the frames that say so.
    pub gc: GcActivity,
    /// Kernel, native and Ruby frames, leaf first. The root end of an incomplete stack is a [`FrameKind::Missing`] frame.
    pub stack: Stack,
}

/// The word for a kind of GC work in labels and frames.
pub fn gc_name(activity: GcActivity) -> &'static str {
    match activity {
        GcActivity::None => "none",
        GcActivity::Other => "other",
        GcActivity::Marking => "marking",
        GcActivity::Sweeping => "sweeping",
        GcActivity::Compacting => "compacting",
    }
}
