//! Names of native frames.

use std::collections::HashMap;
use std::sync::Arc;

use super::code::{Book, Mapped};
use crate::address::Svma;
use crate::aggregate::mix::NativeFrame;
use crate::ledger::{NativeCounts, UserCounts};
use crate::model::stack::{Frame, FrameKind};

/// Frames remembered at most; beyond, all are forgotten.
const MAX_FRAMES: usize = 1 << 16;

/// Names frames by their addresses.
pub struct NativeNamer {
    book: Book,
    /// Frames of processes, and whether a symbol names them.
    frames: HashMap<(u32, u64), (Arc<Frame>, bool)>,
    /// When a process replaced its program, nanoseconds.
    execs: HashMap<u32, u64>,
    counts: NativeCounts,
}

impl NativeNamer {
    pub(super) fn new(book: Book) -> Self {
        Self { book, frames: HashMap::new(), execs: HashMap::new(), counts: NativeCounts::default() }
    }

    /// Adds what became of the frames so far, and of the tables by which they were found.
    pub fn add_counts(&self, counts: &mut UserCounts) {
        counts.native.add(&self.counts);
        let tables = self.book.counts();
        counts.native.unwind_images += tables.images;
        counts.native.unwind_images_without += tables.images_without;
        counts.native.unwind_tables_full += tables.full;
        counts.native.unwind_mappings_dropped += tables.mappings_dropped;
    }

    /// A process replaced its program at that time: addresses have other meanings after that.
    pub fn execed(&mut self, pid: u32, ts_ns: u64) {
        self.frames.retain(|(of, _), _| *of != pid);
        self.execs.insert(pid, ts_ns);
    }

    /// A process ended.
    pub fn exited(&mut self, pid: u32) {
        self.frames.retain(|(of, _), _| *of != pid);
        self.execs.remove(&pid);
    }

    /// Names the frames of a native stack, leaf first, that was taken at that time. All but the first are return
    /// addresses. `ruby` is the load bias of the process's Ruby image.
    pub fn stack(&mut self, pid: u32, ts_ns: u64, ruby: u64, addresses: &[u64]) -> Vec<NativeFrame> {
        // An old stack is not named by the mappings of the new program.
        let exec = self.execs.get(&pid).copied().unwrap_or(0);
        let map = self.book.get(pid).filter(|map| ts_ns >= exec || map.read_ns < exec);
        let mut leaf = true;
        let one = |&address: &u64| {
            // A return address may be the first behind a function that ends with a call.
            let code = address - u64::from(!std::mem::take(&mut leaf)).min(address);
            let mapped = map.as_deref().and_then(|map| map.find(code));
            let (frame, named) = self.frame(pid, address, code, mapped);
            let of_ruby = mapped.filter(|mapped| mapped.bias == ruby);
            let interpreter = of_ruby.and_then(|mapped| mapped.image.interpreter());
            let stated = Svma(code.wrapping_sub(ruby));
            NativeFrame {
                frame,
                ruby: of_ruby.is_some(),
                named,
                interpreter: interpreter.is_some_and(|range| range.contains(&stated)),
            }
        };
        addresses.iter().map(one).collect()
    }

    fn frame(&mut self, pid: u32, address: u64, code: u64, mapped: Option<&Mapped>) -> (Arc<Frame>, bool) {
        self.counts.native_frames += 1;
        let Some(mapped) = mapped else {
            self.counts.native_frames_unmapped += 1;
            let kind = FrameKind::Missing;
            let name = "(native)".into();
            return (Arc::new(Frame { kind, name, file: None, line: 0, first_line: 0, address }), false);
        };
        let key = (pid, code);
        let (frame, named) = if let Some((frame, named)) = self.frames.get(&key) {
            (Arc::clone(frame), *named)
        } else {
            let (name, named) = name(mapped, code);
            let file = Some(Arc::clone(&mapped.image.path));
            let kind = FrameKind::Native;
            let frame = Arc::new(Frame { kind, name, file, line: 0, first_line: 0, address });
            (self.remember(key, frame, named), named)
        };
        if named {
            self.counts.native_frames_named += 1;
        } else {
            self.counts.native_frames_by_offset += 1;
        }
        (frame, named)
    }

    fn remember(&mut self, key: (u32, u64), frame: Arc<Frame>, named: bool) -> Arc<Frame> {
        if self.frames.len() >= MAX_FRAMES {
            self.frames.clear();
        }
        self.frames.insert(key, (Arc::clone(&frame), named));
        frame
    }
}

/// The symbol, or the file and where the function begins in it (so that frames of one function have one name).
fn name(mapped: &Mapped, address: u64) -> (Arc<str>, bool) {
    let stated = Svma(address.wrapping_sub(mapped.bias));
    let names = mapped.image.names();
    if let Some(name) = names.and_then(|names| names.name(stated)) {
        return (demangled(name), true);
    }
    let start = names.and_then(|names| names.start(stated)).unwrap_or(stated);
    let file = mapped.image.path.rsplit('/').next().unwrap_or_default();
    (format!("{file}+{:#x}", start.0).into(), false)
}

/// Names of Rust functions as they are written; of others as they are.
fn demangled(name: &str) -> Arc<str> {
    name.into()
}
