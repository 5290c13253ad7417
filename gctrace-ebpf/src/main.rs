//! Entry points of the BPF programs: a table of contents. Each family's logic is in its module.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(internal_features, reason = "the only way to an atomic add on the BPF target")]

use aya_ebpf::{
    EbpfContext as _,
    macros::{tracepoint, uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext, TracePointContext},
};
use gctrace_common::event::Point;

mod emit;
mod filter;
mod gc;
mod lifecycle;
mod maps;
mod phases;
mod thread;
mod usermem;

#[uprobe]
pub fn gc_start(ctx: ProbeContext) -> u32 {
    gc::hit(&ctx, Point::GcStart)
}

#[uprobe]
pub fn gc_end_mark(ctx: ProbeContext) -> u32 {
    gc::hit(&ctx, Point::GcEndMark)
}

#[uprobe]
pub fn gc_end_sweep(ctx: ProbeContext) -> u32 {
    gc::hit(&ctx, Point::GcEndSweep)
}

#[uprobe]
pub fn gc_enter(ctx: ProbeContext) -> u32 {
    gc::hit(&ctx, Point::GcEnter)
}

#[uprobe]
pub fn gc_exit(ctx: ProbeContext) -> u32 {
    gc::hit(&ctx, Point::GcExit)
}

#[uprobe]
pub fn phase_begin(ctx: ProbeContext) -> u32 {
    phases::begin(&ctx);
    0
}

#[uprobe]
pub fn phase_end(ctx: ProbeContext) -> u32 {
    phases::end(&ctx);
    0
}

#[uretprobe]
pub fn phase_return(ctx: RetProbeContext) -> u32 {
    phases::end(&ProbeContext::new(ctx.as_ptr()));
    0
}

/// `task:task_newtask`: a process or thread was created, in the context of its parent and before it runs.
#[tracepoint]
pub fn task_newtask(ctx: TracePointContext) -> u32 {
    lifecycle::forked(&ctx)
}

/// `sched:sched_process_exec`: the current process replaced its program.
#[tracepoint]
pub fn sched_process_exec(_ctx: TracePointContext) -> u32 {
    lifecycle::execed()
}

/// `sched:sched_process_exit`: the current thread ends.
#[tracepoint]
pub fn sched_process_exit(_ctx: TracePointContext) -> u32 {
    lifecycle::exited()
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    // SAFETY: the verifier refuses any program from which this could be reached.
    unsafe { core::hint::unreachable_unchecked() }
}

/// Several helpers the programs use are for GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
