//! Signals that end a run: immediately before tracing begins, afterwards gracefully, and without files if the user insists.

use std::{
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    time::{Duration, Instant},
};

use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR2, SIGXFSZ},
    flag, iterator,
    low_level::{emulate_default_handler, pipe},
};

use crate::{
    console::say,
    export::{self, Published},
    host::proc,
};

/// Minimum time after the first Ctrl-C for a second one to count. Programs that signal a process and then its group (such as
/// `timeout`) do both within microseconds.
const SECOND_THOUGHT: Duration = Duration::from_secs(1);

/// The reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Nothing has been recorded yet: take the default action of the signal.
    Die,
    /// End the run gracefully.
    Finish {
        /// Whether it was Ctrl-C, which the user can press again.
        interactive: bool,
    },
    /// Shorten the work at the end of the run.
    Shorten,
    /// Exit without waiting for the files.
    GiveUp,
    /// None for gctrace: an earlier signal has the same effect. The command gets it, too.
    PassOn,
    /// None: an earlier signal has the same effect.
    Nothing,
}

/// Handles SIGXFSZ. By default the signal silently kills gctrace if a file would exceed the user's limit (`ulimit -f`). With a handler the write
/// fails, and the error is reported. Programs that gctrace starts get the signal as usual.
pub fn report_large_files() {
    if let Err(error) = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))) {
        log::info!("a file that is too large will end gctrace: {error}");
    }
}

/// Handles SIGUSR2, which asks for a dump of what a run has kept: by default it would kill a gctrace that keeps nothing, and users send it to all by
/// name. Programs that gctrace starts get the signal as usual.
pub fn survive_requests() {
    if let Err(error) = flag::register(SIGUSR2, Arc::new(AtomicBool::new(false))) {
        log::info!("SIGUSR2 will end gctrace: {error}");
    }
}

/// The effect of a second Ctrl-C.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Again {
    /// It gives up, without files.
    #[default]
    WithoutFiles,
    /// It gives up; no files appear at the end of the run anyway.
    GiveUp,
    /// It gives up waiting for the command; everything else is done.
    Command,
    /// It shortens the end; the next one gives up.
    Shorten,
}

impl Again {
    fn words(self) -> &'static str {
        match self {
            Self::WithoutFiles => " (Ctrl-C again to give up without files)",
            Self::GiveUp => " (Ctrl-C again to give up)",
            Self::Command => " (Ctrl-C again to give up waiting for the command)",
            Self::Shorten => " (Ctrl-C again to report what is known by then)",
        }
    }
}

/// The signals received so far.
#[derive(Debug, Default)]
struct Endings {
    tracing: bool,
    finishing: bool,
    interrupted: Option<Instant>,
    /// The effect of another Ctrl-C.
    again: Again,
    /// The first signal that ends the run.
    by: Option<i32>,
    /// Signals that the command, if there is one, has not been sent yet.
    to_pass_on: Option<Vec<i32>>,
    /// The last signal that was to be passed on.
    passed_on: Option<(i32, Instant)>,
}

impl Endings {
    fn answer(&mut self, signal: i32, now: Instant) -> Answer {
        if !self.tracing {
            return Answer::Die;
        }
        let first = !std::mem::replace(&mut self.finishing, true);
        self.by.get_or_insert(signal);
        let passed_on = self.pass_on(signal, now);
        match (signal, self.interrupted) {
            (SIGINT, Some(before)) if now.saturating_duration_since(before) >= SECOND_THOUGHT => {
                if self.again != Again::Shorten {
                    return Answer::GiveUp;
                }
                self.again = Again::GiveUp;
                self.interrupted = Some(now);
                Answer::Shorten
            }
            (SIGINT, None) => {
                self.interrupted = Some(now);
                Answer::Finish { interactive: true }
            }
            _ if first => Answer::Finish { interactive: false },
            _ if passed_on => Answer::PassOn,
            _ => Answer::Nothing,
        }
    }

    /// Whether the command must be sent a signal: not if it is the same as just before, from a program that signals a process and its group.
    fn pass_on(&mut self, signal: i32, now: Instant) -> bool {
        let Some(to_pass_on) = &mut self.to_pass_on else { return false };
        let is_again = self.passed_on.is_some_and(|(before, at)| {
            before == signal && now.saturating_duration_since(at) < SECOND_THOUGHT
        });
        if !is_again {
            self.passed_on = Some((signal, now));
            to_pass_on.push(signal);
        }
        !is_again
    }
}

/// Signals as readable descriptors.
pub struct Signals {
    /// Becomes readable at the first signal that ends the run.
    end: UnixStream,
    child: UnixStream,
    endings: Arc<Mutex<Endings>>,
}

