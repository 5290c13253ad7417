//! Finds where CRuby allocates and frees the memory of its objects outside the heap: the calls of `malloc`, `calloc`, `realloc` and
//! `free` in `objspace_xmalloc0`, `objspace_xcalloc`, `objspace_xrealloc` and `objspace_xfree` (gc.c; `rb_gc_impl_malloc` and its
//! neighbours in gc/default/default.c from 3.4 on), including their inlined copies.
//!
//! `ruby_xmalloc` and its relatives all end there, including calls that bypass the exported names. Allocations of CRuby for the VM
//! itself (`ruby_mimmalloc`, calls of `malloc` elsewhere) do not, and do not count in `malloc_increase` either. The calls are
//! recognised by the code around them: up to 3.4 `objspace_malloc_size` queries the C library for the size of the memory for
//! `malloc_increase`, after it was allocated and before it is freed, and nothing else in a Ruby does that. Ruby 4.0 uses the size that it
//! knows. But it first adds small sizes up per thread (`malloc_increase_local`), so the size, or the sum, is compared with 8 KiB
//! (`GC_MALLOC_INCREASE_LOCAL_THRESHOLD`) right after each of these calls (`objspace_malloc_increase_body`).
//!
//! An allocation is probed at the conditional jump after it, `if (mem = malloc(size))`, where the result is in rax and the size is
//! still in the register from which it was passed, which calls preserve. The kernel emulates that jump, and direct calls.

use std::collections::BTreeSet;
use std::ops::Range;

use gctrace_common::malloc::MallocPlace;
use iced_x86::{FlowControl, InstructionInfoFactory, Mnemonic, Register};

use super::code::{Body, Code};
use super::emulation::is_emulated;
use super::reference::Kind;
use super::x86::{first_register, immediate, is_register, register_number, written_registers};
use crate::address::{FileOffset, Svma};
use crate::elf::{ElfImage, Machine, code_offset};

/// An instruction to probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MallocSite {
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
    /// What happens there.
    pub place: MallocPlace,
    /// Hardware number of the register that holds the size, for [`MallocPlace::Malloc`] and [`MallocPlace::Calloc`]; else 0.
    pub size: u8,
}

/// Why the calls of an image cannot be counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoMalloc {
    /// Calls are not searched for on this processor.
    #[error("allocation by malloc is traced on x86-64 only")]
    Machine,
    /// The image does not query a C library for the size of memory.
    #[error("this Ruby does not import malloc_usable_size, by which its allocation functions are recognised")]
    NoImport,
    /// Code that is not as expected.
    #[error("unexpected code around the call of {call} at {address}: {what}")]
    Unknown {
        /// The function that is called.
        call: &'static str,
        /// Address of the call.
        address: Svma,
        /// What is missing.
        what: &'static str,
    },
    /// No call was found.
    #[error("no call of {0} was found in the allocation functions of this Ruby")]
    None(&'static str),
}

/// Called for the size of memory that was allocated or is about to be freed.
const USABLE_SIZE: &str = "malloc_usable_size";
const MALLOC: &str = "malloc";
const CALLOC: &str = "calloc";
const REALLOC: &str = "realloc";
const FREE: &str = "free";
/// Called for the thread's own counter, if it is in a library.
const THREAD_LOCAL: &str = "__tls_get_addr";
/// Operands of compilers' comparisons with `GC_MALLOC_INCREASE_LOCAL_THRESHOLD`: `<` the threshold, or `<=` its predecessor.
const LOCAL_THRESHOLD: [u64; 2] = [8191, 8192];

/// Maximum number of instructions between a call and the code that belongs to it. Builds have up to five.
const NEAR: usize = 8;
/// Maximum number of calls that are examined: bounds the work on hostile code. Builds have up to 20.
const MAX_SITES: usize = 256;
/// Registers that calls preserve (System V ABI).
const PRESERVED: [Register; 6] =
    [Register::RBX, Register::RBP, Register::R12, Register::R13, Register::R14, Register::R15];

/// How `malloc_increase` is counted; the calls are recognised by it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Accounting {
    /// By the size that the C library reports, up to 3.4.
    Usable,
    /// In the thread's own counter first, from 4.0 on.
    Local,
}

