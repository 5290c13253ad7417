//! Reduced data for an image whose event sites are not known: only the durations of GC work.
//!
//! Functions are found by their symbols. Compilers split and clone them, so `gc_rest.part.0` is as good as `gc_rest`, and
//! better if both exist: the plain one then only decides whether to call the part. Old USDT probes (up to 3.2 in Debian's
//! builds) bracket marking and sweeping. Those that 4.1 introduced bracket each pause, wherever the compiler has copied
//! its ends, and are therefore preferred to functions.

use gctrace_common::event::WorkPhase;

use super::RubyVersion;
use super::code::Code;
use super::emulation::entry;
use crate::{
    address::{FileOffset, Svma},
    elf::{ElfImage, LoadSegment, SymbolTable},
};

/// How GC work is observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The VM's own event sites: everything.
    Sites,
    /// The USDT probes at both ends of a pause (`gc__enter` and `gc__exit`, 4.1 and later).
    UsdtPauses,
    /// Function bodies by symbol.
    Functions,
    /// The USDT probes around marking and sweeping.
    Usdt,
}

/// All methods, in order of preference.
pub const METHODS: [Method; 4] = [Method::Sites, Method::UsdtPauses, Method::Functions, Method::Usdt];
/// The methods that use USDT probes.
pub const USDT_METHODS: [Method; 2] = [Method::UsdtPauses, Method::Usdt];

impl Method {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sites => "sites",
            Self::UsdtPauses => "usdt_pauses",
            Self::Functions => "functions",
            Self::Usdt => "usdt",
        }
    }

    /// Whether cycles are known, and what their events say: why they began, the heap, allocation.
    pub fn sees_cycles(self) -> bool {
        self == Self::Sites
    }

    /// Whether all time in the GC is known. Functions and the old USDT probes time parts of it, which may nest.
    pub fn times_pauses(self) -> bool {
        matches!(self, Self::Sites | Self::UsdtPauses)
    }

    /// The data that the method lacks.
    pub fn misses(self) -> Option<&'static str> {
        match self {
            Self::Sites => None,
            Self::UsdtPauses => {
                Some("only how long each pause is: no cycles, reasons, GC.stat or sample sets")
            }
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

/// The end of a phase at which a probe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The phase begins.
    Begin,
    /// The phase ends.
    End,
    /// The phase ends when the function that starts here returns.
    Return,
}

/// A fallback probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseProbe {
    /// The phase.
    pub phase: WorkPhase,
    /// Which end of the phase.
    pub edge: Edge,
    /// Stated address.
    pub address: Svma,
    /// Whether the kernel emulates the instruction there instead of single-stepping it.
    pub emulated: bool,
    /// File offset of that address.
    pub file_offset: FileOffset,
    /// File offset of the word in which the kernel counts the probe's users, for USDT.
    pub semaphore: Option<FileOffset>,
}

/// The probes of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FallbackProbes {
    /// The method that they belong to.
    pub method: Method,
    /// Never empty.
    pub probes: Vec<PhaseProbe>,
}

/// The instruction of a USDT probe on x86-64.
const NOP: u8 = 0x90;

/// A major and minor release.
type Series = (u16, u16);

/// First and last series, phase, name in the source.
const FUNCTIONS: [(Series, Series, WorkPhase, &str); 4] = [
    ((2, 6), (9, 9), WorkPhase::Start, "gc_start"),
    ((2, 6), (9, 9), WorkPhase::Rest, "gc_rest"),
    ((3, 2), (9, 9), WorkPhase::Continue, "gc_continue"),
    ((2, 6), (3, 1), WorkPhase::Continue, "gc_sweep_step"),
];

/// A phase and the USDT probes at its ends.
type Ends = (WorkPhase, &'static str, &'static str);

/// Both ends of each pair of USDT probes (probes.d).
const USDT: [Ends; 2] = [
    (WorkPhase::Mark, "gc__mark__begin", "gc__mark__end"),
    (WorkPhase::Sweep, "gc__sweep__begin", "gc__sweep__end"),
];
/// The same for 4.1 and later. `gc_enter` starts with the first probe and `gc_exit` with the second (gc/default/default.c).
const USDT_PAUSES: [Ends; 1] = [(WorkPhase::Pause, "gc__enter", "gc__exit")];

impl FallbackProbes {
    /// Number of probes that the kernel single-steps.
    pub fn slow(&self) -> usize {
        self.probes.iter().filter(|probe| !probe.emulated).count()
    }

