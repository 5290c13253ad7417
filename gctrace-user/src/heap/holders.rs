//! Who holds objects of a class: from samples back to what refers to them, as far as references are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use serde::Serialize;

use super::{count::key, jsonl::Address, target::Target};
use crate::{
    host::mem::ProcessMemory,
    model::source::last_two,
    ruby::{
        frames::Memory as _,
        heap::{
            ClassNames, Environment, HeapError, HeapLayout, Marks, ObjectType, Procs, References, Referred,
            Slot, each_object,
        },
    },
};

/// Old objects of a class that holders are looked for.
const SAMPLES: usize = 64;
/// Steps from a sample towards the roots.
const STEPS: usize = 8;
/// How often an object is read again that the program has changed meanwhile.
const LOOKS: usize = 4;

/// An object that holds others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    pub(super) address: Address,
    pub(super) kind: &'static str,
    pub(super) class: Option<String>,
    /// Of the variables of a method or block that a closure keeps, and of a Proc: label, file and first line of the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<String>,
    /// Objects that it refers to.
    pub(super) refers: u64,
    /// Samples of the step before that it refers to.
    pub(super) holds: usize,
    /// How many samples there were.
    pub(super) of: usize,
}

/// Why a path ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum End {
    /// No object of the class is there any more.
    NoSample,
    /// None of the references that are read leads to it: a stack, a thread, data of an extension, or similar.
    NotReadable,
    /// A constant refers to it, which is for ever.
    Constant,
    /// A class variable or an instance variable of a class or module refers to it.
    ClassVariable,
    /// There are more steps than are followed.
    Bounded,
    /// A collection moved objects, or what was found last had changed when it was read again.
    Changed,
    /// The references of no object of this release are read.
    Release,
}

impl End {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoSample => "none of its old objects is left",
            Self::NotReadable => "held by something that is not read (a stack, a thread, an extension, ...)",
            Self::Constant => "held by a constant",
            Self::ClassVariable => "held by a variable of a class",
            Self::Bounded => "held by further objects (not followed)",
            Self::Changed => "held by objects that changed while they were read",
            Self::Release => "their holders cannot be read in this Ruby",
        }
    }
}

/// A class variable, or an instance variable of a class or module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ClassVariable {
    /// `@@cache` or `@cache`.
    pub(super) name: String,
    /// What Ruby code calls the class or module; `None`: it has no name.
    pub(super) class: Option<String>,
}

/// A path from samples to the holder that is farthest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) holders: Vec<Holder>,
    /// The constant that it ends at.
    pub(super) constant: Option<String>,
    /// The variable of a class that it ends at.
    pub(super) variable: Option<ClassVariable>,
    pub(super) end: End,
}

impl Path {
    fn new(holders: Vec<Holder>, end: End) -> Self {
        Self { holders, constant: None, variable: None, end }
    }
}

#[derive(Clone, Copy)]
struct HeapObject {
    kind: ObjectType,
    class: u64,
    refers: u64,
    holds: usize,
    old: bool,
    /// Bytes of its slot.
    size: usize,
    /// Of variables that a closure keeps, and of a Proc: the address of the code.
    code: Option<u64>,
}

