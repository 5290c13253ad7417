//! The figures of a service, with their names: one table for all metrics exporters.

use std::borrow::Cow;

use Kind::{Counter, Gauge, Histogram};

use crate::{
    aggregate::{
        service_requests::{RequestFigures, RequestKey},
        services::{Gauges, Service, Times},
    },
    model::Shares,
};

/// The kind of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A monotonic sum.
    Counter,
    /// A current value.
    Gauge,
    /// Distribution of durations.
    Histogram,
}

/// A value of a figure.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// A plain number.
    Number(u64),
    /// A duration, nanoseconds.
    Time(u64),
    /// Distribution of durations.
    Times(Box<Times>),
}

/// A value with the labels that distinguish it from others of its figure.
pub(super) struct Point {
    /// Names and values of the labels.
    pub(super) labels: Vec<(&'static str, Cow<'static, str>)>,
    /// The value.
    pub(super) value: Value,
}

/// A figure of a service.
pub(super) struct Figure {
    /// Name for Prometheus, without unit and suffix.
    pub(super) prometheus: &'static str,
    /// Name for OpenTelemetry.
    pub(super) otlp: &'static str,
    /// Unit, in the notation of OpenTelemetry (UCUM).
    pub(super) unit: &'static str,
    /// Its kind.
    pub(super) kind: Kind,
    /// Human-readable description.
    pub(super) help: &'static str,
    /// Its values.
    pub(super) points: Vec<Point>,
}

fn one(labels: &[(&'static str, &'static str)], value: Value) -> Point {
    Point { labels: labels.iter().map(|(name, value)| (*name, Cow::Borrowed(*value))).collect(), value }
}

fn number(value: u64) -> Vec<Point> {
    vec![one(&[], Value::Number(value))]
}

/// One value per endpoint and status class.
fn by_endpoint(service: &Service, value: impl Fn(&RequestFigures) -> Option<Value>) -> Vec<Point> {
    let point = |(key, figures): (&RequestKey, &RequestFigures)| {
        let value = value(figures)?;
        Some(Point {
            labels: vec![
                ("method", Cow::Borrowed(key.method)),
                ("path", Cow::Owned(key.path.clone())),
                ("status", Cow::Borrowed(key.status)),
            ],
            value,
        })
    };
    service.requests.iter().filter_map(point).collect()
}

