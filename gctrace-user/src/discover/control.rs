//! The control thread: scans, watches, analyses, attaches, and reports its findings to the data thread.

mod blocking;
mod event;
mod images;
mod inspect;
mod jobs;
mod later;
mod requests;
mod retries;
mod select;
mod site_cache;
mod unused;
mod watch;
mod writers;

pub(crate) use select::descendants;

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    fs::File,
    io::Write as _,
    num::NonZeroU32,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};

pub use self::event::ControlEvent;
pub(super) use self::{
    inspect::{has_probes, role},
    retries::NotOpened,
};
use self::{
    requests::Servers, retries::Retries, select::Listed, unused::Unused, watch::Until, writers::Writers,
};
use super::{
    Fault,
    cgroups::Groups,
    debuginfo::DebugInfo,
    debuginfod::Lookup,
    decision::Sure,
    identity::ImageKey,
    image_file::ImageFile,
    installed,
    mappings::{self, ExecutableMapping},
    resolve,
    selection::Selection,
    state::{VmState, read_state},
    tracing_method::Later,
    unattributed::UnattributedMappings,
};
use crate::{
    address::FileOffset,
    bpf::{GvlOptions, Lease, MappingWatch, Probes, Scope, brief},
    cache::Cache,
    clock::monotonic_ns,
    command::Program,
    elf::LoadSegment,
    host::{names::Names, proc::is_running, proc_root},
    images::Images,
    native::Tables,
    ruby::{
        Modular, RubyAnalysis,
        fallback::Method,
        live_check::FailedProof,
        plan::{AttachPlan, OptionalEvent},
    },
};

/// Input of the control thread.
pub struct Start {
    /// The loaded probes.
    pub probes: Probes,
    /// What to trace.
    pub selection: Selection,
    /// The command to start, if the selection has one.
    pub program: Option<Program>,
    /// Methods of tracing GC work, in order of preference.
    pub methods: &'static [Method],
    /// Whether stacks are an output, so that gctrace must report where they are missing.
    pub stacks: bool,
    /// Whether and how the GVL is watched.
    pub gvl: Option<GvlOptions>,
    /// Which optional events are traced.
    pub optional: Vec<OptionalEvent>,
    /// Receives orders for the GVL probes: [`GVL_ATTACH`], [`GVL_DETACH`]. Non-blocking.
    pub gvl_orders: UnixStream,
    /// A fault to inject into every plan.
    pub fault: Option<Fault>,
    /// Cached analyses.
    pub cache: Cache,
    /// Debug information that may be used.
    pub debug: DebugInfo,
    /// Where images are registered before they are probed.
    pub images: Images,
    /// Channel for findings.
    pub sender: SyncSender<ControlEvent>,
    /// Becomes readable (end of file) when the thread is to end.
    pub stop: OwnedFd,
    /// Pid of gctrace.
    pub own_pid: u32,
    /// Unwind tables, if native stacks are walked.
    pub native: Option<Tables>,
}

/// The verdict on an image file.
#[derive(Clone)]
pub(super) enum Verdict {
    NotRuby,
    /// Servers are being queried about it, or a retry is pending.
    Waiting,
    Traced(Arc<ProbedImage>),
    Refused(Arc<str>),
    /// A GC library: traced or not together with the Ruby that loads it.
    GcLibrary,
}

/// A probed image.
pub(super) struct ProbedImage {
    pub(super) index: u32,
    /// `None` if the image has only fallback probes.
    pub(super) plan: Option<AttachPlan>,
    /// File offsets of the probes that are in every process of the image.
    pub(super) probes: Vec<FileOffset>,
    pub(super) segments: Vec<LoadSegment>,
    /// Blocks writers of the file until the probes are detached.
    lease: Arc<Lease>,
}

impl ProbedImage {
    /// The modular GC data if it is a Ruby built `--with-modular-gc`.
    pub(super) fn modular(&self) -> Option<&Modular> {
        self.plan.as_ref()?.analysis.modular.as_ref()
    }
}

/// Processes whose image waits for a server's response.
struct Waiting {
    shown: PathBuf,
    pids: BTreeSet<u32>,
}

/// Order: attach the GVL probes.
pub const GVL_ATTACH: u8 = b'a';
/// Order: detach the GVL probes.
pub const GVL_DETACH: u8 = b'd';

/// Maximum time for preparing installed images before tracing starts; the remaining ones are prepared when the thread is idle.
/// The first analysis of an image takes some hundredths of a second.
const PREPARATION: Duration = Duration::from_secs(1);

/// Maximum number of refusals remembered to avoid repeating them; all are forgotten above it.
const REFUSALS_REMEMBERED: usize = 4096;

