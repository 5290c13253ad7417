//! Combines the facts into sites.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use gctrace_common::event::Point;
use iced_x86::InstructionInfoFactory;

use super::callers::{MAX_SITES, callers_of, endless, hook_events, name_owners};
use super::facts::{EventCall, Facts, HOOK, collect};
use super::guard::{EventTest, event_test, flag_setter, jump_behind, reaching_pointer};
use super::pause::tell_pauses;
use super::unit::GcUnit;
use super::{Field, Findings, Site, SiteForm};
use crate::address::Svma;
use crate::elf::Machine;
use crate::ruby::RubyVersion;
use crate::ruby::code::{Body, Code};
use crate::ruby::emulation::is_emulated_at;
use crate::ruby::vm_path::VmPath;
use crate::ruby::x86::{register_number, written_registers};

/// A function that receives at least this many distinct event constants runs the hooks. In every CRuby the next best
/// function receives at most two.
const MIN_EVENTS: usize = 3;
/// The first version in which `rb_gc_event_hook` is a function, called for every event.
const FIRST_SELF_GUARDED: RubyVersion = RubyVersion::new(3, 4, 0);
/// Maximum number of rounds in which new functions are discovered: cold parts of members, callers of the hook, their cold parts.
const MAX_ROUNDS: usize = 6;
/// Finds the sites. `None` if the image exports no GC functions from which to start.
pub(in crate::ruby) fn find(code: &mut Code<'_>, version: RubyVersion, vm: &VmPath) -> Option<Findings> {
    if code.image.machine() == Machine::Aarch64 {
        return super::aarch64::find(code, vm);
    }
    let flags = vm.flags;
    let unit = GcUnit::find(code)?;
    let facts = explore(code, unit.functions(code));
    let hook = vote(&facts);
    let mut finder = Finder { code, facts: &facts, bodies: HashMap::new(), hook, self_guarded: false };

    let guards = finder.guards_of_calls();
    finder.self_guarded = finder.is_self_guarded(version, &guards);
    let field = finder.choose_field(&guards, flags);
    let mut findings = finder.assemble(&guards, field, flags);
    findings.endless = endless(code, &findings);
    findings.enter_string_owners = unit
        .enter_string
        .map(|extents| extents.into_iter().map(|extent| code.start(code.owner(extent))).collect());
    name_owners(code, &mut findings.sites);
    tell_pauses(code, version, vm, &mut findings.sites);
    Some(findings)
}

/// Collects the facts about the functions of the unit, their cold parts, and all callers of the hook wherever they are.
fn explore(code: &mut Code<'_>, unit: BTreeSet<usize>) -> BTreeMap<usize, Facts> {
    let mut facts: BTreeMap<usize, Facts> = BTreeMap::new();
    let mut pending = unit;
    let mut hook = None;
    for _ in 0..MAX_ROUNDS {
        for &extent in &pending {
            facts.entry(extent).or_insert_with(|| collect(code, extent));
        }
        let entered: BTreeSet<usize> = facts
            .values()
            .flat_map(|facts| &facts.jumps_into)
            .copied()
            .filter(|extent| !facts.contains_key(extent))
            .collect();
        code.resolve_cold_parts(entered.iter().copied());
        pending = entered;
        pending.retain(|&extent| facts.contains_key(&code.owner(extent)));

        let voted = vote(&facts);
        if voted != hook {
            hook = voted;
            let callers = hook.map(|hook| callers_of(code, hook)).unwrap_or_default();
            code.resolve_cold_parts(callers.iter().copied());
            let owners = callers.iter().map(|&extent| code.owner(extent));
            pending
                .extend(owners.chain(callers.iter().copied()).filter(|extent| !facts.contains_key(extent)));
        }
        if pending.is_empty() {
            break;
        }
    }
    facts
}

/// The function that runs the hooks, if it exists out of line: the one that most of the five events reach.
fn vote(facts: &BTreeMap<usize, Facts>) -> Option<Svma> {
    let mut votes: BTreeMap<Svma, (BTreeSet<Point>, usize)> = BTreeMap::new();
    for call in facts.values().flat_map(|facts| &facts.event_calls) {
        let (points, calls) = votes.entry(call.callee).or_default();
        points.insert(call.point);
        *calls += 1;
    }
    let (hook, (points, _)) = votes.into_iter().max_by_key(|(_, (points, calls))| (points.len(), *calls))?;
    (points.len() >= MIN_EVENTS).then_some(hook)
}

/// A guard with the jump that depends on it.
#[derive(Clone, Copy, Debug)]
struct Guard {
    owner: usize,
    point: Point,
    field: Field,
    /// The instruction that reads the flags.
    load: Svma,
    /// The instruction that tests the bit.
    test: Svma,
    /// The conditional jump, or the test itself if there is none.
    jump: Svma,
    register: Option<u8>,
    entered_midway: bool,
}

