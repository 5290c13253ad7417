//! Forks, execs and exits, merged by time with the GC records.

use gctrace_common::event::{Kind, LifeEvent};

use super::{BATCH, Pipeline, TracedProcess};
use crate::{
    bpf::{ExecReader, LifeRing},
    clock::{WallClock, monotonic_ns},
    decode::{self, Event},
    host::proc,
    model::{EndReason, Image},
};

/// Maximum number of parents that are remembered; all are forgotten above it.
const PARENTS: usize = 1 << 16;
/// Number of process ends that are remembered regardless of their age.
const ENDED: usize = 1 << 12;
/// Maximum expected delay of a record after it was written, in nanoseconds.
const LATE_NS: u64 = 10_000_000_000;
/// Maximum difference between the clocks of `/proc` and of records, in nanoseconds, apart from the rounding of the former.
const CLOCKS_NS: u64 = 1_000_000;
/// Maximum time that an end of a process, or of a request, waits for the last record of its process, in nanoseconds.
pub(super) const AWAIT_LAST_RECORD_NS: u64 = 1_000_000_000;

impl Pipeline {
    /// Sets the clock of the run.
    #[must_use]
    pub fn on_clock(self, clock: WallClock) -> Self {
        Self { clock, ..self }
    }

    /// Sets the reader of the times at which processes started their programs.
    #[must_use]
    pub fn with_execs(self, programs: ExecReader) -> Self {
        Self { programs: Some(programs), ..self }
    }

    /// Reads the ring; its records are handled in their turn.
    pub fn take_lives(&mut self, ring: &mut LifeRing) {
        let Self { lives, counts, .. } = self;
        ring.drain(BATCH, |bytes| match decode::decode(bytes) {
            Ok(Event::Life(kind, event)) => {
                counts.decoded_lives += 1;
                lives.push_back((kind, event));
            }
            Ok(_) => counts.undecodable += 1,
            Err(error) => {
                counts.undecodable += 1;
                log::warn!("a lifecycle record could not be decoded: {error}");
            }
        });
    }

    pub(super) fn lives_until(&mut self, ts_ns: u64) {
        while let Some((kind, event)) = self.lives.front().copied()
            && event.header.ts_ns < ts_ns
        {
            self.next_life(kind, &event);
        }
    }

    /// Handles the pending lifecycle records once the GC ring has nothing more to read. That is also the case while a program is still
    /// filling a record, behind which there may be records of other processes: an end waits for the last record of its process, but not
    /// for one that the kernel lost.
    pub(super) fn lives_that_are_complete(&mut self) {
        let now = monotonic_ns();
        while let Some((kind, event)) = self.lives.front().copied()
            && (self.all_have_come(kind, &event)
                || now.saturating_sub(event.header.ts_ns) > AWAIT_LAST_RECORD_NS)
        {
            self.next_life(kind, &event);
        }
    }

    /// Handles the first pending record, and the records that wait for it.
    fn next_life(&mut self, kind: Kind, event: &LifeEvent) {
        self.lives.pop_front();
        self.life(kind, event);
        if kind == Kind::Exec {
            self.no_longer_early(event.header.tgid);
        }
    }

    /// Whether every GC record that the program emitted before this end has been handled.
    fn all_have_come(&self, kind: Kind, event: &LifeEvent) -> bool {
        let pid = event.header.tgid;
        if !matches!(kind, Kind::Exec | Kind::Exit) || self.refused.contains_key(&pid) {
            return true;
        }
        let came = self.traced.get(&pid).map(|traced| traced.fold.last_seq());
        came.or_else(|| self.waiting.get(&pid).map(|waiting| waiting.seq)).unwrap_or_default()
            >= event.header.seq
    }

