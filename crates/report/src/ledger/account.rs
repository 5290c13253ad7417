//! The account of a run in words.

use gctrace_common::stats::{Counter, Family};

use super::{Extent, Ledger, without_stack};
use crate::words::{percent, plural};

impl Ledger {
    /// One line for people: what was done, and whether anything is missing.
    pub fn summary(&self) -> String {
        if self.kernel.is_none() && matches!(self.extent, Extent::CutOff | Extent::Part) {
            return "losses unknown: the recording ends before its first account".to_owned();
        }
        let u = &self.user;
        let cycles = plural(u.pipeline.cycles, "cycle");
        let mut parts = vec![match u.pipeline.processes {
            1 => cycles,
            processes => format!("{cycles} in {}", plural(processes, "process")),
        }];
        if u.pipeline.phases > 0 {
            parts.push(format!("{} of GC work", plural(u.pipeline.phases, "interval")));
        }
        let missing = self.missing();
        if missing.is_empty() {
            let by_then = if self.extent == Extent::CutOff { " up to then" } else { "" };
            parts.push(format!("nothing lost{by_then}"));
        }
        parts.extend(missing);
        parts.extend(self.limits());
        parts.join(", ")
    }

    /// Expected data that is missing, by kind.
    fn missing(&self) -> Vec<String> {
        use Counter as C;
        let u = &self.user;
        let (gc, lives) = (self.lost_of(Family::Gc), self.lost_of(Family::Life));
        let stacks = self.lost_of(Family::Stacks);
        // These two are listed separately.
        let gvl = self.lost_of(Family::Gvl) - self.kernel(C::GvlNoThread) - self.kernel(C::GvlEdgesFull);
        // Requests whose states were lost are listed separately, as limits.
        let states = self.kernel(C::UnitStateRingFull) + self.kernel(C::UnitStateReadFailed);
        let requests = self.lost_of(Family::Requests) - states + u.requests.requests_no_room;
        let undecodable =
            u.pipeline.undecodable + u.stacks.undecodable_stacks + u.requests.undecodable_requests;
        let sampled = without_stack(&u.stacks);
        [
            (gc, format!("{} lost (a larger buffer: --gc-ring)", plural(gc, "GC event"))),
            (
                u.pipeline.lost_records.saturating_sub(gc),
                format!(
                    "{} missing for an unknown reason (please report this)",
                    plural(u.pipeline.lost_records.saturating_sub(gc), "GC event")
                ),
            ),
            (
                u.pipeline.cycles_missed,
                format!("{} before tracing began", plural(u.pipeline.cycles_missed, "cycle")),
            ),
            (
                u.pipeline.cycles_cut_short,
                format!("{} without an end", plural(u.pipeline.cycles_cut_short, "cycle")),
            ),
            (lives, format!("{} lost", plural(lives, "process event"))),
            (stacks, format!("{} lost", plural(stacks, "stack"))),
            (u64::from(sampled.is_some()), sampled.unwrap_or_default()),
            (gvl, format!("{} lost", plural(gvl, "GVL event"))),
            (requests, format!("{} lost", plural(requests, "request"))),
            (
                self.kernel(C::GvlNoThread),
                format!("{} of unknown threads", plural(self.kernel(C::GvlNoThread), "GVL event")),
            ),
            (
                self.kernel(C::GvlEdgesFull),
                format!(
                    "{} without the thread that held it",
                    plural(self.kernel(C::GvlEdgesFull), "GVL wait part")
                ),
            ),
            (
                u.pipeline.tracepoints_skipped,
                format!(
                    "{} skipped by the kernel",
                    plural(u.pipeline.tracepoints_skipped, "scheduler event")
                ),
            ),
            (undecodable, format!("{} not decodable", plural(undecodable, "record"))),
            (
                u.recording.recorded_dropped,
                format!("{} not in the recording", plural(u.recording.recorded_dropped, "event")),
            ),
            (
                u.uploads.uploads_dropped + u.uploads.uploads_refused,
                format!(
                    "{} not delivered",
                    plural(u.uploads.uploads_dropped + u.uploads.uploads_refused, "upload")
                ),
            ),
            (
                u.sets.sets_dropped + u.sets.sets_refused,
                format!("{} not delivered", plural(u.sets.sets_dropped + u.sets.sets_refused, "sample set")),
            ),
        ]
        .into_iter()
        .filter_map(|(count, text)| (count > 0).then_some(text))
        .collect()
    }