impl Signals {
    /// Handles signals from now on. Until [`Signals::tracing`] is called, a signal that ends the run does so immediately.
    pub fn install() -> io::Result<Self> {
        let pair = || {
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            Ok::<_, io::Error>((read, write))
        };
        let (end, wake) = pair()?;
        let (child, child_write) = pair()?;
        pipe::register(SIGCHLD, child_write)?;
        let endings = Arc::<Mutex<Endings>>::default();
        // `nohup` ignores SIGHUP: it stays ignored, also for the command. SIGINT is handled even if it is ignored: shells ignore it for processes
        // that scripts start in the background, but scripts end these with that signal all the same.
        let hangup = (!proc::is_ignored(SIGHUP)).then_some(SIGHUP);
        let mut signals = iterator::Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
        let known = endings.clone();
        // A separate thread, so that Ctrl-C is handled while files are being written or sent.
        std::thread::Builder::new().name("gctrace-signals".to_owned()).spawn(move || {
            for signal in &mut signals {
                let (answer, again) = {
                    let mut endings = lock(&known);
                    (endings.answer(signal, Instant::now()), endings.again)
                };
                act(answer, again, signal, &wake);
            }
        })?;
        Ok(Self { end, child, endings })
    }

    /// Tracing has begun: from now on a signal ends the run gracefully.
    pub fn tracing(&self) {
        lock(&self.endings).tracing = true;
        export::keep_made();
    }

    /// The end takes time and can be shortened: a second Ctrl-C requests that, and [`Signals::take_end`] returns true again. Only a
    /// third one gives up.
    pub fn can_shorten(&self) {
        lock(&self.endings).again = Again::Shorten;
    }

    /// No files appear at the end of the run.
    pub fn writes_no_files(&self) {
        lock(&self.endings).again = Again::GiveUp;
    }

    /// Signals are to be passed on to a command.
    pub fn has_command(&self) {
        lock(&self.endings).to_pass_on = Some(Vec::new());
    }

    /// Everything is done except that the command has not ended.
    pub fn waits_for_command(&self) {
        lock(&self.endings).again = Again::Command;
    }

    /// Takes the signals that the command has not been sent yet, in their order.
    pub fn take_to_pass_on(&self) -> Vec<i32> {
        lock(&self.endings).to_pass_on.as_mut().map_or_else(Vec::new, std::mem::take)
    }

    /// Takes the request to end the run, if there is one.
    pub fn take_end(&self) -> bool {
        let mut byte = [0];
        (&self.end).read(&mut byte).is_ok_and(|n| n > 0)
    }

    /// The first signal that ends the run, if one has been received.
    pub fn ended_by(&self) -> Option<i32> {
        lock(&self.endings).by
    }

    /// Clears the notification that a child has changed its state.
    pub fn clear_child(&self) {
        let mut bytes = [0; 64];
        while (&self.child).read(&mut bytes).is_ok_and(|n| n > 0) {}
    }

    /// Readable when the run is to end.
    pub fn end_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// Readable when a child has changed its state.
    pub fn child_fd(&self) -> BorrowedFd<'_> {
        self.child.as_fd()
    }
}

/// SIGUSR2, by which users request a dump of the kept recording, as a readable descriptor.
#[derive(Debug)]
pub struct Asks(UnixStream);

impl Asks {
    /// Handles the signal from now on instead of dying from it.
    pub fn install() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        pipe::register(SIGUSR2, write)?;
        Ok(Self(read))
    }

    /// Whether the signal has been received since the last call. Several signals count as one.
    pub fn take(&self) -> bool {
        let mut bytes = [0; 64];
        let mut has_come = false;
        while (&self.0).read(&mut bytes).is_ok_and(|n| n > 0) {
            has_come = true;
        }
        has_come
    }

    /// Readable when the signal has been received.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn lock(endings: &Mutex<Endings>) -> MutexGuard<'_, Endings> {
    endings.lock().unwrap_or_else(PoisonError::into_inner)
}

fn act(answer: Answer, again: Again, signal: i32, mut wake: &UnixStream) {
    let mut wake_main = || {
        if let Err(error) = wake.write_all(&[0]) {
            log::error!("waking the main thread to finish: {error}");
        }
    };
    match answer {
        Answer::Die => {
            // Held until the process ends, so that no other file is created.
            let _none_is_made = export::remove_made();
            let files = if again == Again::WithoutFiles { "; no files were written" } else { "" };
            say(&format!("gctrace: stopped before tracing began{files}"));
            if let Err(error) = emulate_default_handler(signal) {
                log::error!("ending by signal {signal}: {error}");
                std::process::exit(2);
            }
        }
        Answer::Finish { interactive } => {
            wake_main();
            let again = if interactive { again.words() } else { "" };
            say(&format!("gctrace: finishing…{again}"));
        }
        Answer::Shorten => {
            wake_main();
            say("gctrace: reporting what is known… (Ctrl-C again to give up)");
        }
        Answer::GiveUp => {
            // While this is held, no file appears between the message and the exit.
            let published = export::published();
            say(&gave_up(again, &published));
            std::process::exit(2);
        }
        Answer::PassOn => wake_main(),
        Answer::Nothing => {}
    }
}

