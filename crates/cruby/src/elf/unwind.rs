//! `.eh_frame` compiled into rows that the kernel side can search and evaluate: one rule for the canonical frame address
//! (CFA) and one for `rbp`. On x86-64 a walk needs nothing else: callers of C functions are found by `rsp` or `rbp`.

use std::collections::HashMap;
use std::ops::Range;

use gctrace_common::unwind::UnwindRow;
use gimli::{
    CfaRule, CieOrFde, EhFrame, Encoding, EndianSlice, Format, LittleEndian, Operation, Register,
    RegisterRule, UnwindContext, UnwindExpression, UnwindSection, UnwindTableRow,
};

use super::frames::MAX_CIE;
use super::headers::{Headers, Machine};
use super::{ElfError, ReadAt};
use crate::address::Svma;

/// Maximum bytes of the section: a program with 64 MiB of unwind information has about 4 GiB.
const MAX_SECTION: u64 = 64 << 20;
/// Maximum number of rows of one image; an image with more is not compiled. libruby has 60 thousand, a browser several million.
const MAX_ROWS: usize = 900_000;
const MAX_FUNCTIONS: usize = 1 << 20;
/// Compilers share a handful of common information entries among all functions.
const MAX_CACHED_CIES: usize = 1 << 12;

const WHAT: &str = ".eh_frame";
/// DWARF numbers of registers: System V ABI for AMD64, figure 3.36.
const RBP: Register = Register(6);
const RSP: Register = Register(7);
const RETURN_ADDRESS: Register = Register(16);
const ENCODING: Encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// How to find the caller of each instruction of an image.
#[derive(Debug, PartialEq, Eq)]
pub struct UnwindTable {
    /// The stated address to which the rows' addresses are relative.
    pub base: Svma,
    /// Sorted by address; neighbouring rows differ in their rules.
    pub rows: Vec<UnwindRow>,
}

impl UnwindTable {
    /// Compiles the table of an x86-64 image.
    pub fn read(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let headers = Headers::read(source)?;
        if headers.machine != Machine::X86_64 {
            return Err(ElfError::Unsupported("native stacks are unwound on x86-64 only"));
        }
        let code: Vec<Range<u64>> = headers
            .segments
            .iter()
            .filter(|segment| segment.executable)
            .map(|segment| segment.address.0..segment.address.0.saturating_add(segment.memory_size))
            .collect();
        let section = headers.section(WHAT).ok_or(ElfError::MissingSection(WHAT))?;
        let bytes = section.read(source, WHAT, MAX_SECTION)?;
        Self::compile(&bytes, section.address, &code)
    }

    /// Compiles the bytes of an `.eh_frame` section; functions outside the ranges of `code` are skipped.
    pub(super) fn compile(bytes: &[u8], address: u64, code: &[Range<u64>]) -> Result<Self, ElfError> {
        let base = code.iter().map(|range| range.start).min().unwrap_or(0);
        let mut compiler = Compiler {
            section: EhFrame::new(bytes, LittleEndian),
            bases: gimli::BaseAddresses::default().set_eh_frame(address).set_text(base),
            context: UnwindContext::new(),
            base,
            rows: Vec::with_capacity(bytes.len() / 6),
            functions: Vec::new(),
        };
        compiler.functions(code)?;
        Ok(Self { base: Svma(base), rows: compiler.finish() })
    }

    /// The row for an instruction.
    pub fn row(&self, address: Svma) -> Option<UnwindRow> {
        let pc = u32::try_from(address.0.checked_sub(self.base.0)?).ok()?;
        let index = self.rows.partition_point(|row| row.pc <= pc).checked_sub(1)?;
        Some(self.rows[index])
    }
}

/// A function and its rows.
struct Function {
    pcs: Range<u32>,
    rows: Range<u32>,
}

struct Compiler<'a> {
    section: EhFrame<Slice<'a>>,
    bases: gimli::BaseAddresses,
    context: UnwindContext<usize>,
    base: u64,
    rows: Vec<UnwindRow>,
    functions: Vec<Function>,
}

