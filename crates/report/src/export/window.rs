//! A part of a recording: some processes, or some time. An exporter that passes on what belongs to the part.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use gctrace_common::event::WorkPhase;

use super::{ExportError, Exporter, Outputs};
use crate::{
    aggregate::condition::{Condition, Kind, Verdict},
    ledger::{Ledger, UserCounts},
    model::{
        EndReason, Process,
        gvl::{GvlGap, GvlWait},
        seen::{CyclesBefore, ProcessEnd, Seen},
        stack::StackSample,
    },
};

/// The selected part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Only these processes; empty: all.
    pub pids: BTreeSet<u32>,
    /// Only processes of these services; empty: all.
    pub services: BTreeSet<String>,
    /// Only what satisfies this condition.
    pub condition: Option<Condition>,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: Option<u64>,
    /// End (exclusive), `CLOCK_MONOTONIC` nanoseconds.
    pub to_ns: Option<u64>,
}

impl Window {
    /// Whether everything is selected.
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }

    /// Whether some time is left out.
    pub fn cuts_time(&self) -> bool {
        self.from_ns.is_some() || self.to_ns.is_some()
    }

    /// Whether this process is selected.
    fn has_process(&self, process: &Process) -> bool {
        let (pids, services) = (&self.pids, &self.services);
        (pids.is_empty() || pids.contains(&process.pid))
            && (services.is_empty() || services.contains(&process.origin.service))
    }

    fn from(&self) -> u64 {
        self.from_ns.unwrap_or(0)
    }

    fn to(&self) -> u64 {
        self.to_ns.unwrap_or(u64::MAX)
    }

    fn has(&self, ts_ns: u64) -> bool {
        (self.from()..self.to()).contains(&ts_ns)
    }

    /// Whether anything between these times, both included, may be in the window.
    pub(crate) fn meets(&self, first_ns: u64, last_ns: u64) -> bool {
        last_ns >= self.from() && first_ns < self.to()
    }
}

/// A process that has been passed on.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    cycles: u64,
    lost: u64,
}

/// GC pauses of a process at the ends of a window, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct AtEnds {
    /// Time within the window of pauses whose cycles are outside it.
    outside_ns: u64,
    /// Time after the window of pauses whose cycles are in it.
    beyond_ns: u64,
    /// Start of the first cycle seen, in the window or not, `CLOCK_MONOTONIC` nanoseconds.
    first_cycle: Option<u64>,
}

/// Passes on what is in a window. Values known only for a whole lifetime, such as the GVL sums of a thread, are in no part.
pub struct Windowed {
    window: Window,
    outputs: Rc<RefCell<Outputs>>,
    /// Processes that were seen before the window begins.
    before: BTreeMap<u32, Process>,
    shown: BTreeMap<u32, Shown>,
    at_ends: BTreeMap<u32, AtEnds>,
    tally: Rc<RefCell<Tally>>,
}

/// Counters of what was passed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of processes.
    pub processes: u64,
    /// Records of the selected processes and time, with the outcome of the condition.
    pub judged: BTreeMap<Kind, Judged>,
}

/// Number of records of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// All records.
    pub all: u64,
    /// Records passed on.
    pub kept: u64,
    /// Records dropped because they lack what the condition asks for.
    pub unknown: u64,
}

impl Tally {
    /// Counts a record. Returns `false` if it is dropped.
    fn keeps(&mut self, kind: Kind, verdict: Verdict) -> bool {
        let judged = self.judged.entry(kind).or_default();
        let keeps = matches!(verdict, Verdict::True | Verdict::Untouched);
        judged.all += 1;
        judged.kept += u64::from(keeps);
        judged.unknown += u64::from(verdict == Verdict::Unknown);
        keeps
    }
}

impl Windowed {
    /// Passes on to these outputs, and counts in `tally`.
    pub fn new(window: Window, outputs: Rc<RefCell<Outputs>>, tally: Rc<RefCell<Tally>>) -> Self {
        Self {
            window,
            outputs,
            before: BTreeMap::new(),
            shown: BTreeMap::new(),
            at_ends: BTreeMap::new(),
            tally,
        }
    }

