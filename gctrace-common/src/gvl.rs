//! The GVL: what the kernel side adds up per thread, and the records about it. The records travel in the ring of stacks.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::event::Header;

mod place;
mod task;

pub use place::{FutexPath, GOES_ON_NS, GvlCookie, GvlPath, GvlPoint};
pub use task::{CLOCKS_UNKNOWN, Clocks, GvlTask, OwnTimes, clocks_at, elapsed};

/// Entries of the `GVL_THREADS` map: maximum number of threads of all traced processes at one time.
pub const MAX_GVL_THREADS: u32 = 8192;
/// Entries of the `GVL_LOCKS` map: GVLs (one per process up to 2.7, one per Ractor from 3.0 on).
pub const MAX_GVL_LOCKS: u32 = 4096;
/// Entries of the `GVL_EDGES` map: pairs of a waiting and a holding thread.
pub const MAX_GVL_EDGES: u32 = 16_384;

/// Entries of the `OWN_TIMES` map: maximum number of threads that begin or end a request at one time.
pub const MAX_OWN_TIMES: u32 = 4096;
/// Entries of the `GVL_TASKS` map: maximum number of native threads of all traced processes at one time.
pub const MAX_GVL_TASKS: u32 = 16_384;

/// Entries of the `GVL_CLOSED` map: how often the gate of the GVL probes can be closed and reopened.
pub const MAX_GVL_EPOCHS: u32 = 65_536;

/// The gate of the GVL probes, one word in the `GVL_GATE` map: what they do at a hit, and how often they were reopened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlGate {
    /// One of the constants below.
    pub level: u8,
    /// How often the gate was closed and reopened. What is known about a thread from an earlier epoch ended with that epoch.
    pub epoch: u32,
}

impl GvlGate {
    /// [`GvlGate::level`]: add up and report.
    pub const EVENTS: u8 = 0;
    /// [`GvlGate::level`]: add up, report nothing.
    pub const SUMS: u8 = 1;
    /// [`GvlGate::level`]: do nothing.
    pub const CLOSED: u8 = 2;

    /// Encodes it as a word.
    pub const fn pack(self) -> u64 {
        (self.epoch as u64) << 8 | self.level as u64
    }

    /// The inverse of [`GvlGate::pack`]; never fails.
    pub const fn unpack(raw: u64) -> Self {
        Self { level: raw as u8, epoch: (raw >> 8) as u32 }
    }
}

/// Key of the `GVL_THREADS` and `GVL_LOCKS` maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlKey {
    /// For a thread: its `rb_thread_t *` if the events carry it ([`GvlPath::BY_THREAD`]), otherwise its tid.
    /// For a GVL: the address of its `rb_ractor_t` (3.2 and later), of the GVL (3.0, 3.1) or of the VM.
    pub at: u64,
    /// Tgid of its process.
    pub tgid: u32,
    /// How often the process had replaced its program.
    pub execs: u32,
}

/// Buckets of a histogram of times.
pub const BUCKETS: usize = 256;
/// Times below 2 to this power share the first bucket, nanoseconds.
const FIRST_BITS: u32 = 10;
/// Each power of two above is divided into 2 to this power buckets of equal width.
const SUB_BITS: u32 = 3;

/// The bucket of a time: log-linear, so that a bucket is at most an eighth as wide as its times are long.
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

/// The longest time in a bucket, nanoseconds; `None` for the last bucket, which is unbounded.
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

/// Number of holds of a GVL that are remembered. A wait during which more threads held the GVL is not reported completely.
pub const HOLDS: usize = 16;

/// One period in which a thread held a GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlHold {
    /// When the thread acquired the GVL, nanoseconds.
    pub begin_ns: u64,
    /// When the thread released the GVL, nanoseconds; 0 if it has not yet.
    pub end_ns: u64,
    /// The thread.
    pub holder: GvlHolder,
}