/// All figures of a service. Every service has the same figures in the same order.
pub(super) fn of(service: &Service, gauges: Option<&Gauges>) -> Vec<Figure> {
    let figure =
        |prometheus, otlp, unit, kind, help, points| Figure { prometheus, otlp, unit, kind, help, points };
    let cycles = service.cycles.iter().map(|(key, count)| {
        let labels = [
            ("type", key.kind),
            ("gc_by", key.gc_by.unwrap_or("none")),
            ("major_by", key.major_by.unwrap_or("none")),
        ];
        one(&labels, Value::Number(*count))
    });
    // Without event sites, all that is known is in `work`.
    let of_cycles = |points: Vec<Point>| if service.has_cycles { points } else { Vec::new() };
    let by_kind = |times: &[Times; 2]| {
        let both = ["minor", "major"].iter().zip(times);
        let both = both.map(|(kind, times)| one(&[("type", kind)], Value::Times(Box::new(times.clone()))));
        of_cycles(both.collect())
    };
    let [mark_ns, sweep_ns, other_ns] = service.phases;
    // Finalizers that run when a program exits may account for most of its GC time.
    let phases =
        [("mark", mark_ns), ("sweep", sweep_ns), ("other", other_ns), ("outside_cycles", service.outside_ns)];
    let phases = phases.map(|(phase, ns)| one(&[("phase", phase)], Value::Time(ns)));
    let work = service.work.iter().map(|(phase, (_, ns))| one(&[("phase", phase)], Value::Time(*ns)));
    // Before the first GC event of a process, its heap is unknown, which is not the same as zero.
    let slots = gauges.into_iter().flat_map(|gauges| {
        [("live", gauges.live_slots), ("free", gauges.free_slots), ("final", gauges.final_slots)]
            .into_iter()
            .filter_map(|(state, slots)| Some(one(&[("state", state)], Value::Number(slots?))))
    });
    let gauge = |of: fn(&Gauges) -> Option<u64>| gauges.and_then(of).map_or_else(Vec::new, number);
    let of_size = |size: String, state: Option<&'static str>, value: u64| {
        let size = ("slot_size", Cow::Owned(size));
        let state = state.map(|state| ("state", Cow::Borrowed(state)));
        Point { labels: std::iter::once(size).chain(state).collect(), value: Value::Number(value) }
    };
    let pools = gauges.into_iter().flat_map(|gauges| &gauges.pools).flat_map(|(size, (used, free))| {
        [("used", used), ("free", free)]
            .map(|(state, slots)| of_size(size.to_string(), Some(state), slots.saturating_mul(*size)))
    });
    let handed_out = service.handed_out.iter().map(|(size, slots)| of_size(size.to_string(), None, *slots));
    // Only if the GVL is traced: zero is not the same as unknown.
    let gvl = service.has_gvl;
    let times = |times: &Times| gvl.then(|| one(&[], Value::Times(Box::new(times.clone()))));
    let (long_waits, waits) = (times(&service.gvl_long_waits), times(&service.gvl_waits));
    let held = (gvl && !service.holds_unknown).then(|| one(&[], Value::Time(service.gvl_held_ns)));
    let shares = |part: fn(&Shares) -> u64| {
        gauges.and_then(|gauges| gauges.shares.as_ref()).map(part).map_or_else(Vec::new, number)
    };
    vec![
        figure(
            "cruby_gc_collections",
            "cruby.gc.collections",
            "{collection}",
            Counter,
            "Garbage collections",
            cycles.collect(),
        ),
        figure(
            "cruby_gc_pause",
            "cruby.gc.pause.duration",
            "s",
            Histogram,
            "Lengths of garbage collection pauses",
            by_kind(&service.pauses),
        ),
        figure(
            "cruby_gc_cycle_pause",
            "cruby.gc.cycle.pause.duration",
            "s",
            Histogram,
            "Lengths of all pauses of a garbage collection together",
            by_kind(&service.cycle_pauses),
        ),
        figure(
            "cruby_gc_time",
            "cruby.gc.time",
            "s",
            Counter,
            "Time in garbage collection pauses, by phase",
            of_cycles(phases.into()),
        ),
        figure(
            "cruby_gc_work",
            "cruby.gc.work",
            "s",
            Counter,
            "Time in parts of the garbage collector of Rubies without event sites",
            work.collect(),
        ),
        figure(
            "cruby_heap_slots",
            "cruby.heap.slots",
            "{slot}",
            Gauge,
            "Slots of the heap at the last GC event of each running process",
            slots.collect(),
        ),
        figure(
            "cruby_heap_pool",
            "cruby.heap.pool",
            "By",
            Gauge,
            "Bytes of slots by their size, at the last GC event of each running process",
            pools.collect(),
        ),
        figure(
            "cruby_heap_pages",
            "cruby.heap.pages",
            "{page}",
            Gauge,
            "Pages of the heap at the last GC event of each running process",
            gauge(|gauges| gauges.pages),
        ),
        figure(
            "cruby_old_objects",
            "cruby.heap.old_objects",
            "{object}",
            Gauge,
            "Objects of the old generation at the last GC event of each running process",
            gauge(|gauges| gauges.old_objects),
        ),
        figure(
            "cruby_allocated_objects",
            "cruby.objects.allocated",
            "{object}",
            Counter,
            "Objects allocated between the GC events seen",
            of_cycles(number(service.allocated)),
        ),
        figure(
            "cruby_freed_objects",
            "cruby.objects.freed",
            "{object}",
            Counter,
            "Objects freed between the GC events seen",
            of_cycles(number(service.freed)),
        ),
        figure(
            "cruby_handed_out_slots",
            "cruby.slots.handed_out",
            "{slot}",
            Counter,
            "Slots that were handed out for objects",
            handed_out.collect(),
        ),
        figure(
            "cruby_malloc_increase",
            "cruby.malloc.increase",
            "By",
            Gauge,
            "Bytes allocated by malloc since the last collection, at the last GC event of each running process",
            gauge(|gauges| gauges.malloc_increase),
        ),
        figure(
            "cruby_oldmalloc_increase",
            "cruby.oldmalloc.increase",
            "By",
            Gauge,
            "Bytes allocated by malloc since the last major collection began, at the last GC event of each running process",
            gauge(|gauges| gauges.oldmalloc_increase),
        ),
        figure(
            "cruby_resident_memory",
            "cruby.memory.resident",
            "By",
            Gauge,
            "Resident memory at the last GC event of each running process; shared pages count in each",
            gauge(|gauges| gauges.rss),
        ),
        figure(
            "cruby_proportional_memory",
            "cruby.memory.proportional",
            "By",
            Gauge,
            "With --shares: proportional memory (PSS), last read after a GC event of each running process",
            shares(|shares| shares.pss),
        ),
        figure(
            "cruby_private_dirty_memory",
            "cruby.memory.private_dirty",
            "By",
            Gauge,
            "With --shares: memory that only one process has and has written to, last read after a GC event of each running process",
            shares(|shares| shares.private_dirty),
        ),
        figure(
            "cruby_processes",
            "cruby.processes",
            "{process}",
            Gauge,
            "Processes that are traced",
            number(service.running),
        ),
        figure(
            "cruby_processes_seen",
            "cruby.processes.seen",
            "{process}",
            Counter,
            "Processes that were traced, ended ones included",
            number(service.seen),
        ),
        figure(
            "cruby_gvl_long_wait",
            "cruby.gvl.long_wait.duration",
            "s",
            Histogram,
            "Waits for the GVL above --gvl-threshold",
            long_waits.into_iter().collect(),
        ),
        figure(
            "cruby_gvl_wait",
            "cruby.gvl.wait.duration",
            "s",
            Histogram,
            "Completed waits for the GVL, of every length",
            waits.into_iter().collect(),
        ),
        figure(
            "cruby_gvl_held",
            "cruby.gvl.held",
            "s",
            Counter,
            "Time for which threads held the GVL, completed holds only",
            held.into_iter().collect(),
        ),
        figure(
            "cruby_requests",
            "cruby.requests",
            "{request}",
            Counter,
            "Requests served, by template of the path and class of status",
            by_endpoint(service, |of| Some(Value::Number(of.count))),
        ),
        figure(
            "cruby_request_duration",
            "cruby.request.duration",
            "s",
            Histogram,
            "From when a thread took a request until it was free for the next one",
            by_endpoint(service, |of| {
                (of.times.count() > 0).then(|| Value::Times(Box::new(of.times.clone())))
            }),
        ),
        figure(
            "cruby_request_queue",
            "cruby.request.queue.duration",
            "s",
            Histogram,
            "From when the kernel had a request's last bytes until a thread took it",
            by_endpoint(service, |of| {
                (of.queues.count() > 0).then(|| Value::Times(Box::new(of.queues.clone())))
            }),
        ),
        figure(
            "cruby_server_threads_busy",
            "cruby.server.threads.busy",
            "{thread}",
            Gauge,
            "Threads of the pools of Pumas that were serving a request, read about once a second",
            gauge(|gauges| gauges.busy),
        ),
        figure(
            "cruby_server_accept_queue",
            "cruby.server.accept_queue",
            "{connection}",
            Gauge,
            "Connections on listening TCP sockets that no process has accepted, read about once a second",
            gauge(|gauges| {
                (!gauges.queues.is_empty()).then(|| gauges.queues.values().copied().map(u64::from).sum())
            }),
        ),
        figure(
            "cruby_request_gc",
            "cruby.request.gc",
            "s",
            Counter,
            "Time in garbage collection pauses of threads that served a request",
            by_endpoint(service, |of| of.gc_ns.map(Value::Time)),
        ),
        figure(
            "cruby_request_gc_of_others",
            "cruby.request.gc.of_others",
            "s",
            Counter,
            "Time in garbage collection pauses of other threads of the process while a request was served",
            by_endpoint(service, |of| of.gc_other_ns.map(Value::Time)),
        ),
        figure(
            "cruby_request_gvl_wait",
            "cruby.request.gvl.wait",
            "s",
            Counter,
            "Time for which threads that served a request waited for the GVL",
            by_endpoint(service, |of| of.gvl_wait_ns.map(Value::Time)),
        ),
        figure(
            "cruby_request_gc_collections",
            "cruby.request.gc.collections",
            "{collection}",
            Counter,
            "Garbage collections that requests started",
            by_endpoint(service, |of| of.gcs.map(Value::Number)),
        ),
        figure(
            "cruby_request_allocated_objects",
            "cruby.request.objects.allocated",
            "{object}",
            Counter,
            "Slots of the heap that threads took to allocate objects while they served a request",
            by_endpoint(service, |of| of.alloc.map(|alloc| Value::Number(alloc.slots))),
        ),
        figure(
            "cruby_request_allocated",
            "cruby.request.allocated",
            "By",
            Counter,
            "Bytes of these slots",
            by_endpoint(service, |of| of.alloc.map(|alloc| Value::Number(alloc.bytes))),
        ),
        figure(
            "cruby_gc_records_lost",
            "cruby.gc.records_lost",
            "{record}",
            Counter,
            "GC records that the kernel had to drop; not included in the figures above",
            number(service.lost),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::services::{
            Services,
            tests::{END, process, state},
        },
        model::{
            Process,
            gvl::GvlCoverage,
            gvl_so_far::GvlSoFar,
            seen::{Observer as _, Seen},
        },
        ruby::fallback::{METHODS, Method},
    };

    /// Names of the figures of the only service that have a value.
    fn shown(services: &Services) -> Vec<&'static str> {
        let (_, service, gauges) = services.iter().next().unwrap();
        let some = of(service, gauges.as_ref()).into_iter().filter(|figure| !figure.points.is_empty());
        some.map(|figure| figure.prometheus).collect()
    }

    /// Keys that a Ruby does not have are not zero, nor after the end of the last process.
    #[test]
    fn unknown_keys() {
        let mut services = Services::new(false);
        let (process, state) = (process(1, "web"), state(10, 100));
        services.see(&process, Seen::Process { state: Some(&state), now_ns: 1, since_ns: 1 });
        let unknown =
            ["cruby_heap_pages", "cruby_old_objects", "cruby_malloc_increase", "cruby_oldmalloc_increase"];
        let is_absent = |services: &Services| unknown.iter().all(|name| !shown(services).contains(name));
        assert!(is_absent(&services) && shown(&services).contains(&"cruby_heap_slots"));
        services.see(&process, Seen::Ended(&END));
        assert!(is_absent(&services) && shown(&services).contains(&"cruby_heap_slots"));
        let mut known = process;
        let image = std::sync::Arc::make_mut(&mut known.image);
        image.stat_keys[0] = "old_objects";
        services.see(&known, Seen::Process { state: Some(&state), now_ns: 2, since_ns: 2 });
        assert!(shown(&services).contains(&"cruby_old_objects"));
        services.see(&known, Seen::Ended(&END));
        assert!(shown(&services).contains(&"cruby_old_objects"));
    }

    /// What only events of cycles tell is unknown of a service whose processes have no event sites, and remains once it is known.
    #[test]
    fn without_event_sites() {
        let of_cycles = [
            "cruby_gc_pause",
            "cruby_gc_cycle_pause",
            "cruby_gc_time",
            "cruby_allocated_objects",
            "cruby_freed_objects",
        ];
        let see = |services: &mut Services, process: &Process| {
            services.see(process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
        };
        for method in METHODS {
            let mut services = Services::new(false);
            let mut other = process(1, "web");
            std::sync::Arc::make_mut(&mut other.image).method = method;
            see(&mut services, &other);
            let has = |services: &Services, name| shown(services).contains(name);
            let expected = method == Method::Sites;
            assert!(of_cycles.iter().all(|name| has(&services, name) == expected), "{method:?}");
            assert!(has(&services, &"cruby_gc_records_lost") && has(&services, &"cruby_processes"));
            // A service without running processes has no gauge that it had not before.
            let mut ended = Services::new(false);
            see(&mut ended, &other);
            ended.see(&other, Seen::Ended(&END));
            for name in &["cruby_heap_slots", "cruby_resident_memory"] {
                assert_eq!(has(&ended, name), expected, "{method:?} {name}");
            }
            see(&mut services, &process(2, "web"));
            see(&mut services, &Process { pid: 3, ..other });
            assert!(of_cycles.iter().all(|name| has(&services, name)), "{method:?}");
        }
    }

    /// What is shown of the GVL does not depend on which process of a service was the last one to start.
    #[test]
    fn gvl_of_several_rubies() {
        let with = |pid, holds: Option<bool>| {
            let mut process: Process = process(pid, "web");
            let gvl = holds.map(|holds| GvlCoverage { holds, ..GvlCoverage::default() });
            std::sync::Arc::make_mut(&mut process.image).gvl = gvl;
            process
        };
        let see = |services: &mut Services, process: &Process| {
            services.see(process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
        };
        let gvl = |services: &Services| {
            let shown = shown(services);
            (shown.contains(&"cruby_gvl_wait"), shown.contains(&"cruby_gvl_held"))
        };
        let mut services = Services::new(false);
        see(&mut services, &with(1, None));
        assert_eq!(gvl(&services), (false, false));
        see(&mut services, &with(2, Some(true)));
        assert_eq!(gvl(&services), (true, true));
        see(&mut services, &with(3, None));
        assert_eq!(gvl(&services), (true, true), "a process whose GVL is not traced takes nothing back");
        see(&mut services, &with(4, Some(false)));
        assert_eq!(gvl(&services), (true, false), "the sum would lack its holds");
        see(&mut services, &with(5, Some(true)));
        assert_eq!(gvl(&services), (true, false));

        // What was shown remains.
        let mut services = Services::new(false);
        let first = with(1, Some(true));
        see(&mut services, &first);
        let so_far = GvlSoFar::of_counts(Box::new([0; gctrace_common::gvl::BUCKETS]), 0, 7);
        services.see(&first, Seen::GvlSoFar(&so_far));
        see(&mut services, &with(2, Some(false)));
        assert_eq!(gvl(&services), (true, true));
    }
}
