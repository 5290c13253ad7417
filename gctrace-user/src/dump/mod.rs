//! `gctrace dump`: what each thread of a process does right now, with its stack. The process is not stopped, and nothing is
//! attached to it: everything is read from `/proc` and its memory.

mod found;
mod gather;
mod jsonl;
mod text;

use std::{
    collections::BTreeSet,
    io::{self, BufWriter, Write as _},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    time::Duration,
};

pub use found::{Dump, Gvl, LockWait, NativeRead, NativeSide, RubySide, StackRead, State, Thread};
pub use text::doing;

use self::gather::Wanted;

use crate::{
    cache::Cache,
    cli::{DumpSettings, Format},
    console::say,
    discover::{
        Abilities, DebugInfo, ProcessFound, Selection, Subjects, Survey, descendants, present, survey,
    },
    host::{
        doing::Doing,
        proc::{is_running, start_ns},
        tasks,
    },
};

/// How long the next thing may take to be read. The kernel makes readers wait while a thread of the process changes its memory map,
/// and that thread may hang on a file system.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why there is no dump of a process.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DumpFailure {
    /// It is no Ruby process, or none that can be read.
    #[error("pid {pid}: {reason}")]
    NotRuby {
        /// Which.
        pid: u32,
        /// Why.
        reason: String,
        /// Whether privilege is missing.
        denied: bool,
    },
    /// Nothing was selected.
    #[error("no running Ruby process is selected ({0})")]
    Nobody(String),
    /// What is selected cannot be found out.
    #[error("{0}")]
    Selection(String),
    /// The kernel does not answer.
    #[error("{0}")]
    Hangs(String),
    /// The reader of the output is gone.
    #[error("writing to standard output: {0}")]
    Output(String),
}

impl DumpFailure {
    fn exit_status(&self) -> u8 {
        match self {
            Self::NotRuby { denied: true, .. } => 3,
            Self::NotRuby { .. } | Self::Nobody(_) => 1,
            Self::Selection(_) | Self::Hangs(_) | Self::Output(_) => 2,
        }
    }
}

/// Reads and prints. Returns the exit status: that of the first process of which there is no dump.
pub fn run(settings: &DumpSettings) -> u8 {
    let mut status = 0;
    let mut out = BufWriter::new(io::stdout());
    let mut fail = |failure: DumpFailure| {
        say(&format!("gctrace: {failure}"));
        if status == 0 {
            status = failure.exit_status();
        }
    };
    for result in started(settings) {
        let dump = match result {
            Ok(dump) => dump,
            Err(failure) => {
                fail(failure);
                continue;
            }
        };
        let written = match settings.format {
            Format::Jsonl => jsonl::write(&mut out, &dump),
            Format::Text => text::write(&mut out, &dump, settings.native),
        };
        match written.and_then(|()| out.flush()) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return 0,
            Err(error) => {
                fail(DumpFailure::Output(error.to_string()));
                break;
            }
        }
    }
    status
}

/// The dumps, one after the other, as they are read by a thread that may hang.
fn started(settings: &DumpSettings) -> impl Iterator<Item = Result<Dump, DumpFailure>> {
    let (send, receive) = mpsc::channel();
    let (settings, pids) = (settings.clone(), settings.selection.pids.clone());
    std::thread::spawn(move || read(&settings, &send));
    let mut over = false;
    std::iter::from_fn(move || {
        if over {
            return None;
        }
        match receive.recv_timeout(PATIENCE) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                over = true;
                Some(Err(DumpFailure::Hangs(hangs(&pids))))
            }
        }
    })
}

/// Why a process cannot be read, for people: the thread that hangs, if there is one.
fn hangs(pids: &[u32]) -> String {
    let waited = format!("the kernel has blocked reading it for {} s", PATIENCE.as_secs());
    for &pid in pids {
        for tid in tasks::tids(pid).unwrap_or_default() {
            let doing = Doing::look_briefly(pid, tid);
            if doing.state == Some('D') {
                let at = doing.wchan.as_deref().unwrap_or("an unknown place");
                return format!(
                    "pid {pid}: {waited}: its thread {tid} hangs in the kernel (state D, in {at})"
                );
            }
        }
    }
    match pids {
        [pid] => format!("pid {pid}: {waited}"),
        _ => format!("a process: {waited}; name processes one by one with --pid"),
    }
}

