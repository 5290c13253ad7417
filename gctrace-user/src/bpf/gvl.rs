//! Watching the GVL: loading and attaching its programs, reading what they have added up.

use std::{collections::BTreeSet, path::Path, time::Duration};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{HashMap, MapData, MapError},
    programs::{
        Program,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLinkId, UProbeScope},
    },
};
use gctrace_common::{
    config::Config,
    gvl::{
        GvlCookie, GvlEdge, GvlEdgeKey, GvlKey, GvlLock, GvlThread, MAX_GVL_EDGES, MAX_GVL_LOCKS,
        MAX_GVL_THREADS,
    },
};

use super::{AttachError, Probes, Scope, load::LoadError};
use crate::ruby::{
    ThreadPlace,
    gvl_plan::{GvlPlan, GvlProbe},
};

/// Programs at GVL points (they need attach cookies, Linux 5.15), in the order of [`GvlPoint`](gctrace_common::gvl::GvlPoint), and the one at a return.
pub(super) const PROGRAMS: [&str; 6] =
    ["gvl_started", "gvl_ready", "gvl_resumed", "gvl_suspended", "gvl_exited", "gvl_acquired"];
/// Maps and how many entries they have.
const MAPS: [(&str, u32); 3] =
    [("GVL_THREADS", MAX_GVL_THREADS), ("GVL_LOCKS", MAX_GVL_LOCKS), ("GVL_EDGES", MAX_GVL_EDGES)];

/// How the GVL is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlOptions {
    /// A wait that takes at least this long is reported.
    pub threshold: Duration,
}

/// What the programs are told.
pub(super) fn configure(config: &mut Config, options: Option<GvlOptions>) {
    let Some(options) = options else { return };
    config.gvl = 1;
    config.gvl_threshold_ns = u64::try_from(options.threshold.as_nanos()).unwrap_or(u64::MAX);
}

/// Makes the maps small where they are not needed.
pub(super) fn size_maps(loader: &mut EbpfLoader<'_>, watched: bool) {
    for (map, entries) in MAPS {
        loader.map_max_entries(map, if watched { entries } else { 1 });
    }
}

impl Probes {
    /// Attaches the GVL probes of an image through `path`, or none: a failure detaches those already attached.
    pub fn attach_gvl(
        &mut self,
        image: u32,
        plan: &GvlPlan,
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        let mut done = Vec::with_capacity(plan.probes.len());
        for probe in &plan.probes {
            match self.attach_gvl_probe(image, probe, path, scope) {
                Ok(link) => done.push(link),
                Err(error) => {
                    self.detach_gvl(done);
                    return Err(error);
                }
            }
        }
        self.attached += plan.probes.len();
        Ok(())
    }

    fn attach_gvl_probe(
        &mut self,
        image: u32,
        probe: &GvlProbe,
        path: &Path,
        scope: Scope,
    ) -> Result<(&'static str, UProbeLinkId), AttachError> {
        let point = probe.point.name();
        let cookie = cookie(image, probe).ok_or_else(|| AttachError::Cookie {
            point,
            address: probe.address.0,
            path: path.to_owned(),
        })?;
        let name = if probe.at_return { PROGRAMS[5] } else { PROGRAMS[probe.point as usize] };
        let Some(Program::UProbe(program)) = self.ebpf.program_mut(name) else {
            return Err(AttachError::NoProgram(name));
        };
        let at = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(probe.file_offset.0),
            cookie: Some(cookie.pack()),
        };
        let scope = match scope {
            Scope::All => UProbeScope::AllProcesses,
            Scope::One(pid) => UProbeScope::OneProcess(pid),
        };
        let link = program.attach(at, path, scope).map_err(|source| AttachError::Attach {
            point,
            offset: probe.file_offset.0,
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        Ok((name, link))
    }

    fn detach_gvl(&mut self, links: Vec<(&'static str, UProbeLinkId)>) {
        for (name, link) in links {
            let Some(Program::UProbe(program)) = self.ebpf.program_mut(name) else { continue };
            if let Err(error) = program.detach(link) {
                log::warn!("detaching a probe after a failed attach: {error}");
            }
        }
    }
}

/// The cookie of a probe, if everything fits into it.
fn cookie(image: u32, probe: &GvlProbe) -> Option<GvlCookie> {
    let (register, in_memory, displacement) = match probe.place {
        Some(ThreadPlace::Register(register)) => (register, false, 0),
        Some(ThreadPlace::Memory(register, displacement)) => (register, true, displacement),
        None => (0, false, 0),
    };
    // At a return the instruction is not one of the image's.
    let address = if probe.at_return { 0 } else { probe.address.0 };
    let image = u8::try_from(image).ok()?;
    let cookie = GvlCookie { image, register, in_memory, displacement, address };
    cookie.fits().then_some(cookie)
}

/// What the programs have added up for threads that have not ended, and who waited for whom.
#[derive(Debug, Default)]
pub struct GvlRead {
    /// The threads.
    pub threads: Vec<GvlThread>,
    /// Who waited for whom.
    pub edges: Vec<(GvlEdgeKey, GvlEdge)>,
}

/// Reads what the programs have added up.
pub struct GvlReader {
    threads: HashMap<MapData, GvlKey, GvlThread>,
    locks: HashMap<MapData, GvlKey, GvlLock>,
    edges: HashMap<MapData, GvlEdgeKey, GvlEdge>,
}

impl GvlReader {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, LoadError> {
        fn map<K: Pod, V: Pod>(
            ebpf: &mut Ebpf,
            map: &'static str,
        ) -> Result<HashMap<MapData, K, V>, LoadError> {
            let taken = ebpf.take_map(map).ok_or(LoadError::Missing(map))?;
            HashMap::try_from(taken).map_err(|source| LoadError::Map { map, source })
        }
        let [threads, locks, edges] = MAPS.map(|(name, _)| name);
        Ok(Self { threads: map(ebpf, threads)?, locks: map(ebpf, locks)?, edges: map(ebpf, edges)? })
    }

    /// Takes out what is known of a process that is gone or has become another program (then with `execs`, how often it had
    /// been another one before); of all processes without one.
    pub fn take_out(&mut self, of: Option<(u32, u32)>) -> Result<GvlRead, MapError> {
        let wanted = |tgid: u32, execs: u32| of.is_none_or(|of| of == (tgid, execs));
        let mut read = GvlRead::default();
        for key in keys(&self.threads, |key| wanted(key.tgid, key.execs), MAX_GVL_THREADS)? {
            match self.threads.get(&key, 0) {
                Ok(thread) => read.threads.push(thread),
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

fn gone(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
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
