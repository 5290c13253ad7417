//! `gctrace dump`: what each thread of a process does right now, with its stack. The process is not stopped, and nothing is
//! attached to it: everything is read from `/proc` and the memory of the process.

mod found;
mod gather;
mod jsonl;
mod text;

use std::{
    collections::BTreeSet,
    io::{self, BufWriter, Write as _},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

pub use found::{Dump, Gvl, LockWait, NativeRead, NativeSide, RubySide, StackRead, State, Thread};
pub use text::doing;

use self::gather::Wanted;

use crate::{
    cache::Cache,
    cli::{DumpSettings, Format},
    console::say,
    discover::{
        Abilities, DebugInfo, ProcessFound, Selection, Subject, Subjects, Survey, descendants, present,
        survey,
    },
    host::{
        doing::Doing,
        mem::{ProcessMemory, is_gone},
        proc::{is_running, start_ns},
        proc_root,
        tasks::{self, Task},
    },
    preflight,
    ruby::{frames::Memory as _, plan::AttachPlan},
    words::plural,
};

/// Maximum time that the kernel may block one read. The kernel makes readers wait while a thread of the process changes its memory map, and
/// that thread may hang on a file system.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interval of the checks whether the reader is blocked.
const LOOK: Duration = Duration::from_secs(1);
/// Maximum number of threads that are named.
const NAMED: usize = 8;

/// Why there is no dump of a process.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DumpFailure {
    /// It is not a Ruby process, or cannot be read.
    #[error("pid {pid}: {reason}")]
    NotRuby {
        /// Its pid.
        pid: u32,
        /// Why.
        reason: String,
        /// Whether privilege is missing.
        denied: bool,
    },
    /// Something of the host is missing.
    #[error("{0}")]
    Host(String),
    /// No process matches the selection.
    #[error("no running Ruby process is selected ({0})")]
    Nobody(String),
    /// Selected processes could not be inspected, so they may be Ruby.
    #[error("{} cannot be inspected, and may be Ruby; the first is pid {first}: {reason}", plural(*count as u64, "process"))]
    Unseen {
        /// Number of these processes.
        count: usize,
        /// Pid of the first of them.
        first: u32,
        /// Why that one could not be inspected.
        reason: String,
        /// Whether other processes were dumped.
        others: bool,
    },
    /// The selection could not be resolved.
    #[error("{0}")]
    Selection(String),
    /// The kernel blocks reading.
    #[error("{0}")]
    Hangs(String),
    /// Output could not be written.
    #[error("writing to standard output: {0}")]
    Output(String),
}

impl DumpFailure {
    fn exit_status(&self) -> u8 {
        match self {
            Self::Host(_) | Self::NotRuby { denied: true, .. } | Self::Unseen { others: false, .. } => 3,
            Self::NotRuby { .. } | Self::Nobody(_) => 1,
            // Everything readable was read.
            Self::Unseen { others: true, .. } => 0,
            Self::Selection(_) | Self::Hangs(_) | Self::Output(_) => 2,
        }
    }
}

/// Reads and prints. Returns the exit status: that of the first failure whose status is not 0.
pub fn run(settings: &DumpSettings) -> u8 {
    let mut status = 0;
    let mut out = BufWriter::new(io::stdout());
    let mut fail = |failure: DumpFailure| {
        say(&format!("gctrace: {failure}"));
        if status == 0 {
            status = failure.exit_status();
        }
    };
    if let Err(missing) = preflight::proc() {
        fail(DumpFailure::Host(missing.to_string()));
        return status;
    }
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

/// The dumps, one after the other, read by a separate thread, which may hang.
fn started(settings: &DumpSettings) -> impl Iterator<Item = Result<Dump, DumpFailure>> {
    let (send, receive) = mpsc::channel();
    let (settings, pids) = (settings.clone(), settings.selection.pids.clone());
    let (say_id, id) = mpsc::channel();
    std::thread::spawn(move || {
        let _gone = say_id.send(proc_root::own_tid());
        read(&settings, &send);
    });
    let own = proc_root::own_pid();
    let reader = id.recv().ok();
    let mut wait = Wait::default();
    let mut over = false;
    std::iter::from_fn(move || {
        while !over {
            match receive.recv_timeout(LOOK) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = reader.and_then(|tid| Task::look(own, tid));
            if wait.for_how_long(now, Instant::now()) >= PATIENCE {
                over = true;
                return Some(Err(DumpFailure::Hangs(hangs(own, reader, &pids))));
            }
        }
        None
    })
}

/// How long a thread has slept in one place. A thread that reads a lot, or waits briefly now and then, is not blocked.
#[derive(Default)]
struct Wait(Option<(Task, Instant)>);

impl Wait {
    /// Takes the state of the thread `now`; returns how long it has slept without running.
    fn for_how_long(&mut self, task: Option<Task>, now: Instant) -> Duration {
        match (self.0, task.filter(|task| task.asleep)) {
            (Some((before, since)), Some(task)) if before == task => return now.duration_since(since),
            (_, task) => self.0 = task.map(|task| (task, now)),
        }
        Duration::ZERO
    }
}

/// Explains why a process cannot be read: where the reader is blocked, and which threads of the process hang as well.
fn hangs(own: u32, reader: Option<u32>, pids: &[u32]) -> String {
    let at = |doing: Doing| doing.wchan.filter(|at| at != "0").map(|at| format!(" in {at}"));
    let blocked = reader.and_then(|tid| at(Doing::look_briefly(own, tid))).unwrap_or_default();
    let waited = format!("the kernel has blocked reading it for {} s{blocked}", PATIENCE.as_secs());
    let [pid] = pids else {
        return format!("a process: {waited}; name processes one by one with --pid");
    };
    let stuck = tasks::tids(*pid).unwrap_or_default().into_iter().filter_map(|tid| {
        let doing = Doing::look_briefly(*pid, tid);
        (doing.state == Some('D')).then(|| format!("{tid}{}", at(doing).unwrap_or_default()))
    });
    // Any of them may hold the memory map, but none has to.
    match stuck.take(NAMED).collect::<Vec<_>>().as_slice() {
        [] => format!("pid {pid}: {waited}"),
        stuck => format!("pid {pid}: {waited}; threads of it in state D: {}", stuck.join(", ")),
    }
}

/// Reads all processes; stops if the receiver is gone.
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
    let mut dumped = false;
    for process in &found.processes {
        let result = of(&found, process, Wanted { native: settings.native, not_run: true });
        dumped |= result.is_ok();
        if send.send(result).is_err() {
            return;
        }
    }
    for failure in missed(&found, selection, dumped) {
        let _gone = send.send(Err(failure));
    }
}

