//! What is written to standard output, and in which detail.

use super::{
    args::{FormatArg, RootArg, report::ReportArgs},
    parse::nanos,
};
use crate::{
    aggregate::request_summary::By,
    export::{fields::Shape, text::Lines},
};

/// Format of standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines of text.
    Text,
    /// JSON lines.
    Jsonl,
}

impl From<FormatArg> for Format {
    fn from(format: FormatArg) -> Self {
        match format {
            FormatArg::Text => Self::Text,
            FormatArg::Jsonl => Self::Jsonl,
        }
    }
}

/// What is written to standard output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reports {
    /// The format.
    pub format: Format,
    /// Which cycles are printed.
    pub lines: Lines,
    /// If set, only requests of at least this many nanoseconds are printed, instead of cycles.
    pub slower_than_ns: Option<u64>,
    /// Key by which requests of all processes are summed at the end.
    pub by: Option<By>,
    /// Which parts of JSON lines are written.
    pub shape: Shape,
    /// Whether all counters are shown at the end.
    pub verbose: bool,
}

impl Reports {
    /// Resolves the flags.
    pub(super) fn resolve(args: &ReportArgs, format: Format) -> Self {
        let &ReportArgs { quiet, min_pause, interval, slower_than, by, brief, ref fields, verbose } = args;
        let lines =
            Lines { min_pause_ns: min_pause.map_or(0, nanos), interval_ns: interval.map(nanos), none: quiet };
        let shape = Shape { brief, fields: fields.clone() };
        Self { format, lines, slower_than_ns: slower_than.map(nanos), by: by.map(By::from), shape, verbose }
    }

    /// Whether lines are printed during the run.
    pub fn streams(&self) -> bool {
        !self.lines.none
    }
}

/// Note on accounts of memory when JSON lines are written.
const MEMORY_ACCOUNT: &str =
    "--memory-account has no effect on JSON lines: use gctrace heap --by memory --format jsonl";
/// Note on filters when no profile is written.
pub(super) const FILTERS: &str = "--thread, --focus, --endpoint, --hide and --app-only change profiles only: add --flamegraph, --pprof or another profile";

/// Note on allocation that is counted but not shown.
const ALLOC: &str = "--alloc: no output shows allocation; add --requests, --format jsonl, --pprof, --prometheus, or --flamegraph FILE --flamegraph-of alloc";

/// Detects flags that have no effect in this run.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag, or what it needs")]
pub(super) struct Idle {
    pub(super) text: bool,
    pub(super) shares: bool,
    pub(super) memory_account: bool,
    pub(super) brief: bool,
    pub(super) fields: bool,
    pub(super) interval: bool,
    pub(super) slower_than: bool,
    pub(super) by: bool,
    pub(super) wall: bool,
    pub(super) rate: bool,
    pub(super) no_native: bool,
    pub(super) root: RootArg,
    pub(super) stack_lines: bool,
    /// Whether any output shows how memory is shared.
    pub(super) shows_shares: bool,
    /// Whether any output shows off-CPU time.
    pub(super) shows_wall: bool,
    /// Whether any output shows native frames.
    pub(super) shows_native: bool,
    /// Whether `--flamegraph-of` was given.
    pub(super) graph_of: bool,
    /// Whether any filter of profiles was given.
    pub(super) filters: bool,
    /// Whether any profile is written, pushed or printed.
    pub(super) shows_profiles: bool,
    /// Whether a flame graph is written, as a picture or as collapsed stacks.
    pub(super) shows_graphs: bool,
    /// Whether any output shows the measure that `--flamegraph-of` chooses.
    pub(super) shows_measure: bool,
    /// Whether `--min-pause` was given although `--quiet` suppresses lines of cycles.
    pub(super) min_pause_of_none: bool,
    pub(super) alloc: bool,
    /// Whether any output shows allocation.
    pub(super) shows_alloc: bool,
    /// Whether `--push-interval` was given.
    pub(super) push_interval: bool,
    /// Whether anything is pushed periodically.
    pub(super) pushes: bool,
    /// Whether a token was given as a flag.
    pub(super) token: bool,
    /// Whether sample sets are sent.
    pub(super) sends_sets: bool,
    /// Whether a header variant of sample sets was chosen.
    pub(super) dialect: bool,
    /// Whether sample sets are written or sent.
    pub(super) makes_sets: bool,
    /// Whether pods are to be named, but the directory with their names does not exist.
    pub(super) no_pods: bool,
}

impl Idle {
    /// The notes to print about them.
    pub(super) fn notes(self) -> Vec<&'static str> {
        [
            (
                self.shares && !self.shows_shares,
                "--shares changes none of these outputs: add --format jsonl, --prometheus, --otlp, --firefox or --perfetto",
            ),
            (
                !self.text && self.memory_account,
                MEMORY_ACCOUNT,
            ),
            (
                self.text && self.brief,
                "--brief shortens JSON lines and changes nothing else: add --format jsonl",
            ),
            (
                self.text && self.fields,
                "--fields selects members of JSON lines and changes nothing else: add --format jsonl",
            ),
            (!self.text && self.interval, "--interval has no effect on JSON lines, which report every cycle"),
            (
                !self.text && self.slower_than && !self.shows_profiles,
                "--slower-than changes text and profiles only: JSON lines have duration_ns of each request",
            ),
            (!self.text && self.by, "--by changes text only: JSON lines have each request"),
            (
                self.wall && !self.shows_wall,
                "--wall: no output shows off-CPU time; add --flamegraph, --pprof, --firefox, --folded, --top-lines or --speedscope",
            ),
            (
                self.rate && !self.text && !self.shows_native,
                "--rate: no output shows samples; add --flamegraph, --pprof or another profile, or leave out --format",
            ),
            (
                self.no_native && !self.shows_native,
                "--no-native: no output shows native frames; it belongs to --flamegraph, --pprof and other profiles",
            ),
            (
                self.root != RootArg::Process && !self.shows_graphs,
                "--stack-root changes nothing without --flamegraph or --folded",
            ),
            (
                self.stack_lines && !self.shows_graphs,
                "--stack-lines changes nothing without --flamegraph or --folded",
            ),
            (
                self.graph_of && !self.shows_measure,
                "--flamegraph-of changes nothing without --flamegraph, --folded or --top-lines",
            ),
            (
                self.filters && !self.shows_profiles,
                FILTERS,
            ),
            (self.min_pause_of_none, "--min-pause chooses lines, and --quiet prints none"),
            (
                self.alloc && !self.shows_alloc,
                ALLOC,
            ),
            (self.push_interval && !self.pushes, "--push-interval changes nothing without --otlp or --pyroscope"),
            (self.token && !self.sends_sets, "--tunemygc-token changes nothing without --tunemygc-url"),
            (
                self.dialect && !self.makes_sets,
                "--tunemygc-dialect changes nothing without --tunemygc or --tunemygc-url",
            ),
            (
                self.no_pods,
                "--kube-root: the folder var/log/pods does not exist below it; pods have no names until it does",
            ),
        ]
        .into_iter()
        .filter_map(|(idle, note)| idle.then_some(note))
        .collect()
    }
}
