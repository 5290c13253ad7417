//! Native stacks of sleeping threads, read from outside by the unwind tables of their files, as the kernel side does it
//! (gctrace-ebpf/src/unwind.rs). The caller must prove that a thread slept during the whole read.
//!
//! For a thread in a system call, the kernel shows only stack pointer and program counter. The value of rbp is known once the walk has
//! passed a function that saved it; a rule that needs it earlier ends the walk. No value is assumed.

use std::cell::OnceCell;
use std::sync::Arc;

use gctrace_common::stack::{MAX_NATIVE_FRAMES, NativeEnd};
use gctrace_common::unwind::UnwindRow;

use super::NativeNamer;
use super::code::{Book, CodeMap, Mapped, of_file, of_vdso};
use crate::address::Svma;
use crate::aggregate::mix::NativeFrame;
use crate::clock::monotonic_ns;
use crate::elf::UnwindTable;
use crate::host::mappings::{CodeMapping, code_of, load_bias};
use crate::ruby::frames::Memory;

/// Offsets of registers in `struct ucontext` (arch/x86/include/uapi/asm/ucontext.h).
const UC_RBP: u64 = 120;
const UC_RSP: u64 = 160;
const UC_RIP: u64 = 168;

/// The code of one process.
pub struct Sleepers {
    pid: u32,
    map: Arc<CodeMap>,
    /// The table of each mapping; read when a stack first leads there. The inner `None`: it has no table.
    tables: Vec<OnceCell<Option<UnwindTable>>>,
    namer: NativeNamer,
}

/// The position of a walk.
#[derive(Clone, Copy, Debug)]
struct At {
    ip: u64,
    sp: u64,
    /// The value of rbp; `None`: unknown.
    bp: Option<u64>,
    /// Whether `ip` is the next instruction, and not a return address.
    exact: bool,
}

impl Sleepers {
    /// Reads the current mappings.
    ///
    /// # Errors
    ///
    /// The mappings cannot be read.
    pub fn read(pid: u32) -> std::io::Result<Self> {
        let code = code_of(pid).map_err(std::io::Error::other)?;
        let mappings: Vec<Mapped> = code.iter().filter_map(|code| mapped(pid, code)).collect();
        let map = Arc::new(CodeMap { read_ns: monotonic_ns(), mappings });
        let book = Book::default();
        book.set(pid, Arc::clone(&map));
        let tables = map.mappings.iter().map(|_| OnceCell::new()).collect();
        Ok(Self { pid, map, tables, namer: NativeNamer::new(book) })
    }

    /// Walks from here. Returns the addresses, leaf first, of which all but the first are return addresses, and how the walk ended.
    pub fn walk(&self, memory: &impl Memory, sp: u64, pc: u64) -> (Vec<u64>, NativeEnd) {
        walk(memory, At { ip: pc, sp, bp: None, exact: true }, |pc| self.row(pc))
    }

    /// The unwind rule for an instruction.
    fn row(&self, pc: u64) -> Result<UnwindRow, NativeEnd> {
        let at = self.map.mappings.iter().position(|mapped| mapped.start <= pc && pc < mapped.end);
        let at = at.ok_or(NativeEnd::NoTable)?;
        let Mapped { bias, image, .. } = &self.map.mappings[at];
        let table = self.tables[at].get_or_init(|| {
            let table = image.table();
            table.inspect_err(|error| log::debug!("unwind table of {}: {error}", image.path)).ok()
        });
        let table = table.as_ref().ok_or(NativeEnd::NoTable)?;
        table.row(Svma(pc.wrapping_sub(*bias))).ok_or(NativeEnd::NoRow)
    }

    /// Names the walked addresses. `ruby` is the load bias of the Ruby image.
    pub fn name(&mut self, ruby: u64, addresses: &[u64]) -> Vec<NativeFrame> {
        self.namer.stack(self.pid, self.map.read_ns, ruby, addresses)
    }
}

fn mapped(pid: u32, code: &CodeMapping) -> Option<Mapped> {
    match code {
        &CodeMapping::Vdso(start, end) => {
            let image = Arc::new(of_vdso(pid, start, end).ok()?);
            Some(Mapped { start, end, bias: start, image })
        }
        CodeMapping::File(mapping) => {
            let path = mapping.open_path(pid).ok()?;
            let (segments, image) = of_file(Some(pid), &path, &mapping.path).ok()?;
            let bias = load_bias(mapping, &segments)?;
            Some(Mapped { start: mapping.start, end: mapping.end, bias, image: Arc::new(image) })
        }
    }
}

