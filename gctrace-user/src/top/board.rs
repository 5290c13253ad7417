//! The data of `gctrace top`: events, folded into what is shown. It reads no clock and no file, and its size is bounded.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use gctrace_common::event::WorkPhase;

use self::{
    blocked::{Blocked, Pair, Waited},
    last_cycle::LastCycle,
    pauses::Pauses,
    requests::{Figures, Requests, Times},
};
use super::rows::{Group, ON_HOST, Row};
use crate::{
    host::origin,
    model::{
        GcCycle, Process,
        seen::{Observer, Seen},
        stack::{FrameKind, StackSample},
    },
    ruby::fallback::Method,
};

pub(super) mod blocked;
pub(super) mod last_cycle;
mod pauses;
pub(super) mod requests;

/// Number of past seconds that rows cover: pauses and sparklines.
pub(super) const WINDOW: usize = 60;
/// Number of past seconds over which shares are computed.
pub(super) const SHARES: usize = 10;
/// Maximum number of processes; further ones wait until others have ended.
const MOST_PROCESSES: usize = 4096;
/// Maximum number of processes that wait; further ones are not counted.
const MOST_WAITING: usize = 1 << 16;
/// Maximum number of methods of one process, in each of two generations.
const MOST_METHODS: usize = 1024;
/// Maximum number of cycles of one process; the oldest are evicted.
const LAST_CYCLES: usize = 50;
pub(super) const SECOND: u64 = 1_000_000_000;
/// Time over which the allocation rate is computed, nanoseconds. Two cycles in quick succession say nothing about it.
const ALLOC_WINDOW: u64 = 5 * SECOND;
/// Minimum time between two readings that are kept, nanoseconds.
const ALLOC_STEP: u64 = SECOND / 4;
/// Upper ends of the bars of the histogram of pauses, nanoseconds; the last bar has no end.
pub(super) const BARS: [u64; 7] =
    [100_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000, 100_000_000, u64::MAX];

/// Values that are read of a process periodically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample {
    /// CPU time so far, nanoseconds.
    pub cpu_ns: Option<u64>,
    /// Resident set size, bytes.
    pub rss: Option<u64>,
}

/// One second of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Second {
    /// Second since boot.
    at: u64,
    pause_ns: u64,
    gvl_wait_ns: u64,
    /// Number of pauses that became known in it, by length ([`BARS`]).
    bars: [u32; BARS.len()],
}

/// A process.
struct ProcessState {
    name: String,
    service: String,
    container: Option<String>,
    ruby: String,
    /// How its GC is traced.
    method: Method,
    /// Time since which it is traced.
    since_ns: u64,
    seconds: [Second; WINDOW],
    pauses: Pauses,
    cycles: u64,
    last: VecDeque<LastCycle>,
    /// Readings of the number of allocated objects at cycles of the last [`ALLOC_WINDOW`]: time and number.
    allocated: VecDeque<(u64, u64)>,
    heap: Option<(u64, u64)>,
    rss: Option<u64>,
    /// Time and value of the last reading of its CPU time.
    cpu: Option<(u64, u64)>,
    cpu_share: Option<f64>,
    cpu_history: VecDeque<u64>,
    /// CPU time by method: the current generation, and the previous one.
    methods: [HashMap<Arc<str>, u64>; 2],
    /// Number of samples in each generation.
    samples: [u64; 2],
    /// Whether its GVL is traced.
    gvl: bool,
    /// Total time that its threads have waited for the GVL so far, nanoseconds.
    gvl_wait_ns: Option<u64>,
    blocked: Blocked,
    requests: Requests,
}

