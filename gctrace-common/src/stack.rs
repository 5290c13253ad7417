//! Stack records: what a thread was doing at one instant. They travel in a ring of their own, so that a burst of them
//! cannot lose a GC event.
//!
//! Ruby frames are sent as the VM keeps them (addresses of `rb_iseq_t`, program counter, method entry); user space names
//! them. Native frames come in a record of their own that directly precedes the stack record of the same `tid` and
//! `ts_ns`.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::event::Header;

/// Maximum number of control frames that are walked; a deeper stack has [`StackEvent::TRUNCATED`].
pub const MAX_RUBY_FRAMES: usize = 2048;
/// Maximum number of native frames that are walked.
pub const MAX_NATIVE_FRAMES: usize = 1024;
/// Maximum number of kernel frames in a record.
pub const MAX_KERNEL_FRAMES: usize = 64;

/// Stages of a stack: programs that jump to each other, by their indices in the program arrays of a family (`*_STAGES`).
pub mod stage {
    /// Walks the native stack. Absent if native stacks are not walked.
    pub const NATIVE: u32 = 0;
    /// Walks the Ruby stack.
    pub const RUBY: u32 = 1;
    /// Number of stages.
    pub const COUNT: u32 = 2;
}

/// Why a stack was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Cause {
    /// The CPU clock of a sampled CPU ticked; `weight_ns` is its period.
    CpuClock = 0,
    /// `GC_START`: the thread whose allocation (or call) started a cycle. `ts_ns` equals that of the cycle's snapshot.
    GcStart = 1,
    /// The thread left its CPU at `ts_ns`. The stack is either taken when the thread leaves, and an [`OffCpuEvent`] with that time as
    /// `begin_ns` follows if the thread is away long enough; or it is taken when the thread is back, after an [`OffCpuEvent::STACK_FOLLOWS`].
    OffCpu = 2,
    /// The thread has acquired the GVL after a long wait, during which its Ruby stack cannot have changed. `ts_ns` equals that of the
    /// preceding [`GvlWaitEvent`](crate::gvl::GvlWaitEvent).
    GvlWait = 3,
    /// The thread releases the GVL, for which another thread has been waiting long. `ts_ns` is the end of its
    /// [`GvlHold`](crate::gvl::GvlHold).
    GvlHold = 4,
    /// The thread takes the free slots of a heap page. `ts_ns` equals that of the preceding [`RefillEvent`](crate::event::RefillEvent).
    Refill = 5,
    /// The thread has called an allocation function of CRuby. `weight_ns` is the size in bytes; [`crate::malloc`] says what the call stands for.
    Malloc = 6,
}

impl Cause {
    /// Decodes a cause; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::CpuClock,
            1 => Self::GcStart,
            2 => Self::OffCpu,
            3 => Self::GvlWait,
            4 => Self::GvlHold,
            5 => Self::Refill,
            6 => Self::Malloc,
            _ => return None,
        })
    }
}

/// What the garbage collector was doing on the thread when its stack was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum GcActivity {
    /// The thread was not inside a pause.
    None = 0,
    /// Inside a pause, but none of the following (`gc_mode_none`: setting up, tearing down).
    Other = 1,
    /// `gc_mode_marking`.
    Marking = 2,
    /// `gc_mode_sweeping`.
    Sweeping = 3,
    /// `flags.during_compacting` (3.0 and later).
    Compacting = 4,
}

impl GcActivity {
    /// Decodes an activity; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::None,
            1 => Self::Other,
            2 => Self::Marking,
            3 => Self::Sweeping,
            4 => Self::Compacting,
            _ => return None,
        })
    }
}

/// A control frame (`rb_control_frame_t`), leaf first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct RubyFrame {
    /// Address of the `rb_iseq_t` (0 for a C function), with flags ([`RubyFrame::FLAGS`]) in its low three bits.
    pub iseq: u64,
    /// Ruby code: `cfp->pc`. C functions: the method entry's `def`, which user space compares with what it
    /// reads later, so that a method entry that was freed in between is never named.
    pub pc: u64,
    /// Address of the frame's method entry (`rb_callable_method_entry_t`), 0 if it has none, with
    /// [`RubyFrame::METHOD_LOST`] or [`RubyFrame::METHOD_RAW`] in its low bits.
    pub method: u64,
}

