//! Finds the instructions at which threads of CRuby up to 3.1 wait for, acquire and release the GVL (`thread_pthread.c`).
//!
//! - `gvl_acquire_common(gvl, th)` is out of line. Only this function stores `ETIMEDOUT` to a field (`gvl->timer_err`) and
//!   waits for a condition variable. It starts with a test of `gvl->owner`, and waits with `&gvl->lock`.
//! - `gvl_release_common(gvl)` is mostly inlined: `rb_native_mutex_lock(&gvl->lock)`, then `gvl->owner = 0`.
//!
//! `gvl` is the first argument: `&vm->gvl`, a part of `vm`, up to 2.7, the Ractor's lock from 3.0 on.

use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{ConditionCode, FlowControl, Instruction, Mnemonic, Register};
use serde::{Deserialize, Serialize};

use super::callers::{callers_of, calling_functions};
use super::flow::{Origin, Value, follow};
use crate::address::Svma;
use crate::ruby::RubyVersion;
use crate::ruby::code::{Body, Code, is_jump};
use crate::ruby::emulation::is_emulated_at;
use crate::ruby::outcome::Outcome;
use crate::ruby::reference::Kind;
use crate::ruby::x86::{first_register, has_frame_pointer, immediate, is_memory, is_register};

/// What a thread does with the GVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum GvlEvent {
    /// It wants the GVL: the entry of `gvl_acquire_common`.
    Wait,
    /// It has acquired it: a return of that function, or a jump out of it to another that returns in its place.
    Acquired,
    /// It is about to release it: the call that locks the GVL's mutex before the owner is cleared.
    Release,
}

impl GvlEvent {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Wait, Self::Acquired, Self::Release];
}

/// One instruction at which a thread does so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GvlSite {
    /// The event.
    pub event: GvlEvent,
    /// The instruction.
    pub address: Svma,
    /// Whether the kernel emulates it instead of single-stepping it: always for calls and jumps, sometimes for entries and returns.
    pub emulated: bool,
    /// First address of the function.
    pub owner: Svma,
    /// For a release: the instruction that clears the owner, which is in another function if `gvl_release_common` is
    /// out of line.
    pub cleared: Option<Svma>,
}

/// Offsets from the first argument of `gvl_acquire_common`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GvlFields {
    /// The thread that holds the GVL (`rb_thread_t *`; up to 2.7 a pointer that is only compared with null).
    pub owner: i64,
    /// The mutex.
    pub lock: i64,
}

/// The GVL sites of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GvlSites {
    /// Ordered by event and address; incomplete unless `outcome` is passed.
    pub sites: Vec<GvlSite>,
    /// Offsets of the fields; `None` if unknown.
    pub fields: Option<GvlFields>,
    /// Whether the sites are complete, and what is missing if not.
    pub outcome: Outcome,
}

/// The first version that has thread events instead.
const FIRST_EVENTS: RubyVersion = RubyVersion::new(3, 2, 0);
/// `ETIMEDOUT` on Linux.
const TIMED_OUT: u32 = 110;
/// Maximum number of functions with that number in their code, and of functions that lock a mutex, that are examined:
/// bounds the work on hostile code. Builds have a few dozen.
const MAX_FUNCTIONS: usize = 1024;
const MAX_LOCKING: usize = 256;
/// Maximum number of instructions from the return of the lock to the store that clears the owner.
const MAX_RELEASE: usize = 15;
/// Maximum depth of callers from the acquiring function up to an exported one.
const MAX_DEPTH: usize = 6;
/// Exported functions that release and acquire the GVL.
const ROOTS: [&str; 3] = ["rb_nogvl", "rb_thread_schedule", "rb_thread_call_without_gvl"];
/// Compilers that may ignore interposition inline the first one into its callers.
const COND_WAIT: [&str; 2] = ["rb_native_cond_wait", "pthread_cond_wait"];
const MUTEX_LOCK: [&str; 2] = ["rb_native_mutex_lock", "pthread_mutex_lock"];

