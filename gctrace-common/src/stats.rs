//! The kernel's counters (the `COUNTERS` map: one `u64` each, updated atomically) and the sums that must balance, as one table: the
//! ledger, its checks and docs/ledger.md are made from it.

/// What a counter is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Events of the GC.
    Gc,
    /// Forks, execs and exits, and the processes that are known.
    Life,
    /// Stacks, samples and times off the CPU.
    Stacks,
    /// What threads do with the GVL.
    Gvl,
    /// HTTP requests.
    Requests,
    /// Slots that threads take to allocate objects.
    Alloc,
}

impl Family {
    /// All, in the order of the documentation.
    pub const ALL: [Self; 6] = [Self::Gc, Self::Life, Self::Stacks, Self::Gvl, Self::Requests, Self::Alloc];

    /// What it is about, as a heading.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Gc => "GC events",
            Self::Life => "Processes",
            Self::Stacks => "Stacks and times off the CPU",
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

            /// The counter's name as it is printed and exported.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// What it is about.
            pub const fn family(self) -> Family {
                match self { $(Self::$name => Family::$family,)* }
            }

            /// Whether it counts records or measurements that had to be given up.
            pub const fn is_loss(self) -> bool {
                match self { $(Self::$name => false $(|| stringify!($lost).len() > 0)?,)* }
            }

