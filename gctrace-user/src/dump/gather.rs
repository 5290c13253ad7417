//! Reads the threads of one process without stopping it.
//!
//! The stack of a sleeping thread is exact: the counts of its context switches show that it has not run meanwhile. The stack of a
//! running thread is read until two consecutive reads agree.
//!
//! Ruby threads may change their native threads meanwhile (M:N). A Ruby thread is shown at a native thread only if it is still there after
//! it was read; Ruby threads that are not shown after that are searched again.

use std::collections::{HashMap, HashSet};

use gctrace_common::stack::{NativeEnd, StackEvent};

use super::found::{Dump, Gvl, LockWait, NativeRead, NativeSide, RubySide, StackRead, Thread, circles};
use crate::{
    aggregate::mix::{Mixed, WithoutLine, mix},
    discover::{ProcessFound, objspace_of},
    host::{
        doing::{self, Doing},
        last_run::{self, LastRun},
        mem::ProcessMemory,
        tasks::{self, Task},
    },
    model::stack::{Frame, FrameKind},
    native::Sleepers,
    ruby::{
        frames::{Leaf, Memory as _, Namer},
        live_check,
        plan::AttachPlan,
        threads::{Agreed, RubyThread, ThreadState, ThreadsLayout, Walked, loops},
    },
};

/// Maximum number of reads of the list of threads if it changes meanwhile.
const LIST_TRIES: u32 = 3;
/// Maximum number of searches for Ruby threads that have changed their native threads.
const MOVED_TRIES: u32 = 3;
/// Maximum number of reads of a thread that sleeps, but wakes meanwhile.
const SLEEP_TRIES: u32 = 4;
/// Maximum number of reads of the stack of a running thread.
const RUN_TRIES: u32 = 200;
/// Each process is read only once, so nothing is cached from one GC to the next.
const EPOCH: u64 = 0;

/// What is needed to read a process.
pub(super) struct Subject<'a> {
    pub(super) process: &'a ProcessFound,
    pub(super) plan: &'a AttachPlan,
    pub(super) bias: u64,
    /// What to read in addition.
    pub(super) wanted: Wanted,
}

/// What is read on request only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Native stacks.
    pub(super) native: bool,
    /// How long threads have not run, which takes a moment on each CPU that they ran on last.
    pub(super) not_run: bool,
}

/// Addresses of a native stack, and how its walk ended.
type NativeWalk = (Vec<u64>, NativeEnd);

/// A thread, and its relations to others if it is a Ruby thread.
type Entry = (Thread, Option<Reading>);

/// A Ruby thread while its process is being read.
#[derive(Default)]
struct Reading {
    address: u64,
    state: Option<ThreadState>,
    waits: bool,
    /// Its task as seen asleep, if it slept.
    slept: Option<Task>,
    /// Its native stack at that time.
    native: Option<NativeWalk>,
}

/// Reads all threads.
///
/// # Errors
///
/// The process is gone, or its memory cannot be read.
pub(super) fn gather(subject: &Subject<'_>) -> std::io::Result<Dump> {
    let pid = subject.process.pid;
    let memory = ProcessMemory::open(pid)?;
    let tids = tasks::tids(pid)?;
    let cpu: HashMap<u32, u64> =
        tids.iter().filter_map(|&tid| Some((tid, doing::cpu_ns(pid, tid)?))).collect();
    let before = collecting(subject, &memory);
    let mut reader = Reader::new(subject, memory);
    let mut found: Vec<Entry> = tids.iter().filter_map(|&tid| reader.thread(pid, tid)).collect();
    reader.find_others(pid, &mut found);
    found.sort_by_key(|(thread, _)| {
        let ruby = thread.ruby.as_ref();
        (ruby.is_none(), !ruby.is_some_and(|ruby| ruby.main), thread.tid)
    });
    let after = collecting(subject, &reader.memory);
    // CPU time that a thread used while the process was read shows that it ran.
    for (thread, _) in &mut found {
        let Some(tid) = thread.tid else { continue };
        let now = doing::cpu_ns(pid, tid);
        thread.cpu_ns = cpu.get(&tid).zip(now).map(|(first, last)| last.saturating_sub(*first));
    }
    let deadlocks = relate(pid, &mut found);
    if subject.wanted.not_run {
        let last: Vec<Option<LastRun>> = found.iter().map(|(thread, _)| thread.last_run).collect();
        for ((thread, _), ns) in found.iter_mut().zip(last_run::not_run(&last)) {
            thread.not_run_ns = ns.filter(|_| thread.state().is_asleep());
        }
    }
    Ok(Dump {
        pid,
        command: subject.process.command.clone(),
        ruby: subject.plan.analysis.version.to_string(),
        collecting: before.zip(after).filter(|(one, two)| one == two).map(|(one, _)| one),
        no_stacks: reader.no_stacks,
        threads: found.into_iter().map(|(thread, _)| thread).collect(),
        deadlocks,
    })
}

