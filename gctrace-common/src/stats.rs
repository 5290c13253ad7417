//! The kernel's counters (the `COUNTERS` map: one `u64` each, updated atomically) and the sums that must balance, as one table. The
//! ledger, its checks and docs/ledger.md are generated from it.

/// Subject of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Events of the GC.
    Gc,
    /// Forks, execs and exits, and the known processes.
    Life,
    /// Stacks, samples and times off the CPU.
    Stacks,
    /// What threads do with the GVL.
    Gvl,
    /// HTTP requests and jobs.
    Requests,
    /// Heap slots that threads take to allocate objects.
    Alloc,
}

impl Family {
    /// All families, in the order of the documentation.
    pub const ALL: [Self; 6] = [Self::Gc, Self::Life, Self::Stacks, Self::Gvl, Self::Requests, Self::Alloc];

    /// The subject, as a heading.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Gc => "GC events",
            Self::Life => "Processes",
            Self::Stacks => "Stacks and off-CPU times",
            Self::Gvl => "GVL",
            Self::Requests => "Requests",
            Self::Alloc => "Allocation",
        }
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $family:ident $($lost:ident)?: $name:ident = $text:literal,)*) => {
        /// Index of a counter in the `COUNTERS` map.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Counter { $($(#[doc = $doc])* $name,)* }

        impl Counter {
            /// All counters, in the order of their index.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The counter's name as printed and exported.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The subject of the counter.
            pub const fn family(self) -> Family {
                match self { $(Self::$name => Family::$family,)* }
            }

            /// Whether the counter counts records or measurements that were lost.
            pub const fn is_loss(self) -> bool {
                match self { $(Self::$name => false $(|| stringify!($lost).len() > 0)?,)* }
            }

            /// What the counter counts, for the documentation.
            pub const fn doc(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),*),)* }
            }
        }
    };
}

