//! Who holds objects of a class: from samples back to what refers to them, as far as references are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde::Serialize;

use super::{jsonl::Address, target::Target};
use crate::{
    model::source::last_two,
    ruby::heap::{Environment, HeapError, ObjectType, Referred, Slot, each_object},
};

/// Old objects of a class that holders are looked for.
const SAMPLES: usize = 64;
/// Holders of one step that are counted.
const MOST_HOLDERS: usize = 4096;
/// Steps from a sample towards the roots.
const STEPS: usize = 5;

/// An object that holds others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    pub(super) address: Address,
    pub(super) kind: &'static str,
    pub(super) class: Option<String>,
    /// Of the variables of a method or block that a closure keeps: its label, file and first line.
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
    /// None of the references that are read leads to it: a class or its constants, a stack, a closure, or similar.
    NotReadable,
    /// A constant refers to it, which is for ever.
    Constant,
    /// There are more steps than are followed.
    Bounded,
    /// The references of no object of this release are read.
    Release,
}

impl End {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoSample => "none of its old objects is left",
            Self::NotReadable => {
                "held by something that is not read (a stack, a Proc, a variable of a class, ...)"
            }
            Self::Constant => "held by a constant",
            Self::Bounded => "held by further objects (not followed)",
            Self::Release => "their holders cannot be read in this Ruby",
        }
    }
}

/// A path from samples to the holder that is farthest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) holders: Vec<Holder>,
    /// The constant that it ends at.
    pub(super) constant: Option<String>,
    pub(super) end: End,
}

impl Path {
    fn new(holders: Vec<Holder>, end: End) -> Self {
        Self { holders, constant: None, end }
    }
}

#[derive(Clone, Copy)]
struct HeapObject {
    kind: ObjectType,
    class: u64,
    refers: u64,
    holds: usize,
    /// Of variables that a closure keeps: the address of the code.
    code: Option<u64>,
}

/// The path of old objects that `is_suspect` picks.
pub(super) fn path(
    target: &Target,
    mut is_suspect: impl FnMut(&Slot<'_>) -> bool,
) -> Result<Path, HeapError> {
    let layout = target.layout()?;
    let version = target.plan.analysis.version;
    let Some(mut references) = target.references(&layout) else {
        return Ok(Path::new(Vec::new(), End::Release));
    };
    let mut names = target.names();
    let (objspace, _) = target.state()?;
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
        let mut found: BTreeMap<u64, HeapObject> = BTreeMap::new();
        let mut held = BTreeSet::new();
        // A class and the key of a constant of it that is one of the objects.
        let mut constant: Option<(u64, u32)> = None;
        each_object(&target.memory, objspace, &layout, |slot| {
            if let Some(names) =
                names.as_mut().filter(|_| ["T_CLASS", "T_MODULE"].contains(&slot.kind().name()))
            {
                // Where constants cannot be read, the path ends as before.
                let _read = names.constants(slot.address, &mut |key, value| {
                    if wanted.contains(&value) {
                        constant.get_or_insert((slot.address, key));
                    }
                });
            }
            // Objects that hold each other lead nowhere.
            if wanted.contains(&slot.address) || seen.contains(&slot.address) || found.len() >= MOST_HOLDERS {
                return;
            }
            held.clear();
            let mut refers = 0;
            let mut visit = |value| {
                refers += 1;
                if wanted.contains(&value) {
                    held.insert(value);
                }
            };
            let environment = Environment::of(slot, version);
            let referred = match &environment {
                Some(environment) => environment.each(&target.memory, &mut visit).is_some(),
                None => references.each(&target.memory, slot, &mut visit) == Referred::Exactly,
            };
            if referred && !held.is_empty() {
                let code = environment.map(|environment| environment.code);
                // What an environment has in the place of a class is its code.
                let class = if code.is_some() { 0 } else { slot.class() };
                let object = HeapObject { kind: slot.kind(), class, refers, holds: held.len(), code };
                found.insert(slot.address, object);
            }
        })?;
        let best = found.iter().max_by_key(|(_, found)| (found.holds, found.refers));
        // A constant holds one object, and holds it for ever; what holds more of the samples is the better answer.
        if let Some((class, key)) = constant
            && best.is_none_or(|(_, best)| best.holds <= 1)
            && let Some(name) = names.as_mut().and_then(|names| names.constant(class, key))
        {
            return Ok(Path { holders, constant: Some(name), end: End::Constant });
        }
        let Some((&address, best)) = best else {
            return Ok(Path::new(holders, End::NotReadable));
        };
        holders.push(Holder {
            address: Address(address),
            kind: best.kind.name(),
            class: names
                .as_mut()
                .and_then(|names| names.name(best.class).filter(|_| best.code.is_none()))
                .map(|name| name.as_ref().to_owned()),
            code: best.code.and_then(|code| {
                let (label, file, line) = names.as_mut()?.code(code)?;
                Some(format!("{label} {}:{line}", last_two(&file)))
            }),
            refers: best.refers,
            holds: best.holds,
            of: wanted.len(),
        });
        seen.extend(&wanted);
        wanted = BTreeSet::from([address]);
    }
    Ok(Path::new(holders, End::Bounded))
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
