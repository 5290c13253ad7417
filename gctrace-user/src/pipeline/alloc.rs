//! What threads take of the heap to allocate objects, added up by process.

use std::collections::HashMap;

use gctrace_common::event::RefillEvent;

use super::Pipeline;
use crate::model::seen::{AllocSum, Seen};

/// Sizes that slots of a process can have: CRuby has up to 12 (4.1). A record with another one is refused.
const MAX_SIZES: usize = 32;

/// How often sums are reported.
const INTERVAL_NS: u64 = 1_000_000_000;

/// By process.
#[derive(Default)]
pub(super) struct Allocs {
    processes: HashMap<u32, Allocated>,
    /// When they were reported last, `CLOCK_MONOTONIC` nanoseconds.
    reported_ns: u64,
}

struct Allocated {
    /// Programs that the process had replaced.
    execs: u32,
    /// Number of the last record.
    last: u64,
    /// Records that came.
    came: u64,
    /// What was lost and reported as such.
    lost: u64,
    /// Since the last report.
    sum: AllocSum,
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
        };
        let allocated = self.processes.entry(header.tgid).or_insert_with(fresh);
        let known =
            allocated.sum.slots.len() < MAX_SIZES || allocated.sum.slots.contains_key(&event.slot_size);
        // What came before an exec belongs to another program, as does what comes before the record of it.
        if header.execs != allocated.execs || !known {
            return false;
        }
        allocated.last = allocated.last.max(header.seq);
        allocated.came += 1;
        allocated.sum.refills += 1;
        *allocated.sum.slots.entry(event.slot_size).or_default() += u64::from(event.slots);
        true
    }

    /// What has been added up since the last time.
    fn take(&mut self, pid: u32, now_ns: u64) -> Option<AllocSum> {
        let allocated = self.processes.get_mut(&pid)?;
        let lost = allocated.last.saturating_sub(allocated.came);
        let mut sum = std::mem::take(&mut allocated.sum);
        (sum.end_ns, sum.lost) = (now_ns.max(sum.begin_ns), lost.saturating_sub(allocated.lost));
        allocated.sum.begin_ns = sum.end_ns;
        allocated.lost = allocated.lost.max(lost);
        (sum.refills > 0 || sum.lost > 0).then_some(sum)
    }

    /// A process is gone or has become another program.
    pub(super) fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }
}

impl Pipeline {
    /// A thread took free slots.
    pub(super) fn refill(&mut self, event: &RefillEvent) {
        let header = &event.header;
        self.trace_known(header.tgid, header.image, "", header.ts_ns);
        let traced = self.traced.get(&header.tgid);
        let its = traced.is_some_and(|traced| traced.process.image.index == header.image);
        if its && self.allocs.add(event) {
            self.counts.refills += 1;
        } else {
            self.counts.refused_refills += 1;
        }
    }

    /// Reports what every process has taken since the last time, if that is long enough ago.
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

    /// The same of one process.
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

    /// Sums are of an interval each, whatever the order of the records; a gap in their numbers is reported once; another program's
    /// records and garbage are refused.
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
