//! The sums of a recording that become samples, in the order in which they are written.

use std::{collections::HashMap, hash::Hash};

use super::{Allocation, Head};
use crate::{
    aggregate::recording::{
        AllocKey, GvlFacts, HoldKey, HolderAt, PauseKey, PauseSum, ProcessIndex, Recording, SampleKey,
        SampleSum, ThreadIndex, WaitKey,
    },
    model::gvl::GvlTimes,
};

/// A part of a profile: of so many equal parts this one, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::export) struct Part {
    at: usize,
    parts: usize,
}

impl Part {
    /// All of it.
    pub(in crate::export) const WHOLE: Self = Self { at: 0, parts: 1 };

    /// Its two halves; none of their samples is in both.
    pub(in crate::export) fn halves(self) -> [Self; 2] {
        let half = |which| Self { at: self.at * 2 + which, parts: self.parts * 2 };
        [half(0), half(1)]
    }

    /// Its share of these.
    pub(super) fn of<T>(self, all: &[T]) -> &[T] {
        let border = |at: usize| (all.len() as u128 * at as u128 / self.parts as u128) as usize;
        all.get(border(self.at)..border(self.at + 1)).unwrap_or_default()
    }
}

/// Sums by their keys, sorted.
#[derive(Default)]
pub(super) struct Sums<'a> {
    pub(super) samples: Vec<(&'a SampleKey, &'a SampleSum)>,
    pub(super) pauses: Vec<(&'a PauseKey, &'a PauseSum)>,
    pub(super) waits: Vec<(&'a WaitKey, &'a GvlTimes)>,
    pub(super) holds: Vec<(&'a HoldKey, &'a GvlTimes)>,
    /// Slots and their bytes.
    pub(super) allocs: Vec<(AllocKey, (u64, u64))>,
    pub(super) threads: Vec<(&'a (ProcessIndex, u64), &'a GvlFacts)>,
}

fn sorted<'a, K: Ord, V>(all: impl Iterator<Item = (&'a K, &'a V)>) -> Vec<(&'a K, &'a V)> {
    let mut all: Vec<_> = all.collect();
    all.sort_unstable_by_key(|(key, _)| *key);
    all
}

impl<'a> Sums<'a> {
    /// All sums of the wanted processes.
    pub(super) fn of(recording: &'a Recording, head: &Head, wanted: &dyn Fn(ProcessIndex) -> bool) -> Self {
        let is_wanted = |thread: ThreadIndex| wanted(recording.thread_facts(thread).0.process);
        let shows_alloc = head.alloc != Allocation::None;
        let allocs = recording.allocs.iter().filter(|(key, _)| shows_alloc && is_wanted(key.thread));
        let mut allocs: Vec<_> = allocs.map(|(key, sum)| (*key, (sum.slots, key.bytes(sum.slots)))).collect();
        allocs.sort_unstable_by_key(|(key, _)| *key);
        if head.alloc == Allocation::Only {
            return Self { allocs, ..Self::default() };
        }
        Self {
            samples: sorted(recording.samples.iter().filter(|(key, _)| is_wanted(key.thread))),
            pauses: sorted(recording.pauses.iter().filter(|(key, _)| is_wanted(key.thread))),
            waits: sorted(recording.gvl_waits.iter().filter(|(key, _)| is_wanted(key.thread))),
            holds: sorted(recording.gvl_holds.iter().filter(|(key, _)| is_wanted(key.thread))),
            allocs,
            threads: sorted(recording.gvl_threads.iter().filter(|(_, facts)| is_wanted(facts.thread))),
        }
    }

    /// Sums that do not tell threads apart.
    pub(super) fn merged(of: &'a Merged) -> Self {
        let mut allocs: Vec<_> = of.allocs.iter().map(|(key, amount)| (*key, *amount)).collect();
        allocs.sort_unstable_by_key(|(key, _)| *key);
        Self {
            samples: sorted(of.samples.iter()),
            pauses: sorted(of.pauses.iter()),
            waits: sorted(of.waits.iter()),
            holds: sorted(of.holds.iter()),
            allocs,
            threads: Vec::new(),
        }
    }
}

/// The sums of a recording for [`super::Labels::OfSeries`], by what their samples show. A service with many threads has few different stacks, and
/// servers limit the number of samples. Totals of threads, which have no stack, are in no window.
#[derive(Default)]
pub(super) struct Merged {
    samples: HashMap<SampleKey, SampleSum>,
    pauses: HashMap<PauseKey, PauseSum>,
    waits: HashMap<WaitKey, GvlTimes>,
    holds: HashMap<HoldKey, GvlTimes>,
    allocs: HashMap<AllocKey, (u64, u64)>,
}

impl Merged {
    pub(super) fn of(recording: &Recording, head: &Head, wanted: &dyn Fn(ProcessIndex) -> bool) -> Self {
        let sums = Sums::of(recording, head, wanted);
        let of_image = representatives(recording);
        let like = |thread: ThreadIndex| of_image.get(thread as usize).copied().unwrap_or(thread);
        let mut merged = Self::default();
        for (key, sum) in sums.samples {
            let of = at(&mut merged.samples, SampleKey { thread: like(key.thread), trace: None, ..*key });
            of.samples += sum.samples;
            of.cpu_ns += sum.cpu_ns;
            of.wall_ns += sum.wall_ns;
        }
        for (key, sum) in sums.pauses {
            let (thread, reason) = (like(key.thread), (None, None));
            let of = at(&mut merged.pauses, PauseKey { thread, reason, trace: None, ..key.clone() });
            of.pauses += sum.pauses;
            of.ns += sum.ns;
        }
        for (key, times) in sums.waits {
            let (thread, holder_at) = (like(key.thread), HolderAt::UNSEEN);
            let key = WaitKey { thread, holder: None, holder_at, trace: None, ..*key };
            at(&mut merged.waits, key).add(times);
        }
        for (key, times) in sums.holds {
            at(&mut merged.holds, HoldKey { thread: like(key.thread), ..*key }).add(times);
        }
        for (key, (slots, bytes)) in sums.allocs {
            let key = AllocKey { thread: like(key.thread), slot_size: 0, trace: None, ..key };
            let of = at(&mut merged.allocs, key);
            of.0 += slots;
            of.1 += bytes;
        }
        merged
    }
}

fn at<K: Eq + Hash, V: Default>(sums: &mut HashMap<K, V>, key: K) -> &mut V {
    sums.entry(key).or_default()
}

/// For each thread, the first one whose process has the same Ruby: the mapping of frames is all that a sample shows of a process.
fn representatives(recording: &Recording) -> Vec<ThreadIndex> {
    let mut known = HashMap::new();
    let all = 0..recording.threads.len() as ThreadIndex;
    all.map(|thread| {
        let image = recording.thread_facts(thread).1.image.as_ref();
        *known.entry(image.map(|image| (&image.path, &image.build_id))).or_insert(thread)
    })
    .collect()
}
