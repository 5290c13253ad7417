//! Who holds objects of a class: from samples back to what refers to them, as far as references are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step: an object, or objects that are alike.

mod search;
mod step;

use std::ops::ControlFlow;

use serde::Serialize;

use self::{
    search::Search,
    step::{Samples, Step},
};
use super::{count::key, jsonl::Address, target::Target};
use crate::ruby::heap::{HeapError, Slot, each_object};

/// Steps from a sample towards the roots.
const STEPS: usize = 8;
/// How often the heap is read for one step, if its pages change meanwhile.
const TRIES: usize = 3;

/// An object that holds others, or several that are alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    /// Of several, that of one of them.
    pub(super) address: Address,
    pub(super) kind: &'static str,
    pub(super) class: Option<String>,
    /// Of the variables of a method or block that a closure keeps, and of a Proc: label, file and first line of the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<String>,
    /// Objects that it refers to; of several, those of the one at the address.
    pub(super) refers: u64,
    /// How many of this class, with this code, refer to samples; 1: it alone is told.
    pub(super) objects: u64,
    /// Samples of the step before that it or they refer to.
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
    /// Objects of different classes hold them, none of them most.
    Scattered,
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
    /// The heap could not be read again.
    Unread,
}

impl End {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoSample => "none of its old objects is left",
            Self::NotReadable => "held by something that is not read (a stack, a thread, an extension, ...)",
            Self::Scattered => "held by different objects, none by most of them",
            Self::Constant => "held by a constant",
            Self::ClassVariable => "held by a variable of a class",
            Self::Bounded => "held by further objects (not followed)",
            Self::Changed => "held by objects that changed while they were read",
            Self::Unread => "held by what is not known, because the heap could not be read again",
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
    /// Why the heap could not be read.
    pub(super) unread: Option<String>,
}

impl Path {
    fn new(holders: Vec<Holder>, end: End) -> Self {
        Self { holders, constant: None, variable: None, end, unread: None }
    }
}

/// The paths of old objects of so many classes; `class_of` says which one an object is of. The heap is read once for the samples of all, and
/// once for each step of all.
pub(super) fn paths(
    target: &Target,
    classes: usize,
    class_of: impl FnMut(&Slot<'_>) -> Option<usize>,
) -> Vec<Path> {
    let mut paths = vec![None; classes];
    let mut steps = Vec::new();
    let unread = follow(target, &mut paths, &mut steps, class_of).err().map(|error| error.to_string());
    let unread = |holders| Path { unread: unread.clone(), ..Path::new(holders, End::Unread) };
    for step in steps {
        paths[step.suspect] = Some(unread(step.holders));
    }
    paths.into_iter().map(|path| path.unwrap_or_else(|| unread(Vec::new()))).collect()
}

/// Paths that have ended go to `paths`. If the heap cannot be read, `steps` are those of the others.
fn follow(
    target: &Target,
    paths: &mut [Option<Path>],
    steps: &mut Vec<Step>,
    mut class_of: impl FnMut(&Slot<'_>) -> Option<usize>,
) -> Result<(), HeapError> {
    let layout = target.layout()?;
    let Some(mut search) = Search::of(target, layout) else {
        paths.fill(Some(Path::new(Vec::new(), End::Release)));
        return Ok(());
    };
    let (objspace, state) = target.state()?;
    let compactions = key(&target.plan, "compact_count", &state);
    let samples = several_times(|| {
        let mut samples = vec![Samples::default(); paths.len()];
        each_object(&target.memory, objspace, &layout, |slot| {
            if slot.marks.is_some_and(|marks| marks.is_old() && !marks.dead)
                && let Some(samples) = class_of(slot).and_then(|class| samples.get_mut(class))
            {
                samples.see(slot.address);
            }
        })?;
        Ok(samples)
    })?;
    for (suspect, (samples, path)) in samples.into_iter().zip(&mut *paths).enumerate() {
        if samples.kept.is_empty() {
            *path = Some(Path::new(Vec::new(), End::NoSample));
        } else {
            steps.push(Step::new(suspect, samples.kept));
        }
    }
    for _ in 0..STEPS {
        if steps.is_empty() {
            return Ok(());
        }
        search.begin(steps);
        several_times(|| {
            steps.iter_mut().for_each(Step::again);
            each_object(&target.memory, objspace, &layout, |slot| search.see(slot, steps))
        })?;
        // Objects may have moved, and others may be in their places.
        let moved = key(&target.plan, "compact_count", &target.state()?.1) != compactions;
        for step in std::mem::take(steps) {
            let suspect = step.suspect;
            let end = |step: Step| ControlFlow::Break(Path::new(step.holders, End::Changed));
            match if moved { end(step) } else { search.decide(step) } {
                ControlFlow::Continue(next) => steps.push(next),
                ControlFlow::Break(path) => paths[suspect] = Some(path),
            }
        }
    }
    for step in steps.drain(..) {
        paths[step.suspect] = Some(Path::new(step.holders, End::Bounded));
    }
    Ok(())
}

/// Pages come and go while they are read.
fn several_times<T>(mut look: impl FnMut() -> Result<T, HeapError>) -> Result<T, HeapError> {
    for _ in 1..TRIES {
        match look() {
            Err(HeapError::Implausible(_)) => {}
            other => return other,
        }
    }
    look()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What changes while it is read is read again, but not for ever; what is not there is not.
    #[test]
    fn several_looks() {
        let look = |results: &[Result<u8, HeapError>]| {
            let mut looks = results.iter();
            let found = several_times(|| looks.next().expect("looked too often").clone());
            (found, looks.len())
        };
        let changed = Err(HeapError::Implausible("a page".to_owned()));
        assert_eq!(look(&[changed.clone(), Ok(1), Ok(2)]), (Ok(1), 1));
        assert_eq!(look(&vec![changed.clone(); TRIES]), (changed.clone(), 0));
        assert_eq!(look(&[Err(HeapError::Layout), Ok(1)]), (Err(HeapError::Layout), 1));
    }
}
