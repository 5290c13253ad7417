//! Processes that are selected by name, unit, cgroup or container.

use std::collections::BTreeSet;

use crate::discover::{Miss, Selection, Subject, Survey, present};

/// Pids of processes that run now and are not named by pid; an error in words. `None`: no such flag was given.
pub(super) struct Sought(Option<Result<BTreeSet<u32>, String>>);

impl Sought {
    /// Looks for them.
    pub(super) fn of(selection: &Selection) -> Self {
        let asked = selection.is_open() && !selection.all;
        Self(asked.then(|| present(&Selection { pids: Vec::new(), ..selection.clone() })))
    }

    /// What to inspect: the processes found, besides those that are named by pid.
    pub(super) fn with_named(&self, selection: &Selection) -> Selection {
        let found = self.0.iter().flatten().flatten();
        let pids = selection.pids.iter().chain(found).copied().collect();
        Selection { all: selection.all, pids, ..Selection::default() }
    }

    /// A group may contain programs other than Ruby, which nobody asked about; but one without any Ruby is a miss.
    pub(super) fn judge(self, selection: &Selection, survey: &mut Survey) {
        let Some(found) = self.0 else { return };
        survey.misses.retain(|miss| match miss.subject {
            Subject::Pid(pid) => miss.denied || selection.pids.contains(&pid),
            _ => true,
        });
        let (reason, denied) = match found {
            Err(reason) => (reason, true),
            Ok(found) if survey.processes.iter().any(|process| found.contains(&process.pid)) => return,
            Ok(_) => ("no Ruby process of it runs now".to_owned(), false),
        };
        survey.misses.push(Miss { subject: Subject::Sought(selection.sought()), reason, denied });
    }
}
