//! Pushing to Grafana Pyroscope: one pprof profile per service and window, by its native `push.v1.PusherService/Push`
//! (Connect protocol, protobuf). Allocation is a profile of its own: Pyroscope names what it shows after a series and
//! the period of its profile, and its pages look for `memory:alloc_space:bytes:space:bytes`, as Go's profiles have it.

use std::sync::Arc;

use gctrace_tunemygc::printable::printable;
use prost::Message as _;

use super::{
    profile::pprof::{self, Allocation, Labels},
    upload::{Payload, Protocol},
    windows::Window,
};
use crate::aggregate::recording::{ProcessFacts, ProcessIndex};

/// Name under which Pyroscope's pages look for CPU time.
const CPU: &str = "process_cpu";
/// The corresponding name for allocation.
const MEMORY: &str = "memory";

/// Maximum number of characters of a label, as for the names in `gctrace_report::model::Origin`; Pyroscope refuses
/// more than 2048 bytes (pkg/validation/limits.go, `validation.max-length-label-value`).
const MAX_TEXT: usize = 200;

/// Profiles of the processes of one service in a window.
struct Push {
    window: Arc<Window>,
    /// Sorted.
    processes: Vec<ProcessIndex>,
}

/// Makes a payload.
pub(super) fn make(window: Arc<Window>, mut processes: Vec<ProcessIndex>) -> Box<dyn Payload> {
    processes.sort_unstable();
    Box::new(Push { window, processes })
}

impl Payload for Push {
    fn path(&self, _: Protocol) -> &'static str {
        // A Connect server uses the same path for both protocols.
        "/push.v1.PusherService/Push"
    }

    fn content_type(&self) -> &'static str {
        "application/proto"
    }

    fn encode(&self) -> Vec<u8> {
        let recording = &self.window.recording;
        let is_wanted = |thread: &u32| self.is_wanted(recording.thread_facts(*thread).0.process);
        let mut threads = recording.samples.keys().map(|key| &key.thread);
        let mut paused = recording.pauses.keys().map(|key| &key.thread);
        let gvl = recording.gvl_waits.keys().map(|key| &key.thread).any(is_wanted);
        let mut series = Vec::new();
        if threads.any(is_wanted) || paused.any(is_wanted) || gvl {
            series.push(self.series(CPU, gvl, Allocation::None));
        }
        if recording.allocs.keys().map(|key| &key.thread).any(is_wanted) {
            series.push(self.series(MEMORY, false, Allocation::Only));
        }
        if series.is_empty() {
            return Vec::new();
        }
        PushRequest { series }.encode_to_vec()
    }
}

impl Push {
    fn is_wanted(&self, process: ProcessIndex) -> bool {
        self.processes.binary_search(&process).is_ok()
    }

    fn series(&self, name: &str, gvl: bool, alloc: Allocation) -> Series {
        let Window { recording, clock, began_ns, ended_ns, account, wall, .. } = &*self.window;
        let head = pprof::Head {
            comment: account.clone(),
            clock: *clock,
            began_ns: *began_ns,
            ended_ns: *ended_ns,
            gvl,
            alloc,
            wall: *wall,
            labels: Labels::OfSeries,
        };
        let mut raw_profile = Vec::new();
        // Writing to memory cannot fail.
        let _infallible =
            pprof::write(recording, &head, &|process| self.is_wanted(process), &mut raw_profile);
        Series { labels: self.labels(name), samples: vec![RawSample { raw_profile }] }
    }

    fn labels(&self, name: &str) -> Vec<LabelPair> {
        let facts = self.processes.first().and_then(|first| self.window.recording.processes.get(*first));
        let pair = |name: &str, value: &str| LabelPair { name: name.to_owned(), value: value.to_owned() };
        let mut labels = vec![pair("__name__", name)];
        let Some(facts) = facts else { return labels };
        let service = if facts.origin.service.is_empty() { "unknown_service" } else { &facts.origin.service };
        labels.push(pair("service_name", service));
        // All processes are in one container, but less may be known about one that ended early.
        let known = |what: fn(&ProcessFacts) -> Option<&String>| {
            let mut facts = self.processes.iter().filter_map(|at| self.window.recording.processes.get(*at));
            facts.find_map(what).map(String::as_str)
        };
        let id = facts.origin.container.as_deref();
        for (name, value) in [
            ("container", known(|facts| facts.container.name.as_ref()).or(id)),
            ("container_id", id),
            ("pod", known(|facts| facts.container.pod.as_ref())),
            (
                "namespace",
                known(|facts| facts.origin.namespace.as_ref().or(facts.container.namespace.as_ref())),
            ),
            ("hostname", facts.hostname.as_deref()),
            ("unit", self.unit()),
        ] {
            labels.extend(value.map(|value| pair(name, &bounded(value))));
        }
        labels
    }

    /// The systemd unit of these processes; `None` if the service has several units.
    fn unit(&self) -> Option<&str> {
        let facts = self.processes.iter().filter_map(|at| self.window.recording.processes.get(*at));
        let mut units = facts.map(|facts| facts.container.unit.as_deref());
        let first = units.next()?;
        first.filter(|_| units.all(|unit| unit == first))
    }
}

/// Makes a label of text from outside.
fn bounded(value: &str) -> String {
    printable(value).chars().take(MAX_TEXT).collect()
}

// grafana/pyroscope: api/push/v1/push.proto, api/types/v1/types.proto.

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct PushRequest {
    #[prost(message, repeated, tag = "1")]
    series: Vec<Series>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Series {
    #[prost(message, repeated, tag = "1")]
    labels: Vec<LabelPair>,
    #[prost(message, repeated, tag = "2")]
    samples: Vec<RawSample>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct RawSample {
    #[prost(bytes = "vec", tag = "1")]
    raw_profile: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct LabelPair {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Labels of each series sent, without `__name__`.
    pub(in crate::export) fn labels(sent: &[u8]) -> Vec<Vec<(String, String)>> {
        let sent = PushRequest::decode(sent).unwrap();
        let of = |series: Series| {
            let labels = series.labels.into_iter().map(|label| (label.name, label.value));
            labels.filter(|(name, _)| name != "__name__").collect()
        };
        sent.series.into_iter().map(of).collect()
    }

    /// Names and profiles of the series sent.
    pub(in crate::export) fn series(sent: &[u8]) -> Vec<(String, Vec<u8>)> {
        let sent = PushRequest::decode(sent).unwrap();
        let of = |mut series: Series| {
            let name = series.labels.iter().find(|label| label.name == "__name__").unwrap();
            (name.value.clone(), series.samples.remove(0).raw_profile)
        };
        sent.series.into_iter().map(of).collect()
    }
}
