//! Which part of a run is recorded, by the user's choice: some threads, stacks with some frames, and some frames of each stack.
//! What a filter drops is counted.

use std::{collections::HashMap, sync::Arc, time::Duration};

use gctrace_tunemygc::printable::printable;

use super::pattern::Pattern;
use crate::{
    ledger::ProfileCounts,
    model::{
        source::Source,
        stack::{Frame, FrameKind, Stack},
    },
    words::{data_size, plural},
};

/// Maximum number of frames with a remembered verdict; the table is emptied when it would exceed it.
const KNOWN_FRAMES: usize = 1 << 20;

/// What is recorded; the default is everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Threads whose name contains one of these, or with this id (host namespace); empty: all.
    pub threads: Vec<Pattern>,
    /// Stacks with a frame whose name or file contains one of these; empty: all.
    pub focus: Vec<Pattern>,
    /// What belongs to requests of an endpoint that contains one of these; empty: everything.
    pub endpoints: Vec<Pattern>,
    /// What belongs to requests that took at least this long, nanoseconds.
    pub slower_than_ns: Option<u64>,
    /// Frames to leave out of stacks, by name or file. Their time goes to their caller.
    pub hide: Vec<Pattern>,
    /// Leaves only frames of the application's own code in stacks.
    pub app_only: bool,
}

impl Filter {
    /// Whether it filters anything.
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }

    fn has_thread(&self, name: &str, tid: u32) -> bool {
        let wanted = |pattern: &Pattern| pattern.is_in(name) || pattern.text() == tid.to_string();
        self.threads.is_empty() || self.threads.iter().any(wanted)
    }

    fn verdict(&self, frame: &Frame) -> Verdict {
        let is_in = |pattern: &Pattern| {
            pattern.is_in(&frame.name) || frame.file.as_deref().is_some_and(|file| pattern.is_in(file))
        };
        Verdict {
            in_focus: self.focus.iter().any(is_in),
            hidden: self.hide.iter().any(is_in) || (self.app_only && is_others(frame)),
        }
    }
}

/// Whether a frame is code other than the application's own: of a gem or Ruby's library, a C method, native code, the kernel.
/// Frames that gctrace adds, such as those of the GC, are not code.
fn is_others(frame: &Frame) -> bool {
    match frame.kind {
        FrameKind::Ruby => frame.file.as_deref().is_some_and(|file| Source::of(file) != Source::App),
        FrameKind::CFunction | FrameKind::Native | FrameKind::Kernel => true,
        FrameKind::Vm | FrameKind::Missing => false,
    }
}

/// A filter's decision on a frame.
#[derive(Clone, Copy, Debug)]
struct Verdict {
    in_focus: bool,
    hidden: bool,
}

/// Why something is not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DropReason {
    /// It belongs to another thread.
    Thread,
    /// Its stack has no frame in focus.
    Focus,
    /// It belongs to another endpoint, to none that is known, or to a request that was not slow.
    Endpoint,
}

/// Number of things, and their time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Number of things.
    pub count: u64,
    /// Their time, nanoseconds; 0 if they have none.
    pub ns: u64,
}

/// Amounts of one kind: recorded, and dropped by reason. The sum is everything seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Recorded.
    pub kept: Amount,
    /// Of other threads.
    pub thread: Amount,
    /// Without a frame in focus.
    pub focus: Amount,
    /// Of other endpoints, or of requests that were not slow.
    pub endpoint: Amount,
}

impl Amount {
    pub(super) fn add(&mut self, ns: u64) {
        self.count += 1;
        self.ns += ns;
    }
}

impl Shares {
    fn add(&mut self, dropped: Option<DropReason>, ns: u64) {
        let amount = match dropped {
            None => &mut self.kept,
            Some(DropReason::Thread) => &mut self.thread,
            Some(DropReason::Focus) => &mut self.focus,
            Some(DropReason::Endpoint) => &mut self.endpoint,
        };
        amount.add(ns);
    }

