//! The GVL: what the kernel side adds up per thread, and the records about it. They travel in the ring of stacks.

use crate::event::Header;

/// Entries of the `GVL_THREADS` map: threads of all traced processes at one time.
pub const MAX_GVL_THREADS: u32 = 8192;
/// Entries of the `GVL_LOCKS` map: GVLs (one per process up to 2.7, one per Ractor from 3.0 on).
pub const MAX_GVL_LOCKS: u32 = 4096;
/// Entries of the `GVL_EDGES` map: pairs of a waiting and a holding thread.
pub const MAX_GVL_EDGES: u32 = 16_384;

/// Entries of the `GVL_TASKS` map: native threads of all traced processes at one time.
pub const MAX_GVL_TASKS: u32 = 16_384;

/// Entries of the `GVL_CLOSED` map: how often the gate of the GVL probes can be closed and opened again.
pub const MAX_GVL_EPOCHS: u32 = 65_536;

/// The gate of the GVL probes, one word in the `GVL_GATE` map: what they do at a hit, and how often they were opened before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlGate {
    /// One of the constants.
    pub level: u8,
    /// How often the gate was closed and opened again. What is known of a thread from an earlier epoch ended with that.
    pub epoch: u32,
}

impl GvlGate {
    /// [`GvlGate::level`]: add up and report.
    pub const EVENTS: u8 = 0;
    /// [`GvlGate::level`]: add up, report nothing.
    pub const SUMS: u8 = 1;
    /// [`GvlGate::level`]: nothing.
    pub const CLOSED: u8 = 2;

    /// The word.
    pub const fn pack(self) -> u64 {
        (self.epoch as u64) << 8 | self.level as u64
    }

    /// The inverse of [`GvlGate::pack`]; total.
    pub const fn unpack(raw: u64) -> Self {
        Self { level: raw as u8, epoch: (raw >> 8) as u32 }
    }
}

/// Key of the `GVL_THREADS` and `GVL_LOCKS` maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct GvlKey {
    /// Of a thread: its `rb_thread_t *` where the events tell it ([`GvlPath::BY_THREAD`]), else its tid.
    /// Of a GVL: the address of its `rb_ractor_t` (3.2 and later), of the GVL (3.0, 3.1) or of the VM.
    pub at: u64,
    /// Its process.
    pub tgid: u32,
    /// How often that had replaced its program.
    pub execs: u32,
}

/// How the threads of an image are told apart and their GVL is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GvlPath {
    /// One of the constants.
    pub by: u32,
    /// Byte offset of `ractor` in `rb_thread_t`; 0: the GVL is told at the probe.
    pub thread_ractor: u32,
    /// Where the condition variable is on which a thread waits for the GVL. Zero unless futexes are looked at.
    pub futex: FutexPath,
}

/// How a wait for the GVL is told by the futex that the thread waits on. Offsets are in `rb_thread_t` where nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FutexPath {
    /// Byte offset of the condition variable in `rb_thread_t` (`native_thread_data.cond.gvlq`, up to 3.1), or in
    /// `rb_native_thread` (`cond.readyq`, from 3.2 on).
    pub cond: u32,
    /// Byte offset of `nt`; 0: the condition variable is in `rb_thread_t`.
    pub native: u32,
    /// Byte offset of `thread_id`, a `pthread_t`, where the condition variable is in `rb_thread_t`.
    pub thread_id: u32,
    /// Byte offset of `sched.node.readyq` (from 3.3 on): a thread that waits for the GVL is in that list, one that sleeps on the
    /// same condition variable is not. 0: `unblock` tells it.
    pub ready: u32,
    /// Byte offset of `unblock.func` (up to 3.2): null in a thread that waits for the GVL, set in one that sleeps.
    pub unblock: u32,
    /// Byte offset of the pointer to what `owner` is in: the VM or the Ractor.
    pub owner_in: u32,
    /// Byte offset there of who holds the GVL (up to 3.2).
    pub owner: u32,
    /// Zero.
    pub reserved: u32,
}