    pub(super) fn life(&mut self, kind: Kind, event: &LifeEvent) {
        let reason = match kind {
            Kind::Exec => EndReason::Execed,
            Kind::Exit => EndReason::Exited,
            // A forked child is traced from its first GC event on, which identifies its image.
            _ => {
                // Without lost exits, the map does not grow this large.
                if self.parents.len() > PARENTS {
                    self.parents.clear();
                }
                self.parents.insert(event.other, (event.header.tgid, event.header.ts_ns));
                let count = match self.traced.get(&event.header.tgid) {
                    // If records of the parent are missing, its count is not the one that the child started with.
                    Some(parent) if parent.fold.last_seq() >= event.header.seq => parent.beginning.count,
                    // It has not collected since it was forked itself, as the middle process of a daemon that forks twice.
                    None if event.header.seq == 0 => self.beginnings.count_at_fork(event.header.tgid),
                    _ => None,
                };
                self.beginnings.forked(event.other, count);
                self.forked_while_traced(event, count);
                self.export(|exporter| {
                    exporter.forked(event.other);
                    Ok(())
                });
                return;
            }
        };
        if kind == Kind::Exec && self.is_new_program(event.header.tgid, event.header.ts_ns) {
            self.stacks.execed(event.header.tgid, event.header.ts_ns);
            self.execed(event.header.tgid, event.header.ts_ns);
            if !self.traced.contains_key(&event.header.tgid) {
                self.waited_in_vain(event);
                self.beginnings.execed(event.header.tgid);
                self.export(|exporter| {
                    exporter.left(event.header.tgid);
                    Ok(())
                });
            }
            // Nothing else removes what the old program's threads left in the kernel: the end of the new program only takes its own.
            if event.gvl != 0
                && let Some(read) = self.gvl.take_out(Some((event.header.tgid, event.header.execs)))
            {
                self.gvl.refuse(&read);
            }
            return;
        }
        self.stacks.stacks_are_lost(Some(event.header.tgid));
        self.report_stacks(Some((event.header.tgid, event.header.ts_ns)));
        self.stacks.forget(event.header.tgid);
        self.gvl_process(event);
        if kind == Kind::Exec {
            self.stacks.execed(event.header.tgid, event.header.ts_ns);
            self.execed(event.header.tgid, event.header.ts_ns);
        }
        if let Some(traced) = self.traced.get_mut(&event.header.tgid) {
            let gap = traced.fold.sequence_end(event.header.seq);
            traced.lost += gap;
            traced.begun_ns = Some(event.begun_ns).filter(|ns| *ns != 0);
            traced.since_ns = traced.since_ns.max(event.begun_ns);
            self.counts.lost_records += gap;
            if gap > 0 {
                self.units.lost(event.header.tgid, traced.last_ns, u64::MAX);
            } else {
                // This record has the number of the process's last GC record, and none is missing. The kernel had already forgotten that number
                // if it was asked for when requests of a killed process were taken.
                self.numbered.remove(&event.header.tgid);
            }
        }
        self.end(event.header.tgid, reason, event.header.ts_ns);
        self.export(|exporter| {
            exporter.left(event.header.tgid);
            Ok(())
        });
        if kind == Kind::Exit {
            self.ended(event.header.tgid, event.header.ts_ns);
            self.parents.remove(&event.header.tgid);
            self.execs.remove(&event.header.tgid);
            self.beginnings.exited(event.header.tgid);
        } else {
            self.beginnings.execed(event.header.tgid);
        }
        self.waited_in_vain(event);
        self.refused.remove(&event.header.tgid);
        self.left.remove(&event.header.tgid);
        // Another program with this pid is counted separately.
        self.counted.pids.remove(&event.header.tgid);
    }

    /// A program that only had pauses has ended: the next one of its process has none of them.
    fn waited_in_vain(&mut self, event: &LifeEvent) {
        let pid = event.header.tgid;
        if let Some(waiting) = self.waiting.remove(&pid)
            && !self.refused.contains_key(&pid)
        {
            self.counts.lost_records += waiting.lost + event.header.seq.saturating_sub(waiting.seq);
        }
    }

