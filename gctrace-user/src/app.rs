//! Wires the pipeline, handles signals, shuts down in order.

use std::{
    ffi::OsStr,
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{Receiver, TryRecvError, sync_channel},
    time::{Duration, Instant},
};

use gctrace_common::stats::Counter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    aggregate::gvl_budget::Cost,
    bpf::{self, LoadOptions, Loaded, Select},
    cache::Cache,
    cli::{Settings, Show},
    clock::{ClockWatch, WallClock, monotonic_ns},
    command::{self, Program},
    console::{self, say},
    discover::{self, ControlEvent, DebugInfo, GVL_ATTACH, GVL_DETACH, Selection, Start},
    export,
    host::{names::Names, proc::is_running, proc_root},
    images::Images,
    ledger::Ledger,
    model::MemorySource,
    native::Tables,
    pipeline::{GvlOrder, Pipeline},
    preflight,
    signals::{Asks, Signals},
    stacks::Reader,
    sudo,
    words::plural,
};

mod closing;
mod diff;
mod info;
mod merge;
mod outcome;
mod outputs;
mod progress;
mod report;
mod scrub;
mod serve;

pub use diff::diff;
pub use info::info;
pub use merge::merge;
pub use outcome::{Failure, Outcome};
pub use report::report;
pub use scrub::scrub;
pub use serve::serve;

use outcome::system;
use progress::Progress;

/// Maximum time that records stay in the ring when no event wakes the loop.
const TICK: Duration = Duration::from_millis(50);
/// The same during the start.
const START_TICK: Duration = Duration::from_millis(5);
/// Interval between accounts to the exporters.
const ACCOUNT: Duration = Duration::from_secs(1);
/// Maximum time that an account waits for threads that are runnable but have no CPU yet: their stacks are taken when they run.
const RETURNS: Duration = Duration::from_millis(100);
/// Interval at which these threads are checked.
const RETURN_TICK: Duration = Duration::from_millis(2);
/// Capacity of the channel of findings to the data thread; the control thread blocks when it is full.
const FINDINGS: usize = 1024;

/// Runs until the duration is over, the command has ended, or a signal arrives.
pub fn run(settings: &Settings) -> Result<Outcome, Failure> {
    // If tracing has not started, the files of outputs are empty: remove those that were created.
    trace(settings).inspect_err(|_| drop(export::remove_made()))
}

