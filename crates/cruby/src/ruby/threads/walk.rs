//! Walks the stack of a sleeping thread as the kernel side does (`gctrace-ebpf/src/walk/steps.rs`); `tests/tests/host_walker.rs`
//! compares the two.

use gctrace_common::{
    config::StackPath,
    stack::{MAX_RUBY_FRAMES, RubyFrame, StackEvent},
};

use super::{Memory, word};

/// Maximum number of environments between a block and its method; deeper nesting loses the method.
const MAX_HOPS: u32 = 64;
/// `VM_FRAME_MAGIC_MASK` and `VM_FRAME_MAGIC_CFUNC` (`vm_core.h`, every version from 2.6 to 4.0, as for the following constants).
const MAGIC_MASK: u64 = 0x7fff_0001;
const MAGIC_CFUNC: u64 = 0x5555_0001;
/// `VM_FRAME_FLAG_CFRAME`: of a function or a block that is implemented in C.
const FLAG_CFRAME: u64 = 0x80;
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

/// The result of walking a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// Frames, leaf first.
    pub frames: Vec<RubyFrame>,
    /// Flags of [`StackEvent`] for what is missing.
    pub flags: u32,
}

/// The control frames of each invocation of the interpreter loop, innermost first. The frame at the root of a stack, in
/// which no code runs (`th_init` pushes it), is excluded.
pub fn loops(ruby: &[RubyFrame]) -> impl Iterator<Item = &[RubyFrame]> {
    let code = |frame: &RubyFrame| frame.iseq & !(RubyFrame::FINISH | RubyFrame::JIT) != 0;
    let end = ruby.iter().rposition(code).map_or(0, |last| last + 1);
    ruby[..end].split_inclusive(|frame| frame.iseq & RubyFrame::FINISH != 0)
}

/// How much of the stack of a running thread could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreed {
    /// Two reads in a row gave the same frames.
    Whole,
    /// Inner frames kept changing and are missing.
    Root,
}

/// Walks until two walks agree. Each walk copies memory that the thread may be changing, so a single one proves nothing.
pub(super) fn agreed(tries: u32, mut walk: impl FnMut() -> Walked) -> (Walked, Agreed) {
    let mut last = walk();
    for _ in 1..tries {
        let next = walk();
        if same(&last, &next) {
            return (next, Agreed::Whole);
        }
        last = next;
    }
    let next = walk();
    if same(&last, &next) {
        return (next, Agreed::Whole);
    }
    let both = last.frames.iter().rev().zip(next.frames.iter().rev());
    let common = both.take_while(|(one, two)| one == two).count();
    let frames = next.frames[next.frames.len() - common..].to_vec();
    (Walked { frames, flags: next.flags }, Agreed::Root)
}

/// Whether two walks found the same frames; the line in the innermost frame may differ.
fn same(one: &Walked, two: &Walked) -> bool {
    let tail = |walked: &Walked| walked.frames.get(1..).map(<[RubyFrame]>::to_vec);
    let leaf = |walked: &Walked| walked.frames.first().map(|leaf| (leaf.iseq, leaf.method));
    one.flags == two.flags && leaf(one) == leaf(two) && tail(one) == tail(two)
}

