//! TuneMyGC sample sets: one set per process, as the protocol's agent would have sent them.
//!
//! Header: 11 elements (readers also accept the agent's 12, which carry the spy ids at position 8). Samples: 8
//! elements (readers also accept 7, from before thread ids). Times are epoch seconds.

use std::{
    collections::HashMap,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use super::{ExportError, Exporter, ProcessEnd, VERSION, file};
use crate::{
    enrich::clock::WallClock,
    ledger::Ledger,
    model::{EndReason, GcCycle, GcState, Memory, Process},
    ruby::stat::GcInfo,
};

/// A set is written out and begun anew at this many samples (about 3 MB), which bounds memory.
const MAX_SAMPLES: usize = 10_000;

/// Name of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventName {
    /// Tracing of the process begins.
    Booted,
    /// State at `GC_START`.
    GcCycleStarted,
    /// State at `GC_END_SWEEP`.
    GcCycleEnded,
    /// A unit of work begins.
    ProcessingStarted,
    /// A unit of work ends.
    ProcessingEnded,
    /// The VM begins to shut down.
    Terminated,
}

impl EventName {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Booted, "BOOTED"),
        (Self::GcCycleStarted, "GC_CYCLE_STARTED"),
        (Self::GcCycleEnded, "GC_CYCLE_ENDED"),
        (Self::ProcessingStarted, "PROCESSING_STARTED"),
        (Self::ProcessingEnded, "PROCESSING_ENDED"),
        (Self::Terminated, "TERMINATED"),
    ];

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(event, _)| *event)
    }
}

/// First element of a set.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Application token.
    pub token: Option<String>,
    /// Ruby version.
    pub ruby_version: String,
    /// Rails version, `0.0` where there is none.
    pub rails_version: String,
    /// `RUBY_GC_*` variables.
    pub gc_env: Map<String, Value>,
    /// Version of the agent.
    pub agent_version: String,
    /// `GC::OPTS`.
    pub gc_opts: Vec<Value>,
    /// `GC::INTERNAL_CONSTANTS`.
    pub gc_constants: Map<String, Value>,
    /// `GC.stat` keys.
    pub stat_keys: Vec<String>,
    /// Spy ids, in 12-element headers.
    pub spy_ids: Option<String>,
    /// Host name.
    pub hostname: String,
    /// Parent pid.
    pub ppid: u64,
    /// Pid in the process's own namespace.
    pub pid: u64,
}

/// A further element of a set.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Epoch seconds.
    pub ts: f64,
    /// Bytes; `None` if the process was gone before its memory could be read even once.
    pub peak_rss: Option<u64>,
    /// Bytes.
    pub current_rss: Option<u64>,
    /// Which event.
    pub event: EventName,
    /// `GC.stat` values in the order of the header's keys.
    pub stat: Vec<u64>,
    /// `GC.latest_gc_info`.
    pub latest_gc_info: Map<String, Value>,
    /// Anything.
    pub meta: Value,
    /// Thread; `None` is the main thread.
    pub thread_id: Option<u64>,
}

/// A header and its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSet {
    /// The header.
    pub header: Header,
    /// The samples, in time order.
    pub samples: Vec<Sample>,
}

