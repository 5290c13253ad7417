//! The positions and times of the chunks of a recording: a part of the time can be read without the rest.

use std::io::{Read, Seek};

use super::{
    Recording,
    kinds::{
        Owned,
        decode::{Recorded, Tables},
    },
    replay::{Readable, replay_by},
};
use crate::{
    export::{Outputs, window::Window},
    model::seen::Seen,
};

/// A chunk with entries.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Its start and end in the file.
    begin: u64,
    end: u64,
    /// The earliest and the latest time of its timed entries; `MAX` and 0 if it has none.
    first_ns: u64,
    last_ns: u64,
    /// Set of the processes with entries in the chunk, as returned by [`bit`].
    pids: u64,
    /// Whether every part needs it: a process starts or ends in it, or it has an entry about the whole run.
    needed: bool,
}

/// The chunks of a recording that was read once.
#[derive(Clone, Debug, Default)]
pub struct Index(Vec<Place>);

impl Index {
    /// End of the last whole chunk with entries.
    pub fn end(&self) -> u64 {
        self.0.last().map_or(0, |place| place.end)
    }

    /// The number of chunks that a part needs, and the number of all chunks.
    pub fn needed(&self, window: &Window) -> (usize, usize) {
        (self.0.iter().filter(|place| place.is_needed(window)).count(), self.0.len())
    }

    /// Length of the chunk that starts at `begin`, if it is in the index and not needed for a part.
    fn skips(&self, begin: u64, window: &Window) -> Option<u64> {
        let at = self.0.binary_search_by_key(&begin, |place| place.begin).ok()?;
        let place = self.0[at];
        (!place.is_needed(window)).then_some(place.end - place.begin)
    }
}

impl Place {
    fn of(begin: u64, end: u64, tables: &Tables, entries: &[Recorded]) -> Self {
        let mut place = Self { begin, end, first_ns: u64::MAX, last_ns: 0, pids: 0, needed: false };
        for entry in entries {
            if let Recorded::Seen(index, _) = entry {
                place.pids |= tables.process(*index).map_or(u64::MAX, |process| bit(process.pid));
            }
            match entry {
                Recorded::Seen(_, Owned::Process { .. } | Owned::Ended(_))
                | Recorded::Refused(..)
                | Recorded::Began(_)
                | Recorded::Closed(_)
                | Recorded::Finished(_)
                | Recorded::Settled(_) => place.needed = true,
                Recorded::Seen(_, owned) => {
                    // Entries about a whole lifetime are in no part of the time.
                    let Some(ts_ns) = owned.seen().begin_ns() else { continue };
                    place.first_ns = place.first_ns.min(ts_ns);
                    place.last_ns = place.last_ns.max(ts_ns);
                    // The time of pauses and off-CPU times counts towards a part even if they begin before it.
                    let end_ns = match owned.seen() {
                        Seen::Cycle(cycle) => {
                            cycle.pauses.iter().map(|pause| pause.begin_ns.saturating_add(pause.ns)).max()
                        }
                        Seen::Work(work) => Some(work.begin_ns.saturating_add(work.ns)),
                        Seen::Stack(sample) => sample.off_cpu_end_ns(),
                        _ => None,
                    };
                    place.last_ns = place.last_ns.max(end_ns.unwrap_or(0));
                    // Samples within a request are named after it, even if the request is not in the part.
                    if let Seen::Request(request) = owned.seen() {
                        place.last_ns = place.last_ns.max(request.end_ns.unwrap_or(0));
                    }
                }
                // They concern all processes.
                Recorded::GvlGap(gap) => {
                    place.pids = u64::MAX;
                    place.first_ns = place.first_ns.min(gap.from_ns);
                    place.last_ns = place.last_ns.max(gap.to_ns);
                }
                // Accounts replace each other, and flushes only mark the passing of time.
                Recorded::Account(_) | Recorded::Flushed(_) => {}
            }
        }
        place
    }

    fn is_needed(&self, window: &Window) -> bool {
        let in_time = !window.cuts_time() || window.meets(self.first_ns, self.last_ns);
        let of_process = window.pids.is_empty() || window.pids.iter().any(|pid| self.pids & bit(*pid) != 0);
        self.needed || (in_time && of_process)
    }
}

/// The bit of a process in a set. Other processes share it: then chunks are read needlessly, but none is missed.
fn bit(pid: u32) -> u64 {
    1 << (pid % 64)
}

/// Replays a recording to outputs, as far as it can be read, and builds its index. `passed` is called with the end of each chunk.
pub fn replay_whole<R: Read + Send>(
    recording: &mut Recording<R>,
    outputs: &mut Outputs,
    mut passed: impl FnMut(u64),
) -> (Readable, Index) {
    // The initial state of a dump comes first.
    let mut carried = recording.header().dump.as_ref().map_or(0, |dump| dump.carried);
    let mut places: Vec<Place> = Vec::new();
    let mut accounted = None;
    let readable = replay_by(
        recording,
        outputs,
        |_| Ok(()),
        |begin, end, tables, entries| {
            let mut place = Place::of(begin, end, tables, entries);
            place.needed |= carried > 0;
            carried = carried.saturating_sub(entries.len() as u64);
            if entries.iter().any(|entry| matches!(entry, Recorded::Account(_))) {
                accounted = Some(places.len());
            }
            places.push(place);
            passed(end);
        },
    );
    // The last account is the one that counts, and the last time is the end of a recording that was cut off.
    for at in [accounted, places.len().checked_sub(1)].into_iter().flatten() {
        places[at].needed = true;
    }
    (readable, Index(places))
}

/// Replays to outputs what a part needs of a recording that was read once: a [`Windowed`] with the same part among the
/// outputs passes on the same as from the whole recording.
///
/// [`Windowed`]: crate::export::window::Windowed
pub fn replay_part<R: Read + Seek + Send>(
    recording: &mut Recording<R>,
    outputs: &mut Outputs,
    index: &Index,
    window: &Window,
) -> Readable {
    let skip = |recording: &mut Recording<R>| {
        while let Some(bytes) = index.skips(recording.offset(), window) {
            recording.skip(bytes)?;
        }
        Ok(())
    };
    replay_by(recording, outputs, skip, |_, _, _, _| {})
}
