//! Finds what holds objects of a class: from samples back along references, as far as these are read exactly.
//!
//! Each step reads the heap once, one page at a time. What refers to most samples is the next step: one object, or several similar objects.

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
    retried,
    target::{Target, key},
};
use crate::ruby::{
    frames::Memory,
    heap::{HeapError, Slot, each_object},
};

/// Maximum number of steps from a sample towards the roots.
const STEPS: usize = 8;

/// An object that holds others, or several similar ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    /// Its address; for several objects, that of one of them.
    pub(super) address: Address,
    pub(super) kind: &'static str,
    pub(super) class: Option<String>,
    /// Whether it is invisible to Ruby code: it has no class at all, as opposed to a class without a name.
    pub(super) hidden: bool,
    /// For a Proc, or the variables of a method or block that a closure keeps: label, file and first line of the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<String>,
    /// Number of objects that it refers to; for several objects, that of the one at `address`.
    pub(super) refers: u64,
    /// Bytes of its slot.
    #[serde(skip)]
    pub(super) size: usize,
    /// Number of objects of this class and with this code that refer to samples; 1: only this one is reported.
    pub(super) objects: u64,
    /// Number of samples of the previous step that it or they refer to.
    pub(super) holds: usize,
    /// Total number of these samples.
    pub(super) of: usize,
}

/// Why a path ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum End {
    /// No old object of the class exists any more.
    NoSample,
    /// None of the readable references leads to it: it is held by a stack, a thread, data of an extension, or similar.
    NotReadable,
    /// The same, or it is no longer held: it may be a replaced copy that no collection has found yet.
    Doubtful,
    /// Nothing was found that holds most of several objects. In this case not everything is searched.
    Several,
    /// Objects of different classes hold them, and none of the classes holds most.
    Scattered,
    /// A constant refers to it, so it is never freed.
    Constant,
    /// A class variable or an instance variable of a class or module refers to it.
    ClassVariable,
    /// A global variable refers to it.
    GlobalVariable,
    /// A thread or one of its fibers holds it as a local variable (`Thread#[]`).
    ThreadLocal,
    /// A thread holds it as a thread variable (`Thread#thread_variable_get`).
    ThreadVariable,
    /// A fiber holds it in its storage (`Fiber[]`).
    FiberStorage,
    /// The maximum number of steps was reached.
    Bounded,
    /// A collection moved objects, or the last holder had changed when it was read again.
    Changed,
    /// References cannot be read in this release of Ruby.
    Release,
    /// The heap could not be read again.
    Unread,
    /// The user stopped the search.
    Stopped,
}

impl End {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoSample => "none of its old objects is left",
            Self::NotReadable => {
                "held by something that gctrace does not read (a stack, a thread, an extension, ...)"
            }
            Self::Doubtful => {
                "held by something that gctrace does not read, or no longer held (a copy that was replaced)"
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
            Self::Stopped => "holder unknown: a signal ended the search",
            Self::Unread => "holder unknown: the heap could not be read again",
            Self::Release => "their holders cannot be read in this Ruby",
        }
    }
}

/// A path from samples to their most distant holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) holders: Vec<Holder>,
    /// The constant at its end.
    pub(super) constant: Option<String>,
    /// The variable of a class at its end.
    pub(super) variable: Option<ClassVariable>,
    /// The global variable at its end: `$cache`.
    pub(super) global: Option<String>,
    /// The variable of a thread or fiber at its end; `end` says which kind.
    pub(super) local: Option<Local>,
    /// If it ends at several objects: the named holders of some of them.
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

    /// The variable of a thread or fiber at its end, if it ends in that way.
    pub(super) fn local_at(&self, end: End) -> Option<&Local> {
        self.local.as_ref().filter(|_| self.end == end)
    }
}

/// The paths of old objects of `classes` classes; `class_of` returns the index of an object's class. The heap is read once for the samples of
/// all classes, and once for each step of all paths. The search ends early when `stop` returns true.
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

/// Why a search is incomplete.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unfinished {
    Unread(HeapError),
    Stopped,
}

impl Unfinished {
    /// Whether another attempt may succeed: pages come and go while they are read. A heap that cannot be read because the search was stopped
    /// is not read again.
    fn passes(&self) -> bool {
        matches!(self, Self::Unread(error) if super::passes(error))
    }
}

impl From<HeapError> for Unfinished {
    fn from(error: HeapError) -> Self {
        Self::Unread(error)
    }
}

/// Follows the paths; finished ones go to `paths`. If the search is incomplete, `steps` contains the last steps of the other paths.
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
    let samples = retried(Unfinished::passes, || {
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
        retried(Unfinished::passes, || {
            steps.iter_mut().for_each(Step::again);
            pass(&mut |slot| search.see(slot, steps))
        })?;
        // Objects may have moved, and others may be at their addresses.
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

/// Memory that cannot be read any more once `stop` has returned true.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Once the search is stopped, nothing is read any more.
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
        // A signal is reported only once.
        let memory = Stoppable { memory: &all, stop: || stop.take(), stopped: Cell::new(false) };
        assert!(memory.read(8, &mut [0]) && !memory.stopped.get());
        stop.set(true);
        assert!(!memory.read(8, &mut [0]) && memory.stopped.get());
        assert!(!memory.read(8, &mut [0]));
        assert_eq!(all.0.get(), 1);
    }

    /// A heap that changes while it is read is read again, but not forever; other errors are returned at once.
    #[test]
    fn several_looks() {
        let look = |results: &[Result<u8, Unfinished>]| {
            let mut looks = results.iter();
            let found = retried(Unfinished::passes, || looks.next().expect("looked too often").clone());
            (found, looks.len())
        };
        let changed = HeapError::Implausible("a page".to_owned());
        let gone = HeapError::Unreadable { what: "a heap page", address: 0x7000 };
        for error in [changed, gone] {
            let failed = Err(Unfinished::Unread(error));
            assert_eq!(look(&[failed.clone(), Ok(1), Ok(2)]), (Ok(1), 1));
            assert_eq!(look(&vec![failed.clone(); 3]), (failed, 0));
        }
        for end in [Unfinished::Stopped, Unfinished::Unread(HeapError::Layout)] {
            assert_eq!(look(&[Err(end.clone()), Ok(1)]), (Err(end), 1));
        }
    }
}
