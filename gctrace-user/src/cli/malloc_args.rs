//! Flags of `gctrace malloc`.

use std::{path::PathBuf, time::Duration};

use clap::Args as ClapArgs;

use super::{
    args::{CacheArgs, FormatArg},
    parse,
};

/// Flags of `gctrace malloc`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace malloc --pid 4242                  what it allocates in ten seconds, by size and age\n  \
        sudo gctrace malloc --pid 4242 --duration 1m --format jsonl   the same for scripts\n\n\
        Exit status: 0 done, 1 no Ruby process, 2 its calls cannot be counted, 3 missing privilege or kernel feature.\n\
        Each call costs the process about a microsecond. The window ends early when that is above the budget.")]
pub struct MallocArgs {
    /// The process
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: u32,

    /// How long calls are counted; Ctrl-C ends it earlier
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse::duration)]
    pub duration: Duration,

    /// What counting may cost, in percent of the time of one CPU: counting ends when it costs more
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = parse::percent)]
    pub budget: u64,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,
}