/// One process in detail.
#[derive(Clone, Debug, Default)]
pub(super) struct Detail {
    /// Its row.
    pub row: Row,
    /// CPU time by the innermost Ruby method, largest first, nanoseconds, of the last 10 to 20 s.
    pub methods: Vec<(Arc<str>, u64)>,
    /// Number of samples behind `methods`, and the time that they cover, nanoseconds.
    pub sampled: (u64, u64),
    /// The last cycles, newest first.
    pub cycles: Vec<LastCycle>,
    /// Pauses of the last minute by their length ([`BARS`]), if pauses are seen.
    pub bars: Option<[u64; BARS.len()]>,
    /// CPU share of the last minute in hundredths of a percent, oldest first.
    pub cpu_history: Vec<u64>,
    /// Endpoints of the last minute, most frequent first.
    pub endpoints: Vec<(Arc<str>, Figures)>,
    /// Number of requests whose end was not seen, and of those whose endpoint exceeded the limit, since the process is traced.
    pub uncounted: (u64, u64),
    /// Who waited for whom in the last minute, longest first.
    pub blocked: Vec<(Pair, Waited)>,
    /// If there were more waits in the last minute than are kept: number of waits that are covered.
    pub blocked_most: Option<usize>,
}

/// All processes.
#[derive(Default)]
pub(super) struct Board {
    processes: BTreeMap<u32, ProcessState>,
    /// Pids of the processes that are not shown because of the limit.
    waiting: HashSet<u32>,
    /// When the current generation of methods began, and when the previous one did.
    turned_ns: [u64; 2],
    /// The last tick.
    now_ns: u64,
    /// The last second in which some waits for the GVL were not counted.
    gvl_shed: Option<u64>,
    /// Total number of lost requests, and the last second in which some were lost.
    requests_lost: (u64, Option<u64>),
}

impl Board {
    /// Sets the time for the events that follow.
    pub(super) fn now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// Everything requested is traced from this time on.
    pub(super) fn began(&mut self, ts_ns: u64) {
        for known in self.processes.values_mut() {
            known.since_ns = known.since_ns.max(ts_ns);
        }
    }

    /// Sets the total number of lost requests of all processes.
    pub(super) fn requests_lost(&mut self, lost: u64, now_ns: u64) {
        if lost > self.requests_lost.0 {
            self.requests_lost = (lost, Some(now_ns / SECOND));
        }
    }

    /// Whether all requests of the seconds that a rate covers were seen, and all requests of the last minute.
    fn requests_whole(&self, now_ns: u64) -> (bool, bool) {
        let none_for = |seconds: u64| self.requests_lost.1.is_none_or(|at| at + seconds < now_ns / SECOND);
        (none_for(SHARES as u64 + requests::LATE + 1), none_for(WINDOW as u64 + 1))
    }

    /// Sets the initial values of a process when it is found: CPU time counts from there.
    pub(super) fn start(&mut self, pid: u32, now_ns: u64, sample: Sample) {
        if let Some(known) = self.processes.get_mut(&pid) {
            known.cpu = sample.cpu_ns.map(|cpu_ns| (now_ns, cpu_ns));
            known.rss = sample.rss.or(known.rss);
        }
    }

    /// A second has passed: reads the periodic values. `gvl_whole`: whether all waits for the GVL were seen meanwhile.
    pub(super) fn tick(&mut self, now_ns: u64, gvl_whole: bool, mut read: impl FnMut(u32) -> Sample) {
        if !gvl_whole {
            self.gvl_shed = Some(now_ns / SECOND);
        }
        self.now_ns = now_ns;
        let turn = now_ns.saturating_sub(self.turned_ns[0]) >= SHARES as u64 * SECOND;
        if turn {
            self.turned_ns = [now_ns, self.turned_ns[0]];
        }
        for (&pid, known) in &mut self.processes {
            let sample = read(pid);
            known.rss = sample.rss.or(known.rss);
            let before = std::mem::replace(&mut known.cpu, sample.cpu_ns.map(|cpu_ns| (now_ns, cpu_ns)));
            known.cpu_share = before.zip(known.cpu).and_then(|(before, now)| {
                let wall = now.0.checked_sub(before.0).filter(|&wall| wall > 0)?;
                Some(now.1.checked_sub(before.1)? as f64 * 100.0 / wall as f64)
            });
            if let Some(share) = known.cpu_share {
                bounded(&mut known.cpu_history, (share * 100.0).round() as u64, WINDOW);
            }
            if turn {
                known.methods.swap(0, 1);
                known.methods[0].clear();
                known.samples = [0, known.samples[0]];
                known.requests.forget(now_ns);
            }
        }
    }

