//! `--leaks TIME`: what grows from one major collection to the next, what holds it, and where it was allocated.
//!
//! Only old objects are counted, after a major collection and before garbage can accumulate again: what survives major
//! collections is held by something.

mod shown;
mod unwatched;
mod words;

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufWriter},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use super::{
    count,
    failure::HeapFailure,
    holders::{self, Path},
    origins::{Following, Origins},
    report::{Report, class_label, class_name},
    target::{Target, key},
    trend::Growth,
};
use crate::{
    cli::{By, Format, HeapSettings},
    console::say,
    host::{mem::ProcessMemory, proc::MemoryReader},
    ruby::{
        heap::{ClassNames, ObjectType, Slot, Tally},
        live_check,
        stat::Mode,
    },
    signals::Signals,
    words::plural,
};

/// Interval at which the number of major collections is read.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum number of censuses, from which the minimum time between two of them follows.
const CENSUSES: u32 = 40;
/// Maximum number of classes whose holders are searched.
const PATHS: usize = 5;

/// Old objects by class, after a major collection.
struct Survivors {
    major: u64,
    at: Instant,
    old: BTreeMap<String, u64>,
    /// Objects without a write barrier, which are never old.
    unprotected: BTreeMap<String, u64>,
    /// Bytes that strings and arrays own outside their slots.
    owned: BTreeMap<String, u64>,
    heap: Heap,
    /// Resident memory of the process, bytes; `None`: it could not be read.
    rss: Option<u64>,
}

/// The pages of the heap.
#[derive(Clone, Copy)]
struct Heap {
    pages: u64,
    /// Number of these with at most a quarter of their slots in use.
    nearly_empty: u64,
    /// Total size of the pages, bytes.
    bytes: u64,
}

/// The result of a watch.
#[derive(Default)]
struct Watched {
    censuses: Vec<Survivors>,
    /// Number of discarded censuses: a GC ran meanwhile, a sweep was not finished, or the heap could not be read.
    discarded: u64,
    majors: u64,
    lasted: Duration,
    ended_by: Ended,
}

/// What ended the watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Ended {
    /// The requested time has passed.
    #[default]
    Time,
    /// A signal to gctrace.
    Signal,
    /// The process has ended.
    Process,
    /// The process has replaced its program: the watched program has ended.
    Program,
}

impl Ended {
    fn words(self) -> Option<&'static str> {
        match self {
            Self::Time => None,
            Self::Signal => Some("ended by a signal"),
            Self::Process => Some("the process has ended"),
            Self::Program => Some("the process has replaced its program"),
        }
    }

    /// Why nothing more can be read, if that is so.
    fn gone(self) -> Option<&'static str> {
        self.words().filter(|_| matches!(self, Self::Process | Self::Program))
    }
}

struct Suspect {
    name: String,
    growth: Growth,
    per_minute: f64,
    path: Option<Path>,
}

/// What is reported.
struct Found<'a> {
    target: &'a Target,
    watched: Watched,
    suspects: Vec<Suspect>,
    origins: Origins,
}

/// Watches for that time, then reports.
pub(super) fn watch(target: &Target, time: Duration, settings: &HeapSettings) -> Result<(), HeapFailure> {
    target.needs_names()?;
    let layout = target.layout().map_err(|source| target.failure(source))?;
    if !layout.knows_bits() {
        let why = format!("--leaks: it is not known where Ruby {} stores the age of objects", target.ruby());
        return Err(HeapFailure::Usage(why));
    }
    let signals = Signals::install()
        .map_err(|source| HeapFailure::System { what: "installing signal handlers", source })?;
    signals.can_shorten();
    signals.tracing();
    say(&format!("pid {}: watching the objects that survive major collections, for {time:?}", target.pid));
    let mut following = if settings.sites { Following::start(target) } else { Err("--no-sites".to_owned()) };
    let watched = watched(target, time, &mut following, &signals)?;
    let mut suspects = suspects(&watched.censuses);
    let origins = match following {
        Err(why) => Origins::missing(why),
        Ok(following) => match watched.ended_by.gone() {
            Some(end) => Origins::missing(end.to_owned()),
            None => {
                origins(target, following, &suspects).unwrap_or_else(|why| Origins::missing(why.to_string()))
            }
        },
    };
    if watched.ended_by.gone().is_none() {
        find_holders(target, &mut suspects, &signals);
    }
    let found = Found { target, watched, suspects, origins };
    let mut out = BufWriter::new(io::stdout());
    let written = match settings.format {
        Format::Jsonl => found.jsonl(&mut out),
        Format::Text => found.text(&mut out, settings.top),
    };
    super::flushed(written, &mut out)
}

