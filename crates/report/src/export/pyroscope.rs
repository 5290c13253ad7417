//! Pushing to Grafana Pyroscope: one pprof per service and window, by its native `push.v1.PusherService/Push` (Connect
//! protocol, protobuf).

use std::{collections::HashSet, sync::Arc};

use prost::Message as _;

use super::{
    profile::pprof,
    upload::{Payload, Protocol},
    windows::Window,
};
use crate::aggregate::recording::ProcessIndex;

/// Name under which Pyroscope's pages look for CPU time.
const NAME: &str = "process_cpu";

/// Profiles of the processes of one service in a window.
struct Push {
    window: Arc<Window>,
    processes: Vec<ProcessIndex>,
}

/// Makes one.
pub(super) fn make(window: Arc<Window>, processes: Vec<ProcessIndex>) -> Box<dyn Payload> {
    Box::new(Push { window, processes })
}

impl Payload for Push {
    fn path(&self, _: Protocol) -> &'static str {
        // A Connect server has the same one for both.
        "/push.v1.PusherService/Push"
    }

    fn content_type(&self) -> &'static str {
        "application/proto"
    }

    fn encode(&self) -> Vec<u8> {
        let Window { recording, clock, began_ns, ended_ns, account, wall, .. } = &*self.window;
        let wanted: HashSet<ProcessIndex> = self.processes.iter().copied().collect();
        let is_wanted = |thread: &u32| wanted.contains(&recording.thread_facts(*thread).0.process);
        let mut threads = recording.samples.keys().map(|key| &key.thread);
        let mut paused = recording.pauses.keys().map(|key| &key.thread);
        let gvl = recording.gvl_waits.keys().map(|key| &key.thread).any(is_wanted);
        if !threads.any(is_wanted) && !paused.any(is_wanted) && !gvl {
            return Vec::new();
        }
        let head = pprof::Head {
            comment: account.clone(),
            clock: *clock,
            began_ns: *began_ns,
            ended_ns: *ended_ns,
            gvl,
            wall: *wall,
        };
        let mut raw_profile = Vec::new();
        // Writing to memory does not fail.
        let _infallible =
            pprof::write(recording, &head, &|process| wanted.contains(&process), &mut raw_profile);
        let labels = self.labels();
        let series = vec![Series { labels, samples: vec![RawSample { raw_profile }] }];
        PushRequest { series }.encode_to_vec()
    }
}

impl Push {
    fn labels(&self) -> Vec<LabelPair> {
        let facts = self.processes.first().and_then(|first| self.window.recording.processes.get(*first));
        let pair = |name: &str, value: &str| LabelPair { name: name.to_owned(), value: value.to_owned() };
        let mut labels = vec![pair("__name__", NAME)];
        let Some(facts) = facts else { return labels };
        let service = if facts.origin.service.is_empty() { "unknown_service" } else { &facts.origin.service };
        labels.push(pair("service_name", service));
        for (name, value) in [
            ("container", facts.origin.container.as_deref()),
            ("namespace", facts.origin.namespace.as_deref()),
            ("hostname", facts.hostname.as_deref()),
        ] {
            labels.extend(value.map(|value| pair(name, value)));
        }
        labels
    }
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
