//! The requests' part of the data path: records are turned into units of work, to which events refer.

use std::collections::BTreeSet;

use gctrace_common::{
    event::PauseEvent,
    gvl::{CLOCKS_UNKNOWN, Clocks, OwnTimes},
    job::JobEvent,
    memory::MemoryUse,
    request::{ALLOC_UNKNOWN, GVL_UNKNOWN, RequestEnd, RequestEvent, SENT_UNKNOWN},
    traceparent::Traceparent,
};

use super::{
    Pipeline, early::Early, lives::AWAIT_LAST_RECORD_NS, traced::TracedProcess, unit_states::Pending,
};
use crate::{
    aggregate::{
        endpoint,
        handler::handler,
        job::{self, JobTrace},
        units::{Facts, Sealed, UnitKey},
    },
    bpf::RequestReader,
    clock::{WallClock, monotonic_ns},
    console::say,
    decode::{self, Event},
    host::origin,
    model::{
        Process,
        gvl::{GvlCoverage, GvlSplit, GvlTaskTimes},
        request::{Allocated, GcTime, PageFaults, Request, RequestMemory, States},
        seen::{CyclesBefore, Seen},
        trace::Trace,
    },
    stacks::NamedStack,
};

/// Maximum number of records handled at a time.
const BATCH: usize = 4096;

/// The states that a time is divided into, from the advance of the thread's clocks; `None` if unknown.
fn states(clocks: Clocks) -> Option<States> {
    let [cpu_ns, runnable_ns, blocked_ns] = clocks;
    (clocks != CLOCKS_UNKNOWN).then_some(States { cpu_ns, runnable_ns, blocked_ns })
}

/// The division of a time by the thread's GVL state, too. `seen`: the GVL coverage of its process.
fn split(times: &OwnTimes, seen: Option<GvlCoverage>) -> Option<GvlSplit> {
    if times.clocks == CLOCKS_UNKNOWN
        || times.waiting == CLOCKS_UNKNOWN
        || !seen.is_some_and(|seen| seen.holds && !seen.only_blocked)
    {
        return None;
    }
    let of = |[cpu_ns, runnable_ns, blocked_ns]: Clocks| GvlTaskTimes { cpu_ns, runnable_ns, blocked_ns };
    let mut holding = [0; 3];
    for (at, ns) in holding.iter_mut().enumerate() {
        *ns = times.clocks[at].checked_sub(times.waiting[at])?.checked_sub(times.away[at])?;
    }
    Some(GvlSplit { waiting: of(times.waiting), holding: of(holding), away: of(times.away) })
}

/// The heap slots that a thread took meanwhile; `None` if unknown.
fn allocated(slots: u64, bytes: u64) -> Option<Allocated> {
    (slots != ALLOC_UNKNOWN).then_some(Allocated { slots, bytes })
}

/// What a thread and its process used of memory meanwhile.
fn memory(used: &MemoryUse) -> RequestMemory {
    let &MemoryUse { minor_faults, major_faults, resident } = used;
    let page = i64::try_from(rustix::param::page_size()).unwrap_or(i64::MAX);
    RequestMemory {
        faults: (minor_faults != MemoryUse::FAULTS_UNKNOWN)
            .then_some(PageFaults { minor: minor_faults, major: major_faults }),
        rss_growth: (resident != MemoryUse::PAGES_UNKNOWN).then_some(resident.saturating_mul(page)),
    }
}

/// Maximum length of a program name in characters.
const MAX_PROGRAM: usize = 100;

/// The name of a process's program, in visible ASCII.
fn program_of(process: &Process) -> String {
    let name = origin::program(&process.comm, process.cmdline.as_deref().unwrap_or_default());
    let visible = |c: char| if c.is_ascii_graphic() { c } else { '_' };
    name.chars().take(MAX_PROGRAM).map(visible).collect()
}

/// From this Ruby version on, a native thread ends with its Ruby thread. Before, it may stay for some seconds and run another Ruby thread.
const NATIVE_THREADS_END: (u16, u16) = (3, 3);

