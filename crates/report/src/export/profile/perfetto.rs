//! A Perfetto trace (<https://ui.perfetto.dev>). Each process has a track of GC cycles, its memory, and what it allocated. Each
//! thread has a track of the requests that it served, one of the GC pauses in which it was stopped, one of its stacks of allocation,
//! and one of what it did with the GVL. An arrow leads from the hold of the thread that held the GVL longest to the point where the
//! waiting thread acquired it. Threads and processes are described, so that SQL finds them in `thread` and `process`.
//!
//! Times are those of `CLOCK_MONOTONIC`, to the nanosecond; a clock snapshot relates them to those of other traces
//! (`CLOCK_BOOTTIME`). Intervals too short to be reported individually (`--gvl-threshold`) leave a gap in a track.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
};

use prost::Message as _;

use super::{Context, label};
use crate::{
    aggregate::{
        call_tree::NodeId,
        recording::{
            AllocMoment, CycleMoment, ProcessIndex, Recording, Thread, Timeline, longest_holds, reason_text,
        },
    },
    model::gvl::{GvlDoing, GvlGap},
    ruby::PauseKind,
};

mod memory;
mod proto;
mod request;

use proto::TrackEvent;

/// All packets belong to one sequence.
const SEQUENCE: u32 = 1;
/// `SEQ_INCREMENTAL_STATE_CLEARED`: the sequence starts.
const SEQUENCE_BEGINS: u32 = 1;
/// `SEQ_NEEDS_INCREMENTAL_STATE`: the packet refers to interned strings of earlier packets.
const NEEDS_TEXTS: u32 = 2;
/// `BUILTIN_CLOCK_REALTIME`, `_MONOTONIC`, `_BOOTTIME`.
const CLOCKS: [u32; 3] = [1, 3, 6];
/// Number of packets written in one piece.
const PIECE: usize = 1024;

/// A slice of a track.
struct Slice {
    begin_ns: u64,
    /// `None` if its end was not seen.
    end_ns: Option<u64>,
    name: String,
    category: &'static str,
    notes: Vec<(&'static str, Note)>,
    /// Arrows that start here.
    flows: Vec<u64>,
    /// The arrow that ends at the end of the slice.
    arrives: Option<u64>,
}

/// An annotation of a slice.
enum Note {
    Text(String),
    Number(u64),
    Signed(i64),
}

/// Writes packets in pieces: consecutive messages of one type form one message.
struct Packets<'a> {
    out: &'a mut dyn Write,
    waiting: proto::Trace,
    tracks: u64,
    /// Numbers of the stacks whose text is in the trace.
    stacks: HashMap<NodeId, u64>,
}

