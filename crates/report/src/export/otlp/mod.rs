//! OpenTelemetry: metrics and profiles over OTLP/HTTP with protobuf. Profiles are those of opentelemetry-proto 1.10 and 1.11
//! (`v1development`); receivers of 1.8 and 1.9 would misread them.

use std::{
    rc::Rc,
    sync::Weak,
    time::{Duration, Instant},
};

use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
};

use super::{
    ExportError, Exporter, VERSION,
    upload::{Reason, Receipt, Uploader},
};
use crate::{
    aggregate::services::Services,
    clock::{WallClock, monotonic_ns},
    ledger::Ledger,
    model::{
        Image, Origin, Process,
        seen::{Observer as _, Seen},
    },
};

mod metrics;
pub mod process_context;
mod profiles;

pub(super) use profiles::make as profiles;
#[cfg(test)]
pub(super) use profiles::tests::read as sent_profiles;

/// Maximum number of snapshots queued; without it, memory would grow without bound while the server is unreachable.
const WAITING: usize = 4;

/// The version of the semantic conventions whose names are used.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.37.0";

fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "gctrace".to_owned(),
        version: VERSION.to_owned(),
        ..InstrumentationScope::default()
    }
}

fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// Whether an attribute belongs to a single process: for a sum over several processes, the value of any one of them would be wrong.
fn of_one_process(key: &str) -> bool {
    matches!(key, INSTANCE | "service.version") || key.starts_with("process.")
}

const INSTANCE: &str = "service.instance.id";
/// The namespace of instance ids derived from a name (semantic conventions, "service.instance.id").
const INSTANCES: uuid::Uuid = uuid::uuid!("4d63009a-8d0f-11ee-aad7-4c796ed8e320");

/// The identity of gctrace, by which receivers distinguish it from other instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agent {
    /// Its pid in the host's namespace.
    pub pid: u32,
    /// Boot id of the host (`/proc/sys/kernel/random/boot_id`), if it could be read.
    pub boot: Option<String>,
}

impl Agent {
    /// The instance id for this name on this host: constant until the host reboots, and unique to the host.
    fn instance(&self, name: &[&str]) -> Option<String> {
        let name = [&[self.boot.as_deref()?], name].concat().join("\0");
        Some(uuid::Uuid::new_v5(&INSTANCES, name.as_bytes()).to_string())
    }
}

/// The resource of metrics and profiles; with `pid` if it describes one process. No attribute occurs twice. What gctrace knows from the kernel
/// and the process's memory precedes what the process's environment says: children inherit a variable, and have a pid, a container and a Ruby
/// of their own.
fn resource(origin: &Origin, hostname: Option<&str>, image: Option<&Image>, pid: Option<u32>) -> Resource {
    let mut attributes = vec![text("service.name", origin.service.as_str())];
    let mut put = |attribute: KeyValue| {
        if attributes.iter().all(|known| known.key != attribute.key) {
            attributes.push(attribute);
        }
    };
    let known = [
        ("container.id", origin.container.as_deref()),
        ("k8s.pod.uid", origin.pod.as_deref()),
        ("k8s.namespace.name", origin.namespace.as_deref()),
    ];
    for (key, value) in known {
        if let Some(value) = value {
            put(text(key, value));
        }
    }
    if let Some(image) = image {
        put(text("process.runtime.name", "ruby"));
        put(text("process.runtime.version", image.version.to_string()));
    }
    if let Some(pid) = pid {
        put(attribute("process.pid", Value::IntValue(i64::from(pid))));
    }
    for (key, value) in origin.attributes.iter().filter(|(key, _)| pid.is_some() || !of_one_process(key)) {
        put(text(key, value.as_str()));
    }
    if let Some(hostname) = hostname {
        put(text("host.name", hostname));
    }
    Resource { attributes, ..Resource::default() }
}

/// What a receiver's `partial_success` says of a request. Without anything rejected, its message is a warning (OTLP specification, "Partial
/// Success").
fn receipt(rejected: i64, what: &str, message: &str) -> Receipt {
    match (rejected > 0, message) {
        (true, _) => Receipt::Partial(Reason::quoting(what, &format!("{rejected}: {message}"))),
        (false, "") => Receipt::Whole(None),
        (false, message) => Receipt::Warned(Reason::new(message)),
    }
}

/// Adds up metrics, and hands them over periodically.
pub(super) struct OtlpMetrics {
    uploader: Rc<Uploader>,
    interval: Duration,
    starts: metrics::Starts,
    agent: Agent,
    /// Start of counting, `CLOCK_MONOTONIC` nanoseconds.
    began_ns: Option<u64>,
    closed_ns: Option<u64>,
    last: Instant,
    services: Services,
    ledger: Ledger,
    /// Snapshots that were handed over, for as long as they have not been sent.
    waiting: Vec<Weak<metrics::MetricsSnapshot>>,
}

