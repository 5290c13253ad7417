//! Names of native frames.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::code::{Book, CodeImage, Mapped};
use crate::address::Svma;
use crate::aggregate::mix::NativeFrame;
use crate::ledger::{NativeCounts, UserCounts};
use crate::model::stack::{Frame, FrameKind};

/// Maximum number of remembered frames; all are forgotten above it.
const MAX_FRAMES: usize = 1 << 16;

/// The location of a frame: process, address, and whether that is a return address.
type Place = (u32, u64, bool);

/// A frame that was named earlier.
struct Named {
    frame: Arc<Frame>,
    /// Whether its name is a symbol.
    by_symbol: bool,
    /// Its image and load bias at that time: another library may be mapped there by now. Does not keep the file open.
    image: Weak<CodeImage>,
    bias: u64,
}

impl Named {
    fn is_of(&self, mapped: &Mapped) -> bool {
        self.bias == mapped.bias && std::ptr::eq(self.image.as_ptr(), Arc::as_ptr(&mapped.image))
    }
}

/// Names frames by their addresses.
pub struct NativeNamer {
    book: Book,
    frames: HashMap<Place, Named>,
    /// When a process last replaced its program, in nanoseconds.
    execs: HashMap<u32, u64>,
    counts: NativeCounts,
}

impl NativeNamer {
    pub(super) fn new(book: Book) -> Self {
        Self { book, frames: HashMap::new(), execs: HashMap::new(), counts: NativeCounts::default() }
    }

    /// Adds the counts of frames so far, and of the tables by which they were found.
    pub fn add_counts(&self, counts: &mut UserCounts) {
        counts.native.add(&self.counts);
        let tables = self.book.counts();
        counts.native.unwind_images += tables.images;
        counts.native.unwind_images_without += tables.images_without;
        counts.native.unwind_tables_full += tables.full;
        counts.native.unwind_mappings_dropped += tables.mappings_dropped;
    }

    /// Records that a process replaced its program at this time: addresses have other meanings from then on.
    pub fn execed(&mut self, pid: u32, ts_ns: u64) {
        self.frames.retain(|(of, ..), _| *of != pid);
        self.execs.insert(pid, ts_ns);
    }

    /// Forgets a process that ended.
    pub fn exited(&mut self, pid: u32) {
        self.frames.retain(|(of, ..), _| *of != pid);
        self.execs.remove(&pid);
    }

    /// Names the frames of a native stack, leaf first, taken at `ts_ns`. All but the first are return
    /// addresses. `ruby` is the load bias of the process's Ruby image.
    pub fn stack(&mut self, pid: u32, ts_ns: u64, ruby: u64, addresses: &[u64]) -> Vec<NativeFrame> {
        // A stack from before an exec must not be named by the mappings of the new program.
        let exec = self.execs.get(&pid).copied().unwrap_or(0);
        let map = self.book.get(pid).filter(|map| ts_ns >= exec || map.read_ns < exec);
        let mut leaf = true;
        let one = |&address: &u64| {
            let returns = !std::mem::take(&mut leaf);
            // A return address may be just past a function that ends with a call.
            let code = address - u64::from(returns).min(address);
            let mapped = map.as_deref().and_then(|map| map.find(code));
            let (frame, named) = self.frame((pid, address, returns), code, mapped);
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

    fn frame(&mut self, place: Place, code: u64, mapped: Option<&Mapped>) -> (Arc<Frame>, bool) {
        let (_, address, _) = place;
        self.counts.native_frames += 1;
        let Some(mapped) = mapped else {
            self.counts.native_frames_unmapped += 1;
            let kind = FrameKind::Missing;
            let name = "(native)".into();
            return (Arc::new(Frame { kind, name, file: None, line: 0, first_line: 0, address }), false);
        };
        let known = self.frames.get(&place).filter(|known| known.is_of(mapped));
        let (frame, named) = if let Some(known) = known {
            (Arc::clone(&known.frame), known.by_symbol)
        } else {
            let (name, by_symbol) = name(mapped, code);
            let file = Some(Arc::clone(&mapped.image.path));
            let kind = FrameKind::Native;
            let frame = Arc::new(Frame { kind, name, file, line: 0, first_line: 0, address });
            let (image, bias) = (Arc::downgrade(&mapped.image), mapped.bias);
            self.remember(place, Named { frame: Arc::clone(&frame), by_symbol, image, bias });
            (frame, by_symbol)
        };
        if named {
            self.counts.native_frames_named += 1;
        } else {
            self.counts.native_frames_by_offset += 1;
        }
        (frame, named)
    }

    fn remember(&mut self, place: Place, named: Named) {
        if self.frames.len() >= MAX_FRAMES {
            self.frames.clear();
        }
        self.frames.insert(place, named);
    }
}

/// The symbol, or the file and the start of the function in it (so that all frames of a function have the same name).
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

/// Demangles names of Rust functions; other names are unchanged.
fn demangled(name: &str) -> Arc<str> {
    name.into()
}

#[cfg(test)]
mod tests {
    use super::super::code::{CodeMap, Source};
    use super::*;

    /// Names follow the current mappings: another library at the same address has its own names, and so has the same library elsewhere. A return
    /// address is not the same frame as an instruction at that address.
    #[test]
    fn another_library() {
        let book = Book::default();
        let mut namer = NativeNamer::new(book.clone());
        let image =
            |path: &str| Arc::new(CodeImage::new(path.as_ref(), Source::Bytes(Vec::new()), Vec::new()));
        let (a, b) = (image("/lib/a.so"), image("/lib/b.so"));
        let mut shown = |image: &Arc<CodeImage>, bias, addresses: &[u64]| {
            let mapped = Mapped { start: 0x1000, end: 0x2000, bias, image: Arc::clone(image) };
            book.set(7, Arc::new(CodeMap { read_ns: 1, mappings: vec![mapped] }));
            let frames = namer.stack(7, 1, 0, addresses);
            frames
                .iter()
                .map(|native| (native.frame.name.to_string(), native.frame.address))
                .collect::<Vec<_>>()
        };
        let as_in = |name: &str, address| (name.to_owned(), address);
        let stack = [0x1010, 0x1021];
        assert_eq!(shown(&a, 0x1000, &stack), [as_in("a.so+0x10", 0x1010), as_in("a.so+0x20", 0x1021)]);
        assert_eq!(shown(&b, 0x1000, &stack), [as_in("b.so+0x10", 0x1010), as_in("b.so+0x20", 0x1021)]);
        assert_eq!(shown(&b, 0x800, &stack), [as_in("b.so+0x810", 0x1010), as_in("b.so+0x820", 0x1021)]);
        assert_eq!(shown(&b, 0x800, &[0x1020]), [as_in("b.so+0x820", 0x1020)]);
        assert_eq!(Arc::strong_count(&a), 1, "a library that is gone is kept open");
    }
}
