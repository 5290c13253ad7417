//! Attaching probes to images and telling the programs which processes are selected.

use std::{
    collections::{HashMap as Map, VecDeque},
    path::Path,
    thread::JoinHandle,
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, MapError},
    programs::Program,
};
use gctrace_common::{
    config::{Config, ImageConfig, MAX_PROCESSES, ProcessEntry, RubyEntry, SELECT_CGROUP_IDS},
    cookie::{Cookie, NO_REGISTER},
    event::Point,
};

use self::{
    gvl::GvlAttached,
    names::Names,
    requests::Servers,
    retire::ImageLinks,
    uprobes::{Scope, Uprobe},
};
use super::{
    errors::{AttachError, LoadError},
    links::{self, Link},
    multi::Multi,
    programs::{GC_PROGRAMS, Programs, optional_program},
    rings::NO_EXIST,
    sample::{Clocks, Stages},
};
use crate::ruby::plan::{OptionalEvent, OptionalProbe, ProbeSite};

mod gvl;
pub(super) mod names;
pub(super) mod phases;
pub(super) mod requests;
mod retire;
pub(super) mod uprobes;

/// The attached programs. Dropping it detaches everything.
#[expect(clippy::struct_excessive_bools, reason = "each is a separate fact about the kernel or the run")]
pub struct Probes {
    ebpf: Ebpf,
    /// The uprobes, if one link can attach many.
    multi: Option<Multi>,
    /// The links of each image's probes, except GVL probes.
    links: Map<u32, ImageLinks>,
    images: Array<MapData, ImageConfig>,
    processes: HashMap<MapData, u32, ProcessEntry>,
    rubies: HashMap<MapData, u32, RubyEntry>,
    cgroups: HashMap<MapData, u64, u32>,
    cgroup_levels: Array<MapData, u64>,
    names: Names,
    asks_ancestors: bool,
    gate: Array<MapData, u32>,
    /// Processes whose requests are traced; `None` if requests cannot be traced.
    servers: Option<Servers>,
    /// Held only to keep the stages alive: without them the programs cannot tail-call.
    _stages: Stages,
    /// The per-CPU sampling clocks, if CPU stacks are sampled.
    clocks: Option<Clocks>,
    has_cookie: bool,
    reads_threads: bool,
    next_image: u32,
    /// Indices of images that are no longer probed, oldest first, with the threads that detach their probes.
    free_images: VecDeque<(u32, Option<JoinHandle<()>>)>,
    attached: usize,
    gvl: Vec<GvlAttached>,
    /// Links to the futex or scheduler tracepoints of the GVL.
    tracepoints: Vec<Link>,
    /// Links to tracepoints, including those of the process lifecycle, that stay attached for the whole run.
    lasting: Vec<Link>,
    /// Whether GVL probes are temporarily detached.
    gvl_paused: bool,
}

impl Probes {
    /// Number of instructions that the verifier walked for each program, largest first; empty on kernels that do not report it.
    pub(super) fn verified_instructions(&self) -> Vec<(String, u32)> {
        let walked = |program: &Program| program.info().ok()?.verified_instruction_count();
        let programs = self.ebpf.programs();
        let mut all: Vec<_> =
            programs.filter_map(|(name, program)| Some((name.to_owned(), walked(program)?))).collect();
        all.sort_by_key(|(_, instructions)| std::cmp::Reverse(*instructions));
        log::debug!("instructions that the verifier walked: {all:?}");
        all
    }

