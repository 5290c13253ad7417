//! The set of online CPUs: perf events are opened per CPU and end when the CPU goes offline.

use std::{
    collections::BTreeSet,
    io,
    time::{Duration, Instant},
};

use crate::clock::{boottime_ns, monotonic_ns};

/// Interval between checks. A CPU that goes offline and comes back within it is not noticed, unless the host was suspended meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest suspension that counts, nanoseconds: the two clocks are not read at the same time.
const SUSPENDED_NS: u64 = 10_000_000;

/// The CPUs that were online at the last check.
#[derive(Debug)]
pub(super) struct OnlineCpus {
    known: BTreeSet<u32>,
    /// CPUs for which a failed open has already been reported.
    refused: BTreeSet<u32>,
    next: Instant,
    /// For how long the host had been suspended by the last check, nanoseconds.
    suspended_ns: u64,
    /// The CPUs that were online before it was last suspended, until they are reported as gone.
    slept: BTreeSet<u32>,
}

/// Changes between two checks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// CPUs that went offline. The kernel has disabled the events on them and does not enable them again.
    pub(super) gone: Vec<u32>,
    /// CPUs that came online.
    pub(super) come: Vec<u32>,
}

impl OnlineCpus {
    /// The CPUs that are online now.
    pub(super) fn now() -> io::Result<Self> {
        let next = Instant::now() + LOOK_INTERVAL;
        Ok(Self {
            known: online()?,
            refused: BTreeSet::new(),
            next,
            suspended_ns: suspended_ns().max(suspended_ns()),
            slept: BTreeSet::new(),
        })
    }

    /// The known online CPUs.
    pub(super) fn known(&self) -> impl Iterator<Item = u32> + '_ {
        self.known.iter().copied()
    }

    /// The changes since the last check; `None` if the next check is not due yet.
    pub(super) fn change(&mut self) -> io::Result<Option<Change>> {
        let now = Instant::now();
        if now < self.next {
            return Ok(None);
        }
        self.next = now + LOOK_INTERVAL;
        self.wakes(suspended_ns());
        Ok(Some(self.become_these(online()?)))
    }

    /// The host has been suspended for this long so far. While programs were frozen, all CPUs but one went offline and came back
    /// (`suspend_disable_secondary_cpus`, kernel/cpu.c), and the events on them remain disabled: all are reported as gone and come.
    fn wakes(&mut self, suspended_ns: u64) {
        if suspended_ns.saturating_sub(self.suspended_ns) >= SUSPENDED_NS {
            self.slept = std::mem::take(&mut self.known);
        }
        // Between the reads of the two clocks this thread may have waited for a CPU: the result is then too low.
        self.suspended_ns = self.suspended_ns.max(suspended_ns);
    }

    /// Replaces the known CPUs by `online` and returns the difference.
    fn become_these(&mut self, online: BTreeSet<u32>) -> Change {
        let gone = self.known.difference(&online).copied().chain(std::mem::take(&mut self.slept)).collect();
        let come = online.difference(&self.known).copied().collect();
        self.refused.retain(|cpu| online.contains(cpu));
        self.known = online;
        Change { gone, come }
    }

    /// Records that nothing could be opened on this CPU: the next check reports it as new again. Returns whether this is its first failure.
    pub(super) fn retry(&mut self, cpu: u32) -> bool {
        self.known.remove(&cpu);
        self.refused.insert(cpu)
    }
}

/// For how long the host has been suspended since it booted, nanoseconds.
fn suspended_ns() -> u64 {
    boottime_ns().saturating_sub(monotonic_ns())
}

/// The CPUs in `/sys/devices/system/cpu/online`.
fn online() -> io::Result<BTreeSet<u32>> {
    let cpus = aya::util::online_cpus().map_err(|(_, source)| source)?;
    Ok(cpus.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes() {
        let mut cpus = OnlineCpus {
            known: BTreeSet::from([0, 1]),
            refused: BTreeSet::new(),
            next: Instant::now(),
            suspended_ns: 7,
            slept: BTreeSet::new(),
        };
        assert_eq!(cpus.become_these([0, 1].into()), Change::default());
        assert_eq!(cpus.become_these([0, 2, 3].into()), Change { gone: vec![1], come: vec![2, 3] });
        assert!(cpus.retry(3));
        assert_eq!(cpus.become_these([0, 1, 2, 3].into()), Change { gone: vec![], come: vec![1, 3] });
        assert!(!cpus.retry(3));
        assert_eq!(cpus.become_these([0].into()), Change { gone: vec![1, 2], come: vec![] });
        assert_eq!(cpus.become_these([0, 3].into()), Change { gone: vec![], come: vec![3] });
        assert!(cpus.retry(3), "it was away meanwhile");
        // After a suspension the events on all CPUs are opened again, whether the CPUs are online again or not.
        assert_eq!(cpus.become_these([0, 3].into()), Change { gone: vec![], come: vec![3] });
        cpus.wakes(6 + SUSPENDED_NS);
        assert_eq!(cpus.become_these([0, 3].into()), Change::default());
        cpus.wakes(1);
        cpus.wakes(6 + SUSPENDED_NS);
        assert_eq!(cpus.become_these([0, 3].into()), Change::default(), "read too late");
        cpus.wakes(7 + 2 * SUSPENDED_NS);
        assert_eq!(cpus.become_these([0].into()), Change { gone: vec![0, 3], come: vec![0] });
        assert_eq!(cpus.become_these([0].into()), Change::default());
        // This machine's CPUs: at least one is online, and a second check right away does nothing.
        let mut cpus = OnlineCpus::now().unwrap();
        assert!(cpus.known().count() > 0);
        assert_eq!(cpus.change().unwrap(), None);
    }
}
