//! The CPU budget for watching the GVL: probes that cost more than their share are reduced in steps, and the times when they
//! watched are known. Pure: time and costs come in, actions come out.
//!
//! The steps: single waits are reported during parts of the time, as far as the budget goes; the GVL is watched in slices of time, and
//! the probes are detached between them (a closed gate saves the program's cost, but not that of the trap, which is half); it is not
//! watched any more. [`Governor::gaps`] has the times for which single waits were not reported.

use std::{collections::HashMap, time::Duration};

use gctrace_common::gvl::{GvlTask, GvlThread, STACK_NS, TRAP_NS};

use crate::model::gvl::GvlGap;

/// How long costs are observed before a decision.
const WINDOW: Duration = Duration::from_millis(250);
/// Windows in a row above the budget before a step back.
const OVER: u32 = 2;
/// Windows in a row with sampled waits within the budget before a step forward; doubled each time that the step is undone.
const UNDER: u32 = 20;
/// Shortest slice of time in which the GVL is watched.
const SLICE: Duration = Duration::from_millis(200);
/// A slice lasts until it has cost half of what may be spent in this time. Attaching and detaching stop each process for a moment
/// per probe, so they must be rare.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest wait for the next slice; if it would have to be longer, watching ends.
const LONGEST_WAIT: Duration = Duration::from_mins(5);
/// Single waits are reported again once the budget of this much time has been saved.
const SAVED: Duration = Duration::from_secs(1);
/// Most remembered times without reports of single waits; after that many, single waits are no longer reported.
const MOST_GAPS: usize = 4096;
/// How often the gate can be closed: the kernel keeps the times of a fixed number of epochs.
const MOST_EPOCHS: usize = gctrace_common::gvl::MAX_GVL_EPOCHS as usize - 1;

/// What the probes have cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Probe hits.
    pub hits: u64,
    /// Time in the programs, nanoseconds.
    pub program_ns: u64,
    /// Stacks taken.
    pub stacks: u64,
    /// Cost to the process that was affected most, nanoseconds; see [`CostliestProcess`].
    pub dearest_ns: u64,
}

impl Cost {
    /// CPU time, nanoseconds.
    pub fn ns(&self) -> u64 {
        self.hits * TRAP_NS + self.program_ns + self.stacks * STACK_NS
    }
}

/// Adds up, for each span of time, what watching the GVL cost the process that was affected most. Only one thread of a process holds
/// its GVL at a time, so a process of many threads runs at the speed of one CPU, and its share is measured against one CPU.
#[derive(Debug, Default)]
pub struct CostliestProcess {
    /// By process, nanoseconds so far.
    last: HashMap<u32, u64>,
    sum_ns: u64,
}

impl CostliestProcess {
    /// Takes the cost of each process so far, and returns the sum.
    pub fn add(&mut self, processes: impl IntoIterator<Item = (u32, u64)>) -> u64 {
        let last = std::mem::take(&mut self.last);
        let mut most = 0;
        for (pid, ns) in processes {
            // A smaller value than before belongs to another process, or to another program of the process.
            let before = last.get(&pid).copied().filter(|before| *before <= ns).unwrap_or(0);
            most = most.max(ns - before);
            self.last.insert(pid, ns);
        }
        self.sum_ns += most;
        self.sum_ns
    }
}

/// How the GVL is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// All of it.
    Events,
    /// Single waits are reported in samples of the time.
    Sums,
    /// The GVL is watched for part of the time.
    Slices(Slice),
    /// Not at all.
    Off,
}

/// The position in a slice of time, or between two slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// The probes are attached and count.
    Open,
    /// They are being detached.
    Detaching,
    /// They are detached.
    Waiting,
    /// They are being attached.
    Attaching,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Probes report single waits again.
    ReportWaits,
    /// Probes stop reporting single waits.
    OnlySums,
    /// Probes count from now on, and report single waits.
    Open,
    /// Probes do nothing from now on.
    Close,
    /// Attach them; [`Governor::attached`] is to be called when that has been done.
    Attach,
    /// Detach them; [`Governor::detached`] likewise.
    Detach,
}

/// Decides how the GVL is watched.
#[derive(Debug)]
pub struct Governor {
    /// Nanoseconds per nanosecond of a CPU.
    budget: f64,
    cpus: f64,
    stage: Stage,
    began_ns: u64,
    window: (u64, Cost),
    over: u32,
    /// Windows before the next step forward.
    patience: u32,
    /// When the account of the slices was opened, and the cost then.
    account: (u64, Cost),
    /// When the probes were opened last, and the cost then.
    opened: (u64, Cost),
    times: OpenTimes,
    /// Since when single waits are reported in [`Stage::Sums`].
    sampling_ns: Option<u64>,
    gaps: Vec<GvlGap>,
}

