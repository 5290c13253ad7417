//! Turns stack records into samples and trigger stacks. [`reader`] names Ruby frames at once; native and kernel frames, whose names
//! remain available, are named here, and all frames are put in order.

mod reader;
mod synthetic;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use gctrace_common::{
    config::{AwayEntry, MAX_AWAY},
    event::{Header, Kind},
    stack::{Cause, GcActivity, NativeEnd, OffCpuEvent},
};

pub use self::reader::{NamedStack, Reader, Record, Sleeper};
use self::{reader::Unmixed, synthetic::SyntheticFrames};
use crate::{
    aggregate::mix::{Mixed, WithoutLine, mix},
    ledger::{StackCounts, UserCounts},
    model::{
        self,
        stack::{Frame, Stack, StackSample, ThreadState},
        trace::Span,
    },
    native::{KernelNamer, NativeNamer},
    ruby::threads::Walked,
};

/// Maximum number of trigger stacks that wait for the snapshot of their cycle. Both come within microseconds of each other, but all stacks are
/// taken before a batch of GC records is, and a batch may hold fewer cycles than a program has started while gctrace had no CPU. Above
/// it the oldest are dropped and counted.
const MAX_TRIGGERS: usize = 1 << 13;

/// A sample that waits for its turn among the other events.
#[derive(Debug)]
pub struct ReadySample {
    /// The process.
    pub pid: u32,
    /// Index of its image.
    pub image: u32,
    /// When the request served by its thread began, in nanoseconds; 0: no known request.
    pub request_ns: u64,
    /// The sample, without its request.
    pub sample: StackSample,
}

/// A finished stack and what it was taken for.
#[derive(Debug)]
pub struct Finished {
    /// The occasion on which it was taken.
    pub of: StackOf,
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The name of the thread.
    pub comm: Arc<str>,
    /// When it was taken.
    pub ts_ns: u64,
    /// When the request served by its thread began, in nanoseconds; 0: no known request.
    pub request_ns: u64,
    /// The span that was active on its thread.
    pub span: Option<Span>,
    /// The weight in its record: bytes for [`StackOf::Malloc`].
    pub weight: u64,
    /// The native frames above the innermost interpreter loop, leaf first, even if the remaining ones do not match the Ruby frames. Only for
    /// [`StackOf::Malloc`].
    pub above: Vec<Arc<Frame>>,
    /// The stack.
    pub stack: Stack,
}

/// The occasion on which a stack was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackOf {
    /// The start of the cycle whose snapshot has this time.
    Trigger,
    /// A thread acquired the GVL at that time, after waiting for it.
    Waiter,
    /// A thread released the GVL at that time while another thread was waiting for it.
    Holder,
    /// A thread held the GVL at that time while another thread was waiting for it.
    Blocker,
    /// A thread took the free slots of a heap page at that time.
    Refill,
    /// A thread called an allocation function at that time.
    Malloc,
}

/// The stack stage of the data path.
pub struct Stacks {
    reader: Option<Reader>,
    ready: VecDeque<ReadySample>,
    triggers: VecDeque<Trigger>,
    /// Threads off their CPU, by tid.
    away: HashMap<u32, Away>,
    /// Threads that are back on a CPU and whose stack is still to come, by tid.
    returned: HashMap<u32, OffCpuEvent>,
    frames: SyntheticFrames,
    kernel: KernelNamer,
    native: Option<NativeNamer>,
    without_line: WithoutLine,
    /// Names of threads, by pid.
    comms: HashMap<u32, HashMap<[u8; 16], Arc<str>>>,
    counts: StackCounts,
}

/// The stack that started a cycle.
#[derive(Clone, Debug)]
pub struct Trigger {
    pid: u32,
    ts_ns: u64,
    /// The stack.
    pub stack: Stack,
    /// The span that was active on its thread.
    pub span: Option<Span>,
}

/// The stack of a thread when it left its CPU.
struct Away {
    pid: u32,
    begin_ns: u64,
    gc: GcActivity,
    span: Option<Span>,
    stack: Stack,
}

