//! Heap slots that threads take to allocate objects, summed up by process and by stack.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use gctrace_common::event::RefillEvent;

use super::Pipeline;
use crate::{
    ledger::AllocCounts,
    model::{
        seen::{AllocStack, AllocSum, Seen},
        stack::Stack,
        trace::Span,
    },
};

/// Maximum number of slot sizes of a process: CRuby has up to 12 (4.1). Records with further sizes are refused.
const MAX_SIZES: usize = 32;

/// Interval at which sums are reported.
const INTERVAL_NS: u64 = 1_000_000_000;

/// Maximum number of threads of a process whose last refill is remembered: it arrives just before its stack.
const MAX_LAST: usize = 4096;

/// Allocations of all processes.
#[derive(Default)]
pub(super) struct Allocs {
    pub(super) counts: AllocCounts,
    processes: HashMap<u32, Allocated>,
    /// When sums were last reported, in `CLOCK_MONOTONIC` nanoseconds.
    reported_ns: u64,
}

/// The data that belongs to an allocation stack.
pub(super) struct AllocOf {
    pub(super) comm: Arc<str>,
    pub(super) ts_ns: u64,
    pub(super) request: Option<u64>,
    pub(super) span: Option<Span>,
}

struct Allocated {
    /// Number of programs that the process had replaced.
    execs: u32,
    /// Sequence number of the last record.
    last: u64,
    /// Number of records received.
    came: u64,
    /// Number of lost records reported so far.
    lost: u64,
    /// Sum since the last report.
    sum: AllocSum,
    /// Slots of each size since the last stack of that size.
    pending: BTreeMap<u32, u64>,
    /// The last refill of each thread: its time and slot size.
    last_refill: HashMap<u32, (u64, u32)>,
}

impl Allocs {
    /// Adds a refill; `false`: it is refused.
    fn add(&mut self, event: &RefillEvent) -> bool {
        let header = &event.header;
        let fresh = || Allocated {
            execs: header.execs,
            last: 0,
            came: 0,
            lost: 0,
            sum: AllocSum { begin_ns: header.ts_ns, ..AllocSum::default() },
            pending: BTreeMap::new(),
            last_refill: HashMap::new(),
        };
        let allocated = self.processes.entry(header.tgid).or_insert_with(fresh);
        let known =
            allocated.sum.slots.len() < MAX_SIZES || allocated.sum.slots.contains_key(&event.slot_size);
        // Records from before an exec belong to another program, as do records of the new program before that of the exec.
        if header.execs != allocated.execs || !known {
            return false;
        }
        allocated.last = allocated.last.max(header.seq);
        allocated.came += 1;
        allocated.sum.refills += 1;
        *allocated.sum.slots.entry(event.slot_size).or_default() += u64::from(event.slots);
        *allocated.pending.entry(event.slot_size).or_default() += u64::from(event.slots);
        if allocated.last_refill.len() >= MAX_LAST {
            allocated.last_refill.clear();
        }
        allocated.last_refill.insert(header.tid, (header.ts_ns, event.slot_size));
        true
    }

    /// The slots that a stack represents, taken at a refill of this thread and time: their size and number. `None` if that refill is
    /// unknown.
    fn stand_for(&mut self, pid: u32, tid: u32, ts_ns: u64) -> Option<(u32, u64)> {
        let allocated = self.processes.get_mut(&pid)?;
        let (_, size) = allocated.last_refill.remove(&tid).filter(|(at, _)| *at == ts_ns)?;
        let slots = std::mem::take(allocated.pending.get_mut(&size)?);
        (slots > 0).then_some((size, slots))
    }

    /// Takes the slots of each size since the last stack of that size.
    fn without_stack(&mut self, pid: u32) -> BTreeMap<u32, u64> {
        self.processes
            .get_mut(&pid)
            .map(|allocated| std::mem::take(&mut allocated.pending))
            .unwrap_or_default()
    }

    /// Takes the sum since the last report.
    fn take(&mut self, pid: u32, now_ns: u64) -> Option<AllocSum> {
        let allocated = self.processes.get_mut(&pid)?;
        let lost = allocated.last.saturating_sub(allocated.came);
        let mut sum = std::mem::take(&mut allocated.sum);
        (sum.end_ns, sum.lost) = (now_ns.max(sum.begin_ns), lost.saturating_sub(allocated.lost));
        allocated.sum.begin_ns = sum.end_ns;
        allocated.lost = allocated.lost.max(lost);
        (sum.refills > 0 || sum.lost > 0).then_some(sum)
    }