    /// The rows, one per process or group, in unspecified order.
    pub(super) fn rows(&self, now_ns: u64, group: Group) -> Vec<Row> {
        if group == Group::Endpoint {
            return self.by_endpoint(now_ns);
        }
        if group == Group::Process {
            return self.processes.iter().map(|(&pid, known)| self.row(pid, known, now_ns)).collect();
        }
        let mut groups: BTreeMap<String, Vec<(Row, &ProcessState)>> = BTreeMap::new();
        for (&pid, known) in &self.processes {
            let row = self.row(pid, known, now_ns);
            let key = match group {
                Group::Container => row.container.clone().unwrap_or_else(|| ON_HOST.to_owned()),
                Group::Service | Group::Process | Group::Endpoint => row.service.clone(),
            };
            groups.entry(key).or_default().push((row, known));
        }
        groups.into_iter().map(|(name, rows)| self.together(name, &rows, now_ns)).collect()
    }

    /// One process in detail; `None` if it is unknown.
    pub(super) fn detail(&self, pid: u32, now_ns: u64) -> Option<Detail> {
        let known = self.processes.get(&pid)?;
        let mut methods = known.methods[0].clone();
        for (name, ns) in &known.methods[1] {
            *methods.entry(name.clone()).or_default() += ns;
        }
        let mut methods: Vec<(Arc<str>, u64)> = methods.into_iter().collect();
        methods.sort_by(|one, two| two.1.cmp(&one.1).then_with(|| one.0.cmp(&two.0)));
        let now = now_ns / SECOND;
        let minute = known.seconds.iter().filter(|s| s.at <= now && s.at + WINDOW as u64 > now);
        let mut bars = [0; BARS.len()];
        for second in minute {
            bars.iter_mut().zip(second.bars).for_each(|(all, count)| *all += u64::from(count));
        }
        let whole = self.requests_whole(now_ns);
        let endpoint = |(name, times): (&Arc<str>, &Times)| {
            let handler = times.handler().map(|handler| format!("{name}  {}", handler.name).into());
            let figures = requests::figures(&[(times, known.since_ns)], now_ns, whole);
            (handler.unwrap_or_else(|| name.clone()), figures)
        };
        let mut endpoints: Vec<_> = known.requests.endpoints(now_ns).map(endpoint).collect();
        endpoints.sort_by(|one, two| two.1.count.cmp(&one.1.count).then_with(|| one.0.cmp(&two.0)));
        Some(Detail {
            row: self.row(pid, known, now_ns),
            methods,
            sampled: (
                known.samples.iter().sum(),
                now_ns.saturating_sub(self.turned_ns[1].max(known.since_ns)),
            ),
            cycles: known.last.iter().rev().cloned().collect(),
            bars: known.method.times_pauses().then_some(bars),
            cpu_history: known.cpu_history.iter().copied().collect(),
            endpoints,
            uncounted: (known.requests.unended, known.requests.no_room),
            blocked: known.blocked.pairs(now_ns),
            blocked_most: known.blocked.most(now_ns),
        })
    }

    fn row(&self, pid: u32, known: &ProcessState, now_ns: u64) -> Row {
        // The current second is not over, and only a part of the first one was traced.
        let now = now_ns / SECOND;
        let first = known.since_ns.div_ceil(SECOND).max(now.saturating_sub(SHARES as u64));
        let whole = now.saturating_sub(first);
        let served = (known.requests.seen > 0).then(|| {
            requests::figures(&[(known.requests.all(), known.since_ns)], now_ns, self.requests_whole(now_ns))
        });
        let served = served.unwrap_or_default();
        let share = |of: fn(&Second) -> u64| {
            let sum: u64 = known.seconds.iter().filter(|s| (first..now).contains(&s.at)).map(of).sum();
            (whole > 0).then(|| sum as f64 * 100.0 / (whole * SECOND) as f64)
        };
        let shed = self.gvl_shed.is_some_and(|at| at + SHARES as u64 > now);
        let (p99_ns, max_ns) = pauses::longest(std::iter::once(&known.pauses), now_ns);
        Row {
            pid: Some(pid),
            processes: 1,
            name: known.name.clone(),
            service: known.service.clone(),
            container: known.container.clone(),
            ruby: known.ruby.clone(),
            cpu: known.cpu_share,
            gc: share(|second| second.pause_ns).filter(|_| known.method.times_pauses()),
            p99_ns,
            max_ns,
            gvl: share(|second| second.gvl_wait_ns).filter(|_| known.gvl && !shed),
            alloc: known.alloc_rate(now_ns),
            rss: known.rss,
            live: known.heap.map(|(live, _)| live),
            free: known.heap.map(|(_, free)| free),
            requests: served.rate,
            request_p99_ns: served.p99_ns,
            requests_seen: known.requests.seen,
            endpoints: known.requests.endpoints(now_ns).map(|(name, _)| name.clone()).collect(),
            cycles: known.method.sees_cycles().then_some(known.cycles),
            spark: spark(&known.seconds, now),
        }
    }