/// A thread that waits again on its condition variable within this time had not got the GVL if somebody held it when it
/// woke, nanoseconds.
pub const GOES_ON_NS: u64 = 1_000_000;

impl GvlPath {
    /// [`GvlPath::by`]: the GVL of this image is not watched.
    pub const NONE: u32 = 0;
    /// By `rb_thread_t *`: a thread can go from one native thread to another (3.3 and later).
    pub const BY_THREAD: u32 = 1;
    /// By tid: each has a native thread of its own.
    pub const BY_TID: u32 = 2;
    /// By tid, and only what blocks on a futex is seen.
    pub const BY_FUTEX: u32 = 3;
}

/// What happens at a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum GvlPoint {
    /// A thread begins.
    Started = 0,
    /// It wants the GVL.
    Ready = 1,
    /// It has got the GVL.
    Resumed = 2,
    /// It gives the GVL up.
    Suspended = 3,
    /// It ends.
    Exited = 4,
}

impl GvlPoint {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Started, Self::Ready, Self::Resumed, Self::Suspended, Self::Exited];

    /// The word used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Started => "STARTED",
            Self::Ready => "READY",
            Self::Resumed => "RESUMED",
            Self::Suspended => "SUSPENDED",
            Self::Exited => "EXITED",
        }
    }
}

/// The attach cookie of a probe at a GVL point: which image, where the thread is, and which instruction it is.
///
/// Bit layout: 63..56 image, 55..52 register, 51 whether the thread is in memory, 50..36 how many bytes behind what the
/// register holds (signed), 35..0 stated address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlCookie {
    /// Index into the `IMAGES` map.
    pub image: u8,
    /// Hardware number of the register (0 rax … 4 rsp … 15 r15).
    pub register: u8,
    /// Whether the register leads to the eight bytes that hold the thread, instead of holding it.
    pub in_memory: bool,
    /// Bytes from where the register points to those.
    pub displacement: i16,
    /// Stated address of the probed instruction.
    pub address: u64,
}

impl GvlCookie {
    const ADDRESS: u64 = (1 << 36) - 1;
    const DISPLACEMENT: u64 = (1 << 15) - 1;

    /// Packs the cookie; [`GvlCookie::fits`] tells beforehand whether it can be.
    pub const fn pack(self) -> u64 {
        (self.image as u64) << 56
            | (self.register as u64 & 15) << 52
            | (self.in_memory as u64) << 51
            | (self.displacement as u64 & Self::DISPLACEMENT) << 36
            | self.address & Self::ADDRESS
    }

    /// The inverse of [`GvlCookie::pack`]; total.
    pub const fn unpack(raw: u64) -> Self {
        Self {
            image: (raw >> 56) as u8,
            register: (raw >> 52) as u8 & 15,
            in_memory: raw >> 51 & 1 != 0,
            // The shift to the left and back extends the sign.
            displacement: ((raw >> 36 & Self::DISPLACEMENT) as i16) << 1 >> 1,
            address: raw & Self::ADDRESS,
        }
    }

    /// Whether every field fits its width, so that packing loses nothing.
    pub const fn fits(self) -> bool {
        self.register < 16
            && self.displacement >= -(1 << 14)
            && self.displacement < 1 << 14
            && self.address <= Self::ADDRESS
    }
}

/// Buckets of a histogram of times.
pub const BUCKETS: usize = 256;
/// Times below 2 to this power share the first bucket, nanoseconds.
const FIRST_BITS: u32 = 10;
/// Each power of two above is divided into 2 to this power buckets of the same width.
const SUB_BITS: u32 = 3;

