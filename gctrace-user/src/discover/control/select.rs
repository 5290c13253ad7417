//! Processes that are selected individually: by pid, with their descendants, or by name.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use procfs::ProcError;

use super::{Control, ControlEvent};
use crate::{
    discover::{
        decision,
        mappings::{self, ExecutableMapping},
    },
    host::{
        called,
        proc::{is_running, is_zombie},
        proc_root,
    },
};

/// Interval at which the names of known Ruby processes are read again: programs change them once they are up.
const RENAMED: Duration = Duration::from_secs(1);
/// The same interval for all processes: forked children take other names than their parents.
const ALL_RENAMED: Duration = Duration::from_secs(5);
/// Maximum number of Ruby processes with other names whose names are read again.
const CANDIDATES: usize = 4096;
/// Interval of checks whether the last selected process has ended.
pub(super) const END_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which each selected process is checked, in case the kernel skipped the event of its exit.
const SWEEP: Duration = Duration::from_secs(5);

/// State of individually selected processes.
#[derive(Debug, Default)]
pub(super) struct Listed {
    /// Pids that the user named, unless they do not exist or can never have a Ruby.
    roots: Vec<u32>,
    /// Whether one of them is not a Ruby and has no Ruby descendant yet.
    pub(super) waits: bool,
    /// Whether the end of all of them has been reported.
    ended: bool,
    swept: Option<Instant>,
    /// Ruby processes that have had other names so far.
    candidates: HashSet<u32>,
    /// Processes that have one of the names, whose descendants are yet to be selected.
    named: Vec<u32>,
    /// Whether many processes are being inspected.
    scans: bool,
    asked: Option<Instant>,
    scanned: Option<Instant>,
}

/// Why a process is not a Ruby.
struct NoRuby {
    reason: String,
    /// Whether it may start one, or become one.
    passes: bool,
    /// Whether it may be one that cannot be read.
    denied: bool,
}

/// Whether `interval` has passed since `last`; if so, restarts it.
pub(super) fn due(last: &mut Option<Instant>, interval: Duration) -> bool {
    let now = Instant::now();
    let due = last.is_none_or(|last| now - last >= interval);
    if due {
        *last = Some(now);
    }
    due
}

impl Control {
    /// Selects the processes that the user named by pid.
    pub(super) fn begin_pids(&mut self) -> Result<(), String> {
        // Of a thread id: its events have the id of the process, so none would be seen.
        let threads: Vec<_> =
            self.selection.named().filter_map(|pid| Some((pid, decision::not_a_process(pid)?))).collect();
        let is_thread = |pid: u32| threads.iter().any(|(thread, _)| *thread == pid);
        for (pid, reason) in threads.clone() {
            self.tell(ControlEvent::NotRuby { pid, reason, denied: false });
        }
        let roots: Vec<u32> =
            self.selection.pids.clone().into_iter().filter(|pid| !is_thread(*pid)).collect();
        let mut trees = self.select_trees(&roots)?;
        while !trees.is_empty() {
            let (root, members) = trees.remove(0);
            self.begin_tree(root, &members, &trees);
        }
        for pid in self.selection.only_pids.clone().into_iter().filter(|pid| !is_thread(*pid)) {
            self.probes.select_alone(pid).map_err(|e| e.to_string())?;
            match self.inspect_or_why(pid) {
                Ok(()) => self.listed.roots.push(pid),
                Err(NoRuby { reason, denied, .. }) => {
                    self.probes.forget(pid);
                    self.tell(ControlEvent::NotRuby { pid, reason, denied });
                }
            }
        }
        Ok(())
    }

    /// Inspects a selected process and its descendants. `others` are the trees that are yet to be inspected.
    fn begin_tree(&mut self, root: u32, members: &BTreeSet<u32>, others: &[(u32, BTreeSet<u32>)]) {
        let why = self.inspect_or_why(root);
        let mut rubies = usize::from(why.is_ok());
        for &pid in members.iter().filter(|&&pid| pid != root) {
            rubies += usize::from(self.inspect_or_why(pid).is_ok());
        }
        let over = rubies == 0 && why.as_ref().is_err_and(|why| !why.passes);
        for &pid in members {
            let elsewhere = || others.iter().any(|(_, members)| members.contains(&pid));
            // An exit before the selection is not reported.
            if (over && !elsewhere()) || !is_running(pid) {
                self.probes.forget(pid);
            }
        }
        if !over {
            self.listed.roots.push(root);
        }
        if let (Err(NoRuby { mut reason, passes, denied }), 0) = (why, rubies) {
            if members.len() > 1 {
                reason.push_str("; none of its descendants is a Ruby process, either");
            }
            if passes {
                reason.push_str("; Ruby processes that it starts are traced");
                self.listed.waits = true;
            }
            self.tell(ControlEvent::NotRuby { pid: root, reason, denied });
        }
    }

