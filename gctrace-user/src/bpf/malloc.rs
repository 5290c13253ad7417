//! `gctrace malloc`: loading its program alone, attaching it to one process, reading what it has added up.

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
use gctrace_common::malloc::{
    MAX_MALLOC_LIVE, MAX_MALLOC_PENDING, MallocBlock, MallocCookie, MallocCount, MallocPending, MallocTally,
    MallocTarget, malloc_count_index,
};

use super::{
    AttachError, gvl,
    load::{self, LoadError},
    multi::{self, Multi, MultiError},
    requests, sample,
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

/// The probes of one window. Dropping it detaches them.
pub struct MallocProbes {
    ebpf: Ebpf,
    multi: Option<Multi>,
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
    /// Loads the program with its gate closed. It needs attach cookies (Linux 5.15).
    ///
    /// # Errors
    ///
    /// The kernel refuses it.
    pub fn load() -> Result<Self, LoadError> {
        let object = load::object();
        load::check_abi(object)?;
        let mut loader = EbpfLoader::new();
        sample::size_maps(&mut loader, None, false)?;
        gvl::size_maps(&mut loader, false);
        requests::size_maps(&mut loader, None);
        for map in UnwindMaps::NAMES {
            loader.map_max_entries(map, 1);
        }
        for ring in ["GC_RING", "STACK_RING", "LIFE_RING"] {
            loader.map_max_entries(ring, NO_RING_BYTES);
        }
        loader.map_max_entries("MALLOC_LIVE", MAX_MALLOC_LIVE);
        loader.map_max_entries("MALLOC_PENDING", MAX_MALLOC_PENDING);
        let mut ebpf = loader.load(object)?;
        let multi = match Multi::load(&ebpf, object, &[PROGRAM]) {
            Ok(multi) => Some(multi),
            Err(MultiError::Unsupported) => None,
            Err(error) => {
                log::warn!("{error}; each probe is attached separately");
                None
            }
        };
        if multi.is_none() {
            let program = ebpf.program_mut(PROGRAM).ok_or(LoadError::Missing(PROGRAM))?;
            load::load_late(program).map_err(|source| LoadError::Program { program: PROGRAM, source })?;
        }
        let mut probes = Self {
            gate: map(&mut ebpf, "GATE")?,
            target: map(&mut ebpf, "MALLOC_TARGET")?,
            tallies: map(&mut ebpf, "MALLOC_TALLIES")?,
            live: map(&mut ebpf, "MALLOC_LIVE")?,
            pending: map(&mut ebpf, "MALLOC_PENDING")?,
            ebpf,
            multi,
            links: Vec::new(),
        };
        probes.close().map_err(|error| LoadError::Gate(Box::new(error)))?;
        Ok(probes)
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
        if let Some(program) = self.multi.as_ref().and_then(|multi| multi.program(PROGRAM)) {
            let places: Vec<_> = sites.iter().map(|site| (site.file_offset.0, cookie(site))).collect();
            let first = places.first().map_or(0, |place| place.0);
            let pid: Option<NonZeroU32> = scope.pid();
            let link = Multi::attach(program, false, path, &places, pid);
            self.links.push(link.map_err(|source| failed(first, source.into()))?);
            return Ok(());
        }
        let Some(Program::UProbe(program)) = self.ebpf.program_mut(PROGRAM) else {
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

    /// Hits so far, also those of other processes: each has cost a trap.
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn hits(&self) -> Result<u64, AttachError> {
        let [own, other] =
            [MallocCount::Hits, MallocCount::OtherHits].map(|count| self.tally(malloc_count_index(count)));
        Ok(own?.calls + other?.calls)
    }

    /// Detaches the probes after [`MallocProbes::close`], and reads what was added up.
    ///
    /// # Errors
    ///
    /// A map cannot be read.
    pub fn finish(mut self) -> Result<MallocRead, AttachError> {
        // A program that had passed the gate may be in the middle of its work.
        let mut last = self.hits()?;
        for _ in 0..SETTLE_TRIES {
            std::thread::sleep(Duration::from_millis(1));
            let next = self.hits()?;
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
