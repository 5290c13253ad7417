//! `RUBY_GC_*` variables of traced processes that do nothing, told once for each service: misspelt ones, ones of other releases, and
//! values that Ruby ignores without a word.

use std::collections::HashSet;

use gctrace_collector::tune::{Series, environment::unheeded};

use super::{ExportError, Exporter, ProcessEnd};
use crate::{
    ledger::Ledger,
    model::{GcCycle, GcState, Process},
};

/// Services and variables that are remembered; then nothing more is told.
const MAX_TOLD: usize = 1000;

/// Tells.
pub struct Environment {
    told: HashSet<(String, String)>,
    say: fn(&str),
}

impl Environment {
    /// Tells by `say`.
    pub fn new(say: fn(&str)) -> Self {
        Self { told: HashSet::new(), say }
    }
}

impl Exporter for Environment {
    fn process(&mut self, process: &Process, _: Option<&GcState>) -> Result<(), ExportError> {
        let Some(series) = Series::parse(&process.image.version.to_string()) else { return Ok(()) };
        for found in unheeded(&process.gc_env, series) {
            let key = (process.origin.service.clone(), found.variable.clone());
            if self.told.len() >= MAX_TOLD || !self.told.insert(key) {
                continue;
            }
            // Both are what somebody has put into an environment.
            let text = format!("{}={}", found.variable, found.value);
            let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(100).collect();
            let (pid, service) = (process.pid, &process.origin.service);
            (self.say)(&format!("gctrace: pid {pid} ({service}): {text} does nothing: {}", found.reason));
        }
        Ok(())
    }

    fn cycle(&mut self, _: &Process, _: &GcCycle) -> Result<(), ExportError> {
        Ok(())
    }

    fn ended(&mut self, _: &Process, _: &ProcessEnd) -> Result<(), ExportError> {
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
}
