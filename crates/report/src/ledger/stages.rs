//! The counters of the user-space stages: one table, with a struct for each stage.

use gctrace_common::event::Kind;

macro_rules! user_counters {
    ($($(#[doc = $about:literal])* $stage:ident: $Stage:ident { $($(#[doc = $doc:literal])* $name:ident,)* })*) => {
        $(
            $(#[doc = $about])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            pub struct $Stage { $($(#[doc = $doc])* pub $name: u64,)* }

            impl $Stage {
                /// Adds what another part of the stage has counted.
                pub fn add(&mut self, other: &Self) {
                    $(self.$name += other.$name;)*
                }
            }
        )*

        /// Counters of all user-space stages.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct UserCounts { $($(#[doc = $about])* pub $stage: $Stage,)* }

        /// One of the counters of the user-space stages.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(non_camel_case_types, reason = "named as the fields")]
        pub(crate) enum UserCounter { $($($name,)*)* }

        impl UserCounter {
            /// All counters, stage by stage.
            pub(crate) const ALL: &'static [Self] = &[$($(Self::$name,)*)*];

            /// The counter's name as it is printed and exported.
            pub(crate) const fn name(self) -> &'static str {
                match self { $($(Self::$name => stringify!($name),)*)* }
            }

            /// What it counts, for the documentation.
            #[cfg(test)]
            pub(crate) const fn doc(self) -> &'static str {
                match self { $($(Self::$name => concat!($($doc),*),)*)* }
            }

            /// The counters of each stage, with the stage's description.
            #[cfg(test)]
            pub(crate) const STAGES: &'static [(&'static str, &'static [Self])] =
                &[$((concat!($($about),*), &[$(Self::$name,)*]),)*];
        }

        impl UserCounts {
            /// Sets the counter with this name; returns `false` if there is no such counter.
            pub(crate) fn set(&mut self, name: &str, count: u64) -> bool {
                match name { $($(stringify!($name) => self.$stage.$name = count,)*)* _ => return false }
                true
            }

            fn get(&self, counter: UserCounter) -> u64 {
                match counter { $($(UserCounter::$name => self.$stage.$name,)*)* }
            }
        }
    };
}

impl StackCounts {
    /// Counts a decoded record of the stack ring that is not a stack.
    pub fn decoded(&mut self, kind: Kind) {
        let count = match kind {
            Kind::OffCpu => &mut self.decoded_off_cpu,
            Kind::GvlWait => &mut self.decoded_gvl_waits,
            Kind::GvlThread => &mut self.decoded_gvl_threads,
            Kind::GvlSpan => &mut self.decoded_gvl_spans,
            Kind::Refill => &mut self.decoded_refills,
            _ => &mut self.undecodable_stacks,
        };
        *count += 1;
    }
}

impl UserCounts {
    /// Names and values, in a fixed order.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        UserCounter::ALL.iter().map(|&counter| (counter.name(), self.get(counter))).collect()
    }

    pub(super) fn sum(&self, counters: &[UserCounter]) -> u64 {
        counters.iter().map(|&counter| self.get(counter)).sum()
    }
}

