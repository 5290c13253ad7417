//! The Firefox Profiler's processed format (<https://profiler.firefox.com>), version 55: samples of each thread with categories
//! and CPU time, GC cycles and pauses as markers, memory as a counter and as drawn markers, allocation as the format's own table.
//!
//! Weights are milliseconds (`tracing-ms`) of the time that a sample represents; `threadCPUDelta` is nanoseconds.
//!
//! `fxprof-processed-profile` 0.8.1 writes the same version, and was evaluated: its functions have no file and no line
//! (`func_table.rs` writes null), weights are integers (`i32`), CPU time is truncated to microseconds, `meta.extra`
//! cannot be set, and the tables of all threads are in memory at once.

use std::{
    collections::{BTreeSet, HashMap},
    io::{self, BufWriter, Write},
};

use flate2::{Compression, write::GzEncoder};
use serde::{Serialize, Serializer, ser::SerializeSeq as _};
use serde_json::{Value, json};

use super::{Context, by_thread, label};
use crate::{
    aggregate::recording::{
        self, AllocInterval, AllocMoment, CycleMoment, GvlMoment, MemoryMoment, Moment, ProcessIndex,
        Recording, RequestMoment, Timeline, WorkMoment,
    },
    model::Pause,
};

mod flows;
mod markers;
mod memory;
mod tables;

use flows::Flows;
use memory::Allocations;
use tables::{Samples, Tables};

/// The version of the format that is written; viewers upgrade older versions.
const VERSION: u32 = 55;

/// Categories of frames and markers, by number, with their colours.
const CATEGORIES: [(&str, &str); 12] = [
    ("Idle", "transparent"),
    ("Other", "grey"),
    ("Ruby", "red"),
    ("C function", "orange"),
    ("Native", "blue"),
    ("Kernel", "lightblue"),
    ("GC", "purple"),
    ("Waiting for a CPU", "yellow"),
    ("Missing frames", "darkgrey"),
    ("GVL", "magenta"),
    ("Request", "green"),
    ("Memory", "brown"),
];

/// Numbers of [`CATEGORIES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Category {
    Idle = 0,
    Ruby = 2,
    CFunction = 3,
    Native = 4,
    Kernel = 5,
    Gc = 6,
    Waiting = 7,
    Missing = 8,
    Gvl = 9,
    Request = 10,
    Memory = 11,
}

impl Serialize for Category {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(*self as u8)
    }
}

#[derive(Serialize)]
struct Profile<'a> {
    meta: Value,
    libs: [(); 0],
    pages: [(); 0],
    counters: Vec<Counter<'a>>,
    #[serde(rename = "profilerOverhead")]
    overhead: [(); 0],
    threads: Threads<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Counter<'a> {
    name: &'a str,
    category: &'a str,
    description: &'a str,
    pid: String,
    main_thread_index: usize,
    samples: CounterSamples,
}

#[derive(Serialize, Default)]
struct CounterSamples {
    time: Vec<f64>,
    /// Differences, bytes.
    count: Vec<i64>,
    length: usize,
}

/// The data of one thread.
struct ThreadParts<'a> {
    process: ProcessIndex,
    /// A unique name of the process: `4242`, and `4242.1` for what ran under that pid later (after an exec).
    pid: String,
    tid: u32,
    /// A unique name of the thread, formed likewise.
    tid_text: String,
    samples: Vec<Moment>,
    /// Cycles that it started.
    cycles: Vec<&'a CycleMoment>,
    /// Pauses in which it was stopped, each with its cycle.
    pauses: Vec<(&'a CycleMoment, &'a Pause)>,
    work: Vec<&'a WorkMoment>,
    gvl: Vec<&'a GvlMoment>,
    requests: Vec<&'a RequestMoment>,
    allocs: Vec<&'a AllocMoment>,
    /// Data of the process, shown on its main thread.
    memory: Vec<&'a MemoryMoment>,
    allocated: Vec<&'a AllocInterval>,
}

/// Threads are converted to tables one after another, while they are written.
struct Threads<'a> {
    view: View<'a>,
    threads: &'a [ThreadParts<'a>],
}

