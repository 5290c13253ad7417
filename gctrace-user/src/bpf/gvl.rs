//! Watching the GVL: configuration and maps of its programs, and reading their sums.

use std::{
    collections::{BTreeSet, HashSet},
    path::Path,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, MapData, MapError},
};
use gctrace_common::{
    config::{Config, MAX_PROCESSES, RubyEntry},
    gvl::{
        GvlEdge, GvlEdgeKey, GvlGate, GvlKey, GvlLock, GvlState, GvlTask, GvlThread, MAX_GVL_EDGES,
        MAX_GVL_EPOCHS, MAX_GVL_LOCKS, MAX_GVL_TASKS, MAX_GVL_THREADS,
    },
    stack::OffCpuEvent,
};

use super::{errors::LoadError, gone, kernel_types, rings::shared, tracepoint::TracepointFormat};

/// Programs at GVL points (they need attach cookies, Linux 5.15), in the order of [`GvlPoint`](gctrace_common::gvl::GvlPoint), and the return probe.
pub(super) const PROGRAMS: [&str; 6] =
    ["gvl_started", "gvl_ready", RESUMED, "gvl_suspended", "gvl_exited", AT_RETURN];
/// The program that runs when a thread has acquired the GVL.
pub(super) const RESUMED: &str = "gvl_resumed";
/// The same code as a return probe; only Aya needs the distinction.
pub(super) const AT_RETURN: &str = "gvl_acquired";
/// Programs on the tracepoints of futexes: program and name of the tracepoint.
pub(super) const FUTEX_PROGRAMS: [(&str, &str); 2] =
    [("futex_left", "sys_exit_futex"), ("futex_entered", "sys_enter_futex")];
/// Programs on the scheduler's tracepoints, which show whether threads have a CPU: program and name of the tracepoint.
pub(super) const TASK_PROGRAMS: [(&str, &str); 2] =
    [("gvl_switch", "sched_switch"), ("gvl_wakeup", "sched_wakeup")];
/// Maps and their number of entries.
const MAPS: [(&str, u32); 5] = [
    ("GVL_THREADS", MAX_GVL_THREADS),
    ("GVL_LOCKS", MAX_GVL_LOCKS),
    ("GVL_EDGES", MAX_GVL_EDGES),
    ("GVL_CLOSED", MAX_GVL_EPOCHS),
    ("GVL_TASKS", MAX_GVL_TASKS),
];

/// How the GVL is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlOptions {
    /// Whether only futexes are watched, without probes in any program.
    pub futex: bool,
    /// Minimum duration of a reported wait.
    pub threshold: Duration,
    /// Also report the times during which a thread holds the GVL or does not need it: a timeline is written.
    pub spans: bool,
    /// Maximum overhead of watching, in millionths of this host's CPU time.
    pub budget_ppm: u64,
}

/// Configuration for the programs.
pub(super) fn configure(
    config: &mut Config,
    options: Option<GvlOptions>,
    tracefs: &Path,
) -> Result<(), LoadError> {
    let Some(options) = options else { return Ok(()) };
    config.gvl = 1;
    if options.futex {
        let entered = TracepointFormat::read(tracefs, "syscalls", "sys_enter_futex")?;
        config.futex_address = entered.offset("uaddr")?;
        config.futex_op = entered.offset("op")?;
    } else {
        [config.task_pid, config.task_state, config.task_charged] = kernel_types::task_members()
            .unwrap_or_else(|error| {
                log::warn!("the states of threads without the GVL are not reported: {error}");
                [0; 3]
            });
    }
    config.gvl_threshold_ns = u64::try_from(options.threshold.as_nanos()).unwrap_or(u64::MAX);
    config.gvl_span_ns = if options.spans { config.gvl_threshold_ns } else { u64::MAX };
    Ok(())
}

/// The programs that these options need.
pub(super) fn programs(options: Option<GvlOptions>) -> Vec<&'static str> {
    match options {
        Some(GvlOptions { futex: true, .. }) => FUTEX_PROGRAMS.map(|(program, _)| program).to_vec(),
        Some(_) => PROGRAMS.into_iter().chain(TASK_PROGRAMS.map(|(program, _)| program)).collect(),
        None => Vec::new(),
    }
}

