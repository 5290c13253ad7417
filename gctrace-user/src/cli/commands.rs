//! Flags of commands that are no runs, resolved to what they do.

use std::{path::PathBuf, time::Duration};

use super::{
    args::usage::UsageError,
    args::{
        DoctorArgs, DumpArgs,
        heap::{HeapArgs, HeapByArg},
        malloc::MallocArgs,
    },
    reports::Format,
    settings::{differ, merged},
};
use crate::{discover::Selection, export::profile};

/// An examination.
#[derive(Debug)]
pub struct DoctorSettings {
    /// Which processes.
    pub selection: Selection,
    /// Which files.
    pub files: Vec<PathBuf>,
    /// Standard output.
    pub format: Format,
    /// Whether everything is shown.
    pub verbose: bool,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
}

impl From<DoctorArgs> for DoctorSettings {
    fn from(args: DoctorArgs) -> Self {
        let DoctorArgs { all_ruby, pids, proc: _, files, format, verbose, cache } = args;
        let pids = merged(pids);
        let all = all_ruby || (pids.is_empty() && files.is_empty());
        Self {
            selection: Selection { all, pids, ..Selection::default() },
            files,
            format: format.into(),
            verbose,
            cache_dir: cache.dir(),
        }
    }
}

/// What the rows of a census represent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// Types of objects, as `ObjectSpace.count_objects` has them.
    #[default]
    Type,
    /// Classes of objects, as `Object#class` gives them.
    Class,
    /// Lines that allocated them, and classes.
    Line,
    /// Sizes of slots.
    Size,
    /// How full pages are.
    Page,
    /// Collections that objects survived.
    Age,
    /// Where the resident memory is.
    Memory,
}

impl By {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Type => "type",
            Self::Class => "class",
            Self::Line => "line",
            Self::Size => "size",
            Self::Page => "page",
            Self::Age => "age",
            Self::Memory => "memory",
        }
    }
}

/// A census of a heap.
#[derive(Debug)]
pub struct HeapSettings {
    /// The process; `None`: two saved censuses are compared.
    pub pid: Option<u32>,
    /// What a row represents.
    pub by: By,
    /// Rows in text.
    pub top: usize,
    /// Standard output.
    pub format: Format,
    /// Where the picture goes.
    pub svg: Option<PathBuf>,
    /// Where every object is written to.
    pub dump: Option<PathBuf>,
    /// Saved censuses to compare.
    pub diff: Vec<PathBuf>,
    /// How often the heap is counted, and what grew reported.
    pub every: Option<Duration>,
    /// How long growth between major collections is watched for.
    pub leaks: Option<Duration>,
    /// Whether it is followed where objects are allocated meanwhile.
    pub sites: bool,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
}

impl From<HeapArgs> for HeapSettings {
    fn from(args: HeapArgs) -> Self {
        let HeapArgs { pid, word, by, top, format, svg, dump, diff, every, leaks, no_sites, proc: _, cache } =
            args;
        let by = match by {
            HeapByArg::Type => By::Type,
            HeapByArg::Class => By::Class,
            HeapByArg::Line => By::Line,
            HeapByArg::Size => By::Size,
            HeapByArg::Page => By::Page,
            HeapByArg::Age => By::Age,
            HeapByArg::Memory => By::Memory,
        };
        Self {
            pid: pid.or(word),
            by,
            top,
            format: format.into(),
            svg,
            dump,
            diff,
            every,
            leaks,
            sites: !no_sites,
            cache_dir: cache.dir(),
        }
    }
}

/// A window in which allocation by malloc is counted.
#[derive(Debug)]
pub struct MallocSettings {
    /// Which running processes.
    pub selection: Selection,
    /// How long it is.
    pub duration: Duration,
    /// What the probes may cost, in millionths of the time of one CPU.
    pub budget_ppm: u64,
    /// Bytes per stack that is taken, on average; 0: none is.
    pub sample: u64,
    /// Lines of the table of places.
    pub top: usize,
    /// Files to write.
    pub files: Vec<(PathBuf, profile::Format)>,
    /// Standard output.
    pub format: Format,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
}

impl TryFrom<MallocArgs> for MallocSettings {
    type Error = UsageError;

    fn try_from(args: MallocArgs) -> Result<Self, UsageError> {
        let files = args.files();
        differ(files.iter().map(|(path, _)| path))?;
        let MallocArgs {
            pids,
            children,
            all_ruby,
            running,
            duration,
            budget,
            sample,
            top,
            format,
            cache,
            words,
            ..
        } = args;
        let (budget_ppm, format, cache_dir) = (budget, format.into(), cache.dir());
        let mut selection = running.selection(all_ruby);
        *(if children { &mut selection.pids } else { &mut selection.only_pids }) =
            merged(pids.into_iter().chain(words).collect());
        Ok(Self { selection, duration, budget_ppm, sample, top, files, format, cache_dir })
    }
}

/// A look at threads.
#[derive(Clone, Debug)]
pub struct DumpSettings {
    /// Which running processes.
    pub selection: Selection,
    /// Native frames and threads that are no Ruby threads, too.
    pub native: bool,
    /// Standard output.
    pub format: Format,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
}

impl From<DumpArgs> for DumpSettings {
    fn from(args: DumpArgs) -> Self {
        let DumpArgs { pids, all_ruby, running, native, format, proc: _, cache, words } = args;
        let pids = merged(pids.into_iter().chain(words).collect());
        let selection = Selection { pids, ..running.selection(all_ruby) };
        Self { selection, native, format: format.into(), cache_dir: cache.dir() }
    }
}