impl Stacks {
    /// Creates the stage for a reader. Without `native`, native frames are left out.
    pub fn new(reader: Option<Reader>, native: Option<NativeNamer>) -> Self {
        let mut kernel = KernelNamer::default();
        if native.is_some() {
            // Load now, since profiles are wanted: it takes some tens of milliseconds, during which the rings would fill later.
            kernel.load();
        }
        Self {
            reader,
            ready: VecDeque::new(),
            triggers: VecDeque::new(),
            away: HashMap::new(),
            returned: HashMap::new(),
            frames: SyntheticFrames::new(),
            kernel,
            native,
            without_line: WithoutLine::default(),
            comms: HashMap::new(),
            counts: StackCounts::default(),
        }
    }

    /// The records read from the ring since the last call, in ring order.
    pub fn take(&mut self) -> Vec<Record> {
        self.reader.as_ref().map_or_else(Vec::new, |reader| reader.take(&mut self.counts))
    }

    /// Handles a thread that is back on a CPU.
    pub fn returned(&mut self, event: OffCpuEvent) {
        // The stack of the previous return was lost.
        if let Some(before) = self.returned.remove(&event.header.tid) {
            self.back(&before);
        }
        if event.header.point & OffCpuEvent::STACK_FOLLOWS == 0 {
            self.back(&event);
        } else {
            self.returned.insert(event.header.tid, event);
        }
    }

    /// Finishes a stack. Returns it unless it stays in the stage: as a sample, which waits for its turn, or as the stack of a thread that
    /// has left its CPU, which waits for the thread's return.
    pub fn finish(&mut self, named: NamedStack) -> Option<Finished> {
        let NamedStack { header, cause, gc, comm, weight_ns, blocks, request_ns, span, stack } = named;
        let (stack, above) = self.mixed(&header, stack);
        let comm = self.comm(header.tgid, &comm);
        let of = match cause {
            Cause::GcStart => StackOf::Trigger,
            Cause::GvlWait => StackOf::Waiter,
            Cause::GvlHold => StackOf::Holder,
            Cause::Refill => StackOf::Refill,
            Cause::Malloc => StackOf::Malloc,
            Cause::OffCpu => {
                self.left(&header, (gc, span), stack);
                return None;
            }
            Cause::CpuClock if weight_ns == 0 => {
                self.counts.gvl_blockers += 1;
                StackOf::Blocker
            }
            Cause::CpuClock => {
                self.ready.push_back(ReadySample {
                    pid: header.tgid,
                    image: header.image,
                    request_ns,
                    sample: StackSample {
                        ts_ns: header.ts_ns,
                        tid: header.tid,
                        comm: Arc::clone(&comm),
                        state: ThreadState::Running,
                        cpu_ns: weight_ns,
                        wall_ns: weight_ns,
                        gc,
                        request: None,
                        span,
                        stack: stack.clone(),
                    },
                });
                if !blocks {
                    return None;
                }
                StackOf::Blocker
            }
        };
        let (pid, tid, ts_ns) = (header.tgid, header.tid, header.ts_ns);
        Some(Finished { of, pid, tid, comm, ts_ns, request_ns, span, weight: weight_ns, above, stack })
    }

    /// Stores the stack of a thread that left its CPU.
    fn left(&mut self, header: &Header, (gc, span): (GcActivity, Option<Span>), stack: Stack) {
        let away = Away { pid: header.tgid, begin_ns: header.ts_ns, gc, span, stack };
        if self.away.len() >= MAX_AWAY as usize {
            self.forget_oldest();
        }
        // The thread returned so soon from its previous absence that it is not reported.
        self.counts.off_cpu_unused += u64::from(self.away.insert(header.tid, away).is_some());
        let its = |event: &OffCpuEvent| event.header.tgid == header.tgid && event.begin_ns == header.ts_ns;
        if self.returned.get(&header.tid).is_some_and(its)
            && let Some(event) = self.returned.remove(&header.tid)
        {
            self.back(&event);
        }
    }