fn trace(settings: &Settings) -> Result<Outcome, Failure> {
    let servers = std::env::var("DEBUGINFOD_URLS").ok();
    let debug = DebugInfo::open(&settings.layout_from, servers.as_deref(), settings.selection.all)
        .map_err(Failure::DebugFile)?;
    let asks = Asks::install().map_err(system("installing the handler of SIGUSR2"))?;
    let checked = preflight::check()?;
    for note in &settings.notes {
        say(&format!("gctrace: {note}"));
    }
    let user = sudo::own_files(Some(settings.as_root)).map_err(Failure::Control)?;
    let program = settings.selection.command.clone();
    let program =
        program.map(|argv| Program { argv, user: user.clone(), data_on_stdout: settings.output.is_none() });
    if let Some(why) = program.as_ref().and_then(Program::missing) {
        return Err(Failure::Control(why));
    }
    // The browser is started as the user, which needs privileges that are dropped below.
    let page = settings.live.as_ref().map(|live| serve::Page::listen(live, user.clone()));
    let mut page = page.transpose()?;
    // With a command, privileges are kept: the command must have what the user has.
    if program.is_none() {
        // Reading which pages of another user's process are resident requires the privilege to read files of other users.
        let writes = settings.writes() || settings.memory_account;
        preflight::drop_privileges(writes, user.is_some(), settings.requests.is_some());
    }
    // The thread of the signals has no more privileges than this one. Until tracing starts, a signal ends the process as usual, after the new files
    // of outputs are removed; what was loaded into the kernel is released with the process.
    let signals = Signals::install().map_err(system("installing signal handlers"))?;
    if !settings.has_files_at_end() {
        signals.writes_no_files();
    }
    if program.is_some() {
        signals.has_command();
    }
    let clock = WallClock::measure();
    let mut exporters = outputs::exporters(settings, clock, settings.requests.is_some())?;
    if let (Some(page), Some(live)) = (&mut page, &settings.live) {
        exporters.extend(page.start(live, outputs::header(settings, clock))?);
    }
    let stacks = settings.stacks.map(|stacks| {
        let native = stacks.native && proc_root::shares_pids();
        if stacks.native && !native {
            say("gctrace: stacks have no native frames: in its own pid namespace gctrace cannot see which code \
                 processes load; use --pid=host (hostPID: true) for them");
        }
        bpf::StackOptions { native, ..stacks }
    });
    // Exact waits include the stack of the thread that blocked them, so stacks must be taken.
    let exact = settings.cookies && settings.gvl.is_some_and(|gvl| !gvl.futex);
    let stacks = stacks.or_else(|| exact.then_some(bpf::StackOptions::BLOCKERS));
    let own_pid = proc_root::own_pid();
    let options = LoadOptions {
        select: select(&settings.selection),
        names: !settings.selection.names.is_empty(),
        own_pid,
        tracefs: &checked.tracefs,
        cookies: settings.cookies,
        multi: settings.multi,
        memory: settings.memory == MemorySource::Kernel,
        gc_ring_bytes: settings.gc_ring_bytes,
        stacks,
        gvl: settings.gvl,
        requests: settings.requests,
        optional: &settings.optional,
        alloc_stacks: settings.alloc_stacks,
    };
    console::starting(&format!("loading {} BPF programs", options.programs()));
    let loaded = bpf::load(&options);
    bpf::give_back_memory();
    console::end_progress();
    let Loaded { probes, rings, stacks, counters, away, unwind, gvl, requests, execs } = loaded?;
    if settings.gvl.is_some() && gvl.is_none() {
        say(
            "gctrace: the GVL is not watched: the kernel has no attach cookies; use Linux 5.15 or later, or --gvl=futex",
        );
    }
    if settings.requests.is_some() && requests.is_none() {
        say("gctrace: requests are not seen: the kernel has no attach cookies; use Linux 5.15 or later");
    }
    let (sender, findings) = sync_channel(FINDINGS);
    let (stop, stopped) = UnixStream::pair().map_err(system("making a socket pair"))?;
    let (orders, gvl_orders) = UnixStream::pair().map_err(system("making a socket pair"))?;
    for stream in [&orders, &gvl_orders] {
        stream.set_nonblocking(true).map_err(system("making a socket non-blocking"))?;
    }
    console::starting("looking for Ruby processes");
    let images = Images::default();
    let native = unwind.map(Tables::new);
    let namer = native.as_ref().map(Tables::namer);
    let reader = Reader::start(stacks, images.clone(), namer.is_some())
        .map_err(system("starting the thread that reads stacks"))?;
    let start = Start {
        probes,
        cache: settings.cache_dir.as_deref().map_or_else(Cache::none, Cache::at),
        debug,
        images: images.clone(),
        selection: settings.selection.clone(),
        program,
        methods: settings.methods,
        stacks: settings.stacks.is_some(),
        gvl: settings.gvl.filter(|_| gvl.is_some()),
        optional: settings.optional.clone(),
        gvl_orders,
        fault: settings.fault,
        sender,
        stop: OwnedFd::from(stopped),
        own_pid,
        native,
    };
    let control = std::thread::Builder::new()
        .name("gctrace-control".to_owned())
        .spawn(move || discover::run(start))
        .map_err(system("starting the control thread"))?;
    let mut run = Run {
        pipeline: Pipeline::new(exporters, images, Some(reader), namer, gvl)
            .naming(Names::below(&proc_root::file_root(), settings.kube_root.clone()))
            .on_clock(clock)
            .writing_others(settings.has_others())
            .reading_shares(settings.shares)
            .with_away(away)
            .with_requests(requests, settings.requests.is_some_and(|requests| requests.states))
            .with_execs(execs),
        rings,
        counters,
        accounted: None,
        orders,
        controlled: true,
        findings,
        signals: &signals,
        asks,
        settings,
        command: None,
        over: false,
        over_early: false,
        matched: false,
        unreadable: false,
        closed: None,
        fatal: None,
        deadline: None,
        progress: Progress::new(settings),
        clock: ClockWatch::new(clock),
    };
    let ended = run.until_end();
    run.over = true;
    console::end_progress();
    ended?;
    // Complete the files, even if the run ends before it is ready.
    signals.tracing();
    while run.pipeline.drain(&mut run.rings) {}
    let min = settings.stacks.map_or(Duration::ZERO, |stacks| stacks.off_cpu_min);
    run.pipeline.read_sleepers(min);
    // The gate is closed first: after that, the rings receive nothing more. Outputs are finished while
    // the probes are being detached.
    drop(stop);
    let in_time = run.drain_until_closed(|| control.is_finished());
    // Settled counters mean that no program is running any more, so the rings are complete as well.
    let kernel = run.counters.read_settled();
    while run.pipeline.drain(&mut run.rings) {}
    let closed = run.closed.unwrap_or_else(monotonic_ns);
    run.pipeline.still_away(closed, min);
    run.pipeline.requests_still_open();
    run.pipeline.tracepoints_skipped(run.counters.skipped());
    let traced = run.pipeline.traced_now();
    run.pipeline.detach(closed);
    run.pipeline.recording_closed(closed);
    let ledger = Ledger { kernel, user: run.pipeline.counts(), ..Ledger::default() };
    run.pipeline.finish(&ledger);
    let ledger = Ledger { user: run.pipeline.counts(), ..ledger };
    run.pipeline.settle(&ledger);
    if settings.reports.verbose {
        for line in ledger.details() {
            say(&format!("gctrace: {line}"));
        }
    }
    say(&format!("gctrace: {}", ledger.summary()));
    if closing::has_ended(&control, in_time) && control.join().is_err() {
        run.fatal.get_or_insert_with(|| "the control thread panicked; please report this".to_owned());
    }
    let has_seen = ledger.user.pipeline.processes > 0;
    if let Some(page) = page.filter(|_| run.fatal.is_none() && has_seen) {
        page.stay(&signals)?;
    }
    let status = run.command_status();
    if status.is_some()
        && settings.selection.is_of_command()
        && let Some(left) = traced.left_behind()
    {
        say(&format!("gctrace: {left}"));
    }
    match run.fatal {
        Some(reason) => Err(Failure::Control(reason)),
        None if !run.pipeline.failures().is_empty() => Ok(Outcome::OutputFailed),
        None if status.is_some_and(|status| status != 0) => Ok(Outcome::Command(status.unwrap_or_default())),
        None => {
            let refused = run.unreadable || ledger.user.pipeline.refused > 0;
            let (outcome, said) = Outcome::of(run.pipeline.has_reported(), refused, run.matched);
            said.into_iter().for_each(say);
            Ok(outcome)
        }
    }
}

