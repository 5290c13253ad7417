//! What every stage saw, passed on, filtered, lost or refused, and the identities that must hold between them.

use gctrace_common::stats::{Counter, Family, IDENTITIES};

mod account;
#[cfg(test)]
mod doc_tests;
mod identities;
mod off_cpu;

pub use off_cpu::{share_without_stack, without_stack};

macro_rules! user_counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// Counters of the user-space stages. Each stage has its own; they are added up for the ledger.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct UserCounts { $($(#[doc = $doc])* pub $name: u64,)* }

        /// One of the counters of the user-space stages.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(non_camel_case_types, reason = "named as the fields")]
        pub(crate) enum UserCounter { $($name,)* }

        impl UserCounter {
            /// All, in a fixed order.
            pub(crate) const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The counter's name as it is printed and exported.
            pub(crate) const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// What it counts, for the documentation.
            #[cfg(test)]
            pub(crate) const fn doc(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),*),)* }
            }
        }

        impl UserCounts {
            /// Adds what another stage has counted.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            fn get(&self, counter: UserCounter) -> u64 {
                match counter { $(UserCounter::$name => self.$name,)* }
            }
        }
    };
}

impl UserCounts {
    /// Names and values, in a fixed order.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        UserCounter::ALL.iter().map(|&counter| (counter.name(), self.get(counter))).collect()
    }

    fn sum(&self, counters: &[UserCounter]) -> u64 {
        counters.iter().map(|&counter| self.get(counter)).sum()
    }
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
    /// Request records decoded.
    decoded_requests,
    /// Requests handed to the exporters.
    requests_reported,
    /// Requests of processes that are not traced.
    requests_refused,
    /// Requests that there was no room for.
    requests_no_room,
    /// Requests that events name and whose end was not seen.
    requests_unknown,
    /// Requests that were being served when tracing ended.
    requests_open,
    /// Lifecycle records decoded.
    decoded_lives,
    /// Stack records decoded.
    decoded_stacks,
    /// Records of native frames decoded.
    decoded_natives,
    /// Of them, without the stack record that they belong to.
    natives_orphaned,
    /// Of them, mixed with the Ruby frames in true order.
    natives_mixed,
    /// Of them, without Ruby frames to be mixed with.
    natives_alone,
    /// Of them, of which only the leaf stands on the Ruby stack: the walk came to code without an unwind table (just-in-time
    /// code; the tables of a process that has just been met).
    natives_no_table,
    /// The same: to code that its file's table says nothing of.
    natives_no_row,
    /// The same: to a rule that is not evaluated in the kernel.
    natives_unsupported,
    /// The same: to stack memory that could not be read.
    natives_unreadable,
    /// The same: the registers of user mode could not be found.
    natives_no_registers,
    /// The same: the stack, or that of Ruby, was too deep.
    natives_truncated,
    /// Of them, of which only the leaf stands on the Ruby stack, because the invocations of the interpreter did not match.
    natives_unequal,
    /// Native frames of user mode that were to be named.
    native_frames,
    /// Of them, named by a symbol.
    native_frames_named,
    /// Of them, named by file and offset, because the file has no symbol there.
    native_frames_by_offset,
    /// Of them, in no file that is known to be mapped (just-in-time code, a process that was gone too soon).
    native_frames_unmapped,
    /// Images whose unwind table the kernel side has or had.
    unwind_images,
    /// Images without a usable unwind table (no `.eh_frame`, damaged, too large).
    unwind_images_without,
    /// Times that there was no room for an unwind table or the mappings of a process.
    unwind_tables_full,
    /// Mappings beyond what the kernel side can keep for one process.
    unwind_mappings_dropped,
    /// Stacks handed to the exporters.
    stacks,
    /// Stacks of processes that are refused or whose image is not known any more.
    refused_stacks,
    /// Stacks of threads that slept when their process was found, read from its memory.
    sleeper_stacks,
    /// Of these threads, those that were watched from then on.
    sleepers,
    /// Off-CPU records decoded.
    decoded_off_cpu,
    /// Threads that were off their CPU when tracing ended.
    off_cpu_still,
    /// Off-CPU records whose stack was there.
    off_cpu_stacks,
    /// Off-CPU records whose stack had not been taken.
    off_cpu_without_stack,
    /// Stacks of threads that were off their CPU too briefly to be reported.
    off_cpu_unused,
    /// Time off the CPU that was reported, nanoseconds.
    off_cpu_ns,
    /// Of that, without a stack.
    off_cpu_ns_without_stack,
    /// Samples made of off-CPU records.
    off_cpu_samples,
    /// Records of long waits for the GVL decoded.
    decoded_gvl_waits,
    /// Records of ended threads decoded.
    decoded_gvl_threads,
    /// Records of long holds and times without the GVL decoded.
    decoded_gvl_spans,
    /// Threads that had not ended, read out of the kernel's map.
    gvl_threads_read,
    /// Long waits for the GVL handed to the exporters.
    gvl_waits,
    /// Of them, without a stack.
    gvl_waits_without_stack,
    /// Long holds and times without the GVL handed to the exporters.
    gvl_spans,
    /// Threads handed to the exporters.
    gvl_threads,
    /// Waits for the GVL of all threads.
    gvl_thread_waits,
    /// Waits, holds and threads of processes that are refused or whose image is not known any more.
    gvl_refused,
    /// Times that it was changed how the GVL is watched because of what that cost.
    gvl_steps,
    /// For how long the GVL was watched, nanoseconds.
    gvl_watched_ns,
    /// For how long it was not, because that cost too much.
    gvl_unwatched_ns,
    /// Stacks of long waits for the GVL that went with their wait.
    gvl_stacks,
    /// Stacks of long waits whose wait was lost.
    gvl_stacks_unclaimed,
    /// Stacks of threads that gave up the GVL and that a long wait named.
    gvl_holder_stacks,
    /// Of those that no wait named.
    gvl_holder_stacks_unclaimed,
    /// Samples of threads that held the GVL while another was waiting, where no profile is wanted.
    gvl_blockers,
    /// Records of refills decoded.
    decoded_refills,
    /// Refills added up.
    refills,
    /// Refills of processes that are refused, or of a program that has been replaced.
    refused_refills,
    /// Hits of tracepoints that the kernel skipped: threads that came, went or slept unseen. 0 before Linux 6.7, which does not tell.
    tracepoints_skipped,
    /// Stacks of GC starts that went with their cycle.
    triggers,
    /// Stacks of GC starts whose cycle is not reported.
    triggers_unclaimed,
    /// Ruby frames that were to be named.
    frames,
    /// Of them, named.
    frames_named,
    /// Of them, not: the VM had freed or moved what they were about.
    frames_stale,
    /// Of them, not: the process was gone.
    frames_unreadable,
    /// Of them, not: C functions of an image whose table of symbols is not known.
    frames_without_symbols,
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
    /// Cycles that programs had behind them which ran before gctrace did; not included in `cycles`.
    cycles_before_run,
    /// Cycles of programs that started during the run, before their Ruby had probes; not included in `cycles`.
    cycles_missed,
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
    /// GC events whose memory was read in `/proc` when they were handled, because the kernel side could not read it.
    memory_late,
    /// GC events without memory: the kernel side could not read it, and then the process was gone.
    memory_unread,
    /// Output that could not be written.
    export_failures,
    /// Requests made for servers that are pushed to.
    uploads,
    /// Of them, accepted.
    uploads_sent,
    /// Of those accepted, the ones of which the server rejected a part.
    uploads_partial,
    /// Of them, refused for good.
    uploads_refused,
    /// Of them, dropped: too many waited, or the server could not be reached.
    uploads_dropped,
    /// Of them, neither yet.
    uploads_waiting,
    /// Sample sets handed over to be sent.
    sets,
    /// Of them, accepted by the collector.
    sets_sent,
    /// Of them, refused for good.
    sets_refused,
    /// Of them, dropped: too many waited, or the disk did not take them.
    sets_dropped,
    /// Of them, waiting.
    sets_waiting,
    /// Processes whose sets are not sent: their service has no token.
    sets_without_token,
    /// Samples that are not in profiles: they came before all that was asked for was being traced.
    profile_samples_early,
    /// The same of cycles and intervals.
    profile_events_early,
    /// Variables of traced processes that were refused: they begin with `RUBY_GC_` and are no names of variables.
    variables_refused,
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

    /// Records and measurements that the kernel side had to give up.
    pub fn lost(&self) -> u64 {
        Family::ALL.into_iter().map(|family| self.lost_of(family)).sum()
    }

    fn lost_of(&self, family: Family) -> u64 {
        let lost = Counter::ALL.iter().filter(|counter| counter.is_loss() && counter.family() == family);
        lost.map(|&counter| self.kernel(counter)).sum()
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
