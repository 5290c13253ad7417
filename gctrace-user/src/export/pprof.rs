//! pprof (`profile.proto`): where GC pauses went, by phase, kind and reason.
//!
//! Sample types `gc-pauses/count` and `gc-pause-time/nanoseconds`. A pause is split over its phases: its time goes to
//! each, its count to the phase in which it begins its work. Totals are the number and the sum of all pauses seen.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write as _,
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use prost::Message as _;

use super::{ExportError, Exporter, ProcessEnd, file};
use crate::{
    enrich::clock::{WallClock, monotonic_ns},
    ledger::Ledger,
    model::{GcCycle, GcState, Pause, Phase, Process},
};

/// Messages of `profile.proto` (google/pprof), the fields used here.
mod proto {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Profile {
        #[prost(message, repeated, tag = "1")]
        pub sample_type: Vec<ValueType>,
        #[prost(message, repeated, tag = "2")]
        pub sample: Vec<Sample>,
        #[prost(message, repeated, tag = "3")]
        pub mapping: Vec<Mapping>,
        #[prost(message, repeated, tag = "4")]
        pub location: Vec<Location>,
        #[prost(message, repeated, tag = "5")]
        pub function: Vec<Function>,
        #[prost(string, repeated, tag = "6")]
        pub string_table: Vec<String>,
        #[prost(int64, tag = "9")]
        pub time_nanos: i64,
        #[prost(int64, tag = "10")]
        pub duration_nanos: i64,
        #[prost(int64, repeated, tag = "13")]
        pub comment: Vec<i64>,
        #[prost(int64, tag = "14")]
        pub default_sample_type: i64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct ValueType {
        #[prost(int64, tag = "1")]
        pub r#type: i64,
        #[prost(int64, tag = "2")]
        pub unit: i64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Sample {
        #[prost(uint64, repeated, tag = "1")]
        pub location_id: Vec<u64>,
        #[prost(int64, repeated, tag = "2")]
        pub value: Vec<i64>,
        #[prost(message, repeated, tag = "3")]
        pub label: Vec<Label>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Label {
        #[prost(int64, tag = "1")]
        pub key: i64,
        #[prost(int64, tag = "2")]
        pub str: i64,
        #[prost(int64, tag = "3")]
        pub num: i64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Mapping {
        #[prost(uint64, tag = "1")]
        pub id: u64,
        #[prost(int64, tag = "5")]
        pub filename: i64,
        #[prost(int64, tag = "6")]
        pub build_id: i64,
        #[prost(bool, tag = "7")]
        pub has_functions: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Location {
        #[prost(uint64, tag = "1")]
        pub id: u64,
        #[prost(uint64, tag = "2")]
        pub mapping_id: u64,
        #[prost(message, repeated, tag = "4")]
        pub line: Vec<Line>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Line {
        #[prost(uint64, tag = "1")]
        pub function_id: u64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Function {
        #[prost(uint64, tag = "1")]
        pub id: u64,
        #[prost(int64, tag = "2")]
        pub name: i64,
        #[prost(int64, tag = "3")]
        pub system_name: i64,
    }
}

/// What samples are merged by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    image: u32,
    pid: u32,
    comm: String,
    kind: &'static str,
    reason: String,
    phase: Phase,
}

/// Accumulates pauses and writes one profile at the end.
pub struct Pprof {
    path: PathBuf,
    clock: WallClock,
    began_ns: u64,
    totals: BTreeMap<Key, (i64, i64)>,
    images: BTreeMap<u32, (String, String)>,
}

impl Pprof {
    /// The profile goes to `path`.
    pub fn new(path: &Path, clock: WallClock) -> Result<Self, ExportError> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        file::check_writable(dir)
            .map_err(|source| ExportError::Unwritable { path: path.to_owned(), source })?;
        let (totals, images) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { path: path.to_owned(), clock, began_ns: monotonic_ns(), totals, images })
    }

    fn add(&mut self, process: &Process, pause: &Pause, kind: &'static str, reason: &str) {
        for (phase, ns) in pause.phases() {
            let count = i64::from(phase == pause.first_phase());
            if ns == 0 && count == 0 {
                continue;
            }
            let key = Key {
                image: process.image.index,
                pid: process.pid,
                comm: process.comm.clone(),
                kind,
                reason: reason.to_owned(),
                phase,
            };
            let total = self.totals.entry(key).or_default();
            total.0 += count;
            total.1 += ns as i64;
        }
    }

    fn encode(&self, ledger: &Ledger) -> Vec<u8> {
        let mut builder = Builder::default();
        builder.text("");
        let mut profile = proto::Profile {
            sample_type: vec![
                proto::ValueType { r#type: builder.text("gc-pauses"), unit: builder.text("count") },
                proto::ValueType { r#type: builder.text("gc-pause-time"), unit: builder.text("nanoseconds") },
            ],
            time_nanos: self.clock.epoch_nanos(self.began_ns),
            duration_nanos: (monotonic_ns() - self.began_ns) as i64,
            comment: vec![builder.text(&format!("gctrace {}: {}", super::VERSION, ledger.summary()))],
            ..proto::Profile::default()
        };
        profile.default_sample_type = builder.text("gc-pause-time");
        let mut mapping_of = HashMap::new();
        for (index, (path, build_id)) in &self.images {
            let id = profile.mapping.len() as u64 + 1;
            mapping_of.insert(*index, id);
            profile.mapping.push(proto::Mapping {
                id,
                filename: builder.text(path),
                build_id: builder.text(build_id),
                has_functions: true,
            });
        }
        for (key, (count, ns)) in &self.totals {
            let mapping = mapping_of.get(&key.image).copied().unwrap_or_default();
            let frames = [
                format!("({})", key.phase.name()),
                format!("({} GC)", key.kind),
                "(garbage collection)".to_owned(),
                key.comm.clone(),
            ];
            let sample = proto::Sample {
                location_id: frames.iter().map(|name| builder.location(mapping, name)).collect(),
                value: vec![*count, *ns],
                label: vec![
                    proto::Label { key: builder.text("pid"), str: 0, num: i64::from(key.pid) },
                    builder.label("comm", &key.comm),
                    builder.label("gc kind", key.kind),
                    builder.label("gc reason", &key.reason),
                    builder.label("phase", key.phase.name()),
                ],
            };
            profile.sample.push(sample);
        }
        profile.location = builder.locations;
        profile.function = builder.functions;
        profile.string_table = builder.strings;
        profile.encode_to_vec()
    }
}

/// Interned tables of a profile.
#[derive(Default)]
struct Builder {
    strings: Vec<String>,
    string_ids: HashMap<String, i64>,
    location_ids: HashMap<(u64, String), u64>,
    function_ids: HashMap<String, u64>,
    locations: Vec<proto::Location>,
    functions: Vec<proto::Function>,
}

impl Builder {
    fn text(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.string_ids.get(text) {
            return id;
        }
        let id = self.strings.len() as i64;
        self.strings.push(text.to_owned());
        self.string_ids.insert(text.to_owned(), id);
        id
    }

    fn label(&mut self, key: &str, value: &str) -> proto::Label {
        proto::Label { key: self.text(key), str: self.text(value), num: 0 }
    }

    fn location(&mut self, mapping_id: u64, name: &str) -> u64 {
        let key = (mapping_id, name.to_owned());
        if let Some(&id) = self.location_ids.get(&key) {
            return id;
        }
        let function_id = self.function(name);
        let id = self.locations.len() as u64 + 1;
        self.locations.push(proto::Location { id, mapping_id, line: vec![proto::Line { function_id }] });
        self.location_ids.insert(key, id);
        id
    }

    fn function(&mut self, name: &str) -> u64 {
        if let Some(&id) = self.function_ids.get(name) {
            return id;
        }
        let id = self.functions.len() as u64 + 1;
        let text = self.text(name);
        self.functions.push(proto::Function { id, name: text, system_name: text });
        self.function_ids.insert(name.to_owned(), id);
        id
    }
}

impl Exporter for Pprof {
    fn process(&mut self, process: &Process, _: Option<&GcState>) -> Result<(), ExportError> {
        let image = &process.image;
        self.images.entry(image.index).or_insert_with(|| {
            (image.path.to_string_lossy().into_owned(), image.build_id.clone().unwrap_or_default())
        });
        Ok(())
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        let info = &cycle.start.info;
        let reason = match (info.gc_by, info.major_by) {
            (Some(by), Some(major)) => format!("{by}, {major}"),
            (by, major) => by.or(major).unwrap_or("unknown").to_owned(),
        };
        for pause in &cycle.pauses {
            self.add(process, pause, cycle.kind(), &reason);
        }
        Ok(())
    }

    fn ended(&mut self, _: &Process, _: &ProcessEnd) -> Result<(), ExportError> {
        Ok(())
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        let error = |source| ExportError::File { path: self.path.clone(), source };
        let mut gz = GzEncoder::new(Vec::new(), Compression::default());
        gz.write_all(&self.encode(ledger)).map_err(error)?;
        let bytes = gz.finish().map_err(error)?;
        file::write_atomically(&self.path, &bytes).map_err(error)
    }
}
