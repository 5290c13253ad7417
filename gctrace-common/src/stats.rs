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
//! `lives = life_submitted + life_ring_full`.

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
    /// Fork, exec and exit events of followed processes.
    Lives = "lives",
    /// Of those, handed to user space.
    LifeSubmitted = "life_submitted",
    /// Of those, lost because the lifecycle ring was full.
    LifeRingFull = "life_ring_full",
}
