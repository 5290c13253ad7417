//! JSON lines: `process`, `gc`, `work`, `exit`, `refused` and `ledger`.

use std::{collections::BTreeMap, io::Write};

use serde::{Serialize, Serializer, ser::SerializeMap};

use super::{ExportError, Exporter, ProcessEnd};
use crate::{
    enrich::clock::WallClock,
    ledger::Ledger,
    model::{GcCycle, GcState, GcWork, Pause, Process},
    ruby::{PauseKind, stat::GcInfo},
};

/// Writes JSON lines.
pub struct Jsonl<W: Write> {
    out: W,
    clock: WallClock,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Process {
        pid: u32,
        ns_pid: Option<u32>,
        ppid: Option<u32>,
        comm: &'a str,
        cmdline: Option<&'a [String]>,
        ruby: String,
        image: String,
        build_id: Option<&'a str>,
        method: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        misses: Option<&'static str>,
        probes: usize,
        start_ts: Option<f64>,
        hostname: Option<&'a str>,
        env: &'a BTreeMap<String, String>,
        container: Option<&'a str>,
        stat: Option<Stat<'a>>,
    },
    Gc(Box<Gc<'a>>),
    Work {
        ts: f64,
        pid: u32,
        tid: u32,
        comm: &'a str,
        phase: &'static str,
        begin_ns: u64,
        ns: u64,
    },
    Exit {
        ts: f64,
        pid: u32,
        reason: &'static str,
        cycles: u64,
        lost: u64,
        stat: Option<Stat<'a>>,
    },
    Refused {
        pid: Option<u32>,
        image: &'a str,
        reason: &'a str,
    },
    Ledger {
        balanced: bool,
        kernel: Counters<'a>,
        user: Counters<'a>,
    },
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the wire format")]
struct Gc<'a> {
    ts: f64,
    pid: u32,
    tid: u32,
    comm: &'a str,
    ruby: String,
    container: Option<&'a str>,
    count: u64,
    kind: &'static str,
    gc_by: Option<&'static str>,
    major_by: Option<&'static str>,
    compacting: Option<bool>,
    pause_ns: u64,
    phases: Phases,
    steps: usize,
    mark_steps: usize,
    sweep_steps: usize,
    pauses: Vec<PauseSpan>,
    complete: bool,
    end_ts: Option<f64>,
    stat: Stat<'a>,
    stat_end: Option<Stat<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stat_heap: Option<StatHeap<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stat_heap_end: Option<StatHeap<'a>>,
    latest_gc_info: Info,
    latest_gc_info_end: Option<Info>,
    rss: Option<u64>,
    peak_rss: Option<u64>,
    stack: Option<Vec<String>>,
    lost: u64,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the wire format")]
struct Phases {
    mark_ns: u64,
    sweep_ns: u64,
    other_ns: u64,
}

#[derive(Serialize)]
struct PauseSpan {
    begin_ns: u64,
    ns: u64,
    kind: Option<&'static str>,
    mark_ns: u64,
    sweep_ns: u64,
}

impl PauseSpan {
    fn of(pause: &Pause) -> Self {
        let Pause { begin_ns, ns, kind, mark_ns, sweep_ns, other_ns: _ } = *pause;
        Self { begin_ns, ns, kind: kind.map(PauseKind::name), mark_ns, sweep_ns }
    }
}

/// `GC.stat_heap`: an object of each heap's number and its keys.
struct StatHeap<'a> {
    keys: &'a [&'static str],
    heaps: &'a [Vec<u64>],
}

impl Serialize for StatHeap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let heap = |values| Stat { keys: self.keys, values };
        serializer.collect_map(self.heaps.iter().enumerate().map(|(at, values)| (at, heap(values))))
    }
}

/// `GC.stat` as an object in the order of its Ruby.
struct Stat<'a> {
    keys: &'a [&'static str],
    values: &'a [u64],
}

impl Serialize for Stat<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.keys.iter().zip(self.values))
    }
}

/// `GC.latest_gc_info` in the order and with the keys of its Ruby.
struct Info(GcInfo);

impl Serialize for Info {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let info = &self.0;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("major_by", &info.major_by)?;
        if let Some(need) = info.need_major_by {
            map.serialize_entry("need_major_by", &need)?;
        }
        map.serialize_entry("gc_by", &info.gc_by)?;
        map.serialize_entry("have_finalizer", &info.have_finalizer)?;
        map.serialize_entry("immediate_sweep", &info.immediate_sweep)?;
        map.serialize_entry("state", info.state)?;
        if let Some((weak, retained)) = info.weak_references {
            map.serialize_entry("weak_references_count", &weak)?;
            map.serialize_entry("retained_weak_references_count", &retained)?;
        }
        map.end()
    }
}

