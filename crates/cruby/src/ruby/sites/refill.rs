//! Finds the instructions at which a thread takes the free slots of a heap page for itself.
//!
//! `ractor_cache_set_page` (gc.c of 3.2, gc/default/default.c from 3.4 on; `ractor_cache_slots` in 3.0,
//! `ractor_set_cache` in 3.1, `heap_get_freeobj_from_next_freepage` up to 2.7) moves `page->freelist` into the
//! allocator's cache and then writes `page->free_slots = 0; page->freelist = NULL`. No other code takes the list and
//! clears both. Just before the first of the two stores `free_slots` is still the number of objects that will be
//! allocated before the next refill.

use std::collections::BTreeSet;

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, Register};
use serde::{Deserialize, Serialize};

use super::callers::calling_functions;
use super::emulated;
use crate::address::Svma;
use crate::ruby::RubyVersion;
use crate::ruby::code::{Body, Code};
use crate::ruby::outcome::Outcome;
use crate::ruby::x86::{
    first_register, immediate, is_memory, is_register, register_number, written_registers,
};

/// One instruction at which a page is taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefillSite {
    /// A jump before the store if every path to it has one ([`emulated`]), else the store. A jump is also hit when there is no
    /// page yet; its register is then zero.
    pub address: Svma,
    /// The store of zero to `free_slots`, which has not run yet when a probe fires. One store can have several sites.
    pub store: Svma,
    /// Whether the kernel emulates the instruction instead of single-stepping it: it does not emulate stores up to Linux 6.18.
    pub emulated: bool,
    /// Hardware number (0 rax … 15 r15) of the register that holds the `struct heap_page *` there.
    pub register: u8,
    /// First address of the function.
    pub owner: Svma,
}

/// Offsets in `struct heap_page`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFields {
    /// `short free_slots` (unsigned from 3.4 on).
    pub free_slots: u8,
    /// `freelist`.
    pub freelist: u8,
    /// `short slot_size` (unsigned from 3.4 on), which 3.1 put before `total_slots` and `free_slots`; `None` in earlier releases,
    /// where all slots have the size of an `RVALUE`.
    pub slot_size: Option<u8>,
}

/// The refill sites of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefillSites {
    /// Ordered by address; incomplete unless `outcome` is passed.
    pub sites: Vec<RefillSite>,
    /// Offsets of the fields; `None` if no site shows them.
    pub page: Option<PageFields>,
    /// Stores of the same shape that clear a page which is swept or released, without taking anything from it.
    pub dropped: Vec<Svma>,
    /// Whether the sites are complete, and what is missing if not.
    pub outcome: Outcome,
}

/// The first version with several slot sizes.
const FIRST_SIZED: RubyVersion = RubyVersion::new(3, 1, 0);
/// Offset of `slot_size` from that version on: it is the first field.
const SLOT_SIZE: u8 = 0;
/// Offsets that `freelist` has had, from 2.6 to 4.0.
const FREELIST: [u64; 3] = [32, 40, 48];
/// Maximum number of instructions from one of the two stores to the other.
const MAX_DISTANCE: usize = 8;
/// Maximum number of instructions from reading the list to clearing it.
const MAX_TAKE: usize = 24;
/// Maximum number of instructions from zeroing a register to the store of it.
const MAX_ZERO: usize = 40;
/// Maximum number of sites and candidates examined: bounds the work on hostile code. Builds have one to four.
const MAX_CANDIDATES: usize = 64;

/// Finds the refill sites in the functions of the GC. A failure does not prevent anything else: the outcome says what is
/// missing. `sweepers` are the functions with a `GC_END_SWEEP` site.
pub(in crate::ruby) fn find(
    code: &mut Code<'_>,
    version: RubyVersion,
    unit: &BTreeSet<usize>,
    sweepers: &BTreeSet<Svma>,
) -> RefillSites {
    let free_slots = if version < FIRST_SIZED { 2 } else { 4 };
    let owners: BTreeSet<usize> = unit.iter().map(|&extent| code.owner(extent)).collect();
    let mut candidates = Vec::new();
    for owner in owners {
        let body = code.body(owner);
        candidates.extend(candidates_in(&body, code.start(owner), free_slots));
        if candidates.len() > MAX_CANDIDATES {
            return RefillSites {
                sites: Vec::new(),
                page: None,
                dropped: Vec::new(),
                outcome: Outcome::Failed("very many candidates".to_owned()),
            };
        }
    }
    let slot_size = (version >= FIRST_SIZED).then_some(SLOT_SIZE);
    // gc_sweep_finish may be out of line.
    let mut sweeping = sweepers.clone();
    if candidates.iter().any(|candidate| !candidate.takes && !sweepers.contains(&candidate.owner)) {
        sweeping.extend(sweepers.iter().take(MAX_CANDIDATES).flat_map(|&one| calling_functions(code, one)));
    }
    assemble(candidates, slot_size, &sweeping)
}