/// The kernel's sequence numbers for a process when its requests were taken.
pub(super) struct Numbered {
    /// Number of GC records; `None`: the kernel no longer follows the process.
    seq: Option<u64>,
    /// When that was read, in `CLOCK_MONOTONIC` nanoseconds.
    at_ns: u64,
    /// Since when its requests have been waiting for GC records that are missing, in `CLOCK_MONOTONIC` nanoseconds.
    behind_ns: Option<u64>,
}

impl Numbered {
    pub(super) fn new(seq: Option<u64>, at_ns: u64) -> Self {
        Self { seq, at_ns, behind_ns: None }
    }
}

impl Pipeline {
    /// Sets the reader of requests, and whether the state of the VM at the beginning and end of each is copied.
    #[must_use]
    pub fn with_requests(self, requests: Option<RequestReader>, states: bool) -> Self {
        let states = states && requests.is_some();
        Self { requests, unit_states: Pending::new(states), ..self }
    }

    /// Takes the requests that have ended. Must run before the GC records of the same moment are taken, so that no GC record of an ended
    /// request arrives later.
    pub(super) fn take_requests(&mut self) {
        let Some(mut reader) = self.requests.take() else { return };
        reader.drain(BATCH, |bytes| match decode::decode(bytes) {
            Ok(event) => self.unit_record(&event),
            Err(error) => {
                self.request_counts.undecodable_requests += 1;
                log::warn!("a request record could not be decoded: {error}");
            }
        });
        self.requests = Some(reader);
        self.number_requests();
    }

    /// Handles a record of the ring of requests.
    pub(super) fn unit_record(&mut self, event: &Event<'_>) {
        let counts = &mut self.request_counts;
        let (counter, header) = match event {
            Event::Request(_, event) => (&mut counts.decoded_requests, &event.header),
            Event::Job(_, event) => (&mut counts.decoded_requests, &event.header),
            Event::Unit(_, event) => (&mut counts.decoded_unit_states, &event.header),
            _ => {
                counts.undecodable_requests += 1;
                return;
            }
        };
        *counter += 1;
        let early = self.is_early(header);
        match *event {
            Event::Request(end, event) if early => self.wait_for_exec(Early::Request(end, Box::new(*event))),
            Event::Request(end, event) => self.request(end, event),
            Event::Job(end, event) if early => self.wait_for_exec(Early::Job(end, Box::new(*event))),
            Event::Job(end, event) => self.job(end, event),
            Event::Unit(point, event) if early => self.wait_for_exec(Early::Unit(point, Box::new(*event))),
            Event::Unit(point, event) => self.unit_state(point, event),
            _ => {}
        }
    }

    /// Notes how many GC records have been emitted by the processes whose requests have ended.
    pub(super) fn number_requests(&mut self) {
        let Some(reader) = &mut self.requests else { return };
        for pid in self.units.ended() {
            let numbered = Numbered::new(reader.numbered(pid), monotonic_ns());
            let behind_ns = self.numbered.get(&pid).and_then(|before| before.behind_ns);
            self.numbered.insert(pid, Numbered { behind_ns, ..numbered });
        }
    }