    /// Several processes as one row. A value that is unknown for one of them is unknown for the group.
    fn together(&self, name: String, rows: &[(Row, &ProcessState)], now_ns: u64) -> Row {
        let sum = |of: fn(&Row) -> Option<f64>| rows.iter().map(|(row, _)| of(row)).sum::<Option<f64>>();
        let whole = |of: fn(&Row) -> Option<u64>| rows.iter().map(|(row, _)| of(row)).sum::<Option<u64>>();
        let (p99_ns, max_ns) = pauses::longest(rows.iter().map(|(_, known)| &known.pauses), now_ns);
        // A master process that serves nothing does not count as a server.
        let servers = rows.iter().filter(|(_, known)| known.requests.seen > 0);
        let times: Vec<_> = servers.map(|(_, known)| (known.requests.all(), known.since_ns)).collect();
        let served = requests::figures(&times, now_ns, self.requests_whole(now_ns));
        let mut spark = vec![0; WINDOW];
        for (row, _) in rows {
            spark.iter_mut().zip(&row.spark).for_each(|(all, one)| *all += one);
        }
        Row {
            pid: None,
            processes: rows.len(),
            service: name.clone(),
            container: None,
            name,
            ruby: String::new(),
            cpu: sum(|row| row.cpu),
            gc: sum(|row| row.gc).map(|gc| gc / rows.len().max(1) as f64),
            p99_ns,
            max_ns,
            gvl: sum(|row| row.gvl),
            alloc: sum(|row| row.alloc),
            rss: whole(|row| row.rss),
            live: whole(|row| row.live),
            free: whole(|row| row.free),
            requests: served.rate,
            request_p99_ns: served.p99_ns,
            requests_seen: rows.iter().map(|(row, _)| row.requests_seen).sum(),
            endpoints: Vec::new(),
            cycles: whole(|row| row.cycles),
            spark,
        }
    }

    /// One row for each endpoint of the last minute, over all processes.
    fn by_endpoint(&self, now_ns: u64) -> Vec<Row> {
        let mut endpoints: BTreeMap<&Arc<str>, Vec<(&ProcessState, &Times)>> = BTreeMap::new();
        for known in self.processes.values() {
            for (name, times) in known.requests.endpoints(now_ns) {
                endpoints.entry(name).or_default().push((known, times));
            }
        }
        let row = |(name, of): (&Arc<str>, Vec<(&ProcessState, &Times)>)| {
            let times: Vec<_> = of.iter().map(|(known, times)| (*times, known.since_ns)).collect();
            let figures = requests::figures(&times, now_ns, self.requests_whole(now_ns));
            let mut services: Vec<&str> = of.iter().map(|(known, _)| &*known.service).collect();
            services.dedup();
            Row {
                processes: of.len(),
                name: name.to_string(),
                service: if let [one] = services[..] { one.to_owned() } else { String::new() },
                gc: figures.gc,
                gvl: figures.gvl,
                requests: figures.rate,
                request_p99_ns: figures.p99_ns,
                requests_seen: figures.count as u64,
                ..Row::default()
            }
        };
        endpoints.into_iter().map(row).collect()
    }
}

