//! GVL data in progress: long waits get their stacks, threads and edges are summed up. Methods return what is to be reported;
//! `gvl_seen` exports it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::{
    event::Header,
    gvl::{GvlGate, GvlHold, GvlKey, GvlSpanEvent, GvlState, GvlThread, GvlWaitEvent},
    stack::OffCpuEvent,
};

use super::gvl_ended::Ended;
use crate::{
    aggregate::{
        gvl::{GcAndWaits, GvlFold, doing, who},
        gvl_budget::{Act, Cost, CostliestProcess, Governor, Stage},
        gvl_held::Held,
        gvl_so_far::GvlLook,
    },
    bpf::{GvlRead, GvlReader},
    clock::monotonic_ns,
    console::say,
    ledger::{GvlCounts, UserCounts},
    model::{
        Process,
        gvl::{
            GvlBlocker, GvlCoverage, GvlDoing, GvlGap, GvlProcessSummary, GvlSpan, GvlThreadSummary, GvlWait,
        },
        gvl_so_far::GvlSoFar,
        seen::Seen,
        stack::Stack,
    },
};

/// Maximum time that a wait with an announced stack waits for it. The stack arrives within microseconds; otherwise it was lost.
const PATIENCE_NS: u64 = 1_000_000_000;

/// After reading the states of threads, they are not read for this many times as long as it took.
const LOOK_SELDOM: u32 = 500;

/// Interval at which the overhead per process is read, in nanoseconds.
const ADD_UP_NS: u64 = 100_000_000;

/// GVL data in progress.
pub struct Gvl {
    reader: Option<GvlReader>,
    folds: HashMap<u32, GvlFold>,
    gc: HashMap<u32, GcAndWaits>,
    governor: Governor,
    /// When the gate that ends reports of individual waits was actually written, by the time of the decision; both in `CLOCK_MONOTONIC` nanoseconds.
    silenced: BTreeMap<u64, u64>,
    /// Until when gaps have been reported, `CLOCK_MONOTONIC` nanoseconds.
    gaps_told_ns: u64,
    costliest: CostliestProcess,
    /// When the overhead per process was last summed up, and the total overhead at that time.
    added: (u64, Cost),
    /// Waits whose stack has not arrived yet, by process and thread.
    pending: HashMap<(u32, u32), Pending>,
    /// Stacks of threads that released or held the GVL, by process.
    held: HashMap<u32, Held>,
    look: GvlLook,
    next_look: Option<Instant>,
    ended: Ended,
    counts: GvlCounts,
}

struct Pending {
    /// When the thread acquired the GVL, which is the time of the stack.
    ts_ns: u64,
    image: u32,
    wait: GvlWait,
}

/// Data to report about a process, which may not be known yet.
pub(super) struct Report {
    pub(super) pid: u32,
    /// Index of its image.
    pub(super) image: u32,
    /// Name of the thread, or empty.
    pub(super) comm: Arc<str>,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub(super) ts_ns: u64,
    what: What,
}

enum What {
    Wait(Box<GvlWait>),
    Span(GvlSpan),
    /// A thread, the end of its time, and whether it has ended.
    Thread(Box<GvlThread>, u64, bool),
}

/// The exported form of a report.
pub(super) enum GvlReport {
    Wait(Box<GvlWait>),
    Span(GvlSpan),
    Thread(Box<GvlThreadSummary>),
}

impl GvlReport {
    pub(super) fn seen(&self) -> Seen<'_> {
        match self {
            Self::Wait(wait) => Seen::GvlWait(wait),
            Self::Span(span) => Seen::GvlSpan(span),
            Self::Thread(thread) => Seen::GvlThread(thread),
        }
    }
}

/// An order for the GVL probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GvlOrder {
    /// Attach them; then call [`Gvl::attached`].
    Attach,
    /// Detach them; then call [`Gvl::attached`].
    Detach,
}

impl Gvl {
    pub(super) fn new(reader: Option<GvlReader>) -> Self {
        let (budget, cpus) = reader.as_ref().map_or((0, 1), |reader| (reader.budget_ppm, reader.cpus));
        let governor = Governor::new(budget, cpus, monotonic_ns());
        Self {
            reader,
            folds: HashMap::new(),
            gc: HashMap::new(),
            governor,
            silenced: BTreeMap::new(),
            gaps_told_ns: 0,
            costliest: CostliestProcess::default(),
            added: (0, Cost::default()),
            pending: HashMap::new(),
            held: HashMap::new(),
            look: GvlLook::default(),
            next_look: None,
            ended: Ended::default(),
            counts: GvlCounts::default(),
        }
    }

