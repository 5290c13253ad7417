//! Flags of `gctrace scrub` and `gctrace merge`.

use std::{collections::BTreeSet, path::PathBuf};

use clap::{Args as ClapArgs, ValueEnum};

use super::parse;
use crate::trace_file::ScrubKind;

/// Flags of `gctrace scrub`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace scrub puma.gctrace -o public.gctrace           names of methods stay\n  \
        gctrace scrub puma.gctrace -o public.gctrace --names   they are replaced, too\n  \
        gctrace scrub puma.gctrace -o public.gctrace --keep threads,settings\n\n\
        Exit status: 0 done, 2 error, bad usage or a damaged recording.\n\
        No privilege is needed. docs/recording.md says what is replaced and what stays.")]
pub struct ScrubArgs {
    /// The recording
    #[arg(value_name = "FILE", value_parser = parse::recording())]
    pub file: PathBuf,

    /// The copy; it appears complete or not at all, and only its owner can read it
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,

    /// Replace names of classes, methods and functions, too, and all of the paths of files
    #[arg(long)]
    pub names: bool,

    /// Leave this as it is
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    pub keep: Vec<KeepArg>,
}

/// `--keep` of `gctrace scrub`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KeepArg {
    /// Paths of requests
    Endpoints,
    /// Command lines
    Arguments,
    /// Names of hosts
    Hosts,
    /// Names of services, and attributes of resources
    Services,
    /// Containers, pods, namespaces, units and control groups
    Containers,
    /// Names of threads and processes
    Threads,
    /// Values of `RUBY_GC_*` variables
    Settings,
    /// Paths of files
    Files,
    /// Reasons why processes are not traced
    Reasons,
}

impl From<KeepArg> for ScrubKind {
    fn from(keep: KeepArg) -> Self {
        match keep {
            KeepArg::Endpoints => Self::Endpoints,
            KeepArg::Arguments => Self::Arguments,
            KeepArg::Hosts => Self::Hosts,
            KeepArg::Services => Self::Services,
            KeepArg::Containers => Self::Containers,
            KeepArg::Threads => Self::Threads,
            KeepArg::Settings => Self::Settings,
            KeepArg::Files => Self::Files,
            KeepArg::Reasons => Self::Reasons,
        }
    }
}

impl ScrubArgs {
    /// What is copied unchanged.
    pub fn kept(&self) -> BTreeSet<ScrubKind> {
        let names = (!self.names).then_some(ScrubKind::Names);
        self.keep.iter().copied().map(ScrubKind::from).chain(names).collect()
    }
}

/// Flags of `gctrace merge`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace merge puma-*.gctrace -o puma.gctrace           dumps of one flight recorder\n  \
        gctrace merge web.gctrace jobs.gctrace -o all.gctrace  two runs of gctrace\n\n\
        Exit status: 0 done, 2 error, bad usage, a damaged recording, or what cannot be merged exactly.\n\
        No privilege is needed. docs/recording.md says what can be merged.")]
pub struct MergeArgs {
    /// The recordings
    #[arg(value_name = "FILE", required = true, num_args = 2.., value_parser = parse::recording_file())]
    pub files: Vec<PathBuf>,

    /// The result; it appears complete or not at all, and only its owner can read it
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}