struct Finder<'c, 'a> {
    code: &'c Code<'a>,
    facts: &'c BTreeMap<usize, Facts>,
    bodies: HashMap<usize, Body>,
    hook: Option<Svma>,
    /// The hook function does the test itself.
    self_guarded: bool,
}

impl Finder<'_, '_> {
    /// For each call of the hook with an event constant: the guards that decide whether it is reached.
    fn guards_of_calls(&mut self) -> Vec<(EventCall, Vec<Guard>)> {
        let Some(hook) = self.hook else { return Vec::new() };
        let mut found = Vec::new();
        for (&extent, facts) in self.facts {
            for &call in facts.event_calls.iter().filter(|call| call.callee == hook) {
                if found.len() > MAX_SITES {
                    return found;
                }
                let owner = self.code.owner(extent);
                let guards = self.guards_of_call(owner, call);
                found.push((call, guards));
            }
        }
        found
    }

    fn guards_of_call(&mut self, owner: usize, call: EventCall) -> Vec<Guard> {
        let code = self.code;
        let body = self.body(owner);
        let Some(index) = body.index_of(call.address) else { return Vec::new() };
        let jumps = body.conditional_predecessors(body.block_start(index), 1);
        let guard = |jump| {
            let setter = flag_setter(&body.instructions, jump)?;
            let test = event_test(code.image, &body.instructions, body.frame_pointer, setter)?;
            (test.point == call.point).then(|| guard(body, owner, &test, Some(jump)))
        };
        jumps.into_iter().filter_map(guard).collect()
    }

    fn body(&mut self, owner: usize) -> &Body {
        self.bodies.entry(owner).or_insert_with(|| self.code.body(owner))
    }

    /// The flags that the guards test: by majority of the guards found from calls. If the hook is inlined
    /// everywhere and there is no call from which to start, it is the word after `objspace->flags` (`struct rb_objspace` in
    /// gc.c: `flags` and then `hook_events`), or else the only word of which all five bits are tested.
    fn choose_field(&self, guards: &[(EventCall, Vec<Guard>)], flags: u32) -> Option<Field> {
        let mut votes: BTreeMap<Field, usize> = BTreeMap::new();
        for guard in guards.iter().flat_map(|(_, guards)| guards) {
            *votes.entry(guard.field).or_default() += 1;
        }
        if let Some((&field, _)) = votes.iter().max_by_key(|&(_, votes)| *votes) {
            return Some(field);
        }
        if self.self_guarded {
            return None;
        }
        let mut tested: BTreeMap<Field, BTreeSet<Point>> = BTreeMap::new();
        for &(field, point, _) in self.facts.values().flat_map(|facts| &facts.event_tests) {
            tested.entry(field).or_default().insert(point);
        }
        tested.retain(|_, points| points.len() == Point::ALL.len());
        let expected = hook_events(flags);
        if tested.contains_key(&expected) {
            return Some(expected);
        }
        // 4.0 tests a global; an object whose five bits are all tested may exist as well.
        let only = |wanted: fn(&Field) -> bool| {
            let mut fields = tested.keys().copied().filter(wanted);
            fields.next().filter(|_| fields.next().is_none())
        };
        only(|field| matches!(field, Field::Global(_))).or_else(|| only(|_| true))
    }

    /// From 3.4 on `rb_gc_event_hook` does the test itself (gc.c). It is exported in 3.4; in 4.0 the compiler mostly
    /// moves its test into the callers, and if it does not, none of the calls has a guard.
    fn is_self_guarded(&self, version: RubyVersion, guards: &[(EventCall, Vec<Guard>)]) -> bool {
        let Some(hook) = self.hook else { return false };
        let exported = self.code.image.dynamic_symbols().find(HOOK).map(|symbol| symbol.address);
        // GC libraries call it by name.
        if [exported, self.code.import(HOOK)].contains(&Some(hook)) {
            return true;
        }
        let called: BTreeSet<Point> = guards.iter().map(|(call, _)| call.point).collect();
        version >= FIRST_SELF_GUARDED
            && called.len() == Point::ALL.len()
            && guards.iter().all(|(_, guards)| guards.is_empty())
    }