    fn hand(&self, process: &Process, seen: Seen<'_>) {
        self.outputs.borrow_mut().hand(|exporter| exporter.see(process, seen));
    }

    /// Reports something of the selected processes that is not passed on.
    fn leave_out(&self, process: &Process, seen: Seen<'_>) {
        self.outputs.borrow_mut().tell(|exporter| exporter.outside(process, seen));
    }

    /// Accounts for pauses at the ends of the window: a cycle is reported as a whole or not at all, but the time of its
    /// pauses in the window is known.
    fn divide(&mut self, process: &Process, seen: Seen<'_>) {
        let Some(begin_ns) = seen.begin_ns() else { return };
        let pauses: Vec<(u64, u64)> = match seen {
            Seen::Cycle(cycle) => cycle.pauses.iter().map(|pause| (pause.begin_ns, pause.ns)).collect(),
            // For a Ruby whose cycles are unknown.
            Seen::Work(work) if work.phase == WorkPhase::Pause => vec![(work.begin_ns, work.ns)],
            _ => return,
        };
        let is_in = self.window.has(begin_ns);
        let at_ends = self.at_ends.entry(process.pid).or_default();
        if matches!(seen, Seen::Cycle(_)) {
            at_ends.first_cycle = at_ends.first_cycle.or(Some(begin_ns));
        }
        for (begin_ns, ns) in pauses {
            let end_ns = begin_ns.saturating_add(ns);
            let after_ns = end_ns.saturating_sub(self.window.to().max(begin_ns));
            let before_ns = self.window.from().min(end_ns).saturating_sub(begin_ns);
            let within_ns = ns.saturating_sub(after_ns).saturating_sub(before_ns);
            let (sum, part_ns) =
                if is_in { (&mut at_ends.beyond_ns, after_ns) } else { (&mut at_ends.outside_ns, within_ns) };
            *sum = sum.saturating_add(part_ns);
        }
    }

    /// The part within the window of an off-CPU time that crosses its ends. `None` if it is entirely inside or outside,
    /// or is something else. This way a thread that sleeps all the time is shown.
    fn part(&self, seen: Seen<'_>) -> Option<StackSample> {
        let Seen::Stack(sample) = seen else { return None };
        let end_ns = sample.off_cpu_end_ns()?;
        let (from_ns, to_ns) = (sample.ts_ns.max(self.window.from()), end_ns.min(self.window.to()));
        let is_cut = (from_ns, to_ns) != (sample.ts_ns, end_ns);
        (is_cut && from_ns < to_ns).then(|| StackSample {
            ts_ns: from_ns,
            wall_ns: to_ns - from_ns,
            ..sample.clone()
        })
    }

    /// Time within the window of pauses of a cycle that was in progress when tracing began. Only their sum is known; they
    /// precede the first cycle seen. (If records were lost, they may belong to a later one.)
    fn of_unseen_cycles(&self, end: &ProcessEnd, first_cycle_ns: Option<u64>) -> u64 {
        let until_ns = first_cycle_ns.filter(|_| end.lost == 0).unwrap_or(end.ts_ns);
        let has_all = self.window.from() <= end.since_ns && self.window.to() >= until_ns;
        if has_all { end.outside_ns } else { 0 }
    }

    /// A wait without the hold of the other thread, which the condition has not checked. The hold is in the sums of that
    /// thread, if these are passed on.
    fn own_wait(&self, seen: Seen<'_>) -> Option<GvlWait> {
        let Seen::GvlWait(wait) = seen else { return None };
        self.window.condition.as_ref().filter(|condition| condition.asks_for_threads())?;
        let mut wait = wait.clone();
        wait.blocker.as_mut().filter(|blocker| blocker.first)?.first = false;
        Some(wait)
    }

