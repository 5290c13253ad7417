//! Flags that choose outputs, of a run and of `gctrace report`, which writes the same outputs from a recording.

use std::{num::NonZeroU64, path::PathBuf};

use clap::Args as ClapArgs;

use super::{DialectArg, FormatArg, RootArg, profile::ProfileArgs, report::ReportArgs};
use crate::cli::parse;

/// What to write, and where.
#[derive(Debug, ClapArgs)]
pub struct OutputArgs {
    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Write lines to this file instead of standard output. It is emptied first, and grows while the run goes on
    #[arg(long, short, value_name = "FILE", value_parser = parse::output())]
    pub output: Option<PathBuf>,

    /// How much of it.
    #[command(flatten)]
    pub reports: ReportArgs,

    /// Write a TuneMyGC sample set per process to this directory
    #[arg(long, value_name = "DIR")]
    pub tunemygc: Option<PathBuf>,

    /// Delete the oldest sample sets in DIR beyond this many MiB [default: they are all kept]
    #[arg(long, value_name = "MIB", requires = "tunemygc", hide_short_help = true)]
    pub tunemygc_mib: Option<NonZeroU64>,

    /// Header variant of sample sets: `spec` (11 elements) or `agent` (12, as the gem sends)
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = DialectArg::Spec, hide_short_help = true)]
    pub tunemygc_dialect: DialectArg,

    /// Write CPU time and GC pauses by stack as a pprof profile, e.g. run.pb.gz (open with `go tool pprof`)
    #[arg(long, value_name = "FILE")]
    pub pprof: Option<PathBuf>,

    /// Draw a flame graph, e.g. cpu.svg (open in a browser)
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,

    /// Write collapsed stacks, e.g. cpu.folded: a line `root;caller;leaf NANOSECONDS` per stack
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,

    /// Write a call graph for `KCachegrind`, e.g. callgrind.out.run (or `callgrind_annotate`)
    #[arg(long, value_name = "FILE")]
    pub callgrind: Option<PathBuf>,

    /// Write how much time is in each line of Ruby code, e.g. lines.txt: its own and with what it calls, the line with the most of its own first
    #[arg(long, value_name = "FILE")]
    pub top_lines: Option<PathBuf>,

    /// Write GC cycles as a table for spreadsheets, e.g. gc.csv: a row for each cycle
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Write a profile for speedscope (www.speedscope.app), e.g. run.speedscope.json
    #[arg(long, value_name = "FILE")]
    pub speedscope: Option<PathBuf>,

    /// Write a timeline with GC markers and memory for the Firefox Profiler (profiler.firefox.com), e.g. run.json.gz
    #[arg(long, value_name = "FILE")]
    pub firefox: Option<PathBuf>,

    /// Root frame of each stack of --flamegraph and --folded
    #[arg(
        long,
        value_enum,
        default_value_t = RootArg::Process,
        value_name = "WHAT",
    )]
    pub stack_root: RootArg,

    /// Rows of --flamegraph and --folded are lines that run, not methods: Order#total (order.rb:14), not the line of its `def`
    #[arg(long)]
    pub stack_lines: bool,

    /// What profiles show.
    #[command(flatten)]
    pub profile: ProfileArgs,

    /// Write a trace for Perfetto (ui.perfetto.dev), e.g. run.pftrace: GC pauses and cycles, and with --gvl what each
    /// thread did with the GVL
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,

    /// Write each stack as one JSON object per line to this file (for tests)
    #[arg(long, value_name = "FILE", hide = true)]
    pub stack_log: Option<PathBuf>,
}
