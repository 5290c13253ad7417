//! A part of a recording: some processes, or some time. An exporter that hands on what belongs to it.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use super::{ExportError, Exporter, Outputs};
use crate::{
    aggregate::condition::{Condition, Kind, Verdict},
    ledger::{Ledger, UserCounts},
    model::{
        EndReason, Process,
        gvl::GvlGap,
        seen::{CyclesBefore, ProcessEnd, Seen},
    },
};

/// Which part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// These processes; none: all.
    pub pids: BTreeSet<u32>,
    /// Processes of these services; none: all.
    pub services: BTreeSet<String>,
    /// What is true of this.
    pub condition: Option<Condition>,
    /// From when on, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: Option<u64>,
    /// Until when.
    pub to_ns: Option<u64>,
}

impl Window {
    /// Whether it is everything.
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }

    /// Whether some time is left out.
    pub fn cuts_time(&self) -> bool {
        self.from_ns.is_some() || self.to_ns.is_some()
    }

    /// Whether it has this process.
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

    /// Whether something may be in it of what lies between these times, both included.
    pub(crate) fn meets(&self, first_ns: u64, last_ns: u64) -> bool {
        last_ns >= self.from() && first_ns < self.to()
    }
}

/// A process that has been handed on.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    cycles: u64,
    lost: u64,
}

/// Hands on what is in a window. What is known of a whole life only, such as the GVL sums of a thread, is in no part of it.
pub struct Windowed {
    window: Window,
    outputs: Rc<RefCell<Outputs>>,
    /// Processes that were seen before the window begins.
    before: BTreeMap<u32, Process>,
    shown: BTreeMap<u32, Shown>,
    tally: Rc<RefCell<Tally>>,
}

/// What was handed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Processes.
    pub processes: u64,
    /// Records of the chosen processes and time, and what the condition says of them.
    pub judged: BTreeMap<Kind, Judged>,
}

/// How many records of a kind there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// All of them.
    pub all: u64,
    /// Those that were handed on.
    pub kept: u64,
    /// Those that were not, because they lack what the condition asks for.
    pub unknown: u64,
}

impl Tally {
    /// Counts a record. `false`: it is dropped.
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
    /// Hands on to these outputs, and counts there.
    pub fn new(window: Window, outputs: Rc<RefCell<Outputs>>, tally: Rc<RefCell<Tally>>) -> Self {
        Self { window, outputs, before: BTreeMap::new(), shown: BTreeMap::new(), tally }
    }

    fn hand(&self, process: &Process, seen: Seen<'_>) {
        self.outputs.borrow_mut().hand(|exporter| exporter.see(process, seen));
    }

    /// Something of the chosen processes is not handed on.
    fn leave_out(&self, seen: Seen<'_>) {
        if let Seen::Request(request) = seen {
            self.outputs.borrow_mut().tell(|exporter| exporter.request_outside(request));
        }
    }

    /// A process is there from now on.
    fn show(&mut self, process: &Process, seen: Seen<'_>) {
        self.tally.borrow_mut().processes += 1;
        self.shown.insert(process.pid, Shown::default());
        self.hand(process, seen);
    }

    /// Time has come to this: what ran when the window began is shown.
    fn reach(&mut self, ts_ns: u64) {
        if ts_ns < self.window.from() {
            return;
        }
        for process in std::mem::take(&mut self.before).into_values() {
            self.show(&process, Seen::Process { state: None, now_ns: self.window.from() });
        }
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) {
        if end.ts_ns < self.window.from() {
            self.before.remove(&process.pid);
        }
        self.reach(end.ts_ns);
        let Some(shown) = self.shown.remove(&process.pid) else { return };
        let within = end.ts_ns < self.window.to();
        let (ts_ns, since_ns) = (end.ts_ns.min(self.window.to()), end.since_ns.max(self.window.from()));
        let cuts = self.window.cuts_time();
        let part = ProcessEnd {
            reason: if within { end.reason } else { EndReason::Detached },
            ts_ns,
            since_ns,
            outside_ns: if cuts { 0 } else { end.outside_ns },
            shutdown: end.shutdown.clone().filter(|_| within),
            cycles: shown.cycles,
            before: if cuts { CyclesBefore::Unknown } else { end.before },
            lost: if cuts { shown.lost } else { end.lost },
        };
        self.hand(process, Seen::Ended(&part));
    }
}

/// When something was; `None`: it is of a whole life.
pub(crate) fn time(seen: &Seen<'_>) -> Option<u64> {
    match seen {
        Seen::Process { now_ns, .. } => Some(*now_ns),
        Seen::Cycle(cycle) => {
            let pauses = cycle.pauses.iter().map(|pause| pause.begin_ns);
            Some(pauses.fold(cycle.start.ts_ns, u64::min))
        }
        Seen::Work(work) => Some(work.begin_ns),
        Seen::Request(request) => Some(request.begin_ns),
        Seen::Stack(sample) => Some(sample.ts_ns),
        Seen::GvlWait(wait) => Some(wait.begin_ns),
        Seen::GvlSpan(span) => Some(span.begin_ns),
        Seen::Alloc(sum) => Some(sum.begin_ns),
        Seen::AllocStack(alloc) => Some(alloc.ts_ns),
        Seen::Ended(end) => Some(end.ts_ns),
        Seen::GvlThread(_) | Seen::GvlSoFar(_) | Seen::GvlProcess(_) => None,
    }
}

impl Exporter for Windowed {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if !self.window.has_process(process) {
            return Ok(());
        }
        if let Some(condition) = &self.window.condition {
            let is_in = time(&seen).is_none_or(|ts_ns| self.window.has(ts_ns));
            let verdict = condition.judge(process, &seen);
            // What is outside of the time is dropped anyway, but for processes, which reach into it.
            let keeps = match verdict {
                Verdict::True | Verdict::Untouched if !is_in => true,
                _ if !is_in => false,
                verdict => self.tally.borrow_mut().keeps(Kind::of(&seen), verdict),
            };
            if !keeps {
                self.leave_out(seen);
                return Ok(());
            }
        } else if !self.window.cuts_time() {
            if matches!(seen, Seen::Process { .. }) {
                self.tally.borrow_mut().processes += 1;
            }
            self.hand(process, seen);
            return Ok(());
        }
        match (seen, time(&seen)) {
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
            // Sums of a second that is not all inside.
            (Seen::Alloc(sum), _) if sum.end_ns > self.window.to() => {}
            (_, Some(ts_ns)) if self.window.has(ts_ns) => {
                self.reach(ts_ns);
                if let (Seen::Cycle(cycle), Some(shown)) = (seen, self.shown.get_mut(&process.pid)) {
                    shown.cycles += 1;
                    shown.lost = shown.lost.saturating_add(cycle.lost);
                }
                self.hand(process, seen);
            }
            _ => self.leave_out(seen),
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
        aggregate::service_requests::tests::request,
        clock::WallClock,
        export::profile::{Format, Keeper, a_sample},
        model::{request::Request, stack::StackSample},
    };

    /// A sample in the window is of its request where that is outside: it began before, or the condition drops it.
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
            windowed.see(&process, Seen::Process { state: None, now_ns: 0 }).unwrap();
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