pub(super) struct Control {
    probes: Probes,
    selection: Selection,
    program: Option<Program>,
    sender: SyncSender<ControlEvent>,
    own_pid: u32,
    pub(super) methods: &'static [Method],
    stacks: bool,
    gvl: Option<GvlOptions>,
    optional: Vec<OptionalEvent>,
    gvl_orders: UnixStream,
    fault: Option<Fault>,
    cache: Cache,
    pub(super) debug: Arc<DebugInfo>,
    /// Started when the first request is made.
    lookup: Option<Lookup>,
    /// The processes that wait for it, by image.
    waiting: HashMap<ImageKey, Waiting>,
    retries: Retries,
    verdicts: HashMap<ImageKey, Verdict>,
    /// GC libraries, with each of the Rubies that have loaded them.
    pub(super) libraries: HashMap<(ImageKey, ImageKey), Verdict>,
    /// Number of traced processes.
    processes: usize,
    /// Refusals already reported; cleared when there are too many.
    refused_said: HashSet<(u32, Option<ImageKey>)>,
    images: Images,
    /// Number of probed images.
    attached: usize,
    native: Option<Tables>,
    /// Processes that are selected individually.
    listed: Listed,
    /// Installed images that have not been prepared yet.
    pub(super) installed: VecDeque<PathBuf>,
    /// Images whose GC is probed, with the analysis that is still to be completed and stored.
    put_off: VecDeque<(File, Later, RubyAnalysis)>,
    /// Selected cgroups, if there are any.
    groups: Option<Groups>,
    /// Mapping records without pids, if the kernel cannot give pids of gctrace's namespace.
    unattributed: Option<UnattributedMappings>,
    servers: Servers,
    unused: Unused,
    writers: Writers,
}

/// Runs until told to stop. Returns (and so detaches the probes) only then.
pub fn run(start: Start) {
    let Start {
        probes,
        selection,
        program,
        methods,
        stacks,
        gvl,
        optional,
        gvl_orders,
        fault,
        cache,
        debug,
        images,
        sender,
        stop,
        own_pid,
        native,
    } = start;
    let writers = match Writers::watch() {
        Ok(writers) => writers,
        Err(error) => {
            let reason = format!("answering the signal of file leases: {}", brief(&error));
            return drop(sender.send(ControlEvent::Fatal(reason)));
        }
    };
    let mut control = Control {
        probes,
        selection,
        program,
        sender,
        own_pid,
        methods,
        stacks,
        gvl,
        optional,
        gvl_orders,
        fault,
        cache,
        debug: Arc::new(debug),
        lookup: None,
        waiting: HashMap::new(),
        retries: Retries::default(),
        verdicts: HashMap::new(),
        libraries: HashMap::new(),
        processes: 0,
        refused_said: HashSet::new(),
        images,
        attached: 0,
        native,
        listed: Listed::default(),
        installed: VecDeque::new(),
        put_off: VecDeque::new(),
        groups: None,
        unattributed: UnattributedMappings::expected(),
        servers: Servers::default(),
        unused: Unused::default(),
        writers,
    };
    // Start watching before the scan, so that no mapping is missed in between.
    let mut watch = match MappingWatch::start(control.native.is_some() || control.probes.sees_requests()) {
        Ok(watch) => watch,
        Err(error) => return control.tell(ControlEvent::Fatal(brief(&error))),
    };
    if let Err(reason) = control.begin() {
        return control.tell(ControlEvent::Fatal(reason));
    }
    // Images that wait for a server were also present at start.
    if control.watch(&mut watch, &stop, Until::Answered) {
        if let Err(reason) = control.ready() {
            return control.tell(ControlEvent::Fatal(reason));
        }
        control.watch(&mut watch, &stop, Until::Stopped);
    }
    control.give_up_waiting();
    let at_ns = monotonic_ns();
    if let Err(error) = control.probes.close() {
        log::warn!("{error}; the ledger may not balance");
    }
    control.tell(ControlEvent::Closed { at_ns });
    let of_servers = control.servers.take_links();
    control.probes.detach_requests_last(of_servers);
    while control.finish_one() {}
}

impl Control {
    fn tell(&self, found: ControlEvent) {
        // The data thread has ended. This thread ends at its next check of `stop`.
        if self.sender.send(found).is_err() {
            log::debug!("the data thread is gone");
        }
        // Wake it now: it describes a process from `/proc`, and a process that lives for ten milliseconds would be gone.
        if let Err(error) = (&self.gvl_orders).write(&[0])
            && error.kind() != std::io::ErrorKind::WouldBlock
        {
            log::debug!("waking the data thread: {error}");
        }
    }

