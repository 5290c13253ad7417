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
            // Those that cannot be read may be Rubies, and are misses themselves.
            Ok(found) if survey.misses.iter().any(|miss| is_denied(miss, &found)) => return,
            Ok(_) => ("no Ruby process of it runs now".to_owned(), false),
        };
        survey.misses.push(Miss { subject: Subject::Sought(selection.sought()), reason, denied });
    }
}

fn is_denied(miss: &Miss, found: &BTreeSet<u32>) -> bool {
    miss.denied && matches!(miss.subject, Subject::Pid(pid) if found.contains(&pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group without any Ruby is a miss. What is no Ruby in it is none, and one whose processes cannot be read may have a Ruby.
    #[test]
    fn groups() {
        let selection = Selection { units: vec!["a.service".to_owned()], ..Selection::default() };
        let misses = |denied, pid| {
            let miss = Miss { subject: Subject::Pid(pid), reason: "why".to_owned(), denied };
            let mut survey = Survey { misses: vec![miss], ..Survey::default() };
            Sought(Some(Ok(BTreeSet::from([7, 8])))).judge(&selection, &mut survey);
            survey.misses.into_iter().map(|miss| miss.subject).collect::<Vec<_>>()
        };
        let sought = Subject::Sought("--unit a.service".to_owned());
        assert_eq!(misses(false, 7), std::slice::from_ref(&sought));
        assert_eq!(misses(true, 7), [Subject::Pid(7)]);
        assert_eq!(misses(true, 9), [Subject::Pid(9), sought]);
    }
}
