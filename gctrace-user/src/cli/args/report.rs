//! Flags that choose what is written to standard output, and in which detail.

use std::{str::FromStr as _, time::Duration};

use clap::{Args as ClapArgs, ValueEnum};

use crate::{aggregate::request_summary::By, cli::parse, export::fields::Fields};

/// The flags.
#[derive(Debug, ClapArgs)]
pub struct ReportArgs {
    /// Print no line per cycle, request or wait for the GVL, in JSON lines, too (sums, summaries and files are still written)
    #[arg(long, short)]
    pub quiet: bool,

    /// Print only cycles with a stop of at least this long, e.g. 10ms; summaries count all of them
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub min_pause: Option<Duration>,

    /// Print one line per process every TIME, e.g. 1s, instead of one per cycle
    #[arg(long, value_name = "TIME", value_parser = parse::duration, conflicts_with_all = ["quiet", "min_pause"])]
    pub interval: Option<Duration>,

    /// Print only requests that took at least this long, e.g. 500ms, each with its GC cycles, pauses, long waits for the GVL and sampled lines.
    /// Profiles contain only what belongs to them
    // It requires --requests where that is a flag, which `command` adds.
    #[arg(long, value_name = "TIME", value_parser = parse::duration,
          conflicts_with_all = ["quiet", "min_pause", "interval"])]
    pub slower_than: Option<Duration>,

    /// Group the requests in the final table by this, over all processes, instead of per process by endpoint
    // It requires --requests where that is a flag, which `command` adds.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub by: Option<ByArg>,

    /// (JSON lines only) Leave out the single pauses, `GC.stat` and `GC.latest_gc_info` of each cycle
    #[arg(long)]
    pub brief: bool,

    /// (JSON lines only) Print these members of each line, e.g. `ts,pid,pause_ns,stat.heap_live_slots`, and its type
    #[arg(long, value_name = "NAMES", value_parser = Fields::from_str)]
    pub fields: Option<Fields>,

    /// Print all counters at the end
    #[arg(long, short)]
    pub verbose: bool,
}

/// What `--by` puts requests together by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ByArg {
    /// Method and template of the path
    Endpoint,
    /// Service (docs/exporting.md)
    Service,
    /// The thread that served them
    Thread,
}

impl From<ByArg> for By {
    fn from(by: ByArg) -> Self {
        match by {
            ByArg::Endpoint => Self::Endpoint,
            ByArg::Service => Self::Service,
            ByArg::Thread => Self::Thread,
        }
    }
}
