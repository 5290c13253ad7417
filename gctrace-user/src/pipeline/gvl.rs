//! The GVL's part of the data path: long waits meet their stacks, threads and edges become sums.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use gctrace_common::gvl::{GvlGate, GvlHold, GvlSpanEvent, GvlState, GvlThread, GvlWaitEvent};

use super::Pipeline;
use crate::{
    aggregate::{
        gvl::{GcAndWaits, GvlFold, doing, who},
        gvl_budget::{Act, Cost, Dearest, Governor, Stage},
        gvl_held::Held,
        gvl_so_far::GvlLook,
    },
    bpf::{GvlRead, GvlReader},
    console::say,
    host::clock::monotonic_ns,
    model::{
        gvl::{GvlBlocker, GvlDoing, GvlSpan, GvlWait},
        seen::Seen,
        stack::Stack,
    },
};

/// How long a wait whose stack has been announced waits for it. It comes within microseconds; if it does not, it was lost.
const PATIENCE_NS: u64 = 1_000_000_000;

/// After looking at what threads do for some time, nobody looks for so many times as long.
const LOOK_SELDOM: u32 = 500;

/// How often what it costs each process is read, nanoseconds.
const ADD_UP_NS: u64 = 100_000_000;

/// What is under way.
pub(super) struct Gvl {
    reader: Option<GvlReader>,
    folds: HashMap<u32, GvlFold>,
    gc: HashMap<u32, GcAndWaits>,
    governor: Governor,
    dearest: Dearest,
    /// When that was added up last, and what everything had cost then.
    added: (u64, Cost),
    /// Waits whose stack has not come yet, by process and thread.
    pending: HashMap<(u32, u32), Pending>,
    /// Where threads gave up the GVL, by process.
    held: HashMap<u32, Held>,
    look: GvlLook,
    next_look: Option<Instant>,
}

struct Pending {
    /// When the thread got the GVL, which is the time of the stack.
    ts_ns: u64,
    image: u32,
    wait: GvlWait,
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
            dearest: Dearest::default(),
            added: (0, Cost::default()),
            pending: HashMap::new(),
            held: HashMap::new(),
            look: GvlLook::default(),
            next_look: None,
        }
    }
}

impl Gvl {
    /// Completes a cost by what the processes have, as of a moment ago at the most.
    fn by_process(&mut self, cost: Cost, now_ns: u64) -> Cost {
        let (then_ns, before) = self.added;
        if let Some(reader) = &self.reader
            && now_ns.saturating_sub(then_ns) >= ADD_UP_NS
            && cost.ns() > before.ns()
        {
            let spent = reader.spent().unwrap_or_else(|error| {
                log::error!("reading what watching the GVL costs each process: {error}");
                Vec::new()
            });
            self.added = (now_ns, Cost { dearest_ns: self.dearest.add(spent), ..cost });
        }
        Cost { dearest_ns: self.added.1.dearest_ns, ..cost }
    }
}

/// What is to be done with the probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GvlOrder {
    /// Attach them; [`Pipeline::gvl_attached`] is to be called then.
    Attach,
    /// Detach them; likewise.
    Detach,
}

impl Pipeline {
    /// Looks at what watching the GVL has cost. Returns what is to be done.
    pub fn gvl_budget(&mut self, cost: impl FnOnce() -> Option<Cost>) -> Option<GvlOrder> {
        self.gvl.reader.as_ref()?;
        let before = self.gvl.governor.stage();
        let now_ns = monotonic_ns();
        let cost = self.gvl.by_process(cost()?, now_ns);
        let acts = self.gvl.governor.tick(now_ns, cost);
        self.gvl_said(before);
        self.gvl_do(acts)
    }

    /// All probes have been attached, or detached.
    pub fn gvl_attached(&mut self, attached: bool, cost: Cost) {
        if !attached {
            return self.gvl.governor.detached();
        }
        let now_ns = monotonic_ns();
        let cost = self.gvl.by_process(cost, now_ns);
        let acts = self.gvl.governor.attached(now_ns, cost);
        self.gvl_do(acts);
    }

