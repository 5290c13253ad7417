//! `gctrace heap`: what lies in the heap of a running process, slot by slot, without stopping it.

mod jsonl;
mod report;
mod text;

use std::io::{self, BufWriter, Write as _};

use report::Report;

use crate::{
    cache::Cache,
    cli::{By, Format, HeapSettings},
    console::say,
    discover::{Abilities, DebugInfo, Selection, Subjects, objspace_of, survey},
    host::{mem::ProcessMemory, proc::is_running},
    ruby::{
        frames::Memory,
        heap::{Census, ClassNames, HeapError, HeapLayout, census},
        plan::AttachPlan,
        prove,
    },
};

/// A heap is counted again when a GC ran meanwhile, so often.
const TRIES: u32 = 5;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
enum HeapFailure {
    /// It is no Ruby process, or none that can be read.
    #[error("pid {pid}: {reason}")]
    NotRuby {
        /// Which.
        pid: u32,
        /// Why.
        reason: String,
        /// Whether privilege is missing.
        denied: bool,
    },
    /// The heap could not be counted.
    #[error("pid {pid}: its heap could not be counted: {source}")]
    Heap {
        /// Which.
        pid: u32,
        /// Why.
        #[source]
        source: HeapError,
    },
    /// The names of classes cannot be read.
    #[error(
        "pid {pid}: the classes of this Ruby {ruby} cannot be named ({reason}); --by type, size and page work"
    )]
    NoNames {
        /// Which.
        pid: u32,
        /// Its version.
        ruby: String,
        /// Why.
        reason: String,
    },
    /// Nobody takes the output.
    #[error("writing to standard output: {0}")]
    Output(#[source] io::Error),
}

impl HeapFailure {
    fn exit_status(&self) -> u8 {
        match self {
            Self::NotRuby { denied: true, .. } => 3,
            Self::NotRuby { .. } => 1,
            Self::Heap { .. } | Self::NoNames { .. } | Self::Output(_) => 2,
        }
    }
}

/// Counts and prints. Returns the exit status.
pub fn run(settings: &HeapSettings) -> u8 {
    match counted(settings).and_then(|report| write(&report, settings)) {
        Ok(()) => 0,
        Err(failure) => {
            say(&format!("gctrace: {failure}"));
            failure.exit_status()
        }
    }
}

fn write(report: &Report, settings: &HeapSettings) -> Result<(), HeapFailure> {
    let mut out = BufWriter::new(io::stdout());
    let written = match settings.format {
        Format::Jsonl => jsonl::write(&mut out, report),
        Format::Text => text::write(&mut out, report, settings.top),
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(HeapFailure::Output(error)),
        _ => Ok(()),
    }
}