/// Shrinks the maps if the GVL is not watched.
pub(super) fn size_maps(loader: &mut EbpfLoader<'_>, watched: bool) {
    for (map, entries) in MAPS {
        loader.map_max_entries(map, if watched { entries } else { 1 });
    }
}

/// The programs' sums for threads that have not ended, and which thread waited for which.
#[derive(Debug, Default)]
pub struct GvlRead {
    /// The threads.
    pub threads: Vec<GvlThread>,
    /// Their native threads, by tid.
    pub tasks: std::collections::HashMap<u32, GvlTask>,
    /// Which thread waited for which.
    pub edges: Vec<(GvlEdgeKey, GvlEdge)>,
}

/// Reads the programs' sums.
pub struct GvlReader {
    threads: HashMap<MapData, GvlKey, GvlThread>,
    tasks: HashMap<MapData, u32, GvlTask>,
    locks: HashMap<MapData, GvlKey, GvlLock>,
    edges: HashMap<MapData, GvlEdgeKey, GvlEdge>,
    /// A second handle; the programs and [`super::Probes`] write to this map.
    rubies: HashMap<MapData, u32, RubyEntry>,
    gate: Array<MapData, u64>,
    closed: Array<MapData, u64>,
    /// [`GvlOptions::budget_ppm`].
    pub budget_ppm: u64,
    /// Number of online CPUs.
    pub cpus: u32,
}

impl GvlReader {
    pub(super) fn take(ebpf: &mut Ebpf, options: GvlOptions) -> Result<Self, LoadError> {
        fn map<K: Pod, V: Pod>(
            ebpf: &mut Ebpf,
            map: &'static str,
        ) -> Result<HashMap<MapData, K, V>, LoadError> {
            let taken = ebpf.take_map(map).ok_or(LoadError::Missing(map))?;
            HashMap::try_from(taken).map_err(|source| LoadError::Map { map, source })
        }
        fn array(ebpf: &mut Ebpf, map: &'static str) -> Result<Array<MapData, u64>, LoadError> {
            let taken = ebpf.take_map(map).ok_or(LoadError::Missing(map))?;
            Array::try_from(taken).map_err(|source| LoadError::Map { map, source })
        }
        let (gate, closed) = (array(ebpf, "GVL_GATE")?, array(ebpf, "GVL_CLOSED")?);
        let cpus = aya::util::online_cpus().map_err(|(_, source)| LoadError::Cpus(source))?.len() as u32;
        let [threads, locks, edges, _, tasks] = MAPS.map(|(name, _)| name);
        Ok(Self {
            threads: map(ebpf, threads)?,
            tasks: map(ebpf, tasks)?,
            locks: map(ebpf, locks)?,
            edges: map(ebpf, edges)?,
            rubies: HashMap::try_from(shared(ebpf, "RUBIES")?)
                .map_err(|source| LoadError::Map { map: "RUBIES", source })?,
            gate,
            closed,
            budget_ppm: options.budget_ppm,
            cpus,
        })
    }

    /// Overhead of watching the GVL so far, per process (pid), in nanoseconds.
    pub fn spent(&self) -> Result<Vec<(u32, u64)>, MapError> {
        // Iterating over a map that changes meanwhile may restart, repeat entries and miss others.
        let entries = self.rubies.iter().take(2 * MAX_PROCESSES as usize);
        entries
            .filter(|entry| !matches!(entry, Err(MapError::KeyNotFound)))
            .map(|entry| entry.map(|(pid, entry)| (pid, entry.gvl_ns)))
            .collect()
    }

    /// Configures what the programs do at a hit.
    pub fn gate(&mut self, gate: GvlGate) -> Result<(), MapError> {
        self.gate.set(0, gate.pack(), 0)
    }

    /// Disables the programs and records when the epoch ended.
    pub fn close(&mut self, epoch: u32, at_ns: u64) -> Result<(), MapError> {
        self.closed.set(epoch, at_ns, 0)?;
        self.gate(GvlGate { level: GvlGate::CLOSED, epoch })
    }

