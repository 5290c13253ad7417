//! What a recording keeps about the GVL: sums of long waits, what each thread did with it, and when.

use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    num::NonZeroU64,
};

use super::{
    super::{EndpointIndex, NodeId, Recording, ThreadIndex, Timeline, TraceIndex, filter::DropReason, named},
    Kept,
};
use crate::model::{
    Process,
    gvl::{GvlBlocker, GvlDoing, GvlSpan, GvlThreadSummary, GvlTimes, GvlWait, GvlWho},
    stack::Stack,
};

/// The key by which long waits for the GVL are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaitKey {
    /// The thread that waited.
    pub thread: ThreadIndex,
    /// Its stack; [`NodeId::ROOT`] if it was not captured.
    pub node: NodeId,
    /// The thread with the longest uninterrupted hold of the GVL during the wait, if one was seen.
    pub holder: Option<ThreadIndex>,
    /// What that thread was doing, and where it released the GVL.
    pub holder_at: HolderAt,
    /// The endpoint of the request that the thread served when it acquired the GVL, if it served one.
    pub endpoint: Option<EndpointIndex>,
    /// The trace of that request.
    pub trace: Option<TraceIndex>,
}

/// What was seen of a thread that held the GVL while another one waited; [`NodeId::ROOT`] if nothing was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderAt {
    /// The stack seen most often.
    pub ran: NodeId,
    /// The stack with which it released the GVL.
    pub until: NodeId,
}

impl HolderAt {
    /// Nothing was seen.
    pub const UNSEEN: Self = Self { ran: NodeId::ROOT, until: NodeId::ROOT };
}

/// The key by which holds of the GVL are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldKey {
    /// The thread that held it.
    pub thread: ThreadIndex,
    /// The stack with which it released it.
    pub node: NodeId,
}

/// What a thread did with the GVL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GvlFacts {
    /// The thread, under its last name.
    pub thread: ThreadIndex,
    /// Waits that were reported individually.
    pub reported: GvlTimes,
    /// Waits that were reported individually but are not recorded.
    pub left_out: GvlTimes,
    /// All of its waits; `None` until the thread is read for the last time.
    pub waits: Option<GvlTimes>,
    /// Its holds, if they are observed.
    pub holds: Option<GvlTimes>,
    /// The part of that time that is in [`Recording::gvl_holds`], nanoseconds.
    pub held_ns: u64,
}

impl GvlFacts {
    /// Time for which it held the GVL, without the holds that were reported individually, nanoseconds.
    pub fn held_besides(&self) -> u64 {
        self.holds.map_or(0, |holds| holds.ns).saturating_sub(self.held_ns)
    }

    /// Number and time of the waits that were not reported individually: they were shorter than the threshold, lost, or had not ended.
    pub fn unreported(&self) -> (u64, u64) {
        let all = self.waits.unwrap_or(self.reported);
        let rest = |of: fn(&GvlTimes) -> u64| {
            of(&all).saturating_sub(of(&self.reported)).saturating_sub(of(&self.left_out))
        };
        (rest(|times| times.count), rest(|times| times.ns))
    }
}

/// A state of a thread with regard to the GVL, with its time.
#[derive(Clone, Copy, Debug)]
pub struct GvlMoment {
    /// The thread, as far as its native thread identifies it.
    pub thread: ThreadIndex,
    /// Unique in its process.
    pub id: u64,
    /// The state.
    pub doing: GvlDoing,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// Length, nanoseconds.
    pub ns: u64,
    /// For a wait: the stack.
    pub node: NodeId,
    /// For a wait: the thread with the longest uninterrupted hold of the GVL during it, its id, and when it acquired the GVL.
    pub holder: Option<(ThreadIndex, u64, u64)>,
    /// What that thread was doing, and where it released the GVL.
    pub holder_at: HolderAt,
    /// For a wait: the number of the request that the thread served when it acquired the GVL, if known.
    pub request: Option<NonZeroU64>,
    /// Whether the thread was still in this state when it or tracing ended.
    pub open: bool,
}

/// A long wait for the GVL whose endpoint is not yet known.
#[derive(Clone, Debug)]
pub(in crate::aggregate::recording) struct WaitMoment {
    key: WaitKey,
    moment: GvlMoment,
    hold: Option<HoldMoment>,
}

