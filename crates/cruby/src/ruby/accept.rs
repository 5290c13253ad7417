//! Static acceptance: conditions that a set of sites must meet before any of them is probed.

use std::borrow::Cow;
use std::collections::BTreeSet;

use gctrace_common::event::Point;
use iced_x86::{Code as Opcode, FlowControl, Instruction, Mnemonic, OpKind, Register};
use serde::{Deserialize, Serialize};

use super::aarch64;
use super::code::{Body, Code};
use super::emulation::is_emulated;
use super::outcome::Outcome;
use super::sites::{
    Field, Findings, MAX_SITES, PauseKind, Site, SiteForm, base_name, hook_events, increments_aarch64,
};
use super::vm_path::VmPath;
use super::x86::{immediate, is_memory};
use crate::address::Svma;
use crate::elf::Machine;

/// One acceptance check and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was checked.
    pub name: Cow<'static, str>,
    /// Its result.
    pub outcome: Outcome,
}

/// Runs all checks.
pub(super) fn accept(code: &Code<'_>, vm: &VmPath, findings: &Findings) -> Vec<Check> {
    let check = |name: &'static str, outcome| Check { name: name.into(), outcome };
    vec![
        check("every event has its sites", every_event(findings)),
        check(
            "every pause ends in the function where it begins or in its callers",
            enters_have_exits(findings),
        ),
        check("pauses begin where gc_enter guards against recursion", enter_string(findings)),
        check("guards test objspace->hook_events", guarded_field(code, vm, findings)),
        check("guards and scan agree", agreement(findings)),
        check("the cycle counter is incremented beside GC_START", counter(code, vm, findings)),
        check("nothing jumps between a test and its jump", undivided(findings)),
        check("probed instructions are emulated by the kernel", probeable(code, findings)),
        check("single-stepped calls cannot meet a shadow stack", shadow_stacks(code, findings)),
        check("accessors reach the same objspace", accessors(vm)),
        check("symbols name the expected functions", symbols(code, findings)),
        check("USDT probes of pauses are in the functions with their events", usdt(code, findings)),
    ]
}

fn require(holds: bool, reason: impl FnOnce() -> String) -> Outcome {
    if holds { Outcome::Passed } else { Outcome::Failed(reason()) }
}

