//! A Sidekiq that runs the jobs in `tests/rubies/jobs`, and its Redis.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::PATIENCE;
use crate::child::Guarded;
use crate::free_port;
use crate::live::{Live, rubies_dir};
use crate::ruby::Ruby;

/// Its path in Debian.
const PROGRAM: &str = "/usr/bin/sidekiq";
/// Number of jobs that it runs concurrently.
pub const CONCURRENCY: usize = 5;
/// The class of jobs that wait for each other, one per thread.
pub const MARKER: &str = "Shop::MarkerJob";

/// A Redis server without persistence.
pub struct Redis {
    process: Option<Guarded>,
    dir: PathBuf,
    port: u16,
}

impl Redis {
    /// Starts one.
    pub fn start(live: &Live) -> Result<Self> {
        let port = free_port()?;
        let mut redis = Self { process: None, dir: live.dir("redis")?, port };
        redis.restart()?;
        Ok(redis)
    }

    /// Starts it again, with empty data.
    pub fn restart(&mut self) -> Result<()> {
        let mut command = Command::new("redis-server");
        let port = self.port.to_string();
        command.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"]);
        self.process = Some(Guarded::start("redis-server", command.arg(&self.dir))?);
        let since = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(since.elapsed() < PATIENCE, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Closes the connections of all clients.
    pub fn disconnect_clients(&self) -> Result<()> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"CLIENT KILL TYPE normal\r\n")?;
        let mut reply = [0; 1];
        stream.read_exact(&mut reply)?;
        ensure!(&reply == b":", "CLIENT KILL was refused");
        Ok(())
    }

    /// Pushes this text to a queue, as Sidekiq pushes a job.
    pub fn enqueue(&self, queue: &str, job: &str) -> Result<()> {
        self.number(&["LPUSH", &format!("queue:{queue}"), job]).map(drop)
    }

    /// Number of jobs in a queue.
    pub fn waiting(&self, queue: &str) -> Result<u64> {
        self.number(&["LLEN", &format!("queue:{queue}")])
    }

    /// The integer with which Redis replies to a command (RESP: `:1`).
    fn number(&self, words: &[&str]) -> Result<u64> {
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            let _infallible = write!(command, "${}\r\n{word}\r\n", word.len());
        }
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(command.as_bytes())?;
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply)?;
        let number = reply.trim_end().strip_prefix(':').with_context(|| format!("it replied {reply:?}"))?;
        Ok(number.parse()?)
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }
}

/// What a job logged about one of its runs.
#[derive(Clone, Debug)]
pub struct Truth {
    /// Its job id.
    pub jid: String,
    /// Its class.
    pub class: String,
    /// The thread that ran it.
    pub tid: u32,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// By how much `GC.count` of its process grew during the run.
    pub gcs: u64,
    /// Its member `traceparent`.
    pub traceparent: Option<String>,
}

/// A Sidekiq that has started up.
pub struct Sidekiq {
    /// Its process.
    pub process: Guarded,
    /// The Ruby that runs it.
    ruby: Ruby,
    truth: PathBuf,
    env: Vec<(OsString, OsString)>,
}

impl Sidekiq {
    /// Whether this Ruby has a Sidekiq. Its jobs log their native thread id, which Ruby provides from 3.1 on.
    pub fn is_there(ruby: &Ruby) -> bool {
        ruby.is_at_least(3, 1) && ruby.host_path(PROGRAM).is_file()
    }

