//! Programs that a command loads on its own, one of them attached to a single process: `gctrace malloc`, `gctrace heap --leaks`.

use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, MapData, MapError},
    programs::{
        Program,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope},
    },
};
use gctrace_common::config::{Config, ImageConfig, RubyEntry};
use zerocopy::FromZeros as _;

use super::{
    AttachError,
    attach::uprobes::Scope,
    errors::LoadError,
    gvl, kernel_types,
    links::{self, Link},
    multi::{Multi, MultiError},
    programs::{self, Programs},
    requests,
    rings::StackRing,
    sample::{self, Stages},
    unwind::NativeMaps,
};

/// The smallest possible ring size (one page), for rings that are not used.
const NO_RING_BYTES: u32 = 4096;

/// Map entries for the one traced process, with spare room.
const ONE_PROCESS: u32 = 16;

/// Which stacks are taken at the probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeStacks {
    /// Take stacks at all.
    pub stacks: bool,
    /// Include native frames.
    pub native: bool,
}

impl ProbeStacks {
    /// The programs that are loaded in addition to the command's own.
    pub(super) fn programs(self) -> impl Iterator<Item = &'static str> {
        let stages = sample::PROBE_STAGES.into_iter().filter(move |_| self.stacks);
        stages.chain((self.stacks && self.native).then_some(sample::PROBE_NATIVE))
    }
}

/// The program of a command and the maps that it uses.
#[derive(Clone, Copy)]
pub(super) struct Own {
    pub(super) program: &'static str,
    /// Name of the probed event, for messages.
    pub(super) point: &'static str,
    /// The maps that the program needs: name and number of entries.
    pub(super) maps: &'static [(&'static str, u32)],
}

/// The loaded programs and maps. Dropping it detaches the probes.
pub(super) struct Alone {
    own: Own,
    pub(super) programs: Programs,
    /// Held only to keep the stages alive: without them the program cannot tail-call.
    _stages: Stages,
    stacks: Option<StackRing>,
    unwind: Option<NativeMaps>,
    images: Array<MapData, ImageConfig>,
    rubies: HashMap<MapData, u32, RubyEntry>,
    links: Vec<Link>,
    gate: Array<MapData, u32>,
}

