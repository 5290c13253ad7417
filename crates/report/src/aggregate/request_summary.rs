//! Requests grouped by endpoint, service or thread.

use std::{collections::BTreeMap, sync::Arc};

use super::{endpoint::OTHER, gc_summary::Distribution};
use crate::model::{
    Process,
    request::{Allocated, Request},
    stack::Frame,
};

/// Maximum number of distinguished groups; the rest are one.
const MAX_GROUPS: usize = 500;

/// What requests are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Service and endpoint.
    Endpoint,
    /// Service.
    Service,
    /// The thread that served them.
    Thread,
}

/// The key of a group of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// Their service; empty if all are of one process.
    pub service: String,
    /// Endpoint or thread within the service; empty if requests are grouped by service alone.
    pub name: String,
}

impl Group {
    /// Its name; `services`: with that of its service, because there are several.
    pub fn title(&self, services: bool) -> String {
        match (self.service.as_str(), self.name.as_str()) {
            (service, "") => service.to_owned(),
            (service, name) if services && !service.is_empty() => format!("{service}: {name}"),
            (_, name) => name.to_owned(),
        }
    }
}

/// Figures of a group.
#[derive(Clone, Debug, Default)]
pub struct GroupSummary {
    /// Number of requests.
    pub count: u64,
    /// Number of requests with status 500 or above.
    pub failed: u64,
    /// Number of requests whose status is known.
    pub status_known: u64,
    /// Their durations, as far as they are known.
    pub times: Distribution,
    /// Sum of the durations, nanoseconds.
    pub ns: u64,
    /// How long they had waited for a thread, jobs since they were enqueued, as far as that is known.
    pub queues: Distribution,
    /// GC pauses of their own threads.
    pub own: Part,
    /// GC pauses of other threads of their processes meanwhile.
    pub other: Part,
    /// Waits of their threads for the GVL.
    pub gvl: Part,
    /// CPU time of their threads.
    pub cpu: Part,
    /// Time for which their threads were runnable without a CPU.
    pub runnable: Part,
    /// Time for which their threads were blocked.
    pub blocked: Part,
    /// Number of GC cycles that they started, as far as it is known.
    pub gcs: u64,
    /// Number of requests whose GC cycles are known.
    pub gcs_known: u64,
    /// Heap slots that they took, as far as that is known.
    pub alloc: Allocated,
    /// Number of requests whose slots are known.
    pub alloc_known: u64,
    /// The code that handled them, as far as it was seen.
    pub handlers: Handlers,
}

/// The code that handled the requests of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Handlers {
    /// No handler was seen.
    #[default]
    Unknown,
    /// All requests whose handler was seen have this one.
    One(Arc<Frame>),
    /// More than one handler was seen.
    Several,
}

impl Handlers {
    /// Adds the handler of a request; `None`: it was not seen.
    pub fn add(&mut self, handler: Option<&Arc<Frame>>) {
        let Some(handler) = handler else { return };
        match self {
            Self::Unknown => *self = Self::One(Arc::clone(handler)),
            Self::One(known) if known == handler => {}
            Self::One(_) | Self::Several => *self = Self::Several,
        }
    }

    /// The handler, if there is exactly one.
    pub fn one(&self) -> Option<&Frame> {
        match self {
            Self::One(frame) => Some(frame),
            Self::Unknown | Self::Several => None,
        }
    }
}

/// A part of the time of requests, such as their GC pauses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Total duration of the requests whose part is known, nanoseconds.
    pub of_ns: u64,
    /// Total of that part, nanoseconds.
    pub ns: u64,
}

impl Part {
    fn add(&mut self, of_ns: u64, ns: Option<u64>) {
        if let Some(ns) = ns {
            self.of_ns += of_ns;
            self.ns += ns;
        }
    }
}

impl GroupSummary {
    /// Known GC time of all threads during the requests, nanoseconds.
    pub fn gc_ns(&self) -> u64 {
        self.own.ns.saturating_add(self.other.ns)
    }

    fn add(&mut self, request: &Request) {
        self.count += 1;
        self.failed += u64::from(request.status.is_some_and(|status| status >= 500));
        self.status_known += u64::from(request.status.is_some());
        self.gcs += u64::from(request.gcs.unwrap_or_default());
        self.gcs_known += u64::from(request.gcs.is_some());
        self.alloc.add(request.alloc.unwrap_or_default());
        self.alloc_known += u64::from(request.alloc.is_some());
        self.handlers.add(request.handler.as_ref());
        let latency_ns = || request.job.as_ref().and_then(|job| job.latency_ns);
        if let Some(ns) = request.queue_ns.or_else(latency_ns) {
            self.queues.add(ns);
        }
        if let Some(ns) = request.duration_ns() {
            self.times.add(ns);
            self.ns += ns;
            self.own.add(ns, request.gc_ns);
            self.other.add(ns, request.gc_other.map(|other| other.ns));
            self.gvl.add(ns, request.gvl_wait_ns);
            self.cpu.add(ns, request.states.map(|states| states.cpu_ns));
            self.runnable.add(ns, request.states.map(|states| states.runnable_ns));
            self.blocked.add(ns, request.states.map(|states| states.blocked_ns));
        }
    }
}

