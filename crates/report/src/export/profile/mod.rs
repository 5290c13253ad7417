//! Profiles: recorded stacks and pauses, in the formats of other tools. One recording serves all formats; each file is
//! written at the end of the run.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io::{self, Write},
    path::PathBuf,
    rc::Rc,
};

use super::{ExportError, Exporter, file, sink::Sink};
use crate::{
    aggregate::recording::{Filter, Limits, Moment, ProcessIndex, Recording},
    clock::{WallClock, monotonic_ns},
    ledger::{Ledger, UserCounts},
    model::{
        Process,
        gvl::GvlGap,
        seen::{Observer as _, Seen},
    },
    words::data_size,
};

mod callgrind;
mod firefox;
mod flamegraph;
mod folded;
mod hottest;
mod kept;
pub(super) mod label;
mod label_tree;
mod malloc;
mod measure;
mod perfetto;
pub(super) mod pprof;
mod rows;
mod speedscope;
#[cfg(test)]
mod tests;
mod top_lines;
mod waits;
#[cfg(test)]
pub(super) use tests::a_sample;

pub(super) use flamegraph::{Comparable, differential};
pub use hottest::HotMethod;
pub(super) use hottest::of_all as hottest;
pub use kept::{Keeper, Kept};
pub use label_tree::Grouping;
pub use malloc::MallocProfile;
pub use measure::Measure;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `profile.proto`, gzipped.
    Pprof,
    /// Callgrind's format.
    Callgrind,
    /// Collapsed stacks.
    Folded(Graph),
    /// A flame graph as SVG.
    FlameGraph(Graph),
    /// A table of source lines.
    TopLines(Measure),
    /// speedscope's JSON.
    Speedscope,
    /// The Firefox Profiler's processed format, gzipped if the file is called `.gz`.
    Firefox,
    /// A Perfetto trace.
    Perfetto,
}

/// What a flame graph shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// The root of each stack.
    pub grouping: Grouping,
    /// What the width of a row represents.
    pub of: Measure,
    /// Whether a row of Ruby code is the line being executed instead of the method.
    pub lines: bool,
    /// Whether a flame graph has its roots at the top, where a scrolling window shows them first. Otherwise they are at the bottom.
    pub roots_on_top: bool,
}

impl Format {
    fn is_timeline(self) -> bool {
        matches!(self, Self::Speedscope | Self::Firefox | Self::Perfetto)
    }

    /// How to open the file.
    fn opened_with(self, path: &std::path::Display<'_>) -> String {
        match self {
            Self::Pprof => format!("go tool pprof -top {path}"),
            Self::Callgrind => format!("kcachegrind {path}, or callgrind_annotate {path}"),
            Self::Folded(Graph { of: Measure::Alloc | Measure::Malloc | Measure::MallocLive, .. }) => {
                "lines `root;caller;leaf BYTES`, for flame graph tools".to_owned()
            }
            Self::Folded(_) => "lines `root;caller;leaf NANOSECONDS`, for flame graph tools".to_owned(),
            Self::FlameGraph(_) => "open it in a browser".to_owned(),
            Self::TopLines(_) => "lines of Ruby code, as text".to_owned(),
            Self::Speedscope => "open it at https://www.speedscope.app".to_owned(),
            Self::Firefox => "open it at https://profiler.firefox.com".to_owned(),
            Self::Perfetto => "open it at https://ui.perfetto.dev".to_owned(),
        }
    }

    /// The measure that it shows, if it shows exactly one.
    pub fn measure(self) -> Option<Measure> {
        match self {
            Self::Folded(graph) | Self::FlameGraph(graph) => Some(graph.of),
            Self::TopLines(of) => Some(of),
            Self::Pprof | Self::Callgrind | Self::Speedscope | Self::Firefox | Self::Perfetto => None,
        }
    }

    /// Whether it shows samples.
    pub fn has_samples(self) -> bool {
        match self {
            Self::Perfetto => false,
            Self::Folded(_) | Self::FlameGraph(_) | Self::TopLines(_) => {
                self.measure().is_some_and(Measure::is_sampled)
            }
            Self::Pprof | Self::Callgrind | Self::Speedscope | Self::Firefox => true,
        }
    }

