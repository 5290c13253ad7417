//! Flags of `gctrace serve`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Args as ClapArgs;

use super::{CacheArgs, look::LookArgs, select::SelectArgs};
use crate::cli::parse;

/// Flags of `gctrace serve`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace serve puma.gctrace                          prints the address of the page\n  \
        gctrace serve puma.gctrace --open                   and opens it in a browser\n  \
        gctrace serve yesterday.gctrace today.gctrace       today's, and what has changed\n  \
        sudo gctrace serve --live --gvl --name puma         what Puma does now, and did in the last 10 minutes\n  \
        sudo gctrace serve --live -- ruby script.rb         a program from its start\n  \
        ssh -L 8080:127.0.0.1:8080 host gctrace serve puma.gctrace --listen 127.0.0.1:8080\n  \
        \x20                                                   a recording on another host\n\n\
        Exit status: 0 ended by SIGINT or SIGTERM, 2 error or bad usage; with --live that of `gctrace record`.\n\
        A damaged recording is shown up to the damage. No privilege is needed without --live.\n\
        The address contains a secret; the server listens on this host only.")]
pub struct ServeArgs {
    /// The recording, written by `gctrace record` or --record. Of two, the second is shown, compared with the first. With --live pids: short for --pid
    #[arg(value_name = "FILE", value_parser = parse::recording_file())]
    pub files: Vec<PathBuf>,

    /// Trace, and show what is seen while it goes on; without a selection every Ruby process
    #[arg(long)]
    pub live: bool,

    /// Address of this host and port to listen on [default: 127.0.0.1 and a free port]
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0", hide_default_value = true, value_parser = parse::listen_here)]
    pub listen: SocketAddr,

    /// Open the page in a browser, too (xdg-open)
    #[arg(long)]
    pub open: bool,

    /// (--live) Keep the last TIME in memory; older parts are dropped [default: 10m]
    #[arg(long, value_name = "TIME", requires = "live", value_parser = parse::duration)]
    pub keep: Option<Duration>,

    /// (--live) Limit of that memory, compressed; the oldest parts are dropped first [default: 64MiB]
    #[arg(long, value_name = "SIZE", requires = "live", value_parser = parse::kept)]
    pub keep_size: Option<u64>,

    /// What to trace.
    #[command(flatten, next_help_heading = "What to trace (--live)")]
    pub select: SelectArgs,

    /// What to look at.
    #[command(flatten, next_help_heading = "What to measure (--live)")]
    pub look: LookArgs,

    /// Under sudo, run COMMAND as root
    #[arg(long, requires = "live")]
    pub as_root: bool,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", requires = "live", hide_short_help = true, conflicts_with = "command")]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Start this command and trace it and everything it starts
    #[arg(last = true, value_name = "COMMAND", requires = "live")]
    pub command: Vec<std::ffi::OsString>,
}
