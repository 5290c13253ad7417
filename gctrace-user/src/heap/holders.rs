//! Who holds objects of a class: from samples back to what refers to them, as far as references are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step: an object, or objects that are alike.

mod search;
mod step;

use serde::Serialize;

use self::{
    search::Search,
    step::{Choice, Samples, Step},
};
use super::{count::key, jsonl::Address, target::Target};
use crate::ruby::heap::{HeapError, Slot, each_object};

/// Steps from a sample towards the roots.
const STEPS: usize = 8;

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
    if samples.kept.is_empty() {
        return Ok(Path::new(Vec::new(), End::NoSample));
    }
    let mut step = Step::new(samples.kept);
    let mut holders = Vec::new();
    for _ in 0..STEPS {
        search.begin(&step);
        each_object(&target.memory, objspace, &layout, |slot| search.see(slot, &mut step))?;
        // Objects may have moved, and others may be in their places.
        if key(&target.plan, "compact_count", &target.state()?.1) != compactions {
            return Ok(Path::new(holders, End::Changed));
        }
        // A constant or a variable holds one object, and holds it for ever. Of several it says nothing of the others.
        if let Some(path) = step.of_class.take().and_then(|of_class| search.ends_at(of_class, &holders)) {
            return Ok(path);
        }
        let found = match step.choose() {
            Choice::End(end) => return Ok(Path::new(holders, end)),
            Choice::One(object, holds) => search.one(&object, &step, holds),
            Choice::Alike(objects, holds) => search.alike(objects, &step, holds),
        };
        let Some((holder, wanted)) = found else {
            return Ok(Path::new(holders, End::Changed));
        };
        holders.push(holder);
        step = step.next(wanted);
    }
    Ok(Path::new(holders, End::Bounded))
}
