//! Metrics: one resource per service, one for gctrace itself. Sums and histograms are cumulative.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Arc, Weak},
};

use opentelemetry_proto::tonic::{
    collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse},
    common::v1::KeyValue,
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
        ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point,
    },
};
use prost::Message as _;

use super::{Agent, INSTANCE, SCHEMA_URL, resource, scope, text};
use crate::{
    aggregate::services::{Gauges, Service, ServiceKey, Services, Times},
    clock::WallClock,
    export::{
        VERSION,
        figures::{self, Figure, Kind, Value},
        upload::{Payload, Protocol, Receipt},
    },
    ledger::{Ledger, only_grows},
    model::Origin,
};

const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;

/// Epoch times at which sums started, nanoseconds. A changed start would mean that a sum was reset, so each is computed once, by the clock that the
/// host has then: that of the run's start may have been set back since, and its times lie in the future.
pub(super) struct Starts {
    clock: WallClock,
    /// Of gctrace's own counters.
    own: Option<u64>,
    /// Of services, with the monotonic time.
    services: HashMap<ServiceKey, (u64, u64)>,
}

fn epoch(clock: WallClock, ns: u64) -> u64 {
    u64::try_from(clock.epoch_nanos(ns)).unwrap_or_default()
}

impl Starts {
    /// Without any sum.
    pub(super) fn new(clock: WallClock) -> Self {
        Self { clock, own: None, services: HashMap::new() }
    }

    /// The starts of these services, each with its monotonic time. Others are forgotten: they are no longer there.
    fn of<'a>(&mut self, now: WallClock, services: impl Iterator<Item = (&'a ServiceKey, u64)>) -> Vec<u64> {
        let before = std::mem::take(&mut self.services);
        let of = |(key, since_ns): (&ServiceKey, u64)| {
            let start = match before.get(key) {
                Some((known_ns, epoch)) if *known_ns == since_ns => *epoch,
                // A service that was dropped and seen again has started anew.
                _ => epoch(now, since_ns),
            };
            self.services.insert(key.clone(), (since_ns, start));
            start
        };
        services.map(of).collect()
    }
}

/// The figures of all services at one time.
pub(super) struct MetricsSnapshot {
    /// With the start of their sums.
    services: Vec<(Service, Option<Gauges>, u64)>,
    ledger: Ledger,
    agent: Agent,
    /// The start of gctrace's own sums.
    began: u64,
    /// This moment, by the clock as it is now: the host's clock may have been set since the run began.
    now: u64,
}

/// Metrics of some services at one time. gctrace itself counts as an additional service, the last one.
pub(super) struct Metrics {
    snapshot: Arc<MetricsSnapshot>,
    from: usize,
    to: usize,
}

impl Metrics {
    /// The metrics of all services.
    pub(super) fn new(
        services: &Services,
        ledger: Ledger,
        starts: &mut Starts,
        agent: Agent,
        began_ns: u64,
        now_ns: u64,
    ) -> Self {
        let clock = starts.clock.again();
        let began = *starts.own.get_or_insert_with(|| epoch(clock, began_ns));
        let starts = starts.of(clock, services.iter().map(|(key, service, _)| (key, service.since_ns)));
        let services: Vec<_> = services
            .iter()
            .zip(starts)
            .map(|((_, service, gauges), start)| (service.clone(), gauges, start))
            .collect();
        let to = services.len() + 1;
        let now = epoch(clock, now_ns);
        Self { snapshot: Arc::new(MetricsSnapshot { services, ledger, agent, began, now }), from: 0, to }
    }

    /// The underlying snapshot, which exists until the last part of it has been sent.
    pub(super) fn snapshot(&self) -> Weak<MetricsSnapshot> {
        Arc::downgrade(&self.snapshot)
    }
}