    /// Probes by the functions' symbols; `gc_start` must be among them, and each must be the start of a function in the unwind
    /// table. They are at the first instruction that the kernel emulates, if it serves as well as the very first.
    pub fn functions(version: RubyVersion, image: &ElfImage) -> Option<Self> {
        let (symbols, segments) = (image.symbols(), image.segments());
        let code = Code::new(image);
        let series = (version.major, version.minor);
        let mut probes = Vec::new();
        for (from, to, phase, name) in FUNCTIONS {
            if !(from..=to).contains(&series) {
                continue;
            }
            for address in bodies(symbols, name) {
                let function = image.function_index(address)?;
                // A return probe anywhere but at a function entry would replace something other than the return address.
                if !image.functions().get(function).is_some_and(|of| of.start == address && of.entry) {
                    return None;
                }
                let (address, emulated) = entry(&code.body(function), address);
                let file_offset = in_file(segments, address, true)?;
                let probe =
                    |edge| PhaseProbe { phase, edge, address, emulated, file_offset, semaphore: None };
                probes.extend([probe(Edge::Return), probe(Edge::Begin)]);
            }
        }
        let complete = probes.iter().any(|probe| probe.phase == WorkPhase::Start);
        complete.then_some(Self { method: Method::Functions, probes })
    }

    /// Probes at the image's own USDT probes around marking and sweeping.
    pub fn usdt(image: &ElfImage) -> Option<Self> {
        Some(Self { method: Method::Usdt, probes: usdt_probes(image, &USDT)? })
    }

    /// Probes at the image's own USDT probes around each pause.
    pub fn usdt_pauses(image: &ElfImage) -> Option<Self> {
        Some(Self { method: Method::UsdtPauses, probes: usdt_probes(image, &USDT_PAUSES)? })
    }
}

/// All probes of these phases; `None` unless both ends of each phase exist.
fn usdt_probes(image: &ElfImage, wanted: &[Ends]) -> Option<Vec<PhaseProbe>> {
    let mut probes = Vec::new();
    for &(phase, begin, end) in wanted {
        let named = |name: &str, edge| -> Option<Vec<PhaseProbe>> {
            let found = image.usdt().iter().filter(|probe| probe.provider == "ruby" && probe.name == name);
            found
                .map(|probe| {
                    let semaphore = match probe.semaphore {
                        Some(word) => Some(in_file(image.segments(), word, false)?),
                        None => None,
                    };
                    let file_offset = in_file(image.segments(), probe.address, true)?;
                    // `sys/sdt.h` emits a one-byte nop; anything else is a damaged file.
                    if image.read_bytes(probe.address, 1)? != [NOP] {
                        return None;
                    }
                    Some(PhaseProbe {
                        phase,
                        edge,
                        address: probe.address,
                        emulated: true,
                        file_offset,
                        semaphore,
                    })
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
    Some(probes)
}

/// Addresses of the code of a function: of its parts if it was split, else of the function itself.
fn bodies(symbols: &SymbolTable, name: &str) -> Vec<Svma> {
    let mut plain = Vec::new();
    let mut parts = Vec::new();
    for symbol in symbols.iter() {
        let Some(rest) = symbol.name.strip_prefix(name) else { continue };
        // A rarely executed part, to which other parts jump: it is not a function.
        if rest.contains(".cold") {
            continue;
        }
        if rest.is_empty() || rest.starts_with(".isra.") || rest.starts_with(".constprop.") {
            plain.push(symbol.address);
        } else if rest.starts_with(".part.") {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Rarely executed parts of a function are entered by jumps: the word on the stack is not a return address there.
    #[test]
    fn cold_parts() {
        let names = [
            "gc_start",
            "gc_start.cold",
            "gc_start.isra.0.cold",
            "gc_marks.constprop.0",
            "gc_marks.constprop.0.cold",
            "gc_rest",
            "gc_rest.part.0",
            "gc_rest.part.0.cold",
        ];
        let (mut strings, mut records) = (vec![0_u8], Vec::new());
        for (name, address) in names.iter().zip((0x1000_u64..).step_by(0x100)) {
            records.extend_from_slice(&(strings.len() as u32).to_le_bytes());
            // A local function, in section 1.
            records.extend_from_slice(&[2, 0, 1, 0]);
            records.extend_from_slice(&address.to_le_bytes());
            records.extend_from_slice(&16_u64.to_le_bytes());
            strings.extend_from_slice(name.as_bytes());
            strings.push(0);
        }
        let symbols = SymbolTable::parse(&records, strings);
        assert_eq!(bodies(&symbols, "gc_start"), [Svma(0x1000)]);
        assert_eq!(bodies(&symbols, "gc_marks"), [Svma(0x1300)]);
        assert_eq!(bodies(&symbols, "gc_rest"), [Svma(0x1600)]);
    }
}
