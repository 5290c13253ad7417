//! Who holds objects of a class: from samples back to what refers to them, as far as references are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step: an object, or objects that are alike.

mod named;
mod search;
mod step;

use std::{cell::Cell, ops::ControlFlow};

use serde::Serialize;

pub(super) use self::named::{ClassVariable, Local, NamedEnd, Several};
use self::{
    search::Search,
    step::{Samples, Step},
};
use super::{
    jsonl::Address,
    target::{Target, key},
};
use crate::ruby::{
    frames::Memory,
    heap::{HeapError, Slot, each_object},
};

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
    /// Ruby code never sees it: it has no class, not one without a name.
    pub(super) hidden: bool,
    /// Of the variables of a method or block that a closure keeps, and of a Proc: label, file and first line of the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<String>,
    /// Objects that it refers to; of several, those of the one at the address.
    pub(super) refers: u64,
    /// Bytes of its slot.
    #[serde(skip)]
    pub(super) size: usize,
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
    /// The same, or it is not held any more: it may be a copy that was replaced, and that no collection has found yet.
    Doubtful,
    /// Nothing is found that holds most of several objects. Not all is looked for then.
    Several,
    /// Objects of different classes hold them, none of them most.
    Scattered,
    /// A constant refers to it, which is for ever.
    Constant,
    /// A class variable or an instance variable of a class or module refers to it.
    ClassVariable,
    /// A global variable refers to it.
    GlobalVariable,
    /// A thread or one of its fibers has it by a name (`Thread#[]`).
    ThreadLocal,
    /// A thread has it as a variable (`Thread#thread_variable_get`).
    ThreadVariable,
    /// A fiber has it in its storage (`Fiber[]`).
    FiberStorage,
    /// There are more steps than are followed.
    Bounded,
    /// A collection moved objects, or what was found last had changed when it was read again.
    Changed,
    /// The references of no object of this release are read.
    Release,
    /// The heap could not be read again.
    Unread,
    /// Whoever waits for it does not want to wait any more.
    Stopped,
}

impl End {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoSample => "none of its old objects is left",
            Self::NotReadable => "held by something that is not read (a stack, a thread, an extension, ...)",
            Self::Doubtful => {
                "held by something that is not read, or not any more (a copy that was replaced)"
            }
            Self::Several => {
                "held by something that was not found (a stack, an extension, variables of several threads, ...)"
            }
            Self::Scattered => "held by different objects, none by most of them",
            Self::Constant => "held by a constant",
            Self::ClassVariable => "held by a variable of a class",
            Self::GlobalVariable => "held by a global variable",
            Self::ThreadLocal => "held by a thread local",
            Self::ThreadVariable => "held by a thread variable",
            Self::FiberStorage => "held by the storage of a fiber",
            Self::Bounded => "held by further objects (not followed)",
            Self::Changed => "held by objects that changed while they were read",
            Self::Stopped => "held by what was not looked for any more, because of a signal",
            Self::Unread => "held by what is not known, because the heap could not be read again",
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
    /// The variable of a class that it ends at.
    pub(super) variable: Option<ClassVariable>,
    /// The global variable that it ends at: `$cache`.
    pub(super) global: Option<String>,
    /// What of a thread it ends at; the end says in which way.
    pub(super) local: Option<Local>,
    /// What has a name and holds some of several objects that it ends at.
    pub(super) several: Option<Several>,
    pub(super) end: End,
    /// Why the heap could not be read.
    pub(super) unread: Option<String>,
}

impl Path {
    pub(super) fn new(holders: Vec<Holder>, end: End) -> Self {
        Self {
            holders,
            constant: None,
            variable: None,
            global: None,
            local: None,
            several: None,
            end,
            unread: None,
        }
    }

    /// What of a thread it ends at, if it ends so.
    pub(super) fn local_at(&self, end: End) -> Option<&Local> {
        self.local.as_ref().filter(|_| self.end == end)
    }
}

/// The paths of old objects of so many classes; `class_of` says which one an object is of. The heap is read once for the samples of all, and
/// once for each step of all. The search ends early when `stop` says so.
pub(super) fn paths(
    target: &Target,
    classes: usize,
    class_of: impl FnMut(&Slot<'_>) -> Option<usize>,
    stop: impl Fn() -> bool,
) -> Vec<Path> {
    let mut paths = vec![None; classes];
    let mut steps = Vec::new();
    let unfinished = follow(target, &mut paths, &mut steps, class_of, stop).err();
    let here = |holders| match &unfinished {
        Some(Unfinished::Unread(error)) => {
            Path { unread: Some(error.to_string()), ..Path::new(holders, End::Unread) }
        }
        Some(Unfinished::Stopped) | None => Path::new(holders, End::Stopped),
    };
    for step in steps {
        paths[step.suspect] = Some(here(step.holders));
    }
    paths.into_iter().map(|path| path.unwrap_or_else(|| here(Vec::new()))).collect()
}

/// Why a search has no end.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unfinished {
    Unread(HeapError),
    Stopped,
}

