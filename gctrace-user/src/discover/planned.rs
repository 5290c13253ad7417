//! From an image file to its plan: analysed, or analysed before.

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::debuginfo::{DebugInfo, Place};
use crate::{
    cache::Cache,
    elf::{ElfImage, ImageHead, LoadSegment},
    model::Image,
    pipeline::Reading,
    ruby::{
        RubyVersion, analyse,
        last_resort::{LastResort, Method},
        plan::{AttachPlan, PlanError, plan_with},
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

/// The debug information that may be used, and where to look for more of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around<'a> {
    /// What the user gave and allowed.
    pub(super) info: &'a DebugInfo,
    /// Root folders to look below: that of the process, then the host's.
    pub(super) roots: &'a [PathBuf],
}

/// Plans an image file. `shown` is the path that messages name; `reads_threads`: see [`plan_with`].
pub(super) fn plan_file(
    file: &File,
    shown: &Path,
    reads_threads: bool,
    cache: &mut Cache,
    debug: Around<'_>,
) -> Result<Planned, PlanError> {
    let elf = |source| PlanError::Elf { path: shown.to_owned(), source };
    let begun = Instant::now();
    let head = ImageHead::read(file).map_err(elf)?;
    let known = cache.get(file, &head);
    let cached = known.is_some();
    let place = Place { path: shown, roots: debug.roots };
    let analysis = if let Some(analysis) = known {
        analysis
    } else {
        let image = ElfImage::read(file).map_err(elf)?;
        let mut analysis = analyse(&image)?;
        debug.info.witness(&image, file, place, &mut analysis)?;
        cache.put(file, &head, &image, &analysis);
        analysis
    };
    let table = debug.info.table(analysis.build_id.as_ref(), file, place, analysis.version)?;
    let plan = plan_with(&head.segments, analysis, reads_threads, table.as_ref())?;
    Ok(Planned { plan, segments: head.segments, cached, took: begun.elapsed() })
}

/// How an image's GC work is seen.
#[derive(Debug)]
pub enum Way {
    /// By its event sites.
    Sites(Box<Planned>),
    /// By probes of the last resort.
    LastResort(Head, LastResort),
}

/// Why a method does not serve an image.
#[derive(Debug, thiserror::Error)]
pub enum WhyNot {
    /// There is no plan for its event sites.
    #[error("{0}")]
    Sites(#[from] PlanError),
    /// It offers nothing to the method.
    #[error("{0}")]
    LastResort(&'static str),
}

/// The best way to see an image's GC work.
#[derive(Debug)]
pub struct Choice {
    /// `None`: it is not traced.
    pub way: Option<Way>,
    /// Why the methods that were preferred to it do not serve, in order of preference.
    pub refusals: Vec<WhyNot>,
}

/// What the kernel can do for probes.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// Find what the VM keeps per thread.
    pub reads_threads: bool,
    /// Hand cookies to probes.
    pub cookies: bool,
}

/// Chooses the first of the methods that serves the image.
pub(super) fn choose(
    file: &File,
    shown: &Path,
    methods: &[Method],
    abilities: Abilities,
    cache: &mut Cache,
    debug: Around<'_>,
) -> Choice {
    let mut refusals = Vec::new();
    for &method in methods {
        let way = if method == Method::Sites {
            plan_file(file, shown, abilities.reads_threads, cache, debug)
                .map(|planned| Way::Sites(Box::new(planned)))
                .map_err(WhyNot::Sites)
        } else if abilities.cookies {
            last_resort(file, method)
                .map(|(head, last)| Way::LastResort(head, last))
                .map_err(WhyNot::LastResort)
        } else {
            Err(WhyNot::LastResort("probing it by functions or USDT needs attach cookies (Linux 5.15)"))
        };
        match way {
            Ok(way) => return Choice { way: Some(way), refusals },
            Err(why) => {
                // The user said what to read it by; that is not answered with something coarser.
                let final_answer = matches!(why, WhyNot::Sites(PlanError::OtherBuild(_)));
                refusals.push(why);
                if final_answer {
                    break;
                }
            }
        }
    }
    Choice { way: None, refusals }
}

/// What is told of an image that has only probes of the last resort.
#[derive(Debug)]
pub struct Head {
    /// Version.
    pub version: RubyVersion,
    /// Build id, hexadecimal.
    pub build_id: Option<String>,
    /// Whether the file has a symbol table.
    pub has_symbols: bool,
    /// Where its segments lie.
    pub segments: Vec<LoadSegment>,
}

/// Probes of the last resort for an image, or why there are none.
fn last_resort(file: &File, method: Method) -> Result<(Head, LastResort), &'static str> {
    let image = ElfImage::read(file).map_err(|_| "it cannot be read")?;
    let version = RubyVersion::of_image(&image).ok_or("it does not tell its version")?;
    let found = match method {
        Method::Functions => LastResort::functions(version, &image).ok_or("it has no symbol gc_start")?,
        Method::Usdt => LastResort::usdt(&image).ok_or("it has no USDT probes")?,
        Method::Sites => return Err("event sites are no last resort"),
    };
    let head = Head {
        version,
        build_id: image.build_id().map(ToString::to_string),
        has_symbols: !image.symbols().is_empty(),
        segments: image.segments().to_vec(),
    };
    Ok((head, found))
}

/// What exporters are told of an image with event sites.
pub(super) fn site_image(index: u32, shown: &Path, plan: &AttachPlan) -> Image {
    let heap = plan.layout.heaps.first();
    Image {
        index,
        path: shown.to_owned(),
        version: plan.analysis.version,
        build_id: plan.analysis.build_id.as_ref().map(ToString::to_string),
        stat_keys: plan.layout.keys.iter().map(|key| key.name).collect(),
        heap_keys: heap.map_or_else(Vec::new, |keys| keys.iter().map(|key| key.name).collect()),
        method: Method::Sites,
        probes: plan.sites.len(),
        has_symbols: plan.analysis.has_symbols,
    }
}

/// How the events of an image with event sites are read.
pub(super) fn reading(plan: &AttachPlan) -> Reading {
    let kinds = plan.analysis.sites.iter().filter_map(|site| Some((site.address.0, site.pause?)));
    Reading {
        layout: plan.layout.clone(),
        during_gc: 1 << plan.analysis.vm.during_gc_bit,
        pause_kinds: kinds.collect(),
    }
}