/// Finds all of them, or gives the reason why not: an incomplete set would be worse than none.
///
/// # Errors
///
/// The image has no such calls, or they are not understood.
pub fn malloc_sites(image: &ElfImage) -> Result<Vec<MallocSite>, NoMalloc> {
    if image.machine() != Machine::X86_64 {
        return Err(NoMalloc::Machine);
    }
    let mut code = Code::new(image);
    let callers = |code: &Code<'_>, name: &str| -> BTreeSet<usize> {
        let wanted: Vec<Range<u64>> = image.imports(name).map(|Svma(at)| at..at.saturating_add(1)).collect();
        code.references(&wanted, Kind::Any).into_iter().map(|reference| reference.function).collect()
    };
    if image.imports(USABLE_SIZE).next().is_none() {
        return Err(NoMalloc::NoImport);
    }
    let asking = callers(&code, USABLE_SIZE);
    // The second attempt, after a collection, may be out of line.
    let calling = [MALLOC, CALLOC, REALLOC, FREE].into_iter().flat_map(|name| callers(&code, name));
    let candidates: BTreeSet<usize> = asking.iter().copied().chain(calling).collect();
    code.resolve_cold_parts(candidates.iter().copied());
    let owners = |functions: BTreeSet<usize>| -> BTreeSet<usize> {
        functions.into_iter().map(|function| code.owner(function)).collect()
    };
    let known = sites_in(&code, owners(asking), Accounting::Usable);
    known.or_else(|unknown| sites_in(&code, owners(candidates), Accounting::Local).map_err(|_| unknown))
}

/// The calls in these functions.
fn sites_in(
    code: &Code<'_>,
    owners: BTreeSet<usize>,
    accounting: Accounting,
) -> Result<Vec<MallocSite>, NoMalloc> {
    let mut found = Vec::new();
    for owner in owners {
        let body = code.body(owner);
        let function = Function { code, body: &body, accounting };
        // Many other functions allocate memory.
        if accounting == Accounting::Local && !function.keeps_account() {
            continue;
        }
        for index in 0..body.instructions.len() {
            function.look_at(index, &mut found)?;
            if found.len() > MAX_SITES {
                return Err(function.unknown(MALLOC, index, "there are very many"));
            }
        }
    }
    for (place, name) in [
        (MallocPlace::Malloc, MALLOC),
        (MallocPlace::Calloc, CALLOC),
        (MallocPlace::ReallocBegin, REALLOC),
        (MallocPlace::Free, FREE),
    ] {
        if !found.iter().any(|site| site.place == place) {
            return Err(NoMalloc::None(name));
        }
    }
    found.sort_by_key(|site| site.address);
    Ok(found)
}

struct Function<'a, 'i> {
    code: &'a Code<'i>,
    body: &'a Body,
    accounting: Accounting,
}

impl Function<'_, '_> {
    /// Whether the function contains one of the calls.
    fn keeps_account(&self) -> bool {
        (0..self.body.instructions.len()).any(|index| match self.called(index) {
            Some(FREE) => self.is_counted_free(index),
            Some(MALLOC | CALLOC | REALLOC) => self.tested(index).is_some_and(|test| self.is_counted(test)),
            _ => false,
        })
    }

    fn look_at(&self, index: usize, found: &mut Vec<MallocSite>) -> Result<(), NoMalloc> {
        let Some(name) = self.called(index) else { return Ok(()) };
        match name {
            FREE if self.is_counted_free(index) => {
                found.push(self.site(index, MallocPlace::Free, 0, FREE)?);
            }
            MALLOC => self.allocation(index, (MALLOC, MallocPlace::Malloc, Register::RDI), found)?,
            CALLOC => {
                if let Some(test) = self.tested(index)
                    && self.is_counted(test)
                    && !self.is_one(index, Register::RDI)
                {
                    return Err(self.unknown(CALLOC, index, "its number of elements is not 1"));
                }
                self.allocation(index, (CALLOC, MallocPlace::Calloc, Register::RSI), found)?;
            }
            REALLOC => {
                let Some(test) = self.tested(index) else { return Ok(()) };
                if !self.is_counted(test) {
                    return Err(self.unknown(REALLOC, index, "its result is not counted in malloc_increase"));
                }
                found.push(self.site(index, MallocPlace::ReallocBegin, 0, REALLOC)?);
                found.push(self.site(test.jump, MallocPlace::ReallocEnd, 0, REALLOC)?);
            }
            _ => {}
        }
        Ok(())
    }