impl Payload for Metrics {
    fn path(&self, protocol: Protocol) -> &'static str {
        match protocol {
            Protocol::Http => "/v1/metrics",
            Protocol::Grpc => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        }
    }

    fn content_type(&self) -> &'static str {
        "application/x-protobuf"
    }

    fn encode(&self) -> Vec<u8> {
        let snapshot = &self.snapshot;
        let resource_metrics = (self.from..self.to)
            .map(|at| match snapshot.services.get(at) {
                Some((service, gauges, since)) => snapshot.service(service, gauges.as_ref(), *since),
                None => snapshot.own(),
            })
            .collect();
        ExportMetricsServiceRequest { resource_metrics }.encode_to_vec()
    }

    fn halves(&self) -> Option<[Box<dyn Payload>; 2]> {
        let middle = self.from.midpoint(self.to);
        let part =
            |from, to| Box::new(Self { snapshot: Arc::clone(&self.snapshot), from, to }) as Box<dyn Payload>;
        (middle > self.from).then(|| [part(self.from, middle), part(middle, self.to)])
    }

    fn receipt(&self, answer: &[u8]) -> Receipt {
        let part =
            ExportMetricsServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
        part.map_or(Receipt::Whole(None), |part| {
            super::receipt(part.rejected_data_points, "points", &part.error_message)
        })
    }
}

impl MetricsSnapshot {
    /// The times of sums with this start. None ends before its start, even if the clock was set back.
    fn times(&self, since: u64) -> (u64, u64) {
        (since, self.now.max(since))
    }

    fn service(&self, service: &Service, gauges: Option<&Gauges>, since: u64) -> ResourceMetrics {
        let mut resource = resource(&service.origin, service.hostname.as_deref(), None, None);
        let container = service.origin.container.as_deref().unwrap_or_default();
        let instance = self.agent.instance(&[&service.origin.service, container]);
        resource.attributes.extend(instance.map(|id| text(INSTANCE, id)));
        let times = self.times(since);
        let figures = figures::of(service, gauges).into_iter().filter(|figure| !figure.points.is_empty());
        ResourceMetrics {
            resource: Some(resource),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(scope()),
                metrics: figures.map(|figure| metric(&figure, times)).collect(),
                schema_url: SCHEMA_URL.to_owned(),
            }],
            schema_url: SCHEMA_URL.to_owned(),
        }
    }

    /// gctrace's own counters.
    fn own(&self) -> ResourceMetrics {
        let pid = self.agent.pid;
        let instance = self.agent.instance(&["gctrace", &pid.to_string()]);
        let mut attributes = vec![("service.version".to_owned(), VERSION.to_owned())];
        attributes.extend(instance.map(|id| (INSTANCE.to_owned(), id)));
        let origin = Origin { service: "gctrace".to_owned(), attributes, ..Origin::default() };
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let times = self.times(self.began);
        let counters = |name: &str, description: &str, counters: &[(&'static str, u64)]| {
            let points = counters.iter().map(|(counter, value)| {
                number(vec![text("counter", *counter)], number_data_point::Value::AsInt(*value as i64), times)
            });
            let data_points = points.collect();
            Metric {
                name: name.to_owned(),
                description: description.to_owned(),
                unit: "{event}".to_owned(),
                data: Some(Data::Sum(Sum {
                    data_points,
                    aggregation_temporality: CUMULATIVE,
                    is_monotonic: true,
                })),
                ..Metric::default()
            }
        };
        let mut user = self.ledger.user_counters();
        user.retain(|(name, _)| only_grows(name));
        ResourceMetrics {
            resource: Some(resource(&origin, Some(&hostname), None, Some(pid))),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(scope()),
                metrics: vec![
                    counters("gctrace.events.lost", "Records that were lost", &[("all", self.ledger.lost())]),
                    counters(
                        "gctrace.kernel.events",
                        "Counters of the kernel side",
                        &self.ledger.kernel_counters(),
                    ),
                    counters("gctrace.user.events", "Counters of user space", &user),
                ],
                schema_url: SCHEMA_URL.to_owned(),
            }],
            schema_url: SCHEMA_URL.to_owned(),
        }
    }
}