/// The stack of a thread, given its `rb_thread_t *`.
pub(super) fn walk(memory: &impl Memory, path: &StackPath, thread: u64) -> Walked {
    let Some((next, end)) = bounds(memory, path, thread) else {
        return Walked { flags: StackEvent::BAD_CONTEXT, ..Walked::default() };
    };
    let mut walked = Walked::default();
    // The kernel side has the same limit of frames; skipped frames do not count, so twice as many are read.
    let most = u64::from(path.frame_size) * 2 * MAX_RUBY_FRAMES as u64;
    let mut bytes = vec![0; (end - next).min(most) as usize];
    if !memory.read(next, &mut bytes) {
        return Walked { flags: StackEvent::READ_FAILED, ..walked };
    }
    for frame in bytes.chunks_exact(path.frame_size as usize) {
        if walked.frames.len() >= MAX_RUBY_FRAMES {
            walked.flags |= StackEvent::TRUNCATED;
            break;
        }
        let member = |offset: u32| {
            let at = offset as usize;
            frame.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        let frame = Frame {
            pc: member(path.frame_pc),
            iseq: member(path.frame_iseq),
            ep: member(path.frame_ep),
            jit: path.frame_jit != 0 && member(path.frame_jit) != 0,
        };
        match read(memory, &frame, walked.frames.is_empty()) {
            Ok(Some(frame)) => walked.frames.push(frame),
            Ok(None) => {}
            Err(()) => {
                walked.flags |= StackEvent::READ_FAILED;
                break;
            }
        }
    }
    walked
}

/// Start and end of the control frames.
fn bounds(memory: &impl Memory, path: &StackPath, thread: u64) -> Option<(u64, u64)> {
    let ec = word(memory, thread, path.thread_ec)?;
    if word(memory, ec, path.ec_thread)? != thread {
        return None;
    }
    let (stack, words) = (word(memory, ec, path.ec_stack)?, word(memory, ec, path.ec_stack_size)?);
    let frame = word(memory, ec, path.ec_frame)?;
    let end = stack.checked_add(words.checked_mul(8)?)?;
    // The outermost frame is not a call but a marker (`VM_FRAME_MAGIC_DUMMY`), which Ruby's own backtraces omit.
    let size = u64::from(path.frame_size);
    let last = end.checked_sub(size)?;
    let sound = stack != 0 && stack <= frame && frame <= last && (last - frame).is_multiple_of(size);
    sound.then_some((frame, last))
}

/// A control frame.
struct Frame {
    pc: u64,
    iseq: u64,
    ep: u64,
    jit: bool,
}

/// What the kernel side would report for a frame; `None` if Ruby's own backtraces omit it. The innermost one may be that of a just-in-time
/// compiler, which has not stored a program counter.
fn read(memory: &impl Memory, frame: &Frame, innermost: bool) -> Result<Option<RubyFrame>, ()> {
    let c = frame.iseq == 0;
    if frame.ep == 0 {
        return Err(());
    }
    if !c && frame.pc == 0 && !innermost {
        return Ok(None);
    }
    let mut flags = if c { RubyFrame::CFUNC } else { 0 };
    if frame.jit {
        flags |= RubyFrame::JIT;
    }
    let mut ep = frame.ep;
    for hops in 0..=MAX_HOPS {
        let Some([method, previous, marks]) = environment(memory, ep) else {
            return if c { Err(()) } else { Ok(Some(lost(frame, flags))) };
        };
        if hops == 0 {
            let is_block_in_c = !c && frame.pc == 0 && marks & FLAG_CFRAME != 0;
            if is_block_in_c || c && marks & MAGIC_MASK != MAGIC_CFUNC {
                return Ok(None);
            }
            if marks & FLAG_FINISH != 0 {
                flags |= RubyFrame::FINISH;
            }
        }
        let local = marks & FLAG_LOCAL != 0;
        let pc = frame.pc;
        let found = |method, pc| Ok(Some(RubyFrame { iseq: frame.iseq | flags, pc, method }));
        if local && !c {
            return found(if method == 0 { 0 } else { method | RubyFrame::METHOD_RAW }, pc);
        }
        match method_entry(memory, method, local) {
            EnvMethod::Entry(method, definition) => return found(method, if c { definition } else { pc }),
            EnvMethod::Unreadable => return Ok(Some(lost(frame, flags))),
            EnvMethod::None if local => return found(0, if c { 0 } else { pc }),
            EnvMethod::None => ep = previous & !3,
        }
        if ep == 0 {
            break;
        }
    }
    Ok(Some(lost(frame, flags)))
}

/// The frame without its method.
fn lost(frame: &Frame, flags: u64) -> RubyFrame {
    let pc = if frame.iseq == 0 { 0 } else { frame.pc };
    RubyFrame { iseq: frame.iseq | flags, pc, method: RubyFrame::METHOD_LOST }
}

/// The three words of an environment: method entry, outer environment, flags.
fn environment(memory: &impl Memory, ep: u64) -> Option<[u64; 3]> {
    words(memory, ep.checked_sub(16)?)
}

fn words(memory: &impl Memory, address: u64) -> Option<[u64; 3]> {
    let mut bytes = [0; 24];
    if !memory.read(address, &mut bytes) {
        return None;
    }
    let mut words = [0; 3];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    Some(words)
}

/// The method in an environment.
enum EnvMethod {
    /// A method entry and its `def`.
    Entry(u64, u64),
    /// It is a scope without a method, or a block's.
    None,
    /// It could not be read.
    Unreadable,
}

/// `check_method_entry` (`vm_insnhelper.c`): `ep[-2]` is a method entry, a `cref`, or, in the environment of a method itself,
/// an `svar` that points to one of these.
fn method_entry(memory: &impl Memory, value: u64, local: bool) -> EnvMethod {
    if value == 0 {
        return EnvMethod::None;
    }
    let Some([flags, second, definition]) = words(memory, value) else { return EnvMethod::Unreadable };
    match imemo(flags) {
        Some(IMEMO_MENT) => EnvMethod::Entry(value, definition),
        Some(IMEMO_SVAR) if local && second != 0 => {
            let Some([flags, _, definition]) = words(memory, second) else { return EnvMethod::Unreadable };
            if imemo(flags) == Some(IMEMO_MENT) {
                EnvMethod::Entry(second, definition)
            } else {
                EnvMethod::None
            }
        }
        _ => EnvMethod::None,
    }
}

/// The kind of internal object.
fn imemo(flags: u64) -> Option<u64> {
    (flags & T_MASK == T_IMEMO).then_some(flags >> IMEMO_SHIFT & IMEMO_MASK)
}