impl Alone {
    /// Loads the programs with their gate closed. They need attach cookies (Linux 5.15).
    pub(super) fn load(own: Own, options: ProbeStacks) -> Result<Self, LoadError> {
        let object = programs::object();
        programs::check_abi(object)?;
        let mut loader = EbpfLoader::new();
        let mut config = Config::new_zeroed();
        config.has_cookie = 1;
        // The programs start from the thread pointer to find a thread's Ruby stack.
        config.task_thread_pointer = kernel_types::task_thread_pointer().unwrap_or_else(|error| {
            log::info!("{error}; the Ruby stacks of calls cannot be read");
            0
        });
        loader.override_global("CONFIG", &config, true);
        sample::size_maps(&mut loader, None, false)?;
        gvl::size_maps(&mut loader, false);
        requests::size_maps(&mut loader, None, false)?;
        let native = options.stacks && options.native;
        for map in NativeMaps::NAMES.into_iter().filter(|_| !native) {
            loader.map_max_entries(map, 1);
        }
        for ring in ["GC_RING", "LIFE_RING"].into_iter().chain((!options.stacks).then_some("STACK_RING")) {
            loader.map_max_entries(ring, NO_RING_BYTES);
        }
        for map in ["PROCESSES", "RUBIES", "EXECS"] {
            loader.map_max_entries(map, ONE_PROCESS);
        }
        for (map, entries) in own.maps {
            loader.map_max_entries(map, *entries);
        }
        let mut ebpf = loader.load(object)?;
        let names: Vec<&'static str> = [own.program].into_iter().chain(options.programs()).collect();
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
            programs::load_late(program).map_err(|source| LoadError::Program { program: name, source })?;
        }
        let mut programs = Programs { ebpf, multi };
        let stages = sample::link_loaded(&mut programs, &names)?;
        let ebpf = &mut programs.ebpf;
        let mut alone = Self {
            own,
            stacks: options.stacks.then(|| StackRing::take(ebpf)).transpose()?,
            unwind: native.then(|| NativeMaps::take(ebpf)).transpose()?,
            images: map(ebpf, "IMAGES")?,
            rubies: map(ebpf, "RUBIES")?,
            gate: map(ebpf, "GATE")?,
            programs,
            _stages: stages,
            links: Vec::new(),
        };
        alone.close().map_err(|error| LoadError::Gate(Box::new(error)))?;
        Ok(alone)
    }

    /// The ring that stacks arrive in and the maps for unwind tables; `None` after the first call.
    pub(super) fn take_stacks(&mut self) -> Option<(StackRing, Option<NativeMaps>)> {
        Some((self.stacks.take()?, self.unwind.take()))
    }

    /// Configures how the programs walk the Ruby stacks of the process. Its image gets index 0.
    pub(super) fn set_ruby(&mut self, pid: u32, bias: u64, config: &ImageConfig) -> Result<(), AttachError> {
        let closed = ImageConfig { open: 0, ..*config };
        self.images.set(0, closed, 0).map_err(|source| written("IMAGES", source))?;
        let entry = RubyEntry { image: 0, bias, known: 1, ..RubyEntry::default() };
        self.rubies.insert(pid, entry, 0).map_err(|source| written("RUBIES", source))
    }

    /// Attaches the program at `places` (offset, cookie) of a file; restricted to one process where the kernel can filter by process.
    pub(super) fn attach(
        &mut self,
        places: &[(u64, u64)],
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        let Own { program, point, .. } = self.own;
        let failed = |offset: u64, source: Box<dyn std::error::Error + Send + Sync>| AttachError::Attach {
            point,
            offset,
            path: PathBuf::from(path),
            source,
        };
        if let Some(program) = self.programs.multi.as_ref().and_then(|multi| multi.program(program)) {
            let first = places.first().map_or(0, |place| place.0);
            let pid: Option<NonZeroU32> = scope.pid();
            let link = Multi::attach(program, false, path, places, pid);
            self.links.push(Link::of(link.map_err(|source| failed(first, source.into()))?));
            return Ok(());
        }
        let Some(Program::UProbe(uprobe)) = self.programs.ebpf.program_mut(program) else {
            return Err(AttachError::NoProgram(program));
        };
        for &(offset, cookie) in places {
            let location = UProbeAttachLocation::AbsoluteOffset(offset);
            let point = UProbeAttachPoint { location, cookie: Some(cookie) };
            let scope: UProbeScope = scope.of_aya();
            let link = uprobe.attach(point, path, scope).and_then(|link| uprobe.take_link(link));
            self.links.push(Link::of(link.map_err(|error| failed(offset, error.into()))?));
        }
        Ok(())
    }

    /// Opens the gate: hits count from now on.
    pub(super) fn open(&mut self) -> Result<(), AttachError> {
        self.gate.set(0, 0, 0).map_err(|source| written("GATE", source))
    }

    /// Closes the gate: nothing counts from now on.
    pub(super) fn close(&mut self) -> Result<(), AttachError> {
        self.gate.set(0, 1, 0).map_err(|source| written("GATE", source))
    }

    /// Detaches everything.
    pub(super) fn detach(&mut self) {
        links::detach(std::mem::take(&mut self.links));
    }
}

pub(super) fn map<M: TryFrom<aya::maps::Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<M, LoadError> {
    let taken = ebpf.take_map(name).ok_or(LoadError::Missing(name))?;
    M::try_from(taken).map_err(|source| LoadError::Map { map: name, source })
}

pub(super) fn written(map: &'static str, source: MapError) -> AttachError {
    AttachError::Map { map, source: Box::new(source) }
}

pub(super) fn read(map: &'static str, source: MapError) -> AttachError {
    AttachError::ReadMap { map, source: Box::new(source) }
}