    pub(super) fn request(&mut self, end: RequestEnd, event: &RequestEvent) {
        let header = &event.header;
        let (pid, tid, begin_ns) = (header.tgid, header.tid, event.begin_ns);
        let is_traced = self.is_traced(pid, header.image, "", begin_ns);
        let gc_states = self.unit_states.take(UnitKey { pid, tid, begin_ns });
        if !is_traced {
            self.request_counts.requests_refused += 1;
            return;
        }
        let line = event.line.get(..event.len as usize).unwrap_or_default();
        let (method, path) = endpoint::request_line(line);
        let since = |ns: u64| (ns != 0).then(|| ns.saturating_sub(begin_ns));
        let seen = self.traced.get(&pid).and_then(|traced| traced.process.image.gvl);
        let facts = Facts {
            end_ns: matches!(end, RequestEnd::Kept | RequestEnd::Closed).then_some(header.ts_ns),
            method,
            path,
            status: endpoint::status(&event.status),
            // Data that arrived later belongs to another request.
            queue_ns: begin_ns.checked_sub(event.arrival_ns).filter(|_| event.arrival_ns != 0),
            first_byte_ns: since(event.first_write_ns),
            last_byte_ns: since(event.last_write_ns),
            response_bytes: (event.sent_bytes != SENT_UNKNOWN).then_some(event.sent_bytes),
            gvl_wait_ns: (event.gvl_ns != GVL_UNKNOWN).then_some(event.gvl_ns),
            states: states(event.times.clocks),
            split: split(&event.times, seen),
            alloc: allocated(event.alloc_slots, event.alloc_bytes),
            memory: memory(&event.memory),
            pause_ns: (event.pause_ns != 0).then_some(event.pause_ns),
            trace: (event.traceparent == Traceparent::Valid as u32)
                .then(|| Trace::parse(&event.value))
                .flatten(),
            job: None,
            gc_states,
        };
        self.seal(UnitKey { pid, tid, begin_ns }, facts);
    }

    pub(super) fn job(&mut self, end: RequestEnd, event: &JobEvent) {
        let header = &event.header;
        let (pid, tid, begin_ns) = (header.tgid, header.tid, event.begin_ns);
        let is_traced = self.is_traced(pid, header.image, "", begin_ns);
        let gc_states = self.unit_states.take(UnitKey { pid, tid, begin_ns });
        if is_traced && end == RequestEnd::Returned {
            self.request_counts.jobs_returned += 1;
            return;
        }
        let head = event.head.get(..event.head_len as usize).unwrap_or_default();
        let before = event.before.get(..event.before_len as usize).unwrap_or_default();
        let tail = event.tail.get(..event.tail_len as usize).unwrap_or_default();
        let fetched = job::fetched(&job::Reply { head, before, tail, total: event.total });
        let traced = self.traced.get(&pid).filter(|_| is_traced);
        let (Some(traced), Some(mut fetched)) = (traced, fetched) else {
            self.request_counts.requests_refused += 1;
            return;
        };
        fetched.job.taken_at(WallClock::measure().epoch_nanos(begin_ns));
        let trace = match fetched.trace {
            JobTrace::Known(trace) => Some(trace),
            JobTrace::Absent => None,
            JobTrace::Invalid => {
                self.request_counts.job_traceparent_invalid += 1;
                None
            }
            JobTrace::Unread => {
                self.request_counts.job_traceparent_unread += 1;
                None
            }
        };
        let version = traced.image.image.version;
        let end_is_exact = match end {
            RequestEnd::Kept => event.reconnected == 0,
            RequestEnd::Gone => (version.major, version.minor) >= NATIVE_THREADS_END,
            RequestEnd::Closed | RequestEnd::Left | RequestEnd::Returned => false,
        };
        let facts = Facts {
            end_ns: end_is_exact.then_some(header.ts_ns),
            path: fetched.class,
            gvl_wait_ns: (event.gvl_ns != GVL_UNKNOWN).then_some(event.gvl_ns),
            pause_ns: (event.pause_ns != 0).then_some(event.pause_ns),
            states: states(event.times.clocks),
            split: split(&event.times, traced.process.image.gvl),
            alloc: allocated(event.alloc_slots, event.alloc_bytes),
            memory: memory(&event.memory),
            trace,
            job: Some(fetched.job),
            gc_states,
            ..Facts::default()
        };
        self.seal(UnitKey { pid, tid, begin_ns }, facts);
    }

    fn seal(&mut self, key: UnitKey, facts: Facts) {
        match self.units.seal(key, facts) {
            Sealed::Taken => {}
            Sealed::NoRoom => self.request_counts.requests_no_room += 1,
            Sealed::Repeated => self.request_counts.requests_refused += 1,
        }
    }

    /// Exports the requests that have ended. All their GC records must have been taken.
    pub(super) fn report_requests(&mut self) {
        self.report_requests_at(monotonic_ns());
    }

