//! Taking a stack in stages, each a separate program that tail-calls the next, because no single one could be
//! verified for a deep stack on old kernels (`bpf_loop` exists since 5.17).
//!
//! What the stages share is in a [`Scratch`]: [`prepare`] fills it, then the program jumps to stage [`stage::NATIVE`], if there is
//! one, or to [`stage::RUBY`]; the native stage jumps to [`stage::RUBY`] when it is done (and emits its own record), which jumps to
//! itself until the stack is complete, emits it and releases the scratch.

use aya_ebpf::{EbpfContext, helpers::generated::bpf_ringbuf_output, maps::Array};
use gctrace_common::{
    config::{ImageConfig, StackPath},
    stack::{Cause, MAX_RUBY_FRAMES, RubyFrame, StackEvent, stage},
    stats::Counter,
};

use crate::{
    family::{Family, Probe, Return, Switch, Tick},
    maps::{PROBE_SCRATCH, STACK_RING, SWITCH_SCRATCH, TICK_SCRATCH, any_image, count},
    ring::{FORCE_WAKEUP, NO_WAKEUP},
    scratch::{self, Scratch},
    thread, usermem,
};

mod steps;

use steps::{Next, cut, step};

/// Number of steps (control frames, and environments of blocks) that one program takes. With 33 tail calls (32 before Linux 5.16)
/// this reaches beyond [`MAX_RUBY_FRAMES`].
const STEPS: u32 = 192;
/// Number of steps that one call of a function takes, which the verifier walks once.
const STEPS_PER_CALL: u32 = 8;
/// Finds the thread's control frames. On an error, the record gets a flag, and the thread has no frames.
#[inline(always)]
pub fn prepare(scratch: *mut Scratch, image: &ImageConfig, bias: u64, thread: u64) {
    let (stack, next, end, flag) = match frames(&image.stack, bias, thread) {
        Ok((stack, next, end)) => (stack, next, end, 0),
        Err(flag) => (0, 0, 0, flag),
    };
    match flag {
        StackEvent::NO_CONTEXT => count(Counter::StackNoContext),
        StackEvent::BAD_CONTEXT => count(Counter::StackBadContext),
        StackEvent::NO_LAYOUT => count(Counter::StackNoLayout),
        _ => {}
    }
    // SAFETY: the scratch is this program's.
    unsafe {
        (*scratch).head.flags |= flag;
        (*scratch).stack = stack;
        (*scratch).window_len = 0;
        (*scratch).next = next;
        (*scratch).end = end;
        (*scratch).chunk_len = 0;
        (*scratch).ep = 0;
    }
}

/// The start of the VM stack of the running thread, and the bounds of its control frames; or the flag that says why there are none.
#[inline(always)]
fn frames(path: &StackPath, bias: u64, thread: u64) -> Result<(u64, u64, u64), u32> {
    if path.place == StackPath::NONE {
        return Err(StackEvent::NO_LAYOUT);
    }
    let (ec, thread) = match thread {
        0 => context(path, bias),
        thread => usermem::read(thread.wrapping_add(u64::from(path.thread_ec))).map(|ec| (ec, thread)),
    }
    .ok_or(StackEvent::NO_CONTEXT)?;
    let bounds = || {
        let field = |offset: u32| usermem::read::<u64>(ec.wrapping_add(u64::from(offset)));
        let back: u64 = usermem::read(thread.wrapping_add(u64::from(path.thread_ec)))?;
        let (stack, words, frame) =
            (field(path.ec_stack)?, field(path.ec_stack_size)?, field(path.ec_frame)?);
        let end = stack.wrapping_add(words.wrapping_mul(8));
        // The outermost frame is not a call but a mark (`VM_FRAME_MAGIC_DUMMY`), which Ruby's own backtraces leave out.
        let last = end.wrapping_sub(u64::from(path.frame_size));
        let size = u64::from(path.frame_size);
        let whole = size != 0 && last.wrapping_sub(frame) % size == 0;
        let sound = back == ec && stack != 0 && stack <= frame && frame <= last && last < end && whole;
        if sound { Some((stack, frame, last)) } else { None }
    };
    bounds().ok_or(StackEvent::BAD_CONTEXT)
}

/// The bounds of the control frames of the running thread, if they are consistent.
#[inline(always)]
pub fn current_frames(path: &StackPath, bias: u64) -> Option<(u64, u64)> {
    frames(path, bias, 0).ok().map(|(_, frame, last)| (frame, last))
}

/// The running thread's `rb_execution_context_t` and its `thread_ptr`.
#[inline(always)]
pub fn context(path: &StackPath, bias: u64) -> Option<(u64, u64)> {
    let pointer = thread::pointer()?;
    let at = match path.place {
        StackPath::GLOBAL => bias.wrapping_add(path.context as u64),
        StackPath::TLS => thread::tls_block(pointer, bias.wrapping_add(path.module), path.dtv_entry)?
            .wrapping_add_signed(path.context),
        _ => pointer.wrapping_add_signed(path.context),
    };
    let ec: u64 = usermem::read(at)?;
    if ec == 0 {
        return None;
    }
    let thread: u64 = usermem::read(ec.wrapping_add(u64::from(path.ec_thread)))?;
    if path.place == StackPath::GLOBAL {
        // It is the context of the GVL's holder. glibc's and musl's pthread_t is the thread pointer.
        let holder: u64 = usermem::read(thread.wrapping_add(u64::from(path.thread_id)))?;
        if holder != pointer {
            return None;
        }
    }
    Some((ec, thread))
}

