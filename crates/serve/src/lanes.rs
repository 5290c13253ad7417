//! The figures that are drawn over time, by column. Pure; memory is bounded.

use std::{collections::HashSet, sync::Arc};

use gctrace_report::model::{GcCycle, GcState, Image, Process, seen::Seen, stack::ThreadState};

use crate::{
    columns::{Columns, class},
    held::Held,
};

/// Columns, and the state needed to fill them.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    pub(crate) columns: Columns,
    held: Held,
    /// The present processes. Sums include all of them, or are unknown.
    present: HashSet<u32>,
    /// The Ruby that reported last, and the positions of the needed values in its `GC.stat`.
    keys: Option<(Arc<Image>, [Option<usize>; 3])>,
}

impl Lanes {
    pub(crate) fn new(columns: Columns) -> Self {
        Self { columns, held: Held::default(), present: HashSet::new(), keys: None }
    }

    /// The positions of the needed values in the `GC.stat` of a Ruby.
    fn keys(&mut self, image: &Arc<Image>) -> [Option<usize>; 3] {
        if let Some((of, keys)) = &self.keys
            && Arc::ptr_eq(of, image)
        {
            return *keys;
        }
        let at = |name| image.stat_keys.iter().position(|key| *key == name);
        let keys = ["heap_live_slots", "heap_free_slots", "oldmalloc_increase_bytes"].map(at);
        self.keys = Some((Arc::clone(image), keys));
        keys
    }

    fn state(&mut self, process: &Process, state: &GcState) {
        let [live, free, malloc] =
            self.keys(&process.image).map(|at| at.and_then(|at| state.stat.get(at)).copied());
        let mut reported = [None; Held::KINDS];
        reported[Held::RSS] = state.memory.map(|memory| memory.rss);
        (reported[Held::LIVE], reported[Held::FREE], reported[Held::MALLOC]) = (live, free, malloc);
        self.present.insert(process.pid);
        let sums = self.held.of_all(process.pid, reported, self.present.len());
        if let Some(cell) = self.columns.at(state.ts_ns) {
            for (at, sum) in sums.into_iter().enumerate() {
                // Only amounts that were reported now belong to this time.
                if reported[at].is_some() {
                    cell.held[at] = cell.held[at].max(sum);
                }
            }
        }
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) {
        self.state(process, &cycle.start);
        if let Some(end) = &cycle.end {
            self.state(process, end);
        }
        if let Some(cell) = self.columns.at(cycle.start.ts_ns) {
            cell.cycles += 1;
            cell.majors += u64::from(cycle.is_major());
        }
        for pause in &cycle.pauses {
            self.columns.cover(pause.begin_ns, pause.ns, |cell| &mut cell.pause_ns);
            if let Some(cell) = self.columns.at(pause.begin_ns) {
                cell.longest_ns = cell.longest_ns.max(pause.ns);
                cell.pauses[class(pause.ns)] += 1;
            }
        }
    }

    /// Everything is traced from this time on: durations and rates count only from then on.
    pub(crate) fn began(&mut self, ts_ns: u64) {
        self.columns.traced(ts_ns, |cell| {
            (cell.pause_ns, cell.cpu_ns, cell.allocated, cell.requests, cell.served) = (0, 0, 0, 0, 0);
        });
    }

    /// Adds an event of a process.
    pub(crate) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { state, .. } => {
                // An earlier process with this pid is a different one.
                self.held.gone(process.pid);
                self.present.insert(process.pid);
                if let Some(state) = state {
                    self.state(process, state);
                }
            }
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) if !work.may_be_nested(&process.image) => {
                self.columns.cover(work.begin_ns, work.ns, |cell| &mut cell.pause_ns);
                if work.is_pause()
                    && let Some(cell) = self.columns.at(work.begin_ns)
                {
                    cell.longest_ns = cell.longest_ns.max(work.ns);
                    cell.pauses[class(work.ns)] += 1;
                }
            }
            Seen::Stack(sample) if sample.state == ThreadState::Running => {
                // A sample stands for the CPU time before it.
                let begin_ns = sample.ts_ns.saturating_sub(sample.cpu_ns);
                self.columns.cover(begin_ns, sample.cpu_ns, |cell| &mut cell.cpu_ns);
            }
            Seen::GvlWait(wait) => {
                if let Some(cell) = self.columns.at(wait.begin_ns) {
                    cell.waits[class(wait.ns)] += 1;
                }
            }
            Seen::Request(request) => {
                if self.columns.is_traced(request.begin_ns)
                    && let Some(cell) = self.columns.at(request.begin_ns)
                {
                    cell.requests += 1;
                }
                if let Some(end_ns) = request.end_ns.filter(|end_ns| self.columns.is_traced(*end_ns))
                    && let Some(cell) = self.columns.at(end_ns)
                {
                    cell.served += 1;
                }
            }
            Seen::Alloc(sum) => {
                self.columns.spread(sum.begin_ns, sum.end_ns, sum.bytes(), |cell| &mut cell.allocated);
            }
            Seen::Ended(end) => {
                if let Some(state) = &end.shutdown {
                    self.state(process, state);
                }
                self.held.gone(process.pid);
                self.present.remove(&process.pid);
            }
            _ => {}
        }
    }
}
