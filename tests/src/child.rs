//! A child process that never outlives its guard, with its output collected line by line.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::slowness;

/// A running child process. Dropping it kills it.
#[derive(Debug)]
pub struct Guarded {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Lines,
    stderr: Lines,
}

/// The result of a finished child process.
#[derive(Debug)]
pub struct Finished {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output, by lines.
    pub stdout: Vec<String>,
    /// Its standard error, by lines.
    pub stderr: Vec<String>,
}

impl Finished {
    /// All of standard error as one string.
    pub fn errors(&self) -> String {
        self.stderr.join("\n")
    }
}

impl Guarded {
    /// Starts `command` with its three streams connected to this process.
    pub fn start(name: impl Into<String>, command: &mut Command) -> Result<Self> {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name}: {command:?}"))?;
        let stdin = child.stdin.take();
        let stdout = Lines::collect(child.stdout.take());
        let stderr = Lines::collect(child.stderr.take());
        Ok(Self { name, child, stdin, stdout, stderr })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to its standard input.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let stdin =
            self.stdin.as_mut().ok_or_else(|| anyhow!("standard input of {} is closed", self.name))?;
        writeln!(stdin, "{line}")
            .and_then(|()| stdin.flush())
            .with_context(|| format!("cannot talk to {}", self.name))
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).context("a pid is positive")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Waits until a line of standard output satisfies `wanted` and returns it.
    pub fn wait_stdout(
        &mut self,
        patience: Duration,
        what: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<String> {
        let found = self.stdout.wait(patience, wanted);
        found.map_err(|why| self.complaint(&format!("{what} on standard output: {why}")))
    }

    /// Waits until a line of standard error satisfies `wanted` and returns it.
    pub fn wait_stderr(
        &mut self,
        patience: Duration,
        what: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<String> {
        let found = self.stderr.wait(patience, wanted);
        found.map_err(|why| self.complaint(&format!("{what} on standard error: {why}")))
    }

    /// Waits for this many lines of standard output that satisfy `wanted`.
    pub fn wait_stdout_count(
        &self,
        patience: Duration,
        count: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let found = self.stdout.wait_count(patience, count, wanted);
        found.map_err(|why| anyhow!("standard output of {}: {why}", self.name))
    }

    /// Likewise, of standard error.
    pub fn wait_stderr_count(
        &self,
        patience: Duration,
        count: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let found = self.stderr.wait_count(patience, count, wanted);
        found.map_err(|why| anyhow!("standard error of {}: {why}", self.name))
    }

    /// The lines of standard output so far.
    pub fn stdout_so_far(&self) -> Vec<String> {
        self.stdout.snapshot()
    }

    /// Whether it is still running.
    pub fn running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits until it ends. A child that does not end in time is killed, and an error is returned.
    pub fn finish(mut self, patience: Duration) -> Result<Finished> {
        let deadline = Instant::now() + scaled(patience);
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                let doing = doing(self.pid());
                self.end();
                let late = format!("did not end within {:?}; its threads:\n{doing}", scaled(patience));
                return Err(self.complaint(&late));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        self.stdin = None;
        if !self.stdout.join(deadline) || !self.stderr.join(deadline) {
            bail!("{} has ended but another process holds its output open", self.name);
        }
        Ok(Finished { status, stdout: self.stdout.snapshot(), stderr: self.stderr.snapshot() })
    }

    fn end(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // It may already have ended by itself; in both cases it is reaped.
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }

    fn complaint(&self, what: &str) -> anyhow::Error {
        let last = |lines: Vec<String>| lines[lines.len().saturating_sub(15)..].join("\n  ");
        anyhow!(
            "{}: {what}\n stderr:\n  {}\n stdout (end):\n  {}",
            self.name,
            last(self.stderr.snapshot()),
            last(self.stdout.snapshot())
        )
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.end();
    }
}

/// What each thread of a process is doing. From the kernel: its name, its state, the function and the system call in which it sleeps,
/// and its pending signals. From gctrace, for a Ruby: the stacks.
fn doing(pid: u32) -> String {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return "  they are gone".to_owned();
    };
    let dump = crate::live::gctrace_binary().and_then(|binary| {
        let mut dump = Command::new("timeout");
        Ok(dump.arg("30").arg(binary).args(["dump", "--pid", &pid.to_string()]).output()?)
    });
    let dump = match dump {
        Ok(dump) => {
            [dump.stdout, dump.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
        }
        Err(error) => format!("no dump: {error:#}"),
    };
    let lines = threads.flatten().map(|thread| {
        let read = |name: &str| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let status = read("status");
        let wanted = ["Name", "State", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigCgt"];
        let wanted = status.lines().filter(|line| wanted.iter().any(|key| line.starts_with(key)));
        let wanted: Vec<String> = wanted.map(|line| line.replace('\t', " ")).collect();
        let stack = read("stack").replace('\n', "; ");
        let (sleeps, call) = (read("wchan"), read("syscall"));
        format!("  {}\n    in {sleeps}, system call {}\n    {stack}", wanted.join(", "), call.trim_end())
    });
    format!("{}\n{dump}", lines.collect::<Vec<_>>().join("\n"))
}

/// A timeout far above any real duration, raised (at most fivefold) on an emulated machine, which gets only the CPU time that the tests leave it.
fn scaled(patience: Duration) -> Duration {
    patience * u32::try_from(slowness().min(5)).unwrap_or(1)
}

#[derive(Debug, Default)]
struct Collected {
    lines: Vec<String>,
    closed: bool,
}

/// Lines read by a background thread.
#[derive(Debug)]
struct Lines {
    shared: Arc<(Mutex<Collected>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Lines {
    fn collect<R: Read + Send + 'static>(stream: Option<R>) -> Self {
        let shared = Arc::new((Mutex::new(Collected::default()), Condvar::new()));
        let thread = stream.map(|stream| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                for line in BufReader::new(stream).split(b'\n') {
                    let Ok(line) = line else { break };
                    lock(&shared.0).lines.push(String::from_utf8_lossy(&line).into_owned());
                    shared.1.notify_all();
                }
                lock(&shared.0).closed = true;
                shared.1.notify_all();
            })
        });
        Self { shared, thread }
    }

    /// Waits for this many lines. It copies none: whoever writes them must not wait for that.
    fn wait_count(
        &self,
        patience: Duration,
        count: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), String> {
        let deadline = Instant::now() + scaled(patience);
        let (mut seen, mut there) = (0, 0);
        let mut state = lock(&self.shared.0);
        loop {
            there += state.lines[seen..].iter().filter(|line| wanted(line)).count();
            if there >= count {
                return Ok(());
            }
            seen = state.lines.len();
            let left = deadline.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                return Err(format!("{there} of {count} lines came"));
            }
            state = self.shared.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn snapshot(&self) -> Vec<String> {
        lock(&self.shared.0).lines.clone()
    }

    fn wait(&self, patience: Duration, wanted: impl Fn(&str) -> bool) -> Result<String, String> {
        let deadline = Instant::now() + scaled(patience);
        let mut seen = 0;
        let mut state = lock(&self.shared.0);
        loop {
            if let Some(line) = state.lines[seen..].iter().find(|line| wanted(line)) {
                return Ok(line.clone());
            }
            seen = state.lines.len();
            if state.closed {
                return Err("did not come before the end".into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("did not come within {patience:?}"));
            }
            state = self.shared.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the end of the stream. Returns false if another process still holds it open at the deadline.
    fn join(&mut self, deadline: Instant) -> bool {
        let deadline = deadline.max(Instant::now() + Duration::from_secs(5));
        let mut state = lock(&self.shared.0);
        while !state.closed && self.thread.is_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.shared.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        true
    }
}

fn lock(mutex: &Mutex<Collected>) -> MutexGuard<'_, Collected> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_says_what_it_does() {
        let sleeps = Guarded::start("sleep", Command::new("sleep").arg("100")).unwrap();
        let said = sleeps.finish(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(said.contains("Name: sleep, State: S (sleeping)"), "{said}");
        assert!(said.contains("system call ") && !said.contains("system call \n"), "{said}");
    }
}
