//! Reports `RUBY_GC_*` variables of traced processes that have no effect, once for each service: misspelled names,
//! names of other releases, and values that Ruby silently ignores.

use std::collections::HashSet;

use gctrace_tunemygc::{
    printable::printable_part,
    tune::{Series, environment::unheeded},
};

use super::{ExportError, Exporter};
use crate::{
    ledger::UserCounts,
    model::{Process, seen::Seen},
};

/// Maximum number of pairs of service and variable remembered; nothing more is reported after that.
const MAX_SHOWN: usize = 1000;

/// Reports variables that have no effect.
pub struct Environment {
    shown: HashSet<(String, String)>,
    /// Number of refused variables: Ruby never reads their names.
    refused: u64,
    say: fn(&str),
}

impl Environment {
    /// An exporter that reports through `say`.
    pub fn new(say: fn(&str)) -> Self {
        Self { shown: HashSet::new(), refused: 0, say }
    }
}

impl Exporter for Environment {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let Seen::Process { .. } = seen else { return Ok(()) };
        self.refused += process.gc_env_refused.len() as u64;
        let series = Series::parse(&process.image.version.to_string());
        let variables = series.zip(process.gc_env.as_ref());
        for found in variables.map_or_else(Vec::new, |(series, variables)| unheeded(variables, series)) {
            let key = (process.origin.service.clone(), found.variable.clone());
            if self.shown.len() >= MAX_SHOWN || !self.shown.insert(key) {
                continue;
            }
            // This text comes from the traced process.
            let text = printable_part(&format!("{}={}", found.variable, found.value), 100);
            let (pid, service) = (process.pid, &process.origin.service);
            (self.say)(&format!("gctrace: pid {pid} ({service}): {text} does nothing: {}", found.reason));
        }
        if let Some(first) = process.gc_env_refused.first() {
            let key = (process.origin.service.clone(), String::new());
            if self.shown.len() < MAX_SHOWN && self.shown.insert(key) {
                let (pid, service, count) =
                    (process.pid, &process.origin.service, process.gc_env_refused.len());
                let first = printable_part(first, 60);
                (self.say)(&format!(
                    "gctrace: pid {pid} ({service}): ignored {count} environment variables with names that Ruby never reads, such as {first}"
                ));
            }
        }
        Ok(())
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        counts.environment.variables_refused += self.refused;
    }
}
