//! Taking a stack in stages, each a program of its own that tail-calls the next, because no single one could be
//! verified for a deep stack on old kernels (`bpf_loop` is of 5.17).
//!
//! What the stages share is in a [`Scratch`]: [`prepare`] fills it, then the program jumps to stage [`NATIVE`], if there is
//! one, or to [`RUBY`]; the native stage jumps to [`RUBY`] when it is done (and emits its own record), which jumps to
//! itself until the stack is complete, emits it and releases the scratch.

use aya_ebpf::{EbpfContext, helpers::generated::bpf_ringbuf_output, maps::Array};
use gctrace_common::{
    config::{ImageConfig, StackPath},
    stack::{Cause, MAX_RUBY_FRAMES, RubyFrame, StackEvent},
    stats::Counter,
};

use crate::{
    family::{Family, Probe, Return, Switch, Tick},
    maps::{PROBE_SCRATCH, STACK_RING, SWITCH_SCRATCH, TICK_SCRATCH, any_image, count},
    scratch::{CHUNK, CHUNK_MASK, ENVIRONMENT, RUBY, Scratch, WINDOW},
    thread, usermem,
};

/// Steps (control frames, and environments of blocks) that one program takes. With 33 tail calls (32 before Linux 5.16)
/// this reaches beyond [`MAX_RUBY_FRAMES`].
const STEPS: u32 = 192;
/// Steps that a function takes which the verifier walks once.
const STEPS_PER_CALL: u32 = 8;
/// Environments between a block and its method; deeper nesting loses the method.
const MAX_HOPS: u32 = 64;
/// `VM_FRAME_MAGIC_MASK` and `VM_FRAME_MAGIC_CFUNC` (`vm_core.h`, every version from 2.6 to 4.0; so are the following).
const MAGIC_MASK: u64 = 0x7fff_0001;
const MAGIC_CFUNC: u64 = 0x5555_0001;
/// `VM_FRAME_FLAG_FINISH`.
const FLAG_FINISH: u64 = 0x20;
/// `VM_ENV_FLAG_LOCAL`.
const FLAG_LOCAL: u64 = 2;
/// `T_IMEMO` and the mask of types in `RBasic.flags`.
const T_MASK: u64 = 0x1f;
const T_IMEMO: u64 = 0x1a;
/// `imemo_type` (internal/imemo.h): above `FL_USHIFT`.
const IMEMO_SHIFT: u64 = 12;
const IMEMO_MASK: u64 = 0xf;
const IMEMO_SVAR: u64 = 2;
const IMEMO_MENT: u64 = 6;

/// Finds the thread's control frames; what is wrong is noted in the record, and then there are none.
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

/// Where the VM stack of the running thread begins, and the bounds of its control frames; or the flag that says why there are none.
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
        // The outermost frame is no call but a mark (`VM_FRAME_MAGIC_DUMMY`), which Ruby's own backtraces leave out.
        let last = end.wrapping_sub(u64::from(path.frame_size));
        let size = u64::from(path.frame_size);
        let whole = size != 0 && last.wrapping_sub(frame) % size == 0;
        let sound = back == ec && stack != 0 && stack <= frame && frame <= last && last < end && whole;
        if sound { Some((stack, frame, last)) } else { None }
    };
    bounds().ok_or(StackEvent::BAD_CONTEXT)
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
        // It is the context of whoever holds the GVL. glibc's and musl's pthread_t is the thread pointer.
        let holder: u64 = usermem::read(thread.wrapping_add(u64::from(path.thread_id)))?;
        if holder != pointer {
            return None;
        }
    }
    Some((ec, thread))
}

/// A family whose programs walk Ruby stacks.
pub trait Walks: Family {
    /// Takes [`STEPS_PER_CALL`] steps in the scratch of a slot.
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

/// Whether the walk goes on.
enum Next {
    Step,
    Done,
}

/// Stage [`RUBY`].
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
    unsafe { F::stages().tail_call(ctx, RUBY) };
    // As many calls as the kernel allows.
    // SAFETY: the scratch is this program's until it is released.
    unsafe { cut(scratch, StackEvent::TRUNCATED) };
    emit(scratch);
    F::release(scratch);
}

/// The stack may have more frames.
const MORE: u64 = 0;
/// It is complete.
const DONE: u64 = 1;
/// There is no such scratch or image, which cannot be.
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

/// Steps of the stack of a thread that leaves its CPU.
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