    fn allocation(
        &self,
        index: usize,
        (name, place, argument): (&'static str, MallocPlace, Register),
        found: &mut Vec<MallocSite>,
    ) -> Result<(), NoMalloc> {
        // A call without a test is the one at VM startup with which 3.3 and later measure how much the C library adds to a size.
        let Some(test) = self.tested(index) else { return Ok(()) };
        if !self.is_counted(test) {
            return Err(self.unknown(name, index, "its result is not counted in malloc_increase"));
        }
        let size = self.preserved(index, test.jump, argument);
        let size = size.ok_or_else(|| self.unknown(name, index, "no preserved register holds its size"))?;
        found.push(self.site(test.jump, place, size, name)?);
        Ok(())
    }

    fn unknown(&self, call: &'static str, index: usize, what: &'static str) -> NoMalloc {
        NoMalloc::Unknown { call, address: Svma(self.body.instructions[index].ip()), what }
    }

    fn site(
        &self,
        index: usize,
        place: MallocPlace,
        size: u8,
        call: &'static str,
    ) -> Result<MallocSite, NoMalloc> {
        let instruction = &self.body.instructions[index];
        if !is_emulated(instruction) {
            return Err(self.unknown(call, index, "the kernel does not emulate the instruction"));
        }
        let address = Svma(instruction.ip());
        let file_offset = code_offset(self.code.image.segments(), address)
            .ok_or_else(|| self.unknown(call, index, "it is in no executable segment"))?;
        Ok(MallocSite { address, file_offset, place, size })
    }

    /// The dynamic symbol that the instruction calls.
    fn called(&self, index: usize) -> Option<&str> {
        let instruction = &self.body.instructions[index];
        let calls = matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall);
        if calls { self.code.callee(instruction).name } else { None }
    }

    /// Whether the instruction can only run right after the one before it.
    fn is_entered_from_above(&self, index: usize) -> bool {
        index.checked_sub(1).is_some_and(|before| self.body.predecessors(index) == Some(vec![before]))
    }

    /// The jump that tests whether the call returned memory: `test rax, rax; je`.
    fn tested(&self, call: usize) -> Option<Test> {
        let instructions = &self.body.instructions;
        let mut factory = InstructionInfoFactory::new();
        let mut is_set = false;
        for index in (call + 1..instructions.len()).take(NEAR) {
            if !self.is_entered_from_above(index) {
                return None;
            }
            let instruction = &instructions[index];
            match instruction.mnemonic() {
                Mnemonic::Je | Mnemonic::Jne if is_set => {
                    let target = self.body.index_of(Svma(instruction.near_branch_target()));
                    let success =
                        if instruction.mnemonic() == Mnemonic::Je { Some(index + 1) } else { target };
                    return Some(Test { call, jump: index, success: success? });
                }
                Mnemonic::Test if is_register(instruction, 0) && is_register(instruction, 1) => {
                    let both = (instruction.op0_register(), instruction.op1_register());
                    is_set = both == (Register::RAX, Register::RAX);
                }
                Mnemonic::Mov if !written_registers(&mut factory, instruction).contains(&Register::RAX) => {}
                _ => return None,
            }
        }
        None
    }

    /// Whether the memory returned by a call counts in `malloc_increase`.
    fn is_counted(&self, test: Test) -> bool {
        match self.accounting {
            Accounting::Usable => self.asks_size(test),
            Accounting::Local => self.counts_locally(test.success),
        }
    }

    /// The same for memory that a call frees.
    fn is_counted_free(&self, free: usize) -> bool {
        match self.accounting {
            Accounting::Usable => self.follows_size(free),
            Accounting::Local => self.counts_locally(free + 1),
        }
    }

