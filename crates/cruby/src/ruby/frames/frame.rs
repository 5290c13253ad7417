//! A frame with its name, as the namer makes it and as every output shows it.

use std::sync::Arc;

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