/// # Safety
/// The scratch must be this program's.
#[inline(always)]
unsafe fn cut(scratch: *mut Scratch, flag: u32) -> Next {
    count(if flag == StackEvent::TRUNCATED { Counter::StackTruncated } else { Counter::StackReadFailed });
    // SAFETY: the caller's promise.
    unsafe { (*scratch).head.flags |= flag };
    Next::Done
}

/// One control frame, or one environment further on from it.
///
/// # Safety
/// The scratch must be this program's.
#[inline(always)]
unsafe fn step(scratch: *mut Scratch, path: &StackPath) -> Next {
    // SAFETY: the caller's promise.
    unsafe {
        let s = &mut *scratch;
        if s.ep == 0 {
            if s.next >= s.end {
                return Next::Done;
            }
            if s.head.ruby >= MAX_RUBY_FRAMES as u32 {
                return cut(scratch, StackEvent::TRUNCATED);
            }
            if !load(s, path) {
                return cut(scratch, StackEvent::READ_FAILED);
            }
            // Ruby's own backtraces pass over such frames, too (vm_backtrace.c): they are being set up, or belong to
            // blocks implemented in C.
            if s.iseq != 0 && s.pc == 0 {
                s.ep = 0;
                return Next::Step;
            }
        }
        let Some([method, previous, flags]) = environment(s) else {
            if s.iseq == 0 {
                return cut(scratch, StackEvent::READ_FAILED);
            }
            push(s, RubyFrame::METHOD_LOST, 0);
            return Next::Step;
        };
        if s.hops == 0 {
            if s.iseq == 0 && flags & MAGIC_MASK != MAGIC_CFUNC {
                s.ep = 0;
                return Next::Step;
            }
            if flags & FLAG_FINISH != 0 {
                s.flags |= RubyFrame::FINISH;
            }
        }
        let local = flags & FLAG_LOCAL != 0;
        if local && s.iseq != 0 {
            // Looking at it would cost one more read; user space will.
            push(s, if method == 0 { 0 } else { method | RubyFrame::METHOD_RAW }, 0);
            return Next::Step;
        }
        match method_entry(method, local) {
            Found::Entry(method, definition) => push(s, method, definition),
            Found::Unreadable => push(s, RubyFrame::METHOD_LOST, 0),
            Found::None if local => push(s, 0, 0),
            Found::None if s.hops >= MAX_HOPS => push(s, RubyFrame::METHOD_LOST, 0),
            Found::None => {
                s.hops += 1;
                s.ep = previous & !3;
                if s.ep == 0 {
                    push(s, RubyFrame::METHOD_LOST, 0);
                }
            }
        }
        Next::Step
    }
}

/// Takes the next control frame out of the chunk, which is refilled when it is used up.
#[inline(always)]
fn load(s: &mut Scratch, path: &StackPath) -> bool {
    let mut at = s.next.wrapping_sub(s.chunk_at);
    if s.chunk_len == 0 || at >= u64::from(s.chunk_len) {
        let left = s.end.wrapping_sub(s.next);
        let len = if left > u64::from(CHUNK) { CHUNK } else { left as u32 };
        // SAFETY: the chunk is longer than that.
        if unsafe { usermem::copy::<CHUNK>(s.next, len, (&raw mut s.chunk).cast()) }.is_err() {
            return false;
        }
        s.chunk_at = s.next;
        s.chunk_len = len;
        at = 0;
    }
    let frame = (at as u32 & CHUNK_MASK) as usize;
    let chunk: *const u8 = (&raw const s.chunk).cast();
    // SAFETY: both offsets are masked to what the chunk holds behind its last frame.
    let word =
        |offset: u32| unsafe { chunk.add(frame + (offset & 0x38) as usize).cast::<u64>().read_volatile() };
    s.pc = word(path.frame_pc);
    s.iseq = word(path.frame_iseq);
    s.ep = word(path.frame_ep);
    s.flags = if s.iseq == 0 { RubyFrame::CFUNC } else { 0 };
    if path.frame_jit != 0 && word(path.frame_jit) != 0 {
        s.flags |= RubyFrame::JIT;
    }
    s.hops = 0;
    s.next = s.next.wrapping_add(u64::from(path.frame_size));
    s.ep != 0
}

