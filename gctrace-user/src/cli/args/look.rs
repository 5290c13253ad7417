//! Flags that choose what is traced, of a run and of `gctrace record`.

use std::time::Duration;

use clap::Args as ClapArgs;

use super::GvlArg;
use crate::{cli::parse, ruby::plan::OptionalEvent};

/// What to look at besides the GC.
#[derive(Debug, ClapArgs)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag")]
pub struct LookArgs {
    /// Stop after this time, e.g. 500ms, 30s, 1m30s, 1d [default: until Ctrl-C or the end of COMMAND]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub duration: Option<Duration>,

    /// CPU samples per second and CPU, 1 to 999 [default: 99 where an output needs stacks]
    #[arg(long, value_name = "HZ", value_parser = parse::rate)]
    pub rate: Option<u32>,

    /// Leave native frames (the VM itself, C extensions, libraries) out of stacks
    #[arg(long)]
    pub no_native: bool,

    /// Also profile threads while they sleep, block or wait for a CPU
    #[arg(long)]
    pub wall: bool,

    /// Ignore waits shorter than this [default: 1ms]
    #[arg(long, value_name = "TIME", requires = "wall", value_parser = parse::duration)]
    pub off_cpu_min: Option<Duration>,

    /// Take about this many stacks of threads off their CPU per second and CPU, chosen at random [default: 1000]
    #[arg(long, value_name = "N", requires = "wall", value_parser = clap::value_parser!(u32).range(10..=100_000))]
    pub off_cpu_stacks: Option<u32>,

    /// Trace the GVL: how long threads wait for it, how long they hold it, and who waits for whom (exact). Adds about 1 µs each
    /// time a thread requests, acquires or releases the GVL. --gvl=futex sets no probe in the program and reports only waits
    /// that blocked, and no holds
    #[arg(
        long,
        value_enum,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "exact"
    )]
    pub gvl: Option<GvlArg>,

    /// Report each wait for the GVL that takes at least this long [default: 1ms]
    #[arg(long, value_name = "TIME", requires = "gvl", value_parser = parse::duration)]
    pub gvl_threshold: Option<Duration>,

    /// Maximum CPU cost of --gvl in percent (of the host, and of one CPU per process). Above it gctrace first samples single
    /// waits, then everything, then stops; each step is reported [default: 0.2, with --duration 1]
    #[arg(long, value_name = "PERCENT", requires = "gvl", value_parser = parse::percent)]
    pub gvl_budget: Option<u64>,

    /// Trace the HTTP requests of Puma and Unicorn (TCP or Unix socket) and WEBrick (TCP) and the jobs of Sidekiq: endpoint
    /// or class, controller or route where a stack shows it, status, duration, trace id, and the GC cycles and pauses of each.
    /// Reports the path without ids, and never query, other headers, bodies or arguments. Adds about 7 µs to each request
    #[arg(long)]
    pub requests: bool,

    /// Size of the kernel ring for requests (for tests)
    #[arg(long, value_name = "BYTES", value_parser = parse::ring, hide = true)]
    pub request_ring: Option<u32>,

    /// Optional events.
    #[command(flatten)]
    pub optional: OptionalArgs,

    /// (JSON lines, metrics, --firefox, --perfetto, recordings) Report PSS and private dirty memory after a cycle, at most once per second
    /// and process: what collections cost the workers of a server that forks
    #[arg(long)]
    pub shares: bool,

    /// (text only) At the end, show the memory of each process that still runs by kind: heap pages, malloc, stacks, libraries
    /// (as gctrace heap --by memory), and how much of what it shared at its fork is private now. For the five largest processes;
    /// none is stopped
    #[arg(long, hide_short_help = true)]
    pub memory_account: bool,
}

/// A flag for each optional event.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
pub struct OptionalArgs {
    /// Count allocated objects exactly, by slot size: once a second in JSON lines, by stack in all profiles and --flamegraph-of alloc.
    /// A loop of Object.new took 1.125 times its CPU time on Ruby 3.1
    #[arg(long, hide_short_help = true)]
    pub alloc: bool,
}

impl OptionalArgs {
    /// The requested events.
    pub(in crate::cli) fn events(self) -> Vec<OptionalEvent> {
        let Self { alloc } = self;
        [(alloc, OptionalEvent::Refill)]
            .into_iter()
            .filter_map(|(wanted, event)| wanted.then_some(event))
            .collect()
    }
}
