//! The requests of a service by endpoint and class of status: counters that only grow, in bounded memory.

use std::collections::BTreeMap;

use super::{
    endpoint::{Distinct, OTHER},
    times::Times,
};
use crate::model::request::{Allocated, Request};

/// Upper bounds of the buckets of durations, nanoseconds: those of OpenTelemetry's HTTP conventions, with more below and above.
pub const REQUEST_BOUNDS: [u64; 17] = [
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    75_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    750_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    7_500_000_000,
    10_000_000_000,
    30_000_000_000,
];
/// The same for waits for a thread, which are often short.
pub const QUEUE_BOUNDS: [u64; 14] = [
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    500_000_000,
    1_000_000_000,
    5_000_000_000,
    30_000_000_000,
];
/// Label of an unknown method or path.
const UNKNOWN: &str = "(unknown)";
/// Used as the method of jobs.
const JOB: &str = "(job)";
/// Used as the method of runs of programs.
const RUN: &str = "(run)";

/// The key by which requests are counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestKey {
    /// Method, `(job)`, `(run)`, or `(unknown)`.
    pub method: &'static str,
    /// Template of the path or class of a job, visible ASCII; `(unknown)`; or `(other)` if there are too many.
    pub path: String,
    /// `1xx` to `5xx`, or `unknown`.
    pub status: &'static str,
}

/// Figures of the requests with one key.
#[derive(Clone, Debug)]
pub struct RequestFigures {
    /// Number of requests.
    pub count: u64,
    /// Their durations, as far as they are known.
    pub times: Times,
    /// How long they had waited for a thread, as far as that is known.
    pub queues: Times,
    /// GC pauses of their threads meanwhile, as far as they are known, nanoseconds; `None`: unknown for all so far.
    pub gc_ns: Option<u64>,
    /// GC pauses of other threads of their processes meanwhile, as far as they are known, nanoseconds; `None`: unknown for all so far.
    pub gc_other_ns: Option<u64>,
    /// Waits of their threads for the GVL, as far as they are known, nanoseconds; `None`: unknown for all so far.
    pub gvl_wait_ns: Option<u64>,
    /// Number of GC cycles that they started, as far as it is known; `None`: unknown for all so far.
    pub gcs: Option<u64>,
    /// Heap slots that their threads took, as far as they are known; `None`: unknown for all so far.
    pub alloc: Option<Allocated>,
}

/// The requests of one service.
#[derive(Clone, Debug, Default)]
pub struct ServiceRequests {
    endpoints: Distinct<(&'static str, String)>,
    by_key: BTreeMap<RequestKey, RequestFigures>,
}

impl ServiceRequests {
    /// Counts a request. Without `room`, a new endpoint counts as [`OTHER`].
    pub fn add(&mut self, request: &Request, room: bool) {
        let method = request.method.unwrap_or(match request.kind() {
            "job" => JOB,
            "run" => RUN,
            _ => UNKNOWN,
        });
        let path = request.path.as_deref().unwrap_or(UNKNOWN);
        let path = self.admit((method, path), request.status, room);
        let key = RequestKey { method, path, status: class(request.status) };
        let of = self.by_key.entry(key).or_insert_with(|| RequestFigures {
            count: 0,
            times: Times::within(&REQUEST_BOUNDS),
            queues: Times::within(&QUEUE_BOUNDS),
            gc_ns: None,
            gc_other_ns: None,
            gvl_wait_ns: None,
            gcs: None,
            alloc: None,
        });
        of.count += 1;
        for (sum, of_one) in [
            (&mut of.gc_ns, request.gc_ns),
            (&mut of.gcs, request.gcs.map(u64::from)),
            (&mut of.gc_other_ns, request.gc_other.map(|other| other.ns)),
            (&mut of.gvl_wait_ns, request.gvl_wait_ns),
        ] {
            if let Some(of_one) = of_one {
                *sum = Some(sum.unwrap_or_default().saturating_add(of_one));
            }
        }
        if let Some(alloc) = request.alloc {
            of.alloc.get_or_insert_default().add(alloc);
        }
        if let Some(ns) = request.queue_ns {
            of.queues.add(ns);
        }
        if let Some(ns) = request.duration_ns() {
            of.times.add(ns);
        }
    }

    /// All keys, with their figures.
    pub fn iter(&self) -> impl Iterator<Item = (&RequestKey, &RequestFigures)> {
        self.by_key.iter()
    }

    /// Number of distinct endpoints.
    pub fn endpoints(&self) -> usize {
        self.endpoints.count()
    }