/// The three words of the environment at hand. Those of the frames lie one below the other in the VM stack; what a block
/// was made in may lie anywhere.
#[inline(always)]
fn environment(s: &mut Scratch) -> Option<[u64; 3]> {
    let first = s.ep.wrapping_sub(16);
    let room = u64::from(ENVIRONMENT);
    let mut inside =
        first >= s.window_at && first.wrapping_add(room) <= s.window_at.wrapping_add(s.window_len);
    if (s.window_len == 0 || !inside) && s.hops == 0 && first >= s.stack && s.ep < s.end {
        let past = first.wrapping_add(room);
        let lowest = past.wrapping_sub(u64::from(WINDOW));
        let from = if lowest > s.stack && lowest < past { lowest } else { s.stack };
        // Through memory, or LLVM checks one register and passes another, which the verifier has no bounds of.
        // SAFETY: a field of the scratch, which is this program's; the window is longer than what is copied.
        let (len, copied) = unsafe {
            let cell = &raw mut s.window_want;
            cell.write_volatile(past.wrapping_sub(from) as u32);
            let len = cell.read_volatile();
            (u64::from(len), usermem::copy::<WINDOW>(from, len, (&raw mut s.window).cast()))
        };
        // Pages that the VM has never touched are not there.
        s.window_len = if copied.is_ok() { len } else { 0 };
        s.window_at = from;
        inside = copied.is_ok();
    }
    if s.window_len == 0 || !inside {
        return usermem::read(first);
    }
    let at = (first.wrapping_sub(s.window_at) as u32 & (WINDOW - 8)) as usize;
    let window: *const u8 = (&raw const s.window).cast();
    // SAFETY: the offset is masked to less than WINDOW, behind which one environment has room.
    unsafe {
        let words = window.add(at).cast::<u64>();
        Some([words.read_volatile(), words.add(1).read_volatile(), words.add(2).read_volatile()])
    }
}

/// Appends the frame at hand to the record.
#[inline(always)]
fn push(s: &mut Scratch, method: u64, definition: u64) {
    if method & RubyFrame::METHOD_LOST != 0 {
        count(Counter::MethodLost);
    }
    let at = (s.head.ruby & (MAX_RUBY_FRAMES as u32 - 1)) as usize;
    let frames: *mut RubyFrame = (&raw mut s.frames).cast();
    let pc = if s.iseq == 0 { definition } else { s.pc };
    // SAFETY: the index is masked to the array.
    unsafe {
        let frame = frames.add(at);
        (&raw mut (*frame).iseq).write_volatile(s.iseq | s.flags);
        (&raw mut (*frame).pc).write_volatile(pc);
        (&raw mut (*frame).method).write_volatile(method);
    }
    s.head.ruby += 1;
    s.ep = 0;
}

/// What an environment says of its method.
enum Found {
    /// A method entry and its `def`.
    Entry(u64, u64),
    /// It is a scope without a method, or that of a block.
    None,
    /// It could not be read.
    Unreadable,
}

/// `check_method_entry` (`vm_insnhelper.c`): `ep[-2]` is a method entry, a `cref`, or, in the environment of a method itself,
/// an `svar` in front of one of them.
#[inline(always)]
fn method_entry(value: u64, local: bool) -> Found {
    if value == 0 {
        return Found::None;
    }
    let Some([flags, second, definition]) = usermem::read::<[u64; 3]>(value) else {
        return Found::Unreadable;
    };
    match imemo(flags) {
        IMEMO_MENT => Found::Entry(value, definition),
        IMEMO_SVAR if local => {
            if second == 0 {
                return Found::None;
            }
            let Some([flags, _, definition]) = usermem::read::<[u64; 3]>(second) else {
                return Found::Unreadable;
            };
            if imemo(flags) == IMEMO_MENT { Found::Entry(second, definition) } else { Found::None }
        }
        _ => Found::None,
    }
}

/// The kind of internal object, or something that is none.
#[inline(always)]
fn imemo(flags: u64) -> u64 {
    if flags & T_MASK == T_IMEMO { flags >> IMEMO_SHIFT & IMEMO_MASK } else { IMEMO_MASK + 1 }
}

/// A program that runs for half a second must be named while it is there, so the first stacks of a process wake the reader.
/// Later ones wait for its timer, or for the end of the process (`sample::last_chance`): a wake-up from a tick is an interrupt
/// that the CPU sends to itself, which on a virtual machine costs as much as a stack of 100 frames (4.5 µs measured), and the
/// traced thread then makes way for the reader.
const PROMPT: u64 = 1024;
/// `BPF_RB_FORCE_WAKEUP`. Without it the kernel wakes only a reader that has read all that came before, which the native
/// frames of the same stack never are.
pub const FORCE_WAKEUP: u64 = 2;
/// `BPF_RB_NO_WAKEUP`.
const NO_WAKEUP: u64 = 1;

/// Hands the record over.
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
        // A thread that has just got the GVL, or is about to give it up, is not to wait for a reader.
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
