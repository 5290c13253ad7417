//! `gctrace malloc`: loading its programs separately, attaching them to one process, reading their sums.

use std::{path::Path, time::Duration};

use aya::maps::{Array, HashMap, MapData, PerCpuArray};
use gctrace_common::{
    config::ImageConfig,
    malloc::{
        MAX_MALLOC_LIVE, MAX_MALLOC_PENDING, MallocBlock, MallocCookie, MallocCount, MallocPending,
        MallocTally, MallocTarget, malloc_count_index,
    },
};

use super::{
    AttachError,
    alone::{Alone, Own, ProbeStacks, map, read, written},
    attach::uprobes::Scope,
    errors::LoadError,
    rings::StackRing,
    unwind::NativeMaps,
};
use crate::ruby::malloc::MallocSite;

/// The program at calls of allocation functions.
pub(super) const PROGRAM: &str = "malloc_hit";
/// The program and its maps.
const OWN: Own = Own {
    program: PROGRAM,
    point: "malloc",
    maps: &[("MALLOC_LIVE", MAX_MALLOC_LIVE), ("MALLOC_PENDING", MAX_MALLOC_PENDING)],
};
/// Maximum number of times the counters are read until they settle; the program runs for a microsecond.
const SETTLE_TRIES: u32 = 100;

/// The work that the probes have done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MallocCost {
    /// Hits of the process; each cost a trap.
    pub hits: u64,
    /// Hits of other processes; each cost a trap as well.
    pub other_hits: u64,
    /// Stacks taken.
    pub stacks: u64,
}

/// The probes of one window. Dropping it detaches them.
pub struct MallocProbes {
    alone: Alone,
    target: Array<MapData, MallocTarget>,
    tallies: PerCpuArray<MapData, MallocTally>,
    live: HashMap<MapData, u64, MallocBlock>,
    pending: HashMap<MapData, u32, MallocPending>,
}

/// The sums of a window.
#[derive(Debug)]
pub struct MallocRead {
    /// The tallies by their index ([`gctrace_common::malloc`]), summed over all CPUs.
    pub tallies: Vec<MallocTally>,
    /// Memory that has not been freed.
    pub live: Vec<MallocBlock>,
}

impl MallocProbes {
    /// Loads the programs with their gate closed. They need attach cookies (Linux 5.15).
    ///
    /// # Errors
    ///
    /// The kernel refuses a program.
    pub fn load(options: ProbeStacks) -> Result<Self, LoadError> {
        let mut alone = Alone::load(OWN, options)?;
        let ebpf = &mut alone.programs.ebpf;
        Ok(Self {
            target: map(ebpf, "MALLOC_TARGET")?,
            tallies: map(ebpf, "MALLOC_TALLIES")?,
            live: map(ebpf, "MALLOC_LIVE")?,
            pending: map(ebpf, "MALLOC_PENDING")?,
            alone,
        })
    }

    /// Number of programs that are loaded.
    pub fn programs(options: ProbeStacks) -> usize {
        1 + options.programs().count()
    }

    /// The ring that stacks arrive in and the maps for unwind tables; `None` after the first call.
    pub fn take_stacks(&mut self) -> Option<(StackRing, Option<NativeMaps>)> {
        self.alone.take_stacks()
    }

    /// Configures how the programs walk the Ruby stacks of the process. Its image gets index 0.
    ///
    /// # Errors
    ///
    /// A map cannot be written.
    pub fn set_ruby(&mut self, pid: u32, bias: u64, config: &ImageConfig) -> Result<(), AttachError> {
        self.alone.set_ruby(pid, bias, config)
    }

    /// Attaches all sites of a file, restricted to one process where the kernel can filter by process; the program ignores all others.
    ///
    /// # Errors
    ///
    /// The kernel refuses a probe.
    pub fn attach(
        &mut self,
        target: MallocTarget,
        sites: &[MallocSite],
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        self.target.set(0, target, 0).map_err(|source| written("MALLOC_TARGET", source))?;
        let cookie = |site: &MallocSite| MallocCookie { place: site.place as u8, size: site.size }.pack();
        let places: Vec<_> = sites.iter().map(|site| (site.file_offset.0, cookie(site))).collect();
        self.alone.attach(&places, path, scope)
    }

    /// Opens the gate: calls count from now on.
    ///
    /// # Errors
    ///
    /// The map cannot be written.
    pub fn open(&mut self) -> Result<(), AttachError> {
        self.alone.open()
    }

    /// Closes the gate: nothing counts from now on.
    ///
    /// # Errors
    ///
    /// The map cannot be written.
    pub fn close(&mut self) -> Result<(), AttachError> {
        self.alone.close()
    }

    /// The work that the probes have done so far.
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn cost(&self) -> Result<MallocCost, AttachError> {
        let calls = |count| self.tally(malloc_count_index(count)).map(|tally| tally.calls);
        Ok(MallocCost {
            hits: calls(MallocCount::Hits)?,
            other_hits: calls(MallocCount::OtherHits)?,
            stacks: calls(MallocCount::Sampled)?,
        })
    }

    /// The currently followed memory that has a stack: thread and time of the stack.
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn sampled_now(&self) -> Result<std::collections::HashSet<(u32, u64)>, AttachError> {
        let key = |block: MallocBlock| (block.sampled_ns != 0).then_some((block.tid, block.sampled_ns));
        let mut keys = std::collections::HashSet::new();
        for entry in &self.live {
            keys.extend(key(entry.map_err(|source| read("MALLOC_LIVE", source))?.1));
        }
        for entry in &self.pending {
            keys.extend(key(entry.map_err(|source| read("MALLOC_PENDING", source))?.1.block));
        }
        Ok(keys)
    }

    /// Detaches the probes after [`MallocProbes::close`] and reads the sums.
    ///
    /// # Errors
    ///
    /// A map cannot be read.
    pub fn finish(mut self) -> Result<MallocRead, AttachError> {
        // A program that passed the gate before it closed may still be running.
        let mut last = self.cost()?;
        for _ in 0..SETTLE_TRIES {
            std::thread::sleep(Duration::from_millis(1));
            let next = self.cost()?;
            if next == last {
                break;
            }
            last = next;
        }
        self.alone.detach();
        let indices = 0..self.tallies.len();
        let tallies = indices.map(|index| self.tally(index)).collect::<Result<_, _>>()?;
        let mut live = Vec::new();
        for entry in &self.live {
            live.push(entry.map_err(|source| read("MALLOC_LIVE", source))?.1);
        }
        // Memory of threads that were in `realloc` at the end is still allocated.
        for entry in &self.pending {
            let pending = entry.map_err(|source| read("MALLOC_PENDING", source))?.1;
            live.extend((pending.block.born != MallocPending::UNKNOWN).then_some(pending.block));
        }
        Ok(MallocRead { tallies, live })
    }

    fn tally(&self, index: u32) -> Result<MallocTally, AttachError> {
        let cells = self.tallies.get(&index, 0).map_err(|source| read("MALLOC_TALLIES", source))?;
        Ok(cells.iter().fold(MallocTally::default(), |sum, cell| MallocTally {
            calls: sum.calls + cell.calls,
            bytes: sum.bytes + cell.bytes,
        }))
    }
}