/// What in a set violates the protocol.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// It is no JSON.
    #[error("not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An element is not what the protocol says.
    #[error("{place}: {problem}")]
    Field {
        /// Which element.
        place: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

fn bad(place: impl Into<String>, problem: &'static str) -> ProtocolError {
    ProtocolError::Field { place: place.into(), problem }
}

impl SampleSet {
    /// Reads a set of either dialect.
    pub fn from_json(text: &str) -> Result<Self, ProtocolError> {
        let Value::Array(elements) = serde_json::from_str(text)? else {
            return Err(bad("payload", "is not an array"));
        };
        let mut elements = elements.into_iter();
        let header = Header::from_value(elements.next().ok_or_else(|| bad("payload", "has no header"))?)?;
        let samples = elements
            .enumerate()
            .map(|(at, value)| Sample::from_value(at, value, header.stat_keys.len()))
            .collect::<Result<_, _>>()?;
        Ok(Self { header, samples })
    }

    /// The set on the wire.
    pub fn to_json(&self) -> String {
        let mut text = format!("[{}", self.header.to_value());
        for sample in &self.samples {
            // Writing to a string cannot fail.
            let _infallible = write!(text, ",{}", sample.to_value());
        }
        text.push(']');
        text
    }
}

impl Header {
    fn to_value(&self) -> Value {
        let mut fields = vec![
            json!(self.token),
            json!(self.ruby_version),
            json!(self.rails_version),
            json!(self.gc_env),
            json!(self.agent_version),
            json!(self.gc_opts),
            json!(self.gc_constants),
            json!(self.stat_keys),
        ];
        fields.extend(self.spy_ids.as_ref().map(|ids| json!(ids)));
        fields.extend([json!(self.hostname), json!(self.ppid), json!(self.pid)]);
        Value::Array(fields)
    }

    fn from_value(value: Value) -> Result<Self, ProtocolError> {
        let Value::Array(mut fields) = value else { return Err(bad("header", "is not an array")) };
        let spy_ids = match fields.len() {
            11 => None,
            12 => Some(string("header[8] (spy ids)", fields.remove(8))?),
            _ => return Err(bad("header", "has neither 11 nor 12 elements")),
        };
        let mut fields = fields.into_iter();
        let mut next = || fields.next().unwrap_or_default();
        Ok(Self {
            token: match next() {
                Value::Null => None,
                other => Some(string("header[0] (token)", other)?),
            },
            ruby_version: string("header[1] (Ruby version)", next())?,
            rails_version: string("header[2] (Rails version)", next())?,
            gc_env: object("header[3] (environment)", next())?,
            agent_version: string("header[4] (agent version)", next())?,
            gc_opts: array("header[5] (GC::OPTS)", next())?,
            gc_constants: object("header[6] (GC::INTERNAL_CONSTANTS)", next())?,
            stat_keys: array("header[7] (GC.stat keys)", next())?
                .into_iter()
                .map(|key| string("header[7] (GC.stat keys)", key))
                .collect::<Result<_, _>>()?,
            spy_ids,
            hostname: string("header (hostname)", next())?,
            ppid: integer("header (ppid)", &next())?,
            pid: integer("header (pid)", &next())?,
        })
    }
}

impl Sample {
    fn to_value(&self) -> Value {
        json!([
            self.ts,
            self.peak_rss,
            self.current_rss,
            self.event.as_str(),
            self.stat,
            self.latest_gc_info,
            self.meta,
            self.thread_id,
        ])
    }

    fn from_value(at: usize, value: Value, keys: usize) -> Result<Self, ProtocolError> {
        let place = |field: &str| format!("sample {at} ({field})");
        let Value::Array(fields) = value else { return Err(bad(place("tuple"), "is not an array")) };
        if !(7..=8).contains(&fields.len()) {
            return Err(bad(place("tuple"), "has neither 8 nor 7 elements"));
        }
        let mut fields = fields.into_iter();
        let mut next = || fields.next().unwrap_or_default();
        let ts = next()
            .as_f64()
            .filter(|ts| ts.is_finite())
            .ok_or_else(|| bad(place("timestamp"), "is no number"))?;
        let bytes = |value: Value, field: &str| match value {
            Value::Null => Ok(None),
            other => integer(place(field), &other).map(Some),
        };
        let peak_rss = bytes(next(), "peak RSS")?;
        let current_rss = bytes(next(), "current RSS")?;
        let event = EventName::parse(&string(place("event"), next())?)
            .ok_or_else(|| bad(place("event"), "is not one of the protocol's names"))?;
        let stat: Vec<u64> = array(place("GC.stat values"), next())?
            .iter()
            .map(|value| integer(place("GC.stat values"), value))
            .collect::<Result<_, _>>()?;
        if stat.len() != keys {
            return Err(bad(place("GC.stat values"), "has another length than the header's keys"));
        }
        let latest_gc_info = object(place("latest_gc_info"), next())?;
        let meta = next();
        let thread_id = match next() {
            Value::Null => None,
            other => Some(integer(place("thread id"), &other)?),
        };
        Ok(Self { ts, peak_rss, current_rss, event, stat, latest_gc_info, meta, thread_id })
    }
}

fn string(place: impl Into<String>, value: Value) -> Result<String, ProtocolError> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(bad(place, "is not a string")),
    }
}

fn array(place: impl Into<String>, value: Value) -> Result<Vec<Value>, ProtocolError> {
    match value {
        Value::Array(values) => Ok(values),
        _ => Err(bad(place, "is not an array")),
    }
}

fn object(place: impl Into<String>, value: Value) -> Result<Map<String, Value>, ProtocolError> {
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(bad(place, "is not an object")),
    }
}

fn integer(place: impl Into<String>, value: &Value) -> Result<u64, ProtocolError> {
    value.as_u64().ok_or_else(|| bad(place, "is not a non-negative integer"))
}

