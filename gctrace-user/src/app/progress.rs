//! The progress line of a run.

use std::{
    io::{self, IsTerminal as _},
    time::{Duration, Instant},
};

use crate::{cli::Settings, console, pipeline::Pipeline, words::plural};

/// A line on the terminal that shows that the run is progressing, if no data is written to the terminal.
pub(super) struct Progress {
    enabled: bool,
    /// Whether the start is over; until then the line shows what the start is doing.
    pub(super) ready: bool,
    last: Option<Instant>,
}

impl Progress {
    pub(super) fn new(settings: &Settings) -> Self {
        let data_on_terminal = settings.data_on_stdout() && io::stdout().is_terminal();
        Self { enabled: io::stderr().is_terminal() && !data_on_terminal, ready: false, last: None }
    }

    /// Writes the line, if the last one is old enough.
    pub(super) fn show(&mut self, deadline: Option<Instant>, pipeline: &Pipeline) {
        let now = Instant::now();
        if !self.enabled
            || !self.ready
            || self.last.is_some_and(|last| now - last < Duration::from_millis(500))
        {
            return;
        }
        self.last = Some(now);
        let counts = pipeline.counts();
        let left = deadline.map_or_else(
            || "Ctrl-C to finish".to_owned(),
            |deadline| format!("{} s left", deadline.saturating_duration_since(now).as_secs() + 1),
        );
        console::progress(&format!(
            "gctrace: {} in {}, {left}",
            plural(counts.pipeline.cycles, "cycle"),
            plural(counts.pipeline.processes, "process")
        ));
    }
}
