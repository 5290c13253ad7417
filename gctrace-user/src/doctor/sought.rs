//! Processes that are selected by name, unit, cgroup or container.

use std::collections::BTreeSet;

use crate::discover::{Miss, Selection, Subject, Survey, present};

/// For each such flag: what it selects, and the pids of the processes that run now; an error in words.
pub(super) struct Sought(Vec<(Selection, Result<BTreeSet<u32>, String>)>);

impl Sought {
    /// Looks for them.
    pub(super) fn of(selection: &Selection) -> Self {
        if selection.all {
            return Self(Vec::new());
        }
        let Selection { names, units, cgroups, containers, .. } = selection;
        let none = Selection::default;
        let names = names.iter().map(|name| Selection { names: vec![name.clone()], ..none() });
        let units = units.iter().map(|unit| Selection { units: vec![unit.clone()], ..none() });
        let cgroups = cgroups.iter().map(|path| Selection { cgroups: vec![path.clone()], ..none() });
        let containers = containers.iter().map(|id| Selection { containers: vec![id.clone()], ..none() });
        let each = names.chain(units).chain(cgroups).chain(containers);
        Self(each.map(|one| (one.clone(), present(&one))).collect())
    }

    /// What to inspect: the processes found, besides those that are named by pid.
    pub(super) fn with_named(&self, selection: &Selection) -> Selection {
        let found = self.0.iter().filter_map(|(_, found)| found.as_ref().ok()).flatten();
        let pids = selection.pids.iter().chain(found).copied().collect();
        Selection { all: selection.all, pids, ..Selection::default() }
    }

    /// A group may contain programs other than Ruby, which nobody asked about; but one without any Ruby is a miss.
    pub(super) fn judge(self, selection: &Selection, survey: &mut Survey) {
        if self.0.is_empty() {
            return;
        }
        survey.misses.retain(|miss| match miss.subject {
            Subject::Pid(pid) => miss.denied || selection.pids.contains(&pid),
            _ => true,
        });
        for (sought, found) in self.0 {
            let (reason, denied) = match found {
                Err(reason) => (reason, true),
                Ok(found) if survey.processes.iter().any(|process| found.contains(&process.pid)) => continue,
                // Those that cannot be read may be Rubies, and are misses themselves.
                Ok(found) if survey.misses.iter().any(|miss| is_denied(miss, &found)) => continue,
                Ok(_) => ("no Ruby process of it runs now".to_owned(), false),
            };
            survey.misses.push(Miss { subject: Subject::Sought(sought.sought()), reason, denied });
        }
    }
}

fn is_denied(miss: &Miss, found: &BTreeSet<u32>) -> bool {
    miss.denied && matches!(miss.subject, Subject::Pid(pid) if found.contains(&pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group without any Ruby is a miss, also beside one that has some. What is no Ruby in it is none, and one whose processes cannot be read may
    /// have a Ruby.
    #[test]
    fn groups() {
        let unit = |name: &str| Selection { units: vec![name.to_owned()], ..Selection::default() };
        let misses = |denied, pid| {
            let miss = Miss { subject: Subject::Pid(pid), reason: "why".to_owned(), denied };
            let mut survey = Survey { misses: vec![miss], ..Survey::default() };
            let groups = [("a.service", [7, 8]), ("b.service", [9, 10])];
            let groups = groups.map(|(name, pids)| (unit(name), Ok(BTreeSet::from(pids))));
            Sought(groups.to_vec()).judge(&unit("a.service"), &mut survey);
            survey.misses.into_iter().map(|miss| miss.subject).collect::<Vec<_>>()
        };
        let [a, b] = ["--unit a.service", "--unit b.service"].map(|flags| Subject::Sought(flags.to_owned()));
        assert_eq!(misses(false, 7), [a.clone(), b.clone()]);
        assert_eq!(misses(true, 7), [Subject::Pid(7), b.clone()]);
        assert_eq!(misses(true, 11), [Subject::Pid(11), a, b]);
    }
}
