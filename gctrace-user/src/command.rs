//! The command that gctrace starts and traces: how it is started and ended, and what its exit status means.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::AsFd as _,
        unix::{ffi::OsStrExt as _, process::ExitStatusExt as _},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use gctrace_tunemygc::printable::printable;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, getpgrp, kill_process},
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::{console::say, preflight::with_users_limits, signals::Signals, sudo::User};

/// Variables with secrets of gctrace itself, which are removed from the command's environment.
const SECRETS: [&str; 2] = ["RUBY_GC_TOKEN", "GCTRACE_PYROSCOPE_HEADERS"];
/// Maximum delay until the end of the command is noticed while gctrace only waits.
const TICK: Duration = Duration::from_millis(200);

/// A program to start.
#[derive(Clone, Debug)]
pub struct Program {
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// The user who runs it; `None`: the user who runs gctrace.
    pub user: Option<User>,
    /// Whether standard output is for data; the command's standard output then goes to standard error.
    pub data_on_stdout: bool,
}

impl Program {
    /// Why it certainly cannot be started, if its file does not exist. Checked before anything else is set up for it.
    pub fn missing(&self) -> Option<String> {
        let name = self.argv.first()?;
        let is_missing =
            |path: &Path| std::fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        // If PATH is unset, execvp(3) uses a default of its own.
        let places = std::env::var_os("PATH").filter(|_| !name.as_bytes().contains(&b'/'));
        let missing = match &places {
            _ if name.is_empty() => true,
            Some(places) => std::env::split_paths(places).all(|place| is_missing(&place.join(name))),
            None => name.as_bytes().contains(&b'/') && is_missing(Path::new(name)),
        };
        let place = if places.is_some() { " in PATH" } else { "" };
        missing.then(|| {
            let name = printable(&name.to_string_lossy()).into_owned();
            format!("starting `{name}`: no such file{place}; give a program that exists and may be run")
        })
    }

