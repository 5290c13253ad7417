//! Reading the traced thread: its registers at the probe and its memory.

#[cfg(bpf_target_arch = "x86_64")]
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::{
    helpers::{bpf_probe_read_user, generated},
    programs::{PerfEventContext, ProbeContext},
};

#[cfg(bpf_target_arch = "x86_64")]
use crate::maps::config;

/// Reads one plain value at an address of the current process. Never faults: returns `None` if the page is not present.
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
    /// The helper with the whole register as length: for a shorter type the compiler passes a register and tests the copy that
    /// it has truncated, which the verifier does not connect ("R2 unbounded memory access").
    type Read = unsafe extern "C" fn(target: *mut u8, len: u64, address: u64) -> i64;
    /// `BPF_FUNC_probe_read_user` (include/uapi/linux/bpf.h).
    const READ: usize = 112;
    // SAFETY: helpers are called by their number.
    let read = unsafe { core::mem::transmute::<usize, Read>(READ) };

    // The verifier requires both bounds on the value it passes: "R2 min value is negative" otherwise. Linux 5.10 forgets
    // them when the value goes through the stack ("invalid access to memory, mem_size=3160 off=88 size=65535"), so the
    // compiler must treat it as a new value.
    let len = opaque(u64::from(len));
    if len == 0 || len > u64::from(MAX) {
        return Err(());
    }
    // SAFETY: the caller's promise; the length was just bounded.
    match unsafe { read(target, len, address) } {
        0 => Ok(()),
        _ => Err(()),
    }
}

/// The same number, but opaque to the compiler.
#[inline(always)]
pub fn opaque(mut number: u64) -> u64 {
    // SAFETY: no instruction at all.
    unsafe {
        core::arch::asm!("/* {0} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags))
    };
    number
}

/// The same number, but the compiler believes that it depends on another one.
#[inline(always)]
pub fn opaque_after(mut number: u64, other: u64) -> u64 {
    // SAFETY: no instruction at all.
    unsafe {
        core::arch::asm!("/* {0} {1} */", inout(reg) number, in(reg) other, options(pure, nomem, nostack, preserves_flags))
    };
    number
}

/// Address of the probed instruction in the current process.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn instruction_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: the context of a uprobe is the thread's pt_regs.
    unsafe { (*ctx.regs).rip }
}

/// Whether a tick interrupted kernel code.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn tick_in_kernel(ctx: &PerfEventContext) -> bool {
    // The lowest two bits of the code segment are the privilege level.
    // SAFETY: the context of a perf event begins with the interrupted registers.
    unsafe { (*ctx.ctx).regs.cs & 3 == 0 }
}

/// The registers with which a walk of the native stack begins.
pub struct Registers {
    pub ip: u64,
    pub sp: u64,
    pub bp: u64,
}

/// User-mode registers of the thread, which a tick interrupted in user mode or in the kernel.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn tick_registers(ctx: &PerfEventContext) -> Option<Registers> {
    if tick_in_kernel(ctx) {
        return entry_registers();
    }
    // SAFETY: as above.
    let regs = unsafe { &(*ctx.ctx).regs };
    Some(Registers { ip: regs.rip, sp: regs.rsp, bp: regs.rbp })
}

/// Registers of the thread at a probe.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn probe_registers(ctx: &ProbeContext) -> Option<Registers> {
    // SAFETY: the context of a uprobe is the thread's pt_regs.
    let regs = unsafe { &*ctx.regs };
    Some(Registers { ip: regs.rip, sp: regs.rsp, bp: regs.rbp })
}

/// Registers of the thread when it entered the kernel: the kernel stores them at the upper end of the thread's kernel stack
/// (arch/x86/include/asm/processor.h, `task_pt_regs`).
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn entry_registers() -> Option<Registers> {
    /// Offsets in `struct pt_regs` (arch/x86/include/asm/ptrace.h).
    const RBP: u64 = 4;
    const RIP: u64 = 16;
    const CS: u64 = 17;
    const RSP: u64 = 19;
    const PT_REGS: u64 = 168;
    /// In kernels before 5.15; twice as much with `CONFIG_KASAN`, which the check of the code segment then detects.
    const THREAD_SIZE: u64 = 16 << 10;
    /// `__USER_CS`: 64-bit code in user mode.
    const USER_CS: u64 = 0x33;

    let at = if config().has_cookie != 0 {
        // SAFETY: plain helper calls.
        unsafe { generated::bpf_task_pt_regs(generated::bpf_get_current_task_btf()) as u64 }
    } else {
        let offset = config().task_stack;
        if offset == 0 {
            return None;
        }
        // SAFETY: a plain helper call.
        let task = unsafe { generated::bpf_get_current_task() };
        kernel_word(task.wrapping_add(u64::from(offset)))?.wrapping_add(THREAD_SIZE - PT_REGS)
    };
    let word = |place: u64| kernel_word(at.wrapping_add(place * 8));
    if word(CS)? != USER_CS {
        return None;
    }
    Some(Registers { ip: word(RIP)?, sp: word(RSP)?, bp: word(RBP)? })
}

