//! pprof (`profile.proto`): CPU time, wall time and GC pauses under the Ruby stacks that they belong to.
//!
//! A file always has all sample types, so that profiles of different runs can be compared; anything not measured is 0.
//! `wall` is only measured with `--wall`: the CPU time of a thread is not wall time.
//!
//! The sample types `samples/count`, `cpu/nanoseconds` and `wall/nanoseconds` are those of samples. `gc_pauses/count`
//! and `gc/nanoseconds` are those of GC pauses, which are measured, not sampled: their totals are the number and the
//! sum of all pauses seen. A pause is under the stack that triggered its cycle and is split over its phases: its time
//! is attributed to each phase, its count to the phase in which its work begins.
//!
//! With `--gvl` there are also `gvl_waits/count`, `gvl_wait/nanoseconds` and `gvl_hold/nanoseconds`, which are measured.
//! Waits that were reported individually are under their stack and name the holder of the GVL (`blocked by`); the other waits
//! of a thread are one sample without a stack, so that the total is the sum of all waits. No stack is taken where the GVL is
//! acquired, so a thread's hold time is one sample of the thread; Rubies whose holds are not seen (3.2) have no such sample.
//!
//! With `--alloc` there are `alloc_objects/count` and `alloc_space/bytes`: slots that were handed out for objects, each
//! under a stack that was taken when free slots ran out (docs/alloc.md). Their totals are all slots of the recording.
//!
//! The profile is written in pieces: consecutive messages of one type form one message (protobuf encoding).

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io::{self, Write},
    ops::Range,
    sync::Arc,
};

use flate2::{Compression, write::GzEncoder};
use prost::Message as _;

use super::{label, waits};
use crate::{
    aggregate::{
        call_tree::{FrameId, NodeId},
        recording::{
            AllocKey, EndpointIndex, GvlFacts, HoldKey, PauseKey, PauseSum, ProcessFacts, ProcessIndex,
            Recording, SampleKey, SampleSum, Thread, TraceIndex, WaitKey, reason_text,
        },
    },
    model::{
        Image,
        gvl::GvlTimes,
        stack::{Frame, FrameKind, GcActivity, gc_name},
    },
};

mod head;
pub(super) mod malloc;
pub(super) mod proto;
mod sums;

pub(in crate::export) use head::{Allocation, Head, Labels};
pub(in crate::export) use sums::Part;
use sums::{Merged, Sums};

/// Number of samples written in one piece.
const PIECE: usize = 1024;
/// Sample types and their units.
const TYPES: [(&str, &str); 10] = [
    ("samples", "count"),
    ("cpu", "nanoseconds"),
    ("wall", "nanoseconds"),
    ("gc_pauses", "count"),
    ("gc", "nanoseconds"),
    ("gvl_waits", "count"),
    ("gvl_wait", "nanoseconds"),
    ("gvl_hold", "nanoseconds"),
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
];
/// The sample types of the GVL.
const OF_GVL: Range<usize> = 5..8;
/// The sample types of allocation.
const OF_ALLOC: Range<usize> = 8..10;
/// Average number of bytes of slots per stack of allocation (docs/alloc.md).
pub(in crate::export) const ALLOC_PERIOD: u64 = 512 << 10;
/// The mapping of the kernel's frames.
const KERNEL: &str = "[kernel.kallsyms]";

/// Writes the data of the wanted processes.
pub(in crate::export) fn write(
    recording: &Recording,
    head: &Head,
    wanted: &dyn Fn(ProcessIndex) -> bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    write_part(recording, head, wanted, Part::WHOLE, out).map(drop)
}