/// Whether the process is inside a GC pause; `None`: unknown.
fn collecting(subject: &Subject<'_>, memory: &ProcessMemory) -> Option<bool> {
    let read = |address: u64, buffer: &mut [u8]| memory.read(address, buffer);
    let (_, data) = objspace_of(read, subject.bias, subject.plan)?;
    let during_gc = 1 << subject.plan.analysis.vm.during_gc_bit;
    Some(!live_check::is_outside_gc(&subject.plan.layout, &data, during_gc))
}

/// Enters which thread holds what and waits for which thread; returns the circles of threads that have slept the whole time.
fn relate(pid: u32, found: &mut [Entry]) -> Vec<Vec<usize>> {
    let state = |reading: &Option<Reading>| reading.as_ref().and_then(|reading| reading.state.clone());
    let mut by_address = HashMap::new();
    let mut by_mutex = HashMap::new();
    for (at, (_, reading)) in found.iter().enumerate() {
        let Some(reading) = reading else { continue };
        by_address.insert(reading.address, at);
        for &mutex in reading.state.iter().flat_map(|state| state.locked.iter().flatten()) {
            by_mutex.insert(mutex, at);
        }
    }
    for (thread, reading) in found.iter_mut() {
        let (Some(ruby), Some(state)) = (&mut thread.ruby, state(reading)) else { continue };
        let address = reading.as_ref().map(|reading| reading.address);
        ruby.gvl = Some(Gvl {
            held: state.holder.is_some() && state.holder == address,
            waits: reading.as_ref().is_some_and(|reading| reading.waits),
            holder: state.holder.and_then(|holder| by_address.get(&holder).copied()),
        });
        ruby.wants = state.wanted.map(|mutex| LockWait { holder: by_mutex.get(&mutex).copied() });
        ruby.locks = state.locked.map(|locked| locked.len());
    }
    let sleeps = |at: usize| {
        let slept = found.get(at).and_then(|(_, reading)| reading.as_ref()?.slept);
        slept.is_some_and(|task| task.still_sleeps(pid))
    };
    let waits_for: Vec<Option<usize>> = found
        .iter()
        .enumerate()
        .map(|(at, (thread, _))| thread.ruby.as_ref()?.wants?.holder.filter(|_| sleeps(at)))
        .collect();
    circles(&waits_for)
}

/// The Ruby threads that are not in `found`.
fn not_shown(all: Vec<(u64, Option<u32>)>, found: &[Entry]) -> Vec<(u64, Option<u32>)> {
    let shown: HashSet<u64> =
        found.iter().filter_map(|(_, reading)| Some(reading.as_ref()?.address)).collect();
    all.into_iter().filter(|(address, _)| !shown.contains(address)).collect()
}