    fn assemble(&mut self, guards: &[(EventCall, Vec<Guard>)], field: Option<Field>, flags: u32) -> Findings {
        let mut sites: BTreeMap<(Point, Svma), Site> = BTreeMap::new();
        let mut disputed = Vec::new();
        let mut entered_midway = Vec::new();
        let mut open_calls = Vec::new();
        let mut tests_seen: HashSet<(Svma, Point)> = HashSet::new();
        let scan = self.scan(field);

        for (call, guards) in guards {
            if guards.is_empty() {
                open_calls.push(*call);
            }
            for guard in guards {
                tests_seen.insert((guard.test, guard.point));
                let scanned = scan.iter().any(|s| s.test == guard.test && s.point == guard.point);
                if Some(guard.field) != field || !scanned {
                    disputed.push(guard.load);
                }
                if guard.entered_midway {
                    entered_midway.push(guard.load);
                }
                sites.insert((guard.point, guard.jump), self.guard_site(guard, SiteForm::Guard));
            }
        }

        let mut scan_only: Vec<(usize, Point)> = Vec::new();
        let trusted = field == Some(hook_events(flags)) || matches!(field, Some(Field::Global(_)));
        for guard in scan.iter().filter(|g| trusted && !tests_seen.contains(&(g.test, g.point))) {
            if guard.entered_midway {
                entered_midway.push(guard.load);
            }
            scan_only.push((guard.owner, guard.point));
            sites.insert((guard.point, guard.jump), self.guard_site(guard, SiteForm::Scan));
        }

        let mut unguarded = Vec::new();
        for call in open_calls {
            let owner = self.code.owner_of(call.address);
            if self.self_guarded {
                sites.extend(owner.map(|owner| ((call.point, call.address), self.call_site(&call, owner))));
            } else if let Some(at) = scan_only.iter().position(|&(o, p)| Some(o) == owner && p == call.point)
            {
                // The scan found the guard that the backward search from the call missed.
                scan_only.swap_remove(at);
            } else {
                unguarded.push(call.address);
            }
        }
        Findings {
            sites: sites.into_values().collect(),
            field,
            disputed,
            unguarded,
            entered_midway,
            endless: BTreeSet::new(),
            enter_string_owners: None,
            searched: self.facts.keys().copied().collect(),
        }
    }

    /// All tests of an event bit of `field` in the explored functions.
    fn scan(&mut self, field: Option<Field>) -> Vec<Guard> {
        let Some(field) = field else { return Vec::new() };
        let mut found = Vec::new();
        for (&extent, facts) in self.facts {
            let owner = self.code.owner(extent);
            for &(_, _, address) in &facts.event_tests {
                if found.len() > MAX_SITES {
                    return found;
                }
                let code = self.code;
                let body = self.body(owner);
                let Some(index) = body.index_of(address) else { continue };
                let Some(mut test) = event_test(code.image, &body.instructions, body.frame_pointer, index)
                else {
                    continue;
                };
                if test.field == Field::Objspace(0)
                    && let Some(base) = test.base
                    && let Some(Svma(pointer)) = reaching_pointer(code.image, body, test.load, base)
                {
                    test.field = Field::Global(pointer);
                    test.base = None;
                }
                // In the context of the whole function, a register may turn out to hold the address of a global.
                if test.field != field {
                    continue;
                }
                let jump = jump_behind(&body.instructions, index);
                found.push(guard(body, owner, &test, jump));
            }
        }
        found
    }

    fn guard_site(&self, guard: &Guard, form: SiteForm) -> Site {
        Site {
            point: guard.point,
            address: guard.jump,
            emulated: is_emulated_at(self.code.image, guard.jump),
            guard: guard.load,
            register: guard.register,
            owner: self.code.start(guard.owner),
            owner_name: None,
            form,
            pause: None,
        }
    }

    fn call_site(&self, call: &EventCall, owner: usize) -> Site {
        Site {
            point: call.point,
            address: call.address,
            emulated: is_emulated_at(self.code.image, call.address),
            guard: call.address,
            register: None,
            owner: self.code.start(owner),
            owner_name: None,
            form: SiteForm::Call,
            pause: None,
        }
    }
}

fn guard(body: &Body, owner: usize, test: &EventTest, jump: Option<usize>) -> Guard {
    let last = jump.unwrap_or(test.test);
    let address = |index: usize| Svma(body.instructions[index].ip());
    Guard {
        owner,
        point: test.point,
        field: test.field,
        load: address(test.load),
        test: address(test.test),
        jump: address(last),
        register: surviving_register(body, test, last),
        entered_midway: (test.load + 1..=last).any(|index| body.is_jump_target(index)),
    }
}

/// The number of the base register of the test, if nothing from the load to the probed instruction writes it.
fn surviving_register(body: &Body, test: &EventTest, last: usize) -> Option<u8> {
    let base = test.base?;
    let mut factory = InstructionInfoFactory::new();
    let overwritten = body.instructions[test.load..last]
        .iter()
        .any(|instruction| written_registers(&mut factory, instruction).contains(&base.full_register()));
    if overwritten { None } else { register_number(base).map(|number| number as u8) }
}