impl WaitMoment {
    /// Its length, nanoseconds.
    pub(super) fn ns(&self) -> u64 {
        self.moment.ns
    }
}

/// The longest hold of the GVL by another thread during a wait.
#[derive(Clone, Debug)]
struct HoldMoment {
    moment: GvlMoment,
    /// The stack with which it released the GVL.
    until: NodeId,
    /// Whether it counts in the sums of holds: no earlier wait has named it.
    is_counted: bool,
    /// Why a filter drops it from these sums.
    dropped: Option<DropReason>,
}

impl Recording {
    /// Adds a long wait for the GVL.
    pub(in crate::aggregate::recording) fn gvl_wait(&mut self, process: &Process, wait: &GvlWait) {
        let dropped = self.filter.drops(named(process, wait.who.tid, &wait.who.comm), wait.stack.as_deref());
        if dropped.is_some() {
            self.filter.account.gvl_waits.keeps(dropped, wait.ns);
            return self.gvl_wait_outside(process, wait);
        }
        let thread = self.thread(process, wait.who.tid, &wait.who.comm, wait.begin_ns);
        let node = self.node(wait.stack.as_ref());
        let mut node_of = |stack: Option<&Stack>| self.node(stack);
        let holder_at = wait.blocker.as_ref().map_or(HolderAt::UNSEEN, |blocker| HolderAt {
            ran: node_of(blocker.ran.first().map(|(_, stack)| stack)),
            until: node_of(blocker.until.as_ref()),
        });
        let hold = wait.blocker.as_ref().map(|blocker| self.blocker(process, wait, blocker, holder_at.until));
        let holder = hold.as_ref().map(|hold| hold.moment.thread);
        let key = WaitKey { thread, node, holder, holder_at, endpoint: None, trace: None };
        let moment = GvlMoment {
            thread,
            id: wait.id,
            doing: GvlDoing::Waiting,
            begin_ns: wait.begin_ns,
            ns: wait.ns,
            node,
            holder: hold.as_ref().map(|hold| (hold.moment.thread, hold.moment.id, hold.moment.begin_ns)),
            holder_at,
            request: wait.request.and_then(NonZeroU64::new),
            open: false,
        };
        self.place(
            process,
            wait.request,
            wait.begin_ns,
            Kept::Wait(Box::new(WaitMoment { key, moment, hold })),
        );
    }

    /// A long wait that is not recorded: only the sums of its thread include it, and it does not count as a wait that was not reported individually.
    pub(in crate::aggregate::recording) fn gvl_wait_outside(&mut self, process: &Process, wait: &GvlWait) {
        let times = GvlTimes { count: 1, ns: wait.ns, max_ns: wait.ns };
        // A wait that was waiting for its stack can arrive after the end of its thread.
        let index = self.current.get(&process.pid);
        let facts = index.and_then(|index| self.gvl_threads.get_mut(&(*index, wait.id)));
        if let Some(facts) = facts.filter(|facts| facts.waits.is_some()) {
            return facts.left_out.add(&times);
        }
        let key = (process.pid, wait.id);
        if self.gvl_outside.len() < self.limits.threads || self.gvl_outside.contains_key(&key) {
            self.gvl_outside.entry(key).or_default().add(&times);
        }
    }

    /// The hold of the GVL that a wait names.
    fn blocker(
        &mut self,
        process: &Process,
        wait: &GvlWait,
        blocker: &GvlBlocker,
        until: NodeId,
    ) -> HoldMoment {
        let GvlSpan { who, id, doing, begin_ns, ns } = &blocker.hold;
        let thread = self.thread(process, who.tid, &who.comm, (*begin_ns).max(wait.begin_ns));
        let moment = GvlMoment {
            thread,
            id: *id,
            doing: *doing,
            begin_ns: *begin_ns,
            ns: *ns,
            node: NodeId::ROOT,
            holder: None,
            holder_at: HolderAt::UNSEEN,
            request: None,
            open: false,
        };
        let is_counted = blocker.first && process.image.gvl.is_some_and(|coverage| coverage.holds);
        let who = named(process, who.tid, &who.comm);
        let dropped = self.filter.drops(who, blocker.until.as_deref());
        HoldMoment { moment, until, is_counted, dropped }
    }