/// Collects sets and writes each to its file when its process ends.
pub struct TuneMyGc {
    dir: PathBuf,
    clock: WallClock,
    open: HashMap<u32, Open>,
    written: Vec<PathBuf>,
}

/// The set of a process that is being traced.
struct Open {
    set: SampleSet,
    name: String,
    part: u32,
    booted: bool,
    last_memory: Option<Memory>,
}

impl TuneMyGc {
    /// Sets go to files in `dir`, which is made if it is not there.
    pub fn new(dir: &Path, clock: WallClock) -> Result<Self, ExportError> {
        let error = |source| ExportError::Unwritable { path: dir.to_owned(), source };
        std::fs::create_dir_all(dir).map_err(error)?;
        file::check_writable(dir).map_err(error)?;
        Ok(Self { dir: dir.to_owned(), clock, open: HashMap::new(), written: Vec::new() })
    }

    /// Files written so far.
    pub fn written(&self) -> &[PathBuf] {
        &self.written
    }

    fn push(&mut self, process: &Process, event: EventName, state: &GcState) -> Result<(), ExportError> {
        let clock = self.clock;
        let Some(open) = self.open.get_mut(&process.pid) else { return Ok(()) };
        // Once the process is gone its last known memory stands.
        let memory = state.memory.or(open.last_memory);
        open.last_memory = memory;
        open.set.samples.push(Sample {
            ts: clock.epoch_seconds(state.ts_ns),
            peak_rss: memory.map(|memory| memory.peak_rss),
            current_rss: memory.map(|memory| memory.rss),
            event,
            stat: state.stat.clone(),
            latest_gc_info: info_map(&state.info),
            meta: Value::Null,
            thread_id: (state.tid != process.pid).then_some(u64::from(state.tid)),
        });
        if open.set.samples.len() >= MAX_SAMPLES {
            self.write(process.pid, false)?;
        }
        Ok(())
    }

    /// Writes the set of a process; `last` ends it, else its next part begins.
    fn write(&mut self, pid: u32, last: bool) -> Result<(), ExportError> {
        let Some(open) = self.open.get_mut(&pid) else { return Ok(()) };
        let suffix = if open.part == 0 && last { String::new() } else { format!("-part{}", open.part) };
        let path = self.dir.join(format!("{}{suffix}.json", open.name));
        let text = open.set.to_json();
        open.set.samples.clear();
        open.part += 1;
        let empty_tail = last
            && open.part > 1
            && text.len() == SampleSet { samples: vec![], ..open.set.clone() }.to_json().len();
        if last {
            self.open.remove(&pid);
        }
        if empty_tail {
            return Ok(());
        }
        file::write_atomically(&path, text.as_bytes())
            .map_err(|source| ExportError::File { path: path.clone(), source })?;
        self.written.push(path);
        Ok(())
    }
}

fn info_map(info: &GcInfo) -> Map<String, Value> {
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    put("major_by", json!(info.major_by));
    if let Some(need) = info.need_major_by {
        put("need_major_by", json!(need));
    }
    put("gc_by", json!(info.gc_by));
    put("have_finalizer", json!(info.have_finalizer));
    put("immediate_sweep", json!(info.immediate_sweep));
    put("state", json!(info.state));
    if let Some((weak, retained)) = info.weak_references {
        put("weak_references_count", json!(weak));
        put("retained_weak_references_count", json!(retained));
    }
    map
}

