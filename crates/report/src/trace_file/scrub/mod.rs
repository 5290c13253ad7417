//! Copies a recording without what identifies its owner: names from outside are replaced by pseudonyms; times, counts,
//! the shape of stacks and the account are kept.

mod files;
mod names;
mod pseudonym;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use gctrace_tunemygc::tune::ruby;
use prost::Message as _;

use super::{
    Dump, Ending, Header, Host, ReadError, Recording,
    chunk::{self, Kind as ChunkKind},
    kinds::{
        decode::{Recorded, Tables},
        encode::{self, Filling},
        visit,
        wire::{self, What},
    },
    visit::Visit,
};
use crate::{
    export::{ExportError, check_path, write_private},
    model::{
        Container, Image, Origin, Process, request,
        stack::{Frame, Stack},
        trace::{Span, Trace},
    },
};
use pseudonym::Pseudonyms;

/// A kind of text that is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Paths of requests.
    Endpoints,
    /// Command lines.
    Arguments,
    /// Names of hosts.
    Hosts,
    /// Names of services, and attributes of resources.
    Services,
    /// Containers, pods, namespaces, units, control groups.
    Containers,
    /// Names of threads, and of processes, which are named after their main threads.
    Threads,
    /// Values of `RUBY_GC_*` variables, and names of those that Ruby does not know.
    Settings,
    /// Files: their directories if names of methods are kept, otherwise their whole paths.
    Files,
    /// Methods, classes and functions.
    Names,
    /// Details of reasons why something is not traced.
    Reasons,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::Endpoints,
        Self::Arguments,
        Self::Hosts,
        Self::Services,
        Self::Containers,
        Self::Threads,
        Self::Settings,
        Self::Files,
        Self::Names,
        Self::Reasons,
    ];

    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Endpoints => "endpoints",
            Self::Arguments => "arguments",
            Self::Hosts => "hosts",
            Self::Services => "services",
            Self::Containers => "containers",
            Self::Threads => "threads",
            Self::Settings => "settings",
            Self::Files => "files",
            Self::Names => "names",
            Self::Reasons => "reasons",
        }
    }

    /// The noun for one text of this kind.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Endpoints => "request path",
            Self::Arguments => "argument",
            Self::Hosts => "host name",
            Self::Services => "service name or attribute",
            Self::Containers => "name of a container, unit or group",
            Self::Threads => "thread name",
            Self::Settings => "GC setting",
            Self::Files => "path of a file",
            Self::Names => "name of a class, method or function",
            Self::Reasons => "reason",
        }
    }
}

