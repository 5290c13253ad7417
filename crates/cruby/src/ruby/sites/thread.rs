//! Finds the instructions at which CRuby reports the states of its threads: `RB_INTERNAL_THREAD_HOOK(event, th)` in
//! `thread_pthread.c`, from 3.2 on. It expands to `if (rb_internal_thread_event_hooks) rb_thread_execute_hooks(event, th)`,
//! so every place reads one static variable, which two exported functions write.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use iced_x86::{ConditionCode, FlowControl, Instruction, Mnemonic, Register};
use serde::{Deserialize, Serialize};

use super::flow::{Origin, Value, follow};
use super::guard::jump_behind;
use crate::address::Svma;
use crate::elf::ElfImage;
use crate::ruby::RubyVersion;
use crate::ruby::code::{Body, Code};
use crate::ruby::emulation::is_emulated_at;
use crate::ruby::outcome::Outcome;
use crate::ruby::reference::Kind;
use crate::ruby::x86::{first_register, immediate, is_memory, is_register, register_number};

/// An event of a thread (`RUBY_INTERNAL_THREAD_EVENT_*`, include/ruby/thread.h of 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ThreadEvent {
    /// It starts.
    Started,
    /// It wants the GVL.
    Ready,
    /// It has acquired the GVL.
    Resumed,
    /// It has released the GVL.
    Suspended,
    /// It ends.
    Exited,
}

impl ThreadEvent {
    /// All of them, in the order of their bits.
    pub const ALL: [Self; 5] = [Self::Started, Self::Ready, Self::Resumed, Self::Suspended, Self::Exited];

    fn from_constant(value: u64) -> Option<Self> {
        let bit = value.is_power_of_two().then(|| value.trailing_zeros() as usize)?;
        Self::ALL.get(bit).copied()
    }
}

/// Where the thread pointer is at a site. Registers are given by hardware number (0 rax … 15 r15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ThreadOperand {
    /// In a register.
    Register(u8),
    /// In the eight bytes at this offset from the address in a register: usually a stack slot.
    Memory(u8, i16),
}

/// One instruction at which a thread event happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadSite {
    /// The event.
    pub event: ThreadEvent,
    /// The conditional jump after the test for hooks, which the kernel emulates.
    pub address: Svma,
    /// Where the thread (`rb_thread_t *`) is when `address` is reached, if the hooks receive it (from 3.3 on) and the code
    /// shows it.
    pub thread: Option<ThreadOperand>,
    /// First address of the function.
    pub owner: Svma,
}

/// The thread sites of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadSites {
    /// Ordered by event and address; incomplete unless `outcome` is passed.
    pub sites: Vec<ThreadSite>,
    /// Whether the sites are complete, and what is missing if not.
    pub outcome: Outcome,
}

/// The first version with the hooks.
const FIRST: RubyVersion = RubyVersion::new(3, 2, 0);
/// The first version whose hooks receive the thread as an argument; in earlier ones it is the running thread.
const FIRST_TOLD: RubyVersion = RubyVersion::new(3, 3, 0);
/// Maximum number of instructions from the test to the call of the hooks, which may be inlined.
const MAX_WALK: usize = 192;
/// Maximum number of references to the variable examined: bounds the work on hostile code. Builds have 10 to 40.
const MAX_REFERENCES: usize = 256;
/// Minimum number of functions that read the variable, other than those that add and remove hooks; the five events are in them.
const MIN_READERS: usize = 2;

/// Finds the thread sites. A failure does not prevent anything else: the outcome says what is missing.
pub(in crate::ruby) fn find(code: &mut Code<'_>, version: RubyVersion) -> ThreadSites {
    if version < FIRST {
        let reason = "Ruby before 3.2 has no thread events".to_owned();
        return ThreadSites { sites: Vec::new(), outcome: Outcome::NotApplicable(reason) };
    }
    match find_sites(code, version >= FIRST_TOLD) {
        Ok((sites, outcome)) => ThreadSites { sites, outcome },
        Err(reason) => ThreadSites { sites: Vec::new(), outcome: Outcome::Failed(reason.to_owned()) },
    }
}