    fn admit(&mut self, (method, path): (&'static str, &str), status: Option<u16>, room: bool) -> String {
        let endpoint = (method, path.to_owned());
        if self.endpoints.admit(&endpoint, status, room) { endpoint.1 } else { OTHER.to_owned() }
    }
}

fn class(status: Option<u16>) -> &'static str {
    match status {
        Some(100..=199) => "1xx",
        Some(200..=299) => "2xx",
        Some(300..=399) => "3xx",
        Some(400..=499) => "4xx",
        Some(500..=599) => "5xx",
        _ => "unknown",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::aggregate::endpoint::MAX_TEMPLATES;
    use crate::model::request::{GcTime, Job, RequestMemory};

    /// A request that began at 100 ns.
    pub(crate) fn request(path: Option<&str>, ns: Option<u64>, status: Option<u16>) -> Request {
        Request {
            id: 1,
            tid: 1,
            begin_ns: 100,
            end_ns: ns.map(|ns| 100 + ns),
            method: path.map(|_| "GET"),
            path: path.map(ToOwned::to_owned),
            status,
            queue_ns: None,
            first_byte_ns: None,
            last_byte_ns: None,
            response_bytes: None,
            gcs: Some(2),
            gc_ns: Some(10),
            gc_pauses: Some(3),
            gc_other: Some(GcTime { pauses: 4, ns: 50 }),
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

    /// The path of a job is its class, and its method is none that a request could have.
    #[test]
    fn jobs() {
        let mut requests = ServiceRequests::default();
        let job = |class: Option<&str>| Request {
            method: None,
            job: Some(Job::default()),
            ..request(class, Some(5), None)
        };
        requests.add(&job(Some("Shop::MailJob")), true);
        requests.add(&job(None), true);
        let keys: Vec<_> =
            requests.iter().map(|(key, _)| (key.method, key.path.as_str(), key.status)).collect();
        assert_eq!(keys, [("(job)", "(unknown)", "unknown"), ("(job)", "Shop::MailJob", "unknown")]);
    }

    /// Each class of status has its own figures; a request whose end was not seen counts, but has no duration.
    #[test]
    fn classes() {
        let mut requests = ServiceRequests::default();
        assert_eq!(requests.iter().count(), 0);
        requests.add(&request(Some("/a"), Some(1_000_000), Some(200)), true);
        requests.add(&request(Some("/a"), Some(1_000_001), Some(204)), true);
        requests.add(&request(Some("/a"), Some(u64::MAX / 2), Some(503)), true);
        requests.add(&request(Some("/a"), None, Some(101)), true);
        requests.add(&request(None, Some(5), None), true);
        let all: Vec<_> = requests
            .iter()
            .map(|(key, of)| (key.method, key.path.as_str(), key.status, of.count, of.times.count()))
            .collect();
        assert_eq!(
            all,
            [
                ("(unknown)", "(unknown)", "unknown", 1, 1),
                ("GET", "/a", "1xx", 1, 0),
                ("GET", "/a", "2xx", 2, 2),
                ("GET", "/a", "5xx", 1, 1),
            ]
        );
        let (_, ok) = requests.iter().nth(2).unwrap();
        assert_eq!((ok.times.buckets[0], ok.times.buckets[1], ok.gcs, ok.gc_ns), (1, 1, Some(4), Some(20)));
        // If GC records were lost, the figures are unknown, not zero.
        let unknown =
            Request { gcs: None, gc_ns: None, gc_other: None, ..request(Some("/b"), Some(1), None) };
        requests.add(&unknown, true);
        let (_, lost) = requests.iter().find(|(key, _)| key.path == "/b").unwrap();
        assert_eq!((lost.gcs, lost.gc_ns, lost.gc_other_ns), (None, None, None));
        let (_, failed) = requests.iter().nth(3).unwrap();
        assert_eq!(failed.times.buckets[REQUEST_BOUNDS.len()], 1);
    }

    /// Memory is bounded, however many endpoints are requested; known endpoints stay, and every request is counted.
    #[test]
    fn bounded() {
        let mut requests = ServiceRequests::default();
        for n in 0..MAX_TEMPLATES + 7 {
            requests.add(&request(Some(&format!("/{n}")), Some(1), Some(200)), true);
        }
        requests.add(&request(Some("/3"), Some(1), Some(500)), true);
        requests.add(&request(Some("/3"), Some(1), Some(500)), false);
        assert_eq!(requests.endpoints(), MAX_TEMPLATES);
        let count = |path: &str| -> u64 {
            requests.iter().filter(|(key, _)| key.path == path).map(|(_, of)| of.count).sum()
        };
        assert_eq!((count(OTHER), count("/3")), (7, 3));
        let all: u64 = requests.iter().map(|(_, of)| of.count).sum();
        assert_eq!(all, MAX_TEMPLATES as u64 + 9);
    }
}
