//! Data that the stages of a stack share: data only, so that maps can hold it.

use gctrace_common::{
    config::StackPath,
    stack::{MAX_NATIVE_FRAMES, MAX_RUBY_FRAMES, NativeEvent, RubyFrame, StackEvent},
};

/// Bytes of control frames that are copied at once: a multiple of every `sizeof(rb_control_frame_t)` (56 and 64).
pub const CHUNK: u32 = 1792;
/// Bytes of the VM stack that are copied at once, of which the environments of many frames are read: a read costs about
/// as much as fifty instructions, whatever its length.
pub const WINDOW: u32 = 4096;
/// The words around `ep` that describe an environment: method entry, outer environment, flags.
pub const ENVIRONMENT: u32 = 24;
/// Bytes behind the last place at which a control frame can begin, and the mask that proves it to the verifier.
pub const CHUNK_MASK: u32 = 2047;
/// Words that are read at once: return address, and registers pushed before the frame's own data.
pub const UNWIND_WINDOW: usize = 8;

/// A stack that is being taken.
#[repr(C)]
pub struct Scratch {
    /// Number of claims; it belongs to the one that raised this from 0 to 1 ([`crate::family::Probe`]).
    pub busy: u64,
    /// `bpf_get_current_pid_tgid` of its owner ([`crate::family::Probe`]).
    pub owner: u64,
    /// Next control frame.
    pub next: u64,
    /// Where the control frames end.
    pub end: u64,
    /// Address of what `chunk` holds.
    pub chunk_at: u64,
    /// The control frame whose method entry is searched: its `iseq`, `pc` and flags.
    pub iseq: u64,
    pub pc: u64,
    pub flags: u64,
    /// The environment to inspect next; 0: the next control frame.
    pub ep: u64,
    /// Environments passed from the frame's own.
    pub hops: u32,
    /// Bytes in `chunk`.
    pub chunk_len: u32,
    /// Where the VM stack begins.
    pub stack: u64,
    /// Address of what `window` holds.
    pub window_at: u64,
    /// Bytes in `window`.
    pub window_len: u64,
    /// Bytes that it is to hold.
    pub window_want: u32,
    pub reserved: u32,
    /// Control frames.
    pub chunk: [u8; CHUNK_MASK as usize + 1 + StackPath::MAX_FRAME_SIZE as usize],
    /// A part of the VM stack.
    pub window: [u8; (WINDOW + ENVIRONMENT) as usize],
    /// The record; its frames follow.
    pub head: StackEvent,
    pub frames: [RubyFrame; MAX_RUBY_FRAMES],
    /// The walk of the native stack.
    pub native: Native,
}

/// A walk between two programs, and the record that it fills.
#[repr(C)]
pub struct Native {
    /// Instruction pointer of the frame to be walked.
    pub ip: u64,
    /// Its stack pointer.
    pub sp: u64,
    /// Its frame pointer.
    pub bp: u64,
    /// 1 if `ip` is an instruction that was interrupted, 0 if it is a return address.
    pub exact: u64,
    /// 1 if `bp` is not known.
    pub bp_lost: u64,
    /// Chunk with the mappings of the process.
    pub mappings: u64,
    /// The mapping of the last frame: first address, first address behind it, actual address of the table's base.
    pub start: u64,
    pub end: u64,
    pub base: u64,
    /// The first chunk of its table, and above it the number of pages.
    pub chunk: u64,
    /// The upper end of the frame being left.
    pub window: [u64; UNWIND_WINDOW],
    /// The head of the record.
    pub event: NativeEvent,
    /// Its frames.
    pub frames: [u64; MAX_NATIVE_FRAMES],
}
