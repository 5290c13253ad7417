//! A named frame, as the namer creates it and every output shows it.

use std::sync::Arc;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrameKind {
    /// Ruby code.
    Ruby,
    /// A method implemented in C, under its Ruby name.
    CFunction,
    /// Machine code of the process: the VM itself, C extensions, libraries, JIT code.
    Native,
    /// The kernel.
    Kernel,
    /// A frame that gctrace inserts: `(garbage collection)`, `(marking)`, …
    Vm,
    /// A frame that could not be named, or a marker for missing frames: `(unnamed)`, `(truncated)`, …
    Missing,
}

/// A named frame. Frames are interned: the same frame of the same process is the same `Arc`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame {
    /// Its kind.
    pub kind: FrameKind,
    /// `Class#method`, `Class.method`, `block in Class#method`, `<main>`; a native symbol, or `file+0x1234` if there is no
    /// symbol.
    pub name: Arc<str>,
    /// Source file as the VM knows it; for native frames the mapped file.
    pub file: Option<Arc<str>>,
    /// Line being executed, 0 if unknown.
    pub line: u32,
    /// First line of the method, 0 if unknown.
    pub first_line: u32,
    /// The address of a native or kernel frame; 0 for others.
    pub address: u64,
}

impl Frame {
    /// Its line as it follows the name of a file, `:12`; nothing if it is unknown.
    pub fn colon_line(&self) -> String {
        if self.line == 0 { String::new() } else { format!(":{}", self.line) }
    }
}