    pub(super) fn new(
        programs: Programs,
        config: &Config,
        requests: bool,
        (stages, clocks): (Stages, Option<Clocks>),
        lasting: Vec<Link>,
    ) -> Result<Self, LoadError> {
        let Programs { mut ebpf, multi } = programs;
        let map = |ebpf: &mut Ebpf, name: &'static str| ebpf.take_map(name).ok_or(LoadError::Missing(name));
        let images = Array::try_from(map(&mut ebpf, "IMAGES")?)
            .map_err(|source| LoadError::Map { map: "IMAGES", source })?;
        let processes = HashMap::try_from(map(&mut ebpf, "PROCESSES")?)
            .map_err(|source| LoadError::Map { map: "PROCESSES", source })?;
        let rubies = HashMap::try_from(map(&mut ebpf, "RUBIES")?)
            .map_err(|source| LoadError::Map { map: "RUBIES", source })?;
        let names = HashMap::try_from(map(&mut ebpf, "NAMES")?)
            .map_err(|source| LoadError::Map { map: "NAMES", source })?;
        let asked = HashMap::try_from(map(&mut ebpf, "ASKED")?)
            .map_err(|source| LoadError::Map { map: "ASKED", source })?;
        let cgroups = HashMap::try_from(map(&mut ebpf, "CGROUPS")?)
            .map_err(|source| LoadError::Map { map: "CGROUPS", source })?;
        let cgroup_levels = Array::try_from(map(&mut ebpf, "CGROUP_LEVELS")?)
            .map_err(|source| LoadError::Map { map: "CGROUP_LEVELS", source })?;
        let gate = Array::try_from(map(&mut ebpf, "GATE")?)
            .map_err(|source| LoadError::Map { map: "GATE", source })?;
        let servers = requests.then(|| Servers::take(&mut ebpf)).transpose()?;
        Ok(Self {
            ebpf,
            multi,
            links: Map::new(),
            images,
            processes,
            rubies,
            cgroups,
            cgroup_levels,
            names: Names { names, asked },
            asks_ancestors: config.select & SELECT_CGROUP_IDS == 0,
            gate,
            servers,
            _stages: stages,
            clocks,
            has_cookie: config.has_cookie != 0,
            reads_threads: config.task_thread_pointer != 0,
            next_image: 0,
            free_images: VecDeque::new(),
            attached: 0,
            gvl: Vec::new(),
            tracepoints: Vec::new(),
            lasting,
            gvl_paused: false,
        })
    }

    /// Starts the clocks of CPUs that have come online; checks at most once a second.
    pub fn look_at_cpus(&mut self) -> Result<(), LoadError> {
        self.clocks.as_mut().map_or(Ok(()), |clocks| clocks.look(&mut self.ebpf))
    }

    pub(super) fn program_mut(&mut self, name: &str) -> Option<&mut Program> {
        self.ebpf.program_mut(name)
    }

    /// Whether the programs can read the per-thread state of a Ruby.
    pub fn reads_threads(&self) -> bool {
        self.reads_threads
    }

    /// Whether the kernel has attach cookies for uprobes (Linux 5.15). Without them a process must be registered
    /// with the programs by [`Probes::set_process`] before its hits can be read.
    pub fn has_cookie(&self) -> bool {
        self.has_cookie
    }

    /// Number of probes attached so far.
    pub fn attached(&self) -> usize {
        self.attached
    }

    /// Registers an image with the programs before its probes are attached, so that the stacks of its processes can be walked.
    pub fn add_image(&mut self, index: u32, config: &ImageConfig) -> Result<(), AttachError> {
        self.open_image(index, &ImageConfig { open: 0, ..*config })
    }

    /// Opens an image: from now on its hits are events. Called after all its probes are attached, because attaching
    /// takes a while and an incomplete set of events would be worse than no events.
    pub fn open_image(&mut self, index: u32, config: &ImageConfig) -> Result<(), AttachError> {
        self.images
            .set(index, config, 0)
            .map_err(|source| AttachError::Map { map: "IMAGES", source: Box::new(source) })
    }

    /// Ends the run: from now on nothing is counted or emitted, although detaching the probes takes a while.
    pub fn close(&mut self) -> Result<(), AttachError> {
        self.gate.set(0, 1, 0).map_err(|source| AttachError::Map { map: "GATE", source: Box::new(source) })
    }

    /// Attaches all sites of an image through `path`, or none: on failure, those already attached are detached.
    pub fn attach(
        &mut self,
        image: u32,
        sites: &[ProbeSite],
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        // Exits first, starts last: a pause that starts while probes are being attached is then seen with its end or not at all.
        let mut order: Vec<&ProbeSite> = sites.iter().collect();
        order.sort_by_key(|site| std::cmp::Reverse(site.point));
        let probes =
            order.into_iter().map(|site| self.uprobe(image, site, path)).collect::<Result<Vec<_>, _>>()?;
        let links = self.attach_uprobes(&probes, path, scope)?;
        self.keep(image, sites.len(), links);
        Ok(())
    }

    /// Attaches all probes of an optional event of an image, or none. They need attach cookies.
    pub fn attach_optional(
        &mut self,
        image: u32,
        (event, probes): (OptionalEvent, &[OptionalProbe]),
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        let (program, _) = optional_program(event);
        let point = program;
        let uprobe = |probe: &OptionalProbe| {
            let address = probe.address.0;
            let cookie = Cookie { image: image as u16, register: probe.register, address };
            if !cookie.fits() {
                return Err(AttachError::Cookie { point, address, path: path.to_owned() });
            }
            let offset = probe.file_offset.0;
            Ok(Uprobe { program, point, offset, cookie: Some(cookie.pack()), at_return: false })
        };
        let uprobes = probes.iter().map(uprobe).collect::<Result<Vec<_>, _>>()?;
        let links = self.attach_uprobes(&uprobes, path, scope)?;
        self.keep(image, probes.len(), links);
        Ok(())
    }