fn watched(
    target: &Target,
    time: Duration,
    following: &mut Result<Following, String>,
    signals: &Signals,
) -> Result<Watched, HeapFailure> {
    let begun = Instant::now();
    let mut watched = Watched::default();
    let mut known: Option<u64> = None;
    let mut pace = Pace::of(time);
    let mut first = None;
    let mut failed = None;
    while begun.elapsed() < time && watched.ended_by == Ended::Time {
        let from = begun.elapsed();
        match look(target, known, pace.is_due(from)) {
            Ok(look) => {
                if let Ok(objects) = following
                    && let Err(error) = objects.take(look.before)
                {
                    *following = Err(error.to_string());
                }
                first.get_or_insert(look.major);
                known.get_or_insert(look.major);
                watched.majors = look.major.saturating_sub(first.unwrap_or_default());
                watched.discarded += u64::from(look.discarded);
                if let Some(survivors) = look.survivors {
                    known = Some(survivors.major);
                    pace.taken(begun.elapsed());
                    watched.censuses.push(survivors);
                } else if look.discarded {
                    pace.discarded(from, begun.elapsed());
                }
            }
            Err(HeapFailure::NotRuby { denied: false, .. }) if first.is_some() => {
                watched.ended_by = Ended::Process;
            }
            // The opened memory is that of a program that is gone.
            Err(HeapFailure::Heap { .. }) if target.is_replaced() => watched.ended_by = Ended::Program,
            // Pages come and go while they are read. It is an error only if no census succeeds.
            Err(failure @ HeapFailure::Heap { .. }) => {
                watched.discarded += 1;
                pace.discarded(from, begun.elapsed());
                failed = Some(failure);
            }
            Err(failure) => return Err(failure),
        }
        wait(signals, LOOK.min(time.saturating_sub(begun.elapsed())))?;
        if watched.ended_by == Ended::Time && signals.take_end() {
            watched.ended_by = Ended::Signal;
        }
    }
    watched.lasted = begun.elapsed();
    match failed {
        Some(failure) if watched.censuses.is_empty() => Err(failure),
        _ => Ok(watched),
    }
}

/// When the next census may begin; times are since the beginning of the watch.
struct Pace {
    interval: Duration,
    next: Duration,
}

impl Pace {
    fn of(time: Duration) -> Self {
        Self { interval: time / CENSUSES, next: Duration::ZERO }
    }

    fn is_due(&self, now: Duration) -> bool {
        now >= self.next
    }

    /// A census was taken.
    fn taken(&mut self, to: Duration) {
        self.next = to + self.interval;
    }

    /// A census was discarded. A program that collects more often than its heap can be read is not read all the time: at most half of
    /// it, and no more than four times in an interval.
    fn discarded(&mut self, from: Duration, to: Duration) {
        self.next = to + to.saturating_sub(from).max(self.interval / 4);
    }
}

/// Waits for a signal, at most for this time.
fn wait(signals: &Signals, time: Duration) -> Result<(), HeapFailure> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
    let end = signals.end_fd();
    match poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(HeapFailure::System { what: "waiting", source: error.into() }),
    }
}

struct Look {
    /// Number of major collections that had begun before this look; `major` is that after it.
    before: u64,
    major: u64,
    discarded: bool,
    survivors: Option<Survivors>,
}

/// Number of major collections that have begun, and the state of the collector.
fn majors(target: &Target) -> Result<(u64, Mode), HeapFailure> {
    let (_, data) = target.state().map_err(|source| target.failure(source))?;
    let layout = &target.plan.layout;
    let flags = layout.flags.read(&data).unwrap_or_default() as u32;
    let major = key(&target.plan, "major_gc_count", &data).ok_or_else(|| {
        HeapFailure::Usage("--leaks: it is not known where this Ruby counts major collections".to_owned())
    })?;
    Ok((major, live_check::mode(layout, flags)))
}

/// The number of major collections that have decided what stays, of those that have begun. One that is marking has not: Ruby counts it when it begins.
fn completed(count: u64, mode: Mode) -> u64 {
    count.saturating_sub(u64::from(mode == Mode::Marking))
}

/// Takes a census if it is `due`, no GC is in progress, and a major collection has ended since the `known` one.
fn look(target: &Target, known: Option<u64>, due: bool) -> Result<Look, HeapFailure> {
    let (before, mode) = majors(target)?;
    let mut look = Look { before, major: before, discarded: false, survivors: None };
    if !due || mode != Mode::None || known.is_none_or(|known| known == before) {
        return Ok(look);
    }
    let counted = count::once(target).map_err(|source| target.failure(source))?;
    let report = Report::brief(target, By::Class, &counted).map_err(|source| target.failure(source))?;
    look.major = majors(target)?.0;
    if look.major != before
        || counted.moment.sweeping
        || counted.moment.gc_count[0] != counted.moment.gc_count[1]
    {
        look.discarded = true;
        return Ok(look);
    }
    let heap = Heap {
        pages: report.pages,
        nearly_empty: report.nearly_empty,
        bytes: report.live.bytes + report.free.bytes,
    };
    let rss = MemoryReader::open(target.pid).ok().and_then(|reader| reader.read()).map(|memory| memory.rss);
    let by_class = |of: fn(&Tally) -> u64| {
        let rows = report.rows.iter();
        let counts = rows.map(|row| (row.name.clone(), row.objects.as_ref().map_or(0, of)));
        counts.filter(|(_, count)| *count > 0).collect()
    };
    look.survivors = Some(Survivors {
        major: before,
        at: Instant::now(),
        old: by_class(Tally::old),
        unprotected: by_class(|tally| tally.unprotected),
        owned: by_class(|tally| tally.owned),
        heap,
        rss,
    });
    Ok(look)
}

