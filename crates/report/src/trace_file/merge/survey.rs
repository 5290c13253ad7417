//! What must be known about a recording before it is merged: which processes ran when, and its highest ids.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Event, Source};
use crate::trace_file::{
    ReadError,
    kinds::{Owned, visit},
    visit::Visit,
};

/// Times in which each process was traced, `CLOCK_MONOTONIC` nanoseconds.
pub(super) type Lives = BTreeMap<u32, Vec<(u64, u64)>>;

/// The findings about a recording.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) lives: Lives,
    /// Ids of processes and threads.
    pub(super) tids: BTreeSet<u32>,
    pub(super) last_request: u64,
    /// Whether individual waits for the GVL were not recorded for some time.
    pub(super) has_gap: bool,
    pub(super) last_ns: u64,
}

struct Numbers<'a>(&'a mut Survey);

impl Visit for Numbers<'_> {
    fn tid(&mut self, tid: &mut u32) {
        self.0.tids.insert(*tid);
    }

    fn request(&mut self, id: &mut u64) {
        self.0.last_request = self.0.last_request.max(*id);
    }
}

impl Survey {
    /// Reads a recording to its end.
    pub(super) fn of(source: &mut Source) -> Result<Self, ReadError> {
        let mut survey = Self::default();
        let mut since: BTreeMap<u32, u64> = BTreeMap::new();
        while let Some(batch) = source.next()? {
            survey.last_ns = survey.last_ns.max(batch.at_ns);
            for event in batch.events {
                let (process, mut owned) = match event {
                    Event::Seen(process, owned) => (process, owned),
                    Event::GvlGap(_) => {
                        survey.has_gap = true;
                        continue;
                    }
                    _ => continue,
                };
                survey.tids.insert(process.pid);
                match &owned {
                    Owned::Process { now_ns, .. } => {
                        if let Some(from_ns) = since.insert(process.pid, *now_ns) {
                            survey.lived(process.pid, from_ns, *now_ns);
                        }
                    }
                    Owned::Ended(end) => {
                        let from_ns = since.remove(&process.pid).unwrap_or(end.since_ns);
                        survey.lived(process.pid, from_ns, end.ts_ns);
                    }
                    _ => {}
                }
                visit(&mut owned, &mut Numbers(&mut survey));
            }
        }
        for (pid, from_ns) in since {
            survey.lived(pid, from_ns, survey.last_ns);
        }
        Ok(survey)
    }

    fn lived(&mut self, pid: u32, from_ns: u64, to_ns: u64) {
        self.lives.entry(pid).or_default().push((from_ns, to_ns));
    }

    /// A pid that is in both recordings at the same time.
    pub(super) fn shared(&self, other: &Self) -> Option<u32> {
        let both = self.lives.iter().filter_map(|(pid, lives)| Some((pid, lives, other.lives.get(pid)?)));
        let overlap = |one: &(u64, u64), other: &(u64, u64)| one.0 < other.1 && other.0 < one.1;
        both.into_iter()
            .find(|(_, lives, others)| lives.iter().any(|one| others.iter().any(|other| overlap(one, other))))
            .map(|(pid, ..)| *pid)
    }
}