/// Finds the GVL sites. A failure does not prevent anything else: the outcome says what is missing.
pub(in crate::ruby) fn find(code: &mut Code<'_>, version: RubyVersion) -> GvlSites {
    let none = |outcome| GvlSites { sites: Vec::new(), fields: None, outcome };
    if version >= FIRST_EVENTS {
        return none(Outcome::NotApplicable("Ruby from 3.2 on has thread events".to_owned()));
    }
    let acquire = match Acquire::find(code) {
        Ok(acquire) => acquire,
        Err(reason) => return none(Outcome::Failed(reason.to_owned())),
    };
    let mut sites = acquire.sites;
    let mut open: Vec<String> = acquire.open;
    match releases(code, acquire.owner, acquire.fields) {
        Ok((found, strange)) => {
            if found.is_empty() {
                open.push("no release was found".to_owned());
            }
            sites.extend(found);
            open.extend(strange);
        }
        Err(reason) => open.push(reason.to_owned()),
    }
    sites.sort_by_key(|site| (site.event, site.address));
    let outcome = if open.is_empty() { Outcome::Passed } else { Outcome::Failed(open.join("; ")) };
    GvlSites { sites, fields: Some(acquire.fields), outcome }
}

/// The function that acquires the GVL.
struct Acquire {
    owner: usize,
    fields: GvlFields,
    /// Its entry and its exits.
    sites: Vec<GvlSite>,
    /// What could not be determined.
    open: Vec<String>,
}

