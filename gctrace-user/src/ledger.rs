//! What every stage saw, passed on, filtered, lost or refused, and the identities that must hold between them.

use gctrace_common::stats::Counter;

macro_rules! user_counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of the user-space stages.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct UserCounts { $($(#[$doc])* pub $name: u64,)* }

        impl UserCounts {
            /// Names and values, in a fixed order.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                let Self { $($name,)* } = *self;
                vec![$((stringify!($name), $name),)*]
            }
        }
    };
}

user_counters! {
    /// Snapshot records decoded.
    decoded_snapshots,
    /// Pause records decoded.
    decoded_pauses,
    /// Phase records decoded.
    decoded_phases,
    /// Phases handed to the exporters.
    phases,
    /// Lifecycle records decoded.
    decoded_lives,
    /// Records that could not be decoded.
    undecodable,
    /// Records of processes that are refused or whose image is not known any more.
    refused_records,
    /// Snapshots that started a cycle.
    cycles_started,
    /// Snapshots that started a cycle outside any pause that was seen to begin; such cycles are not reported.
    starts_outside,
    /// Cycles handed to the exporters.
    cycles,
    /// Cycles still running when tracing of their process ended; included in `cycles`.
    cycles_unfinished,
    /// Cycles whose end was lost; included in `cycles`.
    cycles_cut_short,
    /// Snapshots that ended a cycle.
    cycle_ends,
    /// `GC_END_SWEEP` of cycles that had begun before tracing did.
    ends_without_start,
    /// Snapshots at an enter that may be the VM's shutdown.
    shutdown_states,
    /// Pauses that belong to a reported cycle.
    pauses_in_cycles,
    /// Pauses outside any cycle whose start was seen.
    pauses_outside,
    /// GC records the kernel lost, by gaps in the sequence of each process.
    lost_records,
    /// Processes traced.
    processes,
    /// Processes and images refused.
    refused,
    /// GC events of which memory could not be read because the process was gone.
    memory_unread,
    /// Output that could not be written.
    export_failures,
}

/// Counters of the whole run.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// In the order of [`Counter::ALL`]; `None` if the kernel could not be asked.
    pub kernel: Option<Vec<u64>>,
    /// User space.
    pub user: UserCounts,
}

impl Ledger {
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

    /// Identities that do not hold, each as a sentence. Empty means that nothing got lost unseen.
    pub fn imbalances(&self) -> Vec<String> {
        use Counter as C;
        if self.kernel.is_none() {
            return vec!["the kernel's counters could not be read".to_owned()];
        }
        let k = |counters: &[C]| counters.iter().map(|&c| self.kernel(c)).sum::<u64>();
        let u = &self.user;
        let identities = [
            (
                "hits = own + filtered + no_image + admitted",
                k(&[C::Hits]),
                k(&[C::Own, C::Filtered, C::NoImage, C::Admitted]),
            ),
            (
                "admitted = starts + end_marks + end_sweeps + enters + exits + phase begins and ends",
                k(&[C::Admitted]),
                k(&[C::Starts, C::EndMarks, C::EndSweeps, C::Enters, C::Exits, C::PhaseBegins, C::PhaseEnds]),
            ),
            (
                "phase ends = phases submitted + ring full + orphans",
                k(&[C::PhaseEnds]),
                k(&[C::PhaseSubmitted, C::PhaseRingFull, C::PhaseOrphan]),
            ),
            (
                "starts + end_sweeps + shutdowns = snapshots submitted + ring full + read failed",
                k(&[C::Starts, C::EndSweeps, C::Shutdowns]),
                k(&[C::SnapshotSubmitted, C::SnapshotRingFull, C::SnapshotReadFailed]),
            ),
            (
                "starts + end_marks + end_sweeps = mark_noted + orphan_mark",
                k(&[C::Starts, C::EndMarks, C::EndSweeps]),
                k(&[C::MarkNoted, C::OrphanMark]),
            ),
            (
                "enters = scopes opened + nested + map full + read failed",
                k(&[C::Enters]),
                k(&[C::ScopeOpened, C::ScopeNested, C::ScopeMapFull, C::EnterReadFailed]),
            ),
            (
                "exits = pauses submitted + ring full + nested + orphans",
                k(&[C::Exits]),
                k(&[C::PauseSubmitted, C::PauseRingFull, C::ExitNested, C::OrphanExit]),
            ),
            (
                "lives = life_submitted + life_ring_full",
                k(&[C::Lives]),
                k(&[C::LifeSubmitted, C::LifeRingFull]),
            ),
            (
                "records submitted = records decoded + undecodable",
                k(&[C::SnapshotSubmitted, C::PauseSubmitted, C::PhaseSubmitted, C::LifeSubmitted]),
                u.decoded_snapshots + u.decoded_pauses + u.decoded_phases + u.decoded_lives + u.undecodable,
            ),
            (
                "GC records decoded = starts + ends + ends without start + shutdowns + pauses + phases + refused",
                u.decoded_snapshots + u.decoded_pauses + u.decoded_phases,
                u.cycles_started
                    + u.starts_outside
                    + u.phases
                    + u.cycle_ends
                    + u.ends_without_start
                    + u.shutdown_states
                    + u.pauses_in_cycles
                    + u.pauses_outside
                    + u.refused_records,
            ),
            ("cycles started = cycles reported", u.cycles_started, u.cycles),
        ];
        identities
            .into_iter()
            .filter(|(_, left, right)| left != right)
            .map(|(name, left, right)| format!("{name}: {left} ≠ {right}"))
            .collect()
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        use Counter as C;
        let u = &self.user;
        let lost = self.kernel(C::SnapshotRingFull)
            + self.kernel(C::PauseRingFull)
            + self.kernel(C::PhaseRingFull)
            + self.kernel(C::SnapshotReadFailed)
            + self.kernel(C::EnterReadFailed)
            + self.kernel(C::ScopeMapFull)
            + self.kernel(C::ProcessMapFull)
            + self.kernel(C::LifeRingFull);
        let begun_before = match u.ends_without_start {
            0 => String::new(),
            n => format!(", {n} cycles had begun before tracing"),
        };
        let work = match u.phases {
            0 => String::new(),
            n => format!(", {n} intervals of GC work without event sites"),
        };
        let imbalances = match self.imbalances() {
            none if none.is_empty() => String::new(),
            some => format!("; LEDGER DOES NOT BALANCE: {}", some.join("; ")),
        };
        format!(
            "{} cycles of {} processes ({} unfinished), {} probe hits, {} filtered, {lost} lost, {} refused\
             {begun_before}{work}{imbalances}",
            u.cycles,
            u.processes,
            u.cycles_unfinished,
            self.kernel(C::Hits),
            self.kernel(C::Filtered),
            u.refused,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lost record shows as a broken identity, and an empty run balances.
    #[test]
    fn identities() {
        let mut ledger = Ledger { kernel: Some(vec![0; Counter::ALL.len()]), user: UserCounts::default() };
        assert!(ledger.imbalances().is_empty());
        if let Some(kernel) = ledger.kernel.as_mut() {
            kernel[Counter::SnapshotSubmitted as usize] = 1;
        }
        assert_eq!(ledger.imbalances().len(), 2);
        ledger.kernel = None;
        assert_eq!(ledger.imbalances().len(), 1);
    }
}
