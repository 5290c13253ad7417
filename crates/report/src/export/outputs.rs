//! The outputs of a run: each receives everything, and a failing output never affects the others.

use super::{ExportError, Exporter};
use crate::{console::say, ledger::UserCounts};

/// Different failures that are reported.
const FAILURES: usize = 100;

/// The exporters of a run, in the order in which they see things and end.
pub struct Outputs {
    exporters: Vec<Box<dyn Exporter>>,
    failures: Vec<String>,
    failed: u64,
    stdout_closed: bool,
}

impl Outputs {
    /// Outputs with these exporters.
    pub fn new(exporters: Vec<Box<dyn Exporter>>) -> Self {
        Self { exporters, failures: Vec::new(), failed: 0, stdout_closed: false }
    }

    /// Hands something to each of them. What fails is reported.
    pub fn hand(&mut self, mut hand: impl FnMut(&mut dyn Exporter) -> Result<(), ExportError>) {
        for exporter in &mut self.exporters {
            let Err(error) = hand(exporter.as_mut()) else { continue };
            if error.is_broken_pipe() {
                self.stdout_closed = true;
                continue;
            }
            self.failed += 1;
            // Each output that fails is named; one that fails repeatedly is named once.
            let error = error.to_string();
            if self.failures.len() < FAILURES && !self.failures.contains(&error) {
                say(&format!("gctrace: {error}"));
                self.failures.push(error);
            }
        }
    }

    /// Hands something that cannot fail to each of them.
    pub fn tell(&mut self, mut tell: impl FnMut(&mut dyn Exporter)) {
        self.exporters.iter_mut().for_each(|exporter| tell(exporter.as_mut()));
    }

    /// Adds what they have counted, and how often one of them failed.
    pub fn add_counts(&self, counts: &mut UserCounts) {
        counts.pipeline.export_failures += self.failed;
        for exporter in &self.exporters {
            exporter.add_counts(counts);
        }
    }

    /// Whether the reader of standard output is gone.
    pub fn stdout_closed(&self) -> bool {
        self.stdout_closed
    }

    /// Whether one of them has all that it may have.
    pub fn is_any_full(&self) -> bool {
        self.exporters.iter().any(|exporter| exporter.is_full())
    }

    /// What could not be written.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }
}
