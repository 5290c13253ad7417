//! Turns the analysis of an image into a plan of what is attached where: a pure decision.

use std::{path::PathBuf, sync::Arc};

use gctrace_common::{
    config::{ImageConfig, Span, StackPath},
    event::{Point, SLOTS},
    gvl::GvlPath,
};

use super::{
    Disagreement, RefillSite, Refusal, RubyAnalysis,
    frames::FrameLayout,
    gvl_plan::{self, GvlPlan, NoGvl},
    layout::ObjspaceLayout,
    outcome::Outcome,
    reconcile::{Knowledge, Unproven, settle},
    stack_layout::{NoStacks, stacks},
    tables::Table,
    threads::ThreadsLayout,
};
use crate::{
    address::{FileOffset, Svma},
    elf::{LoadSegment, code_offset},
};

/// An instruction to be probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeSite {
    /// Which event it is.
    pub point: Point,
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
    /// Hardware number of the register that holds the objspace pointer there.
    pub register: Option<u8>,
}

/// An event of CRuby that is traced only in runs that request it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionalEvent {
    /// A thread takes the free slots of a heap page; the register holds the `struct heap_page *`.
    Refill,
}

impl OptionalEvent {
    /// All of them.
    pub const ALL: [Self; 1] = [Self::Refill];

    /// What a run lacks if the event cannot be traced.
    pub fn lack(self) -> &'static str {
        match self {
            Self::Refill => "its allocation is not counted",
        }
    }
}

/// A place at which such an event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionalProbe {
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
    /// Hardware number of the register with the object of the event.
    pub register: u8,
}

/// Everything needed to trace the processes of one image.
#[derive(Debug)]
pub struct AttachPlan {
    /// What the finder found.
    pub analysis: RubyAnalysis,
    /// How its objspace is read.
    pub layout: ObjspaceLayout,
    /// How each part of the layout is known.
    pub knowledge: Knowledge,
    /// The image's entry in the kernel.
    pub config: ImageConfig,
    /// How the frames of its Ruby stacks are named, or why those cannot be walked.
    pub frames: Result<Arc<FrameLayout>, NoStacks>,
    /// How the threads of its VM are found; `None` if that, or how their stacks are walked, is not known.
    pub threads: Option<Arc<ThreadsLayout>>,
    /// How its GVL is observed, or why it cannot be.
    pub gvl: Result<GvlPlan, NoGvl>,
    /// The same for waits that are identified by futexes alone.
    pub gvl_futex: Result<GvlPlan, NoGvl>,
    /// The probes.
    pub sites: Vec<ProbeSite>,
    /// The probes of each optional event, or why it cannot be traced.
    optional: Vec<(OptionalEvent, Result<Vec<OptionalProbe>, String>)>,
}