/// `passed`: whether the hooks receive the thread.
fn find_sites(code: &mut Code<'_>, passed: bool) -> Result<(Vec<ThreadSite>, Outcome), &'static str> {
    let image = code.image;
    let export = |name| {
        let address = image.symbol(name).map(|symbol| symbol.address);
        address.and_then(|address| image.function_index(address))
    };
    let add = export("rb_internal_thread_add_event_hook").ok_or("no rb_internal_thread_add_event_hook")?;
    let remove =
        export("rb_internal_thread_remove_event_hook").ok_or("no rb_internal_thread_remove_event_hook")?;
    let (variable, readers) = hooks_variable(code, add, remove)?;
    code.resolve_cold_parts(readers.iter().copied());
    let writers = [code.owner(add), code.owner(remove)];
    let owners: BTreeSet<usize> =
        readers.iter().map(|&reader| code.owner(reader)).filter(|owner| !writers.contains(owner)).collect();

    let mut tests: Vec<Test> = Vec::new();
    for owner in owners {
        let body = code.body(owner);
        tests.extend(tests_of(code, &body, owner, variable));
        if tests.len() > MAX_REFERENCES {
            return Err("very many references to the hooks");
        }
    }
    Ok(assemble(code, tests, passed))
}

/// The variable that both functions refer to and that others read: the list of hooks. (The other variable that both refer
/// to is its lock, which is only passed by address.)
fn hooks_variable(
    code: &Code<'_>,
    add: usize,
    remove: usize,
) -> Result<(Svma, BTreeSet<usize>), &'static str> {
    let image = code.image;
    let addressed = |function| -> BTreeSet<u64> {
        let parts = code.parts(function).into_iter().flat_map(|part| code.decode(part));
        parts.filter_map(|instruction| address_operand(image, &instruction)).collect()
    };
    let is_data = |address: &u64| image.bss().contains(&Svma(*address));
    let both: Vec<u64> = addressed(add).intersection(&addressed(remove)).copied().filter(is_data).collect();
    let found = referring(code, &both);
    let mut candidates = both.iter().filter_map(|&variable| {
        let functions = found.get(&variable)?;
        let reads = |&&function: &&usize| {
            code.decode(function).iter().any(|instruction| reads_quad(image, instruction, variable))
        };
        let readers: BTreeSet<usize> = functions.iter().filter(reads).copied().collect();
        let others = readers.iter().filter(|&&reader| reader != add && reader != remove).count();
        (others >= MIN_READERS).then_some((Svma(variable), readers))
    });
    match (candidates.next(), candidates.next()) {
        (Some(found), None) => Ok(found),
        (None, _) => Err("the list of thread event hooks was not found"),
        _ => Err("several variables may be the list of thread event hooks"),
    }
}

/// For each address, the extents that may refer to it by a 32-bit displacement, with up to one byte after it (the
/// immediate operand of a comparison).
fn referring(code: &Code<'_>, wanted: &[u64]) -> BTreeMap<u64, BTreeSet<usize>> {
    let mut found: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
    for (end, near, absolute) in code.displacements().iter(Kind::Any) {
        let targets = [Some(near), near.checked_add(1), absolute].into_iter().flatten();
        for target in targets.filter(|target| wanted.contains(target)) {
            found.entry(target).or_default().extend(code.image.function_index(Svma(end.wrapping_sub(1))));
        }
    }
    found
}