    /// Whether the next operation here is a comparison with the limit up to which sizes are added up per thread.
    fn counts_locally(&self, from: usize) -> bool {
        let mut at = from;
        for _ in 0..2 * NEAR {
            let Some(instruction) = self.body.instructions.get(at) else { return false };
            match instruction.flow_control() {
                FlowControl::Next if instruction.mnemonic() == Mnemonic::Cmp => {
                    return immediate(instruction, 1).is_some_and(|with| LOCAL_THRESHOLD.contains(&with));
                }
                FlowControl::Next => at += 1,
                FlowControl::Call | FlowControl::IndirectCall if self.called(at) == Some(THREAD_LOCAL) => {
                    at += 1;
                }
                FlowControl::UnconditionalBranch => {
                    match self.body.index_of(Svma(instruction.near_branch_target())) {
                        Some(target) => at = target,
                        None => return false,
                    }
                }
                _ => return false,
            }
        }
        false
    }

    /// Whether the next operation on the memory is a query for its size.
    fn asks_size(&self, test: Test) -> bool {
        let instructions = &self.body.instructions;
        let mut factory = InstructionInfoFactory::new();
        let mut holding = BTreeSet::from([Register::RAX]);
        let mut follow = |index: usize, holding: &mut BTreeSet<Register>| {
            let instruction = &instructions[index];
            let copies = instruction.mnemonic() == Mnemonic::Mov
                && is_register(instruction, 1)
                && instruction.op1_register().is_gpr64()
                && holding.contains(&instruction.op1_register());
            for written in written_registers(&mut factory, instruction) {
                if copies {
                    holding.insert(written)
                } else {
                    holding.remove(&written)
                };
            }
        };
        for index in test.call + 1..test.jump {
            follow(index, &mut holding);
        }
        let mut at = test.success;
        for _ in 0..NEAR {
            let Some(instruction) = instructions.get(at) else { return false };
            match instruction.flow_control() {
                FlowControl::Call | FlowControl::IndirectCall => {
                    return self.called(at) == Some(USABLE_SIZE) && holding.contains(&Register::RDI);
                }
                FlowControl::UnconditionalBranch => {
                    match self.body.index_of(Svma(instruction.near_branch_target())) {
                        Some(target) => at = target,
                        None => return false,
                    }
                }
                FlowControl::Next => {
                    follow(at, &mut holding);
                    at += 1;
                }
                _ => return false,
            }
        }
        false
    }

    /// Number of the register from which an argument of the call was copied, if it still holds it at the jump after the call.
    fn preserved(&self, call: usize, jump: usize, argument: Register) -> Option<u8> {
        let copy = self.last_write(call, argument)?;
        let instruction = &self.body.instructions[copy];
        if instruction.mnemonic() != Mnemonic::Mov
            || first_register(instruction) != Some(argument)
            || !is_register(instruction, 1)
        {
            return None;
        }
        let source = instruction.op1_register();
        if !PRESERVED.contains(&source) {
            return None;
        }
        let mut factory = InstructionInfoFactory::new();
        // The call itself preserves it.
        let between = (copy + 1..jump).filter(|&index| index != call);
        for index in between {
            if written_registers(&mut factory, &self.body.instructions[index]).contains(&source) {
                return None;
            }
        }
        register_number(source).and_then(|number| u8::try_from(number).ok())
    }

    /// Whether the argument of the call is the number 1.
    fn is_one(&self, call: usize, argument: Register) -> bool {
        self.last_write(call, argument).is_some_and(|index| {
            let instruction = &self.body.instructions[index];
            instruction.mnemonic() == Mnemonic::Mov && immediate(instruction, 1) == Some(1)
        })
    }

    /// The instruction that last wrote the register before the call, in straight-line code.
    fn last_write(&self, call: usize, register: Register) -> Option<usize> {
        let mut factory = InstructionInfoFactory::new();
        let mut at = call;
        for _ in 0..NEAR {
            if !self.is_entered_from_above(at) {
                return None;
            }
            at -= 1;
            let instruction = &self.body.instructions[at];
            if instruction.flow_control() != FlowControl::Next {
                return None;
            }
            if written_registers(&mut factory, instruction).contains(&register) {
                return Some(at);
            }
        }
        None
    }

