//! Selects the processes whose calls are counted.

use super::failure::MallocFailure;
use crate::{
    cli::MallocSettings,
    discover::{Subject, descendants, present},
    heap::{HeapFailure, looked_at},
};

/// Maximum number of processes at a time: each has its own maps and programs in the kernel.
const MOST: usize = 16;

/// The selected Ruby processes that run now, and why explicitly named ones are not among them.
pub(super) fn select(settings: &MallocSettings) -> Result<(Vec<u32>, Vec<MallocFailure>), MallocFailure> {
    let MallocSettings { selection, cache_dir, .. } = settings;
    if let Some(pid) = selection.single() {
        return Ok((vec![pid], Vec::new()));
    }
    let wanted = present(selection).map_err(MallocFailure::Selection)?;
    let found = looked_at(wanted.into_iter().collect(), cache_dir.as_deref());
    let rubies: Vec<u32> = found.processes.iter().map(|process| process.pid).collect();
    if rubies.len() > MOST {
        return Err(MallocFailure::TooMany { found: rubies.len(), most: MOST });
    }
    let mut failures = Vec::new();
    for miss in found.misses {
        let Subject::Pid(pid) = miss.subject else { continue };
        // In a process tree that contains a Ruby, processes that are not Ruby are not reported.
        let with_descendants = selection.pids.contains(&pid);
        let in_tree = || with_descendants && descendants(pid).iter().any(|below| rubies.contains(below));
        if selection.named().any(|named| named == pid) && !in_tree() {
            let failure = HeapFailure::NotRuby { pid, reason: miss.reason, denied: miss.denied };
            failures.push(failure.into());
        }
    }
    if rubies.is_empty() && failures.is_empty() {
        return Err(MallocFailure::Nobody(selection.sought()));
    }
    Ok((rubies, failures))
}
