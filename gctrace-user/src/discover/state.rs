//! The location of an image in a process, and the state of its VM, read from its memory.

use std::{cell::Cell, fs::File, io, os::unix::fs::FileExt as _, time::Duration};

use crate::{
    clock::monotonic_ns,
    host::proc_root,
    ruby::{Modular, live_check, plan::AttachPlan},
};

/// Maximum number of attempts to read a state while the VM is busy.
const STATE_TRIES: u32 = 5;

/// The result of reading a VM from its memory.
#[derive(Debug)]
pub enum VmState {
    /// Read between two GC pauses and proven: time and snapshot data.
    Proven(u64, Vec<u8>),
    /// Proven; but what `GC.stat` returns depends on the calling thread, and outside an event there is none.
    PerThread,
    /// The VM is not set up yet.
    NotSetUp,
    /// A GC was running at every attempt.
    Busy,
    /// Its memory cannot be read, or the process is gone.
    Unreadable(io::Error),
}

impl VmState {
    /// The state, if it could be read; otherwise the first GC event of the process is proven instead.
    pub fn data(self) -> Option<(u64, Vec<u8>)> {
        match self {
            Self::Proven(ts_ns, data) => Some((ts_ns, data)),
            Self::PerThread | Self::NotSetUp | Self::Busy | Self::Unreadable(_) => None,
        }
    }
}

/// `N` bytes of a process's memory; `None` if they cannot be read.
fn number<const N: usize>(pid: u32, address: u64) -> Option<[u8; N]> {
    let memory = File::open(proc_root::path(pid, "mem")).ok()?;
    let mut bytes = [0; N];
    memory.read_exact_at(&mut bytes, address).ok()?;
    Some(bytes)
}

/// Whether a process of a Ruby built `--with-modular-gc` has loaded a GC library, or is about to use one; `None` if its
/// memory cannot be read. A process that has not chosen yet has not loaded one.
pub(super) fn has_loaded_library(pid: u32, bias: u64, modular: &Modular) -> Option<bool> {
    number::<1>(pid, bias.wrapping_add(modular.loaded.0)).map(|[loaded]| loaded != 0)
}

/// Whether a GC library refers to the VM of the Ruby that is mapped in the same process; `None` if the memory cannot be
/// read or the library has not been linked with the VM yet.
pub(super) fn is_linked_with(pid: u32, library: (u64, &AttachPlan), ruby: (u64, &Modular)) -> Option<bool> {
    let ((bias, plan), (ruby_bias, modular)) = (library, ruby);
    let anchor = plan.analysis.vm.anchor?;
    let held = u64::from_le_bytes(number(pid, bias.wrapping_add(anchor.0))?);
    (held != 0).then_some(held == ruby_bias.wrapping_add(modular.landmark.0))
}

/// The address of a VM's objspace, and the data of a snapshot of it; `None` if the VM is not set up or cannot be read.
pub(crate) fn objspace_of(
    get: impl Fn(u64, &mut [u8]) -> bool,
    bias: u64,
    plan: &AttachPlan,
) -> Option<(u64, Vec<u8>)> {
    let word = |address: u64| {
        let mut bytes = [0; 8];
        get(address, &mut bytes).then(|| u64::from_le_bytes(bytes)).filter(|&word| word != 0)
    };
    let base = match plan.config.anchor {
        0 => bias,
        anchor => word(bias.wrapping_add(anchor))?,
    };
    let vm = word(base.wrapping_add(plan.config.vm_ptr))?;
    let objspace = word(vm.wrapping_add(u64::from(plan.config.vm_objspace)))?;
    Some((objspace, live_check::read_spans(&plan.layout, objspace, &get)?))
}

/// Reads the state of a VM from its memory, between two GC pauses, and proves the layout on it.
pub(super) fn read_state(pid: u32, bias: u64, plan: &AttachPlan) -> Result<VmState, live_check::FailedProof> {
    let memory = match File::open(proc_root::path(pid, "mem")) {
        Ok(memory) => memory,
        Err(error) => return Ok(VmState::Unreadable(error)),
    };
    // The last error of a read.
    let error = Cell::new(None);
    let get = |address: u64, buffer: &mut [u8]| {
        memory.read_exact_at(buffer, address).inspect_err(|e| error.set(Some(e.kind()))).is_ok()
    };
    let read = || objspace_of(get, bias, plan).map(|(_, spans)| spans);
    let during_gc = 1 << plan.analysis.vm.during_gc_bit;
    let mut failed = None;
    for _ in 0..STATE_TRIES {
        let ts_ns = monotonic_ns();
        let (Some(first), Some(second)) = (read(), read()) else {
            return Ok(error.get().map_or(VmState::NotSetUp, |kind| VmState::Unreadable(kind.into())));
        };
        if !live_check::is_set_up(&plan.layout, &first) {
            return Ok(VmState::NotSetUp);
        }
        // Two consistent reads outside a GC: in between, only values that an allocation changes may change.
        if !live_check::is_outside_gc(&plan.layout, &first, during_gc)
            || !live_check::no_gc_between(&plan.layout, &first, &second)
        {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        match live_check::outside_gc(&plan.layout, &second) {
            Ok(()) if plan.layout.per_thread => return Ok(VmState::PerThread),
            Ok(()) => return Ok(VmState::Proven(ts_ns, second)),
            Err(error)
                if error.may_be_lost_counts(&plan.layout)
                    && (plan.knowledge.shows_live_slots()
                        || live_check::only_allocates(&plan.layout, &first, &second)) =>
            {
                return Ok(if plan.layout.per_thread {
                    VmState::PerThread
                } else {
                    VmState::Proven(ts_ns, second)
                });
            }
            // The program runs while its memory is read, so only a repeated failure counts.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(VmState::Busy), Err)
}
