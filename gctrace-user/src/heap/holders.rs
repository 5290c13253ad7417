//! Who holds objects of a class: from samples back to what refers to them, as far as references are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde::Serialize;

use super::{jsonl::Address, target::Target};
use crate::ruby::heap::{HeapError, ObjectType, References, Referred, Slot, each_object};

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
    /// Nothing whose references are read refers to it: a class or its constants, a stack, a closure, or the like.
    NotReadable,
    /// There are more steps than are followed.
    Bounded,
    /// The references of no object of this release are read.
    Release,
}

impl End {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoSample => "no old object of it is left to look at",
            Self::NotReadable => "held by what is not read (a constant, a stack, a closure, ...)",
            Self::Bounded => "held further on (not followed)",
            Self::Release => "what holds them cannot be read in this Ruby",
        }
    }
}

/// A path from samples to the holder that is farthest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) holders: Vec<Holder>,
    pub(super) end: End,
}

#[derive(Clone, Copy)]
struct Found {
    kind: ObjectType,
    class: u64,
    refers: u64,
    holds: usize,
}

/// The path of old objects that `is_suspect` picks.
pub(super) fn path(
    target: &Target,
    mut is_suspect: impl FnMut(&Slot<'_>) -> bool,
) -> Result<Path, HeapError> {
    let layout = target.layout()?;
    let Some(mut references) = References::of(target.plan.analysis.version, &layout) else {
        return Ok(Path { holders: Vec::new(), end: End::Release });
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
        return Ok(Path { holders: Vec::new(), end: End::NoSample });
    }
    let mut seen: HashSet<u64> = HashSet::new();
    let mut holders = Vec::new();
    for _ in 0..STEPS {
        let mut found: BTreeMap<u64, Found> = BTreeMap::new();
        let mut held = BTreeSet::new();
        each_object(&target.memory, objspace, &layout, |slot| {
            // Objects that hold each other lead nowhere.
            if wanted.contains(&slot.address) || seen.contains(&slot.address) || found.len() >= MOST_HOLDERS {
                return;
            }
            held.clear();
            let mut refers = 0;
            let referred = references.each(&target.memory, slot, &mut |value| {
                refers += 1;
                if wanted.contains(&value) {
                    held.insert(value);
                }
            });
            if referred == Referred::Exactly && !held.is_empty() {
                let (kind, class) = (slot.kind(), slot.class());
                found.insert(slot.address, Found { kind, class, refers, holds: held.len() });
            }
        })?;
        let Some((&address, best)) = found.iter().max_by_key(|(_, found)| (found.holds, found.refers)) else {
            return Ok(Path { holders, end: End::NotReadable });
        };
        holders.push(Holder {
            address: Address(address),
            kind: best.kind.name(),
            class: names
                .as_mut()
                .and_then(|names| names.name(best.class))
                .map(|name| name.as_ref().to_owned()),
            refers: best.refers,
            holds: best.holds,
            of: wanted.len(),
        });
        seen.extend(&wanted);
        wanted = BTreeSet::from([address]);
    }
    Ok(Path { holders, end: End::Bounded })
}

/// Objects spread over all that are seen, in memory that is bounded: each second one is forgotten when there is no room,
/// and from then on half as many are taken.
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