impl GvlHold {
    /// How much of a wait this hold covers, nanoseconds.
    #[inline]
    pub fn overlap(&self, begin_ns: u64, end_ns: u64) -> u64 {
        let from = if self.begin_ns > begin_ns { self.begin_ns } else { begin_ns };
        let to = if self.end_ns != 0 && self.end_ns < end_ns { self.end_ns } else { end_ns };
        to.saturating_sub(from)
    }
}

/// A GVL: value of the `GVL_LOCKS` map.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlLock {
    /// Number of acquisitions so far; the last one is in `holds` at index `count - 1` modulo [`HOLDS`].
    pub count: u64,
    /// [`GvlGate::epoch`] of the last acquisition.
    pub epoch: u64,
    /// The last holds, a circular buffer.
    pub holds: [GvlHold; HOLDS],
    /// Number of threads that wait for it.
    pub waiting: u64,
    /// The thread that has waited longest began to wait at or before this time, nanoseconds.
    pub waiting_ns: u64,
}

/// A thread that held a GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlHolder {
    /// [`GvlThread::id`]; 0: no thread.
    pub id: u64,
    /// Its tid at that time.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// `comm` of that native thread, NUL padded.
    pub comm: [u8; 16],
}

/// The state of a thread with regard to the GVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum GvlState {
    /// Not seen yet.
    Unknown = 0,
    /// It waits for the GVL.
    Ready = 1,
    /// It holds the GVL.
    Running = 2,
    /// It is without the GVL: it sleeps, or runs code that needs no GVL.
    Away = 3,
}

impl GvlState {
    /// Decodes a state; unknown numbers are `None`.
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

/// What is known about a thread: value of the `GVL_THREADS` map, and the record sent when the thread ends.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlThread {
    /// Common head of the record; `ts_ns` is the end of the thread, `tid` is that of its last native thread, 0 if it never ran.
    pub header: Header,
    /// Unique in its process, never 0.
    pub id: u64,
    /// Its `rb_thread_t *`; 0 if the events do not carry it.
    pub thread: u64,
    /// [`GvlKey::at`] of its GVL, 0 if not known yet.
    pub lock: u64,
    /// When it was first seen, nanoseconds.
    pub born_ns: u64,
    /// Start of its current state, nanoseconds.
    pub since_ns: u64,
    /// A [`GvlState`].
    pub state: u32,
    /// [`GvlGate::epoch`] to which the state belongs.
    pub epoch: u32,
    /// 1: the thread is counted in [`GvlLock::waiting`].
    pub queued: u64,
    /// [`GvlPath::BY_FUTEX`]: when a waiting thread left its futex call, nanoseconds; 0 while it is in the call. Whether it then
    /// acquired the GVL is not known yet.
    pub left_ns: u64,
    /// `comm` of its last native thread, NUL padded.
    pub comm: [u8; 16],
    /// Number of finished waits for the GVL.
    pub waits: u64,
    /// Their total length, nanoseconds.
    pub wait_ns: u64,
    /// The longest wait, nanoseconds.
    pub wait_max_ns: u64,
    /// Number of finished holds of the GVL.
    pub holds: u64,
    /// Their total length, nanoseconds.
    pub hold_ns: u64,
    /// The longest hold, nanoseconds.
    pub hold_max_ns: u64,
    /// Number of finished times without the GVL.
    pub aways: u64,
    /// Their total length, nanoseconds.
    pub away_ns: u64,
    /// `split` is complete up to this time, nanoseconds; 0: it is no longer updated, because the native thread has ended.
    pub reported_ns: u64,
    /// Clocks of its native thread at that time.
    pub clocks: Clocks,
    /// What its native thread did in each [`GvlState`], nanoseconds.
    pub split: [Clocks; 4],
    /// Number of waits in each [`bucket`].
    pub buckets: [u32; BUCKETS],
}

/// What a trap costs in addition to its program, nanoseconds: entering and leaving the kernel, and stepping over the instruction
/// (measured on x86-64).
pub const TRAP_NS: u64 = 700;
/// What reporting a wait costs in addition, nanoseconds: taking its stack.
pub const STACK_NS: u64 = 10_000;