impl Acquire {
    fn find(code: &mut Code<'_>) -> Result<Self, &'static str> {
        let mut candidates = waiting_with_timeout(code)?.into_iter();
        let owner = match (candidates.next(), candidates.next()) {
            (Some(owner), None) => owner,
            (None, _) => return Err("the function that acquires the GVL was not found"),
            _ => return Err("several functions may be the one that acquires the GVL"),
        };
        if !reached(code, owner) {
            return Err("the function that may acquire the GVL is not called where threads are switched");
        }
        // Parts that the compiler moved away belong to the function.
        let targets = code.decode(owner).into_iter().filter(is_jump);
        let targets: BTreeSet<usize> = targets
            .filter_map(|jump| code.image.function_index(Svma(jump.near_branch_target())))
            .filter(|&target| target != owner)
            .collect();
        code.resolve_cold_parts(targets);

        let body = code.body(owner);
        let start = code.start(owner);
        let fields = fields(code, &body, start).ok_or("the fields of the GVL were not found")?;
        let image = code.image;
        let site = |event, address| {
            let emulated = is_emulated_at(image, address);
            GvlSite { event, address, emulated, owner: start, cleared: None }
        };
        let mut sites = vec![site(GvlEvent::Wait, start)];
        let mut open = Vec::new();
        for instruction in &body.instructions {
            let address = Svma(instruction.ip());
            match end(&body, instruction) {
                End::Inside => {}
                End::Leaves => sites.push(site(GvlEvent::Acquired, address)),
                End::Unknown => open.push(format!("the target of the jump at {address} is unknown")),
            }
        }
        if sites.len() == 1 {
            open.push("the acquiring function does not end".to_owned());
        }
        Ok(Self { owner, fields, sites, open })
    }
}

enum End {
    Inside,
    Leaves,
    Unknown,
}

/// Whether the function ends with the instruction.
fn end(body: &Body, instruction: &Instruction) -> End {
    let inside = || body.index_of(Svma(instruction.near_branch_target())).is_some();
    match instruction.flow_control() {
        FlowControl::Return => End::Leaves,
        FlowControl::UnconditionalBranch if !inside() => End::Leaves,
        // A tail call through the slot of another function. A jump table would have an index.
        FlowControl::IndirectBranch if instruction.is_ip_rel_memory_operand() => End::Leaves,
        FlowControl::IndirectBranch => End::Unknown,
        FlowControl::ConditionalBranch if !inside() => End::Unknown,
        _ => End::Inside,
    }
}

/// The functions that store `ETIMEDOUT` to a field and wait for a condition variable.
fn waiting_with_timeout(code: &mut Code<'_>) -> Result<BTreeSet<usize>, &'static str> {
    let (Svma(text), bytes) = code.image.text();
    let pattern = TIMED_OUT.to_le_bytes();
    let places = bytes.array_windows::<4>().enumerate().filter(|(_, window)| **window == pattern);
    let mut extents = BTreeSet::new();
    for (at, _) in places {
        extents.extend(code.image.function_index(Svma(text + at as u64)));
        if extents.len() > MAX_FUNCTIONS {
            return Err("very many functions contain ETIMEDOUT");
        }
    }
    extents.retain(|&extent| stores_timeout(&code.decode(extent)));
    code.resolve_cold_parts(extents.iter().copied());
    let owners: BTreeSet<usize> = extents.into_iter().map(|extent| code.owner(extent)).collect();
    let waits = |&owner: &usize| {
        code.body(owner).instructions.iter().any(|instruction| calls(code, instruction, &COND_WAIT))
    };
    Ok(owners.into_iter().filter(waits).collect())
}

fn stores_timeout(instructions: &[Instruction]) -> bool {
    let frame_pointer = has_frame_pointer(instructions);
    instructions.iter().any(|instruction| {
        let base = instruction.memory_base();
        instruction.mnemonic() == Mnemonic::Mov
            && is_memory(instruction, 0)
            && instruction.memory_size().size() == 4
            && immediate(instruction, 1) == Some(TIMED_OUT.into())
            && instruction.memory_index() == Register::None
            && base.is_gpr64()
            && base != Register::RSP
            && !(frame_pointer && base == Register::RBP)
    })
}

/// Whether it calls one of the functions.
fn calls(code: &Code<'_>, instruction: &Instruction, names: &[&str]) -> bool {
    if !matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
        return false;
    }
    let callee = code.callee(instruction);
    let by_name = callee.name.is_some_and(|name| names.contains(&name));
    let symbol = |name: &&str| code.image.symbol(name).map(|symbol| symbol.address);
    by_name || callee.address.is_some_and(|address| names.iter().any(|name| symbol(name) == Some(address)))
}

/// Whether one of the exported functions that switch threads calls the function, directly or indirectly.
fn reached(code: &mut Code<'_>, owner: usize) -> bool {
    let roots: BTreeSet<Svma> =
        ROOTS.iter().filter_map(|name| code.image.symbol(name)).map(|symbol| symbol.address).collect();
    let mut seen = BTreeSet::from([code.start(owner)]);
    let mut level = seen.clone();
    for _ in 0..MAX_DEPTH {
        let mut callers = BTreeSet::new();
        for &function in &level {
            callers.extend(calling_functions(code, function));
        }
        if !callers.is_disjoint(&roots) {
            return true;
        }
        level = callers.difference(&seen).copied().collect();
        seen.extend(&level);
        if level.is_empty() || seen.len() > MAX_FUNCTIONS {
            return false;
        }
    }
    false
}

/// Offsets of owner and lock: the function first tests whether the owner is null, and waits with the lock.
fn fields(code: &Code<'_>, body: &Body, start: Svma) -> Option<GvlFields> {
    let entry = body.index_of(start)?;
    let argument = |value: Option<Value>| value.filter(|value| value.origin == Origin::Entry(Register::RDI));
    // Loaded value → the offset from the argument at which it was read.
    let mut loaded: BTreeMap<usize, i64> = BTreeMap::new();
    let mut tested: BTreeMap<usize, i64> = BTreeMap::new();
    let mut locks: BTreeMap<usize, Option<Value>> = BTreeMap::new();
    let complete = follow(body, entry, |index, state| {
        let instruction = &body.instructions[index];
        let quad = || instruction.memory_size().size() == 8;
        if calls(code, instruction, &COND_WAIT) {
            locks.insert(index, argument(state.register(Register::RSI)));
        } else if instruction.mnemonic() == Mnemonic::Mov && is_memory(instruction, 1) && quad() {
            loaded.extend(argument(state.address(instruction)).map(|value| (index, value.offset)));
        } else if instruction.mnemonic() == Mnemonic::Cmp && is_memory(instruction, 0) && quad() {
            let zero = immediate(instruction, 1) == Some(0);
            let address = argument(state.address(instruction)).filter(|_| zero);
            match address {
                Some(value) => tested.insert(index, value.offset),
                None => tested.remove(&index),
            };
        } else if instruction.mnemonic() == Mnemonic::Test
            && is_register(instruction, 1)
            && first_register(instruction) == Some(instruction.op1_register())
            && let Some(Value { origin: Origin::Result(load, _), offset: 0 }) = state.operand(instruction, 0)
            && let Some(&offset) = loaded.get(&load)
        {
            tested.insert(index, offset);
        }
    });
    let owner = *tested.get(&first_decision(body, entry)?).filter(|_| complete)?;
    let mut locks = locks.into_values();
    let lock = locks.next()??;
    locks.all(|other| other == Some(lock)).then_some(GvlFields { owner, lock: lock.offset })
}

/// Index of the comparison on which the first conditional jump of a function depends, if there is no call before it.
fn first_decision(body: &Body, entry: usize) -> Option<usize> {
    /// Maximum number of instructions that set up the frame.
    const MAX_PROLOGUE: usize = 64;
    let mut last = None;
    for (index, instruction) in body.instructions.iter().enumerate().skip(entry).take(MAX_PROLOGUE) {
        match instruction.flow_control() {
            FlowControl::Next => {}
            FlowControl::ConditionalBranch => {
                let by_zero = matches!(instruction.condition_code(), ConditionCode::e | ConditionCode::ne);
                return last.filter(|_| by_zero);
            }
            _ => return None,
        }
        if matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test) {
            last = Some(index);
        } else if instruction.rflags_modified() != 0 {
            last = None;
        }
    }
    None
}

