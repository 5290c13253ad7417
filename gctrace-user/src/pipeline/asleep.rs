//! Threads that are off their CPU when their process is found, and those that still are when tracing ends.
//!
//! The kernel side sees a thread when it leaves its CPU, so a thread that sleeps all the time would never be seen. Such threads are
//! entered when their process is found: their context switch counts prove that they slept while their stacks were
//! read, and after that the kernel side treats them like any other thread.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use gctrace_common::{
    config::{AwayEntry, RubyEntry},
    stack::{OffCpuEvent, StackEvent},
};

use super::{Pipeline, TracedProcess};
use crate::{
    bpf::AwayMap,
    clock::monotonic_ns,
    host::{
        mem::ProcessMemory,
        tasks::{self, Task},
    },
    ruby::threads::{RubyThread, ThreadsLayout, Walked},
    stacks::Sleeper,
};

/// Maximum number of attempts to read a list of threads that is changing.
const LIST_TRIES: u32 = 3;

/// State of off-CPU threads.
pub(super) struct Asleep {
    map: AwayMap,
    /// Threads that may have been running again when they were entered, and the start of the off-CPU time in that entry. The kernel side
    /// replaces the entry when such a thread leaves its CPU; until then the entry does not count as off-CPU time.
    doubtful: HashSet<(u32, u64)>,
}

/// Forgets doubtful entries that have been replaced or removed. `begin_ns`: the start of the off-CPU time in the current entry of a thread.
fn forget_replaced(doubtful: &mut HashSet<(u32, u64)>, begin_ns: impl Fn(u32) -> Option<u64>) {
    doubtful.retain(|(tid, entered_ns)| begin_ns(*tid) == Some(*entered_ns));
}

impl Asleep {
    pub(super) fn new(map: AwayMap) -> Self {
        Self { map, doubtful: HashSet::new() }
    }
}

/// What is needed to read the threads of a process.
struct Reading<'a> {
    layout: &'a ThreadsLayout,
    memory: ProcessMemory,
    threads: Vec<RubyThread>,
}

impl<'a> Reading<'a> {
    fn of(layout: &'a ThreadsLayout, pid: u32, bias: u64) -> Option<Self> {
        let memory = ProcessMemory::open(pid).ok()?;
        let threads = (0..LIST_TRIES).find_map(|_| layout.threads(&memory, bias))?;
        Some(Self { layout, memory, threads })
    }

    /// The stack of a native thread; none if two Ruby threads claim it.
    fn walk(&self, task: Task) -> Walked {
        let mut claims = self.threads.iter().filter(|thread| thread.tid == task.own_tid);
        match (claims.next(), claims.next()) {
            (Some(&thread), None) => self.layout.walk(&self.memory, thread),
            (None, _) => Walked { flags: StackEvent::NO_CONTEXT, ..Walked::default() },
            (Some(_), Some(_)) => Walked { flags: StackEvent::BAD_CONTEXT, ..Walked::default() },
        }
    }
}

/// The stack of a native thread, or the reason why it is missing.
fn walked(reading: Option<&Reading<'_>>, task: Task) -> Walked {
    let unreadable = || Walked { flags: StackEvent::NO_LAYOUT, ..Walked::default() };
    reading.map_or_else(unreadable, |reading| reading.walk(task))
}

impl Pipeline {
    /// Enters the sleeping threads of a process that was found, with their stacks.
    pub fn find_sleepers(&mut self, pid: u32) {
        let Some(ruby) = self.asleep.as_ref().and_then(|asleep| asleep.map.ruby(pid)) else { return };
        let Some(known) = self.images.get(ruby.image) else { return };
        let tids = match tasks::tids(pid) {
            Ok(tids) => tids,
            Err(error) => return log::debug!("the threads of pid {pid}: {error}"),
        };
        if let Some(Asleep { map, doubtful }) = &mut self.asleep {
            forget_replaced(doubtful, |tid| Some(map.get(tid)?.begin_ns));
        }
        let reading = known.threads.as_deref().and_then(|layout| Reading::of(layout, pid, ruby.bias));
        for tid in tids {
            self.find_sleeper(pid, tid, &ruby, reading.as_ref());
        }
    }

    fn find_sleeper(&mut self, pid: u32, tid: u32, ruby: &RubyEntry, reading: Option<&Reading<'_>>) {
        let Some(asleep) = &mut self.asleep else { return };
        let Some(task) = Task::look(pid, tid).filter(|task| task.asleep && !asleep.map.has(tid)) else {
            return;
        };
        let begin_ns = monotonic_ns();
        let walked = walked(reading, task);
        // A thread that has run meanwhile will be seen when it leaves its CPU.
        if !task.still_sleeps(pid) {
            return;
        }
        let away = AwayEntry {
            begin_ns,
            wakeup_ns: 0,
            tgid: pid,
            image: ruby.image,
            execs: ruby.execs,
            why: OffCpuEvent::BLOCKED,
            thread: 0,
            comm: tasks::comm(pid, tid),
        };
        // The stack must be stored before the thread can return.
        self.stacks.sleeper(&Sleeper { ruby: *ruby, away, tid }, &walked);
        match asleep.map.enter(tid, &away) {
            Ok(true) if task.still_sleeps(pid) => self.counts.sleepers += 1,
            Ok(true) => {
                asleep.doubtful.insert((tid, begin_ns));
            }
            Ok(false) => {}
            Err(error) => {
                log::warn!("thread {tid} of pid {pid}, which is off its CPU, is not watched: {error}");
            }
        }
    }

