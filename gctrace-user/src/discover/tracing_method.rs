//! From an image file to its plan: by a new analysis or a cached one.

use std::{
    fs::File,
    path::Path,
    time::{Duration, Instant},
};

use super::debuginfo::{Around, Symbols};
use crate::{
    bpf,
    cache::{Cache, CachedAnalysis},
    elf::{ElfImage, ImageHead, LoadSegment, Machine},
    images::Reading,
    model::Image,
    ruby::{
        Rest, RubyAnalysis, RubyVersion, analyse_gc, analyse_library,
        fallback::{FallbackProbes, Method},
        plan::{AttachPlan, PlanError, plan_with},
        tables::Table,
    },
};

/// A plan and its origin.
#[derive(Debug)]
pub struct Planned {
    /// What is attached and how it is read.
    pub plan: AttachPlan,
    /// The image's load segments.
    pub segments: Vec<LoadSegment>,
    /// Which symbols confirm its sites.
    pub symbols: Symbols,
    /// Whether the analysis was taken from the cache.
    pub cached: bool,
    /// Time that planning took.
    pub took: Duration,
    /// The work that is deferred until its GC is probed.
    pub(super) later: Option<Later>,
}

impl Planned {
    /// Completes the deferred part of the plan.
    pub(super) fn complete(&mut self) {
        if let Some(later) = &mut self.later
            && let Some(rest) = later.rest.take()
        {
            rest.complete(&later.image, &mut self.plan.analysis);
            self.plan.complete(&self.segments, later.table.as_ref());
        }
    }

    /// Does all deferred work.
    pub(super) fn finish(&mut self, file: &File, cache: &mut Cache) {
        self.complete();
        if let Some(later) = self.later.take() {
            later.keep(self.plan.analysis.clone(), file, cache);
        }
    }
}

/// Deferred work on an image: finding what its GC does not need, and storing the analysis.
#[derive(Debug)]
pub(super) struct Later {
    head: ImageHead,
    image: ElfImage,
    rest: Option<Rest>,
    table: Option<Table>,
    witnessed: bool,
}

impl Later {
    /// Completes the analysis and stores it in the cache.
    pub(super) fn keep(self, mut analysis: RubyAnalysis, file: &File, cache: &mut Cache) {
        let Self { head, image, rest, witnessed, .. } = self;
        if let Some(rest) = rest {
            rest.complete(&image, &mut analysis);
        }
        cache.put(file, &head, &image, &CachedAnalysis { analysis, witnessed });
        drop(image);
        bpf::give_back_memory();
    }
}

/// Plans an image file, as far as its GC needs. `reads_threads`: see [`plan_with`].
pub(super) fn plan_file(
    file: &File,
    reads_threads: bool,
    cache: &mut Cache,
    debug: Around<'_>,
) -> Result<Planned, PlanError> {
    let elf = |source| PlanError::Elf { path: debug.image.shown.clone(), source };
    let begun = Instant::now();
    let head = ImageHead::read(file).map_err(elf)?;
    let (mut image, mut rest) = (None, None);
    let (mut analysis, earlier) = if let Some(CachedAnalysis { analysis, witnessed }) = cache.get(file, &head)
    {
        (analysis, Some(witnessed))
    } else {
        let (analysis, left) = analyse_gc(image.insert(ElfImage::read(file).map_err(elf)?))?;
        rest = Some(left);
        (analysis, None)
    };
    let symbols = debug.witness(&mut image, file, &mut analysis, earlier == Some(true))?;
    let witnessed = symbols != Symbols::None;
    let table = debug.table(analysis.build_id.as_ref(), file, analysis.version)?;
    let plan = plan_with(&head.segments, analysis.clone(), reads_threads, table.as_ref());
    let segments = head.segments.clone();
    let later = image.filter(|_| earlier != Some(witnessed));
    let later = later.map(|image| Later { head, image, rest, table, witnessed });
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => {
            if let Some(later) = later {
                later.keep(analysis, file, cache);
            }
            return Err(error);
        }
    };
    Ok(Planned { plan, segments, symbols, cached: earlier.is_some(), took: begun.elapsed(), later })
}

/// Plans a GC library together with the Ruby that loads it. The plan is not cached: the library is small, and the plan
/// depends on two files.
fn plan_library(
    file: &File,
    ruby: &RubyAnalysis,
    reads_threads: bool,
    debug: Around<'_>,
) -> Result<Planned, PlanError> {
    let elf = |source| PlanError::Elf { path: debug.image.shown.clone(), source };
    let begun = Instant::now();
    let head = ImageHead::read(file).map_err(elf)?;
    let image = ElfImage::read(file).map_err(elf)?;
    let mut analysis = analyse_library(&image, ruby)?;
    let symbols = debug.witness(&mut Some(image), file, &mut analysis, false)?;
    let table = debug.table(analysis.build_id.as_ref(), file, analysis.version)?;
    let plan = plan_with(&head.segments, analysis, reads_threads, table.as_ref())?;
    let took = begun.elapsed();
    Ok(Planned { plan, segments: head.segments, symbols, cached: false, took, later: None })
}