    /// Says what has changed, once; slices of time come and go.
    fn gvl_said(&mut self, before: Stage) {
        let after = self.gvl.governor.stage();
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

    fn gvl_do(&mut self, acts: &[Act]) -> Option<GvlOrder> {
        let epoch = self.gvl.governor.times().epoch();
        let ended_ns = epoch.checked_sub(1).and_then(|last| self.gvl.governor.times().end_of(last));
        let closed_ns = self.gvl.governor.times().end_of(epoch).or(ended_ns);
        let reader = self.gvl.reader.as_mut()?;
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
                log::error!("telling the GVL probes what to do: {error}");
            }
        }
        order
    }

    /// For how long the GVL was watched, and for how long not.
    pub(super) fn gvl_count_watched(&mut self, now_ns: u64) {
        if self.gvl.reader.is_some() {
            (self.counts.gvl_watched_ns, self.counts.gvl_unwatched_ns) = self.gvl.governor.watched(now_ns);
        }
    }

    /// Tells what threads have done so far, if looking does not cost too much.
    pub fn gvl_so_far(&mut self) {
        let begun = Instant::now();
        let due = self.gvl.next_look.is_none_or(|next| begun >= next);
        let Some(reader) = self.gvl.reader.as_ref().filter(|_| due) else { return };
        match reader.look() {
            Ok(running) => {
                for (pid, so_far) in self.gvl.look.with(&running) {
                    let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else {
                        continue;
                    };
                    self.see(&process, Seen::GvlSoFar(&so_far));
                }
            }
            Err(error) => log::warn!("looking at what threads do with the GVL: {error}"),
        }
        let took = begun.elapsed();
        self.gvl.next_look = Some(begun + took.saturating_mul(LOOK_SELDOM).min(Duration::from_mins(1)));
    }

    /// A GC pause.
    pub(super) fn gvl_gc(&mut self, pid: u32, begin_ns: u64, ns: u64) {
        if self.gvl.reader.is_some() {
            self.gvl.gc.entry(pid).or_default().pause(begin_ns, ns);
        }
    }

    /// A thread had to wait long.
    pub(super) fn gvl_wait(&mut self, event: &GvlWaitEvent) {
        let header = &event.header;
        let key = (header.tgid, header.tid);
        let wait = GvlWait {
            who: who(header.tid, &event.comm),
            thread: (event.thread != 0).then_some(event.thread),
            begin_ns: event.begin_ns,
            ns: header.ts_ns.saturating_sub(event.begin_ns),
            id: event.id,
            blocker: self.gvl_blocker(header.tgid, &event.hold, event.begin_ns, header.ts_ns),
            stack: None,
        };
        let pending = Pending { ts_ns: header.ts_ns, image: header.image, wait };
        if event.stack == 0 {
            return self.report_wait(key.0, pending);
        }
        // The native thread has gone on, so the stack before was lost.
        if let Some(before) = self.gvl.pending.insert(key, pending) {
            self.report_wait(key.0, before);
        }
    }

    /// Who held the GVL; it did until `now_ns` if it was not seen to give it up (yields of 3.2).
    fn gvl_blocker(&mut self, pid: u32, hold: &GvlHold, begin_ns: u64, now_ns: u64) -> Option<GvlBlocker> {
        if hold.holder.id == 0 {
            return None;
        }
        let end_ns = if hold.end_ns == 0 { now_ns } else { hold.end_ns };
        let holders = self.gvl.held.entry(pid).or_default();
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
    pub(super) fn gvl_holder_stack(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        let forgotten = self.gvl.held.entry(pid).or_default().keep(tid, ts_ns, stack);
        self.counts.gvl_holder_stacks_unclaimed += forgotten;
    }

    /// What a thread did that held the GVL while another was waiting.
    pub(super) fn gvl_ran(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        self.gvl.held.entry(pid).or_default().sample(tid, ts_ns, stack);
    }

    /// No wait will name where threads of this process (of all, without one) gave up the GVL.
    fn gvl_forget_held(&mut self, ended: Option<u32>) {
        let unclaimed = |held: &Held| held.unclaimed();
        let forgotten = match ended {
            Some(pid) => self.gvl.held.remove(&pid).as_ref().map_or(0, unclaimed),
            None => self.gvl.held.drain().map(|(_, held)| unclaimed(&held)).sum(),
        };
        self.counts.gvl_holder_stacks_unclaimed += forgotten;
    }

    /// The stack of a wait.
    pub(super) fn gvl_stack(&mut self, pid: u32, tid: u32, ts_ns: u64, stack: Stack) {
        match self.gvl.pending.remove(&(pid, tid)) {
            Some(mut pending) if pending.ts_ns == ts_ns => {
                self.counts.gvl_stacks += 1;
                pending.wait.stack = Some(stack);
                self.report_wait(pid, pending);
            }
            other => {
                self.counts.gvl_stacks_unclaimed += 1;
                if let Some(pending) = other {
                    self.gvl.pending.insert((pid, tid), pending);
                }
            }
        }
    }

    /// Reports waits whose stack does not come: those that are old enough, and all of a process that has ended.
    pub(super) fn gvl_without_stacks(&mut self, now_ns: u64, ended: Option<u32>) {
        let due = |pid: u32, ts_ns: u64| ended == Some(pid) || ts_ns.saturating_add(PATIENCE_NS) < now_ns;
        let keys: Vec<_> =
            self.gvl.pending.iter().filter(|(key, p)| due(key.0, p.ts_ns)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(pending) = self.gvl.pending.remove(&key) {
                self.report_wait(key.0, pending);
            }
        }
    }

    /// A thread held the GVL for long, or did without it.
    pub(super) fn gvl_span(&mut self, state: GvlState, event: &GvlSpanEvent) {
        let header = &event.header;
        self.trace_known(header.tgid, header.image, "", header.ts_ns);
        let process = self.traced.get(&header.tgid).map(|traced| traced.process.clone());
        let (Some(process), Some(doing)) = (process, doing(state)) else {
            self.counts.gvl_refused += 1;
            return;
        };
        self.counts.gvl_spans += 1;
        let span = GvlSpan {
            who: who(header.tid, &event.comm),
            id: event.id,
            doing,
            begin_ns: event.begin_ns,
            ns: header.ts_ns.saturating_sub(event.begin_ns),
        };
        self.see(&process, Seen::GvlSpan(&span));
    }

    fn report_wait(&mut self, pid: u32, pending: Pending) {
        let Pending { image, wait, ts_ns: pending_ns } = pending;
        self.counts.gvl_waits_without_stack += u64::from(wait.stack.is_none());
        self.trace_known(pid, image, &wait.who.comm, pending_ns);
        let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else {
            self.counts.gvl_refused += 1;
            return;
        };
        self.counts.gvl_waits += 1;
        self.gvl.gc.entry(pid).or_default().wait(wait.begin_ns, wait.ns);
        self.see(&process, Seen::GvlWait(&wait));
    }

    /// A thread has ended.
    pub(super) fn gvl_thread(&mut self, thread: &GvlThread) {
        self.gvl_summary(thread, thread.header.ts_ns, true);
    }

    fn gvl_summary(&mut self, thread: &GvlThread, end_ns: u64, ended: bool) {
        let pid = thread.header.tgid;
        self.counts.gvl_thread_waits += thread.waits;
        self.trace_known(pid, thread.header.image, "", end_ns);
        let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else {
            self.counts.gvl_refused += 1;
            return;
        };
        // Hits are of images that are watched.
        let coverage = process.image.gvl.unwrap_or_default();
        let fold = self.gvl.folds.entry(pid).or_insert_with(|| GvlFold::new(coverage));
        let summary = fold.thread(thread, end_ns, ended, self.gvl.governor.times());
        self.counts.gvl_threads += 1;
        self.gvl.look.over(thread);
        self.see(&process, Seen::GvlThread(&summary));
    }

    /// A process is gone or has become another program, before which it had been `execs` others.
    pub(super) fn gvl_process(&mut self, pid: u32, execs: u32, end_ns: u64) {
        self.gvl_without_stacks(0, Some(pid));
        self.gvl_forget_held(Some(pid));
        if self.gvl.reader.is_none() {
            return;
        }
        let read = self.gvl_take_out(Some((pid, execs)));
        self.gvl_finish(pid, &read, end_ns);
    }

    /// Tracing ends.
    pub(super) fn gvl_detach(&mut self, now_ns: u64) {
        self.gvl_without_stacks(u64::MAX, None);
        self.gvl_forget_held(None);
        if self.gvl.reader.is_none() {
            return;
        }
        self.gvl_count_watched(now_ns);
        for gap in self.gvl.governor.gaps(now_ns) {
            self.exporters.iter_mut().for_each(|exporter| exporter.gvl_gap(gap));
        }
        let read = self.gvl_take_out(None);
        let mut pids: Vec<u32> = read.threads.iter().map(|thread| thread.header.tgid).collect();
        pids.extend(self.gvl.folds.keys());
        pids.sort_unstable();
        pids.dedup();
        for pid in pids {
            let of = GvlRead {
                threads: read.threads.iter().filter(|thread| thread.header.tgid == pid).copied().collect(),
                edges: read.edges.iter().filter(|(key, _)| key.tgid == pid).copied().collect(),
                tasks: read.tasks.clone(),
            };
            self.gvl_finish(pid, &of, now_ns);
        }
    }

    fn gvl_take_out(&mut self, of: Option<(u32, u32)>) -> GvlRead {
        let Some(reader) = &mut self.gvl.reader else { return GvlRead::default() };
        reader.take_out(of).unwrap_or_else(|error| {
            // The ledger does not balance then.
            log::error!("reading what threads did with the GVL: {error}");
            GvlRead::default()
        })
    }

    fn gvl_finish(&mut self, pid: u32, read: &GvlRead, end_ns: u64) {
        for thread in &read.threads {
            self.counts.gvl_threads_read += 1;
            let mut thread = *thread;
            let coverage =
                self.traced.get(&pid).and_then(|traced| traced.process.image.gvl).unwrap_or_default();
            let task = read.tasks.get(&thread.header.tid);
            // Where ends are not seen, a thread that does without the GVL may have none of its own any more.
            if coverage.ends || thread.state != GvlState::Away as u32 {
                self.gvl.governor.times().tell_rest(&mut thread, task, end_ns);
            }
            self.gvl_summary(&thread, end_ns, false);
        }
        let process = self.traced.get(&pid).map(|traced| traced.process.clone());
        if let Some((so_far, process)) = self.gvl.look.ended(pid).zip(process) {
            self.see(&process, Seen::GvlSoFar(&so_far));
        }
        let gc = self.gvl.gc.remove(&pid).unwrap_or_default();
        let Some(fold) = self.gvl.folds.remove(&pid) else { return };
        let mut summary = fold.finish(&read.edges, end_ns, &gc, self.gvl.governor.times());
        if let Some(gc) = summary.gc.as_mut().filter(|_| self.counts.gvl_steps > 0) {
            gc.wait_ns = None;
        }
        if let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) {
            self.see(&process, Seen::GvlProcess(&summary));
        }
    }
}