    /// Before outputs are read: reads the missing stacks of off-CPU threads, where stacks are otherwise taken when threads return. Returns
    /// whether threads that have been off their CPU for at least `min` can run at any moment: their stacks are known once they have run.
    pub fn read_sleepers(&mut self, min: Duration) -> bool {
        let Some(asleep) = &self.asleep else { return false };
        let mut some_return = false;
        let mut by_process: HashMap<u32, Vec<(u32, AwayEntry)>> = HashMap::new();
        let now_ns = monotonic_ns();
        for (tid, away) in asleep.map.read() {
            let ns = now_ns.saturating_sub(away.begin_ns);
            if u128::from(ns) >= min.as_nanos() && !self.stacks.knows(tid, away.begin_ns) {
                by_process.entry(away.tgid).or_default().push((tid, away));
            }
        }
        for (pid, threads) in by_process {
            let Some(ruby) = asleep.map.ruby(pid) else { continue };
            let known = self.images.get(ruby.image);
            let layout = known.as_ref().and_then(|known| known.threads.as_deref());
            let reading = layout.and_then(|layout| Reading::of(layout, pid, ruby.bias));
            for (tid, away) in threads {
                // A thread that has ended has no stack.
                let Some(task) = Task::look(pid, tid) else { continue };
                let walked = task.asleep.then(|| walked(reading.as_ref(), task));
                match walked.filter(|_| task.still_sleeps(pid)) {
                    // If its entry is unchanged, the thread has not returned in between.
                    Some(walked) if asleep.map.get(tid).is_some_and(|now| now.begin_ns == away.begin_ns) => {
                        self.stacks.sleeper(&Sleeper { ruby, away, tid }, &walked);
                    }
                    _ => some_return = true,
                }
            }
        }
        some_return
    }

    /// The threads that are off their CPU now. Records of threads that returned before are in the ring.
    pub fn away_now(&self) -> BTreeMap<u32, AwayEntry> {
        let Some(asleep) = &self.asleep else { return BTreeMap::new() };
        let mut away = asleep.map.read();
        // Some threads may have returned while others were read.
        away.retain(|tid, entry| asleep.map.get(*tid).is_some_and(|now| now.begin_ns == entry.begin_ns));
        away
    }

    /// Passes off-CPU times of at least `min` that are still in progress to the outputs that are about to be read. A thread whose
    /// record has arrived since [`Self::away_now`] is reported by that record.
    pub fn away_so_far(&mut self, away: BTreeMap<u32, AwayEntry>, now_ns: u64, min: Duration) {
        let Some(asleep) = &self.asleep else { return };
        let mut open = Vec::new();
        for (tid, entry) in away {
            let its = |traced: &&TracedProcess| traced.process.image.index == entry.image;
            let Some(traced) = self.traced.get(&entry.tgid).filter(its) else { continue };
            if u128::from(now_ns.saturating_sub(entry.begin_ns)) < min.as_nanos().max(1)
                || asleep.doubtful.contains(&(tid, entry.begin_ns))
            {
                continue;
            }
            let gvl_ns = self.gvl.waits_since(tid);
            let samples = self.stacks.away_so_far(tid, &entry, gvl_ns, now_ns);
            open.extend(samples.into_iter().map(|sample| (traced.process.clone(), sample)));
        }
        self.outputs.tell(|exporter| exporter.off_cpu_so_far(&open));
    }

    /// Tracing ended at `now_ns`: reports threads that are still off their CPU, if they have been for at least `min`.
    pub fn still_away(&mut self, now_ns: u64, min: Duration) {
        let Some(asleep) = self.asleep.take() else { return };
        self.outputs.tell(|exporter| exporter.off_cpu_so_far(&[]));
        // The stacks of the last sleepers may not have been taken yet.
        self.take_stacks();
        self.stacks.stacks_are_lost(None);
        for (tid, entry) in asleep.map.read() {
            let its = |traced: &TracedProcess| traced.process.image.index == entry.image;
            if u128::from(now_ns.saturating_sub(entry.begin_ns)) >= min.as_nanos().max(1)
                && self.traced.get(&entry.tgid).is_some_and(its)
                && !asleep.doubtful.contains(&(tid, entry.begin_ns))
            {
                self.counts.off_cpu_still += 1;
                let gvl_ns = self.gvl.waits_since(tid);
                self.stacks.still_away(tid, &entry, gvl_ns, now_ns);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A doubtful entry is remembered only as long as the kernel side's map has it.
    #[test]
    fn replaced() {
        let mut doubtful = HashSet::from([(1, 10), (2, 20), (3, 30)]);
        forget_replaced(&mut doubtful, |tid| match tid {
            1 => Some(10),
            2 => Some(21),
            _ => None,
        });
        assert_eq!(doubtful, HashSet::from([(1, 10)]));
    }
}