/// The calls of a function that lock a mutex, and what follows them.
#[derive(Default)]
struct Locking {
    /// Indices of the locking calls, with the mutex.
    locks: BTreeMap<usize, Option<Value>>,
    /// Indices of stores of eight zero bytes, with their address.
    zeroes: BTreeMap<usize, Option<Value>>,
    /// Indices of calls in this image, with their target and first argument.
    calls: BTreeMap<usize, (Svma, Option<Value>)>,
}

impl Locking {
    fn of(code: &Code<'_>, body: &Body, entry: usize) -> Option<Self> {
        let mut found = Self::default();
        let complete = follow(body, entry, |index, state| {
            let instruction = &body.instructions[index];
            let argument = state.register(Register::RDI);
            if calls(code, instruction, &MUTEX_LOCK) {
                found.locks.insert(index, argument);
            } else if leads_on(body, instruction) {
                if let Some(target) = code.callee(instruction).address {
                    found.calls.insert(index, (target, argument));
                }
            } else if instruction.mnemonic() == Mnemonic::Mov
                && is_memory(instruction, 0)
                && instruction.memory_size().size() == 8
            {
                let zero = Value { origin: Origin::Constant, offset: 0 };
                let address =
                    state.address(instruction).filter(|_| state.operand(instruction, 1) == Some(zero));
                found.zeroes.insert(index, address);
            }
        });
        complete.then_some(found)
    }
}

/// Whether it is a call, or a jump to another function.
fn leads_on(body: &Body, instruction: &Instruction) -> bool {
    let is_call = matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall);
    is_call
        || matches!(end(body, instruction), End::Leaves) && instruction.flow_control() != FlowControl::Return
}

type Releases = (Vec<GvlSite>, Vec<String>);