    /// Starts it.
    ///
    /// # Errors
    ///
    /// The program does not exist, or this user may not execute it.
    pub fn start(&self) -> io::Result<Child> {
        let Some((program, args)) = self.argv.split_first() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut command = Command::new(program);
        command.args(args);
        for secret in SECRETS {
            command.env_remove(secret);
        }
        if self.data_on_stdout {
            command.stdout(Stdio::from(io::stderr().as_fd().try_clone_to_owned()?));
        }
        let Some(user) = self.user.clone() else { return with_users_limits(|| command.spawn()) };
        user.adapt(&mut command);
        // The child inherits the credentials of the thread that spawns it.
        let thread = std::thread::Builder::new().name("gctrace-spawn".to_owned());
        let spawn = move || {
            user.become_on_this_thread()?;
            with_users_limits(|| command.spawn())
        };
        thread.spawn(spawn)?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// A started command.
#[derive(Debug)]
pub struct Running {
    child: Child,
    status: Option<ExitStatus>,
}

impl Running {
    /// Takes a child of this process.
    pub fn new(child: Child) -> Self {
        Self { child, status: None }
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status if it has ended.
    ///
    /// # Errors
    ///
    /// Its state cannot be read.
    pub fn has_ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Passes on the signals that gctrace has received.
    pub fn pass_on(&self, signals: &Signals) {
        signals.take_to_pass_on().into_iter().for_each(|signal| self.forward(signal));
    }

    /// Passes on a signal, unless the terminal has sent it to both processes.
    fn forward(&self, signal: i32) {
        let signal = match signal {
            SIGINT if in_foreground() => return,
            SIGINT => Signal::INT,
            SIGHUP => Signal::HUP,
            SIGTERM => Signal::TERM,
            _ => return,
        };
        // Its pid is not reused until it is reaped.
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|_| self.status.is_none())
            && let Err(error) = kill_process(pid, signal)
        {
            log::warn!("passing a signal on to the command: {error}");
        }
    }

    /// Waits for its end and passes on signals meanwhile. Everything else has been done before this is called.
    pub fn wait(&mut self, signals: &Signals) -> io::Result<ExitStatus> {
        if let Some(status) = self.has_ended()? {
            return Ok(status);
        }
        say(&format!("gctrace: tracing is over; waiting for the command (pid {}) to end", self.pid()));
        signals.waits_for_command();
        loop {
            while signals.take_end() {}
            self.pass_on(signals);
            signals.clear_child();
            if let Some(status) = self.has_ended()? {
                return Ok(status);
            }
            let (end, child) = (signals.end_fd(), signals.child_fd());
            let mut fds = [PollFd::new(&end, PollFlags::IN), PollFd::new(&child, PollFlags::IN)];
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The exit status of gctrace for a command: the command's own, or 128 plus the signal that ended it, as in shells.
pub fn passed_on(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// Whether our process group, which the command belongs to, is in the foreground, so that the terminal signals both.
fn in_foreground() -> bool {
    let terminal = std::fs::File::open("/dev/tty");
    terminal.is_ok_and(|terminal| rustix::termios::tcgetpgrp(terminal).is_ok_and(|group| group == getpgrp()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exit statuses are passed on; signals are reported as shells report them.
    #[test]
    fn statuses() {
        assert_eq!(passed_on(ExitStatus::from_raw(0)), 0);
        assert_eq!(passed_on(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(passed_on(ExitStatus::from_raw(SIGTERM)), 143);
    }

    /// The exit status is passed on, and the command does not get standard output if that is for data.
    #[test]
    fn started() {
        let program = |script: &str| Program {
            argv: ["sh", "-c", script].map(Into::into).to_vec(),
            user: None,
            data_on_stdout: true,
        };
        let status = |script| program(script).start().unwrap().wait().unwrap();
        assert_eq!(status("exit 7").code(), Some(7));
        assert!(status("[ /proc/self/fd/1 -ef /proc/self/fd/2 ]").success());
        let absent = Program { argv: vec!["/no/such/program".into()], ..program("") };
        assert_eq!(absent.start().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    /// The command does not get gctrace's own secrets; it gets every other variable.
    #[test]
    fn secrets() {
        // Set in the process that this test starts, which runs the same test.
        const INNER: &str = "GCTRACE_TEST_INNER";
        if std::env::var_os(INNER).is_some() {
            let script = "echo ${RUBY_GC_TOKEN-unset} ${GCTRACE_PYROSCOPE_HEADERS-unset} $RUBY_GC_TUNE >&2";
            let argv = ["sh", "-c", script].map(Into::into).to_vec();
            let program = Program { argv, user: None, data_on_stdout: true };
            assert!(program.start().unwrap().wait().unwrap().success());
            return;
        }
        let mut inner = Command::new(std::env::current_exe().unwrap());
        inner.args(["--exact", "command::tests::secrets", "--nocapture"]).env(INNER, "1");
        inner.env("RUBY_GC_TUNE", "kept");
        for secret in ["RUBY_GC_TOKEN", "GCTRACE_PYROSCOPE_HEADERS"] {
            inner.env(secret, "geheim");
        }
        let output = inner.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.lines().any(|line| line == "unset unset kept"), "{output:?}");
        assert!(!said.contains("geheim"), "{said}");
    }

    /// A program that certainly does not exist is reported in advance; anything else is tried.
    #[test]
    fn missing() {
        let missing =
            |name: &str| Program { argv: vec![name.into()], user: None, data_on_stdout: false }.missing();
        for there in ["sh", "/bin/sh", "/tmp", "./src"] {
            assert_eq!(missing(there), None, "{there}");
        }
        let why = |name: &str| missing(name).unwrap();
        assert!(why("no-such-program").starts_with("starting `no-such-program`: no such file in PATH; give"));
        assert!(why("/no/such/program").starts_with("starting `/no/such/program`: no such file; give"));
        assert!(why("").contains("no such file") && why("a\u{1b}b").contains("a\\u{1b}b"));
    }
}
