//! Reading the traced thread: its registers at the probe and its memory.

use aya_ebpf::{
    helpers::{bpf_probe_read_user, generated},
    programs::ProbeContext,
};

/// Reads one plain value at an address of the current process. Never faults: a page that is not there is `None`.
#[inline(always)]
pub fn read<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address; T is an integer everywhere this is used.
    unsafe { bpf_probe_read_user(address as *const T) }.ok()
}

/// Copies `len` (1..=`MAX`) bytes at a process address to `target`.
///
/// # Safety
/// `target` must be valid for `MAX` bytes of writing.
#[inline(always)]
pub unsafe fn copy<const MAX: u32>(address: u64, len: u32, target: *mut u8) -> Result<(), ()> {
    // The verifier wants to see both bounds on the value it passes: "R2 min value is negative" otherwise.
    if len == 0 || len > MAX {
        return Err(());
    }
    // SAFETY: the caller's promise; the length was just bounded.
    match unsafe { generated::bpf_probe_read_user(target.cast(), len, address as *const _) } {
        0 => Ok(()),
        _ => Err(()),
    }
}

/// Address of the probed instruction in the current process.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn instruction_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: the context of a uprobe is the thread's pt_regs.
    unsafe { (*ctx.regs).rip }
}

/// Stack pointer of the thread.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn stack_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: as above.
    unsafe { (*ctx.regs).rsp }
}

/// A general register by its hardware number (x86-64 encoding order).
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn register(ctx: &ProbeContext, number: u8) -> u64 {
    // Each arm is a load at a constant offset: the verifier refuses variable offsets into the context.
    // SAFETY: as above.
    let regs = unsafe { &*ctx.regs };
    match number {
        0 => regs.rax,
        1 => regs.rcx,
        2 => regs.rdx,
        3 => regs.rbx,
        5 => regs.rbp,
        6 => regs.rsi,
        7 => regs.rdi,
        8 => regs.r8,
        9 => regs.r9,
        10 => regs.r10,
        11 => regs.r11,
        12 => regs.r12,
        13 => regs.r13,
        14 => regs.r14,
        15 => regs.r15,
        _ => 0,
    }
}

/// Address of the probed instruction in the current process.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn instruction_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: the context of a uprobe is the thread's user_pt_regs.
    unsafe { (*ctx.regs).pc }
}

/// Stack pointer of the thread.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn stack_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: as above.
    unsafe { (*ctx.regs).sp }
}

/// No site on aarch64 names a register yet.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn register(_ctx: &ProbeContext, _number: u8) -> u64 {
    0
}