    fn uprobe(&self, image: u32, site: &ProbeSite, path: &Path) -> Result<Uprobe, AttachError> {
        let point = site.point.name();
        let cookie = Cookie {
            image: image as u16,
            register: site.register.unwrap_or(NO_REGISTER),
            address: site.address.0,
        };
        if !cookie.fits() {
            return Err(AttachError::Cookie { point, address: site.address.0, path: path.to_owned() });
        }
        Ok(Uprobe {
            program: program_name(site.point),
            point,
            offset: site.file_offset.0,
            cookie: self.has_cookie.then(|| cookie.pack()),
            at_return: false,
        })
    }

    /// Selects a process; its children inherit the selection in the kernel.
    pub fn select(&mut self, pid: u32) -> Result<(), AttachError> {
        self.update(pid, |entry| {
            entry.flags |= ProcessEntry::SELECTED;
            // The selection does not depend on the name of its program then. (It does not for a Ruby, either, whose events are being counted
            // in the entry.)
            if entry.flags & ProcessEntry::RUBY == 0 {
                entry.flags &= !ProcessEntry::NAMED;
            }
        })
    }

    /// Selects a process without its children.
    pub fn select_alone(&mut self, pid: u32) -> Result<(), AttachError> {
        self.update(pid, |entry| entry.flags |= ProcessEntry::SELECTED | ProcessEntry::ALONE)
    }

    /// The processes that are currently followed.
    pub fn followed(&self) -> Vec<u32> {
        self.processes.keys().flatten().collect()
    }

    /// Whether any process is followed.
    pub fn follows_any(&self) -> bool {
        self.processes.keys().next().is_some()
    }

    /// Whether the process was selected, by the user, or in the kernel by its name at the start of its program or by inheritance.
    pub fn is_selected(&self, pid: u32) -> bool {
        self.processes.get(&pid, 0).is_ok_and(|entry| entry.flags & ProcessEntry::SELECTED != 0)
    }

    /// Undoes the selection of a process.
    pub fn deselect(&mut self, pid: u32) {
        // Counts that the programs make in the entry while it is rewritten are lost. That does no harm: a deselected process
        // is no longer traced, and one that is selected again starts afresh.
        if self.is_selected(pid)
            && let Err(error) = self.update(pid, |entry| entry.flags &= !ProcessEntry::SELECTED)
        {
            log::warn!("pid {pid}: {error}");
        }
    }

    /// Selects the processes in a cgroup (v2) that is `level` levels below the root of the hierarchy.
    pub fn select_cgroup(&mut self, id: u64, level: u32) -> Result<(), AttachError> {
        let error = |map| move |source| AttachError::Map { map, source: Box::new(source) };
        self.cgroups.insert(id, level, 0).map_err(error("CGROUPS"))?;
        let levels = self.cgroup_levels.get(&0, 0).map_err(error("CGROUP_LEVELS"))?;
        self.cgroup_levels.set(0, levels | 1 << level, 0).map_err(error("CGROUP_LEVELS"))
    }

    /// Deselects a cgroup that was removed. (Cgroup ids are not reused.)
    pub fn deselect_cgroup(&mut self, id: u64) {
        if let Err(error) = self.cgroups.remove(&id) {
            log::debug!("forgetting the cgroup {id}: {error}");
        }
    }

    /// Whether selecting a cgroup includes its descendants; otherwise each of them must be selected.
    pub fn asks_ancestors(&self) -> bool {
        self.asks_ancestors
    }

    /// Forgets a process.
    pub fn forget(&mut self, pid: u32) {
        // The process may have exited, which removes the entry in the kernel.
        for removed in [self.processes.remove(&pid), self.rubies.remove(&pid)] {
            if let Err(error) = removed {
                log::debug!("forgetting pid {pid}: {error}");
            }
        }
    }

    /// Follows a process (its fork, exec and exit are reported) and stores its image and load bias, which its stacks and kernels
    /// without cookies need.
    pub fn set_process(&mut self, pid: u32, image: u32, bias: u64) -> Result<(), AttachError> {
        self.set_ruby(pid, image, bias)?;
        self.follow(pid, image, bias)
    }

