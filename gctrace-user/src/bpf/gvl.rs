//! Watching the GVL: what its programs need, and reading what they have added up.

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

/// Programs at GVL points (they need attach cookies, Linux 5.15), in the order of [`GvlPoint`](gctrace_common::gvl::GvlPoint), and the one at a return.
pub(super) const PROGRAMS: [&str; 6] =
    ["gvl_started", "gvl_ready", RESUMED, "gvl_suspended", "gvl_exited", AT_RETURN];
/// The program where a thread has acquired the GVL.
pub(super) const RESUMED: &str = "gvl_resumed";
/// The same code for a return, which matters to Aya only.
pub(super) const AT_RETURN: &str = "gvl_acquired";
/// Programs on the tracepoints of futexes: program and name of the tracepoint.
pub(super) const FUTEX_PROGRAMS: [(&str, &str); 2] =
    [("futex_left", "sys_exit_futex"), ("futex_entered", "sys_enter_futex")];
/// Programs on the scheduler's tracepoints, by which it is known whether threads have a CPU; likewise.
pub(super) const TASK_PROGRAMS: [(&str, &str); 2] =
    [("gvl_switch", "sched_switch"), ("gvl_wakeup", "sched_wakeup")];
/// Maps and how many entries they have.
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
    /// Whether only futexes are looked at, and no probe is set in any program.
    pub futex: bool,
    /// A wait that takes at least this long is reported.
    pub threshold: Duration,
    /// So are times for which a thread holds the GVL or does without it: a timeline is written.
    pub spans: bool,
    /// What watching may cost, in millionths of this host's CPU time.
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

/// The programs that this needs.
pub(super) fn programs(options: Option<GvlOptions>) -> Vec<&'static str> {
    match options {
        Some(GvlOptions { futex: true, .. }) => FUTEX_PROGRAMS.map(|(program, _)| program).to_vec(),
        Some(_) => PROGRAMS.into_iter().chain(TASK_PROGRAMS.map(|(program, _)| program)).collect(),
        None => Vec::new(),
    }
}

/// Makes the maps small where they are not needed.
pub(super) fn size_maps(loader: &mut EbpfLoader<'_>, watched: bool) {
    for (map, entries) in MAPS {
        loader.map_max_entries(map, if watched { entries } else { 1 });
    }
}

/// What the programs have added up for threads that have not ended, and who waited for whom.
#[derive(Debug, Default)]
pub struct GvlRead {
    /// The threads.
    pub threads: Vec<GvlThread>,
    /// Their native threads, by tid.
    pub tasks: std::collections::HashMap<u32, GvlTask>,
    /// Who waited for whom.
    pub edges: Vec<(GvlEdgeKey, GvlEdge)>,
}

/// Reads what the programs have added up.
pub struct GvlReader {
    threads: HashMap<MapData, GvlKey, GvlThread>,
    tasks: HashMap<MapData, u32, GvlTask>,
    locks: HashMap<MapData, GvlKey, GvlLock>,
    edges: HashMap<MapData, GvlEdgeKey, GvlEdge>,
    /// A second handle; the programs and who attaches them write there.
    rubies: HashMap<MapData, u32, RubyEntry>,
    gate: Array<MapData, u64>,
    closed: Array<MapData, u64>,
    /// [`GvlOptions::budget_ppm`].
    pub budget_ppm: u64,
    /// CPUs that are online.
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

    /// What watching it has cost each process so far, nanoseconds.
    pub fn spent(&self) -> Result<Vec<(u32, u64)>, MapError> {
        // A map that changes meanwhile may show some entries again, from the beginning, and others not any more.
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

    /// Has them do nothing any more, and says when an epoch ended.
    pub fn close(&mut self, epoch: u32, at_ns: u64) -> Result<(), MapError> {
        self.closed.set(epoch, at_ns, 0)?;
        self.gate(GvlGate { level: GvlGate::CLOSED, epoch })
    }

    /// Since when a native thread that is off its CPU has been waiting for its GVL: `gvl_ns` of an [`OffCpuEvent`], as the programs say it of
    /// a thread that is back.
    pub fn waits_since(&self, tid: u32) -> u64 {
        let gate = self.gate.get(&0, 0).map(GvlGate::unpack);
        let (Ok(gate), Ok(task)) = (gate, self.tasks.get(&tid, 0)) else { return OffCpuEvent::GVL_UNKNOWN };
        self.threads
            .get(&task.key, 0)
            .map_or(OffCpuEvent::GVL_UNKNOWN, |thread| waits_since(gate, &task, &thread))
    }

    /// What threads have done so far; they go on meanwhile.
    pub fn look(&self) -> Result<Vec<(GvlKey, GvlThread)>, MapError> {
        let mut read = Vec::new();
        for key in keys(&self.threads, |_| true, MAX_GVL_THREADS)? {
            match self.threads.get(&key, 0) {
                Ok(thread) => read.push((key, thread)),
                // It ended meanwhile, and is in the ring.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    /// Takes out how threads that have ended waited, by process, its execs and thread: only a thread itself adds to that.
    pub fn take_ended(
        &mut self,
        ended: &HashSet<(u32, u32, u64)>,
    ) -> Result<Vec<(GvlEdgeKey, GvlEdge)>, MapError> {
        let wanted = |key: &GvlEdgeKey| ended.contains(&(key.tgid, key.execs, key.waiter));
        let mut taken = Vec::new();
        for key in keys(&self.edges, wanted, MAX_GVL_EDGES)? {
            taken.push((key, self.edges.get(&key, 0)?));
            gone(self.edges.remove(&key))?;
        }
        Ok(taken)
    }

    /// Takes out what is known of a process that is gone or has become another program (then with `execs`, how often it had
    /// been another one before); of all processes without one.
    pub fn take_out(&mut self, of: Option<(u32, u32)>) -> Result<GvlRead, MapError> {
        let wanted = |tgid: u32, execs: u32| of.is_none_or(|of| of == (tgid, execs));
        let mut read = GvlRead::default();
        for key in keys(&self.threads, |key| wanted(key.tgid, key.execs), MAX_GVL_THREADS)? {
            match self.threads.get(&key, 0) {
                Ok(thread) => {
                    let tid = thread.header.tid;
                    // After an exec it may be that of the next program's first thread, which has the same number.
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
                // It ended meanwhile, and is in the ring.
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

/// The keys that are wanted. A map that changes meanwhile may show some of them again, from the beginning.
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

    /// What is known of a thread is of the native thread that runs it, and of the time since the gate was opened.
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