impl Governor {
    /// For a budget in millionths: of the time of this many CPUs, and of one CPU for each process.
    pub fn new(budget_ppm: u64, cpus: u32, now_ns: u64) -> Self {
        Self {
            budget: budget_ppm as f64 / 1e6,
            cpus: f64::from(cpus),
            stage: Stage::Events,
            began_ns: now_ns,
            window: (now_ns, Cost::default()),
            over: 0,
            patience: UNDER,
            account: (now_ns, Cost::default()),
            opened: (now_ns, Cost::default()),
            times: OpenTimes::default(),
            sampling_ns: None,
            gaps: Vec::new(),
        }
    }

    /// How the GVL is watched.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// When the GVL was watched.
    pub fn times(&self) -> &OpenTimes {
        &self.times
    }

    /// Times up to `now_ns` for which single waits were not reported.
    pub fn gaps(&self, now_ns: u64) -> Vec<GvlGap> {
        let until = |gap: &GvlGap| GvlGap { to_ns: gap.to_ns.min(now_ns), ..*gap };
        self.gaps.iter().map(until).collect()
    }

    /// Single waits are not reported from now on; `summed`: waits are still added up.
    fn gap(&mut self, now_ns: u64, summed: bool) {
        self.no_gap(now_ns);
        self.gaps.push(GvlGap { from_ns: now_ns, to_ns: u64::MAX, summed });
    }

    /// Single waits are reported from now on.
    fn no_gap(&mut self, now_ns: u64) {
        if let Some(last) = self.gaps.last_mut() {
            last.to_ns = last.to_ns.min(now_ns);
        }
    }

    /// How long the GVL was watched up to `now_ns`, and how long not, nanoseconds.
    pub fn watched(&self, now_ns: u64) -> (u64, u64) {
        let closed = self.times.closed_within(self.began_ns, now_ns);
        (now_ns.saturating_sub(self.began_ns) - closed, closed)
    }

    /// Average cost per CPU since then, nanoseconds, or the cost to the process that was affected most if that is more.
    fn spent_since(&self, since: Cost, cost: Cost) -> f64 {
        let all = cost.ns().saturating_sub(since.ns()) as f64 / self.cpus;
        all.max(cost.dearest_ns.saturating_sub(since.dearest_ns) as f64)
    }

    /// Share of the budget that was used since then; above 1 it was exceeded.
    fn use_since(&self, since: (u64, Cost), now_ns: u64, cost: Cost) -> f64 {
        let spent = self.spent_since(since.1, cost);
        let earned = now_ns.saturating_sub(since.0) as f64 * self.budget;
        if spent == 0.0 { 0.0 } else { spent / earned }
    }