            /// What it counts, for the documentation.
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
    /// Hits of processes that the user did not select.
    Gc: Filtered = "filtered",
    /// Hits whose image is closed (its probes are being attached) or not known (no cookies, no entry).
    Gc: NoImage = "no_image",
    /// Hits that passed selection.
    Gc: Admitted = "admitted",
    /// Admitted hits at `GC_START`.
    Gc: Starts = "starts",
    /// Admitted hits at `GC_END_MARK`.
    Gc: EndMarks = "end_marks",
    /// Admitted hits at `GC_END_SWEEP`.
    Gc: EndSweeps = "end_sweeps",
    /// Enters that may be the VM's shutdown (GC forbidden, no cycle running), of which a snapshot is taken too.
    Gc: Shutdowns = "shutdowns",
    /// Snapshot records handed to user space.
    Gc: SnapshotSubmitted = "snapshot_submitted",
    /// Snapshots lost because the GC ring was full.
    Gc lost: SnapshotRingFull = "snapshot_ring_full",
    /// Snapshots lost because the objspace could not be read.
    Gc lost: SnapshotReadFailed = "snapshot_read_failed",
    /// Snapshots without the memory counters of the process, although it is known where the kernel keeps them.
    Gc: MemoryReadFailed = "memory_read_failed",
    /// Hits at `GC_START`, `GC_END_MARK` and `GC_END_SWEEP` whose time was noted in the thread's open pause.
    Gc: MarkNoted = "mark_noted",
    /// Such hits outside any pause that we saw begin (attached in the middle of it).
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
    /// Pauses thrown away because their exit never came (the stack had unwound past them).
    Gc: ScopeStale = "scope_stale",
    /// Admitted hits at `GC_EXIT`.
    Gc: Exits = "exits",
    /// Exits of nested enters.
    Gc: ExitNested = "exit_nested",
    /// Exits without a pause that we saw begin.
    Gc: OrphanExit = "orphan_exit",
    /// Pause records handed to user space.
    Gc: PauseSubmitted = "pause_submitted",
    /// Pauses lost because the GC ring was full.
    Gc lost: PauseRingFull = "pause_ring_full",
    /// Snapshots at which the site's register and the VM pointer disagree about the objspace.
    Gc: RegisterMismatch = "register_mismatch",
    /// Admitted hits where a phase begins (fallback probes).
    Gc: PhaseBegins = "phase_begins",
    /// Admitted hits where a phase ends.
    Gc: PhaseEnds = "phase_ends",
    /// Of those, handed to user space.
    Gc: PhaseSubmitted = "phase_submitted",
    /// Of those, lost because the GC ring was full.
    Gc lost: PhaseRingFull = "phase_ring_full",
    /// Of those, without a begin that we saw on the thread.
    Gc: PhaseOrphan = "phase_orphan",
    /// Processes (seen at a hit, or forked from a selected one) that could not be entered because the `PROCESSES` map was
    /// full; their hits are `no_image` or `filtered`.
    Life lost: ProcessMapFull = "process_map_full",
    /// Ticks of the sampling clock in threads that kept none waiting for the GVL, where only those are looked at that do.
    Stacks: TicksUnwanted = "ticks_unwanted",
    /// Ticks of the sampling clock in followed processes whose image is known, without `ticks_unwanted`.
    Stacks: Ticks = "ticks",
    /// Stacks to be taken where a cycle starts.
    Stacks: TriggerStacks = "trigger_stacks",
    /// Times that a thread of a followed process left its CPU.
    Stacks: SwitchOuts = "switch_outs",
    /// Stacks of threads off their CPU that are wanted: of those that come back after a time that is reported or, before Linux 6.15, of
    /// all that leave it.
    Stacks: OffCpuWanted = "off_cpu_wanted",
    /// Of those, to be taken.
    Stacks: OffCpuStacks = "off_cpu_stacks",
    /// Of those, not, because of the sampling limit (`--off-cpu-stacks`).
    Stacks: OffCpuShed = "off_cpu_shed",
    /// Times that a thread that was seen to leave its CPU came back to one.
    Stacks: SwitchIns = "switch_ins",
    /// Of those, after too short a time to be reported.
    Stacks: OffCpuShort = "off_cpu_short",
    /// Of those, of a process that had ended or replaced its program meanwhile.
    Stacks: OffCpuOrphan = "off_cpu_orphan",
    /// Of those, handed to user space.
    Stacks: OffCpuSubmitted = "off_cpu_submitted",
    /// Of those, lost because the ring of stacks was full.
    Stacks lost: OffCpuRingFull = "off_cpu_ring_full",
    /// Times that a thread ticked on or left a CPU that it was not seen to come back to; how long it was off it is not known.
    Stacks: OffCpuUnseen = "off_cpu_unseen",
    /// Threads whose time off the CPU is not seen because the `AWAY` map would not take them.
    Stacks lost: AwayMapFull = "away_map_full",
    /// Stack records handed to user space.
    Stacks: StackSubmitted = "stack_submitted",
    /// Stacks lost because the ring of stacks was full.
    Stacks lost: StackRingFull = "stack_ring_full",
    /// Stacks lost because another one was being taken on the same CPU.
    Stacks lost: StackBusy = "stack_busy",
    /// Stacks lost because the kernel refused to go on to the walk.
    Stacks lost: StackNotWalked = "stack_not_walked",
    /// Stacks deeper than can be walked; they were handed over without their root end.
    Stacks: StackTruncated = "stack_truncated",
    /// Stacks of which a control frame could not be read; they were handed over without their root end.
    Stacks: StackReadFailed = "stack_read_failed",
    /// Stacks of threads without an execution context.
    Stacks: StackNoContext = "stack_no_context",
    /// Stacks of threads whose execution context did not fit together.
    Stacks: StackBadContext = "stack_bad_context",
    /// Stacks of processes with a variable by which a tracing library publishes the active span.
    Stacks: StackSpansSought = "stack_spans_sought",
    /// Of those, with a span.
    Stacks: StackSpans = "stack_spans",
    /// Of those, whose variable, or what it points to, could not be read: they have no span.
    Stacks: StackSpansUnread = "stack_spans_unread",
    /// Stacks of images whose Ruby stacks cannot be walked.
    Stacks: StackNoLayout = "stack_no_layout",
    /// Frames whose method entry could not be read or was too far away.
    Stacks: MethodLost = "method_lost",
    /// Stacks whose native frames were walked.
    Stacks: NativeStacks = "native_stacks",
    /// Records of native frames handed to user space.
    Stacks: NativeSubmitted = "native_submitted",
    /// Records of native frames lost because the ring of stacks was full.
    Stacks lost: NativeRingFull = "native_ring_full",
    /// Probe hits at GVL points, of any process.
    Gvl: GvlHits = "gvl_hits",
    /// Time that the programs took at them, nanoseconds; not that of the traps, nor of taking stacks.
    Gvl: GvlNs = "gvl_ns",
    /// Of those, while the GVL probes do nothing because they had cost too much.
    Gvl: GvlShed = "gvl_shed",
    /// Of those, of processes that are not selected, or whose image is closed or not known.
    Gvl: GvlFiltered = "gvl_filtered",
    /// Of those, hits whose thread could not be identified.
    Gvl lost: GvlNoThread = "gvl_no_thread",
    /// Of those, of threads that the `GVL_THREADS` map had no room for.
    Gvl lost: GvlThreadMapFull = "gvl_thread_map_full",
    /// Of those, where a thread begins.
    Gvl: GvlStarted = "gvl_started",
    /// Of those, where a thread wants the GVL.
    Gvl: GvlReady = "gvl_ready",
    /// Of those, where a thread has got it.
    Gvl: GvlResumed = "gvl_resumed",
    /// Of those, where a thread gives it up.
    Gvl: GvlSuspended = "gvl_suspended",
    /// Of those, where a thread ends.
    Gvl: GvlExited = "gvl_exited",
    /// Threads that came to want the GVL from doing without it, or were seen for the first time.
    Gvl: GvlAways = "gvl_aways",
    /// Threads that wanted it while they held it: yields, which have no event of their own in 3.2. With futexes: threads that woke
    /// and went on waiting.
    Gvl: GvlYields = "gvl_yields",
    /// Threads that wanted it while they waited for it: what lies between was not seen.
    Gvl: GvlOrphanReady = "gvl_orphan_ready",
    /// Waits: threads that got the GVL after they were seen to want it.
    Gvl: GvlWaits = "gvl_waits",
    /// Threads that got the GVL and were not seen to want it.
    Gvl: GvlOrphanResumed = "gvl_orphan_resumed",
    /// Threads that gave up the GVL after they were seen to get it.
    Gvl: GvlHolds = "gvl_holds",
    /// Threads that gave up the GVL without having got it again: the suspension before was called off.
    Gvl: GvlCalledOff = "gvl_called_off",
    /// Threads that gave up the GVL and were not seen to get it.
    Gvl: GvlOrphanSuspended = "gvl_orphan_suspended",
    /// Times that a thread slept on the condition variable on which it also waits for the GVL (3.3 and later, futexes): what it
    /// waits for the GVL when it is woken is not seen.
    Gvl: GvlSleeps = "gvl_sleeps",
    /// Parts of waits, one per thread that held the GVL meanwhile, that are not added up because the `GVL_EDGES` map was full.
    Gvl lost: GvlEdgesFull = "gvl_edges_full",
    /// Times that a holder was not noted because the `GVL_LOCKS` map was full.
    Gvl lost: GvlLocksFull = "gvl_locks_full",
    /// Waits reported without a holder, because the holder is unknown for too much of their time.
    Gvl: GvlHoldersLost = "gvl_holders_lost",
    /// Times that a thread's GVL could not be identified, so that its holder is not known.
    Gvl: GvlNoLock = "gvl_no_lock",
    /// Waits that took at least the threshold.
    Gvl: GvlLongWaits = "gvl_long_waits",
    /// Of those, handed to user space.
    Gvl: GvlWaitSubmitted = "gvl_wait_submitted",
    /// Of those, lost because the ring of stacks was full.
    Gvl lost: GvlWaitRingFull = "gvl_wait_ring_full",
    /// Of those, not reported because the GVL probes had cost too much.
    Gvl: GvlWaitShed = "gvl_wait_shed",
    /// Of those, with the stack to be taken.
    Gvl: GvlStacks = "gvl_stacks",
    /// Threads that gave up the GVL, for which another had been waiting for at least the threshold, with the stack to be taken.
    Gvl: GvlHolderStacks = "gvl_holder_stacks",
    /// Ticks of the sampling clock in threads that kept others waiting for the GVL, where only those are looked at.
    Gvl: GvlBlockers = "gvl_blockers",
    /// Holds and times without the GVL that are to be reported because they took long.
    Gvl: GvlLongSpans = "gvl_long_spans",
    /// Of those, handed to user space.
    Gvl: GvlSpanSubmitted = "gvl_span_submitted",
    /// Of those, lost because the ring of stacks was full.
    Gvl lost: GvlSpanRingFull = "gvl_span_ring_full",
    /// Of those, not reported because the GVL probes had cost too much.
    Gvl: GvlSpanShed = "gvl_span_shed",
    /// Times that a thread was seen of which nothing is known since the GVL probes were stopped for a while.
    Gvl: GvlInterrupted = "gvl_interrupted",
    /// Native threads of which it is not known whether they have a CPU because the `GVL_TASKS` map was full.
    Gvl lost: GvlTasksFull = "gvl_tasks_full",
    /// Times that a thread was on a CPU and was not seen to get there, or to become runnable before.
    Gvl: GvlSwitchUnseen = "gvl_switch_unseen",
    /// Threads entered in the `GVL_THREADS` map.
    Gvl: GvlThreads = "gvl_threads",
    /// Of those, ended and handed to user space.
    Gvl: GvlThreadSubmitted = "gvl_thread_submitted",
    /// Of those, ended and lost because the ring of stacks was full.
    Gvl lost: GvlThreadRingFull = "gvl_thread_ring_full",
    /// The waits of those that were lost.
    Gvl: GvlWaitsLost = "gvl_waits_lost",
    /// Processes whose stacks are not seen because the `RUBIES` map was full.
    Stacks lost: RubyMapFull = "ruby_map_full",
    /// Requests that a thread of a server took.
    Requests: Requests = "requests",
    /// Of those, handed to user space.
    Requests: RequestSubmitted = "request_submitted",
    /// Of those, lost because the ring of requests was full.
    Requests lost: RequestRingFull = "request_ring_full",
    /// Of those, on connections of which no request was ever parsed: what was taken for a request was none.
    Requests: RequestNotHttp = "request_not_http",
    /// Of those, requests of a Puma on a Unix socket to which their thread wrote no response: it handed the connection over (hijack), or
    /// ended. There is no line.
    Requests: RequestUnanswered = "request_unanswered",
    /// Calls by which a Puma may have begun or ended a request on a Unix socket, but whose frames could not be read.
    Requests lost: RequestFramesUnread = "request_frames_unread",
    /// Of those, with a header `traceparent` that is not valid, or more than one: the line has no trace id.
    Requests: TraceparentInvalid = "traceparent_invalid",
    /// Of those, whose head was not searched to its end for that header: it was too long, came in pieces of which one ends in the header, could
    /// not be read, or was parsed before it was watched. The line has no trace id.
    Requests: TraceparentUnread = "traceparent_unread",
    /// Requests that were not noted because the map of threads that serve was full.
    Requests lost: RequestMapFull = "request_map_full",
    /// Begins and ends of requests and jobs at which the state of the VM was to be copied.
    Requests: UnitStates = "unit_states",
    /// Of those, handed to user space.
    Requests: UnitStateSubmitted = "unit_state_submitted",
    /// Of those, lost because the ring of requests was full.
    Requests lost: UnitStateRingFull = "unit_state_ring_full",
    /// Of those, lost because the objspace could not be read.
    Requests lost: UnitStateReadFailed = "unit_state_read_failed",
    /// Admitted hits where a thread would take the free slots of a heap page, but has no page yet.
    Alloc: RefillNoPage = "refill_no_page",
    /// Admitted hits where a thread takes the free slots of a heap page.
    Alloc: Refills = "refills",
    /// Of those, handed to user space.
    Alloc: RefillSubmitted = "refill_submitted",
    /// Of those, lost because the ring of stacks was full.
    Alloc lost: RefillRingFull = "refill_ring_full",
    /// Stacks to be taken where a thread takes the free slots of a heap page.
    Alloc: RefillStacks = "refill_stacks",
    /// Refills lost because the page could not be read, or the process was not known (the `RUBIES` map was full).
    Alloc lost: RefillUnread = "refill_unread",
    /// Fork, exec and exit events of followed processes.
    Life: Lives = "lives",
    /// Of those, handed to user space.
    Life: LifeSubmitted = "life_submitted",
    /// Of those, lost because the lifecycle ring was full.
    Life lost: LifeRingFull = "life_ring_full",
}