/// Chooses the tracing method of a GC library: its event sites, or none.
pub(super) fn choose_library(
    file: &File,
    ruby: &RubyAnalysis,
    methods: &[Method],
    abilities: Abilities,
    debug: Around<'_>,
) -> Choice {
    if !methods.contains(&Method::Sites) {
        let refusals = vec![Rejection::Fallback("a GC library is probed by its event sites only")];
        return Choice { method: None, refusals };
    }
    match plan_library(file, ruby, abilities.reads_threads, debug) {
        Ok(planned) => Choice { method: Some(TracingMethod::Sites(Box::new(planned))), refusals: Vec::new() },
        Err(error) => Choice { method: None, refusals: vec![Rejection::Sites(error)] },
    }
}

/// How an image's GC work is traced.
#[derive(Debug)]
pub enum TracingMethod {
    /// By its event sites.
    Sites(Box<Planned>),
    /// By fallback probes.
    Fallback(ImageFacts, FallbackProbes),
}

/// Why a method does not work for an image.
#[derive(Debug, thiserror::Error)]
pub enum Rejection {
    /// There is no plan for its event sites.
    #[error("{0}")]
    Sites(#[from] PlanError),
    /// It lacks what the method needs.
    #[error("{0}")]
    Fallback(&'static str),
    /// It cannot be read at all.
    #[error("{0}")]
    Damaged(String),
    /// Reading it has failed.
    #[error("{0}")]
    Unread(String),
}

/// The best method of tracing an image's GC work.
#[derive(Debug)]
pub struct Choice {
    /// `None`: it is not traced.
    pub method: Option<TracingMethod>,
    /// Why the preferred methods do not work, in order of preference.
    pub refusals: Vec<Rejection>,
}

/// Features of the kernel that probes use.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// The programs can read the per-thread state of the VM.
    pub reads_threads: bool,
    /// The kernel supports attach cookies.
    pub cookies: bool,
}

/// Chooses the first method that works for the image, defers nothing, and stores the analysis.
pub(super) fn choose(
    file: &File,
    methods: &[Method],
    abilities: Abilities,
    cache: &mut Cache,
    debug: Around<'_>,
) -> Choice {
    let mut choice = choose_first(file, methods, abilities, cache, debug);
    if let Some(TracingMethod::Sites(planned)) = &mut choice.method {
        planned.finish(file, cache);
    }
    choice
}

/// Chooses the first method that works for the image, and analyses only what its GC needs.
pub(super) fn choose_first(
    file: &File,
    methods: &[Method],
    abilities: Abilities,
    cache: &mut Cache,
    debug: Around<'_>,
) -> Choice {
    let mut refusals = Vec::new();
    for &method in methods {
        let chosen = if method == Method::Sites {
            plan_file(file, abilities.reads_threads, cache, debug)
                .map(|planned| TracingMethod::Sites(Box::new(planned)))
                .map_err(Rejection::Sites)
        } else if abilities.cookies {
            fallback(file, method)
                .map(|(head, last)| TracingMethod::Fallback(head, last))
                .map_err(Rejection::Fallback)
        } else {
            Err(Rejection::Fallback("probing it by functions or USDT needs attach cookies (Linux 5.15)"))
        };
        match chosen {
            Ok(method) => return Choice { method: Some(method), refusals },
            Err(why) => {
                // The user chose the debug file to read it by; do not fall back to something coarser.
                let final_answer = matches!(why, Rejection::Sites(PlanError::OtherBuild(_)));
                refusals.push(why);
                if final_answer {
                    break;
                }
            }
        }
    }
    Choice { method: None, refusals }
}

/// Facts reported about an image that has only fallback probes.
#[derive(Debug)]
pub struct ImageFacts {
    /// Version.
    pub version: RubyVersion,
    /// Build id, hexadecimal.
    pub build_id: Option<String>,
    /// Whether the file has a symbol table.
    pub has_symbols: bool,
    /// Its load segments.
    pub segments: Vec<LoadSegment>,
}

/// Fallback probes for an image, or why it has none.
fn fallback(file: &File, method: Method) -> Result<(ImageFacts, FallbackProbes), &'static str> {
    let image = ElfImage::read(file).map_err(|_| "it cannot be read")?;
    if [image.machine(), Machine::HOST] != [Machine::X86_64; 2] {
        return Err("probing it by functions or USDT is for x86-64 only");
    }
    let version = RubyVersion::of_image(&image).ok_or("its version cannot be read")?;
    let found = match method {
        Method::UsdtPauses => FallbackProbes::usdt_pauses(&image).ok_or("it has no USDT probes of pauses")?,
        Method::Functions => FallbackProbes::functions(version, &image).ok_or("it has no symbol gc_start")?,
        Method::Usdt => FallbackProbes::usdt(&image).ok_or("it has no USDT probes")?,
        Method::Sites => return Err("event sites are not a fallback"),
    };
    let head = ImageFacts {
        version,
        build_id: image.build_id().map(ToString::to_string),
        has_symbols: !image.symbols().is_empty(),
        segments: image.segments().to_vec(),
    };
    Ok((head, found))
}

/// The description of an image with event sites for exporters.
pub(crate) fn site_image(index: u32, shown: &Path, plan: &AttachPlan) -> Image {
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
        gvl: None,
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
        proven: plan.knowledge.shows_live_slots().into(),
    }
}