    /// Adds a long wait once its endpoint is known.
    pub(super) fn add_wait(
        &mut self,
        wait: WaitMoment,
        endpoint: Option<EndpointIndex>,
        trace: Option<TraceIndex>,
    ) {
        let WaitMoment { key, moment, hold } = wait;
        let times = GvlTimes { count: 1, ns: moment.ns, max_ns: moment.ns };
        let full = self.gvl_waits.len() >= self.limits.sums;
        let sum = match self.gvl_waits.entry(WaitKey { endpoint, trace, ..key }) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) if !full => entry.insert(GvlTimes::default()),
            Entry::Vacant(_) => {
                let thread = self.thread_beyond();
                let (node, holder_at) = (NodeId::BEYOND, HolderAt::UNSEEN);
                let key = WaitKey { thread, node, holder: None, holder_at, endpoint, trace };
                self.gvl_waits.entry(key).or_default()
            }
        };
        sum.add(&times);
        self.gvl_facts(moment.thread, moment.id).reported.add(&times);
        self.gvl_moment(moment);
        let Some(HoldMoment { moment, until, is_counted, dropped }) = hold else { return };
        // The hold that the wait refers to must be in the timeline, however short it was.
        let (thread, id, ns) = (moment.thread, moment.id, moment.ns);
        self.gvl_moment(moment);
        if is_counted && self.filter.account.others.keeps(dropped, ns) {
            self.gvl_held(HoldKey { thread, node: until }, id, ns);
        }
    }

    /// Adds a hold of the GVL whose stack at the release is known.
    fn gvl_held(&mut self, key: HoldKey, id: u64, ns: u64) {
        if self.gvl_holds.len() >= self.limits.sums && !self.gvl_holds.contains_key(&key) {
            // The time remains part of [`GvlFacts::held_besides`].
            return;
        }
        let times = GvlTimes { count: 1, ns, max_ns: ns };
        self.gvl_holds.entry(key).or_default().add(&times);
        self.gvl_facts(key.thread, id).held_ns += ns;
    }

    /// Adds a long hold of the GVL, or a long time without it.
    pub(in crate::aggregate::recording) fn gvl_span(&mut self, process: &Process, span: &GvlSpan) {
        let thread = named(process, span.who.tid, &span.who.comm);
        if self.timeline.is_some() && self.keeps_thread(thread, span.ns) {
            self.gvl_state(process, span);
        }
    }

    fn gvl_state(&mut self, process: &Process, span: &GvlSpan) {
        let GvlSpan { doing, begin_ns, ns, .. } = *span;
        self.gvl_interval(process, &span.who, span.id, doing, begin_ns, ns, false);
    }

    /// Adds the sums of a thread that has ended, or is read for the last time.
    pub(in crate::aggregate::recording) fn gvl_thread(
        &mut self,
        process: &Process,
        summary: &GvlThreadSummary,
    ) {
        let who = &summary.who;
        // Sums have no stack, so they are never in focus; the thread's last state is shown nevertheless.
        let focus = self.filter.has_focus();
        let dropped = self.filter.drops_thread(named(process, who.tid, &who.comm));
        let unseen = focus.then_some(DropReason::Focus).or_else(|| self.filter.drops_endpoint(None));
        let reason = dropped.or(unseen);
        self.filter.account.others.keeps(reason, summary.sums.wait.ns);
        let outside = self.gvl_outside.remove(&(process.pid, summary.id)).unwrap_or_default();
        if dropped.is_some() {
            return;
        }
        let thread = self.thread(process, who.tid, &who.comm, summary.end_ns);
        let facts = self.gvl_facts(thread, summary.id);
        if unseen.is_none() {
            // An entry that represents several threads, beyond the limit, has the sums of all of them.
            facts.waits.get_or_insert_default().add(&summary.sums.wait);
            facts.left_out.add(&outside);
            if let Some(hold) = &summary.sums.hold {
                facts.holds.get_or_insert_default().add(hold);
            }
        }
        if let Some((doing, since_ns)) = summary.last {
            let ns = summary.end_ns.saturating_sub(since_ns);
            self.gvl_interval(process, who, summary.id, doing, since_ns, ns, true);
        }
    }

    fn gvl_facts(&mut self, thread: ThreadIndex, id: u64) -> &mut GvlFacts {
        let (at, _) = self.thread_facts(thread);
        let key = (at.process, id);
        let full = self.gvl_threads.len() >= self.limits.threads;
        if full && !self.gvl_threads.contains_key(&key) {
            let beyond = self.thread_beyond();
            let (at, _) = self.thread_facts(beyond);
            let key = (at.process, 0);
            return self.gvl_threads.entry(key).or_insert(GvlFacts { thread: beyond, ..GvlFacts::default() });
        }
        let facts = self.gvl_threads.entry(key).or_default();
        facts.thread = thread;
        facts
    }

    #[expect(clippy::too_many_arguments, reason = "what a moment consists of")]
    fn gvl_interval(
        &mut self,
        process: &Process,
        who: &GvlWho,
        id: u64,
        doing: GvlDoing,
        begin_ns: u64,
        ns: u64,
        open: bool,
    ) {
        if self.timeline.is_none() {
            return;
        }
        let thread = self.thread(process, who.tid, &who.comm, begin_ns + ns);
        let (node, holder, holder_at, request) = (NodeId::ROOT, None, HolderAt::UNSEEN, None);
        let moment = GvlMoment { thread, id, doing, begin_ns, ns, node, holder, holder_at, request, open };
        self.gvl_moment(moment);
    }

    /// Adds the part that lies in the recording to the timeline.
    fn gvl_moment(&mut self, mut moment: GvlMoment) {
        let end_ns = moment.begin_ns + moment.ns;
        if self.timeline.is_none() || !self.admits(end_ns) {
            return;
        }
        let began_ns = self.began_ns.unwrap_or_default();
        moment.begin_ns = moment.begin_ns.max(began_ns);
        moment.ns = end_ns - moment.begin_ns;
        if let Some((_, _, begin_ns)) = &mut moment.holder {
            *begin_ns = (*begin_ns).max(began_ns);
        }
        let (thread, _) = self.thread_facts(moment.thread);
        self.seen_at(thread.process, end_ns);
        if let Some(timeline) = &mut self.timeline
            && timeline.admit(1, &self.limits)
        {
            timeline.gvl.push(moment);
        }
    }
}