    /// Like [`Probes::set_process`] but without enabling stacks, for when it is not yet certain that its events are those of this image.
    pub fn follow(&mut self, pid: u32, image: u32, bias: u64) -> Result<(), AttachError> {
        if self.has_cookie && self.processes.get(&pid, 0).is_ok() {
            // The programs may be counting in the entry right now: rewriting it could undo a count.
            return Ok(());
        }
        self.update(pid, |entry| {
            entry.image = image;
            entry.bias = bias;
            entry.flags |= ProcessEntry::IMAGE_KNOWN;
        })
    }

    /// Stores the image and load bias of a process for the programs, so that its stacks can be walked before its first GC.
    /// Values stored earlier stay until the process replaces its program.
    pub fn set_ruby(&mut self, pid: u32, image: u32, bias: u64) -> Result<(), AttachError> {
        let error = |source| AttachError::Map { map: "RUBIES", source: Box::new(source) };
        let before = match self.rubies.get(&pid, 0) {
            // The programs are already counting in the entry.
            Ok(entry) if entry.known != 0 => return Ok(()),
            Ok(entry) => Some((entry.execs, entry.gvl_ns)),
            Err(MapError::KeyNotFound) => None,
            Err(source) => return Err(error(source)),
        };
        let flags = if before.is_none() { NO_EXIST } else { 0 };
        let (execs, gvl_ns) = before.unwrap_or_default();
        let entry = RubyEntry { image, bias, execs, gvl_ns, known: 1, ..RubyEntry::default() };
        match self.rubies.insert(pid, entry, flags) {
            // The process has hit a probe meanwhile: the programs are counting in the entry.
            Err(source) if exists(&source) => Ok(()),
            inserted => inserted.map_err(error),
        }
    }

    /// The processes that the programs know to run this image, with their load bias.
    pub fn rubies_with(&self, image: u32) -> Vec<(u32, u64)> {
        let entries = self.rubies.iter().take(2 * MAX_PROCESSES as usize).flatten();
        let its = entries.filter(|(_, entry)| entry.known != 0 && entry.image == image);
        its.map(|(pid, entry)| (pid, entry.bias)).collect()
    }

    /// Undoes [`Probes::set_ruby`] for a program that the process has replaced meanwhile.
    pub fn unset_ruby(&mut self, pid: u32, image: u32, bias: u64) {
        // A later exec has cleared the entry, and the new program may have been registered by a hit of its own.
        let Ok(entry) = self.rubies.get(&pid, 0) else { return };
        if entry.known == 0 || (entry.image, entry.bias) != (image, bias) {
            return;
        }
        // Its GVL times remain in the kernel until its end, whose record names them only if this field says that there are any.
        let entry = RubyEntry { execs: entry.execs, gvl_ns: entry.gvl_ns, ..RubyEntry::default() };
        if let Err(error) = self.rubies.insert(pid, entry, 0) {
            log::warn!("pid {pid}: {error}");
        }
    }

    fn update(&mut self, pid: u32, change: impl Fn(&mut ProcessEntry)) -> Result<(), AttachError> {
        let error = |source| AttachError::Map { map: "PROCESSES", source: Box::new(source) };
        loop {
            let (before, flags) = match self.processes.get(&pid, 0) {
                Ok(entry) => (entry, 0),
                Err(MapError::KeyNotFound) => (ProcessEntry::default(), NO_EXIST),
                Err(source) => return Err(error(source)),
            };
            let mut entry = before;
            change(&mut entry);
            if entry == before {
                return Ok(());
            }
            match self.processes.insert(pid, entry, flags) {
                // The process has hit a probe meanwhile: its entry is changed, not replaced.
                Err(source) if exists(&source) => {}
                inserted => return inserted.map_err(error),
            }
        }
    }
}

/// Whether an insertion with [`NO_EXIST`] failed because the key exists.
fn exists(error: &MapError) -> bool {
    matches!(error, MapError::SyscallError(call) if call.io_error.raw_os_error() == Some(libc::EEXIST))
}

impl Drop for Probes {
    /// Detaches everything in parallel.
    fn drop(&mut self) {
        let mut all = std::mem::take(&mut self.lasting);
        all.append(&mut self.tracepoints);
        all.extend(self.clocks.take().map(Link::of));
        all.extend(self.gvl.iter_mut().flat_map(|gvl| std::mem::take(&mut gvl.links)));
        all.extend(std::mem::take(&mut self.links).into_values().flat_map(|image| image.links));
        links::detach(all);
    }
}

fn program_name(point: Point) -> &'static str {
    GC_PROGRAMS[point as usize]
}
