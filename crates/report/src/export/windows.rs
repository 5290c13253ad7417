//! Profiles to push: what was recorded in a window of time is sent at its end, and recording starts anew.

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use super::{
    ExportError, Exporter,
    upload::{Payload, Uploader},
};
use crate::{
    aggregate::recording::{Filter, FilterAccount, Limits, ProcessIndex, Recording},
    clock::{WallClock, monotonic_ns},
    ledger::{Ledger, UserCounts},
    model::{
        Process,
        seen::{Observer as _, Seen},
        stack::StackSample,
    },
};

/// A window is short. What exceeds these limits is added to sums that say so.
const LIMITS: Limits = Limits { nodes: 1 << 18, sums: 1 << 18, threads: 1 << 14, timeline: 0 };

/// Maximum number of windows queued per server; without it, memory would grow without bound while a server is unreachable.
const WAITING: usize = 4;

/// The data recorded in a window of time.
#[derive(Clone)]
pub(super) struct Window {
    /// The data.
    pub(super) recording: Arc<Recording>,
    /// The clock at the end of the window: the host's clock may have been set since the run began.
    pub(super) clock: WallClock,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) began_ns: u64,
    /// End, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) ended_ns: u64,
    /// gctrace's counters at the end of the window, in one line.
    pub(super) account: String,
    /// Whether threads off their CPU were recorded, even if there were none.
    pub(super) wall: bool,
}

/// Makes a payload of some processes of a window.
pub(super) type Make = fn(Arc<Window>, Vec<ProcessIndex>) -> Box<dyn Payload>;

/// Where windows are sent. An unreachable server keeps no window from another server.
struct Sink {
    uploader: Rc<Uploader>,
    make: Make,
    /// The windows queued for it, for as long as a payload holds them.
    waiting: Vec<Weak<Window>>,
}

/// The off-CPU times of which windows that have been handed over contain the beginning.
#[derive(Default)]
struct Handed {
    /// By process and thread. A record that reports the end of a time may come after the next one has begun.
    by_thread: HashMap<(u32, u32), Vec<Part>>,
    /// Number of windows.
    windows: u64,
}

/// The beginning of an off-CPU time.
#[derive(Clone, Copy)]
struct Part {
    began_ns: u64,
    until_ns: u64,
    /// The last window that contains some of it.
    window: u64,
}

impl Handed {
    /// Up to when windows contain the off-CPU time of this sample; `None`: they contain nothing of it.
    fn until(&self, pid: u32, sample: &StackSample) -> Option<u64> {
        sample.off_cpu_end_ns()?;
        let parts = self.by_thread.get(&(pid, sample.tid))?;
        let of = |part: &&Part| (part.began_ns..part.until_ns).contains(&sample.ts_ns);
        parts.iter().find(of).map(|part| part.until_ns)
    }

    /// A window that is handed over contains these times, which are still in progress.
    fn add(&mut self, open: &[(Process, StackSample)]) {
        self.windows += 1;
        for (process, sample) in open {
            let until_ns = sample.ts_ns.saturating_add(sample.wall_ns);
            let parts = self.by_thread.entry((process.pid, sample.tid)).or_default();
            // The states of one time follow each other without a gap.
            let known = parts.iter_mut().find(|part| (part.began_ns..=part.until_ns).contains(&sample.ts_ns));
            match known {
                Some(part) => {
                    (part.until_ns, part.window) = (part.until_ns.max(until_ns), self.windows);
                }
                None => parts.push(Part { began_ns: sample.ts_ns, until_ns, window: self.windows }),
            }
        }
        // The records of times that ended before the previous window did have arrived, or are lost.
        let windows = self.windows;
        self.by_thread.retain(|_, parts| {
            parts.retain(|part| part.window + 1 >= windows);
            !parts.is_empty()
        });
    }
}

/// Records, and hands over windows.
pub(super) struct Windows {
    sinks: Vec<Sink>,
    interval: Duration,
    wall: bool,
    recording: Recording,
    began: Instant,
    /// Start of the current window; the first one begins with tracing. `None` before tracing.
    began_ns: Option<u64>,
    closed_ns: Option<u64>,
    /// Samples and events of earlier windows from before recording began.
    early: (u64, u64),
    /// Off-CPU times that are still in progress, read for the window that is about to end.
    open: Vec<(Process, StackSample)>,
    /// The parts of off-CPU times that are in earlier windows.
    handed: Handed,
    /// Whether the window ends with the next account.
    is_due: bool,
    /// Samples, cycles and allocation stacks of earlier windows whose request did not end in time, so their endpoint is unknown.
    unresolved: u64,
    /// Samples, cycles and allocation stacks of earlier windows whose trace is known but not shown.
    traces_left_out: u64,
    /// What the filter passed and dropped in earlier windows.
    filtered: FilterAccount,
    account: String,
}