fn metric(figure: &Figure, times: (u64, u64)) -> Metric {
    let labels = |labels: &[(&'static str, Cow<'static, str>)]| -> Vec<KeyValue> {
        labels.iter().map(|(key, value)| text(&attribute(key), &**value)).collect()
    };
    let numbers = || {
        let values = figure.points.iter().map(|point| {
            let value = match &point.value {
                Value::Number(number) => number_data_point::Value::AsInt(*number as i64),
                Value::Time(ns) => number_data_point::Value::AsDouble(seconds(*ns)),
                Value::Times(times) => number_data_point::Value::AsDouble(seconds(times.ns)),
            };
            number(labels(&point.labels), value, times)
        });
        values.collect()
    };
    let data = match figure.kind {
        Kind::Counter => {
            Data::Sum(Sum { data_points: numbers(), aggregation_temporality: CUMULATIVE, is_monotonic: true })
        }
        Kind::Gauge => Data::Gauge(Gauge { data_points: numbers() }),
        Kind::Histogram => {
            let points = figure.points.iter().filter_map(|point| match &point.value {
                Value::Times(lengths) => Some(histogram(labels(&point.labels), lengths, times)),
                Value::Number(_) | Value::Time(_) => None,
            });
            Data::Histogram(Histogram { data_points: points.collect(), aggregation_temporality: CUMULATIVE })
        }
    };
    Metric {
        name: figure.otlp.to_owned(),
        description: figure.help.to_owned(),
        unit: figure.unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}

/// Name of an attribute: that of the semantic conventions if one fits. The template is gctrace's own, so it is not an `http.route`.
fn attribute(label: &'static str) -> Cow<'static, str> {
    match label {
        "method" => "http.request.method".into(),
        "path" => "url.template".into(),
        "status" => "cruby.request.status".into(),
        // The same name as in profiles.
        "slot_size" => "cruby.slot.size".into(),
        _ => format!("cruby.gc.{label}").into(),
    }
}

fn number(attributes: Vec<KeyValue>, value: number_data_point::Value, times: (u64, u64)) -> NumberDataPoint {
    let (start_time_unix_nano, time_unix_nano) = times;
    let value = Some(value);
    NumberDataPoint { attributes, start_time_unix_nano, time_unix_nano, value, ..NumberDataPoint::default() }
}

fn histogram(attributes: Vec<KeyValue>, lengths: &Times, times: (u64, u64)) -> HistogramDataPoint {
    HistogramDataPoint {
        attributes,
        start_time_unix_nano: times.0,
        time_unix_nano: times.1,
        count: lengths.count(),
        sum: Some(seconds(lengths.ns)),
        bucket_counts: lengths.buckets.clone(),
        explicit_bounds: lengths.bounds.iter().map(|ns| seconds(*ns)).collect(),
        ..HistogramDataPoint::default()
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::{service_requests::tests::request, services::tests::process},
        model::seen::{Observer as _, Seen},
    };

    fn agent() -> Agent {
        Agent { pid: 1, boot: Some("4c2a".to_owned()) }
    }

    fn of(services: &Services) -> Vec<Metric> {
        let mut starts = Starts::new(WallClock::measure());
        let metrics = Metrics::new(services, Ledger::default(), &mut starts, agent(), 0, 10);
        let sent = ExportMetricsServiceRequest::decode(&*metrics.encode()).unwrap();
        sent.resource_metrics.into_iter().next().unwrap().scope_metrics.into_iter().next().unwrap().metrics
    }

    /// A sum has an instance id: it stays the same while the host is up, and differs for another host, container and
    /// service. It contains nothing that belongs to one process.
    #[test]
    fn instances() {
        let resource = |boot: Option<&str>, service: &str, container: Option<&str>| {
            let mut process = process(1, service);
            let mut origin = Origin::clone(&process.origin);
            origin.container = container.map(str::to_owned);
            let own = [("service.instance.id", "mine"), ("service.version", "7"), ("deployment.id", "d")];
            origin.attributes = own.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
            process.origin = origin.into();
            let mut services = Services::new(false);
            services.see(&process, Seen::Process { state: None, now_ns: 5, since_ns: 5 });
            let agent = Agent { pid: 1, boot: boot.map(str::to_owned) };
            let mut starts = Starts::new(WallClock::measure());
            let metrics = Metrics::new(&services, Ledger::default(), &mut starts, agent, 0, 10);
            let sent = ExportMetricsServiceRequest::decode(&*metrics.encode()).unwrap();
            let [of_service, own] = &*sent.resource_metrics else { panic!("{sent:?}") };
            let attributes = |of: &ResourceMetrics| of.resource.clone().unwrap().attributes;
            let value = |of: &[KeyValue], key: &str| {
                let all: Vec<_> = of.iter().filter(|attribute| attribute.key == key).cloned().collect();
                assert!(all.len() <= 1, "{all:?}");
                all.into_iter().next()
            };
            let (of_service, own) = (attributes(of_service), attributes(own));
            assert_eq!(value(&of_service, "deployment.id"), Some(text("deployment.id", "d")));
            for of_one in ["service.version", "process.pid", "process.runtime.version"] {
                assert_eq!(value(&of_service, of_one), None);
            }
            assert_eq!(value(&own, "service.version"), Some(text("service.version", VERSION)));
            (value(&of_service, INSTANCE), value(&own, INSTANCE))
        };
        let (one, own) = resource(Some("4c2a"), "web", None);
        assert_eq!(resource(Some("4c2a"), "web", None), (one.clone(), own.clone()));
        let others = [
            one.clone(),
            own.clone(),
            resource(Some("4c2b"), "web", None).0,
            resource(Some("4c2b"), "web", None).1,
            resource(Some("4c2a"), "api", None).0,
            resource(Some("4c2a"), "web", Some("c1")).0,
        ];
        for (at, other) in others.iter().enumerate() {
            assert!(other.is_some() && !others[..at].contains(other), "{others:?}");
            assert_ne!(*other, Some(text(INSTANCE, "mine")));
        }
        assert_eq!(resource(None, "web", None), (None, None));
    }

    /// The host's clock may be set while gctrace runs: the current time follows it, while a start time is unchanged and
    /// never later than the current time.
    #[test]
    fn clock_is_set() {
        let times = |step_ns: i64| {
            let mut starts = Starts::new(WallClock::with_offsets(1_000, 0));
            let services = Services::new(false);
            let mut times = |now_ns| {
                let metrics = Metrics::new(&services, Ledger::default(), &mut starts, agent(), 5, now_ns);
                starts.clock = WallClock::with_offsets(1_000 + step_ns, 0);
                metrics.snapshot.times(metrics.snapshot.began)
            };
            assert_eq!(times(7), (1005, 1007));
            times(10)
        };
        assert_eq!([times(0), times(100), times(-100)], [(1005, 1010), (1005, 1110), (1005, 1005)]);
    }

    /// The sums of a service that is first seen after the clock was set back start by the clock that the host has then: its points have the times at
    /// which they are made.
    #[test]
    fn seen_after_the_clock_was_set_back() {
        const SECOND: u64 = 1_000_000_000;
        let clock = |seconds: u64| WallClock::with_offsets((seconds * SECOND) as i64, 0);
        let mut starts = Starts::new(clock(10_000));
        let mut services = Services::new(false);
        let see = |services: &mut Services, pid, name, now_ns| {
            services.see(&process(pid, name), Seen::Process { state: None, now_ns, since_ns: now_ns });
        };
        let mut times = |services: &Services, clock, now_s: u64| {
            starts.clock = clock;
            let ns = now_s * SECOND;
            let metrics = Metrics::new(services, Ledger::default(), &mut starts, agent(), SECOND, ns);
            let snapshot = &metrics.snapshot;
            let of = snapshot.services.iter().map(|(_, _, since)| snapshot.times(*since));
            of.map(|(since, now)| (since / SECOND, now / SECOND)).collect::<Vec<_>>()
        };
        see(&mut services, 1, "a", SECOND);
        assert_eq!(times(&services, clock(10_000), 10), [(10_001, 10_010)]);
        see(&mut services, 2, "b", 20 * SECOND);
        // By 3600 s.
        let set = clock(6_400);
        assert_eq!(times(&services, set, 30), [(10_001, 10_001), (6_420, 6_430)]);
        assert_eq!(times(&services, set, 40), [(10_001, 10_001), (6_420, 6_440)]);
    }

    /// Requests have the attributes of the conventions. A service without requests has no request metrics.
    #[test]
    fn requests() {
        let mut services = Services::new(false);
        let web = process(1, "web");
        services.see(&web, Seen::Process { state: None, now_ns: 5, since_ns: 5 });
        assert!(!of(&services).iter().any(|metric| metric.name.starts_with("cruby.request")));
        services.see(&web, Seen::Request(&request(Some("/orders/:id"), Some(2_000_000), Some(404))));
        let metrics = of(&services);
        let metric = metrics.iter().find(|metric| metric.name == "cruby.request.duration").unwrap();
        let Some(Data::Histogram(histogram)) = &metric.data else { panic!("{metric:?}") };
        let [point] = &*histogram.data_points else { panic!("{histogram:?}") };
        let expected = [
            text("http.request.method", "GET"),
            text("url.template", "/orders/:id"),
            text("cruby.request.status", "4xx"),
        ];
        assert_eq!(point.attributes, expected);
        assert_eq!((point.count, point.bucket_counts[1], point.sum), (1, 1, Some(0.002)));
    }
}
