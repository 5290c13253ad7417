//! How to get from the thread at the probe to the data that the VM has per thread and per Ractor.

use aya_ebpf::helpers::{bpf_get_current_task, bpf_probe_read_kernel};

use crate::{filter::Admitted, maps::config, usermem};

/// The current thread's thread pointer.
#[inline(always)]
pub fn pointer() -> Option<u64> {
    let offset = config().task_thread_pointer;
    if offset == 0 {
        return None;
    }
    // SAFETY: a plain helper call.
    let task = unsafe { bpf_get_current_task() };
    // SAFETY: the helper checks the address.
    let pointer =
        unsafe { bpf_probe_read_kernel(task.wrapping_add(u64::from(offset)) as *const u64) }.ok()?;
    some(pointer)
}

/// Address of a thread-local block: `module` is the address of the word that holds the image's TLS module id,
/// `dtv_entry` the size of an entry of the dynamic thread vector, bytes.
#[inline(always)]
pub fn tls_block(pointer: u64, module: u64, dtv_entry: u32) -> Option<u64> {
    let module: u64 = usermem::read(module)?;
    // The second word of the thread control block is the dynamic thread vector (glibc and musl on x86-64).
    let vector: u64 = usermem::read(pointer.wrapping_add(8))?;
    let entry = vector.wrapping_add(module.wrapping_mul(u64::from(dtv_entry)));
    // A block that has not been allocated yet is -1 in glibc; reading beneath it fails.
    some(usermem::read(entry)?)
}

/// Address of the thread-local block of the image that the VM is in, for the current thread, or of the thread pointer if
/// the image's offsets count from there.
#[inline(always)]
pub fn block(admitted: &Admitted) -> Option<u64> {
    let pointer = pointer()?;
    let path = &admitted.image.thread;
    if path.module == 0 {
        return Some(pointer);
    }
    tls_block(pointer, admitted.vm_base()?.wrapping_add(path.module), path.dtv_entry)
}

/// Address of the current thread's own count of allocated bytes; 0 if the thread has none yet, so that its count is 0.
/// `block`: see [`block`].
#[inline(always)]
pub fn local(admitted: &Admitted, block: u64) -> Option<u64> {
    let block = match admitted.image.local_module {
        0 => block,
        module => lazy_block(admitted, admitted.bias.wrapping_add(module))?,
    };
    Some(if block == 0 { 0 } else { block.wrapping_add_signed(admitted.image.thread.local) })
}

/// The current thread's block of the TLS module of a library that was loaded at run time; 0 if the thread has not used it
/// yet (glibc creates it at the first use; musl creates it for all threads when it loads the library).
#[inline(always)]
fn lazy_block(admitted: &Admitted, slot: u64) -> Option<u64> {
    let module: u64 = usermem::read(slot)?;
    block_of(pointer()?, module, admitted.image.thread.dtv_entry)
}

/// The block of a TLS module for the thread with this thread pointer; 0 if it does not exist yet.
#[inline(always)]
fn block_of(pointer: u64, module: u64, stride: u32) -> Option<u64> {
    /// `TLS_DTV_UNALLOCATED` (glibc, sysdeps/generic/dl-dtv.h).
    const UNALLOCATED: u64 = u64::MAX;
    const GLIBC_ENTRY: u32 = 16;
    let vector: u64 = usermem::read(pointer.wrapping_add(8))?;
    if stride == GLIBC_ENTRY {
        // The number of entries is stored before the first one; a thread's vector grows when the thread needs it.
        let entries: u64 = usermem::read(vector.wrapping_sub(u64::from(GLIBC_ENTRY)))?;
        if module > entries {
            return Some(0);
        }
    }
    let block = usermem::read(vector.wrapping_add(module.wrapping_mul(u64::from(stride))))?;
    Some(if block == UNALLOCATED { 0 } else { block })
}

/// Address of the current thread's block of a TLS module, or its thread pointer for module 0; 0 if the thread has no block yet.
/// `dtv_entry`: see [`tls_block`].
#[inline(always)]
pub fn module_block(module: u64, dtv_entry: u32) -> Option<u64> {
    let pointer = pointer()?;
    if module == 0 { Some(pointer) } else { block_of(pointer, module, dtv_entry) }
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
