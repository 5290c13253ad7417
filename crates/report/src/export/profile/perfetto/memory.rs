//! Memory and allocation.
//!
//! Figures of GC events are counters of the process, each at the time of its event. Allocations are cumulative
//! counters, updated at the end of each interval; the viewer can also show them as rates.
//!
//! Stacks of allocation are instants on a track of their thread, with objects, bytes and stack; SQL adds them up
//! (docs/alloc.md). Heap profile packets (`ProfilePacket`), which the viewer shows as a flame graph, would be wrong:
//! whatever they do not report as freed is shown as "unreleased", and gctrace does not see when an object is freed;
//! only a heap labelled as Java's is shown without that. The text of each stack is in the trace once.

use std::{collections::BTreeMap, io};

use super::{
    NEEDS_TEXTS, Note, Packets, annotation, proto, proto::CounterDescriptor, proto::TrackEvent, stack_text,
};
use crate::{
    aggregate::recording::{AllocMoment, ProcessIndex, Recording, Timeline},
    export::profile::label,
};

/// Values of a counter at their times.
type Points = Vec<(u64, u64)>;

/// The memory figures of one process.
#[derive(Default)]
pub(super) struct Figures {
    /// Counters with their units, in display order.
    counters: Vec<(String, i32, Points)>,
}

impl Figures {
    /// The figures of a process in a recording from `began_ns` on.
    pub(super) fn of(timeline: &Timeline, process: ProcessIndex, began_ns: u64) -> Self {
        let memory = || timeline.memory.iter().filter(|of| of.process == process && of.ts_ns >= began_ns);
        let mut figures = Self::default();
        let rss = memory().filter_map(|of| Some((of.ts_ns, of.rss?)));
        figures.add("RSS", CounterDescriptor::BYTES, rss.collect());
        let shares = || memory().filter_map(|of| of.shares);
        let pss = shares().map(|(read_ns, shares)| (read_ns, shares.pss));
        figures.add("PSS", CounterDescriptor::BYTES, pss.collect());
        let private = shares().map(|(read_ns, shares)| (read_ns, shares.private_dirty));
        figures.add("private dirty", CounterDescriptor::BYTES, private.collect());
        // Keyed by the index of the name, to keep the order of `named`.
        let mut named: BTreeMap<(usize, &str), Points> = BTreeMap::new();
        let mut pools: BTreeMap<u64, [Points; 2]> = BTreeMap::new();
        for of in memory() {
            for (at, (name, value)) in of.heap.named().into_iter().enumerate() {
                named.entry((at, name)).or_default().extend(value.map(|value| (of.ts_ns, value)));
            }
            for pool in &of.heap.pools {
                let (used, free) = pool.bytes();
                let points = pools.entry(pool.slot_size).or_default();
                points[0].push((of.ts_ns, used));
                points[1].push((of.ts_ns, free));
            }
        }
        for ((_, name), points) in named {
            let is_bytes = name.ends_with("_bytes");
            let unit = if is_bytes { CounterDescriptor::BYTES } else { CounterDescriptor::COUNT };
            figures.add(name, unit, points);
        }
        for (size, [used, free]) in pools {
            figures.add(&format!("slots of {size} bytes: in use"), CounterDescriptor::BYTES, used);
            figures.add(&format!("slots of {size} bytes: free"), CounterDescriptor::BYTES, free);
        }
        let (mut objects, mut bytes) = (Points::new(), Points::new());
        let mut sum = (0, 0);
        for of in timeline.allocated.iter().filter(|of| of.process == process) {
            if objects.is_empty() {
                objects.push((of.begin_ns, 0));
                bytes.push((of.begin_ns, 0));
            }
            sum = (sum.0 + of.slots, sum.1 + of.bytes);
            objects.push((of.end_ns, sum.0));
            bytes.push((of.end_ns, sum.1));
        }
        figures.add("allocated objects", CounterDescriptor::COUNT, objects);
        figures.add("allocated bytes of slots", CounterDescriptor::BYTES, bytes);
        figures
    }

    fn add(&mut self, name: &str, unit: i32, points: Points) {
        if !points.is_empty() {
            self.counters.push((name.to_owned(), unit, points));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// Writes the counters as children of a process track.
    pub(super) fn write(self, packets: &mut Packets<'_>, process: u64) -> io::Result<()> {
        for (name, unit, points) in self.counters {
            let track = packets.track(proto::TrackDescriptor {
                name: Some(name),
                parent_uuid: Some(process),
                counter: Some(CounterDescriptor { unit: Some(unit) }),
                ..Default::default()
            })?;
            for (ts_ns, value) in points {
                let event = TrackEvent { counter_value: i64::try_from(value).ok(), ..TrackEvent::default() };
                packets.event(track, ts_ns, TrackEvent::COUNTER, event)?;
            }
        }
        Ok(())
    }
}

/// Writes stacks of allocation to a track.
pub(super) fn stacks(
    packets: &mut Packets<'_>,
    recording: &Recording,
    track: u64,
    mut allocs: Vec<AllocMoment>,
) -> io::Result<()> {
    allocs.sort_by_key(|alloc| alloc.ts_ns);
    for alloc in allocs {
        let known = packets.stacks.len() as u64;
        let number = *packets.stacks.entry(alloc.key.node).or_insert(known + 1);
        if number > known {
            let text = stack_text(recording, alloc.key.node).into_bytes();
            let text = proto::InternedString { iid: Some(number), str: Some(text) };
            packets.push(proto::TracePacket {
                interned_data: Some(proto::InternedData { debug_annotation_string_values: vec![text] }),
                sequence_flags: Some(NEEDS_TEXTS),
                ..Default::default()
            })?;
        }
        let leaf = recording.tree.path(alloc.key.node).next();
        let leaf = leaf.map(|(_, frame)| label::text(&recording.tree.frame(frame).name));
        let notes = [
            ("objects", Note::Number(alloc.slots)),
            ("bytes", Note::Number(alloc.bytes())),
            ("slot_size", Note::Number(alloc.key.slot_size.into())),
        ];
        let mut notes: Vec<_> = notes.into_iter().map(annotation).collect();
        let name = Some("stack".to_owned());
        notes.push(proto::DebugAnnotation { name, string_value_iid: Some(number), ..Default::default() });
        packets.push(proto::TracePacket {
            timestamp: Some(alloc.ts_ns),
            track_event: Some(TrackEvent {
                r#type: Some(TrackEvent::INSTANT),
                track_uuid: Some(track),
                name: leaf,
                categories: vec!["allocation".to_owned()],
                debug_annotations: notes,
                ..Default::default()
            }),
            sequence_flags: Some(NEEDS_TEXTS),
            ..Default::default()
        })?;
    }
    Ok(())
}