impl RubyFrame {
    /// In `iseq`: `VM_FRAME_FLAG_FINISH`, the last frame of one invocation of the interpreter loop.
    pub const FINISH: u64 = 1;
    /// In `iseq`: a C function.
    pub const CFUNC: u64 = 2;
    /// In `iseq`: the frame was entered from JIT code (`jit_return` is set).
    pub const JIT: u64 = 4;
    /// Mask of the flags in `iseq`.
    pub const FLAGS: u64 = 7;
    /// In `method`: the path to the method entry could not be read or was too long.
    pub const METHOD_LOST: u64 = 1;
    /// In `method`: the raw value of `ep[-2]` in the environment of a method or scope written in Ruby: a method
    /// entry, an `svar` whose `cref_or_me` is one, or something else (a `cref`: the frame has no method).
    pub const METHOD_RAW: u64 = 2;
    /// Mask of the flags in `method`.
    pub const METHOD_FLAGS: u64 = 3;
}

/// Lowest bit of the count of major cycles' events in an epoch; the bits below it count the events of all cycles.
pub const MAJOR_EPOCH: u64 = 1 << 40;

/// The amount by which [`StackEvent::epoch`] grows.
#[inline]
pub const fn epoch_step(major: bool) -> u64 {
    if major { MAJOR_EPOCH + 1 } else { 1 }
}

/// Whether no major cycle lies between two epochs: then old objects are still the same and at the same addresses.
#[inline]
pub const fn same_majors(one: u64, other: u64) -> bool {
    one / MAJOR_EPOCH == other / MAJOR_EPOCH
}

/// Head of a stack record; `ruby` [`RubyFrame`]s follow.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct StackEvent {
    /// Common head; `point` is a [`Cause`], `seq` numbers the stack records of the process.
    pub header: Header,
    /// Load bias of the image.
    pub bias: u64,
    /// CPU time that the record stands for, nanoseconds ([`Cause::CpuClock`], unless only [`StackEvent::BLOCKS`] is sampled); a size in
    /// bytes ([`Cause::Malloc`]); the object's address (`gctrace heap --leaks`); otherwise 0.
    pub weight_ns: u64,
    /// Number of events of the process so far after which the VM may have freed or moved objects (`GC_END_MARK`, `GC_END_SWEEP`), with those of
    /// major cycles in the upper bits: see [`epoch_step`].
    pub epoch: u64,
    /// When the thread took the request that it serves, nanoseconds as in the header; 0: no known request.
    pub request_ns: u64,
    /// With [`StackEvent::SPAN`]: id of the trace that the thread worked for, in memory order.
    pub trace_id: [u64; 2],
    /// With [`StackEvent::SPAN`]: id of the span that was active on the thread, in memory order.
    pub span_id: u64,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
    /// The flags, constants of this type.
    pub flags: u32,
    /// A [`GcActivity`].
    pub gc: u32,
    /// Number of Ruby frames that follow.
    pub ruby: u32,
    /// Number of kernel frames in `kernel_frames`, leaf first; 0 if the thread was in user mode.
    pub kernel: u32,
    /// Their addresses.
    pub kernel_frames: [u64; MAX_KERNEL_FRAMES],
}

