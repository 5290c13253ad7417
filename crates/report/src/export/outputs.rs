//! The outputs of a run: each receives everything, and a failing output never affects the others.

use super::{ExportError, Exporter};
use crate::{console::say, ledger::UserCounts};

/// Maximum number of distinct failures reported.
const FAILURES: usize = 100;

/// The exporters of a run, in the order in which they are called.
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

    /// Calls each exporter. Failures are reported.
    pub fn hand(&mut self, mut hand: impl FnMut(&mut dyn Exporter) -> Result<(), ExportError>) {
        for exporter in &mut self.exporters {
            let Err(error) = hand(exporter.as_mut()) else { continue };
            if error.is_broken_pipe() {
                self.stdout_closed = true;
                continue;
            }
            self.failed += 1;
            // Every distinct failure is reported once, even if it repeats.
            let error = error.to_string();
            if self.failures.len() < FAILURES && !self.failures.contains(&error) {
                say(&format!("gctrace: {error}"));
                self.failures.push(error);
            }
        }
    }

    /// Calls each exporter with something that cannot fail.
    pub fn tell(&mut self, mut tell: impl FnMut(&mut dyn Exporter)) {
        self.exporters.iter_mut().for_each(|exporter| tell(exporter.as_mut()));
    }

    /// Adds the counters of the exporters, and the number of failures.
    pub fn add_counts(&self, counts: &mut UserCounts) {
        counts.pipeline.export_failures += self.failed;
        for exporter in &self.exporters {
            exporter.add_counts(counts);
        }
    }

    /// Whether the reader of standard output has closed it.
    pub fn stdout_closed(&self) -> bool {
        self.stdout_closed
    }

    /// Whether any exporter has reached its limit.
    pub fn is_any_full(&self) -> bool {
        self.exporters.iter().any(|exporter| exporter.is_full())
    }

    /// The failures to write, as reported.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }
}
