//! The collector's counters, in Prometheus' text format.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::store::Totals;

/// Counters since the start.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    answers: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Connections accepted.
    pub(super) connections: AtomicU64,
    /// Connections that ended before a request was complete, or that took too long.
    pub(super) broken: AtomicU64,
    /// Connections refused because their address was at its limit.
    pub(super) crowded: AtomicU64,
    /// Bytes of received bodies.
    pub(super) received_bytes: AtomicU64,
    /// Bytes of sets after decompression.
    pub(super) set_bytes: AtomicU64,
    /// Sets stored.
    pub(super) sets: AtomicU64,
    /// Sets that had already been stored.
    pub(super) duplicates: AtomicU64,
    /// Samples of the sets stored.
    pub(super) samples: AtomicU64,
    /// Sets deleted because their application exceeded its quota.
    pub(super) over_quota: AtomicU64,
    /// Sets deleted because of their age.
    pub(super) expired: AtomicU64,
    /// Number of times that the evidence of an environment was stored.
    pub(super) summarized: AtomicU64,
}

impl Metrics {
    pub(super) fn answered(&self, route: &'static str, code: u16) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        *answers.entry((route, code)).or_default() += 1;
    }

    pub(super) fn to_text(&self, totals: Totals) -> String {
        let mut text = String::new();
        let mut put = |line: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _infallible = writeln!(text, "{line}");
        };
        put(format_args!("# HELP gctrace_collector_answers_total Answers by route and status."));
        put(format_args!("# TYPE gctrace_collector_answers_total counter"));
        for ((route, code), count) in &*self.answers.lock().unwrap_or_else(PoisonError::into_inner) {
            put(format_args!("gctrace_collector_answers_total{{route=\"{route}\",code=\"{code}\"}} {count}"));
        }
        for (name, help, counter) in [
            ("connections_total", "Connections accepted.", &self.connections),
            ("broken_connections_total", "Connections that broke off or took too long.", &self.broken),
            ("refused_connections_total", "Connections beyond the limit of their address.", &self.crowded),
            ("received_bytes_total", "Bytes of bodies as received.", &self.received_bytes),
            ("set_bytes_total", "Bytes of sets after decompression.", &self.set_bytes),
            ("sets_total", "Sets stored since the start.", &self.sets),
            ("duplicate_sets_total", "Sets that were stored already.", &self.duplicates),
            ("samples_total", "Samples of sets stored since the start.", &self.samples),
            (
                "over_quota_sets_total",
                "Sets deleted because their application had too many.",
                &self.over_quota,
            ),
            ("expired_sets_total", "Sets deleted because of their age.", &self.expired),
            (
                "kept_environments_total",
                "Environments whose evidence was kept for the time after their sets are deleted.",
                &self.summarized,
            ),
        ] {
            let value = counter.load(Ordering::Relaxed);
            put(format_args!("# HELP gctrace_collector_{name} {help}"));
            put(format_args!("# TYPE gctrace_collector_{name} counter"));
            put(format_args!("gctrace_collector_{name} {value}"));
        }
        for (name, help, value) in [
            ("stored_apps", "Applications in the store.", totals.apps),
            ("stored_sets", "Sets in the store.", totals.sets),
            ("stored_samples", "Samples of the sets in the store.", totals.samples),
        ] {
            put(format_args!("# HELP gctrace_collector_{name} {help}"));
            put(format_args!("# TYPE gctrace_collector_{name} gauge"));
            put(format_args!("gctrace_collector_{name} {value}"));
        }
        text
    }
}
