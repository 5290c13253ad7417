//! Reads the references of objects, and names holders.

mod ends;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::ControlFlow,
    time::Duration,
};

use super::{
    super::{jsonl::Address, target::Target},
    End, Holder, Path,
    step::{Choice, HeapObject, Samples, Step},
};
use crate::{
    host::mem::ProcessMemory,
    model::source::last_two,
    ruby::{
        frames::Memory as _,
        heap::{ClassNames, Environment, HeapLayout, Marks, Procs, References, Referred, Slot, Threads},
    },
};

/// Maximum number of reads of an object that the program changes meanwhile.
const LOOKS: usize = 4;

/// Unit of the delay between reads of a holder that was found: twice this, then four times, and so on.
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);

/// The result of reading an object.
enum Found {
    /// It holds some of the wanted objects.
    Holds(HeapObject),
    /// It holds none of them, as far as its references can be read.
    Nothing,
    /// The program changed it while it was read.
    Changed,
}

/// Reads references of the objects of one process.
pub(super) struct Search<'t> {
    target: &'t Target,
    names: Option<ClassNames<&'t ProcessMemory>>,
    references: References,
    procs: Option<Procs>,
    threads: Option<Threads>,
    /// The `Thread` objects that have variables, and their `rb_thread_t *`.
    with_variables: BTreeMap<u64, u64>,
    /// The hashes that are storages of fibers: the thread, and whether they were found only through a fiber.
    storages: BTreeMap<u64, (u64, bool)>,
    /// The real class of each class pointer of a holder, in this pass.
    classes: HashMap<u64, u64>,
    /// The objects whose holders are searched.
    wanted: HashSet<u64>,
    /// Those of them that the object read last holds.
    held: BTreeSet<u64>,
}

impl<'t> Search<'t> {
    pub(super) fn of(target: &'t Target, layout: HeapLayout) -> Option<Self> {
        let references = target.references(&layout)?;
        let version = target.plan.analysis.version;
        Some(Self {
            target,
            names: target.names(),
            references,
            procs: Procs::of(version, &layout),
            threads: Threads::of(version),
            with_variables: BTreeMap::new(),
            storages: BTreeMap::new(),
            classes: HashMap::new(),
            wanted: HashSet::new(),
            held: BTreeSet::new(),
        })
    }

    /// Begins a pass over the heap.
    pub(super) fn begin(&mut self, steps: &[Step]) {
        self.with_variables.clear();
        self.storages.clear();
        self.classes.clear();
        self.wanted = steps.iter().flat_map(|step| &step.wanted).copied().collect();
    }

    /// Checks whether an object holds wanted objects of any of the paths.
    pub(super) fn see(&mut self, slot: &Slot<'_>, steps: &mut [Step]) {
        if slot.marks.is_some_and(|marks| marks.dead) {
            return;
        }
        self.see_names(slot, steps);
        let mut found = self.held(slot);
        let mut bytes = Vec::new();
        for _ in 0..LOOKS {
            if !matches!(found, Found::Changed) {
                break;
            }
            // Its page was read some time ago, and growing objects are moved now and then.
            bytes.resize(slot.bytes.len(), 0);
            if !self.target.memory.read(slot.address, &mut bytes) {
                return;
            }
            found = self.held(&Slot { address: slot.address, bytes: &bytes, marks: slot.marks });
        }
        if let Found::Holds(object) = found {
            for step in steps {
                step.offer(object, &self.held);
            }
        }
    }

    /// Whether an object that was found still exists and holds at least as many of the objects. A growing array is moved now and then, and
    /// may be at neither address when it is read.
    fn still_holds(&mut self, found: &HeapObject, step: &Step, holds: usize) -> bool {
        (0..LOOKS).any(|look| {
            if look > 0 {
                // The program may have been preempted while moving it.
                std::thread::sleep(BETWEEN_LOOKS * 2_u32.pow(look as u32));
            }
            self.holds_now(found, step, holds)
        })
    }

    fn holds_now(&mut self, found: &HeapObject, step: &Step, holds: usize) -> bool {
        let mut bytes = vec![0; found.size];
        if !self.target.memory.read(found.address, &mut bytes) {
            return false;
        }
        let now = self.held(&Slot { address: found.address, bytes: &bytes, marks: None });
        let held = self.held.iter().filter(|address| step.wanted.contains(address)).count();
        matches!(now, Found::Holds(now) if now.likeness() == found.likeness() && held >= holds)
    }

