//! The control thread: scans, watches, analyses, attaches, and tells the data thread what it found.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    num::NonZeroU32,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{Arc, mpsc::SyncSender},
};

use gctrace_common::config::ImageConfig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    Fault,
    debuginfo::DebugInfo,
    identity::ImageKey,
    installed,
    mappings::{self, ExecutableMapping},
    planned::{Abilities, Around, Choice, Head, Planned, Way, choose, reading, site_image},
    state::{bias, read_state},
};
use crate::{
    app::say,
    bpf::{MappingWatch, Probes, Scope, brief},
    cache::Cache,
    elf::{LoadSegment, RubyPresence, probe_ruby},
    enrich::proc::is_running,
    model::Image,
    pipeline::{Images, KnownImage},
    ruby::{
        last_resort::{LastResort, Method},
        plan::AttachPlan,
    },
};

/// Which processes are traced.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Every Ruby process.
    pub all: bool,
    /// These.
    pub pids: Vec<u32>,
    /// This one, started by us, and its descendants.
    pub command: Option<Vec<String>>,
}

/// What the control thread tells the data thread.
#[derive(Debug)]
pub enum Found {
    /// A process runs a probed image.
    Process {
        /// The process.
        pid: u32,
        /// Its image.
        image: u32,
        /// Its VM's state, read from its memory outside a GC: time and snapshot data.
        state: Option<(u64, Vec<u8>)>,
    },
    /// A process or an image is not traced.
    Refused {
        /// The process, if it is about one.
        pid: Option<u32>,
        /// The image file.
        path: PathBuf,
        /// The reason and the remedy.
        reason: String,
    },
    /// The VM of a process did not pass the live proof, although its image did: nothing of it may be reported.
    Unproven {
        /// The process.
        pid: u32,
        /// The image.
        image: u32,
        /// The image file.
        path: PathBuf,
        /// The check that failed.
        reason: String,
    },
    /// A selected pid is not there or is no Ruby.
    NotRuby {
        /// The pid.
        pid: u32,
        /// What was found instead.
        reason: String,
    },
    /// Everything present at start has been looked at.
    Ready {
        /// Processes that are traced now.
        processes: usize,
        /// Probes attached.
        probes: usize,
        /// Images probed.
        images: usize,
    },
    /// The command was started.
    Spawned(Child),
    /// Tracing cannot go on.
    Fatal(String),
    /// No further record will be made. The probes are being detached, which takes about 0.1 s each.
    Closed,
}

/// What the control thread needs to run.
pub struct Start {
    /// The loaded probes.
    pub probes: Probes,
    /// What to trace.
    pub selection: Selection,
    /// How GC work is seen, in order of preference.
    pub methods: &'static [Method],
    /// A mistake to plant in every plan.
    pub plant: Option<Fault>,
    /// Analyses made before.
    pub cache: Cache,
    /// Debug information that may be used.
    pub debug: DebugInfo,
    /// Where images are made known before they are probed.
    pub images: Images,
    /// Where findings go.
    pub sender: SyncSender<Found>,
    /// Becomes readable (end of file) when the thread is to end.
    pub stop: OwnedFd,
    /// Pid of gctrace.
    pub own_pid: u32,
}

/// What is known of an image file.
#[derive(Clone)]
enum Verdict {
    NotRuby,
    Traced(Arc<Traced>),
    Refused(Arc<str>),
}

struct Traced {
    index: u32,
    /// `None` where there are only probes of the last resort.
    plan: Option<AttachPlan>,
    segments: Vec<LoadSegment>,
}

/// Bounds the memory for not telling a refusal twice.
const REFUSALS_REMEMBERED: usize = 4096;

struct Control {
    probes: Probes,
    selection: Selection,
    sender: SyncSender<Found>,
    own_pid: u32,
    methods: &'static [Method],
    plant: Option<Fault>,
    cache: Cache,
    debug: DebugInfo,
    verdicts: HashMap<ImageKey, Verdict>,
    /// Processes that are traced.
    processes: usize,
    /// Refusals already told; forgotten when there are very many.
    refused_told: HashSet<(u32, ImageKey)>,
    images: Images,
    /// Images probed.
    attached: usize,
}