/// The bucket of a time: log-linear, so that a bucket is at most an eighth of its times wide.
#[inline]
pub const fn bucket(ns: u64) -> usize {
    if ns < 1 << FIRST_BITS {
        return 0;
    }
    let power = ns.ilog2();
    let part = (ns >> (power - SUB_BITS)) as usize & ((1 << SUB_BITS) - 1);
    let at = 1 + (((power - FIRST_BITS) as usize) << SUB_BITS) + part;
    if at < BUCKETS - 1 { at } else { BUCKETS - 1 }
}

/// The longest time that falls into a bucket, nanoseconds; `None` for the last, which has no bound.
pub const fn bucket_most(bucket: usize) -> Option<u64> {
    if bucket == 0 {
        return Some((1 << FIRST_BITS) - 1);
    }
    if bucket >= BUCKETS - 1 {
        return None;
    }
    let power = FIRST_BITS + ((bucket - 1) >> SUB_BITS) as u32;
    let part = ((bucket - 1) & ((1 << SUB_BITS) - 1)) as u64;
    Some((1 << power) + ((part + 1) << (power - SUB_BITS)) - 1)
}

/// Holds of a GVL that are remembered. A wait in which more threads held it is not told completely.
pub const HOLDS: usize = 16;

/// One time that a thread held a GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GvlHold {
    /// When it got it, nanoseconds.
    pub begin_ns: u64,
    /// When it gave it up, nanoseconds; 0 if it has not yet.
    pub end_ns: u64,
    /// Who.
    pub holder: GvlHolder,
}

impl GvlHold {
    /// How much of a wait it covers, nanoseconds.
    #[inline]
    pub fn overlap(&self, begin_ns: u64, end_ns: u64) -> u64 {
        let from = if self.begin_ns > begin_ns { self.begin_ns } else { begin_ns };
        let to = if self.end_ns != 0 && self.end_ns < end_ns { self.end_ns } else { end_ns };
        to.saturating_sub(from)
    }
}

/// A GVL: value of the `GVL_LOCKS` map.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GvlLock {
    /// How often it was got so far; the last one is in `holds` at one less, modulo [`HOLDS`].
    pub count: u64,
    /// [`GvlGate::epoch`] of the last one.
    pub epoch: u64,
    /// The last holds.
    pub holds: [GvlHold; HOLDS],
}

/// A thread that held a GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GvlHolder {
    /// [`GvlThread::id`]; 0: no thread.
    pub id: u64,
    /// Its tid then.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// `comm` of that, NUL padded.
    pub comm: [u8; 16],
}

/// What a thread is doing with regard to the GVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum GvlState {
    /// Not seen yet.
    Unknown = 0,
    /// It waits for it.
    Ready = 1,
    /// It holds it.
    Running = 2,
    /// It does without: it sleeps, or runs what needs no GVL.
    Away = 3,
}

impl GvlState {
    /// Reads a state; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Unknown,
            1 => Self::Ready,
            2 => Self::Running,
            3 => Self::Away,
            _ => return None,
        })
    }
}

/// What is known of a thread: value of the `GVL_THREADS` map, and the record with which the thread ends.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GvlThread {
    /// Common head of the record; `ts_ns` is the end of the thread, `tid` that of its last native thread, 0 if it never ran.
    pub header: Header,
    /// Unique in its process, never 0.
    pub id: u64,
    /// Its `rb_thread_t *`; 0 where the events do not tell it.
    pub thread: u64,
    /// [`GvlKey::at`] of its GVL, 0 if that is not known yet.
    pub lock: u64,
    /// When it was first seen, nanoseconds.
    pub born_ns: u64,
    /// Since when it has been in its state, nanoseconds.
    pub since_ns: u64,
    /// A [`GvlState`].
    pub state: u32,
    /// [`GvlGate::epoch`] in which it was entered.
    pub epoch: u32,
    /// [`GvlPath::BY_FUTEX`]: when a thread that waits left its futex, nanoseconds; 0 while it is in there. Whether it got the
    /// GVL then is not known yet.
    pub left_ns: u64,
    /// `comm` of its last native thread, NUL padded.
    pub comm: [u8; 16],
    /// Waits for the GVL that are over.
    pub waits: u64,
    /// How long they took together, nanoseconds.
    pub wait_ns: u64,
    /// The longest.
    pub wait_max_ns: u64,
    /// Times for which it held the GVL that are over.
    pub holds: u64,
    /// How long they took together, nanoseconds.
    pub hold_ns: u64,
    /// The longest.
    pub hold_max_ns: u64,
    /// Times without the GVL that are over.
    pub aways: u64,
    /// How long they took together, nanoseconds.
    pub away_ns: u64,
    /// Up to when `split` is told, nanoseconds; 0: it is not told any more, because its native thread has ended.
    pub told_ns: u64,
    /// Clocks of its native thread then.
    pub clocks: Clocks,
    /// What its native thread did, by [`GvlState`], nanoseconds.
    pub split: [Clocks; 4],
    /// The waits by [`bucket`].
    pub buckets: [u32; BUCKETS],
}