/// Failures for processes that were selected, but not found. `dumped`: whether any process was dumped.
fn missed(found: &Survey, selection: &Selection, dumped: bool) -> Vec<DumpFailure> {
    let mut failures = Vec::new();
    let mut unseen = Vec::new();
    for miss in &found.misses {
        let Subject::Pid(pid) = miss.subject else { continue };
        let (reason, denied) = (miss.reason.clone(), miss.denied);
        // In a process tree that contains a Ruby, processes that are not Ruby are not reported.
        let has_ruby = || {
            let tree: BTreeSet<u32> = descendants(pid).into_iter().collect();
            found.processes.iter().any(|process| tree.contains(&process.pid))
        };
        if selection.pids.contains(&pid) && !has_ruby() {
            failures.push(DumpFailure::NotRuby { pid, reason, denied });
        } else if denied && is_running(pid) {
            unseen.push((pid, reason));
        }
    }
    let count = unseen.len();
    if let Some((first, reason)) = unseen.into_iter().next() {
        failures.push(DumpFailure::Unseen { count, first, reason, others: dumped });
    } else if selection.is_open() && found.processes.is_empty() {
        failures.insert(0, DumpFailure::Nobody(selection.sought()));
    }
    failures
}

/// Reads one process repeatedly.
pub struct Looker {
    cache: Cache,
    /// The process that was read last.
    known: Option<Known>,
}

/// What is known of a process.
struct Known {
    pid: u32,
    /// Its start time, nanoseconds.
    started: Option<u64>,
    /// Its memory, opened before the process was surveyed.
    memory: io::Result<ProcessMemory>,
    found: Survey,
}

impl Known {
    fn read(pid: u32, cache: &mut Cache) -> Self {
        let (started, memory) = (start_ns(pid), ProcessMemory::open(pid));
        Self { pid, started, memory, found: surveyed(vec![pid], cache) }
    }

    /// The process, and how it is read.
    fn process(&self) -> Option<(&ProcessFound, Option<&AttachPlan>)> {
        let process = self.found.processes.first()?;
        Some((process, self.found.images[process.image].plan()))
    }

    /// Whether this is the process, and it still runs the same program: another program has other memory.
    fn is(&self, pid: u32) -> bool {
        let runs = || {
            let (process, plan) = self.process()?;
            let at = process.bias?.wrapping_add(plan?.analysis.vm.vm_ptr.0);
            Some(self.memory.as_ref().ok()?.read(at, &mut [0; 8]))
        };
        self.pid == pid && self.started == start_ns(pid) && runs() == Some(true)
    }
}

impl Looker {
    /// Caches analyses in that directory.
    pub fn new(cache_dir: Option<&std::path::Path>) -> Self {
        Self { cache: cache_dir.map_or_else(Cache::none, Cache::at), known: None }
    }

    /// What its threads do now.
    ///
    /// # Errors
    ///
    /// It is not a Ruby process, or cannot be read.
    pub fn look(&mut self, pid: u32) -> Result<Dump, DumpFailure> {
        let known = match self.known.take().filter(|known| known.is(pid)) {
            Some(known) => known,
            None => Known::read(pid, &mut self.cache),
        };
        let Some((process, plan)) = known.process() else {
            let ended = || ("it has ended".to_owned(), false);
            let miss = known.found.misses.first();
            let (reason, denied) = miss.map_or_else(ended, |miss| (miss.reason.clone(), miss.denied));
            return Err(DumpFailure::NotRuby { pid, reason, denied });
        };
        let result = of(&known.found, process, Wanted { native: false, not_run: false });
        let walks = plan.is_some_and(|plan| plan.frames.is_ok());
        // If the list of threads cannot be read, the process may have replaced its program.
        let lists = |dump: &Dump| dump.no_stacks.is_none() || !walks;
        if result.as_ref().is_ok_and(lists) {
            self.known = Some(known);
        }
        result
    }
}