    /// Everything seen.
    pub fn all(&self) -> Amount {
        let parts = [self.kept, self.thread, self.focus, self.endpoint];
        Amount {
            count: parts.iter().map(|part| part.count).sum(),
            ns: parts.iter().map(|part| part.ns).sum(),
        }
    }
}

/// Counts of what the filters let through and what they dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilterAccount {
    /// All samples, with the time that they represent.
    pub samples_seen: Amount,
    /// Samples and their time, by outcome.
    pub samples: Shares,
    /// GC cycles, with the time of their pauses.
    pub cycles: Shares,
    /// Waits for the GVL that were reported individually.
    pub gvl_waits: Shares,
    /// Allocation stacks, with bytes in place of nanoseconds.
    pub allocs: Shares,
    /// Everything else that belongs to a thread: its GVL sums and states, requests, GC work. Among these, `--focus` drops only
    /// the sums of waits and holds, because they have no stack.
    pub others: Shares,
    /// Number of frames left out of recorded stacks.
    pub frames_hidden: u64,
    /// Number of recorded stacks whose frames are all hidden; one frame says so in their place.
    pub stacks_hidden: u64,
}

/// A thread, as named by an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThreadName<'a> {
    /// Its process, host namespace.
    pub(super) pid: u32,
    /// Its id, host namespace.
    pub(super) tid: u32,
    pub(super) name: &'a str,
}

/// Maximum number of threads whose name is remembered.
const KNOWN_THREADS: usize = 1 << 16;

/// A filter in operation.
#[derive(Debug)]
pub(super) struct FilterState {
    filter: Filter,
    /// Frames are interned, so most are found by their address. Each frame is kept alive here, so that its address is not reused.
    verdicts: HashMap<usize, (Arc<Frame>, Verdict)>,
    /// Whether a thread (pid, tid) is wanted, by its last name; only filled if threads are filtered.
    threads: HashMap<(u32, u32), bool>,
    /// Replaces a stack whose frames are all hidden.
    all_hidden: Stack,
    pub(super) account: FilterAccount,
}

impl FilterState {
    pub(super) fn new(filter: Filter) -> Self {
        let hidden = Frame {
            kind: FrameKind::Missing,
            name: Arc::from("(all frames hidden)"),
            file: None,
            line: 0,
            first_line: 0,
            address: 0,
        };
        Self {
            filter,
            verdicts: HashMap::new(),
            threads: HashMap::new(),
            all_hidden: Arc::new([Arc::new(hidden)]),
            account: FilterAccount::default(),
        }
    }

    /// The filter.
    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Whether only stacks with certain frames are recorded.
    pub(super) fn has_focus(&self) -> bool {
        !self.filter.focus.is_empty()
    }

    /// Whether something of this thread with this stack is dropped. Without a stack, nothing is in focus.
    pub(super) fn drops(
        &mut self,
        thread: ThreadName<'_>,
        stack: Option<&[Arc<Frame>]>,
    ) -> Option<DropReason> {
        if let Some(reason) = self.drops_thread(thread) {
            return Some(reason);
        }
        let in_focus =
            !self.has_focus() || stack.unwrap_or_default().iter().any(|frame| self.verdict(frame).in_focus);
        (!in_focus).then_some(DropReason::Focus)
    }

    /// Whether what belongs to a request of this endpoint is dropped; `None`: it belongs to no request.
    pub(super) fn drops_endpoint(&self, endpoint: Option<&str>) -> Option<DropReason> {
        let patterns = &self.filter.endpoints;
        let is_in = |name: &str| patterns.iter().any(|pattern| pattern.is_in(name));
        let wanted = match endpoint {
            Some(name) => patterns.is_empty() || is_in(name),
            None => patterns.is_empty() && self.filter.slower_than_ns.is_none(),
        };
        (!wanted).then_some(DropReason::Endpoint)
    }