/// Two sums of kernel counters that are equal when a run has ended.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The same in words.
    pub text: &'static str,
    /// These, added up, are
    pub left: &'static [Counter],
    /// these, added up.
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
        text: "admitted = starts + end_marks + end_sweeps + enters + exits + phase begins and ends + refills",
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
        text: "GVL wanted = from away + yields + orphans",
        left: &[C::GvlReady],
        right: &[C::GvlAways, C::GvlYields, C::GvlOrphanReady],
    },
    Identity {
        text: "GVL got = waits + orphans",
        left: &[C::GvlResumed],
        right: &[C::GvlWaits, C::GvlOrphanResumed],
    },
    Identity {
        text: "GVL given up = holds + called off + orphans",
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
        text: "times back on a CPU = too short + orphans + submitted + ring full",
        left: &[C::SwitchIns],
        right: &[C::OffCpuShort, C::OffCpuOrphan, C::OffCpuSubmitted, C::OffCpuRingFull],
    },
    Identity {
        text: "ticks + GC starts, times off the CPU, GVL waits, holds and refills with stacks = stacks submitted + ring full + busy + not walked",
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
        text: "states at begins and ends of requests = submitted + ring full + read failed",
        left: &[C::UnitStates],
        right: &[C::UnitStateSubmitted, C::UnitStateRingFull, C::UnitStateReadFailed],
    },
    Identity {
        text: "refills = submitted + ring full + unread",
        left: &[C::Refills],
        right: &[C::RefillSubmitted, C::RefillRingFull, C::RefillUnread],
    },
];
