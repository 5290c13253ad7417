//! The CPU budget for watching the GVL: probes that cost more than their share are reduced in steps, and the times for which they
//! watched are known. Pure: time and costs are inputs, actions are outputs.
//!
//! The steps: first, individual waits are reported only for parts of the time, as far as the budget allows. Then the GVL is watched in slices of
//! time, and the probes are detached between them (a closed gate saves the cost of the program but not of the trap, which is half). Finally,
//! it is no longer watched. [`Governor::gaps`] returns the times for which individual waits were not reported.

use std::{collections::HashMap, time::Duration};

use gctrace_common::gvl::{GvlTask, GvlThread, STACK_NS, TRAP_NS};

use crate::model::gvl::GvlGap;

/// Time for which costs are observed before a decision.
const WINDOW: Duration = Duration::from_millis(250);
/// Number of consecutive windows above the budget before a step back.
const OVER: u32 = 2;
/// Number of consecutive windows with sampled waits within the budget before a step forward; doubled each time that the step is undone.
const UNDER: u32 = 20;
/// Shortest slice of time in which the GVL is watched.
const SLICE: Duration = Duration::from_millis(200);
/// A slice lasts until it has cost half of the budget of this time. Attaching and detaching stop each process for a moment
/// per probe, so they must be rare.
const PERIOD: Duration = Duration::from_secs(10);
/// Maximum wait for the next slice; if it would have to be longer, watching ends.
const LONGEST_WAIT: Duration = Duration::from_mins(5);
/// Individual waits are reported again once the budget of this time has been saved.
const SAVED: Duration = Duration::from_secs(1);
/// Maximum number of remembered gaps in the reports of individual waits; after that many, individual waits are no longer reported.
const MOST_GAPS: usize = 4096;
/// Maximum number of times that the gate can be closed: the kernel keeps the times of a fixed number of epochs.
const MOST_EPOCHS: usize = gctrace_common::gvl::MAX_GVL_EPOCHS as usize - 1;

/// What the probes have cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Number of probe hits.
    pub hits: u64,
    /// Time spent in the BPF programs, nanoseconds.
    pub program_ns: u64,
    /// Number of stacks captured.
    pub stacks: u64,
    /// Cost to the most affected process, nanoseconds; see [`CostliestProcess`].
    pub dearest_ns: u64,
}

impl Cost {
    /// CPU time, nanoseconds.
    pub fn ns(&self) -> u64 {
        self.hits * TRAP_NS + self.program_ns + self.stacks * STACK_NS
    }
}

/// Adds up, for each span of time, the cost of watching the GVL to the most affected process. Only one thread of a process holds
/// its GVL at a time, so a process with many threads runs at the speed of one CPU, and its share is measured against one CPU.
#[derive(Debug, Default)]
pub struct CostliestProcess {
    /// Cost so far by pid, nanoseconds.
    last: HashMap<u32, u64>,
    sum_ns: u64,
}

impl CostliestProcess {
    /// Adds the cost of each process so far, and returns the sum.
    pub fn add(&mut self, processes: impl IntoIterator<Item = (u32, u64)>) -> u64 {
        let last = std::mem::take(&mut self.last);
        let mut most = 0;
        for (pid, ns) in processes {
            // A smaller value than before belongs to another process, or to a new program of the same process.
            let before = last.get(&pid).copied().filter(|before| *before <= ns).unwrap_or(0);
            most = most.max(ns - before);
            self.last.insert(pid, ns);
        }
        self.sum_ns += most;
        self.sum_ns
    }
}

/// How much of the GVL is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Everything.
    Events,
    /// Individual waits are reported only for samples of the time.
    Sums,
    /// The GVL is watched only for part of the time.
    Slices(Slice),
    /// Nothing.
    Off,
}

/// The position in a slice of time, or between two slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// The probes are attached and count.
    Open,
    /// The probes are being detached.
    Detaching,
    /// The probes are detached.
    Waiting,
    /// The probes are being attached.
    Attaching,
}

/// Actions for the caller to perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Let the probes report individual waits again.
    ReportWaits,
    /// Let the probes stop reporting individual waits.
    OnlySums,
    /// Let the probes count from now on, and report individual waits.
    Open,
    /// Let the probes do nothing from now on.
    Close,
    /// Attach the probes; call [`Governor::attached`] when this is done.
    Attach,
    /// Detach the probes; call [`Governor::detached`] when this is done.
    Detach,
}

/// Decides how much of the GVL is watched.
#[derive(Debug)]
pub struct Governor {
    /// Nanoseconds per nanosecond of a CPU.
    budget: f64,
    cpus: f64,
    stage: Stage,
    began_ns: u64,
    window: (u64, Cost),
    over: u32,
    /// Number of windows before the next step forward.
    patience: u32,
    /// When the account of the slices was opened, and the cost then.
    account: (u64, Cost),
    /// When the probes were last opened, and the cost then.
    opened: (u64, Cost),
    times: OpenTimes,
    /// Since when individual waits are reported in [`Stage::Sums`].
    sampling_ns: Option<u64>,
    gaps: Vec<GvlGap>,
}

impl Governor {
    /// Makes a governor with a budget in millionths: of the time of `cpus` CPUs, and, for each process, of one CPU.
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