    /// Reads which of the wanted objects a slot holds.
    fn held(&mut self, slot: &Slot<'_>) -> Found {
        let (mut held, wanted) = (std::mem::take(&mut self.held), std::mem::take(&mut self.wanted));
        held.clear();
        let mut refers = 0;
        let read = self.references(slot, &mut |value| {
            refers += 1;
            if wanted.contains(&value) {
                held.insert(value);
            }
        });
        (self.held, self.wanted) = (held, wanted);
        let code = match read {
            Ok(code) => code,
            Err(Referred::Changed) => return Found::Changed,
            Err(_) => return Found::Nothing,
        };
        if self.held.is_empty() {
            return Found::Nothing;
        }
        // Internal objects have something else in place of the class.
        let class = if slot.kind().is_internal() { 0 } else { self.real_class(slot.class()) };
        Found::Holds(HeapObject {
            address: slot.address,
            kind: slot.kind(),
            class,
            code,
            refers,
            old: slot.marks.is_some_and(Marks::is_old),
            size: slot.bytes.len(),
        })
    }

    /// The class that `Object#class` returns: objects with singleton classes (`extend`) are similar to others of their class.
    fn real_class(&mut self, class: u64) -> u64 {
        let Self { names, classes, .. } = self;
        let Some(names) = names.as_ref().filter(|_| class != 0) else { return class };
        *classes.entry(class).or_insert_with(|| names.real_class(class).unwrap_or(class))
    }

    /// Passes each reference of an object to `visit`, and returns the address of its code, if it has any; or why its references cannot be
    /// read.
    fn references(&mut self, slot: &Slot<'_>, visit: &mut dyn FnMut(u64)) -> Result<Option<u64>, Referred> {
        let memory = &self.target.memory;
        if let Some(environment) = Environment::of(slot, self.target.plan.analysis.version) {
            let read = environment.each(memory, visit);
            return read.map(|()| Some(environment.code)).ok_or(Referred::Changed);
        }
        if let Some(closure) = self.procs.as_mut().and_then(|procs| procs.closure(memory, slot)) {
            closure.each(visit);
            return Ok(Some(closure.code));
        }
        match self.references.each(memory, slot, visit) {
            // Whatever its instance variables hold, it holds its own elements.
            Referred::Exactly | Referred::Partly => Ok(None),
            other => Err(other),
        }
    }

    /// Evaluates a pass for one path: its next step, or its end.
    pub(super) fn decide(&mut self, mut step: Step) -> ControlFlow<Path, Step> {
        // A constant or a variable holds one object, and holds it forever. For several objects it says nothing about the others, so names
        // are used only if nothing else is found.
        if let Some(path) = self.ends_at(&mut step) {
            return ControlFlow::Break(path);
        }
        let found = match step.choose() {
            Choice::End(end) => {
                let path = if step.is_single() { None } else { self.ends_at_several(&mut step) };
                return ControlFlow::Break(path.unwrap_or_else(|| Path::new(step.holders, end)));
            }
            Choice::One(object, holds) => {
                self.one(&object, &step, holds).map(|(holder, wanted)| (holder, object.old, wanted))
            }
            Choice::Alike(objects, holds) => {
                self.alike(objects, &step, holds).map(|(holder, wanted)| (holder, true, wanted))
            }
        };
        match found {
            Some((holder, old, wanted)) => ControlFlow::Continue(step.next(holder, old, wanted)),
            None => ControlFlow::Break(Path::new(step.holders, End::Changed)),
        }
    }

    /// The holder to report, and the objects that the path continues from; `None`: it no longer holds as many.
    fn one(&mut self, object: &HeapObject, step: &Step, holds: usize) -> Option<(Holder, Vec<u64>)> {
        let there = self.still_holds(object, step, holds);
        there.then(|| (self.holder(object, (holds, step.wanted.len())), vec![object.address]))
    }

    fn holder(&mut self, object: &HeapObject, (holds, of): (usize, usize)) -> Holder {
        let HeapObject { address, kind, class, refers, code, size, .. } = *object;
        let (mut names, hidden) = (self.names.as_mut(), class == 0);
        let class = names.as_mut().filter(|_| !hidden).and_then(|names| names.name(class));
        let code = code.and_then(|code| {
            let (label, file, line) = names?.code(code)?;
            Some(format!("{label} {}:{line}", last_two(&file)))
        });
        let class = class.map(|name| name.as_ref().to_owned());
        Holder {
            address: Address(address),
            kind: kind.name(),
            class,
            hidden,
            code,
            refers,
            size,
            objects: 1,
            holds,
            of,
        }
    }

    /// The same for similar objects. The path continues from those that still hold some of the wanted objects.
    fn alike(
        &mut self,
        objects: Samples<HeapObject>,
        step: &Step,
        holds: usize,
    ) -> Option<(Holder, Vec<u64>)> {
        let seen = objects.seen;
        let kept: Vec<HeapObject> =
            objects.kept().filter(|object| self.still_holds(object, step, 1)).collect();
        let holder = self.holder(kept.first()?, (holds, step.wanted.len()));
        Some((Holder { objects: seen, ..holder }, kept.iter().map(|object| object.address).collect()))
    }
}
