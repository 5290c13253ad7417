//! Numbers that are impossible in a run count as damage: readers of a recording add up times and counts, and the sums must not overflow.

use super::{Invalid, Recorded};
use crate::model::{
    GcCycle, GcState, GcWork,
    gvl::{
        GvlBlocker, GvlProcessSummary, GvlSpan, GvlSums, GvlTaskTimes, GvlThreadSummary, GvlTimes, GvlWait,
    },
    gvl_so_far::GvlSoFar,
    request::Request,
    seen::ProcessEnd,
    stack::StackSample,
};

/// Maximum time, nanoseconds: 146 years.
const LATEST_NS: u64 = 1 << 62;
/// Maximum duration, nanoseconds: 4.5 years.
const LONGEST_NS: u64 = 1 << 57;
/// Maximum duration summed over all threads of a process, nanoseconds: 146 years.
const LONGEST_SUM_NS: u64 = 1 << 62;
/// Maximum count.
const MOST: u64 = 1 << 40;
/// Maximum count of what all threads of a process have done since its start: a million a second for nine years.
const MOST_IN_SUM: u64 = 1 << 48;
/// Maximum size, bytes.
const LARGEST: u64 = 1 << 57;

/// Collects the first number that is out of bounds.
#[derive(Default)]
pub(in crate::trace_file) struct Bounds(Option<(&'static str, u64)>);

impl Bounds {
    pub(in crate::trace_file) fn check(
        &mut self,
        what: &'static str,
        values: impl IntoIterator<Item = u64>,
        below: u64,
    ) {
        if self.0.is_none() {
            self.0 = values.into_iter().find(|value| *value >= below).map(|value| (what, value));
        }
    }

    pub(in crate::trace_file) fn at(&mut self, values: impl IntoIterator<Item = u64>) {
        self.check("time", values, LATEST_NS);
    }

    fn lasts(&mut self, values: impl IntoIterator<Item = u64>) {
        self.check("length of time", values, LONGEST_NS);
    }

    pub(in crate::trace_file) fn counts(&mut self, values: impl IntoIterator<Item = u64>) {
        self.check("count", values, MOST);
    }

    fn counts_in_sum(&mut self, values: impl IntoIterator<Item = u64>) {
        self.check("count", values, MOST_IN_SUM);
    }

    fn state(&mut self, state: Option<&GcState>) {
        let Some(state) = state else { return };
        self.at([state.ts_ns]);
        if let Some(memory) = &state.memory {
            let all = [memory.rss, memory.peak_rss, memory.anon, memory.file, memory.shmem, memory.swap];
            let shares = memory.shares.into_iter().flat_map(|shares| [shares.pss, shares.private_dirty]);
            self.check("amount of memory", all.into_iter().chain(shares), LARGEST);
            self.at(memory.shares.and_then(|shares| shares.read_ns));
        }
    }

    pub(in crate::trace_file) fn gvl_span(&mut self, span: &GvlSpan) {
        self.at([span.begin_ns]);
        self.lasts([span.ns]);
    }

    fn blocker(&mut self, blocker: &GvlBlocker) {
        self.gvl_span(&blocker.hold);
        self.counts(blocker.ran.iter().map(|(count, _)| *count));
    }

    fn adds_up(&mut self, values: impl IntoIterator<Item = u64>) {
        self.check("sum of times", values, LONGEST_SUM_NS);
    }

    fn times(&mut self, times: &GvlTimes) {
        self.counts_in_sum([times.count]);
        self.adds_up([times.ns]);
        self.lasts([times.max_ns]);
    }

    fn task(&mut self, times: &GvlTaskTimes) {
        self.adds_up([times.cpu_ns, times.runnable_ns, times.blocked_ns]);
    }

    fn sums(&mut self, sums: &GvlSums) {
        self.adds_up([sums.wall_ns, sums.watched_ns]);
        [Some(&sums.wait), sums.hold.as_ref(), sums.away.as_ref()]
            .into_iter()
            .flatten()
            .for_each(|times| self.times(times));
        if let Some(split) = &sums.split {
            self.task(&split.waiting);
            self.task(&split.holding);
            self.task(&split.away);
        }
        self.counts_in_sum(sums.waits.counts());
    }

    pub(in crate::trace_file) fn process(&mut self, state: Option<&GcState>, times: [u64; 2]) {
        self.at(times);
        self.state(state);
    }

    pub(in crate::trace_file) fn cycle(&mut self, cycle: &GcCycle) {
        self.state(Some(&cycle.start));
        self.state(cycle.end.as_ref());
        self.at(cycle.pauses.iter().map(|pause| pause.begin_ns));
        self.lasts(cycle.pauses.iter().map(|pause| pause.ns));
        self.counts([cycle.count, cycle.lost]);
    }

    pub(in crate::trace_file) fn work(&mut self, work: &GcWork) {
        self.at([work.begin_ns]);
        self.lasts([work.ns]);
    }

    pub(in crate::trace_file) fn request(&mut self, request: &Request) {
        self.at([Some(request.begin_ns), request.end_ns].into_iter().flatten());
        let states = request.states.map(|states| [states.cpu_ns, states.runnable_ns, states.blocked_ns]);
        let lengths = [
            request.queue_ns,
            request.first_byte_ns,
            request.last_byte_ns,
            request.gc_ns,
            request.gc_other.map(|other| other.ns),
            request.gvl_wait_ns,
        ];
        self.lasts(lengths.into_iter().flatten().chain(states.into_iter().flatten()));
        let split = request.split.iter().flat_map(|split| [split.waiting, split.holding, split.away]);
        self.lasts(split.flat_map(|times| [times.cpu_ns, times.runnable_ns, times.blocked_ns]));
        self.lasts(request.duration_ns());
        self.counts(request.alloc.map(|alloc| alloc.slots));
        self.check("amount of memory", request.alloc.map(|alloc| alloc.bytes), LARGEST);
        self.counts(request.memory.faults.into_iter().flat_map(|faults| [faults.minor, faults.major]));
        self.check("growth of memory", request.memory.rss_growth.map(i64::unsigned_abs), LARGEST);
        self.check("size of a response", request.response_bytes, LARGEST);
    }

    pub(in crate::trace_file) fn sample(&mut self, sample: &StackSample) {
        self.at([sample.ts_ns]);
        self.lasts([sample.cpu_ns, sample.wall_ns]);
    }

    pub(in crate::trace_file) fn gvl_wait(&mut self, wait: &GvlWait) {
        self.at([wait.begin_ns]);
        self.lasts([wait.ns]);
        wait.blocker.iter().for_each(|blocker| self.blocker(blocker));
    }

    pub(in crate::trace_file) fn gvl_thread(&mut self, thread: &GvlThreadSummary) {
        self.at([thread.begin_ns, thread.end_ns]);
        self.at(thread.last.map(|(_, since_ns)| since_ns));
        self.sums(&thread.sums);
    }

    pub(in crate::trace_file) fn gvl_so_far(&mut self, so_far: &GvlSoFar) {
        self.adds_up([so_far.wait_ns, so_far.hold_ns]);
        self.counts_in_sum(so_far.counts());
    }

    pub(in crate::trace_file) fn gvl_process(&mut self, process: &GvlProcessSummary) {
        self.at([process.end_ns]);
        self.lasts([process.span_ns]);
        self.counts([process.threads]);
        self.sums(&process.sums);
        self.adds_up(process.gc.iter().flat_map(|gc| [Some(gc.pause_ns), gc.wait_ns]).flatten());
        process.blocked.iter().for_each(|blocked| self.times(&blocked.times));
    }

    pub(in crate::trace_file) fn ended(&mut self, end: &ProcessEnd) {
        self.at([end.ts_ns, end.since_ns]);
        self.lasts([end.outside_ns]);
        self.counts([end.cycles, end.lost]);
        self.state(end.shutdown.as_ref());
    }
}

/// Refuses an entry with an impossible time, count or size.
pub(super) fn check(recorded: &Recorded) -> Result<(), Invalid> {
    let mut bounds = Bounds::default();
    match recorded {
        Recorded::Seen(_, owned) => bounds.seen(owned),
        Recorded::Began(ts_ns) | Recorded::Closed(ts_ns) | Recorded::Flushed(ts_ns) => bounds.at([*ts_ns]),
        // Its end may be the maximum of `u64`.
        Recorded::GvlGap(gap) => bounds.at([gap.from_ns]),
        Recorded::Refused(..) | Recorded::Account(_) | Recorded::Finished(_) | Recorded::Settled(_) => {}
    }
    match bounds.0 {
        None => Ok(()),
        Some((what, value)) => Err(Invalid::new(format!("{value} is not a possible {what}"))),
    }
}
