//! What every stage saw, passed on, filtered, lost or refused, and the identities that must hold between these counts.

use gctrace_common::stats::{Counter, Family, IDENTITIES};

mod account;
#[cfg(test)]
mod doc_tests;
mod identities;
mod off_cpu;
mod stages;

pub use off_cpu::{share_without_stack, without_stack};
pub(crate) use stages::UserCounter;
pub use stages::{
    AllocCounts, EnvironmentCounts, GvlCounts, NativeCounts, PipelineCounts, ProfileCounts, RecordingCounts,
    RequestCounts, SetCounts, StackCounts, UploadCounts, UserCounts,
};

/// Counters of the whole run.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// In the order of [`Counter::ALL`]; `None` if the kernel's counters could not be read.
    pub kernel: Option<Vec<u64>>,
    /// User space.
    pub user: UserCounts,
    /// Which part of the run this covers.
    pub extent: Extent,
}

/// The part of a run that an account covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extent {
    /// The whole run, or all of it so far.
    #[default]
    Run,
    /// A recording that was cut off: records were still in transit, so sums need not balance.
    CutOff,
    /// The dump of a flight recorder: records were in transit at both of its ends, so sums need not balance.
    Part,
}

/// Whether a user-space counter only grows. The others are levels (what is waiting or kept now) and are not exported as counters.
pub fn only_grows(name: &str) -> bool {
    !name.ends_with("_waiting") && name != "recorded_kept"
}

impl Ledger {
    /// Counts since an earlier account of the same run. The recording's own counters keep their values for the whole run: some of
    /// them go up and down.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let kernel = self.kernel.as_ref().map(|now| {
            let before = before.kernel.as_deref().unwrap_or_default();
            let before = before.iter().copied().chain(std::iter::repeat(0));
            now.iter().zip(before).map(|(now, before)| now.saturating_sub(before)).collect()
        });
        let mut user = UserCounts::default();
        for ((name, now), (_, before)) in self.user.named().into_iter().zip(before.user.named()) {
            user.set(name, now.saturating_sub(before));
        }
        user.recording = self.user.recording;
        Self { kernel, user, extent: self.extent }
    }

    /// Sums of the counters of this run and another. Kernel counters are unknown (`None`) if either run lacks them.
    #[must_use]
    pub(crate) fn with(&self, other: &Self) -> Self {
        let kernel = self.kernel.as_ref().zip(other.kernel.as_ref()).map(|(one, other)| {
            one.iter().zip(other).map(|(one, other)| one.saturating_add(*other)).collect()
        });
        let mut user = UserCounts::default();
        for ((name, one), (_, other)) in self.user.named().into_iter().zip(other.user.named()) {
            user.set(name, one.saturating_add(other));
        }
        let extent = match (self.extent, other.extent) {
            (Extent::Run, extent) | (extent, Extent::Run) => extent,
            (Extent::CutOff, _) | (_, Extent::CutOff) => Extent::CutOff,
            (Extent::Part, Extent::Part) => Extent::Part,
        };
        Self { kernel, user, extent }
    }

    fn kernel(&self, counter: Counter) -> u64 {
        self.kernel.as_ref().and_then(|values| values.get(counter as usize).copied()).unwrap_or_default()
    }

    /// The kernel's counters by name.
    pub fn kernel_counters(&self) -> Vec<(&'static str, u64)> {
        Counter::ALL.iter().map(|&counter| (counter.name(), self.kernel(counter))).collect()
    }

    /// The user-space counters by name.
    pub fn user_counters(&self) -> Vec<(&'static str, u64)> {
        self.user.named()
    }

    /// Identities that do not hold, each as a sentence. Empty: no loss went uncounted.
    pub fn imbalances(&self) -> Vec<String> {
        if self.kernel.is_none() {
            return vec!["the kernel's counters could not be read".to_owned()];
        }
        let kernel = |counters: &[Counter]| counters.iter().map(|&c| self.kernel(c)).sum::<u64>();
        let of_kernel = IDENTITIES.iter().map(|sum| (sum.text, kernel(sum.left), kernel(sum.right)));
        let of_both = identities::ALL.iter().map(|sum| {
            let side = |side: &identities::Side| kernel(side.kernel) + self.user.sum(side.user);
            (sum.text, side(&sum.left), side(&sum.right))
        });
        of_kernel
            .chain(of_both)
            .filter(|(_, left, right)| left != right)
            .map(|(text, left, right)| format!("{text}: {left} ≠ {right}"))
            .collect()
    }

    /// Records and measurements that the kernel side had to drop.
    pub fn lost(&self) -> u64 {
        Family::ALL.into_iter().map(|family| self.lost_of(family)).sum()
    }

    /// Those of one family.
    pub fn lost_of(&self, family: Family) -> u64 {
        let lost = Counter::ALL.iter().filter(|counter| counter.is_loss() && counter.family() == family);
        lost.map(|&counter| self.kernel(counter)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A difference contains what was counted in between.
    #[test]
    fn differences() {
        let ledger = |hits: u64, cycles: u64, kept: u64| {
            let mut ledger = Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() };
            if let Some(kernel) = ledger.kernel.as_mut() {
                kernel[Counter::Hits as usize] = hits;
            }
            ledger.user.pipeline.cycles = cycles;
            ledger.user.recording.recorded_kept = kept;
            ledger
        };
        let part = ledger(70, 50, 3).since(&ledger(60, 20, 9));
        assert_eq!((part.kernel(Counter::Hits), part.user), (10, ledger(0, 30, 3).user));
        assert_eq!(ledger(70, 50, 3).since(&Ledger::default()).kernel(Counter::Hits), 70);
        assert_eq!(ledger(70, 50, 3).since(&ledger(80, 0, 0)).kernel(Counter::Hits), 0);
    }

    /// Levels (what is kept or waiting now) are not counters.
    #[test]
    fn levels() {
        let all = UserCounts::default().named();
        let levels: Vec<_> = all.iter().map(|(name, _)| *name).filter(|name| !only_grows(name)).collect();
        assert_eq!(
            levels,
            ["recorded_waiting", "recorded_kept", "dumps_waiting", "uploads_waiting", "sets_waiting"]
        );
    }

    /// A lost record shows as a broken identity, and an empty run balances.
    #[test]
    fn identities() {
        let mut ledger = Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() };
        assert!(ledger.imbalances().is_empty());
        if let Some(kernel) = ledger.kernel.as_mut() {
            kernel[Counter::SnapshotSubmitted as usize] = 1;
        }
        assert_eq!(ledger.imbalances().len(), 2);
        ledger.kernel = None;
        assert_eq!(ledger.imbalances().len(), 1);
    }
}