counters! {
    /// Probe hits at GC points, of any process.
    Gc: Hits = "hits",
    /// Hits of gctrace itself.
    Gc: SelfHits = "self_hits",
    /// Hits of processes that are not selected.
    Gc: Filtered = "filtered",
    /// Hits whose image is not open (its probes are being attached) or unknown (no cookies, no entry).
    Gc: NoImage = "no_image",
    /// Hits that passed the selection.
    Gc: Admitted = "admitted",
    /// Admitted hits at `GC_START`.
    Gc: Starts = "starts",
    /// Admitted hits at `GC_END_MARK`.
    Gc: EndMarks = "end_marks",
    /// Admitted hits at `GC_END_SWEEP`.
    Gc: EndSweeps = "end_sweeps",
    /// Enters that may be the VM's shutdown (GC forbidden, no cycle running); a snapshot is taken at each.
    Gc: Shutdowns = "shutdowns",
    /// Snapshot records handed to user space.
    Gc: SnapshotSubmitted = "snapshot_submitted",
    /// Snapshots lost because the GC ring was full.
    Gc lost: SnapshotRingFull = "snapshot_ring_full",
    /// Snapshots lost because the objspace could not be read.
    Gc lost: SnapshotReadFailed = "snapshot_read_failed",
    /// Snapshots, copied VM states, and (with `--alloc`) starts and ends of requests and jobs, without the memory counters of the process, although
    /// their place in the kernel is known.
    Gc: MemoryReadFailed = "memory_read_failed",
    /// Hits at `GC_START`, `GC_END_MARK` and `GC_END_SWEEP` whose time was recorded in the thread's open pause.
    Gc: MarkNoted = "mark_noted",
    /// Hits at these points outside any pause whose start was seen (tracing was attached in the middle of it).
    Gc: OrphanMark = "orphan_mark",
    /// Admitted hits at `GC_ENTER`.
    Gc: Enters = "enters",
    /// Enters that opened a pause.
    Gc: ScopeOpened = "scope_opened",
    /// Enters inside an open pause of the same thread.
    Gc: ScopeNested = "scope_nested",
    /// Enters lost because the `SCOPES` map was full.
    Gc lost: ScopeMapFull = "scope_map_full",
    /// Enters lost because the objspace could not be read.
    Gc lost: EnterReadFailed = "enter_read_failed",
    /// Pauses discarded because their exit never came: the stack had been unwound past them, or the image was probed again meanwhile.
    Gc: ScopeStale = "scope_stale",
    /// Admitted hits at `GC_EXIT`.
    Gc: Exits = "exits",
    /// Exits of nested enters.
    Gc: ExitNested = "exit_nested",
    /// Exits of pauses whose start was not seen.
    Gc: OrphanExit = "orphan_exit",
    /// Pause records handed to user space.
    Gc: PauseSubmitted = "pause_submitted",
    /// Pauses lost because the GC ring was full.
    Gc lost: PauseRingFull = "pause_ring_full",
    /// Snapshots at which the register of the probe site and the VM pointer give different objspaces.
    Gc: RegisterMismatch = "register_mismatch",
    /// Admitted hits at the start of a phase (fallback probes).
    Gc: PhaseBegins = "phase_begins",
    /// Admitted hits at the end of a phase (fallback probes).
    Gc: PhaseEnds = "phase_ends",
    /// Phases handed to user space.
    Gc: PhaseSubmitted = "phase_submitted",
    /// Phases lost because the GC ring was full.
    Gc lost: PhaseRingFull = "phase_ring_full",
    /// Ends of phases whose start was not seen on the thread.
    Gc: PhaseOrphan = "phase_orphan",
    /// Processes (seen at a hit or by their name, or forked from a selected one) that could not be entered because the `PROCESSES` map (or
    /// `ASKED`, with `--name`) was full; their hits are `no_image` or `filtered`.
    Life lost: ProcessMapFull = "process_map_full",
    /// Programs of Ruby processes that collected (counted in `filtered`) and ended before their name could be read (`--name`); whether they
    /// were to be traced is not known.
    Life: NamesUnread = "names_unread",
    /// Ticks of the sampling clock in threads that kept no other thread waiting for the GVL, when only threads that do are sampled.
    Stacks: TicksUnwanted = "ticks_unwanted",
    /// Ticks of the sampling clock in followed processes whose image is known, except those counted in `ticks_unwanted`.
    Stacks: Ticks = "ticks",
    /// Stacks to be taken at the start of a cycle.
    Stacks: TriggerStacks = "trigger_stacks",
    /// Times that a thread of a followed process left its CPU.
    Stacks: SwitchOuts = "switch_outs",
    /// Wanted stacks of threads off their CPU: of threads that return after a time long enough to be reported or, before Linux 6.15, of all
    /// threads that leave their CPU.
    Stacks: OffCpuWanted = "off_cpu_wanted",
    /// Wanted off-CPU stacks that are to be taken.
    Stacks: OffCpuStacks = "off_cpu_stacks",
    /// Wanted off-CPU stacks that are not taken because of the sampling limit (`--off-cpu-stacks`).
    Stacks: OffCpuShed = "off_cpu_shed",
    /// Times that a thread that was seen to leave its CPU returned to one.
    Stacks: SwitchIns = "switch_ins",
    /// Returns after a time too short to be reported.
    Stacks: OffCpuShort = "off_cpu_short",
    /// Returns in a process that had ended or replaced its program meanwhile.
    Stacks: OffCpuOrphan = "off_cpu_orphan",
    /// Returns handed to user space.
    Stacks: OffCpuSubmitted = "off_cpu_submitted",
    /// Returns lost because the ring of stacks was full.
    Stacks lost: OffCpuRingFull = "off_cpu_ring_full",
    /// Times that a thread ticked on or left a CPU although its return to it was not seen; how long it was off the CPU is unknown.
    Stacks: OffCpuUnseen = "off_cpu_unseen",
    /// Times off the CPU that are not seen because the `AWAY` map refused the entry.
    Stacks lost: AwayMapFull = "away_map_full",
    /// Stack records handed to user space.
    Stacks: StackSubmitted = "stack_submitted",
    /// Stacks lost because the ring of stacks was full.
    Stacks lost: StackRingFull = "stack_ring_full",
    /// Stacks lost because other stacks were being taken on the same CPU.
    Stacks lost: StackBusy = "stack_busy",
    /// Stacks lost before the walk: the kernel refused the tail call to it, or did not report the thread's return to its CPU.
    Stacks lost: StackNotWalked = "stack_not_walked",
    /// Stacks too deep to be walked completely; they were handed over without their outermost frames.
    Stacks: StackTruncated = "stack_truncated",
    /// Stacks with a control frame that could not be read; they were handed over without that frame and those outside of it.
    Stacks: StackReadFailed = "stack_read_failed",
    /// Stacks of threads without an execution context.
    Stacks: StackNoContext = "stack_no_context",
    /// Stacks of threads whose execution context is inconsistent.
    Stacks: StackBadContext = "stack_bad_context",
    /// Stacks of processes with a variable in which a tracing library publishes the active span.
    Stacks: StackSpansSought = "stack_spans_sought",
    /// Stacks with an active span.
    Stacks: StackSpans = "stack_spans",
    /// Stacks without a span because that variable, or the memory it points to, could not be read.
    Stacks: StackSpansUnread = "stack_spans_unread",
    /// Stacks of images whose Ruby stacks cannot be walked.
    Stacks: StackNoLayout = "stack_no_layout",
    /// Frames whose method entry could not be read or was nested too deeply.
    Stacks: MethodLost = "method_lost",
    /// Stacks whose native frames were walked.
    Stacks: NativeStacks = "native_stacks",
    /// Records of native frames handed to user space.
    Stacks: NativeSubmitted = "native_submitted",
    /// Records of native frames lost because the ring of stacks was full.
    Stacks lost: NativeRingFull = "native_ring_full",
    /// Probe hits at GVL points, of any process.
    Gvl: GvlHits = "gvl_hits",
    /// Time spent in the programs that watch the GVL, nanoseconds, without the traps and without taking stacks.
    Gvl: GvlNs = "gvl_ns",
    /// Hits while the GVL probes do nothing because they had cost too much.
    Gvl: GvlShed = "gvl_shed",
    /// GVL hits of processes that are not selected, or whose image is not open or unknown.
    Gvl: GvlFiltered = "gvl_filtered",
    /// GVL hits whose thread could not be identified.
    Gvl lost: GvlNoThread = "gvl_no_thread",
    /// GVL hits of threads for which the `GVL_THREADS` map had no room.
    Gvl lost: GvlThreadMapFull = "gvl_thread_map_full",
    /// GVL hits where a thread starts.
    Gvl: GvlStarted = "gvl_started",
    /// GVL hits where a thread requests the GVL.
    Gvl: GvlReady = "gvl_ready",
    /// GVL hits where a thread has acquired the GVL.
    Gvl: GvlResumed = "gvl_resumed",
    /// GVL hits where a thread releases the GVL.
    Gvl: GvlSuspended = "gvl_suspended",
    /// GVL hits where a thread ends.
    Gvl: GvlExited = "gvl_exited",
    /// Requests for the GVL by threads that had been without it, or were seen for the first time.
    Gvl: GvlAways = "gvl_aways",
    /// Requests for the GVL by threads that held it: yields, whose release has no event of its own in 3.2. With futexes: threads that woke
    /// up and continued to wait.
    Gvl: GvlYields = "gvl_yields",
    /// Requests for the GVL by threads that were already waiting for it: the events in between were not seen.
    Gvl: GvlOrphanReady = "gvl_orphan_ready",
    /// Waits: acquisitions of the GVL by threads whose request was seen.
    Gvl: GvlWaits = "gvl_waits",
    /// Acquisitions of the GVL by threads whose request was not seen.
    Gvl: GvlOrphanResumed = "gvl_orphan_resumed",
    /// Holds: releases of the GVL by threads whose acquisition was seen.
    Gvl: GvlHolds = "gvl_holds",
    /// Releases of the GVL by threads that had not acquired it again: the release before was called off.
    Gvl: GvlCalledOff = "gvl_called_off",
    /// Releases of the GVL by threads whose acquisition was not seen.
    Gvl: GvlOrphanSuspended = "gvl_orphan_suspended",
    /// Times that a thread slept on the condition variable on which it also waits for the GVL (3.3 and later, futexes); how long it waits
    /// for the GVL once it is woken is not seen.
    Gvl: GvlSleeps = "gvl_sleeps",
    /// Parts of waits, one per thread that held the GVL meanwhile, that were not added up because the `GVL_EDGES` map was full.
    Gvl lost: GvlEdgesFull = "gvl_edges_full",
    /// Times that a holder was not recorded because the `GVL_LOCKS` map was full.
    Gvl lost: GvlLocksFull = "gvl_locks_full",
    /// Waits reported without a holder because the holder is unknown for too much of the wait.
    Gvl: GvlHoldersLost = "gvl_holders_lost",
    /// Times that a thread's GVL could not be identified, so that its holder is unknown.
    Gvl: GvlNoLock = "gvl_no_lock",
    /// Waits of at least the threshold.
    Gvl: GvlLongWaits = "gvl_long_waits",
    /// Long waits handed to user space.
    Gvl: GvlWaitSubmitted = "gvl_wait_submitted",
    /// Long waits lost because the ring of stacks was full.
    Gvl lost: GvlWaitRingFull = "gvl_wait_ring_full",
    /// Long waits not reported because the GVL probes had cost too much.
    Gvl: GvlWaitShed = "gvl_wait_shed",
    /// Long waits whose stack is to be taken.
    Gvl: GvlStacks = "gvl_stacks",
    /// Releases of a GVL for which another thread had been waiting for about the threshold; the stack is to be taken.
    Gvl: GvlHolderStacks = "gvl_holder_stacks",
    /// Ticks of the sampling clock in threads that kept others waiting for the GVL, when only such threads are sampled.
    Gvl: GvlBlockers = "gvl_blockers",
    /// Holds of the GVL and times without it that are to be reported because they were long.
    Gvl: GvlLongSpans = "gvl_long_spans",
    /// Long holds and times without the GVL handed to user space.
    Gvl: GvlSpanSubmitted = "gvl_span_submitted",
    /// Long holds and times without the GVL lost because the ring of stacks was full.
    Gvl lost: GvlSpanRingFull = "gvl_span_ring_full",
    /// Long holds and times without the GVL not reported because the GVL probes had cost too much.
    Gvl: GvlSpanShed = "gvl_span_shed",
    /// Times that a thread was seen again after the GVL probes had been stopped for a while; what it did meanwhile is unknown.
    Gvl: GvlInterrupted = "gvl_interrupted",
    /// Native threads for which it is unknown whether they have a CPU because the `GVL_TASKS` map was full.
    Gvl lost: GvlTasksFull = "gvl_tasks_full",
    /// Times that a thread was on a CPU although its switch to it, or its wakeup before, was not seen.
    Gvl: GvlSwitchUnseen = "gvl_switch_unseen",
    /// Threads entered in the `GVL_THREADS` map.
    Gvl: GvlThreads = "gvl_threads",
    /// Ended threads handed to user space.
    Gvl: GvlThreadSubmitted = "gvl_thread_submitted",
    /// Ended threads lost because the ring of stacks was full.
    Gvl lost: GvlThreadRingFull = "gvl_thread_ring_full",
    /// Waits of the threads counted in `gvl_thread_ring_full`.
    Gvl: GvlWaitsLost = "gvl_waits_lost",
    /// Processes without stacks because the `RUBIES` map was full.
    Stacks lost: RubyMapFull = "ruby_map_full",
    /// Requests and jobs that a thread of a server took.
    Requests: Requests = "requests",
    /// Requests and jobs handed to user space.
    Requests: RequestSubmitted = "request_submitted",
    /// Requests and jobs lost because the ring of requests was full.
    Requests lost: RequestRingFull = "request_ring_full",
    /// Requests on connections on which no request was ever parsed: they were not HTTP requests.
    Requests: RequestNotHttp = "request_not_http",
    /// Requests of a Puma on a Unix socket to which their thread wrote no response: it handed the connection over (hijack), or ended. They
    /// have no line in the output.
    Requests: RequestUnanswered = "request_unanswered",
    /// Calls that may have begun or ended a request of a Puma on a Unix socket, but whose frames could not be read.
    Requests lost: RequestFramesUnread = "request_frames_unread",
    /// Requests with an invalid `traceparent` header, or more than one: the line has no trace id.
    Requests: TraceparentInvalid = "traceparent_invalid",
    /// Requests whose head was not searched to its end for a `traceparent` header: it was too long, came in pieces one of which ends within the
    /// header, could not be read, or was parsed before the server was watched. The line has no trace id.
    Requests: TraceparentUnread = "traceparent_unread",
    /// Times that a serving thread, a job fetcher, or a process that begins to listen was not recorded because the map or ring was full.
    Requests lost: RequestMapFull = "request_map_full",
    /// Starts and ends of requests and jobs at which the page faults of their thread could not be read, although their place in the kernel is known.
    Requests: RequestFaultsUnread = "request_faults_unread",
    /// Starts and ends of requests and jobs at which the state of the VM was to be copied.
    Requests: UnitStates = "unit_states",
    /// VM states handed to user space.
    Requests: UnitStateSubmitted = "unit_state_submitted",
    /// VM states lost because the ring of requests was full.
    Requests lost: UnitStateRingFull = "unit_state_ring_full",
    /// VM states lost because the objspace could not be read.
    Requests lost: UnitStateReadFailed = "unit_state_read_failed",
    /// Admitted hits at a site where a thread takes the free slots of a heap page, while it has no page yet.
    Alloc: RefillNoPage = "refill_no_page",
    /// Refills: admitted hits where a thread takes the free slots of a heap page.
    Alloc: Refills = "refills",
    /// Refills handed to user space.
    Alloc: RefillSubmitted = "refill_submitted",
    /// Refills lost because the ring of stacks was full.
    Alloc lost: RefillRingFull = "refill_ring_full",
    /// Stacks to be taken at refills.
    Alloc: RefillStacks = "refill_stacks",
    /// Refills lost because the page could not be read, or the process is unknown (the `RUBIES` map was full).
    Alloc lost: RefillUnread = "refill_unread",
    /// Fork, exec and exit events of followed processes.
    Life: Lives = "lives",
    /// Such events handed to user space.
    Life: LifeSubmitted = "life_submitted",
    /// Such events lost because the lifecycle ring was full.
    Life lost: LifeRingFull = "life_ring_full",
}