/// For how long a native thread ran on a CPU, could have run, and could not, nanoseconds; by the constants of [`GvlTask`].
pub type Clocks = [u64; 3];

/// A native thread as the scheduler sees it: value of the `GVL_TASKS` map, keyed by tid. The scheduler's tracepoints change
/// `state`, `since_ns` and `clocks`; so does a thread that runs although they did not tell it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GvlTask {
    /// Odd while it is being changed.
    pub seq: u64,
    /// Since when it has been in its state, nanoseconds.
    pub since_ns: u64,
    /// How long it has been in each state before.
    pub clocks: Clocks,
    /// CPU time that the kernel had charged it when it was switched to or from last, nanoseconds.
    pub charged_ns: u64,
    /// [`GvlThread::id`] of the thread that it runs.
    pub owner: u64,
    /// The key of that.
    pub key: GvlKey,
    /// One of the constants.
    pub state: u32,
    /// [`GvlGate::epoch`] in which it was entered; in a later one nothing of it holds.
    pub epoch: u32,
}

impl GvlTask {
    /// It runs on a CPU.
    pub const CPU: u32 = 0;
    /// It could run, and has no CPU.
    pub const RUNNABLE: u32 = 1;
    /// It sleeps, or waits for something.
    pub const BLOCKED: u32 = 2;

    /// The clocks at a time that is not before the last change.
    #[inline]
    pub fn clocks_at(&self, now_ns: u64) -> Clocks {
        let ns = now_ns.saturating_sub(self.since_ns);
        let of = |state| if self.state == state { ns } else { 0 };
        [
            self.clocks[0] + of(Self::CPU),
            self.clocks[1] + of(Self::RUNNABLE),
            self.clocks[2] + of(Self::BLOCKED),
        ]
    }

    /// It is on a CPU, and was not seen to get there. What the kernel has charged it since tells how long it has been.
    #[inline]
    pub fn unseen(&mut self, charged_ns: u64, now_ns: u64) {
        let ns = now_ns.saturating_sub(self.since_ns);
        let charged = charged_ns.saturating_sub(self.charged_ns);
        let ran = if charged < ns { charged } else { ns };
        self.since_ns += ran;
        self.clocks = self.clocks_at(now_ns);
        self.clocks[0] += ran;
        self.state = Self::CPU;
        self.since_ns = now_ns;
        self.charged_ns = charged_ns;
    }

    /// Its state changes.
    #[inline]
    pub fn enter(&mut self, state: u32, now_ns: u64) {
        self.clocks = self.clocks_at(now_ns);
        self.state = state;
        self.since_ns = now_ns;
    }
}

