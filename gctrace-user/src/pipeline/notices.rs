//! Notices of a run about processes, besides its reports.

use super::Pipeline;
use crate::{
    console::say,
    export::program,
    host::{called, environ, proc},
    model::Process,
};

/// Maximum number of processes that a notice names.
const NAMED: usize = 3;

/// Traced processes, with the names of their programs.
pub struct Traced(Vec<(u32, String)>);

impl Traced {
    /// The notice that some of them are still running although the traced command has ended; `None`: none is.
    pub fn left_behind(&self) -> Option<String> {
        self.left(proc::is_running)
    }

    fn left(&self, runs: impl Fn(u32) -> bool) -> Option<String> {
        let left: Vec<_> = self.0.iter().filter(|(pid, _)| runs(*pid)).collect();
        let named = &left[..left.len().min(NAMED)];
        let list: Vec<_> = named.iter().map(|(pid, name)| format!("pid {pid} ({name})")).collect();
        let pids: Vec<_> = named.iter().map(|(pid, _)| pid.to_string()).collect();
        let (subject, object) = match left.len() {
            0 => return None,
            1 => ("1 traced process still runs".to_owned(), "it"),
            n if n > NAMED => (format!("{n} traced processes still run"), "these"),
            n => (format!("{n} traced processes still run"), "them"),
        };
        let more = left.len() - named.len();
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        Some(format!(
            "{subject}: {}{more}; gctrace --pid {} goes on with {object}",
            list.join(", "),
            pids.join(",")
        ))
    }
}

impl Pipeline {
    /// The currently traced processes, sorted by pid.
    pub fn traced_now(&self) -> Traced {
        let mut all: Vec<_> =
            self.traced.values().map(|traced| (traced.process.pid, program(&traced.process))).collect();
        all.sort_unstable();
        Traced(all)
    }

    /// Sets whether there are outputs besides the lines: the run goes on for them if the reader of the lines is gone.
    #[must_use]
    pub fn writing_others(self, others: bool) -> Self {
        Self { outputs: self.outputs.of_run(others), ..self }
    }

    /// Reports that the off-CPU times of a process do not cover all its threads.
    pub(super) fn say_of_threads(&self, process: &Process) {
        if self.asleep.is_some()
            && let Some(environ) = environ::read(process.pid)
            && called::shares_native_threads(Some(process.image.version), &environ)
        {
            say(&format!(
                "gctrace: pid {}: {}, Ruby {}: --wall does not see threads while they have no native thread (RUBY_MN_THREADS); --gvl reports \
                 how long they were without the GVL",
                process.pid,
                program(process),
                process.image.version
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Up to three processes are named, with the command to continue; those that have ended are not.
    #[test]
    fn left_behind() {
        let of = |pids: &[u32]| Traced(pids.iter().map(|pid| (*pid, format!("d{pid}.rb"))).collect());
        let said = |pids| of(pids).left(|pid| pid != 9);
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[9]), None);
        assert_eq!(
            said(&[7, 9]).unwrap(),
            "1 traced process still runs: pid 7 (d7.rb); gctrace --pid 7 goes on with it"
        );
        assert_eq!(
            said(&[7, 8]).unwrap(),
            "2 traced processes still run: pid 7 (d7.rb), pid 8 (d8.rb); gctrace --pid 7,8 goes on with them"
        );
        assert_eq!(
            said(&[1, 2, 3, 4, 5, 9]).unwrap(),
            "5 traced processes still run: pid 1 (d1.rb), pid 2 (d2.rb), pid 3 (d3.rb), and 2 more; gctrace --pid 1,2,3 goes on with these"
        );
    }
}
