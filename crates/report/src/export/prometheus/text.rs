//! The exposition format: OpenMetrics 1.0, or the older text format of Prometheus for clients that do not ask for it.

use std::fmt::{self, Write as _};

use gctrace_common::stats::Counter;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, text},
    metrics::{MetricType, exemplar::Exemplar},
    registry::{Registry, Unit},
};

use crate::{
    aggregate::services::{ServiceKey, Services, Times},
    export::{
        VERSION,
        figures::{self, Figure, Kind, Value},
    },
    ledger::{Ledger, only_grows},
};

/// A label set.
type Labels = Vec<(&'static str, String)>;
/// No exemplars are exported.
const NO_EXEMPLAR: Option<&Exemplar<Labels, f64>> = None;

/// Everything as OpenMetrics text.
pub(super) fn openmetrics(services: Services, ledger: Ledger) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(View { services, ledger }));
    let mut out = String::with_capacity(64 << 10);
    text::encode(&mut out, &registry)?;
    Ok(out)
}

/// Converts OpenMetrics text to the older format: there, a counter has the name of its sample, and there are no units and no end marker.
pub(super) fn classic(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len() + 1024);
    let mut lines = openmetrics.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((head, rest)) = line.strip_prefix("# ").and_then(|rest| rest.split_once(' ')) else {
            if line != "# EOF" {
                out.push_str(line);
                out.push('\n');
            }
            continue;
        };
        let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        // HELP always precedes TYPE.
        let is_counter = |line: &str| line.ends_with(" counter");
        let counter = match head {
            "HELP" => lines.peek().is_some_and(|next| is_counter(next)),
            "TYPE" => is_counter(line),
            _ => continue,
        };
        let suffix = if counter { "_total" } else { "" };
        // Writing to a string cannot fail.
        let _infallible = writeln!(out, "# {head} {name}{suffix} {rest}");
    }
    out
}

/// The exported data: all services and gctrace itself.
#[derive(Debug)]
struct View {
    services: Services,
    ledger: Ledger,
}

impl Collector for View {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let services: Vec<(Labels, Vec<Figure>)> = self
            .services
            .iter()
            .map(|(key, service, gauges)| (labels(key), figures::of(service, gauges.as_ref())))
            .collect();
        let count = services.first().map_or(0, |(_, figures)| figures.len());
        for at in 0..count {
            let Some(first) = services.first().and_then(|(_, figures)| figures.get(at)) else { continue };
            let (unit, kind) = (unit(first.unit), metric_type(first.kind));
            let mut metric = encoder.encode_descriptor(first.prometheus, first.help, unit.as_ref(), kind)?;
            for (own, figures) in &services {
                let Some(figure) = figures.get(at) else { continue };
                for point in &figure.points {
                    let mut labels = own.clone();
                    labels.extend(point.labels.iter().map(|(name, value)| (*name, value.to_string())));
                    put(&mut metric.encode_family(&labels)?, figure.kind, &point.value)?;
                }
            }
        }
        self.account(&mut encoder)
    }
}

impl View {
    /// gctrace's own counters.
    fn account(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut counters = |name: &str, help: &str, label: &'static str, values: &[(&str, u64)]| {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (value, count) in values {
                if label.is_empty() {
                    metric.encode_counter(count, NO_EXEMPLAR)?;
                } else {
                    metric.encode_family(&[(label, *value)])?.encode_counter(count, NO_EXEMPLAR)?;
                }
            }
            Ok(())
        };
        let kernel = self.ledger.kernel_counters();
        let hits = |counter: Counter| kernel.get(counter as usize).map_or(0, |(_, value)| *value);
        let probes = [
            ("gc_start", hits(Counter::Starts)),
            ("gc_end_mark", hits(Counter::EndMarks)),
            ("gc_end_sweep", hits(Counter::EndSweeps)),
            ("gc_enter", hits(Counter::Enters)),
            ("gc_exit", hits(Counter::Exits)),
            ("gvl", hits(Counter::GvlHits)),
        ];
        counters(
            "gctrace_events_lost",
            "Records and measurements that were lost",
            "",
            &[("", self.ledger.lost())],
        )?;
        counters("gctrace_probe_hits", "Probe hits of traced processes, by probe", "probe", &probes)?;
        counters("gctrace_kernel_events", "Counters of the kernel side", "counter", &kernel)?;
        let user = self.ledger.user_counters();
        let user: Vec<_> = user.into_iter().filter(|(name, _)| only_grows(name)).collect();
        counters("gctrace_user_events", "Counters of user space", "counter", &user)?;
        let beyond = [("", self.services.beyond)];
        counters(
            "gctrace_services_beyond_limit",
            "Processes of services beyond the limit, reported as one",
            "",
            &beyond,
        )?;
        let help = "Version of the gctrace that reports this";
        let mut build = encoder.encode_descriptor("gctrace_build_info", help, None, MetricType::Gauge)?;
        build.encode_family(&[("version", VERSION)])?.encode_gauge(&1_u32)
    }
}

fn labels(key: &ServiceKey) -> Labels {
    let mut labels = vec![("service", key.service.clone()), ("container", key.container.clone())];
    labels.extend(key.pid.map(|pid| ("pid", pid.to_string())));
    labels
}

fn unit(unit: &str) -> Option<Unit> {
    match unit {
        "s" => Some(Unit::Seconds),
        "By" => Some(Unit::Bytes),
        _ => None,
    }
}