    /// Forgets the older half of the stacks of off-CPU threads. Those of threads that ended after an absence too short to be
    /// reported are never claimed.
    fn forget_oldest(&mut self) {
        let mut begins: Vec<u64> = self.away.values().map(|away| away.begin_ns).collect();
        let middle = begins.len() / 2;
        let (_, &mut middle, _) = begins.select_nth_unstable(middle);
        let before = self.away.len();
        self.away.retain(|_, away| away.begin_ns > middle);
        self.counts.off_cpu_unused += (before - self.away.len()) as u64;
    }

    /// Turns the off-CPU time of a returned thread into one sample per state, such as a wait and the time it was runnable.
    fn back(&mut self, event: &OffCpuEvent) {
        let counts = &mut self.counts;
        let header = &event.header;
        let away = self.away.remove(&header.tid);
        let claimed = away.filter(|away| {
            let its = away.pid == header.tgid && away.begin_ns == event.begin_ns;
            counts.off_cpu_unused += u64::from(!its);
            its
        });
        let taken = claimed.is_some();
        counts.off_cpu_stacks += u64::from(taken);
        counts.off_cpu_without_stack += u64::from(!taken);
        let (gc, span, stack) = match claimed {
            Some(away) => (away.gc, away.span, away.stack),
            None => (GcActivity::None, None, self.frames.not_taken.clone()),
        };
        let end = header.ts_ns.max(event.begin_ns);
        counts.off_cpu_ns += end - event.begin_ns;
        counts.off_cpu_ns_without_stack += if taken { 0 } else { end - event.begin_ns };
        let comm = self.comm(header.tgid, &event.comm);
        for sample in off_cpu(event, end, &comm, (gc, span, stack)) {
            self.counts.off_cpu_samples += 1;
            let (pid, image, request_ns) = (header.tgid, header.image, event.request_ns);
            self.ready.push_back(ReadySample { pid, image, request_ns, sample });
        }
    }

    /// The samples of a thread that is still off its CPU, up to now: those that it would have if it returned now, without being counted. Empty if its
    /// stack is unknown.
    pub fn away_so_far(&mut self, tid: u32, entry: &AwayEntry, gvl_ns: u64, now_ns: u64) -> Vec<StackSample> {
        let event = still(tid, entry, gvl_ns, now_ns);
        let comm = self.comm(entry.tgid, &entry.comm);
        let its = |away: &&Away| (away.pid, away.begin_ns) == (entry.tgid, entry.begin_ns);
        let Some(away) = self.away.get(&tid).filter(its) else { return Vec::new() };
        let how = (away.gc, away.span, away.stack.clone());
        off_cpu(&event, now_ns.max(entry.begin_ns), &comm, how).collect()
    }

    /// Adds the stack of a thread that was asleep when its process was found.
    pub fn sleeper(&self, sleeper: &Sleeper, walked: &Walked) {
        if let Some(reader) = &self.reader {
            reader.sleeper(sleeper, walked);
        }
    }

    /// Handles a thread that is off its CPU when tracing ends. `gvl_ns`: as in an [`OffCpuEvent`].
    pub fn still_away(&mut self, tid: u32, entry: &AwayEntry, gvl_ns: u64, now_ns: u64) {
        self.back(&still(tid, entry, gvl_ns, now_ns));
    }

    /// Handles returned threads whose stacks will not arrive any more: those of a process, or all.
    pub fn stacks_are_lost(&mut self, of: Option<u32>) {
        let lost: Vec<u32> = self
            .returned
            .iter()
            .filter(|(_, event)| of.is_none_or(|pid| pid == event.header.tgid))
            .map(|(tid, _)| *tid)
            .collect();
        for tid in lost {
            if let Some(event) = self.returned.remove(&tid) {
                self.back(&event);
            }
        }
    }

    /// Whether the stack of the thread's absence that began at `begin_ns` is known.
    pub fn knows(&self, tid: u32, begin_ns: u64) -> bool {
        self.away.get(&tid).is_some_and(|away| away.begin_ns == begin_ns)
    }

    /// Keeps a trigger whose cycle is not open yet.
    pub fn keep_trigger(&mut self, pid: u32, ts_ns: u64, stack: Stack, span: Option<Span>) {
        if self.triggers.len() >= MAX_TRIGGERS {
            self.triggers.pop_front();
            self.counts.triggers_unclaimed += 1;
        }
        self.triggers.push_back(Trigger { pid, ts_ns, stack, span });
    }