/// The global address in an instruction's memory operand.
fn address_operand(image: &ElfImage, instruction: &Instruction) -> Option<u64> {
    if instruction.is_ip_rel_memory_operand() {
        return Some(instruction.ip_rel_memory_address());
    }
    let operands = 0..instruction.op_count();
    if !image.is_fixed_position() {
        return None;
    }
    let absolute =
        instruction.memory_base() == Register::None && instruction.memory_index() == Register::None;
    if operands.clone().any(|operand| is_memory(instruction, operand)) {
        return absolute.then(|| instruction.memory_displacement64());
    }
    operands.clone().find_map(|operand| immediate(instruction, operand))
}

/// Whether it reads all eight bytes of the variable.
fn reads_quad(image: &ElfImage, instruction: &Instruction, variable: u64) -> bool {
    let reads = match instruction.mnemonic() {
        Mnemonic::Cmp => is_memory(instruction, 0) && immediate(instruction, 1) == Some(0),
        Mnemonic::Mov => is_register(instruction, 0) && is_memory(instruction, 1),
        _ => false,
    };
    reads && instruction.memory_size().size() == 8 && address_operand(image, instruction) == Some(variable)
}

/// A place that reads the list of hooks.
struct Test {
    owner: usize,
    /// The instruction that reads the list.
    read: Svma,
    /// The conditional jump that depends on it.
    jump: Option<Svma>,
    /// The event whose hooks run after it, and the function that runs them if it is not inlined.
    event: Option<(ThreadEvent, Option<Svma>)>,
    /// Other reads on the path.
    inner: Vec<Svma>,
    /// Where the second argument of that function, the thread, is at the jump.
    thread: Option<ThreadOperand>,
    /// Whether a jump leads between read and jump.
    entered_midway: bool,
}

fn tests_of(code: &Code<'_>, body: &Body, owner: usize, Svma(variable): Svma) -> Vec<Test> {
    let reads: Vec<usize> = (0..body.instructions.len())
        .filter(|&index| reads_quad(code.image, &body.instructions[index], variable))
        .collect();
    let read_at = |index: &usize| Svma(body.instructions[*index].ip());
    let all: Vec<Svma> = reads.iter().map(read_at).collect();
    reads
        .iter()
        .map(|&read| {
            let jump = tested_by(body, read);
            let walked = jump.and_then(|jump| walk(code, body, jump, &all));
            Test {
                owner,
                read: Svma(body.instructions[read].ip()),
                jump: jump.map(|jump| Svma(body.instructions[jump].ip())),
                event: walked.as_ref().map(|walked| (walked.event, walked.executor)),
                thread: walked.as_ref().zip(jump).and_then(|(walked, jump)| thread_at(body, jump, walked)),
                inner: walked.map(|walked| walked.inner).unwrap_or_default(),
                entered_midway: jump
                    .is_some_and(|jump| (read + 1..=jump).any(|index| body.is_jump_target(index))),
            }
        })
        .collect()
}

/// Index of the jump that depends on whether the value read by the instruction is zero.
fn tested_by(body: &Body, read: usize) -> Option<usize> {
    /// Maximum number of instructions between a load and its test.
    const MAX_DISTANCE: usize = 12;
    let instruction = &body.instructions[read];
    if instruction.mnemonic() == Mnemonic::Cmp {
        return jump_behind(&body.instructions, read);
    }
    let register = first_register(instruction)?;
    for (index, next) in body.instructions.iter().enumerate().skip(read + 1).take(MAX_DISTANCE) {
        let tests = next.mnemonic() == Mnemonic::Test
            && first_register(next) == Some(register)
            && is_register(next, 1)
            && next.op1_register().full_register() == register;
        if tests {
            return jump_behind(&body.instructions, index);
        }
        if next.flow_control() != FlowControl::Next || first_register(next) == Some(register) {
            return None;
        }
    }
    None
}