    /// How much of the GVL is watched.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// When the GVL was watched.
    pub fn times(&self) -> &OpenTimes {
        &self.times
    }

    /// Intervals, or parts of them, between these times for which individual waits were not reported.
    pub fn gaps(&self, since_ns: u64, now_ns: u64) -> Vec<GvlGap> {
        let first = self.gaps.partition_point(|gap| gap.to_ns <= since_ns);
        let part = |gap: &GvlGap| GvlGap {
            from_ns: gap.from_ns.max(since_ns),
            to_ns: gap.to_ns.min(now_ns),
            ..*gap
        };
        self.gaps[first..].iter().map(part).filter(|gap| gap.from_ns < gap.to_ns).collect()
    }

    /// Notes that individual waits are not reported from now on; `summed`: waits are still added up.
    fn gap(&mut self, now_ns: u64, summed: bool) {
        self.no_gap(now_ns);
        self.gaps.push(GvlGap { from_ns: now_ns, to_ns: u64::MAX, summed });
    }

    /// Notes that individual waits are reported from now on.
    fn no_gap(&mut self, now_ns: u64) {
        if let Some(last) = self.gaps.last_mut() {
            last.to_ns = last.to_ns.min(now_ns);
        }
    }

    /// Time for which the GVL was watched up to `now_ns`, and time for which it was not, nanoseconds.
    pub fn watched(&self, now_ns: u64) -> (u64, u64) {
        let closed = self.times.closed_within(self.began_ns, now_ns);
        (now_ns.saturating_sub(self.began_ns) - closed, closed)
    }

    /// Average cost per CPU since then, nanoseconds, or the cost to the most affected process if that is higher.
    fn spent_since(&self, since: Cost, cost: Cost) -> f64 {
        let all = cost.ns().saturating_sub(since.ns()) as f64 / self.cpus;
        all.max(cost.dearest_ns.saturating_sub(since.dearest_ns) as f64)
    }

    /// Share of the budget used since then; above 1 it was exceeded.
    fn use_since(&self, since: (u64, Cost), now_ns: u64, cost: Cost) -> f64 {
        let spent = self.spent_since(since.1, cost);
        let earned = now_ns.saturating_sub(since.0) as f64 * self.budget;
        if spent == 0.0 { 0.0 } else { spent / earned }
    }

    /// Updates time and cost. Returns the actions to perform, in this order.
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
            // The cost until the probes are detached counts, too.
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
                // The account stays open.
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

    /// Unspent budget since the account was opened, nanoseconds per CPU.
    fn saved_ns(&mut self, now_ns: u64, cost: Cost) -> f64 {
        let age = now_ns.saturating_sub(self.account.0);
        let saved = age as f64 * self.budget - self.spent_since(self.account.1, cost);
        if saved > nanos(PERIOD) as f64 * self.budget {
            // A long quiet period must not allow a long excess.
            self.account = (now_ns.saturating_sub(nanos(PERIOD)), cost);
        }
        saved
    }

    /// Reports individual waits as long as the budget lasts.
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

    /// The probes have been detached, or could not be attached.
    pub fn detached(&mut self) {
        if matches!(self.stage, Stage::Slices(Slice::Detaching | Slice::Attaching)) {
            self.stage = Stage::Slices(Slice::Waiting);
        }
    }

    /// The probes have been attached. Returns the actions to perform.
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

/// Intervals in which the probes did nothing.
#[derive(Clone, Debug, Default)]
pub struct OpenTimes {
    /// Start and end, `CLOCK_MONOTONIC` nanoseconds; the last may still be open. An epoch of the gate ends at the start of each.
    closed: Vec<(u64, u64)>,
    /// For each interval, the total length of all earlier ones.
    before: Vec<u64>,
}

impl OpenTimes {
    /// Adds what a thread's native thread has done since it was last seen. If the probes have been stopped since, only up to that
    /// time.
    pub fn tell_rest(&self, thread: &mut GvlThread, task: Option<&GvlTask>, now_ns: u64) {
        if thread.reported_ns == 0 {
            return;
        }
        let task = task.filter(|task| task.owner == thread.id);
        // The thread has run since; its clocks at the end of the epoch are no longer known.
        if task.is_some_and(|task| task.epoch != thread.epoch) {
            return;
        }
        // The thread may have been seen after that time.
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

    /// Number of times that the probes were reopened.
    pub fn epoch(&self) -> u32 {
        let open = self.closed.last().is_some_and(|last| last.1 == u64::MAX);
        (self.closed.len() - usize::from(open)) as u32
    }

    /// When an epoch ended; `None`: it has not ended.
    pub fn end_of(&self, epoch: u32) -> Option<u64> {
        self.closed.get(epoch as usize).map(|closed| closed.0)
    }

    fn closed_until(&self, at_ns: u64) -> u64 {
        let after = self.closed.partition_point(|closed| closed.0 < at_ns);
        let Some(last) = after.checked_sub(1) else { return 0 };
        self.before[last] + self.closed[last].1.min(at_ns) - self.closed[last].0
    }

    /// Time within the interval for which the probes did nothing, nanoseconds.
    pub fn closed_within(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.closed_until(to_ns).saturating_sub(self.closed_until(from_ns))
    }
}

#[cfg(test)]
mod tests;
