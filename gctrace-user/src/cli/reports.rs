//! What is written to standard output, and how much of it.

use std::time::Duration;

use super::args::{FormatArg, RootArg, report::ReportArgs};
use crate::{
    aggregate::request_summary::By,
    export::{fields::Shape, text::Lines},
};

/// What goes to standard output.
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
    /// How.
    pub format: Format,
    /// Which cycles.
    pub lines: Lines,
    /// Only requests of at least this many nanoseconds in place of cycles.
    pub slower_than_ns: Option<u64>,
    /// What requests of all processes are put together by at the end.
    pub by: Option<By>,
    /// What of JSON lines is written.
    pub shape: Shape,
    /// Whether all counters are shown at the end.
    pub verbose: bool,
}

impl Reports {
    /// What these flags mean.
    pub(super) fn resolve(args: &ReportArgs, format: Format) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let &ReportArgs { quiet, min_pause, interval, slower_than, by, brief, ref fields, verbose } = args;
        let lines =
            Lines { min_pause_ns: min_pause.map_or(0, nanos), interval_ns: interval.map(nanos), none: quiet };
        let shape = Shape { brief, fields: fields.clone() };
        Self { format, lines, slower_than_ns: slower_than.map(nanos), by: by.map(By::from), shape, verbose }
    }

    /// Whether lines come while the run goes on.
    pub fn streams(&self) -> bool {
        !self.lines.none
    }
}

/// What is said of accounts of memory where JSON lines are written.
const MEMORY_ACCOUNT: &str =
    "--memory-account has no effect on JSON lines: use gctrace heap --by memory --format jsonl";
/// What is said of filters where nothing is filtered.
pub(super) const FILTERS: &str = "--thread, --focus, --endpoint, --hide and --app-only change profiles only: add --flamegraph, --pprof or another one";

/// What is said of allocation that is counted and not shown.
const ALLOC: &str = "--alloc: no output shows allocation; add --requests, --format jsonl, --pprof, --prometheus, or --flamegraph FILE --flamegraph-of alloc";

/// Flags that change nothing in this run.
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
    /// Whether any output shows time off the CPU.
    pub(super) shows_wall: bool,
    /// Whether any output shows native frames.
    pub(super) shows_native: bool,
    /// Whether `--flamegraph-of` was given.
    pub(super) graph_of: bool,
    /// Whether any filter of profiles was given.
    pub(super) filters: bool,
    /// Whether there is any profile.
    pub(super) shows_profiles: bool,
    /// Whether there is a flame graph, as a picture or as lines.
    pub(super) shows_graphs: bool,
    /// Whether anything shows what `--flamegraph-of` chooses.
    pub(super) shows_measure: bool,
    /// Whether cycles without a line were chosen, and there are no lines.
    pub(super) min_pause_of_none: bool,
    pub(super) alloc: bool,
    /// Whether any output shows allocation.
    pub(super) shows_alloc: bool,
    /// Whether it was said how often is sent.
    pub(super) push_interval: bool,
    /// Whether anything is sent from time to time.
    pub(super) pushes: bool,
    /// Whether a token was given as a flag.
    pub(super) token: bool,
    /// Whether sample sets are sent.
    pub(super) sends_sets: bool,
    /// Whether a header of sample sets was chosen.
    pub(super) dialect: bool,
    /// Whether there are sample sets.
    pub(super) makes_sets: bool,
    /// Whether pods are to be named, and no folder has their names.
    pub(super) no_pods: bool,
}

impl Idle {
    /// What to say about them.
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
                !self.text && self.slower_than,
                "--slower-than changes text only: JSON lines have duration_ns of each request",
            ),
            (!self.text && self.by, "--by changes text only: JSON lines have each request"),
            (
                self.wall && !self.shows_wall,
                "--wall: no output shows time off the CPU; add --flamegraph, --pprof, --firefox, --folded, --top-lines or --speedscope",
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
                "--kube-root: there is no folder var/log/pods below it; pods have no names until there is",
            ),
        ]
        .into_iter()
        .filter_map(|(idle, note)| idle.then_some(note))
        .collect()
    }
}