/// The two stores.
#[derive(Clone, Debug)]
struct Candidate {
    owner: Svma,
    free_slots: (Svma, u8),
    freelist: u8,
    register: Option<u8>,
    /// Emulated instructions that are probed in place of the store to `free_slots`.
    instead: Option<Vec<Svma>>,
    /// The list is read from the page before it is cleared.
    takes: bool,
    /// A jump leads between the two stores, or they may address different pages.
    divided: bool,
}

fn candidates_in(body: &Body, owner: Svma, free_slots: u64) -> Vec<Candidate> {
    let instructions = &body.instructions;
    let mut found = Vec::new();
    for (index, instruction) in instructions.iter().enumerate() {
        if !stores(instruction, 2, &[free_slots]) || !is_zero(body, index) {
            continue;
        }
        let base = instruction.memory_base();
        let near = index.saturating_sub(MAX_DISTANCE)..instructions.len().min(index + MAX_DISTANCE + 1);
        // The nearest one, if there are several.
        let mut lists: Vec<usize> = near
            .filter(|&at| {
                let other = &instructions[at];
                stores(other, 8, &FREELIST) && other.memory_base() == base && is_zero(body, at)
            })
            .collect();
        lists.sort_by_key(|at| at.abs_diff(index));
        let Some(&list) = lists.first() else { continue };
        let between = index.min(list)..=index.max(list);
        found.push(Candidate {
            owner,
            free_slots: (Svma(instruction.ip()), free_slots as u8),
            freelist: instructions[list].memory_displacement64() as u8,
            register: register_number(base).map(|number| number as u8),
            instead: emulated::before(body, index),
            takes: takes(body, list, base),
            divided: !straight(body, between.clone()) || !same_page(body, between, base),
        });
    }
    found
}

/// Whether it stores this many bytes at one of the displacements from a register other than the stack pointer.
fn stores(instruction: &Instruction, size: usize, displacements: &[u64]) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::And)
        && is_memory(instruction, 0)
        && instruction.memory_size().size() == size
        && instruction.memory_index() == Register::None
        && instruction.memory_base().is_gpr64()
        && instruction.memory_base() != Register::RSP
        && displacements.contains(&instruction.memory_displacement64())
}

/// Whether the instruction stores zero: a constant, or a register zeroed before, in order of address.
fn is_zero(body: &Body, index: usize) -> bool {
    let instruction = &body.instructions[index];
    if let Some(value) = immediate(instruction, 1) {
        return value == 0;
    }
    if instruction.mnemonic() != Mnemonic::Mov || !is_register(instruction, 1) {
        return false;
    }
    let stored = instruction.op1_register().full_register();
    let mut factory = InstructionInfoFactory::new();
    let before = body.instructions[index.saturating_sub(MAX_ZERO)..index].iter().rev();
    for earlier in before {
        if written_registers(&mut factory, earlier).contains(&stored) {
            let cleared = earlier.mnemonic() == Mnemonic::Xor
                && is_register(earlier, 1)
                && first_register(earlier) == Some(stored)
                && earlier.op1_register().full_register() == stored;
            let constant = earlier.mnemonic() == Mnemonic::Mov && immediate(earlier, 1) == Some(0);
            return cleared || constant;
        }
    }
    false
}

/// Whether code that runs the first of the instructions runs all of them in order, and no jump leads in between.
fn straight(body: &Body, range: std::ops::RangeInclusive<usize>) -> bool {
    let (first, last) = (*range.start(), *range.end());
    (first..last)
        .all(|index| body.successors(index).any(|next| next == index + 1) && !body.is_jump_target(index + 1))
}

/// Whether the register has the same value throughout the instructions: nothing writes it or, in unoptimised code,
/// everything that writes it reads the value from the same place in the frame.
fn same_page(body: &Body, range: std::ops::RangeInclusive<usize>, base: Register) -> bool {
    let mut factory = InstructionInfoFactory::new();
    let instructions = &body.instructions[range.clone()];
    let calls = |instruction: &Instruction| {
        matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall)
    };
    if instructions.iter().any(calls) {
        return false;
    }
    if !instructions.iter().any(|one| written_registers(&mut factory, one).contains(&base)) {
        return true;
    }
    let variable = variable_of(body, *range.start());
    variable.is_some()
        && variable_of(body, *range.end()) == variable
        && !instructions.iter().any(|other| writes(other, variable))
}

