//! Measures for how long a sleeping thread has not run.
//!
//! The kernel keeps, per thread, when it was last charged CPU time (`sched_entity.exec_start`, kernel/sched/fair.c `update_curr`), and shows
//! it in `/proc/PID/task/TID/sched` (kernel/sched/debug.c `proc_sched_show_task`; `CONFIG_SCHED_DEBUG` up to Linux 6.14). For a sleeping
//! thread, this is when it left its CPU. The time is of that CPU's `rq_clock_task`, which differs between CPUs: it stands still while
//! the CPU handles interrupts (`CONFIG_IRQ_TIME_ACCOUNTING`) and while the hypervisor runs something else. The current value of that clock is
//! read from a thread of gctrace that has just been scheduled on that CPU. So the difference is a lower bound of the time for which the thread
//! has not run; it misses only interrupts and stolen time, which nothing shows for a single CPU and interval.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::mpsc,
    time::{Duration, Instant},
};

use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity, sched_yield};

use super::{proc_root, tasks::Task};

/// Maximum time to get scheduled on all CPUs: one may be busy with threads of higher priority.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of times a thread yields its CPU until its own time has been updated.
const YIELDS: u32 = 16;

/// When a thread left its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRun {
    /// The CPU.
    cpu: usize,
    /// The value of its `rq_clock_task`, in nanoseconds.
    left_ns: u64,
    /// When the thread was last seen asleep.
    seen: Instant,
}

impl LastRun {
    /// Reads when a thread left its CPU; `None`: it has run since `task` was read, or the kernel does not show it.
    pub fn of(pid: u32, task: Task) -> Option<Self> {
        let read = |name: &str| proc_root::text(pid, &format!("task/{}/{name}", task.tid)).ok();
        let left_ns = exec_start(&read("sched")?)?;
        let cpu = processor(&read("stat")?)?;
        let seen = Instant::now();
        task.still_sleeps(pid).then_some(Self { cpu, left_ns, seen })
    }
}

/// For how long, at least, each thread had not run when it was seen, in nanoseconds. `None`: gctrace may not run on its CPU, or got no turn there.
pub fn not_run(last: &[Option<LastRun>]) -> Vec<Option<u64>> {
    let clocks = clocks(last.iter().flatten().map(|last| last.cpu).collect());
    let ns = |last: &LastRun| {
        let &(clock_ns, read) = clocks.get(&last.cpu)?;
        // The clock of a CPU is never faster than real time: when the thread was seen, it showed at least this.
        let then = clock_ns.checked_sub(read.saturating_duration_since(last.seen).as_nanos() as u64)?;
        then.checked_sub(last.left_ns)
    };
    last.iter().map(|last| ns(last.as_ref()?)).collect()
}

/// The values of the clocks of CPUs, each with the latest time at which it was read.
fn clocks(cpus: BTreeSet<usize>) -> BTreeMap<usize, (u64, Instant)> {
    let until = Instant::now() + PATIENCE;
    let (send, receive) = mpsc::channel();
    let reader = std::thread::Builder::new().name("gctrace-clocks".to_owned()).spawn(move || {
        for cpu in cpus {
            if let Some(clock_ns) = clock(cpu)
                && send.send((cpu, (clock_ns, Instant::now()))).is_err()
            {
                return;
            }
        }
    });
    if reader.is_err() {
        return BTreeMap::new();
    }
    // Ends when the thread has read all clocks, or at the timeout; the thread then ends at its next clock, because nobody receives it.
    std::iter::from_fn(|| receive.recv_timeout(until.saturating_duration_since(Instant::now())).ok())
        .collect()
}

/// The value of a CPU's clock, now or a moment ago. Moves the calling thread to that CPU.
fn clock(cpu: usize) -> Option<u64> {
    if cpu >= CpuSet::MAX_CPU {
        return None;
    }
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).ok()?;
    let own = || exec_start(&fs::read_to_string("/proc/thread-self/sched").ok()?);
    let before = own()?;
    let mut now = before;
    // The scheduler updates the time when it picks a thread again.
    for _ in 0..YIELDS {
        sched_yield();
        now = own()?;
        if now != before {
            break;
        }
    }
    // The CPU may have been taken offline meanwhile.
    (sched_getcpu() == cpu).then_some(now)
}

/// `se.exec_start  :  38783363.141057`: milliseconds with six decimals (`SPLIT_NS`). 0: the thread was moved to another CPU.
fn exec_start(sched: &str) -> Option<u64> {
    let line = sched.lines().find_map(|line| line.strip_prefix("se.exec_start"))?;
    let (ms, rest) = line.trim_start().strip_prefix(':')?.trim().split_once('.')?;
    if rest.len() != 6 || !rest.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let ns = ms.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(rest.parse().ok()?)?;
    (ns > 0).then_some(ns)
}

/// The 39th field of `stat`: the CPU that the thread ran on last.
fn processor(stat: &str) -> Option<usize> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in Linux 6.18 and 5.10.
    #[test]
    fn noted_times() {
        let text = "ruby (24749, #threads: 1)\n---\nse.exec_start                                :      38783363.141057\n\
                    se.vruntime                                  :           111.399568\n";
        assert_eq!(exec_start(text), Some(38_783_363_141_057));
        for other in [
            "",
            "se.exec_start",
            "se.exec_start : 0.000000\n",
            "se.exec_start : 5",
            "se.exec_start : -5.000000",
        ] {
            assert_eq!(exec_start(other), None, "{other}");
        }
        assert_eq!(exec_start("se.exec_start : 5.00000"), None);
        assert_eq!(exec_start("se.exec_start : 18446744073709551615.000000"), None);
    }

    /// Brackets and spaces in a name do not affect the CPU.
    #[test]
    fn processors() {
        let rest = (3..=52).map(|field| if field == 39 { "3" } else { "0" }).collect::<Vec<_>>().join(" ");
        assert_eq!(processor(&format!("17 (a) S (b)) {rest}")), Some(3));
        assert_eq!(processor("17 (ruby) S 1"), None);
        assert_eq!(processor("17 (ruby"), None);
    }

    /// A CPU that does not exist has no clock and does not affect the others.
    #[test]
    fn absent_cpus() {
        let seen = Instant::now();
        let last = [usize::MAX, 1023].map(|cpu| Some(LastRun { cpu, left_ns: 1, seen }));
        assert_eq!(not_run(&[last[0], None, last[1]]), [None; 3]);
    }
}