    /// Removes and returns the trigger of the cycle whose snapshot was taken at that time.
    pub fn take_trigger(&mut self, pid: u32, ts_ns: u64) -> Option<Trigger> {
        let at = self.triggers.iter().position(|trigger| (trigger.pid, trigger.ts_ns) == (pid, ts_ns))?;
        self.triggers.remove(at)
    }

    /// Takes the samples of a process up to a time, in record order; `None`: those of all processes.
    pub fn take_ready(&mut self, of: Option<(u32, u64)>) -> Vec<ReadySample> {
        let Some((pid, ts_ns)) = of else { return self.ready.drain(..).collect() };
        let (taken, kept) = self.ready.drain(..).partition(|r| r.pid == pid && r.sample.ts_ns <= ts_ns);
        self.ready = kept;
        let taken: VecDeque<ReadySample> = taken;
        taken.into()
    }

    /// Forgets a process that is gone or has become another program.
    pub fn forget(&mut self, pid: u32) {
        self.comms.remove(&pid);
        if let Some(reader) = &self.reader {
            reader.forget(pid);
        }
        // If the pid lives on, its code is read again.
        if let Some(native) = &mut self.native {
            native.exited(pid);
        }
        let before = self.triggers.len();
        self.triggers.retain(|trigger| trigger.pid != pid);
        self.counts.triggers_unclaimed += (before - self.triggers.len()) as u64;
        let before = self.away.len();
        self.away.retain(|_, away| away.pid != pid);
        self.counts.off_cpu_unused += (before - self.away.len()) as u64;
    }

    /// Records that a process replaced its program at that time.
    pub fn execed(&mut self, pid: u32, ts_ns: u64) {
        if let Some(native) = &mut self.native {
            native.execed(pid, ts_ns);
        }
    }

    /// Adds its counts.
    pub fn add_counts(&self, counts: &mut UserCounts) {
        counts.stacks.add(&self.counts);
        if let Some(native) = &self.native {
            native.add_counts(counts);
        }
    }

    /// Ends the run: unclaimed triggers are counted.
    pub fn close(&mut self) {
        self.counts.triggers_unclaimed += self.triggers.len() as u64;
        self.triggers.clear();
        if let Some(reader) = &self.reader {
            reader.finish(&mut self.counts);
        }
        self.counts.off_cpu_unused += self.away.len() as u64;
        self.away.clear();
    }

    /// Names kernel and native frames and puts all frames in order. The second result is [`Finished::above`].
    fn mixed(&mut self, header: &Header, stack: Unmixed) -> (Stack, Vec<Arc<Frame>>) {
        let Unmixed { bias, cut, kernel, native, gc, groups, missing } = stack;
        let mut frames = self.kernel.stack(&kernel);
        if header.point == Cause::OffCpu as u32 {
            // The program that takes the stack is called after the context switch: drop the frames of tracing itself.
            let own = frames.iter().take_while(|frame| is_of_tracing(&frame.name)).count();
            frames.drain(..own);
        }
        let mut leaf = Vec::new();
        if let (Some((end, addresses)), Some(namer)) = (native, &mut self.native) {
            let native = namer.stack(header.tgid, header.ts_ns, bias, &addresses);
            if header.point == Cause::Malloc as u32 {
                let above = native.iter().take_while(|native| !native.interpreter);
                leaf.extend(above.map(|native| native.frame.clone()));
            }
            let end = if cut && end == NativeEnd::Complete { NativeEnd::Truncated } else { end };
            match mix(&native, end, &gc, &groups, &mut self.without_line, &mut frames) {
                Mixed::InOrder => self.counts.natives_mixed += 1,
                Mixed::Incomplete => *ended_early(end, &mut self.counts) += 1,
                Mixed::Unequal => self.counts.natives_unequal += 1,
                Mixed::NativeOnly => self.counts.natives_alone += 1,
            }
        } else {
            frames.extend(gc);
            frames.extend(groups.into_iter().flatten());
        }
        frames.extend(missing);
        (frames.into(), leaf)
    }