/// Microseconds of pauses in each second of the window, oldest first.
fn spark(seconds: &[Second; WINDOW], now: u64) -> Vec<u64> {
    let mut spark = vec![0; WINDOW];
    for second in seconds {
        let Some(age) = now.checked_sub(second.at).filter(|&age| age < WINDOW as u64) else { continue };
        spark[WINDOW - 1 - age as usize] = second.pause_ns / 1_000;
    }
    spark
}

/// Appends to a list; the oldest entry is evicted if it is full.
pub(super) fn bounded<T>(list: &mut VecDeque<T>, new: T, most: usize) {
    if list.len() >= most {
        list.pop_front();
    }
    list.push_back(new);
}

impl Observer for Board {
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        if let Seen::Process { state, now_ns, .. } = seen {
            if self.processes.len() >= MOST_PROCESSES && !self.processes.contains_key(&process.pid) {
                if self.waiting.len() < MOST_WAITING {
                    self.waiting.insert(process.pid);
                }
                return;
            }
            let mut known = ProcessState::new(process, now_ns);
            known.rss = state.and_then(|state| state.memory).map(|memory| memory.rss);
            self.waiting.remove(&process.pid);
            self.processes.insert(process.pid, known);
            return;
        }
        let now_ns = self.now_ns;
        let ended = matches!(seen, Seen::Ended(_));
        let waits = self.waiting.contains(&process.pid);
        if waits && (ended || self.processes.len() < MOST_PROCESSES) {
            self.waiting.remove(&process.pid);
            if !ended {
                let new = ProcessState { gvl_wait_ns: None, ..ProcessState::new(process, now_ns) };
                self.processes.insert(process.pid, new);
            }
        }
        let Some(known) = self.processes.get_mut(&process.pid) else { return };
        match seen {
            Seen::Cycle(cycle) => known.cycle(process, cycle, now_ns),
            // This is for a Ruby whose cycles are not known. Phases other than pauses lie within pauses.
            Seen::Work(work) if work.phase == WorkPhase::Pause => known.pause(work.begin_ns, work.ns, now_ns),
            Seen::Stack(sample) => known.stack(sample),
            Seen::Request(request) => known.requests.see(request),
            Seen::GvlWait(wait) => known.blocked.see(wait),
            Seen::GvlSoFar(more) => {
                known.gvl = true;
                // `wait_ns` is a sum since tracing began.
                let grown = known.gvl_wait_ns.map_or(0, |before| more.wait_ns.saturating_sub(before));
                known.gvl_wait_ns = known.gvl_wait_ns.max(Some(more.wait_ns));
                known.second(now_ns).gvl_wait_ns += grown;
            }
            Seen::Ended(_) => {
                self.processes.remove(&process.pid);
            }
            _ => {}
        }
    }
}

impl Board {
    /// Number of processes.
    pub(super) fn len(&self) -> usize {
        self.processes.len()
    }

    /// Number of processes that are not shown because of the limit.
    pub(super) fn not_shown(&self) -> u64 {
        self.waiting.len() as u64
    }
}

impl ProcessState {
    fn new(process: &Process, now_ns: u64) -> Self {
        let container = &process.container;
        Self {
            name: origin::program(&process.comm, process.cmdline.as_deref().unwrap_or_default()),
            service: process.origin.service.clone(),
            container: container
                .name
                .clone()
                .or_else(|| Some(container.id.as_deref()?.chars().take(12).collect())),
            ruby: process.image.version.to_string(),
            method: process.image.method,
            since_ns: now_ns,
            seconds: [Second::default(); WINDOW],
            pauses: Pauses::default(),
            cycles: 0,
            last: VecDeque::new(),
            allocated: VecDeque::new(),
            heap: None,
            rss: None,
            cpu: None,
            cpu_share: None,
            cpu_history: VecDeque::new(),
            methods: [HashMap::new(), HashMap::new()],
            samples: [0; 2],
            gvl: false,
            gvl_wait_ns: Some(0),
            blocked: Blocked::default(),
            requests: Requests::default(),
        }
    }