impl<'a> Compiler<'a> {
    fn functions(&mut self, code: &[Range<u64>]) -> Result<(), ElfError> {
        let malformed = |error: gimli::Error| ElfError::malformed(WHAT, error.to_string());
        let mut cies: HashMap<usize, gimli::CommonInformationEntry<Slice<'a>>> = HashMap::new();
        let section = self.section;
        let bases = self.bases.clone();
        let mut entries = section.entries(&bases);
        while let Some(entry) = entries.next().map_err(malformed)? {
            let CieOrFde::Fde(partial) = entry else { continue };
            let fde = partial
                .parse(|section, bases, offset| {
                    if let Some(cie) = cies.get(&offset.0) {
                        return Ok(cie.clone());
                    }
                    let cie = section.cie_from_offset(bases, offset)?;
                    if cies.len() < MAX_CACHED_CIES {
                        cies.insert(offset.0, cie.clone());
                    }
                    Ok(cie)
                })
                .map_err(malformed)?;
            if fde.cie().entry_len() > MAX_CIE {
                return Err(ElfError::malformed(WHAT, "instructions of many functions are too long"));
            }
            let start = fde.initial_address();
            let Some(end) = start.checked_add(fde.len()) else { continue };
            if start == end || !code.iter().any(|range| range.start <= start && end <= range.end) {
                continue;
            }
            let Ok(end) = u32::try_from(end - self.base) else { continue };
            if self.functions.len() == MAX_FUNCTIONS || self.rows.len() > MAX_ROWS {
                return Err(ElfError::malformed(WHAT, "too many entries"));
            }
            self.function((start - self.base) as u32..end, &fde);
        }
        Ok(())
    }

    /// Adds the rows of one function. After its first malformed instruction the rest of the function is `UNSUPPORTED`.
    fn function(&mut self, pcs: Range<u32>, fde: &gimli::FrameDescriptionEntry<Slice<'a>>) {
        let first = self.rows.len() as u32;
        let signal = fde.is_signal_trampoline();
        let section = self.section;
        let mut next = pcs.start;
        let mut whole = false;
        if let Ok(mut table) = fde.rows(&section, &self.bases, &mut self.context) {
            loop {
                let row = match table.next_row() {
                    Ok(Some(row)) => row,
                    Ok(None) => {
                        whole = true;
                        break;
                    }
                    Err(_) => break,
                };
                let start = row.start_address().checked_sub(self.base).and_then(|pc| u32::try_from(pc).ok());
                let Some(pc) = start.filter(|pc| (next..pcs.end).contains(pc)) else { break };
                if self.rows.len() > MAX_ROWS {
                    break;
                }
                next = pc;
                let rules = if signal { signal_rules(row, &section) } else { rules(row, &section) };
                self.rows.push(UnwindRow { pc, ..rules });
            }
        }
        if !whole {
            self.rows.push(UnwindRow { pc: next, kind: UnwindRow::UNSUPPORTED, ..UnwindRow::default() });
        }
        self.functions.push(Function { pcs, rows: first..self.rows.len() as u32 });
    }

    /// Sorts the functions, drops overlapping ones (the first is kept) and merges neighbouring rows with equal rules.
    fn finish(mut self) -> Vec<UnwindRow> {
        self.functions.sort_by_key(|function| (function.pcs.start, std::cmp::Reverse(function.pcs.end)));
        let mut rows: Vec<UnwindRow> = Vec::with_capacity(self.rows.len() + self.functions.len() / 2);
        let mut covered = 0;
        for function in &self.functions {
            if function.pcs.start < covered {
                continue;
            }
            if function.pcs.start > covered {
                push(&mut rows, UnwindRow { pc: covered, ..UnwindRow::default() });
            }
            for &row in &self.rows[function.rows.start as usize..function.rows.end as usize] {
                push(&mut rows, row);
            }
            covered = function.pcs.end;
        }
        push(&mut rows, UnwindRow { pc: covered, ..UnwindRow::default() });
        rows.shrink_to_fit();
        rows
    }
}

/// Appends a row; it replaces an earlier one for the same address.
fn push(rows: &mut Vec<UnwindRow>, row: UnwindRow) {
    if rows.last().is_some_and(|last| last.pc == row.pc) {
        rows.pop();
    }
    if rows.last().is_none_or(|last| (last.cfa, last.kind, last.rbp) != (row.cfa, row.kind, row.rbp)) {
        rows.push(row);
    }
}