    fn comm(&mut self, pid: u32, comm: &[u8; 16]) -> Arc<str> {
        let comms = self.comms.entry(pid).or_default();
        // Programs may create numbered thread names without end.
        if comms.len() >= COMMS && !comms.contains_key(comm) {
            comms.clear();
        }
        comms.entry(*comm).or_insert_with(|| model::comm(comm).into()).clone()
    }
}

impl Default for Stacks {
    fn default() -> Self {
        Self::new(None, None)
    }
}

/// Maximum number of thread names remembered per process, so that samples share them; all are forgotten above it.
const COMMS: usize = 1024;

/// The states of a thread while it was off its CPU, in order, each with start and end: blocked or waiting, then waiting for the GVL if it
/// did, then runnable from `runnable` on. A part may be empty.
fn parts(event: &OffCpuEvent, runnable: u64, end: u64) -> [(ThreadState, u64, u64); 3] {
    let begin = event.begin_ns;
    let (state, gvl) = match event.gvl_ns {
        OffCpuEvent::GVL_UNKNOWN => (ThreadState::Blocked, runnable),
        OffCpuEvent::GVL_OTHER => (ThreadState::OtherWait, runnable),
        since => (ThreadState::OtherWait, since.clamp(begin, runnable)),
    };
    [(state, begin, gvl), (ThreadState::GvlWait, gvl, runnable), (ThreadState::Runnable, runnable, end)]
}

/// The event of a thread that is still off its CPU, as if it returned now.
fn still(tid: u32, entry: &AwayEntry, gvl_ns: u64, now_ns: u64) -> OffCpuEvent {
    let &AwayEntry { begin_ns, wakeup_ns, tgid, image, execs, why, comm, .. } = entry;
    let (kind, ts_ns) = (Kind::OffCpu as u32, now_ns);
    let header = Header { kind, point: why, tgid, tid, ts_ns, seq: 0, image, execs };
    // The start of its request is not read, because the end of the request would not be seen.
    OffCpuEvent { header, begin_ns, wakeup_ns, request_ns: 0, gvl_ns, comm }
}

/// The off-CPU time of a thread until `end`: one sample for each state.
fn off_cpu(
    event: &OffCpuEvent,
    end: u64,
    comm: &Arc<str>,
    (gc, span, stack): (GcActivity, Option<Span>, Stack),
) -> impl Iterator<Item = StackSample> {
    // Without a known wake-up, all of the time counts as blocked.
    let runnable = if event.wakeup_ns == 0 { end } else { event.wakeup_ns.clamp(event.begin_ns, end) };
    let (tid, comm) = (event.header.tid, Arc::clone(comm));
    let whole = parts(event, runnable, end).into_iter().filter(|(_, begin, end)| end > begin);
    whole.map(move |(state, begin, end)| StackSample {
        ts_ns: begin,
        tid,
        comm: Arc::clone(&comm),
        state,
        cpu_ns: 0,
        wall_ns: end - begin,
        gc,
        request: None,
        span,
        stack: stack.clone(),
    })
}