fn walk(
    memory: &impl Memory,
    mut at: At,
    row: impl Fn(u64) -> Result<UnwindRow, NativeEnd>,
) -> (Vec<u64>, NativeEnd) {
    let mut addresses = Vec::new();
    loop {
        if addresses.len() >= MAX_NATIVE_FRAMES {
            return (addresses, NativeEnd::Truncated);
        }
        addresses.push(at.ip);
        // A return address may be just past a function that ends with a call.
        let row = row(at.ip.wrapping_sub(u64::from(!at.exact)));
        match row.and_then(|row| caller(memory, at, row)) {
            Ok(next) => at = next,
            Err(end) => return (addresses, end),
        }
    }
}

/// The caller's position according to a rule.
fn caller(memory: &impl Memory, at: At, row: UnwindRow) -> Result<At, NativeEnd> {
    let word = |address: u64| {
        let mut bytes = [0; 8];
        let read = memory.read(address, &mut bytes);
        if read { Ok(u64::from_le_bytes(bytes)) } else { Err(NativeEnd::ReadFailed) }
    };
    let offset = (i64::from(row.cfa) * 8) as u64;
    let bp = at.bp.ok_or(NativeEnd::Unsupported);
    let added = u64::from(row.kind >> 4) << 3;
    let cfa = match row.kind & UnwindRow::KIND_MASK {
        UnwindRow::RSP => at.sp.wrapping_add(offset),
        UnwindRow::RBP => bp?.wrapping_add(offset),
        UnwindRow::PLT => {
            let second = u64::from(at.ip & 15 >= u64::from(row.cfa as u16));
            at.sp.wrapping_add(8).wrapping_add(second << 3)
        }
        UnwindRow::DEREF_RSP => word(at.sp.wrapping_add(offset))?.wrapping_add(added),
        UnwindRow::DEREF_RBP => word(bp?.wrapping_add(offset))?.wrapping_add(added),
        UnwindRow::SIGNAL => {
            let of = |place: u64| word(at.sp.wrapping_add(place));
            return Ok(At { ip: of(UC_RIP)?, sp: of(UC_RSP)?, bp: Some(of(UC_RBP)?), exact: true });
        }
        UnwindRow::OUTERMOST => return Err(NativeEnd::Complete),
        UnwindRow::NONE => return Err(NativeEnd::NoRow),
        _ => return Err(NativeEnd::Unsupported),
    };
    // The stack grows downwards: a caller's frame is at a higher address.
    if cfa <= at.sp {
        return Err(NativeEnd::ReadFailed);
    }
    let bp = match row.rbp {
        UnwindRow::RBP_SAME => at.bp,
        UnwindRow::RBP_LOST => None,
        UnwindRow::RBP_AT_RBP => Some(word(at.bp.ok_or(NativeEnd::Unsupported)?)?),
        words => Some(word(cfa.wrapping_add((i64::from(words) * 8) as u64))?),
    };
    let ip = word(cfa.wrapping_sub(8))?;
    // The first function of a coroutine's stack returns to address zero.
    if ip == 0 { Err(NativeEnd::Complete) } else { Ok(At { ip, sp: cfa, bp, exact: false }) }
}

/// The reason, in words, why the callers of the last frame are unknown; `None`: it has no callers.
pub fn missing(end: NativeEnd) -> Option<&'static str> {
    reason(end, cfg!(target_arch = "x86_64"))
}