/// The result of scrubbing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrubbed {
    /// Number of distinct texts replaced, by kind.
    pub replaced: Vec<(Kind, u64)>,
    /// How the recording ends; the copy ends the same way.
    pub ending: Ending,
}

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum ScrubError {
    /// The recording cannot be read.
    #[error("{0}; no copy was written")]
    Read(#[from] ReadError),
    /// The copy cannot be created at its path.
    #[error("{0}")]
    Output(#[from] ExportError),
    /// No random numbers are available.
    #[error("the system has no random numbers for pseudonyms; no copy was written")]
    Random,
    /// The copy would replace the recording.
    #[error("{path} is the recording itself; name another file for the copy")]
    Same {
        /// The file.
        path: PathBuf,
    },
    /// The copy cannot be written.
    #[error("writing {path}: {source}; no copy was written")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Writes a copy of a recording in which all kinds of text except those in `keep` are replaced. It appears completely
/// or not at all, and only its owner can read it.
///
/// # Errors
///
/// The recording cannot be read or is damaged, or the copy cannot be written.
pub fn scrub(from: &Path, to: &Path, keep: &BTreeSet<Kind>) -> Result<Scrubbed, ScrubError> {
    let mut recording = Recording::open(from)?;
    if super::is_same_file(from, to) {
        return Err(ScrubError::Same { path: to.to_owned() });
    }
    check_path(to)?;
    let mut scrubber = Scrubber::new(keep.clone())?;
    let mut failed = None;
    let mut ending = None;
    let written = write_private(to, |out| match copy(&mut recording, &mut scrubber, out) {
        Ok(end) => {
            ending = Some(end);
            Ok(())
        }
        Err(CopyError::Write(error)) => Err(error),
        Err(CopyError::Read(error)) => {
            failed = Some(error);
            Err(io::Error::other("the recording cannot be read"))
        }
    });
    if let Some(error) = failed {
        return Err(error.into());
    }
    let write = |source| ScrubError::Write { path: to.to_owned(), source };
    written.map_err(write)?;
    let ending = ending.unwrap_or(Ending::Complete);
    Ok(Scrubbed { replaced: scrubber.pseudonyms.replaced(), ending })
}

enum CopyError {
    Read(ReadError),
    Write(io::Error),
}

impl From<io::Error> for CopyError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

fn copy<R: Read>(
    recording: &mut Recording<R>,
    scrubber: &mut Scrubber,
    out: &mut dyn Write,
) -> Result<Ending, CopyError> {
    let header = scrubber.header(recording.header());
    out.write_all(&chunk::beginning())?;
    out.write_all(&chunk::stored(ChunkKind::Header, &wire::Header::of(&header).encode_to_vec())?)?;
    let mut filling = Filling::default();
    let close = |filling: &mut Filling, out: &mut dyn Write| -> io::Result<()> {
        if filling.is_empty() {
            return Ok(());
        }
        out.write_all(&chunk::stored(ChunkKind::Entries, &filling.take())?)
    };
    loop {
        let (tables, entries) = match recording.next().map_err(CopyError::Read)? {
            Ok(chunk) => chunk,
            Err(ending) => {
                if ending == Ending::Complete {
                    out.write_all(&chunk::stored(ChunkKind::End, &[])?)?;
                }
                return Ok(ending);
            }
        };
        // Frames are not shared between chunks.
        scrubber.frames.clear();
        for entry in entries {
            scrubber.entry(&tables, entry, &mut filling);
            if filling.is_full() {
                close(&mut filling, out)?;
            }
        }
        close(&mut filling, out)?;
    }
}

/// Replaces texts.
struct Scrubber {
    keep: BTreeSet<Kind>,
    pseudonyms: Pseudonyms,
    /// By address, which is not reused while the frame is kept here.
    frames: HashMap<*const Frame, (Arc<Frame>, Arc<Frame>)>,
}

/// Variables of the TuneMyGC agent, as its documentation names them.
const AGENTS: [&str; 10] = [
    "RUBY_GC_TOKEN",
    "RUBY_GC_TUNE",
    "RUBY_GC_SPY",
    "RUBY_GC_MAX_SAMPLES",
    "RUBY_GC_SYNC_ALWAYS",
    "RUBY_GC_SYNC_NEVER",
    "RUBY_GC_TUNE_DEBUG",
    "RUBY_GC_TUNE_HOST",
    "RUBY_GC_TUNE_REQUESTS",
    "RUBY_GC_TUNE_VERBOSE",
];

impl Scrubber {
    fn new(keep: BTreeSet<Kind>) -> Result<Self, ScrubError> {
        Ok(Self { keep, pseudonyms: Pseudonyms::new()?, frames: HashMap::new() })
    }

    fn replaces(&self, kind: Kind) -> bool {
        !self.keep.contains(&kind)
    }

    /// The name of a program may be that of its service, its title, or that of its main thread.
    fn replaces_programs(&self) -> bool {
        [Kind::Services, Kind::Arguments, Kind::Threads].into_iter().any(|kind| self.replaces(kind))
    }

    /// Replaces a text by a word and a pseudonym; an empty text stays empty.
    fn text(&mut self, kind: Kind, word: &str, text: &mut String) {
        if self.replaces(kind) && !text.is_empty() {
            *text = format!("{word}-{}", self.pseudonyms.short(kind, text));
        }
    }

    fn optional(&mut self, kind: Kind, word: &str, text: &mut Option<String>) {
        if let Some(text) = text {
            self.text(kind, word, text);
        }
    }

    /// A container id has 64 hexadecimal digits.
    fn id(&mut self, id: &mut Option<String>) {
        if let Some(id) = id.as_mut().filter(|_| self.replaces(Kind::Containers)) {
            *id = self.pseudonyms.long(Kind::Containers, id);
        }
    }

    fn header(&mut self, header: &Header) -> Header {
        let Header { gctrace, clock, begun_ns, subjects, host, dump } = header.clone();
        let Host { mut name, kernel, machine, cpus, mut boot } = host;
        self.optional(Kind::Hosts, "host", &mut name);
        self.optional(Kind::Hosts, "boot", &mut boot);
        let dump = dump.map(|Dump { why, at_ns, from_ns, carried, open }| {
            let why = if self.replaces_programs() { without_program(&why) } else { why };
            Dump { why, at_ns, from_ns, carried, open }
        });
        Header { gctrace, clock, begun_ns, subjects, host: Host { name, kernel, machine, cpus, boot }, dump }
    }

    /// Adds a copy of an entry.
    fn entry(&mut self, tables: &Tables, entry: Recorded, to: &mut Filling) {
        match entry {
            Recorded::Seen(index, mut owned) => {
                // The index has been checked.
                let Some(process) = tables.process(index) else { return };
                visit(&mut owned, self);
                let process = self.process(process);
                to.see(&process, owned.seen());
            }
            Recorded::Refused(pid, path, reason) => {
                let path = self.native(&path);
                let reason =
                    if self.replaces(Kind::Reasons) { self.reason(&reason) } else { reason.to_string() };
                to.refused(pid, &path, &reason);
            }
            Recorded::Began(ts_ns) => to.push(None, What::Began(ts_ns)),
            Recorded::Closed(ts_ns) => to.push(None, What::Closed(ts_ns)),
            Recorded::GvlGap(gap) => to.push(None, What::GvlGap(Box::new(encode::gap(gap)))),
            Recorded::Flushed(now_ns) => to.push(None, What::Flushed(now_ns)),
            Recorded::Account(ledger) => {
                let account = to.account(&ledger);
                to.push(None, What::Account(Box::new(account)));
            }
            Recorded::Finished(ledger) => {
                let account = to.account(&ledger);
                to.push(None, What::Finished(Box::new(account)));
            }
            Recorded::Settled(ledger) => {
                let account = to.account(&ledger);
                to.push(None, What::Settled(Box::new(account)));
            }
        }
    }

    fn process(&mut self, process: &Process) -> Process {
        let Process {
            pid,
            ns_pid,
            ppid,
            comm,
            mut cmdline,
            start_ts,
            uid,
            mut hostname,
            container,
            gc_env,
            mut gc_env_refused,
            origin,
            image,
        } = process.clone();
        let comm = self.comm(&comm);
        cmdline.iter_mut().flatten().for_each(|word| self.text(Kind::Arguments, "arg", word));
        self.optional(Kind::Hosts, "host", &mut hostname);
        let gc_env = gc_env.map(|variables| {
            let replaced = variables.into_iter().map(|(name, mut value)| {
                self.text(Kind::Settings, "value", &mut value);
                (self.variable(name), value)
            });
            replaced.collect::<BTreeMap<_, _>>()
        });
        for name in &mut gc_env_refused {
            *name = self.variable(std::mem::take(name));
        }
        Process {
            pid,
            ns_pid,
            ppid,
            comm,
            cmdline,
            start_ts,
            uid,
            hostname,
            container: self.container(container),
            gc_env,
            gc_env_refused,
            origin: Arc::new(self.origin(&origin)),
            image: Arc::new(self.image(&image)),
        }
    }

    /// The name of a variable. Names that neither Ruby nor the agent's documentation knows are private, whatever their
    /// prefix, and so are refused ones.
    fn variable(&mut self, name: String) -> String {
        let is_known = AGENTS.contains(&name.as_str()) || ruby::variable(&name).is_some();
        if is_known || !self.replaces(Kind::Settings) {
            return name;
        }
        format!("RUBY_GC_{}", self.pseudonyms.short(Kind::Settings, &name).to_uppercase())
    }

    fn container(&mut self, container: Container) -> Container {
        let Container {
            mut id,
            runtime,
            mut name,
            mut pod_uid,
            mut pod,
            mut namespace,
            mut unit,
            mut cgroup,
        } = container;
        self.id(&mut id);
        let named = [
            ("container", &mut name),
            ("pod", &mut pod_uid),
            ("pod", &mut pod),
            ("namespace", &mut namespace),
            ("unit", &mut unit),
            ("/group", &mut cgroup),
        ];
        for (word, text) in named {
            self.optional(Kind::Containers, word, text);
        }
        Container { id, runtime, name, pod_uid, pod, namespace, unit, cgroup }
    }

    fn origin(&mut self, origin: &Origin) -> Origin {
        let Origin { mut service, mut container, mut pod, mut namespace, mut attributes } = origin.clone();
        self.text(Kind::Services, "service", &mut service);
        self.id(&mut container);
        self.optional(Kind::Containers, "pod", &mut pod);
        self.optional(Kind::Containers, "namespace", &mut namespace);
        for (name, value) in &mut attributes {
            self.text(Kind::Services, "attribute", name);
            self.text(Kind::Services, "value", value);
        }
        Origin { service, container, pod, namespace, attributes }
    }

    fn image(&mut self, image: &Image) -> Image {
        let Image { index, path, version, build_id, stat_keys, heap_keys, method, probes, gvl, has_symbols } =
            image.clone();
        let path =
            if self.replaces(Kind::Files) { self.native(&path.to_string_lossy()).into() } else { path };
        Image { index, path, version, build_id, stat_keys, heap_keys, method, probes, gvl, has_symbols }
    }

    fn native(&mut self, path: &str) -> String {
        if !self.replaces(Kind::Files) {
            return path.to_owned();
        }
        files::native(path, self.replaces(Kind::Names), &mut self.pseudonyms)
    }

    fn comm(&mut self, name: &str) -> String {
        let mut name = name.to_owned();
        self.text(Kind::Threads, "thread", &mut name);
        name
    }

    /// A reason without details that may name something: text from outside follows a path, a quotation or an error.
    fn reason(&mut self, reason: &str) -> String {
        let Some(at) = reason.find(['/', '`', '"', '\'', '(']) else { return reason.to_owned() };
        let kept = reason[..at].rfind(' ').map_or("", |at| &reason[..at]);
        format!("{kept} (reason-{})", self.pseudonyms.short(Kind::Reasons, reason)).trim_start().to_owned()
    }

    fn frame(&mut self, frame: &Arc<Frame>) -> Arc<Frame> {
        if let Some((_, scrubbed)) = self.frames.get(&Arc::as_ptr(frame)) {
            return Arc::clone(scrubbed);
        }
        let names = self.replaces(Kind::Names);
        let Frame { kind, name, file, line, first_line, address } = &**frame;
        let name = if names { names::of(frame, &mut self.pseudonyms).into() } else { Arc::clone(name) };
        let file = match file {
            Some(file) if self.replaces(Kind::Files) => {
                use crate::model::stack::FrameKind;
                let with = &mut self.pseudonyms;
                Some(match kind {
                    FrameKind::Native | FrameKind::Kernel => files::native(file, names, with).into(),
                    FrameKind::Ruby | FrameKind::CFunction | FrameKind::Vm | FrameKind::Missing => {
                        files::ruby(file, names, with).into()
                    }
                })
            }
            file => file.clone(),
        };
        let (kind, line, first_line, address) = (*kind, *line, *first_line, *address);
        let scrubbed = Arc::new(Frame { kind, name, file, line, first_line, address });
        self.frames.insert(Arc::as_ptr(frame), (Arc::clone(frame), Arc::clone(&scrubbed)));
        scrubbed
    }
}

impl Visit for Scrubber {
    fn thread_name(&mut self, name: &mut Arc<str>) {
        if self.replaces(Kind::Threads) {
            *name = self.comm(name).into();
        }
    }

    fn stack(&mut self, stack: &mut Stack) {
        *stack = stack.iter().map(|frame| self.frame(frame)).collect();
    }

    fn path(&mut self, path: &mut String) {
        // A placeholder for too many distinct paths; not a path.
        if path != "(other)" {
            self.text(Kind::Endpoints, "/path", path);
        }
    }

    fn program(&mut self, name: &mut String) {
        if self.replaces(Kind::Endpoints) {
            self.path(name);
        } else if self.replaces_programs() {
            *name = format!("program-{}", self.pseudonyms.short(Kind::Arguments, name));
        }
    }

    fn trace(&mut self, trace: &mut Option<Trace>) {
        // A trace is only useful to look it up elsewhere.
        if self.replaces(Kind::Endpoints) {
            *trace = None;
        }
    }

    fn span(&mut self, span: &mut Option<Span>) {
        if self.replaces(Kind::Endpoints) {
            *span = None;
        }
    }

    fn job(&mut self, job: &mut request::Job) {
        let request::Job { queue, jid, enqueued_us: _, latency_ns: _ } = job;
        if let Some(queue) = queue {
            self.text(Kind::Endpoints, "queue", queue);
        }
        if let Some(jid) = jid {
            self.text(Kind::Endpoints, "jid", jid);
        }
    }
}

/// Why a dump was written, without the name of the program: `gc.pause > 1ms: 2 ms, pid 7 (puma)`.
fn without_program(why: &str) -> String {
    let kept = match why.split_once(", pid ") {
        Some((what, rest)) => {
            let pid: String = rest.chars().take_while(char::is_ascii_digit).collect();
            format!("{what}, pid {pid}")
        }
        None => why.to_owned(),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " .,:>%µ".contains(c);
    if kept.chars().all(is_plain) { kept } else { "a trigger".to_owned() }
}
