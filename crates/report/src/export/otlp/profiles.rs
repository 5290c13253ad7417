//! Profiles: one resource per process, one profile per kind of value. The tables of a request contain only what its
//! samples use; the first entry of each table is its zero value.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::Arc,
};

use opentelemetry_proto::tonic::{
    collector::profiles::v1development::{ExportProfilesServiceRequest, ExportProfilesServiceResponse},
    common::v1::{AnyValue, any_value::Value},
    profiles::v1development::{
        Function, KeyValueAndUnit, Line, Link, Location, Mapping, Profile, ProfilesDictionary,
        ResourceProfiles, Sample, ScopeProfiles, Stack, ValueType,
    },
};
use prost::Message as _;

use super::{SCHEMA_URL, resource, scope};
use crate::{
    aggregate::{
        call_tree::{FrameId, NodeId},
        recording::{EndpointIndex, ProcessIndex, Recording, Thread, TraceIndex},
    },
    export::{
        profile::{label, pprof::ALLOC_PERIOD},
        upload::{Payload, Protocol, Receipt},
        windows::Window,
    },
    model::stack::{Frame, FrameKind, GcActivity, ThreadState, gc_name},
};

/// Kinds of values of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// CPU time of samples.
    Cpu,
    /// Wall time of samples, if threads off the CPU were recorded.
    Wall,
    /// Measured time in GC pauses.
    Gc,
    /// Number of GC pauses.
    GcPauses,
    /// Measured time in long waits for the GVL.
    Gvl,
    /// Number of slots handed out for objects.
    AllocObjects,
    /// Bytes of these slots.
    AllocSpace,
}

const KINDS: [Kind; 7] =
    [Kind::Cpu, Kind::Wall, Kind::Gc, Kind::GcPauses, Kind::Gvl, Kind::AllocObjects, Kind::AllocSpace];

impl Kind {
    fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::Cpu => ("cpu", "nanoseconds"),
            Self::Wall => ("wall", "nanoseconds"),
            Self::Gc => ("gc", "nanoseconds"),
            Self::GcPauses => ("gc_pauses", "count"),
            Self::Gvl => ("gvl_wait", "nanoseconds"),
            Self::AllocObjects => ("alloc_objects", "count"),
            Self::AllocSpace => ("alloc_space", "bytes"),
        }
    }
}

/// Profiles of some processes of a window.
struct Profiles {
    window: Arc<Window>,
    processes: Vec<ProcessIndex>,
    kinds: Vec<Kind>,
}

/// Makes a payload.
pub(in crate::export) fn make(window: Arc<Window>, processes: Vec<ProcessIndex>) -> Box<dyn Payload> {
    Box::new(Profiles { window, processes, kinds: KINDS.to_vec() })
}

impl Payload for Profiles {
    fn path(&self, protocol: Protocol) -> &'static str {
        match protocol {
            Protocol::Http => "/v1development/profiles",
            Protocol::Grpc => "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export",
        }
    }

    fn content_type(&self) -> &'static str {
        "application/x-protobuf"
    }

    fn encode(&self) -> Vec<u8> {
        let mut builder = Builder::new(&self.window);
        let resources = self.processes.iter().filter_map(|process| builder.process(*process, &self.kinds));
        let resource_profiles: Vec<ResourceProfiles> = resources.collect();
        if resource_profiles.is_empty() {
            return Vec::new();
        }
        ExportProfilesServiceRequest { resource_profiles, dictionary: Some(builder.dictionary()) }
            .encode_to_vec()
    }

    fn halves(&self) -> Option<[Box<dyn Payload>; 2]> {
        let part = |processes: &[ProcessIndex], kinds: &[Kind]| -> Box<dyn Payload> {
            let (processes, kinds) = (processes.to_vec(), kinds.to_vec());
            Box::new(Self { window: Arc::clone(&self.window), processes, kinds })
        };
        if self.processes.len() > 1 {
            let (one, other) = self.processes.split_at(self.processes.len() / 2);
            return Some([part(one, &self.kinds), part(other, &self.kinds)]);
        }
        let (one, other) = self.kinds.split_at(self.kinds.len() / 2);
        (!one.is_empty()).then(|| [part(&self.processes, one), part(&self.processes, other)])
    }

    fn receipt(&self, answer: &[u8]) -> Receipt {
        let part =
            ExportProfilesServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
        part.map_or(Receipt::Whole(None), |part| {
            super::receipt(part.rejected_profiles, "profiles", &part.error_message)
        })
    }
}