/// Why an image is not traced.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file could not be read.
    #[error("{path}: {source}")]
    Elf {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        #[source]
        source: crate::elf::ElfError,
    },
    /// The sites could not be found or failed a check.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// Symbols contradict what the finder found.
    #[error("{0}")]
    Disagreement(#[from] Disagreement),
    /// The same for symbols that are not in the file itself.
    #[error("the symbols of {origin} contradict the code: {disagreement}")]
    SymbolsDisagree {
        /// Origin of the symbols.
        origin: String,
        /// The contradiction.
        disagreement: Disagreement,
    },
    /// The debug file that the user named belongs to another build.
    #[error("{0}")]
    OtherBuild(String),
    /// The given debug information does not contain the layout.
    #[error("{0}")]
    DebugInformation(String),
    /// The layout of its structures is not known or contradicts the code.
    #[error("{0}")]
    Layout(#[from] Unproven),
    /// A site is not in an executable segment of the file.
    #[error("the {0} site at {1} is not inside an executable segment")]
    NotExecutable(&'static str, Svma),
}

/// Decides what to attach and how to read, or refuses with the reason. It needs only the segments of the image, so an
/// analysis kept from an earlier run can be planned without reading the code again. `reads_threads`: whether the
/// kernel side can find the VM's per-thread data.
pub fn plan(
    segments: &[LoadSegment],
    analysis: RubyAnalysis,
    reads_threads: bool,
) -> Result<AttachPlan, PlanError> {
    plan_with(segments, analysis, reads_threads, None)
}

/// As [`plan`], but with the layout of exactly this build instead of the committed one of its release.
pub fn plan_with(
    segments: &[LoadSegment],
    analysis: RubyAnalysis,
    reads_threads: bool,
    own: Option<&Table>,
) -> Result<AttachPlan, PlanError> {
    let thread = if reads_threads { analysis.thread_path() } else { None };
    let (layout, knowledge) = settle(&analysis, own, thread.is_some())?;
    let (stack, frames) = match stacks(&analysis, own, reads_threads) {
        Ok((path, frames)) => (path, Ok(Arc::new(frames))),
        Err(why) => (StackPath::default(), Err(why)),
    };
    let threads = ThreadsLayout::of(&analysis, own, &stack).map(Arc::new);
    let gvl = gvl_plan::plan(segments, &analysis, own, &stack);
    let gvl_futex = gvl_plan::futex_plan(&analysis, own, &stack);
    let vm = analysis.vm;
    let mut span = [Span::default(); SLOTS];
    span[..layout.spans.len()].copy_from_slice(&layout.spans);
    let config = ImageConfig {
        vm_ptr: vm.vm_ptr.0,
        vm_objspace: vm.vm_objspace,
        count: vm.count,
        flags: vm.flags,
        mode_mask: layout.mode_mask(),
        dont_gc_mask: vm.dont_gc_bit.map_or(0, |bit| 1 << bit),
        spans: layout.spans.len() as u32,
        open: 1,
        page_free_slots: 0,
        page_slot_size: 0,
        thread: thread.unwrap_or_default(),
        stack: StackPath { gc_info: layout.latest_gc_info_offset().unwrap_or(0), ..stack },
        // Set when the GVL is observed.
        gvl: GvlPath::default(),
        span,
        anchor: vm.anchor.map_or(0, |anchor| anchor.0),
        local_module: analysis.local_module().map_or(0, |slot| slot.0),
    };
    let sites = analysis
        .sites
        .iter()
        .map(|site| {
            let file_offset = code_offset(segments, site.address)
                .ok_or(PlanError::NotExecutable(site.point.name(), site.address))?;
            Ok(ProbeSite { point: site.point, address: site.address, file_offset, register: site.register })
        })
        .collect::<Result<Vec<_>, PlanError>>()?;
    let optional = Vec::new();
    let mut plan =
        AttachPlan { analysis, layout, knowledge, config, frames, threads, gvl, gvl_futex, sites, optional };
    plan.plan_refills(segments);
    Ok(plan)
}

fn refills(segments: &[LoadSegment], analysis: &RubyAnalysis) -> Result<Vec<OptionalProbe>, String> {
    match &analysis.refill.outcome {
        Outcome::Passed => {}
        Outcome::Failed(why) | Outcome::NotApplicable(why) => return Err(why.clone()),
    }
    let probe = |site: &RefillSite| {
        let file_offset = code_offset(segments, site.address).ok_or_else(|| {
            format!("the refill site at {} is not inside an executable segment", site.address)
        })?;
        Ok(OptionalProbe { address: site.address, file_offset, register: site.register })
    };
    analysis.refill.sites.iter().map(probe).collect()
}

impl AttachPlan {
    /// Decides the parts that depend on the remaining analysis ([`Rest`](super::Rest)). `segments` and `own` must be those
    /// with which the plan was made.
    pub fn complete(&mut self, segments: &[LoadSegment], own: Option<&Table>) {
        self.gvl = gvl_plan::plan(segments, &self.analysis, own, &self.config.stack);
        self.gvl_futex = gvl_plan::futex_plan(&self.analysis, own, &self.config.stack);
        self.plan_refills(segments);
    }

    fn plan_refills(&mut self, segments: &[LoadSegment]) {
        let probes = refills(segments, &self.analysis);
        if let Some(page) = self.analysis.refill.page.filter(|_| probes.is_ok()) {
            self.config.page_free_slots = u16::from(page.free_slots);
            self.config.page_slot_size = page.slot_size.map_or(ImageConfig::RVALUE_SLOTS, u16::from);
        }
        self.optional.retain(|(event, _)| *event != OptionalEvent::Refill);
        self.optional.push((OptionalEvent::Refill, probes));
    }

    /// The probes of an optional event. `Err`: why it cannot be traced.
    pub fn optional(&self, event: OptionalEvent) -> Result<&[OptionalProbe], &str> {
        match self.optional.iter().find(|(of, _)| *of == event) {
            Some((_, Ok(probes))) => Ok(probes),
            Some((_, Err(why))) => Err(why),
            None => Err("the plan is not complete"),
        }
    }
}