    /// Passes on a process, which is shown from now on.
    fn show(&mut self, process: &Process, seen: Seen<'_>) {
        self.tally.borrow_mut().processes += 1;
        self.shown.insert(process.pid, Shown::default());
        self.hand(process, seen);
    }

    /// Advances the time to `ts_ns`: processes that were running when the window began are shown.
    fn reach(&mut self, ts_ns: u64) {
        if ts_ns < self.window.from() {
            return;
        }
        for process in std::mem::take(&mut self.before).into_values() {
            self.show(
                &process,
                Seen::Process { state: None, now_ns: self.window.from(), since_ns: self.window.from() },
            );
        }
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) {
        if end.ts_ns < self.window.from() {
            self.before.remove(&process.pid);
        }
        self.reach(end.ts_ns);
        let at_ends = self.at_ends.remove(&process.pid).unwrap_or_default();
        let Some(shown) = self.shown.remove(&process.pid) else { return };
        let within = end.ts_ns < self.window.to();
        let (ts_ns, since_ns) = (end.ts_ns.min(self.window.to()), end.since_ns.max(self.window.from()));
        let cuts = self.window.cuts_time();
        let part = ProcessEnd {
            reason: if within { end.reason } else { EndReason::Detached },
            ts_ns,
            since_ns,
            outside_ns: at_ends.outside_ns.saturating_add(self.of_unseen_cycles(end, at_ends.first_cycle)),
            beyond_ns: at_ends.beyond_ns,
            shutdown: end.shutdown.clone().filter(|_| within),
            cycles: shown.cycles,
            before: if cuts { CyclesBefore::Unknown } else { end.before },
            lost: if cuts { shown.lost } else { end.lost },
        };
        self.hand(process, Seen::Ended(&part));
    }
}