/// Writes a part of the data of the wanted processes: a profile of its own, with all that its samples refer to.
pub(in crate::export) fn write_part(
    recording: &Recording,
    head: &Head,
    wanted: &dyn Fn(ProcessIndex) -> bool,
    part: Part,
    out: &mut dyn Write,
) -> io::Result<Size> {
    let mut out = Pieces { out: GzEncoder::new(out, Compression::default()), size: Size::default() };
    let mut builder = Builder::new(recording, head, wanted);
    out.put(&builder.head(head))?;
    let merged = (head.labels == Labels::OfSeries).then(|| Merged::of(recording, head, wanted));
    let sums = merged.as_ref().map_or_else(|| Sums::of(recording, head, wanted), Sums::merged);
    for piece in part.of(&sums.samples).chunks(PIECE) {
        out.samples(piece.iter().map(|(key, sum)| builder.sample(key, sum)).collect())?;
    }
    for piece in part.of(&sums.pauses).chunks(PIECE) {
        out.samples(piece.iter().map(|(key, sum)| builder.pause(key, sum)).collect())?;
    }
    for piece in part.of(&sums.waits).chunks(PIECE) {
        out.samples(piece.iter().map(|(key, times)| builder.gvl_wait(key, times)).collect())?;
    }
    for piece in part.of(&sums.holds).chunks(PIECE) {
        out.samples(piece.iter().map(|(key, times)| builder.gvl_hold(**key, times)).collect())?;
    }
    for piece in part.of(&sums.allocs).chunks(PIECE) {
        out.samples(piece.iter().map(|(key, amount)| builder.alloc(key, *amount)).collect())?;
    }
    for piece in part.of(&sums.threads).chunks(PIECE) {
        out.samples(piece.iter().flat_map(|(_, facts)| builder.gvl_thread(facts)).collect())?;
    }
    out.put(&builder.tables())?;
    out.out.finish()?.flush()?;
    Ok(out.size)
}

/// Number of samples of a profile, and its length before it is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::export) struct Size {
    pub(in crate::export) samples: usize,
    pub(in crate::export) bytes: usize,
}

/// A profile that is written in pieces.
struct Pieces<W: Write> {
    out: GzEncoder<W>,
    size: Size,
}

impl<W: Write> Pieces<W> {
    fn put(&mut self, piece: &proto::Profile) -> io::Result<()> {
        let bytes = piece.encode_to_vec();
        self.size.samples += piece.sample.len();
        self.size.bytes += bytes.len();
        self.out.write_all(&bytes)
    }

    fn samples(&mut self, sample: Vec<proto::Sample>) -> io::Result<()> {
        self.put(&proto::Profile { sample, ..proto::Profile::default() })
    }
}

/// What the profile is about: the service that its processes belong to.
fn program(recording: &Recording, wanted: &dyn Fn(ProcessIndex) -> bool) -> String {
    let of_wanted =
        recording.processes.iter().enumerate().filter(|(index, facts)| wanted(*index) && facts.pid != 0);
    let name = |facts: &ProcessFacts| match facts.origin.service.as_str() {
        "" => label::text(&facts.comm),
        service => label::text(service),
    };
    let mut names: Vec<String> = of_wanted.map(|(_, facts)| name(facts)).collect();
    names.sort_unstable();
    names.dedup();
    match names.as_slice() {
        [one] => one.clone(),
        [] => "ruby".to_owned(),
        several => format!("{} Ruby programs", several.len()),
    }
}

/// Names such as `<main>` or `<class:Shop>` that occur at more than one place in the code.
fn ambiguous(recording: &Recording) -> HashSet<&str> {
    let mut places: HashMap<&str, (Option<&str>, u32)> = HashMap::new();
    let frames =
        recording.tree.frames().filter(|frame| frame.kind == FrameKind::Ruby && frame.name.starts_with('<'));
    frames
        .filter_map(|frame| {
            let place = (frame.file.as_deref(), frame.first_line);
            (*places.entry(&frame.name).or_insert(place) != place).then_some(&*frame.name)
        })
        .collect()
}

/// The label of a function. A method is identified by its name. A block is one of many in a method or a class, so its
/// label has the line, too: viewers merge functions with the same name.
fn function_name(frame: &Frame, ambiguous: &HashSet<&str>) -> String {
    let name = label::text(&frame.name);
    let is_block = frame.name.starts_with("block in ") || frame.name.starts_with("block (");
    match &frame.file {
        Some(file) if frame.kind == FrameKind::Ruby && (is_block || ambiguous.contains(&*frame.name)) => {
            let file = label::text(label::base_name(file));
            // The top level of a file has no first line.
            if frame.first_line > 0 {
                format!("{name} {file}:{}", frame.first_line)
            } else {
                format!("{name} {file}")
            }
        }
        _ => name,
    }
}

