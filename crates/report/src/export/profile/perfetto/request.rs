//! A request as a slice on its thread.

use super::{Note, Slice, label};
use crate::aggregate::recording::RequestMoment;

/// From the time when the thread took the request until it was done.
pub(super) fn slice(request: &RequestMoment) -> Slice {
    let numbers = [
        ("id", Some(request.id)),
        ("queue_ns", request.queue_ns),
        ("first_byte_ns", request.first_byte_ns),
        ("response_bytes", request.response_bytes),
        ("gcs", request.gcs.map(u64::from)),
        ("gc_ns", request.gc_ns),
        ("gc_other_ns", request.gc_other.map(|other| other.ns)),
        ("alloc_objects", request.alloc.map(|alloc| alloc.slots)),
        ("alloc_bytes", request.alloc.map(|alloc| alloc.bytes)),
        ("minor_faults", request.memory.faults.map(|faults| faults.minor)),
        ("major_faults", request.memory.faults.map(|faults| faults.major)),
    ];
    let known = numbers.into_iter().filter_map(|(name, number)| Some((name, Note::Number(number?))));
    let mut notes: Vec<_> = known.collect();
    notes.extend(request.memory.rss_growth.map(|bytes| ("rss_growth_bytes", Note::Signed(bytes))));
    if let Some(trace) = &request.trace {
        notes.push(("trace_id", Note::Text(trace.trace_id_text())));
        notes.extend(trace.parent_span_id_text().map(|span| ("parent_span_id", Note::Text(span))));
    }
    if request.end_ns.is_none() {
        notes.push(("note", Note::Text("its end was not seen".to_owned())));
    }
    Slice {
        begin_ns: request.begin_ns,
        end_ns: request.end_ns,
        name: label::text(&request.name()),
        category: "request",
        notes,
        flows: Vec::new(),
        arrives: None,
    }
}
