//! The ring buffers and the counters.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    time::Duration,
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf},
    programs::{Program, ProgramFd},
};
use gctrace_common::{
    config::{AwayEntry, RubyEntry},
    stats::Counter,
};

use super::errors::{AttachError, LoadError};

/// `BPF_NOEXIST` (include/uapi/linux/bpf.h): an insertion fails where the key exists.
pub(super) const NO_EXIST: u64 = 1;
/// Maximum number of times the counters are read until they settle; a program runs for some microseconds.
const SETTLE_TRIES: u32 = 100;

/// The rings that the data thread reads.
pub struct Rings {
    gc: RingBuf<MapData>,
    life: LifeRing,
}

/// The ring of forks, execs and exits.
pub struct LifeRing(RingBuf<MapData>);

impl LifeRing {
    /// Passes up to `limit` records to `sink`; returns their number.
    pub fn drain(&mut self, limit: usize, sink: impl FnMut(&[u8])) -> usize {
        drain(&mut self.0, limit, sink)
    }
}

/// The ring of stacks, which is read by its own thread.
pub struct StackRing(RingBuf<MapData>);

impl StackRing {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        take(ebpf, "STACK_RING").map(Self)
    }

    /// A duplicate of the descriptor that is readable when the ring has woken its reader.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    /// Passes up to `limit` records to `sink`; returns their number.
    pub fn drain(&mut self, limit: usize, sink: impl FnMut(&[u8])) -> usize {
        drain(&mut self.0, limit, sink)
    }
}

impl Rings {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        Ok(Self { gc: take(ebpf, "GC_RING")?, life: LifeRing(take(ebpf, "LIFE_RING")?) })
    }

    /// A descriptor that is readable when the GC ring has woken its reader.
    pub fn gc_fd(&self) -> BorrowedFd<'_> {
        self.gc.as_fd()
    }

    /// A descriptor that is readable when the lifecycle ring has woken its reader.
    pub fn life_fd(&self) -> BorrowedFd<'_> {
        self.life.0.as_fd()
    }

    /// Passes up to `limit` GC records to `sink`, which may also read lifecycle records; returns the number of GC records.
    pub fn drain_gc(&mut self, limit: usize, mut sink: impl FnMut(&[u8], &mut LifeRing)) -> usize {
        let life = &mut self.life;
        drain(&mut self.gc, limit, |bytes| sink(bytes, life))
    }

    /// The ring of lifecycle records.
    pub fn life(&mut self) -> &mut LifeRing {
        &mut self.life
    }
}

pub(super) fn take(ebpf: &mut Ebpf, map: &'static str) -> Result<RingBuf<MapData>, LoadError> {
    let taken = ebpf.take_map(map).ok_or(LoadError::Missing(map))?;
    RingBuf::try_from(taken).map_err(|source| LoadError::Map { map, source })
}

pub(super) fn drain(ring: &mut RingBuf<MapData>, limit: usize, mut sink: impl FnMut(&[u8])) -> usize {
    for taken in 0..limit {
        let Some(record) = ring.next() else { return taken };
        sink(&record);
    }
    limit
}

/// The threads that are off their CPU.
pub struct AwayMap {
    away: HashMap<MapData, u32, AwayEntry>,
    /// A second handle; the programs and [`super::Probes`] write to this map.
    rubies: HashMap<MapData, u32, RubyEntry>,
}

impl AwayMap {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        let away = ebpf.take_map("AWAY").ok_or(LoadError::Missing("AWAY"))?;
        let away = HashMap::try_from(away).map_err(|source| LoadError::Map { map: "AWAY", source })?;
        let rubies = HashMap::try_from(shared(ebpf, "RUBIES")?)
            .map_err(|source| LoadError::Map { map: "RUBIES", source })?;
        Ok(Self { away, rubies })
    }

    /// The programs' entry of a process, if it is a followed Ruby.
    pub fn ruby(&self, pid: u32) -> Option<RubyEntry> {
        self.rubies.get(&pid, 0).ok().filter(|entry| entry.known != 0)
    }

    /// The entry of a thread that was seen to leave its CPU and has not returned.
    pub fn get(&self, tid: u32) -> Option<AwayEntry> {
        self.away.get(&tid, 0).ok()
    }

    /// Whether a thread was seen to leave its CPU and has not returned.
    pub fn has(&self, tid: u32) -> bool {
        self.get(tid).is_some()
    }

    /// Adds a thread that left its CPU before the programs ran. Returns whether it was absent: a thread that was seen to
    /// leave its CPU keeps its entry.
    ///
    /// # Errors
    ///
    /// The map rejects the entry.
    pub fn enter(&mut self, tid: u32, entry: &AwayEntry) -> Result<bool, MapError> {
        match self.away.insert(tid, entry, NO_EXIST) {
            Ok(()) => Ok(true),
            Err(_) if self.has(tid) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The threads that have left their CPU and not returned, by tid. After [`super::Probes::close`] the map no longer changes.
    pub fn read(&self) -> BTreeMap<u32, AwayEntry> {
        let entries = self.away.iter().filter_map(|entry| {
            entry.inspect_err(|error| log::warn!("reading a thread that is off its CPU: {error}")).ok()
        });
        // The iteration restarts if its current entry is removed (`htab_map_get_next_key`, kernel/bpf/hashtab.c), hence the set by tid.
        entries.collect()
    }
}

/// `recursion_misses` of a program (`bpf_prog_show_fdinfo`, kernel/bpf/syscall.c).
fn misses(fd: RawFd) -> Option<u64> {
    misses_of(&std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?)
}

fn misses_of(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("recursion_misses:"))?.trim().parse().ok()
}