/// Interned tables of a profile.
struct Builder<'a> {
    recording: &'a Recording,
    /// Whether each of the sample types is written.
    shown: [bool; TYPES.len()],
    /// Whether wall time was measured.
    wall: bool,
    labels: Labels,
    /// Names of class bodies and top levels that occur at more than one place.
    ambiguous: HashSet<&'a str>,
    strings: Vec<String>,
    string_ids: HashMap<String, i64>,
    mappings: Vec<proto::Mapping>,
    /// By path and build id: containers may have different files at the same path.
    mapping_ids: HashMap<(String, String), u64>,
    /// The mapping of native code, by path.
    native_ids: HashMap<String, u64>,
    locations: Vec<proto::Location>,
    /// By mapping and frame.
    location_ids: HashMap<(u64, FrameId), u64>,
    made_up_ids: HashMap<(u64, String), u64>,
    functions: Vec<proto::Function>,
    /// By name, file and first line.
    function_ids: HashMap<(i64, i64, i64), u64>,
}

impl<'a> Builder<'a> {
    fn new(recording: &'a Recording, head: &Head, wanted: &dyn Fn(ProcessIndex) -> bool) -> Self {
        let mut builder = Self {
            recording,
            shown: std::array::from_fn(|index| head.shows(index)),
            wall: head.wall,
            labels: head.labels,
            ambiguous: ambiguous(recording),
            strings: Vec::new(),
            string_ids: HashMap::new(),
            mappings: Vec::new(),
            mapping_ids: HashMap::new(),
            native_ids: HashMap::new(),
            locations: Vec::new(),
            location_ids: HashMap::new(),
            made_up_ids: HashMap::new(),
            functions: Vec::new(),
            function_ids: HashMap::new(),
        };
        builder.text("");
        // Viewers take the first mapping as the main binary, and name their pages after it.
        builder.mapping(&program(recording, wanted), "");
        let mut images: Vec<&Arc<Image>> = recording.images.iter().collect();
        images.sort_by_key(|image| image.index);
        for image in images {
            builder.mapping(&image.path.to_string_lossy(), image.build_id.as_deref().unwrap_or_default());
        }
        builder
    }

