//! Starting, stopping and reading gctrace.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::PATIENCE;
use crate::child::{Finished, Guarded};
use crate::ledger;
use crate::live::{Live, gctrace_binary};
use crate::report::Report;

/// What gctrace prints if its counts do not balance (crates/report/src/ledger/account.rs).
const UNBALANCED: &str = "THE COUNTS DO NOT ADD UP";

/// A gctrace command that has not been started.
#[derive(Debug)]
pub struct Invocation {
    command: Command,
}

impl Invocation {
    /// gctrace with these arguments and nothing else.
    pub fn new<I: IntoIterator<Item: AsRef<OsStr>>>(args: I) -> Result<Self> {
        Ok(Self::of(&gctrace_binary()?, args))
    }

    /// Like [`Self::new`], for the binary at this path.
    pub fn of<I: IntoIterator<Item: AsRef<OsStr>>>(binary: &Path, args: I) -> Self {
        let mut command = Command::new(binary);
        command.args(args);
        Self { command }
    }

    /// gctrace with these arguments and `--format jsonl`.
    pub fn jsonl<I: IntoIterator<Item: AsRef<OsStr>>>(args: I) -> Result<Self> {
        let mut all: Vec<OsString> = vec!["--format".into(), "jsonl".into()];
        all.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        Self::new(all)
    }

    /// Adds environment variables. A COMMAND inherits them.
    #[must_use]
    pub fn envs(mut self, envs: Vec<(OsString, OsString)>) -> Self {
        self.command.envs(envs);
        self
    }

    /// Makes it report what it does, so that a test can wait for it ([`Gctrace::wait_server`]).
    #[must_use]
    pub fn informing(self) -> Self {
        self.envs(vec![("RUST_LOG".into(), "info".into())])
    }

    /// Gives access to the command for everything that the other methods do not cover.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Command)) -> Self {
        change(&mut self.command);
        self
    }

    /// Starts it.
    pub fn start(mut self) -> Result<Gctrace> {
        Ok(Gctrace { process: Guarded::start("gctrace", &mut self.command)? })
    }

    /// Starts it and waits until its probes are attached.
    pub fn start_ready(self) -> Result<Gctrace> {
        let mut gctrace = self.start()?;
        gctrace.wait_ready()?;
        Ok(gctrace)
    }

    /// Starts it and waits until it ends by itself.
    pub fn run(self) -> Result<Finished> {
        self.start()?.wait()
    }
}

/// A running gctrace. Dropping it kills it.
#[derive(Debug)]
pub struct Gctrace {
    process: Guarded,
}