const UNSUPPORTED: UnwindRow =
    UnwindRow { pc: 0, cfa: 0, kind: UnwindRow::UNSUPPORTED, rbp: UnwindRow::RBP_LOST };

fn rules(row: &UnwindTableRow<usize>, section: &EhFrame<Slice<'_>>) -> UnwindRow {
    match row.register(RETURN_ADDRESS) {
        Some(RegisterRule::Offset(-8)) => {}
        Some(RegisterRule::Undefined) => return UnwindRow { kind: UnwindRow::OUTERMOST, ..UNSUPPORTED },
        _ => return UNSUPPORTED,
    }
    // The stack pointer of the caller is the CFA unless there is a rule for it.
    if row.register(RSP).is_some_and(|rule| rule != RegisterRule::ValOffset(0)) {
        return UNSUPPORTED;
    }
    let (kind, cfa) = match row.cfa() {
        CfaRule::RegisterAndOffset { register: RSP, offset } => (UnwindRow::RSP, words(*offset)),
        CfaRule::RegisterAndOffset { register: RBP, offset } => (UnwindRow::RBP, words(*offset)),
        CfaRule::RegisterAndOffset { .. } => return UNSUPPORTED,
        CfaRule::Expression(expression) => match cfa_expression(*expression, section) {
            Some((kind, cfa)) => (kind, Some(cfa)),
            None => return UNSUPPORTED,
        },
    };
    let Some(cfa) = cfa else { return UNSUPPORTED };
    let rbp = match row.register(RBP) {
        None | Some(RegisterRule::SameValue) => UnwindRow::RBP_SAME,
        Some(RegisterRule::Offset(offset)) => words(offset)
            .and_then(|words| i8::try_from(words).ok())
            .filter(|words| *words < 0)
            .unwrap_or(UnwindRow::RBP_LOST),
        Some(RegisterRule::Expression(expression)) => match operations(expression, section).as_deref() {
            Some([Operation::RegisterOffset { register: RBP, offset: 0, .. }]) => UnwindRow::RBP_AT_RBP,
            _ => UnwindRow::RBP_LOST,
        },
        Some(_) => UnwindRow::RBP_LOST,
    };
    UnwindRow { pc: 0, cfa, kind, rbp }
}

/// Bytes as whole words of 8 bytes; `None` if they are not a multiple of 8 or do not fit.
fn words(bytes: i64) -> Option<i16> {
    (bytes % 8 == 0).then(|| i16::try_from(bytes / 8).ok())?
}

/// The return trampoline of a signal handler: the interrupted registers must be at their places in `struct ucontext`
/// (arch/x86/include/uapi/asm/sigcontext.h), the only layout that the kernel side knows.
fn signal_rules(row: &UnwindTableRow<usize>, section: &EhFrame<Slice<'_>>) -> UnwindRow {
    let at = |rule: Option<RegisterRule<usize>>, place: i64| {
        let Some(RegisterRule::Expression(expression)) = rule else { return false };
        let operations = operations(expression, section);
        matches!(operations.as_deref(), Some([Operation::RegisterOffset { register: RSP, offset, .. }]) if *offset == place)
    };
    let cfa = match row.cfa() {
        CfaRule::Expression(expression) => cfa_expression(*expression, section),
        CfaRule::RegisterAndOffset { .. } => None,
    };
    let known = cfa == Some((UnwindRow::DEREF_RSP, 20))
        && at(row.register(RBP), 120)
        && at(row.register(RETURN_ADDRESS), 168);
    UnwindRow { kind: if known { UnwindRow::SIGNAL } else { UnwindRow::UNSUPPORTED }, ..UNSUPPORTED }
}