    fn head(&mut self, head: &Head) -> proto::Profile {
        let shown = self.shown;
        let types = TYPES.iter().zip(shown).filter_map(|(of, shown)| shown.then_some(of));
        let sample_type = types.map(|(r#type, unit)| self.value_type(r#type, unit)).collect();
        let sampled = !self.recording.samples.is_empty();
        // The type of the period is there without a sample, too: `go tool pprof -diff_base` compares no profiles that differ in it, and
        // servers name series after it.
        let (period, of, default) = match head.alloc {
            Allocation::Only => (ALLOC_PERIOD, ("space", "bytes"), "alloc_space"),
            Allocation::None | Allocation::Too => {
                let period = self.recording.period_ns.unwrap_or_default();
                (period, ("cpu", "nanoseconds"), if sampled { "cpu" } else { "gc" })
            }
        };
        let mut comment = vec![self.text(&head.comment)];
        if self.recording.merged > 0 {
            comment.push(self.text(&format!(
                "{} samples without their stack: there were too many different ones",
                self.recording.merged
            )));
        }
        proto::Profile {
            sample_type,
            time_nanos: head.clock.epoch_nanos(head.began_ns),
            duration_nanos: head.ended_ns.saturating_sub(head.began_ns) as i64,
            period_type: Some(self.value_type(of.0, of.1)),
            period: period as i64,
            comment,
            default_sample_type: self.text(default),
            ..proto::Profile::default()
        }
    }

    fn tables(self) -> proto::Profile {
        proto::Profile {
            mapping: self.mappings,
            location: self.locations,
            function: self.functions,
            string_table: self.strings,
            ..proto::Profile::default()
        }
    }

    fn sample(&mut self, key: &SampleKey, sum: &SampleSum) -> proto::Sample {
        let (thread, process) = self.recording.thread_facts(key.thread);
        let mut label = self.who(thread, process);
        label.push(self.label("state", key.state.name()));
        if let Some(row) = waits::row(&self.recording.tree, key.node, key.state) {
            label.push(self.label("wait", row.trim_matches(['(', ')'])));
        }
        if key.gc != GcActivity::None {
            let name = if self.labels == Labels::All { "gc phase" } else { "gc_phase" };
            label.push(self.label(name, gc_name(key.gc)));
        }
        label.extend(self.endpoint(key.endpoint));
        label.extend(self.trace(key.trace));
        let wall_ns = if self.wall { sum.wall_ns } else { 0 };
        let value = self.values([sum.samples, sum.cpu_ns, wall_ns, 0, 0, 0, 0, 0, 0, 0]);
        proto::Sample { location_id: self.path(process, key.node), value, label }
    }

    fn pause(&mut self, key: &PauseKey, sum: &PauseSum) -> proto::Sample {
        let (thread, process) = self.recording.thread_facts(key.thread);
        let mut label = self.who(thread, process);
        label.extend(self.detail("gc kind", key.kind));
        label.extend(self.detail("gc reason", &reason_text(key.reason)));
        label.extend(self.detail("gc phase", key.phase.name()));
        label.extend(self.endpoint(key.endpoint));
        label.extend(self.trace(key.trace));
        let mapping = self.ruby_mapping(process);
        let phase = format!("({})", key.phase.name());
        let kind = format!("({} GC)", key.kind);
        let mut location_id: Vec<u64> = [phase.as_str(), kind.as_str(), "(garbage collection)"]
            .iter()
            .map(|name| self.made_up(mapping, name))
            .collect();
        location_id.extend(self.path(process, key.node));
        let value = self.values([0, 0, 0, sum.pauses, sum.ns, 0, 0, 0, 0, 0]);
        proto::Sample { location_id, value, label }
    }

    fn gvl_wait(&mut self, key: &WaitKey, times: &GvlTimes) -> proto::Sample {
        let (thread, process) = self.recording.thread_facts(key.thread);
        let mut label = self.who(thread, process);
        if let Some(holder) = key.holder {
            let (holder, _) = self.recording.thread_facts(holder);
            label.extend(self.detail("blocked by", &label::text(&holder.name)));
            label.extend(self.detail("blocked by id", &holder.tid.to_string()));
        }
        for (name, node) in [("blocked in", key.holder_at.ran), ("blocked until", key.holder_at.until)] {
            if let Some(leaf) = label::leaf(self.recording, node) {
                label.extend(self.detail(name, &leaf));
            }
        }
        label.extend(self.endpoint(key.endpoint));
        label.extend(self.trace(key.trace));
        let mapping = self.ruby_mapping(process);
        let mut location_id = vec![self.made_up(mapping, "(GVL wait)")];
        location_id.extend(self.path(process, key.node));
        let value = self.values([0, 0, 0, 0, 0, times.count, times.ns, 0, 0, 0]);
        proto::Sample { location_id, value, label }
    }

    /// The time for which a thread held the GVL while another one waited, under the stack with which it released the GVL.
    fn gvl_hold(&mut self, key: HoldKey, times: &GvlTimes) -> proto::Sample {
        let (thread, process) = self.recording.thread_facts(key.thread);
        let label = self.who(thread, process);
        let mapping = self.ruby_mapping(process);
        let mut location_id = vec![self.made_up(mapping, "(giving up the GVL)")];
        location_id.extend(self.path(process, key.node));
        let value = self.values([0, 0, 0, 0, 0, 0, 0, times.ns, 0, 0]);
        proto::Sample { location_id, value, label }
    }

    /// Slots that were handed out, and their bytes, under the stack that represents them.
    fn alloc(&mut self, key: &AllocKey, (slots, bytes): (u64, u64)) -> proto::Sample {
        let (thread, process) = self.recording.thread_facts(key.thread);
        let mut label = self.who(thread, process);
        label.extend(self.detail("slot size", &key.slot_size.to_string()));
        label.extend(self.endpoint(key.endpoint));
        label.extend(self.trace(key.trace));
        let value = self.values([0, 0, 0, 0, 0, 0, 0, 0, slots, bytes]);
        proto::Sample { location_id: self.path(process, key.node), value, label }
    }

    /// Totals of a thread without a stack.
    fn gvl_thread(&mut self, facts: &GvlFacts) -> Vec<proto::Sample> {
        let (thread, process) = self.recording.thread_facts(facts.thread);
        let mapping = self.ruby_mapping(process);
        let (count, ns) = facts.unreported();
        let rests = [
            ("(GVL waits, only totals known)", [0, 0, 0, 0, 0, count, ns, 0, 0, 0]),
            ("(GVL held, only totals known)", [0, 0, 0, 0, 0, 0, 0, facts.held_besides(), 0, 0]),
        ];
        let some = rests.into_iter().filter(|(_, values)| values.iter().any(|&value| value > 0));
        some.map(|(name, values)| proto::Sample {
            location_id: vec![self.made_up(mapping, name)],
            value: self.values(values),
            label: self.who(thread, process),
        })
        .collect()
    }

    /// The label with the endpoint of a request.
    fn endpoint(&mut self, endpoint: Option<EndpointIndex>) -> Option<proto::Label> {
        let recording = self.recording;
        endpoint.map(|index| self.label("endpoint", &label::text(recording.endpoint(index))))
    }

    /// The labels with a trace: its id, a span, and the source of both, which tells what kind of span it is.
    fn trace(&mut self, trace: Option<TraceIndex>) -> Vec<proto::Label> {
        let recording = self.recording;
        let Some(trace) =
            trace.filter(|_| self.labels == Labels::All).and_then(|index| recording.trace(index))
        else {
            return Vec::new();
        };
        vec![
            self.label("trace_id", &trace.trace_id_text()),
            self.label("span_id", &trace.span_id_text()),
            self.label("trace_origin", trace.origin.name()),
        ]
    }

    /// Selects the values of the sample types that are written.
    fn values(&self, values: [u64; TYPES.len()]) -> Vec<i64> {
        let shown = values.into_iter().zip(self.shown).filter_map(|(value, shown)| shown.then_some(value));
        shown.map(|value| value as i64).collect()
    }

    /// Labels that identify the thread and process of a sample.
    fn who(&mut self, thread: &Thread, process: &ProcessFacts) -> Vec<proto::Label> {
        if self.labels == Labels::OfSeries {
            // The container and its pod are labels of the series already.
            return Vec::new();
        }
        let place = &process.container;
        let known = [
            ("container", &place.id),
            ("container name", &place.name),
            ("pod uid", &place.pod_uid),
            ("pod", &place.pod),
            ("namespace", &place.namespace),
            ("unit", &place.unit),
        ];
        let mut labels: Vec<proto::Label> = known
            .into_iter()
            .filter_map(|(key, value)| Some(self.label(key, &label::text(value.as_ref()?))))
            .collect();
        labels.extend([
            self.label("pid", &process.pid.to_string()),
            self.label("comm", &label::text(&process.comm)),
            self.label("thread id", &thread.tid.to_string()),
            self.label("thread name", &label::text(&thread.name)),
        ]);
        labels
    }

    fn path(&mut self, process: &ProcessFacts, node: NodeId) -> Vec<u64> {
        let ruby = self.ruby_mapping(process);
        let recording = self.recording;
        recording
            .tree
            .path(node)
            .map(|(_, frame)| self.location(ruby, frame, recording.tree.frame(frame)))
            .collect()
    }

    fn ruby_mapping(&mut self, process: &ProcessFacts) -> u64 {
        let Some(image) = &process.image else { return 0 };
        self.mapping(&image.path.to_string_lossy(), image.build_id.as_deref().unwrap_or_default())
    }

    fn mapping(&mut self, file: &str, build_id: &str) -> u64 {
        let key = (file.to_owned(), build_id.to_owned());
        if let Some(&id) = self.mapping_ids.get(&key) {
            return id;
        }
        let id = self.mappings.len() as u64 + 1;
        let (filename, build_id) = (self.text(file), self.text(build_id));
        self.mappings.push(proto::Mapping { id, filename, build_id, has_functions: true });
        self.mapping_ids.insert(key, id);
        id
    }

    /// The mapping of native code in a file, for frames that have only the path: that of the image with this path, if
    /// there is one. If files of several builds have this path, the build is unknown.
    fn native_mapping(&mut self, file: &str) -> u64 {
        if let Some(&id) = self.native_ids.get(file) {
            return id;
        }
        let images = self.recording.images.iter().filter(|image| image.path.to_string_lossy() == file);
        let builds: BTreeSet<&str> =
            images.map(|image| image.build_id.as_deref().unwrap_or_default()).collect();
        let build = match builds.len() {
            1 => builds.first().copied().unwrap_or_default(),
            _ => "",
        };
        let id = self.mapping(file, build);
        self.native_ids.insert(file.to_owned(), id);
        id
    }

    fn location(&mut self, ruby: u64, id: FrameId, frame: &Frame) -> u64 {
        let mapping_id = match (frame.kind, &frame.file) {
            (FrameKind::Kernel, _) => self.mapping(KERNEL, ""),
            (FrameKind::Native, Some(file)) => self.native_mapping(file),
            _ => ruby,
        };
        if let Some(&location) = self.location_ids.get(&(mapping_id, id)) {
            return location;
        }
        let name = self.text(&function_name(frame, &self.ambiguous));
        let file = match frame.kind {
            FrameKind::Kernel => self.text(KERNEL),
            _ => self.text(frame.file.as_deref().unwrap_or_default()),
        };
        let function_id = self.function(name, file, i64::from(frame.first_line));
        let location = self.add_location(mapping_id, frame.address, function_id, i64::from(frame.line));
        self.location_ids.insert((mapping_id, id), location);
        location
    }

    /// The location of a frame that represents a pause.
    fn made_up(&mut self, mapping_id: u64, name: &str) -> u64 {
        let key = (mapping_id, name.to_owned());
        if let Some(&location) = self.made_up_ids.get(&key) {
            return location;
        }
        let text = self.text(name);
        let function_id = self.function(text, 0, 0);
        let location = self.add_location(mapping_id, 0, function_id, 0);
        self.made_up_ids.insert(key, location);
        location
    }

    fn add_location(&mut self, mapping_id: u64, address: u64, function_id: u64, line: i64) -> u64 {
        let id = self.locations.len() as u64 + 1;
        let line = vec![proto::Line { function_id, line }];
        self.locations.push(proto::Location { id, mapping_id, address, line });
        id
    }

    fn function(&mut self, name: i64, filename: i64, start_line: i64) -> u64 {
        let functions = &mut self.functions;
        *self.function_ids.entry((name, filename, start_line)).or_insert_with(|| {
            let id = functions.len() as u64 + 1;
            // No system name: `go tool pprof` would take `<main>` or `A::B` for mangled C++ and truncate them.
            functions.push(proto::Function { id, name, filename, start_line });
            id
        })
    }

    fn value_type(&mut self, r#type: &str, unit: &str) -> proto::ValueType {
        proto::ValueType { r#type: self.text(r#type), unit: self.text(unit) }
    }

    /// A label that only files have.
    fn detail(&mut self, key: &str, value: &str) -> Option<proto::Label> {
        (self.labels == Labels::All).then(|| self.label(key, value))
    }

    fn label(&mut self, key: &str, value: &str) -> proto::Label {
        proto::Label { key: self.text(key), str: self.text(value) }
    }

    fn text(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.string_ids.get(text) {
            return id;
        }
        let id = self.strings.len() as i64;
        self.strings.push(text.to_owned());
        self.string_ids.insert(text.to_owned(), id);
        id
    }
}