    /// Time has passed. Returns actions, to be done in this order.
    pub fn tick(&mut self, now_ns: u64, cost: Cost) -> &'static [Act] {
        match self.stage {
            Stage::Events | Stage::Sums => self.watch(now_ns, cost),
            Stage::Slices(Slice::Open) if now_ns.saturating_sub(self.opened.0) >= nanos(SLICE) => {
                let elapsed = now_ns.saturating_sub(self.opened.0) as f64 / nanos(PERIOD) as f64;
                if self.use_since(self.opened, now_ns, cost) * elapsed < 0.5 {
                    if elapsed >= 1.0 {
                        self.stage = Stage::Events;
                        (self.window, self.over) = ((now_ns, cost), 0);
                    }
                    return &[];
                }
                self.stage = Stage::Slices(Slice::Detaching);
                self.times.close(now_ns);
                self.gap(now_ns, false);
                &[Act::Close, Act::Detach]
            }
            Stage::Slices(Slice::Waiting) => {
                let spent = self.spent_since(self.account.1, cost);
                let left_ns = spent / self.budget - now_ns.saturating_sub(self.account.0) as f64;
                if left_ns > nanos(LONGEST_WAIT) as f64 || self.times.closed.len() >= MOST_EPOCHS {
                    self.stage = Stage::Off;
                } else if left_ns <= 0.0 {
                    self.stage = Stage::Slices(Slice::Attaching);
                    return &[Act::Attach];
                }
                &[]
            }
            Stage::Slices(_) | Stage::Off => &[],
        }
    }

    fn watch(&mut self, now_ns: u64, cost: Cost) -> &'static [Act] {
        if now_ns.saturating_sub(self.window.0) < nanos(WINDOW) {
            return &[];
        }
        let used = self.use_since(self.window, now_ns, cost);
        if self.over == 0 && self.stage == Stage::Events {
            // The cost until the probes are detached counts.
            self.account = self.window;
        }
        self.window = (now_ns, cost);
        if let Some(since_ns) = self.sampling_ns {
            return self.sample(now_ns, cost, since_ns);
        }
        self.over = if used > 1.0 { self.over + 1 } else { 0 };
        if self.over >= OVER {
            if self.stage == Stage::Events {
                self.stage = Stage::Sums;
                // The account is kept open.
                self.over = 1;
                self.gap(now_ns, true);
                return &[Act::OnlySums];
            }
            self.over = 0;
            self.stage = Stage::Slices(Slice::Detaching);
            self.times.close(now_ns);
            self.gap(now_ns, false);
            return &[Act::Close, Act::Detach];
        }
        let saved = nanos(SAVED) as f64 * self.budget;
        if self.stage == Stage::Sums && self.saved_ns(now_ns, cost) >= saved && self.gaps.len() < MOST_GAPS {
            self.sampling_ns = Some(now_ns);
            self.no_gap(now_ns);
            return &[Act::ReportWaits];
        }
        &[]
    }

    /// The unspent budget since the account was opened, nanoseconds of each CPU.
    fn saved_ns(&mut self, now_ns: u64, cost: Cost) -> f64 {
        let age = now_ns.saturating_sub(self.account.0);
        let saved = age as f64 * self.budget - self.spent_since(self.account.1, cost);
        if saved > nanos(PERIOD) as f64 * self.budget {
            // A long quiet time must not allow a long excess.
            self.account = (now_ns.saturating_sub(nanos(PERIOD)), cost);
        }
        saved
    }

    /// Single waits are reported as long as the budget lasts.
    fn sample(&mut self, now_ns: u64, cost: Cost, since_ns: u64) -> &'static [Act] {
        let lasted = now_ns.saturating_sub(since_ns);
        if self.saved_ns(now_ns, cost) < 0.0 && lasted >= nanos(SLICE) {
            self.sampling_ns = None;
            self.gap(now_ns, true);
            return &[Act::OnlySums];
        }
        if lasted >= u64::from(self.patience) * nanos(WINDOW) {
            self.patience = self.patience.saturating_mul(2);
            (self.stage, self.sampling_ns) = (Stage::Events, None);
        }
        &[]
    }

    /// The probes are detached, or could not be attached.
    pub fn detached(&mut self) {
        if matches!(self.stage, Stage::Slices(Slice::Detaching | Slice::Attaching)) {
            self.stage = Stage::Slices(Slice::Waiting);
        }
    }

    /// The probes are attached. Returns what is to be done.
    pub fn attached(&mut self, now_ns: u64, cost: Cost) -> &'static [Act] {
        if self.stage != Stage::Slices(Slice::Attaching) {
            return &[];
        }
        self.stage = Stage::Slices(Slice::Open);
        self.opened = (now_ns, cost);
        self.times.open(now_ns);
        self.no_gap(now_ns);
        &[Act::Open]
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Times for which the probes did nothing.
#[derive(Clone, Debug, Default)]
pub struct OpenTimes {
    /// Begin and end, `CLOCK_MONOTONIC` nanoseconds; the last may be still open. An epoch of the gate ends where one of these begins.
    closed: Vec<(u64, u64)>,
    /// For each, the total length of all before it.
    before: Vec<u64>,
}

impl OpenTimes {
    /// Adds what the native thread of a thread has done since it was last seen. If the probes were stopped meanwhile, only up to that
    /// time.
    pub fn tell_rest(&self, thread: &mut GvlThread, task: Option<&GvlTask>, now_ns: u64) {
        if thread.reported_ns == 0 {
            return;
        }
        let task = task.filter(|task| task.owner == thread.id);
        // It has run since; its clocks at the end of the epoch are no longer known.
        if task.is_some_and(|task| task.epoch != thread.epoch) {
            return;
        }
        // It may have been seen after that time.
        let now_ns = self.end_of(thread.epoch).unwrap_or(now_ns).max(thread.reported_ns);
        thread.report(task.map(|task| task.clocks_at(now_ns)), now_ns);
    }

    pub(super) fn close(&mut self, now_ns: u64) {
        let before = self.closed_until(now_ns);
        self.before.push(before);
        self.closed.push((now_ns, u64::MAX));
    }

    pub(super) fn open(&mut self, now_ns: u64) {
        if let Some(last) = self.closed.last_mut() {
            last.1 = now_ns;
        }
    }

    /// How often they were opened again.
    pub fn epoch(&self) -> u32 {
        let open = self.closed.last().is_some_and(|last| last.1 == u64::MAX);
        (self.closed.len() - usize::from(open)) as u32
    }

    /// When an epoch ended; `None`: it has not.
    pub fn end_of(&self, epoch: u32) -> Option<u64> {
        self.closed.get(epoch as usize).map(|closed| closed.0)
    }

    fn closed_until(&self, at_ns: u64) -> u64 {
        let after = self.closed.partition_point(|closed| closed.0 < at_ns);
        let Some(last) = after.checked_sub(1) else { return 0 };
        self.before[last] + self.closed[last].1.min(at_ns) - self.closed[last].0
    }

    /// For how long of that time the probes did nothing, nanoseconds.
    pub fn closed_within(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.closed_until(to_ns).saturating_sub(self.closed_until(from_ns))
    }
}

#[cfg(test)]
mod tests;