    /// The entry for the second of an event.
    fn second(&mut self, ts_ns: u64) -> &mut Second {
        let at = ts_ns / SECOND;
        let second = &mut self.seconds[at as usize % WINDOW];
        // An event that is a whole window late cannot be distinguished from a new one; it would have to be older than a minute.
        if second.at != at {
            *second = Second { at, ..Second::default() };
        }
        second
    }

    /// Adds a pause, which becomes known when its cycle is complete: a lazy sweep can take minutes. Its time counts in the seconds that it
    /// lasted, as far as they are in the window. Among the pauses of the last minute it counts from the time when it became known.
    fn pause(&mut self, begin_ns: u64, ns: u64, now_ns: u64) {
        let (end, now_ns) = (begin_ns + ns, now_ns.max(begin_ns + ns));
        let mut at = begin_ns.max((now_ns / SECOND + 1).saturating_sub(WINDOW as u64) * SECOND);
        while at < end {
            let until = end.min((at / SECOND + 1) * SECOND);
            self.second(at).pause_ns += until - at;
            at = until;
        }
        let second = self.second(now_ns);
        let bar = BARS.iter().position(|&end| ns < end).unwrap_or(BARS.len() - 1);
        second.bars[bar] = second.bars[bar].saturating_add(1);
        self.pauses.add(now_ns, ns);
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle, now_ns: u64) {
        self.cycles += 1;
        for pause in &cycle.pauses {
            self.pause(pause.begin_ns, pause.ns, now_ns);
        }
        let last = cycle.end.as_ref().unwrap_or(&cycle.start);
        let value = |name: &str| last.value(&process.image, name);
        // A cycle begins when no slot is free; an unfinished one says nothing about the slots that it will leave.
        if cycle.end.is_some() {
            self.heap = value("heap_live_slots").zip(value("heap_free_slots")).or(self.heap);
        }
        self.rss = last.memory.map(|memory| memory.rss).or(self.rss);
        if let Some(count) = value("total_allocated_objects") {
            self.allocated_so_far(last.ts_ns, count);
        }
        bounded(&mut self.last, LastCycle::of(cycle), LAST_CYCLES);
    }

    /// Adds a reading. Keeps one for each [`ALLOC_STEP`], the latest one, and as many earlier ones as the window needs.
    fn allocated_so_far(&mut self, ts_ns: u64, count: u64) {
        let kept = &mut self.allocated;
        if kept.back().is_some_and(|&(at, before)| ts_ns < at || count < before) {
            kept.clear();
        }
        if kept.len() >= 2 && ts_ns - kept[kept.len() - 2].0 < ALLOC_STEP {
            kept.pop_back();
        }
        kept.push_back((ts_ns, count));
        while kept.len() > 2 && ts_ns - kept[1].0 >= ALLOC_WINDOW {
            kept.pop_front();
        }
    }

    /// Objects allocated per second between the first and the last kept reading; `None` once the last one is older than the time between these
    /// and [`ALLOC_WINDOW`]: a process that has stopped allocating starts no cycle that would show it.
    fn alloc_rate(&self, now_ns: u64) -> Option<f64> {
        let (first, last) = (self.allocated.front()?, self.allocated.back()?);
        let wall = last.0 - first.0;
        let recent = now_ns.saturating_sub(last.0) <= wall.max(ALLOC_WINDOW);
        (wall > 0 && recent).then(|| (last.1 - first.1) as f64 * 1e9 / wall as f64)
    }

    fn stack(&mut self, sample: &StackSample) {
        if sample.cpu_ns == 0 {
            return;
        }
        let named = |kind| matches!(kind, FrameKind::Ruby | FrameKind::CFunction | FrameKind::Vm);
        let Some(leaf) = sample.stack.iter().find(|frame| named(frame.kind)) else { return };
        let methods = &mut self.methods[0];
        if let Some(ns) = methods.get_mut(&leaf.name) {
            *ns += sample.cpu_ns;
        } else if methods.len() < MOST_METHODS {
            methods.insert(leaf.name.clone(), sample.cpu_ns);
        } else {
            return;
        }
        self.samples[0] += 1;
    }
}
