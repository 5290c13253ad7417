//! Flags of `gctrace top`.

use std::{path::PathBuf, time::Duration};

use clap::Args as ClapArgs;

use super::{CacheArgs, FormatArg, select::SelectArgs};
use crate::cli::parse::{self, Pids};

/// Flags of `gctrace top`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace top                       every Ruby process of this host (? explains keys and columns)\n  \
        sudo gctrace top --gvl --requests --name puma   with waits for the GVL, requests by endpoint\n  \
        sudo gctrace top --once                one table for scripts\n\n\
        Exit status: 0 done, 1 nothing matched, 2 error or bad usage, 3 missing privilege or kernel feature.")]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag")]
pub struct TopArgs {
    /// What to show; without any of these flags every Ruby process.
    #[command(flatten)]
    pub select: SelectArgs,

    /// Also watch the GVL: adds about 1 µs each time a thread requests, acquires or releases it
    #[arg(long)]
    pub gvl: bool,

    /// Also trace requests and jobs, as gctrace --requests does: how many end in a second, and how long they take, by endpoint
    #[arg(long)]
    pub requests: bool,

    /// CPU samples per second, for the hottest methods of a process
    #[arg(long, value_name = "HZ", default_value = "49", value_parser = parse::rate)]
    pub rate: u32,

    /// Leave the mouse to the terminal, for example to select text
    #[arg(long, conflicts_with = "once")]
    pub no_mouse: bool,

    /// Print one table and exit
    #[arg(long)]
    pub once: bool,

    /// How long --once observes before it prints
    #[arg(long, value_name = "TIME", default_value = "5s", requires = "once", value_parser = parse::duration)]
    pub interval: Duration,

    /// What --once prints
    #[arg(long, value_enum, default_value_t = FormatArg::Text, requires = "once")]
    pub format: FormatArg,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Pids: short for --pid
    #[arg(value_name = "PID", value_parser = parse::pids, hide = true)]
    pub words: Vec<Pids>,
}