/// Requests by group.
#[derive(Clone, Debug, Default)]
pub struct RequestSummary {
    groups: BTreeMap<Group, GroupSummary>,
}

impl RequestSummary {
    /// Adds a request of the only process, by its endpoint.
    pub fn add(&mut self, request: &Request) {
        self.add_to(Group { service: String::new(), name: request.endpoint() }, request);
    }

    /// Adds a request of any process.
    pub fn add_by(&mut self, by: By, process: &Process, request: &Request) {
        let service = process.origin.service.clone();
        let name = match by {
            By::Endpoint => request.endpoint(),
            By::Service => String::new(),
            By::Thread => format!("pid {} thread {}", process.pid, request.tid),
        };
        self.add_to(Group { service, name }, request);
    }

    fn add_to(&mut self, group: Group, request: &Request) {
        let known = self.groups.len() < MAX_GROUPS || self.groups.contains_key(&group);
        let group = if known { group } else { Group { service: String::new(), name: OTHER.to_owned() } };
        self.groups.entry(group).or_default().add(request);
    }

    /// Total number of requests.
    pub fn count(&self) -> u64 {
        self.groups.values().map(|of| of.count).sum()
    }

    /// Sum of their durations, nanoseconds.
    pub fn ns(&self) -> u64 {
        self.groups.values().map(|of| of.ns).sum()
    }

    /// Groups by total duration, longest first.
    pub fn by_time(&self) -> Vec<(&Group, &GroupSummary)> {
        self.sorted(|of| of.ns)
    }

    /// Groups with GC during their requests, longest GC time first.
    pub fn by_gc(&self) -> Vec<(&Group, &GroupSummary)> {
        let mut all = self.sorted(GroupSummary::gc_ns);
        all.retain(|(_, of)| of.gc_ns() > 0);
        all
    }

    /// Groups that waited for the GVL, longest wait time first.
    pub fn by_gvl(&self) -> Vec<(&Group, &GroupSummary)> {
        let mut all = self.sorted(|of| of.gvl.ns);
        all.retain(|(_, of)| of.gvl.ns > 0);
        all
    }

    /// Groups that took heap slots, most bytes first.
    pub fn by_alloc(&self) -> Vec<(&Group, &GroupSummary)> {
        let mut all = self.sorted(|of| of.alloc.bytes);
        all.retain(|(_, of)| of.alloc.bytes > 0);
        all
    }

    /// Whether the status of any request is known.
    pub fn has_status(&self) -> bool {
        self.groups.values().any(|of| of.status_known > 0)
    }

    /// Whether any request failed.
    pub fn has_failed(&self) -> bool {
        self.groups.values().any(|of| of.failed > 0)
    }

    /// Whether the heap slots of any request are known.
    pub fn has_alloc(&self) -> bool {
        self.groups.values().any(|of| of.alloc_known > 0)
    }

    /// Whether the GVL waits of any request are known.
    pub fn has_gvl(&self) -> bool {
        self.groups.values().any(|of| of.gvl.of_ns > 0)
    }

    /// Whether the CPU time of any request is known.
    pub fn has_cpu(&self) -> bool {
        self.groups.values().any(|of| of.cpu.of_ns > 0)
    }

    /// Whether it is known for any request how long it had waited for a thread.
    pub fn has_queues(&self) -> bool {
        self.groups.values().any(|of| of.queues.count() > 0)
    }

    /// Whether there are groups of more than one service.
    pub fn has_services(&self) -> bool {
        let mut services = self.groups.keys().map(|group| &group.service).filter(|name| !name.is_empty());
        let first = services.next();
        services.any(|service| Some(service) != first)
    }

