//! The processes that a selection covers at one moment, for commands that do not follow them.

use std::collections::BTreeSet;

use super::{Selection, cgroups, descendants};
use crate::host::{called, proc_root};

/// The processes that a selection covers now, whether they are Rubies or not.
///
/// # Errors
///
/// Processes cannot be listed, or cgroups are selected and none is mounted.
pub(crate) fn present(selection: &Selection) -> Result<BTreeSet<u32>, String> {
    let mut found: BTreeSet<u32> = selection.named().collect();
    let mut trees = selection.pids.clone();
    if selection.all || !selection.names.is_empty() {
        let listed = proc_root::pids();
        let pids = listed.map_err(|error| format!("listing {}: {error}", proc_root::root().display()))?;
        if selection.all {
            found.extend(pids);
        } else {
            trees.extend(pids.filter(|&pid| called::is_any(pid, &selection.names) == Some(true)));
        }
    }
    for &root in &trees {
        found.insert(root);
        found.extend(descendants(root));
    }
    if selection.has_groups() {
        found.extend(cgroups::members(selection)?);
    }
    found.remove(&proc_root::own_pid());
    Ok(found)
}