fn counted(settings: &HeapSettings) -> Result<Report, HeapFailure> {
    let pid = settings.pid;
    let not_ruby = |reason: String, denied| HeapFailure::NotRuby { pid, reason, denied };
    let subjects = Subjects {
        selection: Selection { pids: vec![pid], ..Selection::default() },
        files: Vec::new(),
        // What the kernel can do matters to events only; frames, and with them names, are planned where threads are read.
        abilities: Abilities { reads_threads: true, cookies: true },
        debug: DebugInfo::of_servers(std::env::var("DEBUGINFOD_URLS").ok().as_deref()),
    };
    let mut cache = settings.cache_dir.as_deref().map_or_else(Cache::none, Cache::at);
    let found = survey(&subjects, &mut cache);
    let Some(process) = found.processes.first() else {
        let miss = found.misses.into_iter().next();
        let (reason, denied) = miss.map_or(("no such process".into(), false), |m| (m.reason, m.denied));
        return Err(not_ruby(reason, denied));
    };
    let image = &found.images[process.image];
    let refusal = || {
        let refusals = image.choice.refusals.iter().map(ToString::to_string);
        refusals.collect::<Vec<_>>().join("; ")
    };
    let (Some(plan), Some(bias)) = (image.plan(), process.bias) else {
        return Err(not_ruby(format!("this Ruby cannot be read: {}", refusal()), false));
    };
    if let Some(Err(failed)) = &process.state {
        return Err(not_ruby(format!("this Ruby cannot be read: {failed}"), false));
    }
    let memory = ProcessMemory::open(pid).map_err(|error| {
        let denied = error.kind() == io::ErrorKind::PermissionDenied;
        not_ruby(format!("its memory cannot be read: {error}"), denied)
    })?;
    let frames = match &plan.frames {
        Err(reason) if settings.by == By::Class => {
            let ruby = plan.analysis.version.to_string();
            return Err(HeapFailure::NoNames { pid, ruby, reason: reason.to_string() });
        }
        frames => frames.as_ref().ok().cloned(),
    };
    let heap = |source| HeapFailure::Heap { pid, source };
    let counted = count(&memory, bias, plan).map_err(|source| {
        if is_running(pid) { heap(source) } else { not_ruby("it has ended".to_owned(), false) }
    })?;
    let mut names = frames.map(|frames| ClassNames::new(memory, frames, bias));
    let who = report::Who {
        pid,
        command: process.command.clone(),
        ruby: plan.analysis.version.to_string(),
        by: settings.by,
    };
    Ok(Report::of(who, &counted, |class| names.as_mut().and_then(|names| names.name(class))))
}

/// A census with what was true before and after it.
struct Counted {
    census: Census,
    /// `GC.count` before and after.
    gc_count: [u64; 2],
    /// Objects that the program allocated meanwhile, if that is known.
    allocated: Option<u64>,
    /// Whether a cycle was being swept, so that dead objects are among those that were counted.
    sweeping: bool,
}

/// Counts until no GC has run meanwhile, or often enough. Pages that hold another number of slots than `GC.stat` says
/// are refused.
fn count(memory: &ProcessMemory, bias: u64, plan: &AttachPlan) -> Result<Counted, HeapError> {
    let layout = HeapLayout::of(plan.analysis.version)?;
    let state = || {
        objspace_of(|address, buffer: &mut [u8]| memory.read(address, buffer), bias, plan)
            .ok_or(HeapError::Unreadable { what: "the objspace", address: bias })
    };
    let key = |name: &str, data: &[u8]| {
        plan.layout.keys.iter().find(|key| key.name == name).and_then(|key| key.value(data))
    };
    let mut last = None;
    for _ in 0..TRIES {
        let (objspace, before) = state()?;
        let census = match census(memory, objspace, &layout) {
            Ok(census) => census,
            Err(error) => {
                last = Some(Err(error));
                continue;
            }
        };
        let (_, after) = state()?;
        let same = prove::no_gc_between(&plan.layout, &before, &after);
        match [&before, &after].map(|data| key("heap_available_slots", data)) {
            [Some(first), Some(second)] if same && first == second && first != census.total() => {
                return Err(HeapError::Implausible(format!(
                    "the pages hold {} slots, but GC.stat says {first}",
                    census.total()
                )));
            }
            [Some(first), _] if first == census.total() => {}
            _ if layout.exact => {}
            _ => {
                last = Some(Err(HeapError::Implausible(
                    "the layout of this release is not known, and the heap changes too fast to prove that of its series"
                        .to_owned(),
                )));
                continue;
            }
        }
        let allocated = key("total_allocated_objects", &before)
            .zip(key("total_allocated_objects", &after))
            .filter(|_| !plan.layout.per_thread)
            .map(|(first, second)| second.saturating_sub(first));
        let flags = plan.layout.flags.read(&after).unwrap_or_default() as u32;
        let counted = Counted {
            census,
            gc_count: [&before, &after].map(|data| plan.layout.count.read(data).unwrap_or_default()),
            allocated,
            sweeping: prove::mode(&plan.layout, flags) == crate::ruby::stat::Mode::Sweeping,
        };
        if same {
            return Ok(counted);
        }
        last = Some(Ok(counted));
    }
    last.unwrap_or(Err(HeapError::Layout))
}
