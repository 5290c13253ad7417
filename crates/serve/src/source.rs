//! The recording: read once as a whole, and again for each requested part, skipping all else. The last parts are cached.

use std::{
    cell::RefCell,
    collections::VecDeque,
    io::BufReader,
    path::{Path, PathBuf},
    rc::Rc,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gctrace_report::{
    console::say,
    export::{
        Exporter, Outputs,
        diff::Gathered,
        profile::{Keeper, Kept},
        window::{Tally, Window, Windowed},
    },
    ledger::Ledger,
    trace_file::{self, Ending, Header, Index, ReadError, Readable, Recording, Replayed, open_regular},
    words::span,
};

use crate::{
    columns::Columns,
    compare::{self, Compared, OneSide},
    figures::{Figures, Filler, OneProcess},
    graph::Graphs,
    medium::{Medium, Part, Pieces},
};

/// Maximum number of cached parts.
const PARTS: usize = 6;
/// Reasons why a part cannot be read, or not completely.
const SHORTER: &str = "the file is shorter than it was when it was read first";
const ANOTHER: &str = "another recording was written over the file; start gctrace serve again";
/// Minimum interval between copies of the figures while the recording is being read.
const SO_FAR: Duration = Duration::from_millis(500);
/// The interval between copies of the figures, as a multiple of the time that a copy takes: the figures of thousands of processes are large.
const SO_FAR_SHARE: u32 = 50;
/// The name of a recording in memory, in place of a file name.
pub const LIVE: &str = "live";
/// Size of the read buffer, bytes.
const BUFFER: usize = 256 << 10;

/// A part of the recording.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) window: Window,
    pub(crate) figures: Figures,
    pub(crate) kept: Kept,
    pub(crate) graphs: Graphs,
    /// Number of processes in it.
    pub(crate) processes: u64,
    /// An error in the file that did not exist when all of it was read; the part contains what precedes the error.
    pub(crate) damage: Option<String>,
}

/// The result of reading the whole recording.
#[derive(Debug)]
pub(crate) struct Whole {
    index: Index,
    pub(crate) view: Arc<View>,
    pub(crate) ledger: Ledger,
    pub(crate) ending: Ending,
    /// Why it was not read to the end.
    pub(crate) damage: Option<String>,
    pub(crate) last_ns: u64,
    /// Number of bytes of the file that can be read.
    readable: u64,
}

impl Whole {
    /// Number of chunks that a part needs, and number of all chunks.
    pub(crate) fn needed(&self, window: &Window) -> (usize, usize) {
        self.index.needed(window)
    }

    /// Whether a part contains all processes and all of the time.
    fn is_all_processes(&self, window: &Window) -> bool {
        let figures = &self.view.figures;
        let has = |process: &OneProcess| window.pids.contains(&process.pid);
        !window.cuts_time() && figures.more_processes == 0 && figures.processes.iter().all(has)
    }
}

#[derive(Debug)]
enum State {
    Reading,
    Read(Arc<Whole>),
    /// Nothing of it can be shown, for this reason.
    Failed(String),
}

/// A recording.
#[derive(Debug)]
pub(crate) struct Source {
    medium: Medium,
    /// Its path in errors.
    path: PathBuf,
    pub(crate) header: Header,
    /// Size of the file when it was opened, bytes. Later additions are not read.
    length: u64,
    passed: AtomicU64,
    /// The figures read so far, while the recording is being read.
    so_far: Mutex<Option<Arc<Figures>>>,
    state: Mutex<State>,
    changed: Condvar,
    parts: Mutex<VecDeque<Arc<View>>>,
    /// The last comparisons, each with both parts.
    compared: Mutex<VecDeque<(Window, Window, Arc<Compared>)>>,
    /// Held while a part is read: only one is read at a time, since each takes as much memory as a `gctrace report`.
    work: Mutex<()>,
}