impl Windows {
    /// Windows of this length for these servers. `wall`: threads off their CPU are recorded. `traces`: traces are sent to
    /// a server. The windows contain what the filter passes.
    pub(super) fn new(
        sinks: Vec<(Rc<Uploader>, Make)>,
        interval: Duration,
        (wall, traces): (bool, bool),
        filter: &Filter,
    ) -> Self {
        let sink = |(uploader, make)| Sink { uploader, make, waiting: Vec::new() };
        Self {
            sinks: sinks.into_iter().map(sink).collect(),
            interval,
            wall,
            recording: Recording::new(false, LIMITS, filter.clone()).with_traces(traces),
            began: Instant::now(),
            began_ns: None,
            closed_ns: None,
            early: (0, 0),
            open: Vec::new(),
            handed: Handed::default(),
            is_due: false,
            unresolved: 0,
            traces_left_out: 0,
            filtered: FilterAccount::default(),
            account: String::new(),
        }
    }

    /// Adds what no earlier window contains of a sample.
    fn sample(&mut self, process: &Process, sample: &StackSample) {
        match self.handed.until(process.pid, sample) {
            None => self.recording.see(process, Seen::Stack(sample)),
            Some(until_ns) => {
                if let Some((ts_ns, wall_ns)) = sample.since(until_ns) {
                    let rest = StackSample { ts_ns, wall_ns, ..sample.clone() };
                    self.recording.see(process, Seen::Stack(&rest));
                }
            }
        }
    }

    /// Ends the window. Its contents are encoded and sent on another thread.
    fn hand_over(&mut self) {
        self.is_due = false;
        let Some(began_ns) = self.began_ns else { return };
        let ended_ns = self.closed_ns.unwrap_or_else(monotonic_ns);
        let open = std::mem::take(&mut self.open);
        for (process, sample) in &open {
            self.sample(process, sample);
        }
        self.handed.add(&open);
        // A late sample is in the window that is open when it arrives.
        let next = self.recording.go_on();
        let recording = std::mem::replace(&mut self.recording, next);
        self.early.0 += recording.early_samples;
        self.early.1 += recording.early_events;
        self.unresolved += recording.unresolved;
        self.traces_left_out += recording.traces_left_out();
        self.filtered.add(recording.filtered());
        self.began_ns = Some(ended_ns);
        self.began = Instant::now();
        let has_any = !recording.samples.is_empty()
            || !recording.pauses.is_empty()
            || !recording.gvl_waits.is_empty()
            || !recording.allocs.is_empty();
        if !has_any {
            return;
        }
        let filtered = recording.filtered().text(recording.filter());
        let account = self.account.clone() + &filtered.map_or_else(String::new, |text| format!("; {text}"));
        let (clock, wall) = (WallClock::measure(), self.wall);
        let window = Window { recording: Arc::new(recording), clock, began_ns, ended_ns, account, wall };
        let mut services: BTreeMap<_, Vec<ProcessIndex>> = BTreeMap::new();
        for (index, facts) in window.recording.processes.iter().enumerate() {
            services.entry((&facts.origin.service, &facts.origin.container)).or_default().push(index);
        }
        for Sink { uploader, make, waiting } in &mut self.sinks {
            waiting.retain(|window| window.strong_count() > 0);
            let full = waiting.len() >= WAITING;
            let its = Arc::new(window.clone());
            waiting.push(Arc::downgrade(&its));
            for processes in services.values() {
                if full {
                    uploader.give_up();
                    continue;
                }
                uploader.send(make(Arc::clone(&its), processes.clone()));
            }
        }
    }
}