    /// Selects processes and their descendants; returns these for each of them. Each is selected before its children are listed, and from then on
    /// the kernel selects its new children, so none is missed. Processes are listed for all trees at once: a host may have thousands of both.
    fn select_trees(&mut self, roots: &[u32]) -> Result<Vec<(u32, BTreeSet<u32>)>, String> {
        let mut selected = BTreeSet::new();
        let mut new: Vec<u32> = roots.to_vec();
        let mut all = Children::new();
        while !new.is_empty() {
            for pid in new {
                self.probes.select(pid).map_err(|e| e.to_string())?;
                selected.insert(pid);
            }
            for (parent, listed) in children() {
                all.entry(parent).or_default().extend(listed);
            }
            new = below(&all, roots);
            new.retain(|pid| *pid != self.own_pid && !selected.contains(pid));
        }
        let tree = |&root: &u32| {
            let members = below(&all, &[root]).into_iter().filter(|pid| *pid != self.own_pid);
            (root, members.chain([root]).collect())
        };
        Ok(roots.iter().map(tree).collect())
    }

    /// Inspects a selected process; `Err`: why it is not a Ruby.
    fn inspect_or_why(&mut self, pid: u32) -> Result<(), NoRuby> {
        let (reason, passes, denied) = match mappings_of_program(pid) {
            Err(error) => {
                let (reason, denied) = decision::unreadable(&error);
                (reason, false, denied)
            }
            Ok(mappings) => match self.inspect_mappings(pid, &mappings) {
                Ok(()) => return Ok(()),
                Err(_) if mappings.is_empty() && is_zombie(pid) => {
                    (decision::ZOMBIE.to_owned(), false, false)
                }
                Err(Some(unopened)) if unopened.is_program_of(pid) => (unopened.to_string(), true, true),
                Err(_) => (decision::no_ruby(mappings.len()), !mappings.is_empty(), false),
            },
        };
        Err(NoRuby { reason, passes, denied })
    }

    /// Handles a newly seen Ruby process: selects it and its descendants if it has one of the names.
    pub(super) fn consider_name(&mut self, pid: u32) {
        if self.selection.names.is_empty() || self.wants(pid) {
            return;
        }
        match called::is_any(pid, &self.selection.names) {
            Some(true) => {}
            Some(false) => {
                self.probes.name_was_read(pid);
                if !is_running(pid) {
                    // Its exit may have been reported before, and then nothing else removes the entry.
                    self.probes.name_was_not_read(pid);
                } else if self.listed.candidates.len() < CANDIDATES {
                    self.listed.candidates.insert(pid);
                }
                return;
            }
            None => return,
        }
        self.listed.candidates.remove(&pid);
        if let Err(error) = self.probes.select(pid) {
            return log::warn!("pid {pid}: {error}");
        }
        self.listed.named.push(pid);
        if !self.listed.scans {
            self.select_named();
        }
    }

    /// Runs `scan`, which inspects many processes, and selects the descendants of those that have one of the names once, at its end.
    pub(super) fn scanning(&mut self, scan: impl FnOnce(&mut Self)) {
        self.listed.scans = true;
        scan(self);
        self.listed.scans = false;
        self.select_named();
    }

    /// Selects the descendants of processes that were found to have one of the names.
    fn select_named(&mut self) {
        let roots = std::mem::take(&mut self.listed.named);
        let trees = match self.select_trees(&roots) {
            Ok(trees) => trees,
            Err(error) => return log::warn!("selecting the descendants of named processes: {error}"),
        };
        let members: BTreeSet<u32> = trees.into_iter().flat_map(|(_, members)| members).collect();
        for member in members {
            self.listed.candidates.remove(&member);
            if !is_running(member) {
                self.probes.forget(member);
            } else if !roots.contains(&member) {
                self.inspect(member);
            }
        }
    }

    /// Reads names again, at intervals.
    pub(super) fn ask_names(&mut self) {
        if self.selection.names.is_empty() || !due(&mut self.listed.asked, RENAMED) {
            return;
        }
        let mut pids: BTreeSet<u32> = self.listed.candidates.drain().filter(|&pid| is_running(pid)).collect();
        if due(&mut self.listed.scanned, ALL_RENAMED)
            && let Ok(all) = proc_root::pids()
        {
            let is = |pid| called::is_any(pid, &self.selection.names) == Some(true);
            let named = |pid: &u32| *pid != self.own_pid && is(*pid);
            pids.extend(all.filter(named));
        }
        self.scanning(|control| {
            for pid in pids {
                if called::is_any(pid, &control.selection.names) == Some(true) {
                    if !control.wants(pid) {
                        control.inspect(pid);
                    }
                } else {
                    control.listed.candidates.insert(pid);
                }
            }
        });
    }