    /// Whether it shows the stacks under which objects are allocated.
    pub fn has_allocation(self) -> bool {
        match self {
            Self::Pprof | Self::Speedscope | Self::Firefox | Self::Perfetto => true,
            Self::Callgrind => false,
            Self::Folded(_) | Self::FlameGraph(_) | Self::TopLines(_) => {
                self.measure() == Some(Measure::Alloc)
            }
        }
    }

    /// Whether it shows memory over time.
    pub fn has_memory(self) -> bool {
        matches!(self, Self::Firefox | Self::Perfetto)
    }

    /// Whether it shows what each thread does with the GVL over time.
    pub fn has_gvl_states(self) -> bool {
        matches!(self, Self::Firefox | Self::Perfetto)
    }
}

/// What formats write in addition to the recording.
struct Context<'a> {
    ledger: &'a Ledger,
    clock: WallClock,
    began_ns: u64,
    ended_ns: u64,
    /// Whether the GVL is traced.
    gvl: bool,
    /// Whether threads off their CPU are recorded.
    wall: bool,
    /// A description of what filters dropped.
    filtered: Option<String>,
    /// The account to write instead of the ledger's, if the profile does not count events (`gctrace malloc`).
    said: Option<String>,
}

impl Context<'_> {
    /// What was counted, lost and filtered, in one line.
    fn account(&self) -> String {
        if let Some(said) = &self.said {
            return said.clone();
        }
        let filtered = self.filtered.as_ref().map_or_else(String::new, |text| format!("; {text}"));
        format!("gctrace {}: {}{filtered}", super::VERSION, self.ledger.summary())
    }
}

/// The exporters that record and write these files. They must be used together, in this order. With `hottest`, the
/// hottest methods are written there at the end. `gvl`, `wall`: whether the GVL is traced, and whether threads off
/// their CPU are recorded. All outputs show only what the filter passes.
pub fn exporters(
    files: &[(PathBuf, Format)],
    filter: &Filter,
    hottest: Option<Sink>,
    (gvl, wall): (bool, bool),
    clock: WallClock,
) -> Result<Vec<Box<dyn Exporter>>, ExportError> {
    if files.is_empty() && hottest.is_none() {
        return Ok(Vec::new());
    }
    for (path, _) in files {
        file::check_path(path)?;
    }
    let timeline = files.iter().any(|(_, format)| format.is_timeline());
    let traces = files.iter().any(|(_, format)| matches!(format, Format::Pprof));
    let recording = Recording::new(timeline, Limits::default(), filter.clone()).with_traces(traces);
    let recording = Rc::new(RefCell::new(recording));
    let mut exporters: Vec<Box<dyn Exporter>> = vec![Box::new(Recorder { recording: recording.clone() })];
    if let Some(sink) = hottest {
        let (recording, out) = (recording.clone(), io::BufWriter::new(sink));
        exporters.push(Box::new(hottest::Hottest { recording, out }));
    }
    for (path, format) in files {
        let (path, recording) = (path.clone(), recording.clone());
        exporters.push(Box::new(Output { path, format: *format, recording, clock, gvl, wall }));
    }
    Ok(exporters)
}

/// Adds the counters of a recording.
fn add_counts(recording: &Recording, counts: &mut UserCounts) {
    counts.profiles.profile_samples_early += recording.early_samples;
    counts.profiles.profile_events_early += recording.early_events;
    counts.profiles.profile_endpoints_unknown += recording.unresolved;
    counts.profiles.profile_traces_left_out += recording.traces_left_out();
    recording.filtered().add_to(&mut counts.profiles);
}

/// Fills the recording.
struct Recorder {
    recording: Rc<RefCell<Recording>>,
}