    /// Adds the overhead of the costliest process to a cost, as of at most [`ADD_UP_NS`] ago.
    fn by_process(&mut self, cost: Cost, now_ns: u64) -> Cost {
        let (then_ns, before) = self.added;
        if let Some(reader) = &self.reader
            && now_ns.saturating_sub(then_ns) >= ADD_UP_NS
            && cost.ns() > before.ns()
        {
            let spent = reader.spent().unwrap_or_else(|error| {
                log::error!("reading the cost of watching the GVL per process: {error}");
                Vec::new()
            });
            self.added = (now_ns, Cost { dearest_ns: self.costliest.add(spent), ..cost });
        }
        Cost { dearest_ns: self.added.1.dearest_ns, ..cost }
    }

    /// Checks the overhead of watching the GVL against the budget. Returns the order for the probes, if any.
    pub fn budget(&mut self, cost: impl FnOnce() -> Option<Cost>) -> Option<GvlOrder> {
        self.ended.take(self.reader.as_mut()?);
        let before = self.governor.stage();
        let now_ns = monotonic_ns();
        let cost = self.by_process(cost()?, now_ns);
        let acts = self.governor.tick(now_ns, cost);
        self.said(before);
        let order = self.act(acts);
        if acts.iter().any(|act| matches!(act, Act::OnlySums | Act::Close)) {
            // Between the time of the decision and now, the cost was read, and this thread may have been preempted: individual waits
            // were reported until now.
            self.silenced.insert(now_ns, monotonic_ns());
        }
        order
    }

    /// Handles that all probes have been attached or detached.
    pub fn attached(&mut self, attached: bool, cost: Cost) {
        if !attached {
            return self.governor.detached();
        }
        let now_ns = monotonic_ns();
        let cost = self.by_process(cost, now_ns);
        let acts = self.governor.attached(now_ns, cost);
        self.act(acts);
    }

    /// Reports a change of the stage once; changes between slices of time are not reported.
    fn said(&mut self, before: Stage) {
        let after = self.governor.stage();
        let slices = |stage| matches!(stage, Stage::Slices(_));
        if before == after || (slices(before) && slices(after)) {
            return;
        }
        self.counts.gvl_steps += 1;
        let now = match after {
            Stage::Events if slices(before) => {
                "GVL tracing is within its CPU budget again: all of the time is covered"
            }
            Stage::Events => "GVL tracing is within its CPU budget again: all individual waits are reported",
            Stage::Sums => {
                "GVL tracing exceeds its CPU budget: individual waits are now sampled, totals stay complete (raise it: --gvl-budget)"
            }
            Stage::Slices(_) => {
                "GVL tracing exceeds its CPU budget: now sampling, totals and individual waits cover a part of the time (raise it: --gvl-budget)"
            }
            Stage::Off => {
                "GVL tracing exceeds its CPU budget by far: it stops, and totals end here (raise it: --gvl-budget)"
            }
        };
        say(&format!("gctrace: {now}"));
    }

    fn act(&mut self, acts: &[Act]) -> Option<GvlOrder> {
        let epoch = self.governor.times().epoch();
        let ended_ns = epoch.checked_sub(1).and_then(|last| self.governor.times().end_of(last));
        let closed_ns = self.governor.times().end_of(epoch).or(ended_ns);
        let reader = self.reader.as_mut()?;
        let mut order = None;
        for act in acts {
            let done = match act {
                Act::ReportWaits | Act::Open => reader.gate(GvlGate { level: GvlGate::EVENTS, epoch }),
                Act::OnlySums => reader.gate(GvlGate { level: GvlGate::SUMS, epoch }),
                Act::Close => reader.close(epoch, closed_ns.unwrap_or_default()),
                Act::Attach => {
                    order = Some(GvlOrder::Attach);
                    Ok(())
                }
                Act::Detach => {
                    order = Some(GvlOrder::Detach);
                    Ok(())
                }
            };
            if let Err(error) = done {
                log::error!("configuring the GVL probes: {error}");
            }
        }
        order
    }

    /// Adds its counts.
    pub(super) fn add_counts(&self, counts: &mut UserCounts) {
        counts.gvl.add(&self.counts);
    }

