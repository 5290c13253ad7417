//! Allocation and memory.
//!
//! Stacks of allocation are `nativeAllocations`, the table that the viewer's call tree and flame graph show as "Allocated Memory"
//! ("Use data source" above them), restricted to the selected time. The variant without addresses is used, because it is unknown when
//! objects are freed: the viewer then offers no "Retained Memory". (`jsAllocations` would be shown as allocations of JavaScript, with
//! the class of each object.) The table has one weight, bytes. The number of objects is in markers, by interval, without stacks.
//!
//! Figures of GC events are markers with `graphs`: each kind has a track with its name below its process. Counters are unsuitable for them:
//! viewers up to the 2025 version call every counter of the category "Memory" by that name, and draw no others. RSS remains a counter.

use serde::Serialize;
use serde_json::{Value, json};

use super::{Category, ThreadParts, View, markers::Markers, tables::Tables};
use crate::aggregate::recording::AllocMoment;

/// Bytes of slots under the stacks that represent them.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Allocations {
    length: usize,
    weight_type: &'static str,
    time: Vec<f64>,
    weight: Vec<u64>,
    stack: Vec<Option<u32>>,
}

impl Allocations {
    /// The allocations of a thread; `None` if it has none.
    pub(super) fn of(view: View<'_>, tables: &mut Tables<'_>, allocs: &[&AllocMoment]) -> Option<Self> {
        let mut allocs = allocs.to_vec();
        // The viewer looks up times by binary search.
        allocs.sort_by_key(|alloc| alloc.ts_ns);
        (!allocs.is_empty()).then(|| Self {
            length: allocs.len(),
            weight_type: "bytes",
            time: allocs.iter().map(|alloc| view.ms(alloc.ts_ns)).collect(),
            weight: allocs.iter().map(|alloc| alloc.bytes()).collect(),
            stack: allocs.iter().map(|alloc| tables.stack(alloc.key.node)).collect(),
        })
    }
}

/// Describes the fields of the markers, and which of them are drawn.
pub(super) fn schema() -> Vec<Value> {
    let kind = |name: &str, what: &str, table: &str, fields: &[(&str, &str, &str)], graphs: Value| {
        let fields =
            fields.iter().map(|(key, label, format)| json!({"key": key, "label": label, "format": format}));
        json!({
            "name": name,
            "tableLabel": table,
            "display": ["marker-table"],
            "description": what,
            "fields": fields.collect::<Vec<_>>(),
            "graphs": graphs,
        })
    };
    let line = |key: &str, color: &str| json!({"key": key, "type": "line", "color": color});
    vec![
        kind(
            "HeapSlots",
            "GC.stat of the process at a GC event: slots of the heap of objects.",
            "{marker.data.live} live, {marker.data.free} free",
            &[("live", "heap_live_slots", "integer"), ("free", "heap_free_slots", "integer")],
            json!([{"key": "live", "type": "line-filled", "color": "green"}, line("free", "grey")]),
        ),
        kind(
            "HeapPool",
            "GC.stat_heap of the process at a GC event: bytes of the slots of one size. Those of objects that wait for a \
             finalizer are in use.",
            "{marker.data.used} in use, {marker.data.free} free",
            &[("used", "In use", "bytes"), ("free", "Free", "bytes")],
            json!([{"key": "used", "type": "line-filled", "color": "green"}, line("free", "grey")]),
        ),
        kind(
            "Malloc",
            "GC.stat of the process at a GC event: bytes allocated by malloc since the last cycle began, and since the last major one began.",
            "{marker.data.increase}, since the last major GC {marker.data.old}",
            &[("increase", "malloc_increase_bytes", "bytes"), ("old", "oldmalloc_increase_bytes", "bytes")],
            json!([line("old", "orange"), line("increase", "blue")]),
        ),
        kind(
            "Shares",
            "Memory of the process, read after a GC event: its share of what it has with others (PSS), and pages that it has for \
             itself and has written to.",
            "PSS {marker.data.pss}, private dirty {marker.data.dirty}",
            &[("pss", "PSS", "bytes"), ("dirty", "Private dirty", "bytes")],
            json!([line("pss", "purple"), line("dirty", "red")]),
        ),
        kind(
            "Allocated",
            "Slots that were handed out for objects in this time, by all threads.",
            "{marker.data.objects} objects, {marker.data.bytes}",
            &[("objects", "Objects", "integer"), ("bytes", "Bytes of slots", "bytes")],
            json!([{"key": "bytes", "type": "bar", "color": "teal"}]),
        ),
    ]
}

/// Adds the data of the process of a main thread.
pub(super) fn mark(view: View<'_>, tables: &mut Tables<'_>, parts: &ThreadParts<'_>, markers: &mut Markers) {
    for memory in &parts.memory {
        let (at, heap) = (view.ms(memory.ts_ns), &memory.heap);
        let mut push = |name: &str, data: Value| {
            markers.push_at(Category::Memory, tables.string(name), at, data);
        };
        if let Some((live, free)) = heap.live_slots.zip(heap.free_slots) {
            push("Heap slots", json!({"type": "HeapSlots", "live": live, "free": free}));
        }
        for pool in &heap.pools {
            let (used, free) = pool.bytes();
            let name = format!("Heap: slots of {} bytes", pool.slot_size);
            push(&name, json!({"type": "HeapPool", "used": used, "free": free}));
        }
        if let Some((increase, old)) = heap.malloc_increase.zip(heap.oldmalloc_increase) {
            push("malloc", json!({"type": "Malloc", "increase": increase, "old": old}));
        }
    }
    for (read_ns, shares) in parts.memory.iter().filter_map(|memory| memory.shares) {
        let data = json!({"type": "Shares", "pss": shares.pss, "dirty": shares.private_dirty});
        markers.push_at(Category::Memory, tables.string("Shared memory"), view.ms(read_ns), data);
    }
    for sum in &parts.allocated {
        let data = json!({"type": "Allocated", "objects": sum.slots, "bytes": sum.bytes});
        let (begin, end) = (view.ms(sum.begin_ns), view.ms(sum.end_ns));
        markers.push_as(Category::Memory, tables.string("Allocated"), begin, Some(end), data);
    }
}