fn surveyed(pids: Vec<u32>, cache: &mut Cache) -> Survey {
    let subjects = Subjects {
        selection: Selection { pids, ..Selection::default() },
        files: Vec::new(),
        // Abilities of the kernel matter to events only; stacks are planned if threads can be read.
        abilities: Abilities { reads_threads: true, cookies: true },
        // A look at the present does not wait for a debuginfod server.
        debug: DebugInfo::default(),
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

/// The threads of a process, which may end meanwhile.
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
        if is_gone(&error) {
            return not_ruby("it has ended".to_owned(), false);
        }
        let denied = error.kind() == io::ErrorKind::PermissionDenied;
        not_ruby(format!("its memory cannot be read: {error}"), denied)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Miss;

    /// A process that replaces its program, here by the same one, is shown with the threads of the new program.
    #[test]
    fn replaced_program() {
        let (ruby, again) =
            ("/usr/bin/ruby", "exec $0, '--disable-gems', '-e', 'Thread.new { sleep }; sleep'");
        let mut command = std::process::Command::new(ruby);
        command.args(["--disable-gems", "-e", &format!("gets; $0 = '{ruby}'; {again}")]);
        let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let mut looker = Looker::new(None);
        let mut until = |count: usize| {
            let deadline = Instant::now() + Duration::from_secs(30);
            loop {
                let dump = looker.look(child.id());
                let ruby = |dump: &Dump| dump.threads.iter().filter(|thread| thread.ruby.is_some()).count();
                if dump.as_ref().is_ok_and(|dump| ruby(dump) == count) {
                    return;
                }
                assert!(Instant::now() < deadline, "{dump:?}");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        until(1);
        writeln!(child.stdin.as_ref().unwrap(), "go").unwrap();
        until(2);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Only one lasting sleep counts as blocked: not a new sleep, and not a running thread.
    #[test]
    fn blocked() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let task = |asleep, switches| Some(Task { tid: 7, own_tid: 7, asleep, switches: (switches, 0) });
        let mut wait = Wait::default();
        assert_eq!(wait.for_how_long(task(true, 1), at(0)), Duration::ZERO);
        assert_eq!(wait.for_how_long(task(true, 1), at(19)), Duration::from_secs(19));
        assert_eq!(wait.for_how_long(task(true, 2), at(30)), Duration::ZERO);
        assert_eq!(wait.for_how_long(task(true, 2), at(31)), Duration::from_secs(1));
        assert_eq!(wait.for_how_long(task(false, 2), at(60)), Duration::ZERO);
        assert_eq!(wait.for_how_long(task(true, 3), at(61)), Duration::ZERO);
        assert_eq!(wait.for_how_long(None, at(90)), Duration::ZERO);
    }

    /// Threads of the process that sleep in another state are not named, and the rest is reported even if the kernel does not say where they wait.
    #[test]
    fn words_for_a_block() {
        let own = std::process::id();
        let said = hangs(own, None, &[own]);
        assert!(
            said.starts_with(&format!("pid {own}: the kernel has blocked reading it for 20 s")),
            "{said}"
        );
        assert!(hangs(own, None, &[]).starts_with("a process: the kernel"));
    }

    /// Processes that cannot be inspected are counted, whoever selected them; if nothing else was found, the failure is missing privilege.
    #[test]
    fn processes_that_cannot_be_inspected() {
        let own = std::process::id();
        let miss = |pid, denied| Miss {
            subject: Subject::Pid(pid),
            reason: "it is another user's".to_owned(),
            denied,
        };
        // One is not Ruby, one has ended, and one is running, but access is denied.
        let found = Survey {
            misses: vec![miss(own, false), miss(u32::MAX, true), miss(own, true)],
            ..Survey::default()
        };
        let all = Selection { all: true, ..Selection::default() };
        let [failure] = &missed(&found, &all, false)[..] else { panic!("{:?}", missed(&found, &all, false)) };
        assert_eq!(failure.exit_status(), 3);
        let said = failure.to_string();
        assert!(
            said.starts_with("1 process cannot be inspected") && said.contains(&own.to_string()),
            "{said}"
        );
        let beside = missed(&found, &all, true);
        assert!(matches!(&beside[..], [DumpFailure::Unseen { count: 1, .. }]), "{beside:?}");
        assert_eq!(beside[0].exit_status(), 0);
        let none = Survey { misses: vec![miss(own, false)], ..Survey::default() };
        assert!(matches!(&missed(&none, &all, false)[..], [DumpFailure::Nobody(_)]));
        let named = Selection { pids: vec![own], ..Selection::default() };
        let named = missed(&Survey { misses: vec![miss(own, true)], ..Survey::default() }, &named, false);
        assert!(matches!(&named[..], [DumpFailure::NotRuby { denied: true, .. }]), "{named:?}");
    }
}