user_counters! {
    /// The data path: GC records, processes, and what is handed to the exporters.
    pipeline: PipelineCounts {
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
        /// Stacks handed to the exporters.
        stacks,
        /// Stacks of processes that are refused or had ended, or whose image is unknown.
        refused_stacks,
        /// Threads of `sleeper_stacks` that have been watched since.
        sleepers,
        /// Threads that were off their CPU when tracing ended.
        off_cpu_still,
        /// Tracepoint hits that the kernel skipped: threads came, went or slept unseen. 0 before Linux 6.7, which does not count them.
        tracepoints_skipped,
        /// Records of the GC and lifecycle rings that could not be decoded.
        undecodable,
        /// Stacks of GC starts that were reported with their cycle.
        triggers,
        /// Records of processes that are refused or had ended, or whose image is unknown.
        refused_records,
        /// Snapshots that started a cycle.
        cycles_started,
        /// Snapshots that started a cycle outside any pause whose start was seen; such cycles are not reported.
        starts_outside,
        /// Cycles handed to the exporters.
        cycles,
        /// Cycles still running when tracing of their process ended; included in `cycles`.
        cycles_unfinished,
        /// Cycles whose end was lost; included in `cycles`.
        cycles_cut_short,
        /// Cycles that programs ran before gctrace started; not included in `cycles`.
        cycles_before_run,
        /// Cycles of programs that started during the run, before their Ruby had probes; not included in `cycles`.
        cycles_missed,
        /// Snapshots that ended a cycle.
        cycle_ends,
        /// `GC_END_SWEEP` of cycles that had begun before tracing did.
        ends_without_start,
        /// Snapshots at a GC enter event that may be the VM's shutdown.
        shutdown_states,
        /// Pauses that belong to a reported cycle.
        pauses_in_cycles,
        /// Pauses outside any cycle whose start was seen.
        pauses_outside,
        /// GC records that the kernel lost, from gaps in the sequence numbers of each process.
        lost_records,
        /// Processes traced.
        processes,
        /// Processes and images refused.
        refused,
        /// GC events whose memory was read in `/proc` when they were processed, because the kernel side could not read it.
        memory_late,
        /// GC events without memory figures: the kernel side could not read them, and by then the process was gone.
        memory_unread,
        /// Output that could not be written.
        export_failures,
    }
    /// Records of the stack ring.
    stacks: StackCounts {
        /// Stack records decoded.
        decoded_stacks,
        /// Records of native frames decoded.
        decoded_natives,
        /// Native records without their stack record.
        natives_orphaned,
        /// Native records mixed with the Ruby frames in true order.
        natives_mixed,
        /// Native records without Ruby frames.
        natives_alone,
        /// Native records of which only the leaf is shown, because the walk reached code without an unwind table (JIT code; a
        /// new process whose tables have not been loaded yet).
        natives_no_table,
        /// The same, because the file's unwind table has no row for the code.
        natives_no_row,
        /// The same, because of an unwind rule that is not evaluated in the kernel.
        natives_unsupported,
        /// The same, because stack memory could not be read.
        natives_unreadable,
        /// The same, because the registers of user mode could not be found.
        natives_no_registers,
        /// The same, because the native or the Ruby stack was too deep.
        natives_truncated,
        /// The same, because the interpreter's invocations on the two stacks did not match.
        natives_unequal,
        /// Stacks of threads that were asleep when their process was found, read from its memory.
        sleeper_stacks,
        /// Off-CPU records decoded.
        decoded_off_cpu,
        /// Off-CPU records whose stack was available.
        off_cpu_stacks,
        /// Off-CPU records whose stack had not been captured.
        off_cpu_without_stack,
        /// Stacks of threads that were off their CPU too briefly to be reported.
        off_cpu_unused,
        /// Reported off-CPU time, nanoseconds.
        off_cpu_ns,
        /// The part of `off_cpu_ns` without a stack.
        off_cpu_ns_without_stack,
        /// Samples made of off-CPU records.
        off_cpu_samples,
        /// Records of long waits for the GVL decoded.
        decoded_gvl_waits,
        /// Records of ended threads decoded.
        decoded_gvl_threads,
        /// Records of long holds of the GVL and long times without it decoded.
        decoded_gvl_spans,
        /// Samples of threads that held the GVL while another waited, in a run without a profile.
        gvl_blockers,
        /// Records of refills decoded.
        decoded_refills,
        /// Stacks of GC starts whose cycle is not reported.
        triggers_unclaimed,
        /// Ruby frames to be named.
        frames,
        /// Ruby frames named.
        frames_named,
        /// Ruby frames without a name, because the VM had freed or moved their method.
        frames_stale,
        /// Ruby frames without a name, because the process was gone.
        frames_unreadable,
        /// Ruby frames without a name: C functions of an image without a known symbol table.
        frames_without_symbols,
        /// Records of the stack ring that could not be decoded.
        undecodable_stacks,
    }
    /// Native frames, and the tables used to find them.
    native: NativeCounts {
        /// Native user-mode frames to be named.
        native_frames,
        /// Native frames named by a symbol.
        native_frames_named,
        /// Native frames named by file and offset, because the file has no symbol there.
        native_frames_by_offset,
        /// Native frames in no known mapping of a file (JIT code; a process that was gone too soon).
        native_frames_unmapped,
        /// Images whose unwind table was loaded into the kernel.
        unwind_images,
        /// Images without a usable unwind table (no `.eh_frame`, damaged, too large).
        unwind_images_without,
        /// Unwind tables, or sets of a process's mappings, for which there was no room.
        unwind_tables_full,
        /// Mappings dropped, because a process had more than the kernel side stores.
        unwind_mappings_dropped,
    }
    /// The GVL.
    gvl: GvlCounts {
        /// Threads that had not ended, read from the kernel's map.
        gvl_threads_read,
        /// Long waits for the GVL handed to the exporters.
        gvl_waits,
        /// Long waits for the GVL without a stack.
        gvl_waits_without_stack,
        /// Long holds of the GVL and long times without it handed to the exporters.
        gvl_spans,
        /// Threads handed to the exporters.
        gvl_threads,
        /// Waits for the GVL of all threads.
        gvl_thread_waits,
        /// Waits, holds and threads of processes that are refused or had ended, or whose image is unknown.
        gvl_refused,
        /// Changes of how the GVL is watched, made because of its cost.
        gvl_steps,
        /// Time for which the GVL was watched, nanoseconds.
        gvl_watched_ns,
        /// Time for which the GVL was not watched because of its cost, nanoseconds.
        gvl_unwatched_ns,
        /// Stacks of long waits for the GVL that were reported with their wait.
        gvl_stacks,
        /// Stacks of long waits whose wait was lost.
        gvl_stacks_unclaimed,
        /// Stacks of threads that released the GVL, reported with a long wait.
        gvl_holder_stacks,
        /// Stacks of threads that released the GVL, for which no wait was reported.
        gvl_holder_stacks_unclaimed,
    }
    /// Requests.
    requests: RequestCounts {
        /// Request records decoded.
        decoded_requests,
        /// Requests handed to the exporters.
        requests_reported,
        /// The part of `requests_reported` whose endpoint is `(other)`, because their process already had too many endpoints.
        requests_other_endpoint,
        /// Requests of processes that are not traced, and records of an end that had already been seen.
        requests_refused,
        /// Requests dropped, because too many were open.
        requests_no_room,
        /// Jobs that were returned to their queue instead of being run, because their process was terminating.
        jobs_returned,
        /// Jobs whose member `traceparent` is invalid or has several values: they have no trace id.
        job_traceparent_invalid,
        /// Jobs of which a part that may contain the member `traceparent` was not copied: they have no trace id.
        job_traceparent_unread,
        /// Requests that events refer to but whose end was not seen.
        requests_unknown,
        /// Runs of programs handed to the exporters.
        runs_reported,
        /// Programs that ended without having served anything and whose start was not seen: their runs are not reported.
        runs_without_begin,
        /// Requests that were being served when tracing ended.
        requests_open,
        /// Records of requests, and of the VM's state at their start and end, that could not be decoded.
        undecodable_requests,
        /// Records of the VM's state at the start or end of a request or job decoded.
        decoded_unit_states,
        /// The part of `decoded_unit_states` that is exact: two consecutive copies were equal.
        unit_states_exact,
        /// The part of `decoded_unit_states` that was changed while it was being copied. These states are in no output.
        unit_states_moving,
        /// The part of `decoded_unit_states` taken in the middle of a GC pause, of processes that are not traced, or for which there was no room.
        unit_states_refused,
        /// Requests and jobs handed to the exporters without the states at start and end, although these were requested.
        requests_without_states,
    }
    /// Allocation.
    alloc: AllocCounts {
        /// Refills added up.
        refills,
        /// Refills of processes that are refused, or of a program that has been replaced.
        refused_refills,
        /// Stacks captured at refills, reported with the slots that they represent.
        alloc_stacks,
        /// Stacks captured at refills that are not reported, because the refill was refused or lost.
        alloc_stacks_unclaimed,
    }
    /// Profiles.
    profiles: ProfileCounts {
        /// Samples that are not in profiles, because they came before tracing was complete.
        profile_samples_early,
        /// Cycles and intervals that are not in profiles for the same reason.
        profile_events_early,
        /// Samples for profiles. Files, and servers to which profiles are pushed, have profiles of their own; the counters are their sums.
        profile_samples,
        /// Samples that are in profiles.
        profile_samples_recorded,
        /// Samples that `--thread` dropped.
        profile_samples_other_threads,
        /// Samples that `--focus` dropped.
        profile_samples_out_of_focus,
        /// Samples that `--endpoint` and `--slower-than` dropped.
        profile_samples_other_endpoints,
        /// Time that the samples for profiles represent, nanoseconds.
        profile_ns,
        /// The part of `profile_ns` that is in profiles, nanoseconds.
        profile_ns_recorded,
        /// Time that `--thread` dropped, nanoseconds.
        profile_ns_other_threads,
        /// Time that `--focus` dropped, nanoseconds.
        profile_ns_out_of_focus,
        /// Time that `--endpoint` and `--slower-than` dropped, nanoseconds.
        profile_ns_other_endpoints,
        /// Cycles, waits for the GVL and other events of threads, for profiles.
        profile_events,
        /// Events that are in profiles.
        profile_events_recorded,
        /// Events that `--thread` dropped.
        profile_events_other_threads,
        /// Events that `--focus` dropped, because their stack has no frame in focus or they have no stack.
        profile_events_out_of_focus,
        /// Events that `--endpoint` and `--slower-than` dropped, because their endpoint is another, their request was not slow, or neither is known.
        profile_events_other_endpoints,
        /// Samples, cycles and allocation stacks of requests whose end was not seen in time: their endpoint is `(unknown)`.
        profile_endpoints_unknown,
        /// Samples, cycles and allocation stacks whose trace is known but not in profiles, because there were too many distinct traces or sums.
        profile_traces_left_out,
        /// Frames that `--hide` and `--app-only` left out of stacks in profiles.
        profile_frames_hidden,
        /// Stacks with no frame left.
        profile_stacks_hidden,
    }
    /// The recording of the run.
    recording: RecordingCounts {
        /// Entries handed to the recording.
        recorded,
        /// Entries in complete chunks of the file or, for a stream, in those that its reader or the pipe has accepted.
        recorded_written,
        /// Entries in the chunk being filled and, for a stream, those on their way to the reader.
        recorded_waiting,
        /// Entries that `--keep` holds in memory.
        recorded_kept,
        /// Entries that `--keep` dropped because they were older than its limit.
        recorded_expired,
        /// Entries that `--keep` dropped earlier than that, because of `--keep-size`.
        recorded_displaced,
        /// Entries dropped, because the file could not be written or the reader of a stream did not take them.
        recorded_dropped,
        /// Requests by a trigger of `--dump-on`, or SIGUSR2, for a file of what `--keep` holds.
        dump_requests,
        /// Files of what `--keep` holds that were written.
        dumps_written,
        /// Files of what `--keep` holds that are waiting or being written.
        dumps_waiting,
        /// Files of what `--keep` holds that could not be written.
        dumps_failed,
        /// Requests that wrote no file: within `--dump-cooldown`, beyond `--max-dumps`, or while another file with the same data was waiting to be
        /// written.
        dumps_suppressed,
    }
    /// Payloads for servers to which gctrace pushes.
    uploads: UploadCounts {
        /// Uploads created.
        uploads,
        /// Uploads accepted.
        uploads_sent,
        /// Accepted uploads that the server rejected in part.
        uploads_partial,
        /// Uploads that the server refused permanently.
        uploads_refused,
        /// Uploads dropped, because too many were waiting or the server was unreachable.
        uploads_dropped,
        /// Uploads that turned out empty, for example because all samples of their interval were filtered; they are not sent.
        uploads_empty,
        /// Uploads still waiting.
        uploads_waiting,
    }
    /// TuneMyGC sample sets.
    sets: SetCounts {
        /// Sample sets handed over to be sent.
        sets,
        /// Sample sets accepted by the collector.
        sets_sent,
        /// Sample sets that the collector refused permanently.
        sets_refused,
        /// Sample sets dropped, because too many were waiting or the disk was full.
        sets_dropped,
        /// Sample sets still waiting.
        sets_waiting,
        /// Processes whose sets are not sent, because their service has no token.
        sets_without_token,
        /// Processes whose sets are not sent or written, because their environment, and so their settings, are unknown.
        sets_environment_unknown,
        /// Sample sets deleted from their directory to make room for later ones.
        sets_deleted,
    }
    /// Environment variables of traced processes.
    environment: EnvironmentCounts {
        /// Variables refused, because they begin with `RUBY_GC_` and have names that Ruby never reads.
        variables_refused,
    }
}
