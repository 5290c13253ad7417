//! The records that travel through the ring buffers, in host byte order.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::memory::MemoryPages;

/// Size of one objspace span slot in a [`SnapshotEvent`], bytes.
pub const SLOT_BYTES: usize = 256;
/// Number of span slots in a [`SnapshotEvent`].
pub const SLOTS: usize = 12;
/// Size of the objspace data in a [`SnapshotEvent`], bytes.
pub const SNAPSHOT_BYTES: usize = SLOT_BYTES * SLOTS;

/// The type of a record; the first word of every record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// [`SnapshotEvent`]: the objspace at a GC event.
    Snapshot = 1,
    /// [`PauseEvent`]: one ENTER..EXIT interval.
    Pause = 2,
    /// [`LifeEvent`]: a followed process forked; `other` is the child.
    Fork = 3,
    /// [`LifeEvent`]: a followed process replaced its program.
    Exec = 4,
    /// [`LifeEvent`]: a followed process ended.
    Exit = 5,
    /// [`PhaseEvent`]: one interval between two fallback probes.
    Phase = 6,
    /// [`StackEvent`](crate::stack::StackEvent): what a thread was doing.
    Stack = 7,
    /// [`NativeEvent`](crate::stack::NativeEvent): the native frames of the stack record that follows.
    Native = 8,
    /// [`OffCpuEvent`](crate::stack::OffCpuEvent): a thread runs again.
    OffCpu = 9,
    /// [`GvlWaitEvent`](crate::gvl::GvlWaitEvent): a thread waited long for the GVL.
    GvlWait = 10,
    /// [`GvlThread`](crate::gvl::GvlThread): a thread ended; the record sums up what it did with the GVL.
    GvlThread = 11,
    /// [`GvlSpanEvent`](crate::gvl::GvlSpanEvent): a thread held the GVL for long, or was without it for long.
    GvlSpan = 12,
    /// [`RequestEvent`](crate::request::RequestEvent): a server has served a request.
    Request = 16,
    /// [`JobEvent`](crate::job::JobEvent): a thread has run a job.
    Job = 17,
    /// [`UnitEvent`](crate::request::UnitEvent): the objspace at the start or end of a request or a job.
    Unit = 18,
    /// [`RefillEvent`]: a thread took the free slots of a heap page for itself.
    Refill = 13,
}

impl Kind {
    /// Decodes a record kind; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            1 => Self::Snapshot,
            2 => Self::Pause,
            3 => Self::Fork,
            4 => Self::Exec,
            5 => Self::Exit,
            6 => Self::Phase,
            7 => Self::Stack,
            8 => Self::Native,
            9 => Self::OffCpu,
            10 => Self::GvlWait,
            11 => Self::GvlThread,
            12 => Self::GvlSpan,
            16 => Self::Request,
            17 => Self::Job,
            18 => Self::Unit,
            13 => Self::Refill,
            _ => return None,
        })
    }
}

/// Where in the VM a probe is: CRuby's internal events (`include/ruby/internal/event.h`), for which the VM tests
/// in its own code at these points, and the start of shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Point {
    /// `RUBY_INTERNAL_EVENT_GC_START`: a new cycle; `profile.count` is already incremented.
    GcStart = 0,
    /// `RUBY_INTERNAL_EVENT_GC_END_MARK`: marking of the cycle is complete.
    GcEndMark = 1,
    /// `RUBY_INTERNAL_EVENT_GC_END_SWEEP`: (lazy) sweeping of the cycle is complete.
    GcEndSweep = 2,
    /// `RUBY_INTERNAL_EVENT_GC_ENTER`: a pause of any kind begins.
    GcEnter = 3,
    /// `RUBY_INTERNAL_EVENT_GC_EXIT`: that pause ends.
    GcExit = 4,
}

impl Point {
    /// All points, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::GcStart, Self::GcEndMark, Self::GcEndSweep, Self::GcEnter, Self::GcExit];

    /// Decodes a point; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::GcStart,
            1 => Self::GcEndMark,
            2 => Self::GcEndSweep,
            3 => Self::GcEnter,
            4 => Self::GcExit,
            _ => return None,
        })
    }

    /// CRuby's name of the event, without its `RUBY_INTERNAL_EVENT_` prefix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GcStart => "GC_START",
            Self::GcEndMark => "GC_END_MARK",
            Self::GcEndSweep => "GC_END_SWEEP",
            Self::GcEnter => "GC_ENTER",
            Self::GcExit => "GC_EXIT",
        }
    }
}

/// What is timed if an image's event sites are not known: the bodies of functions found by their symbols, or the intervals
/// between USDT probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum WorkPhase {
    /// USDT `gc__mark__begin` to `gc__mark__end`.
    Mark = 0,
    /// USDT `gc__sweep__begin` to `gc__sweep__end`.
    Sweep = 1,
    /// The function `gc_start`.
    Start = 2,
    /// The function `gc_rest`.
    Rest = 3,
    /// The functions `gc_continue` (3.2 and later) and `gc_sweep_step` (before).
    Continue = 4,
    /// A whole pause: USDT `gc__enter` to `gc__exit` (4.1 and later).
    Pause = 5,
}

impl WorkPhase {
    /// All phases, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Mark, Self::Sweep, Self::Start, Self::Rest, Self::Continue, Self::Pause];