/// What three clocks went forward by. [`GvlTask::unseen`] gives one clock what another one had: that goes back, and the others together
/// stay behind by as much.
#[inline]
fn elapsed(before: &Clocks, now: &Clocks) -> Clocks {
    let forward = |from: u64, to: u64| {
        let ns = to.wrapping_sub(from);
        if ns.cast_signed() < 0 { 0 } else { ns }
    };
    let at_most = |ns: u64, most: u64| if ns < most { ns } else { most };
    let whole = forward(before[0] + before[1] + before[2], now[0] + now[1] + now[2]);
    let cpu = at_most(forward(before[0], now[0]), whole);
    let runnable = at_most(forward(before[1], now[1]), whole - cpu);
    [cpu, runnable, whole - cpu - runnable]
}

/// What a trap costs besides its program, nanoseconds: entering and leaving the kernel, and stepping over the instruction (measured on
/// x86-64).
pub const TRAP_NS: u64 = 700;
/// What reporting a wait costs besides, nanoseconds: taking its stack.
pub const STACK_NS: u64 = 10_000;

/// What an event means for a thread, by the state that it was in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The next event after the one before.
    Paired(u64),
    /// It goes on with what it had been doing: a suspension that was called off, a yield without a suspension.
    Continued,
    /// The event before it was not seen.
    Orphan,
}

impl GvlThread {
    /// A thread that was not seen yet.
    pub const fn blank() -> Self {
        Self {
            header: Header { kind: 0, point: 0, tgid: 0, tid: 0, ts_ns: 0, seq: 0, image: 0, execs: 0 },
            id: 0,
            thread: 0,
            lock: 0,
            born_ns: 0,
            since_ns: 0,
            state: UNKNOWN,
            epoch: 0,
            left_ns: 0,
            comm: [0; 16],
            waits: 0,
            wait_ns: 0,
            wait_max_ns: 0,
            holds: 0,
            hold_ns: 0,
            hold_max_ns: 0,
            aways: 0,
            away_ns: 0,
            told_ns: 0,
            clocks: [0; 3],
            split: [[0; 3]; 4],
            buckets: [0; BUCKETS],
        }
    }

    /// Adds up what its native thread did in the state that it is in. `clocks` are those of the native thread now; `None`: it
    /// has none of its own, so it does nothing.
    #[inline]
    pub fn told(&mut self, clocks: Option<Clocks>, now_ns: u64) {
        let parts = match clocks {
            Some(now) => elapsed(&self.clocks, &now),
            None => [0, 0, now_ns.saturating_sub(self.told_ns)],
        };
        let rows: *mut Clocks = (&raw mut self.split).cast();
        // SAFETY: the index is masked to the array.
        let row = unsafe { &mut *rows.add(self.state as usize & 3) };
        row[0] += parts[0];
        row[1] += parts[1];
        row[2] += parts[2];
        self.told_ns = now_ns;
    }

    /// The gate was closed at that time, and what it did since is not known. What it was doing then counts up to then.
    #[inline]
    pub fn interrupted(&mut self, closed_ns: u64, now_ns: u64, epoch: u32) {
        let ns = closed_ns.saturating_sub(self.since_ns);
        // Each is written in any case: of a choice LLVM makes one store at an offset that depends on the state, which the
        // verifier refuses ("R2 unbounded memory access, make sure to bounds check any such access").
        self.wait_ns += if self.state == READY { ns } else { 0 };
        self.hold_ns += if self.state == RUNNING { ns } else { 0 };
        self.away_ns += if self.state == AWAY { ns } else { 0 };
        self.epoch = epoch;
        self.enter(UNKNOWN, now_ns);
    }

    /// It has left its futex for good at that time: it has got the GVL, and what it does then is not seen. Returns how long it
    /// waited; the caller counts it in its bucket.
    #[inline]
    pub fn waited(&mut self, until_ns: u64) -> Step {
        let step = self.resumed(until_ns);
        self.left_ns = 0;
        self.state = UNKNOWN;
        step
    }