/// Growth in objects per minute.
fn per_minute(censuses: &[Survivors], growth: Growth) -> Option<f64> {
    let (from, to) = (censuses.get(growth.at.0)?, censuses.get(growth.at.1)?);
    let minutes = (to.at - from.at).as_secs_f64() / 60.0;
    Some(growth.more() as f64 / minutes)
}

/// Classes that grow, largest growth first.
fn suspects(censuses: &[Survivors]) -> Vec<Suspect> {
    let Some(last) = censuses.last() else { return Vec::new() };
    let mut suspects: Vec<Suspect> = last
        .old
        .keys()
        .filter_map(|name| {
            let counts: Vec<u64> =
                censuses.iter().map(|census| census.old.get(name).copied().unwrap_or(0)).collect();
            let growth = Growth::of(&counts)?;
            let per_minute = per_minute(censuses, growth)?;
            Some(Suspect { name: name.clone(), growth, per_minute, path: None })
        })
        .collect();
    let internal = |suspect: &Suspect| suspect.name.starts_with("(internal ");
    suspects.sort_by_key(|suspect| (internal(suspect), std::cmp::Reverse(suspect.growth.more())));
    suspects
}

/// Maps objects to suspects. Each class is named once.
struct Classes<'t> {
    memory: &'t ProcessMemory,
    names: Option<ClassNames<&'t ProcessMemory>>,
    suspects: Vec<String>,
    known: HashMap<(ObjectType, u64), Option<usize>>,
}

impl<'t> Classes<'t> {
    fn of(target: &'t Target, suspects: &[Suspect]) -> Self {
        let suspects = suspects.iter().map(|suspect| suspect.name.clone()).collect();
        Self { memory: &target.memory, names: target.names(), suspects, known: HashMap::new() }
    }

    fn class_of(&mut self, slot: &Slot<'_>) -> Option<usize> {
        let Self { memory, names, suspects, known } = self;
        let kind = slot.kind();
        // Internal objects have something else in place of the class.
        let class = if kind.is_internal() { 0 } else { slot.class() };
        *known.entry((kind, class)).or_insert_with(|| {
            let name = |class| class_name(names.as_mut()?, *memory, class);
            let label = class_label(kind, class, name);
            suspects.iter().position(|name| *name == label)
        })
    }
}

/// Allocation sites of the remaining objects of the suspects.
fn origins(target: &Target, following: Following, suspects: &[Suspect]) -> Result<Origins, HeapFailure> {
    let (count, mode) = majors(target)?;
    let major = completed(count, mode);
    let mut classes = Classes::of(target, suspects);
    Ok(following.finish(target, major, |slot| Some(suspects.get(classes.class_of(slot)?)?.name.clone())))
}

/// Searches holders of old objects of the first suspects.
fn find_holders(target: &Target, suspects: &mut [Suspect], signals: &Signals) {
    let looked = suspects.len().min(PATHS);
    let suspects = &mut suspects[..looked];
    if suspects.is_empty() {
        return;
    }
    let objects = plural(suspects.len() as u64, "class");
    say(&format!("pid {}: looking for what holds the objects of {objects}", target.pid));
    let mut classes = Classes::of(target, suspects);
    let paths = holders::paths(target, suspects.len(), |slot| classes.class_of(slot), || signals.take_end());
    for (suspect, path) in suspects.iter_mut().zip(paths) {
        suspect.path = Some(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Censuses that are all discarded take at most half of the time, and are at most four in each interval.
    #[test]
    fn discarded_censuses() {
        let time = Duration::from_mins(1);
        let attempts = |took: Duration, discarded: bool| {
            let (mut pace, mut now, mut attempts) = (Pace::of(time), Duration::ZERO, 0_u32);
            while now < time {
                if pace.is_due(now) {
                    let from = now;
                    now += took;
                    attempts += 1;
                    if discarded { pace.discarded(from, now) } else { pace.taken(now) }
                }
                now += LOOK;
            }
            attempts
        };
        for took in [1, 100, 374, 376, 3_000, 9_000].map(Duration::from_millis) {
            let discarded = attempts(took, true);
            assert!(
                discarded <= 4 * CENSUSES && took * discarded <= time / 2 + took,
                "{took:?}: {discarded}"
            );
            assert!(discarded >= 3, "{took:?}: {discarded}");
            assert!(attempts(took, false) <= CENSUSES, "{took:?}");
        }
        assert!(attempts(Duration::from_millis(1), true) > 3 * CENSUSES);
    }

    /// A collection that is still marking has been survived by no object; one that sweeps or has ended has.
    #[test]
    fn marking_is_not_survived() {
        let of = |count| [Mode::None, Mode::Marking, Mode::Sweeping].map(|mode| completed(count, mode));
        assert_eq!(of(5), [5, 4, 5]);
        assert_eq!(of(0), [0, 0, 0]);
    }
}
