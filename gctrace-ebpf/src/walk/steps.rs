//! The steps of a walk of a Ruby stack: what is read from the thread's memory, and what becomes a frame.
//!
//! Nothing here knows how memory is read or counters are kept: that is done by the module above, so that the tests compile this
//! file for the host and compare its result with that of user space (`tests/tests/host_walker.rs`,
//! `live_frames.rs`).

use gctrace_common::{
    config::StackPath,
    stack::{MAX_RUBY_FRAMES, RubyFrame, StackEvent},
    stats::Counter,
};

use super::{
    count,
    scratch::{CHUNK, CHUNK_MASK, ENVIRONMENT, Scratch, WINDOW},
    usermem,
};

/// Maximum number of environments between a block and its method; deeper nesting loses the method.
const MAX_HOPS: u32 = 64;
/// `VM_FRAME_MAGIC_MASK` and `VM_FRAME_MAGIC_CFUNC` (`vm_core.h`, every version from 2.6 to 4.0; so are the following).
const MAGIC_MASK: u64 = 0x7fff_0001;
const MAGIC_CFUNC: u64 = 0x5555_0001;
/// `VM_FRAME_FLAG_FINISH`.
const FLAG_FINISH: u64 = 0x20;
/// `VM_FRAME_FLAG_CFRAME`: of a function or a block that is implemented in C.
const FLAG_CFRAME: u64 = 0x80;
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

/// Whether the walk continues.
pub enum Next {
    Step,
    Done,
}

/// # Safety
/// The scratch must be this program's.
#[inline(always)]
pub unsafe fn cut(scratch: *mut Scratch, flag: u32) -> Next {
    count(if flag == StackEvent::TRUNCATED { Counter::StackTruncated } else { Counter::StackReadFailed });
    // SAFETY: the caller's promise.
    unsafe { (*scratch).head.flags |= flag };
    Next::Done
}

/// Processes one control frame, or one of the environments outside of it.
///
/// # Safety
/// The scratch must be this program's.
#[inline(always)]
pub unsafe fn step(scratch: *mut Scratch, path: &StackPath) -> Next {
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
            // Ruby's own backtraces skip such frames, too (vm_backtrace.c): they are being set up, or belong to
            // blocks implemented in C. The innermost one may be that of a just-in-time compiler, which does not
            // store a program counter when it begins.
            if s.iseq != 0 && s.pc == 0 && s.head.ruby != 0 {
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
            let is_block_in_c = s.iseq != 0 && s.pc == 0 && flags & FLAG_CFRAME != 0;
            if is_block_in_c || s.iseq == 0 && flags & MAGIC_MASK != MAGIC_CFUNC {
                s.ep = 0;
                return Next::Step;
            }
            if flags & FLAG_FINISH != 0 {
                s.flags |= RubyFrame::FINISH;
            }
        }
        let local = flags & FLAG_LOCAL != 0;
        if local && s.iseq != 0 {
            // Checking it here would cost one more read; user space does it.
            push(s, if method == 0 { 0 } else { method | RubyFrame::METHOD_RAW }, 0);
            return Next::Step;
        }
        match method_entry(method, local) {
            EnvMethod::Entry(method, definition) => push(s, method, definition),
            EnvMethod::Unreadable => push(s, RubyFrame::METHOD_LOST, 0),
            EnvMethod::None if local => push(s, 0, 0),
            EnvMethod::None if s.hops >= MAX_HOPS => push(s, RubyFrame::METHOD_LOST, 0),
            EnvMethod::None => {
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

/// Takes the next control frame from the chunk, which is refilled when it is used up. Returns `false` if it could not be read.
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
    // SAFETY: both offsets are masked to what the chunk holds after its last frame.
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

/// The three words of the current environment. The environments of the frames lie one below the other in the VM stack; the environment
/// in which a block was created may be anywhere.
#[inline(always)]
fn environment(s: &mut Scratch) -> Option<[u64; 3]> {
    let first = s.ep.wrapping_sub(16);
    let room = u64::from(ENVIRONMENT);
    // The start of an environment at one of the lowest addresses wraps to one of the highest, which is not inside.
    let mut inside = first.wrapping_sub(s.window_at) <= s.window_len.wrapping_sub(room);
    if (s.window_len == 0 || !inside) && s.hops == 0 && first >= s.stack && s.ep < s.end {
        let past = first.wrapping_add(room);
        let lowest = past.wrapping_sub(u64::from(WINDOW));
        let from = if lowest > s.stack && lowest < past { lowest } else { s.stack };
        // Through memory, or LLVM checks one register and passes another, for which the verifier has no bounds.
        // SAFETY: a field of the scratch, which is this program's; the window is longer than what is copied.
        let (len, copied) = unsafe {
            let cell = &raw mut s.window_want;
            cell.write_volatile(past.wrapping_sub(from) as u32);
            let len = cell.read_volatile();
            (u64::from(len), usermem::copy::<WINDOW>(from, len, (&raw mut s.window).cast()))
        };
        // Pages that the VM has never touched are not present.
        s.window_len = if copied.is_ok() { len } else { 0 };
        s.window_at = from;
        inside = copied.is_ok();
    }
    if s.window_len == 0 || !inside {
        return usermem::read(first);
    }
    let at = (first.wrapping_sub(s.window_at) as u32 & (WINDOW - 8)) as usize;
    let window: *const u8 = (&raw const s.window).cast();
    // SAFETY: the offset is masked to less than WINDOW, after which one environment has room.
    unsafe {
        let words = window.add(at).cast::<u64>();
        Some([words.read_volatile(), words.add(1).read_volatile(), words.add(2).read_volatile()])
    }
}

/// Appends the current frame to the record.
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

/// What an environment says about its method.
enum EnvMethod {
    /// A method entry and its `def`.
    Entry(u64, u64),
    /// It is a scope without a method, or that of a block.
    None,
    /// It could not be read.
    Unreadable,
}

/// `check_method_entry` (`vm_insnhelper.c`): `ep[-2]` is a method entry, a `cref`, or, in the environment of a method itself,
/// an `svar` that leads to one of them.
#[inline(always)]
fn method_entry(value: u64, local: bool) -> EnvMethod {
    if value == 0 {
        return EnvMethod::None;
    }
    let Some([flags, second, definition]) = usermem::read::<[u64; 3]>(value) else {
        return EnvMethod::Unreadable;
    };
    match imemo(flags) {
        IMEMO_MENT => EnvMethod::Entry(value, definition),
        IMEMO_SVAR if local => {
            if second == 0 {
                return EnvMethod::None;
            }
            let Some([flags, _, definition]) = usermem::read::<[u64; 3]>(second) else {
                return EnvMethod::Unreadable;
            };
            if imemo(flags) == IMEMO_MENT { EnvMethod::Entry(second, definition) } else { EnvMethod::None }
        }
        _ => EnvMethod::None,
    }
}

/// The kind of internal object, or something else.
#[inline(always)]
fn imemo(flags: u64) -> u64 {
    if flags & T_MASK == T_IMEMO { flags >> IMEMO_SHIFT & IMEMO_MASK } else { IMEMO_MASK + 1 }
}