/// Where the hooks' second argument, `th`, is at the jump: `rb_thread_execute_hooks(event, th)` of
/// 3.3 and later. (Unknown if that function is inlined, or not called in straight-line code.)
fn thread_at(body: &Body, jump: usize, walked: &Walked) -> Option<ThreadOperand> {
    walked.executor?;
    let way = body.instructions.get(hooked_side(body, jump)?..=walked.call)?;
    let (call, before) = way.split_last()?;
    if before.iter().any(|instruction| instruction.flow_control() != FlowControl::Next) {
        return None;
    }
    let straight = Body::new([way.to_vec()]);
    let mut argument = None;
    let mut loads = HashMap::new();
    // The values that the registers have at the jump are followed.
    let complete = follow(&straight, 0, |index, state| {
        let instruction = &straight.instructions[index];
        if instruction.ip() == call.ip() {
            argument = state.register(Register::RSI);
        } else if instruction.mnemonic() == Mnemonic::Mov && is_memory(instruction, 1) {
            loads.insert(index, state.address(instruction));
        }
    });
    match argument.filter(|_| complete)? {
        Value { origin: Origin::Entry(register), offset: 0 } => {
            Some(ThreadOperand::Register(number(register)?))
        }
        Value { origin: Origin::Result(load, _), offset: 0 } => {
            let writes = |instruction: &Instruction| {
                is_memory(instruction, 0) || instruction.mnemonic() == Mnemonic::Push
            };
            let address = (*loads.get(&load)?)?;
            let displacement = i16::try_from(address.offset).ok()?;
            match address.origin {
                _ if before[..load].iter().any(writes) => None,
                Origin::Stack => Some(ThreadOperand::Memory(number(Register::RSP)?, displacement)),
                Origin::Entry(base) => Some(ThreadOperand::Memory(number(base)?, displacement)),
                _ => None,
            }
        }
        _ => None,
    }
}

fn number(register: Register) -> Option<u8> {
    register_number(register).map(|number| number as u8)
}

struct Walked {
    event: ThreadEvent,
    executor: Option<Svma>,
    /// Index of the call.
    call: usize,
    inner: Vec<Svma>,
}

/// A path through the code that runs if there are hooks.
#[derive(Clone)]
struct Way {
    at: usize,
    /// Registers that hold an event constant.
    constants: HashMap<Register, ThreadEvent>,
    /// Reads of the list on this path; the inlined body of the function that runs the hooks has one.
    inner: Vec<Svma>,
}

/// Finds the nearest call that has an event as its first argument, on the paths with hooks.
fn walk(code: &Code<'_>, body: &Body, jump: usize, reads: &[Svma]) -> Option<Walked> {
    /// The inlined body reads the list once.
    const MAX_INNER: usize = 1;
    let start = hooked_side(body, jump)?;
    let mut seen = BTreeSet::new();
    let mut ways = VecDeque::from([Way { at: start, constants: HashMap::new(), inner: Vec::new() }]);
    // The side to take at a jump that depends on an inner read.
    let mut sides: HashMap<usize, usize> = HashMap::new();
    for _ in 0..MAX_WALK {
        let mut way = ways.pop_front()?;
        let Some(instruction) = body.instructions.get(way.at) else { continue };
        if !seen.insert(way.at) {
            continue;
        }
        let address = Svma(instruction.ip());
        if reads.contains(&address) {
            way.inner.push(address);
            if way.inner.len() > MAX_INNER {
                continue;
            }
            let tested = tested_by(body, way.at);
            sides.extend(tested.and_then(|jump| Some((jump, hooked_side(body, jump)?))));
        }
        let is_call = matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall);
        let leaves = instruction.flow_control() == FlowControl::UnconditionalBranch
            && body.index_of(Svma(instruction.near_branch_target())).is_none();
        if (is_call || leaves)
            && let Some(&event) = way.constants.get(&Register::RDI)
        {
            let executor = code.callee(instruction).address;
            return Some(Walked { event, executor, call: way.at, inner: way.inner });
        }
        if is_call {
            way.constants.retain(|register, _| PRESERVED.contains(register));
        } else {
            follow_constants(&mut way.constants, instruction);
        }
        if let Some(&side) = sides.get(&way.at) {
            ways.push_back(Way { at: side, ..way });
        } else {
            ways.extend(body.successors(way.at).map(|next| Way { at: next, ..way.clone() }));
        }
    }
    None
}