/// What an event means for a thread, depending on the thread's state before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It follows the event expected before it; the value is the time since then, nanoseconds.
    Paired(u64),
    /// The thread continues what it was doing: a suspension was called off, or a yield came without a suspension.
    Continued,
    /// The event before it was not seen.
    Orphan,
}

impl GvlThread {
    /// A thread that has not been seen yet.
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
            queued: 0,
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
            reported_ns: 0,
            clocks: [0; 3],
            split: [[0; 3]; 4],
            buckets: [0; BUCKETS],
        }
    }

    /// Adds what the native thread did to the part of `split` that belongs to the thread's current state. `clocks` are those of the native
    /// thread now; `None`: the thread has no native thread, so it counts as blocked.
    #[inline]
    pub fn report(&mut self, clocks: Option<Clocks>, now_ns: u64) {
        let parts = match clocks {
            Some(now) => elapsed(&self.clocks, &now),
            None => [0, 0, now_ns.saturating_sub(self.reported_ns)],
        };
        let rows: *mut Clocks = (&raw mut self.split).cast();
        // SAFETY: the index is masked to the array.
        let row = unsafe { &mut *rows.add(self.state as usize & 3) };
        row[0] += parts[0];
        row[1] += parts[1];
        row[2] += parts[2];
        self.reported_ns = now_ns;
    }

    /// The gate was closed at `closed_ns`, and what the thread did since is unknown. Its state at that time counts up to that time.
    #[inline]
    pub fn interrupted(&mut self, closed_ns: u64, now_ns: u64, epoch: u32) {
        let ns = closed_ns.saturating_sub(self.since_ns);
        // Each sum is written in any case: LLVM turns a choice into one store at an offset that depends on the state, which the
        // verifier refuses ("R2 unbounded memory access, make sure to bounds check any such access").
        self.wait_ns += if self.state == READY { ns } else { 0 };
        self.hold_ns += if self.state == RUNNING { ns } else { 0 };
        self.away_ns += if self.state == AWAY { ns } else { 0 };
        self.epoch = epoch;
        self.queued = 0;
        self.enter(UNKNOWN, now_ns);
    }

    /// The thread left its futex for good at `until_ns`: it acquired the GVL, and what it does then is not seen. Returns how long it
    /// waited; the caller counts it in its bucket.
    #[inline]
    pub fn waited(&mut self, until_ns: u64) -> Step {
        let step = self.resumed(until_ns);
        self.left_ns = 0;
        self.state = UNKNOWN;
        step
    }

    /// The thread requests the GVL. `Paired` has the time that it was without it.
    #[inline]
    pub fn ready(&mut self, now_ns: u64) -> Step {
        let ns = now_ns.wrapping_sub(self.since_ns);
        let step = match self.state {
            AWAY => {
                self.aways += 1;
                self.away_ns += ns;
                Step::Paired(ns)
            }
            // `thread_sched_yield` of 3.2 has no event for the release.
            RUNNING => Step::Continued,
            UNKNOWN => Step::Paired(0),
            _ => Step::Orphan,
        };
        self.enter(READY, now_ns);
        step
    }

    /// The thread has acquired the GVL. `Paired` has the time that it waited; the caller counts it in its bucket.
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

    /// The thread releases the GVL. `Paired` has the time that it held it.
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
            // `thread_sched_to_waiting_until_wakeup` of 3.3 and later, interrupted: the event occurs, but the thread keeps the GVL.
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
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlEdgeKey {
    /// [`GvlThread::id`] of the thread that waited.
    pub waiter: u64,
    /// [`GvlThread::id`] of the thread that held the GVL during the wait.
    pub holder: u64,
    /// Tgid of their process.
    pub tgid: u32,
    /// How often the process had replaced its program.
    pub execs: u32,
}

/// Value of the `GVL_EDGES` map: how one thread waited while another held the GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlEdge {
    /// Number of the holder's holds that overlapped waits of the waiter.
    pub holds: u64,
    /// Total length of these overlaps, nanoseconds.
    pub wait_ns: u64,
    /// The longest overlap, nanoseconds.
    pub wait_max_ns: u64,
}

