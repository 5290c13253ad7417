//! Where an image lies in a process, and the state of its VM, read from its memory.

use std::{fs::File, os::unix::fs::FileExt as _, time::Duration};

use super::mappings::ExecutableMapping;
use crate::{
    elf::LoadSegment,
    enrich::clock::monotonic_ns,
    ruby::{plan::AttachPlan, prove},
};

/// Actual minus stated addresses of a mapping.
pub(super) fn bias(mapping: &ExecutableMapping, segments: &[LoadSegment]) -> Option<u64> {
    let page = rustix::param::page_size() as u64;
    segments
        .iter()
        .filter(|segment| segment.executable)
        .find(|segment| {
            let first = segment.offset.0 / page * page;
            (first..segment.offset.0 + segment.file_size).contains(&mapping.offset)
        })
        .map(|segment| {
            let stated = mapping.offset.wrapping_sub(segment.offset.0).wrapping_add(segment.address.0);
            mapping.start.wrapping_sub(stated)
        })
}

/// How often a state is read again when the VM was busy.
const STATE_TRIES: u32 = 5;

/// Reads the state of a VM from its memory, between two GC pauses, and proves the layout on it. `None`: the VM is not set
/// up yet, is collecting, or the process is gone; its first GC event will be proven instead.
pub(super) fn read_state(
    pid: u32,
    bias: u64,
    plan: &AttachPlan,
) -> Result<Option<(u64, Vec<u8>)>, prove::FailedProof> {
    let Ok(memory) = File::open(format!("/proc/{pid}/mem")) else { return Ok(None) };
    let word = |address: u64| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, address).ok()?;
        Some(u64::from_le_bytes(bytes)).filter(|&word| word != 0)
    };
    let read = || {
        let vm = word(bias.wrapping_add(plan.config.vm_ptr))?;
        let objspace = word(vm.wrapping_add(u64::from(plan.config.vm_objspace)))?;
        prove::read_spans(&plan.layout, objspace, |address, buffer| {
            memory.read_exact_at(buffer, address).is_ok()
        })
    };
    let during_gc = 1 << plan.analysis.vm.during_gc_bit;
    let mut failed = None;
    for _ in 0..STATE_TRIES {
        let ts_ns = monotonic_ns();
        let (Some(first), Some(second)) = (read(), read()) else { return Ok(None) };
        if !prove::is_set_up(&plan.layout, &first) {
            return Ok(None);
        }
        // Two equal reads outside a GC: what changes in between is only what an allocation changes.
        if !prove::is_outside_gc(&plan.layout, &first, during_gc)
            || !prove::no_gc_between(&plan.layout, &first, &second)
        {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        match prove::outside_gc(&plan.layout, &second) {
            // `GC.stat` depends on the thread that asks; outside an event there is none.
            Ok(()) if plan.layout.per_thread => return Ok(None),
            Ok(()) => return Ok(Some((ts_ns, second))),
            // Read while the program runs, so a failure must repeat to count.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(None), Err)
}