    /// What the figures do not cover, although nothing went wrong.
    fn limits(&self) -> Vec<String> {
        let u = &self.user;
        let mut limits = Vec::new();
        if u.pipeline.ends_without_start > 0 {
            let began = match u.pipeline.ends_without_start {
                1 => "1 cycle begun before its process was traced".to_owned(),
                more => format!("{more} cycles begun before their processes were traced"),
            };
            limits.push(began);
        }
        let unread = self.kernel(Counter::NamesUnread);
        if unread > 0 {
            let names = if unread == 1 { "its name was" } else { "their names were" };
            limits.push(format!("{} ended before {names} read", plural(unread, "Ruby process")));
        }
        if u.requests.requests_open > 0 {
            limits.push(format!("{} still running at the end", plural(u.requests.requests_open, "request")));
        }
        if u.requests.requests_without_states > 0 {
            let (left_out, all) = (u.requests.requests_without_states, u.requests.requests_reported);
            limits.push(format!("{left_out} of {} not in sample sets", plural(all, "request")));
        }
        if u.sets.sets_without_token > 0 {
            let processes = plural(u.sets.sets_without_token, "process");
            limits.push(format!("sample sets of {processes} not sent (no token)"));
        }
        if u.sets.sets_environment_unknown > 0 {
            let processes = plural(u.sets.sets_environment_unknown, "process");
            limits
                .push(format!("no sample sets of {processes} (environment overwritten by a title, or gone)"));
        }
        if u.gvl.gvl_unwatched_ns > 0 {
            let share = percent(u.gvl.gvl_watched_ns, u.gvl.gvl_watched_ns + u.gvl.gvl_unwatched_ns);
            limits.push(format!("the GVL watched for {share} of the time (CPU budget)"));
        }
        if u.pipeline.refused > 0 {
            limits.push(format!("{} not traced (reported above)", plural(u.pipeline.refused, "candidate")));
        }
        match self.imbalances() {
            _ if self.extent == Extent::CutOff => {
                limits.push("cut off: events after the last account are not counted".to_owned());
            }
            _ if self.extent == Extent::Part => limits.push("a part of a run".to_owned()),
            none if none.is_empty() => {}
            some => {
                limits.push(format!("THE COUNTS DO NOT ADD UP (please report this): {}", some.join("; ")));
            }
        }
        limits
    }