impl Exporter for Windows {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        match seen {
            // The sums of a thread's whole lifetime belong to no window.
            Seen::GvlThread(_) => {}
            Seen::Stack(sample) => self.sample(process, sample),
            seen => self.recording.see(process, seen),
        }
        Ok(())
    }

    fn account_follows(&mut self) -> bool {
        self.is_due = self.wall && self.began.elapsed() >= self.interval;
        self.is_due
    }

    fn off_cpu_so_far(&mut self, open: &[(Process, StackSample)]) {
        self.open = if self.is_due { open.to_vec() } else { Vec::new() };
    }

    fn began(&mut self, ts_ns: u64) {
        if self.began_ns.is_none() {
            (self.began_ns, self.recording.began_ns) = (Some(ts_ns), Some(ts_ns));
            self.began = Instant::now();
        }
    }

    fn closed(&mut self, ts_ns: u64) {
        self.closed_ns = Some(ts_ns);
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        counts.profiles.profile_samples_early += self.early.0 + self.recording.early_samples;
        counts.profiles.profile_events_early += self.early.1 + self.recording.early_events;
        counts.profiles.profile_endpoints_unknown += self.unresolved + self.recording.unresolved;
        counts.profiles.profile_traces_left_out += self.traces_left_out + self.recording.traces_left_out();
        self.filtered.add_to(&mut counts.profiles);
        self.recording.filtered().add_to(&mut counts.profiles);
    }

    fn account(&mut self, ledger: &Ledger) {
        self.account = format!("gctrace {}: {}", super::VERSION, ledger.summary());
        if self.is_due {
            self.hand_over();
        }
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.is_due = false;
        self.account(ledger);
        self.hand_over();
        Ok(())
    }

    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        // With off-CPU times a window ends with an account, for which those in progress are read.
        if !self.wall && self.began.elapsed() >= self.interval {
            self.hand_over();
        }
        Ok(())
    }
}

/// Waits for the last uploads. Placed after all exporters that upload.
pub(super) struct LastUploads {
    uploaders: Vec<Rc<Uploader>>,
}

impl LastUploads {
    /// Waits for these uploaders.
    pub(super) fn new(uploaders: Vec<Rc<Uploader>>) -> Self {
        Self { uploaders }
    }
}

impl Exporter for LastUploads {
    fn add_counts(&self, counts: &mut UserCounts) {
        for uploader in &self.uploaders {
            uploader.add_counts(counts);
        }
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        // All are closed first, so that several servers that do not respond take no longer than one.
        for uploader in &self.uploaders {
            uploader.close();
        }
        for uploader in &self.uploaders {
            uploader.finish();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::{super::upload::Protocol, *};
    use crate::model::stack::ThreadState;

    static SPANS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

    /// A payload without contents, or of one byte, which holds its window until it is sent.
    struct Nothing(Option<Arc<Window>>);

    impl Payload for Nothing {
        fn path(&self, _: Protocol) -> &'static str {
            "/"
        }

        fn content_type(&self) -> &'static str {
            "text/plain"
        }

        fn encode(&self) -> Vec<u8> {
            self.0.iter().map(|_| b'x').collect()
        }
    }

    fn make(window: Arc<Window>, _: Vec<ProcessIndex>) -> Box<dyn Payload> {
        SPANS.lock().unwrap().push((window.began_ns, window.ended_ns));
        drop(window);
        Box::new(Nothing(None))
    }

    /// Windows that a server does not accept keep none from another server, and their number is bounded.
    #[test]
    fn servers_are_apart() {
        static MADE: Mutex<[usize; 2]> = Mutex::new([0; 2]);
        fn keeping(window: Arc<Window>, _: Vec<ProcessIndex>) -> Box<dyn Payload> {
            MADE.lock().unwrap()[0] += 1;
            Box::new(Nothing(Some(window)))
        }
        fn dropping(window: Arc<Window>, _: Vec<ProcessIndex>) -> Box<dyn Payload> {
            MADE.lock().unwrap()[1] += 1;
            drop(window);
            Box::new(Nothing(None))
        }
        let nobody = || {
            let address = super::super::upload::Address {
                url: "http://127.0.0.1:1".to_owned(),
                protocol: Protocol::Http,
            };
            let headers = super::super::upload::headers("GCTRACE_NO_SUCH_VARIABLE").unwrap();
            Rc::new(Uploader::start("test", &address, headers, |_| {}).unwrap())
        };
        let sinks: Vec<(Rc<Uploader>, Make)> = vec![(nobody(), keeping), (nobody(), dropping)];
        let mut windows = Windows::new(sinks, Duration::ZERO, (false, false), &Filter::default());
        let (process, sample) = crate::export::profile::a_sample(7_000_000_500);
        windows.began(7_000_000_000);
        for _ in 0..10 {
            windows.see(&process, Seen::Stack(&sample)).unwrap();
            windows.hand_over();
        }
        assert_eq!(*MADE.lock().unwrap(), [WAITING, 10]);
    }

