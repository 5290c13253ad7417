//! Where the chunks of a recording are, and of what time: a part of the time is read without the rest.

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
    /// Where it begins and ends in the file.
    begin: u64,
    end: u64,
    /// The earliest and the latest time of what belongs to a time; none: `MAX` and 0.
    first_ns: u64,
    last_ns: u64,
    /// Bits of the processes of which something was seen.
    pids: u64,
    /// Whether every part needs it: a process begins or ends in it, or something of the whole run.
    needed: bool,
}

/// The chunks of a recording that has been read once.
#[derive(Clone, Debug, Default)]
pub struct Index(Vec<Place>);

impl Index {
    /// Where the last whole chunk with entries ends.
    pub fn end(&self) -> u64 {
        self.0.last().map_or(0, |place| place.end)
    }

    /// How many chunks a part needs, of how many.
    pub fn needed(&self, window: &Window) -> (usize, usize) {
        (self.0.iter().filter(|place| place.is_needed(window)).count(), self.0.len())
    }

    /// Bytes of the chunk that begins there, if it is one of these and a part does not need it.
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
                | Recorded::GvlGap(_)
                | Recorded::Finished(_)
                | Recorded::Settled(_) => place.needed = true,
                Recorded::Seen(_, owned) => {
                    // What is of whole lives is in no part of the time.
                    let Some(ts_ns) = owned.seen().begin_ns() else { continue };
                    place.first_ns = place.first_ns.min(ts_ns);
                    place.last_ns = place.last_ns.max(ts_ns);
                    // The time that pauses, and times off the CPU, take of a part counts also where they begin before it.
                    let end_ns = match owned.seen() {
                        Seen::Cycle(cycle) => {
                            cycle.pauses.iter().map(|pause| pause.begin_ns.saturating_add(pause.ns)).max()
                        }
                        Seen::Work(work) => Some(work.begin_ns.saturating_add(work.ns)),
                        Seen::Stack(sample) => sample.off_cpu_end_ns(),
                        _ => None,
                    };
                    place.last_ns = place.last_ns.max(end_ns.unwrap_or(0));
                    // What was sampled within a request is named after it, also where the request is not in the part.
                    if let Seen::Request(request) = owned.seen() {
                        place.last_ns = place.last_ns.max(request.end_ns.unwrap_or(0));
                    }
                }
                // Accounts replace each other, and flushes only mark that time has passed.
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

/// The bit of a process in a set. Other processes have it, too: chunks are read in vain then, and none is left out.
fn bit(pid: u32) -> u64 {
    1 << (pid % 64)
}

/// Hands a whole recording to outputs, or as much of it as can be read, and remembers where what is. `passed` is called with where each chunk
/// ends.
pub fn replay_whole<R: Read + Send>(
    recording: &mut Recording<R>,
    outputs: &mut Outputs,
    mut passed: impl FnMut(u64),
) -> (Readable, Index) {
    // What a dump says of the time before it comes first.
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
    // The last account counts, and the last time is the end of what was cut off.
    for at in [accounted, places.len().checked_sub(1)].into_iter().flatten() {
        places[at].needed = true;
    }
    (readable, Index(places))
}

/// Hands to outputs what they need of a recording that has been read once for a part of it: a [`Windowed`] of the same part among them
/// hands on the same as from the whole.
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