/// Reads all processes; stops when the receiver is gone.
fn read(settings: &DumpSettings, send: &Sender<Result<Dump, DumpFailure>>) {
    let selection = &settings.selection;
    let pids = match present(selection) {
        Ok(pids) => pids,
        Err(reason) => {
            let _gone = send.send(Err(DumpFailure::Selection(reason)));
            return;
        }
    };
    let mut cache = settings.cache_dir.as_deref().map_or_else(Cache::none, Cache::at);
    let found = surveyed(pids.into_iter().collect(), &mut cache);
    for process in &found.processes {
        let result = of(&found, process, Wanted { native: settings.native, not_run: true });
        if send.send(result).is_err() {
            return;
        }
    }
    if selection.is_open() && found.processes.is_empty() {
        let _gone = send.send(Err(DumpFailure::Nobody(selection.sought())));
    }
    // Of a tree that has a Ruby in it, the others are not missed.
    for miss in found.misses {
        let crate::discover::Subject::Pid(pid) = miss.subject else { continue };
        let tree: BTreeSet<u32> = descendants(pid).into_iter().collect();
        if selection.pids.contains(&pid) && !found.processes.iter().any(|process| tree.contains(&process.pid))
        {
            let failure = DumpFailure::NotRuby { pid, reason: miss.reason, denied: miss.denied };
            let _gone = send.send(Err(failure));
        }
    }
}

/// Looks at one process again and again.
pub struct Looker {
    cache: Cache,
    /// What was found of the process that was looked at last, and when that was started.
    known: Option<(u32, Option<u64>, Survey)>,
}

impl Looker {
    /// Keeps analyses in that directory.
    pub fn new(cache_dir: Option<&std::path::Path>) -> Self {
        Self { cache: cache_dir.map_or_else(Cache::none, Cache::at), known: None }
    }

    /// What its threads do now.
    ///
    /// # Errors
    ///
    /// It is no Ruby process, or cannot be read.
    pub fn look(&mut self, pid: u32) -> Result<Dump, DumpFailure> {
        let started = start_ns(pid);
        if self.known.as_ref().is_none_or(|known| (known.0, known.1) != (pid, started)) {
            self.known = Some((pid, started, surveyed(vec![pid], &mut self.cache)));
        }
        let gone = || DumpFailure::NotRuby { pid, reason: "it has ended".to_owned(), denied: false };
        let found = &self.known.as_ref().ok_or_else(gone)?.2;
        let result = found.processes.first().map_or_else(
            || Err(gone()),
            |process| of(found, process, Wanted { native: false, not_run: false }),
        );
        if result.is_err() {
            self.known = None;
        }
        result
    }
}

fn surveyed(pids: Vec<u32>, cache: &mut Cache) -> Survey {
    let subjects = Subjects {
        selection: Selection { pids, ..Selection::default() },
        files: Vec::new(),
        // What the kernel can do matters to events only; stacks are planned where threads are read.
        abilities: Abilities { reads_threads: true, cookies: true },
        debug: DebugInfo::of_servers(std::env::var("DEBUGINFOD_URLS").ok().as_deref()),
    };
    survey(&subjects, cache)
}

fn of(found: &Survey, process: &ProcessFound, wanted: Wanted) -> Result<Dump, DumpFailure> {
    let pid = process.pid;
    let dump = gathered(found, process, wanted);
    if is_running(pid) {
        return dump;
    }
    Err(DumpFailure::NotRuby { pid, reason: "it has ended".to_owned(), denied: false })
}

/// What was read of a process. It may have ended meanwhile.
fn gathered(found: &Survey, process: &ProcessFound, wanted: Wanted) -> Result<Dump, DumpFailure> {
    let pid = process.pid;
    let not_ruby = |reason: String, denied| DumpFailure::NotRuby { pid, reason, denied };
    let image = &found.images[process.image];
    let (Some(plan), Some(bias)) = (image.plan(), process.bias) else {
        let refusals = image.choice.refusals.iter().map(ToString::to_string);
        let refusals = refusals.collect::<Vec<_>>().join("; ");
        return Err(not_ruby(format!("this Ruby cannot be read: {refusals}"), false));
    };
    if let Some(Err(failed)) = &process.state {
        return Err(not_ruby(format!("this Ruby cannot be read: {failed}"), false));
    }
    gather::gather(&gather::Subject { process, plan, bias, wanted }).map_err(|error| {
        let denied = error.kind() == io::ErrorKind::PermissionDenied;
        not_ruby(format!("its memory cannot be read: {error}"), denied)
    })
}
