//! Which CPUs are online: perf events are opened on each, and die with it.

use std::{
    collections::BTreeSet,
    io,
    time::{Duration, Instant},
};

/// How often it is looked at. A CPU that leaves and comes back in between is not noticed.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The CPUs that were online when they were last looked at.
#[derive(Debug)]
pub(super) struct OnlineCpus {
    known: BTreeSet<u32>,
    /// Those of which it was said that nothing can be opened on them.
    refused: BTreeSet<u32>,
    next: Instant,
}

/// What changed between two looks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// CPUs that went offline. The kernel has turned off what was opened on them, and does not turn it on again.
    pub(super) gone: Vec<u32>,
    /// CPUs that came online.
    pub(super) come: Vec<u32>,
}

impl OnlineCpus {
    /// Those of now.
    pub(super) fn now() -> io::Result<Self> {
        Ok(Self { known: online()?, refused: BTreeSet::new(), next: Instant::now() + LOOK_INTERVAL })
    }

    /// The CPUs.
    pub(super) fn known(&self) -> impl Iterator<Item = u32> + '_ {
        self.known.iter().copied()
    }

    /// What changed since the last look; nothing if it is not time for the next one.
    pub(super) fn change(&mut self) -> io::Result<Option<Change>> {
        let now = Instant::now();
        if now < self.next {
            return Ok(None);
        }
        self.next = now + LOOK_INTERVAL;
        Ok(Some(self.become_these(online()?)))
    }

    /// What changes if these are online.
    fn become_these(&mut self, online: BTreeSet<u32>) -> Change {
        let gone = self.known.difference(&online).copied().collect();
        let come = online.difference(&self.known).copied().collect();
        self.refused.retain(|cpu| online.contains(cpu));
        self.known = online;
        Change { gone, come }
    }

    /// Nothing could be opened on this CPU: at the next look it comes again. Returns whether that is news.
    pub(super) fn retry(&mut self, cpu: u32) -> bool {
        self.known.remove(&cpu);
        self.refused.insert(cpu)
    }
}

/// `/sys/devices/system/cpu/online`.
fn online() -> io::Result<BTreeSet<u32>> {
    let cpus = aya::util::online_cpus().map_err(|(_, source)| source)?;
    Ok(cpus.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes() {
        let mut cpus =
            OnlineCpus { known: BTreeSet::from([0, 1]), refused: BTreeSet::new(), next: Instant::now() };
        assert_eq!(cpus.become_these([0, 1].into()), Change::default());
        assert_eq!(cpus.become_these([0, 2, 3].into()), Change { gone: vec![1], come: vec![2, 3] });
        assert!(cpus.retry(3));
        assert_eq!(cpus.become_these([0, 1, 2, 3].into()), Change { gone: vec![], come: vec![1, 3] });
        assert!(!cpus.retry(3));
        assert_eq!(cpus.become_these([0].into()), Change { gone: vec![1, 2], come: vec![] });
        assert_eq!(cpus.become_these([0, 3].into()), Change { gone: vec![], come: vec![3] });
        assert!(cpus.retry(3), "it was away meanwhile");
        // The machine's own: something is online, and nothing is looked at twice in a moment.
        let mut cpus = OnlineCpus::now().unwrap();
        assert!(cpus.known().count() > 0);
        assert_eq!(cpus.change().unwrap(), None);
    }
}
