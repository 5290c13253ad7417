//! The finder for A64 code, for CRuby up to 3.4.
//!
//! Up to 3.3 the test of an event is a load of `objspace->hook_events` and a jump on one bit of it, mostly `ldr w0, [x20, #20]` and
//! `tbnz w0, #22, …`. The jump is the site: the kernel simulates it. The place of the word with the events is known from
//! `rb_during_gc` ([`hook_events`]). The calls of the function that runs the hooks, each with the constant of its event, are
//! an independent witness: each must be guarded by such a test of its own event. In 3.4 that function does the test itself,
//! and its calls are the sites.

use std::collections::{BTreeMap, BTreeSet};

use gctrace_common::event::Point;
use yaxpeax_arm::armv8::a64::{Opcode, Operand};

use super::callers::{MAX_SITES, callers_of, endless, hook_events, name_owners};
use super::facts::HOOK;
use super::guard::point_of_constant;
use super::unit::GcUnit;
use super::{Field, Findings, Site, SiteForm, point_of_bit};
use crate::address::Svma;
use crate::ruby::aarch64::{Flow, Instruction, SP, decode};
use crate::ruby::code::Code;
use crate::ruby::vm_path::VmPath;

/// Maximum number of instructions between a load and the test of the loaded value.
const MAX_DISTANCE: usize = 10;
/// Maximum number of instructions before a call in which its constant arguments are set up.
const MAX_SETUP: usize = 14;
/// A function that receives at least this many distinct event constants runs the hooks.
const MIN_EVENTS: usize = 3;
/// Maximum number of rounds in which cold parts of members are discovered.
const MAX_ROUNDS: usize = 4;
/// The frame pointer: it addresses locals.
const FRAME: u16 = 29;

/// A jump on one event bit of a word in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EventTest {
    /// Index of the load.
    load: usize,
    /// The word.
    field: Field,
    /// The event with that bit.
    point: Point,
}

/// A call of any function with the constant of an event among its first arguments.
#[derive(Clone, Copy, Debug)]
struct EventCall {
    owner: usize,
    index: usize,
    callee: Svma,
    point: Point,
}

/// A function with its cold parts, in order of address.
struct Body {
    instructions: Vec<Instruction>,
    /// Indices at which a part starts.
    starts: BTreeSet<usize>,
    /// Target → indices of the jumps of this function that lead there.
    jumps: BTreeMap<Svma, Vec<usize>>,
}

impl Body {
    fn new(parts: impl IntoIterator<Item = Vec<Instruction>>) -> Self {
        let mut body = Self { instructions: Vec::new(), starts: BTreeSet::new(), jumps: BTreeMap::new() };
        for part in parts {
            body.starts.insert(body.instructions.len());
            body.instructions.extend(part);
        }
        for (index, instruction) in body.instructions.iter().enumerate() {
            if let Flow::Conditional(target) | Flow::Jump(target) = instruction.flow() {
                body.jumps.entry(target).or_default().push(index);
            }
        }
        body
    }

    fn jumps_to(&self, index: usize) -> &[usize] {
        self.jumps.get(&self.instructions[index].address).map_or(&[], Vec::as_slice)
    }

    /// Whether the code before `index` continues there, not counting conditional jumps.
    fn falls_into(&self, index: usize) -> bool {
        index > 0
            && !self.starts.contains(&index)
            && matches!(self.instructions[index - 1].flow(), Flow::Next | Flow::Call(_) | Flow::IndirectCall)
    }

    /// Indices of the conditional jumps that decide whether the block around `index` runs, including those over `hops` blocks
    /// that only lead there.
    fn deciding(&self, index: usize, hops: u32) -> Vec<usize> {
        let mut start = index;
        while self.jumps_to(start).is_empty() && self.falls_into(start) {
            start -= 1;
        }
        let mut found = Vec::new();
        for &jump in self.jumps_to(start) {
            match self.instructions[jump].flow() {
                Flow::Conditional(_) => found.push(jump),
                _ if hops > 0 => found.extend(self.deciding(jump, hops - 1)),
                _ => {}
            }
        }
        if start > 0 && !self.starts.contains(&start) {
            match self.instructions[start - 1].flow() {
                Flow::Conditional(_) => found.push(start - 1),
                Flow::Next | Flow::Call(_) | Flow::IndirectCall if hops > 0 => {
                    found.extend(self.deciding(start - 1, hops - 1));
                }
                _ => {}
            }
        }
        found
    }