    /// Forgets a process that is gone or has become another program.
    pub(super) fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }
}

impl Pipeline {
    /// Handles a refill: a thread took free slots.
    pub(super) fn refill(&mut self, event: &RefillEvent) {
        let header = &event.header;
        let its = self.is_traced(header.tgid, header.image, "", header.ts_ns);
        if its && self.allocs.add(event) {
            self.allocs.counts.refills += 1;
        } else {
            self.allocs.counts.refused_refills += 1;
        }
    }

    /// Handles a stack that was taken at the refill of that time.
    pub(super) fn refill_stack(&mut self, pid: u32, tid: u32, of: AllocOf, stack: Stack) {
        let AllocOf { comm, ts_ns, request, span } = of;
        let process = self.traced.get(&pid).map(|traced| traced.process.clone());
        let (Some(process), Some((slot_size, slots))) = (process, self.allocs.stand_for(pid, tid, ts_ns))
        else {
            self.allocs.counts.alloc_stacks_unclaimed += 1;
            return;
        };
        self.allocs.counts.alloc_stacks += 1;
        let alloc = AllocStack { ts_ns, tid, comm, slot_size, slots, request, span, stack };
        self.see(&process, Seen::AllocStack(&alloc));
    }

    /// Reports the slots that a process took after its last stacks; their threads are unknown.
    pub(super) fn report_allocs_without_stack(&mut self, pid: u32, ts_ns: u64) {
        let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else { return };
        for (slot_size, slots) in self.allocs.without_stack(pid).into_iter().filter(|(_, slots)| *slots > 0) {
            let comm = Arc::from("(any thread)");
            let (request, span, stack) = (None, None, Stack::default());
            let alloc = AllocStack { ts_ns, tid: 0, comm, slot_size, slots, request, span, stack };
            self.see(&process, Seen::AllocStack(&alloc));
        }
    }

    /// Reports the sums of all processes, if the interval has passed.
    pub(super) fn report_allocs(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.allocs.reported_ns) < INTERVAL_NS {
            return;
        }
        self.allocs.reported_ns = now_ns;
        let mut pids: Vec<u32> = self.allocs.processes.keys().copied().collect();
        pids.sort_unstable();
        for pid in pids {
            self.report_alloc(pid, now_ns);
        }
    }

    /// Reports the sum of one process.
    pub(super) fn report_alloc(&mut self, pid: u32, now_ns: u64) {
        let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else { return };
        if let Some(sum) = self.allocs.take(pid, now_ns) {
            self.see(&process, Seen::Alloc(&sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use gctrace_common::event::{Header, Kind};

    use super::*;

    fn event(seq: u64, slots: u32, slot_size: u32, execs: u32) -> RefillEvent {
        let kind = Kind::Refill as u32;
        let header = Header { kind, point: 0, tgid: 7, tid: 7, ts_ns: 100 + seq, seq, image: 0, execs };
        RefillEvent { header, slots, slot_size }
    }

    /// Each sum covers one interval, in whatever order the records arrive; a gap in their numbers is reported once; records of another program
    /// and garbage are refused.
    #[test]
    fn sums() {
        let mut allocs = Allocs::default();
        assert!(allocs.take(7, 100).is_none());
        assert!([event(1, 10, 40, 0), event(4, 5, 80, 0), event(3, 1, 40, 0)].iter().all(|e| allocs.add(e)));
        assert!(!allocs.add(&event(1, 9, 40, 1)));
        let sum = allocs.take(7, 200).unwrap();
        assert_eq!((sum.objects(), sum.bytes(), sum.refills, sum.lost), (16, 840, 3, 1));
        assert_eq!((sum.begin_ns, sum.end_ns), (101, 200));
        assert!(allocs.take(7, 300).is_none());
        let garbage = (0..1000).filter(|size| allocs.add(&event(5 + u64::from(*size), u32::MAX, *size, 0)));
        assert_eq!(garbage.count(), MAX_SIZES);
    }
}