    /// Every counter that is not zero, in two lines.
    pub fn details(&self) -> [String; 2] {
        let listed = |counters: Vec<(&'static str, u64)>| {
            let counted = counters.into_iter().filter(|(_, count)| *count > 0);
            let counted: Vec<String> = counted.map(|(name, count)| format!("{name} {count}")).collect();
            if counted.is_empty() { "nothing".to_owned() } else { counted.join(", ") }
        };
        let kernel = match &self.kernel {
            Some(_) => listed(self.kernel_counters()),
            None => "unknown".to_owned(),
        };
        [
            format!("counted in the kernel: {kernel}"),
            format!("counted by gctrace: {}", listed(self.user_counters())),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{PipelineCounts, UserCounts};

    fn ledger(pipeline: PipelineCounts) -> Ledger {
        let user = UserCounts { pipeline, ..UserCounts::default() };
        Ledger { kernel: Some(vec![0; Counter::ALL.len()]), user, ..Ledger::default() }
    }

    /// A run without loss takes four words; a cycle still running when tracing ends is not a loss.
    #[test]
    fn nothing_lost() {
        let counts = PipelineCounts {
            cycles: 583,
            cycles_started: 583,
            decoded_snapshots: 583,
            cycles_unfinished: 1,
            processes: 1,
            ..PipelineCounts::default()
        };
        let mut ledger = ledger(counts);
        if let Some(kernel) = ledger.kernel.as_mut() {
            for counter in [
                Counter::SnapshotSubmitted,
                Counter::Starts,
                Counter::Admitted,
                Counter::Hits,
                Counter::MarkNoted,
            ] {
                kernel[counter as usize] = 583;
            }
        }
        assert_eq!(ledger.summary(), "583 cycles, nothing lost");
        assert!(ledger.details()[1].contains("cycles_unfinished 1"), "{:?}", ledger.details());
    }

    /// Records that are missing although the kernel lost none are said.
    #[test]
    fn missing_for_no_reason() {
        let counts = PipelineCounts { cycles: 3, processes: 1, lost_records: 7, ..PipelineCounts::default() };
        let mut ledger = ledger(counts);
        let said = ledger.summary();
        assert!(said.contains("7 GC events missing for an unknown reason (please report this)"), "{said}");
        if let Some(kernel) = ledger.kernel.as_mut() {
            kernel[Counter::SnapshotRingFull as usize] = 7;
        }
        assert!(!ledger.summary().contains("unknown reason"), "{}", ledger.summary());
    }

    /// For a recording that ends early, only what its accounts contain is known.
    #[test]
    fn cut_off() {
        for extent in [Extent::CutOff, Extent::Part] {
            let cut = Ledger { extent, ..Ledger::default() };
            assert_eq!(cut.summary(), "losses unknown: the recording ends before its first account");
        }
        let counts = PipelineCounts { cycles: 3, processes: 1, ..PipelineCounts::default() };
        let cut = Ledger { extent: Extent::CutOff, ..ledger(counts) };
        let expected =
            "3 cycles, nothing lost up to then, cut off: events after the last account are not counted";
        assert_eq!(cut.summary(), expected);
    }

    /// Without an account, what the kernel counted is unknown.
    #[test]
    fn counted() {
        let said = |ledger: &Ledger| ledger.details().map(|line| line.split_once(": ").unwrap().1.to_owned());
        assert_eq!(said(&Ledger::default()), ["unknown", "nothing"]);
        let mut ledger = ledger(PipelineCounts { cycles: 3, ..PipelineCounts::default() });
        assert_eq!(said(&ledger), ["nothing", "cycles 3"]);
        if let Some(kernel) = ledger.kernel.as_mut() {
            kernel[Counter::Starts as usize] = 4;
        }
        assert_eq!(said(&ledger)[0], format!("{} 4", Counter::Starts.name()));
    }

    /// What is missing is named by its kind, with the right plural.
    #[test]
    fn by_kind() {
        let counts = PipelineCounts {
            ends_without_start: 1,
            processes: 2,
            tracepoints_skipped: 2,
            ..PipelineCounts::default()
        };
        let mut ledger = ledger(counts);
        if let Some(kernel) = ledger.kernel.as_mut() {
            kernel[Counter::GvlNoThread as usize] = 123_598;
            kernel[Counter::UnitStateRingFull as usize] = 3;
            kernel[Counter::NamesUnread as usize] = 2;
        }
        (ledger.user.requests.requests_without_states, ledger.user.requests.requests_reported) = (2, 9);
        ledger.user.sets.sets_without_token = 2;
        ledger.user.sets.sets_environment_unknown = 1;
        ledger.user.requests.requests_open = 2;
        let said = ledger.summary();
        assert!(said.contains("sample sets of 2 processes not sent (no token)"), "{said}");
        assert!(said.contains("no sample sets of 1 process (environment overwritten"), "{said}");
        assert!(
            said.starts_with("0 cycles in 2 processes, 123598 GVL events of unknown threads, "),
            "{said}"
        );
        assert!(said.contains("2 scheduler events skipped by the kernel"), "{said}");
        assert!(said.contains("1 cycle begun before its process was traced"), "{said}");
        assert!(
            said.contains(
                "1 cycle begun before its process was traced, 2 Ruby processes ended before their names were read, 2 requests still \
                 running at the end, "
            ),
            "{said}"
        );
        assert!(said.contains("2 of 9 requests not in sample sets"), "{said}");
        assert!(!said.contains("lost"), "{said}");
    }
}
