//! A single inspection of the Rubies of a host, judging them as a run would, without attaching anything.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap, HashSet},
    fs::File,
    io,
    path::{Path, PathBuf},
};

use procfs::ProcError;

use super::{
    Selection, VmState,
    debuginfo::{Around, DebugInfo},
    decision::{self, Chosen, Content, NO_SITES, Role, Sure, Unopened},
    identity::ImageKey,
    image_file::ImageFile,
    installed,
    mappings::{self, ExecutableMapping, load_bias},
    state::{has_loaded_library, is_linked_with, read_state},
    tracing_method::{Abilities, Choice, Rejection, TracingMethod, choose, choose_library},
};
use crate::{
    cache::Cache,
    elf::{BuildId, ElfImage, LoadSegment, RubyPresence, probe_ruby},
    host::{
        proc::{command_line, is_running, is_zombie},
        proc_root, root_file,
    },
    ruby::{Modular, fallback::METHODS, live_check::FailedProof, plan::AttachPlan},
};

/// What to inspect.
#[derive(Debug)]
pub struct Subjects {
    /// Processes.
    pub selection: Selection,
    /// Image files, or executables that load one.
    pub files: Vec<PathBuf>,
    /// What the kernel can do.
    pub abilities: Abilities,
    /// Debug information that may be used.
    pub debug: DebugInfo,
}

/// The findings.
#[derive(Debug, Default)]
pub struct Survey {
    /// Ruby images, in the order in which they were found.
    pub images: Vec<ImageFound>,
    /// Ruby processes, by pid.
    pub processes: Vec<ProcessFound>,
    /// Named processes and files that are not a Ruby, or cannot be inspected, and why.
    pub misses: Vec<Miss>,
    /// Number of processes inspected.
    pub looked_at: usize,
    /// Processes that could not be inspected for lack of privilege.
    pub denied: Vec<Denied>,
    /// Whether all processes, not only named ones, were searched for users of the images.
    pub searched: bool,
}

/// A process that could not be inspected.
#[derive(Debug)]
pub struct Denied {
    /// Its pid.
    pub pid: u32,
    /// The reason.
    pub reason: String,
}

/// A file that contains a Ruby interpreter or a GC library.
#[derive(Debug)]
pub struct ImageFound {
    /// Its path, as the first process that maps it sees it.
    pub path: PathBuf,
    /// The identity stated in the file.
    pub identity: Identity,
    /// How a run would trace it, or why it would not.
    pub choice: Choice,
    /// Whether the user named this file.
    pub named: bool,
}

impl ImageFound {
    /// The plan for its event sites, if a run would trace it by these.
    pub fn plan(&self) -> Option<&AttachPlan> {
        match &self.choice.method {
            Some(TracingMethod::Sites(planned)) => Some(&planned.plan),
            _ => None,
        }
    }

    /// Like [`ImageFound::plan`], consuming the image.
    pub fn into_plan(self) -> Option<AttachPlan> {
        match self.choice.method {
            Some(TracingMethod::Sites(planned)) => Some(planned.plan),
            _ => None,
        }
    }

    fn segments(&self) -> Option<&[LoadSegment]> {
        match &self.choice.method {
            Some(TracingMethod::Sites(planned)) => Some(&planned.segments),
            Some(TracingMethod::Fallback(head, _)) => Some(&head.segments),
            None => None,
        }
    }
}

/// The identity stated in a file, whether traced or not.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// `ruby_version`.
    pub version: Option<String>,
    /// `ruby_description`.
    pub description: Option<String>,
    /// Build id.
    pub build_id: Option<BuildId>,
}

impl Identity {
    fn of(file: &File, choice: &Choice) -> Self {
        if let Some(TracingMethod::Sites(planned)) = &choice.method {
            let analysis = &planned.plan.analysis;
            return Self {
                version: Some(analysis.version.to_string()),
                description: Some(analysis.description.clone()),
                build_id: analysis.build_id.clone(),
            };
        }
        let Ok(image) = ElfImage::read(file) else { return Self::default() };
        let string = |name| Some(image.c_string(image.symbol(name)?.address)?.to_owned());
        Self {
            version: string("ruby_version"),
            description: string("ruby_description"),
            build_id: image.build_id().cloned(),
        }
    }
}