    /// Whether what belongs to a request that took this long is dropped; `None`: that is unknown.
    pub(super) fn drops_duration(&self, ns: Option<u64>) -> Option<DropReason> {
        let wanted = self.filter.slower_than_ns.is_none_or(|least| ns.is_some_and(|ns| ns >= least));
        (!wanted).then_some(DropReason::Endpoint)
    }

    /// [`Self::drops`] for an event that never has a stack.
    pub(super) fn drops_thread(&mut self, thread: ThreadName<'_>) -> Option<DropReason> {
        let ThreadName { pid, tid, name } = thread;
        if self.filter.threads.is_empty() {
            return None;
        }
        let wanted = self.filter.has_thread(name, tid);
        if self.threads.len() < KNOWN_THREADS || self.threads.contains_key(&(pid, tid)) {
            self.threads.insert((pid, tid), wanted);
        }
        (!wanted).then_some(DropReason::Thread)
    }

    /// [`Self::drops_thread`] for an event without the thread's name: a thread that no event has named yet is dropped.
    pub(super) fn drops_tid(&self, pid: u32, tid: u32) -> Option<DropReason> {
        let wanted = self.filter.threads.is_empty() || self.threads.get(&(pid, tid)) == Some(&true);
        (!wanted).then_some(DropReason::Thread)
    }

    /// A stack without its hidden frames.
    pub(super) fn shown(&mut self, stack: &Stack) -> Stack {
        if self.filter.hide.is_empty() && !self.filter.app_only {
            return Arc::clone(stack);
        }
        let left: Vec<Arc<Frame>> =
            stack.iter().filter(|frame| !self.verdict(frame).hidden).map(Arc::clone).collect();
        self.account.frames_hidden += (stack.len() - left.len()) as u64;
        if left.is_empty() && !stack.is_empty() {
            self.account.stacks_hidden += 1;
            return Arc::clone(&self.all_hidden);
        }
        left.into()
    }

    fn verdict(&mut self, frame: &Arc<Frame>) -> Verdict {
        let address = Arc::as_ptr(frame) as usize;
        if let Some((_, verdict)) = self.verdicts.get(&address) {
            return *verdict;
        }
        let verdict = self.filter.verdict(frame);
        if self.verdicts.len() >= KNOWN_FRAMES {
            self.verdicts.clear();
        }
        self.verdicts.insert(address, (Arc::clone(frame), verdict));
        verdict
    }
}

impl FilterAccount {
    /// Adds the counts of another recording.
    pub fn add(&mut self, other: &Self) {
        for (to, from) in [
            (&mut self.samples, &other.samples),
            (&mut self.cycles, &other.cycles),
            (&mut self.gvl_waits, &other.gvl_waits),
            (&mut self.allocs, &other.allocs),
            (&mut self.others, &other.others),
        ] {
            for (to, from) in [
                (&mut to.kept, from.kept),
                (&mut to.thread, from.thread),
                (&mut to.focus, from.focus),
                (&mut to.endpoint, from.endpoint),
            ] {
                to.count += from.count;
                to.ns += from.ns;
            }
        }
        self.samples_seen.count += other.samples_seen.count;
        self.samples_seen.ns += other.samples_seen.ns;
        self.frames_hidden += other.frames_hidden;
        self.stacks_hidden += other.stacks_hidden;
    }
}

impl Shares {
    /// Counts the outcome for one thing, and returns whether it is recorded.
    pub(super) fn keeps(&mut self, dropped: Option<DropReason>, ns: u64) -> bool {
        self.add(dropped, ns);
        dropped.is_none()
    }
}