/// Whether a kernel function is part of tracing itself.
fn is_of_tracing(name: &str) -> bool {
    ["bpf_prog_", "bpf_trace_run", "__bpf_trace_", "__traceiter_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// The counter of walks that ended for this reason.
fn ended_early(end: NativeEnd, counts: &mut StackCounts) -> &mut u64 {
    match end {
        NativeEnd::NoTable => &mut counts.natives_no_table,
        NativeEnd::NoRow => &mut counts.natives_no_row,
        NativeEnd::Unsupported => &mut counts.natives_unsupported,
        NativeEnd::ReadFailed => &mut counts.natives_unreadable,
        NativeEnd::NoRegisters => &mut counts.natives_no_registers,
        NativeEnd::Complete | NativeEnd::Truncated => &mut counts.natives_truncated,
    }
}

#[cfg(test)]
mod tests {
    use super::{synthetic::synthetic_frame, *};
    use crate::model::stack::FrameKind;

    fn event(begin_ns: u64, wakeup_ns: u64, end_ns: u64, point: u32) -> OffCpuEvent {
        let header = Header {
            kind: Kind::OffCpu as u32,
            point,
            tgid: 1,
            tid: 2,
            ts_ns: end_ns,
            seq: 0,
            image: 0,
            execs: 0,
        };
        let gvl_ns = OffCpuEvent::GVL_UNKNOWN;
        OffCpuEvent {
            header,
            begin_ns,
            wakeup_ns,
            request_ns: 0,
            gvl_ns,
            comm: *b"worker\0\0\0\0\0\0\0\0\0\0",
        }
    }

    fn parts(stage: &mut Stacks) -> Vec<(ThreadState, u64, u64, bool)> {
        let named = |ready: ReadySample| {
            let sample = ready.sample;
            assert_eq!((ready.pid, sample.tid, &*sample.comm, sample.cpu_ns), (1, 2, "worker", 0));
            (sample.state, sample.ts_ns, sample.wall_ns, &*sample.stack[0].name == "taken")
        };
        stage.take_ready(None).into_iter().map(named).collect()
    }

    fn away(stage: &mut Stacks, begin_ns: u64) {
        let stack: Stack = [synthetic_frame(FrameKind::Ruby, "taken")].into();
        stage.away.insert(2, Away { span: None, pid: 1, begin_ns, gc: GcActivity::None, stack });
    }

    /// Off-CPU time is divided at the wake-up, adds up, and has the stack with which the thread left.
    #[test]
    fn off_the_cpu() {
        use ThreadState::{Blocked, Runnable};
        let mut stage = Stacks::default();
        away(&mut stage, 100);
        stage.back(&event(100, 170, 200, OffCpuEvent::BLOCKED));
        assert_eq!(parts(&mut stage), [(Blocked, 100, 70, true), (Runnable, 170, 30, true)]);
        away(&mut stage, 300);
        stage.back(&event(300, 300, 400, OffCpuEvent::PREEMPTED));
        assert_eq!(parts(&mut stage), [(Runnable, 300, 100, true)]);
        away(&mut stage, 500);
        stage.back(&event(500, 0, 600, OffCpuEvent::BLOCKED));
        assert_eq!(parts(&mut stage), [(Blocked, 500, 100, true)]);
        assert_eq!((stage.counts.off_cpu_stacks, stage.counts.off_cpu_samples), (3, 4));
    }

    /// A wait for the GVL may start before the thread leaves its CPU, or while it is off it, and ends when the thread becomes runnable.
    #[test]
    fn waits_for_the_gvl() {
        use ThreadState::{GvlWait, OtherWait, Runnable};
        let parts = |gvl_ns| {
            let mut stage = Stacks::default();
            away(&mut stage, 100);
            stage.back(&OffCpuEvent { gvl_ns, ..event(100, 170, 200, OffCpuEvent::BLOCKED) });
            parts(&mut stage).into_iter().map(|(state, begin, ns, _)| (state, begin, ns)).collect::<Vec<_>>()
        };
        let cpu = (Runnable, 170, 30);
        assert_eq!(parts(OffCpuEvent::GVL_OTHER), [(OtherWait, 100, 70), cpu]);
        assert_eq!(parts(90), [(GvlWait, 100, 70), cpu]);
        assert_eq!(parts(130), [(OtherWait, 100, 30), (GvlWait, 130, 40), cpu]);
        assert_eq!(parts(180), [(OtherWait, 100, 70), cpu]);
    }

    /// Off-CPU time without a stack is still reported; the stack of another absence does not replace it.
    #[test]
    fn stack_not_taken() {
        let mut stage = Stacks::default();
        away(&mut stage, 100);
        stage.back(&event(700, 0, 900, OffCpuEvent::BLOCKED));
        assert_eq!(parts(&mut stage), [(ThreadState::Blocked, 700, 200, false)]);
        assert_eq!((stage.counts.off_cpu_without_stack, stage.counts.off_cpu_unused), (1, 1));
        away(&mut stage, 1000);
        stage.forget(1);
        away(&mut stage, 1100);
        stage.close();
        assert_eq!(stage.counts.off_cpu_unused, 3);
    }
}
