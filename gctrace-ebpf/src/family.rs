//! Families of programs: where the stages of a stack find their scratch and each other.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_get_smp_processor_id},
    maps::{Array, ProgramArray},
};
use gctrace_common::config::PROBE_SLOTS;

use crate::{
    maps::{
        PROBE_SCRATCH, PROBE_STAGES, RETURN_STAGES, SWITCH_SCRATCH, SWITCH_STAGES, TICK_SCRATCH, TICK_STAGES,
        add_one, take_one,
    },
    scratch::Scratch,
};

/// A family of programs: programs of one type, which never interrupt each other in the middle of a stack.
pub trait Family {
    /// The stages.
    fn stages() -> &'static ProgramArray;
    /// Claims a scratch of this CPU; `None` if none is free.
    fn claim() -> Option<*mut Scratch>;
    /// The scratch that this thread has claimed, in a later stage, and its slot.
    fn claimed() -> Option<(u32, *mut Scratch)>;
    /// Releases it.
    fn release(scratch: *mut Scratch);
}

/// Perf events: they run in interrupt context, one at a time on a CPU.
pub struct Tick;

impl Family for Tick {
    #[inline(always)]
    fn stages() -> &'static ProgramArray {
        &TICK_STAGES
    }

    #[inline(always)]
    fn claim() -> Option<*mut Scratch> {
        TICK_SCRATCH.get_ptr_mut(slot_of_cpu(1, 0))
    }

    #[inline(always)]
    fn claimed() -> Option<(u32, *mut Scratch)> {
        at(&TICK_SCRATCH, slot_of_cpu(1, 0))
    }

    #[inline(always)]
    fn release(_scratch: *mut Scratch) {}
}

/// Tracepoints of futexes: they run with preemption disabled, and take a stack in the context of a thread.
pub struct Switch;

impl Family for Switch {
    #[inline(always)]
    fn stages() -> &'static ProgramArray {
        &SWITCH_STAGES
    }

    #[inline(always)]
    fn claim() -> Option<*mut Scratch> {
        SWITCH_SCRATCH.get_ptr_mut(slot_of_cpu(1, 0))
    }

    #[inline(always)]
    fn claimed() -> Option<(u32, *mut Scratch)> {
        at(&SWITCH_SCRATCH, slot_of_cpu(1, 0))
    }

    #[inline(always)]
    fn release(_scratch: *mut Scratch) {}
}

/// The raw tracepoints at and after a switch of threads: they run with interrupts disabled, one after the other, and share the scratch of the
/// tracepoints of futexes, which no switch interrupts.
pub struct Return;

impl Family for Return {
    #[inline(always)]
    fn stages() -> &'static ProgramArray {
        &RETURN_STAGES
    }

    #[inline(always)]
    fn claim() -> Option<*mut Scratch> {
        Switch::claim()
    }

    #[inline(always)]
    fn claimed() -> Option<(u32, *mut Scratch)> {
        Switch::claimed()
    }

    #[inline(always)]
    fn release(_scratch: *mut Scratch) {}
}

/// Uprobes: a program stays on its CPU, but other programs can run there in between.
pub struct Probe;

impl Family for Probe {
    #[inline(always)]
    fn stages() -> &'static ProgramArray {
        &PROBE_STAGES
    }

    #[inline(always)]
    fn claim() -> Option<*mut Scratch> {
        for slot in 0..PROBE_SLOTS {
            let scratch = PROBE_SCRATCH.get_ptr_mut(slot_of_cpu(PROBE_SLOTS, slot))?;
            // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned. A claimer that reads 1 after adding is
            // the only one: every other claim would have added to it.
            unsafe {
                let busy = &raw mut (*scratch).busy;
                add_one(busy);
                if busy.read_volatile() == 1 {
                    (*scratch).owner = bpf_get_current_pid_tgid();
                    return Some(scratch);
                }
                take_one(busy);
            }
        }
        None
    }

    #[inline(always)]
    fn claimed() -> Option<(u32, *mut Scratch)> {
        let me = bpf_get_current_pid_tgid();
        for slot in 0..PROBE_SLOTS {
            let slot = slot_of_cpu(PROBE_SLOTS, slot);
            let scratch = PROBE_SCRATCH.get_ptr_mut(slot)?;
            // SAFETY: as above.
            if unsafe { (&raw const (*scratch).owner).read_volatile() } == me {
                return Some((slot, scratch));
            }
        }
        None
    }

    #[inline(always)]
    fn release(scratch: *mut Scratch) {
        // SAFETY: as above.
        unsafe {
            (&raw mut (*scratch).owner).write_volatile(0);
            take_one(&raw mut (*scratch).busy);
        }
    }
}

#[inline(always)]
fn slot_of_cpu(slots: u32, slot: u32) -> u32 {
    // SAFETY: a plain helper call.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    cpu * slots + slot
}

#[inline(always)]
fn at(scratches: &Array<Scratch>, slot: u32) -> Option<(u32, *mut Scratch)> {
    Some((slot, scratches.get_ptr_mut(slot)?))
}
