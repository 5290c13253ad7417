//! The changes between two recordings as a flame graph: rows are as wide as in the second recording, red where the share of a row's
//! self time grew, and blue where it shrank. Shares are relative to each recording, so these may differ in length and in load.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use inferno::flamegraph::{
    self, Direction, Options, TextTruncateDirection,
    color::{BackgroundColor, Color},
};

use super::{
    super::{
        Graph, Grouping, Measure,
        label_tree::{LabelTree, Rows},
    },
    MIN_PART, legend, theme, titles,
};
use crate::{
    aggregate::recording::{Filter, Limits, Recording},
    model::{
        Process,
        seen::{Observer, Seen},
        stack::ThreadState,
    },
    words::{percent, plural},
};

/// Its title.
const TITLE: &str = "CPU time: what has changed from A to B";
/// Milliseconds per unit of a line (nanosecond).
const FACTOR: f64 = 1e-6;

/// Stacks of one recording.
#[derive(Debug)]
pub(in crate::export) struct Comparable(Recording);

impl Default for Comparable {
    fn default() -> Self {
        Self(Recording::new(false, Limits::default(), Filter::default()))
    }
}

impl Observer for Comparable {
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        self.0.see(process, seen);
    }
}

impl Comparable {
    /// Samples are counted from this time on, `CLOCK_MONOTONIC` nanoseconds.
    pub(in crate::export) fn began(&mut self, ts_ns: u64) {
        self.0.began_ns = Some(ts_ns);
    }

    /// CPU time by path, total CPU time (both in nanoseconds), and number of samples.
    fn paths(&self) -> (BTreeMap<String, u64>, u64, u64) {
        let graph = Graph { grouping: Grouping::None, of: Measure::Cpu, ..Graph::default() };
        let tree = LabelTree::of(&self.0, graph, Rows::Comparable);
        let mut paths = BTreeMap::new();
        let Ok(()) = tree.visit(|path, weight| {
            paths.insert(path.to_owned(), weight);
            Ok::<_, std::convert::Infallible>(())
        });
        let running = self.0.samples.iter().filter(|(key, _)| key.state == ThreadState::Running);
        (paths, tree.total(), running.map(|(_, sum)| sum.samples).sum())
    }
}

/// Writes the graph, with its roots at the top or at the bottom.
pub(in crate::export) fn write(
    a: &Comparable,
    b: &Comparable,
    roots_on_top: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let ((mut before, a_ns, a_samples), (after, b_ns, b_samples)) = (a.paths(), b.paths());
    if a_ns == 0 || b_ns == 0 {
        let which = if a_ns == 0 { "A" } else { "B" };
        return out.write_all(super::picture(&[&format!("There are no CPU samples in {which}.")]).as_bytes());
    }
    // A's time scaled to the total of B.
    let scaled = |ns: u64| ns as f64 * b_ns as f64 / a_ns as f64;
    let mut lines = Vec::new();
    for (path, ns) in &after {
        lines.push(format!("{path} {:.0} {ns}", scaled(before.remove(path).unwrap_or(0))));
    }
    let gone: u64 = before.values().sum();
    lines.sort_unstable();
    let mut options = Options::default();
    // Rows without a change are almost white.
    options.bgcolors = Some(BackgroundColor::Flat(Color { r: 222, g: 224, b: 228 }));
    options.text_truncate_direction = TextTruncateDirection::Right;
    TITLE.clone_into(&mut options.title);
    let lines_below = titles::lines(&format!(
        "{} in A, {b_samples} in B, each as a part of its own recording · {} of A's time is in stacks that B \
         does not have: compare B with A to see these",
        plural(a_samples, "sample"),
        percent(gone, a_ns)
    ));
    options.subtitle = lines_below.first().cloned();
    "ms of B".clone_into(&mut options.count_name);
    options.factor = FACTOR;
    options.min_width = MIN_PART * 100.0;
    "Frame:".clone_into(&mut options.name_type);
    if roots_on_top {
        options.direction = Direction::Inverted;
    }
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
    let svg = super::percent::exact(&String::from_utf8(svg).map_err(io::Error::other)?, FACTOR);
    let entries = [
        (Color { r: 255, g: 130, b: 130 }, "its own time grew"),
        (Color { r: 130, g: 130, b: 255 }, "its own time shrank"),
        (Color { r: 250, g: 250, b: 250 }, "as before"),
    ];
    let titled = titles::added(&svg, TITLE, &lines_below);
    let svg = legend::with(&titled.svg, &entries, titled.lower);
    out.write_all(theme::added(&svg, &titled.rules).as_bytes())
}