/// The path of old objects that `is_suspect` picks.
pub(super) fn path(
    target: &Target,
    mut is_suspect: impl FnMut(&Slot<'_>) -> bool,
) -> Result<Path, HeapError> {
    let layout = target.layout()?;
    let Some(mut search) = Search::of(target, layout) else {
        return Ok(Path::new(Vec::new(), End::Release));
    };
    let (objspace, state) = target.state()?;
    let compactions = key(&target.plan, "compact_count", &state);
    let mut samples = Samples::default();
    each_object(&target.memory, objspace, &layout, |slot| {
        if slot.marks.is_some_and(|marks| marks.is_old() && !marks.dead) && is_suspect(slot) {
            samples.see(slot.address);
        }
    })?;
    let mut wanted: BTreeSet<u64> = samples.kept.iter().copied().collect();
    if wanted.is_empty() {
        return Ok(Path::new(Vec::new(), End::NoSample));
    }
    let mut seen: HashSet<u64> = HashSet::new();
    let mut holders = Vec::new();
    for _ in 0..STEPS {
        let mut step = Step::new(&wanted, &seen);
        each_object(&target.memory, objspace, &layout, |slot| search.see(slot, &mut step))?;
        let Step { best, of_class, .. } = step;
        // Objects may have moved, and others may be in their places.
        if key(&target.plan, "compact_count", &target.state()?.1) != compactions {
            return Ok(Path::new(holders, End::Changed));
        }
        // A constant or a variable holds one object, and holds it for ever. Of several samples it says nothing of the others.
        if wanted.len() == 1
            && let Some(path) = of_class.and_then(|of_class| search.ends_at(of_class, &holders))
        {
            return Ok(path);
        }
        let Some((address, best)) = best else {
            return Ok(Path::new(holders, End::NotReadable));
        };
        if !search.still_holds(address, &best, Step::new(&wanted, &seen)) {
            return Ok(Path::new(holders, End::Changed));
        }
        holders.push(search.holder(address, &best, wanted.len()));
        seen.extend(&wanted);
        wanted = BTreeSet::from([address]);
    }
    Ok(Path::new(holders, End::Bounded))
}

/// What of a class refers to one of the objects.
enum OfClass {
    /// The class, and the key of a constant.
    Constant(u64, u32),
    /// The class, and the name of a variable.
    Variable(u64, Arc<str>),
}

/// What was found of an object.
enum Found {
    /// It holds some of the objects.
    Holds(HeapObject),
    /// It holds none, or what it holds cannot be read.
    Nothing,
    /// The program changed it while it was read.
    Changed,
}

/// What refers to the objects of one step.
struct Step<'a> {
    wanted: &'a BTreeSet<u64>,
    /// Objects that hold each other lead nowhere.
    seen: &'a HashSet<u64>,
    /// What holds most of them, and its address.
    best: Option<(u64, HeapObject)>,
    of_class: Option<OfClass>,
    held: BTreeSet<u64>,
}

impl<'a> Step<'a> {
    fn new(wanted: &'a BTreeSet<u64>, seen: &'a HashSet<u64>) -> Self {
        Self { wanted, seen, best: None, of_class: None, held: BTreeSet::new() }
    }
}

impl Step<'_> {
    /// Keeps a holder if it holds more of the objects than others; of several that hold as much, not one that may be gone soon.
    fn offer(&mut self, address: u64, object: HeapObject) {
        let rank = |address: u64, object: &HeapObject| (object.holds, object.old, object.refers, address);
        if self.best.as_ref().is_none_or(|(at, best)| rank(*at, best) < rank(address, &object)) {
            self.best = Some((address, object));
        }
    }
}

/// What reads references of the objects of one process.
struct Search<'t> {
    target: &'t Target,
    names: Option<ClassNames<&'t ProcessMemory>>,
    references: References,
    procs: Option<Procs>,
}

impl<'t> Search<'t> {
    fn of(target: &'t Target, layout: HeapLayout) -> Option<Self> {
        let references = target.references(&layout)?;
        let procs = Procs::of(target.plan.analysis.version, &layout);
        Some(Self { target, names: target.names(), references, procs })
    }

    /// Looks whether an object is a holder.
    fn see(&mut self, slot: &Slot<'_>, step: &mut Step<'_>) {
        if slot.marks.is_some_and(|marks| marks.dead) {
            return;
        }
        if [ObjectType::CLASS, ObjectType::MODULE].contains(&slot.kind()) && step.of_class.is_none() {
            step.of_class = self.of_class(slot.address, step.wanted);
        }
        let known = step.wanted.contains(&slot.address) || step.seen.contains(&slot.address);
        if known {
            return;
        }
        let mut found = self.held(slot, step);
        let mut bytes = Vec::new();
        for _ in 0..LOOKS {
            if !matches!(found, Found::Changed) {
                break;
            }
            // Its page was read some time ago, and what grows is moved now and then.
            bytes.resize(slot.bytes.len(), 0);
            if !self.target.memory.read(slot.address, &mut bytes) {
                return;
            }
            found = self.held(&Slot { address: slot.address, bytes: &bytes, marks: slot.marks }, step);
        }
        if let Found::Holds(object) = found {
            step.offer(slot.address, object);
        }
    }

    /// Whether an object that was found is still there, and holds as many of the objects.
    fn still_holds(&mut self, address: u64, found: &HeapObject, mut step: Step<'_>) -> bool {
        let mut bytes = vec![0; found.size];
        if !self.target.memory.read(address, &mut bytes) {
            return false;
        }
        let again = self.held(&Slot { address, bytes: &bytes, marks: None }, &mut step);
        matches!(again, Found::Holds(again)
            if (again.kind, again.class) == (found.kind, found.class) && again.holds >= found.holds)
    }