    /// The current threads in the kernel's map; `None` if reading them is not due again yet.
    pub(super) fn running(&mut self) -> Option<Vec<(GvlKey, GvlThread)>> {
        let begun = Instant::now();
        let due = self.next_look.is_none_or(|next| begun >= next);
        let reader = self.reader.as_ref().filter(|_| due)?;
        let running = reader.look();
        let took = begun.elapsed();
        self.next_look = Some(begun + took.saturating_mul(LOOK_SELDOM).min(Duration::from_mins(1)));
        running.inspect_err(|error| log::warn!("reading the GVL states of threads: {error}")).ok()
    }

    /// The sums of the threads of each process so far, including the running ones.
    pub(super) fn so_far(&mut self, running: &[(GvlKey, GvlThread)]) -> BTreeMap<u32, GvlSoFar> {
        self.look.with(running)
    }

    /// Since when a native thread that is off its CPU has been waiting for its GVL, as `gvl_ns` of an [`OffCpuEvent`]; the programs need not be
    /// running any more.
    pub(super) fn waits_since(&self, tid: u32) -> u64 {
        self.reader.as_ref().map_or(OffCpuEvent::GVL_UNKNOWN, |reader| reader.waits_since(tid))
    }

    /// Handles a GC pause.
    pub(super) fn pause(&mut self, pid: u32, begin_ns: u64, ns: u64) {
        if self.reader.is_some() {
            self.gc.entry(pid).or_default().pause(begin_ns, ns);
        }
    }

    /// Adds pauses of a process from before it was traced: start and length in nanoseconds. `all`: whether they are complete.
    pub(super) fn pauses(&mut self, pid: u32, pauses: &[(u64, u64)], all: bool) {
        for (begin_ns, ns) in pauses {
            self.pause(pid, *begin_ns, *ns);
        }
        if !all && self.reader.is_some() {
            self.gc.entry(pid).or_default().incomplete();
        }
    }

    /// Handles a long wait of a thread in this request (0: unknown). Returns what can be reported now: this wait, or the thread's previous one
    /// if its stack was lost.
    pub(super) fn wait(&mut self, event: &GvlWaitEvent, request: Option<u64>) -> Option<Report> {
        let header = &event.header;
        let key = (header.tgid, header.tid);
        let wait = GvlWait {
            who: who(header.tid, &event.comm),
            thread: (event.thread != 0).then_some(event.thread),
            begin_ns: event.begin_ns,
            ns: header.ts_ns.saturating_sub(event.begin_ns),
            id: event.id,
            request,
            blocker: self.blocker(header.tgid, &event.hold, event.begin_ns, header.ts_ns),
            stack: None,
        };
        let pending = Pending { ts_ns: header.ts_ns, image: header.image, wait };
        if event.stack == 0 {
            return Some(pending.report(key.0));
        }
        // The native thread has continued, so the stack of the previous wait was lost.
        self.pending.insert(key, pending).map(|before| before.report(key.0))
    }

    /// The thread that held the GVL; it did until `now_ns` if it was not seen to release it (yields of 3.2).
    fn blocker(&mut self, pid: u32, hold: &GvlHold, begin_ns: u64, now_ns: u64) -> Option<GvlBlocker> {
        if hold.holder.id == 0 {
            return None;
        }
        let end_ns = if hold.end_ns == 0 { now_ns } else { hold.end_ns };
        let holders = self.held.entry(pid).or_default();
        let found = holders.find(hold.holder.tid, hold.end_ns);
        let ran = holders.ran(hold.holder.tid, begin_ns.max(hold.begin_ns), end_ns);
        let first = found.as_ref().is_some_and(|found| found.first);
        self.counts.gvl_holder_stacks += u64::from(first);
        let span = GvlSpan {
            who: who(hold.holder.tid, &hold.holder.comm),
            id: hold.holder.id,
            doing: GvlDoing::Holding,
            begin_ns: hold.begin_ns,
            ns: end_ns.saturating_sub(hold.begin_ns),
        };
        Some(GvlBlocker { hold: span, until: found.map(|found| found.stack), first, ran })
    }

    /// Handles the stack of a thread that released the GVL; it precedes the waits that this release ended.
    pub(super) fn holder_stack(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        let forgotten = self.held.entry(pid).or_default().keep(tid, ts_ns, stack);
        self.counts.gvl_holder_stacks_unclaimed += forgotten;
    }

    /// Handles a stack of a thread that held the GVL while another thread was waiting.
    pub(super) fn ran(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        self.held.entry(pid).or_default().sample(tid, ts_ns, stack);
    }