    /// Whether a jump depends on whether rax is 0: `test rax, rax` is the last instruction before it that sets flags.
    fn depends_on_rax(&self, jump: usize) -> bool {
        let instructions = &self.body.instructions;
        if !matches!(instructions[jump].mnemonic(), Mnemonic::Je | Mnemonic::Jne) {
            return false;
        }
        let before = instructions[jump.saturating_sub(NEAR)..jump].iter().rev();
        let set = before.into_iter().find(|instruction| instruction.rflags_modified() != 0);
        set.is_some_and(|test| {
            test.mnemonic() == Mnemonic::Test
                && is_register(test, 0)
                && is_register(test, 1)
                && (test.op0_register(), test.op1_register()) == (Register::RAX, Register::RAX)
        })
    }

    /// Whether the size of the freed memory was queried right before, and the memory was not allocated right before that query. A jump for
    /// memory of size 0 may lie between query and free (gcc 12 on 3.2); allocated memory never has that size.
    fn follows_size(&self, free: usize) -> bool {
        let mut asked = false;
        for index in (free.saturating_sub(2 * NEAR)..free).rev() {
            let instruction = &self.body.instructions[index];
            match instruction.flow_control() {
                FlowControl::Next => {}
                FlowControl::Call | FlowControl::IndirectCall if !asked => {
                    if self.called(index) != Some(USABLE_SIZE) {
                        return false;
                    }
                    asked = true;
                }
                FlowControl::Call | FlowControl::IndirectCall => return self.called(index) != Some(MALLOC),
                FlowControl::ConditionalBranch
                    if !asked && self.is_entered_from_above(index + 1) && self.depends_on_rax(index) => {}
                _ => return asked,
            }
        }
        asked
    }
}

/// A call whose result is tested.
#[derive(Clone, Copy)]
struct Test {
    call: usize,
    /// The conditional jump.
    jump: usize,
    /// Where execution continues if memory was returned.
    success: usize,
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;
    use crate::damaged::Damaged;
    use crate::debian::{libruby_bytes, libruby_image, libruby_offset, libruby_section};
    use crate::elf::tests::Noise;

    fn places(sites: &[MallocSite], place: MallocPlace) -> Vec<Svma> {
        sites.iter().filter(|site| site.place == place).map(|site| site.address).collect()
    }

    /// Debian's stripped library has two calls of each (the second after a collection), and frees in `ruby_sized_xfree`.
    #[test]
    fn debian_libruby() {
        let image = libruby_image();
        let sites = malloc_sites(&image).unwrap();
        for place in [MallocPlace::Malloc, MallocPlace::Calloc, MallocPlace::ReallocBegin] {
            assert_eq!(places(&sites, place).len(), 2, "{place:?} of {sites:?}");
        }
        let (begins, ends) =
            (places(&sites, MallocPlace::ReallocBegin), places(&sites, MallocPlace::ReallocEnd));
        assert!(
            begins.iter().zip(&ends).all(|(begin, end)| begin < end && end.0 - begin.0 < 32),
            "{sites:?}"
        );
        let function = image.function_index(image.symbol("ruby_sized_xfree").unwrap().address);
        let frees = places(&sites, MallocPlace::Free);
        assert!(frees.iter().any(|&site| image.function_index(site) == function), "{sites:?}");
        // Sizes are in registers that calls preserve: rbx, rbp, r12 to r15.
        let with_size = sites.iter().filter(|site| site.place <= MallocPlace::Calloc);
        assert!(
            with_size.map(|site| site.size).all(|size| [3, 5, 12, 13, 14, 15].contains(&size)),
            "{sites:?}"
        );
    }

    /// Damage to code and tables gives an answer, never a panic.
    #[test]
    fn damaged_images() {
        let (image, bytes) = (libruby_image(), libruby_bytes());
        let free = libruby_offset(malloc_sites(&image).unwrap()[0].address);
        let tables = [".dynsym", ".rela.plt", ".plt", ".eh_frame"].map(libruby_section);
        let mut noise = Noise(0x6d61_6c6c_6f63);
        for region in iter::once(free - 0x1000..free + 0x5000).chain(tables) {
            for _ in 0..3 {
                let patches = (0..60).flat_map(|_| noise.patches(region.clone())).collect();
                let Ok(image) = ElfImage::read(&Damaged { bytes, patches }) else { continue };
                for site in malloc_sites(&image).unwrap_or_default() {
                    assert!(image.svma_to_file_offset(site.address).is_some(), "{site:?}");
                }
            }
        }
    }
}