struct Reader<'a> {
    memory: ProcessMemory,
    bias: u64,
    layout: Option<&'a ThreadsLayout>,
    threads: Vec<RubyThread>,
    namer: Option<Namer<ProcessMemory>>,
    no_stacks: Option<String>,
    /// The mappings, if native stacks are requested; `Err` if they cannot be read.
    native: Option<std::io::Result<Sleepers>>,
}

impl<'a> Reader<'a> {
    fn new(subject: &Subject<'a>, memory: ProcessMemory) -> Self {
        let plan = subject.plan;
        let layout = plan.threads.as_deref();
        let threads = layout.and_then(|l| (0..LIST_TRIES).find_map(|_| l.threads(&memory, subject.bias)));
        let namer = plan.frames.as_ref().ok().and_then(|frames| {
            let memory = ProcessMemory::open(subject.process.pid).ok()?;
            Some(Namer::new(memory, frames.clone(), subject.bias))
        });
        let no_stacks = match (&plan.frames, &threads) {
            (Err(why), _) => Some(why.to_string()),
            (Ok(_), None) => {
                Some("the list of its threads cannot be read: the VM is being set up, or ends".to_owned())
            }
            _ => None,
        };
        let threads = threads.unwrap_or_default();
        let native = subject.wanted.native.then(|| Sleepers::read(subject.process.pid));
        Self { native, memory, bias: subject.bias, layout, threads, namer, no_stacks }
    }

    /// Reads a native thread; `None`: it is gone.
    fn thread(&mut self, pid: u32, tid: u32) -> Option<Entry> {
        let mut task = Task::look(pid, tid)?;
        let mut doing = Doing::look(pid, tid);
        let mut claims = self.threads.iter().filter(|thread| thread.tid == task.own_tid);
        // If two Ruby threads claim this native thread, they are in transition, and neither is shown at it.
        let ruby = claims.next().copied().filter(|_| claims.next().is_none());
        let read = self.layout.zip(ruby).map(|(layout, ruby)| {
            for _ in 0..SLEEP_TRIES {
                if let Some(read) = self.asleep(layout, ruby, pid, task, &doing) {
                    return Some(read);
                }
                let Some(next) = Task::look(pid, tid) else { break };
                (task, doing) = (next, Doing::look(pid, tid));
            }
            let read = self.awake(layout, ruby);
            self.is_at(layout, ruby).then_some(read)
        });
        let read = read.flatten();
        let last_run = LastRun::of(pid, task);
        let open_on = doing.call.and_then(|call| doing::open_on(pid, call.descriptor()?));
        let comm = tasks::comm(pid, tid);
        let comm = comm.split(|&byte| byte == 0).next().unwrap_or_default();
        let comm = String::from_utf8_lossy(comm).into_owned();
        let walked = match &read {
            Some((.., reading)) => reading.native.clone(),
            None => self.others(pid, task, &doing),
        };
        let native = self.native_side(read.as_ref().map(|(ruby, ..)| ruby), walked);
        let (ruby, reading) = read.map_or((None, None), |(walked, how, reading)| {
            (Some(self.side(&walked, how, &reading)), Some(reading))
        });
        let (tid, own_tid) = (Some(tid), Some(task.own_tid));
        let thread =
            Thread { tid, own_tid, comm, doing, open_on, last_run, ruby, native, ..Thread::default() };
        Some((thread, reading))
    }

    /// The native stack of a thread in a system call, if requested. The caller checks that the thread sleeps meanwhile.
    fn native_walk(&self, doing: &Doing) -> Option<NativeWalk> {
        let sleepers = self.native.as_ref()?.as_ref().ok()?;
        let Some(call) = doing.call else { return Some((Vec::new(), NativeEnd::NoRegisters)) };
        Some(sleepers.walk(&self.memory, call.sp, call.pc))
    }

    /// The native stack of a thread that is not a Ruby thread; `None`: it has run meanwhile.
    fn others(&self, pid: u32, mut task: Task, doing: &Doing) -> Option<NativeWalk> {
        let mut doing = doing.clone();
        for _ in 0..SLEEP_TRIES {
            let walked = if task.asleep { self.native_walk(&doing) } else { None };
            if task.still_sleeps(pid) {
                return walked;
            }
            task = Task::look(pid, task.tid)?;
            doing = Doing::look(pid, task.tid);
        }
        None
    }

