//! A run that is shown while it is in progress: its kept events, which are read when a page needs them, and the figures that are drawn each
//! second, which are summed as events arrive.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gctrace_report::{
    export::{ExportError, Exporter},
    model::{Process, seen::Seen},
    trace_file::{Dump, Header, LiveRecording, LiveState, ReadError},
};

use crate::{
    columns::{Cell, Columns},
    lanes::Lanes,
    source::{LIVE, Source},
};

/// Minimum width of a column, nanoseconds.
const COLUMN_NS: u64 = 1_000_000_000;
/// Approximate number of columns of the whole kept time.
const COLUMNS: u64 = 600;
/// Minimum time for which a read snapshot is shown (`FRESH`), also as a multiple of the time that reading it took (`REST`).
const FRESH: Duration = Duration::from_secs(1);
const REST: u32 = 4;
/// Length of time of the figures at a glance, nanoseconds.
const GLANCE_NS: u64 = 10_000_000_000;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Figures of the last minutes, by column.
#[derive(Debug)]
pub(crate) struct Rolling {
    lanes: Lanes,
    origin_ns: u64,
    keep_ns: u64,
    now_ns: u64,
    /// Processes that are traced now.
    running: HashSet<u32>,
    /// Whether the pauses of any process since the start are seen; `None`: there was no process.
    times_pauses: Option<bool>,
    /// All cycles since the start, and major ones among them.
    cycles: u64,
    majors: u64,
}

impl Rolling {
    pub(crate) fn new(origin_ns: u64, keep_ns: u64) -> Self {
        // Whole seconds, so that columns have exactly their nominal width.
        let width_ns = keep_ns.div_ceil(COLUMNS).div_ceil(COLUMN_NS).max(1) * COLUMN_NS;
        // Columns are merged only if `reach` is not called for a long time.
        let most = 4 * COLUMNS as usize;
        Self {
            lanes: Lanes::new(Columns::rolling(origin_ns, width_ns, most)),
            origin_ns,
            keep_ns,
            now_ns: origin_ns,
            running: HashSet::new(),
            times_pauses: None,
            cycles: 0,
            majors: 0,
        }
    }

    pub(crate) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { .. } => {
                self.running.insert(process.pid);
                *self.times_pauses.get_or_insert(false) |= process.image.method.times_pauses();
            }
            Seen::Ended(_) => drop(self.running.remove(&process.pid)),
            Seen::Cycle(cycle) => {
                self.cycles += 1;
                self.majors += u64::from(cycle.is_major());
            }
            _ => {}
        }
        self.lanes.see(process, seen);
    }

    /// Advances to a time.
    pub(crate) fn reach(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let columns = &mut self.lanes.columns;
        columns.forget(self.now_ns.saturating_sub(self.keep_ns));
        columns.reach(self.now_ns);
    }

    /// The figures to draw now.
    pub(crate) fn now(&self, state: LiveState) -> Now {
        let columns = &self.lanes.columns;
        let width_ns = columns.width_ns;
        let full = (self.keep_ns / width_ns) as usize + 2;
        let (last, last_ns) = columns.latest(self.now_ns, GLANCE_NS.div_ceil(width_ns) as usize);
        Now {
            state,
            keep_ns: self.keep_ns,
            begun_ns: self.origin_ns,
            at_ns: self.now_ns,
            columns: columns.together(self.origin_ns, self.now_ns, full),
            last,
            last_ns,
            processes: self.running.len() as u64,
            times_pauses: self.times_pauses.unwrap_or(true),
            cycles: self.cycles,
            majors: self.majors,
        }
    }
}

/// The current state of a run.
#[derive(Clone, Debug)]
pub(crate) struct Now {
    pub(crate) state: LiveState,
    /// How long events are kept, nanoseconds.
    pub(crate) keep_ns: u64,
    /// When the run began, `CLOCK_MONOTONIC` nanoseconds.
    pub(crate) begun_ns: u64,
    /// The current time of the run, `CLOCK_MONOTONIC` nanoseconds.
    pub(crate) at_ns: u64,
    /// The kept time, by whole columns.
    pub(crate) columns: Columns,
    /// The sum of the last seconds, and (`last_ns`) for how much of them everything was traced, nanoseconds.
    pub(crate) last: Cell,
    pub(crate) last_ns: u64,
    /// Processes that are traced now.
    pub(crate) processes: u64,
    /// Whether the pauses of any process since the start are seen, or there was no process.
    pub(crate) times_pauses: bool,
    /// Cycles since the start, and major ones among them.
    pub(crate) cycles: u64,
    pub(crate) majors: u64,
}

/// An exporter that sums events for the drawn figures.
pub(crate) struct Watcher(pub(crate) Arc<Mutex<Rolling>>);

impl Exporter for Watcher {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        // These are frequent, and not drawn.
        if !matches!(seen, Seen::GvlSpan(_) | Seen::GvlSoFar(_) | Seen::AllocStack(_)) {
            lock(&self.0).see(process, seen);
        }
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        lock(&self.0).lanes.began(ts_ns);
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        lock(&self.0).reach(now_ns);
        Ok(())
    }
}

/// The snapshot that was read last.
#[derive(Debug)]
struct Current {
    state: LiveState,
    source: Arc<Source>,
    read: Instant,
    took: Duration,
}

/// A run that is in progress, or has ended.
#[derive(Debug)]
pub(crate) struct Live {
    recording: LiveRecording,
    rolling: Arc<Mutex<Rolling>>,
    /// Locked during reading, so that all concurrent requests get the same snapshot.
    current: Mutex<Option<Current>>,
}

impl Live {
    pub(crate) fn new(recording: LiveRecording, rolling: Arc<Mutex<Rolling>>) -> Self {
        Self { recording, rolling, current: Mutex::default() }
    }

    /// The current state.
    pub(crate) fn now(&self) -> Now {
        let state = self.recording.state();
        lock(&self.rolling).now(state)
    }

    /// The header of the whole run, as of now.
    pub(crate) fn header(&self) -> Header {
        let LiveState { from_ns, until_ns, .. } = self.recording.state();
        let dump = Dump { why: String::new(), at_ns: until_ns, from_ns, carried: 0, open: 0 };
        Header { dump: Some(dump), ..self.recording.header().clone() }
    }

    /// The kept events, read. A recent snapshot is reused, so that reading takes only a part of the time.
    pub(crate) fn source(&self) -> Result<Arc<Source>, ReadError> {
        let mut current = lock(&self.current);
        let number = self.recording.state().number;
        if let Some(Current { state, source, read, took }) = &*current
            && (state.number == number || read.elapsed() < FRESH.max(*took * REST))
        {
            return Ok(Arc::clone(source));
        }
        let begun = Instant::now();
        let snapshot =
            self.recording.snapshot().map_err(|source| ReadError::Io { path: LIVE.into(), source })?;
        let source = Arc::new(Source::in_memory(snapshot.parts)?);
        source.read()?;
        let read = Instant::now();
        *current =
            Some(Current { state: snapshot.state, source: Arc::clone(&source), read, took: read - begun });
        Ok(source)
    }
}