    pub(super) fn report_requests_at(&mut self, now_ns: u64) {
        // Take the stacks first: those of ended requests precede the end.
        if !self.numbered.is_empty() {
            self.take_stacks();
        }
        let pids: Vec<u32> = self.numbered.keys().copied().collect();
        let mut waiting = BTreeSet::new();
        for pid in pids {
            // A record that is being written already has a number: it may still come, though the program that writes it has lost its CPU.
            if self.may_still_come(pid)
                && let Some(numbered) = self.numbered.get_mut(&pid)
                && now_ns.saturating_sub(*numbered.behind_ns.get_or_insert(now_ns)) <= AWAIT_LAST_RECORD_NS
            {
                waiting.insert(pid);
            } else {
                self.lost_at_the_end(pid);
            }
        }
        let taken = self.units.take(now_ns, |pid| waiting.contains(&pid));
        self.export_requests(taken);
    }

    /// Handles the end of a process, or of its tracing.
    pub(super) fn end_requests(&mut self, pid: u32) {
        self.lost_at_the_end(pid);
        self.unit_states.forget(pid);
        let taken = self.units.end(pid);
        self.export_requests(taken);
    }

    /// Whether missing GC records of a process may still come: they have not been waited for in vain before.
    fn may_still_come(&self, pid: u32) -> bool {
        let given_up = self.traced.get(&pid).map_or(0, |traced| traced.given_up);
        let seq = self.numbered.get(&pid).and_then(|numbered| numbered.seq);
        self.is_behind(pid) && seq.is_none_or(|seq| seq > given_up)
    }

    /// Whether GC records of a process that were numbered before its requests were taken are missing.
    fn is_behind(&self, pid: u32) -> bool {
        let Some(Numbered { seq, .. }) = self.numbered.get(&pid) else { return false };
        let came = self.traced.get(&pid).map_or(0, |traced| traced.fold.last_seq());
        seq.is_none_or(|seq| came < seq)
    }

    /// Accounts for lost GC records, which otherwise only show by the number of the next record: too late for requests that have ended.
    fn lost_at_the_end(&mut self, pid: u32) {
        if self.is_behind(pid)
            && let Some(Numbered { seq, at_ns, .. }) = self.numbered.get(&pid)
        {
            let mut last_ns = 0;
            if let Some(traced) = self.traced.get_mut(&pid) {
                last_ns = traced.last_ns;
                traced.given_up = traced.given_up.max(seq.unwrap_or(0));
            }
            self.units.lost(pid, last_ns, *at_ns);
        }
        self.numbered.remove(&pid);
    }

    /// Handles the end of a process. If it has served nothing and is not a server, its run is a unit of work, unless its start is unknown: it is
    /// older than tracing, or a child that has never called exec.
    pub(super) fn run_ended(&mut self, traced: &TracedProcess, before: CyclesBefore, end_ns: u64) {
        let process = &traced.process;
        if self.requests.is_none() || traced.has_units || process.server().is_some() {
            return;
        }
        let Some(begin_ns) = traced.begun_ns else {
            self.request_counts.runs_without_begin += 1;
            return;
        };
        let gcs = u32::try_from(traced.cycles).ok().filter(|_| traced.has_all_cycles(before));
        let run = Request {
            id: self.units.new_id(),
            tid: process.pid,
            begin_ns,
            end_ns: Some(end_ns),
            method: None,
            path: Some(program_of(process)),
            status: None,
            queue_ns: None,
            first_byte_ns: None,
            last_byte_ns: None,
            response_bytes: None,
            gcs,
            gc_ns: gcs.map(|_| traced.pauses.ns),
            gc_pauses: gcs.map(|_| traced.pauses.pauses),
            gc_other: gcs.map(|_| GcTime::default()),
            gvl_wait_ns: None,
            states: None,
            split: None,
            alloc: None,
            memory: RequestMemory::default(),
            handler: None,
            trace: None,
            job: None,
            is_run: true,
            gc_states: None,
        };
        self.request_counts.runs_reported += 1;
        self.see(process, Seen::Request(&run));
    }

