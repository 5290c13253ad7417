//! Function extents from `.eh_frame`. Unlike symbols, the section is needed at run time, so strip keeps it, and it also
//! covers static functions.

use std::collections::HashMap;
use std::ops::Range;

use gimli::{CfaRule, CieOrFde, EhFrame, EndianSlice, LittleEndian, UnwindContext, UnwindSection};

use super::ElfError;
use super::headers::Machine;
use crate::address::Svma;

/// More functions than any Ruby has; bounds the memory that a hostile file can request.
const MAX_FUNCTIONS: usize = 1 << 20;
/// Compilers share a handful of common information entries among all functions.
const MAX_CACHED_CIES: usize = 1 << 12;
/// Maximum bytes of a common information entry, whose instructions run for every function that uses it. Compilers emit about 20.
pub(super) const MAX_CIE: usize = 512;
/// State of the stack at the entry of a function: the DWARF number of the stack pointer, and its distance to the
/// canonical frame address. On x86-64 the caller has pushed the return address.
const fn at_entry(machine: Machine) -> (gimli::Register, i64) {
    match machine {
        Machine::X86_64 => (gimli::Register(7), 8),
        Machine::Aarch64 => (gimli::Register(31), 0),
    }
}

/// A range of code with its own frame description entry: a function, or the part of one that the compiler moved
/// to `.text.unlikely`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionRange {
    /// First address.
    pub start: Svma,
    /// First address after it.
    pub end: Svma,
    /// Whether the first unwind row has the shape of a function entry (on x86-64 CFA = rsp + 8: only the return
    /// address is on the stack). Parts that are entered by jumps mostly start inside a frame.
    pub entry: bool,
}

impl FunctionRange {
    /// Whether the address lies inside.
    pub fn contains(&self, address: Svma) -> bool {
        self.start <= address && address < self.end
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.end.0 - self.start.0
    }
}

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Reads all function extents inside `text`, sorted and without overlaps.
pub fn function_ranges<'a>(
    eh_frame: &'a [u8],
    eh_frame_address: u64,
    text: Range<u64>,
    machine: Machine,
) -> Result<Vec<FunctionRange>, ElfError> {
    let section = EhFrame::new(eh_frame, LittleEndian);
    let bases = gimli::BaseAddresses::default().set_eh_frame(eh_frame_address).set_text(text.start);
    let malformed = |error: gimli::Error| ElfError::malformed(".eh_frame", error.to_string());

    let mut functions = Vec::new();
    let mut cies: HashMap<usize, gimli::CommonInformationEntry<Slice<'a>>> = HashMap::new();
    let mut context = UnwindContext::new();
    let mut entries = section.entries(&bases);
    while let Some(entry) = entries.next().map_err(malformed)? {
        let CieOrFde::Fde(partial) = entry else { continue };
        let get_cie =
            |section: &EhFrame<Slice<'a>>, bases: &gimli::BaseAddresses, offset: gimli::EhFrameOffset| {
                if let Some(cie) = cies.get(&offset.0) {
                    return Ok(cie.clone());
                }
                let cie = section.cie_from_offset(bases, offset)?;
                if cies.len() < MAX_CACHED_CIES {
                    cies.insert(offset.0, cie.clone());
                }
                Ok(cie)
            };
        let fde = partial.parse(get_cie).map_err(malformed)?;
        if fde.cie().entry_len() > MAX_CIE {
            return Err(ElfError::malformed(".eh_frame", "instructions of many functions are too long"));
        }
        let start = fde.initial_address();
        let Some(end) = start.checked_add(fde.len()) else { continue };
        if start < text.start || end > text.end || start == end {
            continue;
        }
        if functions.len() == MAX_FUNCTIONS {
            return Err(ElfError::malformed(".eh_frame", "too many entries"));
        }
        let entry = begins_like_a_function(&fde, &section, &bases, &mut context, at_entry(machine));
        functions.push(FunctionRange { start: Svma(start), end: Svma(end), entry });
    }
    functions.sort_by_key(|f| (f.start, std::cmp::Reverse(f.end)));
    drop_overlaps(&mut functions);
    Ok(functions)
}

fn begins_like_a_function(
    fde: &gimli::FrameDescriptionEntry<Slice<'_>>,
    section: &EhFrame<Slice<'_>>,
    bases: &gimli::BaseAddresses,
    context: &mut UnwindContext<usize>,
    (pointer, distance): (gimli::Register, i64),
) -> bool {
    let Ok(mut rows) = fde.rows(section, bases, context) else { return false };
    let Ok(Some(row)) = rows.next_row() else { return false };
    matches!(row.cfa(), CfaRule::RegisterAndOffset { register, offset } if (*register, *offset) == (pointer, distance))
}

/// Keeps the first of two overlapping ranges; the input is sorted by start.
fn drop_overlaps(functions: &mut Vec<FunctionRange>) {
    let mut covered = Svma(0);
    functions.retain(|function| {
        let keep = function.start >= covered;
        if keep {
            covered = function.end;
        }
        keep
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> FunctionRange {
        FunctionRange { start: Svma(start), end: Svma(end), entry: true }
    }

    /// Duplicate and nested entries are dropped, adjacent ones are kept.
    #[test]
    fn overlaps() {
        let mut functions = vec![range(0, 8), range(0, 8), range(4, 6), range(8, 9), range(20, 30)];
        drop_overlaps(&mut functions);
        assert_eq!(functions, [range(0, 8), range(8, 9), range(20, 30)]);
    }

    /// Arbitrary bytes are an error or an empty list, never a panic.
    #[test]
    fn garbage() {
        let mut seed = 1_u64;
        for len in 0..400 {
            let mut next = || {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 56) as u8
            };
            let bytes: Vec<u8> = (0..len).map(|_| next() & next()).collect();
            let _ = function_ranges(&bytes, 0x1000, 0..u64::MAX, Machine::X86_64);
        }
    }
}
