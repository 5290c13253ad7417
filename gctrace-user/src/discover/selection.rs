//! The selection of processes for a run.

use std::{ffi::OsString, path::PathBuf};

/// Which processes are traced: the union of what the fields select.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Every Ruby process.
    pub all: bool,
    /// These processes and their descendants.
    pub pids: Vec<u32>,
    /// These processes without their descendants.
    pub only_pids: Vec<u32>,
    /// Programs with these names, and their descendants.
    pub names: Vec<String>,
    /// Processes in these cgroups or their descendants.
    pub cgroups: Vec<PathBuf>,
    /// Processes of these systemd units.
    pub units: Vec<String>,
    /// Processes in containers with these ids, id prefixes, or names.
    pub containers: Vec<String>,
    /// This command, started by gctrace, and its descendants.
    pub command: Option<Vec<OsString>>,
}

impl Selection {
    /// Processes that the user named by pid.
    pub fn named(&self) -> impl Iterator<Item = u32> {
        self.pids.iter().chain(&self.only_pids).copied()
    }

    /// The criteria that can select processes not named by pid, worded like the flags, for messages.
    pub fn sought(&self) -> String {
        let Self { all, names, cgroups, units, containers, .. } = self;
        let paths = cgroups.iter().map(|path| format!("--cgroup {}", path.display()));
        let texts = [("--name", names), ("--unit", units), ("--container", containers)];
        let texts = texts
            .into_iter()
            .flat_map(|(flag, texts)| texts.iter().map(move |text| format!("{flag} {text}")));
        all.then(|| "--all-ruby".to_owned())
            .into_iter()
            .chain(texts)
            .chain(paths)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Whether nothing is selected.
    pub fn is_empty(&self) -> bool {
        !self.is_open() && self.pids.is_empty() && self.only_pids.is_empty()
    }

    /// Whether cgroups are part of the selection.
    pub fn has_groups(&self) -> bool {
        let any = !self.cgroups.is_empty() || !self.containers.is_empty() || !self.units.is_empty();
        any && !self.all
    }

    /// Whether processes other than the named ones and their descendants can be selected. A run that is not open
    /// ends when the last selected process has ended.
    pub fn is_open(&self) -> bool {
        self.all || self.command.is_some() || !self.names.is_empty() || self.has_groups()
    }

    /// Whether only a command and its descendants are selected.
    pub fn is_of_command(&self) -> bool {
        let others = Self { command: None, ..self.clone() };
        self.command.is_some() && others.is_empty()
    }

    /// Whether the kernel needs a list of individual processes, besides cgroups.
    pub fn lists_processes(&self) -> bool {
        !self.pids.is_empty()
            || !self.only_pids.is_empty()
            || !self.names.is_empty()
            || self.command.is_some()
    }

    /// Whether a process is selected by a pid: its own, or that of an ancestor. `parent`: the parent of a process, if known; those of orphans are
    /// not.
    pub fn has_pid_of(&self, pid: u32, parent: impl Fn(u32) -> Option<u32>) -> bool {
        /// More than the depth of any tree of processes that is not made to be deep.
        const DEPTH: usize = 64;
        let line = std::iter::successors(Some(pid), |pid| parent(*pid)).take(DEPTH);
        self.only_pids.contains(&pid)
            || (!self.pids.is_empty() && line.into_iter().any(|pid| self.pids.contains(&pid)))
    }

    /// The only process that can be traced, if there is just one: its probes then do not affect any other.
    pub fn single(&self) -> Option<u32> {
        match self.only_pids.as_slice() {
            [pid] if self.pids.is_empty() && !self.is_open() => Some(*pid),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A selection of process trees ends with the last process; names and groups can always match another process.
    #[test]
    fn openness() {
        let none = Selection::default();
        assert!(none.is_empty() && !none.is_open());
        let tree = Selection { pids: vec![5], ..Selection::default() };
        assert!(!tree.is_empty() && !tree.is_open() && tree.lists_processes());
        assert_eq!(tree.single(), None);
        let alone = Selection { only_pids: vec![5], ..Selection::default() };
        assert_eq!(alone.single(), Some(5));
        let both = Selection { names: vec!["puma".into()], ..alone };
        assert!(both.is_open() && both.single().is_none());
        let command = Selection { command: Some(vec!["ruby".into()]), ..Selection::default() };
        assert!(command.is_open() && command.is_of_command() && !both.is_of_command());
        assert!(!Selection { only_pids: vec![5], ..command.clone() }.is_of_command());
        assert!(!Selection { all: true, ..command }.is_of_command());
        let unit = Selection { units: vec!["puma.service".into()], ..Selection::default() };
        assert!(unit.is_open() && unit.has_groups() && !unit.lists_processes());
    }

    /// Descendants of a process named by `--pid` are selected by it, those of `--only-pid` are not.
    #[test]
    fn descendants() {
        let selection = Selection { pids: vec![5], only_pids: vec![9], ..Selection::default() };
        let parent = |pid| match pid {
            7 => Some(6),
            6 => Some(5),
            10 => Some(9),
            11 => Some(11),
            _ => None,
        };
        let selected: Vec<u32> = (1..=12).filter(|pid| selection.has_pid_of(*pid, parent)).collect();
        assert_eq!(selected, [5, 6, 7, 9]);
    }
}