    /// Index of the instruction before `index` that last wrote the register, in straight-line code.
    fn definition(&self, index: usize, register: u16) -> Option<usize> {
        for at in (index.saturating_sub(MAX_DISTANCE)..index).rev() {
            let instruction = &self.instructions[at];
            if !matches!(instruction.flow(), Flow::Next | Flow::Conditional(_))
                || self.starts.contains(&(at + 1))
            {
                return None;
            }
            if instruction.written().any(|written| written == register) {
                return Some(at);
            }
        }
        None
    }

    /// The event test that ends in the jump at `index`.
    fn event_test(&self, index: usize) -> Option<EventTest> {
        let (bit, tested, at) = self.tested_bit(index)?;
        let load = self.definition(at, tested)?;
        let (_, base, offset, size) = self.instructions[load].plain_load()?;
        if matches!(base, SP | FRAME) || u32::from(size) * 8 <= bit {
            return None;
        }
        let position = offset.checked_mul(8)?.checked_add(bit.into())?;
        let point = point_of_bit(position.rem_euclid(32) as u32)?;
        let word = position.div_euclid(32) * 4;
        (word >= 0).then_some(EventTest { load, field: Field::Objspace(word), point })
    }

    /// The only bit on which the jump at `index` depends, the register that holds it, and where that register is read.
    fn tested_bit(&self, index: usize) -> Option<(u32, u16, usize)> {
        let jump = &self.instructions[index];
        let and = |at: usize| {
            let instruction = &self.instructions[at];
            if !matches!(instruction.opcode, Opcode::AND | Opcode::ANDS) {
                return None;
            }
            let mask = match instruction.operands[2] {
                Operand::Immediate(mask) => u64::from(mask),
                Operand::Imm64(mask) => mask,
                _ => return None,
            };
            mask.is_power_of_two().then_some((mask.trailing_zeros(), instruction.register(1)?, at))
        };
        match (jump.opcode, jump.operands) {
            (Opcode::TBZ | Opcode::TBNZ, [_, Operand::Imm16(bit), ..]) => {
                Some((bit.into(), jump.register(0)?, index))
            }
            // `and w0, w0, #mask; cbnz w0, …`
            (Opcode::CBZ | Opcode::CBNZ, _) => and(self.definition(index, jump.register(0)?)?),
            // `tst w0, #mask; b.ne …`, and without optimisation `and w0, w0, #mask; cmp w0, #0; b.ne …`
            (Opcode::Bcc(0 | 1), _) => {
                let setter = self.setter(index)?;
                let instruction = &self.instructions[setter];
                match (instruction.opcode, instruction.operands[2]) {
                    (Opcode::ANDS, _) => and(setter),
                    (Opcode::SUBS, Operand::Immediate(0)) => {
                        and(self.definition(setter, instruction.register(1)?)?)
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Index of the instruction that set the flags tested by the jump at `index`.
    fn setter(&self, index: usize) -> Option<usize> {
        for at in (index.saturating_sub(MAX_DISTANCE)..index).rev() {
            let instruction = &self.instructions[at];
            match instruction.opcode {
                Opcode::ANDS | Opcode::SUBS => return Some(at),
                Opcode::ADDS | Opcode::BICS | Opcode::CCMP | Opcode::CCMN | Opcode::ADCS | Opcode::SBCS => {
                    return None;
                }
                _ if instruction.flow() != Flow::Next => return None,
                _ => {}
            }
        }
        None
    }

    /// The event constant that the code before a call puts into an argument register.
    fn constant_argument(&self, call: usize) -> Option<Point> {
        let mut written = BTreeSet::new();
        for instruction in self.instructions[call.saturating_sub(MAX_SETUP)..call].iter().rev() {
            if !matches!(instruction.flow(), Flow::Next | Flow::Conditional(_)) {
                return None;
            }
            if let Some((register @ 0..4, constant)) = instruction.constant()
                && !written.contains(&register)
                && let Some(point) = point_of_constant(constant)
            {
                return Some(point);
            }
            written.extend(instruction.written());
        }
        None
    }
}

/// Finds the sites. `None` if the image exports no GC functions from which to start.
pub(super) fn find(code: &mut Code<'_>, vm: &VmPath) -> Option<Findings> {
    let unit = GcUnit::find(code)?;
    let hook = code.image.dynamic_symbols().find(HOOK).map(|symbol| symbol.address);
    let mut functions = unit.functions(code);
    functions.extend(hook.map(|hook| callers_of(code, hook)).unwrap_or_default());
    code.resolve_cold_parts(functions.iter().copied());
    let owners: Vec<usize> = functions.iter().map(|&extent| code.owner(extent)).collect();
    functions.extend(owners);
    let searched = with_cold_parts(code, functions);
    let owners: BTreeSet<usize> = searched.iter().map(|&extent| code.owner(extent)).collect();
    let bodies: BTreeMap<usize, Body> = owners
        .into_iter()
        .map(|owner| (owner, Body::new(code.parts(owner).into_iter().map(|part| decode(code.image, part)))))
        .collect();

    let calls = calls_of_the_hook(code, &bodies);
    let mut findings = if hook.is_some() && calls.iter().all(|call| Some(call.callee) == hook) {
        called(code, &bodies, &calls)
    } else {
        guarded(code, &bodies, &calls, hook_events(vm.flags))
    };
    findings.searched = searched;
    findings.endless = endless(code, &findings);
    findings.enter_string_owners = unit
        .enter_string
        .map(|extents| extents.into_iter().map(|extent| code.start(code.owner(extent))).collect());
    name_owners(code, &mut findings.sites);
    Some(findings)
}

/// The findings from the calls of a function that contains the test.
fn called(code: &Code<'_>, bodies: &BTreeMap<usize, Body>, calls: &[EventCall]) -> Findings {
    let site = |call: &EventCall| {
        let instruction = &bodies[&call.owner].instructions[call.index];
        Site {
            point: call.point,
            address: instruction.address,
            emulated: instruction.is_emulated(),
            guard: instruction.address,
            register: None,
            owner: code.start(call.owner),
            owner_name: None,
            form: SiteForm::Call,
            pause: None,
        }
    };
    let sites: BTreeMap<(Point, Svma), Site> =
        calls.iter().map(site).map(|site| ((site.point, site.address), site)).collect();
    Findings {
        sites: sites.into_values().collect(),
        field: None,
        disputed: Vec::new(),
        unguarded: Vec::new(),
        entered_midway: Vec::new(),
        endless: BTreeSet::new(),
        enter_string_owners: None,
        searched: BTreeSet::new(),
    }
}

/// The tests of this field, compared with the calls.
fn guarded(code: &Code<'_>, bodies: &BTreeMap<usize, Body>, calls: &[EventCall], field: Field) -> Findings {
    let mut sites = BTreeMap::new();
    let mut entered_midway = Vec::new();
    for (&owner, body) in bodies {
        for index in 0..body.instructions.len() {
            let jump = &body.instructions[index];
            if sites.len() > MAX_SITES || !matches!(jump.flow(), Flow::Conditional(_)) {
                continue;
            }
            let Some(test) = body.event_test(index).filter(|test| test.field == field) else { continue };
            let guard = body.instructions[test.load].address;
            if (test.load + 1..=index).any(|at| !body.jumps_to(at).is_empty()) {
                entered_midway.push(guard);
            }
            let site = Site {
                point: test.point,
                address: jump.address,
                emulated: jump.is_emulated(),
                guard,
                // The kernel side takes the objspace from the VM: its field for a register has only four bits.
                register: None,
                owner: code.start(owner),
                owner_name: None,
                form: SiteForm::Scan,
                pause: None,
            };
            sites.insert((test.point, jump.address), site);
        }
    }

    let (mut disputed, mut unguarded) = (Vec::new(), Vec::new());
    for call in calls {
        let body = &bodies[&call.owner];
        let mut guarded = false;
        for jump in body.deciding(call.index, 1) {
            let Some(test) = body.event_test(jump).filter(|test| test.point == call.point) else { continue };
            if test.field == field {
                guarded = true;
                if let Some(site) = sites.get_mut(&(test.point, body.instructions[jump].address)) {
                    site.form = SiteForm::Guard;
                }
            } else {
                disputed.push(body.instructions[jump].address);
            }
        }
        if !guarded {
            unguarded.push(body.instructions[call.index].address);
        }
    }
    Findings {
        sites: sites.into_values().collect(),
        field: Some(field),
        disputed,
        unguarded,
        entered_midway,
        endless: BTreeSet::new(),
        enter_string_owners: None,
        searched: BTreeSet::new(),
    }
}

/// The extents with the cold parts of their functions.
fn with_cold_parts(code: &mut Code<'_>, mut extents: BTreeSet<usize>) -> BTreeSet<usize> {
    let mut pending = extents.clone();
    for _ in 0..MAX_ROUNDS {
        let mut entered = BTreeSet::new();
        for &extent in &pending {
            for instruction in decode(code.image, extent) {
                if let Flow::Conditional(target) | Flow::Jump(target) = instruction.flow() {
                    entered.extend(code.image.function_index(target).filter(|into| !extents.contains(into)));
                }
            }
        }
        code.resolve_cold_parts(entered.iter().copied());
        entered.retain(|&extent| extents.contains(&code.owner(extent)));
        if entered.is_empty() {
            break;
        }
        extents.extend(&entered);
        pending = entered;
    }
    extents
}

/// The calls of the function that runs the hooks, if it exists out of line: the one that most of the events reach.
fn calls_of_the_hook(code: &Code<'_>, bodies: &BTreeMap<usize, Body>) -> Vec<EventCall> {
    let mut calls = Vec::new();
    for (&owner, body) in bodies {
        for (index, instruction) in body.instructions.iter().enumerate() {
            let (Flow::Call(target) | Flow::Jump(target)) = instruction.flow() else { continue };
            let Some(callee) = code.callee_at(target).address else { continue };
            if let Some(point) = body.constant_argument(index).filter(|_| calls.len() <= MAX_SITES) {
                calls.push(EventCall { owner, index, callee, point });
            }
        }
    }
    let mut votes: BTreeMap<Svma, BTreeSet<Point>> = BTreeMap::new();
    for call in &calls {
        votes.entry(call.callee).or_default().insert(call.point);
    }
    let hook = votes.into_iter().max_by_key(|(_, points)| points.len());
    let hook = hook.filter(|(_, points)| points.len() >= MIN_EVENTS).map(|(hook, _)| hook);
    calls.retain(|call| Some(call.callee) == hook);
    calls
}

/// Whether one function adds 1 to the 64-bit field at `offset` of some object.
pub(in crate::ruby) fn increments(code: &Code<'_>, owner: usize, offset: u32) -> bool {
    let body = Body::new(code.parts(owner).into_iter().map(|part| decode(code.image, part)));
    let field = |instruction: &Instruction| {
        let (base, at) = instruction.plain_memory(1)?;
        (at == i64::from(offset) && !matches!(base, SP | FRAME)).then_some(base)
    };
    (0..body.instructions.len()).any(|index| {
        let store = &body.instructions[index];
        let stores_wide = store.opcode == Opcode::STR
            && matches!(store.operands[0], Operand::Register(yaxpeax_arm::armv8::a64::SizeCode::X, _));
        let incremented = || {
            let base = field(store).filter(|_| stores_wide)?;
            let sum = body.definition(index, store.register(0)?)?;
            let add = &body.instructions[sum];
            let adds_one = add.opcode == Opcode::ADD && add.operands[2] == Operand::Immediate(1);
            let load = body.definition(sum, add.register(1).filter(|_| adds_one)?)?;
            let (_, from, at, size) = body.instructions[load].plain_load()?;
            (size == 8 && (from, at) == (base, i64::from(offset))).then_some(())
        };
        incremented().is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::aarch64::assemble;

    const H: Field = Field::Objspace(0x14);

    fn tests_in(words: &[u32]) -> Vec<(usize, Field, Point)> {
        let body = Body::new([assemble(0x1000, words)]);
        let tests = (0..body.instructions.len()).filter_map(|index| body.event_test(index));
        tests.map(|test| (test.load, test.field, test.point)).collect()
    }

    /// The ways in which gcc and clang test a bit of a word.
    #[test]
    fn shapes() {
        // ldr w0, [x20, #20]; tbnz w0, #25
        assert_eq!(tests_in(&[0xb940_1680, 0x37c8_36a0]), [(0, H, Point::GcEnter)]);
        // ldr w0, [x20, #20]; mov x1, x2; tbz w0, #26
        assert_eq!(tests_in(&[0xb940_1680, 0xaa02_03e1, 0x36d0_00a0]), [(0, H, Point::GcExit)]);
        // ldrb w0, [x20, #22]; tbnz w0, #6
        assert_eq!(tests_in(&[0x3940_5a80, 0x3730_0040]), [(0, H, Point::GcStart)]);
        // ldr w0, [x20, #20]; tst w0, #0x800000; b.ne
        assert_eq!(tests_in(&[0xb940_1680, 0x7209_001f, 0x5400_0041]), [(0, H, Point::GcEndMark)]);
        // ldr w0, [x20, #20]; and w0, w0, #0x1000000; cbz w0
        assert_eq!(tests_in(&[0xb940_1680, 0x1208_0000, 0x3400_0040]), [(0, H, Point::GcEndSweep)]);
        // ldr w0, [x20, #20]; and w0, w0, #0x1000000; cmp w0, #0; b.eq
        let unoptimised = [0xb940_1680, 0x1208_0000, 0x7100_001f, 0x5400_0040];
        assert_eq!(tests_in(&unoptimised), [(0, H, Point::GcEndSweep)]);
    }

    /// Tests of locals, of other or several bits, and of registers that were overwritten or set before a call are not event tests.
    #[test]
    fn other_tests() {
        // ldr w0, [sp, #20] and [x29, #20]; tbnz w0, #25
        assert_eq!(tests_in(&[0xb940_17e0, 0x37c8_36a0]), []);
        assert_eq!(tests_in(&[0xb940_17a0, 0x37c8_36a0]), []);
        // tbnz w0, #21
        assert_eq!(tests_in(&[0xb940_1680, 0x37a8_36a0]), []);
        // tst w0, #0x1800000; b.ne
        assert_eq!(tests_in(&[0xb940_1680, 0x7209_041f, 0x5400_0041]), []);
        // ldr w0, [x20, #20]; mov w0, w1; tbnz w0, #25
        assert_eq!(tests_in(&[0xb940_1680, 0x2a01_03e0, 0x37c8_36a0]), []);
        // ldr w0, [x20, #20]; bl; tbnz w0, #25
        assert_eq!(tests_in(&[0xb940_1680, 0x97fd_a92a, 0x37c8_36a0]), []);
        // ldr w0, [x20, #24]: another word
        assert_eq!(tests_in(&[0xb940_1a80, 0x37c8_36a0]), [(0, Field::Objspace(0x18), Point::GcEnter)]);
    }

    /// A call in a block that is the target of a distant jump is decided by that jump, also over a block that only continues there.
    #[test]
    fn deciding_jumps() {
        // 1000: tbnz w0, #25, 100c; ret; nop; 100c: mov w1, #0x2000000; bl
        let words = [0x37c8_0060, 0xd65f_03c0, 0xd503_201f, 0x52a0_4001, 0x97ff_fff0];
        let body = Body::new([assemble(0x1000, &words)]);
        assert_eq!(body.deciding(4, 1), [0]);
        assert_eq!(body.constant_argument(4), Some(Point::GcEnter));
        // 1000: tbnz w0, #25, 1008; ret; 1008: nop; b 1014; ret; 1014: mov w1, #0x2000000; bl
        let hop = [0x37c8_0040, 0xd65f_03c0, 0xd503_201f, 0x1400_0002, 0xd65f_03c0, 0x52a0_4001, 0x97ff_fff0];
        let body = Body::new([assemble(0x1000, &hop)]);
        assert_eq!(body.deciding(6, 1), [0]);
        assert!(body.deciding(6, 0).is_empty());
    }
}