    /// Remembers when a process ended, while records of it may still arrive.
    fn ended(&mut self, pid: u32, ts_ns: u64) {
        if self.ended.len() > ENDED {
            self.ended.retain(|_, end_ns| ts_ns.saturating_sub(*end_ns) < LATE_NS);
        }
        self.ended.insert(pid, ts_ns);
    }

    /// Remembers when a process became another program.
    fn execed(&mut self, pid: u32, ts_ns: u64) {
        if self.execs.len() > PARENTS {
            self.execs.clear();
        }
        self.execs.insert(pid, ts_ns);
    }

    /// Whether a process had replaced its program by a time. The record of that exec may still be pending.
    pub(super) fn has_execed(&self, pid: u32, at_ns: u64) -> bool {
        let is_its = |(kind, event): &(Kind, LifeEvent)| {
            *kind == Kind::Exec && event.header.tgid == pid && event.header.ts_ns <= at_ns
        };
        self.execs.get(&pid).is_some_and(|execed_ns| *execed_ns <= at_ns) || self.lives.iter().any(is_its)
    }

    /// A child's first records in other rings may be handled before that of its fork, which says with which `GC.count` it began.
    fn forked_while_traced(&mut self, fork: &LifeEvent, count: Option<u64>) {
        let (child, forked_ns) = (fork.other, fork.header.ts_ns);
        let seen_ns = self.traced.get(&child).map(|traced| traced.seen_ns);
        let is_its = seen_ns.is_some_and(|seen_ns| seen_ns >= forked_ns && !self.has_execed(child, seen_ns));
        if let Some(traced) = self.traced.get_mut(&child).filter(|_| is_its) {
            traced.beginning.forked(count);
        }
    }

    /// The parent of a process, and when it forked this one, by a time. The record of that fork may still be pending.
    pub(super) fn fork_of(&self, pid: u32, at_ns: u64) -> Option<(u32, u64)> {
        let of_it = |(kind, event): &&(Kind, LifeEvent)| {
            *kind == Kind::Fork && event.other == pid && event.header.ts_ns <= at_ns
        };
        let pending = self.lives.iter().rev().find(of_it);
        let pending = pending.map(|(_, event)| (event.header.tgid, event.header.ts_ns));
        pending.or_else(|| self.parents.get(&pid).copied())
    }

    /// The process that forked this one, if the kernel has reported that. Once it has ended, `/proc` names another parent, usually pid 1.
    pub(super) fn forked_by(&self, pid: u32, at_ns: u64) -> Option<u32> {
        let (parent, forked_ns) = self.fork_of(pid, at_ns)?;
        // If the end of a process was lost, another one may have its pid by now.
        let is_other = proc::started_ns(pid).is_some_and(|ns| ns > forked_ns.saturating_add(CLOCKS_NS));
        (!is_other).then_some(parent)
    }

    /// The parent of a process, if the process was still running its parent's program at that time.
    pub(super) fn forking_parent(&self, pid: u32, image: &Image, at_ns: u64) -> Option<&TracedProcess> {
        if self.has_execed(pid, at_ns) {
            return None;
        }
        let (forked_from, forked_ns) = self.fork_of(pid, at_ns)?;
        let parent = self.traced.get(&forked_from)?;
        let same = parent.process.image.index == image.index && forked_ns <= at_ns;
        // The parent itself may have replaced its program since the fork.
        (same && self.execs.get(&forked_from).is_none_or(|execed_ns| *execed_ns < forked_ns))
            .then_some(parent)
    }

    /// Whether the known state of a process is that of the program started by the exec at this time, or the process is unknown: records of
    /// other rings may arrive before that of the exec.
    fn is_new_program(&self, pid: u32, exec_ns: u64) -> bool {
        self.traced.get(&pid).map_or(!self.refused.contains_key(&pid), |traced| traced.seen_ns > exec_ns)
    }
}
