//! Reading traces back.

use super::*;

/// The contents of a trace, for tests: the name of each track, and its slices.
pub(in crate::export::profile) type Read = BTreeMap<u64, (String, Vec<(u64, u64, String)>)>;

/// Reads back the slices of a trace; every start must have an end, and every arrow both ends.
pub(in crate::export::profile) fn read(bytes: &[u8]) -> (Read, usize) {
    let trace = proto::Trace::decode(bytes).unwrap();
    let mut tracks = Read::new();
    let (mut left, mut arrived) = (Vec::new(), Vec::new());
    let mut open: HashMap<u64, (u64, String)> = HashMap::new();
    for packet in trace.packet {
        if let Some(track) = packet.track_descriptor {
            let process = track.process.and_then(|process| process.process_name);
            let thread = track.thread.and_then(|thread| thread.thread_name);
            let name = track.name.or(process).or(thread).unwrap();
            assert!(tracks.insert(track.uuid.unwrap(), (name, Vec::new())).is_none());
            assert!(track.parent_uuid.is_none_or(|parent| tracks.contains_key(&parent)));
        }
        let Some(event) = packet.track_event else { continue };
        let (ts, on) = (packet.timestamp.unwrap(), event.track_uuid.unwrap());
        left.extend(event.flow_ids);
        arrived.extend(event.terminating_flow_ids);
        match event.r#type.unwrap() {
            TrackEvent::SLICE_BEGIN => {
                assert!(open.insert(on, (ts, event.name.unwrap())).is_none(), "slices overlap");
            }
            TrackEvent::SLICE_END => {
                let (begin, name) = open.remove(&on).unwrap();
                assert!(begin <= ts);
                tracks.get_mut(&on).unwrap().1.push((begin, ts, name));
            }
            _ => {}
        }
    }
    left.sort_unstable();
    arrived.sort_unstable();
    assert_eq!(left, arrived);
    assert!(open.is_empty(), "{open:?}");
    (tracks, left.len())
}

/// Processes with their arguments, and threads (process, id, name) with the start times of their GC pauses.
#[expect(clippy::type_complexity, reason = "what a test compares with")]
pub(in crate::export::profile) fn described(
    bytes: &[u8],
) -> (Vec<(i32, Vec<String>)>, Vec<(i32, i32, String, Vec<u64>)>) {
    let trace = proto::Trace::decode(bytes).unwrap();
    let (mut processes, mut threads) = (Vec::new(), Vec::new());
    // The index of a thread, by the number of its track and of its child tracks.
    let mut places: HashMap<u64, usize> = HashMap::new();
    for packet in trace.packet {
        if let Some(track) = packet.track_descriptor {
            if let Some(process) = track.process {
                processes.push((process.pid.unwrap(), process.cmdline));
            } else if let Some(thread) = track.thread {
                places.insert(track.uuid.unwrap(), threads.len());
                threads.push((
                    thread.pid.unwrap(),
                    thread.tid.unwrap(),
                    thread.thread_name.unwrap(),
                    Vec::new(),
                ));
            } else if let Some(&place) = track.parent_uuid.and_then(|parent| places.get(&parent)) {
                places.insert(track.uuid.unwrap(), place);
            }
        }
        let Some(event) = packet.track_event else { continue };
        if event.r#type == Some(TrackEvent::SLICE_BEGIN)
            && let Some(&place) = places.get(&event.track_uuid.unwrap())
        {
            threads[place].3.push(packet.timestamp.unwrap());
        }
    }
    (processes, threads)
}

/// Names of tracks, and start times of the slices with a name.
pub(in crate::export::profile) fn slices(bytes: &[u8], name: &str) -> (Vec<String>, Vec<u64>) {
    let trace = proto::Trace::decode(bytes).unwrap();
    let is_one = |packet: &proto::TracePacket| {
        packet.track_event.as_ref().is_some_and(|event| event.name.as_deref() == Some(name))
    };
    let begins =
        trace.packet.iter().filter(|packet| is_one(packet)).filter_map(|packet| packet.timestamp).collect();
    let names = trace.packet.into_iter().filter_map(|packet| packet.track_descriptor?.name).collect();
    (names, begins)
}

/// Counters by process (number of its track) and name, with their values.
pub(in crate::export::profile) fn counters(bytes: &[u8]) -> BTreeMap<(i32, String), Vec<(u64, i64)>> {
    let trace = proto::Trace::decode(bytes).unwrap();
    let (mut pids, mut tracks) = (HashMap::new(), HashMap::new());
    let mut values: BTreeMap<(i32, String), Vec<(u64, i64)>> = BTreeMap::new();
    for packet in trace.packet {
        if let Some(track) = packet.track_descriptor {
            if let Some(process) = track.process {
                pids.insert(track.uuid.unwrap(), process.pid.unwrap());
            } else if let Some(counter) = track.counter {
                assert!([Some(2), Some(3)].contains(&counter.unit));
                tracks.insert(track.uuid.unwrap(), (pids[&track.parent_uuid.unwrap()], track.name.unwrap()));
            }
        }
        let Some(event) = packet.track_event else { continue };
        if event.r#type == Some(TrackEvent::COUNTER) {
            let key = tracks[&event.track_uuid.unwrap()].clone();
            let point = (packet.timestamp.unwrap(), event.counter_value.unwrap());
            values.entry(key).or_default().push(point);
        }
    }
    values
}

/// Stacks of allocation: text of the stack, objects, bytes.
pub(in crate::export::profile) fn allocation(bytes: &[u8]) -> Vec<(String, u64, u64)> {
    let trace = proto::Trace::decode(bytes).unwrap();
    let (mut texts, mut found) = (HashMap::new(), Vec::new());
    for packet in trace.packet {
        for text in packet.interned_data.into_iter().flat_map(|data| data.debug_annotation_string_values) {
            let known = texts.insert(text.iid.unwrap(), String::from_utf8(text.str.unwrap()).unwrap());
            assert!(known.is_none());
        }
        let Some(event) = packet.track_event else { continue };
        if !event.categories.iter().any(|category| category == "allocation") {
            continue;
        }
        assert_eq!(packet.sequence_flags, Some(NEEDS_TEXTS));
        let note = |name: &str| {
            event.debug_annotations.iter().find(|note| note.name.as_deref() == Some(name)).unwrap()
        };
        let number = |name| note(name).uint_value.unwrap();
        let stack = texts[&note("stack").string_value_iid.unwrap()].clone();
        assert_eq!(number("bytes") % number("slot_size"), 0);
        found.push((stack, number("objects"), number("bytes")));
    }
    found
}