    /// Starts a Sidekiq and waits until it has started up.
    pub fn start(live: &Live, ruby: &Ruby, redis: &Redis) -> Result<Self> {
        let truth = live.path(&format!("truth-{}", ruby.label()));
        let env = vec![
            ("GCTRACE_TEST_REDIS".into(), redis.url().into()),
            ("GCTRACE_TEST_TRUTH".into(), truth.clone().into()),
            ("GCTRACE_TEST_PROC".into(), "1".into()),
            ("GCTRACE_TEST_THREADS".into(), CONCURRENCY.to_string().into()),
        ];
        let mut command = ruby.command()?;
        let threads = CONCURRENCY.to_string();
        command.args([PROGRAM, "-c", &threads, "-q", "default", "-q", "low", "-r"]).arg(script("app.rb"));
        command.envs(env.clone());
        let sidekiq =
            Self { process: Guarded::start("sidekiq", &mut command)?, ruby: ruby.clone(), truth, env };
        let title = format!("/proc/{}/cmdline", sidekiq.process.pid());
        let since = Instant::now();
        while !fs::read_to_string(&title)?.contains(&format!("[0 of {CONCURRENCY} busy]")) {
            ensure!(since.elapsed() < PATIENCE, "sidekiq does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(sidekiq)
    }

    /// Pushes jobs, each given as a class and a number: `HardJob=10`.
    pub fn push(&self, jobs: &[&str]) -> Result<()> {
        let mut command = self.ruby.command()?;
        let output = command.arg(script("push.rb")).args(jobs).envs(self.env.clone()).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// What its jobs logged, by job id. A job that failed may have run again.
    pub fn truths(&self) -> Result<HashMap<String, Vec<Truth>>> {
        let mut truths: HashMap<String, Vec<Truth>> = HashMap::new();
        let text = fs::read_to_string(&self.truth).unwrap_or_default();
        // The last line may be being written.
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let words: Vec<&str> = line.split(' ').collect();
            let [jid, class, tid, begin_ns, end_ns, before, after, trace] = words[..] else {
                anyhow::bail!("line {line}")
            };
            truths.entry(jid.to_owned()).or_default().push(Truth {
                jid: jid.to_owned(),
                class: class.to_owned(),
                tid: tid.parse()?,
                begin_ns: begin_ns.parse()?,
                end_ns: end_ns.parse()?,
                gcs: after.parse::<u64>()?.checked_sub(before.parse()?).context("GC.count went backwards")?,
                traceparent: (trace != "-").then(|| trace.to_owned()),
            });
        }
        Ok(truths)
    }

    /// Pushes jobs and waits until all existing jobs have ended. Then every thread asks for its next job: each thread has run a marker, and
    /// markers are taken after all other jobs and end together. A thread that a job killed has been replaced by another thread.
    pub fn run(&self, jobs: &[&str]) -> Result<()> {
        let before = self.ended(MARKER)?;
        let markers = format!("{MARKER}={CONCURRENCY}");
        self.push(&[jobs, &[markers.as_str()][..]].concat())?;
        self.wait_ended(MARKER, before + CONCURRENCY)
    }

    /// Number of runs of this class that have ended.
    pub fn ended(&self, class: &str) -> Result<usize> {
        Ok(self.truths()?.values().flatten().filter(|truth| truth.class == class).count())
    }

    /// Waits until this many runs of this class have ended.
    pub fn wait_ended(&self, class: &str, runs: usize) -> Result<()> {
        wait(&format!("{class} have ended"), runs, || self.ended(class))
    }

    /// Waits until this many `LongJob` have begun.
    pub fn wait_begun(&self, runs: usize) -> Result<()> {
        let begun = self.beside(".begun");
        wait("LongJob have begun", runs, || Ok(fs::read_to_string(&begun)?.matches('\n').count()))
    }

    /// Lets all `LongJob` runs end.
    pub fn release(&self) -> Result<()> {
        Ok(fs::write(self.beside(".released"), "")?)
    }

    /// The path of the log of the jobs with this suffix.
    fn beside(&self, suffix: &str) -> PathBuf {
        let mut path = self.truth.clone().into_os_string();
        path.push(suffix);
        path.into()
    }
}

/// Waits until `there` returns at least the wanted number.
fn wait(what: &str, wanted: usize, there: impl Fn() -> Result<usize>) -> Result<()> {
    let since = Instant::now();
    loop {
        let there = there()?;
        if there >= wanted {
            return Ok(());
        }
        ensure!(since.elapsed() < PATIENCE, "{there} of {wanted} {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn script(name: &str) -> PathBuf {
    let dir: &Path = &rubies_dir();
    dir.join("jobs").join(name)
}