    fn export_requests(&mut self, taken: Vec<(u32, Request)>) {
        for (pid, mut request) in taken {
            let Some(traced) = self.traced.get_mut(&pid) else {
                self.request_counts.requests_refused += 1;
                continue;
            };
            traced.has_units = true;
            if request.path.as_deref() == Some(endpoint::OTHER) {
                self.request_counts.requests_other_endpoint += 1;
                if !std::mem::replace(&mut traced.has_other_endpoints, true) {
                    let (most, absent) = (endpoint::MAX_TEMPLATES, endpoint::MAX_ABSENT);
                    say(&format!(
                        "gctrace: pid {pid}: requests to more than {most} endpoints, or to more than {absent} that it does not have (400, 404, \
                         405): further ones are `(other)`"
                    ));
                }
            }
            // Fallback probes on functions do not show cycles.
            if traced.image.reading.is_none() {
                (request.gcs, request.gc_ns, request.gc_pauses) = (None, None, None);
                request.gc_other = None;
            }
            // If only blocking waits are seen, their sum is incomplete; and without the end of the request, its waits are unknown.
            let all_waits = traced.image.image.gvl.is_some_and(|coverage| !coverage.only_blocked);
            request.gvl_wait_ns = request.gvl_wait_ns.filter(|_| all_waits && request.end_ns.is_some());
            request.states = request.states.filter(|_| request.end_ns.is_some());
            request.alloc = request.alloc.filter(|_| request.end_ns.is_some());
            request.gc_states = request.gc_states.filter(|_| request.end_ns.is_some());
            if self.unit_states.are_copied() && request.gc_states.is_none() {
                self.request_counts.requests_without_states += 1;
            }
            let process = traced.process.clone();
            self.request_counts.requests_reported += 1;
            self.export(|exporter| exporter.see(&process, Seen::Request(&request)));
        }
        self.request_counts.requests_unknown = self.units.counts().unknown;
    }

    /// The id of the request in which a cycle was started.
    pub(super) fn request_of_cycle(&mut self, pid: u32, tid: u32, begin_ns: u64) -> Option<u64> {
        (begin_ns != 0).then(|| self.units.cycle(UnitKey { pid, tid, begin_ns })).flatten()
    }

    /// The id of the request that a thread was serving when its stack was taken; `None`: no request; `Some(0)`: one without an id.
    pub(super) fn request_of_stack(&mut self, pid: u32, tid: u32, begin_ns: u64) -> Option<u64> {
        (begin_ns != 0).then(|| self.units.name(UnitKey { pid, tid, begin_ns }).unwrap_or_default())
    }

    /// Handles a stack, which may have been taken in a request and show its handler.
    pub(super) fn handler_of(&mut self, stack: &NamedStack) {
        let (pid, tid, begin_ns) = stack.unit();
        if self.requests.is_some() && begin_ns != 0 && self.traced.contains_key(&pid) {
            let key = UnitKey { pid, tid, begin_ns };
            self.units.stack(key, stack.span(), || handler(stack.ruby_frames()));
        }
    }

    /// Handles a GC pause of a thread, which may be serving a request.
    pub(super) fn request_pause(&mut self, event: &PauseEvent) {
        if self.requests.is_some() {
            let PauseEvent { header, begin_ns, request_ns, .. } = event;
            if let Some(traced) = self.traced.get_mut(&header.tgid) {
                let GcTime { pauses, ns } = &mut traced.pauses;
                *pauses += 1;
                *ns = ns.saturating_add(header.ts_ns.saturating_sub(*begin_ns));
            }
            let unit_ns = (*request_ns != 0).then_some(*request_ns);
            self.units.pause(header.tgid, header.tid, unit_ns, (*begin_ns, header.ts_ns));
        }
    }

    /// Counts the requests that were being served when the gate was closed.
    pub fn requests_still_open(&mut self) {
        self.request_counts.requests_open = self.requests.as_ref().map_or(0, RequestReader::open);
    }
}