/// Registers that a call preserves (System V ABI).
const PRESERVED: [Register; 6] =
    [Register::RBX, Register::RBP, Register::R12, Register::R13, Register::R14, Register::R15];

/// Where execution continues after a comparison with zero if the list is not empty.
fn hooked_side(body: &Body, jump: usize) -> Option<usize> {
    let instruction = &body.instructions[jump];
    match instruction.condition_code() {
        ConditionCode::ne => body.index_of(Svma(instruction.near_branch_target())),
        ConditionCode::e => Some(jump + 1),
        _ => None,
    }
}

fn follow_constants(constants: &mut HashMap<Register, ThreadEvent>, instruction: &Instruction) {
    let Some(register) = first_register(instruction) else { return };
    let value = match instruction.mnemonic() {
        Mnemonic::Mov if is_register(instruction, 1) => {
            constants.get(&instruction.op1_register().full_register()).copied()
        }
        Mnemonic::Mov => immediate(instruction, 1).and_then(ThreadEvent::from_constant),
        Mnemonic::Test | Mnemonic::Cmp | Mnemonic::Push => constants.get(&register).copied(),
        _ => None,
    };
    match value {
        Some(event) => constants.insert(register, event),
        None => constants.remove(&register),
    };
}

fn assemble(code: &Code<'_>, tests: Vec<Test>, passed: bool) -> (Vec<ThreadSite>, Outcome) {
    let executors: BTreeSet<usize> = tests
        .iter()
        .filter_map(|test| code.owner_of(test.event?.1?))
        .filter(|&owner| tests.iter().any(|test| test.owner == owner))
        .collect();
    let inner: BTreeSet<Svma> = tests.iter().flat_map(|test| test.inner.iter().copied()).collect();
    let mut sites = Vec::new();
    let mut open = Vec::new();
    for test in tests {
        if executors.contains(&test.owner) || inner.contains(&test.read) {
            continue;
        }
        let (Some(jump), Some((event, _)), false) = (test.jump, test.event, test.entered_midway) else {
            open.push(test.read.to_string());
            continue;
        };
        if is_emulated_at(code.image, jump) {
            let (thread, owner) = (test.thread.filter(|_| passed), code.start(test.owner));
            sites.push(ThreadSite { event, address: jump, thread, owner });
        } else {
            open.push(jump.to_string());
        }
    }
    sites.sort_by_key(|site| (site.event, site.address));
    let missing: Vec<String> = ThreadEvent::ALL
        .into_iter()
        .filter(|&event| sites.iter().all(|site| site.event != event))
        .map(|event| format!("{event:?}"))
        .collect();
    let outcome = if !open.is_empty() {
        Outcome::Failed(format!("tests for hooks of an unknown event at {}", open.join(", ")))
    } else if !missing.is_empty() {
        Outcome::Failed(format!("no site for {}", missing.join(", ")))
    } else {
        Outcome::Passed
    };
    (sites, outcome)
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;
    use crate::debian::libruby_image;

    const VARIABLE: u64 = 0x2000;

    /// The events of the tests in code at 0x1000, with the addresses of their jumps.
    fn events(code: &[u8]) -> Vec<(Option<ThreadEvent>, Option<u64>)> {
        let image = libruby_image();
        let instructions = Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE).into_iter().collect();
        let tests = tests_of(&Code::new(&image), &Body::new([instructions]), 0, Svma(VARIABLE));
        tests
            .into_iter()
            .map(|test| (test.event.map(|(event, _)| event), test.jump.map(|jump| jump.0)))
            .collect()
    }

    /// `cmp qword [rip+variable], 0` as the first instruction.
    fn compare() -> Vec<u8> {
        let displacement = (VARIABLE - 0x1008) as u32;
        [&[0x48, 0x83, 0x3d][..], &displacement.to_le_bytes(), &[0]].concat()
    }

    /// The call on the side with hooks has the event, whichever side is the target of the jump; a call on the other side does not.
    #[test]
    fn sides() {
        let call = [0xbf, 2, 0, 0, 0, 0xe8, 0, 1, 0, 0, 0xc3];
        // jne +1; ret; mov edi, 2; call
        let taken = [&compare()[..], &[0x75, 1, 0xc3], &call].concat();
        assert_eq!(events(&taken), [(Some(ThreadEvent::Ready), Some(0x1008))]);
        // je +11; mov edi, 2; call; ret; ret
        let fallen = [&compare()[..], &[0x74, 11], &call, &[0xc3]].concat();
        assert_eq!(events(&fallen), [(Some(ThreadEvent::Ready), Some(0x1008))]);
        // je +1; ret; mov edi, 2; call
        let other = [&compare()[..], &[0x74, 1, 0xc3], &call].concat();
        assert_eq!(events(&other), [(None, Some(0x1008))]);
    }

    /// Where the thread is at the jump: in the register that is passed on, or in the slot that is loaded.
    #[test]
    fn threads() {
        let place = |slow: &[u8]| {
            let code = [&compare()[..], &[0x75, 1, 0xc3], slow].concat();
            let image = libruby_image();
            let instructions =
                Decoder::with_ip(64, &code, 0x1000, DecoderOptions::NONE).into_iter().collect();
            let tests = tests_of(&Code::new(&image), &Body::new([instructions]), 0, Svma(VARIABLE));
            assert_eq!(tests.len(), 1);
            tests[0].thread
        };
        let call = [0xbf, 2, 0, 0, 0, 0xe8, 0, 1, 0, 0, 0xc3];
        // mov rsi, rbp
        assert_eq!(place(&[&[0x48, 0x89, 0xee][..], &call].concat()), Some(ThreadOperand::Register(5)));
        // it is already in rsi
        assert_eq!(place(&call), Some(ThreadOperand::Register(6)));
        // mov rsi, [rsp+24]
        let loaded = [0x48, 0x8b, 0x74, 0x24, 24];
        assert_eq!(place(&[&loaded[..], &call].concat()), Some(ThreadOperand::Memory(4, 24)));
        // mov [rsp+24], rax first: it was in rax at the jump.
        let stored = [0x48, 0x89, 0x44, 0x24, 24];
        assert_eq!(place(&[&stored[..], &loaded, &call].concat()), Some(ThreadOperand::Register(0)));
        // mov [rbp+24], rax first: possibly the same slot.
        let stored = [0x48, 0x89, 0x45, 24];
        assert_eq!(place(&[&stored[..], &loaded, &call].concat()), None);
        // lea rsi, [rbp+8]
        assert_eq!(place(&[&[0x48, 0x8d, 0x75, 8][..], &call].concat()), None);
    }

    /// A call in between clobbers the constant unless it is in a register that calls preserve.
    #[test]
    fn constants_over_calls() {
        // jne +1; ret; mov edi, 8; call; call; ret: the first call has the event.
        let lock = [0xe8, 0, 1, 0, 0];
        let head = [&compare()[..], &[0x75, 1, 0xc3]].concat();
        let kept = [&head[..], &[0xbb, 8, 0, 0, 0], &lock, &[0x89, 0xdf], &lock, &[0xc3]].concat();
        assert_eq!(events(&kept)[0].0, Some(ThreadEvent::Suspended));
        let lost = [&head[..], &[0xb8, 8, 0, 0, 0], &lock, &[0x89, 0xc7], &lock, &[0xc3]].concat();
        assert_eq!(events(&lost)[0].0, None);
        let none = [&head[..], &[0xbf, 3, 0, 0, 0], &lock, &[0xc3]].concat();
        assert_eq!(events(&none)[0].0, None);
    }
}