impl Exporter for TuneMyGc {
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError> {
        let header = Header {
            token: None,
            ruby_version: process.image.version.to_string(),
            rails_version: "0.0".to_owned(),
            gc_env: process.gc_env.iter().map(|(key, value)| (key.clone(), json!(value))).collect(),
            agent_version: VERSION.to_owned(),
            gc_opts: Vec::new(),
            gc_constants: Map::new(),
            stat_keys: process.image.stat_keys.iter().map(|key| (*key).to_owned()).collect(),
            spy_ids: None,
            hostname: process.hostname.clone().unwrap_or_default(),
            ppid: u64::from(process.ppid.unwrap_or_default()),
            pid: u64::from(process.ns_pid.unwrap_or(process.pid)),
        };
        let start = process.start_ts.map_or_else(|| "unknown".to_owned(), |ts| format!("{ts:.2}"));
        let mut name = format!("tunemygc-{}-{start}", process.pid);
        // After an exec the same process, with the same start time, runs another program: another set.
        let taken = self
            .written
            .iter()
            .filter(|path| path.file_stem().is_some_and(|stem| stem.to_string_lossy().starts_with(&name)));
        let taken = taken.count();
        if taken > 0 {
            let _infallible = write!(name, "-exec{taken}");
        }
        let set = SampleSet { header, samples: Vec::new() };
        self.open.insert(process.pid, Open { set, name, part: 0, booted: false, last_memory: None });
        if let Some(state) = state {
            self.push(process, EventName::Booted, state)?;
            self.booted(process.pid);
        }
        Ok(())
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        if self.open.get(&process.pid).is_some_and(|open| !open.booted) {
            // Nothing could be read before the VM's first GC: that is where our knowledge begins.
            self.push(process, EventName::Booted, &cycle.start)?;
            self.booted(process.pid);
        }
        self.push(process, EventName::GcCycleStarted, &cycle.start)?;
        match &cycle.end {
            Some(end) => self.push(process, EventName::GcCycleEnded, end),
            None => Ok(()),
        }
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        if end.reason == EndReason::Exited
            && let Some(state) = &end.shutdown
        {
            self.push(process, EventName::Terminated, state)?;
        }
        self.write(process.pid, true)
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        let mut pids: Vec<u32> = self.open.keys().copied().collect();
        pids.sort_unstable();
        for pid in pids {
            self.write(pid, true)?;
        }
        Ok(())
    }
}

impl TuneMyGc {
    fn booted(&mut self, pid: u32) {
        if let Some(open) = self.open.get_mut(&pid) {
            open.booted = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(stat: Vec<u64>) -> Sample {
        Sample {
            ts: 1_422_023_921.481_364,
            peak_rss: Some(132_255_744),
            current_rss: Some(132_255_744),
            event: EventName::GcCycleStarted,
            stat,
            latest_gc_info: info_map(&GcInfo::decode(0x100, None, crate::ruby::stat::Mode::None, None)),
            meta: Value::Null,
            thread_id: None,
        }
    }

    fn set(samples: Vec<Sample>) -> SampleSet {
        let header = Header {
            token: None,
            ruby_version: "3.1.2".into(),
            rails_version: "0.0".into(),
            gc_env: Map::new(),
            agent_version: VERSION.into(),
            gc_opts: vec![],
            gc_constants: Map::new(),
            stat_keys: vec!["count".into(), "time".into()],
            spy_ids: None,
            hostname: "vm".into(),
            ppid: 1,
            pid: 153,
        };
        SampleSet { header, samples }
    }

    /// What we write we read back, to the microsecond and the byte.
    #[test]
    fn round_trip() {
        let set = set(vec![sample(vec![1, 2]), sample(vec![3, u64::MAX])]);
        let text = set.to_json();
        assert_eq!(SampleSet::from_json(&text).unwrap(), set);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((value[0].as_array().unwrap().len(), value[1].as_array().unwrap().len()), (11, 8));
    }

    /// The agent's 12-element header and the old 7-element samples are read; wrong shapes are refused by field.
    #[test]
    fn dialects() {
        let mut value: Value = serde_json::from_str(&set(vec![sample(vec![1, 2])]).to_json()).unwrap();
        value[0].as_array_mut().unwrap().insert(8, json!("manual"));
        value[1].as_array_mut().unwrap().pop();
        let read = SampleSet::from_json(&value.to_string()).unwrap();
        assert_eq!(read.header.spy_ids.as_deref(), Some("manual"));
        assert_eq!(read.header.pid, 153);
        value[1][4] = json!([1]);
        let error = SampleSet::from_json(&value.to_string()).unwrap_err().to_string();
        assert!(error.contains("sample 0 (GC.stat values)"), "{error}");
        value[1] = json!([1]);
        assert!(SampleSet::from_json(&value.to_string()).is_err());
    }

    proptest! {
        /// No text makes the reader panic.
        #[test]
        fn hostile_text(text in "\\PC{0,200}") {
            let _any = SampleSet::from_json(&text);
        }

        /// No nesting of JSON values makes the reader panic.
        #[test]
        fn hostile_values(fields in proptest::collection::vec(0_u8..6, 0..16)) {
            let values: Vec<Value> = fields.iter().map(|kind| match kind {
                0 => Value::Null,
                1 => json!(-1),
                2 => json!("BOOTED"),
                3 => json!([1, 2]),
                4 => json!({"a": 1}),
                _ => json!(1.5e300),
            }).collect();
            let _any = SampleSet::from_json(&json!([values.clone(), values]).to_string());
        }
    }
}