/// A process that maps a Ruby image.
#[derive(Debug)]
pub struct ProcessFound {
    /// Its pid.
    pub pid: u32,
    /// Index of its image.
    pub image: usize,
    /// Load bias of that image, if its event sites are known.
    pub bias: Option<u64>,
    /// Its command line, or its name.
    pub command: Option<String>,
    /// The result of reading its VM, or why it is not traced; `None`: not tried, since its image is not traced by its event sites.
    pub state: Option<Result<VmState, String>>,
}

/// A named process or file that is not a Ruby.
#[derive(Debug)]
pub struct Miss {
    /// The process or file.
    pub subject: Subject,
    /// The reason.
    pub reason: String,
    /// Whether it could not be inspected, so that it may be a Ruby.
    pub denied: bool,
}

/// A process or file that the user named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A process.
    Pid(u32),
    /// A file.
    File(PathBuf),
    /// Running processes of a name, unit, cgroup or container, in the words of the flags.
    Sought(String),
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// The image with this index.
    Image(usize),
    GcLibrary,
    Other,
}

impl Known {
    fn image(self) -> Option<usize> {
        if let Self::Image(index) = self { Some(index) } else { None }
    }
}

/// A file that a process maps.
struct Mapped {
    key: ImageKey,
    path: PathBuf,
    image: Known,
}

struct Surveyor<'a> {
    cache: &'a mut Cache,
    abilities: Abilities,
    debug: &'a DebugInfo,
    known: HashMap<ImageKey, Known>,
    /// Index of a GC library's image, by library and index of the Ruby that uses it.
    libraries: HashMap<(ImageKey, usize), usize>,
    survey: Survey,
}

/// Inspects the subjects, and the processes that run a named file. With [`Selection::all`], inspects everything that runs or is installed.
pub fn survey(subjects: &Subjects, cache: &mut Cache) -> Survey {
    let Subjects { abilities, debug, .. } = subjects;
    let mut surveyor = Surveyor {
        cache,
        abilities: *abilities,
        debug,
        known: HashMap::new(),
        libraries: HashMap::new(),
        survey: Survey::default(),
    };
    for path in &subjects.files {
        surveyor.file(path);
    }
    let mut pids: BTreeSet<u32> = subjects.selection.pids.iter().copied().collect();
    for &pid in &pids {
        surveyor.named_process(pid);
    }
    pids.insert(proc_root::own_pid());
    if subjects.selection.all {
        surveyor.host(&pids);
    } else if surveyor.survey.images.iter().any(|image| image.named) {
        surveyor.users_of_files(&pids);
    }
    surveyor.survey
}

