//! Merges several recordings into one: dumps of one flight recorder, or recordings of several runs of gctrace.

mod pieces;
mod source;
mod survey;

use std::{
    collections::{BTreeSet, VecDeque},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use prost::Message as _;

use super::{
    Header, Host, ReadError, Subjects,
    chunk::{self, Kind},
    kinds::{
        Owned,
        encode::{self, Filling},
        visit,
        wire::{self, What},
    },
    visit::Visit,
};
use crate::{
    clock::WallClock,
    export::{ExportError, VERSION, check_path, write_private},
    ledger::Ledger,
    model::{Image, Process, gvl::GvlGap},
};
use pieces::Whole;
use source::{Batch, Event, Source};
use survey::Survey;

/// Upper bound (exclusive) of pids on Linux.
const PIDS: u32 = 1 << 22;
/// Maximum number of recordings merged: each may need pids of its own.
const MOST: usize = 1000;
/// Maximum apparent shift of the start of one boot when clocks are set, nanoseconds.
const SAME_BOOT_NS: u64 = 1_000_000_000;

/// The result of a merge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// What the reader must know about each recording, as text.
    pub notes: Vec<String>,
    /// Number of processes.
    pub processes: u64,
}

/// Why nothing was merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// A recording cannot be read.
    #[error("{0}; nothing was written")]
    Read(#[from] ReadError),
    /// The result cannot be created at its path.
    #[error("{0}")]
    Output(#[from] ExportError),
    /// The result would not be exact.
    #[error("{0}; nothing was written")]
    Refused(String),
    /// The result cannot be written.
    #[error("writing {path}: {source}; nothing was written")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// How the entries of a recording are changed.
struct Renumbering {
    path: PathBuf,
    pieces: Vec<pieces::Piece>,
    /// Where off-CPU times are clipped: the start of a dump, which has them since they began. Another dump may have the part before.
    clip_ns: u64,
    /// Added to times.
    later_ns: u64,
    /// Added to pids and thread ids.
    pids: u32,
    /// Added to request ids.
    requests: u64,
}

/// Merges these recordings into one. The result appears completely or not at all, and only its owner can read it.
///
/// # Errors
///
/// A recording cannot be read or is damaged, the result would not be exact, or it cannot be written.
pub fn merge(from: &[PathBuf], to: &Path) -> Result<Merged, MergeError> {
    let mut wholes = Vec::new();
    for (at, path) in from.iter().enumerate() {
        if super::is_same_file(path, to) {
            return Err(MergeError::Refused(format!(
                "{} is one of the recordings; name another file",
                to.display()
            )));
        }
        if from[..at].iter().any(|before| super::is_same_file(before, path)) {
            return Err(MergeError::Refused(format!("{} is named twice", path.display())));
        }
        wholes.push(Whole::read(path)?);
    }
    if wholes.len() > MOST {
        return Err(MergeError::Refused(format!("at most {MOST} recordings can be merged")));
    }
    check_path(to)?;
    let mut merged = Merged::default();
    let wholes = joined(wholes, &mut merged)?;
    let (places, header) = placed(&wholes, &mut merged)?;
    let mut failed = None;
    let written = write_private(to, |out| match write(&places, &header, out) {
        Ok(processes) => {
            merged.processes = processes;
            Ok(())
        }
        Err(WriteError::Write(error)) => Err(error),
        Err(WriteError::Read(error)) => {
            failed = Some(error);
            Err(io::Error::other("a recording cannot be read"))
        }
    });
    if let Some(error) = failed {
        return Err(error.into());
    }
    written.map_err(|source| MergeError::Write { path: to.to_owned(), source })?;
    Ok(merged)
}

/// Joins dumps of one run that overlap into one recording.
fn joined(mut wholes: Vec<Whole>, merged: &mut Merged) -> Result<Vec<Whole>, MergeError> {
    wholes.sort_by_key(|whole| (whole.header.clock.epoch_nanos(whole.from_ns), whole.to_ns));
    let mut found: Vec<Whole> = Vec::new();
    for whole in wholes {
        let same = found.iter_mut().find(|before| before.is_same_run(&whole) && before.overlaps(&whole));
        let Some(before) = same else {
            found.push(whole);
            continue;
        };
        let (one, other) = (before.path.display().to_string(), whole.path.display());
        if !before.join(&whole) {
            return Err(MergeError::Refused(format!(
                "{one} and {other} are of one run and overlap in time, but differ in the common part"
            )));
        }
        merged.notes.push(format!("{one} and {other} are of one run; their common part is included once"));
    }
    Ok(found)
}

/// Whether both were recorded during the same boot of the same host.
fn is_same_boot(one: &Header, other: &Header) -> bool {
    if let (Some(one), Some(other)) = (&one.host.boot, &other.host.boot) {
        return one == other;
    }
    let booted = |header: &Header| {
        let (realtime_ns, boottime_ns) = header.clock.offsets();
        realtime_ns.saturating_sub(boottime_ns)
    };
    if one.clock == other.clock {
        return true;
    }
    one.host.name.is_some()
        && one.host.name == other.host.name
        && booted(one).abs_diff(booted(other)) <= SAME_BOOT_NS
}

/// How each recording is changed, and the header of the result.
fn placed(wholes: &[Whole], merged: &mut Merged) -> Result<(Vec<Renumbering>, Header), MergeError> {
    let mut surveys: Vec<Survey> = Vec::new();
    for whole in wholes {
        let survey = Survey::of(&mut Source::open(&whole.path, &whole.pieces)?)?;
        // Dumps of one run have the gaps of the same processes.
        if survey.has_gap && wholes.iter().any(|other| !other.is_same_run(whole)) {
            return Err(MergeError::Refused(format!(
                "{} has times without individual waits for the GVL (--gvl-budget); a merged recording cannot attribute these times to a process",
                whole.path.display()
            )));
        }
        surveys.push(survey);
    }
    let Some(base) = wholes.iter().min_by_key(|whole| whole.header.clock.offsets().0) else {
        return Err(MergeError::Refused("there is no recording".to_owned()));
    };
    let numbers = numbered(wholes, &surveys)?;
    let mut places: Vec<Renumbering> = Vec::new();
    let mut requests = 0_u64;
    for (at, (whole, survey)) in wholes.iter().zip(&surveys).enumerate() {
        let name = whole.path.display();
        same_subjects(base, whole)?;
        let is_same = is_same_boot(&base.header, &whole.header);
        // All recordings of one boot have one `CLOCK_MONOTONIC`, whatever their clocks of the day were set to in between.
        let first = &wholes[first_of_boot(wholes, at)];
        let (base_ns, own_ns) = (base.header.clock.offsets().0, first.header.clock.offsets().0);
        let later_ns = if is_same { 0 } else { own_ns.saturating_sub(base_ns).unsigned_abs() };
        for (before, other) in wholes[..at].iter().zip(&surveys) {
            if (is_same_boot(&before.header, &whole.header) || before.header.clock == whole.header.clock)
                && let Some(pid) = survey.shared(other)
            {
                return Err(MergeError::Refused(format!(
                    "{} and {name} both have process {pid} at the same time: it would count twice",
                    before.path.display()
                )));
            }
        }
        if !is_same {
            merged.notes.push(format!(
                "{name} is not known to be of the same boot of the same host as {}: aligned by the time of day, as exact as the hosts' clocks",
                base.path.display()
            ));
        }
        let pids = numbers[at];
        if pids > 0 {
            merged
                .notes
                .push(format!("{name}: pids and thread ids are {pids} higher, because others have the same"));
        }
        let (path, pieces) = (whole.path.clone(), whole.pieces.clone());
        let clip_ns = if whole.header.dump.is_some() { whole.from_ns } else { 0 };
        places.push(Renumbering { path, pieces, clip_ns, later_ns, pids, requests });
        requests = requests.saturating_add(survey.last_request);
    }
    let begun = wholes.iter().zip(&places).map(|(whole, place)| whole.from_ns.saturating_add(place.later_ns));
    let begun_ns = begun.min().unwrap_or(base.from_ns);
    let (realtime_ns, boottime_ns) = base.header.clock.offsets();
    let header = Header {
        gctrace: VERSION.to_owned(),
        clock: WallClock::with_offsets(realtime_ns, boottime_ns),
        begun_ns,
        subjects: base.header.subjects,
        host: host(wholes),
        dump: None,
    };
    Ok((places, header))
}

/// Index of the first recording of the boot of this one.
fn first_of_boot(wholes: &[Whole], at: usize) -> usize {
    (0..at).find(|before| is_same_boot(&wholes[*before].header, &wholes[at].header)).unwrap_or(at)
}

/// The offset added to the pids and thread ids of each recording, so that those of several boots are distinct. All
/// recordings of one boot have the same offset. A recording that was merged before may already have ids with an offset.
fn numbered(wholes: &[Whole], surveys: &[Survey]) -> Result<Vec<u32>, MergeError> {
    let boots: Vec<usize> = (0..wholes.len()).map(|at| first_of_boot(wholes, at)).collect();
    let mut taken: BTreeSet<u32> = BTreeSet::new();
    let mut numbers = vec![0; wholes.len()];
    for at in (0..wholes.len()).filter(|at| boots[*at] == *at) {
        let of_boot = |other: &usize| boots[*other] == at;
        let members: Vec<usize> = (at..wholes.len()).filter(of_boot).collect();
        let own: BTreeSet<u32> = members
            .iter()
            .flat_map(|member| &surveys[*member].tids)
            .copied()
            .filter(|tid| *tid != 0)
            .collect();
        let highest = |of: &BTreeSet<u32>| of.last().copied().unwrap_or_default();
        let mut higher = 0;
        if !own.is_disjoint(&taken) {
            let next = (highest(&taken) / PIDS + 1).checked_mul(PIDS);
            higher = next.filter(|next| next.checked_add(highest(&own)).is_some()).ok_or_else(|| {
                MergeError::Refused(format!(
                    "there are no pids left for those of {}: too many recordings of other boots have the same",
                    wholes[at].path.display()
                ))
            })?;
        }
        taken.extend(own.iter().map(|tid| tid + higher));
        for member in members {
            numbers[member] = higher;
        }
    }
    Ok(numbers)
}

/// All recordings must have recorded the same sources: otherwise data that is missing from one would look as if nothing had happened.
fn same_subjects(one: &Whole, other: &Whole) -> Result<(), MergeError> {
    let flags = |Subjects { samples, wall, gvl, requests, alloc }: Subjects| {
        [("stacks", samples), ("--wall", wall), ("--gvl", gvl), ("--requests", requests), ("--alloc", alloc)]
    };
    for ((flag, one_has), (_, other_has)) in
        flags(one.header.subjects).into_iter().zip(flags(other.header.subjects))
    {
        if one_has != other_has {
            let (with, without) = if one_has { (one, other) } else { (other, one) };
            return Err(MergeError::Refused(format!(
                "{} was recorded with {flag}, {} without it: in one recording, what is not known would look like none",
                with.path.display(),
                without.path.display()
            )));
        }
    }
    Ok(())
}

/// What all hosts have in common, and their names.
fn host(wholes: &[Whole]) -> Host {
    let mut names: Vec<String> = wholes.iter().filter_map(|whole| whole.header.host.name.clone()).collect();
    names.sort();
    names.dedup();
    let Some(first) = wholes.first().map(|whole| &whole.header.host) else { return Host::default() };
    let all = |same: &dyn Fn(&Host) -> bool| wholes.iter().all(|whole| same(&whole.header.host));
    Host {
        name: (!names.is_empty()).then(|| names.join(", ")),
        kernel: first.kernel.clone().filter(|_| all(&|host| host.kernel == first.kernel)),
        machine: first.machine.clone().filter(|_| all(&|host| host.machine == first.machine)),
        cpus: first.cpus.filter(|_| all(&|host| host.boot == first.boot && host.cpus == first.cpus)),
        boot: first.boot.clone().filter(|_| all(&|host| host.boot == first.boot)),
    }
}

enum WriteError {
    Read(ReadError),
    Write(io::Error),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<ReadError> for WriteError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

/// A recording that is being merged.
struct Input<'a> {
    place: &'a Renumbering,
    source: Source,
    next: Option<Batch>,
    ledger: Option<Ledger>,
}

/// Writes everything in chronological order. Returns the number of processes.
fn write(places: &[Renumbering], header: &Header, out: &mut dyn Write) -> Result<u64, WriteError> {
    out.write_all(&chunk::beginning())?;
    out.write_all(&chunk::stored(Kind::Header, &wire::Header::of(header).encode_to_vec())?)?;
    let mut inputs = Vec::new();
    for place in places {
        let mut source = Source::open(&place.path, &place.pieces)?;
        let next = source.next()?;
        inputs.push(Input { place, source, next, ledger: None });
    }
    let mut writing =
        Writing { images: Vec::new(), began: false, closed_ns: 0, processes: 0, filling: Filling::default() };
    let at = |input: &Input<'_>| Some(input.next.as_ref()?.at_ns.saturating_add(input.place.later_ns));
    while let Some(which) = (0..inputs.len())
        .filter(|which| at(&inputs[*which]).is_some())
        .min_by_key(|which| at(&inputs[*which]))
    {
        let Some(batch) = inputs[which].next.take() else { continue };
        let place = inputs[which].place;
        for event in VecDeque::from(batch.events) {
            if let Event::Account(ledger) = event {
                inputs[which].ledger = Some(*ledger);
                writing.account(&sum(&inputs), What::Account);
            } else {
                writing.event(event, place);
            }
            writing.close_if(out, Filling::is_full)?;
        }
        inputs[which].next = inputs[which].source.next()?;
    }
    writing.filling.push(None, What::Closed(writing.closed_ns));
    let ledger = sum(&inputs);
    writing.account(&ledger, What::Finished);
    writing.account(&ledger, What::Settled);
    writing.close_if(out, |filling| !filling.is_empty())?;
    out.write_all(&chunk::stored(Kind::End, &[])?)?;
    Ok(writing.processes)
}

/// The sum of the latest accounts of all recordings.
fn sum(inputs: &[Input<'_>]) -> Ledger {
    let known = inputs.iter().filter_map(|input| input.ledger.as_ref());
    known.cloned().reduce(|one, other| one.with(&other)).unwrap_or_default()
}

/// The state of the result being written.
struct Writing {
    /// Images of all hosts; the index of each is its position here.
    images: Vec<Arc<Image>>,
    began: bool,
    closed_ns: u64,
    processes: u64,
    filling: Filling,
}

impl Writing {
    fn close_if(&mut self, out: &mut dyn Write, due: fn(&Filling) -> bool) -> io::Result<()> {
        if due(&self.filling) {
            out.write_all(&chunk::stored(Kind::Entries, &self.filling.take())?)?;
        }
        Ok(())
    }

    fn account(&mut self, ledger: &Ledger, what: fn(Box<wire::Account>) -> What) {
        let account = self.filling.account(ledger);
        self.filling.push(None, what(Box::new(account)));
    }

    fn event(&mut self, event: Event, place: &Renumbering) {
        let later = |ns: u64| ns.saturating_add(place.later_ns);
        match event {
            Event::Seen(mut process, mut owned) => {
                if let Owned::Stack(sample) = &mut owned {
                    let Some((ts_ns, wall_ns)) = sample.since(place.clip_ns) else { return };
                    (sample.ts_ns, sample.wall_ns) = (ts_ns, wall_ns);
                }
                visit(&mut owned, &mut Moved(place));
                self.process(&mut process, place);
                if let Owned::Process { .. } = owned {
                    self.processes += 1;
                }
                self.filling.see(&process, owned.seen());
            }
            Event::Refused(pid, path, reason) => {
                self.filling.refused(pid.map(|pid| pid.saturating_add(place.pids)), &path, &reason);
            }
            Event::Began(ts_ns) => {
                if !std::mem::replace(&mut self.began, true) {
                    self.filling.push(None, What::Began(later(ts_ns)));
                }
            }
            Event::Closed(ts_ns) => self.closed_ns = self.closed_ns.max(later(ts_ns)),
            Event::Flushed(now_ns) => self.filling.push(None, What::Flushed(later(now_ns))),
            // Only if there is a single recording: several recordings with gaps were refused.
            Event::GvlGap(gap) => {
                let (from_ns, to_ns) = (later(gap.from_ns), later(gap.to_ns));
                let gap = GvlGap { from_ns, to_ns, ..gap };
                self.filling.push(None, What::GvlGap(Box::new(encode::gap(gap))));
            }
            // Added up by the caller.
            Event::Account(_) => {}
        }
    }

    fn process(&mut self, process: &mut Process, place: &Renumbering) {
        process.pid = process.pid.saturating_add(place.pids);
        if let Some(ppid) = process.ppid.as_mut().filter(|ppid| **ppid > 1) {
            *ppid = ppid.saturating_add(place.pids);
        }
        let image = &process.image;
        let known =
            self.images.iter().position(|known| Image { index: image.index, ..(**known).clone() } == **image);
        let at = known.unwrap_or_else(|| {
            let index = self.images.len() as u32;
            self.images.push(Arc::new(Image { index, ..(**image).clone() }));
            self.images.len() - 1
        });
        process.image = Arc::clone(&self.images[at]);
    }
}

/// Changes times and numbers.
struct Moved<'a>(&'a Renumbering);

impl Visit for Moved<'_> {
    fn time(&mut self, ns: &mut u64) {
        *ns = ns.saturating_add(self.0.later_ns);
    }

    fn tid(&mut self, tid: &mut u32) {
        // 0 if the thread is unknown.
        if *tid != 0 {
            *tid = tid.saturating_add(self.0.pids);
        }
    }

    fn request(&mut self, id: &mut u64) {
        *id = id.saturating_add(self.0.requests);
    }
}
