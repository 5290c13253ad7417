//! The report of `gctrace doctor` as JSON lines: `host`, `image`, `process`, `summary`. Documented in docs/doctor.md.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use serde::Serialize;

use crate::{
    discover::Subject,
    doctor::report::{
        Feature, HostReport, ImageReport, Looked, ProcessReport, Proof, Report, SiteCount, Summary, Tracing,
    },
    ruby::fallback::Method,
};

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Host {
        ready: bool,
        hostname: &'a str,
        kernel: &'a str,
        machine: &'a str,
        uid: u32,
        checks: Vec<HostCheck<'a>>,
        verified: BTreeMap<&'a str, u32>,
    },
    Image(Box<Image<'a>>),
    Process {
        pid: u32,
        ruby: Option<&'a str>,
        image: String,
        build_id: Option<&'a str>,
        command: Option<&'a str>,
        works: bool,
        proof: &'static str,
        reason: Option<&'a str>,
        gc_count: Option<u64>,
        heap_live_slots: Option<u64>,
        heap_available_slots: Option<u64>,
    },
    Summary {
        exit_status: u8,
        host_ready: bool,
        images: usize,
        images_working: usize,
        images_cached: usize,
        processes: Option<usize>,
        processes_working: usize,
        processes_looked_at: usize,
        processes_denied: usize,
        misses: Vec<Miss<'a>>,
        denied: Vec<DeniedLine<'a>>,
    },
}

#[derive(Serialize)]
struct HostCheck<'a> {
    name: &'a str,
    status: &'static str,
    detail: &'a str,
    remedy: Option<&'a str>,
}

#[derive(Serialize)]
struct Image<'a> {
    path: String,
    ruby: Option<&'a str>,
    description: Option<&'a str>,
    build_id: Option<&'a str>,
    works: bool,
    traced: bool,
    method: Option<&'static str>,
    confidence: &'static str,
    confidence_reason: &'a str,
    processes: Option<usize>,
    refused: Option<Refused<'a>>,
    sites: Option<Vec<Sites>>,
    slow_sites: Option<usize>,
    symbols: Option<bool>,
    symbols_from: Option<&'a str>,
    checks: Option<Vec<Check<'a>>>,
    layout: Option<&'a str>,
    stat_keys: Option<Vec<StatKey>>,
    cached: Option<bool>,
    analysis_us: Option<u128>,
    features: Vec<FeatureLine<'a>>,
}

#[derive(Serialize)]
struct Refused<'a> {
    reason: &'a str,
    remedy: &'a str,
}

#[derive(Serialize)]
struct Sites {
    event: &'static str,
    total: usize,
    guard: usize,
    scan: usize,
    call: usize,
    with_register: usize,
}

#[derive(Serialize)]
struct Check<'a> {
    name: &'a str,
    outcome: &'static str,
    reason: Option<&'a str>,
}

#[derive(Serialize)]
struct StatKey {
    name: &'static str,
    known_by: &'static str,
}

#[derive(Serialize)]
struct FeatureLine<'a> {
    name: &'static str,
    works: bool,
    reason: Option<&'a str>,
    remedy: Option<&'a str>,
}

#[derive(Serialize)]
struct Miss<'a> {
    pid: Option<u32>,
    file: Option<String>,
    selection: Option<&'a str>,
    reason: &'a str,
}

impl<'a> Miss<'a> {
    fn of(miss: &'a crate::discover::Miss) -> Self {
        let of = Self { pid: None, file: None, selection: None, reason: &miss.reason };
        match &miss.subject {
            Subject::Pid(pid) => Self { pid: Some(*pid), ..of },
            Subject::File(path) => Self { file: Some(path.to_string_lossy().into_owned()), ..of },
            Subject::Sought(flags) => Self { selection: Some(flags), ..of },
        }
    }
}

#[derive(Serialize)]
struct DeniedLine<'a> {
    pid: u32,
    reason: &'a str,
}

/// Writes a report, one object per line.
pub(super) fn write_jsonl(out: &mut impl Write, report: &Report) -> io::Result<()> {
    write(out, &host(&report.host, &report.summary))?;
    for found in &report.images {
        write(out, &image(found, report.summary.looked))?;
    }
    for found in &report.processes {
        write(out, &process(found, &report.images[found.image]))?;
    }
    write(out, &summary(report))
}

fn write(out: &mut impl Write, line: &Line<'_>) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    out.write_all(b"\n")
}