impl OtlpMetrics {
    /// Metrics for this server, pushed at this interval.
    pub(super) fn new(uploader: Rc<Uploader>, interval: Duration, clock: WallClock, agent: Agent) -> Self {
        Self {
            uploader,
            interval,
            starts: metrics::Starts::new(clock),
            agent,
            began_ns: None,
            closed_ns: None,
            last: Instant::now(),
            services: Services::new(false),
            ledger: Ledger::default(),
            waiting: Vec::new(),
        }
    }

    /// Hands over the current metrics. If too many are queued, these are dropped, because later ones include them; the
    /// `last` ones are never dropped.
    fn hand_over(&mut self, last: bool) {
        self.last = Instant::now();
        self.waiting.retain(|snapshot| snapshot.strong_count() > 0);
        if self.waiting.len() >= WAITING && !last {
            return self.uploader.give_up();
        }
        let ledger = self.ledger.clone();
        let now_ns = self.closed_ns.unwrap_or_else(monotonic_ns);
        let began_ns = *self.began_ns.get_or_insert(now_ns);
        let agent = self.agent.clone();
        let metrics =
            metrics::Metrics::new(&self.services, ledger, &mut self.starts, agent, began_ns, now_ns);
        self.waiting.push(metrics.snapshot());
        self.uploader.send(Box::new(metrics));
    }
}

impl Exporter for OtlpMetrics {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if let Seen::Process { now_ns, .. } = seen {
            // The first events of this process come after this.
            self.began(now_ns);
        }
        self.services.see(process, seen);
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.began_ns.get_or_insert(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.closed_ns = Some(ts_ns);
    }

    fn account(&mut self, ledger: &Ledger) {
        self.ledger = ledger.clone();
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.account(ledger);
        self.hand_over(true);
        Ok(())
    }

    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        if self.began_ns.is_some() && self.last.elapsed() >= self.interval {
            self.hand_over(false);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        export::upload::{Address, Protocol, headers},
        ledger::UserCounts,
    };

    /// A variable that a process inherited replaces nothing that is known of it, and adds what is not.
    #[test]
    fn facts_precede_variables() {
        let said = [
            ("process.pid", "1"),
            ("container.id", "theirs"),
            ("k8s.pod.uid", "u"),
            ("host.name", "chosen"),
            ("deployment.environment.name", "test"),
        ];
        let attributes = said.map(|(key, value)| (key.into(), value.into())).to_vec();
        let origin = Origin {
            service: "shop".into(),
            container: Some("ours".into()),
            attributes,
            ..Origin::default()
        };
        let of = |pid| {
            let resource = resource(&origin, Some("kernel"), None, pid);
            let mut found: Vec<_> = resource
                .attributes
                .into_iter()
                .map(|one| match one.value.unwrap().value.unwrap() {
                    Value::StringValue(text) => (one.key, text),
                    Value::IntValue(number) => (one.key, format!("{number} as a number")),
                    other => panic!("{other:?}"),
                })
                .collect();
            found.sort_unstable();
            found
        };
        let expected = [
            ("container.id", "ours"),
            ("deployment.environment.name", "test"),
            ("host.name", "chosen"),
            ("k8s.pod.uid", "u"),
            ("process.pid", "7 as a number"),
            ("service.name", "shop"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(of(Some(7)), expected);
        let of_all: Vec<_> = expected.into_iter().filter(|(key, _)| key != "process.pid").collect();
        assert_eq!(of(None), of_all);
    }

    /// A message without anything rejected is a warning.
    #[test]
    fn receipts() {
        assert_eq!(receipt(0, "points", ""), Receipt::Whole(None));
        assert!(matches!(receipt(0, "points", "old"), Receipt::Warned(why) if why.to_string() == "old"));
        assert!(
            matches!(receipt(2, "points", "no"), Receipt::Partial(why) if why.to_string() == "points (2: no)")
        );
    }

    /// While a server is unreachable, a few snapshots are queued, and the last one is among them.
    #[test]
    fn few_wait() {
        let nobody = Address { url: "http://127.0.0.1:1".to_owned(), protocol: Protocol::Http };
        let headers = headers("GCTRACE_NO_SUCH_VARIABLE").unwrap();
        let uploader = Rc::new(Uploader::start("test", &nobody, headers, |_| {}).unwrap());
        let counts = || {
            let mut counts = UserCounts::default();
            uploader.add_counts(&mut counts);
            (counts.uploads.uploads, counts.uploads.uploads_dropped, counts.uploads.uploads_waiting)
        };
        let agent = Agent { pid: 1, boot: None };
        let mut metrics = OtlpMetrics::new(Rc::clone(&uploader), Duration::ZERO, WallClock::measure(), agent);
        metrics.began(1);
        for _ in 0..100 {
            metrics.flush(0).unwrap();
        }
        assert_eq!(counts(), (100, 96, 4));
        metrics.finish(&Ledger::default()).unwrap();
        assert_eq!(counts(), (101, 96, 5));
    }
}