    /// Decodes a phase; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        if (raw as usize) < Self::ALL.len() { Some(Self::ALL[raw as usize]) } else { None }
    }

    /// The word used in output formats.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mark => "mark",
            Self::Sweep => "sweep",
            Self::Start => "start",
            Self::Rest => "rest",
            Self::Continue => "continue",
            Self::Pause => "pause",
        }
    }
}

/// Common head of all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Header {
    /// A [`Kind`].
    pub kind: u32,
    /// A [`Point`]; for [`Kind::Phase`] a [`WorkPhase`]; other kinds define it themselves or leave it zero.
    pub point: u32,
    /// Thread group id (what user space calls the pid), host pid namespace.
    pub tgid: u32,
    /// Thread id, host pid namespace.
    pub tid: u32,
    /// `bpf_ktime_get_ns` (`CLOCK_MONOTONIC`), nanoseconds.
    pub ts_ns: u64,
    /// Number of this record among the GC records of its process, from 1; gaps are records lost in the kernel.
    pub seq: u64,
    /// Index into `IMAGES`.
    pub image: u32,
    /// How often the process had replaced its program ([`Kind::Stack`], [`Kind::Native`], [`Kind::OffCpu`],
    /// [`Kind::GvlWait`], [`Kind::GvlThread`], [`Kind::GvlSpan`], [`Kind::Refill`], [`Kind::Request`], [`Kind::Job`], [`Kind::Unit`]);
    /// the same before this event ([`Kind::Exec`], [`Kind::Exit`]); otherwise 0.
    pub execs: u32,
}

/// A copy of the objspace taken while the thread is stopped at the probe.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct SnapshotEvent {
    /// Common head; `point` says where.
    pub header: Header,
    /// Run-time address of the probed instruction minus its stated one: the load bias of the image.
    pub bias: u64,
    /// Address of the objspace, as read through the VM pointer.
    pub objspace: u64,
    /// Objspace pointer that the site's register held, or 0 if no register is known.
    pub register: u64,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
    /// Number of slots of `data` that are filled, in the order of the image's spans.
    pub slots: u32,
    /// Number of enters of the thread that have not been exited yet, as far as they were seen; 0 outside any pause.
    pub depth: u32,
    /// When the thread took the request that it serves, nanoseconds as in the header; 0: it serves none, or that is not known.
    pub request_ns: u64,
    /// The memory counters of the process at this moment.
    pub memory: MemoryPages,
    /// The spans, one per slot of [`SLOT_BYTES`]; bytes beyond a span's length are undefined.
    pub data: [u8; SNAPSHOT_BYTES],
}

/// One pause: everything between a thread's outermost `GC_ENTER` and its `GC_EXIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct PauseEvent {
    /// Common head; `ts_ns` is the end of the pause.
    pub header: Header,
    /// Start of the pause, nanoseconds as in the header.
    pub begin_ns: u64,
    /// Time of `GC_START` inside this pause, or 0.
    pub start_ns: u64,
    /// Time of the last `GC_END_MARK` inside this pause, or 0.
    pub end_mark_ns: u64,
    /// Time of the last `GC_END_SWEEP` inside this pause, or 0.
    pub end_sweep_ns: u64,
    /// `objspace->profile.count` at the start of the pause (before `GC_START` increments it).
    pub count: u64,
    /// Stated address of the `GC_ENTER` site, which determines the kind of the pause.
    pub enter_site: u64,
    /// `objspace->flags` word at the start of the pause; contains the GC mode.
    pub flags: u32,
    /// Number of nested enters seen inside this pause.
    pub nested: u32,
    /// As [`SnapshotEvent::request_ns`].
    pub request_ns: u64,
}

/// One interval between two fallback probes, on one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct PhaseEvent {
    /// Common head; `point` is the [`WorkPhase`], `ts_ns` the end.
    pub header: Header,
    /// Start of the interval, nanoseconds as in the header.
    pub begin_ns: u64,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
}

/// A process event of a followed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct LifeEvent {
    /// Common head; `point` is 0, `seq` the number of GC records the process has emitted or lost so far.
    pub header: Header,
    /// The child's tgid for a fork, otherwise 0.
    pub other: u32,
    /// 1 at the end of a program whose GVL was watched: there may be entries of its threads.
    pub gvl: u32,
    /// When the program that ended was started by an exec, `CLOCK_MONOTONIC` nanoseconds; 0 if that was not seen, or no program
    /// ended.
    pub begun_ns: u64,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
}

/// A thread took the free slots of a heap page for itself: it can allocate that many objects before its next refill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct RefillEvent {
    /// Common head; `seq` is the number of this record among the refills of its program, from 1.
    pub header: Header,
    /// Number of slots.
    pub slots: u32,
    /// Size of each slot, bytes.
    pub slot_size: u32,
}

const _: () = assert!(size_of::<RefillEvent>() == 48);
const _: () = assert!(size_of::<Header>() == 40);
const _: () =
    assert!(size_of::<SnapshotEvent>() == 40 + 24 + 16 + 8 + 8 + size_of::<MemoryPages>() + SNAPSHOT_BYTES);
const _: () = assert!(size_of::<PauseEvent>() == 40 + 64);
const _: () = assert!(size_of::<PhaseEvent>() == 64);
const _: () = assert!(size_of::<LifeEvent>() == 72);