/// A table of unique entries.
struct Table<T> {
    entries: Vec<T>,
    known: HashMap<T, i32>,
}

impl<T: Clone + Eq + Hash> Table<T> {
    /// A table that contains only its zero value.
    fn new(zero: T) -> Self {
        Self { entries: vec![zero.clone()], known: HashMap::from([(zero, 0)]) }
    }

    fn index(&mut self, entry: T) -> i32 {
        let entries = &mut self.entries;
        *self.known.entry(entry).or_insert_with_key(|entry| {
            entries.push(entry.clone());
            entries.len() as i32 - 1
        })
    }
}

/// An attribute of a sample or a location.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Attribute {
    key: &'static str,
    text: String,
    number: Option<i64>,
}

/// A location: a line in a function, in a mapping, at an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct LocationRow {
    mapping: i32,
    address: u64,
    line: Line,
    /// Index of the attribute that names the kind of frame.
    kind: i32,
}

struct Builder<'a> {
    window: &'a Window,
    strings: Table<String>,
    mappings: Table<Mapping>,
    locations: Table<LocationRow>,
    functions: Table<Function>,
    attributes: Table<Attribute>,
    stacks: Table<Stack>,
    links: Table<Link>,
    of_frame: HashMap<FrameId, i32>,
}

/// The link of samples that belong to no span.
const NO_LINK: i32 = 0;

/// The key of a sample within a profile: stack, attributes, link.
type Identity = (i32, Vec<i32>, i32);

impl<'a> Builder<'a> {
    fn new(window: &'a Window) -> Self {
        Self {
            window,
            strings: Table::new(String::new()),
            mappings: Table::new(Mapping::default()),
            locations: Table::new(LocationRow::default()),
            functions: Table::new(Function::default()),
            attributes: Table::new(Attribute::default()),
            stacks: Table::new(Stack::default()),
            links: Table::new(Link::default()),
            of_frame: HashMap::new(),
        }
    }