impl StackEvent {
    /// The Ruby stack is deeper than [`MAX_RUBY_FRAMES`]: its outermost frames are missing.
    pub const TRUNCATED: u32 = 1;
    /// A control frame could not be read: that frame and those outside of it are missing.
    pub const READ_FAILED: u32 = 2;
    /// The thread has no execution context (not created by Ruby, or not running Ruby yet): no Ruby frames.
    pub const NO_CONTEXT: u32 = 4;
    /// The execution context that was found is inconsistent (`ec.thread.ec`, frame pointer outside its stack): no Ruby frames.
    pub const BAD_CONTEXT: u32 = 8;
    /// The image's Ruby stacks cannot be walked (no layout known): no Ruby frames.
    pub const NO_LAYOUT: u32 = 16;
    /// A [`NativeEvent`] precedes the record.
    pub const NATIVE: u32 = 32;
    /// The thread was in the kernel.
    pub const IN_KERNEL: u32 = 64;
    /// The thread held the GVL, and another thread was waiting for it ([`Cause::CpuClock`]).
    pub const BLOCKS: u32 = 128;
    /// The collector was marking, sweeping or compacting in a major cycle.
    pub const MAJOR: u32 = 256;
    /// The same in a minor cycle. Neither flag: it did none of these, or the kind of cycle is not known.
    pub const MINOR: u32 = 512;
    /// The thread's tracing library had published an active span ([`ThreadContext`](crate::config::ThreadContext)).
    pub const SPAN: u32 = 1024;
}

/// Why the walk of a native stack ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum NativeEnd {
    /// At the outermost frame.
    Complete = 0,
    /// Deeper than [`MAX_NATIVE_FRAMES`].
    Truncated = 1,
    /// An address in no mapping that has an unwind table (JIT code, a file that could not be read).
    NoTable = 2,
    /// An address of a mapped file that its unwind table does not cover.
    NoRow = 3,
    /// A rule that the kernel side does not evaluate (a DWARF expression).
    Unsupported = 4,
    /// Stack memory could not be read.
    ReadFailed = 5,
    /// The registers that user mode had could not be found.
    NoRegisters = 6,
}

impl NativeEnd {
    /// Decodes an end; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Complete,
            1 => Self::Truncated,
            2 => Self::NoTable,
            3 => Self::NoRow,
            4 => Self::Unsupported,
            5 => Self::ReadFailed,
            6 => Self::NoRegisters,
            _ => return None,
        })
    }
}

/// Head of a record of native frames; `count` addresses (`u64`) follow, leaf first: the instruction pointer, then
/// return addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct NativeEvent {
    /// Common head; `tid` and `ts_ns` equal those of the [`StackEvent`] that follows. `point` is a [`NativeEnd`].
    pub header: Header,
    /// Number of addresses that follow.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// A thread that was off its CPU for at least the configured time runs again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct OffCpuEvent {
    /// Common head; `ts_ns` is the time at which the thread runs again, `point` one of the constants below.
    pub header: Header,
    /// When it left its CPU, nanoseconds as in the header.
    pub begin_ns: u64,
    /// When it became runnable, nanoseconds; equals `begin_ns` for a thread that was preempted, 0 if that was not seen.
    pub wakeup_ns: u64,
    /// When the thread took the request that it serves, nanoseconds as in the header; 0: no known request.
    pub request_ns: u64,
    /// When it began to wait for the GVL, which can be before it left its CPU or, if another thread made it ready, after; nanoseconds
    /// as in the header, or one of the `GVL` constants.
    pub gvl_ns: u64,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
}

impl OffCpuEvent {
    /// In `gvl_ns`: it is not known whether it waited for the GVL.
    pub const GVL_UNKNOWN: u64 = 0;
    /// In `gvl_ns`: it did not wait for the GVL.
    pub const GVL_OTHER: u64 = u64::MAX;
    /// In `point`: the thread gave up its CPU by itself (it slept or waited).
    pub const BLOCKED: u32 = 0;
    /// In `point`: it was preempted while it was runnable.
    pub const PREEMPTED: u32 = 1;
    /// In `point`, in addition to one of the above: its stack follows, with the time of `begin_ns`.
    pub const STACK_FOLLOWS: u32 = 2;
}

const _: () = assert!(size_of::<RubyFrame>() == 24);
const _: () = assert!(size_of::<StackEvent>() == 40 + 72 + 16 + 8 * MAX_KERNEL_FRAMES);
const _: () = assert!(size_of::<NativeEvent>() == 48);
const _: () = assert!(size_of::<OffCpuEvent>() == 88);