/// What decides about selection in the kernel.
fn select(selection: &Selection) -> Select {
    // The processes of cgroups that are only in a v1 hierarchy are listed.
    let listed = selection.lists_processes() || discover::lists_cgroups();
    match (selection.all, selection.has_groups(), listed) {
        (true, ..) => Select::All,
        (false, true, true) => Select::ListedOrCgroups,
        (false, true, false) => Select::Cgroups,
        (false, false, _) => Select::Listed,
    }
}

#[expect(clippy::struct_excessive_bools, reason = "each is a separate fact")]
struct Run<'a> {
    pipeline: Pipeline,
    rings: bpf::Rings,
    counters: bpf::CounterReader,
    /// When the counters were last passed to the exporters.
    accounted: Option<Instant>,
    /// Sends orders about the GVL probes to the control thread; readable when that thread has findings.
    orders: UnixStream,
    /// Whether the control thread is running: after its end the socket would always be readable.
    controlled: bool,
    findings: Receiver<ControlEvent>,
    signals: &'a Signals,
    /// Requests of the user for a file of the kept data.
    asks: Asks,
    settings: &'a Settings,
    command: Option<command::Running>,
    /// Whether the run has ended.
    over: bool,
    /// Whether the gate was closed before the control thread had stopped: processes that it finds afterwards are not of the run.
    over_early: bool,
    matched: bool,
    /// Whether a selected process may be a Ruby and could not be read.
    unreadable: bool,
    /// Since when no further records are made.
    closed: Option<u64>,
    fatal: Option<String>,
    deadline: Option<Instant>,
    progress: Progress,
    clock: ClockWatch,
}