    /// Symbolizes a native stack and merges it with the Ruby frames.
    fn native_side(&mut self, ruby: Option<&Walked>, walked: Option<NativeWalk>) -> Option<NativeSide> {
        let Ok(sleepers) = self.native.as_mut()? else {
            return Some(NativeSide { read: NativeRead::NoMappings, ..NativeSide::default() });
        };
        let Some((addresses, end)) = walked else { return Some(NativeSide::default()) };
        let native = sleepers.name(self.bias, &addresses);
        let mut groups = Vec::new();
        if let (Some(namer), Some(ruby)) = (&mut self.namer, ruby) {
            let mut leaf = Leaf::Runs;
            for frames in loops(&ruby.frames) {
                let mut group = Vec::new();
                namer.name(frames, EPOCH, std::mem::replace(&mut leaf, Leaf::Calls), &mut group);
                groups.push(group);
            }
        }
        let missing = ruby.and_then(|ruby| missing(ruby.flags));
        // A stack without its root end lacks interpreter loops, so that native and Ruby frames cannot be matched.
        let whole = if missing.is_some() { NativeEnd::Truncated } else { end };
        let mut frames = Vec::new();
        let mixed = mix(&native, whole, &[], &groups, &mut WithoutLine::default(), &mut frames);
        let read = match (mixed, end) {
            (Mixed::InOrder, _) | (Mixed::NativeOnly, NativeEnd::Complete) => NativeRead::InOrder,
            (_, NativeEnd::Complete) => NativeRead::LeafOnly,
            (_, end) => NativeRead::Cut(end),
        };
        frames.extend(missing);
        Some(NativeSide { frames, read })
    }

    /// Reads a sleeping thread; `None`: it does not sleep, or has run meanwhile.
    fn asleep(
        &self,
        layout: &ThreadsLayout,
        ruby: RubyThread,
        pid: u32,
        task: Task,
        doing: &Doing,
    ) -> Option<(Walked, StackRead, Reading)> {
        if !task.asleep {
            return None;
        }
        let walked = layout.walk(&self.memory, ruby);
        let state = layout.state(&self.memory, self.bias, ruby);
        let futex = doing.call.and_then(|call| call.futex());
        let waits = futex.and_then(|at| layout.waits_for_gvl(&self.memory, ruby, at)) == Some(true);
        let native = self.native_walk(doing);
        // A sleeping Ruby thread does not leave its native thread: if it is there now, it was there the whole time.
        if !self.is_at(layout, ruby) {
            return None;
        }
        let reading = Reading { address: ruby.address, state, waits, slept: Some(task), native };
        task.still_sleeps(pid).then_some((walked, StackRead::Slept, reading))
    }

    /// Reads a running thread.
    fn awake(&self, layout: &ThreadsLayout, ruby: RubyThread) -> (Walked, StackRead, Reading) {
        let (walked, agreed) = layout.walk_running(&self.memory, ruby, RUN_TRIES);
        let how = if agreed == Agreed::Whole { StackRead::Agreed } else { StackRead::RootOnly };
        let state = layout.state(&self.memory, self.bias, ruby);
        (walked, how, Reading { address: ruby.address, state, waits: false, slept: None, native: None })
    }

    /// Whether a Ruby thread is on its native thread now.
    fn is_at(&self, layout: &ThreadsLayout, ruby: RubyThread) -> bool {
        layout.native(&self.memory, ruby.address) == Some(ruby.tid)
    }

    /// All Ruby threads and their native threads.
    fn all(&self) -> Vec<(u64, Option<u32>)> {
        let all = self.layout.and_then(|l| (0..LIST_TRIES).find_map(|_| l.all(&self.memory, self.bias)));
        all.unwrap_or_default()
    }

