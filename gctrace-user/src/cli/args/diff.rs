//! Flags of `gctrace diff` and `gctrace info`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::DocumentArg;
use crate::{cli::parse, diff::Condition};

/// Flags of `gctrace diff`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace diff yesterday.gctrace today.gctrace\n  \
        gctrace diff yesterday.gctrace today.gctrace --flamegraph changes.svg\n  \
        gctrace diff main.gctrace branch.gctrace --fail-if 'gc.share > +20%' --fail-if 'gc.pause.p99 > 50ms'\n\n\
        Exit status: 0 done, 1 a condition of --fail-if is true, 2 error, bad usage, a damaged recording, or a condition \
        that cannot be tested.\n\
        No privilege is needed. docs/diff.md has the method and the metrics.")]
pub struct DiffArgs {
    /// The recording before
    #[arg(value_name = "A", value_parser = parse::recording())]
    pub a: PathBuf,

    /// The recording after
    #[arg(value_name = "B", value_parser = parse::recording())]
    pub b: PathBuf,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = DocumentArg::Text)]
    pub format: DocumentArg,

    /// Draw the change of CPU time as a flame graph, e.g. changes.svg: red grew, blue shrank, as parts of each recording
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,

    /// Exit with 1 if a metric changes beyond a bound and that is more than noise, e.g. 'gc.share > +20%', or is beyond a level,
    /// e.g. 'gc.pause.p99 > 50ms' (repeatable)
    #[arg(long = "fail-if", value_name = "CONDITION")]
    pub conditions: Vec<Condition>,

    /// Compare only processes of the program with this name: service, script or main thread, as the first lines name it
    #[arg(long, value_name = "NAME")]
    pub program: Option<String>,

    /// Compare only this process of A
    #[arg(long, value_name = "PID")]
    pub pid_a: Option<u32>,

    /// Compare only this process of B
    #[arg(long, value_name = "PID")]
    pub pid_b: Option<u32>,
}

/// Flags of `gctrace info`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Exit status: 0 done, 2 error or a damaged recording. No privilege is needed.")]
pub struct InfoArgs {
    /// The recording
    #[arg(value_name = "FILE", value_parser = parse::recording())]
    pub file: PathBuf,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = DocumentArg::Text)]
    pub format: DocumentArg,
}