/// The calls that lock the GVL's mutex before the owner is cleared, and a list of what could not be determined.
fn releases(code: &mut Code<'_>, acquire: usize, fields: GvlFields) -> Result<Releases, &'static str> {
    let extents = callers_by_name(code, &MUTEX_LOCK);
    if extents.len() > MAX_LOCKING {
        return Err("very many functions lock a mutex");
    }
    code.resolve_cold_parts(extents.iter().copied());
    let owners: BTreeSet<usize> = extents.iter().map(|&extent| code.owner(extent)).collect();
    // Function that may clear the owner → the clearing instruction.
    let mut clearing: BTreeMap<Svma, Option<Svma>> = BTreeMap::new();
    let mut through: BTreeMap<Svma, BTreeSet<Svma>> = BTreeMap::new();
    let mut sites = Vec::new();
    for owner in owners.into_iter().filter(|&owner| owner != acquire) {
        let body = code.body(owner);
        let start = code.start(owner);
        let Some(locking) = body.index_of(start).and_then(|entry| Locking::of(code, &body, entry)) else {
            return Err("a function that locks a mutex is too large");
        };
        for (&lock, value) in &locking.locks {
            let Some(gvl) = value.map(|value| value.plus(-fields.lock)) else { continue };
            let owner_field = gvl.plus(fields.owner);
            let cleared = within(&body, lock, MAX_RELEASE).into_iter().find_map(|index| {
                let address = Svma(body.instructions[index].ip());
                if locking.zeroes.get(&index) == Some(&Some(owner_field)) {
                    return Some(address);
                }
                let &(target, argument) = locking.calls.get(&index)?;
                if argument != Some(gvl) {
                    return None;
                }
                let cleared = *clearing.entry(target).or_insert_with(|| clears(code, target, fields));
                through.entry(target).or_default().extend(cleared.map(|_| address));
                cleared
            });
            if let Some(cleared) = cleared {
                let address = Svma(body.instructions[lock].ip());
                sites.push(GvlSite {
                    event: GvlEvent::Release,
                    address,
                    emulated: is_emulated_at(code.image, address),
                    owner: start,
                    cleared: Some(cleared),
                });
            }
        }
    }
    Ok((sites, unmatched(code, &through)))
}

/// Callers of the functions that clear the owner, other than the known ones.
fn unmatched(code: &Code<'_>, known: &BTreeMap<Svma, BTreeSet<Svma>>) -> Vec<String> {
    let clearing = known.iter().filter(|(_, calls)| !calls.is_empty());
    let mut found = Vec::new();
    for (&Svma(function), calls) in clearing {
        let wanted = function..function.saturating_add(1);
        for reference in code.references(std::slice::from_ref(&wanted), Kind::Branch) {
            let address = reference.address;
            if !calls.contains(&address) {
                found.push(format!("the call at {address} releases the GVL without a known lock"));
            }
        }
    }
    found
}

/// Where the function at the address clears the owner of the GVL that it receives as first argument.
fn clears(code: &Code<'_>, function: Svma, fields: GvlFields) -> Option<Svma> {
    let owner = code.image.function_index(function).filter(|&owner| code.start(owner) == function)?;
    let body = code.body(owner);
    let entry = body.index_of(function)?;
    let locking = Locking::of(code, &body, entry)?;
    let wanted = Value { origin: Origin::Entry(Register::RDI), offset: fields.owner };
    let index = within(&body, entry, MAX_RELEASE)
        .into_iter()
        .find(|index| locking.zeroes.get(index) == Some(&Some(wanted)))?;
    Some(Svma(body.instructions[index].ip()))
}

/// Indices of the instructions that can run within this many instructions after the one at `from`, nearest first.
fn within(body: &Body, from: usize, distance: usize) -> Vec<usize> {
    let mut found = Vec::new();
    let mut level = BTreeSet::from([from]);
    for _ in 0..distance {
        level = level.iter().flat_map(|&index| body.successors(index)).collect();
        level.retain(|index| !found.contains(index));
        found.extend(&level);
    }
    found
}

/// The extents that call a function with one of the names, whether this image defines it or imports it.
fn callers_by_name(code: &Code<'_>, names: &[&str]) -> BTreeSet<usize> {
    let image = code.image;
    let mut found = BTreeSet::new();
    for name in names {
        if let Some(symbol) = image.symbol(name) {
            found.extend(callers_of(code, symbol.address));
        }
        let imported: Vec<_> = image.imports(name).map(|Svma(at)| at..at.saturating_add(1)).collect();
        let references = code.references(&imported, Kind::Any);
        found.extend(references.into_iter().map(|reference| reference.function));
    }
    found
}
