//! Names and numbers of the kernel's counters (the `COUNTERS` map: one `u64` each, updated atomically).
//!
//! The ledger holds if, for every run:
//! `hits = own + filtered + no_image + admitted`,
//! `admitted = starts + end_marks + end_sweeps + enters + exits + phase_begins + phase_ends`,
//! `starts + end_sweeps + shutdowns = snapshot_submitted + snapshot_ring_full + snapshot_read_failed`,
//! `starts + end_marks + end_sweeps = mark_noted + orphan_mark`,
//! `enters = scope_opened + scope_nested + scope_map_full + enter_read_failed`,
//! `exits = pause_submitted + pause_ring_full + exit_nested + orphan_exit`,
//! `phase_ends = phase_submitted + phase_ring_full + phase_orphan`,
//! `lives = life_submitted + life_ring_full`,
//! `off_cpu_wanted = off_cpu_stacks + off_cpu_shed`,
//! `switch_ins = off_cpu_short + off_cpu_orphan + off_cpu_submitted + off_cpu_ring_full`,
//! `gvl_hits = gvl_shed + gvl_filtered + gvl_no_thread + gvl_thread_map_full + gvl_started + gvl_ready + gvl_resumed + gvl_suspended +
//! gvl_exited`,
//! `gvl_ready = gvl_aways + gvl_yields + gvl_orphan_ready`,
//! `gvl_resumed = gvl_waits + gvl_orphan_resumed`,
//! `gvl_suspended = gvl_holds + gvl_called_off + gvl_orphan_suspended`,
//! `gvl_long_waits = gvl_wait_submitted + gvl_wait_ring_full + gvl_wait_shed`,
//! `gvl_long_spans = gvl_span_submitted + gvl_span_ring_full + gvl_span_shed`,
//! `ticks + trigger_stacks + off_cpu_stacks + gvl_stacks = stack_submitted + stack_ring_full + stack_busy + stack_not_walked`,
//! `native_stacks = native_submitted + native_ring_full`.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Index of a counter in the `COUNTERS` map.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Counter { $($(#[$doc])* $name,)* }

        impl Counter {
            /// All counters, in the order of their index.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The counter's name as it is printed and exported.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

counters! {
    /// Probe hits at GC points, of any process.
    Hits = "hits",
    /// Hits of gctrace itself.
    Own = "own",
    /// Hits of processes that the user did not select.
    Filtered = "filtered",
    /// Hits whose image is closed (its probes are being attached) or not known (no cookies, no entry).
    NoImage = "no_image",
    /// Hits that passed selection.
    Admitted = "admitted",
    /// Admitted hits at `GC_START`.
    Starts = "starts",
    /// Admitted hits at `GC_END_MARK`.
    EndMarks = "end_marks",
    /// Admitted hits at `GC_END_SWEEP`.
    EndSweeps = "end_sweeps",
    /// Enters that may be the VM's shutdown (GC forbidden, no cycle running), of which a snapshot is taken too.
    Shutdowns = "shutdowns",
    /// Snapshot records handed to user space.
    SnapshotSubmitted = "snapshot_submitted",
    /// Snapshots lost because the GC ring was full.
    SnapshotRingFull = "snapshot_ring_full",
    /// Snapshots lost because the objspace could not be read.
    SnapshotReadFailed = "snapshot_read_failed",
    /// Snapshots without the memory counters of the process, although it is known where the kernel keeps them.
    MemoryReadFailed = "memory_read_failed",
    /// Hits at `GC_START`, `GC_END_MARK` and `GC_END_SWEEP` whose time was noted in the thread's open pause.
    MarkNoted = "mark_noted",
    /// Such hits outside any pause that we saw begin (attached in the middle of it).
    OrphanMark = "orphan_mark",
    /// Admitted hits at `GC_ENTER`.
    Enters = "enters",
    /// Enters that opened a pause.
    ScopeOpened = "scope_opened",
    /// Enters inside an open pause of the same thread.
    ScopeNested = "scope_nested",
    /// Enters lost because the `SCOPES` map was full.
    ScopeMapFull = "scope_map_full",
    /// Enters lost because the objspace could not be read.
    EnterReadFailed = "enter_read_failed",
    /// Pauses thrown away because their exit never came (the stack had unwound past them).
    ScopeStale = "scope_stale",
    /// Admitted hits at `GC_EXIT`.
    Exits = "exits",
    /// Exits of nested enters.
    ExitNested = "exit_nested",
    /// Exits without a pause that we saw begin.
    OrphanExit = "orphan_exit",
    /// Pause records handed to user space.
    PauseSubmitted = "pause_submitted",
    /// Pauses lost because the GC ring was full.
    PauseRingFull = "pause_ring_full",
    /// Snapshots at which the site's register and the VM pointer disagree about the objspace.
    RegisterMismatch = "register_mismatch",
    /// Admitted hits where a phase begins (probes of the last resort).
    PhaseBegins = "phase_begins",
    /// Admitted hits where a phase ends.
    PhaseEnds = "phase_ends",
    /// Of those, handed to user space.
    PhaseSubmitted = "phase_submitted",
    /// Of those, lost because the GC ring was full.
    PhaseRingFull = "phase_ring_full",
    /// Of those, without a begin that we saw on the thread.
    PhaseOrphan = "phase_orphan",
    /// Processes (met at a hit, or forked from a selected one) that could not be entered because the `PROCESSES` map was
    /// full; their hits are `no_image` or `filtered`.
    ProcessMapFull = "process_map_full",
    /// Ticks of the sampling clock in threads that kept none waiting for the GVL, where only those are looked at that do.
    TicksUnwanted = "ticks_unwanted",
    /// Ticks of the sampling clock in followed processes whose image is known, without `ticks_unwanted`.
    Ticks = "ticks",
    /// Stacks to be taken where a cycle starts.
    TriggerStacks = "trigger_stacks",
    /// Times that a thread of a followed process left its CPU.
    SwitchOuts = "switch_outs",
    /// Stacks of threads off their CPU that are wanted: of those that come back after a time that is reported or, before Linux 6.15, of
    /// all that leave it.
    OffCpuWanted = "off_cpu_wanted",
    /// Of those, to be taken.
    OffCpuStacks = "off_cpu_stacks",
    /// Of those, not, because of the sampling limit (`--off-cpu-stacks`).
    OffCpuShed = "off_cpu_shed",
    /// Times that a thread that was seen to leave its CPU came back to one.
    SwitchIns = "switch_ins",
    /// Of those, after too short a time to be reported.
    OffCpuShort = "off_cpu_short",
    /// Of those, of a process that had ended or replaced its program meanwhile.
    OffCpuOrphan = "off_cpu_orphan",
    /// Of those, handed to user space.
    OffCpuSubmitted = "off_cpu_submitted",
    /// Of those, lost because the ring of stacks was full.
    OffCpuRingFull = "off_cpu_ring_full",
    /// Times that a thread ticked on a CPU that it was not seen to come back to; how long it was off it is not known.
    OffCpuUnseen = "off_cpu_unseen",
    /// Threads whose time off the CPU is not seen because the `AWAY` map would not take them.
    AwayMapFull = "away_map_full",
    /// Stack records handed to user space.
    StackSubmitted = "stack_submitted",
    /// Stacks lost because the ring of stacks was full.
    StackRingFull = "stack_ring_full",
    /// Stacks lost because another one was being taken on the same CPU.
    StackBusy = "stack_busy",
    /// Stacks lost because the kernel refused to go on to the walk.
    StackNotWalked = "stack_not_walked",
    /// Stacks deeper than can be walked; they were handed over without their root end.
    StackTruncated = "stack_truncated",
    /// Stacks of which a control frame could not be read; they were handed over without their root end.
    StackReadFailed = "stack_read_failed",
    /// Stacks of threads without an execution context.
    StackNoContext = "stack_no_context",
    /// Stacks of threads whose execution context did not fit together.
    StackBadContext = "stack_bad_context",
    /// Stacks of images whose Ruby stacks cannot be walked.
    StackNoLayout = "stack_no_layout",
    /// Frames whose method entry could not be read or was too far away.
    MethodLost = "method_lost",
    /// Stacks whose native frames were walked.
    NativeStacks = "native_stacks",
    /// Records of native frames handed to user space.
    NativeSubmitted = "native_submitted",
    /// Records of native frames lost because the ring of stacks was full.
    NativeRingFull = "native_ring_full",
    /// Probe hits at GVL points, of any process.
    GvlHits = "gvl_hits",
    /// Time that the programs took at them, nanoseconds; not that of the traps, nor of taking stacks.
    GvlNs = "gvl_ns",
    /// Of those, while the GVL probes do nothing because they had cost too much.
    GvlShed = "gvl_shed",
    /// Of those, of processes that are not selected, or whose image is closed or not known.
    GvlFiltered = "gvl_filtered",
    /// Of those, without a thread that could be told.
    GvlNoThread = "gvl_no_thread",
    /// Of those, of threads that the `GVL_THREADS` map had no room for.
    GvlThreadMapFull = "gvl_thread_map_full",
    /// Of those, where a thread begins.
    GvlStarted = "gvl_started",
    /// Of those, where a thread wants the GVL.
    GvlReady = "gvl_ready",
    /// Of those, where a thread has got it.
    GvlResumed = "gvl_resumed",
    /// Of those, where a thread gives it up.
    GvlSuspended = "gvl_suspended",
    /// Of those, where a thread ends.
    GvlExited = "gvl_exited",
    /// Threads that came to want the GVL from doing without it, or were seen for the first time.
    GvlAways = "gvl_aways",
    /// Threads that wanted it while they held it: yields, which have no event of their own in 3.2. With futexes: threads that woke
    /// and went on waiting.
    GvlYields = "gvl_yields",
    /// Threads that wanted it while they waited for it: what lies between was not seen.
    GvlOrphanReady = "gvl_orphan_ready",
    /// Waits: threads that got the GVL after they were seen to want it.
    GvlWaits = "gvl_waits",
    /// Threads that got the GVL and were not seen to want it.
    GvlOrphanResumed = "gvl_orphan_resumed",
    /// Threads that gave up the GVL after they were seen to get it.
    GvlHolds = "gvl_holds",
    /// Threads that gave up the GVL without having got it again: the suspension before was called off.
    GvlCalledOff = "gvl_called_off",
    /// Threads that gave up the GVL and were not seen to get it.
    GvlOrphanSuspended = "gvl_orphan_suspended",
    /// Times that a thread slept on the condition variable on which it also waits for the GVL (3.3 and later, futexes): what it
    /// waits for the GVL when it is woken is not seen.
    GvlSleeps = "gvl_sleeps",
    /// Waits whose holder is not added up because the `GVL_EDGES` map was full.
    GvlEdgesFull = "gvl_edges_full",
    /// Times that a holder was not noted because the `GVL_LOCKS` map was full.
    GvlLocksFull = "gvl_locks_full",
    /// Waits whose holder is not told because for too much of them it is not known who held the GVL.
    GvlHoldersLost = "gvl_holders_lost",
    /// Times that a thread's GVL could not be told, so that its holder is not known.
    GvlNoLock = "gvl_no_lock",
    /// Waits that took at least the threshold.
    GvlLongWaits = "gvl_long_waits",
    /// Of those, handed to user space.
    GvlWaitSubmitted = "gvl_wait_submitted",
    /// Of those, lost because the ring of stacks was full.
    GvlWaitRingFull = "gvl_wait_ring_full",
    /// Of those, not reported because the GVL probes had cost too much.
    GvlWaitShed = "gvl_wait_shed",
    /// Of those, with the stack to be taken.
    GvlStacks = "gvl_stacks",
    /// Threads that gave up the GVL, for which another had been waiting for at least the threshold, with the stack to be taken.
    GvlHolderStacks = "gvl_holder_stacks",
    /// Ticks of the sampling clock in threads that kept others waiting for the GVL, where only those are looked at.
    GvlBlockers = "gvl_blockers",
    /// Holds and times without the GVL that are to be reported because they took long.
    GvlLongSpans = "gvl_long_spans",
    /// Of those, handed to user space.
    GvlSpanSubmitted = "gvl_span_submitted",
    /// Of those, lost because the ring of stacks was full.
    GvlSpanRingFull = "gvl_span_ring_full",
    /// Of those, not reported because the GVL probes had cost too much.
    GvlSpanShed = "gvl_span_shed",
    /// Times that a thread was met of which nothing is known since the GVL probes were stopped for a while.
    GvlInterrupted = "gvl_interrupted",
    /// Native threads of which it is not known whether they have a CPU because the `GVL_TASKS` map was full.
    GvlTasksFull = "gvl_tasks_full",
    /// Times that a thread was on a CPU and was not seen to get there, or to become runnable before.
    GvlSwitchUnseen = "gvl_switch_unseen",
    /// Threads entered in the `GVL_THREADS` map.
    GvlThreads = "gvl_threads",
    /// Of those, ended and handed to user space.
    GvlThreadSubmitted = "gvl_thread_submitted",
    /// Of those, ended and lost because the ring of stacks was full.
    GvlThreadRingFull = "gvl_thread_ring_full",
    /// The waits of those that were lost.
    GvlWaitsLost = "gvl_waits_lost",
    /// Processes whose stacks are not seen because the `RUBIES` map was full.
    RubyMapFull = "ruby_map_full",
    /// Fork, exec and exit events of followed processes.
    Lives = "lives",
    /// Of those, handed to user space.
    LifeSubmitted = "life_submitted",
    /// Of those, lost because the lifecycle ring was full.
    LifeRingFull = "life_ring_full",
}