struct Counters<'a>(&'a [(&'static str, u64)]);

impl Serialize for Counters<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

impl<W: Write> Jsonl<W> {
    /// Lines go to `out`.
    pub fn new(out: W, clock: WallClock) -> Self {
        Self { out, clock }
    }

    fn write(&mut self, line: &Line<'_>) -> Result<(), ExportError> {
        serde_json::to_writer(&mut self.out, line).map_err(|error| ExportError::Stdout(error.into()))?;
        self.out.write_all(b"\n").map_err(ExportError::Stdout)
    }
}

fn stat_of<'a>(process: &'a Process, state: &'a GcState) -> Stat<'a> {
    Stat { keys: &process.image.stat_keys, values: &state.stat }
}

/// Whether a complete cycle compacted the heap, which its Ruby counts (2.7 and later).
fn compacted(process: &Process, cycle: &GcCycle) -> Option<bool> {
    let at = process.image.stat_keys.iter().position(|key| *key == "compact_count")?;
    Some(cycle.end.as_ref()?.stat.get(at)? > cycle.start.stat.get(at)?)
}

fn stat_heap_of<'a>(process: &'a Process, state: &'a GcState) -> Option<StatHeap<'a>> {
    let keys = process.image.heap_keys.as_slice();
    (!keys.is_empty()).then_some(StatHeap { keys, heaps: &state.heaps })
}

impl<W: Write> Exporter for Jsonl<W> {
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError> {
        self.write(&Line::Process {
            pid: process.pid,
            ns_pid: process.ns_pid,
            ppid: process.ppid,
            comm: &process.comm,
            cmdline: process.cmdline.as_deref(),
            ruby: process.image.version.to_string(),
            image: process.image.path.to_string_lossy().into_owned(),
            build_id: process.image.build_id.as_deref(),
            method: process.image.method.name(),
            misses: process.image.method.misses(),
            probes: process.image.probes,
            start_ts: process.start_ts,
            hostname: process.hostname.as_deref(),
            env: &process.gc_env,
            container: None,
            stat: state.map(|state| stat_of(process, state)),
        })
    }

    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        self.write(&Line::Refused { pid, image: path, reason })
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        let mut phases = Phases { mark_ns: 0, sweep_ns: 0, other_ns: 0 };
        for Pause { mark_ns, sweep_ns, other_ns, .. } in &cycle.pauses {
            phases.mark_ns += mark_ns;
            phases.sweep_ns += sweep_ns;
            phases.other_ns += other_ns;
        }
        let start = &cycle.start;
        let end = cycle.end.as_ref();
        self.write(&Line::Gc(Box::new(Gc {
            ts: self.clock.epoch_seconds(start.ts_ns),
            pid: process.pid,
            tid: start.tid,
            comm: &cycle.comm,
            ruby: process.image.version.to_string(),
            container: None,
            count: cycle.count,
            kind: cycle.kind(),
            gc_by: start.info.gc_by,
            major_by: start.info.major_by,
            compacting: compacted(process, cycle),
            pause_ns: cycle.pause_ns(),
            phases,
            steps: cycle.pauses.len(),
            mark_steps: cycle.pauses.iter().filter(|pause| pause.mark_ns > 0).count(),
            sweep_steps: cycle.pauses.iter().filter(|pause| pause.sweep_ns > 0).count(),
            pauses: cycle.pauses.iter().map(PauseSpan::of).collect(),
            complete: end.is_some(),
            end_ts: end.map(|state| self.clock.epoch_seconds(state.ts_ns)),
            stat: stat_of(process, start),
            stat_end: end.map(|state| stat_of(process, state)),
            stat_heap: stat_heap_of(process, start),
            stat_heap_end: end.and_then(|state| stat_heap_of(process, state)),
            latest_gc_info: Info(start.info),
            latest_gc_info_end: end.map(|state| Info(state.info)),
            rss: start.memory.map(|memory| memory.rss),
            peak_rss: start.memory.map(|memory| memory.peak_rss),
            stack: None,
            lost: cycle.lost,
        })))
    }

    fn work(&mut self, process: &Process, work: &GcWork) -> Result<(), ExportError> {
        self.write(&Line::Work {
            ts: self.clock.epoch_seconds(work.begin_ns),
            pid: process.pid,
            tid: work.tid,
            comm: &work.comm,
            phase: work.phase.name(),
            begin_ns: work.begin_ns,
            ns: work.ns,
        })
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        self.write(&Line::Exit {
            ts: self.clock.epoch_seconds(end.ts_ns),
            pid: process.pid,
            reason: end.reason.name(),
            cycles: end.cycles,
            lost: end.lost,
            stat: end.shutdown.as_ref().map(|state| stat_of(process, state)),
        })
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.write(&Line::Ledger {
            balanced: ledger.imbalances().is_empty(),
            kernel: Counters(&ledger.kernel_counters()),
            user: Counters(&ledger.user_counters()),
        })?;
        self.flush()
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        self.out.flush().map_err(ExportError::Stdout)
    }
}
