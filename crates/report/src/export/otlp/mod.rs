//! OpenTelemetry: metrics and profiles over OTLP/HTTP with protobuf. Profiles are those of opentelemetry-proto 1.10 and 1.11
//! (`v1development`); receivers of 1.8 and 1.9 would misread them.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
};

use super::{ExportError, Exporter, VERSION, upload::Uploader};
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

/// The semantic conventions whose names are used.
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

/// Whether an attribute is of one process: where several are added up, that of any of them would be wrong.
fn of_one_process(key: &str) -> bool {
    key == "service.instance.id" || key.starts_with("process.")
}

/// The resource of metrics and profiles; `pid` where it is of one process. Its own attributes come first, and no attribute comes twice.
fn resource(origin: &Origin, hostname: Option<&str>, image: Option<&Image>, pid: Option<u32>) -> Resource {
    let mut attributes = vec![text("service.name", origin.service.as_str())];
    let mut put = |attribute: KeyValue| {
        if attributes.iter().all(|known| known.key != attribute.key) {
            attributes.push(attribute);
        }
    };
    for (key, value) in origin.attributes.iter().filter(|(key, _)| pid.is_some() || !of_one_process(key)) {
        put(text(key, value.as_str()));
    }
    let known = [
        ("host.name", hostname),
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
    Resource { attributes, ..Resource::default() }
}

/// Adds metrics up, and hands them over from time to time.
pub(super) struct OtlpMetrics {
    uploader: Rc<Uploader>,
    interval: Duration,
    clock: WallClock,
    /// gctrace's own pid in the host's namespace.
    own_pid: u32,
    /// When counting began.
    began_ns: Option<u64>,
    closed_ns: Option<u64>,
    last: Instant,
    services: Services,
    ledger: Ledger,
}

impl OtlpMetrics {
    /// Metrics for this server, at this interval.
    pub(super) fn new(uploader: Rc<Uploader>, interval: Duration, clock: WallClock, own_pid: u32) -> Self {
        Self {
            uploader,
            interval,
            clock,
            own_pid,
            began_ns: None,
            closed_ns: None,
            last: Instant::now(),
            services: Services::new(false),
            ledger: Ledger::default(),
        }
    }

    fn hand_over(&mut self) {
        self.last = Instant::now();
        let ledger = self.ledger.clone();
        let now_ns = self.closed_ns.unwrap_or_else(monotonic_ns);
        let began_ns = *self.began_ns.get_or_insert(now_ns);
        self.uploader.send(Box::new(metrics::Metrics::new(
            &self.services,
            ledger,
            self.clock,
            self.own_pid,
            began_ns,
            now_ns,
        )));
    }
}

impl Exporter for OtlpMetrics {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        if let Seen::Process { now_ns, .. } = seen {
            // Its first events come after this.
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
        self.hand_over();
        Ok(())
    }

    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        if self.began_ns.is_some() && self.last.elapsed() >= self.interval {
            self.hand_over();
        }
        Ok(())
    }
}
