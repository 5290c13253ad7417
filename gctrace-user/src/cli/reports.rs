//! Flags about what is written to standard output, and how much of it.

use std::time::Duration;

use clap::Args as ClapArgs;

use super::{args::RootArg, parse, settings::Format};
use crate::export::text::Lines;

/// The flags.
#[derive(Debug, ClapArgs)]
pub struct ReportArgs {
    /// Do not print a line per cycle (summaries and files are still written)
    #[arg(long, short)]
    pub quiet: bool,

    /// Print only cycles with a stop of at least this long, e.g. 10ms; summaries count all of them
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub min_pause: Option<Duration>,

    /// Print a line per process every TIME, e.g. 1s, in place of one per cycle
    #[arg(long, value_name = "TIME", value_parser = parse::duration, conflicts_with_all = ["quiet", "min_pause"])]
    pub interval: Option<Duration>,

    /// Print only requests that took at least this long, e.g. 500ms, each with its GC cycles, pauses and long waits for the GVL
    #[arg(long, value_name = "TIME", value_parser = parse::duration, requires = "requests",
          conflicts_with_all = ["quiet", "min_pause", "interval"])]
    pub slower_than: Option<Duration>,

    /// (JSON lines only) Leave out the single pauses, `GC.stat` and `GC.latest_gc_info` of each cycle
    #[arg(long)]
    pub brief: bool,

    /// Say at the end everything that was counted
    #[arg(long, short)]
    pub verbose: bool,
}

/// What is written to standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reports {
    /// How.
    pub format: Format,
    /// Which cycles.
    pub lines: Lines,
    /// Only requests of at least this many nanoseconds in place of cycles.
    pub slower_than_ns: Option<u64>,
    /// Whether JSON lines lack details.
    pub brief: bool,
    /// Whether all counters are told at the end.
    pub verbose: bool,
}

impl Reports {
    /// What these flags mean.
    pub(super) fn resolve(args: &ReportArgs, format: Format) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let &ReportArgs { quiet, min_pause, interval, slower_than, brief, verbose } = args;
        let lines =
            Lines { min_pause_ns: min_pause.map_or(0, nanos), interval_ns: interval.map(nanos), none: quiet };
        Self { format, lines, slower_than_ns: slower_than.map(nanos), brief, verbose }
    }

    /// Whether lines come while the run goes on.
    pub fn streams(&self) -> bool {
        !self.lines.none
    }
}

/// Flags that change nothing in this run.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag, or what it needs")]
pub(super) struct Idle {
    pub(super) text: bool,
    pub(super) shares: bool,
    pub(super) brief: bool,
    pub(super) interval: bool,
    pub(super) slower_than: bool,
    pub(super) wall: bool,
    pub(super) no_native: bool,
    pub(super) root: RootArg,
    /// Whether any output shows time off the CPU.
    pub(super) shows_wall: bool,
    /// Whether any output shows native frames.
    pub(super) shows_native: bool,
    /// Whether any output has stacks with a root.
    pub(super) shows_roots: bool,
}

impl Idle {
    /// What to say about them.
    pub(super) fn notes(self) -> Vec<&'static str> {
        [
            (
                self.text && self.shares,
                "--shares adds fields to JSON lines and changes nothing else: add --format jsonl",
            ),
            (
                self.text && self.brief,
                "--brief shortens JSON lines and changes nothing else: add --format jsonl",
            ),
            (!self.text && self.interval, "--interval changes text only: JSON lines are of single cycles"),
            (
                !self.text && self.slower_than,
                "--slower-than changes text only: JSON lines have duration_ns of each request",
            ),
            (
                self.wall && !self.shows_wall,
                "--wall: no output shows time off the CPU; add --flamegraph, --pprof, --firefox, --folded or --speedscope",
            ),
            (
                self.no_native && !self.shows_native,
                "--no-native: no output shows native frames; it belongs to --flamegraph, --pprof and other profiles",
            ),
            (
                self.root != RootArg::Process && !self.shows_roots,
                "--stack-root changes nothing without --flamegraph or --folded",
            ),
        ]
        .into_iter()
        .filter_map(|(idle, note)| idle.then_some(note))
        .collect()
    }
}