/// Data that all parts of the file use.
#[derive(Clone, Copy)]
struct View<'a> {
    recording: &'a Recording,
    flows: &'a Flows,
    began_ns: u64,
}

impl View<'_> {
    /// Milliseconds since the start of the recording.
    fn ms(&self, ts_ns: u64) -> f64 {
        (i128::from(ts_ns) - i128::from(self.began_ns)) as f64 / 1e6
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Thread<'a> {
    name: String,
    #[serde(rename = "isMainThread")]
    is_main: bool,
    process_type: &'static str,
    process_name: String,
    process_startup_time: f64,
    process_shutdown_time: Option<f64>,
    register_time: f64,
    unregister_time: Option<f64>,
    paused_ranges: [(); 0],
    show_markers_in_timeline: bool,
    pid: String,
    tid: String,
    samples: Samples,
    #[serde(skip_serializing_if = "Option::is_none")]
    native_allocations: Option<Allocations>,
    markers: markers::Markers,
    #[serde(flatten)]
    tables: Tables<'a>,
}

impl Serialize for Threads<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.threads.len()))?;
        for parts in self.threads {
            seq.serialize_element(&thread(self.view, parts))?;
        }
        seq.end()
    }
}

fn thread<'a>(view: View<'a>, parts: &ThreadParts<'_>) -> Thread<'a> {
    let facts = &view.recording.processes[parts.process];
    let mut tables = Tables::new(&view.recording.tree);
    let mut markers = markers::of(view, &mut tables, parts);
    memory::mark(view, &mut tables, parts, &mut markers);
    let samples = Samples::of(view, &mut tables, &parts.samples);
    let native_allocations = Allocations::of(view, &mut tables, &parts.allocs);
    // A thread is shown with its last name: names are set after it starts.
    let last = parts.samples.last().map(|sample| sample.key.thread);
    let last =
        last.or(parts.cycles.last().map(|cycle| cycle.thread)).or(parts.work.last().map(|work| work.thread));
    let last = last.or(parts.gvl.last().map(|gvl| gvl.thread));
    let last = last.or(parts.allocs.last().map(|alloc| alloc.key.thread));
    let name = last.map(|thread| &view.recording.threads[thread as usize]);
    let is_it = |thread: &&recording::Thread| (thread.process, thread.tid) == (parts.process, parts.tid);
    let name = name.or_else(|| view.recording.threads.iter().rev().find(is_it)).map(|thread| &*thread.name);
    let name = match name {
        Some(name) => name.to_owned(),
        None if parts.tid == facts.pid => facts.comm.clone(),
        None => format!("thread {}", parts.tid),
    };
    Thread {
        name: label::text(&name),
        is_main: parts.tid == facts.pid,
        process_type: "default",
        process_name: label::text(&facts.comm),
        process_startup_time: view.ms(facts.first_ns).max(0.0),
        process_shutdown_time: None,
        register_time: view.ms(facts.first_ns).max(0.0),
        unregister_time: None,
        paused_ranges: [],
        show_markers_in_timeline: true,
        pid: parts.pid.clone(),
        tid: parts.tid_text.clone(),
        samples,
        native_allocations,
        markers,
        tables,
    }
}

/// Writes the profile; returns the number of samples and events left out.
pub(super) fn write(
    recording: &Recording,
    context: &Context<'_>,
    gz: bool,
    out: &mut dyn Write,
) -> io::Result<u64> {
    let nothing = Timeline::default();
    let timeline = recording.timeline.as_ref().unwrap_or(&nothing);
    let gvl = timeline.gvl_once(recording);
    let flows = Flows::of(recording, timeline, &gvl);
    let view = View { recording, flows: &flows, began_ns: context.began_ns };
    let threads = threads(recording, timeline, &gvl);
    let left_out = timeline.samples_left_out + timeline.allocs_left_out + timeline.events_left_out;
    let profile = Profile {
        meta: meta(recording, context, timeline),
        libs: [],
        pages: [],
        counters: counters(view, timeline, &threads),
        overhead: [],
        threads: Threads { view, threads: &threads },
    };
    if gz {
        // JSON is produced in small pieces; compressing each one separately takes several times as long.
        let gz = GzEncoder::new(out, Compression::default());
        let mut out = BufWriter::with_capacity(64 << 10, gz);
        serde_json::to_writer(&mut out, &profile)?;
        out.into_inner()?.finish()?.flush()?;
    } else {
        serde_json::to_writer(out, &profile)?;
    }
    Ok(left_out)
}

