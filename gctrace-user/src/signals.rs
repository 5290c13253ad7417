//! Signals that end a run, and how: at once before tracing begins, then in order, and without files if the user insists.

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

use crate::{console::say, export, host::proc};

/// A second Ctrl-C counts from this long after the first on. Programs that signal a process and then its group (such as
/// `timeout`) do both within microseconds.
const SECOND_THOUGHT: Duration = Duration::from_secs(1);

/// What a signal leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Nothing has been recorded yet: what the signal does by default.
    Die,
    /// The run ends in order.
    Finish {
        /// By Ctrl-C: the user can press it again.
        interactive: bool,
    },
    /// The end is to take less time.
    Shorten,
    /// The user does not want to wait for the files.
    GiveUp,
    /// It has been answered before.
    Nothing,
}

/// Where a file would become larger than the user's limit (`ulimit -f`), the signal would end gctrace without a word. With a handler the write fails, and
/// that is reported. Programs that gctrace starts get the signal as always.
pub fn report_large_files() {
    if let Err(error) = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))) {
        log::info!("a file that is too large will end gctrace: {error}");
    }
}

/// What a second Ctrl-C does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Again {
    /// It gives up, without files.
    #[default]
    WithoutFiles,
    /// It gives up; files are not written anyway.
    GiveUp,
    /// It makes the end shorter; the next one gives up.
    Shorten,
}

impl Again {
    fn words(self) -> &'static str {
        match self {
            Self::WithoutFiles => " (Ctrl-C again to give up without files)",
            Self::GiveUp => " (Ctrl-C again to give up)",
            Self::Shorten => " (Ctrl-C again to report what is known by then)",
        }
    }
}

/// Which signals have come.
#[derive(Debug, Default)]
struct Endings {
    tracing: bool,
    finishing: bool,
    interrupted: Option<Instant>,
    /// What another Ctrl-C does.
    again: Again,
    /// The first signal to end.
    by: Option<i32>,
}

impl Endings {
    fn answer(&mut self, signal: i32, now: Instant) -> Answer {
        if !self.tracing {
            return Answer::Die;
        }
        let first = !std::mem::replace(&mut self.finishing, true);
        self.by.get_or_insert(signal);
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
            _ => Answer::Nothing,
        }
    }
}

/// Signals as readable descriptors.
pub struct Signals {
    /// Becomes readable with the first signal to end.
    end: UnixStream,
    child: UnixStream,
    endings: Arc<Mutex<Endings>>,
}

impl Signals {
    /// Answers signals from now on. Until [`Signals::tracing`] a signal to end does so at once.
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
        // `nohup` has it ignored: then it stays so, for the command, too. Shells have Ctrl-C ignored of what scripts start in the background, which
        // end it by that signal all the same.
        let hangup = (!proc::is_ignored(SIGHUP)).then_some(SIGHUP);
        let mut signals = iterator::Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
        let known = endings.clone();
        // A thread of its own, so that Ctrl-C is answered while files are being written or sent.
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

    /// Tracing has begun: from now on a signal ends the run in order.
    pub fn tracing(&self) {
        lock(&self.endings).tracing = true;
        export::keep_made();
    }

    /// The end takes time, and can be made shorter: that is what a second Ctrl-C asks for, as [`Signals::take_end`] then says again. Only a
    /// third one gives up.
    pub fn can_shorten(&self) {
        lock(&self.endings).again = Again::Shorten;
    }

    /// The run writes no files.
    pub fn writes_no_files(&self) {
        lock(&self.endings).again = Again::GiveUp;
    }

    /// Takes the request to end, if there is one.
    pub fn take_end(&self) -> bool {
        let mut byte = [0];
        (&self.end).read(&mut byte).is_ok_and(|n| n > 0)
    }

    /// The first signal to end, if one has come.
    pub fn ended_by(&self) -> Option<i32> {
        lock(&self.endings).by
    }

    /// Forgets that children have changed their state.
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

/// SIGUSR2, by which users ask for a file of what is kept, as a readable descriptor.
#[derive(Debug)]
pub struct Asks(UnixStream);

impl Asks {
    /// Answers the signal from now on, and not by ending.
    pub fn install() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        pipe::register(SIGUSR2, write)?;
        Ok(Self(read))
    }

    /// Whether the signal has come since this was called last. Several are one.
    pub fn take(&self) -> bool {
        let mut bytes = [0; 64];
        let mut has_come = false;
        while (&self.0).read(&mut bytes).is_ok_and(|n| n > 0) {
            has_come = true;
        }
        has_come
    }

    /// Readable when it has come.
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
            // Held until the end, so that no other file is made.
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
            // Holding this, no file appears between what is said and the end.
            let published = export::published();
            match published.as_slice() {
                [] if again != Again::WithoutFiles => say("gctrace: gave up"),
                [] => say("gctrace: gave up: no output files were written"),
                some => {
                    let names: Vec<_> = some.iter().map(|path| path.display().to_string()).collect();
                    say(&format!(
                        "gctrace: gave up: only these output files were written: {}",
                        names.join(", ")
                    ));
                }
            }
            std::process::exit(2);
        }
        Answer::Nothing => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only a second Ctrl-C, and only some time after the first, leaves without files.
    #[test]
    fn giving_up() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut endings = Endings { tracing: true, ..Endings::default() };
        // As `timeout` does it, and an impatient service manager.
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

    /// Where the end can be made shorter, the second Ctrl-C does that, and the third gives up.
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

    /// Files are spoken of only where the run writes some.
    #[test]
    fn what_is_given_up() {
        assert!(Endings::default().again.words().contains("without files"));
        assert!(!Again::GiveUp.words().contains("files") && !Again::Shorten.words().contains("files"));
    }

    /// Before anything is recorded a signal does what it does to any program.
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