/// The few expressions that occur in practice: those that linkers emit for procedure linkage tables, and those of hand-written
/// code that keeps the caller's stack pointer in memory.
fn cfa_expression(expression: UnwindExpression<usize>, section: &EhFrame<Slice<'_>>) -> Option<(u8, i16)> {
    use Operation as Op;
    let with = |kind: u8, offset: i64, added: u64| {
        let added = u8::try_from(added / 8).ok().filter(|words| added.is_multiple_of(8) && *words < 16)?;
        Some((kind | added << 4, words(offset)?))
    };
    let kind = |register| match register {
        RSP => Some(UnwindRow::DEREF_RSP),
        RBP => Some(UnwindRow::DEREF_RBP),
        _ => None,
    };
    match operations(expression, section)?.as_slice() {
        [
            Op::RegisterOffset { register: RSP, offset: 8, .. },
            Op::RegisterOffset { register: RETURN_ADDRESS, offset: 0, .. },
            Op::UnsignedConstant { value: 15 },
            Op::And,
            Op::UnsignedConstant { value },
            Op::Ge,
            Op::UnsignedConstant { value: 3 },
            Op::Shl,
            Op::Plus,
        ] if *value < 16 => Some((UnwindRow::PLT, *value as i16)),
        [Op::RegisterOffset { register, offset, .. }, Op::Deref { size: 8, space: false, .. }] => {
            with(kind(*register)?, *offset, 0)
        }
        [
            Op::RegisterOffset { register, offset, .. },
            Op::Deref { size: 8, space: false, .. },
            Op::PlusConstant { value },
        ] => with(kind(*register)?, *offset, *value),
        _ => None,
    }
}