impl From<HeapError> for Unfinished {
    fn from(error: HeapError) -> Self {
        Self::Unread(error)
    }
}

/// Paths that have ended go to `paths`. If the heap cannot be read, `steps` are those of the others.
fn follow(
    target: &Target,
    paths: &mut [Option<Path>],
    steps: &mut Vec<Step>,
    mut class_of: impl FnMut(&Slot<'_>) -> Option<usize>,
    stop: impl Fn() -> bool,
) -> Result<(), Unfinished> {
    let layout = target.layout()?;
    let Some(mut search) = Search::of(target, layout) else {
        paths.fill(Some(Path::new(Vec::new(), End::Release)));
        return Ok(());
    };
    let (objspace, state) = target.state()?;
    let compactions = key(&target.plan, "compact_count", &state);
    let memory = Stoppable { memory: &target.memory, stop, stopped: Cell::new(false) };
    let pass = |see: &mut dyn FnMut(&Slot<'_>)| {
        let read = each_object(&memory, objspace, &layout, see);
        if memory.stopped.get() { Err(Unfinished::Stopped) } else { Ok(read?) }
    };
    let samples = several_times(|| {
        let mut samples = vec![Samples::default(); paths.len()];
        pass(&mut |slot| {
            if slot.marks.is_some_and(|marks| marks.is_old() && !marks.dead)
                && let Some(samples) = class_of(slot).and_then(|class| samples.get_mut(class))
            {
                samples.see(slot.address, slot.address);
            }
        })?;
        Ok(samples)
    })?;
    for (suspect, (samples, path)) in samples.into_iter().zip(&mut *paths).enumerate() {
        if samples.is_empty() {
            *path = Some(Path::new(Vec::new(), End::NoSample));
        } else {
            steps.push(Step::new(suspect, samples.kept()));
        }
    }
    for _ in 0..STEPS {
        if steps.is_empty() {
            return Ok(());
        }
        search.begin(steps);
        several_times(|| {
            steps.iter_mut().for_each(Step::again);
            pass(&mut |slot| search.see(slot, steps))
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

/// Memory that cannot be read any more once `stop` has said so.
struct Stoppable<'a, M, F> {
    memory: &'a M,
    stop: F,
    stopped: Cell<bool>,
}

impl<M: Memory, F: Fn() -> bool> Memory for Stoppable<'_, M, F> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        if !self.stopped.get() && (self.stop)() {
            self.stopped.set(true);
        }
        !self.stopped.get() && self.memory.read(address, buffer)
    }
}

/// Pages come and go while they are read.
fn several_times<T>(mut look: impl FnMut() -> Result<T, Unfinished>) -> Result<T, Unfinished> {
    for _ in 1..TRIES {
        match look() {
            Err(Unfinished::Unread(HeapError::Implausible(_))) => {}
            other => return other,
        }
    }
    look()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once it is to stop, nothing is read any more.
    #[test]
    fn stopping() {
        struct All(Cell<u32>);
        impl Memory for All {
            fn read(&self, _: u64, _: &mut [u8]) -> bool {
                self.0.set(self.0.get() + 1);
                true
            }
        }
        let (all, stop) = (All(Cell::new(0)), Cell::new(false));
        // A signal is told once.
        let memory = Stoppable { memory: &all, stop: || stop.take(), stopped: Cell::new(false) };
        assert!(memory.read(8, &mut [0]) && !memory.stopped.get());
        stop.set(true);
        assert!(!memory.read(8, &mut [0]) && memory.stopped.get());
        assert!(!memory.read(8, &mut [0]));
        assert_eq!(all.0.get(), 1);
    }

    /// What changes while it is read is read again, but not for ever; what is not there is not.
    #[test]
    fn several_looks() {
        let look = |results: &[Result<u8, Unfinished>]| {
            let mut looks = results.iter();
            let found = several_times(|| looks.next().expect("looked too often").clone());
            (found, looks.len())
        };
        let changed = Err(Unfinished::Unread(HeapError::Implausible("a page".to_owned())));
        assert_eq!(look(&[changed.clone(), Ok(1), Ok(2)]), (Ok(1), 1));
        assert_eq!(look(&vec![changed.clone(); TRIES]), (changed.clone(), 0));
        for end in [Unfinished::Stopped, Unfinished::Unread(HeapError::Layout)] {
            assert_eq!(look(&[Err(end.clone()), Ok(1)]), (Err(end), 1));
        }
    }
}