/// Runs until told to stop. Returns (and so detaches) only then.
pub fn run(start: Start) {
    let Start { probes, selection, methods, plant, cache, debug, images, sender, stop, own_pid } = start;
    let mut control = Control {
        probes,
        selection,
        sender,
        own_pid,
        methods,
        plant,
        cache,
        debug,
        verdicts: HashMap::new(),
        processes: 0,
        refused_told: HashSet::new(),
        images,
        attached: 0,
    };
    // Watching starts before the scan, so that nothing falls between the two.
    let mut watch = match MappingWatch::start() {
        Ok(watch) => watch,
        Err(error) => return control.tell(Found::Fatal(error.to_string())),
    };
    if let Err(reason) = control.begin() {
        return control.tell(Found::Fatal(reason));
    }
    control.watch(&mut watch, &stop);
    if let Err(error) = control.probes.close() {
        log::warn!("{error}; the ledger may not balance");
    }
    control.tell(Found::Closed);
}

impl Control {
    fn tell(&self, found: Found) {
        // The data thread has ended: so shall we, at the next look at `stop`.
        if self.sender.send(found).is_err() {
            log::debug!("the data thread is gone");
        }
    }

    fn begin(&mut self) -> Result<(), String> {
        if self.watches_others() {
            for path in installed::images() {
                self.add_installed(&path);
            }
            if let Some(program) = self.selection.command.as_ref().and_then(|args| args.first()) {
                for path in installed::images_of(Path::new(program)) {
                    self.add_installed(&path);
                }
            }
        }
        for pid in self.selection.pids.clone() {
            self.probes.select(pid).map_err(|e| e.to_string())?;
            if !self.inspect_selected(pid) {
                self.probes.forget(pid);
            }
        }
        if self.selection.all {
            self.scan();
        }
        self.tell(Found::Ready {
            processes: self.processes,
            probes: self.probes.attached(),
            images: self.attached,
        });
        if let Some(command) = self.selection.command.clone() {
            self.spawn(&command)?;
        }
        Ok(())
    }

    /// Whether processes that do not exist yet can be selected.
    fn watches_others(&self) -> bool {
        self.selection.all || self.selection.command.is_some()
    }

    /// A run that selects exactly one pid puts its probes on that process only: others then pay nothing.
    fn scope(&self) -> Scope {
        match (self.watches_others(), self.selection.pids.as_slice()) {
            (false, [pid]) => NonZeroU32::new(*pid).map_or(Scope::All, Scope::One),
            _ => Scope::All,
        }
    }

    /// Starts the command. Children of a selected process are selected in the kernel before they run, so gctrace
    /// selects itself for the moment of the fork (its own hits are dropped before selection is looked at).
    fn spawn(&mut self, command: &[String]) -> Result<(), String> {
        let Some((program, args)) = command.split_first() else { return Ok(()) };
        self.probes.select(self.own_pid).map_err(|e| e.to_string())?;
        let child = Command::new(program).args(args).spawn();
        self.probes.forget(self.own_pid);
        let child = child
            .map_err(|e| format!("starting `{program}`: {e}; give a program that exists and may be run"))?;
        self.tell(Found::Spawned(child));
        Ok(())
    }

    fn scan(&mut self) {
        let processes = match procfs::process::all_processes() {
            Ok(processes) => processes,
            Err(error) => {
                log::warn!("listing /proc: {error}");
                return;
            }
        };
        for pid in processes.flatten().map(|process| process.pid as u32) {
            if pid != self.own_pid {
                self.inspect(pid);
            }
        }
    }

    /// Looks at everything that can be selected, after mapping records were lost.
    fn look_again(&mut self) {
        if self.watches_others() {
            return self.scan();
        }
        for pid in self.selection.pids.clone() {
            self.inspect(pid);
        }
    }

    /// Returns whether it is a Ruby.
    fn inspect_selected(&mut self, pid: u32) -> bool {
        let reason = match mappings::of_process(pid) {
            Err(procfs::ProcError::NotFound(_)) => "no such process".to_owned(),
            Err(error) => format!("its mappings cannot be read: {error}"),
            Ok(mappings) => {
                let count = mappings.len();
                if self.inspect_mappings(pid, &mappings) {
                    return true;
                }
                format!(
                    "not a Ruby process: none of its {count} executable mappings holds a CRuby interpreter"
                )
            }
        };
        self.tell(Found::NotRuby { pid, reason });
        false
    }