    /// Adds Ruby threads that are on no native thread, or have moved to another one.
    fn find_others(&mut self, pid: u32, found: &mut Vec<Entry>) {
        let Some(layout) = self.layout else { return };
        for _ in 0..MOVED_TRIES {
            let others = not_shown(self.all(), found);
            let (on, off): (Vec<_>, Vec<_>) = others.into_iter().partition(|(_, tid)| tid.is_some());
            let mut stayed = on.is_empty();
            for (address, _) in off {
                let entry = self.off_threads(layout, address);
                let still_off = layout.native(&self.memory, address).is_none();
                found.extend(still_off.then_some(entry));
                stayed &= still_off;
            }
            if stayed {
                return;
            }
            self.threads =
                on.into_iter().filter_map(|(address, tid)| Some(RubyThread { address, tid: tid? })).collect();
            // The native thread may have had another Ruby thread or none, or may not have existed.
            for tid in tasks::tids(pid).unwrap_or_default() {
                let at = found.iter().position(|(thread, _)| thread.tid == Some(tid));
                if at.is_some_and(|at| found[at].1.is_some()) {
                    continue;
                }
                let own_tid = at.and_then(|at| found[at].0.own_tid);
                if own_tid.is_some_and(|own| !self.threads.iter().any(|ruby| ruby.tid == own)) {
                    continue;
                }
                match (at, self.thread(pid, tid).filter(|(_, reading)| reading.is_some())) {
                    (Some(at), Some(entry)) => found[at] = entry,
                    (None, Some(entry)) => found.push(entry),
                    (_, None) => {}
                }
            }
        }
        for (address, tid) in not_shown(self.all(), found) {
            let (thread, reading) = self.off_threads(layout, address);
            found.push((Thread { moved: tid.is_some(), ..thread }, reading));
        }
    }

    /// Reads a Ruby thread without its native thread.
    fn off_threads(&mut self, layout: &ThreadsLayout, address: u64) -> Entry {
        let (walked, how, reading) = self.awake(layout, RubyThread { address, tid: 0 });
        let ruby = Some(self.side(&walked, how, &reading));
        (Thread { ruby, ..Thread::default() }, Some(reading))
    }

    /// The state of a thread according to the VM.
    fn side(&mut self, walked: &Walked, read: StackRead, reading: &Reading) -> RubySide {
        let state = reading.state.as_ref();
        let mut frames = Vec::new();
        let mut name = None;
        if let Some(namer) = &mut self.namer {
            namer.name(&walked.frames, EPOCH, Leaf::Runs, &mut frames);
            name = state.and_then(|state| namer.text(state.name));
        }
        frames.extend(missing(walked.flags));
        let read = if frames.is_empty() { StackRead::None } else { read };
        let main = state.is_some_and(|state| state.main);
        RubySide { address: reading.address, name, main, frames, read, ..RubySide::default() }
    }
}

/// A frame that represents the missing root end.
fn missing(flags: u32) -> Option<std::sync::Arc<Frame>> {
    let name = match flags {
        0 => return None,
        _ if flags & StackEvent::TRUNCATED != 0 => "(truncated: the stack is deeper than gctrace reads)",
        _ if flags & StackEvent::BAD_CONTEXT != 0 => "(the thread starts or ends)",
        _ => "(unreadable)",
    };
    let kind = FrameKind::Missing;
    Some(Frame { kind, name: name.into(), file: None, line: 0, first_line: 0, address: 0 }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that was shown is not shown again, wherever it is by now; the others remain.
    #[test]
    fn others() {
        let entry = |address| (Thread::default(), Some(Reading { address, ..Reading::default() }));
        let found = [entry(1), (Thread::default(), None), entry(3)];
        let all = vec![(1, Some(70)), (2, Some(71)), (3, None), (4, None)];
        assert_eq!(not_shown(all, &found), [(2, Some(71)), (4, None)]);
    }
}