    fn begin(&mut self) -> Result<(), String> {
        if !self.selection.names.is_empty() {
            let left = self.probes.select_names(&self.selection.names).map_err(|e| e.to_string())?;
            if left > 0 {
                log::info!("{left} names are only looked for in /proc");
            }
        }
        if self.watches_others() {
            if let Some(command) = self.selection.command.clone() {
                for path in resolve::images_of_command(&command) {
                    self.add_installed(&path);
                }
            }
            let layers =
                self.selection.all || self.selection.has_groups() || !self.selection.names.is_empty();
            self.prepare_installed(layers);
        }
        if self.selection.has_groups() {
            let names = Names::below(&proc_root::file_root(), None);
            let mut groups = Groups::open(&self.selection, names, self.probes.asks_ancestors())?;
            groups.begin(&mut self.probes)?;
            groups.list(&mut self.probes)?;
            self.groups = Some(groups);
        }
        self.begin_pids()?;
        if self.listed.waits && !self.watches_others() {
            self.prepare_installed(false);
        }
        // Probe all running images: their processes may move into a selected cgroup later.
        if self.selection.all || self.groups.is_some() || !self.selection.names.is_empty() {
            self.scan();
        }
        Ok(())
    }

    /// Everything present at start has been inspected: reports that, and starts the command.
    fn ready(&mut self) -> Result<(), String> {
        let (begun, has_begun) = sync_channel(1);
        self.tell(ControlEvent::Ready {
            processes: self.processes,
            probes: self.probes.attached(),
            images: self.attached,
            waits: self.listed.waits,
            begun,
        });
        if let Some(program) = self.program.take() {
            if has_begun.recv().is_err() {
                // The data thread has ended. This thread ends at its next check of `stop`.
                return Ok(());
            }
            self.spawn(&program)?;
        }
        Ok(())
    }

    /// Whether processes other than the named ones and their descendants can be selected.
    fn watches_others(&self) -> bool {
        self.selection.is_open()
    }

    /// A run that selects exactly one process attaches its probes to that process only, so other processes pay nothing. (Children need
    /// the probes from their start, and the kernel has no scope for that.)
    fn scope(&self) -> Scope {
        // perf_event_open takes pids of gctrace's own namespace.
        let single = self.selection.single().filter(|_| proc_root::shares_pids());
        single.and_then(NonZeroU32::new).map_or(Scope::All, Scope::One)
    }

    /// Starts the command. The kernel selects children of a selected process before they run, so gctrace selects itself
    /// during the fork (its own hits are dropped before the selection is checked).
    fn spawn(&mut self, program: &Program) -> Result<(), String> {
        self.probes.select(self.own_pid).map_err(|e| e.to_string())?;
        let child = program.start();
        self.probes.forget(self.own_pid);
        let name = program.argv.first().map(|name| name.to_string_lossy()).unwrap_or_default();
        let child = child
            .map_err(|e| format!("starting `{name}`: {e}; give a program that exists and may be run"))?;
        self.tell(ControlEvent::Spawned(child));
        Ok(())
    }

    fn scan(&mut self) {
        let pids = match proc_root::pids() {
            Ok(pids) => pids,
            Err(error) => {
                log::warn!("listing {}: {error}", proc_root::root().display());
                return;
            }
        };
        self.scanning(|control| {
            for pid in pids {
                if pid != control.own_pid {
                    control.inspect(pid);
                }
            }
        });
    }

    /// Handles cgroup changes, and inspects the processes that became selected.
    fn take_groups(&mut self) -> Result<(), String> {
        let Some(groups) = &mut self.groups else { return Ok(()) };
        for pid in groups.take(&mut self.probes)? {
            if pid != self.own_pid {
                self.inspect(pid);
            }
        }
        Ok(())
    }

    /// Rescans everything that can be selected, after mapping records were lost.
    fn look_again(&mut self) {
        if self.watches_others() {
            return self.scan();
        }
        for pid in self.probes.followed() {
            self.inspect(pid);
        }
    }

    /// Reports, once, that a process is not traced because of its image.
    pub(super) fn refuse(&mut self, pid: u32, key: Option<ImageKey>, path: &Path, reason: &str) {
        if self.refused_said.len() > REFUSALS_REMEMBERED {
            self.refused_said.clear();
        }
        if self.wants(pid) && self.refused_said.insert((pid, key)) {
            self.tell(ControlEvent::Refused {
                pid: Some(pid),
                path: path.to_owned(),
                reason: reason.to_owned(),
            });
        }
    }

    /// Prepares installed images, some of them now. `layers`: also those in layers of containers.
    fn prepare_installed(&mut self, layers: bool) {
        self.installed = installed::images(layers).into();
        let deadline = Instant::now() + PREPARATION;
        while Instant::now() < deadline && self.prepare_one() {}
    }

