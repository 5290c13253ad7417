//! Entry points of the BPF programs: a table of contents. The logic of each family is in its module.
#![no_std]
#![no_main]
#![feature(core_intrinsics, asm_experimental_arch)]
#![expect(internal_features, reason = "the only way to an atomic add on the BPF target")]

use aya_ebpf::{
    EbpfContext as _,
    macros::{cgroup_skb, perf_event, raw_tracepoint, tracepoint, uprobe, uretprobe},
    programs::{
        PerfEventContext, ProbeContext, RawTracePointContext, RetProbeContext, SkBuffContext,
        TracePointContext,
    },
};
use gctrace_common::{event::Point, gvl::GvlPoint};

mod alloc;
mod context;
mod emit;
mod family;
mod filter;
mod futex;
mod gc;
mod gvl;
mod hit;
mod leak;
mod lifecycle;
mod line;
mod malloc;
mod maps;
mod memory;
mod names;
mod offcpu;
mod phases;
mod request;
mod ring;
mod rubies;
mod sample;
mod scratch;
mod socket;
mod spans;
mod stack;
mod tasks;
mod thread;
mod unwind;
mod usermem;
mod walk;

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

#[uprobe]
pub fn refill(ctx: ProbeContext) -> u32 {
    alloc::refill(&ctx);
    0
}

/// A refill while `gctrace heap --leaks` follows objects.
#[uprobe]
pub fn leak_refill(ctx: ProbeContext) -> u32 {
    leak::refill(&ctx);
    0
}

/// A call of CRuby's allocation functions ([`gctrace_common::malloc::MallocPlace`]).
#[uprobe]
pub fn malloc_hit(ctx: ProbeContext) -> u32 {
    malloc::hit(&ctx);
    0
}

#[uprobe]
pub fn gvl_started(ctx: ProbeContext) -> u32 {
    gvl::hit(&ctx, GvlPoint::Started);
    0
}

#[uprobe]
pub fn gvl_ready(ctx: ProbeContext) -> u32 {
    gvl::hit(&ctx, GvlPoint::Ready);
    0
}

#[uprobe]
pub fn gvl_resumed(ctx: ProbeContext) -> u32 {
    gvl::hit(&ctx, GvlPoint::Resumed);
    0
}

/// `gvl_acquire_common` returns (up to 3.1, whose threads each have a native thread).
#[uretprobe]
pub fn gvl_acquired(ctx: RetProbeContext) -> u32 {
    gvl::hit(&ProbeContext::new(ctx.as_ptr()), GvlPoint::Resumed);
    0
}

#[uprobe]
pub fn gvl_suspended(ctx: ProbeContext) -> u32 {
    gvl::hit(&ctx, GvlPoint::Suspended);
    0
}

#[uprobe]
pub fn gvl_exited(ctx: ProbeContext) -> u32 {
    gvl::hit(&ctx, GvlPoint::Exited);
    0
}

/// The sampling clock ticked on this CPU.
#[perf_event]
pub fn cpu_sample(ctx: PerfEventContext) -> u32 {
    sample::tick(&ctx);
    0
}

/// Stage [`NATIVE`](gctrace_common::stack::stage::NATIVE) of a tick's stack.
#[perf_event]
pub fn tick_native(ctx: PerfEventContext) -> u32 {
    unwind::native::<family::Tick, _>(&ctx, || usermem::tick_registers(&ctx));
    0
}

/// Stage [`RUBY`](gctrace_common::stack::stage::RUBY) of a tick's stack.
#[perf_event]
pub fn tick_ruby(ctx: PerfEventContext) -> u32 {
    walk::ruby::<family::Tick, _>(&ctx);
    0
}

/// Stage [`RUBY`](gctrace_common::stack::stage::RUBY) of a stack at a probe.
#[uprobe]
pub fn probe_ruby(ctx: ProbeContext) -> u32 {
    walk::ruby::<family::Probe, _>(&ctx);
    0
}