impl FilterAccount {
    /// Adds the counts to the counters of the run.
    pub fn add_to(&self, counts: &mut ProfileCounts) {
        let Self { samples, samples_seen, cycles, gvl_waits, allocs, others, .. } = self;
        counts.profile_samples += samples_seen.count;
        counts.profile_samples_recorded += samples.kept.count;
        counts.profile_samples_other_threads += samples.thread.count;
        counts.profile_samples_out_of_focus += samples.focus.count;
        counts.profile_samples_other_endpoints += samples.endpoint.count;
        counts.profile_ns += samples_seen.ns;
        counts.profile_ns_recorded += samples.kept.ns;
        counts.profile_ns_other_threads += samples.thread.ns;
        counts.profile_ns_out_of_focus += samples.focus.ns;
        counts.profile_ns_other_endpoints += samples.endpoint.ns;
        for events in [cycles, gvl_waits, allocs, others] {
            counts.profile_events += events.all().count;
            counts.profile_events_recorded += events.kept.count;
            counts.profile_events_other_threads += events.thread.count;
            counts.profile_events_out_of_focus += events.focus.count;
            counts.profile_events_other_endpoints += events.endpoint.count;
        }
        counts.profile_frames_hidden += self.frames_hidden;
        counts.profile_stacks_hidden += self.stacks_hidden;
    }

    /// What this filter dropped, in words; `None` if nothing was filtered.
    pub fn text(&self, filter: &Filter) -> Option<String> {
        let named = |flag: &str, patterns: &[Pattern]| {
            let patterns: Vec<String> =
                patterns.iter().map(|pattern| printable(pattern.text()).into_owned()).collect();
            format!("--{flag} {}", patterns.join(", "))
        };
        let mut parts = Vec::new();
        if !filter.threads.is_empty() {
            let dropped = self.dropped(|shares| shares.thread);
            parts.push(format!("dropped by {}: {dropped}", named("thread", &filter.threads)));
        }
        if !filter.focus.is_empty() {
            let dropped = self.dropped(|shares| shares.focus);
            parts.push(format!("dropped by {}: {dropped}", named("focus", &filter.focus)));
        }
        let mut of_requests = Vec::new();
        if !filter.endpoints.is_empty() {
            of_requests.push(named("endpoint", &filter.endpoints));
        }
        if let Some(ns) = filter.slower_than_ns {
            of_requests.push(format!("--slower-than {:?}", Duration::from_nanos(ns)));
        }
        if !of_requests.is_empty() {
            let dropped = self.dropped(|shares| shares.endpoint);
            parts.push(format!("dropped by {}: {dropped}", of_requests.join(" and ")));
        }
        let mut hiding = Vec::new();
        if !filter.hide.is_empty() {
            hiding.push(named("hide", &filter.hide));
        }
        if filter.app_only {
            hiding.push("--app-only".to_owned());
        }
        if !hiding.is_empty() {
            let frames = plural(self.frames_hidden, "frame");
            parts.push(format!("hidden by {}: {frames}", hiding.join(" and ")));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// The amounts dropped for one reason, and the totals, in words.
    fn dropped(&self, of: fn(&Shares) -> Amount) -> String {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let timed = |shares: &Shares, what: &str| {
            let (part, all) = (of(shares).ns, shares.all().ns);
            format!("{:.2} s of {:.2} s of {what}", seconds(part), seconds(all))
        };
        let mut parts = vec![timed(&self.samples, "samples")];
        if self.cycles.all().count > 0 {
            parts.push(timed(&self.cycles, "GC pauses"));
        }
        if self.gvl_waits.all().count > 0 {
            parts.push(timed(&self.gvl_waits, "individual waits for the GVL"));
        }
        if self.allocs.all().count > 0 {
            let (part, all) = (of(&self.allocs).ns, self.allocs.all().ns);
            parts.push(format!("{} of {} of slots", data_size(part), data_size(all)));
        }
        if of(&self.others).count > 0 {
            let (part, all) = (of(&self.others).count, self.others.all().count);
            parts.push(format!("{part} of {all} other events"));
        }
        parts.join(", ")
    }
}
