//! Data shared by the stages of a stack: data only, so that maps can hold it.

use gctrace_common::{
    config::StackPath,
    stack::{MAX_NATIVE_FRAMES, MAX_RUBY_FRAMES, NativeEvent, RubyFrame, StackEvent},
};

/// Number of bytes of control frames copied at once: a multiple of every `sizeof(rb_control_frame_t)` (56 and 64).
pub const CHUNK: u32 = 1792;
/// Number of bytes of the VM stack copied at once, from which the environments of many frames are read: a read costs about
/// as much as fifty instructions, whatever its length.
pub const WINDOW: u32 = 4096;
/// Size of the words up to `*ep` that describe an environment (method entry, outer environment, flags), bytes.
pub const ENVIRONMENT: u32 = 24;
/// Highest offset in the chunk at which a control frame can begin, as a mask that proves this to the verifier.
pub const CHUNK_MASK: u32 = 2047;
/// Number of words read at once: the return address, and registers pushed before the frame's own data.
pub const UNWIND_WINDOW: usize = 8;

/// A stack that is being taken.
#[repr(C)]
pub struct Scratch {
    /// Number of claims; the scratch belongs to the claimer that raised this from 0 to 1 ([`crate::family::Probe`]).
    pub busy: u64,
    /// `bpf_get_current_pid_tgid` of its owner ([`crate::family::Probe`]).
    pub owner: u64,
    /// Address of the next control frame.
    pub next: u64,
    /// Where the control frames end.
    pub end: u64,
    /// Address of the contents of `chunk`.
    pub chunk_at: u64,
    /// The control frame whose method entry is being searched: its `iseq`, `pc` and flags.
    pub iseq: u64,
    pub pc: u64,
    pub flags: u64,
    /// The environment to inspect next; 0: the next control frame.
    pub ep: u64,
    /// Number of environments passed since the frame's own.
    pub hops: u32,
    /// Number of valid bytes in `chunk`.
    pub chunk_len: u32,
    /// Where the VM stack begins.
    pub stack: u64,
    /// Address of the contents of `window`.
    pub window_at: u64,
    /// Number of valid bytes in `window`.
    pub window_len: u64,
    /// Number of bytes that are to be copied to `window`.
    pub window_want: u32,
    pub reserved: u32,
    /// Control frames.
    pub chunk: [u8; CHUNK_MASK as usize + 1 + StackPath::MAX_FRAME_SIZE as usize],
    /// Part of the VM stack.
    pub window: [u8; (WINDOW + ENVIRONMENT) as usize],
    /// The record; its frames follow.
    pub head: StackEvent,
    pub frames: [RubyFrame; MAX_RUBY_FRAMES],
    /// The walk of the native stack.
    pub native: Native,
}

/// The state of a walk between two programs, and the record that it fills.
#[repr(C)]
pub struct Native {
    /// Instruction pointer of the frame to be walked next.
    pub ip: u64,
    /// Its stack pointer.
    pub sp: u64,
    /// Its frame pointer.
    pub bp: u64,
    /// 1 if `ip` is an instruction that was interrupted, 0 if it is a return address.
    pub exact: u64,
    /// 1 if `bp` is unknown.
    pub bp_lost: u64,
    /// Number of the chunk with the mappings of the process.
    pub mappings: u64,
    /// The mapping of the last frame: first address, first address after it, run-time address of the table's base.
    pub start: u64,
    pub end: u64,
    pub base: u64,
    /// Number of the first chunk of its table, and in the upper half the table's number of pages.
    pub chunk: u64,
    /// The upper end of the frame being left.
    pub window: [u64; UNWIND_WINDOW],
    /// The head of the record.
    pub event: NativeEvent,
    /// Its frames.
    pub frames: [u64; MAX_NATIVE_FRAMES],
}
