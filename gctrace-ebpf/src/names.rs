//! Processes that are selected by name. The name of the main thread at the start of the program is compared here, so that a program that lives for
//! milliseconds is selected in time; other names (script, title) are read by user space, which says here which processes it has looked at.

use aya_ebpf::helpers::bpf_get_current_comm;
use gctrace_common::{
    config::{NAME_READ, NAME_UNREAD, SELECT_NAMES},
    stats::Counter,
};

use crate::{
    filter::tgid_tid,
    maps::{ASKED, NAMES, NO_EXIST, closed, config, count},
};

/// Whether processes are selected by name.
#[inline(always)]
pub fn select() -> bool {
    config().select & SELECT_NAMES != 0
}

/// Whether the current thread has one of the names.
#[inline(always)]
pub fn has_one() -> bool {
    select() && bpf_get_current_comm().is_ok_and(|comm| NAMES.get_ptr(&comm).is_some())
}

/// The current process, which is not selected, has begun a cycle: it is a Ruby, whatever its name.
#[inline(always)]
pub fn filtered() {
    let (tgid, _) = tgid_tid();
    if select() && ASKED.get_ptr(&tgid).is_none() {
        // User space may just have read the name: that entry must stay.
        if ASKED.insert(&tgid, &NAME_UNREAD, NO_EXIST).is_err() && ASKED.get_ptr(&tgid).is_none() {
            count(Counter::ProcessMapFull);
        }
    }
}

/// A process forked: the child has its parent's name.
#[inline(always)]
pub fn forked(parent: u32, child: u32) {
    // SAFETY: the value is copied out at once.
    if unsafe { ASKED.get(&parent).copied() } == Some(NAME_READ)
        && ASKED.insert(&child, &NAME_READ, 0).is_err()
    {
        count(Counter::ProcessMapFull);
    }
}

/// A process ended its program.
#[inline(always)]
pub fn ended(tgid: u32, selected: bool) {
    if !select() {
        return;
    }
    // SAFETY: the value is copied out at once.
    let state = unsafe { ASKED.get(&tgid).copied() };
    // Threads that end at the same time on two CPUs both see that no thread lives; one of them removes the entry.
    if state.is_some() && ASKED.remove(&tgid).is_ok() && state == Some(NAME_UNREAD) && !selected && !closed()
    {
        count(Counter::NamesUnread);
    }
}
