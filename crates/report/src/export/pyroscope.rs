//! Pushing to Grafana Pyroscope: one pprof profile per service and window, by its native `push.v1.PusherService/Push`
//! (Connect protocol, protobuf). Allocation is a profile of its own: Pyroscope names what it shows after a series and
//! the period of its profile, and its pages look for `memory:alloc_space:bytes:space:bytes`, as Go's profiles have it.

use std::{cell::Cell, sync::Arc};

use gctrace_tunemygc::printable::printable;
use prost::Message as _;

use super::{
    profile::pprof::{self, Allocation, Labels, Part, Size},
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

/// Maximum number of samples in a profile (pkg/validation/limits.go, `validation.max-profile-stacktrace-samples`).
const MOST_SAMPLES: usize = 16_000;
/// Maximum length of the profiles of a request before they are compressed. Pyroscope allows 2 MiB at once and 4 MiB each second
/// (`distributor.ingestion-burst-size-mb`, `distributor.ingestion-rate-limit-mb`): the next part may follow without a pause.
const MOST_BYTES: usize = 1 << 20;
/// Minimum difference of the times of two parts of a window, nanoseconds.
const LEAST_SPAN_NS: u64 = 1_000_000;

/// Profiles of the processes of one service in a window, or a part of them.
struct Push {
    window: Arc<Window>,
    /// Sorted.
    processes: Vec<ProcessIndex>,
    part: Part,
    /// Start and end, `CLOCK_MONOTONIC` nanoseconds. Each part has its own share of the window: Pyroscope takes profiles of one series and one time,
    /// in milliseconds, for copies of the same one, and shows one of them (`skipDuplicates` in its querier).
    span: (u64, u64),
    /// Samples and bytes of all profiles, and the number of samples of the largest one; known once they are encoded.
    size: Cell<(Size, usize)>,
}

/// Makes a payload.
pub(super) fn make(window: Arc<Window>, mut processes: Vec<ProcessIndex>) -> Box<dyn Payload> {
    processes.sort_unstable();
    let span = (window.began_ns, window.ended_ns);
    Box::new(Push { window, processes, part: Part::WHOLE, span, size: Cell::default() })
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
        self.size.take();
        let mut series = Vec::new();
        if threads.any(is_wanted) || paused.any(is_wanted) || gvl {
            series.extend(self.series(CPU, gvl, Allocation::None));
        }
        if recording.allocs.keys().map(|key| &key.thread).any(is_wanted) {
            series.extend(self.series(MEMORY, false, Allocation::Only));
        }
        if series.is_empty() {
            return Vec::new();
        }
        PushRequest { series }.encode_to_vec()
    }

    fn is_too_large(&self) -> bool {
        let (all, largest) = self.size.get();
        all.bytes > MOST_BYTES || largest > MOST_SAMPLES
    }

    fn halves(&self) -> Option<[Box<dyn Payload>; 2]> {
        let (began_ns, ended_ns) = self.span;
        let middle_ns = began_ns + ended_ns.saturating_sub(began_ns) / 2;
        if self.size.get().0.samples < 2 || middle_ns - began_ns < LEAST_SPAN_NS {
            return None;
        }
        let [first, second] = self.part.halves();
        let half = |part, span| -> Box<dyn Payload> {
            let (window, processes) = (Arc::clone(&self.window), self.processes.clone());
            Box::new(Self { window, processes, part, span, size: Cell::default() })
        };
        Some([half(first, (began_ns, middle_ns)), half(second, (middle_ns, ended_ns))])
    }
}

impl Push {
    fn is_wanted(&self, process: ProcessIndex) -> bool {
        self.processes.binary_search(&process).is_ok()
    }

    /// A series; `None` if it has no sample.
    fn series(&self, name: &str, gvl: bool, alloc: Allocation) -> Option<Series> {
        let Window { recording, clock, account, wall, .. } = &*self.window;
        let head = pprof::Head {
            comment: account.clone(),
            clock: *clock,
            began_ns: self.span.0,
            ended_ns: self.span.1,
            gvl,
            alloc,
            wall: *wall,
            labels: Labels::OfSeries,
        };
        let mut raw_profile = Vec::new();
        let wanted = |process| self.is_wanted(process);
        // Writing to memory cannot fail.
        let size = pprof::write_part(recording, &head, &wanted, self.part, &mut raw_profile).ok()?;
        if size.samples == 0 {
            return None;
        }
        let (mut all, largest) = self.size.get();
        all.samples += size.samples;
        all.bytes += size.bytes;
        self.size.set((all, largest.max(size.samples)));
        Some(Series { labels: self.labels(name), samples: vec![RawSample { raw_profile }] })
    }

    fn labels(&self, name: &str) -> Vec<LabelPair> {
        let facts = self.processes.first().and_then(|first| self.window.recording.processes.get(*first));
        let pair = |name: &str, value: &str| LabelPair { name: name.to_owned(), value: value.to_owned() };
        // Without the second label, Pyroscope takes values of allocation for totals since the start of a process, as those of Go are, and stores their
        // increase from one profile to the next (pkg/phlaredb/delta.go, `isDelta`).
        let mut labels = vec![pair("__name__", name), pair("__delta__", "false")];
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

    /// Labels of each series sent, without those that begin with `__`.
    pub(in crate::export) fn labels(sent: &[u8]) -> Vec<Vec<(String, String)>> {
        let sent = PushRequest::decode(sent).unwrap();
        let of = |series: Series| {
            let labels = series.labels.into_iter().map(|label| (label.name, label.value));
            labels.filter(|(name, _)| !name.starts_with("__")).collect()
        };
        sent.series.into_iter().map(of).collect()
    }

    /// Names and profiles of the series sent.
    pub(in crate::export) fn series(sent: &[u8]) -> Vec<(String, Vec<u8>)> {
        let sent = PushRequest::decode(sent).unwrap();
        let of = |mut series: Series| {
            let name = series.labels.iter().find(|label| label.name == "__name__").unwrap();
            let delta = series.labels.iter().find(|label| label.name == "__delta__").unwrap();
            assert_eq!(delta.value, "false", "values are those of the window");
            (name.value.clone(), series.samples.remove(0).raw_profile)
        };
        sent.series.into_iter().map(of).collect()
    }
}