    fn sorted(&self, ns: impl Fn(&GroupSummary) -> u64) -> Vec<(&Group, &GroupSummary)> {
        let mut all: Vec<_> = self.groups.iter().collect();
        all.sort_by_key(|(_, of)| std::cmp::Reverse(ns(of)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::services::tests::process,
        model::request::{GcTime, RequestMemory, States},
    };

    fn request(path: &str, end_ns: Option<u64>, status: Option<u16>) -> Request {
        Request {
            id: 1,
            tid: 1,
            begin_ns: 100,
            end_ns,
            method: Some("GET"),
            path: Some(path.to_owned()),
            status,
            queue_ns: None,
            first_byte_ns: None,
            last_byte_ns: None,
            response_bytes: None,
            gcs: Some(1),
            gc_ns: Some(10),
            gc_pauses: Some(1),
            gc_other: Some(GcTime { pauses: 2, ns: 30 }),
            gvl_wait_ns: None,
            states: None,
            split: None,
            alloc: None,
            memory: RequestMemory::default(),
            job: None,
            is_run: false,
            handler: None,
            gc_states: None,
            trace: None,
        }
    }

    fn names(groups: &[(&Group, &GroupSummary)]) -> Vec<String> {
        groups.iter().map(|(group, _)| format!("{}|{}", group.service, group.name)).collect()
    }

    /// By endpoint, most time first; a request without a duration is counted without one.
    #[test]
    fn endpoints() {
        let mut summary = RequestSummary::default();
        summary.add(&request("/a", Some(200), Some(200)));
        summary.add(&request("/b", Some(1100), Some(503)));
        summary.add(&request("/b", None, None));
        let by_time = summary.by_time();
        let of = by_time[0].1;
        assert_eq!(names(&by_time), ["|GET /b", "|GET /a"]);
        assert_eq!((of.count, of.failed, of.ns, of.own.ns, of.other.ns, of.gcs), (2, 1, 1000, 10, 30, 2));
        assert_eq!((of.own.of_ns, of.other.of_ns), (1000, 1000));
        assert_eq!((summary.count(), summary.ns()), (3, 1100));
        // A duration whose GC is unknown does not count in the share of GC; likewise for the GC of other threads.
        let unknown = Request { gc_other: None, ..request("/b", Some(9100), None) };
        summary.add(&Request { gcs: None, gc_ns: None, gc_pauses: None, ..unknown.clone() });
        let of = summary.by_time()[0].1;
        assert_eq!((of.count, of.ns, of.own.of_ns, of.own.ns, of.gcs), (3, 10_000, 1000, 10, 2));
        assert_eq!(of.gcs_known, 2);
        summary.add(&unknown);
        let of = summary.by_time()[0].1;
        assert_eq!((of.own.of_ns, of.own.ns), (10_000, 20));
        assert_eq!((of.other.of_ns, of.other.ns), (1000, 30));
    }

    /// The parts of a request's time cover only the requests of which they are known.
    #[test]
    fn states() {
        let mut summary = RequestSummary::default();
        summary.add(&request("/a", Some(300), None));
        assert!(!summary.has_cpu());
        let states = Some(States { cpu_ns: 20, runnable_ns: 30, blocked_ns: 50 });
        summary.add(&Request { states, ..request("/a", Some(200), None) });
        let of = summary.by_time()[0].1;
        assert_eq!(
            [of.cpu, of.runnable, of.blocked].map(|part| (part.ns, part.of_ns)),
            [(20, 100), (30, 100), (50, 100)]
        );
        assert!(summary.has_cpu() && of.ns == 300);
    }

    /// By GC, groups without any are left out.
    #[test]
    fn most_gc() {
        let mut summary = RequestSummary::default();
        let none = Some(GcTime::default());
        summary.add(&Request { gc_ns: Some(0), gc_other: none, ..request("/slow", Some(9000), None) });
        summary.add(&Request { gc_ns: Some(0), ..request("/waits", Some(200), None) });
        summary.add(&Request { gc_ns: Some(20), ..request("/starts", Some(200), None) });
        assert_eq!(names(&summary.by_gc()), ["|GET /starts", "|GET /waits"]);
    }

    /// Processes of a service are one group, or their threads are separate groups.
    #[test]
    fn groups() {
        let (web, other) = (process(1, "web"), process(2, "web"));
        let api = process(3, "api");
        let a = request("/a", Some(200), None);
        let grouped = |by| {
            let mut summary = RequestSummary::default();
            for of in [&web, &other, &api] {
                summary.add_by(by, of, &a);
            }
            let all: Vec<String> = names(&summary.by_time());
            (all, summary.has_services())
        };
        let all = |names: &[&str]| (names.iter().map(|&name| name.to_owned()).collect(), true);
        assert_eq!(grouped(By::Endpoint), all(&["web|GET /a", "api|GET /a"]));
        assert_eq!(grouped(By::Service), all(&["web|", "api|"]));
        let threads = ["api|pid 3 thread 1", "web|pid 1 thread 1", "web|pid 2 thread 1"];
        assert_eq!(grouped(By::Thread), all(&threads));
    }

    /// Memory is bounded, however many groups there are, and no request is missing.
    #[test]
    fn bounded() {
        let mut summary = RequestSummary::default();
        for n in 0..MAX_GROUPS + 7 {
            summary.add_by(By::Endpoint, &process(1, "web"), &request(&format!("/{n}"), Some(200), None));
        }
        assert_eq!(summary.groups.len(), MAX_GROUPS + 1);
        let other = Group { service: String::new(), name: OTHER.to_owned() };
        assert_eq!((summary.groups[&other].count, summary.count()), (7, MAX_GROUPS as u64 + 7));
        assert!(!summary.has_services());
    }
}