    /// The first window begins when tracing does, not when gctrace was started; the last window ends when tracing does.
    #[test]
    fn spans() {
        let nobody =
            super::super::upload::Address { url: "http://127.0.0.1:1".to_owned(), protocol: Protocol::Http };
        let headers = super::super::upload::headers("GCTRACE_NO_SUCH_VARIABLE").unwrap();
        let uploader = Rc::new(Uploader::start("test", &nobody, headers, |_| {}).unwrap());
        let mut windows =
            Windows::new(vec![(uploader, make)], Duration::ZERO, (false, false), &Filter::default());
        let (process, sample) = crate::export::profile::a_sample(7_000_000_500);
        // The startup may take longer than a window.
        windows.flush(0).unwrap();
        windows.began(7_000_000_000);
        windows.see(&process, Seen::Stack(&sample)).unwrap();
        windows.hand_over();
        let now = monotonic_ns();
        windows.see(&process, Seen::Stack(&sample)).unwrap();
        windows.closed(now + 1_000);
        windows.finish(&Ledger::default()).unwrap();
        let spans = SPANS.lock().unwrap();
        assert_eq!(spans.len(), 2);
        assert_eq!((spans[0].0, spans[1].0, spans[1].1), (7_000_000_000, spans[0].1, now + 1_000));
    }

    /// Each window contains the part of an off-CPU time that lies in it, and the parts add up to the whole: also of the states of a time, and
    /// of a time that starts before the record of the previous one has arrived.
    #[test]
    fn open_times_are_divided() {
        static WALL: Mutex<Vec<Vec<(ThreadState, u64)>>> = Mutex::new(Vec::new());
        fn keeping(window: Arc<Window>, _: Vec<ProcessIndex>) -> Box<dyn Payload> {
            let mut times: Vec<_> =
                window.recording.samples.iter().map(|(key, sum)| (key.state, sum.wall_ns)).collect();
            times.sort_unstable_by_key(|(state, _)| state.name());
            WALL.lock().unwrap().push(times);
            drop(window);
            Box::new(Nothing(None))
        }
        let address =
            super::super::upload::Address { url: "http://127.0.0.1:1".to_owned(), protocol: Protocol::Http };
        let headers = super::super::upload::headers("GCTRACE_NO_SUCH_VARIABLE").unwrap();
        let uploader = Rc::new(Uploader::start("test", &address, headers, |_| {}).unwrap());
        let sinks: Vec<(Rc<Uploader>, Make)> = vec![(uploader, keeping)];
        let mut windows = Windows::new(sinks, Duration::ZERO, (true, false), &Filter::default());
        let (process, sample) = crate::export::profile::a_sample(1_000);
        let off = |state, began_ns: u64, ended_ns: u64| StackSample {
            ts_ns: began_ns,
            wall_ns: ended_ns - began_ns,
            cpu_ns: 0,
            state,
            ..sample.clone()
        };
        let end_with = |windows: &mut Windows, open: &[StackSample]| {
            let open: Vec<_> = open.iter().map(|sample| (process.clone(), sample.clone())).collect();
            assert!(windows.account_follows());
            windows.off_cpu_so_far(&open);
            windows.account(&Ledger::default());
        };
        let (blocked, waits) = (ThreadState::Blocked, ThreadState::GvlWait);
        windows.began(1_000);
        // It has been asleep since before tracing.
        end_with(&mut windows, &[off(blocked, 500, 2_000)]);
        end_with(&mut windows, &[off(blocked, 500, 2_500), off(waits, 2_500, 3_000)]);
        // Its record comes late: the thread sleeps again by then.
        end_with(&mut windows, &[off(blocked, 3_600, 4_000)]);
        for ended in [off(blocked, 500, 2_500), off(waits, 2_500, 3_500)] {
            windows.see(&process, Seen::Stack(&ended)).unwrap();
        }
        end_with(&mut windows, &[off(blocked, 3_600, 5_000)]);
        windows.see(&process, Seen::Stack(&off(blocked, 3_600, 5_200))).unwrap();
        windows.see(&process, Seen::Stack(&off(blocked, 5_300, 5_400))).unwrap();
        windows.finish(&Ledger::default()).unwrap();
        assert_eq!(
            *WALL.lock().unwrap(),
            [
                vec![(blocked, 1_000)],
                vec![(blocked, 500), (waits, 500)],
                vec![(blocked, 400)],
                vec![(blocked, 1_000), (waits, 500)],
                vec![(blocked, 300)],
            ]
        );
    }
}
