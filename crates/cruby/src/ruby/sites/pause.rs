//! Why the VM enters the GC at each `GC_ENTER` site (`enum gc_enter_event`, gc.c), as far as the code proves it.

use std::collections::{BTreeSet, HashMap};

use gctrace_common::event::Point;
use iced_x86::{FlowControl, Mnemonic, Register};

use super::callers::base_name;
use super::{PauseKind, Site};
use crate::address::Svma;
use crate::ruby::RubyVersion;
use crate::ruby::code::{Body, Code};
use crate::ruby::vm_path::VmPath;
use crate::ruby::x86::{immediate, is_memory};

/// Names of functions that run the finalizers at exit (gc.c up to 3.3, gc/default/default.c).
const FINALIZERS: [&str; 2] = ["rb_objspace_call_finalizer", "rb_gc_impl_shutdown_call_finalizer"];
/// Names of functions that continue a cycle (gc.c: the first from 3.2 on, the others before).
const CONTINUERS: [&str; 3] = ["gc_continue", "gc_marks_continue", "gc_sweep_continue"];
/// The first version in which one function, `gc_continue`, holds all steps of a cycle.
const ONE_CONTINUE: RubyVersion = RubyVersion::new(3, 2, 0);
/// Maximum depth of nested calls that are followed.
const MAX_DEPTH: usize = 4;
/// Maximum number of functions visited in one walk over calls.
const MAX_FUNCTIONS: usize = 256;

/// Finds the kind of each pause. `None` if nothing proves it, or if all kinds share one `gc_enter`.
pub(super) fn tell_pauses(code: &Code<'_>, version: RubyVersion, vm: &VmPath, sites: &mut [Site]) {
    let mut walk = Walk { code, bodies: HashMap::new() };
    let all = sites.to_vec();
    let at = |points: &[Point]| -> BTreeSet<Svma> {
        all.iter().filter(|site| points.contains(&site.point)).map(|site| site.address).collect()
    };
    let (starts, edges) = (at(&[Point::GcStart]), at(&[Point::GcEnter, Point::GcExit]));
    let owners = |points: &[Point]| -> BTreeSet<Svma> {
        all.iter().filter(|site| points.contains(&site.point)).map(|site| site.owner).collect()
    };
    let exits = owners(&[Point::GcExit]);
    let phases = owners(&[Point::GcEndMark, Point::GcEndSweep]);
    let enters = owners(&[Point::GcEnter]);
    let resting = walk.owners_behind(vm.accessors().function("rb_gc_disable"), &enters);

    for site in sites.iter_mut().filter(|site| site.point == Point::GcEnter) {
        // A pause is in this function only if it also ends here; otherwise the site is in a gc_enter that all kinds share.
        let ends_here = exits.contains(&site.owner) || !walk.callees(site.owner).is_disjoint(&exits);
        if !ends_here {
            continue;
        }
        let name = site.owner_name.as_deref().map_or("", base_name);
        let region = walk.region(site, &edges);
        site.pause = if region.addresses.iter().any(|address| starts.contains(address)) {
            Some(PauseKind::Start)
        } else if name == "gc_rest" || resting.contains(&site.owner) {
            Some(PauseKind::Rest)
        } else if CONTINUERS.contains(&name) {
            Some(PauseKind::Continue)
        } else if FINALIZERS.contains(&name)
            || (walk.forbids_gc_before(site, vm) && !walk.reaches(&region.callees, &phases))
        {
            Some(PauseKind::Finalizer)
        } else {
            None
        };
    }
    the_last_is_continue(version, sites);
}

/// From 3.2 on there are four kinds, each with a site of its own. If three are identified and one site is left, that site
/// is the fourth.
fn the_last_is_continue(version: RubyVersion, sites: &mut [Site]) {
    let enters = || sites.iter().filter(|site| site.point == Point::GcEnter);
    let has = |kind| enters().any(|site| site.pause == Some(kind));
    let others = has(PauseKind::Start) && has(PauseKind::Rest) && has(PauseKind::Finalizer);
    if version < ONE_CONTINUE || !others || has(PauseKind::Continue) {
        return;
    }
    let mut open = sites.iter_mut().filter(|site| site.point == Point::GcEnter && site.pause.is_none());
    if let (Some(last), None) = (open.next(), open.next()) {
        last.pause = Some(PauseKind::Continue);
    }
}

/// The code that may run after a site until a pause begins or ends.
#[derive(Default)]
struct Region {
    addresses: BTreeSet<Svma>,
    callees: BTreeSet<Svma>,
}

struct Walk<'c, 'a> {
    code: &'c Code<'a>,
    bodies: HashMap<Svma, Body>,
}

impl Walk<'_, '_> {
    fn body(&mut self, function: Svma) -> Option<&Body> {
        if !self.bodies.contains_key(&function) {
            let index = self.code.owner_of(function)?;
            self.bodies.insert(function, self.code.body(index));
        }
        self.bodies.get(&function)
    }

