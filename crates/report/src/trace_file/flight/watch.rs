//! Decides whether what is seen fires a trigger. Pure.

use std::collections::{BTreeMap, BTreeSet};

use gctrace_common::event::WorkPhase;

use super::{
    Why,
    trigger::{Metric, Trigger},
    window::{Stops, Waits},
};
use crate::{
    export::program,
    model::{GcState, Process, seen::Seen},
};

/// Metrics over the stops of some seconds.
const WINDOWS: [Metric; 2] = [Metric::GcPauseP99, Metric::GcShare];

/// The state of a process for triggers.
#[derive(Debug, Default)]
struct Watched {
    program: String,
    stops: Stops,
    waits: Waits,
    /// Level triggers that are currently exceeded: they have fired, and fire again once the value has been below in the meantime.
    above: BTreeSet<usize>,
}

/// The triggers, and the state that they need.
#[derive(Debug)]
pub(super) struct Watch {
    triggers: Vec<Trigger>,
    processes: BTreeMap<u32, Watched>,
}

impl Watch {
    pub(super) fn new(triggers: Vec<Trigger>) -> Self {
        Self { triggers, processes: BTreeMap::new() }
    }

    /// Whether a file is written when the run ends.
    pub(super) fn at_end(&self) -> bool {
        self.triggers.contains(&Trigger::End)
    }

    fn watches(&self, metrics: &[Metric]) -> bool {
        self.triggers
            .iter()
            .any(|trigger| matches!(trigger, Trigger::Above(metric, _) if metrics.contains(metric)))
    }

    /// Something was seen in a process. Returns the triggers that fired.
    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>, now_ns: u64) -> Vec<Why> {
        if self.triggers.is_empty() {
            return Vec::new();
        }
        match seen {
            Seen::Process { state, .. } => {
                let watched = self.processes.entry(process.pid).or_default();
                *watched = Watched { program: program(process), ..Watched::default() };
                state.map_or_else(Vec::new, |state| self.state(process, state))
            }
            Seen::Cycle(cycle) => {
                self.stopped(process, now_ns, cycle.pauses.iter().map(|pause| (pause.begin_ns, pause.ns)));
                let mut set_off = self.event(process, Metric::GcPause, cycle.max_pause_ns());
                set_off.extend(self.state(process, &cycle.start));
                if let Some(end) = &cycle.end {
                    set_off.extend(self.state(process, end));
                }
                set_off
            }
            // Other phases are parts of stops, or longer than these.
            Seen::Work(work) if work.phase == WorkPhase::Pause => {
                self.stopped(process, now_ns, std::iter::once((work.begin_ns, work.ns)));
                self.event(process, Metric::GcPause, work.ns)
            }
            Seen::GvlWait(wait) => self.event(process, Metric::GvlWait, wait.ns),
            Seen::GvlSoFar(so_far) if self.watches(&[Metric::GvlWaitP99]) => {
                let p99_ns = self.watched(process).waits.add(so_far, now_ns);
                self.level(process.pid, Metric::GvlWaitP99, p99_ns)
            }
            Seen::Request(request) => match request.duration_ns() {
                Some(ns) => self.event(process, Metric::Request, ns),
                None => Vec::new(),
            },
            Seen::Ended(_) => {
                self.processes.remove(&process.pid);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// Called after every second. Returns the triggers that fired.
    pub(super) fn look(&mut self, now_ns: u64) -> Vec<Why> {
        if !self.watches(&WINDOWS) {
            return Vec::new();
        }
        let looked = |(pid, watched): (&u32, &mut Watched)| (*pid, watched.stops.look(now_ns));
        let shown: Vec<_> = self.processes.iter_mut().map(looked).collect();
        let mut set_off = Vec::new();
        for (pid, shown) in shown {
            set_off.extend(self.level(pid, Metric::GcShare, shown.share));
            // Quantiles are known only to the resolution of a bucket: this lower bound exceeds anything less.
            set_off.extend(self.level(pid, Metric::GcPauseP99, shown.p99_ns));
        }
        set_off
    }

    /// Records stops that are known now: start and length of each, nanoseconds.
    fn stopped(&mut self, process: &Process, now_ns: u64, stops: impl Iterator<Item = (u64, u64)>) {
        // Otherwise nothing would remove the recorded stops.
        if self.watches(&WINDOWS) {
            let watched = self.watched(process);
            stops.for_each(|(begin_ns, ns)| watched.stops.add(begin_ns, ns, now_ns));
        }
    }

    fn watched(&mut self, process: &Process) -> &mut Watched {
        let fresh = || Watched { program: program(process), ..Watched::default() };
        self.processes.entry(process.pid).or_insert_with(fresh)
    }

    fn state(&mut self, process: &Process, state: &GcState) -> Vec<Why> {
        let Some(memory) = state.memory else { return Vec::new() };
        self.watched(process);
        self.level(process.pid, Metric::Rss, memory.rss)
    }

    /// A single event with this value. Returns the triggers that it fires.
    fn event(&mut self, process: &Process, metric: Metric, value: u64) -> Vec<Why> {
        let exceeded = self.exceeded(metric, value);
        let why = |(_, trigger): (usize, Trigger)| {
            Why::above(trigger, metric, value, process.pid, &program(process))
        };
        exceeded.into_iter().map(why).collect()
    }

    /// The current value of a level. Returns the triggers that it fires.
    fn level(&mut self, pid: u32, metric: Metric, value: u64) -> Vec<Why> {
        let exceeded = self.exceeded(metric, value);
        let triggers = &self.triggers;
        let Some(watched) = self.processes.get_mut(&pid) else { return Vec::new() };
        let of_metric = |at: &usize| matches!(triggers[*at], Trigger::Above(of, _) if of == metric);
        watched.above.retain(|at| !of_metric(at) || exceeded.iter().any(|(above, _)| above == at));
        let fresh = exceeded.into_iter().filter(|(at, _)| watched.above.insert(*at)).collect::<Vec<_>>();
        fresh.iter().map(|(_, trigger)| Why::above(*trigger, metric, value, pid, &watched.program)).collect()
    }

    /// The triggers that this value exceeds.
    fn exceeded(&self, metric: Metric, value: u64) -> Vec<(usize, Trigger)> {
        let above =
            |trigger: &Trigger| matches!(*trigger, Trigger::Above(of, most) if of == metric && value > most);
        self.triggers.iter().copied().enumerate().filter(|(_, trigger)| above(trigger)).collect()
    }
}