/// One long wait for the GVL. A stack record with the same `tid` and `ts_ns` follows if `stack` says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlWaitEvent {
    /// Common head; `ts_ns` is the time at which the thread acquired the GVL.
    pub header: Header,
    /// When it began to wait, nanoseconds as in the header.
    pub begin_ns: u64,
    /// [`GvlThread::id`] of the thread that waited.
    pub id: u64,
    /// Its `rb_thread_t *`; 0 if the events do not carry it.
    pub thread: u64,
    /// When the thread took the request that it was serving when it acquired the GVL, nanoseconds; 0: none, or requests are not watched.
    pub request_ns: u64,
    /// The longest hold by another thread during the wait.
    pub hold: GvlHold,
    /// `comm` of the thread, NUL padded.
    pub comm: [u8; 16],
    /// 1: its stack follows.
    pub stack: u32,
    /// Zero.
    pub reserved: u32,
}

/// A long hold of the GVL, or a long time without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlSpanEvent {
    /// Common head; `ts_ns` is the end.
    pub header: Header,
    /// Its start, nanoseconds as in the header.
    pub begin_ns: u64,
    /// [`GvlThread::id`] of the thread.
    pub id: u64,
    /// Its `rb_thread_t *`; 0 if the events do not carry it.
    pub thread: u64,
    /// `comm` of its native thread, NUL padded.
    pub comm: [u8; 16],
    /// [`GvlState::Running`] or [`GvlState::Away`].
    pub state: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<GvlKey>() == 16);
const _: () = assert!(size_of::<GvlHolder>() == 32);
const _: () = assert!(size_of::<GvlHold>() == 48);
const _: () = assert!(size_of::<GvlLock>() == 32 + 48 * HOLDS && HOLDS.is_power_of_two());
const _: () = assert!(size_of::<GvlThread>() == 40 + 40 + 8 + 8 + 8 + 16 + 64 + 8 + 24 + 96 + 4 * BUCKETS);
const _: () = assert!(size_of::<GvlEdgeKey>() == 24);
const _: () = assert!(size_of::<GvlEdge>() == 24);
const _: () = assert!(size_of::<GvlWaitEvent>() == 40 + 32 + 48 + 16 + 8);
const _: () = assert!(size_of::<GvlSpanEvent>() == 40 + 24 + 16 + 8);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every time lies in its bucket, buckets follow each other without gaps, and none is wider than an eighth of its times.
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

    /// A thread's events add up, and unpaired events add nothing.
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
        // A resume whose request was not seen; the hold that it begins counts all the same.
        assert_eq!(t.resumed(1_000_300), Step::Orphan);
        assert_eq!(t.suspended(1_000_310), Step::Paired(10));
        assert_eq!(t.waits, 2);
        // A suspension that was called off: the thread continued to hold the GVL.
        assert_eq!(t.suspended(1_000_330), Step::Continued);
        assert_eq!((t.holds, t.hold_ns), (2, 80));
        // Two requests: the time between them is not counted.
        assert_eq!(t.ready(1_000_340), Step::Paired(10));
        assert_eq!(t.ready(1_000_350), Step::Orphan);
        assert_eq!(t.suspended(1_000_360), Step::Orphan);
        assert_eq!((t.waits, t.holds), (2, 2));
    }

    /// The times of a native thread are split by the GVL state of its thread, and the parts add up.
    #[test]
    fn parts() {
        let mut task = GvlTask { since_ns: 100, ..GvlTask::default() };
        let mut t = GvlThread::blank();
        (t.reported_ns, t.state) = (100, GvlState::Running as u32);
        task.enter(GvlTask::RUNNABLE, 130);
        task.enter(GvlTask::CPU, 140);
        let tell = |t: &mut GvlThread, task: Option<&GvlTask>, now| {
            let clocks = task.map(|task| task.clocks_at(now));
            t.report(clocks, now);
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

    /// The part of a hold that lies in a wait.
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
}