impl Exporter for Recorder {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.recording.borrow_mut().see(process, seen);
        Ok(())
    }

    fn outside(&mut self, process: &Process, seen: Seen<'_>) {
        self.recording.borrow_mut().outside(process, seen);
    }

    fn began(&mut self, ts_ns: u64) {
        self.recording.borrow_mut().began_ns = Some(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.recording.borrow_mut().closed_ns = Some(ts_ns);
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        gap.add_to(&mut self.recording.borrow_mut().gvl_gaps);
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        add_counts(&self.recording.borrow(), counts);
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        let recording = self.recording.borrow();
        if recording.merged > 0 {
            crate::console::say(&format!(
                "gctrace: {} samples are in the profiles without their stack: there were too many different ones",
                recording.merged
            ));
        }
        if recording.unresolved > 0 {
            crate::console::say(&format!(
                "gctrace: {} samples and events in the profiles are of requests whose end was not seen; their endpoint is (unknown)",
                recording.unresolved
            ));
        }
        if let Some(text) = recording.filtered().text(recording.filter()) {
            crate::console::say(&format!("gctrace: profiles: {text}"));
        }
        Ok(())
    }
}

/// Writes one file.
struct Output {
    path: PathBuf,
    format: Format,
    recording: Rc<RefCell<Recording>>,
    clock: WallClock,
    gvl: bool,
    wall: bool,
}

impl Exporter for Output {
    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        let recording = self.recording.borrow();
        let Self { clock, gvl, wall, .. } = *self;
        let (began_ns, ended_ns) = recording.span(monotonic_ns());
        let filtered = recording.filtered().text(recording.filter());
        let context = Context { ledger, clock, began_ns, ended_ns, gvl, wall, filtered, said: None };
        let mut left_out = 0;
        file::write_atomically(&self.path, |out| {
            let gz = self.path.extension().is_some_and(|extension| extension == "gz");
            left_out = write(self.format, gz, &recording, &context, out)?;
            Ok(())
        })
        .map_err(|source| ExportError::File { path: self.path.clone(), source })?;
        let path = self.path.display();
        let size = std::fs::metadata(&self.path)
            .map_or_else(|_| String::new(), |file| format!(" ({})", data_size(file.len())));
        let idle = match (self.format.has_samples(), recording.filtered().samples_seen.count, wall) {
            (true, 0, false) => {
                "; no samples: no traced thread was on a CPU (--wall shows what they wait for)"
            }
            (true, 0, true) => "; no samples: no traced thread was on a CPU or came back to one",
            _ => "",
        };
        crate::console::say(&format!(
            "gctrace: wrote {path}{size}: {}{idle}",
            self.format.opened_with(&path)
        ));
        if left_out > 0 {
            crate::console::say(&format!(
                "gctrace: {path} holds the beginning of the run; {left_out} later samples and events are left out"
            ));
        }
        Ok(())
    }
}

/// Writes a recording; returns the number of samples and events that had to be left out. `gz`: formats with optional
/// compression are compressed.
fn write(
    format: Format,
    gz: bool,
    recording: &Recording,
    context: &Context<'_>,
    out: &mut dyn Write,
) -> io::Result<u64> {
    match format {
        Format::Pprof => {
            let &Context { clock, began_ns, ended_ns, .. } = context;
            let head = pprof::Head {
                comment: context.account(),
                clock,
                began_ns,
                ended_ns,
                gvl: true,
                alloc: pprof::Allocation::Too,
                wall: context.wall,
                labels: pprof::Labels::All,
            };
            pprof::write(recording, &head, &|_| true, out).map(|()| 0)
        }
        Format::Callgrind => callgrind::write(recording, context, out).map(|()| 0),
        Format::Folded(graph) => folded::write(recording, graph, out).map(|()| 0),
        Format::FlameGraph(graph) => flamegraph::write(recording, graph, context, out).map(|()| 0),
        Format::TopLines(of) => top_lines::write(recording, of, out).map(|()| 0),
        Format::Perfetto => perfetto::write(recording, context, out),
        Format::Speedscope => speedscope::write(recording, context, out),
        Format::Firefox => firefox::write(recording, context, gz, out),
    }
}

/// Samples of each thread (whatever its names) in chronological order.
fn by_thread(recording: &Recording, samples: &[Moment]) -> BTreeMap<(ProcessIndex, u32), Vec<Moment>> {
    let mut threads: BTreeMap<(ProcessIndex, u32), Vec<Moment>> = BTreeMap::new();
    for sample in samples {
        let (thread, _) = recording.thread_facts(sample.key.thread);
        threads.entry((thread.process, thread.tid)).or_default().push(*sample);
    }
    for samples in threads.values_mut() {
        samples.sort_by_key(|sample| sample.ts_ns);
    }
    threads
}