/// A family whose programs walk Ruby stacks.
pub trait Walks: Family {
    /// Takes up to [`STEPS_PER_CALL`] steps in the scratch of a slot. Returns [`MORE`], [`DONE`] or [`LOST`].
    fn ruby_steps(slot: u32) -> u64;
}

impl Walks for Tick {
    #[inline(always)]
    fn ruby_steps(slot: u32) -> u64 {
        verified_once_tick_ruby(slot.into())
    }
}

impl Walks for Switch {
    #[inline(always)]
    fn ruby_steps(slot: u32) -> u64 {
        verified_once_switch_ruby(slot.into())
    }
}

impl Walks for Return {
    #[inline(always)]
    fn ruby_steps(slot: u32) -> u64 {
        Switch::ruby_steps(slot)
    }
}

impl Walks for Probe {
    #[inline(always)]
    fn ruby_steps(slot: u32) -> u64 {
        verified_once_probe_ruby(slot.into())
    }
}

/// Stage [`stage::RUBY`].
#[inline(always)]
pub fn ruby<F: Walks, C: EbpfContext>(ctx: &C) {
    let Some((slot, scratch)) = F::claimed() else { return count(Counter::StackNotWalked) };
    for _ in 0..STEPS / STEPS_PER_CALL {
        match F::ruby_steps(slot) {
            MORE => {}
            DONE => {
                emit(scratch);
                return F::release(scratch);
            }
            _ => break,
        }
    }
    // SAFETY: nothing is left to be dropped.
    unsafe { F::stages().tail_call(ctx, stage::RUBY) };
    // The kernel allows no more tail calls.
    // SAFETY: the scratch is this program's until it is released.
    unsafe { cut(scratch, StackEvent::TRUNCATED) };
    emit(scratch);
    F::release(scratch);
}

/// The stack may have more frames.
const MORE: u64 = 0;
/// The stack is complete.
const DONE: u64 = 1;
/// There is no such scratch or image, which is impossible.
const LOST: u64 = 2;

/// Steps of a tick's stack. The verifier walks a global function once, whatever its arguments, and not again at each call; that is why it
/// looks its scratch up. (`xtask/src/btf.rs` makes global what is called `verified_once_…`.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_tick_ruby(slot: u64) -> u64 {
    ruby_steps(&TICK_SCRATCH, slot as u32)
}

/// Steps of a stack at a probe.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_probe_ruby(slot: u64) -> u64 {
    ruby_steps(&PROBE_SCRATCH, slot as u32)
}

/// Steps of a stack at a tracepoint, or of the stack of a thread that leaves its CPU or is back on it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_switch_ruby(slot: u64) -> u64 {
    ruby_steps(&SWITCH_SCRATCH, slot as u32)
}

#[inline(always)]
fn ruby_steps(scratches: &Array<Scratch>, slot: u32) -> u64 {
    let Some(scratch) = scratches.get_ptr_mut(slot) else { return LOST };
    // SAFETY: the caller has claimed it.
    let index = unsafe { (*scratch).head.header.image };
    let Some(image) = any_image(index) else { return LOST };
    for _ in 0..STEPS_PER_CALL {
        // SAFETY: as above.
        if let Next::Done = unsafe { step(scratch, &image.stack) } {
            return DONE;
        }
    }
    MORE
}

/// Threshold of the number of a process's stack record, up to which the record wakes the reader: a program that runs for half a second must
/// be named while it runs. Later records wait for the reader's timer, or for the end of the process (`sample::last_chance`): a wakeup from
/// a tick is an interrupt that the CPU sends to itself, which on a virtual machine costs as much as a stack of 100 frames (4.5 µs measured),
/// and the traced thread is then preempted by the reader.
const PROMPT: u64 = 1024;

/// Submits the record.
#[inline(always)]
fn emit(scratch: *mut Scratch) {
    const FRAME: u64 = size_of::<RubyFrame>() as u64;
    // SAFETY: the scratch is this program's; the length is bounded by what it holds.
    let sent = unsafe {
        let s = &*scratch;
        let mut frames = (&raw const s.head.ruby).read_volatile();
        if frames > MAX_RUBY_FRAMES as u32 {
            frames = MAX_RUBY_FRAMES as u32;
        }
        let bytes = size_of::<StackEvent>() as u64 + u64::from(frames) * FRAME;
        let cause = s.head.header.point;
        // A thread that has just acquired the GVL, or is about to release it, must not wait for a reader.
        let gvl = cause == Cause::GvlWait as u32 || cause == Cause::GvlHold as u32;
        let prompt = s.head.header.seq <= PROMPT && !gvl;
        let flags = if prompt { FORCE_WAKEUP } else { NO_WAKEUP };
        bpf_ringbuf_output(
            (&raw const STACK_RING).cast_mut().cast(),
            (&raw const s.head).cast_mut().cast(),
            bytes,
            flags,
        )
    };
    count(if sent == 0 { Counter::StackSubmitted } else { Counter::StackRingFull });
}
