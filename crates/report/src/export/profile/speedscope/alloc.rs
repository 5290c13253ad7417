//! Allocation: slots handed out, under stacks, in chronological order. There is no profile per thread: speedscope
//! shows one profile at a time, and a server has many threads that allocate alike.

use std::collections::BTreeMap;

use super::{Numbers, Profile, Stacks, ThreadSample, thread_name};
use crate::{
    aggregate::recording::{AllocMoment, ProcessIndex, Recording, Timeline},
    model::stack::ThreadState,
};

/// The stacks of allocation that fit the limit of frames.
pub(super) fn within_frames<'a>(
    recording: &Recording,
    timeline: &'a Timeline,
    left: &mut usize,
) -> &'a [AllocMoment] {
    let kept;
    (kept, *left) = super::within_frames(&timeline.allocs, *left, |alloc| {
        // Once for bytes and once for objects.
        2 * (1 + recording.tree.path(alloc.key.node).count())
    });
    kept
}

/// The threads that allocated, in a fixed order, with their first names.
pub(super) fn thread_names(
    recording: &Recording,
    allocs: &[AllocMoment],
) -> BTreeMap<(ProcessIndex, u32), String> {
    let mut names = BTreeMap::new();
    for alloc in allocs {
        let (thread, process) = recording.thread_facts(alloc.key.thread);
        names.entry((thread.process, thread.tid)).or_insert_with(|| thread_name(thread, process));
    }
    names
}

/// A profile of bytes and one of objects; empty if nothing was allocated.
pub(super) fn profiles<'a>(
    recording: &'a Recording,
    numbers: &'a Numbers,
    allocs: &[AllocMoment],
) -> Vec<Profile<'a>> {
    if allocs.is_empty() {
        return Vec::new();
    }
    let by_thread = thread_names(recording, allocs).len() > 1;
    let mut allocs = allocs.to_vec();
    allocs.sort_by_key(|alloc| alloc.ts_ns);
    let profile = |name: &str, unit, weight: fn(&AllocMoment) -> u64| {
        let (mut samples, mut weights): (Vec<Option<ThreadSample>>, Vec<u64>) = (Vec::new(), Vec::new());
        for alloc in &allocs {
            let place =
                ThreadSample { thread: alloc.key.thread, node: alloc.key.node, state: ThreadState::Running };
            match weights.last_mut() {
                Some(last) if samples.last() == Some(&Some(place)) => *last += weight(alloc),
                _ => {
                    samples.push(Some(place));
                    weights.push(weight(alloc));
                }
            }
        }
        let samples = Stacks { recording, numbers, samples, by_thread };
        let (name, end) = (name.to_owned(), weights.iter().sum());
        Profile { r#type: "sampled", name, unit, start: 0, end, samples, weights }
    };
    vec![
        profile("allocation: bytes of slots", "bytes", AllocMoment::bytes),
        profile("allocation: objects", "none", |alloc| alloc.slots),
    ]
}