impl Run<'_> {
    /// The main loop.
    fn until_end(&mut self) -> Result<(), Failure> {
        loop {
            let more = self.pipeline.drain(&mut self.rings);
            let ended = self.take_findings();
            // Preparing an image may take long, while processes of other images are already being recorded.
            if !self.progress.ready && self.pipeline.counts().pipeline.decoded_snapshots > 0 {
                self.signals.tracing();
            }
            if ended || self.fatal.is_some() || self.pipeline.is_enough() {
                return Ok(());
            }
            if self.signals.take_end() {
                self.pass_on_signals();
                return Ok(());
            }
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) || self.command_ended() {
                return Ok(());
            }
            if self.asks.take() {
                self.asked();
            }
            self.account();
            self.keep_gvl_budget();
            if let Some(change) = self.clock.look() {
                say(&format!("gctrace: {change}"));
            }
            self.progress.show(self.deadline, &self.pipeline);
            if !more {
                self.wait()?;
            }
        }
    }

    fn account(&mut self) {
        let now = Instant::now();
        if self.settings.wants_accounts() && self.accounted.is_none_or(|last| now - last >= ACCOUNT) {
            self.accounted = Some(now);
            self.pipeline.gvl_so_far();
            // The sums include waits whose records have arrived since the rings were read. A recording triggered by a sum must contain them.
            self.pipeline.drain(&mut self.rings);
            if self.pipeline.account_follows() {
                self.take_sleepers();
            }
            self.pipeline.account(self.counters.read());
        }
    }

    /// Before outputs are read: gives them the off-CPU times up to now, both completed ones and those still in progress.
    fn take_sleepers(&mut self) {
        let min = self.settings.stacks.map_or(Duration::ZERO, |stacks| stacks.off_cpu_min);
        let until = Instant::now() + RETURNS;
        while self.pipeline.read_sleepers(min) && Instant::now() < until {
            std::thread::sleep(RETURN_TICK);
            self.pipeline.drain(&mut self.rings);
        }
        let now_ns = monotonic_ns();
        let away = self.pipeline.away_now();
        self.pipeline.drain(&mut self.rings);
        self.pipeline.away_so_far(away, now_ns, min);
    }

    /// Handles the user's request for a file of the kept data.
    fn asked(&mut self) {
        if self.settings.keep.is_none() {
            return say("gctrace: SIGUSR2: this run keeps nothing to write (see --keep)");
        }
        self.pipeline.dump();
        self.accounted = None;
    }

    /// The overhead of watching the GVL so far.
    fn gvl_cost(counters: &bpf::CounterReader) -> Option<Cost> {
        Some(Cost {
            hits: counters.one(Counter::GvlHits)?,
            program_ns: counters.one(Counter::GvlNs)?,
            stacks: counters.one(Counter::GvlStacks)?
                + counters.one(Counter::GvlHolderStacks)?
                + counters.one(Counter::GvlBlockers)?,
            ..Cost::default()
        })
    }

    fn keep_gvl_budget(&mut self) {
        let counters = &self.counters;
        let Some(order) = self.pipeline.gvl().budget(|| Self::gvl_cost(counters)) else { return };
        let order = match order {
            GvlOrder::Attach => GVL_ATTACH,
            GvlOrder::Detach => GVL_DETACH,
        };
        if let Err(error) = self.orders.write_all(&[order]) {
            log::error!("sending a GVL command to the control thread: {error}");
        }
    }

    fn wait(&self) -> Result<(), Failure> {
        let (gc, life) = (self.rings.gc_fd(), self.rings.life_fd());
        let fds =
            [gc, life, self.signals.end_fd(), self.signals.child_fd(), self.asks.fd(), self.orders.as_fd()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let watched = fds.len() - usize::from(!self.controlled);
        let fds = &mut fds[..watched];
        let left = self
            .deadline
            .map_or(TICK, |deadline| deadline.saturating_duration_since(Instant::now()).min(TICK));
        // The command waits until everything is known to be ready.
        let left = if self.progress.ready { left } else { left.min(START_TICK) };
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(system("waiting for events")(error.into())),
        }
    }

    /// Handles the findings of the control thread. Returns whether the run is over before it has started: only pids were
    /// selected, and none of them is a Ruby.
    fn take_findings(&mut self) -> bool {
        let mut woken = [0; 256];
        // Each byte stands for one finding, which is already in the channel.
        self.controlled &= !matches!(self.orders.read(&mut woken), Ok(0));
        loop {
            match self.findings.try_recv() {
                Ok(found) => {
                    if self.take(found) {
                        return true;
                    }
                }
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => {
                    // The control thread has detached all probes: nothing would be traced any more.
                    if self.closed.is_none() && self.fatal.is_none() {
                        self.fatal =
                            Some("the thread that finds processes has ended; please report this".to_owned());
                    }
                    return false;
                }
            }
        }
    }

    fn take(&mut self, found: ControlEvent) -> bool {
        match found {
            ControlEvent::Process { pid, .. } if self.over_early => {
                log::debug!("pid {pid} was found after the end of the run");
            }
            ControlEvent::Process { pid, image, state } => {
                self.matched = true;
                // The finding may be about the program of an exec that is still in the ring.
                self.pipeline.take_lives(self.rings.life());
                self.pipeline.add_process(pid, image, state);
                self.pipeline.find_sleepers(pid);
            }
            ControlEvent::Refused { pid, path, reason } => {
                let who = pid.map_or_else(String::new, |pid| format!("pid {pid}: "));
                say(&format!("gctrace: {who}{} is not traced: {reason}", path.display()));
                self.pipeline.refuse(pid, &path.to_string_lossy(), &reason);
            }
            ControlEvent::Left { pid, image, path, reason } => {
                let path = path.to_string_lossy();
                say(&format!("gctrace: pid {pid}: {path} is not traced any more: {reason}"));
                if is_running(pid) {
                    self.pipeline.leave_process(pid, image, &path, &reason, monotonic_ns());
                } else {
                    self.pipeline.refuse(Some(pid), &path, &reason);
                }
            }
            ControlEvent::Unproven { pid, path, reason } => {
                say(&format!("gctrace: pid {pid}: {} is not traced: {reason}", path.display()));
                let path = path.to_string_lossy();
                if is_running(pid) {
                    self.pipeline.refuse_process(pid, &path, &reason, monotonic_ns());
                } else {
                    // Its exit has been handled already: remembering the pid would affect the next process with this pid.
                    self.pipeline.refuse(Some(pid), &path, &reason);
                }
            }
            ControlEvent::NotRuby { pid, reason, denied } => {
                self.unreadable |= denied;
                say(&format!("gctrace: pid {pid}: {reason}"));
            }
            // Nobody tells the control thread to start the command then.
            ControlEvent::Ready { .. } if self.over => log::debug!("the run ended before it was ready"),
            ControlEvent::Ready { processes, probes, images, waits, begun } => {
                self.signals.tracing();
                console::end_progress();
                self.progress.ready = true;
                self.pipeline.begun();
                self.pipeline.recording_began(monotonic_ns());
                if begun.send(()).is_err() {
                    // Somebody waits only if a command is held back until tracing has started.
                    log::trace!("nobody waits for the begin of tracing");
                }
                let is_over = processes == 0 && !waits && !self.settings.selection.is_open();
                // The screen shows this itself; a message behind it would appear when the run is over.
                if !matches!(self.settings.top, Some(Show::Screen { .. })) {
                    let what = self.pipeline.only_process();
                    say(&format!(
                        "gctrace: ready: tracing {}{}",
                        what.unwrap_or_else(|| plural(processes as u64, "Ruby process")),
                        if self.settings.duration.is_none() && !is_over { " (Ctrl-C to stop)" } else { "" }
                    ));
                }
                log::info!("{probes} probes on {images} images");
                self.deadline = self.settings.duration.map(|duration| Instant::now() + duration);
                return is_over;
            }
            ControlEvent::Spawned(child) => self.command = Some(command::Running::new(child)),
            ControlEvent::Ended { pids } => {
                let ended = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                let plural = if pids.len() == 1 { "" } else { "s" };
                say(&format!("gctrace: pid{plural} {ended} ended"));
                return true;
            }
            ControlEvent::GvlProbes { attached } => {
                if let Some(cost) = Self::gvl_cost(&self.counters) {
                    self.pipeline.gvl().attached(attached, cost);
                }
            }
            ControlEvent::Fatal(reason) => self.fatal = Some(reason),
            ControlEvent::Closed { at_ns } => self.closed = Some(at_ns),
        }
        false
    }

    fn command_ended(&mut self) -> bool {
        self.signals.clear_child();
        let Some(command) = self.command.as_mut() else { return false };
        match command.has_ended() {
            Ok(None) => false,
            Ok(Some(status)) => {
                if !status.success() {
                    let command = self.settings.selection.command.as_deref().unwrap_or_default();
                    let command = command.join(OsStr::new(" ")).to_string_lossy().into_owned();
                    say(&format!("gctrace: `{command}` ended with {status}"));
                }
                true
            }
            Err(error) => {
                say(&format!("gctrace: waiting for the command: {error}"));
                true
            }
        }
    }

    /// The exit status of the command. Waits for it, because its status is passed on; if gctrace stops waiting, it says so.
    fn command_status(&mut self) -> Option<u8> {
        let command = self.command.as_mut()?;
        if self.fatal.is_some() {
            say(&format!("gctrace: the command (pid {}) keeps running", command.pid()));
            return None;
        }
        match command.wait(self.signals) {
            Ok(status) => Some(command::passed_on(status)),
            Err(error) => {
                say(&format!("gctrace: waiting for the command (pid {}): {error}", command.pid()));
                None
            }
        }
    }

    fn pass_on_signals(&self) {
        if let Some(command) = &self.command {
            command.pass_on(self.signals);
        }
    }
}