    /// Forgets the holder stacks of a process (`None`: of all): no wait will refer to them any more.
    fn forget_held(&mut self, ended: Option<u32>) {
        let unclaimed = |held: &Held| held.unclaimed();
        let forgotten = match ended {
            Some(pid) => self.held.remove(&pid).as_ref().map_or(0, unclaimed),
            None => self.held.drain().map(|(_, held)| unclaimed(&held)).sum(),
        };
        self.counts.gvl_holder_stacks_unclaimed += forgotten;
    }

    /// Handles the stack of a wait. Returns the wait if it can now be reported.
    pub(super) fn stack(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) -> Option<Report> {
        match self.pending.remove(&(pid, tid)) {
            Some(mut pending) if pending.ts_ns == ts_ns => {
                self.counts.gvl_stacks += 1;
                pending.wait.stack = Some(stack);
                Some(pending.report(pid))
            }
            other => {
                self.counts.gvl_stacks_unclaimed += 1;
                if let Some(pending) = other {
                    self.pending.insert((pid, tid), pending);
                }
                None
            }
        }
    }

    /// Takes the waits whose stack will not arrive: those that are old enough, and all of a process that has ended.
    pub(super) fn without_stacks(&mut self, now_ns: u64, ended: Option<u32>) -> Vec<Report> {
        let due = |pid: u32, ts_ns: u64| ended == Some(pid) || ts_ns.saturating_add(PATIENCE_NS) < now_ns;
        let keys: Vec<_> =
            self.pending.iter().filter(|(key, p)| due(key.0, p.ts_ns)).map(|(key, _)| *key).collect();
        let taken = |key: (u32, u32)| Some(self.pending.remove(&key)?.report(key.0));
        keys.into_iter().filter_map(taken).collect()
    }

    /// Handles a time in which a thread held the GVL for long, or did not need it.
    pub(super) fn span(&mut self, state: GvlState, event: &GvlSpanEvent) -> Option<Report> {
        let header = &event.header;
        let Some(doing) = doing(state) else {
            self.counts.gvl_refused += 1;
            return None;
        };
        let span = GvlSpan {
            who: who(header.tid, &event.comm),
            id: event.id,
            doing,
            begin_ns: event.begin_ns,
            ns: header.ts_ns.saturating_sub(event.begin_ns),
        };
        Some(Report::of(header, header.ts_ns, What::Span(span)))
    }

    /// Handles a thread that has ended.
    pub(super) fn thread(&mut self, thread: Box<GvlThread>) -> Report {
        self.ended.thread(&thread);
        let end_ns = thread.header.ts_ns;
        self.summary(thread, end_ns, true)
    }

    /// Handles a thread of a process that is gone, or one that continues when tracing ends.
    pub(super) fn last_of(
        &mut self,
        thread: &GvlThread,
        read: &GvlRead,
        coverage: GvlCoverage,
        end_ns: u64,
    ) -> Report {
        self.counts.gvl_threads_read += 1;
        let mut thread = Box::new(*thread);
        let task = read.tasks.get(&thread.header.tid);
        // If ends of threads are not seen, a thread outside the GVL may no longer have a native thread of its own.
        if coverage.ends || thread.state != GvlState::Away as u32 {
            self.governor.times().tell_rest(&mut thread, task, end_ns);
        }
        self.summary(thread, end_ns, false)
    }

    /// A program that was not reported has been replaced: the sums of its threads are counted as refused.
    pub(super) fn refuse(&mut self, read: &GvlRead) {
        for thread in &read.threads {
            self.counts.gvl_threads_read += 1;
            self.counts.gvl_thread_waits += thread.waits;
            self.counts.gvl_refused += 1;
        }
    }

    fn summary(&mut self, thread: Box<GvlThread>, end_ns: u64, ended: bool) -> Report {
        self.counts.gvl_thread_waits += thread.waits;
        let header = thread.header;
        Report::of(&header, end_ns, What::Thread(thread, end_ns, ended))
    }

    /// Turns a report into its exported form, once its process is known. Without a process it is refused.
    pub(super) fn shown(&mut self, report: Report, process: Option<&Process>) -> Option<GvlReport> {
        let Report { pid, what, .. } = report;
        if let What::Wait(wait) = &what {
            self.counts.gvl_waits_without_stack += u64::from(wait.stack.is_none());
        }
        let Some(process) = process else {
            self.counts.gvl_refused += 1;
            return None;
        };
        Some(match what {
            What::Wait(wait) => {
                self.counts.gvl_waits += 1;
                self.gc.entry(pid).or_default().wait(wait.begin_ns, wait.ns);
                GvlReport::Wait(wait)
            }
            What::Span(span) => {
                self.counts.gvl_spans += 1;
                GvlReport::Span(span)
            }
            What::Thread(thread, end_ns, ended) => {
                self.counts.gvl_threads += 1;
                // Only images whose GVL is watched have hits.
                let coverage = process.image.gvl.unwrap_or_default();
                let fold = self.folds.entry(pid).or_insert_with(|| GvlFold::new(coverage));
                let summary = fold.thread(&thread, end_ns, ended, self.governor.times());
                if fold.has_many_names() {
                    fold.keep_names(&self.ended.threads(pid));
                }
                self.look.over(&thread);
                GvlReport::Thread(Box::new(summary))
            }
        })
    }

