//! Names of kernel functions, from `/proc/kallsyms`. Their addresses are never output: they are a secret of the host (they reveal where
//! the kernel is loaded), and profiles are passed on.

use std::{collections::HashMap, sync::Arc};

use crate::model::stack::{Frame, FrameKind};

/// Maximum number of remembered addresses; all are forgotten above it.
const MAX_FRAMES: usize = 1 << 14;

/// Names kernel frames.
#[derive(Debug, Default)]
pub struct KernelNamer {
    symbols: KernelSymbols,
    /// By address.
    frames: HashMap<u64, Arc<Frame>>,
    /// By name: a function always has the same frame.
    by_name: HashMap<Arc<str>, Arc<Frame>>,
}

impl KernelNamer {
    /// Reads the kernel's symbols now, instead of at the first frame.
    pub fn load(&mut self) {
        self.symbols.load();
    }

    /// The frames of a kernel stack, leaf first. Consecutive frames without a name become one.
    pub fn stack(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        let mut frames: Vec<Arc<Frame>> = Vec::with_capacity(addresses.len());
        for &address in addresses {
            let frame = self.frame(address);
            let unnamed_again = &*frame.name == UNNAMED && frames.last() == Some(&frame);
            if !unnamed_again {
                frames.push(frame);
            }
        }
        frames
    }

    fn frame(&mut self, address: u64) -> Arc<Frame> {
        if let Some(frame) = self.frames.get(&address) {
            return Arc::clone(frame);
        }
        if self.frames.len() >= MAX_FRAMES {
            self.frames.clear();
        }
        let name = self.symbols.name(address);
        let frame = self.by_name.entry(name).or_insert_with_key(|name| {
            let (kind, name) = (FrameKind::Kernel, Arc::clone(name));
            Arc::new(Frame { kind, name, file: None, line: 0, first_line: 0, address: 0 })
        });
        let frame = Arc::clone(frame);
        self.frames.insert(address, Arc::clone(&frame));
        frame
    }
}

/// Name of frames without a symbol.
const UNNAMED: &str = "[kernel]";

/// Maximum number of symbols; more than any kernel has.
const MAX_SYMBOLS: usize = 1 << 20;

/// The kernel's functions; read when the first name is needed.
#[derive(Debug, Default)]
pub(super) struct KernelSymbols {
    read: bool,
    /// Address, and the start and length of the name in `names`; sorted.
    symbols: Vec<(u64, u32, u16)>,
    names: String,
}

impl KernelSymbols {
    /// Name of the function at or before a return address.
    pub(super) fn name(&mut self, address: u64) -> Arc<str> {
        self.load();
        self.find(address).map_or_else(|| UNNAMED.into(), Into::into)
    }

    /// Reads the kernel's symbols unless already done; takes some tens of milliseconds.
    pub(super) fn load(&mut self) {
        if !self.read {
            self.read = true;
            match std::fs::read_to_string("/proc/kallsyms") {
                Ok(text) => self.parse(&text),
                Err(error) => log::warn!("/proc/kallsyms: {error}"),
            }
            if self.symbols.is_empty() {
                log::warn!(
                    "kernel frames have no names: /proc/kallsyms hides the addresses (sysctl kernel.kptr_restrict=1 or \
                     less, and CAP_SYSLOG, let it show them)"
                );
            }
        }
    }

    fn find(&self, address: u64) -> Option<&str> {
        // Frames are return addresses, except the leaf, whose function starts at or before the address.
        let index = self.symbols.partition_point(|(at, ..)| *at <= address).checked_sub(1)?;
        let (_, start, len) = self.symbols[index];
        self.names.get(start as usize..start as usize + usize::from(len))
    }

    fn parse(&mut self, text: &str) {
        for line in text.lines() {
            let mut fields = line.split_ascii_whitespace();
            let (Some(address), Some(kind), Some(name)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let code = matches!(kind, "t" | "T" | "w" | "W");
            let Some(address) = u64::from_str_radix(address, 16).ok().filter(|a| code && *a != 0) else {
                continue;
            };
            let (Ok(start), Ok(len)) = (u32::try_from(self.names.len()), u16::try_from(name.len())) else {
                continue;
            };
            if self.symbols.len() == MAX_SYMBOLS {
                break;
            }
            self.names.push_str(name);
            self.symbols.push((address, start, len));
        }
        // If an address has several names, the stable sort keeps the one that the kernel lists first.
        self.symbols.sort_by_key(|(address, ..)| *address);
        self.symbols.dedup_by_key(|(address, ..)| *address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data symbols are not functions, hidden addresses are ignored, and the function before an address covers it.
    #[test]
    fn lookup() {
        let mut symbols = KernelSymbols { read: true, ..KernelSymbols::default() };
        symbols.parse("ff20 T second\nff10 t first\nff10 t alias\nff30 D data\n0000 T hidden\nbad\nff40 T third\t[mod]\n");
        assert_eq!(&*symbols.name(0xff10), "first");
        assert_eq!(&*symbols.name(0xff1f), "first");
        assert_eq!(&*symbols.name(0xff3f), "second");
        assert_eq!(&*symbols.name(0xffff), "third");
        assert_eq!(&*symbols.name(0xff0f), "[kernel]");
    }

    fn names(symbols: KernelSymbols, addresses: &[u64]) -> Vec<String> {
        let mut namer = KernelNamer { symbols, ..KernelNamer::default() };
        let frames = namer.stack(addresses);
        assert!(frames.iter().all(|frame| frame.address == 0), "an address is exported");
        frames.iter().map(|frame| frame.name.to_string()).collect()
    }

    /// Frames have names but no addresses; if the kernel hides its symbols, a stack is one frame.
    #[test]
    fn stacks() {
        let mut symbols = KernelSymbols { read: true, ..KernelSymbols::default() };
        symbols.parse("ff20 T second\nff10 t first\n");
        assert_eq!(
            names(symbols, &[0xff11, 0xff12, 0xff20, 0x1, 0x2]),
            ["first", "first", "second", "[kernel]"]
        );
        let hidden = KernelSymbols { read: true, ..KernelSymbols::default() };
        assert_eq!(names(hidden, &[0xffff_ffff_8100_0130, 0xffff_ffff_8100_0140]), ["[kernel]"]);
    }
}
