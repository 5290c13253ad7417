//! What every stage saw, passed on, filtered, lost or refused, and the identities that must hold between them.

use gctrace_common::stats::Counter;

mod account;
mod off_cpu;

pub use off_cpu::{share_without_stack, without_stack};

macro_rules! user_counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of the user-space stages.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct UserCounts { $($(#[$doc])* pub $name: u64,)* }

        impl UserCounts {
            /// Adds what another stage has counted.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

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
                k(&[
                    C::SnapshotSubmitted,
                    C::PauseSubmitted,
                    C::PhaseSubmitted,
                    C::LifeSubmitted,
                    C::StackSubmitted,
                    C::NativeSubmitted,
                    C::OffCpuSubmitted,
                    C::GvlWaitSubmitted,
                    C::GvlThreadSubmitted,
                    C::GvlSpanSubmitted,
                ]),
                u.decoded_snapshots
                    + u.decoded_pauses
                    + u.decoded_phases
                    + u.decoded_lives
                    + u.decoded_stacks
                    + u.decoded_natives
                    + u.decoded_off_cpu
                    + u.decoded_gvl_waits
                    + u.decoded_gvl_threads
                    + u.decoded_gvl_spans
                    + u.undecodable,
            ),
            (
                "GVL hits = shed + filtered + without thread + map full + events",
                k(&[C::GvlHits]),
                k(&[
                    C::GvlShed,
                    C::GvlFiltered,
                    C::GvlNoThread,
                    C::GvlThreadMapFull,
                    C::GvlStarted,
                    C::GvlReady,
                    C::GvlResumed,
                    C::GvlSuspended,
                    C::GvlExited,
                ]),
            ),
            (
                "GVL wanted = from away + yields + orphans",
                k(&[C::GvlReady]),
                k(&[C::GvlAways, C::GvlYields, C::GvlOrphanReady]),
            ),
            ("GVL got = waits + orphans", k(&[C::GvlResumed]), k(&[C::GvlWaits, C::GvlOrphanResumed])),
            (
                "GVL given up = holds + called off + orphans",
                k(&[C::GvlSuspended]),
                k(&[C::GvlHolds, C::GvlCalledOff, C::GvlOrphanSuspended]),
            ),
            (
                "long waits = submitted + ring full + shed",
                k(&[C::GvlLongWaits]),
                k(&[C::GvlWaitSubmitted, C::GvlWaitRingFull, C::GvlWaitShed]),
            ),
            (
                "long holds and times without the GVL = submitted + ring full + shed",
                k(&[C::GvlLongSpans]),
                k(&[C::GvlSpanSubmitted, C::GvlSpanRingFull, C::GvlSpanShed]),
            ),
            (
                "threads = ended and submitted + ring full + read",
                k(&[C::GvlThreads]),
                k(&[C::GvlThreadSubmitted, C::GvlThreadRingFull]) + u.gvl_threads_read,
            ),
            (
                "waits for the GVL = those of all threads + lost",
                k(&[C::GvlWaits]),
                k(&[C::GvlWaitsLost]) + u.gvl_thread_waits,
            ),
            (
                "GVL records decoded + threads read = exported + refused",
                u.decoded_gvl_waits + u.decoded_gvl_threads + u.decoded_gvl_spans + u.gvl_threads_read,
                u.gvl_waits + u.gvl_threads + u.gvl_spans + u.gvl_refused,
            ),
            (
                "off-CPU stacks wanted = to be taken + shed",
                k(&[C::OffCpuWanted]),
                k(&[C::OffCpuStacks, C::OffCpuShed]),
            ),
            (
                "times back on a CPU = too short + orphans + submitted + ring full",
                k(&[C::SwitchIns]),
                k(&[C::OffCpuShort, C::OffCpuOrphan, C::OffCpuSubmitted, C::OffCpuRingFull]),
            ),
            (
                "off-CPU records decoded + still away = with stack + without",
                u.decoded_off_cpu + u.off_cpu_still,
                u.off_cpu_stacks + u.off_cpu_without_stack,
            ),
            (
                "ticks + GC starts, times off the CPU, GVL waits and holds with stacks = stacks submitted + ring full + busy + not walked",
                k(&[C::Ticks, C::TriggerStacks, C::OffCpuStacks, C::GvlStacks, C::GvlHolderStacks]),
                k(&[C::StackSubmitted, C::StackRingFull, C::StackBusy, C::StackNotWalked]),
            ),
            (
                "native stacks walked = submitted + ring full",
                k(&[C::NativeStacks]),
                k(&[C::NativeSubmitted, C::NativeRingFull]),
            ),
            (
                "native records decoded = mixed + alone + unequal + walks that ended early + orphaned",
                u.decoded_natives,
                u.natives_mixed
                    + u.natives_alone
                    + u.natives_unequal
                    + u.natives_no_table
                    + u.natives_no_row
                    + u.natives_unsupported
                    + u.natives_unreadable
                    + u.natives_no_registers
                    + u.natives_truncated
                    + u.natives_orphaned,
            ),
            (
                "native frames = named + by offset + unmapped",
                u.native_frames,
                u.native_frames_named + u.native_frames_by_offset + u.native_frames_unmapped,
            ),
            (
                "stack records decoded + sleepers + off-CPU samples = exported + refused + triggers + off the CPU + GVL waits, holds and blockers",
                u.decoded_stacks + u.sleeper_stacks + u.off_cpu_samples,
                u.stacks
                    + u.refused_stacks
                    + u.triggers
                    + u.triggers_unclaimed
                    + u.off_cpu_stacks
                    + u.off_cpu_unused
                    + u.gvl_stacks
                    + u.gvl_stacks_unclaimed
                    + u.gvl_holder_stacks
                    + u.gvl_holder_stacks_unclaimed
                    + u.gvl_blockers,
            ),
            (
                "Ruby frames = named + stale + unreadable + without symbols",
                u.frames,
                u.frames_named + u.frames_stale + u.frames_unreadable + u.frames_without_symbols,
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
            (
                "requests = sent + refused + dropped + waiting",
                u.uploads,
                u.uploads_sent + u.uploads_refused + u.uploads_dropped + u.uploads_waiting,
            ),
            (
                "sample sets = sent + refused + dropped + waiting",
                u.sets,
                u.sets_sent + u.sets_refused + u.sets_dropped + u.sets_waiting,
            ),
            ("cycles started = cycles reported", u.cycles_started, u.cycles),
        ];
        identities
            .into_iter()
            .filter(|(_, left, right)| left != right)
            .map(|(name, left, right)| format!("{name}: {left} ≠ {right}"))
            .collect()
    }

    /// Records and measurements that the kernel side had to give up.
    pub fn lost(&self) -> u64 {
        use Counter as C;
        self.kernel(C::SnapshotRingFull)
            + self.kernel(C::PauseRingFull)
            + self.kernel(C::PhaseRingFull)
            + self.kernel(C::SnapshotReadFailed)
            + self.kernel(C::EnterReadFailed)
            + self.kernel(C::ScopeMapFull)
            + self.kernel(C::ProcessMapFull)
            + self.kernel(C::LifeRingFull)
            + self.kernel(C::StackRingFull)
            + self.kernel(C::NativeRingFull)
            + self.kernel(C::StackBusy)
            + self.kernel(C::StackNotWalked)
            + self.kernel(C::OffCpuRingFull)
            + self.kernel(C::AwayMapFull)
            + self.kernel(C::RubyMapFull)
            + self.kernel(C::GvlThreadMapFull)
            + self.kernel(C::GvlTasksFull)
            + self.kernel(C::GvlNoThread)
            + self.kernel(C::GvlWaitRingFull)
            + self.kernel(C::GvlThreadRingFull)
            + self.kernel(C::GvlSpanRingFull)
            + self.kernel(C::GvlEdgesFull)
            + self.kernel(C::GvlLocksFull)
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