    /// Since when a native thread that is off its CPU has been waiting for its GVL: the `gvl_ns` that the programs would report in an
    /// [`OffCpuEvent`] when the thread is back.
    pub fn waits_since(&self, tid: u32) -> u64 {
        let gate = self.gate.get(&0, 0).map(GvlGate::unpack);
        let (Ok(gate), Ok(task)) = (gate, self.tasks.get(&tid, 0)) else { return OffCpuEvent::GVL_UNKNOWN };
        self.threads
            .get(&task.key, 0)
            .map_or(OffCpuEvent::GVL_UNKNOWN, |thread| waits_since(gate, &task, &thread))
    }

    /// The current sums of all threads, which keep running meanwhile.
    pub fn look(&self) -> Result<Vec<(GvlKey, GvlThread)>, MapError> {
        let mut read = Vec::new();
        for key in keys(&self.threads, |_| true, MAX_GVL_THREADS)? {
            match self.threads.get(&key, 0) {
                Ok(thread) => read.push((key, thread)),
                // The thread ended meanwhile; its sums are in the ring.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    /// For each program (process and number of execs) with threads that wait for their GVL: since when the first of them has been waiting.
    pub fn waiting_since(&self) -> Result<std::collections::HashMap<(u32, u32), u64>, MapError> {
        let gate = GvlGate::unpack(self.gate.get(&0, 0)?);
        Ok(first_waits(&self.look()?, gate.epoch))
    }

    /// Removes and returns the wait edges of threads that no longer wait, given as process, execs and thread, and those of waits for threads
    /// for which no thread waits any more.
    pub fn take_ended(
        &mut self,
        waiters: &HashSet<(u32, u32, u64)>,
        holders: &HashSet<(u32, u32, u64)>,
    ) -> Result<Vec<(GvlEdgeKey, GvlEdge)>, MapError> {
        let wanted = |key: &GvlEdgeKey| {
            waiters.contains(&(key.tgid, key.execs, key.waiter))
                || holders.contains(&(key.tgid, key.execs, key.holder))
        };
        let mut taken = Vec::new();
        for key in keys(&self.edges, wanted, MAX_GVL_EDGES)? {
            taken.push((key, self.edges.get(&key, 0)?));
            gone(self.edges.remove(&key))?;
        }
        Ok(taken)
    }

    /// Removes and returns the state of a process that has exited or executed another program, given as pid and the number of execs before;
    /// `None` means all processes, whose native threads are kept.
    pub fn take_out(&mut self, of: Option<(u32, u32)>) -> Result<GvlRead, MapError> {
        let wanted = |tgid: u32, execs: u32| of.is_none_or(|of| of == (tgid, execs));
        let mut read = GvlRead::default();
        for key in keys(&self.threads, |key| wanted(key.tgid, key.execs), MAX_GVL_THREADS)? {
            match self.threads.get(&key, 0) {
                Ok(thread) => {
                    let tid = thread.header.tid;
                    // After an exec, the entry may belong to the first thread of the next program, which has the same tid.
                    if let Ok(task) = self.tasks.get(&tid, 0)
                        && task.owner == thread.id
                    {
                        read.tasks.insert(tid, task);
                        if of.is_some() {
                            gone(self.tasks.remove(&tid))?;
                        }
                    }
                    read.threads.push(thread);
                }
                // The thread ended meanwhile; its sums are in the ring.
                Err(MapError::KeyNotFound) => continue,
                Err(error) => return Err(error),
            }
            gone(self.threads.remove(&key))?;
        }
        for key in keys(&self.edges, |key| wanted(key.tgid, key.execs), MAX_GVL_EDGES)? {
            read.edges.push((key, self.edges.get(&key, 0)?));
            gone(self.edges.remove(&key))?;
        }
        for key in keys(&self.locks, |key| wanted(key.tgid, key.execs), MAX_GVL_LOCKS)? {
            gone(self.locks.remove(&key))?;
        }
        Ok(read)
    }
}

/// A wait of an earlier epoch is over, and what it was for is not added up.
fn first_waits(threads: &[(GvlKey, GvlThread)], epoch: u32) -> std::collections::HashMap<(u32, u32), u64> {
    let mut first = std::collections::HashMap::new();
    for (key, thread) in threads {
        if thread.epoch == epoch && thread.state == GvlState::Ready as u32 {
            let since = first.entry((key.tgid, key.execs)).or_insert(u64::MAX);
            *since = thread.since_ns.min(*since);
        }
    }
    first
}

/// The same decision as in `gvl::locks::waits_since` of the programs.
fn waits_since(gate: GvlGate, task: &GvlTask, thread: &GvlThread) -> u64 {
    if gate.level != GvlGate::EVENTS || thread.id != task.owner || thread.epoch != gate.epoch {
        return OffCpuEvent::GVL_UNKNOWN;
    }
    match GvlState::from_raw(thread.state) {
        Some(GvlState::Ready) => thread.since_ns,
        Some(GvlState::Running | GvlState::Away) => OffCpuEvent::GVL_OTHER,
        Some(GvlState::Unknown) | None => OffCpuEvent::GVL_UNKNOWN,
    }
}

/// The keys that `wanted` accepts. Iterating over a map that changes meanwhile may restart and repeat keys.
fn keys<K: Pod + Ord, V: Pod>(
    map: &HashMap<MapData, K, V>,
    wanted: impl Fn(&K) -> bool,
    most: u32,
) -> Result<BTreeSet<K>, MapError> {
    let mut found = BTreeSet::new();
    for key in map.keys().take(4 * most as usize) {
        let key = key?;
        if wanted(&key) {
            found.insert(key);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of each program, the wait that began first counts, unless it began before the gate was closed.
    #[test]
    fn first() {
        let of = |tgid, execs, state: GvlState, epoch, since_ns| {
            let mut thread = GvlThread::blank();
            (thread.state, thread.epoch, thread.since_ns) = (state as u32, epoch, since_ns);
            (GvlKey { at: since_ns, tgid, execs }, thread)
        };
        let threads = [
            of(1, 0, GvlState::Ready, 3, 20),
            of(1, 0, GvlState::Ready, 3, 10),
            of(1, 0, GvlState::Away, 3, 5),
            of(1, 0, GvlState::Ready, 2, 4),
            of(1, 1, GvlState::Ready, 3, 30),
            of(2, 0, GvlState::Running, 3, 1),
        ];
        assert_eq!(first_waits(&threads, 3), [((1, 0), 10), ((1, 1), 30)].into());
    }

    /// A thread's state is valid only for the native thread that runs it and since the gate was opened.
    #[test]
    fn waits() {
        let gate = GvlGate { level: GvlGate::EVENTS, epoch: 3 };
        let task = GvlTask { owner: 7, epoch: 3, ..GvlTask::default() };
        let thread = |state: GvlState| {
            let mut thread = GvlThread::blank();
            (thread.id, thread.epoch, thread.since_ns, thread.state) = (7, 3, 100, state as u32);
            thread
        };
        assert_eq!(waits_since(gate, &task, &thread(GvlState::Ready)), 100);
        assert_eq!(waits_since(gate, &task, &thread(GvlState::Away)), OffCpuEvent::GVL_OTHER);
        assert_eq!(waits_since(gate, &task, &thread(GvlState::Running)), OffCpuEvent::GVL_OTHER);
        assert_eq!(waits_since(gate, &task, &thread(GvlState::Unknown)), OffCpuEvent::GVL_UNKNOWN);
        let other = GvlTask { owner: 8, ..task };
        assert_eq!(waits_since(gate, &other, &thread(GvlState::Ready)), OffCpuEvent::GVL_UNKNOWN);
        for gate in [GvlGate { epoch: 4, ..gate }, GvlGate { level: GvlGate::SUMS, ..gate }] {
            assert_eq!(waits_since(gate, &task, &thread(GvlState::Ready)), OffCpuEvent::GVL_UNKNOWN);
        }
    }
}