    /// Prepares the next installed image, which need not be running. Returns whether there was one.
    pub(super) fn prepare_one(&mut self) -> bool {
        let next = self.installed.pop_front();
        if let Some(path) = &next {
            self.add_installed(path);
        }
        next.is_some()
    }

    fn add_installed(&mut self, path: &Path) {
        let Ok(key) = ImageKey::of(path) else { return };
        // May be the overlay's and the lower layer's view of one file: probing both would count every hit twice. Only the memory of a
        // process shows whether they are the same, so the image is checked again when a process maps it.
        let same = |known: &ImageKey, verdict: &Verdict| {
            let probed = matches!(verdict, Verdict::Traced(_));
            *known == key || key.may_be(known) || probed && key.is_same_file(known)
        };
        if let Some((_, verdict)) = self.verdicts.iter().find(|(known, verdict)| same(known, verdict)) {
            if let Verdict::Traced(image) = verdict {
                self.unused.is_installed(image.index);
            }
            return;
        }
        match self.judge(key, &ImageFile::on_host(path)) {
            // No process runs it yet; it is reported when one does.
            Verdict::Refused(reason) => {
                log::info!("{} is installed and would not be traced: {reason}", path.display());
            }
            Verdict::Traced(image) => self.unused.is_installed(image.index),
            Verdict::NotRuby | Verdict::Waiting | Verdict::GcLibrary => {}
        }
    }

    pub(super) fn wants(&self, pid: u32) -> bool {
        self.selection.all
            || self.probes.is_selected(pid)
            || self.groups.as_ref().is_some_and(|groups| groups.contains(pid))
    }

    /// Handles a process that runs the GC of an image with this load bias. `sure` decides, from the result of reading the VM, whether this is
    /// the image whose events the process has.
    pub(super) fn found_at(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
        bias: u64,
        traced: &ProbedImage,
        sure: impl FnOnce(&Result<VmState, FailedProof>) -> Sure,
    ) {
        self.used(traced, pid);
        if !self.wants(pid) {
            // It may move into a selected cgroup, and without cookies only this entry identifies its image then.
            if self.groups.is_some() && !self.probes.has_cookie() {
                if let Err(error) = self.probes.follow(pid, traced.index, bias) {
                    log::warn!("pid {pid}: {error}");
                }
                if !is_running(pid) {
                    self.probes.forget(pid);
                }
            }
            return;
        }
        // With a modular GC, the process's stacks are enabled only when it is certain that it runs this image.
        let choice = traced.modular().is_some();
        let followed = if choice {
            self.probes.follow(pid, traced.index, bias)
        } else {
            self.probes.set_process(pid, traced.index, bias)
        };
        if let Err(error) = followed {
            log::warn!("pid {pid}: {error}");
        }
        if !is_running(pid) {
            // Its exit may have been reported before it was followed, and then nothing else removes the entry.
            return self.probes.forget(pid);
        }
        if !still_maps(pid, mapping) {
            // It has replaced its program since its mappings were read. The mappings of the new program are inspected separately.
            return self.probes.unset_ruby(pid, traced.index, bias);
        }
        if let Some(native) = &mut self.native {
            native.refresh(pid);
        }
        let state = traced.plan.as_ref().map(|plan| read_state(pid, bias, plan));
        let unproven = |reason| {
            let path = mapping.path.clone();
            ControlEvent::Unproven { pid, path, reason }
        };
        match state.as_ref().map(sure) {
            None | Some(Sure::Yes) => {}
            Some(Sure::NotYet) => return,
            Some(Sure::No(reason)) => return self.tell(unproven(reason.to_owned())),
        }
        if choice {
            if let Err(error) = self.probes.set_ruby(pid, traced.index, bias) {
                log::warn!("pid {pid}: {error}");
            }
            if !is_running(pid) {
                return self.probes.forget(pid);
            }
            if !still_maps(pid, mapping) {
                return self.probes.unset_ruby(pid, traced.index, bias);
            }
        }
        let state = match state {
            None => None,
            Some(Ok(state)) => state.data(),
            Some(Err(failed)) => return self.tell(unproven(failed.to_string())),
        };
        self.processes += 1;
        self.tell(ControlEvent::Process { pid, image: traced.index, state });
    }
}

/// Whether a process still has a mapping, as far as it can be read. A process that has replaced its program may map the same file elsewhere.
fn still_maps(pid: u32, mapping: &ExecutableMapping) -> bool {
    let has = |other: &ExecutableMapping| {
        let inside = (other.start..other.end).contains(&mapping.start);
        inside
            && mapping.start - other.start + other.offset == mapping.offset
            && (mapping.inode == 0 || other.inode == mapping.inode)
    };
    mappings::of_process(pid).map_or(true, |now| now.iter().any(has))
}
