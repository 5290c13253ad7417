//! What the scheduler does with a native thread.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::GvlKey;

/// How long a native thread was on a CPU, runnable, and blocked, nanoseconds; indexed by the constants of [`GvlTask`].
pub type Clocks = [u64; 3];

/// A native thread as the scheduler sees it: value of the `GVL_TASKS` map, keyed by tid. The scheduler's tracepoints change
/// `state`, `since_ns` and `clocks`; so does a thread that runs although they did not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlTask {
    /// Odd while it is being changed.
    pub seq: u64,
    /// Start of the current state, nanoseconds.
    pub since_ns: u64,
    /// Time spent in each state before that.
    pub clocks: Clocks,
    /// CPU time that the kernel had charged the thread when it was last switched to or from, nanoseconds.
    pub charged_ns: u64,
    /// [`GvlThread::id`](super::GvlThread::id) of the thread that runs on it.
    pub owner: u64,
    /// The key of that thread.
    pub key: GvlKey,
    /// One of the constants below.
    pub state: u32,
    /// [`GvlGate::epoch`](super::GvlGate::epoch) in which the entry was made; in a later epoch the entry is invalid.
    pub epoch: u32,
}

/// The times of a thread up to a moment, or between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct OwnTimes {
    /// The clocks of its native thread; [`CLOCKS_UNKNOWN`] if they are incomplete.
    pub clocks: Clocks,
    /// The part of them that belongs to waits for the GVL; [`CLOCKS_UNKNOWN`] if unknown.
    pub waiting: Clocks,
    /// The part of them that belongs to times without the GVL; known if `waiting` is.
    pub away: Clocks,
}

/// Clocks that are unknown because not everything was seen.
pub const CLOCKS_UNKNOWN: Clocks = [u64::MAX; 3];

impl OwnTimes {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self { clocks: CLOCKS_UNKNOWN, waiting: CLOCKS_UNKNOWN, away: CLOCKS_UNKNOWN };

    /// Leaves what the thread has done since `then`. In place, because a copy would need too much of the BPF stack.
    #[inline]
    pub fn subtract(&mut self, then: &Self) {
        self.clocks = elapsed(&then.clocks, &self.clocks);
        if then.waiting[0] == u64::MAX || self.waiting[0] == u64::MAX {
            self.waiting = CLOCKS_UNKNOWN;
            self.away = CLOCKS_UNKNOWN;
            return;
        }
        for at in 0..3 {
            self.waiting[at] = self.waiting[at].wrapping_sub(then.waiting[at]);
            self.away[at] = self.away[at].wrapping_sub(then.away[at]);
        }
    }
}

impl GvlTask {
    /// The thread runs on a CPU.
    pub const CPU: u32 = 0;
    /// It is runnable, but has no CPU.
    pub const RUNNABLE: u32 = 1;
    /// It sleeps, or waits for something.
    pub const BLOCKED: u32 = 2;

    /// The clocks at a time that is not before the last change.
    #[inline]
    pub fn clocks_at(&self, now_ns: u64) -> Clocks {
        clocks_at(&self.clocks, self.state, self.since_ns, now_ns)
    }

    /// The thread is on a CPU, and its switch to it was not seen. The CPU time charged since then says for how long.
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

    /// The thread changes its state.
    #[inline]
    pub fn enter(&mut self, state: u32, now_ns: u64) {
        self.clocks = self.clocks_at(now_ns);
        self.state = state;
        self.since_ns = now_ns;
    }
}

/// The clocks at `now_ns` of a thread that has been in `state` since `since_ns`.
#[inline]
pub fn clocks_at(clocks: &Clocks, state: u32, since_ns: u64, now_ns: u64) -> Clocks {
    let ns = now_ns.saturating_sub(since_ns);
    let of = |one| if state == one { ns } else { 0 };
    [clocks[0] + of(GvlTask::CPU), clocks[1] + of(GvlTask::RUNNABLE), clocks[2] + of(GvlTask::BLOCKED)]
}

/// How far three clocks advanced. [`GvlTask::unseen`] moves time from one clock to another: the one goes back, and the others
/// together fall short by the same amount.
#[inline]
pub fn elapsed(before: &Clocks, now: &Clocks) -> Clocks {
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

const _: () = assert!(size_of::<GvlTask>() == 80);

#[cfg(test)]
mod tests {
    use super::{
        super::{GvlState, GvlThread},
        *,
    };

    /// A native thread whose switch to its CPU was not seen has had the CPU for as long as the kernel has charged it. What was reported
    /// before that was noticed is not reported again, and the parts still add up to the whole.
    #[test]
    fn unseen() {
        let mut task = GvlTask { since_ns: 100, charged_ns: 7, ..GvlTask::default() };
        let mut t = GvlThread::blank();
        (t.reported_ns, t.state) = (100, GvlState::Running as u32);
        let tell = |t: &mut GvlThread, task: &GvlTask, now| {
            t.report(Some(task.clocks_at(now)), now);
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
        // At most the time that has passed, however much was charged; and nothing is charged back.
        task.enter(GvlTask::BLOCKED, 310);
        task.unseen(1_000_000, 330);
        assert_eq!(task.clocks_at(330), [230, 0, 0]);
        task.enter(GvlTask::BLOCKED, 330);
        task.unseen(0, 350);
        assert_eq!(task.clocks_at(350), [230, 0, 20]);
        // A clock that was read too late does not go back, either.
        t.report(Some([0; 3]), 360);
        assert_eq!(t.split[2], [130, 80, 0]);
    }
}