impl Gctrace {
    /// Starts gctrace on all Rubies with jsonl output, and waits until it is ready.
    pub fn all_ruby(_live: &Live) -> Result<Self> {
        Invocation::jsonl(["--all-ruby"])?.start_ready()
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits for the line that reports that all probes are attached, and returns it.
    pub fn wait_ready(&mut self) -> Result<String> {
        self.process.wait_stderr(PATIENCE, "gctrace: ready", |line| line.starts_with("gctrace: ready"))
    }

    /// Waits for a line of standard error that contains `part`, and returns it.
    pub fn wait_error(&mut self, part: &str) -> Result<String> {
        self.process.wait_stderr(PATIENCE, part, |line| line.contains(part))
    }

    /// Waits for this many lines of standard error that contain `part`.
    pub fn wait_errors(&self, part: &str, count: usize) -> Result<()> {
        self.process.wait_stderr_count(PATIENCE, count, |line| line.contains(part))
    }

    /// Waits until the requests of this process are traced. It must have been started with [`Invocation::informing`].
    pub fn wait_server(&mut self, pid: u32) -> Result<()> {
        self.wait_error(&format!("pid {pid} is traced as a server from now on")).map(drop)
    }

    /// Like [`Self::wait_server`], for a Puma that listens on a Unix socket.
    pub fn wait_unix_server(&mut self, pid: u32) -> Result<()> {
        self.wait_error(&format!("pid {pid} is traced on its Unix sockets from now on")).map(drop)
    }

    /// Writes a line to its standard input, which a command shares.
    pub fn say(&mut self, line: &str) -> Result<()> {
        self.process.say(line)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Whether it is still running.
    pub fn running(&mut self) -> Result<bool> {
        self.process.running()
    }

    /// Waits until it has printed a line of this type about this process.
    pub fn wait_line(&mut self, kind: &str, pid: u32) -> Result<()> {
        self.wait_line_with(kind, pid, |_| true)
    }

    /// Waits until it has printed a line of this type about this process that satisfies `also`.
    pub fn wait_line_with(&mut self, kind: &str, pid: u32, also: impl Fn(&Value) -> bool) -> Result<()> {
        let what = format!("a {kind} line about {pid}");
        let wanted = |line: &str| {
            serde_json::from_str::<Value>(line).is_ok_and(|value| {
                value["type"] == kind && value["pid"].as_u64() == Some(u64::from(pid)) && also(&value)
            })
        };
        self.process.wait_stdout(PATIENCE, &what, wanted).map(drop)
    }

    /// The lines of standard output so far.
    pub fn stdout_so_far(&self) -> Vec<String> {
        self.process.stdout_so_far()
    }

    /// Waits until this many requests are reported. A thread finishes a request only after its client has received the response.
    pub fn wait_requests(&self, count: usize) -> Result<()> {
        self.process.wait_stdout_count(PATIENCE, count, |line| line.starts_with(r#"{"type":"request""#))
    }

    /// Waits until it has printed a request whose line contains `part`.
    pub fn wait_request(&self, part: &str) -> Result<()> {
        let is_it = |line: &str| line.starts_with(r#"{"type":"request""#) && line.contains(part);
        self.process.wait_stdout_count(PATIENCE, 1, is_it).with_context(|| format!("no request {part}"))
    }

    /// Interrupts it as Ctrl-C does and returns its jsonl output. Its ledger must balance and its status must be 0.
    pub fn stop(self) -> Result<Report> {
        self.stop_by(Signal::INT).map(|(report, _)| report)
    }

    /// Like [`Self::stop`], with another signal. Also returns the raw output.
    pub fn stop_by(self, signal: Signal) -> Result<(Report, Finished)> {
        self.process.signal(signal)?;
        self.done()
    }

    /// Interrupts it and returns its raw output.
    pub fn interrupt(self) -> Result<Finished> {
        self.process.signal(Signal::INT)?;
        self.wait()
    }

    /// Waits until it ends by itself and returns its jsonl output. Its ledger must balance and its status must be 0.
    pub fn done(self) -> Result<(Report, Finished)> {
        let finished = self.wait()?;
        let report = read(&finished)?;
        Ok((report, finished))
    }

    /// Waits until it ends by itself. Any status is accepted. Its own check of the ledger must not have failed, in any format.
    pub fn wait(self) -> Result<Finished> {
        let finished = self.process.finish(PATIENCE)?;
        let broken = finished.stdout.iter().chain(&finished.stderr).find(|line| line.contains(UNBALANCED));
        ensure!(broken.is_none(), "{broken:?}");
        Ok(finished)
    }

    /// Kills it at once, without any chance to clean up.
    pub fn kill(self) -> Result<Finished> {
        self.process.signal(Signal::KILL)?;
        self.process.finish(Duration::from_mins(1))
    }
}

/// Parses the jsonl of a successful run and checks its ledger.
pub fn read(finished: &Finished) -> Result<Report> {
    ensure!(finished.status.success(), "gctrace failed with {}:\n{}", finished.status, finished.errors());
    let report = Report::parse(&finished.stdout)?;
    ledger::check(&report)
        .with_context(|| format!("the ledger; diagnostics were:\n{}", finished.errors()))?;
    Ok(report)
}