    fn inspect(&mut self, pid: u32) {
        match mappings::of_process(pid) {
            Ok(mappings) => {
                self.inspect_mappings(pid, &mappings);
            }
            Err(error) => log::debug!("pid {pid}: {error}"),
        }
    }

    /// Looks at every executable mapping; returns whether one is a Ruby (traced or refused).
    fn inspect_mappings(&mut self, pid: u32, mappings: &[ExecutableMapping]) -> bool {
        let mut ruby = false;
        for mapping in mappings {
            let file = mapping.file(pid);
            let Ok(key) = ImageKey::of(&file) else { continue };
            let verdict = match self.verdicts.get(&key) {
                Some(verdict) => verdict.clone(),
                None => self.judge(key, &file, &mapping.path, &roots_of(pid)),
            };
            match verdict {
                Verdict::NotRuby => {}
                Verdict::Traced(traced) => {
                    ruby = true;
                    self.found(pid, mapping, &traced);
                }
                Verdict::Refused(reason) => {
                    ruby = true;
                    if self.refused_told.len() > REFUSALS_REMEMBERED {
                        self.refused_told.clear();
                    }
                    if self.wants(pid) && self.refused_told.insert((pid, key)) {
                        self.tell(Found::Refused {
                            pid: Some(pid),
                            path: mapping.path.clone(),
                            reason: reason.to_string(),
                        });
                    }
                }
            }
        }
        ruby
    }

    fn add_installed(&mut self, path: &Path) {
        let Ok(key) = ImageKey::of(path) else { return };
        if self.verdicts.contains_key(&key) {
            return;
        }
        if let Verdict::Refused(reason) = self.judge(key, path, path, &[PathBuf::from("/")]) {
            // Nobody runs it yet; it is told when somebody does.
            log::info!("{} is installed and would not be traced: {reason}", path.display());
        }
    }