    /// It wants the GVL. `Paired` has the time that it was away.
    #[inline]
    pub fn ready(&mut self, now_ns: u64) -> Step {
        let ns = now_ns.wrapping_sub(self.since_ns);
        let step = match self.state {
            AWAY => {
                self.aways += 1;
                self.away_ns += ns;
                Step::Paired(ns)
            }
            // `thread_sched_yield` of 3.2 has no event for what it gives up.
            RUNNING => Step::Continued,
            UNKNOWN => Step::Paired(0),
            _ => Step::Orphan,
        };
        self.enter(READY, now_ns);
        step
    }

    /// It has got the GVL. `Paired` has the time that it waited; the caller counts it in its bucket.
    #[inline]
    pub fn resumed(&mut self, now_ns: u64) -> Step {
        let ns = now_ns.wrapping_sub(self.since_ns);
        let step = if self.state == READY {
            self.waits += 1;
            self.wait_ns += ns;
            if ns > self.wait_max_ns {
                self.wait_max_ns = ns;
            }
            Step::Paired(ns)
        } else {
            Step::Orphan
        };
        self.enter(RUNNING, now_ns);
        step
    }

    /// It gives the GVL up. `Paired` has the time that it held it.
    #[inline]
    pub fn suspended(&mut self, now_ns: u64) -> Step {
        let ns = now_ns.wrapping_sub(self.since_ns);
        let step = match self.state {
            RUNNING => {
                self.holds += 1;
                self.hold_ns += ns;
                if ns > self.hold_max_ns {
                    self.hold_max_ns = ns;
                }
                Step::Paired(ns)
            }
            // `thread_sched_to_waiting_until_wakeup` of 3.3 and later, interrupted: it has the event, and keeps the GVL.
            AWAY => {
                self.hold_ns += ns;
                Step::Continued
            }
            _ => Step::Orphan,
        };
        self.enter(AWAY, now_ns);
        step
    }

    #[inline]
    fn enter(&mut self, state: u32, now_ns: u64) {
        self.state = state;
        self.since_ns = now_ns;
    }
}

const UNKNOWN: u32 = GvlState::Unknown as u32;
const READY: u32 = GvlState::Ready as u32;
const RUNNING: u32 = GvlState::Running as u32;
const AWAY: u32 = GvlState::Away as u32;

/// Key of the `GVL_EDGES` map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct GvlEdgeKey {
    /// [`GvlThread::id`] of the thread that waited.
    pub waiter: u64,
    /// [`GvlThread::id`] of the thread that held the GVL meanwhile.
    pub holder: u64,
    /// Their process.
    pub tgid: u32,
    /// How often that had replaced its program.
    pub execs: u32,
}

/// Value of the `GVL_EDGES` map: how one thread waited while another held the GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GvlEdge {
    /// How often the other got the GVL or had it.
    pub holds: u64,
    /// How long that was while the one waited, nanoseconds.
    pub wait_ns: u64,
    /// The longest at a stretch.
    pub wait_max_ns: u64,
}

/// One long wait for the GVL. A stack record of the same `tid` and `ts_ns` follows if `stack` says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct GvlWaitEvent {
    /// Common head; `ts_ns` is the time at which it got the GVL.
    pub header: Header,
    /// When it began to wait, nanoseconds as in the header.
    pub begin_ns: u64,
    /// [`GvlThread::id`] of the thread that waited.
    pub id: u64,
    /// Its `rb_thread_t *`; 0 where the events do not tell it.
    pub thread: u64,
    /// Who held the GVL longest at a stretch meanwhile, and when.
    pub hold: GvlHold,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
    /// 1: its stack follows.
    pub stack: u32,
    /// Zero.
    pub reserved: u32,
}

/// For a long time a thread held the GVL, or did without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct GvlSpanEvent {
    /// Common head; `ts_ns` is the end.
    pub header: Header,
    /// When it began, nanoseconds as in the header.
    pub begin_ns: u64,
    /// [`GvlThread::id`].
    pub id: u64,
    /// Its `rb_thread_t *`; 0 where the events do not tell it.
    pub thread: u64,
    /// `comm` of its native thread, NUL padded.
    pub comm: [u8; 16],
    /// [`GvlState::Running`] or [`GvlState::Away`].
    pub state: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<GvlKey>() == 16);
