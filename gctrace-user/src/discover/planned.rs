//! From an image file to its plan: analysed, or analysed before.

use std::{
    fs::File,
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    cache::Cache,
    elf::{ElfImage, ImageHead, LoadSegment},
    ruby::{
        analyse,
        plan::{AttachPlan, PlanError, plan},
    },
};

/// A plan and how it came about.
#[derive(Debug)]
pub struct Planned {
    /// What is attached and how it is read.
    pub plan: AttachPlan,
    /// Where the image's segments lie.
    pub segments: Vec<LoadSegment>,
    /// Whether the analysis was taken from the cache.
    pub cached: bool,
    /// How long it took.
    pub took: Duration,
}

/// Plans an image file. `shown` is the path that messages name; `reads_threads`: see [`plan`].
pub(super) fn plan_file(
    file: &File,
    shown: &Path,
    reads_threads: bool,
    cache: &mut Cache,
) -> Result<Planned, PlanError> {
    let elf = |source| PlanError::Elf { path: shown.to_owned(), source };
    let begun = Instant::now();
    let head = ImageHead::read(file).map_err(elf)?;
    let known = cache.get(file, &head);
    let cached = known.is_some();
    let plan = match known {
        Some(analysis) => plan(&head.segments, analysis, reads_threads)?,
        None => {
            let image = ElfImage::read(file).map_err(elf)?;
            let analysis = analyse(&image)?;
            cache.put(file, &head, &image, &analysis);
            plan(&head.segments, analysis, reads_threads)?
        }
    };
    Ok(Planned { plan, segments: head.segments, cached, took: begun.elapsed() })
}