    /// Handles a process that is gone or has become another program. Returns the waits that were waiting for a stack.
    pub(super) fn gone(&mut self, pid: u32) -> Vec<Report> {
        let reports = self.without_stacks(0, Some(pid));
        self.forget_held(Some(pid));
        reports
    }

    /// Ends tracing. Returns the waits that were waiting for a stack.
    pub(super) fn close(&mut self) -> Vec<Report> {
        let reports = self.without_stacks(u64::MAX, None);
        self.forget_held(None);
        reports
    }

    /// The times since the last call in which individual waits were not reported.
    pub(super) fn gaps(&mut self, now_ns: u64) -> Vec<GvlGap> {
        if self.reader.is_none() {
            return Vec::new();
        }
        self.count_watched(now_ns);
        let since_ns = std::mem::replace(&mut self.gaps_told_ns, now_ns);
        let mut gaps = self.governor.gaps(since_ns, now_ns);
        for gap in &mut gaps {
            // If another gap follows immediately, this gap ends where that one starts.
            for time_ns in [&mut gap.from_ns, &mut gap.to_ns] {
                let silent_ns = self.silenced.get(&*time_ns).copied();
                *time_ns = silent_ns.unwrap_or(*time_ns).min(now_ns);
            }
        }
        gaps
    }

    /// Takes the kernel side's data of a process, given with its number of execs, or of all, and removes it there. `None` if the GVL
    /// is not watched.
    pub(super) fn take_out(&mut self, of: Option<(u32, u32)>) -> Option<GvlRead> {
        let reader = self.reader.as_mut()?;
        let mut read = reader.take_out(of).unwrap_or_else(|error| {
            // The ledger will not balance.
            log::error!("reading the GVL times of threads: {error}");
            GvlRead::default()
        });
        read.edges = self.ended.with(&read.edges, of);
        Some(read)
    }

    /// Processes with GVL sums or with threads that were read at the end.
    pub(super) fn processes(&self, read: &GvlRead) -> Vec<u32> {
        let mut pids: Vec<u32> = read.threads.iter().map(|thread| thread.header.tgid).collect();
        pids.extend(self.folds.keys());
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// The final sums of a process, all of whose threads have been reported.
    pub(super) fn finish(
        &mut self,
        pid: u32,
        read: &GvlRead,
        end_ns: u64,
    ) -> (Option<GvlSoFar>, Option<GvlProcessSummary>) {
        let so_far = self.look.ended(pid);
        let gc = self.gc.remove(&pid).unwrap_or_default();
        let Some(fold) = self.folds.remove(&pid) else { return (so_far, None) };
        let mut summary = fold.finish(&read.edges, end_ns, &gc, self.governor.times());
        if let Some(gc) = summary.gc.as_mut().filter(|_| self.counts.gvl_steps > 0) {
            gc.wait_ns = None;
        }
        (so_far, Some(summary))
    }

    /// Drops the sums of a program's threads, because they are incomplete.
    pub(super) fn abandon(&mut self, pid: u32) {
        self.look.ended(pid);
        self.gc.remove(&pid);
        self.folds.remove(&pid);
    }

    /// Updates for how long the GVL was watched and not watched.
    fn count_watched(&mut self, now_ns: u64) {
        if self.reader.is_some() {
            (self.counts.gvl_watched_ns, self.counts.gvl_unwatched_ns) = self.governor.watched(now_ns);
        }
    }
}

impl Pending {
    fn report(self, pid: u32) -> Report {
        let Self { ts_ns, image, wait } = self;
        Report { pid, image, comm: wait.who.comm.clone(), ts_ns, what: What::Wait(Box::new(wait)) }
    }
}

impl Report {
    fn of(header: &Header, ts_ns: u64, what: What) -> Self {
        Self { pid: header.tgid, image: header.image, comm: Arc::from(""), ts_ns, what }
    }
}