fn metric_type(kind: Kind) -> MetricType {
    match kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn put(metric: &mut MetricEncoder<'_>, kind: Kind, value: &Value) -> Result<(), fmt::Error> {
    match (kind, value) {
        (Kind::Gauge, Value::Number(number)) => metric.encode_gauge(number),
        (Kind::Gauge, Value::Time(ns)) => metric.encode_gauge(&seconds(*ns)),
        (_, Value::Number(number)) => metric.encode_counter(number, NO_EXEMPLAR),
        (_, Value::Time(ns)) => metric.encode_counter(&seconds(*ns), NO_EXEMPLAR),
        (_, Value::Times(times)) => {
            let buckets = buckets(times);
            metric.encode_histogram::<Labels>(seconds(times.ns), times.count(), &buckets, None)
        }
    }
}

fn buckets(times: &Times) -> Vec<(f64, u64)> {
    let bounds = times.bounds.iter().map(|ns| seconds(*ns)).chain([f64::INFINITY]);
    bounds.zip(times.buckets.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::{service_requests::tests::request, services::tests::process},
        model::{
            request::Allocated,
            seen::{Observer as _, Seen},
        },
    };

    /// Requests by endpoint and status class.
    #[test]
    fn requests() {
        let mut services = Services::new(false);
        let web = process(1, "web");
        services.see(&web, Seen::Process { state: None, now_ns: 5, since_ns: 5 });
        for (ns, status) in [(Some(2_000_000), Some(200)), (Some(40_000_000_000), Some(201)), (None, None)] {
            let mut request = request(Some("/orders/:id"), ns, status);
            if status == Some(200) {
                (request.queue_ns, request.gvl_wait_ns) = (Some(2_000_000), Some(3_000));
                request.alloc = Some(Allocated { slots: 15, bytes: 600 });
            }
            services.see(&web, Seen::Request(&request));
        }
        let text = openmetrics(services, Ledger::default()).unwrap();
        let of: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("cruby_request") && !line.starts_with("# HELP"))
            .filter(|line| {
                !line.contains("_bucket") || line.contains(r#"le="0.0025""#) || line.contains("Inf")
            })
            .collect();
        let expected = r#"# TYPE cruby_requests counter
cruby_requests_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 2
cruby_requests_total{service="web",container="",method="GET",path="/orders/:id",status="unknown"} 1
# TYPE cruby_request_duration_seconds histogram
# UNIT cruby_request_duration_seconds seconds
cruby_request_duration_seconds_sum{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 40.002
cruby_request_duration_seconds_count{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 2
cruby_request_duration_seconds_bucket{le="0.0025",service="web",container="",method="GET",path="/orders/:id",status="2xx"} 1
cruby_request_duration_seconds_bucket{le="+Inf",service="web",container="",method="GET",path="/orders/:id",status="2xx"} 2
# TYPE cruby_request_queue_seconds histogram
# UNIT cruby_request_queue_seconds seconds
cruby_request_queue_seconds_sum{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 0.002
cruby_request_queue_seconds_count{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 1
cruby_request_queue_seconds_bucket{le="0.0025",service="web",container="",method="GET",path="/orders/:id",status="2xx"} 1
cruby_request_queue_seconds_bucket{le="+Inf",service="web",container="",method="GET",path="/orders/:id",status="2xx"} 1
# TYPE cruby_request_gc_seconds counter
# UNIT cruby_request_gc_seconds seconds
cruby_request_gc_seconds_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 2e-8
cruby_request_gc_seconds_total{service="web",container="",method="GET",path="/orders/:id",status="unknown"} 1e-8
# TYPE cruby_request_gc_of_others_seconds counter
# UNIT cruby_request_gc_of_others_seconds seconds
cruby_request_gc_of_others_seconds_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 1e-7
cruby_request_gc_of_others_seconds_total{service="web",container="",method="GET",path="/orders/:id",status="unknown"} 5e-8
# TYPE cruby_request_gvl_wait_seconds counter
# UNIT cruby_request_gvl_wait_seconds seconds
cruby_request_gvl_wait_seconds_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 0.000003
# TYPE cruby_request_gc_collections counter
cruby_request_gc_collections_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 4
cruby_request_gc_collections_total{service="web",container="",method="GET",path="/orders/:id",status="unknown"} 2
# TYPE cruby_request_allocated_objects counter
cruby_request_allocated_objects_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 15
# TYPE cruby_request_allocated_bytes counter
# UNIT cruby_request_allocated_bytes bytes
cruby_request_allocated_bytes_total{service="web",container="",method="GET",path="/orders/:id",status="2xx"} 600
"#;
        assert_eq!(of.join("\n"), expected.trim_end());
    }

    /// Both formats have the same samples; only OpenMetrics has units and an end marker.
    #[test]
    fn two_formats() {
        let text = openmetrics(Services::default(), Ledger::default()).unwrap();
        assert!(
            text.contains("\n# TYPE gctrace_events_lost counter\ngctrace_events_lost_total 0\n"),
            "{text}"
        );
        assert!(text.ends_with("# EOF\n"));
        let classic = classic(&text);
        assert!(classic.contains("# TYPE gctrace_events_lost_total counter\ngctrace_events_lost_total 0\n"));
        assert!(classic.contains("# HELP gctrace_events_lost_total Records"));
        assert!(classic.contains("# TYPE gctrace_build_info gauge\n") && !classic.contains("EOF"));
        let samples = |text: &str| {
            text.lines().filter(|line| !line.starts_with('#')).map(ToOwned::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(samples(&text), samples(&classic));
    }
}