/// The recording while it is being read.
type Reading = Recording<BufReader<Part>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Source {
    /// Opens a recording and reads its header.
    pub(crate) fn open(path: &Path) -> Result<Self, ReadError> {
        let failed = |source| ReadError::Io { path: path.to_owned(), source };
        let file = Arc::new(open_regular(path)?);
        let data = file.metadata().map_err(failed)?;
        Self::of(Medium::File(file), path, data.len())
    }

    /// The events that a run has kept in memory.
    pub(crate) fn in_memory(pieces: Vec<Arc<[u8]>>) -> Result<Self, ReadError> {
        let pieces = Arc::new(Pieces::new(pieces));
        let length = pieces.length();
        Self::of(Medium::Memory(pieces), Path::new(LIVE), length)
    }

    fn of(medium: Medium, path: &Path, length: u64) -> Result<Self, ReadError> {
        let header = recording(&medium, path, length)?.header().clone();
        Ok(Self {
            medium,
            path: path.to_owned(),
            header,
            length,
            passed: AtomicU64::new(0),
            so_far: Mutex::default(),
            state: Mutex::new(State::Reading),
            changed: Condvar::new(),
            parts: Mutex::default(),
            compared: Mutex::default(),
            work: Mutex::default(),
        })
    }

    /// The name of the file without its directory.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// When the recording begins, `CLOCK_MONOTONIC` nanoseconds.
    pub(crate) fn begins_ns(&self) -> u64 {
        self.header.dump.as_ref().map_or(self.header.begun_ns, |dump| dump.from_ns)
    }

    /// The share of the file that has been read, 0 to 1.
    pub(crate) fn progress(&self) -> f64 {
        self.passed.load(Ordering::Relaxed) as f64 / self.length.max(1) as f64
    }

    /// The figures read so far.
    pub(crate) fn so_far(&self) -> Option<Arc<Figures>> {
        lock(&self.so_far).clone()
    }

    /// Reads all of it, or as much as can be read; a problem with the rest is reported.
    pub(crate) fn read(&self) -> Result<(), ReadError> {
        let whole = self.read_whole()?;
        self.is_now(State::Read(Arc::new(whole)));
        Ok(())
    }

    /// Records that it cannot be read, and why.
    pub(crate) fn failed(&self, why: &str) {
        self.is_now(State::Failed(why.to_owned()));
    }

    fn is_now(&self, state: State) {
        *lock(&self.state) = state;
        *lock(&self.so_far) = None;
        self.changed.notify_all();
    }

    fn read_whole(&self) -> Result<Whole, ReadError> {
        let mut index = Index::default();
        let (mut copied, mut pause) = (Instant::now(), SO_FAR);
        let by = |recording: &mut Reading, outputs: &mut Outputs, figures: &RefCell<Figures>| {
            let passed = |end| {
                self.passed.store(end, Ordering::Relaxed);
                if copied.elapsed() >= pause {
                    let began = Instant::now();
                    *lock(&self.so_far) = Some(Arc::new(figures.borrow().clone()));
                    copied = Instant::now();
                    pause = SO_FAR.max((copied - began) * SO_FAR_SHARE);
                }
            };
            let (readable, found) = trace_file::replay_whole(recording, outputs, passed);
            index = found;
            readable
        };
        let (Readable { replayed, damage }, readable, view) =
            self.replay(&Window::default(), false, self.length, by)?;
        if let Some(error) = &damage {
            say(&format!(
                "gctrace: {}: {}; the part before it is served",
                self.path.display(),
                described(error)
            ));
        }
        let Replayed { ending, last_ns, ledger, .. } = replayed;
        if let (Medium::File(_), Ending::CutOff(_), None) = (&self.medium, ending, &damage) {
            let length = span(last_ns.saturating_sub(self.begins_ns()));
            say(&format!("gctrace: {} was cut off: it ends after {length}", self.path.display()));
        }
        let damage = damage.map(|error| described(&error));
        Ok(Whole { index, view: Arc::new(view), ledger, ending, damage, last_ns, readable })
    }

    /// The whole recording; `None` if it is still being read after `patience`. An error says why it cannot be read.
    pub(crate) fn whole(&self, patience: Duration) -> Result<Option<Arc<Whole>>, String> {
        let state = lock(&self.state);
        let waited =
            self.changed.wait_timeout_while(state, patience, |state| matches!(state, State::Reading));
        match &*waited.unwrap_or_else(PoisonError::into_inner).0 {
            State::Read(whole) => Ok(Some(Arc::clone(whole))),
            State::Reading => Ok(None),
            State::Failed(why) => Err(why.clone()),
        }
    }

    /// A part of the recording.
    pub(crate) fn view(&self, whole: &Whole, window: &Window) -> Result<Arc<View>, ReadError> {
        if window.is_all() || whole.is_all_processes(window) {
            return Ok(Arc::clone(&whole.view));
        }
        if let Some(view) = self.kept(window) {
            return Ok(view);
        }
        let _one = lock(&self.work);
        // Another request may have read the same part.
        if let Some(view) = self.kept(window) {
            return Ok(view);
        }
        let view = Arc::new(self.part(whole, window, false)?);
        // The problem with the file may be gone by the next request.
        if view.damage.is_some() {
            return Ok(view);
        }
        let mut parts = lock(&self.parts);
        parts.truncate(PARTS - 1);
        parts.push_front(Arc::clone(&view));
        Ok(view)
    }

    /// A part with the times of samples; it is not cached.
    pub(crate) fn with_times(&self, whole: &Whole, window: &Window) -> Result<View, ReadError> {
        let _one = lock(&self.work);
        self.part(whole, window, true)
    }

    /// A part compared with an earlier one, of this recording or of another that is always the same.
    pub(crate) fn compared(
        &self,
        whole: &Whole,
        window: &Window,
        (other, its, before): (&Self, &Whole, &Window),
    ) -> Result<Arc<Compared>, String> {
        let _one = lock(&self.work);
        let known = |(b, a, _): &&(Window, Window, _)| b == window && a == before;
        if let Some((.., compared)) = lock(&self.compared).iter().find(known) {
            return Ok(Arc::clone(compared));
        }
        let a = other.gather("A", its, before).map_err(|error| error.to_string())?;
        let b = self.gather("B", whole, window).map_err(|error| error.to_string())?;
        let cuts_time = window.cuts_time() || before.cuts_time();
        let compared = Arc::new(Compared::of([a, b], cuts_time).map_err(|error| error.to_string())?);
        let mut all = lock(&self.compared);
        all.truncate(PARTS - 1);
        all.push_front((window.clone(), before.clone(), Arc::clone(&compared)));
        Ok(compared)
    }

    /// Gathers a side of a comparison.
    fn gather(
        &self,
        name: &'static str,
        whole: &Whole,
        window: &Window,
    ) -> Result<(Gathered, OneSide), ReadError> {
        let side = compare::gathered(name, &self.header);
        let outputs = Rc::new(RefCell::new(Outputs::new(vec![side.exporter()])));
        let part: Box<dyn Exporter> = Box::new(Windowed::new(window.clone(), outputs, Rc::default()));
        let mut outputs = Outputs::new(vec![part]);
        let mut recording = self.recording(whole.readable)?;
        let read = trace_file::replay_part(&mut recording, &mut outputs, &whole.index, window);
        if let Some(error) = read.damage {
            return Err(error);
        }
        if whole.damage.is_none() && read.replayed.ending != whole.ending {
            return Err(ReadError::Unreadable { path: self.path.clone(), why: SHORTER.to_owned() });
        }
        let cut_off = whole.ending != Ending::Complete || whole.damage.is_some();
        let about = compare::about(&side, &self.header, self.part_name(window), cut_off);
        Ok((side, about))
    }

    /// Opens the recording up to an offset, to read it from its start. It must be the one that was opened: a file can be overwritten by another one.
    fn recording(&self, end: u64) -> Result<Reading, ReadError> {
        let reading = recording(&self.medium, &self.path, end)?;
        if *reading.header() != self.header {
            return Err(ReadError::Unreadable { path: self.path.clone(), why: ANOTHER.to_owned() });
        }
        Ok(reading)
    }

    /// The name of a part.
    fn part_name(&self, window: &Window) -> String {
        let begun_ns = self.header.begun_ns;
        let at = |ns: u64| format!("{:.3} s", ns.saturating_sub(begun_ns) as f64 / 1e9);
        let from = window.from_ns.map_or_else(String::new, |ns| format!(" from {}", at(ns)));
        let to = window.to_ns.map_or_else(String::new, |ns| format!(" to {}", at(ns)));
        format!("{}{from}{to}", self.name())
    }

    fn kept(&self, window: &Window) -> Option<Arc<View>> {
        let mut parts = lock(&self.parts);
        let at = parts.iter().position(|view| view.window == *window)?;
        let view = parts.remove(at)?;
        parts.push_front(Arc::clone(&view));
        Some(view)
    }

    fn part(&self, whole: &Whole, window: &Window, timeline: bool) -> Result<View, ReadError> {
        let (needed, of) = whole.needed(window);
        log::debug!("a part needs {needed} of {of} chunks");
        let (Readable { replayed, damage }, _, mut view) =
            self.replay(window, timeline, whole.readable, |recording, outputs, _| {
                trace_file::replay_part(recording, outputs, &whole.index, window)
            })?;
        let shorter = SHORTER.to_owned();
        view.damage = match damage {
            Some(error) => Some(described(&error)),
            None => (whole.damage.is_none() && replayed.ending != whole.ending).then_some(shorter),
        };
        if let Some(why) = &view.damage {
            log::warn!("{}: {why}", self.path.display());
        }
        Ok(view)
    }

    /// A part with times, read from the whole file.
    #[cfg(test)]
    pub(crate) fn without_index(&self, window: &Window) -> Result<View, ReadError> {
        let by = |recording: &mut Reading, outputs: &mut Outputs, _: &RefCell<Figures>| {
            trace_file::replay_part(recording, outputs, &Index::default(), window)
        };
        let (_, _, view) = self.replay(window, true, self.length, by)?;
        Ok(view)
    }

    /// Replays the first `length` bytes into a view. Returns what was replayed, the number of bytes that could be read, and the view.
    fn replay(
        &self,
        window: &Window,
        timeline: bool,
        length: u64,
        by: impl FnOnce(&mut Reading, &mut Outputs, &RefCell<Figures>) -> Readable,
    ) -> Result<(Readable, u64, View), ReadError> {
        let subjects = self.header.subjects;
        let keeper = Keeper::new(timeline, (subjects.gvl, subjects.wall), self.header.clock);
        let from_ns = window.from_ns.unwrap_or(self.begins_ns()).max(self.begins_ns());
        let end_ns = lock(&self.state).last_ns();
        let to_ns = match (window.to_ns, end_ns) {
            (Some(to_ns), Some(end_ns)) => Some(to_ns.min(end_ns)),
            (one, other) => one.or(other),
        };
        let figures = Rc::new(RefCell::new(Figures::new(Columns::new(
            from_ns,
            to_ns.map(|ns| ns.max(from_ns.saturating_add(1))),
        ))));
        let mut exporters = keeper.exporters();
        exporters.push(Box::new(Filler(figures.clone())));
        let tally = Rc::new(RefCell::new(Tally::default()));
        let part: Box<dyn Exporter> = Box::new(Windowed::new(
            window.clone(),
            Rc::new(RefCell::new(Outputs::new(exporters))),
            tally.clone(),
        ));
        let mut outputs = Outputs::new(vec![part]);
        let mut recording = self.recording(length)?;
        let readable = by(&mut recording, &mut outputs, &figures);
        drop(outputs);
        let bytes = match &readable.damage {
            None => length,
            Some(ReadError::Damaged { offset, .. } | ReadError::Unknown { offset, .. }) => *offset,
            Some(_) => recording.volume().stored,
        };
        // The outputs, which held the other references, are dropped.
        let (Some(kept), Some(figures)) = (keeper.kept(), Rc::into_inner(figures)) else {
            let why = "what was read of it is still in use; please report this".to_owned();
            return Err(ReadError::Unreadable { path: self.path.clone(), why });
        };
        let mut figures = figures.into_inner();
        figures.settle(to_ns.unwrap_or(readable.replayed.last_ns));
        let processes = tally.borrow().processes;
        let graphs = Graphs::default();
        let view = View { window: window.clone(), figures, kept, graphs, processes, damage: None };
        Ok((readable, bytes, view))
    }
}

impl State {
    fn last_ns(&self) -> Option<u64> {
        match self {
            Self::Read(whole) => Some(whole.last_ns),
            Self::Reading | Self::Failed(_) => None,
        }
    }
}

/// Why a recording was not read to the end, without its path.
fn described(error: &ReadError) -> String {
    match error {
        ReadError::Io { source, .. } => format!("it cannot be read: {source}"),
        ReadError::Unreadable { why, .. } => why.clone(),
        ReadError::Damaged { offset, why, .. } => format!("the chunk at byte {offset} is damaged: {why}"),
        ReadError::Unknown { offset, what, by, .. } => {
            format!(
                "the chunk at byte {offset} has {what}, which this gctrace does not know; gctrace {by} recorded it"
            )
        }
    }
}

fn recording(medium: &Medium, path: &Path, end: u64) -> Result<Reading, ReadError> {
    Recording::read(BufReader::with_capacity(BUFFER, medium.part(end)), path)
}
