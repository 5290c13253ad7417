//! Flags of commands that are not runs, resolved to settings.

use std::{path::PathBuf, time::Duration};

use super::{
    args::usage::UsageError,
    args::{
        DoctorArgs, DumpArgs,
        heap::{HeapArgs, HeapByArg},
        malloc::MallocArgs,
    },
    parse,
    reports::Format,
    settings::{differ, merged},
};
use crate::{discover::Selection, export::profile};

/// Settings of `gctrace doctor`.
#[derive(Debug)]
pub struct DoctorSettings {
    /// Processes to examine.
    pub selection: Selection,
    /// Files to examine.
    pub files: Vec<PathBuf>,
    /// Format of standard output.
    pub format: Format,
    /// Whether every check is shown.
    pub verbose: bool,
    /// Directory of cached analyses; `None`: analyses are not cached.
    pub cache_dir: Option<PathBuf>,
}

impl From<DoctorArgs> for DoctorSettings {
    fn from(args: DoctorArgs) -> Self {
        let DoctorArgs { all_ruby, mut pids, running, proc: _, files: words, format, verbose, cache } = args;
        let mut files = Vec::new();
        for word in words {
            // `4242` is a pid unless a file has that name.
            match word.to_str().map(parse::pids) {
                Some(Ok(named)) if !word.exists() => pids.push(named),
                _ => files.push(word),
            }
        }
        let selection = Selection { pids: merged(pids), ..running.selection(all_ruby) };
        let all = all_ruby || (selection.is_empty() && files.is_empty());
        Self {
            selection: Selection { all, ..selection },
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
    /// Types of objects, as `ObjectSpace.count_objects` reports them.
    #[default]
    Type,
    /// Classes of objects, as `Object#class` returns them.
    Class,
    /// Lines that allocated the objects, and their classes.
    Line,
    /// Slot sizes.
    Size,
    /// Occupancy of pages.
    Page,
    /// Number of collections that objects survived.
    Age,
    /// Parts of the resident memory.
    Memory,
}

impl By {
    /// The name in JSON output.
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

/// Settings of `gctrace heap`.
#[derive(Debug)]
pub struct HeapSettings {
    /// The process; `None`: two saved censuses are compared.
    pub pid: Option<u32>,
    /// What a row represents.
    pub by: By,
    /// Number of rows in text output.
    pub top: usize,
    /// Format of standard output.
    pub format: Format,
    /// File for the SVG picture of the pages.
    pub svg: Option<PathBuf>,
    /// File for a dump of every object.
    pub dump: Option<PathBuf>,
    /// Saved censuses to compare.
    pub diff: Vec<PathBuf>,
    /// Interval between censuses; what grew is reported after each.
    pub every: Option<Duration>,
    /// How long to watch for growth between major collections.
    pub leaks: Option<Duration>,
    /// Whether allocation sites of objects are followed during that time.
    pub sites: bool,
    /// Whether files belong to root although another user called `sudo`.
    pub as_root: bool,
    /// Directory of cached analyses; `None`: analyses are not cached.
    pub cache_dir: Option<PathBuf>,
}

impl From<HeapArgs> for HeapSettings {
    fn from(args: HeapArgs) -> Self {
        let HeapArgs {
            pid,
            word,
            by,
            top,
            format,
            svg,
            dump,
            diff,
            every,
            leaks,
            no_sites,
            as_root,
            proc: _,
            cache,
        } = args;
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
            as_root,
            cache_dir: cache.dir(),
        }
    }
}

/// Settings of `gctrace malloc`: a window in which calls of malloc are counted.
#[derive(Debug)]
pub struct MallocSettings {
    /// Running processes to count.
    pub selection: Selection,
    /// Length of the window.
    pub duration: Duration,
    /// Maximum cost of the probes, in millionths of the time of one CPU.
    pub budget_ppm: u64,
    /// Mean number of allocated bytes per stack; 0: no stacks are taken.
    pub sample: u64,
    /// Number of rows in the table of allocation sites.
    pub top: usize,
    /// Files to write, with their formats.
    pub files: Vec<(PathBuf, profile::Format)>,
    /// Whether they belong to root although another user called `sudo`.
    pub as_root: bool,
    /// Format of standard output.
    pub format: Format,
    /// Directory of cached analyses; `None`: analyses are not cached.
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
            as_root,
            cache,
            words,
            ..
        } = args;
        let (budget_ppm, format, cache_dir) = (budget, format.into(), cache.dir());
        let mut selection = running.selection(all_ruby);
        *(if children { &mut selection.pids } else { &mut selection.only_pids }) =
            merged(pids.into_iter().chain(words).collect());
        Ok(Self { selection, duration, budget_ppm, sample, top, files, as_root, format, cache_dir })
    }
}

/// Settings of `gctrace dump`.
#[derive(Clone, Debug)]
pub struct DumpSettings {
    /// Running processes to read.
    pub selection: Selection,
    /// Whether native frames, and threads that are not Ruby threads, are included.
    pub native: bool,
    /// Format of standard output.
    pub format: Format,
    /// Directory of cached analyses; `None`: analyses are not cached.
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
