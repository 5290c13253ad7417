//! `gctrace malloc`: loading its programs alone, attaching them to one process, reading what they have added up.

use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, MapData, MapError, PerCpuArray},
    programs::{
        Program,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope},
    },
};
use gctrace_common::{
    config::{Config, ImageConfig, RubyEntry},
    malloc::{
        MAX_MALLOC_LIVE, MAX_MALLOC_PENDING, MallocBlock, MallocCookie, MallocCount, MallocPending,
        MallocTally, MallocTarget, malloc_count_index,
    },
};
use zerocopy::FromZeros as _;

use super::{
    AttachError, gvl, kernel_types,
    load::{self, LoadError, Programs},
    multi::{self, Multi, MultiError},
    requests,
    rings::StackRing,
    sample::{self, Stages},
    unwind::UnwindMaps,
    uprobes::Scope,
};
use crate::ruby::malloc::MallocSite;

/// The program at calls of allocation functions.
pub(super) const PROGRAM: &str = "malloc_hit";
/// What happens there, for messages.
const POINT: &str = "malloc";
/// The smallest ring that there is.
const NO_RING_BYTES: u32 = 4096;
/// How often the counters are read again at most; the program runs for a microsecond.
const SETTLE_TRIES: u32 = 100;

/// Which stacks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MallocOptions {
    /// Some of the calls'.
    pub stacks: bool,
    /// Their native frames, too.
    pub native: bool,
}

impl MallocOptions {
    /// The programs that are loaded.
    fn programs(self) -> Vec<&'static str> {
        let stages = sample::PROBE_STAGES.into_iter().filter(|_| self.stacks);
        let native = (self.stacks && self.native).then_some(sample::PROBE_NATIVE);
        [PROGRAM].into_iter().chain(stages).chain(native).collect()
    }

    /// How many these are.
    pub fn count(self) -> usize {
        self.programs().len()
    }
}

/// What the probes have done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MallocCost {
    /// Hits, also those of other processes: each has cost a trap.
    pub hits: u64,
    /// Stacks.
    pub stacks: u64,
}

/// The probes of one window. Dropping it detaches them.
pub struct MallocProbes {
    programs: Programs,
    /// Kept, or the program could not jump to them.
    _stages: Stages,
    stacks: Option<StackRing>,
    unwind: Option<UnwindMaps>,
    images: Array<MapData, ImageConfig>,
    rubies: HashMap<MapData, u32, RubyEntry>,
    links: Vec<std::os::fd::OwnedFd>,
    gate: Array<MapData, u32>,
    target: Array<MapData, MallocTarget>,
    tallies: PerCpuArray<MapData, MallocTally>,
    live: HashMap<MapData, u64, MallocBlock>,
    pending: HashMap<MapData, u32, MallocPending>,
}

/// What was added up in a window.
#[derive(Debug)]
pub struct MallocRead {
    /// The tallies by their index ([`gctrace_common::malloc`]), of all CPUs together.
    pub tallies: Vec<MallocTally>,
    /// Memory that is still followed.
    pub live: Vec<MallocBlock>,
}

impl MallocProbes {
    /// Loads the programs with their gate closed. They need attach cookies (Linux 5.15).
    ///
    /// # Errors
    ///
    /// The kernel refuses one.
    pub fn load(options: MallocOptions) -> Result<Self, LoadError> {
        let object = load::object();
        load::check_abi(object)?;
        let mut loader = EbpfLoader::new();
        let mut config = Config::new_zeroed();
        config.has_cookie = 1;
        // The way from a thread to its Ruby stack begins there.
        config.task_thread_pointer = kernel_types::task_thread_pointer().unwrap_or_else(|error| {
            log::info!("{error}; the Ruby stacks of calls cannot be read");
            0
        });
        loader.override_global("CONFIG", &config, true);
        sample::size_maps(&mut loader, None, false)?;
        gvl::size_maps(&mut loader, false);
        requests::size_maps(&mut loader, None);
        let native = options.stacks && options.native;
        for map in UnwindMaps::NAMES.into_iter().filter(|_| !native) {
            loader.map_max_entries(map, 1);
        }
        for ring in ["GC_RING", "LIFE_RING"].into_iter().chain((!options.stacks).then_some("STACK_RING")) {
            loader.map_max_entries(ring, NO_RING_BYTES);
        }
        loader.map_max_entries("MALLOC_LIVE", MAX_MALLOC_LIVE);
        loader.map_max_entries("MALLOC_PENDING", MAX_MALLOC_PENDING);
        let mut ebpf = loader.load(object)?;
        let names = options.programs();
        let multi = match Multi::load(&ebpf, object, &names) {
            Ok(multi) => Some(multi),
            Err(MultiError::Unsupported) => None,
            Err(error) => {
                log::warn!("{error}; each probe is attached separately");
                None
            }
        };
        for name in names.iter().copied().filter(|_| multi.is_none()) {
            let program = ebpf.program_mut(name).ok_or(LoadError::Missing(name))?;
            load::load_late(program).map_err(|source| LoadError::Program { program: name, source })?;
        }
        let mut programs = Programs { ebpf, multi };
        let stages = sample::link_loaded(&mut programs, &names)?;
        let ebpf = &mut programs.ebpf;
        let mut probes = Self {
            stacks: options.stacks.then(|| StackRing::take(ebpf)).transpose()?,
            unwind: native.then(|| UnwindMaps::take(ebpf)).transpose()?,
            images: map(ebpf, "IMAGES")?,
            rubies: map(ebpf, "RUBIES")?,
            gate: map(ebpf, "GATE")?,
            target: map(ebpf, "MALLOC_TARGET")?,
            tallies: map(ebpf, "MALLOC_TALLIES")?,
            live: map(ebpf, "MALLOC_LIVE")?,
            pending: map(ebpf, "MALLOC_PENDING")?,
            programs,
            _stages: stages,
            links: Vec::new(),
        };
        probes.close().map_err(|error| LoadError::Gate(Box::new(error)))?;
        Ok(probes)
    }

