//! What is under way of the GVL: long waits get their stacks, threads and edges become sums. It returns what there is to report;
//! `seen` hands that over.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::{
    event::Header,
    gvl::{GvlGate, GvlHold, GvlSpanEvent, GvlState, GvlThread, GvlWaitEvent},
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

/// How long a wait whose stack has been announced waits for it. It comes within microseconds; if it does not, it was lost.
const PATIENCE_NS: u64 = 1_000_000_000;

/// After the states of threads were read for some time, they are not read for this many times as long.
const LOOK_SELDOM: u32 = 500;

/// How often what it costs each process is read, nanoseconds.
const ADD_UP_NS: u64 = 100_000_000;

/// What is under way.
pub struct Gvl {
    reader: Option<GvlReader>,
    folds: HashMap<u32, GvlFold>,
    gc: HashMap<u32, GcAndWaits>,
    governor: Governor,
    /// When the gate had been written that ends reports of single waits, by the time of that decision, `CLOCK_MONOTONIC` nanoseconds.
    silenced: BTreeMap<u64, u64>,
    costliest: CostliestProcess,
    /// When that was added up last, and what everything had cost then.
    added: (u64, Cost),
    /// Waits whose stack has not come yet, by process and thread.
    pending: HashMap<(u32, u32), Pending>,
    /// Where threads gave up the GVL, by process.
    held: HashMap<u32, Held>,
    look: GvlLook,
    next_look: Option<Instant>,
    ended: Ended,
    counts: GvlCounts,
}

struct Pending {
    /// When the thread got the GVL, which is the time of the stack.
    ts_ns: u64,
    image: u32,
    wait: GvlWait,
}

/// The data to report of a process, which may be unknown until now.
pub(super) struct Report {
    pub(super) pid: u32,
    /// Index of its image.
    pub(super) image: u32,
    /// Name of the thread, or nothing.
    pub(super) comm: Arc<str>,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub(super) ts_ns: u64,
    what: What,
}

enum What {
    Wait(Box<GvlWait>),
    Span(GvlSpan),
    /// A thread, until when, and whether it has ended.
    Thread(Box<GvlThread>, u64, bool),
}

/// What is exported of a report.
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

