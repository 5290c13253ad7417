//! Which processes run a known image: entered by user space when it finds the mapping and by the first probe hit, inherited by
//! forked children, invalidated at exec and removed at exit.

use gctrace_common::{config::RubyEntry, stats::Counter};

use aya_ebpf::helpers::bpf_ktime_get_ns;

use crate::maps::{EXECS, RUBIES, THREAD_CONTEXTS, UNWOUND, add as add_to, count};

/// A process hit a probe of an image, and the hit shows the image's bias. User space may have determined an entry's bias before an exec
/// and stored it after the exec.
#[inline(always)]
pub fn add(tgid: u32, image: u32, bias: u64) {
    // SAFETY: a map value pointer, valid while the program runs. Counters of an unknown entry are not used.
    let entry = RUBIES.get_ptr_mut(&tgid).map(|entry| unsafe { &mut *entry });
    let (execs, gvl_ns) = match entry {
        Some(entry) if entry.known != 0 => return entry.place(image, bias),
        Some(entry) => (entry.execs, entry.gvl_ns),
        None => (0, 0),
    };
    insert(tgid, &RubyEntry { image, bias, execs, gvl_ns, known: 1, ..RubyEntry::default() });
}

/// A process forked; the child runs the same image at the same place.
#[inline(always)]
pub fn forked(parent: u32, child: u32) {
    // SAFETY: the value is copied out at once.
    let Some(entry) = (unsafe { RUBIES.get(&parent).copied() }) else { return };
    insert(child, &entry.forked());
}

/// A process replaced its program.
#[inline(always)]
pub fn execed(tgid: u32) {
    let _was_not_there = UNWOUND.remove(&tgid);
    let _was_not_there = THREAD_CONTEXTS.remove(&tgid);
    // SAFETY: the value is copied out at once.
    let Some(entry) = (unsafe { RUBIES.get(&tgid).copied() }) else { return };
    insert(tgid, &RubyEntry { execs: entry.execs.wrapping_add(1), ..RubyEntry::default() });
}

/// The program that a process runs.
#[derive(Clone, Copy, Default)]
pub struct Program {
    /// How often the process has replaced its program.
    pub execs: u32,
    /// Whether its GVL was watched.
    pub gvl: bool,
    /// When the program was started, nanoseconds; 0: unknown.
    pub begun_ns: u64,
}

/// The program that a process runs.
#[inline(always)]
pub fn program(tgid: u32) -> Program {
    // SAFETY: the value is read at once.
    let entry = unsafe { RUBIES.get(&tgid) };
    let (execs, gvl) = entry.map_or((0, false), |entry| (entry.execs, entry.gvl_ns != 0));
    // SAFETY: the value is copied out at once.
    let begun_ns = unsafe { EXECS.get(&tgid).copied() }.unwrap_or_default();
    Program { execs, gvl, begun_ns }
}

/// A process, whether followed or not, has started a new program.
#[inline(always)]
pub fn begun(tgid: u32) {
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    let _cannot_fail_for_an_lru_map = EXECS.insert(&tgid, &now, 0);
}

/// The first or the last thread of a process has ended: another process may get its number.
#[inline(always)]
pub fn gone(tgid: u32) {
    let _was_not_there = EXECS.remove(&tgid);
}

/// A process ended.
#[inline(always)]
pub fn exited(tgid: u32) {
    let _was_not_there = UNWOUND.remove(&tgid);
    let _was_not_there = THREAD_CONTEXTS.remove(&tgid);
    let _was_not_there = RUBIES.remove(&tgid);
}

/// The VM of a process may have freed or moved objects. `step`: see [`epoch_step`](gctrace_common::stack::epoch_step).
#[inline(always)]
pub fn collected(tgid: u32, step: u64) {
    if let Some(entry) = RUBIES.get_ptr_mut(&tgid) {
        // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned.
        unsafe { add_to(&raw mut (*entry).epoch, step) };
    }
}

/// The entry of a process whose image is known.
#[inline(always)]
pub fn known(tgid: u32) -> Option<*mut RubyEntry> {
    let entry = RUBIES.get_ptr_mut(&tgid)?;
    // SAFETY: a map value pointer, valid while the program runs.
    if unsafe { (*entry).known } == 0 { None } else { Some(entry) }
}

#[inline(always)]
fn insert(tgid: u32, entry: &RubyEntry) {
    if RUBIES.insert(&tgid, entry, 0).is_err() {
        count(Counter::RubyMapFull);
    }
}