/// Two sums of kernel counters that are equal when a run has ended.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The equation in words.
    pub text: &'static str,
    /// Counters whose sum is the left side.
    pub left: &'static [Counter],
    /// Counters whose sum is the right side.
    pub right: &'static [Counter],
}

use Counter as C;

/// The sums that must balance between kernel counters.
pub const IDENTITIES: &[Identity] = &[
    Identity {
        text: "hits = self_hits + filtered + no_image + admitted",
        left: &[C::Hits],
        right: &[C::SelfHits, C::Filtered, C::NoImage, C::Admitted],
    },
    Identity {
        text: "admitted = starts + end_marks + end_sweeps + enters + exits + phase starts and ends + refills",
        left: &[C::Admitted],
        right: &[
            C::Starts,
            C::EndMarks,
            C::EndSweeps,
            C::Enters,
            C::Exits,
            C::PhaseBegins,
            C::PhaseEnds,
            C::Refills,
            C::RefillNoPage,
        ],
    },
    Identity {
        text: "phase ends = phases submitted + ring full + orphans",
        left: &[C::PhaseEnds],
        right: &[C::PhaseSubmitted, C::PhaseRingFull, C::PhaseOrphan],
    },
    Identity {
        text: "starts + end_sweeps + shutdowns = snapshots submitted + ring full + read failed",
        left: &[C::Starts, C::EndSweeps, C::Shutdowns],
        right: &[C::SnapshotSubmitted, C::SnapshotRingFull, C::SnapshotReadFailed],
    },
    Identity {
        text: "starts + end_marks + end_sweeps = mark_noted + orphan_mark",
        left: &[C::Starts, C::EndMarks, C::EndSweeps],
        right: &[C::MarkNoted, C::OrphanMark],
    },
    Identity {
        text: "enters = scopes opened + nested + map full + read failed",
        left: &[C::Enters],
        right: &[C::ScopeOpened, C::ScopeNested, C::ScopeMapFull, C::EnterReadFailed],
    },
    Identity {
        text: "exits = pauses submitted + ring full + nested + orphans",
        left: &[C::Exits],
        right: &[C::PauseSubmitted, C::PauseRingFull, C::ExitNested, C::OrphanExit],
    },
    Identity {
        text: "lives = life_submitted + life_ring_full",
        left: &[C::Lives],
        right: &[C::LifeSubmitted, C::LifeRingFull],
    },
    Identity {
        text: "GVL hits = shed + filtered + without thread + map full + events",
        left: &[C::GvlHits],
        right: &[
            C::GvlShed,
            C::GvlFiltered,
            C::GvlNoThread,
            C::GvlThreadMapFull,
            C::GvlStarted,
            C::GvlReady,
            C::GvlResumed,
            C::GvlSuspended,
            C::GvlExited,
        ],
    },
    Identity {
        text: "GVL requests = from away + yields + orphans",
        left: &[C::GvlReady],
        right: &[C::GvlAways, C::GvlYields, C::GvlOrphanReady],
    },
    Identity {
        text: "GVL acquisitions = waits + orphans",
        left: &[C::GvlResumed],
        right: &[C::GvlWaits, C::GvlOrphanResumed],
    },
    Identity {
        text: "GVL releases = holds + called off + orphans",
        left: &[C::GvlSuspended],
        right: &[C::GvlHolds, C::GvlCalledOff, C::GvlOrphanSuspended],
    },
    Identity {
        text: "long waits = submitted + ring full + shed",
        left: &[C::GvlLongWaits],
        right: &[C::GvlWaitSubmitted, C::GvlWaitRingFull, C::GvlWaitShed],
    },
    Identity {
        text: "long holds and times without the GVL = submitted + ring full + shed",
        left: &[C::GvlLongSpans],
        right: &[C::GvlSpanSubmitted, C::GvlSpanRingFull, C::GvlSpanShed],
    },
    Identity {
        text: "off-CPU stacks wanted = to be taken + shed",
        left: &[C::OffCpuWanted],
        right: &[C::OffCpuStacks, C::OffCpuShed],
    },
    Identity {
        text: "returns to a CPU = too short + orphans + submitted + ring full",
        left: &[C::SwitchIns],
        right: &[C::OffCpuShort, C::OffCpuOrphan, C::OffCpuSubmitted, C::OffCpuRingFull],
    },
    Identity {
        text: "ticks + GC starts, off-CPU times, GVL waits, holds and refills with stacks = stacks submitted + ring full + busy + not walked",
        left: &[
            C::Ticks,
            C::TriggerStacks,
            C::OffCpuStacks,
            C::GvlStacks,
            C::GvlHolderStacks,
            C::RefillStacks,
        ],
        right: &[C::StackSubmitted, C::StackRingFull, C::StackBusy, C::StackNotWalked],
    },
    Identity {
        text: "native stacks walked = submitted + ring full",
        left: &[C::NativeStacks],
        right: &[C::NativeSubmitted, C::NativeRingFull],
    },
    Identity {
        text: "states at starts and ends of requests and jobs = submitted + ring full + read failed",
        left: &[C::UnitStates],
        right: &[C::UnitStateSubmitted, C::UnitStateRingFull, C::UnitStateReadFailed],
    },
    Identity {
        text: "refills = submitted + ring full + unread",
        left: &[C::Refills],
        right: &[C::RefillSubmitted, C::RefillRingFull, C::RefillUnread],
    },
];
