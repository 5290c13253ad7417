//! What gctrace's threads share about images: which are probed, and how to read their processes.

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    model::Image,
    ruby::{
        PauseKind, frames::FrameLayout, layout::ObjspaceLayout, live_check::FailedProof,
        threads::ThreadsLayout,
    },
};

/// A probed image and how to read the objspace of its processes.
#[derive(Debug)]
pub struct KnownImage {
    /// What exporters receive about it.
    pub image: Arc<Image>,
    /// How its events are read; `None` if there are only fallback probes.
    pub reading: Option<Reading>,
    /// How the frames of its stacks are named; `None` if stacks cannot be walked.
    pub frames: Option<Arc<FrameLayout>>,
    /// How the threads of its VM are found; `None` if that is unknown.
    pub threads: Option<Arc<ThreadsLayout>>,
    /// Which image contains the GC of its processes.
    pub gc: GcOf,
}

/// Where the GC of an image's processes is: GC records name the image that contains the GC, GVL records that of the Ruby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GcOf {
    /// In the image.
    Itself,
    /// In the image, or in a library that each process chooses: a Ruby built `--with-modular-gc`.
    Chosen,
    /// The image is such a library; the index is that of its Ruby.
    LibraryOf(u32),
}

/// How the events of an image are read.
#[derive(Debug)]
pub struct Reading {
    /// Its layout.
    pub layout: ObjspaceLayout,
    /// Mask of `during_gc` in the flags word.
    pub during_gc: u32,
    /// Kinds of pauses, where known, by `GC_ENTER` site (stated address).
    pub pause_kinds: HashMap<u64, PauseKind>,
    /// Whether the layout of the slot counters is known to be right: the build shows it, or the state of a process has passed all checks.
    pub proven: AtomicBool,
}

impl Reading {
    /// Judges the checks of the state of a process: once the layout is proven, a state is accepted although its counters are not exact
    /// because Ractors count concurrently.
    ///
    /// # Errors
    ///
    /// It is not the state of a VM with this layout.
    pub fn accept(&self, checked: Result<(), FailedProof>) -> Result<(), FailedProof> {
        match checked {
            Err(failed) if failed.may_be_lost_counts(&self.layout) && self.proven.load(Ordering::Relaxed) => {
                Ok(())
            }
            Err(failed) => Err(failed),
            Ok(()) => {
                self.prove();
                Ok(())
            }
        }
    }

    /// Marks the layout as proven: the state of a process has passed.
    pub fn prove(&self) {
        self.proven.store(true, Ordering::Relaxed);
    }
}

/// The images probed so far, by index. An image that is no longer probed stays until another one gets its index. The control thread adds an
/// image before it attaches the first probe, so every record finds its image here.
#[derive(Clone, Debug, Default)]
pub struct Images(Arc<RwLock<Vec<Probed>>>);

#[derive(Debug)]
struct Probed {
    image: Arc<KnownImage>,
    /// Time since which GC events of its processes are recorded, `CLOCK_MONOTONIC` nanoseconds.
    opened_ns: Option<u64>,
}

impl Images {
    /// Adds an image; it replaces an earlier one with the same index.
    pub fn add(&self, image: KnownImage) {
        let mut images = self.0.write().unwrap_or_else(PoisonError::into_inner);
        images.retain(|probed| probed.image.image.index != image.image.index);
        images.push(Probed { image: Arc::new(image), opened_ns: None });
    }

    /// What exporters receive about each image.
    pub fn all(&self) -> Vec<Arc<Image>> {
        let images = self.0.read().unwrap_or_else(PoisonError::into_inner);
        images.iter().map(|probed| probed.image.image.clone()).collect()
    }

    /// The image with this index.
    pub fn get(&self, index: u32) -> Option<Arc<KnownImage>> {
        let images = self.0.read().unwrap_or_else(PoisonError::into_inner);
        images.iter().find(|probed| probed.image.image.index == index).map(|probed| probed.image.clone())
    }

    /// Notes that GC events of the processes of an image are recorded from this time on.
    pub fn opened(&self, index: u32, now_ns: u64) {
        let mut images = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for probed in images.iter_mut().filter(|probed| probed.image.image.index == index) {
            probed.opened_ns = Some(now_ns);
        }
    }

    /// The time set by [`Self::opened`], `CLOCK_MONOTONIC` nanoseconds; `None`: not yet.
    pub fn opened_ns(&self, index: u32) -> Option<u64> {
        let images = self.0.read().unwrap_or_else(PoisonError::into_inner);
        images.iter().find(|probed| probed.image.image.index == index)?.opened_ns
    }
}