#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn kernel_word(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(address as *const u64) }.ok()
}

/// Stack pointer of the thread.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn stack_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: as above.
    unsafe { (*ctx.regs).rsp }
}

/// The same, read exactly where it is called.
#[inline(always)]
pub fn volatile_stack_pointer(ctx: &ProbeContext) -> u64 {
    let pointer = stack_pointer(ctx);
    let cell = &raw const pointer;
    // SAFETY: a local variable.
    unsafe { cell.read_volatile() }
}

/// A general register by its hardware number (x86-64 encoding order).
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn register(ctx: &ProbeContext, number: u8) -> u64 {
    // Each arm is a load at a constant offset: the verifier refuses variable offsets into the context ("dereference of modified ctx
    // ptr"), which the compiler would generate from loads that it can move behind the arms.
    // SAFETY: as above.
    let regs = unsafe { &*ctx.regs };
    match number {
        0 => opaque(regs.rax),
        1 => opaque(regs.rcx),
        2 => opaque(regs.rdx),
        3 => opaque(regs.rbx),
        5 => opaque(regs.rbp),
        6 => opaque(regs.rsi),
        7 => opaque(regs.rdi),
        8 => opaque(regs.r8),
        9 => opaque(regs.r9),
        10 => opaque(regs.r10),
        11 => opaque(regs.r11),
        12 => opaque(regs.r12),
        13 => opaque(regs.r13),
        14 => opaque(regs.r14),
        15 => opaque(regs.r15),
        _ => 0,
    }
}

/// Registers around a call of a C function: its result, its first two arguments, and the registers that it preserves.
pub struct CallRegisters {
    pub result: u64,
    pub first: u64,
    pub second: u64,
    rbx: u64,
    rbp: u64,
    r12: u64,
    r13: u64,
    r14: u64,
    r15: u64,
}

impl CallRegisters {
    /// A preserved register by its hardware number (x86-64 encoding order).
    #[inline(always)]
    pub fn preserved(&self, number: u8) -> u64 {
        match number {
            3 => self.rbx,
            5 => self.rbp,
            12 => self.r12,
            13 => self.r13,
            14 => self.r14,
            15 => self.r15,
            _ => 0,
        }
    }
}

/// Reads all of them at once: if each path through a program read a different one, the compiler would merge them into one load at an
/// offset that depends on the path, which the verifier refuses.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn call_registers(ctx: &ProbeContext) -> CallRegisters {
    // SAFETY: as above.
    let regs = unsafe { &*ctx.regs };
    CallRegisters {
        result: opaque(regs.rax),
        first: opaque(regs.rdi),
        second: opaque(regs.rsi),
        rbx: opaque(regs.rbx),
        rbp: opaque(regs.rbp),
        r12: opaque(regs.r12),
        r13: opaque(regs.r13),
        r14: opaque(regs.r14),
        r15: opaque(regs.r15),
    }
}

/// No calls are probed on aarch64 yet.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn call_registers(_ctx: &ProbeContext) -> CallRegisters {
    CallRegisters { result: 0, first: 0, second: 0, rbx: 0, rbp: 0, r12: 0, r13: 0, r14: 0, r15: 0 }
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

/// Whether a tick interrupted kernel code.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn tick_in_kernel(ctx: &PerfEventContext) -> bool {
    // The lowest four bits of the processor state are the exception level and the stack in use; user mode is 0.
    // SAFETY: as above.
    unsafe { (*ctx.ctx).regs.pstate & 0xf != 0 }
}

/// Native stacks are walked on x86-64 only.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn probe_registers(_ctx: &ProbeContext) -> Option<Registers> {
    None
}

/// Native stacks are walked on x86-64 only.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub fn tick_registers(_ctx: &PerfEventContext) -> Option<Registers> {
    None
}