    fn owner(&self, address: Svma) -> Option<Svma> {
        Some(self.code.start(self.code.owner_of(address)?))
    }

    /// The functions of this image that a function calls directly.
    fn callees(&mut self, function: Svma) -> BTreeSet<Svma> {
        let code = self.code;
        let Some(body) = self.body(function) else { return BTreeSet::new() };
        let called = body.instructions.iter().filter_map(|instruction| match instruction.flow_control() {
            FlowControl::Call | FlowControl::IndirectCall => code.callee(instruction).address,
            FlowControl::UnconditionalBranch | FlowControl::IndirectBranch => {
                code.callee(instruction).address.filter(|&target| body.index_of(target).is_none())
            }
            _ => None,
        });
        let called: Vec<Svma> = called.collect();
        called.into_iter().filter_map(|address| self.owner(address)).collect()
    }

    /// Everything that can follow a site, up to the next site at which a pause begins or ends.
    fn region(&mut self, site: &Site, edges: &BTreeSet<Svma>) -> Region {
        let code = self.code;
        let mut region = Region::default();
        let Some(body) = self.body(site.owner) else { return region };
        let mut pending: Vec<usize> = body.index_of(site.address).into_iter().collect();
        let mut called = Vec::new();
        while let Some(index) = pending.pop() {
            let instruction = &body.instructions[index];
            let address = Svma(instruction.ip());
            let another = address != site.address && edges.contains(&address);
            if another || !region.addresses.insert(address) {
                continue;
            }
            if matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
                called.extend(code.callee(instruction).address);
            }
            pending.extend(body.successors(index));
        }
        region.callees = called.into_iter().filter_map(|address| self.owner(address)).collect();
        region
    }

    /// Whether one of the functions is a wanted one, or leads to one by direct calls.
    fn reaches(&mut self, from: &BTreeSet<Svma>, wanted: &BTreeSet<Svma>) -> bool {
        let mut seen = from.clone();
        let mut level = from.clone();
        for _ in 0..MAX_DEPTH {
            if !level.is_disjoint(wanted) {
                return true;
            }
            let next: BTreeSet<Svma> =
                level.into_iter().flat_map(|function| self.callees(function)).collect();
            level = next.difference(&seen).copied().collect();
            seen.extend(&level);
            if seen.len() > MAX_FUNCTIONS {
                // Too many functions: nothing is proven.
                return true;
            }
        }
        !level.is_disjoint(wanted)
    }

    /// The functions with a `GC_ENTER` site to which `disable` leads. `rb_gc_disable` finishes the cycle first, by `gc_rest`, and
    /// enters the GC in no other way (gc.c; gc/default/default.c `rb_gc_impl_gc_disable`).
    fn owners_behind(&mut self, disable: &str, enters: &BTreeSet<Svma>) -> BTreeSet<Svma> {
        let Some(disable) = self.code.image.symbol(disable) else { return BTreeSet::new() };
        let mut found = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut level: BTreeSet<Svma> = self.owner(disable.address).into_iter().collect();
        for _ in 0..MAX_DEPTH {
            let mut next = BTreeSet::new();
            for function in level {
                if !seen.insert(function) || seen.len() > MAX_FUNCTIONS {
                    continue;
                }
                if enters.contains(&function) {
                    found.insert(function);
                } else {
                    next.extend(self.callees(function));
                }
            }
            level = next;
        }
        found
    }

    /// Whether a store of the `dont_gc` bit leads to the site: `rb_objspace_call_finalizer` sets it before it enters the GC
    /// (gc.c).
    fn forbids_gc_before(&mut self, site: &Site, vm: &VmPath) -> bool {
        let Some(bit) = vm.dont_gc_bit else { return false };
        let Some(body) = self.body(site.owner) else { return false };
        let Some(target) = body.index_of(site.address) else { return false };
        let stores = (0..body.instructions.len()).filter(|&index| {
            let instruction = &body.instructions[index];
            if instruction.mnemonic() != Mnemonic::Or
                || !is_memory(instruction, 0)
                || matches!(instruction.memory_base(), Register::RIP | Register::RSP | Register::None)
                || instruction.memory_index() != Register::None
            {
                return false;
            }
            let Some(mask) = immediate(instruction, 1) else { return false };
            let mask = mask & (u64::MAX >> (64 - 8 * instruction.memory_size().size().clamp(1, 8)));
            let position = instruction.memory_displacement64().wrapping_mul(8);
            mask.is_power_of_two()
                && position.wrapping_add(u64::from(mask.trailing_zeros()))
                    == u64::from(vm.flags) * 8 + u64::from(bit)
        });
        stores.into_iter().any(|store| body.leads_to(store, target))
    }
}
