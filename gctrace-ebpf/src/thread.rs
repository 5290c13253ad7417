//! From the thread at the probe to what the VM keeps per thread and per Ractor.

use aya_ebpf::helpers::{bpf_get_current_task, bpf_probe_read_kernel};

use crate::{filter::Admitted, maps::config, usermem};

/// Address of the image's thread-local block for the current thread, or of the thread pointer if the image's offsets
/// count from there.
#[inline(always)]
pub fn block(admitted: &Admitted) -> Option<u64> {
    let offset = config().task_thread_pointer;
    if offset == 0 {
        return None;
    }
    // SAFETY: a plain helper call.
    let task = unsafe { bpf_get_current_task() };
    // SAFETY: the helper checks the address.
    let pointer: u64 =
        unsafe { bpf_probe_read_kernel(task.wrapping_add(u64::from(offset)) as *const u64) }.ok()?;
    let path = &admitted.image.thread;
    if path.module == 0 {
        return some(pointer);
    }
    let module: u64 = usermem::read(admitted.bias.wrapping_add(path.module))?;
    // The second word of the thread control block is the dynamic thread vector (glibc and musl on x86-64).
    let vector: u64 = usermem::read(pointer.wrapping_add(8))?;
    let entry = vector.wrapping_add(module.wrapping_mul(u64::from(path.dtv_entry)));
    // A block that has not been allocated yet is -1 in glibc; reading beneath it fails.
    some(usermem::read(entry)?)
}

/// Address of the object cache of the Ractor that the current thread runs.
#[inline(always)]
pub fn object_cache(admitted: &Admitted, block: u64) -> Option<u64> {
    let path = &admitted.image.thread;
    let ec: u64 = usermem::read(block.wrapping_add_signed(path.ec))?;
    let thread: u64 = usermem::read(ec.wrapping_add(u64::from(path.ec_thread)))?;
    let ractor: u64 = usermem::read(thread.wrapping_add(u64::from(path.thread_ractor)))?;
    some(usermem::read(ractor.wrapping_add(u64::from(path.ractor_cache)))?)
}

#[inline(always)]
fn some(address: u64) -> Option<u64> {
    if address == 0 { None } else { Some(address) }
}