/// Stage [`NATIVE`](gctrace_common::stack::stage::NATIVE) of a stack at a probe.
#[uprobe]
pub fn probe_native(ctx: ProbeContext) -> u32 {
    unwind::native::<family::Probe, _>(&ctx, || usermem::probe_registers(&ctx));
    0
}

/// `sched:sched_switch`: a CPU switches from one thread to another, in the context of the thread that leaves.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn sched_switch(ctx: RawTracePointContext) -> i32 {
    offcpu::switched(&ctx);
    0
}

/// `sched:sched_wakeup`: a thread becomes runnable.
#[raw_tracepoint(tracepoint = "sched_wakeup")]
pub fn sched_wakeup(ctx: RawTracePointContext) -> i32 {
    offcpu::woken(&ctx);
    0
}

/// Stage [`RUBY`](gctrace_common::stack::stage::RUBY) of a stack at a tracepoint of futexes.
#[tracepoint]
pub fn switch_ruby(ctx: TracePointContext) -> u32 {
    walk::ruby::<family::Switch, _>(&ctx);
    0
}

/// `sched_exit_tp` (Linux 6.15): a thread has been switched to, and its memory is accessible.
#[raw_tracepoint(tracepoint = "sched_exit_tp")]
pub fn sched_return(ctx: RawTracePointContext) -> i32 {
    offcpu::returned(&ctx);
    0
}

/// Stage [`RUBY`](gctrace_common::stack::stage::RUBY) of the stack of a thread that leaves its CPU or is back on it.
#[raw_tracepoint(tracepoint = "sched_exit_tp")]
pub fn return_ruby(ctx: RawTracePointContext) -> i32 {
    walk::ruby::<family::Return, _>(&ctx);
    0
}

/// `sched:sched_switch`, for the GVL.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn gvl_switch(ctx: RawTracePointContext) -> i32 {
    tasks::switched(&ctx);
    0
}

/// `sched:sched_wakeup`, for the GVL.
#[raw_tracepoint(tracepoint = "sched_wakeup")]
pub fn gvl_wakeup(ctx: RawTracePointContext) -> i32 {
    tasks::woken(&ctx);
    0
}

/// `syscalls:sys_enter_futex`.
#[tracepoint]
pub fn futex_entered(ctx: TracePointContext) -> u32 {
    futex::entered(&ctx);
    0
}

/// `syscalls:sys_exit_futex`.
#[tracepoint]
pub fn futex_left(ctx: TracePointContext) -> u32 {
    futex::left(&ctx);
    0
}

/// A call in a server, or in a library that it uses ([`gctrace_common::request::RequestPoint`]).
#[uprobe]
pub fn request_hit(ctx: ProbeContext) -> u32 {
    request::hit(&ctx);
    0
}

/// A call in a server whose threads block ([`gctrace_common::blocking::BlockingPoint`]).
#[uprobe]
pub fn blocking_hit(ctx: ProbeContext) -> u32 {
    request::blocking::hit(&ctx);
    0
}

/// A call in a process that runs jobs ([`gctrace_common::job::JobPoint`]).
#[uprobe]
pub fn job_hit(ctx: ProbeContext) -> u32 {
    request::job::hit(&ctx);
    0
}

/// A packet for a socket in the cgroup of a server. Every packet is let through.
#[cgroup_skb(ingress)]
pub fn request_data(ctx: SkBuffContext) -> i32 {
    socket::received(&ctx);
    1
}

/// `task:task_newtask`: a process or thread was created, in the context of its parent and before it runs.
#[tracepoint]
pub fn task_newtask(ctx: TracePointContext) -> u32 {
    lifecycle::forked(&ctx)
}

/// `sched:sched_process_exec`: the current process replaced its program.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn sched_process_exec(ctx: RawTracePointContext) -> i32 {
    lifecycle::execed(&ctx);
    0
}

/// `sched:sched_process_exit`: the current thread ends.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn sched_process_exit(ctx: RawTracePointContext) -> i32 {
    lifecycle::exited(&ctx);
    0
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
