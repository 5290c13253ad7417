//! Flags of `gctrace top`.

use std::{path::PathBuf, time::Duration};

use clap::Args as ClapArgs;

use super::{
    args::{CacheArgs, FormatArg},
    parse::{self, Pids},
};

/// Flags of `gctrace top`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace top                       every Ruby process of this host (? explains keys and columns)\n  \
        sudo gctrace top --gvl --name puma     with waits for the GVL\n  \
        sudo gctrace top --once                one table for scripts\n\n\
        Exit status: 0 done, 1 nothing matched, 2 error or bad usage, 3 missing privilege or kernel feature.")]
pub struct TopArgs {
    /// Every Ruby process [default, if nothing else is given]
    #[arg(long)]
    pub all_ruby: bool,

    /// These processes and their descendants (repeatable)
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Ruby programs of this name (repeatable)
    #[arg(long = "name", value_name = "NAME")]
    pub names: Vec<String>,

    /// What runs in this systemd unit (repeatable)
    #[arg(long = "unit", value_name = "UNIT")]
    pub units: Vec<String>,

    /// What runs in this cgroup or below it (repeatable)
    #[arg(long = "cgroup", value_name = "PATH")]
    pub cgroups: Vec<String>,

    /// What runs in this container (repeatable)
    #[arg(long = "container", value_name = "ID|NAME")]
    pub containers: Vec<String>,

    /// Also watch the GVL: adds about 1 µs each time a thread requests, acquires or releases it
    #[arg(long)]
    pub gvl: bool,

    /// CPU samples per second, for the hottest methods of a process
    #[arg(long, value_name = "HZ", default_value = "49", value_parser = parse::rate)]
    pub rate: u32,

    /// Print one table and end
    #[arg(long)]
    pub once: bool,

    /// How long --once looks before it prints
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