impl Surveyor<'_> {
    fn file(&mut self, path: &Path) {
        let mut miss = |reason: String, denied| {
            let subject = Subject::File(path.to_owned());
            self.survey.misses.push(Miss { subject, reason, denied });
        };
        if let Err(error) = root_file::open(path) {
            return miss(format!("cannot be opened: {error}"), true);
        }
        let presence = root_file::open(path).ok().and_then(|file| probe_ruby(&file).ok().flatten());
        if presence == Some(RubyPresence::GcLibrary) {
            let advice = "name that Ruby, or a process that has loaded the library";
            return miss(format!("is a GC library for a Ruby built --with-modular-gc: {advice}"), false);
        }
        let images = installed::images_of(path);
        if images.is_empty()
            && let Some(RubyPresence::Needs { sonames, .. }) = presence
        {
            return miss(installed::not_found(&sonames), true);
        }
        if images.is_empty() {
            return miss("neither holds a CRuby interpreter nor loads one from a library".to_owned(), false);
        }
        for image in images {
            match ImageKey::of(&image).and_then(|key| self.image(key, &ImageFile::on_host(&image))) {
                Ok(Known::Image(index)) => self.survey.images[index].named = true,
                Ok(Known::GcLibrary | Known::Other) => {}
                Err(error) => self.survey.misses.push(Miss {
                    subject: Subject::File(image),
                    reason: format!("cannot be opened: {error}"),
                    denied: true,
                }),
            }
        }
    }

    fn named_process(&mut self, pid: u32) {
        let (reason, denied) = match mappings::of_process(pid) {
            Ok(_) if let Some(why) = decision::not_a_process(pid) => (why, false),
            Err(error) => decision::unreadable(&error),
            Ok(mappings) => match self.process(pid, &mappings) {
                (true, _) => return,
                (false, _) if mappings.is_empty() && is_zombie(pid) => (decision::ZOMBIE.to_owned(), false),
                (false, _) if !is_running(pid) => ("it exited while it was inspected".to_owned(), false),
                (false, Some(unopened)) if unopened.is_program_of(pid) => (unopened.to_string(), true),
                (false, _) => (decision::no_ruby(mappings.len()), false),
            },
        };
        self.survey.misses.push(Miss { subject: Subject::Pid(pid), reason, denied });
    }

    /// Everything that runs, except what has been inspected, then everything that is installed.
    fn host(&mut self, seen: &BTreeSet<u32>) {
        for pid in self.others(seen) {
            self.any_process(pid, None);
        }
        for path in installed::images(false) {
            if let Err(error) =
                ImageKey::of(&path).and_then(|key| self.image(key, &ImageFile::on_host(&path)))
            {
                log::info!("{}: {error}", path.display());
            }
        }
    }

    /// Processes that run one of the named files, except those already inspected.
    fn users_of_files(&mut self, seen: &BTreeSet<u32>) {
        let named = |&(_, known): &(&ImageKey, &Known)| {
            known.image().is_some_and(|image| self.survey.images[image].named)
        };
        let keys: HashSet<ImageKey> = self.known.iter().filter(named).map(|(key, _)| *key).collect();
        for pid in self.others(seen) {
            self.any_process(pid, Some(&keys));
        }
    }

    /// All processes except `seen`.
    fn others(&mut self, seen: &BTreeSet<u32>) -> Vec<u32> {
        match proc_root::pids() {
            Ok(pids) => {
                self.survey.searched = true;
                let pids: BTreeSet<u32> = pids.filter(|pid| !seen.contains(pid)).collect();
                pids.into_iter().collect()
            }
            Err(error) => {
                log::warn!("listing {}: {error}", proc_root::root().display());
                Vec::new()
            }
        }
    }

    /// Inspects a process; with `files`, only if it maps one of these.
    fn any_process(&mut self, pid: u32, files: Option<&HashSet<ImageKey>>) {
        self.survey.looked_at += 1;
        let reason = match mappings::of_process(pid) {
            Ok(mappings) => {
                let mut denied = Vec::new();
                let mut is_wanted = |mapping: &ExecutableMapping| {
                    let key = mapping.open_path(pid).and_then(|path| ImageKey::of(&path));
                    let found = key.map(|key| files.is_some_and(|files| files.contains(&key)));
                    found.unwrap_or_else(|error| {
                        denied.push(Unopened { path: mapping.path.clone(), error });
                        false
                    })
                };
                let unopened = if files.is_none() || mappings.iter().any(&mut is_wanted) {
                    self.process(pid, &mappings).1
                } else {
                    Unopened::decisive(denied)
                };
                let is_denied = |file: &Unopened| {
                    file.error.kind() == io::ErrorKind::PermissionDenied && file.is_program_of(pid)
                };
                match unopened.filter(is_denied) {
                    Some(unopened) => unopened.to_string(),
                    None => return,
                }
            }
            Err(error @ ProcError::PermissionDenied(_)) => decision::unreadable(&error).0,
            // It has exited.
            Err(error) => return log::debug!("pid {pid}: {error}"),
        };
        self.survey.denied.push(Denied { pid, reason });
    }

    /// Returns whether it is a Ruby, and which of its files could not be opened, if any: of several, [`Unopened::decisive`].
    fn process(&mut self, pid: u32, mappings: &[ExecutableMapping]) -> (bool, Option<Unopened>) {
        let mut denied = Vec::new();
        let mut files = Vec::new();
        for mapping in mappings {
            let found = mapping.open_path(pid).and_then(|path| {
                let key = ImageKey::of(&path)?;
                let image = self.image(key, &ImageFile::of_process(pid, &path, &mapping.path))?;
                Ok(Mapped { key, path, image })
            });
            let failed = |error| denied.push(Unopened { path: mapping.path.clone(), error });
            files.push(found.map_err(failed).ok());
        }
        let gcs = decision::gcs(mappings.iter().zip(files.iter().map(|file| self.role(file.as_ref()))));
        let image_of = |index: usize| files.get(index)?.as_ref()?.image.image();
        for (index, bias) in gcs.own {
            let Some(image) = image_of(index) else { continue };
            let plan = self.survey.images[image].plan();
            let state = plan.map(|plan| read_state(pid, bias, plan).map_err(|failed| failed.to_string()));
            self.add_process(pid, image, Some(bias), state);
        }
        for image in gcs.refused.into_iter().filter_map(image_of) {
            self.add_process(pid, image, None, None);
        }
        if let Some(chosen) = gcs.chosen
            && let Chosen::BuiltIn { ruby: library, .. }
            | Chosen::Library { library, .. }
            | Chosen::Unknown { library } = chosen
            && let Err(error) = self.modular_process(pid, mappings, &files, chosen)
        {
            denied.push(Unopened { path: mappings[library].path.clone(), error });
        }
        // If the process is gone, the data read may be meaningless.
        if is_running(pid) { (gcs.ruby, Unopened::decisive(denied)) } else { (false, None) }
    }

    /// The role of a file in a process that maps it.
    fn role(&self, file: Option<&Mapped>) -> Role<'_> {
        match file.map(|file| file.image) {
            None | Some(Known::Other) => Role::Other,
            Some(Known::GcLibrary) => Role::GcLibrary,
            Some(Known::Image(image)) => {
                let found = &self.survey.images[image];
                let modular = found.plan().is_some_and(|plan| plan.analysis.modular.is_some());
                match found.segments() {
                    Some(segments) => Role::Ruby { segments, sites: found.plan().is_some(), modular },
                    None => Role::Refused,
                }
            }
        }
    }

    fn add_process(
        &mut self,
        pid: u32,
        image: usize,
        bias: Option<u64>,
        state: Option<Result<VmState, String>>,
    ) {
        let known = self.survey.processes.iter().any(|p| p.pid == pid && p.image == image);
        if !known && is_running(pid) {
            let command = command_line(pid);
            self.survey.processes.push(ProcessFound { pid, image, bias, command, state });
        }
    }

    /// Adds a process of a Ruby built `--with-modular-gc`, with the image of the GC that it runs.
    fn modular_process(
        &mut self,
        pid: u32,
        mappings: &[ExecutableMapping],
        files: &[Option<Mapped>],
        chosen: Chosen,
    ) -> io::Result<()> {
        let (library, ruby, ruby_bias) = match chosen {
            Chosen::BuiltIn { ruby, bias } => (None, ruby, bias),
            Chosen::Library { library, ruby, bias } => (Some(library), ruby, bias),
            Chosen::Unknown { library } => {
                let Some(file) = &files[library] else { return Ok(()) };
                let image_file = ImageFile::of_process(pid, &file.path, &mappings[library].path);
                let image = self.unknown_library(&image_file)?;
                self.add_process(pid, image, None, None);
                return Ok(());
            }
        };
        let Some(ruby) = files[ruby].as_ref().and_then(|file| file.image.image()) else { return Ok(()) };
        let library = match library.and_then(|index| Some((&mappings[index], files[index].as_ref()?))) {
            Some((mapping, file)) => {
                let image_file = ImageFile::of_process(pid, &file.path, &mapping.path);
                Some((self.library(file.key, &image_file, ruby)?, mapping))
            }
            None => None,
        };
        let plan_of = |image: usize| self.survey.images[image].plan();
        let Some((modular, plan)) = plan_of(ruby).and_then(|p| Some((p.analysis.modular.clone()?, p))) else {
            return Ok(());
        };
        let (image, bias, state) = match library {
            None => {
                let state = read_state(pid, ruby_bias, plan);
                let sure = decision::built_in(&state, || has_loaded_library(pid, ruby_bias, &modular));
                (ruby, Some(ruby_bias), Some(settled(state, sure)))
            }
            Some((library, mapping)) => {
                let found = &self.survey.images[library];
                let bias = found.segments().and_then(|segments| load_bias(mapping, segments));
                let read = |(plan, bias): (&AttachPlan, u64)| {
                    let state = read_state(pid, bias, plan);
                    let linked = || is_linked_with(pid, (bias, plan), (ruby_bias, &modular));
                    let sure = decision::linked_library(&state, linked);
                    settled(state, sure)
                };
                (library, bias, found.plan().zip(bias).map(read))
            }
        };
        self.add_process(pid, image, bias, state);
        Ok(())
    }

    /// Index of the image of a GC library whose Ruby is traced by fallback probes only.
    fn unknown_library(&mut self, image_file: &ImageFile) -> io::Result<usize> {
        let known = self.survey.images.iter().position(|image| {
            image.path == image_file.in_root
                && image.choice.refusals.iter().any(|why| why.to_string() == NO_SITES)
        });
        if let Some(known) = known {
            return Ok(known);
        }
        let choice = Choice { method: None, refusals: vec![Rejection::Fallback(NO_SITES)] };
        let identity = Identity::of(&root_file::open(&image_file.open)?, &choice);
        let path = image_file.in_root.clone();
        self.survey.images.push(ImageFound { path, identity, choice, named: false });
        Ok(self.survey.images.len() - 1)
    }

    /// Index of the image of a GC library in processes of that Ruby.
    fn library(&mut self, key: ImageKey, image_file: &ImageFile, ruby: usize) -> io::Result<usize> {
        if let Some(&known) = self.libraries.get(&(key, ruby)) {
            return Ok(known);
        }
        let file = root_file::open(&image_file.open)?;
        // As in a run, servers are not queried for symbols that only confirm the sites.
        let never = Cell::new(false);
        let around = Around { info: self.debug, image: image_file, later: Some(&never) };
        let choice = match self.survey.images[ruby].plan() {
            Some(plan) => choose_library(&file, &plan.analysis, &METHODS, self.abilities, around),
            None => Choice { method: None, refusals: Vec::new() },
        };
        let identity = Identity::of(&file, &choice);
        let Identity { version, description, .. } = self.survey.images[ruby].identity.clone();
        let identity = Identity { version, description, ..identity };
        let path = image_file.in_root.clone();
        self.survey.images.push(ImageFound { path, identity, choice, named: false });
        let index = self.survey.images.len() - 1;
        self.libraries.insert((key, ruby), index);
        Ok(index)
    }

    /// Adds the installed GC libraries of a Ruby.
    fn add_libraries(&mut self, ruby: usize) {
        let modular = self.survey.images[ruby].plan().and_then(|plan| plan.analysis.modular.as_ref());
        let Some(directory) = modular.and_then(|modular: &Modular| modular.directory.clone()) else { return };
        for path in installed::gc_libraries(Path::new("/"), &directory) {
            if let Err(error) =
                ImageKey::of(&path).and_then(|key| self.library(key, &ImageFile::on_host(&path), ruby))
            {
                log::info!("{}: {error}", path.display());
            }
        }
    }

    /// The kind of the file; adds its image if it contains an interpreter.
    fn image(&mut self, key: ImageKey, image_file: &ImageFile) -> io::Result<Known> {
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let shown = &image_file.shown;
        let file = root_file::open(&image_file.open)?;
        let mut refused = |why| self.add_image(&file, shown, Choice { method: None, refusals: vec![why] });
        let known = match Content::of(&file, shown) {
            Err(error) if installed::names_ruby(shown) => refused(Rejection::Unread(format!(
                "by its name it holds a CRuby interpreter, but it cannot be read: {error}"
            ))),
            content => match content? {
                Content::Interpreter => {
                    let around = Around { info: self.debug, image: image_file, later: None };
                    let choice = choose(&file, &METHODS, self.abilities, self.cache, around);
                    self.add_image(&file, shown, choice)
                }
                Content::Damaged(reason) => refused(Rejection::Damaged(reason)),
                Content::GcLibrary => Known::GcLibrary,
                Content::Other => Known::Other,
            },
        };
        self.known.insert(key, known);
        Ok(known)
    }

    fn add_image(&mut self, file: &File, shown: &Path, choice: Choice) -> Known {
        let identity = Identity::of(file, &choice);
        self.survey.images.push(ImageFound { path: shown.to_owned(), identity, choice, named: false });
        let index = self.survey.images.len() - 1;
        self.add_libraries(index);
        Known::Image(index)
    }
}

/// How a run would judge a VM, given whether its image is certainly, possibly, or not that of the process.
fn settled(state: Result<VmState, FailedProof>, sure: Sure) -> Result<VmState, String> {
    match sure {
        Sure::Yes => state.map_err(|failed| failed.to_string()),
        Sure::NotYet => Ok(state
            .ok()
            .filter(|state| matches!(state, VmState::Unreadable(_)))
            .unwrap_or(VmState::NotSetUp)),
        Sure::No(reason) => Err(reason.to_owned()),
    }
}

#[cfg(test)]
mod tests;