    fn recording(&self) -> &'a Recording {
        &self.window.recording
    }

    fn process(&mut self, index: ProcessIndex, kinds: &[Kind]) -> Option<ResourceProfiles> {
        let profiles: Vec<Profile> = kinds.iter().filter_map(|kind| self.profile(index, *kind)).collect();
        let facts = self.recording().processes.get(index).filter(|_| !profiles.is_empty())?;
        let pid = (facts.pid != 0).then_some(facts.pid);
        Some(ResourceProfiles {
            resource: Some(resource(&facts.origin, facts.hostname.as_deref(), facts.image.as_deref(), pid)),
            scope_profiles: vec![ScopeProfiles {
                scope: Some(scope()),
                profiles,
                schema_url: SCHEMA_URL.to_owned(),
            }],
            schema_url: SCHEMA_URL.to_owned(),
        })
    }

    fn profile(&mut self, process: ProcessIndex, kind: Kind) -> Option<Profile> {
        let sums = match kind {
            Kind::Cpu | Kind::Wall => self.samples(process, kind),
            Kind::Gc | Kind::GcPauses => self.pauses(process, kind),
            Kind::Gvl => self.waits(process),
            Kind::AllocObjects | Kind::AllocSpace => self.allocs(process, kind),
        };
        if sums.is_empty() {
            return None;
        }
        let samples = sums.into_iter().map(|((stack_index, attribute_indices, link_index), value)| Sample {
            stack_index,
            attribute_indices,
            link_index,
            values: vec![value as i64],
            ..Sample::default()
        });
        let samples = samples.collect();
        let (name, unit) = kind.name();
        let sample_type = Some(self.value_type(name, unit));
        let (of, period) = self.period(kind);
        let period_type = Some(self.value_type(of.0, of.1));
        let Window { clock, began_ns, ended_ns, .. } = self.window;
        Some(Profile {
            sample_type,
            samples,
            time_unix_nano: u64::try_from(clock.epoch_nanos(*began_ns)).unwrap_or_default(),
            duration_nano: ended_ns.saturating_sub(*began_ns),
            period_type,
            period: period as i64,
            ..Profile::default()
        })
    }

    /// Type and length of the period. The definition allows none, but Parca refuses requests without its type (pkg/normalizer/otel.go,
    /// `ValidateOtelProfile`), and Pyroscope names series after it (pkg/ingester/otlp/convert.go). For values that are measured it is their
    /// own type and 1, as in Go's profiles of locks.
    fn period(&self, kind: Kind) -> ((&'static str, &'static str), u64) {
        match kind {
            Kind::Cpu => (kind.name(), self.recording().period_ns.unwrap_or(1)),
            Kind::Wall | Kind::Gc | Kind::GcPauses | Kind::Gvl => (kind.name(), 1),
            Kind::AllocObjects | Kind::AllocSpace => (("space", "bytes"), ALLOC_PERIOD),
        }
    }

    fn samples(&mut self, process: ProcessIndex, kind: Kind) -> BTreeMap<Identity, u64> {
        let recording = self.recording();
        let mut sums = BTreeMap::new();
        if kind == Kind::Wall && !self.window.wall {
            return sums;
        }
        for (key, sum) in &recording.samples {
            let (thread, _) = recording.thread_facts(key.thread);
            let value = if kind == Kind::Cpu { sum.cpu_ns } else { sum.wall_ns };
            if thread.process != process || value == 0 {
                continue;
            }
            let mut attributes = self.who(thread);
            if kind == Kind::Wall && key.state != ThreadState::Running {
                attributes.push(self.word("thread.state", key.state.name()));
            }
            if key.gc != GcActivity::None {
                attributes.push(self.word("cruby.gc.phase", gc_name(key.gc)));
            }
            attributes.extend(self.endpoint(key.endpoint));
            let identity = (self.stack(&[], key.node), attributes, self.link(key.trace));
            *sums.entry(identity).or_default() += value;
        }
        sums
    }

    fn pauses(&mut self, process: ProcessIndex, kind: Kind) -> BTreeMap<Identity, u64> {
        let recording = self.recording();
        let mut sums = BTreeMap::new();
        for (key, sum) in &recording.pauses {
            let (thread, _) = recording.thread_facts(key.thread);
            let value = if kind == Kind::Gc { sum.ns } else { sum.pauses };
            if thread.process != process || value == 0 {
                continue;
            }
            let mut attributes = self.who(thread);
            attributes.push(self.word("cruby.gc.type", key.kind));
            attributes.push(self.word("cruby.gc.gc_by", key.reason.0.unwrap_or("none")));
            attributes.push(self.word("cruby.gc.major_by", key.reason.1.unwrap_or("none")));
            attributes.extend(self.endpoint(key.endpoint));
            let (phase, cycle) = (format!("({})", key.phase.name()), format!("({} GC)", key.kind));
            let stack = self.stack(&[&phase, &cycle, "(garbage collection)"], key.node);
            *sums.entry((stack, attributes, self.link(key.trace))).or_default() += value;
        }
        sums
    }

    fn waits(&mut self, process: ProcessIndex) -> BTreeMap<Identity, u64> {
        let recording = self.recording();
        let mut sums = BTreeMap::new();
        for (key, sum) in &recording.gvl_waits {
            let (thread, _) = recording.thread_facts(key.thread);
            if thread.process == process && sum.ns > 0 {
                let mut attributes = self.who(thread);
                attributes.extend(self.endpoint(key.endpoint));
                let identity = (self.stack(&["(GVL wait)"], key.node), attributes, self.link(key.trace));
                *sums.entry(identity).or_default() += sum.ns;
            }
        }
        sums
    }

    fn allocs(&mut self, process: ProcessIndex, kind: Kind) -> BTreeMap<Identity, u64> {
        let recording = self.recording();
        let mut sums = BTreeMap::new();
        for (key, sum) in &recording.allocs {
            let (thread, _) = recording.thread_facts(key.thread);
            if thread.process != process || sum.slots == 0 {
                continue;
            }
            let value = if kind == Kind::AllocObjects { sum.slots } else { key.bytes(sum.slots) };
            let mut attributes = self.who(thread);
            let number = Some(i64::from(key.slot_size));
            attributes.push(self.attribute(Attribute {
                key: "cruby.slot.size",
                text: String::new(),
                number,
            }));
            attributes.extend(self.endpoint(key.endpoint));
            let identity = (self.stack(&[], key.node), attributes, self.link(key.trace));
            *sums.entry(identity).or_default() += value;
        }
        sums
    }

    /// The link to the span in which something happened, if the program publishes it; otherwise to the span that made the enclosing request.
    fn link(&mut self, trace: Option<TraceIndex>) -> i32 {
        let trace = trace.and_then(|index| self.recording().trace(index));
        trace.map_or(NO_LINK, |trace| {
            self.links.index(Link {
                trace_id: trace.span.trace_id.to_be_bytes().to_vec(),
                span_id: trace.span.span_id.to_be_bytes().to_vec(),
            })
        })
    }

    /// The attribute for a request's endpoint, like the label of pprof.
    fn endpoint(&mut self, endpoint: Option<EndpointIndex>) -> Option<i32> {
        let name = endpoint.map(|index| label::text(self.recording().endpoint(index)));
        name.map(|name| self.word("cruby.request.endpoint", &name))
    }

    /// The attributes that identify a thread.
    fn who(&mut self, thread: &Thread) -> Vec<i32> {
        let id = Attribute { key: "thread.id", number: Some(i64::from(thread.tid)), ..Attribute::default() };
        let id = self.attribute(id);
        vec![id, self.word("thread.name", &label::text(&thread.name))]
    }

    fn word(&mut self, key: &'static str, text: &str) -> i32 {
        self.attribute(Attribute { key, text: text.to_owned(), number: None })
    }

    fn attribute(&mut self, attribute: Attribute) -> i32 {
        self.strings.index(attribute.key.to_owned());
        self.attributes.index(attribute)
    }

    /// A stack, leaf first: the frames added by gctrace, then a path.
    fn stack(&mut self, made_up: &[&str], node: NodeId) -> i32 {
        let tree = &self.recording().tree;
        let mut location_indices: Vec<i32> = made_up.iter().map(|name| self.made_up(name)).collect();
        for (_, frame) in tree.path(node) {
            let known = self.of_frame.get(&frame).copied();
            let location = known.unwrap_or_else(|| self.location(tree.frame(frame)));
            self.of_frame.insert(frame, location);
            location_indices.push(location);
        }
        self.stacks.index(Stack { location_indices })
    }

    fn made_up(&mut self, name: &str) -> i32 {
        let name_strindex = self.strings.index(name.to_owned());
        self.line(Function { name_strindex, ..Function::default() }, 0, LocationRow::default(), "ruby")
    }

    fn location(&mut self, frame: &Frame) -> i32 {
        let kind = match frame.kind {
            FrameKind::Ruby | FrameKind::CFunction | FrameKind::Vm | FrameKind::Missing => "ruby",
            FrameKind::Native => "native",
            FrameKind::Kernel => "kernel",
        };
        let name_strindex = self.strings.index(label::text(&frame.name));
        let file = frame.file.as_deref().unwrap_or_default();
        let mapped = kind == "native" && !file.is_empty();
        let filename_strindex = self.strings.index(file.to_owned());
        let mapping =
            if mapped { self.mappings.index(Mapping { filename_strindex, ..Mapping::default() }) } else { 0 };
        let function = Function {
            name_strindex,
            filename_strindex,
            start_line: i64::from(frame.first_line),
            ..Function::default()
        };
        let place = LocationRow { mapping, address: frame.address, ..LocationRow::default() };
        self.line(function, i64::from(frame.line), place, kind)
    }

    /// A location with one line in a function.
    fn line(&mut self, function: Function, line: i64, place: LocationRow, kind: &str) -> i32 {
        let line = Line { function_index: self.functions.index(function), line, column: 0 };
        let kind = self.word("profile.frame.type", kind);
        self.locations.index(LocationRow { line, kind, ..place })
    }

    fn value_type(&mut self, name: &str, unit: &str) -> ValueType {
        ValueType {
            type_strindex: self.strings.index(name.to_owned()),
            unit_strindex: self.strings.index(unit.to_owned()),
        }
    }

    fn dictionary(mut self) -> ProfilesDictionary {
        let mut attribute_table = vec![KeyValueAndUnit::default()];
        for attribute in std::mem::take(&mut self.attributes.entries).into_iter().skip(1) {
            let value = attribute.number.map_or(Value::StringValue(attribute.text), Value::IntValue);
            attribute_table.push(KeyValueAndUnit {
                key_strindex: self.strings.index(attribute.key.to_owned()),
                value: Some(AnyValue { value: Some(value) }),
                unit_strindex: 0,
            });
        }
        let mut location_table = vec![Location::default()];
        location_table.extend(self.locations.entries.iter().skip(1).map(|place| Location {
            mapping_index: place.mapping,
            address: place.address,
            lines: vec![place.line],
            attribute_indices: vec![place.kind],
        }));
        ProfilesDictionary {
            mapping_table: self.mappings.entries,
            location_table,
            function_table: self.functions.entries,
            link_table: self.links.entries,
            string_table: self.strings.entries,
            attribute_table,
            stack_table: self.stacks.entries,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A sent profile, for tests.
    pub(in crate::export) struct Sent {
        /// Its value type, as `type/unit`.
        pub(in crate::export) kind: String,
        /// For each sample: the name of its leaf, the keys of its attributes, its value.
        pub(in crate::export) samples: Vec<(String, Vec<String>, i64)>,
    }

    /// The profiles of the first process of a request.
    pub(in crate::export) fn read(sent: &[u8]) -> Vec<Sent> {
        let sent = ExportProfilesServiceRequest::decode(sent).unwrap();
        let tables = sent.dictionary.unwrap();
        assert_eq!(tables.link_table[0], Link::default(), "the zero value");
        let text = |at: i32| tables.string_table[at as usize].clone();
        let of_sample = |sample: &Sample| {
            let leaf = tables.stack_table[sample.stack_index as usize].location_indices[0];
            let function = tables.location_table[leaf as usize].lines[0].function_index;
            let name = text(tables.function_table[function as usize].name_strindex);
            let keys = sample.attribute_indices.iter();
            let keys = keys.map(|at| text(tables.attribute_table[*at as usize].key_strindex));
            (name, keys.collect(), sample.values[0])
        };
        let of_profile = |profile: &Profile| {
            let kind = profile.sample_type.unwrap();
            Sent {
                kind: format!("{}/{}", text(kind.type_strindex), text(kind.unit_strindex)),
                samples: profile.samples.iter().map(of_sample).collect(),
            }
        };
        sent.resource_profiles[0].scope_profiles[0].profiles.iter().map(of_profile).collect()
    }
}