fn list(addresses: &[Svma]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn every_event(findings: &Findings) -> Outcome {
    if findings.sites.len() > MAX_SITES {
        return Outcome::Failed(format!("more than {MAX_SITES} sites"));
    }
    for point in Point::ALL {
        let owners = findings.owners(point);
        if owners.is_empty() {
            return Outcome::Failed(format!("no site for {}", point.name()));
        }
        if point == Point::GcStart && owners.len() > 1 {
            return Outcome::Failed(format!("GC_START in {} functions", owners.len()));
        }
    }
    let addresses: BTreeSet<Svma> = findings.sites.iter().map(|site| site.address).collect();
    require(addresses.len() == findings.sites.len(), || "two events at one instruction".to_owned())
}

fn enters_have_exits(findings: &Findings) -> Outcome {
    let endless: Vec<Svma> = findings.endless.iter().copied().collect();
    require(endless.is_empty(), || format!("no GC_EXIT in {}", list(&endless)))
}

fn enter_string(findings: &Findings) -> Outcome {
    let Some(expected) = &findings.enter_string_owners else {
        return Outcome::NotApplicable("gc_enter has no such guard (Ruby before 3.0)".to_owned());
    };
    let found = findings.owners(Point::GcEnter);
    let differing: Vec<Svma> = expected.symmetric_difference(&found).copied().collect();
    require(differing.is_empty(), || format!("only the guard or only GC_ENTER in {}", list(&differing)))
}

fn guarded_field(code: &Code<'_>, vm: &VmPath, findings: &Findings) -> Outcome {
    let event_flags = code.image.symbol("ruby_vm_event_flags").map(|symbol| symbol.address);
    guards_test(event_flags, vm, findings)
}

/// `event_flags` is the address of `ruby_vm_event_flags`, if symbols give it.
fn guards_test(event_flags: Option<Svma>, vm: &VmPath, findings: &Findings) -> Outcome {
    match findings.field {
        None => Outcome::NotApplicable("rb_gc_event_hook does the test itself (Ruby 3.4)".to_owned()),
        Some(Field::Global(address)) if event_flags.is_some() => {
            require(event_flags == Some(Svma(address)), || format!("guards test the global at {address:#x}"))
        }
        Some(Field::Global(address)) => {
            Outcome::NotApplicable(format!("guards test the global at {address:#x} (Ruby 4.0)"))
        }
        Some(field) => require(field == hook_events(vm.flags), || {
            format!("guards test {field:x?}, objspace->flags is at {:#x}", vm.flags)
        }),
    }
}

fn agreement(findings: &Findings) -> Outcome {
    if !findings.disputed.is_empty() {
        return Outcome::Failed(format!("disputed guards at {}", list(&findings.disputed)));
    }
    require(findings.unguarded.is_empty(), || {
        format!("hook calls without a guard at {}", list(&findings.unguarded))
    })
}

fn undivided(findings: &Findings) -> Outcome {
    require(findings.entered_midway.is_empty(), || list(&findings.entered_midway))
}

/// `gc_start` increments `profile.count` just before its event (gc.c).
fn counter(code: &Code<'_>, vm: &VmPath, findings: &Findings) -> Outcome {
    let Some(owner) = findings.owners(Point::GcStart).first().and_then(|&owner| code.owner_of(owner)) else {
        return Outcome::Failed("no GC_START".to_owned());
    };
    let incremented = match code.image.machine() {
        Machine::X86_64 => {
            let body = code.body(owner);
            (0..body.instructions.len()).any(|index| increments(&body, index, vm.count))
        }
        Machine::Aarch64 => increments_aarch64(code, owner, vm.count),
    };
    require(incremented, || format!("nothing adds 1 to [objspace+{:#x}] in {}", vm.count, code.start(owner)))
}

/// Whether the instruction stores `[R + offset] + 1` to `[R + offset]`.
fn increments(body: &Body, index: usize, offset: u32) -> bool {
    let instruction = &body.instructions[index];
    if !is_memory(instruction, 0) || !addresses_field(instruction, offset) {
        return false;
    }
    match instruction.mnemonic() {
        Mnemonic::Inc => true,
        Mnemonic::Add => immediate(instruction, 1) == Some(1),
        Mnemonic::Sub => immediate(instruction, 1) == Some(u64::MAX),
        Mnemonic::Mov => instruction.op1_kind() == OpKind::Register && loaded_plus_one(body, index, offset),
        _ => false,
    }
}

/// Whether the register stored by the instruction at `store` was loaded from the same field and incremented since.
fn loaded_plus_one(body: &Body, store: usize, offset: u32) -> bool {
    /// Maximum number of instructions between load and store.
    const MAX_DISTANCE: usize = 16;
    let mut register = body.instructions[store].op1_register();
    let mut incremented = false;
    for instruction in body.instructions[store.saturating_sub(MAX_DISTANCE)..store].iter().rev() {
        if instruction.op0_kind() != OpKind::Register || instruction.op0_register() != register {
            continue;
        }
        match instruction.mnemonic() {
            Mnemonic::Add if immediate(instruction, 1) == Some(1) => incremented = true,
            Mnemonic::Inc => incremented = true,
            Mnemonic::Lea if instruction.memory_displacement64() == 1 => {
                incremented = true;
                register = instruction.memory_base();
            }
            Mnemonic::Mov if is_memory(instruction, 1) => {
                return incremented && addresses_field(instruction, offset);
            }
            _ => return false,
        }
    }
    false
}

fn addresses_field(instruction: &Instruction, offset: u32) -> bool {
    instruction.memory_displacement64() == u64::from(offset)
        && instruction.memory_index() == Register::None
        && instruction.memory_size().size() == 8
        && !matches!(instruction.memory_base(), Register::None | Register::RSP | Register::RIP)
}

/// Every probe must be at the start of an instruction as decoded, in an executable segment, and the kernel must emulate
/// that instruction instead of single-stepping it (arch/x86/kernel/uprobes.c: `branch_setup_xol_ops`;
/// arch/arm64/kernel/probes/decode-insn.c: `arm_probe_decode_insn`).
fn probeable(code: &Code<'_>, findings: &Findings) -> Outcome {
    for site in &findings.sites {
        if let Err(reason) = probeable_site(code, site) {
            return Outcome::Failed(format!("{} at {}: {reason}", site.point.name(), site.address));
        }
    }
    Outcome::Passed
}

fn probeable_site(code: &Code<'_>, site: &Site) -> Result<(), &'static str> {
    if code.image.svma_to_file_offset(site.address).is_none() {
        return Err("not in an executable segment");
    }
    let function = code.image.function_index(site.address).ok_or("not in a function")?;
    if code.image.machine() == Machine::Aarch64 {
        let instructions = aarch64::decode(code.image, function);
        let index = instructions.binary_search_by_key(&site.address, |instruction| instruction.address);
        let instruction = index.map(|index| instructions[index]).map_err(|_| "not an instruction")?;
        return if instruction.is_emulated() { Ok(()) } else { Err(STEPPED) };
    }
    let instructions = code.decode(function);
    let index = instructions.binary_search_by_key(&site.address.0, Instruction::ip);
    let instruction = index.map(|index| instructions[index]).map_err(|_| "not an instruction")?;
    emulated(&instruction)
}

/// Whether these bytes, at this address, start with an instruction of this machine that may be probed.
pub fn may_be_probed(bytes: &[u8], address: Svma) -> bool {
    if Machine::HOST == Machine::Aarch64 {
        return aarch64::decode_one(bytes, address).is_some_and(|instruction| instruction.is_emulated());
    }
    let mut decoder = iced_x86::Decoder::with_ip(64, bytes, address.0, iced_x86::DecoderOptions::NONE);
    emulated(&decoder.decode()).is_ok()
}

fn emulated(instruction: &Instruction) -> Result<(), &'static str> {
    if is_emulated(instruction) {
        return Ok(());
    }
    if instruction.flow_control() == FlowControl::ConditionalBranch {
        return Err("a kind of jump that the kernel single-steps");
    }
    match instruction.code() {
        // Emitted by -fno-plt. The kernel single-steps these and corrects the return address afterwards
        // (`default_post_xol_op`), but not the copy on a shadow stack: see `shadow_stacks`.
        Opcode::Call_rm64 | Opcode::Jmp_rm64 if instruction.is_ip_rel_memory_operand() => Ok(()),
        _ => Err(STEPPED),
    }
}

const STEPPED: &str = "an instruction that the kernel single-steps";

/// A call that the kernel single-steps leaves the address of its out-of-line copy on the shadow stack, so the return
/// faults. Only images that declare shadow stack support can run with shadow stacks.
fn shadow_stacks(code: &Code<'_>, findings: &Findings) -> Outcome {
    if code.image.machine() == Machine::Aarch64 {
        return Outcome::NotApplicable("the kernel simulates calls on aarch64".to_owned());
    }
    let stepped = |site: &&Site| {
        let instruction = code.image.function_index(site.address).map(|function| code.decode(function));
        instruction.is_some_and(|instructions| {
            let index = instructions.binary_search_by_key(&site.address.0, Instruction::ip);
            index.is_ok_and(|index| instructions[index].code() == Opcode::Call_rm64)
        })
    };
    let calls: Vec<Svma> = findings
        .sites
        .iter()
        .filter(|s| s.form == SiteForm::Call)
        .filter(stepped)
        .map(|s| s.address)
        .collect();
    if calls.is_empty() {
        return Outcome::NotApplicable("no such calls".to_owned());
    }
    require(!code.image.allows_shadow_stacks(), || {
        format!("built with -fno-plt and -fcf-protection, calls at {}", list(&calls))
    })
}

/// [`VmPath`] is only derived if `rb_gc_count` and `rb_during_gc` agree about the objspace, and `rb_gc_enable` as well
/// if it can be evaluated.
fn accessors(vm: &VmPath) -> Outcome {
    require(vm.dont_gc_bit != Some(vm.during_gc_bit), || {
        format!("during_gc and dont_gc are both bit {}", vm.during_gc_bit)
    })
}

/// If the file has symbols, the sites must lie in the functions that contain them in the sources. Inlining can only move
/// them into other functions of the GC.
fn symbols(code: &Code<'_>, findings: &Findings) -> Outcome {
    if code.image.symbols().is_empty() {
        return Outcome::NotApplicable("the file is stripped".to_owned());
    }
    for site in &findings.sites {
        let name = site.owner_name.as_deref().map_or("", base_name);
        if !plausible_owner(site.point, name) {
            return Outcome::Failed(format!("{} at {} is in {name:?}", site.point.name(), site.address));
        }
    }
    Outcome::Passed
}

/// A USDT probe at one end of a pause.
#[derive(Clone, Copy, Debug)]
struct UsdtEnd {
    point: Point,
    /// The function that contains it.
    owner: Svma,
    /// The kind of pause, if the note states it as a constant.
    pause: Option<PauseKind>,
}

/// From 4.1 on `gc_enter` and `gc_exit` each have a USDT probe beside their event (gc/default/default.c), so the
/// functions with a probe are those with an event. A constant argument gives the kind of pause (`enum gc_enter_event`).
fn usdt(code: &Code<'_>, findings: &Findings) -> Outcome {
    let kind = |arguments: &str| {
        Some(match arguments.split_once("@$")?.1 {
            "0" => PauseKind::Start,
            "1" => PauseKind::Continue,
            "2" => PauseKind::Rest,
            "3" => PauseKind::Finalizer,
            _ => return None,
        })
    };
    let mut ends = Vec::new();
    for probe in code.image.usdt().iter().filter(|probe| probe.provider == "ruby") {
        let point = match probe.name.as_str() {
            "gc__enter" => Point::GcEnter,
            "gc__exit" => Point::GcExit,
            _ => continue,
        };
        let Some(owner) = code.owner_of(probe.address) else {
            return Outcome::Failed(format!("{} at {} is in no function", probe.name, probe.address));
        };
        ends.push(UsdtEnd { point, owner: code.start(owner), pause: kind(&probe.arguments) });
    }
    usdt_ends(&ends, findings)
}

fn usdt_ends(ends: &[UsdtEnd], findings: &Findings) -> Outcome {
    if ends.is_empty() {
        return Outcome::NotApplicable(
            "the file has no such USDT probes (they came with Ruby 4.1)".to_owned(),
        );
    }
    for point in [Point::GcEnter, Point::GcExit] {
        let there: BTreeSet<Svma> =
            ends.iter().filter(|end| end.point == point).map(|end| end.owner).collect();
        let differing: Vec<Svma> = there.symmetric_difference(&findings.owners(point)).copied().collect();
        if !differing.is_empty() {
            return Outcome::Failed(format!(
                "only the USDT probe or only the site of {} in {}",
                point.name(),
                list(&differing)
            ));
        }
    }
    for site in findings.sites.iter().filter(|site| site.point == Point::GcEnter) {
        let mut matching = ends.iter().filter(|end| end.point == site.point && end.owner == site.owner);
        let fits = |end: &UsdtEnd| site.pause.is_none() || end.pause.is_none() || end.pause == site.pause;
        if !matching.any(fits) {
            return Outcome::Failed(format!(
                "the USDT probe states another kind for the pause at {}",
                site.address
            ));
        }
    }
    Outcome::Passed
}

pub(super) fn plausible_owner(point: Point, name: &str) -> bool {
    let starts_with = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    match point {
        Point::GcStart => starts_with(&["gc_start", "garbage_collect"]),
        Point::GcEndMark => starts_with(&["gc_marks", "gc_start", "gc_rest", "gc_continue"]),
        Point::GcEndSweep => starts_with(&["gc_sweep", "gc_start", "gc_rest", "gc_continue", "gc_marks"]),
        Point::GcEnter | Point::GcExit => {
            const CALLERS: &[&str] = &[
                "gc_",
                "garbage_collect",
                "heap_",
                "newobj",
                "objspace_",
                "ractor_cache_",
                "rb_gc",
                "rb_newobj",
                "rb_objspace_",
                "ruby_gc_",
                "ruby_x",
            ];
            starts_with(CALLERS) || (point == Point::GcExit && name == "rb_memerror")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: VmPath = VmPath {
        vm_ptr: Svma(0x1000),
        vm_objspace: 0x450,
        count: 0x1b8,
        flags: 0x10,
        during_gc_bit: 5,
        dont_gc_bit: Some(3),
        anchor: None,
    };

    /// One site of each event, all in one function.
    fn findings() -> Findings {
        let site = |(index, point)| Site {
            point,
            address: Svma(0x100 + index as u64 * 0x10),
            emulated: true,
            guard: Svma(0x100 + index as u64 * 0x10),
            register: Some(3),
            owner: Svma(0x100),
            owner_name: None,
            form: SiteForm::Guard,
            pause: None,
        };
        Findings {
            sites: Point::ALL.into_iter().enumerate().map(site).collect(),
            field: Some(hook_events(VM.flags)),
            disputed: Vec::new(),
            unguarded: Vec::new(),
            entered_midway: Vec::new(),
            endless: BTreeSet::new(),
            enter_string_owners: Some(BTreeSet::from([Svma(0x100)])),
            searched: BTreeSet::new(),
        }
    }

    fn failed(outcome: &Outcome) -> bool {
        matches!(outcome, Outcome::Failed(_))
    }

    /// The consistent set passes.
    #[test]
    fn consistent_findings_pass() {
        let findings = findings();
        for outcome in [
            every_event(&findings),
            enters_have_exits(&findings),
            enter_string(&findings),
            guards_test(None, &VM, &findings),
            agreement(&findings),
            undivided(&findings),
            accessors(&VM),
        ] {
            assert_eq!(outcome, Outcome::Passed);
        }
    }

    /// A missing event, a second owner of `GC_START` and one address for two events fail.
    #[test]
    fn wrong_numbers_fail() {
        for point in Point::ALL {
            let mut findings = findings();
            findings.sites.retain(|site| site.point != point);
            assert!(failed(&every_event(&findings)));
        }
        let mut second = findings();
        second.sites.push(Site { owner: Svma(0x900), address: Svma(0x910), ..second.sites[0].clone() });
        assert!(failed(&every_event(&second)));
        let mut shared = findings();
        shared.sites[1].address = shared.sites[0].address;
        assert!(failed(&every_event(&shared)));
    }

    /// A pause that begins in a function where none ends, or outside `gc_enter`, fails; before 3.0 the string says nothing.
    #[test]
    fn stray_enters_fail() {
        let mut findings = findings();
        findings.sites[3].owner = Svma(0x900);
        findings.endless.insert(Svma(0x900));
        assert!(failed(&enters_have_exits(&findings)));
        assert!(failed(&enter_string(&findings)));
        findings.enter_string_owners = None;
        assert!(matches!(enter_string(&findings), Outcome::NotApplicable(_)));
    }

    /// Guards on another word, guards that the scan did not find, hook calls without a guard and jumps into a guard fail.
    #[test]
    fn doubtful_guards_fail() {
        let other_word = Findings { field: Some(Field::Objspace(0x18)), ..findings() };
        assert!(failed(&guards_test(None, &VM, &other_word)));
        assert!(failed(&agreement(&Findings { disputed: vec![Svma(1)], ..findings() })));
        assert!(failed(&agreement(&Findings { unguarded: vec![Svma(1)], ..findings() })));
        assert!(failed(&undivided(&Findings { entered_midway: vec![Svma(1)], ..findings() })));
    }

    /// USDT probes in functions other than those of the events, or of another kind of pause, fail; absent ones are not applicable.
    #[test]
    fn doubtful_usdt_fails() {
        let end = |point, owner, pause| UsdtEnd { point, owner: Svma(owner), pause };
        let ends = |owner, pause| [end(Point::GcEnter, owner, pause), end(Point::GcExit, 0x100, None)];
        let mut findings = findings();
        findings.sites[3].pause = Some(PauseKind::Start);
        assert!(matches!(usdt_ends(&[], &findings), Outcome::NotApplicable(_)));
        assert_eq!(usdt_ends(&ends(0x100, Some(PauseKind::Start)), &findings), Outcome::Passed);
        assert_eq!(usdt_ends(&ends(0x100, None), &findings), Outcome::Passed);
        assert!(failed(&usdt_ends(&ends(0x900, None), &findings)));
        assert!(failed(&usdt_ends(&ends(0x100, Some(PauseKind::Rest)), &findings)));
        assert!(failed(&usdt_ends(&ends(0x100, None)[..1], &findings)));
    }

    /// Compiler clones of a function keep its name; functions outside the GC are not plausible owners.
    #[test]
    fn names_of_owners() {
        assert!(plausible_owner(Point::GcStart, base_name("gc_start.constprop.0")));
        assert!(plausible_owner(Point::GcEndSweep, base_name("gc_sweep_step.isra.0")));
        assert!(plausible_owner(Point::GcExit, "rb_memerror"));
        assert!(!plausible_owner(Point::GcEnter, "rb_memerror"));
        assert!(!plausible_owner(Point::GcStart, "vm_exec_core"));
    }
}