    /// Reports, once, that the last selected process has ended, if no other can be selected.
    pub(super) fn tell_end(&mut self) {
        if self.listed.ended || self.selection.is_open() || self.listed.roots.is_empty() {
            return;
        }
        if due(&mut self.listed.swept, SWEEP) {
            for pid in self.probes.followed() {
                if !is_running(pid) {
                    self.probes.forget(pid);
                }
            }
        }
        if !self.probes.follows_any() {
            self.listed.ended = true;
            self.tell(ControlEvent::Ended { pids: self.listed.roots.clone() });
        }
    }
}

/// The children of each process, by pid.
type Children = HashMap<u32, BTreeSet<u32>>;

/// The current descendants of a process.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    below(&children(), &[root])
}

/// The children of all processes now.
fn children() -> Children {
    let mut children = Children::new();
    match proc_root::pids() {
        Ok(pids) => {
            for pid in pids {
                if let Ok(stat) = proc_root::process(pid).and_then(|process| process.stat()) {
                    children.entry(stat.ppid as u32).or_default().insert(pid);
                }
            }
        }
        Err(error) => log::warn!("listing {}: {error}", proc_root::root().display()),
    }
    children
}

/// The descendants of these processes, without themselves.
fn below(children: &Children, roots: &[u32]) -> Vec<u32> {
    let mut seen: HashSet<u32> = roots.iter().copied().collect();
    let mut found = Vec::new();
    let mut open = roots.to_vec();
    while let Some(pid) = open.pop() {
        for &child in children.get(&pid).into_iter().flatten() {
            // Pids may be reused while they are listed, so there may be a cycle.
            if seen.insert(child) {
                found.push(child);
                open.push(child);
            }
        }
    }
    found
}

/// The mappings of a process. In the middle of an exec it has a program, but none of its mappings: it is read again then.
fn mappings_of_program(pid: u32) -> Result<Vec<ExecutableMapping>, ProcError> {
    let has_program = || std::fs::read_link(proc_root::path(pid, "exe")).is_ok();
    mapped_by_then(|| mappings::of_process(pid), has_program)
}

/// Reads until there is something, at most some milliseconds, while there is a program.
fn mapped_by_then<T, E>(
    mut read: impl FnMut() -> Result<Vec<T>, E>,
    has_program: impl Fn() -> bool,
) -> Result<Vec<T>, E> {
    const TRIES: u32 = 5;
    const PAUSE: Duration = Duration::from_millis(2);
    for _ in 1..TRIES {
        let mapped = read()?;
        if !mapped.is_empty() || !has_program() {
            return Ok(mapped);
        }
        std::thread::sleep(PAUSE);
    }
    read()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All generations, each process once, even if reused pids form a cycle.
    #[test]
    fn generations() {
        let children = [(1, vec![2, 3]), (3, vec![4]), (4, vec![1, 5]), (9, vec![8])];
        let children: Children =
            children.into_iter().map(|(parent, of)| (parent, of.into_iter().collect())).collect();
        let found = |roots: &[u32]| below(&children, roots).into_iter().collect::<BTreeSet<_>>();
        assert_eq!(found(&[1]), BTreeSet::from([2, 3, 4, 5]));
        assert!(found(&[7]).is_empty());
        // Of several, also if one is a descendant of another.
        assert_eq!(found(&[1, 9, 7]), BTreeSet::from([2, 3, 4, 5, 8]));
        assert_eq!(found(&[1, 3]), BTreeSet::from([2, 4, 5]));
    }

    /// This test's own child is among its descendants.
    #[test]
    fn own_child() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(descendants(std::process::id()).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A process in the middle of an exec has its program later; one that never has mappings, such as a kernel thread, is not awaited.
    #[test]
    fn in_the_middle_of_an_exec() {
        let mut reads = 0;
        let mut read = |at| {
            reads += 1;
            Ok::<_, ()>(if reads >= at { vec![reads] } else { Vec::new() })
        };
        assert_eq!(mapped_by_then(|| read(3), || true), Ok(vec![3]));
        assert_eq!(mapped_by_then(|| read(u32::MAX), || false), Ok(Vec::new()));
        assert_eq!(mapped_by_then(|| read(u32::MAX), || true), Ok(Vec::new()));
        assert_eq!(reads, 3 + 1 + 5);
        assert_eq!(mapped_by_then(|| Err::<Vec<u32>, _>("gone"), || true), Err("gone"));
    }
}