fn host<'a>(host: &'a HostReport, summary: &Summary) -> Line<'a> {
    let check = |check: &'a crate::doctor::report::HostCheck| HostCheck {
        name: &check.name,
        status: check.status.name(),
        detail: &check.detail,
        remedy: check.remedy.as_deref(),
    };
    Line::Host {
        ready: summary.host_ready,
        hostname: &host.hostname,
        kernel: &host.kernel,
        machine: &host.machine,
        uid: host.uid,
        checks: host.checks.iter().map(check).collect(),
        verified: host.verified.iter().map(|(program, walked)| (program.as_str(), *walked)).collect(),
    }
}

fn image(image: &ImageReport, looked: Looked) -> Line<'_> {
    let (tracing, refused) = (image.tracing.as_ref(), image.refused.as_ref());
    Line::Image(Box::new(Image {
        path: image.path.to_string_lossy().into_owned(),
        ruby: image.version.as_deref(),
        description: image.description.as_deref(),
        build_id: image.build_id.as_deref(),
        works: image.works(),
        traced: image.method.is_some(),
        method: image.method.map(Method::name),
        confidence: image.confidence.0.name(),
        confidence_reason: &image.confidence.1,
        processes: looked.known(image.processes),
        refused: refused.map(|refused| Refused { reason: &refused.reason, remedy: &refused.remedy }),
        sites: tracing.map(|tracing| tracing.sites.iter().map(sites).collect()),
        slow_sites: tracing.map(|tracing| tracing.slow_sites).or(image.fallback.map(|(_, slow)| slow)),
        symbols: tracing.map(|tracing| tracing.symbols),
        symbols_from: tracing.and_then(|tracing| tracing.symbols_from.as_deref()),
        checks: tracing.map(checks),
        layout: tracing.map(|tracing| tracing.layout.as_str()),
        stat_keys: tracing.map(stat_keys),
        cached: tracing.map(|tracing| tracing.cached),
        analysis_us: tracing.map(|tracing| tracing.took_us),
        features: image.features.iter().map(feature).collect(),
    }))
}

fn sites(count: &SiteCount) -> Sites {
    let SiteCount { event, guard, scan, call, with_register } = *count;
    Sites { event, total: count.total(), guard, scan, call, with_register }
}

fn checks(tracing: &Tracing) -> Vec<Check<'_>> {
    tracing
        .checks
        .iter()
        .map(|(name, reason)| Check {
            name,
            outcome: if reason.is_some() { "not_applicable" } else { "passed" },
            reason: reason.as_deref(),
        })
        .collect()
}

fn stat_keys(tracing: &Tracing) -> Vec<StatKey> {
    tracing.stat_keys.iter().map(|key| StatKey { name: key.name, known_by: key.known_by }).collect()
}

fn feature(feature: &Feature) -> FeatureLine<'_> {
    let lack = feature.lack.as_ref();
    FeatureLine {
        name: feature.name,
        works: lack.is_none(),
        reason: lack.map(|(reason, _)| reason.as_str()),
        remedy: lack.map(|(_, remedy)| remedy.as_str()),
    }
}

fn process<'a>(process: &'a ProcessReport, image: &'a ImageReport) -> Line<'a> {
    let (proof, reason, values) = match &process.proof {
        Proof::Passed { count, live_slots, available_slots } => {
            ("passed", None, Some((*count, *live_slots, *available_slots)))
        }
        Proof::Later(reason) => ("later", Some(*reason), None),
        Proof::Unreadable(error) => ("unreadable", Some(error.as_str()), None),
        Proof::Failed(reason) => ("failed", Some(reason.as_str()), None),
        Proof::NotTried => ("not_tried", image.refused.as_ref().map(|refused| refused.reason.as_str()), None),
    };
    Line::Process {
        pid: process.pid,
        ruby: image.version.as_deref(),
        image: image.path.to_string_lossy().into_owned(),
        build_id: image.build_id.as_deref(),
        command: process.command.as_deref(),
        works: process.works(image),
        proof,
        reason,
        gc_count: values.map(|(count, ..)| count),
        heap_live_slots: values.and_then(|(_, live, _)| live),
        heap_available_slots: values.and_then(|(.., available)| available),
    }
}

fn summary(report: &Report) -> Line<'_> {
    let summary = &report.summary;
    Line::Summary {
        exit_status: summary.exit_status,
        host_ready: summary.host_ready,
        images: summary.images,
        images_working: summary.images_working,
        images_cached: summary.images_cached,
        processes: summary.looked.known(summary.processes),
        processes_working: summary.processes_working,
        processes_looked_at: summary.looked.at,
        processes_denied: summary.looked.denied,
        misses: report.misses.iter().map(Miss::of).collect(),
        denied: report
            .denied
            .iter()
            .map(|denied| DeniedLine { pid: denied.pid, reason: &denied.reason })
            .collect(),
    }
}