/// Reads the programs' counters.
pub struct CounterReader {
    map: PerCpuArray<MapData, u64>,
    /// Programs at tracepoints.
    tracepoints: Vec<OwnedFd>,
    gate: Array<MapData, u32>,
}

impl CounterReader {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        let map = ebpf.take_map("COUNTERS").ok_or(LoadError::Missing("COUNTERS"))?;
        let map = PerCpuArray::try_from(map).map_err(|source| LoadError::Map { map: "COUNTERS", source })?;
        let tracepoints = ebpf.programs().filter_map(|(_, program)| match program {
            Program::TracePoint(program) => program.fd().ok(),
            Program::RawTracePoint(program) => program.fd().ok(),
            _ => None,
        });
        let own = |fd: &ProgramFd| fd.as_fd().try_clone_to_owned();
        let tracepoints = tracepoints.map(own).collect::<io::Result<_>>();
        let tracepoints = tracepoints
            .map_err(|source| LoadError::Map { map: "COUNTERS", source: MapError::IoError(source) })?;
        let gate = Array::try_from(shared(ebpf, "GATE")?)
            .map_err(|source| LoadError::Map { map: "GATE", source })?;
        Ok(Self { map, tracepoints, gate })
    }

    /// Like [`super::Probes::close`], for a run whose control thread does not do it.
    pub fn close(&mut self) -> Result<(), AttachError> {
        self.gate.set(0, 1, 0).map_err(|source| AttachError::Map { map: "GATE", source: Box::new(source) })
    }

    /// Number of tracepoint hits for which the kernel skipped the program: at ordinary tracepoints because a thread had been preempted on this CPU
    /// in the middle of a bpf(2) call (`bpf_prog_active` in `trace_call_bpf`, `kernel/trace/bpf_trace.c`), at raw ones because the program was
    /// already running there (`__bpf_trace_run`). The events of these hits are unknown.
    /// 0 before Linux 6.7, which does not count them.
    pub fn skipped(&self) -> u64 {
        self.tracepoints.iter().filter_map(|fd| misses(fd.as_raw_fd())).sum()
    }

    /// All counters after [`super::Probes::close`], in the order of [`Counter::ALL`]: read repeatedly until they stop
    /// changing, because a program that passed the gate before it closed may still be running. `None` if the kernel fails to
    /// read one.
    pub fn read_settled(&self) -> Option<Vec<u64>> {
        let mut last = self.read()?;
        for _ in 0..SETTLE_TRIES {
            std::thread::sleep(Duration::from_millis(1));
            let next = self.read()?;
            if next == last {
                break;
            }
            last = next;
        }
        Some(last)
    }

    /// The current value of one counter.
    pub fn one(&self, counter: Counter) -> Option<u64> {
        let of_cpus = self.map.get(&(counter as u32), 0).ok()?;
        Some(of_cpus.iter().fold(0, |sum, value| sum.wrapping_add(*value)))
    }

    /// The current values of all counters; while a record is in progress they may be inconsistent.
    pub fn read(&self) -> Option<Vec<u64>> {
        Counter::ALL.iter().map(|&counter| self.one(counter)).collect()
    }
}

/// A second handle to a map whose first one is taken elsewhere.
pub(super) fn shared(ebpf: &Ebpf, map: &'static str) -> Result<Map, LoadError> {
    let error = |source| LoadError::Map { map, source };
    let (data, kind): (_, fn(MapData) -> Map) = match ebpf.map(map) {
        Some(Map::HashMap(data)) => (data, Map::HashMap),
        Some(Map::Array(data)) => (data, Map::Array),
        _ => return Err(LoadError::Missing(map)),
    };
    let fd = data.fd().as_fd().try_clone_to_owned().map_err(|source| error(MapError::IoError(source)))?;
    Ok(kind(MapData::from_fd(fd).map_err(error)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in Linux 6.18, and in 5.10, which has no such line.
    #[test]
    fn fdinfo() {
        let new = "pos:\t0\nprog_type:\t5\nrun_cnt:\t0\nrecursion_misses:\t3\nverified_insns:\t48\n";
        assert_eq!(misses_of(new), Some(3));
        assert_eq!(misses_of("pos:\t0\nprog_type:\t5\n"), None);
    }
}