    fn judge(&mut self, key: ImageKey, path: &Path, shown: &Path, roots: &[PathBuf]) -> Verdict {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) => {
                // The process is gone, or we are out of descriptors: that says nothing about the image, so nothing is
                // remembered, and the next process that maps it is looked at again.
                log::debug!("{}: {error}", shown.display());
                return Verdict::NotRuby;
            }
        };
        let verdict = match self.judge_file(&file, shown, roots) {
            Ok(verdict) => verdict,
            Err(reason) => Verdict::Refused(reason.into()),
        };
        self.verdicts.insert(key, verdict.clone());
        verdict
    }

    fn judge_file(&mut self, file: &File, shown: &Path, roots: &[PathBuf]) -> Result<Verdict, String> {
        match probe_ruby(file) {
            Ok(Some(RubyPresence::Defines)) => {}
            Ok(_) => return Ok(Verdict::NotRuby),
            Err(error) if installed::names_ruby(shown) => {
                return Err(format!(
                    "by its name it holds a CRuby interpreter, but the file is damaged: {error}"
                ));
            }
            Err(error) => {
                // A broken file that nothing says is a Ruby is nobody's business.
                log::debug!("{}: {error}", shown.display());
                return Ok(Verdict::NotRuby);
            }
        }
        let abilities =
            Abilities { reads_threads: self.probes.reads_threads(), cookies: self.probes.has_cookie() };
        let around = Around { info: &self.debug, roots };
        let Choice { way, refusals } = choose(file, shown, self.methods, abilities, &mut self.cache, around);
        match way {
            Some(Way::Sites(planned)) => self.open_sites(file, shown, *planned),
            Some(Way::LastResort(head, last)) => {
                let misses = last.method.misses().unwrap_or_default();
                let path = shown.display();
                say(&format!("gctrace: {path} is probed by {}: {misses}", last.method.name()));
                for reason in refusals {
                    say(&format!("gctrace: {path}: why not better: {reason}"));
                }
                self.open_last_resort(file, shown, head, &last)
            }
            None => Err(refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")),
        }
    }

    /// Makes an image known, attaches its event sites and opens it.
    fn open_sites(&mut self, file: &File, shown: &Path, planned: Planned) -> Result<Verdict, String> {
        let Planned { mut plan, segments, .. } = planned;
        if let Some(fault) = self.plant {
            fault.plant(&mut plan);
        }
        let index = self.probes.reserve_image().map_err(|e| e.to_string())?;
        self.images.add(KnownImage {
            image: Arc::new(site_image(index, shown, &plan)),
            reading: Some(reading(&plan)),
        });
        self.probes.attach(index, &plan.sites, &reopened(file), self.scope()).map_err(|e| brief(&e))?;
        self.probes.open_image(index, &plan.config).map_err(|e| e.to_string())?;
        self.attached += 1;
        Ok(Verdict::Traced(Arc::new(Traced { index, plan: Some(plan), segments })))
    }

    /// The same with the probes of the last resort.
    fn open_last_resort(
        &mut self,
        file: &File,
        shown: &Path,
        head: Head,
        last: &LastResort,
    ) -> Result<Verdict, String> {
        let index = self.probes.reserve_image().map_err(|e| e.to_string())?;
        let image = Image {
            index,
            path: shown.to_owned(),
            version: head.version,
            build_id: head.build_id,
            stat_keys: Vec::new(),
            heap_keys: Vec::new(),
            method: last.method,
            probes: last.probes.len(),
            has_symbols: head.has_symbols,
        };
        self.images.add(KnownImage { image: Arc::new(image), reading: None });
        let scope = self.scope();
        self.probes.attach_phases(index, &last.probes, &reopened(file), scope).map_err(|e| brief(&e))?;
        let config = ImageConfig { open: 1, ..ImageConfig::default() };
        self.probes.open_image(index, &config).map_err(|e| e.to_string())?;
        self.attached += 1;
        Ok(Verdict::Traced(Arc::new(Traced { index, plan: None, segments: head.segments })))
    }

    fn wants(&self, pid: u32) -> bool {
        self.selection.all || self.selection.pids.contains(&pid) || self.probes.is_selected(pid)
    }

    fn found(&mut self, pid: u32, mapping: &ExecutableMapping, traced: &Traced) {
        if !self.wants(pid) {
            return;
        }
        let Some(bias) = bias(mapping, &traced.segments) else { return };
        if let Err(error) = self.probes.set_process(pid, traced.index, bias) {
            log::warn!("pid {pid}: {error}");
        }
        if !is_running(pid) {
            // Its exit may have been reported before it was followed, and then nobody removes it.
            return self.probes.forget(pid);
        }
        let state = match traced.plan.as_ref().map(|plan| read_state(pid, bias, plan)) {
            None => None,
            Some(Ok(state)) => state.data(),
            Some(Err(failed)) => {
                return self.tell(Found::Unproven {
                    pid,
                    image: traced.index,
                    path: mapping.path.clone(),
                    reason: failed.to_string(),
                });
            }
        };
        self.processes += 1;
        self.tell(Found::Process { pid, image: traced.index, state });
    }

    /// Handles new mappings until told to stop.
    fn watch(&mut self, watch: &mut MappingWatch, stop: &OwnedFd) {
        let mut lost = 0;
        loop {
            {
                let fds = watch.fds();
                let mut polled: Vec<PollFd<'_>> =
                    fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
                polled.push(PollFd::new(stop, PollFlags::IN | PollFlags::HUP));
                let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
                match poll(&mut polled, Some(&timeout)) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => {
                        return self.tell(Found::Fatal(format!("waiting for new mappings: {error}")));
                    }
                }
                if polled.last().is_some_and(|fd| !fd.revents().is_empty()) {
                    return;
                }
            }
            let mut new = Vec::new();
            watch.drain(|mapping| new.push(mapping));
            if watch.lost() != lost {
                lost = watch.lost();
                log::info!("{lost} mapping records lost so far; scanning /proc");
                self.look_again();
            }
            for mapping in new {
                let selectable = self.watches_others() || self.selection.pids.contains(&mapping.pid);
                if mapping.pid != self.own_pid && selectable {
                    self.inspect_mappings(mapping.pid, &[mapping.into()]);
                }
            }
        }
    }
}

/// A path to the file through our own descriptor: the process whose mapping it is may exit at any moment.
fn reopened(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Where debug files are looked for: in the file system that the process sees, then in the host's.
fn roots_of(pid: u32) -> [PathBuf; 2] {
    [PathBuf::from(format!("/proc/{pid}/root")), PathBuf::from("/")]
}
