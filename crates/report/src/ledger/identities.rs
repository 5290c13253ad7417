//! The identities that must hold between the counters of the kernel side and those of the user-space stages. Identities of kernel
//! counters alone are in [`gctrace_common::stats::IDENTITIES`].

use gctrace_common::stats::Counter as C;

use super::UserCounter as U;

/// Two sums that are equal at the end of a run.
pub(super) struct Sum {
    /// The same in words.
    pub(super) text: &'static str,
    pub(super) left: Side,
    pub(super) right: Side,
}

/// The counters added up on one side.
pub(super) struct Side {
    pub(super) kernel: &'static [C],
    pub(super) user: &'static [U],
}

/// All identities.
pub(super) const ALL: &[Sum] = &[
    Sum {
        text: "records submitted = records decoded + undecodable",
        left: Side {
            kernel: &[
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
                C::RequestSubmitted,
                C::UnitStateSubmitted,
                C::RefillSubmitted,
            ],
            user: &[],
        },
        right: Side {
            kernel: &[],
            user: &[
                U::decoded_snapshots,
                U::decoded_pauses,
                U::decoded_phases,
                U::decoded_lives,
                U::decoded_stacks,
                U::decoded_natives,
                U::decoded_off_cpu,
                U::decoded_gvl_waits,
                U::decoded_gvl_threads,
                U::decoded_gvl_spans,
                U::decoded_requests,
                U::decoded_unit_states,
                U::decoded_refills,
                U::undecodable,
                U::undecodable_stacks,
                U::undecodable_requests,
            ],
        },
    },
    Sum {
        text: "threads = ended and submitted + ring full + read",
        left: Side { kernel: &[C::GvlThreads], user: &[] },
        right: Side { kernel: &[C::GvlThreadSubmitted, C::GvlThreadRingFull], user: &[U::gvl_threads_read] },
    },
    Sum {
        text: "waits for the GVL = those of all threads + lost",
        left: Side { kernel: &[C::GvlWaits], user: &[] },
        right: Side { kernel: &[C::GvlWaitsLost], user: &[U::gvl_thread_waits] },
    },
    Sum {
        text: "GVL records decoded + threads read = exported + refused",
        left: Side {
            kernel: &[],
            user: &[U::decoded_gvl_waits, U::decoded_gvl_threads, U::decoded_gvl_spans, U::gvl_threads_read],
        },
        right: Side { kernel: &[], user: &[U::gvl_waits, U::gvl_threads, U::gvl_spans, U::gvl_refused] },
    },
    Sum {
        text: "off-CPU records decoded + still away = with stack + without",
        left: Side { kernel: &[], user: &[U::decoded_off_cpu, U::off_cpu_still] },
        right: Side { kernel: &[], user: &[U::off_cpu_stacks, U::off_cpu_without_stack] },
    },
    Sum {
        text: "native records decoded = mixed + alone + unequal + walks that ended early + orphaned",
        left: Side { kernel: &[], user: &[U::decoded_natives] },
        right: Side {
            kernel: &[],
            user: &[
                U::natives_mixed,
                U::natives_alone,
                U::natives_unequal,
                U::natives_no_table,
                U::natives_no_row,
                U::natives_unsupported,
                U::natives_unreadable,
                U::natives_no_registers,
                U::natives_truncated,
                U::natives_orphaned,
            ],
        },
    },
    Sum {
        text: "native frames = named + by offset + unmapped",
        left: Side { kernel: &[], user: &[U::native_frames] },
        right: Side {
            kernel: &[],
            user: &[U::native_frames_named, U::native_frames_by_offset, U::native_frames_unmapped],
        },
    },
    Sum {
        text: "stack records decoded + sleepers + off-CPU samples = exported + refused + triggers + off-CPU times + GVL waits, holds and blockers",
        left: Side { kernel: &[], user: &[U::decoded_stacks, U::sleeper_stacks, U::off_cpu_samples] },
        right: Side {
            kernel: &[],
            user: &[
                U::stacks,
                U::refused_stacks,
                U::triggers,
                U::triggers_unclaimed,
                U::off_cpu_stacks,
                U::off_cpu_unused,
                U::gvl_stacks,
                U::gvl_stacks_unclaimed,
                U::gvl_holder_stacks,
                U::gvl_holder_stacks_unclaimed,
                U::gvl_blockers,
                U::alloc_stacks,
                U::alloc_stacks_unclaimed,
            ],
        },
    },
    Sum {
        text: "Ruby frames = named + stale + unreadable + without symbols",
        left: Side { kernel: &[], user: &[U::frames] },
        right: Side {
            kernel: &[],
            user: &[U::frames_named, U::frames_stale, U::frames_unreadable, U::frames_without_symbols],
        },
    },
    Sum {
        text: "GC records decoded = starts + ends + ends without start + shutdowns + pauses + phases + refused",
        left: Side { kernel: &[], user: &[U::decoded_snapshots, U::decoded_pauses, U::decoded_phases] },
        right: Side {
            kernel: &[],
            user: &[
                U::cycles_started,
                U::starts_outside,
                U::phases,
                U::cycle_ends,
                U::ends_without_start,
                U::shutdown_states,
                U::pauses_in_cycles,
                U::pauses_outside,
                U::refused_records,
            ],
        },
    },
    Sum {
        text: "entries of the recording = written + waiting + kept + expired + displaced + dropped",
        left: Side { kernel: &[], user: &[U::recorded] },
        right: Side {
            kernel: &[],
            user: &[
                U::recorded_written,
                U::recorded_waiting,
                U::recorded_kept,
                U::recorded_expired,
                U::recorded_displaced,
                U::recorded_dropped,
            ],
        },
    },
    Sum {
        text: "requests for a file of what is kept = written + waiting + failed + suppressed",
        left: Side { kernel: &[], user: &[U::dump_requests] },
        right: Side {
            kernel: &[],
            user: &[U::dumps_written, U::dumps_waiting, U::dumps_failed, U::dumps_suppressed],
        },
    },
    Sum {
        text: "uploads = sent + refused + dropped + empty + waiting",
        left: Side { kernel: &[], user: &[U::uploads] },
        right: Side {
            kernel: &[],
            user: &[
                U::uploads_sent,
                U::uploads_refused,
                U::uploads_dropped,
                U::uploads_empty,
                U::uploads_waiting,
            ],
        },
    },
    Sum {
        text: "sample sets = sent + refused + dropped + waiting",
        left: Side { kernel: &[], user: &[U::sets] },
        right: Side { kernel: &[], user: &[U::sets_sent, U::sets_refused, U::sets_dropped, U::sets_waiting] },
    },
    Sum {
        text: "requests taken = submitted + ring full + no HTTP + unanswered + still open",
        left: Side { kernel: &[C::Requests], user: &[] },
        right: Side {
            kernel: &[C::RequestSubmitted, C::RequestRingFull, C::RequestNotHttp, C::RequestUnanswered],
            user: &[U::requests_open],
        },
    },
    Sum {
        text: "request records decoded = reported + refused + no room + jobs returned",
        left: Side { kernel: &[], user: &[U::decoded_requests] },
        right: Side {
            kernel: &[],
            user: &[U::requests_reported, U::requests_refused, U::requests_no_room, U::jobs_returned],
        },
    },
    Sum {
        text: "states at starts and ends of requests and jobs decoded = exact + moving + refused",
        left: Side { kernel: &[], user: &[U::decoded_unit_states] },
        right: Side {
            kernel: &[],
            user: &[U::unit_states_exact, U::unit_states_moving, U::unit_states_refused],
        },
    },
    Sum {
        text: "cycles started = cycles reported",
        left: Side { kernel: &[], user: &[U::cycles_started] },
        right: Side { kernel: &[], user: &[U::cycles] },
    },
    Sum {
        text: "samples for profiles = recorded + of other threads + out of focus + of other endpoints",
        left: Side { kernel: &[], user: &[U::profile_samples] },
        right: Side {
            kernel: &[],
            user: &[
                U::profile_samples_recorded,
                U::profile_samples_other_threads,
                U::profile_samples_out_of_focus,
                U::profile_samples_other_endpoints,
            ],
        },
    },
    Sum {
        text: "time for profiles = recorded + of other threads + out of focus + of other endpoints",
        left: Side { kernel: &[], user: &[U::profile_ns] },
        right: Side {
            kernel: &[],
            user: &[
                U::profile_ns_recorded,
                U::profile_ns_other_threads,
                U::profile_ns_out_of_focus,
                U::profile_ns_other_endpoints,
            ],
        },
    },
    Sum {
        text: "events for profiles = recorded + of other threads + out of focus + of other endpoints",
        left: Side { kernel: &[], user: &[U::profile_events] },
        right: Side {
            kernel: &[],
            user: &[
                U::profile_events_recorded,
                U::profile_events_other_threads,
                U::profile_events_out_of_focus,
                U::profile_events_other_endpoints,
            ],
        },
    },
    Sum {
        text: "refill records decoded = added up + refused",
        left: Side { kernel: &[], user: &[U::decoded_refills] },
        right: Side { kernel: &[], user: &[U::refills, U::refused_refills] },
    },
];