fn operations<'a>(
    expression: UnwindExpression<usize>,
    section: &EhFrame<Slice<'a>>,
) -> Option<Vec<Operation<Slice<'a>>>> {
    /// The longest known expression has nine.
    const MAX: usize = 10;
    let mut iter = expression.get(section).ok()?.operations(ENCODING);
    let mut operations = Vec::new();
    while let Some(operation) = iter.next().ok()? {
        if operations.len() == MAX {
            return None;
        }
        operations.push(operation);
    }
    Some(operations)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::LazyLock;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;
    use crate::debian::libruby;
    use crate::elf::tests::Noise;

    const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";
    const LIBCRYPTO: &str = "/usr/lib/x86_64-linux-gnu/libcrypto.so.3";

    /// At every row, and at random instructions between rows, the table agrees with gimli's own unwinder.
    #[test]
    fn agrees_with_the_reference() {
        for path in [libruby(), Path::new(LIBC), Path::new(LIBCRYPTO)] {
            let file = File::open(path).unwrap();
            let path = path.display();
            let started = Instant::now();
            let table = UnwindTable::read(&file).unwrap();
            let took = started.elapsed();
            let headers = Headers::read(&file).unwrap();
            let section = headers.section(WHAT).unwrap();
            let bytes = section.read(&file, WHAT, MAX_SECTION).unwrap();
            let reference = EhFrame::new(&bytes, LittleEndian);
            let index = headers.section(".eh_frame_hdr").unwrap();
            let index_bytes = index.read(&file, WHAT, MAX_SECTION).unwrap();
            let bases =
                gimli::BaseAddresses::default().set_eh_frame(section.address).set_eh_frame_hdr(index.address);
            let header = gimli::EhFrameHdr::new(&index_bytes, LittleEndian).parse(&bases, 8).unwrap();
            let search = header.table().unwrap();

            let last = u64::from(table.rows.last().unwrap().pc);
            let mut noise = Noise(7);
            let random = (0..20_000).map(|_| noise.next() % last).collect::<Vec<_>>();
            let edges = table.rows.iter().step_by(5).flat_map(|row| [row.pc.wrapping_sub(1), row.pc]);
            let mut checked = [0; 9];
            for pc in random.into_iter().chain(edges.map(u64::from)) {
                let address = table.base.0 + pc;
                let ours = table.row(Svma(address)).unwrap_or_default();
                let mut context = UnwindContext::new();
                let theirs = search.unwind_info_for_address(
                    &reference,
                    &bases,
                    &mut context,
                    address,
                    EhFrame::cie_from_offset,
                );
                let Ok(theirs) = theirs else {
                    assert_eq!(ours.kind, UnwindRow::NONE, "{path} {address:#x}");
                    continue;
                };
                checked[usize::from(ours.kind & UnwindRow::KIND_MASK)] += 1;
                same(ours, theirs, &format!("{path} {address:#x}"));
            }
            let bad = table.rows.iter().filter(|row| row.kind == UnwindRow::UNSUPPORTED).count();
            println!(
                "{path}: {} rows, {} bytes, {took:?}, {bad} unsupported, checked by kind {checked:?}",
                table.rows.len(),
                table.rows.len() * 8
            );
            assert!(checked[usize::from(UnwindRow::RSP)] > 10_000);
            assert!(bad * 100 < table.rows.len());
        }
    }

    fn same(ours: UnwindRow, theirs: &UnwindTableRow<usize>, at: &str) {
        let cfa = match ours.kind {
            UnwindRow::RSP => RSP,
            UnwindRow::RBP => RBP,
            UnwindRow::NONE => panic!("{at}: the reference has a row"),
            // Rules that the reference returns as expressions; their evaluation is tested below.
            _ => return,
        };
        let offset = i64::from(ours.cfa) * 8;
        assert_eq!(*theirs.cfa(), CfaRule::RegisterAndOffset { register: cfa, offset }, "{at}");
        assert_eq!(theirs.register(RETURN_ADDRESS), Some(RegisterRule::Offset(-8)), "{at}");
        match (ours.rbp, theirs.register(RBP)) {
            (UnwindRow::RBP_SAME, None | Some(RegisterRule::SameValue))
            | (UnwindRow::RBP_LOST, Some(RegisterRule::Undefined | RegisterRule::Register(_))) => {}
            (n, Some(RegisterRule::Offset(offset))) if n < 0 => assert_eq!(i64::from(n) * 8, offset, "{at}"),
            other => panic!("{at}: {other:?}"),
        }
    }

    /// The special rules are found at the expected places.
    #[test]
    fn special_rules() {
        let libc = UnwindTable::read(&File::open(LIBC).unwrap()).unwrap();
        let kinds = |table: &UnwindTable, kind| table.rows.iter().filter(|row| row.kind == kind).count();
        assert_eq!(kinds(&libc, UnwindRow::SIGNAL), 1);
        assert!(kinds(&libc, UnwindRow::OUTERMOST) >= 1);
        let plt = libc.rows.iter().find(|row| row.kind == UnwindRow::PLT).unwrap();
        assert_eq!(plt.cfa, 11);
        let crypto = UnwindTable::read(&File::open(LIBCRYPTO).unwrap()).unwrap();
        let added = |row: &&UnwindRow| row.kind == UnwindRow::DEREF_RSP | 1 << 4;
        assert!(crypto.rows.iter().filter(added).any(|row| row.cfa == 5));
    }

    static SECTION: LazyLock<(Vec<u8>, u64, Vec<Range<u64>>)> = LazyLock::new(|| {
        let file = File::open(LIBC).unwrap();
        let headers = Headers::read(&file).unwrap();
        let section = headers.section(WHAT).unwrap();
        let code = headers.segments.iter().filter(|s| s.executable);
        let code = code.map(|s| s.address.0..s.address.0 + s.memory_size).collect();
        // Large enough for every shape, small enough for many cases.
        (section.read(&file, WHAT, MAX_SECTION).unwrap()[..20_000].to_vec(), section.address, code)
    });

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Damage gives an error or a table that is still sorted and can be searched without a panic.
        #[test]
        fn damage(
            patches in prop::collection::vec((0_usize..20_000, any::<u8>()), 1..40),
            cut in 0_usize..20_000,
            probes in prop::collection::vec(any::<u32>(), 20),
        ) {
            let (bytes, address, code) = &*SECTION;
            let mut bytes = bytes.clone();
            for (at, value) in patches {
                bytes[at] = value;
            }
            bytes.truncate(20_000 - cut / 4);
            let started = Instant::now();
            if let Ok(table) = UnwindTable::compile(&bytes, *address, code) {
                prop_assert!(table.rows.windows(2).all(|pair| pair[0].pc < pair[1].pc));
                prop_assert!(table.rows.iter().all(|row| UnwindRow::from_word(row.to_word()) == *row));
                for pc in probes {
                    let _either = table.row(Svma(table.base.0 + u64::from(pc)));
                }
            }
            prop_assert!(started.elapsed() < Duration::from_secs(10));
        }

        /// Arbitrary bytes do so, too.
        #[test]
        fn arbitrary(bytes in prop::collection::vec(any::<u8>(), 0..2000), address: u64) {
            let everything = 0..u64::MAX;
            let _either = UnwindTable::compile(&bytes, address, std::slice::from_ref(&everything));
        }
    }
}