impl Timeline {
    /// What threads did with the GVL, each moment once, ordered by start: a hold may have been reported both by itself and by the
    /// waits that it caused.
    pub fn gvl_once(&self, recording: &Recording) -> Vec<&GvlMoment> {
        let mut known = HashSet::new();
        let once = |moment: &&GvlMoment| {
            let (thread, _) = recording.thread_facts(moment.thread);
            known.insert((thread.process, moment.id, moment.doing, moment.begin_ns))
        };
        // A hold that had not ended when it was reported first is longer by now.
        let mut moments: Vec<&GvlMoment> = self.gvl.iter().collect();
        moments.sort_by_key(|moment| std::cmp::Reverse(moment.ns));
        moments.retain(once);
        moments.sort_by_key(|moment| moment.begin_ns);
        moments
    }
}

/// For each wait in the result of [`Timeline::gvl_once`] whose longest hold is in it, too: the index of the wait, and that of the hold.
pub fn longest_holds(recording: &Recording, moments: &[&GvlMoment]) -> BTreeMap<usize, usize> {
    let process = |moment: &GvlMoment| recording.thread_facts(moment.thread).0.process;
    let holds: HashMap<_, usize> = moments
        .iter()
        .enumerate()
        .filter(|(_, moment)| moment.doing == GvlDoing::Holding)
        .map(|(at, moment)| ((process(moment), moment.id, moment.begin_ns), at))
        .collect();
    let hold = |moment: &GvlMoment| {
        let (_, id, begin_ns) = moment.holder?;
        holds.get(&(process(moment), id, begin_ns)).copied()
    };
    moments.iter().enumerate().filter_map(|(at, moment)| Some((at, hold(moment)?))).collect()
}