impl Packets<'_> {
    fn push(&mut self, packet: proto::TracePacket) -> io::Result<()> {
        self.waiting.packet.push(proto::TracePacket {
            trusted_packet_sequence_id: SEQUENCE,
            timestamp_clock_id: packet.timestamp.map(|_| CLOCKS[1]),
            ..packet
        });
        if self.waiting.packet.len() < PIECE { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.write_all(&std::mem::take(&mut self.waiting).encode_to_vec())
    }

    /// Adds a track; returns its number.
    fn track(&mut self, descriptor: proto::TrackDescriptor) -> io::Result<u64> {
        self.tracks += 1;
        let descriptor = proto::TrackDescriptor { uuid: Some(self.tracks), ..descriptor };
        self.push(proto::TracePacket { track_descriptor: Some(descriptor), ..Default::default() })?;
        Ok(self.tracks)
    }

    fn child(&mut self, parent: u64, name: &str) -> io::Result<u64> {
        self.track(proto::TrackDescriptor {
            name: Some(name.to_owned()),
            parent_uuid: Some(parent),
            ..Default::default()
        })
    }

    fn event(&mut self, track: u64, ts_ns: u64, kind: i32, event: TrackEvent) -> io::Result<()> {
        let event = TrackEvent { r#type: Some(kind), track_uuid: Some(track), ..event };
        self.push(proto::TracePacket {
            timestamp: Some(ts_ns),
            track_event: Some(event),
            ..Default::default()
        })
    }

    /// Writes the slices of a track without overlap: each one ends at the latest where the next one starts.
    fn slices(&mut self, track: u64, mut slices: Vec<Slice>) -> io::Result<()> {
        slices.sort_by_key(|slice| slice.begin_ns);
        let begins: Vec<u64> = slices.iter().map(|slice| slice.begin_ns).collect();
        for (at, slice) in slices.into_iter().enumerate() {
            let next = begins.get(at + 1).copied();
            let end_ns = match (slice.end_ns, next) {
                (Some(end), Some(next)) => Some(end.min(next)),
                (end, next) => end.or(next),
            };
            let begin = TrackEvent {
                name: Some(slice.name),
                categories: vec![slice.category.to_owned()],
                debug_annotations: slice.notes.into_iter().map(annotation).collect(),
                flow_ids: slice.flows,
                ..Default::default()
            };
            self.event(track, slice.begin_ns, TrackEvent::SLICE_BEGIN, begin)?;
            let Some(end_ns) = end_ns else { continue };
            self.event(track, end_ns, TrackEvent::SLICE_END, TrackEvent::default())?;
            if let Some(flow) = slice.arrives {
                let got = TrackEvent {
                    name: Some("acquired the GVL".to_owned()),
                    categories: vec![slice.category.to_owned()],
                    terminating_flow_ids: vec![flow],
                    ..Default::default()
                };
                self.event(track, end_ns, TrackEvent::INSTANT, got)?;
            }
        }
        Ok(())
    }
}

fn annotation((name, note): (&'static str, Note)) -> proto::DebugAnnotation {
    let mut annotation = proto::DebugAnnotation { name: Some(name.to_owned()), ..Default::default() };
    match note {
        Note::Text(text) => annotation.string_value = Some(text),
        Note::Number(number) => annotation.uint_value = Some(number),
        Note::Signed(number) => annotation.int_value = Some(number),
    }
    annotation
}

/// Writes the trace; returns the number of events left out.
pub(super) fn write(recording: &Recording, context: &Context<'_>, out: &mut dyn Write) -> io::Result<u64> {
    let nothing = Timeline::default();
    let timeline = recording.timeline.as_ref().unwrap_or(&nothing);
    let mut packets = Packets { out, waiting: proto::Trace::default(), tracks: 0, stacks: HashMap::new() };
    head(&mut packets, context)?;

    if !recording.gvl_gaps.is_empty() {
        let track = packets
            .track(proto::TrackDescriptor { name: Some("GVL tracing".to_owned()), ..Default::default() })?;
        packets.slices(track, recording.gvl_gaps.iter().map(gap_slice).collect())?;
    }
    let mut cycles: BTreeMap<ProcessIndex, Vec<&CycleMoment>> = BTreeMap::new();
    for cycle in &timeline.cycles {
        cycles.entry(recording.thread_facts(cycle.thread).0.process).or_default().push(cycle);
    }
    let mut threads = threads(recording, timeline);
    for (index, facts) in recording.processes.iter().enumerate() {
        let of = threads.remove(&index).unwrap_or_default();
        let cycles = cycles.remove(&index).unwrap_or_default();
        let memory = memory::Figures::of(timeline, index, context.began_ns);
        if of.is_empty() && cycles.is_empty() && memory.is_empty() {
            continue;
        }
        let process = packets.track(proto::TrackDescriptor {
            process: Some(proto::ProcessDescriptor {
                pid: i32::try_from(facts.pid).ok(),
                cmdline: facts.cmdline.iter().map(|word| label::text(word)).collect(),
                process_name: Some(label::text(&facts.comm)),
            }),
            ..Default::default()
        })?;
        if !cycles.is_empty() {
            let track = packets.child(process, "GC cycles")?;
            packets.slices(track, cycles.iter().map(|cycle| cycle_slice(recording, cycle)).collect())?;
        }
        memory.write(&mut packets, process)?;
        // The main thread first, the other threads by name.
        let mut of: Vec<(u32, ThreadTracks)> = of.into_iter().collect();
        of.sort_by(|(a, one), (b, other)| {
            (*a != facts.pid, &one.name, a).cmp(&(*b != facts.pid, &other.name, b))
        });
        for (tid, tracks) in of {
            // To Perfetto, thread 0 is an idle CPU.
            if tid == 0 {
                if !tracks.allocs.is_empty() {
                    let track = packets.child(process, &format!("allocation {}", tracks.name))?;
                    memory::stacks(&mut packets, recording, track, tracks.allocs)?;
                }
                // Threads that have waited since they started: their native thread was never seen.
                for (name, slices) in tracks.gvl.into_values() {
                    let track = packets.child(process, &name)?;
                    packets.slices(track, slices)?;
                }
                continue;
            }
            let thread = packets.track(proto::TrackDescriptor {
                thread: Some(proto::ThreadDescriptor {
                    pid: i32::try_from(facts.pid).ok(),
                    tid: i32::try_from(tid).ok(),
                    thread_name: Some(tracks.name.clone()),
                }),
                ..Default::default()
            })?;
            if !tracks.requests.is_empty() {
                let track = packets.child(thread, "requests")?;
                packets.slices(track, tracks.requests)?;
            }
            if !tracks.pauses.is_empty() {
                let track = packets.child(thread, "GC pauses")?;
                packets.slices(track, tracks.pauses)?;
            }
            if !tracks.allocs.is_empty() {
                let track = packets.child(thread, "allocation")?;
                memory::stacks(&mut packets, recording, track, tracks.allocs)?;
            }
            for (_, slices) in tracks.gvl.into_values() {
                let track = packets.child(thread, &format!("{} {tid}", tracks.name))?;
                packets.slices(track, slices)?;
            }
        }
    }
    packets.flush()?;
    packets.out.flush()?;
    Ok(timeline.events_left_out + timeline.allocs_left_out)
}

/// Writes the relation of the clocks, and a description of the run.
fn head(packets: &mut Packets<'_>, context: &Context<'_>) -> io::Result<()> {
    let (clock, at_ns) = (context.clock, context.ended_ns);
    let values = [u64::try_from(clock.epoch_nanos(at_ns)).unwrap_or(0), at_ns, clock.boottime_nanos(at_ns)];
    let clocks = CLOCKS.iter().zip(values);
    let clocks = clocks.map(|(&id, ns)| proto::Clock { clock_id: Some(id), timestamp: Some(ns) }).collect();
    packets.push(proto::TracePacket {
        clock_snapshot: Some(proto::ClockSnapshot { clocks }),
        sequence_flags: Some(SEQUENCE_BEGINS),
        ..Default::default()
    })?;
    let track =
        packets.track(proto::TrackDescriptor { name: Some("gctrace".to_owned()), ..Default::default() })?;
    let mut notes = vec![("account", Note::Text(context.account()))];
    if context.gvl {
        let gaps = "where a thread's track has a gap, what it did with the GVL was below --gvl-threshold, or was not seen";
        notes.push(("gaps", Note::Text(gaps.to_owned())));
    }
    let run = Slice {
        begin_ns: context.began_ns,
        end_ns: Some(context.ended_ns),
        name: "run".to_owned(),
        category: "gctrace",
        notes,
        flows: Vec::new(),
        arrives: None,
    };
    packets.slices(track, vec![run])
}

/// A time in which individual waits for the GVL were not recorded.
fn gap_slice(gap: &GvlGap) -> Slice {
    Slice {
        begin_ns: gap.from_ns,
        end_ns: Some(gap.to_ns),
        name: gap.name().to_owned(),
        category: "gctrace",
        notes: Vec::new(),
        flows: Vec::new(),
        arrives: None,
    }
}

/// The annotations of a cycle's slice.
fn cycle_notes(recording: &Recording, cycle: &CycleMoment) -> Vec<(&'static str, Note)> {
    let (thread, _) = recording.thread_facts(cycle.thread);
    vec![
        ("kind", Note::Text(cycle.kind.to_owned())),
        ("count", Note::Number(cycle.count)),
        ("why", Note::Text(reason_text(cycle.reason))),
        ("tid", Note::Number(thread.tid.into())),
    ]
}

fn cycle_slice(recording: &Recording, cycle: &CycleMoment) -> Slice {
    let mut notes = cycle_notes(recording, cycle);
    notes.extend(cycle.request.map(|id| ("request", Note::Number(id.get()))));
    notes.extend(stack(recording, "stack", cycle.node));
    Slice {
        begin_ns: cycle.begin_ns,
        end_ns: cycle.end_ns,
        name: format!("{} GC", cycle.kind),
        category: "gc",
        notes,
        flows: Vec::new(),
        arrives: None,
    }
}

/// The pauses of a cycle, each with the thread that was stopped.
fn pauses(recording: &Recording, cycle: &CycleMoment) -> Vec<(u32, Slice)> {
    let slices = cycle.pauses.iter().map(|pause| {
        let mut notes = cycle_notes(recording, cycle);
        notes.extend(pause.kind.map(|kind| ("step", Note::Text(PauseKind::name(kind).to_owned()))));
        notes.extend([("mark_ns", Note::Number(pause.mark_ns)), ("sweep_ns", Note::Number(pause.sweep_ns))]);
        let slice = Slice {
            begin_ns: pause.begin_ns,
            end_ns: Some(pause.begin_ns + pause.ns),
            name: format!("GC pause ({})", cycle.kind),
            category: "gc",
            notes,
            flows: Vec::new(),
            arrives: None,
        };
        (pause.tid, slice)
    });
    slices.collect()
}

/// Ruby frames of a stack, leaf first, one per line.
fn stack(recording: &Recording, name: &'static str, node: NodeId) -> Option<(&'static str, Note)> {
    let text = stack_text(recording, node);
    (!text.is_empty()).then_some((name, Note::Text(text)))
}

fn stack_text(recording: &Recording, node: NodeId) -> String {
    let lines: Vec<String> = recording
        .tree
        .path(node)
        .map(|(_, frame)| {
            let frame = recording.tree.frame(frame);
            match &frame.file {
                Some(file) => {
                    format!("{} {}{}", label::text(&frame.name), label::text(file), frame.colon_line())
                }
                None => label::text(&frame.name),
            }
        })
        .collect();
    lines.join("\n")
}

/// The tracks of a thread.
#[derive(Default)]
struct ThreadTracks {
    /// Its last name.
    name: String,
    /// The requests that it served.
    requests: Vec<Slice>,
    /// The pauses in which it was stopped.
    pauses: Vec<Slice>,
    /// Its stacks of allocation.
    allocs: Vec<AllocMoment>,
    /// What it did with the GVL, by number of the Ruby thread, with its name: several Ruby threads may have run on it one after another.
    gvl: BTreeMap<u64, (String, Vec<Slice>)>,
}

impl ThreadTracks {
    /// Sets the name if there is none yet.
    fn name_it(&mut self, recording: &Recording, process: ProcessIndex, tid: u32) {
        if self.name.is_empty() {
            let known = |thread: &&Thread| (thread.process, thread.tid) == (process, tid);
            let known = recording.threads.iter().rev().find(known);
            self.name = known.map_or_else(|| format!("thread {tid}"), |thread| label::text(&thread.name));
        }
    }
}

/// The threads of each process by id.
type Threads = BTreeMap<ProcessIndex, BTreeMap<u32, ThreadTracks>>;

fn threads(recording: &Recording, timeline: &Timeline) -> Threads {
    let mut threads = Threads::new();
    for cycle in &timeline.cycles {
        let (starter, _) = recording.thread_facts(cycle.thread);
        let of_process = threads.entry(starter.process).or_default();
        for (tid, slice) in pauses(recording, cycle) {
            let tracks = of_process.entry(tid).or_default();
            tracks.name_it(recording, starter.process, tid);
            tracks.pauses.push(slice);
        }
    }
    for request in &timeline.requests {
        let tracks = threads.entry(request.process).or_default().entry(request.tid).or_default();
        tracks.name_it(recording, request.process, request.tid);
        tracks.requests.push(request::slice(request));
    }
    for alloc in &timeline.allocs {
        let (thread, _) = recording.thread_facts(alloc.key.thread);
        let tracks = threads.entry(thread.process).or_default().entry(thread.tid).or_default();
        if tracks.name.is_empty() {
            tracks.name = label::text(&thread.name);
        }
        tracks.allocs.push(*alloc);
    }
    gvl(recording, timeline, &mut threads);
    threads
}

fn gvl(recording: &Recording, timeline: &Timeline, threads: &mut Threads) {
    let moments = timeline.gvl_once(recording);
    // The arrow by the wait where it ends, and by the hold where it starts.
    let mut arrives: HashMap<usize, u64> = HashMap::new();
    let mut leaves: HashMap<usize, Vec<u64>> = HashMap::new();
    for (flow, (wait, hold)) in (1..).zip(longest_holds(recording, &moments)) {
        arrives.insert(wait, flow);
        leaves.entry(hold).or_default().push(flow);
    }
    // A thread is identified by its last id.
    let tids: HashMap<(ProcessIndex, u64), u32> = moments
        .iter()
        .map(|moment| {
            let (thread, _) = recording.thread_facts(moment.thread);
            ((thread.process, moment.id), thread.tid)
        })
        .collect();
    for (at, moment) in moments.iter().enumerate() {
        let (thread, _) = recording.thread_facts(moment.thread);
        let tid = tids.get(&(thread.process, moment.id)).copied().unwrap_or(thread.tid);
        let tracks = threads.entry(thread.process).or_default().entry(tid).or_default();
        let name = label::text(&thread.name);
        if tid != 0 {
            tracks.name.clone_from(&name);
        }
        let (_, slices) = tracks.gvl.entry(moment.id).or_insert_with(|| (name, Vec::new()));
        let mut notes = vec![("tid", Note::Number(thread.tid.into()))];
        notes.extend(moment.request.map(|id| ("request", Note::Number(id.get()))));
        if let Some((holder, ..)) = moment.holder {
            let (holder, _) = recording.thread_facts(holder);
            notes.push(("blocked_by", Note::Text(format!("{} {}", label::text(&holder.name), holder.tid))));
            notes.extend(stack(recording, "blocked_in", moment.holder_at.ran));
            notes.extend(stack(recording, "blocked_until", moment.holder_at.until));
        }
        notes.extend(stack(recording, "stack", moment.node));
        if moment.open {
            notes.push(("note", Note::Text("had not ended when it was last checked".to_owned())));
        }
        let name = match moment.doing {
            GvlDoing::Waiting => "waiting for the GVL",
            GvlDoing::Holding => "holding the GVL",
            GvlDoing::Away => "without the GVL",
        };
        slices.push(Slice {
            begin_ns: moment.begin_ns,
            end_ns: Some(moment.begin_ns + moment.ns),
            name: name.to_owned(),
            category: "gvl",
            notes,
            flows: leaves.remove(&at).unwrap_or_default(),
            arrives: arrives.get(&at).copied(),
        });
    }
}

#[cfg(test)]
pub(super) mod tests;