/// Like [`missing`]. `tables`: whether unwind tables are read for this processor.
fn reason(end: NativeEnd, tables: bool) -> Option<&'static str> {
    Some(match end {
        NativeEnd::Complete => return None,
        NativeEnd::NoTable | NativeEnd::NoRow | NativeEnd::Unsupported if !tables => {
            "native stacks are walked on x86-64 only"
        }
        NativeEnd::Truncated => "the native stack is deeper than gctrace reads",
        NativeEnd::NoTable => "code without an unwind table, such as that of a just-in-time compiler",
        NativeEnd::NoRow => "code that the unwind table of its file does not cover",
        NativeEnd::Unsupported => "a register is needed that the kernel does not show",
        NativeEnd::ReadFailed => "the memory of the stack cannot be read",
        NativeEnd::NoRegisters => "the kernel does not show where it sleeps",
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::host::{doing::Doing, mem::ProcessMemory, tasks::Task};

    /// Memory with words at addresses from 0x1000 on.
    struct Words(Vec<u64>);

    impl Memory for Words {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let word = address.checked_sub(0x1000).filter(|at| at % 8 == 0).map(|at| at as usize / 8);
            let word = word.and_then(|at| self.0.get(at));
            word.inspect(|word| buffer.copy_from_slice(&word.to_le_bytes())).is_some()
        }
    }

    fn row(kind: u8, cfa: i16, rbp: i8) -> UnwindRow {
        UnwindRow { pc: 0, cfa, kind, rbp }
    }

    /// A caller is found by the stack pointer; by rbp only after a function that has saved it.
    #[test]
    fn callers() {
        // The caller's rbp, return address; that frame's rbp, return address; then zero.
        let memory = Words(vec![7, 0x1028, 0x200, 8, 9, 0x300, 0]);
        let begin = At { ip: 0x100, sp: 0x1000, bp: None, exact: true };
        let rules = |pc: u64| match pc {
            0x100 => Ok(row(UnwindRow::RSP, 3, -2)),
            0x1ff => Ok(row(UnwindRow::RBP, 1, UnwindRow::RBP_LOST)),
            0x2ff => Ok(row(UnwindRow::OUTERMOST, 0, 0)),
            _ => Err(NativeEnd::NoTable),
        };
        assert_eq!(walk(&memory, begin, rules), (vec![0x100, 0x200, 0x300], NativeEnd::Complete));
        let unsaved = |pc: u64| match pc {
            0x100 => Ok(row(UnwindRow::RSP, 3, UnwindRow::RBP_SAME)),
            pc => rules(pc),
        };
        assert_eq!(walk(&memory, begin, unsaved), (vec![0x100, 0x200], NativeEnd::Unsupported));
        let lost = |_| Ok(row(UnwindRow::RSP, 3, UnwindRow::RBP_LOST));
        let beyond = walk(&memory, At { sp: 0x1018, ..begin }, lost);
        assert_eq!(beyond, (vec![0x100, 0x300], NativeEnd::ReadFailed));
        // A coroutine's first function returns to zero; a walk that does not go upwards is no stack; an endless stack is truncated.
        assert_eq!(walk(&memory, At { sp: 0x1020, ..begin }, lost).1, NativeEnd::Complete);
        let stays = |_| Ok(row(UnwindRow::RSP, 0, 0));
        assert_eq!(walk(&memory, begin, stays), (vec![0x100], NativeEnd::ReadFailed));
        let endless = Words(vec![0x100; 4096]);
        let (addresses, end) = walk(&endless, begin, |_| Ok(row(UnwindRow::RSP, 1, 0)));
        assert_eq!((addresses.len(), end), (MAX_NATIVE_FRAMES, NativeEnd::Truncated));
    }

    /// If no unwind tables are read, their absence is not blamed on the code.
    #[test]
    fn reasons() {
        let of = |end, tables| reason(end, tables).unwrap_or_default();
        assert!(of(NativeEnd::NoTable, true).contains("just-in-time"));
        assert!(of(NativeEnd::NoTable, false).contains("x86-64"));
        assert!(of(NativeEnd::NoRegisters, false).contains("where it sleeps"));
        assert_eq!(reason(NativeEnd::Complete, false), None);
    }

    /// A sleeping C program has the functions of the C library on its stack, down to its start.
    #[test]
    fn sleeping_program() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let deadline = Instant::now() + Duration::from_secs(10);
        let (names, end) = loop {
            let walked =
                sleeping(pid).filter(|(names, _)| names.iter().any(|name| name.contains("nanosleep")));
            if let Some(walked) = walked {
                break walked;
            }
            // It is still being loaded.
            assert!(Instant::now() < deadline, "{:?}", Doing::look(pid, pid));
            std::thread::sleep(Duration::from_millis(10));
        };
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((end, missing(end)), (NativeEnd::Complete, None), "{names:?}");
        assert!(names.len() >= 4 && names.iter().any(|name| name.contains("libc_start_main")), "{names:?}");
    }

    /// The stack of a process's main thread, if it slept while the stack was read.
    fn sleeping(pid: u32) -> Option<(Vec<String>, NativeEnd)> {
        let mut sleepers = Sleepers::read(pid).ok()?;
        let memory = ProcessMemory::open(pid).ok()?;
        let task = Task::look(pid, pid)?;
        let call = Doing::look(pid, pid).call?;
        let (addresses, end) = sleepers.walk(&memory, call.sp, call.pc);
        let frames = sleepers.name(0, &addresses);
        task.still_sleeps(pid)
            .then(|| (frames.iter().map(|native| native.frame.name.to_string()).collect(), end))
    }
}