impl Exporter for Windowed {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if !self.window.has_process(process) {
            return Ok(());
        }
        let part = self.part(seen);
        let seen = part.as_ref().map_or(seen, Seen::Stack);
        let own = self.own_wait(seen);
        let seen = own.as_ref().map_or(seen, Seen::GvlWait);
        if let Some(condition) = &self.window.condition {
            let is_in = seen.begin_ns().is_none_or(|ts_ns| self.window.has(ts_ns));
            let verdict = condition.judge(process, &seen);
            // Anything outside the time range is dropped anyway, except processes, which may extend into it.
            let keeps = match verdict {
                Verdict::True | Verdict::Untouched if !is_in => true,
                _ if !is_in => false,
                verdict => self.tally.borrow_mut().keeps(Kind::of(&seen), verdict),
            };
            if !keeps {
                self.leave_out(process, seen);
                return Ok(());
            }
        } else if !self.window.cuts_time() {
            if matches!(seen, Seen::Process { .. }) {
                self.tally.borrow_mut().processes += 1;
            }
            self.hand(process, seen);
            return Ok(());
        }
        if self.window.cuts_time() {
            self.divide(process, seen);
        }
        match (seen, seen.begin_ns()) {
            (_, None) if self.window.cuts_time() => {}
            (_, None) => self.hand(process, seen),
            (Seen::Ended(end), _) => self.ended(process, end),
            (Seen::Process { .. }, Some(ts_ns)) if ts_ns < self.window.from() => {
                self.before.insert(process.pid, process.clone());
            }
            (Seen::Process { .. }, Some(ts_ns)) => {
                self.reach(ts_ns);
                if self.window.has(ts_ns) {
                    self.show(process, seen);
                }
            }
            // Sums of a second that is not entirely inside.
            (Seen::Alloc(sum), _) if sum.end_ns > self.window.to() => {}
            (_, Some(ts_ns)) if self.window.has(ts_ns) => {
                self.reach(ts_ns);
                if let (Seen::Cycle(cycle), Some(shown)) = (seen, self.shown.get_mut(&process.pid)) {
                    shown.cycles += 1;
                    shown.lost = shown.lost.saturating_add(cycle.lost);
                }
                self.hand(process, seen);
            }
            _ => self.leave_out(process, seen),
        }
        Ok(())
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        if self.window.is_all() {
            self.outputs.borrow_mut().hand(|exporter| exporter.refused(pid, path, reason));
        }
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        let ts_ns = ts_ns.max(self.window.from());
        self.outputs.borrow_mut().tell(|exporter| exporter.began(ts_ns));
    }

    fn closed(&mut self, ts_ns: u64) {
        let ts_ns = ts_ns.min(self.window.to());
        self.outputs.borrow_mut().tell(|exporter| exporter.closed(ts_ns));
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        let gap = GvlGap {
            from_ns: gap.from_ns.max(self.window.from()),
            to_ns: gap.to_ns.min(self.window.to()),
            ..gap
        };
        if gap.from_ns < gap.to_ns {
            self.outputs.borrow_mut().tell(|exporter| exporter.gvl_gap(gap));
        }
    }

    fn account(&mut self, ledger: &Ledger) {
        self.outputs.borrow_mut().tell(|exporter| exporter.account(ledger));
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        self.outputs.borrow().add_counts(counts);
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.outputs.borrow_mut().hand(|exporter| exporter.finish(ledger));
        Ok(())
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.outputs.borrow_mut().hand(|exporter| exporter.settled(ledger));
        Ok(())
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        if self.window.cuts_time() {
            self.reach(now_ns);
            if !self.window.has(now_ns) {
                return Ok(());
            }
        }
        self.outputs.borrow_mut().hand(|exporter| exporter.flush(now_ns));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::{
            service_requests::tests::request,
            services::tests::{END, cycle, process},
        },
        clock::WallClock,
        export::profile::{Format, Keeper, a_sample},
        model::{GcCycle, GcWork, Pause, request::Request, stack::ThreadState},
    };
    use proptest::prelude::*;

    /// Adds up the GC time of a process as summaries do.
    #[derive(Clone, Default)]
    struct GcTime(Rc<RefCell<(u64, u64)>>);

    impl Exporter for GcTime {
        fn see(&mut self, _: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
            let (sum, span) = &mut *self.0.borrow_mut();
            match seen {
                Seen::Cycle(cycle) => *sum += cycle.pause_ns(),
                Seen::Work(work) => *sum += work.ns,
                Seen::Ended(end) => {
                    *sum = *sum + end.outside_ns - end.beyond_ns;
                    *span = end.ts_ns - end.since_ns;
                }
                _ => {}
            }
            Ok(())
        }

        fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
            Ok(())
        }
    }

    /// Pauses of the cycle in progress when tracing began are in each part that contains the time before the first cycle, and in no other.
    #[test]
    fn the_cycle_under_way() {
        let of = |window: Window, lost: u64| {
            let sum = GcTime::default();
            let outputs = Rc::new(RefCell::new(Outputs::new(vec![Box::new(sum.clone())])));
            let mut windowed = Windowed::new(window, outputs, Rc::default());
            let process = process(1, "web");
            windowed.see(&process, Seen::Process { state: None, now_ns: 100, since_ns: 100 }).unwrap();
            let mut first = GcCycle { pauses: Vec::new(), ..cycle(1, 1, 1, 0) };
            first.start.ts_ns = 300;
            windowed.see(&process, Seen::Cycle(&first)).unwrap();
            let end = ProcessEnd { ts_ns: 900, since_ns: 100, outside_ns: 7, lost, ..END };
            windowed.see(&process, Seen::Ended(&end)).unwrap();
            let (ns, _) = *sum.0.borrow();
            ns
        };
        let part = |from: u64, to: u64| Window { from_ns: Some(from), to_ns: Some(to), ..Window::default() };
        assert_eq!((of(Window::default(), 0), of(Window::default(), 1)), (7, 7));
        assert_eq!((of(part(0, 1000), 0), of(part(0, 1000), 1)), (7, 7));
        assert_eq!((of(part(0, 300), 0), of(part(0, 300), 1)), (7, 0));
        assert_eq!((of(part(0, 299), 0), of(part(300, 1000), 0)), (0, 0));
    }

    proptest! {
        /// The GC time of any part is that of the pauses in it, never more than the length of the part, and the times of
        /// adjacent parts add up to that of both.
        #[test]
        fn gc_time_of_parts(
            lengths in proptest::collection::vec((0_u64..40, 0_u64..40, 0_u64..3), 1..20),
            cuts in proptest::collection::vec(0_u64..1000, 2),
        ) {
            let (mut at, mut cycles, mut all) = (10, Vec::new(), Vec::new());
            for (count, (gap, ns, more)) in lengths.into_iter().enumerate() {
                let mut one = GcCycle { pauses: Vec::new(), ..cycle(count as u64, 1, 1, 0) };
                at += gap;
                one.start.ts_ns = at;
                for _ in 0..=more {
                    one.pauses.push(Pause { tid: 1, begin_ns: at, ns, kind: None, mark_ns: ns, sweep_ns: 0, other_ns: 0 });
                    all.push(at..at + ns);
                    at += ns + gap;
                }
                cycles.push(one);
            }
            let last = at + 10;
            let part = |from: u64, to: u64| {
                let sum = GcTime::default();
                let outputs = Rc::new(RefCell::new(Outputs::new(vec![Box::new(sum.clone())])));
                let window = Window { from_ns: Some(from), to_ns: Some(to), ..Window::default() };
                let mut windowed = Windowed::new(window, outputs, Rc::default());
                let process = process(1, "web");
                windowed.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 }).unwrap();
                for cycle in &cycles {
                    if cycle.count.is_multiple_of(2) {
                        windowed.see(&process, Seen::Cycle(cycle)).unwrap();
                        continue;
                    }
                    // The same for a Ruby whose cycles are unknown.
                    for &Pause { tid, begin_ns, ns, .. } in &cycle.pauses {
                        let work = GcWork { phase: WorkPhase::Pause, tid, comm: "ruby".to_owned(), begin_ns, ns };
                        windowed.see(&process, Seen::Work(&work)).unwrap();
                    }
                }
                windowed.see(&process, Seen::Ended(&ProcessEnd { ts_ns: last, since_ns: 1, ..END })).unwrap();
                drop(windowed);
                sum.0.take()
            };
            let (from, to) = (1 + cuts[0].min(cuts[1]) % last, 2 + cuts[0].max(cuts[1]) % last);
            prop_assume!(from < to && to <= last);
            let within: u64 = all.iter().map(|pause| pause.end.min(to).saturating_sub(pause.start.max(from))).sum();
            let (sum, span) = part(from, to);
            prop_assert_eq!((sum, span), (within, to - from));
            prop_assert!(sum <= span);
            let middle = from.midpoint(to);
            prop_assert_eq!(part(from, middle).0 + part(middle, to).0, sum);
        }
    }

    /// Adds up off-CPU times, with the start of the first and the end of the last.
    #[derive(Clone, Default)]
    struct OffCpu(Rc<RefCell<(u64, u64, u64)>>);

    impl Exporter for OffCpu {
        fn see(&mut self, _: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
            if let Seen::Stack(sample) = seen {
                let (sum, first, last) = &mut *self.0.borrow_mut();
                *first = if *sum == 0 { sample.ts_ns } else { sample.ts_ns.min(*first) };
                *last = sample.off_cpu_end_ns().unwrap().max(*last);
                *sum += sample.wall_ns;
            }
            Ok(())
        }

        fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
            Ok(())
        }
    }

    /// A part contains the portion of an off-CPU time that lies in it: a thread that sleeps throughout is there for the
    /// whole part, with a condition, too.
    #[test]
    fn times_off_the_cpu() {
        let (process, sample) = a_sample(5);
        let sample = |ts_ns, wall_ns| StackSample {
            state: ThreadState::Blocked,
            cpu_ns: 0,
            ts_ns,
            wall_ns,
            ..sample.clone()
        };
        let all =
            [sample(10, 900), sample(10, 40), sample(60, 30), sample(95, 5), sample(100, 7), sample(300, 1)];
        let part = |from, to, condition: Option<&str>| {
            let sum = OffCpu::default();
            let outputs = Rc::new(RefCell::new(Outputs::new(vec![Box::new(sum.clone())])));
            let condition = condition.map(|text| text.parse::<Condition>().unwrap());
            let window = Window { from_ns: from, to_ns: to, condition, ..Window::default() };
            let mut windowed = Windowed::new(window, outputs, Rc::default());
            windowed.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 }).unwrap();
            for sample in &all {
                windowed.see(&process, Seen::Stack(sample)).unwrap();
            }
            drop(windowed);
            sum.0.take()
        };
        assert_eq!(part(Some(50), Some(100), None), (50 + 30 + 5, 50, 100));
        assert_eq!(part(Some(50), Some(100), Some("thread ~ /./")), (50 + 30 + 5, 50, 100));
        assert_eq!(part(Some(50), Some(100), Some("thread = no")).0, 0);
        let whole = part(None, None, None).0;
        assert_eq!(whole, part(None, Some(70), None).0 + part(Some(70), None, None).0);
        assert_eq!(part(Some(905), None, None), (5, 905, 910));
    }

    /// If threads are selected, a wait does not carry the hold of another thread: that thread's own sums have it.
    #[test]
    fn holds_of_others() {
        let first = |condition: &str| {
            let window = Window { condition: Some(condition.parse().unwrap()), ..Window::default() };
            let outputs = Rc::new(RefCell::new(Outputs::new(Vec::new())));
            let windowed = Windowed::new(window, outputs, Rc::default());
            let wait = crate::export::slow_requests::tests::wait(2, 5, 10, true);
            let own = windowed.own_wait(Seen::GvlWait(&wait)).unwrap_or(wait);
            own.blocker.unwrap().first
        };
        assert_eq!(
            [first("pid = 1"), first("gvl.wait > 1ms"), first("thread = 2 and pid = 1")],
            [true, true, false]
        );
    }

    /// A sample in the window belongs to its request even if the request is outside: it began before, or the condition drops it.
    #[test]
    fn samples_of_requests_outside() {
        let text = "request.status = 500";
        for (from_ns, condition) in [(Some(450), None), (None, Some(text))] {
            let keeper = Keeper::new(false, (false, false), WallClock::with_offsets(0, 0));
            let outputs = Rc::new(RefCell::new(Outputs::new(keeper.exporters())));
            let condition = condition.map(|text| text.parse::<Condition>().unwrap());
            let window = Window { condition, from_ns, ..Window::default() };
            let mut windowed = Windowed::new(window, outputs.clone(), Rc::default());
            let (process, sample) = a_sample(500);
            windowed.began(0);
            windowed.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
            let sample = StackSample { request: Some(7), cpu_ns: 1000, ..sample };
            windowed.see(&process, Seen::Stack(&sample)).unwrap();
            let request = Request { id: 7, ..request(Some("/orders/:id"), Some(800), Some(200)) };
            windowed.see(&process, Seen::Request(&request)).unwrap();
            windowed.finish(&Ledger::default()).unwrap();
            let mut counts = UserCounts::default();
            windowed.add_counts(&mut counts);
            drop((windowed, outputs));
            assert_eq!(counts.profiles.profile_endpoints_unknown, 0);
            let mut bytes = Vec::new();
            keeper.kept().unwrap().write(Format::Pprof, &mut bytes).unwrap();
            let mut profile = Vec::new();
            std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(bytes.as_slice()), &mut profile)
                .unwrap();
            let name = b"GET /orders/:id";
            assert!(profile.windows(name.len()).any(|at| at == name), "{from_ns:?} {text}");
        }
    }
}