const _: () = assert!(size_of::<GvlPath>() == 40);
const _: () = assert!(size_of::<GvlHolder>() == 32);
const _: () = assert!(size_of::<GvlHold>() == 48);
const _: () = assert!(size_of::<GvlLock>() == 16 + 48 * HOLDS && HOLDS.is_power_of_two());
const _: () = assert!(size_of::<GvlThread>() == 40 + 40 + 8 + 8 + 16 + 64 + 8 + 24 + 96 + 4 * BUCKETS);
const _: () = assert!(size_of::<GvlTask>() == 80);
const _: () = assert!(size_of::<GvlEdgeKey>() == 24);
const _: () = assert!(size_of::<GvlEdge>() == 24);
const _: () = assert!(size_of::<GvlWaitEvent>() == 40 + 24 + 48 + 16 + 8);
const _: () = assert!(size_of::<GvlSpanEvent>() == 40 + 24 + 16 + 8);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every time lies in its bucket, buckets follow each other without gaps, and none is wider than an eighth.
    #[test]
    fn buckets() {
        let mut from = 0;
        for at in 0..BUCKETS - 1 {
            let most = bucket_most(at).unwrap();
            assert_eq!((bucket(from), bucket(most), bucket(most + 1)), (at, at, at + 1), "{from}..={most}");
            assert!(at == 0 || most - from < from / 8 + 1, "{from}..={most}");
            from = most + 1;
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_most(BUCKETS - 1), None);
        assert!(from > 1_000_000_000_000, "more than a thousand seconds have a bucket");
    }

    /// A thread's events add up, and what is unpaired adds nothing.
    #[test]
    fn events() {
        let mut t = GvlThread::blank();
        assert_eq!(t.ready(100), Step::Paired(0));
        assert_eq!(t.resumed(1_000_100), Step::Paired(1_000_000));
        assert_eq!(t.suspended(1_000_150), Step::Paired(50));
        assert_eq!(t.ready(1_000_250), Step::Paired(100));
        assert_eq!(t.resumed(1_000_260), Step::Paired(10));
        assert_eq!((t.waits, t.wait_ns, t.wait_max_ns), (2, 1_000_010, 1_000_000));
        assert_eq!((t.holds, t.hold_ns, t.hold_max_ns, t.aways, t.away_ns), (1, 50, 50, 1, 100));
        // A resume that was not seen to be waited for; the hold that it begins counts all the same.
        assert_eq!(t.resumed(1_000_300), Step::Orphan);
        assert_eq!(t.suspended(1_000_310), Step::Paired(10));
        assert_eq!(t.waits, 2);
        // A suspension that was called off: it went on holding.
        assert_eq!(t.suspended(1_000_330), Step::Continued);
        assert_eq!((t.holds, t.hold_ns), (2, 80));
        // Two readies: the time in between is nobody's.
        assert_eq!(t.ready(1_000_340), Step::Paired(10));
        assert_eq!(t.ready(1_000_350), Step::Orphan);
        assert_eq!(t.suspended(1_000_360), Step::Orphan);
        assert_eq!((t.waits, t.holds), (2, 2));
    }

    /// What a native thread does is told by what its thread does with the GVL, and the parts add up.
    #[test]
    fn parts() {
        let mut task = GvlTask { since_ns: 100, ..GvlTask::default() };
        let mut t = GvlThread::blank();
        (t.told_ns, t.state) = (100, GvlState::Running as u32);
        task.enter(GvlTask::RUNNABLE, 130);
        task.enter(GvlTask::CPU, 140);
        let tell = |t: &mut GvlThread, task: Option<&GvlTask>, now| {
            let clocks = task.map(|task| task.clocks_at(now));
            t.told(clocks, now);
            t.clocks = clocks.unwrap_or(t.clocks);
        };
        tell(&mut t, Some(&task), 200);
        t.state = GvlState::Away as u32;
        task.enter(GvlTask::BLOCKED, 210);
        task.enter(GvlTask::RUNNABLE, 290);
        task.enter(GvlTask::CPU, 295);
        tell(&mut t, Some(&task), 300);
        t.state = GvlState::Ready as u32;
        tell(&mut t, None, 350);
        assert_eq!(t.split, [[0; 3], [0, 0, 50], [90, 10, 0], [15, 5, 80]]);
        assert_eq!(t.split.as_flattened().iter().sum::<u64>(), 350 - 100);
    }

    /// A native thread that was not seen to get its CPU has had it for as long as the kernel has charged it. What was told before
    /// that showed is not told again, and all parts are still the whole.
    #[test]
    fn unseen() {
        let mut task = GvlTask { since_ns: 100, charged_ns: 7, ..GvlTask::default() };
        let mut t = GvlThread::blank();
        (t.told_ns, t.state) = (100, GvlState::Running as u32);
        let tell = |t: &mut GvlThread, task: &GvlTask, now| {
            t.told(Some(task.clocks_at(now)), now);
            t.clocks = task.clocks_at(now);
        };
        task.enter(GvlTask::RUNNABLE, 200);
        tell(&mut t, &task, 280);
        assert_eq!(t.split[2], [100, 80, 0]);
        task.unseen(107, 300);
        assert_eq!((task.state, task.since_ns, task.charged_ns), (GvlTask::CPU, 300, 107));
        assert_eq!(task.clocks_at(300), [200, 0, 0]);
        tell(&mut t, &task, 310);
        assert_eq!(t.split[2], [130, 80, 0]);
        // No more than the time that has passed, however much was charged; and nothing is charged back.
        task.enter(GvlTask::BLOCKED, 310);
        task.unseen(1_000_000, 330);
        assert_eq!(task.clocks_at(330), [230, 0, 0]);
        task.enter(GvlTask::BLOCKED, 330);
        task.unseen(0, 350);
        assert_eq!(task.clocks_at(350), [230, 0, 20]);
        // A clock that was read too late does not go back either.
        t.told(Some([0; 3]), 360);
        assert_eq!(t.split[2], [130, 80, 0]);
    }

    /// What of a hold lies in a wait.
    #[test]
    fn overlaps() {
        let hold = |begin_ns, end_ns| GvlHold { begin_ns, end_ns, holder: GvlHolder::default() };
        assert_eq!(hold(100, 200).overlap(150, 300), 50);
        assert_eq!(hold(100, 200).overlap(50, 120), 20);
        assert_eq!(hold(100, 200).overlap(120, 130), 10);
        assert_eq!(hold(100, 0).overlap(150, 300), 150);
        assert_eq!(hold(100, 200).overlap(200, 300), 0);
        assert_eq!(hold(100, 200).overlap(10, 100), 0);
    }

    /// Every field survives the round trip at its extremes.
    #[test]
    fn cookies() {
        for image in [0, 255] {
            for (register, in_memory) in [(0, false), (4, true), (15, true)] {
                for displacement in [0, 8, -8, (1 << 14) - 1, -(1 << 14)] {
                    for address in [0, 0x1234_5678, (1 << 36) - 1] {
                        let cookie = GvlCookie { image, register, in_memory, displacement, address };
                        assert!(cookie.fits());
                        assert_eq!(GvlCookie::unpack(cookie.pack()), cookie);
                    }
                }
            }
        }
        let cookie = GvlCookie { image: 0, register: 0, in_memory: true, displacement: 1 << 14, address: 0 };
        assert!(!cookie.fits());
        assert!(!GvlCookie { displacement: 0, address: 1 << 36, ..cookie }.fits());
    }
}
