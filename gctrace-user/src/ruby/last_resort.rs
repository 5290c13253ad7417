//! What can still be told of an image whose event sites are not known: how long GC work takes, and nothing else.
//!
//! Functions are found by their symbols. Compilers split and clone them, so `gc_rest.part.0` is as good as `gc_rest`, and
//! better where both exist: the plain one then only decides whether to call it. Old USDT probes (up to 3.2 in Debian's
//! builds) bracket marking and sweeping.

use gctrace_common::event::Phase;

use super::RubyVersion;
use crate::{
    address::{FileOffset, Svma},
    elf::{ElfImage, LoadSegment, SymbolTable},
};

/// How GC work is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The VM's own event sites: everything.
    Sites,
    /// Function bodies by symbol.
    Functions,
    /// USDT probes.
    Usdt,
}

/// All methods, in order of preference.
pub const METHODS: [Method; 3] = [Method::Sites, Method::Functions, Method::Usdt];

impl Method {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sites => "sites",
            Self::Functions => "functions",
            Self::Usdt => "usdt",
        }
    }

    /// What it cannot tell.
    pub fn misses(self) -> Option<&'static str> {
        match self {
            Self::Sites => None,
            Self::Functions => Some(
                "only how long gc_start, gc_rest and gc_continue run: no cycles, reasons, GC.stat or sample sets; \
                 code of these functions that the compiler has copied elsewhere is not seen",
            ),
            Self::Usdt => Some(
                "only marking and sweeping inside GC.start and lazy sweeps: no cycles, reasons, GC.stat or sample \
                 sets, no incremental marking",
            ),
        }
    }
}

/// Which end of a phase a probe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// It begins.
    Begin,
    /// It ends.
    End,
    /// It ends when the function that begins here returns.
    Return,
}

/// A probe of the last resort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseProbe {
    /// What it is an end of.
    pub phase: Phase,
    /// Which end.
    pub edge: Edge,
    /// Where, stated.
    pub address: Svma,
    /// Where in the file.
    pub file_offset: FileOffset,
    /// File offset of the word in which the kernel counts the probe's users, for USDT.
    pub semaphore: Option<FileOffset>,
}

/// The probes of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastResort {
    /// How.
    pub method: Method,
    /// Never empty.
    pub probes: Vec<PhaseProbe>,
}

/// The instruction of a USDT probe on x86-64.
const NOP: u8 = 0x90;

/// A major and minor release.
type Series = (u16, u16);

/// First and last series, phase, name in the source.
const FUNCTIONS: [(Series, Series, Phase, &str); 4] = [
    ((2, 6), (9, 9), Phase::Start, "gc_start"),
    ((2, 6), (9, 9), Phase::Rest, "gc_rest"),
    ((3, 2), (9, 9), Phase::Continue, "gc_continue"),
    ((2, 6), (3, 1), Phase::Continue, "gc_sweep_step"),
];

/// Both ends of each pair of USDT probes (probes.d).
const USDT: [(Phase, &str, &str); 2] =
    [(Phase::Mark, "gc__mark__begin", "gc__mark__end"), (Phase::Sweep, "gc__sweep__begin", "gc__sweep__end")];

impl LastResort {
    /// By the functions' symbols; `gc_start` must be among them, and each must begin a function of the unwind table.
    pub fn functions(version: RubyVersion, image: &ElfImage) -> Option<Self> {
        let (symbols, segments) = (image.symbols(), image.segments());
        let series = (version.major, version.minor);
        let mut probes = Vec::new();
        for (from, to, phase, name) in FUNCTIONS {
            if !(from..=to).contains(&series) {
                continue;
            }
            for address in bodies(symbols, name) {
                let file_offset = in_file(segments, address, true)?;
                let extent = image.functions().get(image.function_index(address)?)?;
                if extent.start != address {
                    return None;
                }
                let probe = |edge| PhaseProbe { phase, edge, address, file_offset, semaphore: None };
                probes.extend([probe(Edge::Return), probe(Edge::Begin)]);
            }
        }
        let complete = probes.iter().any(|probe| probe.phase == Phase::Start);
        complete.then_some(Self { method: Method::Functions, probes })
    }

    /// By the image's own USDT probes; both ends of a phase must be there.
    pub fn usdt(image: &ElfImage) -> Option<Self> {
        let mut probes = Vec::new();
        for (phase, begin, end) in USDT {
            let named = |name: &str, edge| -> Option<Vec<PhaseProbe>> {
                let found =
                    image.usdt().iter().filter(|probe| probe.provider == "ruby" && probe.name == name);
                found
                    .map(|probe| {
                        let semaphore = match probe.semaphore {
                            Some(word) => Some(in_file(image.segments(), word, false)?),
                            None => None,
                        };
                        let file_offset = in_file(image.segments(), probe.address, true)?;
                        // `sys/sdt.h` leaves a one-byte nop; anything else is a damaged file.
                        if image.read_bytes(probe.address, 1)? != [NOP] {
                            return None;
                        }
                        Some(PhaseProbe { phase, edge, address: probe.address, file_offset, semaphore })
                    })
                    .collect()
            };
            let (begins, ends) = (named(begin, Edge::Begin)?, named(end, Edge::End)?);
            if begins.is_empty() || ends.is_empty() {
                return None;
            }
            probes.extend(ends);
            probes.extend(begins);
        }
        Some(Self { method: Method::Usdt, probes })
    }
}

/// Where the code of a function is: of its parts if it was split, else of the function itself.
fn bodies(symbols: &SymbolTable, name: &str) -> Vec<Svma> {
    let mut plain = Vec::new();
    let mut parts = Vec::new();
    for symbol in symbols.iter() {
        let Some(rest) = symbol.name.strip_prefix(name) else { continue };
        if rest.is_empty() || rest.starts_with(".isra.") || rest.starts_with(".constprop.") {
            plain.push(symbol.address);
        } else if rest.starts_with(".part.") && !rest.contains(".cold") {
            parts.push(symbol.address);
        }
    }
    let mut bodies = if parts.is_empty() { plain } else { parts };
    bodies.sort_unstable();
    bodies.dedup();
    bodies
}

fn in_file(segments: &[LoadSegment], address: Svma, executable: bool) -> Option<FileOffset> {
    let segment = segments.iter().find(|segment| {
        segment.executable == executable
            && address.0.checked_sub(segment.address.0).is_some_and(|at| at < segment.file_size)
    })?;
    Some(FileOffset(segment.offset.0 + (address.0 - segment.address.0)))
}