/// In code that keeps its variables in the frame: the displacement of the variable from which the base register of the
/// instruction was just loaded.
fn variable_of(body: &Body, index: usize) -> Option<u64> {
    /// Unoptimised code loads the pointer, and possibly a value to store, right before it is used.
    const MAX_RELOAD: usize = 3;
    if !body.frame_pointer {
        return None;
    }
    let base = body.instructions[index].memory_base();
    let mut factory = InstructionInfoFactory::new();
    let before = body.instructions[index.saturating_sub(MAX_RELOAD)..index].iter().rev();
    let load = before.into_iter().find(|one| written_registers(&mut factory, one).contains(&base))?;
    let reloads = load.mnemonic() == Mnemonic::Mov
        && is_memory(load, 1)
        && load.memory_index() == Register::None
        && load.memory_base() == Register::RBP;
    reloads.then(|| load.memory_displacement64())
}

/// Whether it writes the variable at this displacement in the frame.
fn writes(instruction: &Instruction, variable: Option<u64>) -> bool {
    is_memory(instruction, 0)
        && instruction.memory_base() == Register::RBP
        && Some(instruction.memory_displacement64()) == variable
        && !matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test)
}

/// Whether the code before the store that clears the list has read it from the same page.
fn takes(body: &Body, list: usize, base: Register) -> bool {
    let displacement = body.instructions[list].memory_displacement64();
    let variable = variable_of(body, list);
    for at in (list.saturating_sub(MAX_TAKE)..list).rev() {
        let instruction = &body.instructions[at];
        let reads = (1..instruction.op_count()).any(|operand| is_memory(instruction, operand))
            && instruction.memory_size().size() == 8
            && instruction.memory_index() == Register::None
            && instruction.memory_displacement64() == displacement;
        let same = || {
            let kept = instruction.memory_base() == base && same_page(body, at + 1..=list, base);
            kept || (variable.is_some()
                && variable_of(body, at) == variable
                && !body.instructions[at..list].iter().any(|other| writes(other, variable)))
        };
        if reads && same() {
            return true;
        }
        if !body.successors(at).any(|next| next == at + 1) {
            return false;
        }
    }
    false
}

fn assemble(candidates: Vec<Candidate>, slot_size: Option<u8>, sweepers: &BTreeSet<Svma>) -> RefillSites {
    let (taking, other): (Vec<Candidate>, Vec<Candidate>) =
        candidates.into_iter().partition(|candidate| candidate.takes);
    let mut open = Vec::new();
    let mut sites = Vec::new();
    let page = taking.first().map(|first| PageFields {
        free_slots: first.free_slots.1,
        freelist: first.freelist,
        slot_size,
    });
    let agreed = taking.iter().all(|candidate| Some(candidate.freelist) == page.map(|page| page.freelist));
    for candidate in &taking {
        match candidate.register {
            Some(register) if !candidate.divided => {
                let store = candidate.free_slots.0;
                let site = |address: Svma| RefillSite {
                    address,
                    store,
                    emulated: address != store,
                    register,
                    owner: candidate.owner,
                };
                match &candidate.instead {
                    Some(instead) => sites.extend(instead.iter().copied().map(site)),
                    None => sites.push(site(store)),
                }
            }
            _ => open.push(candidate.free_slots.0),
        }
    }
    // A sweep clears pages without taking anything; any other such code is not understood.
    let dropped: Vec<Svma> = other.iter().map(|candidate| candidate.free_slots.0).collect();
    let list = |addresses: &[Svma]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let strange: Vec<Svma> = other
        .iter()
        .filter(|candidate| !sweepers.contains(&candidate.owner))
        .map(|candidate| candidate.free_slots.0)
        .collect();
    let outcome = if !agreed {
        Outcome::Failed("the sites disagree about the offset of the free list".to_owned())
    } else if !open.is_empty() {
        Outcome::Failed(format!("it is not certain which page the stores at {} clear", list(&open)))
    } else if sites.is_empty() {
        Outcome::Failed("no code that takes a page's free slots was found".to_owned())
    } else if !strange.is_empty() {
        Outcome::Failed(format!(
            "stores at {} clear a page outside of the sweep without taking its slots",
            list(&strange)
        ))
    } else {
        Outcome::Passed
    };
    sites.sort_by_key(|site| site.address);
    RefillSites { sites, page: page.filter(|_| agreed), dropped, outcome }
}
