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

use super::{ExportError, Exporter, ProcessEnd, VERSION, upload::Uploader};
use crate::{
    aggregate::{gvl_so_far::GvlSoFar, services::Services},
    host::clock::{WallClock, monotonic_ns},
    ledger::Ledger,
    model::{GcCycle, GcState, GcWork, Image, Origin, Process, gvl::GvlWait},
};

mod metrics;
mod profiles;

pub(super) use profiles::make as profiles;

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

/// What metrics and profiles are of. A process's own attributes come first, and none comes twice.
fn resource(origin: &Origin, hostname: Option<&str>, image: Option<&Image>, pid: Option<u32>) -> Resource {
    let mut attributes = vec![text("service.name", origin.service.as_str())];
    let mut put = |attribute: KeyValue| {
        if attributes.iter().all(|known| known.key != attribute.key) {
            attributes.push(attribute);
        }
    };
    for (key, value) in &origin.attributes {
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
    /// When counting began.
    began_ns: Option<u64>,
    closed_ns: Option<u64>,
    last: Instant,
    services: Services,
    ledger: Ledger,
}

impl OtlpMetrics {
    /// Metrics for this server, at this interval.
    pub(super) fn new(uploader: Rc<Uploader>, interval: Duration, clock: WallClock) -> Self {
        Self {
            uploader,
            interval,
            clock,
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
            began_ns,
            now_ns,
        )));
    }
}

impl Exporter for OtlpMetrics {
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError> {
        let now_ns = monotonic_ns();
        // Its first events come after this.
        self.began(now_ns);
        self.services.process(process, state, now_ns);
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.began_ns.get_or_insert(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.closed_ns = Some(ts_ns);
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        self.services.cycle(process, cycle);
        Ok(())
    }

    fn work(&mut self, process: &Process, work: &GcWork) -> Result<(), ExportError> {
        self.services.work(process, work);
        Ok(())
    }

    fn gvl_wait(&mut self, process: &Process, wait: &GvlWait) -> Result<(), ExportError> {
        self.services.gvl_wait(process, wait);
        Ok(())
    }

    fn gvl_so_far(&mut self, process: &Process, so_far: &GvlSoFar) -> Result<(), ExportError> {
        self.services.gvl_so_far(process, so_far);
        Ok(())
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        self.services.ended(process, end.shutdown.as_ref());
        Ok(())
    }

    fn account(&mut self, ledger: &Ledger) {
        self.ledger = ledger.clone();
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.account(ledger);
        self.hand_over();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        if self.began_ns.is_some() && self.last.elapsed() >= self.interval {
            self.hand_over();
        }
        Ok(())
    }
}