    /// Where stacks come, and where unwind tables go; once.
    pub fn take_stacks(&mut self) -> Option<(StackRing, Option<UnwindMaps>)> {
        Some((self.stacks.take()?, self.unwind.take()))
    }

    /// Tells the programs how the Ruby stacks of the process are walked. Its image has the index 0.
    ///
    /// # Errors
    ///
    /// A map cannot be written.
    pub fn set_ruby(&mut self, pid: u32, bias: u64, config: &ImageConfig) -> Result<(), AttachError> {
        let closed = ImageConfig { open: 0, ..*config };
        self.images.set(0, closed, 0).map_err(|source| written("IMAGES", source))?;
        let entry = RubyEntry { image: 0, bias, known: 1, ..RubyEntry::default() };
        self.rubies.insert(pid, entry, 0).map_err(|source| written("RUBIES", source))
    }

    /// Attaches all sites of a file, for one process where the kernel can tell it; the program looks at this process only.
    ///
    /// # Errors
    ///
    /// The kernel refuses one.
    pub fn attach(
        &mut self,
        target: MallocTarget,
        sites: &[MallocSite],
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        self.target.set(0, target, 0).map_err(|source| written("MALLOC_TARGET", source))?;
        let cookie = |site: &MallocSite| MallocCookie { place: site.place as u8, size: site.size }.pack();
        let failed = |offset: u64, source: Box<dyn std::error::Error + Send + Sync>| AttachError::Attach {
            point: POINT,
            offset,
            path: PathBuf::from(path),
            source,
        };
        if let Some(program) = self.programs.multi.as_ref().and_then(|multi| multi.program(PROGRAM)) {
            let places: Vec<_> = sites.iter().map(|site| (site.file_offset.0, cookie(site))).collect();
            let first = places.first().map_or(0, |place| place.0);
            let pid: Option<NonZeroU32> = scope.pid();
            let link = Multi::attach(program, false, path, &places, pid);
            self.links.push(link.map_err(|source| failed(first, source.into()))?);
            return Ok(());
        }
        let Some(Program::UProbe(program)) = self.programs.ebpf.program_mut(PROGRAM) else {
            return Err(AttachError::NoProgram(PROGRAM));
        };
        for site in sites {
            let location = UProbeAttachLocation::AbsoluteOffset(site.file_offset.0);
            let point = UProbeAttachPoint { location, cookie: Some(cookie(site)) };
            let scope: UProbeScope = scope.of_aya();
            program.attach(point, path, scope).map_err(|error| failed(site.file_offset.0, error.into()))?;
        }
        Ok(())
    }

    /// From here on calls count.
    ///
    /// # Errors
    ///
    /// The map cannot be written.
    pub fn open(&mut self) -> Result<(), AttachError> {
        self.gate.set(0, 0, 0).map_err(|source| written("GATE", source))
    }

    /// From here on nothing counts.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn close(&mut self) -> Result<(), AttachError> {
        self.gate.set(0, 1, 0).map_err(|source| written("GATE", source))
    }

    /// What they have done so far.
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn cost(&self) -> Result<MallocCost, AttachError> {
        let calls = |count| self.tally(malloc_count_index(count)).map(|tally| tally.calls);
        let hits = calls(MallocCount::Hits)? + calls(MallocCount::OtherHits)?;
        Ok(MallocCost { hits, stacks: calls(MallocCount::Sampled)? })
    }

    /// Memory that is followed at this moment and whose stack was taken: its thread and time.
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

    /// Detaches the probes after [`MallocProbes::close`], and reads what was added up.
    ///
    /// # Errors
    ///
    /// A map cannot be read.
    pub fn finish(mut self) -> Result<MallocRead, AttachError> {
        // A program that had passed the gate may be in the middle of its work.
        let mut last = self.cost()?;
        for _ in 0..SETTLE_TRIES {
            std::thread::sleep(Duration::from_millis(1));
            let next = self.cost()?;
            if next == last {
                break;
            }
            last = next;
        }
        multi::close(std::mem::take(&mut self.links));
        let indices = 0..self.tallies.len();
        let tallies = indices.map(|index| self.tally(index)).collect::<Result<_, _>>()?;
        let mut live = Vec::new();
        for entry in &self.live {
            live.push(entry.map_err(|source| read("MALLOC_LIVE", source))?.1);
        }
        // Memory of threads that were in `realloc` at the end is not gone.
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

fn map<M: TryFrom<aya::maps::Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<M, LoadError> {
    let taken = ebpf.take_map(name).ok_or(LoadError::Missing(name))?;
    M::try_from(taken).map_err(|source| LoadError::Map { map: name, source })
}

fn written(map: &'static str, source: MapError) -> AttachError {
    AttachError::Map { map, source: Box::new(source) }
}

fn read(map: &'static str, source: MapError) -> AttachError {
    AttachError::ReadMap { map, source: Box::new(source) }
}