    /// Which of the objects a slot holds.
    fn held(&mut self, slot: &Slot<'_>, step: &mut Step<'_>) -> Found {
        let Step { wanted, held, .. } = step;
        held.clear();
        let mut refers = 0;
        let read = self.references(slot, &mut |value| {
            refers += 1;
            if wanted.contains(&value) {
                held.insert(value);
            }
        });
        let code = match read {
            Ok(code) => code,
            Err(Referred::Changed) => return Found::Changed,
            Err(_) => return Found::Nothing,
        };
        if held.is_empty() {
            return Found::Nothing;
        }
        // What internal objects have in the place of a class is something else.
        let class = if slot.kind().is_internal() { 0 } else { slot.class() };
        let old = slot.marks.is_some_and(Marks::is_old);
        Found::Holds(HeapObject {
            kind: slot.kind(),
            class,
            refers,
            holds: held.len(),
            old,
            size: slot.bytes.len(),
            code,
        })
    }

    /// Hands what an object refers to to `visit`, and returns the address of the code that it has, if any; or why its references cannot be
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
            Referred::Exactly => Ok(None),
            other => Err(other),
        }
    }

    /// A constant or a variable of a class that is one of the objects. Where they cannot be read, the path goes on as if there were none.
    fn of_class(&mut self, class: u64, wanted: &BTreeSet<u64>) -> Option<OfClass> {
        let names = self.names.as_mut()?;
        let mut constant = None;
        let _read = names.constants(class, &mut |key, value| {
            if wanted.contains(&value) {
                constant.get_or_insert(key);
            }
        });
        if let Some(key) = constant {
            return Some(OfClass::Constant(class, key));
        }
        let variables = names.variables(class, &mut |value| wanted.contains(&value))?;
        variables.into_iter().next().map(|name| OfClass::Variable(class, name))
    }

    /// The path that ends there; `None`: a constant without a name.
    fn ends_at(&mut self, of_class: OfClass, holders: &[Holder]) -> Option<Path> {
        let names = self.names.as_mut()?;
        let holders = holders.to_vec();
        Some(match of_class {
            OfClass::Constant(class, key) => {
                let constant = Some(names.constant(class, key)?);
                Path { constant, ..Path::new(holders, End::Constant) }
            }
            OfClass::Variable(class, name) => {
                let variable = ClassVariable { name: name.to_string(), class: names.expression(class) };
                Path { variable: Some(variable), ..Path::new(holders, End::ClassVariable) }
            }
        })
    }

    fn holder(&mut self, address: u64, object: &HeapObject, of: usize) -> Holder {
        let HeapObject { kind, class, refers, holds, code, .. } = *object;
        let mut names = self.names.as_mut();
        let class = names.as_mut().filter(|_| class != 0).and_then(|names| names.name(class));
        let code = code.and_then(|code| {
            let (label, file, line) = names?.code(code)?;
            Some(format!("{label} {}:{line}", last_two(&file)))
        });
        let class = class.map(|name| name.as_ref().to_owned());
        Holder { address: Address(address), kind: kind.name(), class, code, refers, holds, of }
    }
}

/// Objects spread over all that are seen, in memory that is bounded: each second one is forgotten when there is no room,
/// and after that half as many are taken.
#[derive(Default)]
struct Samples {
    kept: Vec<u64>,
    seen: u64,
    every: u64,
}

impl Samples {
    fn see(&mut self, address: u64) {
        let every = self.every.max(1);
        if self.seen.is_multiple_of(every) {
            if self.kept.len() == SAMPLES {
                let mut index = 0;
                self.kept.retain(|_| {
                    index += 1;
                    index % 2 == 1
                });
                self.every = every * 2;
            }
            if self.seen.is_multiple_of(self.every.max(1)) {
                self.kept.push(address);
            }
        }
        self.seen += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few objects are all kept; of many, some of each part of the heap.
    #[test]
    fn samples() {
        let of = |count: u64| {
            let mut samples = Samples::default();
            (0..count).for_each(|address| samples.see(address));
            samples.kept
        };
        assert!(of(0).is_empty());
        assert_eq!(of(64), (0..64).collect::<Vec<u64>>());
        let many = of(100_000);
        assert!((32..=64).contains(&many.len()), "{}", many.len());
        assert!(many.windows(2).all(|pair| pair[1] - pair[0] == many[1] - many[0]));
        assert!(many.last().is_some_and(|last| *last > 90_000));
    }
}