/// Unique texts for numbers.
#[derive(Default)]
struct Unique(HashMap<u32, u32>);

impl Unique {
    fn text(&mut self, number: u32) -> String {
        let times = self.0.entry(number).or_default();
        *times += 1;
        if *times == 1 { number.to_string() } else { format!("{number}.{}", *times - 1) }
    }
}

/// All threads, grouped by process, with its main thread first; every process has a main thread.
fn threads<'a>(recording: &Recording, timeline: &'a Timeline, gvl: &[&'a GvlMoment]) -> Vec<ThreadParts<'a>> {
    let key = |thread: u32| {
        let (thread, _) = recording.thread_facts(thread);
        (thread.process, thread.tid)
    };
    let mut samples = by_thread(recording, &timeline.samples);
    let mut keys: BTreeSet<(ProcessIndex, u32)> = samples.keys().copied().collect();
    keys.extend(timeline.cycles.iter().map(|cycle| key(cycle.thread)));
    let stopped = |cycle: &CycleMoment, pause: &Pause| (key(cycle.thread).0, pause.tid);
    let pauses =
        || timeline.cycles.iter().flat_map(|cycle| cycle.pauses.iter().map(move |pause| (cycle, pause)));
    keys.extend(pauses().map(|(cycle, pause)| stopped(cycle, pause)));
    keys.extend(timeline.work.iter().map(|work| key(work.thread)));
    keys.extend(timeline.gvl.iter().map(|gvl| key(gvl.thread)));
    keys.extend(timeline.requests.iter().map(|request| (request.process, request.tid)));
    keys.extend(timeline.allocs.iter().map(|alloc| key(alloc.key.thread)));
    let memory = timeline.memory.iter().map(|memory| memory.process);
    let memory = memory.chain(timeline.allocated.iter().map(|allocated| allocated.process));
    let processes: BTreeSet<ProcessIndex> = keys.iter().map(|key| key.0).chain(memory).collect();
    keys.extend(processes.into_iter().map(|process| (process, recording.processes[process].pid)));

    let mut pids = Unique::default();
    let pid_of: HashMap<ProcessIndex, String> = keys
        .iter()
        .map(|key| key.0)
        .collect::<BTreeSet<ProcessIndex>>()
        .into_iter()
        .map(|process| (process, pids.text(recording.processes[process].pid)))
        .collect();
    let mut tids = Unique::default();
    let mut threads: Vec<ThreadParts<'_>> = keys
        .into_iter()
        .map(|(process, tid)| ThreadParts {
            process,
            pid: pid_of[&process].clone(),
            tid,
            tid_text: tids.text(tid),
            samples: samples.remove(&(process, tid)).unwrap_or_default(),
            cycles: Vec::new(),
            pauses: Vec::new(),
            work: Vec::new(),
            gvl: Vec::new(),
            requests: Vec::new(),
            allocs: Vec::new(),
            memory: Vec::new(),
            allocated: Vec::new(),
        })
        .collect();
    threads.sort_by_key(|parts| (parts.process, parts.tid != recording.processes[parts.process].pid));
    let place: HashMap<(ProcessIndex, u32), usize> =
        threads.iter().enumerate().map(|(at, parts)| ((parts.process, parts.tid), at)).collect();
    for cycle in &timeline.cycles {
        threads[place[&key(cycle.thread)]].cycles.push(cycle);
    }
    for (cycle, pause) in pauses() {
        threads[place[&stopped(cycle, pause)]].pauses.push((cycle, pause));
    }
    for work in &timeline.work {
        threads[place[&key(work.thread)]].work.push(work);
    }
    for gvl in gvl {
        threads[place[&key(gvl.thread)]].gvl.push(gvl);
    }
    for request in &timeline.requests {
        threads[place[&(request.process, request.tid)]].requests.push(request);
    }
    for alloc in &timeline.allocs {
        threads[place[&key(alloc.key.thread)]].allocs.push(alloc);
    }
    let main = |process: ProcessIndex| place[&(process, recording.processes[process].pid)];
    for memory in &timeline.memory {
        threads[main(memory.process)].memory.push(memory);
    }
    for allocated in &timeline.allocated {
        threads[main(allocated.process)].allocated.push(allocated);
    }
    threads
}

fn counters<'a>(view: View<'_>, timeline: &Timeline, threads: &[ThreadParts<'_>]) -> Vec<Counter<'a>> {
    let known = timeline.memory.iter().filter(|memory| memory.ts_ns >= view.began_ns);
    let mut memory: Vec<(ProcessIndex, u64, u64)> =
        known.filter_map(|memory| Some((memory.process, memory.ts_ns, memory.rss?))).collect();
    memory.sort_unstable();
    memory
        .chunk_by(|a, b| a.0 == b.0)
        .filter_map(|points| {
            let process = points.first()?.0;
            let mut samples = CounterSamples { length: points.len(), ..CounterSamples::default() };
            let mut last = 0;
            for &(_, ts_ns, rss) in points {
                samples.time.push(view.ms(ts_ns));
                samples.count.push(rss as i64 - last);
                last = rss as i64;
            }
            let main_thread_index = threads.iter().position(|parts| parts.process == process)?;
            Some(Counter {
                name: "RSS",
                category: "Memory",
                description: "Resident memory of the process, read at each GC event",
                pid: threads[main_thread_index].pid.clone(),
                main_thread_index,
                samples,
            })
        })
        .collect()
}

fn meta(recording: &Recording, context: &Context<'_>, timeline: &Timeline) -> Value {
    let categories: Vec<Value> = CATEGORIES
        .iter()
        .map(|(name, color)| json!({"name": name, "color": color, "subcategories": ["Other"]}))
        .collect();
    let rubies: BTreeSet<String> = recording.images.iter().map(|image| image.version.to_string()).collect();
    let rubies: Vec<String> = rubies.into_iter().collect();
    let schema: Vec<Value> = markers::schema().into_iter().chain(memory::schema()).collect();
    let entry = |label: &str, value: String| json!({"label": label, "format": "string", "value": value});
    let mut entries = vec![entry("Ruby", rubies.join(", ")), entry("Run summary", context.ledger.summary())];
    for (what, n) in [
        ("Later samples left out", timeline.samples_left_out),
        ("Later stacks of allocation left out", timeline.allocs_left_out),
        ("Later events left out", timeline.events_left_out),
        ("Samples without stack (too many different ones)", recording.merged),
    ] {
        if n > 0 {
            entries.push(entry(what, n.to_string()));
        }
    }
    let note = match timeline.samples_left_out {
        0 => String::new(),
        n => format!(" ({n} later samples left out)"),
    };
    json!({
        "version": 24,
        "preprocessedProfileVersion": VERSION,
        "product": format!("gctrace {}{note}", crate::export::VERSION),
        "processType": 0,
        "startTime": context.clock.epoch_seconds(context.began_ns) * 1e3,
        "profilingStartTime": 0,
        "profilingEndTime": context.ended_ns.saturating_sub(context.began_ns) as f64 / 1e6,
        "interval": recording.period_ns.map_or(1.0, |ns| ns as f64 / 1e6),
        "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "ns"},
        "symbolicated": true,
        "usesOnlyOneStackType": true,
        "sourceCodeIsNotOnSearchfox": true,
        "debug": false,
        "extensions": {"length": 0, "baseURL": [], "id": [], "name": []},
        "pausedRanges": [],
        "stackwalk": 1,
        "oscpu": "Linux",
        "categories": categories,
        "markerSchema": schema,
        "extra": [{"label": "gctrace", "entries": entries}],
    })
}
