//! The fallback probes: intervals of GC work, for images whose event sites are not known.

use aya_ebpf::{helpers::bpf_ktime_get_ns, programs::ProbeContext};
use gctrace_common::{event::WorkPhase, stats::Counter};

use crate::{
    emit,
    filter::{Admitted, admit},
    maps::{PHASES, closed, count},
    names,
};

/// A phase begins.
#[inline(always)]
pub fn begin(ctx: &ProbeContext) {
    let Some((admitted, now)) = admitted(ctx) else { return };
    count(Counter::PhaseBegins);
    let key = key(&admitted);
    let phase = usize::from(admitted.field);
    if phase >= WorkPhase::ALL.len() {
        return;
    }
    if let Some(begins) = PHASES.get_ptr_mut(&key) {
        // SAFETY: a map value pointer; only this thread uses this key; the index was bounded.
        unsafe { (*begins)[phase] = now };
        return;
    }
    let mut begins = [0; WorkPhase::ALL.len()];
    begins[phase] = now;
    // A full LRU map evicts an entry; its phase is counted as an orphan.
    let _evicted = PHASES.insert(&key, &begins, 0);
}

/// A phase ends.
#[inline(always)]
pub fn end(ctx: &ProbeContext) {
    let Some((admitted, now)) = admitted(ctx) else { return };
    count(Counter::PhaseEnds);
    let phase = usize::from(admitted.field);
    let begin = match PHASES.get_ptr_mut(&key(&admitted)) {
        // SAFETY: as above.
        Some(begins) if phase < WorkPhase::ALL.len() => unsafe {
            let begin = (*begins)[phase];
            (*begins)[phase] = 0;
            begin
        },
        _ => 0,
    };
    if begin == 0 {
        return count(Counter::PhaseOrphan);
    }
    emit::phase(&admitted, phase as u32, begin, now);
}

#[inline(always)]
fn admitted(ctx: &ProbeContext) -> Option<(Admitted, u64)> {
    // SAFETY: a plain helper call.
    let now = unsafe { bpf_ktime_get_ns() };
    if closed() {
        return None;
    }
    match admit(ctx) {
        Ok(admitted) => Some((admitted, now)),
        Err(Counter::Filtered) => {
            names::filtered();
            None
        }
        Err(_) => None,
    }
}

#[inline(always)]
fn key(admitted: &Admitted) -> u64 {
    u64::from(admitted.tgid) << 32 | u64::from(admitted.tid)
}