/// The last message of a run that gives up, with the files that there are.
fn gave_up(again: Again, published: &[Published]) -> String {
    let name = |Published { path, is_whole }: &Published| {
        let part = if *is_whole { "" } else { " (up to now)" };
        format!("{}{part}", path.display())
    };
    match published {
        _ if again == Again::Command => "gctrace: gave up waiting for the command".to_owned(),
        [] if again != Again::WithoutFiles => "gctrace: gave up".to_owned(),
        [] => "gctrace: gave up: no output files were written".to_owned(),
        some => {
            let names: Vec<_> = some.iter().map(name).collect();
            format!("gctrace: gave up: only these output files were written: {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only a second Ctrl-C, some time after the first, exits without files.
    #[test]
    fn giving_up() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut endings = Endings { tracing: true, ..Endings::default() };
        // As sent by `timeout`, and by an impatient service manager.
        assert_eq!(endings.answer(SIGTERM, at(0)), Answer::Finish { interactive: false });
        for signal in [SIGTERM, SIGHUP] {
            assert_eq!(endings.answer(signal, at(0)), Answer::Nothing);
            assert_eq!(endings.answer(signal, at(60_000)), Answer::Nothing);
        }
        assert_eq!(endings.answer(SIGINT, at(60_001)), Answer::Finish { interactive: true });
        assert_eq!(endings.answer(SIGINT, at(61_000)), Answer::Nothing);
        assert_eq!(endings.answer(SIGTERM, at(61_500)), Answer::Nothing);
        assert_eq!(endings.answer(SIGINT, at(61_001)), Answer::GiveUp);
    }

    /// If the end can be shortened, the second Ctrl-C does that, and the third gives up.
    #[test]
    fn shortening() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut endings = Endings { tracing: true, again: Again::Shorten, ..Endings::default() };
        assert_eq!(endings.answer(SIGINT, at(0)), Answer::Finish { interactive: true });
        assert_eq!(endings.answer(SIGINT, at(1)), Answer::Nothing);
        assert_eq!(endings.answer(SIGINT, at(1_500)), Answer::Shorten);
        assert_eq!(endings.answer(SIGINT, at(1_501)), Answer::Nothing);
        assert_eq!(endings.answer(SIGINT, at(3_000)), Answer::GiveUp);
    }

    /// The command gets every signal, in their order, but not what a program sends to it and to its group at one time.
    #[test]
    fn passing_on() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut endings = Endings { tracing: true, to_pass_on: Some(Vec::new()), ..Endings::default() };
        assert_eq!(endings.answer(SIGHUP, at(0)), Answer::Finish { interactive: false });
        assert_eq!(endings.answer(SIGHUP, at(1)), Answer::Nothing);
        assert_eq!(endings.answer(SIGTERM, at(2)), Answer::PassOn);
        assert_eq!(endings.answer(SIGTERM, at(900)), Answer::Nothing);
        assert_eq!(endings.answer(SIGTERM, at(1_002)), Answer::PassOn);
        assert_eq!(endings.answer(SIGINT, at(1_003)), Answer::Finish { interactive: true });
        assert_eq!(endings.to_pass_on, Some(vec![SIGHUP, SIGTERM, SIGTERM, SIGINT]));
        let mut alone = Endings { tracing: true, ..Endings::default() };
        assert_eq!(alone.answer(SIGHUP, at(0)), Answer::Finish { interactive: false });
        assert_eq!((alone.answer(SIGTERM, at(2)), alone.to_pass_on), (Answer::Nothing, None));
    }

    /// The last message names the files that there are, and says which of them are not complete.
    #[test]
    fn messages_of_giving_up() {
        let file = |path: &str, is_whole| Published { path: path.into(), is_whole };
        let files = [file("a.csv", true), file("b.gctrace", false)];
        let all = "gctrace: gave up: only these output files were written: a.csv, b.gctrace (up to now)";
        assert_eq!(gave_up(Again::WithoutFiles, &files), all);
        assert_eq!(gave_up(Again::GiveUp, &files), all);
        assert_eq!(gave_up(Again::WithoutFiles, &[]), "gctrace: gave up: no output files were written");
        assert_eq!(gave_up(Again::GiveUp, &[]), "gctrace: gave up");
        assert_eq!(gave_up(Again::Command, &files), "gctrace: gave up waiting for the command");
    }

    /// Files are mentioned only if the run writes some.
    #[test]
    fn what_is_given_up() {
        assert!(Endings::default().again.words().contains("without files"));
        assert!(!Again::GiveUp.words().contains("files") && !Again::Shorten.words().contains("files"));
    }

    /// Before anything is recorded, a signal has its default effect.
    #[test]
    fn during_the_start() {
        let now = Instant::now();
        let mut endings = Endings::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            assert_eq!(endings.answer(signal, now), Answer::Die);
        }
        endings.tracing = true;
        assert_eq!(endings.answer(SIGINT, now), Answer::Finish { interactive: true });
    }
}
