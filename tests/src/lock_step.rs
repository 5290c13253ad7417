//! Threads that take turns with the GVL, and what their own clocks say about it (`tests/rubies/gvl_lockstep.rb`).

use anyhow::{Result, ensure};
use serde::Deserialize;

use crate::ensure_times;
use crate::report::GvlWaitLine;
use crate::ruby::Ruby;
use crate::script::Done;

/// Time outside of waits: entering and leaving the kernel, and the code between a reading of the clock and the yield.
const SLACK_NS: u64 = 2_000_000;
/// The kernel counts stolen time in ticks, per CPU.
const STEAL_TICK_NS: u64 = 20_000_000;

/// One of the threads.
#[derive(Debug, Deserialize)]
pub struct Life {
    /// Its native thread id.
    pub tid: u32,
    /// When it first held the GVL, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When it was about to end, likewise.
    pub end_ns: u64,
    gaps: Vec<Gap>,
}

/// A gap of more than 1 ms between two readings of the clock: begin, end, and the nanoseconds during which the thread was runnable
/// without a CPU.
#[derive(Debug, Deserialize)]
struct Gap(u64, u64, u64);

/// The threads of a run.
#[derive(Debug)]
pub struct LockStep {
    /// All threads.
    pub lives: Vec<Life>,
    stolen_ns: u64,
}

/// A lower bound of a thread's wait for the GVL in one of its gaps, from its own clock readings and those of the other threads.
#[derive(Debug)]
struct Wait {
    tid: u32,
    begin_ns: u64,
    end_ns: u64,
    /// From the first to the last clock reading by other threads, minus the time in which this thread waited for a CPU. Up to 3.1, a
    /// thread that yields first waits, elsewhere, until another one holds the GVL, and then it needs a CPU to continue.
    least_ns: u64,
}

impl LockStep {
    /// What the script reported.
    pub fn of(done: &Done) -> Result<Self> {
        let lives: Vec<Life> = serde_json::from_value(done.report.extra["lives"].clone())?;
        ensure!(lives.len() == 4, "{lives:?}");
        Ok(Self { lives, stolen_ns: done.report.extra_u64("stolen_ns")? + STEAL_TICK_NS })
    }

    /// Intervals between `begin` and `end` in which other threads read the clock.
    fn runs_of_others(&self, tid: u32, begin: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.lives
            .iter()
            .filter(move |life| life.tid != tid)
            .flat_map(Life::runs)
            .filter(move |&(from, to)| begin < from && to < end)
    }

    fn waits(&self, ruby: &Ruby) -> Vec<Wait> {
        let mut waits = Vec::new();
        for life in &self.lives {
            for &Gap(begin_ns, end_ns, delay_ns) in &life.gaps {
                let first = self.runs_of_others(life.tid, begin_ns, end_ns).map(|run| run.0).min();
                let last = self.runs_of_others(life.tid, begin_ns, end_ns).map(|run| run.1).max();
                // No other thread held the GVL meanwhile: this thread had lost its CPU.
                let (Some(first), Some(last)) = (first, last) else { continue };
                // Up to 3.1, a thread that yields while another thread yields waits until that thread has a CPU, too (`gvl_yield`).
                let others =
                    self.lives.iter().filter(|other| other.tid != life.tid && !ruby.is_at_least(3, 2));
                let others = others.flat_map(|other| &other.gaps);
                let others = others.filter(|other| other.0 < end_ns && begin_ns < other.1);
                let delays_ns = delay_ns + others.map(|other| other.2).sum::<u64>();
                let least_ns = (last - first).saturating_sub(delays_ns);
                waits.push(Wait { tid: life.tid, begin_ns, end_ns, least_ns });
            }
        }
        waits
    }

    /// Compares the waits with those that gctrace reports for the same process.
    pub fn agrees(&self, ruby: &Ruby, pid: u32, reported: &[GvlWaitLine]) -> Result<()> {
        let waits = self.waits(ruby);
        let of = |tid, begin: u64, end: u64| -> u64 {
            let own = reported.iter().filter(|wait| (wait.pid, wait.tid) == (pid, tid));
            own.map(|wait| (wait.begin_ns + wait.wait_ns).min(end).saturating_sub(wait.begin_ns.max(begin)))
                .sum()
        };
        let (mut least_ns, mut reported_ns) = (0, 0);
        for wait in &waits {
            let ns = of(wait.tid, wait.begin_ns, wait.end_ns);
            ensure_times!(
                ns + SLACK_NS + self.stolen_ns >= wait.least_ns,
                "{ns} ns reported of {wait:?}, {} ns stolen; all: {:?}",
                self.stolen_ns,
                reported
                    .iter()
                    .filter(|reported| (reported.pid, reported.tid) == (pid, wait.tid))
                    .collect::<Vec<_>>()
            );
            (least_ns, reported_ns) = (least_ns + wait.least_ns, reported_ns + ns);
        }
        // Four threads run for 1.5 s each, and at any time all but one wait. On a busy host, most of that time cannot be distinguished from the
        // delays of the other threads.
        ensure_times!(least_ns > 300_000_000, "the threads waited {least_ns} ns only: {self:?}");
        ensure_times!(
            reported_ns + least_ns / 50 + self.stolen_ns >= least_ns,
            "{reported_ns} ns reported, at least {least_ns} ns true, {} ns stolen",
            self.stolen_ns
        );
        // A thread that reads the clock does not wait.
        for life in &self.lives {
            for (from, to) in life.runs() {
                let ns = of(life.tid, from, to);
                ensure_times!(
                    ns <= SLACK_NS,
                    "thread {} ran from {from} to {to}; {ns} ns of waits are reported",
                    life.tid
                );
            }
        }
        // A wait is reported as one wait, however often its thread wakes up in between; as two, if it cannot be known that the wait continued.
        let whole = |wait: &&Wait| {
            let own = reported.iter().filter(|reported| (reported.pid, reported.tid) == (pid, wait.tid));
            let mut inside =
                own.filter(|reported| wait.begin_ns <= reported.begin_ns && reported.begin_ns < wait.end_ns);
            inside.any(|reported| reported.wait_ns + SLACK_NS + self.stolen_ns >= wait.least_ns)
        };
        let wholes = waits.iter().filter(whole).count();
        ensure_times!(wholes * 4 >= waits.len() * 3, "{wholes} of {} waits are whole", waits.len());
        Ok(())
    }
}

impl Life {
    /// Intervals in which it read the clock continuously, so it held the GVL.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let begins = std::iter::once(self.begin_ns).chain(self.gaps.iter().map(|gap| gap.1));
        let ends = self.gaps.iter().map(|gap| gap.0).chain(std::iter::once(self.end_ns));
        begins.zip(ends)
    }
}
