//! The requests of one process, by endpoint.

use std::collections::BTreeMap;

use super::gc_summary::Distribution;
use crate::model::request::Request;

/// What was seen of one endpoint.
#[derive(Clone, Debug, Default)]
pub struct EndpointSummary {
    /// Requests.
    pub count: u64,
    /// Of them, with a status from 500 on.
    pub failed: u64,
    /// How long they took, where that was seen.
    pub times: Distribution,
    /// The sum of that, nanoseconds.
    pub ns: u64,
    /// Of that, GC pauses of their threads, nanoseconds.
    pub gc_ns: u64,
    /// GC cycles that they started.
    pub gcs: u64,
}

/// The requests of one process.
#[derive(Clone, Debug, Default)]
pub struct RequestSummary {
    endpoints: BTreeMap<String, EndpointSummary>,
}

impl RequestSummary {
    /// Counts one.
    pub fn add(&mut self, request: &Request) {
        let of = self.endpoints.entry(request.endpoint()).or_default();
        of.count += 1;
        of.failed += u64::from(request.status.is_some_and(|status| status >= 500));
        of.gcs += u64::from(request.gcs);
        if let Some(ns) = request.duration_ns() {
            of.times.add(ns);
            of.ns += ns;
            of.gc_ns += request.gc_ns;
        }
    }

    /// How many requests there were.
    pub fn count(&self) -> u64 {
        self.endpoints.values().map(|of| of.count).sum()
    }

    /// Endpoints, those with most time first.
    pub fn by_time(&self) -> Vec<(&str, &EndpointSummary)> {
        let mut all: Vec<_> = self.endpoints.iter().map(|(name, of)| (name.as_str(), of)).collect();
        all.sort_by_key(|(_, of)| std::cmp::Reverse(of.ns));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By endpoint, most time first; what has no duration counts without one.
    #[test]
    fn endpoints() {
        let mut summary = RequestSummary::default();
        let request = |path: &str, end_ns, status| Request {
            id: 1,
            tid: 1,
            begin_ns: 100,
            end_ns,
            method: Some("GET"),
            path: Some(path.to_owned()),
            status,
            first_byte_ns: None,
            last_byte_ns: None,
            gcs: 1,
            gc_ns: 10,
        };
        summary.add(&request("/a", Some(200), Some(200)));
        summary.add(&request("/b", Some(1100), Some(503)));
        summary.add(&request("/b", None, None));
        let by_time = summary.by_time();
        let (name, of) = by_time[0];
        assert_eq!((name, of.count, of.failed, of.ns, of.gc_ns, of.gcs), ("GET /b", 2, 1, 1000, 10, 2));
        assert_eq!((by_time[1].0, summary.count()), ("GET /a", 3));
    }
}