/// What is to be done with the probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GvlOrder {
    /// Attach them; [`Gvl::attached`] is to be called then.
    Attach,
    /// Detach them; likewise.
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

    /// Completes a cost by what the processes have, as of a moment ago at the most.
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

    /// Looks at what watching the GVL has cost. Returns what is to be done.
    pub fn budget(&mut self, cost: impl FnOnce() -> Option<Cost>) -> Option<GvlOrder> {
        self.ended.take(self.reader.as_mut()?);
        let before = self.governor.stage();
        let now_ns = monotonic_ns();
        let cost = self.by_process(cost()?, now_ns);
        let acts = self.governor.tick(now_ns, cost);
        self.said(before);
        let order = self.act(acts);
        if acts.iter().any(|act| matches!(act, Act::OnlySums | Act::Close)) {
            // What costs have been is read between the decision's time and this one, and this thread may have lost its CPU: single waits
            // were reported until now.
            self.silenced.insert(now_ns, monotonic_ns());
        }
        order
    }

    /// All probes have been attached, or detached.
    pub fn attached(&mut self, attached: bool, cost: Cost) {
        if !attached {
            return self.governor.detached();
        }
        let now_ns = monotonic_ns();
        let cost = self.by_process(cost, now_ns);
        let acts = self.governor.attached(now_ns, cost);
        self.act(acts);
    }

    /// Says what has changed, once; slices of time come and go.
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

    /// Adds what it has counted.
    pub(super) fn add_counts(&self, counts: &mut UserCounts) {
        counts.gvl.add(&self.counts);
    }

    /// What the threads of each process have done so far, if looking does not cost too much now.
    pub(super) fn so_far(&mut self) -> BTreeMap<u32, GvlSoFar> {
        let begun = Instant::now();
        let due = self.next_look.is_none_or(|next| begun >= next);
        let Some(reader) = self.reader.as_ref().filter(|_| due) else { return BTreeMap::new() };
        let so_far = reader.look().map_or_else(
            |error| {
                log::warn!("reading the GVL states of threads: {error}");
                BTreeMap::new()
            },
            |running| self.look.with(&running),
        );
        let took = begun.elapsed();
        self.next_look = Some(begun + took.saturating_mul(LOOK_SELDOM).min(Duration::from_mins(1)));
        so_far
    }

    /// Since when a native thread that is off its CPU has been waiting for its GVL, when no program runs any more: `gvl_ns` of an
    /// [`OffCpuEvent`].
    pub(super) fn waits_since(&self, tid: u32) -> u64 {
        self.reader.as_ref().map_or(OffCpuEvent::GVL_UNKNOWN, |reader| reader.waits_since(tid))
    }

    /// A GC pause.
    pub(super) fn pause(&mut self, pid: u32, begin_ns: u64, ns: u64) {
        if self.reader.is_some() {
            self.gc.entry(pid).or_default().pause(begin_ns, ns);
        }
    }

    /// Pauses of a process from before it was traced, begin and length in nanoseconds. `all`: whether these are all.
    pub(super) fn pauses(&mut self, pid: u32, pauses: &[(u64, u64)], all: bool) {
        for (begin_ns, ns) in pauses {
            self.pause(pid, *begin_ns, *ns);
        }
        if !all && self.reader.is_some() {
            self.gc.entry(pid).or_default().incomplete();
        }
    }

    /// A thread had to wait long, in this request (0: one that is not known). Returns what can be reported now: this wait, or the last one of the thread, whose stack was lost.
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
        // The native thread has gone on, so the stack before was lost.
        self.pending.insert(key, pending).map(|before| before.report(key.0))
    }

    /// Who held the GVL; it did until `now_ns` if it was not seen to give it up (yields of 3.2).
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

    /// The stack of a thread that gave up the GVL, which precedes the waits that ended with that.
    pub(super) fn holder_stack(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        let forgotten = self.held.entry(pid).or_default().keep(tid, ts_ns, stack);
        self.counts.gvl_holder_stacks_unclaimed += forgotten;
    }

    /// What a thread did that held the GVL while another was waiting.
    pub(super) fn ran(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        self.held.entry(pid).or_default().sample(tid, ts_ns, stack);
    }

    /// No wait will name where threads of this process (of all, without one) gave up the GVL.
    fn forget_held(&mut self, ended: Option<u32>) {
        let unclaimed = |held: &Held| held.unclaimed();
        let forgotten = match ended {
            Some(pid) => self.held.remove(&pid).as_ref().map_or(0, unclaimed),
            None => self.held.drain().map(|(_, held)| unclaimed(&held)).sum(),
        };
        self.counts.gvl_holder_stacks_unclaimed += forgotten;
    }

    /// The stack of a wait, which can be reported then.
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

    /// Waits whose stack does not come: those that are old enough, and all of a process that has ended.
    pub(super) fn without_stacks(&mut self, now_ns: u64, ended: Option<u32>) -> Vec<Report> {
        let due = |pid: u32, ts_ns: u64| ended == Some(pid) || ts_ns.saturating_add(PATIENCE_NS) < now_ns;
        let keys: Vec<_> =
            self.pending.iter().filter(|(key, p)| due(key.0, p.ts_ns)).map(|(key, _)| *key).collect();
        let taken = |key: (u32, u32)| Some(self.pending.remove(&key)?.report(key.0));
        keys.into_iter().filter_map(taken).collect()
    }

    /// A thread held the GVL for long, or did without it.
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

    /// A thread has ended.
    pub(super) fn thread(&mut self, thread: Box<GvlThread>) -> Report {
        self.ended.thread(&thread);
        let end_ns = thread.header.ts_ns;
        self.summary(thread, end_ns, true)
    }

    /// A thread of a process that is gone, or that goes on when tracing ends.
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
        // Where ends are not seen, a thread that does without the GVL may have none of its own any more.
        if coverage.ends || thread.state != GvlState::Away as u32 {
            self.governor.times().tell_rest(&mut thread, task, end_ns);
        }
        self.summary(thread, end_ns, false)
    }

    /// A program that was not reported has become another one: nobody asks what its threads did.
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

    /// Makes of a report what is exported, once it is known whose it is. Without a process it is refused.
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
                // Hits are of images that are watched.
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

    /// A process is gone or has become another program: what had been waiting for a stack.
    pub(super) fn gone(&mut self, pid: u32) -> Vec<Report> {
        let reports = self.without_stacks(0, Some(pid));
        self.forget_held(Some(pid));
        reports
    }

    /// Tracing ends: what had been waiting for a stack.
    pub(super) fn close(&mut self) -> Vec<Report> {
        let reports = self.without_stacks(u64::MAX, None);
        self.forget_held(None);
        reports
    }

    /// When single waits were not reported, at the end.
    pub(super) fn gaps(&mut self, now_ns: u64) -> Vec<GvlGap> {
        if self.reader.is_none() {
            return Vec::new();
        }
        self.count_watched(now_ns);
        let mut gaps = self.governor.gaps(now_ns);
        for gap in &mut gaps {
            // A gap that another one follows at once ends where that one begins.
            for time_ns in [&mut gap.from_ns, &mut gap.to_ns] {
                let silent_ns = self.silenced.get(&*time_ns).copied();
                *time_ns = silent_ns.unwrap_or(*time_ns).min(now_ns);
            }
        }
        gaps
    }

    /// What the kernel side has of a process that had been `execs` other programs, or of all; it forgets them. `None` where the GVL
    /// is not watched.
    pub(super) fn take_out(&mut self, of: Option<(u32, u32)>) -> Option<GvlRead> {
        let reader = self.reader.as_mut()?;
        let mut read = reader.take_out(of).unwrap_or_else(|error| {
            // The ledger does not balance then.
            log::error!("reading the GVL times of threads: {error}");
            GvlRead::default()
        });
        read.edges = self.ended.with(&read.edges, of);
        Some(read)
    }

    /// Processes with threads, of which some may have been read at the end.
    pub(super) fn processes(&self, read: &GvlRead) -> Vec<u32> {
        let mut pids: Vec<u32> = read.threads.iter().map(|thread| thread.header.tgid).collect();
        pids.extend(self.folds.keys());
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// What the threads of a process did, all of which have been reported.
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

    /// What was summed up of a program's threads is dropped: it is not the whole.
    pub(super) fn abandon(&mut self, pid: u32) {
        self.look.ended(pid);
        self.gc.remove(&pid);
        self.folds.remove(&pid);
    }

    /// For how long the GVL was watched, and for how long not.
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
